"""Checks accuse the wrong node, in the right words, and right models as rarely as they say."""

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from benchmarks.told import MISFITS, class_rows, factor_rows, right_rows
from otpdag import mechanisms as m
from otpdag.answers.checks import _holm, _polynomials


def checked(model, table, **options):
    otp.fit(model, table, seed=0, progress=False)
    return model.check(table, **options).reset_index()


def test_means_of_polynomials_over_stretches_are_their_integrals():
    below, above = torch.tensor([0.1, 0.3, 0.62]).double(), torch.tensor([0.4, 0.3, 1.0]).double()
    grid = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    for low, high, mean in zip(below, above, _polynomials(below, above), strict=True):
        points = low + grid * (high - low)
        for order in range(6):
            values = np.polynomial.legendre.Legendre.basis(order + 1)(2 * points.numpy() - 1) * np.sqrt(2 * order + 3)
            assert float(mean[order]) == pytest.approx(np.trapezoid(values, grid), abs=1e-7)


def test_adjusted_as_holm_did():
    assert _holm(np.array([0.04, 0.01, 0.03, 0.5])).tolist() == pytest.approx([0.09, 0.04, 0.09, 0.5])


def skewed_indicator(generator, rows=1000):
    factor = generator.standard_normal(rows)
    frame = pd.DataFrame({f"x{i}": factor * (0.6 + 0.2 * i) + 0.7 * generator.standard_normal(rows) for i in range(4)})
    frame["x2"] = factor + 0.9 * (generator.exponential(size=rows) - 1)
    graph = otp.Graph([("f", name) for name in frame], hidden=["f"])
    return frame, otp.Model(graph, {"f": m.Normal()} | {name: m.Normal() for name in frame})


def test_the_wrong_indicator_of_a_hidden_factor_is_found():
    for gaps in (False, True):
        frame, model = skewed_indicator(np.random.default_rng(1))
        frame = frame.mask(np.random.default_rng(2).random(frame.shape) < 0.1) if gaps else frame
        worst = checked(model, frame).iloc[0]
        assert worst["node"] == "x2"
        assert worst["finding"] == "skewed otherwise than it says"
        assert worst["adjusted"] < 1e-4


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("curved", "curved in 'x'"),
        ("spread", "its spread changes with 'x'"),
        ("tails", "longer tails"),
        ("dispersion", "more spread"),
        ("logit", "curved in 'x'"),
    ],
)
def test_misfits_are_named(kind, words):
    table, model, wrong = MISFITS[kind](np.random.default_rng(3))
    worst = checked(model, table).iloc[0]
    assert worst["node"] == wrong
    assert words in worst["finding"]
    assert worst["adjusted"] < 0.01


@pytest.mark.slow
def test_right_models_are_rarely_accused():
    """Of 40 right models, complete and with gaps, more than three below 5 % would have a chance of one in twenty."""
    least = []
    for repeat in range(40):
        generator = np.random.default_rng([77, repeat])
        table, model = (right_rows, right_rows, right_rows, factor_rows, class_rows)[repeat % 5](generator, 400)
        table = table.mask(generator.random(table.shape) < 0.15) if repeat % 2 else table
        told = checked(model, table)
        least.append(told["adjusted"].min())
        assert set(told.loc[told["other"] == "", "node"]) == set(table.columns)
        assert list(told["p"]) == sorted(told["p"])
    assert sum(p < 0.05 for p in least) <= 4
    assert sum(p < 0.01 for p in least) <= 2


def test_complete_rows_draw_nothing_and_gaps_little():
    table, model = right_rows(np.random.default_rng(8), 500)
    otp.fit(model, table, progress=False)
    pd.testing.assert_frame_equal(model.check(table, seed=0), model.check(table, seed=1))
    gaps = table.mask(np.random.default_rng(9).random(table.shape) < 0.1)
    one, other = (model.check(gaps, seed=seed).set_index("other", append=True)["p"] for seed in (0, 1))
    assert (one - other.loc[one.index]).abs().max() < 0.15


def test_estimated_parameters_do_not_hide_the_shape():
    """Residuals of a regression are too small; without the scores, the test of their shape would be too."""
    generator, found = np.random.default_rng(4), []
    for _ in range(100):
        x = generator.normal(size=60)
        table = pd.DataFrame({"x": x, "y": x + generator.normal(size=60)})
        model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Given(), "y": m.Normal()})
        found.append(checked(model, table)["p"].iloc[0])
    assert np.mean(np.array(found) < 0.2) == pytest.approx(0.2, abs=0.09)


def test_dependence_between_categories_that_the_graph_forbids():
    generator = np.random.default_rng(11)
    a = generator.integers(0, 2, size=1000)
    b = np.where(generator.random(1000) < 0.9, a, 1 - a)
    table = pd.DataFrame({"a": a, "b": b})
    model = otp.Model(otp.Graph([], nodes=["a", "b"]), {"a": m.Bernoulli(), "b": m.Categorical(2)})
    (said,) = otp.fit(model, table, progress=False).notes
    told = abs(float(said.split("correlated in the data (")[1].split(")")[0]))
    assert told == pytest.approx(table.corr().iloc[0, 1], abs=0.005)
    worst = model.check(table).reset_index().iloc[0]
    assert {worst["node"], worst["other"]} == {"a", "b"}
    assert worst["adjusted"] < 1e-10
    assert "an edge or a common cause is missing" in worst["finding"]


def test_new_rows_from_elsewhere_are_seen():
    table = pd.DataFrame({"x": np.random.default_rng(12).normal(size=500)})
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    otp.fit(model, table, progress=False)
    worst = model.check(table + 0.5).iloc[0]
    assert worst["finding"] == "its rows lie elsewhere than its parameters say"
    assert worst["adjusted"] < 1e-6
    assert model.check(pd.DataFrame({"x": np.random.default_rng(13).normal(size=500)})).iloc[0]["adjusted"] > 0.01


def test_a_node_whose_noise_cannot_be_recovered_is_compared_with_draws():
    generator = np.random.default_rng(14)
    x = generator.normal(size=800)
    table = pd.DataFrame({"x": x, "y": x + generator.normal(size=800)})
    node = m.Simulator(lambda parents, noise, slope: slope * parents["x"] + noise, {"slope": m.start(0.8)})
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": node})
    otp.fit(model, table, seed=0, progress=False)
    assert model.check(table)["adjusted"].min() > 0.01
    assert model.check(table.assign(y=table["y"] ** 2)).index[0] == "y"


def test_right_censored_times_are_not_accused():
    rng = np.random.default_rng(5)
    x = rng.normal(size=800)
    time, end = rng.weibull(1.7, 800) * np.exp(0.4 * x), rng.exponential(2.0, 800)
    table = pd.DataFrame({"x": x, "t.0": np.minimum(time, end), "t.1": np.where(time <= end, time, np.nan)})
    nodes = {"x": m.Normal(), "t": m.Weibull(censored=True)}
    model = otp.fit(otp.Model(otp.Graph([("x", "t")]), nodes), table, progress=False).model
    assert model.check(table)["adjusted"].min() > 0.05
    wrong = table.assign(**{"t.0": table["t.0"] * np.exp(0.6 * x**2), "t.1": table["t.1"] * np.exp(0.6 * x**2)})
    model = otp.fit(otp.Model(otp.Graph([("x", "t")]), nodes), wrong, progress=False).model
    assert model.check(wrong)["adjusted"].min() < 1e-4
