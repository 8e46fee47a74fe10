"""What the rows of a table are laid out for, whichever way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from otpdag.objective.settings import ClosedForm, Objective
from otpdag.structure import Structure

__all__ = ["RowObjective"]


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
    shapes: Mapping[str, tuple[int, ...]]
    weights: Objective
    closed: ClosedForm
