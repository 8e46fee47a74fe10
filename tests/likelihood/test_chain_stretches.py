"""Stretches of sequences side by side, beside the same recursion step by step."""

import numpy as np
import pytest
import torch

from otpdag.likelihood import chain_layout
from otpdag.likelihood.chain_messages import AGREED, marginals_by_steps, marginals_by_stretches, smoothed
from otpdag.likelihood.chain_potentials import Linear, potentials
from tests.dynamic_models import laid_out, random_poisson_hmm


def two_replicas(chain, model):
    """Potentials of a model, and of the same with other rates."""
    naturals = model._naturals
    other = {**naturals, "x": {"log_rate": naturals["x"]["log_rate"] + 0.3}}
    parts = [Linear.of(potentials(model.structure, one, chain)) for one in (naturals, other)]
    return Linear(*(torch.cat([getattr(part, name) for part in parts]) for name in ("unary", "log_unit", "pair")))


@pytest.mark.parametrize("stretch", [3, 16])
@pytest.mark.parametrize("lengths", [(41,), (37, 16, 5, 1), (33, 33, 32)])
@pytest.mark.parametrize("weighted", [False, True])
def test_stretches_give_what_steps_give(stretch, lengths, weighted, monkeypatch):
    monkeypatch.setattr(chain_layout, "STRETCH", stretch)
    rng = np.random.default_rng(0)
    data = [rng.poisson(6, length).astype(float) for length in lengths]
    data[0][3:9] = np.nan
    model = random_poisson_hmm()
    chain = laid_out(model, data)
    (block,) = chain.blocks
    linear = two_replicas(chain, model)
    weight = torch.as_tensor(rng.uniform(0.2, 3.0, (2, len(lengths)))) if weighted else None
    found, expected = marginals_by_stretches(block, linear, weight), marginals_by_steps(block, linear, chain, weight)
    torch.testing.assert_close(found.state, expected.state, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.log_scale, expected.log_scale, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.pair, expected.pair, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.state.sum(1), torch.ones(2, sum(lengths)).double())
    # every step but the first of a sequence has a pair of states
    steps = torch.tensor(lengths).sort(descending=True).values - 1
    counted = steps.double().sum().expand(2) if weight is None else (weight * steps).sum(-1)
    torch.testing.assert_close(found.pair.sum((1, 2, 3)), counted)


def test_states_that_are_lost_are_left_to_the_steps():
    model = random_poisson_hmm()
    chain = laid_out(model, [np.full(40, 5.0)])
    (block,) = chain.blocks
    linear = Linear.of(potentials(model.structure, model._naturals, chain))
    nothing = Linear(torch.zeros_like(linear.unary), linear.log_unit, linear.pair)
    assert marginals_by_stretches(block, nothing) is None


def filtered_by_hand(emission, matrix):
    """Filtered probabilities of one long sequence (T, S), and its log-likelihood."""
    message, total, filtered = np.ones(len(matrix)), 0.0, []
    for number, row in enumerate(emission):
        message = row * (message @ matrix if number else 1.0)
        total += np.log(message.sum())
        message = message / message.sum()
        filtered.append(message)
    return np.array(filtered), total


@pytest.mark.parametrize(("stay", "products"), [(0.6, False), (0.9999, True)])
@pytest.mark.parametrize("every", [1, 4])
def test_a_long_sequence_is_cut_exactly_whether_it_forgets_or_not(stay, products, every):
    rng = np.random.default_rng(1)
    steps, size = 205, 3
    matrix = np.full((size, size), (1 - stay) / (size - 1))
    np.fill_diagonal(matrix, stay)
    emission = rng.uniform(0.9 if products else 0.1, 1.0, (steps, size))
    stretches = chain_layout.Stretches.of(torch.ones(steps, dtype=torch.long), 32)
    placed = np.where(stretches.inside[..., None], emission[stretches.columns], 1.0).swapaxes(1, 2)[:, None]
    guessed = smoothed(placed.copy(), matrix[None], stretches, every, products=False)
    assert (guessed is None) == products  # a chain that hardly forgets is not guessed
    found = smoothed(placed.copy(), matrix[None], stretches, every, products=True) if products else guessed
    forward, total = filtered_by_hand(emission, matrix)
    assert np.log(found.scale).sum() == pytest.approx(total, rel=10 * AGREED)
    at = stretches.place
    before = found.before[:, 0].swapaxes(0, 1).reshape(size, -1)[:, at].T
    np.testing.assert_allclose((before / before.sum(1, keepdims=True))[1:], forward[:-1], rtol=1e-9)
    state = found.state[:, 0].swapaxes(0, 1).reshape(size, -1)[:, at].T
    np.testing.assert_allclose(state.sum(1), 1.0, rtol=1e-10)
    np.testing.assert_allclose(state[-1], forward[-1], rtol=1e-9)


def test_a_single_replica_is_one_of_two():
    model = random_poisson_hmm()
    chain = laid_out(model, [np.random.default_rng(4).poisson(6, length).astype(float) for length in (70, 41)])
    (block,) = chain.blocks
    both = two_replicas(chain, model)
    one = marginals_by_stretches(block, Linear(both.unary[:1], both.log_unit[:1], both.pair[:1]))
    two = marginals_by_stretches(block, both)
    for name in ("state", "log_scale", "pair"):
        torch.testing.assert_close(getattr(one, name), getattr(two, name)[:1], rtol=1e-12, atol=1e-14)
