"""The closed-form backward map against exact likelihoods: scikit-learn, scipy, and brute-force sums."""

import itertools
import warnings
from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from scipy.special import logsumexp
from sklearn.mixture import GaussianMixture

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import encode
from otpdag.errors import ModelError
from otpdag.likelihood import enumeration as closed_form
from otpdag.likelihood.enumeration import (
    SumSizes,
    enumerates_easily,
    evaluate,
    group_rows,
    normal_draws,
    relevant_unknowns,
    standardised,
)
from otpdag.numerics import quadrature
from tests.likelihood.elimination.worlds import enumerated, make_world, random_edges

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


# -- patterns of gaps, and the points of each -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 6])
@pytest.mark.parametrize("bits", [16, 2])
def test_distinct_flags_are_those_of_numpy(size, bits, monkeypatch):
    monkeypatch.setattr(closed_form, "MOST_BITS", bits)
    flags = np.random.default_rng(size).random((40, size)) < 0.4
    codes, inverse, counts = closed_form._distinct_flags(torch.as_tensor(flags))
    expected = np.unique(flags, axis=0, return_inverse=True, return_counts=True)
    for found, one in zip((codes, inverse, counts), expected, strict=True):
        np.testing.assert_array_equal(found, one.reshape(found.shape))


@pytest.mark.parametrize("seed", range(6))
def test_unknown_nodes_are_needed_where_something_below_them_is_seen(seed):
    rng = np.random.default_rng(seed)
    names = list("abcdefg")
    hidden = ["b", "f"]
    structure, _, _ = make_world({n: m.Normal() for n in names}, random_edges(rng, names, 0.4), rng, hidden=hidden)
    graph = structure.graph

    def below(node):
        return {one for child in graph.children(node) for one in (child, *below(child))}

    for _ in range(20):
        seen = {n: n not in hidden and rng.random() < 0.5 for n in names}
        partly = frozenset(n for n in names if not seen[n] and n not in hidden and rng.random() < 0.3)
        telling = {n for n in names if seen[n] or n in partly or (n in hidden and below(n) - set(hidden))}
        expected = [n for n in graph.order if not seen[n] and (below(n) & telling or (n in hidden and n in telling))]
        assert relevant_unknowns(structure, seen, partly) == tuple(expected)


def gappy_world(rows=90):
    rng = np.random.default_rng(3)
    nodes = {"a": m.Categorical(2), "b": m.Normal(), "c": m.Categorical(3), "x": m.Normal(), "u": m.Categorical(2)}
    edges = [("a", "b"), ("b", "x"), ("c", "x"), ("u", "x"), ("a", "c")]
    return make_world(nodes, edges, rng, rows=rows, gaps=0.35, hidden=["u"])


@pytest.mark.parametrize("many", [1, 2, 4, 12])
def test_rows_that_miss_the_same_inner_nodes_go_together_and_rare_patterns_too(many):
    structure, _, batch = gappy_world()
    inner = ["a", "b", "c"]
    flags = [tuple(bool(batch.mask[n][0, row].all()) for n in inner) for row in range(90)]
    found = closed_form._patterns(structure, batch, SumSizes(patterns=many))
    counts = Counter(flags)
    assert len(counts) == 8
    kept, rest = found[: many - 1], found[many - 1 :]
    assert len(kept) == min(many - 1, 8)
    sizes = [len(one.rows) for one in kept]
    assert sizes == sorted(counts.values(), reverse=True)[: many - 1]
    for one in kept:
        (shown,) = {flags[row] for row in one.rows.tolist()}
        assert len(one.rows) == counts[shown]
        missing = [n for n, seen in zip(inner, shown, strict=True) if not seen]
        assert set(one.unknown) == {"u", *missing}
        assert one.clamped == frozenset()
    assert len(rest) == (many < 9)
    for one in rest:
        assert set(one.unknown) == {"u", *inner}
        assert one.clamped == {"a", "b", "c"}
    every = sorted(row for one in found for row in one.rows.tolist())
    assert every == list(range(90))
    whole = replace(batch, mask={name: torch.ones_like(mask) for name, mask in batch.mask.items()})
    (only,) = closed_form._patterns(structure, whole, SumSizes(patterns=many))
    assert (only.rows, only.unknown, only.clamped) == (None, ("u",), frozenset())


@pytest.mark.parametrize(
    ("options", "easily"),
    [
        ({"patterns": 8, "easy_states": 12}, True),
        ({"patterns": 7, "easy_states": 12}, False),
        ({"patterns": 8, "easy_states": 11}, False),
    ],
)
def test_few_patterns_and_few_states_are_enumerated(options, easily):
    """Eight patterns of three inner nodes, and two, three and two states where all is missing."""
    structure, _, batch = gappy_world()
    assert enumerates_easily(structure, batch, SumSizes(**options)) is easily


