"""Convolutional networks for images, as ordinary torch modules: the paper's encoder and decoder (Appendix C.3)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

from otpdag.errors import ModelError

SHRINK = 4  # two convolutions of stride two


class ResidualBlock(nn.Module):
    r"""``x + conv1x1(relu(conv3x3(relu(x))))``, with weights of its own.

    >>> ResidualBlock(8, 4)(torch.zeros(2, 8, 5, 5)).shape
    torch.Size([2, 8, 5, 5])
    """

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.wide = nn.Conv2d(channels, hidden, 3, padding=1)
        self.narrow = nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the two convolutions make of ``x`` to it."""
        residual: Tensor = self.narrow(torch.relu(self.wide(torch.relu(x))))
        return x + residual


def image_encoder(channels: int, dim: int = 64, width: int = 128) -> nn.Module:
    """Two 4x4 convolutions of stride 2 and two residual blocks: (n, channels, H, W) to (n, dim, H/4, W/4).

    >>> image_encoder(3, dim=8, width=16)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 8, 8, 8])
    """
    return nn.Sequential(
        nn.Conv2d(channels, width // 2, 4, 2, 1),
        nn.ReLU(),
        nn.Conv2d(width // 2, width, 4, 2, 1),
        *_residual_blocks(width),
        nn.Conv2d(width, dim, 1),
    )


def image_decoder(channels: int, dim: int = 64, width: int = 128) -> nn.Module:
    """The mirror of :func:`image_encoder`: two residual blocks and two 4x4 transposed convolutions of stride 2.

    >>> image_decoder(3, dim=8, width=16)(torch.zeros(2, 8, 8, 8)).shape
    torch.Size([2, 3, 32, 32])
    """
    return nn.Sequential(
        nn.Conv2d(dim, width, 3, padding=1),
        *_residual_blocks(width),
        nn.ConvTranspose2d(width, width // 2, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(width // 2, channels, 4, 2, 1),
    )


def with_bottleneck(encoder: nn.Module, decoder: nn.Module, dim: int, rank: int) -> tuple[nn.Module, nn.Module]:
    """Networks that meet in ``rank`` channels: linear maps from the encoder's ``dim`` channels to them, and back.

    Both maps start orthogonal, so that what passes keeps its units.

    >>> encoder, decoder = with_bottleneck(image_encoder(3, 8, 16), image_decoder(3, 8, 16), dim=8, rank=2)
    >>> encoder(torch.zeros(1, 3, 8, 8)).shape, decoder(torch.zeros(1, 2, 2, 2)).shape
    (torch.Size([1, 2, 2, 2]), torch.Size([1, 3, 8, 8]))
    """
    if rank == dim:
        return encoder, decoder
    narrow, wide = nn.Conv2d(dim, rank, 1), nn.Conv2d(rank, dim, 1)
    for weight, bias in map(_last_layer, (narrow, wide)):
        nn.init.orthogonal_(weight)
        nn.init.zeros_(bias)
    return nn.Sequential(encoder, narrow), nn.Sequential(wide, decoder)


def dense_encoder(inputs: int, dim: int, hidden: tuple[int, ...] = (256, 256)) -> nn.Module:
    """A perceptron from rows of numbers (or images, flattened) to ``dim`` of them.

    >>> dense_encoder(12, 3)(torch.zeros(2, 3, 2, 2)).shape
    torch.Size([2, 3])
    """
    return nn.Sequential(nn.Flatten(), *_layers([inputs, *hidden, dim]))


def dense_decoder(dim: int, outputs: int, hidden: tuple[int, ...] = (256, 256)) -> nn.Module:
    """A perceptron from ``dim`` numbers to ``outputs`` of them.

    >>> dense_decoder(3, 12)(torch.zeros(2, 3)).shape
    torch.Size([2, 12])
    """
    return nn.Sequential(*_layers([dim, *reversed(hidden), outputs]))


Made = TypeVar("Made")


def seeded(make: Callable[[], Made], seed: int) -> Made:
    """Make modules whose parameters the seed determines; torch's global random state stays as it is.

    >>> before = torch.get_rng_state()
    >>> first, second = (seeded(lambda: nn.Linear(2, 1), 7).weight for _ in range(2))
    >>> bool((first == second).all()), bool((torch.get_rng_state() == before).all())
    (True, True)
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def started_from_data(encoder: nn.Module, decoder: nn.Module, images: Tensor) -> tuple[nn.Module, nn.Module]:
    r"""The default networks with their last layers in the data's units, in place: a start, and no other network.

    Latents of the first steps have mean zero in each channel and variance one over all, and what is decoded from them
    has the images' own mean. As torch draws them, layers shrink what passes through: latents of the default encoder are
    a constant that images move by a fortieth, and the decoder is blind to them until they have grown.

    Args:
        encoder: Made by :func:`image_encoder`.
        decoder: Made by :func:`image_decoder`.
        images: Some of the data, (n, channels, height, width).

    Returns:
        The two.

    >>> images = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    >>> networks = image_encoder(3, dim=8, width=16), image_decoder(3, dim=8, width=16)
    >>> encoder, decoder = started_from_data(*networks, images)
    >>> round(encoder(images).std().item(), 2)
    1.0
    """
    channels = (0, 2, 3)
    with torch.no_grad():
        latents = encoder(images)
        centre = latents.mean(channels)
        spread = (latents - centre[:, None, None]).std()
        if spread <= 1e-4 * centre.abs().max():  # images without contrast have no units to give
            return encoder, decoder
        weight, bias = _last_layer(encoder)
        weight.div_(spread)
        bias.sub_(centre).div_(spread)
        _, bias = _last_layer(decoder)
        bias.add_(images.mean(channels) - decoder(encoder(images)).mean(channels))
    return encoder, decoder


def _last_layer(network: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight and bias of the last convolution."""
    *_, last = (layer for layer in network.modules() if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d))
    assert last.bias is not None, "convolutions of the default networks have one"
    return last.weight, last.bias


def positions(height: int, width: int) -> tuple[int, int]:
    """Height and width of the latent grid of an image.

    >>> positions(32, 32)
    (8, 8)
    """
    if height % SHRINK or width % SHRINK or min(height, width) < SHRINK:
        raise ModelError(f"images must have sides that are multiples of {SHRINK}; got {height} x {width}")
    return height // SHRINK, width // SHRINK


def _residual_blocks(width: int) -> list[nn.Module]:
    return [*(ResidualBlock(width, max(1, width // 4)) for _ in range(2)), nn.ReLU()]


def _layers(sizes: list[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return layers[:-1]


class Flat(nn.Module):
    """An encoder whose grid of latents (n, dim, h, w) becomes rows (n, h * w * dim), position by position."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> Tensor:
        """Encode, and lay the positions side by side."""
        grid: Tensor = self.encoder(images)
        return grid.permute(0, 2, 3, 1).flatten(1) if grid.ndim == 4 else grid.flatten(1)


class Grid(nn.Module):
    """A decoder that reads rows (n, h * w * dim) as a grid of latents (n, dim, h, w)."""

    def __init__(self, decoder: nn.Module, height: int, width: int, dim: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.shape = (height, width, dim)

    def forward(self, rows: Tensor) -> Tensor:
        """Restore the grid, and decode."""
        grid = rows.reshape(len(rows), *self.shape).permute(0, 3, 1, 2)
        images: Tensor = self.decoder(grid)
        return images.flatten(1)
