r"""Ordered categories: a number on a line, cut by thresholds.

.. math:: P(x \le k \mid \mathrm{pa}) = F(\tau_k - \eta(\mathrm{pa}))

with the logistic or the standard normal distribution function :math:`F` (McCullagh 1980). Thresholds hold the level, so
that predictions have none: intercepts of several configurations of discrete parents average zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from otpdag.errors import check_choice, check_count
from otpdag.mechanisms.base import Params, Parents
from otpdag.mechanisms.categorical import Category
from otpdag.mechanisms.generalised_linear import IDENTITY
from otpdag.mechanisms.parameters import INCREASING, Axis, Parameter, SettingLike
from otpdag.mechanisms.predictor import Predicted


@dataclass(frozen=True)
class Curve:
    """A distribution function on the line: its logarithm, its inverse, and its standard deviation."""

    log_cdf: Callable[[Tensor], Tensor]
    quantile: Callable[[Tensor], Tensor]
    spread: float

    def log_between(self, lower: Tensor, upper: Tensor) -> Tensor:
        """Logarithm of the mass between two points; in the upper tail it is taken from above, where digits are."""
        above = lower + upper > 0
        low, high = torch.where(above, -upper, lower), torch.where(above, -lower, upper)
        top = self.log_cdf(high)
        return top + torch.log(-torch.expm1((self.log_cdf(low) - top).clamp(max=-1e-15)))


CURVES = {
    "logit": Curve(logsigmoid, torch.logit, 1.8138),
    "probit": Curve(torch.special.log_ndtr, torch.special.ndtri, 1.0),
}


@dataclass(eq=False, repr=False, kw_only=True)
class Ordinal(Category, Predicted):
    r"""A category whose values have an order: a cumulative logit or probit.

    .. math:: P(x \le k \mid \mathrm{pa}) = F(\mathrm{thresholds}_k - \mathrm{shift}[\mathrm{pa}] - W^\top \mathrm{pa})

    A larger prediction makes later categories likelier, by the same on the line whichever they are. As a parent, an
    ordered category enters terms by ``scores(x)``, or as any other does.

    Args:
        size: Number of categories, at least two.
        link: ``"logit"`` or ``"probit"``.
        thresholds: Where the line is cut: one less than categories, increasing.
        shift: Intercepts by configuration of the discrete parents; left out, they average zero.
        weight: Slopes of the numeric parents.
        network: Sizes of hidden layers of a network of the parents.
        terms: A formula of the parents, such as ``"x + C(z)"``.

    >>> Ordinal(5).space
    Discrete(size=5)
    """

    size: int = field(default=2, kw_only=False)
    link: Literal["logit", "probit"] = "logit"
    thresholds: SettingLike = None
    shift: SettingLike = None

    dim: int = field(default=1, init=False)
    predicts: ClassVar[str] = "shift"
    is_level_free = True  # the thresholds take it up

    def __post_init__(self) -> None:
        """Refuse a single category, and other links."""
        super().__post_init__()
        check_count("size", self.size, 2)
        check_choice("link", self.link, tuple(CURVES))

    @property
    def curve(self) -> Curve:
        """The distribution function of the line."""
        return CURVES[self.link]

    def parameters(self) -> dict[str, Parameter]:
        """Thresholds, and what is predicted."""
        cuts = Parameter((self.size - 1,), INCREASING, self.thresholds)
        return {"thresholds": cuts, **self.predictor.parameters()}

    def axes(self) -> dict[str, tuple[Axis, ...]]:
        """Thresholds by the category below them, intercepts by configuration, slopes by parent."""
        below = Axis(features=tuple(((self.family.node, code),) for code in range(self.size - 1)))
        return {"thresholds": (below,), **self.predictor.axes(Axis())}

    def describe(self, params: Params) -> dict[str, Tensor]:
        """Without the level, where there is only one."""
        shown = super().describe(params)
        if self.predictor.rows == 1 and self.shift is None:
            shown.pop("shift")
        return shown

    def restore_units(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Turn thresholds at the parents' centre into those at zero."""
        params = super().restore_units(params)
        return {**params, "thresholds": params["thresholds"] + self._at_centre(params)}

    def remove_units(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Invert :meth:`restore_units`."""
        if "thresholds" in params:
            params = {**params, "thresholds": params["thresholds"] - self._at_centre(params)}
        return super().remove_units(params)

    def _at_centre(self, params: Params) -> Tensor | float:
        """What slopes predict at the centre of the parents (R, 1), where only thresholds hold the level."""
        units, declared = self.predictor.units, self.declared()
        elsewhere = declared["shift"].learned and not self.predictor.is_levelled
        if units is None or "weight" not in params or declared["thresholds"].setting is not None or elsewhere:
            return 0.0
        return units.in_shift.to(params["weight"]) @ params["weight"]

    def on_scale(self, value: Tensor, parents: Parents, weight: Tensor) -> None:
        """Adopt the units of the numeric parents."""
        predictor = self.predictor.with_units(None, parents, weight)
        line = self._places(value, weight)
        self.predictor = predictor.smoothed(line, parents, weight, IDENTITY)

    def _places(self, value: Tensor, weight: Tensor) -> Tensor:
        """Where the middle of each row's category lies on the line (N, 1), by how often categories occur."""
        return (value @ self.curve.quantile(self._shares(value, weight)[:2].mean(0))).unsqueeze(-1)

    def _shares(self, value: Tensor, weight: Tensor) -> Tensor:
        """Cumulative shares below and up to each category (2, size), all between zero and one."""
        counts = weight @ value + 0.5 / self.size
        upto = (counts.cumsum(0) / counts.sum()).clamp(max=1 - 1e-6)
        return torch.stack([torch.cat([torch.zeros_like(upto[:1]), upto[:-1]]), upto])

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """A regression of places on the line, in units of what it leaves; thresholds by how often categories occur."""
        line = self._places(value, weight)
        found = self.predictor.start(line, parents, weight)
        if self.predictor.is_levelled:
            found["shift"] = found["shift"] - found["shift"].mean(0)
        predicted = self.predictor.predict_rows(found, parents).expand_as(line)
        share = weight.unsqueeze(-1) / weight.sum()
        centre = (share * predicted).sum(0)
        left = (share * (line - predicted) ** 2).sum().sqrt().clamp(min=0.3 * self.curve.spread)
        stretch, wide = self.curve.spread / left, ((share * (predicted - centre) ** 2).sum() / left**2 + 1).sqrt()
        cuts = wide * self.curve.quantile(self._shares(value, weight)[1, :-1]) + stretch * centre
        return {name: stretch * one for name, one in found.items()} | {"thresholds": cuts}

    def log_probs(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """Those of all categories: (R, ..., size)."""
        line = self.predictor(params, parents, like)
        cuts = params["thresholds"].reshape(-1, *(1,) * (line.ndim - 2), self.size - 1)
        gaps = cuts - line
        first, last = self.curve.log_cdf(gaps[..., :1]), self.curve.log_cdf(-gaps[..., -1:])
        middle = self.curve.log_between(gaps[..., :-1], gaps[..., 1:])
        return torch.cat([first, middle, last], -1)
