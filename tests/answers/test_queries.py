"""Questions against closed forms of the normal distribution, brute force over categories, and pyAgrum."""

import os

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import otpdag as otp
from experiments.published_files import load_network
from otpdag import mechanisms as m
from otpdag.errors import ModelError


def linear_model() -> tuple[otp.Model, list[str], np.ndarray, np.ndarray]:
    """a -> b -> c, a -> c, c -> d with h hidden above b and d; its joint mean and covariance."""
    edges = [("a", "b"), ("h", "b"), ("a", "c"), ("b", "c"), ("c", "d"), ("h", "d")]
    weight = {"b": {"a": 0.5, "h": 1.0}, "c": {"a": -1.0, "b": 2.0}, "d": {"c": 0.7, "h": -0.4}}
    loc = {"a": 1.0, "h": 0.0, "b": -2.0, "c": 0.5, "d": 3.0}
    scale = {"a": 2.0, "h": 1.0, "b": 0.5, "c": 1.5, "d": 0.3}
    graph = otp.Graph(edges, hidden=["h"])
    model = otp.Model(graph, {node: m.Normal() for node in graph.nodes})
    params = {
        node: {"loc": loc[node], "scale": scale[node]}
        | ({"weight": [weight[node][p] for p in graph.parents(node)]} if node in weight else {})
        for node in graph.nodes
        if node != "h"
    }
    nodes = list(graph.order)
    slopes = np.array([[weight.get(child, {}).get(parent, 0.0) for parent in nodes] for child in nodes])
    total = np.linalg.inv(np.eye(len(nodes)) - slopes)
    mean = total @ [loc[n] for n in nodes]
    covariance = total @ np.diag([scale[n] ** 2 for n in nodes]) @ total.T
    return model.set_params(params), nodes, mean, covariance


def conditional(nodes, mean, covariance, target, given):
    at, seen = nodes.index(target), [nodes.index(n) for n in given]
    gain = np.linalg.solve(covariance[np.ix_(seen, seen)], covariance[seen, at])
    return (
        mean[at] + gain @ (np.array(list(given.values())) - mean[seen]),
        covariance[at, at] - gain @ covariance[seen, at],
    )


@pytest.mark.parametrize(("target", "given"), [("b", {"d": 2.0}), ("h", {"b": 1.0, "d": 0.0}), ("d", {"a": 4.0})])
def test_linear_normal_queries_are_conditionals_of_the_joint_normal(target, given):
    model, nodes, mean, covariance = linear_model()
    expected, variance = conditional(nodes, mean, covariance, target, given)
    found = model.query(target, given=given)
    assert found["mean"] == pytest.approx(expected, abs=1e-9)
    assert found["std"] == pytest.approx(np.sqrt(variance), abs=1e-9)


def test_a_linear_intervention_cuts_the_edges_into_its_node():
    model, *_ = linear_model()
    # c = 0.5 - a + 2 b with b set: mean of a is 1
    found = model.query("c", do={"b": 3.0})
    assert found["mean"] == pytest.approx(0.5 - 1.0 + 6.0, abs=1e-9)
    assert found["std"] == pytest.approx(np.hypot(2.0, 1.5), abs=1e-9)
    # h stays independent of b, so that d given do(b) keeps its noise
    assert model.query("h", do={"b": 3.0})["std"] == pytest.approx(1.0)
    assert model.query("h", given={"b": 3.0})["std"] < 0.9


def test_several_questions_at_once_are_answered_row_by_row():
    model, *_ = linear_model()
    many = model.query("d", given={"a": [0.0, 1.0, 2.0]})
    singles = [model.query("d", given={"a": value})["mean"] for value in (0.0, 1.0, 2.0)]
    assert many["mean"].tolist() == pytest.approx(singles)


def test_predictions_do_not_look_at_the_node_itself():
    model, nodes, mean, covariance = linear_model()
    table = model.sample(6, seed=0)[["a", "b", "c", "d"]]
    table.loc[2, "a"] = np.nan
    predicted = model.predict(table, "c")
    for row in range(6):
        given = {n: table.loc[row, n] for n in ("a", "b", "d") if not np.isnan(table.loc[row, n])}
        assert predicted[row] == pytest.approx(conditional(nodes, mean, covariance, "c", given)[0], abs=1e-9)
    pd.testing.assert_series_equal(predicted, model.predict(table.drop(columns="c"), "c"))


