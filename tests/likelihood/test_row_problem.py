"""Rows summed along the graph, and their closed-form updates."""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema, encode
from otpdag.engine.data_kind import lay_out_rows, one_start
from otpdag.engine.optimiser import EM, Deterministic, Run, minimise
from otpdag.likelihood import row_problem
from otpdag.likelihood.elimination.sums import Tempering
from otpdag.likelihood.row_problem import WORST_LOSS, GraphProblem, rows_along_graph
from otpdag.mechanisms.base import has_closed_form
from otpdag.problem import RowObjective
from otpdag.settings import ClosedForm, Objective
from otpdag.structure import parameter_places
from tests.likelihood.elimination.worlds import enumerated

ROWS = 60


def gappy(frame, rng, share=0.25):
    return frame.mask(rng.random(frame.shape) < share)


def tables():
    rng = np.random.default_rng(0)
    a = rng.integers(0, 2, ROWS)
    b = (a + (rng.random(ROWS) < 0.3)) % 2
    c = rng.integers(0, 3, ROWS) * b
    graph = otp.Graph([("a", "b"), ("b", "c"), ("a", "c")])
    model = otp.Model(graph, {"a": m.Categorical(2), "b": m.Categorical(2), "c": m.Categorical(3)})
    return model, gappy(pd.DataFrame({"a": a, "b": b, "c": c}, dtype=float), rng)


def lines():
    rng = np.random.default_rng(1)
    x = rng.normal(1.0, 2.0, ROWS)
    y = 0.5 * x + rng.normal(size=ROWS)
    w = y - x + 0.5 * rng.normal(size=ROWS)
    model = otp.Model(otp.Graph([("x", "y"), ("x", "w"), ("y", "w")]), {name: m.Normal() for name in "xyw"})
    return model, gappy(pd.DataFrame({"x": x, "y": y, "w": w}), rng)


def mixed():
    rng = np.random.default_rng(2)
    a = rng.integers(0, 2, ROWS)
    x = 3.0 * a + rng.normal(size=ROWS)
    y = 0.5 * x - a + rng.normal(size=ROWS)
    model = otp.Model(
        otp.Graph([("a", "x"), ("x", "y"), ("a", "y")]), {"a": m.Categorical(2), "x": m.Normal(), "y": m.Normal()}
    )
    return model, gappy(pd.DataFrame({"a": a, "x": x, "y": y}, dtype=float), rng)


def counts():
    """Counts with a slope in a number that may be missing: a mechanism without a closed form."""
    rng = np.random.default_rng(3)
    u = rng.normal(size=ROWS)
    model = otp.Model(otp.Graph([("u", "n")]), {"u": m.Normal(), "n": m.Poisson()})
    return model, gappy(pd.DataFrame({"u": u, "n": rng.poisson(np.exp(0.5 + 0.6 * u))}, dtype=float), rng)


EXACT = {"tables": tables, "lines": lines, "mixed": mixed}
ALL = {**EXACT, "counts": counts}


def made(world, objective=None, weights=None, rows=None):
    """Rows along the graph, and a start."""
    model, frame = world()
    frame = frame if rows is None else frame.iloc[rows]
    batch = encode(frame, Schema.of(model.spaces, model.graph), hidden=model.graph.hidden, weights=weights)
    whole = encode(world()[1], Schema.of(model.spaces, model.graph), hidden=model.graph.hidden)
    layout = lay_out_rows(model.structure, whole, otp.entropic(), 0)
    start = one_start(layout, whole, 0, first=True)
    about = RowObjective(layout.structure, layout.shapes, objective or Objective(eps=1.0), ClosedForm())
    return rows_along_graph(about, batch, 0).laid_out_for(start), start


