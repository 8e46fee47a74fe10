"""Evidence of rows against the sum over all joint states, fine grids and known integrals."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from scipy.special import logsumexp

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import encode
from otpdag.likelihood.elimination.evidence import log_evidence, moved, total_evidence
from otpdag.likelihood.elimination.layout import lay_out
from otpdag.likelihood.elimination.plans import EliminationOptions
from otpdag.likelihood.elimination.sums import Tempering
from tests.likelihood.elimination.worlds import CATEGORY, enumerated, make_world, mixed_nodes, random_edges, with_leaves

# -- the evidence of rows and its gradient, against sums over all joint states and fine grids -------------------------


def discrete_world(seed, **kwargs):
    rng = np.random.default_rng(seed)
    names = list("abcdefg")
    nodes = {name: CATEGORY[rng.integers(3)]() for name in names}
    hidden = ("c", "e") if seed % 2 else ()
    return make_world(nodes, random_edges(rng, names, 0.4), rng, hidden=hidden, **kwargs)


def assert_same_sums(naturals, batch, layout, oracle, tempering=None, sums=(1e-7, 1e-7), slopes=(1e-7, 1e-7)):
    """Sums of rows, and the gradient of a weighed one by replica, against another way to compute the same.

    ``sums`` and ``slopes`` are relative and absolute limits.
    """
    (rtol, atol), (slope_rtol, slope_atol) = sums, slopes
    leaves, ours = with_leaves(naturals)
    their_leaves, theirs = with_leaves(naturals)
    rows, tempering = oracle(theirs), tempering or Tempering()
    torch.testing.assert_close(log_evidence(naturals, layout, tempering), rows.detach(), rtol=rtol, atol=atol)
    value, truth = total_evidence(ours, layout, tempering=tempering), (batch.weight * rows).sum(-1)
    torch.testing.assert_close(value, truth, rtol=rtol, atol=atol)
    outer = torch.tensor([1.0, -2.0]).double()[: len(value)]
    mine = torch.autograd.grad((outer * value).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    other = torch.autograd.grad(
        (outer * truth).sum(), list(their_leaves.values()), allow_unused=True, materialize_grads=True
    )
    for key, one, two in zip(leaves, mine, other, strict=True):
        torch.testing.assert_close(
            one, two, rtol=slope_rtol, atol=slope_atol, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("seed", range(8))
def test_categories_sum_like_all_joint_states(seed):
    structure, naturals, batch = discrete_world(seed, replicas=2)
    layout = lay_out(structure, batch)
    assert_same_sums(naturals, batch, layout, lambda own: enumerated(structure, own, batch, {}))


@pytest.mark.parametrize("tempering", [Tempering(0.3), Tempering(2.0, uniform=True), Tempering(1.0, best=True)])
def test_tempered_sums_are_those_over_all_joint_states(tempering):
    structure, naturals, batch = discrete_world(5)
    options = {"power": tempering.power, "uniform": tempering.uniform, "best": tempering.best}
    layout = lay_out(structure, batch)
    assert_same_sums(
        naturals, batch, layout, lambda own: enumerated(structure, own, batch, {}, **options), tempering=tempering
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
    layout = moved(naturals, lay_out(structure, batch))
    assert_same_sums(
        naturals,
        batch,
        layout,
        lambda own: enumerated(structure, own, batch, supports),
        sums=(1e-6, 1e-6),
        slopes=(1e-5, 1e-4),
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


# -- every mechanism with a density as an unknown, and as a child of one: against fine sums of the joint --------------


NUMBERS = {
    "lognormal": m.LogNormal,
    "gamma": m.Gamma,
    "beta": m.Beta,
    "student": m.StudentT,
    "poisson": m.Poisson,
    "negative binomial": m.NegativeBinomial,
    "network": lambda: m.Normal(network=(3,)),
}


ERRORS = {"beta": 2e-2, "student": 2e-3}
"""Errors of the default number of points where posteriors have long tails."""


def fine_grid(structure, node):
    """Points (S, 1) of a number, evenly spread where it has no bounds, with log-lengths."""
    space = structure.mechanisms[node].space
    if space.is_countable:
        return torch.arange(400).double().unsqueeze(-1), torch.zeros(400).double()
    line = (
        torch.linspace(-40, 40, 8001, dtype=torch.float64)
        if space.is_unbounded
        else torch.linspace(-25, 8, 4001, dtype=torch.float64)
    )
    values, log_slope = space.constrain(line.unsqueeze(-1))
    return values, log_slope[:, 0] + torch.log(line[1] - line[0])


@pytest.mark.parametrize("name", list(NUMBERS))
@pytest.mark.parametrize("place", ["unknown", "child"])
def test_an_unknown_number_sums_like_a_fine_grid(name, place):
    rng = np.random.default_rng(3)
    nodes = {"a": m.Normal(), "z": m.Bernoulli(), "u": m.Normal(), "y": m.Normal(), "w": m.Bernoulli()}
    nodes["u" if place == "unknown" else "y"] = NUMBERS[name]()
    structure, naturals, batch = make_world(
        nodes, [("a", "u"), ("z", "u"), ("u", "y"), ("u", "w")], rng, rows=18, gaps=0.0
    )
    if name == "beta" and place == "unknown":  # else shares pile up at one, where no digits are left
        naturals["u"]["concentration"] = 8 * naturals["u"]["concentration"]
    batch.mask["u"][0, ::2] = False
    batch.mask["z"][0, ::3] = False
    own, theirs = (
        {n: {k: v.clone().requires_grad_() for k, v in p.items()} for n, p in naturals.items()} for _ in range(2)
    )
    rows = enumerated(structure, theirs, batch, {"u": fine_grid(structure, "u")})
    truth = rows.detach()
    layout = moved(naturals, lay_out(structure, batch))
    torch.testing.assert_close(log_evidence(naturals, layout), truth, rtol=0, atol=ERRORS.get(name, 1e-4))
    layout = moved(naturals, lay_out(structure, batch, EliminationOptions(grid=96)))
    torch.testing.assert_close(log_evidence(naturals, layout), truth, rtol=0, atol=1e-4)
    total_evidence(own, layout).sum().backward()
    (batch.weight * rows).sum().backward()
    for node, params in own.items():
        for key, value in params.items():
            if value.grad is not None and key != "probs":
                torch.testing.assert_close(value.grad, theirs[node][key].grad, rtol=1e-3, atol=2e-3)


def test_replicas_have_points_of_their_own():
    rng = np.random.default_rng(0)
    nodes = {"f": m.Normal(), "k": m.Poisson(), "w": m.Bernoulli(), "x": m.Normal()}
    structure, naturals, batch = make_world(
        nodes, [("f", "k"), ("f", "w"), ("f", "x")], rng, rows=20, gaps=0.2, hidden=("f",), replicas=3
    )
    together = log_evidence(naturals, moved(naturals, lay_out(structure, batch)))
    for replica in range(3):
        one = {n: {k: v[replica : replica + 1] for k, v in p.items()} for n, p in naturals.items()}
        alone = log_evidence(one, moved(one, lay_out(structure, batch)))
        torch.testing.assert_close(together[replica], alone[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("eps", [0.5, 2.0])
def test_tempered_numbers_sum_like_a_fine_grid(eps):
    """Linear numbers exactly, points beside them: seen densities to the power 1 / eps."""
    rng = np.random.default_rng(1)
    nodes = {"f": m.Normal(), "g": m.Normal(), "x": m.Normal(), "y": m.Normal(), "z": m.Normal()}
    structure, naturals, batch = make_world(
        nodes, [("f", "g"), ("f", "x"), ("g", "y"), ("g", "z")], rng, rows=6, gaps=0.0, hidden=("f", "g")
    )
    line = torch.linspace(-12, 12, 301, dtype=torch.float64)
    grid = (line.unsqueeze(-1), torch.full((301,), float(torch.log(line[1] - line[0])), dtype=torch.float64))
    truth = enumerated(structure, naturals, batch, {"f": grid, "g": grid}, power=1 / eps)
    found = log_evidence(naturals, lay_out(structure, batch), Tempering(1 / eps))
    torch.testing.assert_close(found, truth, rtol=1e-8, atol=1e-8)


def test_rows_that_the_model_rules_out_have_no_density_and_spoil_no_gradient():
    nodes = {"z": m.Bernoulli(), "x": m.Bernoulli(), "u": m.Normal(), "y": m.Gamma()}
    structure, naturals, batch = make_world(
        nodes, [("z", "x"), ("z", "u"), ("u", "y")], np.random.default_rng(0), rows=12, gaps=0.0
    )
    batch.mask["u"][0, ::2] = False
    batch.mask["z"][0, ::3] = False
    layout = moved(naturals, lay_out(structure, batch))
    own = {n: {k: v.clone().requires_grad_() for k, v in p.items()} for n, p in naturals.items()}
    weight = batch.weight.clone()
    weight[0, 0] = 0.0
    total_evidence(own, layout, weight).sum().backward()
    assert all(bool(torch.isfinite(v.grad).all()) for p in own.values() for v in p.values() if v.grad is not None)


@pytest.mark.parametrize(("dim", "error"), [(2, 1e-4), (3, 1e-3), (4, 3e-2)])
def test_an_unknown_vector_with_counts_below_it_is_the_same_as_its_coordinates(dim, error):
    """Coordinates as nodes of their own are summed on a grid each; as one vector on a cloud."""
    rng = np.random.default_rng(dim)
    names = [f"f{i}" for i in range(dim)]
    children = {"k": m.Poisson(), "w": m.Bernoulli(), "x": m.Normal()}
    apart, naturals, batch = make_world(
        {n: m.Normal() for n in names} | children,
        [(n, c) for n in names for c in children],
        rng,
        rows=10,
        gaps=0.0,
        hidden=names,
    )
    from otpdag import Graph
    from otpdag.structure import Structure

    together = Structure.bind(Graph([("f", c) for c in children], hidden=["f"]), {"f": m.Normal(dim), **children})
    vector = {key: torch.cat([naturals[n][key] for n in names], -1) for key in ("loc", "scale")}
    joined = {"f": vector, **{c: naturals[c] for c in children}}
    fine = EliminationOptions(grid=24 if dim < 4 else 16, largest_table=2**21)
    truth = log_evidence(naturals, moved(naturals, lay_out(apart, batch, fine)))
    layout = moved(joined, lay_out(together, batch))
    torch.testing.assert_close(log_evidence(joined, layout), truth, rtol=0, atol=error)
    own = {n: {k: v.clone().requires_grad_() for k, v in p.items()} for n, p in joined.items()}
    total_evidence(own, layout).sum().backward()
    step = 1e-5
    for node, key in (("k", "weight"), ("x", "scale"), ("f", "loc")):
        ends = []
        for sign in (1, -1):
            shifted = joined[node][key].clone()
            shifted.view(-1)[0] += sign * step
            ends.append(float(total_evidence({**joined, node: {**joined[node], key: shifted}}, layout)))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert float(own[node][key].grad.view(-1)[0]) == pytest.approx(slope, rel=1e-4, abs=1e-4)
