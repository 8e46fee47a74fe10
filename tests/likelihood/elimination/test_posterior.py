"""Posteriors of unknowns: probabilities, draws, likeliest states and moments, against enumeration, pgmpy and EM."""

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm

import otpdag as otp
from experiments.small_models import delete_cells
from otpdag import Graph
from otpdag import mechanisms as m
from otpdag.data import Batch, Schema, encode
from otpdag.datasets import read_bif
from otpdag.errors import ModelError
from otpdag.likelihood.elimination.evidence import expectations, log_evidence, moved, total_evidence
from otpdag.likelihood.elimination.layout import lay_out
from otpdag.likelihood.elimination.plans import EliminationOptions
from otpdag.likelihood.elimination.posterior import (
    _unknown_moments,
    likeliest_states,
    node_moments,
    posterior_draws,
    state_probabilities,
)
from otpdag.structure import Structure
from tests.likelihood.elimination.worlds import (
    CASES,
    CATEGORY,
    PIECES,
    Plain,
    entries,
    linear_moments,
    make_group,
    make_world,
    random_edges,
    random_naturals,
)

APART = EliminationOptions(merged=False)

# -- probabilities and draws of unknowns, against sums over all joint states and the conditional normal ---------------


def discrete_world(seed):
    rng = np.random.default_rng(seed)
    names = list("abcdef")
    nodes = {name: CATEGORY[rng.integers(3)]() for name in names}
    return make_world(nodes, random_edges(rng, names, 0.5), rng, rows=12, gaps=0.5, hidden=("b",))


def joint_states(structure, naturals, batch, row):
    """All joint states of a row as codes, with their posterior probabilities."""
    order = structure.graph.order
    choices = []
    for node in order:
        width = structure.mechanisms[node].space.width
        seen = node in batch.mask and bool(batch.mask[node][0, row].all())
        choices.append([int(batch.values[node][0, row].argmax())] if seen else range(width))
    codes = torch.tensor(list(itertools.product(*choices)))
    values = {
        n: torch.eye(structure.mechanisms[n].space.width).double()[codes[:, i]].unsqueeze(0)
        for i, n in enumerate(order)
    }
    log_prob = sum(
        mechanism.log_prob(naturals[n], values[n], structure.parents(n, values))
        for n, mechanism in structure.mechanisms.items()
    )
    return codes, torch.softmax(log_prob[0], -1)


@pytest.mark.parametrize("seed", range(4))
def test_state_probabilities_are_those_of_all_joint_states(seed):
    structure, naturals, batch = discrete_world(seed)
    for place, node in enumerate(structure.graph.order):
        found = state_probabilities(naturals, lay_out(structure, batch, keep=(node,)), node)
        for row in range(batch.rows):
            codes, probs = joint_states(structure, naturals, batch, row)
            truth = torch.zeros(found.shape[1]).double().index_add_(0, codes[:, place], probs)
            torch.testing.assert_close(found[row], truth)


def test_draws_of_categories_are_joint_draws_from_the_posterior():
    structure, naturals, batch = discrete_world(1)
    many = 20_000
    drawn = posterior_draws(naturals, lay_out(structure, batch, APART), many, torch.Generator().manual_seed(0))
    for row in range(batch.rows):
        codes, probs = joint_states(structure, naturals, batch, row)
        found = torch.stack([drawn[n][row].argmax(-1) for n in structure.graph.order], -1)
        share = torch.stack([(found == code).all(-1).double().mean() for code in codes])
        assert float((share - probs).abs().max()) < 4.5 * 0.5 / many**0.5


