"""Scores of steps given the few around them: against sums over all paths, and means that are known."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.matching.window_scores import STEPS_AROUND, UNLIKELIEST_SHARE, can_be_scored
from tests.dynamic_models import known_poisson_hmm, random_poisson_hmm
from tests.window_models import drawn, mixed_hmm, problem_of, reader_of, with_missing


def log_likelihood(problem, point, batch):
    """Of all sequences together, by summing over all paths of a single hidden node."""
    structure, naturals = problem.structure, problem.naturals(point)
    size = structure.mechanisms["z"].space.width
    state = torch.eye(size, dtype=torch.float64)
    first = structure.mechanisms["z[0]"].log_prob(naturals["z[0]"], state[None], {})[0]
    move = structure.mechanisms["z"].log_prob(naturals["z"], state[None, None], {"z[-1]": state[None, :, None]})[0]
    emitted = torch.zeros(batch.rows, size).double()
    for node in structure.graph.observed:
        value, seen = batch.steps.values[node].unsqueeze(2), batch.steps.mask[node].unsqueeze(2)
        emitted += structure.mechanisms[node].log_prob(naturals[node], value, {"z": state[None, None]}, seen)[0]
    total = 0.0
    for start, length in zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True):
        paths = []
        for path in itertools.product(range(size), repeat=length):
            log = first[path[0]] + sum(move[a, b] for a, b in itertools.pairwise(path))
            paths.append(log + sum(emitted[start + t, s] for t, s in enumerate(path)))
        total = total + torch.logsumexp(torch.stack(paths), 0)
    return float(total)


@pytest.mark.parametrize("make", [random_poisson_hmm, mixed_hmm])
def test_where_windows_are_whole_sequences_scores_add_up_to_the_slope_of_the_likelihood(make):
    problem, point = problem_of(make(), 40, 10)
    batch = with_missing(drawn(problem, point, 5, STEPS_AROUND + 1), 0.2)
    ours = reader_of(problem, point).of(batch).sum(0)
    for number in range(point.shape[-1]):
        step = torch.zeros_like(point)
        step[0, number] = 1e-5
        ahead, behind = (log_likelihood(problem, point + sign * step, batch) for sign in (1, -1))
        assert float(ours[number]) == pytest.approx((ahead - behind) / 2e-5, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_under_the_model_their_mean_is_zero(missing):
    """Also given windows shorter than the sequences, and at random gaps."""
    problem, point = problem_of(mixed_hmm(), 40, 10)
    batch = with_missing(drawn(problem, point, 2000, 3 * STEPS_AROUND), missing)
    each = reader_of(problem, point).of(batch).reshape(2000, -1, point.shape[-1]).sum(1)
    assert bool((each.mean(0).abs() < 4 * each.std(0) / 2000**0.5 + 1e-9).all())
    assert int((each.std(0) > 0.01).sum()) == point.shape[-1]


def test_a_number_that_the_model_would_hardly_make_is_read_as_if_it_were_missing():
    problem, point = problem_of(known_poisson_hmm(), 40, 10)
    batch = drawn(problem, point, 4, 20)
    reader = reader_of(problem, point).with_floors(drawn(problem, point, 1000, 50))
    x, seen = batch.steps.values["x"].clone(), batch.steps.mask["x"].clone()
    x[0, 30], seen[0, 30] = 500.0, False
    spoilt = replace(batch, steps=replace(batch.steps, values={"x": x}))
    missing = replace(batch, steps=replace(batch.steps, mask={"x": seen}))
    torch.testing.assert_close(reader.of(spoilt), reader.of(missing))
    assert float(reader_of(problem, point).of(spoilt).abs().max()) > 20 * float(reader.of(spoilt).abs().max())


def test_few_numbers_and_no_categories_are_hardly_possible():
    problem, point = problem_of(mixed_hmm(), 40, 10)
    sample = drawn(problem, point, 1000, 50)
    reader = reader_of(problem, point).with_floors(sample)
    assert set(reader.floors) == {"x", "y"}
    assert float((~reader.trusted(sample).steps.mask["y"]).double().mean()) == pytest.approx(
        UNLIKELIEST_SHARE, rel=0.05
    )


def test_densities_of_fewer_cells_are_not_compared_with_those_of_all():
    """A cell of a narrow node is less dense than two, but no less possible."""
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal(2)})
    narrow = {"loc": [[-1.0, -1.0], [1.0, 1.0]], "scale": np.full((2, 2), 1e-4)}
    model.set_params({"z": {"probs": [[0.8, 0.2], [0.3, 0.7]]}, "z[0]": {"probs": [0.4, 0.6]}, "x": narrow})
    problem, point = problem_of(model, 40, 10)
    sample = drawn(problem, point, 100, 20)
    reader = reader_of(problem, point).with_floors(sample)
    seen = with_missing(sample, 0.3)
    assert torch.equal(reader.trusted(seen).steps.mask["x"].any(-1), seen.steps.mask["x"].any(-1))


def test_moves_that_cannot_be_have_no_score_that_is_not_a_number():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    cycle = m.Categorical(3, probs=[[0.9, 0.1, 0.0], [0.0, 0.9, 0.1], [0.1, 0.0, 0.9]])
    first = m.Categorical(3, probs=[1.0, 0.0, 0.0])
    model = otp.Model(graph, {"z": cycle, "z[0]": first, "x": m.Poisson()})
    model.set_params({"x": {"log_rate": np.log([2.0, 20.0, 200.0])}})
    problem, point = problem_of(model, 40, 10)
    batch = drawn(problem, point, 40, 10)
    x = batch.steps.values["x"].clone()
    x[0, ::7] = 2000.0  # at steps where the state cannot be the one that says so
    scores = reader_of(problem, point).of(replace(batch, steps=replace(batch.steps, values={"x": x})))
    assert bool(torch.isfinite(scores).all())


def test_nodes_without_a_density_have_no_scores():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    assert can_be_scored(mixed_hmm().structure)
    assert not can_be_scored(
        otp.Model(graph, {"z": m.Categorical(2), "x": m.Deterministic(lambda parents: parents["z"][..., :1])}).structure
    )
