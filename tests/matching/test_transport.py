"""Transport costs between data and model: against POT, against brute force, and as estimates."""

from dataclasses import replace

import numpy as np
import ot
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.costs import Euclidean
from otpdag.divergences import Sinkhorn, SlicedWasserstein, Wasserstein
from otpdag.divergences.sliced import Quantiles
from otpdag.errors import ModelError
from otpdag.matching.model_points import lay_out
from otpdag.matching.transport_cost import ComparedRows, neighbourhoods
from otpdag.settings import Direct
from tests.table_problems import started

SLOPES, NOISE = np.array([1.0, 0.9, 0.8, 0.7]), 0.6


def factor_model():
    graph = otp.Graph([("f", f"x{i}") for i in range(4)], hidden=["f"])
    return otp.Model(graph, {"f": m.Normal(loc=0.0, scale=1.0)} | {f"x{i}": m.Normal() for i in range(4)})


def factor_table(rows, rng, outliers=0.0):
    values = rng.normal(size=(rows, 1)) * SLOPES + NOISE * rng.normal(size=(rows, 4))
    spoilt = rng.random(rows) < outliers
    values[spoilt] = rng.uniform(-12.0, 12.0, (int(spoilt.sum()), 4))
    return pd.DataFrame(values, columns=[f"x{i}" for i in range(4)])


def factor_estimates(table, method):
    """Slopes and noise (2, 4)."""
    model = factor_model()
    assert otp.fit(model, table, method=method, seed=0).status.converged
    own = [model.params()[f"x{i}"] for i in range(4)]
    return np.array([[abs(float(np.squeeze(one[name]))) for one in own] for name in ("weight", "scale")])


def mixed_model():
    graph = otp.Graph([("z", "x"), ("z", "n"), ("x", "n"), ("z", "c")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal(), "n": m.Poisson(), "c": m.Categorical(3)})


def mixed_table(rows, rng):
    z = rng.integers(0, 2, rows)
    x = rng.normal(np.where(z == 1, 2.0, -2.0), 0.8)
    c = np.where(rng.random(rows) < 0.8, z, 2)
    return pd.DataFrame({"x": x, "n": rng.poisson(np.exp(1.0 + 0.5 * z + 0.1 * x)), "c": c})


# -- the cost ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1.0, 2.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_objective_is_the_sliced_cost_that_pot_finds(p, weighted):
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 4, 80).astype(float) if weighted else None
    method = otp.transport(divergence=SlicedWasserstein(15, p=p), points=60)
    problem, points = started(mixed_model(), mixed_table(80, rng), method, 2, weights=weights)
    found, (model, weight) = problem.loss(points).total, problem.model_side(points)
    rows, mass = problem.compared.rows[0].numpy(), problem.compared.weight[0].numpy()
    for replica in range(2):
        costs = [
            ot.wasserstein_1d(
                rows @ along, model[replica].numpy() @ along, mass / mass.sum(), weight[replica].numpy(), p=p
            )
            for along in problem.compared.directions.numpy().T
        ]
        assert found[replica].item() == pytest.approx(np.mean(costs), rel=1e-9)


