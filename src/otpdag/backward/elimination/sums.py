"""Evaluate the tables of a layout at some parameters, sum the pieces, and send beliefs back to the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.backward.elimination.blocks import Block, Complete, LinearSource, PointsKey, TableSource
from otpdag.backward.elimination.families import FamilyView
from otpdag.backward.elimination.flat_rows import LinearRows, PlainRows, Prepared, prepare
from otpdag.backward.elimination.linear_normal import Equations, Integrals
from otpdag.backward.elimination.points import Points
from otpdag.backward.elimination.row_layout import Layout
from otpdag.backward.elimination.split_messages import settle
from otpdag.backward.elimination.stacking import stacked_replicas
from otpdag.backward.elimination.sum_product import Banks, beliefs, eliminate, put
from otpdag.errors import ModelError
from otpdag.mechanisms.base import Params
from otpdag.structure import Naturals

__all__ = ["Evaluated", "Factors", "Tempering"]


@dataclass(frozen=True)
class Tempering:
    r"""How likelihood and prior are weighed against each other.

    The evidence of a row is :math:`\log \sum_z \pi(z) P(x \mid z)^{\text{power}}`.

    Args:
        power: Power of the densities of seen nodes, w / eps in the objective.
        uniform: Give all states of hidden categories the same prior.
        best: Take the largest of :math:`\log P(x \mid z)` with :math:`\pi(z) > 0` instead of the sum (eps = 0).
    """

    power: float = 1.0
    uniform: bool = False
    best: bool = False

    def share(self, family: FamilyView, *, seen: bool) -> float:
        """The power to which a family's density is taken where its node is seen or unknown."""
        if seen:
            return self.power
        replaced = self.best or (self.uniform and family.hidden and family.mechanism.space.is_discrete)
        return 0.0 if replaced else 1.0

    def of(self, family: FamilyView, log_prob: Tensor, *, seen: bool) -> Tensor:
        """A family's log-density as it enters the sums."""
        if seen:
            return log_prob if self.power == 1.0 else self.power * log_prob
        if self.best:
            return torch.where(torch.isneginf(log_prob), log_prob, 0.0)
        if self.uniform and family.hidden and family.mechanism.space.is_discrete:
            return torch.full_like(log_prob, -math.log(family.mechanism.space.width))
        return log_prob


