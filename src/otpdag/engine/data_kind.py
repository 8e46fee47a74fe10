"""Kinds of data: what a fit asks of one; tables, in memory and in parts, and images.

A kind lays out all parameters in the data's units, makes the problem, and guesses where a search for its minimum
starts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from otpdag.answers.notes import (
    FlatDirection,
    flat_directions,
    notes_on_columns,
    notes_on_rows,
    notes_on_scales,
    point_of,
)
from otpdag.backward import AmortizedMap
from otpdag.data import Batch, Images, Partitioned, Schema, Table
from otpdag.data.batch import canonical_order, unique_rows
from otpdag.data.parts import PartTable, open_table
from otpdag.data.table import Cells, read_cells
from otpdag.engine.method import Method, likelihood, paper, transport
from otpdag.engine.search import Searcher, SearchResult, SearchSchedule, restart_seed, search
from otpdag.errors import DataError, ModelError, OutOfTime, until_late
from otpdag.learned.algorithm import Drawn
from otpdag.learned.autoencoder import AutoencoderProblem, CodebookProblem, Encoded, autoencoder_problem
from otpdag.learned.sampled import DrawnRows, Pools, StreamedRows, pools_for
from otpdag.learned.sequence_map import SequenceMap
from otpdag.likelihood.partitioned_problem import (
    BLOCKS_FROM,
    FROM_ROWS,
    HELD_ROWS,
    PartitionedProblem,
    part_problem,
    rows_in_blocks,
)
from otpdag.likelihood.row_posterior import BESIDE
from otpdag.likelihood.row_problem import row_problem
from otpdag.likelihood.starts import complete_table, row_weights
from otpdag.matching.transport_rows import TransportRows, transport_rows
from otpdag.model import Model
from otpdag.numerics import Array
from otpdag.problem import Problem, RowObjective, Units, units_of
from otpdag.settings import ClosedForm, SumSizes
from otpdag.structure import Shapes, Structure, Theta, pack, parameter_places, unpack


@dataclass(frozen=True)
class Layout:
    """What a flat point (R, P) means.

    Attributes:
        maps: Learned maps of rows, which a model keeps.
        sequence_map: The learned map of sequences, which serves the fit alone.
    """

    structure: Structure
    shapes: Shapes
    maps: tuple[AmortizedMap, ...] = ()
    sequence_map: SequenceMap | AmortizedMap | None = None

    @classmethod
    def of(cls, structure: Structure, phi: Theta | None = None) -> Layout:
        """The model's own parameters, then those of maps as they start (1, ...)."""
        shapes = {key: parameter.shape for key, parameter in structure.parameters().items()}
        shapes |= {key: tuple(value.shape[1:]) for key, value in (phi or {}).items()}
        return cls(structure, shapes)

    def pack(self, theta: Theta) -> Tensor:
        """Parameters by name as a flat point."""
        return pack({key: theta[key] for key in self.shapes})


# of 95 fits with hidden categories and sixteen starts none was stuck; hidden numbers have few local optima
MANY_STARTS, FEW_STARTS = 16, 4


