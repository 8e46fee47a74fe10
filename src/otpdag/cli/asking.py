"""What the commands that ask a model or a model file something do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from otpdag.choice import compare as compare_models
from otpdag.choice import select as select_model
from otpdag.cli.command_files import as_steps, check_cells, model_at, put_table, table_at
from otpdag.cli.console import RowsFile, TableOutput, check_file, out, say, write_out
from otpdag.cli.model_file import ModelFile, read_model_file
from otpdag.cli.using import setting, table_for
from otpdag.engine import fit
from otpdag.errors import ModelError
from otpdag.model import Model

MOST_SIZES = 50  # that one command fits


def summary(
    model_file: Path,
    data: RowsFile,
    *,
    errors: Literal["information", "sandwich", "bootstrap"],
    level: float,
    seed: int,
    as_json: bool,
) -> None:
    """Fit, and print estimates with their standard errors."""
    table = table_at(data.path)
    model = _built(read_model_file(model_file), table)
    told = fit(model, as_steps(table, data), seed=seed).summary(errors=errors, level=level, seed=seed)
    if as_json:
        _put_json({"facts": dict(told.facts), "warnings": list(told.warnings), "estimates": _records(told.table)})
    else:
        out().print(str(told), markup=False)


def predict(
    model_path: Path,
    data: RowsFile,
    node: str,
    to: TableOutput,
    *,
    probabilities: bool,
    partial: bool,
) -> None:
    """Predict a node for each row."""
    check_file(to.path, force=to.force)
    model = model_at(model_path)
    rows = as_steps(table_for(model, data.path), data)
    told = (
        model.predict_proba(rows, node, partial=partial)
        if probabilities
        else model.predict(rows, node, partial=partial)
    )
    put_table(told.to_frame() if isinstance(told, pd.Series) else told, to.path)


def forecast(
    model_path: Path,
    data: RowsFile,
    to: TableOutput,
    *,
    steps: int,
    level: float,
    seed: int,
) -> None:
    """Tell what comes after each sequence."""
    check_file(to.path, force=to.force)
    model = model_at(model_path)
    rows = as_steps(table_for(model, data.path), data)
    told = model.forecast(rows, steps, level=level, seed=seed)
    put_table(told.reset_index() if told.index.names != [None] else told, to.path)


def effect(
    model_path: Path, treatment: str, outcome: str, *, values: str, data: Path | None, level: float, as_json: bool
) -> None:
    """Tell what setting one node does to another."""
    model = model_at(model_path)
    wanted = [setting(model, f"{treatment}={value.strip()}", "--values")[1] for value in values.split(",")]
    table = None if data is None else table_for(model, data)
    told = model.effect(treatment, outcome, values=wanted, data=table, level=level)
    if as_json:
        identified = str(told.identification)
        _put_json({"effects": _records(told.table.reset_index()), "identified": identified})
        return
    write_out(told.table.reset_index().to_csv(index=False, lineterminator="\n"))
    say(str(told.identification))


def compare(
    data: RowsFile,
    model_files: list[Path],
    *,
    folds: int,
    seed: int,
    as_json: bool,
) -> None:
    """Compare model files on one table."""
    table = table_at(data.path)
    names = [str(path) for path in model_files]
    models = {name: _built(read_model_file(path), table) for name, path in zip(names, model_files, strict=True)}
    _put(compare_models(models, as_steps(table, data), folds=folds, seed=seed), as_json)


def select(
    model_file: Path,
    data: RowsFile,
    node: str,
    *,
    sizes: str,
    criterion: Literal["bic", "aic", "cv"],
    seed: int,
    as_json: bool,
) -> None:
    """Choose the number of categories of a hidden node."""
    file, table = read_model_file(model_file), table_at(data.path)
    if node not in file.hidden or (file.nodes.get(node) or {}).get("type") != "Categorical":
        raise ModelError(
            f"NODE must be a hidden Categorical of the model file, whose hidden nodes are {file.hidden}; got {node!r}"
        )

    def builder(size: int) -> Model:
        nodes = {**file.nodes, node: {**(file.nodes[node] or {}), "size": size}}
        return _built(file.model_copy(update={"nodes": nodes}), table)

    steps = as_steps(table, data)
    chosen = select_model(builder, _sizes(sizes), steps, criterion=criterion, seed=seed)
    _put(chosen.table.rename_axis("size"), as_json)
    say(f"{chosen.best} categories of {node} are best by {criterion}")


def _sizes(text: str) -> range:
    """Read ``2-6``, or a single number."""
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text.strip())
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high < low + MOST_SIZES:
        raise ModelError(f"--sizes must be LOW-HIGH, at most {MOST_SIZES} numbers from 1 on; got {text!r}")
    return range(low, high + 1)


def _built(file: ModelFile, table: pd.DataFrame) -> Model:
    model = file.build(table)
    check_cells(table, model)
    return model


def _put(table: pd.DataFrame, as_json: bool) -> None:
    if as_json:
        _put_json(_records(table.reset_index()))
    else:
        write_out(table.reset_index().to_csv(index=False, lineterminator="\n"))


def _put_json(content: Any) -> None:
    write_out(json.dumps(content, indent=1, default=_plain) + "\n")


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows by column; what is no number is null."""
    return [
        {str(key): None if isinstance(value, float) and not np.isfinite(value) else value for key, value in row.items()}
        for row in table.to_dict(orient="records")
    ]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)
