r"""Products of lines of numbers, each line in one product: what features of several columns are.

Most of the time of a distance between features goes into these products and their gradient, of which the general rules
of differentiation keep every intermediate one.

Whitened kernel features: an integral probability metric for mixed tables.

Each feature is a product of kernels on a random subset of one to four columns, centred at a row of the data:

.. math:: f_j(x) = \prod_{i \in A_j} k_i(x_i, \ell_{ji}), \qquad
          D(P, Q) = \lVert (\Sigma + \lambda I)^{-1/2} (E_P f - E_Q f) \rVert^2,

with :math:`\Sigma` the covariance of the features' means under the data. Kernels are 0/1 for categories and Gaussian,
of several bandwidths, for robustly standardised numbers. Whitening weighs each direction by how precisely the data know
it, as optimally weighted method-of-moments estimators do; small subsets keep the metric alive in many dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from otpdag.divergences.base import AbstractDivergence
from otpdag.numerics import side_by_side


def products_of_lines(lines: Tensor, factors: Sequence[Tensor]) -> Tensor:
    r"""Products :math:`p_j = \prod_k l_{f_k(j)}` of lines (..., C, S): (..., J, S).

    Args:
        lines: Lines of numbers, each of which is a factor of one product.
        factors: For each k, the numbers of the lines that are the k-th factor of the first products; of fewer and fewer
            products, so that the first ones have most factors.

    >>> lines = torch.tensor([[2.0], [3.0], [5.0]])
    >>> products_of_lines(lines, [torch.tensor([0, 1]), torch.tensor([2])])
    tensor([[10.],
            [ 3.]])
    """
    product: Tensor = _Products.apply(lines, *factors)
    return product


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lines: Tensor, *factors: Tensor) -> Tensor:
        ctx.save_for_backward(lines, *factors)
        return _multiplied(lines.index_select(-2, factors[0]), lines, factors[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of a factor is that of its product times all other factors."""
        (gradient,) = gradients
        lines, *factors = ctx.saved_tensors
        total = torch.zeros_like(lines)
        for index, own in enumerate(factors):
            others = [factor for other, factor in enumerate(factors) if other != index]
            part = _multiplied(gradient[..., : len(own), :].clone(), lines, others)
            total.index_copy_(-2, own, part)
        return (total, *(None for _ in factors))


