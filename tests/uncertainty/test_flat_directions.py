"""Information beside the closed form, and directions that data do not tell."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.structure import pack
from otpdag.uncertainty import flat_directions as module
from otpdag.uncertainty.flat_directions import flat_directions, information


def solved(edges, mechanisms, table, hidden=()):
    model = otp.Model(otp.Graph(edges, hidden=hidden, nodes=list(mechanisms)), mechanisms)
    result = otp.fit(model, table, seed=0)
    raw = result.problem.structure.raw(model.fitted.naturals)
    return result.problem, pack({key: raw[key] for key in result.problem.shapes})


def test_information_of_a_normal_column_is_the_textbooks():
    column = np.random.default_rng(0).normal(3.0, 2.0, 1500)
    problem, point = solved([], {"x": m.Normal()}, pd.DataFrame({"x": column}))
    # in units of the column's spread, and of the logarithm of the scale: 1 and 2
    found = information(problem, point)
    torch.testing.assert_close(found, torch.diag(torch.tensor([1.0, 2.0]).double()), atol=0.2, rtol=0)
    # groups of rows give the same up to their noise, and rows that are few
    grouped = information(problem, point, rows=1000, groups=300)
    torch.testing.assert_close(grouped, found, atol=0.4, rtol=0)


def test_a_rotation_of_two_factors_is_one_flat_direction_and_one_factor_has_none():
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(500, 2)) @ rng.normal(size=(2, 5)) + 0.6 * rng.normal(size=(500, 5)))
    table.columns = [f"x{i}" for i in range(5)]
    seen = {name: m.Normal() for name in table}
    edges = [(factor, name) for factor in "fg" for name in table]
    directions = flat_directions(*solved(edges, {"f": m.Normal(), "g": m.Normal(), **seen}, table, ["f", "g"]))
    assert len(directions) == 1
    assert {name for _, name, _ in directions[0].names} == {"weight"}
    assert flat_directions(*solved([("f", name) for name in table], {"f": m.Normal(), **seen}, table, ["f"])) == []


def test_replicas_one_at_a_time_find_the_same_directions(monkeypatch):
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(500, 2)) @ rng.normal(size=(2, 5)) + 0.6 * rng.normal(size=(500, 5)))
    table.columns = [f"x{i}" for i in range(5)]
    nodes = {"f": m.Normal(), "g": m.Normal(), **{name: m.Normal() for name in table}}
    problem, point = solved([(factor, name) for factor in "fg" for name in table], nodes, table, ["f", "g"])
    together = flat_directions(problem, point)
    monkeypatch.setattr(module, "MOST_ENTRIES", 1)
    assert module._at_once(problem) == 1
    apart = flat_directions(problem, point)
    assert together
    assert [one.names for one in apart] == [one.names for one in together]


def test_levels_of_a_softmax_are_no_flat_direction():
    rng = np.random.default_rng(0)
    x = rng.normal(size=600)
    table = pd.DataFrame({"x": x, "k": (x + rng.logistic(size=600) > 0).astype(int) + (rng.random(600) < 0.3)})
    problem, point = solved([("x", "k")], {"x": m.Normal(), "k": m.Categorical(3)}, table)
    assert flat_directions(problem, point) == []
    assert bool((torch.linalg.eigvalsh(information(problem, point, rows=300))[:2].abs() < 1e-9).all())
