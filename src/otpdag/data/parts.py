"""Tables in files: read whole or, where they need not fit into memory, part by part (Parquet, Arrow, Dask).

Parts stay where they are: work goes to them, results come back. What is made of a partition of a Dask frame stays on a
worker as a future. The scheduler knows how each came about, so that what a worker takes with it when it dies is made
again on another.

A first pass over a table in parts reads the columns of categories and weights alone, since labels and the mean weight
are those of the whole table. Every later pass checks and encodes one part at a time.
"""

from __future__ import annotations

import glob
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from pandas.api.types import union_categoricals
from torch import Tensor

from otpdag.data.batch import Batch, random_part, unique_rows
from otpdag.data.columns import Column, Floats, Schema, aligned, as_numbers, to_numpy
from otpdag.data.table import LARGEST, check_seen, check_unseen, check_weights, read_cells, read_weights, refuse_empty
from otpdag.errors import DataError, OtpdagError, check_count, listed, told_as
from otpdag.files import as_path
from otpdag.graph import Graph
from otpdag.numerics import Ints, in_order
from otpdag.spaces import Discrete, Space

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as pds
    from distributed import Client, Future


def table_bytes(table: pd.DataFrame, path: Path) -> bytes:
    """What a file of this name holds of a table."""
    if path.suffix != ".parquet":
        text: str = table.to_csv(sep="\t" if path.suffix == ".tsv" else ",", index=False, lineterminator="\n")
        return text.encode("utf-8")
    buffer = io.BytesIO()
    try:
        table.to_parquet(buffer, index=False)
    except ImportError:
        raise DataError(f"{str(path)!r} needs the package pyarrow: pip install pyarrow") from None
    return buffer.getvalue()


# -- parts, wherever they are ------------------------------------------------------------------------------------------

# called as `work(part, number, *arguments)`; where parts are elsewhere, it must be a function that can be sent
Work: TypeAlias = Callable[..., Any]


class Parts(ABC):
    """Parts in a fixed order, numbered from zero."""

    @abstractmethod
    def each(self, work: Work, *arguments: Any) -> Iterator[Any]:
        """What ``work`` returns for every part, in their order."""

    @abstractmethod
    def mapped(self, work: Work, *arguments: Any, keep: bool) -> Parts:
        """The parts after some work: kept where they are or, to save memory, made anew whenever they are asked for."""

    def only(self, numbers: Sequence[int]) -> Parts:
        """These parts, numbered anew in their order: those that hold rows."""
        return self

    def with_columns(self, names: Sequence[str], *, coded: bool = False) -> Parts:
        """The same with these columns only, where reading fewer costs less; ``coded`` allows categories for text."""
        return self


class LocalParts(Parts):
    """Parts that are made one after another in this process, and worked on by the threads that a fit may use.

    >>> numbers = LocalParts(lambda: iter([1, 2, 3]))
    >>> list(numbers.mapped(lambda part, number: 10 * part, keep=True).each(lambda part, number, more: part + more, 5))
    [15, 25, 35]
    """

    def __init__(self, made: Callable[[], Iterable[Any]]) -> None:
        self.made = made

    def each(self, work: Work, *arguments: Any) -> Iterator[Any]:
        """In their order; only as many parts are held at a time as there are threads, and one more."""
        return in_order(partial(work, part, number, *arguments) for number, part in enumerate(self.made()))

    def mapped(self, work: Work, *arguments: Any, keep: bool) -> LocalParts:
        """Kept from the first pass on, or made anew in every pass."""
        made = partial(self.each, work, *arguments)
        return LocalParts(cache(lambda: list(made())) if keep else made)


def dask_parts(frame: Any) -> Parts:
    """The partitions of a Dask frame, in their order."""
    client = _current_client()
    if client is None:
        computed = partial(map, methodcaller("compute", scheduler="synchronous"))
        return LocalParts(lambda: filter(len, computed(frame.to_delayed())))  # filters leave partitions empty
    futures = client.compute(frame.to_delayed())
    return DaskParts(client, list(futures))


def _current_client() -> Client | None:
    try:
        from distributed import default_client
    except ImportError:
        return None
    try:
        return default_client()
    except ValueError:  # there is none
        return None


