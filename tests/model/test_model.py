"""The model: parameters as a user reads them, sampling, interventions, scores, tables in and out."""

import functools
import html.parser

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.errors import DataError, ModelError, NotFittedError
from otpdag.spaces import Discrete

RNG = np.random.default_rng(3)


# -- parameters -------------------------------------------------------------------------------------------------------


def fitted(graph, mechanisms, table):
    model = otp.Model(graph, mechanisms)
    otp.fit(model, table, restarts=1)
    return model


def test_shapes_follow_the_discrete_parents_in_the_order_of_the_edges():
    n = 400
    table = pd.DataFrame({"a": RNG.integers(0, 2, n), "b": RNG.integers(0, 3, n), "u": RNG.normal(size=n)})
    table["s"] = RNG.normal(size=n) + table["a"] - table["b"] + table["u"]
    table["v.0"], table["v.1"] = RNG.normal(size=n) + table["b"], RNG.normal(size=n) - table["u"]
    table["c"] = RNG.integers(0, 4, n)
    table["n"] = RNG.poisson(2.0, n)
    graph = otp.Graph([("b", "s"), ("a", "s"), ("u", "s"), ("b", "v"), ("u", "v"), ("a", "c"), ("b", "c"), ("u", "n")])
    params = fitted(
        graph,
        {
            "a": m.Categorical(2),
            "b": m.Categorical(3),
            "u": m.Normal(),
            "s": m.Normal(shared_scale=True),
            "v": m.Normal(2),
            "c": m.Categorical(4),
            "n": m.Poisson(),
        },
        table,
    ).params()
    assert {name: value.shape for name, value in params["s"].items()} == {"loc": (3, 2), "weight": (1,), "scale": ()}
    assert {name: value.shape for name, value in params["v"].items()} == {
        "loc": (3, 2),
        "weight": (1, 2),
        "scale": (3, 2),
    }
    assert params["c"]["probs"].shape == (2, 3, 4)
    assert params["a"]["probs"].shape == (2,)
    assert params["u"]["loc"].shape == ()
    assert {name: value.shape for name, value in params["n"].items()} == {"log_rate": (), "weight": (1,)}
    np.testing.assert_allclose(params["c"]["probs"].sum(-1), 1)
    np.testing.assert_allclose(
        params["s"]["loc"][0, 1] - params["s"]["loc"][0, 0], 1, atol=0.5
    )  # axis 0 is b, axis 1 is a
    frequencies = pd.crosstab([table["a"], table["b"]], table["c"], normalize="index").to_numpy().reshape(2, 3, 4)
    np.testing.assert_allclose(params["c"]["probs"], frequencies, atol=1e-4)


def chain():
    """A confounder c of x and y."""
    model = otp.Model(otp.Graph([("c", "x"), ("c", "y"), ("x", "y")]), {n: m.Normal() for n in ("c", "x", "y")})
    return model.set_params(
        {
            "c": {"loc": 1.0, "scale": 1.0},
            "x": {"loc": 0.0, "weight": 1.0, "scale": 0.5},
            "y": {"loc": 2.0, "weight": [2.0, -1.0], "scale": 0.3},
        }
    )


