r"""The transport cost between rows and weighted points of the model, in units of the data's spread.

The ground cost is a distance of rows whose numbers are divided by their spread and whose categories are one apart.
Sliced along directions, it costs a sort of the points, since the rows are sorted once,

.. math:: SW_p^p = \frac1K \sum_k \int_0^1 |F_k^{-1}(u) - G_{k,\theta}^{-1}(u)|^p \, du,

where a direction reads one neighbourhood of the graph: a node with its parents and children. This is the paper's
localisation: what no neighbourhood shows, such as dependence of nodes far apart, is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.divergences import SlicedWasserstein
from otpdag.divergences.base import AbstractDivergence
from otpdag.errors import ModelError
from otpdag.structure import Structure

MOST_LEVELS = 8192  # levels at which a quantile function of rows is kept; of more rows, means between levels
CONSISTENT_MAD = 1.4826  # median absolute deviation to standard deviation of a normal variable


@dataclass(frozen=True)
class Columns:
    """Where the coordinates of each observed node lie among all (d,), and their centres and spreads."""

    places: Mapping[str, slice]
    centre: Tensor
    spread: Tensor
    paths: Mapping[str, int] = field(default_factory=dict)
    """Nodes that are paths, which are compared by windows of so many steps."""
    windows: int = 1
    """Of each row."""

    @classmethod
    def of(cls, structure: Structure, batch: Batch, window: int = 1) -> Columns:
        """Median and spread of the cells that are seen; categories are one apart wherever they differ."""
        places, centres, spreads, begin = {}, [], [], 0
        paths, windows = _paths(structure, window)
        for node in structure.graph.observed:
            space = structure.mechanisms[node].space
            places[node] = slice(begin, begin := begin + paths.get(node, space.width))
            if space.is_discrete:
                centres.append(batch.weight.new_zeros(space.width))
                spreads.append(batch.weight.new_full((space.width,), math.sqrt(2.0)))
                continue
            value, mask = batch.values[node][0], batch.mask[node][0]
            if node in paths:
                seen = value[mask.expand_as(value)].unsqueeze(-1).to(batch.weight).expand(-1, paths[node])
            else:
                seen = value[mask.all(-1)].to(batch.weight)
            centre = seen.median(0).values
            mad = CONSISTENT_MAD * (seen - centre).abs().median(0).values
            spread = torch.where(mad > 0, mad, seen.std(0, correction=0))
            centres.append(centre)
            spreads.append(torch.where(spread > 0, spread, 1.0))
        return cls(places, torch.cat(centres), torch.cat(spreads), paths, windows)

    def of_values(self, values: Mapping[str, Tensor]) -> Tensor:
        """Values (R or 1, M, width) of the observed nodes as rows (R or 1, M, d), or as all windows of these."""
        return (self.side_by_side(values) - self.centre) / self.spread

    def side_by_side(self, values: Mapping[str, Tensor]) -> Tensor:
        """The same in the units in which they come; also of masks (R or 1, M, cells)."""
        own = [self._windows_of(node, values[node]) for node in self.places]
        shape = np.broadcast_shapes(*(value.shape[:-1] for value in own))
        return torch.cat([value.expand(*shape, -1) for value in own], -1).flatten(-3, -2)

    def _windows_of(self, node: str, value: Tensor) -> Tensor:
        """Values (R, M, width) as windows (R, M, W or 1, steps), or as they are."""
        if node in self.paths:
            return value.unfold(-1, self.paths[node], 1)
        width = self.places[node].stop - self.places[node].start
        return value.expand(*value.shape[:-1], width).unsqueeze(-2).expand(*value.shape[:-1], self.windows, width)

    def of_weights(self, weight: Tensor) -> Tensor:
        """Weights (R, M) of rows as those of all their windows."""
        return weight if self.windows == 1 else weight.repeat_interleave(self.windows, -1) / self.windows


def _paths(structure: Structure, window: int) -> tuple[dict[str, int], int]:
    """Steps of a window of each observed node that is a path, and how many windows a row has."""
    mechanisms = structure.mechanisms
    paths = {n: mechanisms[n].space.width for n in structure.graph.observed if getattr(mechanisms[n], "path", False)}
    if len(set(paths.values())) > 1:
        raise ModelError(f"paths must have the same number of steps to be compared; got {paths}")
    length = max(paths.values(), default=1)
    return dict.fromkeys(paths, min(window, length)), length - min(window, length) + 1 if paths else 1


def neighbourhoods(structure: Structure) -> list[tuple[str, ...]]:
    """Observed nodes that are compared together: each node's with its parents and children, unless others hold them."""
    graph = structure.graph
    near = [{node, *graph.parents(node), *graph.children(node)} & set(graph.observed) for node in graph.order]
    kept = [one for one in near if one and not any(one < other for other in near)]
    return list(dict.fromkeys(tuple(n for n in graph.order if n in one) for one in kept))


def directions(
    groups: Sequence[Sequence[slice]], width: int, sliced: SlicedWasserstein, seed: int, most: int = 6
) -> Tensor:
    """Unit vectors (width, K), each along the columns of at ``most`` so many nodes of a group; a line has only one."""
    if width == 1:
        return torch.ones(1, 1)
    generator = np.random.default_rng(seed if sliced.seed is None else sliced.seed)
    vectors = np.zeros((width, sliced.projections))
    for number in range(sliced.projections):
        group = groups[number % len(groups)]
        for at in generator.permutation(len(group))[:most]:
            vectors[group[at], number] = generator.normal(size=group[at].stop - group[at].start)
    return torch.from_numpy(vectors / np.linalg.norm(vectors, axis=0))


