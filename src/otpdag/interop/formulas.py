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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any, Literal

import networkx as nx
import numpy as np
import pandas as pd
import torch
from scipy.stats import norm
from torch import Tensor

from otpdag.answers.notes import point_of
from otpdag.answers.standard_errors import Errors, Information, delta_errors, information_at
from otpdag.data.columns import as_frame
from otpdag.engine.result import FitResult
from otpdag.errors import DataError, ModelError, listed
from otpdag.graph import Graph
from otpdag.likelihood.linear_normal import MomentProblem
from otpdag.mechanisms import Normal
from otpdag.mechanisms.parameters import Tied, start, tie
from otpdag.mechanisms.terms import FUNCTIONS, evaluated, is_computable, names_in, parsed
from otpdag.model import Model
from otpdag.numerics import at_work
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
    ([('a', 'b'), ('c', 'b')], False)
    """
    left = nx.Graph()
    left.add_edges_from(pairs)
    arrows: list[tuple[str, str]] = []

    def can_give(node: str) -> bool:
        return all(left.has_edge(one, other) for one, other in combinations(left.neighbors(node), 2))

    def order(node: str) -> tuple[bool, bool]:
        """Those first that take part in no other's noise: they may stand for their own."""
        return any(taker == node for _, taker in arrows), node not in willing

    while giver := next(filter(can_give, sorted(left.nodes, key=order)), None):
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
_BY_GROUP = re.compile(r"c\(([^()]*)\)\s*\*\s*(.*)")
_OPERATOR = re.compile(r"=~|~~|:=|~")
Line = tuple[str, str, str]  # left side, operator and right side of a number: `("f", "=~", "a")`, `("a", "~1", "")`


@dataclass
class Formulas:
    """What formulas say: arrows, factors, coefficients and variances that are given, and correlated errors.

    ``loadings`` are arrows from factors to what measures them, ``freed`` coefficients that are said to be free,
    ``apart`` pairs whose covariance is zero, ``intercepts`` those that are named (None: free), ``labels`` names of
    numbers, and ``definitions`` what is computed of these.
    """

    edges: list[tuple[str, str]] = field(default_factory=list)
    factors: list[str] = field(default_factory=list)
    coefficients: dict[tuple[str, str], float] = field(default_factory=dict)
    variances: dict[str, float] = field(default_factory=dict)
    pairs: list[tuple[str, str]] = field(default_factory=list)
    loadings: set[tuple[str, str]] = field(default_factory=set)
    freed: set[tuple[str, str]] = field(default_factory=set)
    apart: set[frozenset[str]] = field(default_factory=set)
    intercepts: dict[str, float | None] = field(default_factory=dict)
    labels: dict[Line, str] = field(default_factory=dict)
    definitions: dict[str, str] = field(default_factory=dict)

    @property
    def nodes(self) -> list[str]:
        """Factors and columns, in the order in which they are named."""
        return list(dict.fromkeys([*(node for edge in self.edges for node in edge), *sum(self.pairs, ())]))

    def parents(self, node: str) -> list[str]:
        """What a node is said to depend on."""
        return [parent for parent, child in self.edges if child == node]

    def line_of(self, edge: tuple[str, str]) -> Line:
        """A loading, or a slope."""
        parent, child = edge
        return (parent, "=~", child) if edge in self.loadings else (child, "~", parent)

    def shared(self, line: Line) -> str | None:
        """The label of a number that others have as well."""
        label = self.labels.get(line)
        return label if label is not None and list(self.labels.values()).count(label) > 1 else None

    def completed(self, std_lv: bool) -> Formulas:
        """With what lavaan adds: covariances of what nothing explains and of pure outcomes, and units of factors."""
        groups = [[n for n in self.nodes if not self.parents(n) and (n in self.factors) == hidden] for hidden in (0, 1)]
        measured = {child for _, child in self.loadings}
        groups.append([n for n in self.nodes if self.parents(n) and n not in {*measured, *(p for p, _ in self.edges)}])
        known = self.apart | {frozenset(pair) for pair in self.pairs}
        pairs = (pair for group in groups for pair in combinations(group, 2) if len({*map(_suffix, pair)}) == 1)
        more = [pair for pair in pairs if frozenset(pair) not in known]
        given = dict(self.coefficients)
        for factor in [] if std_lv else self.factors:
            first = next(edge for edge in self.edges if edge[0] == factor and edge in self.loadings)
            if first not in self.freed:
                given.setdefault(first, 1.0)
        for edge in self.edges:  # what is equal to a given number is given
            equal = [
                other for other in given if self.shared(self.line_of(edge)) == self.labels.get(self.line_of(other), "")
            ]
            given |= {edge: given[equal[0]]} if equal else {}
        return replace(self, pairs=[*self.pairs, *more], coefficients=given)


