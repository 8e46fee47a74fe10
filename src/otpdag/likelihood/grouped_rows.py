r"""Rows of one group share hidden numbers: random intercepts and slopes.

Given the numbers :math:`u` of its group, a row is one of a table in which they are seen, so that

.. math:: P(x_g) = \int P(u) \prod_{i \in g} P(x_i \mid u) \, du

needs the likelihood of rows at some places of :math:`u` alone, whatever else they miss. Where these logarithms are
quadratic in :math:`u`, as those of linear normal nodes, :math:`(d + 1)(d + 2) / 2` places tell them, and the integral
is exact. Elsewhere it is a sum on Gauss-Hermite points around the posterior of each group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Self

import numpy as np
import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.likelihood.chain_problem import SequenceUnits
from otpdag.likelihood.elimination.evidence import log_evidence, total_evidence
from otpdag.likelihood.row_posterior import Fitted, log_likelihoods, posterior_draws
from otpdag.likelihood.row_problem import GraphProblem, rows_along_graph
from otpdag.mechanisms import Normal
from otpdag.problem import LossTerms, Pace, Refinement, RowObjective, Units
from otpdag.simulation import ancestral
from otpdag.structure import Naturals, Structure

POINTS = {1: 24, 2: 14}  # along each of so many numbers that a group shares, where their posterior is not normal

# how often points are moved to the posterior at most: it is found to a thousandth of its spread in three or four
PLACEMENTS = 12


def rows_at(structure: Structure, batch: SequenceBatch, places: Tensor) -> Batch:
    """All rows at each place (G, K, d) of their group's numbers, place by place: these are further columns."""
    rows = batch.steps.take(torch.arange(batch.rows).repeat(places.shape[1]))
    columns = places[batch.owners].transpose(0, 1).reshape(1, rows.rows, -1).split(1, -1)
    return rows.showing(dict(zip(structure.shared, columns, strict=True)))


def log_prior(structure: Structure, naturals: Naturals, places: Tensor) -> Tensor:
    """Log-density of shared numbers (R, G, K) at places (G, K, d)."""
    values = {node: places[None, ..., place : place + 1] for place, node in enumerate(structure.shared)}
    mechanisms = ((node, structure.mechanisms[node]) for node in structure.shared)
    told = (one.log_prob(naturals[node], values[node], structure.parents(node, values)) for node, one in mechanisms)
    return torch.as_tensor(sum(told))


def is_quadratic(structure: Structure, rows: Batch) -> bool:
    """Whether the log-likelihood of every row is quadratic in what its group shares.

    So it is where all that depends on it is normal and linear in it given what rows show, and what they do not show
    and others read is normal and linear as well.
    """
    mechanisms, shared, graph = structure.mechanisms, set(structure.shared), structure.graph
    below = {name for node in shared for name in graph.descendants(node)} - shared
    unseen = {n for n in graph.nodes if n not in shared and not (n in rows.mask and bool(rows.mask[n].all()))}
    read = unseen & {parent for node in below for parent in graph.parents(node)}
    normal = {node: one for node, one in mechanisms.items() if type(one) is Normal and not one.censored}
    affine = {node for node, one in normal.items() if one.is_affine}
    given_rows = {
        node
        for node, one in normal.items()
        if one.predictor.terms is not None and not one.spreads and one.predictor.terms.is_linear_in(shared)
    }
    return shared <= affine and ((unseen | below) <= affine if read else below <= affine | given_rows)


