r"""Hidden categories whose joint states are read through features: mixtures, latent classes, and steps of chains.

Where :math:`\log p(x_v \mid c) = f_v(x_v) \cdot \eta_v(c)` for every observed node, a pass is two products of matrices
for all starts: the log-densities of all rows in all joint states, and the expected sums of features. By Fisher's
identity the gradient is that of the expected complete-data log-density; its maximum in closed form is the update.
Chains of states ask for the same sums, and for expected counts of pairs of states.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.likelihood.chain_layout import HiddenFamilies, States, joint_states
from otpdag.likelihood.swapped_states import SWAP_ROWS, Reading, near, swapped_pairs, swaps
from otpdag.mechanisms.base import ExponentialFamily, Family, configurations, defines_together, has_closed_form
from otpdag.mechanisms.parameters import Ridge
from otpdag.numerics import products
from otpdag.problem import LayOut, LossTerms, Pace, Proposals, SummedRows, Units, Updates, packed_point, split_point
from otpdag.spaces import Space
from otpdag.structure import Naturals, Shapes, Structure

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
        return own if own is None or joint is None else products([joint, own])

    def coefficients(self, naturals: Naturals) -> Tensor:
        """In every state (R, S, O * F)."""
        return self.mechanism.coefficients(naturals[self.node])[:, self.configuration].flatten(2)

    def maximised(self, naturals: Naturals, sums: Tensor) -> dict[str, Tensor]:
        """Natural parameters from expected sums of features in every state (R, S, O * F)."""
        by_row = sums.unflatten(-1, (self.configuration.shape[1], -1)).flatten(1, 2)
        empty = by_row.new_zeros(len(sums), self.rows, by_row.shape[-1])
        return self.mechanism.fitted(naturals[self.node], empty.index_add_(1, self.configuration.flatten(), by_row))


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
class Sums:
    """What is expected of rows or steps.

    Attributes:
        log_likelihood: Of all of them (R,).
        features: Sums of their features in each state (R, S, F + 1), the last one the number of rows.
        first: Counts of the states of first steps (R, S).
        pair: Counts of pairs of states of two steps (R, S, S).
    """

    log_likelihood: Tensor
    features: Tensor
    first: Tensor
    pair: Tensor

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(own + others for own, others in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True, eq=False)
class StateReader:
    """All joint states of hidden categories, and observed nodes: the features of a row side by side, and a one.

    Attributes:
        sizes: Features of each node.
    """

    structure: Structure
    states: States
    nodes: tuple[Emission, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(
        cls, structure: Structure, states: States, values: Values, mask: Values, most: int = 2_000
    ) -> StateReader | None:
        """How every observed node is read; None where something has no maximum in closed form.

        ``values`` and ``mask`` are all kinds of gaps, by which features are tried. A row has at ``most`` so many:
        beyond, a product of matrices is no longer the fast way.
        """
        hidden, nodes, sizes = structure.graph.hidden, [], []
        if structure.ties_parameters or set(states.nodes) != set(hidden):
            return None
        for name, mechanism in structure.mechanisms.items():
            parents = mechanism.family.parents
            observed = tuple((one, space) for one, space in parents if structure.base(one) not in hidden)
            if structure.base(name) in hidden:
                if observed or not mechanism.has_density or (structure.keys[name] and not has_closed_form(mechanism)):
                    return None
                continue
            if any(one not in structure.graph.observed or not bool(mask[one].all()) for one, _ in observed):
                return None
            if mechanism.is_given:
                continue
            if not all(space.is_discrete for _, space in parents):
                return None
            plain = not any(isinstance(one.setting, Ridge) or one.is_bounded for one in mechanism.declared().values())
            if not isinstance(mechanism, ExponentialFamily) or not plain:
                return None
            if not defines_together(mechanism, "features", "coefficients", "fitted"):
                return None
            many = math.prod(space.width for _, space in parents)
            rows = _configuration(parents, states.now)
            nodes.append(Emission(name, mechanism, many, rows, Family(name, observed)))
            tried = nodes[-1].features(values, mask)
            if tried is None:
                return None
            sizes.append(tried.shape[1])
        return cls(structure, states, tuple(nodes), tuple(sizes)) if nodes and sum(sizes) <= most else None

    @cached_property
    def hidden(self) -> HiddenFamilies:
        """What hidden nodes say of the states."""
        return HiddenFamilies.of(self.structure, self.states)

    def features(self, values: Values, mask: Values) -> Tensor:
        """Features of rows (n, F + 1)."""
        parts = [one.features(values, mask) for one in self.nodes]
        one = next(iter(values.values()))[:, :1]
        return torch.cat([*(part for part in parts if part is not None), torch.ones_like(one)], -1)

    def coefficients(self, naturals: Naturals, log_prior: Tensor) -> Tensor:
        """In every state, the last one the logarithm of its prior weight (R or 1, S): (R, S, F + 1)."""
        parts = [one.coefficients(naturals) for one in self.nodes]
        replicas = max(len(part) for part in (*parts, log_prior))
        return torch.cat([part.expand(replicas, *part.shape[1:]) for part in (*parts, log_prior.unsqueeze(-1))], -1)

    def maximised(self, naturals: Naturals, sums: Sums) -> dict[str, dict[str, Tensor]]:
        """Natural parameters of every node at which these sums are likeliest."""
        found = self.hidden.maximised(naturals, sums.first, sums.features[..., -1], sums.pair)
        for one, part in zip(self.nodes, sums.features[..., :-1].split(self.sizes, -1), strict=True):
            found[one.node] = one.maximised(naturals, part)
        return found


class ReadStates(Units):
    """Units whose states are read through features: updates in closed form, and swaps of states.

    Attributes:
        reader: How they are read; None where something has no maximum in closed form.
    """

    reader: StateReader | None

    pace = Pace(patience=20)  # twice as many updates as most mixtures and chains need that are near their optimum

    @abstractmethod
    def sums(self, naturals: Naturals, reader: StateReader) -> Sums:
        """Expected sums of all units."""

    @abstractmethod
    def reading(self, naturals: Naturals, reader: StateReader) -> tuple[Reading, Tensor]:
        """Rows or distinct steps with their posterior probabilities, and expected counts of pairs of states (S, S)."""

    def update(self, point: Tensor) -> tuple[Tensor, LossTerms]:
        """Expected sums, then each mechanism's maximum (of chains: Baum and Welch)."""
        if self.reader is None:
            return super().update(point)
        with torch.no_grad():
            naturals = self.naturals(point)
            sums = self.sums(naturals, self.reader)
            moved = self._likeliest(point, naturals, self.reader, sums)
            loss = (self.structure.penalty(naturals) - sums.log_likelihood) / self.unit_mass.sum(-1)
        return moved, LossTerms.of(loss, reconstruction=loss)

    def _likeliest(self, point: Tensor, naturals: Naturals, reader: StateReader, sums: Sums) -> Tensor:
        """The point (R, P) at which these expected sums are likeliest; what nodes keep comes from ``point``."""
        raw = self.structure.raw({**naturals, **reader.maximised(naturals, sums)})
        return packed_point(split_point(point, self.shapes)[0] | raw, self.shapes, len(sums.features))

    @torch.no_grad()
    def proposals(self, point: Tensor) -> Proposals | None:
        """The point (1, P) with states of the only hidden node swapped."""
        if self.reader is None or len(self.reader.states.nodes) > 1 or len(point) > 1 or len(self.unit_mass) > 1:
            return None
        part = self.subset(SWAP_ROWS)
        assert isinstance(part, ReadStates), "a part is read as the whole is"
        return near(part, point, part._with_swaps(point, self.reader), lambda points: part.update(points)[1].total)

    def _with_swaps(self, point: Tensor, reader: StateReader) -> Tensor:
        """The point (1, P) after each swap (K, P)."""
        naturals = self.naturals(point)
        reading, pair = self.reading(naturals, reader)
        features, pairs = [], []
        for swap in swaps(reading):
            features.append((reading.weight.unsqueeze(-1) * swap.posterior).T @ reading.features)
            pairs.append(swapped_pairs(pair, features[-1][:, -1], swap))
        if not features:
            return point[:0]
        all_features = torch.stack(features)
        count = all_features[..., -1]
        sums = Sums(count.sum(-1), all_features, count, torch.stack(pairs))
        return self._likeliest(point, naturals, reader, sums)


