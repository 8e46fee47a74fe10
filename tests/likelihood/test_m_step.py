"""Updates of rows along the graph: frequencies, least squares and, step by step, scipy's maximum of a Poisson node."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine.fit import recognise

ROWS = 300


def table():
    """A category, a number that depends on it, columns of very different scales, and a count."""
    rng = np.random.default_rng(1)
    g, t = rng.integers(0, 2, ROWS), rng.normal(size=ROWS)
    frame = pd.DataFrame(
        {"g": g, "t": t + g, "a": 1e4 + 50 * t, "b": 1e-3 * t, "n": rng.poisson(np.exp(0.5 + 0.6 * t))}
    )
    frame[["a", "b"]] += rng.normal(size=(ROWS, 2)) * [40.0, 1e-3]
    return frame


def laid_out(frame):
    """The problem of these rows, and a point of so many replicas near zero."""
    nodes = {"g": m.Categorical(2), "t": m.Normal(), "a": m.Normal(), "b": m.Normal(), "n": m.Poisson()}
    model = otp.Model(otp.Graph([("g", "t"), ("t", "a"), ("t", "b"), ("t", "n")]), nodes)
    kind = recognise(model, frame, weights=None, device="cpu", every_row=True)
    problem = kind.problem(kind.lay_out(otp.entropic(), 0), otp.entropic(), 0)
    assert problem.route == "graph"
    size = sum(int(np.prod(shape)) for shape in problem.shapes.values())
    return problem, torch.as_tensor(0.1 * np.random.default_rng(2).normal(size=(2, size)))


def poisson_maximum(x, n, weight):
    """Intercept and slope of log-linear counts, by scipy."""

    def loss(line):
        rate = np.exp(line[0] + line[1] * x)
        return float(weight @ (rate - n * np.log(rate)))

    return minimize(loss, np.zeros(2), method="BFGS", options={"gtol": 1e-8}).x


@pytest.mark.parametrize("weighted", [False, True])
def test_updates_of_complete_rows_lead_to_frequencies_and_regressions(weighted):
    problem, point = laid_out(table())
    frame = pd.DataFrame(
        {node: value[0, :, -1] for node, value in problem.batch.values.items()}
    )  # in an order of its own
    frame["g"] = frame["g"].astype(int)
    weight = np.ones((1, ROWS))
    if weighted:  # each replica has its own
        weight = np.random.default_rng(3).uniform(0.5, 2.0, (2, ROWS))
        problem = problem.reweighted(torch.from_numpy(weight))
    losses = []
    for _ in range(12):
        point, terms = problem.update(point)
        losses.append(terms.total)
    assert bool((torch.stack(losses).diff(dim=0) < 1e-9).all())
    found = problem.naturals(point)
    for replica in range(2):
        own = weight[min(replica, len(weight) - 1)]
        shares = np.bincount(frame["g"], own) / own.sum()
        np.testing.assert_allclose(found["g"]["probs"][replica].reshape(-1), shares, rtol=1e-5)
        for node in "ab":
            root, design = np.sqrt(own), np.column_stack([frame["t"], np.ones(ROWS)])
            line = np.linalg.lstsq(root[:, None] * design, root * frame[node], rcond=None)[0]
            scale = np.sqrt(own @ (frame[node] - design @ line) ** 2 / own.sum())
            named = [found[node][name][replica].item() for name in ("weight", "loc", "scale")]
            np.testing.assert_allclose(named, [*line, scale], rtol=1e-5)
        _, slope = poisson_maximum(frame["t"].to_numpy(), frame["n"].to_numpy(), own)
        assert problem.structure.mechanisms["n"].describe(found["n"])["weight"][replica].item() == pytest.approx(
            slope, abs=1e-4
        )


def test_rows_with_gaps_are_counted_as_they_are_likely():
    """An update goes up the likelihood of what is seen."""
    problem, point = laid_out(table().mask(np.random.default_rng(4).random((ROWS, 5)) < 0.2))
    problem = problem.laid_out_for(point)
    losses = [problem.loss(point).total]
    for _ in range(4):
        point, terms = problem.update(point)
        torch.testing.assert_close(terms.total, losses[-1])
        losses.append(problem.loss(point).total)
    assert bool((torch.stack(losses).diff(dim=0) < 1e-6).all())
