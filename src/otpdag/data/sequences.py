"""Sequences: tables whose rows are steps, laid end to end, with the length of each sequence.

A :class:`Sequences` says which rows belong together and in which order; :func:`encode_sequences` turns it into a
:class:`SequenceBatch`. There is no padding anywhere: a flat table and the lengths say everything.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from otpdag.data.batch import Batch, mixed, row_hashes
from otpdag.data.columns import Schema, Table, as_label, check_once, find_labels, known_table, to_numpy
from otpdag.data.table import encode, read_weights
from otpdag.errors import DataError, listed
from otpdag.numerics import Ints

Lengths: TypeAlias = NDArray[np.int64]


class Sequences:
    """Rows that are steps of one or several sequences.

    Args:
        data: A DataFrame (one sequence, unless ``sequence`` or ``lengths`` split it); a list of arrays or frames, one
            for each sequence; an array (N, T) or (N, T, d); or a mapping from nodes to such arrays. NaN is missing.
        sequence: The column of a DataFrame that tells sequences apart.
        time: The column of a DataFrame that orders the steps of a sequence: numbers, days, ordered categories, or text
            that reads as numbers or as days in the ISO form; without one, the order of the rows.
        lengths: Lengths of the sequences that lie one after another in ``data``.

    Raises:
        DataError: A column is missing, a time is missing or doubled, a sequence is empty, or lengths do not fit.

    >>> import pandas as pd
    >>> frame = pd.DataFrame({"id": ["a", "b", "a"], "year": [2, 1, 1], "x": [5, 7, 6]})
    >>> steps = Sequences(frame, sequence="id", time="year")
    >>> steps, steps.table["x"].tolist()
    (Sequences(2 sequences, 3 steps), [6, 5, 7])
    """

    def __init__(
        self, data: Any, *, sequence: str | None = None, time: str | None = None, lengths: ArrayLike | None = None
    ) -> None:
        data = known_table(data)
        if (sequence is not None or time is not None) and not isinstance(data, pd.DataFrame):
            raise DataError(f"sequence and time name columns of a DataFrame; got {type(data).__name__}")
        if lengths is not None and sequence is not None:
            raise DataError("give lengths or sequence, not both")
        table: Table
        self.ids: pd.Index | None = None  # what a column calls the sequences, in their order
        if isinstance(data, pd.DataFrame):
            table, own_lengths, self.ids = _from_frame(data, sequence, time)
        elif isinstance(data, Mapping):
            table, own_lengths = _from_mapping(data)
        elif isinstance(data, list | tuple):
            table, own_lengths = _from_list(data)
        else:
            table, own_lengths = _from_array(to_numpy(data), "data", split=lengths is None)
        rows = int(own_lengths.sum())
        self.table = table
        self.lengths = own_lengths if lengths is None else _check_lengths(lengths, rows)
        self.index = table.index if isinstance(table, pd.DataFrame) else pd.RangeIndex(rows)

    def __repr__(self) -> str:
        return f"Sequences({len(self.lengths)} sequences, {int(self.lengths.sum())} steps)"


SequenceTable: TypeAlias = Table | Sequences | list[Any] | tuple[Any, ...]


def as_sequences(data: SequenceTable) -> Sequences:
    """Read whatever can be a set of sequences."""
    return data if isinstance(data, Sequences) else Sequences(data)


def replace_table(sequences: Sequences, table: Table) -> Sequences:
    """The same sequences with other columns."""
    replaced = copy.copy(sequences)
    replaced.table = table
    return replaced


@dataclass(frozen=True, eq=False)
class SequenceBatch:
    """Steps of all sequences laid end to end.

    Attributes:
        steps: One row for each step.
        lengths: Number of steps of each sequence (N,), none zero.

    >>> x = torch.arange(5.0).reshape(1, 5, 1)
    >>> batch = SequenceBatch(
    ...     Batch({"x": x}, {"x": torch.ones(1, 5, 1).bool()}, torch.ones(1, 5)), torch.tensor([3, 2])
    ... )
    >>> batch.times.tolist(), batch.take(torch.tensor([1])).steps.values["x"].flatten().tolist()
    ([0, 1, 2, 0, 1], [3.0, 4.0])
    """

    steps: Batch
    lengths: Tensor

    @property
    def rows(self) -> int:
        """Number of steps of all sequences."""
        return self.steps.rows

    @property
    def starts(self) -> Tensor:
        """The row of each sequence's first step."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def owners(self) -> Tensor:
        """The sequence of each row."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)

    @cached_property
    def times(self) -> Tensor:
        """How many steps of its sequence come before each row."""
        return _counted(self.lengths)

    @property
    def canonical_order(self) -> Ints:
        """Numbers of the sequences in an order that depends on what they hold; see :func:`canonical_order` of rows."""
        if len(self.lengths) == 1:
            return np.zeros(1, dtype=np.int64)
        steps = mixed(row_hashes(self.steps) ^ self.times.numpy().astype(np.uint64))
        return np.argsort(np.add.reduceat(steps, self.starts.numpy()), kind="stable")

    def take(self, index: Tensor) -> SequenceBatch:
        """Pick sequences."""
        lengths = self.lengths[index]
        rows = self.starts[index].repeat_interleave(lengths) + _counted(lengths)
        return SequenceBatch(self.steps.take(rows), lengths)

    def cut(self, length: int) -> SequenceBatch:
        """Cut long sequences into pieces of at most ``length`` steps, each a sequence of its own."""
        pieces = (self.lengths + length - 1) // length
        left = self.lengths.repeat_interleave(pieces) - _counted(pieces) * length
        return SequenceBatch(self.steps, left.clamp(max=length))

    def part(self, steps: int | Tensor, seed: int, *, piece: int = 250, pieces: int = 40) -> SequenceBatch:
        """A random part of about that many steps, whole sequences or pieces of long ones; or the sequences asked for.

        Args:
            steps: Steps of the part, about; or numbers of sequences.
            seed: Determines the choice.
            piece: Steps of a piece, at least: its first step is explained by itself, one error in so many.
            pieces: Pieces that a part has, if sequences are long: enough to see all of a series.
        """
        if isinstance(steps, Tensor):
            return self.take(steps)
        if self.rows <= steps:
            return self
        cut = self.cut(max(piece, min(int(self.lengths.max()), steps // pieces)))
        order = torch.randperm(len(cut.lengths), generator=torch.Generator().manual_seed(seed))
        enough = int((cut.lengths[order].cumsum(0) < steps).sum()) + 1
        return cut.take(order[:enough])

    def weighted(self, weights: ArrayLike) -> SequenceBatch:
        """The same with one weight for each sequence."""
        given = read_weights(np.ravel(np.asarray(weights)), len(self.lengths), "sequences")
        steps = torch.from_numpy(given).to(self.steps.weight).repeat_interleave(self.lengths, 1)
        return replace(self, steps=replace(self.steps, weight=steps))

    def lagged(self, tensor: Tensor, by: int) -> Tensor:
        """Each step's value (R, M, width) ``by`` steps ago; the first steps repeat their sequence's first one."""
        back = self.times.clamp(max=by)
        return tensor.index_select(1, torch.arange(self.rows) - back)


def _counted(lengths: Tensor) -> Tensor:
    """0, 1, ... up to the first length, and again up to each that follows."""
    own = lengths.numpy()  # which repeats seven times as fast
    return torch.from_numpy(np.arange(own.sum()) - np.repeat(own.cumsum() - own, own))


def encode_sequences(data: Sequences, schema: Schema, *, hidden: Iterable[str], partial: bool = False) -> SequenceBatch:
    """Check sequences against a schema and turn them into a batch of the nodes that are not hidden."""
    steps = encode(data.table, schema, hidden=hidden, partial=partial)
    return SequenceBatch(steps, torch.from_numpy(data.lengths))


# --- reading ---------------------------------------------------------------------------------------------------------


def _from_frame(
    frame: pd.DataFrame, sequence: str | None, time: str | None
) -> tuple[pd.DataFrame, Lengths, pd.Index | None]:
    for argument, name in (("sequence", sequence), ("time", time)):
        if name is not None and (not isinstance(name, Hashable) or name not in frame.columns):
            raise DataError(f"{argument} must name a column; got {name!r}, the table has {list(frame.columns)}")
    keys = [name for name in (sequence, time) if name is not None]
    check_once(frame, keys)
    for name in (sequence, time):
        if name is not None and bool(frame[name].isna().any()):
            raise DataError(f"column {name!r} must have no missing values: it says where a row belongs")
    if time is not None:
        frame = frame.copy(deep=False)
        frame[time] = _moments(frame[time])
        twice = frame.duplicated(keys)
        if bool(twice.any()):
            doubled = frame.loc[twice, keys].iloc[0].tolist()
            raise DataError(f"columns {keys} must differ in every row; found {doubled} twice")
    ids = None
    if sequence is None:
        ordered = frame if time is None else frame.sort_values(time, kind="stable")
        lengths = np.array([len(frame)])
    else:
        if frame[sequence].dtype == object:
            find_labels(frame[sequence])  # refuses 1 beside True, which are one key, and what is none
        code, distinct = pd.factorize(frame[sequence])
        ids = pd.Index(distinct)
        order = np.argsort(code, kind="stable") if time is None else np.lexsort((frame[time].to_numpy(), code))
        ordered = frame.iloc[order]
        lengths = np.bincount(code)
    return ordered.drop(columns=keys), _check_lengths(lengths, len(frame)), ids


def _moments(column: pd.Series) -> NDArray[Any]:
    """When steps were, by what their cells say: as text, 10 would come before 9, and May after April."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        if column.dtype.ordered:
            return column.cat.codes.to_numpy()
        column = column.astype(column.dtype.categories.dtype)
    if pd.api.types.infer_dtype(column) not in ("string", "mixed", "mixed-integer", "bytes"):
        return column.to_numpy()
    for read in (pd.to_numeric, partial(pd.to_datetime, format="ISO8601")):
        with contextlib.suppress(ValueError, TypeError):
            return np.asarray(read(column))
    found = as_label(column.iloc[0])
    raise DataError(
        f"column {column.name!r} must order the steps: numbers, days (as in 2020-12-31) or ordered categories; got "
        f"{found!r}"
    )


