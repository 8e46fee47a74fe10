"""Fits of dynamic networks: recovery, missing steps, edge cases."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from experiments.small_models import poisson_chain
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.engine import Adam, sequence_data
from otpdag.engine.fit import recognise
from otpdag.engine.search import restart_seed
from otpdag.engine.sequence_data import CHAIN
from otpdag.learned.sequence_map import SequenceMap
from otpdag.objective import Drawn
from otpdag.settings import Objective
from tests.dynamic_models import poisson_hmm, state_space


def hmm(transition=None, size=4):
    return otp.Model(
        otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"]),
        {"z": transition or m.Categorical(size), "x": m.Poisson()},
    )


def test_the_papers_model_is_recovered():
    counts, states, truth = poisson_chain(40, 100, np.random.default_rng(0))
    model = poisson_hmm(m.StayOrMove(4))
    result = otp.fit(model, counts, seed=0, restarts=2)
    assert result.status.converged
    params = model.params()
    np.testing.assert_allclose(params["x"]["log_rate"], truth["x"]["log_rate"], atol=0.03)
    assert float(params["z"]["stay"]) == pytest.approx(float(truth["z"]["stay"]), abs=0.02)
    path = model.decode(counts)["z"].to_numpy()
    assert (path == states.ravel()).mean() > 0.97


def test_a_fit_depends_on_its_seed_alone():
    counts, _, _ = poisson_chain(10, 50, np.random.default_rng(0))
    first, second = poisson_hmm(), poisson_hmm()
    otp.fit(first, counts, seed=3, restarts=2)
    otp.fit(second, counts, seed=3, restarts=2)
    np.testing.assert_array_equal(first.params()["x"]["log_rate"], second.params()["x"]["log_rate"])


def test_a_part_of_the_steps_first_leads_to_the_same_end():
    counts, _, _ = poisson_chain(40, 100, np.random.default_rng(0))
    whole, staged = poisson_hmm(m.StayOrMove(4)), poisson_hmm(m.StayOrMove(4))
    otp.fit(whole, counts, seed=0, restarts=1)
    result = otp.fit(staged, counts, seed=0, restarts=1, course=replace(CHAIN, part_rows=1000))
    assert [stage.name for stage in result.stages] == ["best start, part", "best start"]
    np.testing.assert_allclose(staged.params()["x"]["log_rate"], whole.params()["x"]["log_rate"], atol=2e-3)


def test_a_frame_with_sequence_and_time_columns():
    counts, _, _ = poisson_chain(5, 40, np.random.default_rng(1))
    frame = pd.DataFrame({"id": np.repeat(np.arange(5), 40), "t": np.tile(np.arange(40), 5), "x": counts.ravel()})
    one, other = poisson_hmm(), poisson_hmm()
    otp.fit(one, otp.Sequences(frame, sequence="id", time="t"), seed=0, restarts=1)
    otp.fit(other, counts, seed=0, restarts=1)
    np.testing.assert_array_equal(one.params()["x"]["log_rate"], other.params()["x"]["log_rate"])


def test_missing_steps_anywhere():
    counts, _, truth = poisson_chain(40, 100, np.random.default_rng(0))
    x = counts.astype(float)
    x[np.random.default_rng(1).random(x.shape) < 0.3] = np.nan
    x[3] = np.nan  # a whole sequence
    model = poisson_hmm(m.StayOrMove(4))
    otp.fit(model, x, seed=0, restarts=2)
    np.testing.assert_allclose(model.params()["x"]["log_rate"], truth["x"]["log_rate"], atol=0.04)
    assert np.isfinite(model.predict_proba(x, "z").to_numpy()).all()
    filled = model.impute(x[:2], seed=0)["x"].to_numpy()
    seen = ~np.isnan(x[:2].ravel())
    np.testing.assert_array_equal(filled[seen], x[:2].ravel()[seen])
    truth, gaps = counts[:2].ravel(), ~seen
    others = np.random.default_rng(2).choice(x[~np.isnan(x)], gaps.sum())  # draws that do not look at the neighbours
    assert gaps.sum() > 50
    assert np.abs(filled - truth)[gaps].mean() < 0.6 * np.abs(others - truth[gaps]).mean()
    assert np.abs(filled - truth)[gaps].mean() < 0.7 * np.abs(np.nanmean(x) - truth[gaps]).mean()


def test_sequences_of_length_one():
    counts, _, _ = poisson_chain(60, 1, np.random.default_rng(0))
    model = poisson_hmm(size=4)
    otp.fit(model, counts, seed=0, restarts=1)
    np.testing.assert_allclose(model.params()["z"]["probs"].sum(-1), 1.0)
    mixed = [*counts[:5], poisson_chain(1, 80, np.random.default_rng(1))[0][0]]
    otp.fit(model, mixed, seed=0, restarts=1)
    assert np.isfinite(model.score(mixed, kind="likelihood"))


def test_a_column_without_values_is_refused():
    with pytest.raises(otp.DataError, match="must hold at least one value"):
        otp.fit(poisson_hmm(), np.full((3, 10), np.nan), seed=0)


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_a_state_that_nothing_visits():
    x = np.random.default_rng(0).poisson(5, (4, 40))
    model = poisson_hmm(size=3)
    otp.fit(model, x, seed=0, restarts=1)
    params = model.params()
    assert np.isfinite(params["x"]["log_rate"]).all()
    assert np.isfinite(params["z"]["probs"]).all()
    assert np.isfinite(model.score(x, kind="likelihood"))


@pytest.mark.slow
def test_one_series_of_a_hundred_thousand_steps():
    counts, states, truth = poisson_chain(1, 100_000, np.random.default_rng(0))
    model = poisson_hmm(m.StayOrMove(4))
    otp.fit(model, counts, seed=0, restarts=1)
    np.testing.assert_allclose(model.params()["x"]["log_rate"], truth["x"]["log_rate"], atol=0.01)
    probabilities = model.predict_proba(counts, "z").to_numpy()
    assert (probabilities.argmax(1) == states.ravel()).mean() > 0.97
    assert (model.decode(counts)["z"].to_numpy() == states.ravel()).mean() > 0.97


def test_switching_autoregression():
    rng = np.random.default_rng(0)
    slopes, levels = np.array([0.9, -0.5]), np.array([0.0, 3.0])
    x, z = np.zeros((30, 120)), np.zeros((30, 120), dtype=int)
    for t in range(1, 120):
        z[:, t] = np.where(rng.random(30) < 0.95, z[:, t - 1], 1 - z[:, t - 1])
        x[:, t] = levels[z[:, t]] + slopes[0] * x[:, t - 1] + 0.5 * rng.normal(size=30)
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x"), otp.lag("x", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal(shared_scale=True)})
    otp.fit(model, x, seed=0, restarts=4)
    params = model.params()
    np.testing.assert_allclose(params["x"]["loc"], levels, atol=0.15)
    assert float(params["x"]["weight"].squeeze()) == pytest.approx(0.9, abs=0.02)
    np.testing.assert_allclose(params["z"]["probs"].diagonal(), 0.95, atol=0.03)


def test_an_observed_autoregression_is_a_regression_on_the_past():
    rng = np.random.default_rng(0)
    u = rng.normal(size=(8, 150))
    x = np.zeros((8, 150))
    for t in range(2, 150):
        x[:, t] = 1.0 + 0.5 * x[:, t - 1] - 0.3 * x[:, t - 2] + 0.8 * u[:, t] + 0.1 * rng.normal(size=8)
    graph = otp.Graph([("u", "x"), otp.lag("x", "x"), otp.lag("x", "x", by=2)])
    model = otp.Model(graph, {"u": m.Given(), "x": m.Normal()})
    otp.fit(model, {"u": u, "x": x}, seed=0)
    design = np.stack([np.ones(8 * 148), u[:, 2:].ravel(), x[:, 1:-1].ravel(), x[:, :-2].ravel()], 1)
    expected = np.linalg.lstsq(design, x[:, 2:].ravel(), rcond=None)[0]
    found = model.params()["x"]
    np.testing.assert_allclose([float(found["loc"]), *found["weight"].ravel()], expected, atol=1e-4)


def test_covariates_move_the_chain():
    rng = np.random.default_rng(0)
    u = rng.normal(size=(60, 100))
    z = np.zeros((60, 100), dtype=int)
    for t in range(1, 100):
        p = 1 / (1 + np.exp(-(-1.5 + 3.0 * z[:, t - 1] + 1.5 * u[:, t])))
        z[:, t] = rng.random(60) < p
    x = np.where(z == 1, 4.0, 0.0) + rng.normal(size=z.shape)
    graph = otp.Graph([("u", "z"), otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"u": m.Given(), "z": m.Categorical(2), "z[0]": m.Categorical(2), "x": m.Normal()})
    otp.fit(model, {"u": u, "x": x}, seed=0, restarts=2)
    params = model.params()
    np.testing.assert_allclose(params["x"]["loc"], [0.0, 4.0], atol=0.1)
    assert float(params["z"]["weight"].ravel()[1]) == pytest.approx(1.5, abs=0.2)


def test_several_series_of_one_chain():
    rng = np.random.default_rng(0)
    _, states, _ = poisson_chain(20, 100, rng)
    frame = pd.DataFrame(
        {
            "id": np.repeat(np.arange(20), 100),
            "count": rng.poisson(np.array([2.0, 5.0, 9.0, 15.0])[states.ravel()]),
            "size": rng.normal(np.array([0.0, 2.0, 4.0, 6.0])[states.ravel()]),
            "kind": np.array(["a", "b"])[
                (rng.random(2000) < np.array([0.1, 0.9, 0.1, 0.9])[states.ravel()]).astype(int)
            ],
        }
    )
    graph = otp.Graph([otp.lag("z", "z"), ("z", "count"), ("z", "size"), ("z", "kind")], hidden=["z"])
    model = otp.Model(
        graph, {"z": m.Categorical(4), "count": m.Poisson(), "size": m.Normal(), "kind": m.Categorical(2)}
    )
    otp.fit(model, otp.Sequences(frame, sequence="id"), seed=0, restarts=3)
    params = model.params()
    np.testing.assert_allclose(np.exp(params["count"]["log_rate"]), [2.0, 5.0, 9.0, 15.0], atol=0.7)
    np.testing.assert_allclose(params["kind"]["probs"][:, 1], [0.1, 0.9, 0.1, 0.9], atol=0.08)


def test_settings_that_mean_nothing_for_sequences_are_refused():
    with pytest.raises(otp.ModelError, match="need eps above 0 and no push-forward term"):
        otp.fit(hmm(), np.ones((2, 5)), method=otp.Method("hard", Objective()), seed=0)
    local = otp.Method("local", Objective(eps=1.0), Drawn(noise="marginal", scope="local"), Adam())
    with pytest.raises(otp.ModelError, match="scope must be 'joint'"):
        otp.fit(hmm(), np.ones((2, 5)), method=local, seed=0)
    with pytest.raises(otp.ModelError, match="costs name nodes that are not in the graph: 'nope'"):
        otp.fit(hmm(), np.ones((2, 5)), method=otp.paper(costs={"nope": otp.costs.Euclidean()}), seed=0)


def test_categories_beside_numbers_are_refused_below_the_likelihood():
    graph = otp.Graph([otp.lag("z", "z"), otp.lag("s", "s"), ("s", "z"), ("z", "x")], hidden=["z", "s"])
    both = otp.Model(graph, {"z": m.Normal(), "x": m.Normal(), "s": m.Categorical(2)})
    kind = kind_of(both, np.random.default_rng(0).normal(size=(3, 9)))
    kind.check(otp.entropic())
    with pytest.raises(otp.ModelError, match=r"together need eps = 1; got 0.5"):
        kind.check(otp.entropic(eps=0.5))


def test_first_steps_may_have_a_mechanism_of_their_own():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "z[0]": m.Categorical(2, probs=[0.5, 0.5]), "x": m.Poisson()})
    otp.fit(model, np.random.default_rng(0).poisson(4, (4, 30)), seed=0, restarts=1)
    np.testing.assert_array_equal(model.params()["z[0]"]["probs"], [0.5, 0.5])
    with pytest.raises(otp.ModelError, match=r"'z\[0\]' must have the values of 'z'"):
        otp.Model(graph, {"z": m.Categorical(2), "z[0]": m.Categorical(3), "x": m.Poisson()})


def test_stay_needs_its_own_past():
    with pytest.raises(otp.ModelError, match="StayOrMove needs exactly one parent"):
        otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.StayOrMove(3), "x": m.Poisson()})


def test_a_model_shows_its_lagged_parents():
    assert "z: Categorical, hidden <- z[-1]" in str(poisson_hmm())


def curved(edges, hidden, mechanisms):
    model = otp.Model(otp.Graph(edges, hidden=hidden), mechanisms)
    seen = {node: torch.ones(1, 2, 1) for node in model.graph.observed}
    steps = Batch(seen, {node: one.bool() for node, one in seen.items()}, torch.ones(1, 2))
    return SequenceMap.of(model.structure, SequenceBatch(steps, torch.tensor([2]))).curved


def test_the_map_reads_means_where_a_hidden_number_meets_something_that_is_not_linear():
    chain, numbers = [otp.lag("z", "z"), ("z", "x")], {"z": m.Normal(), "x": m.Normal()}
    assert not curved(chain, ["z"], numbers)  # the smoother is exact
    assert curved(chain, ["z"], {**numbers, "x": m.Poisson()})
    assert curved(chain, ["z"], {**numbers, "z": m.Normal(network=(4,))})
    # what has nothing to do with the hidden number does not matter
    beside = [*chain, ("x", "y"), ("y", "n")]
    assert not curved(beside, ["z"], {**numbers, "y": m.Normal(), "n": m.Poisson()})


def kind_of(model, data):
    return recognise(model, data, weights=None, device="cpu", every_row=False)


ALONE = {"short_elements": 10**12, "halving": False, "finalists": 1}


def test_what_a_search_does_if_nothing_is_said():
    """A course that changes, changes everybody's estimates, so it is written here."""
    chain = {**ALONE, "short_tolerance": 1e-5, "finalists": 3, "finalist_gap": 32.0, "finalist_rows": 10_000}
    for states, rows in ((2, 2_500), (5, 100 * (25 + 5 + 5)), (12, 10_000)):
        kind = kind_of(poisson_hmm(size=states), np.ones((3, 30)) + np.arange(30) % 7)
        assert kind.course(otp.entropic()) == otp.SearchSchedule(
            **chain, short_rows=rows, race_rows=rows, part_rows=100_000
        )
        windows = otp.SearchSchedule(**ALONE, short_rows=20_000, short_steps=48)
        assert kind.course(otp.transport()) == windows
    numbers = kind_of(state_space(), np.random.default_rng(0).normal(size=(3, 30)))
    assert numbers.course(otp.entropic()) == otp.SearchSchedule(**ALONE, short_rows=2_500)


