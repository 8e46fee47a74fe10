r"""Observed nodes read through features, for all joint states of the hidden categories at once.

Where :math:`\log p(x_v \mid c) = f_v(x_v) \cdot \eta_v(c)` for every observed node, the log-densities of all rows in
all states and replicas are one matrix product of features and coefficients; the expected sums of features, which an
update needs, are another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from otpdag.mechanisms.base import Mechanism
from otpdag.structure import Naturals, Structure

__all__ = ["Emission", "Emissions", "emissions_of"]

Values = Mapping[str, Tensor]

MOST_FEATURES = 2_000
"""Features of a row beyond which a product of matrices is no longer the fast way."""


@dataclass(frozen=True, eq=False)
class Emission:
    """One observed node.

    Attributes:
        node: Its name.
        mechanism: How it comes about.
        configuration: Row of its table for each hidden state and each configuration of its observed parents (S, O).
        observed: Its observed categorical parents.
    """

    node: str
    mechanism: Mechanism
    configuration: Tensor
    observed: tuple[str, ...]

    def features(self, values: Values, mask: Values) -> Tensor | None:
        """Features (n, O * F) of rows (n, width): those of the node, at the configuration of its observed parents."""
        own = self.mechanism.features(values[self.node], mask[self.node])
        if own is None or not self.observed:
            return own
        joint = values[self.observed[0]]
        for name in self.observed[1:]:
            joint = (joint.unsqueeze(-1) * values[name].unsqueeze(-2)).flatten(-2)
        return (joint.unsqueeze(-1) * own.unsqueeze(-2)).flatten(-2)

    def coefficients(self, naturals: Naturals) -> Tensor:
        """In every state (R, S, O * F)."""
        return self.mechanism.coefficients(naturals[self.node])[:, self.configuration].flatten(2)

    def maximised(self, naturals: Naturals, sums: Tensor) -> dict[str, Tensor]:
        """Natural parameters from expected sums of features in every state (R, S, O * F)."""
        by_row = sums.unflatten(-1, (self.configuration.shape[1], -1)).flatten(1, 2)
        if not self._is_table:
            many = math.prod(space.width for _, space in self.mechanism.family.parents)
            empty = by_row.new_zeros(len(sums), many, by_row.shape[-1])
            by_row = empty.index_add_(1, self.configuration.flatten(), by_row)
        return self.mechanism.maximised_by(naturals[self.node], by_row)

    @cached_property
    def _is_table(self) -> bool:
        """Whether states, and configurations in them, are the rows of its table in their own order."""
        many = math.prod(space.width for _, space in self.mechanism.family.parents)
        return self.configuration.flatten().tolist() == list(range(many))


@dataclass(frozen=True, eq=False)
class Emissions:
    """All observed nodes: the features of a row side by side, and a one."""

    nodes: tuple[Emission, ...]
    sizes: tuple[int, ...]

    def features(self, values: Values, mask: Values) -> Tensor:
        """Features of rows (n, F + 1)."""
        parts = [one.features(values, mask) for one in self.nodes]
        one = next(iter(values.values()))[:, :1]
        return torch.cat([*(part for part in parts if part is not None), torch.ones_like(one)], -1)

    def coefficients(self, naturals: Naturals, log_prior: Tensor) -> Tensor:
        """In every state, the last one the logarithm of its prior weight (R, S): (R, S, F + 1)."""
        parts = [one.coefficients(naturals) for one in self.nodes]
        replicas = max(len(part) for part in (*parts, log_prior))
        return torch.cat([part.expand(replicas, *part.shape[1:]) for part in (*parts, log_prior.unsqueeze(-1))], -1)

    def maximised(self, naturals: Naturals, sums: Tensor) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Natural parameters of every node from the expected sums (R, S, F + 1)."""
        for one, part in zip(self.nodes, sums[..., :-1].split(self.sizes, -1), strict=True):
            yield one.node, one.maximised(naturals, part)


def emissions_of(
    structure: Structure, states: Mapping[str, Tensor], values: Values, mask: Values, given: Sequence[str] = ()
) -> Emissions | None:
    """How every observed node is read, where ``states`` (S, width) are what joint states say of hidden nodes.

    ``values`` and ``mask`` are a few rows by which features are tried; None where a node has none.
    """
    nodes, sizes = [], []
    for node in structure.graph.observed:
        mechanism = structure.mechanisms[node]
        if mechanism.is_given or node in given:
            continue
        parents = mechanism.family.parents
        if any(not space.is_discrete for _, space in parents):
            return None
        if not mechanism.defines_together("log_prob", "features", "coefficients", "maximised_by"):
            return None
        one = Emission(node, mechanism, *_configurations(parents, states))
        if any(name not in values for name in one.observed):
            return None
        tried = one.features(values, mask)
        if tried is None:
            return None
        nodes.append(one)
        sizes.append(tried.shape[1])
    return Emissions(tuple(nodes), tuple(sizes)) if nodes and sum(sizes) <= MOST_FEATURES else None


def _configurations(
    parents: Sequence[tuple[str, object]], states: Mapping[str, Tensor]
) -> tuple[Tensor, tuple[str, ...]]:
    """Row of a table for each hidden state and configuration of observed parents (S, O), and the latter's names."""
    many = len(next(iter(states.values())))
    observed = [(name, space.width) for name, space in parents if name not in states]  # type: ignore[attr-defined]
    total = math.prod(width for _, width in observed)
    code, stride = torch.zeros(many, total, dtype=torch.long), total
    for name, space in parents:
        width: int = space.width  # type: ignore[attr-defined]
        if name in states:
            digit = states[name].argmax(-1).unsqueeze(-1)
        else:
            stride //= width
            digit = (torch.arange(total) // stride % width).unsqueeze(0)
        code = code * width + digit
    return code, tuple(name for name, _ in observed)
