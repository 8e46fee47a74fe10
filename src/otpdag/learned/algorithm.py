r"""Algorithm 1 of the paper, whatever it is that was seen: rows, pieces of sequences, documents or images.

In every step hidden values are drawn by a learned backward map, what is seen is rebuilt from them at a cost, and what
the map pushes forward is compared with what the model makes:

.. math:: \text{cost} + \eta \sum_f D(P_\phi(f), P_\theta(f)) + \epsilon\, (\log q - \log p).

A problem says what it draws, and at which cost it rebuilds (:meth:`Algorithm1.steps`); the rest is said here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from otpdag.backward import AmortizedMap, amortized_maps
from otpdag.costs import AbstractCost, PointFunction, as_cost
from otpdag.data import Batch
from otpdag.divergences.base import AbstractDivergence
from otpdag.errors import ModelError, check_choice, check_count
from otpdag.noise import Streams
from otpdag.problem import LossTerms, Problem, split_point
from otpdag.schedules import Schedule
from otpdag.settings import Objective, PushForward, Weights
from otpdag.structure import Structure, Theta

# builds backward maps of your own from the structure and the rows
MapFactory = Callable[[Structure, Batch], Sequence[AmortizedMap]]


@dataclass(frozen=True)
class Drawn:
    """Hidden values drawn from a learned backward map, on minibatches: the loss differs from step to step.

    Args:
        noise: ``"sampled"`` draws the noise of observed nodes from its prior (the paper's practice), ``"abducted"``
            recovers it exactly (the paper's theory), ``"marginal"`` integrates it out (the cost is the likelihood).
        scope: ``"joint"`` draws hidden nodes once from all of a row, ``"local"`` once for each child, from it alone.
        temperature: Of relaxed categories, a number or a schedule.
        hidden_layers: Of the backward map; one of 32, wider than the tables of the paper have columns, if left out.
        batch_size: Rows, or steps of sequences, in a step.
        costs: Ground costs of nodes that shall not have their type's default, objects or functions of two values in
            the column's own units; with noise that is not integrated out.
        backward: Builds your own backward maps, in place of the amortised ones.
    """

    noise: Literal["sampled", "abducted", "marginal"] = "sampled"
    scope: Literal["joint", "local"] = "joint"
    temperature: float | Schedule = 0.5
    hidden_layers: tuple[int, ...] | None = None
    batch_size: int = 256
    costs: Mapping[str, AbstractCost | PointFunction] = field(default_factory=dict)
    backward: MapFactory | None = None

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        check_choice("noise", self.noise, ("sampled", "abducted", "marginal"))
        check_choice("scope", self.scope, ("joint", "local"))
        check_count("batch_size", self.batch_size)
        if self.backward is not None and not callable(self.backward):
            raise ModelError(f"backward must be a function that builds maps; got {self.backward!r}")
        if self.costs and self.noise == "marginal":
            raise ModelError("with noise='marginal' the cost of a node is its log-likelihood: leave costs out")
        for cost in self.costs.values():
            as_cost(cost)

    def check_nodes(self, structure: Structure) -> None:
        """Refuse costs of nodes that are not there."""
        unknown = [node for node in self.costs if node not in structure.graph]
        if unknown:
            raise ModelError(f"costs name nodes that are not in the graph: {', '.join(map(repr, unknown))}")

    def maps(self, structure: Structure, batch: Batch) -> tuple[AmortizedMap, ...]:
        """The maps that draw what is unknown: the user's own, or amortised ones."""
        if self.backward is not None:
            return tuple(self.backward(structure, batch))
        layers = (32,) if self.hidden_layers is None else self.hidden_layers
        return amortized_maps(structure, batch, layers, local=self.scope == "local")


class Family(NamedTuple):
    """Values (R, n, width) that a backward map pushes forward, and those (R, k, width) that the model makes.

    Rows count by their masses (R or 1, n or k), all alike if they are left out; the family as a whole by its ``share``.
    Several families of a replica may lie side by side, (R * families, ...): then their mean counts.
    """

    pushed: Tensor
    made: Tensor
    pushed_mass: Tensor | None = None
    made_mass: Tensor | None = None
    share: float = 1.0


@dataclass(frozen=True)
class Step:
    """What one backward map drew in a step, and what came of it.

    Attributes:
        cost: Mean cost of what was rebuilt (R or 1,).
        families: What is compared, made one after another if it counts.
        kl: Mean of the draws' log-density under the map less that under the model (R or 1,), asked for if it counts.
    """

    cost: Tensor
    families: Iterable[Family] = ()
    kl: Callable[[], Tensor] | None = None

    def terms(self, weights: Weights, divergence: AbstractDivergence, streams: Streams) -> LossTerms:
        """The terms by their weights, one number for each replica."""
        zero = torch.zeros(len(streams)).to(self.cost)
        apart = zero
        for pushed, made, *masses, share in self.families if weights.eta else ():
            each = divergence(pushed, made, *masses, generator=streams.shared)
            apart = apart + share * each.unflatten(0, (len(streams), -1)).mean(-1)
        return LossTerms.of(
            zero,
            reconstruction=weights.reconstruction * self.cost + zero,
            divergence=weights.eta * apart,
            entropic=weights.eps * self.kl() + zero if self.kl and weights.eps else zero,
        )


class Algorithm1(Problem):
    """A problem that is drawn anew in every step."""

    objective: Objective

    @abstractmethod
    def steps(self, theta: Theta, phi: Theta, streams: Streams, progress: float) -> Iterable[Step]:
        """Draw a minibatch and what is hidden of it; one step for each backward map.

        Args:
            theta: Raw parameters of the model (R, ...).
            phi: Those of the backward maps.
            streams: Where chance comes from.
            progress: The share of all steps that is over.
        """

    def sampled(self, point: Tensor, streams: Streams, progress: float) -> LossTerms:
        """Loss terms of every replica on a fresh minibatch with fresh noise."""
        weights, push = self.objective.at(progress), self.objective.push_forward or PushForward()
        terms = LossTerms.of(torch.zeros(len(streams)).to(point))
        for step in self.steps(*split_point(point, self.shapes), streams, progress):
            terms = terms + step.terms(weights, push.divergence, streams)
        return terms
