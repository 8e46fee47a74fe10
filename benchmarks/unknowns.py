"""Any pattern of unknowns: gaps in published networks, linear-normal and mixed graphs, and many hidden nodes.

Errors are mean absolute errors of parameters: the plain mean over all entries, of tables only for those configurations
of categorical parents that the table with gaps shows, in rows that show the whole family (``least`` of them). Logits
are centred first, hidden labels matched. Times are processor seconds, by one thread each; ours are measured in a child
process after a small fit that pays for imports and caches.

pyAgrum does inference row by row and takes minutes where a quick run has seconds. Its EM has no randomness but its
start, which is given, and an exact EM of our own takes the same steps: a quick run lets pyAgrum take some, demands
that its tables then agree with ours, and reads the end and the number of its steps (which give its time) off ours.
Of alarm_hidden3 it sees a part of the rows there, and its time is scaled up: a row takes it equally long. Without
``--quick`` pyAgrum runs to its end, or for 250 steps. ``peer_steps`` are all of its steps, ``peer_steps_run`` those
that it really took on the whole table.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

import otpdag as otp
from benchmarks.child import Done
from benchmarks.harness import Case, Record, Settings, Skip, Streams, streams
from benchmarks.measured_fits import Build, Fitted, Task, ours, remembered
from benchmarks.oracles.agrum import agrum_em
from benchmarks.oracles.count_gap import count_gap_ml
from benchmarks.oracles.discrete_em import DiscreteEM, available_case_start
from benchmarks.oracles.hidden_tree import hidden_tree_em
from benchmarks.oracles.linear_normal import linear_normal_em
from benchmarks.parameter_errors import network_error, tree_error, world_error
from benchmarks.random_graphs import World, declare, hidden_tree, mixed_world, normal_world
from experiments.published_files import load_network
from experiments.small_models import delete_cells
from otpdag import mechanisms as m
from otpdag.datasets import DiscreteNetwork, Truth

QUICK = 5  # repeats of a quick run
NETWORK_ROWS, HIDDEN_ROWS, NORMAL_ROWS, MIXED_ROWS, CHAIN_ROWS = 2000, 5000, 2000, 5000, 2000
GAPS = 0.1
GIGABYTE = 1e9
WARM_ROWS = 100
PRIOR = 1e-3  # on each entry of a table; pyAgrum refuses configurations without rows
HIDDEN = ("LVEDVOLUME", "HR", "VENTALV")  # of alarm: each has parents and at least two children
HIDDEN_STARTS = 2
MOST_STEPS = 250  # of pyAgrum
QUICK_HIDDEN_ROWS = 1000  # that pyAgrum sees of alarm_hidden3 in a quick run
QUICK_STEPS = {"sachs": None, "alarm": 2}  # of pyAgrum, in a quick run


def sets(settings: Settings, quick: int) -> range:
    """Numbers of the data sets: so many in a quick run, more in proportion to its repeats."""
    return range(max(1, round(quick * settings.repeats / QUICK)))


# -- published networks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """What pyAgrum's EM reached on one table: tables, processor seconds, its steps and those of them that were run."""

    tables: dict[str, np.ndarray]
    seconds: float
    steps: int
    run: int


@dataclass(frozen=True)
class NetworkStudy:
    """Both fits of one table of a published network."""

    ours: Fitted
    peer: Peer
    our_error: float
    peer_error: float


def published(name: str) -> DiscreteNetwork:
    if not os.environ.get("OTPDAG_DATA"):
        raise Skip("set OTPDAG_DATA")
    return load_network(name)


def network_model(name: str, hidden: tuple[str, ...] = ()) -> "otp.Model":
    network = load_network(name)
    graph = otp.Graph(network.graph.edges, nodes=network.nodes, hidden=hidden)
    return otp.Model(graph, {node: m.Categorical(len(network.states[node])) for node in network.nodes})


