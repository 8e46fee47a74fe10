"""Linear normal numbers are integrated out in closed form, against the multivariate normal of scipy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from otpdag import mechanisms as m
from otpdag.likelihood.elimination import lay_out, linear_normal, log_evidence, total_evidence
from otpdag.likelihood.elimination.linear_normal import Equations, point_moments
from tests.likelihood.elimination.linear_groups import (
    CASES,
    FAMILIES,
    INSTANCES,
    PIECES,
    REPLICAS,
    WIDTH,
    Plain,
    entries,
    make_group,
    normal,
)
from tests.likelihood.elimination.worlds import linear_moments, make_world, random_edges, with_leaves


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
    integrals = group.integrate(equations, points, power)
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


class Told:
    """Noise that is known: nothing at first, then each unit vector."""

    def normal(self, shape, dtype):
        noise = torch.zeros(shape, dtype=dtype)
        for coordinate in range(shape[-1]):
            noise[:, coordinate + 1, coordinate] = 1.0
        return noise


@pytest.mark.parametrize("case", CASES)
def test_draws_are_the_mean_and_a_root_of_the_covariance_times_noise(case):
    rng = np.random.default_rng(len(case) + 7)
    group, equations, points = make_group(rng, **CASES[case])
    integrals = group.integrate(equations, points)
    state = torch.as_tensor(rng.integers(0, math.prod(group.states), size=(PIECES, 1))).expand(-1, group.dim + 1)
    placed = [normal(rng, PIECES, 1).expand(-1, group.dim + 1) for _ in points]
    drawn = integrals.draws(state, placed, Told()).numpy()
    for piece in range(PIECES):
        plain = Plain(group, equations, 1.0, 0, piece, int(state[piece, 0]))
        _, mean, covariance = plain.given(np.array([float(one[piece, 0]) for one in placed]))
        np.testing.assert_allclose(drawn[piece, 0], mean)
        root = drawn[piece, 1:] - mean
        np.testing.assert_allclose(root.T @ root, covariance, rtol=1e-6, atol=1e-9)


def test_large_clusters_are_multiplied_one_instance_at_a_time(monkeypatch):
    group, equations, points = make_group(np.random.default_rng(5))
    plain = group.integrate(equations, points)
    monkeypatch.setattr(linear_normal, "GATHERED", 2)
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


def test_the_budget_counts_columns_of_rows_and_matrices_of_instances():
    group, _, _ = make_group(np.random.default_rng(0))
    assert group.elements == 6 * (PIECES * FAMILIES * WIDTH * (WIDTH + 2) + INSTANCES * 9)
    banded, _, _ = make_group(np.random.default_rng(0), **CASES["along a band"])
    assert banded.blocks == 3
    assert banded.elements == 6 * (PIECES * FAMILIES * WIDTH * (WIDTH + 2) + INSTANCES * 6 * 3 * 4)
    assert replace(banded, band=5).blocks == 1


def test_moments_of_points_are_weighed_sums():
    rng = np.random.default_rng(3)
    points = [normal(rng, 2, 3, many) for many in (2, 4, 3)]
    weight = torch.as_tensor(rng.random((2, 3, 5, 2, 4, 3)))
    many, one, two = point_moments(weight, points)
    assert many == 3
    names = "abc"
    for i in range(3):
        torch.testing.assert_close(one[..., i], torch.einsum(f"rntabc,rn{names[i]}->rnt", weight, points[i]))
        for j in range(3):
            inner = torch.einsum(f"rntabc,rn{names[i]},rn{names[j]}->rnt", weight, points[i], points[j])
            torch.testing.assert_close(two[..., i, j], inner)
