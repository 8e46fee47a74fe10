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
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from otpdag.costs import SumOfCosts, ground_cost
from otpdag.data import Batch
from otpdag.divergences import Sinkhorn, SlicedWasserstein
from otpdag.divergences.base import AbstractDivergence
from otpdag.divergences.sliced import Quantiles
from otpdag.errors import ModelError
from otpdag.matching.model_points import ModelPoints
from otpdag.settings import Direct
from otpdag.structure import Structure

SHORT_LIST = 1024  # different rows up to which lists of states are compared by Sinkhorn's divergence
EPSILON = 0.3  # of its entropic term, as a share of the mean cost: less has kinks again, more tells states less apart
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


def chosen_divergence(direct: Direct, columns: Columns, points: ModelPoints, rows: int) -> AbstractDivergence:
    """What was asked for; if nothing was, Sinkhorn's divergence of short lists, the sliced cost of all else."""
    chosen = direct.divergence
    if chosen is None:
        is_list = rows <= SHORT_LIST and points.is_list
        chosen = Sinkhorn(EPSILON) if is_list or direct.costs else direct.sliced
    if not direct.costs:
        return chosen
    unknown = [node for node in direct.costs if node not in columns.places]
    if unknown:
        raise ModelError(f"costs names node {unknown[0]!r}, which is not observed; these are {list(columns.places)}")
    costs = {node: ground_cost(node, direct.costs.get(node, "squared")) for node in columns.places}
    parts = tuple((place, costs[node]) for node, place in columns.places.items())
    return replace(cast(Any, chosen), cost=SumOfCosts(parts))


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

    def displacements(self, points: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """What each row (R, N) adds to the cost if it weighs a little more, and the cost (R,), their weighted mean.

        They are the dual potentials of the rows: the gradient of the cost in their weights.
        """
        replicas = max(len(one) for one in (self.rows, self.weight, points, weight))
        mass = (self.weight / self.weight.sum(-1, keepdim=True)).expand(replicas, -1).detach().requires_grad_()
        if isinstance(self.divergence, SlicedWasserstein):
            along, points = ((one @ self.directions).mT.detach() for one in (self.rows, points))
            cost = Quantiles.of(points, weight.detach()).cost(along, mass, self.divergence.p).mean(-1)
        else:
            cost = self.divergence(self.rows, points.detach(), mass, weight.detach())
        (potential,) = torch.autograd.grad(cost.sum(), mass)
        mass, cost = mass.detach(), cost.detach()
        return potential - (mass * potential).sum(-1, keepdim=True) + cost.unsqueeze(-1), cost

    def matched(self, points: Tensor, weight: Tensor, price: Tensor, least: float, rounds: int = 16) -> Partial:
        r"""Partial transport: the model is matched with the part of the rows that it can explain.

        .. math:: \min_{0 \le m_i \le 1} \; \bar m \, W_c\Big(\frac{\sum_i m_i \delta_{x_i}}{n \bar m}, P_\theta\Big)
                  + \lambda (1 - \bar m), \qquad \bar m \ge \text{least}

        It is convex in the matched parts m; the steps of Frank and Wolfe (1956) are taken towards the rows whose
        displacement is below the price.

        Args:
            points: Of the model (R or 1, M, d).
            weight: Their weights (R or 1, M).
            price: What leaving out all rows would cost (R,); where it is zero, as much is left out as may be.
            least: The share of the rows that must be matched.
            rounds: Steps.
        """
        share = self.weight / self.weight.sum(-1, keepdim=True)
        parts = torch.ones_like(share).expand(len(price), -1)
        best = Partial(parts, torch.full_like(price, torch.inf), torch.ones_like(price), price)
        for number in range(rounds):
            moved, cost = replace(self, weight=self.weight * parts).displacements(points, weight)
            best = best.or_better(Partial(parts, cost, (parts * share).sum(-1), price))
            order = moved.argsort(-1)
            before = share.expand_as(moved).gather(-1, order).cumsum(-1) - share.expand_as(moved).gather(-1, order)
            must = torch.zeros_like(moved).scatter(-1, order, (before < least).to(moved))
            wanted = torch.maximum(must, (moved <= price.unsqueeze(-1)).to(moved))
            parts = parts + (wanted - parts) * 2 / (number + 3)
        return best


@dataclass(frozen=True)
class Partial:
    """The matched parts (R, N) of rows, the cost (R,) of moving them to the model, and their share of all (R,)."""

    parts: Tensor
    cost: Tensor
    share: Tensor
    price: Tensor

    @property
    def total(self) -> Tensor:
        """The cost with the price of what is left out (R,)."""
        return self.share * self.cost + self.price * (1 - self.share)

    def or_better(self, other: Partial) -> Partial:
        """Of each replica the cheaper one."""
        better = other.total < self.total
        parts = torch.where(better.unsqueeze(-1), other.parts, self.parts)
        cost, share = torch.where(better, other.cost, self.cost), torch.where(better, other.share, self.share)
        return Partial(parts, cost, share, self.price)
