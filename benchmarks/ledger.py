"""A ledger of small fits over all kinds of data, methods and options: loss, estimates, status and processor time.

It guards changes of the code that must not change results. Keep a report before the change, and compare after it::

    python -m benchmarks ledger --json --seed S > before.json
    python -m benchmarks ledger --seed S --compare before.json             # run, then compare
    python -m benchmarks ledger --compare before.json after.json           # compare two reports

A comparison passes if no loss rose by more than 1e-6, no case was lost, and all took at most 1.1 times as long.
Only public names are used. ``ratio`` is processor seconds by one thread, ``ours`` the loss.
"""

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.table import Table
from threadpoolctl import threadpool_limits

import otpdag as otp
from benchmarks.harness import Case, Record, Settings, Skip, Streams, streams, timed
from benchmarks.random_graphs import declare, hidden_tree, mixed_world
from experiments import small_models
from experiments.code_prior import CodePrior
from experiments.outliers import replace_rows
from otpdag import datasets, divergences, estimators
from otpdag import mechanisms as m
from otpdag.engine import EM, Adam
from otpdag.objective import Drawn, Objective, PushForward, TopicSweeps

SAME_LOSS = 1e-6
MOST_TIME = 1.1  # times as long as before, all together
MOST_VALUES = 64  # of one parameter that a report holds; of longer ones as many, evenly spaced, with mean and size
DIGITS = 10
ROWS, GAPS, STEPS = 600, 0.2, 60
VECTORS = ("normal", "multivariate", "multinomial", "dirichlet")

Values = Mapping[str, Any]
Asked = Callable[[Any, Any], Values]
Work = Callable[[], tuple[float, str, Values]]
Build = Callable[[Streams], Work]


# -- one entry ---------------------------------------------------------------------------------------------------------


def entry(name: str, build: Build, settings: Settings) -> Record:
    """Draw the data, then time the fit and what is asked of it, by one thread."""
    with warnings.catch_warnings(), one_thread():
        warnings.simplefilter("ignore")
        warm_up()
        work = build(streams(settings.seed, f"ledger {name}", 0))
        (loss, status, values), seconds = timed(work, time.process_time)
    if not np.isfinite(loss):
        raise FloatingPointError(f"the loss must be finite; got {loss}")
    flat = {key: numbers(value) for key, value in sorted(values.items())}
    return {"ratio": seconds, "ours": float(loss), "seconds": seconds, "status": status, "values": flat}


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch and the libraries below numpy use one thread, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


@cache
def warm_up() -> None:
    """Pay for imports and caches once, outside of all times."""
    table = pd.DataFrame({"x": np.linspace(-1.0, 1.0, 50) ** 3})
    otp.fit(otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal()}), table)


def fitted(model: "otp.Model", data: Any, seed: int, ask: Asked | None = None, **options: Any) -> Any:
    """Fit a model; its values are the natural parameters, or the answers if something is asked."""
    result = otp.fit(model, data, seed=seed, **options)
    return result.loss, str(result.status), ask(result, data) if ask else parameters(model)


def parameters(model: "otp.Model") -> Values:
    return {f"{node}.{name}": value for node, own in model.params().items() for name, value in own.items()}


def numbers(value: Any) -> list[float | None]:
    """Any answer as a short list of rounded numbers; categories are numbered in their order."""
    if isinstance(value, pd.Series | pd.DataFrame):
        frame = pd.DataFrame(value)
        value = np.column_stack([_column(frame.iloc[:, i]) for i in range(frame.shape[1])])
    flat = np.asarray(value, dtype=float).ravel()
    if len(flat) > MOST_VALUES:
        some = flat[np.linspace(0, len(flat) - 1, MOST_VALUES).astype(int)]
        flat = np.append(some, [flat.mean(), np.sqrt((flat**2).mean())])
    return [float(f"{one:.{DIGITS}g}") if np.isfinite(one) else None for one in flat]


def _column(column: pd.Series) -> np.ndarray:
    if pd.api.types.is_numeric_dtype(column.dtype):
        return column.to_numpy(dtype=float, na_value=np.nan)
    return pd.factorize(column.astype(str), sort=True)[0].astype(float)


# -- before and after --------------------------------------------------------------------------------------------------