@dataclass(frozen=True)
class StateProblem(ReadStates, SummedRows):
    """Rows, and how they are read in every joint state of the hidden categories.

    Attributes:
        in_rows: Makes the problem of the same objective that enumerates.
        block_entries: Rows times states times replicas, or rows times features, that are held at a time.
        kept_entries: Features that are kept rather than computed in every pass.
        block_rows: Rows that are held at a time at most: what they need stays in the processor's cache.
        rows_for_each_parameter: Of a part: fewer would not tell starts apart.
    """

    route: ClassVar[str] = "states"

    reader: StateReader

    block_entries: ClassVar[int] = 2**20
    kept_entries: ClassVar[int] = 2**22
    block_rows: ClassVar[int] = 2**12
    rows_for_each_parameter: ClassVar[int] = 2

    @cached_property
    def updates(self) -> Updates:
        """Every node has a maximum in closed form."""
        return Updates(apart=len(self.batch.weight) == 1)

    def loss(self, point: Tensor) -> LossTerms:
        """The loss of a row: reported as reconstruction, since its parts are not told apart."""
        naturals, mass = self.naturals(point), self.weight.sum(-1)
        coefficients = self._coefficients(naturals)
        sums = self._expected(coefficients.detach())
        surrogate = -(coefficients * sums.features).flatten(1).sum(-1) / mass
        loss = surrogate + (-sums.log_likelihood / mass - surrogate).detach() + self.structure.penalty(naturals) / mass
        return LossTerms.of(loss, reconstruction=loss)

    def sums(self, naturals: Naturals, reader: StateReader) -> Sums:
        """Of all rows; each is a first step, and none has one before it."""
        return self._expected(self._coefficients(naturals))

    def reading(self, naturals: Naturals, reader: StateReader) -> tuple[Reading, Tensor]:
        """All rows; there are no pairs."""
        features, coefficients = self._features(slice(None)), self._coefficients(naturals)[0]
        posterior = (features @ coefficients.T).softmax(-1)
        return Reading(features, self.weight[0], posterior), posterior.new_zeros(len(coefficients), len(coefficients))

    def _coefficients(self, naturals: Naturals) -> Tensor:
        log_prior, _ = self.reader.hidden.potentials(naturals)
        return self.reader.coefficients(naturals, log_prior)

    def _expected(self, coefficients: Tensor) -> Sums:
        """Expected sums at these coefficients (R, S, F + 1)."""
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
        of_states = sums.unflatten(0, (replicas, size))
        return Sums(total, of_states, of_states[..., -1], total.new_zeros(replicas, size, size))

    def _blocks(self, most: int) -> Iterator[tuple[slice, Tensor]]:
        """Features of all rows, a block at a time."""
        most = min(most, self.block_rows, max(1, self.block_entries // (sum(self.reader.sizes) + 1)))
        for at in range(0, self.rows, most):
            rows = slice(at, at + most)
            yield rows, self._features(rows) if self._kept is None else self._kept[rows]

    @cached_property
    def _kept(self) -> Tensor | None:
        """Features of all rows, unless there are too many."""
        is_small = self.rows * (sum(self.reader.sizes) + 1) <= self.kept_entries
        return self._features(slice(None)) if is_small else None

    def _features(self, rows: slice) -> Tensor:
        values = {name: value[0, rows].double() for name, value in self.batch.values.items()}
        return self.reader.features(values, {name: seen[0, rows] for name, seen in self.batch.mask.items()})

    def of_batch(self, batch: Batch, seed: int) -> Self:
        """Read alike."""
        return replace(self, batch=batch, seed=seed)

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> Self:
        """Fewer rows, but enough for the parameters."""
        if not isinstance(rows, Tensor):
            parameters = sum(torch.Size(shape).numel() for shape in self.shapes.values())
            rows = max(rows, self.rows_for_each_parameter * parameters)
        return super().subset(rows)


MOST_STATES = 64  # joint states of hidden categories up to which all are read at once


def has_features(structure: Structure, batch: Batch) -> bool:
    """Whether hidden nodes, all of them categories, have few states, and every observed node has features."""
    states = math.prod(structure.mechanisms[node].space.width for node in structure.hidden_categories)
    is_held = batch.shares_rows and batch.weight.device.type == "cpu"
    return is_held and states <= MOST_STATES and _reader(structure, batch) is not None


def rows_by_states(structure: Structure, batch: Batch, shapes: Shapes, seed: int, in_rows: LayOut) -> StateProblem:
    """Lay rows out whose nodes have features."""
    reader = _reader(structure, batch)
    assert reader is not None, "asked before"
    return StateProblem(structure, batch, shapes, seed, in_rows, reader)


def _reader(structure: Structure, batch: Batch) -> StateReader | None:
    """How rows are read, tried by those with gaps."""
    tried = batch.take(torch.cat([torch.arange(2), torch.nonzero(~batch.shows(batch.mask))[:, 0]]))
    values, mask = ({name: one[0] for name, one in held.items()} for held in (tried.values, tried.mask))
    return StateReader.of(structure, joint_states(structure, structure.hidden_categories), values, mask)
