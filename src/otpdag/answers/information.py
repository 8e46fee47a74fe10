r"""The observed information of rows about a model's raw parameters, and the covariance that follows from it.

.. math:: I(\theta) = -\nabla^2 \sum_n \log p_\theta(x_n), \qquad \mathrm{Cov}(\hat\theta) \approx I(\hat\theta)^{-1}

The gradient of a log-likelihood with unknowns summed out is exact but of first order only (Fisher's identity), so that
second derivatives are central differences of it: with a step of 1e-4 in coordinates of order one their relative error
is about 1e-8, far below what an interval shows.

How many numbers of a model are free to be estimated: what AIC, BIC and the summary count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.errors import ModelError
from otpdag.likelihood import elimination
from otpdag.likelihood.row_posterior import BUDGET, Fitted
from otpdag.mechanisms.base import Mechanism
from otpdag.mechanisms.parameters import SIMPLEX, Parameter
from otpdag.structure import Structure, pack, unpack
from otpdag.threads import bounded_threads

STEP = 1e-4
"""Of the differences, in raw coordinates, which are of order one."""

FLAT = 1e-6
"""Curvature, relative to that of its own coordinates, below which a direction is one that the data do not tell."""

REPLICAS = 16
"""Points at which gradients are taken at once."""

REPLICAS_OF_A_LAYOUT = 4
"""The same for rows along the graph, whose tables are sized for one."""


@dataclass(frozen=True)
class Information:
    """Second derivatives of minus the log-likelihood (P, P), and what follows from them.

    ``flat`` are directions (P, k) in which the likelihood does not fall: labels of a softmax that only differences of
    have a meaning, and whatever the data do not tell.
    """

    matrix: Tensor

    def without(self, flat: Tensor) -> Information:
        """The same with no curvature along directions (P, k) that are known to be flat."""
        if not flat.shape[1]:
            return self
        basis = torch.linalg.qr(flat).Q
        rest = torch.eye(len(flat)).to(basis) - basis @ basis.mT
        return Information(rest @ self.matrix @ rest)

    def _scaled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each coordinate in units of its own curvature; eigenvalues and eigenvectors there."""
        own = self.matrix.diagonal().abs()
        most = own.max().clamp(min=1e-300)
        # raw coordinates are of order one: a curvature of one tells something even beside that of a constant column
        unit = torch.where(own > (FLAT * most).clamp(max=1.0), own, most).rsqrt()
        values, vectors = torch.linalg.eigh(unit.unsqueeze(0) * self.matrix * unit.unsqueeze(1))
        return unit, values, vectors

    @property
    def flat(self) -> Tensor:
        """Directions (P, k), of length one, that the data do not tell."""
        unit, values, vectors = self._scaled()
        directions = unit.unsqueeze(1) * vectors[:, values <= FLAT]
        return directions / directions.norm(dim=0, keepdim=True).clamp(min=1e-300)

    @property
    def blur(self) -> float:
        r"""How far flat directions may lean towards others.

        A matrix without negative eigenvalues whose entry along a direction is :math:`\epsilon`, and along another
        :math:`\lambda`, has at most :math:`\sqrt{\epsilon \lambda}` between them, which turns the former by
        :math:`\sqrt{\epsilon / \lambda}`.
        """
        _, values, _ = self._scaled()
        flat, others = values[values <= FLAT], values[values > FLAT]
        if not len(flat) or not len(others):
            return 0.0
        return float((flat.abs().max() / others.min()).sqrt())

    def covariance(self) -> Tensor:
        """The inverse along all directions that the data tell (P, P); zero along the others.

        >>> Information(torch.diag(torch.tensor([4.0, 1.0]).double())).covariance().diagonal()
        tensor([0.2500, 1.0000], dtype=torch.float64)
        """
        unit, values, vectors = self._scaled()
        inverse = torch.where(values > FLAT, 1 / values.clamp(min=FLAT), 0.0)
        root = unit.unsqueeze(1) * vectors
        return (root * inverse) @ root.mT


