"""The amortised bidirectional map: its chain against enumeration, and fits by it beside trusted estimates."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward.bidirectional import PREFIX, BidirectionalMap
from otpdag.backward.pieces import Cuts
from otpdag.data import Batch
from otpdag.datasets import poisson_chain
from otpdag.sequences import SequenceBatch


def hmm(size=3, transition=None):
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": transition or m.Categorical(size), "x": m.Poisson()})


def steps(lengths, seed=0):
    x = torch.as_tensor(np.random.default_rng(seed).poisson(5, (1, sum(lengths), 1)), dtype=torch.float64)
    batch = Batch({"x": x}, {"x": torch.ones_like(x).bool()}, torch.ones(1, x.shape[1]).double())
    return SequenceBatch(batch, torch.tensor(lengths))


def random_map(structure, batch, seed=0):
    backward = BidirectionalMap.of(structure, batch, width=8)
    features = backward.features(batch)
    generator = torch.Generator().manual_seed(seed)
    phi = {
        key: torch.randn(value.shape, generator=generator, dtype=torch.float64) * 0.5
        for key, value in backward.init(generator).items()
    }
    return backward, phi, features


def test_the_chain_of_states_is_that_of_enumeration():
    batch = steps([4])
    backward, phi, features = random_map(hmm().structure, batch)
    pieces = Cuts.of(batch).take(hmm().structure, features, torch.tensor([0]))
    _, unary = backward.read(phi, pieces)
    found = backward.marginals(phi, pieces, unary)
    log_moves = torch.log_softmax(phi[f"{PREFIX}pair"], -1)[0]
    paths = torch.tensor(list(itertools.product(range(3), repeat=4)))
    log_weight = sum(unary[0, t, paths[:, t]] for t in range(4))
    log_weight = log_weight + sum(log_moves[paths[:, t - 1], paths[:, t]] for t in range(1, 4))
    weight = torch.softmax(log_weight, 0)
    one_hot = torch.eye(3, dtype=torch.float64)[paths]
    torch.testing.assert_close(found.state[0, :, 0], torch.einsum("p,pts->ts", weight, one_hot))
    pair = torch.einsum("p,pti,ptj->tij", weight, one_hot[:, :-1], one_hot[:, 1:])
    torch.testing.assert_close(found.pair[0, :, 0], pair)
    assert float(found.negentropy().sum()) == pytest.approx(float((weight * torch.log(weight)).sum()))


def test_relaxed_paths_have_the_chains_probabilities():
    batch = steps([5])
    backward, phi, features = random_map(hmm().structure, batch)
    pieces = Cuts.of(batch).take(hmm().structure, features, torch.zeros(4000, dtype=torch.int64))
    _, unary = backward.read(phi, pieces)
    uniform = torch.rand(1, 5 * 4000, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = backward.relaxed(phi, pieces, unary, uniform, 0.01).unflatten(1, (5, 4000))[0]
    found = backward.marginals(phi, pieces, unary)
    torch.testing.assert_close(drawn.mean(1), found.state[0, :, 0], atol=0.03, rtol=0)
    pair = torch.einsum("tni,tnj->tij", drawn[:-1], drawn[1:]) / 4000
    torch.testing.assert_close(pair, found.pair[0, :, 0], atol=0.03, rtol=0)


def test_what_lies_beyond_the_end_of_a_sequence_changes_nothing():
    model = hmm()
    short, long = steps([4]), steps([4, 9])
    long.steps.values["x"][:, :4] = short.steps.values["x"]
    backward, phi, _ = random_map(model.structure, short)
    alone = Cuts.of(short).take(model.structure, backward.features(short), torch.tensor([0]))
    beside = Cuts.of(long).take(model.structure, backward.features(long), torch.tensor([0, 1]))
    one = backward.marginals(phi, alone, backward.read(phi, alone)[1]).state[:, :, 0]
    other = backward.marginals(phi, beside, backward.read(phi, beside)[1]).state[:, :4, 0]
    torch.testing.assert_close(one, other)


def test_pieces_count_every_step_once():
    batch = steps([95, 7, 41])
    cuts = Cuts.of(batch)
    features = torch.arange(batch.rows, dtype=torch.float64).reshape(1, -1, 1)
    pieces = cuts.take(hmm().structure, features, torch.arange(len(cuts)))
    counted = pieces.features[0, pieces.counted, 0].sort().values
    torch.testing.assert_close(counted, torch.arange(batch.rows, dtype=torch.float64))
    lagged = pieces.lagged(pieces.features, 1)[0, :, 0]
    follows = pieces.follows(1) & pieces.counted
    torch.testing.assert_close(lagged[follows], pieces.features[0, follows, 0] - 1)
    assert int(follows.sum()) == batch.rows - 3


def test_neural_potentials_reach_maximum_likelihood():
    counts, _, _ = poisson_chain(60, 60, np.random.default_rng(0))
    exact, neural = hmm(4, m.StayOrMove(4)), hmm(4, m.StayOrMove(4))
    otp.fit(exact, counts, seed=0, restarts=1)
    method = otp.Method("neural", eps=1.0, optimiser="adam", steps=400, batch_size=512)
    otp.fit(neural, counts, method=method, seed=0, restarts=1)
    np.testing.assert_allclose(neural.params()["x"]["log_rate"], exact.params()["x"]["log_rate"], atol=0.015)
    assert float(neural.params()["z"]["stay"]) == pytest.approx(float(exact.params()["z"]["stay"]), abs=0.02)
    gap = exact.score(counts, kind="likelihood") - neural.score(counts, kind="likelihood")
    assert 0 <= gap < 2e-3


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_algorithm_one_recovers_the_papers_model():
    counts, _, truth = poisson_chain(60, 60, np.random.default_rng(0))
    model = hmm(4, m.StayOrMove(4))
    method = replace(otp.engine.paper(), steps=400)
    result = otp.fit(model, counts, method=method, seed=0, restarts=1)
    assert {"reconstruction", "divergence"} <= set(result.history[-1])
    np.testing.assert_allclose(np.exp(model.params()["x"]["log_rate"]), np.exp(truth["x"]["log_rate"]), atol=2.0)
    assert float(model.params()["z"]["stay"]) == pytest.approx(float(truth["z"]["stay"]), abs=0.1)


def test_a_fit_by_pieces_depends_on_its_seed_alone():
    counts, _, _ = poisson_chain(10, 100, np.random.default_rng(0))
    method = replace(otp.engine.paper(), steps=5)
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
    with pytest.raises(otp.ModelError, match="need eps above 0 and eta = 0"):
        otp.fit(hmm(), np.ones((2, 5)), method=otp.Method("hard", optimiser="adam"), seed=0)
    table = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Normal(), "x": m.Normal()})
    named = replace(otp.engine.paper(), backward="bidirectional")
    with pytest.raises(otp.ModelError, match="is for graphs with lagged edges"):
        otp.fit(table, np.random.default_rng(0).normal(size=(20, 1)), seed=0, method=named)
    with pytest.raises(otp.ModelError, match="backward must be"):
        otp.Method("odd", eps=1.0, backward="forward")


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
    for name in ("smoother", None):
        model = otp.Model(graph, {"z": m.Normal(), "x": m.Poisson()})
        method = replace(otp.engine.entropic(), backward=name)
        found[name] = model, otp.fit(model, counts, method=method, seed=0, restarts=1)
    chosen, result = found[None]
    assert result.stages[-1].name == "network joins"
    assert result.loss < found["smoother"][1].loss - 0.02
    # the bound is close to the likelihood that particles find, and the likelihood is higher than the smoother's
    likelihood = chosen.score(counts, kind="likelihood")
    assert likelihood > found["smoother"][0].score(counts, kind="likelihood")
    assert -result.loss == pytest.approx(likelihood, abs=0.02)
    params = chosen.params()
    assert float(params["z"]["weight"].squeeze()) == pytest.approx(0.9, abs=0.05)
    assert float(params["x"]["weight"].squeeze()) == pytest.approx(0.4, abs=0.08)
    assert float(params["x"]["log_rate"]) == pytest.approx(0.3, abs=0.12)
    draws = chosen.posterior(counts[:5], draws=50)["z"].to_numpy().reshape(-1, 50).mean(1)
    assert np.corrcoef(draws, z[:5].ravel())[0, 1] > 0.75
