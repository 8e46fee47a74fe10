r"""The objective with a learned backward map and drawn noise: Algorithm 1, and its abducted and entropic relatives.

Hidden and missing values are drawn from the map. Observed nodes are rebuilt from them with noise that is sampled from
its prior, abducted (then the rebuilding is exact and the noise joins the divergence), or integrated out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from otpdag.backward.amortized import AmortizedMap, RowCode
from otpdag.costs import AbstractCost, CrossEntropy, SmoothL1, SquaredEuclidean
from otpdag.data import Batch
from otpdag.divergences.base import AbstractDivergence
from otpdag.mechanisms import Mechanism
from otpdag.mechanisms.base import Noise
from otpdag.nn import side_by_side
from otpdag.objective.terms import LossTerms
from otpdag.structure import Naturals, Structure, Theta

__all__ = ["SampledOptions", "Streams", "build_maps", "sampled_terms"]

Values = Mapping[str, Tensor]


class Streams:
    """One random stream for each replica, so that training together equals training apart."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.generators = [torch.Generator().manual_seed(int(seed)) for seed in seeds]

    def __len__(self) -> int:
        return len(self.generators)

    def draw(self, noise: Noise, rows: int, like: Tensor) -> Tensor:
        """Fresh noise (R, rows, dim)."""
        sampler = torch.randn if noise.kind == "normal" else torch.rand
        drawn = [sampler(rows, noise.dim, generator=g, dtype=like.dtype) for g in self.generators]
        return torch.stack(drawn).to(like.device)

    def rows(self, total: int, size: int) -> Tensor:
        """Row numbers of a minibatch (R, size), without replacement where there are enough rows."""
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
    costs: Mapping[str, AbstractCost] = field(default_factory=dict)


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
        code = RowCode.of(structure, batch, (node,))
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
    naturals = structure.naturals(theta)
    share = batch.weight / batch.weight.sum(-1, keepdim=True)
    # equal weights are left unsaid: exact solvers are faster without them
    mass = None if bool((batch.weight == batch.weight[:, :1]).all()) else share
    zero = torch.zeros(len(streams)).to(share)
    terms = LossTerms.of(zero)
    for backward in maps:
        values, kl = _draw_backward(structure, backward, naturals, phi, batch, streams, options)
        cost, noises = _rebuild(structure, backward, naturals, values, batch, streams, options)
        reconstruction = options.reconstruction * (share * cost).sum(-1)
        entropic = options.eps * (share * kl).sum(-1) if options.eps else zero
        divergence = zero
        if options.eta:
            divergence = options.eta * _push_forward(
                structure, backward, naturals, values, noises, mass, batch, streams, options
            )
        terms = terms + LossTerms.of(zero, reconstruction=reconstruction, entropic=entropic, divergence=divergence)
    return terms


