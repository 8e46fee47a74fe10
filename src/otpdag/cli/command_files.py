"""Tables and models that commands read and write."""

from __future__ import annotations

import hashlib
import io
import tempfile
import warnings
from pathlib import Path

import pandas as pd
import typer

from otpdag.cli.console import RUN_FILES, say, warn, write_file, write_out
from otpdag.cli.csv_files import check_digits, check_shape
from otpdag.cli.file_arguments import RowsFile
from otpdag.data import Sequences, read_table
from otpdag.errors import DataError, ModelError
from otpdag.files import finish_transaction
from otpdag.model import Model, load

__all__ = ["STANDARD_INPUT", "as_steps", "csv_text", "file_hash", "model_at", "put_table", "table_at"]


STANDARD_INPUT = Path("-")
"""What stands for CSV that is piped in."""


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


def as_steps(table: pd.DataFrame, file: RowsFile) -> pd.DataFrame | Sequences:
    """The table itself, or its rows as steps of sequences where a column tells them apart or orders them."""
    plain = file.sequence is None and file.time is None
    return table if plain else Sequences(table, sequence=file.sequence, time=file.time)


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


def put_table(table: pd.DataFrame, path: Path | None, *, index: bool = False) -> None:
    """Write a file, as CSV unless it ends in ``.tsv`` or ``.parquet``; or CSV to standard output."""
    if path is None:
        write_out(csv_text(table, index=index))
        return
    separator = "\t" if path.suffix == ".tsv" else ","
    parquet = path.suffix == ".parquet"
    write_file(path, _as_parquet(table, path, index) if parquet else csv_text(table, index=index, separator=separator))
    say(f"wrote {len(table):,} rows to {path}")


def csv_text(table: pd.DataFrame, *, index: bool = False, separator: str = ",") -> str:
    """A table as CSV, or with another separator."""
    return str(table.to_csv(sep=separator, index=index, lineterminator="\n"))


def _as_parquet(table: pd.DataFrame, path: Path, index: bool) -> bytes:
    buffer = io.BytesIO()
    try:
        table.to_parquet(buffer, index=index)
    except ImportError:
        raise DataError(f"{str(path)!r} needs the package pyarrow: pip install pyarrow") from None
    return buffer.getvalue()


def file_hash(path: Path) -> str:
    """SHA-256 of a file, by which a report tells whether a table is still the one that was fitted."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
