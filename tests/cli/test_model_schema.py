"""Tests of the JSON Schema of model files: published as it is, and of one mind with the parser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from otpdag.cli import app
from otpdag.cli.console import json_text
from otpdag.cli.init_command import model_schema
from otpdag.cli.model_file import parse_model_file
from otpdag.errors import OtpdagError

PUBLISHED = Path(__file__).parents[2] / "docs" / "model-file.schema.json"
KINDS = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def accepts(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    """The part of JSON Schema that ours is written in, as the standard defines it."""
    if "$ref" in schema:
        return accepts(root["$defs"][schema["$ref"].rsplit("/", 1)[1]], value, root)
    if "anyOf" in schema and not any(accepts(part, value, root) for part in schema["anyOf"]):
        return False
    if ("enum" in schema and value not in schema["enum"]) or ("const" in schema and value != schema["const"]):
        return False
    return _has_type(schema.get("type"), value) and _fits(schema, value, root)


def _has_type(kind: str | None, value: Any) -> bool:
    if kind in ("integer", "number"):
        return not isinstance(value, bool) and isinstance(value, int if kind == "integer" else (int, float))
    return kind is None or isinstance(value, KINDS[kind])


def _fits(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    if isinstance(value, str):
        return len(value) >= schema.get("minLength", 0)
    if isinstance(value, int | float):
        return schema.get("minimum", value) <= value <= schema.get("maximum", value)
    if isinstance(value, list):
        places = schema.get("prefixItems", [])
        parts = [*places[: len(value)], *[schema.get("items", {})] * (len(value) - len(places))]
        right = all(accepts(part, item, root) for part, item in zip(parts, value, strict=True))
        return right and schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
    if isinstance(value, dict):
        rest = schema.get("additionalProperties", {})
        known = schema.get("properties", {})
        own = {key: known.get(key, rest) for key in value}
        right = all(part is not False and accepts(part, value[key], root) for key, part in own.items())
        return right and set(schema.get("required", ())) <= set(value)
    return True


GOOD = (
    "edges: [[a, b], [b, b, 2]]",
    "{edges: [[z, x]], hidden: [z], nodes: {z: {type: Categorical, size: 3}, x: Normal}}",
    "nodes: {x: {type: Normal, scale: 0.5, loc: {start: 1.0}}, y: {type: Normal, scale: {tie: s}}}",
    "nodes: {x: {type: Categorical, size: 2, probs: [0.5, 0.5]}, y: null}",
    "nodes: {x: {type: Normal, floor: 0.01}}",
    "nodes: {x: {type: Given, space: {type: Discrete, size: 3}}, y: {type: Given, space: Real}}",
)
BAD = (
    "[1, 2]",
    "edge: [[a, b]]",
    "edges: [[a]]",
    "edges: [[a, b, c]]",
    "edges: [[a, b, 0]]",
    "edges: [[a, 3]]",
    "edges: [[a, b, 1, 2]]",
    "hidden: [1]",
    "hidden: z",
    "nodes: [x]",
    "nodes: {x: Gaussian}",
    "nodes: {x: {size: 3}}",
    "nodes: {x: {type: Normal, sigma: 3}}",
    "nodes: {x: {type: Categorical, size: three}}",
    "nodes: {x: {type: Categorical, size: 2.5}}",
    "nodes: {x: {type: Normal, scale: wide}}",
    "nodes: {x: {type: Normal, floor: big}}",
    "nodes: {x: {type: Normal, floor: null}}",
    "nodes: {x: {type: Normal, scale: {begin: 1}}}",
    "nodes: {x: {type: Given, space: {type: Round}}}",
    "nodes: {x: Deterministic}",
)


def parser_accepts(text: str) -> bool:
    try:
        parse_model_file(text)
    except OtpdagError:
        return False
    return True


@pytest.mark.parametrize(("text", "good"), [*((text, True) for text in GOOD), *((text, False) for text in BAD)])
def test_schema_and_parser_agree(text, good):
    schema = model_schema()
    assert parser_accepts(text) is good
    assert accepts(schema, yaml.safe_load(text), schema) is good


def test_published_schema_is_up_to_date():
    assert PUBLISHED.read_text(encoding="utf-8") == json_text(model_schema()), (
        "run: otpdag schema --force --out " + str(PUBLISHED)
    )


def test_command_prints_it(tmp_path):
    printed = CliRunner().invoke(app, ["schema"])
    assert json.loads(printed.stdout) == model_schema()
    assert CliRunner().invoke(app, ["schema", "--out", str(tmp_path / "s.json")]).exit_code == 0
    assert (tmp_path / "s.json").read_text() == printed.stdout
