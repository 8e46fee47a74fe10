r"""One step of Newton's method up the expected log-density of nodes that have no maximiser, twins together.

A sample of the rows tells the curvature. Its height is tilted until its gradient is that of all rows: of those that
show the family, and by ``slopes`` (in natural parameters) of those on points. What would go down stays. Twins
(:mod:`~otpdag.backward.twins`) stand side by side on the replica axis, their rows filled up with some that have no
weight: a thousand nodes of ten kinds take ten steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from otpdag.backward.elimination.families import FamilyView
from otpdag.backward.elimination.family_statistics import CHUNK, Rows, Statistics, WeighedRows, weighed
from otpdag.backward.twins import Twins
from otpdag.mechanisms.base import Params
from otpdag.structure import pack, unpack

__all__ = ["newton_step"]

FLATTEST = 1e-9
"""The smallest curvature, relative to the largest, by which a step is divided."""

FLATTEST_OF_SAMPLE = 2e-3
"""The same where a sample tells the curvature: what it does not show is no rarer than this."""

SIZES = (1.0, 0.25, 0.05)
"""Shares of a step that are tried, the largest first."""


class _Evidence(Protocol):
    """What rows say of n twins in R replicas."""

    @property
    def flattest(self) -> Tensor:
        """The smallest curvature, relative to the largest (R * n or 1, 1)."""
        ...

    def height(self, params: Params) -> Tensor:
        """The sum of all log-densities (R * n,), or its estimate from a sample."""
        ...

    def parts(self, params: Params) -> Iterator[tuple[Tensor, Tensor]]:
        """Sums of log-densities (R * n,) over rows that show the family, and over others."""
        ...


def newton_step(
    twins: Twins,
    raw: Mapping[str, Tensor],
    statistics: Mapping[str, tuple[Statistics, ...]],
    slopes: Mapping[tuple[str, str], Tensor],
) -> tuple[dict[str, Tensor], Tensor]:
    """Raw parameters (R, n, ...) of n twins, moved up; and the log-density of all rows that show their families (R,).

    Args:
        twins: The nodes.
        raw: Where they are (R, n, ...).
        statistics: What rows say of each node's family.
        slopes: The gradient of the expected log-density of rows on points, by node and natural parameter (R, ...).
    """
    some = next(iter(raw.values()))
    after = {name: value.clone() for name, value in raw.items()}
    shown = torch.zeros(len(some)).to(some)
    for numbers, evidence in _grouped(twins, statistics, len(some)):
        nodes = [twins.families[number].node for number in numbers]
        names = [name for node, name in slopes if node == nodes[0]]
        slope = {name: torch.stack([slopes[node, name] for node in nodes], 1).flatten(0, 1) for name in names}
        own = {name: value[:, numbers] for name, value in raw.items()}
        reached, complete = _step(twins.some(numbers), own, evidence, slope)
        for name, value in reached.items():
            after[name][:, numbers] = value
        shown = shown + complete.reshape(len(some), -1).sum(-1)
    return after, shown


def _grouped(
    twins: Twins, statistics: Mapping[str, tuple[Statistics, ...]], replicas: int
) -> list[tuple[list[int], _Evidence]]:
    """Numbers of twins whose rows can stand side by side, within memory; alone others that rows tell something of."""
    groups: list[tuple[list[int], _Evidence]] = []
    waiting: list[tuple[int, Rows]] = []
    for number, family in enumerate(twins.families):
        own = statistics[family.node]
        if len(own) == 1 and isinstance(own[0], Rows) and own[0].can_be_stacked:
            waiting.append((number, own[0]))
        elif own:
            groups.append(([number], _Alone(own)))
    size = sum(columns[0].numel() for columns in twins.columns.values())
    shown, sampled = (max((one.sizes[i] for _, one in waiting), default=1) for i in (0, 1))
    many = max(1, CHUNK // (replicas * max(shown, size * sampled)))  # a curvature looks at a copy for each parameter
    for at in range(0, len(waiting), many):
        together = waiting[at : at + many]
        groups.append(([n for n, _ in together], _SideBySide.of([one for _, one in together], replicas)))
    return groups


@dataclass(frozen=True)
class _Alone:
    """The statistics of one node."""

    statistics: Sequence[Statistics]

    @property
    def flattest(self) -> Tensor:
        thinned = any(isinstance(one, Rows) and one.thinned for one in self.statistics)
        return torch.tensor([[FLATTEST_OF_SAMPLE if thinned else FLATTEST]])

    def height(self, params: Params) -> Tensor:
        replicas = max(len(value) for value in params.values())
        return torch.stack([one.height(params).expand(replicas) for one in self.statistics]).sum(0)

    def parts(self, params: Params) -> Iterator[tuple[Tensor, Tensor]]:
        return (part for one in self.statistics for part in one.parts(params))


@dataclass(frozen=True)
class _SideBySide:
    """Rows of several twins (R * n, rows), by the names that the first gives to its parents."""

    family: FamilyView
    sample: WeighedRows
    complete: WeighedRows
    flattest: Tensor

    @classmethod
    def of(cls, parts: Sequence[Rows], replicas: int) -> _SideBySide:
        families = [part.family for part in parts]
        samples = [part.sample[0] for part in parts if part.sample]
        complete = _stacked(families, [part.shown() for part in parts], replicas)
        flattest = torch.tensor([FLATTEST_OF_SAMPLE if part.thinned else FLATTEST for part in parts])
        sample = _stacked(families, samples, replicas)
        return cls(families[0], sample, complete, flattest.repeat(replicas).unsqueeze(-1))

    def height(self, params: Params) -> Tensor:
        return self._sum(params, self.sample)

    def parts(self, params: Params) -> Iterator[tuple[Tensor, Tensor]]:
        shown = self._sum(params, self.complete)
        yield shown, torch.zeros_like(shown)

    def _sum(self, params: Params, rows: WeighedRows) -> Tensor:
        many = max(len(value) for value in params.values()) // len(rows.weight)
        if many > 1 and len(rows.weight) > 1:  # a curvature looks at several copies of all parameters
            rows = WeighedRows({k: v.repeat(many, 1, 1) for k, v in rows.values.items()}, rows.weight.repeat(many, 1))
        return weighed(rows.weight, self.family.log_prob(params, rows.values))


def _stacked(families: Sequence[FamilyView], parts: Sequence[WeighedRows], replicas: int) -> WeighedRows:
    """Rows of twins (R * n, most rows, width), replica by replica; what fills them up is a row of their own."""
    most = max(part.weight.shape[1] for part in parts)

    def filled(value: Tensor, *, empty: bool) -> Tensor:
        value = value.expand(replicas, *value.shape[1:])
        short = most - value.shape[1]
        if short == 0:
            return value
        last = value[:, -1:].expand(replicas, short, *value.shape[2:])
        return torch.cat([value, torch.zeros_like(last) if empty else last], 1)

    def side_by_side(values: Sequence[Tensor], *, empty: bool = False) -> Tensor:
        return torch.stack([filled(value, empty=empty) for value in values], 1).flatten(0, 1)

    roles = zip(families[0].names, *(family.names for family in families), strict=True)
    values = {
        name: side_by_side([part.values[own] for part, own in zip(parts, names, strict=True)]) for name, *names in roles
    }
    return WeighedRows(values, side_by_side([part.weight for part in parts], empty=True))


def _step(
    twins: Twins, raw: Mapping[str, Tensor], evidence: _Evidence, slopes: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """Raw parameters (R, n, ...) after a step, and the log-density of rows that show the family (R * n,)."""
    shapes = {name: tuple(value.shape[2:]) for name, value in raw.items()}
    many = len(twins.families)

    def natural(flat: Tensor) -> dict[str, Tensor]:
        parts = unpack(flat, shapes)
        return twins.natural({name: value.unflatten(0, (-1, many)) for name, value in parts.items()})

    def height(flat: Tensor) -> Tensor:
        return evidence.height(natural(flat))

    with torch.enable_grad():
        leaf = pack({name: value.flatten(0, 1) for name, value in raw.items()}).detach().requires_grad_(True)
        params = natural(leaf)
        complete = torch.zeros(len(leaf)).to(leaf)
        exact = torch.zeros(()).to(leaf)
        for shown, expected in evidence.parts(params):
            complete += shown.detach()
            exact = exact + (shown + expected).sum()
        exact = exact + sum((value * slopes[name]).sum() for name, value in params.items() if name in slopes)
        (slope,) = torch.autograd.grad(exact, leaf)
        at_once = len(leaf) == 1 or isinstance(evidence, _SideBySide)
        before, own, curvature = (_curved if at_once else _curved_in_turn)(height, leaf)
    with torch.no_grad():
        step = _newton_direction(slope, curvature, evidence.flattest.to(slope))
        tilt = ((slope - own) * step).sum(-1)
        reached = leaf.detach()
        waiting = torch.ones_like(before, dtype=torch.bool)
        for size in SIZES:
            trial = leaf + size * step
            higher = waiting & (height(trial) + size * tilt >= before)
            reached = torch.where(higher.unsqueeze(-1), trial, reached)
            waiting = waiting & ~higher
            if not bool(waiting.any()):
                break
    return {name: value.unflatten(0, (-1, many)) for name, value in unpack(reached, shapes).items()}, complete


def _newton_direction(slope: Tensor, curvature: Tensor, flattest: Tensor) -> Tensor:
    """The slope (R, P) over the size of the curvature (R, P, P) in each direction."""
    values, vectors = torch.linalg.eigh(-curvature.nan_to_num())
    bend = values.abs().maximum(flattest * values.abs().amax(-1, keepdim=True)).clamp(min=1e-30)
    return (vectors @ ((vectors.mT @ slope.unsqueeze(-1)) / bend.unsqueeze(-1))).squeeze(-1)


def _curved(height: Callable[[Tensor], Tensor], leaf: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A height (R,), its gradient (R, P) and its second derivative (R, P, P) at ``leaf`` (R, P).

    All of it stands P times on the replica axis, so that one pass gives all rows of the second derivative.
    """
    many, size = leaf.shape
    copies = leaf.detach().repeat(size, 1).requires_grad_(True)
    before = height(copies)
    (own,) = torch.autograd.grad(before.sum(), copies, create_graph=True)
    each = own.reshape(size, many, size).diagonal(dim1=0, dim2=2)
    (rows,) = torch.autograd.grad(each.sum(), copies)
    return before[:many].detach(), own[:many].detach(), rows.reshape(size, many, size).transpose(0, 1)


def _curved_in_turn(height: Callable[[Tensor], Tensor], leaf: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same by a pass for each parameter, where rows of several replicas cannot be repeated."""
    before = height(leaf)
    (own,) = torch.autograd.grad(before.sum(), leaf, create_graph=True)
    rows = [torch.autograd.grad(one.sum(), leaf, retain_graph=True)[0] for one in own.unbind(-1)]
    return before.detach(), own.detach(), torch.stack(rows, 1)
