"""Discrete models go to other libraries and come back, and answer there as they do here."""

from __future__ import annotations

import numpy as np
import pytest

from otpdag import Graph, Model, ModelError
from otpdag import mechanisms as m
from otpdag.interop import from_bif, from_pgmpy, from_pyagrum, to_bif, to_pgmpy, to_pyagrum


@pytest.fixture
def model() -> Model:
    """Parents of different sizes, not in the order of their names, so that an axis in the wrong place shows."""
    graph = Graph([("z", "y"), ("a", "y"), ("z", "b")], nodes=["a", "z", "y", "b"])
    sizes = {"a": 3, "z": 2, "y": 4, "b": 2}
    rng = np.random.default_rng(5)
    shapes = {"a": (3,), "z": (2,), "y": (2, 3, 4), "b": (2, 2)}
    params = {}
    for node, shape in shapes.items():
        draws = rng.gamma(1.0, size=shape)
        params[node] = {"probs": draws / draws.sum(-1, keepdims=True)}
    model = Model(graph, {node: m.Categorical(size) for node, size in sizes.items()})
    labels = {"a": ("low", "mid", "high"), "z": ("no", "yes"), "y": tuple("wxyz"), "b": ("off", "on")}
    return model.set_params(params, labels=labels)


def assert_same(one: Model, other: Model) -> None:
    assert set(one.graph.edges) == set(other.graph.edges)
    joint_one, joint_other = (_joint(each) for each in (one, other))
    np.testing.assert_allclose(joint_one, joint_other, atol=1e-12)
    assert all(one.labels(node) == other.labels(node) for node in one.graph.nodes)


def _joint(model: Model) -> np.ndarray:
    from otpdag.interop.discrete_networks import network_of

    return network_of(model).joint(["a", "z", "y", "b"])


def test_bif_there_and_back(model, tmp_path):
    to_bif(model, tmp_path / "model.bif")
    assert_same(from_bif(tmp_path / "model.bif"), model)


def test_hidden_nodes_of_a_file(model, tmp_path):
    to_bif(model, tmp_path / "model.bif")
    assert from_bif(tmp_path / "model.bif", hidden=["z"]).graph.hidden == ("z",)


def test_pgmpy_reads_our_file(model, tmp_path):
    readwrite = pytest.importorskip("pgmpy.readwrite")
    to_bif(model, tmp_path / "model.bif")
    assert_same(from_pgmpy(readwrite.BIFReader(str(tmp_path / "model.bif")).get_model()), model)


def test_pgmpy_there_and_back(model):
    inference = pytest.importorskip("pgmpy.inference")
    network = to_pgmpy(model)
    assert network.check_model()
    answer = inference.VariableElimination(network).query(["y"], evidence={"a": "high", "b": "on"}, show_progress=False)
    joint = _joint(model)[2, :, :, 1].sum(0)
    np.testing.assert_allclose(answer.values, joint / joint.sum(), atol=1e-12)
    assert_same(from_pgmpy(network), model)


def test_pyagrum_there_and_back(model):
    pyagrum = pytest.importorskip("pyagrum")
    network = to_pyagrum(model)
    asked = pyagrum.LazyPropagation(network)
    asked.setEvidence({"a": "high", "b": "on"})
    joint = _joint(model)[2, :, :, 1].sum(0)
    np.testing.assert_allclose(asked.posterior("y").toarray(), joint / joint.sum(), atol=1e-9)
    assert_same(from_pyagrum(network), model)


def test_a_number_cannot_be_a_table(tmp_path):
    model = Model(Graph([("a", "x")]), {"a": m.Categorical(2), "x": m.Normal()})
    model.set_params({"a": {"probs": [0.5, 0.5]}, "x": {"loc": [0.0, 1.0], "scale": [1.0, 1.0]}})
    with pytest.raises(ModelError, match="node 'x' is Normal"):
        to_bif(model, tmp_path / "model.bif")
    assert not (tmp_path / "model.bif").exists()


def test_names_that_the_format_cannot_hold(tmp_path):
    model = Model(Graph(nodes=["a b"], edges=[]), {"a b": m.Categorical(2)}).set_params({"a b": {"probs": [0.5, 0.5]}})
    with pytest.raises(ModelError, match="'a b'"):
        to_bif(model, tmp_path / "model.bif")


def test_labels_are_checked():
    model = Model(Graph(nodes=["a"], edges=[]), {"a": m.Categorical(2)})
    with pytest.raises(Exception, match="labels of node 'a'"):
        model.set_params({"a": {"probs": [0.5, 0.5]}}, labels={"a": ("only one",)})