# -- integrals ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """Where the numbers of each group are looked at (G, K, d), and logarithms of the weights there (G, K).

    Without weights the logarithms are quadratic, and places tell their coefficients.
    """

    at: Tensor
    log_weight: Tensor | None = None

    @classmethod
    def of_quadratics(cls, groups: int, size: int) -> Places:
        """Zero, one to both sides, and one in each two."""
        one = torch.eye(size, dtype=torch.float64)
        both = [one[i] + one[j] for i, j in combinations(range(size), 2)]
        places = torch.stack([torch.zeros(size, dtype=torch.float64), *one, *-one, *both])
        return cls(places.expand(groups, -1, -1))

    @classmethod
    def around(cls, centre: Tensor, root: Tensor) -> Places:
        """Gauss-Hermite points for normal distributions with means (G, d) and these roots of covariances (G, d, d)."""
        size = centre.shape[-1]
        nodes, weights = np.polynomial.hermite_e.hermegauss(POINTS[size])
        grid = torch.cartesian_prod(*[torch.from_numpy(nodes)] * size).reshape(-1, size)
        logs = torch.cartesian_prod(*[torch.from_numpy(np.log(weights))] * size).reshape(-1, size).sum(-1)
        at = centre.unsqueeze(1) + grid @ root.mT
        volume = root.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)
        return cls(at, logs + 0.5 * grid.square().sum(-1) + volume)

    def integrals(self, logs: Tensor) -> Tensor:
        """Logarithms (R, G) of integrals of what has these logarithms (R, G, K) at the places."""
        if self.log_weight is not None:
            return (logs + self.log_weight).logsumexp(-1)
        size = self.at.shape[-1]
        pairs = list(combinations(range(size), 2))
        at = self.at[0]
        products = [at[:, [i]] * at[:, [j]] for i, j in pairs]
        powers = torch.cat([torch.ones_like(at[:, :1]), at, 0.5 * at.square(), *products], -1)
        found = torch.linalg.solve(powers, logs.unsqueeze(-1))[..., 0]
        level, slopes, bends, both = found.split([1, size, size, len(pairs)], -1)
        precision = -torch.diag_embed(bends)
        for place, (i, j) in enumerate(pairs):
            precision[..., i, j] = precision[..., j, i] = -both[..., place]
        root = torch.linalg.cholesky(precision)
        half = torch.linalg.solve_triangular(root, slopes.unsqueeze(-1), upper=False)[..., 0]
        volume = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return level[..., 0] + 0.5 * half.square().sum(-1) - volume + 0.5 * size * math.log(2 * math.pi)


# -- the problem -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupProblem(SequenceUnits):
    """Groups of rows that share hidden numbers: minus the log-likelihood of a row.

    Attributes:
        batch: Rows, those of a group side by side.
        at_places: Rows at each place, given what their group shares there.
    """

    about: RowObjective
    places: Places
    at_places: GraphProblem

    is_likelihood = True  # other objectives are not laid out so

    @property
    def pace(self) -> Pace:
        """Every row is looked at in all places."""
        return Pace(points_per_row=self.places.at.shape[1] * self.at_places.pace.points_per_row)

    def of_batch(self, batch: SequenceBatch, seed: int) -> GroupProblem:
        """Laid out anew."""
        return group_problem(self.about, batch, seed)

    def in_units(self, most: int = 50) -> Self:
        """Groups are what is resampled, few or many."""
        return self

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> GroupProblem:
        """These groups, or random ones with about so many rows: none is cut."""
        part = self.batch.part(rows, self.seed, piece=int(self.batch.lengths.max()))
        return self if part is self.batch else self.of_batch(part, self.seed)

    simulated = Units.simulated  # type: ignore[assignment]  # robust fits, which ask for it, are refused

    def loss(self, point: Tensor) -> LossTerms:
        """Of a row, with its gradient by Fisher's identity: that of the rows in each place, as likely as it is."""
        naturals, total = self.naturals(point), self.unit_mass.sum(-1)
        prior = log_prior(self.structure, naturals, self.places.at)
        logs = (prior.detach() + self._row_sums(naturals)).requires_grad_(torch.is_grad_enabled())
        each = (self.factors * self.places.integrals(logs)).sum(-1)
        found = each.detach()
        if torch.is_grad_enabled():
            (share,) = torch.autograd.grad(each.sum(), logs)
            weight = share[:, self.batch.owners].transpose(1, 2).flatten(1)
            rows = total_evidence(_in_rows(self.structure, naturals), self.at_places.placed, weight)
            surrogate = rows + (share * prior).sum((-1, -2))
            found = found + surrogate - surrogate.detach()
        loss = (self.structure.penalty(naturals) - found) / total
        return LossTerms.of(loss, reconstruction=loss)

    def _row_sums(self, naturals: Naturals) -> Tensor:
        """Log-likelihoods of the rows of each group at its places (R, G, K), without gradients."""
        return _by_group(log_evidence(_in_rows(self.structure, naturals), self.at_places.placed), self.batch)

    def unit_losses(self, points: Tensor) -> Tensor:
        """Minus the log-likelihood of a row of each group (R, G)."""
        placed = self.laid_out_for(points)
        with torch.no_grad():
            naturals = placed.naturals(points)
            logs = log_prior(self.structure, naturals, placed.places.at) + placed._row_sums(naturals)
            return -placed.places.integrals(logs) / self.batch.lengths

    def laid_out_for(self, points: Tensor) -> GroupProblem:
        """Place what stands for shared numbers, and for others that rows miss, where posteriors are."""
        places, rows = self.places, self.at_places
        if places.log_weight is not None:
            fitted = Fitted(self.structure, self.naturals(points.detach()))
            places = Places.around(*posterior_of_groups(fitted, self.batch))
            rows = _laid_out(self.about, self.batch, places, self.seed)
        return replace(self, places=places, at_places=rows.laid_out_for(points))

    def refine(self, point: Tensor) -> Refinement | None:
        """Places moved to the posteriors, as long as that changes the loss."""
        anew = self.laid_out_for(point)
        with torch.no_grad():
            before, after = self.loss(point).total, anew.loss(point).total
        moves = (after - before).abs() > 1e-6 * (1 + after.abs())  # less makes no difference
        return Refinement(anew, point, "moved points of groups", after) if bool(moves.any()) else None


