r"""Rows of a table against the model, by optimal transport: the left side of Theorem 1.

.. math:: \min_\theta W_c\big(P_{data}, P_\theta\big)

Rows with gaps take part completed: several draws of what they miss, given what they show, at the last estimate. If gaps
depend on what is seen only, estimate and completed rows agree at the right parameters, so that both alternate until
they do.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.divergences import SlicedWasserstein
from otpdag.errors import ModelError, listed
from otpdag.likelihood.row_posterior import Fitted, posterior_draws
from otpdag.matching.informative import informative_lengths
from otpdag.matching.model_points import ModelPoints, lay_out
from otpdag.matching.transport_cost import (
    Columns,
    ComparedRows,
    Partial,
    chosen_divergence,
    directions,
    least_left_out,
    neighbourhoods,
)
from otpdag.numerics import FixedPoint
from otpdag.problem import LossTerms, Pace, Refinement, TableRows, differences, with_gradient
from otpdag.settings import Direct
from otpdag.structure import Naturals, Shapes, Structure

SETTLED = 0.2  # standard errors of a mean, roughly, by which estimates may still change when they count as settled

# times the lowest cost that any estimate has, whatever it leaves out, up to which chance may explain a cost
BY_CHANCE = 1.5

NO_GAIN = 1.1  # times the lowest cost at which hardly anything is gained by leaving out more

# cost of rows to which a model was fitted, as a share of that of rows that it makes: what may be expected at least
FITTED = 0.5

TRIED_SHARES = 8  # of the rows, at which is looked how the cost falls with what is left out

# matched part below which a row counts as left out: of rows in groups of outliers hardly anything is matched, while
# rows of the model's own lose a part of themselves wherever there happen to be many
LEAST_PART = 0.25

SAME_PARTS = 5e-3  # mean change of the matched part of a row at which rows and estimate agree

POLISH = 5  # steps by differences after places where simulated values jump have been looked through

FEWEST_EFFECTIVE = 0.5  # share of drawn points that must still count where descent goes on; below, they are drawn anew


@dataclass(frozen=True)
class TransportRows(TableRows):
    """Rows compared with weighted points of the model.

    Attributes:
        compared: The rows, completed once there is an estimate.
        course: Estimates at which rows were completed and points drawn, and what became of them.
        jumps: Whether the cost is differentiated by differences: simulated values jump, or have no gradient.
        matching: How much of each row is matched; None if all of them are.
        lengths_unknown: Whether directions are given lengths where a single estimate is known.
    """

    route: ClassVar[str] = "transport"

    direct: Direct
    columns: Columns
    points: ModelPoints
    compared: ComparedRows
    course: FixedPoint = field(default_factory=FixedPoint)
    jumps: bool = False
    matching: Partial | None = None
    lengths_unknown: bool = False

    def loss(self, point: Tensor) -> LossTerms:
        """The transport cost of what is matched; by differences where a simulator has no gradient."""
        cost = with_gradient(self._cost_and_slope, point) if self.jumps else self._cost(point)
        return LossTerms.of(cost, direct=cost)

    def _cost(self, point: Tensor) -> Tensor:
        cost = self.compared.cost(*self.model_side(point))
        return cost if self.matching is None else replace(self.matching, cost=cost).total

    def cost_at(self, places: Tensor, at_once: int = 16) -> Tensor:
        """Costs (R,) without gradients, of so many places at a time; infinite where there is none."""
        with torch.no_grad():
            each = [self.laid_out_for(part)._cost(part).expand(len(part)) for part in places.split(at_once)]
        return torch.cat(each).nan_to_num(torch.inf)

    def _cost_and_slope(self, point: Tensor, slope: bool) -> tuple[Tensor, Tensor]:
        """Costs (R,), and their central differences (R, P) over what so many points can tell apart.

        Noise is held fixed, and nothing is asked of the simulators but values.
        """
        with torch.no_grad():
            cost = self._cost(point).expand(len(point))
            step = (self.points.size * self.columns.windows) ** -0.5
            moves = torch.eye(point.shape[1] if slope else 0, point.shape[1]).to(point)
            each = [differences(self._cost, one[None], moves, step=step) for one in point] if slope else []
            return cost, torch.stack(each) if slope else torch.zeros_like(point)

    def check_simulated(self, place: Tensor) -> None:
        """Refuse functions without finite values even at the best place known (1, P), or with others every time."""
        naturals = self.naturals(place)
        with torch.no_grad():
            (first, _), (again, _) = (self.points.placed_at(naturals).at(naturals) for _ in range(2))
        for node, value in first.items():
            bad = float((~torch.isfinite(value)).to(value).mean())
            if bad:
                raise ModelError(
                    f"node {node!r}: {bad:.0%} of its simulated values are not finite, wherever was looked"
                )
            if not torch.allclose(value, again[node]):
                raise ModelError(f"node {node!r}: the same noise must give the same values, and nothing may change it")

    def contradicts_slopes(self, places: Tensor, misled: float = 0.3) -> bool:
        """Whether differences contradict the gradient at any of these places (R, P).

        The gradient through a simulator knows nothing of rows that would jump, from one branch or count to another.
        """
        leaf = places.detach().clone().requires_grad_(True)
        cost = self._cost(leaf).sum()
        through = torch.autograd.grad(cost, leaf)[0] if cost.requires_grad else torch.zeros_like(leaf)
        slope = self._cost_and_slope(places, True)[1]
        wrong = (through - slope).norm(dim=-1) / slope.norm(dim=-1).clamp(min=1e-12)
        return float(wrong.max()) > misled

    def model_side(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Points of the model (R or 1, M, d) in units of the columns, and their weights (R or 1, M)."""
        values, log_weight = self.points.at(self.naturals(point))
        return self.columns.of_values(values), self.columns.of_weights(torch.softmax(log_weight, -1))

    def metric(self, points: Tensor) -> Tensor | None:
        """How far points of the model and the logarithms of their weights move, squared (1, P, P); of one replica."""
        if len(points) > 1 or self.jumps:
            return None

        moved, log_moved = self._moved(points)
        weight = self.model_side(points.detach())[1].mean(0)
        metric = torch.einsum("pmd,qmd,m->pq", moved, moved, weight) / moved.shape[-1]
        return (metric + torch.einsum("pm,qm,m->pq", log_moved, log_moved, weight)).unsqueeze(0)

    def _moved(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """How points of the model (P, M, d) and the logarithms of their weights (P, M) move with parameters (1, P)."""

        def features(at: Tensor) -> Tensor:
            with torch.no_grad():
                values, weight = self.model_side(at)
            shape = (len(at), weight.shape[-1], -1)
            return torch.cat([values.expand(shape), weight.log().expand(shape[:2]).unsqueeze(-1)], -1)

        moved = differences(features, point.detach(), torch.eye(point.shape[1]).to(point))
        return moved[..., :-1], moved[..., -1].nan_to_num(0.0)  # points without weight have none at any place

    @property
    def pace(self) -> Pace:
        """Drawn points serve for some steps; where rows are completed, estimates need several rounds."""
        polished = self.jumps and self.structure.begins_anywhere  # places were looked through before
        steps = self.direct.steps if self.points.must_be_drawn else POLISH if polished else None
        return Pace(steps=steps, refinements=self.direct.rounds if self._is_refined else 0, least=0.0)

    @property
    def _is_refined(self) -> bool:
        return bool(self.points.must_be_drawn) or self._can_complete

    @cached_property
    def _seen(self) -> Tensor:
        """Which rows have no gap (N,)."""
        return self.batch.shows(self.batch.mask)

    @property
    def _is_sliced(self) -> bool:
        return isinstance(self.compared.divergence, SlicedWasserstein)

    @cached_property
    def _can_complete(self) -> bool:
        """Whether rows have gaps, and there are densities to draw them from."""
        return not bool(self._seen.all()) and self.structure.has_densities

    def notes(self, point: Tensor | None = None) -> tuple[str, ...]:
        """Whether rows with gaps took part, what the gradient is, and by which cost, if nobody said."""
        if point is None:
            return ()
        said = []
        if not bool(self._seen.all()) and not self._can_complete:
            said.append(
                f"{int((~self._seen).sum())} rows with gaps were compared by what they show only: what they miss has "
                "no density to draw it from; that is right if gaps do not depend on any value; see docs/missing-data.md"
            )
        if self.jumps:
            said.append("simulated values jump or have no gradient: the cost was differentiated by differences")
        if self.direct.divergence is None:
            scored = "" if self.columns.scores is None else " of normal scores"
            name, size = self.compared.name, self.points.size
            said.append(f"the transport cost is {name}{scored}, to {size:,} points of the model")
        return tuple(said)

    # -- other rows ---------------------------------------------------------------------------------------------------

    def of_batch(self, batch: Batch, seed: int) -> TransportRows:
        """Laid out anew."""
        return replace(transport_rows(self.structure, batch, self.shapes, self.direct, seed), jumps=self.jumps)

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> TransportRows:
        """Fewer rows, and fewer points if ``coarse``."""
        columns, direct = len(self.columns.places), self.direct
        if coarse:
            direct = replace(direct, points=max(1, direct.size(columns) // 4))
        if coarse and self.columns.windows > 1 and self._is_sliced:
            sliced = direct.sliced(columns)
            direct = replace(direct, divergence=replace(sliced, projections=max(1, sliced.projections // 4)))
        return replace(self, direct=direct).of_batch(self.batch.part(rows, self.seed), self.seed)

    def reweighted(self, factors: Tensor) -> Self:
        """Rows whose weights are multiplied by ``factors`` (R, N); gaps are completed anew."""
        own = replace(super().reweighted(factors), course=FixedPoint())
        compared = own._without_gaps()
        if self.matching is not None and compared.weight.shape[-1] == self.rows:
            compared = replace(compared, weight=compared.weight * self._by_row(self.matching.parts)[0])
        return replace(own, compared=compared)

    # -- what an estimate tells ---------------------------------------------------------------------------------------

    def laid_out_for(self, points: Tensor) -> Self:
        """Categories and counts drawn at these replicas, unless they still count there; rows matched that need not."""
        naturals, own = self.naturals(points.detach()), self
        if not self.points.fits(len(points)) or self.points.effective(naturals) < FEWEST_EFFECTIVE:
            own = replace(self, points=self.points.placed_at(naturals))
        if self.lengths_unknown and len(points) == 1:
            own = own._with_lengths(points)
        known = self.matching is not None and len(self.matching.parts) in (1, len(points))
        return own if known or not self.direct.unmatched else own._matched(points)

    def _with_lengths(self, point: Tensor) -> Self:
        """Directions by what they tell about the parameters (1, P)."""
        values, weight = self.model_side(point.detach())
        along = self.compared.directions
        lengths = informative_lengths(along, values[0], weight[0], *self._moved(point))
        return replace(self, compared=replace(self.compared, directions=along * lengths), lengths_unknown=False)

    def partial(self, points: Tensor) -> Partial:
        """Partial transport at these replicas: the rows that the model explains, and what that costs."""
        if self.direct.unmatched == "auto":
            left_out = self.left_out(points)[1].clamp(0.0, self.direct.most_unmatched)
        else:
            left_out = points.new_full((len(points),), self.direct.unmatched)
        return self._every_row(points).matched(*self.model_side(points.detach()), left_out)

    def left_out(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """The least share of the rows (R,) without which chance may explain the cost of the others, and all of it (R,).

        It is the index of fit of Rudas, Clogg and Lindsay (1994), by transport. What chance explains is told by the
        lowest cost that any of these replicas has, with whatever left out. Beyond the largest share that may be, it
        grows with the cost that is left; below zero, with what is to spare (:func:`least_left_out`).

        All of it is a little more than the share beyond which hardly anything is gained: rows of the model's own lose a
        small part of themselves then, those that are foreign all.
        """
        points = points.detach()
        shares = torch.linspace(0.0, self.direct.most_unmatched, TRIED_SHARES + 1).to(points)
        each = [one.costs(shares) for one in self._every_row(points).matchings(*self.model_side(points))]
        costs = torch.stack(each).nan_to_num(torch.inf)
        best = int(costs[:, -1].argmin())
        lowest = max(float(costs[best, -1]), FITTED * self._chance(points[best % len(points)][None]))
        least = least_left_out(shares, costs, BY_CHANCE * lowest)
        further = shares[1] + least_left_out(shares, costs, NO_GAIN * costs[:, -1].clamp(min=lowest))
        all_of_it = torch.where(least > 0, further, least)
        return least.expand(len(points)), all_of_it.expand(len(points))

    def _chance(self, point: Tensor) -> float:
        """The cost of rows that the model itself makes at a point (1, P), as many as there are."""
        whole = replace(self.batch, mask={n: torch.ones_like(mask) for n, mask in self.batch.mask.items()})
        made = replace(self, batch=whole).drawn(point, self.rows, self.seed)
        own = replace(
            self.compared, rows=self.columns.of_values(made.values), weight=self.columns.of_weights(made.weight)
        )
        return float(own.cost(*replace(self, points=self.points.placed_at(self.naturals(point))).model_side(point)))

    def _every_row(self, points: Tensor) -> ComparedRows:
        return self._completed(self.naturals(points.detach())) if self._can_complete else self._without_gaps()

    def _matched(self, points: Tensor) -> Self:
        """The same rows, of which those count that are matched at these replicas."""
        matching, compared = self.partial(points), self._every_row(points)
        return replace(self, matching=matching, compared=replace(compared, weight=compared.weight * matching.parts))

    def explained(self, points: Tensor, left_out: Tensor) -> Tensor:
        """Which rows (R, N) are matched rather than left out, where such a share (R,) of them is; none, all are."""
        model = self.model_side(points.detach())
        matching = self._every_row(points).matched(*model, left_out.clamp(0.0, self.direct.most_unmatched))
        return (self._by_row(matching.parts) >= LEAST_PART) | (left_out <= 0).unsqueeze(-1)

    def matched_parts(self, point: Tensor) -> Tensor | None:
        """How much of each row (N,) is matched, at a point (1, P) if its cost tells; None if all rows are."""
        parts = self.compared.shares(*self.model_side(point)) if self.matching is None else self.matching.parts
        return None if parts is None else self._by_row(parts)[0]

    def _by_row(self, parts: Tensor) -> Tensor:
        """What is known of compared rows (R, ...), for each row of the table (R, N): draws of gaps stand for one."""
        if parts.shape[-1] == self.rows:
            return parts
        found, whole = parts.new_ones(len(parts), self.rows), int(self._seen.sum())
        found[:, self._seen] = parts[:, :whole]
        if parts.shape[-1] > whole:
            found[:, ~self._seen] = parts[:, whole:].unflatten(-1, (-1, self.direct.draws)).mean(-1)
        return found

    def refine(self, point: Tensor) -> Refinement | None:
        """Gaps filled in and points drawn at the estimate, until that changes it no more."""
        point, course = point.detach(), FixedPoint()
        if not self._is_refined:
            return self._rematched(point)
        if self.course.points:
            change = (point - self.course.begin).square().mean(-1).sqrt()
            if bool((change <= SETTLED * self.weight.sum(-1).rsqrt()).all()):
                return self._rematched(point)
            if self._can_complete:
                course = self.course.with_image(point)
                point = course.best()
        naturals = self.naturals(point)
        own = replace(self, points=self.points.placed_at(naturals), course=course.at(point))
        if self._can_complete:
            own = replace(own, compared=self._completed(naturals)) if self.matching is None else own._matched(point)
            return Refinement(own, point, "completed rows")
        with torch.no_grad():
            return Refinement(own, point, "drawn points", own.loss(point).total)

    def _rematched(self, point: Tensor) -> Refinement | None:
        """Rows matched anew, unless that changes little."""
        if self.matching is None:
            return None
        after = self._matched(point)
        assert after.matching is not None, "matched here"
        if bool(((after.matching.parts - self.matching.parts).abs().mean(-1) < SAME_PARTS).all()):
            return None
        return Refinement(after, point, "matched rows", curved_alike=True)

    def _without_gaps(self) -> ComparedRows:
        """Rows without gaps; all, with zeros in the gaps, if there are too few of them to begin with.

        Where gaps will never be completed, each direction has the rows that show all of its columns.
        """
        if not self.structure.has_densities and self._is_sliced and not self._seen.all():
            return self._by_direction()
        rows = self._seen.nonzero()[:, 0]
        rows = rows if len(rows) >= self.structure.rows_needed else torch.arange(self.rows)
        values = {n: value[:1, rows] for n, value in self.batch.values.items()}
        weight = self.columns.of_weights(self.batch.weight[:, rows])
        return replace(self.compared, rows=self.columns.of_values(values), weight=weight)

    def _by_direction(self) -> ComparedRows:
        """All rows, weighed along each direction by whether they show what it reads; directions without any go."""
        seen = self.columns.side_by_side({n: mask[:1] for n, mask in self.batch.mask.items()})[0].to(self.weight)
        reads = (self.compared.directions != 0).to(seen)
        shows = ((1 - seen) @ reads == 0).mT  # (K, N)
        weight = self.columns.of_weights(self.batch.weight)[:, None] * shows
        some = (weight.sum(-1) > 0).all(0)
        if not some.any():
            together = listed(neighbourhoods(self.structure)[0])
            raise ModelError(
                f"transport compares nodes beside their neighbours: no row shows {together} together, nor any others, "
                "and what rows miss has no density to draw it from"
            )
        rows = self.columns.of_values({n: value[:1] for n, value in self.batch.values.items()})
        along = self.compared.directions[:, some]
        return replace(self.compared, rows=rows, weight=weight[:, some], directions=along)

    def _completed(self, naturals: Naturals) -> ComparedRows:
        """Every row with several draws of what it misses, those of each replica at its own parameters."""
        whole, gaps = self._seen.nonzero()[:, 0], (~self._seen).nonzero()[:, 0]
        shared = replace(self.batch.take(gaps), weight=self.batch.weight[:1, gaps])
        replicas = max(len(value) for own in naturals.values() for value in own.values())
        rows, draws = [], self.direct.draws
        for replica in range(replicas):
            own = {n: {k: v[replica % len(v)].detach()[None] for k, v in p.items()} for n, p in naturals.items()}
            fitted = Fitted(self.structure, own)
            drawn = posterior_draws(fitted, shared, draws, self.seed, stratified=True)
            values = {
                n: torch.cat([value[0, whole], drawn[n].flatten(0, 1).to(value)]).unsqueeze(0)
                for n, value in self.batch.values.items()
            }
            rows.append(self.columns.of_values(values))
        weight = self.batch.weight
        weight = torch.cat([draws * weight[:, whole], weight[:, gaps].repeat_interleave(draws, 1)], 1)
        return replace(self.compared, rows=torch.cat(rows), weight=self.columns.of_weights(weight))


def transport_rows(structure: Structure, batch: Batch, shapes: Shapes, direct: Direct, seed: int) -> TransportRows:
    """Choose units, directions and points; the same seed chooses alike."""
    is_chosen = not (direct.divergence or direct.costs or direct.unmatched)
    columns = Columns.of(structure, batch, direct.window, scored=structure.has_simulators and is_chosen)
    groups = [[columns.places[node] for node in group] for group in neighbourhoods(structure)]
    sliced = direct.sliced(len(columns.places))
    along = directions(groups, len(columns.spread), sliced, seed).to(batch.weight)
    points = lay_out(structure, batch, direct, seed, windows=columns.windows)
    divergence = chosen_divergence(direct, columns, points, batch.rows)
    compared = ComparedRows(columns.of_values(batch.values), columns.of_weights(batch.weight), divergence, along)
    is_weighed = is_chosen and structure.has_densities and isinstance(divergence, SlicedWasserstein) and len(along) > 1
    own = TransportRows(structure, batch, shapes, seed, direct, columns, points, compared, lengths_unknown=is_weighed)
    whole = own._without_gaps()
    if direct.unmatched and (columns.windows > 1 or whole.weight.ndim > 2):
        raise ModelError("unmatched leaves out whole rows: paths, and gaps without a density to fill them, have none")
    return replace(own, compared=whole)
