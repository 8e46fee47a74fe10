"""Posteriors, filled cells and log-likelihoods of a table in files, block by block into another file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from otpdag.data import Partitioned
from otpdag.data.partitioned import ArrowParts, arrow_dataset, is_dask
from otpdag.errors import DataError, ModelError
from otpdag.files import replacing
from otpdag.inference import row_posterior
from otpdag.model.model import Model

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["impute_to", "posterior_to", "score_to"]

BLOCK_DRAWS = 2**21
"""Rows times draws that are held at a time."""


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
    cells = 0

    def filled(frame: pd.DataFrame, number: int) -> pd.DataFrame:
        nonlocal cells
        made = model.impute(frame, seed=seed + number, draws=draws, random=random)
        cells += int((frame[made.columns].isna() & made.notna()).to_numpy().sum())
        return frame.assign(**{str(name): made[name] for name in made})

    _written(_blocks(model, data, 1 if random else draws), filled, out)
    return cells


def posterior_to(model: Model, data: Any, out: str | Path, *, draws: int = 100, seed: int = 0) -> int:
    """Draw the hidden nodes of every row of a table in files, as :meth:`Model.posterior` does, into a Parquet file.

    The columns ``row``, counted over the whole table, and ``draw`` come first. Arguments are those of
    :func:`impute_to`.

    Returns:
        The number of rows of the table.
    """
    rows = 0

    def drawn(frame: pd.DataFrame, number: int) -> pd.DataFrame:
        nonlocal rows
        frame.index = pd.RangeIndex(rows, rows + len(frame))
        rows += len(frame)
        return model.posterior(frame, draws=draws, seed=seed + number).reset_index()

    _written(_blocks(model, data, draws), drawn, out)
    return rows


def score_to(model: Model, data: Any, out: str | Path) -> float:
    """Write the log-likelihood of every row of a table in files to a Parquet file, in the order of the rows.

    Returns:
        Their mean, as :meth:`Model.score` with ``kind="likelihood"`` has it.
    """
    total, rows = 0.0, 0

    def scored(frame: pd.DataFrame, number: int) -> pd.DataFrame:
        nonlocal total, rows
        losses = row_posterior.log_likelihood(model.fitted, model._encode_partial(frame)).numpy()
        total, rows = total + float(losses.sum()), rows + len(frame)
        return pd.DataFrame({"log_likelihood": losses.reshape(-1)})

    _written(_blocks(model, data, 1), scored, out)
    return total / rows


def _blocks(model: Model, data: Any, draws: int) -> ArrowParts:
    """The table in blocks, small enough for so many draws of each row."""
    if model.graph.is_dynamic:
        raise ModelError("rows of sequences depend on each other: read the table, and use the method of the model")
    table = data if isinstance(data, Partitioned) else Partitioned(data)
    if is_dask(table.data):
        raise DataError("a Dask frame has its own way: frame.map_partitions(model.impute), and so on")
    rows = max(1, min(table.block_rows, BLOCK_DRAWS // draws))
    return ArrowParts(arrow_dataset(table.data), rows)


def _written(parts: ArrowParts, work: Callable[[pd.DataFrame, int], pd.DataFrame], out: str | Path) -> None:
    """What becomes of each block, written to a file that appears when it is complete."""
    import pyarrow.parquet as pq

    blocks = _tables(parts.each(work), parts.dataset.schema)
    first = next(blocks, None)
    if first is None:
        raise DataError("data must have at least 1 row; the dataset has 0")
    with replacing(out) as file, pq.ParquetWriter(file, first.schema) as writer:
        writer.write_table(first)
        for table in blocks:
            writer.write_table(table)


def _tables(frames: Iterator[pd.DataFrame], known: pa.Schema) -> Iterator[pa.Table]:
    """Frames as tables of one schema: that of the first, or of the file for columns of which it shows nothing."""
    import pyarrow as pa

    schema = None
    for frame in frames:
        if schema is None:
            fields = pa.Schema.from_pandas(frame, preserve_index=False).remove_metadata()
            empty = [field.name for field in fields if pa.types.is_null(field.type) and field.name in known.names]
            schema = pa.schema([known.field(one.name) if one.name in empty else one for one in fields])
        yield pa.Table.from_pandas(frame, schema=schema, preserve_index=False)
