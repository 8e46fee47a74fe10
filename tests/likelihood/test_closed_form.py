"""The closed-form backward map against exact likelihoods: scikit-learn, scipy, and brute-force sums."""

import itertools

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.special import logsumexp
from sklearn.mixture import GaussianMixture

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.errors import ModelError

RNG = np.random.default_rng(20240607)


def log_likelihood(model, table):
    """Row by row, hidden and missing values integrated out."""
    columns = [column for node in model.graph.observed for column in model._known_schema()[node].names]
    frame = table if isinstance(table, pd.DataFrame) else pd.DataFrame(table, columns=columns)
    found = model.log_likelihood(frame, partial=True, per_row=True).to_numpy()
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


def test_two_hidden_numbers_have_the_multivariate_normal_log_likelihood():
    model, covariance = two_factor_model()
    x = RNG.multivariate_normal(np.zeros(4), covariance, size=60)
    exact = stats.multivariate_normal(np.zeros(4), covariance).logpdf(x)
    np.testing.assert_allclose(log_likelihood(model, x), exact, atol=1e-8)


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
    found = log_likelihood(model, pd.DataFrame(x, columns=["x1", "x2", "x3"]))
    np.testing.assert_allclose(found, exact, rtol=1e-8, atol=1e-8)


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


def test_missing_categories_and_counts_equal_a_sum_whether_merged_or_not():
    rows = mixed_rows(150, 0.3)
    exact = enumerate_mixed(rows)
    table = pd.DataFrame(rows, columns=["g", "n", "x", "y"])
    found = log_likelihood(mixed_model(), table)
    np.testing.assert_allclose(found, exact, atol=1e-8)
    assert found[0] == pytest.approx(0, abs=1e-9)


def test_large_counts_are_summed_on_a_coarser_support():
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
    found = log_likelihood(model, table)
    np.testing.assert_allclose(found, exact, atol=1e-4)


def test_a_partly_seen_inner_vector_keeps_what_is_seen():
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
    found = log_likelihood(model, pd.DataFrame(x, columns=["x.0", "x.1", "y"]))
    np.testing.assert_allclose(found, mvn_of_seen(x, mean, covariance), atol=1e-8)


def test_an_observed_chain_above_a_hidden_leaf():
    """x0 -> x1 -> h with h hidden and childless: x0 and x1 are inner nodes that only they themselves inform."""
    model = otp.Model(otp.Graph([("x0", "x1"), ("x1", "h")], hidden=["h"]), {n: m.Normal() for n in ("x0", "x1", "h")})
    model.set_params(
        {"x0": {"loc": 0.0, "scale": 1.0}, "x1": {"loc": 0.0, "weight": 1.0, "scale": 1.0}, "h": {"weight": 1.0}}
    )
    covariance = np.array([[1.0, 1.0], [1.0, 2.0]])
    x = RNG.multivariate_normal(np.zeros(2), covariance, size=40)
    x[:15, 0] = np.nan
    x[10:25, 1] = np.nan
    found = log_likelihood(model, pd.DataFrame(x, columns=["x0", "x1"]))
    np.testing.assert_allclose(found, mvn_of_seen(x, np.zeros(2), covariance), atol=1e-8)


def test_a_hidden_vector_of_counts_is_refused():
    model = otp.Model(otp.Graph([("n", "x")], hidden=["n"]), {"n": m.Poisson(2), "x": m.Normal()})
    with pytest.raises(ModelError, match="a vector of counts with children cannot be hidden"):
        otp.fit(model, pd.DataFrame({"x": RNG.normal(size=20)}), method="likelihood", restarts=1)


# -- numbers on points, and beside categories -------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.01, 0.001])
def test_a_hidden_number_may_have_any_posterior(scale):
    """A hidden class and a hidden number above a child: one posterior for each row and state."""
    graph = otp.Graph([("k", "x"), ("z", "x")], hidden=["k", "z"])
    model = otp.Model(graph, {"k": m.Categorical(2), "z": m.Normal(), "x": m.Normal()})
    model.set_params(
        {"k": {"probs": [0.3, 0.7]}, "x": {"loc": [-1.0, 2.0], "weight": 1.0, "scale": [scale, 2 * scale]}}
    )
    x = RNG.normal(size=(40, 1)) * 2
    parts = [
        np.log(p) + stats.norm(loc, np.sqrt(1 + s**2)).logpdf(x[:, 0])
        for p, loc, s in ((0.3, -1.0, scale), (0.7, 2.0, 2 * scale))
    ]
    np.testing.assert_allclose(log_likelihood(model, x), logsumexp(parts, axis=0), rtol=1e-6)


def test_a_hidden_positive_number_sums_like_a_fine_grid():
    """A hidden gamma variable as a Poisson rate: the marginal is negative binomial."""
    graph = otp.Graph([("g", "n")], hidden=["g"])
    model = otp.Model(graph, {"g": m.Gamma(), "n": m.Poisson()})
    # exp(log_rate + weight g) is no conjugate pair; compare with a fine sum instead
    model.set_params({"g": {"log_mean": 0.0, "shape": 3.0}, "n": {"log_rate": 1.0, "weight": 1.5}})
    counts = np.array([[0.0], [3.0], [40.0], [400.0]])
    g = np.linspace(1e-6, 12, 400_001)
    density = stats.gamma.pdf(g, 3.0, scale=1 / 3.0)
    exact = [np.log(np.trapezoid(density * stats.poisson.pmf(int(n), np.exp(1.0 + 1.5 * g)), g)) for (n,) in counts]
    np.testing.assert_allclose(log_likelihood(model, counts), exact, atol=2e-4)


