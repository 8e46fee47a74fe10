"""Posteriors, likelihoods, state probabilities and imputation, against conjugate formulas."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from scipy.special import softmax
from sklearn.mixture import GaussianMixture

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine import Adam
from otpdag.errors import DataError, ModelError
from otpdag.likelihood import row_posterior
from otpdag.objective import Drawn
from otpdag.settings import Objective, PushForward
from otpdag.spaces import Real

RNG = np.random.default_rng(31)

# -- a factor model: everything is known in closed form ---------------------------------------------------------------

LOADINGS, NOISE, CENTRE = np.array([1.0, -0.7, 0.5]), np.array([0.6, 0.8, 1.1]), np.array([1.0, 0.0, -2.0])
COVARIANCE = np.outer(LOADINGS, LOADINGS) + np.diag(NOISE**2)


def factor_model():
    names = ["a", "b", "c"]
    model = otp.Model(
        otp.Graph([("z", n) for n in names], hidden=["z"]), {"z": m.Normal(), **{n: m.Normal() for n in names}}
    )
    return model.set_params(
        {n: {"loc": CENTRE[i], "weight": LOADINGS[i], "scale": NOISE[i]} for i, n in enumerate(names)}
    )


def factor_rows(n, missing=0.0):
    x = CENTRE + RNG.normal(size=(n, 1)) * LOADINGS + RNG.normal(size=(n, 3)) * NOISE
    x[RNG.random(x.shape) < missing] = np.nan
    return pd.DataFrame(x, columns=["a", "b", "c"])


@pytest.mark.parametrize("missing", [0.0, 0.4])
def test_the_posterior_of_a_factor_is_conjugate(missing):
    table = factor_rows(30, missing)
    draws = factor_model().posterior(table, draws=600, seed=1)["z"].to_numpy().reshape(30, 600)
    x = table.to_numpy()
    precision = 1 + np.nansum(np.where(np.isnan(x), np.nan, LOADINGS**2 / NOISE**2), 1)
    mean = np.nansum((x - CENTRE) * LOADINGS / NOISE**2, 1) / precision
    error = 1 / np.sqrt(precision * 600)
    np.testing.assert_array_less(np.abs(draws.mean(1) - mean), 4.5 * error)
    np.testing.assert_allclose(draws.var(1), 1 / precision, rtol=0.3)
    np.testing.assert_allclose((draws.var(1) * precision).mean(), 1, rtol=0.05)


def test_a_row_that_shows_nothing_has_the_prior_for_a_posterior():
    draws = factor_model().posterior(pd.DataFrame({"a": [np.nan, 1.0]}), draws=4000, seed=1, partial=True)
    assert draws.loc[0, "z"].mean() == pytest.approx(0, abs=0.1)
    assert draws.loc[0, "z"].std() == pytest.approx(1, abs=0.05)


def test_imputed_leaves_are_conditional_means():
    table = factor_rows(40, 0.35)
    filled = factor_model().impute(table, draws=800, seed=3)
    x = table.to_numpy()
    for i, row in enumerate(x):
        gap, seen = np.isnan(row), ~np.isnan(row)
        np.testing.assert_array_equal(filled.to_numpy()[i, seen], row[seen])
        if gap.any():
            gain = COVARIANCE[np.ix_(gap, seen)] @ np.linalg.inv(COVARIANCE[np.ix_(seen, seen)])
            mean = CENTRE[gap] + gain @ (row[seen] - CENTRE[seen])
            variance = COVARIANCE[np.ix_(gap, gap)] - gain @ COVARIANCE[np.ix_(seen, gap)]
            error = np.sqrt(np.diag(variance) / 800)
            np.testing.assert_array_less(np.abs(filled.to_numpy()[i, gap] - mean), 4.5 * error)


def test_random_imputation_has_the_conditional_spread():
    table = pd.DataFrame({"a": np.full(3000, 2.0), "b": np.nan, "c": np.full(3000, -2.0)})
    filled = factor_model().impute(table, random=True, seed=5)["b"]
    seen = np.array([True, False, True])
    gain = COVARIANCE[1, seen] @ np.linalg.inv(COVARIANCE[np.ix_(seen, seen)])
    assert filled.mean() == pytest.approx(gain @ np.array([1.0, 0.0]), abs=0.06)
    assert filled.var() == pytest.approx(COVARIANCE[1, 1] - gain @ COVARIANCE[seen, 1], rel=0.08)


def test_the_likelihood_score_is_the_mean_of_the_exact_one():
    table = factor_rows(200, 0.2)
    exact = 0.0
    for row in table.to_numpy():
        seen = ~np.isnan(row)
        if seen.any():
            exact += stats.multivariate_normal(CENTRE[seen], COVARIANCE[np.ix_(seen, seen)]).logpdf(row[seen]) / 200
    assert factor_model().score(table, kind="likelihood") == pytest.approx(exact, abs=1e-6)


def test_the_grid_resolves_a_sharp_posterior():
    """Thirty good indicators: the posterior is many times narrower than the prior."""
    names = [f"x{i}" for i in range(30)]
    model = otp.Model(
        otp.Graph([("z", n) for n in names], hidden=["z"]), {"z": m.Normal(), **{n: m.Normal() for n in names}}
    )
    model.set_params({n: {"loc": 0.0, "weight": 1.0, "scale": 0.15} for n in names})
    z = RNG.normal(size=20)
    x = z[:, None] + 0.15 * RNG.normal(size=(20, 30))
    exact = stats.multivariate_normal(np.zeros(30), 1.0 + 0.15**2 * np.eye(30)).logpdf(x)
    assert model.score(x, kind="likelihood") == pytest.approx(exact.mean(), abs=1e-6)
    posterior = model.posterior(x, draws=200, seed=0)["z"].to_numpy().reshape(20, 200)
    np.testing.assert_allclose(posterior.mean(1), x.mean(1) / (1 + 0.15**2 / 30), atol=0.01)


# -- mixtures ---------------------------------------------------------------------------------------------------------


def test_responsibilities_are_scikit_learns():
    weights, means, scales = (
        np.array([0.3, 0.7]),
        np.array([[0.0, 1.0], [2.0, -1.0]]),
        np.array([[1.0, 0.5], [0.8, 1.5]]),
    )
    peer = GaussianMixture(2, covariance_type="diag")
    peer.weights_, peer.means_, peer.covariances_, peer.precisions_cholesky_ = weights, means, scales**2, 1 / scales
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal(2)})
    model.set_params({"z": {"probs": weights}, "x": {"loc": means, "scale": scales}})
    x = RNG.normal(1, 2, size=(100, 2))
    found = model.predict_proba(pd.DataFrame(x, columns=["x.0", "x.1"], index=np.arange(100) + 7), "z")
    np.testing.assert_allclose(found, peer.predict_proba(x), atol=1e-10)
    assert list(found.index[:2]) == [7, 8]
    draws = model.posterior(x, draws=500, seed=0)["z"].to_numpy().reshape(100, 500)
    error = np.sqrt(found[1] * found[0] / 500)
    np.testing.assert_array_less(np.abs(draws.mean(1) - found[1]), 4.5 * error + 1e-3)


def test_two_hidden_categories_and_a_hidden_number_are_weighed_together():
    """u -> x <- z with u a number: P(z | x) is a mixture of normals."""
    model = otp.Model(
        otp.Graph([("z", "x"), ("u", "x")], hidden=["z", "u"]),
        {"z": m.Categorical(2), "u": m.Normal(), "x": m.Normal()},
    )
    model.set_params({"z": {"probs": [0.4, 0.6]}, "x": {"loc": [-1.0, 2.0], "weight": 0.8, "scale": [0.5, 0.7]}})
    x = RNG.normal(size=50)
    logits = np.log([0.4, 0.6]) + stats.norm([-1.0, 2.0], np.sqrt(0.64 + np.array([0.25, 0.49]))).logpdf(x[:, None])
    np.testing.assert_allclose(model.predict_proba(x[:, None], "z"), softmax(logits, 1), atol=1e-7)


def test_a_hidden_category_above_a_missing_node_falls_back_on_its_prior():
    """h -> x -> y with y hidden: a row without x tells nothing about h, and must not be refused."""
    graph = otp.Graph([("h", "x"), ("x", "y")], hidden=["h", "y"])
    model = otp.Model(graph, {"h": m.Categorical(2), "x": m.Categorical(2), "y": m.Normal()})
    model.set_params({"h": {"probs": [0.3, 0.7]}, "x": {"probs": [[0.9, 0.1], [0.2, 0.8]]}, "y": {"loc": [0.0, 1.0]}})
    found = model.predict_proba(pd.DataFrame({"x": [0.0, np.nan, 1.0]}), "h").to_numpy()
    np.testing.assert_allclose(found[1], [0.3, 0.7])
    np.testing.assert_allclose(found[0], [0.27 / 0.41, 0.14 / 0.41])


# -- missing inner nodes, several unknown numbers ---------------------------------------------------------------------


def test_a_missing_cause_is_imputed_from_its_effect():
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    model.set_params({"x": {"loc": 1.0, "scale": 2.0}, "y": {"loc": 0.0, "weight": 0.5, "scale": 0.5}})
    table = pd.DataFrame({"x": [np.nan, np.nan, 3.0], "y": [0.0, 2.0, 1.0]})
    filled = model.impute(table, draws=4000)["x"]
    slope = 2.0 / (1.0 + 0.25)
    np.testing.assert_allclose(filled[:2], 1.0 + slope * (table["y"][:2] - 0.5), atol=0.06)
    assert filled[2] == 3.0


def test_missing_categories_and_counts_are_imputed_by_the_likeliest_and_the_median():
    model = otp.Model(otp.Graph([("k", "n"), ("k", "x")]), {"k": m.Categorical(2), "n": m.Poisson(), "x": m.Normal()})
    model.set_params(
        {
            "k": {"probs": [0.5, 0.5]},
            "n": {"log_rate": np.log([2.0, 20.0])},
            "x": {"loc": [-3.0, 3.0], "scale": [1.0, 1.0]},
        }
    )
    table = pd.DataFrame({"k": [np.nan, np.nan, 0.0], "n": [1.0, np.nan, np.nan], "x": [np.nan, 3.0, -3.0]})
    filled = model.impute(table)
    assert filled["k"].tolist() == [0, 1, 0]
    assert filled["n"].dtype.kind == "i"
    assert abs(filled["n"][1] - 20) <= 2
    assert filled["n"][2] in (1, 2, 3)
    assert filled["x"][0] == pytest.approx(-3, abs=0.4)


def test_large_tables_are_taken_in_chunks_with_the_same_result(monkeypatch):
    table = factor_rows(50, 0.2)
    model = factor_model()
    whole = model.score(table, kind="likelihood")
    monkeypatch.setattr(row_posterior, "ROWS_OF_A_LAYOUT", 20)
    assert model.score(table, kind="likelihood") == pytest.approx(whole, rel=1e-12)
    assert model.posterior(table, draws=3, seed=0).shape == (150, 1)


def test_posterior_draws_depend_on_the_seed_alone():
    table, model = factor_rows(10, 0.2), factor_model()
    first = model.posterior(table, draws=5, seed=1)
    pd.testing.assert_frame_equal(first, model.posterior(table, draws=5, seed=1))
    assert not np.allclose(first, model.posterior(table, draws=5, seed=2))
    assert first.index.names == ["row", "draw"]
    state = torch.random.get_rng_state()
    model.impute(table, seed=1)
    assert torch.equal(state, torch.random.get_rng_state())


# -- without densities ------------------------------------------------------------------------------------------------


def test_without_a_density_the_learned_map_draws():
    """A decoder without noise has no density: likelihoods are refused, posteriors come from the backward map."""
    module = torch.nn.Linear(1, 2)
    graph = otp.Graph([("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Normal(), "x": m.Decoder(module, Real(2))})
    x = RNG.normal(size=(80, 1)) * [1.0, -0.5] + [0.3, 0.0]
    drawn = Drawn(noise="sampled", batch_size=80)
    method = otp.Method("short", Objective(push_forward=PushForward(1.0)), drawn, Adam(steps=150, learning_rate=0.05))
    otp.fit(model, pd.DataFrame(x, columns=["x.0", "x.1"]), method=method, restarts=1)
    draws = model.posterior(pd.DataFrame(x, columns=["x.0", "x.1"]), draws=20, seed=0)["z"].to_numpy().reshape(80, 20)
    assert abs(np.corrcoef(draws.mean(1), x[:, 0])[0, 1]) > 0.9
    with pytest.raises(ModelError, match="a likelihood needs the density of every observed node; Decoder at node 'x'"):
        model.score(pd.DataFrame(x, columns=["x.0", "x.1"]), kind="likelihood")


def test_without_a_density_and_a_map_draws_are_refused():
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Normal(), "x": m.Decoder(torch.nn.Linear(1, 1))})
    model.set_params({"x": {"module.weight": 1.0, "module.bias": 0.0}})
    with pytest.raises(ModelError, match="hidden values cannot be drawn"):
        model.posterior(np.zeros((3, 1)))


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_bad_requests_are_named():
    model = factor_model()
    table = factor_rows(5)
    with pytest.raises(ModelError, match="node must be a category; 'z' is not: use predict"):
        model.predict_proba(table, "z")
    with pytest.raises(ModelError, match="draws must be a whole number of at least 1; got 0"):
        model.posterior(table, draws=0)
    with pytest.raises(ModelError, match="kind must be one of None, 'transport', 'likelihood'; got 'wrong'"):
        model.score(table, kind="wrong")
    seen = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    seen.set_params({"x": {"loc": 0.0, "scale": 1.0}, "y": {"loc": 0.0, "weight": 1.0, "scale": 1.0}})
    with pytest.raises(ModelError, match="no hidden nodes; missing cells are filled in by impute"):
        seen.posterior(pd.DataFrame({"x": [0.0]}))


def test_missing_covariates_are_refused_everywhere():
    model = otp.Model(
        otp.Graph([("g", "y"), ("z", "y")], hidden=["z"]), {"g": m.Given(), "z": m.Categorical(2), "y": m.Normal()}
    )
    model.set_params({"z": {"probs": [0.5, 0.5]}, "y": {"loc": [0.0, 1.0], "weight": 1.0, "scale": [1.0, 1.0]}})
    table = pd.DataFrame({"g": [0.0, np.nan, 1.0], "y": [0.0, 1.0, 2.0]})
    for use in (
        lambda: model.distance(table),
        lambda: model.score(table, kind="likelihood"),
        lambda: model.posterior(table),
        lambda: model.impute(table),
        lambda: model.predict_proba(table, "z"),
        lambda: model.sample(3, seed=0, given=table[["g"]]),
        lambda: model.distance(table[["y"]]),
    ):
        with pytest.raises(DataError, match="node 'g' is Given: its cells must not be missing; one is, in row"):
            use()
