r"""The direct term of sequences: short windows of the data against the same windows of the model.

The left side of Theorem 1 for sequences compares what neighbouring steps show,

.. math:: D\big(P_{data}(x_t, \dots, x_{t+w-1}), P_\theta(x_t, \dots, x_{t+w-1})\big),

averaged over the times :math:`t` of all windows. Two steps already tell transitions and emissions apart; the first
steps are compared by themselves, for they tell how a sequence begins.

The model's side is exact: the law of the state at time t by powers of the transition matrix, the paths of a window
enumerated, what is observed integrated out of its kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otpdag.data.sequences import SequenceBatch, part_of
from otpdag.divergences.whitened import FeatureColumn, FittedFeatures, WhitenedFeatures
from otpdag.errors import ModelError
from otpdag.likelihood.chain_layout import States, hidden_potentials, joint_states
from otpdag.matching.mean_features import leaf_means, node_columns
from otpdag.problem import LossTerms, Problem
from otpdag.settings import Direct
from otpdag.structure import Naturals, Structure

WINDOWS_AT_ONCE = 8000  # on which features are placed, and whose features are computed at a time


@dataclass(frozen=True)
class WindowProblem(Problem):
    """Sequences as windows of a few steps, compared with the model's own windows."""

    structure: Structure
    batch: SequenceBatch
    shapes: Mapping[str, tuple[int, ...]]
    direct: Direct
    seed: int
    windows: Windows
    coarse_features: int = 200
    """Features while starts are compared."""

    @property
    def rows(self) -> int:
        """Steps of all sequences."""
        return self.batch.rows

    def loss(self, point: Tensor) -> LossTerms:
        """The direct term."""
        distance = window_distance(self.structure, self.naturals(point), self.windows)
        return LossTerms.of(distance, direct=self.direct.kappa * distance)

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> WindowProblem:
        """About so many steps, or these sequences; fewer features if ``coarse``."""
        features = self.direct.features
        if coarse:
            features = replace(features, features=min(self.coarse_features, features.features))
        part = part_of(self.batch, rows, self.seed)
        return window_problem(self.structure, part, self.shapes, replace(self.direct, features=features), self.seed)


def window_problem(
    structure: Structure, batch: SequenceBatch, shapes: Mapping[str, tuple[int, ...]], direct: Direct, seed: int
) -> WindowProblem:
    """Place features once; the same seed places them alike.

    A state's own spread is narrower than that of all steps, by which kernels are measured: they have half the least
    bandwidth besides.
    """
    least = min(direct.features.bandwidths) / 2
    features = replace(direct.features, bandwidths=(least, *direct.features.bandwidths))
    windows = lay_out_windows(structure, batch, features, torch.Generator().manual_seed(seed), direct.window)
    return WindowProblem(structure, batch, shapes, direct, seed, windows)


@dataclass(frozen=True)
class Stratum:
    """Windows that begin at some times: their features, how the times are spread, and their share of all windows."""

    features: FittedFeatures
    times: Tensor
    """(T,): the share of the windows that begin so many steps after the first."""
    share: float


@dataclass(frozen=True)
class Windows:
    """Sequences laid out for the direct term: first windows and later ones, and the paths of states through them."""

    states: States
    strata: tuple[Stratum, ...]
    paths: Tensor
    """(P, length) states."""

    @property
    def length(self) -> int:
        """Steps of a window."""
        return self.paths.shape[1]


def check_windows(structure: Structure) -> None:
    """Refuse what windows of hidden categories cannot say."""
    graph = structure.graph
    numbers = [node for node in graph.hidden if not structure.mechanisms[node].space.is_discrete]
    if numbers:
        raise ModelError(f"the direct transport route enumerates hidden categories; {numbers[0]!r} is none")
    if structure.given:
        raise ModelError(f"the direct transport route of sequences takes no covariates; {structure.given[0]!r} is one")
    for edge in graph.lags:
        if edge.parent not in graph.hidden or edge.child not in graph.hidden or edge.by > 1:
            raise ModelError(
                f"the direct transport route of sequences takes lagged edges of one step between hidden nodes; "
                f"{edge} is none: use method='likelihood'"
            )
    for node in graph.observed:
        outside = [parent for parent in graph.parents(node) if parent not in graph.hidden]
        if outside or structure.mechanisms[node].correlated:
            raise ModelError(
                f"the direct transport route of sequences takes observed nodes that depend on hidden ones alone; "
                f"{node!r} does not: use method='likelihood'"
            )


def window_columns(structure: Structure, batch: SequenceBatch, rows: Tensor, length: int) -> list[FeatureColumn]:
    """What windows that begin at ``rows`` (n,) show: the columns of their first steps, of their second, and so on."""
    left = (batch.lengths.repeat_interleave(batch.lengths) - 1 - batch.times)[rows]
    columns: list[FeatureColumn] = []
    for offset in range(length):
        inside = (left >= offset).unsqueeze(0)
        at = torch.where(inside[0], rows + offset, rows)
        for node in structure.graph.observed:
            space = structure.mechanisms[node].space
            values, mask = batch.steps.values[node][:, at], batch.steps.mask[node][:, at]
            columns += node_columns(space, values, mask & inside.unsqueeze(-1))
    return columns


