r"""Distribution functions and quantiles with gradients in their shape parameters.

SciPy evaluates both; the gradients come from implicit differentiation of :math:`F(x; \theta) = u`,

.. math:: \frac{\partial x}{\partial u} = \frac{1}{f(x; \theta)}, \qquad
          \frac{\partial x}{\partial \theta} = -\frac{\partial F(x; \theta) / \partial \theta}{f(x; \theta)},

with central differences for :math:`\partial F / \partial \theta` (Figurnov et al. 2018, "Implicit
reparameterization gradients"). In the upper half the survival function is differentiated instead, which keeps
its digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy as sp
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Array = Any  # what SciPy's special functions return: an array of doubles, in many types


@dataclass(frozen=True)
class _Law:
    """A continuous distribution: functions in NumPy take the point first, then the shape parameters.

    >>> STUDENT.quantile(torch.tensor([0.975]).double(), torch.tensor([5.0]).double())
    tensor([2.5706], dtype=torch.float64)
    """

    below: Callable[..., Array]
    above: Callable[..., Array]
    point: Callable[..., Array]
    log_density: Callable[..., Array]

    def quantile(self, u: Tensor, *shapes: Tensor) -> Tensor:
        """The point at a level."""
        return _Transform.apply(self, True, *torch.broadcast_tensors(inside_unit(u), *shapes))

    def cdf(self, x: Tensor, *shapes: Tensor) -> Tensor:
        """The distribution function at a point."""
        return _Transform.apply(self, False, *torch.broadcast_tensors(x, *shapes))

    def slope(self, index: int, x: Array, shapes: tuple[Array, ...], level: Array, step: float = 6e-6) -> Array:
        """Derivative in one shape parameter of the distribution function, which is ``level`` at ``x``.

        By a central difference, whose relative ``step`` is about the cube root of the precision of a double.
        """
        slopes = np.empty_like(x)
        lower = level < 0.5
        for part, function, sign in ((lower, self.below, 1), (~lower, self.above, -1)):
            low = [shape[part] for shape in shapes]
            high = list(low)
            low[index], high[index] = low[index] * (1 - step), low[index] * (1 + step)
            rise = function(x[part], *high) - function(x[part], *low)
            slopes[part] = sign * rise / (high[index] - low[index])
        return slopes


def student_log_density(squared: Tensor, df: Tensor) -> Tensor:
    """Log-density of Student's t at points with these squares."""
    half = 0.5 * (df + 1)
    constant = torch.lgamma(half) - torch.lgamma(0.5 * df) - 0.5 * torch.log(torch.pi * df)
    return constant - half * torch.log1p(squared / df)


def _student_quantile(level: Array, df: Array, far_out: float = 1e-100) -> Array:
    """SciPy's; far out on the left, where that turns to plus infinity, by the incomplete beta function.

    SciPy 1.17 loses the quantiles with five degrees of freedom from a level of 1e-280 on.
    """
    far = level < far_out
    share = sp.special.betaincinv(0.5 * df, 0.5, 2 * np.where(far, level, far_out))
    return np.where(far, -np.sqrt(df * (1 - share) / share), sp.special.stdtrit(df, level))


GAMMA = _Law(
    below=lambda x, a: sp.special.gammainc(a, x),
    above=lambda x, a: sp.special.gammaincc(a, x),
    point=lambda u, a: sp.special.gammaincinv(a, u),
    log_density=lambda x, a: sp.special.xlogy(a - 1, x) - x - sp.special.gammaln(a),
)
BETA = _Law(
    below=lambda x, a, b: sp.special.betainc(a, b, x),
    above=lambda x, a, b: sp.special.betainc(b, a, 1 - x),  # far faster than betaincc
    point=lambda u, a, b: sp.special.betaincinv(a, b, u),
    log_density=lambda x, a, b: sp.special.xlogy(a - 1, x) + sp.special.xlog1py(b - 1, -x) - sp.special.betaln(a, b),
)
STUDENT = _Law(
    below=lambda x, df: sp.special.stdtr(df, x),
    above=lambda x, df: sp.special.stdtr(df, -x),
    point=_student_quantile,
    log_density=lambda x, df: student_log_density(torch.from_numpy(x * x), torch.from_numpy(df)).numpy(),
)


