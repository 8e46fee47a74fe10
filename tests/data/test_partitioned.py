"""Tables in parts: files, datasets, Dask frames, and the work that goes to their parts."""

import os
import signal
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data.parts import ArrowParts, LocalParts, Partitioned, arrow_dataset, is_dask, is_partitioned
from otpdag.engine import Deterministic
from otpdag.errors import DataError, ModelError

pa = pytest.importorskip("pyarrow")
pds = pytest.importorskip("pyarrow.dataset")


def table(rows=12):
    rng = np.random.default_rng(0)
    return pd.DataFrame({"x": rng.normal(size=rows), "k": rng.choice(["a", "b"], rows)})


def read(data, block_rows=5):
    frames = list(ArrowParts(arrow_dataset(data), block_rows).each(lambda frame, number: frame))
    return pd.concat(frames, ignore_index=True)


def test_files_that_begin_with_a_dot_or_an_underscore_are_none_of_the_table(tmp_path):
    """As pandas, Spark and Dask have it: logs, and what another process has not finished."""
    table().to_parquet(tmp_path / "part-0.parquet")
    for aside in ("_temporary/part-0.parquet", ".part-1.parquet", "_delta_log/checkpoint.parquet"):
        (tmp_path / aside).parent.mkdir(exist_ok=True)
        table().to_parquet(tmp_path / aside)
    pd.testing.assert_frame_equal(read(tmp_path), table(), check_dtype=False)


def test_folders_may_be_named_by_a_column(tmp_path):
    table().to_parquet(tmp_path / "hive", partition_cols=["k"])
    frame = read(tmp_path / "hive")
    expected = table().sort_values("k", kind="stable", ignore_index=True)
    assert frame["k"].tolist() == expected["k"].tolist()
    np.testing.assert_array_equal(frame["x"], expected["x"])


def test_text_in_one_file_and_categories_in_another_are_text(tmp_path):
    table().to_parquet(tmp_path / "a.parquet")
    table().astype({"k": "category"}).to_parquet(tmp_path / "b.parquet")
    assert read(tmp_path)["k"].tolist() == 2 * table()["k"].tolist()
    table().assign(k=1.5).to_parquet(tmp_path / "c.parquet")
    with pytest.raises(DataError, match="differ in the type of a column"):
        arrow_dataset(tmp_path)


def test_a_dataset_may_be_filtered(tmp_path):
    table().to_parquet(tmp_path / "a.parquet")
    few = pds.dataset(tmp_path / "a.parquet").filter(pds.field("x") < 0)
    expected = table().query("x < 0").reset_index(drop=True)
    pd.testing.assert_frame_equal(read(few), expected, check_dtype=False)


def test_blocks_have_as_many_rows_as_they_should(tmp_path):
    table().to_parquet(tmp_path / "a.parquet")
    sizes = ArrowParts(arrow_dataset(tmp_path / "a.parquet"), 5).each(lambda frame, number: len(frame))
    assert list(sizes) == [5, 5, 2]


@pytest.mark.parametrize(
    ("sizes", "message"), [({"block_rows": 1}, "block_rows must"), ({"memory": -1}, "memory must")]
)
def test_sizes_that_hold_nothing_are_refused(sizes, message):
    with pytest.raises(ModelError, match=message):
        Partitioned("table.parquet", **sizes)


def counted():
    """Three parts that note when they are made."""
    made = []

    def parts():
        for number in (1, 2, 3):
            made.append(number)
            yield number

    return made, LocalParts(parts)


def test_results_come_in_the_order_of_the_parts_with_their_numbers():
    _, parts = counted()
    assert list(parts.each(lambda part, number, more: (part, number, more), "x")) == [
        (1, 0, "x"),
        (2, 1, "x"),
        (3, 2, "x"),
    ]


@pytest.mark.parametrize(("keep", "passes"), [(True, 1), (False, 3)])
def test_kept_parts_are_made_once_and_others_in_every_pass(keep, passes):
    made, parts = counted()
    doubled = parts.mapped(lambda part, number: 2 * part, keep=keep)
    for _ in range(3):
        assert list(doubled.each(lambda part, number: part + 1)) == [3, 5, 7]
    assert made == [1, 2, 3] * passes


