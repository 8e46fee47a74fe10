"""Tables in files: CSV, TSV and Parquet."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from otpdag.errors import DataError

__all__ = ["read_table", "write_table"]


def read_table(path: str | Path) -> pd.DataFrame:
    """Read a table from a file.

    Args:
        path: A file that ends in ``.csv``, ``.tsv`` (cells between tabs) or ``.parquet``; the last needs pyarrow.

    Returns:
        The table.

    Raises:
        DataError: The file is of another kind, does not exist, or needs a package that is not installed.
    """
    path = Path(path)
    if path.suffix not in (".csv", ".tsv", ".parquet"):
        raise DataError(f"path must end in .csv, .tsv or .parquet; got {str(path)!r}")
    if not path.is_file():
        raise DataError(f"path must be a file that exists; got {str(path)!r}")
    if path.suffix != ".parquet":
        return pd.read_csv(path, sep="\t" if path.suffix == ".tsv" else ",")
    try:
        return pd.read_parquet(path)
    except ImportError as error:
        raise DataError(f"path {str(path)!r} needs the package pyarrow: pip install pyarrow") from error


def write_table(table: pd.DataFrame, path: str | Path, *, index: bool = False) -> None:
    """Write a table to a file, into a folder that is made if there is none.

    Args:
        table: The table.
        path: A file; one that ends in ``.parquet`` needs pyarrow, ``.tsv`` has tabs, any other becomes CSV.
        index: Whether the index becomes a column.

    Raises:
        DataError: The file needs a package that is not installed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".parquet":
        table.to_csv(path, sep="\t" if path.suffix == ".tsv" else ",", index=index, lineterminator="\n")
        return
    try:
        table.to_parquet(path, index=index)
    except ImportError:
        raise DataError(f"{str(path)!r} needs the package pyarrow: pip install pyarrow") from None
