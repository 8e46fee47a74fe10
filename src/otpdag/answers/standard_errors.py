r"""Standard errors of a fitted model's parameters, from the curvature of what was minimised; and how many are free.

.. math:: I(\theta) = -\nabla^2 \sum_n \log p_\theta(x_n), \qquad \mathrm{Cov}(\hat\theta) \approx I(\hat\theta)^{-1}

The gradient of a log-likelihood with unknowns summed out is exact but of first order only (Fisher's identity), so that
second derivatives are central differences of it: with a step of 1e-4 in coordinates of order one their relative error
is about 1e-8, far below what an interval shows.

Where a log-likelihood is minimised the covariance of the raw parameters is the inverse of the observed information,
:math:`I^{-1}`; of any other sum over rows, and where the model may be wrong, the sandwich
:math:`I^{-1} (\sum_n s_n s_n^\top) I^{-1}` with the slopes :math:`s_n` of single rows (Huber, 1967). The delta method
carries it to the parameters that a user reads. Intervals are even on the line on which a parameter is free: logarithms
of scales and rates, logits of probabilities.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import numpy as np
import pandas as pd
import scipy as sp
import torch
from torch import Tensor

from otpdag.answers.notes import flat_directions, point_of
from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.errors import ModelError
from otpdag.likelihood.grouped_rows import group_problem
from otpdag.likelihood.row_posterior import Fitted
from otpdag.likelihood.row_problem import row_problem
from otpdag.mechanisms import Mechanism
from otpdag.mechanisms.parameters import INCREASING, REAL, SIMPLEX, UNIT, Between, Parameter
from otpdag.mechanisms.predictor import Predicted
from otpdag.numerics import Flags, at_work, first_connected
from otpdag.problem import Problem, RowObjective, TableRows, Units, apart, curvature, differences, loss_and_gradient
from otpdag.settings import ClosedForm, Objective
from otpdag.structure import Structure, pack, parameter_places, unpack
from otpdag.tables import estimates

Errors = Literal["information", "sandwich", "bootstrap"]

# of parameters drawn by their likelihood: how many are tried, on how many rows in all, degrees of freedom of these
CANDIDATES, CANDIDATE_ROWS, HEAVY = 2_000, 4_000_000, 5

FLAT = 1e-6  # relative curvature along a direction that the data do not tell, by second derivatives


# -- information -------------------------------------------------------------------------------------------------------


def delta_errors(slopes: Tensor, covariance: Tensor) -> Tensor:
    """Standard errors (N,) of numbers with slopes (N, P) in parameters of this covariance (P, P): the delta method."""
    return ((slopes @ covariance) * slopes).sum(-1).clamp(min=0.0).sqrt()


@dataclass(frozen=True)
class Information:
    """Second derivatives of minus the log-likelihood (P, P), and what follows from them for the raw parameters.

    ``flat`` are directions (P, k) in which the likelihood does not fall: labels of a softmax that only differences of
    have a meaning, and whatever the data do not tell. ``scores`` (N, P), slopes of single rows, make a sandwich.

    Attributes:
        knows_flat: Whether flat directions were told, rather than found in the matrix.
        smallest: Curvature, relative to that of its own coordinates, below which a direction is flat.
    """

    matrix: Tensor
    scores: Tensor | None = None
    knows_flat: bool = False
    smallest: float = FLAT

    def without(self, flat: Tensor) -> Information:
        """The same with no curvature along directions (P, k) that are known to be flat."""
        if not flat.shape[1]:
            return self
        basis = torch.linalg.qr(flat).Q
        rest = torch.eye(len(flat)).to(basis) - basis @ basis.mT
        return replace(self, matrix=rest @ self.matrix @ rest, knows_flat=True)

    @cached_property
    def _scaled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each coordinate in units of its own curvature; eigenvalues and eigenvectors there."""
        own = self.matrix.diagonal().abs()
        most = own.max().clamp(min=1e-300)
        # raw coordinates are of order one: a curvature of one tells something even beside that of a constant column
        unit = torch.where(own > (self.smallest * most).clamp(max=1.0), own, most).rsqrt()
        return unit, *_eigen(unit.unsqueeze(0) * self.matrix * unit.unsqueeze(1))

    @property
    def flat(self) -> Tensor:
        """Directions (P, k), of length one, that the data do not tell."""
        unit, values, vectors = self._scaled
        directions = unit.unsqueeze(1) * vectors[:, values <= self.smallest]
        return directions / directions.norm(dim=0, keepdim=True).clamp(min=1e-300)

    @property
    def blur(self) -> float:
        r"""How far flat directions may lean towards others.

        A matrix without negative eigenvalues whose entry along a direction is :math:`\epsilon`, and along another
        :math:`\lambda`, has at most :math:`\sqrt{\epsilon \lambda}` between them, which turns the former by
        :math:`\sqrt{\epsilon / \lambda}`.
        """
        _, values, _ = self._scaled
        flat, others = values[values <= self.smallest], values[values > self.smallest]
        if self.knows_flat or not len(flat) or not len(others):
            return 0.0
        return float((flat.abs().max() / others.min()).sqrt())

    @property
    def is_of_maximum(self) -> bool:
        """Whether the likelihood rises in no direction."""
        values, _ = _eigen(self.matrix)
        return len(values) == 0 or bool(values.min() > -1e-4 * values.max().abs().clamp(min=1e-300))

    @cached_property
    def covariance(self) -> Tensor:
        """The inverse along all directions that the data tell (P, P), or the sandwich; zero along the others.

        >>> Information(torch.diag(torch.tensor([4.0, 1.0]).double())).covariance.diagonal()
        tensor([0.2500, 1.0000], dtype=torch.float64)
        """
        unit, values, vectors = self._scaled
        root = unit.unsqueeze(1) * vectors
        inverse = (root * torch.where(values > self.smallest, 1 / values.clamp(min=self.smallest), 0.0)) @ root.mT
        return inverse if self.scores is None else inverse @ (self.scores.mT @ self.scores) @ inverse

    def untold(self, slopes: Tensor, least: float = 1e-3, most: float = 0.02) -> Flags:
        """Which numbers, by their slopes (numbers, P), move along a direction that the data do not tell.

        Those with ``least`` of their slope along such directions, or more where these are known less exactly; ``most``
        is never put down to that. So do those that have no slope at all, at the end of a probability's range.
        """
        flat, size = self.flat, slopes.norm(dim=-1)
        along = (slopes @ flat).norm(dim=-1) if flat.shape[1] else torch.zeros_like(size)
        return ((along > max(least, min(self.blur, most)) * size) | (size == 0)).numpy()