def _multiplied(product: Tensor, lines: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Multiply the first products by their factors, in place."""
    most = product.shape[-2]
    for factor in factors:
        product[..., : len(factor), :].mul_(lines.index_select(-2, factor[:most]))
    return product


@dataclass(frozen=True)
class FeatureColumn:
    """One column of data: numbers (B, N, 1) or one-hot categories (B, N, K), and which rows are seen (B, N)."""

    values: Tensor
    seen: Tensor
    is_discrete: bool = False
    root: bool = False
    """Whether numbers are counts, whose square roots have stable spread."""


@dataclass(frozen=True)
class Kernel:
    """The kernels of one column: landmarks and bandwidths of the features that use it."""

    features: Tensor
    landmarks: Tensor
    """(J_c,) standardised numbers, or (K, J_c) one-hot categories."""
    bandwidths: Tensor
    centre: float
    spread: float
    is_discrete: bool
    root: bool

    def transform(self, values: Tensor) -> Tensor:
        """Standardise numbers the way the landmarks are."""
        values = values.clamp(min=0).sqrt() if self.root else values
        return (values - self.centre) / self.spread

    def __call__(self, values: Tensor) -> Tensor:
        """Kernel values of numbers (..., 1) or categories (..., K): (..., J_c)."""
        if self.is_discrete:
            return values @ self.landmarks.to(values)
        scaled = (self.transform(values) - self.landmarks.to(values)) / self.bandwidths.to(values)
        return torch.exp(-0.5 * scaled**2)


@dataclass(frozen=True)
class FittedFeatures:
    """Features placed on a data set: the kernels, the data's mean features and the whitening matrix."""

    kernels: tuple[Kernel, ...]
    slots: tuple[Tensor, ...]
    """Positions of the first, second, ... kernel of every feature in the kernels' columns side by side; features of
    more columns come first."""
    mean: Tensor
    """(B, J)."""
    whitening: Tensor
    """(B, J, rank)."""
    overlap: Tensor | None = None
    """(B, J, J): rows that show both features over what independent gaps would leave; None if no cell is missing."""

    @property
    def size(self) -> int:
        """Number of features."""
        return len(self.slots[0])

    def combine(self, kernel_values: Sequence[Tensor]) -> Tensor:
        """Multiply kernel values (R, S, J_c) of all columns into features (R, S, J)."""
        return _combined(self.slots, kernel_values)

    def of(self, columns: Sequence[FeatureColumn]) -> Tensor:
        """Features of rows (R, N, J), whether they show all cells or not."""
        return self.combine([kernel(column.values) for kernel, column in zip(self.kernels, columns, strict=True)])

    def mean_of(self, columns: Sequence[FeatureColumn], weight: Tensor) -> Tensor:
        """Mean features (R, J) of the same rows under other weights (R, N), over the rows that show each feature."""
        return _mean(self.of(columns), _seen(columns, self.kernels, self.size), weight)

    def rewhitened(self, columns: Sequence[FeatureColumn], weight: Tensor, ridge: float) -> FittedFeatures:
        """The same features and data, whitened by the covariance under another sample, for instance the model's.

        Weighing the gaps by an estimate from the same data correlates weights and gaps, a known bias of the method of
        moments; a covariance from the model at a first estimate has no such noise and bears a smaller ridge.
        """
        return self.whitened_by(_covariance(self.of(columns), None, weight), ridge)

    def whitened_by(self, covariance: Tensor, ridge: float) -> FittedFeatures:
        """The same features and data, whitened by a covariance (B, J, J) of features of which no cell is missing."""
        if self.overlap is not None:
            covariance = covariance * self.overlap
        return replace(self, whitening=whitening_of(covariance, ridge))

    def distance(self, mean: Tensor) -> Tensor:
        """Squared whitened distance of mean features (R, J) to the data's."""
        gap = self.mean.to(mean) - mean
        whitened = torch.matmul(gap.unsqueeze(-2), self.whitening.to(mean)).squeeze(-2)
        return whitened.square().sum(-1)


@dataclass(frozen=True)
class WhitenedFeatures(AbstractDivergence):
    """Squared distance of whitened mean features; ``x`` is the data, on which the features are placed.

    Args:
        features: Number of features J.
        largest_subset: Most columns in one feature.
        bandwidths: Bandwidths in robust standard deviations; each feature takes one at random.
        ridge: Added to the covariance, as a share of its largest eigenvalue.
        model_ridge: The same, when a fit whitens a second time by the covariance under the model.
        seed: Seed of subsets, landmarks and bandwidths when no generator is given.

    >>> x = torch.randn(1, 400, 2, generator=torch.Generator().manual_seed(0))
    >>> near, far = (WhitenedFeatures(features=60)(x, x + shift) for shift in (0.0, 1.0))
    >>> bool(near < 1e-6), bool(far > 0.5)
    (True, True)
    """

    features: int = 500
    largest_subset: int = 4
    bandwidths: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    ridge: float = 1e-3
    model_ridge: float = 1e-5
    seed: int = 0

    def forward(self, x: Tensor, y: Tensor, a: Tensor, b: Tensor, generator: torch.Generator | None) -> Tensor:
        """Place the features on ``x`` and measure ``y``."""
        seen = torch.ones_like(x[..., 0], dtype=torch.bool)
        columns = [FeatureColumn(x[..., i : i + 1], seen) for i in range(x.shape[-1])]
        fitted = self.fit(columns, a, generator)
        values = fitted.combine([kernel(y[..., i : i + 1]) for i, kernel in enumerate(fitted.kernels)])
        mean = (b.unsqueeze(-1) * values).sum(-2)
        return fitted.distance(mean)

    def fit(
        self, columns: Sequence[FeatureColumn], weight: Tensor, generator: torch.Generator | None = None
    ) -> FittedFeatures:
        """Place features on data: choose subsets, landmark rows and bandwidths, then whiten."""
        generator = generator or torch.Generator().manual_seed(self.seed)
        subsets, landmarks, bandwidth = self._choose(columns, generator)
        kernels, slots = _build_kernels(columns, subsets, landmarks, bandwidth)
        values = _combined(slots, [kernel(column.values) for kernel, column in zip(kernels, columns, strict=True)])
        seen = _seen(columns, kernels, len(subsets))
        overlap = None if seen is None else _overlap(seen, weight)
        whitening = whitening_of(_covariance(values, seen, weight), self.ridge)
        return FittedFeatures(kernels, slots, _mean(values, seen, weight), whitening, overlap)

    def _choose(
        self, columns: Sequence[FeatureColumn], generator: torch.Generator
    ) -> tuple[list[list[int]], list[int], Tensor]:
        """Subsets of columns, the largest first, landmark rows that see all of a subset, and bandwidths."""
        subsets, landmarks = [], []
        rows = columns[0].values.shape[-2]
        for _ in range(self.features):
            size = int(torch.randint(1, min(self.largest_subset, len(columns)) + 1, (1,), generator=generator))
            subset = torch.randperm(len(columns), generator=generator)[:size].tolist()
            seen = torch.stack([columns[c].seen[0] for c in subset]).all(0)
            candidates = torch.nonzero(seen)[:, 0]
            if len(candidates) == 0:
                subset, candidates = subset[:1], torch.nonzero(columns[subset[0]].seen[0])[:, 0]
            pick = int(torch.randint(len(candidates) or rows, (1,), generator=generator))
            subsets.append(sorted(subset))
            landmarks.append(int(candidates[pick]) if len(candidates) else pick)
        choice = torch.randint(len(self.bandwidths), (self.features,), generator=generator)
        largest_first = sorted(range(self.features), key=lambda number: -len(subsets[number]))
        bandwidth = torch.tensor(self.bandwidths, dtype=torch.float64)[choice[largest_first]]
        return [subsets[number] for number in largest_first], [landmarks[n] for n in largest_first], bandwidth


def _combined(slots: Sequence[Tensor], kernel_values: Sequence[Tensor]) -> Tensor:
    lines = side_by_side(kernel_values).mT.contiguous()  # whole lines are copied faster than single numbers
    return products_of_lines(lines, [slot.to(lines.device) for slot in slots]).mT


def _build_kernels(
    columns: Sequence[FeatureColumn],
    subsets: list[list[int]],
    landmarks: list[int],
    bandwidth: Tensor,
) -> tuple[tuple[Kernel, ...], tuple[Tensor, ...]]:
    """The kernels of each column, and where each feature finds its own; subsets come with the largest first."""
    kernels, at = [], 0
    positions: list[list[int]] = [[] for _ in subsets]
    for index, column in enumerate(columns):
        features = [j for j, subset in enumerate(subsets) if index in subset]
        rows = torch.tensor([landmarks[j] for j in features], dtype=torch.long)
        for j in features:
            positions[j].append(at)
            at += 1
        kernels.append(_kernel(column, torch.tensor(features, dtype=torch.long), rows, bandwidth))
    slots = [[own[k] for own in positions if len(own) > k] for k in range(len(subsets[0]))]
    return tuple(kernels), tuple(torch.tensor(slot, dtype=torch.long) for slot in slots)


def _kernel(column: FeatureColumn, features: Tensor, rows: Tensor, bandwidth: Tensor) -> Kernel:
    if column.is_discrete:
        landmarks = column.values[0][rows].T.contiguous()
        return Kernel(features, landmarks, torch.ones(len(features)), 0.0, 1.0, True, False)
    values = column.values[0, :, 0]
    values = values.clamp(min=0).sqrt() if column.root else values
    centre, spread = _robust(values[column.seen[0]])
    landmarks = (values[rows] - centre) / spread
    return Kernel(features, landmarks, bandwidth[features], centre, spread, False, column.root)


def _robust(values: Tensor) -> tuple[float, float]:
    """Median and scaled median absolute deviation; the standard deviation where most values are equal."""
    values = values.detach()
    centre = float(values.median())
    spread = 1.4826 * float((values - centre).abs().median())
    if spread <= 1e-9 * (1 + abs(centre)):
        spread = float(values.std()) if len(values) > 1 else 1.0
    return centre, spread if spread > 1e-12 else 1.0


def _seen(columns: Sequence[FeatureColumn], kernels: Sequence[Kernel], size: int) -> Tensor | None:
    """Which features each row shows (B, N, J), as kernels know what uses them; None if all rows show all."""
    if all(bool(column.seen.all()) for column in columns):
        return None
    seen = torch.ones(*columns[0].seen.shape, size, dtype=torch.bool)
    for column, kernel in zip(columns, kernels, strict=True):
        seen[..., kernel.features] &= column.seen.unsqueeze(-1)
    return seen


def _mean(values: Tensor, seen: Tensor | None, weight: Tensor) -> Tensor:
    """Means (R, J) of features (B, N, J), each over the rows that show it."""
    row = weight.unsqueeze(-2)
    if seen is None:
        return (row @ values).squeeze(-2) / weight.sum(-1, keepdim=True)
    return (row @ (values * seen)).squeeze(-2) / (row @ seen.to(values)).squeeze(-2).clamp(min=1e-12)


def _covariance(values: Tensor, seen: Tensor | None, weight: Tensor) -> Tensor:
    """The covariance of such means times the number of rows (B, J, J). A weight of two stands for two equal rows."""
    share = weight.unsqueeze(-1) if seen is None else weight.unsqueeze(-1) * seen
    root = weight.sqrt().unsqueeze(-1) if seen is None else weight.sqrt().unsqueeze(-1) * seen
    mean = _mean(values, seen, weight).unsqueeze(-2)
    centred = (values - mean) * root / share.sum(-2, keepdim=True).clamp(min=1e-12)
    return centred.transpose(-1, -2) @ centred * weight.sum(-1)[..., None, None]


def _overlap(seen: Tensor, weight: Tensor) -> Tensor:
    """N n_jk / (n_j n_k), with n_jk the rows that show both features j and k."""
    shown = seen * weight.unsqueeze(-1)
    both = shown.transpose(-1, -2) @ seen.to(shown)
    alone = shown.sum(-2).clamp(min=1e-12)
    return both * weight.sum(-1)[..., None, None] / (alone.unsqueeze(-1) * alone.unsqueeze(-2))


def whitening_of(covariance: Tensor, ridge: float) -> Tensor:
    """A matrix W with W W' = (covariance + ridge * largest eigenvalue)^-1."""
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    eigenvalues = eigenvalues.clamp(min=0)
    floor = ridge * eigenvalues[..., -1:].clamp(min=1e-12)
    return vectors * torch.rsqrt(eigenvalues + floor).unsqueeze(-2)