def mixed_model() -> otp.Model:
    graph = otp.Graph([("k", "x"), ("k", "y"), ("x", "n")], hidden=["k"])
    model = otp.Model(graph, {"k": m.Categorical(3), "x": m.Normal(), "y": m.Categorical(2), "n": m.Poisson()})
    return model.set_params(
        {
            "k": {"probs": [0.2, 0.5, 0.3]},
            "x": {"loc": [-2.0, 0.0, 3.0], "scale": [1.0, 0.5, 2.0]},
            "y": {"probs": [[0.9, 0.1], [0.4, 0.6], [0.2, 0.8]]},
            "n": {"log_rate": 0.3, "weight": 0.4},
        }
    )


def test_a_number_on_points_agrees_with_a_fine_sum():
    model = mixed_model()
    x = np.linspace(-15, 20, 200_001)
    weights = np.array([0.2, 0.5, 0.3]) * np.array([0.1, 0.6, 0.8])
    prior = sum(
        w * np.exp(-0.5 * ((x - mu) / s) ** 2) / s for w, mu, s in zip(weights, [-2, 0, 3], [1, 0.5, 2], strict=True)
    )
    rate = np.exp(0.3 + 0.4 * x)
    density = prior * rate**4 * np.exp(-rate)
    mean = (x * density).sum() / density.sum()
    spread = np.sqrt(((x - mean) ** 2 * density).sum() / density.sum())
    found = model.query("x", given={"y": 1, "n": 4})
    assert found["mean"] == pytest.approx(mean, abs=1e-6)
    assert found["std"] == pytest.approx(spread, abs=1e-5)


def test_hidden_nodes_may_be_given_and_joint_queries_follow_the_chain_rule():
    model = mixed_model()
    assert model.query("y", given={"k": 2}).tolist() == pytest.approx([0.2, 0.8])
    joint = model.query(["k", "y"])
    expected = np.array([0.2, 0.5, 0.3])[:, None] * np.array([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8]])
    assert joint.to_numpy() == pytest.approx(expected.ravel())
    assert joint.index.names == ["k", "y"]


@pytest.mark.parametrize("names", [["c", "a"], ["a", "b", "c"], ["b", "c"], ["c", "b", "a"]])
@pytest.mark.parametrize("do", [{}, {"a": 2}, {"b": 0}])
def test_joint_probabilities_are_products_of_tables_also_of_impossible_ones(names, do):
    rng = np.random.default_rng(3)
    graph = otp.Graph([("a", "b"), ("b", "c"), ("a", "c"), ("c", "d")])
    model = otp.Model(graph, {"a": m.Categorical(3), "b": m.Categorical(2), "c": m.Categorical(3), "d": m.Bernoulli()})
    a, b, c = np.array([0.5, 0.0, 0.5]), rng.dirichlet(np.ones(2), 3), rng.dirichlet(np.ones(3), (3, 2))
    d, c[0, 1] = rng.dirichlet(np.ones(2), 3), [0.0, 1.0, 0.0]
    tables = {node: {"probs": table} for node, table in zip("abd", (a, b, d), strict=True)}
    model.set_params({**tables, "c": {"probs": c if model.graph.parents("c") == ("a", "b") else c.swapaxes(0, 1)}})
    factor_a, factor_b = (
        (np.eye(3)[do["a"]] if "a" in do else a),
        (np.tile(np.eye(2)[do["b"]], (3, 1)) if "b" in do else b),
    )
    asked = [name for name in names if name not in do]
    whole = np.einsum("a,ab,abc,cd->abcd", factor_a, factor_b, c, d)[..., 1]
    other = tuple(place for place, name in enumerate("abc") if name not in asked)
    law = whole.sum(other) / whole.sum()
    order = [name for name in "abc" if name in asked]
    expected = law.transpose([order.index(name) for name in asked]).ravel()
    found = model.query(asked if len(asked) > 1 else asked[0], given={"d": 1}, do=do)
    np.testing.assert_allclose(found.to_numpy(), expected, atol=1e-12)
    if len(asked) > 1:
        assert list(found.index.names) == asked
        assert found.sum() == pytest.approx(1.0)


