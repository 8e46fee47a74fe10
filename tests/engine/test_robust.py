"""Robust fits: outliers are left out and reported, clean data are left alone; limits of what may be left out."""

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from experiments import small_models
from experiments.outliers import replace_rows
from experiments.small_models import poisson_chain
from otpdag import mechanisms as m
from otpdag.errors import ModelError

# -- robust fits: outliers are left out and reported, clean data are left alone ---------------------------------------


def mixture_model():
    return otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal(2)})


def clean_rows(generator, rows=600):
    state = generator.integers(0, 2, rows)
    points = np.array([[0.0, 0.0], [4.0, 2.0]])[state] + generator.standard_normal((rows, 2))
    return pd.DataFrame(points, columns=["x.0", "x.1"])


@pytest.fixture(scope="module")
def spoilt():
    generator = np.random.default_rng(0)
    return replace_rows(clean_rows(generator), 0.1, "cluster", generator)


def test_outliers_are_left_out_and_reported(spoilt):
    frame, rows = spoilt
    model = mixture_model()
    result = otp.fit(model, frame, seed=0, robust=True, restarts=6)
    np.testing.assert_allclose(model.params()["x"]["loc"], [[0, 0], [4, 2]], atol=0.3)
    assert set(rows) <= set(result.dropped.tolist())
    assert len(result.dropped) < len(rows) + 12
    assert result.rows_used == len(frame)
    assert f"left out {len(result.dropped)} of 600 rows" in result.notes[0]


def test_without_robustness_the_same_outliers_ruin_the_fit(spoilt):
    model = mixture_model()
    result = otp.fit(model, spoilt[0], seed=0, restarts=6)
    assert np.abs(model.params()["x"]["loc"] - [[0, 0], [4, 2]]).max() > 1
    assert result.row_weights is None
    assert len(result.dropped) == 0


def test_clean_data_are_left_alone():
    frame = clean_rows(np.random.default_rng(1))
    plain, robust = mixture_model(), mixture_model()
    otp.fit(plain, frame, seed=0, restarts=3)
    result = otp.fit(robust, frame, seed=0, robust="outliers", restarts=3)
    assert result.row_weights.mean() > 0.97
    np.testing.assert_allclose(robust.params()["x"]["loc"], plain.params()["x"]["loc"], atol=0.1)


def test_never_more_than_a_quarter_is_left_out():
    generator = np.random.default_rng(2)
    frame, _ = replace_rows(clean_rows(generator), 0.45, "box", generator)
    result = otp.fit(mixture_model(), frame, seed=0, robust=True, restarts=2)
    assert 1 - result.row_weights.mean() <= 0.25 + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("most", "least"), [(0.1, 0.0), (0.4, 0.3)])
def test_options_say_how_much_is_left_out_at_most(most, least):
    generator = np.random.default_rng(2)
    frame, _ = replace_rows(clean_rows(generator), 0.45, "box", generator)
    options = otp.RobustOptions(most_dropped=most)
    result = otp.fit(mixture_model(), frame, seed=0, robust=options, restarts=4)
    assert least < 1 - result.row_weights.mean() <= most + 1e-9


def test_missing_cells_are_allowed(spoilt):
    frame = small_models.delete_cells(spoilt[0], 0.1, np.random.default_rng(3))
    model = mixture_model()
    otp.fit(model, frame, seed=0, robust=True, restarts=3)
    np.testing.assert_allclose(model.params()["x"]["loc"], [[0, 0], [4, 2]], atol=0.4)


def test_misfit_survives_a_wrong_fixed_scale():
    generator = np.random.default_rng(4)
    state = generator.random(800) < 0.6
    points = np.where(state[:, None], [0.0, 0.0], [1.8, 1.2]) + generator.standard_normal((800, 2))
    frame = pd.DataFrame(points, columns=["x.0", "x.1"])
    errors = {}
    for robust in (False, "misfit"):
        wrong = {"z": m.Categorical(2, probs=[0.6, 0.4]), "x": m.Normal(2, scale=1.35)}
        model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), wrong)
        otp.fit(model, frame, seed=0, robust=robust, restarts=6)
        found = model.params()["x"]["loc"]
        truth = np.array([[0.0, 0.0], [1.8, 1.2]])
        errors[robust] = min(np.abs(found - truth).mean(), np.abs(found[::-1] - truth).mean())
    assert errors["misfit"] < errors[False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"robust": "strong"}, "'outliers', 'misfit' or an otp.RobustOptions; got 'strong'"),
        ({"robust": True, "method": "paper"}, "robust='outliers' needs the likelihood; got 'paper'"),
        ({"robust": "misfit", "method": "likelihood"}, "leave method at 'auto'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(otp.ModelError, match=message):
        otp.fit(mixture_model(), clean_rows(np.random.default_rng(0), 60), **arguments)


# -- sequences --------------------------------------------------------------------------------------------------------


def chain_model():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.StayOrMove(4), "x": m.Poisson()})


