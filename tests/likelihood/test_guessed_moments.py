"""Starts from moments: principal components and regressions, against numpy on the rows."""

import numpy as np
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.likelihood.elimination.families import describe_families
from otpdag.likelihood.row_moments import can_be_guessed, completed_moments, regressed_entries
from otpdag.likelihood.starts import NOISE
from otpdag.structure import Structure


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


def test_regressions_by_moments_are_least_squares():
    table = rows_of("abc", seed=2) + np.array([1.0, -2.0, 5.0])
    structure = Structure.bind(otp.Graph([("a", "c"), ("b", "c")]), {name: m.Normal() for name in "abc"})
    families = [family for family in describe_families(structure) if family.node == "c"]
    entries = regressed_entries(families, [[2, 0, 1]], table.mean(0), np.cov(table.T, bias=True))
    design = np.column_stack([table[:, :2], np.ones(len(table))])
    line, residual, *_ = np.linalg.lstsq(design, table[:, 2], rcond=None)
    names = list(structure.mechanisms["c"].declared())
    found = dict(
        zip(names, np.split(entries, np.cumsum([2 if name == "weight" else 1 for name in names])[:-1]), strict=True)
    )
    np.testing.assert_allclose(np.append(found["weight"], found["loc"]), line, atol=1e-8)
    assert found["scale"][0] == pytest.approx(np.sqrt(residual[0] / len(table)))


def test_only_plain_normal_nodes_are_guessed():
    def families(**nodes):
        return describe_families(Structure.bind(otp.Graph([("a", "b")]), nodes))

    assert can_be_guessed(families(a=m.Normal(), b=m.Normal()))
    assert not can_be_guessed(families(a=m.Normal(), b=m.StudentT()))
    assert not can_be_guessed(families(a=m.Categorical(2), b=m.Normal()))


ROWS = 50


def families_of(edges, nodes):
    return describe_families(Structure.bind(otp.Graph(edges), nodes))


def entries_of(family, rows, places):
    """Level, slopes and scales of one family from the mean and covariance of complete rows."""
    covariance = np.cov(rows.T, bias=True)
    return regressed_entries([family], [places], rows.mean(0), np.atleast_2d(covariance))


def table(rng):
    a, b = rng.normal(size=ROWS), 3.0 + 2.0 * rng.normal(size=ROWS)
    y = np.stack([1.0 + a - 0.5 * b, -2.0 + 0.3 * b], 1) + rng.normal(size=(ROWS, 2)) * [0.5, 2.0]
    return np.column_stack([y, a, b])


def residual_of(rows, slopes, loc):
    return np.sqrt(((rows[:, :2] - loc - rows[:, 2:] @ slopes) ** 2).mean(0))


EDGES = [("a", "y"), ("b", "y")]


@pytest.mark.parametrize(
    "given", [{}, {"loc": [1.0, -1.0]}, {"weight": [[1.0, 0.0], [-0.5, 0.3]]}, {"isotropic": True}]
)
def test_families_are_regressed_on_their_parents(given):
    rows = table(np.random.default_rng(0))
    node = m.Normal(2, floor=0.0, **given)
    *_, family = families_of(EDGES, {"a": m.Normal(), "b": m.Normal(), "y": node})
    assert family.node == "y"
    found = entries_of(family, rows, [0, 1, 2, 3])
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
    scale = np.full(2, np.sqrt((scale**2).mean())) if "isotropic" in given else scale
    np.testing.assert_allclose(found, np.concatenate([loc, slopes.ravel(), scale]), rtol=1e-7)


def test_scales_are_not_below_a_thousandth_of_the_columns_spread():
    rng = np.random.default_rng(1)
    a = rng.normal(size=ROWS)
    rows = np.column_stack([3.0 * a, a])
    _, family = families_of([("a", "y")], {"a": m.Normal(), "y": m.Normal()})
    loc, slope, scale = entries_of(family, rows, [0, 1])
    assert slope == pytest.approx(3.0)
    assert loc == pytest.approx(0.0, abs=1e-9)
    assert scale == pytest.approx(1e-3 * rows[:, 0].std(), rel=1e-6)


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