def test_work_follows_work():
    _, parts = counted()
    twice = parts.mapped(lambda part, number: part + number, keep=False).mapped(
        lambda part, number: 10 * part, keep=False
    )
    assert list(twice.each(lambda part, number: part)) == [10, 30, 50]
    assert parts.with_columns(["x"]) is parts


dd = pytest.importorskip("dask.dataframe")

TIGHT = replace(otp.entropic(), optimiser=Deterministic(tolerance=1e-14))


def dask_table(rows=2000):
    rng = np.random.default_rng(0)
    z = rng.integers(0, 2, rows)
    frame = pd.DataFrame(
        {
            "kind": np.array(["even", "odd"], dtype=object)[
                (rng.random(rows) < np.where(z == 1, 0.8, 0.3)).astype(int)
            ],
            "x": rng.normal(np.where(z == 1, 2.0, -2.0)),
            "y": rng.normal(np.where(z == 1, 0.0, 1.0), 0.5),
        }
    )
    for name in frame:
        frame.loc[rng.random(rows) < 0.05, name] = None
    return frame


def model():
    graph = otp.Graph([("z", "kind"), ("z", "x"), ("z", "y")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(2), "kind": m.Categorical(2), "x": m.Normal(), "y": m.Normal()})


def fitted(data, **settings):
    return otp.fit(model(), data, method=TIGHT, restarts=2, **settings)


def difference(one, other):
    ours, theirs = one.model.params(), other.model.params()
    return max(np.abs(np.asarray(ours[n][k]) - np.asarray(theirs[n][k])).max() for n in ours for k in ours[n])


def test_dask_frames_are_known_without_importing_dask():
    frame = dd.from_pandas(dask_table(50), npartitions=2)
    assert is_dask(frame)
    assert is_partitioned(frame)
    assert not is_dask(dask_table(5))
    assert not is_partitioned(dask_table(5))


def test_without_a_cluster_partitions_are_worked_on_one_after_another():
    frame = dask_table()
    result = fitted(otp.Partitioned(dd.from_pandas(frame, npartitions=3), held_rows=800))
    assert result.rows_used == len(frame)
    assert difference(result, fitted(frame)) < 1e-6


def test_partitions_that_a_filter_leaves_empty_are_passed_over():
    frame = dask_table().sort_values("y", ignore_index=True)
    parts = dd.from_pandas(frame, npartitions=8)
    few = frame[frame["y"] > 0.4]
    result = fitted(otp.Partitioned(parts[parts["y"] > 0.4], held_rows=800))
    assert result.rows_used == len(few)
    assert difference(result, fitted(few)) < 1e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_two_workers_give_the_estimates_of_memory_though_one_is_killed():
    distributed = pytest.importorskip("distributed")
    frame = dask_table()
    here = fitted(frame)
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
    )
    killed: list[int] = []

    def kill_one(_record):
        if not killed:
            killed.append(next(iter(cluster.workers.values())).pid)
            os.kill(killed[0], signal.SIGKILL)

    with cluster, distributed.Client(cluster):
        parts = otp.Partitioned(dd.from_pandas(frame, npartitions=4), held_rows=800)
        there = fitted(parts, callbacks=[kill_one])
        assert killed
        assert there.status.converged
        assert difference(there, here) < 1e-6
        with pytest.raises(DataError, match="column 'x' must hold numbers; found 'text'"):
            fitted(otp.Partitioned(dd.from_pandas(frame.assign(x="text"), npartitions=2), held_rows=800))


@pytest.mark.filterwarnings("default")
def test_rows_are_picked_and_minibatches_drawn_where_partitions_are(tmp_path):
    distributed = pytest.importorskip("distributed")
    frame = dask_table(900)
    parts = {"block_rows": 300, "held_rows": 200}
    settings = {"method": "paper", "steps": 30, "restarts": 1, "seed": 4}
    frame.to_parquet(tmp_path / "dask_table.parquet")
    from_file = otp.fit(model(), otp.Partitioned(tmp_path / "dask_table.parquet", **parts), **settings)
    cluster = distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None, silence_logs=50
    )
    with cluster, distributed.Client(cluster):
        partitions = otp.Partitioned(dd.from_pandas(frame, npartitions=3), **parts)
        assert difference(otp.fit(model(), partitions, **settings), from_file) < 1e-9
