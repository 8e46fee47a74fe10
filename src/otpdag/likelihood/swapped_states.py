r"""A way out of optima in which two states share what one explains, and one covers what needs two.

Expectation-maximisation cannot carry a state through rows that others explain. So at an optimum a state that others can
do without gives up its rows and takes half of those of another one (split and merge: Ueda, Nakano, Ghahramani and
Hinton 2000). What a state is worth is what its removal costs,

.. math:: D_a = -\frac{1}{n} \sum_i w_i \log (1 - r_{ia}), \qquad r_{ib} \to r_{ib} / (1 - r_{ia}),

with the posterior probabilities r; a state is split across the leading component of its rows' features. All swaps run
side by side on a part of the rows, the best few on all of them; the optimum is left where one of them is lower.

States of a hidden category swapped in rows that are not read through features: a regression, a gap, another parent.

There, no sums could be changed by a swap. So each row counts once in every state s, by its posterior probability r
after the swap, and each mechanism that makes or reads the category starts from these rows as from any table,

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
from otpdag.likelihood.rows import TableRows
from otpdag.likelihood.starts import complete_table
from otpdag.problem import Problem, Proposals, Refinement, packed_point, split_point
from otpdag.structure import Structure

SWAP_ROWS = 2_000  # on which swaps are made and compared (decision 0037)
FEWEST_STATES = 3  # of two there is nothing to swap
GIVEN_UP, MOST_SPLIT = 2, 12
"""Of the states that cost least to remove, and of those with most rows."""
TURNS = 12  # of the power method, from the mean square of features: a split needs no more than a direction
MOST_POSTERIOR = 1 - 1e-9  # of a state that is removed: rows that it alone explains cost much, not infinitely much
EARLY_STEPS, FINALISTS, LATE_STEPS = 4, 2, 6
"""Updates of all swaps on a part of the rows, and of how many of them on all."""
MOST_ABOVE = 0.05
"""Of a row's log-likelihood, by which a swap may begin above the optimum: of 100 of mixtures and chains four were left,
by swaps that began 0.21 below to 0.006 above them; in easy ones that were kept none began below 0.066 above them
(decision 0047)."""
LEAST_FALL = 1e-5  # the relative fall of the loss from which on a swap is taken

Updates = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From points (R, P) the updated ones, and the losses (R,) before."""


@dataclass(frozen=True)
class Reading:
    """Features (n, F) of rows, the last one a one, their weights (n,), and posterior probabilities of states (n, S)."""

    features: Tensor
    weight: Tensor
    posterior: Tensor


@dataclass(frozen=True)
class Swaps:
    """What K swaps of states lead to.

    Attributes:
        sums: Expected sums of features (K, S, F).
        given_up: The state that gave up its rows (K,).
        split: The state half of whose rows it took (K,).
    """

    sums: Tensor
    given_up: Tensor
    split: Tensor

    def __len__(self) -> int:
        return len(self.sums)


def swaps(reading: Reading) -> Swaps:
    """All swaps of states that are tried; none where there are fewer than three.

    >>> x = torch.tensor([[-5.0], [-5.1], [0.0], [0.1], [5.0], [5.1]], dtype=torch.float64)
    >>> shared = torch.tensor([[0.5, 0.5, 0.0]] * 2 + [[0.0, 0.0, 1.0]] * 4, dtype=torch.float64)
    >>> tried = swaps(Reading(torch.cat([x, torch.ones_like(x)], -1), torch.ones(6).double(), shared))
    >>> tried.sums[
    ...     0, :, 1
    ... ].tolist()  # rows of each state: the first gave up its own, and has half of those of the third
    [2.0, 2.0, 2.0]
    """
    features, taken = reading.features, reading.weight.unsqueeze(-1) * reading.posterior
    half = _halves(features, taken) if taken.shape[1] >= FEWEST_STATES else taken
    made, which = [features.new_zeros(0, taken.shape[1], features.shape[1])], [torch.zeros(0, 2, dtype=torch.long)]
    for given_up, others in _exchanged(reading):
        rest = taken * _passed_on(reading.posterior, given_up)
        sums, halves = rest.T @ features, (rest * half).T @ features
        for split in others:
            one = sums.clone()
            one[given_up] = halves[split]
            one[split] -= halves[split]
            made.append(one.unsqueeze(0))
            which.append(torch.tensor([[given_up, split]]))
    return Swaps(torch.cat(made), *torch.cat(which).T)


