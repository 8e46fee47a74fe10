"""A problem: one data set laid out for one objective, as functions of a flat parameter matrix (R, P).

It is all that a search knows of data and models. A problem is a value: evaluating it changes nothing, and what looks
like a change (a part of the rows, other weights, points moved to where posteriors are) is another problem. It is a
function of the data, the settings and the points at which it was refined, so that whoever keeps those points can have
it again: a checkpoint needs no more of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.errors import ModelError
from otpdag.mechanisms.base import Held
from otpdag.noise import Streams
from otpdag.settings import ClosedForm, Objective
from otpdag.simulation import simulated_rows
from otpdag.structure import Naturals, Shapes, Structure, Theta, pack, unpack


@dataclass(frozen=True)
class LossTerms:
    """Weighted terms of the objective, one number for each replica."""

    reconstruction: Tensor
    divergence: Tensor
    entropic: Tensor
    direct: Tensor

    @classmethod
    def of(cls, like: Tensor, **terms: Tensor) -> LossTerms:
        """Terms that are not named are zero."""
        zero = torch.zeros_like(like)
        return cls(**{field.name: terms.get(field.name, zero) for field in fields(cls)})

    @property
    def total(self) -> Tensor:
        """Their sum."""
        return self.reconstruction + self.divergence + self.entropic + self.direct

    def __add__(self, other: LossTerms) -> LossTerms:
        """Add term by term."""
        return LossTerms(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def as_floats(self, replica: int) -> dict[str, float]:
        """The terms of one replica, for a history."""
        terms = {f.name: float(getattr(self, f.name).detach().reshape(-1)[replica]) for f in fields(self)}
        return {"loss": float(self.total.detach().reshape(-1)[replica]), **terms}


def loss_and_gradient(evaluate: Callable[[Tensor], Tensor | LossTerms], point: Tensor) -> tuple[Tensor, Tensor]:
    """Losses (R,) at a point (R, P), or the sum of their terms, and each replica's gradient (R, P)."""
    with torch.enable_grad():
        leaf = point.detach().clone().requires_grad_(True)
        told = evaluate(leaf)
        loss = told.total.expand(len(point)) if isinstance(told, LossTerms) else told
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), gradient.detach()


def with_gradient(evaluate: Callable[[Tensor, bool], tuple[Tensor, Tensor]], point: Tensor) -> Tensor:
    """Losses (R,) at a point (R, P) that are evaluated together with their gradient (R, P), if it is asked for.

    >>> at = torch.tensor([[3.0]], requires_grad=True)
    >>> torch.autograd.grad(with_gradient(lambda x, slope: ((x**2)[:, 0], 2 * x), at).sum(), at)
    (tensor([[6.]]),)
    """
    loss, gradient = evaluate(point.detach(), point.requires_grad)
    return KnownGradient.apply(loss, [gradient], point)


