"""The node whose mechanism is wrong has the largest residual."""

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m


def skewed_indicator(generator, rows=1000):
    factor = generator.standard_normal(rows)
    frame = pd.DataFrame({f"x{i}": factor * (0.6 + 0.2 * i) + 0.7 * generator.standard_normal(rows) for i in range(4)})
    frame["x2"] = factor + 0.9 * (generator.exponential(size=rows) - 1)
    graph = otp.Graph([("f", name) for name in frame], hidden=["f"])
    return otp.Model(graph, {"f": m.Normal()} | {name: m.Normal() for name in frame}), frame, "x2"


def curved_edge(generator, rows=1000):
    a = generator.standard_normal(rows)
    b = 0.8 * a + 0.5 * generator.standard_normal(rows)
    c = 0.6 * b**2 + 0.5 * generator.standard_normal(rows)
    frame = pd.DataFrame({"a": a, "b": b, "c": c, "d": 0.7 * c + generator.standard_normal(rows)})
    model = otp.Model(otp.Graph([("a", "b"), ("b", "c"), ("c", "d")]), {name: m.Normal() for name in frame})
    return model, frame, "c"


def wide_counts(generator, rows=1000):
    x = generator.standard_normal(rows)
    mean = np.exp(1 + 0.5 * x)
    frame = pd.DataFrame({"x": x, "n": generator.negative_binomial(2, 2 / (2 + mean)), "k": generator.poisson(mean)})
    return (
        otp.Model(otp.Graph([("x", "n"), ("x", "k")]), {"x": m.Normal(), "n": m.Poisson(), "k": m.Poisson()}),
        frame,
        "n",
    )


@pytest.mark.slow
@pytest.mark.parametrize("problem", [skewed_indicator, curved_edge, wide_counts])
def test_the_wrong_node_ranks_first(problem):
    first = 0
    for seed in range(3):
        model, frame, wrong = problem(np.random.default_rng(seed))
        otp.fit(model, frame, seed=0, restarts=2)
        table = model.check(frame, seed=seed)
        assert set(table.index) == set(frame.columns)
        assert list(table["excess"]) == sorted(table["excess"], reverse=True)
        first += table.index[0] == wrong
    assert first == 3


def test_a_right_model_has_no_excess():
    generator = np.random.default_rng(5)
    x = generator.standard_normal(1500)
    frame = pd.DataFrame({"x": x, "y": x + generator.standard_normal(1500)})
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    otp.fit(model, frame, seed=0)
    assert model.check(frame)["excess"].max() < 4
