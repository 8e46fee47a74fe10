"""Tables of a layout at some parameters: what each family says, against its mechanism asked row by row."""

import math

import numpy as np
import pytest
import torch

from otpdag import mechanisms as m
from otpdag.errors import ModelError
from otpdag.likelihood.elimination import Tempering, lay_out, moved
from otpdag.likelihood.elimination.sums import Factors, piece_weights
from tests.likelihood.elimination.worlds import make_world

NODES = {"k": m.Categorical(3), "a": m.Categorical(2), "b": m.Categorical(2), "x": m.Normal(), "n": m.Poisson()}
EDGES = [("k", "a"), ("k", "b"), ("k", "x"), ("x", "n")]


def world(replicas=2, **options):
    return make_world(NODES, EDGES, np.random.default_rng(5), rows=25, replicas=replicas, **options)


def test_complete_families_have_the_densities_of_their_mechanisms():
    structure, naturals, batch = world(gaps=0.3)
    layout = moved(naturals, lay_out(structure, batch))
    factors = Factors(layout, naturals, Tempering())
    rows_of = {}
    for complete in layout.complete:
        node = layout.families[complete.family].node
        values = {n: batch.values[n][:, complete.rows] for n in (node, *structure.graph.parents(node))}
        expected = structure.mechanisms[node].log_prob(naturals[node], values[node], structure.parents(node, values))
        torch.testing.assert_close(factors.complete_log_prob(complete), expected)
        rows_of.setdefault(node, []).extend(complete.rows.tolist())
    for node, rows in rows_of.items():
        names = (node, *structure.graph.parents(node))
        shown = torch.stack([batch.mask[n][0].all(-1) for n in names]).all(0)
        assert sorted(rows) == torch.nonzero(shown)[:, 0].tolist()


def test_families_that_are_alike_are_asked_together_and_answer_as_alone():
    structure, naturals, batch = world()
    layout = moved(naturals, lay_out(structure, batch))
    factors = Factors(layout, naturals, Tempering())
    twins = [family for family in layout.families if family.node in "ab"]
    assert len(layout.alike[twins[0].place]) == 2
    for family in twins:
        torch.testing.assert_close(
            factors.log_table(family.place), torch.log(naturals[family.node]["probs"]).reshape(2, 3, 2)
        )


def test_tempering_weighs_what_is_seen_and_replaces_what_is_not():
    structure, naturals, batch = world(hidden=["k"])
    layout = moved(naturals, lay_out(structure, batch))
    family = next(one for one in layout.families if one.node == "k")
    log_prob = torch.tensor([-1.0, -torch.inf, -3.0])
    assert Tempering(power=0.5).of(family, log_prob, seen=True).tolist() == [-0.5, -math.inf, -1.5]
    assert Tempering(power=0.5).of(family, log_prob, seen=False).tolist() == log_prob.tolist()
    assert Tempering(uniform=True).of(family, log_prob, seen=False).tolist() == pytest.approx([-math.log(3)] * 3)
    assert Tempering(best=True).of(family, log_prob, seen=False).tolist() == [0.0, -math.inf, 0.0]
    for tempering, shares in ((Tempering(0.5), (0.5, 1.0)), (Tempering(best=True), (1.0, 0.0))):
        assert (tempering.share(family, seen=True), tempering.share(family, seen=False)) == shares


def test_a_piece_weighs_as_much_as_all_rows_that_have_it():
    structure, naturals, batch = world()
    layout = moved(naturals, lay_out(structure, batch))
    for block in layout.blocks:
        total = piece_weights(block, batch.weight)[0]
        for piece in range(block.distinct):
            rows = block.piece_row[block.piece == piece]
            assert float(total[piece]) == pytest.approx(float(batch.weight[0, rows].sum()))


def test_points_of_other_replicas_are_refused():
    structure, naturals, batch = world()
    layout = moved(naturals, lay_out(structure, batch))
    three = {n: {name: v[[0, 1, 1]] for name, v in own.items()} for n, own in naturals.items()}
    with pytest.raises(ModelError, match="placed for another number of replicas than 3"):
        Factors(layout, three, Tempering())
