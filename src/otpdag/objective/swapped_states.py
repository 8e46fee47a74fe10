r"""A way out of optima in which two states share what one explains, and one covers what needs two.

Expectation-maximisation cannot carry a state through rows that others explain. So at an optimum a state that others can
do without gives up its rows and takes half of those of another one (split and merge: Ueda, Nakano, Ghahramani and
Hinton 2000). What a state is worth is what its removal costs,

.. math:: D_a = -\frac{1}{n} \sum_i w_i \log (1 - r_{ia}), \qquad r_{ib} \to r_{ib} / (1 - r_{ia}),

with the posterior probabilities r; a state is split across the leading component of its rows' features. All swaps run
side by side on a part of the rows, the best few on all of them; the optimum is left where one of them is lower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from otpdag.objective.problem import Moved, Problem

__all__ = [
    "FEWEST_STATES",
    "GIVEN_UP",
    "MOST_ABOVE",
    "Reading",
    "Swaps",
    "lowest_swap",
    "posteriors",
    "swapped",
    "swapped_pairs",
    "swaps",
]

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


def swapped(problem: Problem, part: Problem, point: Tensor, candidates: Tensor) -> Moved | None:
    """A problem at the best of points (K, P) with swapped states, where its loss is lower than at ``point`` (1, P)."""
    if not len(candidates):
        return None
    lowest = lowest_swap(point, candidates, _updates_of(part), _updates_of(problem))
    if lowest is None:
        return None
    (moved, loss), (_, before) = lowest, _updates_of(problem)(point)
    is_lower = bool(loss < before - LEAST_FALL * (1 + before.abs()))
    return Moved(problem, moved, "states swapped", loss) if is_lower else None


def _updates_of(problem: Problem) -> Updates:
    def updates(points: Tensor) -> tuple[Tensor, Tensor]:
        moved, terms = problem.updated(points)
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
