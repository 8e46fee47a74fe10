r"""Standard errors of a fitted model's parameters, from the curvature of what was minimised.

Where that is a log-likelihood the covariance of the raw parameters is the inverse of the observed information,
:math:`I^{-1}`; of any other sum over rows, and where the model may be wrong, the sandwich
:math:`I^{-1} (\sum_n s_n s_n^\top) I^{-1}` with the slopes :math:`s_n` of single rows (Huber, 1967). The delta method
carries it to the parameters that a user reads. Intervals are even on the line on which a parameter is free: logarithms
of scales and rates, logits of probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy import special  # scipy.stats takes as long to import as pandas
from torch import Tensor

from otpdag.answers.information import (
    Information,
    delta_errors,
    flat_directions,
    observed_information,
)
from otpdag.data import Batch
from otpdag.errors import ModelError
from otpdag.mechanisms.parameters import REAL, SIMPLEX, UNIT, Parameter
from otpdag.model import Model
from otpdag.numerics import bounded_threads
from otpdag.problem import Problem, Units, differences, loss_and_gradient
from otpdag.structure import pack
from otpdag.tables import estimates

Errors = Literal["information", "sandwich", "bootstrap"]


@dataclass(frozen=True)
class Covariance:
    """Of the raw parameters (P, P), with the directions (P, k) that the data do not tell, known up to a ``blur``."""

    matrix: Tensor
    flat: Tensor
    blur: float
    is_maximum: bool

    def errors(self, slopes: Tensor) -> NDArray[np.float64]:
        """Standard errors of numbers, by their slopes (numbers, P)."""
        return delta_errors(slopes, self.matrix).numpy()

    def untold(self, slopes: Tensor, least: float = 1e-3, most: float = 0.02) -> NDArray[np.bool_]:
        """Which numbers, by their slopes (numbers, P), move along a direction that the data do not tell.

        Those with ``least`` of their slope along such directions, or more where these are known less exactly; ``most``
        is never put down to that.
        """
        if not self.flat.shape[1]:
            return np.zeros(len(slopes), dtype=bool)
        size = slopes.norm(dim=-1).clamp(min=1e-300)
        return ((slopes @ self.flat).abs().amax(-1) > max(least, min(self.blur, most)) * size).numpy()


def point_of(model: Model, problem: Problem) -> Tensor:
    """The model's parameters as a point (1, P) of the problem that it was fitted by."""
    raw = problem.structure.raw(model.fitted.naturals) | dict(model.fitted.phi)
    return pack({key: raw[key] for key in problem.shapes})


def parameter_covariance(
    problem: Problem, point: Tensor, errors: Errors = "information", most: int = 1500
) -> Covariance:
    """The covariance of the raw parameters at the end of a fit (1, P), of which there may be so many."""
    if not isinstance(problem, Units) or not problem.is_sum:
        raise ModelError(
            f"{type(problem).__name__} is no sum over rows: standard errors need a likelihood; use errors='bootstrap'"
        )
    if point.shape[1] > most:
        raise ModelError(
            f"standard errors need a matrix of all {point.shape[1]} parameters; at most {most} are "
            "supported: use errors='bootstrap'"
        )
    placed = problem.laid_out_for(point)
    mass = float(problem.unit_mass.sum())

    def gradient(points: Tensor) -> Tensor:
        return mass * loss_and_gradient(placed.loss, points)[1]

    with bounded_threads(problem.rows):
        information, moves = observed_information(gradient, point), _flat_moves(problem, point)
    information = information.without(moves)
    inverse = information.covariance()
    if errors == "sandwich" or not problem.is_likelihood:
        scores = _unit_slopes(problem, point)
        inverse = inverse @ (scores.mT @ scores) @ inverse
    blur = 0.0 if moves.shape[1] else information.blur
    return Covariance(inverse, information.flat, blur, _is_maximum(information))


def likely_points(problem: Problem, point: Tensor, draws: int, *, errors: Errors, seed: int) -> Tensor:
    """Parameters (draws, P) drawn around the end of a fit (1, P); what the data do not tell stays where it is."""
    values, vectors = torch.linalg.eigh(parameter_covariance(problem, point, errors).matrix)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(draws, len(values), generator=generator, dtype=values.dtype)
    return point + noise * values.clamp(min=0.0).sqrt() @ vectors.mT


def _flat_moves(problem: Units, point: Tensor) -> Tensor:
    """Directions (P, K) of which the scores of single rows say that no data tell them.

    Second derivatives alone know a symmetry of the model only at the very maximum.
    """
    directions = flat_directions(problem, point) if isinstance(getattr(problem, "batch", None), Batch) else []
    moves = [direction.move for direction in directions]
    return torch.stack(moves, -1).to(point) if moves else point.new_zeros(point.shape[1], 0)


def _is_maximum(information: Information) -> bool:
    matrix = information.matrix
    values = torch.linalg.eigvalsh(matrix)
    return len(values) == 0 or bool(values[0] > -1e-4 * values[-1].abs().clamp(min=1e-300))


