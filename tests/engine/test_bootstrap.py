"""Bootstrap intervals against closed forms."""

import inspect
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from experiments.small_models import poisson_chain
from otpdag import mechanisms as m
from otpdag.engine import result as results


def regression(rows=400, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(rows)
    frame = pd.DataFrame({"x": x, "y": 1.0 + 2.0 * x + 0.5 * generator.standard_normal(rows)})
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    return model, frame, otp.fit(model, frame, seed=0)


def test_intervals_of_a_regression_have_the_width_of_its_standard_errors():
    _, frame, result = regression()
    table = result.intervals(draws=120, level=0.9, seed=1)
    slope = table.loc[("y", "weight", (0,))]
    error = 0.5 / np.sqrt(len(frame))
    assert slope["lower"] < slope["estimate"] < slope["upper"]
    np.testing.assert_allclose(slope["upper"] - slope["lower"], 2 * 1.645 * error, rtol=0.3)


def test_the_seed_determines_the_intervals_and_processes_do_not():
    _, _, result = regression(rows=120)
    one = result.intervals(draws=40, seed=3)
    pd.testing.assert_frame_equal(one, result.intervals(draws=40, seed=3, jobs=2))
    assert not one.equals(result.intervals(draws=40, seed=4))


@pytest.mark.parametrize("method", ["likelihood", "transport"])
def test_a_mixture_keeps_its_labels_over_the_draws(method):
    generator = np.random.default_rng(1)
    state = generator.random(300) < 0.4
    frame = pd.DataFrame({"x": np.where(state, -3.0, 3.0) + generator.standard_normal(300)})
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal()})
    result = otp.fit(model, frame, seed=0, method=method, restarts=3)
    table = result.intervals(draws=15, seed=0)
    low, high = table.loc[("x", "loc", (0,))], table.loc[("x", "loc", (1,))]
    assert low["lower"] < -2.5 < high["lower"]
    assert (high["upper"] - high["lower"]) < 1.0


def test_what_gives_no_interval_is_refused():
    _, _, result = regression(rows=60)
    with pytest.raises(otp.ModelError, match="draws must be a whole number of at least 10; got 3"):
        result.intervals(draws=3)
    with pytest.raises(otp.ModelError, match="level must lie between 0 and 1; got 90"):
        result.intervals(level=90)


# -- sequences --------------------------------------------------------------------------------------------------------


def chain(sequences=60, length=40, data_seed=0, **options):
    counts, _, truth = poisson_chain(sequences, length, np.random.default_rng(data_seed))
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.StayOrMove(4), "x": m.Poisson()})
    return otp.fit(model, counts, seed=0, restarts=2, **options), truth


def flat(truth):
    """Truth by node, parameter and index, as in a table of intervals."""
    return {
        (node, name, index): value[index]
        for node, own in truth.items()
        for name, value in own.items()
        for index in np.ndindex(np.shape(value))
    }


@pytest.mark.slow
def test_intervals_of_a_chain_hold_the_truth():
    """Nine parameters of ten data sets; of one data set alone, parameters that depend on each other tell little."""
    held = []
    for data_seed in range(10):
        result, truth = chain(data_seed=data_seed)
        table = result.intervals(draws=60, level=0.9, seed=1)
        known = {key: value for key, value in flat(truth).items() if key in table.index}
        assert len(known) == 9
        held += [table.loc[key, "lower"] <= value <= table.loc[key, "upper"] for key, value in known.items()]
    assert np.mean(held) >= 0.8


@pytest.mark.parametrize(("sequences", "length"), [(60, 40), (4, 600)], ids=["whole sequences", "cut in pieces"])
def test_intervals_of_a_chain_have_the_width_of_its_standard_errors(sequences, length):
    result, _ = chain(sequences, length)
    rates = result.intervals(draws=60, level=0.9, seed=1).loc["x"]
    assert (rates["lower"] < rates["estimate"]).all()
    assert (rates["estimate"] < rates["upper"]).all()
    # a state is visited in a quarter of the steps, each of which tells its log-rate within 1 / sqrt(rate)
    expected = 2 * 1.645 / np.sqrt(np.exp(rates["estimate"]) * sequences * length / 4)
    np.testing.assert_allclose(rates["upper"] - rates["lower"], expected, rtol=0.5)


def test_intervals_of_a_chain_depend_on_their_seed_alone():
    result, _ = chain(40, 30)
    one = result.intervals(draws=20, seed=3)
    pd.testing.assert_frame_equal(one, result.intervals(draws=20, seed=3))
    assert not one.equals(result.intervals(draws=20, seed=4))


@pytest.mark.parametrize("scale", [100.0, 0.01])
def test_intervals_do_not_depend_on_the_unit_of_the_weights(scale):
    """Weights say how much a sequence counts beside others; a thousand kilograms are not more data than a tonne."""
    plain = chain(40, 30)[0].intervals(draws=20, seed=0)
    scaled = chain(40, 30, weights=np.full(40, scale))[0].intervals(draws=20, seed=0)
    np.testing.assert_allclose(scaled["estimate"], plain["estimate"], atol=1e-4)
    np.testing.assert_allclose(scaled["upper"] - scaled["lower"], plain["upper"] - plain["lower"], rtol=0.5)


@pytest.mark.parametrize("scale", [100.0, 0.01])
def test_intervals_of_a_table_do_not_depend_on_the_unit_of_the_weights(scale):
    model, frame, result = regression(rows=120)
    plain = result.intervals(draws=40, seed=3)
    scaled = otp.fit(model, frame, seed=0, weights=np.full(120, scale)).intervals(draws=40, seed=3)
    np.testing.assert_allclose(scaled["upper"] - scaled["lower"], plain["upper"] - plain["lower"], rtol=0.1)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
