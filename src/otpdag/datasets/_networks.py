"""Discrete Bayesian networks with known tables, and the Bayesian Interchange Format in which they are published."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import ascii_letters

import numpy as np
import pandas as pd

from otpdag.datasets._synthetic import Array, draw_states
from otpdag.errors import DataError, GraphError
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


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_TOKEN = re.compile(r'"[^"]*"|[{}()\[\],;|]|[^\s{}()\[\],;|"]+')


def read_bif(path: str | Path) -> DiscreteNetwork:
    """Read a network from a BIF file.

    Args:
        path: The file.

    Returns:
        The network; each row of its tables is scaled to sum to one, as files round.

    Raises:
        DataError: The text is not a network in this format; the message says where.
    """
    try:
        return parse_bif(Path(path).read_text(encoding="utf-8"))
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def parse_bif(text: str) -> DiscreteNetwork:
    """Read a network from the text of a BIF file.

    Args:
        text: The text.

    Returns:
        The network.

    Raises:
        DataError: The text is not a network in this format.

    Example:
        >>> network = parse_bif('''
        ...     network rain { }
        ...     variable rain { type discrete [ 2 ] { no, yes }; }
        ...     variable wet { type discrete [ 2 ] { no, yes }; }
        ...     probability ( rain ) { table 0.8, 0.2; }
        ...     probability ( wet | rain ) { (no) 0.9, 0.1; (yes) 0.0, 1.0; }
        ... ''')
        >>> network.graph
        Graph(rain -> wet)
    """
    return _Parser(text).parse()


class _Parser:
    """One pass over the tokens; each method reads one construct of the grammar."""

    def __init__(self, text: str) -> None:
        self._tokens: Iterator[str] = (match.group().strip('"') for match in _TOKEN.finditer(_COMMENT.sub(" ", text)))
        self._states: dict[str, tuple[str, ...]] = {}
        self._parents: dict[str, tuple[str, ...]] = {}
        self._tables: dict[str, Array] = {}

    def parse(self) -> DiscreteNetwork:
        blocks = {"network": self._network, "variable": self._variable, "probability": self._probability}
        for word in self._tokens:
            if word not in blocks:
                raise DataError(f"expected `network`, `variable` or `probability`; got `{word}`")
            blocks[word]()
        for node in self._states:
            if node not in self._tables:
                raise DataError(f"variable '{node}' has no `probability` block")
        return DiscreteNetwork(self._states, self._parents, self._tables)

    def _network(self) -> None:
        self._until("{")
        self._until("}")

    def _variable(self) -> None:
        name, _ = self._next(), self._expect("{")
        while (word := self._next()) != "}":
            statement = self._until(";")
            if word == "type":
                self._states[name] = self._type(name, statement)
        if name not in self._states:
            raise DataError(f"variable '{name}' has no `type`")

    def _type(self, name: str, statement: list[str]) -> tuple[str, ...]:
        """Read ``discrete [ 2 ] { no, yes }``."""
        if statement[:2] != ["discrete", "["]:
            raise DataError(f"variable '{name}' must be of type `discrete [ n ]`; got `{' '.join(statement)}`")
        states = tuple(_items(statement[statement.index("{") + 1 : statement.index("}")]))
        if str(len(states)) != statement[2]:
            raise DataError(f"variable '{name}' declares {statement[2]} states; got {len(states)}")
        return states

    def _probability(self) -> None:
        self._expect("(")
        name, *rest = _items(self._until(")"))
        node_parents = tuple(word for word in rest if word != "|")
        for known in (name, *node_parents):
            if known not in self._states:
                raise DataError(f"`probability ( {name} )` names '{known}', which no `variable` block declares")
        self._parents[name] = node_parents
        self._tables[name] = self._normalised(name, self._entries(name))

    def _entries(self, name: str) -> Array:
        """Read the rows of one table; cells that no row gives stay NaN."""
        shape = tuple(len(self._states[node]) for node in (*self._parents[name], name))
        table = np.full(shape, np.nan)
        self._expect("{")
        while (word := self._next()) != "}":
            if word == "(":
                row = self._configuration(name, _items(self._until(")")))
                table[row] = _numbers(name, self._until(";"), shape[-1:])
            elif word == "table":
                # The node's own state varies slowest, the last parent's fastest.
                table = np.moveaxis(_numbers(name, self._until(";"), shape[-1:] + shape[:-1]), 0, -1)
            elif word == "default":
                table = np.where(np.isnan(table), _numbers(name, self._until(";"), shape[-1:]), table)
            else:
                self._until(";")
        return table

    def _configuration(self, name: str, labels: list[str]) -> tuple[int, ...]:
        node_parents = self._parents[name]
        if len(labels) != len(node_parents):
            raise DataError(f"a row of '{name}' must name {len(node_parents)} parent states; got {labels}")
        for parent, label in zip(node_parents, labels, strict=True):
            if label not in self._states[parent]:
                raise DataError(f"a row of '{name}' names state '{label}', which '{parent}' does not have")
        return tuple(self._states[parent].index(label) for parent, label in zip(node_parents, labels, strict=True))

    @staticmethod
    def _normalised(name: str, table: Array) -> Array:
        sums = table.sum(axis=-1, keepdims=True)
        if not (np.abs(sums - 1.0) < 1e-3).all():  # published files round probabilities to a few digits
            raise DataError(f"every row of the table of '{name}' must be given and sum to 1; got {sums.ravel()}")
        return np.asarray(table / sums)

    def _next(self) -> str:
        for token in self._tokens:
            return token
        raise DataError("the text ends inside a block")

    def _expect(self, wanted: str) -> str:
        if (token := self._next()) != wanted:
            raise DataError(f"expected `{wanted}`; got `{token}`")
        return token

    def _until(self, end: str) -> list[str]:
        tokens: list[str] = []
        while (token := self._next()) != end:
            tokens.append(token)
        return tokens


def _items(tokens: list[str]) -> list[str]:
    return [token for token in tokens if token != ","]


def _numbers(name: str, tokens: list[str], shape: tuple[int, ...]) -> Array:
    words = _items(tokens)
    try:
        values = np.array([float(word) for word in words])
    except ValueError:
        raise DataError(f"the table of '{name}' must hold numbers; got `{' '.join(words)}`") from None
    if values.size != np.prod(shape):
        raise DataError(f"the table of '{name}' needs {int(np.prod(shape))} numbers here; got {values.size}")
    return values.reshape(shape)