def by_group(data: Any, group: str) -> pd.DataFrame:
    """The table that a model of several groups is fitted to: columns ``x[a]``, ``x[b]``, each empty in others' rows.

    >>> by_group({"x": [1.0, 2.0], "school": ["b", "a"]}, "school")
       x[a]  x[b]
    0   NaN   1.0
    1   2.0   NaN
    """
    table = as_frame(data)
    if group not in table or table[group].isna().any():
        raise DataError(f"group must be a column that says of each row which group it is in; got {group!r}")
    code = pd.Categorical(table[group])
    rows = table.drop(columns=group).reset_index(drop=True)
    return pd.concat([rows[code == one].add_suffix(f"[{one}]") for one in code.categories], axis=1).sort_index()


def from_formulas(text: str, data: Any = None, *, std_lv: bool = False, group: str | None = None) -> Model:
    """A linear normal model from formulas, one a line, which mean what they mean to lavaan's ``sem``.

    - ``factor =~ a + b + c``: the hidden ``factor`` is measured by ``a``, ``b`` and ``c``;
    - ``y ~ x + factor``: ``y`` depends on ``x`` and ``factor``; ``y ~ 1`` names its intercept;
    - ``a ~~ b``: what else moves ``a`` and ``b`` is correlated; ``a ~~ 0*b``: it is not;
    - ``0.5*x`` gives a coefficient, ``NA*x`` frees it, ``a ~~ 0.3*a`` gives the variance of an error;
    - ``k*x`` labels a number: equal labels are equal numbers, and ``d := k1 * k2`` is computed of them;
    - what follows ``#`` or ``!`` is not read.

    Factors that nothing explains are correlated, and so are columns that nothing explains, and errors of outcomes that
    explain nothing, unless the formulas say otherwise. The first loading of a factor is one, which gives its units;
    with ``std_lv`` all loadings are free, and its variance (of its error, if something explains it) is one. Every node
    has an intercept. A pair of correlated errors may add a hidden node, ``noise_a``, that is the noise of ``a`` and
    reaches ``b`` as well. :func:`formula_estimates` shows a fit in the terms of the formulas.

    Args:
        text: The formulas.
        data: The table that the model is for; needed where errors are correlated, for what is left of the scale of
            ``a`` is a thousandth of its column's spread.
        std_lv: Whether factors have variance one, in place of a first loading of one.
        group: A column of ``data``, of which each category (in pandas' order, or sorted) has a model of its own; it is
            fitted to ``by_group(data, group)``. ``c(a, b)*x`` says of each group what ``a*x`` says of all.

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
    suffixes = [""]
    if group is not None:
        if data is None:
            raise ModelError(f"a model of each group needs data=, whose column {group!r} says which there are")
        data = by_group(data, group)
        suffixes = list(dict.fromkeys(_suffix(str(name)) for name in data.columns))
    formulas = read_formulas(text, suffixes).completed(std_lv)
    arrows, in_circles = givers_and_takers(formulas.pairs, [n for n in formulas.nodes if not formulas.parents(n)])
    _check_units(formulas, {taker for _, taker in arrows})
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
    spreads = _spreads(own, formulas, data)
    return Model(graph, {node: _mechanism(graph, node, formulas, own, spreads) for node in graph.nodes})


def _check_units(formulas: Formulas, takers: Collection[str]) -> None:
    """Refuse what the arrows of correlated factors cannot hold: given variances beside given or shared coefficients."""
    for factor in (node for node in formulas.factors if node in takers):
        own = [edge for edge in formulas.edges if factor in edge]
        has_units = any(formulas.coefficients.get(edge) for edge in own)
        if has_units and factor in formulas.variances:
            raise ModelError(
                f"the variance of the factor {factor!r}, which is correlated with others, is given, and a coefficient "
                "as well: free its first loading (NA*), or leave the variance out"
            )
        labels = {label for edge in own if (label := formulas.shared(formulas.line_of(edge)))}
        outside = {formulas.labels.get(formulas.line_of(edge)) for edge in formulas.edges if edge not in own}
        if not has_units and labels & outside:
            raise ModelError(
                f"coefficients of the factor {factor!r}, whose units its variance gives, are equal to others': let its "
                "first loading be one instead"
            )


def _stands_for_its_noise(giver: str, taker: str, formulas: Formulas, arrows: list[tuple[str, str]]) -> bool:
    """Whether a node is its own noise as far as another is concerned: nothing else comes to the other through it."""
    takes = [other for other, node in arrows if node == giver]
    moved = giver not in formulas.factors or formulas.intercepts.get(giver, 0.0) != 0.0
    levelled = taker in formulas.factors or taker in formulas.intercepts
    free = taker in formulas.intercepts and formulas.intercepts[taker] is None
    if moved and levelled and (not free or formulas.shared((taker, "~1", ""))):
        return False  # its mean would move a level that is given
    return not formulas.parents(giver) and all((other, taker) in arrows for other in takes)


def _spreads(own: Mapping[str, str], formulas: Formulas, data: Any) -> dict[str, float]:
    """Spreads of columns; of those whose noise is a node of its own, they must be known."""
    if data is None:
        if own:
            raise ModelError(f"correlated errors (of {', '.join(own)}) need data=, the table that the model is for")
        return {}
    table = as_frame(data)
    for node in own:
        if node not in table:
            raise DataError(f"{node!r} must be a column of the table; it has {', '.join(map(str, table.columns))}")
    columns = [node for node in formulas.nodes if node in table and pd.api.types.is_numeric_dtype(table[node])]
    spread = {node: float(np.nanstd(table[node].to_numpy(dtype=float, na_value=np.nan))) for node in columns}
    for node in own:
        if not spread.get(node, 0.0) > 0:
            raise DataError(f"column {node!r} must be numbers that vary to have an error that is correlated")
    return spread


def _mechanism(
    graph: Graph,
    node: str,
    formulas: Formulas,
    own: Mapping[str, str],
    spreads: Mapping[str, float],
    left_over: float = 1e-3,
) -> Normal:
    """A share of the spread is left over of the scale of a node whose noise is a node of its own."""
    if node in formulas.variances and node in own:
        raise ModelError(f"the variance of {node!r} is given, and its error correlated: leave one of them out")
    scale: Any = math.sqrt(formulas.variances[node]) if node in formulas.variances else None
    equal = formulas.shared((node, "~~", node))
    if node in own:
        scale = left_over * spreads[node]
    elif equal is not None and scale is None:
        scale = tie(f"label {equal}")
    level: Any = formulas.intercepts.get(node)
    if (named := formulas.shared((node, "~1", ""))) is not None and level is None:
        level = tie(f"label {named}")
    if node not in graph.hidden:
        return Normal(loc=level, weight=_weights(graph, node, formulas), scale=scale)
    if scale is None:
        marks = {child: formulas.coefficients.get((node, child)) for child in graph.children(node)}
        likely = [spreads.get(child, 1.0) / abs(by) for child, by in marks.items() if by]
        scale = start(likely[0]) if likely else 1.0
    if level is None:
        level = start(0.0) if node in formulas.intercepts else 0.0
    return Normal(loc=level, weight=_weights(graph, node, formulas), scale=scale)


def _weights(graph: Graph, node: str, formulas: Formulas) -> Any:
    """Coefficients: given, shared with others, or NaN; None where all are free."""
    weights: list[Any] = [formulas.coefficients.get((parent, node), math.nan) for parent in graph.parents(node)]
    for at, parent in enumerate(graph.parents(node)):
        label = formulas.shared(formulas.line_of((parent, node)))
        if label is not None and math.isnan(weights[at]):
            weights[at] = tie(f"label {label}")
    return weights if any(isinstance(one, Tied) or not math.isnan(one) for one in weights) else None


# -- reading -----------------------------------------------------------------------------------------------------------


def read_formulas(text: str, suffixes: Sequence[str] = ("",)) -> Formulas:
    """What the lines of a text say, of each group that nodes are told apart by."""
    if not isinstance(text, str):
        raise ModelError(f"text must hold formulas; got {type(text).__name__}")
    formulas = Formulas()
    for (number, formula), (group, suffix) in product(_statements(text), enumerate(suffixes)):
        where = f"line {number}: {formula!r}"
        left, sign, right = _parts(formula, where)
        if sign == ":=":
            formulas.definitions[left] = right
            continue
        left, known = left + suffix, len(formulas.edges)
        for part in right.split("+"):
            part = _of_group(part.strip(), group, len(suffixes), where)
            name, value, label = _term(part, where)
            name += suffix if name != "1" else ""
            if sign == "~" and name == "1":
                formulas.intercepts[left] = value
                line = (left, "~1", "")
            elif sign == "~~":
                _read_covariance(formulas, left, name, value, where)
                line = (left, "~~", name)
            else:
                _read_edge(formulas, (left, name) if sign == "=~" else (name, left), part, value)
                line = (left, sign, name)
            if label is not None:
                formulas.labels[line] = label
        if sign == "=~":
            formulas.loadings |= set(formulas.edges[known:])
            formulas.factors += [left] if left not in formulas.factors else []
    if not formulas.nodes:
        raise ModelError("text must hold at least one formula, such as 'factor =~ a + b'")
    unknown = [node for node in (*formulas.variances, *formulas.intercepts) if node not in formulas.nodes]
    if unknown:
        raise ModelError(f"something of {unknown[0]!r} is given, but no formula says what it has to do with others")
    return formulas


def _suffix(node: str) -> str:
    """What tells nodes of one group from those of others: ``[a]`` of ``x[a]``."""
    return "".join(node.rpartition("[")[1:]) if node.endswith("]") else ""


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Formulas with the number of their first line; one that ends in an operator, or is followed by +, goes on."""
    begun, whole = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        for part in re.split("[#!]", line, maxsplit=1)[0].split(";"):
            part = part.strip()
            if part and whole and not (whole.endswith(("+", "~", "*", "=")) or part.startswith("+")):
                yield begun, whole
                whole = ""
            begun, whole = (begun, f"{whole} {part}") if whole and part else (number, part) if part else (begun, whole)
    if whole:
        yield begun, whole