@dataclass(frozen=True)
class ComparedRows:
    """Rows (R or 1, N, d) with weights (R or 1, N), or one for each direction (1, K, N), ready to be compared."""

    rows: Tensor
    weight: Tensor
    divergence: AbstractDivergence
    directions: Tensor

    def cost(self, points: Tensor, weight: Tensor) -> Tensor:
        """The transport cost (R,) to points (R or 1, M, d) with weights (R or 1, M)."""
        if not isinstance(self.divergence, SlicedWasserstein):
            return self.divergence(self.rows, points, self.weight, weight)
        return self._quantiles.cost((points @ self.directions).mT, weight, self.divergence.p).mean(-1)

    @cached_property
    def _quantiles(self) -> Quantiles:
        return Quantiles.of((self.rows @ self.directions).mT, self.weight)


@dataclass(frozen=True)
class Quantiles:
    """Step quantile functions of rows along directions: values (R or 1, K, L), each up to a level (R or 1, K, L)."""

    values: Tensor
    ends: Tensor
    is_even: bool
    """Whether levels are evenly spaced, so that places among them need no search."""

    @classmethod
    def of(cls, along: Tensor, weight: Tensor) -> Quantiles:
        """Sort rows (R or 1, K, N) with weights (R or 1, [K,] N) once; of many, keep means between even levels."""
        values, ends = _sorted_steps(along, weight / weight.sum(-1, keepdim=True))
        exact = cls(values, ends, is_even=bool((weight == weight.flatten()[0]).all()))
        if values.shape[-1] <= MOST_LEVELS:
            return exact
        even = (torch.arange(1, MOST_LEVELS + 1).to(values) / MOST_LEVELS).expand(*ends.shape[:-1], -1)
        until = exact.integral(even.contiguous())
        return cls(torch.diff(until, prepend=torch.zeros_like(until[..., :1])) * MOST_LEVELS, even, is_even=True)

    def cost(self, points: Tensor, weight: Tensor, p: float) -> Tensor:
        r"""One-dimensional transport costs (R, K) to points (R or 1, K, M) with weights (R or 1, M).

        A point y takes the mass of the rows between two levels, where the quantile function q crosses it at most once:

        .. math:: \int_s^t |q - y| = \int_c^t q - \int_s^c q + y (2 c - s - t), \qquad q(c) = y.
        """
        points, ends = _sorted_steps(points, weight)
        shape = np.broadcast_shapes(points.shape, (*self.values.shape[:-1], 1))
        points, ends = points.expand(shape), ends.clamp(max=1.0).expand(shape)
        begins, until = _shifted(ends), self.integral(ends)
        before = _shifted(until)
        if p == 2:
            square = (self.values.square() * (self.ends - self._starts)).sum(-1)
            return square + (points * (points * (ends - begins) - 2 * (until - before))).sum(-1)
        below = torch.searchsorted(self._on(self.values, shape).contiguous(), points.detach().contiguous())
        levels = torch.cat([self._starts, self.ends[..., -1:]], -1)
        crossing = torch.minimum(torch.maximum(self._on(levels, shape).gather(-1, below), begins), ends)
        return (points * (2 * crossing - begins - ends) + until + before - 2 * self.integral(crossing)).sum(-1)

    def integral(self, level: Tensor) -> Tensor:
        """The integral of the quantile functions from zero to levels (R, K, M)."""
        many, at = self.values.shape[-1], level.detach()
        if self.is_even:
            index = (at * many).long().clamp(max=many - 1)
        else:
            index = torch.searchsorted(self._on(self.ends, at.shape).contiguous(), at.contiguous()).clamp(max=many - 1)
        own = (self._on(one, at.shape).gather(-1, index) for one in (self.values, self._starts, self._sums))
        value, start, sums = own
        return sums + value * (level - start)

    @cached_property
    def _starts(self) -> Tensor:
        """Levels at which steps begin."""
        return _shifted(self.ends)

    @cached_property
    def _sums(self) -> Tensor:
        """Integrals up to where steps begin."""
        return _shifted((self.values * (self.ends - self._starts)).cumsum(-1))

    @staticmethod
    def _on(own: Tensor, shape: tuple[int, ...]) -> Tensor:
        return own.expand(*shape[:-1], -1)


def _sorted_steps(along: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values (R or 1, K, N) in order, and levels up to which each is the quantile; numpy sorts faster than torch."""
    order = torch.from_numpy(np.argsort(along.detach().cpu().numpy(), -1)).to(along.device)
    shape = np.broadcast_shapes(along.shape, (len(weight), 1, 1))
    own = (weight.unsqueeze(-2) if weight.ndim == 2 else weight).expand(shape).gather(-1, order.expand(shape))
    return along.gather(-1, order).expand(shape), own.cumsum(-1)


def _shifted(ends: Tensor) -> Tensor:
    """Where steps begin, from where they end."""
    return torch.cat([torch.zeros_like(ends[..., :1]), ends[..., :-1]], -1)