def peer_run(network: DiscreteNetwork, frame: pd.DataFrame, seed: int, steps: int | None) -> Peer:
    """Run pyAgrum's EM to its end, or so many steps of it and the rest by the exact EM that takes the same ones.

    Both may take ``MOST_STEPS``: with hidden nodes pyAgrum's rule may not stop it for thousands.
    """
    try:
        import pyagrum  # noqa: F401
    except ImportError as error:
        raise Skip("install the extra 'bench' (pyagrum)") from error
    start = available_case_start(network, frame, np.random.default_rng(seed))
    run = agrum_em(network, frame, start, steps=steps or MOST_STEPS, prior=PRIOR)
    if steps is None or len(run.history) < steps:
        return Peer(run.tables, run.seconds, len(run.history), len(run.history))
    with threadpool_limits(1):
        same = DiscreteEM(network, frame, prior=PRIOR).run(start, tolerance=0.0, steps=steps)
    gap = max(np.abs(same.tables[node] - run.tables[node]).max() for node in network.nodes)
    if gap > 1e-8:
        raise ValueError(f"pyAgrum's tables after {steps} steps must be those of exact EM; the gap is {gap:.2g}")
    return replace(peer_like(network, frame, seed, run.seconds / steps), run=steps)


def peer_like(network: DiscreteNetwork, frame: pd.DataFrame, seed: int, step_seconds: float) -> Peer:
    """Where pyAgrum's EM would end and when, if a step takes it so many seconds; it is not run."""
    start = available_case_start(network, frame, np.random.default_rng(seed))
    with threadpool_limits(1):
        end = DiscreteEM(network, frame, prior=PRIOR).run(start, steps=MOST_STEPS)
    return Peer(end.tables, step_seconds * end.steps, end.steps, 0)


def gaps_in(name: str, share: float, seed: int, repeat: int) -> tuple[DiscreteNetwork, pd.DataFrame, Streams]:
    """A published network, and rows of it that lack cells completely at random."""
    network = published(name)
    sources = streams(seed, f"unknowns {name}", repeat)
    return network, delete_cells(network.sample(NETWORK_ROWS, sources.data), share, sources.missing), sources


@remembered
def network_study(name: str, share: float, seed: int, repeat: int, peer_steps: int | None) -> NetworkStudy:
    network, frame, sources = gaps_in(name, share, seed, repeat)
    fitted = ours([Task(partial(network_model, name), frame, sources.fit)], _warm_network(name)).value[0]
    peer = peer_run(network, frame, sources.oracle, peer_steps)
    return NetworkStudy(
        fitted, peer, network_error(network, frame, _tables(fitted.params)), network_error(network, frame, peer.tables)
    )


def _warm_network(name: str) -> Task:
    complete = load_network(name).sample(WARM_ROWS, np.random.default_rng(0))
    return Task(partial(network_model, name), complete, seed=0)


def _tables(params: Truth) -> dict[str, np.ndarray]:
    return {node: found["probs"] for node, found in params.items()}


def _studies(name: str, share: float, settings: Settings) -> list[NetworkStudy]:
    steps = QUICK_STEPS[name] if settings.repeats <= QUICK else None
    return [network_study(name, share, settings.seed, repeat, steps) for repeat in sets(settings, 1)]


def network_gaps(name: str, share: float, settings: Settings) -> Record:
    """Our error over that of pyAgrum's EM."""
    found = _studies(name, share, settings)
    record = _over([study.our_error for study in found], [study.peer_error for study in found])
    return {"limit": 1.02} | record | _network_times(found)


def network_gaps_time(name: str, share: float, settings: Settings) -> Record:
    """Our processor time over that of pyAgrum's EM."""
    found = _studies(name, share, settings)
    record = _over([study.ours.seconds for study in found], [study.peer.seconds for study in found])
    return {"limit": 0.2} | record | _network_times(found)


def _network_times(found: Sequence[NetworkStudy]) -> Record:
    return {
        "seconds": _mean([study.ours.seconds for study in found]),
        "oracle_seconds": _mean([study.peer.seconds for study in found]),
        "peer_steps": [study.peer.steps for study in found],
        "peer_steps_run": [study.peer.run for study in found],
        "status": [study.ours.status for study in found],
    }