def around(start, replicas=3):
    generator = torch.Generator().manual_seed(0)
    return start + 0.3 * torch.randn(replicas, start.shape[1], generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("eps", [1.0, 0.5])
def test_the_loss_is_that_of_all_joint_states(eps):
    weights = np.random.default_rng(4).uniform(0.5, 2.0, ROWS)
    along, start = made(tables, Objective(eps=eps), weights)
    points = around(start)
    losses = -eps * enumerated(along.structure, along.naturals(points), along.batch, {}, power=1 / eps)
    torch.testing.assert_close(along.unit_losses(points), losses, rtol=1e-9, atol=1e-9)
    share = torch.as_tensor(weights / weights.sum())
    torch.testing.assert_close(along.loss(points).total, losses @ share, rtol=1e-9, atol=1e-9)


def test_lines_have_the_density_of_what_is_seen():
    """Every row's loss is that of the multivariate normal distribution of its seen columns."""
    along, start = made(lines)
    params = {
        node: {k: v.item() for k, v in own.items() if v.numel() == 1} for node, own in along.naturals(start).items()
    }
    slopes = along.naturals(start)["w"]["weight"].flatten().numpy()
    effects = np.zeros((3, 3))
    effects[1, 0], effects[2, 0], effects[2, 1] = params["y"]["weight"], *slopes
    spread = np.linalg.inv(np.eye(3) - effects)
    mean = spread @ np.array([params[name]["loc"] for name in "xyw"])
    covariance = spread @ np.diag([params[name]["scale"] ** 2 for name in "xyw"]) @ spread.T
    expected = []
    for row in lines()[1].to_numpy():
        seen = np.flatnonzero(~np.isnan(row))
        normal = stats.multivariate_normal(mean[seen], covariance[np.ix_(seen, seen)]) if len(seen) else None
        expected.append(0.0 if normal is None else -normal.logpdf(row[seen]))
    np.testing.assert_allclose(along.unit_losses(start)[0], expected, rtol=1e-7, atol=1e-9)
    assert along.loss(start).total.item() == pytest.approx(np.mean(expected))


@pytest.mark.parametrize("name", ALL)
def test_the_gradient_is_that_of_finite_differences(name):
    along, start = made(ALL[name])
    leaf = around(start, 1).requires_grad_(True)
    (gradient,) = torch.autograd.grad(along.loss(leaf).total.sum(), leaf)
    step = 1e-5 * torch.eye(leaf.shape[1]).double()
    with torch.no_grad():
        slopes = [(along.loss(leaf + one).total - along.loss(leaf - one).total) / 2e-5 for one in step]
    torch.testing.assert_close(gradient[0], torch.cat(slopes), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ALL)
def test_an_update_never_raises_the_loss_and_tells_it(name):
    along, start = made(ALL[name])
    assert along.updates
    point, losses = around(start, 1), []
    for _ in range(15):
        after, terms = along.update(point)
        assert terms.total.item() == pytest.approx(along.loss(point).total.item(), rel=1e-9)
        losses.append(terms.total.item())
        point = after
    assert (np.diff(losses) < 1e-10).all()
    assert losses[-1] < losses[0] - 1e-3


def behind_a_class(family, states=3, rows=1100):
    """A regression on a number and a hidden class: of its tables every third entry would be kept, of one class."""
    rng = np.random.default_rng(0)
    h = rng.integers(0, states, rows)
    x = 1.5 * h + rng.normal(size=rows)
    line = 0.5 + 0.3 * h - 0.3 * x
    mean, share = np.exp(line), 1 / (1 + np.exp(-line))
    y = {
        "Poisson": lambda: rng.poisson(mean),
        "NegativeBinomial": lambda: rng.poisson(mean * rng.gamma(2.0, 0.5, rows)),
        "Bernoulli": lambda: rng.random(rows) < share,
        "Categorical": lambda: (rng.random(rows) < share) + (rng.random(rows) < 0.4),
        "Gamma": lambda: rng.gamma(3.0, mean / 3),
        "Beta": lambda: rng.beta(1 + 3 * share, 1 + 3 * (1 - share)),
        "LogNormal": lambda: np.exp(line + 0.5 * rng.normal(size=rows)),
        "StudentT": lambda: line + rng.standard_t(4, rows),
    }[family]()
    mechanism = m.Categorical(3) if family == "Categorical" else getattr(m, family)()
    graph = otp.Graph([("h", "x"), ("h", "y"), ("x", "y")], hidden=["h"])
    return otp.Model(graph, {"h": m.Categorical(states), "x": m.Normal(), "y": mechanism}), pd.DataFrame(
        {"x": x, "y": y}, dtype=float
    )


REGRESSIONS = ["Poisson", "NegativeBinomial", "Bernoulli", "Categorical", "Gamma", "Beta", "LogNormal", "StudentT"]


@pytest.mark.slow
@pytest.mark.parametrize("family", REGRESSIONS)
def test_steps_that_a_sample_guides_do_not_raise_the_loss(family):
    along, start = made(partial(behind_a_class, family))
    assert along.updates
    (place,) = (one.place for one in along.unplaced.families if one.node == "y")
    entries = along.unplaced.entries_on_points[place]
    assert entries // row_problem.CURVED_ENTRIES == 3  # as many as there are states
    generator = torch.Generator().manual_seed(0)
    point = start + 0.7 * torch.randn(8, start.shape[1], generator=generator, dtype=torch.float64)
    begin, losses = point, []
    for _ in range(8):
        with torch.no_grad():
            losses.append(along.loss(point).total)
        point = along.update(point)[0].detach()
    assert float(torch.stack(losses).diff(dim=0).max()) < 1e-9
    run = Deterministic().run(Run(along, begin, 6, None, [0] * 8), lambda progress: False)
    assert bool((run.loss < losses[0]).all())


@pytest.mark.parametrize("name", ALL)
def test_updates_and_descent_end_alike(name):
    along, start = made(ALL[name])
    updated = EM(steps=3000, tolerance=1e-12).run(Run(along, start, 3000), lambda progress: False)
    descended = minimise(along.loss, start, steps=400, tolerance=1e-12)
    assert updated.loss.item() == pytest.approx(descended.loss.item(), abs=1e-5)


def test_lines_with_gaps_are_left_to_updates_alone_and_end_where_descent_does():
    along, start = made(lines)
    assert along.updates.suffice
    ended = otp.engine.Deterministic().run(Run(along, start, 400), lambda progress: False)
    descended = minimise(along.loss, start, steps=400, tolerance=1e-13)
    assert bool(ended.converged)
    assert all(name.startswith("mixed.") for name in ended.memory)  # no curvature was learned: nothing descended
    assert ended.loss.item() == pytest.approx(descended.loss.item(), abs=1e-8)


@pytest.mark.parametrize("name", ["tables", "mixed", "counts"])
def test_other_families_are_not_left_to_updates(name):
    assert not made(ALL[name])[0].updates.suffice


@pytest.mark.parametrize("name", EXACT)
def test_updates_follow_the_weights_and_leave_nothing_behind(name):
    along, start = made(EXACT[name])
    doubled = torch.ones(1, ROWS, dtype=torch.float64)
    doubled[:, : ROWS // 2] = 2.0
    before = along.update(start)[0]
    again = along.reweighted(doubled).update(start)[0]
    fresh = made(EXACT[name])[0].reweighted(doubled).update(start)[0]
    torch.testing.assert_close(again, fresh, rtol=0, atol=0)
    torch.testing.assert_close(along.update(start)[0], before, rtol=0, atol=0)
    assert not torch.allclose(before, again, atol=1e-4)


@pytest.mark.parametrize("name", EXACT)
def test_weights_are_repetitions(name):
    often = np.random.default_rng(5).integers(1, 4, ROWS)
    plain, start = made(ALL[name])
    weighted = plain.reweighted(torch.as_tensor(often).double().unsqueeze(0))
    given, _ = made(ALL[name], weights=often)
    repeated, _ = made(ALL[name], rows=np.repeat(np.arange(ROWS), often))
    point = around(start, 1)
    torch.testing.assert_close(given.loss(point).total, weighted.loss(point).total)
    torch.testing.assert_close(weighted.loss(point).total, repeated.loss(point).total)
    torch.testing.assert_close(weighted.update(point)[1].total, weighted.loss(point).total.detach())
    one, other = (problem.naturals(problem.update(point)[0]) for problem in (weighted, repeated))
    for node in one:
        torch.testing.assert_close(one[node], other[node], rtol=1e-6, atol=1e-8)


def test_a_hidden_number_with_a_parent_climbs_by_its_moments():
    """It has no maximiser of its own, for its level is given: Newton's step must see the height at other slopes."""
    rng = np.random.default_rng(4)
    t = rng.normal(size=ROWS)
    u = 0.9 * t + rng.normal(size=ROWS)
    frame = pd.DataFrame({"t": t, "x": 2 * u + rng.normal(size=ROWS), "y": 1 - u + rng.normal(size=ROWS)})
    graph = otp.Graph([("t", "u"), ("u", "x"), ("u", "y"), ("u", "n")], hidden=["u"])
    model = otp.Model(graph, {name: m.Normal() for name in "tuxy"} | {"n": m.Poisson()})
    frame = gappy(frame, rng).assign(n=rng.poisson(np.exp(0.3 * u)))
    along, start = made(lambda: (model, frame))
    assert not has_closed_form(model.structure.mechanisms["u"])
    point = torch.cat([start, start + 0.1])
    losses = []
    for _ in range(12):
        along = along.laid_out_for(point)
        point, terms = along.update(point)
        losses.append(terms.total)
    assert (torch.stack(losses).diff(dim=0) < 1e-6).all()
    slopes = along.naturals(point)["u"]["weight"].flatten() - along.naturals(start)["u"]["weight"].flatten()
    assert (slopes.abs() > 1e-3).all()


def test_newtons_step_of_a_count_without_gaps_doubles_its_digits():
    """Where nothing is missing, an update is a step of Newton's method towards the regression of statsmodels."""
    sm = pytest.importorskip("statsmodels.api")
    model, _ = counts()
    rng = np.random.default_rng(3)
    u = rng.normal(size=ROWS)
    frame = pd.DataFrame({"u": u, "n": rng.poisson(np.exp(0.5 + 0.6 * u))}, dtype=float)
    gaps = frame.copy()
    gaps.iloc[0, 0] = np.nan  # a row that must be summed, then taken away again
    along, point = made(lambda: (model, gaps))
    along = along.subset(torch.arange(1, ROWS))
    for _ in range(6):
        point, _ = along.update(point)
    own = along.structure.mechanisms["n"].describe(along.naturals(point)["n"])
    best = [own["log_rate"].item(), own["weight"].item()]
    u, n = frame["u"].to_numpy()[1:], frame["n"].to_numpy()[1:]
    truth = sm.GLM(n, sm.add_constant(u), family=sm.families.Poisson()).fit(tol=1e-14).params
    np.testing.assert_allclose(best, truth, atol=1e-8)


def test_replicas_are_independent():
    along, start = made(mixed)
    points = around(start)
    apart = torch.cat([along.loss(point).total for point in points.split(1)])
    torch.testing.assert_close(along.loss(points).total, apart)


def test_points_are_moved_only_where_there_are_some():
    exact, start = made(mixed)
    assert exact.refine(start) is None
    assert exact.laid_out_for(start) is exact
    along, start = made(counts)
    moved = along.refine(start + 2.0)
    assert moved.what == "moved grids"
    assert not torch.allclose(moved.problem.loss(start + 2.0).total, along.loss(start + 2.0).total, rtol=1e-6, atol=0)
    finer = moved.problem.refine(start + 2.0)  # the points are there already: so far out there are too few of them
    assert (moved.problem.pace.points_per_row, finer.problem.pace.points_per_row) == (24, 48)
    assert finer.problem.refine(start + 2.0) is None
    assert moved.problem.laid_out_for(start).refine(start) is None  # half of them suffice


def test_rows_that_cannot_be_have_a_finite_loss():
    along, start = made(lines)
    far = start.clone()
    far[:] = torch.nan
    assert (along.unit_losses(far) == WORST_LOSS).any()


def test_parameters_that_are_shared_or_tempered_have_no_updates():
    along, _ = made(tables, Objective(eps=0.5))
    assert along.updates is None
    shared = {name: m.Normal(scale=otp.tie("noise")) for name in "xyw"}
    tied = otp.Model(lines()[0].graph, shared)
    assert made(lambda: (tied, lines()[1]))[0].updates is None


def test_the_information_of_a_table_is_its_counts_times_what_is_left():
    """Where only a leaf has gaps, the other tables' expected counts are plain ones: n p (1 - p) over all rows."""

    def world():
        model, frame = tables()
        whole = frame.fillna({"a": 1.0, "b": 0.0})
        return model, whole

    along, start = made(world)
    _, frame = world()
    found = along.metric(start)
    places = parameter_places(along.shapes)
    key = next(iter(along.structure.keys["b"].values()))
    counts = np.array([[((frame["a"] == a) & (frame["b"] == b)).sum() for b in range(2)] for a in range(2)])
    share = counts / counts.sum(1, keepdims=True)
    expected = np.maximum(counts * (1 - share), 0.1) / ROWS
    np.testing.assert_allclose(found[0, places[key].flatten()], expected.flatten(), rtol=1e-8)
    lines_along, line = made(lines)
    assert lines_along.metric(line) is None


@pytest.mark.parametrize(
    ("objective", "reference", "likelihood", "power"),
    [
        (Objective(eps=1.0), "model", True, 1.0),
        (Objective(eps=0.5), "model", False, 2.0),
        (Objective(reconstruction=2.0, eps=2.0), "model", False, 1.0),
        (Objective(eps=1.0), "uniform", False, 1.0),
        (Objective(reconstruction=3.0, eps=2.0), "model", False, 1.5),
    ],
)
def test_only_at_temperature_one_and_under_the_model_it_is_a_likelihood(objective, reference, likelihood, power):
    along, start = made(tables, objective)
    along = replace(along, closed=ClosedForm(reference=reference))
    assert along.is_likelihood is likelihood
    assert along.is_sum
    assert along.tempering == Tempering(power, uniform=reference == "uniform")
    assert (along.updates is not None) is (along.tempering == Tempering())
    assert (along.metric(start) is not None) is likelihood
    # the loss of every row is told in units of eps, and their mean is the loss
    torch.testing.assert_close(along.unit_losses(start).mean(-1), along.loss(start).total)
    torch.testing.assert_close(along._loss_alone(start), along.loss(start).total)


def counts_of(categories):
    """Counts below a category of so many values: a parameter for each of them, and no maximiser."""
    rng = np.random.default_rng(0)
    k = np.concatenate([np.arange(categories), rng.integers(0, categories, 30)])
    frame = pd.DataFrame({"k": k, "n": rng.poisson(2.0, len(k))}, dtype=float)
    frame.iloc[5, 0] = np.nan
    return otp.Model(otp.Graph([("k", "n")]), {"k": m.Categorical(categories), "n": m.Poisson()}), frame


@pytest.mark.parametrize(("categories", "has"), [(60, True), (61, False)])
def test_updates_take_second_derivatives_of_up_to_sixty_parameters_of_a_node(categories, has):
    along, _ = made(lambda: counts_of(categories))
    assert (along.updates is not None) is has
    assert not (along.updates and along.updates.suffice)


def test_tables_of_any_size_have_updates():
    rng = np.random.default_rng(0)
    sizes = {"a": 5, "b": 4, "c": 4}
    frame = pd.DataFrame({name: rng.integers(0, size, 40) for name, size in sizes.items()}, dtype=float)
    graph = otp.Graph([("a", "c"), ("b", "c")])
    model = otp.Model(graph, {name: m.Categorical(size) for name, size in sizes.items()})
    assert made(lambda: (model, gappy(frame, rng)))[0].updates  # eighty probabilities


def test_points_are_moved_from_where_they_are_or_laid_anew_where_that_is_too_far(monkeypatch):
    along, start = made(counts)
    assert torch.equal(along.placed_for, start)
    fresh = replace(along, placed=along.unplaced, placed_for=None)
    called = []

    def moved(naturals, layout, tempering, *, outgrown):
        called.append("placed" if layout is along.placed else "unplaced" if layout is along.unplaced else "other")
        assert tempering == along.tempering
        return replace(layout, blocks=layout.blocks) if not outgrown else Outgrown()

    class Outgrown:
        is_outgrown = True

    for is_outgrown, expected in ((False, ["placed"]), (True, ["placed", "unplaced"])):
        called.clear()
        monkeypatch.setattr(row_problem, "moved", partial(moved, outgrown=is_outgrown))
        nearby = along.laid_out_for(start + 0.1)
        assert called == expected
        assert torch.equal(nearby.placed_for, start + 0.1)
        assert along.laid_out_for(start) is along
        assert called == expected
        called.clear()
        along.laid_out_for(torch.cat([start, start]))  # of other replicas
        fresh.laid_out_for(start)
        assert called == ["unplaced", "unplaced"]


@pytest.mark.parametrize(
    ("more", "after", "moves"),
    [(0.95e-4, 1.0, False), (1.05e-4, 1.0, True), (-1.05e-4, 1.0, True), (0.0, torch.inf, False)],
)
def test_points_move_as_long_as_that_changes_the_likelihood_of_all_rows(more, after, moves, monkeypatch):
    along, start = made(counts)
    before = 1.0 + more / along.batch.weight.sum().item()
    losses = iter([before, after, before])  # more points would change nothing
    monkeypatch.setattr(
        GraphProblem, "_loss_alone", lambda self, point: torch.tensor([next(losses)], dtype=torch.float64)
    )
    found = along.refine(start + 0.5)
    assert (found is not None) == moves
    if moves:
        assert found.loss.item() == after
        assert torch.equal(found.point, start + 0.5)


def test_parts_and_simulated_rows_are_problems_of_their_own():
    along, start = made(counts)
    assert along.subset(10**6) is along
    assert along.pace.points_per_row == 24  # one number at most in a row, on half its grid
    rows = torch.tensor([3, 40, 7, 22])
    part = along.subset(rows)
    assert (part.rows, part.placed_for) == (4, None)
    again, _ = made(counts, rows=rows.numpy())
    torch.testing.assert_close(part.laid_out_for(start).loss(start).total, again.loss(start).total)
    assert along.subset(17).rows == 17
    drawn = along.simulated(start, 25, 1)
    assert (drawn.rows, drawn.placed_for) == (25, None)
    torch.testing.assert_close(
        drawn.laid_out_for(start).unit_losses(start).mean(-1), drawn.laid_out_for(start).loss(start).total
    )
    assert not torch.equal(along.simulated(start, 25, 2).batch.values["n"], drawn.batch.values["n"])


def test_losses_of_single_rows_are_finite(monkeypatch):
    along, start = made(tables)
    evidence = torch.tensor([[-torch.inf, torch.nan, -2.0] + [0.0] * (ROWS - 3)]).double()
    monkeypatch.setattr(row_problem, "log_evidence", lambda *_: evidence)
    assert along.unit_losses(start)[0, :4].tolist() == [WORST_LOSS, WORST_LOSS, 2.0, 0.0]
    assert WORST_LOSS == 1e12


def test_counts_below_thousands_of_categories_have_the_mean_of_each():
    rng = np.random.default_rng(5)
    level = np.concatenate([np.arange(2000), rng.integers(0, 2000, 4000)])
    count = rng.poisson(np.exp(rng.normal(size=2000))[level])  # none at all of many
    table = pd.DataFrame({"a": level.astype(str), "y": count})
    model = otp.Model(otp.Graph([("a", "y")]), {"a": m.Categorical(2000), "y": m.Poisson()})
    of_level = table.groupby("a")["y"]
    log_prob = stats.poisson.logpmf(count, of_level.transform("mean")) + np.log(of_level.transform("size") / len(table))
    assert otp.fit(model, table, seed=1).loss == pytest.approx(-log_prob.mean(), abs=1e-6)
