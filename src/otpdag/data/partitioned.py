"""Tables that need not fit into memory: Parquet files, Arrow datasets and Dask frames, read part by part.

Parts stay where they are: work goes to them, results come back. What is made of a partition of a Dask frame stays on a
worker as a future. The scheduler knows how each came about, so that what a worker takes with it when it dies is made
again on another.
"""

from __future__ import annotations

import glob
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pandas as pd

from otpdag.errors import DataError, OtpdagError, listed
from otpdag.numerics import in_order

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as pds
    from distributed import Client, Future


Work: TypeAlias = Callable[..., Any]
"""Called as ``work(part, number, *arguments)``; where parts are elsewhere, it must be a function that can be sent."""

Step: TypeAlias = tuple[Work, tuple[Any, ...]]
"""Work and its arguments."""


class Parts(ABC):
    """Parts in a fixed order, numbered from zero."""

    @abstractmethod
    def each(self, work: Work, *arguments: Any) -> Iterator[Any]:
        """What ``work`` returns for every part, in their order."""

    @abstractmethod
    def mapped(self, work: Work, *arguments: Any, keep: bool) -> Parts:
        """The parts after some work: kept where they are or, to save memory, made anew whenever they are asked for."""

    @abstractmethod
    def only(self, numbers: Sequence[int]) -> Parts:
        """These parts, numbered anew in their order."""

    def with_columns(self, names: Sequence[str], *, coded: bool = False) -> Parts:
        """The same with these columns only, where reading fewer costs less; ``coded`` allows categories for text."""
        return self


class LocalParts(Parts):
    """Parts that are made one after another in this process, and worked on by the threads that a fit may use.

    >>> numbers = LocalParts(lambda: iter([1, 2, 3]))
    >>> list(numbers.mapped(lambda part, number: 10 * part, keep=True).each(lambda part, number, more: part + more, 5))
    [15, 25, 35]
    """

    def __init__(self, made: Callable[[], Iterator[Any]], works: tuple[Step, ...] = ()) -> None:
        self.made, self.works = made, works

    def each(self, work: Work, *arguments: Any) -> Iterator[Any]:
        """In their order; only as many parts are held at a time as there are threads, and one more."""
        works = (*self.works, (work, arguments))
        return in_order(partial(_through, works, part, number) for number, part in enumerate(self.made()))

    def mapped(self, work: Work, *arguments: Any, keep: bool) -> LocalParts:
        """Kept from the first pass on, or made anew in every pass."""
        if not keep:
            return LocalParts(self.made, (*self.works, (work, arguments)))
        return LocalParts(_Kept(lambda: self.each(work, *arguments)))

    def only(self, numbers: Sequence[int]) -> LocalParts:
        """Others are made, and dropped.

        >>> list(LocalParts(lambda: iter("abc")).only([0, 2]).each(lambda part, number: (part, number)))
        [('a', 0), ('c', 1)]
        """
        wanted = frozenset(numbers)
        return LocalParts(lambda: (part for at, part in enumerate(self.made()) if at in wanted), self.works)


def _through(works: Sequence[Step], part: Any, number: int) -> Any:
    """One part after all work on it."""
    for work, arguments in works:
        part = work(part, number, *arguments)
    return part


class _Kept:
    """Makes parts once, when they are first asked for."""

    def __init__(self, made: Callable[[], Iterator[Any]]) -> None:
        self.made = made
        self.parts: list[Any] | None = None

    def __call__(self) -> Iterator[Any]:
        if self.parts is None:
            self.parts = list(self.made())
        return iter(self.parts)


def dask_parts(frame: Any) -> Parts:
    """The partitions of a Dask frame, in their order."""
    client = _current_client()
    if client is None:
        return LocalParts(lambda: (one.compute(scheduler="synchronous") for one in frame.to_delayed()))
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
        for name in ("block_rows", "held_rows"):
            if getattr(self, name) < 2:
                raise DataError(f"{name} must be at least 2; got {getattr(self, name)}")
        if self.memory < 0:
            raise DataError(f"memory must not be negative; got {self.memory}")

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
    try:
        schemas = [pds.dataset(path, format=form).schema for path in paths]
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"path {str(data)!r} holds a file that is not {form}: {error}") from None
    _check_alike(paths, schemas)
    try:
        schema = _one_schema([one.remove_metadata() for one in schemas])
    except pa.ArrowTypeError as error:
        raise DataError(f"the files of {str(data)!r} differ in the type of a column: {error}") from None
    if not _has_named_folders(paths, Path(data)):
        return pds.dataset(paths, schema=schema, format=form)
    named = pds.dataset(paths, format=form, partitioning="hive", partition_base_dir=str(data)).schema
    folders = [field for field in named if field.name not in schema.names]
    flavour = pds.partitioning(pa.schema(folders), flavor="hive")
    whole = pa.schema([*schema, *folders])
    return pds.dataset(paths, schema=whole, format=form, partitioning=flavour, partition_base_dir=str(data))


def _has_named_folders(paths: Sequence[str], folder: Path) -> bool:
    """Whether files lie in folders named ``column=value``, as pandas, Spark and Dask write them: a column more."""
    if not folder.is_dir():
        return False
    return any("=" in part for path in paths for part in Path(path).relative_to(folder).parts[:-1])


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
    path = Path(data)
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
        try:
            yield from self.dataset.to_batches(columns=self.columns, batch_size=self.block_rows, **ahead)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"the dataset cannot be read: {error}") from None

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
