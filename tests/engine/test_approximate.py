"""Fits and posteriors beyond the exact budget: what they say of themselves, beside exact ones of the same table."""

import warnings

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.answers import queries
from otpdag.likelihood import row_posterior
from otpdag.likelihood.elimination import sums as split_messages
from otpdag.likelihood.elimination.plans import EliminationOptions
from otpdag.settings import SumSizes

SIZE, ROWS = 4, 300


def lattice(rng):
    """Binaries on a square lattice, each a noisy vote of its neighbours above and to the left, with gaps."""
    names = [f"v{i}{j}" for i in range(SIZE) for j in range(SIZE)]
    edges = [(f"v{i}{j}", f"v{i + 1}{j}") for i in range(SIZE - 1) for j in range(SIZE)]
    edges += [(f"v{i}{j}", f"v{i}{j + 1}") for i in range(SIZE) for j in range(SIZE - 1)]
    graph = otp.Graph(edges, nodes=names)
    table = {}
    for name in names:
        votes = sum((2 * table[parent] - 1 for parent in graph.parents(name)), start=np.zeros(ROWS))
        table[name] = (rng.random(ROWS) < 1 / (1 + np.exp(-0.8 * votes))).astype(float)
    frame = pd.DataFrame(table)[names]
    return otp.Model(graph, {name: m.Bernoulli() for name in names}), frame.mask(rng.random(frame.shape) < 0.4)


def fitted(method):
    model, frame = lattice(np.random.default_rng(0))
    return model, frame, otp.fit(model, frame, method=method, seed=0)


@pytest.fixture(scope="module")
def exactly():
    return fitted("auto")


@pytest.mark.slow
def test_a_fit_beyond_its_budget_says_so_and_is_near_the_exact_one(exactly):
    exact_model, frame, exact = exactly
    with pytest.warns(otp.ApproximationWarning, match="exact ones need a table of"):
        model, _, result = fitted(otp.entropic(sums=SumSizes(largest_table=4)))
    assert not exact.status.approximate
    assert not exact.notes
    assert result.status.approximate
    assert "approximate" in str(result.status)
    assert any("belief propagation" in note for note in result.notes)
    gap = [np.abs(model.params()[n]["probs"] - exact_model.params()[n]["probs"]).mean() for n in frame]
    assert np.mean(gap) < 0.01  # standard errors are five times as large and more


@pytest.mark.filterwarnings("ignore::otpdag.ApproximationWarning", "ignore::otpdag.ConvergenceWarning")
@pytest.mark.parametrize(("rounds", "told"), [(1, True), (60, False)])
def test_messages_that_have_not_come_to_rest_are_told(rounds, told, monkeypatch):
    monkeypatch.setattr(split_messages, "MOST_ROUNDS", rounds)
    _, _, result = fitted(otp.entropic(sums=SumSizes(largest_table=4), steps=2))
    assert any("had not come to rest" in note for note in result.notes) == told


def test_a_fit_may_refuse_to_approximate():
    with pytest.raises(otp.ModelError, match="joint states"):
        fitted(otp.entropic(sums=SumSizes(largest_table=4, approximate=False)))


@pytest.mark.parametrize("name", ["largest_table", "entries", "memory"])
def test_a_budget_of_nothing_is_refused(name):
    with pytest.raises(otp.ModelError, match=f"{name} must be at least 1; got 0"):
        SumSizes(**{name: 0})


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_less_memory_changes_nothing():
    model, frame = lattice(np.random.default_rng(1))
    little, _ = lattice(np.random.default_rng(1))
    otp.fit(model, frame, seed=0, steps=3)
    otp.fit(little, frame, method=otp.entropic(sums=SumSizes(memory=2**16), steps=3), seed=0)
    for node in frame:
        np.testing.assert_allclose(little.params()[node]["probs"], model.params()[node]["probs"], atol=1e-6)


def test_what_is_read_off_a_model_says_whether_it_is_approximate(exactly, monkeypatch):
    model, frame, _ = exactly
    frame = frame.head(40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact, likelihood = model.impute(frame, seed=0, draws=50), model.score(frame, kind="likelihood")
    assert exact.attrs["approximate"] == ""
    monkeypatch.setattr(row_posterior, "BUDGET", EliminationOptions(largest_table=4))
    with pytest.warns(otp.ApproximationWarning, match="are approximate"):
        found = model.impute(frame, seed=0, draws=50)
    assert "are approximate" in found.attrs["approximate"]
    assert float((found == exact).to_numpy().mean()) > 0.95
    with pytest.warns(otp.ApproximationWarning, match="are approximate"):
        assert model.score(frame, kind="likelihood") == pytest.approx(likelihood, abs=0.02)


def test_probabilities_of_a_hidden_node_say_it_too(exactly, monkeypatch):
    model, frame, _ = exactly
    graph = otp.Graph(model.graph.edges, nodes=model.graph.nodes, hidden=["v11"])
    hidden = otp.Model(graph, {node: m.Bernoulli() for node in graph.nodes}).set_params(model.params())
    rows = frame.drop(columns="v11").head(30)
    exact = hidden.predict_proba(rows, "v11")
    for module in (row_posterior, queries):
        monkeypatch.setattr(module, "BUDGET", EliminationOptions(largest_table=4))
    with pytest.warns(otp.ApproximationWarning, match="are approximate"):
        found = hidden.predict_proba(rows, "v11")
    assert "are approximate" in found.attrs["approximate"]
    np.testing.assert_allclose(found, exact, atol=0.05)
    with pytest.warns(otp.ApproximationWarning, match="are approximate"):
        draws = hidden.posterior(rows, draws=400, seed=0)
    assert "are approximate" in draws.attrs["approximate"]
    np.testing.assert_allclose(draws["v11"].groupby("row").mean(), exact.iloc[:, 1], atol=0.12)
