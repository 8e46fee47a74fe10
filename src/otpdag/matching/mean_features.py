"""The model's distribution of what is observed, as weighted points with leaves integrated out.

Nodes that have children are filled in: categories enumerated with their probabilities, numbers by a fixed grid or
quasi-random noise. Leaves are independent given those, so the mean of a product of kernels is a product of means, each
in closed form or by a sum over the leaf's own support. The result is smooth in the parameters, without sampling noise.

Where inner categories have too many joint states to list, some are drawn, each weighed by how likely the model makes it
over how likely it was to be drawn: at first from the columns' own frequencies, then from the model at an estimate
(:func:`drawn_at`).

Few points serve while parameters move; what they get wrong is told by many points at one estimate
(:func:`mean_over_many`), and added: near that estimate the mean is then that of many points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.divergences.whitened import FeatureColumn, FittedFeatures, Kernel
from otpdag.errors import ModelError
from otpdag.mechanisms import Mechanism
from otpdag.mechanisms.base import Params, Parents
from otpdag.mechanisms.protocols import KernelMeans
from otpdag.numerics import quadrature
from otpdag.spaces import Space
from otpdag.structure import Naturals, Structure

GRID_POINTS = 48  # of the noise of a single inner number
GRID_WITH_COUNTS = 160  # of the same beside a count: how likely a large one is changes fast with the number
ROUGH_GRID_POINTS = 24  # of the same, where counts are so many that all points would be more than there may be
LEAF_POINTS = (32, 160)  # of a leaf's noise: at least, at most
LEAF_ELEMENTS = 16_384  # numbers that a leaf's points may take for all points of its parents
QUASI_RANDOM_POINTS = 512  # of the noise of several inner numbers
MOST_STATES = 4096  # joint states of inner categories that are listed; of more, some are drawn
MOST_POINTS = 4096  # points of inner nodes in all, states times noise
FEWEST_POINTS = 8  # of noise for each state
FINE_POINTS = 16_384  # of inner nodes in all, where a mean is taken once: errors of a thousandth of a feature's spread
FINE_STEP = 1024  # points that are evaluated at a time, of all replicas: four megabytes of 500 features
THINNED_POINTS = 2048  # of inner nodes in all, once an estimate tells which of them count
LEAST_SHARE = 0.1  # of them are spread evenly, for estimates that move
MOST_ATOMS = 400  # of a leaf with a finite support
SMOOTHING = 0.5  # rows that every state has beside those that show it, where frequencies tell what is drawn
COUNTS_LISTED = 96  # of an inner count; beyond, every few stand for all


@dataclass(frozen=True)
class Measure:
    """Fixed points for the inner nodes: enumerated supports (1, S, width), noise (1, S, dim), log-weights (1, S)."""

    inner: tuple[str, ...]
    states: Mapping[str, Tensor]
    noise: Mapping[str, Tensor]
    given: Mapping[str, Tensor]
    log_weight: Tensor
    is_exact: bool = False
    """Whether the points are all states and a grid, not a random few."""
    supports: Mapping[str, Tensor] = field(default_factory=dict)
    """Where joint states are drawn and not listed, the values (n, width) that each node may have."""
    log_strides: Mapping[str, Tensor] = field(default_factory=dict)
    """And the logarithm of how many each of these stands for (n,)."""

    @property
    def joint_states(self) -> int:
        """Number of joint states of which some were drawn; zero if all are listed."""
        return math.prod(len(support) for support in self.supports.values()) if self.supports else 0

    @property
    def size(self) -> int:
        """Number of points."""
        return self.log_weight.shape[-1]

    def take(self, index: Tensor) -> Measure:
        """Some of the points."""
        states, noise, given = (
            {node: value[:, index] for node, value in part.items()} for part in (self.states, self.noise, self.given)
        )
        weight = self.log_weight[:, index]
        return replace(self, states=states, noise=noise, given=given, log_weight=weight, is_exact=False)


def columns_of(structure: Structure, node: str) -> int:
    """Number of feature columns of a node: one for a category, one for each coordinate of a number."""
    space = structure.mechanisms[node].space
    return space.cells


def feature_columns(structure: Structure, batch: Batch) -> list[FeatureColumn]:
    """The observed nodes of a batch as feature columns, in the graph's order."""
    columns = []
    for node in structure.graph.observed:
        columns += node_columns(structure.mechanisms[node].space, batch.values[node], batch.mask[node])
    return columns