def test_draws_of_linear_numbers_have_the_conditional_moments():
    rng = np.random.default_rng(3)
    names = list("abcdef")
    nodes = {name: m.Normal(2) if name == "c" else m.Normal() for name in names}
    structure, naturals, batch = make_world(nodes, random_edges(rng, names, 0.5), rng, rows=10, gaps=0.5)
    mean, covariance, at = linear_moments(structure, naturals)
    many = 20_000
    drawn = posterior_draws(naturals, lay_out(structure, batch, APART), many, torch.Generator().manual_seed(0))
    flat = np.concatenate([drawn[n].numpy() for n in at], -1)
    known = np.concatenate([batch.mask[n][0].numpy() for n in at], -1)
    values = np.concatenate([batch.values[n][0].numpy() for n in at], -1)
    for row in range(batch.rows):
        s, u = np.flatnonzero(known[row]), np.flatnonzero(~known[row])
        gain = covariance[np.ix_(u, s)] @ np.linalg.inv(covariance[np.ix_(s, s)]) if len(s) else np.zeros((len(u), 0))
        truth = mean[u] + gain @ (values[row, s] - mean[s])
        spread = covariance[np.ix_(u, u)] - gain @ covariance[np.ix_(s, u)]
        sample = flat[row][:, u]
        np.testing.assert_array_equal(flat[row][:, s], np.broadcast_to(values[row, s], (many, len(s))))
        np.testing.assert_allclose(sample.mean(0), truth, atol=5 * np.sqrt(spread.diagonal().max(initial=0) / many))
        np.testing.assert_allclose(
            np.cov(sample.T).reshape(spread.shape), spread, atol=0.05 * (1 + abs(spread).max(initial=0))
        )


def test_draws_of_mixed_unknowns_agree_with_rejection_sampling():
    """Rows that show one category: draws of the rest against the model's own draws that show the same."""
    rng = np.random.default_rng(1)
    nodes = {"z": m.Bernoulli(), "x": m.Normal(), "y": m.Normal(), "k": m.Poisson(), "w": m.Bernoulli()}
    edges = [("z", "x"), ("x", "y"), ("y", "k"), ("k", "w"), ("x", "w")]
    structure, naturals, batch = make_world(nodes, edges, rng, rows=2, gaps=0.0)
    for node in "zxyk":
        batch.mask[node][:] = False
        batch.values[node][:] = 0.0
    batch.values["w"][0] = torch.eye(2).double()
    layout = moved(naturals, lay_out(structure, batch))
    many = 40_000
    drawn = posterior_draws(naturals, layout, many, torch.Generator().manual_seed(0))
    from otpdag.simulation import ancestral

    model = ancestral(structure, naturals, 200_000, torch.Generator().manual_seed(1))
    for state in (0, 1):
        kept = model["w"][0, :, state] > 0.5
        for node in "zxyk":
            truth, found = model[node][0, kept, -1], drawn[node][state, :, -1]
            error = (truth.var() / kept.sum() + found.var() / many).sqrt()
            assert abs(float(truth.mean() - found.mean())) < 4.5 * float(error), (state, node)
            assert float(found.std() / truth.std()) == pytest.approx(1.0, abs=0.03), (state, node)


def test_a_node_that_a_row_leaves_out_is_named():
    structure, naturals, batch = discrete_world(0)
    leaf = structure.graph.leaves[-1]
    with pytest.raises(ModelError, match=f"keep=\\('{leaf}',\\)"):
        state_probabilities(naturals, lay_out(structure, batch), leaf)


def test_draws_of_a_vector_on_points_have_its_posterior_mean():
    """Two coordinates with a count below them: draws of the vector against those of two nodes."""
    rng = np.random.default_rng(2)
    children = {"k": m.Poisson(), "x": m.Normal()}
    edges = [(n, c) for n in ("f0", "f1") for c in children]
    apart, naturals, batch = make_world(
        {"f0": m.Normal(), "f1": m.Normal(), **children}, edges, rng, rows=3, gaps=0.0, hidden=("f0", "f1")
    )
    joined = {"f": {key: torch.cat([naturals[n][key] for n in ("f0", "f1")], -1) for key in ("loc", "scale")}}
    joined |= {c: naturals[c] for c in children}
    together = Structure.bind(Graph([("f", c) for c in children], hidden=["f"]), {"f": m.Normal(2), **children})
    many, points = 20_000, EliminationOptions(integrate=False)
    one = posterior_draws(
        naturals, moved(naturals, lay_out(apart, batch, points)), many, torch.Generator().manual_seed(0)
    )
    two = posterior_draws(
        joined, moved(joined, lay_out(together, batch, points)), many, torch.Generator().manual_seed(1)
    )
    for i, node in enumerate(("f0", "f1")):
        truth, found = one[node][:, :, 0], two["f"][:, :, i]
        error = ((truth.var(1) + found.var(1)) / many).sqrt()
        assert bool(((truth.mean(1) - found.mean(1)).abs() < 4.5 * error).all())
        torch.testing.assert_close(found.std(1) / truth.std(1), torch.ones(3).double(), rtol=0, atol=0.05)


