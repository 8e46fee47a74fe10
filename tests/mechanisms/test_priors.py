"""Priors: estimates beside penalised regressions of others and counts in closed form; gaps, files, hidden nodes."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from scipy.optimize import minimize_scalar
from scipy.stats import dirichlet_multinomial
from sklearn.linear_model import LogisticRegression

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.cli.model_file import parse_model_file
from otpdag.errors import ModelError

ROWS = 300


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    rng = np.random.default_rng(5)
    x, u, k = rng.normal(2, 1.5, ROWS), rng.normal(size=ROWS), rng.choice(4, ROWS, p=[0.6, 0.39, 0.01, 0.0])
    line = x - 2 + 0.5 * u
    columns = {"x": x, "u": u, "k": k, "y": 1 + 0.5 * x - 0.3 * u + 0.7 * rng.normal(size=ROWS)}
    won = (rng.random(ROWS) < 1 / (1 + np.exp(-line))).astype(int)
    return pd.DataFrame({**columns, "won": won, "calls": rng.poisson(np.exp(0.3 * x))})


def fitted(table, node, mechanism, parents="x u"):
    known = {"x": m.Normal(), "u": m.Normal(), "k": m.Categorical(4)}
    names = parents.split()
    graph = otp.Graph([(one, node) for one in names], nodes=[*names, node])
    model = otp.Model(graph, {**{one: known[one] for one in names}, node: mechanism})
    return otp.fit(model, table[[*names, node]])


def test_slopes_of_a_normal_node_solve_the_penalised_equations(table):
    found = fitted(table, "y", m.Normal(weight=otp.ridge(40.0, 0.1))).model.params()["y"]
    design, precision = np.c_[np.ones(ROWS), table["x"], table["u"]], np.diag([0.0, 40.0, 40.0])
    variance = found["scale"] ** 2
    right = design.T @ table["y"] / variance + precision @ [0, 0.1, 0.1]
    best = np.linalg.solve(design.T @ design / variance + precision, right)
    np.testing.assert_allclose([found["loc"], *found["weight"]], best, rtol=1e-6)
    np.testing.assert_allclose(variance, np.mean((table["y"] - design @ best) ** 2), rtol=1e-6)


def test_a_logit_with_a_ridge_is_that_of_scikit_learn(table):
    # each of two categories has its own slopes, of half the size and opposite sign
    result = fitted(table, "won", m.Bernoulli(weight=otp.ridge(3.0)))
    other = LogisticRegression(C=2 / 3.0, tol=1e-10, max_iter=1000).fit(table[["x", "u"]], table["won"])
    found = result.model.params()["won"]
    np.testing.assert_allclose(found["weight"][:, 1], other.coef_[0], rtol=1e-5)
    np.testing.assert_allclose(found["logits"][1], other.intercept_[0], rtol=1e-5)
    assert "ridge(3) on won.weight" in result.summary().to_text()


def test_a_rate_with_a_ridge_has_no_slope_left(table):
    found = fitted(table, "calls", m.Poisson(weight=otp.ridge(50.0)), "x").model.params()["calls"]
    left = table["calls"] - np.exp(found["log_rate"] + found["weight"] * table["x"])
    np.testing.assert_allclose((left * table["x"]).sum(), 50.0 * found["weight"][0], rtol=1e-4)
    np.testing.assert_allclose(left.sum(), 0.0, atol=1e-3)


@pytest.mark.parametrize("count", [0.0, 0.5, 7.0])
def test_pseudo_counts_are_added(table, count):
    found = fitted(table, "k", m.Categorical(4, probs=otp.pseudo_counts(count)), "").model.params()["k"]["probs"]
    counts = np.bincount(table["k"], minlength=4) + count
    np.testing.assert_allclose(found, counts / counts.sum(), atol=1e-9)


def test_priors_count_once_with_gaps_and_under_hidden_states(table):
    rng = np.random.default_rng(6)
    model = otp.Model(
        otp.Graph([("z", "k"), ("z", "won"), ("z", "y")], hidden=["z"]),
        {
            "z": m.Categorical(2, probs=otp.pseudo_counts(20.0)),
            "k": m.Categorical(4, probs=otp.pseudo_counts(2.0)),
            "won": m.Bernoulli(),
            "y": m.Normal(),
        },
    )
    rows = table[["k", "won", "y"]].mask(rng.random((ROWS, 3)) < 0.1)
    fitted = otp.fit(model, rows).model
    probs, states = fitted.params()["k"]["probs"], fitted.predict_proba(rows, "z").to_numpy()
    # where expectation-maximisation rests: what rows are expected to show, and the prior once
    seen = np.where(rows["k"].isna(), 0, rows["k"]).astype(int)
    counts = np.where(rows["k"].isna().to_numpy()[:, None, None], probs, np.eye(4)[seen][:, None])
    expected = (states[..., None] * counts).sum(0) + 2.0
    np.testing.assert_allclose(probs, expected / expected.sum(-1, keepdims=True), atol=1e-4)
    expected = states.sum(0) + 20.0
    np.testing.assert_allclose(fitted.params()["z"]["probs"], expected / expected.sum(), atol=1e-4)


def test_a_table_that_rows_cannot_fill_is_drawn_to_effects_of_each_parent():
    rng = np.random.default_rng(7)
    table = pd.DataFrame(rng.integers(0, 7, (240, 2)), columns=["a", "b"])
    own = (
        rng.normal(size=7)[table["a"]]
        + rng.normal(size=7)[table["b"]]
        + 1.5 * rng.normal(size=49)[7 * table["a"] + table["b"]]
    )
    table["won"] = (rng.random(240) < 1 / (1 + np.exp(-own))).astype(int)
    nodes = {"a": m.Categorical(7), "b": m.Categorical(7)}
    graph = otp.Graph([("a", "won"), ("b", "won")])
    result = otp.fit(otp.Model(graph, {**nodes, "won": m.Bernoulli()}), table)
    counts = np.zeros((7, 7, 2))
    np.add.at(counts, (table["a"], table["b"], table["won"]), 1)
    levels = np.eye(7)
    ridge = LogisticRegression(tol=1e-10, max_iter=2000).fit(
        np.c_[levels[table["a"]], levels[table["b"]]], table["won"]
    )
    shares = ridge.predict_proba([[*levels[i], *levels[j]] for i in range(7) for j in range(7)]).reshape(7, 7, 2)

    def unlikely(log_size):
        drawn = [dirichlet_multinomial(np.exp(log_size) * p, int(n.sum())).logpmf(n.astype(int)) for p, n in cells]
        return -np.sum(drawn)

    cells = [(p, n) for p, n in zip(shares.reshape(49, 2), counts.reshape(49, 2), strict=True) if n.sum()]
    size = np.exp(minimize_scalar(unlikely, bounds=(-2, 5), method="bounded").x)
    assert 0.5 < size < 50
    best = (counts + size * shares) / (counts.sum(-1, keepdims=True) + size)
    np.testing.assert_allclose(result.model.params()["won"]["probs"], best, atol=0.01)
    assert any("rows' worth" in note for note in result.notes)
    plain = otp.fit(otp.Model(graph, {**nodes, "won": m.Bernoulli(probs=otp.pseudo_counts(0))}), table)
    probs, seen = plain.model.params()["won"]["probs"], counts.sum(-1) > 0
    np.testing.assert_allclose(probs[seen], (counts / counts.sum(-1, keepdims=True).clip(1))[seen], atol=1e-6)


def test_effects_of_groups_are_those_of_a_mixed_model():
    rng = np.random.default_rng(9)
    school = rng.integers(0, 12, ROWS)
    table = pd.DataFrame({"school": school, "y": 2 + rng.normal(0, 0.6, 12)[school] + rng.normal(size=ROWS)})
    nodes = {"school": m.Categorical(12), "y": m.Normal(terms="C(school)", weight=otp.ridge())}
    result = otp.fit(otp.Model(otp.Graph([("school", "y")]), nodes), table)
    other = smf.mixedlm("y ~ 1", table, groups=table["school"]).fit(reml=True)
    effects = [one.iloc[0] for one in other.random_effects.values()]
    np.testing.assert_allclose(result.model.params()["y"]["weight"], effects, rtol=0.02)  # the scale is of all rows
    assert "ridge(by REML) on y.weight" in result.summary().to_text()


def test_files_keep_priors(table, tmp_path):
    result = fitted(table, "won", m.Bernoulli(weight=otp.ridge(3.0)))
    result.model.save(tmp_path / "model.otp")
    again = otp.load(tmp_path / "model.otp")
    assert otp.fit(again, table[["x", "u", "won"]]).loss == pytest.approx(result.loss, rel=1e-7)
    text = "{edges: [[x, won]], nodes: {won: {type: Bernoulli, weight: {ridge: 3}}, k: {probs: {pseudo_counts: 1}}}}"
    with pytest.raises(ModelError, match="type"):
        parse_model_file(text)
    file = parse_model_file(text.replace("k: {", "k: {type: Categorical, "))
    assert file.build(table).structure.mechanisms["won"].weight == otp.ridge(3.0)


def test_priors_count_once_for_rows_in_parts(table, tmp_path):
    nodes = {"x": m.Normal(), "u": m.Normal(), "won": m.Bernoulli(weight=otp.ridge(30.0))}
    graph, rows = otp.Graph([("x", "won"), ("u", "won")]), table[["x", "u", "won"]]
    for part, some in enumerate((rows[:100], rows[100:])):
        some.to_parquet(tmp_path / f"{part}.parquet")
    whole, parts = (otp.fit(otp.Model(graph, nodes), one) for one in (rows, otp.Partitioned(tmp_path)))
    found, expected = (one.model.params()["won"]["weight"] for one in (parts, whole))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_bounds_hold_and_leave_what_is_inside(table):
    free, bound = (fitted(table, "y", m.Normal(weight=one)) for one in (None, otp.between(0.0, None)))
    own, inside = free.model.params()["y"], bound.model.params()["y"]
    assert own["weight"][1] < 0
    assert 0 < inside["weight"][1] < 1e-3
    design = np.c_[np.ones(ROWS), table["x"]]  # without the parent that is held at its bound
    best = np.linalg.lstsq(design, table["y"], rcond=None)[0]
    np.testing.assert_allclose([inside["loc"], inside["weight"][0]], best, atol=1e-3)
    wide = fitted(table, "y", m.Normal(weight=otp.between(-5.0, 5.0))).model.params()["y"]
    np.testing.assert_allclose(wide["weight"], own["weight"], atol=1e-5)
    assert list(bound.standard_errors().query("parameter == 'weight'")["note"]) == ["", "at the edge"]
    file = parse_model_file("{edges: [[x, y]], nodes: {y: {type: Normal, weight: {between: [0, null]}}}}")
    assert file.build(table[["x", "y"]]).structure.mechanisms["y"].weight == otp.between(0, None)
    with pytest.raises(ModelError, match="larger upper"):
        otp.between(1.0, 0.0)


@pytest.mark.parametrize(
    ("low", "high", "end"),
    [(-5.0, None, None), (-1e3, 1e3, None), (1.5, None, 1.5), (None, 0.3, 0.3), (-1.0, 0.3, 0.3)],
)
def test_a_slope_at_its_bound_has_no_error_and_one_inside_that_of_a_free_one(low, high, end):
    rng = np.random.default_rng(9)
    x = rng.normal(size=200)
    table = pd.DataFrame({"x": x, "y": 1.0 + 0.8 * x + rng.normal(size=200)})
    free, bound = (
        otp.fit(otp.Model(otp.Graph([("x", "y")]), {"x": m.Given(), "y": m.Normal(weight=one)}), table)
        .summary()
        .to_frame()
        .loc["y.weight[x]"]
        for one in (None, otp.between(low, high))
    )
    if end is None:
        names = ["estimate", "std_error", "lower", "upper"]
        np.testing.assert_allclose(bound[names].astype(float), free[names].astype(float), rtol=1e-3)
        assert bound["note"] == ""
    else:
        assert bound["estimate"] == pytest.approx(end, abs=1e-3)
        assert bound[["std_error", "lower", "upper"]].isna().all()
        assert bound["note"] == "at the edge"


def test_a_prior_of_levels_counts_in_mixtures():
    rng = np.random.default_rng(10)
    x = np.r_[rng.normal(-3, 1, 60), rng.normal(5, 1, 60)]
    nodes = {"z": m.Categorical(2), "x": m.Normal(loc=otp.ridge(5.0), shared_scale=True)}
    found = otp.fit(otp.Model(otp.Graph([("z", "x")], hidden=["z"]), nodes), pd.DataFrame({"x": x})).model.params()["x"]
    precision = 60 / found["scale"] ** 2
    np.testing.assert_allclose(
        found["loc"],
        [precision * x[:60].mean() / (precision + 5), precision * x[60:].mean() / (precision + 5)],
        atol=0.02,
    )


def test_what_cannot_be_is_refused():
    with pytest.raises(ModelError, match="at least 0"):
        otp.ridge(-1.0)
    with pytest.raises(ModelError, match="number"):
        otp.pseudo_counts("a")
    with pytest.raises(ModelError, match="prior of"):
        otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal(scale=otp.ridge(1.0))})
    with pytest.raises(ModelError, match="pseudo_counts"):
        parse_model_file("{nodes: {k: {type: Categorical, size: 2, probs: {pseudo_counts: -1}}}}")
