r"""The potentials of the chain: what the mechanisms say about one step's hidden states, and about two steps'.

With marginal noise the best backward map of a sequence is a Markov chain,

.. math:: \phi(s_{1:T} \mid x) \propto \prod_t U_t(s_t) \, P_t(s_{t-1}, s_t),

where the potentials are those that the mechanisms give: U holds what depends on one step's hidden states (emissions,
first steps), P what depends on two (transitions).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.likelihood.chain_layout import Chain
from otpdag.mechanisms.base import Mechanism, Params
from otpdag.mechanisms.categorical import Categorical
from otpdag.mechanisms.predictor import configurations
from otpdag.mechanisms.protocols import defines_together
from otpdag.structure import Naturals, Structure

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


def potentials(structure: Structure, naturals: Naturals, chain: Chain, emitted: Tensor | None = None) -> Potentials:
    """Evaluate every mechanism once on the distinct steps and all states.

    ``emitted`` (R, U, S) is what observed nodes say of states, if that is known already.
    """
    states, dtype = chain.states, chain.dtype
    forbidden = torch.full((), -torch.inf, dtype=dtype)
    begins = torch.where(states.begins, torch.zeros((), dtype=dtype), forbidden)
    hidden = torch.where((chain.phase == 0).unsqueeze(-1), begins, 0.0).unsqueeze(0)
    observed = torch.zeros(1, len(chain.phase), states.size, dtype=dtype) if emitted is None else emitted
    many = len(chain.phase) if chain.varying else chain.longest_lag + 1
    pair = torch.zeros(1, many, states.size, states.size, dtype=dtype)
    if states.follows is not None:
        pair = pair + torch.where(states.follows, torch.zeros_like(forbidden), forbidden)
    for node, mechanism in structure.mechanisms.items():
        if mechanism.is_given:
            continue
        base = structure.base(node)
        if emitted is not None and base not in states.nodes:
            continue
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


@dataclass(frozen=True, eq=False)
class _Arguments:
    """What a mechanism is evaluated at: its own values, its parents', and which are seen (all if None).

    ``joins`` tells whether it joins two steps' states.
    """

    value: Tensor
    parents: Mapping[str, Tensor]
    mask: Tensor | None
    joins: bool


def _arguments(structure: Structure, chain: Chain, node: str) -> _Arguments:
    """Lay out a mechanism's arguments: distinct steps first, states before next to last, states now last."""
    states, base = chain.states, structure.base(node)
    names = [name for name, _ in structure.mechanisms[node].family.parents]
    hidden = [name for name in names if name in states.now or name in states.before]
    joins = any(name not in states.now for name in hidden)

    def spread(name: str) -> Tensor:
        if name in states.now:
            value = states.now[name]
            return value[None, None, None] if joins else value[None, None]
        if name in states.before:
            return states.before[name][None, None, :, None]
        value = chain.values[name]
        return value[:, :, None, None] if joins else value[:, :, None]

    mask = None
    if base not in states.nodes and not bool(chain.mask[base].all()):
        seen = chain.mask[base]
        mask = seen[:, :, None, None] if joins else seen[:, :, None]
    return _Arguments(spread(base), {name: spread(name) for name in names}, mask, joins)


def _term(structure: Structure, naturals: Naturals, chain: Chain, node: str) -> tuple[Tensor, bool]:
    """Log-densities of one mechanism: (R, U or 1, S) or, if it joins two steps' states, (R, U or 1, S, S)."""
    at = _arguments(structure, chain, node)
    table = structure.mechanisms[node].log_prob(naturals[node], at.value, at.parents, at.mask)
    size = chain.states.size
    return table.expand(*table.shape[:2], *((size, size) if at.joins else (size,))), at.joins


@dataclass(frozen=True, eq=False)
class HiddenTable:
    """A hidden node whose log-density is an entry of a table: which one, in all states or in all pairs of states.

    Attributes:
        mechanism: How it comes about.
        entry: Entries of the table, laid flat (S,) or (S S,), those of states before going first.
        is_whole: Whether these are all entries in their own order.
    """

    mechanism: Categorical
    entry: Tensor
    is_whole: bool

    @classmethod
    def of(cls, mechanism: Mechanism, value: Tensor, parents: Mapping[str, Tensor]) -> HiddenTable | None:
        """By its one-hot values (..., width) and its parents'; None where it is no table, or cannot be read as one."""
        if not isinstance(mechanism, Categorical) or not mechanism.is_table:
            return None
        if not defines_together(mechanism, "log_prob", "coefficients", "fitted"):
            return None
        rows = configurations(mechanism.family, parents)
        row = torch.zeros(1, dtype=torch.long) if rows is None else rows.argmax(-1)
        entry = (row * mechanism.size + value.argmax(-1)).flatten()
        many = mechanism.predictor.rows * mechanism.size
        return cls(mechanism, entry, entry.tolist() == list(range(many)))

    def log_prob(self, params: Params) -> Tensor:
        """In all states, or in all pairs of them: (R, S or S S)."""
        table = self.mechanism.coefficients(params).flatten(1)
        return table if self.is_whole else table[:, self.entry]

    def maximised(self, params: Params, weight: Tensor) -> dict[str, Tensor]:
        """Parameters from expected counts (R, S or S S)."""
        shape = params["probs"].shape[1:]
        if not self.is_whole:
            weight = weight.new_zeros(len(weight), shape.numel()).index_add_(1, self.entry, weight)
        return self.mechanism.fitted(params, weight.reshape(-1, *shape))


