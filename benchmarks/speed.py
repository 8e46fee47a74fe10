"""Time at equal accuracy beside specialists: processor seconds by one thread, each side in a process of its own.

Both sides have the same data and the same number of starts. ``ratio`` is ours over theirs, the median of three data
sets (five for a short chain, one where a fit takes long); it counts only if our loss is at most 1e-4 of a row above
theirs, else the case fails. A peer that is not installed skips its cases.
"""

import importlib.util
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pandas as pd

import otpdag as otp
from benchmarks import speed_peers as peers
from benchmarks.child import in_child
from benchmarks.harness import Case, Record, Settings, Skip, Streams, streams
from benchmarks.problems import mixed_dag_model
from experiments.small_models import latent_class, mixed_dag, poisson_chain
from otpdag import mechanisms as m
from otpdag.estimators import GaussianMixture, HiddenMarkovModel

SECONDS = 600.0  # of wall clock that a child may take
SAME = 1e-4  # of a row's log-likelihood
MEMORY = 500 * 2**20
STARTS = 16
CHAIN_STARTS, CHAIN_STATES = 4, 4
REPEATS, CHAIN_REPEATS = 3, 5

Work = Callable[[], Record]


def needs(module: str) -> None:
    """Skip a case whose peer is not there."""
    if importlib.util.find_spec(module) is None:
        raise Skip(f"{module}: run `make bench-setup`")


def measured(work: Work) -> Record:
    """A side's record from a child, with its peak memory."""
    done = in_child(partial(peers.quietly, work), seconds=SECONDS)
    return done.value | {"peak_mb": done.peak / 2**20, "base_mb": done.base / 2**20}


def compared(sides: Sequence[tuple[Record, Record]], limit: float) -> Record:
    """The median ratio of times, and both sides' figures; our loss must not be higher."""
    gaps = [us["loss"] - them["loss"] for us, them in sides if "loss" in them]
    record = {
        "ratio": float(np.median([us["seconds"] / them["seconds"] for us, them in sides])),
        "limit": limit,
        "ours": float(np.median([us["seconds"] for us, _ in sides])),
        "oracle": float(np.median([them["seconds"] for _, them in sides])),
        "peak_mb": max(us["peak_mb"] for us, _ in sides),
        "oracle_peak_mb": max(them["peak_mb"] for _, them in sides),
        "loss_gap": max(gaps, default=0.0),
        "details": [{"ours": us, "oracle": them} for us, them in sides],
    }
    if record["loss_gap"] > SAME:
        raise ValueError(f"our loss must be at most {SAME} of a row above the peer's; it is {record['loss_gap']:.2g}")
    return record


def repeated(settings: Settings, name: str, one: Callable[[Streams], tuple[Record, Record]], limit: float) -> Record:
    """Both sides on several data sets."""
    many = min(REPEATS, settings.repeats)
    return compared([one(streams(settings.seed, name, repeat)) for repeat in range(many)], limit)


# -- our side ----------------------------------------------------------------------------------------------------------


