r"""Structural equations as lavaan and semopy write them: models from formulas, and their fits in the same terms.

Errors that are correlated are written with arrows alone. The noise of node :math:`i` becomes
:math:`e_i = l_{ii} h_i + \sum_{j \to i} l_{ij} h_j` with independent :math:`h`: each pair of correlated errors is an
arrow from the one that gives its noise to the one that takes part in it. Two nodes that take part in the noise of the
same third are correlated by it, so that they must be a pair themselves. Then there are as many numbers as variances and
covariances.

With the coefficients :math:`B` of the formulas and the implied covariance :math:`\Sigma` of their nodes, errors have
the covariance :math:`\Psi = (I - B) \Sigma (I - B)^\top`, however the model expresses it; standard errors follow by
the delta method.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd
import torch
from scipy.stats import norm
from torch import Tensor

from otpdag.answers.notes import point_of
from otpdag.answers.standard_errors import Errors, delta_errors, information_at
from otpdag.data.columns import as_frame
from otpdag.engine.result import FitResult
from otpdag.errors import DataError, ModelError, listed
from otpdag.graph import Graph
from otpdag.mechanisms import Normal
from otpdag.mechanisms.parameters import start
from otpdag.model import Model
from otpdag.problem import Problem
from otpdag.structure import Naturals


def givers_and_takers(
    pairs: Collection[tuple[str, str]], willing: Collection[str] = ()
) -> tuple[list[tuple[str, str]], bool]:
    """Turn pairs of correlated errors into arrows, from the node that gives its noise to the one that takes part in it.

    Args:
        pairs: Nodes whose errors are correlated.
        willing: Nodes that should rather give than take.

    Returns:
        The arrows, and whether they run in a circle.

    Raises:
        ModelError: There is no such set of arrows.

    >>> givers_and_takers([("a", "b"), ("b", "c")])
    ([('a', 'b'), ('b', 'c')], False)
    """
    left = nx.Graph()
    left.add_edges_from(pairs)
    arrows: list[tuple[str, str]] = []

    def can_give(node: str) -> bool:
        return all(left.has_edge(one, other) for one, other in combinations(left.neighbors(node), 2))

    while giver := next(filter(can_give, sorted(left.nodes, key=lambda node: node not in willing)), None):
        arrows += [(giver, taker) for taker in left.neighbors(giver)]
        left.remove_node(giver)
    for circle in list(nx.connected_components(left)):
        part = left.subgraph(circle)
        if any(degree != 2 for _, degree in part.degree):
            raise ModelError(
                f"the correlated errors of {listed(sorted(circle))} run in several circles, which no set of hidden "
                "causes of two nodes each can express: leave a pair out, or add one that closes a triangle"
            )
        arrows += nx.find_cycle(part)
    return arrows, bool(left.nodes)


_NAME = re.compile(r"[A-Za-z_.][A-Za-z0-9_.]*")
_OPERATOR = re.compile(r"=~|~~|~")


@dataclass
class Formulas:
    """What formulas say: arrows, factors, coefficients and variances that are given, and correlated errors."""

    edges: list[tuple[str, str]] = field(default_factory=list)
    factors: list[str] = field(default_factory=list)
    coefficients: dict[tuple[str, str], float] = field(default_factory=dict)
    variances: dict[str, float] = field(default_factory=dict)
    pairs: list[tuple[str, str]] = field(default_factory=list)

    @property
    def nodes(self) -> list[str]:
        """Factors and columns, in the order in which they are named."""
        return list(dict.fromkeys([*(node for edge in self.edges for node in edge), *sum(self.pairs, ())]))

    def parents(self, node: str) -> list[str]:
        """What a node is said to depend on."""
        return [parent for parent, child in self.edges if child == node]


def from_formulas(text: str, data: Any = None) -> Model:
    """A linear normal model from formulas, one a line.

    - ``factor =~ a + b + c``: the hidden ``factor`` is measured by ``a``, ``b`` and ``c``;
    - ``y ~ x + factor``: ``y`` depends on ``x`` and ``factor``;
    - ``a ~~ b``: what else moves ``a`` and ``b`` is correlated;
    - ``0.5*x`` gives a coefficient, ``a ~~ 0.3*a`` the variance of an error; what follows ``#`` is not read.

    Every node has an intercept and a scale of its own. The noise of a factor has scale one and mean zero, which fixes
    its units, so that all its loadings are free; a factor with a loading that is given (``factor =~ 1*a + b``) has a
    scale to be learned instead. A pair of correlated errors adds a hidden node, ``noise_a``, that is the noise of ``a``
    and reaches ``b`` as well. :func:`formula_estimates` shows a fit in the terms of the formulas.

    Args:
        text: The formulas.
        data: The table that the model is for; needed where errors are correlated, for what is left of the scale of
            ``a`` is a thousandth of its column's spread.

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
    formulas = read_formulas(text)
    arrows, in_circles = givers_and_takers(formulas.pairs, [n for n in formulas.nodes if not formulas.parents(n)])
    noises: dict[str, str] = {}
    for giver, taker in arrows:
        itself = not in_circles and _stands_for_its_noise(giver, taker, formulas, arrows)
        if not itself and giver in formulas.factors:
            raise ModelError(
                f"{giver!r} ~~ {taker!r}: the noise of the factor {giver!r} cannot be told from its scale; let an "
                "arrow lead from one to the other, or a further factor to both"
            )
        noises[giver] = giver if itself and noises.get(giver, giver) == giver else f"noise_{giver}"
    own = {giver: noise for giver, noise in noises.items() if noise != giver}
    for noise in own.values():
        if noise in formulas.nodes:
            raise ModelError(f"{noise!r} is the name of a correlated error; call the column otherwise")
    edges = [*formulas.edges, *((noise, giver) for giver, noise in own.items())]
    edges += [(noises[giver], taker) for giver, taker in arrows]
    graph = Graph(edges, nodes=formulas.nodes, hidden=[*formulas.factors, *own.values()])
    left_over = _left_over(own, data)
    return Model(graph, {node: _mechanism(graph, node, formulas, left_over) for node in graph.nodes})