@dataclass(frozen=True, eq=False)
class HiddenNodes:
    """All that hidden nodes say of states, where it depends on no observed value and lags are one step at most.

    Laid out once: between two evaluations only parameters differ, and there are many evaluations.

    Attributes:
        begins: Zero for states that a sequence may begin with, minus infinity for others (S,).
        follows: Zero for states that may follow one another, minus infinity for others (S before, S now).
        terms: The nodes, their arguments, and whether they speak of first steps and of later ones.
        tables: Those of them that are tables.
    """

    begins: Tensor
    follows: Tensor
    terms: tuple[tuple[str, Mechanism, _Arguments, bool, bool], ...]
    tables: Mapping[str, HiddenTable]

    @classmethod
    def of(cls, structure: Structure, chain: Chain) -> HiddenNodes:
        """Of a chain in which no hidden node reads an observed one."""
        states, terms, tables = chain.states, [], {}
        for node, mechanism in structure.mechanisms.items():
            base = structure.base(node)
            if mechanism.is_given or base not in states.nodes:
                continue
            at, lag = _arguments(structure, chain, node), structure.longest_lag(base)
            first = not at.joins and (lag > 0) == (node != base)
            terms.append((node, mechanism, at, first, node == base))
            table = HiddenTable.of(mechanism, at.value, at.parents)
            if table is not None:
                tables[node] = table
        begins = _allowed(states.begins, chain.dtype)
        follows = torch.zeros(states.size, states.size, dtype=chain.dtype)
        follows = follows if states.follows is None else _allowed(states.follows, chain.dtype)
        return cls(begins, follows if chain.longest_lag else follows + begins, tuple(terms), tables)

    def log_potentials(self, naturals: Naturals) -> tuple[Tensor, Tensor]:
        """Of the states of first steps (R, S), and of pairs of states (R, S, S)."""
        begun, joined = self.begins.unsqueeze(0), self.follows.unsqueeze(0)
        size = len(self.begins)
        for node, mechanism, at, first, later in self.terms:
            if node in self.tables:
                table = self.tables[node].log_prob(naturals[node]).unflatten(1, (-1, size) if at.joins else (size,))
            else:
                table = mechanism.log_prob(naturals[node], at.value, at.parents)[:, 0]
            begun = begun + table if first else begun
            joined = joined + (table if at.joins else table.unsqueeze(1)) if later else joined
        return begun, joined


def _allowed(which: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(which.shape, dtype=dtype).masked_fill(~which, -torch.inf)


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
    """Potentials ready for the recursion: exponentials, the largest one of each step taken out."""

    unary: Tensor
    """(R, S, U)."""
    log_unit: Tensor
    """(R, U)."""
    pair: Tensor
    """(R, phases or U, S, S)."""

    @classmethod
    def of(cls, logs: Potentials, eps: float = 1.0) -> Linear:
        """Take exponentials; with ``eps``, the observed part is divided by it."""
        with torch.no_grad():
            unary = (logs.hidden + logs.observed / eps).transpose(1, 2)
            unit = unary.amax(1)
            level = unary - unit.unsqueeze(1)
            floor = torch.where(torch.isneginf(level), level, level.clamp(min=SMALLEST_LOG))
            replicas = max(unary.shape[0], logs.pair.shape[0])
            pair = torch.exp(logs.pair).expand(replicas, -1, -1, -1)
            return cls(torch.exp(floor).expand(replicas, -1, -1), unit.expand(replicas, -1), pair.contiguous())

    def for_replicas(self, replicas: int) -> Linear:
        """The same potentials for several replicas, whose sequences differ in weight."""
        if len(self.unary) >= replicas:
            return self
        pair = self.pair.expand(replicas, -1, -1, -1).contiguous()
        return Linear(self.unary.expand(replicas, -1, -1), self.log_unit.expand(replicas, -1), pair)
