"""Monotone effects of ordered categories and bounds of single slopes, beside isotonic and bounded regressions."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import lsq_linear, minimize
from sklearn.isotonic import IsotonicRegression

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.cli.model_file import parse_model_file
from otpdag.errors import ModelError

ROWS = 400


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    rng = np.random.default_rng(3)
    grade, x = rng.integers(0, 6, ROWS), rng.normal(size=ROWS)
    line = np.array([0.0, 0.1, 0.1, 1.2, 1.1, 1.3])[grade]
    rows = {
        "grade": grade,
        "x": x,
        "y": line + 0.5 * x + 0.8 * rng.normal(size=ROWS),
        "down": rng.poisson(np.exp(-line)),
    }
    won = (rng.random(ROWS) < 1 / (1 + np.exp(1 - line - 0.5 * x))).astype(int)
    return pd.DataFrame({**rows, "won": won})


def fitted(table, node, mechanism, parents="grade"):
    known = {"grade": m.Categorical(6), "x": m.Normal()}
    names = parents.split()
    graph = otp.Graph([(one, node) for one in names])
    return otp.fit(otp.Model(graph, {**{one: known[one] for one in names}, node: mechanism}), table[[*names, node]])


def test_means_are_those_of_isotonic_regression(table):
    result = fitted(table, "y", m.Normal(terms="monotone(grade)"))
    means = result.model.predict(pd.DataFrame({"grade": range(6)}), "y").to_numpy()
    other = IsotonicRegression().fit(table["grade"], table["y"]).predict(range(6))
    np.testing.assert_allclose(means, other, atol=1e-3)
    own = result.standard_errors().query("parameter == 'weight'").set_index("at")
    flat = np.diff(other) == 0
    assert flat.any()
    assert (own["note"].to_numpy() == np.where(flat, "at the edge", "")).all()
    assert own["std_error"][~flat].between(0.05, 0.3).all()


def test_falling_counts_are_pooled_where_they_rise(table):
    result = fitted(table, "down", m.Poisson(terms="monotone(grade, -1)"))
    means = result.model.predict(pd.DataFrame({"grade": range(6)}), "down").to_numpy()
    other = IsotonicRegression(increasing=False).fit(table["grade"], table["down"]).predict(range(6))
    np.testing.assert_allclose(means, other, atol=1e-3)  # pooled adjacent violators are the maximum for any family


def test_log_odds_beside_another_parent_are_those_of_a_bounded_search(table):
    result = fitted(table, "won", m.Bernoulli(terms="x + monotone(grade)"), "grade x")
    design = np.c_[np.ones(ROWS), table["x"], table["grade"].to_numpy()[:, None] >= np.arange(1, 6)]

    def loss(point):
        line = design @ point
        return np.logaddexp(0, line).sum() - (table["won"] * line).sum()

    best = minimize(loss, np.full(7, 0.1), bounds=[(None, None)] * 2 + [(0, None)] * 5, method="L-BFGS-B", tol=1e-12)
    np.testing.assert_allclose(result.model.params()["won"]["weight"][:, 1], best.x[1:], atol=5e-3)


def test_gaps_of_the_parent_are_summed_and_files_keep_the_effect(table, tmp_path):
    rng = np.random.default_rng(4)
    emptied = table.assign(grade=table["grade"].where(rng.random(ROWS) > 0.2))
    result = fitted(emptied, "y", m.Normal(terms="monotone(grade) + x"), "grade x")
    steps = result.model.params()["y"]["weight"]
    assert (steps[:5] >= 0).all()
    np.testing.assert_allclose(steps[:5].sum(), 1.3, atol=0.4)
    result.model.save(tmp_path / "model.otp")
    assert otp.load(tmp_path / "model.otp").log_likelihood(emptied[["grade", "x", "y"]]) == pytest.approx(
        result.model.log_likelihood(emptied[["grade", "x", "y"]])
    )


def test_bounds_and_ties_of_single_slopes(table):
    own = [otp.between(None, 0.2), np.nan, otp.between(-1.0, 0.4)]
    rows = table.assign(a=table["x"], b=table["grade"] - 2.5 + 0.1 * table["x"], c=0.5 * table["y"] + table["x"])
    graph = otp.Graph([(one, "y") for one in "abc"])
    parents = {one: m.Normal() for one in "abc"}
    result = otp.fit(otp.Model(graph, {**parents, "y": m.Normal(weight=own)}), rows[["a", "b", "c", "y"]])
    design = np.c_[rows[["a", "b", "c"]], np.ones(ROWS)]
    best = lsq_linear(design, rows["y"], ([-np.inf, -np.inf, -1, -np.inf], [0.2, np.inf, 0.4, np.inf]), tol=1e-14).x
    np.testing.assert_allclose(result.model.params()["y"]["weight"], best[:3], atol=2e-3)
    own = "{type: Normal, weight: [{between: [null, 0.2]}, null, {tie: k}]}"
    text = f"{{edges: [[a, y], [b, y], [c, y]], nodes: {{y: {own}}}}}"
    read = parse_model_file(text).build(rows[["a", "b", "c", "y"]]).structure.mechanisms["y"].weight
    assert read.bounds == ((0, otp.between(None, 0.2)),)
    assert read.ties == ((2, "k"),)


@pytest.mark.parametrize(("low", "high"), [(0.0, None), (None, 0.0)])
@pytest.mark.parametrize("bounded", ["a", "c"])
def test_a_factor_starts_with_the_sign_that_bounds_say(bounded, low, high):
    rng = np.random.default_rng(9)
    f = rng.normal(size=300)
    rows = pd.DataFrame({"a": -f, "b": f, "c": f}) + 0.5 * rng.normal(size=(300, 3))
    graph = otp.Graph([("f", one) for one in "abc"], hidden=["f"])
    free = otp.fit(otp.Model(graph, {"f": m.Normal(), **{one: m.Normal() for one in "abc"}}), rows)
    own = {one: m.Normal(weight=otp.between(low, high) if one == bounded else None) for one in "abc"}
    result = otp.fit(otp.Model(graph, {"f": m.Normal(), **own}), rows)
    assert result.loss == pytest.approx(free.loss, abs=1e-4)
    assert (float(np.squeeze(result.model.params()[bounded]["weight"])) > 0) == (high is None)


@pytest.mark.parametrize(
    ("node", "told"),
    [
        (m.Categorical(3, terms="monotone(grade)"), "a monotone effect is of the log-odds of two categories"),
        (m.Normal(terms="monotone(grade)", weight=otp.ridge(1.0)), "slopes of a monotone effect have no prior"),
        (m.Normal(terms="monotone(x)"), "is no number that its parents"),
    ],
)
def test_what_has_no_direction_is_refused(node, told):
    parents = {"x": m.Normal()} if "(x)" in node.terms else {"grade": m.Categorical(6)}
    with pytest.raises(ModelError, match=told):
        otp.Model(otp.Graph([(one, "y") for one in parents]), {**parents, "y": node})


def test_a_support_by_entries_is_there_and_back():
    from otpdag.mechanisms.parameters import Between

    low, high = torch.tensor([-torch.inf, 0.0, -torch.inf, -1.0]), torch.tensor([torch.inf, torch.inf, 2.0, 1.0])
    support = Between(low.double(), high.double(), torch.full((4,), 3.0).double())
    values = torch.tensor([[-7.0, 0.5, -3.0, 0.3]]).double()
    torch.testing.assert_close(support.natural(support.raw(values)), values)
    assert support.check(support.inside(torch.tensor([[-7.0, -0.5, 3.0, 4.0]]).double()))


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_edges_and_steps_follow_the_units_of_the_column(table, unit):
    rows = table.assign(y=unit * table["y"])
    own = fitted(rows, "y", m.Normal(terms="monotone(grade)")).standard_errors().query("parameter == 'weight'")
    plain = fitted(table, "y", m.Normal(terms="monotone(grade)")).standard_errors().query("parameter == 'weight'")
    assert list(own["note"]) == list(plain["note"])
    np.testing.assert_allclose(own["estimate"] / unit, plain["estimate"], atol=2e-3)
