r"""The transport cost between rows and weighted points of the model, in units of the data's spread.

The ground cost is a distance of rows whose numbers are divided by their spread and whose categories are one apart.
Where a node has no density, rows count by normal scores: the extremes of a long tail, which chance moves most, then do
not outweigh all else.
Sliced along directions, it costs a sort of the points, since the rows are sorted once,

.. math:: SW_p^p = \frac1K \sum_k \int_0^1 |F_k^{-1}(u) - G_{k,\theta}^{-1}(u)|^p \, du,

where a direction reads one neighbourhood of the graph: a node with its parents and children. This is the paper's
localisation: what no neighbourhood shows, such as dependence of nodes far apart, is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
from otpdag.divergences.sliced import MergedOrder, Quantiles
from otpdag.errors import ModelError
from otpdag.matching.model_points import ModelPoints
from otpdag.settings import Direct
from otpdag.structure import Structure

SHORT_LIST = 1024  # different rows up to which lists of states are compared by Sinkhorn's divergence
EPSILON = 0.3  # of its entropic term, as a share of the mean cost: less has kinks again, more tells states less apart
CONSISTENT_MAD = 1.4826  # median absolute deviation to standard deviation of a normal variable


@dataclass(frozen=True)
class Columns:
    """Where the coordinates of each observed node lie among all (d,), and their centres and spreads.

    Attributes:
        paths: Nodes that are paths, which are compared by windows of so many steps.
        windows: Of each row.
        scores: Places (d, K) in these units, and the normal scores there; None if units are enough.
    """

    places: Mapping[str, slice]
    centre: Tensor
    spread: Tensor
    paths: Mapping[str, int] = field(default_factory=dict)
    windows: int = 1
    scores: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, structure: Structure, batch: Batch, window: int = 1, *, scored: bool = False) -> Columns:
        """Median and spread of the cells that are seen; categories are one apart wherever they differ."""
        places, centres, spreads, begin = {}, [], [], 0
        curves: list[tuple[Tensor, Tensor]] = []
        paths, windows = _paths(structure, window)
        for node in structure.graph.observed:
            space = structure.mechanisms[node].space
            places[node] = slice(begin, begin := begin + paths.get(node, space.width))
            if space.is_discrete:
                centres.append(batch.weight.new_zeros(space.width))
                spreads.append(batch.weight.new_full((space.width,), math.sqrt(2.0)))
                curves += [_straight(batch.weight)] * space.width
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
            curves += [_normal_scores(column) for column in ((seen - centre) / spreads[-1]).mT]
        own = cls(places, torch.cat(centres), torch.cat(spreads), paths, windows)
        return replace(own, scores=_stacked(curves)) if scored and not paths else own

    def of_values(self, values: Mapping[str, Tensor]) -> Tensor:
        """Values (R or 1, M, width) of the observed nodes as rows (R or 1, M, d), or as all windows of these."""
        rows = (self.side_by_side(values) - self.centre) / self.spread
        if self.scores is None:
            return rows
        columns = rows.movedim(-1, 0).flatten(1).contiguous()
        at = torch.searchsorted(self.scores[0], columns.detach()).clamp(1, self.scores[0].shape[-1] - 1)
        (left, low), (right, high) = ([one.gather(-1, at - back) for one in self.scores] for back in (1, 0))
        found = low + (columns - left) * (high - low) / (right - left)
        return found.unflatten(1, rows.shape[:-1]).movedim(0, -1)

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


def _stacked(curves: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([places for places, _ in curves]), torch.stack([scores for _, scores in curves])


def _straight(like: Tensor, knots: int = 16) -> tuple[Tensor, Tensor]:
    """A curve that leaves all values as they are."""
    places = torch.arange(knots).to(like)
    return places, places


def _normal_scores(column: Tensor) -> tuple[Tensor, Tensor]:
    """A curve (K,), (K,) from a column to its normal scores, of few lines: finer ones would follow its noise.

    Where values repeat too often for it to rise everywhere, it leaves them as they are.
    """
    straight = _straight(column)
    last = float(torch.special.ndtri(torch.tensor(1 - 0.5 / len(column), dtype=torch.float64)))
    scores = torch.linspace(-last, last, len(straight[0])).to(column)
    levels = torch.special.ndtr(scores).numpy()
    places = torch.from_numpy(np.quantile(column.numpy(), levels, method="hazen")).to(column)
    return (places, scores) if bool((places.diff() > 0).all()) else straight


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
        chosen = Sinkhorn(EPSILON) if is_list or direct.costs else direct.sliced(len(columns.places))
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

    @property
    def name(self) -> str:
        """What a note calls the transport cost."""
        if isinstance(self.divergence, SlicedWasserstein):
            even = torch.allclose(norms := self.directions.norm(dim=0), torch.ones_like(norms))
            weighed = "" if even else ", weighed by what they tell"
            return f"W{self.divergence.p:g} along {self.directions.shape[-1]} directions{weighed}"
        return "Sinkhorn's divergence of whole rows"

    def cost(self, points: Tensor, weight: Tensor) -> Tensor:
        """The transport cost (R,) to points (R or 1, M, d) with weights (R or 1, M)."""
        if not isinstance(self.divergence, SlicedWasserstein):
            return self.divergence(self.rows, points, self.weight, weight)
        return self._quantiles.cost((points @ self.directions).mT, weight, self.divergence.p).mean(-1)

    def shares(self, points: Tensor, weight: Tensor) -> Tensor | None:
        """How much of each row (R, N) an unbalanced plan moves to points (R or 1, M, d); None if all must be moved."""
        if not isinstance(self.divergence, Sinkhorn) or self.divergence.unbalanced is None:
            return None
        own = self.weight / self.weight.sum(-1, keepdim=True)
        return self.divergence.matched(self.rows, points.detach(), own, weight.detach()).clamp(max=1.0)

    @cached_property
    def _quantiles(self) -> Quantiles:
        return Quantiles.of((self.rows @ self.directions).mT, self.weight)

    def matchings(self, points: Tensor, weight: Tensor) -> list[Matching]:
        """Partial transport to points (R or 1, M, d) with weights (R or 1, M): a problem for each replica."""
        sides = (self.rows, self.weight, points.detach(), weight.detach())
        each = ([side[one % len(side)] for side in sides] for one in range(max(map(len, sides))))
        return [Matching(self._potentials(rows, *model), mass / mass.sum()) for rows, mass, *model in each]

    def _potentials(self, rows: Tensor, points: Tensor, weight: Tensor) -> Potentials:
        """What rows (N, d) of masses (N,) that sum to one add to the cost if they weigh more, and the cost."""
        divergence, sliced = self.divergence, isinstance(self.divergence, SlicedWasserstein)
        along, to = ((one @ self.directions).mT for one in (rows, points)) if sliced else (rows, points)
        if isinstance(divergence, SlicedWasserstein) and divergence.p == 1:
            return MergedOrder.of(along, to, weight).potentials

        def differentiated(mass: Tensor) -> tuple[Tensor, Tensor]:
            leaf = mass.detach().requires_grad_()
            if isinstance(divergence, SlicedWasserstein):
                cost = Quantiles.of(to[None], weight[None]).cost(along[None], leaf[None], divergence.p).mean()
            else:
                cost = divergence(rows[None], points[None], leaf[None], weight[None])[0]
            return torch.autograd.grad(cost, leaf)[0], cost.detach()

        return differentiated

    def matched(self, points: Tensor, weight: Tensor, left_out: Tensor, rounds: int = 16) -> Partial:
        """Partial transport of all replicas, each with at most such a share (R,) of the rows left out."""
        problems = self.matchings(points, weight)
        each = [problems[one % len(problems)].leaving(float(share), rounds) for one, share in enumerate(left_out)]
        return Partial(*(torch.stack([getattr(one, name) for one in each]) for name in ("parts", "cost", "share")))


Potentials = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Matching:
    r"""The model is matched with the part of the rows, of masses ``share`` (N,), that it can explain.

    .. math:: \min_{0 \le m_i \le 1} \; \bar m \, W_c\Big(\frac{\sum_i m_i \delta_{x_i}}{n \bar m}, P_\theta\Big),
              \qquad \bar m \ge 1 - s

    It is convex in the matched parts m; the steps of Frank and Wolfe (1956) are taken towards the rows of the lowest
    dual potentials.
    """

    potentials: Potentials
    share: Tensor

    def leaving(self, left_out: float, rounds: int = 16) -> Partial:
        """The best after so many steps with at most such a share s left out."""
        parts, best = torch.ones_like(self.share), None
        for number in range(rounds if left_out > 0 else 1):
            mass = self.share * parts
            potential, cost = self.potentials(mass / mass.sum())
            found = Partial(parts, cost, mass.sum())
            best = found if best is None or found.total < best.total else best
            order = potential.argsort()
            before = self.share[order].cumsum(0) - self.share[order]
            kept = ((1 - left_out - before) / self.share[order].clamp(min=1e-300)).clamp(0, 1)
            parts = parts + (torch.zeros_like(parts).scatter(0, order, kept) - parts) * 2 / (number + 3)
        assert best is not None, "at least one round"
        return best

    def costs(self, left_out: Tensor) -> Tensor:
        """Costs (G,) with at most such rising shares (G,) left out; once they do not fall any more, the last."""
        found: list[Tensor] = []
        for share in left_out.tolist():
            cost = self.leaving(share, rounds=12).cost
            if found and not cost < found[-1]:
                break
            found.append(cost)
        return torch.stack(found + found[-1:] * (len(left_out) - len(found)))


@dataclass(frozen=True)
class Partial:
    """The matched parts (..., N) of rows, the cost (...) of moving them to the model, and their share of all (...)."""

    parts: Tensor
    cost: Tensor
    share: Tensor

    @property
    def total(self) -> Tensor:
        """The cost of the whole mass that is moved."""
        return self.share * self.cost


def least_left_out(left_out: Tensor, costs: Tensor, enough: float | Tensor) -> Tensor:
    """The share (...) at which falling costs (..., G) at rising shares (G,) come down to ``enough``.

    Where they never do, the largest share and what is missing; where they always are, minus what is to spare.

    >>> shares = torch.tensor([0.0, 0.1, 0.2])
    >>> least_left_out(shares, torch.tensor([[3.0, 1.0, 1.0], [1.5, 1.0, 1.0], [9.0, 9.0, 3.0]]), 2.0)
    tensor([ 0.0500, -0.5000,  1.2000])
    """
    enough = torch.as_tensor(enough).to(costs)[..., None]
    at = (costs > enough).sum(-1, keepdim=True).clamp(1, len(left_out) - 1)
    before, after = costs.gather(-1, at - 1), costs.gather(-1, at)
    within = left_out[at - 1] + (left_out[at] - left_out[at - 1]) * (before - enough) / (before - after)
    spare, missing = costs[..., :1] - enough, costs[..., -1:] - enough
    found = torch.where(missing > 0, left_out[-1] + missing, within)
    return torch.where(spare <= 0, spare, found)[..., 0]
