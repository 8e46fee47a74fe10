"""Student-t nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from otpdag.mechanisms.base import Noise, Params, Parents, sum_cells
from otpdag.mechanisms.normal import LocationScale
from otpdag.mechanisms.parameters import ABOVE_ONE, Axis, Parameter, Setting, as_setting
from otpdag.mechanisms.quantiles import student_cdf, student_quantile


class StudentT(LocationScale):
    r"""A node with heavy tails, linear in its numeric parents.

    .. math:: x = \mathrm{loc}[\mathrm{pa}] + W^\top \mathrm{pa} + \mathrm{scale}[\mathrm{pa}] \,
              F_\nu^{-1}(u), \quad u \sim U(0, 1)

    with :math:`F_\nu` the distribution function of Student's t with ``df`` :math:`\nu > 1` degrees of
    freedom, one for each coordinate.

    Args:
        dim: Number of coordinates.
        loc: Intercept.
        weight: Slopes of the numeric parents.
        scale: Scale of the noise (not its standard deviation); fixed at one for a hidden node unless it is
            given.
        df: Degrees of freedom, above one.
        network: Sizes of hidden layers of a network of the parents that replaces the linear prediction.
        shared_scale: One scale for all configurations of the discrete parents.
        floor: A scale that none falls below, as a share of the column's own spread; see :class:`Normal`.

    >>> StudentT(df=4.0).noise
    Noise(dim=1, kind='uniform')
    """

    is_symmetric: ClassVar[bool] = True
    df_grid: ClassVar[tuple[float, ...]] = (1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 25.0, 50.0)
    """Degrees of freedom to start from: from nearly Cauchy to nearly normal."""
    start_steps: ClassVar[int] = 20
    """Of expectation-maximisation, enough for a start."""

    def __init__(
        self,
        dim: int = 1,
        *,
        loc: ArrayLike | Setting = None,
        weight: ArrayLike | Setting = None,
        scale: ArrayLike | Setting = None,
        df: ArrayLike | Setting = None,
        network: Sequence[int] = (),
        shared_scale: bool = False,
        floor: float | None = None,
    ) -> None:
        super().__init__(
            dim, loc=loc, weight=weight, scale=scale, network=network, shared_scale=shared_scale, floor=floor
        )
        self.df = as_setting(df)

    @property
    def noise(self) -> Noise:
        """Uniform, one for each coordinate."""
        return Noise(self.dim, "uniform")

    def parameters(self) -> dict[str, Parameter]:
        """Location table, slopes, scale table, degrees of freedom."""
        return {**super().parameters(), "df": Parameter((1, self.dim), ABOVE_ONE, self.df)}

    def axes(self) -> dict[str, tuple[Axis, ...]]:
        """Degrees of freedom by coordinate."""
        return {**super().axes(), "df": self.table_axes(1)}

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """Expectation-maximisation with the degrees of freedom on a grid (Lange, Little and Taylor 1989)."""
        params = super().start(value, parents, weight)
        floor = self._start_floor(value, weight)
        df = self._given_df(value)
        for _ in range(self.start_steps):
            residual = value - self.predictor.predict_rows(params, parents)
            ratio = (residual / self._scale_rows(params["scale"], parents)) ** 2
            if not self._df_is_given:
                df = self._best_df(ratio, weight)
            trust = (df + 1) / (df + ratio)
            params.update(self.predictor.start(value, parents, weight.unsqueeze(-1) * trust))
            residual = value - self.predictor.predict_rows(params, parents)
            variance = self.pooled(trust * residual**2, self.scale_rows, parents, weight)
            params["scale"] = variance.sqrt().maximum(floor)
        return {**params, "df": df.reshape(1, self.dim)}

    @property
    def _df_is_given(self) -> bool:
        return self.declared()["df"].has_value

    def _given_df(self, value: Tensor) -> Tensor:
        if self._df_is_given:
            return self.declared()["df"].constant(self.family.node, "df").to(value)
        return torch.full((1, self.dim), 5.0, dtype=value.dtype)

    def _scale_rows(self, scale: Tensor, parents: Parents) -> Tensor:
        """The scale of each row of a table: (N, dim), or (1, dim)."""
        lifted = {name: parent.unsqueeze(0) for name, parent in parents.items()}
        return self.row_of(scale.unsqueeze(0), lifted, 3)[0]

    def _best_df(self, ratio: Tensor, weight: Tensor) -> Tensor:
        """The degrees of freedom on the grid that fit squared standardised residuals (N, dim) best."""
        grid = torch.tensor(self.df_grid, dtype=ratio.dtype).reshape(-1, 1, 1)
        fit = (weight.unsqueeze(-1) * _standard_log_prob(ratio, grid)).sum(1)
        return grid[fit.argmax(0), 0, 0].unsqueeze(0)

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """``loc + scale * quantile(u)``."""
        loc, scale = self.location_and_scale(params, parents, noise)
        return loc + scale * student_quantile(noise, self.row_of(params["df"], parents, loc.ndim))

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Student-t log-density."""
        loc, scale = self.location_and_scale(params, parents, value)
        df = self.row_of(params["df"], parents, loc.ndim)
        return sum_cells(_standard_log_prob(((value - loc) / scale) ** 2, df) - torch.log(scale), mask)

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """The distribution function at the standardised value."""
        loc, scale = self.location_and_scale(params, parents, value)
        return student_cdf((value - loc) / scale, self.row_of(params["df"], parents, loc.ndim))

    def mean(self, params: Params, parents: Parents) -> Tensor:
        """The location."""
        return self.predictor(params, parents)


def _standard_log_prob(squared: Tensor, df: Tensor) -> Tensor:
    """Log-density of Student's t at points with these squares."""
    half = 0.5 * (df + 1)
    constant = torch.lgamma(half) - torch.lgamma(0.5 * df) - 0.5 * torch.log(torch.pi * df)
    return constant - half * torch.log1p(squared / df)