class Factors:
    """All tables at some parameters: those that blocks share are computed once.

    With ``attached``, what the families say keeps its graph, so that beliefs can be sent on to the parameters; the sums
    themselves have none. With ``largest``, every sum is the largest of its entries.
    """

    def __init__(
        self,
        layout: Layout,
        naturals: Naturals,
        tempering: Tempering,
        *,
        attached: bool = False,
        largest: bool = False,
    ) -> None:
        self.layout, self.naturals, self.tempering, self.attached = layout, naturals, tempering, attached
        self.largest = largest or tempering.best
        self.replicas = max((len(value) for params in naturals.values() for value in params.values()), default=1)
        if not layout.serves(self.replicas):
            raise ModelError(
                f"the points of unknown numbers were placed for another number of replicas than {self.replicas}: place "
                "them anew by `moved`, from the layout that `lay_out` made"
            )
        self._tables: dict[int, tuple[Tensor, ...]] = {}
        self._family_equations: dict[int, tuple[Tensor, ...]] = {}
        self._equations: Equations | None = None

    def log_table(self, place: int) -> Tensor:
        """Log-probabilities of all joint states of a family of categories: (R, *parents, states)."""
        if place not in self._tables:
            self._tables |= self._asked(place, lambda family, params: (family.log_table(params),))
        return self._tables[place][0]

    def family_equations(self, place: int) -> tuple[Tensor, Tensor]:
        """Coefficients and constants of a linear family."""
        if place not in self._family_equations:
            self._family_equations |= self._asked(place, lambda family, params: family.equations(params))
        coefficients, constants = self._family_equations[place]
        return coefficients, constants

    def _asked(
        self, place: int, ask: Callable[[FamilyView, Params], tuple[Tensor, ...]]
    ) -> dict[int, tuple[Tensor, ...]]:
        """What a family answers at its parameters, and all that are alike, which stand on the replica axis together.

        Where gradients are taken each is asked alone: they are read family by family.
        """
        family = self.layout.families[place]
        if self.attached and any(value.requires_grad for value in self.naturals[family.node].values()):
            with torch.enable_grad():
                return {place: ask(family, self.naturals[family.node])}
        alike = self.layout.alike[place]
        each = [self.naturals[self.layout.families[one].node] for one in alike]
        if len(each) == 1:
            return {place: ask(family, each[0])}
        params = {name: stacked_replicas([own[name] for own in each], self.replicas) for name in each[0]}
        with torch.no_grad():
            answers = [one.unflatten(0, (-1, len(alike))).unbind(1) for one in ask(family, params)]
        return dict(zip(alike, zip(*answers, strict=True), strict=True))

    @property
    def equations(self) -> Equations:
        """The equations of all linear families."""
        if self._equations is None:
            self._equations = self._all_equations()
        return self._equations

    def _all_equations(self) -> Equations:
        layout = self.layout
        linear = [layout.families[place] for place in layout.offsets]
        width = max(len(family.columns) for family in linear) + 1
        dim = max(family.widths[-1] for family in linear)
        rows = 1 + sum(family.configurations for family in linear)
        like = layout.batch.weight
        coefficients = torch.zeros(self.replicas, rows, dim, width).to(like)
        constants = torch.zeros(self.replicas, rows).to(like)
        shift = torch.zeros(rows, width).to(like)
        for family in linear:
            some, constant = self.family_equations(family.place)
            at = slice(layout.offsets[family.place], layout.offsets[family.place] + family.configurations)
            coefficients[:, at, : some.shape[2], : some.shape[3]] = some.detach()
            constants[:, at] = constant.detach()
            shift[at, : some.shape[3]] = layout.shifts[family.place]
        return Equations(coefficients, constants, shift)

    def complete_log_prob(self, complete: Complete) -> Tensor:
        """Log-density of a family in the rows that know all of it (R, n)."""
        layout, family = self.layout, self.layout.families[complete.family]
        if family.is_table and complete.code is not None:
            return self.log_table(complete.family).flatten(1).index_select(1, complete.code)
        batch = layout.batch
        values = {name: batch.values[name].index_select(1, complete.rows) for name in family.names}
        mask = batch.mask[family.node].index_select(1, complete.rows)
        return family.log_prob(self.naturals[family.node], values, None if bool(mask.all()) else mask)

    # -- tables ----------------------------------------------------------------------------------------------------

    def evaluate(self, block: Block) -> Evaluated:
        """Fill the banks of a block, and sum its pieces."""
        prepared = prepare(self.layout, block)
        points = prepared.points
        like = self.layout.batch.weight
        banks = {
            sizes: torch.zeros(self.replicas, rows, math.prod(sizes)).to(like) for sizes, rows in block.banks.items()
        }

        for source in block.tables:
            put(banks, source.stored, source.start, self._of_states(source))
        log_probs = [self._of_rows(rows) for rows in prepared.rows]
        tempered = [self._tempered(*both) for both in zip(prepared.rows, log_probs, strict=True)]
        prepared.places.put(banks, tempered)
        for lengths in block.lengths:
            put(banks, lengths.sizes, lengths.start, points[lengths.key].log_length)
        integrals = []
        for linear in block.linear:
            integrals.append(self._integrated(linear, points))
            put(banks, linear.stored, linear.start, integrals[-1].table)
        if block.is_exact:
            conditionals = eliminate(block.steps, banks, best=self.largest)
            log_z = banks[()][:, block.result, 0]
            return Evaluated(block, log_z, conditionals, tuple(integrals), prepared, log_probs)
        settled = settle(block, banks)
        log_z = banks[()][:, block.result, 0] - settled.overlap
        made = (settled.conditionals, tuple(integrals), prepared, log_probs)
        return Evaluated(block, log_z, *made, banks, settled.restless)

    def _of_states(self, source: TableSource) -> Tensor:
        """(R, configurations of seen members, *sizes)."""
        family = self.layout.families[source.family]
        table = self.log_table(source.family).detach()
        seen = [1 + axis for axis, n in enumerate(family.members) if n not in source.members]
        axes = [1 + family.members.index(n) for n in source.members]
        table = table.permute(0, *seen, *axes).reshape(len(table), source.count, *source.sizes)
        return self.tempering.of(family, table, seen=source.family not in source.members)

    def _of_rows(self, rows: PlainRows | LinearRows) -> Tensor:
        """(R, entries)."""
        if isinstance(rows, LinearRows):
            return rows.log_prob(self.equations).expand(self.replicas, -1)
        with torch.set_grad_enabled(self.attached):
            return rows.log_prob(self.naturals, self.replicas)

    def _tempered(self, rows: PlainRows | LinearRows, log_prob: Tensor) -> Tensor:
        """Log-densities (R, entries) as they enter the sums."""
        log_prob = log_prob.detach()
        if self.tempering == Tempering():
            return log_prob
        linear = self.layout.families[next(iter(self.layout.offsets), 0)]
        family = linear if isinstance(rows, LinearRows) else rows.families[0]
        seen, unseen = (self.tempering.of(family, log_prob, seen=seen) for seen in (True, False))
        return torch.where(rows.seen, seen, unseen)

    def _integrated(self, source: LinearSource, points: Mapping[PointsKey, Points]) -> Integrals:
        met = [torch.cat([points[key].values[:, at, :, 0] for key, at in parts], 1) for parts in source.group.placed]
        return source.group.integrate(self.equations, met, self.tempering.power)