class DataKind(ABC):
    """One data set, adapted to a model. A subclass of your own is passed to :func:`otpdag.fit` in place of a table.

    It says which problem the data make, where a search for its minimum starts, and how long it takes; the search is the
    engine's, and so are checkpoints, progress and the result.

    Attributes:
        honours: Which of ``weights``, ``robust`` and ``device`` a fit of such data can honour.
        units: What is weighed, or left out.
        most_restarts: How many starts may train together; any number if None.
    """

    honours: ClassVar[frozenset[str]] = frozenset()

    units: ClassVar[str] = "rows"

    most_restarts: ClassVar[int | None] = None

    model: Model

    @property
    def structure(self) -> Structure:
        """Graph and mechanisms."""
        return self.model.structure

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows, steps, documents or images."""

    @abstractmethod
    def named(self, name: str) -> Method:
        """The method behind ``"auto"``, ``"likelihood"``, ``"transport"`` or ``"paper"``."""

    def check(self, method: Method) -> None:  # noqa: B027
        """Refuse a method that such data are not fitted by."""

    @abstractmethod
    def lay_out(self, method: Method, seed: int) -> Layout:
        """Adopt the data's units and declare all parameters."""

    @abstractmethod
    def problem(self, layout: Layout, method: Method, seed: int) -> Problem:
        """What is minimised."""

    @abstractmethod
    def starts(
        self, layout: Layout, problem: Problem, seed: int, numbers: Sequence[int], units: Tensor | None = None
    ) -> Tensor:
        """Where a search starts: a point for each of these numbers (R, P), the first of which is the plainest guess.

        ``units`` are the rows, or sequences, to look at; all of them (or enough of them) if left out.
        """

    def restarts(self, method: Method) -> int:
        """How many starts there are if the user does not say.

        Hidden categories and counts have many local optima, hidden numbers few, complete data none.
        """
        hidden = [self.structure.mechanisms[node].space for node in self.structure.graph.hidden]
        many = any(space.is_countable for space in hidden) and not method.optimiser.is_stochastic
        return (MANY_STARTS if many else FEW_STARTS) if hidden or self.structure.begins_anywhere else 1

    def course(self, method: Method) -> SearchSchedule:
        """Sizes of the search's stages if the user does not say."""
        return SearchSchedule()

    def work(self, method: Method) -> int | None:
        """Roughly the size of the largest tensors of a step, by which threads are bounded; None leaves them alone."""
        return 1

    def check_robust(self, method: Method) -> None:
        """Refuse to leave out units where that has no meaning: it goes by their likelihood."""
        if not isinstance(method.evaluation, ClosedForm) or not method.objective.reconstruction:
            raise ModelError(f"robust='outliers' needs the likelihood; got {method.name!r}")

    def as_given(self, per_unit: Array) -> Array:
        """Numbers for each unit of the problem, in the order in which the units were given."""
        return per_unit

    def concluded(self, ended: SearchResult, searcher: Searcher) -> SearchResult:
        """What becomes of the end of the search."""
        return ended

    def adopt(self, layout: Layout, ended: SearchResult) -> None:
        """Leave the end in the model."""
        theta = unpack(ended.point.cpu(), layout.shapes)
        self.model.adopt(layout.structure, theta, self.columns(), layout.maps)

    def columns(self) -> Schema | None:
        """The columns with labels that were read, if any: what a model keeps of the data."""
        return None

    def notes(self, ended: SearchResult) -> list[str]:
        """What a user should know of the end, once it is adopted: what the data do not tell."""
        return []


def named_method(name: str) -> Method:
    """A method by its name."""
    named: dict[str, Callable[[], Method]] = {"paper": paper, "transport": transport, "likelihood": likelihood}
    if name not in named:
        raise ModelError(f"method={name!r} is of documents; these data have {', '.join(map(repr, named))}")
    return named[name]()


def check_rows(structure: Structure, rows: int) -> None:
    """Refuse fewer rows than a node has slopes and other parameters."""
    needed = structure.rows_needed
    if rows <= needed:
        raise DataError(f"the table has {rows} rows that count; at least {needed + 1} are needed for this model")


# -- tables -----------------------------------------------------------------------------------------------------------

# Rows that each of several starts is guessed from, those that the short runs see; and a single one, or the units. The
# latter are the first ones: the order of rows looks random.
START_ROWS, ONE_START_ROWS = 600, 10_000

LIKELY_ROWS = 2_000  # rows on which maximum likelihood makes a start of transport

# places between bounds that are looked at before a simulator's parameters are descended from the best, and how many
# tell whether its values jump
PLACES, CHECKED_PLACES = 256, 8

GENERATIONS = 12  # in which places are drawn around the best ones where simulated values jump

AROUND = 0.5  # where a simulator's parameters start, other places are so far away, in logarithms or shares of a bound

# Steps of the best starts where all rows are compared with the model: after fifteen, one that ends at 0.012 may be
# ahead of one that ends at 0.007. What is left to do of the best is so much less, so that a fit takes as long.
COMPARED_STEPS = 60

# Log-likelihood of the short runs' rows by which a start may lie behind the best and still go on, as that of chains. Of
# ten components in ten dimensions it spares a third of the time of sixteen starts, to the same losses in nine data sets
# (decision 0045).
FINALIST_GAP = 32.0


