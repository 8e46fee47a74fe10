r"""Rows whose unknowns are hidden categories alone, read through features: mixtures and latent classes.

Where :math:`\log p(x_v \mid c) = f_v(x_v) \cdot \eta_v(c)` for every observed node, a pass is two products of matrices
for all starts: the log-densities of all rows in all joint states, and the expected sums of features. By Fisher's
identity the gradient is that of the expected complete-data log-density; its maximum in closed form is the update. Steps
of chains with hidden states read their observed nodes in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor

from otpdag.data import Batch, random_part
from otpdag.likelihood.graph_problem import rows_along_graph
from otpdag.likelihood.rows import LayOut, RowObjective, SummedRows
from otpdag.likelihood.swapped_states import SWAP_ROWS, Reading, swapped, swaps
from otpdag.mechanisms.base import (
    ExponentialFamily,
    Family,
    configurations,
    defines_together,
    fitted_to_rows,
    has_closed_form,
)
from otpdag.numerics import joint_one_hot
from otpdag.problem import LossTerms, Pace, Refinement, Updates, packed_point, split_point
from otpdag.spaces import Space
from otpdag.structure import Naturals, Structure

Values = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Emission:
    """One observed node.

    Attributes:
        node: Its name.
        mechanism: How it comes about.
        rows: Of its table, one for each configuration of its parents.
        configuration: Row of its table for each hidden state and each configuration of its observed parents (S, O).
        observed: The node with its observed parents, which are categories.
    """

    node: str
    mechanism: ExponentialFamily
    rows: int
    configuration: Tensor
    observed: Family

    def features(self, values: Values, mask: Values) -> Tensor | None:
        """Features (n, O * F) of rows (n, width): those of the node, at the configuration of its observed parents."""
        own, joint = self.mechanism.features(values[self.node], mask[self.node]), configurations(self.observed, values)
        return own if own is None or joint is None else (joint.unsqueeze(-1) * own.unsqueeze(-2)).flatten(-2)

    def coefficients(self, naturals: Naturals) -> Tensor:
        """In every state (R, S, O * F)."""
        return self.mechanism.coefficients(naturals[self.node])[:, self.configuration].flatten(2)

    def maximised(self, naturals: Naturals, sums: Tensor) -> dict[str, Tensor]:
        """Natural parameters from expected sums of features in every state (R, S, O * F)."""
        by_row = sums.unflatten(-1, (self.configuration.shape[1], -1)).flatten(1, 2)
        if not self._is_table:
            empty = by_row.new_zeros(len(sums), self.rows, by_row.shape[-1])
            by_row = empty.index_add_(1, self.configuration.flatten(), by_row)
        return self.mechanism.fitted(naturals[self.node], by_row)

    @cached_property
    def _is_table(self) -> bool:
        """Whether states, and configurations in them, are the rows of its table in their own order."""
        return self.configuration.flatten().tolist() == list(range(self.rows))


@dataclass(frozen=True, eq=False)
class Emissions:
    """All observed nodes: the features of a row side by side, and a one."""

    nodes: tuple[Emission, ...]
    sizes: tuple[int, ...]

    def features(self, values: Values, mask: Values) -> Tensor:
        """Features of rows (n, F + 1)."""
        parts = [one.features(values, mask) for one in self.nodes]
        one = next(iter(values.values()))[:, :1]
        return torch.cat([*(part for part in parts if part is not None), torch.ones_like(one)], -1)

    def coefficients(self, naturals: Naturals, log_prior: Tensor) -> Tensor:
        """In every state, the last one the logarithm of its prior weight (R, S): (R, S, F + 1)."""
        parts = [one.coefficients(naturals) for one in self.nodes]
        replicas = max(len(part) for part in (*parts, log_prior))
        return torch.cat([part.expand(replicas, *part.shape[1:]) for part in (*parts, log_prior.unsqueeze(-1))], -1)

    def maximised(self, naturals: Naturals, sums: Tensor) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Natural parameters of every node from the expected sums (R, S, F + 1)."""
        for one, part in zip(self.nodes, sums[..., :-1].split(self.sizes, -1), strict=True):
            yield one.node, one.maximised(naturals, part)


def emissions_of(
    structure: Structure,
    states: Mapping[str, Tensor],
    values: Values,
    mask: Values,
    given: Sequence[str] = (),
    most: int = 2_000,
) -> Emissions | None:
    """How every observed node is read, where ``states`` (S, width) are what joint states say of hidden nodes.

    ``values`` and ``mask`` are a few rows by which features are tried; None where a node has none, or a row more than
    ``most``, beyond which a product of matrices is no longer the fast way.
    """
    nodes, sizes = [], []
    for node in structure.graph.observed:
        mechanism = structure.mechanisms[node]
        if mechanism.is_given or node in given:
            continue
        parents = mechanism.family.parents
        if any(not space.is_discrete for _, space in parents):
            return None
        if not isinstance(mechanism, ExponentialFamily):
            return None
        if not defines_together(mechanism, "log_prob", "features", "coefficients", "fitted"):
            return None
        many = math.prod(space.width for _, space in parents)
        observed = tuple((name, space) for name, space in parents if name not in states)
        one = Emission(node, mechanism, many, _configuration(parents, states), Family(node, observed))
        if any(name not in values for name, _ in observed):
            return None
        tried = one.features(values, mask)
        if tried is None:
            return None
        nodes.append(one)
        sizes.append(tried.shape[1])
    return Emissions(tuple(nodes), tuple(sizes)) if nodes and sum(sizes) <= most else None


