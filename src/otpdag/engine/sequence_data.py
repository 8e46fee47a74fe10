"""Sequences: graphs with lagged edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from otpdag.answers.notes import notes_on_columns, notes_on_groups, notes_on_scales
from otpdag.backward import AmortizedMap
from otpdag.data import Schema
from otpdag.data.sequences import SequenceBatch, SequenceTable, as_sequences, encode_sequences
from otpdag.engine.data_kind import DataKind, Layout, check_rows, named_method
from otpdag.engine.method import Method, likelihood, transport
from otpdag.engine.search import SearchResult, SearchSchedule, restart_seed
from otpdag.errors import DataError, ModelError, until_late
from otpdag.learned.algorithm import Drawn
from otpdag.learned.sampled import DrawnSteps
from otpdag.learned.sequence_map import SequenceMap
from otpdag.learned.sequence_problem import number_problem
from otpdag.likelihood.chain_problem import FEWEST_UNITS, chain_problem
from otpdag.likelihood.grouped_rows import POINTS, group_problem, is_quadratic
from otpdag.likelihood.starts import complete_steps, random_moves, step_weights
from otpdag.likelihood.unrolled import has_unknown_parents, unknown_numbers, window_problem
from otpdag.matching.windows import check_windows, transport_windows
from otpdag.model import Model
from otpdag.numerics import Array, Ints
from otpdag.problem import Problem, RowObjective
from otpdag.settings import ClosedForm
from otpdag.structure import Structure

# Courses: short runs on a part of the steps, the best alone goes on; of chains on a larger part before it sees all. A
# chain whose loss changes by less than 1e-5 has no more to gain in 24 short steps than two starts may differ by. Of two
# near distributions the log-ratio of a step has a variance of about twice its mean D: over n steps D is four standard
# errors from zero where it is 32 / n. Chains that differ by less run on more steps before one of them is chosen. Of ten
# million steps a part of a 32nd spared one of five or six passes over everything in two of three data sets, for a
# seventh of one.
CHAIN = SearchSchedule(
    short_rows=2_500,
    short_elements=10**12,
    short_tolerance=1e-5,
    halving=False,
    finalists=3,
    finalist_gap=32.0,
    finalist_rows=10_000,
    part_rows=100_000,
)
_ALONE = replace(CHAIN, finalists=1, finalist_gap=None, finalist_rows=None, short_tolerance=None, part_rows=None)
WINDOWS = replace(_ALONE, short_rows=20_000, short_steps=48)
NUMBERS = _ALONE


@dataclass(frozen=True)
class SequenceData(DataKind):
    """Sequences as steps laid end to end.

    Attributes:
        order: Which of the given sequences each one of the batch is.
        start_steps: Steps that units, and starts of hidden numbers, are guessed from (decision 0006).
        chain_start_steps: Steps that starts of chains are guessed from: they run on fewer at first.
        longest_piece: Steps in one piece of a sequence with hidden numbers, whose recursion is not run side by side
            otherwise.
    """

    honours: ClassVar[frozenset[str]] = frozenset({"weights", "robust"})
    units: ClassVar[str] = "sequences"

    model: Model
    schema: Schema
    batch: SequenceBatch
    order: Ints
    is_weighted: bool = False
    start_steps: int = 20_000
    chain_start_steps: int = 5_000
    longest_piece: int = 400

    @classmethod
    def of(cls, model: Model, data: SequenceTable, *, weights: ArrayLike | None = None) -> SequenceData:
        """Read sequences, in an order that does not depend on how they were given, with a weight for each of them."""
        sequences = as_sequences(data)
        schema = Schema.of(model.spaces, model.graph, sequences.table)
        batch = encode_sequences(sequences, schema, hidden=model.graph.hidden)
        check_rows(model.structure, batch.steps.rows)
        model.structure.check_given(batch.steps.mask)
        longest = int(batch.lengths.max())
        for node in (node for node in model.graph.observed if model.structure.longest_lag(node) >= longest):
            raise DataError(
                f"node {node!r} depends on {model.structure.longest_lag(node)} steps before, and no sequence is longer "
                f"than {longest}: nothing tells its parameters"
            )
        weighted = batch if weights is None else batch.weighted(weights)
        order = weighted.canonical_order
        return cls(model, schema, weighted.take(torch.from_numpy(order)), order, is_weighted=weights is not None)

    @property
    def rows(self) -> int:
        """Steps of all sequences."""
        return self.batch.rows

    def as_given(self, per_unit: Array) -> Array:
        """Back from the order of the batch to that of the data."""
        return per_unit[np.argsort(self.order)]

    # -- methods ------------------------------------------------------------------------------------------------------

    def named(self, name: str) -> Method:
        """Transport compares windows where these serve, and abducts noise where they do not."""
        if name != "transport":
            return likelihood() if name == "auto" else named_method(name)
        try:
            check_windows(self.structure)
        except ModelError:
            return transport("backward")
        return transport("direct")

    def check(self, method: Method) -> None:
        """Refuse what sequences are not fitted by."""
        objective = method.objective
        chains = isinstance(method.evaluation, ClosedForm) and objective.direct is None
        if self.is_weighted and (not chains or self.structure.hidden_numbers):
            raise ModelError("weights of sequences are for the entropic method, with hidden categories alone")
        if isinstance(method.evaluation, Drawn):
            _check_drawn(self.structure, method, method.evaluation)
            return
        if not isinstance(method.evaluation, ClosedForm):
            raise ModelError(f"sequences are evaluated by ClosedForm or Drawn; got {type(method.evaluation).__name__}")
        if method.evaluation.reference != "model":
            raise ModelError(f"sequences take the model as reference; got reference={method.evaluation.reference!r}")
        if objective.direct is not None:
            check_windows(self.structure)
            return
        if not objective.at(1.0).eps > 0 or objective.push_forward is not None:
            raise ModelError(
                "sequences in closed form need eps above 0 and no push-forward term; with otp.objective.Drawn both "
                "are free"
            )
        if self.structure.hidden_numbers:
            _check_no_counts(self.structure)
            eps = objective.at(1.0).eps
            if self.structure.hidden_categories and eps != 1:
                raise ModelError(f"hidden categories and numbers together need eps = 1; got {eps}")

    def check_robust(self, method: Method) -> None:
        """Whole sequences are left out, by their likelihood."""
        super().check_robust(method)
        if self.structure.hidden_numbers:
            raise ModelError("robust='outliers' is for sequences whose hidden nodes are categories")
        many = len(self.batch.lengths)
        if many < FEWEST_UNITS:
            raise DataError(f"robust='outliers' leaves out whole sequences, of {FEWEST_UNITS} at least; got {many}")

    def course(self, method: Method) -> SearchSchedule:
        """By what is hidden, and what is compared."""
        if method.objective.direct is not None:
            return WINDOWS
        if self.structure.hidden_numbers:
            return NUMBERS
        learned = sum(math.prod(one.shape) for one in self.structure.parameters().values())
        # with fewer than a hundred steps for each parameter some would be explained by chance
        short, part = min(max(CHAIN.short_rows, 100 * learned), 10_000), max(100_000, self.batch.rows // 32)
        return replace(CHAIN, short_rows=short, race_rows=short, part_rows=part)

    # -- problems -----------------------------------------------------------------------------------------------------

    def lay_out(self, method: Method, seed: int) -> Layout:
        """The units of some completed steps, and the map where one is learned."""
        few = self._pieces.part(self.start_steps, seed)
        generator = np.random.default_rng([seed, 2**20])
        # hidden numbers are guessed around categories, and Adam's steps depend on units where maxima do not
        even = not self.structure.hidden_numbers and isinstance(method.evaluation, ClosedForm)
        completed = complete_steps(self.structure, few, generator, first=True, even_categories=even)
        structure = self.structure.scaled_to(completed, step_weights(self.structure, few))
        backward = self._map(structure, method)
        if backward is None:
            return Layout.of(structure)
        completed = _guessed(structure, few, restart_seed(seed, 0), first=True)
        return replace(Layout.of(structure, _map_start(backward, few, completed, seed)), sequence_map=backward)

    @property
    def _pieces(self) -> SequenceBatch:
        """Sequences with hidden numbers are cut where they are long."""
        return self.batch.cut(self.longest_piece) if self.structure.hidden_numbers else self.batch

    def _map(self, structure: Structure, method: Method) -> SequenceMap | AmortizedMap | None:
        """The map that a method learns: none where the closed form serves."""
        if isinstance(method.evaluation, Drawn):
            backward, *others = method.evaluation.maps(structure, self.batch.steps) or (None,)
            if backward is None or others:
                raise ModelError("steps of sequences are drawn by one map: backward must build one, for all of a step")
            return replace(backward, targets=tuple(node for node in backward.targets if node in structure.graph.hidden))
        if not structure.hidden_numbers or method.objective.direct is not None or structure.shared:
            return None
        return SequenceMap.of(structure, self.batch)

    def problem(self, layout: Layout, method: Method, seed: int) -> Problem:
        """A chain of states, windows, draws of hidden numbers, or steps for Adam."""
        structure, shapes, objective = layout.structure, layout.shapes, method.objective
        if isinstance(method.evaluation, Drawn) and isinstance(layout.sequence_map, AmortizedMap):
            return DrawnSteps(structure, self.batch, shapes, layout.sequence_map, objective, method.evaluation)
        if objective.direct is not None:
            return transport_windows(structure, self.batch, shapes, objective.direct, seed)
        eps = objective.at(1.0).eps
        if isinstance(layout.sequence_map, SequenceMap):
            return number_problem(self._pieces, layout.sequence_map, shapes, eps, seed)
        if eps == 1.0 and has_unknown_parents(structure, self.batch):  # steps are summed along the graph over time
            assert isinstance(method.evaluation, ClosedForm)
            return window_problem(RowObjective(structure, shapes, objective, method.evaluation), self.batch, seed)
        return chain_problem(structure, self.batch, shapes, eps, seed)

    def starts(
        self, layout: Layout, problem: Problem, seed: int, numbers: Sequence[int], units: Tensor | None = None
    ) -> Tensor:
        """Guesses from some steps, with earlier values as further columns."""
        structure = layout.structure
        most = self.start_steps if structure.hidden_numbers else self.chain_start_steps
        few = (self._pieces if units is None else self.batch.take(units)).part(most, seed)
        points, weights = [], step_weights(structure, few)
        for number in until_late(numbers):
            own = restart_seed(seed, number)
            completed = _guessed(structure, few, own, first=number == 0)
            start = structure.start(completed, weights)
            if number >= SearchSchedule.race_batch:  # what the first batch did not settle is looked for elsewhere
                start |= random_moves(structure, start, np.random.default_rng([own, 1]))
            theta = structure.filled(structure.raw(start), torch.Generator().manual_seed(own))
            if layout.sequence_map is not None:
                theta |= _map_start(layout.sequence_map, few, completed, own)
            points.append(layout.pack({key: value.to(few.steps.weight) for key, value in theta.items()}))
        return torch.cat(points)

    # -- the end ------------------------------------------------------------------------------------------------------

    def columns(self) -> Schema:
        """As they were read."""
        return self.schema

    def notes(self, ended: SearchResult) -> list[str]:
        """Scales at their floor, and steps that are left out because of a gap."""
        left_out = unknown_numbers(self.structure, self.batch) if self.structure.graph.hidden else []
        return [
            *notes_on_scales(self.model.fitted),
            *(
                f"gaps of {node!r} are not summed over beside hidden nodes: what reads a missing value of it is left "
                "out, and estimates are biased where gaps depend on values that are seen"
                for node in left_out
            ),
        ]


class GroupData(SequenceData):
    """A table as groups of rows side by side, as sequences are whose steps have no order."""

    honours: ClassVar[frozenset[str]] = frozenset()
    units: ClassVar[str] = "groups"

    def check(self, method: Method) -> None:
        """Refuse all but maximum likelihood, and more numbers than are integrated."""
        structure, closed, size = self.structure, method.evaluation, len(self.structure.shared)
        plain = isinstance(closed, ClosedForm) and method.objective.direct is None and structure.has_densities
        if not plain or not RowObjective(structure, {}, method.objective, ClosedForm()).is_plain_likelihood:
            raise ModelError(f"models with a group are fitted by method='likelihood'; got {method.name!r}")
        if len(self.batch.lengths) < 2:
            raise DataError(f"column {self.model.group!r} must tell at least two groups; it has one")
        if size > max(POINTS) and not is_quadratic(structure, self.batch.steps):
            raise ModelError(
                f"a group shares {size} numbers, {', '.join(structure.shared)}: more than {max(POINTS)} are integrated "
                "where all that they bear on is normal and linear in them alone"
            )

    def course(self, method: Method) -> SearchSchedule:
        """That of a table."""
        return SearchSchedule()

    def restarts(self, method: Method) -> int:
        """One, if nothing else is hidden: groups tell where to start."""
        return 1 if len(self.structure.graph.hidden) == len(self.structure.shared) else super().restarts(method)

    def problem(self, layout: Layout, method: Method, seed: int) -> Problem:
        """Integrals over what groups share."""
        about = RowObjective(layout.structure, layout.shapes, method.objective, ClosedForm())
        return group_problem(about, self.batch, seed)

    def notes(self, ended: SearchResult) -> list[str]:
        """Constant columns, scales at their floor, groups that do not differ."""
        fitted, batch = self.model.fitted, self.batch
        notes = notes_on_columns(self.structure, batch.steps) + notes_on_scales(fitted)
        return notes + notes_on_groups(fitted, self.model.group, batch.lengths)


def _guessed(structure: Structure, few: SequenceBatch, seed: int, *, first: bool) -> dict[str, Tensor]:
    """Completed steps of one start, hidden numbers smoothed over one to four steps around."""
    reach = 1 if first else 1 + seed % 4
    return complete_steps(structure, few, np.random.default_rng(seed), first=first, reach=reach)


# -- what methods serve -----------------------------------------------------------------------------------------------


def _check_drawn(structure: Structure, method: Method, drawn: Drawn) -> None:
    """Refuse what steps of sequences are not fitted by."""
    _check_no_counts(structure)
    if drawn.scope == "local":
        raise ModelError("a step of a sequence is drawn as a whole: scope must be 'joint'; got 'local'")
    drawn.check_nodes(structure)
    eps = method.objective.at(1.0).eps
    if drawn.noise == "marginal" and (not eps or method.objective.push_forward) and structure.graph.hidden:
        raise ModelError("with noise='marginal', sequences need eps above 0 and no push-forward term")


def _check_no_counts(structure: Structure) -> None:
    spaces = [structure.mechanisms[node].space for node in structure.graph.hidden]
    if any(space.is_countable and not space.is_discrete for space in spaces):
        raise ModelError("hidden counts are not fitted in sequences; take a hidden number or category")


def _map_start(
    backward: SequenceMap | AmortizedMap, few: SequenceBatch, completed: dict[str, Tensor], seed: int
) -> dict[str, Tensor]:
    """Parameters (1, ...) of a map from completed steps."""
    if isinstance(backward, SequenceMap):
        return backward.start(few, completed)
    return backward.started(few.steps, completed, torch.Generator().manual_seed(seed))
