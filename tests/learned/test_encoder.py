"""A user's network as backward map."""

import pytest
import torch
from torch import nn

from otpdag.errors import ModelError
from otpdag.learned.autoencoder import PREFIX, EncoderMap


def test_latents_are_what_the_module_makes_of_images():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2).eval(), nn.Flatten(), nn.Linear(8, 3))
    encoder, rows = EncoderMap(module, 3, (1, 4, 4)), torch.rand(1, 5, 16)
    phi = encoder.init()
    assert set(phi) == {PREFIX + name for name, _ in module.named_parameters()}
    torch.testing.assert_close(encoder.latents(phi, rows)[0], module(rows[0].reshape(5, 1, 4, 4)))


def test_the_module_is_neither_changed_nor_shared():
    module = nn.Linear(4, 2)
    before = module.weight.detach().clone()
    encoder = EncoderMap(module, 2, (4,))
    phi = {**encoder.init(), "other": torch.zeros(1)}
    phi[PREFIX + "weight"] += 1.0
    rows = torch.rand(1, 3, 4)
    torch.testing.assert_close(encoder.latents(phi, rows)[0], rows[0] @ (before + 1.0).T + module.bias)
    assert torch.equal(module.weight, before)


def test_another_width_is_refused():
    encoder = EncoderMap(nn.Linear(4, 2), 3, (4,))
    with pytest.raises(ModelError, match=r"the encoder must map \(5, 4\) to \(5, 3\); got \(5, 2\)"):
        encoder.latents(encoder.init(), torch.rand(1, 5, 4))
