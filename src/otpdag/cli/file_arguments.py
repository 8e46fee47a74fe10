"""What commands are told about the files that they read and write; light, so that help costs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["RowsFile", "TableOutput"]


@dataclass(frozen=True)
class RowsFile:
    """A table, and which of its columns tell sequences apart and order their steps."""

    path: Path
    sequence: str | None = None
    time: str | None = None


@dataclass(frozen=True)
class TableOutput:
    """Where a table goes: standard output if there is no path."""

    path: Path | None
    force: bool
