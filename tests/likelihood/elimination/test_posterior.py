"""Probabilities and draws of unknowns, against sums over all joint states and the conditional normal."""

import itertools

import numpy as np
import pytest
import torch

from otpdag import Graph
from otpdag import mechanisms as m
from otpdag.errors import ModelError
from otpdag.likelihood.elimination import lay_out, moved, posterior_draws, state_probabilities
from otpdag.structure import Structure
from tests.likelihood.elimination.worlds import CATEGORY, linear_moments, make_world, random_edges


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
    drawn = posterior_draws(naturals, lay_out(structure, batch), many, torch.Generator().manual_seed(0))
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
    drawn = posterior_draws(naturals, lay_out(structure, batch), many, torch.Generator().manual_seed(0))
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
    many = 20_000
    one = posterior_draws(naturals, moved(naturals, lay_out(apart, batch)), many, torch.Generator().manual_seed(0))
    two = posterior_draws(joined, moved(joined, lay_out(together, batch)), many, torch.Generator().manual_seed(1))
    for i, node in enumerate(("f0", "f1")):
        truth, found = one[node][:, :, 0], two["f"][:, :, i]
        error = ((truth.var(1) + found.var(1)) / many).sqrt()
        assert bool(((truth.mean(1) - found.mean(1)).abs() < 4.5 * error).all())
        torch.testing.assert_close(found.std(1) / truth.std(1), torch.ones(3).double(), rtol=0, atol=0.05)