def lay_out_windows(
    structure: Structure,
    batch: SequenceBatch,
    divergence: WhitenedFeatures,
    generator: torch.Generator,
    most: int = 3,
    most_paths: int = 1024,
    fewest_first: int = 30,
) -> Windows:
    """Place features on windows of ``most`` steps, and enumerate paths.

    Windows are shorter where there would be more than ``most_paths`` through them. First windows, one of each sequence,
    count among the others below ``fewest_first``: the covariance of so few says little.
    """
    check_windows(structure)
    states = joint_states(structure, [n for n in structure.graph.order if n in structure.graph.hidden])
    length = max(w for w in range(1, most + 1) if w == 1 or states.size**w <= most_paths)
    length = min(length, int(batch.lengths.max()))
    paths = torch.cartesian_prod(*[torch.arange(states.size)] * length).reshape(-1, length)
    strata = []
    is_first = (batch.times == 0) & (len(batch.lengths) >= fewest_first)
    for rows in (is_first.nonzero()[:, 0], (~is_first).nonzero()[:, 0]):
        shown = rows[_shows(structure, batch, rows)]
        if len(shown):
            fitted = _placed(structure, batch, shown, length, divergence, generator)
            times = torch.bincount(batch.times[shown]).to(batch.steps.weight)
            strata.append(Stratum(fitted, times / times.sum(), len(shown) / batch.rows))
    return Windows(states, tuple(strata), paths)


def _shows(structure: Structure, batch: SequenceBatch, rows: Tensor) -> Tensor:
    """Steps that show any cell."""
    return torch.stack([batch.steps.mask[node][0, rows].any(-1) for node in structure.graph.observed]).any(0)


def _placed(
    structure: Structure,
    batch: SequenceBatch,
    rows: Tensor,
    length: int,
    divergence: WhitenedFeatures,
    generator: torch.Generator,
) -> FittedFeatures:
    """Features placed and whitened on a part of the windows; their mean is over all of them."""
    part = rows[torch.randperm(len(rows), generator=generator)[:WINDOWS_AT_ONCE]].sort().values
    columns = window_columns(structure, batch, part, length)
    features = divergence if len(part) > 2 * divergence.features else replace(divergence, features=len(part) // 2 + 1)
    fitted = features.fit(columns, torch.ones(1, len(part)).to(batch.steps.weight), generator)
    total, count = torch.zeros_like(fitted.mean), torch.zeros_like(fitted.mean)
    for some in rows.split(WINDOWS_AT_ONCE):
        columns = window_columns(structure, batch, some, length)
        seen = _shown_features(fitted, columns)
        total += fitted.mean_of(columns, torch.ones(1, len(some)).to(total)) * seen
        count += seen
    return replace(fitted, mean=total / count.clamp(min=1))


def _shown_features(fitted: FittedFeatures, columns: Sequence[FeatureColumn]) -> Tensor:
    """How many windows show each feature (1, J)."""
    rows = columns[0].seen.shape[1]
    hidden = [~column.seen for column in columns]
    if not any(bool(gap.any()) for gap in hidden):
        return torch.full((1, fitted.size), float(rows), dtype=fitted.mean.dtype)
    seen = torch.ones(1, rows, fitted.size, dtype=torch.bool)
    for column, kernel in zip(columns, fitted.kernels, strict=True):
        seen[..., kernel.features] &= column.seen.unsqueeze(-1)
    return seen.sum(1).to(fitted.mean)


def window_distance(structure: Structure, naturals: Naturals, windows: Windows) -> Tensor:
    """Squared whitened distance of mean features (R,), each stratum by its share of the windows."""
    first, moves = (torch.exp(logs) for logs in hidden_potentials(structure, naturals, windows.states))
    total = torch.zeros(1).to(first)
    for stratum in windows.strata:
        law = _law_over(first, moves, stratum.times.to(first))
        mean = _mean_features(structure, naturals, windows, stratum.features, law, moves)
        total = total + stratum.share * stratum.features.distance(mean)
    return total


def _law_over(first: Tensor, moves: Tensor, times: Tensor, settled: float = 1e-10) -> Tensor:
    """The law of the state (R, S), averaged over times after the first step; constant once it has ``settled``."""
    replicas = max(len(first), len(moves))
    law, mean = first.expand(replicas, -1), first.new_zeros(1)
    for step in range(len(times)):
        mean = mean + times[step] * law
        after = (law.unsqueeze(1) @ moves).squeeze(1)
        if float((after - law).abs().max().detach()) < settled:
            return mean + times[step + 1 :].sum() * after
        law = after
    return mean


def _mean_features(
    structure: Structure, naturals: Naturals, windows: Windows, fitted: FittedFeatures, law: Tensor, moves: Tensor
) -> Tensor:
    """Mean features (R, J) of the model's windows."""
    states, paths = windows.states, windows.paths
    weight = law[:, paths[:, 0]]
    for step in range(1, windows.length):
        weight = weight * moves[:, paths[:, step - 1], paths[:, step]]
    values = {name: value.unsqueeze(0) for name, value in states.now.items()}
    means: list[Tensor] = []
    kernels = list(fitted.kernels)
    for step in range(windows.length):
        for node in structure.graph.observed:
            own = [kernels.pop(0) for _ in range(structure.mechanisms[node].space.cells)]
            parents = structure.parents(node, values)
            for mean in leaf_means(structure.mechanisms[node], naturals[node], parents, own):
                spread = mean.expand(-1, states.size, -1)
                means.append(spread[:, paths[:, step]])
    return (weight.unsqueeze(1) @ fitted.combine(means)).squeeze(1)
