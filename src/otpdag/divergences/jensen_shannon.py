"""Jensen-Shannon divergence, told by a discriminator."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from otpdag.divergences.base import AbstractDivergence
from otpdag.errors import ModelError
from otpdag.layers import apply_mlp, init_mlp

LOG_2 = math.log(2)


@dataclass(frozen=True)
class JensenShannon(AbstractDivergence):
    r"""Jensen-Shannon divergence in nats, bounded from below by a discriminator.

    .. math:: D(P, Q) \ge \log 2 + \tfrac12 E_P \log \sigma(T(X)) + \tfrac12 E_Q \log \sigma(-T(Y))

    (Goodfellow et al. 2014, https://arxiv.org/abs/1406.2661). Every call trains a discriminator :math:`T` of its own on
    the two samples (detached), always from the same start, and returns the bound, differentiable in samples and weights
    with :math:`T` held fixed. So the value depends on its arguments alone, as that of every other divergence does: a
    fit can be repeated, resumed, and have several starts. The bound is tight only if :math:`T` is trained for long
    enough, and never exceeds log 2.

    Args:
        hidden: Widths of the hidden layers.
        steps: Training steps of a call; many on few rows learn the rows by heart, and the bound no longer holds.
        learning_rate: Step size of Adam.
        seed: Seed of the discriminator's first parameters.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> x = torch.randn(1, 256, 2, generator=generator)
        >>> bool(JensenShannon()(x, x + 10.0) > 0.6)
        True
    """

    hidden: tuple[int, ...] = (64, 64)
    steps: int = 20
    learning_rate: float = 5e-3
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        if self.steps < 0:
            raise ModelError(f"`steps` must not be negative; got {self.steps}")
        if not self.learning_rate > 0:
            raise ModelError(f"`learning_rate` must be positive; got {self.learning_rate}")
        if not all(width > 0 for width in self.hidden):
            raise ModelError(f"`hidden` must hold positive widths; got {self.hidden}")

    def forward(self, x: Tensor, y: Tensor, a: Tensor, b: Tensor, generator: torch.Generator | None) -> Tensor:
        """Train a discriminator and return the bound of checked samples."""
        return _bound(self.discriminator(x, y, a, b), x, y, a, b)

    def discriminator(self, x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        """Parameters of one that was trained on samples, of each replica (R, ...), detached.

        All replicas start alike, so that a replica's result does not depend on its company.

        Args:
            x: A sample, (R, N, d).
            y: A sample, (R, M, d).
            a: Weights of ``x`` that sum to 1, (R, N).
            b: Weights of ``y`` that sum to 1, (R, M).
        """
        x, y, a, b = (value.detach() for value in (x, y, a, b))
        replicas = max(value.shape[0] for value in (x, y, a, b))
        params = self._begun(x, replicas)
        optimiser = torch.optim.Adam(params.values(), lr=self.learning_rate, betas=(0.5, 0.99))
        for _ in range(self.steps):
            with torch.enable_grad():
                loss = -_bound(params, x, y, a, b).sum()
            gradients = torch.autograd.grad(loss, list(params.values()))
            for value, gradient in zip(params.values(), gradients, strict=True):
                value.grad = gradient
            optimiser.step()
        return {name: value.detach() for name, value in params.items()}

    def _begun(self, sample: Tensor, replicas: int) -> dict[str, Tensor]:
        """One network, drawn from the seed, that starts at T = 0, copied for every replica."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes = [sample.shape[-1], *self.hidden, 1]
        params = init_mlp(sizes, replicas=1, generator=generator, dtype=sample.dtype)
        params[f"{len(self.hidden)}.weight"].zero_()
        return {
            name: value.expand(replicas, *value.shape[1:]).to(sample.device, copy=True).requires_grad_()
            for name, value in params.items()
        }


def _bound(params: dict[str, Tensor], x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Evaluate the bound of each replica, (R,)."""
    centre, scale = _moments(*(value.detach() for value in (x, y, a, b)))
    replicas = next(iter(params.values())).shape[0]
    score_x, score_y = (
        apply_mlp(params, ((value - centre) / scale).expand(replicas, -1, -1)).squeeze(-1) for value in (x, y)
    )
    return LOG_2 + 0.5 * ((a * logsigmoid(score_x)).sum(-1) + (b * logsigmoid(-score_y)).sum(-1))


def _moments(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the mixture of both samples, (R, 1, d)."""
    a, b = a.unsqueeze(-2), b.unsqueeze(-2)
    mean = 0.5 * (a @ x + b @ y)
    scale = (0.5 * (a @ (x - mean).square() + b @ (y - mean).square())).sqrt()
    return mean, torch.where(scale > 0, scale, 1.0)
