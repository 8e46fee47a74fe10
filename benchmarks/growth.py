"""Growth: processor seconds of whole fits as tables get more rows, graphs more nodes, and more of these are hidden.

``ratio`` is the power of the size by which our time grows. Peers run on the same data, each to its own tolerance and
from as many starts; where one would take minutes, its curve ends earlier.
"""

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd

import otpdag as otp
from benchmarks import speed_peers as peers
from benchmarks.harness import Case, Record, Settings, Streams, streams
from benchmarks.scale import is_quick
from benchmarks.speed import fitted, measured, mixture_table
from otpdag import mechanisms as m
from otpdag.datasets import DiscreteNetwork

COMPONENTS, COLUMNS, STARTS = 3, 4, 4
TREE_ROWS, GAPS = 2_000, 0.05
LEAVES = 3  # behind each hidden node

Side = Callable[[], Record]
Sides = Callable[[int, Streams], Mapping[str, Side]]


def grown(name: str, sizes: Sequence[int], sides: Sides, settings: Settings) -> Record:
    """Seconds of all sides at every size at which they run."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for size in sizes:
        for side, work in sides(size, streams(settings.seed, f"growth {name}", size)).items():
            curves.setdefault(side, []).append((size, measured(work)["seconds"]))
    (first, quick), (last, slow) = curves["otpdag"][0], curves["otpdag"][-1]
    power = math.log(slow / quick) / math.log(last / first)
    return {"ratio": power, "ours": slow, "oracle": quick, "size_of": name, "curves": curves}


def _where_installed(sides: Mapping[str, tuple[str, Side]]) -> dict[str, Side]:
    """By the name of a library and the module that it is."""
    return {name: work for name, (module, work) in sides.items() if importlib.util.find_spec(module) is not None}


# -- rows --------------------------------------------------------------------------------------------------------------


def rows(settings: Settings) -> Record:
    """A mixture of three normal components in four dimensions, four starts."""

    def sides(size: int, sources: Streams) -> dict[str, Side]:
        table, seed = mixture_table(size, COMPONENTS, COLUMNS, sources.data), sources.oracle % 2**31
        ours = partial(fitted, mixture_model, {"x": table}, {"x": table[:300]}, sources.fit, STARTS)
        others = {
            "scikit-learn": ("sklearn", partial(peers.sklearn_mixture, table, COMPONENTS, STARTS, seed)),
            "pomegranate": ("pomegranate", partial(peers.pomegranate_mixture, table, COMPONENTS, STARTS, seed)),
        }
        return {"otpdag": ours, **_where_installed(others)}

    return grown("rows", (1_000, 10_000, 100_000, *(() if is_quick(settings) else (1_000_000,))), sides, settings)


def mixture_model() -> "otp.Model":
    """A hidden class behind a normal vector."""
    graph = otp.Graph([("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(COMPONENTS), "x": m.MultivariateNormal(COLUMNS)})


# -- nodes -------------------------------------------------------------------------------------------------------------


def nodes(settings: Settings) -> Record:
    """A tree of binary columns with 5 % gaps, 2,000 rows, one start."""
    most = 32 if is_quick(settings) else 128

    def sides(size: int, sources: Streams) -> dict[str, Side]:
        network = tree(size, sources.data)
        frame = network.sample(TREE_ROWS, sources.data).astype(float)
        frame = frame.mask(sources.missing.random(frame.shape) < GAPS)
        ours = partial(fitted, partial(network_model, network, ()), frame, frame[:300], sources.fit, 1)
        agrum = partial(peers.agrum_network, network, frame, sources.oracle)
        return {"otpdag": ours, **(_where_installed({"pyAgrum": ("pyagrum", agrum)}) if size <= most else {})}

    return grown("nodes", (8, 32, 128, *(() if is_quick(settings) else (512, 1_024))), sides, settings)


def tree(size: int, generator: np.random.Generator) -> DiscreteNetwork:
    """Binary nodes, each with one random earlier one as its parent."""
    names = [f"x{i}" for i in range(size)]
    parents = {name: (names[generator.integers(i)],) if i else () for i, name in enumerate(names)}
    return _random_network(names, parents, generator)


def _random_network(
    names: Sequence[str], parents: Mapping[str, tuple[str, ...]], generator: np.random.Generator
) -> DiscreteNetwork:
    """Two states each, which differ clearly by their parent's."""
    tables = {}
    for name in names:
        one = generator.uniform(0.1, 0.3, 2) if parents[name] else np.array([0.4])
        high = np.array([one[0], 1 - one[1]]) if parents[name] else one
        tables[name] = np.stack([1 - high, high], -1).reshape(*(2 for _ in parents[name]), 2)
    return DiscreteNetwork(dict.fromkeys(names, ("no", "yes")), parents, tables)


def network_model(network: DiscreteNetwork, hidden: Sequence[str]) -> "otp.Model":
    """The network as a model, its tables to be learned."""
    edges = [(parent, node) for node in network.nodes for parent in network.parents[node]]
    graph = otp.Graph(edges, nodes=network.nodes, hidden=hidden)
    return otp.Model(graph, {node: m.Categorical(len(network.states[node])) for node in network.nodes})


# -- hidden nodes ------------------------------------------------------------------------------------------------------


def hidden(settings: Settings) -> Record:
    """A chain of hidden binary nodes with three binary columns each, 2,000 rows, one start."""
    most = 1 if is_quick(settings) else 2

    def sides(size: int, sources: Streams) -> dict[str, Side]:
        network = hidden_chain(size, sources.data)
        unseen = [node for node in network.nodes if node.startswith("h")]
        frame: pd.DataFrame = network.sample(TREE_ROWS, sources.data).drop(columns=unseen)
        ours = partial(fitted, partial(network_model, network, unseen), frame, frame[:300], sources.fit, 1)
        pgmpy = partial(peers.pgmpy_network, network, frame, sources.oracle % 2**31)
        return {"otpdag": ours, **(_where_installed({"pgmpy": ("pgmpy", pgmpy)}) if size <= most else {})}

    return grown("hidden nodes", (1, 2, 4, 8, *(() if is_quick(settings) else (16,))), sides, settings)


def hidden_chain(size: int, generator: np.random.Generator) -> DiscreteNetwork:
    """Hidden nodes h0 -> h1 -> ..., each with leaves."""
    names, parents = [], {}
    for i in range(size):
        own = {f"h{i}": (f"h{i - 1}",) if i else (), **{f"x{i}_{leaf}": (f"h{i}",) for leaf in range(LEAVES)}}
        names += list(own)
        parents |= own
    return _random_network(names, parents, generator)


CASES: dict[str, Case] = {"rows": rows, "nodes": nodes, "hidden": hidden}