class DaskParts(Parts):
    """Futures of parts; work is sent to where they are."""

    def __init__(self, client: Client, futures: Sequence[Future]) -> None:
        self.client, self.futures = client, list(futures)

    def each(self, work: Work, *arguments: Any) -> Iterator[Any]:
        """All at once; results come in the order of the parts."""
        results = self._sent(work, arguments)
        try:
            yield from self.client.gather(results)
        except OtpdagError:
            raise
        except Exception as error:
            raise DataError(f"a partition could not be worked on: {type(error).__name__}: {error}") from error

    def mapped(self, work: Work, *arguments: Any, keep: bool) -> DaskParts:
        """Kept by the workers, whatever ``keep`` says: only they know their memory."""
        return DaskParts(self.client, self._sent(work, arguments))

    def only(self, numbers: Sequence[int]) -> DaskParts:
        """The futures of these."""
        return DaskParts(self.client, [self.futures[number] for number in numbers])

    def _sent(self, work: Work, arguments: tuple[Any, ...]) -> list[Future]:
        return [
            self.client.submit(work, part, number, *arguments, pure=False) for number, part in enumerate(self.futures)
        ]


# -- files and datasets -----------------------------------------------------------------------------------------------

SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".arrow": "feather", ".feather": "feather"}


@dataclass(frozen=True)
class Partitioned:
    """A table in parts, with how much of it may be held.

    A plain path, folder, pattern, Arrow dataset or Dask frame is taken for one with these defaults.

    Args:
        data: The path of a Parquet or Arrow file, of a folder of them, or a pattern such as ``"sales/*.parquet"``; a
            ``pyarrow.dataset.Dataset``; or a ``dask.dataframe.DataFrame``.
        block_rows: Rows of a file that are read at a time; a Dask frame keeps its partitions.
        held_rows: Random rows that are held: a search begins with them. A table of no more rows is read whole.
        memory: Bytes of a file's table that may be kept between passes; what does not fit is read again.
        seed: Determines which rows are held.
    """

    data: Any
    block_rows: int = 2**16
    held_rows: int = 50_000
    memory: int = 2**29
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that hold nothing."""
        for name, least in (("block_rows", 2), ("held_rows", 2), ("memory", 0)):
            check_count(name, getattr(self, name), least)

    def opened(self) -> tuple[Parts, tuple[str, ...], bool]:
        """The parts as frames, the names of their columns, and whether they are on other machines."""
        if is_dask(self.data):
            return dask_parts(self.data), tuple(map(str, self.data.columns)), True
        dataset = arrow_dataset(self.data)
        return ArrowParts(dataset, self.block_rows), tuple(dataset.schema.names), False


def is_partitioned(data: object) -> bool:
    """Whether data are a path, an Arrow dataset, a Dask frame or a :class:`Partitioned`."""
    return isinstance(data, str | Path | Partitioned) or _is_arrow_dataset(data) or is_dask(data)


def is_dask(data: object) -> bool:
    """Whether data are a Dask frame, told without importing Dask."""
    return any(base.__module__.partition(".")[0] in ("dask", "dask_expr") for base in type(data).__mro__) and hasattr(
        data, "to_delayed"
    )


def _is_arrow_dataset(data: object) -> bool:
    return any(base.__module__ == "pyarrow._dataset" and base.__name__ == "Dataset" for base in type(data).__mro__)


def arrow_dataset(data: Any) -> pds.Dataset:
    """Open files as one dataset whose columns have one type each.

    Raises:
        DataError: There is no such file, files differ in their columns, or pyarrow is not installed.
    """
    if _is_arrow_dataset(data):
        return data
    if not isinstance(data, str | Path):
        raise DataError(f"data must be a path, an Arrow dataset or a Dask frame; got {type(data).__name__}")
    paths, form = _files(data)
    try:
        import pyarrow as pa
        import pyarrow.dataset as pds
    except ImportError:
        raise DataError(f"path {str(data)!r} needs the package pyarrow: pip install 'otpdag[parquet]'") from None
    with told_as(DataError, f"path {str(data)!r} holds a file that is not {form}", pa.ArrowInvalid, OSError):
        schemas = [pds.dataset(path, format=form).schema for path in paths]
    _check_alike(paths, schemas)
    with told_as(DataError, f"the files of {str(data)!r} differ in the type of a column", pa.ArrowTypeError):
        schema = _one_schema([one.remove_metadata() for one in schemas])
    # pandas, Spark and Dask name folders ``column=value``, which is a column more
    base = {"partitioning": "hive", "partition_base_dir": str(data)} if Path(data).is_dir() else {}
    named = pds.dataset(paths, format=form, **base).schema
    whole = pa.schema([*schema, *(field for field in named if field.name not in schema.names)])
    return pds.dataset(paths, schema=whole, format=form, **base)


def _one_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The types that serve all files; where one has text and another categories of text, text."""
    import pyarrow as pa

    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowTypeError:
        plain = [pa.schema([field.with_type(_decoded(field.type)) for field in one]) for one in schemas]
        return pa.unify_schemas(plain, promote_options="permissive")


