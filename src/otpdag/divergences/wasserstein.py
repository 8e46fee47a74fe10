"""Exact optimal transport: of two samples, and of batches to weighted atoms by its semi-dual."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.costs import AbstractCost, PointFunction, SquaredEuclidean, as_cost
from otpdag.divergences.base import AbstractDivergence, require_finite
from otpdag.errors import check_count, check_number
from otpdag.numerics import Array, nearest


@dataclass(frozen=True)
class _Coupling:
    """The support of an optimal plan, its mass, and the dual potentials."""

    rows: NDArray[np.intp]
    columns: NDArray[np.intp]
    mass: Array
    f: Array
    g: Array


@dataclass(frozen=True)
class Wasserstein(AbstractDivergence):
    r"""Exact optimal transport cost (Peyré & Cuturi 2019, https://arxiv.org/abs/1803.00567, chapter 3).

    .. math:: D(P, Q) = \min_{\pi \in \Pi(a, b)} \sum_{ij} \pi_{ij}\, c(x_i, y_j)^p

    It is the transport **cost**, not its root: the defaults give :math:`W_2^2`, and ``cost=Euclidean(), p=p``
    gives :math:`W_p^p`. The plan is found outside of the computation graph and held fixed in the gradient,
    which by the envelope theorem is exact wherever the plan is unique; the gradient in the weights is the
    dual potentials. The solver is the network simplex (POT).

    Args:
        cost: A ground cost, or a function of two points.
        p: Power of the ground cost, at least 1.
        workers: Threads that solve replicas side by side.

    Example:
        >>> x, y = torch.tensor([[[0.0], [1.0]]]), torch.tensor([[[4.0], [3.0]]])
        >>> Wasserstein()(x, y)
        tensor([9.])
    """

    cost: AbstractCost | PointFunction = field(default_factory=SquaredEuclidean)
    p: float = 1.0
    workers: int = 2

    def __post_init__(self) -> None:
        """Check the options."""
        as_cost(self.cost)
        check_number("p", self.p, 1.0)
        check_count("workers", self.workers)

    def forward(self, x: Tensor, y: Tensor, a: Tensor, b: Tensor, generator: torch.Generator | None) -> Tensor:
        """Compute the cost of checked samples."""
        couplings = self._transport(x, y, a, b)
        return self._value(x, y, couplings) + _weight_gradient(couplings, a, b)

    def _transport(self, x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> list[_Coupling]:
        """Solve the problem of each replica."""
        costs = self._costs(x, y)
        replicas = max(costs.shape[0], a.shape[0], b.shape[0])
        arrays = (value.detach().to(costs).expand(replicas, *value.shape[1:]).numpy() for value in (costs, a, b))
        return self._run(list(zip(*arrays, strict=True)))

    def _costs(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the cost matrices for the solvers: detached, double precision, on the processor."""
        with torch.no_grad():
            costs = as_cost(self.cost)(x, y).to("cpu", torch.float64)
            costs = costs if self.p == 1 else costs.pow(self.p)
        return require_finite(costs)

    def _run(self, jobs: list[tuple[Array, Array, Array]]) -> list[_Coupling]:
        """Solve one problem per replica; the solver releases the interpreter lock, so threads help."""
        if len(jobs) == 1 or self.workers == 1:
            return [_solve_transport(*job) for job in jobs]
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(lambda job: _solve_transport(*job), jobs))

    def _value(self, x: Tensor, y: Tensor, couplings: list[_Coupling]) -> Tensor:
        """Evaluate the cost on the support of the plans only, differentiably in the points."""
        count = len(couplings)
        sizes = torch.tensor([len(coupling.mass) for coupling in couplings])
        replica = torch.arange(count).repeat_interleave(sizes).to(x.device)
        rows, columns, mass = (
            torch.from_numpy(np.concatenate(parts)).to(x.device)
            for parts in zip(*((c.rows, c.columns, c.mass) for c in couplings), strict=True)
        )
        moved = x.expand(count, -1, -1)[replica, rows], y.expand(count, -1, -1)[replica, columns]
        costs = as_cost(self.cost).between(*moved)
        costs = costs if self.p == 1 else costs.pow(self.p)
        return x.new_zeros(count).index_add(0, replica, mass.to(x.dtype) * costs)


