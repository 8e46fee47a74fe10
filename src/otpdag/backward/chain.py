r"""The chain-structured backward map: exact forward-backward over the joint states of the hidden categories.

With marginal noise the best backward map of a sequence is a Markov chain,

.. math:: \phi(s_{1:T} \mid x) \propto \prod_t U_t(s_t) \, P_t(s_{t-1}, s_t),

where the potentials are those that the mechanisms give: U holds what depends on one step's hidden states (emissions,
first steps), P what depends on two (transitions). A state holds every hidden category now and, where a lag is above
one, as many earlier ones. Steps that show the same share one row of the potentials, so that a million counts cost a
few hundred densities. Messages are normalised at every step; time is linear in the number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from otpdag.data import distinct_rows
from otpdag.data.sequences import SequenceBatch
from otpdag.errors import DataError, ModelError
from otpdag.structure import Naturals, Structure, lag_name

__all__ = [
    "Block",
    "Chain",
    "Marginals",
    "Potentials",
    "States",
    "lay_out_chain",
    "marginals",
    "one_block",
    "pairs_vary",
    "potentials",
]

MOST_STATES = 1024
BLOCK_STEPS = 2_000_000  # steps times states in one forward-backward pass; more would only fill memory
LONG = 1000  # a sequence this long is cut in stretches that run side by side, if few others do
SMALLEST_LOG = -460.0  # an emission is never less likely than exp of this, relative to the likeliest state's


# --- states ----------------------------------------------------------------------------------------------------------


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


def joint_states(structure: Structure, unknown: Sequence[str], dtype: torch.dtype = torch.float64) -> States:
    """Enumerate the joint states of ``unknown`` nodes, with as many earlier values as the longest lag asks for."""
    mechanisms = structure.mechanisms
    depth = dict.fromkeys(unknown, 1)
    for edge in structure.graph.lags:
        if edge.parent in depth:
            depth[edge.parent] = max(depth[edge.parent], edge.by)
    parts = [(node, back) for node in unknown for back in range(depth[node])]
    size = math.prod(mechanisms[node].space.width for node, _ in parts)
    if size > MOST_STATES:
        shown = ", ".join(f"{node!r} ({mechanisms[node].space.width}, {depth[node]} steps)" for node in unknown)
        raise ModelError(
            f"the unknown categories {shown} have {size} joint states; at most {MOST_STATES} can be enumerated: use "
            "fewer states, hidden nodes or lags"
        )
    digits: dict[tuple[str, int], Tensor] = {}
    repeat = size
    for node, back in parts:
        width = mechanisms[node].space.width
        repeat //= width
        digits[node, back] = torch.arange(size).div(repeat, rounding_mode="floor") % width
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


# --- layout ----------------------------------------------------------------------------------------------------------


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
        found, at = [], 0
        for size in self.sizes:
            found.append((at, size))
            at += size
        return found

    @cached_property
    def columns(self) -> list[Tensor]:
        """The columns of each sequence."""
        starts = torch.tensor([at for at, _ in self.spans])
        sizes = torch.tensor(self.sizes)
        return [starts[: int((sizes > number).sum())] + number for number in range(self.sizes[0])]


@dataclass(frozen=True)
class Chain:
    """Sequences laid out for the chain: the distinct steps, and which of them each step is.

    Attributes:
        states: The joint states.
        values: What the distinct steps show, (1, U, width), earlier values included.
        mask: Which cells they show.
        phase: How many steps came before, cut off at the longest lag (U,).
        weight: How many steps are of this kind (U,).
        blocks: The sequences.
        longest_lag: The longest lag.
        varying: Whether the pair potentials depend on what is observed.
        steps: Number of steps.
        sequences: Number of sequences.
    """

    states: States
    values: Mapping[str, Tensor]
    mask: Mapping[str, Tensor]
    phase: Tensor
    weight: Tensor
    blocks: tuple[Block, ...]
    longest_lag: int
    varying: bool
    steps: int
    sequences: int

    def seen(self, names: Sequence[str]) -> Tensor:
        """Kinds of steps (U,) in which all of these nodes are wholly seen."""
        found = torch.ones(len(self.phase), dtype=torch.bool)
        for name in names:
            found = found & self.mask[name][0].all(-1)
        return found


def lay_out_chain(structure: Structure, batch: SequenceBatch, *, block_steps: int = BLOCK_STEPS) -> Chain:
    """Find the states and the distinct steps, and put the sequences in order."""
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
    weight = torch.bincount(kinds, minlength=len(phase)).to(steps.weight)
    return Chain(
        states, values, mask, phase, weight, _blocks(batch, kinds, block_steps // states.size), longest,
        pairs_vary(structure, states), batch.rows, len(batch.lengths),
    )  # fmt: skip


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
    """Group sequences of similar length; a sequence is never cut here."""
    lengths, order = batch.lengths.sort(descending=True, stable=True)
    starts = batch.starts[order]
    found, at = [], 0
    while at < len(order):
        longest = int(lengths[at])
        many = max(1, most // longest)
        part = slice(at, at + many)
        grid = starts[part].unsqueeze(0) + torch.arange(longest).unsqueeze(1)
        inside = torch.arange(longest).unsqueeze(1) < lengths[part].unsqueeze(0)
        rows = grid.flatten() if bool(inside.all()) else grid[inside]
        found.append(Block(kinds[rows], rows, tuple(inside.sum(1).tolist()), order[part]))
        at += many
    return tuple(found)


def one_block(batch: SequenceBatch) -> tuple[Block, ...]:
    """All sequences in one block, every step of its own kind."""
    return _blocks(batch, torch.arange(batch.rows), batch.rows * int(batch.lengths.max()))


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


# --- potentials ------------------------------------------------------------------------------------------------------


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
    states, like = chain.states, chain.weight
    forbidden = torch.full((), -torch.inf, dtype=like.dtype)
    begins = torch.where(states.begins, torch.zeros((), dtype=like.dtype), forbidden)
    hidden = torch.where((chain.phase == 0).unsqueeze(-1), begins, 0.0).unsqueeze(0)
    observed = torch.zeros(1, len(chain.phase), states.size, dtype=like.dtype)
    many = len(chain.phase) if chain.varying else chain.longest_lag + 1
    pair = torch.zeros(1, many, states.size, states.size, dtype=like.dtype)
    if states.follows is not None:
        pair = pair + torch.where(states.follows, torch.zeros_like(forbidden), forbidden)
    for node, mechanism in structure.mechanisms.items():
        if mechanism.is_given:
            continue
        base = structure.base(node)
        table, joins = _term(structure, naturals, chain, node)
        lag = structure.longest_lag(base)
        if joins:
            phase = chain.phase if chain.varying else torch.arange(many)
            active = (phase >= lag) & (chain.seen(_observed_parents(structure, chain, node)) if chain.varying else True)
            pair = pair + torch.where(active[:, None, None], table, 0.0)
            continue
        active = chain.phase < lag if node != base else chain.phase >= lag
        active = active & chain.seen(_observed_parents(structure, chain, node))
        table = torch.where(active.unsqueeze(-1), table, 0.0)
        hidden, observed = (hidden + table, observed) if base in states.nodes else (hidden, observed + table)
    return Potentials(hidden + _clamp(chain), observed, pair)


def _observed_parents(structure: Structure, chain: Chain, node: str) -> list[str]:
    states = chain.states
    return [
        name
        for name, _ in structure.mechanisms[node].family.parents
        if name not in states.now and name not in states.before
    ]


def _term(structure: Structure, naturals: Naturals, chain: Chain, node: str) -> tuple[Tensor, bool]:
    """Log-densities of one mechanism: (R, U or 1, S) or, if it joins two steps' states, (R, U or 1, S, S)."""
    states, base = chain.states, structure.base(node)
    mechanism = structure.mechanisms[node]
    names = [name for name, _ in mechanism.family.parents]
    hidden = [name for name in names if name in states.now or name in states.before]
    joins = any(name not in states.now for name in hidden)

    def spread(name: str) -> Tensor:
        """A parent's value: states now last, states before next to last, distinct steps first."""
        if name in states.now:
            value = states.now[name]
            return value[None, None, None] if joins else value[None, None]
        if name in states.before:
            return states.before[name][None, None, :, None]
        value = chain.values[name]
        return value[:, :, None, None] if joins else value[:, :, None]

    parents = {name: spread(name) for name in names}
    value, mask = spread(base), None
    if base not in states.nodes and not bool(chain.mask[base].all()):
        seen = chain.mask[base]
        mask = seen[:, :, None, None] if joins else seen[:, :, None]
    table = mechanism.log_prob(naturals[node], value, parents, mask)
    sizes = (states.size, states.size) if joins else (states.size,)
    return table.expand(*table.shape[:2], *sizes), joins


