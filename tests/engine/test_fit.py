"""The fit: reproducible, honest about how it ended, free of units, equal to closed forms, strict about its input."""

import io
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LinearRegression, LogisticRegression, PoissonRegressor

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema, encode
from otpdag.engine import EM, Adam, Deterministic, Run
from otpdag.engine.fit import _with_cause
from otpdag.engine.monitor import Cause
from otpdag.engine.result import Status
from otpdag.errors import DataError, GraphError, ModelError
from otpdag.objective import Drawn
from otpdag.settings import ClosedForm, Direct, Objective, PushForward
from tests.table_problems import kind_of, lay_out_rows, starts_of, table_problem

RNG = np.random.default_rng(101)
BEGIN = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def begins_anew():
    """A test alone sees the same data as in its file."""
    RNG.bit_generator.state = BEGIN


QUICK = otp.SearchSchedule(short_rows=100, short_steps=6, finalists=2, finalist_steps=3)


def mixture_table(n=200):
    z = RNG.integers(0, 2, n)
    return pd.DataFrame({"x": np.where(z, 2.0, -2.0) + RNG.normal(size=n), "n": RNG.poisson(np.where(z, 6.0, 1.0))})


def mixture_model(**changes):
    mechanisms = {"z": m.Categorical(2), "x": m.Normal(), "n": m.Poisson()} | changes
    return otp.Model(otp.Graph([("z", "x"), ("z", "n")], hidden=["z"]), mechanisms)


def params_of(table, model=None, **options):
    model = model or mixture_model()
    otp.fit(model, table, **({"restarts": 2, "course": QUICK} | options))
    return model.params()


def short_method(optimiser, steps):
    """The entropic objective, in closed form or drawn with the noise integrated out."""
    if optimiser == "lbfgs":
        return otp.Method("short", Objective(eps=1.0), ClosedForm(), Deterministic(steps=steps))
    return otp.Method("short", Objective(eps=1.0), Drawn(noise="marginal", batch_size=50), Adam(steps=steps))


def assert_same(left, right, **tolerance):
    for node, found in left.items():
        for name, value in found.items():
            np.testing.assert_allclose(value, right[node][name], err_msg=f"{node}.{name}", **tolerance)


# -- reproducible -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
@pytest.mark.parametrize("method", ["likelihood", "transport", "adam"])
def test_the_seed_determines_everything(method):
    table = mixture_table(120)
    method = {
        "adam": otp.paper(steps=8, batch_size=32),
        "likelihood": otp.entropic(steps=10),
        "transport": otp.transport(steps=10, points=128),
    }[method]
    found = []
    for seed in (3, 3, 4):
        model = mixture_model()
        result = otp.fit(model, table, method=method, seed=seed, restarts=3, course=QUICK)
        found.append((model.params(), result))
    assert_same(found[0][0], found[1][0], rtol=0, atol=0)
    for first, second in zip(found[0][1].restarts, found[1][1].restarts, strict=True):
        assert torch.equal(first.point, second.point)
    assert any(
        not torch.equal(first.point, second.point)
        for first, second in zip(found[0][1].restarts, found[2][1].restarts, strict=True)
    )


def test_global_state_is_left_alone():
    table = mixture_table(80)
    torch_state, numpy_state = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    for method in ("likelihood", "transport"):
        params_of(table, method=method)
    assert torch.equal(torch_state, torch.random.get_rng_state())
    assert (numpy_state == np.random.get_state()[1]).all()
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == dtype


def test_threads_are_put_back_after_an_error():
    threads = torch.get_num_threads()

    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        otp.fit(mixture_model(), mixture_table(60), restarts=1, callbacks=[stop])
    assert torch.get_num_threads() == threads


