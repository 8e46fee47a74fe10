"""What an effect is in terms of what is observed, by y0's identification algorithm."""

from __future__ import annotations

from typing import Any

from otpdag.answers.identification import Identification, MixedGraph, identify
from otpdag.errors import GraphError, ModelError
from otpdag.graph import Graph
from otpdag.model import Model


def estimand(model: Model | Graph, treatment: str, outcome: str, *, latex: bool = False) -> str | None:
    r"""The formula for :math:`P(outcome \mid do(treatment))` in distributions of observed nodes; None if there is none.

    :meth:`otpdag.Model.identified` says in words whether there is one. Where it is no plain adjustment for other nodes,
    the formula comes from y0, by the algorithm of Shpitser and Pearl (2006): ``pip install "otpdag[causal]"``.

    Args:
        model: A model or its graph.
        treatment: The node that is set.
        outcome: The node that is looked at.
        latex: Whether the formula is written in LaTeX.

    >>> estimand(Graph([("z", "t"), ("z", "y"), ("t", "y")]), "t", "y")
    'Sum[z](P(y | t, z) * P(z))'
    """
    graph = model.graph if isinstance(model, Model) else model
    for node in (treatment, outcome):
        if node not in graph.observed:
            raise GraphError(f"{node!r} must be an observed node of the graph; these are {', '.join(graph.observed)}")
    verdict = identify(graph, treatment, outcome)
    if verdict.by in ("no effect", "back-door"):
        return _adjusted(verdict, latex)
    mixed = to_y0(graph)
    from y0.algorithm.identify import identify_outcomes
    from y0.dsl import Variable

    formula = identify_outcomes(mixed, treatments=Variable(treatment), outcomes=Variable(outcome))
    if formula is None:
        return None
    return str(formula.to_latex() if latex else formula)


def _adjusted(verdict: Identification, latex: bool) -> str:
    """The formula of a plain adjustment."""
    if verdict.by == "no effect":
        return f"P({verdict.outcome})"
    if not verdict.nodes:
        return f"P({verdict.outcome} | {verdict.treatment})"
    given = ", ".join(verdict.nodes)
    inside = f"P({verdict.outcome} | {verdict.treatment}, {given})"
    return f"\\sum_{{{given}}} {inside} P({given})" if latex else f"Sum[{given}]({inside} * P({given}))"


def to_y0(graph: Graph) -> Any:
    """A y0 ``NxMixedGraph``: observed nodes, with two-headed edges where hidden ones are shared causes."""
    if graph.is_dynamic:
        raise GraphError("identification is for graphs without lagged edges")
    try:
        from y0.dsl import Variable
        from y0.graph import NxMixedGraph
    except ImportError:
        raise ModelError('the formula of an effect needs y0: pip install "otpdag[causal]"') from None
    mixed = MixedGraph.projected(graph)
    variables = {node: Variable(node) for node in graph.observed}
    directed = [(variables[parent], variables[node]) for node, own in mixed.parents.items() for parent in own]
    shared = {frozenset((node, other)) for node, own in mixed.siblings.items() for other in own}
    two_headed = [tuple(variables[node] for node in sorted(pair)) for pair in shared]
    return NxMixedGraph.from_edges(nodes=list(variables.values()), directed=directed, undirected=two_headed)
