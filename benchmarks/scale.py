"""Scale: growth in rows, files beyond memory beside a table in memory, and two worker processes beside one.

``rows_exponent`` is the slope of log time over log rows, from 10,000 to a million, of whole fits of a mixed table of
eight columns with 5 % gaps (limit 1.0), with the peak memory of the largest, its table included, over the table's own
(limit 4). ``parquet_rate`` is rows per second of a whole
fit in memory over those of a fit that keeps nothing of its file between passes (limit 1 / 0.7), with the peak memory of
the latter. ``dask_same`` is the largest difference of parameters between two worker processes and memory, in units of
1e-6 (limit 1). ``dask_rate`` is the time of two workers over that of one (limit 1 / 1.5, on two idle cores: on a busy
machine the figure says nothing, and the load average beside it tells). ``threads`` is the time of two threads over that
of one for a million rows in memory (limit 1, on two idle cores), with the largest difference of parameters. Seconds are
processor seconds of one thread, except those of ``dask_rate`` and ``threads``, which are by the wall clock.
"""

import math
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import otpdag as otp
from benchmarks.child import Done, in_child
from benchmarks.harness import Case, Record, Settings, Skip, streams
from otpdag import mechanisms as m
from otpdag.engine import Deterministic

GAPS = 0.05
QUICK_REPEATS = 5
FEW_ROWS, MANY_ROWS = 10_000, 1_000_000
MEGABYTE = 2**20
LONGEST = 3_000.0
BLOCK = 200_000
STARTS = 4


def rows_exponent(settings: Settings) -> Record:
    """Whole fits of 10,000 and of a million rows; memory counts from before the table is read."""
    few, large = (_fitted(settings.seed, rows) for rows in (FEW_ROWS, MANY_ROWS))
    table = large.value["bytes"]
    timed = _timed(large.value["seconds"], few.value["seconds"], MANY_ROWS)
    return {
        **timed,
        "ratio": math.log(timed["ratio"]) / math.log(MANY_ROWS / FEW_ROWS),
        "memory_over_table": (large.peak - large.base) / table,
        "table_mb": table / MEGABYTE,
    }


def parquet_rate(settings: Settings) -> Record:
    """The same rows in memory and from a file of which nothing is kept; full runs stream twenty million more."""
    quick = is_quick(settings)
    rows = MANY_ROWS // 4 if quick else MANY_ROWS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.parquet"
        write(path, settings.seed, rows)
        here = _fitted(settings.seed, rows)
        there = in_child(partial(_streamed, str(path)), seconds=LONGEST)
        path.unlink()
        beyond = 2 * MANY_ROWS if quick else 20 * MANY_ROWS
        write(path, settings.seed, beyond, extra=2)
        huge = in_child(partial(_streamed, str(path), steps=3), seconds=LONGEST)
    return {
        "ratio": there.value["seconds"] / here.value["seconds"],
        "ours": rows / there.value["seconds"],
        "oracle": rows / here.value["seconds"],
        "seconds": there.value["seconds"],
        "oracle_seconds": here.value["seconds"],
        "peak_mb": there.peak / MEGABYTE,
        "beyond_rows": beyond,
        "beyond_peak_mb": huge.peak / MEGABYTE,
        "beyond_base_mb": huge.base / MEGABYTE,
        "beyond_seconds": huge.value["seconds"],
        "difference": difference(there.value["params"], here.value["params"]),
    }


def dask_same(settings: Settings) -> Record:
    """Two worker processes beside memory, both to the end."""
    rows = 20_000
    tight = replace(otp.entropic(), optimiser=Deterministic(tolerance=1e-14))
    frame = next(tables(settings.seed, rows))
    here = otp.fit(mixed_model(), frame, method=tight, restarts=STARTS)
    begin = time.perf_counter()
    (there,) = _on_workers(2, frame, [partial(otp.fit, method=tight, restarts=STARTS)])
    gap = difference(there.model.params(), here.model.params())
    return {
        "ratio": gap / 1e-6,
        "ours": gap,
        "oracle": 1e-6,
        "rows": rows,
        "seconds": time.perf_counter() - begin,
        "oracle_seconds": here.seconds,
    }


def dask_rate(settings: Settings) -> Record:
    """The same fit by two worker processes and by one: the shortest of three, after one that is not counted."""
    rows = 100_000 if is_quick(settings) else MANY_ROWS
    frame = next(tables(settings.seed, rows))
    load = os.getloadavg()[0]
    fits = [partial(otp.fit, restarts=1)] * 4
    one, two = (min(fit.seconds for fit in _on_workers(workers, frame, fits)[1:]) for workers in (1, 2))
    return {**_timed(two, one, rows), "load_before": load, "cores": os.cpu_count()}


def threads(settings: Settings) -> Record:
    """The same fit of a million rows by two threads and by one."""
    load = os.getloadavg()[0]
    one, two = (_fitted(settings.seed, MANY_ROWS, threads=number).value for number in (1, 2))
    return {
        **_timed(two["wall"], one["wall"], MANY_ROWS),
        "processor_seconds": [one["seconds"], two["seconds"]],
        "load_before": load,
        "cores": os.cpu_count(),
        "difference": difference(two["params"], one["params"]),
    }


