"""Sequences laid out for a chain: the joint states of what is unknown, the distinct steps, and blocks of sequences.

Steps that show the same share one row of the potentials, so that a million counts cost a few hundred densities. In a
block the k-th steps of all sequences lie side by side; recursions run over lanes, which are its sequences or, where
these are few and long, stretches of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.data.batch import distinct_rows
from otpdag.data.sequences import SequenceBatch
from otpdag.errors import DataError, ModelError
from otpdag.numerics import joint_codes
from otpdag.structure import Structure, lag_name


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

    columns: NDArray[np.int64]
    inside: NDArray[np.bool_]
    place: NDArray[np.int64]
    begins: tuple[tuple[int, NDArray[np.int64]], ...]
    ends: NDArray[np.int64]
    owners: NDArray[np.int64]

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

    @cached_property
    def _in_order(self) -> bool:
        return bool((self.place == np.arange(self.inside.size)).all()) if self.inside.all() else False

    def in_columns(self, values: NDArray[np.float64]) -> Tensor:
        """Values (L, ..., B) at places as those of columns (..., m)."""
        flat = np.moveaxis(values, 0, -2).reshape(*values.shape[1:-1], -1)
        return torch.from_numpy(flat if self._in_order else np.take(flat, self.place, -1))


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
        spans, at = [], 0
        for size in self.sizes:
            spans.append((at, size))
            at += size
        return spans

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
    def steps(self) -> int:
        """Number of steps."""
        return sum(len(block.kinds) for block in self.blocks)

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return sum(block.sizes[0] for block in self.blocks)

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


def lay_out_chain(structure: Structure, batch: SequenceBatch, *, block_steps: int = 2_000_000) -> Chain:
    """Find the states and the distinct steps, and put the sequences in order.

    A forward-backward pass has ``block_steps`` steps times states; more would only fill memory.
    """
    graph, steps = structure.graph, batch.steps
    _check_supported(structure, batch)
    unknown = tuple(n for n in graph.order if n in graph.hidden or _missing_parent(structure, batch, n))
    states = joint_states(structure, unknown, steps.weight.dtype)
    values, mask = dict(steps.values), dict(steps.mask)
    for parent, by in dict.fromkeys((edge.parent, edge.by) for edge in graph.lags):
        if parent in steps.values:
            name = lag_name(parent, by)
            values[name] = batch.lagged(steps.values[parent], by)
            mask[name] = batch.lagged(steps.mask[parent], by)
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


def _check_supported(structure: Structure, batch: SequenceBatch) -> None:
    for node, mechanism in structure.mechanisms.items():
        if not mechanism.has_density and not mechanism.is_given:
            raise ModelError(f"node {node!r}: {type(mechanism).__name__} has no density, which a sequence needs")
    for node in structure.graph.hidden:
        if not structure.mechanisms[node].space.is_discrete:
            raise ModelError(f"hidden node {node!r} is no category; the chain enumerates categories only")
    for node in structure.given:
        if not bool(batch.steps.mask[node].all()):
            raise DataError(f"node {node!r} is Given: its values must not be missing")


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