class KnownGradient(torch.autograd.Function):
    """A value (R,) whose gradient in some inputs (R, ...) is known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        """The value, with the gradient in each of the inputs."""
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        """By the chain rule."""
        saved = (outer.reshape(-1, *[1] * (gradient.ndim - 1)) * gradient for gradient in ctx.saved_tensors)
        return (None, None, *saved)


def differences(
    evaluate: Callable[[Tensor], Tensor], point: Tensor, moves: Tensor, *, step: float = 1e-4, at_once: int = 8
) -> Tensor:
    """Central differences (K, ...) of what is evaluated at points (R, P), along moves (K, P) from a point (1, P).

    So many points are evaluated at a time. With a ``step`` of 1e-4 in raw coordinates, which are of order one, errors
    of the step and of rounding are about 1e-8 both.

    >>> differences(lambda x: x**2, torch.ones(1, 1), torch.ones(1, 1), step=0.5)
    tensor([[2.]])
    """
    shifted = torch.cat([point + step * moves, point - step * moves])
    ahead, behind = torch.cat([evaluate(part) for part in shifted.split(at_once)]).chunk(2)
    return (ahead - behind) / (2 * step)


def curvature(
    loss: Callable[[Tensor], Tensor | LossTerms], point: Tensor, *, at_once: int = 8, joined: Tensor | None = None
) -> Tensor:
    """Second derivatives (P, P) of a loss at a point (1, P): differences of its gradients, so many at a time.

    Coordinates move together that bend nothing in common (Curtis, Powell and Reid, 1974), where it is known which pairs
    are ``joined`` (P, P).

    >>> curvature(lambda x: (x**2 * torch.tensor([1.0, 2.0])).sum(-1), torch.ones(1, 2).double()).round()
    tensor([[2., 0.],
            [0., 4.]], dtype=torch.float64)
    """
    joined = torch.ones(point.shape[1], point.shape[1], dtype=torch.bool) if joined is None else joined
    group = apart(joined.float() @ joined.float() > 0)
    moves = (group.unique().unsqueeze(1) == group).to(point)
    bent = differences(lambda at: loss_and_gradient(loss, at)[1], point, moves, at_once=at_once)[group]
    bent = bent.where(joined.to(point.device), 0.0)
    return 0.5 * (bent + bent.mT)


def apart(clash: Tensor) -> Tensor:
    """A few groups (N,) such that no two of a group clash (N, N): each joins the first that it may.

    >>> apart(torch.tensor([[True, True, False], [True, True, False], [False, False, True]]))
    tensor([0, 1, 0])
    """
    group = np.full(len(clash), -1)
    for number, own in enumerate(clash.numpy()):
        taken = np.zeros(len(clash) + 1, dtype=bool)
        taken[group[own]] = True  # the last place stands for those in no group yet
        group[number] = taken[:-1].argmin()
    return torch.from_numpy(group)


def split_theta(parameters: Mapping[str, Held]) -> tuple[dict[str, Held], dict[str, Held]]:
    """Separate the model's parameters, or what is known of each, from the backward map's."""
    theta = {key: value for key, value in parameters.items() if not key.startswith("phi.")}
    return theta, {key: value for key, value in parameters.items() if key.startswith("phi.")}


def split_point(point: Tensor, shapes: Shapes) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Raw parameters of the model at a point (R, P), and of its backward maps."""
    return split_theta(unpack(point, shapes))


def packed_point(theta: Theta, shapes: Shapes, replicas: int) -> Tensor:
    """The point (R, P) of raw parameters, each (1 or R, ...)."""
    return pack({key: theta[key].expand(replicas, *shape) for key, shape in shapes.items()})


@dataclass(frozen=True)
class Refinement:
    """What a problem became at a point: itself with something laid out anew, the point in it, and what was done.

    ``loss`` (R,) is that of the point in it, if it compares with the losses before: sums that are laid out anew
    estimate the same thing.

    Attributes:
        curved_alike: Whether an optimiser may go on with the curvature that it has learned.
    """

    problem: Problem
    point: Tensor
    what: str
    loss: Tensor | None = None
    curved_alike: bool = False


@dataclass(frozen=True)
class Proposals:
    """Points (K, P) from which descent may lead to a lower optimum than the one they were made from.

    ``part`` is the problem on as many rows as tell which of them does.
    """

    part: Problem
    points: Tensor


@dataclass(frozen=True)
class Pace:
    """How long a search goes on with a problem, and when it refines it.

    Args:
        points_per_row: How many points stand for what is unknown in a row: the work of a row, in units of a complete
            one's.
        span: The share of a stochastic optimiser's steps at which this problem begins and ends to be minimised.
        steps: Most steps of an optimiser before the problem is refined; None if it shall converge first.
        patience: Steps after which a problem that has not settled is refined already; None if it is not.
        refinements: How often it must be free to be refined, also when it is resampled, for estimates to settle.
        metric_steps: Steps of descent after which the metric is taken anew, where it changes much on the way.
        renews_curvature: Whether curvature taken where a part of the rows has settled serves better than what was
            learned there.
        least: What no loss is below: a step that promised more would lead to where the loss is flat.
        easy_rows: Rows on which the best start settles first, as they are quick and lead near the optimum.
    """

    points_per_row: int = 1
    span: tuple[float, float] = (0.0, 1.0)
    steps: int | None = None
    patience: int | None = None
    refinements: int = 0
    metric_steps: int | None = None
    renews_curvature: bool = False
    least: float = -math.inf
    easy_rows: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Updates:
    """What closed-form updates of a problem may be used for.

    Args:
        suffice: Whether every parameter has an update that leads far, so that they run alone; else descent follows.
        stretched: Coordinates (P,) in which they may be over-relaxed; all if left out.
        apart: Whether replicas may be updated without the others: nothing is laid out or weighed for each of them.
    """

    suffice: bool = True
    stretched: Tensor | None = None
    apart: bool = False


