"""Steps of Newton's method end at the maximum that scipy finds."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward.elimination import expectations, lay_out
from otpdag.backward.newton_steps import newton_step
from otpdag.backward.twins import find_twins
from otpdag.engine.kinds.recognise import recognise
from otpdag.structure import unpack


def laid_out():
    """Two counts below a number, both complete: they have no maximiser, and are alike."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=150)
    table = pd.DataFrame({"x": x, "a": rng.poisson(np.exp(0.5 + 0.6 * x)), "b": rng.poisson(np.exp(1.0 - 0.3 * x))})
    model = otp.Model(otp.Graph([("x", "a"), ("x", "b")]), {"x": m.Normal(), "a": m.Poisson(), "b": m.Poisson()})
    kind = recognise(model, table, weights=None, device="cpu", every_row=True)
    layout = kind.lay_out(otp.entropic(), 0)
    return (
        table,
        layout.structure,
        dict(layout.shapes),
        kind.batch,
        kind.starts(layout, kind.problem(layout, otp.entropic(), 0), 0, [0]),
    )


def by_scipy(x, counts):
    def loss(line):
        return float((np.exp(line[0] + line[1] * x) - counts * (line[0] + line[1] * x)).sum())

    return minimize(loss, [0.0, 0.0], tol=1e-12).x


def test_steps_climb_to_the_maximum_of_each_twin():
    table, structure, shapes, batch, point = laid_out()
    rows = lay_out(structure, batch)
    families = [family for family in rows.families if family.node in "ab"]
    (twins,) = find_twins(structure, families, shapes)
    assert len(twins.families) == 2
    start = unpack(point, shapes)
    raw = {name: torch.stack([start[structure.keys[n][name]] for n in "ab"], 1) for name in structure.keys["a"]}
    raw = {name: value + 0.4 for name, value in raw.items()}
    heights = []
    for _ in range(12):
        at = {structure.keys[n][name]: raw[name][:, i] for i, n in enumerate("ab") for name in raw}
        naturals = structure.naturals({**start, **at})
        summary = expectations(naturals, rows, sampled=dict.fromkeys("ab", 10_000))
        raw, shown = newton_step(twins, raw, summary.families, summary.slopes)
        heights.append(float(shown))
    assert all(np.diff(heights) >= -1e-9)
    assert heights[-1] > heights[0] + 1
    for node in "ab":
        own = naturals[node]
        slope = float(own["weight"].flatten()[0])
        level = float(own["log_rate"].flatten()[0])
        expected = by_scipy(table["x"].to_numpy(), table[node].to_numpy())
        assert [level, slope] == pytest.approx(expected, abs=1e-4)
