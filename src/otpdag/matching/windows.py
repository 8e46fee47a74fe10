r"""Sequences against the model, by optimal transport between short windows of both.

.. math:: W_c\big(P_{data}(x_t, \dots, x_{t+w-1}), P_\theta(x_t, \dots, x_{t+w-1})\big),

averaged over the times :math:`t` of all windows. Two steps already tell transitions and emissions apart; the first
windows are compared by themselves, for they tell how a sequence begins.

The model's windows are all paths of hidden states, with the law of the state at time t by powers of the transition
matrix; what is observed comes from fixed noise along each path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from otpdag.data.sequences import SequenceBatch
from otpdag.errors import ModelError
from otpdag.likelihood.chain_layout import HiddenFamilies, States, joint_states
from otpdag.matching.model_points import ModelPoints, even_noise, even_share
from otpdag.matching.transport_cost import Columns, ComparedRows, directions
from otpdag.matching.transport_rows import FEWEST_EFFECTIVE
from otpdag.problem import Batched, LossTerms, Pace, Refinement
from otpdag.settings import Direct
from otpdag.structure import Shapes, Structure

MOST_PATHS = 1024  # paths of states through a window; windows are shorter where there would be more
FEWEST_FIRST = 30  # sequences whose first windows are compared by themselves: fewer say little
MOST_WINDOWS = 20_000  # windows that are sorted along each direction; of more, random ones


@dataclass(frozen=True)
class Stratum:
    """Windows that begin at some times: how the times are spread (T,), and their share of all windows."""

    compared: ComparedRows
    times: Tensor
    share: float


@dataclass(frozen=True)
class TransportWindows(Batched):
    """Sequences as windows of a few steps, compared with the model's own windows.

    Attributes:
        paths: (P, length) states.
        points: Of each step of a window: what is observed, with the states of all paths given.
    """

    batch: SequenceBatch
    direct: Direct
    seed: int
    columns: Columns
    states: States
    paths: Tensor
    points: tuple[ModelPoints, ...]
    strata: tuple[Stratum, ...]

    def loss(self, point: Tensor) -> LossTerms:
        """The transport cost, each stratum by its share of the windows."""
        naturals = self.naturals(point)
        steps = [one.at(naturals) for one in self.points]
        shown = [self.columns.of_values(values) for values, _ in steps]
        shape = np.broadcast_shapes(*(one.shape[:-1] for one in shown))
        windows = torch.cat([one.expand(*shape, -1) for one in shown], -1)
        first, moves = (torch.exp(logs) for logs in self._hidden.potentials(naturals))
        log_weight = torch.stack(torch.broadcast_tensors(*(own for _, own in steps))).sum(0)
        along = moves[:, self.paths[:, :-1], self.paths[:, 1:]].log().sum(-1)
        total = log_weight.new_zeros(1)
        for stratum in self.strata:
            law = _law_over(first, moves, stratum.times.to(first))[:, self.paths[:, 0]].log() + along
            each = log_weight.shape[-1] // len(self.paths)
            weight = torch.softmax(log_weight + law.repeat_interleave(each, -1), -1)
            total = total + stratum.share * stratum.compared.cost(windows, weight)
        return LossTerms.of(total, direct=total)

    @cached_property
    def _hidden(self) -> HiddenFamilies:
        return HiddenFamilies.of(self.structure, self.states)

    @property
    def pace(self) -> Pace:
        """Drawn points serve for some steps."""
        return Pace(steps=self.direct.steps if self.points[0].must_be_drawn else None)

    def notes(self, point: Tensor | None = None) -> tuple[str, ...]:
        """Whether steps with gaps took part."""
        gaps = point is not None and any(not bool(mask.all()) for mask in self.batch.steps.mask.values())
        said = "windows with gaps were left out, which is right if gaps do not depend on any value"
        return (f"{said}: method='likelihood' sums over what they miss",) if gaps else ()

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> TransportWindows:
        """About so many steps, or these sequences; fewer points if ``coarse``."""
        direct = replace(self.direct, points=max(1, self.direct.size(1) // 4)) if coarse else self.direct
        part = self.batch.part(rows, self.seed)
        return transport_windows(self.structure, part, self.shapes, direct, self.seed)

    def laid_out_for(self, points: Tensor) -> Self:
        """Categories and counts drawn at these replicas, unless they still count there."""
        naturals = self.naturals(points.detach())
        if all(one.fits(len(points)) and one.effective(naturals) >= FEWEST_EFFECTIVE for one in self.points):
            return self
        return replace(self, points=tuple(one.placed_at(naturals) for one in self.points))

    def refine(self, point: Tensor) -> Refinement | None:
        """Categories and counts drawn at the estimate."""
        if not self.points[0].must_be_drawn:
            return None
        own = replace(self, points=tuple(one.placed_at(self.naturals(point.detach())) for one in self.points))
        with torch.no_grad():
            return Refinement(own, point.detach(), "drawn points", own.loss(point).total)


def transport_windows(
    structure: Structure, batch: SequenceBatch, shapes: Shapes, direct: Direct, seed: int
) -> TransportWindows:
    """Choose units, directions and points; the same seed chooses alike."""
    check_windows(structure)
    if direct.unmatched or direct.costs:
        raise ModelError("costs and unmatched are of tables: windows of sequences are compared as they are")
    states = joint_states(structure, [n for n in structure.graph.order if n in structure.graph.hidden])
    length = max(w for w in range(1, direct.window + 1) if w == 1 or states.size**w <= MOST_PATHS)
    length = min(length, int(batch.lengths.max()))
    paths = torch.cartesian_prod(*[torch.arange(states.size)] * length).reshape(-1, length)
    columns = Columns.of(structure, batch.steps)
    width = len(columns.spread)
    group = [slice(s * width + p.start, s * width + p.stop) for s in range(length) for p in columns.places.values()]
    sliced = direct.sliced(len(group))
    along = directions([group], length * width, sliced, seed).to(batch.steps.weight)
    strata = []
    is_first = (batch.times == 0) & (len(batch.lengths) >= FEWEST_FIRST)
    for chosen in (is_first, ~is_first):
        rows = _whole_windows(batch, chosen, length, seed)
        if len(rows):
            shown = columns.of_values(batch.steps.values)[0]
            windows = torch.cat([shown[rows + offset] for offset in range(length)], -1).unsqueeze(0)
            weight = batch.steps.weight[:1, rows]
            times = torch.bincount(batch.times[rows], weight[0])
            compared = ComparedRows(windows, weight, direct.divergence or sliced, along)
            strata.append(Stratum(compared, times / times.sum(), float(weight.sum() / batch.steps.weight[:1].sum())))
    if not strata:
        raise ModelError(
            f"transport compares windows of {length} steps, and every one has a gap: use method='likelihood'"
        )
    points = _points(structure, states, paths, direct, seed, batch.steps.weight[:1])
    return TransportWindows(structure, batch, shapes, direct, seed, columns, states, paths, points, tuple(strata))


def _points(
    structure: Structure, states: States, paths: Tensor, direct: Direct, seed: int, like: Tensor
) -> tuple[ModelPoints, ...]:
    """Points of every step of a window: as many for each path."""
    each = even_share(direct.size(1), len(paths))
    size, observed = each * len(paths), structure.graph.observed
    return tuple(
        ModelPoints(
            structure,
            size,
            noise,
            {},
            {n: v[paths[:, step]].repeat_interleave(each, 0).unsqueeze(0).to(like) for n, v in states.now.items()},
        )
        for step, noise in enumerate(even_noise(structure, observed, size, seed, like, times=paths.shape[1]))
    )


def _whole_windows(batch: SequenceBatch, chosen: Tensor, length: int, seed: int) -> Tensor:
    """Steps at which windows begin that end within their sequence and have no gap; of many, random ones."""
    left = batch.lengths.repeat_interleave(batch.lengths) - batch.times
    seen = batch.steps.shows(batch.steps.mask)
    reach = seen.long().cumsum(0)
    end = (torch.arange(len(seen)) + length - 1).clamp(max=len(seen) - 1)
    whole = reach[end] - reach + seen.long() == length
    rows = (chosen & (left >= length) & whole).nonzero()[:, 0]
    few = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:MOST_WINDOWS]
    return rows[few].sort().values


def check_windows(structure: Structure) -> None:
    """Refuse what windows of hidden categories cannot say."""
    graph = structure.graph
    numbers = [node for node in graph.hidden if not structure.mechanisms[node].space.is_discrete]
    if numbers:
        raise ModelError(f"the direct transport route enumerates hidden categories; {numbers[0]!r} is none")
    if structure.given:
        raise ModelError(f"the direct transport route of sequences takes no covariates; {structure.given[0]!r} is one")
    for edge in graph.lags:
        if edge.parent not in graph.hidden or edge.child not in graph.hidden or edge.by > 1:
            raise ModelError(
                f"the direct transport route of sequences takes lagged edges of one step between hidden nodes; "
                f"{edge} is none: use method='likelihood'"
            )


def _law_over(first: Tensor, moves: Tensor, times: Tensor, settled: float = 1e-10) -> Tensor:
    """The law of the state (R, S), averaged over times after the first step; constant once it has ``settled``."""
    replicas = max(len(first), len(moves))
    law, mean = first.expand(replicas, -1), first.new_zeros(1)
    for step in range(len(times)):
        mean = mean + times[step] * law
        after = (law.unsqueeze(1) @ moves).squeeze(1)
        if float((after - law).abs().max().detach()) < settled:
            return mean + times[step + 1 :].sum() * after
        law = after
    return mean
