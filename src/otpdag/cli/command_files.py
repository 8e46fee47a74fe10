"""Tables and models that commands read and write.

CSV files as text beside the table that they hold: to say which cell is wrong, and to change only what is missing.
"""

from __future__ import annotations

import csv
import itertools
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import typer

from otpdag.cli.console import RUN_FILES, STANDARD_INPUT, say, warn, write_file, write_out
from otpdag.data import Sequences
from otpdag.data.columns import cell_names
from otpdag.data.parts import read_table, table_bytes
from otpdag.errors import DataError, ModelError
from otpdag.files import finish_transaction
from otpdag.model import Model, load


def table_at(path: Path) -> pd.DataFrame:
    """Read a table; one whose rows have more cells than its header is refused. ``-`` is CSV from standard input."""
    if path == STANDARD_INPUT:
        return _piped()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pd.errors.DtypeWarning)  # mixed columns are told by their cell, later
            table = read_table(path)
    except DataError:
        raise
    except (ValueError, OSError, OverflowError, MemoryError) as error:  # pandas' parser errors are ValueErrors
        raise DataError(f"{path}: cannot be read as a table: {error}") from None
    if path.suffix in (".csv", ".tsv"):
        check_shape(path)
        check_digits(table)
    return table


def _piped() -> pd.DataFrame:
    """Standard input, by way of a file, so that it is checked like one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "standard-input.csv"
        path.write_bytes(typer.get_binary_stream("stdin").read())
        return table_at(path)


def table_for(model: Model, path: Path) -> pd.DataFrame:
    """A table whose numbers are numbers."""
    table = table_at(path)
    check_cells(table, model)
    return table


def model_and_rows(path: Path, data: Path, sequence: str | None = None, time: str | None = None) -> tuple[Model, Any]:
    """A saved model and what it is asked about: the rows of a table, or its sequences."""
    model = model_at(path)
    return model, as_steps(table_for(model, data), sequence, time)


def as_steps(table: pd.DataFrame, sequence: str | None, time: str | None) -> pd.DataFrame | Sequences:
    """The table itself, or its rows as steps of sequences where a column tells them apart or orders them."""
    return table if sequence is None and time is None else Sequences(table, sequence=sequence, time=time)


def model_at(path: Path) -> Model:
    """Read a saved model; the folder of a fit will do."""
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
    content = table_bytes(table, path or Path("standard-output.csv"))
    if path is None:
        write_out(content.decode("utf-8"))
    else:
        write_file(path, content)
        say(f"wrote {len(table):,} rows to {path}")


# a field, quoted or not, and what ends it; text that follows a closing quote belongs to the field, as pandas has it
_FIELD = re.compile(r'("(?:[^"]|"")*"[^,\r\n]*|[^,\r\n]*)(,|\r\n|\n|\r|\Z)')
_NEEDS_QUOTES = re.compile(r'[",\r\n]')
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:[ ',.]\d{3})+(?:[.,]\d+)?")


@dataclass(frozen=True)
class CsvText:
    r"""The text of a CSV file: for each line its fields as they are written, and what ends it.

    >>> text = CsvText.of('id,x\n007,\n"a, b",1.10\n')
    >>> print(text.with_cells({(0, 1): 2.5}), end="")
    id,x
    007,2.5
    "a, b",1.10
    """

    lines: tuple[tuple[str, ...], ...]
    ends: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> CsvText:
        """Split a text."""
        lines, ends, fields = [], [], []
        at = 0
        while at < len(text):
            match = _FIELD.match(text, at)
            if match is None:  # a quote that is never closed, which pandas refuses before
                raise DataError("a quoted cell has no end")
            fields.append(match[1])
            at = match.end()
            if match[2] != "," or at == len(text):
                fields += [""] * (match[2] == ",")
                lines.append(tuple(fields))
                ends.append("" if match[2] == "," else match[2])
                fields = []
        return cls(tuple(lines), tuple(ends))

    @property
    def rows(self) -> list[int]:
        """The lines that hold rows: all but the header and blank ones, which are skipped."""
        filled = [number for number, line in enumerate(self.lines) if len(line) > 1 or line[0].strip("\ufeff \t")]
        return filled[1:]

    def with_cells(self, cells: dict[tuple[int, int], Any]) -> str:
        """The text with other values in some cells, by row and column; every other byte stays."""
        rows = self.rows
        lines = list(map(list, self.lines))
        for (row, column), value in cells.items():
            line = lines[rows[row]]
            line += [""] * (column + 1 - len(line))
            line[column] = _written(value)
        return "".join(",".join(line) + end for line, end in zip(lines, self.ends, strict=True))


def read_csv_text(path: Path, table: pd.DataFrame) -> CsvText:
    """The text of a file that was read as ``table``.

    Raises:
        DataError: Text and table do not have the same rows and columns.
    """
    with path.open(encoding="utf-8", newline="") as file:
        text = CsvText.of(file.read())
    header = next((line for line in text.lines if len(line) > 1 or line[0].strip("\ufeff \t")), ())
    if len(text.rows) != len(table) or len(header) != table.shape[1]:
        raise DataError(
            f"{path}: as text it has {len(text.rows)} rows of {len(header)} columns, as a table {len(table)} of "
            f"{table.shape[1]}; is a quotation mark missing?"
        )
    return text


def _written(value: Any) -> str:
    text = repr(float(value)) if isinstance(value, float) else str(value)
    return '"' + text.replace('"', '""') + '"' if _NEEDS_QUOTES.search(text) else text


def check_shape(path: Path) -> None:
    """Refuse a CSV file whose rows have more cells than its header: pandas would shift all columns."""
    separator = "\t" if path.suffix == ".tsv" else ","
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, first = itertools.islice(
                (row for row in csv.reader(file, delimiter=separator) if any(row) or len(row) > 1), 2
            )
    except (ValueError, csv.Error):  # no rows, or nothing that a CSV reader reads: pandas says what
        return
    if len(first) > len(header):
        comma = " (a comma at the end of every row?)" if len(first) == len(header) + 1 and not first[-1] else ""
        raise DataError(
            f"{path}: the rows have {len(first)} cells, the header names {len(header)}{comma}; name every column, or "
            f"end the rows after {header[-1]!r:.60}"
        )


def check_digits(table: pd.DataFrame) -> None:
    """Refuse whole numbers of so many digits that they are no floating number."""
    for name in [name for name in table.columns if pd.api.types.is_object_dtype(table[name])]:
        for row, value in enumerate(table[name].array):
            if type(value) is int and abs(value) > sys.float_info.max:
                raise DataError(f"column {name!r} must hold finite numbers; found {str(value)[:20]}... in row {row}")


def check_numbers(column: pd.Series[Any]) -> None:
    """Refuse text in a column most of whose cells are numbers: one odd cell would make each of them a category.

    Raises:
        DataError: With the row and the column of the first cell that is no number.

    >>> check_numbers(pd.Series(["1.5", "2,5", "3.5"], name="x"))
    Traceback (most recent call last):
    otpdag.errors.DataError: column 'x' holds numbers, but '2,5' in row 1 (line 3) is none; ...
    """
    if pd.api.types.is_numeric_dtype(column.dtype) or isinstance(column.dtype, pd.CategoricalDtype):
        return
    present = [str(value) for value in column.dropna().array]
    likely = sum(_is_number(value) or _is_odd_number(value) for value in present)
    place = _first_odd(column)
    if place is None or 2 * likely <= len(present):
        return
    raise DataError(
        f"column {column.name!r} holds numbers, but {_shown(column, place)} is none; correct the cell or leave it "
        f"empty, or list {column.name!r} as Categorical in the model file"
    )


def check_cells(table: pd.DataFrame, model: Model) -> None:
    """Refuse text in the columns of a model's numbers, by its cell: pandas makes all cells of such a column text."""
    for node in model.graph.observed:
        space = model.spaces[node]
        for name in () if space.is_discrete else cell_names(node, space):
            place = _first_odd(table[name]) if name in table.columns else None
            if place is not None:
                raise DataError(
                    f"column {name!r} must hold numbers; {_shown(table[name], place)} is none: correct the cell or "
                    "leave it empty"
                )


def _first_odd(column: pd.Series[Any]) -> int | None:
    """The row of the first text that is no number."""
    if pd.api.types.is_numeric_dtype(column.dtype):
        return None
    odd = (row for row, value in enumerate(column.array) if isinstance(value, str) and not _is_number(value))
    return next(odd, None)


def _shown(column: pd.Series[Any], place: int) -> str:
    return f"{str(column.iloc[place])!r:.60} in row {place} (line {place + 2})"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def _is_odd_number(text: str) -> bool:
    """Whether a text is a number for a reader: with a decimal comma, groups of digits, a percent or currency sign."""
    bare = text.strip("%€$£ ")
    return _GROUPED.fullmatch(bare) is not None or _is_number(bare.replace(",", ".", 1))
