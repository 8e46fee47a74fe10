"""Rows summed up have the density that rows have one by one, by scipy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.likelihood import row_moments
from otpdag.likelihood.row_moments import Moments, moments_of
from otpdag.structure import pack, unpack
from tests.likelihood.elimination.worlds import linear_moments, make_world, random_edges


def shapes(structure):
    return {key: parameter.shape for key, parameter in structure.parameters().items()}


def point(structure, naturals):
    raw = structure.raw(naturals)
    return pack({key: raw[key] for key in structure.parameters()})


def density(structure, naturals, batch, row, replica):
    mean, covariance, at = linear_moments(structure, naturals, replica)
    shown = [n for n in structure.graph.observed if bool(batch.mask[n][0, row].all())]
    if not shown:
        return 0.0
    places = [at[n].start for n in shown]
    values = [float(batch.values[n][0, row, 0]) for n in shown]
    return multivariate_normal(mean[places], covariance[np.ix_(places, places)]).logpdf(values)


@pytest.mark.parametrize("seed", range(3))
def test_linear_normal_rows_with_gaps_and_hidden_numbers(seed):
    rng = np.random.default_rng(seed)
    names = [f"v{i}" for i in range(4)]
    edges = random_edges(rng, names, 0.8)
    world = make_world({n: m.Normal() for n in names}, edges, rng, rows=25, gaps=0.3, hidden=["v1"], replicas=2)
    structure, naturals, batch = world
    own = structure.naturals(structure.raw(naturals))  # where a hidden root is standard normal
    naturals = {n: {name: value.expand(2, *value.shape[1:]) for name, value in one.items()} for n, one in own.items()}
    moments = moments_of(structure, batch, shapes(structure))
    found = moments.log_likelihood(point(structure, naturals))
    for replica in range(2):
        each = [density(structure, naturals, batch, row, replica) for row in range(batch.rows)]
        assert float(found[replica]) == pytest.approx(batch.weight[0].numpy() @ each, rel=1e-9)


def test_categories_above_numbers_make_groups():
    rng = np.random.default_rng(5)
    nodes = {"k": m.Categorical(3), "x": m.Normal()}
    structure, naturals, batch = make_world(nodes, [("k", "x")], rng, rows=40, gaps=0.0)
    moments = moments_of(structure, batch, shapes(structure))
    parents = {"k": batch.values["k"]}
    mechanisms = structure.mechanisms
    each = mechanisms["k"].log_prob(naturals["k"], batch.values["k"], {})
    each = each + mechanisms["x"].log_prob(naturals["x"], batch.values["x"], parents)
    torch.testing.assert_close(moments.log_likelihood(point(structure, naturals)), (batch.weight * each).sum(-1))
    assert len(moments.unseen) == len(set(batch.values["k"][0].argmax(-1).tolist()))


def test_other_weights_are_other_rows():
    rng = np.random.default_rng(6)
    structure, naturals, batch = make_world({n: m.Normal() for n in "ab"}, [("a", "b")], rng, rows=12, gaps=0.2)
    moments, at = moments_of(structure, batch, shapes(structure)), point(structure, naturals)
    twice = moments.reweighted(torch.tensor([[2.0] * 6 + [0.0] * 6]).double())
    expected = moments_of(structure, batch.take(torch.arange(6)), shapes(structure)).log_likelihood(at)
    torch.testing.assert_close(twice.log_likelihood(at), 2 * expected)


def test_models_and_gaps_that_do_not_add_up_are_left_to_rows():
    rng = np.random.default_rng(7)
    poisson = make_world({"x": m.Normal(), "n": m.Poisson()}, [("x", "n")], rng, rows=10)
    assert moments_of(poisson[0], poisson[2], shapes(poisson[0])) is None
    hidden = make_world({"k": m.Categorical(2), "x": m.Normal()}, [("k", "x")], rng, rows=10, hidden=["k"])
    assert moments_of(hidden[0], hidden[2], shapes(hidden[0])) is None
    many = [f"v{i}" for i in range(math.ceil(math.log2(512)) + 3)]
    scattered = make_world({n: m.Normal() for n in many}, [], rng, rows=3 * 512, gaps=0.5)
    assert moments_of(scattered[0], scattered[2], shapes(scattered[0])) is None


# -- groups and their moments -----------------------------------------------------------------------------------------


def grouped_world(gaps=0.3, rows=60):
    """Numbers, one of them a vector, below two categories, and a leaf that is one and is sometimes missing."""
    rng = np.random.default_rng(8)
    nodes = {"k": m.Categorical(2), "j": m.Categorical(3), "x": m.Normal(), "y": m.MultivariateNormal(2)}
    nodes |= {"z": m.Normal(), "c": m.Categorical(2)}
    edges = [("k", "x"), ("j", "y"), ("k", "y"), ("x", "y"), ("y", "z"), ("j", "c"), ("k", "c")]
    structure, naturals, batch = make_world(nodes, edges, rng, rows=rows, gaps=gaps, replicas=2)
    seen = {name: torch.ones_like(mask) if name in "kj" else mask for name, mask in batch.mask.items()}
    values = dict(batch.values)
    for name, size in (("k", 2), ("j", 3)):
        values[name] = torch.eye(size).double()[torch.as_tensor(rng.integers(0, size, rows))][None]
    return structure, naturals, Batch(values, seen, batch.weight), rng


def plain_density(structure, naturals, batch, row, replica):
    """Of what a row shows: its numbers given the categories, and the leaf where it is seen."""
    at = {name: int(batch.values[name][0, row].argmax()) for name in "kjc"}
    params = {node: {n: v[replica].numpy() for n, v in own.items()} for node, own in naturals.items()}
    cell = at["j"] * 2 + at["k"]
    total = 0.0
    if bool(batch.mask["c"][0, row].all()):
        total += np.log(params["c"]["probs"][cell, at["c"]])
    total += np.log(params["k"]["probs"][0, at["k"]]) + np.log(params["j"]["probs"][0, at["j"]])
    slope = params["y"]["weight"]  # (1, 2)
    onto = params["z"]["weight"]  # (2, 1)
    noise = np.zeros((4, 4))
    noise[0, 0], noise[3, 3] = params["x"]["scale"][at["k"], 0] ** 2, params["z"]["scale"][0, 0] ** 2
    noise[1:3, 1:3] = params["y"]["covariance"][0 if len(params["y"]["covariance"]) == 1 else cell]
    follow = np.zeros((4, 4))
    follow[1:3, 0], follow[3, 1:3] = slope[0], onto[:, 0]
    level = np.concatenate([params["x"]["loc"][at["k"]], params["y"]["loc"][cell], params["z"]["loc"][0]])
    mixing = np.linalg.inv(np.eye(4) - follow)
    mean, covariance = mixing @ level, mixing @ noise @ mixing.T
    seen = np.concatenate([batch.mask[name][0, row].numpy() for name in "xyz"])
    shown = np.concatenate([batch.values[name][0, row].numpy() for name in "xyz"])
    if seen.any():
        total += multivariate_normal(mean[seen], covariance[np.ix_(seen, seen)]).logpdf(shown[seen])
    return total


@pytest.mark.parametrize("entries", [2**18, 7])
def test_groups_by_gaps_and_categories_have_the_density_of_their_rows(entries, monkeypatch):
    monkeypatch.setattr(Moments, "block_entries", entries)
    structure, naturals, batch, rng = grouped_world()
    moments, at = moments_of(structure, batch, shapes(structure)), point(structure, naturals)
    factors = torch.as_tensor(rng.uniform(0.0, 2.0, (2, batch.rows)))
    plain, weighted = moments.log_likelihood(at), moments.reweighted(factors).log_likelihood(at)
    for replica in range(2):
        each = np.array([plain_density(structure, naturals, batch, row, replica) for row in range(batch.rows)])
        assert plain[replica].item() == pytest.approx(batch.weight[0].numpy() @ each, rel=1e-9)
        expected = (batch.weight[0] * factors[replica]).numpy() @ each
        assert weighted[replica].item() == pytest.approx(expected, rel=1e-9)
    assert moments.structural is None  # there are tables


@pytest.mark.parametrize("entries", [2**18, 7])
@pytest.mark.parametrize("alike", [True, False])
def test_moments_of_a_group_are_sums_over_its_rows_about_the_centre(entries, alike, monkeypatch):
    monkeypatch.setattr(Moments, "block_entries", entries)
    structure, _, batch, rng = grouped_world()
    weight = np.tile(rng.uniform(1.0, 2.0, (2, 1)), 60) if alike else rng.uniform(1.0, 2.0, (2, 60))
    own = replace(batch, weight=torch.ones(1, 60).double())
    moments = moments_of(structure, own, shapes(structure)).reweighted(torch.as_tensor(weight))
    numbers = torch.cat([batch.values[name][0] for name in "xyz"], -1).numpy()
    seen = torch.cat([batch.mask[name][0] for name in "xyz"], -1).numpy()
    assert moments.cells == (("x", 0), ("y", 0), ("y", 1), ("z", 0))
    centre = np.array([numbers[seen[:, c], c].mean() for c in range(4)])
    np.testing.assert_allclose(moments.shift, centre)
    labels = [
        (*batch.values["k"][0, row].tolist(), *batch.values["j"][0, row].tolist(), *seen[row]) for row in range(60)
    ]
    group = moments.group.numpy()
    for number in range(len(moments.unseen)):
        rows = np.flatnonzero(group == number)
        assert {labels[row] for row in rows} == {labels[rows[0]]}
        assert moments.unseen[number].tolist() == (~seen[rows[0]]).tolist()
        columns = np.column_stack([np.where(seen[rows], numbers[rows] - centre, 0.0), np.ones(len(rows))])
        for replica in range(2):
            expected = (columns * weight[replica, rows, None]).T @ columns
            np.testing.assert_allclose(moments.second[replica, number], expected, atol=1e-10)
    assert len(set(labels)) == len(moments.unseen) > 12


def test_a_group_is_known_by_its_first_row():
    _, _, batch, _ = grouped_world()
    group, first = row_moments._groups(batch, ["k", "j"], ["x", "y", "z"])
    for number, row in enumerate(first.tolist()):
        assert row == int(torch.nonzero(group == number)[0])
    split = row_moments._split_by(group, len(first))
    assert [rows.tolist() for rows in split] == [torch.nonzero(group == n)[:, 0].tolist() for n in range(len(first))]
    whole = replace(batch, mask={name: torch.ones_like(mask) for name, mask in batch.mask.items()})
    assert row_moments._groups(whole, [], ["x", "y"])[0].tolist() == [0] * 60
    assert row_moments._groups(whole, [], ["x", "y"])[1].tolist() == [0]


@pytest.mark.parametrize("more", [0, 1])
def test_so_many_groups_are_summed_up_as_rows_pay_for(more):
    """Four columns' worth of rows for each group: of one number and a one, half as many groups again as rows."""
    rng = np.random.default_rng(1)
    nodes = {"k": m.Categorical(3), "x": m.Normal(), "y": m.Normal(), "z": m.Normal(), "v": m.Normal(), "w": m.Normal()}
    structure, _, batch = make_world(nodes, [("k", "x")], rng, rows=3, gaps=0.0)
    values = dict(batch.values) | {"k": torch.eye(3).double()[torch.tensor([0, 1, 1 + more])][None]}
    # 4 * 3 rows // (5 columns + 1) = 2 groups
    found = moments_of(structure, replace(batch, values=values), shapes(structure))
    assert (found is None) == bool(more)


