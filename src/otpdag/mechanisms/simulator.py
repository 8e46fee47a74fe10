"""Nodes that a user's function simulates: no density is known, none is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from otpdag.errors import ModelError, check_count
from otpdag.mechanisms.base import Noise, Params, Parents
from otpdag.mechanisms.deterministic import OfAnySpace
from otpdag.mechanisms.parameters import REAL, Between, Parameter, Setting, SettingLike, Start, Support, as_setting
from otpdag.spaces import Real, Space

Bounds = Mapping[str, tuple[float | None, float | None]]


class Simulator(OfAnySpace):
    r"""A user's function of parents, noise and named parameters, whose density nobody needs to know.

    .. math:: x = f_\theta(\mathrm{pa}, u), \quad u \sim N(0, I) \text{ or } U(0, 1)^d

    It is fitted by optimal transport between rows and simulated points: ``method="auto"`` chooses that. The cost is
    differentiated through the function where that tells how it changes, and by finite differences with the noise held
    fixed where it does not: where values jump, or do not come from torch.

    The function sees many rows at once, ``function(parents, noise, **parameters)``: parents by name ``(..., width)``,
    noise ``(..., dim)`` and every parameter with axes that broadcast to these, ``(..., 1)`` for a number and
    ``(..., *shape)`` for an array. It returns ``(..., width)``, each row from its own, and draws nothing itself: the
    same noise must give the same value.

    Args:
        function: The simulator.
        parameters: By name: ``otp.start(value)`` learns one from there, a plain value fixes it, ``otp.tie(name)``
            shares it, None learns it from the best of many places between its bounds.
        space: The values that it produces.
        noise: How many standard normal numbers a row takes.
        uniform: Whether they are uniform between zero and one instead.
        bounds: By name: lowest and highest value, either of which may be None.
        path: Whether the numbers of a row are steps of a path, which is compared by windows of neighbouring steps, all
            of them together: then one long row is many observations. Otherwise rows are compared as a whole.

    >>> import otpdag as otp
    >>> def g_and_k(parents, noise, a, b, g, k):
    ...     return a + b * (1 + 0.8 * torch.tanh(0.5 * g * noise)) * (1 + noise**2) ** k * noise
    >>> node = Simulator(
    ...     g_and_k,
    ...     {"a": otp.start(0.0), "b": otp.start(1.0), "g": 2.0, "k": None},
    ...     bounds={"b": (0, None), "k": (0, 1)},
    ... )
    >>> from otpdag.mechanisms import Family
    >>> {name: parameter.support.name for name, parameter in node.setup(Family("x")).declared().items()}
    {'a': 'a finite number', 'b': 'a number above 0', 'g': 'a finite number', 'k': 'a number above 0 and below 1'}
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        parameters: Mapping[str, SettingLike] | None = None,
        space: Space | None = None,
        *,
        noise: int = 1,
        uniform: bool = False,
        bounds: Bounds | None = None,
        path: bool = False,
    ) -> None:
        if not callable(function):
            raise ModelError(f"`function` must be callable; got {function!r}")
        self.function, self.path = function, path
        self._space = Real(1) if space is None else space
        self._noise = Noise(check_count("noise", noise, least=0), "uniform" if uniform else "normal")
        self.settings = {name: as_setting(value) for name, value in (parameters or {}).items()}
        self.supports = {name: _support(name, *(bounds or {}).get(name, (None, None))) for name in self.settings}
        unknown = sorted(set(bounds or {}) - set(self.settings))
        if unknown:
            raise ModelError(f"`bounds` name {unknown[0]!r}, which is none of the parameters {list(self.settings)}")
        for name, setting in self.settings.items():
            own = self.supports[name]
            if setting is None and not (isinstance(own, Between) and bool((own.high - own.low).isfinite())):
                raise ModelError(f"parameter {name!r} needs a place to start: otp.start(value), or two bounds")

    @property
    def noise(self) -> Noise:
        """What the user said."""
        return self._noise

    def parameters(self) -> dict[str, Parameter]:
        """As the user named them, each in the unit of its starting value."""
        return {name: _parameter(self.supports[name], setting) for name, setting in self.settings.items()}

    def initial_raw(self, replicas: int, generator: torch.Generator, *, first: bool = True) -> dict[str, Tensor]:
        """Of parameters without a starting value: the first in the middle of their bounds, the others anywhere."""
        raw = {}
        for name in (name for name, setting in self.settings.items() if setting is None):
            share = torch.rand(replicas, generator=generator, dtype=torch.float64).clamp(0.01, 0.99)
            raw[name] = torch.logit(share)
            raw[name][: int(first)] = 0.0
        return raw

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """The function, on the rows of all replicas at once."""
        before = np.broadcast_shapes(*(one.shape[:-1] for one in (*parents.values(), noise)))
        own = {
            name: value.reshape(len(value), *(1,) * (len(before) - 1), *(value.shape[1:] or (1,)))
            for name, value in params.items()
        }
        try:
            value = torch.as_tensor(self.function(parents, noise, **own))
        except Exception as error:
            sizes = {name: tuple(one.shape) for name, one in {**parents, "noise": noise, **own}.items()}
            error.add_note(f"this was the function of node {self.family.node!r}, called with tensors of sizes {sizes}")
            raise
        width, leading = self.space.width, value.shape[:-1]
        if (
            value.ndim != len(before) + 1
            or value.shape[-1] != width
            or any(size not in (1, wanted) for size, wanted in zip(leading[1:], before[1:], strict=True))
        ):
            raise ModelError(
                f"node {self.family.node!r}: its function must return (..., {before[-1]}, {width}), a row for each "
                f"row of noise {tuple(noise.shape)}; got {tuple(value.shape)}"
            )
        return value.to(noise)


def _support(name: str, low: float | None, high: float | None) -> Support:
    if low is not None and high is not None and not low < high:
        raise ModelError(f"bounds of {name!r} must be in order; got {low} and {high}")
    return REAL if low is None and high is None else Between(low, high)


def _parameter(support: Support, setting: Setting) -> Parameter:
    """A number on the real line is moved in units of where it starts."""
    value = np.asarray(getattr(setting, "value", 0.0), dtype=float)
    unit = torch.as_tensor(np.maximum(np.abs(value), 1.0)) if isinstance(setting, Start) and support is REAL else None
    return Parameter(value.shape, support, setting, unit=unit)