def _timed(ours: float, oracle: float, rows: int) -> Record:
    """A record whose figures are the seconds that two fits took."""
    return {
        "ratio": ours / oracle,
        "ours": ours,
        "oracle": oracle,
        "seconds": ours,
        "oracle_seconds": oracle,
        "rows": rows,
    }


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(seed: int, rows: int, extra: int = 0) -> Iterator[pd.DataFrame]:
    """The mixed table in blocks: categories, a count and numbers around a hidden class, with gaps."""
    for number, start in enumerate(range(0, rows, BLOCK if rows > MANY_ROWS else rows)):
        size = min(BLOCK, rows - start) if rows > MANY_ROWS else rows
        own = streams(seed, f"scale {rows}", number)
        yield _block(own.data, own.missing, size, extra)


def _block(rng: np.random.Generator, gaps: np.random.Generator, rows: int, extra: int) -> pd.DataFrame:
    z, place = rng.integers(0, 3, rows), rng.integers(0, 3, rows)
    x, y = rng.normal(np.array([-2.0, 0.0, 3.0])[z]), rng.normal(np.array([0.0, 2.0, 1.0])[z], 0.7)
    columns = {
        "place": np.array(["hill", "sea", "town"], dtype=object)[place],
        "answer": (rng.random(rows) < np.array([0.2, 0.5, 0.8])[z]).astype(float),
        "visits": rng.poisson(np.array([1.0, 4.0, 9.0])[z]).astype(float),
        "x": x,
        "y": y,
        "w": rng.normal(0.5 * x + place, 1.2),
        "v": rng.normal(-0.3 * y, 0.8),
        "u": rng.normal(np.array([1.0, 2.0, 0.0])[z]),
        **{f"e{number}": rng.normal(np.array([0.0, 1.0, 2.0])[z]) for number in range(extra)},
    }
    frame = pd.DataFrame(columns)
    for name in frame:
        frame.loc[gaps.random(rows) < GAPS, name] = None
    return frame


def write(path: Path, seed: int, rows: int, extra: int = 0) -> None:
    """The table as a Parquet file, written block by block."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise Skip("needs pyarrow, which writes the file") from None
    blocks = (pa.Table.from_pandas(block, preserve_index=False) for block in tables(seed, rows, extra))
    first = next(blocks)
    with pq.ParquetWriter(path, first.schema) as writer:
        writer.write_table(first, row_group_size=BLOCK)
        for table in blocks:
            writer.write_table(table, row_group_size=BLOCK)


def mixed_model(extra: int = 0) -> otp.Model:
    """The model that made the table."""
    more = {f"e{number}": m.Normal() for number in range(extra)}
    edges = [("z", name) for name in ("answer", "visits", "x", "y", "u", *more)]
    graph = otp.Graph([*edges, ("x", "w"), ("place", "w"), ("y", "v")], hidden=["z"])
    numbers = {name: m.Normal() for name in ("x", "y", "w", "v", "u")}
    categories = {"z": m.Categorical(3), "place": m.Categorical(3), "answer": m.Categorical(2)}
    return otp.Model(graph, {**categories, "visits": m.Poisson(), **numbers, **more})


def difference(one: dict, other: dict) -> float:
    """The largest difference of parameters."""
    return max(float(np.abs(np.asarray(one[n][k]) - np.asarray(other[n][k])).max()) for n in one for k in one[n])


# -- fits --------------------------------------------------------------------------------------------------------------


def _fitted(seed: int, rows: int, *, threads: int = 1) -> Done[Record]:
    """A fit in memory, in a process that reads its table from a file: to make one takes more memory than to hold it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.pickle"
        next(tables(seed, rows)).to_pickle(path)
        return in_child(partial(_in_memory, str(path), threads), seconds=LONGEST)


def _in_memory(path: str, threads: int) -> Record:
    torch.set_num_threads(threads)
    frame = pd.read_pickle(path)
    size = 8 * frame.shape[0] * frame.shape[1]
    model, begin, wall = mixed_model(), time.process_time(), time.perf_counter()
    otp.fit(model, frame, restarts=STARTS)
    seconds, wall = time.process_time() - begin, time.perf_counter() - wall
    return {"seconds": seconds, "wall": wall, "bytes": size, "params": model.params()}


def _streamed(path: str, steps: int | None = None) -> Record:
    import warnings

    import pyarrow.parquet as pq

    model = mixed_model(extra=sum(name.startswith("e") for name in pq.read_schema(path).names))
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otp.ConvergenceWarning)  # where steps are few, memory is asked for alone
        otp.fit(model, otp.Partitioned(path, memory=0), restarts=STARTS, steps=steps)
    return {"seconds": time.process_time() - begin, "params": model.params()}


def _on_workers(workers: int, frame: pd.DataFrame, fits: list[partial]) -> list[otp.FitResult]:
    try:
        import dask.dataframe as dd
        from distributed import Client, LocalCluster
    except ImportError:
        raise Skip("needs dask and distributed") from None
    with (
        LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None, silence_logs=50) as cluster,
        Client(cluster),
    ):
        parts = otp.Partitioned(dd.from_pandas(frame, npartitions=4), held_rows=min(50_000, len(frame) // 4))
        return [fit(mixed_model(), parts) for fit in fits]


def is_quick(settings: Settings) -> bool:
    """Whether the sizes shall be small ones."""
    return settings.repeats <= QUICK_REPEATS


CASES: dict[str, Case] = {
    "rows_exponent": rows_exponent,
    "parquet_rate": parquet_rate,
    "dask_same": dask_same,
    "dask_rate": dask_rate,
    "threads": threads,
}
