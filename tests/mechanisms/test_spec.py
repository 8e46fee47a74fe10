"""Mechanisms as plain data."""

import json
from typing import Any

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.errors import ModelError
from otpdag.mechanisms.base import Noise
from otpdag.spaces import Discrete, Image, Real, Space


def through_json(mechanism, **options):
    return m.from_spec(json.loads(json.dumps(mechanism.spec())), **options)


def test_settings_are_told_apart():
    spec = m.Normal(2, loc=[1, 2], weight=m.start(np.array([0.5])), scale=m.tie("sigma"), network=(4,)).spec()
    assert spec["type"] == "Normal"
    wanted = {
        "dim": 2,
        "loc": {"fixed": [1.0, 2.0]},
        "weight": {"start": [0.5]},
        "scale": {"tied": "sigma"},
        "network": [4],
        "shared_scale": False,
    }
    assert {name: spec["arguments"][name] for name in wanted} == wanted


def test_settings_survive():
    again = through_json(m.StudentT(2, loc=3.0, scale=m.start([1.0, 2.0]), df=m.tie("df")))
    assert again.loc.value == 3.0
    assert list(again.scale.value) == [1.0, 2.0]
    assert again.df == m.tie("df")
    assert again.dim == 2


def test_alternative_arguments_survive():
    assert through_json(m.Poisson(rate=2.0)).log_rate.value == pytest.approx(np.log(2.0))
    assert through_json(m.Poisson(rate=m.start(2.0))).log_rate.value == pytest.approx(np.log(2.0))
    assert through_json(m.Poisson(rate=m.tie("rate"))).log_rate == m.tie("rate")


@pytest.mark.parametrize("space", [Real(3), Discrete(4), Image(1, 2, 3)])
def test_spaces_survive(space):
    assert through_json(m.Given(space)).space == space


def test_a_subclass_without_its_own_init_is_recorded_too():
    assert m.LogNormal(2).spec()["arguments"]["dim"] == 2
    assert m.Bernoulli(probs=[0.2, 0.8]).spec()["arguments"]["probs"] == {"fixed": [0.2, 0.8]}


def test_a_bound_and_scaled_mechanism_keeps_its_arguments():
    bound = m.Normal(scale=2.0).setup(m.Family("x"))
    rows = torch.arange(5.0)[:, None]
    assert bound.scaled_to(rows, {}, torch.ones(5)).spec() == m.Normal(scale=2.0).spec()


def test_code_must_be_given_again():
    module = torch.nn.Linear(2, 3)
    spec = m.Decoder(module, Real(3), noise_scale=0.1).spec()
    with pytest.raises(ModelError, match=r"node 'x': the 'module' of Decoder is code and was not saved; .*functions="):
        m.from_spec(spec, node="x")
    assert m.from_spec(spec, node="x", functions={"x": module}).module is module
    spec = m.Deterministic(abs).spec()
    with pytest.raises(ModelError, match="the 'function' of Deterministic is code and was not saved"):
        m.from_spec(spec, node="x", functions={"y": abs})


def test_unknown_and_broken_specs_are_refused():
    with pytest.raises(ModelError, match=r"node 'x': unknown mechanism 'Odd'; known are .*Normal.* m.register\(Odd\)"):
        m.from_spec({"type": "Odd", "arguments": {}}, node="x")
    with pytest.raises(ModelError, match=r"Normal does not accept the saved arguments: .*'colour'"):
        m.from_spec({"type": "Normal", "arguments": {"colour": 3}})
    with pytest.raises(ModelError, match=r"a saved argument cannot be read: {'evil': 1}"):
        m.from_spec({"type": "Normal", "arguments": {"loc": {"evil": 1}}})
    with pytest.raises(ModelError, match="a saved argument cannot be read"):
        m.from_spec({"type": "Given", "arguments": {"space": {"space": "annotations"}}})


def test_wrong_arguments_are_named_beside_those_that_there_are():
    with pytest.raises(TypeError, match=r"^Exponential: .* argument 'mean'; its arguments are .* log_mean="):
        m.Exponential(mean=3)
    with pytest.raises(TypeError, match=r"^Poisson: too many positional arguments; its arguments are .*, rate="):
        m.Poisson(1, True, 0.1, 2.0, 3.0)


def test_choices_are_listed_whatever_is_given_instead():
    with pytest.raises(ModelError, match=r"^extra_zeros must be one of None, 'inflated', 'hurdle'; got True"):
        m.Poisson(extra_zeros=True)
    with pytest.raises(ModelError, match=r"^link must be one of 'logit', 'probit'; got 1"):
        m.Ordinal(3, link=1)


class Shifted(m.Mechanism):
    """A third party's mechanism, with keywords of its own."""

    def __init__(self, shift: Any = 0.0, **options: object) -> None:
        self.shift, self.options = shift, options

    @property
    def space(self) -> Space:
        return Real(1)

    @property
    def noise(self) -> Noise:
        return Noise(1)

    def forward(self, params, parents, noise):
        return noise + self.shift


def test_third_parties_register_their_classes():
    spec = Shifted(2.0, colour="red").spec()
    assert spec == {"type": "Shifted", "arguments": {"shift": 2.0, "colour": "red"}}
    with pytest.raises(ModelError, match="unknown mechanism 'Shifted'"):
        m.from_spec(spec)
    assert m.register(Shifted) is Shifted
    again = m.from_spec(spec)
    assert (again.shift, again.options) == (2.0, {"colour": "red"})
    assert m.register(Shifted) is Shifted
    impostor = type("Shifted", (Shifted,), {})
    with pytest.raises(ModelError, match="a mechanism named 'Shifted' is registered already"):
        m.register(impostor)


def test_what_is_no_plain_data_cannot_be_saved():
    with pytest.raises(
        ModelError, match=r"Shifted cannot be saved: its 'shift' is .*, neither plain data nor a function"
    ):
        Shifted({1, 2}).spec()

    class Many(Shifted):
        def __init__(self, *shifts: float) -> None:
            super().__init__(sum(shifts))

    assert Many().spec()["arguments"] == {}
    with pytest.raises(ModelError, match=r"Many cannot be saved: it takes \*shifts; name its arguments"):
        Many(1.0, 2.0).spec()


def test_what_is_no_number_is_refused_by_node_and_argument():
    with pytest.raises(ModelError, match=r"node 'u': Normal cannot take the saved 'weight': .*must be numbers.*'red'"):
        m.from_spec({"type": "Normal", "arguments": {"weight": "red"}}, node="u")
    with pytest.raises(ModelError, match=r"node 'u': Normal cannot take the saved 'scale'"):
        m.from_spec({"type": "Normal", "arguments": {"scale": {"start": "red"}}}, node="u")
    with pytest.raises(ModelError, match="a parameter must be numbers"):
        otp.Model(otp.Graph([], nodes=["u"]), {"u": m.Normal(loc="red")})
