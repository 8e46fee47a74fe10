"""Graphs: which node is drawn from which others, and which are never seen.

A :class:`Graph` is frozen and hashable. An ordinary edge joins two nodes of one row. A lagged edge, made by
:func:`lag`, joins a node to an earlier time step of a sequence; it plays no part in whether the graph is
acyclic.
"""

from __future__ import annotations

import heapq
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from otpdag.errors import GraphError, listed

if TYPE_CHECKING:
    import networkx as nx


T = TypeVar("T")

MOST_NODES = 10_000  # what enumerates nodes and edges stays within seconds
RESERVED = ("phi.", "tie.")  # with which parameters begin that are no node's own
MOST_STEPS_BACK = 10_000  # a year of hours; a lag is laid out as that many steps


@dataclass(frozen=True)
class Lag:
    """An edge from ``parent`` at step ``t - by`` to ``child`` at step ``t``; see :func:`lag`."""

    parent: str
    child: str
    by: int = 1

    def __post_init__(self) -> None:
        call = f"lag({self.parent!r}, {self.child!r})"
        child: object = self.child
        if isinstance(child, int):  # lag("x", 1), as other libraries write it
            own = f"lag({self.parent!r}, {self.parent!r}, by={child!r:.60})"
            raise GraphError(f"{call}: a lag is an edge from a node to a node; write {own} or the child's name second")
        _check_name(self.parent, call)
        _check_name(self.child, call)
        if isinstance(self.by, bool) or not isinstance(self.by, int) or self.by < 1:
            raise GraphError(f"{call}: by must be a whole number of at least 1; got {self.by!r:.60}")
        if self.by > MOST_STEPS_BACK:
            raise GraphError(f"{call}: by must be at most {MOST_STEPS_BACK}; got {self.by!r:.60}")

    def __str__(self) -> str:
        return f"{self.parent}[t-{self.by}] -> {self.child}"


def lag(parent: str, child: str, by: int = 1) -> Lag:
    """Join ``parent``, ``by`` time steps ago, to ``child`` now.

    Args:
        parent: The earlier node.
        child: The later node; it may be the same one.
        by: How many steps lie between them.

    Returns:
        An edge for :class:`Graph`.

    Raises:
        GraphError: A name is not a non-empty string, or ``by`` is below one.

    >>> Graph([lag("z", "z"), ("z", "x")], hidden=["z"])
    Graph(z -> x; z[t-1] -> z; hidden: z)
    """
    return Lag(parent, child, by)


