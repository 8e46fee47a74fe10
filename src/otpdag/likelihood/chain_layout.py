r"""Sequences laid out for a chain: joint states of what is unknown, distinct steps, and what mechanisms say of them.

With marginal noise the best backward map of a sequence is a Markov chain,

.. math:: \phi(s_{1:T} \mid x) \propto \prod_t U_t(s_t) \, P_t(s_{t-1}, s_t),

where the potentials are those that the mechanisms give: U holds what depends on one step's hidden states (emissions,
first steps), P what depends on two (transitions). Steps that show the same share one row of the potentials, so that a
million counts cost a few hundred densities.

In a block the k-th steps of all sequences lie side by side; recursions run over lanes, which are its sequences or,
where these are few and long, stretches of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from otpdag.data.batch import distinct_rows
from otpdag.data.sequences import SequenceBatch
from otpdag.errors import ModelError
from otpdag.mechanisms.base import ExponentialFamily, Mechanism, Params
from otpdag.numerics import Array, Flags, Ints, joint_codes
from otpdag.structure import Naturals, Structure, lag_name


@dataclass(frozen=True)
class States:
    """The joint states of all unknown categories.

    Attributes:
        nodes: The unknown categories.
        size: Number of states S.
        now: What a step's state tells: one-hot values (S, K) of ``z`` and perhaps ``z[-1]`` and so on.
        before: The same told by the state one step earlier.
        follows: Which states (S, S) may follow which; None if all may.
        begins: Which states (S,) a sequence may begin with.
    """

    nodes: tuple[str, ...]
    size: int
    now: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    follows: Tensor | None
    begins: Tensor


def joint_states(
    structure: Structure, unknown: Sequence[str], dtype: torch.dtype = torch.float64, most: int = 1024
) -> States:
    """Enumerate the joint states of ``unknown`` nodes, with as many earlier values as the longest lag asks for.

    At ``most`` so many: recursions multiply matrices of as many rows and columns at every step.
    """
    mechanisms = structure.mechanisms
    depth = dict.fromkeys(unknown, 1)
    for edge in structure.graph.lags:
        if edge.parent in depth:
            depth[edge.parent] = max(depth[edge.parent], edge.by)
    parts = [(node, back) for node in unknown for back in range(depth[node])]
    size = math.prod(mechanisms[node].space.width for node, _ in parts)
    if size > most:
        shown = ", ".join(f"{node!r} ({mechanisms[node].space.width}, {depth[node]} steps)" for node in unknown)
        raise ModelError(
            f"the unknown categories {shown} have {size} joint states; at most {most} can be enumerated: use "
            "fewer states, hidden nodes or lags"
        )
    codes = joint_codes([mechanisms[node].space.width for node, _ in parts])
    digits = dict(zip(parts, codes, strict=True))
    now, before = {}, {}
    follows, begins = torch.ones(size, size, dtype=torch.bool), torch.ones(size, dtype=torch.bool)
    for (node, back), digit in digits.items():
        one_hot = torch.eye(mechanisms[node].space.width, dtype=dtype)[digit]
        now[lag_name(node, back) if back else node] = one_hot
        before[lag_name(node, back + 1)] = one_hot
        if back:
            follows &= digits[node, back - 1].unsqueeze(1) == digit.unsqueeze(0)
            begins &= digit == 0
    return States(tuple(unknown), size, now, before, None if bool(follows.all()) else follows, begins)


STRETCH = 32  # steps of a stretch: all that is done one after another
SIDE_BY_SIDE = 400  # sequences times replicas from which on a step of all of them keeps a processor busy: none is cut
FEW_STATES = 24  # up to which it is sooner to multiply the matrices of stretches, by the cube of states, than to run on


@dataclass(frozen=True, eq=False)
class Lanes:
    """Sequences cut from their ends into lanes of one length, those of a sequence side by side in order of time.

    Of a sequence the first lane may be shorter: it begins some places later than others, with what comes before left
    empty.

    Attributes:
        columns: The column of each step of each lane (L, B); zero where there is none.
        inside: Whether there is one (L, B).
        place: Where each column stands in them (m,).
        begins: At which place sequences begin, and the lanes in which they do.
        ends: The last lane of each sequence (n,).
        owners: The sequence of each lane (B,).
    """

    columns: Ints
    inside: Flags
    place: Ints
    begins: tuple[tuple[int, Ints], ...]
    ends: Ints
    owners: Ints

    @classmethod
    def of(cls, sizes: Sequence[int], length: int) -> Lanes:
        """Of sequences in falling order of length, ``sizes[k]`` of which have a k-th step."""
        running = np.fromiter(sizes, np.int64, len(sizes))
        many, total = int(running[0]), int(running.sum())
        steps = len(running) - np.searchsorted(running[::-1], np.arange(many), side="right")  # of each sequence
        counts = -(-steps // length)
        ends, owners = counts.cumsum() - 1, np.repeat(np.arange(many), counts)
        empty = counts * length - steps
        time = (np.arange(len(owners)) - (ends - counts + 1)[owners]) * length - empty[owners]
        time = time[None, :] + np.arange(length)[:, None]
        inside = time >= 0
        columns = np.where(inside, (running.cumsum() - running)[np.maximum(time, 0)] + owners, 0)
        place = np.empty(total, dtype=np.int64)
        place[columns[inside]] = np.flatnonzero(inside)
        first = ends - counts + 1
        begins = tuple((int(at), first[empty == at]) for at in np.unique(empty))
        return cls(columns, inside, place, begins, ends, owners)

    @property
    def are_cut(self) -> bool:
        """Whether some sequence has several lanes."""
        return len(self.owners) > len(self.ends)

    def in_columns(self, values: Array) -> Tensor:
        """Values (L, ..., B) at places as those of columns (..., m)."""
        flat = np.moveaxis(values, 0, -2).reshape(*values.shape[1:-1], -1)
        return torch.from_numpy(np.take(flat, self.place, -1))


@dataclass(frozen=True)
class Block:
    """Sequences in falling order of length, their steps in order of time: the k-th steps of all lie side by side.

    Attributes:
        kinds: For each column the row of the potentials (m,).
        rows: For each column the row of the batch (m,).
        sizes: How many sequences have a k-th step, for each k.
        sequences: The number of each sequence in the batch.
    """

    kinds: Tensor
    rows: Tensor
    sizes: tuple[int, ...]
    sequences: Tensor

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """First column and number of columns of each step."""
        return list(zip(accumulate(self.sizes, initial=0), self.sizes, strict=False))

    @cached_property
    def owners(self) -> Tensor:
        """For each column the position of its sequence among the block's (m,)."""
        return torch.cat([torch.arange(size) for size in self.sizes])

    @cached_property
    def steps(self) -> Tensor:
        """For each column the number of its step (m,)."""
        return torch.arange(len(self.sizes)).repeat_interleave(torch.tensor(self.sizes))

    def back(self, by: int) -> Tensor:
        """For each column that of the same sequence so many steps before, or of its first step (m,)."""
        first = torch.tensor([at for at, _ in self.spans])
        return first[(self.steps - by).clamp(min=0)] + self.owners

    @cached_property
    def whole(self) -> Lanes:
        """A lane for each sequence."""
        return Lanes.of(self.sizes, len(self.sizes))

    @cached_property
    def stretches(self) -> Lanes:
        """Sequences cut into stretches that lie side by side."""
        return Lanes.of(self.sizes, STRETCH)

    def lanes(self, replicas: int, states: int) -> Lanes:
        """Sequences are cut where they are long, and too few to run side by side: that changes time, not results."""
        is_long = len(self.sizes) >= 2 * STRETCH and self.sizes[0] * replicas <= SIDE_BY_SIDE
        return self.stretches if is_long and states <= FEW_STATES else self.whole


