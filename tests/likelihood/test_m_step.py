"""M-steps of nodes that are alike: each as it would be alone, by least squares, frequencies, or scipy's maximum."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.engine.fit import recognise
from otpdag.likelihood import m_step as newton_steps
from otpdag.likelihood.elimination.evidence import Counts, Moments, Rows, expectations
from otpdag.likelihood.elimination.families import WeighedRows, describe_families
from otpdag.likelihood.elimination.layout import lay_out
from otpdag.likelihood.m_step import find_twins, maximised, newton_step
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


NODES, REPLICAS, ROWS = "abc", 2, 30


def make_twins(rng):
    """Three counts with the same parent in units of their own, and the rows of a table."""
    t = 5.0 + 2.0 * rng.normal(size=ROWS)
    frame = pd.DataFrame({"t": t, **{name: rng.poisson(2.0 + place, ROWS) for place, name in enumerate(NODES)}})
    model = otp.Model(otp.Graph([("t", name) for name in NODES]), {"t": m.Normal(), **{n: m.Poisson() for n in NODES}})
    layout = recognise(model, frame, weights=None, device="cpu", every_row=False).lay_out(otp.entropic(), 0)
    families = describe_families(layout.structure)
    (twins,) = (one for one in find_twins(layout.structure, families, layout.shapes) if len(one.families) == 3)
    values = {name: torch.tensor(frame[name].to_numpy(), dtype=torch.float64).reshape(1, ROWS, 1) for name in frame}
    mask = {name: torch.ones(1, ROWS, 1, dtype=torch.bool) for name in frame}
    return twins, SimpleNamespace(batch=Batch(values, mask, torch.ones(1, ROWS).double()))


def taken(layout, family, rows, weight):
    return WeighedRows({name: layout.batch.values[name][:, rows] for name in family.names}, weight)


def make_rows(rng, layout, family, *, many, thinned=False, expected=False, shared=False):
    """Some rows of the table with weights, a sample of them, and rows that are only likely to show the family."""
    rows = torch.as_tensor(rng.permutation(ROWS)[:many])
    weight = torch.as_tensor(rng.uniform(0.5, 2.0, size=(1 if shared else REPLICAS, many)))
    complete = (taken(layout, family, rows, weight),)
    if expected:
        likely = taken(
            layout, family, torch.as_tensor(rng.permutation(ROWS)[:7]), torch.as_tensor(rng.random((REPLICAS, 7)))
        )
        return Rows(family, complete, (likely,))
    part = slice(0, many // 2 if thinned else many)
    factor = 2.0 if thinned else 1.0
    sample = taken(layout, family, rows[part], factor * weight[:, part])
    return Rows(family, complete, (), (sample,), thinned)


def plain_step(family, raw, statistics, slopes, replica):
    """A step of one node in one replica by autograd of whole functions, and how likely rows are that show it."""
    names, shapes = list(raw), [value.shape for value in raw.values()]
    leaf = torch.cat([value.flatten() for value in raw.values()])

    def natural(flat):
        parts = flat.split([shape.numel() for shape in shapes])
        params = {n: one.reshape(1, *shape) for n, one, shape in zip(names, parts, shapes, strict=True)}
        return family.mechanism.natural(params)

    def summed(flat, rows):
        weight = rows.weight[replica if len(rows.weight) > 1 else 0]
        return (weight * family.log_prob(natural(flat), rows.values)[0]).sum()

    (shown,) = statistics.complete

    def exact(flat):
        tilted = sum((natural(flat)[name][0] * slope[replica]).sum() for name, slope in slopes.items())
        return summed(flat, shown) + sum(summed(flat, one) for one in statistics.expected) + tilted

    def height(flat):
        if statistics.sample is None:
            return summed(flat, shown) + sum(summed(flat, one) for one in statistics.expected)
        return sum(summed(flat, one) for one in statistics.sample)

    slope, own = torch.func.grad(exact)(leaf), torch.func.grad(height)(leaf)
    values, vectors = torch.linalg.eigh(-torch.func.hessian(height)(leaf))
    least = (2e-3 if statistics.thinned else 1e-9) * values.abs().max()
    step = vectors @ ((vectors.T @ slope) / values.abs().clamp(min=least))
    for size in (1.0, 0.25, 0.05):
        if height(leaf + size * step) + size * ((slope - own) @ step) >= height(leaf):
            return leaf + size * step, summed(leaf, shown), size
    return leaf, summed(leaf, shown), 0.0


def compare(twins, raw, statistics, slopes):
    """Both ways; returns the sizes of the steps that were taken."""
    after, shown = newton_step(twins, raw, statistics, slopes)
    sizes, total = [], torch.zeros(REPLICAS).double()
    for place, family in enumerate(twins.families):
        own_slopes = slopes.get(family.node, {})
        for replica in range(REPLICAS):
            own = {name: value[replica, place] for name, value in raw.items()}
            (one,) = statistics[family.node]
            expected, complete, size = plain_step(family, own, one, own_slopes, replica)
            found = torch.cat([value[replica, place].flatten() for value in after.values()])
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
            total[replica] += complete
            sizes.append(size)
    torch.testing.assert_close(shown, total)
    return sizes


def start(twins, rng, spread):
    return {
        name: torch.as_tensor(spread * rng.normal(size=(REPLICAS, len(NODES), *at.shape[1:])))
        for name, at in twins.columns.items()
    }


@pytest.mark.parametrize("thinned", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_twins_side_by_side_step_like_each_alone(thinned, shared, spread, monkeypatch):
    rng = np.random.default_rng(1)
    twins, layout = make_twins(rng)
    statistics = {
        family.node: (
            make_rows(rng, layout, family, many=30 - 8 * place, thinned=thinned and place == 1, shared=shared),
        )
        for place, family in enumerate(twins.families)
    }
    raw = start(twins, rng, spread)
    sizes = compare(twins, raw, statistics, {})
    assert (set(sizes) == {1.0}) == (spread < 1)
    together, _ = newton_step(twins, raw, statistics, {})
    monkeypatch.setattr(newton_steps, "CHUNK", 1)  # one after another
    apart, _ = newton_step(twins, raw, statistics, {})
    for name, value in together.items():
        torch.testing.assert_close(value, apart[name])


def test_rows_that_are_only_likely_and_slopes_of_others_are_counted():
    rng = np.random.default_rng(2)
    twins, layout = make_twins(rng)
    statistics = {
        family.node: (make_rows(rng, layout, family, many=20, expected=place != 1),)
        for place, family in enumerate(twins.families)
    }
    raw = start(twins, rng, 0.3)
    natural = twins.families[0].mechanism.natural({name: value[:, 0] for name, value in raw.items()})
    slopes = {
        family.node: {name: torch.as_tensor(rng.normal(size=value.shape)) for name, value in natural.items()}
        for family in twins.families
    }
    assert set(compare(twins, raw, statistics, slopes)) == {1.0}


def test_nodes_that_no_row_tells_of_stay():
    rng = np.random.default_rng(3)
    twins, layout = make_twins(rng)
    statistics = {family.node: () for family in twins.families}
    statistics["b"] = (make_rows(rng, layout, twins.families[1], many=12),)
    raw = start(twins, rng, 0.3)
    after, _ = newton_step(twins, raw, statistics, {})
    for name, value in raw.items():
        moved = (after[name] != value).flatten(2).any(-1)
        assert moved.tolist() == [[False, True, False]] * REPLICAS
