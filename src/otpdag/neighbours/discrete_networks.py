"""Discrete networks of pgmpy and pyAgrum, with their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from otpdag.datasets import DiscreteNetwork
from otpdag.model import Model
from otpdag.neighbours.network_tables import model_of, network_of

__all__ = ["from_pgmpy", "from_pyagrum", "to_pgmpy", "to_pyagrum"]


def from_pgmpy(network: Any, *, hidden: Sequence[str] = ()) -> Model:
    """A model with the graph, categories and tables of a ``DiscreteBayesianNetwork``."""
    states: dict[str, tuple[str, ...]] = {}
    parents: dict[str, tuple[str, ...]] = {}
    tables = {}
    for node in network.nodes():
        factor = network.get_cpds(node)
        name = str(node)
        parents[name] = tuple(map(str, factor.variables[1:]))
        states[name] = tuple(map(str, factor.state_names[node]))
        # an axis for the node, then one for each parent: ours has the node last
        tables[name] = np.moveaxis(np.asarray(factor.values, dtype=float), 0, -1)
    return model_of(DiscreteNetwork(states, parents, tables), hidden)


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
