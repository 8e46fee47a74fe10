"""What is known of a table in parts after passes over it: labels, numbers of rows, cells in a compact form, a sample.

A first pass reads the columns of categories and weights alone, since labels and the mean weight are those of the whole
table. Every later pass checks and encodes one part at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from otpdag.data.batch import Batch, random_part, unique_rows
from otpdag.data.partitioned import Partitioned, Parts
from otpdag.data.reading import Column, check_seen, check_unseen
from otpdag.data.schema import Schema
from otpdag.data.table import LARGEST, check_weights, encode, refuse_empty
from otpdag.errors import DataError, listed
from otpdag.graph import Graph
from otpdag.spaces import Discrete, Space

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Reading:
    """How a part becomes a batch, the same for all: what goes with the work to wherever the part is.

    Attributes:
        schema: What columns mean.
        hidden: Nodes that no column holds.
        starts: Number of the first row of each part.
        weight_column: The column of weights, if there is one.
        unit: By what weights are multiplied, so that their mean over the whole table is one.
        weights: Weights of all rows, if they were given by themselves.
    """

    schema: Schema
    hidden: frozenset[str]
    starts: tuple[int, ...]
    weight_column: str | None = None
    unit: float = 1.0
    weights: Floats | None = None

    def batch(self, frame: pd.DataFrame, number: int, rows: npt.NDArray[np.int64] | None = None) -> Batch:
        """Check and encode a part, or these of its rows."""
        first = self.starts[number]
        frame = frame if rows is None else frame.iloc[rows]
        try:
            batch = encode(frame, self.schema, hidden=self.hidden, partial=True, largest=LARGEST)
        except DataError as error:
            raise DataError(f"{error} (counted from row {first} of the table)") from None
        if self.weight_column is None and self.weights is None:
            return batch
        if self.weights is None:
            own = _weights_of(frame, self.weight_column)
        else:
            own = self.weights[first : first + batch.rows] if rows is None else self.weights[first + rows]
        return replace(batch, weight=torch.from_numpy(self.unit * own)[None])


@dataclass(frozen=True)
class PartTable:
    """A table in parts that was looked through.

    Attributes:
        parts: The parts as frames, with the columns of the model.
        reading: How they become batches.
        rows: Rows of all parts.
        elsewhere: Whether parts are on other machines, which then keep what is made of them.
        sample: Random rows.
        seen: For each node in how many rows each of its cells is seen.
        largest: For each node the largest value of any coordinate.
    """

    parts: Parts
    reading: Reading
    rows: int
    elsewhere: bool
    sample: Batch
    seen: Mapping[str, npt.NDArray[np.int64]]
    largest: Mapping[str, float]

    def picked(self, rows: Tensor) -> Batch:
        """These rows of the table, all different, in the order of their numbers (n,): one pass over all parts."""
        order, taken = rows.argsort(), 0
        picked = _empty_like(self.sample, len(rows))
        for part in self.parts.each(_picked_rows, self.reading, rows[order].numpy()):
            _put(picked, order[taken : taken + part.rows], part)
            taken += part.rows
        return picked

    def distinct(self, most: int = 100_000) -> Batch | None:
        """All rows, those that agree as one with their weight; None if more than so many differ."""
        held: Batch | None = None
        for part in self.parts.each(_distinct_part, self.reading):
            held = part if held is None else unique_rows(Batch.join([held, part]), shrink=1.0)
            if held.rows > most:
                return None
        return held


def open_table(
    table: Partitioned,
    spaces: Mapping[str, Space],
    graph: Graph,
    *,
    weights: npt.ArrayLike | Tensor | str | None = None,
) -> PartTable | tuple[pd.DataFrame, Any]:
    """Look through a table in parts; one that has few rows comes back whole, as a frame with its weights.

    Raises:
        DataError: A column is missing, holds what it should not, or there are no rows.
    """
    parts, names, elsewhere = table.opened()
    plain = Schema.of(spaces, graph)
    observed = [node for node in graph.nodes if node not in graph.hidden]
    _check_names(plain, observed, graph, names, weights)
    wanted = [name for node in observed for name in plain[node].names]
    column = weights if isinstance(weights, str) else None
    wanted += [column] if column is not None and column not in wanted else []
    categories = [node for node in observed if isinstance(spaces[node], Discrete)]
    few = [name for node in categories for name in plain[node].names]
    few = list(dict.fromkeys([*few, *([column] if column else [])])) or wanted[:1]
    first = list(parts.with_columns(few).each(_first_look, {node: plain[node] for node in categories}, column))
    counts = [look.rows for look in first]
    rows = sum(counts)
    if rows < 2:
        raise DataError(f"data must have at least 2 rows; the dataset has {rows}")
    if rows <= table.held_rows:
        frame = pd.concat(list(parts.with_columns(wanted).each(_only, wanted)), ignore_index=True)
        return frame.drop(columns=[column] if column else []), frame[column] if column else weights
    levels = {node: _all_levels([look.levels[node] for look in first]) for node in categories}
    filled = [number for number, count in enumerate(counts) if count]  # filters leave partitions empty
    counts = [counts[number] for number in filled]
    starts = tuple(int(start) for start in np.cumsum([0, *counts[:-1]]))
    given = None if weights is None or column else _given_weights(weights, rows)
    total = sum(look.weight for look in first) if given is None else float(given.sum())
    if total == 0:
        raise DataError("weights must not all be 0; found only zeros")
    if not np.isfinite(total) or not np.isfinite(rows / total):
        raise DataError(f"weights must have a mean that a number can hold; their sum over all rows is {total:g}")
    schema = Schema.of_levels(spaces, graph, levels)
    reading = Reading(schema, frozenset(graph.hidden), starts, column, rows / total, given)
    parts = parts.with_columns(wanted, coded=True)
    if len(filled) < len(first):
        parts = parts.only(filled)
    if elsewhere:
        parts = parts.mapped(_only, wanted, keep=True)
    return _sampled(parts, reading, rows, elsewhere, observed, table)


def _sampled(
    parts: Parts, reading: Reading, rows: int, elsewhere: bool, observed: Sequence[str], table: Partitioned
) -> PartTable:
    """Check every part, and take the rows that are held."""
    chosen = random_part(rows, table.held_rows, table.seed)
    assert chosen is not None, "the table has more rows than are held"
    order = chosen.argsort()
    sample: Batch | None = None
    seen: dict[str, npt.NDArray[np.int64]] = {}
    largest: dict[str, float] = {}
    for look in parts.each(_second_look, reading, chosen[order].numpy()):
        if sample is None:  # all of it at once: many small pieces that stay would keep memory from being given back
            sample = _empty_like(look.sample, len(chosen))
        _put(sample, order[look.begin : look.begin + look.sample.rows], look.sample)
        for node in observed:
            seen[node] = look.seen[node] + seen.get(node, 0)
            largest[node] = max(look.largest[node], largest.get(node, -np.inf))
    assert sample is not None, "there are rows"
    for node, counts in seen.items():
        if (counts == 0).any():
            refuse_empty(node, reading.schema[node].names[int((counts == 0).argmax())], rows)
    return PartTable(parts, reading, rows, elsewhere, sample, seen, largest)


def _empty_like(batch: Batch, rows: int) -> Batch:
    def empty(tensor: Tensor) -> Tensor:
        return tensor.new_zeros(1, rows, *tensor.shape[2:])

    values = {node: empty(value) for node, value in batch.values.items()}
    return Batch(values, {node: empty(mask) for node, mask in batch.mask.items()}, empty(batch.weight))


def _put(batch: Batch, places: Tensor, rows: Batch) -> None:
    """Write rows to their places."""
    batch.weight[:, places] = rows.weight
    for node in batch.nodes:
        batch.values[node][:, places] = rows.values[node]
        batch.mask[node][:, places] = rows.mask[node]


# -- work that is done where a part is ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FirstLook:
    rows: int
    levels: dict[str, pd.Series[Any]]
    weight: float


@dataclass(frozen=True)
class _SecondLook:
    begin: int
    """How many chosen rows are in parts before."""
    sample: Batch
    seen: dict[str, npt.NDArray[np.int64]]
    largest: dict[str, float]


def _only(frame: pd.DataFrame, number: int, names: Sequence[str]) -> pd.DataFrame:
    return frame[list(names)]


def _first_look(
    frame: pd.DataFrame, number: int, categories: Mapping[str, Column], weight: str | None, most: int = 1_000
) -> _FirstLook:
    """Rows, distinct values of categories (no more than so many: more are refused anyway), and the total weight."""
    levels = {node: frame[column.names[0]].dropna().drop_duplicates() for node, column in categories.items()}
    total = float(len(frame)) if weight is None else float(_weights_of(frame, weight).sum())
    return _FirstLook(len(frame), {node: one.iloc[:most] for node, one in levels.items()}, total)


def _second_look(frame: pd.DataFrame, number: int, reading: Reading, chosen: npt.NDArray[np.int64]) -> _SecondLook:
    """Check a part; of the chosen rows of the table those that are in it."""
    batch = reading.batch(frame, number)
    first = reading.starts[number]
    begin, end = np.searchsorted(chosen, [first, first + batch.rows])
    return _SecondLook(
        int(begin),
        batch.take(torch.from_numpy(chosen[begin:end] - first)),
        {node: mask[0].sum(0).numpy() for node, mask in batch.mask.items()},
        {node: float(value.max()) for node, value in batch.values.items()},
    )


def _picked_rows(frame: pd.DataFrame, number: int, reading: Reading, chosen: npt.NDArray[np.int64]) -> Batch:
    """Of the chosen rows of the table those that are in a part."""
    first = reading.starts[number]
    begin, end = np.searchsorted(chosen, [first, first + len(frame)])
    return reading.batch(frame, number, chosen[begin:end] - first)


def _distinct_part(frame: pd.DataFrame, number: int, reading: Reading) -> Batch:
    return unique_rows(reading.batch(frame, number), shrink=1.0)


def _weights_of(frame: pd.DataFrame, column: str | None) -> Floats:
    series = frame[column]
    try:
        own = series.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError):
        raise DataError(f"weights must be numbers; column {column!r} holds {series.iloc[0]!r}") from None
    check_weights(own, f"column {column!r}")
    return own


# -- parts put together ------------------------------------------------------------------------------------------------


def _all_levels(parts: Sequence[pd.Series[Any]]) -> pd.Series[Any]:
    """Distinct values of a column; categories of pandas stay such, in the order in which they are first met."""
    if all(isinstance(one.dtype, pd.CategoricalDtype) for one in parts):
        categories = list(dict.fromkeys(value for one in parts for value in one.cat.categories))
        values = list(dict.fromkeys(value for one in parts for value in one))
        return pd.Series(pd.Categorical(values, categories=categories))
    shown = [one.astype(object) if isinstance(one.dtype, pd.CategoricalDtype) else one for one in parts if len(one)]
    return pd.concat(shown, ignore_index=True).drop_duplicates() if shown else pd.Series(dtype=np.float64)


def _given_weights(weights: npt.ArrayLike | Tensor | str, rows: int) -> Floats:
    array = np.asarray(weights, dtype=np.float64)
    if array.shape != (rows,):
        raise DataError(
            f"weights must be the name of a column or one number for each of the {rows} rows; got shape {array.shape}"
        )
    check_weights(array)
    return array


def _check_names(schema: Schema, observed: Sequence[str], graph: Graph, names: Sequence[str], weights: object) -> None:
    """Refuse a table that lacks a column, or shows one of a hidden node."""
    for node in observed:
        check_seen(names, node, schema[node], "dataset")
    for node in graph.hidden:
        check_unseen(names, node, schema[node], "dataset")
    if isinstance(weights, str) and weights not in names:
        raise DataError(f"weights must name a column of the dataset, {listed(list(names))}; got {weights!r}")
