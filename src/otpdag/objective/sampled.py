r"""The objective with a learned backward map and drawn noise: Algorithm 1, and its abducted and entropic relatives.

Hidden and missing values are drawn from the map. Observed nodes are rebuilt from them with noise that is sampled from
its prior, abducted (then the rebuilding is exact and the noise joins the divergence), or integrated out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from otpdag.backward.amortized import AmortizedMap, RowCode
from otpdag.costs import AbstractCost, CrossEntropy, PointFunction, SmoothL1, SquaredEuclidean, as_cost
from otpdag.data import Batch
from otpdag.divergences.base import AbstractDivergence
from otpdag.layers import side_by_side
from otpdag.mechanisms import Mechanism
from otpdag.mechanisms.base import Noise, Params, Parents
from otpdag.objective.terms import LossTerms
from otpdag.spaces import CostKind, Space
from otpdag.structure import Naturals, Structure, Theta

__all__ = [
    "DrawnBy",
    "Evaluated",
    "SampledOptions",
    "Streams",
    "build_maps",
    "family",
    "noise_family",
    "rebuild",
    "sampled_terms",
]

Values = Mapping[str, Tensor]

DEFAULT_COSTS: Mapping[CostKind, AbstractCost] = {
    "squared": SquaredEuclidean(),
    "smooth l1": SmoothL1(),
    "cross-entropy": CrossEntropy(),
}
FURTHEST_UNIFORM = 1e-6  # uniform noise closer to zero or one would be a normal score that outweighs all others


class DrawnBy(Protocol):
    """What the terms ask of the map that made the draws, whether of rows or of sequences."""

    @property
    def code(self) -> RowCode:
        """How cells become a vector."""
        ...

    @property
    def targets(self) -> tuple[str, ...]:
        """Nodes that are drawn."""
        ...

    @property
    def explains(self) -> tuple[str, ...]:
        """Observed nodes that the draws have to explain."""
        ...

    def space(self, node: str) -> Space:
        """The space of a node."""
        ...


class Streams:
    """One random stream for each replica, so that training together equals training apart.

    What a divergence draws, such as directions of projection, is the same for all replicas: ``shared``.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self.generators = [torch.Generator().manual_seed(int(seed)) for seed in seeds]
        self.shared = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self.generators)

    def draw(self, noise: Noise, rows: int, like: Tensor) -> Tensor:
        """Fresh noise (R, rows, dim)."""
        sampler = torch.randn if noise.kind == "normal" else torch.rand
        drawn = [sampler(rows, noise.dim, generator=g, dtype=like.dtype) for g in self.generators]
        return torch.stack(drawn).to(like.device)

    def rows(self, total: int, size: int) -> Tensor:
        """Row numbers of a minibatch (R, size), drawn independently; all rows where there are not more."""
        if size >= total:
            return torch.arange(total).expand(len(self), total)
        return torch.stack([torch.randint(total, (size,), generator=g) for g in self.generators])

    def coins(self, shape: tuple[int, ...], chance: float) -> Tensor:
        """Independent coin tosses (R, *shape)."""
        return torch.stack([torch.rand(shape, generator=g) < chance for g in self.generators])


@dataclass(frozen=True)
class SampledOptions:
    """The settings that :func:`sampled_terms` reads, at one moment of a fit."""

    noise: str
    reconstruction: float
    eta: float
    eps: float
    temperature: float
    divergence: AbstractDivergence
    straight_through: bool = False
    extra_masking: float = 0.0
    scope: str = "joint"
    costs: Mapping[str, AbstractCost | PointFunction] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluated:
    """What one evaluation has at hand: a model with its parameters, rows, random numbers and settings."""

    structure: Structure
    naturals: Naturals
    batch: Batch
    streams: Streams
    options: SampledOptions

    def draw(self, noise: Noise) -> Tensor:
        """Fresh noise (R, rows, dim) for all rows."""
        return self.streams.draw(noise, self.batch.rows, self.batch.weight)

    def relaxed(self, node: str, parents: Parents) -> Tensor:
        """A node made anew by the model from its parents."""
        mechanism = self.structure.mechanisms[node]
        noise = self.draw(mechanism.relaxed_noise)
        return mechanism.relaxed(self.naturals[node], parents, noise, self.options.temperature)


