"""Nodes that are conditioned on, never modelled."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.mechanisms.base import Mechanism, Noise, Params, Parents
from otpdag.spaces import Real, Space

__all__ = ["Given"]


class Given(Mechanism):
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
            reason = "is hidden" if self.family.hidden else "has parents"
            raise ModelError(
                f"node {self.family.node!r} is Given, so it must be an observed node without parents; it {reason}"
            )

    @property
    def space(self) -> Space:
        """The values of the covariate."""
        return self._space

    @property
    def noise(self) -> Noise:
        """None."""
        return Noise(0, "normal")

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """Refuse: there is nothing to draw from."""
        raise ModelError(f"node {self.family.node!r} is Given: its values must be given, they cannot be drawn")

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Zero: the model is conditional on the covariate."""
        return torch.zeros_like(value[..., 0])
