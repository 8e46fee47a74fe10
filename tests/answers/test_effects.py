"""Effects against regression and back-door sums."""

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.errors import ModelError


def confounded(rows: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    z = rng.normal(size=rows)
    t = 0.8 * z + rng.normal(size=rows)
    return pd.DataFrame({"z": z, "t": t, "y": 1.0 + 1.5 * t - z + rng.normal(size=rows)})


def test_a_linear_effect_and_its_interval_are_those_of_least_squares():
    table = confounded(400, 0)
    graph = otp.Graph([("z", "t"), ("z", "y"), ("t", "y")])
    model = otp.Model(graph, {node: m.Normal() for node in graph.nodes})
    otp.fit(model, table)
    effect = model.effect("t", "y", values=(0.0, 1.0), data=table, level=0.9)
    design = np.column_stack([np.ones(400), table["z"], table["t"]])
    slope, residual, *_ = np.linalg.lstsq(design, table["y"], rcond=None)
    error = np.sqrt(residual[0] / 400 * np.linalg.inv(design.T @ design)[2, 2])  # maximum likelihood divides by n
    row = effect.table.iloc[0]
    assert row["effect"] == pytest.approx(slope[2], abs=1e-6)
    assert row["std_error"] == pytest.approx(error, rel=1e-4)
    assert row["upper"] - row["effect"] == pytest.approx(1.6448536 * row["std_error"])
    assert "adjusting for z" in str(effect)
    for values in (pd.Series([0.0, 1.0], index=[7, 3]), torch.tensor([0.0, 1.0])):
        assert model.effect("t", "y", values=values).table["effect"].iloc[0] == pytest.approx(slope[2], abs=1e-6)


def test_an_effect_on_a_category_is_the_back_door_sum():
    graph = otp.Graph([("z", "t"), ("z", "y"), ("t", "y")])
    model = otp.Model(graph, {"z": m.Categorical(2), "t": m.Categorical(2), "y": m.Categorical(2)})
    by_z_and_t = np.array([[[0.8, 0.2], [0.5, 0.5]], [[0.3, 0.7], [0.1, 0.9]]])
    model.set_params({"z": {"probs": [0.6, 0.4]}, "t": {"probs": [[0.9, 0.1], [0.2, 0.8]]}, "y": {"probs": by_z_and_t}})
    effect = model.effect("t", "y")
    expected = 0.6 * (0.5 - 0.2) + 0.4 * (0.9 - 0.7)
    assert effect.difference[1, "1"] == pytest.approx(expected)
    assert effect.means.loc[1].tolist() == pytest.approx([1 - 0.6 * 0.5 - 0.4 * 0.9, 0.6 * 0.5 + 0.4 * 0.9])
    conditional = model.effect("t", "y", on={"z": 1})
    assert conditional.difference[1, "1"] == pytest.approx(0.2)
    assert np.isnan(effect.table["std_error"]).all()


def test_effects_that_make_no_sense_are_refused():
    graph = otp.Graph([("t", "w"), ("w", "y")])
    model = otp.Model(graph, {node: m.Normal() for node in graph.nodes})
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(40, 3)), columns=["t", "w", "y"])
    otp.fit(model, table)
    with pytest.raises(ModelError, match="'w' is such a node"):
        model.effect("t", "y", on={"w": 0.0})
    with pytest.raises(ModelError, match="must differ"):
        model.effect("t", "t")
    with pytest.raises(ModelError, match="at least two"):
        model.effect("t", "y", values=[1.0])


BOW = otp.Graph([("u", "x"), ("u", "y"), ("x", "y")], hidden=["u"])


