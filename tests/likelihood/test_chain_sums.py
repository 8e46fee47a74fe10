"""Expected sums read off stretches, beside those of steps one after another."""

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine.method import entropic
from otpdag.engine.sequence_data import SequenceData
from otpdag.likelihood import chain_problem as chain


def normal_chain():
    """Three hidden states behind a number."""
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(3), "x": m.Normal()})


def problem_of(lengths, weights):
    """Sequences with gaps, laid out, and some points."""
    rng = np.random.default_rng(3)
    data = [rng.normal(3 * ((rng.random(length) < 0.1).cumsum() % 3), 1.0) for length in lengths]
    data[0][5:20] = np.nan
    kind = SequenceData.of(normal_chain(), data, weights=weights)
    method = entropic()
    layout = kind.lay_out(method, 0)
    problem = kind.problem(layout, method, 0)
    return problem, kind.starts(layout, problem, 0, range(3))


@pytest.mark.parametrize("lengths", [(300,), (200, 150, 97, 70)])
@pytest.mark.parametrize("weighted", [False, True])
def test_updates_of_stretches_are_those_of_steps(lengths, weighted, monkeypatch):
    weights = np.linspace(0.5, 2.0, len(lengths)) if weighted else None
    problem, points = problem_of(lengths, weights)
    assert problem._is_placed(len(points))
    moved, terms = problem.update(points)
    monkeypatch.setattr(chain.ChainProblem, "_is_placed", lambda self, replicas: False)
    monkeypatch.setattr("otpdag.likelihood.chain_messages._SIDE_BY_SIDE", 0)
    expected, expected_terms = problem.update(points)
    torch.testing.assert_close(moved, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(terms.total, expected_terms.total, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(terms.total, problem.loss(points).detach(), rtol=1e-11, atol=1e-11)
