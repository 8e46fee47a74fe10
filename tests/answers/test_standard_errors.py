"""Standard errors against closed forms and statsmodels."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import special

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.answers.standard_errors import Information, delta_errors
from otpdag.errors import ModelError
from tests.answers.regression_tables import regression_table

sm = pytest.importorskip("statsmodels.api", reason="statsmodels is the outside truth here")


def lines(result: otp.FitResult, **options) -> pd.DataFrame:
    return result.summary(**options).to_frame()


@pytest.fixture(scope="module")
def regression() -> tuple[pd.DataFrame, otp.FitResult]:
    table = regression_table()
    graph = otp.Graph([(p, c) for c in ("y", "n", "k") for p in ("a", "b")])
    nodes = {"a": m.Normal(), "b": m.Normal(), "y": m.Normal(), "n": m.Poisson(), "k": m.Categorical(2)}
    return table, otp.fit(otp.Model(graph, nodes), table)


def test_a_linear_regression_has_the_errors_of_statsmodels(regression):
    table, result = regression
    design = sm.add_constant(table[["a", "b"]])
    truth = sm.OLS(table["y"], design).fit()
    shrink = np.sqrt(truth.df_resid / len(table))  # maximum likelihood divides by n
    found = lines(result)
    names = ["y.loc", "y.weight[a]", "y.weight[b]"]
    np.testing.assert_allclose(found.loc[names, "estimate"], truth.params, atol=1e-5)
    np.testing.assert_allclose(found.loc[names, "std_error"], truth.bse * shrink, rtol=1e-4)
    reach = 1.959964 * truth.bse["a"] * shrink
    assert found.loc["y.weight[a]", "upper"] == pytest.approx(truth.params["a"] + reach, abs=1e-4)
    scale = found.loc["y.scale"]
    assert scale["std_error"] == pytest.approx(scale["estimate"] / np.sqrt(2 * len(table)), rel=1e-3)


@pytest.mark.parametrize(("level", "reach"), [(0.5, 0.6744898), (0.8, 1.2815516), (0.9, 1.6448536), (0.95, 1.959964)])
def test_ends_are_even_on_the_line_on_which_a_parameter_is_free(regression, level, reach):
    found = lines(regression[1], level=level)
    slope, scale = found.loc["y.weight[a]"], found.loc["y.scale"]
    error = slope["std_error"]
    assert slope["upper"] - slope["estimate"] == pytest.approx(reach * error, rel=1e-5)
    assert slope["estimate"] - slope["lower"] == pytest.approx(reach * error, rel=1e-5)
    factor = np.exp(reach * scale["std_error"] / scale["estimate"])
    assert scale["upper"] / scale["estimate"] == pytest.approx(factor, rel=1e-5)
    assert scale["estimate"] / scale["lower"] == pytest.approx(factor, rel=1e-5)


def test_the_sandwich_is_that_of_statsmodels(regression):
    table, result = regression
    truth = sm.OLS(table["y"], sm.add_constant(table[["a", "b"]])).fit(cov_type="HC0")
    found = lines(result, errors="sandwich")
    np.testing.assert_allclose(found.loc[["y.loc", "y.weight[a]", "y.weight[b]"], "std_error"], truth.bse, rtol=1e-3)


def test_counts_and_categories_have_the_errors_of_statsmodels(regression):
    table, result = regression
    design = sm.add_constant(table[["a", "b"]])
    found = lines(result)
    counts = sm.GLM(table["n"], design, family=sm.families.Poisson()).fit()
    np.testing.assert_allclose(
        found.loc[["n.log_rate", "n.weight[a]", "n.weight[b]"], "std_error"], counts.bse, rtol=1e-3
    )
    logit = sm.Logit(table["k"], design).fit(disp=False)
    names = ["k.logits[1]", "k.weight[a, 1]", "k.weight[b, 1]"]
    np.testing.assert_allclose(found.loc[names, "std_error"], logit.bse, rtol=1e-3)
    assert found.loc["k.logits[0]", "note"] == "reference"


def test_a_table_of_probabilities_has_binomial_errors_and_no_error_at_its_edge():
    table = pd.DataFrame({"a": ["u"] * 60 + ["v"] * 60, "b": ["p"] * 60 + ["p", "q", "r", "r"] * 15})
    model = otp.Model.from_frame(otp.Graph([("a", "b")]), table)
    summary = otp.fit(model, table).summary()
    found = summary.to_frame()
    share = (table.loc[table["a"] == "v", "b"] == "q").mean()
    assert found.loc["b.probs[a=v, q]", "std_error"] == pytest.approx(np.sqrt(share * (1 - share) / 60), rel=1e-3)
    assert 0 < found.loc["b.probs[a=v, q]", "lower"] < share < found.loc["b.probs[a=v, q]", "upper"] < 1
    assert found.loc["b.probs[a=u, p]", "note"] == "at the edge"
    assert np.isnan(found.loc["b.probs[a=u, q]", "std_error"])
    assert any("at the edge" in text for text in summary.warnings)


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_intervals_of_probabilities_are_those_of_their_log_odds(level):
    rng = np.random.default_rng(3)
    table = pd.DataFrame({"k": rng.choice(3, 200, p=[0.05, 0.15, 0.8]), "n": rng.poisson(3.0, 200)})
    table["n"] *= rng.random(200) < 0.7
    nodes = {"k": m.Categorical(3), "n": m.Poisson(extra_zeros="inflated")}
    found = lines(otp.fit(otp.Model(otp.Graph([], nodes=["k", "n"]), nodes), table), level=level)
    shares = table["k"].value_counts(normalize=True)
    for category in range(3):
        other = sm.Logit(table["k"] == category, np.ones(200)).fit(disp=0)
        ends = 1 / (1 + np.exp(-other.conf_int(1 - level).to_numpy()[0]))
        own = found.loc[f"k.probs[{category}]"]
        assert own["estimate"] == pytest.approx(shares[category])
        assert [own["lower"], own["upper"]] == pytest.approx(ends, rel=1e-3)
    below, estimate, above = (special.logit(found.loc["n.zeros", name]) for name in ("lower", "estimate", "upper"))
    assert above - estimate == pytest.approx(estimate - below, rel=1e-6)


def test_probabilities_at_both_ends_of_a_hidden_class_have_no_error():
    rng = np.random.default_rng(2)
    z = rng.integers(0, 2, 300)
    table = pd.DataFrame({"x": 40.0 * z + rng.normal(size=300), "c": np.where(z == 1, 1, rng.integers(0, 2, 300))})
    model = otp.Model(
        otp.Graph([("z", "x"), ("z", "c")], hidden=["z"]),
        {"z": m.Categorical(2), "x": m.Normal(), "c": m.Categorical(2)},
    )
    found = lines(otp.fit(model, table))
    shares = found[found.index.str.startswith("c.probs")]
    at_end = (shares["estimate"] < 1e-3) | (shares["estimate"] > 1 - 1e-3)
    assert at_end.sum() == 2
    assert (shares.loc[at_end, "note"] == "at the edge").all()
    assert shares.loc[at_end, "std_error"].isna().all()
    assert (shares.loc[~at_end, "note"] == "").all()


def test_a_scale_on_its_floor_has_no_error():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"k": ["a"] * 80 + ["b"] * 80, "x": np.r_[np.full(80, 2.0), rng.normal(size=80)]})
    model = otp.Model(otp.Graph([("k", "x")]), {"k": m.Categorical(2), "x": m.Normal(floor=0.05)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otp.ConvergenceWarning)  # the scale creeps towards its floor
        found = lines(otp.fit(model, table))
    assert found.loc["x.scale[k=a]", "note"] == "at the edge"
    free = found.loc["x.scale[k=b]"]
    # the floor is added in squares: the error is that of a normal scale
    assert free["std_error"] == pytest.approx(free["estimate"] / np.sqrt(160), rel=1e-2)


def test_directions_that_the_data_do_not_tell_are_named():
    rng = np.random.default_rng(0)
    a = rng.normal(size=200)
    table = pd.DataFrame({"a": a, "b": 2 * a, "c": rng.normal(size=200), "y": a + rng.normal(size=200)})
    graph = otp.Graph([("a", "y"), ("b", "y"), ("c", "y")])
    nodes = {"a": m.Given(), "b": m.Given(), "c": m.Given(), "y": m.Normal()}
    summary = otp.fit(otp.Model(graph, nodes), table).summary()
    found = summary.to_frame()
    assert found.loc[["y.weight[a]", "y.weight[b]"], "note"].tolist() == ["not identified"] * 2
    assert np.isnan(found.loc["y.weight[a]", "lower"])
    assert found.loc["y.weight[c]", "std_error"] > 0
    assert any("y.weight[a], y.weight[b]" in text for text in summary.warnings)


def test_two_free_factors_are_not_identified():
    rng = np.random.default_rng(1)
    loadings = rng.normal(size=(6, 2))
    table = pd.DataFrame(rng.normal(size=(500, 2)) @ loadings.T + rng.normal(size=(500, 6)), columns=list("abcdew"))
    graph = otp.Graph([(f, x) for f in ("f", "g") for x in "abcdew"], hidden=["f", "g"])
    summary = otp.fit(otp.Model(graph, {node: m.Normal() for node in graph.nodes}), table).summary()
    found = summary.to_frame()
    weights = found[found.index.str.contains("weight")]
    assert (weights["note"] == "not identified").all()
    assert (found.loc[found.index.str.endswith(".scale") & ~found.index.str.startswith(("f", "g")), "note"] == "").all()


def test_sequences_have_the_errors_of_their_chain():
    # a Markov chain that is seen: transitions are multinomial counts
    rng = np.random.default_rng(0)
    stay = np.array([[0.8, 0.2], [0.4, 0.6]])
    state, states = 0, []
    for _ in range(1500):
        state = int(rng.random() < stay[state, 1])
        states.append(state)
    x = np.where(np.array(states) == 1, 40.0, -40.0) + rng.normal(size=1500)  # states as good as seen
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal()})
    found = lines(otp.fit(model, otp.Sequences([pd.DataFrame({"x": x})])))
    visits = np.bincount(states[:-1], minlength=2)
    share = found.loc["z.probs[z[-1]=0, 1]", "estimate"]
    expected = np.sqrt(share * (1 - share) / visits[0])
    assert found.loc["z.probs[z[-1]=0, 1]", "std_error"] == pytest.approx(expected, rel=1e-3)


def test_other_methods_and_bad_arguments():
    table = regression_table(60)[["a", "y"]]
    result = otp.fit(otp.Model(otp.Graph([("a", "y")]), {"a": m.Normal(), "y": m.Normal()}), table)
    with pytest.raises(ModelError, match=r"errors must be one of 'information', 'sandwich', .*; got 'magic'"):
        result.summary(errors="magic")
    with pytest.warns(otp.ConvergenceWarning):
        transported = otp.fit(result.model, table, method="transport", steps=5)
    summary = transported.summary()
    assert summary.facts["errors"] == "none"
    assert any("errors='bootstrap'" in text for text in summary.warnings)


def test_the_bootstrap_on_request_is_labelled_by_names():
    table = regression_table(120)[["a", "y"]]
    result = otp.fit(otp.Model(otp.Graph([("a", "y")]), {"a": m.Normal(), "y": m.Normal()}), table)
    # the noise is not normal: the bootstrap agrees with the sandwich, not with the information
    by_curvature, drawn = lines(result, errors="sandwich"), lines(result, errors="bootstrap", draws=100)
    assert list(by_curvature.index) == list(drawn.index)
    np.testing.assert_allclose(drawn["std_error"], by_curvature["std_error"], rtol=0.25)
    assert result.intervals(draws=10).loc[("y", "weight", (0,)), "at"] == "a"


def test_a_group_without_events_is_bounded_from_above():
    rng = np.random.default_rng(0)
    group = rng.integers(0, 3, 300)
    empty = int((group == 2).sum())
    counts = np.where(group == 2, 0, rng.poisson(1.5, 300))
    binary = np.where(group == 2, 0, rng.integers(0, 2, 300))
    table = pd.DataFrame({"g": group, "y": counts, "b": binary})
    mechanisms = {"g": m.Categorical(3), "y": m.Poisson(), "b": m.Bernoulli()}
    result = otp.fit(otp.Model(otp.Graph([("g", "y"), ("g", "b")]), mechanisms), table)
    assert any("no event was seen behind the log_rate of 'y' where g = 2" in note for note in result.notes)
    found = result.summary(level=0.9).to_frame()
    rate, absent, present = (found.loc[name] for name in ("y.log_rate[g=2]", "b.probs[g=2, 0]", "b.probs[g=2, 1]"))
    # exp(-rate n) = (1 - p)^n = 0.1
    assert (rate["lower"], np.exp(rate["upper"])) == (-np.inf, pytest.approx(np.log(10) / empty, rel=1e-6))
    assert (present["lower"], present["upper"]) == (0.0, pytest.approx(1 - 0.1 ** (1 / empty), rel=1e-5))
    assert (absent["lower"], absent["upper"]) == (pytest.approx(0.1 ** (1 / empty), rel=1e-6), 1.0)
    assert {rate["note"], absent["note"], present["note"]} == {"at the edge"}


# -- what information tells --------------------------------------------------------------------------------------------


def information(values):
    """Of these curvatures along directions that lean."""
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(len(values), len(values))))[0]
    return Information(torch.from_numpy(turn @ np.diag(values) @ turn.T))


@pytest.mark.parametrize(("flat", "weakest"), [(0.0, 1.0), (1e-9, 1.0), (1e-9, 1e-4), (3e-8, 1e-3), (1e-8, 2e-5)])
def test_what_no_data_tell_is_told_from_what_they_tell_a_little(flat, weakest):
    """A number leans towards a flat direction: by a thousandth, what rounding may have turned it by, or a fiftieth."""
    known = information([3.0, weakest, flat])
    unit = np.diag(known.matrix) ** -0.5
    values, vectors = np.linalg.eigh(unit[:, None] * known.matrix.numpy() * unit)
    assert values[0] < 1e-6 < values[1]
    alone, found = unit * vectors[:, 0], known.flat[:, 0].numpy()
    np.testing.assert_allclose(np.abs(found), np.abs(alone) / np.linalg.norm(alone), atol=1e-6)
    across = np.cross(found, [1.0, 0.0, 0.0])
    across /= np.linalg.norm(across)

    def untold(own, *leans):
        return own.untold(torch.from_numpy(np.array([across + lean * found for lean in leans]))).tolist()

    lean = max(1e-3, min(np.sqrt(abs(values[0]) / values[1]), 0.02))
    assert untold(known, 0.9 * lean, 1.1 * lean, -1.1 * lean) == [False, True, True]
    assert untold(Information(known.matrix).without(known.flat), 9e-4, 1.1e-3) == [False, True]
    assert known.untold(torch.zeros(1, 3, dtype=torch.float64)).tolist() == [True]


def test_the_covariance_is_the_inverse_and_with_scores_the_sandwich():
    known = information([4.0, 1.0, 0.25])
    inverse, scores = np.linalg.inv(known.matrix.numpy()), np.random.default_rng(1).normal(size=(20, 3))
    np.testing.assert_allclose(known.covariance.numpy(), inverse)
    robust = Information(known.matrix, torch.from_numpy(scores)).covariance
    np.testing.assert_allclose(robust.numpy(), inverse @ scores.T @ scores @ inverse)
    slope = np.array([1.0, -2.0, 0.5])
    found = delta_errors(torch.from_numpy(slope)[None], robust).item()
    assert found == pytest.approx(np.linalg.norm(scores @ inverse @ slope))


@pytest.mark.parametrize(("lowest", "is_maximum"), [(0.0, True), (-2e-4, True), (-4e-4, False)])
def test_a_likelihood_that_rises_by_more_than_rounding_has_no_maximum(lowest, is_maximum):
    assert information([3.0, 1.0, lowest]).is_of_maximum == is_maximum
