"""The JSON Schema of model files, for editors: it is made from what the parser reads, and published with the pages.

``python -m tools.model_schema > docs/model-file.schema.json`` writes it again; a test asks whether that is needed.
"""

from __future__ import annotations

import sys
from typing import Any

from otpdag.cli.console import json_text
from otpdag.cli.model_file import MOST_COORDINATES, PRIORS, arguments_of, needs_code
from otpdag.graph import MOST_STEPS_BACK
from otpdag.mechanisms import Mechanism
from otpdag.mechanisms.base import registered
from otpdag.spaces import Space


def model_schema() -> dict[str, Any]:
    """The schema; what it cannot say (cycles, names of columns, shapes of parameters) the parser does."""
    name = {"type": "string", "minLength": 1}
    numbers = {"anyOf": [{"type": "number"}, {"type": "array", "items": {"$ref": "#/$defs/numbers"}}]}
    kinds = {name: kind for name, kind in registered().items() if not needs_code(kind) and _is_ours(kind)}
    lag = {"type": "integer", "minimum": 1, "maximum": MOST_STEPS_BACK}
    edge = {"type": "array", "prefixItems": [name, name, lag], "minItems": 2, "maxItems": 3}
    edges = "[parent, child], or [parent, child, lag] for an edge from lag steps earlier."
    nodes = "For each listed node its mechanism: a name, or its type with arguments."
    entries = [{"type": "null"}, {"enum": sorted(kinds)}, *(_entry(name, kind) for name, kind in sorted(kinds.items()))]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "otpdag model file",
        "description": "A directed graphical model: its edges, hidden nodes and the mechanisms of its nodes.",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "edges": {"description": edges, "type": "array", "items": edge},
            "hidden": {"description": "Nodes that no column shows.", "type": "array", "items": name},
            "nodes": {"description": nodes, "type": "object", "additionalProperties": {"anyOf": entries}},
        },
        "$defs": {"numbers": numbers, "setting": _setting(), "space": _space()},
    }


def _is_ours(kind: type) -> bool:
    """Whether a class is the library's: what users register is not published."""
    return kind.__module__.startswith("otpdag.")


def _entry(name: str, kind: type[Mechanism]) -> dict[str, Any]:
    properties: dict[str, Any] = {"type": {"const": name}}
    for argument, told in sorted(arguments_of(kind).model_json_schema()["properties"].items()):
        shared = told.get("$anchor")
        plain = {key: value for key, value in told.items() if key not in ("title", "default")}
        properties[argument] = plain if shared is None else {"$ref": f"#/$defs/{shared}"}
    return {"type": "object", "properties": properties, "required": ["type"], "additionalProperties": False}


def _setting() -> dict[str, Any]:
    """A number or list fixes a parameter; a mapping of one key fixes, starts, ties or shrinks it."""
    values: dict[str, Any] = {key: {"type": "number", "minimum": 0} for key in PRIORS}
    values |= {"fix": {"$ref": "#/$defs/numbers"}, "start": {"$ref": "#/$defs/numbers"}, "tie": {"type": "string"}}
    end = {"anyOf": [{"type": "null"}, {"type": "number"}]}
    values["between"] = {"type": "array", "prefixItems": [end, end], "minItems": 2, "maxItems": 2}
    single: list[dict[str, Any]] = [
        {"type": "object", "properties": {key: value}, "required": [key], "additionalProperties": False}
        for key, value in values.items()
    ]
    formula = {"type": "string", "pattern": "^ *~"}
    alone = [one for key, one in zip(values, single, strict=True) if key in ("tie", "between")]
    slopes = {"type": "array", "items": {"anyOf": [*end["anyOf"], *alone]}}
    return {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/numbers"}, slopes, formula, *single]}


def _space() -> dict[str, Any]:
    size = {"type": "integer", "minimum": 1, "maximum": MOST_COORDINATES}
    kinds = {"enum": sorted(name for name, kind in Space.kinds.items() if _is_ours(kind))}
    with_sizes = {"type": "object", "properties": {"type": kinds}, "required": ["type"], "additionalProperties": size}
    return {"anyOf": [kinds, with_sizes]}


if __name__ == "__main__":
    sys.stdout.write(json_text(model_schema()))
