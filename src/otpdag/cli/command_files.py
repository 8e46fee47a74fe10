"""Tables and models that commands read and write; of a CSV file only those cells change that are filled."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from otpdag.cli.console import RUN_FILES, STANDARD_INPUT, look_for_garbage, say, warn, write_file, write_out
from otpdag.errors import DataError, ModelError
from otpdag.files import finish_transaction

if TYPE_CHECKING:
    import pandas as pd

    from otpdag.data import Sequences
    from otpdag.model import Model


def table_at(path: Path, separator: str | None = None, decimal: str | None = None) -> pd.DataFrame:
    """Read a table and say what is not usual about its file; ``-`` is CSV from standard input.

    One whose rows have more cells than its header is refused.
    """
    from pandas.errors import DtypeWarning

    from otpdag.data.reading import NAMED, read_table

    look_for_garbage()
    if path == STANDARD_INPUT:
        with tempfile.TemporaryDirectory() as folder:  # by way of a file, so that it is checked like one
            copy = Path(folder) / "standard-input.csv"
            copy.write_bytes(typer.get_binary_stream("stdin").read())
            return table_at(copy, separator, decimal)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DtypeWarning)  # mixed columns are told by their cell, later
        table = read_table(path, separator=separator, decimal=decimal)
    if NAMED in table.attrs["read_as"]:
        raise DataError(f"{path}: a row has {table.shape[1] + 1} cells, the header {table.shape[1]}: name every column")
    if table.attrs["read_as"]:
        say(f"{path} is read with {', '.join(table.attrs['read_as'])}")
    return table


def model_and_rows(
    path: Path,
    data: Path,
    sequence: str | None = None,
    time: str | None = None,
    separator: str | None = None,
    decimal: str | None = None,
) -> tuple[Model, Any]:
    """A saved model and what it is asked about: the rows of a table, or its sequences."""
    return model_at(path), as_steps(table_at(data, separator, decimal), sequence, time)


def as_steps(table: pd.DataFrame, sequence: str | None, time: str | None) -> pd.DataFrame | Sequences:
    """The table itself, or its rows as steps of sequences where a column tells them apart or orders them."""
    from otpdag.data import Sequences

    return table if sequence is None and time is None else Sequences(table, sequence=sequence, time=time)


def model_at(path: Path) -> Model:
    """Read a saved model; the folder of a fit will do."""
    from otpdag.model import load

    look_for_garbage()
    if path.is_dir():
        finish_transaction(path, RUN_FILES)
    if path.suffix in (".yaml", ".yml", ".json"):
        raise ModelError(f"{path} is a model file, which has no parameters yet: otpdag fit {path} DATA finds them")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model = load(path / "model.otp" if path.is_dir() else path)
    for message in caught:
        warn(str(message.message))
    return model


def put_table(table: pd.DataFrame, path: Path | None) -> None:
    """Write a file, as CSV unless it ends in ``.tsv`` or ``.parquet``; or CSV to standard output."""
    from otpdag.data.parts import table_bytes

    content = table_bytes(table, path or Path("standard-output.csv"))
    if path is None:
        write_out(content.decode("utf-8"))
    else:
        write_file(path, content)
        say(f"wrote {len(table):,} rows to {path}")


# a field, quoted or not, and what ends it; text that follows a closing quote belongs to the field, as pandas has it
_FIELD = re.compile(r'("(?:[^"]|"")*"[^,\r\n]*|[^,\r\n]*)(,|\r\n|\n|\r|\Z)')


def with_cells(path: Path, table: pd.DataFrame, cells: Mapping[tuple[int, int], Any]) -> str:
    """The text of a CSV file with other values in some cells, by row and column; every other byte stays.

    Args:
        path: The file.
        table: What was read from it.
        cells: The values.

    Raises:
        DataError: Text and table do not have the same rows and columns.
    """
    lines: list[list[list[str]]] = [[]]
    with path.open(encoding="utf-8", newline="") as file:
        for field, end in _FIELD.findall(file.read()):
            lines[-1].append([field, end])
            if end != ",":
                lines.append([])
    filled = [line for line in lines if len(line) > 1 or (line and line[0][0].strip("\ufeff \t"))]
    if len(filled) != 1 + len(table) or len(filled[0]) != table.shape[1]:
        raise DataError(
            f"{path}: as text it has {len(filled) - 1} rows of {len(filled[0])} columns, as a table {len(table)} of "
            f"{table.shape[1]}; is a quotation mark missing?"
        )
    for (row, column), value in cells.items():
        line = filled[1 + row]
        while len(line) <= column:  # cells that are left out at the end of a row
            line.append(["", line[-1][1]])
            line[-2][1] = ","
        text = repr(float(value)) if isinstance(value, float) else str(value)
        line[column][0] = '"' + text.replace('"', '""') + '"' if re.search(r'[",\r\n]', text) else text
    return "".join(field + end for line in lines for field, end in line)
