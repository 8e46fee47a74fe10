"""Rows of a table in parts: files beyond memory, or partitions on other machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from otpdag.data import Partitioned, PartTable, open_table
from otpdag.engine.data_kind import DataKind, Layout, check_rows
from otpdag.engine.method import Method, SearchSchedule
from otpdag.engine.search import SearchResult
from otpdag.engine.table_data import TableData
from otpdag.errors import DataError, ModelError
from otpdag.learned.algorithm import Drawn
from otpdag.learned.sampled import Pools, StreamedRows, pools_for
from otpdag.likelihood.partitioned_problem import PartitionedProblem, is_sum_over_rows, part_problem
from otpdag.likelihood.rows import RowObjective, count_ranges
from otpdag.model import Model
from otpdag.problem import Problem, units_of
from otpdag.settings import ClosedForm
from otpdag.structure import unpack


@dataclass(frozen=True)
class PartitionedData(DataKind):
    """A table in parts, and some of its rows as a table at hand."""

    honours: ClassVar[frozenset[str]] = frozenset({"weights"})
    advice: ClassVar[Mapping[str, str]] = {"robust": "leave it out, or fit a random part of the rows in memory"}

    model: Model
    table: PartTable
    held: TableData
    memory: int

    @classmethod
    def of(
        cls,
        model: Model,
        data: Any,
        *,
        weights: ArrayLike | str | None = None,
        device: str = "cpu",
        every_row: bool = False,
    ) -> DataKind:
        """Look through the table; one that has few rows, or few different ones, is an ordinary table."""
        if model.graph.is_dynamic:
            raise DataError("sequences are fitted in memory: read the table first, for instance with pd.read_parquet")
        partitioned = data if isinstance(data, Partitioned) else Partitioned(data)
        table = open_table(partitioned, model.spaces, model.graph, weights=weights)
        if not isinstance(table, PartTable):
            frame, own = table
            return TableData.of(model, frame, weights=own, device=device, every_row=every_row)
        check_rows(model.structure, table.sample.rows)
        model.structure.check_given(table.sample.mask)
        for node in model.structure.given:
            if node in table.seen and (table.seen[node] < table.rows).any():
                raise DataError(f"node {node!r} is Given: its cells must not be missing; some are")
        schema = table.reading.schema
        if all(model.structure.mechanisms[node].space.is_discrete for node in model.graph.observed) and not every_row:
            distinct = table.distinct()
            if distinct is not None:
                return TableData(model, schema, distinct.to(device), np.broadcast_to(np.int64(0), (table.rows,)))
        held = TableData(model, schema, table.sample, np.arange(table.sample.rows))
        return cls(model, table, held, partitioned.memory)

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return self.table.rows

    def named(self, name: str) -> Method:
        """As for tables."""
        return self.held.named(name)

    def check(self, method: Method) -> None:
        """Refuse what compares all rows with the model."""
        self.held.check(method)
        in_minibatches = isinstance(method.evaluation, Drawn) and method.objective.direct is None
        if not (in_minibatches or is_sum_over_rows(method.objective)):
            raise ModelError(
                f"method {method.name!r} compares the rows with the model as a whole, which is no sum over the parts "
                "of a table: use method='likelihood', or fit a random part of the rows in memory"
            )

    def course(self, method: Method) -> SearchSchedule:
        """Everything but the last run on the rows at hand: each step there is a pass over all parts."""
        held = self.held.rows
        return SearchSchedule(
            finalist_rows=held, part_rows=held, part_tolerance=getattr(method.optimiser, "tolerance", 1e-9)
        )

    def work(self, method: Method) -> int:
        """As of the rows at hand."""
        return self.held.work(method)

    def lay_out(self, method: Method, seed: int) -> Layout:
        """The units of the rows at hand."""
        return self.held.lay_out(method, seed)

    def problem(self, layout: Layout, method: Method, seed: int) -> PartitionedProblem | StreamedRows:
        """Minibatches; or parts in closed form, whose problems are kept if they fit into memory, or lie elsewhere."""
        sample = self.held.problem(layout, method, seed)
        if isinstance(method.evaluation, Drawn):
            held = self.held.batch
            number = pools_for(method.optimiser.steps, method.evaluation.batch_size, held.rows)
            return StreamedRows(sample, Pools(held, self.table.picked, self.rows, number, seed))
        assert isinstance(method.evaluation, ClosedForm), "checked before"
        about = RowObjective(layout.structure, layout.shapes, method.objective, method.evaluation)
        made = self.table.parts.mapped(
            part_problem,
            self.table.reading,
            about,
            seed,
            keep=self.table.elsewhere or size_of(sample) / sample.rows * self.rows <= self.memory,
        )
        return PartitionedProblem(units_of(sample), made, self.rows)

    def starts(
        self, layout: Layout, problem: Problem, seed: int, numbers: Sequence[int], units: Tensor | None = None
    ) -> Tensor:
        """From the rows at hand."""
        return self.held.starts(layout, problem, seed, numbers, units)

    def adopt(self, layout: Layout, ended: SearchResult) -> None:
        """Parameters and units, and how far counts reach in all parts."""
        schema = self.table.reading.schema
        self.model.adopt(layout.structure, unpack(ended.point, layout.shapes), schema, layout.maps)
        largest = {node: self.table.sample.weight.new_tensor(value) for node, value in self.table.largest.items()}
        self.model.note_ranges(count_ranges(self.structure, largest))

    def notes(self, ended: SearchResult) -> list[str]:
        """What the rows at hand tell."""
        return self.held.notes(ended)


def size_of(problem: object) -> int:
    """Bytes of all tensors that an object holds, each counted once."""
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(problem, set())
    }
    return sum(sizes.values())


def _tensors(value: Any, known: set[int]) -> Iterator[Tensor]:
    if id(value) in known:
        return
    known.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one, known)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one, known)
    elif hasattr(value, "__dict__") and type(value).__module__.startswith("otpdag"):
        for one in vars(value).values():
            yield from _tensors(one, known)
