"""Starts from moments: principal components and regressions, against numpy on the rows."""

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine.fit import recognise
from otpdag.likelihood.elimination.families import describe_families
from otpdag.likelihood.row_moments import can_be_guessed, completed_moments
from otpdag.likelihood.starts import NOISE
from otpdag.spaces import Real
from otpdag.structure import Structure, unpack
from tests.mechanisms.plain import regressed


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
