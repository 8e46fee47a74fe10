r"""What copies of a variable say of each other, sent back and forth until they agree.

A copy and its original each have a table of one variable that stands for the other: :math:`s(x)` at the original,
:math:`t(x)` at the copy. With both, the piece is summed exactly, which gives a belief of each; without its own table a
belief is what the rest of that side says, and becomes the table of the other side,

.. math:: t(x) \propto \frac{b_{\text{original}}(x)}{s(x)}, \qquad s(x) \propto \frac{b_{\text{copy}}(x)}{t(x)},
   \qquad \log \hat Z = \log Z(s, t) - \sum_{\text{pairs}} \log \sum_x s(x)\, t(x) .

Where this stands still both beliefs are :math:`\propto s(x) t(x)`, and :math:`\log \hat Z` is stationary in all
messages: it is minus the free energy of Bethe and Kikuchi (Yedidia, Freeman & Weiss 2005; Choi & Darwiche 2006). So its
gradient by the parameters is, as in the exact sums, the expected one under the beliefs. It is exact where the copies do
not meet again on another way, and need not be a bound elsewhere.

Evaluate the tables of a layout at some parameters, sum the pieces, and send beliefs back to the tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.likelihood.elimination.batched_densities import LinearRows, PlainRows, Prepared, prepare
from otpdag.likelihood.elimination.blocks import Block, Complete, LinearSource, PointsKey, SplitSource, TableSource
from otpdag.likelihood.elimination.families import FamilyView, stacked_replicas
from otpdag.likelihood.elimination.linear_normal import Equations, Integrals
from otpdag.likelihood.elimination.points import Points
from otpdag.likelihood.elimination.row_layout import Layout
from otpdag.likelihood.elimination.sum_product import Banks, Sizes, beliefs, eliminate, put
from otpdag.mechanisms.base import Params
from otpdag.structure import Naturals

CLOSE = 1e-5  # change of a message's probabilities at which it stands still
MOST_ROUNDS = 60  # messages that come to rest took 2 to 60 (decision 0018); others swing for good
LITTLE_CALMER = 0.95  # a change above this share of the last one says that messages swing
PART = 0.5  # of the way that swinging messages go
LEAST = -40.0  # logarithm of the smallest entry of a message: nothing is ruled out for good by a copy


@dataclass(frozen=True)
class Settled:
    """A block once its messages stand still.

    Attributes:
        conditionals: Probabilities of each step's variable given its separator.
        overlap: What is counted twice in the evidence of each distinct piece (R, D).
        rounds: How often messages were sent.
        restless: How many pairs of copies still changed at the end, in the worst replica.
    """

    conditionals: list[Tensor]
    overlap: Tensor
    rounds: int
    restless: int


def settle(block: Block, banks: Banks) -> Settled:
    """Send messages until they stand still; they stay in the banks.

    Args:
        block: Pieces with copies.
        banks: Tables of factors, and room for messages.
    """
    back = {sizes: torch.zeros_like(bank) for sizes, bank in banks.items()}
    before = [torch.full((), torch.inf) for _ in block.splits]
    rounds, changes = 0, before
    while rounds < MOST_ROUNDS:
        rounds += 1
        conditionals = eliminate(block.steps, banks)
        replies = _replies(block, banks, back, conditionals)
        changes = [_change(banks, split, replies[split.sizes]) for split in block.splits]
        if max(float(change.max()) for change in changes) <= CLOSE:
            break
        for split, change, last in zip(block.splits, changes, before, strict=True):
            part = torch.where(change > LITTLE_CALMER * last, PART, 1.0)
            _send(banks, split, replies[split.sizes], part.unsqueeze(-1))
        before = changes
    else:
        conditionals = eliminate(block.steps, banks)
    restless = sum(int((change > CLOSE).any(0).sum()) for change in changes)
    return Settled(conditionals, _overlap(block, banks), rounds, restless)


def drawn_copies(block: Block, banks: Banks, generator: torch.Generator) -> tuple[list[Tensor], Tensor]:
    r"""Draw one joint state of all variables that have copies, in every replica.

    Variable after variable is drawn from its belief and then held there, at the original and at all copies, and
    messages are sent once before the next. Once all are held the sums are exact given their states c.

    Args:
        block: Pieces with copies.
        banks: Tables and messages that stand still, as :func:`settle` leaves them; they are overwritten.
        generator: The source of the draws.

    Returns:
        The probabilities of each step's variable given its separator and c; and of each distinct piece (R, D)
        :math:`\log P(x, c) - \log q(c)`, the logarithm of the weight that makes up for beliefs that are not exact.
    """
    back = {sizes: torch.zeros_like(bank) for sizes, bank in banks.items()}
    single = banks[()]
    log_chance = single.new_zeros(len(single), block.distinct)
    for number in range(1 + max(int(split.rank.max()) for split in block.splits)):
        conditionals = eliminate(block.steps, banks)
        replies = _replies(block, banks, back, conditionals)
        uniform = torch.rand(len(single), block.distinct, 1, generator=generator, dtype=single.dtype)
        chance = torch.ones_like(log_chance)  # the copies of one variable share their draw and its chance
        for split in block.splits:
            belief = back[split.sizes][:, split.original : split.original + len(split.piece)]
            waiting = (split.rank > number).to(belief).unsqueeze(-1)
            _send(banks, split, replies[split.sizes], waiting)
            drawn = torch.nonzero(split.rank == number)[:, 0]
            chance[:, split.piece[drawn]] = _hold(banks, split, drawn, belief[:, drawn], uniform)
        log_chance += chance.log()
    conditionals = eliminate(block.steps, banks)
    return conditionals, banks[()][:, block.result, 0] - log_chance


def _hold(banks: Banks, split: SplitSource, drawn: Tensor, belief: Tensor, uniform: Tensor) -> Tensor:
    """Draw states from beliefs (R, n, K), hold originals and copies there, and return their chances (R, n)."""
    sums = belief.cumsum(-1)
    state = (uniform[:, split.piece[drawn]] * sums[..., -1:] > sums).sum(-1, keepdim=True).clamp(max=sums.shape[-1] - 1)
    held = torch.full_like(belief, LEAST).scatter_(-1, state, 0.0)
    for first in (split.original, split.copy):
        banks[split.sizes][:, first + drawn] = held
    return (belief.gather(-1, state) / sums[..., -1:]).squeeze(-1)


def _replies(
    block: Block, banks: Banks, back: Banks, conditionals: Sequence[Tensor]
) -> Mapping[Sizes, tuple[Tensor, Tensor]]:
    """What originals and copies say without their own messages: new messages to originals and to copies (R, n, K)."""
    for bank in back.values():
        bank.zero_()
    back[()][:, block.result, 0] = 1.0
    beliefs(block.steps, conditionals, back)
    replies = {}
    for split in block.splits:
        many, bank, belief = len(split.piece), banks[split.sizes], back[split.sizes]
        at_original = slice(split.original, split.original + many)
        at_copy = slice(split.copy, split.copy + many)
        to_copy = _normalised(belief[:, at_original].log() - bank[:, at_original])
        to_original = _normalised(belief[:, at_copy].log() - bank[:, at_copy])
        replies[split.sizes] = (to_original, to_copy)
    return replies


def _normalised(message: Tensor) -> Tensor:
    return torch.log_softmax(message.clamp(min=-1e6), -1).clamp(min=LEAST)


def _change(banks: Banks, split: SplitSource, replies: tuple[Tensor, Tensor]) -> Tensor:
    """The largest change of a probability in either message of each pair (R, n)."""
    many, bank = len(split.piece), banks[split.sizes]
    changes = [
        (torch.softmax(bank[:, first : first + many], -1) - new.exp()).abs().amax(-1)
        for first, new in zip((split.original, split.copy), replies, strict=True)
    ]
    return torch.maximum(*changes)


def _send(banks: Banks, split: SplitSource, replies: tuple[Tensor, Tensor], part: Tensor) -> None:
    many, bank = len(split.piece), banks[split.sizes]
    for first, new in zip((split.original, split.copy), replies, strict=True):
        old = bank[:, first : first + many]
        bank[:, first : first + many] = torch.lerp(old, new, part.to(old))


def _overlap(block: Block, banks: Banks) -> Tensor:
    """The logarithm of what pairs of messages sum to, by distinct piece (R, D)."""
    single = banks[()]
    overlap = single.new_zeros(len(single), block.distinct)
    for split in block.splits:
        many, bank = len(split.piece), banks[split.sizes]
        both = bank[:, split.original : split.original + many] + bank[:, split.copy : split.copy + many]
        overlap.index_add_(1, split.piece, torch.logsumexp(both, -1))
    return overlap


@dataclass(frozen=True)
class Tempering:
    r"""How likelihood and prior are weighed against each other.

    The evidence of a row is :math:`\log \sum_z \pi(z) P(x \mid z)^{\text{power}}`.

    Args:
        power: Power of the densities of seen nodes, w / eps in the objective.
        uniform: Give all states of hidden categories the same prior.
        best: Take the largest of :math:`\log P(x \mid z)` with :math:`\pi(z) > 0` instead of the sum (eps = 0).
        tilt: By place of a family of categories, what is added to its log-table (R, *parents, states): the evidence
            changes with it by the expected counts of the family.
    """

    power: float = 1.0
    uniform: bool = False
    best: bool = False
    tilt: Mapping[int, Tensor] = field(default_factory=dict, compare=False)

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
        table = self.tempering.of(family, table, seen=source.family not in source.members)
        table = table + self.tempering.tilt.get(source.family, 0.0)
        seen = [1 + axis for axis, n in enumerate(family.members) if n not in source.members]
        axes = [1 + family.members.index(n) for n in source.members]
        return table.permute(0, *seen, *axes).reshape(len(table), source.count, *source.sizes)

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
