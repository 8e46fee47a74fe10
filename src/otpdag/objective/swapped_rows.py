r"""States of a hidden category swapped in rows that are not read through features: a regression, a gap, another parent.

As :mod:`~otpdag.objective.swapped_states` says, but there are no sums that a swap could change. So each row counts once
in every state s, by its posterior probability r after the swap, and each mechanism that makes or reads the category
starts from these rows as it starts from any table,

.. math:: \hat\theta = \mathrm{start}\{(x_i, s) \text{ with weight } w_i r_{is}\}.

That is close to what an update of expectation-maximisation would give; the rest is left to descent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from otpdag.backward.guessed_rows import complete_table
from otpdag.data import Batch
from otpdag.errors import ModelError
from otpdag.inference.row_posterior import Fitted, state_probabilities
from otpdag.objective.direct import count_ranges
from otpdag.objective.problem import Alternatives
from otpdag.objective.swapped_states import FEWEST_STATES, GIVEN_UP, MOST_ABOVE, SWAP_ROWS, Reading, posteriors
from otpdag.objective.table_rows import TableRows
from otpdag.structure import Structure

__all__ = ["swapped_rows"]

FEW_SWAPS, FOLLOWED = 6, 18
"""So many are tried even if states are given up that cost more to remove (of three states, all): what a removal costs
is told before others are estimated anew, and where two states differ in one of many columns that is much. Of all, so
many that begin lowest go on: where they begin does not tell which of them fall (decision 0051)."""

MOST_ALONE = 3
"""Numbers among the children along each of which states are split, too: along all of them together, one that tells two
states apart may be outweighed by others that do not. Of more, those in which the widest state stands out most, as one
does that covers two."""

LEAST_SHARE = 1e-3
"""Of a row in a state, below which it is left out there: starts take less time where states are apart, and are no
better than to a thousandth anyway."""


def swapped_rows(problem: TableRows, point: Tensor) -> Alternatives | None:
    """Points with states swapped that begin near an optimum ``point`` (1, P), and rows to compare them on.

    None where there is no one hidden category whose states could be swapped, and where all swaps begin far above.
    """
    node = _swappable(problem.structure)
    is_one = len(point) == problem.batch.replicas == 1 and point.device.type == "cpu"
    if node is None or not is_one or not problem.is_likelihood:
        return None
    part = problem.on_part(SWAP_ROWS, coarse=True)
    assert isinstance(part, TableRows), "a part of a table's rows has rows"
    with torch.no_grad():
        points = torch.cat([point, *_with_swaps(part, point, node)])
        if len(points) == 1:
            return None
        losses = part.laid_out_for(points).loss(points)
    order = 1 + losses[1:].argsort()[:FOLLOWED]
    near = order[losses[order] < losses[0] + MOST_ABOVE]
    return Alternatives(part, points[near]) if len(near) else None


def _swappable(structure: Structure) -> str | None:
    """The hidden node, if there is only one, and it is a category with enough states that others read."""
    hidden = structure.graph.hidden
    if len(hidden) != 1 or not structure.hidden_categories or not structure.graph.children(*hidden):
        return None
    (node,) = hidden
    return node if structure.mechanisms[node].space.width >= FEWEST_STATES else None


def _with_swaps(part: TableRows, point: Tensor, node: str) -> list[Tensor]:
    """The point (1, P) after each swap; none where rows alone do not tell what a family starts from."""
    structure, batch, naturals = part.structure, part.batch, part.naturals(point)
    rows = _Rows.of(structure, batch, node)
    if not all(bool(own.any()) for own in rows.weight.values()):
        return []
    fitted = Fitted(structure, naturals, {}, None, count_ranges(structure, batch))
    try:
        posterior = state_probabilities(fitted, batch, node, notes=[])
    except ModelError:  # what a row misses is beyond the budget of sums there
        return []
    made, given_up = [], max(GIVEN_UP, FEW_SWAPS // max(1, posterior.shape[1] - 1))
    for along in rows.directions(posterior):
        for shared in posteriors(Reading(along, batch.weight[0], posterior), given_up):
            started = rows.started(shared)
            if any(set(structure.keys[one]) - set(own) for one, own in started.items()):
                return []  # layers of a network, which no start tells
            theta = structure.raw({one: {**own, **started.get(one, {})} for one, own in naturals.items()})
            made.append(part.packed({**part.parts(point)[0], **theta}, 1))
    return made


@dataclass(frozen=True)
class _Rows:
    """Rows of a table, gaps filled in anyhow: those of a family that a row does not show wholly count for nothing."""

    structure: Structure
    node: str
    """The hidden category."""
    values: Mapping[str, Tensor]
    """By node (N, width)."""
    weight: Mapping[str, Tensor]
    """How much each row tells of each family with the category in it (N,)."""

    @classmethod
    def of(cls, structure: Structure, batch: Batch, node: str) -> _Rows:
        values = complete_table(structure, batch, 0, np.random.default_rng(0), first=True, even_categories=True)
        weight = {}
        for one in (node, *structure.graph.children(node)):
            family = [name for name in (one, *structure.graph.parents(one)) if name != node]
            shown = [batch.fully_observed(name)[0] for name in family]
            weight[one] = batch.weight[0] * torch.stack(shown).all(0) if shown else batch.weight[0]
        return cls(structure, node, values, weight)

    def started(self, posterior: Tensor) -> dict[str, dict[str, Tensor]]:
        """Natural parameters (1, ...) of the families, each row in each state by its probability (N, S)."""
        row, state = torch.nonzero(posterior > LEAST_SHARE, as_tuple=True)
        values = {name: value[row] for name, value in self.values.items()}
        values[self.node] = torch.eye(posterior.shape[1]).to(posterior)[state]
        share = posterior[row, state]
        return self.structure.start(values, {one: own[row] * share for one, own in self.weight.items()})

    def directions(self, posterior: Tensor) -> list[Tensor]:
        """Columns (N, F) along which states are split: those of all children, and of few numbers each alone."""
        shown = self.features(posterior)
        numbers = [own for child, own in shown.items() if not self.structure.mechanisms[child].space.is_discrete]
        alone = sorted(numbers, key=lambda own: _unevenness(own, posterior), reverse=True)[:MOST_ALONE]
        return [torch.cat([*shown.values()], -1), *(alone if len(shown) > 1 else ())]

    def features(self, posterior: Tensor) -> dict[str, Tensor]:
        """What the category shows in each child (N, F): without what its other parents add, whatever the state."""
        columns = {name: self._columns(name) for name in self.values if name != self.node}
        shown = {}
        for child in self.structure.graph.children(self.node):
            others = [columns[name] for name in self.structure.graph.parents(child) if name != self.node]
            own = columns[child]
            if others:
                beside, root = torch.cat(others, -1), self.weight[child].sqrt().unsqueeze(-1)
                design = torch.cat([beside, posterior], -1)
                slopes = torch.linalg.lstsq(root * design, root * own, driver="gelsd").solution
                own = own - beside @ slopes[: beside.shape[-1]]
            shown[child] = own
        return shown

    def _columns(self, name: str) -> Tensor:
        """Values of a node on a scale on which rows can be compared."""
        comparable = self.structure.mechanisms[name].space.comparable
        return torch.as_tensor(comparable(self.values[name].double().numpy()))


def _unevenness(columns: Tensor, posterior: Tensor) -> float:
    """How many times the mean variance of columns (N, F) within a state that of the widest state is.

    >>> columns = torch.tensor([[-1.0], [1.0], [4.0], [10.0]], dtype=torch.float64)
    >>> _unevenness(columns, torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64))
    1.8
    """
    rows = posterior.sum(0).clamp(min=1e-300)
    mean, square = (posterior.T @ power / rows.unsqueeze(-1) for power in (columns, columns.square()))
    variance = (square - mean.square()).clamp(min=0.0).sum(-1)
    return float(variance.max() / (rows @ variance / rows.sum()).clamp(min=1e-300))
