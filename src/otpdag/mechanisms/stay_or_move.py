"""A state that stays with one probability, or moves to any other."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.mechanisms.base import Params, Parents
from otpdag.mechanisms.categorical import SMALLEST_PROBABILITY, Category
from otpdag.mechanisms.parameters import UNIT, Axis, Parameter, Setting, as_setting
from otpdag.numerics import expand_to


class StayOrMove(Category):
    r"""A category that keeps its parent's value with one probability and else takes any other, all alike.

    .. math:: P(z = k \mid j) = \mathrm{stay} \text{ if } k = j, \text{ else } (1 - \mathrm{stay}) / (K - 1)

    The transition of the paper's Poisson hidden Markov model (Section 5.2), with the lagged node itself as its one
    parent.

    Args:
        size: Number of categories K.
        stay: Probability of no change; a number fixes it, ``otp.start(v)`` starts it.

    >>> StayOrMove(4).space
    Discrete(size=4)
    """

    def __init__(self, size: int = 2, *, stay: ArrayLike | Setting = None) -> None:
        if size < 2:
            raise ModelError(f"size must be at least 2; got {size}")
        self.size = size
        self.stay = as_setting(stay)

    def on_setup(self) -> None:
        """Ask for exactly one parent with the same categories."""
        if [space.width for _, space in self.family.discrete] != [self.size] or self.family.continuous:
            raise ModelError(
                f"node {self.family.node!r}: StayOrMove needs exactly one parent, a category of size {self.size} such "
                f"as the node itself one step ago; got {[name for name, _ in self.family.parents]}"
            )

    def parameters(self) -> dict[str, Parameter]:
        """The probability of no change."""
        return {"stay": Parameter((1,), UNIT, self.stay)}

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """The weighted share of rows without a change, kept away from zero and one, which could not be left."""
        kept = (weight * (value * self._parent(parents)).sum(-1)).sum()
        return {"stay": ((kept + 0.5) / (weight.sum() + 1.0)).clamp(0.01, 0.99).reshape(1)}

    @property
    def has_closed_form(self) -> bool:
        """Unless the probability is given."""
        return self.stay is None

    def features(self, value: Tensor, mask: Tensor) -> Tensor:
        """The category."""
        return value * mask

    def coefficients(self, params: Params) -> Tensor:
        """Logarithms of the probabilities from every state to every other."""
        every = torch.eye(self.size).to(params["stay"]).unsqueeze(0)
        return self.log_probs(params, {self.family.discrete[0][0]: every})

    def fitted(self, params: Params, sums: Tensor) -> dict[str, Tensor]:
        """The weighted share of rows without a change."""
        if not self.declared()["stay"].learned:
            return dict(params)
        kept, total = sums.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True), sums.sum((-2, -1)).unsqueeze(-1)
        return {"stay": torch.where(total > 0, kept / total.clamp(min=1e-300), params["stay"])}

    def axes(self) -> dict[str, tuple[Axis, ...]]:
        """One number, which no label has a share in."""
        return {"stay": (Axis(),)}

    def relabelled(self, params: Params, nodes: Collection[str], order: Sequence[int]) -> dict[str, Tensor] | None:
        """Nothing changes as long as node and parent have the same labels."""
        both = {self.family.node, *(name for name, _ in self.family.parents)}
        return dict(params) if set(nodes) == both else None

    def _parent(self, parents: Parents) -> Tensor:
        return parents[self.family.discrete[0][0]]

    def log_probs(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """Those of all categories: (R, ..., size); the one parent has all the axes that there are."""
        parent = self._parent(parents)
        stay = expand_to(params["stay"], parent.ndim)
        return torch.log((parent * stay + (1 - parent) * (1 - stay) / (self.size - 1)).clamp(min=SMALLEST_PROBABILITY))

    def describe(self, params: Params) -> dict[str, Tensor]:
        """One number."""
        return {"stay": params["stay"][:, 0]}
