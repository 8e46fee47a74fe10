"""``otpdag fit --resume``: a fit that was stopped goes on to the very same end."""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from otpdag import engine
from otpdag.cli import app, fit_command
from otpdag.engine import checkpoint
from otpdag.errors import DataError
from otpdag.files import only_writer

MODEL = "{edges: [[k, x], [k, n]], hidden: [k], nodes: {k: {type: Categorical, size: 2}, n: Poisson}}"
SAME = ("model.otp", "params.json", "restarts.csv")


@pytest.fixture
def factory(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    k = rng.integers(0, 2, 120)
    table = pd.DataFrame({"x": 2.0 * k + rng.normal(size=120), "n": rng.poisson(2 + 4 * k)})
    table.to_csv(tmp_path / "data.csv", index=False)
    (tmp_path / "model.yaml").write_text(MODEL)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield tmp_path
    signal.signal(signal.SIGINT, before)


def fit(folder: Path, out: str, *options: str) -> Result:
    given = [folder / "model.yaml", folder / "data.csv", "--out", folder / out, "--restarts", 1, *options]
    return CliRunner().invoke(app, ["fit", *map(str, given)])


def stopped_by(monkeypatch, number: int, step: int = 1) -> None:
    """Let a signal arrive in the middle of a fit."""

    def arrive(record):
        if record["step"] == step:
            signal.raise_signal(number)

    monkeypatch.setattr(engine, "fit", functools.partial(engine.fit, callbacks=[arrive]))


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_fit_that_was_stopped_goes_on_to_the_same_end(factory, monkeypatch, number, code):
    assert fit(factory, "whole").exit_code == 0
    terminating = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        stopped_by(patch, number)
        result = fit(factory, "run")
    checkpoint = factory / "run.checkpoint"
    assert result.exit_code == code
    assert f"interrupted: {checkpoint} keeps how far it came; the same command with --resume goes on" in result.stderr
    assert checkpoint.is_file()
    assert not (factory / "run").exists()
    assert signal.getsignal(signal.SIGTERM) == terminating
    assert fit(factory, "run", "--resume").exit_code == 0
    assert not checkpoint.exists()
    for name in SAME:
        assert (factory / "run" / name).read_bytes() == (factory / "whole" / name).read_bytes(), name
    steps = [len(pd.read_csv(factory / out / "history.csv")) for out in ("whole", "run")]
    assert steps[0] == steps[1] > 2


def test_an_old_run_stays_whole_when_a_new_one_is_stopped(factory, monkeypatch):
    assert fit(factory, "run").exit_code == 0
    before = {path.name: path.read_bytes() for path in (factory / "run").iterdir()}
    stopped_by(monkeypatch, signal.SIGINT)
    assert fit(factory, "run", "--force", "--seed", "1").exit_code == 130
    assert {path.name: path.read_bytes() for path in (factory / "run").iterdir()} == before


def test_without_resume_a_fit_begins_anew(factory, monkeypatch):
    with monkeypatch.context() as patch:
        stopped_by(patch, signal.SIGINT)
        fit(factory, "run")
    assert fit(factory, "run", "--seed", "1").exit_code == 0  # with --resume another seed would be refused
    with monkeypatch.context() as patch:
        stopped_by(patch, signal.SIGINT)
        fit(factory, "other")
    result = fit(factory, "other", "--resume", "--seed", "1")
    assert result.exit_code == 2
    assert "belongs to another run: its seed is 0, not 1" in result.stderr


def test_nothing_to_go_on_from_is_said(factory):
    result = fit(factory, "run", "--resume")
    assert result.exit_code == 0
    assert f"there is no {factory / 'run.checkpoint'}: the fit begins anew" in result.stderr


def test_a_time_limit_leaves_a_run_that_can_go_on(factory):
    result = fit(factory, "run", "--method", "paper", "--steps", "100000", "--time-limit", "0.3")
    assert result.exit_code == 0
    summary = json.loads((factory / "run" / "summary.json").read_text())
    assert (summary["status"], summary["converged"]) == ("not converged", False)
    assert summary["reason"].startswith("the time limit of 0.3 s was reached")
    assert (factory / "run.checkpoint").is_file()
    again = fit(factory, "run", "--method", "paper", "--steps", "100000", "--time-limit", "0.3", "--resume", "--force")
    assert again.exit_code == 0
    assert json.loads((factory / "run" / "summary.json").read_text())["steps"] > summary["steps"]


@pytest.mark.parametrize("value", ["0", "-3", "nan"])
def test_time_limits_that_are_none_are_refused(factory, value):
    result = fit(factory, "run", "--time-limit", value)
    assert result.exit_code == 2
    assert "time_limit must be a number of seconds above zero" in result.stderr


def stopped_run(factory: Path, monkeypatch) -> tuple[Path, bytes]:
    with monkeypatch.context() as patch:
        stopped_by(patch, signal.SIGINT)
        fit(factory, "run")
    kept = factory / "run.checkpoint"
    return kept, kept.read_bytes()


def test_an_error_deletes_no_checkpoint(factory, monkeypatch):
    """Neither the one that was there, nor that of the work that was done."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    kept, earlier = stopped_run(factory, monkeypatch)
    refused = (("--resume", "--seed", "7"), ("--resume", "--weights", "none"), ("--restarts", "x"), ("--device", "tpu"))
    for options in refused:
        assert fit(factory, "run", "--force", *options).exit_code == 2
        assert kept.read_bytes() == earlier
    monkeypatch.setattr(fit_command, "write_run", fail)
    assert fit(factory, "run", "--force").exit_code == 2
    assert kept.is_file()
    assert fit(factory, "another").exit_code == 2
    assert (factory / "another.checkpoint").is_file()
    assert not (factory / "another").exists()


def test_a_fit_that_begins_anew_gives_an_earlier_checkpoint_back_if_it_comes_to_nothing(factory, monkeypatch):
    kept, earlier = stopped_run(factory, monkeypatch)
    (factory / "run.checkpoint.earlier").write_bytes(earlier)
    kept.unlink()  # as a kill just after it was set aside leaves it
    assert fit(factory, "run", "--force", "--device", "tpu").exit_code == 2
    assert kept.read_bytes() == earlier
    assert fit(factory, "run", "--force").exit_code == 0
    assert sorted(path.name for path in factory.iterdir() if "checkpoint" in path.name) == []


def test_a_checkpoint_that_cannot_be_written_is_told_once(factory, monkeypatch):
    def fail(path, *_: object) -> None:
        raise DataError(f"{str(path)!r} cannot be written: No space left on device")

    monkeypatch.setattr(checkpoint, "write_bundle", fail)
    result = fit(factory, "run")
    assert result.exit_code == 0
    assert result.stderr.count("cannot be written") == 1


def test_one_process_writes_to_a_folder_at_a_time(factory):
    with only_writer(factory / "run"):
        result = fit(factory, "run")
        assert result.exit_code == 2
        assert "another process is writing to" in result.stderr
        assert not (factory / "run").exists()
    assert fit(factory, "run").exit_code == 0
    assert not [path.name for path in factory.iterdir() if path.name.startswith(".")]


def test_a_read_only_place_is_called_what_it_is(factory, monkeypatch):
    opened, allowed = os.open, os.access

    def open_elsewhere(path, *given):
        if Path(path).parent == factory:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, *given)

    monkeypatch.setattr(os, "open", open_elsewhere)
    monkeypatch.setattr(os, "access", lambda path, *given: Path(path) != factory and allowed(path, *given))
    result = fit(factory, "run")
    assert result.exit_code == 2
    assert os.strerror(errno.EROFS) in result.stderr
    assert not (factory / "run").exists()
