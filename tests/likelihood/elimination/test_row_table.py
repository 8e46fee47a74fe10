"""A table as the backward map reads it, against loops over its cells."""

import numpy as np
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.likelihood.elimination.blocks import SMALLEST_WINDOW, TableView
from otpdag.likelihood.elimination.families import describe_families
from otpdag.structure import Structure
from tests.likelihood.elimination.worlds import make_world

NODES = {"k": m.Categorical(3), "j": m.Categorical(2), "v": m.Normal(2), "x": m.Normal(), "n": m.Poisson()}
EDGES = [("k", "j"), ("k", "v"), ("v", "x"), ("x", "n")]


def view():
    structure, _, batch = make_world(NODES, EDGES, np.random.default_rng(2), rows=30)
    families = describe_families(structure)
    return TableView(families, batch), families, batch


def test_what_is_seen_and_in_which_state():
    table, families, batch = view()
    for family in families:
        for row in range(batch.rows):
            cells = batch.mask[family.node][0, row].tolist()
            assert table.seen[row, family.place] == all(cells)
            assert table.partly[row, family.place] == (any(cells) and not all(cells))
            known = family.categories[-1] and all(cells)
            expected = batch.values[family.node][0, row].tolist().index(1.0) if known else 0
            assert table.codes[row, family.place] == expected
    vector = next(f.place for f in families if f.node == "v")
    row = int(np.flatnonzero(table.partly[:, vector])[0])
    assert len(table.missing(row, vector)) == 1


def test_numbers_stand_after_a_zero_and_a_one_and_are_shifted_by_what_is_seen():
    table, families, batch = view()
    np.testing.assert_array_equal(table.numbers[:, :2], [[0.0, 1.0]] * batch.rows)
    place = {family.node: family.place for family in families}
    for node, cell in (("v", 0), ("v", 1), ("x", 0)):
        column = table.numbers[:, table.column_of[place[node], cell]]
        shown = batch.mask[node][0, :, cell].numpy()
        np.testing.assert_array_equal(column, np.where(shown, batch.values[node][0, :, cell].numpy(), 0.0))
    linear = next(f for f in families if f.node == "x")
    shift = []
    for number, cell in linear.columns:
        seen = table.seen[:, number]
        node = families[number].node
        shift.append(batch.values[node][0, :, cell].numpy()[seen].mean())
    np.testing.assert_allclose(table.shifts[linear.place].numpy(), [*shift, 0.0])


def test_joint_states_count_with_the_last_fastest():
    table, families, batch = view()
    place = {family.node: family.place for family in families}
    rows = np.flatnonzero(table.seen[:, place["k"]] & table.seen[:, place["j"]])
    k, j = (batch.values[n][0].numpy()[rows].argmax(-1) for n in "kj")
    np.testing.assert_array_equal(table.code(rows, [(place["k"], 3), (place["j"], 2)]), 2 * k + j)


def test_small_counts_need_fewer_points():
    graph = otp.Graph([], nodes=["n"])
    structure = Structure.bind(graph, {"n": m.Poisson()})
    for largest, points in ((4.0, 20), (10.0, 40)):
        assert (1.5 * largest + SMALLEST_WINDOW <= 20) == (points == 20)
        values = torch.tensor([[[0.0], [largest]]]).double()
        batch = otp.data.Batch({"n": values}, {"n": values >= 0}, torch.ones(1, 2).double())
        (family,) = describe_families(structure)
        assert TableView([family], batch).count_points(family, 40) == points
