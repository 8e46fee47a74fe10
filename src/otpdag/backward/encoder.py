"""A user's network as backward map: what is hidden behind an image is what an encoder makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from otpdag.errors import ModelError

__all__ = ["EncoderMap"]

PREFIX = "phi.encoder."


@dataclass(frozen=True)
class EncoderMap:
    r"""One hidden node drawn from the observed one by a ``torch.nn.Module`` (WAE's deterministic encoder).

    .. math:: z = f_e(x)

    Args:
        module: Maps images (n, channels, height, width), or rows, to (n, ``width``). It is not changed.
        width: Coordinates of the hidden node.
        shape: What a row of the batch is reshaped to.
    """

    module: nn.Module
    width: int
    shape: tuple[int, ...]

    def init(self) -> dict[str, Tensor]:
        """The module's own parameters, with a replica axis of one."""
        return {PREFIX + name: value.detach().clone().unsqueeze(0) for name, value in self.module.named_parameters()}

    def latents(self, phi: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Encode rows (1, n, pixels): (1, n, width)."""
        state: dict[str, Tensor] = {
            key.removeprefix(PREFIX): value[0] for key, value in phi.items() if key.startswith(PREFIX)
        }
        state |= dict(self.module.named_buffers())
        images = rows[0].reshape(-1, *self.shape)
        if len(self.shape) == 3:
            images = images.contiguous(memory_format=torch.channels_last)
        latents: Tensor = functional_call(self.module, state, (images,))
        if latents.shape != (len(images), self.width):
            raise ModelError(
                f"the encoder must map {tuple(images.shape)} to ({len(images)}, {self.width}); "
                f"got {tuple(latents.shape)}"
            )
        return latents.unsqueeze(0)
