"""Units of columns, directions, points of the model and rows, each said once more with numpy, scipy or POT."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import numpy as np
import ot
import pandas as pd
import pytest
import torch
from scipy import optimize, stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.divergences import Sinkhorn, SlicedWasserstein
from otpdag.errors import ModelError
from otpdag.matching.informative import informative_lengths
from otpdag.matching.model_points import lay_out, listed_nodes
from otpdag.matching.transport_rows import SETTLED
from otpdag.settings import Direct, Objective
from otpdag.spaces import Real
from tests.table_problems import point_of, started


def direct(**options):
    return replace(otp.transport(), objective=Objective(reconstruction=0.0, direct=Direct(**options)))


def numpy_rows(problem):
    """Compared rows in the units of the data."""
    return (problem.compared.rows * problem.columns.spread + problem.columns.centre).numpy()


def table_of(problem):
    """Rows in the order in which a problem has them, and their weights."""
    batch = problem.batch
    cells = {n: value[0, :, 0].where(batch.mask[n][0, :, 0], torch.nan).numpy() for n, value in batch.values.items()}
    return pd.DataFrame(cells), batch.weight[0].numpy()


def walk(parents, noise, drift):
    return (drift + noise).cumsum(-1)


# -- units and directions ---------------------------------------------------------------------------------------------


def test_columns_are_in_median_deviations_or_standard_ones_where_most_cells_agree():
    rng = np.random.default_rng(0)
    spread = np.where(rng.random(201) < 0.05, 90.0, rng.normal(3.0, 2.0, 201))
    table = pd.DataFrame({"a": spread, "same": 7.0, "few": np.where(np.arange(201) < 40, 5.0, 1.0), "c": 0})
    table.loc[:20, "a"] = np.nan
    table.loc[::2, "c"] = 1
    nodes = {"a": m.Normal(), "same": m.Normal(scale=1.0), "few": m.Normal(), "c": m.Categorical(2)}
    problem, _ = started(otp.Model(otp.Graph([], nodes=list(table)), nodes), table, otp.transport(points=8))
    columns, seen = problem.columns, np.sort(table["a"].dropna())
    middle = seen[(len(seen) - 1) // 2]
    apart = np.sort(np.abs(seen - middle))[(len(seen) - 1) // 2]
    assert list(columns.places) == list(problem.structure.graph.observed)
    expected = {
        "a": ([middle], [apart * 1.4826]),
        "same": ([7.0], [1.0]),
        "few": ([1.0], [table["few"].std(ddof=0)]),
        "c": ([0.0, 0.0], [np.sqrt(2.0)] * 2),  # two categories are at a distance of one
    }
    for node, (centre, scale) in expected.items():
        np.testing.assert_allclose(columns.centre[columns.places[node]], centre)
        np.testing.assert_allclose(columns.spread[columns.places[node]], scale)


def test_simulated_numbers_count_by_their_normal_scores_unless_a_cost_is_chosen():
    """The scores of scipy, to the width of a line of the curve; a column of few values keeps its units."""
    rng = np.random.default_rng(3)
    table = {"y": rng.lognormal(0.0, 1.5, 2_000), "few": rng.integers(0, 2, 2_000).astype(float)}
    nodes = {
        "y": m.Simulator(lambda parents, noise, a: a + torch.exp(1.5 * noise), {"a": otp.start(0.0)}),
        "few": m.Simulator(lambda parents, noise, a: a + (noise > 0).to(noise), {"a": otp.start(0.0)}),
    }
    model = otp.Model(otp.Graph([], nodes=list(nodes)), nodes)
    scores = stats.norm.ppf((stats.rankdata(table["y"]) - 0.5) / 2_000)
    problem, points = started(model, table, otp.transport())
    order = [problem.columns.places[node].start for node in nodes]
    found = problem.compared.rows[0][:, order].numpy()
    np.testing.assert_allclose(found[:, 0].max(), scores.max(), atol=1e-6)
    np.testing.assert_allclose(np.sort(found[:, 0])[50:-50], np.sort(scores)[50:-50], atol=0.1)
    np.testing.assert_allclose(np.ptp(found[:, 1]), 1 / table["few"].std(), rtol=1e-6)
    assert "of normal scores" in problem.notes(points)[-1]
    plain, points = started(model, table, direct(divergence=SlicedWasserstein(20, p=1.0)))
    assert plain.columns.scores is None
    assert "normal scores" not in str(plain.notes(points))


@pytest.mark.parametrize("windows", [1, 2, 3])
def test_paths_are_compared_by_all_their_windows_beside_what_else_a_row_shows(windows):
    rng = np.random.default_rng(1)
    steps = windows + 2
    y = rng.normal(size=(5, steps)).cumsum(1)
    node = m.Simulator(walk, {"drift": otp.start(0.0)}, Real(steps), noise=steps, path=True)
    table = {"y": y, "x": rng.normal(size=5)}
    model = otp.Model(otp.Graph([], nodes=["x", "y"]), {"x": m.Normal(), "y": node})
    problem, points = started(model, table, direct(points=64), weights=np.array([1.0, 2.0, 0.5, 3.0, 1.5]))
    found = np.column_stack([numpy_rows(problem)[0], problem.compared.weight[0] / problem.compared.weight.sum()])
    expected = [
        [table["x"][row], *y[row, window : window + 3], weight / 8.0 / windows]
        for row, weight in enumerate((1.0, 2.0, 0.5, 3.0, 1.5))
        for window in range(windows)
    ]
    np.testing.assert_allclose(sorted(found.tolist()), sorted(expected))
    lower = partial(np.quantile, q=0.5, method="lower")  # of an even number of values, torch's median is the lower one
    np.testing.assert_allclose(problem.columns.spread[1:], 1.4826 * lower(np.abs(y - lower(y))))
    model, weight = problem.model_side(points)
    points = 64 if windows == 1 else windows * 32  # a path is so many windows, but there are at least 32 paths
    assert model.shape == (1, points, 4)
    np.testing.assert_allclose(weight, 1 / points)


def test_paths_of_other_lengths_are_not_compared():
    y = np.random.default_rng(1).normal(size=(5, 5))
    nodes = {
        name: m.Simulator(walk, {"drift": otp.start(0.0)}, Real(steps), noise=steps, path=True)
        for name, steps in (("x", 4), ("y", 5))
    }
    with pytest.raises(ModelError, match=r"the same number of steps to be compared; got {'x': 4, 'y': 5}"):
        started(otp.Model(otp.Graph([], nodes=["x", "y"]), nodes), {"x": y[:, :4], "y": y}, otp.transport())


def test_directions_are_unit_vectors_each_along_few_nodes_of_one_neighbourhood():
    names = [f"x{i}" for i in range(8)]
    graph = otp.Graph([*((name, "sum") for name in names), ("apart", "c")])
    nodes = {name: m.Normal() for name in (*names, "sum", "apart")} | {"c": m.Categorical(3)}
    rng = np.random.default_rng(2)
    table = pd.DataFrame(rng.normal(size=(30, 10)), columns=[*names, "sum", "apart"]).assign(c=np.arange(30) % 3)
    method = otp.transport(divergence=SlicedWasserstein(40, p=1.0), points=16)
    problem, _ = started(otp.Model(graph, nodes), table, method)
    along = problem.compared.directions.numpy()
    places = problem.columns.places
    np.testing.assert_allclose(np.linalg.norm(along, axis=0), 1.0)
    assert along.shape == (13, 40)
    read = [{node for node, place in places.items() if along[place, k].any()} for k in range(40)]
    assert all(read[k] == {"apart", "c"} or (len(read[k]) == 6 and read[k] <= {*names, "sum"}) for k in range(40))
    assert Counter(len(one) for one in read) == {6: 20, 2: 20}
    assert set.union(*read) == set(places)
    for seed, is_same in ((0, True), (1, False)):
        sliced = SlicedWasserstein(40, p=1.0, seed=seed)
        again, _ = started(otp.Model(graph, nodes), table, otp.transport(divergence=sliced, points=16))
        assert np.array_equal(again.compared.directions, along) == is_same


def test_directions_are_as_long_as_what_they_tell_is_precise():
    """Of one mean in two columns, the rows' median distance counts: closed forms of numbers and of shares."""
    along, none = torch.eye(2, dtype=torch.float64), torch.zeros(1, 2048, dtype=torch.float64)
    even = torch.quasirandom.SobolEngine(2, scramble=True, seed=0).draw(2048, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
    points, weight = torch.special.ndtri(even) * torch.tensor([1.0, 4.0]), torch.full((2048,), 1 / 2048).double()
    moved = torch.ones(1, 2048, 2, dtype=torch.float64)
    narrow, wide = informative_lengths(along, points, weight, moved, none).tolist()
    # A = -f, int f^2 = 1 / (2 sqrt(pi) s), var psi = 1 / 12: no length has a price but evenness, w / (1 - w) below
    bends = np.array([1.0, 0.25]) / (2 * np.sqrt(np.pi))

    def variance(log_ratio):
        w = 2 * stats.logistic.cdf([log_ratio, -log_ratio])
        return np.log((w**2).sum() / 12) - 2 * np.log(w @ bends) - np.log(w).mean()

    best = optimize.minimize_scalar(variance, bounds=(-5, 5), method="bounded").x
    assert np.log(narrow / wide) == pytest.approx(best, abs=0.05)
    assert narrow + wide == pytest.approx(2.0)


def test_a_default_cost_weighs_directions_once_and_is_the_one_that_pot_finds():
    rng = np.random.default_rng(4)
    table = pd.DataFrame({"a": rng.normal(size=150)}).assign(b=lambda own: own["a"] + rng.normal(size=150))
    model = otp.Model(otp.Graph([("a", "b")]), {"a": m.Normal(), "b": m.Normal()})
    problem, points = started(model, table, otp.transport(points=128))
    along = problem.compared.directions.numpy()
    lengths = np.linalg.norm(along, axis=0)
    assert np.ptp(lengths) > 0.05
    assert lengths.mean() == pytest.approx(1.0)
    assert "64 directions, weighed by what they tell" in problem.notes(points)[-1]
    assert problem.laid_out_for(points + 0.1).compared is problem.compared
    (model_side, weight), rows = problem.model_side(points), problem.compared.rows[0].numpy()
    sides = (rows @ along, model_side[0].detach().numpy() @ along)
    costs = ot.wasserstein_1d(*sides, np.full(150, 1 / 150), weight[0].detach().numpy(), p=1)
    assert float(problem.loss(points).total) == pytest.approx(costs.mean(), rel=1e-9)
    for method in (otp.transport(unmatched=0.1), otp.transport(divergence=SlicedWasserstein(9, p=1.0))):
        even, points = started(model, table, method)
        np.testing.assert_allclose(np.linalg.norm(even.compared.directions.numpy(), axis=0), 1.0)
        assert "weighed" not in str(even.notes(points))


@pytest.mark.parametrize(("rows", "number", "name"), [(1024, False, "Sinkhorn"), (1025, False, "W1"), (50, True, "W1")])
def test_few_rows_of_categories_are_compared_as_a_whole_and_all_else_along_directions(rows, number, name):
    rng = np.random.default_rng(3)
    pairs = rng.permutation(36 * 36)[:rows]
    table = pd.DataFrame({"a": pairs // 36, "b": rng.normal(size=rows) if number else pairs % 36})
    nodes = {"a": m.Categorical(36), "b": m.Normal() if number else m.Categorical(36)}
    problem, points = started(otp.Model(otp.Graph([("a", "b")]), nodes), table, direct(states=36 * 36))
    assert problem.compared.name.startswith(name)
    (note,) = [one for one in problem.notes(points) if "transport cost is" in one]
    assert note == f"the transport cost is {problem.compared.name}, to {problem.points.size:,} points of the model"
    model, weight = problem.model_side(points)
    if name == "Sinkhorn":
        expected = Sinkhorn(0.3)(problem.compared.rows, model, problem.compared.weight, weight)
        torch.testing.assert_close(problem.loss(points).total, expected)


# -- points of the model ----------------------------------------------------------------------------------------------


def test_points_lie_evenly_in_all_noise_and_cover_covariates_by_weight():
    rng = np.random.default_rng(4)
    rows = 12
    table = pd.DataFrame({"g": np.arange(rows) * 1.0, "x": rng.normal(size=rows), "s": rng.normal(size=rows)})
    weights = rng.uniform(0.2, 3.0, rows)
    graph = otp.Graph([("z", "x"), ("g", "x")], nodes=["s"], hidden=["z"])
    nodes = {"z": m.Categorical(3), "g": m.Given(), "x": m.Normal(), "s": m.StudentT()}
    problem, _ = started(otp.Model(graph, nodes), table, direct(points=3 * 256), weights=weights)
    points = problem.points
    assert points.size == 3 * 256
    np.testing.assert_array_equal(points.listed["z"][0], np.repeat(np.eye(3), 256, axis=0))
    given = points.given["g"][0, :, 0].numpy().reshape(3, 256)
    assert (given == given[0]).all()  # the same rows in every state
    for row in range(rows):
        assert abs((given[0] == row).sum() - 256 * weights[row] / weights.sum()) < 1.0 + 1e-9
    assert (np.diff(given[0]) < 0).mean() > 0.2  # in no order, so that no noise goes with them
    for node, law in (("x", stats.norm), ("s", stats.uniform)):
        noise = points.noise[node][0, :, 0].numpy()
        assert stats.kstest(noise, law.cdf).statistic < 3e-3  # of independent draws about 0.03
    scores = [stats.norm.cdf(points.noise["x"][0, :, 0]), points.noise["s"][0, :, 0].numpy()]
    assert abs(np.corrcoef(scores)[0, 1]) < 0.01


@pytest.mark.parametrize(("most", "expected"), [(2, ["z"]), (6, ["z", "b"]), (29, ["z", "b"]), (30, ["z", "b", "a"])])
def test_hidden_categories_are_listed_first_as_long_as_states_are_few(most, expected):
    graph = otp.Graph([("b", "a"), ("b", "z"), ("z", "x")], hidden=["z"])
    nodes = {"b": m.Categorical(3), "a": m.Categorical(5), "z": m.Categorical(2), "x": m.Normal()}
    assert listed_nodes(otp.Model(graph, nodes).structure, most) == expected


def test_drawn_points_count_by_how_much_likelier_they_became():
    rng = np.random.default_rng(5)
    table = pd.DataFrame({"x": rng.normal(size=50), "n": rng.poisson(3.0, 50)})
    model = otp.Model(otp.Graph([("x", "n")]), {"x": m.Normal(), "n": m.Poisson()})
    problem, points = started(model, table, direct(points=128), replicas=2)
    assert problem.points.must_be_drawn == ("n",)
    drawn = problem.points.drawn["n"][..., 0].numpy()
    moved = points + torch.as_tensor(rng.normal(0.0, 0.1, points.shape))
    shares = []
    for replica in range(2):
        logs = []
        for at in (points, moved):
            own, x_own = (problem.naturals(at)[node] for node in ("n", "x"))
            x = x_own["loc"][replica].numpy() + x_own["scale"][replica].numpy() * problem.points.noise["x"][0].numpy()
            rate = np.exp(own["log_rate"][replica].item() + own["weight"][replica].item() * x[:, 0])
            logs.append(stats.poisson.logpmf(drawn[replica], rate.ravel()))
        weight = np.exp(logs[1] - logs[0])
        weight /= weight.sum()
        shares.append(1 / (weight**2).sum() / 128)
        np.testing.assert_allclose(problem.model_side(moved)[1][replica], weight, rtol=1e-9)
    assert problem.points.effective(problem.naturals(moved)) == pytest.approx(min(shares))
    assert min(shares) < max(shares) < 1.0


def test_the_metric_of_categories_is_their_fisher_information_and_of_a_mean_its_unit():
    rng = np.random.default_rng(6)
    table = pd.DataFrame({"x": rng.normal(2.0, 3.0, 60), "c": rng.integers(0, 3, 60)})
    model = otp.Model(otp.Graph([], nodes=["x", "c"]), {"x": m.Normal(), "c": m.Categorical(3)})
    problem, _ = started(model, table, direct(points=3 * 512))
    probs, columns = np.array([0.5, 0.3, 0.2]), len(problem.columns.spread)
    point = point_of(problem, {"x": {"loc": 2.0, "scale": 3.0}, "c": {"probs": probs}})
    metric = problem.metric(point)[0].numpy()
    leaf = point.clone().requires_grad_(True)
    rows = [torch.autograd.functional.jacobian(lambda at, n=n, v=v: problem.naturals(at)[n][v].flatten(), leaf)
            for n, v in (("c", "probs"), ("x", "loc"), ("x", "scale"))]  # fmt: skip
    by_prob, by_loc, by_scale = (one[:, 0].numpy() for one in rows)
    fisher = by_prob.T @ np.diag(1 / probs) @ by_prob
    unit = float(problem.columns.spread[0])
    moved = (by_loc.T @ by_loc + by_scale.T @ by_scale) / unit**2 / columns  # standard normal noise: E[1, u; u, u^2]
    np.testing.assert_allclose(metric, fisher + moved, atol=2e-3)
    assert problem.metric(torch.cat([point, point])) is None


def test_costs_of_many_places_are_their_losses_and_infinite_where_there_is_none():
    rng = np.random.default_rng(7)
    table = pd.DataFrame({"x": rng.normal(size=30)})
    node = m.Simulator(lambda parents, noise, a: torch.log(a + 3.0) + noise, {"a": otp.start(0.0)})
    problem, points = started(otp.Model(otp.Graph([], nodes=["x"]), {"x": node}), table, direct(points=64))
    places = points + torch.linspace(-4.0, 2.0, 7)[:, None].double()
    found = problem.cost_at(places, at_once=3)
    assert torch.isinf(found[0])
    for place, cost in zip(places[2:], found[2:], strict=True):
        assert cost.item() == pytest.approx(float(problem.loss(place[None]).total))
    assert not problem.contradicts_slopes(points)
    assert problem.pace.steps is None
    assert replace(problem, jumps=True).pace.steps is None
    anywhere = m.Simulator(node.function, {"a": None}, bounds={"a": (-2, 2)})
    searched, _ = started(otp.Model(otp.Graph([], nodes=["x"]), {"x": anywhere}), table, direct(points=64))
    assert searched.pace.steps is None
    assert replace(searched, jumps=True).pace.steps == 5  # where places were looked through before
    with pytest.raises(ModelError, match="node 'x': 100% of its simulated values are not finite"):
        problem.check_simulated(places[:1])
    problem.check_simulated(points)


@pytest.mark.parametrize("window", [False, True])
def test_a_coarse_part_has_fewer_rows_points_and_directions(window):
    rng = np.random.default_rng(8)
    node = m.Simulator(walk, {"drift": otp.start(0.0)}, Real(6), noise=6, path=True) if window else m.Normal(6)
    table = {"y": rng.normal(size=(40, 6))}
    model = otp.Model(otp.Graph([], nodes=["y"]), {"y": node})
    problem, _ = started(model, table, direct(divergence=SlicedWasserstein(20, p=1.0), points=1500))
    size = problem.points.size
    for coarse in (False, True):
        part = problem.subset(10, coarse=coarse)
        assert part.rows == 10
        assert part.points.size == size // (4 if coarse else 1)
        assert part.compared.directions.shape[1] == (5 if coarse and window else 20)
        assert part.jumps == problem.jumps
    own = problem.subset(torch.tensor([3, 5]))
    rows = (own.compared.rows * own.columns.spread + own.columns.centre).numpy()[0]
    np.testing.assert_allclose(rows.reshape(2, -1)[:, 0], problem.batch.values["y"][0, [3, 5], 0])


# -- rows with gaps ---------------------------------------------------------------------------------------------------


def pair_with_gaps(rows=60):
    rng = np.random.default_rng(9)
    x = rng.normal(size=rows)
    table = pd.DataFrame({"x": x, "y": 1.0 + 2.0 * x + rng.normal(size=rows)})
    table.loc[: rows // 4, "y"] = np.nan
    table.loc[rows - 2 :, "x"] = np.nan
    return otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()}), table


def pair_point(problem, slope, scale=0.5):
    return point_of(problem, {"x": {"loc": 0.5, "scale": 1.5}, "y": {"loc": 1.0, "weight": [[slope]], "scale": scale}})


def test_gaps_are_filled_with_evenly_spread_draws_of_each_replicas_own_law():
    model, table = pair_with_gaps()
    weights = np.random.default_rng(10).uniform(0.5, 2.0, len(table))
    problem, _ = started(model, table, direct(points=64, draws=200), weights=weights)
    table, weights = table_of(problem)
    slopes = (2.0, -1.0)
    refined = problem.refine(torch.cat([pair_point(problem, slope) for slope in slopes]))
    assert refined.what == "completed rows"
    rows, weight = numpy_rows(refined.problem), refined.problem.compared.weight[0].numpy()
    seen = ~table.isna().any(axis=1).to_numpy()
    whole, gaps = np.flatnonzero(seen), np.flatnonzero(~seen)
    np.testing.assert_allclose(weight, [*(200 * weights[whole]), *np.repeat(weights[gaps], 200)])
    for replica, slope in enumerate(slopes):
        np.testing.assert_allclose(rows[replica, : len(whole)], table.iloc[whole])
        for row, drawn in zip(gaps, rows[replica, len(whole) :].reshape(len(gaps), 200, 2), strict=True):
            x, y = table.iloc[row]
            if np.isnan(y):
                law, cells = stats.norm(1.0 + slope * x, 0.5), drawn[:, 1]
                np.testing.assert_allclose(drawn[:, 0], x)
            else:  # the conjugate posterior of a normal mean
                precision = 1 / 1.5**2 + (slope / 0.5) ** 2
                mean = (0.5 / 1.5**2 + slope * (y - 1.0) / 0.5**2) / precision
                law, cells = stats.norm(mean, precision**-0.5), drawn[:, 0]
                np.testing.assert_allclose(drawn[:, 1], y)
            assert stats.kstest(cells, law.cdf).statistic < 0.02  # of independent draws about 0.06


def test_rows_are_completed_until_that_changes_the_estimate_no_more():
    model, table = pair_with_gaps()
    problem, _ = started(model, table, direct(points=64))
    at = pair_point(problem, 2.0)
    completed = problem.refine(at).problem
    assert completed.pace.refinements == 30
    assert problem.refine(at).loss is None  # of other rows: it does not compare with the losses before
    few = 1 / np.sqrt(len(table))
    for change, goes_on in ((0.9 * SETTLED * few, False), (1.1 * SETTLED * few, True)):
        again = completed.refine(at + change)
        assert (again is not None) == goes_on
    anew, near = again.problem.compared.rows, problem.refine(again.point).problem.compared.rows
    torch.testing.assert_close(anew, near)
    both = completed.refine(torch.cat([at, at + 1.0]))  # one of two replicas goes on, and both with it
    assert both is not None
    complete, points = started(model, table.dropna(), direct(points=64))
    assert complete.refine(points) is None
    assert complete.pace.refinements == 0


def test_what_is_matched_of_a_row_with_gaps_is_the_mean_of_its_draws():
    model, table = pair_with_gaps()
    table.loc[20:22] = [-7.0, 9.0]
    problem, _ = started(model, table, direct(points=128, unmatched=0.08))
    table, _ = table_of(problem)
    apart = (table["x"] == -7.0).to_numpy()
    at = pair_point(problem, 2.0)
    completed = problem.refine(at).problem
    parts, seen = completed.matching.parts[0].numpy(), ~table.isna().any(axis=1).to_numpy()
    found = completed.matched_parts(at).numpy()
    np.testing.assert_allclose(found[seen], parts[: seen.sum()])
    np.testing.assert_allclose(found[~seen], parts[seen.sum() :].reshape(-1, 4).mean(1))
    assert found[apart].max() < 0.3 < 0.9 < np.median(found)
    assert completed.matching.share.item() == pytest.approx(1 - 0.08, abs=0.02)
    torch.testing.assert_close(completed.compared.weight, problem._every_row(at).weight * completed.matching.parts)
    chosen = completed.explained(at, torch.tensor([0.08]))[0].numpy()
    assert not chosen[apart].any()
    assert chosen.mean() > 0.9


@pytest.mark.parametrize("foreign", [0.05, 0.1, 0.15])
def test_the_least_share_to_leave_out_is_that_of_foreign_rows_and_a_little(foreign):
    """On average over tables; of the rows of the model's own, a part goes with all that are foreign."""
    found = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=400)
        table = pd.DataFrame({"x": x, "y": 1.0 + x + 0.5 * rng.normal(size=400)})
        table.iloc[: int(400 * foreign)] = rng.normal([3.0, -2.0], 0.1, (int(400 * foreign), 2))
        model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
        problem, _ = started(model, table, otp.transport(unmatched="auto", points=256))
        y = {"loc": 1.0, "weight": [[1.0]], "scale": 0.5}
        truth = point_of(problem, {"x": {"loc": 0.0, "scale": 1.0}, "y": y})
        found.append(problem.left_out(truth))
    parts = problem.partial(truth).parts
    np.testing.assert_allclose(1 - parts.mean(-1), found[-1][1], atol=0.01)
    least, all_of_it = np.mean([[float(one) for one in pair] for pair in found], axis=0)
    assert foreign < least < foreign + 0.03
    assert 0.03 < all_of_it - least < 0.1


def test_where_no_density_fills_gaps_directions_have_the_rows_that_show_them():
    rng = np.random.default_rng(11)
    table = pd.DataFrame({"x": rng.normal(size=40), "y": rng.normal(size=40), "w": rng.normal(size=40)})
    table["v"] = rng.normal(size=40)
    table = table.mask(rng.random(table.shape) < 0.3)
    weights = rng.uniform(0.5, 2.0, 40)
    node = m.Simulator(lambda parents, noise, a: a * parents["x"] + noise, {"a": otp.start(0.5)})
    graph = otp.Graph([("x", "y"), ("y", "w"), ("w", "v")])
    nodes = {"x": m.Normal(), "y": node, "w": m.Normal(), "v": m.Normal()}
    model = otp.Model(graph, nodes)
    method = direct(divergence=SlicedWasserstein(30, p=1.0), points=64)
    problem, points = started(model, table, method, weights=weights)
    (points_of_model,), (mass,) = problem.model_side(points)
    centre, spread = problem.columns.centre.numpy(), problem.columns.spread.numpy()
    costs = []
    for along in problem.compared.directions.numpy().T:
        read = np.flatnonzero(along)
        shown = ~table.iloc[:, read].isna().any(axis=1).to_numpy()
        rows = ((table.to_numpy() - centre) / spread)[shown][:, read] @ along[read]
        own = weights[shown] / weights[shown].sum()
        costs.append(ot.wasserstein_1d(rows, points_of_model.detach().numpy() @ along, own, mass.detach().numpy(), p=1))
    assert problem.loss(points).total.item() == pytest.approx(np.mean(costs), rel=1e-9)
    missing = int(table.isna().any(axis=1).sum())
    assert any(
        note.startswith(f"{missing} rows with gaps were compared by what they show") for note in problem.notes(points)
    )
    assert problem.pace.refinements == 0
    with pytest.raises(ModelError, match="unmatched leaves out whole rows"):
        started(model, table, direct(unmatched=0.1))
    apart = table["y"].isna()
    some, _ = started(model, table.assign(v=np.where(apart, 1.0, np.nan)), method)
    assert some.compared.directions.shape[1] == 15  # of y with x and w, none of w with y and v
    with pytest.raises(ModelError, match="no row shows 'x', 'y', 'w' together"):
        started(model, table.assign(w=np.where(apart, 1.0, np.nan)), method)


# -- windows of sequences ---------------------------------------------------------------------------------------------


def hidden_markov(emission, states=2):
    return otp.Model(
        otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"]), {"z": m.Categorical(states), "x": emission}
    )


@pytest.mark.parametrize(("states", "longest", "length"), [(2, 9, 3), (10, 9, 3), (11, 9, 2), (33, 9, 1), (2, 2, 2)])
def test_windows_are_as_long_as_paths_of_states_are_few_and_sequences_long(states, longest, length):
    series = np.random.default_rng(12).normal(size=(4, longest))
    problem, points = started(hidden_markov(m.Normal(), states), series, direct(points=64))
    assert problem.paths.tolist() == list(map(list, product(range(states), repeat=length)))
    each = problem.points[0].size // states**length
    assert each == max(1, 2 ** round(np.log2(max(1, 64 // states**length))))
    values = problem.points[0].given["z"][0].argmax(-1)
    np.testing.assert_array_equal(values, np.repeat(problem.paths[:, 0].numpy(), each))
    assert torch.isfinite(problem.loss(points).total).all()


def test_the_law_of_a_late_window_is_the_chains_own_and_weights_of_sequences_count():
    rng = np.random.default_rng(13)
    series, weights = rng.normal(size=(3, 90)), np.array([1.0, 3.0, 0.5])
    problem, points = started(hidden_markov(m.Normal()), series, direct(points=64), weights=weights)
    naturals = problem.naturals(points)
    begun, moves = naturals["z[0]"]["probs"][0, 0].numpy(), naturals["z"]["probs"][0].numpy()
    law, laws = begun, []
    for _ in range(88):
        laws.append(law)
        law = law @ moves
    (stratum,) = problem.strata
    np.testing.assert_allclose(stratum.times, 1 / 88)
    assert stratum.share == pytest.approx(88 / 90)
    standard = (series - float(problem.columns.centre)) / float(problem.columns.spread)
    windows = np.lib.stride_tricks.sliding_window_view(standard, 3, axis=1).reshape(-1, 3)
    flat, own = stratum.compared.rows[0].numpy(), stratum.compared.weight[0].numpy()
    found = np.column_stack([flat, own / own.sum()])
    expected = np.column_stack([windows, np.repeat(weights / weights.sum() / 88, 88)])
    np.testing.assert_allclose(sorted(found.tolist()), sorted(expected.tolist()))
    first = problem.paths[:, 0].numpy()
    along = [np.prod([moves[i, j] for i, j in pairwise(path)]) for path in problem.paths.tolist()]
    each = problem.points[0].size // len(first)
    mass = np.repeat(np.mean(laws, 0)[first] * along, each) / each
    model = torch.cat([problem.columns.of_values(one.at(naturals)[0]) for one in problem.points], -1)[0].numpy()
    costs = [
        ot.wasserstein_1d(flat @ v, model @ v, own / own.sum(), mass, p=1)
        for v in stratum.compared.directions.numpy().T
    ]
    assert problem.loss(points).total.item() == pytest.approx(stratum.share * np.mean(costs), rel=1e-8)


def test_of_many_windows_random_ones_are_sorted_and_a_part_has_fewer():
    rng = np.random.default_rng(14)
    series = rng.normal(size=(30, 700)).cumsum(1)
    problem, points = started(hidden_markov(m.Normal()), series, direct(points=64))
    first, later = problem.strata
    assert len(first.compared.rows[0]) == 30
    assert len(later.compared.rows[0]) == 20_000
    assert (np.flatnonzero(later.times) == range(1, 698)).all()
    assert problem.notes(points) == () == problem.notes()
    assert problem.refine(points) is None
    part = problem.subset(7000)
    assert 7000 <= part.rows <= 7250  # whole pieces of at least 250 steps
    assert part.points[0].size == 64
    assert problem.subset(7000, coarse=True).points[0].size == 16


def test_counts_of_windows_are_drawn_at_the_estimate():
    rng = np.random.default_rng(15)
    problem, points = started(hidden_markov(m.Poisson()), rng.poisson(4.0, (12, 8)) * 1.0, direct(points=64))
    at = points + 0.3
    refined = problem.refine(at)
    assert refined.what == "drawn points"
    assert all(one.effective(problem.naturals(at)) == pytest.approx(1.0) for one in refined.problem.points)
    torch.testing.assert_close(refined.loss, refined.problem.loss(at).total)
    for options in ({"unmatched": 0.1}, {"costs": {"x": "0/1"}, "divergence": Sinkhorn(0.1)}):
        with pytest.raises(ModelError, match="costs and unmatched are of tables"):
            started(hidden_markov(m.Normal()), rng.normal(size=(4, 9)), direct(**options))


# -- both sides of Theorem 1 ------------------------------------------------------------------------------------------


def test_the_backward_side_is_the_plan_of_pots_over_the_best_noise_of_each_pair():
    rng = np.random.default_rng(16)
    table = pd.DataFrame({"c": [0, 1, 0, 1, 1, 0, 0, 0], "t": rng.standard_t(4, 8), "x": rng.normal(size=8)})
    graph = otp.Graph([("c", "t"), ("t", "x")])
    model = otp.Model(graph, {"c": m.Categorical(2), "t": m.StudentT(df=5.0), "x": m.Normal()})
    result = otp.fit(model, table)
    params = {
        "c": {"probs": [0.4, 0.6]},
        "t": {"loc": [-0.5, 1.0], "scale": [0.7, 1.2]},
        "x": {"loc": 0.2, "weight": [0.8], "scale": 0.6},
    }
    model.set_params(params)
    told = result.transport(table, etas=(0.5, 4.0))
    problem, _ = started(model, table, direct(points=8))
    spread = problem.columns.spread.numpy()[2:]
    points = lay_out(model.structure, problem.batch, Direct(points=8), 0)
    noise = np.column_stack([stats.norm.ppf(points.noise["t"][0, :, 0].numpy()), points.noise["x"][0, :, 0].numpy()])
    states = points.listed["c"][0].argmax(-1).numpy()

    def made(state, scores):
        t = params["t"]["loc"][state] + params["t"]["scale"][state] * stats.t.ppf(stats.norm.cdf(scores[0]), 5.0)
        return t, 0.2 + 0.8 * t + 0.6 * scores[1]

    def cost(row, state, scores):
        t, x = made(state, scores)
        return (row.c != state) + ((row.t - t) / spread[0]) ** 2 + ((row.x - x) / spread[1]) ** 2

    rows, mass = list(table.itertuples()), np.array([0.4, 0.6])[states] / 4
    direct_cost = np.array([[cost(row, state, own) for state, own in zip(states, noise, strict=True)] for row in rows])
    expected = ot.emd2(np.full(8, 1 / 8), mass, direct_cost)
    np.testing.assert_allclose(told["direct"], expected, rtol=1e-6)

    def least(row, state, own, eta):
        return optimize.minimize(lambda w: cost(row, state, w) + eta * ((w - own) ** 2).sum(), own).fun

    for eta, backward in told["backward"].items():
        best = [[least(row, state, own, eta) for state, own in zip(states, noise, strict=True)] for row in rows]
        assert backward == pytest.approx(ot.emd2(np.full(8, 1 / 8), mass, np.array(best)), rel=1e-4)