def counts_model():
    """Two numbers above counts and a category: no normal posterior."""
    graph = otp.Graph([(z, n) for n in ("a", "b", "k") for z in ("u", "v")], hidden=["u", "v"])
    model = otp.Model(
        graph, {"u": m.Normal(), "v": m.Normal(), "a": m.Poisson(), "b": m.Poisson(), "k": m.Categorical(2)}
    )
    return model.set_params(
        {
            "a": {"log_rate": 1.0, "weight": [0.8, 0.2]},
            "b": {"log_rate": 0.5, "weight": [-0.3, 0.9]},
            "k": {"logits": [0.0, 0.2], "weight": [[0.0, 1.0], [0.0, -1.5]]},
        }
    )


def test_skewed_posteriors_are_integrated_well():
    model = counts_model()
    table = model.sample(40, seed=0)[["a", "b", "k"]]
    u, v = np.meshgrid(np.linspace(-8, 8, 401), np.linspace(-8, 8, 401), indexing="ij")
    prior = stats.norm.logpdf(u) + stats.norm.logpdf(v) + 2 * np.log(16 / 400)
    exact = []
    for a, b, k in table.to_numpy():
        logit = 0.2 + u - 1.5 * v
        exact.append(
            logsumexp(
                prior
                + stats.poisson.logpmf(a, np.exp(1.0 + 0.8 * u + 0.2 * v))
                + stats.poisson.logpmf(b, np.exp(0.5 - 0.3 * u + 0.9 * v))
                - np.log1p(np.exp(-logit if k == 1 else logit))
            )
        )
    np.testing.assert_allclose(log_likelihood(model, table), exact, atol=1e-4)


def factors_model():
    """Two linked factors, one missing cell in the middle of the graph, a logarithm below."""
    graph = otp.Graph([("f", "g"), ("f", "a"), ("g", "b"), ("g", "c"), ("b", "d")], hidden=["f", "g"])
    nodes = {"f": m.Normal(), "g": m.Normal()} | {n: m.Normal() for n in "abc"} | {"d": m.LogNormal()}
    model = otp.Model(graph, nodes)
    return model.set_params(
        {
            "g": {"loc": 0.0, "weight": 0.7, "scale": 1.0},
            "a": {"loc": 1.0, "weight": 1.5, "scale": 0.5},
            "b": {"loc": -1.0, "weight": 0.8, "scale": 0.6},
            "c": {"loc": 0.5, "weight": -1.2, "scale": 0.7},
            "d": {"loc": 0.2, "weight": 0.4, "scale": 0.3},
        }
    )


def factors_moments():
    """Mean and covariance of (a, b, c, log d) by propagation through the graph."""
    unit = np.eye(6)
    f = unit[0]
    g = 0.7 * f + unit[1]
    a, b, c = 1.5 * f + 0.5 * unit[2], 0.8 * g + 0.6 * unit[3], -1.2 * g + 0.7 * unit[4]
    d = 0.4 * b + 0.3 * unit[5]
    loadings = np.stack([a, b, c, d])
    return np.array([1.0, -1.0, 0.5, 0.2 - 0.4]), loadings @ loadings.T


def test_likelihoods_with_missing_cells_are_those_of_the_joint_normal_distribution():
    rng = np.random.default_rng(5)
    mean, covariance = factors_moments()
    line = rng.multivariate_normal(mean, covariance, size=60)
    frame = pd.DataFrame(np.column_stack([line[:, :3], np.exp(line[:, 3])]), columns=list("abcd"))
    frame.loc[::3, "b"] = np.nan
    frame.loc[1::4, "d"] = np.nan
    frame.loc[5, ["a", "b", "c", "d"]] = [np.nan, np.nan, 1.0, np.nan]
    model = factors_model()
    found = log_likelihood(model, frame)
    expected = []
    for row in frame.to_numpy():
        seen = np.isfinite(row)
        value = np.array([*row[:3], np.log(row[3])])[seen]
        density = stats.multivariate_normal(mean[seen], covariance[np.ix_(seen, seen)]).logpdf(value)
        expected.append(density - (np.log(row[3]) if seen[3] else 0.0))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_states_of_a_mixture_of_factors_are_weighed_exactly():
    graph = otp.Graph([("z", "f"), ("f", "x"), ("z", "x"), ("f", "y")], hidden=["z", "f"])
    model = otp.Model(graph, {"z": m.Categorical(2), "f": m.Normal(), "x": m.Normal(), "y": m.Normal()})
    model.set_params(
        {
            "z": {"probs": [0.3, 0.7]},
            "f": {"loc": [-1.0, 1.0], "scale": [1.0, 1.0]},
            "x": {"loc": [0.0, 2.0], "weight": 0.9, "scale": [0.5, 0.8]},
            "y": {"loc": 0.0, "weight": 1.1, "scale": 0.4},
        }
    )
    frame = pd.DataFrame({"x": [0.0, 1.0, 3.5], "y": [-1.0, 0.2, 1.0]})
    densities = []
    for weight, centre, shift, scale in ((0.3, -1.0, 0.0, 0.5), (0.7, 1.0, 2.0, 0.8)):
        loadings = np.array([0.9, 1.1])
        covariance = np.outer(loadings, loadings) + np.diag([scale**2, 0.4**2])
        mean = np.array([shift, 0.0]) + loadings * centre
        densities.append(weight * stats.multivariate_normal(mean, covariance).pdf(frame.to_numpy()))
    truth = np.array(densities) / np.sum(densities, 0)
    np.testing.assert_allclose(model.predict_proba(frame, "z").to_numpy(), truth.T, atol=1e-9)
