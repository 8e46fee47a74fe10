"""What mechanisms with a predictor share, one row at a time."""

import numpy as np
import pytest
import torch

from otpdag import mechanisms as m
from otpdag.errors import ModelError
from otpdag.mechanisms.parameters import Axis
from otpdag.spaces import Discrete, Real
from tests.mechanisms.plain import FAMILY, as_parents, pooled, table

BOTH = m.Family("x", (("a", Discrete(3)), ("b", Discrete(2))))


def test_tables_are_read_at_the_configuration_of_each_row():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 3, 8), rng.integers(0, 2, 8)
    parents = {"a": torch.eye(3).double()[torch.as_tensor(a)], "b": torch.eye(2).double()[torch.as_tensor(b)]}
    node, own = m.Normal(2).setup(BOTH), torch.as_tensor(rng.normal(size=(2, 6, 4)))
    found = node.row_of(own, {name: one[None] for name, one in parents.items()}, 3)
    np.testing.assert_allclose(found, own.numpy()[:, a * 2 + b])
    shared = node.row_of(own[:, :1], {name: one[None] for name, one in parents.items()}, 3)
    torch.testing.assert_close(shared, own[:, :1])
    values = rng.normal(size=(8, 2))
    sums = [values[a * 2 + b == row].sum(0) for row in range(6)]
    np.testing.assert_allclose(node.summed(torch.as_tensor(values), 6, parents), sums)
    np.testing.assert_allclose(node.summed(torch.as_tensor(values), 1, parents), values.sum(0, keepdims=True))


def test_means_by_row_are_pulled_to_the_mean_of_all():
    rng = np.random.default_rng(1)
    a, r, weight = table(rng)
    values, node = rng.normal(size=(60, 2)), m.Normal(2).setup(FAMILY)
    tensors = torch.as_tensor(values), as_parents(a, r), torch.as_tensor(weight)
    np.testing.assert_allclose(node.pooled(tensors[0], 3, *tensors[1:]), pooled(values, a, weight))
    found = node.pooled(tensors[0], 3, *tensors[1:], prior=5.0)
    np.testing.assert_allclose(found, pooled(values, a, weight, prior=5.0))
    one = node.pooled(tensors[0], 1, *tensors[1:])
    np.testing.assert_allclose(one[0], np.average(values, axis=0, weights=weight))


def test_units_of_the_data_are_kept_and_handed_on():
    rng = np.random.default_rng(2)
    a, r, weight = table(rng)
    value = torch.as_tensor(50.0 + 9.0 * rng.normal(size=(60, 2)))
    plain = m.Normal(2).setup(FAMILY)
    assert plain.buffers() == {}
    assert plain.unit is None
    like = torch.zeros(1).double()
    assert [one.tolist() for one in plain.centre_and_unit(like)] == [[0.0, 0.0], [1.0, 1.0]]
    scaled = plain.scaled_to(value, as_parents(a, r), torch.as_tensor(weight))
    share = weight / weight.sum()
    centre = share @ value.numpy()
    spread = np.sqrt(share @ (value.numpy() - centre) ** 2)
    np.testing.assert_allclose(scaled.unit, spread)
    np.testing.assert_allclose(scaled.centre_and_unit(like)[0], centre)
    np.testing.assert_allclose(scaled.centre_and_unit(like)[1], spread)
    assert set(scaled.buffers()) == {"in_shift", "in_scale", "out_shift", "out_scale", "smallest"}
    again = plain.with_buffers(scaled.buffers())
    torch.testing.assert_close(again.buffers(), scaled.buffers())
    assert plain.unit is None
    assert again.with_buffers({}).unit is None
    params = {"loc": torch.ones(1, 3, 2).double(), "weight": torch.full((1, 1, 2), 2.0).double()}
    restored = scaled.restore_units(dict(params))
    np.testing.assert_allclose(restored["loc"], np.ones((1, 3, 2)) - 2.0 * (share @ r))
    torch.testing.assert_close(scaled.remove_units(dict(restored)), params)


def test_tables_alone_are_known_from_lines_and_networks():
    assert m.Normal().setup(BOTH).has_only_tables
    assert m.Normal().setup(m.Family("x")).has_only_tables
    assert not m.Normal().setup(FAMILY).has_only_tables
    assert not m.Normal(network=(2,)).setup(BOTH).has_only_tables


def test_axes_and_looks_follow_the_parents():
    node, own = m.Normal(2).setup(FAMILY), Axis(coordinates=(("x", 2),))
    assert node.own_axis == own
    rows = Axis(categories=(("a", 3),))
    assert node.axes()["scale"] == (rows, own)
    assert m.Normal(2, shared_scale=True).setup(FAMILY).axes()["scale"] == (Axis(), own)
    assert node.axes()["loc"] == (rows, own)
    assert node.axes()["weight"] == (Axis(coordinates=(("r", 1),)), own)
    assert m.Categorical(4).setup(BOTH).own_axis == Axis(categories=(("x", 4),))
    params = {"loc": torch.arange(6.0).reshape(1, 6, 1), "scale": torch.ones(1, 1, 1)}
    shown = m.Normal(shared_scale=True).setup(BOTH).describe(params)
    assert shown["loc"].tolist() == [[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]]
    assert shown["scale"].tolist() == [1.0]
    wide = {"loc": torch.arange(6.0).reshape(1, 3, 2), "weight": torch.ones(1, 1, 2), "scale": torch.ones(1, 3, 2)}
    assert {name: one.shape for name, one in node.describe(wide).items()} == {n: one.shape for n, one in wide.items()}
    network = m.Normal(network=(2,)).setup(BOTH)
    layers = {"loc": torch.zeros(1, 1, 1), "network.0.weight": torch.ones(1, 5, 2)}
    assert network.describe(layers)["network.0.weight"].shape == (1, 5, 2)
    assert network.describe(layers)["loc"].tolist() == [0.0]


def test_nodes_and_parents_are_turned_together_or_not_at_all():
    family = m.Family("x", (("r", Real(2)), ("s", Real(2))))
    node, sign = m.Normal(2).setup(family), torch.tensor([-1.0, 1.0]).double()
    rng = np.random.default_rng(3)
    shapes = {"loc": (1, 1, 2), "weight": (1, 4, 2), "scale": (1, 1, 2)}
    params = {name: torch.as_tensor(rng.normal(size=shape)) for name, shape in shapes.items()}
    turned = node.turned(params, {"r"}, sign)
    torch.testing.assert_close(turned["weight"][:, :2], params["weight"][:, :2] * sign.unsqueeze(-1))
    torch.testing.assert_close(turned["weight"][:, 2:], params["weight"][:, 2:])
    torch.testing.assert_close(turned["loc"], params["loc"])
    both = node.turned(params, {"x", "s"}, sign)
    torch.testing.assert_close(both["loc"], params["loc"] * sign)
    torch.testing.assert_close(both["weight"][:, :2], params["weight"][:, :2] * sign)
    torch.testing.assert_close(both["weight"][:, 2:], params["weight"][:, 2:] * sign * sign.unsqueeze(-1))
    assert m.LogNormal(2).setup(family).turned(params, {"x"}, sign) is None
    assert m.Poisson(2).setup(family).turned(params, {"x"}, sign) is None
    assert m.Normal(2, network=(2,)).setup(family).turned(params, {"r"}, sign) is None
    torch.testing.assert_close(node.slopes(params, "s"), params["weight"][:, 2:, 0])


def test_a_node_has_a_coordinate_at_least():
    assert m.Normal(1).dim == 1
    with pytest.raises(ModelError, match="dim must be a whole number of at least 1; got 0"):
        m.Normal(0)
