"""Fits by the bidirectional map, on pieces of sequences, beside trusted estimates."""

import numpy as np
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.datasets import poisson_chain
from otpdag.engine import Adam
from otpdag.objective import Drawn
from otpdag.settings import Objective


def hmm(size=3, transition=None):
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": transition or m.Categorical(size), "x": m.Poisson()})


@pytest.mark.slow
def test_neural_potentials_reach_maximum_likelihood():
    counts, _, _ = poisson_chain(60, 60, np.random.default_rng(0))
    exact, neural = hmm(4, m.StayOrMove(4)), hmm(4, m.StayOrMove(4))
    otp.fit(exact, counts, seed=0, restarts=1)
    drawn = Drawn(noise="marginal", batch_size=512)
    method = otp.Method("neural", Objective(eps=1.0), drawn, Adam(steps=400))
    otp.fit(neural, counts, method=method, seed=0, restarts=1)
    np.testing.assert_allclose(neural.params()["x"]["log_rate"], exact.params()["x"]["log_rate"], atol=0.015)
    assert float(neural.params()["z"]["stay"]) == pytest.approx(float(exact.params()["z"]["stay"]), abs=0.02)
    gap = exact.score(counts, kind="likelihood") - neural.score(counts, kind="likelihood")
    assert 0 <= gap < 2e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_algorithm_one_recovers_the_papers_model():
    counts, _, truth = poisson_chain(60, 60, np.random.default_rng(0))
    model = hmm(4, m.StayOrMove(4))
    method = otp.paper(steps=400)
    result = otp.fit(model, counts, method=method, seed=0, restarts=1)
    assert {"reconstruction", "divergence"} <= set(result.history[-1])
    np.testing.assert_allclose(np.exp(model.params()["x"]["log_rate"]), np.exp(truth["x"]["log_rate"]), atol=2.0)
    assert float(model.params()["z"]["stay"]) == pytest.approx(float(truth["z"]["stay"]), abs=0.1)


def test_a_fit_by_pieces_depends_on_its_seed_alone():
    counts, _, _ = poisson_chain(10, 100, np.random.default_rng(0))
    method = otp.paper(steps=5)
    found = []
    for _ in range(2):
        model = hmm(4)
        with pytest.warns(otp.ConvergenceWarning):
            otp.fit(model, counts, method=method, seed=3, restarts=2)
        found.append(model.params()["x"]["log_rate"])
    np.testing.assert_array_equal(*found)


def test_what_pieces_do_not_fit_is_refused():
    far = otp.Graph([otp.lag("z", "z", by=12), ("z", "x")], hidden=["z"])
    model = otp.Model(far, {"z": m.Normal(), "x": m.Poisson()})
    with pytest.raises(otp.ModelError, match="reaches further"):
        otp.fit(model, np.ones((2, 30)), method="paper", seed=0)
    hard = otp.Method("hard", Objective(), Drawn(noise="marginal"), Adam())
    with pytest.raises(otp.ModelError, match="need eps above 0 and no push-forward term"):
        otp.fit(hmm(), np.ones((2, 5)), method=hard, seed=0)
    table = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Normal(), "x": m.Normal()})
    with pytest.raises(otp.ModelError, match="network is for sequences"):
        otp.fit(table, np.random.default_rng(0).normal(size=(20, 1)), seed=0, method=otp.entropic(network=True))
    with pytest.raises(otp.ModelError, match="network is for sequences with hidden numbers; these have none"):
        otp.fit(hmm(), np.ones((2, 5)), seed=0, method=otp.entropic(network=True))
    with pytest.raises(otp.ModelError, match="backward must be"):
        Drawn(backward="forward")


def latent_counts(seed, sequences=40, length=60):
    """Few counts whose log-rate is a latent autoregression: far from linear and Gaussian."""
    rng = np.random.default_rng([5, seed])
    z = np.zeros((sequences, length))
    z[:, 0] = rng.normal(size=sequences)
    for t in range(1, length):
        z[:, t] = 0.9 * z[:, t - 1] + rng.normal(size=sequences)
    return rng.poisson(np.exp(0.3 + 0.4 * z)), z


@pytest.mark.slow
def test_a_network_serves_where_the_smoother_is_not_exact():
    counts, z = latent_counts(0)
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    found = {}
    for network in (False, None):
        model = otp.Model(graph, {"z": m.Normal(), "x": m.Poisson()})
        method = otp.entropic(network=network)
        found[network] = model, otp.fit(model, counts, method=method, seed=0, restarts=1)
    chosen, result = found[None]
    assert result.stages[-1].name == "network joins"
    assert result.loss < found[False][1].loss - 0.02
    # the bound is close to the likelihood that particles find, and the likelihood is higher than the smoother's
    likelihood = chosen.score(counts, kind="likelihood")
    assert likelihood > found[False][0].score(counts, kind="likelihood")
    assert -result.loss == pytest.approx(likelihood, abs=0.02)
    params = chosen.params()
    assert float(params["z"]["weight"].squeeze()) == pytest.approx(0.9, abs=0.05)
    assert float(params["x"]["weight"].squeeze()) == pytest.approx(0.4, abs=0.08)
    assert float(params["x"]["log_rate"]) == pytest.approx(0.3, abs=0.12)
    draws = chosen.posterior(counts[:5], draws=50)["z"].to_numpy().reshape(-1, 50).mean(1)
    assert np.corrcoef(draws, z[:5].ravel())[0, 1] > 0.75
