"""What mechanisms do unless they say otherwise."""

import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.errors import ModelError
from otpdag.mechanisms import base as protocols
from otpdag.mechanisms.base import Noise, axis_count, sum_cells
from otpdag.spaces import Discrete, Real
from tests.mechanisms.own import Chances


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_of_all_categories_have_the_type_of_the_parameters(dtype):
    node = Chances(3).setup(m.Family("x"))
    chances = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]], dtype=dtype)
    found = node.log_probs({"chances": chances}, {})
    assert found.dtype == dtype
    torch.testing.assert_close(found, chances.log().unsqueeze(1))
    beside = node.log_probs({"chances": chances}, {}, torch.zeros(2, 4, 3, dtype=dtype))
    torch.testing.assert_close(beside, chances.log().unsqueeze(1).expand_as(beside))


def test_slopes_are_told_of_numeric_parents_alone():
    family = m.Family("x", (("a", Discrete(2)), ("r", Real(1)), ("s", Real(2))))
    node = m.Normal(2).setup(family)
    params = {"loc": torch.zeros(1, 2, 2), "weight": torch.arange(6.0).reshape(1, 3, 2), "scale": torch.ones(1, 2, 2)}
    assert node.slopes(params, "r").tolist() == [[0.0]]
    assert node.slopes(params, "s").tolist() == [[2.0, 4.0]]
    assert node.slopes(params, "a") is None
    assert node.slopes(params, "other") is None
    del params["weight"]
    assert node.slopes(params, "r") is None
    assert node.predictor.with_inputs_turned(params, {"r"}, torch.tensor([-1.0])) is None


class Bare(m.Mechanism):
    """Nothing but what must be there."""

    space = Real(2)
    noise = Noise(2)

    def forward(self, params, parents, noise):
        return 3.0 * noise


def test_a_mechanism_is_shown_as_the_call_that_built_it():
    shown = "Normal(weight=Ridge(penalty=2.0, centre=0.0), scale=1.0)"
    assert repr(m.Normal(weight=otp.ridge(2.0), scale=1.0)) == shown
    assert repr([m.Categorical(3)]) == "[Categorical(3)]"


def test_a_mechanism_that_says_nothing_has_nothing():
    node = Bare().setup(m.Family("x"))
    assert (node.noise.kind, protocols.relaxed_noise(node)) == ("normal", node.noise)
    assert not any((node.is_given, node.has_density, protocols.can_abduct(node)))
    assert not any((protocols.is_linear(node), protocols.has_closed_form(node)))
    assert node.parameters() == node.axes() == protocols.buffers_of(node) == {}
    assert node.start(torch.zeros(3, 2), {}, torch.ones(3)) == {}
    value = torch.ones(1, 4, 2)
    assert node.mean({}, {}) is None
    torch.testing.assert_close(protocols.relaxed(node, {}, {}, value, 0.5), 3 * value)
    mask = torch.tensor([True, False])
    assert node.complete({}, value, {}, mask, value).tolist() == [[[1.0, 3.0]] * 4]
    params = {"p": value}
    assert node.describe(params) == node.restore_units(params) == node.remove_units(params) == params
    for call in (
        lambda: node.log_prob({}, value, {}),
        lambda: protocols.abducted(node, {}, value, {}, value),
        lambda: protocols.fitted_to_rows(node, {}, value[0], {}, value[..., 0]),
    ):
        with pytest.raises((NotImplementedError, ModelError), match="Bare"):
            call()
    with pytest.raises(ModelError, match="Bare belongs to no model yet"):
        _ = Bare().family


def test_cells_are_summed_where_they_are_seen():
    cells = torch.tensor([[[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]])
    mask = torch.tensor([[[True, False, True], [False, False, False]]])
    assert sum_cells(cells, None).tolist() == [[7.0, 56.0]]
    assert sum_cells(cells, mask).tolist() == [[5.0, 0.0]]
    assert sum_cells(cells[..., :1], None).tolist() == [[1.0, 8.0]]
    assert sum_cells(cells[..., :1], mask[..., :1]).tolist() == [[1.0, 0.0]]
    impossible = torch.tensor([[[-torch.inf, 2.0]]])
    assert sum_cells(impossible, torch.tensor([[[False, True]]])).tolist() == [[2.0]]


def test_axes_are_those_of_the_largest_value():
    three, four = torch.zeros(1, 2, 3), torch.zeros(1, 2, 3, 4)
    assert axis_count({}) == 3
    assert axis_count({}, four) == 4
    assert axis_count({"a": three, "b": four}) == 4
    assert axis_count({"a": four}, three) == 4
    assert axis_count({"a": torch.zeros(1, 2)}) == 2


def test_layers_of_networks_start_at_random_and_nothing_else_does():
    node = m.Normal(network=(4,)).setup(m.Family("x", (("r", Real(1)),)))
    found = node.initial_raw(3, torch.Generator().manual_seed(0))
    drawn = torch.Generator().manual_seed(0)
    assert list(found) == ["network.0.weight", "network.1.weight"]
    for name, value in found.items():
        parameter = node.declared()[name]
        expected = parameter.init_scale * torch.randn(3, *parameter.shape, generator=drawn, dtype=torch.float64)
        torch.testing.assert_close(value, expected)
    assert m.Normal().setup(m.Family("x")).initial_raw(3, drawn) == {}


def test_natural_parameters_hold_what_is_given_and_raw_ones_do_not():
    family = m.Family("x", (("r", Real(1)),))
    node = m.Normal(loc=2.0).setup(family)
    raw = {"weight": torch.tensor([[[0.5]], [[1.0]]]).double(), "scale": torch.zeros(2, 1, 1).double()}
    natural = node.natural(raw)
    assert natural["loc"].tolist() == [[[2.0]]]
    assert natural["loc"].dtype == torch.float64
    torch.testing.assert_close(natural["scale"], torch.ones(2, 1, 1).double())
    back = node.raw(natural)
    assert set(back) == {"weight", "scale"}
    torch.testing.assert_close(back, raw)
    assert node.raw({"scale": natural["scale"]}).keys() == {"scale"}
    fixed = m.Normal(loc=2.0, scale=3.0).setup(m.Family("x"))
    assert {name: one.item() for name, one in fixed.natural({}).items()} == {"loc": 2.0, "scale": 3.0}


def test_labels_are_exchanged_along_all_axes_of_a_node_or_not_at_all():
    family = m.Family("x", (("a", Discrete(2)), ("b", Discrete(3))))
    node = m.Categorical(3).setup(family)
    probs = torch.arange(18.0).reshape(1, 6, 3)
    order = [2, 0, 1]
    found = node.relabelled({"probs": probs}, {"b"}, order)["probs"].reshape(2, 3, 3)
    torch.testing.assert_close(found, probs.reshape(2, 3, 3)[:, order])
    both = node.relabelled({"probs": probs}, {"b", "x"}, order)["probs"].reshape(2, 3, 3)
    torch.testing.assert_close(both, probs.reshape(2, 3, 3)[:, order][:, :, order])
    assert node.relabelled({"probs": probs}, {"other"}, order) is None
    assert node.relabelled({"probs": probs, "more": probs}, {"b"}, order) is None
    assert not protocols.defines_together(node, "relabelled")
