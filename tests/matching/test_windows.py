"""The direct transport route on sequences."""

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.datasets import poisson_chain
from otpdag.problem import packed_point
from otpdag.settings import Direct, Objective
from tests.dynamic_models import known_poisson_hmm
from tests.table_problems import kind_of


def chain(transition=None, size=3):
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": transition or m.Categorical(size), "x": m.Poisson()})


def test_transport_recovers_the_papers_model():
    counts, states, truth = poisson_chain(60, 100, np.random.default_rng(0))
    model = chain(m.StayOrMove(4))
    result = otp.fit(model, counts, method="transport", seed=0, restarts=2)
    assert result.status.converged
    assert result.history[-1]["direct"] == pytest.approx(result.loss)
    np.testing.assert_allclose(model.params()["x"]["log_rate"], truth["x"]["log_rate"], atol=0.02)
    assert float(model.params()["z"]["stay"]) == pytest.approx(float(truth["z"]["stay"]), abs=0.02)
    assert (model.decode(counts)["z"].to_numpy() == states.ravel()).mean() > 0.97


@pytest.mark.slow
def test_transport_with_missing_steps_and_a_full_transition_matrix():
    model = known_poisson_hmm()
    x = model.sample(400, length=50, seed=1)["x"].to_numpy().reshape(400, 50).astype(float)
    x[np.random.default_rng(0).random(x.shape) < 0.2] = np.nan
    found = chain()
    otp.fit(found, x, method="transport", seed=0, restarts=2)
    np.testing.assert_allclose(np.exp(found.params()["x"]["log_rate"]), [2.0, 8.0, 20.0], rtol=0.05)
    np.testing.assert_allclose(found.params()["z"]["probs"], model.params()["z"]["probs"], atol=0.05)
    np.testing.assert_allclose(found.params()["z[0]"]["probs"], [0.6, 0.3, 0.1], atol=0.15)


@pytest.mark.slow
def test_steps_that_come_from_elsewhere_leave_rates_where_they_are():
    """A twentieth of the steps are anything from 0 to 149. Rates that had to explain them were off by half and more."""
    counts, _, truth = poisson_chain(60, 100, np.random.default_rng(0))
    rng = np.random.default_rng(1)
    spoilt = np.where(rng.random(counts.shape) < 0.05, rng.integers(0, 150, counts.shape), counts)
    model = chain(m.StayOrMove(4))
    otp.fit(model, spoilt, method="transport", seed=0, restarts=2)
    np.testing.assert_allclose(model.params()["x"]["log_rate"], truth["x"]["log_rate"], atol=0.02)


def losses_of(model, others, sequences, length):
    """The direct term on data that the model made, at its parameters and with others in the place of some."""
    x = model.sample(sequences, length=length, seed=0)["x"].to_numpy().reshape(sequences, length)
    features = otp.divergences.WhitenedFeatures(features=40)
    method = otp.Method("windows", Objective(reconstruction=0.0, direct=Direct(features=features)))
    kind = kind_of(chain(), x.astype(float))
    problem = kind.problem(kind.lay_out(method, 0), method, 0)
    naturals = dict(model.fitted.naturals)
    points = [packed_point(problem.structure.raw(one), problem.shapes, 1) for one in (naturals, naturals | others)]
    return [float(problem.loss(point).total) for point in points]


def test_the_models_mean_features_are_those_of_its_samples():
    even = {"probs": torch.full((1, 3, 3), 1 / 3, dtype=torch.float64)}
    right, wrong = losses_of(known_poisson_hmm(), {"z": even}, 6000, 8)
    # whitened gaps of J features of n windows that hardly differ: about J / n
    assert right < 5 * 40 / 6000
    assert wrong > 0.05


def test_windows_at_the_end_of_a_sequence_show_what_is_left():
    """Sequences of a single step tell first states and rates, and nothing of moves."""
    model = known_poisson_hmm()
    even = {"probs": torch.full((1, 3, 3), 1 / 3, dtype=torch.float64)}
    right, moved = losses_of(model, {"z": even}, 500, 1)
    assert right == moved
    assert losses_of(model, {"z[0]": {"probs": torch.tensor([[[0.1, 0.1, 0.8]]]).double()}}, 500, 1)[1] > 3 * right


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [1, 2])
def test_few_sequences_are_enough(sequences):
    """Their first windows are too few for a covariance: by themselves they outweighed all others."""
    model = known_poisson_hmm()
    x = model.sample(sequences, length=300, seed=1)["x"].to_numpy().reshape(sequences, 300).astype(float)
    fitted = chain()
    otp.fit(fitted, x, method="transport", seed=0, restarts=2)
    np.testing.assert_allclose(np.exp(fitted.params()["x"]["log_rate"]), [2.0, 8.0, 20.0], atol=1.0)


def test_the_length_of_a_window_is_an_option():
    x = known_poisson_hmm().sample(40, length=12, seed=1)["x"].to_numpy().reshape(40, 12).astype(float)
    for window, length in ((1, 1), (2, 2), (5, 5), (50, 6)):  # 3**6 paths are the most
        method = otp.Method("windows", Objective(reconstruction=0.0, direct=Direct(window=window)))
        kind = kind_of(chain(), x)
        assert kind.problem(kind.lay_out(method, 0), method, 0).windows.length == length
    with pytest.raises(otp.ModelError, match="window must be at least 1; got 0"):
        Direct(window=0)


def test_what_windows_cannot_say_is_refused():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x"), otp.lag("x", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal()})
    with pytest.raises(otp.ModelError, match="lagged edges of one step between hidden nodes"):
        otp.fit(model, np.zeros((3, 10)), method=otp.engine.transport(), seed=0)
    both = otp.Method("both", Objective(eps=1.0, direct=Direct(1.0)))
    with pytest.raises(otp.ModelError, match="the direct term or the others, not both: set reconstruction to 0"):
        otp.fit(chain(), np.ones((3, 10)), method=both, seed=0)
