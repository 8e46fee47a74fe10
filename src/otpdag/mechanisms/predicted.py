"""Shared parts of mechanisms whose main quantity comes from a linear predictor or a network."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Self

from torch import Tensor

from otpdag.errors import ModelError
from otpdag.layers import apply_linear, expand_to
from otpdag.mechanisms.base import Mechanism, Params, Parents
from otpdag.mechanisms.predictor import Predictor, Units, configurations

__all__ = ["Predicted", "check_dim"]


class Predicted(Mechanism):
    """A mechanism with a predictor, and perhaps tables with a row for each discrete configuration."""

    dim: int
    network: tuple[int, ...]
    predictor: Predictor

    def restore_units(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Uncentre the intercept."""
        return self.predictor.restore_units(params)

    def remove_units(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Centre the intercept."""
        return self.predictor.remove_units(params)

    def buffers(self) -> dict[str, Tensor]:
        """The units of the data."""
        units = self.predictor.units
        return {} if units is None else asdict(units)

    def with_buffers(self, buffers: Mapping[str, Tensor]) -> Self:
        """Return a copy with the units of the data that was saved."""
        restored = copy.copy(self)
        restored._declared = None
        restored.predictor = replace(self.predictor, units=Units(**buffers) if buffers else None)
        return restored

    @property
    def unit(self) -> Tensor | None:
        """Spread of the predicted quantity in the data, once known."""
        return None if self.predictor.units is None else self.predictor.units.out_scale

    def row_of(self, table: Tensor, parents: Parents, ndim: int) -> Tensor:
        """A table (R, rows, d) at these parents: (R, ..., d). A table of one row serves all of them."""
        config = None if table.shape[1] == 1 else configurations(self.family, parents)
        return expand_to(table[:, 0], ndim) if config is None else apply_linear(config, table)

    def weights_by_row(self, rows: int, parents: Parents, weight: Tensor) -> Tensor:
        """Weights (N,) spread over the rows of a table: (N, rows)."""
        config = None if rows == 1 else configurations(self.family, parents)
        return weight.unsqueeze(-1) if config is None else config * weight.unsqueeze(-1)

    def pooled(self, values: Tensor, rows: int, parents: Parents, weight: Tensor, prior: float = 2.0) -> Tensor:
        """Weighted means of ``values`` (N, d) by row, each with ``prior`` rows' worth of the overall mean."""
        share = self.weights_by_row(rows, parents, weight)
        overall = (weight.unsqueeze(-1) * values).sum(0) / weight.sum().clamp(min=1e-12)
        return (share.T @ values + prior * overall) / (share.sum(0).unsqueeze(-1) + prior)

    def describe(self, params: Params) -> dict[str, Tensor]:
        """Tables by discrete parents, slopes by numeric parent; scalars for scalar nodes."""
        shown = {}
        for name, value in params.items():
            if name.startswith("network."):
                shown[name] = value
                continue
            if name != "weight":
                # a table of one row has no axis for the discrete parents that it does not tell apart
                value = value[:, 0] if value.shape[1] == 1 else self.predictor.by_configuration(value)
            shown[name] = value[..., 0] if self.dim == 1 else value
        return shown


def check_dim(dim: int) -> int:
    """Refuse a node without coordinates."""
    if dim < 1:
        raise ModelError(f"dim must be at least 1; got {dim}")
    return dim