@remembered
def hidden_study(seed: int, whole: bool) -> tuple[Fitted, list[Peer], float, float]:
    """Our fit of alarm with hidden nodes and the peer's runs, and the mean log-likelihood of a row of both."""
    network = published("alarm")
    sources = streams(seed, "unknowns alarm_hidden3", 0)
    complete = network.sample(HIDDEN_ROWS, sources.data).drop(columns=list(HIDDEN))
    frame = delete_cells(complete, GAPS, sources.missing)
    task = Task(partial(network_model, "alarm", HIDDEN), frame, sources.fit, (("restarts", HIDDEN_STARTS),))
    fitted = ours([task], _warm_network("alarm")).value[0]
    peers = _hidden_peers(network, frame, sources.oracle, whole)
    exact = DiscreteEM(network, frame)
    with threadpool_limits(1):
        best = max(exact.log_likelihood(peer.tables) for peer in peers) / len(frame)
        own = exact.log_likelihood(_tables(fitted.params)) / len(frame)
    return fitted, peers, own, best


def _hidden_peers(network: DiscreteNetwork, frame: pd.DataFrame, seed: int, whole: bool) -> list[Peer]:
    """All of pyAgrum's starts; in a quick run it takes one step on some of the rows, as a row takes equally long."""
    seeds = range(seed, seed + HIDDEN_STARTS)
    if whole:
        return [peer_run(network, frame, one, None) for one in seeds]
    some = frame.head(QUICK_HIDDEN_ROWS)
    part = peer_run(network, some, seed, 1)
    return [peer_like(network, frame, one, part.seconds / part.steps * len(frame) / len(some)) for one in seeds]


def alarm_hidden(settings: Settings) -> Record:
    """How far our log-likelihood of a row is below that of the best of pyAgrum's as many starts."""
    fitted, peers, own, best = hidden_study(settings.seed, settings.repeats > QUICK)
    return {"limit": 0.001, "ratio": best - own, "ours": own, "oracle": best} | _hidden_times(fitted, peers)


def alarm_hidden_time(settings: Settings) -> Record:
    """Our processor time over that of all of pyAgrum's starts."""
    fitted, peers, _, _ = hidden_study(settings.seed, settings.repeats > QUICK)
    return {"limit": 0.2} | _over([fitted.seconds], [sum(p.seconds for p in peers)]) | _hidden_times(fitted, peers)


def _hidden_times(fitted: Fitted, peers: Sequence[Peer]) -> Record:
    return {
        "hidden": list(HIDDEN),
        "starts": HIDDEN_STARTS,
        "seconds": fitted.seconds,
        "oracle_seconds": sum(peer.seconds for peer in peers),
        "peer_steps": [peer.steps for peer in peers],
        "peer_steps_run": [peer.run for peer in peers],
        "status": [fitted.status],
    }


# -- random graphs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorldStudy:
    """Fits of tables of random graphs with gaps and without, with their errors, and the child that saw the gaps."""

    ours: list[Fitted]
    complete: list[Fitted]
    our_errors: list[float]
    complete_errors: list[float]
    oracle_errors: list[float]
    oracle_seconds: list[float]
    peak: int


@remembered
def world_study(kind: str, nodes: int, rows: int, seed: int, count: int) -> WorldStudy:
    """One random graph for each data set."""
    make = mixed_world if kind == "mixed" else normal_world
    worlds, complete, gaps, sources = [], [], [], []
    for repeat in range(count):
        source = streams(seed, f"unknowns {kind}{nodes}", repeat)
        worlds.append(make(nodes, source.data))
        complete.append(worlds[-1].sample(rows, source.data))
        gaps.append(delete_cells(complete[-1], GAPS, source.missing))
        sources.append(source)
    tasks = [
        [Task(_declared(w), frame, s.fit) for w, frame, s in zip(worlds, frames, sources, strict=True)]
        for frames in (complete, gaps)
    ]
    warm = _warm_world(worlds[0])
    without = ours(tasks[0], warm).value
    having = ours(tasks[1], warm)
    exact = [_exact(world, frame) for world, frame in zip(worlds, gaps, strict=True)] if kind == "normal" else []

    def errors(found: Sequence[Truth]) -> list[float]:
        return [world_error(w, frame, params) for w, frame, params in zip(worlds, gaps, found, strict=True)]

    return WorldStudy(
        ours=having.value,
        complete=without,
        our_errors=errors([one.params for one in having.value]),
        complete_errors=errors([one.params for one in without]),
        oracle_errors=errors([params for params, _ in exact]) if exact else [],
        oracle_seconds=[seconds for _, seconds in exact],
        peak=having.peak,
    )