def _configuration(parents: Sequence[tuple[str, Space]], states: Mapping[str, Tensor]) -> Tensor:
    """Row of a table for each hidden state and configuration of observed parents (S, O)."""
    total = stride = math.prod(space.width for name, space in parents if name not in states)
    code = torch.zeros(len(next(iter(states.values()))), total, dtype=torch.long)
    for name, space in parents:
        if name in states:
            digit = states[name].argmax(-1).unsqueeze(-1)
        else:
            stride //= space.width
            digit = (torch.arange(total) // stride % space.width).unsqueeze(0)
        code = code * space.width + digit
    return code


@dataclass(frozen=True)
class StateProblem(SummedRows):
    """Rows, and how they are read in every joint state of the hidden categories."""

    route: ClassVar[str] = "states"

    structure: Structure
    batch: Batch
    shapes: Mapping[str, tuple[int, ...]]
    emissions: Emissions
    states: Mapping[str, Tensor]
    in_rows: LayOut
    """Makes the problem of the same objective that enumerates."""
    seed: int

    block_entries: ClassVar[int] = 2**20
    """Rows times states times replicas, or rows times features, that are held at a time."""
    kept_entries: ClassVar[int] = 2**22
    """Features that are kept rather than computed in every pass."""
    filled_rows: ClassVar[int] = 2**12
    """Rows for which features are computed at a time."""
    rows_for_each_parameter: ClassVar[int] = 2
    """Of a part: fewer would not tell starts apart."""

    def loss(self, point: Tensor) -> LossTerms:
        """The loss of a row: reported as reconstruction, since its parts are not told apart."""
        coefficients = self._coefficients(self.naturals(point))
        loss, sums = self._expected(coefficients.detach())
        surrogate = -(coefficients * sums).flatten(1).sum(-1) / self.batch.weight.sum(-1)
        loss = surrogate + (loss - surrogate).detach()
        return LossTerms.of(loss, reconstruction=loss)

    updates = Updates()
    """Every node has a maximum in closed form."""

    pace = Pace(patience=20)
    """Twice as many updates as most mixtures need that are near their optimum."""

    def update(self, point: Tensor) -> tuple[Tensor, LossTerms]:
        """Expected sums, then each mechanism's maximum."""
        with torch.no_grad():
            loss, sums = self._expected(self._coefficients(self.naturals(point)))
            moved = self._maximised(point, sums)
        return moved, LossTerms.of(loss, reconstruction=loss)

    def _maximised(self, point: Tensor, sums: Tensor) -> Tensor:
        """What is likeliest for expected sums of features (R, S, F + 1); what nodes keep comes from ``point``."""
        theta, naturals = split_point(point, self.shapes)[0], self.naturals(point)
        maximised = dict(self.emissions.maximised(naturals, sums))
        count = sums[..., -1]
        for node in self.structure.graph.hidden:
            if self.structure.keys[node]:
                mechanism = self.structure.mechanisms[node]
                maximised[node] = fitted_to_rows(mechanism, naturals[node], self.states[node], self.states, count)
        return packed_point(theta | self.structure.raw({**naturals, **maximised}), self.shapes, len(point))

    @torch.no_grad()
    def refine(self, point: Tensor) -> Refinement | None:
        """The point (1, P) with states swapped, where that has a lower loss; see :mod:`swapped_states`."""
        if len(self.structure.graph.hidden) > 1 or len(point) > 1 or len(self.weight) > 1:
            return None
        part = self.subset(SWAP_ROWS)
        tried = swaps(part._reading(point))
        candidates = part._maximised(point.expand(len(tried), -1), tried.sums) if len(tried) else point[:0]
        return swapped(self, part, point, candidates)

    def _reading(self, point: Tensor) -> Reading:
        features = self._features(slice(None))
        log_joint = features @ self._coefficients(self.naturals(point))[0].T
        return Reading(features, self.weight[0], log_joint.softmax(-1))

    def _coefficients(self, naturals: Naturals) -> Tensor:
        states = {name: value.unsqueeze(0) for name, value in self.states.items()}
        log_prior = torch.zeros(1, len(next(iter(self.states.values()))), dtype=torch.float64)
        for node in self.structure.graph.hidden:
            mechanism = self.structure.mechanisms[node]
            log_prior = log_prior + mechanism.log_prob(
                naturals[node], states[node], {name: states[name] for name in self.structure.graph.parents(node)}
            )
        return self.emissions.coefficients(naturals, log_prior)

    def _expected(self, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """The loss (R,) and expected sums of features (R, S, F + 1)."""
        weight = self.batch.weight
        replicas = max(len(coefficients), len(weight))
        coefficients = coefficients.expand(replicas, -1, -1)
        _, size, features = coefficients.shape
        table = coefficients.reshape(-1, features)
        sums, total = torch.zeros_like(table), table.new_zeros(replicas)
        for rows, block in self._blocks(max(1, self.block_entries // len(table))):
            posterior = (block @ table.T).unflatten(-1, (replicas, size))
            top = posterior.amax(-1, keepdim=True)
            posterior.sub_(top).exp_()
            whole = posterior.sum(-1, keepdim=True)
            own = weight[:, rows].T.unsqueeze(-1)
            total += (own * (top + whole.log())).sum((0, 2))
            posterior.mul_(own / whole)
            sums += posterior.flatten(1).T @ block
        return -total / weight.sum(-1), sums.unflatten(0, (replicas, size))

    def _blocks(self, most: int) -> Iterator[tuple[slice, Tensor]]:
        """Features of all rows, a block at a time."""
        size = sum(self.emissions.sizes) + 1
        most = min(most, self.filled_rows, max(1, self.block_entries // size))
        for at in range(0, self.rows, self.filled_rows):
            held = self._kept[at // self.filled_rows] if self._kept else None
            for begin in range(at, min(at + self.filled_rows, self.rows), most):
                rows = slice(begin, min(begin + most, at + self.filled_rows, self.rows))
                yield rows, self._features(rows) if held is None else held[begin - at : begin - at + most]

    @cached_property
    def _kept(self) -> tuple[Tensor, ...]:
        """Features of all rows in blocks, none where there are too many; one tensor of all would want new memory."""
        if self.rows * (sum(self.emissions.sizes) + 1) > self.kept_entries:
            return ()
        return tuple(self._features(slice(at, at + self.filled_rows)) for at in range(0, self.rows, self.filled_rows))

    def _features(self, rows: slice) -> Tensor:
        values = {name: value[0, rows].double() for name, value in self.batch.values.items()}
        return self.emissions.features(values, {name: seen[0, rows] for name, seen in self.batch.mask.items()})

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> StateProblem:
        """Fewer rows, but enough for the parameters."""
        if not isinstance(rows, Tensor):
            parameters = sum(torch.Size(shape).numel() for shape in self.shapes.values())
            rows = max(rows, self.rows_for_each_parameter * parameters)
        part = random_part(self.rows, rows, self.seed)
        return self if part is None else replace(self, batch=self.batch.take(part))

    # -- rows ---------------------------------------------------------------------------------------------------------

    def reweighted(self, factors: Tensor) -> StateProblem:
        """The same rows with other weights."""
        return replace(self, batch=replace(self.batch, weight=self.batch.weight * factors))

    def simulated(self, point: Tensor, size: int, seed: int) -> StateProblem:
        """Rows that the model makes, each with the gaps and covariates of a random row."""
        return replace(self, batch=self.drawn(point, size, seed))


MOST_STATES = 64
"""Joint states of hidden categories up to which all are read at once."""


def has_features(structure: Structure, batch: Batch) -> bool:
    """Whether hidden nodes, all of them categories, have few states, and every observed node has features."""
    graph = structure.graph
    if not batch.shares_rows or structure.ties_parameters or batch.weight.device.type != "cpu":
        return False
    for node in graph.hidden:
        own = structure.mechanisms[node]
        if not own.has_density or not (has_closed_form(own) or not structure.keys[node]):
            return False
        if not set(graph.parents(node)) <= set(graph.hidden):
            return False
    if any(graph.children(node) and not bool(batch.mask[node].all()) for node in graph.observed):
        return False
    states = math.prod(structure.mechanisms[node].space.width for node in structure.hidden_categories)
    return states <= MOST_STATES and _emissions(structure, batch) is not None


def rows_by_states(about: RowObjective, batch: Batch, seed: int) -> StateProblem:
    """Lay rows out whose nodes have features."""
    emissions = _emissions(about.structure, batch)
    assert emissions is not None, "asked before"
    in_rows, states = partial(rows_along_graph, about), _joint_states(about.structure)
    return StateProblem(about.structure, batch, about.shapes, emissions, states, in_rows, seed)


def _joint_states(structure: Structure) -> dict[str, Tensor]:
    sizes = [structure.mechanisms[node].space.width for node in structure.hidden_categories]
    return dict(zip(structure.hidden_categories, joint_one_hot(sizes), strict=True))


def _emissions(structure: Structure, batch: Batch) -> Emissions | None:
    """How observed nodes are read, tried by rows with gaps."""
    gaps = torch.stack([~seen[0].all(-1) for seen in batch.mask.values()]).any(0)
    tried = batch.take(torch.cat([torch.arange(2), torch.nonzero(gaps)[:, 0]]))
    values, mask = ({name: one[0] for name, one in held.items()} for held in (tried.values, tried.mask))
    return emissions_of(structure, _joint_states(structure), values, mask)
