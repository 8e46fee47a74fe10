"""``otpdag init`` and ``otpdag schema``: a first model file for a table, and what an editor knows of model files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from otpdag.cli.console import DataPath, Force, Quiet, check_file, json_text, put_text, say
from otpdag.errors import ModelError, printable

if TYPE_CHECKING:
    import pandas as pd

    from otpdag.data import ColumnType
    from otpdag.mechanisms import Mechanism


def init(
    data: DataPath,
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Model file; by default DATA with the ending .yaml; - for standard output.",
        ),
    ] = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Write a model file for a table: what each column is taken for and why, and edges to fill in.

    Columns that can be no node, or that a model is better off without, stand in it as comments.
    """
    from otpdag.cli.command_files import table_at
    from otpdag.data import column_types

    piped = data == Path("-")
    beside = None if piped else data.with_suffix(".yaml")
    target = {None: beside, Path("-"): None}.get(out_file, out_file)
    check_file(target, force=force)
    table = table_at(data)
    put_text(first_model(table, "data.csv" if piped else data.name, target), target)
    if target is not None and not quiet:
        doubtful = sum(bool(one.doubt) for one in column_types(table))
        more = f" (columns marked as doubtful: {doubtful})" if doubtful else ""
        say(f"wrote {target}{more}; fill in its edges, then: otpdag fit {target} {data} --out run")


def first_model(table: pd.DataFrame, name: str, target: Path | None = None) -> str:
    """The text of a model file for a table.

    >>> import pandas as pd
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
    from otpdag.data import column_types

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
    size = one.space.width if one.space is not None else 0
    plain = {"category": f"{{type: Categorical, size: {size}}}", "count": "Poisson"}
    return plain.get(one.kind, "Normal")


def _without_python(doubt: str) -> str:
    """Advice that names mechanisms as model files do."""
    doubt = re.sub(r"\bm\.Categorical\((\d+)\)", r"{type: Categorical, size: \1}", doubt)
    return re.sub(r"\bm\.(\w+)\(\)", r"\1", doubt)


def _quoted(name: str) -> str:
    """A name that YAML reads as this text, in a list or as a key."""
    import yaml

    plain = re.fullmatch(r"[A-Za-z_][\w.]*", name) is not None and yaml.safe_load(name) == name
    return name if plain else json.dumps(name)


def _words(text: str) -> str:
    return printable(text, keep="")


# --- the schema -------------------------------------------------------------------------------------------


def schema(
    out_file: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="JSON file; standard output if left out.")
    ] = None,
    force: Force = False,
) -> None:
    """Print the JSON Schema of model files, for editors and validators."""
    check_file(out_file, force=force)
    put_text(json_text(model_schema()), out_file)


def model_schema() -> dict[str, Any]:
    """The schema; what it cannot say (cycles, names of columns, shapes of parameters) the parser does.

    >>> sorted(model_schema()["properties"])
    ['edges', 'hidden', 'nodes']
    """
    from otpdag.cli.model_file import needs_code
    from otpdag.graph import MOST_STEPS_BACK
    from otpdag.mechanisms.spec import registered

    name = {"type": "string", "minLength": 1}
    numbers = {"anyOf": [{"type": "number"}, {"type": "array", "items": {"$ref": "#/$defs/numbers"}}]}
    kinds = {name: kind for name, kind in registered().items() if not needs_code(kind) and _is_ours(kind)}
    lag = {"type": "integer", "minimum": 1, "maximum": MOST_STEPS_BACK}
    edge = {"type": "array", "prefixItems": [name, name, lag], "minItems": 2, "maxItems": 3}
    entries = [{"type": "null"}, {"enum": sorted(kinds)}, *(_entry(name, kind) for name, kind in sorted(kinds.items()))]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "otpdag model file",
        "description": "A directed graphical model: its edges, hidden nodes and the mechanisms of its nodes.",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "edges": {
                "description": "[parent, child], or [parent, child, lag] for an edge from lag steps earlier.",
                "type": "array",
                "items": edge,
            },
            "hidden": {"description": "Nodes that no column shows.", "type": "array", "items": name},
            "nodes": {
                "description": "For each listed node its mechanism: a name, or its type with arguments.",
                "type": "object",
                "additionalProperties": {"anyOf": entries},
            },
        },
        "$defs": {"numbers": numbers, "setting": _setting(), "space": _space()},
    }


def _is_ours(kind: type) -> bool:
    """Whether a class is the library's: what users register is not published."""
    return kind.__module__.startswith("otpdag.")


def _entry(name: str, kind: type[Mechanism]) -> dict[str, Any]:
    from otpdag.cli.model_file import arguments_of

    properties: dict[str, Any] = {"type": {"const": name}}
    for argument, told in arguments_of(kind).model_json_schema()["properties"].items():
        shared = told.get("$anchor")
        plain = {key: value for key, value in told.items() if key not in ("title", "default")}
        properties[argument] = plain if shared is None else {"$ref": f"#/$defs/{shared}"}
    return {"type": "object", "properties": properties, "required": ["type"], "additionalProperties": False}


def _setting() -> dict[str, Any]:
    """A number or list fixes a parameter; a mapping of one key fixes, starts or ties it."""
    values = {"fix": {"$ref": "#/$defs/numbers"}, "start": {"$ref": "#/$defs/numbers"}, "tie": {"type": "string"}}
    single = [
        {"type": "object", "properties": {key: value}, "required": [key], "additionalProperties": False}
        for key, value in values.items()
    ]
    return {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/numbers"}, *single]}


def _space() -> dict[str, Any]:
    from otpdag.cli.model_file import MOST_COORDINATES
    from otpdag.spaces import Space

    size = {"type": "integer", "minimum": 1, "maximum": MOST_COORDINATES}
    kinds = {"enum": sorted(name for name, kind in Space.kinds.items() if _is_ours(kind))}
    return {
        "anyOf": [
            kinds,
            {"type": "object", "properties": {"type": kinds}, "required": ["type"], "additionalProperties": size},
        ]
    }
