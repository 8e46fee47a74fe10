"""Expected statistics of families, against all joint states and the rows themselves."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from otpdag import mechanisms as m
from otpdag.likelihood.elimination.evidence import (
    Counts,
    Moments,
    Rows,
    complete_sums,
    expectations,
    weighed,
)
from otpdag.likelihood.elimination.layout import lay_out
from tests.likelihood.elimination.worlds import CATEGORY, linear_moments, make_world, random_edges, random_naturals

# -- sums over rows by family: of those that show it against numpy, of all others against posteriors by ---------------


def test_rows_that_show_a_family_add_up_to_counts_and_moments():
    rng = np.random.default_rng(4)
    nodes = {"k": m.Categorical(3), "j": m.Categorical(2), "x": m.Normal(), "y": m.Normal()}
    structure, _, batch = make_world(nodes, [("k", "j"), ("k", "y"), ("x", "y")], rng, rows=60, gaps=0.2)
    layout = lay_out(structure, batch)
    sums, weight = complete_sums(layout, batch.weight), batch.weight[0].numpy()
    place = {family.node: family for family in layout.families}
    seen = {n: batch.mask[n][0].all(-1).numpy() for n in nodes}
    k, j = (batch.values[n][0].numpy().argmax(-1) for n in "kj")
    both = seen["k"] & seen["j"]
    counts = np.zeros((3, 2))
    np.add.at(counts, (k[both], j[both]), weight[both])
    np.testing.assert_allclose(sums[place["j"].place][0].numpy(), counts.ravel())
    family = place["y"]
    shift = layout.table.shifts[family.place].numpy()
    columns = [batch.values[layout.families[number].node][0, :, cell].numpy() for number, cell in family.columns]
    lifted = np.column_stack([*columns, np.ones(batch.rows)]) - shift
    for state in range(3):
        rows = seen["k"] & seen["x"] & seen["y"] & (k == state)
        second = (weight[rows, None, None] * lifted[rows, :, None] * lifted[rows, None, :]).sum(0)
        np.testing.assert_allclose(sums[family.place][0, state].numpy(), second, atol=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_expected_counts_are_those_of_all_joint_states(seed):
    """A node that nothing seen depends on is left out of a row: it tells nothing."""
    rng = np.random.default_rng(seed)
    names = [f"v{i}" for i in range(4)]
    nodes = {name: CATEGORY[rng.integers(3)]() for name in names}
    structure, naturals, batch = make_world(nodes, random_edges(rng, names, 0.7), rng, rows=10)
    expected = {
        n: np.zeros([structure.mechanisms[p].space.width for p in (*structure.graph.parents(n), n)]) for n in names
    }
    for row in range(batch.rows):
        states = [range(structure.mechanisms[n].space.width) for n in structure.graph.order]
        shown = {n: int(batch.values[n][0, row].argmax()) for n in names if bool(batch.mask[n][0, row].all())}
        told = [n for n in names if n in shown or shown.keys() & set(structure.graph.observed_descendants(n))]
        joint = {}
        for one in itertools.product(*states):
            at = dict(zip(structure.graph.order, one, strict=True))
            if any(at[n] != state for n, state in shown.items()):
                continue
            probs = [
                naturals[n]["probs"][0]
                .numpy()
                .reshape(expected[n].shape)[(*(at[p] for p in structure.graph.parents(n)), at[n])]
                for n in names
            ]
            joint[one] = np.prod(probs)
        for one, value in joint.items():
            at = dict(zip(structure.graph.order, one, strict=True))
            for n in told:
                share = float(batch.weight[0, row]) * value / sum(joint.values())
                expected[n][(*(at[p] for p in structure.graph.parents(n)), at[n])] += share
    families = expectations(naturals, lay_out(structure, batch)).families
    for n in names:
        (counts,) = families[n]
        np.testing.assert_allclose(counts.table().numpy().ravel(), expected[n].ravel(), atol=1e-10)


def test_expected_moments_are_those_of_the_conditional_normal():
    rng = np.random.default_rng(8)
    structure, naturals, batch = make_world({n: m.Normal() for n in "ab"}, [("a", "b")], rng, rows=20, gaps=0.5)
    mean, covariance, at = linear_moments(structure, naturals)
    order = [at[n].start for n in "ba"]  # the node goes before its parents
    expected = np.zeros((3, 3))
    for row in range(batch.rows):
        shown = [i for i, n in enumerate("ba") if bool(batch.mask[n][0, row].all())]
        centre, spread = mean[order], covariance[np.ix_(order, order)]
        values = np.array([float(batch.values[n][0, row, 0]) for n in "ba"])
        if 0 not in shown:
            continue  # a node that nothing seen depends on is left out of the row
        gain = spread[:, shown] @ np.linalg.inv(spread[np.ix_(shown, shown)])
        middle = np.append(centre + gain @ (values - centre)[shown], 1.0)
        rest = np.zeros((3, 3))
        rest[:2, :2] = spread - gain @ spread[shown]
        expected += float(batch.weight[0, row]) * (np.outer(middle, middle) + rest)
    (moments,) = expectations(naturals, lay_out(structure, batch)).families["b"]
    found = (moments.complete + moments.expected)[0, 0].numpy()
    shift = moments.shift.numpy()
    back = np.eye(3) + np.outer(shift, [0, 0, 1])
    np.testing.assert_allclose(back @ found @ back.T, expected, atol=1e-8)


# -- what rows say of a family, summed up: the same log-density as the rows themselves --------------------------------


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


def test_what_has_no_weight_counts_nothing_even_where_it_is_ruled_out():
    assert weighed(torch.tensor([[0.0, 2.0]]), torch.tensor([[-torch.inf, -3.0]])).tolist() == [-6.0]
