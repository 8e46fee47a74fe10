"""A discrete Bayesian network with known tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from string import ascii_letters

import numpy as np
import pandas as pd

from otpdag.datasets._truth import Array, draw_states
from otpdag.errors import GraphError
from otpdag.graph import Graph


@dataclass(frozen=True)
class DiscreteNetwork:
    """A discrete Bayesian network: states, parents and probability tables by node.

    Attributes:
        states: The names of the states of each node.
        parents: The parents of each node, in the order of the axes of its table.
        tables: The probabilities of each node: an axis per parent, and the node's own states last.

    Example:
        >>> rain = DiscreteNetwork(
        ...     states={"rain": ("no", "yes"), "wet": ("no", "yes")},
        ...     parents={"rain": (), "wet": ("rain",)},
        ...     tables={"rain": np.array([0.8, 0.2]), "wet": np.array([[0.9, 0.1], [0.0, 1.0]])},
        ... )
        >>> rain.joint(["wet"])
        array([0.72, 0.28])
    """

    states: dict[str, tuple[str, ...]]
    parents: dict[str, tuple[str, ...]]
    tables: dict[str, Array]

    def __post_init__(self) -> None:
        """Check that there is no cycle and that every table has the shape that states and parents ask for."""
        _ = self.graph  # refuses a cycle
        for node, table in self.tables.items():
            expected = tuple(len(self.states[name]) for name in (*self.parents[node], node))
            if table.shape != expected:
                raise GraphError(f"the table of '{node}' must have shape {expected}; got {table.shape}")

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes, in the order in which they were declared."""
        return tuple(self.states)

    @cached_property
    def graph(self) -> Graph:
        """The graph; the parents of a node come in the order of the axes of its table."""
        edges = [(parent, node) for node in self.nodes for parent in self.parents[node]]
        return Graph(edges, nodes=self.nodes)

    def sample(self, rows: int, generator: np.random.Generator) -> pd.DataFrame:
        """Draw rows from the joint distribution, as integer codes of the states.

        Args:
            rows: How many rows.
            generator: The source of the draws.

        Returns:
            A column per node, in the order of ``nodes``.
        """
        codes: dict[str, np.ndarray] = {}
        for node in self.graph.order:
            given = self.tables[node][tuple(codes[parent] for parent in self.parents[node])]
            codes[node] = draw_states(given, rows, generator)
        return pd.DataFrame({node: codes[node] for node in self.nodes})

    def joint(self, nodes: Sequence[str]) -> Array:
        """Compute the exact joint distribution of some nodes, the others summed out.

        Args:
            nodes: Which nodes; the result has an axis for each, in this order. It grows with the product
                of their numbers of states.

        Returns:
            Probabilities that sum to one.
        """
        letter = dict(zip(self.nodes, ascii_letters, strict=False))
        families = ["".join(letter[name] for name in (*self.parents[node], node)) for node in self.tables]
        wanted = "".join(letter[node] for node in nodes)
        product = np.einsum(f"{','.join(families)}->{wanted}", *self.tables.values(), optimize="greedy")
        return np.asarray(product, dtype=float)
