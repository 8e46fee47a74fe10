"""The schema: which columns hold which node and what the categories are called, settled once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from otpdag.data.reading import Column, Label, Table, cell_names, column_title, read_blocks
from otpdag.data.types import find_labels, find_number_labels, in_blocks
from otpdag.errors import DataError, ModelError, listed
from otpdag.graph import Graph
from otpdag.spaces import Discrete, Space, space_from


@dataclass(frozen=True)
class Schema:
    """Which columns hold which node, hidden ones included.

    A node of one cell has the column of its own name, a node ``x`` of several the columns ``x.0``, ``x.1``
    and so on. Build one with :meth:`of`.

    >>> from otpdag.spaces import Real
    >>> graph = Graph([("season", "load")], hidden=["load"])
    >>> frame = pd.DataFrame({"season": ["wet", "dry", None]})
    >>> schema = Schema.of({"season": Discrete(2), "load": Real(2)}, graph, frame)
    >>> schema["season"].labels, schema["load"].names
    (('dry', 'wet'), ('load.0', 'load.1'))
    """

    columns: Mapping[str, Column]

    @classmethod
    def of(cls, spaces: Mapping[str, Space], graph: Graph, data: Table | None = None) -> Schema:
        """Settle column names and category labels.

        A discrete column may hold codes 0, 1, ..., K-1, or anything else that names categories: the
        categories of a pandas Categorical in their order, False and True, the sorted distinct values of a
        column of text, or of a column of numbers if there are exactly K (such as 10, 20, 30, or 1 and 2).
        Categories that the space has and the table does not show are called ``(unseen k)``.

        Args:
            spaces: The space of each node.
            graph: The graph; its order is the order of the columns.
            data: The table that shows the categories; without one, all discrete columns hold codes.

        Returns:
            The schema.

        Raises:
            DataError: A node has no space, two nodes claim one column, or a column shows too many categories.
        """
        for node in graph.nodes:
            if node not in spaces:
                raise DataError(f"spaces must have an entry for every node; node {node!r} has none")
        plain = {node: Column(spaces[node], None, cell_names(node, spaces[node])) for node in graph.nodes}
        _check_claims(plain)
        if data is None:
            return cls(plain)
        seen = {node: column for node, column in plain.items() if node not in graph.hidden}
        if isinstance(data, pd.DataFrame):  # whose columns stand for themselves: only categories have names to find
            seen = {node: column for node, column in seen.items() if isinstance(column.space, Discrete)}
        blocks, _ = read_blocks(data, seen, partial=True)
        return cls({node: _with_labels(node, column, blocks.get(node)) for node, column in plain.items()})

    @classmethod
    def of_levels(cls, spaces: Mapping[str, Space], graph: Graph, levels: Mapping[str, pd.Series[Any]]) -> Schema:
        """Settle category labels by the distinct values of columns, which tell the same as the columns themselves.

        >>> levels = {"season": pd.Series(["wet", "dry"])}
        >>> Schema.of_levels({"season": Discrete(2)}, Graph([], nodes=["season"]), levels)["season"].labels
        ('dry', 'wet')
        """
        plain = cls.of(spaces, graph).columns
        shown = {node: series.to_frame() for node, series in levels.items()}
        return cls({node: _with_labels(node, column, shown.get(node)) for node, column in plain.items()})

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, in the order of the graph."""
        return tuple(self.columns)

    def __getitem__(self, node: str) -> Column:
        if node not in self.columns:
            raise DataError(f"node {node!r} is not in the schema, which holds {listed(self.nodes)}")
        return self.columns[node]

    def labelled(self, labels: Mapping[str, Sequence[Label]]) -> Schema:
        """The schema with other names of categories.

        Raises:
            DataError: A node is no category, or has another number of them.
        """
        columns = dict(self.columns)
        for node, names in labels.items():
            column = self[node]
            if not column.space.is_discrete or len(names) != column.space.width or len(set(names)) != len(names):
                raise DataError(
                    f"labels of node {node!r} must be one name for each category of {column.space}; got {names!r}"
                )
            columns[node] = replace(column, labels=tuple(names))
        return Schema(columns)

    def to_dict(self) -> dict[str, Any]:
        """Write lists, numbers and strings only, for JSON.

        >>> from otpdag.spaces import Count
        >>> schema = Schema.of({"a": Discrete(3), "b": Count()}, Graph([("a", "b")]))
        >>> Schema.from_dict(schema.to_dict()) == schema
        True
        """
        return {
            node: {
                "space": column.space.spec(),
                "labels": None if column.labels is None else list(column.labels),
                "names": list(column.names),
            }
            for node, column in self.columns.items()
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Schema:
        """Read what :meth:`to_dict` wrote.

        Args:
            state: For each node its ``space``, ``labels`` and ``names``.

        Returns:
            The schema.

        Raises:
            DataError: A space is of an unknown kind.
        """
        return cls({node: _column_from_dict(node, entry) for node, entry in state.items()})


def _check_claims(columns: Mapping[str, Column]) -> None:
    owner: dict[str, str] = {}
    for node, column in columns.items():
        for name in column.names:
            if name in owner:
                raise DataError(f"nodes {owner[name]!r} and {node!r} both claim column {name!r}; rename one of them")
            owner[name] = node


def _with_labels(node: str, column: Column, block: pd.DataFrame | None) -> Column:
    if block is None or not isinstance(column.space, Discrete):
        return column
    present, size = _distinct(block.iloc[:, 0]).dropna(), column.space.size
    labels = find_labels(present)
    if labels is None:
        labels = find_number_labels(present, size)
    if labels is None:
        return column
    if len(labels) > size and isinstance(present.dtype, pd.CategoricalDtype):
        labels = find_labels(present.cat.remove_unused_categories()) or ()
    if len(labels) > size:
        raise DataError(
            f"{column_title(node, column.names[0])} must hold at most {size} categories; "
            f"found {len(labels)}: {listed(labels)}"
        )
    unseen = tuple(f"(unseen {code})" for code in range(len(labels), size))
    return Column(column.space, (*labels, *unseen), column.names)


def _distinct(series: pd.Series[Any]) -> pd.Series[Any]:
    """The values of a column once each, where values that are equal are alike: a long column is not copied then."""
    if not isinstance(series.dtype, pd.StringDtype) and not pd.api.types.is_numeric_dtype(series.dtype):
        return series
    distinct = [pd.Series(part.unique(), name=series.name) for part in in_blocks(series)]
    return pd.concat(distinct, ignore_index=True) if distinct else series


def _column_from_dict(node: str, entry: Mapping[str, Any]) -> Column:
    try:
        space = space_from(entry["space"])
    except ModelError as error:
        raise DataError(f"node {node!r}: {error}") from None
    labels = entry["labels"]
    return Column(space, None if labels is None else tuple(labels), tuple(entry["names"]))