def _unit_slopes(problem: Units, point: Tensor, step: float = 1e-3) -> Tensor:
    """Slopes of each unit's own loss, times the root of its weight (N, P): central differences.

    A weight is a number of equal rows, as where rows that agree were collapsed into one. The points that stand for what
    is unknown may move with the parameters, which needs a wider step.
    """
    slopes = differences(problem.unit_losses, point, torch.eye(point.shape[1]).to(point), step=step)
    return (slopes * problem.unit_mass / problem.weight.clamp(min=1e-300).sqrt()).mT


def standard_errors(
    model: Model, problem: Problem, *, level: float = 0.95, errors: Errors = "information"
) -> tuple[pd.DataFrame, bool]:
    """Estimate, standard error and interval of every parameter, in the order of :func:`otpdag.tables.estimates`.

    Args:
        model: The fitted model.
        problem: What it was fitted by.
        level: Nominal coverage of the intervals.
        errors: ``"information"`` or ``"sandwich"``.

    Returns:
        The columns ``node``, ``parameter``, ``at``, ``estimate``, ``std_error``, ``lower``, ``upper`` and ``note``
        (``fixed``, ``reference``, ``at the edge``, ``not identified``), and whether the estimate is a maximum.
    """
    point = point_of(model, problem)
    covariance = parameter_covariance(problem, point, errors)
    table, slopes = without_errors(model), _slopes(model, problem, point)
    if len(slopes) != len(table):
        raise RuntimeError("a parameter has no slope")
    parameters = _declared(model, table)
    largest = slopes.abs().amax(-1) if slopes.numel() else slopes.new_zeros(len(slopes))
    lines = zip(parameters, table["estimate"], table["note"], covariance.untold(slopes), largest, strict=True)
    table["note"] = [
        note or _note(parameter, float(value), bool(untold), float(slope))
        for parameter, value, note, untold, slope in lines
    ]
    table["std_error"] = np.where(table["note"] == "", covariance.errors(slopes), np.nan)
    table["lower"], table["upper"] = _ends(parameters, table["estimate"], table["std_error"], level)
    return table, covariance.is_maximum


def without_errors(model: Model) -> pd.DataFrame:
    """The same table where errors and intervals are not known."""
    table = estimates(model).rename(columns={"value": "estimate"})
    fixed = table.pop("fixed")
    table["std_error"] = table["lower"] = table["upper"] = np.nan
    table["note"] = np.where(fixed, "fixed", "")
    return table


def _declared(model: Model, table: pd.DataFrame) -> list[Parameter | None]:
    """The declaration of each line's parameter, where it has one."""
    named = zip(table["node"], table["parameter"], strict=True)
    return [model.mechanisms[str(node)].declared().get(str(name)) for node, name in named]


def _slopes(model: Model, problem: Problem, point: Tensor) -> Tensor:
    """Derivatives of all numbers that a user reads in the raw parameters (numbers, P)."""
    names = [(node, name) for node, own in model.params().items() for name in own]
    shown = [key for key in names if not key[1].startswith(("network.", "module."))]

    def described(flat: Tensor) -> Tensor:
        naturals = problem.naturals(flat.unsqueeze(0))
        tables = {node: problem.structure.mechanisms[node].describe(own) for node, own in naturals.items()}
        return torch.cat([tables[node][name][0].flatten() for node, name in shown])

    derivative = torch.autograd.functional.jacobian(described, point[0])
    return derivative.detach()


def _note(parameter: Parameter | None, value: float, is_untold: bool, slope: float) -> str:
    if slope == 0.0:
        return "reference"
    if parameter is not None and _at_edge(parameter, value, slope):
        return "at the edge"
    return "not identified" if is_untold else ""


def _at_edge(parameter: Parameter, value: float, slope: float, edge: float = 1e-5, least: float = 0.02) -> bool:
    """Whether a probability is so close to zero or one, or a scale so small a share of its unit, or at its floor.

    A positive number whose logarithm moves less than ``least`` with its raw value is within a hundredth of its floor.
    """
    if parameter.support is SIMPLEX or parameter.support is UNIT:
        return not edge < value < 1 - edge and (parameter.support is UNIT or parameter.shape[-1] > 1)
    if parameter.support is REAL:
        return False
    unit = 1.0 if parameter.unit is None else float(parameter.unit.max())
    return value < edge * unit or slope < least * value


def _ends(
    parameters: Sequence[Parameter | None], estimate: pd.Series, error: pd.Series, level: float
) -> tuple[np.ndarray, np.ndarray]:
    """Intervals that are even on the line on which each parameter is free."""
    reach = float(special.ndtri((1 + level) / 2))
    ends = np.full((2, len(estimate)), np.nan)
    for place, (parameter, value, spread) in enumerate(zip(parameters, estimate, error, strict=True)):
        if not np.isfinite(spread):
            continue
        for side, sign in enumerate((-1, 1)):
            step = sign * reach * spread
            if parameter is None or parameter.support is REAL:
                ends[side, place] = value + step
            elif parameter.support is SIMPLEX or parameter.support is UNIT:
                odds = np.log(value) - np.log1p(-value) + step / (value * (1 - value))
                ends[side, place] = 1 / (1 + np.exp(-odds))
            else:
                ends[side, place] = value * np.exp(step / value)
    return ends[0], ends[1]
