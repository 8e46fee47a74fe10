"""Calls with arguments that are wrong, and folders of runs that are damaged: every one is refused by an error of ours.

:func:`bad_calls` yields them by name; :func:`raw_error` makes one and tells what came of it, if it was anything else.
"""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from typer.testing import CliRunner

import otpdag as otp
from otpdag import interop
from otpdag import mechanisms as m
from otpdag.cli import app

__all__ = ["bad_calls", "damaged_folders", "raw_error"]

Call = tuple[str, Callable[[], Any]]
ODD: tuple[Any, ...] = (None, 5, -1, 2.5, True, float("nan"), "abc", b"x", [], {}, object(), [[1], [2, 3]], ["a"])
ODD += (float("inf"), 10**400, 1j, "a" * 300, 10**30, np.ones(3), pd.Series([1.0, 2.0]), torch.zeros(2, 2), {"x": None})
GRAPH = otp.Graph([("x", "y")])
TABLE = pd.DataFrame({"x": np.arange(20.0) % 7, "y": np.arange(20.0) % 5, "c": list("ab") * 10})


def raw_error(call: Call) -> str | None:
    """What a call raised that is no error of the library; None if it was one, or all went well."""
    name, work = call
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            work()
        except otp.OtpdagError:
            return None
        except Exception as error:
            return f"{name}: {type(error).__name__}: {error!s:.100}"
    return None


def bad_calls() -> Iterator[Call]:
    """Arguments of every kind that are wrong, or doubtful."""
    fitted = otp.Model(GRAPH, {"x": m.Normal(), "y": m.Normal()})
    result = otp.fit(fitted, TABLE)
    for what, value in itertools.product([*_of_one(fitted), *_of_a_result(result), *_options()], ODD):
        name, call = what
        yield f"{name} {value!r:.30}", lambda call=call, value=value: call(value)
    yield from _tables()
    yield from _settings()


def _fit(x: Any = None, y: Any = None, data: Any = TABLE, **options: Any) -> otp.FitResult:
    return otp.fit(otp.Model(GRAPH, {"x": x or m.Normal(), "y": y or m.Normal()}), data, steps=3, **options)


def _of_one(fitted: otp.Model) -> list[tuple[str, Callable[[Any], Any]]]:
    """Functions of one argument, each of which is given every odd value."""
    return [
        ("Graph", otp.Graph),
        ("Graph nodes", lambda v: otp.Graph([("a", "b")], nodes=v)),
        ("Graph hidden", lambda v: otp.Graph([("a", "b")], hidden=v)),
        ("Graph edge", lambda v: otp.Graph([(v, "b")])),
        ("lag", lambda v: otp.lag("a", "b", v)),
        ("Model graph", lambda v: otp.Model(v, {})),
        ("Model mechanisms", lambda v: otp.Model(GRAPH, v)),
        ("Model mechanism", lambda v: otp.Model(GRAPH, {"x": v, "y": m.Normal()})),
        ("from_frame", lambda v: otp.Model.from_frame(GRAPH, v)),
        ("Categorical", m.Categorical),
        ("Normal", m.Normal),
        ("Multinomial", m.Multinomial),
        ("Dirichlet", m.Dirichlet),
        ("StayOrMove", m.StayOrMove),
        ("Given", lambda v: _fit(m.Given(v))),
        ("Deterministic", m.Deterministic),
        ("Decoder", m.Decoder),
        ("network", lambda v: m.Normal(network=v)),
        ("loc", lambda v: _fit(m.Normal(loc=v))),
        ("scale", lambda v: _fit(m.Normal(scale=v))),
        ("start", lambda v: _fit(m.Normal(loc=otp.start(v)))),
        ("tie", lambda v: _fit(m.Normal(scale=otp.tie(v)))),
        ("Documents", otp.Documents),
        ("Images", otp.Images),
        ("Sequences", otp.Sequences),
        ("from_pgmpy", interop.from_pgmpy),
        ("from_pyagrum", interop.from_pyagrum),
        ("from_hmmlearn", interop.from_hmmlearn),
        ("from_sklearn_mixture", interop.from_sklearn_mixture),
        ("from_formulas", interop.from_formulas),
        ("from_bif", interop.from_bif),
        ("load", otp.load),
        ("fit data", lambda v: _fit(data=v)),
        ("fit weights", lambda v: _fit(weights=v)),
        ("fit seed", lambda v: _fit(seed=v)),
        ("fit restarts", lambda v: _fit(restarts=v)),
        ("fit method", lambda v: _fit(method=v)),
        ("fit device", lambda v: _fit(device=v)),
        ("fit time_limit", lambda v: _fit(time_limit=v)),
        ("sample", lambda v: fitted.sample(v, seed=0)),
        ("sample do", lambda v: fitted.sample(3, seed=0, do=v)),
        ("sample do value", lambda v: fitted.sample(3, seed=0, do={"x": v})),
        ("impute", fitted.impute),
        ("predict", lambda v: fitted.predict(TABLE, v)),
        ("query given", lambda v: fitted.query("y", given=v)),
        ("query value", lambda v: fitted.query("y", given={"x": v})),
        ("effect values", lambda v: fitted.effect("x", "y", values=v)),
        ("effect level", lambda v: fitted.effect("x", "y", level=v)),
        ("set_params", lambda v: _copy(fitted).set_params(v)),
        ("set_params value", lambda v: _copy(fitted).set_params({"x": {"loc": v}})),
        ("labels", fitted.labels),
    ]


