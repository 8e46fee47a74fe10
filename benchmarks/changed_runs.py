"""Runs that are resumed after one thing has changed: no checkpoint may take one of them for its own.

:func:`changes` yields pairs of runs; :func:`accepted` stops the first and resumes the second from its checkpoint.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
from scipy import sparse
from torch import nn

import otpdag as otp
from otpdag import divergences as d
from otpdag import mechanisms as m

__all__ = ["Change", "accepted", "changes"]


@dataclass(frozen=True)
class Fit:
    """What a call of ``otp.fit`` is given."""

    graph: otp.Graph
    kinds: dict[str, Any]
    data: Any
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, checkpoint: Path, **more: Any) -> otp.FitResult:
        """Call it."""
        model = otp.Model(self.graph, dict(self.kinds))
        return otp.fit(model, self.data, checkpoint=checkpoint, **{"seed": 3, **self.options, **more})


@dataclass(frozen=True)
class Change:
    """A run, and what it is resumed as; ``around`` holds while it is resumed."""

    name: str
    before: Fit
    after: Fit
    around: Callable[[], Any] = nullcontext


def accepted(change: Change) -> bool:
    """Whether a run is resumed after the change."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "run.checkpoint")
        change.before.run(path, callbacks=[lambda record: True])
        assert path.exists(), change.name
        change.before.run(path, callbacks=[lambda record: True])  # itself is accepted
        try:
            with change.around():
                change.after.run(path)
        except otp.DataError as error:
            return "belongs to another" not in str(error)
    return True


def changes(seed: int = 0) -> Iterator[Change]:
    """Runs and what is changed of them, one thing at a time."""
    rng = np.random.default_rng(seed)
    for of_one in (_tables, _functions, _sequences, _documents, _images, _files):
        for name, before, after in of_one(rng):
            yield Change(name, before, after)
    table = _table(rng)
    for package in (torch, otp, np):
        around = _patched(package)
        yield Change(f"version of {package.__name__}", table, table, around)


