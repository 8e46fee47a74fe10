"""Canonical labels and signs: an order that two fits share, and the same model."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward import AmortizedMap, RowCode
from otpdag.model.base import in_one_order
from otpdag.spaces import Discrete
from tests.mechanisms.own import Chances, LabelledChances, Skewed

RNG = np.random.default_rng(17)


def put_in_order(model):
    """The model again, in canonical order."""
    naturals = in_one_order(model.structure, model.fitted.naturals)
    other = otp.Model(model.graph, model.mechanisms)
    other.structure, other._state = model.structure, replace(model._state, naturals=naturals)
    return other


def class_model():
    """A hidden class above all kinds of children, one with a second discrete parent."""
    graph = otp.Graph(
        [("z", "x"), ("z", "k"), ("g", "k"), ("z", "n"), ("x", "n")], nodes=["z", "x", "g", "k", "n"], hidden=["z"]
    )
    model = otp.Model(
        graph, {"z": m.Categorical(3), "x": m.Normal(), "g": m.Categorical(2), "k": m.Categorical(2), "n": m.Poisson()}
    )
    return model.set_params(
        {
            "z": {"probs": [0.5, 0.3, 0.2]},
            "x": {"loc": [1.0, -2.0, 0.0], "scale": [1.0, 0.5, 2.0]},
            "g": {"probs": [0.4, 0.6]},
            "k": {"probs": RNG.dirichlet([1, 1], (3, 2))},
            "n": {"log_rate": [0.0, 1.0, 2.0], "weight": 0.1},
        }
    )


def test_labels_are_ordered_by_the_first_childs_mean_and_the_model_is_the_same():
    model = class_model()
    ordered = put_in_order(model)
    params, before = ordered.params(), model.params()
    order = [1, 2, 0]
    np.testing.assert_allclose(params["x"]["loc"], [-2.0, 0.0, 1.0])
    np.testing.assert_allclose(params["x"]["scale"], [0.5, 2.0, 1.0])
    np.testing.assert_allclose(params["z"]["probs"], [0.3, 0.2, 0.5])
    np.testing.assert_allclose(params["n"]["log_rate"], [1.0, 2.0, 0.0])
    np.testing.assert_allclose(params["k"]["probs"], before["k"]["probs"][order])
    assert params["n"]["weight"] == before["n"]["weight"]
    table = model.sample(100, seed=0).drop(columns="z")
    assert ordered.score(table, kind="likelihood") == pytest.approx(model.score(table, kind="likelihood"), rel=1e-12)
    found = ordered.predict_proba(table, "z").to_numpy()
    np.testing.assert_allclose(found, model.predict_proba(table, "z").to_numpy()[:, order], atol=1e-12)


def test_the_second_of_two_discrete_parents_is_reordered_along_its_own_axis():
    graph = otp.Graph([("g", "x"), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"g": m.Categorical(2), "z": m.Categorical(2), "x": m.Normal()})
    loc = np.array([[3.0, 1.0], [4.0, 0.0]])
    model.set_params({"g": {"probs": [0.5, 0.5]}, "z": {"probs": [0.9, 0.1]}, "x": {"loc": loc, "scale": loc + 1}})
    params = put_in_order(model).params()
    np.testing.assert_allclose(params["x"]["loc"], loc[:, ::-1])
    np.testing.assert_allclose(params["x"]["scale"], loc[:, ::-1] + 1)
    np.testing.assert_allclose(params["z"]["probs"], [0.1, 0.9])


def test_labels_below_a_given_category_have_an_order_too():
    graph = otp.Graph([("g", "x"), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"g": m.Given(Discrete(2)), "z": m.Categorical(2), "x": m.Normal()})
    model.set_params({"z": {"probs": [0.9, 0.1]}, "x": {"loc": [[3.0, 1.0], [4.0, 0.0]], "scale": np.ones((2, 2))}})
    np.testing.assert_allclose(put_in_order(model).params()["z"]["probs"], [0.1, 0.9])


def test_two_hidden_categories_in_a_chain():
    graph = otp.Graph([("u", "v"), ("u", "x"), ("v", "y")], hidden=["u", "v"])
    model = otp.Model(graph, {"u": m.Categorical(2), "v": m.Categorical(3), "x": m.Normal(), "y": m.Normal()})
    model.set_params(
        {
            "u": {"probs": [0.3, 0.7]},
            "v": {"probs": [[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]]},
            "x": {"loc": [2.0, -2.0], "scale": [1.0, 1.0]},
            "y": {"loc": [0.0, -3.0, 3.0], "scale": [1.0, 2.0, 3.0]},
        }
    )
    ordered = put_in_order(model)
    params = ordered.params()
    np.testing.assert_allclose(params["x"]["loc"], [-2.0, 2.0])
    np.testing.assert_allclose(params["y"]["loc"], [-3.0, 0.0, 3.0])
    np.testing.assert_allclose(params["v"]["probs"], [[0.3, 0.6, 0.1], [0.3, 0.2, 0.5]])
    table = model.sample(80, seed=0)[["x", "y"]]
    assert ordered.score(table, kind="likelihood") == pytest.approx(model.score(table, kind="likelihood"), rel=1e-12)


def test_fixed_and_tied_parameters_keep_the_users_labels():
    graph = otp.Graph([("z", "x")], hidden=["z"])
    fixed = otp.Model(graph, {"z": m.Categorical(2, probs=[0.3, 0.7]), "x": m.Normal()})
    fixed.set_params({"x": {"loc": [5.0, 1.0], "scale": [1.0, 1.0]}})
    np.testing.assert_allclose(put_in_order(fixed).params()["x"]["loc"], [5.0, 1.0])
    symmetric = otp.Model(graph, {"z": m.Categorical(2, probs=[0.5, 0.5]), "x": m.Normal()})
    symmetric.set_params({"x": {"loc": [5.0, 1.0], "scale": [1.0, 2.0]}})
    np.testing.assert_allclose(put_in_order(symmetric).params()["x"]["loc"], [1.0, 5.0])
    np.testing.assert_allclose(put_in_order(symmetric).params()["x"]["scale"], [2.0, 1.0])


# -- signs ------------------------------------------------------------------------------------------------------------


def factor_model(first=None, hidden=None):
    graph = otp.Graph([("z", "a"), ("z", "b"), ("w", "z")], nodes=["z", "a", "b", "w"], hidden=["z"])
    mechanisms = {"w": m.Normal(), "z": hidden or m.Normal(), "a": first or m.Normal(), "b": m.Poisson()}
    return otp.Model(graph, mechanisms)


def test_the_first_childs_slope_points_upward_and_the_model_is_the_same():
    model = factor_model()
    model.set_params(
        {
            "w": {"loc": 0.0, "scale": 1.0},
            "z": {"weight": 0.7},
            "a": {"loc": 1.0, "weight": -2.0, "scale": 1.0},
            "b": {"log_rate": 0.0, "weight": 0.5},
        }
    )
    ordered = put_in_order(model)
    params = ordered.params()
    assert params["a"]["weight"] == 2.0
    assert params["b"]["weight"] == -0.5
    assert params["z"]["weight"] == -0.7
    table = model.sample(100, seed=0).drop(columns="z")
    assert ordered.score(table, kind="likelihood") == pytest.approx(model.score(table, kind="likelihood"), rel=1e-9)


def test_a_logits_sign_is_that_of_its_differences():
    """Adding a constant to all slopes of a softmax changes nothing, and must not change the sign either."""
    found = []
    for shift in (0.0, 5.0, -5.0):
        model = factor_model(first=m.Categorical(2))
        model.set_params(
            {
                "w": {"loc": 0.0, "scale": 1.0},
                "z": {"weight": 0.7},
                "a": {"logits": [0.0, 0.0], "weight": [[shift, shift - 1.0]]},
                "b": {"log_rate": 0.0, "weight": 0.5},
            }
        )
        found.append(put_in_order(model).params()["b"]["weight"].item())
    assert found == [-0.5] * 3


def test_a_positive_node_has_no_sign_to_turn():
    model = factor_model(hidden=m.LogNormal())
    model.set_params(
        {
            "w": {"loc": 0.0, "scale": 1.0},
            "z": {"weight": 0.7, "scale": 0.5},
            "a": {"loc": 1.0, "weight": -2.0, "scale": 1.0},
            "b": {"log_rate": 0.0, "weight": 0.5},
        }
    )
    assert put_in_order(model).params()["a"]["weight"] == -2.0


def test_a_hidden_node_with_a_network_is_left_alone():
    model = factor_model(hidden=m.Normal(network=(3,)))
    generator = np.random.default_rng(0)
    shapes = {name: parameter.shape for name, parameter in model.mechanisms["z"].declared().items()}
    model.set_params(
        {
            "w": {"loc": 0.0, "scale": 1.0},
            "z": {name: generator.normal(size=shape) for name, shape in shapes.items() if name.startswith("network.")},
            "a": {"loc": 1.0, "weight": -2.0, "scale": 1.0},
            "b": {"log_rate": 0.0, "weight": 0.5},
        }
    )
    table = model.sample(60, seed=0).drop(columns="z")
    assert put_in_order(model).score(table, kind="likelihood") == pytest.approx(
        model.score(table, kind="likelihood"), rel=1e-9
    )


def test_a_fixed_slope_keeps_the_sign():
    model = factor_model(first=m.Normal(weight=-1.0))
    model.set_params(
        {
            "w": {"loc": 0.0, "scale": 1.0},
            "z": {"weight": 0.7},
            "a": {"loc": 1.0, "scale": 1.0},
            "b": {"log_rate": 0.0, "weight": 0.5},
        }
    )
    assert put_in_order(model).params()["b"]["weight"] == 0.5


# -- fits -------------------------------------------------------------------------------------------------------------


def test_fits_with_different_seeds_agree_in_labels_and_signs():
    truth = otp.Model(
        otp.Graph([("z", "x"), ("z", "y"), ("u", "y"), ("u", "w"), ("u", "q")], hidden=["z", "u"]),
        {"z": m.Categorical(2), "x": m.Normal(), "y": m.Normal(), "u": m.Normal(), "w": m.Normal(), "q": m.Normal()},
    )
    truth.set_params(
        {
            "z": {"probs": [0.4, 0.6]},
            "x": {"loc": [3.0, -3.0], "scale": [1.0, 1.0]},
            "y": {"loc": [0.0, 2.0], "weight": -1.0, "scale": [0.5, 0.5]},
            "w": {"loc": 0.0, "weight": 1.0, "scale": 0.5},
            "q": {"loc": 0.0, "weight": 1.0, "scale": 0.5},
        }
    )
    table = truth.sample(250, seed=0)[["x", "y", "w", "q"]]
    found = []
    for seed in (0, 5):
        model = otp.Model(truth.graph, truth.mechanisms)
        otp.fit(model, table, seed=seed, restarts=2)
        found.append(model.params())
    for node in ("z", "x", "y", "w", "q"):
        for name, value in found[0][node].items():
            np.testing.assert_allclose(value, found[1][node][name], atol=2e-3)
    assert found[0]["x"]["loc"][0] < found[0]["x"]["loc"][1]
    assert found[0]["y"]["weight"] > 0


def test_labels_follow_the_first_child_of_a_frame(tmp_path):
    """Saved and loaded again, the order stays."""
    model = class_model()
    path = tmp_path / "model.otp"
    put_in_order(model).save(path)
    assert isinstance(otp.load(path).params(), dict)
    assert pd.Series(otp.load(path).params()["x"]["loc"]).is_monotonic_increasing


# -- mechanisms of a user ---------------------------------------------------------------------------------------------


def mixture_above(mechanism):
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": mechanism, "x": m.Normal()})
    return model.set_params({"z": {"chances": [0.9, 0.1]}, "x": {"loc": [4.0, -4.0], "scale": [1.0, 0.5]}})


def test_a_hidden_category_that_says_nothing_about_labels_keeps_them():
    """Once its children were reordered and its own parameter, unknown by name, was not: another model."""
    model = mixture_above(Chances())
    table = model.sample(80, seed=0)[["x"]]
    ordered = put_in_order(model)
    np.testing.assert_allclose(ordered.params()["x"]["loc"], [4.0, -4.0])
    assert ordered.score(table, kind="likelihood") == pytest.approx(model.score(table, kind="likelihood"), rel=1e-12)


def test_a_hidden_category_that_names_its_axes_is_relabelled():
    model = mixture_above(LabelledChances())
    table = model.sample(80, seed=0)[["x"]]
    ordered = put_in_order(model)
    np.testing.assert_allclose(ordered.params()["x"]["loc"], [-4.0, 4.0])
    np.testing.assert_allclose(ordered.params()["z"]["chances"], [0.1, 0.9])
    assert ordered.score(table, kind="likelihood") == pytest.approx(model.score(table, kind="likelihood"), rel=1e-12)


@pytest.mark.parametrize("mechanism", [Chances(3), LabelledChances(3)], ids=lambda one: type(one).__name__)
def test_the_score_after_a_fit_is_the_loss_of_the_fit(mechanism):
    table = pd.DataFrame(
        {"x": np.concatenate([RNG.normal(5, 1, 120), RNG.normal(-5, 0.5, 30), RNG.normal(0, 0.5, 50)])}
    )
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": mechanism, "x": m.Normal()})
    for seed in range(2):
        result = otp.fit(model, table, method="likelihood", seed=seed, restarts=2)
        assert -model.score(table, kind="likelihood") == pytest.approx(result.loss, abs=1e-6)


def test_a_transition_that_treats_all_labels_alike_follows_them():
    graph = otp.Graph([("z", "x"), otp.Lag("z", "z")], hidden=["z"])
    model = otp.Model(graph, {"z": m.StayOrMove(3), "x": m.Poisson()})
    model.set_params(
        {"z[0]": {"probs": [0.5, 0.3, 0.2]}, "z": {"stay": 0.8}, "x": {"log_rate": np.log([30.0, 3.0, 10.0])}}
    )
    ordered = put_in_order(model)
    np.testing.assert_allclose(ordered.params()["z[0]"]["probs"], [0.3, 0.2, 0.5])
    np.testing.assert_allclose(np.exp(ordered.params()["x"]["log_rate"]), [3.0, 10.0, 30.0])
    assert ordered.params()["z"]["stay"] == 0.8


def test_a_stayer_below_another_category_keeps_the_labels_of_both():
    """Only node and parent together can change their labels."""
    graph = otp.Graph([("a", "z"), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"a": m.Categorical(2), "z": m.StayOrMove(2), "x": m.Normal()})
    model.set_params({"a": {"probs": [0.3, 0.7]}, "z": {"stay": 0.8}, "x": {"loc": [4.0, -4.0], "scale": [1.0, 1.0]}})
    np.testing.assert_allclose(put_in_order(model).params()["x"]["loc"], [4.0, -4.0])


def turned_factor(hidden, weight, **own):
    model = otp.Model(
        otp.Graph([("z", "a"), ("z", "b")], hidden=["z"]), {"z": hidden, "a": m.Normal(), "b": m.Normal()}
    )
    params = {"loc": 1.0, "scale": 0.5}
    return model.set_params({"z": own, "a": {"weight": weight, **params}, "b": {"weight": weight[::-1], **params}})


def test_a_hidden_normal_vector_points_upward_with_its_covariance():
    covariance = np.array([[1.0, 0.6], [0.6, 1.0]])
    hidden = m.MultivariateNormal(2, covariance=otp.start(covariance))
    model = turned_factor(hidden, [-1.0, 2.0], covariance=covariance)
    params = put_in_order(model).params()
    np.testing.assert_allclose(params["a"]["weight"], [1.0, 2.0])
    np.testing.assert_allclose(params["b"]["weight"], [-2.0, -1.0])
    np.testing.assert_allclose(params["z"]["covariance"], [[1.0, -0.6], [-0.6, 1.0]])


def test_a_hidden_number_with_skewed_noise_keeps_its_sign():
    model = turned_factor(Skewed(), [-1.0])
    np.testing.assert_allclose(put_in_order(model).params()["a"]["weight"], [-1.0])


@pytest.mark.parametrize("told", [True, False])
def test_labels_stay_where_only_a_learned_map_draws_them(told):
    other, params = m.Decoder(torch.nn.Linear(2, 1)), {"module.weight": [[1.0, 2.0]], "module.bias": [0.0]}
    if told:
        other, params = m.Normal(), {"loc": [1.0, 2.0], "scale": [1.0, 1.0]}
    model = otp.Model(
        otp.Graph([("z", "x"), ("z", "y")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal(), "y": other}
    )
    model.set_params({"z": {"probs": [0.3, 0.7]}, "x": {"loc": [4.0, -4.0], "scale": [1.0, 1.0]}, "y": params})
    backward = AmortizedMap(model.structure, RowCode((), {}, {}, frozenset()), ("z",))
    model.adopt(model.structure, model.structure.raw(model.fitted.naturals), maps=(backward,))
    np.testing.assert_allclose(model.params()["x"]["loc"], [-4.0, 4.0] if told else [4.0, -4.0])
