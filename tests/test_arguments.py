"""Arguments of the wrong kind, and paths that no file has: errors that name them, and never raw ones."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m

RNG = np.random.default_rng(0)
TABLE = pd.DataFrame({"x": RNG.normal(size=40), "n": RNG.poisson(3, 40), "k": RNG.choice(list("ab"), 40)})


def made():
    graph = otp.Graph([("x", "n"), ("x", "k")])
    return otp.Model(graph, {"x": m.Normal(), "n": m.Poisson(), "k": m.Categorical(2)})


@pytest.fixture(scope="module")
def result():
    return otp.fit(made(), TABLE, seed=0, restarts=1)


@pytest.fixture(scope="module")
def fitted(result):
    return result.model


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda one: one.sample("a", seed=0), "rows must be a whole number of at least 1; got 'a'"),
        (lambda one: one.sample(1.5, seed=0), "rows must be a whole number of at least 1; got 1.5"),
        (lambda one: one.sample(True, seed=0), "rows must be a whole number of at least 1; got True"),
        (lambda one: one.sample(2**63, seed=0), r"rows must be below 2\^63; got 9223372036854775808"),
        (lambda one: one.impute(TABLE, draws=10**9), r"at most 2\^31 cells.*; got 120000000000: draw fewer"),
        (lambda one: one.sample(3, seed=None), "seed must be a non-negative integer below 2.63; got None"),
        (lambda one: one.sample(3, seed=2**70), "seed must be a non-negative integer below 2.63"),
        (lambda one: one.sample(3, seed=-1), "seed must be a non-negative integer below 2.63; got -1"),
        (lambda one: one.sample(3, seed=0, do=5), "do must give values by name, as a dict does; got 5"),
        (lambda one: one.distance(TABLE, seed="a"), "seed must be a non-negative integer below 2.63; got 'a'"),
        (lambda one: one.impute(TABLE, draws="a"), "draws must be a whole number of at least 1; got 'a'"),
        (lambda one: one.impute(TABLE, draws=1.5), "draws must be a whole number of at least 1; got 1.5"),
        (lambda one: one.counterfactual(TABLE, 5), "do must give values by name, as a dict does; got 5"),
        (lambda one: one.counterfactual(TABLE, {}, draws=0), "draws must be a whole number of at least 1; got 0"),
        (lambda one: one.query([]), r"node must name a node, or several; got \[\]"),
        (lambda one: one.query(5), "node must name a node, or several; got 5"),
        (lambda one: one.query("k", given={"x": [[1, 2], [3, 4]]}), r"given\['x'\] must be one value or a column"),
        (lambda one: one.query("k", given=5), "given must give values by name, as a dict does; got 5"),
        (lambda one: one.effect("x", "n", values=5), "values must be at least two: .*; got 5"),
        (lambda one: otp.paper(noise="marginal"), "noise must be one of 'sampled', 'abducted'; got 'marginal'"),
        (lambda one: one.effect("x", "n", on=5), "on must give values by name, as a dict does; got 5"),
        (lambda one: one.effect("x", "n", level="a"), "level must lie between 0 and 1; got 'a'"),
        (lambda one: one.effect("x", "n", level=np.nan), "level must lie between 0 and 1; got nan"),
        (lambda one: made().set_params(5), "params must give values by name, as a dict does; got 5"),
        (lambda one: made().set_params({"x": None}), r"params\['x'\] must give values by name"),
        (lambda one: made().set_params({"x": {"loc": "a"}}), "parameter 'loc' of node 'x' must be numbers; got 'a'"),
        (lambda one: made().set_params({"x": {"loc": 1j}}), "parameter 'loc' of node 'x' must be numbers; got 1j"),
        (lambda one: otp.fit(made(), TABLE, callbacks=5), "callbacks must be functions of a record; got 5"),
        (lambda one: otp.fit(made(), TABLE, callbacks=[5]), r"callbacks must be functions of a record; got \[5\]"),
        (lambda one: one.query("n", given=TABLE.iloc[0]), "given must give values by name, as a dict does; got x"),
        (lambda one: one.query("n", do=np.ones(3)), "do must give values by name, as a dict does; got array"),
        (lambda one: one.effect("x", np.ones(3)), r"there is no node array\(\[1., 1., 1.\]\); the model has 'x'"),
        (lambda one: one.query(["x", ["n"]]), r"there is no node \['n'\]; the model has 'x'"),
        (
            lambda one: one.score(TABLE, kind=np.ones(3)),
            "kind must be one of None, 'transport', 'likelihood'; got array",
        ),
        (
            lambda one: one.set_params(one.params(), labels=5),
            "labels must give values by name.*; got 5",
        ),
        (lambda one: otp.Model.from_frame(one.graph, TABLE, hidden=5), "hidden must give values by name.*; got 5"),
        (lambda one: otp.score_to(5, "a.parquet", "b.parquet"), "model must be an otp.Model.*; got int"),
        (lambda one: otp.SearchSchedule(alternative_steps=5), "alternative_steps must be a list of numbers; got 5"),
        (lambda one: otp.RobustOptions(tails=("a",)), "tails must be a number; got 'a'"),
        (lambda one: otp.divergences.Sinkhorn("a"), "`epsilon` must be a number; got 'a'"),
        (
            lambda one: otp.divergences.MMD(bandwidth=[1]),
            r"`bandwidth` must be 'median' or a positive number; got \[1\]",
        ),
        (lambda one: otp.divergences.MMD(scales=5), "`scales` must be a list of numbers; got 5"),
        (lambda one: otp.costs.SmoothL1("a"), "`beta` must be a number; got 'a'"),
        (lambda one: otp.ridge(1.0, [1]), r"centre must be a number; got \[1\]"),
        (lambda one: otp.transport(costs=5), "costs must give values by name, as a dict does; got 5"),
        (lambda one: m.from_spec(5), "spec must give values by name, as a dict does; got 5"),
        (lambda one: otp.fit(made(), TABLE, course=5), "course must be an otp.SearchSchedule; got 5"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fitted, ask, message):
    with pytest.raises(otp.ModelError, match=message):
        ask(fitted)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda one: one.intervals(draws=1.5), "draws must be a whole number of at least 10; got 1.5"),
        (lambda one: one.intervals(seed=-1), "seed must be a non-negative integer"),
        (lambda one: one.bootstrap(jobs=0), "jobs must be a whole number of at least 1; got 0"),
        (lambda one: one.transport(TABLE, rows="a"), "rows must be a whole number of at least 1; got 'a'"),
        (lambda one: one.transport(TABLE, seed="a"), "seed must be a non-negative integer"),
        (lambda one: one.transport(TABLE, etas=["a"]), "etas must be a number of at least 0; got 'a'"),
        (lambda one: one.term([], "x"), r"parent must be a number that node \[\] reads, of \[\]; got 'x'"),
    ],
)
def test_a_result_refuses_what_makes_no_sense(result, ask, message):
    with pytest.raises(otp.ModelError, match=message):
        ask(result)


def test_futures_and_sequences_refuse_what_makes_no_sense():
    series = otp.Sequences(pd.DataFrame({"x": TABLE["x"]}))
    model = otp.Model(otp.Graph([otp.lag("x", "x")]), {"x": m.Normal()})
    result = otp.fit(model, series)
    for ask in (model.forecast, result.forecast):
        with pytest.raises(otp.ModelError, match=r"seed must be a non-negative integer below 2.63; got 'a'"):
            ask(series, 2, seed="a")
    with pytest.raises(otp.ModelError, match="do must give values by name, as a dict does; got 5"):
        model.sample(1, seed=0, length=3, do=5)
    with pytest.raises(otp.GraphError, match=r"node \['x'\] is not in the graph"):
        model.identified(["x"], "x")
    with pytest.raises(otp.DataError, match=r"time must name a column; got \[\]"):
        otp.fit(model, otp.Sequences(TABLE, time=[]))


def test_values_that_a_node_cannot_have_are_told_by_the_name_of_the_argument():
    model = otp.Model(otp.Graph([("dose", "y")]), {"dose": m.Gamma(), "y": m.Normal()})
    model.set_params({"dose": {"log_mean": 0, "shape": 2}, "y": {"loc": 0, "weight": 1, "scale": 1}})
    with pytest.raises(otp.DataError, match="values: column 'dose' must hold numbers above 0; found 0"):
        model.effect("dose", "y")
    assert model.effect("dose", "y", values=(1, 3)).table["effect"].item() == pytest.approx(2)


def test_a_tensor_with_a_gradient_is_a_value_like_another(fitted):
    learned, plain = (fitted.query("n", {"x": torch.tensor(1.0, requires_grad=want)}) for want in (True, False))
    pd.testing.assert_series_equal(learned, plain)


def test_a_column_alone_is_no_vector():
    model = otp.Model(otp.Graph([("a", "v")]), {"a": m.Normal(), "v": m.MultivariateNormal(2)})
    rows = {"a": RNG.normal(size=40), "v": RNG.normal(size=(40, 2))}
    otp.fit(model, rows)
    with pytest.raises(otp.DataError, match=r"data\['v'\] must have shape \(rows, 2\) for that node; got \(40,\)"):
        model.predict({"v": pd.Series(rows["v"][:, 0])}, "a", partial=True)
    compared = model.effect("v", "a", values=[(0, 0), (1, 1)]).table
    assert compared["effect"].item() == 0


def test_whole_numbers_of_numpy_are_whole_numbers(fitted):
    assert len(fitted.sample(np.int64(3), seed=np.uint8(1))) == 3
    otp.fit(made(), TABLE, seed=np.int64(2), restarts=np.int32(1))


@pytest.mark.parametrize(
    "data", [None, 5, "data.csv", Path("data.csv"), b"x", print, {1, 2}, np.float64(3.0), np.ones((5, 2)), TABLE["x"]]
)
@pytest.mark.parametrize("use", ["distance", "impute", "check", "predict"])
def test_what_is_no_table_is_refused(fitted, data, use):
    with pytest.raises(otp.DataError):
        fitted.predict(data, "k") if use == "predict" else getattr(fitted, use)(data)


def test_a_mapping_of_single_values_is_a_table_of_one_row(fitted):
    assert fitted.predict({"x": 1.0, "n": 2, "k": None}, "k").shape == (1,)


def test_tensors_that_hold_nothing_are_refused_and_gradients_do_not_matter(fitted):
    with pytest.raises(otp.DataError, match="got a tensor on the device 'meta', which holds none"):
        fitted.distance(torch.ones(5, 3, device="meta"))
    table = torch.tensor([[0.5, 2.0, 1.0]] * 4)
    codes = made().set_params(
        {"x": {"loc": 0, "scale": 1}, "n": {"log_rate": 1, "weight": 0}, "k": {"logits": [0, 1], "weight": [0, 0]}}
    )
    plain, learned = (codes.predict(table.clone().requires_grad_(want), "k") for want in (False, True))
    pd.testing.assert_series_equal(plain, learned)


@pytest.mark.parametrize("cell", [[1], {}, {1}, np.ones(2), ([1],)], ids=repr)
@pytest.mark.parametrize("column", ["x", "n", "k"])
def test_cells_that_hold_something_else_are_refused(fitted, column, cell):
    table = TABLE.astype(object)
    table.at[3, column] = cell
    for ask in (lambda: otp.fit(made(), table, restarts=1), lambda: fitted.distance(table)):
        with pytest.raises(otp.DataError, match=f"{column}"):
            ask()


@pytest.mark.parametrize("path", [5, None, "a\0b", "\ud800.otp", b"x"], ids=repr)
def test_what_is_no_path_is_refused(fitted, path):
    uses = [lambda: fitted.save(path), lambda: otp.load(path)]
    uses += [lambda: otp.fit(made(), TABLE, checkpoint=path)] if path is not None else []
    for ask in uses:
        with pytest.raises(otp.DataError, match="a path must be text that a file can be called"):
            ask()


def test_a_name_that_is_too_long_is_no_file(fitted):
    for use in (otp.load, fitted.save):
        with pytest.raises(otp.DataError, match="a path must be text that a file can be called; got 'aaa"):
            use("a" * 5000)
