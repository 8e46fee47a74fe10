"""Shared parts of mechanisms whose main quantity comes from a linear predictor or a network."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Self

import torch
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.layers import apply_linear, expand_to
from otpdag.mechanisms.axes import Axis
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
        return {} if units is None else {part.name: getattr(units, part.name) for part in fields(units)}

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

    @property
    def has_only_tables(self) -> bool:
        """Whether the prediction is a table over discrete parents: no numeric parent, no network."""
        return not self.network and not self.family.continuous

    def centre_and_unit(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Where values are centred and how they are scaled before squares are taken: in them no digits are lost."""
        units = self.predictor.units
        zero = torch.zeros(self.dim).to(like)
        return (zero, zero + 1.0) if units is None else (units.out_shift.to(like), units.out_scale.to(like))

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

    @property
    def own_axis(self) -> Axis:
        """The categories or coordinates of the node itself."""
        return Axis.of_values(self.family.node, self.space)

    def axes(self) -> dict[str, tuple[Axis, ...]]:
        """Intercepts by configuration, slopes by numeric parent."""
        return self.predictor.axes(self.own_axis)

    def table_axes(self, rows: int) -> tuple[Axis, Axis]:
        """The axes of a table with a row for each configuration, or with one row for all."""
        return Axis() if rows == 1 else self.predictor.row_axis, self.own_axis

    def turned(self, params: Params, nodes: Collection[str], sign: Tensor) -> dict[str, Tensor] | None:
        """Turn the slopes of parents, which enter through the predictor alone, and the node as it says itself."""
        turned = self.turned_self(params, sign) if self.family.node in nodes else dict(params)
        if turned is None:
            return None
        return self.predictor.with_inputs_turned(turned, set(nodes) - {self.family.node}, sign)

    def turned_self(self, params: Params, sign: Tensor) -> dict[str, Tensor] | None:
        """Hook: parameters of the node times ``sign``, given its parents; None where there are none."""
        return None

    def slopes(self, params: Params, parent: str) -> Tensor | None:
        """The slopes of the first coordinate."""
        slopes = self.predictor.slopes_of(params, parent)
        return None if slopes is None else slopes[..., 0]

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