# -- the most probable joint state of a row, against all joint states one by one --------------------------------------


def best_of_all(structure, naturals, batch, row):
    """The states of all nodes that are likeliest together with what a row shows, and their log-density."""
    free = {n: not bool(batch.mask[n][0, row].all()) for n in structure.graph.order}
    choices = [torch.eye(structure.mechanisms[n].space.width).double() for n in structure.graph.order]
    lists = [
        list(c) if free[n] else [batch.values[n][0, row]] for n, c in zip(structure.graph.order, choices, strict=True)
    ]
    best, states = -np.inf, None
    for one in itertools.product(*lists):
        values = {n: v.reshape(1, 1, -1) for n, v in zip(structure.graph.order, one, strict=True)}
        total = sum(
            float(mechanism.log_prob(naturals[n], values[n], structure.parents(n, values)))
            for n, mechanism in structure.mechanisms.items()
        )
        if total > best:
            best, states = total, dict(zip(structure.graph.order, one, strict=True))
    return states, best


@pytest.mark.parametrize("seed", range(4))
def test_states_and_density_are_those_of_the_best_of_all_joint_states(seed):
    rng = np.random.default_rng(seed)
    names = [f"v{i}" for i in range(5)]
    nodes = {name: CATEGORY[rng.integers(3)]() for name in names}
    structure, naturals, batch = make_world(nodes, random_edges(rng, names, 0.6), rng, rows=12)
    states, density = likeliest_states(naturals, lay_out(structure, batch, keep=names))
    for row in range(batch.rows):
        expected, best = best_of_all(structure, naturals, batch, row)
        assert float(density[row]) == pytest.approx(best, abs=1e-10)
        for name in names:
            assert states[name][row].tolist() == expected[name].tolist()


def switching(rng, hidden):
    graph = otp.Graph([("k", "u"), ("u", "x")], hidden=hidden)
    structure = Structure.bind(graph, {"k": m.Categorical(3), "u": m.Normal(), "x": m.Normal()})
    return structure, random_naturals(structure, rng)


def test_linear_numbers_are_integrated_out_first():
    rng = np.random.default_rng(3)
    structure, naturals = switching(rng, ["k", "u"])
    x = torch.as_tensor(rng.normal(size=(1, 20, 1)))
    batch = Batch({"x": x}, {"x": torch.ones(1, 20, 1, dtype=torch.bool)}, torch.ones(1, 20).double())
    states, density = likeliest_states(naturals, lay_out(structure, batch, keep=["k"]))
    probs, loc = naturals["k"]["probs"][0].numpy().ravel(), naturals["u"]["loc"][0].numpy().ravel()
    inner, outer = (naturals[n]["scale"][0].numpy().ravel() for n in "ux")
    level, slope = (float(naturals["x"][name].flatten()[0]) for name in ("loc", "weight"))
    centre, spread = level + slope * loc, np.sqrt(outer**2 + slope**2 * inner**2)
    joint = np.log(probs) + norm.logpdf(x.numpy().ravel()[:, None], centre, spread)
    np.testing.assert_array_equal(states["k"].numpy().argmax(-1), joint.argmax(-1))
    np.testing.assert_allclose(density.numpy(), joint.max(-1), atol=1e-10)


def test_numbers_on_points_are_refused():
    graph = otp.Graph([("k", "u"), ("u", "x")], hidden=["k", "u"])
    structure = Structure.bind(graph, {"k": m.Categorical(2), "u": m.Normal(), "x": m.Poisson()})
    x = torch.ones(1, 3, 1).double()
    batch = Batch({"x": x}, {"x": x > 0}, torch.ones(1, 3).double())
    with pytest.raises(ModelError, match="linear and normal; one is not"):
        likeliest_states(random_naturals(structure, np.random.default_rng(0)), lay_out(structure, batch, keep=["k"]))


