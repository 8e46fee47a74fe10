"""Which way rows of a table are summed: chosen once, from graph, mechanisms, gaps and objective.

The first that holds:

| What holds | Route |
|---|---|
| terms are weighed otherwise than in a likelihood | graph |
| every family is linear and normal, or a table of categories that all rows show | moments |
| hidden categories alone are unknown, and every observed node is read through features | states |
| anything else | graph |

All give the same likelihood. Sequences and documents have problems of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from otpdag.data import Batch
from otpdag.likelihood.graph_problem import rows_along_graph
from otpdag.likelihood.moment_problem import MomentProblem
from otpdag.likelihood.row_moments import moments_of
from otpdag.likelihood.rows import RowObjective
from otpdag.likelihood.state_problem import rows_by_features
from otpdag.problem import Units


@dataclass(frozen=True)
class Route:
    """A way to sum rows.

    Attributes:
        name: ``"moments"``, ``"states"`` or ``"graph"``.
        reason: Why it serves.
        problem: The rows laid out for it.
    """

    name: str
    reason: str
    problem: Units


def choose(about: RowObjective, batch: Batch, seed: int) -> Route:
    """The route of these rows; the same seed lays them out alike."""
    if not about.is_plain_likelihood:
        reason = "terms are weighed otherwise than in a likelihood"
        return Route("graph", reason, rows_along_graph(about, batch, seed))
    summed = summed_rows(about, batch, seed)
    if summed is not None:
        return Route("moments", "every family is linear and normal, or a table that all rows show", summed)
    in_rows = partial(rows_along_graph, about)
    by_states = rows_by_features(about.structure, batch, about.shapes, in_rows, seed)
    if by_states is not None:
        reason = "hidden categories alone are unknown, and every observed node is read through features"
        return Route("states", reason, by_states)
    return Route("graph", "rows miss other values, or nodes have no sums that tell all", in_rows(batch, seed))


def row_problem(about: RowObjective, batch: Batch, seed: int) -> Units:
    """Rows laid out by their route."""
    return choose(about, batch, seed).problem


def summed_rows(
    about: RowObjective, batch: Batch, seed: int, in_order: Callable[[], Batch] | None = None
) -> MomentProblem | None:
    """Rows as moments, where these tell all that the model reads; else None.

    ``in_order`` makes the same rows, which are complete then, in the order in which they are asked for by number.
    """
    moments = moments_of(about.structure, batch, about.shapes) if about.is_plain_likelihood else None
    if moments is None:
        return None
    in_rows, anew = partial(rows_along_graph, about), partial(row_problem, about)
    return MomentProblem(about.structure, about.shapes, moments, in_rows, anew, seed, in_order)
