"""The leading axis: problems of many replicas are many problems."""

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch, Schema, encode
from otpdag.engine.lbfgs import minimise
from otpdag.engine.search import restart_seed
from otpdag.engine.table_data import lay_out_rows, one_start, table_problem
from otpdag.likelihood.entropic_terms import closed_terms
from otpdag.likelihood.enumeration import SumSizes, group_rows
from otpdag.settings import Weights

RNG = np.random.default_rng(4)


def model_of(kind):
    observed = {"x": m.Normal(), "y": m.Poisson(), "w": m.Categorical(2)}
    hidden = {
        "class": {"z": m.Categorical(2)},
        "number": {"u": m.Normal()},
        "class and number": {"z": m.Categorical(2), "u": m.Normal()},
        "two numbers": {"u": m.Normal(), "v": m.Normal()},
    }[kind]
    graph = otp.Graph([(h, o) for o in observed for h in hidden], hidden=list(hidden))
    return otp.Model(graph, {**hidden, **observed})


def table_of(rows, missing=0.1):
    table = pd.DataFrame({"x": RNG.normal(size=rows), "y": RNG.poisson(3.0, rows), "w": RNG.integers(0, 2, rows)})
    return table.astype(float).mask(RNG.random((rows, 3)) < missing)


def batch_of(model, table):
    return encode(table, Schema.of(model.spaces, model.graph, table), hidden=model.graph.hidden)


def starts_of(layout, batch, numbers, owner=0):
    return torch.cat([one_start(layout, batch, owner, restart_seed(0, n), first=n == 0) for n in numbers])


KINDS = ["class", "number", "class and number", "two numbers"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ["entropic", "transport"])
def test_losses_and_steps_of_replicas_do_not_touch_each_other(kind, route):
    model = model_of(kind)
    batch = batch_of(model, table_of(40))
    features = otp.divergences.WhitenedFeatures(features=20)
    entropic, transport = otp.entropic(steps=4, sums=SumSizes(grid=24)), otp.transport(steps=4, features=features)
    method = {"entropic": entropic, "transport": transport}[route]
    layout = lay_out_rows(model.structure, batch, method, 0)
    points = starts_of(layout, batch, range(3))
    points = points + 0.1 * torch.randn(points.shape, generator=torch.Generator().manual_seed(0), dtype=points.dtype)

    def descended(points):
        problem = table_problem(layout, batch, method, 0).laid_out_for(points)
        return minimise(problem.loss, points, steps=4)

    together = descended(points)
    assert torch.isfinite(together.loss).all()
    for r in range(3):
        alone = descended(points[r : r + 1])
        np.testing.assert_allclose(alone.loss[0], together.loss[r], rtol=1e-8)
        np.testing.assert_allclose(alone.point[0], together.point[r], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_data_sets_of_their_own_equal_separate_data_sets(kind):
    """Replicas may differ in rows, gaps and weights: one stacked batch, one loss for each."""
    model = model_of(kind)
    tables = [table_of(30), table_of(30), table_of(30)]
    weights = [RNG.uniform(0.5, 2.0, 30) for _ in tables]
    schema = Schema.of(model.spaces, model.graph, tables[0])
    batches = [
        encode(table, schema, hidden=model.graph.hidden, weights=weight)
        for table, weight in zip(tables, weights, strict=True)
    ]
    layout = lay_out_rows(model.structure, batches[0], otp.entropic(), 0)
    points = starts_of(layout, batches[0], range(3))
    stacked = table_problem(layout, Batch.stack(batches), otp.entropic(), 0).laid_out_for(points)
    together = stacked.loss(points).total
    for r, batch in enumerate(batches):
        alone = table_problem(layout, batch, otp.entropic(), 0).laid_out_for(points[r : r + 1])
        np.testing.assert_allclose(alone.loss(points[r : r + 1]).total[0].item(), together[r].item(), rtol=1e-7)


def test_gaps_that_differ_between_replicas_in_inner_nodes():
    """x1 -> x2 with x1 missing in other rows of each replica: the patterns are merged, and still exact."""
    model = otp.Model(otp.Graph([("x1", "x2")]), {"x1": m.Normal(), "x2": m.Normal()})
    model.set_params({"x1": {"loc": 0.5, "scale": 1.0}, "x2": {"loc": 0.0, "weight": 1.0, "scale": 0.5}})
    tables = [pd.DataFrame(RNG.normal(size=(20, 2)), columns=["x1", "x2"]) for _ in range(2)]
    tables[0].iloc[:5, 0], tables[1].iloc[8:15, 0] = np.nan, np.nan
    batches = [encode(table, model._known_schema(), hidden=()) for table in tables]

    def loss(batch):
        groups = group_rows(
            model.structure, batch, generator=torch.Generator().manual_seed(0), options=SumSizes(grid=96)
        )
        return closed_terms(model.structure, model.fitted.naturals, groups, Weights(eps=1.0)).total

    together = loss(Batch.stack(batches))
    for r, batch in enumerate(batches):
        assert loss(batch).item() == pytest.approx(together[r].item(), rel=1e-9)


def test_starts_of_a_data_set_are_its_own():
    model = model_of("class and number")
    tables = [table_of(30, 0.0), table_of(30, 0.0) * [1.0, 1.0, 1.0] + [5.0, 0.0, 0.0]]
    schema = Schema.of(model.spaces, model.graph, tables[0])
    batches = [encode(table, schema, hidden=model.graph.hidden) for table in tables]
    layout = lay_out_rows(model.structure, batches[0], otp.entropic(), 0)
    stacked = Batch.stack(batches)
    for owner, batch in enumerate(batches):
        torch.testing.assert_close(starts_of(layout, batch, [1]), starts_of(layout, stacked, [1], owner))
