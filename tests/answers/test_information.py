"""What data tell: information against second derivatives and closed forms, flat directions, numbers of parameters."""

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag import problem as problems
from otpdag.answers import notes
from otpdag.answers.notes import flat_directions, point_of, row_information
from otpdag.answers.standard_errors import Information, information_at, likelihood_of_rows
from otpdag.data import Schema, encode
from otpdag.errors import ModelError
from otpdag.problem import curvature
from otpdag.structure import pack


def test_differences_of_gradients_are_second_derivatives():
    def loss(x):
        return x[..., 0] ** 4 + x[..., 0] * x[..., 1] + torch.exp(x[..., 2]) * x[..., 1] ** 2

    point = torch.tensor([[0.7, -1.2, 0.3]]).double()
    expected = torch.autograd.functional.hessian(loss, point[0])
    torch.testing.assert_close(curvature(loss, point), expected, rtol=1e-6, atol=1e-6)


def test_the_covariance_is_the_inverse_where_the_data_tell_something():
    root = torch.as_tensor(np.random.default_rng(0).normal(size=(4, 3)))
    whole = Information(root.T @ root)
    torch.testing.assert_close(whole.covariance, torch.linalg.inv(root.T @ root))
    assert whole.flat.shape == (3, 0)
    assert whole.blur == 0.0


@pytest.mark.parametrize(
    ("curvatures", "is_maximum"),
    [([], True), ([3.0], True), ([-3.0], False), ([0.5, 1, 2], True), ([-0.5, 1, 2], False)],
)
def test_a_likelihood_that_rises_somewhere_is_not_at_its_maximum(curvatures, is_maximum):
    turned = np.linalg.qr(np.random.default_rng(1).normal(size=(len(curvatures), len(curvatures))))[0]
    matrix = torch.as_tensor(turned * np.array(curvatures, dtype=float) @ turned.T)
    assert Information(matrix).is_of_maximum is is_maximum


def test_directions_that_nothing_is_told_of_have_no_variance():
    flat = torch.tensor([[1.0], [1.0], [0.0]]).double() / 2**0.5
    known = Information(torch.diag(torch.tensor([2.0, 3.0, 4.0]).double())).without(flat)
    torch.testing.assert_close(known.flat.abs(), flat.abs(), atol=1e-6, rtol=0)
    torch.testing.assert_close(known.covariance @ flat, torch.zeros(3, 1).double(), atol=1e-8, rtol=0)
    torch.testing.assert_close(known.covariance, torch.linalg.pinv(known.matrix), atol=1e-8, rtol=0)


def test_a_likelihood_without_curvature_is_refused():
    problem, point = solved([], {"x": m.Normal()}, pd.DataFrame({"x": np.random.default_rng(0).normal(size=30)}))
    with pytest.raises(ModelError, match="no finite second derivative"):
        information_at(problem, point * torch.nan)


def test_rows_of_a_normal_column_tell_of_mean_and_scale_what_fisher_says():
    table = pd.DataFrame({"x": np.random.default_rng(1).normal(3.0, 2.0, 80)})
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    otp.fit(model, table)
    batch = encode(table, Schema.of(model.spaces, model.graph, table), hidden=[])
    point = point_of(model.fitted, model.fitted.structure.parameters())
    found = information_at(likelihood_of_rows(model.fitted, batch), point).covariance
    structure, spread = model.fitted.structure, table["x"].std(ddof=0)
    loc, scale = (list(structure.parameters()).index(structure.keys["x"][name]) for name in ("loc", "scale"))
    unit = float(structure.parameters()[structure.keys["x"]["loc"]].unit.flatten()[0])
    assert float(found[loc, loc]) * unit**2 == pytest.approx(spread**2 / 80, rel=1e-4)
    assert float(found[scale, scale]) == pytest.approx(1 / (2 * 80), rel=1e-2)  # of a logarithm


def solved(edges, mechanisms, table, hidden=()):
    model = otp.Model(otp.Graph(edges, hidden=hidden, nodes=list(mechanisms)), mechanisms)
    result = otp.fit(model, table, seed=0)
    raw = result.problem.structure.raw(model.fitted.naturals)
    return result.problem, pack({key: raw[key] for key in result.problem.shapes})


