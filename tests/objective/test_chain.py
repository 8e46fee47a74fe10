"""The loss of the chain, and of categories given numbers, against sums over all paths."""

import itertools
import math

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward.amortized import RowCode
from otpdag.backward.chain_layout import lay_out_chain
from otpdag.backward.smoother import SequenceMap
from otpdag.data import Schema
from otpdag.data.sequences import Sequences, as_sequences, encode_sequences
from otpdag.objective.chain import chain_terms, lay_out_steps, lay_out_switching, switching_terms


def laid_out(model, data, **kwargs):
    schema = Schema.of(model.spaces, model.graph)
    batch = encode_sequences(Sequences(data), schema, hidden=model.graph.hidden, partial=True)
    return lay_out_chain(model.structure, batch, **kwargs)


def naturals(model):
    return model._naturals


def poisson_hmm(size=3, transition=None):
    rng = np.random.default_rng(1)
    model = otp.Model(
        otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"]),
        {"z": transition or m.Categorical(size), "x": m.Poisson()},
    )
    moves = {"stay": 0.7} if isinstance(transition, m.Stay) else {"probs": rng.dirichlet(np.ones(size) * 2, size)}
    first, rates = {"probs": rng.dirichlet(np.ones(size))}, {"log_rate": np.log([2.0, 6.0, 11.0][:size])}
    return model.set_params({"z": moves, "z[0]": first, "x": rates})


def poisson(x, rate):
    return 0.0 if np.isnan(x) else x * math.log(rate) - rate - math.lgamma(x + 1)


def by_paths(model, x):
    """Likelihood and state probabilities of one sequence by summing over all paths."""
    params = model.params()
    first, rate = params["z[0]"]["probs"], np.exp(params["x"]["log_rate"])
    size = len(rate)
    if "stay" in params["z"]:
        stay = float(params["z"]["stay"])
        moves = np.where(np.eye(size) == 1, stay, (1 - stay) / (size - 1))
    else:
        moves = params["z"]["probs"]
    total, state = 0.0, np.zeros((len(x), size))
    for path in itertools.product(range(size), repeat=len(x)):
        log = math.log(first[path[0]]) + sum(math.log(moves[a, b]) for a, b in itertools.pairwise(path))
        weight = math.exp(log + sum(poisson(x[t], rate[k]) for t, k in enumerate(path)))
        total += weight
        for t, k in enumerate(path):
            state[t, k] += weight
    return math.log(total), state / total


def test_the_gradient_is_that_of_the_likelihood():
    model = poisson_hmm()
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
    model = poisson_hmm()
    data = [np.array([1.0, 7.0, 12.0])]
    terms = chain_terms(model.structure, naturals(model), laid_out(model, data))
    assert float(terms.total) == pytest.approx(-by_paths(model, data[0])[0] / 3)
    assert float(terms.reconstruction) > 0
    assert float(terms.entropic) > 0


def switching(seed, sequences=20, length=40):
    """A latent autoregression with two levels that last, seen through two indicators."""
    rng = np.random.default_rng([11, seed])
    regime, level = np.zeros((sequences, length), dtype=int), np.zeros((sequences, length))
    regime[:, 0] = rng.integers(0, 2, sequences)
    for t in range(length):
        if t:
            regime[:, t] = np.where(rng.random(sequences) < 0.95, regime[:, t - 1], 1 - regime[:, t - 1])
        before = level[:, t - 1] if t else 0.0
        level[:, t] = 0.5 * before + np.array([-2.0, 2.0])[regime[:, t]] + rng.normal(size=sequences)
    x, y = 1 + 0.5 * level, -level
    return {"x": x + 0.4 * rng.normal(size=x.shape), "y": y + 0.8 * rng.normal(size=y.shape)}, regime, level


def model():
    graph = otp.Graph([otp.lag("s", "s"), otp.lag("z", "z"), ("s", "z"), ("z", "x"), ("z", "y")], hidden=["s", "z"])
    return otp.Model(graph, {"s": m.Categorical(2), "z": m.Normal(), "x": m.Normal(), "y": m.Normal()})


def test_categories_are_summed_over_exactly_given_the_numbers():
    known = model()
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
    data, _, _ = switching(1, sequences=1, length=4)
    batch = encode_sequences(as_sequences(data), known._known_schema(), hidden=known.graph.hidden)
    backward = SequenceMap(structure, RowCode.of(structure, batch.steps, ("x", "y")), ("z",))
    features = backward.features(batch)
    phi = backward.start(batch, features, {"z": torch.linspace(-1, 1, 4).double().unsqueeze(-1)})
    noise = torch.randn(1, 3, 4, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    steps = lay_out_steps(structure, batch, backward, noise)
    chain = lay_out_switching(structure, steps, ("z",))
    terms = switching_terms(structure, naturals, phi, backward, steps, chain)
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
