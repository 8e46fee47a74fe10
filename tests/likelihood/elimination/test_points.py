"""Points of unknown numbers and clouds of points of vectors, against integrals that are known."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import distributions as d
from torch.distributions import MultivariateNormal

from otpdag import mechanisms as m
from otpdag.likelihood.elimination.evidence import expectations, log_evidence, moved
from otpdag.likelihood.elimination.layout import lay_out
from otpdag.likelihood.elimination.plans import EliminationOptions
from otpdag.likelihood.elimination.unknown_numbers import (
    CLOSE,
    CLOUD_EDGE,
    CLOUD_WIDEN,
    DISTANCE,
    GRID_DIMENSIONS,
    LEAST_CHANGE,
    MOST_CHANGE,
    SIZES,
    Cloud,
    Placement,
    _growing_groups,
    needed_points,
    two_sizes,
)
from otpdag.spaces import Count, Positive, Real, Unit
from tests.likelihood.elimination.worlds import make_world

# -- points stand for the whole line: sums over them are integrals and sums of known densities ------------------------


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


# -- beside plain versions, one row at a time --------------------------------------------------------------------------

CENTRES = np.array([[0.3, 40.0, 7.4, 2.5, 900.0], [1.0, 35.5, 6.6, 0.0, 880.0]])
SPREADS = np.array([[1.0, 6.0, 2.0, 0.4, 60.0], [2.0, 5.0, 3.0, 8.0, 30.0]])
SPACES = {"real": Real(), "positive": Positive(), "unit": Unit(), "count": Count()}


def several(space, size):
    spreads, centres = torch.as_tensor(SPREADS), torch.as_tensor(CENTRES)
    if space in (SPACES["positive"], SPACES["unit"]):
        centres, spreads = centres / 100, spreads / 20
    return Placement("x", space, torch.arange(5), size, centres, spreads)


def plain_window(centre, spread, size):
    """The smallest count, and how many counts each of so many points stands for."""
    reach, middle = math.ceil(5.0 * spread), round(centre)
    stride = math.ceil((middle + reach + 1 - max(middle - reach, 0)) / size)
    return max(middle - math.floor(stride * size / 2), 0), stride


def plain_points(placement, replica, row):
    """Values on the line, values, and lengths."""
    size, centre, spread = placement.size, placement.centre[replica, row].item(), placement.spread[replica, row].item()
    if placement.space.is_countable:
        first, stride = plain_window(centre, spread, size)
        if first == 0 and stride > 1 and size % 3 == 0:
            values, length = _growing_groups(np.array([float(size * stride)]), size // 3)
            return values[0], values[0], length[0]
        values = np.array([first + stride * point + (stride - 1) / 2 for point in range(size)])
        return values, values, np.full(size, float(stride))
    distance = 2 * 6.3 / (size - 1)
    even = np.array([distance * (point - (size - 1) / 2) for point in range(size)])
    line = centre + spread * np.sinh(0.35 * even) / 0.35
    stretch = spread * np.cosh(0.35 * even)
    if isinstance(placement.space, Positive):
        return line, np.exp(line), distance * stretch * np.exp(line)
    if isinstance(placement.space, Unit):
        values = 1 / (1 + np.exp(-line))
        tail = np.exp(-np.abs(line))
        return line, values, distance * stretch * tail / (1 + tail) ** 2
    return line, line, distance * stretch


@pytest.mark.parametrize("size", [24, 25])
@pytest.mark.parametrize("space", SPACES)
def test_points_and_lengths_are_those_of_each_row(space, size):
    placement = several(SPACES[space], size)
    points = placement.points()
    for replica, row in np.ndindex(2, 5):
        line, values, length = plain_points(placement, replica, row)
        np.testing.assert_allclose(placement.line()[replica, row], line, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(points.values[replica, row, :, 0], values, rtol=1e-9, atol=1e-300)
        np.testing.assert_allclose(points.log_length[replica, row].exp(), length, rtol=1e-9, atol=1e-300)
    some = placement.at(torch.tensor([7, 8]), torch.tensor([3, 1]), size)
    assert some.rows.tolist() == [7, 8]
    torch.testing.assert_close(some.line(), placement.line()[:, [3, 1]])
    strides = [plain_window(*pair, size)[1] for pair in zip(CENTRES.flatten(), SPREADS.flatten(), strict=True)]
    expected = np.mean([stride > 1 for stride in strides]) if space == "count" else 0.0
    assert placement.grouped == pytest.approx(expected)


def plain_move(placement, belief, replica, row, widened):
    """The new centre and spread, whether it was ever widened, and whether its window changed."""
    line = placement.line()[replica, row].numpy()
    old, own = placement.spread[replica, row].item(), belief[replica, row]
    first, stride = plain_window(placement.centre[replica, row].item(), old, placement.size)
    counts = placement.space.is_countable
    if own.sum() <= 0.5:
        return placement.centre[replica, row].item(), old, widened, False
    mean = own @ line
    spread = np.sqrt(own @ (line - mean) ** 2)
    gap = line[1] - line[0] if counts else 2 * 6.3 / (placement.size - 1) * old
    narrow = max(spread, gap / 2)

    def beyond(mass):
        return bool((own[0] > mass and not (counts and first == 0)) or own[-1] > mass)

    if beyond(1e-5):
        outside = beyond(1e-2)
        return mean, max(spread, (4.0 if outside else 1.4) * old), widened or not outside, True
    tight = not widened and narrow < 0.75 * old and not (counts and stride == 1)
    return mean, (old if widened else narrow), widened, tight


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("size", [24, 25])
@pytest.mark.parametrize("space", ["real", "count"])
def test_points_move_row_by_row_to_where_beliefs_are(space, size, told):
    placement = several(SPACES[space], size)
    rng = np.random.default_rng(size + told)
    seen = set()
    for _ in range(30):
        width = rng.choice([0.3, 1.0, 3.0, 10.0], (2, 5, 1))
        belief = np.exp(-0.5 * ((np.arange(size) - rng.uniform(-2, size + 2, (2, 5, 1))) / width) ** 2)
        edge = rng.choice([0.0, 5e-6, 2e-5, 5e-3, 2e-2], (2, 5, 2))
        belief[..., 0] += edge[..., 0]
        belief[..., -1] += edge[..., 1]
        belief /= belief.sum(-1, keepdims=True) * rng.choice([1.0, 1.0, 1.0, 2.5], (2, 5, 1))
        widened = rng.random((2, 5)) < 0.4 if told else None
        moved, ever, settled = placement.moved(
            torch.as_tensor(belief), None if widened is None else torch.as_tensor(widened)
        )
        changed = []
        for replica, row in np.ndindex(2, 5):
            before = bool(widened[replica, row]) if told else False
            centre, spread, after, change = plain_move(placement, belief, replica, row, before)
            assert moved.centre[replica, row].item() == pytest.approx(centre, rel=1e-9, abs=1e-12)
            assert moved.spread[replica, row].item() == pytest.approx(spread, rel=1e-6)
            assert bool(ever[replica, row]) == after
            changed.append(change)
            seen.add((change, after))
        assert settled == (not any(changed))
    assert len(seen) == 3 + told  # every way of going on was met
    nowhere = torch.zeros(2, 5, size).double()
    nowhere[..., :2] = 0.5
    placement = several(SPACES[space], size)
    assert placement.moved(nowhere)[2] is False


def test_beliefs_at_a_single_point_keep_points_apart():
    placement = Placement("x", Real(), ROW, 24, at(0.0), at(1e-9))
    belief = torch.zeros(1, 1, 24).double()
    belief[..., 11] = 1.0
    assert placement.moved(belief)[0].spread.item() == 1e-9


def test_draws_lie_anywhere_in_the_stretch_of_their_point():
    states = torch.tensor([[0, 3, 23], [5, 11, 12], [1, 2, 4], [9, 8, 7], [20, 0, 6]])
    for space in SPACES.values():
        placement = several(space, 24)
        drawn = placement.jittered(states, torch.Generator().manual_seed(2))
        uniform = (
            torch.rand(states.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).numpy() - 0.5
        )
        for row, place in np.ndindex(5, 3):
            point, offset = int(states[row, place]), uniform[row, place]
            _, values, length = plain_points(placement, 0, row)
            if space.is_countable:
                expected = max(round(values[point] + offset * (length[point] - 1)), 0)
            else:
                distance = 2 * 6.3 / 23
                even = distance * (point - 23 / 2 + offset)
                spread = placement.spread[0, row].item()
                line = torch.tensor(placement.centre[0, row].item() + spread * np.sinh(0.35 * even) / 0.35)
                expected = space.constrain(line.double())[0].item()
            assert drawn[row, place, 0].item() == pytest.approx(expected, rel=1e-9)


# -- clouds of points of vectors, against integrals that are known ----------------------------------------------------


def cloud(dim, size, centre=0.0, spread=1.0):
    middle = torch.full((1, 1, dim), centre, dtype=torch.float64)
    factor = spread * torch.eye(dim).double().expand(1, 1, -1, -1)
    return Cloud("x", Real(), torch.zeros(1, dtype=torch.long), size, middle, factor)


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
    placed = Cloud(
        "x", Real(), torch.zeros(1).long(), 484, posterior.mean[None, None], posterior.scale_tril[None, None]
    )
    points = placed.points()
    share = (posterior.log_prob(points.values) + points.log_length).softmax(-1)[0, 0]
    generator = torch.Generator().manual_seed(4)
    states = torch.multinomial(share, 40_000, replacement=True, generator=generator).unsqueeze(0)
    drawn = placed.jittered(states, generator)[0]
    torch.testing.assert_close(drawn.mean(0), posterior.mean, atol=0.01, rtol=0)
    # a cell of a grid of one standard deviation adds a twelfth of a variance
    torch.testing.assert_close(drawn.T.cov(), posterior.covariance_matrix * (13 / 12), atol=0.01, rtol=0.02)


def test_a_row_that_is_ruled_out_keeps_its_cloud():
    placed = cloud(2, 484, 3.0, 2.0)
    moved, _, settled = placed.moved(torch.zeros(1, 1, 484, dtype=torch.float64))
    assert settled
    torch.testing.assert_close(moved.centre, placed.centre)
    torch.testing.assert_close(moved.spread, placed.spread)


# -- beside one row at a time -----------------------------------------------------------------------------------------


def several_clouds(dim, size, seed=0):
    """Two replicas of three rows, each with a middle and a triangular stretch of its own."""
    rng = np.random.default_rng(seed)
    factor = np.tril(rng.normal(size=(2, 3, dim, dim)), -1) + np.eye(dim) * rng.uniform(0.5, 2.0, (2, 3, dim, 1))
    centre = rng.normal(size=(2, 3, dim))
    return Cloud("x", Real(), torch.arange(3), size, torch.as_tensor(centre), torch.as_tensor(factor))


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
    placed = several_clouds(dim, size)
    points = placed.points()
    base, volume, _ = plain_base(dim, size)
    for replica, row in np.ndindex(2, 3):
        factor = placed.spread[replica, row].numpy()
        expected = placed.centre[replica, row].numpy() + base @ factor.T
        np.testing.assert_allclose(points.values[replica, row], expected, atol=1e-9)
        length = volume + np.log(np.abs(np.linalg.det(factor)))
        np.testing.assert_allclose(points.log_length[replica, row], length, atol=1e-9)
    some = placed.at(torch.tensor([8, 9]), torch.tensor([2, 0]), placed.size)
    assert some.rows.tolist() == [8, 9]
    torch.testing.assert_close(some.points().values, points.values[:, [2, 0]])
    states = torch.tensor([[0, 3], [5, 5], [7, 1]])
    drawn = placed.jittered(states, torch.Generator().manual_seed(1))
    noise = torch.rand(3, 2, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64).numpy() - 0.5
    for row, at in np.ndindex(3, 2):
        own = base[states[row, at]] + (DISTANCE * noise[row, at] if dim <= GRID_DIMENSIONS else 0.0)
        expected = placed.centre[0, row].numpy() + placed.spread[0, row].numpy() @ own
        np.testing.assert_allclose(drawn[row, at], expected, atol=1e-9)


@pytest.mark.filterwarnings("ignore:The balance properties of Sobol")
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(("dim", "size"), [(2, 49), (3, 125), (GRID_DIMENSIONS + 1, 63)])
def test_points_move_to_mean_and_covariance_of_a_belief_and_wider_at_the_edge(dim, size, told):
    placed = several_clouds(dim, size)
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
            own, factor = belief[replica, row], placed.spread[replica, row].numpy()
            ever = bool(before[replica, row]) if told else False
            if own.sum() <= 0.5:
                np.testing.assert_allclose(moved.centre[replica, row], placed.centre[replica, row])
                np.testing.assert_allclose(moved.spread[replica, row], factor)
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
            np.testing.assert_allclose(moved.spread[replica, row], factor @ change, rtol=1e-6, atol=1e-9)
            expected = placed.centre[replica, row].numpy() + factor @ mean
            np.testing.assert_allclose(moved.centre[replica, row], expected, atol=1e-9)
            assert bool(widened[replica, row]) == ever
            rest.append(np.abs(mean).max() < CLOSE and np.abs(spread - 1).max() < CLOSE)
            met.add((at_edge, ever))
        assert settled == all(rest)
    assert len(met) >= (1 if dim > GRID_DIMENSIONS else 2)


# -- numbers that meet, with as many points as they need, against all points of each ----------------------------------


EDGES = [("a", "c"), ("b", "c"), ("c", "d"), ("a", "e"), ("d", "e")]


def world(seed):
    nodes = {"a": m.Normal(), "b": m.Poisson(), "c": m.Poisson(), "d": m.Normal(), "e": m.Poisson()}
    return make_world(nodes, EDGES, np.random.default_rng(seed), rows=30, gaps=0.4)


@pytest.mark.parametrize("seed", range(3))
def test_few_points_tell_the_evidence_of_many(seed):
    structure, naturals, batch = world(seed)
    many = moved(naturals, lay_out(structure, batch, EliminationOptions(grid=32, count_points=48, largest_table=2**22)))
    few = lay_out(structure, batch, EliminationOptions(fine_table=64, memory=2**18))
    assert any(bool(block.parts) for block in few.blocks)
    few = moved(naturals, few)
    assert not any(bool(block.parts) for block in few.blocks)
    assert few.largest_table < many.largest_table / 4
    torch.testing.assert_close(log_evidence(naturals, few), log_evidence(naturals, many), rtol=0, atol=2e-4)


def test_a_sample_has_the_gradient_of_all_rows():
    structure, naturals, batch = world(1)
    layout = moved(naturals, lay_out(structure, batch))
    leaves = {n: {k: v.clone().requires_grad_() for k, v in params.items()} for n, params in naturals.items()}
    found = expectations(naturals, layout, sampled={"c": 10})
    whole = expectations(naturals, layout)
    expected = sum(some.sum() for one in whole.families["c"] for _, some in one.parts(leaves["c"]))
    expected.backward()
    for name, value in leaves["c"].items():
        torch.testing.assert_close(found.slopes["c"][name], value.grad)
    assert found.families["c"][0].thinned


def test_counts_need_a_window_of_their_posterior_and_numbers_twelve_points():
    rows, one = torch.arange(4), torch.ones(1, 4, dtype=torch.float64)
    centre = torch.tensor([[1.0, 3.0, 30.0, 400.0]]).double()
    spread = torch.tensor([[0.5, 1.0, 2.0, 20.0]]).double()
    reach = 4.8 * spread[0] + 3
    width = torch.minimum(2 * reach, centre[0] + reach)
    found = needed_points(Placement("x", Count(), rows, 12, centre, spread), 1.5, 40)
    expected = [min(size for size in SIZES if size >= w) if w <= 40 else 72 for w in width.tolist()]  # 40 * 1.5 = 60
    assert found.tolist() == expected
    assert needed_points(Placement("x", Real(), rows, 12, centre, one), 1.4, 40).tolist() == [18] * 4
    assert needed_points(Placement("x", Real(), rows, 12, centre, one), 1.0, 40).tolist() == [12] * 4


def test_two_sizes_are_that_of_nine_tenths_and_the_largest():
    assert two_sizes(np.array([6] * 9 + [24])).tolist() == [6] * 9 + [24]
    assert two_sizes(np.array([6] * 8 + [9, 24])).tolist() == [9] * 9 + [24]
    assert two_sizes(np.array([6] * 8 + [12, 24])).tolist() == [12] * 9 + [24]
    assert two_sizes(np.array([9])).tolist() == [9]