def _declared(world: World) -> Build:
    return partial(declare, world.parents, world.kinds, world.sizes)


def _warm_world(world: World) -> Task:
    return Task(_declared(world), world.sample(WARM_ROWS, np.random.default_rng(0)), seed=0)


def _exact(world: World, frame: pd.DataFrame) -> tuple[Truth, float]:
    begin = time.process_time()
    with threadpool_limits(1):
        found, _ = linear_normal_em(frame, world.parents)
    return found, time.process_time() - begin


def gaussian(nodes: int, settings: Settings) -> Record:
    """Our error over that of exact EM."""
    study = world_study("normal", nodes, NORMAL_ROWS, settings.seed, len(sets(settings, 3)))
    record = {"limit": 1.01} | _over(study.our_errors, study.oracle_errors) | _world_times(study)
    return record | {"over_complete": _mean(study.our_errors) / _mean(study.complete_errors)} | _oracle_times(study)


def gaussian_time(nodes: int, settings: Settings) -> Record:
    """Our processor time over that of our fit of the complete table."""
    study = world_study("normal", nodes, NORMAL_ROWS, settings.seed, len(sets(settings, 3)))
    return {"limit": 10.0} | _time_over_complete(study)


def mixed_study(nodes: int, settings: Settings) -> WorldStudy:
    """Several random graphs of few columns: one alone is off from its complete table by chance more than by gaps."""
    return world_study("mixed", nodes, MIXED_ROWS, settings.seed, len(sets(settings, 1 if nodes > 20 else 3)))


def mixed(nodes: int, settings: Settings) -> Record:
    """Our error over that of our fit of the complete table."""
    study = mixed_study(nodes, settings)
    return {"limit": 1.3} | _over(study.our_errors, study.complete_errors) | _world_times(study)


def mixed_time(nodes: int, settings: Settings) -> Record:
    """Our processor time over that of our fit of the complete table."""
    study = mixed_study(nodes, settings)
    return {"limit": 20.0} | _time_over_complete(study)


def mixed_memory(nodes: int, settings: Settings) -> Record:
    """Peak memory of the process that fitted the table with gaps, in gigabytes."""
    study = mixed_study(nodes, settings)
    return {"limit": 1.0, "ratio": study.peak / GIGABYTE, "ours": study.peak / GIGABYTE} | _world_times(study)


def _time_over_complete(study: WorldStudy) -> Record:
    record = _over([one.seconds for one in study.ours], [one.seconds for one in study.complete])
    return record | _world_times(study)


def _world_times(study: WorldStudy) -> Record:
    return {
        "seconds": _mean([one.seconds for one in study.ours]),
        "oracle_seconds": _mean([one.seconds for one in study.complete]),
        "peak_gigabytes": study.peak / GIGABYTE,
        "status": [one.status for one in study.ours],
    }


def _oracle_times(study: WorldStudy) -> Record:
    return {"oracle_seconds": _mean(study.oracle_seconds)}


# -- many hidden nodes -----------------------------------------------------------------------------------------------


def tree_model(tree: DiscreteNetwork, hidden: tuple[str, ...]) -> "otp.Model":
    graph = otp.Graph(tree.graph.edges, nodes=tree.nodes, hidden=hidden)
    return otp.Model(graph, {node: m.Categorical(len(tree.states[node])) for node in tree.nodes})


