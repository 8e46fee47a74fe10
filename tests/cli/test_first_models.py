"""otpdag init, and the schema of model files."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner, Result

from otpdag.cli import app
from otpdag.cli.console import json_text
from otpdag.cli.model_file import first_model, parse_model_file
from otpdag.errors import ModelError, OtpdagError
from tests.browser import CHROMIUM, Page
from tools.model_schema import model_schema


def run(*arguments: object, stdin: bytes | None = None) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
    assert result.exit_code == 0, result.output
    return result


def test_first_model_is_read_as_it_was_meant():
    table = pd.DataFrame(
        {
            "yes": [0, 1] * 20,  # a name that YAML takes for a truth value
            "a: b, [c] # d": ["red", "blue"] * 20,
            "tab\there": np.linspace(0, 1, 40),
            "eggs": np.random.default_rng(0).poisson(3, 40) + 9 * (np.arange(40) == 5),
            "row": np.arange(40),
            "day": pd.date_range("2020-01-01", periods=40),
        }
    )
    text = first_model(table, "farm.csv")
    file = parse_model_file(text)
    assert file.nodes == {
        "yes": {"type": "Categorical", "size": 2},
        "a: b, [c] # d": {"type": "Categorical", "size": 2},
        "tab\there": {"type": "Normal"},
        "eggs": {"type": "Poisson"},
    }
    assert "# row: Normal" in text
    assert "# DOUBTFUL: every row has its own" in text
    assert re.search(r"# column 'day' must hold numbers or categories.*\n  # day: Normal", text)
    assert file.build(table).graph.nodes == ("yes", "a: b, [c] # d", "tab\there", "eggs")


def test_examples_of_edges_are_right_once_uncommented():
    table = pd.DataFrame({"yes": [0, 1] * 20, "x y": np.linspace(0, 1, 40) ** 2})
    text = (
        first_model(table, "t.csv").replace("edges: []\n", "").replace("# edges", "edges").replace("#   - [", "  - [")
    )
    text = text.replace("hidden: []", "hidden: [group]") + "  group: {type: Categorical, size: 3}\n"
    graph = parse_model_file(text).graph()
    assert graph.edges == (("yes", "x y"), ("group", "x y"))
    assert graph.is_dynamic


def test_advice_names_mechanisms_as_model_files_do():
    table = pd.DataFrame({"code": [10, 20, 30] * 10, "few": [0.5, 1.5, 2.5] * 10})
    text = first_model(table, "t.csv")
    assert "m." not in text
    assert "amounts rather than codes? then Normal" in text
    assert "if they are codes, {type: Categorical, size: 3}" in text


def test_a_table_without_any_node_is_refused():
    with pytest.raises(ModelError, match=r"t\.csv: no column can be a node; day: none, column 'day' must hold numbers"):
        first_model(pd.DataFrame({"day": pd.date_range("2020-01-01", periods=3)}), "t.csv")


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "t.csv").write_text("x\n1.5\n2.5\n0.25\n")
    run("init", tmp_path / "t.csv", "--quiet")
    again = CliRunner().invoke(app, ["init", str(tmp_path / "t.csv")])
    assert again.exit_code == 2
    assert "exists; choose another file or add --force" in again.stderr


def test_the_same_table_in_every_format(tmp_path):
    table = pd.DataFrame({"x": [0.5, 1.25, 3.5, 2.75], "kind": ["a", "b", "a", "b"]})
    table.to_csv(tmp_path / "t.csv", index=False)
    table.to_csv(tmp_path / "t.tsv", index=False, sep="\t")
    table.to_parquet(tmp_path / "t.parquet")
    texts = {name: run("init", tmp_path / f"t.{name}", "-o", "-").stdout for name in ("csv", "tsv", "parquet")}
    texts["-"] = run("init", "-", stdin=(tmp_path / "t.csv").read_bytes()).stdout
    models = [parse_model_file(text) for text in texts.values()]
    assert all(model == models[0] for model in models)
    assert models[0].nodes["kind"] == {"type": "Categorical", "size": 2}


def test_a_piped_table_is_fitted_and_scored(tmp_path):
    rng = np.random.default_rng(0)
    data = pd.DataFrame({"x": rng.normal(size=80)}).to_csv(index=False).encode()
    (tmp_path / "m.yaml").write_text("nodes: {x: Normal}\n")
    run("fit", tmp_path / "m.yaml", "-", "--out", tmp_path / "run", "--restarts", 1, stdin=data)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "data" not in summary  # nothing that a report could open again
    scored = json.loads(run("score", tmp_path / "run", "-", "--json", "--kind", "likelihood", stdin=data).stdout)
    assert scored["kind"] == "likelihood"
    assert -1.6 < scored["score"] < -1.2  # -log(2 pi e)/2 = -1.42 of a standard normal
    shown = json.loads(run("show", tmp_path / "run", "--json").stdout)
    assert shown["nodes"] == {"x": "Normal"}
    assert abs(shown["params"]["x"]["loc"]) < 0.4
    checked = json.loads(run("check", tmp_path / "run", "-", "--json", stdin=data).stdout)
    assert [row["node"] for row in checked] == ["x"]


# --- real tables ------------------------------------------------------------------------------------------------------


def statsmodels_table(name: str) -> pd.DataFrame:
    datasets = pytest.importorskip("statsmodels.datasets")
    return getattr(datasets, name).load_pandas().data


def iris() -> pd.DataFrame:
    from sklearn.datasets import load_iris

    return load_iris(as_frame=True).frame


def breast_cancer() -> pd.DataFrame:
    from sklearn.datasets import load_breast_cancer

    return load_breast_cancer(as_frame=True).frame


MEANS = ("mean radius", "mean texture", "mean smoothness", "mean compactness", "mean symmetry")
TABLES = {
    "iris": (iris, "[[target, petal length (cm)], [petal length (cm), petal width (cm)], [target, sepal width (cm)]]"),
    "breast_cancer": (breast_cancer, json.dumps([["target", name] for name in MEANS])),
    "anes96": (
        lambda: statsmodels_table("anes96"),
        "[[age, PID], [income, PID], [PID, vote], [PID, selfLR], [educ, income], [popul, logpopul]]",
    ),
    "fair": (
        lambda: statsmodels_table("fair"),
        "[[rate_marriage, affairs], [religious, affairs], [age, yrs_married], [yrs_married, children]]",
    ),
    "nile": (lambda: statsmodels_table("nile"), "[[volume, volume, 1]]"),
    "sunspots": (
        lambda: statsmodels_table("sunspots"),
        "[[SUNACTIVITY, SUNACTIVITY, 1], [SUNACTIVITY, SUNACTIVITY, 2]]",
    ),
}


def make_report(name: str, folder: Path) -> Path:
    """The way of a new user: a table, ``init``, one edit, ``fit``, ``report``."""
    load, edges = TABLES[name]
    data, model = folder / f"{name}.csv", folder / f"{name}.yaml"
    load().to_csv(data, index=False)
    run("init", data)
    model.write_text(model.read_text().replace("edges: []", f"edges: {edges}"))
    run("fit", model, data, "--out", folder / name, "--quiet")
    run("report", folder / name, "--quiet")
    return folder / name / "report.html"


def check_in_browser(page: Path) -> None:
    for width, phone in ((1280, False), (390, True)):
        with Page(width, phone=phone) as browser:
            browser.open(page)
            assert browser.run("document.querySelectorAll('.chart svg').length") > 0
            assert browser.overflow() <= 0
            assert browser.complaints == []


def test_iris_becomes_a_report(tmp_path):
    page = make_report("iris", tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "The fit converged" in text
    assert "petal width (cm)" in text
    assert json.loads((tmp_path / "iris" / "summary.json").read_text())["rows"] == 150


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_real_tables_become_reports(name, tmp_path):
    page = make_report(name, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "Data and model" in text
    if CHROMIUM is not None and sys.platform == "linux":
        check_in_browser(page)


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
        return len(value) >= schema.get("minLength", 0) and re.search(schema.get("pattern", ""), value) is not None
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
    "{edges: [[a, x], [b, x]], nodes: {x: {type: Normal, weight: [{tie: k}, {between: [null, 1]}, null, 0.5]}}}",
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
        f"run: python -m tools.model_schema > {PUBLISHED}"
    )