def compare(before: Record, after: Record) -> tuple[Table, bool]:
    """A table of what changed in the cases that ran after, and whether the rule holds."""
    if before["seed"] != after["seed"]:
        raise ValueError(f"both reports must have one seed; got {before['seed']} and {after['seed']}")
    grid = Table(title=f"ledger, seed {after['seed']}: after against before")
    for name in ("case", "loss", "values", "sorted", "time", ""):
        grid.add_column(name, justify="left" if name in ("case", "") else "right", no_wrap=True)
    known, good, old_time, new_time = {one["case"]: one for one in before["cases"]}, True, 0.0, 0.0
    for new in after["cases"]:
        old = known.get(new["case"], {})
        if "ours" not in old or "ours" not in new:
            good = good and "ours" not in old
            grid.add_row(new["case"], "-", "-", "-", "-", "lost" if "ours" in old else "nothing to compare with")
            continue
        rise = new["ours"] - old["ours"]
        remark = "loss rose; " * (rise > SAME_LOSS) + f"now {new['status']}" * (new["status"] != old["status"])
        values = [f"{change(old['values'], new['values'], order):.1e}" for order in (list, ordered)]
        grid.add_row(new["case"], f"{rise:+.1e}", *values, f"{new['seconds'] / old['seconds']:.2f}", remark)
        good, old_time, new_time = good and rise <= SAME_LOSS, old_time + old["seconds"], new_time + new["seconds"]
    good = good and new_time <= MOST_TIME * old_time
    grid.caption = f"{new_time:.1f} s after {old_time:.1f} s: {'passed' if good else 'failed'}"
    return grid, good


def ordered(values: list[float | None]) -> list[float | None]:
    """The same numbers by size: hidden labels do not matter."""
    return sorted(values, key=lambda one: np.inf if one is None else one)


def change(old: Values, new: Values, order: Callable[[list], list]) -> float:
    """The largest change of a value, relative to the largest of its parameter; infinite if there are others."""
    if {name: len(one) for name, one in old.items()} != {name: len(one) for name, one in new.items()}:
        return float("inf")
    return max((_change(order(old[name]), order(new[name])) for name in old), default=0.0)


def _change(old: list, new: list) -> float:
    a, b = np.array(old, dtype=float), np.array(new, dtype=float)
    if (np.isnan(a) != np.isnan(b)).any():
        return float("inf")
    seen = ~np.isnan(a)
    return float(np.abs(a - b)[seen].max(initial=0.0) / (np.abs(a)[seen].max(initial=0.0) + 1e-6))


# -- models and tables -------------------------------------------------------------------------------------------------