def of_bow(kind, rng, rows=1000):
    """Rows in which an unseen cause moves both; the effect of x on y is 0.5 for numbers, 0.2 for categories."""
    if kind == "normal":
        u = rng.normal(size=rows)
        x = 0.8 * u + rng.normal(size=rows)
        return pd.DataFrame({"x": x, "y": 0.5 * x + 0.9 * u + rng.normal(size=rows)}), {n: m.Normal() for n in "uxy"}
    u = rng.integers(0, 3, rows)
    x = (rng.random(rows) < np.array([0.2, 0.5, 0.8])[u]).astype(int)
    y = (rng.random(rows) < np.array([0.3, 0.5, 0.6])[u] + 0.2 * x).astype(int)
    return pd.DataFrame({"x": x, "y": y}), {"u": m.Categorical(3), "x": m.Bernoulli(), "y": m.Bernoulli()}


# of the categories, seed 101 ends where all classes are equal: the effect stands still there
@pytest.mark.parametrize(("kind", "seed"), [("normal", 0), ("normal", 1), ("categories", 0), ("categories", 101)])
def test_an_effect_that_nothing_identifies_has_no_interval(kind, seed):
    table, mechanisms = of_bow(kind, np.random.default_rng(seed), 1500)
    model = otp.Model(BOW, mechanisms)
    effect = otp.fit(model, table, seed=seed).effect("x", "y")
    assert effect.table[["std_error", "lower", "upper"]].isna().all(axis=None)
    assert effect.identification.verdict == "not identified"
    assert "other values of the effect of x on y fit the data as well; u is an unseen common cause" in str(effect)
    again = model.effect("x", "y", data=table)
    assert again.table["lower"].isna().all()


def test_an_instrument_identifies_by_the_form_and_a_front_door_by_the_graph():
    rng = np.random.default_rng(0)
    z, u, noise, other = rng.normal(size=(4, 1500))
    x = z + 0.8 * u + noise
    table = pd.DataFrame({"z": z, "x": x, "y": 0.5 * x + 0.9 * u + other})
    graph = otp.Graph([("z", "x"), ("u", "x"), ("u", "y"), ("x", "y")], hidden=["u"])
    effect = otp.fit(otp.Model(graph, {n: m.Normal() for n in "zuxy"}), table).effect("x", "y")
    row = effect.table.iloc[0]
    ratio = np.cov(z, table["y"])[0, 1] / np.cov(z, x)[0, 1]
    assert row["effect"] == pytest.approx(ratio, abs=1e-4)
    assert row["lower"] < 0.5 < row["upper"]
    assert effect.identification.verdict == "identified by the form of the mechanisms"
    assert "identified only by the form of the mechanisms" in str(effect)
    mediator = 0.7 * x + rng.normal(size=1500)
    table = pd.DataFrame({"x": x, "w": mediator, "y": 0.9 * mediator + 0.9 * u + other})
    graph = otp.Graph([("u", "x"), ("u", "y"), ("x", "w"), ("w", "y")], hidden=["u"])
    effect = otp.fit(otp.Model(graph, {n: m.Normal() for n in "uxwy"}), table).effect("x", "y")
    assert effect.table["lower"].iloc[0] < 0.63 < effect.table["upper"].iloc[0]
    assert effect.identification.verdict == "identified by the graph"


def test_separated_categories_and_no_effect():
    x = np.random.default_rng(1).normal(size=300)
    table = pd.DataFrame({"x": x, "y": (x > 0).astype(int)})
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Bernoulli()})
    result = otp.fit(model, table)
    effect = result.effect("x", "y", values=(-1.0, 1.0))
    assert effect.table["lower"].isna().all()
    assert "not identified by these data, though by the graph" in str(effect)
    none = result.effect("y", "x")
    assert none.table[["effect", "lower", "upper"]].to_numpy().tolist() == [[0.0, 0.0, 0.0]]


def test_bootstrap_intervals_carry_the_same_verdict():
    table, mechanisms = of_bow("normal", np.random.default_rng(2), 400)
    result = otp.fit(otp.Model(BOW, mechanisms), table)
    drawn = result.intervals(draws=10)
    assert drawn.loc[[("y", "weight", (0,)), ("y", "weight", (1,))], "lower"].isna().all()
    assert drawn.loc[[("x", "loc", ()), ("y", "loc", ())], "lower"].notna().sum() >= 1
    notes = result.summary(errors="bootstrap", draws=10).to_frame()["note"]
    assert notes[["y.weight[u]", "y.weight[x]"]].tolist() == ["not identified"] * 2


