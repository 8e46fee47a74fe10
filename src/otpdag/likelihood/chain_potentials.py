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

from otpdag.likelihood.chain_layout import Chain, States
from otpdag.mechanisms.base import Mechanism, fitted_to_rows
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
        if mechanism.is_given:
            continue
        base = structure.base(node)
        table, joins = _term(structure, naturals, chain, node)
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


def _term(structure: Structure, naturals: Naturals, chain: Chain, node: str) -> tuple[Tensor, bool]:
    """Log-densities of one mechanism: (R, U or 1, S) or, if it joins two steps' states, (R, U or 1, S, S).

    Its arguments have distinct steps first, states before next to last, and states now last.
    """
    states, base, mechanism = chain.states, structure.base(node), structure.mechanisms[node]
    names = [name for name, _ in mechanism.family.parents]
    joins = any(name in states.before and name not in states.now for name in names)

    def in_steps(value: Tensor) -> Tensor:
        return value[:, :, None, None] if joins else value[:, :, None]

    def spread(name: str) -> Tensor:
        if name in states.now:
            value = states.now[name]
            return value[None, None, None] if joins else value[None, None]
        return states.before[name][None, None, :, None] if name in states.before else in_steps(chain.values[name])

    has_gaps = base not in states.nodes and not bool(chain.mask[base].all())
    mask = in_steps(chain.mask[base]) if has_gaps else None
    table = mechanism.log_prob(naturals[node], spread(base), {name: spread(name) for name in names}, mask)
    return table.expand(*table.shape[:2], *(states.size,) * (2 if joins else 1)), joins


@dataclass(frozen=True, eq=False)
class HiddenNode:
    """A mechanism of a hidden category, and what it is evaluated at: all states, or all pairs of states.

    Attributes:
        name: Its name, that of the first steps' mechanism included.
        mechanism: How it comes about.
        value: Its values (1, S, width), or (1, S S, width) if it joins two steps' states: states before go first.
        parents: The values of its parents.
        joins: Whether it joins two steps' states.
        begins: Whether it speaks of first steps.
        goes_on: Whether it speaks of later ones.
        is_learned: Whether it has parameters to learn.
    """

    name: str
    mechanism: Mechanism
    value: Tensor
    parents: Mapping[str, Tensor]
    joins: bool
    begins: bool
    goes_on: bool
    is_learned: bool


@dataclass(frozen=True, eq=False)
class HiddenNodes:
    """All that hidden nodes say of states, where it depends on no observed value and lags are one step at most.

    Laid out once: between two evaluations only parameters differ, and there are many evaluations.
    """

    states: States
    nodes: tuple[HiddenNode, ...]

    @classmethod
    def of(cls, structure: Structure, states: States) -> HiddenNodes:
        """Of states of all hidden nodes, none of which reads an observed one."""
        nodes = []
        for name, mechanism in structure.mechanisms.items():
            base = structure.base(name)
            if base not in states.nodes:
                continue
            parents = [parent for parent, _ in mechanism.family.parents]
            joins = any(parent not in states.now for parent in parents)
            value, *above = (_in_states(states, one, in_pairs=joins).unsqueeze(0) for one in (base, *parents))
            begins = not joins and (structure.longest_lag(base) > 0) == (name != base)
            held = dict(zip(parents, above, strict=True))
            learned = bool(structure.keys[name])
            nodes.append(HiddenNode(name, mechanism, value, held, joins, begins, name == base, learned))
        return cls(states, tuple(nodes))

    def log_potentials(self, naturals: Naturals) -> tuple[Tensor, Tensor]:
        """Of the states of first steps (R, S), and of pairs of states (R, S, S)."""
        size = self.states.size
        begun = torch.zeros(1, size, dtype=torch.float64)
        joined = begun.new_zeros(1, size, size)
        for one in self.nodes:
            table = one.mechanism.log_prob(naturals[one.name], one.value, one.parents)
            begun = begun + table if one.begins else begun
            if one.goes_on:
                joined = joined + (table.unflatten(1, (size, size)) if one.joins else table.unsqueeze(1))
        return begun, joined

    def maximised(self, naturals: Naturals, first: Tensor, every: Tensor, pair: Tensor) -> dict[str, dict[str, Tensor]]:
        """Parameters from expected counts of first states (R, S), of all (R, S), and of pairs of states (R, S, S)."""
        found = {}
        for one in self.nodes:
            weight = pair.flatten(1) if one.joins else every if one.goes_on else first
            if one.is_learned:
                found[one.name] = fitted_to_rows(one.mechanism, naturals[one.name], one.value[0], one.parents, weight)
        return found


def _in_states(states: States, name: str, *, in_pairs: bool) -> Tensor:
    """A hidden node's value, now or before, in all states, or in all pairs of states: those before go first."""
    if name not in states.now:
        return states.before[name].repeat_interleave(states.size, 0)
    return states.now[name].repeat(states.size, 1) if in_pairs else states.now[name]


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
