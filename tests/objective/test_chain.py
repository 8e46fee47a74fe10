"""The loss of the chain, and of categories given numbers, against sums over all paths."""

import itertools

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag.backward.amortized import RowCode
from otpdag.backward.number_steps import lay_out_steps, lay_out_switching, padded_features
from otpdag.backward.smoother import SequenceMap
from otpdag.data.sequences import as_sequences, encode_sequences
from otpdag.objective.chain import _by_kind, chain_terms, expected_log_potential
from otpdag.objective.hidden_numbers import switching_terms
from tests.dynamic_models import (
    by_paths,
    laid_out,
    log_poisson,
    poisson_hmm,
    random_poisson_hmm,
    switching_model,
    switching_series,
)


def naturals(model):
    return model._naturals


def test_the_gradient_is_that_of_the_likelihood():
    model = random_poisson_hmm()
    data = [np.array([1.0, 7.0, np.nan, 12.0, 3.0]), np.array([9.0, 2.0])]
    chain = laid_out(model, data)
    theta = {key: value.clone().requires_grad_(True) for key, value in model.structure.raw(naturals(model)).items()}
    loss = chain_terms(model.structure, model.structure.naturals(theta), chain).total
    found = torch.autograd.grad(loss.sum(), list(theta.values()))
    for (key, value), gradient in zip(theta.items(), found, strict=True):
        numeric = torch.zeros_like(value)
        for place in np.ndindex(*value.shape):
            ends = []
            for shift in (1e-5, -1e-5):
                moved = {name: tensor.detach().clone() for name, tensor in theta.items()}
                moved[key][place] += shift
                ends.append(float(chain_terms(model.structure, model.structure.naturals(moved), chain).total.detach()))
            numeric[place] = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(gradient, numeric.detach(), atol=1e-8)


def test_the_loss_splits_into_cost_and_entropic_term():
    model = random_poisson_hmm()
    data = [np.array([1.0, 7.0, 12.0])]
    terms = chain_terms(model.structure, naturals(model), laid_out(model, data))
    log_likelihood, states = by_paths(model, data[0])
    assert float(terms.total) == pytest.approx(-log_likelihood / 3)
    rates = np.exp(model.params()["x"]["log_rate"])
    cost = -sum(states[t, k] * log_poisson(x, rates[k]) for t, x in enumerate(data[0]) for k in range(3)) / 3
    assert float(terms.reconstruction) == pytest.approx(cost)
    assert float(terms.entropic) == pytest.approx(-log_likelihood / 3 - cost)


def test_categories_are_summed_over_exactly_given_the_numbers():
    known = switching_model()
    known.set_params(
        {
            "s": {"probs": [[0.8, 0.2], [0.3, 0.7]]},
            "s[0]": {"probs": [0.6, 0.4]},
            "z": {"loc": [-1.0, 1.0], "weight": 0.5, "scale": [1.0, 0.7]},
            "z[0]": {"loc": [0.0, 0.5], "scale": [1.0, 2.0]},
            "x": {"loc": 0.3, "weight": 0.5, "scale": 0.4},
            "y": {"loc": 0.0, "weight": -1.0, "scale": 0.8},
        }
    )
    structure, naturals = known.structure, known.fitted.naturals
    data, _, _ = switching_series(1, sequences=1, length=4)
    batch = encode_sequences(as_sequences(data), known._known_schema(), hidden=known.graph.hidden)
    backward = SequenceMap(structure, RowCode.of(structure, batch.steps, ("x", "y")), ("z",))
    features = padded_features(structure, backward.features(batch))
    phi = backward.start(batch, features, {"z": torch.linspace(-1, 1, 4).double().unsqueeze(-1)})
    noise = torch.randn(1, 3, 4, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    steps = lay_out_steps(batch, backward, noise)
    chain = lay_out_switching(structure, steps)
    terms = switching_terms(naturals, phi, backward, steps, chain)
    z = backward.draw(phi, steps.block, steps.features, noise).values["z"][0, :, :, 0].numpy()
    expected = np.mean([log_joint(data, path) for path in z]) / 4
    assert float(terms.reconstruction) == pytest.approx(-expected, rel=1e-6)


def log_joint(data, z):
    """Log-density of numbers and indicators, regimes enumerated."""
    moves, total = np.array([[0.8, 0.2], [0.3, 0.7]]), -np.inf
    seen = normal(data["x"][0], 0.3 + 0.5 * z, 0.4).sum() + normal(data["y"][0], -z, 0.8).sum()
    for path in itertools.product(range(2), repeat=4):
        found = np.log([0.6, 0.4])[path[0]] + normal(z[0], [0.0, 0.5][path[0]], [1.0, 2.0][path[0]])
        for t in range(1, 4):
            mean = [-1.0, 1.0][path[t]] + 0.5 * z[t - 1]
            found += np.log(moves[path[t - 1], path[t]]) + normal(z[t], mean, [1.0, 0.7][path[t]])
        total = np.logaddexp(total, found)
    return total + seen


def normal(value, mean, scale):
    return -0.5 * ((value - mean) / scale) ** 2 - np.log(scale) - 0.5 * np.log(2 * np.pi)


@pytest.mark.parametrize("many", [3, 40])
def test_sums_over_columns_of_a_kind_are_the_same_both_ways(many):
    """With few kinds and many columns, and with more kinds than columns."""
    generator = torch.Generator().manual_seed(0)
    state = torch.rand(2, 4, 12, generator=generator, dtype=torch.float64)
    kinds = torch.randint(min(many, 12), (12,), generator=generator)
    found = _by_kind(state, kinds, many)
    assert found.shape == (2, many, 4)
    expected = torch.zeros(2, many, 4, dtype=torch.float64)
    for column, kind in enumerate(kinds.tolist()):
        expected[:, kind] += state[:, :, column]
    torch.testing.assert_close(found, expected)


def test_a_log_potential_of_minus_infinity_counts_only_where_it_has_weight():
    weight = torch.tensor([[[0.0, 2.0], [1.0, 3.0]]]).double()
    log_potential = torch.tensor([[[-torch.inf, 0.5], [2.0, -1.0]]]).double()
    assert expected_log_potential(weight, log_potential).tolist() == [1.0 + 2.0 - 3.0]


@pytest.mark.parametrize("seed", range(3))
def test_a_single_series_begins_in_the_state_that_explains_it_best(seed):
    """The likelihood is linear in the first state's probabilities: its maximum is a corner."""
    rng = np.random.default_rng(seed)
    states = (rng.random(400) < 0.1).cumsum() % 2
    x = rng.poisson(2.0 + 2.0 * states).astype(float)
    model = poisson_hmm(size=2)
    result = otp.fit(model, x[None], seed=seed, restarts=2)
    begun = model.params()["z[0]"]["probs"]
    likelihoods = []
    for first in np.eye(2):
        cornered = poisson_hmm(size=2).set_params({**model.params(), "z[0]": {"probs": first}})
        chain = laid_out(cornered, [x])
        likelihoods.append(-float(chain_terms(cornered.structure, naturals(cornered), chain).total))
    assert begun.max() > 1 - 1e-6
    assert int(begun.argmax()) == int(np.argmax(likelihoods))
    assert result.loss == pytest.approx(-max(likelihoods), abs=1e-8)
    assert result.status.converged
