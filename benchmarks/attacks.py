"""Attacks on what is kept: checkpoints under refusals, failures and flipped bits, writers at once, bombs, many levels.

Each function runs in a process of its own with one thread (:func:`benchmarks.child.in_child`).
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from typer.testing import CliRunner

import otpdag as otp
from benchmarks.hostile_files import peak_of
from otpdag import interop
from otpdag import mechanisms as m
from otpdag.cli import app
from otpdag.cli.model_file import read_model_file
from otpdag.safe_archive import read_bundle

__all__ = ["bombs", "estimates_from_flips", "failed_runs", "failed_saves", "lost_checkpoints", "seconds_of_levels"]

MODEL = "{edges: [[k, x], [k, n]], hidden: [k], nodes: {k: {type: Categorical, size: 2}, n: Poisson}}"
RESTARTS = ("--restarts", "2", "--quiet")


def forked(work: Callable[[], int]) -> int:
    """The exit code of some work in a fork of this process."""
    child = os.fork()
    if child == 0:
        code = 99
        with contextlib.suppress(BaseException), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            code = work()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _table(seed: int, rows: int = 80) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    k = rng.integers(0, 2, rows)
    return pd.DataFrame({"x": 2.0 * k + rng.normal(size=rows), "n": rng.poisson(2 + 4 * k), "w": 1 + k})


def _written(folder: Path, seed: int) -> None:
    (folder / "model.yaml").write_text(MODEL)
    (folder / "reversed.yaml").write_text(MODEL.replace("[k, n]", "[n, x]"))
    (folder / "broken.yaml").write_text("{edges: [[k")
    _table(seed).to_csv(folder / "data.csv", index=False)
    _table(seed + 1).to_csv(folder / "other.csv", index=False)
    (folder / "broken.csv").write_text("x,n\n1,a\n2,3,4\n")


def _fit(folder: Path, *options: str, model: str = "model.yaml", data: str = "data.csv", out: str = "run") -> int:
    words = ["fit", str(folder / model), str(folder / data), "--out", str(folder / out), *RESTARTS, *options]
    return CliRunner().invoke(app, words).exit_code


# --- checkpoints ------------------------------------------------------------------------------------------------------


def lost_checkpoints(seed: int, many: int) -> int:
    """How many of so many refusals and failures of ``otpdag fit`` leave no readable checkpoint where there was one."""
    chance, lost = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _written(folder, seed)
        kept = folder / "run.checkpoint"
        if forked(lambda: _stopped(folder)) != 130 or not kept.exists():
            raise RuntimeError("no checkpoint was made")
        whole = kept.read_bytes()
        for _ in range(many):
            kept.write_bytes(whole)
            work = chance.choice(_failures(folder, chance))
            if forked(work) == 0:
                raise RuntimeError("a run that should fail did not")
            try:
                read_bundle(kept, "checkpoint.json", "otpdag checkpoint", sealed=True)
            except otp.DataError:
                lost += 1
    return lost


def _stopped(folder: Path) -> int:
    from otpdag import engine

    def interrupt(record: object) -> bool:
        raise KeyboardInterrupt

    whole = engine.fit
    engine.fit = lambda *args, **more: whole(*args, **{**more, "callbacks": [interrupt]})  # type: ignore[assignment]
    return _fit(folder)


def _failures(folder: Path, chance: random.Random) -> list[Callable[[], int]]:
    resume, number = ("--resume",) * chance.randrange(2), str(chance.randrange(1, 99))
    return [
        lambda: _fit(folder, "--resume", "--seed", number),
        lambda: _fit(folder, "--resume", "--steps", number),
        lambda: _fit(folder, "--resume", "--method", "transport"),
        lambda: _fit(folder, "--resume", "--robust", "outliers"),
        lambda: _fit(folder, "--resume", model="reversed.yaml"),
        lambda: _fit(folder, "--resume", data="other.csv"),
        lambda: _fit(folder, *resume, "--weights", "nowhere"),
        lambda: _fit(folder, *resume, "--device", "tpu"),
        lambda: _fit(folder, *resume, "--time-limit", "-1"),
        lambda: _fit(folder, *resume, model="broken.yaml"),
        lambda: _fit(folder, *resume, model="nowhere.yaml"),
        lambda: _fit(folder, *resume, data="broken.csv"),
        lambda: _fit(folder, *resume, data="nowhere.csv"),
        lambda: _with_limit(folder, chance.choice([0, 100, 1000]), resume),
        lambda: _without(folder, "write_run", resume),
        lambda: _without(folder, "check_writable", resume),
    ]


def _with_limit(folder: Path, size: int, options: tuple[str, ...]) -> int:
    """Fit where no file may be larger."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return _fit(folder, *options)


