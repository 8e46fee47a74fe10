"""How many numbers of a model are free to be estimated: what AIC, BIC and the summary count."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from otpdag.mechanisms.base import Mechanism
from otpdag.mechanisms.parameters import SIMPLEX, Parameter
from otpdag.structure import Structure

__all__ = ["free_parameters"]

MOST_RANKED = 400
"""Numbers of one node up to which those that say the same twice are found by the rank of a derivative."""


def free_parameters(structure: Structure) -> int:
    """Count what is learned: a table of K probabilities has K - 1, tied parameters count once.

    Numbers that say the same twice (a constant that is added to all logits, the level of a hidden node) count once:
    per node, the rank of the derivative of the parameters that a user reads in those that the optimiser moves.

    >>> import otpdag as otp
    >>> from otpdag import mechanisms as m
    >>> graph = otp.Graph([("z", "x"), ("x", "y")], hidden=["z"])
    >>> free_parameters(Structure.bind(graph, {"z": m.Categorical(3), "x": m.Normal(), "y": m.Categorical(4)}))
    14
    """
    counted: set[str] = set()
    total = 0
    for node, names in structure.keys.items():
        mechanism = structure.mechanisms[node]
        declared = mechanism.declared()
        fresh = {name: key for name, key in names.items() if key not in counted}
        counted |= set(fresh.values())
        simplex = [name for name in fresh if declared[name].support is SIMPLEX]
        total += sum(_simplex_size(declared[name]) for name in simplex)
        others = [name for name in fresh if name not in simplex]
        total += _rank(mechanism, {name: declared[name] for name in others})
    return total


def _simplex_size(parameter: Parameter) -> int:
    size = math.prod(parameter.shape)
    return size - size // parameter.shape[-1]


def _rank(mechanism: Mechanism, free: Mapping[str, Parameter]) -> int:
    """The number of directions in which what a user reads of a node can move."""
    size = sum(math.prod(parameter.shape) for parameter in free.values())
    if not 0 < size <= MOST_RANKED:
        return size
    generator = torch.Generator().manual_seed(0)
    learned = {name: p for name, p in mechanism.declared().items() if p.learned}
    raw = {
        name: 0.3 * torch.randn(1, *p.shape, generator=generator, dtype=torch.float64) for name, p in learned.items()
    }

    def shown(flat: Tensor) -> Tensor:
        parts = flat.split([math.prod(parameter.shape) for parameter in free.values()])
        moved = {name: part.reshape(1, *free[name].shape) for name, part in zip(free, parts, strict=True)}
        described = mechanism.describe(mechanism.natural({**raw, **moved}))
        return torch.cat([value.flatten() for value in described.values()])

    start = torch.cat([raw[name].flatten() for name in free])
    derivative = torch.autograd.functional.jacobian(shown, start)
    return int(torch.linalg.matrix_rank(derivative, rtol=1e-9))
