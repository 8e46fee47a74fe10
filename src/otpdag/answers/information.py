r"""What data tell of a model's raw parameters: the observed information, what it leaves open, and how many are free.

.. math:: I(\theta) = -\nabla^2 \sum_n \log p_\theta(x_n), \qquad \mathrm{Cov}(\hat\theta) \approx I(\hat\theta)^{-1}

The gradient of a log-likelihood with unknowns summed out is exact but of first order only (Fisher's identity), so that
second derivatives are central differences of it: with a step of 1e-4 in coordinates of order one their relative error
is about 1e-8, far below what an interval shows.

Flat directions are parameters that the data do not tell. The information of a row is also the mean square of its
scores, :math:`I = E\, s s^\top`. A direction :math:`v` of length one with :math:`n\, v^\top I v` near zero changes the
likelihood of all :math:`n` rows by nothing that could be noticed: its standard error,
:math:`1 / \sqrt{n\, v^\top I v}`, is many times the columns' spread. Where such a move also changes parameters as a
user reads them (other than the level of a softmax, which changes nothing), these are not identified. Scores serve
better than second derivatives here: a symmetry of the model makes every row's score along it zero at any point, while
its curvature is zero at the very minimum only. Rows are taken in small groups, each a replica of the problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from otpdag.data import Batch, random_part
from otpdag.errors import ModelError
from otpdag.likelihood.elimination.evidence import moved, total_evidence
from otpdag.likelihood.elimination.layout import lay_out_within
from otpdag.likelihood.row_posterior import BUDGET, Fitted
from otpdag.mechanisms import Categorical
from otpdag.mechanisms.base import Mechanism
from otpdag.mechanisms.parameters import SIMPLEX, Parameter
from otpdag.numerics import bounded_threads
from otpdag.problem import Units, differences, loss_and_gradient
from otpdag.structure import Structure, pack, unpack

FLAT = 1e-6
"""Curvature, relative to that of its own coordinates, below which a direction is one that the data do not tell."""


def delta_errors(slopes: Tensor, covariance: Tensor) -> Tensor:
    """Standard errors (N,) of numbers with slopes (N, P) in parameters of this covariance (P, P): the delta method."""
    return ((slopes @ covariance) * slopes).sum(-1).clamp(min=0.0).sqrt()


@dataclass(frozen=True)
class Information:
    """Second derivatives of minus the log-likelihood (P, P), and what follows from them.

    ``flat`` are directions (P, k) in which the likelihood does not fall: labels of a softmax that only differences of
    have a meaning, and whatever the data do not tell.
    """

    matrix: Tensor

    def without(self, flat: Tensor) -> Information:
        """The same with no curvature along directions (P, k) that are known to be flat."""
        if not flat.shape[1]:
            return self
        basis = torch.linalg.qr(flat).Q
        rest = torch.eye(len(flat)).to(basis) - basis @ basis.mT
        return Information(rest @ self.matrix @ rest)

    @cached_property
    def _scaled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each coordinate in units of its own curvature; eigenvalues and eigenvectors there."""
        own = self.matrix.diagonal().abs()
        most = own.max().clamp(min=1e-300)
        # raw coordinates are of order one: a curvature of one tells something even beside that of a constant column
        unit = torch.where(own > (FLAT * most).clamp(max=1.0), own, most).rsqrt()
        values, vectors = torch.linalg.eigh(unit.unsqueeze(0) * self.matrix * unit.unsqueeze(1))
        return unit, values, vectors

    @property
    def flat(self) -> Tensor:
        """Directions (P, k), of length one, that the data do not tell."""
        unit, values, vectors = self._scaled
        directions = unit.unsqueeze(1) * vectors[:, values <= FLAT]
        return directions / directions.norm(dim=0, keepdim=True).clamp(min=1e-300)

    @property
    def blur(self) -> float:
        r"""How far flat directions may lean towards others.

        A matrix without negative eigenvalues whose entry along a direction is :math:`\epsilon`, and along another
        :math:`\lambda`, has at most :math:`\sqrt{\epsilon \lambda}` between them, which turns the former by
        :math:`\sqrt{\epsilon / \lambda}`.
        """
        _, values, _ = self._scaled
        flat, others = values[values <= FLAT], values[values > FLAT]
        if not len(flat) or not len(others):
            return 0.0
        return float((flat.abs().max() / others.min()).sqrt())

    def covariance(self) -> Tensor:
        """The inverse along all directions that the data tell (P, P); zero along the others.

        >>> Information(torch.diag(torch.tensor([4.0, 1.0]).double())).covariance().diagonal()
        tensor([0.2500, 1.0000], dtype=torch.float64)
        """
        unit, values, vectors = self._scaled
        inverse = torch.where(values > FLAT, 1 / values.clamp(min=FLAT), 0.0)
        root = unit.unsqueeze(1) * vectors
        return (root * inverse) @ root.mT