def _array(tensor: Tensor) -> Array:
    return tensor.detach().cpu().double().numpy()


class _Transform(torch.autograd.Function):
    """The distribution function at a point, or with ``inverse`` the point at a level."""

    @staticmethod
    def forward(ctx: Any, law: _Law, inverse: bool, given: Tensor, *shapes: Tensor) -> Tensor:
        ctx.law, ctx.inverse = law, inverse
        ctx.found = (law.point if inverse else law.below)(*map(_array, (given, *shapes)))
        ctx.save_for_backward(given, *shapes)
        return torch.as_tensor(ctx.found).to(given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given, *shapes = map(_array, ctx.saved_tensors)
        point, level = (ctx.found, given) if ctx.inverse else (given, ctx.found)
        with np.errstate(all="ignore"):
            density = np.exp(ctx.law.log_density(point, *shapes))
            along, factor = (1 / density, -1 / density) if ctx.inverse else (density, 1.0)
            gradients = [_chain(grad, along) if ctx.needs_input_grad[2] else None]
            for index, needed in enumerate(ctx.needs_input_grad[3:]):
                slope = factor * ctx.law.slope(index, point, tuple(shapes), level) if needed else None
                gradients.append(None if slope is None else _chain(grad, slope))
        return None, None, *gradients


def _chain(grad: Tensor, slope: Array) -> Tensor:
    """Chain rule; a slope that is lost at the edge of the support (0/0) counts as zero."""
    slope = np.where(np.isfinite(slope), slope, 0.0)
    return grad * torch.as_tensor(slope).to(grad)


def inside_unit(u: Tensor) -> Tensor:
    """Keep uniform numbers strictly between zero and one, so that no quantile is infinite.

    >>> u = inside_unit(torch.tensor([0.0, 0.5, 1.0]))
    >>> bool((u > 0).all() and (u < 1).all())
    True
    """
    info = torch.finfo(u.dtype)
    return u.clamp(info.tiny, 1 - info.eps / 2)


def gamma_log_quantile(u: Tensor, shape: Tensor) -> Tensor:
    r"""Logarithm of a gamma quantile, also where the quantile itself underflows.

    For small :math:`x`, :math:`F(x) = x^a / \Gamma(a + 1)`.

    >>> gamma_log_quantile(torch.tensor([0.5]).double(), torch.tensor([1e-4]).double())
    tensor([-6932.0491], dtype=torch.float64)
    """
    smallest = torch.finfo(u.dtype).tiny * 1e6
    x = GAMMA.quantile(u, shape)
    series = (torch.log(inside_unit(u)) + torch.lgamma(shape + 1)) / shape
    return torch.where(x > smallest, torch.log(x.clamp(min=smallest)), series)


def poisson_quantile(u: Tensor, rate: Tensor) -> Tensor:
    """The smallest count whose distribution function reaches ``u`` (no gradient).

    A Cornish-Fisher guess is off by a step or two; counting from there is five to a hundred times faster than
    ``scipy.stats.poisson.ppf``. Beyond a rate of a million the guess itself is right to far less than a
    deviation.

    >>> poisson_quantile(torch.tensor([0.1, 0.5, 0.99]), torch.tensor(3.0))
    tensor([1., 3., 8.])
    """
    level, mean = (_array(tensor).ravel() for tensor in torch.broadcast_tensors(inside_unit(u), rate))
    normal = sp.special.ndtri(level)
    guess = np.floor(mean + np.sqrt(mean) * normal + (normal**2 - 1) / 6)
    count = np.maximum(guess, 0.0)
    exact = mean < 1e6
    reached = sp.special.pdtr(count, mean) >= level
    short = np.flatnonzero(exact & ~reached)
    while short.size:
        count[short] += 1
        short = short[sp.special.pdtr(count[short], mean[short]) < level[short]]
    beyond = np.flatnonzero(exact & reached & (count > 0))
    while beyond.size:
        beyond = beyond[sp.special.pdtr(count[beyond] - 1, mean[beyond]) >= level[beyond]]
        count[beyond] -= 1
        beyond = beyond[count[beyond] > 0]
    return torch.as_tensor(count).to(u).reshape(np.broadcast_shapes(u.shape, rate.shape))
