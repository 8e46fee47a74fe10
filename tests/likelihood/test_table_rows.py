"""Rows whose likelihood is read from sums still answer for each of them."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import multivariate_normal

import otpdag as otp
from otpdag import mechanisms as m
from tests.table_problems import kind_of

RNG = np.random.default_rng(2)
Z = RNG.integers(0, 2, 90)
TABLE = pd.DataFrame({"x": np.where(Z, 3.0, -3.0) + RNG.normal(size=90), "y": RNG.normal(size=90)})
WEIGHTS = RNG.uniform(0.5, 2.0, 90)


def laid_out(hidden):
    nodes = {"x": m.Normal(), "y": m.Normal()}
    graph = otp.Graph([("z", "x"), ("z", "y")], hidden=["z"]) if hidden else otp.Graph([("x", "y")])
    model = otp.Model(graph, {**nodes, "z": m.Categorical(2)} if hidden else nodes)
    kind = kind_of(model, TABLE, weights=WEIGHTS, every_row=True)
    layout = kind.lay_out(otp.entropic(), 0)
    problem = kind.problem(layout, otp.entropic(), 0)
    return kind, problem, kind.starts(layout, problem, 0, [0])


@pytest.mark.parametrize("hidden", [False, True], ids=["moments", "states"])
def test_losses_of_rows_average_to_the_loss(hidden):
    _, problem, point = laid_out(hidden)
    assert problem.is_likelihood
    assert problem.is_sum
    losses = problem.unit_losses(point)
    assert losses.shape == (1, 90)
    expected = (problem.weight * losses).sum(-1) / problem.weight.sum(-1)
    torch.testing.assert_close(problem.loss(point).total, expected, rtol=1e-9, atol=0)


def test_each_row_has_its_own_density():
    kind, problem, point = laid_out(hidden=False)
    naturals = problem.naturals(point)
    loc, scale = (float(naturals["x"][name].flatten()[0]) for name in ("loc", "scale"))
    level, slope, noise = (float(naturals["y"][name].flatten()[0]) for name in ("loc", "weight", "scale"))
    covariance = [[scale**2, slope * scale**2], [slope * scale**2, slope**2 * scale**2 + noise**2]]
    density = multivariate_normal([loc, level + slope * loc], covariance).logpdf(TABLE.to_numpy())
    np.testing.assert_allclose(kind.as_given(-problem.unit_losses(point)[0].numpy()), density, atol=1e-8)


def test_a_part_row_by_row_is_some_of_the_rows():
    _, problem, point = laid_out(hidden=False)
    part = problem.row_by_row(30)
    assert part.rows == 30
    whole = set(problem.unit_losses(point)[0].tolist())
    near = [min(abs(one - other) for other in whole) for one in part.unit_losses(point)[0].tolist()]
    assert max(near) < 1e-9


def test_rows_that_the_model_makes_have_the_gaps_of_the_table():
    _, problem, point = laid_out(hidden=True)
    made = problem.drawn(point, 500, seed=3)
    assert made.rows == 500
    assert bool(made.mask["x"].all())
    assert "z" not in made.values