def test_a_table_is_never_changed():
    table = mixture_table(60).astype(float)
    table.iloc[3, 0] = np.nan
    before = table.copy()
    params_of(table)
    pd.testing.assert_frame_equal(table, before)


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_all_restarts_are_reported_and_the_best_is_kept():
    result = otp.fit(mixture_model(), mixture_table(), restarts=4, course=QUICK)
    assert [restart.number for restart in result.restarts] == [0, 1, 2, 3]
    (kept,) = [restart for restart in result.restarts if restart.kept]
    losses = [restart.loss for restart in result.restarts if np.isfinite(restart.loss)]
    assert kept.loss == pytest.approx(min(losses), abs=1e-6)
    assert result.loss == pytest.approx(kept.loss)
    assert all(np.isfinite(restart.short_loss) for restart in result.restarts)
    assert f"start {kept.number + 1} of 4" in repr(result)
    assert len({restart.seed for restart in result.restarts}) == 4


def test_a_restart_does_not_depend_on_the_others():
    model, table = mixture_model(), mixture_table(100)
    batch = encode(table, Schema.of(model.spaces, model.graph, table), hidden=["z"])
    method = otp.entropic(steps=12)
    layout = lay_out_rows(model.structure, batch, method, 0)
    problem = table_problem(layout, batch, method, 0)
    points = starts_of(layout, batch, range(4))

    def run(start):
        return method.optimiser.run(Run(problem.laid_out_for(start), start, 12), lambda progress: False)

    together = run(points)
    for number in range(4):
        alone = starts_of(layout, batch, [number])
        assert torch.equal(alone[0], points[number])
        np.testing.assert_allclose(run(alone).point[0], together.point[number], rtol=1e-7, atol=1e-9)


def test_restarts_differ():
    model, table = mixture_model(z=m.Categorical(4)), mixture_table(100)
    batch = encode(table, Schema.of(model.spaces, model.graph, table), hidden=["z"])
    layout = lay_out_rows(model.structure, batch, otp.entropic(), 0)
    points = starts_of(layout, batch, range(4))
    assert len(np.unique(points.numpy().round(6), axis=0)) > 1


def test_one_restart_is_enough_for_complete_data():
    table = pd.DataFrame({"x": RNG.normal(size=30)})
    result = otp.fit(otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()}), table)
    assert len(result.restarts) == 1
    assert result.restarts[0].kept


# -- weights and units ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["likelihood", "transport"])
def test_weights_are_repetitions(method):
    """Of complete data the estimates are equal, whatever start and landmark rows."""
    table = pd.DataFrame({"k": RNG.integers(0, 2, 300), "x": RNG.normal(size=300)})
    weights = RNG.integers(0, 4, 300)
    repeated = table.loc[table.index.repeat(weights)]
    graph, found = otp.Graph([("k", "x")]), []
    for data, weight in ((table, weights), (repeated, None)):
        model = otp.Model(graph, {"k": m.Categorical(2), "x": m.Normal()})
        otp.fit(model, data, method=method, weights=weight)
        found.append(model.params())
    if method == "likelihood":
        assert_same(*found, rtol=1e-4, atol=1e-5)
    else:  # features are placed on other rows
        assert_same(*found, atol=0.15)


def test_weights_are_repetitions_with_hidden_nodes():
    table = mixture_table(150)
    weights = RNG.integers(1, 4, 150)
    left = params_of(table, weights=weights)
    right = params_of(table.loc[table.index.repeat(weights)])
    assert_same(left, right, rtol=2e-3, atol=1e-4)


def test_collapsed_rows_of_categories_count_as_often_as_they_occur():
    truth = otp.Model(otp.Graph([("z", n) for n in "abc"], hidden=["z"]), {n: m.Categorical(2) for n in "zabc"})
    truth.set_params({"z": {"probs": [0.3, 0.7]}, **{n: {"probs": [[0.9, 0.1], [0.2, 0.8]]} for n in "abc"}})
    table = truth.sample(3000, seed=0)[list("abc")]
    model = otp.Model(truth.graph, truth.mechanisms)
    otp.fit(model, table, restarts=2, course=QUICK)
    # three binary children of two classes are just identified: the model reproduces all frequencies
    frequencies = table.value_counts(normalize=True).sort_index()
    params = model.params()
    joint = np.einsum("z,za,zb,zc->abc", params["z"]["probs"], *(params[n]["probs"] for n in "abc"))
    np.testing.assert_allclose(joint.ravel(), frequencies.to_numpy(), atol=2e-3)


