"""Nodes that are a function of their parents, without noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from otpdag.errors import ModelError
from otpdag.mechanisms.base import Mechanism, Noise, Params, Parents
from otpdag.spaces import Real, Space

__all__ = ["Deterministic"]


class Deterministic(Mechanism):
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

    @property
    def space(self) -> Space:
        """What the function produces."""
        return self._space

    @property
    def noise(self) -> Noise:
        """None."""
        return Noise(0, "normal")

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """The function of the parents."""
        value = self.function(parents)
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[-1] != self.space.width:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ModelError(
                f"node {self.family.node!r}: its function must return a tensor (R, ..., {self.space.width}); got {got}"
            )
        return value