@dataclass(frozen=True)
class TableData(DataKind):
    """A table as a batch of rows; of one in parts, files beyond memory or partitions on other machines, some rows.

    Attributes:
        batch: The rows, in an order that looks random and does not depend on that of the table.
        order: Which row of the table each of these is, where every row is kept.
        parts: The whole table, if the rows that were read are some of it.
        memory: Bytes that the problems of all parts may take.
    """

    honours: ClassVar[frozenset[str]] = frozenset({"weights", "robust", "device"})

    model: Model
    schema: Schema
    batch: Batch
    order: NDArray[np.integer[Any]]
    parts: PartTable | None = None
    memory: int = 0

    @classmethod
    def of(
        cls,
        model: Model,
        table: Table,
        *,
        weights: ArrayLike | None = None,
        device: str = "cpu",
        every_row: bool = False,
    ) -> TableData:
        """Read a table, in an order of its rows that does not depend on how it was sorted.

        Rows that are alike become one with a weight, unless every row is wanted.
        """
        structure = model.structure
        schema = Schema.of(model.spaces, model.graph, table)
        least = min(2, structure.rows_needed + 1)
        cells = read_cells(table, schema, hidden=model.graph.hidden, weights=weights, least=least)
        if len(cells.weight) > 1:
            raise DataError(
                f"weights must have one entry for each of the {cells.rows} rows; got shape {cells.weight.shape}"
            )
        check_rows(structure, int((cells.weight > 0).sum()))
        structure.check_given({node: torch.from_numpy(~np.isnan(cells.numbers[node])) for node in structure.given})
        discrete = all(structure.mechanisms[node].space.is_discrete for node in structure.graph.observed)
        order = canonical_order(_by_content(cells), cells.rows)
        ordered = cells.batch(order=order, narrow=cells.rows >= FROM_ROWS and not every_row)
        batch = unique_rows(ordered) if discrete and not every_row else ordered
        return cls(model, schema, batch.to(device), order.astype(np.int32))

    @classmethod
    def in_parts(
        cls,
        model: Model,
        data: Any,
        *,
        weights: ArrayLike | str | None = None,
        device: str = "cpu",
        every_row: bool = False,
    ) -> TableData:
        """Look through a table in parts; one that has few rows, or few different ones, is an ordinary table."""
        if model.graph.is_dynamic or model.structure.shared:
            what = "sequences" if model.graph.is_dynamic else "groups of rows"
            raise DataError(f"{what} are fitted in memory: read the table first, for instance with pd.read_parquet")
        partitioned = data if isinstance(data, Partitioned) else Partitioned(data)
        table = open_table(partitioned, model.spaces, model.graph, weights=weights)
        if not isinstance(table, PartTable):
            frame, own = table
            return cls.of(model, frame, weights=own, device=device, every_row=every_row)
        check_rows(model.structure, table.sample.rows)
        model.structure.check_given(table.sample.mask)
        for node in model.structure.given:
            if node in table.seen and (table.seen[node] < table.rows).any():
                raise DataError(f"node {node!r} is Given: its cells must not be missing; some are")
        schema = table.reading.schema
        if all(model.structure.mechanisms[node].space.is_discrete for node in model.graph.observed) and not every_row:
            distinct = table.distinct()
            if distinct is not None:
                return cls(model, schema, distinct.to(device), np.broadcast_to(np.int64(0), (table.rows,)))
        if device != "cpu":
            raise ModelError(f"a table in parts is fitted on the processor: leave device out; got {device!r}")
        return cls(model, schema, table.sample, np.arange(table.sample.rows), table, partitioned.memory)

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return len(self.order) if self.parts is None else self.parts.rows

    def as_given(self, per_unit: Array) -> Array:
        """Back from the order of the batch to that of the table."""
        return per_unit[np.argsort(self.order)]

    def named(self, name: str) -> Method:
        """``"auto"`` looks at the graph and the mechanisms alone."""
        return automatic(self.structure) if name == "auto" else named_method(name)

    def check(self, method: Method) -> None:
        """Refuse evaluations of other data."""
        if not isinstance(method.evaluation, ClosedForm | Drawn):
            raise ModelError(f"a table is evaluated by ClosedForm or Drawn; got {type(method.evaluation).__name__}")
        if isinstance(method.evaluation, Drawn):
            method.evaluation.check_nodes(self.structure)
        in_minibatches = isinstance(method.evaluation, Drawn) and method.objective.direct is None
        if self.parts is not None and not (in_minibatches or method.objective.is_sum_over_rows):
            raise ModelError(
                f"method {method.name!r} compares the rows with the model as a whole, which is no sum over the parts "
                "of a table: use method='likelihood', or fit a random part of the rows in memory"
            )

    def check_robust(self, method: Method) -> None:
        """Rows are left out by their likelihood, of a table in memory."""
        super().check_robust(method)
        if self.parts is not None:
            raise ModelError("robust='outliers' is not for tables in parts: fit a random part of the rows in memory")

    def work(self, method: Method) -> int:
        """Rows times points of a number, or a minibatch."""
        if isinstance(method.evaluation, Drawn):
            return method.evaluation.batch_size
        grid = method.evaluation.sums.grid if isinstance(method.evaluation, ClosedForm) else 1
        return self.batch.rows * (grid if self.structure.hidden_numbers else 1)

    def restarts(self, method: Method) -> int:
        """Transport begins where maximum likelihood ends, if there is one."""
        return 1 if method.objective.direct is not None and self.structure.has_densities else super().restarts(method)

    def course(self, method: Method) -> SearchSchedule:
        """Of many rows, all but the last run on a part of them; of parts, on the rows at hand."""
        tolerance = getattr(method.optimiser, "tolerance", 1e-9)
        if self.parts is not None:
            held = self.batch.rows
            return SearchSchedule(finalist_rows=held, part_rows=held, part_tolerance=tolerance)
        if not isinstance(method.evaluation, ClosedForm):
            return SearchSchedule()
        is_sum = method.objective.is_sum_over_rows
        course = SearchSchedule() if is_sum else SearchSchedule(finalist_steps=COMPARED_STEPS)
        if self.structure.begins_anywhere:  # the best of many places, each of which costs a simulation
            course = replace(course, finalists=1)
        if self.batch.rows < FROM_ROWS:
            return replace(course, finalist_gap=FINALIST_GAP if is_sum else None)
        return replace(course, finalist_rows=HELD_ROWS, part_rows=HELD_ROWS, part_tolerance=tolerance)

    def lay_out(self, method: Method, seed: int) -> Layout:
        """The units of (a part of) the completed table, and maps where they are learned."""
        return lay_out_rows(self.structure, self.batch.first(ONE_START_ROWS), method, seed)

    def problem(self, layout: Layout, method: Method, seed: int) -> Problem:
        """Rows in closed form, or drawn."""
        if self.parts is not None:
            return _problem_of_parts(self, self.parts, layout, method, seed)
        return table_problem(layout, self.batch, method, seed)

    def starts(
        self, layout: Layout, problem: Problem, seed: int, numbers: Sequence[int], units: Tensor | None = None
    ) -> Tensor:
        """Each start looks at a part of the rows; a single one, and the first of a race, at more of them."""
        updates = problem.updates
        if units is None and len(numbers) > 1 and numbers[0] == 0 and updates is not None and updates.suffice:
            parts = (self.starts(layout, problem, seed, part) for part in (numbers[:1], numbers[1:]))
            return torch.cat(list(parts))
        seeds = [restart_seed(seed, n) for n in numbers]
        if units is None and list(numbers) == [0]:
            seen = self.batch.first(ONE_START_ROWS)
        else:
            seen = self.batch.part(START_ROWS if units is None else units, seed).widened()
        each = zip(numbers, seeds, strict=True)
        points = torch.cat(list(until_late(one_start(layout, seen, one, first=n == 0) for n, one in each)))
        if isinstance(problem, TransportRows) and 0 in numbers and self.structure.has_densities:
            with suppress(OutOfTime):
                points[list(numbers).index(0)] = self._likeliest(layout, seed)
        if isinstance(problem, TransportRows) and layout.structure.begins_anywhere:
            points = _nearest(layout, problem, points, seed)
        return points

    def _likeliest(self, layout: Layout, seed: int) -> Tensor:
        """Where maximum likelihood leads to (P,) on a part of the rows: where transport begins.

        Its optima are found in a fraction of a step's time of transport, and near each other where the model is right.
        """
        method, rows = likelihood(), self.batch.widened().part(LIKELY_ROWS, seed)
        about = RowObjective(layout.structure, layout.shapes, method.objective, ClosedForm())
        problem, searcher = row_problem(about, rows, seed), Searcher(method.optimiser, seed)
        starts = self.starts(layout, problem, seed, range(super().restarts(method)))
        ended = search(problem, starts, SearchSchedule(), searcher)
        return starts[0] if bool(ended.failed[0]) else ended.point[0]

    def columns(self) -> Schema:
        """As they were read."""
        return self.schema

    def notes(self, ended: SearchResult) -> list[str]:
        """Constant columns, boundaries, dependence that the graph denies; what no data tell the model keeps, too."""
        batch = self.batch.to("cpu")
        fitted = self.model.fitted
        notes = notes_on_columns(self.structure, batch) + notes_on_scales(fitted)
        batch = batch.part(HELD_ROWS, seed=0) if batch.rows >= FROM_ROWS else batch
        problem = ended.problem.base if isinstance(ended.problem, PartitionedProblem) else ended.problem
        flat: list[FlatDirection] = []
        if isinstance(problem, Units) and problem.is_sum and bool(ended.converged[0]):
            point = point_of(fitted, problem.shapes)
            flat = flat_directions(problem, point)
            self.model.fits_as_well([problem.naturals(point + BESIDE * one.move) for one in flat])
        return notes + notes_on_rows(self.model.fitted, batch, flat, self.rows)