@pytest.mark.parametrize(("gaps", "most"), [(0.0, 3), (0.04, 13)])
def test_second_derivatives_of_a_chain_are_those_of_all_coordinates_one_by_one(gaps, most, monkeypatch):
    rng = np.random.default_rng(3)
    table = pd.DataFrame({f"x{at}": rng.poisson(3.0, 300) if at % 3 == 2 else rng.normal(size=300) for at in range(6)})
    table = table.mask(rng.random(table.shape) < gaps)
    nodes = {name: m.Poisson() if name in ("x2", "x5") else m.Normal() for name in table}
    problem, point = solved([(f"x{at}", f"x{at + 1}") for at in range(5)], nodes, table)
    known = 300 * curvature(problem.laid_out_for(point).loss, point)
    moves, differences = [], problems.differences
    asked = lambda evaluate, at, moved, **how: moves.append(len(moved)) or differences(evaluate, at, moved, **how)  # noqa: E731
    monkeypatch.setattr(problems, "differences", asked)
    torch.testing.assert_close(information_at(problem, point).matrix, known, rtol=1e-5, atol=1e-4)
    assert moves[0] <= most < point.shape[1]


def test_information_of_a_normal_column_is_the_textbooks():
    column = np.random.default_rng(0).normal(3.0, 2.0, 1500)
    problem, point = solved([], {"x": m.Normal()}, pd.DataFrame({"x": column}))
    # in units of the column's spread, and of the logarithm of the scale: 1 and 2
    found = row_information(problem, point)
    torch.testing.assert_close(found, torch.diag(torch.tensor([1.0, 2.0]).double()), atol=0.2, rtol=0)
    # groups of rows give the same up to their noise, and rows that are few
    grouped = row_information(problem, point, rows=1000, groups=300)
    torch.testing.assert_close(grouped, found, atol=0.4, rtol=0)


def test_a_rotation_of_two_factors_is_one_flat_direction_and_one_factor_has_none(monkeypatch):
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(500, 2)) @ rng.normal(size=(2, 5)) + 0.6 * rng.normal(size=(500, 5)))
    table.columns = [f"x{i}" for i in range(5)]
    seen = {name: m.Normal() for name in table}
    edges = [(factor, name) for factor in "fg" for name in table]
    problem, point = solved(edges, {"f": m.Normal(), "g": m.Normal(), **seen}, table, ["f", "g"])
    directions = flat_directions(problem, point)
    assert len(directions) == 1
    assert {name for _, name, _ in directions[0].names} == {"weight"}
    assert flat_directions(*solved([("f", name) for name in table], {"f": m.Normal(), **seen}, table, ["f"])) == []
    monkeypatch.setattr(notes, "ENTRIES", 1)  # replicas one at a time find the same
    assert [one.names for one in flat_directions(problem, point)] == [one.names for one in directions]


def test_levels_of_a_softmax_are_no_flat_direction():
    rng = np.random.default_rng(0)
    x = rng.normal(size=600)
    table = pd.DataFrame({"x": x, "k": (x + rng.logistic(size=600) > 0).astype(int) + (rng.random(600) < 0.3)})
    problem, point = solved([("x", "k")], {"x": m.Normal(), "k": m.Categorical(3)}, table)
    assert flat_directions(problem, point) == []
    assert bool((torch.linalg.eigvalsh(row_information(problem, point, rows=300))[:2].abs() < 1e-9).all())


@pytest.mark.parametrize(
    ("edges", "mechanisms", "hidden", "expected"),
    [
        ([("z", "x")], {"z": m.Categorical(3), "x": m.Normal(dim=2)}, ["z"], 2 + 6 + 6),
        ([("z", "x")], {"z": m.Categorical(1), "x": m.Normal()}, ["z"], 2),
        ([("f", "x"), ("f", "y")], {"f": m.Normal(), "x": m.Normal(), "y": m.Normal()}, ["f"], 6),
        # logits are relative to one category
        ([("x", "y")], {"x": m.Normal(), "y": m.Categorical(3)}, [], 2 + 2 + 2),
        # tied scales count once, fixed ones not at all
        ([("x", "y")], {"x": m.Normal(scale=otp.tie("s")), "y": m.Normal(scale=otp.tie("s"))}, [], 1 + 2 + 1),
        ([("x", "y")], {"x": m.Normal(scale=1.0), "y": m.Normal(loc=0.0)}, [], 1 + 2),
        # the level of a hidden number goes into its children
        ([("k", "f"), ("f", "x")], {"k": m.Categorical(2), "f": m.Normal(), "x": m.Normal()}, ["f"], 1 + 1 + 3),
    ],
)
def test_parameters_that_are_free_are_counted(edges, mechanisms, hidden, expected):
    assert otp.Model(otp.Graph(edges, hidden=hidden), mechanisms).n_parameters == expected
