"""What a fit tells of its end."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.answers.notes import point_of
from otpdag.engine import Adam, Status
from otpdag.errors import ModelError

ROWS = np.random.default_rng(0).normal(3.0, 2.0, 400)


@pytest.fixture(scope="module")
def result():
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    return otp.fit(model, pd.DataFrame({"x": ROWS}), seed=5)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (Status(True, "the loss stopped changing"), "converged: the loss stopped changing"),
        (Status(False, "no steps left", "raise steps"), "not converged: no steps left (raise steps)"),
    ],
)
def test_a_status_is_read_and_counts_as_whether_it_converged(status, text):
    assert str(status) == text
    assert bool(status) is status.converged


def test_the_loss_is_the_negative_log_likelihood_of_a_row(result):
    spread = ROWS.std()
    entropy = 0.5 * np.log(2 * np.pi * np.e * spread**2)
    assert result.loss == pytest.approx(entropy, rel=1e-6)
    assert (result.rows_used, result.seed) == (400, 5)
    assert result.history[-1]["loss"] == pytest.approx(result.loss)


def test_rows_below_half_a_weight_are_dropped(result):
    assert result.dropped.tolist() == []
    assert replace(result, row_weights=np.array([1.0, 0.49, 0.5, 0.0])).dropped.tolist() == [1, 3]


def test_intervals_are_those_of_the_theory(result):
    table = result.intervals(draws=150, level=0.9, seed=1)
    loc, scale = table.xs(("x", "loc")).iloc[0], table.xs(("x", "scale")).iloc[0]
    assert loc["estimate"] == pytest.approx(ROWS.mean(), rel=1e-4)
    assert scale["estimate"] == pytest.approx(ROWS.std(), rel=1e-4)
    error = ROWS.std() / np.sqrt(len(ROWS))
    assert (loc["upper"] - loc["lower"]) / (2 * 1.645 * error) == pytest.approx(1.0, abs=0.25)
    assert (scale["upper"] - scale["lower"]) / (2 * 1.645 * error / np.sqrt(2)) == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize("seed", [3, 4])
def test_answers_begin_where_the_estimate_is_though_the_sign_of_a_factor_was_turned(seed):
    generator = np.random.default_rng(1)
    rates = np.exp(0.5 + 0.8 * generator.standard_normal((300, 1)) * [1.0, 1.0, -1.0])
    frame = pd.DataFrame(generator.poisson(rates), columns=["a", "b", "c"])
    graph = otp.Graph([("f", name) for name in frame], hidden=["f"])
    mechanisms = {"f": m.Normal(), **dict.fromkeys(frame, m.Poisson())}
    result = otp.fit(otp.Model(graph, mechanisms), frame, seed=seed)
    loss = result.problem.loss(point_of(result.model.fitted, result.problem.shapes)).total
    assert float(loss) == pytest.approx(result.loss, abs=1e-6)


def test_a_method_that_draws_has_no_intervals(result):
    for other in (replace(result, method=otp.paper()), replace(result, problem=None)):
        with pytest.raises(ModelError, match=f"intervals need a deterministic method; '{other.method.name}'"):
            other.intervals(draws=2)


def test_it_shows_method_end_and_size(result):
    shown = repr(result)
    assert shown.startswith("FitResult(likelihood, converged")
    assert f"{len(result.history)} steps, start 1 of 1, 400 rows" in shown


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"converged": True, "failed": True}, "converged"),
        ({"converged": False, "failed": True, "interrupted": True}, "failed"),
        ({"converged": False, "interrupted": True}, "interrupted"),
        ({"converged": False}, "not converged"),
    ],
)
def test_a_status_has_one_name(options, name):
    assert Status(reason="", **options).name == name


def test_a_summary_says_where_its_errors_come_from(result):
    facts = {kind: result.summary(errors=kind).facts for kind in ("information", "sandwich")}
    assert facts["information"]["errors"] == "observed information"
    assert facts["sandwich"]["errors"] == "sandwich"
    assert facts["information"]["rows"] == 400
    assert facts["information"]["status"] == "converged"
    drawn = result.summary(errors="bootstrap", draws=20, seed=4)
    assert drawn.facts["errors"] == "bootstrap, 20 draws"
    alone = result.intervals(draws=20, seed=4, level=0.95)
    for column in ("lower", "upper", "std_error"):
        np.testing.assert_allclose(drawn.table[column].to_numpy(dtype=float), alone[column])
    np.testing.assert_allclose(result.standard_errors(level=0.8)["estimate"], result.summary().table["estimate"])
    wide, narrow = (result.standard_errors(level=level) for level in (0.95, 0.5))
    assert ((wide["upper"] - wide["lower"]) > 2 * (narrow["upper"] - narrow["lower"])).all()


def test_a_summary_of_an_end_that_is_none_says_so(result):
    stopped = replace(result, status=Status(False, "no steps left"), notes=("a note",))
    summary = stopped.summary()
    assert summary.facts["status"] == "not converged"
    assert [note for note in summary.warnings if "no steps left" in note or note == "a note"] == [
        "not converged: no steps left",
        "a note",
    ]


def test_draws_of_the_parameters_are_those_that_intervals_sum_up(result):
    drawn = result.bootstrap(draws=30, seed=7)
    assert set(drawn) == {("x", "loc"), ("x", "scale")}
    table = result.intervals(draws=30, seed=7, level=0.8)
    for (node, name), values in drawn.items():
        assert values.shape == (30, *result.model.params()[node][name].shape)
        ends = np.quantile(values.reshape(30, -1)[:, 0], [0.1, 0.9])
        np.testing.assert_allclose(table.loc[(node, name)][["lower", "upper"]].to_numpy()[0], ends)
        assert table.loc[(node, name)]["std_error"].iloc[0] == pytest.approx(values.reshape(30, -1)[:, 0].std(ddof=1))


def test_what_summaries_refuse(result):
    with pytest.raises(ModelError, match=r"errors must be one of .information., .*; got 'all'"):
        result.summary(errors="all")
    for level in (0, 1):
        with pytest.raises(ModelError, match="level must lie between 0 and 1"):
            result.summary(level=level)
    with pytest.raises(ModelError, match="what must be one of 'classes', 'effects'"):
        result.plot("nothing")


def test_a_method_that_draws_has_estimates_without_errors():
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    method = replace(otp.paper(), optimiser=Adam(steps=5))
    with pytest.warns(otp.ConvergenceWarning):
        drawn = otp.fit(model, pd.DataFrame({"x": ROWS[:60]}), seed=0, method=method)
    summary = drawn.summary()
    assert summary.facts["errors"] == "none"
    assert summary.table["std_error"].isna().all()
    assert any("no standard errors" in note for note in summary.warnings)