def _of_a_result(result: otp.FitResult) -> list[tuple[str, Callable[[Any], Any]]]:
    fitted = result.model
    return [
        ("intervals draws", lambda v: result.intervals(draws=v)),
        ("intervals seed", lambda v: result.intervals(draws=10, seed=v)),
        ("intervals level", lambda v: result.intervals(draws=10, level=v)),
        ("standard_errors errors", lambda v: result.standard_errors(errors=v)),
        ("term node", lambda v: result.term(v, "x")),
        ("term parent", lambda v: result.term("y", v)),
        ("transport etas", lambda v: result.transport(TABLE, etas=v, rows=5)),
        ("transport seed", lambda v: result.transport(TABLE, seed=v, rows=5)),
        ("transport rows", lambda v: result.transport(TABLE, rows=v)),
        ("query node", fitted.query),
        ("query do", lambda v: fitted.query("y", do=v)),
        ("effect treatment", lambda v: fitted.effect(v, "y")),
        ("effect outcome", lambda v: fitted.effect("x", v)),
        ("effect on", lambda v: fitted.effect("x", "y", on=v)),
        ("effect path", lambda v: fitted.effect("x", "y", path=v)),
        ("identified", lambda v: fitted.identified(v, "y")),
        ("score kind", lambda v: fitted.score(TABLE, kind=v)),
        ("impute draws", lambda v: fitted.impute(TABLE, draws=v)),
        ("counterfactual do", lambda v: fitted.counterfactual(TABLE, v)),
        ("plan rows", lambda v: fitted.plan(TABLE, rows=v)),
        ("set_params labels", lambda v: fitted.set_params(fitted.params(), labels=v)),
        ("impute_to model", lambda v: otp.impute_to(v, "a.parquet", "b.parquet")),
        ("score_to model", lambda v: otp.score_to(v, "a.parquet", "b.parquet")),
    ]


