"""Posteriors, filled cells and log-likelihoods of a table in files, block by block into another file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from otpdag.data import Partitioned
from otpdag.data.parts import ArrowParts, arrow_dataset, is_dask
from otpdag.errors import DataError, ModelError, check_count
from otpdag.files import replacing
from otpdag.likelihood import row_posterior
from otpdag.model.model import Model
from otpdag.progress import shown_while_running

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as pds


def impute_to(
    model: Model, data: Any, out: str | Path, *, seed: int = 0, draws: int = 100, random: bool = False
) -> int:
    """Fill missing cells of a table in files, as :meth:`Model.impute` does, into a Parquet file.

    Columns that belong to no node stay as they are. Block ``k`` is drawn with seed ``seed + k``, so that the result
    depends on the size of blocks, which is that of ``otp.Partitioned(data, block_rows=...)``.

    Args:
        model: A fitted model.
        data: A Parquet file, folder or pattern, an Arrow dataset, or a :class:`~otpdag.Partitioned`.
        out: The file to write; it appears when it is complete.
        seed: Determines the draws.
        draws: Draws that the mean is taken over.
        random: Fill with one draw instead, as multiple imputation asks for.

    Returns:
        The number of cells that were filled.
    """
    parts = _blocks(model, data, 1 if random else check_count("draws", draws))
    types = _types_of_filled(model, parts.dataset)

    def filled(table: pa.Table, frame: pd.DataFrame, number: int, _first: int) -> tuple[pa.Table, int]:
        cells = 0
        made = model.impute(frame, seed=seed + number, draws=draws, random=random)
        for name in types.names:
            cells += int((frame[name].isna() & made[name].notna()).sum())
            table = table.set_column(table.schema.get_field_index(name), types.field(name), _cells(made[name], types))
        return table, cells

    return int(_worked_on(parts, filled, out)[0])


def _types_of_filled(model: Model, dataset: pds.Dataset) -> pa.Schema:
    """Types of the model's columns: those of the file, but whole numbers with gaps, whose means are fractions."""
    import pyarrow as pa
    import pyarrow.compute as pc

    fields, schema = [], model._known_schema()
    for node in (node for node in model.graph.nodes if node not in model.graph.hidden):
        for name in (name for name in schema[node].names if name in dataset.schema.names):
            field = dataset.schema.field(name).with_nullable(True)
            counted = pa.types.is_integer(field.type) and not model.spaces[node].is_discrete
            has_gaps = counted and dataset.count_rows(filter=pc.field(name).is_null()) > 0
            fields.append(field.with_type(pa.float64()) if has_gaps else field)
    return pa.schema(fields)


def _cells(column: pd.Series, types: pa.Schema) -> pa.ChunkedArray:
    """A filled column of the type that all blocks have; labels are numbers in pandas where a column has gaps."""
    import pyarrow as pa

    kind = types.field(str(column.name)).type
    plain = column.astype(object) if isinstance(column.dtype, pd.CategoricalDtype) else column
    array = pa.array(plain, from_pandas=True)
    return pa.chunked_array([array.dictionary_encode() if pa.types.is_dictionary(kind) else array]).cast(kind)


def posterior_to(model: Model, data: Any, out: str | Path, *, draws: int = 100, seed: int = 0) -> int:
    """Draw the hidden nodes of every row of a table in files, as :meth:`Model.posterior` does, into a Parquet file.

    The columns ``row``, counted over the whole table, and ``draw`` come first. Arguments are those of
    :func:`impute_to`.

    Returns:
        The number of rows of the table.
    """

    def drawn(_table: pa.Table, frame: pd.DataFrame, number: int, first: int) -> tuple[pa.Table, int]:
        frame.index = pd.RangeIndex(first, first + len(frame))
        return _as_table(model.posterior(frame, draws=draws, seed=seed + number).reset_index()), 0

    return _worked_on(_blocks(model, data, check_count("draws", draws)), drawn, out)[1]


def score_to(model: Model, data: Any, out: str | Path) -> float:
    """Write the log-likelihood of every row of a table in files to a Parquet file, in the order of the rows.

    Returns:
        Their mean, as :meth:`Model.score` with ``kind="likelihood"`` has it.
    """

    def scored(_table: pa.Table, frame: pd.DataFrame, _number: int, _first: int) -> tuple[pa.Table, float]:
        losses = row_posterior.log_likelihood(model.fitted, model._encode_partial(frame)).numpy()
        return _as_table(pd.DataFrame({"log_likelihood": losses.reshape(-1)})), float(losses.sum())

    total, rows = _worked_on(_blocks(model, data, 1), scored, out)
    return total / rows


def _blocks(model: Model, data: Any, draws: int, most: int = 2**21) -> ArrowParts:
    """The table in blocks, so small that at most so many draws of all rows together are held at a time."""
    if not isinstance(model, Model):
        raise ModelError(f"model must be an otp.Model, and comes before the data; got {type(model).__name__}")
    if model.graph.is_dynamic or model.structure.shared:
        raise ModelError("rows of sequences and groups depend on each other: read the table, and ask the model")
    table = data if isinstance(data, Partitioned) else Partitioned(data)
    if is_dask(table.data):
        raise DataError("a Dask frame has its own way, frame.map_partitions with model.impute: see docs/scale.md")
    rows = max(1, min(table.block_rows, most // draws))
    return ArrowParts(arrow_dataset(table.data), rows)


def _worked_on(
    parts: ArrowParts, work: Callable[[pa.Table, pd.DataFrame, int, int], tuple[pa.Table, float]], out: str | Path
) -> tuple[float, int]:
    """Write what becomes of each block, by its number and its first row, to a file that appears when it is complete.

    Errors that name a row say which block they count in.

    Returns:
        The sum of a number of each block, and how many rows there are.
    """
    import pyarrow.parquet as pq

    total, first = 0.0, 0
    with ExitStack() as opened:
        writer: pq.ParquetWriter | None = None
        for number, table in enumerate(shown_while_running(parts.tables(), "blocks")):
            try:
                made, own = work(table, parts.frame(table), number, first)
            except DataError as error:
                raise DataError(f"{error} (counted from row {first} of the table)" if first else str(error)) from None
            if writer is None:
                writer = opened.enter_context(pq.ParquetWriter(opened.enter_context(replacing(out)), made.schema))
            writer.write_table(made.cast(writer.schema))
            total, first = total + own, first + table.num_rows
        if writer is None:
            raise DataError("data must have at least 1 row; the dataset has 0")
    return total, first


def _as_table(frame: pd.DataFrame) -> pa.Table:
    import pyarrow as pa

    return pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata()