def test_an_exact_cost_is_that_of_pot():
    rng = np.random.default_rng(1)
    method = otp.transport(divergence=Wasserstein(), points=64)
    problem, points = started(factor_model(), factor_table(50, rng), method, 2)
    found, (model, weight) = problem.loss(points).total, problem.model_side(points)
    for replica in range(2):
        costs = ot.dist(problem.compared.rows[0].numpy(), model[replica].numpy())
        expected = ot.emd2(np.full(50, 1 / 50), weight[0].numpy(), costs)
        assert found[replica].item() == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_costs_along_directions_have_the_gradients_that_differences_show(p):
    generator = torch.Generator().manual_seed(2)
    along, points = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((1, 3, 31), (2, 3, 12)))
    logits = torch.randn(2, 12, generator=generator, dtype=torch.float64)
    quantiles = Quantiles.of(along, torch.ones(1, 31, dtype=torch.float64))

    def cost(points, logits):
        return quantiles.cost(points, torch.softmax(logits, -1), p)

    leaves = [value.requires_grad_(True) for value in (points, logits)]
    assert torch.autograd.gradcheck(cost, leaves, eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_many_rows_are_kept_as_means_between_levels(p):
    rng = np.random.default_rng(3)
    rows, points = rng.normal(size=(1, 2, 20_000)), rng.normal(size=(1, 2, 500))
    quantiles = Quantiles.of(torch.as_tensor(rows), torch.ones(1, 20_000).double())
    found = quantiles.cost(torch.as_tensor(points), torch.full((1, 500), 1 / 500).double(), p)
    expected = [float(ot.wasserstein_1d(rows[0, k], points[0, k], p=p)) for k in range(2)]
    np.testing.assert_allclose(found[0], expected, rtol=2e-3)


def test_fractional_weights_are_shares_of_levels():
    along, weight = torch.tensor([[[5.0, 0.0, 1.0]]]).double(), torch.tensor([[1.25, 0.25, 0.5]]).double()
    found = Quantiles.of(along, weight).cost(torch.tensor([[[2.0]]]).double(), torch.ones(1, 1).double(), 1.0)
    assert found.item() == pytest.approx((0.25 * 2 + 0.5 * 1 + 1.25 * 3) / 2.0, rel=1e-12)


def test_neighbourhoods_hold_families_and_siblings_once():
    graph = otp.Graph([("h", "a"), ("h", "b"), ("a", "c"), ("c", "d"), ("e", "d")], hidden=["h"])
    model = otp.Model(graph, {node: m.Normal() for node in "habcde"})
    found = [set(group) for group in neighbourhoods(model.structure)]
    assert sorted(map(sorted, found)) == [["a", "b"], ["a", "c", "d"], ["c", "d", "e"]]


@pytest.mark.parametrize(
    "divergence", [SlicedWasserstein(p=1.0), Wasserstein(cost=Euclidean())], ids=["sliced", "exact"]
)
def test_partial_transport_is_that_of_pot(divergence):
    rng = np.random.default_rng(5)
    rows, points = rng.normal(size=(100, 1)), rng.normal(size=(80, 1))
    rows[:10] = rng.normal(5.0, 0.1, size=(10, 1))
    compared = ComparedRows(
        torch.tensor(rows)[None], torch.ones(1, 100).double(), divergence, torch.ones(1, 1).double()
    )
    weight, cost = torch.full((1, 80), 1 / 80).double(), ot.dist(rows, points, metric="euclidean")
    found = compared.matched(torch.tensor(points)[None], weight, torch.tensor([0.15]).double(), rounds=100)
    expected = ot.partial.partial_wasserstein2(np.full(100, 0.01), np.full(80, 0.85 / 80), cost, m=0.85 - 1e-12)
    assert found.total.item() == pytest.approx(expected, rel=0.03)
    assert found.total.item() > expected - 1e-9


UNBALANCED = Sinkhorn(0.1, relative=False, unbalanced=1.0)


@pytest.mark.parametrize(
    "chosen", [{"unmatched": 0.12}, {"unmatched": "auto"}, {"divergence": UNBALANCED, "points": 256}], ids=str
)
def test_rows_of_a_tight_cluster_stay_unmatched(chosen):
    rng = np.random.default_rng(6)
    x = rng.normal(size=500)
    table = pd.DataFrame({"x": x, "y": 1.0 + x + 0.5 * rng.normal(size=500)})
    table.iloc[:50] = rng.normal([3.0, -2.0], 0.1, size=(50, 2))
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    result = otp.fit(model, table, method=otp.transport(**chosen), seed=0)
    assert set(range(50)) <= set(result.unmatched)
    assert len(result.unmatched) < 75
    found = [float(np.squeeze(model.params()["y"][name])) for name in ("loc", "weight", "scale")]
    np.testing.assert_allclose(found, [1.0, 1.0, 0.5], atol=0.12)


def test_costs_of_nodes_are_summed_and_wrong_ones_named():
    rng = np.random.default_rng(7)
    method = otp.transport(divergence=Wasserstein(), points=32, costs={"n": "0/1", "x": "absolute"})
    problem, points = started(mixed_model(), mixed_table(40, rng), method)
    (model, weight), rows = problem.model_side(points), problem.compared.rows[0].numpy()
    model = model[0].numpy()
    costs = np.abs(rows[:, None, 0] - model[None, :, 0]) + (rows[:, None, 1] != model[None, :, 1])
    costs = costs + ((rows[:, None, 2:] - model[None, :, 2:]) ** 2).sum(-1)
    expected = ot.emd2(np.full(40, 1 / 40), weight[0].numpy(), costs)
    assert problem.loss(points).total.item() == pytest.approx(float(expected), rel=1e-9)
    with pytest.raises(ModelError, match="cost of node 'n' must be one of 'squared', 'absolute', '0/1'; got 'same'"):
        started(mixed_model(), mixed_table(40, rng), otp.transport(costs={"n": "same"}))
    with pytest.raises(ModelError, match="costs names node 'z', which is not observed"):
        started(mixed_model(), mixed_table(40, rng), otp.transport(costs={"z": "0/1"}))


# -- points of the model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("states", [1, 256])
def test_weighted_points_have_the_models_means_also_at_other_parameters(states):
    """Listed or drawn: means over points are expectations, where points were drawn and nearby."""
    rng = np.random.default_rng(4)
    problem, point = started(mixed_model(), mixed_table(300, rng), otp.transport())
    points = lay_out(problem.structure, problem.batch, Direct(points=8192, states=states), seed=1)
    placed = points.placed_at(problem.naturals(point))
    assert bool(placed.listed) == (states > 1)
    for moved in (point, point + 0.1):
        naturals = problem.naturals(moved)
        values, log_weight = placed.at(naturals)
        weight = torch.softmax(log_weight, -1).unsqueeze(-1)
        probs = naturals["z"]["probs"][0].flatten()
        mean = (weight * values["x"]).sum(1).item()
        assert mean == pytest.approx(float(probs @ naturals["x"]["loc"][0].flatten()), abs=0.02)
        torch.testing.assert_close(
            (weight * values["c"]).sum(1)[0], probs @ naturals["c"]["probs"][0], atol=0.01, rtol=0
        )
    assert placed.effective(problem.naturals(point)) == pytest.approx(1.0)
    assert 0.5 < placed.effective(problem.naturals(point + 0.1)) < 1.0


# -- estimates of tables ----------------------------------------------------------------------------------------------


def test_a_right_model_is_estimated_nearly_as_by_maximum_likelihood():
    table = factor_table(1500, np.random.default_rng(5))
    likely, transported = (factor_estimates(table, method) for method in ("likelihood", "transport"))
    np.testing.assert_allclose(transported, likely, atol=0.08)


def test_outlying_rows_move_transport_less_than_likelihood():
    table = factor_table(1000, np.random.default_rng(6), outliers=0.1)
    truth = np.stack([SLOPES, np.full(4, NOISE)])
    likely, transported = (
        np.abs(factor_estimates(table, method) - truth).mean() for method in ("likelihood", "transport")
    )
    assert transported < 0.4 * likely


def test_categories_and_counts_are_estimated_with_what_is_hidden():
    model = mixed_model()
    result = otp.fit(model, mixed_table(1200, np.random.default_rng(7)), method="transport", seed=0)
    params = model.params()
    assert result.status.converged
    np.testing.assert_allclose(np.sort(params["x"]["loc"]), [-2.0, 2.0], atol=0.15)
    np.testing.assert_allclose(params["x"]["scale"], 0.8, atol=0.1)
    np.testing.assert_allclose(params["z"]["probs"], 0.5, atol=0.05)
    np.testing.assert_allclose(np.ravel(params["n"]["weight"]), 0.1, atol=0.06)


def test_gaps_that_depend_on_what_is_seen_do_not_bias():
    """Of y most of what goes with a high x is missing: the mean of the seen y is off, the estimate is not."""
    rng = np.random.default_rng(8)
    x = rng.normal(size=2000)
    y = 1.0 + x + rng.normal(size=2000)
    table = pd.DataFrame({"x": x, "y": np.where((x > 0) & (rng.random(2000) < 0.8), np.nan, y)})
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    otp.fit(model, table, method="transport", seed=0)
    own = model.params()["y"]
    found = [float(np.squeeze(own[name])) for name in ("loc", "weight", "scale")]
    np.testing.assert_allclose(found, 1.0, atol=0.1)


def test_reweighted_rows_are_resampled_rows():
    rng = np.random.default_rng(11)
    problem, points = started(factor_model(), factor_table(60, rng), otp.transport(points=64), 2)
    times = torch.as_tensor(rng.multinomial(60, np.full(60, 1 / 60), size=2)).double()
    found = problem.reweighted(times).loss(points).total
    for replica in range(2):
        index = torch.repeat_interleave(torch.arange(60), times[replica].long())
        rows = replace(problem.compared, rows=problem.compared.rows[:, index], weight=torch.ones(1, 60).double())
        alone = replace(problem, compared=rows).loss(points[replica : replica + 1]).total
        torch.testing.assert_close(found[replica], alone[0])


def test_priors_that_would_not_count_are_refused():
    """A transport cost is no log-likelihood to which a prior adds."""
    rng = np.random.default_rng(13)
    x = rng.normal(size=100)
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal(weight=otp.ridge(1e6))})
    table = pd.DataFrame({"x": x, "y": x + 0.5 * rng.normal(size=100)})
    with pytest.raises(otp.ModelError, match=r"'y': method='transport' has no likelihood that otp.ridge on 'weight'"):
        otp.fit(model, table, method="transport")
    result = otp.fit(model, table, method="likelihood")
    assert float(np.squeeze(model.params()["y"]["weight"])) == pytest.approx(0.0, abs=0.2)
    assert "ridge(1e+06) on y.weight" in str(result.summary())


