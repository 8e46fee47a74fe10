"""The model's distribution of what is observed, as weighted points of the nodes that have children.

Categories and counts are enumerated with their probabilities, numbers filled in by a fixed grid or quasi-random noise;
what hangs below them is integrated out elsewhere. Points stay fixed while parameters move, so that what is read from
them is a smooth function without sampling noise.

Where inner categories have too many joint states to list, some are drawn, each weighed by how likely the model makes it
over how likely it was to be drawn: at first from the columns' own frequencies, then from the model at an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.errors import ModelError
from otpdag.numerics import quadrature
from otpdag.settings import PointSizes
from otpdag.structure import Naturals, Structure


@dataclass(frozen=True)
class Support:
    """Values (n, width) that an inner node may have, and the logarithm of how many each of them stands for (n,)."""

    values: Tensor
    log_stride: Tensor


@dataclass(frozen=True)
class ModelPoints:
    """Fixed points for the inner nodes: enumerated states (1, S, width), noise (1, S, dim), log-weights (1, S)."""

    structure: Structure
    states: Mapping[str, Tensor]
    noise: Mapping[str, Tensor]
    given: Mapping[str, Tensor]
    log_weight: Tensor
    is_exact: bool = False
    """Whether the points are all states and a grid, not a random few."""
    undrawn: Mapping[str, Support] = field(default_factory=dict)
    """Where joint states are drawn and not listed, what each node may have."""

    @property
    def joint_states(self) -> int:
        """Number of joint states of which some were drawn; zero if all are listed."""
        return math.prod(len(one.values) for one in self.undrawn.values()) if self.undrawn else 0

    @property
    def size(self) -> int:
        """Number of points."""
        return self.log_weight.shape[-1]

    def take(self, index: Tensor) -> ModelPoints:
        """Some of the points."""
        states, noise, given = (
            {node: value[:, index] for node, value in part.items()} for part in (self.states, self.noise, self.given)
        )
        weight = self.log_weight[:, index]
        return replace(self, states=states, noise=noise, given=given, log_weight=weight, is_exact=False)

    def at(self, naturals: Naturals) -> tuple[dict[str, Tensor], Tensor]:
        """Values (R or 1, S, width) of the inner nodes under parameters (R, ...), and log-weights (R or 1, S)."""
        values: dict[str, Tensor] = dict(self.given)
        log_weight = self.log_weight
        for node in inner_nodes(self.structure):
            if node in values:
                continue
            mechanism, parents = self.structure.mechanisms[node], self.structure.parents(node, values)
            if node in self.states:
                values[node] = self.states[node]
                log_weight = log_weight + mechanism.log_prob(naturals[node], values[node], parents)
            else:
                values[node] = mechanism.forward(naturals[node], parents, self.noise[node])
        return values, log_weight

    def thinned(
        self, naturals: Naturals, points: int, generator: torch.Generator, *, least_share: float = 0.1
    ) -> ModelPoints:
        """Fewer points where counts have many: by what they weigh at an estimate, each standing for others.

        States of categories stay: each may be the only one that tells of some row of a table.

        Args:
            naturals: The estimate (R, ...).
            points: How many.
            generator: Chooses among neighbours.
            least_share: Of the points, spread evenly, for estimates that move.
        """
        counts = [node for node in self.states if not self.structure.mechanisms[node].space.is_discrete]
        if self.size <= points or not counts:
            return self
        with torch.no_grad():
            share = torch.softmax(self.at(naturals)[1], -1).mean(0).expand(self.size)
        chance = least_share / self.size + (1 - least_share) * share
        index = _evenly(chance, points, generator)
        kept = self.take(index)
        return replace(kept, log_weight=kept.log_weight - torch.log(chance[index]))


def inner_nodes(structure: Structure) -> tuple[str, ...]:
    """Nodes that have an observed descendant, and leaves whose coordinates cannot be integrated one by one."""
    graph = structure.graph
    vectors = [n for n in graph.observed if structure.mechanisms[n].correlated]
    return tuple(node for node in graph.order if graph.observed_descendants(node) or node in vectors)


def lay_out(
    structure: Structure, batch: Batch, sizes: PointSizes, generator: torch.Generator, *, finely: bool = False
) -> ModelPoints:
    """Choose the fixed points of all inner nodes; ``finely``, as many as where a mean is taken once."""
    most = sizes.many if finely else sizes.few
    supports = _supports(structure, batch, sizes.counts)
    total = math.prod(len(one.values) for one in supports.values())
    if total > sizes.states:
        return drawn_states(structure, batch, supports, most, generator)
    each = max(sizes.fewest, most // total)  # points of noise for each state
    points = each if structure.given or finely else min(sizes.noise, each)
    has_counts = any(not structure.mechanisms[node].space.is_discrete for node in supports)
    wanted = sizes.grid_with_counts if has_counts else sizes.grid
    like = next(iter(batch.values.values()))
    numeric = _numeric(structure, supports)
    dim = sum(structure.mechanisms[node].noise.dim for node in numeric)
    if dim == 1 and not structure.given:
        grid = min(wanted, max(sizes.grid // 2, points)) if has_counts else wanted
        (node,) = (n for n in numeric if structure.mechanisms[n].noise.dim)
        nodes, log_noise = (one.to(like) for one in quadrature(structure.mechanisms[node].noise.kind, grid))
        noise = {node: nodes.unsqueeze(-1).repeat(total, 1)}
    elif dim:  # every state has points of its own, so that few of them suffice where there are many states
        noise = _even_noise(structure, numeric, total * points, generator, like)
        log_noise = torch.full((points,), -math.log(points)).to(like)
    else:
        noise, log_noise = {}, torch.zeros(1).to(like)
    given, log_noise = _given_rows(structure, batch, points, log_noise, generator)
    draws = len(log_noise)
    states, log_stride = _listed(supports, total, like)
    return ModelPoints(
        structure,
        {node: value.repeat_interleave(draws, 0).unsqueeze(0) for node, value in states.items()},
        {node: noise.get(node, like.new_zeros(total * draws, 0)).unsqueeze(0) for node in numeric},
        {node: value.repeat(total, 1).unsqueeze(0) for node, value in given.items()},
        (log_noise.repeat(total) + log_stride.repeat_interleave(draws)).unsqueeze(0),
        is_exact=not given and (dim == 0 or (dim == 1 and draws >= wanted)),
    )


def _numeric(structure: Structure, supports: Mapping[str, Support]) -> list[str]:
    """Inner nodes that are made of noise."""
    return [n for n in inner_nodes(structure) if n not in supports and not structure.mechanisms[n].is_given]


def _supports(structure: Structure, batch: Batch, most: int) -> dict[str, Support]:
    """Values of inner categories and counts.

    Most rows may hold small counts though a few are large: small ones are listed one by one.
    """
    supports, ranges = {}, structure.count_ranges(batch.values)
    for node in inner_nodes(structure):
        mechanism = structure.mechanisms[node]
        if mechanism.is_given or not mechanism.space.is_countable:
            continue
        listed = mechanism.space.points(ranges.get(node), most)
        if listed is None:
            reason = "that depend on each other" if mechanism.correlated else "with children"
            raise ModelError(
                f"node {node!r}: the direct transport route takes no vector of counts {reason}: use method='likelihood'"
            )
        summed = mechanism.space.summands(float(listed.values.max()), most)
        values, weight = (listed.values, torch.ones(len(listed.values))) if summed is None else summed
        values, weight = values[weight > 0], weight[weight > 0]
        like = next(iter(batch.values.values()))
        supports[node] = Support(values.reshape(len(values), -1).to(like), torch.log(weight).to(like))
    return supports


def _listed(supports: Mapping[str, Support], total: int, like: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """All joint states (total, width) by node, and the logarithm of how many each stands for (total,)."""
    states, repeat, log_stride = {}, total, torch.zeros(total).to(like)
    for node, support in supports.items():
        repeat //= len(support.values)
        index = torch.arange(total).div(repeat, rounding_mode="floor") % len(support.values)
        states[node] = support.values[index]
        log_stride = log_stride + support.log_stride[index]
    return states, log_stride


def _given_rows(
    structure: Structure, batch: Batch, points: int, log_noise: Tensor, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Covariates are not modelled: their rows are taken from the data, and paired with the noise points.

    The data's mean features are over all rows, so that few rows here would leave a gap that no parameter closes.
    """
    if not structure.given:
        return {}, log_noise
    share = batch.weight[0] / batch.weight[0].sum()
    if len(log_noise) == 1 and batch.rows <= points:
        index, log_weight = torch.arange(batch.rows), torch.log(share)
    else:
        index, log_weight = _proportional(share, points, generator), share.new_full((points,), -math.log(points))
    return {node: batch.values[node][0, index] for node in structure.given}, log_weight


