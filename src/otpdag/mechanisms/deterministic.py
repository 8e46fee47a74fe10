"""Nodes without noise: functions of their parents, and covariates that are conditioned on, never modelled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from otpdag.errors import ModelError, listed
from otpdag.mechanisms.base import Mechanism, Noise, Params, Parents
from otpdag.spaces import Real, Space


class OfAnySpace(Mechanism):
    """A node whose space the user says, without noise unless it has some of its own."""

    _space: Space

    @property
    def space(self) -> Space:
        """What the user said."""
        return self._space

    @property
    def noise(self) -> Noise:
        """None."""
        return Noise(0, "normal")


class Deterministic(OfAnySpace):
    r"""A known function of the parents: a sum of scores, a ratio, a transform of a hidden node.

    .. math:: x = f(\mathrm{pa})

    There is nothing to learn, no noise and no density.

    Args:
        function: Takes the parents' values by name, tensors ``(R, ..., width)``, and returns ``(R, ..., width)``.
        space: The values that it produces.

    >>> import torch
    >>> from otpdag.mechanisms import Family
    >>> total = Deterministic(lambda parents: parents["a"] + parents["b"])
    >>> total = total.setup(Family("total", (("a", Real()), ("b", Real()))))
    >>> values = {"a": torch.ones(1, 2, 1), "b": torch.ones(1, 2, 1)}
    >>> total.forward({}, values, torch.zeros(1, 2, 0)).flatten()
    tensor([2., 2.])
    """

    def __init__(self, function: Callable[[Mapping[str, Tensor]], Tensor], space: Space | None = None) -> None:
        if not callable(function):
            raise ModelError(f"`function` must be callable; got {function!r}")
        self.function = function
        self._space = Real(1) if space is None else space

    def on_setup(self) -> None:
        """Refuse a root."""
        if not self.family.parents:
            raise ModelError(f"node {self.family.node!r} is Deterministic and needs at least one parent")

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """The function of the parents."""
        value = self.function(parents)
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[-1] != self.space.width:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ModelError(
                f"node {self.family.node!r}: its function must return a tensor (R, ..., {self.space.width}); got {got}"
            )
        return value


class Given(OfAnySpace):
    """A covariate: its values come from the table, nothing is learned about their distribution.

    Use it for inputs of a regression, a treatment that was set by design, or the length of a document. Its
    cells must not be missing, and sampling the model needs values for it.

    Args:
        space: The values that it takes.

    >>> from otpdag.spaces import Discrete
    >>> Given(Discrete(3)).space
    Discrete(size=3)
    """

    is_given: ClassVar[bool] = True

    def __init__(self, space: Space | None = None) -> None:
        self._space = Real(1) if space is None else space

    def on_setup(self) -> None:
        """Refuse parents and a hidden place."""
        if self.family.parents or self.family.hidden:
            names = listed([name for name, _ in self.family.parents])
            reason = "is hidden" if self.family.hidden else f"has parents {names}"
            raise ModelError(
                f"node {self.family.node!r} is Given, so it must be an observed node without parents; it {reason}"
            )

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """Refuse: there is nothing to draw from."""
        raise ModelError(f"node {self.family.node!r} is Given: its values must be given, they cannot be drawn")

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Zero: the model is conditional on the covariate."""
        return torch.zeros_like(value[..., 0])
