r"""The model's distribution of a few neighbouring steps: mean features of windows of sequences.

The model's side is exact: the law of the state at time t by powers of the transition matrix, the paths of a window
enumerated, what is observed integrated out of its kernels. First windows are told apart from later ones, for they tell
how a sequence begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otpdag.data.sequences import SequenceBatch
from otpdag.divergences.whitened import FeatureColumn, FittedFeatures, WhitenedFeatures
from otpdag.errors import ModelError
from otpdag.likelihood.chain_layout import States, joint_states
from otpdag.matching.mean_features import columns_of, leaf_means, node_columns
from otpdag.structure import Naturals, Structure

MOST_PATHS = 1024  # paths of states through a window; it is shorter where there would be more
PLACED = 8000  # windows on which features are placed
CHUNK = 8000  # windows whose features are computed at a time
FEWEST_FIRST = 30  # first windows, one of each sequence, below which their covariance says little
BLOCK = 10  # windows whose mean is taken at a time; longer than states usually stay
SETTLED = 1e-10  # a change of the state's law below which it no longer changes


@dataclass(frozen=True)
class Stratum:
    """Windows that begin at some times: their features, how the times are spread, and their share of all windows."""

    features: FittedFeatures
    times: Tensor
    """(T,): the share of the windows that begin so many steps after the first."""
    share: float
    rest: float = 0.0
    """The part of the distance that no parameters change, once features are compared along some directions only."""

    @property
    def is_first(self) -> bool:
        """Whether all of its windows are the first of their sequences."""
        return len(self.times) == 1


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
                f"{edge} is none: use method='entropic'"
            )
    for node in graph.observed:
        outside = [parent for parent in graph.parents(node) if parent not in graph.hidden]
        if outside or structure.mechanisms[node].correlated:
            raise ModelError(
                f"the direct transport route of sequences takes observed nodes that depend on hidden ones alone; "
                f"{node!r} does not: use method='entropic'"
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
    structure: Structure, batch: SequenceBatch, divergence: WhitenedFeatures, generator: torch.Generator, most: int = 3
) -> Windows:
    """Place features on windows of ``most`` steps, and enumerate paths; few first windows count among the others."""
    check_windows(structure)
    states = joint_states(structure, [n for n in structure.graph.order if n in structure.graph.hidden])
    length = max(w for w in range(1, most + 1) if w == 1 or states.size**w <= MOST_PATHS)
    length = min(length, int(batch.lengths.max()))
    paths = torch.cartesian_prod(*[torch.arange(states.size)] * length).reshape(-1, length)
    strata = []
    is_first = (batch.times == 0) & (len(batch.lengths) >= FEWEST_FIRST)
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
    part = rows[torch.randperm(len(rows), generator=generator)[:PLACED]].sort().values
    columns = window_columns(structure, batch, part, length)
    features = divergence if len(part) > 2 * divergence.features else replace(divergence, features=len(part) // 2 + 1)
    fitted = features.fit(columns, torch.ones(1, len(part)).to(batch.steps.weight), generator)
    total, count = torch.zeros_like(fitted.mean), torch.zeros_like(fitted.mean)
    for some in rows.split(CHUNK):
        columns = window_columns(structure, batch, some, length)
        seen = shown_features(fitted, columns)
        total += fitted.mean_of(columns, torch.ones(1, len(some)).to(total)) * seen
        count += seen
    return replace(fitted, mean=total / count.clamp(min=1))


def shown_features(fitted: FittedFeatures, columns: Sequence[FeatureColumn]) -> Tensor:
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
    laws = state_laws(structure, naturals, windows.states)
    total = torch.zeros(1).to(laws[0])
    for stratum in windows.strata:
        mean = stratum_mean(structure, naturals, windows, stratum, laws)
        total = total + stratum.share * (stratum.features.distance(mean) + stratum.rest)
    return total


def stratum_mean(
    structure: Structure, naturals: Naturals, windows: Windows, stratum: Stratum, laws: tuple[Tensor, Tensor]
) -> Tensor:
    """Mean features (R, J) of the model's windows that begin when those of a stratum do."""
    first, moves = laws
    law = _law_over(first, moves, stratum.times.to(first))
    return _mean_features(structure, naturals, windows, stratum.features, law, moves)