def _from_mapping(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], Lengths]:
    tables, lengths = {}, {}
    for node, value in data.items():
        array = to_numpy(value)
        tables[node], lengths[node] = _from_array(array if array.ndim > 1 else array[None], f"data[{node!r}]")
    if len({tuple(steps.tolist()) for steps in lengths.values()}) != 1:
        shapes = {node: np.shape(value) for node, value in data.items()}
        raise DataError(f"data must have the same sequences for every node; got shapes {shapes}")
    return tables, next(iter(lengths.values()))


def _from_list(data: Sequence[Any]) -> tuple[Table, Lengths]:
    if not data:
        raise DataError("data must hold at least one sequence; got none")
    data = [known_table(part) for part in data]
    if all(isinstance(part, pd.DataFrame) for part in data):
        for part in data:
            if set(part) != set(data[0]):
                raise DataError(
                    f"data must be frames of the same columns; got {listed(list(data[0]))} and {listed(list(part))}"
                )
        lengths = np.array([len(part) for part in data])
        return pd.concat(list(data), ignore_index=True), _check_lengths(lengths, int(lengths.sum()))
    parts = [np.asarray(to_numpy(part)) for part in data]
    if any(part.ndim == 0 for part in parts):
        parts = [np.asarray(data)]
    wide = [part[:, None] if part.ndim == 1 else part for part in parts]
    widths = {part.shape[1:] for part in wide}
    if len(widths) > 1 or any(part.ndim != 2 for part in wide):
        raise DataError(f"data must be arrays (steps,) or (steps, cells) of one width; got {[p.shape for p in parts]}")
    lengths = np.array([len(part) for part in wide])
    return np.concatenate(wide), _check_lengths(lengths, int(lengths.sum()))


def _from_array(array: NDArray[Any], name: str, *, split: bool = True) -> tuple[NDArray[Any], Lengths]:
    if not split:
        flat = array[:, None] if array.ndim == 1 else array
        return flat, np.array([len(flat)])
    if array.ndim == 1:
        array = array[None]
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3:
        raise DataError(f"{name} must have shape (sequences, steps) or (sequences, steps, cells); got {array.shape}")
    count, steps, cells = array.shape
    return array.reshape(count * steps, cells), _check_lengths(np.full(count, steps), count * steps)


def _check_lengths(lengths: ArrayLike, rows: int) -> Lengths:
    counts = np.atleast_1d(np.asarray(lengths))
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts < 1).any() or not len(counts):
        raise DataError(f"lengths must be whole numbers of at least 1, one for each sequence; got {lengths!r:.60}")
    if int(counts.sum()) != rows:
        raise DataError(f"lengths must add up to the number of steps, {rows}; they add up to {int(counts.sum())}")
    return counts.astype(np.int64)
