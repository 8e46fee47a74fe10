"""Nodes that are alike, evaluated together, have the parameters that each has alone."""

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine.fit import recognise
from otpdag.likelihood.elimination.families import describe_families
from otpdag.likelihood.m_step import find_twins
from otpdag.structure import unpack


@pytest.mark.parametrize("floor", [0.0, None])  # none given: it comes from each column
def test_twins_have_the_natural_parameters_of_each_alone(floor):
    rng = np.random.default_rng(0)
    g = rng.integers(0, 2, 80)
    frame = pd.DataFrame({"g": g, "t": rng.normal(size=80)})
    frame = frame.assign(a=1e4 + 50 * frame.t, b=1e-3 * frame.t, c=g + frame.t, d=rng.normal(size=80)) + 0.0
    frame[["a", "b", "c"]] += rng.normal(size=(80, 3)) * [40.0, 1e-3, 1.0]
    edges = [("t", "a"), ("t", "b"), ("t", "c"), ("g", "c"), ("g", "d")]
    model = otp.Model(otp.Graph(edges), {"g": m.Categorical(2), **{name: m.Normal(floor=floor) for name in "tabcd"}})
    layout = recognise(model, frame, weights=None, device="cpu", every_row=False).lay_out(otp.entropic(), 0)
    point = torch.as_tensor(rng.normal(size=(3, sum(int(np.prod(s)) for s in layout.shapes.values()))))
    expected = layout.structure.naturals(unpack(point, layout.shapes))
    families = describe_families(layout.structure)
    groups = find_twins(layout.structure, families, layout.shapes)
    assert sorted(len(one.families) for one in groups) == [1, 1, 1, 1, 2]  # a and b alone are alike
    for twins in groups:
        found = twins.naturals(point)
        for place, family in enumerate(twins.families):
            for name, value in expected[family.node].items():
                own = found[name].unflatten(0, (3, len(twins.families)))[:, place]
                torch.testing.assert_close(own, value.expand_as(own))