def node_columns(space: Space, values: Tensor, mask: Tensor) -> list[FeatureColumn]:
    """The cells of one node's values (B, N, width) as feature columns."""
    return [
        FeatureColumn(
            space.cell_of(values, cell), mask[..., cell], is_discrete=space.is_discrete, root=space.kernels_read_roots
        )
        for cell in range(space.cells)
    ]


def inner_nodes(structure: Structure) -> tuple[str, ...]:
    """Nodes that have an observed descendant, and leaves whose coordinates cannot be integrated one by one."""
    graph = structure.graph
    vectors = [n for n in graph.observed if structure.mechanisms[n].correlated]
    return tuple(node for node in graph.order if graph.observed_descendants(node) or node in vectors)


def lay_out(
    structure: Structure,
    batch: Batch,
    count_range: Mapping[str, float],
    *,
    generator: torch.Generator,
    points: int = QUASI_RANDOM_POINTS,
    most: int = MOST_POINTS,
) -> Measure:
    """Choose the fixed points of all inner nodes: ``points`` of noise for each state, but not more than ``most``."""
    inner = inner_nodes(structure)
    like = next(iter(batch.values.values()))
    supports, log_strides = _supports(structure, inner, count_range, like)
    numeric = [n for n in inner if n not in supports and not structure.mechanisms[n].is_given]
    total = math.prod(len(s) for s in supports.values())
    if total > MOST_STATES:
        return _drawn(structure, batch, supports, log_strides, size=max(points, most), generator=generator)
    if structure.given:
        points = max(points, most // total)
    points = min(points, max(FEWEST_POINTS, most // total))
    has_counts = any(not structure.mechanisms[node].space.is_discrete for node in supports)
    wanted = GRID_WITH_COUNTS if has_counts else GRID_POINTS
    grid = wanted if points >= wanted or not has_counts else max(ROUGH_GRID_POINTS, points)
    drawing = _Drawing(generator, points, total, grid)
    noise, log_noise = _noise(structure, numeric, drawing, like)
    given, noise, log_noise = _given_rows(structure, batch, noise, log_noise, drawing)
    draws = len(log_noise)
    states, repeat, log_stride = {}, total, torch.zeros(total).to(like)
    for node, support in supports.items():
        repeat //= len(support)
        index = torch.arange(total).div(repeat, rounding_mode="floor") % len(support)
        states[node] = support[index].repeat_interleave(draws, 0).unsqueeze(0)
        log_stride = log_stride + log_strides[node][index]
    rows = {node: value.repeat(total, 1).unsqueeze(0) for node, value in given.items()}
    log_weight = (log_noise.repeat(total) + log_stride.repeat_interleave(draws)).unsqueeze(0)
    every_noise = {node: value.unsqueeze(0) for node, value in noise.items()}
    dim = sum(value.shape[-1] for value in noise.values())
    is_exact = not given and (dim == 0 or (dim == 1 and draws >= wanted))
    return Measure(inner, states, every_noise, rows, log_weight, is_exact)


def _supports(
    structure: Structure, inner: Sequence[str], count_range: Mapping[str, float], like: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Values (A, width) of inner categories and counts, and the logarithm of how many each of them stands for (A,).

    Most rows may hold small counts though a few are large: small ones are listed one by one.
    """
    supports, log_strides = {}, {}
    for node in inner:
        mechanism = structure.mechanisms[node]
        if mechanism.is_given:
            continue
        if mechanism.space.is_countable:
            listed = mechanism.space.points(count_range.get(node), COUNTS_LISTED)
            if listed is None:
                reason = "that depend on each other" if mechanism.correlated else "with children"
                raise ModelError(
                    f"node {node!r}: the direct transport route takes no vector of counts {reason}: use "
                    "method='entropic'"
                )
            summed = mechanism.space.summands(float(listed.values.max()), COUNTS_LISTED)
            values, weight = (listed.values, torch.ones(len(listed.values))) if summed is None else summed
            values, weight = values[weight > 0], weight[weight > 0]
            supports[node] = values.reshape(len(values), -1).to(like)
            log_strides[node] = torch.log(weight).to(like)
    return supports, log_strides


def _drawn(
    structure: Structure,
    batch: Batch,
    supports: Mapping[str, Tensor],
    log_strides: Mapping[str, Tensor],
    *,
    size: int,
    generator: torch.Generator,
) -> Measure:
    """So many joint states, each column of them in proportion to its own frequencies, evenly where nothing is seen."""
    inner, like = inner_nodes(structure), next(iter(batch.values.values()))
    states, log_weight = {}, torch.zeros(1, size).to(like)
    for node, support in supports.items():
        share = _frequencies(batch, node, support)
        index = _proportional(share, size, generator)
        states[node] = support[index].unsqueeze(0)
        log_weight = log_weight + log_strides[node][index] - torch.log(share[index])
    numeric = [n for n in inner if n not in supports and not structure.mechanisms[n].is_given]
    noise = {node: value.unsqueeze(0) for node, value in _even_noise(structure, numeric, size, generator, like).items()}
    given = {}
    if structure.given:
        rows = _proportional(batch.weight[0] / batch.weight[0].sum(), size, generator)
        given = {node: batch.values[node][:1, rows] for node in structure.given}
    return Measure(inner, states, noise, given, log_weight, supports=supports, log_strides=log_strides)


def _frequencies(batch: Batch, node: str, support: Tensor) -> Tensor:
    """How often each value of a support (n, width) is nearest to those that are seen (n,)."""
    counts = torch.full((len(support),), SMOOTHING).to(support)
    if node in batch.values:
        seen = batch.mask[node][0].all(-1)
        nearest = torch.cdist(batch.values[node][0, seen], support).argmin(-1)
        counts = counts.index_add(0, nearest, batch.weight[0, seen].to(support))
    return counts / counts.sum()


def drawn_at(
    structure: Structure, naturals: Naturals, measure: Measure, size: int, generator: torch.Generator
) -> Measure:
    """So many joint states drawn from the model at an estimate, where those of ``measure`` were drawn otherwise."""
    rows = torch.randint(measure.size, (size,), generator=generator)
    given = {node: value[:, rows] for node, value in measure.given.items()}
    like = measure.log_weight
    numeric = list(measure.noise)
    noise = {node: value.unsqueeze(0) for node, value in _even_noise(structure, numeric, size, generator, like).items()}
    values, states, log_weight = dict(given), {}, torch.zeros(1, size).to(like)
    with torch.no_grad():
        for node in measure.inner:
            if node in values:
                continue
            mechanism, parents = structure.mechanisms[node], structure.parents(node, values)
            params = {name: value[:1] for name, value in naturals[node].items()}
            if node not in measure.supports:
                values[node] = mechanism.forward(params, parents, noise[node])
                continue
            support = measure.supports[node]
            beside = {name: value.unsqueeze(-2) for name, value in parents.items()}
            log_prob = mechanism.log_prob(params, support.reshape(1, 1, *support.shape), beside).expand(1, size, -1)
            log_stride = measure.log_strides[node]
            share = torch.softmax(log_prob[0] + log_stride, -1)
            uniform = torch.rand(size, 1, generator=generator, dtype=torch.float64).to(share)
            index = (share.cumsum(-1) < uniform).sum(-1).clamp(max=len(support) - 1)
            values[node] = states[node] = support[index].unsqueeze(0)
            log_weight = log_weight + log_stride[index] - torch.log(share.gather(1, index.unsqueeze(-1))).T
    return replace(measure, states=states, noise=noise, given=given, log_weight=log_weight, is_exact=False)


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


@dataclass(frozen=True)
class _Drawing:
    """Where random numbers come from, and how many: ``points`` for each of ``states`` joint states.

    Of a single number ``grid`` evenly spaced ones instead.
    """

    generator: torch.Generator
    points: int
    states: int
    grid: int


def _noise(
    structure: Structure, numeric: Sequence[str], drawing: _Drawing, like: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Noise (states * D, dim) of the numeric nodes, D points for each joint state, and their log-weights (D,)."""
    points, states = drawing.points, drawing.states
    kinds = {node: structure.mechanisms[node].noise for node in numeric}
    dim = sum(noise.dim for noise in kinds.values())
    if dim == 0:
        return {node: torch.zeros(states, 0).to(like) for node in numeric}, torch.zeros(1).to(like)
    if dim == 1 and not structure.given:
        node = next(n for n in numeric if kinds[n].dim)
        nodes, log_weight = quadrature(kinds[node].kind, drawing.grid)
        none = {n: torch.zeros(states * len(nodes), 0).to(like) for n in numeric}
        return none | {node: nodes.to(like).unsqueeze(-1).repeat(states, 1)}, log_weight.to(like)
    # every state has points of its own, so that few of them suffice where there are many states
    noise = _even_noise(structure, numeric, states * points, drawing.generator, like)
    return noise, torch.full((points,), -math.log(points)).to(like)


def _given_rows(
    structure: Structure, batch: Batch, noise: dict[str, Tensor], log_noise: Tensor, drawing: _Drawing
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Covariates are not modelled: their rows are taken from the data, and paired with the noise points.

    The data's mean features are over all rows, so that few rows here would leave a gap that no parameter closes.
    """
    if not structure.given:
        return {}, noise, log_noise
    share = batch.weight[0] / batch.weight[0].sum()
    points = drawing.points
    if len(log_noise) == 1 and batch.rows <= points:
        index, log_weight = torch.arange(batch.rows), torch.log(share)
    else:
        index, log_weight = (
            _proportional(share, points, drawing.generator),
            torch.full((points,), -math.log(points)).to(share),
        )
    given = {node: batch.values[node][0, index] for node in structure.given}
    paired = {
        node: value if value.shape[-1] else value.new_zeros(drawing.states * len(index), 0)
        for node, value in noise.items()
    }
    return given, paired, log_weight


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


def mean_features(structure: Structure, naturals: Naturals, measure: Measure, fitted: FittedFeatures) -> Tensor:
    """Mean features of the model: (R, J)."""
    total, weight = _summed_features(structure, naturals, measure, fitted)
    return total / weight


def mean_over_many(structure: Structure, naturals: Naturals, many: Measure, fitted: FittedFeatures) -> Tensor:
    """The same (R, J) over so many points that they are evaluated a part at a time; nothing has a gradient."""
    replicas = max(len(value) for params in naturals.values() for value in params.values())
    with torch.no_grad():
        parts = [
            _summed_features(structure, naturals, many.take(index), fitted)
            for index in torch.arange(many.size).split(max(1, FINE_STEP // replicas))
        ]
        total, weight = (torch.stack(sums).sum(0) for sums in zip(*parts, strict=True))
        return total / weight


def thinned(
    structure: Structure,
    naturals: Naturals,
    measure: Measure,
    generator: torch.Generator,
    points: int = THINNED_POINTS,
) -> Measure:
    """Fewer points where counts have many: in proportion to what they weigh at an estimate, each standing for others.

    States of categories stay: each may be the only one that tells of some row of a table.
    """
    counts = [node for node in measure.states if not structure.mechanisms[node].space.is_discrete]
    if measure.size <= points or not counts:
        return measure
    with torch.no_grad():
        log_weight = _inner_values(structure, naturals, measure)[1]
        share = torch.softmax(log_weight, -1).mean(0).expand(measure.size)
        chance = LEAST_SHARE / measure.size + (1 - LEAST_SHARE) * share
        index = _evenly(chance, points, generator)
        kept = measure.take(index)
        return replace(kept, log_weight=kept.log_weight - torch.log(chance[index]))


def _summed_features(
    structure: Structure, naturals: Naturals, measure: Measure, fitted: FittedFeatures
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the features (R, J) and of the weights (R, 1) over all points."""
    values, log_weight = _inner_values(structure, naturals, measure)
    kernels = iter(fitted.kernels)
    kernel_values: list[Tensor] = []
    for node in structure.graph.observed:
        own = [next(kernels) for _ in range(columns_of(structure, node))]
        kernel_values += _kernel_means(structure, naturals, node, own, values)
    features = fitted.combine(kernel_values)
    weight = torch.exp(log_weight)
    return (weight.unsqueeze(-2) @ features).squeeze(-2), weight.sum(-1, keepdim=True)


def _inner_values(structure: Structure, naturals: Naturals, measure: Measure) -> tuple[dict[str, Tensor], Tensor]:
    values: dict[str, Tensor] = dict(measure.given)
    log_weight = measure.log_weight
    for node in measure.inner:
        if node in values:
            continue
        mechanism, params, parents = (
            structure.mechanisms[node],
            naturals[node],
            structure.parents(node, values),
        )
        if node in measure.states:
            values[node] = measure.states[node]
            log_weight = log_weight + mechanism.log_prob(params, values[node], parents)
        else:
            values[node] = mechanism.forward(params, parents, measure.noise[node])
    return values, log_weight


def _kernel_means(
    structure: Structure,
    naturals: Naturals,
    node: str,
    kernels: Sequence[Kernel],
    values: Mapping[str, Tensor],
) -> list[Tensor]:
    """For each column of a node, the mean of its kernels at every point: (R, S, J_c)."""
    mechanism, params = structure.mechanisms[node], naturals[node]
    if node in values:
        value = values[node]
        return [kernel(value if kernel.is_discrete else value[..., i : i + 1]) for i, kernel in enumerate(kernels)]
    return leaf_means(mechanism, params, structure.parents(node, values), kernels)


def leaf_means(mechanism: Mechanism, params: Params, parents: Parents, kernels: Sequence[Kernel]) -> list[Tensor]:
    """Integrate a leaf out of its kernels: in closed form, over its support, or over a grid of its noise."""
    closed = mechanism.kernel_means(params, parents, kernels) if isinstance(mechanism, KernelMeans) else None
    if closed is not None:
        return closed
    if mechanism.has_density and not mechanism.correlated:
        summed = _summed_means(mechanism, params, parents, kernels)
        if summed is not None:
            return summed
    atoms = mechanism.atoms(params, parents, MOST_ATOMS)
    if atoms is not None:
        probs = torch.exp(atoms.log_probs)
        return [probs @ kernel(atoms.values) for kernel in kernels]
    return _leaf_quadrature(mechanism, params, parents, kernels)


def _summed_means(
    mechanism: Mechanism, params: Params, parents: Parents, kernels: Sequence[Kernel]
) -> list[Tensor] | None:
    """Sum over counts as far as a kernel reaches, which does not depend on the parameters; None of other values."""
    spread = {name: value.unsqueeze(-2) for name, value in parents.items()}
    means = []
    for cell, kernel in enumerate(kernels):
        summands = mechanism.space.summands(_reach(kernel))
        if summands is None:
            return None
        counts, weight = (value.to(kernel.landmarks) for value in summands)
        grid = counts.reshape(1, 1, -1, 1).expand(1, 1, -1, mechanism.space.width)
        own = torch.arange(mechanism.space.width, device=counts.device) == cell
        probs = torch.exp(mechanism.log_prob(params, grid, spread, own.reshape(1, 1, 1, -1)))
        means.append((probs * weight.to(probs)) @ kernel(counts.unsqueeze(-1)).to(probs))
    return means


def _reach(kernel: Kernel) -> float:
    """The count beyond which all kernels of a column vanish."""
    if not kernel.landmarks.numel():
        return 0.0
    furthest = kernel.centre + kernel.spread * float((kernel.landmarks + 6 * kernel.bandwidths).max())
    return max(furthest, 0.0) ** 2 if kernel.root else max(furthest, 0.0)


def _leaf_quadrature(mechanism: Mechanism, params: Params, parents: Parents, kernels: Sequence[Kernel]) -> list[Tensor]:
    """Coordinates with one noise each are independent: one grid serves them all."""
    if mechanism.space.is_countable:
        raise ModelError(
            f"node {mechanism.family.node!r}: {type(mechanism).__name__} has neither a finite support nor a "
            "differentiable forward map; the direct transport route cannot integrate it"
        )
    anchor = next(iter((*params.values(), *parents.values())))
    if mechanism.noise.dim == 0:
        value = mechanism.forward(params, parents, torch.zeros(1, 1, 0).to(anchor))
        return [kernel(value[..., i : i + 1]) for i, kernel in enumerate(kernels)]
    rows = max((value.shape[-2] for value in parents.values()), default=1)
    least, most = LEAF_POINTS
    nodes, log_weight = quadrature(mechanism.noise.kind, min(most, max(least, LEAF_ELEMENTS // rows)))
    noise = nodes.to(anchor).reshape(1, 1, -1, 1).expand(1, 1, -1, mechanism.noise.dim)
    spread = {name: value.unsqueeze(-2) for name, value in parents.items()}
    value = mechanism.forward(params, spread, noise)  # (R, S, A, width)
    weight = torch.exp(log_weight).to(anchor)
    return [torch.einsum("a,...aj->...j", weight, kernel(value[..., i : i + 1])) for i, kernel in enumerate(kernels)]