def test_parameters_set_by_hand_are_read_back_and_are_copies():
    model = chain()
    given = np.array([2.0, -1.0])
    model.set_params({**model.params(), "y": {"loc": 2.0, "weight": given, "scale": 0.3}})
    given[:] = 0
    np.testing.assert_allclose(model.params()["y"]["weight"], [2.0, -1.0])
    model.params()["y"]["weight"][:] = 7
    np.testing.assert_allclose(model.params()["y"]["weight"], [2.0, -1.0])
    assert model.params()["c"]["loc"].shape == ()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"c": {"loc": 0.0}}, "parameter 'scale' of node 'c' is missing"),
        (
            {"c": {"loc": [0.0, 1.0], "scale": 1.0}},
            r"'loc' of node 'c' must have 1 entries \(shape \(1, 1\)\); got \(2,\)",
        ),
        ({"c": {"loc": 0.0, "scale": -1.0}}, "'scale' of node 'c' must be a number above zero"),
        ({"c": {"loc": np.nan, "scale": 1.0}}, "'loc' of node 'c' must be a finite number"),
        ({"d": {"loc": 0.0}}, "params names node 'd', which the model does not have; it has c, x, y"),
        ({"c": {"mean": 0.0}}, "node 'c' has no parameter 'mean'; it has loc, scale"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(params, message):
    model = otp.Model(otp.Graph([("c", "x"), ("c", "y"), ("x", "y")]), {n: m.Normal() for n in ("c", "x", "y")})
    with pytest.raises(ModelError, match=message):
        model.set_params(params)
    assert not model.is_fitted


def test_an_unfitted_model_says_so():
    model = otp.Model(otp.Graph([("c", "x")]), {"c": m.Normal(), "x": m.Normal()})
    for use in (model.params, lambda: model.sample(3, seed=0), lambda: model.distance(np.zeros((3, 2)))):
        with pytest.raises(NotFittedError, match="no parameters yet: call otpdag"):
            use()
    assert "not fitted" in repr(model)


# -- sampling and interventions ---------------------------------------------------------------------------------------


def test_sample_moments_are_those_of_the_model():
    sample = chain().sample(40_000, seed=0)
    b = np.array([[0, 0, 0], [1.0, 0, 0], [2.0, -1.0, 0]])
    inverse = np.linalg.inv(np.eye(3) - b)
    mean, covariance = inverse @ [1.0, 0.0, 2.0], inverse @ np.diag([1.0, 0.25, 0.09]) @ inverse.T
    np.testing.assert_allclose(sample.mean(), mean, atol=0.05)
    np.testing.assert_allclose(sample.cov(), covariance, atol=0.1)


def test_samples_repeat_with_their_seed_and_leave_global_randomness_alone():
    model = chain()
    states = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    first = model.sample(5, seed=1)
    pd.testing.assert_frame_equal(first, model.sample(5, seed=1))
    assert not np.allclose(first, model.sample(5, seed=2))
    assert torch.equal(states[0], torch.random.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()


def test_doing_differs_from_seeing():
    """E[y | do(x)] = 2 + 2 E[c] - x, while E[y | x] goes through the confounder as well."""
    model = chain()
    done = model.sample(20_000, seed=0, do={"x": 3.0})
    assert done["x"].unique().tolist() == [3.0]
    assert done["y"].mean() == pytest.approx(2 + 2 * 1.0 - 3.0, abs=0.05)
    assert done["c"].mean() == pytest.approx(1.0, abs=0.03)  # causes are not touched
    sample = model.sample(60_000, seed=1)
    near = sample[(sample["x"] - 3.0).abs() < 0.1]
    seen = 2 + 2 * (1.0 + (3.0 - 1.0) / 1.25) - 3.0
    assert near["y"].mean() == pytest.approx(seen, abs=0.15)
    assert abs(near["y"].mean() - done["y"].mean()) > 1


def labelled():
    table = pd.DataFrame({"k": ["wet", "dry", "wet", "dry", "dry", "wet"] * 10, "x": RNG.normal(size=60)})
    model = otp.Model(otp.Graph([("k", "x")]), {"k": m.Categorical(2), "x": m.Normal()})
    otp.fit(model, table)
    return model, table


def test_interventions_take_labels_and_one_value_for_each_row():
    model, _ = labelled()
    assert model.sample(4, seed=0, do={"k": "wet"})["k"].tolist() == ["wet"] * 4
    assert model.sample(2, seed=0, do={"k": ["wet", "dry"]})["k"].tolist() == ["wet", "dry"]
    vector = otp.Model(otp.Graph([], nodes=["v"]), {"v": m.Normal(2)})
    vector.set_params({"v": {"loc": [0.0, 0.0], "scale": [1.0, 1.0]}})
    assert vector.sample(3, seed=0, do={"v": [1.0, 2.0]})["v.1"].tolist() == [2.0] * 3


@pytest.mark.parametrize(
    ("do", "error", "message"),
    [
        ({"q": 1.0}, ModelError, "there is no node 'q'; the model has 'c', 'x', 'y'"),
        (
            {"x": [1.0, 2.0]},
            ModelError,
            r"do\['x'\] must be one value or one for each of 5 rows; got 2",
        ),
        ({"x": np.nan}, ModelError, r"do\['x'\] must not be missing"),
        ({"x": np.inf}, DataError, "column 'x' must hold finite numbers"),
    ],
)
def test_interventions_that_do_not_fit_are_refused(do, error, message):
    with pytest.raises(error, match=message):
        chain().sample(5, seed=0, do=do)


def test_given_nodes_need_values():
    model = otp.Model(otp.Graph([("g", "x")]), {"g": m.Given(Discrete(2)), "x": m.Normal()})
    model.set_params({"x": {"loc": [0.0, 10.0], "scale": [1.0, 1.0]}})
    with pytest.raises(ModelError, match="nodes 'g' are Given: pass given=table with their values"):
        model.sample(3, seed=0)
    with pytest.raises(ModelError, match="given must have at least 3 rows; got 2"):
        model.sample(3, seed=0, given=pd.DataFrame({"g": [0, 1]}))
    sample = model.sample(2, seed=0, given=pd.DataFrame({"g": [0, 1, 1]}))
    assert sample["g"].tolist() == [0, 1]
    assert sample["x"][1] > 5 > sample["x"][0]
    assert model.sample(2, seed=0, do={"g": 1})["x"].min() > 5
    with pytest.raises(ModelError, match="rows must be a whole number of at least 1; got 0"):
        model.sample(0, seed=0)


# -- scores -----------------------------------------------------------------------------------------------------------


def test_the_right_model_scores_better_than_a_wrong_one():
    right = chain()
    table = right.sample(1500, seed=0)
    wrong = otp.Model(otp.Graph([], nodes=["c", "x", "y"]), {n: m.Normal() for n in ("c", "x", "y")})
    otp.fit(wrong, table)  # the right margins, no dependence
    shifted = chain()
    shifted.set_params({**shifted.params(), "x": {"loc": 0.5, "weight": 1.0, "scale": 0.5}})
    held_out = right.sample(1500, seed=1)
    likelihood = functools.partial(otp.Model.score, data=held_out, kind="likelihood")
    for scored, better in ((lambda model: model.distance(held_out), np.less), (likelihood, np.greater)):
        best = scored(right)
        assert better(best, scored(wrong))
        assert better(best, scored(shifted))
    assert right.distance(held_out) < right.distance(held_out).upper
    with pytest.warns(DeprecationWarning, match=r"say kind='likelihood', or model\.distance\(data\)"):
        assert right.score(held_out) == right.distance(held_out)


def test_gaps_at_random_do_not_spoil_the_transport_score():
    """The truth scores best, though cells are missing where another column is large."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=1500)
    b = 0.5 + 1.1 * a + 0.8 * rng.normal(size=1500)
    table = pd.DataFrame({"a": a, "b": np.where(a > 0, np.nan, b), "c": b + 0.7 * rng.normal(size=1500)})
    scores = {}
    for slope in (0.8, 1.1, 1.4):
        model = otp.Model(otp.Graph([("a", "b"), ("b", "c")]), {name: m.Normal() for name in "abc"})
        own = {"b": {"loc": 0.5, "weight": [slope], "scale": 0.8}, "c": {"loc": 0.0, "weight": [1.0], "scale": 0.7}}
        scores[slope] = model.set_params({"a": {"loc": 0.0, "scale": 1.0}, **own}).distance(table, seed=1)
    assert scores[1.1] < scores[1.1].upper
    assert min(scores[0.8], scores[1.4]) > 1.5 * scores[1.1]


def test_missing_cells_do_not_spoil_the_transport_score():
    model = chain()
    table = model.sample(1500, seed=0)
    table = table.mask(RNG.random(table.shape) < 0.4)
    assert model.distance(table) < model.distance(table).upper


def test_the_transport_score_is_free_of_units():
    table = chain().sample(300, seed=0)
    scores = []
    for unit in (1.0, 1e4):
        model = otp.Model(otp.Graph([("c", "x")]), {"c": m.Normal(), "x": m.Normal()})
        model.set_params({"c": {"loc": 0.0, "scale": 1.0}, "x": {"loc": 0.0, "weight": unit, "scale": 0.5 * unit}})
        scores.append(model.distance(table[["c"]].assign(x=table["x"] * unit), seed=4))
    assert scores[0] == pytest.approx(scores[1], rel=1e-9)


# -- tables -----------------------------------------------------------------------------------------------------------


def test_labels_and_indices_survive():
    model, table = labelled()
    table.index = [f"row {i}" for i in range(60)]
    table.loc["row 3", "k"] = None
    filled = model.impute(table)
    assert list(filled.index) == list(table.index)
    assert set(filled["k"]) == {"wet", "dry"}
    assert filled["k"].drop("row 3").tolist() == table["k"].drop("row 3").tolist()
    assert model.labels("k") == ("dry", "wet")
    assert set(model.sample(30, seed=0)["k"]) == {"wet", "dry"}
    with pytest.raises(ModelError, match="node must be a category; 'x' is Real"):
        model.labels("x")


def test_hidden_columns_of_a_sample_may_be_passed_back():
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal()})
    model.set_params({"z": {"probs": [0.5, 0.5]}, "x": {"loc": [-1.0, 1.0], "scale": [1.0, 1.0]}})
    sample = model.sample(20, seed=0)
    assert model.posterior(sample, draws=2).shape == (40, 1)
    x = sample["x"].to_numpy()
    density = 0.5 * (np.exp(-0.5 * (x + 1) ** 2) + np.exp(-0.5 * (x - 1) ** 2)) / np.sqrt(2 * np.pi)
    assert model.score(sample, kind="likelihood") == pytest.approx(np.log(density).mean())
    assert model.impute(sample).columns.tolist() == ["x"]


def test_mechanisms_are_chosen_by_column():
    table = pd.DataFrame(
        {
            "s": ["a", "b", "c", "a"],
            "load": [1.5, 2.0, np.nan, 0.1],
            "hits": [12, 0, 7, 3],
            "flag": [True, False, True, True],
        }
    )
    graph = otp.Graph([("z", c) for c in table], hidden=["z"])
    model = otp.Model.from_frame(
        graph, table, hidden={"z": m.Categorical(2)}, mechanisms={"hits": m.NegativeBinomial()}
    )
    names = {node: type(mechanism).__name__ for node, mechanism in model.mechanisms.items()}
    assert names == {
        "z": "Categorical",
        "s": "Categorical",
        "load": "Normal",
        "hits": "NegativeBinomial",
        "flag": "Categorical",
    }
    assert model.spaces["s"].width == 3
    with pytest.raises(ModelError, match="hidden node 'z' needs a mechanism: pass hidden="):
        otp.Model.from_frame(graph, table)
    with pytest.raises(ModelError, match="node 'q' has no column and no mechanism"):
        otp.Model.from_frame(otp.Graph([("q", "s")]), table)
    with pytest.raises(ModelError, match="mechanisms name nodes that the graph lacks: 'q'"):
        otp.Model.from_frame(graph, table, hidden={"z": m.Categorical(2), "q": m.Normal()})


# -- how it looks -----------------------------------------------------------------------------------------------------


class Balanced(html.parser.HTMLParser):
    """Fails on a tag that is not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], 0

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen += 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("is_fitted", [True, False])
def test_the_notebook_view_is_well_formed_and_escapes_names(is_fitted):
    model = otp.Model(
        otp.Graph([("<a & b>", "x")], hidden=["<a & b>"]), {"<a & b>": m.Categorical(2), "x": m.Normal(network=())}
    )
    if is_fitted:
        model.set_params({"<a & b>": {"probs": [0.5, 0.5]}, "x": {"loc": [-1.0, 1.0], "scale": [1.0, 1.0]}})
    text = model._repr_html_()
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert not parser.open
    assert parser.seen > 10
    assert "<a & b>" not in text
    assert "&lt;a &amp; b&gt;" in text
    assert ("not fitted" in text) != is_fitted


def test_the_text_view_names_nodes_and_parents():
    assert repr(chain()).splitlines() == [
        "Model with 3 nodes (fitted)",
        "  c: Normal",
        "  x: Normal <- c",
        "  y: Normal <- c, x",
    ]


def test_a_table_that_lacks_columns_is_refused():
    """Filled in by the model itself, absent columns would fit it perfectly."""
    graph = otp.Graph([("z", "x"), ("z", "v")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal(), "v": m.Normal(2)})
    scales = {"loc": [[0.0, 0.0], [1.0, 1.0]], "scale": [[1.0, 1.0], [1.0, 1.0]]}
    model.set_params({"z": {"probs": [0.5, 0.5]}, "x": {"loc": [0.0, 3.0], "scale": [1.0, 1.0]}, "v": scales})
    semicolons, some = pd.DataFrame({"x;v.0;v.1": ["1;2;3"]}), {"x": [1.0, 2.0]}
    for use in (model.distance, model.impute, model.posterior, model.check, lambda t: model.predict_proba(t, "z")):
        with pytest.raises(DataError, match=r"lacks the columns 'x', 'v.0', 'v.1'; .*separated by semicolons\?"):
            use(semicolons)
    with pytest.raises(DataError, match=r"lacks the columns 'v.0', 'v.1'; it has 'x'\."):
        model.distance(some)
    assert list(model.impute(some, partial=True)) == ["x", "v.0", "v.1"]
    assert len(model.posterior(pd.DataFrame(some), draws=1, partial=True)) == 2
    empty = pd.DataFrame({"x": [1.0], "v.0": [np.nan], "v.1": [np.nan]})
    assert not model.impute(empty).isna().to_numpy().any()


def test_a_sequence_that_lacks_columns_is_refused():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x"), ("z", "y")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal(), "y": m.Normal()})
    shown = {"loc": [0.0, 3.0], "scale": [1.0, 1.0]}
    moves = {"z": {"probs": [[0.9, 0.1], [0.2, 0.8]]}, "z[0]": {"probs": [0.5, 0.5]}}
    model.set_params({**moves, "x": shown, "y": shown})
    table = pd.DataFrame({"x": [0.0, 3.0, 3.0]})
    for use in (model.distance, model.impute, model.posterior, model.decode, lambda t: model.predict_proba(t, "z")):
        with pytest.raises(DataError, match="lacks the column 'y'"):
            use(table)
    assert len(model.decode(table, partial=True)) == 3


def test_values_that_a_draw_would_ignore_are_refused():
    model = otp.Model(otp.Graph([("g", "y")]), {"g": m.Given(), "y": m.Normal()})
    model.set_params({"y": {"loc": 0.0, "weight": [1.0], "scale": 1.0}})
    given = pd.DataFrame({"g": [0.0, 1.0], "y": [5.0, 5.0]})
    with pytest.raises(ModelError, match="given would not be used for node 'y', which is not Given"):
        model.sample(2, seed=0, given=given)
    with pytest.raises(ModelError, match="given would not be used: no node of the model is Given"):
        model.sample(2, seed=0, given=given[["g"]], do={"g": 1.0})
    assert len(model.sample(2, seed=0, given=given[["g"]].assign(other=1))) == 2
    plain = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()}).set_params({"x": {"loc": 0.0, "scale": 1.0}})
    with pytest.raises(ModelError, match="posterior and impute draw given what rows show"):
        plain.sample(2, seed=0, given={"x": [1.0, 2.0]})


