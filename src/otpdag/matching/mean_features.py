"""Mean features of a model: over weighted points of its inner nodes, with leaves integrated out.

Leaves are independent given the nodes above them, so the mean of a product of kernels is a product of means, each in
closed form or by a sum over the leaf's own support. The result is smooth in the parameters, without sampling noise.

Few points serve while parameters move; what they get wrong is told by many points at one estimate
(:func:`mean_over_many`), and added: near that estimate the mean is then that of many points.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.divergences.whitened import FeatureColumn, FittedFeatures, Kernel
from otpdag.errors import ModelError
from otpdag.matching.model_points import ModelPoints
from otpdag.mechanisms import Mechanism
from otpdag.mechanisms.base import KernelMeans, Params, Parents
from otpdag.numerics import quadrature
from otpdag.spaces import Space
from otpdag.structure import Naturals, Structure


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


def mean_features(points: ModelPoints, naturals: Naturals, fitted: FittedFeatures) -> Tensor:
    """Mean features of the model: (R, J)."""
    total, weight = _summed_features(points, naturals, fitted)
    return total / weight


def mean_over_many(points: ModelPoints, naturals: Naturals, fitted: FittedFeatures, at_once: int = 1024) -> Tensor:
    """The same (R, J) over so many points that they are evaluated a part at a time; nothing has a gradient.

    Of all replicas ``at_once`` points are: four megabytes of 500 features.
    """
    replicas = max(len(value) for params in naturals.values() for value in params.values())
    with torch.no_grad():
        parts = [
            _summed_features(points.take(index), naturals, fitted)
            for index in torch.arange(points.size).split(max(1, at_once // replicas))
        ]
        total, weight = (torch.stack(sums).sum(0) for sums in zip(*parts, strict=True))
        return total / weight


def _summed_features(points: ModelPoints, naturals: Naturals, fitted: FittedFeatures) -> tuple[Tensor, Tensor]:
    """Weighted sum of the features (R, J) and of the weights (R, 1) over all points."""
    structure, (values, log_weight) = points.structure, points.at(naturals)
    kernels = iter(fitted.kernels)
    means: list[Tensor] = []
    for node in structure.graph.observed:
        mechanism = structure.mechanisms[node]
        own = [next(kernels) for _ in range(mechanism.space.cells)]
        if node in values:
            means += [kernel(mechanism.space.cell_of(values[node], cell)) for cell, kernel in enumerate(own)]
        else:
            means += leaf_means(mechanism, naturals[node], structure.parents(node, values), own)
    weight = torch.exp(log_weight)
    return (weight.unsqueeze(-2) @ fitted.combine(means)).squeeze(-2), weight.sum(-1, keepdim=True)


def leaf_means(mechanism: Mechanism, params: Params, parents: Parents, kernels: Sequence[Kernel]) -> list[Tensor]:
    """Integrate a leaf out of its kernels: in closed form, over its values, or over a grid of its noise."""
    closed = mechanism.kernel_means(params, parents, kernels) if isinstance(mechanism, KernelMeans) else None
    if closed is not None:
        return closed
    if mechanism.has_density and not mechanism.correlated:
        summed = _summed_means(mechanism, params, parents, kernels)
        if summed is not None:
            return summed
    if mechanism.space.is_discrete and mechanism.has_density:
        probs = torch.exp(mechanism.log_probs(params, parents))
        return [probs @ kernel(torch.eye(probs.shape[-1]).to(probs)) for kernel in kernels]
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


def _leaf_quadrature(
    mechanism: Mechanism,
    params: Params,
    parents: Parents,
    kernels: Sequence[Kernel],
    sizes: tuple[int, int] = (32, 160),
    elements: int = 16_384,
) -> list[Tensor]:
    """Coordinates with one noise each are independent: one grid serves them all.

    It has between two ``sizes`` of points, as many as ``elements`` leave to each of the points of its parents.
    """
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
    least, most = sizes
    nodes, log_weight = quadrature(mechanism.noise.kind, min(most, max(least, elements // rows)))
    noise = nodes.to(anchor).reshape(1, 1, -1, 1).expand(1, 1, -1, mechanism.noise.dim)
    spread = {name: value.unsqueeze(-2) for name, value in parents.items()}
    value = mechanism.forward(params, spread, noise)  # (R, S, A, width)
    weight = torch.exp(log_weight).to(anchor)
    return [torch.einsum("a,...aj->...j", weight, kernel(value[..., i : i + 1])) for i, kernel in enumerate(kernels)]
