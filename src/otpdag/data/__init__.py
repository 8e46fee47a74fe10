"""Data: tables of any kind become a :class:`Batch` of tensors, and tensors become tables again.

Three steps, each a pure function of its arguments: :meth:`Schema.of` settles once which columns hold which
node and what the categories are called; :func:`encode` checks a table against the schema and turns it into a
batch; :func:`decode` turns tensors back into a table. NaN, None, ``pd.NA`` and ``NaT`` are missing values.
Only this package knows what columns of pandas may hold, and how files of tables are read.
"""

from otpdag.data.batch import Batch, random_part
from otpdag.data.columns import ColumnType, Label, Schema, Table, as_frame, column_type, column_types, known_table
from otpdag.data.documents import Documents, Images
from otpdag.data.parts import Partitioned
from otpdag.data.sequences import Sequences
from otpdag.data.table import decode, encode

__all__ = [
    "Batch",
    "ColumnType",
    "Documents",
    "Images",
    "Label",
    "Partitioned",
    "Schema",
    "Sequences",
    "Table",
    "as_frame",
    "column_type",
    "column_types",
    "decode",
    "encode",
    "known_table",
    "random_part",
]