def _without(folder: Path, function: str, options: tuple[str, ...]) -> int:
    from otpdag.cli import fit_command

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    setattr(fit_command, function, fail)
    return _fit(folder, *options)


def estimates_from_flips(seed: int, many: int) -> int:
    """How many of so many checkpoints with one flipped bit are taken for whole."""
    chance, taken = random.Random(seed), 0
    warnings.simplefilter("ignore")
    graph = otp.Graph([("k", "x"), ("k", "n")], hidden=["k"])

    def fit(path: Path, **more: object) -> None:
        model = otp.Model(graph, {"k": m.Categorical(2), "x": m.Normal(), "n": m.Poisson()})
        otp.fit(model, _table(seed), restarts=2, checkpoint=path, **more)  # type: ignore[arg-type]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.checkpoint")
        fit(path, callbacks=[lambda record: True])
        whole = path.read_bytes()
        for _ in range(many):
            flipped = bytearray(whole)
            flipped[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
            path.write_bytes(flipped)
            with contextlib.suppress(otp.DataError):
                fit(path)
                taken += 1
    return taken


# --- writers at once --------------------------------------------------------------------------------------------------


def failed_saves(seed: int, many: int, at_once: int = 5) -> int:
    """How many of so many saves of a model to one path err, by several processes at once, that also load it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.otp")
        model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
        otp.fit(model, _table(seed).rename(columns={"n": "y"}))
        model.save(path)

        def save() -> int:
            wrong = 0
            for _ in range(many // at_once):
                try:
                    model.save(path)
                    otp.load(path)
                except Exception:
                    wrong += 1
            return wrong

        return sum(_together([save] * at_once))


def failed_runs(seed: int, many: int) -> int:
    """How many of so many runs, two at a time to one folder, end without a result or a refusal at once."""
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _written(folder, seed)
        for number in range(many // 2):
            codes = _together([lambda n=number: _ended(folder, f"run{n}")] * 2)
            result = CliRunner().invoke(app, ["show", str(folder / f"run{number}")])
            failed += sum(code not in (0, 2) for code in codes) + (0 not in codes) + (result.exit_code != 0)
    return failed


def _ended(folder: Path, out: str, at_once: float = 2.0) -> int:
    """Zero for a result, two for a refusal before any work."""
    began = time.process_time()
    words = ["fit", str(folder / "model.yaml"), str(folder / "data.csv"), "--out", str(folder / out), "--force"]
    result = CliRunner().invoke(app, [*words, *RESTARTS])
    refused = "another process is writing" in result.stderr and time.process_time() - began < at_once
    return 0 if result.exit_code == 0 else 2 if refused else 1


def _together(works: list[Callable[[], int]]) -> list[int]:
    """Exit codes of some work in forks that begin at the same time."""
    ready, go = os.pipe()
    children = []
    for work in works:
        child = os.fork()
        if child == 0:
            os.close(go)
            os.read(ready, 1)
            os._exit(min(forked(work), 200))
        children.append(child)
    os.close(ready)
    os.close(go)  # whoever waits reads its end
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


# --- bombs ------------------------------------------------------------------------------------------------------------


def bombs(seed: int) -> dict[str, float]:
    """Most bytes beyond what was there that each of twenty crafted files takes to be read, or refused."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        return {what: _peak(work) for what, work in _crafted(Path(name), chance)}


def _peak(work: Callable[[], object]) -> float:
    """Bytes in a fork, by way of a file: the peak of a process never falls."""
    with tempfile.NamedTemporaryFile() as told:

        def measured() -> int:
            warnings.simplefilter("ignore")
            Path(told.name).write_text(str(peak_of(lambda: str(work()))[1]))
            return 0

        return float(Path(told.name).read_text()) if forked(measured) == 0 else float("inf")


def _crafted(folder: Path, chance: random.Random) -> Iterator[tuple[str, Callable[[], object]]]:
    for parents in (8, 10, 12, 30):
        path = folder / f"{parents}.bif"
        path.write_text(_bif(parents, 10, chance))
        yield f"BIF of {parents} parents", lambda path=path: _refused(lambda: interop.from_bif(path))
    for parents in (21, 40):
        path = folder / f"binary{parents}.bif"
        path.write_text(_bif(parents, 2, chance))
        yield f"BIF of {parents} parents of two states", lambda path=path: _refused(lambda: interop.from_bif(path))
    table = pd.DataFrame({f"c{n}": [str(k % 11) for k in range(200)] for n in range(12)} | {"x": np.arange(200.0)})
    for child, size in (("c11", 11), ("x", 0)):
        graph = otp.Graph([(f"c{n}", child) for n in range(11)])
        yield f"from_frame {child}", lambda g=graph: _refused(lambda: _fitted(g, table))
        kinds = {f"c{n}": m.Categorical(11) for n in range(12)} | {"x": m.Normal()}
        yield (
            f"Model {child} {size}",
            lambda g=graph, k=kinds: _refused(
                lambda: otp.fit(otp.Model(g, {n: k[n] for n in g.nodes}), table, steps=2)
            ),
        )
    for size in (5_000, 50_000, 100_000):
        kind = f"{{type: Categorical, size: {size}}}"
        text = f"{{edges: [[a, b]], nodes: {{a: {kind}, b: {kind}}}}}"
        yield f"model file of {size} levels", lambda t=text, s=size: _refused(lambda: _from_file(folder, t, s))
    deep = "{edges: [[a, b]], nodes: {b: {type: Normal, network: [10000, 10000, 10000]}}}"
    yield "model file of wide layers", lambda: _refused(lambda: _from_file(folder, deep, 0))
    wide = "{edges: [[a, b]], nodes: {b: {type: Normal, dim: 100000}}}"
    yield "model file of many coordinates", lambda: _refused(lambda: _from_file(folder, wide, 0))
    for number, size in enumerate((10**5, 10**6, 10**9, 10**12)):
        path = folder / f"{number}.otp"
        yield f"saved model of {size} levels", lambda p=path, s=size: _refused(lambda: _saved(p, s))
    many = folder / "many.bif"
    many.write_text(_bif(5, 10, chance, children=60))
    yield "BIF of many tables", lambda: _refused(lambda: interop.from_bif(many))


def _refused(work: Callable[[], object]) -> None:
    with contextlib.suppress(otp.OtpdagError):
        work()


def _bif(parents: int, states: int, chance: random.Random, children: int = 1) -> str:
    names = [f"p{n}" for n in range(parents)]
    chance.shuffle(names)
    listed = ", ".join(f"s{n}" for n in range(states))
    below = [f"child{n}" for n in range(children)]
    blocks = [f"variable {name} {{ type discrete [ {states} ] {{ {listed} }}; }}" for name in (*names, *below)]
    even = ", ".join([repr(1 / states)] * states)
    blocks += [f"probability ( {name} ) {{ table {even}; }}" for name in names]
    blocks += [f"probability ( {child} | {', '.join(names)} ) {{ default {even}; }}" for child in below]
    return "network bomb { }\n" + "\n".join(blocks)


def _fitted(graph: otp.Graph, table: pd.DataFrame) -> None:
    otp.fit(otp.Model.from_frame(graph, table), table, steps=2)


def _from_file(folder: Path, text: str, levels: int) -> None:
    path = folder / "bomb.yaml"
    path.write_text(text)
    column = [str(n) for n in range(100)] if levels else np.arange(100.0)
    table = pd.DataFrame({"a": column, "b": column})
    otp.fit(read_model_file(path).build(table), table, steps=2)


def _saved(path: Path, size: int) -> None:
    """A small saved model whose description says that it is large."""
    import zipfile

    model = otp.Model(otp.Graph([("a", "b")]), {"a": m.Categorical(2), "b": m.Categorical(2)})
    model.set_params({"a": {"probs": [0.5, 0.5]}, "b": {"probs": [[0.5, 0.5], [0.5, 0.5]]}}).save(path)
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in held.items():
            archive.writestr(name, content.replace(b'"size": 2', b'"size": %d' % size))
    path.write_bytes(buffer.getvalue())
    otp.load(path).sample(5, seed=0)


# --- levels -----------------------------------------------------------------------------------------------------------


def seconds_of_levels(seed: int, levels: int = 200, rows: int = 5000) -> float:
    """Processor time of a fit of a category with a category as its parent, both with many levels."""
    rng = np.random.default_rng(seed)
    a, b = (np.concatenate([np.arange(levels), rng.integers(0, levels, rows - levels)]).astype(str) for _ in range(2))
    table = pd.DataFrame({"a": a, "b": b})
    model = otp.Model(otp.Graph([("a", "b")]), {"a": m.Categorical(levels), "b": m.Categorical(levels)})
    began = time.process_time()
    otp.fit(model, table, seed=0)
    taken = time.process_time() - began
    expected = pd.crosstab(table["a"], table["b"], normalize="index").to_numpy()
    np.testing.assert_allclose(model.params()["b"]["probs"], expected, atol=1e-3)
    return taken
