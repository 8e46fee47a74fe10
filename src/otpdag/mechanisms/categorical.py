"""Categorical and Bernoulli nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.layers import gumbel_softmax
from otpdag.mechanisms.base import Mechanism, Noise, Params, Parents, axis_count, configurations
from otpdag.mechanisms.parameters import SIMPLEX, Axis, Fixed, Parameter, Setting, as_setting
from otpdag.mechanisms.predictor import Predicted, Predictor
from otpdag.mechanisms.regression import softmax
from otpdag.numerics import apply_linear
from otpdag.spaces import Discrete, Space

SMALLEST_PROBABILITY = 1e-12  # what an impossible category counts as, so that its logarithm is finite


class Category(Mechanism):
    """Shared parts of nodes that are categories, with the log-probabilities of all of them."""

    size: int

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

    def probabilities(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """Those of all categories: (R, ..., size)."""
        return torch.softmax(self.log_probs(params, parents, like), -1)

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """The category whose stretch of the cumulative probabilities holds ``u``."""
        index = (noise > self.probabilities(params, parents, noise).cumsum(-1)[..., :-1]).sum(-1)
        return torch.nn.functional.one_hot(index, self.size).to(noise.dtype)

    def relaxed(self, params: Params, parents: Parents, noise: Tensor, temperature: float) -> Tensor:
        """A Gumbel-softmax draw."""
        return gumbel_softmax(self.log_probs(params, parents, noise), noise, temperature)

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Log-probability of the category."""
        log_prob = (value * self.log_probs(params, parents, value)).sum(-1)
        return log_prob if mask is None else torch.where(mask[..., 0], log_prob, 0.0)

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """A point of the stretch of the cumulative probabilities that belongs to the category."""
        probs = self.probabilities(params, parents, value)
        upper = (probs.cumsum(-1) * value).sum(-1, keepdim=True)
        return upper - (probs * value).sum(-1, keepdim=True) * (1 - uniform)

    def mean(self, params: Params, parents: Parents) -> Tensor:
        """The probabilities."""
        return self.probabilities(params, parents)


