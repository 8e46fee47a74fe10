r"""Which parameters the data do not tell: flat directions of the loss at its minimum.

The information of a row is the mean square of its scores, :math:`I = E\, s s^\top`. A direction :math:`v` of length one
with :math:`n\, v^\top I v` near zero changes the likelihood of all :math:`n` rows by nothing that could be noticed: its
standard error, :math:`1 / \sqrt{n\, v^\top I v}`, is many times the columns' spread. Where such a move also changes
parameters as a user reads them (other than the level of a softmax, which changes nothing), these are not identified.

Scores serve better than second derivatives: a symmetry of the model makes every row's score along it zero at any point,
while its curvature is zero at the very minimum only. Rows are taken in small groups, each a replica of the problem.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from otpdag.data import random_part
from otpdag.mechanisms import Categorical
from otpdag.problem import Units
from otpdag.structure import pack

MOST_PARAMETERS = 120
"""Parameters up to which flat directions are looked for; two gradients are taken for each."""
MOST_WORK = 2_000_000
"""Rows times points times parameters beyond which a check would take longer than most fits."""
CHECKED_ROWS = 400  # on which directions are looked for, before they are tried on all
STEP = 1e-4  # of differences of gradients, in units of the data
WIDE_STEP = 3e-3  # with which a direction that is flat on some rows is tried on all
LARGEST_ERROR = 5.0  # a standard error of so many spreads is none
REPLICAS_AT_ONCE = 32  # replicas at most, and
MOST_ENTRIES = 2**19  # replicas times rows times points: more would take more memory than the fit did
WELL_KNOWN = 1e7  # information of a parameter beyond which rounding bends the flat directions of others
ROWS_ONE_BY_ONE = 20_000  # that are looked at one by one then
NOTHING = 1e-3  # a change of parameters, in units of the data, that is as good as none
BY_CHANCE = 0.01  # of the largest share in a direction, below which a parameter has it from the choice of rows
TAKES_PART = 0.2  # of the largest change, from which on a parameter is named

ParameterName = tuple[str, str, tuple[int, ...]]
"""Node, parameter and index in the layout of the mechanism, without the replica axis."""


@dataclass(frozen=True)
class FlatDirection:
    """A move of parameters that the data do not notice.

    Attributes:
        names: The parameters that it changes most, in the order of the graph.
        error: Its standard error in spreads of the columns, infinite if the loss does not change at all.
        move: The raw parameters (P,) along it, of length one.
    """

    names: tuple[ParameterName, ...]
    error: float
    move: Tensor = field(repr=False, compare=False)


def information(problem: Units, point: Tensor, *, rows: int | None = None, groups: int | None = None) -> Tensor:
    """The information of one row, (P, P): the mean square of scores at ``point`` (1, P), in raw parameters.

    Args:
        problem: What was minimised; it must be the same in every evaluation.
        point: Where.
        rows: On so many random rows; on all if left out.
        groups: How many groups of rows the scores are taken of; each row is its own if left out.
    """
    chosen_rows = None if rows is None else random_part(problem.rows, rows, seed=0)
    part = problem if chosen_rows is None else problem.subset(chosen_rows)
    part = part.laid_out_for(point) if part is not problem else part
    units = part.weight.shape[1]
    groups = units if groups is None else min(groups, units)
    member = torch.arange(units) % groups
    total = point.new_zeros(point.shape[1], point.shape[1])
    for chosen in torch.arange(groups).split(_at_once(part)):
        factors = (member == chosen.unsqueeze(1)).to(part.weight)
        share = (factors * part.weight).sum(-1, keepdim=True)
        scores = share * _gradients(part.reweighted(factors), point.expand(len(chosen), -1))
        total += scores.T @ scores
    return total / part.weight.sum()


def can_be_checked(problem: Units) -> bool:
    """Whether a look for flat directions is cheap."""
    size = sum(math.prod(shape) for shape in problem.shapes.values())
    if not 0 < size <= MOST_PARAMETERS or any(".network." in key or ".module." in key for key in problem.shapes):
        return False
    return min(problem.rows, CHECKED_ROWS) * problem.pace.points_per_row * size <= MOST_WORK


def flat_directions(problem: Units, point: Tensor, *, rows: int = CHECKED_ROWS) -> list[FlatDirection]:
    """Moves at a minimum (1, P) that the data do not notice, and the parameters that they change.

    Args:
        problem: What was minimised, as a mean over rows.
        point: Its minimum.
        rows: Rows on which directions are looked for; those that are directions are tried on all.
    """
    if not point.shape[1]:
        return []
    size, total = point.shape[1], float(problem.weight.sum())
    if total < 2 * size:
        return []  # too few rows to tell what is flat from what they lack
    small = 1 / (LARGEST_ERROR**2 * total)
    known = problem.curvature(point)
    if known is not None and not float(known.diagonal().max()) < WELL_KNOWN:
        # sums have lost the digits that count
        problem, known = problem.row_by_row(ROWS_ONE_BY_ONE).laid_out_for(point), None
    if known is None:
        known = information(problem, point, rows=max(rows, 2 * size), groups=2 * size)
    values, vectors = torch.linalg.eigh(known)
    nearly = _that_change_something(problem, point, vectors[:, values < small])
    if not bool(torch.isfinite(values).all()) or not nearly.shape[1]:
        return []
    slope = float(_gradients(problem, point).norm())
    flat = _without_curvature(problem, point, nearly, small + 4 * slope)
    changes = _changes(problem, point, flat)
    if not changes.numel():
        return []
    # of the flat moves those that change parameters, as few and as plain as there are
    _, strengths, mixed = torch.linalg.svd(changes, full_matrices=False)
    directions = []
    for weights, strength in zip(mixed, strengths.tolist(), strict=True):
        if strength <= NOTHING:
            continue
        direction = flat @ weights
        # per unit of change in what a user reads, lest a move that changes next to nothing pass for a flat one
        curvature = _curvature(problem, point, direction) / strength**2
        if curvature < small + 4 * slope:  # along a symmetry the loss bends as much as it still falls
            names = _named(problem, changes @ weights)
            error = (total * max(curvature, 1e-300)) ** -0.5
            move = direction.where(direction.abs() > BY_CHANCE * direction.abs().max(), 0.0)
            directions.append(FlatDirection(names, error, move / move.norm()))
    return directions


def _at_once(problem: Units) -> int:
    """Replicas that are evaluated together."""
    return max(1, min(REPLICAS_AT_ONCE, MOST_ENTRIES // max(1, problem.rows * problem.pace.points_per_row)))


def _gradients(problem: Units, points: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = points.detach().clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(problem.loss(leaf).sum(), leaf)
    return gradient.detach()


def _that_change_something(problem: Units, point: Tensor, directions: Tensor) -> Tensor:
    """The moves (P, K) without those, such as of unused entries of a factor, that change nothing a user reads.

    They are flat by themselves, on any rows: to try them on all would cost passes and tell nothing.
    """
    if not directions.shape[1]:
        return directions
    _, strengths, mixed = torch.linalg.svd(_changes(problem, point, directions), full_matrices=False)
    return directions @ mixed[strengths > NOTHING].T


def _without_curvature(problem: Units, point: Tensor, directions: Tensor, most: float) -> Tensor:
    """Those among the moves (P, K) and their mixtures along which the loss of all rows does not bend.

    Scores of columns that follow from each other cancel too, though each has a curvature of its own.
    """
    moves = WIDE_STEP * directions.T
    tried = torch.cat([point + moves, point - moves]).split(_at_once(problem))
    ahead, behind = torch.cat([_gradients(problem, few) for few in tried]).chunk(2)
    bending = directions.T @ (ahead - behind).T / (2 * WIDE_STEP)
    values, mixed = torch.linalg.eigh(0.5 * (bending + bending.T))
    return directions @ mixed[:, values.abs() < most]


def _curvature(problem: Units, point: Tensor, direction: Tensor) -> float:
    """The second derivative along a direction on all rows."""
    moves = torch.tensor([[-WIDE_STEP], [0.0], [WIDE_STEP]], dtype=point.dtype)
    with torch.no_grad():
        losses = torch.cat([problem.loss(few) for few in (point + moves * direction).split(_at_once(problem))])
    return float((losses[0] - 2 * losses[1] + losses[2]).abs() / WIDE_STEP**2)


# -- parameters as a user reads them -----------------------------------------------------------------------------------


def _changes(problem: Units, point: Tensor, directions: Tensor) -> Tensor:
    """How fast natural parameters change along directions (P, K), in units of the data: (entries, K)."""
    if not directions.shape[1]:
        return torch.zeros(0, 0, dtype=point.dtype)
    moved = torch.cat([point + STEP * directions.T, point - STEP * directions.T])
    after, before = _readable(problem, moved).chunk(2)
    return ((after - before) / (2 * STEP)).T


def _readable(problem: Units, points: Tensor) -> Tensor:
    """Natural parameters of every replica (R, entries), each divided by its unit; logits without their level."""
    values = {}
    naturals = problem.naturals(points)
    for node, name in _learned(problem):
        mechanism = problem.structure.mechanisms[node]
        value = naturals[node][name].detach().expand(len(points), *mechanism.declared()[name].shape)
        if isinstance(mechanism, Categorical) and name in ("logits", "weight"):
            value = value - value.mean(-1, keepdim=True)
        unit = mechanism.declared()[name].unit
        values[f"{node}.{name}"] = value if unit is None else value / unit.to(value)
    return pack(values)


def _learned(problem: Units) -> Iterator[tuple[str, str]]:
    for node, mechanism in problem.structure.mechanisms.items():
        for name, parameter in mechanism.declared().items():
            if parameter.learned and not name.startswith(("network.", "module.")):
                yield node, name


def _named(problem: Units, change: Tensor) -> tuple[ParameterName, ...]:
    entries: list[ParameterName] = []
    for node, name in _learned(problem):
        shape = problem.structure.mechanisms[node].declared()[name].shape
        entries += [(node, name, tuple(map(int, index))) for index in torch.ones(shape).nonzero().tolist()]
    size = change.abs()
    return tuple(entry for entry, own in zip(entries, size, strict=True) if own >= TAKES_PART * size.max())
