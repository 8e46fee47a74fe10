"""Starts from moments: principal components and regressions, against numpy on the rows."""

import numpy as np
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward.elimination.families import describe_families
from otpdag.backward.guessed_moments import can_be_guessed, completed_moments, regressed_entries
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