def drawn_states(
    structure: Structure,
    batch: Batch,
    supports: Mapping[str, Support],
    size: int,
    generator: torch.Generator,
    naturals: Naturals | None = None,
) -> ModelPoints:
    """So many joint states, of more than can be listed.

    Args:
        structure: Graph and mechanisms.
        batch: Rows, whose covariates are taken in proportion to their weights.
        supports: What each node may have.
        size: How many.
        generator: Draws them.
        naturals: An estimate (R, ...) of whose first replica they are drawn; without one each column is drawn in
            proportion to its own frequencies, evenly where nothing is seen.
    """
    like = batch.weight
    rows = _proportional(batch.weight[0] / batch.weight[0].sum(), size, generator) if structure.given else None
    given = {node: batch.values[node][:1, rows] for node in structure.given}
    every = _even_noise(structure, _numeric(structure, supports), size, generator, like)
    noise = {node: value.unsqueeze(0) for node, value in every.items()}
    values, states, log_weight = dict(given), {}, torch.zeros(1, size).to(like)
    for node in inner_nodes(structure):
        if node in supports:
            support = supports[node]
            share = _frequencies(batch, node, support.values).expand(size, -1)
            if naturals is not None:
                share = _chances(structure, naturals, node, support, values).expand(size, -1)
            uniform = torch.rand(size, 1, generator=generator, dtype=torch.float64).to(share)
            index = (share.cumsum(-1) < uniform).sum(-1).clamp(max=len(support.values) - 1)
            values[node] = states[node] = support.values[index].unsqueeze(0)
            log_weight = log_weight + support.log_stride[index] - torch.log(share.gather(1, index.unsqueeze(-1))).T
        elif naturals is not None and node not in values:
            own = {name: value[:1].detach() for name, value in naturals[node].items()}
            values[node] = structure.mechanisms[node].forward(own, structure.parents(node, values), noise[node])
    return ModelPoints(structure, states, noise, given, log_weight, undrawn=supports)