def test_of_very_many_steps_a_share_is_settled_on_first():
    counts = np.broadcast_to(np.arange(1000) % 7, (4000, 1000)).astype(float)  # four million steps
    assert kind_of(poisson_hmm(), counts).course(otp.entropic()).part_rows == 125_000


def test_sequences_with_hidden_numbers_are_cut_where_they_are_long():
    long = np.random.default_rng(0).normal(size=(2, 900))
    numbers, chain = kind_of(state_space(), long), kind_of(poisson_hmm(), np.abs(long).round())
    assert sorted(numbers._pieces.lengths.tolist()) == [100, 100, 400, 400, 400, 400]
    assert chain._pieces.lengths.tolist() == [900, 900]


@pytest.mark.parametrize(("model", "steps"), [(poisson_hmm, 5_000), (state_space, 20_000)])
def test_starts_are_guessed_from_some_steps_around_which_others_are_smoothed(monkeypatch, model, steps):
    kind = kind_of(model(), np.random.default_rng(0).poisson(3.0, (4, 25)).astype(float))
    layout = kind.lay_out(otp.entropic(), 0)
    asked, reaches = [], []
    part, complete = SequenceBatch.part, sequence_data.complete_steps

    def noted_part(batch, most, seed):
        asked.append(most)
        return part(batch, most, seed)

    def noted(structure, few, generator, *, first, reach):
        reaches.append((first, reach))
        return complete(structure, few, generator, first=first, reach=reach)

    monkeypatch.setattr(SequenceBatch, "part", noted_part)
    monkeypatch.setattr(sequence_data, "complete_steps", noted)
    points = kind.starts(layout, kind.problem(layout, otp.entropic(), 0), 0, range(5))
    assert len(points) == 5
    assert asked == [steps]
    seeds = [restart_seed(0, number) for number in range(5)]
    assert reaches == [(True, 1), *((False, 1 + seed % 4) for seed in seeds[1:])]


def test_what_is_told_of_sequences_comes_back_in_their_order():
    data = [np.array([9.0, 9.0, 9.0]), np.array([1.0]), np.array([4.0, 2.0])]
    kind = kind_of(poisson_hmm(size=2), data)
    lengths = kind.batch.lengths.numpy().astype(float)
    assert kind.as_given(lengths).tolist() == [3.0, 1.0, 2.0]
    assert kind.rows == 6