def hidden_nodes(number: int, settings: Settings) -> Record:
    """Our error over that of exact EM started at the truth."""
    errors, oracles, fitted, seconds = [], [], [], []
    for repeat in sets(settings, 1):
        sources = streams(settings.seed, f"unknowns hidden{number}", repeat)
        tree = hidden_tree(number, sources.data)
        frame = tree.sample(HIDDEN_ROWS, sources.data).drop(columns=[f"h{i}" for i in range(number)])
        hidden = tuple(node for node in tree.nodes if node not in frame)
        begin = time.process_time()
        with threadpool_limits(1):
            exact, _ = hidden_tree_em(tree, frame)
        seconds.append(time.process_time() - begin)
        oracles.append(tree_error(tree, exact.tables, list(frame)))
        warm = Task(partial(tree_model, tree, ()), tree.sample(WARM_ROWS, np.random.default_rng(0)), seed=0)
        fitted += ours([Task(partial(tree_model, tree, hidden), frame, sources.fit)], warm).value
        errors.append(tree_error(tree, _tables(fitted[-1].params), list(frame)))
    times = {"seconds": _mean([one.seconds for one in fitted]), "oracle_seconds": _mean(seconds)}
    return {"limit": 1.1} | _over(errors, oracles) | times | {"status": [one.status for one in fitted]}


# -- gaps that depend on another column ------------------------------------------------------------------------------

CHAIN = {"a": (), "b": ("a",), "c": ("b",)}


def chain_world(kind: str) -> World:
    """Three nodes, a to b to c, all normal; or the middle one Poisson, with a slope of 1.1."""
    middle = {"loc": np.array(0.5), "weight": np.array([1.1]), "scale": np.array(0.8)}
    if kind == "count":
        middle = {"log_rate": np.array(0.5), "weight": np.array([1.1])}
    truth = {
        "a": {"loc": np.array(0.0), "scale": np.array(1.0)},
        "b": middle,
        "c": {"loc": np.array(-0.5), "weight": np.array([0.5]), "scale": np.array(1.0)},
    }
    return World(dict(CHAIN), {"a": "number", "b": kind, "c": "number"}, {}, truth)


def missing_at_random(kind: str, method: str, limit: float, settings: Settings) -> Record:
    """The error of a method over that of maximum likelihood."""
    world = chain_world(kind)
    tasks, frames, oracle = [], [], []
    for repeat in sets(settings, 5):
        sources = streams(settings.seed, f"unknowns mar {kind}", repeat)
        complete = world.sample(CHAIN_ROWS, sources.data)
        frames.append(complete.astype(float).assign(b=complete["b"].where(complete["a"] <= 0)))
        with threadpool_limits(1):
            best = count_gap_ml(frames[-1], world.truth) if kind == "count" else _exact(world, frames[-1])[0]
        oracle.append(world_error(world, frames[-1], best))
        tasks.append(Task(_declared(world), frames[-1], sources.fit, (("method", method),)))
    done = ours(tasks, _warm_world(world)).value
    errors = [world_error(world, frame, one.params) for frame, one in zip(frames, done, strict=True)]
    return {
        "limit": limit,
        "method": method,
        **_over(errors, oracle),
        "slopes": [float(one.params["b"]["weight"][0]) for one in done],
        "seconds": _mean([one.seconds for one in done]),
        "status": [one.status for one in done],
    }


# -- growth ----------------------------------------------------------------------------------------------------------

GROWING_ROWS = (2000, 20_000, 200_000)
GROWING_NODES = (50, 220, 1000)
NODES_OF_GROWING_ROWS = 10
ROWS_OF_GROWING_NODES = 500
GRAPHS_OF_SIZE = {50: 5, 220: 3}  # others one: few columns are many or few pieces that meet by chance
GROWTH_SECONDS = 400.0  # of wall clock, when a child is given up: four times what the largest table takes alone


