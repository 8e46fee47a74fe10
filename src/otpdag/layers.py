"""Small networks and relaxations whose parameters carry a leading replica axis.

Parameters live in plain dictionaries of tensors ``(R, ...)``; the functions here are pure. Stacking replicas in one
tensor and multiplying with ``matmul`` costs far less than a loop over networks (see ``docs/design/mechanisms.md``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from otpdag.numerics import apply_linear, expand_to


def mlp_tensors(sizes: Sequence[int]) -> dict[str, tuple[tuple[int, ...], float]]:
    """The tensors of a multi-layer perceptron: their shapes, and the spread of their first values.

    The last layer starts small.

    >>> mlp_tensors([1, 2])
    {'0.weight': ((1, 2), 0.1), '0.bias': ((2,), 0.0)}
    """
    tensors: dict[str, tuple[tuple[int, ...], float]] = {}
    for layer, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        gain = 0.1 if layer == len(sizes) - 2 else math.sqrt(2.0)
        tensors[f"{layer}.weight"] = (fan_in, fan_out), gain / math.sqrt(max(fan_in, 1))
        tensors[f"{layer}.bias"] = (fan_out,), 0.0
    return tensors


def init_mlp(
    sizes: Sequence[int], *, replicas: int, generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Draw the parameters of a multi-layer perceptron.

    >>> params = init_mlp([3, 8, 2], replicas=4, generator=torch.Generator().manual_seed(0))
    >>> {name: tuple(value.shape) for name, value in params.items()}
    {'0.weight': (4, 3, 8), '0.bias': (4, 8), '1.weight': (4, 8, 2), '1.bias': (4, 2)}
    """
    return {
        name: spread * torch.randn(replicas, *shape, generator=generator, dtype=dtype)
        if spread
        else torch.zeros(replicas, *shape, dtype=dtype)
        for name, (shape, spread) in mlp_tensors(sizes).items()
    }


def apply_mlp(params: Mapping[str, Tensor], inputs: Tensor, prefix: str = "") -> Tensor:
    """Evaluate a perceptron with SiLU activations on ``inputs`` (R, ..., P)."""
    layers = sum(1 for name in params if name.startswith(prefix) and name.endswith(".weight"))
    hidden = inputs
    for layer in range(layers):
        bias = params[f"{prefix}{layer}.bias"]
        hidden = apply_linear(hidden, params[f"{prefix}{layer}.weight"])
        hidden = hidden + expand_to(bias, hidden.ndim)
        if layer < layers - 1:
            hidden = torch.nn.functional.silu(hidden)
    return hidden


def gumbel_softmax(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    r"""A relaxed draw of a category (Jang et al. 2017; Cat-Concrete in the paper's Appendix C.1).

    .. math:: y_k \propto \exp\{(\log p_k + G_k)/\tau\}, \quad G_k = -\log(-\log u_k)
    """
    tiny = torch.finfo(uniform.dtype).tiny
    gumbel = -torch.log((-torch.log(uniform.clamp(min=tiny))).clamp(min=tiny))
    return torch.softmax((logits + gumbel) / temperature, -1)
