"""A discrete model as states, parents and tables, which all formats of such models have in common."""

from __future__ import annotations

from collections.abc import Sequence

from otpdag.datasets import DiscreteNetwork
from otpdag.errors import ModelError
from otpdag.graph import Graph
from otpdag.mechanisms import Categorical
from otpdag.model import Model

__all__ = ["model_of", "network_of"]


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
