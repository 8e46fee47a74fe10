"""The JSON Schema of model files: what an editor or validator knows of them before a table is there."""

from __future__ import annotations

import inspect
import json
from typing import Any

from otpdag.cli.model_file import MOST_COORDINATES, MOST_LAYERS, MOST_UNITS, OR_NONE, SIZES, needs_code
from otpdag.graph import MOST_STEPS_BACK
from otpdag.mechanisms import Mechanism
from otpdag.mechanisms.spec import registered
from otpdag.spaces import Space

_NAME = {"type": "string", "minLength": 1}
_NUMBERS = {"anyOf": [{"type": "number"}, {"type": "array", "items": {"$ref": "#/$defs/numbers"}}]}


def schema_text() -> str:
    """The schema as JSON, as it is published."""
    return json.dumps(model_schema(), indent=1) + "\n"


def model_schema() -> dict[str, Any]:
    """The schema; what it cannot say (cycles, names of columns, shapes of parameters) the parser does.

    >>> sorted(model_schema()["properties"])
    ['edges', 'hidden', 'nodes']
    """
    kinds = {name: kind for name, kind in registered().items() if not needs_code(kind) and _is_ours(kind)}
    lag = {"type": "integer", "minimum": 1, "maximum": MOST_STEPS_BACK}
    edge = {"type": "array", "prefixItems": [_NAME, _NAME, lag], "minItems": 2, "maxItems": 3}
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
            "hidden": {"description": "Nodes that no column shows.", "type": "array", "items": _NAME},
            "nodes": {
                "description": "For each listed node its mechanism: a name, or its type with arguments.",
                "type": "object",
                "additionalProperties": {"anyOf": entries},
            },
        },
        "$defs": {"numbers": _NUMBERS, "setting": _setting(), "space": _space()},
    }


def _is_ours(kind: type) -> bool:
    """Whether a class is the library's: what users register is not published."""
    return kind.__module__.startswith("otpdag.")


def _entry(name: str, kind: type[Mechanism]) -> dict[str, Any]:
    properties: dict[str, Any] = {"type": {"const": name}}
    for argument, parameter in inspect.signature(kind.__init__).parameters.items():
        if argument != "self" and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            properties[argument] = _argument(argument, str(parameter.annotation))
    return {"type": "object", "properties": properties, "required": ["type"], "additionalProperties": False}


def _argument(name: str, annotation: str) -> dict[str, Any]:
    if "Setting" in annotation:
        return {"$ref": "#/$defs/setting"}
    if "Space" in annotation:
        return {"$ref": "#/$defs/space"}
    layer = {"type": "integer", "minimum": 1, "maximum": MOST_UNITS}
    plain: dict[str, dict[str, Any]] = {
        "int": {"type": "integer", "maximum": MOST_COORDINATES} if name in SIZES else {"type": "integer"},
        "bool": {"type": "boolean"},
        "str": {"type": "string"},
        "float": {"type": "number"},
        "Sequence[int]": {"type": "array", "items": layer, "maxItems": MOST_LAYERS},
    }
    return plain.get(annotation.removesuffix(OR_NONE), {})


def _setting() -> dict[str, Any]:
    """A number or list fixes a parameter; a mapping of one key fixes, starts or ties it."""
    values = {"fix": {"$ref": "#/$defs/numbers"}, "start": {"$ref": "#/$defs/numbers"}, "tie": {"type": "string"}}
    single = [
        {"type": "object", "properties": {key: value}, "required": [key], "additionalProperties": False}
        for key, value in values.items()
    ]
    return {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/numbers"}, *single]}


def _space() -> dict[str, Any]:
    size = {"type": "integer", "minimum": 1, "maximum": MOST_COORDINATES}
    kinds = {"enum": sorted(name for name, kind in Space.kinds.items() if _is_ours(kind))}
    return {
        "anyOf": [
            kinds,
            {"type": "object", "properties": {"type": kinds}, "required": ["type"], "additionalProperties": size},
        ]
    }
