"""Windows compared along scores: what moves an estimate, and what is left as it was."""

from dataclasses import replace

import torch

from otpdag.matching.window_features import window_distance
from otpdag.matching.window_scores import _Along, _with_gaps, along_scores, change
from tests.dynamic_models import known_poisson_hmm
from tests.window_models import drawn, problem_of, reader_of, with_missing


def test_the_gaps_of_a_sample_are_those_of_the_data():
    problem, point = problem_of(known_poisson_hmm(), 40, 10)
    sample = drawn(problem, point, 3, 10)
    assert _with_gaps(sample, sample) is sample
    gaps = with_missing(drawn(problem, point, 2, 10), 0.3)
    seen = gaps.steps.mask["x"]
    assert torch.equal(_with_gaps(sample, gaps).steps.mask["x"], torch.cat([seen, seen[:, :10]], 1))


def test_what_features_do_not_tell_of_a_score_is_not_compared_along_it():
    generator = torch.Generator().manual_seed(0)
    features, beyond = (torch.randn(5000, many, generator=generator).double() for many in (3, 1))
    scores = torch.cat([2 * features[:, :1] + beyond, features[:, 1:2], beyond, torch.zeros(5000, 1)], -1)
    along = _Along.of(features, scores, 1)
    assert along.directions.shape == (4, 2)
    told = features @ along.slopes
    # the mean of a score moves with parameters as the score and its mean do together: Cov(told, s) = Cov(along, s)
    compared = (scores - scores.mean(0)) @ along.directions
    torch.testing.assert_close(told.T @ compared / 5000, torch.eye(2).double(), atol=0.1, rtol=0.0)


def test_the_loss_says_as_before_how_far_the_windows_are():
    """What no parameters change is kept in it, and first windows are compared as they were."""
    problem, point = problem_of(known_poisson_hmm(), 200, 30)
    sample = drawn(problem, point, 2000, 30)
    scored = along_scores(reader_of(problem, point), problem.windows, problem.batch, sample)
    assert scored.strata[0] is problem.windows.strata[0]
    before = window_distance(problem.structure, problem.naturals(point), problem.windows)
    after = window_distance(problem.structure, problem.naturals(point), scored)
    torch.testing.assert_close(after, before)


def test_where_the_models_scores_are_the_datas_nothing_moves():
    """Data that the model itself made: the gap is one of chance, about its parameters over its steps."""
    problem, point = problem_of(known_poisson_hmm(), 200, 30)
    batch = drawn(problem, point, 1000, 30, seed=1)
    scored = along_scores(reader_of(problem, point), problem.windows, batch, drawn(problem, point, 2000, 30))
    later = scored.strata[1]
    distance = window_distance(problem.structure, problem.naturals(point), replace(scored, strata=(later,)))
    chance = float(distance) - later.share * later.rest
    assert 0 < chance < 3 * point.shape[-1] / batch.rows


def test_sequences_too_short_for_blocks_are_left_as_they_are():
    problem, point = problem_of(known_poisson_hmm(), 40, 10)
    sample = drawn(problem, point, 40, 3)
    assert along_scores(reader_of(problem, point), problem.windows, problem.batch, sample) is problem.windows


def test_a_change_is_measured_in_standard_errors_of_a_step():
    """By a known information: with the states known, that of a log-rate is the rate times the state's share."""
    problem, point = problem_of(known_poisson_hmm(), 200, 30)
    scored = along_scores(reader_of(problem, point), problem.windows, problem.batch, drawn(problem, point, 2000, 30))
    naturals = problem.naturals(point)
    assert change(problem.structure, scored, naturals, naturals) == 0.0
    highest = int(naturals["x"]["log_rate"].argmax())
    log_rate = naturals["x"]["log_rate"].clone()
    log_rate.view(-1)[highest] += 0.01
    moved = {**naturals, "x": {"log_rate": log_rate}}
    share = float((drawn(problem, point, 2000, 30).steps.values["x"] > 13).double().mean())
    known = share * float(torch.exp(log_rate.max())) * 0.01**2
    assert 0.7 * known < change(problem.structure, scored, naturals, moved) < 1.1 * known
