"""The direct transport route on sequences."""

import numpy as np
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.datasets import poisson_chain
from otpdag.engine.kinds.recognise import recognise
from otpdag.objective import Direct, Objective
from tests.dynamic_models import known_poisson_hmm


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


def test_transport_with_missing_steps_and_a_full_transition_matrix():
    model = known_poisson_hmm()
    x = model.sample(400, length=50, seed=1)["x"].to_numpy().reshape(400, 50).astype(float)
    x[np.random.default_rng(0).random(x.shape) < 0.2] = np.nan
    found = chain()
    otp.fit(found, x, method="transport", seed=0, restarts=2)
    np.testing.assert_allclose(np.exp(found.params()["x"]["log_rate"]), [2.0, 8.0, 20.0], rtol=0.05)
    np.testing.assert_allclose(found.params()["z"]["probs"], model.params()["z"]["probs"], atol=0.05)
    np.testing.assert_allclose(found.params()["z[0]"]["probs"], [0.6, 0.3, 0.1], atol=0.15)


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
        kind = recognise(chain(), x, weights=None, device="cpu", every_row=False)
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