def _chances(
    structure: Structure, naturals: Naturals, node: str, support: Support, values: Mapping[str, Tensor]
) -> Tensor:
    """Probabilities (S or 1, n) of what a node may have, given its parents' values, under the first replica."""
    own = {name: value[:1].detach() for name, value in naturals[node].items()}
    beside = {name: value.unsqueeze(-2) for name, value in structure.parents(node, values).items()}
    log_prob = structure.mechanisms[node].log_prob(own, support.values[None, None], beside)
    return torch.softmax(log_prob[0] + support.log_stride, -1)


def _frequencies(batch: Batch, node: str, values: Tensor, smoothing: float = 0.5) -> Tensor:
    """How often each of the values (n, width) is nearest to what is seen (n,), beside ``smoothing`` rows each."""
    counts = torch.full((len(values),), smoothing).to(values)
    if node in batch.values:
        seen = batch.mask[node][0].all(-1)
        nearest = torch.cdist(batch.values[node][0, seen], values).argmin(-1)
        counts = counts.index_add(0, nearest, batch.weight[0, seen].to(values))
    return counts / counts.sum()


def _even_noise(
    structure: Structure, numeric: Sequence[str], size: int, generator: torch.Generator, like: Tensor
) -> dict[str, Tensor]:
    """Quasi-random noise (size, dim) of the numeric nodes."""
    kinds = {node: structure.mechanisms[node].noise for node in numeric}
    dims = [noise.dim for noise in kinds.values()]
    if not sum(dims):
        return {node: torch.zeros(size, 0).to(like) for node in numeric}
    seed = int(torch.randint(2**31 - 1, (1,), generator=generator))
    sobol = torch.quasirandom.SobolEngine(sum(dims), scramble=True, seed=seed)
    pieces = sobol.draw(size, dtype=torch.float64).clamp(1e-6, 1 - 1e-6).to(like).split(dims, -1)
    return {
        node: torch.special.ndtri(piece) if kinds[node].kind == "normal" else piece
        for node, piece in zip(kinds, pieces, strict=True)
    }


def _proportional(share: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Row numbers in proportion to their weights, in random order (systematic sampling)."""
    order = torch.randperm(len(share), generator=generator)
    index = order[_evenly(share[order], size, generator)]
    return index[torch.randperm(size, generator=generator)]


def _evenly(share: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Numbers in proportion to their weights, in their order: neighbours stand for each other."""
    steps = (torch.arange(size, dtype=torch.float64) + float(torch.rand(1, generator=generator))) / size
    cumulative = share.double().cumsum(0)
    return torch.searchsorted(cumulative, steps * cumulative[-1]).clamp(max=len(share) - 1)
