"""Recognise which kind data are, and read them as it for a model.

Read the arguments of a fit, once: which method runs, from how many starts, and what the data cannot honour.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from otpdag.arguments import check_count, check_seed
from otpdag.data import Documents, Images, Sequences, is_partitioned
from otpdag.data.reading import known_table
from otpdag.data.sequences import as_sequences, replace_table
from otpdag.engine.data_kind import DataKind
from otpdag.engine.document_data import DocumentData
from otpdag.engine.image_data import ImageData
from otpdag.engine.method import Method, misfit
from otpdag.engine.optimiser import SearchSchedule
from otpdag.engine.outlying_rows import RobustOptions
from otpdag.engine.partitioned_data import PartitionedData
from otpdag.engine.sequence_data import SequenceData
from otpdag.engine.table_data import TableData
from otpdag.errors import DataError, ModelError
from otpdag.model import Model
from otpdag.structure import Structure


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


@dataclass(frozen=True)
class Plan:
    """What will run."""

    method: Method
    restarts: int
    course: SearchSchedule
    leaves_out: RobustOptions | None
    """How much of what the model cannot explain is left out; None if nothing is."""


def check_arguments(seed: object, steps: object, restarts: object, device: object) -> None:
    """Refuse what no kind of data could honour."""
    check_seed(seed)
    for name, value in (("steps", steps), ("restarts", restarts)):
        if value is not None:
            check_count(name, value)
    if not isinstance(device, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ModelError(f"device must be 'cpu', 'cuda' or 'cuda:N'; got {device!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device {device!r} was asked for, but no CUDA device is available; use device='cpu'")


def robust_kind(robust: object) -> str | None:
    """None, ``"outliers"`` or ``"misfit"``."""
    kinds: dict[Any, str | None] = {False: None, True: "outliers", "outliers": "outliers", "misfit": "misfit"}
    if isinstance(robust, RobustOptions):
        return "outliers"
    if not isinstance(robust, bool | str) or robust not in kinds:
        raise ModelError(f"robust must be True, False, 'outliers', 'misfit' or an otp.RobustOptions; got {robust!r}")
    return kinds[robust]


def check_honoured(kind: DataKind, *, weights: bool, robust: bool, device: str) -> None:
    """Refuse an argument that the kind of data cannot honour."""
    asked = {"weights": weights, "robust": robust, "device": device != "cpu"}
    for name, is_asked in asked.items():
        if is_asked and name not in kind.honours:
            advice = kind.advice.get(name, "leave it out")
            raise ModelError(f"{name} is not for such data ({type(kind).__name__}): {advice}")


def resolve(
    kind: DataKind,
    method: str | Method,
    *,
    robust: str | None,
    steps: int | None,
    restarts: int | None,
    course: SearchSchedule | None,
    options: RobustOptions | None = None,
) -> Plan:
    """Choose the method, and everything that the user left open."""
    if course is not None and not isinstance(course, SearchSchedule):
        raise ModelError(f"course must be an otp.SearchSchedule; got {course!r:.100}")
    chosen = _chosen(kind, method, robust)
    chosen = chosen if steps is None else chosen.with_steps(int(steps))
    kind.check(chosen)
    if robust == "outliers":
        kind.check_robust(chosen)
    if restarts is not None and kind.most_restarts is not None and restarts > kind.most_restarts:
        raise ModelError(
            f"restarts must be at most {kind.most_restarts} for such data ({type(kind).__name__}): fit several seeds "
            f"instead; got {restarts}"
        )
    return Plan(
        method=chosen,
        restarts=kind.restarts(chosen) if restarts is None else int(restarts),
        course=kind.course(chosen) if course is None else course,
        leaves_out=(options or RobustOptions()) if robust == "outliers" else None,
    )


def _chosen(kind: DataKind, method: str | Method, robust: str | None) -> Method:
    if robust == "misfit":
        if method != "auto":
            raise ModelError("robust='misfit' is a method of its own: leave method at 'auto'")
        return misfit(given_weights=_weights_are_given(kind.model.structure))
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise ModelError(f"method must be 'auto', 'entropic', 'transport', 'paper' or a Method; got {method!r}")
    return kind.named(method)


def _weights_are_given(structure: Structure) -> bool:
    """Whether the user fixed everything about the hidden categories, so that nothing of them is learned."""
    hidden = [structure.mechanisms[node] for node in structure.graph.hidden]
    declared = [one.declared().values() for one in hidden if one.space.is_discrete]
    return bool(declared) and all(not parameter.learned for own in declared for parameter in own)