def state_laws(structure: Structure, naturals: Naturals, states: States) -> tuple[Tensor, Tensor]:
    """Probabilities of the first step's states (R, S) and of moves (R, S, S) from each state to each."""
    log_first = torch.zeros(1, 1, dtype=states.now[states.nodes[0]].dtype)
    log_moves = torch.zeros(1, 1, 1, dtype=log_first.dtype)
    for name, mechanism in structure.mechanisms.items():
        base = structure.base(name)
        if base not in states.nodes:
            continue
        parents = {}
        for parent, _ in mechanism.family.parents:
            known = states.now.get(parent)
            parents[parent] = states.before[parent][None, :, None] if known is None else known[None, None]
        table = mechanism.log_prob(naturals[name], states.now[base][None, None], parents)
        if name != base or not structure.longest_lag(base):
            log_first = log_first + table[:, 0]
        if name == base:
            log_moves = log_moves + table
    moves = torch.exp(log_moves.expand(-1, states.size, states.size))
    return torch.exp(log_first.expand(-1, states.size)), moves


def _law_over(first: Tensor, moves: Tensor, times: Tensor) -> Tensor:
    """The law of the state (R, S), averaged over times after the first step; constant once it has settled."""
    replicas = max(len(first), len(moves))
    law, mean = first.expand(replicas, -1), first.new_zeros(1)
    for step in range(len(times)):
        mean = mean + times[step] * law
        after = (law.unsqueeze(1) @ moves).squeeze(1)
        if float((after - law).abs().max().detach()) < SETTLED:
            return mean + times[step + 1 :].sum() * after
        law = after
    return mean


def laws_by_time(first: Tensor, moves: Tensor, longest: int) -> Tensor:
    """The law of the state after 0, 1, ... steps (T, S) of a single replica (1, S); the last holds from then on."""
    laws = [first[0]]
    while len(laws) <= longest:
        after = laws[-1] @ moves[0]
        if float((after - laws[-1]).abs().max()) < SETTLED:
            break
        laws.append(after)
    return torch.stack(laws)


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
            own = [kernels.pop(0) for _ in range(columns_of(structure, node))]
            parents = structure.parents(node, values)
            for mean in leaf_means(structure.mechanisms[node], naturals[node], parents, own):
                spread = mean.expand(-1, states.size, -1)
                means.append(spread[:, paths[:, step]])
    return (weight.unsqueeze(1) @ fitted.combine(means)).squeeze(1)


def refined_windows(structure: Structure, windows: Windows, sample: SequenceBatch, ridge: float) -> Windows:
    """The same windows, features of later steps whitened by their long-run covariance in a sample of the model.

    The first windows are as many as there are sequences, too few to be worth a covariance of their own from the model.
    """
    rows = block_rows(sample, windows.length)
    if rows is None:
        return windows
    strata = []
    for stratum in windows.strata:
        if not stratum.is_first:
            means = block_means(structure, stratum.features, sample, windows.length, rows)
            covariance = long_run_covariance(means, rows.shape[1]).unsqueeze(0)
            stratum = replace(stratum, features=stratum.features.whitened_by(covariance, ridge))
        strata.append(stratum)
    return replace(windows, strata=tuple(strata))


def block_rows(sample: SequenceBatch, length: int, most: int = BLOCK) -> Tensor | None:
    """Rows (blocks, b) at which windows begin, b in a row, in sequences of one length; None where these are short."""
    many, steps = len(sample.lengths), int(sample.lengths[0])
    block = min(most, steps - length)
    if block < 1:
        return None
    inside = (steps - length) // block * block
    starts = torch.arange(many).unsqueeze(-1) * steps + torch.arange(1, 1 + inside)
    return starts.reshape(-1, block)


def block_means(
    structure: Structure, fitted: FittedFeatures, sample: SequenceBatch, length: int, rows: Tensor
) -> Tensor:
    """Mean features (blocks, J) of the windows that begin at the rows (blocks, b) of each block."""
    means = []
    for some in rows.split(max(1, CHUNK // rows.shape[1])):
        columns = window_columns(structure, sample, some.reshape(-1), length)
        values = fitted.combine([kernel(column.values) for kernel, column in zip(fitted.kernels, columns, strict=True)])
        means.append(values.reshape(*some.shape, fitted.size).mean(1))
    return torch.cat(means)


def long_run_covariance(means: Tensor, block: int) -> Tensor:
    r"""Covariance (J, J) of a mean of features times the number of windows, by means (blocks, J) over blocks of b.

    Neighbouring windows share steps and states, so that their mean varies more than that of independent ones:

    .. math:: \Omega = \sum_h \mathrm{Cov}(f_t, f_{t+h}) \approx b \, \mathrm{Var}\Big(\frac1b \sum_{i<b} f_{t+i}\Big).

    Weighted by its inverse, the method of moments is efficient (Hansen 1982).
    """
    centred = means - means.mean(0)
    return centred.T @ centred / len(means) * block
