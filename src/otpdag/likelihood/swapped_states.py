r"""A way out of optima in which two states share what one explains, and one covers what needs two.

Expectation-maximisation cannot carry a state through rows that others explain. So at an optimum a state that others can
do without gives up its rows and takes half of those of another one (split and merge: Ueda, Nakano, Ghahramani and
Hinton 2000). What a state is worth is what its removal costs,

.. math:: D_a = -\frac{1}{n} \sum_i w_i \log (1 - r_{ia}), \qquad r_{ib} \to r_{ib} / (1 - r_{ia}),

with the posterior probabilities r; a state is split across the leading component of its rows' features. Points with
states swapped that begin near the optimum are proposed to the search, which leaves it where one of them leads lower.

Where rows or steps are read through features, such a point is the maximum at the sums of rows shared anew. Elsewhere (a
regression, a gap, another parent) each row counts once in every state s, by its posterior probability r after the swap,
and each mechanism that makes or reads the category starts from these rows as from any table,

.. math:: \hat\theta = \mathrm{start}\{(x_i, s) \text{ with weight } w_i r_{is}\}.

That is close to what an update of expectation-maximisation would give; the rest is left to descent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.likelihood.starts import complete_table
from otpdag.problem import Problem, Proposals, TableRows, packed_point, split_point
from otpdag.structure import Structure

SWAP_ROWS = 2_000  # on which swaps are made and compared (decision 0037)
FEWEST_STATES = 3  # of two there is nothing to swap
GIVEN_UP, MOST_SPLIT = 2, 12  # of the states that cost least to remove, and of those with most rows
TURNS = 12  # of the power method, from the mean square of features: a split needs no more than a direction
MOST_POSTERIOR = 1 - 1e-9  # of a state that is removed: rows that it alone explains cost much, not infinitely much
# of a row's log-likelihood, by which a swap may begin above the optimum: of 100 of mixtures and chains four were left,
# by swaps that began 0.21 below to 0.006 above them; in easy ones that were kept none began below 0.066 above them
# (decision 0047)
MOST_ABOVE = 0.05


@dataclass(frozen=True)
class Reading:
    """Features (n, F) of rows, the last one a one, their weights (n,), and posterior probabilities of states (n, S)."""

    features: Tensor
    weight: Tensor
    posterior: Tensor


@dataclass(frozen=True)
class Swap:
    """Posterior probabilities (n, S) after one state gave up its rows and took half of those of another one."""

    posterior: Tensor
    given_up: int
    split: int


def swaps(reading: Reading, given_up: int = GIVEN_UP) -> Iterator[Swap]:
    """All swaps that are tried, where so many states are given up; none where there are fewer than three states.

    >>> x = torch.tensor([[-5.0], [-5.1], [0.0], [0.1], [5.0], [5.1]], dtype=torch.float64)
    >>> shared = torch.tensor([[0.5, 0.5, 0.0]] * 2 + [[0.0, 0.0, 1.0]] * 4, dtype=torch.float64)
    >>> first = next(swaps(Reading(torch.cat([x, torch.ones_like(x)], -1), torch.ones(6).double(), shared)))
    >>> first.posterior.sum(0).tolist()  # the first gave up its rows, and has half of those of the third
    [2.0, 2.0, 2.0]
    """
    posterior, weight = reading.posterior, reading.weight.unsqueeze(-1)
    if posterior.shape[1] < FEWEST_STATES:
        return
    left = 1 - posterior.clamp(max=MOST_POSTERIOR)
    cost = -(weight * left.log()).sum(0)
    largest = (weight * posterior).sum(0).argsort(descending=True)[:MOST_SPLIT].tolist()
    half = _halves(reading.features, weight * posterior)
    for gone in cost.argsort()[:given_up].tolist():
        rest = posterior / left[:, [gone]]
        for split in largest:
            if split != gone:
                one = rest.clone()
                one[:, gone] = rest[:, split] * half[:, split]
                one[:, split] -= one[:, gone]
                yield Swap(one, gone, split)


def swapped_pairs(pair: Tensor, count: Tensor, swap: Swap) -> Tensor:
    """Expected counts of a state after another one, from those before (S, S), after a swap to ``count`` (S,) steps.

    Rows that a state gives up follow rows of the one that they go to. What of a split state followed the same state
    is shared out as if halves lasted as long as the whole did, and as if each step chose one anew, half and half.
    """
    both, one, whole = [swap.given_up, swap.split], pair.clone(), count.clone()
    one[swap.given_up], one[:, swap.given_up] = 0.0, 0.0
    whole[swap.given_up], whole[swap.split] = 0.0, count[both].sum()
    one += torch.diag((whole - one.sum(0)).clamp(min=0.0))
    share = count[both] / whole[swap.split].clamp(min=1e-300)
    among = 0.5 * one[swap.split, swap.split] * (torch.diag(share) + torch.outer(share, share))
    after, before = one[swap.split].clone(), one[:, swap.split].clone()
    one[both], one[:, both] = torch.outer(share, after), torch.outer(before, share)
    one[swap.given_up, both], one[swap.split, both] = among
    return one


def _halves(features: Tensor, taken: Tensor) -> Tensor:
    """Which rows (n, S) lie on one side of the leading component of each state's features."""
    count = taken.sum(0).clamp(min=1e-300)
    total = taken.sum()
    level = taken.sum(-1) @ features / total
    spread = (taken.sum(-1) @ (features - level).square() / total).sqrt()
    scaled = (features - level) / torch.where(spread > 0, spread, 1.0)
    centre = taken.T @ scaled / count.unsqueeze(-1)
    direction = (taken.T @ scaled.square() / count.unsqueeze(-1)).sqrt()
    for _ in range(TURNS):
        along = taken * (scaled @ direction.T - (centre * direction).sum(-1))
        direction = along.T @ scaled - along.sum(0).unsqueeze(-1) * centre
        direction = direction / direction.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    return (scaled @ direction.T > (centre * direction).sum(-1)).to(taken)