def _by_content(cells: Cells) -> Iterator[Array]:
    """All columns of a table, numbers before categories, then weights unless they are equal."""
    for node in sorted(cells.numbers, key=lambda name: cells.columns[name].space.is_discrete):
        yield from cells.numbers[node].T
    yield from (weight for weight in cells.weight if (weight != weight[0]).any())


def automatic(structure: Structure) -> Method:
    """Maximum likelihood where every density is known, transport where one is not.

    - Every relevant node has a density: ``likelihood``. Its closed-form backward map makes it maximum likelihood, the
      most accurate choice if the model is right.
    - Some observed node has no density, but inner nodes can be enumerated or drawn: ``transport``, direct route.
    - Otherwise: ``paper``, which relaxes what cannot be enumerated.
    """
    graph, mechanisms = structure.graph, structure.mechanisms
    if structure.has_densities:
        return likelihood()
    inner = [n for n in graph.nodes if graph.observed_descendants(n)]
    inner_states = math.prod(mechanisms[n].space.width for n in inner if mechanisms[n].space.is_discrete)
    return transport() if inner_states <= SumSizes().states else paper()


def lay_out_rows(structure: Structure, batch: Batch, method: Method, seed: int) -> Layout:
    """Adopt the data's units and declare all parameters."""
    generator = np.random.default_rng([seed, 2**20])
    rough = isinstance(method.evaluation, ClosedForm)  # Adam's steps depend on units where maxima do not
    completed = complete_table(structure, batch, generator, first=True, even_categories=rough, standard_numbers=rough)
    scaled = structure.scaled_to(completed, row_weights(structure, batch))
    maps = method.evaluation.maps(scaled, batch) if isinstance(method.evaluation, Drawn) else ()
    phi = {key: value for one in maps for key, value in one.init(1, torch.Generator().manual_seed(0)).items()}
    return replace(Layout.of(scaled, phi), maps=maps)


