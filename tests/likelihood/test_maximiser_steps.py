"""Nodes that are alike are maximised together, each as it would be alone: by least squares, or by frequencies."""

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine.fit import recognise
from otpdag.likelihood.elimination.families import describe_families
from otpdag.likelihood.elimination.family_statistics import Counts, Moments
from otpdag.likelihood.m_step import find_twins, maximised
from otpdag.structure import unpack


def least_squares(columns, weight):
    """Slopes and intercept of the first column on the others, and the residuals' spread, by numpy."""
    design = np.column_stack([columns[:, 1:], np.ones(len(columns))])
    root = np.sqrt(weight)[:, None]
    line = np.linalg.lstsq(root * design, root[:, 0] * columns[:, 0], rcond=None)[0]
    return line, np.sqrt(weight @ (columns[:, 0] - design @ line) ** 2 / weight.sum())


def test_twins_are_maximised_by_least_squares_of_each_alone():
    """Scales far apart, and floors that come from the columns, must not be taken for each other's."""
    rng = np.random.default_rng(1)
    t = rng.normal(size=120)
    frame = pd.DataFrame({"t": t, "a": 1e4 + 50 * t, "b": 1e-3 * t, "c": -t})
    frame[["a", "b", "c"]] += rng.normal(size=(120, 3)) * [40.0, 1e-3, 1e-9]  # c has less spread than it may have
    model = otp.Model(otp.Graph([("t", name) for name in "abc"]), {name: m.Normal() for name in "tabc"})
    layout = recognise(model, frame, weights=None, device="cpu", every_row=False).lay_out(otp.entropic(), 0)
    families = describe_families(layout.structure)
    (twins,) = (one for one in find_twins(layout.structure, families, layout.shapes) if len(one.families) == 3)
    weight = rng.uniform(0.5, 2.0, size=(2, 120))
    statistics, size = {}, sum(int(np.prod(s)) for s in layout.shapes.values())
    for family in twins.families:
        columns = frame[[family.node, "t"]].to_numpy()
        shift = np.append(columns.mean(0), 0.0)
        lifted = np.column_stack([columns, np.ones(120)]) - shift
        second = np.einsum("rn,ni,nj->rij", weight, lifted, lifted)[:, None]
        halves = torch.from_numpy(0.5 * second)
        statistics[family.node] = (Moments(family, halves, halves, shift=torch.from_numpy(shift)),)
    point = torch.as_tensor(0.1 * rng.normal(size=(2, size)))
    naturals = layout.structure.naturals(unpack(point, layout.shapes))
    raw, shown = maximised(twins, naturals, statistics, 2)
    found = twins.natural(raw)
    for place, family in enumerate(twins.families):
        own = {name: value.unflatten(0, (2, 3))[:, place].numpy().reshape(2) for name, value in found.items()}
        least = float(family.mechanism.smallest_scale)
        for replica in range(2):
            (slope, intercept), scale = least_squares(frame[[family.node, "t"]].to_numpy(), weight[replica])
            assert own["weight"][replica] == pytest.approx(slope, rel=1e-6)
            assert own["loc"][replica] == pytest.approx(intercept, rel=1e-6, abs=1e-9)
            assert own["scale"][replica] == pytest.approx(max(scale, least), rel=1e-5)
    alone = [maximised(twins.some([at]), naturals, statistics, 2) for at in range(3)]
    torch.testing.assert_close(shown, sum(own for _, own in alone))


def test_twins_of_tables_are_maximised_by_frequencies():
    model = otp.Model(otp.Graph([("a", "b"), ("a", "c")]), {name: m.Categorical(2) for name in "abc"})
    frame = pd.DataFrame({name: [0, 1, 1, 0] for name in "abc"})
    layout = recognise(model, frame, weights=None, device="cpu", every_row=False).lay_out(otp.entropic(), 0)
    families = describe_families(layout.structure)
    (twins,) = (one for one in find_twins(layout.structure, families, layout.shapes) if len(one.families) == 2)
    rng = np.random.default_rng(2)
    counts = {family.node: rng.uniform(1e6, 2e6, size=(1, 4)) for family in twins.families}  # a brake is nothing beside
    statistics = {
        family.node: (Counts(family, torch.from_numpy(counts[family.node]), torch.zeros(1, 4).double()),)
        for family in twins.families
    }
    point = torch.zeros(1, sum(int(np.prod(s)) for s in layout.shapes.values())).double()
    raw, _ = maximised(twins, layout.structure.naturals(unpack(point, layout.shapes)), statistics, 1)
    found = twins.natural(raw)["probs"].numpy()
    for place, family in enumerate(twins.families):
        table = counts[family.node].reshape(2, 2)
        np.testing.assert_allclose(found[place], table / table.sum(1, keepdims=True), rtol=1e-6)
