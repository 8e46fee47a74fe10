r"""How far rows are from a model by optimal transport, in the data's units, and what would have to move.

A number's distance is :math:`W_1` of its column and the model's, in the column's own units; a category's is the share
of rows that would have to change. All columns together are compared along random directions, each of at most six nodes,
whatever the graph says, so that models of different graphs are comparable,

.. math:: \frac1K \sum_k \frac{W_1(\langle v_k, x \rangle, \langle v_k, x_\theta \rangle)}{E|\langle v, e \rangle|},

divided by the mean length of a unit vector :math:`e` along a direction, so that rows which are all shifted by
:math:`\delta` standard deviations are :math:`|\delta|` away. What chance alone gives is told by tables of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.divergences import SlicedWasserstein
from otpdag.likelihood.row_posterior import Fitted, posterior_draws
from otpdag.matching.transport_cost import directions
from otpdag.numerics import Array
from otpdag.simulation import ancestral, sequences_like

CONSTANT = 1e-12  # a spread that is none


class Distance(float):
    """Standard deviations between rows and a model, all columns together, and what chance alone would give.

    Attributes:
        chance: The mean of the same for tables that the model makes.
        upper: What nineteen of twenty of these do not exceed.
        nodes: A row for each node, the one furthest beyond chance first: ``distance`` in the column's own units (of a
            category, the share of rows in another one), the same in ``deviations``, and ``chance`` and ``upper`` of it.

    >>> told = Distance(0.31, 0.08, 0.1, pd.DataFrame({"deviations": [0.4], "upper": [0.1]}, index=["price"]))
    >>> told.describe()
    "the model is 0.31 standard deviations from the data, chance explains 0.08; most of it in 'price'"
    """

    def __new__(cls, value: float, chance: float, upper: float, nodes: pd.DataFrame) -> Distance:
        """A number with more to tell."""
        made = super().__new__(cls, value)
        made.chance, made.upper, made.nodes = chance, upper, nodes
        return made

    chance: float
    upper: float
    nodes: pd.DataFrame

    def __reduce__(self) -> tuple[type[Distance], tuple[float, float, float, pd.DataFrame]]:
        """Copied with all that it tells."""
        return type(self), (float(self), self.chance, self.upper, self.nodes)

    def describe(self) -> str:
        """All of it in a sentence."""
        told = f"the model is {float(self):.2g} standard deviations from the data, chance explains {self.chance:.2g}"
        if float(self) <= self.upper:
            return told
        first = self.nodes.iloc[0]
        alone = first["deviations"] > first["upper"]
        return f"{told}; {f'most of it in {first.name!r}' if alone else 'columns agree one by one, not together'}"


def transport_distance(
    fitted: Fitted, batch: Batch | SequenceBatch, seed: int, *, most: int = 4000, repeats: int = 20
) -> Distance:
    """Rows against as many samples of the model, at most so many; of sequences, pairs of neighbouring steps."""
    # not the stream of `Model.sample`: rows drawn with the same seed would be no distance from the model
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence([seed, 1]).generate_state(1)[0]))
    if isinstance(batch, SequenceBatch):
        data, draws = _steps(fitted, batch, generator, most)
    else:
        data, draws = _rows(fitted, batch, generator, most)
    widths = {name: value.shape[1] for name, value in data.items()}
    ends = np.cumsum([0, *widths.values()])
    places = {name: slice(start, stop) for name, start, stop in zip(widths, ends[:-1], ends[1:], strict=True)}
    sliced = SlicedWasserstein(projections=128, p=1.0)
    along = directions([list(places.values())], int(ends[-1]), sliced, seed).numpy().astype(float)
    reads = (along != 0).sum(0)
    lengths = sp.special.gamma(reads / 2) / (np.sqrt(np.pi) * sp.special.gamma((reads + 1) / 2))
    model = next(draws)
    beside = np.sort(np.concatenate(list(model.values()), 1) @ along, 0)

    def told(values: Mapping[str, Array]) -> list[float]:
        apart = np.abs(np.sort(np.concatenate(list(values.values()), 1) @ along, 0) - beside).mean(0)
        return [float((apart / lengths).mean()), *(_alone(fitted, n, values[n], model[n]) for n in values)]

    own, null = told(data), np.array([told(next(draws)) for _ in range(repeats)])
    mean, upper = null.mean(0), np.quantile(null, 0.95, axis=0)
    units = [_unit(fitted, batch, node) for node in data]
    table = {"distance": np.multiply(own[1:], units), "deviations": own[1:], "chance": mean[1:], "upper": upper[1:]}
    nodes = pd.DataFrame(table, index=pd.Index(list(data), name="node"))
    first = (nodes["deviations"] - nodes["chance"]).sort_values(ascending=False, kind="stable").index
    return Distance(own[0], float(mean[0]), float(upper[0]), nodes.loc[first])


def _alone(fitted: Fitted, node: str, left: Array, right: Array) -> float:
    """One node's distance from as many samples: the share of other categories, or the mean of its coordinates'."""
    if fitted.structure.mechanisms[node].space.is_discrete:
        return float(np.abs(left.mean(0) - right.mean(0)).sum() / np.sqrt(2))  # one-hot vectors are one apart here
    return float(np.abs(np.sort(left, 0) - np.sort(right, 0)).mean())


def _unit(fitted: Fitted, batch: Batch | SequenceBatch, node: str) -> float:
    """What one deviation is in a column's own units."""
    rows = batch.steps if isinstance(batch, SequenceBatch) else batch
    if fitted.structure.mechanisms[node].space.is_discrete:
        return 1.0
    return float(_moments(rows, node)[1].mean())


