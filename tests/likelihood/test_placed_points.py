"""Points that follow the posterior: exact where theory gives the value, few where the prior would need many."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import optimize, stats
from scipy.special import logsumexp

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import encode
from otpdag.likelihood.enumeration import SumSizes, evaluate, group_rows
from otpdag.likelihood.posterior_grids import LONGEST_STEP, _mode, adapted

RNG = np.random.default_rng(202)


def grouped(model, table, options=None):
    batch = encode(table, model._known_schema(), hidden=model.graph.hidden, partial=True)
    return group_rows(model.structure, batch, generator=torch.Generator().manual_seed(1), options=options or SumSizes())


def total(model, group):
    result = evaluate(model.structure, model.fitted.naturals, group)
    return torch.logsumexp(result.log_prior + result.log_likelihood, -1).expand(1, len(group.rows))[0].numpy()


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.01, 0.001])
def test_adapted_grids_resolve_any_posterior(scale):
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
    (group,) = grouped(model, x)
    moved = adapted(model.structure, model.fitted.naturals, group)
    np.testing.assert_allclose(total(model, moved), logsumexp(parts, axis=0), rtol=1e-6)
    assert moved.points == group.points


def test_adapted_grids_of_uniform_noise():
    """A hidden gamma variable as a Poisson rate: the marginal is negative binomial."""
    graph = otp.Graph([("g", "n")], hidden=["g"])
    model = otp.Model(graph, {"g": m.Gamma(), "n": m.Poisson()})
    # exp(log_rate + weight g) is no conjugate pair; compare with a fine sum instead
    model.set_params({"g": {"log_mean": 0.0, "shape": 3.0}, "n": {"log_rate": 1.0, "weight": 1.5}})
    counts = np.array([[0.0], [3.0], [40.0], [400.0]])
    (group,) = grouped(model, counts)
    moved = adapted(model.structure, model.fitted.naturals, group)
    g = np.linspace(1e-6, 12, 400_001)
    density = stats.gamma.pdf(g, 3.0, scale=1 / 3.0)
    exact = [np.log(np.trapezoid(density * stats.poisson.pmf(int(n), np.exp(1.0 + 1.5 * g)), g)) for (n,) in counts]
    np.testing.assert_allclose(total(model, moved), exact, atol=2e-4)


def test_groups_without_a_grid_are_left_alone():
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal()})
    model.set_params({"z": {"probs": [0.5, 0.5]}, "x": {"loc": [0.0, 1.0], "scale": [1.0, 1.0]}})
    (group,) = grouped(model, RNG.normal(size=(5, 1)))
    assert adapted(model.structure, model.fitted.naturals, group) is group


# -- several numbers --------------------------------------------------------------------------------------------------


def likelihood(model, table, **options):
    """Row by row, on adapted points."""
    found = None
    for group in grouped(model, table, SumSizes(**options)):
        moved = adapted(model.structure, model.fitted.naturals, group)
        found = np.full(len(table), np.nan) if found is None else found
        found[group.rows] = total(model, moved)
    return found


def factor_model(weights, scale, centre=None):
    names, factors = [f"x{i}" for i in range(len(weights))], [f"z{j}" for j in range(weights.shape[1])]
    graph = otp.Graph([(z, name) for name in names for z in factors], hidden=factors)
    model = otp.Model(graph, {n: m.Normal() for n in (*factors, *names)})
    centre = np.zeros(len(weights)) if centre is None else centre
    model.set_params({n: {"loc": centre[i], "weight": weights[i], "scale": scale} for i, n in enumerate(names)})
    return model, weights @ weights.T + scale**2 * np.eye(len(weights))


@pytest.mark.parametrize("factors", [2, 4])
@pytest.mark.parametrize("scale", [1.0, 0.1, 0.01])
def test_normal_posteriors_are_integrated_exactly(factors, scale):
    """Sharp or not, and with few draws: the points have the posterior's own mean and covariance."""
    weights = RNG.normal(size=(8, factors))
    model, covariance = factor_model(weights, scale)
    x = RNG.multivariate_normal(np.zeros(8), covariance, size=30)
    exact = stats.multivariate_normal(np.zeros(8), covariance).logpdf(x)
    found = likelihood(model, x, draws=24)
    np.testing.assert_allclose(found, exact, atol=2e-3)