def _clamp(chain: Chain) -> Tensor:
    """Zero where a state agrees with what is seen of an otherwise unknown category, minus infinity elsewhere."""
    found = torch.zeros(1, 1, chain.states.size, dtype=chain.weight.dtype)
    for node in chain.states.nodes:
        if node in chain.values:
            agrees = (chain.values[node] @ chain.states.now[node].T) > 0.5
            impossible = chain.mask[node].all(-1, keepdim=True) & ~agrees
            found = found + torch.zeros_like(found).masked_fill(impossible, -torch.inf)
    return found


# --- forward and backward --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Marginals:
    """What the chain says of a block: all without gradients.

    Attributes:
        state: Probabilities of the states of each column (R, S, m).
        log_scale: Log-probability of each column given those before it (R, m); they add up to the likelihood.
        pair: Sums of the probabilities of pairs of states, one for each row of the pair potentials.
    """

    state: Tensor
    log_scale: Tensor
    pair: Tensor


@dataclass(frozen=True)
class Linear:
    """Potentials ready for the recursion: exponentials, the largest one of each step taken out."""

    unary: Tensor
    """(R, S, U)."""
    log_unit: Tensor
    """(R, U)."""
    pair: Tensor
    """(R, phases or U, S, S)."""

    @classmethod
    def of(cls, found: Potentials, eps: float = 1.0) -> Linear:
        """Take exponentials; with ``eps``, the observed part is divided by it."""
        with torch.no_grad():
            unary = (found.hidden + found.observed / eps).transpose(1, 2)
            unit = unary.amax(1)
            level = unary - unit.unsqueeze(1)
            floor = torch.where(torch.isneginf(level), level, level.clamp(min=SMALLEST_LOG))
            replicas = max(unary.shape[0], found.pair.shape[0])
            pair = torch.exp(found.pair).expand(replicas, -1, -1, -1)
            return cls(torch.exp(floor).expand(replicas, -1, -1), unit.expand(replicas, -1), pair.contiguous())