@pytest.fixture(scope="module")
def foreign():
    """Sixty sequences, six of which come from another process: far more counts, that move at every step."""
    counts, _, truth = poisson_chain(60, 40, np.random.default_rng(0))
    spoilt = np.array([4, 11, 23, 37, 45, 58])
    levels = np.random.default_rng(1).choice([25, 70, 130], (6, 40))
    counts[spoilt] = levels + np.random.default_rng(2).poisson(3, (6, 40))
    return counts, spoilt, np.exp(truth["x"]["log_rate"])


@pytest.mark.slow
def test_sequences_of_another_process_are_left_out(foreign):
    counts, spoilt, rates = foreign
    found = {}
    for robust in (False, True):
        model = chain_model()
        result = otp.fit(model, counts, seed=0, restarts=4, robust=robust)
        found[robust] = np.abs(np.exp(model.params()["x"]["log_rate"]) - rates).mean(), result
    error, result = found[True]
    assert set(spoilt) <= set(result.dropped.tolist())
    assert len(result.dropped) <= len(spoilt) + 5
    assert result.row_weights.shape == (60,)
    assert error < 0.5 * found[False][0]
    assert error < 1.0
    assert f"left out {len(result.dropped)} of 60" in result.notes[0]
    assert found[False][1].row_weights is None


@pytest.mark.slow
def test_a_robust_chain_is_close_to_the_fit_of_its_clean_sequences(foreign):
    counts, spoilt, _ = foreign
    robust, clean = chain_model(), chain_model()
    otp.fit(robust, counts, seed=0, restarts=4, robust="outliers")
    otp.fit(clean, np.delete(counts, spoilt, 0), seed=0, restarts=4)
    np.testing.assert_allclose(robust.params()["x"]["log_rate"], clean.params()["x"]["log_rate"], atol=0.03)
    assert float(robust.params()["z"]["stay"]) == pytest.approx(float(clean.params()["z"]["stay"]), abs=0.03)


@pytest.mark.slow
def test_clean_sequences_are_left_alone():
    """Over ten data sets, as little is left out as of clean tables."""
    weights, gaps = [], []
    for seed in range(3, 13):
        counts, _, _ = poisson_chain(60, 40, np.random.default_rng(seed))
        plain, robust = chain_model(), chain_model()
        otp.fit(plain, counts, seed=0, restarts=4)
        weights.append(otp.fit(robust, counts, seed=0, restarts=4, robust=True).row_weights.mean())
        gaps.append(np.abs(robust.params()["x"]["log_rate"] - plain.params()["x"]["log_rate"]).mean())
    assert np.mean(gaps) < 0.05
    assert np.mean(weights) > 0.97


# -- limits of what a fit may leave out -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"most_dropped": 0.0}, "most_dropped must lie between 0 and 1; got 0.0"),
        ({"most_dropped": 1.0}, "most_dropped must lie between 0 and 1; got 1.0"),
        ({"most_dropped": float("nan")}, "most_dropped must lie between 0 and 1; got nan"),
        ({"slack": 0.9}, "slack must be a number of at least 1; got 0.9"),
        ({"tails": ()}, r"tails must be probabilities that fall; got \(\)"),
        ({"tails": (0.1, 0.2)}, r"tails must be probabilities that fall; got \(0.1, 0.2\)"),
        ({"tails": (0.1, 0.1)}, "tails must be probabilities that fall"),
        ({"tails": (1.5,)}, "tails must be probabilities that fall"),
        ({"tails": (0.1, 0.0)}, "tails must be probabilities that fall"),
        ({"cap": 0.0}, "cap must lie between 0 and 1; got 0.0"),
    ],
)
def test_limits_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ModelError, match=message):
        otp.RobustOptions(**options)


def test_one_tail_and_no_slack_are_enough():
    options = otp.RobustOptions(tails=(0.01,), slack=1.0)
    assert (options.tails, options.slack, options.most_dropped) == ((0.01,), 1.0, 0.25)


@pytest.mark.parametrize("columns", [["x"], ["x", "c"]])
def test_a_robust_fit_that_runs_out_of_time_says_so_and_weighs_its_rows(columns):
    """Also before any row was weighed, and where starts are still looked for on guesses of the clean rows."""
    rng = np.random.default_rng(0)
    z = rng.integers(0, 2, 300)
    table = pd.DataFrame({"x": rng.normal(4.0 * z), "c": z})[columns]
    nodes = {"x": m.Normal(), "c": m.Categorical(2)}
    graph = otp.Graph([("z", name) for name in columns], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2)} | {name: nodes[name] for name in columns})
    with pytest.warns(otp.ConvergenceWarning, match="the time limit of 1e-06 s was reached"):
        result = otp.fit(model, table, robust="outliers", time_limit=1e-6, seed=0)
    assert result.row_weights.shape == (300,)
    assert result.row_weights.mean() > 0.7
