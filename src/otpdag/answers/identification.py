r"""Whether an effect follows from what is observed: said by the graph alone, before any data or mechanism.

Hidden nodes leave two marks on the observed ones, the latent projection (Verma, 1993): a directed edge where only
hidden nodes lie between, and a two-headed edge where two nodes have an unseen common cause. On that graph the
identification algorithm of Tian and Pearl (2002), shown complete by Huang and Valtorta (2006) and by Shpitser and
Pearl (2006), decides whether :math:`P(y \mid do(t))` is a function of the observed distribution.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from otpdag.errors import GraphError
from otpdag.graph import Graph, reachable

if TYPE_CHECKING:
    import networkx as nx

Nodes = frozenset[str]


@dataclass(frozen=True)
class Identification:
    """Whether and how an effect follows from what is observed; ``str`` says it in words.

    Attributes:
        treatment: The node that is set.
        outcome: The node that is looked at.
        identified: Whether the observed distribution determines the effect, whatever the mechanisms are.
        told: Whether parameters that the effect depends on are determined by the data; None if nobody looked.
        by: ``"no effect"``, ``"back-door"``, ``"front-door"``, ``"do-calculus"``, or nothing.
        nodes: What is adjusted for (back-door), or what lies between (front-door).
        confounders: Hidden common causes that stand in the way, or which of the two is hidden.
    """

    treatment: str
    outcome: str
    identified: bool
    by: str = ""
    nodes: tuple[str, ...] = ()
    confounders: tuple[str, ...] = ()
    told: bool | None = None

    def __bool__(self) -> bool:
        return self.identified

    @property
    def verdict(self) -> str:
        """``"identified by the graph"``, ``"identified by the form of the mechanisms"`` or ``"not identified"``.

        Of a fit; the form is known to identify an effect where the likelihood falls whichever way it is moved.
        """
        if self.told is False or not (self.identified or self.told):
            return "not identified"
        return f"identified by the {'graph' if self.identified else 'form of the mechanisms'}"

    def __str__(self) -> str:
        what = f"the effect of {self.treatment} on {self.outcome}"
        if self.told is False and self.identified:
            return f"not identified by these data, though by the graph: parameters that they do not tell move {what}"
        if self.by == "no effect":
            return f"identified: {self.outcome} does not descend from {self.treatment}, so that there is no effect"
        if self.by == "back-door":
            if not self.nodes:
                return f"identified: nothing confounds {what}; it can be read off the observed distribution"
            return f"identified: {what} follows by adjusting for {_listed(self.nodes)} (back-door)"
        if self.by == "front-door":
            return f"identified: {what} follows through {_listed(self.nodes)} (front-door)"
        if self.identified:
            return f"identified: {what} follows from the observed distribution by the rules of the do-calculus"
        itself = {self.treatment, self.outcome} & set(self.confounders)
        why = f"{_listed(self.confounders)} {'is' if len(self.confounders) == 1 else 'are'} "
        why += "never seen" if itself else "an unseen common cause"
        why = why.replace("are an unseen common cause", "are unseen common causes")
        if self.told is not None:
            form = "identified only by the form of the mechanisms (their families, and what they take for linear)"
            other = f"not identified: other values of {what} fit the data as well"
            return f"{form if self.told else other}; {why}"
        return (
            f"not identified by the graph alone: {why}; the model's answer rests on what its mechanisms assume "
            "(families, proxies of what is hidden), and on no comparison of observed rows"
        )

    __repr__ = __str__


def identify(graph: Graph, treatment: str, outcome: str) -> Identification:
    """Decide whether :math:`P(outcome | do(treatment))` is identified from the observed nodes of a graph.

    >>> confounded = Graph([("u", "t"), ("u", "y"), ("t", "m"), ("m", "y")], hidden=["u"])
    >>> print(identify(confounded, "t", "y"))
    identified: the effect of t on y follows through m (front-door)
    >>> bool(identify(Graph([("u", "t"), ("u", "y"), ("t", "y")], hidden=["u"]), "t", "y"))
    False
    """
    for node in (treatment, outcome):
        graph.parents(node)  # refuses what is no node
    if graph.is_dynamic:
        raise GraphError("identification is for graphs without lagged edges")
    if outcome not in graph.descendants(treatment):
        return Identification(treatment, outcome, True, "no effect")
    if treatment in graph.hidden or outcome in graph.hidden:
        unseen = tuple(node for node in (treatment, outcome) if node in graph.hidden)
        return Identification(treatment, outcome, False, confounders=unseen)
    full = graph.to_networkx()
    adjusted = _back_door(graph, full, treatment, outcome)
    if adjusted is not None:
        return Identification(treatment, outcome, True, "back-door", adjusted)
    between = _front_door(graph, full, treatment, outcome)
    if between is not None:
        return Identification(treatment, outcome, True, "front-door", between)
    mixed = MixedGraph.projected(graph)
    if mixed.identifies([treatment], [outcome]):
        return Identification(treatment, outcome, True, "do-calculus")
    return Identification(treatment, outcome, False, confounders=_confounders(graph, treatment, outcome))


def identify_all(graph: Graph, treatments: Sequence[str], outcome: str, given: Sequence[str] = ()) -> Identification:
    """The same of several nodes that are set at once, or of an outcome given what other nodes show.

    An outcome counts as identified where it is together with what is given.

    >>> graph = Graph([("u", "t"), ("u", "y"), ("t", "y"), ("u", "w")], hidden=["u"])
    >>> bool(identify_all(graph, ["t", "w"], "y")), bool(identify_all(graph, ["t"], "y", ["w"]))
    (False, False)
    """
    if len(treatments) == 1 and not given:
        return identify(graph, treatments[0], outcome)
    asked, names = (outcome, *given), _listed(treatments)
    if not {node for one in treatments for node in graph.descendants(one)} & set(asked):
        return Identification(names, outcome, True, "no effect")
    unseen = tuple(node for node in (*treatments, *asked) if node in graph.hidden)
    if not unseen and MixedGraph.projected(graph).identifies(treatments, asked):
        return Identification(names, outcome, True, "do-calculus")
    return Identification(names, outcome, False, confounders=unseen or _confounders(graph, treatments[0], outcome))


def identify_path(graph: Graph, whole: Identification) -> Identification:
    """Of a whole effect the part along the edge alone, or along all other paths (Shpitser, 2013).

    None is identified where the outcome and a node through which the others begin have an unseen common cause.

    >>> graph = Graph([("t", "m"), ("t", "y"), ("m", "y"), ("u", "m"), ("u", "y")], hidden=["u"])
    >>> bool(identify_path(graph, identify(graph, "t", "y")))
    False
    """
    treatment, outcome = whole.treatment, whole.outcome
    if not whole or treatment not in graph.parents(outcome) or whole.by == "no effect":
        return whole
    mixed = MixedGraph.projected(graph)
    needed = mixed.ancestors([outcome], frozenset(mixed.parents) - {treatment})
    joined = next(group for group in mixed.components(needed) if outcome in group)
    edges = [edge for edge in graph.edges if edge != (treatment, outcome)]
    others = MixedGraph.projected(Graph(edges, nodes=graph.nodes, hidden=graph.hidden)).parents
    if not any(treatment in others[node] for node in joined):
        return whole
    return Identification(treatment, outcome, False, confounders=_confounders(graph, treatment, outcome))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _sets(candidates: Collection[str], most: int = 4) -> Iterator[tuple[str, ...]]:
    """Sets of so many nodes at most, small ones first; then all candidates."""
    for size in range(min(len(candidates), most) + 1):
        yield from combinations(candidates, size)
    if len(candidates) > most:
        yield tuple(candidates)


def _without_effects(full: nx.DiGraph, nodes: Iterable[str]) -> nx.DiGraph:
    """The graph without edges out of some nodes."""
    cut = full.copy()
    cut.remove_edges_from(list(full.out_edges(nodes)))
    return cut


def _back_door(graph: Graph, full: nx.DiGraph, treatment: str, outcome: str) -> tuple[str, ...] | None:
    """A smallest set of observed nodes that blocks every path into the treatment; None if there is none."""
    import networkx as nx

    without = _without_effects(full, [treatment])
    below = {treatment, *graph.descendants(treatment)}
    useful = set(graph.ancestors(treatment)) | set(graph.ancestors(outcome))
    candidates = [node for node in graph.observed if node not in below and node != outcome and node in useful]
    # if any set of these works, all of them together do (van der Zander, Liskiewicz and Textor, 2014)
    if not nx.is_d_separator(without, {treatment}, {outcome}, set(candidates)):
        return None
    return next(s for s in _sets(candidates) if nx.is_d_separator(without, {treatment}, {outcome}, set(s)))


def _front_door(graph: Graph, full: nx.DiGraph, treatment: str, outcome: str) -> tuple[str, ...] | None:
    """A set that all effect passes through, itself unconfounded with the treatment, and with the outcome given it."""
    import networkx as nx

    between = set(graph.descendants(treatment)) & set(graph.ancestors(outcome)) & set(graph.observed)
    for chosen in _sets([node for node in graph.nodes if node in between]):
        if not chosen:
            continue
        rest = full.copy()
        rest.remove_nodes_from(chosen)
        if nx.has_path(rest, treatment, outcome):
            continue
        before = nx.is_d_separator(_without_effects(full, [treatment]), {treatment}, set(chosen), set())
        if before and nx.is_d_separator(_without_effects(full, chosen), set(chosen), {outcome}, {treatment}):
            return chosen
    return None


def _confounders(graph: Graph, treatment: str, outcome: str) -> tuple[str, ...]:
    """Hidden nodes from which both the treatment and the outcome descend, by paths of their own."""
    import networkx as nx

    apart = graph.to_networkx()
    apart.remove_node(treatment)
    hidden = [n for n in graph.hidden if treatment in graph.descendants(n)]
    direct = tuple(n for n in hidden if outcome in nx.descendants(apart, n))
    return direct or tuple(hidden) or graph.hidden


@dataclass(frozen=True)
class MixedGraph:
    """Observed nodes with directed edges, and two-headed ones where an unseen cause is shared."""

    parents: dict[str, Nodes]
    siblings: dict[str, Nodes]

    @classmethod
    def projected(cls, graph: Graph) -> MixedGraph:
        """The latent projection."""
        onward = {node: graph.children(node) if node in graph.hidden else () for node in graph.nodes}
        # observed nodes below, with only hidden ones between
        below = {node: frozenset(reachable(graph.children(node), onward) - set(graph.hidden)) for node in graph.nodes}
        parents = {node: frozenset(n for n in graph.observed if node in below[n]) for node in graph.observed}
        shared = {node: [below[cause] for cause in graph.hidden if node in below[cause]] for node in graph.observed}
        return cls(parents, {node: frozenset().union(*own) - {node} for node, own in shared.items()})

    def ancestors(self, nodes: Collection[str], within: Nodes) -> Nodes:
        """These nodes and all above them, in the graph of some nodes."""
        return frozenset(reachable(nodes, {node: own & within for node, own in self.parents.items()}))

    def components(self, within: Nodes) -> list[Nodes]:
        """Groups of nodes that two-headed edges join."""
        joined = {node: own & within for node, own in self.siblings.items()}
        return list({frozenset(reachable([node], joined)): None for node in self.parents if node in within})

    def identifies(self, treatments: Collection[str], outcomes: Collection[str]) -> bool:
        """Whether every factor of the intervened distribution follows from one of the observed distribution."""
        every = frozenset(self.parents)
        needed = self.ancestors(outcomes, every - set(treatments))
        whole = self.components(every)
        for part in self.components(needed):
            around = next(group for group in whole if part <= group)
            if not self._follows(part, around):
                return False
        return True

    def _follows(self, part: Nodes, around: Nodes) -> bool:
        """Whether Q[part] is a function of Q[around], both of them joined by two-headed edges."""
        above = self.ancestors(part, around)
        if above == part:
            return True
        if above == around:
            return False
        return self._follows(part, next(group for group in self.components(above) if part <= group))