def _read_edge(formulas: Formulas, edge: tuple[str, str], part: str, value: float | None) -> None:
    if edge in formulas.edges:
        raise ModelError(f"{edge[1]!r} is said to depend on {edge[0]!r} twice")
    formulas.edges.append(edge)
    if value is not None:
        formulas.coefficients[edge] = value
    if re.match(r"NA\s*\*", part):
        formulas.freed.add(edge)


def _read_covariance(formulas: Formulas, left: str, right: str, value: float | None, where: str) -> None:
    if left == right:
        if value is not None and not value > 0:
            raise ModelError(f"{where}: the variance of {left!r} must be above zero; got {value}")
        if value is not None:
            formulas.variances[left] = value
        return  # a variance that is not given is free without being named
    if value:
        raise ModelError(f"{where}: a covariance can be free or zero; it cannot be fixed at {value}")
    if value is not None:
        formulas.apart.add(frozenset((left, right)))
    elif not {(left, right), (right, left)} & set(formulas.pairs):
        formulas.pairs.append((left, right))


def _parts(formula: str, where: str) -> tuple[str, str, str]:
    """The left side, the operator, and the right side."""
    operators = _OPERATOR.findall(formula)
    if len(operators) != 1:
        raise ModelError(f"{where} must have one of =~, ~, ~~ and :=, with names on both sides")
    left, right = (side.strip() for side in formula.split(operators[0]))
    if not _NAME.fullmatch(left):
        raise ModelError(f"{where}: {left!r} is no name of a column")
    return left, operators[0], right