def _decoded(kind: pa.DataType) -> pa.DataType:
    """The type of the values behind codes, text of any length as one."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.large_string() if pa.types.is_string(kind) else kind


def _files(data: str | Path) -> tuple[list[str], str]:
    """The files behind a path, a folder or a pattern, in the order of their names, and their format."""
    path = as_path(data)
    if path.is_dir():
        files = sorted(str(file) for file in path.rglob("*") if file.suffix in SUFFIXES and not _is_aside(file, path))
        where = f"folder {str(data)!r} must hold files"
    elif path.is_file():
        files, where = [str(path)], f"path {str(data)!r} must be a file"
    else:
        files = sorted(glob.glob(str(data), recursive=True))
        where = f"path {str(data)!r} must be a file, folder or pattern of files that exist,"
    odd = [file for file in files if Path(file).suffix not in SUFFIXES]
    if odd or not files:
        hint = "; read other files with pandas, for instance pd.read_csv" if odd or path.suffix not in SUFFIXES else ""
        raise DataError(f"{where} with one of the endings {', '.join(SUFFIXES)}; got {odd[0] if odd else 'none'}{hint}")
    forms = {SUFFIXES[Path(file).suffix] for file in files}
    if len(forms) > 1:
        raise DataError(f"path {str(data)!r} must hold files of one format; got {listed(sorted(forms))}")
    return files, forms.pop()


def _is_aside(file: Path, folder: Path) -> bool:
    """Whether a file is none of the table's: those that begin with a dot or an underscore are logs and unfinished."""
    return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _check_alike(paths: Sequence[str], schemas: Sequence[pa.Schema]) -> None:
    """Refuse files whose columns have other names: a column that a file lacks would be read as missing."""
    first = set(schemas[0].names)
    for path, schema in zip(paths, schemas, strict=True):
        odd = sorted(first ^ set(schema.names))
        if odd:
            lacking, having = (path, paths[0]) if odd[0] in first else (paths[0], path)
            raise DataError(f"files must have the same columns; {lacking!r} lacks {odd[0]!r}, which {having!r} has")


class ArrowParts(LocalParts):
    """Blocks of about equally many rows, read one after another."""

    def __init__(
        self, dataset: pds.Dataset, block_rows: int, columns: Sequence[str] | None = None, *, coded: bool = False
    ) -> None:
        super().__init__(self._blocks)
        self.dataset, self.block_rows, self.columns, self.coded = dataset, block_rows, columns, coded

    def with_columns(self, names: Sequence[str], *, coded: bool = False) -> ArrowParts:
        """Other columns are not read; text is read as categories in any order, many times faster, if ``coded``."""
        return ArrowParts(self.dataset, self.block_rows, list(names), coded=coded)

    def _blocks(self) -> Iterator[pd.DataFrame]:
        return map(self.frame, self.tables())

    def tables(self) -> Iterator[pa.Table]:
        """The blocks as Arrow has them."""
        import pyarrow as pa

        held: list[pa.RecordBatch] = []
        rows = 0
        for batch in self._batches():
            while rows + batch.num_rows >= self.block_rows:
                wanted = self.block_rows - rows
                yield pa.Table.from_batches([*held, batch.slice(0, wanted)])
                held, rows, batch = [], 0, batch.slice(wanted)
            if batch.num_rows:
                held.append(batch)
                rows += batch.num_rows
        if held:
            yield pa.Table.from_batches(held)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        import pyarrow.dataset as pds

        ahead: dict[str, Any] = {"batch_readahead": 1, "fragment_readahead": 1, "use_threads": False}
        if self._is_parquet:  # a stream of pages in place of whole groups of rows
            ahead["fragment_scan_options"] = pds.ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True)
        with told_as(DataError, "the dataset cannot be read", pa.ArrowInvalid, OSError):
            yield from self.dataset.to_batches(columns=self.columns, batch_size=self.block_rows, **ahead)

    @property
    def _is_parquet(self) -> bool:
        try:
            formats = {getattr(one, "format", None).__class__.__name__ for one in self.dataset.get_fragments()}
        except ValueError:  # of a dataset that is filtered nothing is told
            return False
        return formats == {"ParquetFileFormat"}

    def frame(self, table: pa.Table) -> pd.DataFrame:
        """A block as pandas has it."""
        frame: pd.DataFrame = table.to_pandas(
            ignore_metadata=True, split_blocks=True, strings_to_categorical=self.coded
        )
        return frame


