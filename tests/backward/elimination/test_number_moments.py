"""Means and variances of unknown numbers, beside plain sums over states and points."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from otpdag.backward.elimination.number_moments import _unknown_moments
from tests.backward.elimination.linear_groups import CASES, PIECES, Plain, entries, make_group


@pytest.mark.parametrize("case", CASES)
def test_moments_of_unknowns_are_means_over_states_and_points(case):
    group, equations, points = make_group(np.random.default_rng(len(case)), **CASES[case])
    integrals = group.integrate(equations, points)
    alone = replace(integrals, points=tuple(one[:1] for one in points))  # of the first replica
    weight = torch.rand(integrals.table[:1].shape, generator=torch.Generator().manual_seed(1)).double()
    one, two = _unknown_moments(alone, weight)
    first, second = np.zeros((PIECES, group.dim)), np.zeros((PIECES, group.dim))
    for replica, piece, state, place, y in entries(group, points):
        if replica == 0:
            _, mean, covariance = Plain(group, equations, 1.0, 0, piece, state).given(y)
            first[piece] += float(weight[place]) * mean
            second[piece] += float(weight[place]) * (mean**2 + covariance.diagonal())
    total = weight[0].reshape(PIECES, -1).sum(-1, keepdim=True).numpy()
    np.testing.assert_allclose(one, first / total)
    np.testing.assert_allclose(two, second / total)
