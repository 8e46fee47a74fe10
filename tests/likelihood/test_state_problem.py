"""Rows read through features in every joint state: what they say is what plain sums over states say."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import special, stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine.fit import recognise
from otpdag.engine.optimiser import minimise
from otpdag.likelihood import state_problem
from otpdag.likelihood.chain_layout import joint_states
from otpdag.likelihood.state_problem import StateProblem, StateReader, Sums

EMITTED = 25
RATES = np.array([0.5, 3.0, 7.0])
LOC = np.arange(6.0).reshape(3, 2) - 2.0
SCALE = np.array([[0.5, 1.0], [2.0, 0.7], [1.2, 3.0]])
PROBS = np.array([[0.2, 0.8], [0.6, 0.4], [0.9, 0.1]])


@pytest.fixture
def world():
    rng = np.random.default_rng(0)
    graph = otp.Graph([("z", "a"), ("z", "x"), ("a", "x"), ("z", "n")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(3), "a": m.Categorical(2), "x": m.Normal(), "n": m.Poisson()})
    model.set_params(
        {
            "z": {"probs": [0.2, 0.3, 0.5]},
            "a": {"probs": PROBS},
            "x": {"loc": LOC, "scale": SCALE},
            "n": {"log_rate": np.log(RATES)},
        }
    )
    a, x, n = rng.integers(0, 2, EMITTED), rng.normal(size=EMITTED), rng.poisson(3, EMITTED)
    seen = {"a": np.ones(EMITTED, bool), "x": rng.random(EMITTED) < 0.8, "n": rng.random(EMITTED) < 0.8}
    values = {
        "a": torch.eye(2).double()[a],
        "x": torch.as_tensor(x)[:, None],
        "n": torch.as_tensor(n)[:, None].double(),
    }
    mask = {name: torch.as_tensor(one)[:, None] for name, one in seen.items()}
    reader = StateReader.of(model.structure, joint_states(model.structure, ["z"]), values, mask)
    return model, reader, (a, x, n), seen, reader.features(values, mask)


def test_features_times_coefficients_are_log_densities(world):
    model, reader, (a, x, n), seen, features = world
    log_prior = torch.tensor([[0.1, -0.4, -2.0]]).double()
    found = features @ reader.coefficients(model.fitted.naturals, log_prior)[0].T
    for z in range(3):
        expected = log_prior[0, z].item() + np.log(PROBS[z, a])
        expected += np.where(seen["x"], stats.norm(LOC[z, a], SCALE[z, a]).logpdf(x), 0.0)
        expected += np.where(seen["n"], stats.poisson(RATES[z]).logpmf(n), 0.0)
        np.testing.assert_allclose(found[:, z], expected, rtol=1e-9, atol=1e-9)


def test_expected_sums_give_weighted_means_by_state_and_observed_parent(world):
    model, reader, (a, x, n), seen, features = world
    belief = np.random.default_rng(1).dirichlet(np.ones(3), EMITTED)
    sums = (torch.as_tensor(belief).T @ features).unsqueeze(0)
    naturals = reader.maximised(model.fitted.naturals, Sums(torch.zeros(1), sums, sums[..., -1], torch.zeros(1, 3, 3)))
    for z in range(3):
        weight = belief[:, z]
        assert naturals["n"]["log_rate"][0, z, 0].item() == pytest.approx(
            np.log(np.average(n[seen["n"]], weights=weight[seen["n"]])), abs=1e-4
        )
        ones, braked = weight @ a + 0.1 * PROBS[z, 1], weight.sum() + 0.1  # a little of what was before is kept
        assert naturals["a"]["probs"][0, z, 1].item() == pytest.approx(ones / braked, abs=1e-8)
        for parent in range(2):
            here = seen["x"] & (a == parent)
            mean = np.average(x[here], weights=weight[here])
            spread = np.sqrt(np.average((x[here] - mean) ** 2, weights=weight[here]))
            assert naturals["x"]["loc"][0, 2 * z + parent, 0].item() == pytest.approx(mean, abs=1e-6)
            assert naturals["x"]["scale"][0, 2 * z + parent, 0].item() == pytest.approx(spread, rel=1e-5)


def test_a_numeric_parent_has_no_features():
    graph = otp.Graph([("z", "x"), ("x", "y")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal(), "y": m.Normal()})
    values = {"x": torch.zeros(2, 1).double(), "y": torch.zeros(2, 1).double()}
    mask = {name: torch.ones(2, 1).bool() for name in values}
    assert StateReader.of(model.structure, joint_states(model.structure, ["z"]), values, mask) is None


ROWS = 200


def mixture(rng):
    graph = otp.Graph([("z", name) for name in "xync"], hidden=["z"])
    z = rng.integers(0, 2, ROWS)
    frame = pd.DataFrame({"x": 2.0 * z + rng.normal(size=ROWS), "n": rng.poisson(2.0 + 4.0 * z).astype(float)})
    frame["c"] = (rng.random(ROWS) < 0.3 + 0.4 * z).astype(float)
    frame = frame.mask(rng.random(frame.shape) < 0.1)
    y = 3.0 * z[:, None] + rng.normal(size=(ROWS, 2)) @ rng.normal(size=(2, 2))
    frame[["y.0", "y.1"]] = y
    made = {"z": m.Categorical(2), "x": m.Normal(shared_scale=True), "n": m.Poisson(), "c": m.Bernoulli()}
    return otp.Model(graph, made | {"y": m.MultivariateNormal(2, floor=1e-6)}), frame


def two_labels(rng):
    """Two hidden categories, one the parent of the other, and an observed one beside them."""
    graph = otp.Graph([("a", "b"), ("a", "x"), ("b", "x"), ("b", "y"), ("g", "y")], hidden=["a", "b"])
    a, g = rng.integers(0, 2, ROWS), rng.integers(0, 3, ROWS)
    b = np.where(rng.random(ROWS) < 0.8, a, 1 - a)
    frame = pd.DataFrame({"g": g, "x": 3.0 * a + 5.0 * b + rng.normal(size=ROWS), "y": b - g + rng.normal(size=ROWS)})
    made = {"a": m.Categorical(2), "b": m.Categorical(2), "g": m.Categorical(3), "x": m.Normal(floor=1e-3)}
    return otp.Model(graph, made | {"y": m.Normal(isotropic=True)}), frame


def given_parts(rng):
    model, frame = mixture(rng)
    made = {"z": m.Categorical(2, probs=[0.4, 0.6]), "x": m.Normal(scale=1.0), "n": m.Poisson(rate=[2.0, 6.0])}
    return otp.Model(
        model.graph, made | {"c": m.Bernoulli(), "y": m.MultivariateNormal(2, loc=[[0, 0], [3, 3]])}
    ), frame


WORLDS = {one.__name__: one for one in (mixture, two_labels, given_parts)}


def made(name, weights=None):
    model, frame = WORLDS[name](np.random.default_rng(5))
    kind = recognise(model, frame, weights=weights, device="cpu", every_row=False)
    layout = kind.lay_out(otp.entropic(), 0)
    problem = kind.problem(layout, otp.entropic(), 0)
    assert type(problem) is StateProblem
    return problem, kind.starts(layout, problem, 0, range(3))


def gradient(problem, points):
    leaf = points.clone().requires_grad_(True)
    return torch.autograd.grad(problem.loss(leaf).total.sum(), leaf)[0]


@pytest.mark.parametrize("name", WORLDS)
def test_loss_and_gradient_are_those_of_enumeration(name):
    problem, points = made(name, weights=np.random.default_rng(0).random(ROWS))
    rows = problem.in_rows(batch=problem.batch, seed=0).laid_out_for(points)
    torch.testing.assert_close(problem.loss(points).total, rows.loss(points).total, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient(problem, points), gradient(rows, points), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", WORLDS)
def test_an_update_never_raises_the_loss_and_rests_where_the_gradient_is_zero(name):
    problem, point = made(name)
    losses = []
    for _ in range(300):
        point, terms = problem.update(point)
        losses.append(terms.total)
    rises = torch.stack(losses).diff(dim=0)
    assert float(rises.max()) < 1e-10
    best = int(losses[-1].argmin())
    assert float(gradient(problem, point)[best].abs().max()) < 1e-3


@pytest.mark.parametrize("name", ["mixture", "two_labels"])
def test_a_fit_ends_where_descent_on_enumerated_rows_ends(name):
    model, frame = WORLDS[name](np.random.default_rng(5))
    result = otp.fit(model, frame, seed=0)
    assert type(result.problem) is StateProblem
    assert result.status.converged
    kept = next(one for one in result.restarts if one.kept)
    rows = result.problem.in_rows(batch=result.problem.batch, seed=0)
    lowest = minimise(rows.loss, kept.point.unsqueeze(0), steps=300, tolerance=1e-12)
    assert result.loss == pytest.approx(float(lowest.loss), abs=1e-6)


def test_weights_are_repetitions():
    problem, points = made("mixture")
    counts = torch.randint(0, 3, (2, ROWS), generator=torch.Generator().manual_seed(2)).double()
    weighted = problem.reweighted(counts).loss(points[:2]).total
    for replica in range(2):
        rows = torch.arange(ROWS).repeat_interleave(counts[replica].long())
        repeated = problem.subset(rows).loss(points[replica : replica + 1]).total
        torch.testing.assert_close(weighted[replica : replica + 1], repeated)


def test_blocks_of_rows_add_up(monkeypatch):
    problem, points = made("mixture")
    whole = problem.update(points)[0]
    monkeypatch.setattr(StateProblem, "block_entries", 300)
    monkeypatch.setattr(StateProblem, "kept_entries", 10)
    in_blocks, _ = made("mixture")
    torch.testing.assert_close(in_blocks.update(points)[0], whole)


def test_a_mixture_has_the_density_of_its_parts():
    x = np.random.default_rng(1).normal(size=(60, 2))
    graph = otp.Graph([("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "x": m.MultivariateNormal(2)})
    result = otp.fit(model, {"x": x}, seed=0, restarts=2)
    found = model.params()
    parts = [
        weight * stats.multivariate_normal(loc, covariance).pdf(x)
        for weight, loc, covariance in zip(
            found["z"]["probs"], found["x"]["loc"], found["x"]["covariance"], strict=True
        )
    ]
    assert result.loss == pytest.approx(-np.log(sum(parts)).mean(), rel=1e-9)


@pytest.mark.parametrize("row", [0, 1, 150])
def test_rows_with_gaps_that_features_cannot_read_are_enumerated_wherever_they_stand(row):
    model, frame = mixture(np.random.default_rng(5))
    frame.loc[row, "y.0"] = np.nan  # half of a normal vector
    kind = recognise(model, frame, weights=None, device="cpu", every_row=False)
    layout = kind.lay_out(otp.entropic(), 0)
    assert type(kind.problem(layout, otp.entropic(), 0)) is not StateProblem


def test_a_part_has_rows_enough_for_the_parameters():
    problem, _ = made("mixture")
    parameters = sum(int(np.prod(shape)) for shape in problem.shapes.values())
    assert problem.subset(1).rows == StateProblem.rows_for_each_parameter * parameters < ROWS
    assert problem.subset(150).rows == 150
    assert problem.subset(torch.tensor([4, 2])).rows == 2
    assert problem.subset(10**6) is problem


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("filled", [64, 50, 4096])
@pytest.mark.parametrize("most", [7, 25, 10**6])
def test_blocks_hold_every_row_once(most, filled, kept, monkeypatch):
    monkeypatch.setattr(StateProblem, "block_rows", filled)
    if not kept:
        monkeypatch.setattr(StateProblem, "kept_entries", 10)
    problem, _ = made("mixture")
    whole = problem._features(slice(None))
    seen = []
    for rows, block in problem._blocks(most):
        assert 0 < len(block) <= min(most, filled)
        torch.testing.assert_close(block, whole[rows], rtol=0, atol=0)
        seen += list(range(ROWS))[rows]
    assert seen == list(range(ROWS))
    assert (problem._kept is not None) is kept
    size = whole.shape[1]
    monkeypatch.setattr(StateProblem, "block_entries", 3 * size)
    assert max(len(block) for _, block in problem._blocks(most)) == min(3, most, filled)
    monkeypatch.setattr(StateProblem, "kept_entries", ROWS * size)
    assert made("mixture")[0]._kept is not None
    monkeypatch.setattr(StateProblem, "kept_entries", ROWS * size - 1)
    assert made("mixture")[0]._kept is None


def test_expected_sums_are_those_of_each_row():
    problem, points = made("two_labels", weights=np.random.default_rng(0).random(ROWS))
    factors = torch.as_tensor(np.random.default_rng(1).uniform(0.5, 2.0, (3, ROWS)))
    weighted = problem.reweighted(factors)
    coefficients = weighted._coefficients(weighted.naturals(points)).detach()
    found = weighted._expected(coefficients)
    features = problem._features(slice(None)).numpy()
    for replica in range(3):
        log_joint = features @ coefficients[replica].numpy().T
        weight = weighted.batch.weight[replica].numpy()
        assert found.log_likelihood[replica].item() == pytest.approx(weight @ special.logsumexp(log_joint, 1))
        expected = (weight[:, None] * special.softmax(log_joint, 1)).T @ features
        np.testing.assert_allclose(found.features[replica], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("most", "read"), [(4, True), (3, False)])
def test_few_joint_states_are_read_by_features(most, read, monkeypatch):
    model, frame = two_labels(np.random.default_rng(5))
    kind = recognise(model, frame, weights=None, device="cpu", every_row=False)
    layout = kind.lay_out(otp.entropic(), 0)
    monkeypatch.setattr(state_problem, "MOST_STATES", most)
    assert (type(kind.problem(layout, otp.entropic(), 0)) is StateProblem) is read


NOT_READ = {
    "a hidden number": ({"z": m.Normal()}, [("z", "x")], {}),
    "an observed parent of a hidden node": ({}, [("k", "z"), ("z", "x")], {"k": m.Categorical(2)}),
    "shared parameters": ({}, [("z", "x"), ("z", "y")], {n: m.Poisson(log_rate=otp.tie("r")) for n in "xy"}),
    "nothing hidden": ({"z": None}, [("k", "x")], {"k": m.Categorical(2), "x": m.StudentT()}),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_other_unknowns_are_not_read_by_features(name):
    changed, edges, others = NOT_READ[name]
    nodes = {"z": m.Categorical(2), "x": m.Normal(), **changed, **others}
    nodes = {node: mechanism for node, mechanism in nodes.items() if mechanism is not None}
    hidden = [node for node in ("z",) if node in nodes]
    model = otp.Model(otp.Graph(edges, hidden=hidden), nodes)
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({node: rng.integers(0, 2, 60).astype(float) for node in nodes if node not in hidden})
    kind = recognise(model, frame, weights=None, device="cpu", every_row=False)
    layout = kind.lay_out(otp.entropic(), 0)
    assert type(kind.problem(layout, otp.entropic(), 0)) is not StateProblem


def test_only_one_estimate_of_one_hidden_node_has_its_states_swapped(monkeypatch):
    asked = []
    monkeypatch.setattr(state_problem, "swaps", lambda reading: asked.append(reading) or [])
    two, points = made("two_labels")
    assert two.proposals(points[:1]) is None
    one, points = made("mixture")
    assert one.proposals(points[:2]) is None
    assert one.reweighted(torch.ones(2, ROWS).double()).proposals(points[:1]) is None
    assert asked == []
    assert one.proposals(points[:1]) is None
    assert len(asked) == 1
    assert asked[0].features.shape[0] == len(asked[0].weight) == len(asked[0].posterior) == ROWS
    torch.testing.assert_close(asked[0].posterior.sum(-1), torch.ones(ROWS).double())
