"""Nodes that are alike, evaluated together: twins differ in their names, their parameters and their units only.

A graph of a thousand columns has few kinds of nodes. What a mechanism computes from natural parameters does not depend
on the node's name, so twins stand side by side on the replica axis; from raw to natural parameters their units differ,
over which one call is mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.backward.elimination.families import FamilyView
from otpdag.mechanisms.base import Mechanism
from otpdag.structure import Structure, parameter_places

__all__ = ["Twins", "find_twins"]


@dataclass(frozen=True, eq=False)
class Twins:
    """Families of one kind.

    Attributes:
        families: The families; the first stands for all.
        columns: For each learned parameter the columns of a flat point that hold it (n, *shape).
        units: What was read off their data, stacked (n, ...).
    """

    families: tuple[FamilyView, ...]
    columns: Mapping[str, Tensor]
    units: Mapping[str, Tensor]

    def naturals(self, point: Tensor) -> dict[str, Tensor]:
        """Natural parameters (R * n, ...) at ``point`` (R, P), replica by replica."""
        return self.natural({name: point[:, at] for name, at in self.columns.items()}, point)

    def natural(self, raw: Mapping[str, Tensor], like: Tensor | None = None) -> dict[str, Tensor]:
        """Natural parameters (R * n, ...) from raw ones (R, n, ...); ``like`` (R, P) where none are learned."""
        like = next(iter(raw.values())) if like is None else like
        many, mechanism = len(self.families), self.families[0].mechanism
        if many == 1 or not raw:
            single = mechanism.natural({name: value.squeeze(1) for name, value in raw.items()})
            return {k: v.to(like).expand(len(like) * many, *v.shape[1:]) for k, v in single.items()}

        named = self.mapped(lambda own, one: own.natural(one), raw)
        return {name: value.expand(len(like), many, *value.shape[2:]).flatten(0, 1) for name, value in named.items()}

    def mapped(
        self, asked: Callable[[Mechanism, dict[str, Tensor]], dict[str, Tensor]], given: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What each twin answers (R, n, ...), asked with its part of what is given (R, n, ...), in one call for all."""
        mechanism = self.families[0].mechanism
        if len(self.families) == 1:
            answer = asked(mechanism, {name: value.squeeze(1) for name, value in given.items()})
            return {name: value.unsqueeze(1) for name, value in answer.items()}

        def one(own: dict[str, Tensor], units: dict[str, Tensor]) -> dict[str, Tensor]:
            return asked(mechanism.with_data_units(units), own)

        mapped: dict[str, Tensor] = torch.func.vmap(one, (1, 0), out_dims=1)(dict(given), dict(self.units))
        return mapped

    def some(self, numbers: Sequence[int]) -> Twins:
        """Some of them."""
        if len(numbers) == len(self.families):
            return self
        at = list(numbers)
        columns = {name: value[at] for name, value in self.columns.items()}
        return Twins(tuple(self.families[n] for n in at), columns, {name: v[at] for name, v in self.units.items()})


def find_twins(
    structure: Structure, families: Sequence[FamilyView], shapes: Mapping[str, tuple[int, ...]]
) -> list[Twins]:
    """Sort families into kinds; one whose units cannot be mapped over stands alone.

    ``shapes`` are those of all parameters of a flat point, in their order.
    """
    places = parameter_places(shapes)
    total = sum(place.numel() for place in places.values())
    kinds: dict[str, list[FamilyView]] = {}
    for family in families:
        kinds.setdefault(_kind(family), []).append(family)
    twins_of_all = []
    for alike in kinds.values():
        twins = _stacked(structure, alike, places)
        serves = len(alike) == 1 or _can_be_mapped(twins, total)
        twins_of_all += [twins] if serves else [_stacked(structure, [one], places) for one in alike]
    return twins_of_all


def _kind(family: FamilyView) -> str:
    """Equal for families that differ in names, parameters and units only."""
    mechanism = family.mechanism
    learned = {name: (parameter.shape, parameter.learned) for name, parameter in mechanism.declared().items()}
    units = {name: tuple(value.shape) for name, value in mechanism.data_units().items()}
    return repr((family.kind, learned, units))


def _stacked(structure: Structure, families: Sequence[FamilyView], places: Mapping[str, Tensor]) -> Twins:
    keys = [structure.keys[family.node] for family in families]
    columns = {name: torch.stack([places[own[name]] for own in keys]) for name in keys[0]}
    units = [family.mechanism.data_units() for family in families]
    return Twins(tuple(families), columns, {name: torch.stack([own[name] for own in units]) for name in units[0]})


def _can_be_mapped(twins: Twins, size: int) -> bool:
    """Whether a mechanism's natural parameters are computed without looking at single numbers."""
    try:
        twins.naturals(torch.zeros(1, size, dtype=torch.float64))
    except RuntimeError:
        return False
    return True