def build_maps(
    structure: Structure, batch: Batch, *, scope: str, hidden_layers: tuple[int, ...]
) -> tuple[AmortizedMap, ...]:
    """One joint map, or one map for each observed node with hidden parents (the paper's local reading)."""
    graph = structure.graph
    observed = graph.observed
    missing = tuple(n for n in observed if graph.children(n) and not bool(batch.mask[n].all()))
    if scope == "joint":
        hidden = tuple(n for n in graph.hidden if graph.observed_descendants(n))
        targets = tuple(n for n in graph.order if n in hidden or n in missing)
        code = RowCode.of(structure, batch, observed)
        return (AmortizedMap(structure, code, targets, hidden=hidden_layers, explains=observed),)
    maps = []
    for node in observed:
        targets = tuple(p for p in graph.order if p in graph.parents(node) and (p in graph.hidden or p in missing))
        code = RowCode.of(structure, batch, (node,), [n for n in targets if n in observed])
        maps.append(
            AmortizedMap(structure, code, targets, hidden=hidden_layers, name=f"local.{node}", explains=(node,))
        )
    return tuple(maps)


def sampled_terms(
    structure: Structure,
    maps: Sequence[AmortizedMap],
    theta: Theta,
    phi: Theta,
    batch: Batch,
    streams: Streams,
    options: SampledOptions,
) -> LossTerms:
    """Evaluate the objective on a minibatch: values (B, n, width) with B = 1 or the number of replicas."""
    at = Evaluated(structure, structure.naturals(theta), batch, streams, options)
    share = batch.weight / batch.weight.sum(-1, keepdim=True)
    # equal weights are left unsaid: exact solvers are faster without them
    mass = None if bool((batch.weight == batch.weight[:, :1]).all()) else share
    zero = torch.zeros(len(streams)).to(share)
    terms = LossTerms.of(zero)
    for backward in maps:
        made = _ancestral(at, maps) if options.scope == "local" else {}
        values, kl = _draw_backward(at, backward, phi, made)
        cost, noises = rebuild(at, backward, values)
        reconstruction = options.reconstruction * (share * cost).sum(-1)
        entropic = options.eps * (share * kl).sum(-1) if options.eps else zero
        divergence = options.eta * _push_forward(at, backward, values, noises, mass, made) if options.eta else zero
        terms = terms + LossTerms.of(zero, reconstruction=reconstruction, entropic=entropic, divergence=divergence)
    return terms