def observed_information(gradient: Callable[[Tensor], Tensor], point: Tensor) -> Information:
    """Central differences of the gradient (R, P) of minus the log-likelihood at a point (1, P).

    >>> observed_information(lambda x: x * torch.tensor([2.0, 3.0]), torch.zeros(1, 2).double()).matrix.round()
    tensor([[2., 0.],
            [0., 3.]], dtype=torch.float64)
    """
    size = point.shape[1]
    if not size:
        return Information(point.new_zeros(0, 0))
    shifts = STEP * torch.eye(size).to(point)
    shifted = torch.cat([point + shifts, point - shifts])
    slopes = torch.cat([gradient(part).detach() for part in shifted.split(REPLICAS)])
    matrix = (slopes[:size] - slopes[size:]) / (2 * STEP)
    if not bool(torch.isfinite(matrix).all()):
        raise ModelError("the likelihood has no finite second derivative at the estimate")
    return Information(0.5 * (matrix + matrix.mT))


def table_information(fitted: Fitted, batch: Batch) -> Information:
    """The observed information of a table about the raw parameters of a fitted model."""
    structure = fitted.structure
    fitted.check_densities("the information of rows")
    layout = elimination.lay_out_within(structure, batch, replace(BUDGET, approximate=False))
    if layout is None:
        raise ModelError("the information of these rows has no sum along the graph that fits in memory")
    placed = elimination.moved(fitted.naturals, layout) if layout.has_points else layout
    shapes = {key: parameter.shape for key, parameter in structure.parameters().items()}

    def gradient(points: Tensor) -> Tensor:
        return torch.cat([one_gradient(part) for part in points.split(REPLICAS_OF_A_LAYOUT)])

    def one_gradient(points: Tensor) -> Tensor:
        leaf = points.detach().clone().requires_grad_(True)
        total = elimination.total_evidence(structure.naturals(unpack(leaf, shapes)), placed)
        (slope,) = torch.autograd.grad(-total.sum(), leaf)
        return slope

    with bounded_threads(0):
        return observed_information(gradient, pack_raw(fitted))


def pack_raw(fitted: Fitted) -> Tensor:
    """The model's raw parameters as one point (1, P), in the order of its structure."""
    raw = fitted.structure.raw(fitted.naturals)
    return pack({key: raw[key] for key in fitted.structure.parameters()})


MOST_RANKED = 400
"""Numbers of one node up to which those that say the same twice are found by the rank of a derivative."""


def free_parameters(structure: Structure) -> int:
    """Count what is learned: a table of K probabilities has K - 1, tied parameters count once.

    Numbers that say the same twice (a constant that is added to all logits, the level of a hidden node) count once:
    per node, the rank of the derivative of the parameters that a user reads in those that the optimiser moves.

    >>> import otpdag as otp
    >>> from otpdag import mechanisms as m
    >>> graph = otp.Graph([("z", "x"), ("x", "y")], hidden=["z"])
    >>> free_parameters(Structure.bind(graph, {"z": m.Categorical(3), "x": m.Normal(), "y": m.Categorical(4)}))
    14
    """
    counted: set[str] = set()
    total = 0
    for node, names in structure.keys.items():
        mechanism = structure.mechanisms[node]
        declared = mechanism.declared()
        fresh = {name: key for name, key in names.items() if key not in counted}
        counted |= set(fresh.values())
        simplex = [name for name in fresh if declared[name].support is SIMPLEX]
        total += sum(_simplex_size(declared[name]) for name in simplex)
        others = [name for name in fresh if name not in simplex]
        total += _rank(mechanism, {name: declared[name] for name in others})
    return total


def _simplex_size(parameter: Parameter) -> int:
    size = math.prod(parameter.shape)
    return size - size // parameter.shape[-1]


def _rank(mechanism: Mechanism, free: Mapping[str, Parameter]) -> int:
    """The number of directions in which what a user reads of a node can move."""
    size = sum(math.prod(parameter.shape) for parameter in free.values())
    if not 0 < size <= MOST_RANKED:
        return size
    generator = torch.Generator().manual_seed(0)
    learned = {name: p for name, p in mechanism.declared().items() if p.learned}
    raw = {
        name: 0.3 * torch.randn(1, *p.shape, generator=generator, dtype=torch.float64) for name, p in learned.items()
    }

    def shown(flat: Tensor) -> Tensor:
        parts = flat.split([math.prod(parameter.shape) for parameter in free.values()])
        moved = {name: part.reshape(1, *free[name].shape) for name, part in zip(free, parts, strict=True)}
        described = mechanism.describe(mechanism.natural({**raw, **moved}))
        return torch.cat([value.flatten() for value in described.values()])

    start = torch.cat([raw[name].flatten() for name in free])
    derivative = torch.autograd.functional.jacobian(shown, start)
    return int(torch.linalg.matrix_rank(derivative, rtol=1e-9))
