"""Which way rows of a table are summed: by moments, by states of hidden categories, or along the graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from otpdag.data import Batch
from otpdag.likelihood.graph_problem import rows_along_graph
from otpdag.likelihood.moment_problem import MomentProblem
from otpdag.likelihood.row_moments import moments_of
from otpdag.likelihood.rows import RowObjective
from otpdag.likelihood.state_problem import rows_by_features
from otpdag.problem import Units


def row_problem(about: RowObjective, batch: Batch, seed: int) -> Units:
    """Rows laid out for the closed form: summed up where moments tell all that the model reads, else one by one.

    The same seed lays them out alike.
    """
    summed = summed_rows(about, batch, seed)
    if summed is not None:
        return summed
    if about.is_plain_likelihood:
        in_rows = partial(rows_along_graph, about)
        by_states = rows_by_features(about.structure, batch, about.shapes, in_rows, seed)
        if by_states is not None:
            return by_states
    return rows_along_graph(about, batch, seed)


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
