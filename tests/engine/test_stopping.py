"""Fits that are ended before their end: what they leave, and that a checkpoint of them loses nothing."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine.monitor import Cause, Stopping
from otpdag.errors import ModelError, OutOfTime

pytestmark = pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")

QUICK = otp.SearchSchedule(short_rows=100, short_steps=2, finalists=2, finalist_steps=1)


@pytest.fixture
def python_handler():
    """Ctrl-C as Python handles it, whatever the test runner does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def table(rows=150):
    rng = np.random.default_rng(17)
    z = rng.integers(0, 2, rows)
    return pd.DataFrame({"x": np.where(z, 1.2, -1.0) + rng.normal(size=rows), "n": rng.poisson(np.where(z, 6.0, 2.0))})


def mixture():
    graph = otp.Graph([("z", "x"), ("z", "n")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal(), "n": m.Poisson()})


def interrupting(step):
    def callback(record):
        if record["step"] == step:
            signal.raise_signal(signal.SIGINT)

    return callback


@pytest.mark.parametrize("method", [otp.entropic(), otp.paper(steps=60, batch_size=32)], ids=["entropic", "paper"])
def test_ctrl_c_gives_the_best_so_far(python_handler, method):
    model = mixture()
    result = otp.fit(model, table(), method=method, restarts=2, seed=1, course=QUICK, callbacks=[interrupting(2)])
    assert result.status.interrupted
    assert not result.status.converged
    assert str(result.status).startswith("interrupted: the fit was interrupted after")
    assert len(result.history) == 3
    assert np.isfinite(result.loss)
    if method.name == "entropic":  # the loss of the parameters that were left, not of others
        assert model.score(table(), kind="likelihood") == pytest.approx(-result.loss, abs=1e-9)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_stop_in_the_short_runs_keeps_the_best_start():
    model, untouched = mixture(), mixture()
    first = otp.fit(model, table(), restarts=4, seed=1, time_limit=1e-9)
    assert [stage.name for stage in first.stages] == ["4 starts", "best start"]
    assert all(len(stage.losses) == 1 for stage in first.stages)
    full = otp.fit(untouched, table(), restarts=4, seed=1)
    assert full.loss < first.loss < full.loss + 1.0
    assert model.score(table(), kind="likelihood") == pytest.approx(-first.loss, abs=1e-9)


def test_a_second_ctrl_c_is_pythons_own(python_handler):
    def twice(record):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        otp.fit(mixture(), table(), restarts=1, callbacks=[twice])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_others_are_left_alone():
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        result = otp.fit(mixture(), table(), restarts=1, callbacks=[interrupting(1)])
        assert seen == [signal.SIGINT]
        assert result.status.converged
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_fit_in_another_thread_has_no_handlers():
    found = []
    thread = threading.Thread(target=lambda: found.append(otp.fit(mixture(), table(), restarts=1, seed=1)))
    thread.start()
    thread.join()
    assert found[0].loss == otp.fit(mixture(), table(), restarts=1, seed=1).loss


def test_the_time_limit_ends_a_fit_with_the_best_so_far():
    method = otp.paper(steps=1_000_000, batch_size=32)
    began = time.monotonic()
    model = mixture()
    result = otp.fit(model, table(), method=method, restarts=1, time_limit=0.5)
    assert 0.4 < result.seconds <= time.monotonic() - began
    assert not result.status.converged
    assert "the time limit of 0.5 s was reached after" in result.status.reason
    assert result.status.advice == "allow more time"
    assert np.isfinite(model.params()["x"]["loc"]).all()


def test_only_a_fit_that_keeps_a_checkpoint_speaks_of_one(tmp_path):
    result = otp.fit(mixture(), table(), restarts=1, time_limit=1e-9, checkpoint=tmp_path / "a")
    assert result.status.advice == "allow more time, or go on from the checkpoint"


@pytest.fixture
def a_second_at_each_look(monkeypatch):
    """A clock that goes on by a second whenever it is looked at, so that tests do not depend on the machine."""
    seconds = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))


