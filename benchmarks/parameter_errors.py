"""Mean absolute errors of parameters, over the configurations of categorical parents that a table shows."""

from collections.abc import Collection, Sequence

import numpy as np
import pandas as pd

from benchmarks.random_graphs import World
from experiments.metrics import match_states
from otpdag.datasets import DiscreteNetwork, Truth


def configurations_seen(
    frame: pd.DataFrame, family: Sequence[str], categories: Sequence[str], sizes: Sequence[int], least: int
) -> np.ndarray:
    """Which configurations of categorical parents occur in at least so many rows that show the whole family."""
    counts = np.zeros(tuple(sizes))
    rows = frame[[name for name in family if name in frame]].dropna()
    np.add.at(counts, tuple(rows[name].to_numpy(dtype=int) for name in categories), 1)
    return counts >= least


def entries(true: Truth, estimated: Truth, seen: dict[str, np.ndarray]) -> np.ndarray:
    """Absolute errors of all parameters, of tables where their configuration is seen; logits are centred."""
    errors = []
    for node, parameters in true.items():
        for name, value in parameters.items():
            both = [np.asarray(value, dtype=float), np.asarray(estimated[node][name], dtype=float)]
            if "logits" in parameters:
                both = [array - array.mean(axis=-1, keepdims=True) for array in both]
            gap = np.abs(both[0] - both[1])
            errors.append(np.ravel(gap if name == "weight" else gap[seen[node]]))
    return np.concatenate(errors)


def network_error(network: DiscreteNetwork, frame: pd.DataFrame, tables: dict[str, np.ndarray]) -> float:
    """Of the tables of a discrete network without hidden nodes."""
    seen = {}
    for node, parents in network.parents.items():
        sizes = [len(network.states[name]) for name in parents]
        seen[node] = configurations_seen(frame, [*parents, node], parents, sizes, least=1)
    true, estimated = ({node: {"probs": table} for node, table in given.items()} for given in (network.tables, tables))
    return float(entries(true, estimated, seen).mean())


def world_error(world: World, frame: pd.DataFrame, params: Truth, least: int = 20) -> float:
    """Of all parameters of a random graph."""
    seen = {}
    for node, parents in world.parents.items():
        categories = world.categories(node)
        sizes = [world.sizes[name] for name in categories]
        seen[node] = configurations_seen(frame, [*parents, node], categories, sizes, least)
    return float(entries(world.truth, params, seen).mean())


def tree_error(tree: DiscreteNetwork, tables: dict[str, np.ndarray], observed: Collection[str]) -> float:
    """Of all tables; the labels of each hidden node are matched by the tables of its observed children."""
    order = {}
    for node in tree.nodes:
        if node in observed:
            continue
        leaves = [leaf for leaf in observed if tree.parents[leaf] == (node,)]
        order[node] = match_states(*({leaf: given[leaf] for leaf in leaves} for given in (tree.tables, tables)))
    errors = []
    for node in tree.nodes:
        table = tables[node]
        for parent in tree.parents[node]:
            table = table[order[parent]]
        errors.append(np.abs(tree.tables[node] - (table if node in observed else table[..., order[node]])).ravel())
    return float(np.concatenate(errors).mean())
