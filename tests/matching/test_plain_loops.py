"""Windows of sequences and matched rows beside plain loops that say the same."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import ot
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.divergences import SlicedWasserstein
from otpdag.matching.transport_rows import SAME_PARTS
from tests.table_problems import started

LENGTH = 3  # steps of a window


# -- windows of sequences ---------------------------------------------------------------------------------------------


def hidden_markov(emission):
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(2), "x": emission})


def ragged(rng, sequences):
    """Sequences of different lengths, some of them shorter than a window, with gaps."""
    made = [rng.normal(rng.integers(0, 2) * 3.0, 1.0, size) for size in rng.integers(2, 9, sequences)]
    for one in made:
        one[rng.random(len(one)) < 0.1] = np.nan
    return made


def windows_by_hand(sequences, first_apart):
    """Windows without gaps and the times at which they begin, of first steps and of all others."""
    found = {True: ([], []), False: ([], [])}
    for one in sequences:
        for t in range(len(one) - LENGTH + 1):
            if not np.isnan(one[t : t + LENGTH]).any():
                windows, times = found[first_apart and t == 0]
                windows.append(one[t : t + LENGTH])
                times.append(t)
    return [found[is_first] for is_first in (True, False) if found[is_first][0]]


@pytest.mark.parametrize(("sequences", "first_apart"), [(29, False), (30, True)])
def test_strata_hold_the_windows_without_gaps(sequences, first_apart):
    data = ragged(np.random.default_rng(sequences), sequences)
    problem, _ = started(hidden_markov(m.Normal()), data, otp.transport(points=64))
    expected = windows_by_hand(data, first_apart)
    assert len(problem.strata) == len(expected) == 1 + first_apart
    seen = np.concatenate([one[~np.isnan(one)] for one in data])
    centre, spread = (float(one) for one in (problem.columns.centre, problem.columns.spread))
    assert np.sum(seen <= centre) >= len(seen) / 2 <= np.sum(seen >= centre)
    for stratum, (windows, times) in zip(problem.strata, expected, strict=True):
        found = sorted((stratum.compared.rows[0] * spread + centre).tolist())
        np.testing.assert_allclose(found, sorted(map(list, windows)), atol=1e-12)
        np.testing.assert_allclose(stratum.times, np.bincount(times) / len(times))
        assert stratum.share == pytest.approx(len(windows) / sum(map(len, data)))


def path_laws(begun, moves, paths, times):
    """Probabilities of paths of states that begin at a random one of these times."""
    laws = np.zeros(len(paths))
    for t, share in enumerate(times):
        at = begun @ np.linalg.matrix_power(moves, t)
        for number, path in enumerate(paths):
            laws[number] += share * at[path[0]] * np.prod([moves[i, j] for i, j in pairwise(path)])
    return laws


def test_the_cost_of_windows_is_a_sum_over_paths():
    data = ragged(np.random.default_rng(2), 40)
    method = otp.transport(divergence=SlicedWasserstein(8, p=1.0), points=64)
    problem, points = started(hidden_markov(m.Normal()), data, method, 2)
    found, naturals = problem.loss(points).total, problem.naturals(points)
    paths, each = list(product(range(2), repeat=LENGTH)), problem.points[0].size // 2**LENGTH
    noise = [one.noise["x"][0, :, 0].numpy() for one in problem.points]
    centre, spread = (float(one) for one in (problem.columns.centre, problem.columns.spread))
    for replica in range(2):
        loc, scale = (naturals["x"][name][replica, :, 0].numpy() for name in ("loc", "scale"))
        begun, moves = naturals["z[0]"]["probs"][replica, 0].numpy(), naturals["z"]["probs"][replica].numpy()
        model = np.array(
            [
                [loc[z] + scale[z] * noise[step][number * each + one] for step, z in enumerate(path)]
                for number, path in enumerate(paths)
                for one in range(each)
            ]
        )
        expected = 0.0
        for stratum in problem.strata:
            mass = np.repeat(path_laws(begun, moves, paths, stratum.times.numpy()), each) / each
            assert mass.sum() == pytest.approx(1.0)
            rows = stratum.compared.rows[0].numpy()
            costs = [
                ot.wasserstein_1d(rows @ along, (model - centre) / spread @ along, None, mass, p=1)
                for along in stratum.compared.directions.numpy().T
            ]
            expected += stratum.share * np.mean(costs)
        assert found[replica].item() == pytest.approx(expected, rel=1e-9)


def test_counts_of_windows_are_drawn_anew_where_few_of_them_count():
    counts = np.random.default_rng(3).poisson(4.0, (12, 8)).astype(float)
    problem, points = started(hidden_markov(m.Poisson()), counts, otp.transport(points=64), 2)
    near, far = points + 1e-3, points + 2.0
    assert problem.pace.steps == problem.direct.steps is not None
    assert started(hidden_markov(m.Normal()), counts, otp.transport(points=64), 2)[0].pace.steps is None
    assert problem.laid_out_for(near) is problem
    for other in (far, near[:1], torch.cat([near, near[:1]])):  # elsewhere, of fewer replicas, and of more
        anew = problem.laid_out_for(other)
        assert anew is not problem
        assert anew.loss(other).total.shape == (len(other),)
        assert all(one.effective(problem.naturals(other)) == pytest.approx(1.0) for one in anew.points)


def test_counts_of_a_table_are_drawn_for_as_many_starts_as_are_left():
    rng = np.random.default_rng(5)
    z = rng.normal(size=200)
    table = pd.DataFrame({name: rng.poisson(np.exp(1.0 + 0.5 * z)) for name in "abc"})
    graph = otp.Graph([("z", name) for name in "abc"], hidden=["z"])
    model = otp.Model(graph, {"z": m.Normal(loc=0.0, scale=1.0)} | {name: m.Poisson() for name in "abc"})
    assert otp.fit(model, table, method=otp.transport(points=128), restarts=6, seed=1).status.converged
    slopes = [abs(float(np.squeeze(model.params()[name]["weight"]))) for name in "abc"]
    np.testing.assert_allclose(slopes, 0.5, atol=0.2)


# -- rows of which some are not matched -------------------------------------------------------------------------------


@pytest.fixture
def matched():
    """Rows of a pair of which a tenth lies apart, and half of those need not be explained."""
    rng = np.random.default_rng(4)
    a = rng.normal(size=80)
    table = pd.DataFrame({"a": a, "b": a + 0.5 * rng.normal(size=80)})
    table.iloc[:8] = rng.normal(9.0, 0.1, (8, 2))
    model = otp.Model(otp.Graph([("a", "b")]), {"a": m.Normal(), "b": m.Normal()})
    return started(model, table, otp.transport(points=64, unmatched=0.05))


def test_other_weights_multiply_what_is_matched_of_each_row(matched):
    problem, _ = matched
    parts = problem.matching.parts[0]
    assert float(parts.min()) < 0.9 < 1.0 == pytest.approx(float(parts.max()))
    factors = torch.as_tensor(np.random.default_rng(5).uniform(0.5, 2.0, (2, 80)))
    found = problem.reweighted(factors).compared.weight
    for replica, row in product(range(2), range(80)):
        assert found[replica, row].item() == pytest.approx(float(factors[replica, row] * parts[row]))


def test_rows_are_matched_anew_where_parts_change_in_the_mean(matched):
    problem, points = matched
    leaf = points.clone().requires_grad_(True)
    for change, is_same in ((0.8, True), (1.2, False), (-0.8, True), (-1.2, False)):
        parts = problem.matching.parts.clone()
        row = int(parts.argmax())
        parts[0, row] -= change * SAME_PARTS * 80  # in one row, far more than the mean
        refined = replace(problem, matching=replace(problem.matching, parts=parts)).refine(leaf)
        assert (refined is None) == is_same
    torch.testing.assert_close(refined.problem.matching.parts, problem.matching.parts)
    assert not refined.point.requires_grad


def test_rows_that_a_model_makes_are_compared_as_they_are(matched):
    problem, points = matched
    made = problem.simulated(points, 5000, seed=6)
    naturals, rows = problem.naturals(points), made.compared.rows[0] * made.columns.spread + made.columns.centre
    a, b = (rows[:, made.columns.places[node]][:, 0].numpy() for node in "ab")
    loc, weight, scale = (float(naturals["b"][name].squeeze()) for name in ("loc", "weight", "scale"))
    assert made.rows == 5000
    assert a.mean() == pytest.approx(float(naturals["a"]["loc"].squeeze()), abs=0.1 * a.std())
    assert (b - loc - weight * a).std() == pytest.approx(scale, rel=0.05)


def test_as_many_rows_are_not_explained_as_are_left_out(matched):
    problem, points = matched
    for share in (0.0, 0.02, 0.05):
        (found,) = problem.explained(points, torch.tensor([share]))
        assert int((~found).sum()) == pytest.approx(80 * share, abs=1.0)


# -- nodes without slopes ----------------------------------------------------------------------------------------------


def test_slopes_of_a_simulator_with_jumps_are_central_differences_of_the_cost():
    node = m.Simulator(lambda parents, noise, loc: torch.floor(loc + noise), {"loc": otp.start(0.0)})
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": node})
    table = pd.DataFrame({"x": np.floor(np.random.default_rng(6).normal(1.0, 1.0, 200))})
    problem, points = started(model, table, otp.transport(points=64))
    reach = problem.points.size**-0.5  # so many points tell parameters apart that are so far apart
    assert problem.contradicts_slopes(points)
    jumping = replace(problem, jumps=True)
    ends = [float(jumping.loss(points + sign * reach).total) for sign in (1, -1)]
    leaf = points.detach().requires_grad_(True)
    (slope,) = torch.autograd.grad(jumping.loss(leaf).total.sum(), leaf)
    assert slope.item() == pytest.approx((ends[0] - ends[1]) / (2 * reach), rel=1e-6)
