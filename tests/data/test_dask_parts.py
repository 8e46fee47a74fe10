"""Dask frames: fitted on two worker processes as in memory, also when one of them is killed; or without a cluster."""

import os
import signal
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data.partitioned import is_dask, is_partitioned
from otpdag.engine import LBFGS
from otpdag.errors import DataError

dd = pytest.importorskip("dask.dataframe")

TIGHT = replace(otp.entropic(), optimiser=LBFGS(tolerance=1e-14))


def table(rows=2000):
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
    frame = dd.from_pandas(table(50), npartitions=2)
    assert is_dask(frame)
    assert is_partitioned(frame)
    assert not is_dask(table(5))
    assert not is_partitioned(table(5))


def test_without_a_cluster_partitions_are_worked_on_one_after_another():
    frame = table()
    result = fitted(otp.Partitioned(dd.from_pandas(frame, npartitions=3), held_rows=800))
    assert result.rows_used == len(frame)
    assert difference(result, fitted(frame)) < 1e-6


def test_partitions_that_a_filter_leaves_empty_are_passed_over():
    frame = table().sort_values("y", ignore_index=True)
    parts = dd.from_pandas(frame, npartitions=8)
    few = frame[frame["y"] > 0.4]
    result = fitted(otp.Partitioned(parts[parts["y"] > 0.4], held_rows=800))
    assert result.rows_used == len(few)
    assert difference(result, fitted(few)) < 1e-6


@pytest.mark.filterwarnings("default")
def test_two_workers_give_the_estimates_of_memory_though_one_is_killed():
    distributed = pytest.importorskip("distributed")
    frame = table()
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
    frame = table(900)
    parts = {"block_rows": 300, "held_rows": 200}
    settings = {"method": "paper", "steps": 30, "restarts": 1, "seed": 4}
    frame.to_parquet(tmp_path / "table.parquet")
    from_file = otp.fit(model(), otp.Partitioned(tmp_path / "table.parquet", **parts), **settings)
    cluster = distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None, silence_logs=50
    )
    with cluster, distributed.Client(cluster):
        partitions = otp.Partitioned(dd.from_pandas(frame, npartitions=3), **parts)
        assert difference(otp.fit(model(), partitions, **settings), from_file) < 1e-9
