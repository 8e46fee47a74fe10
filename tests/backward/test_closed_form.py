"""The closed-form backward map against exact likelihoods: scikit-learn, scipy, and brute-force sums."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from scipy.special import logsumexp
from sklearn.mixture import GaussianMixture

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward.closed_form import SumSizes, evaluate, group_rows, normal_draws, standardised
from otpdag.data import encode
from otpdag.errors import ModelError

RNG = np.random.default_rng(20240607)


def log_likelihood(model, table, *, options=None, count_range=None):
    """Row by row, with the layout under test (no learned proposal)."""
    batch = encode(table, model._known_schema(), hidden=model.graph.hidden, partial=True)
    generator = torch.Generator().manual_seed(1)
    groups = group_rows(
        model.structure, batch, generator=generator, options=options or SumSizes(), count_range=count_range
    )
    found = np.full(batch.rows, np.nan)
    for group in groups:
        result = evaluate(model.structure, model.fitted.naturals, group)
        joint = torch.logsumexp(result.log_prior + result.log_likelihood, -1)
        found[group.rows] = joint.expand(1, len(group.rows))[0].numpy()
    assert np.isfinite(found).all()
    return found


def mvn_of_seen(x, mean, covariance):
    """Log-density of the seen cells of each row."""
    found = np.zeros(len(x))
    for i, row in enumerate(x):
        seen = ~np.isnan(row)
        if seen.any():
            found[i] = stats.multivariate_normal(mean[seen], covariance[np.ix_(seen, seen)]).logpdf(row[seen])
    return found


# -- points and weights -----------------------------------------------------------------------------------------------


def test_quasi_random_draws_are_normal_and_differ_between_rows():
    draws = normal_draws(3, 512, 2, torch.Generator().manual_seed(0))
    assert draws.shape == (3, 512, 2)
    assert torch.isfinite(draws).all()
    np.testing.assert_allclose(draws.mean(1), 0, atol=0.02)
    np.testing.assert_allclose(draws.var(1), 1, atol=0.1)
    assert not torch.allclose(draws[0], draws[1])


def test_standardised_points_have_exact_moments():
    points = standardised(normal_draws(3, 40, 4, torch.Generator().manual_seed(0)))
    torch.testing.assert_close(points.mean(1), torch.zeros(3, 4).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(points.mT @ points / 40, torch.eye(4).double().expand(3, 4, 4), atol=1e-10, rtol=0)


# -- one hidden node --------------------------------------------------------------------------------------------------


def mixture_model(weights, means, scales):
    d = means.shape[1]
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(len(weights)), "x": m.Normal(d)})
    return model.set_params({"z": {"probs": weights}, "x": {"loc": means, "scale": scales}})


WEIGHTS = np.array([0.5, 0.2, 0.3])
MEANS = np.array([[0.0, 1.0], [3.0, -2.0], [-2.0, 0.5]])
SCALES = np.array([[1.0, 0.5], [0.7, 1.2], [2.0, 0.4]])


def mixture_rows(n):
    z = RNG.choice(3, n, p=WEIGHTS)
    return MEANS[z] + SCALES[z] * RNG.normal(size=(n, 2))


def test_a_gaussian_mixture_has_scikit_learns_log_likelihood():
    x = mixture_rows(200)
    peer = GaussianMixture(3, covariance_type="diag")
    peer.weights_, peer.means_, peer.covariances_ = WEIGHTS, MEANS, SCALES**2
    peer.precisions_cholesky_ = 1 / SCALES
    model = mixture_model(WEIGHTS, MEANS, SCALES)
    np.testing.assert_allclose(log_likelihood(model, x), peer.score_samples(x), rtol=1e-10)


def test_a_mixture_with_missing_cells_integrates_them_out():
    x = mixture_rows(60)
    x[RNG.random(x.shape) < 0.3] = np.nan
    x[0] = np.nan
    model = mixture_model(WEIGHTS, MEANS, SCALES)
    exact = logsumexp(
        [
            np.log(w) + np.nansum(stats.norm(mu, s).logpdf(x), -1)
            for w, mu, s in zip(WEIGHTS, MEANS, SCALES, strict=True)
        ],
        axis=0,
    )
    found = log_likelihood(model, x)
    np.testing.assert_allclose(found, exact, rtol=1e-10, atol=1e-12)
    assert found[0] == pytest.approx(0, abs=1e-12)


LOADINGS, NOISE, CENTRE = np.array([1.0, -0.7, 0.5]), np.array([0.6, 0.8, 1.1]), np.array([1.0, 0.0, -2.0])


def factor_model():
    names = ["a", "b", "c"]
    graph = otp.Graph([("z", name) for name in names], hidden=["z"])
    model = otp.Model(graph, {"z": m.Normal(), **{name: m.Normal() for name in names}})
    params = {n: {"loc": CENTRE[i], "weight": LOADINGS[i], "scale": NOISE[i]} for i, n in enumerate(names)}
    return model.set_params(params)


def factor_rows(n):
    return CENTRE + RNG.normal(size=(n, 1)) * LOADINGS + RNG.normal(size=(n, 3)) * NOISE


def test_a_factor_model_has_the_multivariate_normal_log_likelihood():
    x = factor_rows(100)
    exact = stats.multivariate_normal(CENTRE, np.outer(LOADINGS, LOADINGS) + np.diag(NOISE**2)).logpdf(x)
    np.testing.assert_allclose(log_likelihood(factor_model(), x), exact, rtol=1e-6)


def test_a_factor_model_with_missing_leaves_has_the_marginal_log_likelihood():
    x = factor_rows(80)
    x[RNG.random(x.shape) < 0.4] = np.nan
    x[3] = np.nan
    exact = mvn_of_seen(x, CENTRE, np.outer(LOADINGS, LOADINGS) + np.diag(NOISE**2))
    np.testing.assert_allclose(log_likelihood(factor_model(), x), exact, rtol=1e-6, atol=1e-9)


def two_factor_model():
    weights = np.array([[1.0, 0.3], [0.5, -0.6], [-0.4, 0.9], [0.2, 0.7]])
    names = [f"x{i}" for i in range(4)]
    graph = otp.Graph([(z, name) for name in names for z in ("u", "v")], hidden=["u", "v"])
    model = otp.Model(graph, {"u": m.Normal(), "v": m.Normal(), **{name: m.Normal() for name in names}})
    model.set_params({n: {"loc": 0.0, "weight": weights[i], "scale": 0.7} for i, n in enumerate(names)})
    return model, weights @ weights.T + 0.49 * np.eye(4)


def test_two_hidden_numbers_by_draws_from_the_model():
    model, covariance = two_factor_model()
    x = RNG.multivariate_normal(np.zeros(4), covariance, size=60)
    exact = stats.multivariate_normal(np.zeros(4), covariance).logpdf(x)
    found = log_likelihood(model, x, options=SumSizes(prior_draws=8192))
    np.testing.assert_allclose(found, exact, atol=0.1)
    assert abs((found - exact).mean()) < 0.005


# -- categories -------------------------------------------------------------------------------------------------------


def latent_class_model():
    """Two hidden categories (one above the other) and three observed, one with two parents."""
    graph = otp.Graph([("u", "v"), ("u", "a"), ("v", "a"), ("v", "b"), ("a", "c")], hidden=["u", "v"])
    sizes = {"u": 2, "v": 3, "a": 2, "b": 3, "c": 2}
    model = otp.Model(graph, {node: m.Categorical(size) for node, size in sizes.items()})
    tables = {
        "u": RNG.dirichlet([2, 2]),
        "v": RNG.dirichlet([1, 1, 1], 2),
        "a": RNG.dirichlet([1, 1], (2, 3)),
        "b": RNG.dirichlet([1, 1, 1], 3),
        "c": RNG.dirichlet([1, 1], 2),
    }
    return model.set_params({node: {"probs": table} for node, table in tables.items()}), tables


def enumerate_latent_class(t, row):
    """Probability of the seen cells of one row, every unknown cell summed over."""
    options = [range(2), range(3)]
    options += [range(k) if np.isnan(cell) else [int(cell)] for cell, k in zip(row, (2, 3, 2), strict=True)]
    total = 0.0
    for u, v, a, b, c in itertools.product(*options):
        total += t["u"][u] * t["v"][u, v] * t["a"][u, v, a] * t["b"][v, b] * t["c"][a, c]
    return total


def test_latent_classes_equal_a_brute_force_sum_for_every_pattern():
    model, tables = latent_class_model()
    cells = [[0, 1, np.nan], [0, 1, 2, np.nan], [0, 1, np.nan]]
    rows = np.array(list(itertools.product(*cells)), dtype=float)
    table = pd.DataFrame(rows, columns=["a", "b", "c"])
    exact = np.log([enumerate_latent_class(tables, row) for row in rows])
    np.testing.assert_allclose(log_likelihood(model, table), exact, atol=1e-10)


# -- missing inner nodes ----------------------------------------------------------------------------------------------


def chain_model():
    """X1 -> X2 -> X3 and X1 -> X3, linear and normal: everything is one multivariate normal."""
    graph = otp.Graph([("x1", "x2"), ("x1", "x3"), ("x2", "x3")])
    model = otp.Model(graph, {n: m.Normal() for n in ("x1", "x2", "x3")})
    model.set_params(
        {
            "x1": {"loc": 1.0, "scale": 2.0},
            "x2": {"loc": -0.5, "weight": 0.8, "scale": 1.5},
            "x3": {"loc": 0.3, "weight": [0.4, -0.6], "scale": 1.0},
        }
    )
    b = np.array([[0, 0, 0], [0.8, 0, 0], [0.4, -0.6, 0]])
    inverse = np.linalg.inv(np.eye(3) - b)
    return model, inverse @ [1.0, -0.5, 0.3], inverse @ np.diag([4.0, 2.25, 1.0]) @ inverse.T


def chain_rows(n, missing):
    _, mean, covariance = chain_model()
    x = RNG.multivariate_normal(mean, covariance, size=n)
    x[RNG.random(x.shape) < missing] = np.nan
    return x, mvn_of_seen(x, mean, covariance)


def test_missing_inner_numbers_have_the_marginal_log_likelihood():
    model, *_ = chain_model()
    x, exact = chain_rows(200, 0.3)
    few = np.isnan(x[:, :2]).sum(1) < 2  # one unknown number is integrated on a grid
    found = log_likelihood(model, pd.DataFrame(x, columns=["x1", "x2", "x3"]), options=SumSizes(prior_draws=4096))
    np.testing.assert_allclose(found[few], exact[few], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(found[~few], exact[~few], atol=0.02)  # two by quasi-random draws


def test_merged_patterns_equal_separate_ones():
    model, *_ = chain_model()
    x, exact = chain_rows(120, 0.3)
    table = pd.DataFrame(x, columns=["x1", "x2", "x3"])
    merged = log_likelihood(model, table, options=SumSizes(prior_draws=16384, patterns=1))
    np.testing.assert_allclose(merged, exact, atol=0.03)


def mixed_model():
    """A category and a count with children, among them a number."""
    graph = otp.Graph([("g", "n"), ("g", "x"), ("n", "x"), ("n", "y"), ("g", "y")])
    model = otp.Model(graph, {"g": m.Categorical(2), "n": m.Poisson(), "x": m.Normal(), "y": m.Categorical(2)})
    model.set_params(
        {
            "g": {"probs": [0.4, 0.6]},
            "n": {"log_rate": np.log([1.5, 4.0])},
            "x": {"loc": [0.0, -1.0], "weight": 0.5, "scale": [0.8, 1.2]},
            "y": {"logits": [[0.0, 0.5], [0.0, -0.4]], "weight": [[0.0, 0.3]]},
        }
    )
    return model


def enumerate_mixed(rows):
    """Exact log-likelihood of the seen cells of (g, n, x, y) by a sum over g and n."""
    found = np.zeros(len(rows))
    g, n = np.meshgrid([0, 1], np.arange(80), indexing="ij")
    prior = np.log(np.array([0.4, 0.6])[g]) + stats.poisson.logpmf(n, np.array([1.5, 4.0])[g])
    logit = np.array([0.5, -0.4])[g] + 0.3 * n
    for i, (g_cell, n_cell, x, y) in enumerate(rows):
        terms = prior.copy()
        terms[~np.isnan(g_cell) & (g != g_cell) | ~np.isnan(n_cell) & (n != n_cell)] = -np.inf
        if not np.isnan(x):
            scale = np.array([0.8, 1.2])[g]
            terms += -0.5 * ((x + g - 0.5 * n) / scale) ** 2 - np.log(scale * np.sqrt(2 * np.pi))
        if not np.isnan(y):
            terms -= np.log1p(np.exp(-logit if y == 1 else logit))
        found[i] = logsumexp(terms)
    return found


def mixed_rows(n, missing):
    g = RNG.integers(0, 2, n)
    count = RNG.poisson(np.array([1.5, 4.0])[g])
    x = -1.0 * g + 0.5 * count + RNG.normal(size=n)
    rows = np.stack([g, count, x, RNG.integers(0, 2, n)], 1).astype(float)
    rows[RNG.random(rows.shape) < missing] = np.nan
    rows[0] = np.nan
    return rows


@pytest.mark.parametrize("patterns", [12, 2, 1])
def test_missing_categories_and_counts_equal_a_sum_whether_merged_or_not(patterns):
    rows = mixed_rows(150, 0.3)
    exact = enumerate_mixed(rows)
    table = pd.DataFrame(rows, columns=["g", "n", "x", "y"])
    found = log_likelihood(mixed_model(), table, options=SumSizes(patterns=patterns), count_range={"n": 40.0})
    np.testing.assert_allclose(found, exact, atol=1e-8)
    assert found[0] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("patterns", [12, 1])
def test_large_counts_are_summed_on_a_coarser_support(patterns):
    """Beyond `count_atoms` the support is strided; known counts, on the grid or not, keep their exact probability."""
    model = otp.Model(otp.Graph([("n", "x")]), {"n": m.Poisson(), "x": m.Normal()})
    model.set_params({"n": {"log_rate": np.log(180.0)}, "x": {"loc": 0.0, "weight": 0.1, "scale": 2.0}})
    count = RNG.poisson(180.0, 60).astype(float)
    x = 0.1 * count + 2 * RNG.normal(size=60)
    count[:30] = np.nan
    count[40:45] += 200  # a new row may lie outside of the range that the fit saw
    x[50:] = np.nan
    support = np.arange(600)
    prior = stats.poisson(180.0).logpmf(support)
    exact = np.zeros(60)
    for i in range(60):
        at = support if np.isnan(count[i]) else np.array([int(count[i])])
        terms = prior[at] + (0 if np.isnan(x[i]) else stats.norm(0.1 * at, 2.0).logpdf(x[i]))
        exact[i] = logsumexp(terms)
    table = pd.DataFrame({"n": count, "x": x})
    found = log_likelihood(model, table, options=SumSizes(patterns=patterns), count_range={"n": 300.0})
    np.testing.assert_allclose(found, exact, atol=1e-4)


@pytest.mark.parametrize("patterns", [12, 1])
def test_a_partly_seen_inner_vector_keeps_what_is_seen(patterns):
    """X = (X.0, X.1) with one cell missing: the other cell still counts, and still reaches the child."""
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(2), "y": m.Normal()})
    model.set_params(
        {"x": {"loc": [1.0, -1.0], "scale": [1.0, 2.0]}, "y": {"loc": 0.0, "weight": [0.5, 0.7], "scale": 1.0}}
    )
    b = np.array([[0, 0, 0], [0, 0, 0], [0.5, 0.7, 0]])
    inverse = np.linalg.inv(np.eye(3) - b)
    mean, covariance = inverse @ [1.0, -1.0, 0.0], inverse @ np.diag([1.0, 4.0, 1.0]) @ inverse.T
    x = RNG.multivariate_normal(mean, covariance, size=60)
    x[:20, 0] = np.nan
    x[10:40, 1] = np.nan
    x[35:45, 2] = np.nan
    found = log_likelihood(
        model, pd.DataFrame(x, columns=["x.0", "x.1", "y"]), options=SumSizes(patterns=patterns, prior_draws=8192)
    )
    np.testing.assert_allclose(found, mvn_of_seen(x, mean, covariance), atol=0.02)


@pytest.mark.parametrize("patterns", [12, 1])
def test_an_observed_chain_above_a_hidden_leaf(patterns):
    """x0 -> x1 -> h with h hidden and childless: x0 and x1 are inner nodes that only they themselves inform."""
    model = otp.Model(otp.Graph([("x0", "x1"), ("x1", "h")], hidden=["h"]), {n: m.Normal() for n in ("x0", "x1", "h")})
    model.set_params(
        {"x0": {"loc": 0.0, "scale": 1.0}, "x1": {"loc": 0.0, "weight": 1.0, "scale": 1.0}, "h": {"weight": 1.0}}
    )
    covariance = np.array([[1.0, 1.0], [1.0, 2.0]])
    x = RNG.multivariate_normal(np.zeros(2), covariance, size=40)
    x[:15, 0] = np.nan
    x[10:25, 1] = np.nan
    found = log_likelihood(
        model, pd.DataFrame(x, columns=["x0", "x1"]), options=SumSizes(patterns=patterns, prior_draws=8192)
    )
    np.testing.assert_allclose(found, mvn_of_seen(x, np.zeros(2), covariance), atol=0.02)


def test_too_many_joint_states_are_refused_before_any_work():
    names = [f"h{i}" for i in range(7)]
    graph = otp.Graph([(name, "x") for name in names[:3]] + [(name, "y") for name in names[3:]], hidden=names)
    model = otp.Model(graph, {**{n: m.Categorical(4) for n in names}, "x": m.Normal(), "y": m.Normal()})
    table = pd.DataFrame({"x": RNG.normal(size=20), "y": RNG.normal(size=20)})
    with pytest.raises(ModelError, match="16384 joint states; at most 4096"):
        otp.fit(model, table, method=otp.entropic(eta=0.5), restarts=1)


def test_a_hidden_vector_of_counts_is_refused():
    model = otp.Model(otp.Graph([("n", "x")], hidden=["n"]), {"n": m.Poisson(2), "x": m.Normal()})
    with pytest.raises(ModelError, match="a vector of counts cannot be hidden or missing"):
        otp.fit(model, pd.DataFrame({"x": RNG.normal(size=20)}), method="entropic", restarts=1)