def _eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (P,) and eigenvectors of a symmetric matrix (P, P), of each of its blocks alone, in no order."""
    values, vectors = torch.zeros_like(matrix.diagonal()), torch.zeros_like(matrix)
    block = first_connected(len(matrix), *np.nonzero(matrix.numpy()))
    for number in np.unique(block):
        own = torch.from_numpy(np.flatnonzero(block == number))
        values[own], vectors[own.unsqueeze(1), own] = torch.linalg.eigh(matrix[own][:, own])
    return values, vectors


def likely_points(problem: Units, point: Tensor, known: Information, draws: int, seed: int) -> Tensor:
    r"""Parameters (draws, P) around the end of a fit (1, P), as likely as the data make them.

    Candidates come from a t distribution with the covariance of the estimate, and are taken as often as their
    likelihood is above their density there (sampling importance resampling: Rubin 1988). Of few rows that is wider than
    a normal distribution: scales are drawn by their degrees of freedom. Of so many rows that candidates cost much the
    two are the same, and a sandwich has no likelihood: there normal draws serve. What no data tell stays as it is.
    """
    values, vectors = torch.linalg.eigh(known.covariance)
    told, generator = values > 0, torch.Generator().manual_seed(seed)
    many = min(CANDIDATES, CANDIDATE_ROWS // problem.rows) if known.scores is None else 0
    noise = torch.randn(max(many, draws), len(values), generator=generator, dtype=values.dtype)
    ahead = values.clamp(min=0.0).sqrt().unsqueeze(1) * vectors.mT
    if many < draws:
        return point + noise @ ahead
    tail = torch.randn(many, HEAVY, generator=generator, dtype=values.dtype).square().mean(1, keepdim=True)
    heavy = noise / tail.sqrt()
    density = -0.5 * (HEAVY + int(told.sum())) * (1 + heavy[:, told].square().sum(1) / HEAVY).log()
    with torch.no_grad(), at_work(problem.rows):
        laid_out, parts = problem.laid_out_for(point), (point + heavy @ ahead).split(draws)
        losses = torch.cat([laid_out.loss(part).total.expand(len(part)) for part in parts])
    weight = (-problem.unit_mass.sum() * losses - density).nan_to_num(nan=-torch.inf).softmax(0)
    if not weight.square().sum() < 1 / draws:  # a few candidates would stand for all
        return point + noise[:draws] @ ahead
    levels = (torch.arange(draws, dtype=weight.dtype) + 0.5) / draws
    return torch.cat(parts)[torch.searchsorted(weight.cumsum(0), levels).clamp(max=many - 1)]


def information_at(problem: Problem, point: Tensor, errors: Errors = "information", most: int = 1500) -> Information:
    """What is known of the raw parameters at the end of a fit (1, P), of which there may be so many."""
    if not isinstance(problem, Units) or not problem.is_sum:
        raise ModelError("standard errors need a likelihood, a sum over rows; use errors='bootstrap'")
    if point.shape[1] > most:
        raise ModelError(
            f"standard errors need a matrix of all {point.shape[1]} parameters; at most {most} are "
            "supported: use errors='bootstrap'"
        )
    with at_work(problem.rows):
        joined = _joined(problem) if isinstance(problem, TableRows) else None
        second = problem.unit_mass.sum() * curvature(problem.laid_out_for(point).loss, point, joined=joined)
        moves = _flat_moves(problem, point)
    if not bool(torch.isfinite(second).all()):
        raise ModelError("the likelihood has no finite second derivative at the estimate")
    robust = errors == "sandwich" or not problem.is_likelihood
    return Information(second, _unit_slopes(problem, point) if robust else None).without(moves)


def _owners(problem: Problem) -> Tensor:
    """Which raw parameters are of which node's mechanism (P, nodes)."""
    places, structure = parameter_places(problem.shapes), problem.structure
    owners = torch.zeros(sum(place.numel() for place in places.values()), len(structure.keys), dtype=torch.bool)
    for number, node in enumerate(structure.keys):
        for key in structure.keys_of(node):
            owners[places[key].flatten(), number] = True
    return owners


