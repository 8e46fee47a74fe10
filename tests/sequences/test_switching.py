"""Hidden categories and hidden numbers in one dynamic model, against simulated truth and enumeration."""

import itertools

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward.amortized import RowCode
from otpdag.backward.smoother import SequenceMap
from otpdag.data.sequences import as_sequences, encode_sequences
from otpdag.objective.chain import lay_out_steps, lay_out_switching, switching_terms


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


@pytest.mark.slow
def test_a_switching_latent_autoregression_is_recovered():
    data, regime, level = switching(0)
    found = model()
    result = otp.fit(found, data, seed=0, restarts=1)
    assert result.stages[1].losses[-1][0] < result.stages[0].losses[-1][0] - 0.01  # reading the categories helps
    params = found.params()
    np.testing.assert_allclose(params["s"]["probs"].diagonal(), 0.95, atol=0.04)
    assert float(params["z"]["weight"].squeeze()) == pytest.approx(0.5, abs=0.06)
    assert float(np.diff(params["z"]["loc"]).squeeze()) == pytest.approx(4.0, abs=0.4)
    assert float(params["x"]["weight"].squeeze()) == pytest.approx(0.5, abs=0.05)
    assert float(params["y"]["weight"].squeeze()) == pytest.approx(-1.0, abs=0.1)
    assert float(params["x"]["scale"]) == pytest.approx(0.4, abs=0.04)
    assert float(params["y"]["scale"]) == pytest.approx(0.8, abs=0.08)
    few = {name: value[:3] for name, value in data.items()}
    probabilities = found.predict_proba(few, "s").to_numpy()
    np.testing.assert_allclose(probabilities.sum(-1), 1.0)
    assert (probabilities.argmax(1) == regime[:3].ravel()).mean() > 0.95
    draws = found.posterior(few, draws=30)["z"].to_numpy().reshape(-1, 30).mean(1)
    assert np.corrcoef(draws, level[:3].ravel())[0, 1] > 0.97


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


def test_what_is_not_fitted_together_is_refused():
    data, _, _ = switching(0, 3, 10)
    with pytest.raises(otp.ModelError, match="together need eps = 1"):
        otp.fit(model(), data, method=otp.Method("soft", eps=0.5), seed=0)
    graph = otp.Graph([otp.lag("z", "z"), otp.lag("k", "k"), ("z", "x"), ("k", "x")], hidden=["z", "k"])
    counts = otp.Model(graph, {"z": m.Normal(), "k": m.Poisson(), "k[0]": m.Poisson(), "x": m.Normal()})
    with pytest.raises(otp.ModelError, match="hidden counts are not fitted"):
        otp.fit(counts, np.zeros((3, 10)), seed=0)