class Problem(ABC):
    """What is minimised. :meth:`loss`, or :meth:`Minibatched.sampled`, must be there; all else has a default."""

    structure: Structure
    shapes: Shapes

    # -- size ---------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows, steps of sequences, documents or images."""

    @property
    def pace(self) -> Pace:
        """How long a search goes on with it, and when it refines it."""
        return Pace()

    def notes(self, point: Tensor | None = None) -> tuple[str, ...]:
        """What is approximate about sums that are exact elsewhere; at an estimate ``point`` (R, P), also what to know.

        A problem whose sums are exact says nothing before there is an estimate.
        """
        return ()

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def loss(self, point: Tensor) -> LossTerms:
        """Loss terms of every replica at ``point`` (R, P), the same in every evaluation."""
        raise ModelError(f"{type(self).__name__} is drawn anew in every step: use otp.engine.Adam")

    def metric(self, points: Tensor) -> Tensor | None:
        """How the loss bends near ``points`` (R, P): a matrix (R, P, P), or its diagonal (R, P); None where unknown.

        It need not be exact: a part of the rows tells it, or what a row would tell if nothing were missing.
        """
        return None

    @property
    def updates(self) -> Updates | None:
        """What :meth:`update` may be used for, of all replicas at once; None if there is none."""
        return None

    def update(self, point: Tensor) -> tuple[Tensor, LossTerms]:
        """The point (R, P) that expectation-maximisation or scoring goes to from ``point``, and the terms there."""
        raise ModelError(f"{type(self).__name__} has no closed-form updates")

    # -- other problems -----------------------------------------------------------------------------------------------

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> Problem:
        """The problem on so many random rows, or on these; ``coarse`` allows sums that are rougher and faster."""
        return self

    def laid_out_for(self, points: Tensor) -> Self:
        """The problem with what stands for unknown numbers placed for the replicas ``points`` (R, P)."""
        return self

    def refine(self, point: Tensor) -> Refinement | None:
        """What it becomes after it was minimised; None if there is nothing to lay out anew, and the end is the end."""
        return None

    def proposals(self, point: Tensor) -> Proposals | None:
        """Where else to look once nothing moves at ``point`` (1, P) any more; None if there is no such place."""
        return None

    # -- parameters ---------------------------------------------------------------------------------------------------

    def naturals(self, point: Tensor) -> Naturals:
        """Natural parameters of the model."""
        return self.structure.naturals(split_point(point, self.shapes)[0])


@dataclass(frozen=True, eq=False)
class Batched(Problem):
    """A problem of rows that are at hand.

    Attributes:
        structure: Graph and mechanisms.
        batch: The rows of a table, or sequences.
        shapes: Of all parameters of a flat point, in their order.
    """

    structure: Structure
    batch: Batch | SequenceBatch
    shapes: Shapes

    @property
    def rows(self) -> int:
        """Rows of the table, or steps of all sequences."""
        return self.batch.rows


@runtime_checkable
class Minibatched(Protocol):
    """A problem that is drawn anew in every step."""

    def sampled(self, point: Tensor, streams: Streams, progress: float) -> LossTerms:
        """Loss terms of every replica on a fresh minibatch with fresh noise, at a share of all steps."""
        ...


class Units(Problem):
    """A problem of units that can be weighed: rows of a table, whole sequences.

    Bootstrap, robust fits and standard errors follow from what is said here.
    """

    @property
    def is_likelihood(self) -> bool:
        """Whether the loss is minus the mean log-likelihood, so that its curvature is the observed information."""
        return False

    @property
    def is_sum(self) -> bool:
        """Whether the loss is a mean of single units' losses, as :meth:`unit_losses` tells them."""
        return self.is_likelihood

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """Weights of the units (1, N)."""

    @property
    def unit_mass(self) -> Tensor:
        """How much each unit counts in the mean (1, N): its weight; of a sequence, times its steps."""
        return self.weight

    def in_units(self) -> Units:
        """The problem in enough units to be resampled."""
        return self

    @abstractmethod
    def reweighted(self, factors: Tensor) -> Units:
        """The problem with the units' weights multiplied by ``factors`` (R or 1, N)."""

    def unit_losses(self, points: Tensor) -> Tensor:
        """The loss of each unit at every replica's parameters (R, N), without gradients."""
        raise ModelError(f"{type(self).__name__} has no loss of single rows")

    def simulated(self, point: Tensor, size: int, seed: int) -> Units:
        """The problem of data that the model at ``point`` (1, P) makes, with gaps like the data's; about ``size``."""
        raise ModelError(f"{type(self).__name__} cannot be simulated")

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> Units:
        """The problem on so many random rows, or on these units."""
        return self

    def row_by_row(self, rows: int) -> Units:
        """The problem on so many random rows, each looked at for itself, which has second derivatives."""
        return self.subset(rows)

    def curvature(self, point: Tensor) -> Tensor | None:
        """Second derivatives of the loss at ``point`` (1, P), (P, P); None where they cost more than rows' scores."""
        return None