@dataclass(frozen=True)
class Chain:
    """Sequences laid out for the chain: the distinct steps, and which of them each step is.

    Attributes:
        states: The joint states.
        values: What the distinct steps show, (1, U, width), earlier values included.
        mask: Which cells they show.
        phase: How many steps came before, cut off at the longest lag (U,).
        blocks: The sequences.
        longest_lag: The longest lag.
        varying: Whether the pair potentials depend on what is observed.
    """

    states: States
    values: Mapping[str, Tensor]
    mask: Mapping[str, Tensor]
    phase: Tensor
    blocks: tuple[Block, ...]
    longest_lag: int
    varying: bool

    @classmethod
    def of(
        cls,
        structure: Structure,
        states: States,
        values: Mapping[str, Tensor],
        mask: Mapping[str, Tensor],
        times: Tensor,
        blocks: tuple[Block, ...],
    ) -> Chain:
        """Steps that came after ``times`` (U,) others, in blocks."""
        longest = max((edge.by for edge in structure.graph.lags), default=0)
        return cls(states, values, mask, times.clamp(max=longest), blocks, longest, pairs_vary(structure, states))

    @property
    def dtype(self) -> torch.dtype:
        """The precision of all tables."""
        return next(iter(self.states.now.values()), torch.zeros(0, dtype=torch.float64)).dtype

    @property
    def is_uniform(self) -> bool:
        """Whether all steps but the first of sequences have the same pair potentials."""
        return not self.varying and self.longest_lag <= 1

    @property
    def pair_rows(self) -> Tensor:
        """The row of the pair potentials before each kind of steps (U,)."""
        return torch.arange(len(self.phase)) if self.varying else self.phase

    def shows_parents(self, structure: Structure, node: str) -> Tensor:
        """Kinds of steps (U,) in which all observed parents of a node are wholly seen."""
        shown = torch.ones(len(self.phase), dtype=torch.bool)
        for name, _ in structure.mechanisms[node].family.parents:
            if name not in self.states.now and name not in self.states.before:
                shown = shown & self.mask[name][0].all(-1)
        return shown