@pytest.mark.parametrize("method", ["likelihood", "transport"])
def test_estimates_follow_the_units_of_the_columns(method):
    n = 150
    z = RNG.normal(size=n)
    table = pd.DataFrame({"a": z + 0.5 * RNG.normal(size=n), "b": -z + 0.5 * RNG.normal(size=n)})
    table["c"] = 0.7 * z + 0.3 * table["a"] + 0.5 * RNG.normal(size=n)
    table["d"] = z + 0.5 * RNG.normal(size=n)  # with three columns alone, slopes of c would hardly be determined
    table.iloc[:20, 0] = np.nan
    graph = otp.Graph([("z", "a"), ("z", "b"), ("z", "c"), ("z", "d"), ("a", "c")], hidden=["z"])
    unit, shift = 1e4, 1e6
    transport = otp.transport(points=512)
    method = {"likelihood": otp.entropic(), "transport": transport}[method]
    found = []
    for factor, offset in ((1.0, 0.0), (unit, shift)):
        model = otp.Model(graph, {name: m.Normal() for name in "zabcd"})
        data = table.assign(a=table["a"] * factor + offset)
        otp.fit(model, data, method=method, restarts=2, course=QUICK)
        found.append(model.params())
    plain, scaled = found
    tolerance = {"rtol": 0.02, "atol": 0.02}
    np.testing.assert_allclose(scaled["a"]["loc"], plain["a"]["loc"] * unit + shift, rtol=1e-4)
    np.testing.assert_allclose(scaled["a"]["weight"] / unit, plain["a"]["weight"], **tolerance)
    np.testing.assert_allclose(scaled["a"]["scale"] / unit, plain["a"]["scale"], **tolerance)
    np.testing.assert_allclose(scaled["b"]["weight"], plain["b"]["weight"], **tolerance)
    np.testing.assert_allclose(scaled["c"]["weight"] * [1.0, unit], plain["c"]["weight"], **tolerance)
    np.testing.assert_allclose(scaled["c"]["loc"] + shift * scaled["c"]["weight"][1], plain["c"]["loc"], atol=0.05)


# -- closed forms -----------------------------------------------------------------------------------------------------


def test_linear_regression():
    table = pd.DataFrame({"a": RNG.normal(3, 2, 80), "b": RNG.normal(size=80)})
    table["y"] = 1 + 2 * table["a"] - table["b"] + RNG.normal(0, 0.7, 80)
    params = params_of(
        table, otp.Model(otp.Graph([("a", "y"), ("b", "y")]), {n: m.Normal() for n in "aby"}), restarts=None
    )
    peer = LinearRegression().fit(table[["a", "b"]], table["y"])
    np.testing.assert_allclose(params["y"]["weight"], peer.coef_, rtol=1e-4)
    np.testing.assert_allclose(params["y"]["loc"], peer.intercept_, rtol=1e-3)
    residual = table["y"] - peer.predict(table[["a", "b"]])
    np.testing.assert_allclose(params["y"]["scale"], residual.std(ddof=0), rtol=1e-3)
    np.testing.assert_allclose(params["a"]["loc"], table["a"].mean(), rtol=1e-4)
    np.testing.assert_allclose(params["a"]["scale"], table["a"].std(ddof=0), rtol=1e-3)


def test_frequency_tables():
    table = pd.DataFrame({"a": RNG.integers(0, 2, 300), "b": RNG.integers(0, 3, 300)})
    table["c"] = (table["a"] + table["b"] + RNG.integers(0, 2, 300)) % 3
    graph = otp.Graph([("a", "c"), ("b", "c")])
    params = params_of(table, otp.Model(graph, {"a": m.Categorical(2), "b": m.Categorical(3), "c": m.Categorical(3)}))
    expected = pd.crosstab([table["a"], table["b"]], table["c"], normalize="index").to_numpy().reshape(2, 3, 3)
    np.testing.assert_allclose(params["c"]["probs"], expected, atol=1e-3)
    np.testing.assert_allclose(params["a"]["probs"], table["a"].value_counts(normalize=True).sort_index(), atol=1e-5)


