"""Processes that are killed at random instants, and what they leave behind.

Each function runs in a process of its own with one thread (:func:`benchmarks.child.in_child`), and forks the victims:
what is imported and fitted once serves them all.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.cli import app
from otpdag.cli.console import RUN_FILES

__all__ = ["different_ends", "lost_models", "mixed_runs"]

SIZE = 150
MODEL = "{edges: [[k, x], [k, n]], hidden: [k], nodes: {k: {type: Categorical, size: 2}, n: Poisson}}"


def lost_models(seed: int, kills: int) -> int:
    """How often a model was lost or unreadable, of so many kills of a process that saves over it again and again."""
    chance, lost = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.otp")
        model = otp.Model(otp.Graph([("k", "x")]), {"k": m.Categorical(SIZE), "x": m.Normal(20)})
        _marked(model, 1.0).save(path)

        for _ in range(kills):
            killed_while_repeating(chance.uniform(0.0, 2.0), lambda number: _marked(model, 2.0 + number).save(path))
            lost += not _is_whole(path)
    return lost


def _marked(model: otp.Model, number: float) -> otp.Model:
    """A model all of whose numbers tell which one it is."""
    table = np.full((SIZE, 20), number)
    return model.set_params({"k": {"probs": np.full(SIZE, 1 / SIZE)}, "x": {"loc": table, "scale": table}})


def _is_whole(path: Path) -> bool:
    try:
        found = otp.load(path).params()["x"]
    except otp.OtpdagError:
        return False
    return bool((found["loc"] == found["loc"].flat[0]).all() and (found["scale"] == found["loc"]).all())


def mixed_runs(seed: int, kills: int) -> int:
    """How often a folder held parts of two runs, of so many kills of ``otpdag fit --force`` with changing seeds."""
    chance, mixed = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.yaml").write_text(MODEL)
        _table(seed).to_csv(folder / "data.csv", index=False)
        known = {}
        for run_seed in (0, 1):
            began = time.monotonic()
            _fit(folder, f"known{run_seed}", run_seed)
            seconds = time.monotonic() - began
            known[run_seed] = _contents(folder / f"known{run_seed}")
        _fit(folder, "run", 0)
        for number in range(kills):
            killed_after(chance.uniform(0.0, 1.3 * seconds), lambda number=number: _fit(folder, "run", number % 2))
            with contextlib.redirect_stdout(io.StringIO()):
                app(["show", str(folder / "run")], standalone_mode=False)  # completes what was decided
            found = _contents(folder / "run")
            mixed += found not in known.values()
    return mixed


def _fit(folder: Path, out: str, seed: int) -> None:
    files = [str(folder / "model.yaml"), str(folder / "data.csv"), "--out", str(folder / out)]
    # every second run has intervals: a file that the other must not keep
    more = ["--intervals", "10"] if seed else []
    app(["fit", *files, "--seed", str(seed), "--restarts", "1", "--quiet", "--force", *more], standalone_mode=False)


def _contents(folder: Path) -> dict[str, bytes]:
    """All that a run determines: its files but for seconds, and what must not be there."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name in RUN_FILES}
    summary = json.loads(found["summary.json"])
    found["summary.json"] = json.dumps({**summary, "seconds": 0}).encode()
    history = pd.read_csv(io.BytesIO(found["history.csv"])).drop(columns="seconds")
    return found | {"history.csv": history.to_csv().encode()}


def different_ends(seed: int, kills: int) -> int:
    """How often a fit that was killed once and resumed ended elsewhere than one that was not."""
    chance, different = random.Random(seed), 0
    warnings.simplefilter("ignore", otp.ConvergenceWarning)
    cases = _cases(seed)
    wholes = []
    for case in cases:
        began = time.monotonic()
        end = _end(case, None)
        wholes.append((end, time.monotonic() - began))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(kills):
            case, (whole, seconds) = cases[number % len(cases)], wholes[number % len(cases)]
            path = Path(folder, f"{number}.checkpoint")
            killed_after(chance.uniform(0.0, 1.5 * seconds), lambda case=case, path=path: _end(case, path))
            different += _end(case, path) != whole
    return different


Case = tuple[Callable[[], otp.Model], Any, dict[str, Any]]


def _cases(seed: int) -> list[Case]:
    table, rng = _table(seed), np.random.default_rng(seed)
    quick = otp.SearchSchedule(short_rows=100, short_steps=6, finalists=2, finalist_steps=3)
    chain = np.repeat(rng.integers(0, 2, 40), 10).reshape(10, 40) * 3 + rng.poisson(2, (10, 40))
    return [
        (_mixture, table, {"restarts": 4, "course": quick}),
        (_mixture, table, {"method": otp.transport(points=128), "restarts": 3, "course": quick}),
        (_mixture, table, {"method": otp.paper(steps=60, batch_size=32), "restarts": 2}),
        (_factor, table, {"method": otp.entropic(steps=30), "restarts": 2, "course": quick}),
        (_hidden_markov, chain, {"restarts": 3}),
        (_mixture, table, {"robust": True, "restarts": 2}),
    ]


def _end(case: Case, checkpoint: Path | None) -> bytes:
    build, data, settings = case
    model = build()
    result = otp.fit(model, data, seed=3, checkpoint=checkpoint, checkpoint_seconds=1e-6, **settings)
    numbers = [value.tobytes() for own in model.params().values() for value in own.values()]
    return b"".join([np.float64(result.loss).tobytes(), str(result.status).encode(), *numbers])


def _table(seed: int, rows: int = 80) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    k = rng.integers(0, 2, rows)
    return pd.DataFrame({"x": 2.0 * k + rng.normal(size=rows), "n": rng.poisson(2 + 4 * k)})


def _mixture() -> otp.Model:
    graph = otp.Graph([("k", "x"), ("k", "n")], hidden=["k"])
    return otp.Model(graph, {"k": m.Categorical(2), "x": m.Normal(), "n": m.Poisson()})


def _factor() -> otp.Model:
    graph = otp.Graph([("u", "x"), ("u", "n")], hidden=["u"])
    return otp.Model(graph, {"u": m.Normal(), "x": m.Normal(), "n": m.Poisson()})


def _hidden_markov() -> otp.Model:
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(2), "x": m.Poisson()})


def killed_after(seconds: float, work: Callable[[], Any]) -> None:
    """Fork a process that does some work, and kill it after a while if it has not ended."""
    child = os.fork()
    if child == 0:
        try:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            work()
        finally:
            os._exit(0)
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def killed_while_repeating(rounds: float, work: Callable[[int], Any]) -> None:
    """Fork a process that repeats some work, and kill it so many rounds after the second, however long these take."""
    done, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for number in itertools.count():
                work(number)
                os.write(tell, b".")
        finally:
            os._exit(0)
    os.close(tell)
    os.read(done, 1)
    began = time.monotonic()
    os.read(done, 1)
    time.sleep(rounds * (time.monotonic() - began))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(done)