@pytest.mark.parametrize("kind", ["normal", "categories"])
def test_all_that_is_made_of_parameters_carries_the_verdict(kind, tmp_path):
    """Of the bow: what is done and what is hidden is not told; what is seen of what is seen is."""
    table, mechanisms = of_bow(kind, np.random.default_rng(5))
    model, few = otp.Model(BOW, mechanisms), table.head(30)
    otp.fit(model, table, seed=0)
    model.save(tmp_path / "bow.zip")
    for one in (model, otp.load(tmp_path / "bow.zip")):
        for answer in (
            one.query("y", do={"x": 1}),
            one.query("u", given={"x": 1, "y": 1}),
            one.predict(few, "u"),
            one.posterior(few, draws=2),
            one.counterfactual(few, {"x": 1}),
        ):
            assert "other parameters fit the data as well" in answer.attrs["not identified"]
        assert one.effect("x", "y").identification.told is False
        for answer in (one.query("y", given={"x": 1}), one.predict(few, "y"), one.predict(few, "x")):
            assert answer.attrs["not identified"] == ""
    model.set_params(model.params())  # parameters that are given by hand are known
    assert model.predict(few, "u").attrs["not identified"] == ""


def test_answers_by_an_instrument_or_a_front_door_are_told():
    rng = np.random.default_rng(3)
    z, u, noise, other = rng.normal(size=(4, 1000))
    x = z + 0.8 * u + noise
    through = 0.7 * x + rng.normal(size=1000)
    instrument = pd.DataFrame({"z": z, "x": x, "y": 0.5 * x + 0.9 * u + other})
    mediated = pd.DataFrame({"x": x, "w": through, "y": 0.9 * through + 0.9 * u + other})
    for edges, table, by_graph in (
        ([("z", "x"), ("u", "x"), ("u", "y"), ("x", "y")], instrument, "not identified by the graph alone"),
        ([("u", "x"), ("u", "y"), ("x", "w"), ("w", "y")], mediated, ""),
    ):
        graph = otp.Graph(edges, hidden=["u"])
        model = otp.Model(graph, {node: m.Normal() for node in graph.nodes})
        otp.fit(model, table, seed=0)
        for answer in (model.query("y", do={"x": 1}), model.counterfactual(table.head(20), {"x": 1})):
            assert answer.attrs["not identified"].startswith(by_graph)
            assert "fit the data as well" not in answer.attrs["not identified"]
            assert by_graph or not answer.attrs["not identified"]


def test_collinear_columns_do_not_tell_what_lies_beside_them():
    rng = np.random.default_rng(4)
    a = rng.normal(size=500)
    table = pd.DataFrame({"a": a, "b": 2 * a, "y": a + rng.normal(size=500)})
    model = otp.Model(otp.Graph([("a", "y"), ("b", "y")]), {node: m.Normal() for node in "aby"})
    otp.fit(model, table, seed=0)
    assert "something else of y" in model.query("y", given={"a": 1.0, "b": -2.0}).attrs["not identified"]
    assert model.predict(table, "y").attrs["not identified"] == ""


def test_a_direct_effect_beside_an_unseen_cause_of_mediator_and_outcome_is_not_identified():
    """The treatment is as good as randomised, and its whole effect told; along which path it goes is not."""
    rng = np.random.default_rng(6)
    t, u, noise, other = rng.normal(size=(4, 1500))
    w = 0.7 * t + u + noise
    table = pd.DataFrame({"t": t, "w": w, "y": 0.4 * t + 0.5 * w + u + other})
    graph = otp.Graph([("t", "w"), ("t", "y"), ("w", "y"), ("u", "w"), ("u", "y")], hidden=["u"])
    result = otp.fit(otp.Model(graph, {node: m.Normal() for node in graph.nodes}), table, seed=0)
    total = result.effect("t", "y").table.iloc[0]
    assert total["lower"] < 0.75 < total["upper"]
    for path in ("direct", "indirect"):
        effect = result.effect("t", "y", path=path)
        assert effect.table["lower"].isna().all()
        assert str(effect.identification).startswith("not identified: other values")
        assert not result.model.effect("t", "y", path=path).identification


