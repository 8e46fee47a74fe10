"""Points stand for the whole line: sums over them are integrals and sums of known densities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import distributions as d

from otpdag.backward.elimination.points import Placement, _growing_groups, to_line
from otpdag.spaces import Count, Positive, Real, Unit

ROW = torch.zeros(1, dtype=torch.long)


def at(value: float) -> torch.Tensor:
    return torch.full((1, 1), value, dtype=torch.float64)


def place(space, size, centre, spread):
    return Placement("x", space, ROW, size, at(centre), at(spread))


def summed(placement, log_density):
    points = placement.points()
    weight = (log_density(points.values[..., 0]) + points.log_length).exp()
    return points.values[..., 0], weight


@pytest.mark.parametrize(
    ("space", "density", "centre", "spread"),
    [
        (Real(), d.Normal(3.0, 0.5), 3.0, 0.5),
        (Real(), d.StudentT(4.0, -1.0, 2.0), -1.0, 2.4),
        (Real(), d.Gumbel(1.0, 2.0), 2.0, 2.4),
        (Positive(), d.Gamma(torch.tensor(3.0).double(), torch.tensor(2.0).double()), 0.23, 0.6),
        (Positive(), d.LogNormal(-2.0, 0.7), -2.0, 0.7),
        (Unit(), d.Beta(torch.tensor(2.0).double(), torch.tensor(5.0).double()), -1.0, 0.9),
    ],
)
def test_integrals_and_means_of_densities(space, density, centre, spread):
    values, weight = summed(place(space, 48, centre, spread), density.log_prob)
    assert weight.sum().item() == pytest.approx(1.0, abs=2e-4)
    assert (weight * values).sum().item() == pytest.approx(float(density.mean), rel=2e-3)


@pytest.mark.parametrize(("rate", "size"), [(2.0, 24), (40.0, 128), (400.0, 48), (9000.0, 96)])
def test_windows_of_counts_hold_all_of_a_poisson(rate, size):
    poisson = d.Poisson(torch.tensor(rate).double(), validate_args=False)  # points lie between counts too
    values, weight = summed(place(Count(), size, rate, math.sqrt(rate)), poisson.log_prob)
    assert values.min() >= 0
    assert weight.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert (weight * values).sum().item() == pytest.approx(rate, rel=1e-5)


def test_groups_from_zero_up_sum_polynomials_exactly():
    placement = place(Count(), 24, 50.0, 60.0)
    points = placement.points()
    length = points.log_length.exp()[0, 0]
    values = points.values[0, 0, :, 0]
    assert values.min() == 0.0
    last = round(float(length.sum()))  # every number below it is in one group
    whole = torch.arange(last, dtype=torch.float64)
    assert last >= 350  # the window reaches five spreads above the middle
    for degree in range(6):
        assert (length * values**degree).sum().item() == pytest.approx((whole**degree).sum().item(), rel=1e-9)


def test_points_move_to_a_posterior_that_lies_outside():
    posterior = d.Normal(torch.tensor(25.0).double(), torch.tensor(0.2).double())
    placement, widened = place(Real(), 24, 0.0, 1.0), None
    for _ in range(30):
        _, weight = summed(placement, lambda x: posterior.log_prob(x).clamp(min=-700))
        placement, widened, settled = placement.moved(weight / weight.sum(-1, keepdim=True), widened)
        if settled:
            break
    assert settled
    assert placement.centre.item() == pytest.approx(25.0, abs=0.02)
    _, weight = summed(placement, posterior.log_prob)
    assert weight.sum().item() == pytest.approx(1.0, abs=1e-6)


def test_a_window_at_its_edge_is_widened_and_a_wide_one_tightened():
    belief = torch.zeros(1, 1, 24, dtype=torch.float64)
    belief[..., 10:14], belief[..., -1] = 0.24995, 2e-4
    wide, widened, settled = place(Real(), 24, 0.0, 1.0).moved(belief)
    assert not settled
    assert widened.all()
    assert wide.spread.item() == pytest.approx(1.4)
    normal = torch.distributions.Normal(torch.tensor(0.0).double(), torch.tensor(0.5).double())
    _, weight = summed(place(Real(), 24, 0.0, 1.0), normal.log_prob)
    tight, _, settled = place(Real(), 24, 0.0, 1.0).moved(weight)
    assert not settled
    assert tight.spread.item() == pytest.approx(0.5, rel=1e-3)


def test_a_row_that_is_ruled_out_keeps_its_points():
    placement = place(Real(), 24, 3.0, 2.0)
    moved, _, settled = placement.moved(torch.zeros(1, 1, 24, dtype=torch.float64))
    assert settled
    assert (moved.centre, moved.spread) == (placement.centre, placement.spread)


def test_counts_one_by_one_are_never_tightened():
    belief = torch.zeros(1, 1, 24, dtype=torch.float64)
    belief[..., 3] = 1.0
    assert place(Count(), 24, 3.0, 1.5).moved(belief)[2]
    assert place(Count(), 24, 3.0, 1.5).grouped == 0.0
    assert place(Count(), 24, 3.0, 50.0).grouped == 1.0


def test_jittered_draws_fill_the_stretch_between_points():
    placement = place(Real(), 24, 1.0, 2.0)
    generator = torch.Generator().manual_seed(3)
    _, weight = summed(placement, d.Normal(1.0, 2.0).log_prob)
    states = torch.multinomial(weight[0, 0], 20_000, replacement=True, generator=generator).unsqueeze(0)
    drawn = placement.jittered(states, generator)[0, :, 0].sort().values
    levels = (torch.arange(20_000) + 0.5).double() / 20_000
    distance = (d.Normal(1.0, 2.0).cdf(drawn) - levels).abs().max().item()
    assert distance < 0.012  # Kolmogorov's distance of 20,000 draws is below it with probability 0.994
    grouped = place(Count(), 25, 300.0, 60.0)
    states = torch.full((1, 4000), 7)
    whole = grouped.jittered(states, generator)[0, :, 0]
    length = grouped.points().log_length[0, 0, 7].exp().item()
    assert torch.equal(whole, whole.round())
    assert whole.max() - whole.min() <= length
    assert whole.mean().item() == pytest.approx(grouped.points().values[0, 0, 7, 0].item(), abs=0.05 * length)


def test_values_on_the_line():
    assert to_line(torch.tensor([3.0]), Count()).tolist() == [3.0]
    assert to_line(torch.tensor([2.0]), Positive()).tolist() == pytest.approx([math.log(2.0)])


@pytest.mark.parametrize("groups", [2, 4, 9])
def test_groups_of_counts_fill_the_window_and_have_the_moments_of_their_numbers(groups):
    window = np.array([3.0 * groups + 5, 80.0, 900.0])
    values, length = _growing_groups(window, groups)
    assert values.shape == length.shape == (3, 3 * groups)
    for row in range(3):
        sizes = np.round(length[row].reshape(groups, 3).sum(1)).astype(int)
        assert sizes[0] == 3
        assert (np.diff(sizes) >= -1).all()
        assert sizes.sum() == pytest.approx(window[row], abs=groups)
        first = 0
        for group, size in enumerate(sizes):
            numbers = np.arange(first, first + size, dtype=float)
            points, weight = values[row, 3 * group : 3 * group + 3], length[row, 3 * group : 3 * group + 3]
            middle = numbers.mean()
            for power in range(6):
                scale = (size / 2) ** power
                told, exact = (weight * (points - middle) ** power).sum(), ((numbers - middle) ** power).sum()
                assert told / scale == pytest.approx(exact / scale, abs=1e-6 * size)
            first += size


def test_groups_grow_by_one_ratio():
    _, length = _growing_groups(np.array([5000.0]), 6)
    sizes = length.reshape(6, 3).sum(1)
    ratio = sizes[1:] / sizes[:-1]
    np.testing.assert_allclose(ratio[2:], ratio[-1], rtol=0.02)
    assert ratio[-1] > 3