def test_joint_questions_of_numbers_of_many_states_and_of_many_rows_are_refused():
    model = mixed_model()
    with pytest.raises(ModelError, match="a query of several nodes needs categories; ask for numbers one by one"):
        model.query(["k", "x"])
    with pytest.raises(ModelError, match="at most 4096 joint states, of one question"):
        model.query(["k", "y"], given={"n": [1, 2]})
    names = [f"n{number}" for number in range(13)]
    many = otp.Model(otp.Graph([], nodes=names), {name: m.Bernoulli() for name in names})
    many.set_params({name: {"probs": [0.3, 0.7]} for name in names})
    assert many.query(names[:12]).iloc[-1] == pytest.approx(0.7**12)
    with pytest.raises(ModelError, match="at most 4096 joint states"):
        many.query(names)


def network_model(name: str, hidden: tuple[str, ...] = ()) -> tuple[otp.Model, object]:
    if not os.environ.get("OTPDAG_DATA"):
        pytest.skip("set OTPDAG_DATA")
    network = load_network(name)
    graph = otp.Graph(network.graph.edges, nodes=network.nodes, hidden=hidden)
    model = otp.Model(graph, {node: m.Categorical(len(network.states[node])) for node in network.nodes})
    return model.set_params({node: {"probs": table} for node, table in network.tables.items()}), network


def test_the_most_probable_explanation_is_the_best_of_all_states():
    model, network = network_model("asia")
    evidence = {"xray": 0, "dysp": 1}
    row = pd.DataFrame([evidence])
    found = model.most_probable(row, partial=True)
    free = [n for n in network.nodes if n not in evidence]
    joint = model.query(free, given=evidence)
    best = dict(zip(free, joint.idxmax(), strict=True))
    assert {n: int(found[n].iloc[0]) for n in free} == {n: int(v) for n, v in best.items()}
    evidence_log = float(model.log_likelihood(row, partial=True))
    assert found["log_density"].iloc[0] == pytest.approx(np.log(joint.max()) + evidence_log, abs=1e-9)


def test_mixed_explanations_integrate_numbers_out():
    model = mixed_model()
    fixed = model.graph
    linear = otp.Model(
        otp.Graph([e for e in fixed.edges if e[1] != "n"], hidden=["k"]),
        {node: model.mechanisms[node] for node in ("k", "x", "y")},
    ).set_params({node: value for node, value in model.params().items() if node != "n"})
    found = linear.most_probable(pd.DataFrame({"y": [1, 0]}), partial=True)
    assert found["k"].tolist() == [1, 1]  # 0.5 * 0.6 and 0.5 * 0.4 beat the rest
    assert found["x"].tolist() == pytest.approx([0.0, 0.0])
    with pytest.raises(ModelError, match="linear and normal; one is not"):
        model.most_probable(pd.DataFrame({"y": [1], "n": [2], "x": [np.nan]}))


def test_questions_that_make_no_sense_are_refused():
    model = mixed_model()
    with pytest.raises(ModelError, match="there is no node 'q'"):
        model.query("q")
    with pytest.raises(ModelError, match="'y' is given"):
        model.query("y", given={"y": 1})
    with pytest.raises(ModelError, match="'y' is set by do"):
        model.query("x", given={"y": 1}, do={"y": 0})
    with pytest.raises(ModelError, match="must be a category; 'x' is not"):
        model.predict_proba(pd.DataFrame({"y": [1]}), "x")


def test_alarm_agrees_with_pyagrum():
    pyagrum = pytest.importorskip("pyagrum", exc_type=ImportError)
    from benchmarks.answers import agrum_network

    model, network = network_model("alarm")
    net = agrum_network(network)
    engine = pyagrum.LazyPropagation(net)
    evidence = {"HRBP": 1, "SAO2": 0, "BP": 2}
    engine.setEvidence(evidence)
    engine.makeInference()
    for node in ("LVFAILURE", "INTUBATION", "CATECHOL", "PVSAT"):
        assert model.query(node, given=evidence).to_numpy() == pytest.approx(
            engine.posterior(node).toarray(), abs=1e-10
        )


def test_an_answer_says_which_effects_the_graph_does_not_identify():
    bow = otp.Graph([("u", "x"), ("u", "y"), ("x", "y"), ("z", "x")], hidden=["u"])
    model = otp.Model(bow, {node: m.Bernoulli() for node in bow.nodes})
    half = {node: {"probs": np.full((2,) * (1 + len(bow.parents(node))), 0.5)} for node in bow.nodes}
    model.set_params(half)
    assert "not identified by the graph" in model.query("y", do={"x": 1}).attrs["not identified"]
    assert model.query("y", do={"z": 1}).attrs["not identified"] == ""
    assert model.query("y", given={"x": 1}).attrs["not identified"] == ""
    after = model.counterfactual(pd.DataFrame({"z": [0], "x": [0], "y": [1]}), {"x": 1})
    assert "u is an unseen common cause" in after.attrs["not identified"]


