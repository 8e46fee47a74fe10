"""Structures: binding, keys, ties, and refusals before any work."""

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.errors import DataError, ModelError
from otpdag.spaces import Discrete
from otpdag.structure import Structure, pack, unpack

GRAPH = otp.Graph([("k", "x"), ("z", "x"), ("x", "n")], hidden=["z"])


def mechanisms(**changes):
    return {"k": m.Categorical(3), "z": m.Normal(), "x": m.Normal(2), "n": m.Poisson()} | changes


def test_every_mechanism_knows_its_family():
    structure = Structure.bind(GRAPH, mechanisms())
    family = structure.mechanisms["x"].family
    assert (family.node, [name for name, _ in family.parents], family.hidden) == ("x", ["k", "z"], False)
    assert structure.mechanisms["z"].family.hidden
    assert list(structure.mechanisms) == list(GRAPH.nodes)


def test_binding_leaves_the_users_mechanisms_alone():
    plain = m.Normal()
    Structure.bind(GRAPH, mechanisms(z=plain))
    with pytest.raises(ModelError, match="belongs to no model yet"):
        _ = plain.family


def test_keys_name_what_is_learned():
    structure = Structure.bind(GRAPH, mechanisms(n=m.Poisson(weight=otp.tie("slope"))))
    assert structure.keys["z"] == {}  # a hidden root's location and scale are not identified
    assert structure.keys["x"] == {"loc": "x.loc", "weight": "x.weight", "scale": "x.scale"}
    assert structure.keys["n"] == {"log_rate": "n.log_rate", "weight": "tie.slope"}
    shapes = {key: parameter.shape for key, parameter in structure.parameters().items()}
    assert shapes["x.loc"] == (3, 2)
    assert shapes["x.weight"] == (1, 2)
    assert shapes["tie.slope"] == (2, 1)


def test_natural_and_raw_parameters_invert_each_other():
    structure = Structure.bind(GRAPH, mechanisms())
    generator = torch.Generator().manual_seed(0)
    theta = {
        key: torch.randn(4, *parameter.shape, generator=generator, dtype=torch.float64)
        for key, parameter in structure.parameters().items()
    }
    naturals = structure.naturals(theta)
    assert naturals["k"]["probs"].shape == (4, 1, 3)
    torch.testing.assert_close(naturals["k"]["probs"].sum(-1), torch.ones(4, 1, dtype=torch.float64))
    assert (naturals["x"]["scale"] > 0).all()
    again = structure.naturals(structure.raw(naturals))
    for node in GRAPH.nodes:
        for name, value in naturals[node].items():
            torch.testing.assert_close(again[node][name], value)


def test_packing_and_unpacking_invert_each_other():
    theta = {"a": torch.arange(6.0).reshape(2, 3, 1), "b": torch.arange(2.0).reshape(2, 1) + 10}
    flat = pack(theta)
    assert flat.shape == (2, 4)
    again = unpack(flat, {"a": (3, 1), "b": (1,)})
    for key, value in theta.items():
        assert torch.equal(again[key], value)
    assert pack({}).shape == (1, 0)


def test_settings_overwrite_data_driven_starts():
    structure = Structure.bind(GRAPH, mechanisms(x=m.Normal(2, scale=0.5, weight=otp.start([[1.0, 2.0]]))))
    found = structure.with_settings(
        "x", {"scale": torch.ones(3, 2), "weight": torch.zeros(1, 2), "loc": torch.ones(3, 2)}
    )
    assert (found["scale"] == 0.5).all()
    assert found["weight"].tolist() == [[1.0, 2.0]]
    assert (found["loc"] == 1).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": None}, "expected a mechanism such as m.Normal.*got None"),
        ({"x": m.Normal}, "node 'x': expected a mechanism such as m.Normal"),
        ({"y": m.Normal()}, "mechanisms name nodes that the graph lacks: 'y'; it has 'k', 'x', 'z', 'n'"),
        (
            {"x": m.Given()},
            "node 'x' is Given, so it must be an observed node without parents; it has parents 'k', 'z'",
        ),
        ({"z": m.Given()}, "node 'z' is Given, so it must be an observed node without parents; it is hidden"),
        ({"x": m.Normal(2, scale=-1.0)}, "'scale' of node 'x' must be a number above zero; got -1"),
        ({"x": m.Normal(2, loc=np.zeros(5))}, r"'loc' of node 'x' must have a shape that broadcasts to \(3, 2\)"),
        (
            {"k": m.Categorical(3, probs=[0.5, 0.6, 0.1])},
            "'probs' of node 'k' must be non-negative numbers that sum to one",
        ),
        (
            {"k": m.Categorical(3, logits=[0.0, 0.0, 0.0])},
            "node 'k': 'logits' cannot be given; with these",
        ),
        (
            {"x": m.Normal(2, scale=otp.tie("s")), "z": m.Normal(scale=otp.tie("s"))},
            r"tie 's': node 'x' gives it shape \(3, 2\), node 'z' shape \(1, 1\)",
        ),
        (
            {"x": m.Normal(2, loc=otp.tie("s"), scale=otp.tie("s"))},
            "tied parameters must have the same shape and support",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        Structure.bind(GRAPH, mechanisms(**changes))


def test_a_node_without_a_mechanism_is_refused():
    some = mechanisms()
    del some["n"], some["z"]
    with pytest.raises(ModelError, match="every node needs a mechanism; none was given for 'z', 'n'"):
        Structure.bind(GRAPH, some)


def test_missing_covariates_are_found():
    structure = Structure.bind(otp.Graph([("g", "x")]), {"g": m.Given(Discrete(2)), "x": m.Normal()})
    assert structure.given == ("g",)
    structure.check_given({"g": torch.ones(1, 3, 1, dtype=torch.bool)})
    with pytest.raises(DataError, match="node 'g' is Given: its cells must not be missing; one is, in row 1"):
        structure.check_given({"g": torch.tensor([[[True], [False], [True]]])})