def _options() -> list[tuple[str, Callable[[Any], Any]]]:
    return [
        ("from_frame hidden", lambda v: otp.Model.from_frame(GRAPH, TABLE, hidden=v)),
        ("from_frame mechanisms", lambda v: otp.Model.from_frame(GRAPH, TABLE, mechanisms=v)),
        ("SearchSchedule alternative_steps", lambda v: otp.SearchSchedule(alternative_steps=v)),
        ("SearchSchedule short_rows", lambda v: otp.SearchSchedule(short_rows=v)),
        ("RobustOptions tails", lambda v: otp.RobustOptions(tails=v)),
        ("RobustOptions slack", lambda v: otp.RobustOptions(slack=v)),
        ("Sinkhorn", otp.divergences.Sinkhorn),
        ("Sinkhorn unbalanced", lambda v: otp.divergences.Sinkhorn(unbalanced=v)),
        ("MMD bandwidth", lambda v: otp.divergences.MMD(bandwidth=v)),
        ("MMD scales", lambda v: otp.divergences.MMD(scales=v)),
        ("SmoothL1", otp.costs.SmoothL1),
        ("ridge centre", lambda v: otp.ridge(1.0, v)),
        ("transport costs", lambda v: otp.transport(costs=v)),
        ("paper costs", lambda v: otp.paper(costs=v)),
        ("Sequences time", lambda v: otp.Sequences(TABLE, time=v)),
        ("from_spec", m.from_spec),
    ]


def _copy(model: otp.Model) -> otp.Model:
    return otp.Model(model.graph, {"x": m.Normal(), "y": m.Normal()})


def _tables() -> Iterator[Call]:
    """Columns of kinds that a node may not be able to read, in memory and in files."""
    rows = 40
    large = np.arange(rows, dtype="uint64") + np.uint64(2**63)
    columns: dict[str, Any] = {
        "uint64": large,
        "UInt64": pd.array(large, dtype="UInt64"),
        "dates": pd.date_range("2020", periods=rows),
        "durations": pd.to_timedelta(range(rows), unit="h"),
        "bytes": [b"a", b"b"] * 20,
        "lists": [[1], [2]] * 20,
        "decimals": [Decimal(n) for n in range(rows)],
        "complex": np.arange(rows) * 1j,
        "mappings": [{}, {"a": 1}] * 20,
        "truth and numbers": pd.Series([1, True, 0, 2] * 10, dtype=object),
        "periods": pd.period_range("2020", periods=rows),
        "intervals": pd.cut(np.arange(rows), 3),
        "sparse": pd.arrays.SparseArray(np.arange(float(rows))),
        "surrogates": pd.Series(["\udc80", "b"] * 20, dtype=object),
        "huge": [10**400, 1] * 20,
    }
    folder = Path(tempfile.mkdtemp())
    for name, column in columns.items():
        frame = pd.DataFrame({"x": column, "y": np.arange(float(rows))})
        yield f"{name} as numbers", lambda frame=frame: _fit(data=frame)
        yield f"{name} as a category", lambda frame=frame: _fit(m.Categorical(2), data=frame)
        yield f"{name} as counts", lambda frame=frame: _fit(m.Poisson(), data=frame)
        yield f"{name} chosen", lambda frame=frame: otp.fit(otp.Model.from_frame(GRAPH, frame), frame, steps=3)
        path = folder / f"{name}.parquet"
        try:
            frame.to_parquet(path)
        except Exception:  # what Parquet cannot hold is no question to us
            continue
        yield f"{name} in a file", lambda path=path: _fit(data=path)
        parts = otp.Partitioned(path, block_rows=10, held_rows=5)
        yield f"{name} in parts", lambda parts=parts: _fit(data=parts)
    tensors = {"half precision": torch.ones(20).bfloat16(), "sparse tensors": torch.eye(20)[0].to_sparse()}
    for name, tensor in tensors.items():
        yield name, lambda tensor=tensor: _fit(data={"x": tensor, "y": np.arange(20.0)})
    pairs = pd.MultiIndex.from_tuples([("x", "a"), ("y", "b")])
    yield "names of two parts", lambda: _fit(data=pd.DataFrame(np.ones((20, 2)), columns=pairs))
    yield "names that are numbers", lambda: _fit(data=pd.DataFrame(np.ones((20, 2))))
    yield "a name twice", lambda: _fit(data=pd.DataFrame(np.ones((20, 3)), columns=["x", "x", "y"]))
    yield "columns of two lengths", lambda: _fit(data={"x": [1, 2], "y": [1]})


