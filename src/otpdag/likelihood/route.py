"""Which way rows of a table are summed: chosen once, from graph, mechanisms, gaps and objective.

The first that holds:

| What holds | Route |
|---|---|
| terms are weighed otherwise than in a likelihood | graph |
| every node is normal and linear in numbers, and rows show few different sets of cells | moments |
| hidden categories alone are unknown, and every observed node is read through features | states |
| anything else | graph |

All give the same likelihood. Sequences and documents have problems of their own.
"""

from __future__ import annotations

from collections.abc import Callable

from otpdag.data import Batch
from otpdag.likelihood.graph_problem import rows_along_graph
from otpdag.likelihood.linear_normal import gap_groups, rows_as_moments
from otpdag.likelihood.rows import RowObjective
from otpdag.likelihood.state_problem import has_features, rows_by_states
from otpdag.mechanisms import Normal
from otpdag.problem import Units
from otpdag.structure import Structure

MOST_GROUPS, COLUMNS_FOR_EACH_ROW, MOST_PARAMETERS = 512, 4, 4_000
"""Up to which moments are read: groups of rows that show the same cells, each of which costs about as much as so many
columns' worth of rows, and parameters, whose square is held."""

SMALLEST, LARGEST = 1e-60, 1e60
"""Spreads of columns between which no digit is lost in fourth powers of deviations, which gradients of moments hold."""

Lay = Callable[[RowObjective, Batch, int], Units]


def route_of(about: RowObjective, batch: Batch) -> Lay:
    """What lays these rows out: the first whose rule holds."""
    return next(lay_out for holds, lay_out in ROUTES if holds(about, batch))


def row_problem(about: RowObjective, batch: Batch, seed: int) -> Units:
    """Rows laid out by their route; the same seed lays them out alike."""
    return route_of(about, batch)(about, batch, seed)


def reads_moments(about: RowObjective, batch: Batch) -> bool:
    """Whether moments of rows tell all that the model reads of them, and are quicker to read."""
    if not is_linear_normal(about.structure) or about.size > MOST_PARAMETERS:
        return False
    units = (mechanism.unit for mechanism in about.structure.mechanisms.values() if isinstance(mechanism, Normal))
    if any(unit is not None and bool(((unit < SMALLEST) | (unit > LARGEST)).any()) for unit in units):
        return False
    if not batch.shares_rows or batch.weight.device.type != "cpu":
        return False
    groups = gap_groups(about.structure, batch)
    return len(groups.members) <= min(MOST_GROUPS, max(1, COLUMNS_FOR_EACH_ROW * batch.rows // (len(groups.cells) + 1)))


def reads_states(about: RowObjective, batch: Batch) -> bool:
    """Whether hidden categories alone are unknown, and every observed node is read through features."""
    hidden, mechanisms = about.structure.graph.hidden, about.structure.mechanisms
    categories = bool(hidden) and all(mechanisms[node].space.is_discrete for node in hidden)
    return categories and has_features(about.structure, batch)


def is_linear_normal(structure: Structure) -> bool:
    """Whether every node is normal as the library has it, and linear in numbers alone."""
    return all(
        type(mechanism) is Normal and not mechanism.network and not mechanism.family.discrete
        for mechanism in structure.mechanisms.values()
    )


ROUTES: tuple[tuple[Callable[[RowObjective, Batch], bool], Lay], ...] = (
    (lambda about, batch: not about.is_plain_likelihood, rows_along_graph),
    (reads_moments, rows_as_moments),
    (reads_states, rows_by_states),
    (lambda about, batch: True, rows_along_graph),
)
"""The rules of the table above, and what lays rows out where they hold."""