@remembered
def growth_study(kind: str, seed: int) -> list[tuple[int, list[float], list[int], list[str]]]:
    """Size; of each graph processor seconds, bytes beyond those before the fit, and status; one child for each fit."""
    found = []
    for size in GROWING_ROWS if kind == "rows" else GROWING_NODES:
        nodes, rows = (NODES_OF_GROWING_ROWS, size) if kind == "rows" else (size, ROWS_OF_GROWING_NODES)
        each = [grown(nodes, rows, seed, repeat) for repeat in range(GRAPHS_OF_SIZE.get(nodes, 1))]
        done = [one.value[0] for one in each]
        seconds, statuses = [one.seconds for one in done], [one.status for one in done]
        found.append((size, seconds, [one.peak - one.base for one in each], statuses))
    return found


def grown(nodes: int, rows: int, seed: int, repeat: int) -> Done[list[Fitted]]:
    """One fit of mixed columns with gaps."""
    sources = streams(seed, f"unknowns growth {nodes}", repeat)
    world = mixed_world(nodes, sources.data)
    complete = world.sample(rows, sources.data)
    task = Task(_declared(world), delete_cells(complete, GAPS, sources.missing), sources.fit)
    warm = _warm_world(mixed_world(NODES_OF_GROWING_ROWS, np.random.default_rng(0)))
    return ours([task], warm, first_seconds=GROWTH_SECONDS)


def growth(kind: str, settings: Settings) -> Record:
    """The exponent of processor time in the number of rows or nodes: of its median where there are several graphs."""
    return _growth(kind, 1, settings)


def growth_memory(kind: str, settings: Settings) -> Record:
    """The exponent of the memory of a fit, without what the process held before."""
    return _growth(kind, 2, settings)


def _growth(kind: str, field: int, settings: Settings) -> Record:
    found = growth_study(kind, settings.seed)
    sizes, costs = [one[0] for one in found], [float(np.median(one[field])) for one in found]
    return {
        "limit": 1.1,
        "ratio": exponent(sizes, costs),
        "sizes": sizes,
        "seconds_each": [one[1] for one in found],
        "gigabytes_each": [[own / GIGABYTE for own in one[2]] for one in found],
        "status": [status for one in found for status in one[3]],
    }


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of a line through the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def _over(ours_each: Sequence[float], oracle_each: Sequence[float]) -> Record:
    return {
        "ratio": _mean(ours_each) / _mean(oracle_each),
        "ours": _mean(ours_each),
        "oracle": _mean(oracle_each),
        "ours_std": float(np.std(ours_each)),
        "oracle_std": float(np.std(oracle_each)),
        "ours_each": list(ours_each),
        "oracle_each": list(oracle_each),
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


CASES: dict[str, Case] = {
    "sachs_missing10": partial(network_gaps, "sachs", 0.1),
    "sachs_missing10_time": partial(network_gaps_time, "sachs", 0.1),
    "alarm_missing20": partial(network_gaps, "alarm", 0.2),
    "alarm_missing20_time": partial(network_gaps_time, "alarm", 0.2),
    "alarm_hidden3": alarm_hidden,
    "alarm_hidden3_time": alarm_hidden_time,
    "gaussian50": partial(gaussian, 50),
    "gaussian50_time": partial(gaussian_time, 50),
    "mixed20": partial(mixed, 20),
    "mixed20_time": partial(mixed_time, 20),
    "mixed20_memory": partial(mixed_memory, 20),
    "mixed50": partial(mixed, 50),
    "mixed50_time": partial(mixed_time, 50),
    "mixed50_memory": partial(mixed_memory, 50),
    "hidden16": partial(hidden_nodes, 16),
    "mar_count": partial(missing_at_random, "count", "auto", 1.1),
    "mar_transport": partial(missing_at_random, "number", "transport", 1.5),
    "growth_rows": partial(growth, "rows"),
    "growth_rows_memory": partial(growth_memory, "rows"),
    "growth_nodes": partial(growth, "nodes"),
    "growth_nodes_memory": partial(growth_memory, "nodes"),
}