def fitted(build: Callable[[], "otp.Model"], data: object, warm: object, seed: int, restarts: int) -> Record:
    """Seconds and loss of a fit, after a small one that pays for what is computed once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otp.ConvergenceWarning)
        otp.fit(build(), warm, seed=seed, restarts=restarts)
        model = build()
        result, seconds = peers.clocked(lambda: otp.fit(model, data, seed=seed, restarts=restarts))
    return {"seconds": seconds, "loss": result.loss, "stages": [(s.name, len(s.losses)) for s in result.stages]}


def our_mixture(table: np.ndarray, components: int, starts: int, seed: int) -> Record:
    """The estimator, which also merges equal rows and scores them."""
    GaussianMixture(2, n_init=2, random_state=0).fit(table[:200])
    # scikit-learn's floor is a variance of 1e-6, ours a share of each column's: both have the same problem to solve
    floor = 1e-6 / float(table.var(0).max())
    mixture = GaussianMixture(components, n_init=starts, reg_covar=floor, random_state=seed % 2**31)
    _, seconds = peers.clocked(lambda: mixture.fit(table))
    return {"seconds": seconds, "loss": -mixture.lower_bound_}


# -- factors -----------------------------------------------------------------------------------------------------------


def factor_table(factors: int, columns: int, rows: int, generator: np.random.Generator) -> pd.DataFrame:
    """Uncorrelated factors with columns of their own."""
    made = {}
    for f in range(factors):
        z = generator.normal(size=rows)
        for c in range(columns):
            slope, noise = generator.uniform(0.5, 1.5), generator.uniform(0.3, 1.0)
            made[f"x{f}_{c}"] = generator.normal() + slope * z + noise * generator.normal(size=rows)
    return pd.DataFrame(made)


def factor_model(factors: list[list[str]]) -> "otp.Model":
    """A hidden number for each group of columns."""
    edges = [(f"f{i}", name) for i, names in enumerate(factors) for name in names]
    graph = otp.Graph(edges, hidden=[f"f{i}" for i in range(len(factors))])
    return otp.Model(graph, {node: m.Normal() for node in graph.nodes})


def factor_case(factors: int, columns: int, rows: int, limit: float, settings: Settings) -> Record:
    """One start each, as semopy has one."""
    needs("semopy")

    def one(sources: Streams) -> tuple[Record, Record]:
        frame = factor_table(factors, columns, rows, sources.data)
        names = [[n for n in frame if n.startswith(f"x{f}_")] for f in range(factors)]
        ours = partial(fitted, partial(factor_model, names), frame, frame[:300], sources.fit, 1)
        return measured(ours), measured(partial(peers.semopy_factors, frame, names))

    return repeated(settings, f"speed_factor_{factors}_{rows}", one, limit)


# -- mixtures ----------------------------------------------------------------------------------------------------------


def mixture_table(rows: int, components: int, columns: int, generator: np.random.Generator) -> np.ndarray:
    """Normal components with covariances of their own, most of them apart."""
    weights, means = generator.dirichlet(np.full(components, 5.0)), generator.normal(0, 2.0, (components, columns))
    factors = 0.3 * generator.normal(size=(components, columns, columns)) + np.eye(columns)
    labels = generator.choice(components, rows, p=weights)
    table = generator.normal(size=(rows, columns))
    for label in range(components):
        table[labels == label] = means[label] + table[labels == label] @ factors[label].T
    return table


def mixture_case(rows: int, repeats: int, settings: Settings) -> Record:
    """Ten components in ten dimensions, sixteen starts each; with 100,000 rows our memory counts, too."""
    needs("sklearn")

    def one(sources: Streams) -> tuple[Record, Record]:
        table = mixture_table(rows, 10, 10, sources.data)
        ours = measured(partial(our_mixture, table, 10, STARTS, sources.fit))
        return ours, measured(partial(peers.sklearn_mixture, table, 10, STARTS, sources.oracle % 2**31))

    few = Settings(settings.seed, min(repeats, settings.repeats), settings.methods)
    record = repeated(few, f"speed_mixture_{rows}", one, limit=1.0)
    if rows >= 100_000 and record["peak_mb"] * 2**20 > MEMORY:
        raise ValueError(f"the fit must hold less than 500 MB; it held {record['peak_mb']:.0f}")
    return record


def latent_model(columns: int, classes: int, states: int) -> "otp.Model":
    """A hidden class behind columns of categories."""
    graph = otp.Graph([("z", f"x{i + 1}") for i in range(columns)], hidden=["z"])
    made = {f"x{i + 1}": m.Categorical(states) for i in range(columns)}
    return otp.Model(graph, {"z": m.Categorical(classes)} | made)


def latent_class_20k(settings: Settings) -> Record:
    """Four columns of three categories behind two classes, 20,000 rows, sixteen starts each."""
    needs("stepmix")

    def one(sources: Streams) -> tuple[Record, Record]:
        frame, _ = latent_class(20_000, sources.data)
        build = partial(latent_model, frame.shape[1], 2, 3)
        ours = measured(partial(fitted, build, frame, frame[:300], sources.fit, STARTS))
        return ours, measured(partial(peers.stepmix_classes, frame, 2, STARTS, sources.oracle % 2**31))

    return repeated(settings, "speed_latent_class", one, limit=0.1)


def pyro_mixed_dag(settings: Settings) -> Record:
    """The mixed network of `recovery`, 5,000 rows, two starts each, until Pyro is within a thousandth of our loss."""
    needs("pyro")

    def one(sources: Streams) -> tuple[Record, Record]:
        frame, _ = mixed_dag(5_000, sources.data)
        ours = measured(partial(fitted, mixed_dag_model, frame, frame[:300], sources.fit, 2))
        theirs = partial(peers.pyro_mixed, frame, 3, 3, 2, ours["loss"], sources.oracle % 2**31)
        return ours, measured(theirs)

    return repeated(settings, "speed_mixed_dag", one, limit=0.33)


# -- sequences ---------------------------------------------------------------------------------------------------------


def chain_series(kind: str, sequences: int, length: int, generator: np.random.Generator) -> np.ndarray:
    """Four states that last, with Poisson or normal emissions."""
    moves = generator.random((sequences, length)) < 0.05
    other = generator.integers(1, CHAIN_STATES, (sequences, length))
    first = generator.integers(0, CHAIN_STATES, (sequences, 1))
    states = (first + np.where(moves, other, 0).cumsum(1)) % CHAIN_STATES
    if kind == "poisson":
        return generator.poisson(np.array([5.0, 15.0, 30.0, 50.0])[states]).astype(float)
    return np.array([-3.0, 0.0, 2.0, 5.0])[states] + np.array([0.7, 1.0, 0.5, 1.2])[states] * generator.normal(
        size=states.shape
    )


def chain_model(kind: str) -> "otp.Model":
    """A hidden Markov model."""
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(CHAIN_STATES), "x": m.Poisson() if kind == "poisson" else m.Normal()})


def our_chains(kind: str, data: Sequence[np.ndarray], seeds: Sequence[int]) -> Record:
    """Fits of several data sets, one after another."""
    build = partial(chain_model, kind)
    pairs = zip(data, seeds, strict=True)
    return {"fits": [fitted(build, series, series[:, :100], seed, CHAIN_STARTS) for series, seed in pairs]}


def dynamax_case(sequences: int, length: int, repeats: int, settings: Settings) -> Record:
    """Poisson and normal emissions, each the median of several data sets; ``ratio`` is the larger of both.

    The number of steps differs between data sets, on either side: one of them would tell of luck. A side fits all of
    them in one process, as compiling takes dynamax longer than fitting.
    """
    needs("dynamax")

    def one(kind: str) -> Record:
        name, many = f"speed_{kind}_{sequences}x{length}", min(repeats, settings.repeats)
        sources = [streams(settings.seed, name, repeat) for repeat in range(many)]
        data = [chain_series(kind, sequences, length, source.data) for source in sources]
        seeds = [source.oracle % 2**31 for source in sources]
        ours = measured(partial(our_chains, kind, data, [source.fit for source in sources]))
        theirs = measured(partial(peers.dynamax_chains, data, kind, CHAIN_STATES, CHAIN_STARTS, seeds))
        return compared(list(zip(_each(ours), _each(theirs), strict=True)), limit=1.0)

    both = {kind: one(kind) for kind in ("poisson", "normal")}
    worst = max(both, key=lambda kind: both[kind]["ratio"])
    return both[worst] | {f"ratio_{kind}": record["ratio"] for kind, record in both.items()} | {"details": both}


def _each(side: Record) -> list[Record]:
    """The fits of a side, each with the memory of all."""
    return [one | {"peak_mb": side["peak_mb"], "base_mb": side["base_mb"]} for one in side["fits"]]


def hmm_1m(settings: Settings) -> Record:
    """A million steps in 5,000 sequences, five starts each; of hmmlearn three steps are timed and fifty counted."""
    needs("hmmlearn")
    sources = streams(settings.seed, "speed_hmm_1m", 0)
    counts, _, _ = poisson_chain(5000, 200, sources.data)
    ours = measured(partial(our_hmm, counts, 5, sources.fit))
    return compared([(ours, measured(partial(peers.hmmlearn_poisson, counts, 4, 5, 0, 3, 50)))], limit=0.02)


def our_hmm(counts: np.ndarray, starts: int, seed: int) -> Record:
    """The estimator."""
    flat, lengths = counts.reshape(-1, 1), [counts.shape[1]] * len(counts)
    HiddenMarkovModel(4, n_init=2, random_state=0).fit(flat[:1000], [200] * 5)
    hmm = HiddenMarkovModel(4, transitions="stay", n_init=starts, random_state=seed % 2**31)
    _, seconds = peers.clocked(lambda: hmm.fit(flat, lengths))
    return {"seconds": seconds, "loss": hmm.result_.loss}


# -- our own time ------------------------------------------------------------------------------------------------------


def starts16(settings: Settings) -> Record:
    """Sixteen starts over one: ten components in ten dimensions, 10,000 rows."""

    def one(sources: Streams) -> tuple[Record, Record]:
        table = mixture_table(10_000, 10, 10, sources.data)
        many, single = (measured(partial(our_mixture, table, 10, starts, sources.fit)) for starts in (STARTS, 1))
        return many, single

    return repeated(settings, "speed_mixture_10000", one, limit=3.0)


def import_time(settings: Settings) -> Record:
    """Wall clock of importing the package over that of importing torch, medians of five new processes each."""

    def seconds(name: str) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {name}"], check=True)
        return time.perf_counter() - begin

    pairs = [(seconds("otpdag"), seconds("torch")) for _ in range(5)]
    ours, torch = (float(np.median(times)) for times in zip(*pairs, strict=True))
    return {"ratio": ours / torch, "limit": 1.3, "ours": ours, "oracle": torch}


CASES: dict[str, Case] = {
    "factor1_100k": partial(factor_case, 1, 6, 100_000, 1.0),
    "factor4_100k": partial(factor_case, 4, 5, 100_000, 1.0),
    "factor4_1k": partial(factor_case, 4, 5, 1_000, 3.0),
    "mixture10_10k": partial(mixture_case, 10_000, REPEATS),
    "mixture10_100k": partial(mixture_case, 100_000, 1),
    "latent_class_20k": latent_class_20k,
    "hmm_1m": hmm_1m,
    "hmm_dynamax_1x10k": partial(dynamax_case, 1, 10_000, CHAIN_REPEATS),
    "hmm_dynamax_100x1k": partial(dynamax_case, 100, 1_000, 1),
    "pyro_mixed_dag": pyro_mixed_dag,
    "starts16": starts16,
    "import_time": import_time,
}