def posteriors(reading: Reading, given_up: int = GIVEN_UP) -> Iterator[Tensor]:
    """Posterior probabilities (n, S) of states after each swap, for whom sums do not tell enough.

    They are those of :func:`swaps`, or others if another number of states is given up.
    """
    posterior = reading.posterior
    half = _halves(reading.features, reading.weight.unsqueeze(-1) * posterior)
    for gone, others in _exchanged(reading, given_up):
        rest = posterior * _passed_on(posterior, gone)
        for split in others:
            one = rest.clone()
            one[:, gone] = rest[:, split] * half[:, split]
            one[:, split] -= one[:, gone]
            yield one


def _exchanged(reading: Reading, given_up: int = GIVEN_UP) -> list[tuple[int, list[int]]]:
    """So many states that are given up, each with those that are split for it."""
    posterior, weight = reading.posterior, reading.weight.unsqueeze(-1)
    if posterior.shape[1] < FEWEST_STATES:
        return []
    cost = -(weight * (1 - posterior.clamp(max=MOST_POSTERIOR)).log()).sum(0)
    largest = (weight * posterior).sum(0).argsort(descending=True)[:MOST_SPLIT].tolist()
    return [(one, [split for split in largest if split != one]) for one in cost.argsort()[:given_up].tolist()]


def _passed_on(posterior: Tensor, given_up: int) -> Tensor:
    """By what posterior probabilities (n, S) grow as a state gives up its rows: its own become zero."""
    left = 1 - posterior[:, [given_up]].clamp(max=MOST_POSTERIOR)
    factor = (1 / left).repeat(1, posterior.shape[1])
    factor[:, given_up] = 0.0
    return factor


def swapped_pairs(pair: Tensor, tried: Swaps) -> Tensor:
    """Expected counts (K, S, S) of a state after another one, from those before (S, S), after each swap.

    Rows that a state gives up follow rows of the one that they go to. What of a split state followed the same state
    is shared out as if halves lasted as long as the whole did, and as if each step chose one anew, half and half.
    """
    made, kept = [], pair.numpy()
    for count, given_up, split in zip(tried.sums[..., -1].numpy(), tried.given_up, tried.split, strict=True):
        both, one, whole = [int(given_up), int(split)], kept.copy(), count.copy()
        one[both[0]], one[:, both[0]] = 0.0, 0.0
        whole[both] = 0.0, count[both].sum()
        one += np.diag(np.maximum(whole - one.sum(0), 0.0))
        share = count[both] / max(whole[both[1]], 1e-300)
        among = 0.5 * one[both[1], both[1]] * (np.diag(share) + np.outer(share, share))
        after, before = one[both[1]].copy(), one[:, both[1]].copy()
        one[both], one[:, both] = np.outer(share, after), np.outer(before, share)
        one[np.ix_(both, both)] = among
        made.append(one)
    return torch.from_numpy(np.stack(made))


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


def swapped(problem: Problem, part: Problem, point: Tensor, candidates: Tensor) -> Refinement | None:
    """A problem at the best of points (K, P) with swapped states, where its loss is lower than at ``point`` (1, P)."""
    if not len(candidates):
        return None
    lowest = lowest_swap(point, candidates, _updates_of(part), _updates_of(problem))
    if lowest is None:
        return None
    (moved, loss), (_, before) = lowest, _updates_of(problem)(point)
    is_lower = bool(loss < before - LEAST_FALL * (1 + before.abs()))
    return Refinement(problem, moved, "states swapped", loss) if is_lower else None