def test_choices_are_explained_and_doubtful_ones_are_warned_of(capsys):
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"code": np.repeat([10, 20, 30], 20), "x": rng.normal(size=60)})
    table["vote"] = np.tile([0.0, 1.0], 30)
    graph = otp.Graph([("code", "x"), ("vote", "x")])
    with pytest.warns(otp.ColumnTypeWarning, match="'code' is taken for a category, but: amounts rather than codes"):
        model = otp.Model.from_frame(graph, table, explain=True)
    said = capsys.readouterr().out
    assert "vote: category of 2, two values, 0, 1" in said
    assert "x: number, numbers with fractions, 60 values" in said
    otp.fit(model, table)
    assert model.labels("code") == (10, 20, 30)
    assert set(model.sample(20, seed=0)["code"]) <= {10, 20, 30}
    with pytest.raises(DataError, match="column 'code' must hold one of 10, 20, 30; found 40 in row 0"):
        model.distance(table.assign(code=[40, *table["code"][1:]]))


def test_one_class_is_a_model():
    x = np.random.default_rng(0).normal(2.0, 3.0, 300)
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(1), "x": m.Normal()})
    otp.fit(model, {"x": x})
    assert float(model.params()["x"]["scale"]) == pytest.approx(x.std(), rel=1e-6)
    assert (model.predict_proba({"x": x}, "z") == 1).all(axis=None)


def test_a_model_without_parameters_raises_the_error_of_scikit_learn_too():
    from sklearn.exceptions import NotFittedError as TheirError

    assert issubclass(NotFittedError, TheirError)
    with pytest.raises(TheirError, match="no parameters yet"):
        otp.Model(otp.Graph([("a", "b")]), {"a": m.Normal(), "b": m.Normal()}).params()
