"""Clouds of points of vectors, against integrals that are known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from torch.distributions import MultivariateNormal

from otpdag.likelihood.elimination.points import (
    CLOSE,
    CLOUD_EDGE,
    CLOUD_WIDEN,
    DISTANCE,
    GRID_DIMENSIONS,
    LEAST_CHANGE,
    MOST_CHANGE,
    Cloud,
)


def cloud(dim, size, centre=0.0, spread=1.0):
    middle = torch.full((1, 1, dim), centre, dtype=torch.float64)
    return Cloud(
        "x", torch.zeros(1, dtype=torch.long), size, middle, spread * torch.eye(dim).double().expand(1, 1, -1, -1)
    )


def correlated(dim):
    root = torch.eye(dim).double() + 0.4 * torch.ones(dim, dim).double().tril(-1)
    return MultivariateNormal(torch.arange(dim).double() + 1.0, scale_tril=0.5 * root)


@pytest.mark.parametrize(("dim", "size", "error"), [(2, 484, 1e-4), (3, 1728, 1e-3), (5, 4096, 0.05)])
def test_points_find_a_correlated_posterior(dim, size, error):
    posterior = correlated(dim)
    placed, widened = cloud(dim, size), None
    for _ in range(40):
        points = placed.points()
        log = posterior.log_prob(points.values) + points.log_length
        placed, widened, settled = placed.moved(log.softmax(-1), widened)
        if settled:
            break
    assert settled
    points = placed.points()
    weight = (posterior.log_prob(points.values) + points.log_length).exp()
    assert weight.sum().item() == pytest.approx(1.0, abs=error)
    mean = (weight.unsqueeze(-1) * points.values).sum(-2)[0, 0]
    torch.testing.assert_close(mean, posterior.mean, atol=5 * error, rtol=0)


def test_draws_have_the_moments_of_the_posterior():
    posterior = correlated(2)
    placed = Cloud("x", torch.zeros(1).long(), 484, posterior.mean[None, None], posterior.scale_tril[None, None])
    points = placed.points()
    share = (posterior.log_prob(points.values) + points.log_length).softmax(-1)[0, 0]
    generator = torch.Generator().manual_seed(4)
    states = torch.multinomial(share, 40_000, replacement=True, generator=generator).unsqueeze(0)
    drawn = placed.jittered(states, generator)[0]
    torch.testing.assert_close(drawn.mean(0), posterior.mean, atol=0.01, rtol=0)
    # a cell of a grid of one standard deviation adds a twelfth of a variance
    torch.testing.assert_close(drawn.T.cov(), posterior.covariance_matrix * (13 / 12), atol=0.01, rtol=0.02)


def test_a_row_that_is_ruled_out_keeps_its_points():
    placed = cloud(2, 484, 3.0, 2.0)
    moved, _, settled = placed.moved(torch.zeros(1, 1, 484, dtype=torch.float64))
    assert settled
    torch.testing.assert_close(moved.centre, placed.centre)
    torch.testing.assert_close(moved.factor, placed.factor)


# -- beside one row at a time -----------------------------------------------------------------------------------------


def several(dim, size, seed=0):
    """Two replicas of three rows, each with a middle and a triangular stretch of its own."""
    rng = np.random.default_rng(seed)
    factor = np.tril(rng.normal(size=(2, 3, dim, dim)), -1) + np.eye(dim) * rng.uniform(0.5, 2.0, (2, 3, dim, 1))
    centre = rng.normal(size=(2, 3, dim))
    return Cloud("x", torch.arange(3), size, torch.as_tensor(centre), torch.as_tensor(factor))


def plain_base(dim, size):
    """A grid of standard deviations, or quasi-random normal points with what each stands for."""
    if dim <= GRID_DIMENSIONS:
        many = round(size ** (1 / dim))
        line = [DISTANCE * (at - (many - 1) / 2) for at in range(many)]
        points = np.array(list(itertools.product(line, repeat=dim)))
        return points, np.full(len(points), dim * np.log(DISTANCE)), (np.abs(points) >= line[-1] - 1e-9).any(1)
    uniform = stats.qmc.Sobol(dim, scramble=False).random(size + 1)[1:]
    points = stats.norm.ppf(uniform)
    return points, -stats.norm.logpdf(points).sum(1) - np.log(size), np.zeros(size, dtype=bool)


@pytest.mark.filterwarnings("ignore:The balance properties of Sobol")
@pytest.mark.parametrize(("dim", "size"), [(2, 25), (3, 27), (GRID_DIMENSIONS + 1, 31)])
def test_points_of_each_row_are_a_stretched_grid_or_quasi_random(dim, size):
    placed = several(dim, size)
    points = placed.points()
    base, volume, _ = plain_base(dim, size)
    for replica, row in np.ndindex(2, 3):
        factor = placed.factor[replica, row].numpy()
        expected = placed.centre[replica, row].numpy() + base @ factor.T
        np.testing.assert_allclose(points.values[replica, row], expected, atol=1e-9)
        length = volume + np.log(np.abs(np.linalg.det(factor)))
        np.testing.assert_allclose(points.log_length[replica, row], length, atol=1e-9)
    some = placed.at(torch.tensor([8, 9]), torch.tensor([2, 0]))
    assert some.rows.tolist() == [8, 9]
    torch.testing.assert_close(some.points().values, points.values[:, [2, 0]])
    states = torch.tensor([[0, 3], [5, 5], [7, 1]])
    drawn = placed.jittered(states, torch.Generator().manual_seed(1))
    noise = torch.rand(3, 2, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64).numpy() - 0.5
    for row, at in np.ndindex(3, 2):
        own = base[states[row, at]] + (DISTANCE * noise[row, at] if dim <= GRID_DIMENSIONS else 0.0)
        expected = placed.centre[0, row].numpy() + placed.factor[0, row].numpy() @ own
        np.testing.assert_allclose(drawn[row, at], expected, atol=1e-9)


@pytest.mark.filterwarnings("ignore:The balance properties of Sobol")
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(("dim", "size"), [(2, 49), (3, 125), (GRID_DIMENSIONS + 1, 63)])
def test_points_move_to_mean_and_covariance_of_a_belief_and_wider_at_the_edge(dim, size, told):
    placed = several(dim, size)
    base, _, outermost = plain_base(dim, size)
    rng = np.random.default_rng(dim)
    met = set()
    for _ in range(20):
        middle, width = rng.normal(0, 0.5, (2, 3, 1, dim)), rng.choice([0.02, 0.6, 1.0, 1.5], (2, 3, 1))
        belief = np.exp(-0.5 * (((base - middle) / width[..., None]) ** 2).sum(-1)) + 1e-300
        belief /= belief.sum(-1, keepdims=True) * rng.choice([1.0, 1.0, 3.0], (2, 3, 1))
        before = rng.random((2, 3)) < 0.4 if told else None
        given = None if before is None else torch.as_tensor(before)
        moved, widened, settled = placed.moved(torch.as_tensor(belief), given)
        rest = []
        for replica, row in np.ndindex(2, 3):
            own, factor = belief[replica, row], placed.factor[replica, row].numpy()
            ever = bool(before[replica, row]) if told else False
            if own.sum() <= 0.5:
                np.testing.assert_allclose(moved.centre[replica, row], placed.centre[replica, row])
                np.testing.assert_allclose(moved.factor[replica, row], factor)
                assert bool(widened[replica, row]) == ever
                continue
            mean = own @ base
            values, vectors = np.linalg.eigh(((base - mean) * own[:, None]).T @ (base - mean))
            spread = np.clip(np.sqrt(np.maximum(values, 0.0)), LEAST_CHANGE, MOST_CHANGE)
            at_edge = (own * outermost).sum() > CLOUD_EDGE
            ever = ever or at_edge
            spread = np.maximum(spread, 1.0) if ever else spread
            spread = CLOUD_WIDEN * spread if at_edge else spread
            change = np.linalg.cholesky(vectors @ np.diag(spread**2) @ vectors.T)
            np.testing.assert_allclose(moved.factor[replica, row], factor @ change, rtol=1e-6, atol=1e-9)
            expected = placed.centre[replica, row].numpy() + factor @ mean
            np.testing.assert_allclose(moved.centre[replica, row], expected, atol=1e-9)
            assert bool(widened[replica, row]) == ever
            rest.append(np.abs(mean).max() < CLOSE and np.abs(spread - 1).max() < CLOSE)
            met.add((at_edge, ever))
        assert settled == all(rest)
    assert len(met) >= (1 if dim > GRID_DIMENSIONS else 2)