def work(s: Streams, edges: str, data: Any, hidden: str = "", nodes: Any = None, gaps: float = 0, **rest: Any) -> Work:
    """The fit of a model with edges ``"a>b"``, lagged ones ``"a~b"``, to data that lose cells."""
    if isinstance(data, pd.DataFrame):
        data = small_models.delete_cells(data, gaps, s.missing)
    elif gaps:
        data = {name: np.where(s.missing.random(one.shape) < gaps, np.nan, one) for name, one in data.items()}
    made = [otp.lag(*word.split("~")) if "~" in word else tuple(word.split(">")) for word in edges.split()]
    graph = otp.Graph(made, hidden=hidden.split())
    model = otp.Model(graph, dict.fromkeys(graph.nodes, m.Normal()) | (nodes or {}))
    return partial(fitted, model, data, s.fit, **rest)


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def category(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return (rng.random((len(x), 1)) > softmax(np.outer(x, [-1.0, 0.0, 1.0])).cumsum(1)[:, :-1]).sum(1)


CHILDREN: dict[str, tuple[Callable[..., Any], Callable[[np.ndarray, np.random.Generator], np.ndarray]]] = {
    "normal": (m.Normal, lambda x, rng: rng.normal(x, 0.7)),
    "student": (m.StudentT, lambda x, rng: x + 0.5 * rng.standard_t(4, len(x))),
    "lognormal": (m.LogNormal, lambda x, rng: np.exp(rng.normal(0.5 * x, 0.4))),
    "gamma": (m.Gamma, lambda x, rng: rng.gamma(3.0, np.exp(0.5 * x) / 3)),
    "beta": (m.Beta, lambda x, rng: rng.beta(8 * logistic(x), 8 * logistic(-x)).clip(1e-6, 1 - 1e-6)),
    "poisson": (m.Poisson, lambda x, rng: rng.poisson(np.exp(0.5 + 0.5 * x))),
    "negative_binomial": (m.NegativeBinomial, lambda x, rng: rng.poisson(np.exp(x / 2) * rng.gamma(3.0, 0.5, len(x)))),
    "categorical": (partial(m.Categorical, 3), category),
    "bernoulli": (m.Bernoulli, lambda x, rng: (rng.random(len(x)) < logistic(x)).astype(int)),
    "ordinal": (partial(m.Ordinal, 3), lambda x, rng: np.digitize(rng.logistic(x), [-1.0, 1.0])),
    "weibull": (m.Weibull, lambda x, rng: np.exp(0.5 * x) * rng.weibull(2.0, len(x))),
    "exponential": (m.Exponential, lambda x, rng: rng.exponential(np.exp(0.5 * x))),
}


def family(kind: str, s: Streams, given: bool = False, gaps: float = 0.0, **settings: Any) -> Work:
    """A category and a number (both modelled or given), their child of some kind, and a number below that."""
    k, t = s.data.integers(0, 2, ROWS), s.data.normal(size=ROWS)
    y = CHILDREN[kind][1](0.8 * k - 0.4 + 0.6 * t, s.data)
    frame = pd.DataFrame({"y": y, "w": s.data.normal(0.5 * y - 1.0, 0.8)}, dtype=float)
    nodes = {"k": m.Categorical(2), "y": CHILDREN[kind][0](**settings)}
    if not given:
        return work(s, "k>y t>y y>w", frame.assign(k=k, t=t), nodes=nodes, gaps=gaps)
    nodes |= {"k": m.Given(m.Categorical(2).space), "t": m.Given()}
    return work(s, "k>y t>y y>w", small_models.delete_cells(frame, gaps, s.missing).assign(k=k, t=t), nodes=nodes)


def vectors(kind: str, gaps: float, s: Streams) -> Work:
    """A category above a vector; cells of both are missing, or of the category alone where a vector has a sum."""
    k = s.data.integers(0, 2, ROWS)
    centre = np.where(k[:, None], [1.0, 0.5, -1.0], [-0.5, 0.0, 1.0])
    normal = centre + s.data.normal(size=(ROWS, 3)) @ (np.eye(3) + 0.4 * np.tri(3))
    shares = s.data.gamma(np.exp(1.0 + centre)) + 1e-6
    mechanism, x = {
        "normal": (m.Normal(3), normal),
        "multivariate": (m.MultivariateNormal(3), normal),
        "multinomial": (m.Multinomial(3), s.data.multinomial(20, softmax(centre))),
        "dirichlet": (m.Dirichlet(3), shares / shares.sum(1, keepdims=True)),
    }[kind]
    lost = s.missing.random(x.shape) < (gaps if x is normal else 0.0)
    data = {"k": np.where(s.missing.random(ROWS) < gaps, np.nan, k), "x": np.where(lost, np.nan, x)}
    return work(s, "k>x", data, nodes={"k": m.Categorical(2), "x": mechanism})


def mixed(nodes: int, gaps: float, s: Streams, **options: Any) -> Work:
    """Numbers, counts and categories in a random graph."""
    world = mixed_world(nodes, s.data)
    frame = small_models.delete_cells(world.sample(ROWS, s.data), gaps, s.missing)
    return partial(fitted, declare(world.parents, world.kinds, world.sizes), frame, s.fit, **options)


# -- hidden nodes ------------------------------------------------------------------------------------------------------


def factors(number: int, s: Streams, spoilt: float = 0.0, **options: Any) -> Work:
    """Hidden numbers with four columns each; the last column has them all for parents."""
    tables = [small_models.factor(ROWS, s.data)[0].add_prefix(f"f{i}_") for i in range(number)]
    frame, _ = replace_rows(pd.concat(tables, axis=1), spoilt, "box", s.data)
    edges = [f"f{i}>f{i}_x{c}" for i in range(number) for c in range(1, 5)]
    edges += [f"f{i}>f{number - 1}_x4" for i in range(number - 1)]
    return work(s, " ".join(edges), frame, " ".join(f"f{i}" for i in range(number)), **options)


def settled(s: Streams) -> Work:
    """Parameters that are fixed, tied and started."""
    same = otp.tie("sigma")
    nodes = {"f0": m.Normal(scale=otp.start(1.0)), "f0_x1": m.Normal(weight=1.0, scale=same)}
    nodes |= {"f0_x2": m.Normal(scale=same), "f0_x3": m.Normal(scale=otp.start(0.5), loc=0.0)}
    return factors(1, s, nodes=nodes, gaps=0.1)


def formulas(s: Streams) -> Work:
    """A structural equation model in lavaan's words, with correlated errors."""
    frame = small_models.delete_cells(small_models.factor(ROWS, s.data)[0], 0.1, s.missing)
    model = otp.neighbours.from_formulas("f =~ 1*x1 + x2 + x3 + x4\nx3 ~~ x4", frame)
    return partial(fitted, model, frame, s.fit)


def behind(kind: str, s: Streams) -> Work:
    """A hidden number behind a child of some kind and two numbers; ``"count"`` is a hidden count behind numbers."""
    z = s.data.poisson(2.0, ROWS) if kind == "count" else s.data.normal(size=ROWS)
    draw = CHILDREN["normal" if kind == "count" else kind]
    frame = pd.DataFrame({"v": s.data.normal(z), "y": draw[1](z, s.data), "w": s.data.normal(-1.0 * z)})
    hidden = m.Poisson() if kind == "count" else m.Normal()
    return work(s, "z>v z>y z>w", frame, "z", {"z": hidden, "y": draw[0]()}, gaps=0.1)


def mixture(s: Streams, probs: Any = None, **options: Any) -> Work:
    nodes = {"z": m.Categorical(3, probs=probs), "x": m.Normal(2)}
    return work(s, "z>x", small_models.mixture(ROWS, s.data)[0], "z", nodes, **options)


def classes(s: Streams, **options: Any) -> Work:
    frame = small_models.latent_class(ROWS, s.data)[0]
    nodes = {name: m.Categorical(3) for name in frame} | {"z": m.Categorical(2)}
    return work(s, "z>x1 z>x2 z>x3 z>x4", frame, "z", nodes, **options)


def mixed_dag(s: Streams, rows: int = ROWS, **options: Any) -> Work:
    """A hidden category behind a number, a count and a category."""
    nodes = {"h": m.Categorical(3), "x2": m.Poisson(), "x3": m.Categorical(3)}
    return work(s, "h>x1 h>x2 x1>x2 h>x3", small_models.mixed_dag(rows, s.data)[0], "h", nodes, **options)


def parquet(s: Streams) -> Work:
    """Rows in a file, read block by block."""
    build = mixed_dag(s, 3000, gaps=0.1)
    model, frame, seed = build.args

    def from_file() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            frame.to_parquet(file := Path(folder) / "rows.parquet")
            return fitted(model, otp.Partitioned(str(file), block_rows=1000, held_rows=500, memory=0), seed, restarts=3)

    return from_file


def category_and_number(s: Streams) -> Work:
    k = s.data.integers(0, 2, ROWS)
    z = s.data.normal(3.0 * k - 1.5)
    frame = pd.DataFrame({f"x{i}": s.data.normal(i * z, 0.7) for i in (1, 2, 3)}).assign(c=(k + z > 0.5).astype(int))
    nodes = {"k": m.Categorical(2), "c": m.Categorical(2)}
    return work(s, "k>z z>x1 z>x2 z>x3 k>c", frame, "k z", nodes, gaps=0.1, restarts=4)


def without_density(s: Streams) -> Work:
    """A function of what is seen and what is not: only transport applies."""
    a, b = s.data.normal(1.0, 0.5, ROWS), s.data.normal(2.0, 0.7, ROWS)
    nodes = {"b": m.Normal(loc=otp.start(1.0), scale=otp.start(1.0)), "d": m.Deterministic(lambda p: p["a"] * p["b"])}
    return work(s, "a>d b>d", pd.DataFrame({"a": a, "d": a * b}), "b", nodes)


def simulator(s: Streams) -> Work:
    """A function that only simulates, below a hidden cause."""
    z = s.data.normal(size=ROWS)
    x = np.sinh(0.7 * z) + 0.3 * s.data.normal(size=ROWS)
    bounds = {"slope": (0.0, 2.0), "scale": (0.0, 1.0)}
    node = m.Simulator(
        lambda p, u, slope, scale: torch.sinh(slope * p["z"]) + scale * u, dict.fromkeys(bounds), bounds=bounds
    )
    return work(s, "z>x", {"x": x}, "z", {"z": m.Normal(loc=0.0, scale=1.0), "x": node})


def decoder(s: Streams, gaps: float = 0.0) -> Work:
    """A module of torch behind a hidden number."""
    z = s.data.normal(size=(ROWS, 1))
    x = np.hstack([z, z**2 / 2, -z]) + 0.3 * s.data.normal(size=(ROWS, 3))
    module = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
    with torch.no_grad():
        for number, one in enumerate(module.parameters()):
            one.copy_(torch.linspace(-0.5, 0.7, one.numel()).reshape(one.shape).roll(number, 0))
    made = m.Decoder(module, m.Normal(3).space, noise_scale=otp.start(0.5))
    return work(s, "z>x", {"x": x}, "z", {"x": made}, gaps, restarts=2, steps=150)


def network(source: str, s: Streams, hidden: str = "", gaps: float = GAPS, **options: Any) -> Work:
    """A published network, or a tree of hidden binaries."""
    path = Path(os.environ.get("OTPDAG_DATA", "")) / "bif" / f"{source}.bif"
    if source != "tree" and not path.is_file():
        raise Skip("set OTPDAG_DATA to the folder that has the networks, in bif/")
    made = hidden_tree(4, s.data) if source == "tree" else datasets.read_bif(path)
    nodes = {node: m.Categorical(len(made.states[node])) for node in made.nodes}
    edges = " ".join(f"{a}>{b}" for a, b in made.graph.edges)
    frame = made.sample(ROWS, s.data).drop(columns=hidden.split())
    return work(s, edges, frame, hidden, nodes, gaps, **options)


def dense(s: Streams) -> Work:
    """Sixteen binaries, each with the three before it as parents."""
    frame, edges = pd.DataFrame(index=range(ROWS)), ""
    for node in range(16):
        above = [f"x{p}" for p in range(max(0, node - 3), node)]
        frame[f"x{node}"] = (s.data.random(ROWS) < logistic(1.5 * (frame[above] - 0.5).sum(axis=1))).astype(int)
        edges += "".join(f" {p}>x{node}" for p in above)
    return work(s, edges, frame, nodes={name: m.Categorical(2) for name in frame}, gaps=0.4)


# -- sequences, documents, images --------------------------------------------------------------------------------------


def states(rng: np.random.Generator, sequences: int = 12, length: int = 60) -> np.ndarray:
    """Three states that last."""
    moves = np.where(rng.random((sequences, length)) < 0.1, rng.integers(1, 3, (sequences, length)), 0)
    return (rng.integers(0, 3, (sequences, 1)) + moves.cumsum(1)) % 3


def chain(s: Streams, kind: str = "poisson", state: Any = None, **options: Any) -> Work:
    z = states(s.data)
    x = s.data.poisson(4.0 + 8 * z) if kind == "poisson" else s.data.normal(3.0 * z - 3)
    nodes = {"z": state or m.Categorical(3), "x": CHILDREN[kind][0]()}
    return work(s, "z~z z>x", {"x": x}, "z", nodes, **{"restarts": 3} | options)


def chains(s: Streams) -> Work:
    """Two hidden chains, one moved by a covariate, and two series."""
    z, y, u = states(s.data), states(s.data), s.data.normal(size=(12, 60))
    data = {"u": u, "x": s.data.normal(3.0 * z - 3), "c": s.data.poisson(2.0 + 6.0 * y)}
    nodes = {"z": m.Categorical(3), "y": m.StayOrMove(3), "c": m.Poisson(), "u": m.Given()}
    return work(s, "z~z y~y u>z z>x y>c", data, "z y", nodes, restarts=2)


def lags(switching: bool, s: Streams) -> Work:
    """Two series that move each other, or one whose level a hidden state switches."""
    z, x = states(s.data), s.data.normal(size=(12, 60, 2))
    for t in range(1, 60):
        x[:, t] += x[:, t - 1] @ np.array([[0.6, 0.2], [0.0, 0.5]]) + switching * (2.0 * z[:, [t]] - 2)
    if switching:
        return work(s, "z~z z>x x~x", {"x": x[:, :, 0]}, "z", {"z": m.Categorical(3)}, 0.05, restarts=3)
    return work(s, "x~x x~y y~y", {"x": x[:, :, 0], "y": x[:, :, 1]}, gaps=0.05)


def smoothed(kind: str, s: Streams, edges: str = "z~z z>x", hidden: str = "z", **options: Any) -> Work:
    """Hidden numbers: linear normal, behind counts, or with a level that switches."""
    level, z = states(s.data, 6, 40), s.data.normal(size=(6, 40))
    for t in range(1, 40):
        z[:, t] = 0.8 * z[:, t - 1] + 0.6 * z[:, t] + (0.8 * level[:, t] - 0.8) * ("k" in hidden)
    x = s.data.poisson(np.exp(1.0 + 0.5 * z)) if kind == "poisson" else s.data.normal(z, 0.5)
    nodes = {"x": CHILDREN[kind][0]()} | ({"k": m.Categorical(3)} if "k" in hidden else {})
    return work(s, edges, {"x": x}, hidden, nodes, 0.05, **options)


def documents(s: Streams) -> Work:
    """The graph of topics by sweeps of expectation-maximisation."""
    counts, sweeps = datasets.bars(6, 150, 40, seed=s.data).counts, TopicSweeps()
    nodes = {"theta": m.Dirichlet(6), "words": m.Multinomial(counts.shape[1])}
    model = otp.Model(otp.Graph([("theta", "words")], hidden=["theta"]), nodes)
    method = otp.Method("sweeps", sweeps.objective, sweeps, EM(steps=20))
    return partial(fitted, model, otp.Documents(counts), s.fit, method=method, restarts=2)


DRAWN: dict[str, Callable[[np.random.Generator], Any]] = {
    "words": lambda rng: datasets.bars(6, 150, 40, seed=rng).counts,
    "tiles": lambda rng: (rng.integers(0, 8, (60, 2, 2)).repeat(4, 1).repeat(4, 2) * 36).astype(np.uint8),
    "codes": lambda rng: np.minimum(rng.integers(0, 8, (80, 1)), rng.integers(0, 8, (80, 4))),
    "plane": lambda rng: rng.normal(size=(200, 2)) @ rng.normal(size=(2, 10)),
    "mixture": lambda rng: small_models.mixture(ROWS, rng)[0].to_numpy(),
    "counts": lambda rng: rng.poisson(4.0 + 8 * states(rng, 1, 400)).T,
}


def estimated(data: str, kind: str, size: int, s: Streams, **settings: Any) -> Work:
    """The fit of an estimator; its values are the parameters of its model."""
    made = CodePrior if kind == "CodePrior" else getattr(estimators, kind)
    estimator, table = made(size, random_state=s.fit, **settings), DRAWN[data](s.data)

    def run() -> Any:
        result = estimator.fit(table).result_
        return result.loss, str(result.status), parameters(estimator.model_)

    return run


# -- answers -----------------------------------------------------------------------------------------------------------


def uncertainty(result: "otp.FitResult", table: Any) -> Values:
    """Standard errors of both kinds, bootstrap intervals and indices of fit."""
    indices = result.fit_indices()
    return parameters(result.model) | {
        "summary": result.summary().to_frame().select_dtypes("number"),
        "sandwich": result.standard_errors(errors="sandwich")["std_error"],
        "intervals": result.intervals(draws=20, seed=1)[["lower", "upper"]],
        "indices": [] if indices is None else [indices.chi_square, indices.cfi, indices.tli, indices.rmsea],
    }


def of_rows(result: "otp.FitResult", table: pd.DataFrame) -> Values:
    model, rows, complete = result.model, table.head(20), table.dropna().head(20)
    return parameters(model) | {
        "posterior": model.posterior(rows, draws=20, seed=1),
        "impute": model.impute(rows, seed=1),
        "random": model.impute(rows, seed=1, random=True),
        "predict": model.predict(rows, "x2"),
        "proba": model.predict_proba(rows, "h"),
        "query": model.query("x2", given={"x3": 1}, do={"x1": 0.5}),
        "most_probable": model.most_probable(complete),
        "effect": model.effect("x1", "x2", values=(0.0, 1.0), data=table).table.select_dtypes("number"),
        "counterfactual": model.counterfactual(complete, {"x1": 1.0}, draws=20, seed=1),
        "sample": model.sample(20, seed=1),
        "check": model.check(table, seed=1).select_dtypes("number"),
        "scores": [model.distance(table, seed=1), model.log_likelihood(table), model.bic(table)],
    }


def of_numbers(result: "otp.FitResult", series: Mapping[str, np.ndarray]) -> Values:
    model, few = result.model, {name: one[:2] for name, one in series.items()}
    return parameters(model) | {
        "forecast": model.forecast(few, 5, draws=100, seed=1),
        "impute": model.impute(series, seed=1),
        "posterior": model.posterior(few, draws=5, seed=1),
        "sample": model.sample(2, length=10, seed=1),
    }


def of_states(result: "otp.FitResult", series: Mapping[str, np.ndarray]) -> Values:
    model = result.model
    return of_numbers(result, series) | {
        "sure": result.forecast(series, 3, draws=50, seed=1),
        "proba": model.predict_proba(series, "z"),
        "decode": model.decode(series),
        "scores": [model.score(series, kind="likelihood"), model.log_likelihood(series)],
    }


def selected(criterion: str, s: Streams) -> Work:
    """The number of classes, by a criterion; the loss is that of all rows under the likeliest model."""
    frame = small_models.mixture(ROWS // 2, s.data, components=2, dim=1)[0].set_axis(["x"], axis=1)
    graph = otp.Graph([("z", "x")], hidden=["z"])

    def run() -> Any:
        options = {"criterion": criterion, "folds": 3, "seed": s.fit, "restarts": 2}
        build = lambda k: otp.Model(graph, {"z": m.Categorical(k), "x": m.Normal()})  # noqa: E731
        found = otp.select(build, range(1, 4), frame, **options)
        return -found.table["log_likelihood"].max(), f"best {found.best}", {"t": found.table.select_dtypes("number")}

    return run


# -- the table of cases ------------------------------------------------------------------------------------------------

MARGINAL = otp.Method("marginal", Objective(eps=1.0), Drawn(noise="marginal", batch_size=128), Adam(steps=STEPS))
ABDUCTED = otp.Method("abducted", Objective(push_forward=PushForward(0.5)), Drawn(noise="abducted"), Adam(steps=STEPS))
BACKWARD, PAPER = otp.transport("backward", steps=STEPS, batch_size=128), otp.paper(steps=STEPS)
LOCAL = otp.paper(scope="local", divergence=divergences.Sinkhorn(), steps=20, eps=0.1)
COURSE = otp.SearchSchedule(short_rows=200, finalists=1)
LDA = partial(estimated, "words", "LatentDirichletAllocation", 6)
WAE = partial(estimated, "plane", "WassersteinAutoencoder", 2, hidden=(16,), n_epochs=5)

BUILDS: dict[str, Build] = {
    **{kind: partial(family, kind) for kind in CHILDREN},
    **{f"{kind}_gaps": partial(family, kind, gaps=GAPS) for kind in CHILDREN},
    **{f"vector_{kind}": partial(vectors, kind, 0.0) for kind in VECTORS},
    **{f"vector_{kind}_gaps": partial(vectors, kind, GAPS) for kind in VECTORS},
    **{f"behind_{kind}": partial(behind, kind) for kind in [*CHILDREN, "count"]},
    "given": partial(family, "poisson", given=True),
    "given_gaps": partial(family, "normal", given=True, gaps=GAPS),
    "network_normal": partial(family, "normal", gaps=0.05, network=[3]),
    "network_categorical": partial(family, "categorical", network=[3]),
    "mixed8_gaps10": partial(mixed, 8, 0.1),
    "mixed8_gaps30": partial(mixed, 8, 0.3),
    "mixed15_gaps10": partial(mixed, 15, 0.1),
    "settled": settled,
    "formulas": formulas,
    "factor": partial(factors, 1),
    "factors3_gaps": partial(factors, 3, gaps=GAPS),
    "mixture": mixture,
    "mixture_gaps": partial(mixture, gaps=GAPS),
    "mixture_course": partial(mixture, restarts=2, course=COURSE),
    "mixture_weights": partial(mixture, gaps=0.1, weights=np.linspace(0.5, 1.5, ROWS)),
    "classes": classes,
    "classes_gaps": partial(classes, gaps=GAPS),
    "mixed_dag": partial(mixed_dag, gaps=GAPS),
    "parquet": parquet,
    "category_and_number": category_and_number,
    "outliers": partial(factors, 1, spoilt=0.1, robust="outliers", ask=lambda r, _: {"weights": r.row_weights}),
    "misfit": partial(mixture, probs=[0.5, 0.3, 0.2], robust="misfit"),
    "eps0": partial(mixture, method=otp.entropic(eps=0.0)),
    "eps_half": partial(mixture, probs=[0.5, 0.3, 0.2], method=otp.entropic(eps=0.5, reference="uniform")),
    "eta": partial(mixture, method=otp.entropic(eta=0.5), restarts=2),
    "eta_factor": partial(factors, 1, method=otp.entropic(eta=0.5), restarts=2),
    "transport": partial(mixed, 6, 0.0, method="transport"),
    "transport_gaps": partial(mixed, 6, GAPS, method="transport"),
    "transport_factor": partial(factors, 1, method="transport"),
    "transport_classes_gaps": partial(classes, gaps=0.1, method="transport", restarts=3),
    "backward": partial(factors, 1, gaps=0.1, method=BACKWARD),
    "abducted": partial(mixed_dag, gaps=0.1, method=ABDUCTED, restarts=2),
    "marginal": partial(mixed_dag, gaps=0.1, method=MARGINAL, restarts=2),
    "paper": partial(mixed_dag, gaps=0.1, method=PAPER, restarts=2),
    "paper_local": partial(mixed_dag, method=LOCAL, restarts=2),
    "without_density": without_density,
    "simulator": simulator,
    "decoder": decoder,
    "decoder_gaps": partial(decoder, gaps=0.1),
    "tree": partial(network, "tree", hidden="h0 h1 h2 h3", gaps=0.1),
    "asia": partial(network, "asia"),
    "asia_hidden": partial(network, "asia", hidden="bronc", restarts=3),
    "alarm": partial(network, "alarm"),
    "dense": dense,
    "chain_poisson": chain,
    "chain_normal_gaps": partial(chain, kind="normal", gaps=0.1),
    "chain_stay": partial(chain, state=m.StayOrMove(3)),
    "chain_weights": partial(chain, kind="normal", weights=np.linspace(0.5, 1.5, 12)),
    "chain_transport": partial(chain, method="transport"),
    "chain_backward": partial(chain, method=BACKWARD),
    "chain_paper": partial(chain, method=PAPER),
    "chain_marginal": partial(chain, method=MARGINAL),
    "chains": chains,
    "lags": partial(lags, False),
    "lags_switching": partial(lags, True),
    "smoothed": partial(smoothed, "normal", ask=of_numbers),
    "smoothed_poisson": partial(smoothed, "poisson", restarts=2),
    "smoothed_switching": partial(smoothed, "normal", edges="k~k z~z k>z z>x", hidden="k z", restarts=1, steps=20),
    "topics": LDA,
    "topics_entropic": partial(LDA, method="likelihood", n_init=2),
    "topics_transport": partial(LDA, method="pairs", n_init=2),
    "topics_dirichlet": partial(LDA, method="likelihood", topics="dirichlet", n_init=2),
    "topics_paper": partial(LDA, method="paper", n_init=1, max_iter=20),
    "documents": documents,
    "codes": partial(estimated, "tiles", "VectorQuantizedAutoencoder", 8, code_dim=4, width=8, n_epochs=4),
    "code_prior": partial(estimated, "codes", "CodePrior", 8, layers=1, width=16, heads=2, n_epochs=3),
    "latents": WAE,
    "latents_mmd": partial(WAE, divergence="mmd"),
    "gaussian_mixture": partial(estimated, "mixture", "GaussianMixture", 3, n_init=2),
    "hidden_markov": partial(estimated, "counts", "HiddenMarkovModel", 3, n_init=2),
    "select_bic": partial(selected, "bic"),
    "select_folds": partial(selected, "cv"),
    "answers_factor": partial(factors, 1, gaps=0.1, ask=uncertainty),
    "answers_classes": partial(classes, gaps=0.1, ask=uncertainty, restarts=3),
    "answers_rows": partial(mixed_dag, gaps=0.1, ask=of_rows, restarts=3),
    "answers_chain": partial(chain, gaps=0.1, ask=of_states),
}

CASES: dict[str, Case] = {name: partial(entry, name, build) for name, build in BUILDS.items()}
