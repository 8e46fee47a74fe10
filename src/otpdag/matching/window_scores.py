r"""Scores of the steps of sequences, each given the few steps around it.

The score of a sequence is a sum over its steps, by Fisher's identity. Here each step is told its states by a window of
:math:`k` steps to either side, not by all of the sequence:

.. math:: \psi_t = E_\theta\big[\nabla \log p(x_t \mid z_t) + \nabla \log p(z_t \mid z_{t-1}) \,\big|\, x_{t-k}, \dots,
          x_{t+k}\big].

An expectation given less is one of the same variable: under the model at :math:`\theta` the mean of :math:`\psi_t` is
zero for windows of any length, whatever cells are missing at random.

A number that the model would hardly make tells nothing of its step: it is read as if it were missing, which bounds what
a single cell can do to an estimate.

Windows compared along the scores of their steps, once there is an estimate.

The data's mean scores :math:`\bar\psi` at an estimate :math:`\vartheta` are what is compared
(:mod:`~otpdag.matching.window_scores`). How the model's own mean moves with parameters is told by the features
:math:`f` of windows, whose means are exact:

.. math:: E_\theta \psi - E_\vartheta \psi \approx B' (E_\theta f - E_\vartheta f),

with slopes :math:`B` by regression over a sample of the model, scaled to be right to first order. So features decide
how quickly an estimate is found and not which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from otpdag.data.sequences import SequenceBatch
from otpdag.divergences.whitened import whitening_of
from otpdag.likelihood.chain_layout import States
from otpdag.matching.window_features import (
    Stratum,
    Windows,
    block_means,
    block_rows,
    laws_by_time,
    long_run_covariance,
    state_laws,
    stratum_mean,
)
from otpdag.mechanisms.base import Params
from otpdag.structure import Naturals, Structure

STEPS_AROUND = 3
"""Steps to either side that tell a step's states. Standard errors of the rates of Poisson chains are 1.050 times those
of maximum likelihood with one, 1.014 with two, 1.005 with three and 1.003 with four (decision 0049)."""

UNLIKELIEST_SHARE = 1e-4
"""Share of a node's numbers, under the model, that are least likely and read as if they were missing. Of a normal node
they are beyond four standard deviations, and with them two thousandths of what tells its mean are lost."""

DENSITIES_AT_ONCE = 2**22
"""Log-densities that are computed at a time: 32 MB of double precision."""

SMALLEST_LIKELIHOOD = 1e-100
"""Likelihood of a state, over that of the likeliest, below which none is told apart: three of them, of a step and of
what is before and after it, are multiplied, and the smallest number of double precision is 1e-308."""

FLAT = 1e-6
"""Share of the largest variance below which there is none: what nothing tells has no direction."""

BESIDE = 1e-4
"""Half the distance of the points whose difference is a slope: 1e-8 are lost by curvature, and 1e-12 by digits."""


@dataclass(frozen=True, eq=False)
class Beside:
    """Parameters (2 K, ...) moved by a little in K directions (K,): first ahead, then behind."""

    naturals: Naturals
    directions: Tensor
    step: float


def points_beside(naturals: Callable[[Tensor], Naturals], point: Tensor, directions: Tensor) -> Beside:
    """A point (1, P), moved by a little in some directions and, after all of these, against them."""
    steps = BESIDE * torch.eye(point.shape[-1]).to(point)[directions]
    return Beside(naturals(point + torch.cat([steps, -steps])), directions, BESIDE)


@dataclass(frozen=True, eq=False)
class WindowScores:
    """Reads the scores of steps at an estimate.

    Attributes:
        structure: Graph and mechanisms.
        states: Joint states of the hidden categories.
        naturals: The estimate (1, ...).
        beside: The same, moved in K directions.
        floors: Log-density of a node's value, in all states together, below which it is read as if missing.
    """

    structure: Structure
    states: States
    naturals: Naturals
    beside: Beside
    floors: Mapping[str, Tensor] = field(default_factory=dict)

    def with_floors(self, sample: SequenceBatch) -> WindowScores:
        """The same, with floors such that few numbers of a sample of the model lie below them."""
        numbers = [n for n in self.structure.graph.observed if not self.structure.mechanisms[n].space.is_discrete]
        return replace(
            self, floors={n: _lower_quantile(self._log_density(n, sample), UNLIKELIEST_SHARE) for n in numbers}
        )

    def of(self, batch: SequenceBatch) -> Tensor:
        """Scores of all steps (N, K)."""
        batch = self.trusted(batch)
        around = self._around(self._evidence(batch), batch)
        total = self._of_moves(around, batch)
        for node in self.structure.graph.observed:
            own = _directions(self.beside.naturals[node], len(self.beside.directions))
            for rows in torch.arange(batch.rows).split(self._rows_at_once(len(own))):
                total[rows.unsqueeze(-1), own] += self._of_node(node, own, batch, rows, around.state[rows])
        return total

    # -- what a window tells of states --------------------------------------------------------------------------------

    def trusted(self, batch: SequenceBatch) -> SequenceBatch:
        """The same steps without the numbers that are hardly possible, of nodes of which all cells are seen."""
        mask = dict(batch.steps.mask)
        for node, floor in self.floors.items():
            hardly = (self._log_density(node, batch) < floor).reshape(1, -1, 1)
            mask[node] = mask[node] & ~(hardly & mask[node].all(-1, keepdim=True))
        return replace(batch, steps=replace(batch.steps, mask=mask))

    @cached_property
    def _laws(self) -> tuple[Tensor, Tensor]:
        return state_laws(self.structure, self.naturals, self.states)

    def _laws_at(self, batch: SequenceBatch) -> Tensor:
        """The law of each step's state (N, S), as long as nothing is read."""
        laws = laws_by_time(*self._laws, int(batch.times.max()))
        return laws[batch.times.clamp(max=len(laws) - 1)]

    def _log_density(self, node: str, batch: SequenceBatch) -> Tensor:
        """Log-density (N,) of what is seen of a node, up to a constant, if all states were alike."""
        return torch.logsumexp(self._log_emission(node, batch), -1)

    def _log_emission(self, node: str, batch: SequenceBatch) -> Tensor:
        """Log-densities (N, S) of a node's cells in every state."""
        parts = torch.arange(batch.rows).split(self._rows_at_once(1))
        return torch.cat([self._log_prob(node, self.naturals[node], batch, rows)[0] for rows in parts])

    def _log_prob(self, node: str, params: Params, batch: SequenceBatch, rows: Tensor) -> Tensor:
        """Log-densities (R, n, S) of some rows' cells in every state."""
        states = {name: value[None, None] for name, value in self.states.now.items()}
        value, seen = (cells[node][:1, rows].unsqueeze(-2) for cells in (batch.steps.values, batch.steps.mask))
        parents = self.structure.parents(node, states)
        table = self.structure.mechanisms[node].log_prob(params, value, parents, seen)
        return table.expand(-1, len(rows), self.states.size)

    def _evidence(self, batch: SequenceBatch) -> Tensor:
        """Likelihood of each step's states (N, S), over that of the likeliest."""
        each = [self._log_emission(node, batch) for node in self.structure.graph.observed]
        log = torch.stack(each).sum(0)
        return torch.exp(log - log.amax(-1, keepdim=True)).clamp(min=SMALLEST_LIKELIHOOD)

    def _around(self, evidence: Tensor, batch: SequenceBatch) -> _Around:
        """Forward and backward over the steps of each step's own window, all windows side by side."""
        first, moves = self._laws[0], self._laws[1][0]
        begins = (batch.times == 0).unsqueeze(-1)
        ends = begins.roll(-1, 0)
        before = self._laws_at(batch)
        earlier, after = before, torch.ones_like(before)
        for _ in range(STEPS_AROUND):
            earlier = _shares(before * evidence).roll(1, 0)
            before = torch.where(begins, first, earlier @ moves)
            after = torch.where(ends, 1.0, _shares(evidence * after).roll(-1, 0) @ moves.T)
        state = before * evidence * after
        total = state.sum(-1, keepdim=True)
        return _Around(earlier, state / total, evidence * after / total)

    # -- scores -------------------------------------------------------------------------------------------------------

    def _of_moves(self, around: _Around, batch: SequenceBatch) -> Tensor:
        """What first states and moves (N, K) tell: slopes of probabilities, so that none may be zero."""
        first, moves = state_laws(self.structure, self.beside.naturals, self.states)
        many, size = len(self.beside.directions), self.states.size
        of_first = self._slopes(first.expand(2 * many, -1))
        of_moves = self._slopes(moves.expand(2 * many, -1, -1)).flatten(1)
        told = []
        for rows in torch.arange(batch.rows).split(max(1, DENSITIES_AT_ONCE // size**2)):
            pairs = around.earlier[rows].unsqueeze(-1) * around.later[rows].unsqueeze(-2)
            told.append(pairs.flatten(1) @ of_moves.T)
        begins = (batch.times == 0).unsqueeze(-1)
        return torch.where(begins, around.later @ of_first.T, torch.cat(told))

    def _of_node(self, node: str, own: Tensor, batch: SequenceBatch, rows: Tensor, state: Tensor) -> Tensor:
        """What some steps' cells of a node tell (n, K') of its own parameters, given their states (n, S)."""
        both = torch.cat([own, own + len(self.beside.directions)])
        params = {name: value if len(value) == 1 else value[both] for name, value in self.beside.naturals[node].items()}
        slopes = self._slopes(self._log_prob(node, params, batch, rows).expand(len(both), -1, -1))
        return torch.einsum("kns,ns->nk", slopes, state)

    def _slopes(self, moved: Tensor) -> Tensor:
        ahead, behind = moved.chunk(2)
        return (ahead - behind) / (2 * self.beside.step)

    def _rows_at_once(self, directions: int) -> int:
        return max(1, DENSITIES_AT_ONCE // (2 * max(1, directions) * self.states.size))


@dataclass(frozen=True, eq=False)
class _Around:
    """What the window around each step tells.

    Attributes:
        earlier: Probabilities of the state before (N, S), given the window up to it.
        state: Probabilities of the state (N, S), given all of the window.
        later: Likelihood of the state (N, S), given the window from it on, over that of the window given what was
            before: with ``earlier`` and the probability of a move it makes that of a pair of states.
    """

    earlier: Tensor
    state: Tensor
    later: Tensor


def _shares(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def _directions(params: Params, many: int) -> Tensor:
    """Numbers of the directions in which a node's own parameters (2 K, ...) were moved."""
    moved = torch.zeros(many, dtype=torch.bool)
    for value in params.values():
        if len(value) > 1:
            moved |= (value[:many] != value[many:]).flatten(1).any(1)
    return moved.nonzero()[:, 0]


def _lower_quantile(values: Tensor, share: float) -> Tensor:
    """A value that so small a share of all values lies below."""
    return values.sort().values[int(share * len(values))]


def can_be_scored(structure: Structure) -> bool:
    """Whether all observed nodes have the log-densities that scores are slopes of."""
    return all(structure.mechanisms[node].has_density for node in structure.graph.observed)


LEAST_TOLD = 0.2
"""Share of a score's variance that features must tell: below, they do not say how its mean moves with parameters, and
what they said of the parameter before stands. Of 500 features over 5,000 blocks a tenth may be chance."""

RIDGE = 1e-9
"""Of the covariance of features in a sample of the model: what data would blur, draws know, and only rounding is left
to guard against (decision 0033)."""


def along_scores(reader: WindowScores, windows: Windows, batch: SequenceBatch, sample: SequenceBatch) -> Windows:
    """The same windows, those of later steps compared along scores.

    Args:
        reader: Reads scores at the estimate.
        windows: The data's windows, whose features were whitened.
        batch: The data.
        sample: Sequences of the model at the estimate, complete and of one length.
    """
    rows = block_rows(sample, windows.length)
    if rows is None:
        return windows
    gap, of_sample = _gap(reader, batch, sample)
    of_blocks = of_sample[rows + windows.length // 2].mean(1)
    is_later = (batch.times > 0) | (len(windows.strata) == 1)
    strata = []
    for stratum in windows.strata:
        if not stratum.is_first:
            means = block_means(reader.structure, stratum.features, sample, windows.length, rows)
            along = _Along.of(means, of_blocks, rows.shape[1])
            stratum = along.compared(reader, windows, stratum, gap[is_later].mean(0))
        strata.append(stratum)
    return replace(windows, strata=tuple(strata))


def _gap(reader: WindowScores, batch: SequenceBatch, sample: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Bounded scores of the data's steps (N, K), less their mean under the model; and those of a sample's steps.

    Without bounds the mean is zero, so that a sample tells the little that these change of it almost without chance.
    """
    bounded, sample = reader.with_floors(sample), _with_gaps(sample, batch)
    of_sample = bounded.of(sample)
    by_bounds = (of_sample - reader.of(sample)).mean(0)
    return bounded.of(batch) - by_bounds, of_sample


def change(structure: Structure, windows: Windows, before: Naturals, after: Naturals) -> float:
    """How far parameters (1, ...) moved, in standard errors of what one step knows along scores, squared."""
    total = 0.0
    with torch.no_grad():
        for stratum in windows.strata:
            if not stratum.is_first:
                old, new = (
                    stratum_mean(structure, one, windows, stratum, state_laws(structure, one, windows.states))
                    for one in (before, after)
                )
                total += float(replace(stratum.features, mean=old).distance(new))
    return total


@dataclass(frozen=True, eq=False)
class _Along:
    """Directions that scores vary in, and how features tell of them.

    Attributes:
        directions: Combinations of scores (K, rank) whose long-run covariance is one.
        slopes: Of these on features (J, rank), scaled so that the mean moves with parameters as they do.
    """

    directions: Tensor
    slopes: Tensor

    @classmethod
    def of(cls, features: Tensor, scores: Tensor, block: int) -> _Along:
        """From means (blocks, J) and (blocks, K) over blocks of windows of the model."""
        features, scores = (values * block**0.5 for values in (features, scores))
        whitening = whitening_of(long_run_covariance(features, 1).unsqueeze(0), RIDGE)[0]
        features, scores = features - features.mean(0), scores - scores.mean(0)
        whitened = features @ whitening.to(features)
        slopes = whitening.to(features) @ (whitened.T @ scores) / len(features)
        directions = _inverse_root(scores.T @ scores / len(scores))
        told = (features @ slopes) @ directions
        shares, axes = torch.linalg.eigh(told.T @ told / len(told))
        kept = shares > LEAST_TOLD
        directions = directions @ axes[:, kept]
        return cls(directions, slopes @ directions / shares[kept])

    def compared(self, reader: WindowScores, windows: Windows, stratum: Stratum, gap: Tensor) -> Stratum:
        """A stratum whose scores are by ``gap`` (K,) above the model's, compared along these directions alone."""
        laws = state_laws(reader.structure, reader.naturals, windows.states)
        mean = stratum_mean(reader.structure, reader.naturals, windows, stratum, laws)
        before = float(stratum.features.distance(mean)) + stratum.rest
        moved = (gap @ self.directions) @ torch.linalg.pinv(self.slopes)
        features = replace(stratum.features, mean=mean + moved, whitening=self.slopes.unsqueeze(0))
        rest = before - float(features.distance(mean))
        return replace(stratum, features=features, rest=max(rest, 0.0))


def _inverse_root(covariance: Tensor) -> Tensor:
    """A matrix W (P, rank) with W' C W = 1, without what does not vary."""
    unit = covariance.diagonal().clamp(min=torch.finfo(covariance.dtype).tiny).rsqrt()
    lengths, vectors = torch.linalg.eigh(covariance * unit * unit.unsqueeze(-1))
    varies = lengths > FLAT * lengths[-1]
    return unit.unsqueeze(-1) * vectors[:, varies] * lengths[varies].rsqrt()


def _with_gaps(sample: SequenceBatch, batch: SequenceBatch) -> SequenceBatch:
    """A sample with the gaps of the data, one row after another from the first, again from there after the last."""
    if all(bool(mask.all()) for mask in batch.steps.mask.values()):
        return sample
    rows = torch.arange(sample.rows) % batch.rows
    mask = {node: seen[:1, rows] for node, seen in batch.steps.mask.items()}
    return replace(sample, steps=replace(sample.steps, mask=mask))
