"""Normal vectors whose coordinates depend on each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from otpdag.mechanisms.base import Params, Parents
from otpdag.mechanisms.generalised_linear import IDENTITY
from otpdag.mechanisms.normal import LOG_SQRT_2PI, Located
from otpdag.mechanisms.parameters import Parameter, SettingLike, Support
from otpdag.mechanisms.predictor import centre_and_spread
from otpdag.numerics import cholesky


class _Covariance(Support):
    """Covariance matrices by their Cholesky factor, plus ``floor`` on the diagonal."""

    name = "symmetric positive definite matrices"
    sliver = 1e-12  # variance beyond the floor in a direction that has none, as a share of the mean one

    def __init__(self, floor: float = 0.0) -> None:
        self.floor = floor

    def natural(self, raw: Tensor) -> Tensor:
        factor = torch.tril(raw, -1) + torch.diag_embed(torch.exp(raw.diagonal(dim1=-2, dim2=-1).clamp(-30.0, 30.0)))
        return factor @ factor.mT + self.floor * torch.eye(raw.shape[-1]).to(raw)

    def raw(self, natural: Tensor) -> Tensor:
        eye = torch.eye(natural.shape[-1]).to(natural)
        excess = natural - self.floor * eye
        # what lies at the floor has no excess: a sliver keeps the factor defined
        smallest = self.sliver * natural.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None]
        _, below = torch.linalg.cholesky_ex(excess - smallest.unsqueeze(-1) * eye)
        if bool(below.any()):
            values, vectors = torch.linalg.eigh(excess)
            excess = (vectors * values.maximum(smallest).unsqueeze(-2)) @ vectors.mT
        factor = torch.linalg.cholesky(excess)
        return torch.tril(factor, -1) + torch.diag_embed(torch.log(factor.diagonal(dim1=-2, dim2=-1)))

    def check(self, value: Tensor) -> bool:
        if not super().check(value) or not torch.allclose(value, value.mT):
            return False
        return bool((torch.linalg.eigvalsh(value) > 0).all())


@dataclass(eq=False, repr=False, kw_only=True)
class MultivariateNormal(Located):
    r"""A normal vector with a full covariance matrix for each discrete configuration of its parents.

    .. math:: x = \mathrm{loc}[\mathrm{pa}] + W^\top \mathrm{pa} + L[\mathrm{pa}] \, u,
              \quad L L^\top = \mathrm{covariance}, \quad u \sim N(0, I)

    Missing cells are integrated out exactly: what is seen has the corresponding marginal. Where coordinates are
    independent given the parents, :class:`Normal` does the same with less work.

    Args:
        dim: Number of coordinates.
        loc: Intercept; a number fixes it, ``otp.start(v)`` starts it, ``otp.tie(name)`` shares it.
        weight: Slopes of the numeric parents, in the order of the edges.
        covariance: Covariance of the noise, (dim, dim) or one for each configuration.
        shared_covariance: One covariance for all configurations of the discrete parents.
        floor: Variance that no direction falls below, as a share of the column's own; it keeps a configuration with
            few rows from collapsing to a point, where the likelihood is infinite. Left out, it is 1e-6 where a parent
            is hidden and none elsewhere.

    >>> MultivariateNormal(3).space
    Real(dim=3)
    """

    dim: int = field(default=2, kw_only=False)
    covariance: SettingLike = None
    shared_covariance: bool = False

    network: Sequence[int] = field(default=(), init=False)
    network_prior: float = field(default=0.0, init=False)
    beside: ClassVar[tuple[str, ...]] = ("covariance",)

    @property
    def share(self) -> float:
        """Of a column's variance: what no direction falls below."""
        return self.floor if self.floor is not None else 1e-6 * self.family.hidden_parents

    @property
    def is_linear(self) -> bool:
        """Unless terms bend; there is no network."""
        return self.is_affine

    @property
    def covariance_rows(self) -> int:
        """One covariance for each configuration of the discrete parents, or one for all."""
        return 1 if self.shared_covariance else self.predictor.rows

    def parameters(self) -> dict[str, Parameter]:
        """Location table, slopes, covariances."""
        unit = None if self.unit is None else torch.outer(self.unit, self.unit)
        shape = (self.covariance_rows, self.dim, self.dim)
        # what is not identified in a hidden node is fixed unless it is given
        given = np.eye(self.dim) if self.covariance is None and self.family.hidden else self.covariance
        covariance = Parameter(shape, _Covariance(self.share), given, unit=unit)
        return {**self.predictor.parameters(), "covariance": covariance}

    def turned_self(self, params: Params, sign: Tensor) -> dict[str, Tensor] | None:
        """Turn the location, and the covariances of coordinates of which one is turned."""
        turned = self.predictor.with_output_turned(params, sign)
        if turned is None:
            return None
        return {**turned, "covariance": params["covariance"] * torch.outer(sign, sign)}

    def on_scale(self, value: Tensor, parents: Parents, weight: Tensor) -> None:
        """Adopt the units of the columns."""
        self.predictor = self.predictor.with_units(value, parents, weight).smoothed(value, parents, weight, IDENTITY)

    def start(self, value: Tensor, parents: Parents, weight: Tensor, smallest: float = 1e-6) -> dict[str, Tensor]:
        """Weighted regression, then the residuals' covariance in each configuration.

        The ``smallest`` variance is a share of the column's own.
        """
        regression = self.predictor.start(value, parents, weight)
        residual = value - self.predictor.predict_rows(regression, parents)
        products = (residual.unsqueeze(-1) * residual.unsqueeze(-2)).flatten(1)
        # two rows' worth of the overall covariance keep a nearly empty configuration sane
        pooled = self.pooled(products, self.covariance_rows, parents, weight).unflatten(-1, (self.dim, self.dim))
        spread = centre_and_spread(value, weight)[1]
        return {**regression, "covariance": pooled + max(smallest, 2 * self.share) * torch.diag(spread**2)}

    # -- statistics ----------------------------------------------------------------------------------------------

    def features(self, value: Tensor, mask: Tensor) -> Tensor | None:
        """One, the values in their units, and their products; of rows that are seen wholly or not at all."""
        seen = mask.expand_as(value).all(-1, keepdim=True)
        if not self.has_only_tables or bool((mask & ~seen).any()):
            return None
        shift, unit = self.centre_and_unit(value)
        inside = (value - shift) / unit * seen
        first, second = torch.triu_indices(self.dim, self.dim, device=value.device)
        return torch.cat([seen.to(value), inside, inside[:, first] * inside[:, second]], -1)

    def coefficients(self, params: Params) -> Tensor:
        """Those of the normal log-density: of products of two coordinates twice."""
        loc, covariance = params["loc"], params["covariance"]
        shift, unit = self.centre_and_unit(loc)
        factor = torch.linalg.cholesky(covariance / torch.outer(unit, unit))
        inside = ((loc - shift) / unit).unsqueeze(-1)
        precision = torch.cholesky_inverse(factor)
        pull = precision @ inside
        log_det = torch.log(factor.diagonal(dim1=-2, dim2=-1)).sum(-1, keepdim=True) + torch.log(unit).sum()
        one = -0.5 * (pull * inside).sum(-2) - log_det - self.dim * LOG_SQRT_2PI
        first, second = torch.triu_indices(self.dim, self.dim, device=loc.device)
        products = -precision[..., first, second] * torch.where(first == second, 0.5, 1.0)
        rows = (*one.shape[:2], -1)
        return torch.cat([one, pull.squeeze(-1), products.expand(rows)], -1)

    def fitted(self, params: Params, sums: Tensor, sliver: float = 1e-14) -> dict[str, Tensor]:
        """Means, then the covariance around them.

        Fewer rows than coordinates span no volume: a ``sliver`` of the column's own variance keeps the matrix one.
        """
        declared, dim = self.declared(), self.dim
        shift, unit = self.centre_and_unit(sums)
        count, first, pairs = sums[..., :1], sums[..., 1 : dim + 1], sums[..., dim + 1 :]
        loc, covariance, total = params["loc"].expand_as(first), params["covariance"], count.clamp(min=1e-300)
        if declared["loc"].learned:
            loc = torch.where(count > 0, shift + unit * first / total, loc)
        if declared["covariance"].learned:
            i, j = torch.triu_indices(dim, dim, device=sums.device)
            second = sums.new_zeros(*sums.shape[:2], dim, dim)
            second[..., i, j] = pairs
            second[..., j, i] = pairs
            inside, first = ((loc - shift) / unit).unsqueeze(-1), first.unsqueeze(-1)
            cross = inside @ first.mT
            around = second - cross - cross.mT + count.unsqueeze(-1) * inside @ inside.mT
            if self.covariance_rows == 1:
                around, count = around.sum(1, keepdim=True), count.sum(1, keepdim=True)
            thin = sliver * torch.eye(dim).to(sums)
            spread = (around / count.clamp(min=1e-300).unsqueeze(-1) + thin) * torch.outer(unit, unit)
            covariance = torch.where(count.unsqueeze(-1) > 0, spread, covariance)
        return {"loc": loc, "covariance": covariance}

    # -- behaviour -----------------------------------------------------------------------------------------------

    def location_and_factor(
        self, params: Params, parents: Parents, like: Tensor, cells: Tensor | slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Location (R, ..., k) and Cholesky factor (R, ..., k, k) of these coordinates at these parents."""
        loc = self.predictor(params, parents, like)[..., cells]
        factor = cholesky(params["covariance"][..., cells, :][..., cells])
        return loc, self._at_parents(factor, parents, loc.ndim)

    def _at_parents(self, table: Tensor, parents: Parents, ndim: int) -> Tensor:
        """Matrices (R, rows, k, l) at these parents: (R, ..., k, l)."""
        return self.row_of(table.flatten(-2), parents, ndim).unflatten(-1, tuple(table.shape[-2:]))

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """``loc + L u``."""
        loc, factor = self.location_and_factor(params, parents, noise)
        return loc + _times(factor, noise)

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """``L^-1 (x - loc)``."""
        loc, factor = self.location_and_factor(params, parents, value)
        return _times(_inverse(factor), value - loc)

    def mean(self, params: Params, parents: Parents) -> Tensor:
        """The location."""
        return self.predictor(params, parents)

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Normal log-density of the cells that are seen."""
        if mask is None or bool(mask.all()):
            return self._density(params, value, parents, slice(None))
        patterns, group = torch.unique(mask.reshape(-1, self.dim), dim=0, return_inverse=True)
        if not (mask.shape[0] == 1 and value.shape[1] == mask.shape[1] == len(group) > 1):
            parts = [((mask == own).all(-1), self._density(params, value, parents, own)) for own in patterns]
            return torch.stack([torch.where(here, part, 0.0) for here, part in parts]).sum(0)
        # rows that show the same cells together
        order = [torch.nonzero(group == number)[:, 0] for number in range(len(patterns))]
        together = []
        for rows, cells in zip(order, patterns, strict=True):
            own = {name: p[:, rows] if p.ndim > 2 and p.shape[1] > 1 else p for name, p in parents.items()}
            together.append(self._density(params, value[:, rows], own, cells))
        return torch.cat(together, 1).index_select(1, torch.cat(order).argsort())

    def _density(self, params: Params, value: Tensor, parents: Parents, cells: Tensor | slice) -> Tensor:
        """Log-density of some cells; of none, zero."""
        loc, factor = self.location_and_factor(params, parents, value, cells)
        noise = _times(_inverse(factor), value[..., cells] - loc)
        log_det = torch.log(factor.diagonal(dim1=-2, dim2=-1)).sum(-1)
        return -0.5 * noise.square().sum(-1) - log_det - loc.shape[-1] * LOG_SQRT_2PI

    def complete(self, params: Params, value: Tensor, parents: Parents, mask: Tensor, noise: Tensor) -> Tensor:
        """Draw the cells that are not seen, given those that are."""
        drawn = self.forward(params, parents, noise)
        mask, value, drawn = torch.broadcast_tensors(mask, value, drawn)
        completed = drawn
        for seen in torch.unique(mask.reshape(-1, self.dim), dim=0):
            # Matheron's rule: a draw of the whole, moved by the regression of its error in the seen cells
            rows = params["covariance"][..., seen, :]
            gain = self._at_parents(torch.linalg.solve(rows[..., seen], rows).mT, parents, drawn.ndim)
            moved = drawn + _times(gain, (value - drawn)[..., seen])
            completed = torch.where((mask == seen).all(-1, keepdim=True), moved, completed)
        return torch.where(mask, value, completed)


def _inverse(factor: Tensor) -> Tensor:
    eye = torch.eye(factor.shape[-1]).to(factor).expand_as(factor)
    return torch.linalg.solve_triangular(factor, eye, upper=False)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Multiply (R, ..., d, k) by (R, ..., k); a matrix that all rows share is not copied for them."""
    if matrix.shape[1] > 1 or vector.ndim < 3:
        return (matrix @ vector.unsqueeze(-1)).squeeze(-1)
    moved = vector.movedim(1, -2) @ matrix.squeeze(1).mT
    return moved.movedim(-2, 1)