def marginals(block: Block, potential: Linear, chain: Chain) -> Marginals:
    """Run forward and backward over one block."""
    with torch.no_grad():
        few = block.sizes[0] * 20 < len(block.sizes)
        if len(block.sizes) > LONG and few and not chain.varying and chain.longest_lag <= 1:
            return _long_marginals(block, potential)
        emission = potential.unary[:, :, block.kinds]
        steps = _Steps(block, potential, chain)
        alpha, scale = _forward(emission, steps)
        pair = torch.zeros_like(potential.pair)
        _backward(alpha, emission, scale, steps, pair)
        return Marginals(alpha, torch.log(scale) + potential.log_unit[:, block.kinds], pair)


@dataclass(frozen=True)
class _Steps:
    """The pair potentials of a block's steps."""

    block: Block
    potential: Linear
    chain: Chain

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First column and number of columns of each step."""
        return self.block.spans

    def propagate(self, step: int, message: Tensor) -> Tensor:
        """States before (R, S, n) to states now."""
        if self.chain.varying:
            return torch.einsum("rin,rnij->rjn", message, self._own(step))
        return torch.bmm(self._shared(step).transpose(1, 2), message)

    def recall(self, step: int, message: Tensor) -> Tensor:
        """States now (R, S, n) to states before."""
        if self.chain.varying:
            return torch.einsum("rnij,rjn->rin", self._own(step), message)
        return torch.bmm(self._shared(step), message)

    def count(self, step: int, before: Tensor, now: Tensor, pair: Tensor) -> None:
        """Add the probabilities of pairs of states to ``pair``."""
        if self.chain.varying:
            both = torch.einsum("rin,rnij,rjn->rnij", before, self._own(step), now)
            pair.index_add_(1, self._kinds(step), both)
            return
        row = min(step, self.chain.longest_lag)
        pair[:, row] += torch.bmm(before, now.transpose(1, 2)) * self._shared(step)

    def _shared(self, step: int) -> Tensor:
        return self.potential.pair[:, min(step, self.chain.longest_lag)]

    def _kinds(self, step: int) -> Tensor:
        at, size = self.spans[step]
        return self.block.kinds[at : at + size]

    def _own(self, step: int) -> Tensor:
        return self.potential.pair.index_select(1, self._kinds(step))


def _forward(emission: Tensor, steps: _Steps) -> tuple[Tensor, Tensor]:
    """Filtered probabilities (R, S, m) and the normalisers (R, m)."""
    alpha = torch.empty_like(emission)
    scale = emission.new_empty(emission.shape[0], emission.shape[2])
    last = 0
    for step, (at, size) in enumerate(steps.spans):
        here = slice(at, at + size)
        message = emission[:, :, here]
        if step:
            message = steps.propagate(step, alpha[:, :, last : last + size]).mul_(message)
        total = message.sum(1)
        alpha[:, :, here] = message / total.unsqueeze(1)
        scale[:, here] = total
        last = at
    return alpha, scale


def _backward(alpha: Tensor, emission: Tensor, scale: Tensor, steps: _Steps, pair: Tensor) -> None:
    """Turn filtered probabilities into smoothed ones, in place, and count pairs of states."""
    spans = steps.spans
    later: Tensor | None = None  # emission times message over normaliser, of the step after
    for step in range(len(spans) - 1, -1, -1):
        at, size = spans[step]
        here = slice(at, at + size)
        filtered = alpha[:, :, here]
        message = torch.ones_like(filtered)
        if later is not None:
            many = later.shape[2]
            steps.count(step + 1, filtered[:, :, :many], later, pair)
            message[:, :, :many] = steps.recall(step + 1, later)
        later = emission[:, :, here] * message
        later /= scale[:, here].unsqueeze(1)
        filtered *= message


def _long_marginals(block: Block, potential: Linear) -> Marginals:
    """The same for few long sequences: stretches of each run side by side, joined by their transfer matrices."""
    parts = [_one_long(block.kinds[columns], potential) for columns in block.columns]
    state = torch.empty_like(
        potential.unary[:, :, :1].expand(-1, -1, len(block.kinds)), memory_format=torch.contiguous_format
    )
    log_scale = state.new_empty(state.shape[0], len(block.kinds))
    pair = torch.zeros_like(potential.pair)
    for columns, part in zip(block.columns, parts, strict=True):
        state[:, :, columns], log_scale[:, columns] = part.state, part.log_scale
        pair += part.pair
    return Marginals(state, log_scale, pair)


def _one_long(kinds: Tensor, potential: Linear) -> Marginals:
    """One sequence, cut in about sqrt(T) stretches of equal length (the last may be shorter)."""
    total = len(kinds)
    length = math.isqrt(total - 1) + 1
    many = -(-total // length)
    filled = torch.cat([kinds, kinds.new_zeros(many * length - total)]).reshape(many, length)
    emission = potential.unary[:, :, filled]  # (R, S, stretches, length)
    matrix = potential.pair[:, -1]
    used = [many if step < total - (many - 1) * length else many - 1 for step in range(length)]
    transfer, log_weight = _transfers(emission, matrix, used)
    entry = _entries(transfer, log_weight)
    # forward inside the stretches
    alpha, scale = torch.empty_like(emission), torch.ones_like(emission[:, 0])
    for step, size in enumerate(used):
        before = entry[:, :, :size] if step == 0 else alpha[:, :, :size, step - 1]
        message = torch.bmm(matrix.transpose(1, 2), before)
        if step == 0:
            message[:, :, 0] = 1.0  # the sequence begins here: its first step's potentials say all
        message *= emission[:, :, :size, step]
        scale[:, :size, step] = message.sum(1)
        alpha[:, :, :size, step] = message / scale[:, :size, step].unsqueeze(1)
    # backward inside the stretches
    ends = torch.stack([alpha[:, :, g, (length if g < many - 1 else total - g * length) - 1] for g in range(many)], -1)
    exits = _exits(transfer, log_weight, ends)
    state = torch.empty_like(emission)
    pair = torch.zeros_like(potential.pair)
    later = emission.new_zeros(*emission.shape[:2], 0)
    for step in range(length - 1, -1, -1):
        size = used[step]
        message = exits[:, :, :size].clone()
        if later.shape[2]:
            pair[:, -1] += torch.bmm(alpha[:, :, : later.shape[2], step], later.transpose(1, 2)) * matrix
            message[:, :, : later.shape[2]] = torch.bmm(matrix, later)
        state[:, :, :size, step] = alpha[:, :, :size, step] * message
        later = emission[:, :, :size, step] * message / scale[:, :size, step].unsqueeze(1)
    pair[:, -1] += torch.bmm(ends[:, :, :-1], later[:, :, 1:].transpose(1, 2)) * matrix
    log_scale = torch.log(scale).flatten(1)[:, :total] + potential.log_unit[:, kinds]
    return Marginals(state.flatten(2)[:, :, :total], log_scale, pair)


def _transfers(emission: Tensor, matrix: Tensor, used: Sequence[int]) -> tuple[Tensor, Tensor]:
    """How a stretch turns the state before it into that at its end: (R, S end, stretches, S before), with log-weights.

    Normalised for each state before; the first stretch has none before, and all its columns agree.
    """
    replicas, size, many, _ = emission.shape
    message = torch.eye(size, dtype=emission.dtype).reshape(1, size, 1, size).repeat(replicas, 1, many, 1)
    log_weight = emission.new_zeros(replicas, many, size)
    for step, count in enumerate(used):
        moved = torch.bmm(matrix.transpose(1, 2), message[:, :, :count].flatten(2)).unflatten(2, (count, size))
        if step == 0:
            moved[:, :, 0] = 1.0
        moved = moved * emission[:, :, :count, step].unsqueeze(-1)
        total = moved.sum(1).clamp(min=1e-300)
        message[:, :, :count] = moved / total.unsqueeze(1)
        log_weight[:, :count] += torch.log(total)
    return message, log_weight


def _entries(transfer: Tensor, log_weight: Tensor) -> Tensor:
    """Filtered probabilities of the state before each stretch (R, S, stretches); the first column is unused."""
    replicas, size, many, _ = transfer.shape
    entry = transfer.new_full((replicas, size, many), 1.0 / size)
    weight = torch.exp(log_weight - log_weight.amax(-1, keepdim=True))
    for g in range(many - 1):
        left = transfer[:, :, g] @ (entry[:, :, g] * weight[:, g]).unsqueeze(-1)
        entry[:, :, g + 1] = (left / left.sum(1, keepdim=True)).squeeze(-1)
    return entry


def _exits(transfer: Tensor, log_weight: Tensor, ends: Tensor) -> Tensor:
    """Backward messages at the end of each stretch (R, S, stretches), scaled so that they meet ``ends`` in one."""
    exits = torch.ones_like(ends)
    weight = torch.exp(log_weight - log_weight.amax(-1, keepdim=True))
    for g in range(ends.shape[2] - 1, 0, -1):
        message = (transfer[:, :, g] * exits[:, :, g].unsqueeze(-1)).sum(1) * weight[:, g]
        exits[:, :, g - 1] = message / (message * ends[:, :, g - 1]).sum(1, keepdim=True)
    return exits
