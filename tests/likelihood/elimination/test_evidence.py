"""The evidence of rows and its gradient, against sums over all joint states and fine grids."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from scipy.special import logsumexp

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import encode
from otpdag.likelihood.elimination import Tempering, lay_out, log_evidence, moved, total_evidence
from tests.likelihood.elimination.worlds import CATEGORY, enumerated, make_world, mixed_nodes, random_edges, with_leaves


def discrete_world(seed, **kwargs):
    rng = np.random.default_rng(seed)
    names = list("abcdefg")
    nodes = {name: CATEGORY[rng.integers(3)]() for name in names}
    hidden = ("c", "e") if seed % 2 else ()
    return make_world(nodes, random_edges(rng, names, 0.4), rng, hidden=hidden, **kwargs)


@pytest.mark.parametrize("seed", range(8))
def test_categories_sum_like_all_joint_states(seed):
    structure, naturals, batch = discrete_world(seed, replicas=2)
    layout = lay_out(structure, batch)
    torch.testing.assert_close(log_evidence(naturals, layout), enumerated(structure, naturals, batch, {}))


@pytest.mark.parametrize("tempering", [Tempering(0.3), Tempering(2.0, uniform=True), Tempering(1.0, best=True)])
def test_tempered_sums_are_those_over_all_joint_states(tempering):
    structure, naturals, batch = discrete_world(3)
    found = log_evidence(naturals, lay_out(structure, batch), tempering)
    options = {"power": tempering.power, "uniform": tempering.uniform, "best": tempering.best}
    torch.testing.assert_close(found, enumerated(structure, naturals, batch, {}, **options))


def assert_same_gradients(naturals, batch, layout, oracle, *, tempering=None, rtol=1e-7, atol=1e-7):
    """The gradient of a weighed sum, replica by replica, against that of another way to compute the same."""
    leaves, ours = with_leaves(naturals)
    their_leaves, theirs = with_leaves(naturals)
    value = total_evidence(ours, layout, tempering=tempering or Tempering())
    truth = (batch.weight * oracle(theirs)).sum(-1)
    torch.testing.assert_close(value, truth, rtol=rtol, atol=atol)
    outer = torch.tensor([1.0, -2.0]).double()[: len(value)]
    mine = torch.autograd.grad((outer * value).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    other = torch.autograd.grad(
        (outer * truth).sum(), list(their_leaves.values()), allow_unused=True, materialize_grads=True
    )
    for key, one, two in zip(leaves, mine, other, strict=True):
        torch.testing.assert_close(one, two, rtol=rtol, atol=atol, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("seed", range(4))
def test_gradients_of_categories_are_those_of_the_sum_over_all_states(seed):
    structure, naturals, batch = discrete_world(seed, replicas=2)
    layout = lay_out(structure, batch)
    assert_same_gradients(naturals, batch, layout, lambda own: enumerated(structure, own, batch, {}))


@pytest.mark.parametrize("tempering", [Tempering(0.3), Tempering(2.0, uniform=True), Tempering(1.0, best=True)])
def test_tempered_gradients(tempering):
    structure, naturals, batch = discrete_world(5)
    options = {"power": tempering.power, "uniform": tempering.uniform, "best": tempering.best}
    assert_same_gradients(
        naturals,
        batch,
        lay_out(structure, batch),
        lambda own: enumerated(structure, own, batch, {}, **options),
        tempering=tempering,
    )


def normal_points(width=10.0, many=161):
    points = torch.linspace(-width, width, many, dtype=torch.float64)
    return points.unsqueeze(-1), torch.full((many,), float(torch.log(points[1] - points[0])), dtype=torch.float64)


def count_points(many=40):
    return torch.arange(many, dtype=torch.float64).unsqueeze(-1), torch.zeros(many, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(4))
def test_mixed_unknowns_sum_like_fine_grids(seed):
    rng = np.random.default_rng(seed)
    nodes, edges = mixed_nodes()
    structure, naturals, batch = make_world(nodes, edges, rng, rows=24, gaps=0.25, hidden=("z",))
    # at most two numbers or counts are unknown in a row, so that the oracle stays small
    for row in range(batch.rows):
        lost = [n for n in ("x", "y", "k", "v") if not bool(batch.mask[n][0, row, 0])]
        for node in lost[2:]:
            batch.mask[node][0, row] = True
    supports = {"x": normal_points(), "y": normal_points(), "v": normal_points(12.0), "k": count_points()}
    truth = enumerated(structure, naturals, batch, supports)
    layout = moved(naturals, lay_out(structure, batch))
    torch.testing.assert_close(log_evidence(naturals, layout), truth, rtol=1e-6, atol=1e-6)
    assert_same_gradients(
        naturals, batch, layout, lambda own: enumerated(structure, own, batch, supports), rtol=1e-5, atol=1e-4
    )


def test_weights_of_each_replica_weigh_its_rows():
    structure, naturals, batch = discrete_world(1, replicas=2)
    layout = lay_out(structure, batch)
    weight = torch.rand(2, batch.rows, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    truth = (weight * log_evidence(naturals, layout)).sum(-1)
    torch.testing.assert_close(total_evidence(naturals, layout, weight), truth)


def test_rows_count_as_often_as_their_weight_says_none_one_and_two():
    structure, naturals, batch = discrete_world(4)
    layout = lay_out(structure, batch)
    each = log_evidence(naturals, layout)
    for weight in (torch.ones(1, batch.rows), torch.arange(batch.rows).remainder(3).unsqueeze(0)):
        truth = (weight.double() * each).sum(-1)
        torch.testing.assert_close(total_evidence(naturals, layout, weight.double()), truth)


def test_a_hidden_function_of_other_nodes_takes_no_points():
    graph = otp.Graph([("u", "s"), ("v", "s"), ("s", "x"), ("u", "y")], hidden=["u", "v", "s"])
    total = m.Deterministic(lambda parents: parents["u"] + parents["v"])
    nodes = {"u": m.Normal(), "v": m.Normal(), "s": total, "x": m.Normal(), "y": m.Normal()}
    model = otp.Model(graph, nodes)
    model.set_params({"x": {"loc": 0.0, "weight": 1.0, "scale": 0.5}, "y": {"loc": 0.0, "weight": 1.0, "scale": 0.5}})
    x = np.random.default_rng(0).normal(size=(20, 2))
    expected = stats.multivariate_normal([0, 0], [[2.25, 1.0], [1.0, 1.25]]).logpdf(x)
    batch = encode(x, model._known_schema(), hidden=graph.hidden)
    layout = moved(model.fitted.naturals, lay_out(model.structure, batch))
    np.testing.assert_allclose(log_evidence(model.fitted.naturals, layout)[0], expected, atol=1e-6)


def evidence_of(model, table):
    batch = encode(table, model._known_schema(), hidden=model.graph.hidden)
    return log_evidence(model.fitted.naturals, moved(model.fitted.naturals, lay_out(model.structure, batch)))[0].numpy()


def summed(model, name, points, log_length, **shown):
    """Log-sum over points (P, width) of one node, given one value of each other."""
    values = {node: torch.as_tensor([[[float(v)]]]).double() for node, v in shown.items()}
    values = {**values, name: torch.as_tensor(points)[None, None]}
    total = torch.as_tensor(log_length)[None, None]
    for node, mechanism in model.mechanisms.items():
        parents = {parent: values[parent] for parent in model.graph.parents(node)}
        total = total + mechanism.log_prob(model.fitted.naturals[node], values[node], parents)
    return float(torch.logsumexp(total, -1))


def test_a_hidden_vector_of_positive_numbers_is_summed_by_its_logarithms():
    graph = otp.Graph([("f", "k")], hidden=["f"])
    model = otp.Model(graph, {"f": m.LogNormal(2), "k": m.Poisson()})
    model.set_params({"f": {"scale": [0.3, 0.4]}, "k": {"weight": [0.4, 0.3], "log_rate": 0.1}})
    line = np.linspace(-4, 4, 401)
    points = np.stack(np.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    counts = np.array([0.0, 2.0, 7.0])
    expected = [summed(model, "f", np.exp(points), points.sum(1) + 2 * np.log(0.02), k=k) for k in counts]
    np.testing.assert_allclose(evidence_of(model, pd.DataFrame({"k": counts})), expected, atol=1e-4)


def test_a_hidden_vector_of_shares_is_summed_by_its_log_ratios():
    graph = otp.Graph([("s", "y")], hidden=["s"])
    model = otp.Model(graph, {"s": m.Dirichlet(3), "y": m.Normal()})
    model.set_params(
        {"s": {"concentration": [2.0, 3.0, 4.0]}, "y": {"loc": 0.0, "weight": [1.0, 2.0, -1.0], "scale": 0.3}}
    )
    line = np.linspace(-12, 12, 601)
    free = np.stack(np.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    logits = np.concatenate([free, np.zeros((len(free), 1))], 1)
    log_shares = logits - logsumexp(logits, 1, keepdims=True)
    y = np.array([-0.5, 0.4, 1.5])
    length = log_shares.sum(1) + 2 * np.log(0.04)
    expected = [summed(model, "s", np.exp(log_shares), length, y=value) for value in y]
    np.testing.assert_allclose(evidence_of(model, pd.DataFrame({"y": y})), expected, atol=1e-3)


def test_a_vector_that_is_seen_in_part_is_summed_over_the_rest():
    """The child is no linear function of it, so that it stands on points."""
    model = otp.Model(otp.Graph([("x", "k")]), {"x": m.Normal(2), "k": m.Poisson()})
    model.set_params({"x": {"loc": [0.5, -0.5], "scale": [1.0, 0.7]}, "k": {"weight": [0.5, -0.8], "log_rate": 0.2}})
    table = pd.DataFrame(
        {"x.0": [0.3, np.nan, np.nan, 1.0], "x.1": [np.nan, 0.2, np.nan, 0.0], "k": [1.0, 4.0, 2.0, 0.0]}
    )
    line = np.linspace(-7, 7, 701)
    square = np.stack(np.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    step = np.log(0.02)
    grids = [np.stack([np.full(701, 0.3), line], 1), np.stack([line, np.full(701, 0.2)], 1), square, [[1.0, 0.0]]]
    lengths = [np.full(701, step), np.full(701, step), np.full(len(square), 2 * step), np.zeros(1)]
    each = zip(grids, lengths, table["k"], strict=True)
    expected = [summed(model, "x", np.asarray(grid), length, k=k) for grid, length, k in each]
    np.testing.assert_allclose(evidence_of(model, table), expected, atol=1e-4)