def test_the_time_limit_holds_while_sums_are_planned(a_second_at_each_look):
    """Every row misses other cells, and so needs a plan of its own."""
    rng = np.random.default_rng(5)
    names = [f"x{i}" for i in range(6)]
    rows = pd.DataFrame(rng.normal(size=(60, 6)), columns=names).assign(y=rng.integers(0, 2, 60))
    gaps = rows.mask(rng.random(rows.shape) < 0.4)
    model = otp.Model(otp.Graph([(x, "y") for x in names]), {**{x: m.Gamma() for x in names}, "y": m.Bernoulli()})
    with pytest.raises(OutOfTime, match="time limit went by while it was planned how to sum"):
        otp.fit(model, gaps.abs(), time_limit=3, seed=0)
    assert not model.is_fitted


def test_no_more_starts_are_guessed_when_the_time_is_up(a_second_at_each_look):
    result = otp.fit(mixture(), table(), time_limit=2, seed=0, restarts=16)
    assert not result.status.converged
    assert len(result.restarts) < 5
    assert np.isfinite(result.model.params()["x"]["loc"]).all()


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "5", True])
@pytest.mark.parametrize("name", ["time_limit", "checkpoint_seconds"])
def test_times_that_are_none_are_refused(name, value):
    with pytest.raises(ModelError, match=f"{name} must be a number of seconds above zero; got"):
        otp.fit(mixture(), table(), **{name: value})


def same_end(one, other):
    assert one[1].loss == other[1].loss
    for node, own in one[0].params().items():
        for key, value in own.items():
            np.testing.assert_array_equal(value, other[0].params()[node][key])


@pytest.mark.parametrize("restarts", [1, 4])
@pytest.mark.parametrize("cause", ["interrupt", "time"])
def test_what_follows_the_end_is_never_written(python_handler, tmp_path, restarts, cause):
    """After a stop the last runs are cut short: a checkpoint that kept them would lead elsewhere."""
    path = tmp_path / "run.checkpoint"

    def end(**options):
        model = mixture()
        return model, otp.fit(model, table(), restarts=restarts, seed=1, **options)

    whole = end()
    if cause == "time":
        end(checkpoint=path, time_limit=1e-9)
        end(checkpoint=path, time_limit=1e-9)
    else:
        end(checkpoint=path, callbacks=[interrupting(0)])
        assert path.exists()
    same_end(whole, end(checkpoint=path))


def test_checkpoints_are_written_every_few_seconds(tmp_path):
    path, written = tmp_path / "run.checkpoint", []

    def look(record):
        written.append(path.stat().st_mtime_ns if path.exists() else 0)

    settings = {"method": otp.paper(steps=20, batch_size=32), "restarts": 1, "callbacks": [look]}
    otp.fit(mixture(), table(), checkpoint=path, checkpoint_seconds=1e-9, **settings)
    assert len(set(written)) == 20  # after every step: one time each, and none before the first
    written.clear()
    path.unlink()
    otp.fit(mixture(), table(), checkpoint=path, checkpoint_seconds=1e9, **settings)
    assert set(written) == {0}


SCRIPT = """
import sys, numpy as np, pandas as pd, otpdag as otp
from otpdag import mechanisms as m
rng = np.random.default_rng(17)
table = pd.DataFrame({"x": rng.normal(size=200)})
model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal()})
says = lambda record: print("step", flush=True)
otp.fit(model, table, method=otp.paper(steps=10**6, batch_size=32), restarts=1, checkpoint=sys.argv[1],
        checkpoint_seconds=1e9, callbacks=[says])
print("not ended", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM")
def test_sigterm_writes_the_checkpoint_and_ends_the_process(tmp_path):
    path = tmp_path / "run.checkpoint"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert child.stdout.readline() == "step\n"
    child.send_signal(signal.SIGTERM)
    said, _ = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGTERM
    assert "not ended" not in said
    assert path.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM")
def test_a_signal_that_was_held_back_comes_when_the_fit_has_ended():
    came, before = [], signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        stopping = Stopping()
        with stopping.listening(to_terminate=True):
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopping.cause is Cause.INTERRUPT
            assert not came
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