def test_ends_are_the_quantiles_of_the_draws_and_errors_their_spread(level):
    model, _, result = regression(rows=60)
    draws = result.bootstrap(draws=25, seed=2)
    table = result.intervals(draws=25, level=level, seed=2).sort_index()
    for name in ("loc", "weight", "scale"):
        own, row = np.asarray(draws["y", name]).reshape(25), table.loc[("y", name)].iloc[0]
        assert row["estimate"] == pytest.approx(float(model.params()["y"][name].item()))
        assert row["lower"] == pytest.approx(np.quantile(own, (1 - level) / 2))
        assert row["upper"] == pytest.approx(np.quantile(own, (1 + level) / 2))
        assert row["std_error"] == pytest.approx(own.std(ddof=1))


def test_every_draw_is_a_resample_of_the_rows():
    """The mean of a column moves as means of resamples do, and its weights count rows."""
    rng = np.random.default_rng(0)
    x = rng.exponential(size=50)
    result = otp.fit(otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()}), {"x": x}, weights=np.full(50, 4.0))
    row = result.intervals(draws=150, seed=0).sort_index().loc[("x", "loc")].iloc[0]
    assert row["estimate"] == pytest.approx(x.mean(), rel=1e-5)
    assert row["std_error"] == pytest.approx(x.std() / np.sqrt(50), rel=0.2)


def test_resampled_rows_are_counted_whatever_they_weighed(monkeypatch):
    """A draw is a table in which every row is there a whole number of times, and rows of no weight never."""
    rng = np.random.default_rng(0)
    weights = np.r_[0.0, rng.uniform(0.2, 3.0, 49)]
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    result = otp.fit(model, {"x": rng.normal(size=50)}, weights=weights)
    drawn = []
    problem = type(result.problem)
    reweighted = problem.reweighted

    def noted(self, factors):
        changed = reweighted(self, factors)
        drawn.append((self.weight * factors).numpy())
        return changed

    monkeypatch.setattr(problem, "reweighted", noted)
    monkeypatch.setattr(results, "_by_newton", none_settled)
    assert len(result.bootstrap(draws=25)["x", "loc"]) == 25
    assert [len(part) for part in drawn] == [20, 5]
    counts = np.concatenate(drawn)
    np.testing.assert_allclose(counts, np.round(counts), atol=1e-9)
    np.testing.assert_allclose(counts.sum(1), round(float(result.problem.weight.sum())))
    assert (counts[:, result.problem.weight[0].numpy() == 0] == 0).all()
    np.testing.assert_allclose(counts.mean(0), result.problem.weight[0], atol=4 * np.sqrt(3 / 25))


def none_settled(problem, points, *_):
    return points, torch.zeros(len(points), dtype=torch.bool)


def test_steps_with_the_curvature_of_all_rows_end_where_the_search_does(monkeypatch):
    rng = np.random.default_rng(6)
    hidden = rng.random(300) < 0.4
    table = pd.DataFrame({"x": hidden * 3.0 + rng.normal(size=300), "k": rng.poisson(1 + 3 * hidden)})
    model = otp.Model(
        otp.Graph([("z", "x"), ("z", "k")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal(), "k": m.Poisson()}
    )
    result = otp.fit(model, table.mask(rng.random(table.shape) < 0.1), seed=0)
    quick = result.bootstrap(draws=20, seed=1)
    calls = []
    search = results.search
    monkeypatch.setattr(results, "search", lambda *given, **named: calls.append(1) or search(*given, **named))
    result.bootstrap(draws=20, seed=1)
    assert len(calls) <= 1  # at most a few draws need more
    monkeypatch.setattr(results, "_by_newton", none_settled)
    for key, value in result.bootstrap(draws=20, seed=1).items():
        spread = np.where(value.std(0) > 0, value.std(0), 1.0)
        np.testing.assert_allclose(quick[key] / spread, value / spread, atol=0.05)


def test_draws_that_failed_are_left_out(monkeypatch):
    """Of twelve, the search of one ends at nothing: the interval is that of the other eleven."""
    monkeypatch.setattr(results, "_by_newton", none_settled)
    _, _, result = regression(rows=40)
    whole = np.asarray(result.bootstrap(draws=12, seed=3)["y", "weight"]).reshape(12)
    search = results.search

    def failing(*given, **named):
        ended = search(*given, **named)
        return replace(ended, failed=torch.arange(12) == 5)

    monkeypatch.setattr(results, "search", failing)
    with pytest.warns(otp.ConvergenceWarning, match="1 of 12 draws of the bootstrap did not settle"):
        table = result.intervals(draws=12, level=0.5, seed=3).sort_index()
    row = table.loc[("y", "weight")].iloc[0]
    others = np.delete(whole, 5)
    assert row["lower"] == pytest.approx(np.quantile(others, 0.25))
    assert row["std_error"] == pytest.approx(others.std(ddof=1))


def test_rows_without_weight_are_never_drawn():
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    table = pd.DataFrame({"x": [*np.random.default_rng(0).normal(size=30), *[1e3] * 5]})
    result = otp.fit(model, table, weights=np.array([1.0] * 30 + [0.0] * 5), seed=0)
    drawn = result.bootstrap(draws=10, seed=0)["x", "loc"]
    assert np.abs(drawn).max() < 2


def test_the_default_bootstrap():
    said = inspect.signature(otp.FitResult.intervals).parameters
    assert [said[name].default for name in ("draws", "level", "seed", "jobs")] == [200, 0.95, 0, 1]
