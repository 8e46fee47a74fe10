"""Fits that cannot succeed say so: no raw error, no estimate that is not a number, no file that cannot be read."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.errors import DataError, ModelError

RNG = np.random.default_rng(0)
X = RNG.normal(size=100)
LINE = otp.Graph([("x", "y")])


def line_model(**kinds):
    return otp.Model(LINE, {"x": m.Normal(), "y": m.Normal()} | kinds)


@pytest.mark.parametrize("value", [1e151, -1e308])
def test_a_cell_that_overflows_is_named(value):
    table = pd.DataFrame({"x": X, "y": X})
    table.loc[3, "x"] = value
    message = f"column 'x' must hold numbers of at most 1e+150 in size; found {value:g} in row 3"
    with pytest.raises(DataError, match=re.escape(message)):
        otp.fit(line_model(), table)


def test_numbers_just_below_are_fitted():
    table = pd.DataFrame({"x": 1e149 * X, "y": 3e149 * X + 1e149 * RNG.normal(size=100)})
    model = line_model()
    assert otp.fit(model, table).status.converged
    slope, offset = np.polyfit(table["x"] / 1e149, table["y"] / 1e149, 1)
    np.testing.assert_allclose(model.params()["y"]["weight"], [slope], rtol=1e-4)
    np.testing.assert_allclose(model.params()["y"]["loc"], 1e149 * offset, rtol=1e-3)


@pytest.mark.parametrize("spread", [1e-13, 1e-40, 1e-120])
def test_a_parent_of_tiny_spread_is_no_constant(spread):
    noise = 0.1 * RNG.normal(size=100)
    table = pd.DataFrame({"x": spread * X, "y": 1.5 * X + noise})
    model = line_model()
    assert otp.fit(model, table).status.converged
    slope = np.polyfit(X, table["y"], 1)[0]
    np.testing.assert_allclose(model.params()["y"]["weight"] * spread, [slope], rtol=1e-5)
    np.testing.assert_allclose(model.params()["x"]["scale"] / spread, X.std(), rtol=1e-5)


def test_a_constant_parent_far_from_zero_is_a_constant():
    """Rounding makes the spread of equal numbers 1e-10; a slope from that would be noise."""
    table = pd.DataFrame({"x": np.full(100, 1e6 + 0.1), "y": X})
    model = otp.Model(LINE, {"x": m.Given(m.Normal().space), "y": m.Normal()})
    otp.fit(model, table)
    assert abs(float(model.params()["y"]["weight"][0]) * 1e6) < 1e3
    np.testing.assert_allclose(model.params()["y"]["scale"], X.std(), rtol=1e-3)


def test_a_singular_covariance_is_no_raw_error():
    table = pd.DataFrame({"v.0": X, "v.1": 2 * X})
    model = otp.Model(otp.Graph([], nodes=["v"]), {"v": m.MultivariateNormal(2)})
    otp.fit(model, table)
    covariance = model.params()["v"]["covariance"]
    np.testing.assert_allclose(covariance, np.cov(table.T, bias=True), rtol=1e-4)
    assert np.isfinite(model.sample(5, seed=0).to_numpy()).all()


def test_a_density_of_a_singular_covariance_is_not_a_number():
    mechanism = m.MultivariateNormal(2)
    otp.Model(otp.Graph([], nodes=["v"]), {"v": mechanism})
    params = {"loc": torch.zeros(1, 1, 2).double(), "covariance": torch.ones(1, 1, 2, 2).double()}
    model = otp.Model(otp.Graph([], nodes=["v"]), {"v": mechanism})
    value = model.structure.mechanisms["v"].log_prob(params, torch.zeros(1, 3, 2).double(), {})
    assert torch.isnan(value).all()


def test_an_error_of_linear_algebra_is_named(monkeypatch):
    def fail(*_: object) -> None:
        raise torch.linalg.LinAlgError("linalg.inv: the input is singular")

    monkeypatch.setattr(m.Normal, "start", fail)
    with pytest.raises(
        ModelError, match=r"the fit failed: a matrix became singular \(the input is singular\); look for"
    ):
        otp.fit(line_model(y=m.StudentT()), pd.DataFrame({"x": X, "y": X}))


def test_parameters_that_are_not_numbers_are_not_adopted(monkeypatch):
    model = line_model(y=m.StudentT())
    table = pd.DataFrame({"x": X, "y": 2 * X + RNG.normal(size=100)})
    otp.fit(model, table)
    before = model.params()
    start = m.Normal.start
    monkeypatch.setattr(
        m.Normal, "start", lambda self, *given: {k: v * torch.nan for k, v in start(self, *given).items()}
    )
    with pytest.raises(
        ModelError, match="the fit failed: no finite parameters of node 'x' were found; look for outliers"
    ):
        otp.fit(model, table)
    np.testing.assert_array_equal(model.params()["y"]["weight"], before["y"]["weight"])


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_a_loss_that_becomes_infinite_is_a_failure_with_the_last_good_parameters():
    class Breaks(otp.divergences.Energy):
        def forward(self, x, y, *given, **named):
            return super().forward(x, y, *given, **named) * (torch.nan if next(count) > 5 else 1.0)

    count = iter(range(1000))
    graph = otp.Graph([("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Normal(), "x": m.Normal()})
    method = otp.paper(steps=60, batch_size=32, divergence=Breaks())
    result = otp.fit(model, pd.DataFrame({"x": X}), method=method, restarts=1)
    assert result.status.failed
    assert not result.status.converged
    assert str(result.status).startswith("failed: the loss became infinite or not a number; the last good")
    assert np.isfinite(model.params()["x"]["weight"]).all()


def test_a_model_that_is_not_finite_is_not_saved(tmp_path):
    model = line_model()
    otp.fit(model, pd.DataFrame({"x": X, "y": X + RNG.normal(size=100)}))
    model.save(tmp_path / "model.otp")
    before = (tmp_path / "model.otp").read_bytes()
    model.fitted.naturals["y"]["loc"] = model.fitted.naturals["y"]["loc"] * torch.nan
    with pytest.raises(ModelError, match="parameter 'loc' of node 'y' is not finite"):
        model.save(tmp_path / "model.otp")
    assert (tmp_path / "model.otp").read_bytes() == before


@pytest.mark.parametrize("size", [1e-300, 1.0, 1e300])
def test_weights_of_any_size_count_alike(size):
    rng = np.random.default_rng(1)
    table = pd.DataFrame({"x": rng.normal(size=50), "y": rng.normal(size=50)})
    weights = rng.uniform(0.5, 2.0, 50)
    plain, scaled = line_model(), line_model()
    otp.fit(plain, table, weights=weights)
    otp.fit(scaled, table, weights=weights * size)
    np.testing.assert_allclose(scaled.params()["y"]["weight"], plain.params()["y"]["weight"], rtol=1e-9)
    slope = np.polyfit(table["x"], table["y"], 1, w=np.sqrt(weights))[0]
    np.testing.assert_allclose(plain.params()["y"]["weight"], [slope], rtol=1e-4)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("method", ["auto", "likelihood", "transport"])
def test_a_model_of_which_all_is_given_is_refused_and_answers_as_it_is(method, gaps):
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"a": rng.normal(size=40)})
    table["b"] = table["a"] + rng.normal(size=40)
    if gaps:
        table.loc[::4, "a"] = np.nan
    given = {"a": m.Normal(loc=0.0, scale=1.0), "b": m.Normal(loc=0.0, scale=1.0, weight=1.0)}
    model = otp.Model(otp.Graph([("a", "b")]), given)
    with pytest.raises(ModelError, match="nothing to learn: every parameter of 'a', 'b' is given"):
        otp.fit(model, table, method=method, seed=0)
    seen = table.dropna()
    truth = norm.logpdf(seen["a"]) + norm.logpdf(seen["b"], seen["a"])
    assert model.set_params({}).score(seen, kind="likelihood") == pytest.approx(truth.mean())