@dataclass(frozen=True)
class Evaluated:
    """A block at some parameters.

    Attributes:
        block: The block.
        log_z: Log-sums of the distinct pieces (R, D).
        conditionals: Probabilities of each step's variable given its separator.
        integrals: What was integrated out, by linear source.
        prepared: Rows of the families that read numbers.
        log_probs: Their log-densities (R, entries).
        banks: All tables and messages, where variables have copies.
        restless: Pairs of copies whose messages had not come to rest.
    """

    block: Block
    log_z: Tensor
    conditionals: Sequence[Tensor]
    integrals: tuple[Integrals, ...]
    prepared: Prepared
    log_probs: Sequence[Tensor]
    banks: Banks | None = None
    restless: int = 0

    def seeds(self, weight: Tensor) -> Banks:
        """Banks of beliefs before they are sent to the tables: the weights (1 or R, D) of the pieces' evidence."""
        replicas = max(len(self.log_z), len(weight))
        banks = {
            sizes: self.log_z.new_zeros(replicas, rows, math.prod(sizes)) for sizes, rows in self.block.banks.items()
        }
        banks[()][:, self.block.result, 0] = weight
        return banks

    def beliefs(self, weight: Tensor) -> Banks:
        """Weight times belief of every entry of every bank, summed over pieces: (R, rows, entries)."""
        banks = self.seeds(weight)
        beliefs(self.block.steps, self.conditionals, banks)
        return banks


def row_beliefs(evaluated: Evaluated, beliefs: Banks) -> tuple[Tensor, ...]:
    """Weight times belief of all entries of each array of rows (R, entries)."""
    return evaluated.prepared.places.taken(beliefs, [log_prob.shape[1] for log_prob in evaluated.log_probs])


def piece_weights(block: Block, weight: Tensor) -> Tensor:
    """Sum row weights (1 or R, N) over the rows in which each distinct piece occurs: (1 or R, D)."""
    total = weight.new_zeros(len(weight), block.distinct)
    return total.index_add_(1, block.piece, weight.index_select(1, block.piece_row))
