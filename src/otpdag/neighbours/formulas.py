"""Models written as lavaan, semopy and other programs for structural equations write them."""

from __future__ import annotations

import re

from otpdag.errors import ModelError
from otpdag.graph import Graph
from otpdag.mechanisms import Normal
from otpdag.mechanisms.base import Mechanism
from otpdag.model import Model

__all__ = ["from_formulas"]

_NAME = re.compile(r"[A-Za-z_.][A-Za-z0-9_.]*")
_OPERATOR = re.compile(r"=~|~~|~")


def from_formulas(text: str) -> Model:
    """A linear normal model from formulas, one a line.

    ``factor =~ a + b + c`` says that the hidden ``factor`` is measured by ``a``, ``b`` and ``c``; ``y ~ x + factor``
    that ``y`` depends on ``x`` and ``factor``; what follows ``#`` is not read. Every node has an intercept and a scale
    of its own; the noise of a factor has scale one and mean zero, which fixes its units, so that all loadings are free.

    Args:
        text: The formulas.

    Raises:
        ModelError: A line is no formula, or says what a directed graph cannot: the message names the line.

    >>> print(
    ...     from_formulas('''
    ...     skill =~ maths + physics   # a hidden node
    ...     maths ~ hours
    ... ''')
    ... )
    Model with 4 nodes (not fitted)
      skill: Normal, hidden
      maths: Normal <- skill, hours
      physics: Normal <- skill
      hours: Normal
    """
    edges: list[tuple[str, str]] = []
    hidden: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        formula = line.split("#", 1)[0].strip()
        if formula:
            left, operator, right = _parts(formula, number)
            if operator == "=~":
                hidden.append(left)
                edges += [(left, name) for name in right]
            else:
                edges += [(name, left) for name in right]
    if not edges:
        raise ModelError("text must hold at least one formula, such as 'factor =~ a + b'")
    repeated = next((edge for edge in edges if edges.count(edge) > 1), None)
    if repeated is not None:
        raise ModelError(f"{repeated[1]!r} is said to depend on {repeated[0]!r} twice")
    graph = Graph(edges, hidden=list(dict.fromkeys(hidden)))
    return Model(graph, {node: _mechanism(graph, node) for node in graph.nodes})


def _mechanism(graph: Graph, node: str) -> Mechanism:
    return Normal(loc=0.0, scale=1.0) if node in graph.hidden else Normal()


def _parts(formula: str, number: int) -> tuple[str, str, list[str]]:
    """The left side, the operator, and the names on the right."""
    where = f"line {number}: {formula!r}"
    operators = _OPERATOR.findall(formula)
    if len(operators) != 1:
        raise ModelError(f"{where} must have one of =~ and ~, with names on both sides")
    if operators[0] == "~~":
        raise ModelError(
            f"{where}: a covariance is no arrow of a directed graph; let a hidden node be the parent of both instead, "
            "for instance 'common =~ a + b'"
        )
    left, right = (side.strip() for side in formula.split(operators[0]))
    names = [part.strip() for part in right.split("+")]
    for name in (left, *names):
        if "*" in name:
            raise ModelError(f"{where}: fixed and named coefficients ({name!r}) are set by mechanisms, not in formulas")
        if not _NAME.fullmatch(name):
            raise ModelError(f"{where}: {name!r} is no name of a column")
    return left, operators[0], names