def table_problem(layout: Layout, batch: Batch, method: Method, seed: int) -> Problem:
    """Rows in closed form or drawn, or compared with the model."""
    structure, shapes, objective = layout.structure, layout.shapes, method.objective
    if objective.direct is not None:
        compared = transport_rows(structure, batch.widened(), shapes, objective.direct, seed)
        if not structure.has_simulators:
            return compared
        begin = one_start(layout, batch.first(START_ROWS), seed, first=True)
        many = PLACES // 4 if structure.begins_anywhere else CHECKED_PLACES
        places = _nearest(layout, compared, _places(layout, begin.repeat(CHECKED_PLACES, 1), seed), seed, many)
        compared.check_simulated(places[:1])
        return replace(compared, jumps=compared.subset(START_ROWS, coarse=True).contradicts_slopes(places))
    if isinstance(method.evaluation, Drawn):
        return DrawnRows(structure, batch.widened(), shapes, layout.maps, objective, method.evaluation)
    assert isinstance(method.evaluation, ClosedForm), "checked before"
    about = RowObjective(structure, shapes, objective, method.evaluation)
    if batch.rows >= BLOCKS_FROM:
        return rows_in_blocks(about, batch, seed)
    return row_problem(about, batch.widened(), seed)


def _places(layout: Layout, points: Tensor, seed: int) -> Tensor:
    """The same points with simulators' parameters anywhere: between their bounds, or around where they start."""
    generator, columns = torch.Generator().manual_seed(seed), parameter_places(layout.shapes)
    places = points + AROUND * torch.randn(points.shape, generator=generator, dtype=points.dtype)
    for node, names in layout.structure.keys.items():
        for name, raw in layout.structure.mechanisms[node].initial_raw(len(places), generator, first=False).items():
            places[:, columns[names[name]].flatten()] = raw.reshape(len(places), -1).to(places)
    return places


