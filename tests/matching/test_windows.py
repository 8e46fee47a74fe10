"""The direct transport route on sequences."""

from dataclasses import replace

import numpy as np
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.datasets import poisson_chain
from otpdag.engine.resolve import recognise
from otpdag.matching.windows import MOST_SCORED
from otpdag.settings import Direct, Objective
from tests.dynamic_models import known_poisson_hmm
from tests.window_models import problem_of


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


def test_estimates_are_nearly_those_of_maximum_likelihood():
    """In standard errors with the states known. Features of three steps alone were 0.8 of them away."""
    counts, _, truth = poisson_chain(60, 100, np.random.default_rng(4))
    ours, theirs = chain(m.StayOrMove(4)), chain(m.StayOrMove(4))
    otp.fit(ours, counts, method="transport", seed=0, restarts=2)
    otp.fit(theirs, counts, method="entropic", seed=0, restarts=2)
    rates, likeliest = (np.exp(model.params()["x"]["log_rate"]) for model in (ours, theirs))
    error = np.sqrt(4 * np.exp(truth["x"]["log_rate"]) / counts.size)
    assert np.sqrt(np.mean(((rates - likeliest) / error) ** 2)) < 0.3


def test_steps_that_come_from_elsewhere_leave_rates_where_they_are():
    """A twentieth of the steps are anything from 0 to 149. Rates that had to explain them were off by half and more."""
    counts, _, truth = poisson_chain(60, 100, np.random.default_rng(0))
    rng = np.random.default_rng(1)
    spoilt = np.where(rng.random(counts.shape) < 0.05, rng.integers(0, 150, counts.shape), counts)
    model = chain(m.StayOrMove(4))
    otp.fit(model, spoilt, method="transport", seed=0, restarts=2)
    np.testing.assert_allclose(model.params()["x"]["log_rate"], truth["x"]["log_rate"], atol=0.02)


def moves_of(problem, point):
    what = []
    while (moved := problem.moved(point)) is not None:
        what.append(moved.what)
        problem = moved.problem
    return what


def test_scores_are_taken_once_where_they_move_nothing_far_and_again_where_they_do():
    problem, point = problem_of(known_poisson_hmm(), 40, 12)
    assert moves_of(problem, point) == ["scores of windows"]
    scored = problem.moved(point).problem
    assert scored.moved(point + 0.5).what == "scores of windows"
    assert replace(scored, scored=(point,) * MOST_SCORED).moved(point + 0.5) is None
    assert replace(problem, direct=replace(problem.direct, refinements=0)).moved(point) is None


def test_features_are_weighed_by_the_model_where_nodes_have_no_density(monkeypatch):
    problem, point = problem_of(known_poisson_hmm(), 40, 12)
    monkeypatch.setattr(m.Poisson, "has_density", False)
    assert moves_of(problem, point) == ["refined weights"]


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