def _stands_for_its_noise(giver: str, taker: str, formulas: Formulas, arrows: list[tuple[str, str]]) -> bool:
    """Whether a node is its own noise as far as another is concerned: nothing else comes to the other through it."""
    takes = [other for other, node in arrows if node == giver]
    return not formulas.parents(giver) and all((other, taker) in arrows for other in takes)


def _left_over(own: Mapping[str, str], data: Any, share: float = 1e-3) -> dict[str, float]:
    """Scales of nodes whose noise is a node of its own: a share of their spread, a millionth of their variance."""
    if not own:
        return {}
    if data is None:
        raise ModelError(f"correlated errors (of {', '.join(own)}) need data=, the table that the model is for")
    table = as_frame(data)
    for node in own:
        if node not in table:
            raise DataError(f"{node!r} must be a column of the table; it has {', '.join(map(str, table.columns))}")
    spread = {node: float(np.nanstd(table[node].to_numpy(dtype=float, na_value=np.nan))) for node in own}
    for node, value in spread.items():
        if not value > 0:
            raise DataError(f"column {node!r} must vary to have an error that is correlated; its spread is {value}")
    return {node: share * value for node, value in spread.items()}


def _mechanism(graph: Graph, node: str, formulas: Formulas, left_over: Mapping[str, float]) -> Normal:
    parents = graph.parents(node)
    given = {
        parent: formulas.coefficients[parent, node] for parent in parents if (parent, node) in formulas.coefficients
    }
    weight = [given.get(parent, math.nan) for parent in parents] if given else None
    if node in formulas.variances and node in left_over:
        raise ModelError(f"the variance of {node!r} is given, and its error correlated: leave one of them out")
    scale: Any = math.sqrt(formulas.variances[node]) if node in formulas.variances else left_over.get(node)
    if node not in graph.hidden:
        return Normal(weight=weight, scale=scale)
    if scale is None:
        has_units = any(formulas.coefficients.get((node, child)) for child in graph.children(node))
        scale = start(1.0) if has_units else 1.0
    return Normal(loc=0.0, weight=weight, scale=scale)


# -- reading -----------------------------------------------------------------------------------------------------------


def read_formulas(text: str) -> Formulas:
    """What the lines of a text say."""
    if not isinstance(text, str):
        raise ModelError(f"text must hold formulas; got {type(text).__name__}")
    formulas = Formulas()
    for number, line in enumerate(text.splitlines(), start=1):
        formula = line.split("#", 1)[0].strip()
        if not formula:
            continue
        left, operator, right = _parts(formula, number)
        for name, value in right:
            if operator == "~~":
                _read_covariance(formulas, left, name, value, f"line {number}: {formula!r}")
                continue
            edge = (left, name) if operator == "=~" else (name, left)
            if edge in formulas.edges:
                raise ModelError(f"{edge[1]!r} is said to depend on {edge[0]!r} twice")
            formulas.edges.append(edge)
            if value is not None:
                formulas.coefficients[edge] = value
        if operator == "=~" and left not in formulas.factors:
            formulas.factors.append(left)
    if not formulas.nodes:
        raise ModelError("text must hold at least one formula, such as 'factor =~ a + b'")
    unknown = [node for node in formulas.variances if node not in formulas.nodes]
    if unknown:
        raise ModelError(f"the variance of {unknown[0]!r} is given, but no formula says what it has to do with others")
    return formulas


def _read_covariance(formulas: Formulas, left: str, right: str, value: float | None, where: str) -> None:
    if left == right:
        if value is not None and not value > 0:
            raise ModelError(f"{where}: the variance of {left!r} must be above zero; got {value}")
        if value is not None:
            formulas.variances[left] = value
        return  # a variance that is not given is free without being named
    if value:
        raise ModelError(f"{where}: a covariance can be free or zero; it cannot be fixed at {value}")
    if value is None and not {(left, right), (right, left)} & set(formulas.pairs):
        formulas.pairs.append((left, right))


