"""Tables in files."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest

from otpdag.data import read_table, write_table
from otpdag.errors import DataError


def test_read_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    table.to_csv(tmp_path / "table.csv", index=False)
    pd.testing.assert_frame_equal(read_table(str(tmp_path / "table.csv")), table)
    with pytest.raises(DataError, match=r"path must end in \.csv, \.tsv or \.parquet; got 'table.xls'"):
        read_table("table.xls")
    with pytest.raises(DataError, match=r"path must be a file that exists; got 'nowhere.csv'"):
        read_table("nowhere.csv")
    (tmp_path / "table.parquet").write_bytes(b"")
    for name in ("pyarrow", "fastparquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=r"table.parquet' needs the package pyarrow: pip install pyarrow"):
        read_table(tmp_path / "table.parquet")


def test_read_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    table = pd.DataFrame({"a": [1, 2]})
    table.to_parquet(tmp_path / "table.parquet")
    pd.testing.assert_frame_equal(read_table(tmp_path / "table.parquet"), table)


def test_write_table_makes_the_folder(tmp_path: Path) -> None:
    table = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    path = tmp_path / "new" / "table.csv"
    write_table(table, path)
    assert path.read_text() == "a,b\n1,x\n2,y\n"
    assert read_table(path).equals(table)


def test_writing_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "fastparquet", None)
    with pytest.raises(DataError, match="needs the package pyarrow"):
        write_table(pd.DataFrame({"a": [1]}), tmp_path / "table.parquet")
