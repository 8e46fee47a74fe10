"""A user's own network as a mechanism."""

import pytest
import torch

from otpdag import mechanisms as m
from otpdag.spaces import Discrete, Image, Real

FAMILY = m.Family("x", (("k", Discrete(2)), ("z", Real(2))))


def network():
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def parents(rows=6):
    generator = torch.Generator().manual_seed(0)
    return {
        "k": torch.eye(2).repeat(rows // 2, 1)[None],
        "z": torch.randn(1, rows, 2, generator=generator),
    }


def test_the_first_replica_is_the_module_itself():
    module = network()
    decoder = m.Decoder(module, Real(3)).setup(FAMILY)
    raw = decoder.initial_raw(3, torch.Generator().manual_seed(0))
    assert {name: tuple(value.shape[1:]) for name, value in raw.items()} == {
        f"module.{name}": tuple(value.shape) for name, value in module.named_parameters()
    }
    found = decoder.forward(decoder.natural(raw), parents(), torch.zeros(1, 6, 0))
    inputs = torch.cat([parents()["k"], parents()["z"]], -1)[0]
    assert found.shape == (3, 6, 3)
    torch.testing.assert_close(found[0], module(inputs).detach())
    assert not torch.allclose(found[0], found[1])
    assert not torch.allclose(found[1], found[2])


def test_fresh_replicas_follow_the_generator_and_leave_global_randomness_alone():
    decoder = m.Decoder(network(), Real(3)).setup(FAMILY)
    before = torch.get_rng_state()
    one, two = (decoder.initial_raw(2, torch.Generator().manual_seed(5), first=False) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    for name in one:
        assert torch.equal(one[name], two[name])
    assert not torch.equal(one["module.0.weight"][0], decoder.module[0].weight)


def test_the_module_is_not_changed():
    module = network()
    before = [value.clone() for value in module.parameters()]
    decoder = m.Decoder(module, Real(3)).setup(FAMILY)
    raw = {name: value.requires_grad_() for name, value in decoder.initial_raw(2, torch.Generator()).items()}
    decoder.forward(decoder.natural(raw), parents(), torch.zeros(1, 6, 0)).sum().backward()
    assert all(value.grad is not None for value in raw.values())
    for value, old in zip(module.parameters(), before, strict=True):
        assert value.grad is None
        assert torch.equal(value, old)


def test_images_are_flattened():
    class Grow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = torch.nn.ConvTranspose2d(4, 3, 2)

        def forward(self, inputs):
            return self.convolution(inputs[..., None, None])

    decoder = m.Decoder(Grow(), Image(3, 2, 2), noise_scale=0.1).setup(FAMILY)
    params = decoder.natural(decoder.initial_raw(2, torch.Generator().manual_seed(0)))
    value = decoder.forward(params, parents(), torch.zeros(1, 6, 12))
    assert value.shape == (2, 6, 12)
    assert decoder.log_prob(params, value, parents()).shape == (2, 6)


def test_buffers_travel_with_the_model():
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    decoder = m.Decoder(module, Real(3)).setup(FAMILY)
    params = decoder.natural(decoder.initial_raw(1, torch.Generator()))
    decoder.forward(params, parents(), torch.zeros(1, 6, 0))
    buffers = decoder.buffers()
    assert buffers["module.1.running_mean"].abs().sum() > 0
    fresh = m.Decoder(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)), Real(3)).setup(FAMILY)
    restored = fresh.with_buffers(buffers)
    assert torch.equal(restored.buffers()["module.1.running_mean"], buffers["module.1.running_mean"])
    assert fresh.buffers()["module.1.running_mean"].abs().sum() == 0


def test_other_mechanisms_draw_their_networks():
    bound = m.Normal(network=(8,)).setup(FAMILY)
    raw = bound.initial_raw(3, torch.Generator().manual_seed(0))
    assert set(raw) == {"network.0.weight", "network.1.weight"}
    assert raw["network.0.weight"].shape == (3, 4, 8)
    assert m.Normal().setup(FAMILY).initial_raw(3, torch.Generator()) == {}


def test_scale_is_shown_as_a_number():
    decoder = m.Decoder(network(), Real(3), noise_scale=0.25).setup(FAMILY)
    shown = decoder.describe(decoder.natural(decoder.initial_raw(2, torch.Generator())))
    assert shown["scale"].tolist() == pytest.approx([0.25])
