"""Entropic optimal transport and the Sinkhorn divergence."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor

from otpdag.costs import AbstractCost, PointFunction, SquaredEuclidean, as_cost
from otpdag.divergences.base import AbstractDivergence, fill_weights, pair_mean, require_finite, weigh_rows
from otpdag.errors import ConvergenceWarning, check_count, check_positive

BLOCK = 10  # sweeps between two absorptions of the scalings
NEGLIGIBLE = -70.0  # logarithm of a share of mass that no precision sees


@dataclass(frozen=True)
class Sinkhorn(AbstractDivergence):
    r"""Sinkhorn divergence (Feydy et al. 2019, https://arxiv.org/abs/1810.08278).

    .. math:: D(P, Q) = OT_\varepsilon(P, Q) - \tfrac12 OT_\varepsilon(P, P) - \tfrac12 OT_\varepsilon(Q, Q),
              \quad OT_\varepsilon(P, Q) = \min_{\pi \in \Pi(a, b)} \sum_{ij} \pi_{ij} c(x_i, y_j)
              + \varepsilon\, KL(\pi \,\|\, a \otimes b)

    The dual potentials are found outside of the computation graph and held fixed in the gradient (envelope
    theorem): nothing is unrolled, and the gradient in the weights is the potentials. The value is that of the
    dual, a lower bound even before convergence. Sweeps are stabilised in the log domain (Schmitzer 2019,
    https://arxiv.org/abs/1610.06519): :math:`\varepsilon` is first lowered step by step, and then most sweeps
    are matrix products whose scalings are absorbed into the potentials again and again.

    Unbalanced, the plan's marginals need not be the weights, but pay for their distance (Séjourné et al. 2019,
    https://arxiv.org/abs/1910.12958),

    .. math:: OT_{\varepsilon,\rho}(P, Q) = \min_{\pi \ge 0} \sum_{ij} \pi_{ij} c(x_i, y_j)
              + \varepsilon\, KL(\pi \,\|\, a \otimes b) + \rho\, KL(\pi 1 \,\|\, a) + \rho\, KL(\pi^\top 1 \,\|\, b),

    so that points whose transport would cost more than about :math:`2 \rho` hardly take part (:meth:`matched`).

    Args:
        epsilon: Strength of the entropic term.
        cost: A ground cost, or a function of two points.
        relative: Take ``epsilon`` and ``unbalanced`` as fractions of the mean cost between the samples (not
            differentiated).
        debiased: Subtract the two self-transport terms; otherwise return :math:`OT_\varepsilon` itself.
        iterations: Most sweeps over both potentials; a warning tells when they did not suffice.
        tolerance: Total violation of a marginal at which to stop.
        unbalanced: The price :math:`\rho` of mass that is left out or added; None if all mass must be transported.

    Example:
        >>> x, y = torch.tensor([[[0.0], [1.0]]]), torch.tensor([[[4.0], [3.0]]])
        >>> Sinkhorn(epsilon=0.01)(x, y)
        tensor([9.])
        >>> far = torch.tensor([[[0.0], [9.0]]])
        >>> Sinkhorn(0.01, relative=False, unbalanced=1.0).matched(far, far[:, :1]).round(decimals=2)
        tensor([[1.4100, 0.0000]])
    """

    epsilon: float = 0.05
    cost: AbstractCost | PointFunction = field(default_factory=SquaredEuclidean)
    relative: bool = True
    debiased: bool = True
    iterations: int = 1000
    tolerance: float = 1e-3
    unbalanced: float | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        as_cost(self.cost)
        for name in ("epsilon", "tolerance", "unbalanced"):
            if getattr(self, name) is not None or name != "unbalanced":
                check_positive(f"`{name}`", getattr(self, name))
        check_count("iterations", self.iterations)

    def forward(self, x: Tensor, y: Tensor, a: Tensor, b: Tensor, generator: torch.Generator | None) -> Tensor:
        """Compute the divergence of checked samples."""
        across = require_finite(as_cost(self.cost)(x, y))
        epsilon = self._strength(across.detach(), a.detach(), b.detach())
        value = self._transport(across, a, b, epsilon, symmetric=False)
        for sample, weights in ((x, a), (y, b)) if self.debiased else ():
            costs = require_finite(as_cost(self.cost)(sample, sample))
            value = value - 0.5 * self._transport(costs, weights, weights, epsilon, symmetric=_is_symmetric(costs))
        return value

    def _strength(self, costs: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return epsilon of each replica, (R, 1)."""
        if not self.relative:
            return costs.new_full((1, 1), self.epsilon)
        mean = pair_mean(costs, a, b).unsqueeze(-1)
        return (self.epsilon * mean).clamp(min=torch.finfo(costs.dtype).tiny ** 0.5)

    def _transport(self, costs: Tensor, a: Tensor, b: Tensor, epsilon: Tensor, *, symmetric: bool) -> Tensor:
        r"""Return the dual value, differentiable in costs and weights with the potentials held fixed.

        .. math:: \langle a, h(f) \rangle + \langle b, h(g) \rangle - \varepsilon (\textstyle\sum_{ij} \pi_{ij} - 1),
                  \qquad h(f) = \rho (1 - e^{-f / \rho}) \text{ or } f

        The weights' gradients are :math:`(1 + \varepsilon / \rho)\, h`, since the plan's mass counts by them, too.
        """
        with torch.no_grad():
            problem = self._problem(costs, a, b, epsilon)
            potentials = self._potentials(problem, symmetric)
            plan = problem.plan(*potentials)
            f, g = (problem.counted(own) for own in potentials)
            excess = epsilon.squeeze(-1) * (plan.sum((-2, -1)) - 1.0)
            value = (a * f).sum(-1) + (b * g).sum(-1) - excess
        moved = (plan * (costs - costs.detach())).sum((-2, -1))
        by_weight = ((a - a.detach()) * f).sum(-1) + ((b - b.detach()) * g).sum(-1)
        return value + (1.0 + problem.slack) * by_weight + moved

    def _problem(self, costs: Tensor, a: Tensor, b: Tensor, epsilon: Tensor) -> _Problem:
        return _Problem(costs, a, b, epsilon, 0.0 if self.unbalanced is None else self.epsilon / self.unbalanced)

    def matched(self, x: Tensor, y: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> Tensor:
        """The share (R, N) of the weight of each point of ``x`` that is transported; above one where it is stretched.

        Arguments are those of a call, and weights sum to one.
        """
        a, b = fill_weights(x, a), fill_weights(y, b)
        with torch.no_grad():
            costs = require_finite(as_cost(self.cost)(x, y))
            problem = self._problem(costs, a, b, self._strength(costs, a, b))
            return problem.kept(self._potentials(problem, symmetric=False)[0])

    def _potentials(self, problem: _Problem, symmetric: bool) -> tuple[Tensor, Tensor]:
        """Find the dual potentials (R, N) and (R, M)."""
        f, g = problem.start() if symmetric else problem.anneal()
        tolerance = problem.attainable(self.tolerance)
        converged = torch.zeros_like(tolerance, dtype=torch.bool)
        for block in range(math.ceil(self.iterations / BLOCK)):
            # Averaged sweeps keep f and g alike where x and y are, and are quick there; others are quick elsewhere.
            new_f, new_g, error = problem.sweep(f, g, averaged=symmetric or block == 0)
            f, g = torch.where(converged, f, new_f), torch.where(converged, g, new_g)
            converged = converged | (error <= tolerance)
            if bool(converged.all()):
                break
        else:
            self._warn(float(error.max()))
        # A last pass in the log domain also gives points without weight their potential.
        f = problem.softmin_rows(g, problem.epsilon)
        return f, f if symmetric else problem.softmin_columns(f, problem.epsilon)

    def _warn(self, error: float) -> None:
        warnings.warn(
            f"Sinkhorn stopped after {self.iterations} sweeps with a marginal error of {error:.1e} "
            f"(tolerance {self.tolerance:.1e}); raise `epsilon`, `iterations` or `tolerance`",
            ConvergenceWarning,
            stacklevel=2,
        )


@dataclass(frozen=True)
class _Problem:
    """Entropic transport problems: costs (R, N, M), weights (R, N) and (R, M), epsilon (R, 1).

    ``slack`` is epsilon over the price of mass that is left out, zero if none may be.
    """

    costs: Tensor
    a: Tensor
    b: Tensor
    epsilon: Tensor
    slack: float = 0.0

    def kept(self, f: Tensor) -> Tensor:
        r"""Return the share :math:`e^{-f / \rho}` of the weights that is transported, one if all must be."""
        return torch.exp(-f * self.slack / self.epsilon)

    def counted(self, f: Tensor) -> Tensor:
        r"""Return what a potential adds to the dual: :math:`\rho (1 - e^{-f / \rho})`, or itself."""
        return -torch.expm1(-f * self.slack / self.epsilon) * self.epsilon / self.slack if self.slack else f

    def start(self) -> tuple[Tensor, Tensor]:
        """Return potentials of zero, in their full shape."""
        _, rows, columns = self.costs.shape
        replicas = max(value.shape[0] for value in (self.costs, self.a, self.b, self.epsilon))
        return self.costs.new_zeros(replicas, rows), self.costs.new_zeros(replicas, columns)

    def softmin_rows(self, g: Tensor, temperature: Tensor) -> Tensor:
        r"""Return :math:`f_i = -t \log \sum_j b_j e^{(g_j - c_{ij})/t}`, over :math:`1 + t / \rho`."""
        exponents = (g / temperature + self.b.log()).unsqueeze(-2) - self.costs / temperature[..., None]
        return -temperature * _logsumexp_(exponents, -1) / (1.0 + self.slack * temperature / self.epsilon)

    def softmin_columns(self, f: Tensor, temperature: Tensor) -> Tensor:
        r"""Return :math:`g_j = -t \log \sum_i a_i e^{(f_i - c_{ij})/t}`, over :math:`1 + t / \rho`."""
        exponents = (f / temperature + self.a.log()).unsqueeze(-1) - self.costs / temperature[..., None]
        return -temperature * _logsumexp_(exponents, -2) / (1.0 + self.slack * temperature / self.epsilon)

    def plan(self, f: Tensor, g: Tensor) -> Tensor:
        r"""Return :math:`\pi_{ij} = a_i b_j e^{(f_i + g_j - c_{ij})/\varepsilon}`."""
        rows = (f / self.epsilon + self.a.log()).unsqueeze(-1)
        columns = (g / self.epsilon + self.b.log()).unsqueeze(-2)
        return _exp_(rows + columns - self.costs / self.epsilon[..., None])

    def attainable(self, tolerance: float) -> Tensor:
        """Return the marginal error (R, 1) to ask for: rounding of the exponents sets a limit."""
        largest = self.costs.abs().amax((-2, -1)).unsqueeze(-1)
        return (4.0 * torch.finfo(largest.dtype).eps * largest / self.epsilon).clamp(min=tolerance)

    def anneal(self, factor: float = 0.25) -> tuple[Tensor, Tensor]:
        """Sweep in the log domain, lowering the temperature by a factor from the largest cost to epsilon."""
        f, g = self.start()
        temperature = torch.maximum(self.costs.amax((-2, -1)).unsqueeze(-1), self.epsilon)
        f, g = self.softmin_rows(g, temperature), self.softmin_columns(f, temperature)
        while bool((temperature > self.epsilon).any()):
            temperature = torch.maximum(temperature * factor, self.epsilon)
            new_f, new_g = self.softmin_rows(g, temperature), self.softmin_columns(f, temperature)
            f, g = 0.5 * (f + new_f), 0.5 * (g + new_g)
        return f, g

    def sweep(self, f: Tensor, g: Tensor, averaged: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Rescale the plan in a block of sweeps; returns the potentials and their marginal error, (R, 1)."""
        plan = self.plan(f, g)
        u, v = torch.ones_like(f), torch.ones_like(g)
        a, b = self.a * self.kept(f), self.b * self.kept(g)
        for _ in range(BLOCK):
            new_u = _ratio(a, weigh_rows(plan.mT, v)).pow(1 / (1.0 + self.slack))
            new_v = _ratio(b, weigh_rows(plan, u if averaged else new_u)).pow(1 / (1.0 + self.slack))
            u, v = ((u * new_u).sqrt(), (v * new_v).sqrt()) if averaged else (new_u, new_v)
        rows, columns = u * weigh_rows(plan.mT, v), v * weigh_rows(plan, u)
        f, g = f + self.epsilon * u.log(), g + self.epsilon * v.log()
        if self.slack:  # the best constant to move from one to the other, which sweeps find slowly
            left, right = (self.a * self.kept(f)).sum(-1, keepdim=True), (self.b * self.kept(g)).sum(-1, keepdim=True)
            shift = 0.5 * self.epsilon / self.slack * (left / right).log()
            f, g = f + shift, g - shift
        off = rows - self.a * self.kept(f), columns - self.b * self.kept(g)
        return f, g, torch.cat([one.abs() for one in off], -1).sum(-1, keepdim=True)


def _logsumexp_(exponents: Tensor, dim: int) -> Tensor:
    """Sum exponentials in the log domain, overwriting the argument: half the time of the safe function."""
    largest = exponents.amax(dim, keepdim=True)
    return _exp_(exponents.sub_(largest)).sum(dim).log_() + largest.squeeze(dim)


def _exp_(exponents: Tensor) -> Tensor:
    """Exponentiate in place, away from the end of the range of numbers, where it takes ten times as long."""
    return exponents.clamp_(min=NEGLIGIBLE).exp_()


def _ratio(target: Tensor, actual: Tensor) -> Tensor:
    """Divide marginals, leaving points without mass alone."""
    return torch.where(target > 0, target / actual.clamp(min=torch.finfo(actual.dtype).tiny), 1.0)


def _is_symmetric(costs: Tensor) -> bool:
    slack = torch.finfo(costs.dtype).eps ** 0.5 * costs.abs().amax()
    return bool(((costs - costs.mT).abs().amax() <= slack).all())