def _draw_backward(at: Evaluated, backward: AmortizedMap, phi: Theta, made: Values) -> tuple[dict[str, Tensor], Tensor]:
    """Fill in what is unknown; also log q - log p of the draws, row by row.

    Parents that a local map does not draw itself are taken from ``made``, the model's own draws.
    """
    batch, options = at.batch, at.options
    row = backward.code(batch.values, _extra_mask(batch, at.streams, options.extra_masking))
    values: dict[str, Tensor] = dict(batch.values)
    kl = torch.zeros(1, 1).to(row)
    for node in backward.targets:
        mechanism = at.structure.mechanisms[node]
        unknown = ~batch.mask[node] if node in batch.mask else None
        if mechanism.space.is_discrete:
            noise = at.streams.draw(Noise(mechanism.space.width, "uniform"), batch.rows, row)
            drawn, log_q = backward.relaxed(
                phi, node, row, values, noise, options.temperature, hard=options.straight_through
            )
        else:
            noise = at.streams.draw(Noise(backward.output_width(node) // 2, "normal"), batch.rows, row)
            draw = backward.draw(phi, node, row, values, noise)
            drawn, log_q = draw.value, draw.log_prob if unknown is None else draw.log_prob_of(unknown)
        if unknown is not None:
            drawn = torch.where(unknown, drawn, batch.values[node])
        if options.eps:
            parents = at.structure.parents(node, {**made, **values})
            kl = kl + _kl(mechanism, at.naturals[node], drawn, log_q, parents, unknown)
        values[node] = drawn
    return values, kl


def _kl(
    mechanism: Mechanism, params: Params, drawn: Tensor, log_q: Tensor, parents: Parents, unknown: Tensor | None
) -> Tensor:
    """The entropic term of one node, over its cells that are unknown."""
    if not mechanism.space.is_discrete:
        return log_q - mechanism.log_prob(params, drawn, parents, unknown)
    log_p = mechanism.log_probs(params, parents, log_q)
    expected = (torch.exp(log_q) * (log_q - log_p)).sum(-1)
    return expected if unknown is None else torch.where(unknown[..., 0], expected, 0.0)


def _extra_mask(batch: Batch, streams: Streams, chance: float) -> Mapping[str, Tensor]:
    """Hide some seen cells from the map, so that it serves any pattern of missing cells."""
    if not chance:
        return batch.mask
    return {node: seen & ~streams.coins(tuple(seen.shape[1:]), chance) for node, seen in batch.mask.items()}


def rebuild(at: Evaluated, backward: DrawnBy, values: Values) -> tuple[Tensor, dict[str, Tensor]]:
    """Cost of rebuilding each row (R, n), and the abducted noise of each observed node."""
    batch, options = at.batch, at.options
    total = torch.zeros(1, 1).to(batch.weight)
    noises: dict[str, Tensor] = {}
    for node in backward.explains:
        mechanism, parents = at.structure.mechanisms[node], at.structure.parents(node, values)
        if mechanism.is_given:
            continue
        value, mask = batch.values[node], batch.mask[node]
        if options.noise == "marginal":
            total = total - mechanism.log_prob(at.naturals[node], value, parents, mask)
        elif options.noise == "abducted" and mechanism.can_abduct:
            drawn = node in backward.targets and mechanism.space.has_noise_when_relaxed
            noises[node] = _abduct(at, node, parents, values[node] if drawn else None)
        else:
            rebuilt = at.relaxed(node, parents)
            spread, cost = backward.code.spread(node, value), options.costs.get(node)
            total = total + ground_cost(mechanism, value, rebuilt, mask, spread, cost)
    return total, noises


def _abduct(at: Evaluated, node: str, parents: Parents, drawn: Tensor | None) -> Tensor:
    """The noise behind a value; where the value is missing, that of its draw or, without one, fresh noise."""
    mechanism, params, mask = at.structure.mechanisms[node], at.naturals[node], at.batch.mask[node]
    value = at.batch.values[node] if drawn is None else drawn
    uniform = at.streams.draw(Noise(mechanism.noise.dim, "uniform"), value.shape[1], value)
    # drawn whether it is needed or not: a stream must not depend on what other replicas' rows miss
    fresh = at.streams.draw(mechanism.noise, value.shape[1], value)
    if drawn is not None or bool(mask.all()):
        return mechanism.abduct(params, value, parents, uniform)
    noise = mechanism.abduct(params, torch.where(mask, value, mechanism.space.neutral().to(value)), parents, uniform)
    return torch.where(mask if mask.shape[-1] == noise.shape[-1] else mask.all(-1, keepdim=True), noise, fresh)


def default_cost(mechanism: Mechanism) -> AbstractCost:
    """The cost by the node's type: cross-entropy for categories, smooth L1 for counts, else squared error."""
    return DEFAULT_COSTS[mechanism.space.cost]


def ground_cost(
    mechanism: Mechanism,
    value: Tensor,
    rebuilt: Tensor,
    mask: Tensor,
    spread: Tensor,
    cost: AbstractCost | PointFunction | None,
) -> Tensor:
    """The cost of rebuilding ``value``, over the cells that are seen.

    Numbers are in units of the column's spread, for a cost that the user gave in the column's own.
    """
    chosen = default_cost(mechanism) if cost is None else as_cost(cost)
    if mechanism.space.is_discrete:
        return chosen.between(value, rebuilt) * mask[..., 0]
    seen = mask.to(value) if cost is not None else mask.to(value) / spread
    return chosen.between(value * seen, rebuilt * seen)


def _push_forward(
    at: Evaluated,
    backward: AmortizedMap,
    values: Values,
    noises: Mapping[str, Tensor],
    mass: Tensor | None,
    made: Values,
) -> Tensor:
    """Sum of divergences between backward and forward families."""
    total = torch.zeros(len(at.streams)).to(at.batch.weight)
    if at.options.scope == "local":
        pairs = [_local_family(at, backward, values, noises, made)]
    else:
        # the noise of a missing node that was drawn joins its parents' families, where noise is abducted; a relaxed
        # count has no noise of its own
        spaces = {node: at.structure.mechanisms[node].space for node in backward.targets}
        nodes = [n for n, space in spaces.items() if n not in noises or not space.has_noise_when_relaxed]
        pairs = [family(at, backward, node, values, noises) for node in nodes]
    pairs += [noise_family(at, backward, node, values, noises) for node in noises]
    for pushed, forward in pairs:
        if pushed:
            pair = side_by_side(pushed), side_by_side(forward)
            total = total + at.options.divergence(*pair, mass, mass, generator=at.streams.shared)
    return total


Pair = tuple[list[Tensor], list[Tensor]]
"""The columns of a family as they are pushed backward, and as the model makes them."""


def family(at: Evaluated, backward: DrawnBy, node: str, values: Values, noises: Mapping[str, Tensor]) -> Pair:
    """A node that was drawn, with its parents and its children's noises."""
    structure, parents = at.structure, at.structure.parents(node, values)
    made = at.relaxed(node, parents)
    children = [c for c in structure.graph.children(structure.base(node)) if c in noises]
    above = [backward.code.standard(parent, value) for parent, value in parents.items()]
    pushed = [backward.code.standard(node, values[node]), *above]
    forward = [backward.code.standard(node, made), *above]
    pushed += [normal_score(structure.mechanisms[c].noise, noises[c]) for c in children]
    forward += [_fresh(at, c) for c in children]
    return pushed, forward


def _local_family(
    at: Evaluated, backward: AmortizedMap, values: Values, noises: Mapping[str, Tensor], made: Values
) -> Pair:
    """All that a local map draws, with the noise of the node that it explains."""
    pushed = [backward.code.standard(n, values[n]) for n in backward.targets]
    forward = [backward.code.standard(n, made[n]) for n in backward.targets]
    if pushed:
        pushed += [normal_score(at.structure.mechanisms[n].noise, noise) for n, noise in noises.items()]
        forward += [_fresh(at, n) for n in noises]
    return pushed, forward


def noise_family(at: Evaluated, backward: DrawnBy, node: str, values: Values, noises: Mapping[str, Tensor]) -> Pair:
    """A node's noise with all its parents, of which it is independent; none if drawn parents' families hold it."""
    parents = at.structure.parents(node, values)
    if parents and all(parent in backward.targets and parent in at.structure.graph.hidden for parent in parents):
        return [], []
    above = [backward.code.standard(parent, value) for parent, value in parents.items()]
    pushed = normal_score(at.structure.mechanisms[node].noise, noises[node])
    return [pushed, *above], [_fresh(at, node), *above]


def _fresh(at: Evaluated, node: str) -> Tensor:
    """Noise of a node on the scale of a normal variable, as the model draws it."""
    return at.draw(Noise(at.structure.mechanisms[node].noise.dim, "normal"))


def normal_score(prior: Noise, noise: Tensor) -> Tensor:
    """Bring uniform noise to the scale of normal noise, so that no part of a family outweighs another."""
    return noise if prior.kind == "normal" else torch.special.ndtri(noise.clamp(FURTHEST_UNIFORM, 1 - FURTHEST_UNIFORM))


def _ancestral(at: Evaluated, maps: Sequence[AmortizedMap]) -> dict[str, Tensor]:
    """Hidden nodes and missing parents drawn from the model itself; what is seen is taken from the data."""
    unknown = {*at.structure.graph.hidden, *(node for backward in maps for node in backward.targets)}
    values: dict[str, Tensor] = {}
    for node in at.structure.graph.order:
        if node not in unknown:
            values[node] = at.batch.values[node]
            continue
        seen = at.batch.mask.get(node)
        made = at.relaxed(node, at.structure.parents(node, values))
        values[node] = made if seen is None else torch.where(seen, at.batch.values[node], made)
    return values
