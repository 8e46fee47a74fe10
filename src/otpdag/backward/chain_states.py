"""The joint states of all unknown categories of a sequence, with as many earlier values as the lags ask for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.joint_codes import joint_codes
from otpdag.structure import Structure, lag_name

__all__ = ["MOST_STATES", "States", "joint_states"]


MOST_STATES = 1024  # the recursion multiplies matrices of this many rows and columns at every step


@dataclass(frozen=True)
class States:
    """The joint states of all unknown categories.

    Attributes:
        nodes: The unknown categories.
        size: Number of states S.
        now: What a step's state tells: one-hot values (S, K) of ``z`` and perhaps ``z[-1]`` and so on.
        before: The same told by the state one step earlier.
        follows: Which states (S, S) may follow which; None if all may.
        begins: Which states (S,) a sequence may begin with.
    """

    nodes: tuple[str, ...]
    size: int
    now: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    follows: Tensor | None
    begins: Tensor


def joint_states(structure: Structure, unknown: Sequence[str], dtype: torch.dtype = torch.float64) -> States:
    """Enumerate the joint states of ``unknown`` nodes, with as many earlier values as the longest lag asks for."""
    mechanisms = structure.mechanisms
    depth = dict.fromkeys(unknown, 1)
    for edge in structure.graph.lags:
        if edge.parent in depth:
            depth[edge.parent] = max(depth[edge.parent], edge.by)
    parts = [(node, back) for node in unknown for back in range(depth[node])]
    size = math.prod(mechanisms[node].space.width for node, _ in parts)
    if size > MOST_STATES:
        shown = ", ".join(f"{node!r} ({mechanisms[node].space.width}, {depth[node]} steps)" for node in unknown)
        raise ModelError(
            f"the unknown categories {shown} have {size} joint states; at most {MOST_STATES} can be enumerated: use "
            "fewer states, hidden nodes or lags"
        )
    codes = joint_codes([mechanisms[node].space.width for node, _ in parts])
    digits = dict(zip(parts, codes, strict=True))
    now, before = {}, {}
    follows, begins = torch.ones(size, size, dtype=torch.bool), torch.ones(size, dtype=torch.bool)
    for (node, back), digit in digits.items():
        one_hot = torch.eye(mechanisms[node].space.width, dtype=dtype)[digit]
        now[lag_name(node, back) if back else node] = one_hot
        before[lag_name(node, back + 1)] = one_hot
        if back:
            follows &= digits[node, back - 1].unsqueeze(1) == digit.unsqueeze(0)
            begins &= digit == 0
    return States(tuple(unknown), size, now, before, None if bool(follows.all()) else follows, begins)
