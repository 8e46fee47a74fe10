"""``otpdag init``: from a table to a first model file, which says what was chosen and why."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import yaml

from otpdag.cli.command_files import STANDARD_INPUT, table_at
from otpdag.cli.console import check_file, say, write_file, write_out
from otpdag.data.types import ColumnType, column_types
from otpdag.errors import ModelError, printable
from otpdag.spaces import Count, Discrete

STANDARD_OUTPUT = Path("-")
_PYTHON_CATEGORY = re.compile(r"\bm\.Categorical\((\d+)\)")
_PYTHON_MECHANISM = re.compile(r"\bm\.(\w+)\(\)")


def write_first_model(data: Path, out_file: Path | None, *, quiet: bool, force: bool) -> None:
    """Write a model file for a table, beside it unless said otherwise; of standard input, to standard output."""
    beside = None if data == STANDARD_INPUT else data.with_suffix(".yaml")
    target = {None: beside, STANDARD_OUTPUT: None}.get(out_file, out_file)
    check_file(target, force=force)
    table = table_at(data)
    text = first_model(table, data.name if data != STANDARD_INPUT else "data.csv", target)
    if target is None:
        write_out(text)
        return
    write_file(target, text)
    if not quiet:
        doubtful = sum(bool(one.doubt) for one in column_types(table))
        more = f" (columns marked as doubtful: {doubtful})" if doubtful else ""
        say(f"wrote {target}{more}; fill in its edges, then: otpdag fit {target} {data} --out run")


def first_model(table: pd.DataFrame, name: str, target: Path | None = None) -> str:
    """The text of a model file for a table.

    >>> table = pd.DataFrame({"dose": [0.5, 1.5, 2.25], "cured": ["yes", "no", "yes"]})
    >>> print(first_model(table, "trial.csv"))  # doctest: +ELLIPSIS
    # A model of trial.csv: 3 rows, 2 columns.
    ...
    nodes:
      # numbers with fractions, 3 values
      dose: Normal
      # text with 2 levels
      cured: {type: Categorical, size: 2}
    <BLANKLINE>
    """
    types = column_types(table)
    if not any(_is_kept(one) for one in types):
        raise ModelError(f"{name}: no column can be a node" + "".join(f"; {one}" for one in types[:3]))
    return "\n".join([*_head(table, types, name, target), "nodes:", *_nodes(types), ""])


def _head(table: pd.DataFrame, types: list[ColumnType], name: str, target: Path | None) -> Iterator[str]:
    kept = [_quoted(one.column) for one in types if _is_kept(one)]
    parent, child = kept[0], kept[-1]
    file = "model.yaml" if target is None else target.name
    plural = "s" if table.shape[1] != 1 else ""
    yield f"# A model of {_words(name)}: {len(table):,} rows, {table.shape[1]} column{plural}."
    yield "#"
    yield "# Say below which columns depend on which, from parent to child. Then:"
    yield f"#   otpdag fit {_words(file)} {_words(name)} --out run && otpdag report run"
    yield ""
    yield "edges: []"
    yield "# edges:"
    if parent != child:
        yield f"#   - [{parent}, {child}]"
    yield f"#   - [group, {child}]      # from a hidden node, see below"
    yield f"#   - [{child}, {child}, 1]    # from one step earlier, where rows are steps in time"
    yield ""
    yield "# Nodes that no column shows; each needs a line under nodes, such as"
    yield "#   group: {type: Categorical, size: 3}"
    yield "hidden: []"
    yield ""
    yield "# What each column is taken for, and why. A column without edges is modelled on its own; delete its line to"
    yield "# leave it out."


def _nodes(types: list[ColumnType]) -> Iterator[str]:
    for one in types:
        yield f"  # {_words(one.reason)}"
        if one.doubt:
            yield f"  # DOUBTFUL: {_words(_without_python(one.doubt))}"
        entry = f"{_quoted(one.column)}: {_mechanism(one)}"
        yield f"  {entry}" if _is_kept(one) else f"  # {entry}"


def _is_kept(one: ColumnType) -> bool:
    return one.space is not None and not one.useless


def _mechanism(one: ColumnType) -> str:
    if isinstance(one.space, Discrete):
        return f"{{type: Categorical, size: {one.space.size}}}"
    return "Poisson" if isinstance(one.space, Count) else "Normal"


def _without_python(doubt: str) -> str:
    """Advice that names mechanisms as model files do."""
    return _PYTHON_MECHANISM.sub(r"\1", _PYTHON_CATEGORY.sub(r"{type: Categorical, size: \1}", doubt))


def _quoted(name: str) -> str:
    """A name that YAML reads as this text, in a list or as a key."""
    plain = re.fullmatch(r"[A-Za-z_][\w.]*", name) is not None and yaml.safe_load(name) == name
    return name if plain else json.dumps(name)


def _words(text: str) -> str:
    return printable(text, keep="")