def test_poisson_and_logistic_regression():
    table = pd.DataFrame({"x": RNG.normal(size=300)})
    table["n"] = RNG.poisson(np.exp(0.5 + 0.6 * table["x"]))
    table["k"] = (RNG.random(300) < 1 / (1 + np.exp(-0.3 - table["x"]))).astype(int)
    graph = otp.Graph([("x", "n"), ("x", "k")])
    params = params_of(table, otp.Model(graph, {"x": m.Given(), "n": m.Poisson(), "k": m.Categorical(2)}))
    poisson = PoissonRegressor(alpha=0, tol=1e-10, max_iter=1000).fit(table[["x"]], table["n"])
    np.testing.assert_allclose(params["n"]["weight"], poisson.coef_, atol=1e-4)
    np.testing.assert_allclose(params["n"]["log_rate"], poisson.intercept_, atol=1e-4)
    logistic = LogisticRegression(C=1e10, tol=1e-10, max_iter=1000).fit(table[["x"]], table["k"])
    np.testing.assert_allclose(params["k"]["weight"][0, 1], logistic.coef_[0, 0], atol=1e-3)
    np.testing.assert_allclose(params["k"]["logits"][1], logistic.intercept_[0], atol=1e-3)


def test_missing_leaves_are_ignored_and_missing_causes_integrated_out():
    """y given x from complete pairs, x from all of x: for a missing leaf, maximum likelihood is that."""
    table = pd.DataFrame({"x": RNG.normal(1, 2, 120)})
    table["y"] = 0.5 - table["x"] + RNG.normal(size=120)
    table.loc[:40, "y"] = np.nan
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    params = params_of(table, model)
    pairs = table.dropna()
    np.testing.assert_allclose(params["y"]["weight"], np.polyfit(pairs["x"], pairs["y"], 1)[:1], rtol=1e-3)
    np.testing.assert_allclose(params["x"]["loc"], table["x"].mean(), rtol=1e-3)


# -- settings ---------------------------------------------------------------------------------------------------------


def test_fixed_parameters_stay_and_starts_move():
    model = mixture_model(
        x=m.Normal(scale=0.9), n=m.Poisson(log_rate=otp.start([0.0, 2.0])), z=m.Categorical(2, probs=[0.5, 0.5])
    )
    params = params_of(mixture_table(), model)
    np.testing.assert_array_equal(params["x"]["scale"], [0.9, 0.9])
    np.testing.assert_array_equal(params["z"]["probs"], [0.5, 0.5])
    assert not np.allclose(params["n"]["log_rate"], [0.0, 2.0], atol=1e-6)


def test_tied_parameters_are_equal_and_pooled():
    table = pd.DataFrame({"a": RNG.normal(0, 1.0, 400), "b": RNG.normal(5, 2.0, 400)})
    tied = otp.Model(otp.Graph([], nodes=["a", "b"]), {n: m.Normal(scale=otp.tie("sigma")) for n in ("a", "b")})
    params = params_of(table, tied)
    assert params["a"]["scale"] == params["b"]["scale"]
    pooled = np.sqrt((table["a"].var(ddof=0) + table["b"].var(ddof=0)) / 2)
    np.testing.assert_allclose(params["a"]["scale"], pooled, rtol=1e-3)


def test_a_start_decides_between_two_optima():
    """From the given start the labels are the user's: the first class is the high one."""
    model = mixture_model(
        x=m.Normal(loc=otp.start([2.0, -2.0])),
        n=m.Poisson(rate=otp.start([6.0, 1.0])),
        z=m.Categorical(2, probs=[0.4, 0.6]),
    )
    params = params_of(mixture_table(), model, restarts=1)
    assert params["x"]["loc"][0] > params["x"]["loc"][1]


def test_a_second_fit_starts_afresh():
    model = mixture_model()
    first = params_of(mixture_table(), model)
    other = mixture_table()
    again = params_of(other * [10, 1] + [100, 0], model)
    fresh = params_of(other * [10, 1] + [100, 0])
    assert_same(again, fresh, rtol=1e-3, atol=1e-3)
    assert not np.allclose(first["x"]["loc"], again["x"]["loc"])


