r"""How well a fitted model describes rows: their likelihood, and tests of what it says of each node.

If the model is right, the distribution function of a node at its value, :math:`u`, is uniform whatever the other nodes
that are no descendants of it. Each *aspect* is a feature :math:`g` of :math:`u` and of these that then has mean zero:
a Legendre polynomial of :math:`u` for the shape, its product with functions of a parent for curved means and changing
spreads, with those of two parents for interactions, with those of another node for a dependence that the graph forbids.
Of categories the features are those of their indicators less their probabilities.

Nothing is randomised where it need not be: over the stretch of :math:`u` that makes a count the polynomial has a mean
in closed form, and over what a row does not show :math:`E[g \mid \mathrm{row}]` is a mean over spread draws. Parameters
were estimated, mostly from the same rows; what that takes from the sum of :math:`g` follows from the scores :math:`s`
of the rows (Neyman's :math:`C(\alpha)`): the residuals :math:`r` of a regression of :math:`g` on :math:`s` have a sum
whose variance is :math:`\sum r^2`, for rows of the fit and for new ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy as sp
import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.likelihood import grouped_rows, row_posterior, sequence_posterior
from otpdag.likelihood.row_posterior import Fitted, posterior_draws
from otpdag.mechanisms import Mechanism
from otpdag.mechanisms.base import Params, Parents, abducted, can_abduct
from otpdag.noise import draw_noise
from otpdag.numerics import products
from otpdag.progress import shown_while_running
from otpdag.spaces import Interval, Simplex

ORDERS = 6  # of polynomials: 3 tells skewness, 4 tails; 5 and 6 two humps and bounds
DRAWS = 24  # of what a row does not show
SCORES = 20_000_000  # rows times parameters: more would take a gigabyte


def log_likelihoods(fitted: Fitted, batch: Batch | SequenceBatch, seed: int = 0) -> Tensor:
    """Log-likelihoods of rows, or of sequences or groups (N,), hidden and missing values integrated out."""
    if isinstance(batch, SequenceBatch) and fitted.structure.shared:
        return grouped_rows.log_likelihood(fitted, batch)
    if isinstance(batch, SequenceBatch):
        return sequence_posterior.log_likelihood(fitted, batch, seed)
    return row_posterior.log_likelihood(fitted, batch)


# -- tests -------------------------------------------------------------------------------------------------------------


class Aspect(NamedTuple):
    """A way in which a model may be wrong: its words and features (N, k) whose means are then not zero.

    Attributes:
        of_values: Whether the parameters' values are meant, and not only the form: then estimation is not allowed for.
    """

    words: str
    features: Tensor
    of_values: bool = False


def node_checks(fitted: Fitted, batch: Batch | SequenceBatch, *, seed: int, most: int = 10_000) -> pd.DataFrame:
    """One row for each observed node, and for each pair of nodes that the graph keeps apart; the worst first.

    Args:
        fitted: The model.
        batch: Rows, or groups of rows.
        seed: Determines draws of what rows do not show, and which of more than ``most`` rows are looked at.
        most: Rows that are looked at, about so many in groups.
    """
    if isinstance(batch, SequenceBatch):
        batch = batch.part(most, seed, piece=int(batch.lengths.max()))
    else:
        batch = batch.part(most, seed)
    graph, checked = fitted.structure.graph, []
    sides = _sides(fitted, batch, seed)
    rows = _Rows(fitted, batch, {node: side.value for node, side in sides.items()})
    for place, node in enumerate(shown_while_running(graph.order, "checks", len(graph.order))):
        if sides[node].blocks and not fitted.structure.mechanisms[node].is_given:
            if node in graph.observed:
                checked.append(rows.tested(node, "", _own_aspects(fitted, node, sides)))
            for other in graph.order[:place]:
                # of two hidden nodes only their children tell, which have rows of their own here
                if other not in graph.parents(node) and {node, other} & set(graph.observed):
                    checked.append(rows.tested(node, other, _pair_aspects(sides, node, other)))
    table = pd.DataFrame(checked, columns=["node", "other", "finding", "p"])
    table["adjusted"] = _holm(table["p"].to_numpy(dtype=float))
    table.loc[table["adjusted"] > 0.5, "finding"] = ""
    return table.sort_values("p", kind="stable").set_index("node")


def _holm(p: np.ndarray) -> np.ndarray:
    """P-values adjusted for their number: that any right claim falls below a level has at most its probability."""
    order, adjusted = p.argsort(kind="stable"), np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1)
    return adjusted


class _Rows:
    """The rows with their scores, against which features are tested; of groups sums over their rows."""

    def __init__(self, fitted: Fitted, batch: Batch | SequenceBatch, values: Mapping[str, Tensor]) -> None:
        self.structure, self.owner = fitted.structure, torch.arange(batch.rows)
        self.weight = torch.ones(batch.rows, 1, dtype=torch.float64)
        if isinstance(batch, SequenceBatch):
            self.owner = batch.owners
        else:
            self.weight = batch.weight[0].unsqueeze(-1)
        self.units = int(self.owner[-1]) + 1
        # what a group shares counts once
        self.scores = _scores(fitted, values, 1 / self.owner.bincount()[self.owner])
        self.complete = next(iter(values.values())).shape[1] == 1
        total = sum(score.shape[1] for score in self.scores.values())
        # of a complete row a node's features are uncorrelated with the scores of other nodes' parameters
        self.apart = self.complete or total > self.units // 4
        self._bases: dict[str, Tensor] = {}

    def summed(self, values: Tensor) -> Tensor:
        """Values (N, k) by unit (units, k), times the rows' weights."""
        weighed = self.weight * values
        if self.units == len(weighed):
            return weighed
        return weighed.new_zeros(self.units, weighed.shape[1]).index_add(0, self.owner, weighed)

    def basis(self, node: str) -> Tensor:
        """Orthonormal columns (N, rank) that span the scores that matter for a node."""
        key = node if self.apart else ""
        if key not in self._bases:
            own = dict.fromkeys(self.structure.keys_of(node)) if self.apart else self.scores
            scores = self.summed(
                torch.cat([self.weight[:, :0], *(self.scores[name] for name in own if name in self.scores)], -1)
            )
            scores = scores / scores.norm(dim=0).clamp(min=1e-300)
            values, vectors = torch.linalg.eigh(scores.T @ scores)
            kept = values > 1e-9 * max(1, len(values))
            self._bases[key] = scores @ (vectors[:, kept] / values[kept].sqrt())
        return self._bases[key]

    def tested(self, node: str, other: str, aspects: Sequence[Aspect]) -> tuple[str, str, str, float]:
        """Node, other, the words of the clearest aspect, and the p-value adjusted for the number of aspects."""
        found = [(p, one.words) for one in aspects if (p := self._p_value(node, one)) is not None]
        if not found:
            return node, other, "", 1.0
        least, words = min(found)
        return node, other, words, float(-np.expm1(len(found) * np.log1p(-min(least, 1 - 1e-16))))

    def _p_value(self, node: str, aspect: Aspect, nothing: float = 1e-5, fewest: float = 12.0) -> float | None:
        """By the beta distribution of a self-normalised sum; None where parameters or too few rows leave nothing."""
        features, basis = self.summed(aspect.features), self.basis(node)
        size = features.square().sum(0)
        if aspect.of_values:
            basis = basis[:, :0]
        left = features - basis @ (basis.T @ features)
        square = left.square()
        # a column that few rows make has no normal sum
        rows = square.sum(0).square() / square.square().sum(0).clamp(min=1e-300)
        left = left[:, (square.sum(0) > nothing * size.clamp(min=1e-12)) & (rows > fewest)]
        degrees = len(left) - basis.shape[1]
        if not left.shape[1] or degrees < 10 * left.shape[1]:
            return None
        values, vectors = torch.linalg.eigh(left.T @ left)
        kept = values > 1e-6 * values[-1]
        share = float(((left.sum(0) @ vectors)[kept].square() / values[kept]).sum()) / len(left)
        share = share / 2 if aspect.of_values else share  # parameters of other rows are as uncertain as these rows' sum
        k = int(kept.sum())
        return float(sp.special.betainc(0.5 * (degrees - k), 0.5 * k, 1 - min(share, 1.0)))