def test_priors_by_default_that_do_not_count_are_named():
    rng = np.random.default_rng(14)
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal(network=(2,))})
    table = pd.DataFrame(rng.normal(size=(60, 2)), columns=["x", "y"])
    with pytest.warns(otp.ConvergenceWarning):
        result = otp.fit(model, table, method="transport", steps=2)
    assert any("these counted for nothing: ridge(0.1) on y.network" in note for note in result.notes)
    assert "priors: " not in str(result.summary())


# -- sequences --------------------------------------------------------------------------------------------------------


def chain(rng, sequences=40, length=50, stay=0.9):
    states = np.zeros((sequences, length), dtype=int)
    states[:, 0] = rng.integers(0, 2, sequences)
    for t in range(1, length):
        states[:, t] = np.where(rng.random(sequences) < stay, states[:, t - 1], 1 - states[:, t - 1])
    return states


def hidden_markov(emission):
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(2), "x": emission})


@pytest.mark.parametrize("kind", ["normal", "poisson"])
def test_windows_tell_states_and_transitions(kind):
    rng = np.random.default_rng(9)
    states, is_normal = chain(rng), kind == "normal"
    values = rng.normal(3.0 * states, 1.0) if is_normal else rng.poisson(np.where(states == 1, 9.0, 2.0))
    model = hidden_markov(m.Normal() if is_normal else m.Poisson())
    assert otp.fit(model, values.astype(float), method="transport", restarts=3, seed=0).status.converged
    params = model.params()
    np.testing.assert_allclose(np.diag(params["z"]["probs"]), 0.9, atol=0.05)
    own = params["x"]["loc"] if is_normal else np.exp(params["x"]["log_rate"])
    np.testing.assert_allclose(np.sort(np.ravel(own)), [0.0, 3.0] if is_normal else [2.0, 9.0], atol=0.25)


