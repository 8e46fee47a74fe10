"""The leading axis: problems of many replicas are many problems."""

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema, encode
from otpdag.engine import Run
from tests.table_problems import lay_out_rows, starts_of, table_problem

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


KINDS = ["class", "number", "class and number", "two numbers"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ["entropic", "transport"])
def test_losses_and_steps_of_replicas_do_not_touch_each_other(kind, route):
    model = model_of(kind)
    batch = batch_of(model, table_of(40))
    sliced = otp.divergences.SlicedWasserstein(20, p=1.0)
    entropic, transport = otp.entropic(steps=4), otp.transport(steps=4, divergence=sliced, points=128)
    method = {"entropic": entropic, "transport": transport}[route]
    layout = lay_out_rows(model.structure, batch, method, 0)
    points = starts_of(layout, batch, range(3))
    points = points + 0.1 * torch.randn(points.shape, generator=torch.Generator().manual_seed(0), dtype=points.dtype)

    def descended(points):
        problem = table_problem(layout, batch, method, 0).laid_out_for(points)
        return method.optimiser.run(Run(problem, points, 4), lambda progress: False)

    together = descended(points)
    assert torch.isfinite(together.loss).all()
    for r in range(3):
        alone = descended(points[r : r + 1])
        # points of one replica are placed until those of all are settled
        np.testing.assert_allclose(alone.loss[0], together.loss[r], rtol=1e-6)
        np.testing.assert_allclose(alone.point[0], together.point[r], rtol=1e-3, atol=1e-4)