def _nearest(layout: Layout, problem: TransportRows, points: Tensor, seed: int, many: int = PLACES) -> Tensor:
    """Of so ``many`` places where a simulator may begin, those of least cost (R, P): a look is cheap.

    Where values jump, a descent is easily held up. There more places are looked at, and drawn anew around the best of
    them, again and again (the cross-entropy method, Rubinstein 1999), with ever fewer places and more points of the
    model: all come together, so that the best alone is returned.
    """
    few, generator = problem.subset(problem.rows, coarse=True), torch.Generator().manual_seed(seed)
    first, rounds = few, []
    if problem.jumps:
        first, many = few.subset(few.rows, coarse=True), 4 * many
        rounds = [(first, GENERATIONS, 2), *((stage, GENERATIONS // 3, 4) for stage in (few, problem))]
    places = torch.cat([points, _places(layout, points.repeat(-(-many // len(points)), 1), seed + 1)])
    cost = first.cost_at(places)
    for stage, generations, part in rounds:
        for _ in range(generations):
            best = places[cost.argsort()[: PLACES // (4 * part)]]
            spread = torch.linalg.cholesky(torch.cov(best.mT) + 1e-6 * torch.eye(best.shape[1]).to(best))
            drawn = torch.randn(PLACES // part, best.shape[1], generator=generator, dtype=best.dtype) @ spread.mT
            places = torch.cat([best[: len(best) // 4], best.mean(0) + drawn])
            cost = stage.cost_at(places)
    return places[cost.argsort()[: 1 if problem.jumps else len(points)]]


def one_start(layout: Layout, batch: Batch, seed: int, *, first: bool) -> Tensor:
    """Starting parameters (1, P) from a guess of what is hidden; ``owner`` says which of several data sets it is of."""
    structure, generator = layout.structure, torch.Generator().manual_seed(seed)
    completed = complete_table(structure, batch, np.random.default_rng(seed), first=first)
    start = structure.start(completed, row_weights(structure, batch))
    theta = structure.filled(structure.raw(start), generator, first=first)
    for backward in layout.maps:
        theta |= backward.started(batch, completed, generator)
    return layout.pack({key: value.to(batch.weight) for key, value in theta.items()})


def _problem_of_parts(table: TableData, parts: PartTable, layout: Layout, method: Method, seed: int) -> Problem:
    """Minibatches; or parts in closed form, whose problems are kept if they fit into memory, or lie elsewhere."""
    sample = replace(table, parts=None).problem(layout, method, seed)
    if isinstance(method.evaluation, Drawn):
        held = table.batch
        number = pools_for(method.optimiser.steps, method.evaluation.batch_size, held.rows)
        return StreamedRows(sample, Pools(held, parts.picked, parts.rows, number, seed))
    assert isinstance(method.evaluation, ClosedForm), "checked before"
    about = RowObjective(layout.structure, layout.shapes, method.objective, method.evaluation)
    keep = parts.elsewhere or size_of(sample) / sample.rows * parts.rows <= table.memory
    made = parts.parts.mapped(part_problem, parts.reading, about, seed, keep=keep)
    return PartitionedProblem(units_of(sample), made, parts.rows)


def size_of(problem: object) -> int:
    """Bytes of all tensors that an object holds, each counted once."""
    storages = [tensor.untyped_storage() for tensor in _tensors(problem, set())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(value: Any, known: set[int]) -> Iterator[Tensor]:
    if id(value) in known:
        return
    known.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    inner = vars(value) if hasattr(value, "__dict__") and type(value).__module__.startswith("otpdag") else value
    for one in inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list | tuple) else ():
        yield from _tensors(one, known)


# -- images behind an encoder: single precision, networks as parameters, one start -------------------------------------


@dataclass(frozen=True)
class ImageData(DataKind):
    """Images (1, N, pixels) on a device."""

    honours: ClassVar[frozenset[str]] = frozenset({"device"})
    most_restarts: ClassVar[int | None] = 1

    model: Model
    images: Tensor

    @classmethod
    def of(cls, model: Model, images: Images, *, device: str = "cpu") -> ImageData:
        """Check images against the model."""
        if len(model.graph.observed) != 1:
            raise ModelError(f"images belong to one observed node; the graph has {len(model.graph.observed)}")
        width = model.spaces[model.graph.observed[0]].width
        if images.rows.shape[1] != width:
            raise DataError(f"the model's images have {width} numbers; got {images.rows.shape[1]}")
        return cls(model, images.rows.to(device).unsqueeze(0))

    @property
    def rows(self) -> int:
        """Images."""
        return int(self.images.shape[1])

    def named(self, name: str) -> Method:
        """An encoder has no default: it comes with a method."""
        raise ModelError(f"images need a Method with Encoded(...), which holds the encoder; got method={name!r}")

    def check(self, method: Method) -> None:
        """Refuse evaluations of other data."""
        if not isinstance(method.evaluation, Encoded):
            raise ModelError(f"images are evaluated by Encoded; got {type(method.evaluation).__name__}")

    def restarts(self, method: Method) -> int:
        """One: starts differ in nothing but their seed, and networks are large."""
        return 1

    def course(self, method: Method) -> SearchSchedule:
        """No short runs."""
        return SearchSchedule(short_steps=0, moves=1)

    def work(self, method: Method) -> None:
        """Convolutions gain from all threads."""

    def lay_out(self, method: Method, seed: int) -> Layout:
        """The model's networks, and the encoder."""
        return Layout.of(self.model.structure, _encoded(method).backward.init())

    def problem(self, layout: Layout, method: Method, seed: int) -> Problem:
        """With codewords, or without."""
        structure, shapes = layout.structure, layout.shapes
        return autoencoder_problem(structure, self.images, shapes, method.objective, _encoded(method), seed)

    def starts(
        self, layout: Layout, problem: Problem, seed: int, numbers: Sequence[int], units: Tensor | None = None
    ) -> Tensor:
        """Networks as they are, of all else what the user gave; codewords among latents, if nothing precedes them."""
        assert isinstance(problem, AutoencoderProblem | CodebookProblem), "checked before"
        own = [initial_theta(layout.structure, seed + number) for number in numbers]
        points = [layout.pack(theta | problem.encoded.backward.init()).to(self.images.device) for theta in own]
        return torch.cat([problem.begun(point) for point in points])


def _encoded(method: Method) -> Encoded:
    assert isinstance(method.evaluation, Encoded), "checked before"
    return method.evaluation


def initial_theta(structure: Structure, seed: int) -> dict[str, Tensor]:
    """Raw parameters (1, ...) in single precision: of networks their own, of others what the user gave, or neutral."""
    given = {node: structure.with_settings(node, {}) for node in structure.mechanisms}
    lifted = {node: {name: value.unsqueeze(0) for name, value in own.items()} for node, own in given.items()}
    theta = structure.filled(structure.raw(lifted), torch.Generator().manual_seed(seed))
    return {key: value.float() for key, value in theta.items()}