def near(part: Problem, point: Tensor, candidates: Tensor, losses_at: Callable[[Tensor], Tensor]) -> Proposals | None:
    """Of points (K, P) those that begin lowest and near an optimum ``point`` (1, P), to be compared on ``part``.

    None where none does: they would come back to it. Losses (R,) are those ``at`` points on the part.
    """
    if not len(candidates):
        return None
    points = torch.cat([point, candidates])
    losses = losses_at(points)
    order = 1 + losses[1:].argsort()[:FOLLOWED]
    order = order[losses[order] < losses[0] + MOST_ABOVE]
    return Proposals(part, points[order]) if len(order) else None


# So many are tried even if states are given up that cost more to remove (of three states, all): what a removal costs is
# told before others are estimated anew, and where two states differ in one of many columns that is much. Of all, so
# many that begin lowest go on: where they begin does not tell which of them fall (decision 0051).
FEW_SWAPS, FOLLOWED = 6, 18

# Numbers among the children along each of which states are split, too: along all of them together, one that tells two
# states apart may be outweighed by others that do not. Of more, those in which the widest state stands out most, as one
# does that covers two.
MOST_ALONE = 3

# of a row in a state, below which it is left out there: starts take less time where states are apart, and are no better
# than to a thousandth anyway
LEAST_SHARE = 1e-3


# of a part of the rows, at a point (1, P), posterior probabilities of a hidden category (N, K)
Probabilities = Callable[[TableRows, Tensor, str], Tensor]


def swapped_rows(problem: TableRows, point: Tensor, probabilities: Probabilities) -> Proposals | None:
    """Points with states swapped that begin near an optimum ``point`` (1, P), and rows to compare them on.

    None where there is no one hidden category whose states could be swapped, and where all swaps begin far above.
    """
    structure, hidden = problem.structure, problem.structure.graph.hidden
    is_one = len(hidden) == len(point) == problem.batch.replicas == 1 and point.device.type == "cpu"
    if not is_one or not problem.is_likelihood or not structure.graph.children(*hidden):
        return None
    (node,) = hidden
    if structure.mechanisms[node].space.width < FEWEST_STATES:
        return None
    part = problem.subset(SWAP_ROWS, coarse=True)
    assert isinstance(part, TableRows), "a part of a table's rows has rows"
    with torch.no_grad():
        swapped = torch.cat([point[:0], *_with_swaps(part, point, node, probabilities)])
        return near(part, point, swapped, lambda points: part.laid_out_for(points).loss(points).total)


def _with_swaps(part: TableRows, point: Tensor, node: str, probabilities: Probabilities) -> list[Tensor]:
    """The point (1, P) after each swap; none where rows alone do not tell what a family starts from."""
    structure, batch, naturals = part.structure, part.batch, part.naturals(point)
    rows = _Rows.of(structure, batch, node)
    if not all(bool(own.any()) for own in rows.weight.values()):
        return []
    posterior = probabilities(part, point, node)
    made, given_up = [], max(GIVEN_UP, FEW_SWAPS // max(1, posterior.shape[1] - 1))
    for along in rows.directions(posterior):
        for swap in swaps(Reading(along, batch.weight[0], posterior), given_up):
            started = rows.started(swap.posterior)
            if any(set(structure.keys[one]) - set(own) for one, own in started.items()):
                return []  # layers of a network, which no start tells
            theta = structure.raw({one: {**own, **started.get(one, {})} for one, own in naturals.items()})
            made.append(packed_point({**split_point(point, part.shapes)[0], **theta}, part.shapes, 1))
    return made


@dataclass(frozen=True)
class _Rows:
    """Rows of a table, gaps filled in anyhow: those of a family that a row does not show wholly count for nothing.

    Attributes:
        node: The hidden category.
        values: By node (N, width).
        weight: How much each row tells of each family with the category in it (N,).
    """

    structure: Structure
    node: str
    values: Mapping[str, Tensor]
    weight: Mapping[str, Tensor]

    @classmethod
    def of(cls, structure: Structure, batch: Batch, node: str) -> _Rows:
        values = complete_table(structure, batch, np.random.default_rng(0), first=True, even_categories=True)
        weight = {}
        for one in (node, *structure.graph.children(node)):
            family = [name for name in (one, *structure.graph.parents(one)) if name != node]
            shown = [batch.mask[name].all(-1)[0] for name in family]
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