def one_column(values, seen=None):
    rows = len(values)
    structure = make_world({"x": m.Normal()}, [], np.random.default_rng(0), rows=2)[0]
    seen = torch.ones(1, rows, 1, dtype=torch.bool) if seen is None else torch.as_tensor(seen).reshape(1, rows, 1)
    column = torch.as_tensor(np.asarray(values, dtype=float)).reshape(1, rows, 1)
    return structure, Batch({"x": column}, {"x": seen}, torch.ones(1, rows).double())


@pytest.mark.parametrize(
    ("deviation", "summed"), [(2e-60, True), (5e-61, False), (5e59, True), (2e60, False), (0.0, True), (1.0, True)]
)
def test_columns_whose_fourth_powers_lose_digits_are_left_to_rows(deviation, summed):
    structure, batch = one_column([deviation, -deviation, deviation, -deviation])
    assert (moments_of(structure, batch, shapes(structure)) is not None) == summed
    structure, batch = one_column([7.0, 0.0], [True, False])  # a single value has no deviation
    assert moments_of(structure, batch, shapes(structure)) is not None


def test_columns_are_centred_at_some_rows_all_over_or_at_what_is_seen():
    even = np.arange(2500) % 2 == 0
    structure, batch = one_column(np.where(even, 3.0, 9.0))

    def centre(node="x", seen=None):
        rows = batch if seen is None else one_column(np.where(even, 3.0, 9.0), seen)[1]
        return row_moments._centre(structure, rows, node, 0).item()

    assert centre() == 3.0  # every second row
    assert centre(seen=~even) == 9.0
    assert centre(seen=even & (np.arange(2500) < 10)) == 3.0
    assert centre(seen=np.zeros(2500, dtype=bool)) == 0.0
    assert centre("hidden") == 0.0
    assert row_moments._seen(batch, "hidden", 0).tolist() == [False] * 2500


