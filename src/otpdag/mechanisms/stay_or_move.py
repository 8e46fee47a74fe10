"""A state that stays with one probability, or moves to any other."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.layers import expand_to, gumbel_softmax
from otpdag.mechanisms.base import Mechanism, Noise, Params, Parents
from otpdag.mechanisms.categorical import SMALLEST_PROBABILITY
from otpdag.mechanisms.parameters import UNIT, Axis, Parameter, Setting, as_setting
from otpdag.spaces import Discrete, Space

STAYS_BETWEEN = (0.01, 0.99)  # a start at zero or one could not be left


class StayOrMove(Mechanism):
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

    @property
    def space(self) -> Space:
        """Categories."""
        return Discrete(self.size)

    @property
    def noise(self) -> Noise:
        """One uniform number, cut by the cumulative probabilities."""
        return Noise(1, "uniform")

    @property
    def relaxed_noise(self) -> Noise:
        """One uniform number for each category, turned into Gumbel noise."""
        return Noise(self.size, "uniform")

    def parameters(self) -> dict[str, Parameter]:
        """The probability of no change."""
        return {"stay": Parameter((1,), UNIT, self.stay)}

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """The weighted share of rows without a change, kept away from zero and one."""
        kept = (value * self._parent(parents)).sum(-1)
        share = ((weight * kept).sum() + 0.5) / (weight.sum() + 1.0)
        return {"stay": share.clamp(*STAYS_BETWEEN).reshape(1)}

    @property
    def has_maximiser(self) -> bool:
        """Unless the probability is given."""
        return self.stay is None

    def maximised(self, params: Params, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """The weighted share of rows without a change."""
        kept = (weight * (value * self._parent(parents)).sum(-1)).sum(-1, keepdim=True)
        total = weight.sum(-1, keepdim=True)
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

    def probs(self, params: Params, parents: Parents) -> Tensor:
        """Probabilities of all categories: (R, ..., size)."""
        parent = self._parent(parents)
        stay = expand_to(params["stay"], parent.ndim)
        return parent * stay + (1 - parent) * (1 - stay) / (self.size - 1)

    def log_probs(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """Their logarithms; the one parent has all the axes that there are."""
        return torch.log(self.probs(params, parents).clamp(min=SMALLEST_PROBABILITY))

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """The category whose stretch of the cumulative probabilities holds ``u``."""
        index = (noise > self.probs(params, parents).cumsum(-1)[..., :-1]).sum(-1)
        return torch.nn.functional.one_hot(index, self.size).to(noise.dtype)

    def relaxed(self, params: Params, parents: Parents, noise: Tensor, temperature: float) -> Tensor:
        """A Gumbel-softmax draw."""
        return gumbel_softmax(self.log_probs(params, parents), noise, temperature)

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Log-probability of the category."""
        log_prob = (value * self.log_probs(params, parents)).sum(-1)
        return log_prob if mask is None else torch.where(mask[..., 0], log_prob, 0.0)

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """A point of the stretch of the cumulative probabilities that belongs to the category."""
        probs = self.probs(params, parents)
        upper = (probs.cumsum(-1) * value).sum(-1, keepdim=True)
        return upper - (probs * value).sum(-1, keepdim=True) * (1 - uniform)

    def mean(self, params: Params, parents: Parents) -> Tensor:
        """The probabilities."""
        return self.probs(params, parents)

    def describe(self, params: Params) -> dict[str, Tensor]:
        """One number."""
        return {"stay": params["stay"][:, 0]}