def observed_information(gradient: Callable[[Tensor], Tensor], point: Tensor) -> Information:
    """Central differences of the gradient (R, P) of minus the log-likelihood at a point (1, P).

    >>> observed_information(lambda x: x * torch.tensor([2.0, 3.0]), torch.zeros(1, 2).double()).matrix.round()
    tensor([[2., 0.],
            [0., 3.]], dtype=torch.float64)
    """
    size = point.shape[1]
    if not size:
        return Information(point.new_zeros(0, 0))
    matrix = differences(gradient, point, torch.eye(size).to(point)).detach()
    if not bool(torch.isfinite(matrix).all()):
        raise ModelError("the likelihood has no finite second derivative at the estimate")
    return Information(0.5 * (matrix + matrix.mT))


def table_information(fitted: Fitted, batch: Batch, at_once: int = 4) -> Information:
    """The observed information of a table about the raw parameters of a fitted model.

    Rows along the graph have tables that are sized for one point: few are evaluated at a time.
    """
    structure = fitted.structure
    fitted.check_densities("the information of rows")
    layout = lay_out_within(structure, batch, replace(BUDGET, approximate=False))
    placed = moved(fitted.naturals, layout)
    shapes = {key: parameter.shape for key, parameter in structure.parameters().items()}

    def loss(points: Tensor) -> Tensor:
        return -total_evidence(structure.naturals(unpack(points, shapes)), placed)

    def gradient(points: Tensor) -> Tensor:
        return torch.cat([loss_and_gradient(loss, part)[1] for part in points.split(at_once)])

    with bounded_threads(0):
        return observed_information(gradient, pack_raw(fitted))


def pack_raw(fitted: Fitted) -> Tensor:
    """The model's raw parameters as one point (1, P), in the order of its structure."""
    raw = fitted.structure.raw(fitted.naturals)
    return pack({key: raw[key] for key in fitted.structure.parameters()})


# -- flat directions ---------------------------------------------------------------------------------------------------

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


def row_information(
    problem: Units, point: Tensor, *, rows: int | None = None, groups: int | None = None, entries: int = 2**19
) -> Tensor:
    """The information of one row, (P, P): the mean square of scores at ``point`` (1, P), in raw parameters.

    Args:
        problem: What was minimised; it must be the same in every evaluation.
        point: Where.
        rows: On so many random rows; on all if left out.
        groups: How many groups of rows the scores are taken of; each row is its own if left out.
        entries: Replicas times rows times points that are evaluated at a time.
    """
    chosen_rows = None if rows is None else random_part(problem.rows, rows, seed=0)
    part = problem if chosen_rows is None else problem.subset(chosen_rows)
    part = part.laid_out_for(point) if part is not problem else part
    units = part.weight.shape[1]
    groups = units if groups is None else min(groups, units)
    member = torch.arange(units) % groups
    total = point.new_zeros(point.shape[1], point.shape[1])
    for chosen in torch.arange(groups).split(_at_once(part, entries)):
        factors = (member == chosen.unsqueeze(1)).to(part.weight)
        share = (factors * part.weight).sum(-1, keepdim=True)
        scores = share * loss_and_gradient(part.reweighted(factors).loss, point.expand(len(chosen), -1))[1]
        total += scores.T @ scores
    return total / part.weight.sum()


def flat_directions(
    problem: Units, point: Tensor, *, rows: int = 400, largest_error: float = 5.0, entries: int = 2**19
) -> list[FlatDirection]:
    """Moves at a minimum (1, P) that the data do not notice, and the parameters that they change.

    None of a problem that is too large to be checked, or that has no derivative there.

    Args:
        problem: What was minimised, as a mean over rows.
        point: Its minimum.
        rows: Rows on which directions are looked for; those that are directions are tried on all.
        largest_error: A standard error of so many spreads is none.
        entries: Replicas times rows times points that are evaluated at a time; more would take more memory than the
            fit did.
    """
    if not _can_be_checked(problem, rows):
        return []
    try:
        return _flat_directions(_Minimum(problem, point.to(problem.weight), entries), rows, largest_error)
    except (ModelError, RuntimeError):  # a density without a derivative there
        return []


