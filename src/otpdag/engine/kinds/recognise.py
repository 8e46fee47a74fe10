"""Recognise which kind data are, and read them as it for a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from otpdag.data import Documents, Images, Sequences, is_partitioned
from otpdag.data.frames import known_table
from otpdag.data.sequences import as_sequences, replace_table
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
        given = {"weights": weights is not None, "device": device != "cpu"}
        if any(given[name] for name in given if name in data.honours):  # what they do not honour is refused later
            raise DataError(f"{type(data).__name__} are read already: give weights and device when they are made")
        return data
    if isinstance(data, Images):
        return ImageData.of(model, data, device=device)
    if isinstance(data, Documents) or sparse.issparse(data):
        return DocumentData.of(model, data if isinstance(data, Documents) else Documents(data))
    if is_partitioned(data):
        return PartitionedData.of(model, data, weights=weights, device=device, every_row=every_row)
    data = known_table(data)
    if isinstance(weights, str):
        split = _sequences_and_weights if model.graph.is_dynamic else _rows_and_weights
        data, weights = split(data, weights)
    if model.graph.is_dynamic:
        return SequenceData.of(model, data, weights=weights)
    if isinstance(data, Sequences | list | tuple):
        raise DataError("data are sequences, but the graph has no lagged edge: add one with otp.lag")
    return TableData.of(model, data, weights=weights, device=device, every_row=every_row)


def _rows_and_weights(data: Any, column: str) -> tuple[pd.DataFrame, NDArray[Any]]:
    """A frame without its column of weights, and that column."""
    if not isinstance(data, pd.DataFrame) or column not in data.columns:
        raise DataError(f"weights must be numbers, or name a column of a DataFrame; got {column!r}")
    return data.drop(columns=column), data[column].to_numpy()


def _sequences_and_weights(data: Any, column: str) -> tuple[Sequences, NDArray[Any]]:
    """Sequences without their column of weights, and the weight of each, which all its steps must agree on."""
    sequences = as_sequences(data)
    table, each = _rows_and_weights(sequences.table, column)
    first = each[np.cumsum(sequences.lengths) - sequences.lengths]
    differs = np.flatnonzero(each != np.repeat(first, sequences.lengths))
    if len(differs):
        raise DataError(
            f"weights {column!r} must be the same in all steps of a sequence; the sequence of row {differs[0]} begins "
            f"with another weight than {each[differs[0]]!r}"
        )
    return replace_table(sequences, table), first