def _scores(fitted: Fitted, values: Mapping[str, Tensor], share: Tensor) -> dict[str, Tensor]:
    """Of each learned parameter, the scores (N, size) of the rows: means over draws of those of complete rows.

    Those of what a group shares are each row's ``share`` (N,).
    """
    structure, rows = fitted.structure, len(next(iter(values.values())))
    raw = structure.raw(fitted.naturals)
    if rows * sum(value.numel() for value in raw.values()) > SCORES:
        return {}
    raw = {key: value.expand(rows, *value.shape[1:]).clone().requires_grad_() for key, value in raw.items()}
    naturals = structure.naturals(raw)
    total = torch.zeros(())
    for node, mechanism in structure.mechanisms.items():
        if mechanism.has_density and not mechanism.is_given:
            density = mechanism.log_prob(naturals[node], values[node], structure.parents(node, values))
            total = total + (density.mean(-1) * (share if node in structure.shared else 1.0)).sum()
    keys = list(raw)
    if not total.requires_grad:
        return {}
    slopes = torch.autograd.grad(total, [raw[key] for key in keys], allow_unused=True)
    return {key: slope.flatten(1).nan_to_num() for key, slope in zip(keys, slopes, strict=True) if slope is not None}


# -- aspects -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """A node in the rows and draws.

    Attributes:
        value: Its values (N, draws, width).
        blocks: What should be random whatever its parents, (N, draws, k) each: location and spread of a number, the
            indicators of categories.
        shape: Polynomials of its distribution function (N, ORDERS), means over the draws; None of categories.
        context: Functions of its values by which other nodes may differ, each with its words.
    """

    value: Tensor
    blocks: tuple[Tensor, ...]
    shape: Tensor | None
    context: tuple[Tensor, ...]


def _sides(fitted: Fitted, groups: Batch | SequenceBatch, seed: int) -> dict[str, _Side]:
    """All nodes of the rows, with what they do not show drawn."""
    graph, generator = fitted.structure.graph, torch.Generator().manual_seed(seed)
    batch = groups.steps if isinstance(groups, SequenceBatch) else groups
    complete = not graph.hidden and all(bool(mask.all()) for mask in batch.mask.values())
    values = {node: value[0].unsqueeze(1) for node, value in batch.values.items()}
    if not complete:
        if isinstance(groups, SequenceBatch):
            values = grouped_rows.draws_of_groups(fitted, groups, DRAWS, seed)
        else:
            values = dict(posterior_draws(fitted, batch, DRAWS, seed, stratified=True))
        for node in (one for one in batch.mask if isinstance(fitted.structure.mechanisms[one].space, Interval)):
            seen = batch.mask[node][0].bool().unsqueeze(1)
            # of an interval with one end the other is a draw of the number itself, which takes the place of both
            values[node] = torch.where(seen & ~seen.flip(-1), values[node].flip(-1), values[node])
    sides = {}
    for node, value in values.items():
        mechanism, (rows, draws, _) = fitted.structure.mechanisms[node], value.shape
        flat = {name: values[name].reshape(1, rows * draws, -1) for name in (node, *graph.parents(node))}
        own, parents = flat.pop(node), flat
        blocks: tuple[Tensor, ...] = ()
        shape = None
        if mechanism.is_given:
            blocks = _context(mechanism, value)[:2]
        elif mechanism.space.is_discrete:
            probs = mechanism.log_probs(fitted.naturals[node], parents, own).detach().exp()
            blocks = (_frequent((own - probs).reshape(rows, draws, -1), value),)
        elif mechanism.noise.dim:
            powers = _polynomials(*_stretch(mechanism, fitted.naturals[node], own, parents, generator))
            powers = powers.mean(-2).reshape(rows, draws, ORDERS)
            blocks, shape = (powers[..., :1], powers[..., 1:2]), powers.mean(1)
        sides[node] = _Side(value, blocks, shape, _context(mechanism, value))
    return sides


def _stretch(
    mechanism: Mechanism, params: Params, value: Tensor, parents: Parents, generator: torch.Generator, draws: int = 99
) -> tuple[Tensor, Tensor]:
    """The stretch of the distribution function (1, n, dim) that gives a value; by draws where it is not known."""
    if can_abduct(mechanism):
        shape = (*value.shape[:-1], mechanism.noise.dim)
        ends = (torch.zeros(shape).to(value), torch.ones(shape).to(value))
        if isinstance(mechanism.space, Simplex):  # what normalising forgot is no stretch
            ends = (torch.rand(shape, generator=generator, dtype=value.dtype),) * 2
        noise = [abducted(mechanism, params, value, parents, end).detach() for end in ends]
        below, above = (torch.special.ndtr(one) if mechanism.noise.kind == "normal" else one for one in noise)
        return below, above
    smaller = torch.zeros_like(value)
    for _ in range(draws):
        fresh = draw_noise(mechanism.noise, tuple(value.shape[:-1]), generator)
        drawn = mechanism.forward(params, parents, fresh).detach()
        smaller += (drawn < value).to(value) + 0.5 * (drawn == value).to(value)
    return smaller / (draws + 1), (smaller + 1) / (draws + 1)


def _polynomials(below: Tensor, above: Tensor) -> Tensor:
    """Means of the first Legendre polynomials over stretches of the unit interval: (..., ORDERS), each of variance one.

    >>> _polynomials(torch.tensor([0.0, 0.5]), torch.tensor([1.0, 0.5]))[:, :2].abs()
    tensor([[0.0000, 0.0000],
            [0.0000, 1.1180]])
    """
    low, high = ((2 * end.clamp(0, 1) - 1).unsqueeze(-1) for end in (below, above))
    wide = high - low > 1e-6
    ends = (np.polynomial.legendre.legvander(end.numpy(), ORDERS + 1) for end in (0.5 * (low + high), low, high))
    at, bottom, top = (torch.from_numpy(end).unbind(-1) for end in ends)
    means = []
    for order in range(1, ORDERS + 1):
        # the integral of a polynomial is the difference of its neighbours
        rise = [end[order + 1] - end[order - 1] for end in (top, bottom)]
        mean = (rise[0] - rise[1]) / ((2 * order + 1) * torch.where(wide, high - low, 1.0))
        means.append((2 * order + 1) ** 0.5 * torch.where(wide, mean, at[order]))
    return torch.cat(means, -1)


def _frequent(indicators: Tensor, value: Tensor, most: int = 6) -> Tensor:
    """Of indicators (N, draws, K) those of the most frequent categories, but for the first, which follows from them."""
    order = value.mean((0, 1)).argsort(descending=True, stable=True)
    return indicators[..., order[1 : most + 1]]


def _context(mechanism: Mechanism, value: Tensor) -> tuple[Tensor, ...]:
    """Functions of values (N, draws, width) by which a child may differ: slope and bends by rank, or indicators."""
    if mechanism.space.is_discrete:
        return (_frequent(value - value.mean((0, 1)), value),)
    flat = value.mean(-1) if value.shape[-1] > 1 else value[..., 0]
    distinct, place, count = flat.unique(return_inverse=True, return_counts=True)
    above = count.cumsum(0).to(value)
    if len(distinct) < 2:
        return ()
    powers = _polynomials(((above - count) / flat.numel())[place], (above / flat.numel())[place])
    return tuple(powers[..., order : order + 1] for order in range(min(3, len(distinct) - 1)))


def _product(*parts: Tensor) -> Tensor:
    """All products of columns (N, draws, k) of some features, as means over the draws (N, k1 k2 ...)."""
    return products(parts).mean(1)


def _own_aspects(fitted: Fitted, node: str, sides: Mapping[str, _Side], most: int = 40) -> list[Aspect]:
    side, parents = sides[node], fitted.structure.graph.parents(node)
    found = [Aspect("its rows lie elsewhere than its parameters say", _product(one), True) for one in side.blocks]
    if side.shape is not None:
        heavy = "more spread, or longer tails, than it says"
        for order in range(ORDERS):
            words = "skewed otherwise than it says" if order % 2 == 0 else heavy
            found.append(Aspect(words, side.shape[:, order : order + 1]))
    for parent in parents:
        found += _along(side, parent, sides[parent])
    for left, right in list(combinations(parents, 2))[:most]:
        if sides[left].context and sides[right].context:
            both = _product(side.blocks[0], sides[left].context[0], sides[right].context[0])
            found.append(Aspect(f"the effects of {left!r} and {right!r} on it are not separate, as it says", both))
    return found


def _along(side: _Side, parent: str, context: _Side) -> Iterator[Aspect]:
    """How location and spread of a node may follow a parent."""
    for order, of_parent in enumerate(context.context):
        words = "differs along" if order == 0 else "is curved in"
        yield Aspect(f"its mean {words} {parent!r} otherwise than it says", _product(side.blocks[0], of_parent))
        if len(side.blocks) > 1 and order < 2:
            yield Aspect(f"its spread changes with {parent!r}", _product(side.blocks[1], of_parent))


def _pair_aspects(sides: Mapping[str, _Side], node: str, other: str) -> list[Aspect]:
    """Products of what should be random in both."""
    words = f"depends on {other!r} beyond its parents: an edge or a common cause is missing"
    return [Aspect(words, _product(a, b)) for a in sides[node].blocks for b in sides[other].blocks]
