"""Numbers that meet, with as many points as they need, against all points of each."""

import numpy as np
import pytest
import torch

from otpdag import mechanisms as m
from otpdag.likelihood.elimination import EliminationOptions, expectations, lay_out, log_evidence, moved
from otpdag.likelihood.elimination.points import SIZES, Placement, _rounded, needed_points, two_sizes
from otpdag.spaces import Count, Real
from tests.likelihood.elimination.worlds import make_world

EDGES = [("a", "c"), ("b", "c"), ("c", "d"), ("a", "e"), ("d", "e")]


def world(seed):
    nodes = {"a": m.Normal(), "b": m.Poisson(), "c": m.Poisson(), "d": m.Normal(), "e": m.Poisson()}
    return make_world(nodes, EDGES, np.random.default_rng(seed), rows=30, gaps=0.4)


@pytest.mark.parametrize("seed", range(3))
def test_few_points_tell_the_evidence_of_many(seed):
    structure, naturals, batch = world(seed)
    many = moved(naturals, lay_out(structure, batch, EliminationOptions(grid=32, count_points=48, largest_table=2**22)))
    few = lay_out(structure, batch, EliminationOptions(fine_table=64, memory=2**18))
    assert any(block.is_coarse for block in few.blocks)
    few = moved(naturals, few)
    assert not any(block.is_coarse for block in few.blocks)
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
        torch.testing.assert_close(found.slopes["c", name], value.grad)
    assert found.families["c"][0].thinned


def test_numbers_of_points_are_rounded_up_to_the_next_size():
    wanted = np.array([1.0, 6.0, 6.1, 9.0, 13.0, 18.0, 19.0, 25.0, 36.0, 37.0, 49.0, 73.0, 96.0, 500.0])
    expected = [6, 6, 9, 9, 18, 18, 24, 36, 36, 48, 72, 96, 96, 96]
    assert _rounded(wanted).tolist() == expected


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