# -- how it ends ------------------------------------------------------------------------------------------------------


def test_a_converged_fit_says_so_and_keeps_a_history():
    result = otp.fit(mixture_model(), mixture_table(), restarts=2, course=QUICK)
    assert result.status
    assert str(result.status) == "converged: the loss stopped changing"
    losses = [record["loss"] for record in result.history]
    assert losses == sorted(losses, reverse=True)
    assert set(result.history[0]) >= {"step", "loss", "reconstruction", "divergence", "entropic", "direct", "seconds"}
    assert result.history[-1]["loss"] == pytest.approx(result.loss)
    assert result.rows_used == 200
    times = [record["seconds"] for record in result.history]
    assert times == sorted(times)
    assert 0 < times[-1] <= result.seconds


@pytest.mark.parametrize("optimiser", ["lbfgs", "adam"])
def test_too_few_steps_are_warned_about_with_advice(optimiser):
    method = short_method(optimiser, steps=2)
    with pytest.warns(otp.ConvergenceWarning, match=r"still falling after 2 steps \(allow more steps in the method\)"):
        result = otp.fit(mixture_model(), mixture_table(), method=method, restarts=1)
    assert not result.status
    assert result.status.advice == "allow more steps in the method"
    assert "not converged" in repr(result)


@pytest.mark.parametrize("optimiser", ["lbfgs", "adam"])
def test_callbacks_see_every_record_and_can_stop(optimiser):
    seen, others = [], []

    def stop(record):
        seen.append(record["loss"])
        return len(seen) == 3

    method = short_method(optimiser, steps=80)
    model = mixture_model()
    with pytest.warns(otp.ConvergenceWarning, match="a callback stopped the fit after 3 steps"):
        result = otp.fit(model, mixture_table(), method=method, restarts=1, callbacks=[stop, others.append])
    assert len(result.history) == len(seen) == len(others) == 3
    assert model.is_fitted


def test_nothing_is_printed_unless_asked_for():
    for progress, expected in ((None, ""), (False, "")):
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            otp.fit(mixture_model(), mixture_table(60), restarts=2, course=QUICK, progress=progress)
        assert out.getvalue() == err.getvalue() == expected
    err = io.StringIO()
    with redirect_stderr(err):
        otp.fit(mixture_model(), mixture_table(60), restarts=2, course=QUICK, progress=True)
    assert "best start" in err.getvalue()


class Broken(m.Normal):
    """A density that is never a number."""

    def log_prob(self, params, value, parents, mask=None):
        return super().log_prob(params, value, parents, mask) * torch.nan


@pytest.mark.parametrize("optimiser", ["lbfgs", "adam"])
def test_a_loss_that_is_not_finite_is_reported_and_the_start_kept(optimiser):
    method = short_method(optimiser, steps=5)
    model = otp.Model(otp.Graph([("k", "x")]), {"k": m.Categorical(2), "x": Broken()})
    table = pd.DataFrame({"k": RNG.integers(0, 2, 50), "x": RNG.normal(size=50)})
    with pytest.warns(otp.ConvergenceWarning, match="infinite or not a number; the last good parameters were kept"):
        result = otp.fit(model, table, method=method, restarts=2)
    assert "look for outliers" in result.status.advice
    assert all(np.isfinite(value).all() for found in model.params().values() for value in found.values())


# -- refusals, before any training ------------------------------------------------------------------------------------