Draws = Iterator[dict[str, Array]]


def _rows(fitted: Fitted, batch: Batch, generator: torch.Generator, most: int) -> tuple[dict[str, Array], Draws]:
    """Random rows by node (N, width), completed, in standard deviations, and tables of the model without end.

    What no density completes is left out of both.
    """
    structure, seed = fitted.structure, generator.initial_seed()
    units = {node: _moments(batch, node) for node in structure.graph.observed}
    if batch.rows > most:
        batch = batch.take(torch.randperm(batch.rows, generator=generator)[:most].sort().values)
    completed = _completed(fitted, batch, seed)
    seen = {node: _by_cell(completed, node)[0] for node in units}
    given = {node: batch.values[node] for node in structure.given}

    def standard(node: str, value: Tensor) -> Array:
        centre, spread = units[node]
        return ((value.expand(1, batch.rows, -1)[0] - centre) / spread * seen[node]).numpy()

    def draws() -> Draws:
        while True:
            drawn = ancestral(structure, fitted.naturals, batch.rows, generator, do=given)
            yield {node: standard(node, drawn[node]) for node in units}

    return {node: standard(node, completed.values[node]) for node in units}, draws()


def _steps(
    fitted: Fitted, batch: SequenceBatch, generator: torch.Generator, most: int
) -> tuple[dict[str, Array], Draws]:
    """Steps beside those before them, of some sequences and of the model; missing cells are missing in both."""
    some = torch.randperm(len(batch.lengths), generator=generator)[: max(1, -(-most // int(batch.lengths.max())))]
    part = batch.take(some.sort().values)
    few = torch.randperm(part.rows, generator=generator)[:most]
    seen = {node: _by_cell(part.steps, node) for node in fitted.structure.graph.observed}
    units = {node: _moments(part.steps, node) for node in seen}

    def pairs(values: Mapping[str, Tensor]) -> dict[str, Array]:
        own = {node: (values[node] - units[node][0]) / units[node][1] * seen[node] for node in seen}
        return {node: torch.cat([v, part.lagged(v, 1)], -1)[0, few].numpy() for node, v in own.items()}

    def draws() -> Draws:
        while True:
            yield pairs(sequences_like(fitted.structure, fitted.naturals, part, generator).steps.values)

    return pairs(part.steps.values), draws()


def _by_cell(batch: Batch, node: str) -> Tensor:
    """Which numbers of a node are seen (1, N, width or 1)."""
    seen = batch.mask[node].to(torch.float64)
    return seen if seen.shape[-1] == batch.values[node].shape[-1] else seen[..., :1]


def _completed(fitted: Fitted, batch: Batch, seed: int) -> Batch:
    """Rows with their gaps drawn from the model, which may depend on what is seen; columns without a value stay so.

    Where a node has no density, rows stay as they are.
    """
    observed = [fitted.structure.mechanisms[node] for node in fitted.structure.graph.observed]
    complete = all(bool(mask.all()) for mask in batch.mask.values())
    if complete or not all(one.has_density or one.is_given for one in observed):
        return batch
    drawn = posterior_draws(fitted, batch, 1, seed)
    values = {node: drawn[node].permute(1, 0, 2) for node in batch.values}
    mask = {node: seen.any(1, keepdim=True).expand_as(seen) for node, seen in batch.mask.items()}
    return Batch(values, mask, batch.weight)


def _moments(batch: Batch, node: str) -> tuple[Tensor, Tensor]:
    """Mean and spread of a column's seen cells; a constant has a spread of one, and one-hot vectors are one apart."""
    value, seen = batch.values[node][0], _by_cell(batch, node)[0]
    if batch.mask[node].shape[-1] != value.shape[-1]:
        return torch.zeros(1, dtype=torch.float64), torch.full((1,), 2.0, dtype=torch.float64).sqrt()
    count = seen.sum(0).clamp(min=1)
    mean = (value * seen).sum(0) / count
    spread = (((value - mean) * seen) ** 2).sum(0).div(count).sqrt()
    return mean, torch.where(spread > CONSTANT, spread, torch.ones_like(spread))


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Which sample of the model each row is matched with, at least cost in all.

    The cost of a pair is summed over the columns that the row shows: differences in standard deviations, and one for
    another category.

    Attributes:
        sources: The sample of each row, hidden nodes included.
        moves: By how much cells would have to move, in their own units; of categories, what they would become.
        costs: What each cell's move costs; NaN where it is missing.
        columns: The mean cost of each column, and what it is between two tables of the model, ``chance``.
    """

    sources: pd.DataFrame
    moves: pd.DataFrame
    costs: pd.DataFrame
    columns: pd.DataFrame

    def most_moved(self, rows: int = 10) -> pd.DataFrame:
        """The costs of those rows whose match is furthest away."""
        return self.costs.loc[self.costs.sum(axis=1).sort_values(ascending=False, kind="stable").index[:rows]]


def transport_plan(
    fitted: Fitted,
    batch: Batch,
    index: pd.Index,
    decoded: Callable[[Mapping[str, Tensor], pd.Index], pd.DataFrame],
    seed: int,
    most: int,
) -> Plan:
    """Match random rows, at most so many, with as many samples of the model, exactly."""
    generator, structure = torch.Generator().manual_seed(seed), fitted.structure
    units = {node: _moments(batch, node) for node in structure.graph.observed}
    some = torch.randperm(batch.rows, generator=generator)[:most].sort().values
    part = batch.take(some)
    given = {node: part.values[node] for node in structure.given}
    made, other = (ancestral(structure, fitted.naturals, part.rows, generator, do=given) for _ in range(2))
    seen = {node: _by_cell(part, node)[0] for node in units}
    costs, match = _matched(structure.given, units, part.values, made, seen)
    by_chance, _ = _matched(structure.given, units, other, made, seen)
    sources = {node: value.expand(1, part.rows, -1)[0, match] for node, value in made.items()}
    rows = index[some.numpy()]
    told = pd.DataFrame({node: np.where(seen[node][:, 0] > 0, costs[node], np.nan) for node in costs}, index=rows)
    columns = {"cost": told.mean(), "chance": {node: value.mean() for node, value in by_chance.items()}}
    shown = {node: value for node, value in sources.items() if node in units}
    before, after = (decoded(values, rows) for values in ({n: part.values[n][0] for n in shown}, shown))
    numbers = before.select_dtypes("number").columns
    moves = after.where(after != before)
    moves[numbers] = after[numbers] - before[numbers]
    summed = pd.DataFrame(columns).sort_values("cost", ascending=False, kind="stable").rename_axis("node")
    return Plan(decoded(sources, rows), moves, told, summed)


def _matched(
    given: tuple[str, ...],
    units: Mapping[str, tuple[Tensor, Tensor]],
    rows: Mapping[str, Tensor],
    made: Mapping[str, Tensor],
    seen: Mapping[str, Tensor],
) -> tuple[dict[str, Array], NDArray[np.intp]]:
    """Each row's costs by node, and the number of the sample that it is matched with."""
    from scipy import optimize

    each: dict[str, Array] = {}
    for node, (_, spread) in units.items():
        many = len(seen[node])
        left, right = ((v[node].expand(1, many, -1)[0] / spread).numpy() for v in (rows, made))
        shown, is_category = seen[node].numpy(), seen[node].shape[1] != left.shape[1]
        apart = np.zeros((many, many))
        for column in range(left.shape[1]):
            show = shown[:, min(column, shown.shape[1] - 1)]
            apart += np.abs(left[:, None, column] - right[None, :, column]) * show[:, None]
        each[node] = apart / np.sqrt(2) if is_category else apart
    match = optimize.linear_sum_assignment(np.sum(list(each.values()), axis=0))[1]
    numbers = np.arange(len(match))
    return {node: apart[numbers, match] for node, apart in each.items() if node not in given}, match