def _solve_transport(costs: Array, a: Array, b: Array, pivots: int = 10_000_000) -> _Coupling:
    """Solve the transport problem of one replica, costs (N, M), by the network simplex; POT warns if it needs more."""
    import ot  # takes seconds to import, and few fits need it

    a, b = a / a.sum(), b / b.sum()
    plan, log = ot.emd(a, b, np.ascontiguousarray(costs), numItermax=pivots, log=True)
    rows, columns = plan.nonzero()
    # Conjugating once gives points without mass the potential that they would have with a little of it.
    f = (costs - log["v"])[:, b > 0].min(1)
    g = (costs - f[:, None]).min(0)
    return _Coupling(rows, columns, plan[rows, columns], f - f @ a, g - g @ b)


def _weight_gradient(couplings: list[_Coupling], a: Tensor, b: Tensor) -> Tensor:
    """Return zero, with the dual potentials as gradient in the weights."""
    f = torch.from_numpy(np.stack([coupling.f for coupling in couplings])).to(a)
    g = torch.from_numpy(np.stack([coupling.g for coupling in couplings])).to(b)
    return (f * (a - a.detach())).sum(-1) + (g * (b - b.detach())).sum(-1)


@dataclass(frozen=True)
class SemiDual:
    """The semi-dual of transport problems at given potentials.

    Attributes:
        assignment: The atom that each point is sent to, (R, N).
        value: The dual's value without the transported costs, ``<b, g> - mean g[assignment]``, (R,); its gradient in
            the potentials is ``b`` minus the share of the points that each atom gets, and in ``b`` the potentials.
    """

    assignment: Tensor
    value: Tensor


def semi_dual(costs: Tensor, b: Tensor, g: Tensor) -> SemiDual:
    r"""Evaluate the semi-dual of optimal transport at potentials of the atoms.

    .. math:: W(P, \textstyle\sum_k b_k \delta_{y_k})
              = \max_g \; \langle b, g \rangle + E_{x \sim P} \min_k \{c(x, y_k) - g_k\}

    (Genevay et al. 2016, https://arxiv.org/abs/1605.08527). The expectation is over all data, so that potentials which
    are kept from batch to batch and ascend its stochastic gradient make the atoms' weights hold over the data set,
    where solving each batch on its own would hold them in every batch.

    Args:
        costs: Costs of all pairs (R, N, K); not differentiated.
        b: Weights of the atoms, (R, K) or (1, K), that sum to one.
        g: Potentials, the same.

    Returns:
        Assignment and value. Add the mean cost of the assigned pairs, evaluated differentiably, for the whole.

    Example:
        >>> costs = torch.tensor([[[0.0, 1.0], [0.2, 1.0]]])  # both points are nearer to the first atom
        >>> b = torch.tensor([[0.5, 0.5]])
        >>> semi_dual(costs, b, torch.tensor([[0.0, 0.9]])).assignment
        tensor([[0, 1]])
    """
    with torch.no_grad():
        assignment = nearest(costs - g.unsqueeze(-2))
        share = torch.zeros(assignment.shape[0], costs.shape[-1]).to(costs)
        share.scatter_add_(1, assignment, torch.full_like(assignment, 1, dtype=costs.dtype))
        share /= assignment.shape[-1]
    value = (b * g.detach()).sum(-1) + ((b.detach() - share) * g).sum(-1) - (b * g).sum(-1).detach()
    return SemiDual(assignment, value)


def reverse_gradient(value: Tensor) -> Tensor:
    """The same value with the opposite gradient: what it multiplies is ascended while the rest descends."""
    return 2.0 * value.detach() - value