def test_arguments_that_mean_nothing_are_refused():
    model, table = mixture_model(), mixture_table(30)
    for options, message in (
        ({"method": "magic"}, "method must be 'auto', 'likelihood', 'transport', 'paper'.*got 'magic'"),
        ({"restarts": 0}, "restarts must be a whole number of at least 1; got 0"),
        ({"seed": -1}, r"seed must be a non-negative integer below 2\^63; got -1"),
        ({"seed": 0.5}, r"seed must be a non-negative integer below 2\^63; got 0.5"),
        ({"weights": np.ones(7)}, "weights must have one entry for each of the 30 rows"),
        ({"weights": -np.ones(30)}, "weights must be finite and at least 0"),
    ):
        with pytest.raises((ModelError, DataError), match=message):
            otp.fit(model, table, **options)
    assert not model.is_fitted


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(
        ModelError, match="device 'cuda' was asked for, but no CUDA device is available; use device='cpu'"
    ):
        otp.fit(mixture_model(), mixture_table(30), device="cuda")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop(columns="n"), "column 'n' is missing; the table has the columns 'x'"),
        (lambda t: t.assign(z=0), "node 'z' is hidden, but the table has a column 'z'"),
        (
            lambda t: t.assign(n=-1),
            "column 'n' must hold whole numbers of at least 0 and at most 7e10; found -1 in row 0",
        ),
        (lambda t: t.assign(n=1.5), "column 'n' must hold whole numbers of at least 0 and at most 7e10; found 1.5"),
        (lambda t: t.assign(x=np.inf), "column 'x' must hold finite numbers; found inf in row 0"),
        (lambda t: t.assign(x=np.nan), "column 'x' must hold at least one value; all 30 are missing"),
        (lambda t: t.assign(x="a"), "column 'x' must hold numbers; found 'a' in row 0"),
        (lambda t: t.iloc[:1], "data must have at least 2 rows; got 1"),
        (lambda t: t.iloc[:2], "the table has 2 rows that count; at least 3 are needed for this model"),
        (
            lambda t: "table.csv",
            "path 'table.csv' must be a file, folder or pattern of files.*read other files with pandas",
        ),
        (lambda t: [t], "data are sequences, but the graph has no lagged edge"),
        (lambda t: t.assign(x=[str(x) if r == 7 else x for r, x in enumerate(t["x"])]), "column 'x' .* in row 7"),
        (lambda t: {"x": t["x"], "n": t["n"][::-1]}, r"data\['n'\] has another index than data\['x'\]"),
    ],
)
def test_tables_that_do_not_fit_are_refused(change, message):
    model = mixture_model()
    with pytest.raises(DataError, match=message):
        otp.fit(model, change(mixture_table(30)))
    assert not model.is_fitted


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones((2, 30)), r"weights must have one entry for each of the 30 rows; got shape \(2, 30\)"),
        (np.r_[1.0, np.zeros(29)], "the table has 1 rows that count; at least 3 are needed"),
    ],
)
def test_weights_that_leave_no_table_are_refused(weights, message):
    with pytest.raises(DataError, match=message):
        otp.fit(mixture_model(), mixture_table(30), weights=weights)


def test_a_number_beyond_all_densities_is_told():
    model = mixture_model()
    otp.fit(model, mixture_table(30), restarts=1)
    with pytest.raises(ModelError, match="no state of node 'z' explains what row 0 shows: its density is 0"):
        model.predict_proba(pd.DataFrame({"x": [1e200], "n": [1]}), "z")


def test_categories_out_of_range_and_missing_covariates_are_refused():
    model = otp.Model(otp.Graph([("g", "k")]), {"g": m.Given(), "k": m.Categorical(2)})
    with pytest.raises(DataError, match="column 'k' must hold category codes from 0 to 1; found 2 in row 1"):
        otp.fit(model, pd.DataFrame({"g": [0.0, 1.0, 2.0], "k": [0, 2, 1]}))
    with pytest.raises(DataError, match="column 'k' must hold at most 2 categories; found 3"):
        otp.fit(model, pd.DataFrame({"g": [0.0, 1.0, 2.0], "k": ["a", "b", "c"]}))
    table = pd.DataFrame({"g": [0.0, np.nan, 2.0, 1.0, 1.0], "k": [0, 1, 1, 0, 1]})
    with pytest.raises(DataError, match="node 'g' is Given: its cells must not be missing; one is, in row 1"):
        otp.fit(model, table)


def test_more_slopes_than_rows_are_refused():
    names = [f"x{i}" for i in range(12)]
    model = otp.Model(otp.Graph([(n, "y") for n in names]), {n: m.Normal() for n in [*names, "y"]})
    with pytest.raises(DataError, match="the table has 10 rows that count; at least 15 are needed for this model"):
        otp.fit(model, pd.DataFrame(RNG.normal(size=(10, 13)), columns=[*names, "y"]))


