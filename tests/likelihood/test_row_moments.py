"""Moments of rows: likelihoods against plain rows, and starts against numpy on the rows."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import multivariate_normal

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.engine.fit import recognise
from otpdag.likelihood import row_moments
from otpdag.likelihood.elimination.families import describe_families
from otpdag.likelihood.row_moments import Moments, can_be_guessed, completed_moments, moments_of
from otpdag.likelihood.starts import NOISE
from otpdag.spaces import Real
from otpdag.structure import Structure, pack, unpack
from tests.likelihood.elimination.worlds import linear_moments, make_world, random_edges
from tests.mechanisms.plain import regressed


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


def rows_of(names, seed=0, rows=300):
    rng = np.random.default_rng(seed)
    u = rng.normal(size=rows)
    table = np.column_stack([(i + 1) * u + rng.normal(size=rows) for i in range(len(names))])
    return table - table.mean(0)


def second(table, hidden):
    """Second moments of columns and a one, with zeros for as many hidden numbers before them."""
    lifted = np.column_stack([np.zeros((len(table), hidden)), table, np.ones(len(table))])
    return lifted.T @ lifted


def test_a_hidden_number_is_the_leading_component_of_its_children():
    table = rows_of("abc")
    graph = otp.Graph([("u", name) for name in "abc"], hidden=["u"])
    cells = [(name, 0) for name in ("u", *"abc")]
    mean, covariance = completed_moments(graph, cells, second(table, 1), np.random.default_rng(0), first=True)
    standard = table / table.std(0)
    _, _, axes = np.linalg.svd(standard, full_matrices=False)
    score = standard @ axes[0]
    score = score / score.std()
    np.testing.assert_allclose(mean, 0.0, atol=1e-12)
    np.testing.assert_allclose(covariance[1:, 1:], np.cov(table.T, bias=True), atol=1e-10)
    np.testing.assert_allclose(np.abs(covariance[0, 1:]), np.abs(score @ table / len(table)), atol=1e-8)
    assert covariance[0, 0] == pytest.approx(1.0)


def test_restarts_differ_and_have_noise():
    table = rows_of("abc")
    graph = otp.Graph([("u", name) for name in "abc"], hidden=["u"])
    cells = [(name, 0) for name in ("u", *"abc")]
    made = [completed_moments(graph, cells, second(table, 1), np.random.default_rng(s), first=False)[1] for s in (1, 2)]
    assert not np.allclose(made[0][0], made[1][0])
    assert made[0][0, 0] > 1.0


def test_only_plain_normal_nodes_are_guessed():
    def families(**nodes):
        return describe_families(Structure.bind(otp.Graph([("a", "b")]), nodes))

    assert can_be_guessed(families(a=m.Normal(), b=m.Normal()))
    assert not can_be_guessed(families(a=m.Normal(), b=m.StudentT()))
    assert not can_be_guessed(families(a=m.Categorical(2), b=m.Normal()))


ROWS = 50


def families_of(edges, nodes):
    return describe_families(Structure.bind(otp.Graph(edges), nodes))


def entries_of(node, rows, parents):
    """Level, slopes and scales of one node of the first columns, from the moments of complete rows."""
    bound, dim = node.setup(m.Family("y", tuple((name, Real()) for name in parents))), node.dim
    bound = bound.scaled_to(torch.as_tensor(rows[:, :dim]), {}, torch.ones(len(rows))) if not parents else bound
    given = bound.natural({name: torch.zeros(1, *p.shape).double() for name, p in bound.declared().items()})
    found = regressed(bound, given, rows[:, :dim], rows[:, dim:].T, np.ones(len(rows)), least=1e-3)
    return {name: value[0].numpy() for name, value in found.items()}


def table(rng):
    a, b = rng.normal(size=ROWS), 3.0 + 2.0 * rng.normal(size=ROWS)
    y = np.stack([1.0 + a - 0.5 * b, -2.0 + 0.3 * b], 1) + rng.normal(size=(ROWS, 2)) * [0.5, 2.0]
    return np.column_stack([y, a, b])


def residual_of(rows, slopes, loc):
    return np.sqrt(((rows[:, :2] - loc - rows[:, 2:] @ slopes) ** 2).mean(0))


@pytest.mark.parametrize(
    "given", [{}, {"loc": [1.0, -1.0]}, {"weight": [[1.0, 0.0], [-0.5, 0.3]]}, {"isotropic": True}]
)
def test_families_are_regressed_on_their_parents(given):
    rows = table(np.random.default_rng(0))
    found = entries_of(m.Normal(2, floor=0.0, **given), rows, "ab")
    design, y = np.column_stack([np.ones(ROWS), rows[:, 2:]]), rows[:, :2]
    if "loc" in given:
        loc = np.array(given["loc"])
        slopes = np.linalg.lstsq(rows[:, 2:], y - loc, rcond=None)[0]
    elif "weight" in given:
        slopes = np.array(given["weight"])
        loc = (y - rows[:, 2:] @ slopes).mean(0)
    else:
        line = np.linalg.lstsq(design, y, rcond=None)[0]
        loc, slopes = line[0], line[1:]
    scale = residual_of(rows, slopes, loc)
    scale = np.sqrt((scale**2).mean(keepdims=True)) if "isotropic" in given else scale
    np.testing.assert_allclose(found["loc"][0], loc, rtol=1e-7)
    np.testing.assert_allclose(found["weight"], slopes, rtol=1e-7)
    np.testing.assert_allclose(found["scale"][0], scale, rtol=1e-7)


def test_scales_are_not_below_a_thousandth_of_the_columns_spread():
    a = np.random.default_rng(1).normal(size=ROWS)
    frame = pd.DataFrame({"a": a, "y": 3.0 * a})
    model = otp.Model(otp.Graph([("a", "y")]), {"a": m.Normal(), "y": m.Normal()})
    kind = recognise(model, frame, weights=None, device="cpu", every_row=True)
    layout = kind.lay_out(otp.entropic(), 0)
    start = kind.starts(layout, kind.problem(layout, otp.entropic(), 0), 0, [0])
    found = layout.structure.naturals(unpack(start, layout.shapes))["y"]
    assert found["weight"].item() == pytest.approx(3.0)
    assert found["loc"].item() == pytest.approx(0.0, abs=1e-9)
    assert found["scale"].item() == pytest.approx(1e-3 * frame["y"].std(ddof=0), rel=1e-4)


def second_of(rows, hidden):
    """Second moments of the numbers and a one, zero where they are hidden."""
    lifted = np.column_stack([np.zeros((len(rows), hidden)), rows, np.ones(len(rows))])
    return lifted.T @ lifted


def factor_table(rng):
    u = rng.normal(size=(200, 1))
    return 5.0 + u @ np.array([[2.0, -1.0, 0.5, 1.0]]) + rng.normal(size=(200, 4))


@pytest.mark.parametrize("dim", [1, 2])
def test_a_hidden_number_is_first_the_leading_component_of_what_is_around_it(dim):
    rows = factor_table(np.random.default_rng(2))
    graph = otp.Graph([("u", name) for name in "abcd"], hidden=["u"])
    cells = [*(("u", i) for i in range(dim)), *((name, 0) for name in "abcd")]
    mean, covariance = completed_moments(graph, cells, second_of(rows, dim), np.random.default_rng(0), first=True)
    np.testing.assert_allclose(mean, [*np.zeros(dim), *rows.mean(0)])
    standard = (rows - rows.mean(0)) / rows.std(0)
    _, _, directions = np.linalg.svd(standard, full_matrices=False)
    scores = standard @ directions[:dim].T
    scores /= scores.std(0)
    expected = np.cov(np.column_stack([scores, rows]).T, bias=True)
    sign = np.concatenate([np.sign(covariance[:dim, dim] * expected[:dim, dim]), np.ones(4)])
    np.testing.assert_allclose(covariance, expected * np.outer(sign, sign), atol=1e-9)


def test_restarts_turn_and_rescale_and_add_noise():
    rows = factor_table(np.random.default_rng(3))
    graph = otp.Graph([("u", name) for name in "abcd"], hidden=["u"])
    cells = [("u", 0), ("u", 1), *((name, 0) for name in "abcd")]
    second = second_of(rows, 2)
    first = completed_moments(graph, cells, second, np.random.default_rng(0), first=True)[1]
    found = [completed_moments(graph, cells, second, np.random.default_rng(seed), first=False)[1] for seed in (1, 1, 2)]
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found[0] - found[2]).max() > 0.1
    for covariance in found:
        np.testing.assert_allclose(covariance[2:, 2:], first[2:, 2:])  # what is seen stays
        np.testing.assert_allclose(np.trace(covariance[:2, :2]), 2 * (1 + NOISE**2), rtol=1e-9)


def test_numbers_below_a_hidden_one_are_guessed_before_it():
    """Of a hidden number above another, what it is guessed from is the guess below."""
    rows = factor_table(np.random.default_rng(4))[:, :3]
    graph = otp.Graph([("v", "u"), *(("u", name) for name in "abc")], hidden=["v", "u"])
    cells = [("v", 0), ("u", 0), *((name, 0) for name in "abc")]
    _, covariance = completed_moments(graph, cells, second_of(rows, 2), np.random.default_rng(0), first=True)
    assert covariance[0, 0] == pytest.approx(1.0)
    assert abs(covariance[0, 1]) == pytest.approx(1.0)
    np.testing.assert_allclose(np.abs(covariance[0, 2:]), np.abs(covariance[1, 2:]), atol=1e-9)


def test_only_plain_normal_nodes_are_guessed_from_moments():
    plain = {"a": m.Normal(), "y": m.Normal()}
    assert can_be_guessed(families_of([("a", "y")], plain))
    assert can_be_guessed(families_of([("a", "y")], plain | {"y": m.Normal(scale=2.0)}))  # what is given is not learned
    assert not can_be_guessed(families_of([("a", "y")], plain | {"y": m.Normal(loc=otp.start(1.0))}))
    assert not can_be_guessed(families_of([("a", "y")], plain | {"a": m.Categorical(2)}))
    assert not can_be_guessed(families_of([("a", "y")], plain | {"y": m.MultivariateNormal(2)}))