def test_several_nodes_that_are_set_and_what_is_given_count_for_the_graph():
    edges = [("u", "x"), ("u", "y"), ("x", "y"), ("z", "x"), ("z", "y"), ("u", "w")]
    graph = otp.Graph(edges, hidden=["u"])
    model = otp.Model(graph, {node: m.Bernoulli() for node in graph.nodes})
    model.set_params({n: {"probs": np.full((2,) * (1 + len(graph.parents(n))), 0.5)} for n in graph.nodes})
    verdict = "not identified"
    assert model.query("y", do={"x": 1, "z": 0}).attrs[verdict].startswith("not identified by the graph alone")
    assert model.query("z", do={"x": 1, "y": 0}).attrs[verdict] == ""
    assert model.query("y", do={"z": 1}, given={"w": 1}).attrs[verdict] == ""
    assert model.query("y", do={"z": 1}, given={"u": 1}).attrs[verdict].startswith("not identified by the graph alone")
    assert not model.effect("z", "y", on={"u": 1}).identification


# -- categories, paths and words ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mediated():
    """A category that moves the outcome by itself and through a binary node; the truth by enumeration."""
    rng = np.random.default_rng(21)
    sex = rng.integers(0, 2, size=4000)
    works = rng.random(4000) < np.where(sex == 1, 0.7, 0.3)
    pay = 1.0 * sex + 2.0 * works + 1.5 * sex * works + rng.normal(size=4000)
    table = pd.DataFrame({"sex": np.array(["f", "m"])[sex], "works": works, "pay": pay})
    model = otp.Model.from_frame(otp.Graph([("sex", "works"), ("sex", "pay"), ("works", "pay")]), table)
    return otp.fit(model, table, seed=0, progress=False), table


def test_categories_are_compared_with_the_first_without_being_named(mediated):
    result, table = mediated
    effect = result.effect("sex", "works")
    rates = table.groupby("sex")["works"].mean()
    assert effect.table.index.tolist() == [("m", "False"), ("m", "True")]
    assert effect.difference["m", "True"] == pytest.approx(rates["m"] - rates["f"], abs=1e-6)
    assert "against f, with intervals of 95 %" in str(effect)


def test_direct_and_indirect_effects_are_those_of_the_means(mediated):
    result, table = mediated
    means, rates = table.groupby(["sex", "works"])["pay"].mean(), table.groupby("sex")["works"].mean()

    def expected(own, through):
        return means[own, True] * rates[through] + means[own, False] * (1 - rates[through])

    found = {path: result.effect("sex", "pay", path=path) for path in ("total", "direct", "indirect")}
    base = expected("f", "f")
    truths = {"total": ("m", "m"), "direct": ("m", "f"), "indirect": ("f", "m")}
    for path, at in truths.items():
        assert found[path].difference.iloc[0] == pytest.approx(expected(*at) - base, abs=1e-3)
        assert 0 < found[path].table["std_error"].iloc[0] < 0.2
    assert str(found["direct"]).startswith("direct effect of sex on pay")
    with pytest.raises(otp.ModelError, match="path must be one of"):
        result.effect("sex", "pay", path="side")


def test_a_hidden_treatment_is_no_common_cause_of_itself():
    graph = otp.Graph([("load", "a"), ("load", "b"), ("load", "c")], hidden=["load"])
    model = otp.Model(graph, {name: otp.mechanisms.Normal() for name in graph.nodes})
    factor = np.random.default_rng(5).normal(size=500)
    table = pd.DataFrame({n: factor + np.random.default_rng(i).normal(size=500) for i, n in enumerate("abc")})
    said = str(otp.fit(model, table, seed=0, progress=False).effect("load", "a"))
    assert "load is never seen" in said
    assert "common cause" not in said