# -- a table in parts that was looked through -------------------------------------------------------------------------


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

    def batch(self, frame: pd.DataFrame, number: int, rows: Ints | None = None) -> Batch:
        """Check and encode a part, or these of its rows."""
        first = self.starts[number]
        frame = frame if rows is None else frame.iloc[rows]
        try:
            batch = read_cells(frame, self.schema, hidden=self.hidden, partial=True, largest=LARGEST).batch()
        except DataError as error:
            raise DataError(f"{error} (counted from row {first} of the table)") from None
        if self.weight_column is None and self.weights is None:
            return batch
        if self.weights is None:
            own = weights_in(frame, self.weight_column)
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
    """

    parts: Parts
    reading: Reading
    rows: int
    elsewhere: bool
    sample: Batch
    seen: Mapping[str, Ints]

    def picked(self, rows: Tensor) -> Batch:
        """These rows of the table, all different, in the order of their numbers (n,): one pass over all parts."""
        order = rows.argsort()
        picked = list(self.parts.each(_picked_rows, self.reading, rows[order].numpy()))
        return Batch.join(picked).take(order.argsort())

    def distinct(self, most: int = 100_000) -> Batch | None:
        """All rows, those that agree as one with their weight; None if more than so many differ."""
        held: Batch | None = None
        for part in self.parts.each(_distinct_part, self.reading):
            held = part if held is None else unique_rows(Batch.join([held, part]), shrink=1.0)
            if held.rows > most:
                return None
        return held


def open_table(
    table: Partitioned, spaces: Mapping[str, Space], graph: Graph, *, weights: ArrayLike | str | None = None
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
    counts, shown, weight = zip(*first, strict=True) if first else ((), (), ())
    rows = sum(counts)
    if rows < 2:
        raise DataError(f"data must have at least 2 rows; the dataset has {rows}")
    weights = aligned(weights, pd.RangeIndex(rows), "weights")
    if rows <= table.held_rows:
        frame = pd.concat(list(parts.with_columns(wanted).each(_only, wanted)), ignore_index=True)
        return frame.drop(columns=[column] if column else []), frame[column] if column else weights
    levels = {node: _all_levels([levels[node] for levels in shown]) for node in categories}
    filled = [number for number, count in enumerate(counts) if count]  # filters leave partitions empty
    starts = tuple(int(start) for start in np.cumsum([0, *(counts[number] for number in filled[:-1])]))
    given = None if weights is None or column else read_weights(np.ravel(to_numpy(weights)), rows)[0]
    total = sum(weight) if given is None else float(rows)
    if total == 0:
        raise DataError("weights must not all be 0; found only zeros")
    if not np.isfinite(total) or not np.isfinite(rows / total):
        raise DataError(f"weights must have a mean that a number can hold; their sum over all rows is {total:g}")
    reading = Reading(plain.with_levels(levels), frozenset(graph.hidden), starts, column, rows / total, given)
    parts = parts.with_columns(wanted, coded=True)
    if elsewhere:
        parts = parts.only(filled).mapped(_only, wanted, keep=True)
    return _sampled(parts, reading, rows, elsewhere, observed, table)


def _sampled(
    parts: Parts, reading: Reading, rows: int, elsewhere: bool, observed: Sequence[str], table: Partitioned
) -> PartTable:
    """Check every part, and take the rows that are held."""
    chosen = random_part(rows, table.held_rows, table.seed)
    assert chosen is not None, "the table has more rows than are held"
    order = chosen.argsort()
    samples, seen_in = zip(*parts.each(_second_look, reading, chosen[order].numpy()), strict=True)
    seen = {node: np.sum([counts[node] for counts in seen_in], axis=0) for node in observed}
    for node, counts in seen.items():
        if (counts == 0).any():
            refuse_empty(node, reading.schema[node].names[int((counts == 0).argmax())], rows)
    sample = Batch.join(samples).take(order.argsort())
    return PartTable(parts, reading, rows, elsewhere, sample, seen)


# -- work that is done where a part is ---------------------------------------------------------------------------------


def _only(frame: pd.DataFrame, number: int, names: Sequence[str]) -> pd.DataFrame:
    return frame[list(names)]


def _first_look(
    frame: pd.DataFrame, number: int, categories: Mapping[str, Column], weight: str | None, most: int = 1_000
) -> tuple[int, dict[str, pd.Series[Any]], float]:
    """Rows, distinct values of categories (no more than so many: more are refused anyway), and the total weight."""
    levels = {node: frame[column.names[0]].dropna().drop_duplicates() for node, column in categories.items()}
    total = float(len(frame)) if weight is None else float(weights_in(frame, weight).sum())
    return len(frame), {node: one.iloc[:most] for node, one in levels.items()}, total


def _second_look(frame: pd.DataFrame, number: int, reading: Reading, chosen: Ints) -> tuple[Batch, dict[str, Ints]]:
    """Check a part; of the chosen rows those that are in it, and how many cells are seen."""
    batch = reading.batch(frame, number)
    first = reading.starts[number]
    begin, end = np.searchsorted(chosen, [first, first + batch.rows])
    seen = {node: mask[0].sum(0).numpy() for node, mask in batch.mask.items()}
    return batch.take(torch.from_numpy(chosen[begin:end] - first)), seen


def _picked_rows(frame: pd.DataFrame, number: int, reading: Reading, chosen: Ints) -> Batch:
    """Of the chosen rows of the table those that are in a part."""
    first = reading.starts[number]
    begin, end = np.searchsorted(chosen, [first, first + len(frame)])
    return reading.batch(frame, number, chosen[begin:end] - first)


def _distinct_part(frame: pd.DataFrame, number: int, reading: Reading) -> Batch:
    return unique_rows(reading.batch(frame, number), shrink=1.0)


def weights_in(frame: pd.DataFrame, column: str | None) -> Floats:
    """The weights that a column holds."""
    own = as_numbers(frame[column], f"column {column!r}", "numbers for weights")
    check_weights(own, f"column {column!r}")
    return own


# -- parts put together ------------------------------------------------------------------------------------------------


def _all_levels(parts: Sequence[pd.Series[Any]]) -> pd.Series[Any]:
    """Distinct values of a column; categories of pandas stay such, in the order in which they are first met."""
    if all(isinstance(one.dtype, pd.CategoricalDtype) for one in parts):
        return pd.Series(union_categoricals([one.array for one in parts], ignore_order=True))
    shown = [one.astype(object) if isinstance(one.dtype, pd.CategoricalDtype) else one for one in parts if len(one)]
    return pd.concat(shown, ignore_index=True).drop_duplicates() if shown else pd.Series(dtype=np.float64)


def _check_names(schema: Schema, observed: Sequence[str], graph: Graph, names: Sequence[str], weights: object) -> None:
    """Refuse a table that lacks a column, or shows one of a hidden node."""
    for node in observed:
        check_seen(names, node, schema[node], names, "dataset")
    for node in graph.hidden:
        check_unseen(names, node, schema[node], "dataset")
    if isinstance(weights, str) and weights not in names:
        raise DataError(f"weights must name a column of the dataset, {listed(list(names))}; got {weights!r}")