# -- posterior means and variances of unknown numbers, against the conditional normal, mixtures and conjugate ---------


@pytest.mark.parametrize("seed", range(3))
def test_linear_numbers_have_the_moments_of_the_conditional_normal(seed):
    rng = np.random.default_rng(seed)
    names = [f"v{i}" for i in range(5)]
    structure, naturals, batch = make_world({n: m.Normal() for n in names}, random_edges(rng, names, 0.6), rng, rows=15)
    mean, covariance, at = linear_moments(structure, naturals)
    for node in names:
        first, variance = node_moments(naturals, lay_out(structure, batch, keep=(node,)), node)
        here = at[node].start
        for row in range(batch.rows):
            if bool(batch.mask[node][0, row].all()):
                assert float(first[row, 0]) == float(batch.values[node][0, row, 0])
                assert float(variance[row, 0]) == 0.0
                continue
            shown = [n for n in names if bool(batch.mask[n][0, row].all())]
            places = [at[n].start for n in shown]
            gain = covariance[here, places] @ np.linalg.inv(covariance[np.ix_(places, places)])
            values = np.array([float(batch.values[n][0, row, 0]) for n in shown])
            assert float(first[row, 0]) == pytest.approx(mean[here] + gain @ (values - mean[places]), abs=1e-9)
            assert float(variance[row, 0]) == pytest.approx(covariance[here, here] - gain @ covariance[places, here])


def only(name, values):
    """Rows that show one node."""
    values = torch.as_tensor(values).reshape(1, -1, 1).double()
    return Batch({name: values}, {name: torch.ones_like(values, dtype=torch.bool)}, torch.ones_like(values[..., 0]))


def test_a_number_below_a_hidden_category_has_the_moments_of_the_mixture():
    rng = np.random.default_rng(7)
    graph = otp.Graph([("k", "u"), ("u", "x")], hidden=["k", "u"])
    structure = Structure.bind(graph, {"k": m.Categorical(3), "u": m.Normal(), "x": m.Normal()})
    naturals, x = random_naturals(structure, rng), rng.normal(size=8)
    first, variance = node_moments(naturals, lay_out(structure, only("x", x), keep=("u",)), "u")
    weight, centre = (naturals[n][name][0].numpy().ravel() for n, name in (("k", "probs"), ("u", "loc")))
    inner, outer = (naturals[n]["scale"][0].numpy().ravel() for n in "ux")
    level, slope = (float(naturals["x"][name].flatten()[0]) for name in ("loc", "weight"))
    spread = slope**2 * inner**2 + outer**2
    posterior = weight * norm.pdf(x[:, None], level + slope * centre, np.sqrt(spread))
    posterior /= posterior.sum(-1, keepdims=True)
    own = centre + slope * inner**2 / spread * (x[:, None] - level - slope * centre)
    expected = (posterior * own).sum(-1)
    second = (posterior * (own**2 + inner**2 * outer**2 / spread)).sum(-1)
    np.testing.assert_allclose(first[:, 0].numpy(), expected, atol=1e-10)
    np.testing.assert_allclose(variance[:, 0].numpy(), second - expected**2, atol=1e-10)


