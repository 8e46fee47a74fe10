"""Against other programs and other truths: pgmpy's elimination, exact EM, counts beyond the largest one seen."""

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch, Schema, encode
from otpdag.datasets import delete_cells, read_bif
from otpdag.likelihood.elimination import (
    expectations,
    lay_out,
    log_evidence,
    moved,
    state_probabilities,
    total_evidence,
)
from otpdag.structure import Structure

inference = pytest.importorskip("pgmpy.inference")
factors = pytest.importorskip("pgmpy.factors.discrete")
models = pytest.importorskip("pgmpy.models")


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
    solver = inference.VariableElimination(as_pgmpy(network))
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