@dataclass(frozen=True, init=False, repr=False)
class Graph:
    """A directed acyclic graph, some of whose nodes are hidden.

    Two graphs are equal when they have the same nodes, edges and hidden nodes in the same order: the order of
    the edges is the order in which a mechanism receives its parents.

    Args:
        edges: Pairs ``(parent, child)`` and lagged edges from :func:`lag`.
        nodes: Nodes to declare first. Needed for a node without edges, and to fix the order of the columns.
        hidden: Nodes that the data never show.

    Raises:
        GraphError: The edges have a cycle, an edge is repeated or is no pair, a name is not a non-empty
            string, or ``hidden`` names a node that is not in the graph.

    >>> graph = Graph([("season", "load"), ("load", "price"), ("load", "outages")], hidden=["load"])
    >>> graph
    Graph(season -> load -> price, outages; hidden: load)
    >>> graph.parents("price"), graph.observed
    (('load',), ('season', 'price', 'outages'))
    """

    nodes: tuple[str, ...]
    edges: tuple[tuple[str, str], ...]
    lags: tuple[Lag, ...]
    hidden: tuple[str, ...]

    def __init__(
        self, edges: Iterable[Sequence[str] | Lag], *, nodes: Iterable[str] = (), hidden: Iterable[str] = ()
    ) -> None:
        pairs, lags = _read_edges(edges)
        declared = _read_names(nodes, "nodes")
        ends = [name for edge in pairs for name in (_ends(edge) if isinstance(edge, Lag) else edge)]
        every = tuple(dict.fromkeys([*declared, *ends]))
        if not every:
            raise GraphError("edges must name at least one node; got none, and no nodes either")
        if len(every) > MOST_NODES:
            raise GraphError(f"a graph must have at most {MOST_NODES} nodes; got {len(every)}")
        unseen = set(_read_names(hidden, "hidden"))
        for name in sorted(unseen - set(every)):
            raise GraphError(f"hidden names {name!r}, which is not a node; the nodes are {listed(every, most=10)}")
        object.__setattr__(self, "nodes", every)
        object.__setattr__(self, "edges", tuple(edge for edge in pairs if not isinstance(edge, Lag)))
        object.__setattr__(self, "lags", lags)
        object.__setattr__(self, "hidden", tuple(name for name in every if name in unseen))
        _ = self.order  # refuses a cycle

    def __contains__(self, node: object) -> bool:
        return node in self._parents

    def __len__(self) -> int:
        return len(self.nodes)

    def _repr_svg_(self) -> str:
        """The drawing, for notebooks; it lies far above graphs, so that it is looked up when one asks for it."""
        buffer = io.StringIO()
        import_module("otpdag.plots").draw_graph(self).savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()

    def __repr__(self) -> str:
        return self._text()

    def _text(self, edges: int = 16, hidden: int = 6) -> str:
        """So many edges at most, a graph with more is shown by their numbers; and so many hidden nodes by name."""
        if len(self.edges) + len(self.lags) > edges:
            parts = [f"{len(self.nodes)} nodes, {len(self.edges)} edges"]
            parts += [f"{len(self.lags)} lagged edges"] * self.is_dynamic
        else:
            parts = [*_chains(self), *map(str, self.lags)]
        if self.hidden:
            parts.append("hidden: " + listed(self.hidden, most=hidden, show=str))
        return f"Graph({'; '.join(parts)})"

    @cached_property
    def _parents(self) -> dict[str, tuple[str, ...]]:
        return _grouped(self.nodes, ((child, parent) for parent, child in self.edges))

    @cached_property
    def _children(self) -> dict[str, tuple[str, ...]]:
        return _grouped(self.nodes, self.edges)

    @cached_property
    def _lagged_parents(self) -> dict[str, tuple[tuple[str, int], ...]]:
        return _grouped(self.nodes, ((edge.child, (edge.parent, edge.by)) for edge in self.lags))

    @cached_property
    def _all_parents(self) -> dict[str, tuple[str, ...]]:
        """Parents over ordinary and lagged edges, each once."""
        lagged = ((edge.child, edge.parent) for edge in self.lags)
        return _grouped(self.nodes, [*((child, parent) for parent, child in self.edges), *lagged])

    @cached_property
    def _all_children(self) -> dict[str, tuple[str, ...]]:
        """Children over ordinary and lagged edges, each once."""
        return _grouped(self.nodes, [*self.edges, *((edge.parent, edge.child) for edge in self.lags)])

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Every node after its parents; otherwise in the order of :attr:`nodes`.

        >>> Graph([("b", "c"), ("a", "c")]).order
        ('b', 'a', 'c')
        """
        rank = {node: place for place, node in enumerate(self.nodes)}
        sorter = TopologicalSorter(self._parents)
        try:
            sorter.prepare()
        except CycleError as error:
            cycle = error.args[1][:-1]
            first = cycle.index(min(cycle, key=rank.__getitem__))
            shown = [*cycle[first:], *cycle[: first + 1]]
            raise GraphError(f"edges must have no cycle; found {' -> '.join(shown)}") from None
        ready: list[int] = []
        order: list[str] = []
        while sorter.is_active():
            for node in sorter.get_ready():
                heapq.heappush(ready, rank[node])
            order.append(self.nodes[heapq.heappop(ready)])
            sorter.done(order[-1])
        return tuple(order)

    @cached_property
    def observed(self) -> tuple[str, ...]:
        """The nodes that are not hidden, in the order of :attr:`nodes`."""
        return self._ordered({*self.nodes} - {*self.hidden})

    @cached_property
    def roots(self) -> tuple[str, ...]:
        """The nodes without a parent in their own time step."""
        return tuple(node for node in self.nodes if not self._parents[node])

    @cached_property
    def leaves(self) -> tuple[str, ...]:
        """The nodes without a child in their own time step."""
        return tuple(node for node in self.nodes if not self._children[node])

    @property
    def is_dynamic(self) -> bool:
        """Whether there is a lagged edge, so that rows are steps of sequences."""
        return bool(self.lags)

    def parents(self, node: str) -> tuple[str, ...]:
        """Parents of ``node`` in its own time step, in the order of :attr:`edges`."""
        return self._parents[self._known(node)]

    def children(self, node: str) -> tuple[str, ...]:
        """Children of ``node`` in its own time step, in the order of :attr:`edges`."""
        return self._children[self._known(node)]

    def lagged_parents(self, node: str) -> tuple[tuple[str, int], ...]:
        """Parents of ``node`` in earlier time steps: pairs of a name and how many steps ago.

        >>> Graph([lag("z", "z", by=2), ("z", "x")]).lagged_parents("z")
        (('z', 2),)
        """
        return self._lagged_parents[self._known(node)]

    def ancestors(self, node: str) -> tuple[str, ...]:
        """Every other node from which ``node`` can be reached; lagged edges count."""
        return self._ordered(reachable([self._known(node)], self._all_parents) - {node})

    def descendants(self, node: str) -> tuple[str, ...]:
        """Every other node that can be reached from ``node``; lagged edges count.

        >>> Graph([("a", "b"), ("b", "c"), ("d", "c")]).descendants("a")
        ('b', 'c')
        """
        return self._ordered(reachable([self._known(node)], self._all_children) - {node})

    def observed_descendants(self, node: str) -> tuple[str, ...]:
        """The descendants of ``node`` that are not hidden."""
        return tuple(name for name in self.descendants(node) if name not in self.hidden)

    def markov_blanket(self, node: str) -> tuple[str, ...]:
        """Parents, children and the children's other parents; given them, no other node tells about ``node``.

        Lagged edges count. In a sequence the node's own earlier and later values belong to its blanket as
        well; they are not listed.

        >>> Graph([("a", "c"), ("b", "c"), ("c", "d")]).markov_blanket("a")
        ('c', 'b')
        """
        children = self._all_children[self._known(node)]
        spouses = {parent for child in children for parent in self._all_parents[child]}
        return self._ordered({*self._all_parents[node], *children, *spouses} - {node})

    @classmethod
    def from_networkx(cls, graph: nx.DiGraph, hidden: Iterable[str] | None = None) -> Graph:
        """Read a :mod:`networkx` directed graph.

        Args:
            graph: A ``DiGraph`` or ``MultiDiGraph``. An edge attribute ``lag`` above zero makes it lagged.
            hidden: Hidden nodes; if left out, those whose node attribute ``hidden`` is true.

        Returns:
            The same graph.

        Raises:
            GraphError: ``graph`` is undirected, or breaks a rule of :class:`Graph`.

        >>> import networkx as nx
        >>> Graph.from_networkx(nx.DiGraph([("a", "b")]), hidden=["a"])
        Graph(a -> b; hidden: a)
        """
        if not graph.is_directed():
            raise GraphError(f"graph must be a directed networkx graph; got {type(graph).__name__}")
        if hidden is None:
            hidden = [node for node, is_hidden in graph.nodes(data="hidden", default=False) if is_hidden]
        lagged = graph.edges(data="lag", default=0)
        edges = [Lag(parent, child, by) if by else (parent, child) for parent, child, by in lagged]
        return cls(edges, nodes=graph.nodes, hidden=hidden)

    def to_networkx(self) -> nx.DiGraph:
        """Write a :mod:`networkx` graph with node attribute ``hidden`` and edge attribute ``lag``.

        Returns:
            A ``DiGraph``, or a ``MultiDiGraph`` if there are lagged edges.

        >>> Graph([("a", "b")], hidden=["a"]).to_networkx().nodes["a"]
        {'hidden': True}
        """
        import networkx as nx

        graph = nx.MultiDiGraph() if self.is_dynamic else nx.DiGraph()
        for node in self.nodes:
            graph.add_node(node, hidden=node in self.hidden)
        graph.add_edges_from((parent, child, {"lag": 0}) for parent, child in self.edges)
        graph.add_edges_from((edge.parent, edge.child, {"lag": edge.by}) for edge in self.lags)
        return graph

    def to_dict(self) -> dict[str, list[Any]]:
        """Write lists and strings only, for JSON.

        >>> graph = Graph([("a", "b"), lag("b", "b")], hidden=["a"])
        >>> Graph.from_dict(graph.to_dict()) == graph
        True
        """
        return {
            "nodes": list(self.nodes),
            "edges": [list(edge) for edge in self.edges],
            "lags": [[edge.parent, edge.child, edge.by] for edge in self.lags],
            "hidden": list(self.hidden),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Graph:
        """Read what :meth:`to_dict` wrote.

        Args:
            state: A mapping with ``nodes``, ``edges``, ``lags`` and ``hidden``.

        Returns:
            The graph.

        Raises:
            GraphError: A key is missing, or the content breaks a rule of :class:`Graph`.
        """
        for key in ("nodes", "edges", "lags", "hidden"):
            if key not in state:
                raise GraphError(f"state must have nodes, edges, lags and hidden; {key!r} is missing")
            if not isinstance(state[key], list | tuple):
                raise GraphError(f"{key} must be a list; got {state[key]!r:.60}")
        lags = [Lag(*_triple(entry)) for entry in state["lags"]]
        return cls([*state["edges"], *lags], nodes=state["nodes"], hidden=state["hidden"])

    def _known(self, node: str) -> str:
        if not isinstance(node, str) or node not in self._parents:
            raise GraphError(f"node {node!r:.100} is not in the graph; the nodes are {listed(self.nodes, most=10)}")
        return node

    def _ordered(self, names: set[str]) -> tuple[str, ...]:
        return tuple(node for node in self.nodes if node in names)


def _check_name(name: object, where: str) -> None:
    if not isinstance(name, str) or not name.strip():
        raise GraphError(f"{where}: a node name must be a non-empty string; got {name!r}")
    if name.startswith(RESERVED) or name.encode("utf-8", "replace") != name.encode("utf-8", "surrogatepass"):
        raise GraphError(
            f"{where}: a node name must be text that a file can hold, and not begin with {' or '.join(RESERVED)}; got "
            f"{name!r}"
        )


def _read_names(names: Iterable[str], argument: str) -> tuple[str, ...]:
    if isinstance(names, str):
        raise GraphError(f"{argument} must be a list of names; got the string {names!r}: write [{names!r}]")
    if not isinstance(names, Iterable):
        raise GraphError(f"{argument} must be a list of names; got {names!r:.100}")
    read = tuple(names)
    for name in read:
        _check_name(name, argument)
    for name in _repeated(read):
        raise GraphError(f"{argument} must name each node once; {name!r} is repeated")
    return read


def _read_edges(edges: Iterable[Sequence[str] | Lag]) -> tuple[list[tuple[str, str] | Lag], tuple[Lag, ...]]:
    """All edges as they were given, and the lagged ones among them."""
    if isinstance(edges, str) or not isinstance(edges, Iterable):
        got = "the string " if isinstance(edges, str) else ""
        raise GraphError(f"edges must be a list of pairs (parent, child); got {got}{edges!r:.100}")
    read = [edge if isinstance(edge, Lag) else _read_pair(edge) for edge in edges]
    for edge in _repeated(read):
        raise GraphError(f"edges must be distinct; {_shown(edge)} is repeated")
    return read, tuple(edge for edge in read if isinstance(edge, Lag))


def _read_pair(edge: object) -> tuple[str, str]:
    if isinstance(edge, (str, bytes, Mapping)) or not isinstance(edge, Sequence) or len(edge) != 2:
        raise GraphError(f"edges: an edge must be a pair (parent, child) or a lag; got {edge!r:.100}")
    parent, child = edge
    _check_name(parent, f"edge {edge!r}")
    _check_name(child, f"edge {edge!r}")
    if parent == child:
        raise GraphError(
            f"edges: node {parent!r} must not be its own parent; "
            f"for the value one step earlier write lag({parent!r}, {parent!r})"
        )
    return parent, child


def _triple(entry: object) -> tuple[str, str, int]:
    if isinstance(entry, str) or not isinstance(entry, Sequence) or len(entry) != 3:
        raise GraphError(f"lags: an entry must be [parent, child, by]; got {entry!r:.100}")
    return entry[0], entry[1], entry[2]


def _ends(edge: Lag) -> tuple[str, str]:
    return edge.parent, edge.child


def _shown(edge: tuple[str, str] | Lag) -> str:
    return str(edge) if isinstance(edge, Lag) else " -> ".join(edge)


def _repeated(items: Iterable[T]) -> Iterator[T]:
    seen: set[T] = set()
    for item in items:
        if item in seen:
            yield item
        seen.add(item)


def _grouped(nodes: Iterable[str], pairs: Iterable[tuple[str, T]]) -> dict[str, tuple[T, ...]]:
    """For each node what stands second in its pairs, each once, in order."""
    groups: dict[str, dict[T, None]] = {node: {} for node in nodes}
    for key, name in pairs:
        groups[key][name] = None
    return {node: tuple(names) for node, names in groups.items()}


def reachable(starts: Iterable[str], step: Mapping[str, Iterable[str]]) -> set[str]:
    """These nodes, and all to which steps lead from them."""
    reached = set(starts)
    stack = list(reached)
    while stack:
        fresh = set(step[stack.pop()]) - reached
        reached |= fresh
        stack.extend(fresh)
    return reached


def _chains(graph: Graph) -> list[str]:
    """The edges as chains ``a -> b -> c, d``, then the nodes that no edge names."""
    done: set[str] = set()
    chains = []
    for start in graph.order:
        chain, node = [start], start
        while node not in done and graph.children(node):
            done.add(node)
            chain.append(", ".join(graph.children(node)))
            if len(graph.children(node)) > 1:
                break
            node = graph.children(node)[0]
        if len(chain) > 1:
            chains.append(" -> ".join(chain))
    lagged = {name for edge in graph.lags for name in _ends(edge)}
    alone = [node for node in graph.roots if node in graph.leaves and node not in lagged]
    return chains + ([", ".join(alone)] if alone else [])
