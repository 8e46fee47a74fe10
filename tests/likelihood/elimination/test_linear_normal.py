"""Linear normal numbers are integrated out in closed form, against the multivariate normal of scipy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.stats import multivariate_normal

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.likelihood.elimination import unknown_numbers
from otpdag.likelihood.elimination.evidence import log_evidence, total_evidence
from otpdag.likelihood.elimination.families import describe_families
from otpdag.likelihood.elimination.layout import lay_out
from otpdag.likelihood.elimination.unknown_numbers import Equations
from tests.likelihood.elimination.worlds import (
    CASES,
    PIECES,
    REPLICAS,
    WIDTH,
    Plain,
    entries,
    linear_moments,
    make_group,
    make_world,
    normal,
    random_edges,
    with_leaves,
)

# -- linear normal numbers are integrated out in closed form, against the multivariate normal of scipy ----------------


def linear_world(seed, **kwargs):
    rng = np.random.default_rng(seed)
    names = list("abcdefgh")
    vectors = [m.Normal, m.Normal, lambda: m.Normal(2), lambda: m.MultivariateNormal(3)]
    nodes = {name: vectors[rng.integers(4)]() for name in names}
    hidden = ("b", "d") if seed % 2 else ()
    return make_world(nodes, random_edges(rng, names, 0.4), rng, hidden=hidden, **kwargs)


def normal_evidence(structure, naturals, batch, replica):
    mean, covariance, at = linear_moments(structure, naturals, replica)
    rows = []
    for row in range(batch.rows):
        seen = [
            i
            for n, s in at.items()
            if n in batch.mask
            for i, known in zip(range(s.start, s.stop), batch.mask[n][0, row], strict=True)
            if known
        ]
        values = np.concatenate([batch.values[n][0, row] for n in at if n in batch.mask] or [[]])
        known = np.concatenate([batch.mask[n][0, row] for n in at if n in batch.mask] or [[]]).astype(bool)
        part = np.ix_(seen, seen)
        rows.append(multivariate_normal.logpdf(values[known], mean[seen], covariance[part]) if seen else 0.0)
    return np.array(rows)


@pytest.mark.parametrize("seed", range(8))
def test_linear_normal_graphs_with_any_gaps_are_multivariate_normal(seed):
    structure, naturals, batch = linear_world(seed, replicas=2)
    found = log_evidence(naturals, lay_out(structure, batch))
    for replica in range(2):
        truth = normal_evidence(structure, naturals, batch, replica)
        np.testing.assert_allclose(found[replica], truth, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_gradients_of_linear_normal_graphs_are_those_of_finite_differences(seed):
    structure, naturals, batch = linear_world(seed)
    layout = lay_out(structure, batch)
    leaves, ours = with_leaves(naturals)
    total_evidence(ours, layout).sum().backward()
    step = 1e-5
    for node, params in naturals.items():
        for name, value in params.items():
            if name == "covariance":
                continue  # single entries of a symmetric matrix have no derivative
            for index in np.ndindex(*value.shape):
                ends = []
                for sign in (1, -1):
                    shifted = value.clone()
                    shifted[index] += sign * step
                    ends.append(float(total_evidence({**naturals, node: {**params, name: shifted}}, layout)))
                slope = (ends[0] - ends[1]) / (2 * step)
                assert float(leaves[node, name].grad[index]) == pytest.approx(slope, rel=1e-4, abs=1e-4), (node, name)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("power", [1.0, 0.3])
def test_integrals_and_moments_are_those_of_the_plain_equations(case, power):
    group, equations, points = make_group(np.random.default_rng(len(case)), **CASES[case])
    integrals = group.integrate(equations, [one.unsqueeze(-1) for one in points], power)
    assert integrals.table.shape == (REPLICAS, PIECES, *group.sizes)
    weight = torch.rand(integrals.table.shape, generator=torch.Generator().manual_seed(1)).double()
    shift = equations.shift.numpy()
    rows, moments = integrals.moments(weight, equations.shift)
    table, expected = np.empty(integrals.table.shape), np.zeros(moments.shape)
    plains = {one: Plain(group, equations, power, *one) for one in {entry[:3] for entry in entries(group, points)}}
    for replica, piece, state, place, y in entries(group, points):
        plain, share = plains[replica, piece, state], float(weight[place])
        table[place], mean, covariance = plain.given(y)
        everything, spread = np.concatenate([mean, y]), np.zeros((len(mean) + len(y), len(mean) + len(y)))
        spread[: group.dim, : group.dim] = covariance
        for family, row in enumerate(plain.row):
            column = plain.values[family] + plain.columns[family] @ everything - shift[row, :WIDTH]
            own = plain.columns[family] @ spread @ plain.columns[family].T
            expected[replica, piece, state, family] += share * (np.outer(column, column) + own)
    np.testing.assert_allclose(integrals.table, table, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(moments, expected, rtol=1e-7, atol=1e-9)
    assert rows.tolist() == [[plains[0, piece, state].row for state in range(rows.shape[1])] for piece in range(PIECES)]


def told(shape):
    """Noise that is known: nothing at first, then each unit vector."""
    noise = torch.zeros(shape, dtype=torch.float64)
    for coordinate in range(shape[-1]):
        noise[:, coordinate + 1, coordinate] = 1.0
    return noise


@pytest.mark.parametrize("case", CASES)
def test_draws_are_the_mean_and_a_root_of_the_covariance_times_noise(case):
    rng = np.random.default_rng(len(case) + 7)
    group, equations, points = make_group(rng, **CASES[case])
    integrals = group.integrate(equations, [one.unsqueeze(-1) for one in points])
    state = torch.as_tensor(rng.integers(0, math.prod(group.states), size=(PIECES, 1))).expand(-1, group.dim + 1)
    placed = [normal(rng, PIECES, 1).expand(-1, group.dim + 1) for _ in points]
    drawn = integrals.draws(state, [one.unsqueeze(-1) for one in placed], told).numpy()
    for piece in range(PIECES):
        plain = Plain(group, equations, 1.0, 0, piece, int(state[piece, 0]))
        _, mean, covariance = plain.given(np.array([float(one[piece, 0]) for one in placed]))
        np.testing.assert_allclose(drawn[piece, 0], mean)
        root = drawn[piece, 1:] - mean
        np.testing.assert_allclose(root.T @ root, covariance, rtol=1e-6, atol=1e-9)


def test_large_clusters_are_multiplied_one_instance_at_a_time(monkeypatch):
    group, equations, points = make_group(np.random.default_rng(5))
    points = [one.unsqueeze(-1) for one in points]
    plain = group.integrate(equations, points)
    monkeypatch.setattr(unknown_numbers, "GATHERED", 2)
    again = group.integrate(equations, points)
    torch.testing.assert_close(again.mean, plain.mean)
    torch.testing.assert_close(again.table, plain.table)


def test_clusters_without_a_finite_integral_are_not_numbers():
    """Two numbers that only their sum is known of."""
    group, equations, _ = make_group(np.random.default_rng(2), dim=2, states=(), points=(), axes=())
    same = Equations(equations.coefficients.clone(), equations.constants, equations.shift)
    same.coefficients[:] = 0.0
    same.coefficients[..., 0, :2] = 1.0
    unknown = torch.full_like(group.unknown, 2)
    unknown[..., :2] = torch.tensor([0, 1])
    found = replace(group, unknown=unknown, values=torch.zeros_like(group.values)).integrate(same, [])
    assert found.table.isnan().all()


# -- chains and trees of unknown linear normal numbers, against the multivariate normal -------------------------------


def chain(rng, hidden, **options):
    """Hidden numbers in a chain with side branches, each with a child that has gaps."""
    names = [f"h{i}" for i in range(hidden)]
    edges = [(names[i - 1 - (i % 7 == 3)], names[i]) for i in range(1, hidden)] + [(h, f"x{h}") for h in names]
    nodes = {name: m.Normal() for name in names} | {f"x{h}": m.Normal() for h in names}
    return make_world(nodes, edges, rng, hidden=tuple(names), **options)


def test_long_chains_have_the_density_of_the_multivariate_normal():
    structure, naturals, batch = chain(np.random.default_rng(0), 40, rows=6, gaps=0.3)
    layout = lay_out(structure, batch)
    found = log_evidence(naturals, layout)[0]
    mean, covariance, order = linear_moments(structure, naturals)
    for row in range(batch.rows):
        seen = [n for n in order if n in batch.mask and bool(batch.mask[n][0, row, 0])]
        at = [order[n].start for n in seen]
        value = [float(batch.values[n][0, row, 0]) for n in seen]
        truth = multivariate_normal(np.asarray(mean)[at], np.asarray(covariance)[np.ix_(at, at)]).logpdf(value)
        assert found[row].item() == pytest.approx(truth, rel=1e-9)


# -- linear normal families as equations: the same densities, whatever the units --------------------------------------


@pytest.mark.parametrize("level", [0.0, 3.0, 1e8, -1e8])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_equations_give_the_density_however_far_from_zero_a_column_lies(level, scale):
    """A level of a million scales cost eight digits once: the slopes were differences of two large numbers."""
    model = otp.Model(otp.Graph([("a", "y"), ("x", "y")]), {"a": m.Categorical(2), "x": m.Normal(), "y": m.Normal()})
    model.set_params(
        {
            "a": {"probs": [0.5, 0.5]},
            "x": {"loc": 0.0, "scale": 1.0},
            "y": {"loc": [level, level + scale], "weight": 0.7 * scale, "scale": [scale, 2 * scale]},
        }
    )
    family = next(one for one in describe_families(model.structure) if one.node == "y")
    coefficients, constants = family.equations(model.fitted.naturals["y"])
    rng = np.random.default_rng(0)
    for configuration in range(2):
        x = rng.normal(size=20)
        mean, spread = level + configuration * scale + 0.7 * scale * x, (1 + configuration) * scale
        y = mean + spread * rng.normal(size=20)
        a_own, a_x, a_one = coefficients[0, configuration, 0].tolist()
        assert a_own == pytest.approx(1 / spread, rel=1e-13)
        assert a_x == pytest.approx(-0.7 / (1 + configuration), rel=1e-13)
        assert constants[0, configuration].item() == pytest.approx(-np.log(spread) - 0.5 * np.log(2 * np.pi), abs=1e-12)
        if level == 0:
            found = constants[0, configuration].item() - 0.5 * (a_own * y + a_x * x + a_one) ** 2
            np.testing.assert_allclose(found, stats.norm(mean, spread).logpdf(y), rtol=1e-9)


def test_equations_have_the_gradient_of_the_density():
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.MultivariateNormal(2)})
    family = next(one for one in describe_families(model.structure) if one.node == "y")
    rng = np.random.default_rng(1)
    params = {
        "loc": torch.as_tensor(rng.normal(size=(1, 1, 2))),
        "weight": torch.as_tensor(rng.normal(size=(1, 1, 2))),
        "covariance": torch.tensor([[[[2.0, 0.3], [0.3, 0.5]]]]).double(),
    }
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    x, y = torch.as_tensor(rng.normal(size=(1, 30, 1))), torch.as_tensor(rng.normal(size=(1, 30, 2)))
    exact = model.structure.mechanisms["y"].log_prob(leaves, y, {"x": x}).sum()
    wanted = torch.autograd.grad(exact, list(leaves.values()))
    coefficients, constants = family.equations(leaves)
    columns = torch.cat([y, x, torch.ones_like(x)], -1)
    noise = columns @ coefficients[:, 0].mT
    found = (constants[:, 0] - 0.5 * noise.square().sum(-1)).sum()
    assert found.item() == pytest.approx(exact.item(), rel=1e-12)
    for one, other in zip(torch.autograd.grad(found, list(leaves.values())), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