@dataclass(frozen=True)
class RowObjective:
    """A model's objective in closed form: the same for all rows, parts of them, and rows that the model makes.

    Attributes:
        structure: Graph and mechanisms, in the units of the data.
        shapes: Of all parameters of a flat point, in their order.
        weights: Of the terms of the objective.
        closed: How what rows miss is summed.
    """

    structure: Structure
    shapes: Shapes
    weights: Objective
    closed: ClosedForm

    @property
    def is_plain_likelihood(self) -> bool:
        """Whether nothing is tempered, and no other term counts."""
        weights = self.weights.at(1.0)
        plain = weights.eps == weights.reconstruction == 1.0 and self.closed.reference == "model"
        return plain and self.weights.push_forward is None

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())


@dataclass(frozen=True, eq=False)
class BatchUnits(Batched, Units):
    """Rows or sequences that are at hand, and can be weighed.

    Attributes:
        seed: Determines which of them are in a part.
    """

    seed: int

    @abstractmethod
    def of_batch(self, batch: Any, seed: int) -> Self:
        """The problem of other rows, or sequences."""

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> Self:
        """So many random rows, or about so many steps; or these units."""
        part = self.batch.part(rows, self.seed)
        return self if part is self.batch else self.of_batch(part, self.seed)


LayOut = Callable[..., Units]  # lays a `batch` out for the same objective, by a `seed`


@dataclass(frozen=True, eq=False)
class TableRows(BatchUnits):
    """Rows of a table, whatever is done with them.

    Attributes:
        route: Which way they are summed; see :mod:`~otpdag.likelihood.row_problem`.
    """

    batch: Batch
    route: ClassVar[str] = ""

    @property
    def weight(self) -> Tensor:
        """Weights of the rows (1, N)."""
        return self.batch.weight

    def drawn(self, point: Tensor, size: int, seed: int) -> Batch:
        """Rows that the model at ``point`` (1, P) makes, each with the gaps and covariates of a random row."""
        return simulated_rows(self.structure, self.naturals(point.detach()), self.batch, size, seed)

    def simulated(self, point: Tensor, size: int, seed: int) -> Self:
        """The problem of rows that the model makes."""
        return self.of_batch(self.drawn(point, size, seed), seed)

    def reweighted(self, factors: Tensor) -> Self:
        """The same rows with other weights."""
        return replace(self, batch=replace(self.batch, weight=self.batch.weight * factors))


@dataclass(frozen=True, eq=False)
class SummedRows(TableRows):
    """Rows whose likelihood is read from sums over them.

    Attributes:
        in_rows: Makes the problem of the same objective that looks at every row.
    """

    in_rows: LayOut

    is_likelihood = True  # other objectives are not laid out so

    def row_by_row(self, rows: int) -> Units:
        """So many of the rows, looked at one by one."""
        return self.in_rows(batch=self.batch.part(rows, self.seed), seed=self.seed)

    def unit_losses(self, points: Tensor) -> Tensor:
        """The loss of every row (R, N)."""
        return self.row_by_row(self.rows).unit_losses(points)


def units_of(problem: Problem) -> Units:
    """The same problem, whose units can be weighed.

    Raises:
        ModelError: It has none.
    """
    if not isinstance(problem, Units):
        raise ModelError(f"{type(problem).__name__} has no rows that could be weighted")
    return problem


@dataclass(frozen=True)
class WrappedProblem(Problem):
    """Another problem, minimised in another way."""

    base: Problem

    @property
    def structure(self) -> Structure:  # type: ignore[override]
        """Of the problem itself."""
        return self.base.structure

    @property
    def shapes(self) -> Shapes:  # type: ignore[override]
        """Of the problem itself."""
        return self.base.shapes

    @property
    def rows(self) -> int:
        """Of the problem itself."""
        return self.base.rows

    @property
    def pace(self) -> Pace:
        """The work of a row is that of the problem itself."""
        return Pace(points_per_row=self.base.pace.points_per_row)
