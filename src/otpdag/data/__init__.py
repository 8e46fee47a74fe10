"""Data: tables of any kind become a :class:`Batch` of tensors, and tensors become tables again.

Three steps, each a pure function of its arguments: :meth:`Schema.of` settles once which columns hold which
node and what the categories are called; :func:`encode` checks a table against the schema and turns it into a
batch; :func:`decode` turns tensors back into a table. NaN, None, ``pd.NA`` and ``NaT`` are missing values.
Only this package knows what columns of pandas may hold, and how files of tables are read.
"""

from otpdag.data.batch import Batch as Batch
from otpdag.data.batch import random_part as random_part
from otpdag.data.columns import ColumnType as ColumnType
from otpdag.data.columns import Label as Label
from otpdag.data.columns import Schema as Schema
from otpdag.data.columns import Table as Table
from otpdag.data.columns import as_frame as as_frame
from otpdag.data.columns import column_type as column_type
from otpdag.data.columns import column_types as column_types
from otpdag.data.columns import known_table as known_table
from otpdag.data.documents import Documents as Documents
from otpdag.data.documents import Images as Images
from otpdag.data.parts import Partitioned as Partitioned
from otpdag.data.sequences import Sequences as Sequences
from otpdag.data.table import decode as decode
from otpdag.data.table import encode as encode
