"""Commands that ask: they say what the library says, in a form that a program reads."""

from __future__ import annotations

import io
import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner, Result

import otpdag as otp
from otpdag.cli import app


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def read(result: Result) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(result.stdout))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A line with slope two, and a mixture of two groups; fitted."""
    folder = tmp_path_factory.mktemp("answers")
    rng = np.random.default_rng(0)
    x = rng.normal(size=300)
    group = rng.random(300) < 0.5
    table = pd.DataFrame(
        {"x": x, "y": 2 * x + 0.5 * rng.normal(size=300), "u": np.where(group, 5.0, -5.0) + rng.normal(size=300)}
    )
    table.to_csv(folder / "data.csv", index=False)
    (folder / "line.yaml").write_text("{edges: [[x, y]], nodes: {x: Normal, y: Normal}}\n")
    (folder / "apart.yaml").write_text("{nodes: {x: Normal, y: Normal}}\n")
    (folder / "groups.yaml").write_text(
        "{edges: [[z, u]], hidden: [z], nodes: {z: {type: Categorical, size: 2}, u: Normal}}\n"
    )
    run("fit", folder / "line.yaml", folder / "data.csv", "--out", folder / "run", "--quiet", "--restarts", 1)
    return folder


def test_summary_has_the_standard_errors_of_least_squares(folder):
    told = json.loads(run("summary", folder / "line.yaml", folder / "data.csv", "--json").stdout)
    slope = next(row for row in told["estimates"] if row["node"] == "y" and row["parameter"] == "weight")
    table = pd.read_csv(folder / "data.csv")
    design = np.column_stack([np.ones(300), table["x"]])
    coefficients, rest, *_ = np.linalg.lstsq(design, table["y"], rcond=None)
    error = np.sqrt(rest[0] / 300 * np.linalg.inv(design.T @ design)[1, 1])  # of maximum likelihood
    assert slope["estimate"] == pytest.approx(coefficients[1], rel=1e-3)
    assert slope["std_error"] == pytest.approx(error, rel=0.02)
    assert "weight" in run("summary", folder / "line.yaml", folder / "data.csv").stdout


def test_predictions_are_those_of_the_model(folder):
    told = read(run("predict", folder / "run", folder / "data.csv", "y"))
    expected = otp.load(folder / "run" / "model.otp").predict(pd.read_csv(folder / "data.csv"), "y")
    assert told["y"].to_numpy() == pytest.approx(expected.to_numpy())
    assert "there is no node 'w'" in run("predict", folder / "run", folder / "data.csv", "w", code=2).stderr


def test_effect_of_a_step_is_the_slope(folder):
    told = json.loads(
        run("effect", folder / "run", "x", "y", "--values", "0,1", "--data", folder / "data.csv", "--json").stdout
    )
    row = told["effects"][0]
    assert row["effect"] == pytest.approx(2.0, abs=0.1)
    assert row["lower"] < row["effect"] < row["upper"]
    plain = run("effect", folder / "run", "x", "y")
    assert read(plain)["effect"].iloc[0] == pytest.approx(row["effect"])
    assert (
        "--values x=a: node 'x' takes numbers"
        in run("effect", folder / "run", "x", "y", "--values", "a", code=2).stderr
    )


def test_the_model_with_the_edge_is_better(folder):
    told = read(run("compare", folder / "data.csv", folder / "line.yaml", folder / "apart.yaml"))
    assert told.set_index("model")["BIC"].idxmin() == str(folder / "line.yaml")


def test_two_groups_are_found(folder):
    chosen = run("select", folder / "groups.yaml", folder / "data.csv", "z", "--sizes", "1-3")
    assert read(chosen).set_index("size")["BIC"].idxmin() == 2
    assert "2 categories of z are best by bic" in chosen.stderr
    wrong = run("select", folder / "groups.yaml", folder / "data.csv", "u", code=2)
    assert "NODE must be a Categorical of the hidden nodes" in wrong.stderr
    assert (
        "--sizes must be LOW-HIGH"
        in run("select", folder / "groups.yaml", folder / "data.csv", "z", "--sizes", "3-1", code=2).stderr
    )


def test_forecast_goes_on_with_the_series(tmp_path):
    rng = np.random.default_rng(0)
    x = [0.0]
    for _ in range(200):
        x.append(0.9 * x[-1] + 0.1 * rng.normal())
    pd.DataFrame({"x": [*x, 5.0]}).to_csv(tmp_path / "d.csv", index=False)
    (tmp_path / "m.yaml").write_text("{edges: [[x, x, 1]], nodes: {x: Normal}}\n")
    run("fit", tmp_path / "m.yaml", tmp_path / "d.csv", "--out", tmp_path / "run", "--quiet", "--restarts", 1)
    told = read(run("forecast", tmp_path / "run", tmp_path / "d.csv", "--steps", 3))
    assert len(told) == 3
    assert 3.0 < told["x"].iloc[0] < 6.0  # from the last value on
    assert (told["x.lower"] < told["x"]).all()
