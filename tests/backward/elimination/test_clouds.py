"""Clouds of points of vectors, against integrals that are known."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import MultivariateNormal

from otpdag.backward.elimination.clouds import Cloud


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
