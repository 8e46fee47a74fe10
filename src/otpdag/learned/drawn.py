"""How hidden values are drawn from a learned backward map, and what counts at one moment of a fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from otpdag.backward import AmortizedMap, amortized_maps
from otpdag.costs import AbstractCost, PointFunction, as_cost
from otpdag.data import Batch
from otpdag.divergences import Energy
from otpdag.divergences.base import AbstractDivergence
from otpdag.errors import ModelError, check_choice
from otpdag.schedules import Schedule, as_schedule
from otpdag.settings import Objective, PushForward, Weights
from otpdag.structure import Structure

MapFactory = Callable[[Structure, Batch], Sequence[AmortizedMap]]
"""Builds backward maps of your own from the structure and the rows."""


@dataclass(frozen=True)
class Drawn:
    """Hidden values drawn from a learned backward map, on minibatches: the loss differs from step to step.

    Args:
        noise: ``"sampled"`` draws the noise of observed nodes from its prior (the paper's practice), ``"abducted"``
            recovers it exactly (the paper's theory), ``"marginal"`` integrates it out (the cost is the likelihood).
        scope: ``"joint"`` draws hidden nodes once from all of a row, ``"local"`` once for each child, from it alone.
        temperature: Of relaxed categories, a number or a schedule.
        straight_through: Draw hard categories with soft gradients.
        extra_masking: Chance that a seen cell is hidden from the backward map during training.
        hidden_layers: Of the backward map of a table; one of 32, wider than the tables of the paper have columns, if
            left out. Sequences have a map of their own.
        batch_size: Rows in a step.
        compared: Of sequences: most steps of a family that the push-forward term compares, in each step.
        costs: Ground costs of nodes that shall not have their type's default, objects or functions of two values in
            the column's own units; with noise that is not integrated out.
        backward: Builds your own backward maps, in place of the amortised ones.
    """

    noise: Literal["sampled", "abducted", "marginal"] = "sampled"
    scope: Literal["joint", "local"] = "joint"
    temperature: float | Schedule = 0.5
    straight_through: bool = False
    extra_masking: float = 0.0
    hidden_layers: tuple[int, ...] | None = None
    batch_size: int = 256
    compared: int = 256
    costs: Mapping[str, AbstractCost | PointFunction] = field(default_factory=dict)
    backward: MapFactory | None = None

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        check_choice("noise", self.noise, ("sampled", "abducted", "marginal"))
        check_choice("scope", self.scope, ("joint", "local"))
        if self.batch_size < 1:
            raise ModelError(f"batch_size must be at least 1; got {self.batch_size}")
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

    def temperature_at(self, progress: float) -> float:
        """The temperature at a share of the steps."""
        return as_schedule(self.temperature)(progress)


@dataclass(frozen=True)
class Moment:
    """The settings of drawn terms at one moment of a fit."""

    weights: Weights
    drawn: Drawn
    temperature: float
    divergence: AbstractDivergence = field(default_factory=Energy)

    @classmethod
    def of(cls, objective: Objective, drawn: Drawn, progress: float) -> Moment:
        """At a share of all steps."""
        push = objective.push_forward or PushForward()
        return cls(objective.at(progress), drawn, drawn.temperature_at(progress), push.divergence)