def group_problem(about: RowObjective, batch: SequenceBatch, seed: int) -> GroupProblem:
    """Lay groups out: exactly where they allow it, else on points around the distribution of what they share."""
    structure, groups = about.structure, len(batch.lengths)
    size = len(structure.shared)
    if is_quadratic(structure, batch.steps):
        places = Places.of_quadratics(groups, size)
    else:
        places = Places.around(torch.zeros(groups, size).double(), torch.eye(size).double().expand(groups, -1, -1))
    rows = _laid_out(about, batch, places, seed)
    return GroupProblem(structure, batch, about.shapes, seed, about, places, rows)


def _laid_out(about: RowObjective, batch: SequenceBatch, places: Places, seed: int) -> GraphProblem:
    rows = rows_at(about.structure, batch, places.at)
    return rows_along_graph(replace(about, structure=about.structure.with_given(about.structure.shared)), rows, seed)


def _in_rows(structure: Structure, naturals: Naturals) -> Naturals:
    return {node: {} if node in structure.shared else own for node, own in naturals.items()}


def _by_group(logs: Tensor, batch: SequenceBatch) -> Tensor:
    """Sums (R, G, K) over the rows of each group of numbers (R, K N) of all rows in all places."""
    each = logs.unflatten(-1, (-1, batch.rows))
    sums = each.new_zeros(*each.shape[:2], len(batch.lengths))
    return sums.index_add_(2, batch.owners, each).transpose(1, 2)