def _draw_backward(
    structure: Structure,
    backward: AmortizedMap,
    naturals: Naturals,
    phi: Theta,
    batch: Batch,
    streams: Streams,
    options: SampledOptions,
) -> tuple[dict[str, Tensor], Tensor]:
    """Fill in what is unknown; also log q - log p of the draws, row by row."""
    mask = _extra_mask(batch, streams, options.extra_masking)
    row = backward.code(batch.values, mask)
    values: dict[str, Tensor] = dict(batch.values)
    kl = torch.zeros(1, 1).to(row)
    for node in backward.targets:
        space, mechanism = structure.mechanisms[node].space, structure.mechanisms[node]
        if space.is_discrete:
            noise = streams.draw(Noise(space.width, "uniform"), batch.rows, row)
            drawn, log_q = backward.relaxed(
                phi, node, row, values, noise, options.temperature, hard=options.straight_through
            )
        else:
            noise = streams.draw(Noise(backward.output_width(node) // 2, "normal"), batch.rows, row)
            found = backward.draw(phi, node, row, values, noise)
            drawn, log_q = found.value, found.log_prob
        if node in batch.mask:
            drawn = torch.where(batch.mask[node], batch.values[node], drawn)
        if options.eps:
            kl = kl + _kl(structure, mechanism, naturals, node, drawn, log_q, values)
        values[node] = drawn
    return values, kl


def _kl(
    structure: Structure,
    mechanism: Mechanism,
    naturals: Naturals,
    node: str,
    drawn: Tensor,
    log_q: Tensor,
    values: Values,
) -> Tensor:
    parents = structure.parents(node, values)
    if mechanism.space.is_discrete:
        log_p = mechanism.log_probs(naturals[node], parents)  # type: ignore[attr-defined]
        return (torch.exp(log_q) * (log_q - log_p)).sum(-1)
    return log_q - mechanism.log_prob(naturals[node], drawn, parents)


def _extra_mask(batch: Batch, streams: Streams, chance: float) -> Mapping[str, Tensor]:
    """Hide some seen cells from the map, so that it serves any pattern of missing cells."""
    if not chance:
        return batch.mask
    return {node: seen & ~streams.coins(tuple(seen.shape[1:]), chance) for node, seen in batch.mask.items()}


def _rebuild(
    structure: Structure,
    backward: AmortizedMap,
    naturals: Naturals,
    values: Values,
    batch: Batch,
    streams: Streams,
    options: SampledOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cost of rebuilding each row (R, n), and the abducted noise of each observed node."""
    total = torch.zeros(1, 1).to(batch.weight)
    noises: dict[str, Tensor] = {}
    for node in backward.explains:
        mechanism, parents = structure.mechanisms[node], structure.parents(node, values)
        if mechanism.is_given:
            continue
        params, value, mask = naturals[node], batch.values[node], batch.mask[node]
        if options.noise == "marginal":
            total = total - mechanism.log_prob(params, value, parents, mask)
        elif options.noise == "abducted" and mechanism.can_abduct:
            uniform = streams.draw(Noise(mechanism.noise.dim, "uniform"), batch.rows, value)
            noises[node] = mechanism.abduct(params, value, parents, uniform)
        else:
            noise = streams.draw(mechanism.relaxed_noise, batch.rows, value)
            rebuilt = mechanism.relaxed(params, parents, noise, options.temperature)
            spread = _spread(backward, node, value)
            total = total + ground_cost(mechanism, value, rebuilt, mask, spread, options.costs.get(node))
    return total, noises


def _spread(backward: AmortizedMap, node: str, like: Tensor) -> Tensor:
    """Spread of a column, so that every node's cost is in units of its own variation."""
    space = backward.space(node)
    if space.is_discrete or node not in backward.code.scale:
        return torch.ones(1).to(like)
    return backward.code.scale[node].to(like)


def default_cost(mechanism: Mechanism) -> AbstractCost:
    """The cost by the node's type: cross-entropy for categories, smooth L1 for counts, else squared error."""
    if mechanism.space.is_discrete:
        return CrossEntropy()
    return SmoothL1() if mechanism.space.support == "count" else SquaredEuclidean()


def ground_cost(
    mechanism: Mechanism,
    value: Tensor,
    rebuilt: Tensor,
    mask: Tensor,
    spread: Tensor,
    cost: AbstractCost | None,
) -> Tensor:
    """The cost of rebuilding ``value``, over the cells that are seen and in units of the column's spread."""
    cost = default_cost(mechanism) if cost is None else cost
    if mechanism.space.is_discrete:
        return cost.between(value, rebuilt) * mask[..., 0]
    seen = mask.to(value) / spread
    return cost.between(value * seen, rebuilt * seen)


def _push_forward(
    structure: Structure,
    backward: AmortizedMap,
    naturals: Naturals,
    values: Values,
    noises: Mapping[str, Tensor],
    mass: Tensor | None,
    batch: Batch,
    streams: Streams,
    options: SampledOptions,
) -> Tensor:
    """Sum of divergences between backward and forward families."""
    total = torch.zeros(len(streams)).to(batch.weight)
    model_values = _ancestral(structure, naturals, batch, streams, options) if options.scope == "local" else None
    if model_values is not None and backward.targets:
        pushed = side_by_side([values[n] for n in backward.targets])
        forward = side_by_side([model_values[n] for n in backward.targets])
        return total + options.divergence(pushed, forward, mass, mass, generator=streams.generators[0])
    for node in structure.graph.hidden:
        if node in backward.targets:
            pushed, forward = _family(structure, naturals, node, values, noises, batch, streams, options)
            total = total + options.divergence(pushed, forward, mass, mass, generator=streams.generators[0])
    for node, noise in noises.items():
        if not any(p in structure.graph.hidden for p in structure.graph.parents(node)):
            parents = [values[p] for p in structure.graph.parents(node)]
            pushed = side_by_side([normal_score(structure.mechanisms[node].noise, noise), *parents])
            forward = side_by_side([_fresh(structure.mechanisms[node], batch.rows, noise, streams), *parents])
            total = total + options.divergence(pushed, forward, mass, mass, generator=streams.generators[0])
    return total


def _family(
    structure: Structure,
    naturals: Naturals,
    node: str,
    values: Values,
    noises: Mapping[str, Tensor],
    batch: Batch,
    streams: Streams,
    options: SampledOptions,
) -> tuple[Tensor, Tensor]:
    """A hidden node with its parents and its children's noises: as drawn backward, and as the model makes them."""
    mechanism, parents = structure.mechanisms[node], structure.parents(node, values)
    fresh = streams.draw(mechanism.relaxed_noise, batch.rows, values[node])
    made = mechanism.relaxed(naturals[node], parents, fresh, options.temperature)
    children = [c for c in structure.graph.children(node) if c in noises]
    pushed = [values[node], *parents.values()]
    forward = [made, *parents.values()]
    pushed += [normal_score(structure.mechanisms[c].noise, noises[c]) for c in children]
    forward += [_fresh(structure.mechanisms[c], batch.rows, values[node], streams) for c in children]
    return side_by_side(pushed), side_by_side(forward)


def _fresh(mechanism: Mechanism, rows: int, like: Tensor, streams: Streams) -> Tensor:
    return streams.draw(Noise(mechanism.noise.dim, "normal"), rows, like)


def normal_score(prior: Noise, noise: Tensor) -> Tensor:
    """Bring uniform noise to the scale of normal noise, so that no part of a family outweighs another."""
    return noise if prior.kind == "normal" else torch.special.ndtri(noise.clamp(1e-6, 1 - 1e-6))


def _ancestral(
    structure: Structure, naturals: Naturals, batch: Batch, streams: Streams, options: SampledOptions
) -> dict[str, Tensor]:
    """Hidden nodes drawn from the model itself; observed ones are taken from the data."""
    values: dict[str, Tensor] = dict(batch.values)
    for node in structure.graph.order:
        if node in structure.graph.hidden:
            mechanism = structure.mechanisms[node]
            noise = streams.draw(mechanism.relaxed_noise, batch.rows, batch.weight)
            values[node] = mechanism.relaxed(
                naturals[node], structure.parents(node, values), noise, options.temperature
            )
    return values