def lay_out_chain(structure: Structure, batch: SequenceBatch, *, block_steps: int = 1_000_000) -> Chain:
    """Find the states and the distinct steps, and put the sequences in order.

    A forward-backward pass has ``block_steps`` steps times states; more would only fill memory.
    """
    graph, steps = structure.graph, batch.steps
    _check_supported(structure, batch)
    unknown = tuple(n for n in graph.order if n in graph.hidden or _missing_parent(structure, batch, n))
    states = joint_states(structure, unknown, steps.weight.dtype)
    values, mask = with_earlier(structure, batch)
    longest = max((edge.by for edge in graph.lags), default=0)
    phase = batch.times.clamp(max=longest)
    code, count = distinct_rows([*values.values(), *mask.values(), phase[None, :, None].to(steps.weight)])
    kinds = torch.from_numpy(code)
    if count <= 0.5 * batch.rows:
        first = torch.empty(count, dtype=torch.int64)
        first[kinds.flip(0)] = torch.arange(batch.rows).flip(0)
        values = {name: value.index_select(1, first) for name, value in values.items()}
        mask = {name: seen.index_select(1, first) for name, seen in mask.items()}
        phase = phase[first]
    else:
        kinds = torch.arange(batch.rows)
    return Chain.of(structure, states, values, mask, phase, _blocks(batch, kinds, block_steps // states.size))


def with_earlier(structure: Structure, batch: SequenceBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What all steps show (1, M, width), and which cells; earlier values under their own names.

    Steps that have none before them keep their first one's, which no mechanism reads.
    """
    values, mask = dict(batch.steps.values), dict(batch.steps.mask)
    for parent, by in dict.fromkeys((edge.parent, edge.by) for edge in structure.graph.lags):
        if parent in batch.steps.values:
            name = lag_name(parent, by)
            values[name], mask[name] = (batch.lagged(held[parent], by) for held in (values, mask))
    return values, mask


def _check_supported(structure: Structure, batch: SequenceBatch) -> None:
    for node, mechanism in structure.mechanisms.items():
        if not mechanism.has_density and not mechanism.is_given:
            raise ModelError(f"node {node!r}: {type(mechanism).__name__} has no density, which a sequence needs")
    for node in structure.graph.hidden:
        if not structure.mechanisms[node].space.is_discrete:
            raise ModelError(f"hidden node {node!r} is no category; the chain enumerates categories only")
    structure.check_given(batch.steps.mask)


def _missing_parent(structure: Structure, batch: SequenceBatch, node: str) -> bool:
    """Whether an observed category has missing cells and children, so that it is summed over where it is missing."""
    graph, mechanism = structure.graph, structure.mechanisms[node]
    if node not in batch.steps.mask or mechanism.is_given or not mechanism.space.is_discrete:
        return False
    has_children = bool(graph.children(node)) or any(edge.parent == node for edge in graph.lags)
    return has_children and not bool(batch.steps.mask[node].all())


def _blocks(batch: SequenceBatch, kinds: Tensor, most: int) -> tuple[Block, ...]:
    """Group sequences of similar length, half the longest on average or more; a sequence is never cut here."""
    lengths, order = batch.lengths.sort(descending=True, stable=True)
    blocks, at = [], 0
    while at < len(order):
        longest = int(lengths[at])
        filled = 2 * lengths[at:].cumsum(0) >= longest * torch.arange(1, len(order) - at + 1)
        alike = int(filled.long().cumprod(0).sum())
        blocks.append(_block(batch, kinds, order[at : at + min(alike, max(1, most // longest))]))
        at += len(blocks[-1].sequences)
    return tuple(blocks)


def _block(batch: SequenceBatch, kinds: Tensor, sequences: Tensor) -> Block:
    """Sequences in falling order of length."""
    lengths, starts = batch.lengths[sequences], batch.starts[sequences]
    times = torch.arange(int(lengths[0])).unsqueeze(1)
    grid, inside = starts + times, times < lengths
    rows = grid.flatten() if bool(inside.all()) else grid[inside]
    return Block(kinds[rows], rows, tuple(inside.sum(1).tolist()), sequences)


def one_block(batch: SequenceBatch) -> Block:
    """All sequences in one block, every step of its own kind."""
    return _block(batch, torch.arange(batch.rows), batch.lengths.sort(descending=True, stable=True).indices)


def pairs_vary(structure: Structure, states: States) -> bool:
    """Whether a mechanism that joins two steps' states also depends on something observed."""
    for node, mechanism in structure.mechanisms.items():
        names = [name for name, _ in mechanism.family.parents]
        hidden = [name for name in names if name in states.now or name in states.before]
        joins = any(name not in states.now for name in hidden)
        base = structure.base(node)
        if joins and (len(hidden) < len(names) or base not in states.nodes):
            return True
    return False


# An emission is never less likely than exp of this, relative to the likeliest state's: 1e-200 leaves a message and a
# transition room above the smallest number of double precision, 1e-308.
SMALLEST_LOG = -460.0


@dataclass(frozen=True)
class Potentials:
    """Log-potentials of one or more replicas, with gradients.

    Attributes:
        hidden: What the hidden categories' own mechanisms say about one step's states (R, U, S).
        observed: What the observed nodes' mechanisms say (R, U, S).
        pair: What mechanisms say about the states of two steps: (R, phases, S, S), or (R, U, S, S) if varying.
    """

    hidden: Tensor
    observed: Tensor
    pair: Tensor


def potentials(structure: Structure, naturals: Naturals, chain: Chain) -> Potentials:
    """Evaluate every mechanism once on the distinct steps and all states."""
    states, dtype = chain.states, chain.dtype
    forbidden = torch.full((), -torch.inf, dtype=dtype)
    begins = torch.where(states.begins, torch.zeros((), dtype=dtype), forbidden)
    hidden = torch.where((chain.phase == 0).unsqueeze(-1), begins, 0.0).unsqueeze(0)
    observed = torch.zeros(1, len(chain.phase), states.size, dtype=dtype)
    many = len(chain.phase) if chain.varying else chain.longest_lag + 1
    pair = torch.zeros(1, many, states.size, states.size, dtype=dtype)
    if states.follows is not None:
        pair = pair + torch.where(states.follows, torch.zeros_like(forbidden), forbidden)
    for node, mechanism in structure.mechanisms.items():
        base = structure.base(node)
        if mechanism.is_given:
            continue
        table, joins = _term(structure, naturals, states, node, chain)
        lag = structure.longest_lag(base)
        if joins:
            phase = chain.phase if chain.varying else torch.arange(many)
            active = (phase >= lag) & (chain.shows_parents(structure, node) if chain.varying else True)
            pair = pair + torch.where(active[:, None, None], table, 0.0)
            continue
        active = chain.phase < lag if node != base else chain.phase >= lag
        active = active & chain.shows_parents(structure, node)
        table = torch.where(active.unsqueeze(-1), table, 0.0)
        hidden, observed = (hidden + table, observed) if base in states.nodes else (hidden, observed + table)
    return Potentials(hidden + _clamp(chain), observed, pair)


def _term(
    structure: Structure, naturals: Naturals, states: States, node: str, chain: Chain | None = None
) -> tuple[Tensor, bool]:
    """Log-densities of one mechanism: (R, U or 1, S) or, if it joins two steps' states, (R, U or 1, S, S).

    Its arguments have distinct steps of the ``chain`` first, states before next to last, and states now last.
    """
    base, mechanism, mask = structure.base(node), structure.mechanisms[node], None
    names = [name for name, _ in mechanism.family.parents]
    joins = any(name in states.before and name not in states.now for name in names)

    def in_steps(value: Tensor) -> Tensor:
        return value[:, :, None, None] if joins else value[:, :, None]

    def spread(name: str) -> Tensor:
        if name in states.now:
            value = states.now[name]
            return value[None, None, None] if joins else value[None, None]
        if name in states.before:
            return states.before[name][None, None, :, None]
        assert chain is not None, "a node that is not hidden has values in steps"
        return in_steps(chain.values[name])

    if chain is not None and base not in states.nodes and not bool(chain.mask[base].all()):
        mask = in_steps(chain.mask[base])
    table = mechanism.log_prob(naturals[node], spread(base), {name: spread(name) for name in names}, mask)
    return table.expand(*table.shape[:2], *(states.size,) * (2 if joins else 1)), joins


@dataclass(frozen=True, eq=False)
class HiddenFamily:
    """A hidden node whose log-density is features of its value times a row of coefficients, in every state or pair.

    Attributes:
        features: Of its value in each state (S, F).
        rows: Rows of coefficients: one for each configuration of its parents.
        place: Of each state, or of each pair with those before first, the row and the state, as one number (n,).
    """

    mechanism: ExponentialFamily
    features: Tensor
    rows: int
    place: Tensor

    @classmethod
    def of(cls, mechanism: Mechanism, node: str, states: States) -> HiddenFamily | None:
        """None for a mechanism without features."""
        if not isinstance(mechanism, ExponentialFamily):
            return None
        own, family = states.now[node], mechanism.family
        features = mechanism.features(own, torch.ones_like(own[:, :1], dtype=torch.bool))
        if features is None:
            return None
        row, rows = torch.zeros(1, dtype=torch.long), 1
        for name, space in family.parents:
            is_now = name in states.now
            digit = (states.now if is_now else states.before)[name].argmax(-1)
            row, rows = space.width * row + (digit if is_now else digit.unsqueeze(1)), space.width * rows
        return cls(mechanism, features, rows, (states.size * row + torch.arange(states.size)).flatten())

    def potentials(self, params: Params) -> Tensor:
        """Log-densities (R, 1 or S, S)."""
        table = self.mechanism.coefficients(params) @ self.features.T
        return table.flatten(1)[:, self.place].unflatten(-1, (-1, len(self.features)))

    def maximised(self, params: Params, weight: Tensor) -> dict[str, Tensor]:
        """The likeliest parameters for expected counts of states, or of pairs (R, n)."""
        counts = weight.new_zeros(len(weight), self.rows * len(self.features)).index_add_(1, self.place, weight)
        return self.mechanism.fitted(params, counts.unflatten(-1, (self.rows, -1)) @ self.features)


@dataclass(frozen=True, eq=False)
class HiddenFamilies:
    """All that hidden nodes say of states where none reads an observed node and lags are one step at most."""

    structure: Structure
    states: States
    known: Mapping[str, HiddenFamily | None]

    @classmethod
    def of(cls, structure: Structure, states: States) -> HiddenFamilies:
        """The families of all hidden nodes, and of those in first steps."""
        names = (name for name in structure.mechanisms if structure.base(name) in states.nodes)
        known = {name: HiddenFamily.of(structure.mechanisms[name], structure.base(name), states) for name in names}
        return cls(structure, states, known)

    def potentials(self, naturals: Naturals) -> tuple[Tensor, Tensor]:
        """Log-potentials of the states of first steps (R, S), and of pairs of states (R, S, S)."""
        begun, joined = [], []
        for name, family in self.known.items():
            base = self.structure.base(name)
            if family is None:
                table, joins = _term(self.structure, naturals, self.states, name)
                table = table[:, 0] if joins else table
            else:
                table, joins = family.potentials(naturals[name]), self._joins(name)
            if not joins and (self.structure.longest_lag(base) > 0) == (name != base):
                begun.append(table[:, 0])
            if name == base:
                joined.append(table)
        none = torch.zeros(1, self.states.size, dtype=torch.float64)
        return sum(begun, none), sum(joined, none.unsqueeze(1).expand(-1, self.states.size, -1))

    def maximised(self, naturals: Naturals, first: Tensor, every: Tensor, pair: Tensor) -> dict[str, dict[str, Tensor]]:
        """Parameters from expected counts of first states (R, S), of all (R, S), and of pairs (R, S, S)."""
        found = {}
        for name, family in self.known.items():
            if self.structure.keys[name]:
                assert family is not None, "what has a maximum in closed form has features"
                at_first = self.structure.base(name) != name
                weight = pair.flatten(1) if self._joins(name) else first if at_first else every
                found[name] = family.maximised(naturals[name], weight)
        return found

    def _joins(self, name: str) -> bool:
        """Whether a parent is an earlier value."""
        return any(parent not in self.states.now for parent, _ in self.structure.mechanisms[name].family.parents)


def _clamp(chain: Chain) -> Tensor:
    """Zero where a state agrees with what is seen of an otherwise unknown category, minus infinity elsewhere."""
    agreement = torch.zeros(1, 1, chain.states.size, dtype=chain.dtype)
    for node in chain.states.nodes:
        if node in chain.values:
            agrees = (chain.values[node] @ chain.states.now[node].T) > 0.5
            impossible = chain.mask[node].all(-1, keepdim=True) & ~agrees
            agreement = agreement + torch.zeros_like(agreement).masked_fill(impossible, -torch.inf)
    return agreement


@dataclass(frozen=True)
class Linear:
    """Potentials ready for the recursion: exponentials, the largest one of each step taken out.

    Attributes:
        unary: (R, S, U).
        log_unit: (R, U).
        pair: (R, phases or U, S, S).
    """

    unary: Tensor
    log_unit: Tensor
    pair: Tensor

    @classmethod
    def of(cls, logs: Potentials, eps: float = 1.0, replicas: int = 1) -> Linear:
        """Take exponentials, for so many replicas at least; with ``eps``, the observed part is divided by it."""
        with torch.no_grad():
            unary = (logs.hidden + logs.observed / eps).transpose(1, 2)
            unit = unary.amax(1)
            level = unary - unit.unsqueeze(1)
            floor = torch.where(torch.isneginf(level), level, level.clamp(min=SMALLEST_LOG))
            replicas = max(unary.shape[0], logs.pair.shape[0], replicas)
            pair = torch.exp(logs.pair).expand(replicas, -1, -1, -1)
            return cls(torch.exp(floor).expand(replicas, -1, -1), unit.expand(replicas, -1), pair.contiguous())