def _updates_of(problem: Problem) -> Updates:
    def updates(points: Tensor) -> tuple[Tensor, Tensor]:
        moved, terms = problem.update(points)
        return moved, terms.total

    return updates


def lowest_swap(point: Tensor, candidates: Tensor, on_part: Updates, on_all: Updates) -> tuple[Tensor, Tensor] | None:
    """The best of many points after updates on a part of the rows, then on all: it (1, P), and its loss (1,).

    None where none of them begins near ``point`` (1, P), the optimum that they were made from: they would come back to
    it.
    """
    points, losses = on_part(torch.cat([point, candidates]))
    if not bool((losses[1:] < losses[0] + MOST_ABOVE).any()):
        return None
    points = points[1:]
    for _ in range(EARLY_STEPS - 1):
        points, losses = on_part(points)
    points = points[losses.nan_to_num(nan=torch.inf).argsort()[:FINALISTS]]
    for _ in range(LATE_STEPS):
        points, losses = on_all(points)
    _, losses = on_all(points)
    best = losses.nan_to_num(nan=torch.inf).argmin().reshape(1)
    return points[best], losses[best]


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


Probabilities = Callable[[TableRows, Tensor, str], Tensor]
"""Of a part of the rows, at a point (1, P), posterior probabilities of a hidden category (N, K)."""


def swapped_rows(problem: TableRows, point: Tensor, probabilities: Probabilities) -> Proposals | None:
    """Points with states swapped that begin near an optimum ``point`` (1, P), and rows to compare them on.

    None where there is no one hidden category whose states could be swapped, and where all swaps begin far above.
    """
    node = _swappable(problem.structure)
    is_one = len(point) == problem.batch.replicas == 1 and point.device.type == "cpu"
    if node is None or not is_one or not problem.is_likelihood:
        return None
    part = problem.subset(SWAP_ROWS, coarse=True)
    assert isinstance(part, TableRows), "a part of a table's rows has rows"
    with torch.no_grad():
        points = torch.cat([point, *_with_swaps(part, point, node, probabilities)])
        if len(points) == 1:
            return None
        losses = part.laid_out_for(points).loss(points).total
    order = 1 + losses[1:].argsort()[:FOLLOWED]
    near = order[losses[order] < losses[0] + MOST_ABOVE]
    return Proposals(part, points[near]) if len(near) else None


def _swappable(structure: Structure) -> str | None:
    """The hidden node, if there is only one, and it is a category with enough states that others read."""
    hidden = structure.graph.hidden
    if len(hidden) != 1 or not structure.hidden_categories or not structure.graph.children(*hidden):
        return None
    (node,) = hidden
    return node if structure.mechanisms[node].space.width >= FEWEST_STATES else None


def _with_swaps(part: TableRows, point: Tensor, node: str, probabilities: Probabilities) -> list[Tensor]:
    """The point (1, P) after each swap; none where rows alone do not tell what a family starts from."""
    structure, batch, naturals = part.structure, part.batch, part.naturals(point)
    rows = _Rows.of(structure, batch, node)
    if not all(bool(own.any()) for own in rows.weight.values()):
        return []
    posterior = probabilities(part, point, node)
    made, given_up = [], max(GIVEN_UP, FEW_SWAPS // max(1, posterior.shape[1] - 1))
    for along in rows.directions(posterior):
        for shared in posteriors(Reading(along, batch.weight[0], posterior), given_up):
            started = rows.started(shared)
            if any(set(structure.keys[one]) - set(own) for one, own in started.items()):
                return []  # layers of a network, which no start tells
            theta = structure.raw({one: {**own, **started.get(one, {})} for one, own in naturals.items()})
            made.append(packed_point({**split_point(point, part.shapes)[0], **theta}, part.shapes, 1))
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
