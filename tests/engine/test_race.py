"""Races: starts of hidden categories run to their optima; more are never worse, and a result says how sure it is."""

import warnings
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from benchmarks import optima
from benchmarks.harness import Settings, streams
from benchmarks.optima import race
from benchmarks.problems import MIXED_DAG
from benchmarks.recovery import draw
from benchmarks.speed import chain_model, chain_series
from experiments.small_models import delete_cells
from otpdag import mechanisms as m
from otpdag.engine.optimiser import Acceleration


def classes(states: int, rows: int = 300, items: int = 6, apart: float = 1.5, seed: int = 0) -> pd.DataFrame:
    """Binary items of overlapping classes."""
    rng = np.random.default_rng(seed)
    chances = 1 / (1 + np.exp(-apart * rng.normal(size=(states, items))))
    return (
        pd.DataFrame(rng.random((rows, items)) < chances[rng.integers(states, size=rows)]).add_prefix("x").astype(int)
    )


def fitted(table: pd.DataFrame, states: int, **options) -> otp.FitResult:
    graph = otp.Graph([("k", name) for name in table], hidden=["k"])
    model = otp.Model(graph, {"k": m.Categorical(states), **{name: m.Bernoulli() for name in table}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otp.ConvergenceWarning)
        return otp.fit(model, table, progress=False, **options)


@pytest.mark.parametrize(
    ("name", "seed", "number"), [("latent_class", 21, 1), ("two_hidden", 22, 1), ("poisson_chain", 880311, 1)]
)
def test_a_fit_ends_no_lower_than_a_hundred_plain_starts(name, seed, number, monkeypatch):
    """The likelihood of both ended 1.1 and 6.7 below when starts were halved after few steps on a part of the rows."""
    monkeypatch.setattr(optima, "STARTS", 25)  # of these data sets the best of them is that of a hundred, to 0.001
    assert race(name, Settings(seed=seed), number).below < 0.5


def test_more_starts_are_never_worse():
    table = classes(5, items=8, apart=2.0, seed=3)
    losses = [fitted(table, 5, seed=3, restarts=restarts).loss for restarts in (1, 2, 5, 17)]
    assert all(later <= before + 1e-7 for before, later in pairwise(losses))
    assert losses[-1] < losses[0] - 1e-4  # or there were nothing to find


def test_a_result_says_how_many_starts_reached_its_optimum():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"x": rng.normal(np.repeat([-4.0, 0.0, 5.0], 60))})
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(3), "x": m.Normal(scale=1.0)})
    easy = otp.fit(model, table, seed=0, progress=False)
    assert easy.reached is not None
    assert 3 <= easy.reached <= len(easy.restarts) < 128  # no more are tried than are needed
    assert not any("reached this optimum" in note for note in easy.notes)
    hard = fitted(classes(5, seed=3), 5, seed=0, restarts=2)
    assert hard.reached == 1
    assert any("one of 2 starts that ran to their ends reached this optimum" in note for note in hard.notes)


def test_starts_that_do_not_race_say_nothing_of_it():
    rng = np.random.default_rng(1)
    x = rng.normal(size=200)
    table = pd.DataFrame({"x": x, "y": x + rng.normal(size=200)})
    result = otp.fit(otp.Model.from_frame(otp.Graph([("x", "y")]), table), table, seed=0, progress=False)
    assert result.reached is None
    assert len(result.restarts) == 1


def test_starts_that_creep_towards_one_optimum_have_reached_it():
    rng = np.random.default_rng(5)
    state = np.cumsum(rng.random((4, 60)) < 0.2, axis=1) % 3
    counts = rng.poisson(np.array([1.0, 3.0, 6.0])[state]).ravel()
    frame = pd.DataFrame({"id": np.repeat(np.arange(4), 60), "x": counts})
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(3), "x": m.Poisson()})
    result = otp.fit(model, otp.Sequences(frame, sequence="id"), seed=0, restarts=16, progress=False)
    ends = np.array([restart.short_loss for restart in result.restarts]) * len(frame)
    assert result.reached == (ends < np.nanmin(ends) + 0.5).sum() > (ends < np.nanmin(ends) + 1e-3).sum()


def test_a_start_that_creeps_far_behind_gives_up(monkeypatch):
    """Of four starts two have settled after eight steps; one creeps 700 units above them, by 0.02 in a step."""
    sources = streams(93, "speed_normal_1x10000", 1)
    series = chain_series("normal", 1, 10_000, sources.data)
    quick = otp.fit(chain_model("normal"), series, seed=sources.fit, restarts=4, progress=False)
    monkeypatch.setattr(Acceleration, "most_gain", 1e9)
    patient = otp.fit(chain_model("normal"), series, seed=sources.fit, restarts=4, progress=False)
    steps = [sum(len(stage.losses) for stage in one.stages) for one in (quick, patient)]
    assert steps[0] < steps[1] - 5
    assert quick.loss == pytest.approx(patient.loss, abs=1e-9)
    assert quick.reached == patient.reached == 2


def test_a_start_that_gave_up_beside_an_optimum_was_on_its_way_there():
    """One start settled 876 units above the others, three more gave up within 0.02 of it: it is not found once."""
    sources = streams(93, "speed_normal_1x10000", 0)
    series = chain_series("normal", 1, 10_000, sources.data)
    result = otp.fit(chain_model("normal"), series, seed=sources.fit, progress=False)
    assert result.reached == 21
    assert len(result.restarts) == 32


def mixed(table: pd.DataFrame, **options) -> otp.FitResult:
    """A hidden category with a normal, a count and a categorical child, of which cells are missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otp.ConvergenceWarning)
        return otp.fit(MIXED_DAG.model(), table, progress=False, **options)


def test_starts_of_graphs_with_gaps_race_too():
    frame, truth = MIXED_DAG.draw(250, np.random.default_rng(206))
    table = delete_cells(frame, 0.3, np.random.default_rng(1))
    few, many = (mixed(table, restarts=restarts) for restarts in (2, 16))
    assert few.reached is not None
    assert all(np.isfinite(one.loss) for one in few.restarts)  # a part of the rows did not choose one of them
    assert 3 <= many.reached < 16
    below = MIXED_DAG.model().set_params(truth).log_likelihood(table)
    assert below < many.model.log_likelihood(table) >= few.model.log_likelihood(table) - 0.1  # to the error of grids


@pytest.mark.slow
def test_a_start_that_rises_late_wins_where_cells_are_missing():
    """The fit ended 120 below when starts were halved after three steps: those that lead to the optimum rise late."""
    frame, truth, sources = draw(MIXED_DAG, 390451, 2)
    table = delete_cells(frame, 0.3, sources.missing)
    model = mixed(table, seed=sources.fit).model
    assert model.log_likelihood(table) > MIXED_DAG.model().set_params(truth).log_likelihood(table)
