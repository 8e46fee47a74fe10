"""How far searches go: estimates may be right and a search take twice the steps, which nothing else would notice.

A search's work is the number of losses that it looked at, of all starts at all steps. Bounds are a quarter above what
was measured: a new computer's rounding moves a few steps, a search that races worse or takes shorter steps many.
"""

import warnings

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from experiments.small_models import delete_cells
from otpdag import mechanisms as m
from otpdag.datasets import bars
from otpdag.estimators import LatentDirichletAllocation


def mixture():
    rng = np.random.default_rng(0)
    z = rng.integers(0, 3, 300)
    graph = otp.Graph([("z", "x"), ("z", "y")], hidden=["z"])
    table = pd.DataFrame({"x": rng.normal(4.0 * z), "y": rng.normal(-3.0 * (z == 1))})
    return otp.Model(graph, {"z": m.Categorical(3), "x": m.Normal(), "y": m.Normal()}), table


def factor():
    rng = np.random.default_rng(1)
    f = rng.normal(size=300)
    table = pd.DataFrame({f"x{i}": f * (1 + 0.2 * i) + rng.normal(size=300) for i in range(4)})
    graph = otp.Graph([("f", name) for name in table], hidden=["f"])
    return otp.Model(graph, {"f": m.Normal(loc=0, scale=1), **{name: m.Normal() for name in table}}), table


def regressions():
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(2, 300))
    chance, rate = 1 / (1 + np.exp(b - a)), np.exp(0.5 * a - 0.3 * b)
    table = pd.DataFrame({"a": a, "b": b, "y": rng.binomial(1, chance), "n": rng.poisson(rate)})
    graph = otp.Graph([("a", "y"), ("b", "y"), ("a", "n"), ("b", "n")])
    return otp.Model(graph, {"a": m.Normal(), "b": m.Normal(), "y": m.Bernoulli(), "n": m.Poisson()}), table


def classes(states):
    rng = np.random.default_rng(3)
    z = rng.integers(0, 2, 400)
    table = pd.DataFrame({f"c{i}": rng.binomial(1, np.where(z, 0.8, 0.25)) for i in range(5)})
    graph = otp.Graph([("z", name) for name in table], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(states), **{name: m.Categorical(2) for name in table}}), table


def mixed():
    rng = np.random.default_rng(6)
    z = rng.integers(0, 2, 300)
    a = rng.normal(2.0 * z)
    chance = 1 / (1 + np.exp(1 - 2.0 * z))
    table = pd.DataFrame({"a": a, "k": rng.poisson(np.exp(0.4 * a)), "c": rng.binomial(1, chance)})
    graph = otp.Graph([("z", "a"), ("z", "c"), ("a", "k")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(2), "a": m.Normal(), "k": m.Poisson(), "c": m.Bernoulli()}), table


def families():
    rng = np.random.default_rng(7)
    x = rng.normal(size=300)
    table = pd.DataFrame({"x": x, "g": rng.gamma(3.0, np.exp(0.5 * x)), "t": x + rng.standard_t(4, 300)})
    table["b"] = rng.negative_binomial(3, 0.3, 300)
    graph = otp.Graph([("x", "g"), ("x", "t"), ("x", "b")])
    return otp.Model(graph, {"x": m.Normal(), "g": m.Gamma(), "t": m.StudentT(), "b": m.NegativeBinomial()}), table


def chain():
    rng = np.random.default_rng(4)
    states = (rng.random(300) > 0.9).cumsum() % 2
    graph = otp.Graph([otp.lag("s", "s"), ("s", "n")], hidden=["s"])
    model = otp.Model(graph, {"s": m.Categorical(2), "n": m.Poisson()})
    return model, pd.DataFrame({"n": rng.poisson(np.where(states, 9.0, 2.0))})


def work_of(problem, gaps: float, **how) -> tuple[int, otp.FitResult]:
    model, table = problem
    table = delete_cells(table, gaps, np.random.default_rng(8)) if gaps else table
    data = otp.Sequences([table]) if model.graph.is_dynamic else table
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otp.ConvergenceWarning)
        result = otp.fit(model, data, **how)
    return sum(len(losses) for stage in result.stages for losses in stage.losses), result


@pytest.mark.parametrize(
    ("problem", "gaps", "most", "reached"),
    [
        (mixture, 0.0, 940, 20),
        (mixture, 0.15, 1150, 20),
        (factor, 0.0, 35, 4),
        (factor, 0.15, 30, 4),
        (lambda: classes(2), 0.15, 820, 22),
        (lambda: classes(3), 0.15, 22_700, 40),
        (mixed, 0.0, 360, 7),
        (mixed, 0.15, 350, 6),
        (chain, 0.0, 325, 24),
        (chain, 0.15, 810, 26),
    ],
)
def test_a_search_takes_no_more_than_it_needs_and_meets_the_best_end_often(problem, gaps, most, reached):
    work, result = work_of(problem(), gaps)
    assert result.status.converged
    assert result.reached >= reached
    assert work <= most


@pytest.mark.parametrize("problem", [regressions, families])
def test_what_has_one_optimum_takes_a_step_or_with_gaps_few(problem):
    assert work_of(problem(), 0.0)[0] == 1
    assert work_of(problem(), 0.15)[0] <= 5


@pytest.mark.parametrize(
    ("how", "most"),
    [
        ({"method": "transport"}, 28),
        ({"method": otp.entropic(eps=0.75, reference="uniform")}, 155),
        ({"method": otp.entropic(eps=0.3)}, 170),
        ({"robust": "outliers"}, 1200),
    ],
)
def test_other_methods_take_no_more_either(how, most):
    work, result = work_of(mixture(), 0.0, **how)
    assert result.status.converged
    assert work <= most


def test_a_run_that_moves_on_the_way_takes_no_more_steps_than_are_allowed():
    _, result = work_of(classes(3), 0.0, steps=60, restarts=2)
    taken = [len(stage.losses) for stage in result.stages if stage.name == "best start"]
    assert taken[:2] == [20, 40]  # twenty, a look at other places, and what is left
    assert max(taken) <= 60


def test_sweeps_over_documents_end_where_their_loss_does():
    result = LatentDirichletAllocation(4).fit(bars(4, 60, 30, seed=0).counts).result_
    assert result.status.converged
    assert len(result.history) <= 30
    assert sum(len(losses) for stage in result.stages for losses in stage.losses) <= 105