def chain_model(scale, shift):
    """x1 -> x2 -> x3, every column in units of its own."""
    model = otp.Model(otp.Graph([("x1", "x2"), ("x2", "x3")]), {n: m.Normal() for n in ("x1", "x2", "x3")})
    model.set_params(
        {
            "x1": {"loc": shift, "scale": 2.0 * scale},
            "x2": {"loc": 0.2 * shift, "weight": 0.8, "scale": 1.5 * scale},
            "x3": {"loc": 0.5 * shift, "weight": 0.5, "scale": scale},
        }
    )
    inverse = np.linalg.inv(np.eye(3) - np.array([[0, 0, 0], [0.8, 0, 0], [0, 0.5, 0]]))
    return model, np.full(3, shift), scale**2 * inverse @ np.diag([4.0, 2.25, 1.0]) @ inverse.T


def seen_density(x, mean, covariance):
    found = np.zeros(len(x))
    for i, row in enumerate(x):
        seen = ~np.isnan(row)
        if seen.any():
            found[i] = stats.multivariate_normal(mean[seen], covariance[np.ix_(seen, seen)]).logpdf(row[seen])
    return found


@pytest.mark.parametrize("patterns", [12, 1])
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e4, 1e6)])
def test_several_missing_columns_in_any_units_and_pattern(scale, shift, patterns):
    model, mean, covariance = chain_model(scale, shift)
    x = RNG.multivariate_normal(mean, covariance, size=80)
    x[RNG.random(x.shape) < 0.35] = np.nan
    found = likelihood(model, pd.DataFrame(x, columns=["x1", "x2", "x3"]), patterns=patterns)
    np.testing.assert_allclose(found, seen_density(x, mean, covariance), atol=1e-5)


@pytest.mark.parametrize("patterns", [12, 1])
def test_partly_seen_vectors(patterns):
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(2), "y": m.Normal()})
    model.set_params(
        {"x": {"loc": [1.0, -1.0], "scale": [1.0, 2.0]}, "y": {"loc": 0.0, "weight": [0.5, 0.7], "scale": 1.0}}
    )
    inverse = np.linalg.inv(np.eye(3) - np.array([[0, 0, 0], [0, 0, 0], [0.5, 0.7, 0]]))
    mean, covariance = inverse @ [1.0, -1.0, 0.0], inverse @ np.diag([1.0, 4.0, 1.0]) @ inverse.T
    x = RNG.multivariate_normal(mean, covariance, size=60)
    x[:20, 0] = np.nan
    x[10:40, 1] = np.nan
    found = likelihood(model, pd.DataFrame(x, columns=["x.0", "x.1", "y"]), patterns=patterns)
    np.testing.assert_allclose(found, seen_density(x, mean, covariance), atol=1e-5)


def test_states_have_points_of_their_own():
    """A hidden class shifts the child: the two numbers above it have another posterior in each state."""
    graph = otp.Graph([("k", "x"), ("u", "x"), ("v", "x"), ("u", "y")], hidden=["k", "u", "v"])
    model = otp.Model(graph, {"k": m.Categorical(2), **{n: m.Normal() for n in ("u", "v", "x", "y")}})
    model.set_params(
        {
            "k": {"probs": [0.3, 0.7]},
            "x": {"loc": [-3.0, 4.0], "weight": [1.0, 0.5], "scale": [0.2, 0.3]},
            "y": {"loc": 0.0, "weight": -1.0, "scale": 0.4},
        }
    )
    x = np.stack([RNG.normal(0, 3, 40), RNG.normal(size=40)], 1)
    weights = np.array([[1.0, 0.5], [-1.0, 0.0]])
    parts = [
        np.log(p) + stats.multivariate_normal([loc, 0.0], weights @ weights.T + np.diag([s**2, 0.16])).logpdf(x)
        for p, loc, s in ((0.3, -3.0, 0.2), (0.7, 4.0, 0.3))
    ]
    np.testing.assert_allclose(likelihood(model, x), logsumexp(parts, axis=0), atol=1e-5)


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
    for draws, tolerance in ((24, 0.1), (256, 0.015)):
        found = likelihood(model, table, draws=draws)
        np.testing.assert_allclose(found, exact, atol=tolerance)
        assert abs((found - exact).mean()) < tolerance / 5


def test_replicas_have_points_of_their_own():
    weights = RNG.normal(size=(3, 5, 2))
    model, _ = factor_model(weights[0], 0.2)
    x = RNG.normal(size=(15, 5))
    (group,) = grouped(model, x)
    single = [factor_model(w, 0.2)[0].fitted.naturals for w in weights]
    stacked = {
        node: {name: torch.cat([s[node][name] for s in single]) for name in single[0][node]} for node in single[0]
    }
    moved = adapted(model.structure, stacked, group)
    assert moved.serves(3)
    assert not moved.serves(2)
    result = evaluate(model.structure, stacked, moved)
    together = torch.logsumexp(result.log_prior + result.log_likelihood, -1)
    for r in range(3):
        exact = stats.multivariate_normal(np.zeros(5), weights[r] @ weights[r].T + 0.04 * np.eye(5)).logpdf(x)
        np.testing.assert_allclose(together[r], exact, atol=1e-3)


