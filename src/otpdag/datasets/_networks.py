"""Discrete Bayesian networks with known tables, and the Bayesian Interchange Format in which they are published."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import ascii_letters

import numpy as np
import pandas as pd

from otpdag.datasets._synthetic import draw_states
from otpdag.errors import DataError, GraphError, listed, told_as
from otpdag.files import as_path
from otpdag.graph import Graph
from otpdag.numerics import Array
from otpdag.structure import MOST_IN_TABLES


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
_TOKEN = re.compile(r'"[^"]*"|[{}()\[\];|]|[^\s{}()\[\],;|"]+')


def read_bif(path: str | Path) -> DiscreteNetwork:
    """Read a network from a BIF file.

    Args:
        path: The file.

    Returns:
        The network; each row of its tables is scaled to sum to one, as files round.

    Raises:
        DataError: The text is not a network in this format; the message says where.
    """
    with told_as(DataError, str(path), DataError, GraphError, OSError, UnicodeDecodeError):
        return parse_bif(as_path(path).read_text(encoding="utf-8"))


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
    states: dict[str, tuple[str, ...]] = {}
    parents: dict[str, tuple[str, ...]] = {}
    tables: dict[str, Array] = {}
    numbers = 0
    for header, statements in _blocks(text):
        match header:
            case ["network", *_]:
                continue
            case ["variable", name] if name in states:
                raise DataError(f"there are two `variable` blocks of '{name}'")
            case ["probability", "(", name, *_] if name in tables:
                raise DataError(f"there are two `probability` blocks of '{name}'")
            case ["variable", name]:
                states[name] = _states(name, statements)
            case ["probability", "(", name, *rest, ")"]:
                parents[name] = tuple(word for word in rest if word != "|")
                for known in (name, *parents[name]):
                    if known not in states:
                        raise DataError(f"`probability ( {name} )` names '{known}', which no `variable` block declares")
                if len({name, *parents[name]}) <= len(parents[name]):
                    raise DataError(f"`probability ( {name} | ... )` names a node twice")
                numbers += math.prod(len(states[known]) for known in (*parents[name], name))
                if numbers > MOST_IN_TABLES:
                    raise DataError(f"up to '{name}' the tables have {numbers:,} numbers; at most {MOST_IN_TABLES:,}")
                tables[name] = _table(name, {known: states[known] for known in (*parents[name], name)}, statements)
            case _:
                raise DataError(f"expected `network`, `variable` or `probability`; got `{' '.join(header)}`")
    for node in states:
        if node not in tables:
            raise DataError(f"variable '{node}' has no `probability` block")
    return DiscreteNetwork(states, parents, tables)


def _blocks(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """What stands before each pair of braces, and the statements inside them, as words and signs without commas."""
    header: list[str] = []
    statements: list[list[str]] = [[]]
    depth = 0
    for match in _TOKEN.finditer(_COMMENT.sub(" ", text)):
        token = match.group().strip('"')
        depth += (token == "{") - (token == "}")
        if token == "{" and depth == 1:
            continue
        if depth == 0 and token == "}":
            yield header, [statement for statement in statements if statement]
            header, statements = [], [[]]
        elif depth == 0:
            header.append(token)
        elif depth == 1 and token == ";":
            statements.append([])
        else:
            statements[-1].append(token)
    if depth:
        raise DataError("the text ends inside a block")
    if header:
        yield header, []


def _states(name: str, statements: list[list[str]]) -> tuple[str, ...]:
    """Read ``type discrete [ 2 ] { no, yes }``."""
    for statement in statements:
        match statement:
            case ["type", "discrete", "[", size, "]", "{", *states, "}"]:
                if str(len(set(states))) != size or len(set(states)) < len(states):
                    raise DataError(f"variable '{name}' declares {size} different states; got {len(set(states))}")
                return tuple(states)
            case ["type", *kind]:
                raise DataError(f"variable '{name}' must be of type `discrete [ n ]`; got `{' '.join(kind)}`")
    raise DataError(f"variable '{name}' has no `type`")


def _table(name: str, states: Mapping[str, tuple[str, ...]], statements: list[list[str]]) -> Array:
    """Read a table with an axis for each parent, and the node's own states last; each row is scaled to sum to one."""
    shape = tuple(map(len, states.values()))
    table = np.full(shape, np.nan)
    told = [" ".join(one[: one.index(")")] if one[0] == "(" else one[:1]) for one in statements if one[0] != "property"]
    if len(set(told)) < len(told) or ("table" in told and len(told) > 1):
        raise DataError(f"the table of '{name}' must give every row once; got {listed(told)}")
    for statement in statements:
        match statement:
            case ["(", *rest] if ")" in rest:
                end = rest.index(")")
                table[_place(name, states, rest[:end])] = _numbers(name, rest[end + 1 :], shape[-1:])
            case ["table", *words]:
                # the node's own state varies slowest, the last parent's fastest
                table = np.moveaxis(_numbers(name, words, shape[-1:] + shape[:-1]), 0, -1)
            case ["default", *words]:
                table = np.where(np.isnan(table), _numbers(name, words, shape[-1:]), table)
    sums = table.sum(axis=-1, keepdims=True)
    # published files round probabilities to a few digits
    if not (table >= 0).all() or not (np.abs(sums - 1.0) < 1e-3).all():
        raise DataError(
            f"every row of the table of '{name}' must be given, hold no number below 0, and sum to 1; sums begin with "
            f"{sums.ravel()[:8]}"
        )
    return np.asarray(table / sums)


def _place(name: str, states: Mapping[str, tuple[str, ...]], labels: list[str]) -> tuple[int, ...]:
    if len(labels) != len(states) - 1:
        raise DataError(f"a row of '{name}' must name {len(states) - 1} parent states; got {labels}")
    for parent, label in zip(states, labels, strict=False):
        if label not in states[parent]:
            raise DataError(f"a row of '{name}' names state '{label}', which '{parent}' does not have")
    return tuple(states[parent].index(label) for parent, label in zip(states, labels, strict=False))


def _numbers(name: str, words: list[str], shape: tuple[int, ...]) -> Array:
    try:
        values = np.array([float(word) for word in words])
    except ValueError:
        raise DataError(f"the table of '{name}' must hold numbers; got `{' '.join(words)}`") from None
    if values.size != np.prod(shape):
        raise DataError(f"the table of '{name}' needs {int(np.prod(shape))} numbers here; got {values.size}")
    return values.reshape(shape)