def test_counts_are_not_enumerated():
    rng = np.random.default_rng(0)
    for gaps, easily in ((0.3, False), (0.0, True)):
        structure, _, batch = make_world({"n": m.Poisson(), "x": m.Normal()}, [("n", "x")], rng, rows=20, gaps=gaps)
        assert enumerates_easily(structure, batch, SumSizes()) is easily


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("patterns", [1, 3, 12])
def test_categories_and_counts_are_summed_over_all_they_may_be(patterns, uniform):
    rng = np.random.default_rng(5)
    nodes = {"u": m.Categorical(3), "a": m.Categorical(2), "n": m.Poisson(), "x": m.Normal(), "y": m.Categorical(2)}
    edges = [("u", "a"), ("u", "n"), ("a", "x"), ("n", "x"), ("u", "x"), ("a", "y")]
    structure, naturals, batch = make_world(nodes, edges, rng, rows=30, gaps=0.3, hidden=["u"], replicas=2)
    batch = replace(batch, mask={**batch.mask, "x": torch.ones_like(batch.mask["x"])})
    points = torch.arange(41).double()
    exact = enumerated(
        structure, naturals, batch, {"n": (points.unsqueeze(-1), torch.zeros(41).double())}, uniform=uniform
    )
    generator, options = torch.Generator().manual_seed(0), SumSizes(patterns=patterns, count_atoms=41)
    for group in group_rows(structure, batch, generator=generator, options=options, count_range={"n": 40.0}):
        found = evaluate(structure, naturals, group, uniform=uniform)
        total = torch.logsumexp(found.log_prior + found.log_likelihood, -1).expand(2, len(group.rows))
        torch.testing.assert_close(total, exact[:, group.rows], rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(group.weight, batch.weight[:, group.rows])


def test_points_of_several_numbers_are_a_sobol_sequence_shifted_at_random():
    found = normal_draws(3, 15, 2, torch.Generator().manual_seed(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fifteen points are not a power of two
        base = stats.qmc.Sobol(2, scramble=False).random(16)[1:]
    shift = torch.rand(3, 1, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64).numpy()
    np.testing.assert_allclose(stats.norm.cdf(found), (base + shift) % 1.0, atol=1e-9)


def placed(nodes, hidden, observed=("x",), **options):
    """The only group of complete rows of a child of hidden nodes."""
    rng = np.random.default_rng(0)
    edges = [(name, child) for name in hidden for child in observed]
    structure, _, batch = make_world(nodes, edges, rng, rows=7, gaps=0.0, hidden=hidden)
    (group,) = group_rows(
        structure,
        batch,
        generator=torch.Generator().manual_seed(0),
        options=SumSizes(**options),
        count_range={"n": 4.0},
        exact=options.pop("exact", False),
    )
    return group


def test_points_are_all_states_times_those_of_the_numbers():
    nodes = {"k": m.Categorical(2), "j": m.Categorical(3), "z": m.Normal(), "x": m.Normal()}
    group = placed(nodes, ["k", "j", "z"], grid=9)
    nodes_of, log_weight = quadrature("normal", 9)
    assert (group.copies, group.points, group.least_points) == (9, 54, 54)
    states = [(*a, *b, float(z)) for a in np.eye(2) for b in np.eye(3) for z in nodes_of]
    found = torch.cat([group.states["k"], group.states["j"], group.noise["z"]], -1)[0, 0]
    np.testing.assert_allclose(found, states)
    np.testing.assert_allclose(group.log_weight[0, 0], np.tile(log_weight, 6))
    np.testing.assert_allclose(group.grid[0, 0], np.tile(nodes_of, (6, 1)))
    assert group.base is None
    assert group.serves(1)
    assert group.serves(5)
    uniform = placed({"g": m.Gamma(), "x": m.Normal()}, ["g"], grid=9)
    np.testing.assert_allclose(stats.norm.cdf(uniform.grid.flatten()), uniform.noise["g"].flatten(), atol=1e-9)
    counts = placed({"n": m.Poisson(), "x": m.Normal()}, ["n"])
    assert counts.states["n"].flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert (counts.copies, counts.log_weight.tolist()) == (1, [[[0.0] * 6]])


@pytest.mark.parametrize(("draws", "base"), [(20, 20), (10, 12)])
def test_several_numbers_have_draws_of_their_own_in_each_row(draws, base):
    nodes = {"k": m.Categorical(2), "z": m.Normal(2), "g": m.Gamma(), "x": m.Normal()}
    group = placed(nodes, ["k", "z", "g"], prior_draws=16, draws=draws)
    assert group.base.shape == (1, 7, base, 3)
    assert group.grid is None
    assert (group.copies, group.points, group.least_points) == (16, 32, 2 * base)
    assert not group.serves(1)
    torch.testing.assert_close(group.base.mean(2), torch.zeros(1, 7, 3).double(), atol=1e-12, rtol=0)
    drawn = normal_draws(1, 16, 3, torch.Generator().manual_seed(0))[0]
    np.testing.assert_allclose(group.noise["z"][0, 0, :16], drawn[:, :2])
    np.testing.assert_allclose(group.noise["g"][0, 0, 16:, 0], stats.norm.cdf(drawn[:, 2]))
    np.testing.assert_allclose(group.log_weight, -np.log(16))
    moved = replace(group, copies=base, log_weight=torch.zeros(3, 7, 2 * base))
    assert [moved.serves(replicas) for replicas in (1, 2, 3)] == [False, False, True]
    shared = replace(group, copies=base, log_weight=torch.zeros(1, 7, 2 * base))
    assert shared.serves(4)


def test_sizes_that_hold_nothing_are_refused():
    for name in ("largest_table", "entries", "memory"):
        with pytest.raises(ModelError, match=f"{name} must be at least 1; got 0"):
            SumSizes(**{name: 0})
        assert getattr(SumSizes(**{name: 1}), name) == 1
