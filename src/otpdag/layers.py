"""Small networks and relaxations whose parameters carry a leading replica axis.

Parameters live in plain dictionaries of tensors ``(R, ...)``; the functions here are pure. Stacking replicas in one
tensor and multiplying with ``matmul`` costs far less than a loop over networks (see ``docs/design/mechanisms.md``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


def nearest(costs: Tensor) -> Tensor:
    """Index of the smallest number along the last axis; on a CPU by numpy, which is ten times as fast as torch.

    >>> nearest(torch.tensor([[3.0, 1.0, 2.0]]))
    tensor([1])
    """
    held = costs.detach()
    return torch.from_numpy(held.numpy().argmin(-1)) if held.device.type == "cpu" else held.argmin(-1)


def expand_to(parameter: Tensor, ndim: int, event_dims: int = 1) -> Tensor:
    """Insert axes after the replica axis, so that a parameter broadcasts against values with ``ndim`` axes.

    >>> expand_to(torch.zeros(2, 3), ndim=4).shape
    torch.Size([2, 1, 1, 3])
    """
    missing = ndim - 1 - event_dims
    shape = (parameter.shape[0],) + (1,) * max(missing, 0) + tuple(parameter.shape[1:])
    return parameter.reshape(shape)


def apply_linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``inputs`` (R, ..., P) by ``weight`` (R, P, d), replica by replica."""
    if inputs.ndim == 2:
        return torch.matmul(inputs.unsqueeze(1), weight).squeeze(1)
    return torch.matmul(inputs, expand_to(weight, inputs.ndim, event_dims=2))


def side_by_side(columns: Sequence[Tensor]) -> Tensor:
    """Join tensors (..., width) on their last axis, after broadcasting the axes before it.

    >>> side_by_side([torch.zeros(1, 5, 2), torch.ones(3, 1, 1)]).shape
    torch.Size([3, 5, 3])
    """
    if len(columns) == 1:
        return columns[0]
    shapes = [column.shape[:-1] for column in columns]
    if any(shape != shapes[0] for shape in shapes):
        common = np.broadcast_shapes(*shapes)  # much faster than torch's own
        columns = [column.expand(*common, column.shape[-1]) for column in columns]
    return torch.cat(tuple(columns), -1)


def init_mlp(
    sizes: Sequence[int], *, replicas: int, generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Draw the parameters of a multi-layer perceptron; the last layer starts small.

    >>> params = init_mlp([3, 8, 2], replicas=4, generator=torch.Generator().manual_seed(0))
    >>> {name: tuple(value.shape) for name, value in params.items()}
    {'0.weight': (4, 3, 8), '0.bias': (4, 8), '1.weight': (4, 8, 2), '1.bias': (4, 2)}
    """
    params: dict[str, Tensor] = {}
    for layer, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        last = layer == len(sizes) - 2
        gain = 0.1 if last else math.sqrt(2.0)
        weight = torch.randn(replicas, fan_in, fan_out, generator=generator, dtype=dtype)
        params[f"{layer}.weight"] = weight * (gain / math.sqrt(max(fan_in, 1)))
        params[f"{layer}.bias"] = torch.zeros(replicas, fan_out, dtype=dtype)
    return params


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


def gumbel_softmax(logits: Tensor, uniform: Tensor, temperature: float, *, hard: bool = False) -> Tensor:
    r"""A relaxed draw of a category (Jang et al. 2017; Cat-Concrete in the paper's Appendix C.1).

    .. math:: y_k \propto \exp\{(\log p_k + G_k)/\tau\}, \quad G_k = -\log(-\log u_k)

    With ``hard=True`` the value is one-hot and the gradient that of the soft draw (straight-through).
    """
    tiny = torch.finfo(uniform.dtype).tiny
    gumbel = -torch.log((-torch.log(uniform.clamp(min=tiny))).clamp(min=tiny))
    soft = torch.softmax((logits + gumbel) / temperature, -1)
    if not hard:
        return soft
    one_hot = torch.nn.functional.one_hot(soft.argmax(-1), soft.shape[-1]).to(soft.dtype)
    return one_hot + soft - soft.detach()