def _can_be_checked(problem: Units, rows: int, parameters: int = 120, work: int = 2_000_000) -> bool:
    """Whether a check takes no longer than most fits: so many parameters, and rows times points times parameters."""
    size = sum(math.prod(shape) for shape in problem.shapes.values())
    if not 0 < size <= parameters or any(".network." in key or ".module." in key for key in problem.shapes):
        return False
    return min(problem.rows, rows) * problem.pace.points_per_row * size <= work


def _flat_directions(minimum: _Minimum, rows: int, largest_error: float) -> list[FlatDirection]:
    problem, point = minimum.problem, minimum.point
    size, total = point.shape[1], float(problem.weight.sum())
    if total < 2 * size:
        return []  # too few rows to tell what is flat from what they lack
    small = 1 / (largest_error**2 * total)
    minimum, known = _known(minimum, rows)
    values, vectors = torch.linalg.eigh(known)
    if not bool(torch.isfinite(values).all()):
        return []
    nearly, _ = minimum.that_change_something(vectors[:, values < small])
    if not nearly.shape[1]:
        return []
    # along a symmetry the loss bends as much as it still falls
    most = small + 4 * float(minimum.gradients(point).norm())
    # of the flat moves those that change parameters, as few and as plain as there are
    flat, changes = minimum.that_change_something(minimum.without_curvature(nearly, most))
    directions = []
    for direction, change in zip(flat.T, changes.T, strict=True):
        # per unit of change in what a user reads, lest a move that changes next to nothing pass for a flat one
        curvature = minimum.curvature(direction) / float(change.norm()) ** 2
        if curvature < most:
            error = (total * max(curvature, 1e-300)) ** -0.5
            directions.append(FlatDirection(_named(minimum.problem, change), error, _plain(direction)))
    return directions


def _known(minimum: _Minimum, rows: int, well_known: float = 1e7, one_by_one: int = 20_000) -> tuple[_Minimum, Tensor]:
    """The information of one row, and the problem that is looked at.

    Beyond ``well_known`` of a parameter, sums have lost the digits that tell the flat directions of others: so many
    rows are looked at one by one then.
    """
    problem, point = minimum.problem, minimum.point
    known = problem.curvature(point)
    if known is not None and not float(known.diagonal().max()) < well_known:
        problem, known = problem.row_by_row(one_by_one).laid_out_for(point), None
        minimum = replace(minimum, problem=problem)
    if known is None:
        size = point.shape[1]
        known = row_information(problem, point, rows=max(rows, 2 * size), groups=2 * size, entries=minimum.entries)
    return minimum, known


