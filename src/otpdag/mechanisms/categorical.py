"""Nodes that are categories: with a table or a logit, of two values, or one that stays or moves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.layers import gumbel_softmax
from otpdag.mechanisms.base import Mechanism, Noise, Params, Parents, axis_count, configurations
from otpdag.mechanisms.generalised_linear import softmax
from otpdag.mechanisms.parameters import SIMPLEX, UNIT, Axis, Parameter, SettingLike
from otpdag.mechanisms.predictor import Predicted
from otpdag.numerics import apply_linear, expand_to
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


@dataclass(eq=False, repr=False, kw_only=True)
class Shares(Predicted):
    """Probabilities of categories: a table, or a logit where a parent is numeric or there is a network."""

    probs: SettingLike = None
    logits: SettingLike = None

    dim: int = field(default=1, init=False)
    form: str = field(init=False)
    """The name of the parameter that there is with these parents."""
    predicts: ClassVar[str] = "logits"
    forms: ClassVar[tuple[str, ...]] = ("probs", "logits")

    @property
    def is_table(self) -> bool:
        """Whether there is a table over discrete parents."""
        return self.form == "probs"

    def on_setup(self) -> None:
        """Choose between a table and a logit."""
        super().on_setup()
        self.form = "probs" if self.has_only_tables else "logits"
        self.check_form()

    def check_form(self) -> None:
        """Refuse what is given of another form."""
        for name in self.forms:
            if name != self.form and getattr(self, name) is not None:
                raise ModelError(
                    f"node {self.family.node!r}: {name!r} cannot be given; with these parents the parameter is "
                    f"{self.form!r}"
                )

    def parameters(self) -> dict[str, Parameter]:
        """A table of probabilities, or the logit's intercepts and slopes."""
        if self.form == "logits":
            return super().parameters()
        rows = self.predictor.rows if self.is_table else self.predictor.inputs
        return {self.form: Parameter((rows, self.dim), SIMPLEX, getattr(self, self.form))}

    def axes(self) -> dict[str, tuple[Axis, ...]]:
        """Probabilities by configuration or by the parent's coordinates, or those of the logit."""
        if self.form == "logits":
            return super().axes()
        rows = self.predictor.row_axis if self.is_table else Axis.of_coordinates(self.predictor.family.continuous)
        return {self.form: (rows, self.own_axis)}

    def on_scale(self, value: Tensor, parents: Parents, weight: Tensor) -> None:
        """Adopt the units of the numeric parents; logits are of order one already."""
        if self.form == "logits":
            self.predictor = self.predictor.with_units(None, parents, weight)

    def log_shares(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """Log-probabilities of all categories: (R, ..., size).

        A soft configuration of the parents averages them, which is what an expectation over it needs.
        """
        if not self.is_table:
            return torch.log_softmax(self.predictor(params, parents, like), -1)
        return self.row_of(log_table(params["probs"]), parents, axis_count(parents, like))

    def picked(self, by_row: Tensor, parents: Parents) -> Tensor:
        """The entry (R, ...) of the parents' configuration, of one for each (R, ..., C)."""
        config = configurations(self.family, parents)
        return by_row[..., 0] if config is None else (by_row * config).sum(-1)

    def describe(self, params: Params) -> dict[str, Tensor]:
        """Tables with one leading axis for each discrete parent; logits and slopes relative to the first category."""
        shown = dict(params)
        if self.form == "logits":
            shown |= {name: shown[name] - shown[name][..., :1] for name in ("logits", "weight") if name in shown}
        tables = ("probs", "logits")
        return {n: self.predictor.by_configuration(value) if n in tables else value for n, value in shown.items()}


def log_table(probs: Tensor) -> Tensor:
    """Logarithms of probabilities; those of impossible categories are finite."""
    return torch.log(probs.clamp(min=SMALLEST_PROBABILITY))


@dataclass(eq=False, repr=False, kw_only=True)
class Categorical(Category, Shares):
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

    size: int = field(default=2, kw_only=False)

    def __post_init__(self) -> None:
        """Refuse no categories."""
        if self.size < 1:
            raise ModelError(f"size must be at least 1; got {self.size}")
        self.dim = self.size
        super().__post_init__()

    def slopes(self, params: Params, parent: str) -> Tensor | None:
        """From the first to the last category: of a logit, only differences between categories have a meaning."""
        slopes = self.predictor.slopes_of(params, parent)
        return None if slopes is None else slopes[..., -1] - slopes[..., 0]

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
        return log_table(params["probs"])

    def fitted(self, params: Params, sums: Tensor, prior: float = 0.1) -> dict[str, Tensor]:
        """Weighted frequencies, slowed by ``prior`` rows' worth of the present ones.

        A configuration of the parents that hardly occurs keeps its probabilities; where updates come to rest they are
        the frequencies themselves, whatever the brake.
        """
        if not self.declared()["probs"].learned:
            return dict(params)
        counts = sums + prior * params["probs"]
        return {"probs": counts / counts.sum(-1, keepdim=True)}

    def log_probs(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """Those of all categories: (R, ..., size)."""
        return self.log_shares(params, parents, like)

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Log-probability of the category."""
        if not self.is_table or len(self.family.discrete) > 1 or value.ndim < 3:
            return super().log_prob(params, value, parents, mask)
        # one matrix product: log-table times one-hot value, then the configuration's row
        log_prob = self.picked(apply_linear(value, self.coefficients(params).mT), parents)
        return log_prob if mask is None else torch.where(mask[..., 0], log_prob, 0.0)


@dataclass(eq=False, repr=False, kw_only=True)
class Bernoulli(Categorical):
    """A node that is 0 or 1: a categorical with two categories.

    >>> Bernoulli().space
    Discrete(size=2)
    """

    size: int = field(default=2, init=False)


@dataclass(eq=False, repr=False, kw_only=True)
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

    size: int = field(default=2, kw_only=False)
    stay: SettingLike = None

    def __post_init__(self) -> None:
        """Refuse a category that cannot move."""
        if self.size < 2:
            raise ModelError(f"size must be at least 2; got {self.size}")

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