def _parts(formula: str, number: int) -> tuple[str, str, list[tuple[str, float | None]]]:
    """The left side, the operator, and the names on the right with the coefficients that are given."""
    where = f"line {number}: {formula!r}"
    operators = _OPERATOR.findall(formula)
    if len(operators) != 1:
        raise ModelError(f"{where} must have one of =~, ~ and ~~, with names on both sides")
    left, right = (side.strip() for side in formula.split(operators[0]))
    terms = [_term(part.strip(), where) for part in right.split("+")]
    for name in (left, *(name for name, _ in terms)):
        if not _NAME.fullmatch(name):
            raise ModelError(f"{where}: {name!r} is no name of a column")
    return left, operators[0], terms


def _term(text: str, where: str) -> tuple[str, float | None]:
    """A name, perhaps after a number: ``0.5*x``; ``NA*x`` says that there is none."""
    given, times, name = (part.strip() for part in text.rpartition("*"))
    if not times or given == "NA":
        return name, None
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ModelError(
            f"{where}: {given!r} before * must be a number; for coefficients that are equal use otp.tie in mechanisms"
        )
    return name, value


def formula_estimates(
    result: FitResult, text: str, *, level: float = 0.95, errors: Errors = "information"
) -> pd.DataFrame:
    """Coefficients, variances and covariances of errors, as lavaan and semopy list them.

    Args:
        result: A fit of the model that :func:`from_formulas` made of the text.
        text: The formulas.
        level: Nominal coverage of the intervals.
        errors: ``"information"`` or ``"sandwich"``.

    Returns:
        Columns ``left``, ``operator``, ``right``, ``estimate``, ``std_error``, ``lower`` and ``upper``; what is given
        in the formulas or by the units of a factor has no standard error.

    Raises:
        ModelError: The model is not that of the text.
    """
    formulas = read_formulas(text)
    absent = [node for node in formulas.nodes if node not in result.model.graph]
    if absent:
        raise ModelError(f"the model has no node {absent[0]!r}, which the formulas name")
    if result.problem is None or errors == "bootstrap":
        raise ModelError("the table of formulas needs a fit by likelihood, and errors by 'information' or 'sandwich'")
    problem = result.problem
    point = point_of(result.model.fitted, problem.shapes)
    information = information_at(problem, point, errors)

    def listed(flat: Tensor) -> Tensor:
        return _numbers(formulas, problem, problem.naturals(flat.unsqueeze(0)))

    slopes = torch.autograd.functional.jacobian(listed, point[0]).detach()
    error = delta_errors(slopes, information.covariance).numpy()
    free = slopes.abs().amax(-1).numpy() > 1e-9  # what is given moves by rounding only
    table = pd.DataFrame(_lines(formulas), columns=["left", "operator", "right"])
    table["estimate"] = listed(point[0]).detach().numpy()
    table["std_error"] = np.where(free & ~information.untold(slopes), error, np.nan)
    reach = float(norm.ppf((1 + level) / 2))
    table["lower"] = table["estimate"] - reach * table["std_error"]
    table["upper"] = table["estimate"] + reach * table["std_error"]
    return table


def _lines(formulas: Formulas) -> list[tuple[str, str, str]]:
    """What each number is called: loadings, slopes, covariances, variances."""
    loadings = [(parent, "=~", child) for parent, child in formulas.edges if _is_loading(formulas, parent, child)]
    slopes = [(child, "~", parent) for parent, child in formulas.edges if not _is_loading(formulas, parent, child)]
    pairs = [(one, "~~", other) for one, other in formulas.pairs]
    return [*loadings, *slopes, *pairs, *((node, "~~", node) for node in formulas.nodes)]


def _is_loading(formulas: Formulas, parent: str, child: str) -> bool:
    return parent in formulas.factors and child not in formulas.factors


def _numbers(formulas: Formulas, problem: Problem, naturals: Naturals) -> Tensor:
    """The numbers of :func:`_lines`, of the first replica."""
    graph = problem.structure.graph
    place = {node: number for number, node in enumerate(graph.nodes)}
    own = torch.stack([naturals[node]["scale"][0, 0, 0] for node in graph.nodes])
    at = [(place[node], place[parent]) for node in graph.nodes for parent in graph.parents(node)]
    weights = torch.cat([naturals[node]["weight"][0, :, 0] for node in graph.nodes if graph.parents(node)])
    arrows = own.new_zeros(len(place), len(place)).index_put(tuple(torch.tensor(at).T), weights)
    named = [[(parent, node) in formulas.edges for parent in graph.nodes] for node in graph.nodes]
    said, identity = arrows * torch.tensor(named), torch.eye(len(place)).to(own)
    errors = (identity - said) @ (torch.linalg.inv(identity - arrows) * own)
    noise = errors @ errors.mT
    return torch.stack(
        [
            noise[place[left], place[right]] if operator == "~~" else said[place[child], place[parent]]
            for left, operator, right in _lines(formulas)
            for parent, child in [(left, right) if operator == "=~" else (right, left)]
        ]
    )