def _at_once(problem: Units, entries: int, replicas: int = 32) -> int:
    """Replicas that are evaluated together, which bounds memory."""
    return max(1, min(replicas, entries // max(1, problem.rows * problem.pace.points_per_row)))


@dataclass(frozen=True)
class _Minimum:
    """A problem at its minimum (1, P), and how it and what a user reads change around it."""

    problem: Units
    point: Tensor
    entries: int
    step: float = 3e-3
    """With which a direction that is flat on some rows is tried on all: wider than that of derivatives."""

    @property
    def at_once(self) -> int:
        """Replicas that are evaluated together."""
        return _at_once(self.problem, self.entries)

    def gradients(self, points: Tensor) -> Tensor:
        """Of the loss of all rows."""
        return loss_and_gradient(self.problem.loss, points)[1]

    def that_change_something(self, directions: Tensor, nothing: float = 1e-3) -> tuple[Tensor, Tensor]:
        """The moves (P, K) mixed so that each changes something of its own, and what they change (entries, K).

        Moves that change less than ``nothing`` a user reads, in units of the data, are left out: those of unused
        entries of a factor are flat on any rows, and to try them on all would cost passes and tell nothing.
        """
        if not directions.shape[1]:
            return directions, directions[:0]
        changes = differences(self._readable, self.point, directions.T, at_once=2 * directions.shape[1]).T
        _, strengths, mixed = torch.linalg.svd(changes, full_matrices=False)
        kept = mixed[strengths > nothing].T
        return directions @ kept, changes @ kept

    def without_curvature(self, directions: Tensor, most: float) -> Tensor:
        """Those among the moves (P, K) and their mixtures along which the loss of all rows does not bend.

        Scores of columns that follow from each other cancel too, though each has a curvature of its own.
        """
        slopes = differences(self.gradients, self.point, directions.T, step=self.step, at_once=self.at_once)
        bending = directions.T @ slopes.T
        values, mixed = torch.linalg.eigh(0.5 * (bending + bending.T))
        return directions @ mixed[:, values.abs() < most]

    def curvature(self, direction: Tensor) -> float:
        """The second derivative along a direction (P,) on all rows."""
        moves = torch.tensor([[-self.step], [0.0], [self.step]], dtype=self.point.dtype)
        with torch.no_grad():
            tried = (self.point + moves * direction).split(self.at_once)
            losses = torch.cat([self.problem.loss(few).total for few in tried])
        return float((losses[0] - 2 * losses[1] + losses[2]).abs() / self.step**2)

    def _readable(self, points: Tensor) -> Tensor:
        """Natural parameters of every replica (R, entries), each divided by its unit; logits without their level."""
        values = {}
        naturals = self.problem.naturals(points)
        for node, name, parameter in _learned(self.problem):
            value = naturals[node][name].detach().expand(len(points), *parameter.shape)
            if isinstance(self.problem.structure.mechanisms[node], Categorical) and name in ("logits", "weight"):
                value = value - value.mean(-1, keepdim=True)
            values[f"{node}.{name}"] = value if parameter.unit is None else value / parameter.unit.to(value)
        return pack(values)


def _plain(direction: Tensor, by_chance: float = 0.01) -> Tensor:
    """A move of length one without parameters of so small a share in it: these come from the choice of rows."""
    move = direction.where(direction.abs() > by_chance * direction.abs().max(), 0.0)
    return move / move.norm()


def _learned(problem: Units) -> Iterator[tuple[str, str, Parameter]]:
    for node, mechanism in problem.structure.mechanisms.items():
        for name, parameter in mechanism.declared().items():
            if parameter.learned and not name.startswith(("network.", "module.")):
                yield node, name, parameter


def _named(problem: Units, change: Tensor, takes_part: float = 0.2) -> tuple[ParameterName, ...]:
    """Parameters that change by so much of the largest change."""
    entries: list[ParameterName] = []
    for node, name, parameter in _learned(problem):
        entries += [(node, name, tuple(map(int, index))) for index in torch.ones(parameter.shape).nonzero().tolist()]
    size = change.abs()
    return tuple(entry for entry, own in zip(entries, size, strict=True) if own >= takes_part * size.max())


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
    total = 0
    for node, names in structure.keys.items():
        mechanism = structure.mechanisms[node]
        declared = mechanism.declared()
        fresh = {name: key for name, key in names.items() if key not in counted}
        counted |= set(fresh.values())
        simplex = [name for name in fresh if declared[name].support is SIMPLEX]
        total += sum(math.prod(declared[name].shape[:-1]) * (declared[name].shape[-1] - 1) for name in simplex)
        others = [name for name in fresh if name not in simplex]
        total += _rank(mechanism, {name: declared[name] for name in others})
    return total


def _rank(mechanism: Mechanism, free: Mapping[str, Parameter], most: int = 400) -> int:
    """The number of directions in which what a user reads of a node can move; of more numbers it is all of them."""
    size = sum(math.prod(parameter.shape) for parameter in free.values())
    if not 0 < size <= most:
        return size
    generator = torch.Generator().manual_seed(0)
    learned = {name: p for name, p in mechanism.declared().items() if p.learned}
    raw = {
        name: 0.3 * torch.randn(1, *p.shape, generator=generator, dtype=torch.float64) for name, p in learned.items()
    }

    def shown(flat: Tensor) -> Tensor:
        parts = flat.split([math.prod(parameter.shape) for parameter in free.values()])
        moved = {name: part.reshape(1, *free[name].shape) for name, part in zip(free, parts, strict=True)}
        described = mechanism.describe(mechanism.natural({**raw, **moved}))
        return torch.cat([value.flatten() for value in described.values()])

    start = torch.cat([raw[name].flatten() for name in free])
    derivative = torch.autograd.functional.jacobian(shown, start)
    return int(torch.linalg.matrix_rank(derivative, rtol=1e-9))