def shared_by_rows(
    structure: Structure, naturals: Naturals, lengths: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """Draws (1, N, 1) of what groups of so many rows share."""
    values = ancestral(structure, naturals, len(lengths), generator, only=structure.shared)
    return {node: value.repeat_interleave(lengths, 1) for node, value in values.items()}


# -- posteriors of groups ----------------------------------------------------------------------------------------------


def posterior_of_groups(fitted: Fitted, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Means (G, d) of what groups share, and roots of covariances (G, d, d), of a mixture over replicas."""
    size, groups = len(fitted.structure.shared), len(batch.lengths)
    centre = torch.zeros(groups, size, dtype=torch.float64)
    root = torch.eye(size, dtype=torch.float64).expand(groups, -1, -1)
    for _ in range(PLACEMENTS):
        places = Places.around(centre, root)
        share = posterior_logs(fitted, batch, places).softmax(-1).mean(0).unsqueeze(-1)
        mean = (share * places.at).sum(1)
        away = places.at - mean.unsqueeze(1)
        # points too far apart for a narrow posterior see one of them alone: they come closer step by step
        covariance = away.mT @ (share * away) + 0.01 * root @ root.mT
        before, centre, root = (centre, root), mean, torch.linalg.cholesky(covariance)
        spread = before[1].diagonal(dim1=-2, dim2=-1)
        ratio = root.diagonal(dim1=-2, dim2=-1) / spread
        if bool((((centre - before[0]) / spread).abs() < 0.1).all()) and bool(((ratio > 0.9) & (ratio < 1.1)).all()):
            break
    return centre, root


def posterior_logs(fitted: Fitted, batch: SequenceBatch, places: Places) -> Tensor:
    """Logarithms of the joint density of rows and shared numbers (R, G, K), times weights of the points if any."""
    structure = fitted.structure
    logs = log_likelihoods(given_shared(fitted), rows_at(structure, batch, places.at))
    prior = log_prior(structure, fitted.naturals, places.at) + (0.0 if places.log_weight is None else places.log_weight)
    return prior + _by_group(logs, batch)


def placed_shares(fitted: Fitted, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Points around each group's posterior (G, K, d), and their probabilities (G, K, 1)."""
    places = Places.around(*posterior_of_groups(fitted, batch))
    return places.at, posterior_logs(fitted, batch, places)[0].softmax(-1).unsqueeze(-1)


def given_shared(fitted: Fitted) -> Fitted:
    """The fitted model of a row given what its group shares."""
    structure, naturals = fitted.structure, _in_rows(fitted.structure, fitted.naturals)
    return replace(fitted, structure=structure.with_given(structure.shared), naturals=naturals)


def log_likelihood(fitted: Fitted, batch: SequenceBatch) -> Tensor:
    """Of each group (G,)."""
    fitted.check_densities("a likelihood")
    structure, groups = fitted.structure, len(batch.lengths)
    exact = is_quadratic(structure, batch.steps)
    size = len(structure.shared)
    places = Places.of_quadratics(groups, size) if exact else Places.around(*posterior_of_groups(fitted, batch))
    return places.integrals(posterior_logs(fitted, batch, replace(places, log_weight=None)))[0]


def draws_of_groups(fitted: Fitted, batch: SequenceBatch, draws: int, seed: int, more: int = 4) -> dict[str, Tensor]:
    """Joint draws of every node given what all rows of its group show: node -> (N, draws, width).

    Of ``more`` times as many draws from the normal distribution nearest to a group's posterior, each is kept by its
    probability over the normal one: all alike where the posterior is normal.
    """
    structure, groups = fitted.structure, len(batch.lengths)
    generator = torch.Generator().manual_seed(seed)
    centre, root = posterior_of_groups(fitted, batch)
    noise = torch.randn(groups, more * draws, centre.shape[-1], generator=generator, dtype=torch.float64)
    at = centre.unsqueeze(1) + noise @ root.mT
    logs = posterior_logs(fitted, batch, Places(at))[0] + 0.5 * noise.square().sum(-1)
    chosen = torch.multinomial(logs.softmax(-1), draws, generator=generator)
    kept = at.gather(1, chosen.unsqueeze(-1).expand(-1, -1, at.shape[-1]))
    drawn = posterior_draws(given_shared(fitted), rows_at(structure, batch, kept), 1, seed)
    return {node: value.reshape(draws, batch.rows, -1).transpose(0, 1) for node, value in drawn.items()}
