"""Adversarial Jensen-Shannon divergence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from otpdag.divergences.base import AbstractDivergence
from otpdag.errors import DataError, ModelError
from otpdag.layers import apply_mlp, init_mlp

__all__ = ["JensenShannon"]

LOG_2 = math.log(2)


class _Setup(NamedTuple):
    """What a discriminator was built for."""

    replicas: int
    features: int
    dtype: torch.dtype
    device: torch.device


@dataclass(eq=False)
class JensenShannon(AbstractDivergence):
    r"""Jensen-Shannon divergence in nats, bounded from below by a discriminator trained on the way.

    .. math:: D(P, Q) \ge \log 2 + \tfrac12 E_P \log \sigma(T(X)) + \tfrac12 E_Q \log \sigma(-T(Y))

    (Goodfellow et al. 2014, https://arxiv.org/abs/1406.2661). Every call first trains the discriminator
    :math:`T` for some steps on the two samples (detached), then returns the bound, differentiable in samples
    and weights with :math:`T` held fixed. The bound is tight only once :math:`T` has been trained for long
    enough, and can be below zero before. It never exceeds log 2.

    Unlike the other divergences it carries a state: use one object per pair of distributions, and
    ``dataclasses.replace(divergence)`` for an untrained copy. The state is built at the first call. Each
    replica has its own discriminator, and all start alike, so that a replica's result does not depend on its
    company.

    Args:
        hidden: Widths of the hidden layers.
        steps: Training steps at each call.
        learning_rate: Step size of Adam.
        seed: Seed of the discriminator's first parameters.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> x = torch.randn(1, 256, 2, generator=generator)
        >>> divergence = JensenShannon(steps=100)
        >>> bool(divergence(x, x + 10.0) > 0.6)
        True
    """

    hidden: tuple[int, ...] = (64, 64)
    steps: int = 5
    learning_rate: float = 5e-3
    seed: int = 0
    _setup: _Setup | None = field(default=None, init=False, repr=False)
    _params: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    _optimiser: torch.optim.Optimizer | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the options."""
        if self.steps < 0:
            raise ModelError(f"`steps` must not be negative; got {self.steps}")
        if not self.learning_rate > 0:
            raise ModelError(f"`learning_rate` must be positive; got {self.learning_rate}")
        if not all(width > 0 for width in self.hidden):
            raise ModelError(f"`hidden` must hold positive widths; got {self.hidden}")

    def forward(
        self, x: Tensor, y: Tensor, a: Tensor | None, b: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """Train the discriminator and return the bound of checked samples."""
        for _ in range(self.steps):
            self.fit_step(x, y, a, b)
        self._build(x, y, a, b)
        params = {name: value.detach() for name, value in self._params.items()}
        return _bound(params, x, y, a, b)

    def fit_step(self, x: Tensor, y: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> Tensor:
        """Train the discriminator by one step.

        Args:
            x: A sample, (R, N, d), detached here.
            y: A sample, (R, M, d), detached here.
            a: Weights of ``x`` that sum to 1, (R, N), or None.
            b: Weights of ``y`` that sum to 1, (R, M), or None.

        Returns:
            The bound before the step, (R,), detached.
        """
        optimiser = self._build(x, y, a, b)
        with torch.enable_grad():
            bound = _bound(self._params, x.detach(), y.detach(), _detached(a), _detached(b))
            optimiser.zero_grad()
            (-bound.sum()).backward()
        optimiser.step()
        return bound.detach()

    def _build(self, x: Tensor, y: Tensor, a: Tensor | None, b: Tensor | None) -> torch.optim.Optimizer:
        """Build the discriminator at the first call, and refuse other shapes at later ones."""
        replicas = max(value.shape[0] for value in (x, y, a, b) if value is not None)
        setup = _Setup(replicas, x.shape[-1], x.dtype, x.device)
        if self._optimiser is None:
            generator = torch.Generator().manual_seed(self.seed)
            self._params = _initialise(setup, self.hidden, generator)
            self._optimiser = torch.optim.Adam(self._params.values(), lr=self.learning_rate, betas=(0.5, 0.99))
            self._setup = setup
        if setup != self._setup:
            raise DataError(
                f"`x` and `y` must fit the discriminator of earlier calls, {self._setup}; got {setup}. "
                "Use one JensenShannon object for each pair of distributions"
            )
        return self._optimiser


def _initialise(setup: _Setup, hidden: tuple[int, ...], generator: torch.Generator) -> dict[str, Tensor]:
    """Draw one network, let it start at T = 0, and copy it for every replica."""
    sizes = [setup.features, *hidden, 1]
    params = init_mlp(sizes, replicas=1, generator=generator, dtype=setup.dtype)
    params[f"{len(hidden)}.weight"].zero_()
    return {
        name: value.expand(setup.replicas, *value.shape[1:]).to(setup.device, copy=True).requires_grad_()
        for name, value in params.items()
    }


def _bound(params: dict[str, Tensor], x: Tensor, y: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
    """Evaluate the bound of each replica, (R,)."""
    centre, scale = _moments(x.detach(), y.detach(), a, b)
    replicas = next(iter(params.values())).shape[0]
    score_x, score_y = (
        apply_mlp(params, ((value - centre) / scale).expand(replicas, -1, -1)).squeeze(-1) for value in (x, y)
    )
    return LOG_2 + 0.5 * (_mean(logsigmoid(score_x), a) + _mean(logsigmoid(-score_y), b))


def _moments(x: Tensor, y: Tensor, a: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the mixture of both samples, (R, 1, d)."""
    weights_x, weights_y = _detached(a), _detached(b)
    mean = 0.5 * (_mean(x.mT, weights_x) + _mean(y.mT, weights_y)).unsqueeze(-2)
    second = [_mean((value - mean).square().mT, w) for value, w in ((x, weights_x), (y, weights_y))]
    scale = (0.5 * (second[0] + second[1])).sqrt().unsqueeze(-2)
    return mean, torch.where(scale > 0, scale, 1.0)


def _detached(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.detach()


def _mean(values: Tensor, weights: Tensor | None) -> Tensor:
    """Average over the last axis, with weights (R, N) where given."""
    if weights is None:
        return values.mean(-1)
    return (values * weights.reshape(weights.shape[0], *([1] * (values.ndim - 2)), -1)).sum(-1)
