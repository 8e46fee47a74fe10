"""The direct transport route on sequences: windows of the data against windows of the model."""

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.datasets import poisson_chain
from otpdag.divergences import WhitenedFeatures
from otpdag.inference.ancestral import ancestral_sequences
from otpdag.objective.windows import lay_out_windows, window_columns, window_terms
from otpdag.sequences import SequenceBatch


def chain(transition=None, size=3):
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": transition or m.Categorical(size), "x": m.Poisson()})


def known():
    model = chain()
    model.set_params(
        {
            "z": {"probs": [[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.1, 0.3, 0.6]]},
            "z[0]": {"probs": [0.6, 0.3, 0.1]},
            "x": {"log_rate": np.log([2.0, 8.0, 20.0])},
        }
    )
    return model


def drawn(model, sequences, length, seed):
    steps = ancestral_sequences(
        model.structure, model.fitted.naturals, sequences, length, torch.Generator().manual_seed(seed)
    )["x"].flatten(1, 2)
    batch = Batch({"x": steps}, {"x": torch.ones_like(steps).bool()}, torch.ones(1, steps.shape[1]).double())
    return SequenceBatch(batch, torch.full((sequences,), length))


def test_the_models_mean_features_are_those_of_its_samples():
    model = known()
    batch = drawn(model, 6000, 8, 0)
    windows = lay_out_windows(model.structure, batch, WhitenedFeatures(features=40), torch.Generator().manual_seed(0))
    terms = window_terms(model.structure, model.fitted.naturals, windows, 1.0)
    # whitened gaps of J features of n windows that hardly differ: about J / n
    assert float(terms.total) < 5 * 40 / 6000
    wrong = {node: dict(values) for node, values in model.fitted.naturals.items()}
    wrong["z"] = {"probs": torch.full((1, 3, 3), 1 / 3, dtype=torch.float64)}
    assert float(window_terms(model.structure, wrong, windows, 1.0).total) > 0.05


def test_windows_at_the_end_of_a_sequence_show_what_is_left():
    x = torch.arange(5.0).double().reshape(1, 5, 1)
    batch = SequenceBatch(Batch({"x": x}, {"x": torch.ones_like(x).bool()}, torch.ones(1, 5)), torch.tensor([3, 2]))
    columns = window_columns(chain().structure, batch, torch.arange(5), 2)
    assert columns[1].values[0, [0, 1, 3], 0].tolist() == [1.0, 2.0, 4.0]
    assert columns[1].seen[0].tolist() == [True, True, False, True, False]


def test_transport_recovers_the_papers_model():
    counts, states, truth = poisson_chain(60, 100, np.random.default_rng(0))
    model = chain(m.StayOrMove(4))
    result = otp.fit(model, counts, method="transport", seed=0, restarts=2)
    assert result.status.converged
    assert result.history[-1]["direct"] == pytest.approx(result.loss)
    np.testing.assert_allclose(model.params()["x"]["log_rate"], truth["x"]["log_rate"], atol=0.02)
    assert float(model.params()["z"]["stay"]) == pytest.approx(float(truth["z"]["stay"]), abs=0.02)
    assert (model.decode(counts)["z"].to_numpy() == states.ravel()).mean() > 0.97


def test_transport_with_missing_steps_and_a_full_transition_matrix():
    model = known()
    x = model.sample(400, length=50, seed=1)["x"].to_numpy().reshape(400, 50).astype(float)
    x[np.random.default_rng(0).random(x.shape) < 0.2] = np.nan
    found = chain()
    otp.fit(found, x, method="transport", seed=0, restarts=2)
    np.testing.assert_allclose(np.exp(found.params()["x"]["log_rate"]), [2.0, 8.0, 20.0], rtol=0.05)
    np.testing.assert_allclose(found.params()["z"]["probs"], model.params()["z"]["probs"], atol=0.05)
    np.testing.assert_allclose(found.params()["z[0]"]["probs"], [0.6, 0.3, 0.1], atol=0.15)


def test_what_windows_cannot_say_is_refused():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x"), otp.lag("x", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal()})
    with pytest.raises(otp.ModelError, match="lagged edges of one step between hidden nodes"):
        otp.fit(model, np.zeros((3, 10)), method=otp.engine.transport(), seed=0)
    both = otp.Method("both", kappa=1.0, eps=1.0)
    with pytest.raises(otp.ModelError, match="set reconstruction or kappa to 0"):
        otp.fit(chain(), np.ones((3, 10)), method=both, seed=0)
