"""What a flat point means."""

import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine import Layout
from otpdag.structure import unpack

MODEL = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(3), "x": m.Normal(2)})


def test_the_models_parameters_come_first_then_those_of_maps():
    phi = {"phi.b": torch.zeros(1, 4), "phi.a": torch.zeros(1, 2, 5)}
    layout = Layout.of(MODEL.structure, phi)
    assert layout.shapes == {
        "z.probs": (1, 3),
        "x.loc": (3, 2),
        "x.scale": (3, 2),
        "phi.b": (4,),
        "phi.a": (2, 5),
    }
    assert list(layout.shapes)[-2:] == ["phi.b", "phi.a"]
    assert not any(key.startswith("phi.") for key in list(layout.shapes)[:-2])


def test_packing_ignores_the_order_of_names_and_is_undone_by_unpacking():
    layout = Layout.of(MODEL.structure)
    generator = torch.Generator().manual_seed(0)
    theta = {key: torch.randn(2, *shape, generator=generator) for key, shape in layout.shapes.items()}
    point = layout.pack(theta)
    assert point.shape == (2, 3 + 6 + 6)
    assert torch.equal(point, layout.pack(dict(reversed(theta.items()))))
    back = unpack(point, layout.shapes)
    for key, value in theta.items():
        assert torch.equal(back[key], value)


def test_a_parameter_that_is_missing_is_named():
    layout = Layout.of(MODEL.structure)
    with pytest.raises(KeyError, match=r"x\.scale"):
        layout.pack({"z.probs": torch.zeros(1, 1, 3), "x.loc": torch.zeros(1, 3, 2)})


def test_fixed_parameters_are_no_coordinates():
    fixed = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal(scale=1.0)})
    assert Layout.of(fixed.structure).shapes == {"x.loc": (1, 1)}