def _of_group(text: str, group: int, groups: int, where: str) -> str:
    """A term of one group: of ``c(a, b)*x`` that with its own number or label."""
    found = _BY_GROUP.fullmatch(text)
    if found is None:
        return text
    each = [one.strip() for one in found[1].split(",")]
    if len(each) != groups:
        raise ModelError(f"{where}: {text!r} says something of {len(each)} groups; there are {groups} (group=)")
    return f"{each[group]}*{found[2]}"


def _term(text: str, where: str) -> tuple[str, float | None, str | None]:
    """A name, with the number or the label before it: ``0.5*x``, ``k*x``; ``NA*x`` says that there is none."""
    given, times, name = (part.strip() for part in text.rpartition("*"))
    if not (_NAME.fullmatch(name) or name == "1"):
        raise ModelError(f"{where}: {name!r} is no name of a column")
    if not times or given == "NA":
        return name, None, None
    try:
        value = float(given)
    except ValueError:
        if not _NAME.fullmatch(given):
            raise ModelError(f"{where}: {given!r} before * must be a number or a label") from None
        return name, None, given
    if not math.isfinite(value):
        raise ModelError(f"{where}: {given!r} before * must be a finite number or a label")
    return name, value, None


def formula_estimates(
    result: FitResult, text: str, *, level: float = 0.95, errors: Errors | Literal["expected"] = "expected"
) -> pd.DataFrame:
    """Coefficients, variances and covariances of errors, and what is defined of them, as lavaan and semopy list them.

    Args:
        result: A fit of the model that :func:`from_formulas` made of the text.
        text: The formulas.
        level: Nominal coverage of the intervals.
        errors: ``"expected"``: by the information that the model expects of complete rows, as lavaan does, and where
            cells are missing by the observed one; ``"information"``: always by that; or ``"sandwich"``.

    Returns:
        Columns ``left``, ``operator``, ``right``, ``label``, ``estimate``, ``std_error``, ``lower`` and ``upper``; what
        is given in the formulas or by the units of a factor has no standard error.

    Raises:
        ModelError: The model is not that of the text.
    """
    suffixes = list(dict.fromkeys(map(_suffix, result.model.graph.nodes)))
    formulas = read_formulas(text, suffixes).completed(True)
    absent = [node for node in formulas.nodes if node not in result.model.graph]
    if absent:
        raise ModelError(f"the model has no node {absent[0]!r}, which the formulas name")
    problem = result.problem
    if problem is None or errors == "bootstrap":
        raise ModelError("the table of formulas needs a fit by likelihood, and errors by 'information' or 'sandwich'")
    point = point_of(result.model.fitted, problem.shapes)
    if errors == "expected" and isinstance(problem, MomentProblem) and len(problem.equations.shown) == len(suffixes):
        scored = problem.equations.scored(point.numpy())  # of rows that show the same
        slope = torch.from_numpy(scored.slope[0])
        expected = torch.outer(slope, slope) * torch.from_numpy(scored.information[0])
        information = Information(float(problem.weight.sum()) * expected)
    else:
        information = information_at(problem, point, "information" if errors == "expected" else errors)

    def listed(flat: Tensor) -> Tensor:
        return _numbers(formulas, problem, problem.naturals(flat.unsqueeze(0)))

    with at_work(0):  # these matrices are small
        slopes = torch.autograd.functional.jacobian(listed, point[0]).detach()
    error = delta_errors(slopes, information.covariance).numpy()
    free = slopes.abs().amax(-1).numpy() > 1e-9  # what is given moves by rounding only
    lines = [*_lines(formulas), *((name, ":=", how) for name, how in formulas.definitions.items())]
    table = pd.DataFrame(lines, columns=["left", "operator", "right"])
    table["label"] = [formulas.labels.get(line, "") for line in lines]
    table["estimate"] = listed(point[0]).detach().numpy()
    table["std_error"] = np.where(free & ~information.untold(slopes), error, np.nan)
    reach = float(norm.ppf((1 + level) / 2))
    table["lower"] = table["estimate"] - reach * table["std_error"]
    table["upper"] = table["estimate"] + reach * table["std_error"]
    return table