def test_windows_with_gaps_are_left_out_and_said():
    rng = np.random.default_rng(10)
    values = rng.normal(3.0 * chain(rng, 10, 30), 1.0)
    values[2, 5] = np.nan
    problem, points = started(hidden_markov(m.Normal()), values, otp.transport(points=64))
    assert sum(len(stratum.compared.rows[0]) for stratum in problem.strata) == 10 * 28 - 3
    assert "windows with gaps were left out" in problem.notes(points)[0]
    values[:, ::2] = np.nan
    with pytest.raises(ModelError, match="every one has a gap: use method='likelihood'"):
        started(hidden_markov(m.Normal()), values, otp.transport(points=64))


@pytest.mark.parametrize(
    ("edges", "hidden", "nodes", "message"),
    [
        ([otp.lag("z", "z"), ("z", "x")], ["z"], {"z": m.Normal(), "x": m.Normal()}, "'z' is none"),
        ([otp.lag("x", "x")], [], {"x": m.Normal()}, "lagged edges of one step between hidden nodes"),
        (
            [otp.lag("z", "z"), ("z", "x"), ("g", "x")],
            ["z"],
            {"z": m.Categorical(2), "x": m.Normal(), "g": m.Given()},
            "no covariates",
        ),
    ],
)
def test_sequences_that_windows_cannot_say_are_refused(edges, hidden, nodes, message):
    model = otp.Model(otp.Graph(edges, hidden=hidden), nodes)
    series = {name: np.zeros((3, 8)) for name in nodes if name not in hidden}
    with pytest.raises(ModelError, match=message):
        otp.fit(model, series, method=otp.transport())
