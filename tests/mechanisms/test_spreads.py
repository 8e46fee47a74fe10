"""Scales, shapes and their like as formulas: beside the likelihood written out; gaps, files, refusals."""

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.cli.model_file import parse_model_file
from otpdag.errors import ModelError
from otpdag.spaces import Discrete, Real
from otpdag.testing import check_mechanism

ROWS = 400
FAMILY = m.Family("y", (("x", Real()), ("z", Discrete(2))))


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(8)
    x, z = rng.normal(50, 10, ROWS), rng.integers(0, 2, ROWS)
    shape = np.exp(1 - 0.02 * x)
    columns = {"x": x, "z": z, "y": 3 + 0.2 * x + z + np.exp(-1 + 0.03 * x + 0.4 * z) * rng.normal(size=ROWS)}
    return pd.DataFrame({**columns, "t": rng.gamma(shape, np.exp(0.02 * x) / shape)})


def fitted(rows, mechanism, node="y"):
    nodes = {"x": m.Normal(), "z": m.Categorical(2), node: mechanism}
    return otp.fit(otp.Model(otp.Graph([("x", node), ("z", node)]), nodes), rows[["x", "z", node]])


def likeliest(log_density, size):
    first = optimize.minimize(lambda p: -log_density(p).sum(), np.zeros(size), method="BFGS")
    best = optimize.minimize(lambda p: -log_density(p).sum(), first.x, method="Nelder-Mead", options={"fatol": 1e-11})
    return best.x


def test_a_scale_that_depends_on_parents_is_the_likeliest(table, tmp_path):
    result = fitted(table, m.Normal(terms="x + C(z)", scale="~ x + C(z)"))
    design = np.c_[np.ones(ROWS), (table["x"] - 50) / 10, table["z"]]
    best = likeliest(lambda p: stats.norm.logpdf(table["y"] - 13, design @ p[:3], np.exp(design @ p[3:])), 6)
    found = result.model.params()["y"]
    np.testing.assert_allclose(found["weight"] * [10, 1], best[1:3], rtol=1e-4)
    np.testing.assert_allclose(found["scale_weight"] * [10, 1], best[4:], rtol=1e-4)
    np.testing.assert_allclose(found["log_scale"] + 50 * found["scale_weight"][0], best[3], rtol=1e-4)
    named = result.standard_errors().query("parameter == 'scale_weight'")
    assert list(named["at"]) == ["x", "z=1"]
    assert named["std_error"].between(1e-4, 0.2).all()
    result.model.save(tmp_path / "model.otp")
    again = otp.load(tmp_path / "model.otp")
    rows = table[["x", "z", "y"]]
    scores = [one.score(rows, kind="likelihood") for one in (again, result.model)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-9)


def test_gaps_in_parents_of_a_scale(table):
    rng = np.random.default_rng(9)
    whole, gaps = (
        fitted(rows, m.Normal(terms="x + C(z)", scale="~ x + C(z)")).standard_errors().query("node == 'y'")
        for rows in (table, table.mask(rng.random(table.shape) < 0.15))
    )
    assert (np.abs(gaps["estimate"] - whole["estimate"]) < 3 * gaps["std_error"]).all()


def test_a_shape_that_depends_on_parents_is_the_likeliest(table):
    found = fitted(table, m.Gamma(terms="x + C(z)", shape="~ x"), "t").model.params()["t"]
    design = np.c_[np.ones(ROWS), (table["x"] - 50) / 10, table["z"]]

    def log_density(p):
        shape = np.exp(design[:, :2] @ p[3:])
        return stats.gamma.logpdf(table["t"], shape, scale=np.exp(design @ p[:3]) / shape)

    best = likeliest(log_density, 5)
    np.testing.assert_allclose(found["shape_weight"] * 10, best[4:], rtol=1e-3)
    np.testing.assert_allclose(found["weight"] * [10, 1], best[1:3], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "mechanism", [m.Normal(scale="~ x * z"), m.NegativeBinomial(dispersion="~ z"), m.LogNormal(scale="~ x")]
)
def test_the_contract_holds(mechanism):
    check_mechanism(mechanism, FAMILY)


def test_model_files_and_refusals(table):
    file = parse_model_file("{edges: [[x, y]], nodes: {y: {type: Normal, scale: '~ x'}}}")
    assert set(file.build(table).structure.keys["y"]) == {"loc", "weight", "log_scale", "scale_weight"}
    with pytest.raises(ModelError, match="not the formula"):
        fitted(table, m.Normal(loc="~ x"))
    with pytest.raises(ModelError, match="StudentT"):
        fitted(table, m.StudentT(scale="~ x"))
    with pytest.raises(ModelError, match="no number that its parents"):
        fitted(table, m.Normal(scale="~ w"))