def _joined(problem: TableRows) -> Tensor:
    """Which pairs of raw parameters (P, P) have a second derivative: of nodes that what a row does not show joins.

    In a complete table each node's parameters stand alone. A node is explained by its family, and families that read
    the same unknown of a row belong together, and so do those that they read others with.
    """
    graph, nodes, seen = problem.structure.graph, list(problem.structure.mechanisms), problem.batch.mask
    hidden = torch.ones(problem.rows, dtype=torch.bool)
    unknown = torch.stack([~seen[node][0].all(-1).cpu() if node in seen else hidden for node in nodes]).numpy()
    patterns = unknown[:, np.unique(np.packbits(unknown, 0), axis=1, return_index=True)[1]]
    families = [(node, *graph.parents(node)) for node in nodes]
    family, read = np.nonzero([[node in own for node in nodes] for own in families])
    edge, pattern = np.nonzero(patterns[read])
    size, many = len(nodes), patterns.shape[1]
    # vertices: the families of each pattern, then its unknowns
    ends = family[edge] * many + pattern, (size + read[edge]) * many + pattern
    piece = first_connected(2 * size * many, *ends)[: size * many]
    member = sp.sparse.coo_array((np.ones(len(piece)), (piece, np.arange(len(piece)) // many))).tocsr()
    owners = _owners(problem).float()
    return owners @ torch.from_numpy((member.T @ member).toarray()).float() @ owners.T > 0


def likelihood_of_rows(fitted: Fitted, batch: Batch | SequenceBatch) -> Problem:
    """The likelihood of rows, or of groups of them, as a function of a model's raw parameters."""
    fitted.check_densities("the information of rows")
    shapes = {key: parameter.shape for key, parameter in fitted.structure.parameters().items()}
    about = RowObjective(fitted.structure, shapes, Objective(eps=1.0), ClosedForm())
    return row_problem(about, batch, 0) if isinstance(batch, Batch) else group_problem(about, batch, 0)


def _flat_moves(problem: Units, point: Tensor) -> Tensor:
    """Directions (P, K) of which the scores of single rows say that no data tell them.

    Second derivatives alone know a symmetry of the model only at the very maximum.
    """
    directions = flat_directions(problem, point) if isinstance(getattr(problem, "batch", None), Batch) else []
    moves = [direction.move for direction in directions]
    return torch.stack(moves, -1).to(point) if moves else point.new_zeros(point.shape[1], 0)


def _unit_slopes(problem: Units, point: Tensor, step: float = 1e-3) -> Tensor:
    """Slopes of each unit's own loss, times the root of its weight (N, P): central differences.

    A weight is a number of equal rows, as where rows that agree were collapsed into one. The points that stand for what
    is unknown may move with the parameters, which needs a wider step.
    """
    slopes = differences(problem.unit_losses, point, torch.eye(point.shape[1]).to(point), step=step)
    return (slopes * problem.unit_mass / problem.weight.clamp(min=1e-300).sqrt()).mT


# -- the table ---------------------------------------------------------------------------------------------------------


def standard_errors(
    fitted: Fitted, problem: Problem, *, level: float = 0.95, errors: Errors = "information"
) -> tuple[pd.DataFrame, bool]:
    """Estimate, standard error and interval of every parameter, in the order of :func:`otpdag.tables.estimates`.

    Args:
        fitted: The model.
        problem: What it was fitted by.
        level: Nominal coverage of the intervals.
        errors: ``"information"`` or ``"sandwich"``.

    Returns:
        The columns ``node``, ``parameter``, ``at``, ``estimate``, ``std_error``, ``lower``, ``upper`` and ``note``
        (``fixed``, ``reference``, ``at the edge``, ``not identified``), and whether the estimate is a maximum.
    """
    point = point_of(fitted, problem.shapes)
    information = information_at(problem, point, errors)
    table = without_errors(fitted)

    def numbers(points: Tensor) -> Tensor:
        shown = described(fitted, problem, points).values()
        return torch.cat([value.reshape(len(points), value[0].numel()) for value in shown], 1)

    place = {node: at for at, node in enumerate(problem.structure.mechanisms)}
    slopes = slopes_of(numbers, point, _owners(problem).T[[place[node] for node in table["node"]]])
    named = zip(table["node"], table["parameter"], strict=True)
    parameters = [fitted.structure.mechanisms[str(node)].declared().get(str(name)) for node, name in named]
    largest = slopes.abs().amax(-1) if slopes.numel() else slopes.new_zeros(len(slopes))
    places = table.groupby(["node", "parameter"]).cumcount()
    lines = zip(parameters, places, table["estimate"], table["note"], information.untold(slopes), largest, strict=True)
    table["note"] = [
        note or _note(parameter, place, float(value), bool(untold), float(slope))
        for parameter, place, value, note, untold, slope in lines
    ]
    error = delta_errors(slopes, information.covariance).numpy()
    table["std_error"] = np.where(table["note"] == "", error, np.nan)
    table["lower"], table["upper"] = _ends(parameters, table["estimate"], table["std_error"], level)
    if isinstance(problem, Units):
        _add_one_sided(table, problem, point, slopes, numbers, level)
        if errors == "information" and problem.is_likelihood:
            _profile_groups(table, problem, point, slopes, information.covariance, level)
    return table, information.is_of_maximum


def slopes_of(numbers: Callable[[Tensor], Tensor], point: Tensor, moved: Tensor, most: int = 400) -> Tensor:
    """Slopes (M, P) at a point (1, P) of numbers that points (R, P) have (R, M), of which these (M, P) may be others.

    Numbers that no parameter moves together share a replica; all take one pass.

    >>> slopes_of(lambda x: x**2, torch.tensor([[1.0, 3.0]]), torch.eye(2).bool())
    tensor([[2., 0.],
            [0., 6.]])
    """
    made, group = [point[:0]], apart(moved.float() @ moved.float().T > 0)
    for own in group.unique().split(most):
        leaf = point.expand(len(own), -1).clone().requires_grad_()
        value = numbers(leaf)[own.unsqueeze(1) == group].sum()
        made += torch.autograd.grad(value, leaf) if value.requires_grad else [torch.zeros_like(leaf)]
    return torch.cat(made)[group].where(moved, 0.0)


def _add_one_sided(
    table: pd.DataFrame,
    problem: Units,
    point: Tensor,
    slopes: Tensor,
    numbers: Callable[[Tensor], Tensor],
    level: float,
) -> None:
    r"""Write down how far what ran to the end of its range, where no event was seen, may lie inside.

    With a chance p of what has never occurred in n rows these are :math:`(1 - p)^n` as likely, with a rate
    :math:`e^{-rn}`: that is ``1 - level`` at the exact end of a one-sided interval (Clopper and Pearson, 1934). How
    many rows there are is told by the likelihood at another chance or rate.
    """
    noted, best = table["note"].isin(["at the edge", "not identified"]), problem.loss(point).total
    for place in np.flatnonzero(noted).tolist():
        if not _stands_alone(problem, table["node"][place], table["parameter"][place]):
            continue
        # raw coordinates are of order one where the data are
        moved = point.index_fill(1, slopes[place].abs().argmax(), 0.0)
        rise = problem.unit_mass.sum() * (problem.loss(moved).total - best).sum()
        value, other = table["estimate"][place], numbers(moved)[0, place]
        is_rate = table["parameter"][place] == "log_rate"
        passed = torch.exp(other) if is_rate else -torch.log1p(-(other - value).abs())
        rows = float(rise / passed)
        if not rows > 0.5:
            continue  # of parents that were never seen so
        rate = -math.log(1 - level) / rows
        share = -math.expm1(-rate)
        ends = (-np.inf, math.log(rate)) if is_rate else (1 - share, 1.0) if value > other else (0.0, share)
        table.loc[place, "lower"], table.loc[place, "upper"] = ends
        table.loc[place, "note"] = "at the edge"


def _profile_groups(
    table: pd.DataFrame, problem: Units, point: Tensor, slopes: Tensor, covariance: Tensor, level: float
) -> None:
    """Replace the intervals of what groups add by those of the profile likelihood.

    The slope of a node that groups share is a standard deviation, whose likelihood is far from normal with few groups.
    """
    structure, reach = problem.structure, float(sp.special.ndtri((1 + level) / 2))
    named = list(zip(table["node"], table["at"].astype(str), strict=True))
    for shared in structure.shared:
        readers = structure.graph.children(shared)
        own = [i for i, (node, at) in enumerate(named) if node in readers and shared in re.split(":|, ", at)]
        if len(own) != 1 or not np.isfinite(table["std_error"][own[0]]) or (slopes[own[0]] != 0).sum() != 1:
            continue  # with several slopes, or ties, signs and sizes hang together
        [place], [column] = own, slopes[own[0]].nonzero().flatten().tolist()
        value, unit = abs(float(table["estimate"][place])), float(slopes[place, column].abs())
        ends = _profiled(problem, point, covariance, column, value / unit, reach)
        table.loc[place, ["lower", "upper"]] = [max(end, 0.0) * unit for end in ends]


def _profiled(
    problem: Units, point: Tensor, covariance: Tensor, column: int, value: float, reach: float, steps: int = 12
) -> tuple[float, float]:
    """Where the best likelihood at other values of a raw number above zero lies ``reach`` squared below the maximum.

    Other numbers move by steps of the information at the maximum, along which the number itself stays.
    """
    along = covariance[:, column] / covariance[column, column]
    beside = covariance - torch.outer(along, along) * covariance[column, column]
    mass, sign = float(problem.unit_mass.sum()), 1.0 if float(point[0, column]) >= 0 else -1.0
    laid_out = problem.laid_out_for(point)

    def deviance(moved: float) -> float:
        at = point + sign * moved * along
        for _ in range(3):
            _, gradient = loss_and_gradient(laid_out.loss, at)
            at = at - mass * gradient @ beside
        return 2 * mass * float(laid_out.loss(at).total - best)

    with at_work(problem.rows):
        best, ends = laid_out.loss(point).total, []
        for side in (-1.0, 1.0):
            moved = side * reach * float(covariance[column, column].sqrt())
            for _ in range(steps):
                moved = max(moved, -value)
                fall = max(deviance(moved), 1e-12) ** 0.5
                if abs(fall / reach - 1) < 1e-3 or (moved == -value and fall < reach):
                    break
                moved *= reach / fall
            ends.append(value + moved)
    return ends[0], ends[1]


def _stands_alone(problem: Units, node: str, name: str) -> bool:
    """Whether rows of a seen configuration tell of a row of a table, and of nothing else."""
    mechanism = problem.structure.mechanisms[node]
    is_table = isinstance(mechanism, Predicted) and mechanism.has_only_tables and name in ("probs", "log_rate")
    return is_table and not mechanism.family.hidden and not mechanism.family.hidden_parents


def term_curve(fitted: Fitted, problem: Problem, node: str, parent: str, *, level: float, points: int) -> pd.DataFrame:
    r"""What a numeric parent adds to a node's prediction, with pointwise intervals (:meth:`otpdag.FitResult.term`).

    .. math:: f(x) = \eta(x, c) - \frac1n \sum_i \eta(x_i, c)

    on the scale of the link, where c are the means of the other numbers, and the first of the categories.
    """
    mechanism, batch = problem.structure.mechanisms.get(str(node)), getattr(problem, "batch", None)
    batch = batch.steps if isinstance(batch, SequenceBatch) else batch
    names = [name for name, _ in mechanism.family.continuous] if isinstance(mechanism, Predicted) else []
    if not isinstance(mechanism, Predicted) or str(parent) not in names or not isinstance(batch, Batch):
        raise ModelError(f"parent must be a number that node {node!r} reads, of {names}; got {parent!r}")
    given: dict[str, Tensor] = {}
    for name, space in mechanism.family.parents:
        mask = batch.mask[name][0].all(-1) if name in batch.mask else torch.zeros(1, dtype=torch.bool)
        if name in problem.structure.shared and name != parent:
            given[name] = torch.zeros(1, 1, dtype=torch.float64)
            continue
        if not bool(mask.any()):
            raise ModelError(f"a term needs parents that some row shows; {name!r} of node {node!r} is hidden")
        seen = batch.values[name][0, mask]
        first = torch.eye(space.width).to(seen)[:1] if space.is_discrete else seen.mean(0, keepdim=True)
        given[name] = seen if name == parent else first
    shown = given[parent]
    line = torch.linspace(float(shown.min()), float(shown.max()), points, dtype=shown.dtype).unsqueeze(-1)
    values = {name: torch.cat([line, shown]) if name == parent else own for name, own in given.items()}
    rows = {name: own.expand(len(line) + len(shown), -1).unsqueeze(0) for name, own in values.items()}

    def curve(flat: Tensor) -> Tensor:
        found = mechanism.at(problem.naturals(flat.unsqueeze(0))[node], rows)[0][0]
        found = found[:, 1:] - found[:, :1] if found.shape[-1] > 1 and mechanism.space.is_discrete else found
        return (found[:points] - found[points:].mean(0)).T.flatten()

    point = point_of(fitted, problem.shapes)
    slopes = torch.autograd.functional.jacobian(curve, point[0]).detach()
    error = delta_errors(slopes, information_at(problem, point).covariance).numpy()
    term, reach = curve(point[0]).detach().numpy(), sp.special.ndtri((1 + level) / 2) * error
    at = np.tile(line[:, 0].numpy(), len(term) // points)
    of = np.repeat(np.arange(1, 1 + len(term) // points), points)
    return pd.DataFrame({parent: at, "of": of, "term": term, "lower": term - reach, "upper": term + reach})


def without_errors(fitted: Fitted) -> pd.DataFrame:
    """The same table where errors and intervals are not known."""
    table = estimates(fitted).rename(columns={"value": "estimate"})
    fixed = table.pop("fixed")
    table["std_error"] = table["lower"] = table["upper"] = np.nan
    table["note"] = np.where(fixed, "fixed", "")
    return table


def described(fitted: Fitted, problem: Problem, points: Tensor) -> dict[tuple[str, str], Tensor]:
    """All parameters that a user reads (R, ...), of the raw ones (R, P), in the order of a table."""
    naturals = problem.naturals(points)
    tables = {node: problem.structure.mechanisms[node].describe(own) for node, own in naturals.items()}
    return {
        (node, name): tables[node][name].expand(len(points), *tables[node][name].shape[1:])
        for node, own in fitted.params().items()
        for name in own
        if not name.startswith(("network.", "module."))
    }


def _note(parameter: Parameter | None, place: int, value: float, is_untold: bool, slope: float) -> str:
    if slope == 0.0:
        return "reference"
    if parameter is not None and _at_edge(parameter, place, value, slope):
        return "at the edge"
    return "not identified" if is_untold else ""


def _at_edge(
    parameter: Parameter, place: int, value: float, slope: float, edge: float = 1e-5, least: float = 0.02
) -> bool:
    """Whether a probability is so close to zero or one, or a scale so small a share of its unit, or at its floor.

    A positive number whose logarithm moves less than ``least`` with its raw value is within a hundredth of its floor.
    """
    if parameter.support is SIMPLEX or parameter.support is UNIT:
        return not edge < value < 1 - edge and (parameter.support is UNIT or parameter.shape[-1] > 1)
    if isinstance(parameter.support, Between):
        return parameter.support.at_bound(value, place)
    if parameter.support in (REAL, INCREASING):
        return False
    unit = 1.0 if parameter.unit is None else float(parameter.unit.max())
    return value < edge * unit or slope < least * value


def _ends(
    parameters: Sequence[Parameter | None], estimate: pd.Series, error: pd.Series, level: float
) -> tuple[np.ndarray, np.ndarray]:
    """Intervals that are even on the line on which each parameter is free."""
    supports = [REAL if parameter is None else parameter.support for parameter in parameters]
    is_share = np.array([support is SIMPLEX or support is UNIT for support in supports], dtype=bool)
    is_real = np.array(
        [support in (REAL, INCREASING) or isinstance(support, Between) for support in supports], dtype=bool
    )
    value, reach = estimate.to_numpy(), float(sp.special.ndtri((1 + level) / 2)) * error.to_numpy()
    with np.errstate(all="ignore"):  # where there is no error, there is no interval
        lower, upper = (
            np.select(
                [is_real, is_share],
                [value + step, sp.special.expit(sp.special.logit(value) + step / (value * (1 - value)))],
                value * np.exp(step / value),
            )
            for step in (-reach, reach)
        )
    return lower, upper


# -- how many are free -------------------------------------------------------------------------------------------------


def free_parameters(structure: Structure) -> int:
    """Count what is learned: a table of K probabilities has K - 1, tied parameters count once.

    Numbers that say the same twice (a constant that is added to all logits, the level of a hidden node) count once:
    per node, the rank of the derivative of the parameters that a user reads in those that the optimiser moves.

    >>> import otpdag as otp
    >>> from otpdag import mechanisms as m
    >>> graph = otp.Graph([("z", "x"), ("x", "y")], hidden=["z"])
    >>> free_parameters(Structure.bind(graph, {"z": m.Categorical(3), "x": m.Normal(), "y": m.Categorical(4)}))
    14
    """
    counted: set[str] = set()
    total = -len(structure.equal)
    for node, names in structure.keys.items():
        mechanism = structure.mechanisms[node]
        declared = mechanism.declared()
        fresh = {name: key for name, key in names.items() if key not in counted}
        counted |= set(fresh.values())
        simplex = [name for name in fresh if declared[name].support is SIMPLEX]
        total += sum(math.prod(declared[name].shape[:-1]) * (declared[name].shape[-1] - 1) for name in simplex)
        total += _rank(mechanism, {name: declared[name] for name in fresh if name not in simplex})
    return total


def _rank(mechanism: Mechanism, free: Mapping[str, Parameter], most: int = 400) -> int:
    """The number of directions in which what a user reads of a node can move; of more numbers it is all of them."""
    size = sum(math.prod(parameter.shape) for parameter in free.values())
    if not 0 < size <= most:
        return size
    generator = torch.Generator().manual_seed(0)
    learned = {name: p for name, p in mechanism.declared().items() if p.learned}
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    raw = {name: 0.3 * normal(1, *parameter.shape) for name, parameter in learned.items()}

    def shown(flat: Tensor) -> Tensor:
        moved = unpack(flat.unsqueeze(0), {name: parameter.shape for name, parameter in free.items()})
        described = mechanism.describe(mechanism.natural({**raw, **moved}))
        return torch.cat([value.flatten() for value in described.values()])

    derivative = torch.autograd.functional.jacobian(shown, pack({name: raw[name] for name in free})[0])
    return int(torch.linalg.matrix_rank(derivative, rtol=1e-9))