def test_graphs_that_make_no_sense_are_refused():
    with pytest.raises(GraphError, match="hidden names 'q', which is not a node"):
        otp.Graph([("z", "x")], hidden=["q"])
    with pytest.raises(GraphError, match="edges must have no cycle"):
        otp.Graph([("a", "b"), ("b", "a")])
    dynamic = otp.Model(
        otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal()}
    )
    with pytest.raises((DataError, ModelError)):
        otp.fit(dynamic, pd.DataFrame({"y": RNG.normal(size=30)}))


def test_costs_of_unknown_nodes_are_refused():
    method = otp.paper(costs={"q": otp.costs.Euclidean()})
    with pytest.raises(ModelError, match="costs name nodes that are not in the graph: 'q'"):
        otp.fit(mixture_model(), mixture_table(30), method=method)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Drawn(noise="loud"), "noise must be one of 'sampled', 'abducted', 'marginal'; got 'loud'"),
        (lambda: Drawn(scope="global"), "scope must be one of 'joint', 'local'; got 'global'"),
        (lambda: Drawn(batch_size=0), "batch_size must be a whole number of at least 1; got 0"),
        (lambda: Drawn(costs={"x": 3}), "`cost` must be an AbstractCost or a function of two points; got 3"),
        (lambda: Drawn(backward="forward"), "backward must be a function that builds maps; got 'forward'"),
        (lambda: ClosedForm(reference="data"), "reference must be one of 'model', 'uniform'; got 'data'"),
        (lambda: Direct(points=0), "points must be a whole number of at least 1; got 0"),
        (lambda: Objective(reconstruction=-1.0), "reconstruction must be a number of at least 0; got -1"),
        (lambda: Objective(reconstruction=0.0), "the objective has no term"),
        (lambda: Deterministic(steps=0), "steps must be a whole number of at least 1; got 0"),
        (lambda: Adam(steps=0), "steps must be a whole number of at least 1; got 0"),
        (lambda: EM(steps=0), "steps must be a whole number of at least 1; got 0"),
        (lambda: Adam(learning_rate=0.0), "learning_rate must be positive; got 0"),
        (lambda: otp.entropic().with_steps(0), "steps must be a whole number of at least 1; got 0"),
        (lambda: otp.transport("sideways"), "route must be 'direct' or 'backward'; got 'sideways'"),
        (
            lambda: otp.Method("odd", Objective(reconstruction=0.0, push_forward=PushForward())),
            "the objective has no term in closed form",
        ),
        (
            lambda: otp.Method("odd", Objective(), Drawn(noise="sampled")),
            "what is Drawn is minimised by Adam; got Deterministic",
        ),
        (
            lambda: otp.Method("odd", Objective(), ClosedForm(), Adam()),
            "what is ClosedForm is minimised by Deterministic; got Adam",
        ),
        (lambda: otp.Method("odd", optimiser="sgd"), "what is ClosedForm is minimised by Deterministic; got str"),
    ],
)
def test_methods_that_make_no_sense_are_refused(build, message):
    with pytest.raises(ModelError, match=message):
        build()


def test_auto_takes_likelihood_where_there_are_densities_and_transport_where_not():
    assert otp.fit(mixture_model(), mixture_table(60), restarts=1).method.name == "likelihood"
    module = torch.nn.Linear(1, 1)
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Normal(), "x": m.Decoder(module)})
    assert kind_of(model, mixture_table(60)[["x"]]).named("auto").name == "transport"


def test_a_status_tells_what_has_no_end():
    still = Status(False, "the loss was still falling after 9 steps", "allow more steps in the method")
    notes = ["the data do not determine the weight of 'a': whatever it is, the likelihood is the same; fix it"]
    told = _with_cause(still, None, notes)
    assert str(told) == f"not converged: {notes[0]} (more steps will not end it)"
    assert _with_cause(still, None, ["column 'a' is constant"]) == still
    assert _with_cause(still, Cause.TIME, notes) == still
    assert _with_cause(Status(True, "the loss stopped changing"), None, notes).converged
