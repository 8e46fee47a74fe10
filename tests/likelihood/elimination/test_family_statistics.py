"""What rows say of a family, summed up: the same log-density as the rows themselves."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from otpdag import mechanisms as m
from otpdag.likelihood.elimination import expectations, lay_out
from otpdag.likelihood.elimination.families import WeighedRows
from otpdag.likelihood.elimination.family_statistics import Counts, Moments, Rows, joined, weighed
from tests.likelihood.elimination.worlds import make_world, random_naturals

NODES = {"k": m.Categorical(3), "j": m.Categorical(2), "x": m.Normal(), "y": m.Normal(2), "n": m.Poisson()}
EDGES = [("k", "j"), ("k", "y"), ("x", "y"), ("x", "n")]


def at_any_parameters(statistics):
    """Without what is known already of the parameters at which rows were summed up."""
    return statistics if isinstance(statistics, Rows) else replace(statistics, known=None)


def summed_up():
    """Statistics of rows without gaps, taken at some parameters; other parameters, and the rows."""
    rng = np.random.default_rng(6)
    structure, naturals, batch = make_world(NODES, EDGES, rng, rows=50, gaps=0.0)
    families = expectations(naturals, lay_out(structure, batch)).families
    families = {node: tuple(map(at_any_parameters, statistics)) for node, statistics in families.items()}
    return structure, families, random_naturals(structure, rng, 2), batch


@pytest.mark.parametrize(("node", "kind"), [("j", Counts), ("k", Counts), ("x", Moments), ("y", Moments), ("n", Rows)])
def test_heights_are_those_of_the_rows(node, kind):
    structure, families, others, batch = summed_up()
    (statistics,) = families[node]
    assert isinstance(statistics, kind)
    parents = structure.parents(node, batch.values)
    expected = (batch.weight * structure.mechanisms[node].log_prob(others[node], batch.values[node], parents)).sum(-1)
    torch.testing.assert_close(statistics.height(others[node]), expected)


def test_each_coordinate_is_summed_over_the_rows_that_show_it():
    """Rows of a vector with gaps have no joint moments; an M-step reads each coordinate's own."""
    rng = np.random.default_rng(7)
    nodes = {"k": m.Categorical(2), "y": m.Normal(2)}
    structure, naturals, batch = make_world(nodes, [("k", "y")], rng, rows=60, gaps=0.0)
    mask = {**batch.mask, "y": torch.as_tensor(rng.random((1, 60, 2)) > 0.3)}
    batch = replace(batch, mask=mask)
    moments, rows = expectations(naturals, lay_out(structure, batch)).families["y"]
    assert (type(moments), type(rows)) == (Moments, Rows)
    found = (moments.by_coordinate() + rows.by_coordinate(moments.shift))[0]
    state, shift = batch.values["k"][0].argmax(-1).numpy(), moments.shift.numpy()
    for config, cell in np.ndindex(2, 2):
        shown = mask["y"][0, :, cell].numpy() & (state == config)
        lifted = np.column_stack([batch.values["y"][0, shown, cell].numpy() - shift[cell], np.ones(shown.sum())])
        expected = lifted.T @ (batch.weight[0, shown].numpy()[:, None] * lifted)
        np.testing.assert_allclose(found[config, cell], expected, rtol=1e-9, atol=1e-9)


def test_twins_side_by_side_have_the_heights_of_each():
    _, families, others, _ = summed_up()
    (counts,) = families["j"]
    double = Counts(counts.family, 2 * counts.complete, counts.expected)
    both = Counts.side_by_side([counts, double], 2)
    params = {name: value.repeat_interleave(2, 0) for name, value in others["j"].items()}
    expected = torch.stack([counts.height(others["j"]), double.height(others["j"])], 1).flatten()
    torch.testing.assert_close(both.height(params), expected)


def test_what_has_no_weight_counts_nothing_even_where_it_is_ruled_out():
    assert weighed(torch.tensor([[0.0, 2.0]]), torch.tensor([[-torch.inf, -3.0]])).tolist() == [-6.0]


def test_rows_that_show_a_part_of_a_node_stay_apart_from_the_others():
    whole = WeighedRows({"x": torch.ones(1, 2, 1)}, torch.ones(1, 2))
    more = WeighedRows({"x": torch.zeros(3, 1, 1)}, torch.full((3, 1), 2.0))
    part = WeighedRows({"x": torch.ones(1, 1, 1)}, torch.ones(1, 1), torch.zeros(1, 1, 1, dtype=torch.bool))
    first, second = joined([whole, part, more])
    assert second is part
    assert first.weight.tolist() == [[1.0, 1.0, 2.0]] * 3
    assert first.values["x"][..., 0].tolist() == [[1.0, 1.0, 0.0]] * 3
    assert joined([part]) == (part,)
