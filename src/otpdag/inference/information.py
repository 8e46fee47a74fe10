r"""The observed information of rows about a model's raw parameters, and the covariance that follows from it.

.. math:: I(\theta) = -\nabla^2 \sum_n \log p_\theta(x_n), \qquad \mathrm{Cov}(\hat\theta) \approx I(\hat\theta)^{-1}

The gradient of a log-likelihood with unknowns summed out is exact but of first order only (Fisher's identity), so that
second derivatives are central differences of it: with a step of 1e-4 in coordinates of order one their relative error
is about 1e-8, far below what an interval shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otpdag.backward import elimination
from otpdag.data import Batch
from otpdag.errors import ModelError
from otpdag.inference.row_posterior import BUDGET, Fitted
from otpdag.structure import pack, unpack
from otpdag.threads import bounded_threads

__all__ = ["Information", "observed_information", "table_information"]

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
