r"""Which rows lie apart from the rest, and whether the model has room for them.

A compact group of outliers and a small component of the model look alike to a likelihood. What tells them apart is the
price that the other rows pay for it: a component explains its group at no cost to them, while a model that spends a
component on outliers has one less for the rest. So the model is fitted with and without the group, and the group counts
as the model's own if the other rows' loss, given that they are not of the group, hardly differs:

.. math:: \sum_{i \notin G} \{\ell_{\text{with}}(x_i) + \log P(\text{not } G)\}
          - \sum_{i \notin G} \ell_{\text{without}}(x_i) \le \text{number of parameters}.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.data import Batch
from otpdag.inference.mean_features import feature_columns
from otpdag.outlying_rows import ApartOptions, apart_groups, apart_sides
from otpdag.structure import Structure

__all__ = ["RowLosses", "near_rows", "standard_columns"]

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

RowLosses = Callable[[Batch], tuple[Array, int]]
"""Fits the model to a batch; the loss of each row, and the number of parameters."""


def near_rows(
    structure: Structure, batch: Batch, options: ApartOptions, losses: RowLosses, generator: np.random.Generator
) -> Tensor:
    """Numbers of the rows that are not apart, or in a group that the model has room for; all, if too few would be."""
    apart = apart_sides(standard_columns(structure, batch), options)
    near: Flags = np.logical_not(apart.any(axis=1))
    for group in apart_groups(apart, options):
        if _has_room(batch, np.flatnonzero(near), group, options, losses, generator):
            near[group] = True
    if 1 - near.mean() > options.most:
        return torch.arange(batch.rows)
    return torch.as_tensor(np.flatnonzero(near))


def standard_columns(structure: Structure, batch: Batch) -> Array:
    """Columns in robust units, missing cells in the middle."""
    columns = []
    for column in feature_columns(structure, batch):
        values, seen = column.values[0].double(), column.seen[0]
        if column.is_discrete:
            columns.append(values.numpy())
            continue
        values = values.clamp(min=0).sqrt() if column.root else values
        middle = values[seen].median()
        spread = 1.4826 * (values[seen] - middle).abs().median().clamp(min=1e-9)
        scaled = torch.where(seen.unsqueeze(-1), (values - middle) / spread, 0.0)
        columns.append(scaled.numpy())
    return np.concatenate(columns, 1)


def _has_room(
    batch: Batch,
    near: NDArray[np.int64],
    group: NDArray[np.int64],
    options: ApartOptions,
    losses: RowLosses,
    generator: np.random.Generator,
) -> bool:
    """Whether the near rows are as well explained by a fit that has to explain the group, too."""
    kept = np.concatenate([near, group])
    if len(kept) > options.rows:
        kept = generator.choice(kept, options.rows, replace=False)
    kept = np.sort(kept)
    is_near = ~np.isin(kept, group)
    if is_near.all() or not is_near.any():
        return False
    together, _ = losses(batch.take(torch.as_tensor(kept)))
    alone, parameters = losses(batch.take(torch.as_tensor(kept[is_near])))
    price = (together[is_near] + np.log(is_near.mean())).sum() - alone.sum()
    return bool(price <= parameters)