def test_a_number_on_points_has_the_moments_of_a_fine_grid():
    graph = otp.Graph([("u", "x")], hidden=["u"])
    structure = Structure.bind(graph, {"u": m.Normal(loc=0.3, scale=0.8), "x": m.Poisson()})
    naturals = random_naturals(structure, np.random.default_rng(1))
    naturals["u"] = {"loc": torch.full((1, 1, 1), 0.3).double(), "scale": torch.full((1, 1, 1), 0.8).double()}
    counts = np.array([0.0, 2.0, 9.0])
    layout = moved(naturals, lay_out(structure, only("x", counts), keep=("u",)))
    first, variance = node_moments(naturals, layout, "u")
    line = np.linspace(-7, 7, 20_001)
    rate = np.exp(float(naturals["x"]["log_rate"].flatten()[0]) + float(naturals["x"]["weight"].flatten()[0]) * line)
    density = norm.pdf(line, 0.3, 0.8) * np.exp(counts[:, None] * np.log(rate) - rate)
    density /= density.sum(-1, keepdims=True)
    expected = density @ line
    np.testing.assert_allclose(first[:, 0].numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(variance[:, 0].numpy(), density @ line**2 - expected**2, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_moments_of_unknowns_are_means_over_states_and_points(case):
    group, equations, points = make_group(np.random.default_rng(len(case)), **CASES[case])
    integrals = group.integrate(equations, [one.unsqueeze(-1) for one in points])
    alone = replace(integrals, grid=integrals.grid[:1] if points else None)  # of the first replica
    weight = torch.rand(integrals.table[:1].shape, generator=torch.Generator().manual_seed(1)).double()
    one, two = _unknown_moments(alone, weight)
    first, second = np.zeros((PIECES, group.dim)), np.zeros((PIECES, group.dim))
    for replica, piece, state, place, y in entries(group, points):
        if replica == 0:
            _, mean, covariance = Plain(group, equations, 1.0, 0, piece, state).given(y)
            first[piece] += float(weight[place]) * mean
            second[piece] += float(weight[place]) * (mean**2 + covariance.diagonal())
    total = weight[0].reshape(PIECES, -1).sum(-1, keepdim=True).numpy()
    np.testing.assert_allclose(one, first / total)
    np.testing.assert_allclose(two, second / total)


# -- against other programs and other truths: pgmpy's elimination, exact EM, counts beyond the largest one seen -------


def network_world(network, rows, share, seed):
    rng = np.random.default_rng(seed)
    frame = delete_cells(network.sample(rows, rng), share, rng)
    structure = Structure.bind(network.graph, {n: m.Categorical(len(network.states[n])) for n in network.nodes})
    schema = Schema.of({n: x.space for n, x in structure.mechanisms.items()}, network.graph)
    naturals = {
        n: {"probs": torch.as_tensor(network.tables[n]).reshape(1, -1, len(network.states[n]))} for n in network.nodes
    }
    return frame, structure, encode(frame, schema, hidden=()), naturals


def as_pgmpy(network):
    factors, models = pytest.importorskip("pgmpy.factors.discrete"), pytest.importorskip("pgmpy.models")
    model = models.DiscreteBayesianNetwork(list(network.graph.edges))
    for node in network.nodes:
        table, parents = network.tables[node], list(network.parents[node])
        sizes = [len(network.states[p]) for p in parents]
        flat = table.reshape(-1, table.shape[-1]).T
        model.add_cpds(factors.TabularCPD(node, table.shape[-1], flat, parents or None, sizes or None))
    return model


@pytest.mark.parametrize("name", ["asia", "sachs"])
@pytest.mark.filterwarnings("ignore")
def test_probabilities_of_published_networks_are_those_of_pgmpy(name, data_folder):
    network = read_bif(data_folder / "bif" / f"{name}.bif")
    frame, structure, batch, naturals = network_world(network, 12, 0.4, 0)
    solver = pytest.importorskip("pgmpy.inference").VariableElimination(as_pgmpy(network))
    for node in network.nodes:
        found = state_probabilities(naturals, lay_out(structure, batch, keep=(node,)), node)
        for row in range(len(frame)):
            if pd.isna(frame.loc[row, node]):
                seen = {n: int(v) for n, v in frame.loc[row].items() if not pd.isna(v)}
                truth = solver.query([node], evidence=seen, show_progress=False).values
                np.testing.assert_allclose(found[row], truth, atol=1e-6)


def test_em_on_expected_counts_climbs_and_ends_where_the_gradient_is_zero(data_folder):
    network = read_bif(data_folder / "bif" / "sachs.bif")
    _, structure, batch, naturals = network_world(network, 500, 0.1, 1)
    layout = lay_out(structure, batch)
    own = {n: {"probs": torch.full_like(p["probs"], 1 / p["probs"].shape[-1])} for n, p in naturals.items()}
    last = -torch.inf
    for _ in range(60):
        found = expectations(own, layout)
        value = float(total_evidence(own, layout))
        assert value >= last - 1e-8
        last = value
        for node, (counts,) in found.families.items():
            table = counts.table().reshape(own[node]["probs"].shape) + 1e-9
            own[node] = {"probs": table / table.sum(-1, keepdim=True)}
    logits = {n: p["probs"].log().requires_grad_() for n, p in own.items()}
    total_evidence({n: {"probs": torch.softmax(v, -1)} for n, v in logits.items()}, layout).sum().backward()
    assert max(float(v.grad.abs().max()) for v in logits.values()) < 0.05


def test_a_count_that_is_never_seen_large_is_summed_as_far_as_the_model_reaches():
    """A steep Poisson regression, empty where it would be large: the largest count seen says nothing of the rest."""
    graph = otp.Graph([("a", "k"), ("k", "y")])
    structure = Structure.bind(graph, {"a": m.Normal(), "k": m.Poisson(), "y": m.Normal()})
    one = torch.ones(1, 1, 1).double()
    naturals = {
        "a": {"loc": 0 * one, "scale": one},
        "k": {"log_rate": one, "weight": 1.5 * one},
        "y": {"loc": 0 * one, "weight": 0.5 * one, "scale": one},
    }
    a = torch.tensor([-1.0, -0.5, 2.0, 3.0]).double().reshape(1, 4, 1)
    k = torch.tensor([1.0, 2.0, 0.0, 0.0]).double().reshape(1, 4, 1)
    y = torch.tensor([0.5, 1.0, 25.0, 130.0]).double().reshape(1, 4, 1)
    seen = torch.ones(1, 4, 1).bool()
    mask = {"a": seen, "k": torch.tensor([True, True, False, False]).reshape(1, 4, 1), "y": seen}
    batch = Batch({"a": a, "k": k, "y": y}, mask, torch.ones(1, 4).double())
    found = log_evidence(naturals, moved(naturals, lay_out(structure, batch)))
    counts = torch.arange(2000).double().reshape(1, -1, 1)
    for row in (2, 3):
        parents = {"a": a[:, row : row + 1]}
        joint = structure.mechanisms["k"].log_prob(naturals["k"], counts, parents)
        joint = joint + structure.mechanisms["y"].log_prob(naturals["y"], y[:, row : row + 1], {"k": counts})
        truth = torch.logsumexp(joint, -1) + structure.mechanisms["a"].log_prob(naturals["a"], a[:, row : row + 1], {})
        assert float(found[0, row]) == pytest.approx(float(truth), abs=1e-6)


@pytest.mark.parametrize("dispersion", [0.3, 2.0])
def test_counts_that_pile_up_at_zero_are_summed_closely(dispersion):
    graph = otp.Graph([("k", "y")], hidden=["k"])
    structure = Structure.bind(graph, {"k": m.NegativeBinomial(), "y": m.Normal()})
    one = torch.ones(1, 1, 1).double()
    naturals = {
        "k": {"log_rate": 4.0 * one, "dispersion": dispersion * one},
        "y": {"loc": 0 * one, "weight": 0.02 * one, "scale": 3 * one},
    }
    y = torch.tensor([0.0, 1.0, 4.0]).double().reshape(1, 3, 1)
    batch = Batch({"y": y}, {"y": torch.ones(1, 3, 1).bool()}, torch.ones(1, 3).double())
    found = log_evidence(naturals, moved(naturals, lay_out(structure, batch)))
    counts = torch.arange(20_000).double().reshape(1, -1, 1)
    prior = structure.mechanisms["k"].log_prob(naturals["k"], counts, {})
    for row in range(3):
        joint = prior + structure.mechanisms["y"].log_prob(naturals["y"], y[:, row : row + 1], {"k": counts})
        assert float(found[0, row]) == pytest.approx(float(torch.logsumexp(joint, -1)), abs=2e-2)