def _settings() -> Iterator[Call]:
    makers: dict[str, Callable[[Any], Any]] = {
        "entropic eps": lambda v: otp.entropic(eps=v),
        "entropic eta": lambda v: otp.entropic(eta=v),
        "entropic steps": lambda v: otp.entropic(steps=v),
        "paper batch_size": lambda v: otp.paper(steps=3, batch_size=v),
        "paper learning_rate": lambda v: otp.paper(steps=3, learning_rate=v),
        "transport points": lambda v: otp.transport(points=v),
        "transport divergence": lambda v: otp.transport(divergence=v),
        "course": lambda v: otp.SearchSchedule(short_rows=v),
        "robust": lambda v: otp.RobustOptions(most_dropped=v),
    }
    for (name, make), value in itertools.product(makers.items(), ODD):
        yield f"{name} {value!r:.30}", lambda make=make, value=value: make(value)
    for name in ("phi.x", "tie.x", "\udc80", "x\x00y", "a/b", "z[0]", "x.loc", " ", "."):
        yield f"a node called {name!r}", lambda name=name: _called(name)


def _called(name: str) -> None:
    model = otp.Model(otp.Graph([(name, "y")]), {name: m.Normal(), "y": m.Normal()})
    table = TABLE.rename(columns={"x": name})
    otp.fit(model, table)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder, "model.otp"))
        otp.load(Path(folder, "model.otp")).sample(3, seed=0)


# --- folders of runs --------------------------------------------------------------------------------------------------


def damaged_folders(seed: int, many: int) -> Iterator[Call]:
    """Folders of a fit with a file cut, removed, or changed at random, which are shown and reported."""
    chance = random.Random(seed)
    folder = Path(tempfile.mkdtemp())
    (folder / "model.yaml").write_text("edges: [[x, y]]")
    TABLE.to_csv(folder / "data.csv", index=False)
    made = ["fit", folder / "model.yaml", folder / "data.csv", "--out", folder / "run", "--intervals", 10, "--quiet"]
    told = CliRunner().invoke(app, [str(word) for word in made])
    if told.exit_code:
        raise RuntimeError(told.output)
    names = sorted(path.name for path in (folder / "run").iterdir() if path.suffix in (".json", ".csv", ".otp"))
    for number in range(many):
        name = names[number % len(names)]
        content = _damaged((folder / "run" / name).read_bytes(), chance)
        command = "show" if name in ("shown.json", "model.otp") else "report"
        yield f"{command} with a damaged {name}", lambda n=name, c=content, w=command: _told(folder, n, c, w)


def _damaged(content: bytes, chance: random.Random) -> bytes:
    kind = chance.randrange(5)
    if kind == 0:
        return content[: chance.randrange(len(content))]
    if kind == 1:
        return chance.choice([b"", b"[]", b"{}", b"null", b"[[[", b"a,b\n1\n1,2,3\n", bytes(range(256)), b"\xff\xfe"])
    if kind == 2:
        words = content.split(b",")
        words[chance.randrange(len(words))] = chance.choice([b"", b"x", b"NaN", b"1e999", b"-1", b'"', b"{}"])
        return b",".join(words)
    if kind == 3:
        words = content.split(b":")
        words[chance.randrange(len(words))] = chance.choice([b' "x"', b" null", b" [1]", b" {}", b" NaN", b" 1e999"])
        return b":".join(words)
    changed = bytearray(content)
    for _ in range(chance.randint(1, 6)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def _told(folder: Path, name: str, content: bytes, command: str) -> None:
    """Run a command on a copy; what it calls a bug is raised."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder / "run", Path(copy, "run"))
        Path(copy, "run", name).write_bytes(content)
        result = CliRunner().invoke(app, [command, str(Path(copy, "run"))])
    if result.exit_code not in (0, 2):
        raise RuntimeError(result.output)
