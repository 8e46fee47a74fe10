"""Data: tables of any kind become a :class:`Batch` of tensors, and tensors become tables again.

Three steps, each a pure function of its arguments: :meth:`Schema.of` settles once which columns hold which
node and what the categories are called; :func:`encode` checks a table against the schema and turns it into a
batch; :func:`decode` turns tensors back into a table. NaN, None, ``pd.NA`` and ``NaT`` are missing values.
Only this package knows what columns of pandas may hold, and how files of tables are read.
"""

from otpdag.data.batch import (
    Batch,
    canonical_order,
    distinct_rows,
    random_part,
    rows_by_content,
    unique_rows,
)
from otpdag.data.documents import Documents, Images
from otpdag.data.part_table import PartTable, Reading, open_table
from otpdag.data.partitioned import Partitioned, Parts, is_partitioned
from otpdag.data.reading import Column, Label, Table, as_frame, known_table, read_table, write_table
from otpdag.data.schema import Schema
from otpdag.data.sequences import (
    SequenceBatch,
    Sequences,
    SequenceTable,
    as_sequences,
    encode_sequences,
    replace_table,
)
from otpdag.data.table import Cells, decode, encode, read_cells
from otpdag.data.types import ColumnType, column_type, column_types, count_categories, infer_space

__all__ = [
    "Batch",
    "Cells",
    "Column",
    "ColumnType",
    "Documents",
    "Images",
    "Label",
    "PartTable",
    "Partitioned",
    "Parts",
    "Reading",
    "Schema",
    "SequenceBatch",
    "SequenceTable",
    "Sequences",
    "Table",
    "as_frame",
    "as_sequences",
    "canonical_order",
    "column_type",
    "column_types",
    "count_categories",
    "decode",
    "distinct_rows",
    "encode",
    "encode_sequences",
    "infer_space",
    "is_partitioned",
    "known_table",
    "open_table",
    "random_part",
    "read_cells",
    "read_table",
    "replace_table",
    "rows_by_content",
    "unique_rows",
    "write_table",
]
