"""Recognise which kind data are, and read them as it for a model."""

from __future__ import annotations

from typing import Any

import pandas as pd
from numpy.typing import ArrayLike
from scipy import sparse

from otpdag.data import Documents, Images, Sequences, is_partitioned
from otpdag.data.frames import known_table
from otpdag.engine.kinds.document_data import DocumentData
from otpdag.engine.kinds.image_data import ImageData
from otpdag.engine.kinds.kind import DataKind
from otpdag.engine.kinds.partitioned_data import PartitionedData
from otpdag.engine.kinds.sequence_data import SequenceData
from otpdag.engine.kinds.table_data import TableData
from otpdag.errors import DataError
from otpdag.model import Model

__all__ = ["recognise"]


def recognise(model: Model, data: Any, *, weights: ArrayLike | str | None, device: str, every_row: bool) -> DataKind:
    """Read data as the kind that they are; an object that is a kind already serves itself."""
    if isinstance(data, DataKind):
        if data.model is not model:
            raise DataError("data were adapted to another model than the one that is fitted")
        return data
    if isinstance(data, Images):
        return ImageData.of(model, data, device=device)
    if isinstance(data, Documents) or sparse.issparse(data):
        return DocumentData.of(model, data if isinstance(data, Documents) else Documents(data))
    if is_partitioned(data):
        return PartitionedData.of(model, data, weights=weights, device=device, every_row=every_row)
    data = known_table(data)
    if isinstance(weights, str):
        data, weights = _without_weights(data, weights)
    if model.graph.is_dynamic:
        return SequenceData.of(model, data, weights=weights)
    if isinstance(data, Sequences | list | tuple):
        raise DataError("data are sequences, but the graph has no lagged edge: add one with otp.lag")
    return TableData.of(model, data, weights=weights, device=device, every_row=every_row)


def _without_weights(data: Any, column: str) -> tuple[Any, Any]:
    """A frame without its column of weights, and that column."""
    if not isinstance(data, pd.DataFrame) or column not in data.columns:
        raise DataError(f"weights must be numbers, or name a column of a DataFrame; got {column!r}")
    return data.drop(columns=column), data[column].to_numpy()