def test_columns_with_units_are_centred_at_their_shift():
    """Which no order of rows changes."""
    structure, batch = one_column(np.arange(2500.0) ** 2)
    scaled = structure.scaled_to(batch.values, {"x": batch.weight})
    shift = scaled.mechanisms["x"].predictor.units.out_shift[0]
    assert row_moments._centre(scaled, batch, "x", 0).item() == pytest.approx(float(shift))


def test_starts_are_guessed_where_only_hidden_numbers_are_missing():
    rng = np.random.default_rng(2)
    names = ["u", "a", "b", "c"]
    edges = [("u", name) for name in "abc"]
    structure, _, batch = make_world({n: m.Normal() for n in names}, edges, rng, rows=80, gaps=0.0, hidden=["u"])
    moments = moments_of(structure, batch, shapes(structure))
    found = moments.guessed(structure.graph, 0, first=True)
    assert found.shape == (1, sum(math.prod(shape) for shape in shapes(structure).values()))
    assert torch.equal(found, moments.guessed(structure.graph, 0, first=True))
    # what is seen has the mean and nearly the variance of the data where a start is guessed well
    naturals = structure.naturals(unpack(found, shapes(structure)))
    mean, covariance, at = linear_moments(structure, naturals)
    weight = batch.weight[0].numpy() / batch.weight[0].sum().item()
    for name in "abc":
        column = batch.values[name][0, :, 0].numpy()
        centre = weight @ column
        assert mean[at[name]][0] == pytest.approx(centre, rel=1e-6)
        assert covariance[at[name], at[name]][0, 0] == pytest.approx(weight @ (column - centre) ** 2, rel=0.2)
    gaps = make_world({n: m.Normal() for n in names}, edges, rng, rows=80, gaps=0.2, hidden=["u"])
    assert moments_of(gaps[0], gaps[2], shapes(gaps[0])).guessed(gaps[0].graph, 0, first=True) is None
    twice = moments.reweighted(torch.ones(2, 80).double())
    assert twice.guessed(structure.graph, 0, first=True) is None
    tables, _, with_tables, _ = grouped_world(gaps=0.0)
    assert moments_of(tables, with_tables, shapes(tables)).guessed(tables.graph, 0, first=True) is None
