"""What the folder of a fit holds, read back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from otpdag.errors import DataError, ModelError
from otpdag.model import Model, load


@dataclass(frozen=True)
class Run:
    """A fitted model and how it came about.

    Attributes:
        model: The fitted model.
        summary: What ``summary.json`` says: method, status, loss, rows, seed, version, notes, the table's name.
        history: Loss and its terms at each step of the start that was kept.
        restarts: Every start with its loss.
        intervals: Ends of intervals by node, parameter and index, where they were asked for.
        errors: Standard errors, intervals and notes of all estimates, in their order, where there are any.
    """

    model: Model
    summary: dict[str, Any] = field(default_factory=dict)
    history: pd.DataFrame = field(default_factory=pd.DataFrame)
    restarts: pd.DataFrame = field(default_factory=pd.DataFrame)
    intervals: pd.DataFrame | None = None
    errors: pd.DataFrame | None = None


def read_run(folder: str | Path) -> Run:
    """Read the folder that ``otpdag fit`` wrote.

    Raises:
        ModelError: There is no such folder, or it holds no fit.
        DataError: One of its files cannot be read; the message names it.
    """
    folder = Path(folder)
    if not (folder / "model.otp").is_file():
        raise ModelError(f"{str(folder)!r} must be the folder of a fit; it has no model.otp")
    intervals, errors = folder / "intervals.csv", folder / "errors.csv"
    return Run(
        model=load(folder / "model.otp"),
        summary=_summary(folder / "summary.json"),
        history=_table(folder / "history.csv"),
        restarts=_table(folder / "restarts.csv"),
        intervals=_table(intervals) if intervals.is_file() else None,
        errors=_table(errors) if errors.is_file() else None,
    )


def _summary(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: must hold an object; got {type(content).__name__}")
    return content


def _table(path: Path) -> pd.DataFrame:
    if not path.is_file() or not path.stat().st_size:
        return pd.DataFrame()
    try:
        return pd.read_csv(path)
    except ValueError as error:  # pandas' parser errors are ValueErrors
        raise DataError(f"{path}: cannot be read as a table: {error}") from None