def sales_after(loc_scale: float) -> otp.Model:
    """Sales follow visits, offers and the weather's hidden mood log-normally, with this much noise."""
    graph = otp.Graph([("mood", "sales"), ("visits", "sales"), ("offers", "sales")], hidden=["mood"])
    mechanisms = {"mood": m.Normal(), "visits": m.Poisson(), "offers": m.Poisson(), "sales": m.LogNormal()}
    params = {
        "mood": {"loc": 0.0, "scale": 1.0},
        "visits": {"log_rate": 0.0},
        "offers": {"log_rate": np.log(2.0)},
        "sales": {"loc": 0.0, "weight": [0.55, 0.18, 0.03], "scale": loc_scale},
    }
    return otp.Model(graph, mechanisms).set_params(params)


def test_a_mean_between_whose_points_ridges_lie_is_drawn_and_says_so():
    exact = np.exp((0.55**2 + 0.018**2) / 2 + (np.exp(0.18) - 1) + 2 * (np.exp(0.03) - 1))
    with pytest.warns(otp.ApproximationWarning, match="'sales': sums on points do not settle, and 1 answers have"):
        told = sales_after(0.018).query("sales")
    assert abs(told["mean"] - exact) < 0.01 * told["std"]  # 0.1 off by sums on points


def test_a_step_in_two_unknown_numbers_is_drawn_and_says_so():
    graph = otp.Graph([("x", "y"), ("u", "y")])
    model = otp.Model(graph, {"x": m.LogNormal(), "u": m.Exponential(), "y": m.Bernoulli()})
    steep = {"logits": [0.0, 0.0], "weight": [[0.0, 1e5], [0.0, -1e5]]}  # y is one where x is above u
    model.set_params({"x": {"loc": 0.0, "scale": 1.0}, "u": {"log_mean": 0.0}, "y": steep})
    with pytest.warns(otp.ApproximationWarning, match="do not settle"):
        assert abs(model.query("y")[1] - 0.61824) < 0.005  # the integral of (1 - exp(-x)) under the log-normal
    with pytest.warns(otp.ApproximationWarning, match="do not settle"):
        effect = model.effect("x", "y", values=[1.0, 2.0]).difference
    assert abs(effect.iloc[-1] - (np.exp(-1) - np.exp(-2))) < 0.01


def test_draws_of_a_step_count_by_the_likelihood_of_what_is_shown():
    graph = otp.Graph([("x", "y"), ("u", "y"), ("x", "w")])
    model = otp.Model(graph, {"x": m.LogNormal(), "u": m.Exponential(), "y": m.Bernoulli(), "w": m.Normal()})
    steep = {"logits": [0.0, 0.0], "weight": [[0.0, 1e5], [0.0, -1e5]]}  # y is one where x is above u
    shown = {"loc": 0.5, "weight": [1.0], "scale": 0.5}
    model.set_params({"x": {"loc": 0.0, "scale": 1.0}, "u": {"log_mean": 0.0}, "y": steep, "w": shown})
    x = np.linspace(1e-4, 30.0, 300_001)
    weight = stats.lognorm.pdf(x, 1.0) * stats.norm.pdf(2.5, 0.5 + x, 0.5)
    exact = np.sum(weight * (1 - np.exp(-x))) / weight.sum()
    with pytest.warns(otp.ApproximationWarning, match="do not settle"):
        assert abs(model.query("y", {"w": 2.5})[1] - exact) < 0.005


@pytest.mark.parametrize(("scale", "settled"), [(0.3, True), (0.005, False)])
def test_a_fit_says_whether_its_sums_settle(scale, settled):
    truth = sales_after(scale)
    table = truth.sample(40, seed=1).drop(columns="mood")
    table["visits"] = table["visits"].where(np.arange(40) % 3 > 0)
    sales = m.LogNormal(loc=0.0, weight=[0.55, 0.18, 0.03], scale=scale)
    known = {"mood": m.Normal(), "visits": m.Poisson(), "offers": m.Poisson(), "sales": sales}
    result = otp.fit(otp.Model(truth.graph, known), table, seed=0)
    assert any("sums over unknown numbers do not settle" in note for note in result.notes) is not settled