class Categorical(Category, Predicted):
    r"""A category: a probability table over discrete parents, a multinomial logit when a parent is numeric.

    .. math:: P(x = k \mid \mathrm{pa}) = \mathrm{probs}[\mathrm{pa}]_k \quad\text{or}\quad
              \mathrm{softmax}(\mathrm{logits}[\mathrm{pa}] + W^\top \mathrm{pa})_k

    Args:
        size: Number of categories.
        probs: Probability table, one leading axis for each discrete parent; only without numeric parents.
        logits: Intercepts of the logit; only with numeric parents or a network.
        weight: Slopes of the logit.
        network: Sizes of hidden layers of a network of the parents.

    >>> Categorical(3).space
    Discrete(size=3)
    """

    def __init__(
        self,
        size: int = 2,
        *,
        probs: ArrayLike | Setting = None,
        logits: ArrayLike | Setting = None,
        weight: ArrayLike | Setting = None,
        network: Sequence[int] = (),
    ) -> None:
        if size < 1:
            raise ModelError(f"size must be at least 1; got {size}")
        self.size = size
        self.probs, self.logits, self.weight = as_setting(probs), as_setting(logits), as_setting(weight)
        self.network = tuple(network)

    def on_setup(self) -> None:
        """Choose between a table and a logit."""
        self.is_table = not self.family.continuous and not self.network
        rejected = "logits" if self.is_table else "probs"
        if getattr(self, rejected) is not None:
            kind = "a table over discrete parents" if self.is_table else "numeric parents or a network"
            raise ModelError(f"node {self.family.node!r}: {rejected!r} cannot be given with {kind}")
        self.predictor = Predictor(self.family, self.size, "logits", self.logits, self.weight, self.network)

    def parameters(self) -> dict[str, Parameter]:
        """A probability table, or the logit's intercepts and slopes."""
        if self.is_table:
            return {"probs": Parameter((self.predictor.rows, self.size), SIMPLEX, self.probs)}
        return super().parameters()

    def axes(self) -> dict[str, tuple[Axis, ...]]:
        """Probabilities by configuration and category, or those of the logit."""
        return {"probs": self.table_axes(self.predictor.rows)} if self.is_table else super().axes()

    def slopes(self, params: Params, parent: str) -> Tensor | None:
        """From the first to the last category: of a logit, only differences between categories have a meaning."""
        slopes = self.predictor.slopes_of(params, parent)
        return None if slopes is None else slopes[..., -1] - slopes[..., 0]

    def on_scale(self, value: Tensor, parents: Parents, weight: Tensor) -> None:
        """Adopt the units of the numeric parents; logits are of order one already."""
        if not self.is_table:
            self.predictor = self.predictor.with_units(None, parents, weight)

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """Weighted frequencies, smoothed by one row's worth of the overall ones; or a logistic regression."""
        if not self.is_table:
            return self.predictor.start(value, parents, weight, softmax)
        overall = (weight.unsqueeze(-1) * value).sum(0) + 1.0
        counts = self.weights_by_row(self.predictor.rows, parents, weight).T @ value
        return self.fitted({"probs": (overall / overall.sum()).expand_as(counts)}, counts, prior=1.0)

    @property
    def has_closed_form(self) -> bool:
        """A table of probabilities that is all to be learned."""
        return self.is_table and self.probs is None

    def features(self, value: Tensor, mask: Tensor) -> Tensor | None:
        """The category."""
        return value * mask if self.is_table else None

    def coefficients(self, params: Params) -> Tensor:
        """Logarithms of the probabilities."""
        return torch.log(params["probs"].clamp(min=SMALLEST_PROBABILITY))

    def fitted(self, params: Params, sums: Tensor, prior: float = 0.1) -> dict[str, Tensor]:
        """Weighted frequencies, slowed by ``prior`` rows' worth of the present ones.

        A configuration of the parents that hardly occurs keeps its probabilities; where updates come to rest they are
        the frequencies themselves, whatever the brake.
        """
        if isinstance(self.probs, Fixed):
            return dict(params)
        counts = sums + prior * params["probs"]
        return {"probs": counts / counts.sum(-1, keepdim=True)}

    def log_probs(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """Log-probabilities of all categories: (R, ..., size).

        A soft configuration of the parents averages them, which is what an expectation over it needs.
        """
        if not self.is_table:
            return torch.log_softmax(self.predictor(params, parents, like), -1)
        return self.row_of(self.coefficients(params), parents, axis_count(parents, like))

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Log-probability of the category."""
        if not self.is_table or len(self.family.discrete) > 1 or value.ndim < 3:
            return super().log_prob(params, value, parents, mask)
        # one matrix product: log-table times one-hot value, then the configuration's row
        by_row, config = apply_linear(value, self.coefficients(params).mT), configurations(self.family, parents)
        log_prob = by_row[..., 0] if config is None else (by_row * config).sum(-1)
        return log_prob if mask is None else torch.where(mask[..., 0], log_prob, 0.0)

    def describe(self, params: Params) -> dict[str, Tensor]:
        """``probs`` with one leading axis for each discrete parent; logits relative to the first category."""
        if not self.is_table:
            return self.relative_logits(params)
        return {"probs": self.predictor.by_configuration(params["probs"])}


class Bernoulli(Categorical):
    """A node that is 0 or 1: a categorical with two categories.

    >>> Bernoulli().space
    Discrete(size=2)
    """

    def __init__(
        self,
        *,
        probs: ArrayLike | Setting = None,
        logits: ArrayLike | Setting = None,
        weight: ArrayLike | Setting = None,
        network: Sequence[int] = (),
    ) -> None:
        super().__init__(2, probs=probs, logits=logits, weight=weight, network=network)
