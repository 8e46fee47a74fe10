"""Discrete networks of other programs, with their parameters: BIF files (bnlearn and most others), pgmpy, pyAgrum.

All go by way of states, parents and tables, which such models have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from otpdag.datasets import DiscreteNetwork, read_bif
from otpdag.errors import ModelError
from otpdag.files import write_bytes
from otpdag.graph import Graph
from otpdag.mechanisms import Categorical
from otpdag.model import Model


def model_of(network: DiscreteNetwork, hidden: Sequence[str] = ()) -> Model:
    """A model with a network's tables; categories are called as its states are.

    >>> import numpy as np
    >>> states = {"rain": ("no", "yes"), "wet": ("dry", "wet")}
    >>> tables = {"rain": np.array([0.8, 0.2]), "wet": np.array([[0.9, 0.1], [0.0, 1.0]])}
    >>> model = model_of(DiscreteNetwork(states, {"rain": (), "wet": ("rain",)}, tables))
    >>> model.labels("wet"), model.params()["wet"]["probs"][0].round(2)
    (('dry', 'wet'), array([0.9, 0.1]))
    """
    graph = Graph(network.graph.edges, nodes=network.nodes, hidden=hidden)
    model = Model(graph, {node: Categorical(len(network.states[node])) for node in network.nodes})
    labels = {node: network.states[node] for node in network.nodes if node not in hidden}
    return model.set_params({node: {"probs": network.tables[node]} for node in network.nodes}, labels=labels)


def network_of(model: Model) -> DiscreteNetwork:
    """A fitted model's states, parents and tables.

    Raises:
        ModelError: A node is no table of probabilities; the message names it.
    """
    for node, mechanism in model.mechanisms.items():
        if not isinstance(mechanism, Categorical) or not mechanism.is_table:
            kind = type(mechanism).__name__
            raise ModelError(f"only tables of probabilities can be written so; node {node!r} is {kind}, and no table")
    if model.graph.is_dynamic:
        raise ModelError("only graphs without lagged edges can be written so")
    params = model.params()
    return DiscreteNetwork(
        states={node: tuple(map(str, model.labels(node))) for node in model.graph.nodes},
        parents={node: tuple(model.graph.parents(node)) for node in model.graph.nodes},
        tables={node: params[node]["probs"] for node in model.graph.nodes},
    )


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.+<>=")


def from_bif(path: str | Path, *, hidden: Sequence[str] = ()) -> Model:
    """A model with the graph, the categories and the tables of a BIF file.

    Args:
        path: The file.
        hidden: Nodes that no column of the data will show.
    """
    return model_of(read_bif(path), hidden)


def to_bif(model: Model, path: str | Path) -> None:
    """Write a fitted model of tables as a BIF file.

    Raises:
        ModelError: A node is no table, or a name has characters that the format cannot hold.
    """
    write_bytes(Path(path), _text(network_of(model)).encode("utf-8"))


def _text(network: DiscreteNetwork) -> str:
    for name in [*network.nodes, *(state for states in network.states.values() for state in states)]:
        if not name or not set(name) <= _PLAIN:
            raise ModelError(f"BIF holds names of letters, digits and _-.+<>= only; got {name!r}")
    lines = ["network otpdag {", "}"]
    for node, states in network.states.items():
        lines += [f"variable {node} {{", f"  type discrete [ {len(states)} ] {{ {', '.join(states)} }};", "}"]
    for node, parents in network.parents.items():
        head = f"{node} | {', '.join(parents)}" if parents else node
        lines.append(f"probability ( {head} ) {{")
        for place in product(*(range(len(network.states[parent])) for parent in parents)):
            numbers = ", ".join(repr(float(value)) for value in network.tables[node][place])
            of = ", ".join(network.states[parent][code] for parent, code in zip(parents, place, strict=True))
            lines.append(f"  ({of}) {numbers};" if parents else f"  table {numbers};")
        lines.append("}")
    return "\n".join(lines) + "\n"


def from_pgmpy(network: Any, *, hidden: Sequence[str] = ()) -> Model:
    """A model with the graph, categories and tables of a ``DiscreteBayesianNetwork``."""
    states: dict[str, tuple[str, ...]] = {}
    parents: dict[str, tuple[str, ...]] = {}
    tables = {}
    _check_has(network, "get_cpds", "pgmpy's DiscreteBayesianNetwork")
    for node in network.nodes():
        factor = network.get_cpds(node)
        if factor is None:
            raise ModelError(f"node {node!r} of the network must have a table of probabilities; it has none")
        name = str(node)
        parents[name] = tuple(map(str, factor.variables[1:]))
        states[name] = tuple(map(str, factor.state_names[node]))
        # an axis for the node, then one for each parent: ours has the node last
        tables[name] = np.moveaxis(np.asarray(factor.values, dtype=float), 0, -1)
    return model_of(DiscreteNetwork(states, parents, tables), hidden)


def _check_has(network: Any, method: str, kind: str) -> None:
    if not callable(getattr(network, method, None)):
        raise ModelError(f"network must be {kind}; got {type(network).__name__}")


def to_pgmpy(model: Model) -> Any:
    """A pgmpy ``DiscreteBayesianNetwork`` with a fitted model's graph, categories and tables."""
    from pgmpy.factors.discrete import TabularCPD
    from pgmpy.models import DiscreteBayesianNetwork

    ours = network_of(model)
    network = DiscreteBayesianNetwork()
    network.add_nodes_from(ours.nodes)
    network.add_edges_from((parent, node) for node in ours.nodes for parent in ours.parents[node])
    for node in ours.nodes:
        parents = ours.parents[node]
        table = np.moveaxis(ours.tables[node], -1, 0).reshape(len(ours.states[node]), -1)
        factor = TabularCPD(
            node,
            len(ours.states[node]),
            table,
            evidence=list(parents) or None,
            evidence_card=[len(ours.states[parent]) for parent in parents] or None,
            state_names={name: list(ours.states[name]) for name in (node, *parents)},
        )
        network.add_cpds(factor)
    return network


def from_pyagrum(network: Any, *, hidden: Sequence[str] = ()) -> Model:
    """A model with the graph, categories and tables of a pyAgrum ``BayesNet``."""
    _check_has(network, "topologicalOrder", "pyAgrum's BayesNet")
    names = {number: network.variable(number).name() for number in network.topologicalOrder()}
    states, parents, tables = {}, {}, {}
    for name in names.values():
        table = network.cpt(name)
        states[name] = tuple(network.variable(name).labels())
        axes = list(table.names)[::-1]  # of its array: the node itself is last
        parents[name] = tuple(axis for axis in axes if axis != name)
        order = [axes.index(axis) for axis in (*parents[name], name)]
        tables[name] = np.asarray(table.toarray(), dtype=float).transpose(order)
    return model_of(DiscreteNetwork(states, parents, tables), hidden)


def to_pyagrum(model: Model) -> Any:
    """A pyAgrum ``BayesNet`` with a fitted model's graph, categories and tables."""
    import pyagrum

    ours = network_of(model)
    network = pyagrum.BayesNet()
    for node in ours.nodes:
        network.add(pyagrum.LabelizedVariable(node, node, list(ours.states[node])))
    for node in ours.nodes:
        for parent in ours.parents[node]:
            network.addArc(parent, node)
    for node in ours.nodes:
        axes = list(network.cpt(node).names)[::-1]
        own = [*ours.parents[node], node]
        table = ours.tables[node].transpose([own.index(axis) for axis in axes])
        network.cpt(node).fillWith(table.ravel().tolist())
    return network