def test_adapting_twice_changes_nothing():
    model, _ = factor_model(RNG.normal(size=(5, 2)), 0.3)
    (group,) = grouped(model, RNG.normal(size=(10, 5)))
    once = adapted(model.structure, model.fitted.naturals, group)
    twice = adapted(model.structure, model.fitted.naturals, once)
    torch.testing.assert_close(once.log_weight, twice.log_weight)


def test_a_deterministic_node_between_takes_no_points():
    graph = otp.Graph([("u", "s"), ("v", "s"), ("s", "x"), ("u", "y")], hidden=["u", "v", "s"])
    model = otp.Model(
        graph,
        {
            "u": m.Normal(),
            "v": m.Normal(),
            "s": m.Deterministic(lambda parents: parents["u"] + parents["v"]),
            "x": m.Normal(),
            "y": m.Normal(),
        },
    )
    model.set_params({"x": {"loc": 0.0, "weight": 1.0, "scale": 0.5}, "y": {"loc": 0.0, "weight": 1.0, "scale": 0.5}})
    x = RNG.normal(size=(20, 2))
    covariance = np.array([[2.25, 1.0], [1.0, 1.25]])
    np.testing.assert_allclose(likelihood(model, x), stats.multivariate_normal([0, 0], covariance).logpdf(x), atol=1e-5)


# -- modes ------------------------------------------------------------------------------------------------------------


def quadratics(modes):
    """Log-densities of normal distributions (R = 1, rows, one state), that note where they are asked for a height."""
    rows, dim = modes.shape
    root = torch.as_tensor(np.random.default_rng(1).normal(size=(rows, dim, dim)))
    precision = root @ root.mT + torch.eye(dim).double()
    asked = []

    def joint(u):
        asked.append(u.detach())
        gap = (u - modes[None, :, None]).unsqueeze(-2)
        return -0.5 * (gap @ precision[None, :, None] @ gap.mT)[..., 0, 0]

    return joint, precision, asked


def test_the_mode_of_a_normal_density_is_one_step_away():
    modes = torch.tensor([[0.5, -1.0], [2.0, 1.0], [0.0, 0.3]]).double()
    joint, precision, asked = quadratics(modes)
    mode, vectors, curvature = _mode(joint, torch.zeros(1, 3, 1, 2).double())
    torch.testing.assert_close(mode[0, :, 0], modes, rtol=0, atol=1e-6)
    found = vectors @ torch.diag_embed(curvature) @ vectors.mT
    torch.testing.assert_close(found[0, :, 0], precision, rtol=1e-5, atol=1e-6)
    steps = 1 + sum(torch.allclose(one[0, :, 0], modes, rtol=0, atol=1e-5) for one in asked)
    assert steps <= 5
    assert len(asked) <= 12  # heights, slopes and their differences of the start, a step, and one that changes nothing


def test_long_steps_are_cut_row_by_row():
    modes = torch.tensor([[0.5, -1.0], [8.0, 6.0]]).double()
    joint, _, asked = quadratics(modes)
    mode, _, _ = _mode(joint, torch.zeros(1, 2, 1, 2).double())
    torch.testing.assert_close(mode[0, :, 0], modes, rtol=0, atol=1e-5)
    first = next(one[0, :, 0] for one in asked if one.abs().max() > 1e-2)
    torch.testing.assert_close(first[0], modes[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(first[1], modes[1] / modes[1].norm() * LONGEST_STEP, rtol=1e-5, atol=0)


def test_the_mode_of_a_skewed_density_is_scipys_also_where_steps_go_too_far():
    slope = torch.tensor([[1.0, 4.0], [-3.0, 0.5]]).double()

    def joint(u):
        line = (u * slope[None, :, None]).sum(-1)
        return 2.0 * line - torch.exp(line) - 0.5 * u.square().sum(-1)

    mode, _, curvature = _mode(joint, torch.full((1, 2, 1, 2), -2.0).double())

    def cost(u, a):
        return np.exp(a @ u) - 2.0 * (a @ u) + 0.5 * u @ u

    for row in range(2):
        best = optimize.minimize(cost, np.zeros(2), (slope[row].numpy(),), tol=1e-12).x
        np.testing.assert_allclose(mode[0, row, 0], best, atol=1e-4)
        line = np.exp(slope[row].numpy() @ best) * np.outer(slope[row], slope[row]) + np.eye(2)
        np.testing.assert_allclose(curvature[0, row, 0], np.linalg.eigvalsh(line), rtol=1e-3)