def _patched(package: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(package, "__version__", "99.0")


Changed = Iterator[tuple[str, Fit, Fit]]


def _table(rng: np.random.Generator) -> Fit:
    rows = 60
    k, z = rng.integers(0, 2, rows), rng.integers(0, 2, rows)
    x = 2.0 * z + rng.normal(size=rows)
    y = 0.5 * x + rng.normal(size=rows)
    frame = {"x": x, "y": y, "w": y + rng.normal(size=rows), "k": np.where(k, "a", "b"), "v": rng.uniform(1, 2, rows)}
    graph = otp.Graph([("z", "x"), ("x", "y"), ("y", "w"), ("k", "x")], hidden=["z"])
    kinds = {"z": m.Categorical(2), "x": m.Normal(), "y": m.Normal(), "w": m.Normal(), "k": m.Categorical(2)}
    return Fit(graph, kinds, pd.DataFrame(frame), {"weights": "v", "restarts": 2})


def _tables(rng: np.random.Generator) -> Changed:
    base = _table(rng)
    row, cell = int(rng.integers(60)), str(rng.choice(["x", "y", "w"]))

    def frame(**changed: Any) -> Fit:
        return replace(base, data=base.data.assign(**changed))

    def graph(*edges: tuple[str, str], nodes: tuple[str, ...] = ()) -> Fit:
        return replace(base, graph=otp.Graph(edges, nodes=nodes, hidden=["z"]))

    def kinds(**changed: Any) -> Fit:
        return replace(base, kinds={**base.kinds, **changed})

    def options(**changed: Any) -> Fit:
        return replace(base, options={**base.options, **changed})

    moved, emptied = base.data[cell].copy(), base.data[cell].copy()
    moved.iloc[row] *= 1 + 1e-14
    emptied.iloc[row] = np.nan
    other_weights = base.data["v"].to_numpy().copy()
    other_weights[row] += 0.1
    shown = replace(base, graph=otp.Graph(base.graph.edges), data=base.data.assign(z=rng.integers(0, 2, 60)))
    yield "an edge reversed", base, graph(("z", "x"), ("y", "x"), ("y", "w"), ("k", "x"))
    yield "edges in another order of nodes", base, graph(("z", "y"), ("y", "x"), ("x", "w"), ("k", "x"))
    yield "an edge more", base, graph(*base.graph.edges, ("x", "w"))
    yield "an edge less", base, graph(("z", "x"), ("x", "y"), ("y", "w"), nodes=("k",))
    yield "a hidden node seen", base, shown
    yield "another family", base, kinds(y=m.StudentT())
    yield "a given value", base, kinds(y=m.Normal(scale=0.5))
    yield "another given value", kinds(y=m.Normal(scale=0.5)), kinds(y=m.Normal(scale=0.5 + 1e-12))
    yield "a start in place of a given value", kinds(y=m.Normal(scale=0.5)), kinds(y=m.Normal(scale=otp.start(0.5)))
    yield "tied scales", base, kinds(y=m.Normal(scale=otp.tie("s")), w=m.Normal(scale=otp.tie("s")))
    yield "another number of categories", base, kinds(z=m.Categorical(3))
    yield "layers of a network", kinds(y=m.Normal(network=(3,))), kinds(y=m.Normal(network=(4,)))
    yield "a digit of a cell", base, frame(**{cell: moved})
    yield "a cell emptied", base, frame(**{cell: emptied})
    yield "a level called otherwise", base, frame(k=base.data["k"].replace("a", "c"))
    yield "a weight", base, options(weights=other_weights)
    yield "no weights", base, options(weights=None)
    yield "the seed", base, options(seed=4)
    yield "the number of starts", base, options(restarts=3)
    yield "the number of steps", base, options(steps=7)
    yield "the method", base, options(method="transport")
    yield "a setting of the method", options(method=otp.entropic(eps=0.9)), options(method=otp.entropic(eps=0.8))
    yield "the course", base, options(course=otp.SearchSchedule(short_steps=5))
    yield "a robust fit", base, options(robust=True)
    yield "how robust", options(robust=True), options(robust=otp.RobustOptions(most_dropped=0.2))
    by = [options(method=otp.transport(divergence=divergence)) for divergence in (d.Energy(), d.Sinkhorn(), d.MMD())]
    yield "a divergence", by[0], by[1]
    yield "another divergence", by[1], by[2]


def _functions(rng: np.random.Generator) -> Changed:
    rows = 50
    x = rng.normal(size=rows)
    frame = pd.DataFrame({"x": x, "y": 2 * x + rng.normal(size=rows)})
    graph = otp.Graph([("x", "f"), ("f", "y")], hidden=["f"])

    def of(function: Callable[..., torch.Tensor]) -> Fit:
        return Fit(graph, {"x": m.Normal(), "f": m.Deterministic(function), "y": m.Normal()}, frame)

    def times(by: float) -> Callable[..., torch.Tensor]:
        return lambda parents: by * parents["x"]

    yield "the code of a function", of(lambda parents: 2 * parents["x"]), of(lambda parents: 3 * parents["x"])
    yield "what a function holds", of(times(2.0)), of(times(3.0))
    own = {"torch": torch, "FACTOR": 2.0}
    exec("def f(parents):\n    return FACTOR * parents['x']", own)
    others = dict(own, FACTOR=3.0)
    exec("def f(parents):\n    return FACTOR * parents['x']", others)
    yield "what a function refers to", of(own["f"]), of(others["f"])
    schedules = [{"method": otp.entropic(eps=lambda done, to=to: 1 - to * done, steps=30)} for to in (0.1, 0.2)]
    factor = otp.Graph([("z", "x"), ("z", "y")], hidden=["z"])
    plain = Fit(factor, {"z": m.Normal(), "x": m.Normal(), "y": m.Normal()}, frame)
    yield "a schedule", replace(plain, options=schedules[0]), replace(plain, options=schedules[1])


def _sequences(rng: np.random.Generator) -> Changed:
    steps = pd.DataFrame({"x": rng.normal(size=80).cumsum(), "of": np.repeat([0, 1, 2, 3], 20)})

    def fit(by: int = 1, changed: pd.DataFrame = steps) -> Fit:
        return Fit(otp.Graph([otp.lag("x", "x", by)]), {"x": m.Normal()}, otp.Sequences(changed, sequence="of"))

    cell = steps.assign(x=steps["x"].where(steps.index != int(rng.integers(80)), 0.5))
    yield "a lag", fit(), fit(2)
    yield "a cell of a sequence", fit(), fit(changed=cell)
    yield "where sequences begin", fit(), fit(changed=steps.assign(of=np.repeat([0, 1, 2, 3], [19, 21, 20, 20])))


def _documents(rng: np.random.Generator) -> Changed:
    first, second = (sparse.csr_array(rng.poisson(0.4, (30, 12))) for _ in range(2))

    def fit(counts: Any) -> Fit:
        graph = otp.Graph([("shares", "words")], hidden=["shares"])
        kinds = {"shares": m.Dirichlet(3), "words": m.Multinomial(12)}
        return Fit(graph, kinds, otp.Documents(counts), {"restarts": 1})

    other = first.copy()
    other.data[0] += 1
    yield "another corpus of the same shape", fit(first), fit(second)
    yield "a count of a word", fit(first), fit(other)


def _images(rng: np.random.Generator) -> Changed:
    frame = pd.DataFrame({"z": rng.normal(size=40), "x": rng.normal(size=40)})
    graph = otp.Graph([("z", "x")])
    layers = [nn.Linear(1, 1) for _ in range(2)]

    def fit(layer: nn.Module, changed: pd.DataFrame = frame) -> Fit:
        return Fit(graph, {"z": m.Normal(), "x": m.Decoder(layer, noise_scale=1.0)}, changed, {"steps": 5})

    yield "a module", fit(layers[0]), fit(layers[1])
    yield "a module of other layers", fit(layers[0]), fit(nn.Sequential(layers[0], nn.Tanh()))


def _files(rng: np.random.Generator) -> Changed:
    folder = Path(tempfile.mkdtemp())
    graph = otp.Graph([("x", "y")])
    fits = []
    for number in range(2):
        x = rng.normal(size=400)
        path = folder / f"{number}.parquet"
        pd.DataFrame({"x": x, "y": x + rng.normal(size=400)}).to_parquet(path)
        data = otp.Partitioned(path, block_rows=100, held_rows=50)
        fits.append(Fit(graph, {"x": m.StudentT(), "y": m.StudentT()}, data))
    yield "a table in a file", fits[0], fits[1]
