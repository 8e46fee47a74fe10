"""Numbers that meet, with as many points as they need, against all points of each."""

import numpy as np
import pytest
import torch

from otpdag import mechanisms as m
from otpdag.backward.elimination import EliminationOptions, expectations, lay_out, log_evidence, moved
from tests.backward.elimination.worlds import make_world

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