def _lines(formulas: Formulas) -> list[Line]:
    """What each number is called: loadings, slopes, covariances, variances, and intercepts that are named."""
    edges = sorted((formulas.line_of(edge) for edge in formulas.edges), key=lambda line: line[1] != "=~")
    pairs = [(one, "~~", other) for one, other in formulas.pairs]
    levels = [(node, "~1", "") for node in formulas.intercepts]
    return [*edges, *pairs, *((node, "~~", node) for node in formulas.nodes), *levels]


def _arrows(problem: Problem, naturals: Naturals) -> tuple[Tensor, Tensor]:
    """Coefficients (children, parents) of all nodes, and their scales."""
    graph = problem.structure.graph
    place = {node: number for number, node in enumerate(graph.nodes)}
    own = torch.stack([naturals[node]["scale"][0, 0, 0] for node in graph.nodes])
    at = [(place[node], place[parent]) for node in graph.nodes for parent in graph.parents(node)]
    weights = torch.cat([naturals[node]["weight"][0, :, 0] for node in graph.nodes if graph.parents(node)])
    return own.new_zeros(len(place), len(place)).index_put(tuple(torch.tensor(at).T), weights), own


def _numbers(formulas: Formulas, problem: Problem, naturals: Naturals) -> Tensor:
    """The numbers of :func:`_lines`, of the first replica, and what is defined of them."""
    graph = problem.structure.graph
    place = {node: number for number, node in enumerate(graph.nodes)}
    arrows, own = _arrows(problem, naturals)
    named = [[(parent, node) in formulas.edges for parent in graph.nodes] for node in graph.nodes]
    said, identity = arrows * torch.tensor(named), torch.eye(len(place)).to(own)
    errors = (identity - said) @ (torch.linalg.inv(identity - arrows) * own)
    noise = errors @ errors.mT
    # a factor whose scale is given has its units by its variance: those of correlated ones come from their arrows
    unit = [
        (formulas.variances.get(node, 1.0) / noise[place[node], place[node]]).sqrt()
        if node in formulas.factors and not problem.structure.mechanisms[node].declared()["scale"].learned
        else own.new_ones(())
        for node in graph.nodes
    ]
    units = torch.stack(unit)
    levels = torch.stack([naturals[node]["loc"][0, 0, 0] for node in graph.nodes])
    levels = (identity - said) @ torch.linalg.solve(identity - arrows, levels) * units
    said, noise = units.unsqueeze(1) * said / units, units.unsqueeze(1) * noise * units
    values = []
    for left, sign, right in _lines(formulas):
        parent, child = (left, right) if sign == "=~" else (right, left)
        if sign == "~1":
            values.append(levels[place[left]])
        else:
            values.append((noise if sign == "~~" else said)[place[child], place[parent]])
    labelled = {
        formulas.labels[line]: value
        for line, value in zip(_lines(formulas), values, strict=True)
        if line in formulas.labels
    }
    for name, how in formulas.definitions.items():
        labelled[name] = _defined(name, how, labelled)
        values.append(labelled[name])
    return torch.stack(values)


def _defined(name: str, text: str, labelled: Mapping[str, Tensor]) -> Tensor:
    """A number that is computed of labelled ones, by sums, products, powers and some functions."""
    how = text.replace("^", "**")
    tree = parsed(how)
    if tree is None or not is_computable(tree) or not labelled.keys() >= set(names_in(how)):
        raise ModelError(
            f"{name} := {text} must be sums, products, powers, {', '.join(FUNCTIONS)} of labels; there are "
            f"{listed(sorted(labelled)) or 'none'}"
        )
    return torch.as_tensor(evaluated(tree, labelled), dtype=torch.float64)
