"""What a model is: a graph, a mechanism for each node and their parameters; and how tables become values of nodes.

Nothing in the data tells which of a hidden category's labels is the first, or which way a hidden number points. So
labels are ordered by the mean of the node's first child, and numbers point so that its slope is positive. Mechanisms
say themselves what that changes in them. Where one cannot follow, a user has fixed or tied a parameter that would
change, or only the map that a fit learned draws what is hidden, labels and signs stay.
"""

from __future__ import annotations

import html
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from otpdag.backward import AmortizedMap
from otpdag.data import Batch, ColumnType, Label, Schema, Table, as_frame, column_type, decode, encode, known_table
from otpdag.data.columns import aligned
from otpdag.data.sequences import SequenceBatch, Sequences, SequenceTable, as_sequences, encode_sequences, replace_table
from otpdag.errors import ColumnTypeWarning, DataError, ModelError, check_mapping, listed, printable, told_as
from otpdag.graph import Graph
from otpdag.likelihood.row_posterior import Fitted
from otpdag.mechanisms import Mechanism, Normal, Ordinal
from otpdag.mechanisms.base import Params, Sloped, Turning
from otpdag.mechanisms.parameters import Fixed, Parameter, Tied
from otpdag.model.archive import JOINT, ModelState, write_archive
from otpdag.numerics import Array
from otpdag.problem import split_theta
from otpdag.simulation import ancestral, ancestral_sequences
from otpdag.spaces import Interval, Real, Space
from otpdag.structure import Structure, lag_name, plainest

Naturals = dict[str, dict[str, Tensor]]
Phi = dict[str, Tensor]


class ModelBase:
    """A structure with parameters, once it has them, and the columns of the tables that it knows."""

    def __init__(self, graph: Graph, mechanisms: Mapping[str, Mechanism]) -> None:
        self.structure = Structure.bind(graph, mechanisms)
        self._state = ModelState()

    @classmethod
    def from_frame(
        cls,
        graph: Graph,
        data: Table,
        *,
        hidden: Mapping[str, Mechanism] | None = None,
        mechanisms: Mapping[str, Mechanism] | None = None,
        explain: bool = False,
    ) -> Self:
        """Choose mechanisms by what columns hold: Normal for numbers, Poisson for counts, Categorical for categories.

        Ordered pandas categories and scales (five or more whole numbers from 1 on) are Ordinal where they have parents.
        The values decide, not the dtype, and in the same way with and without gaps: see
        :func:`otpdag.data.column_type`. A choice that is doubtful is a :class:`otpdag.ColumnTypeWarning`.

        Args:
            graph: The graph.
            data: A table with a column for each observed node: of pandas, polars or arrow, or a dictionary of columns.
            hidden: Mechanisms of the hidden nodes.
            mechanisms: Mechanisms of observed nodes that shall not be chosen.
            explain: Print each choice with its reason.

        >>> table = {"vote": [0.0, 1.0, None, 1.0, 0.0], "age": [36.5, 20.2, 24.9, 68.1, 21.4]}
        >>> from otpdag import Model
        >>> model = Model.from_frame(Graph([("age", "vote")]), table, explain=True)
        age: number, numbers with fractions, 5 values
        vote: category of 2, two values, 0, 1
        """
        if not isinstance(graph, Graph):
            raise ModelError(f"graph must be an otp.Graph, and comes before the data; got {type(graph).__name__}")
        data = as_frame(data)
        named = check_mapping("mechanisms", mechanisms, optional=True)
        given = {**check_mapping("hidden", hidden, optional=True), **named}
        chosen: dict[str, Mechanism] = {}
        decided: list[ColumnType] = []
        for node in graph.nodes:
            if node in given:
                chosen[node] = given[node]
            elif node in graph.hidden:
                raise ModelError(f"hidden node {node!r} needs a mechanism: pass hidden={{{node!r}: ...}}")
            elif node not in data.columns:
                raise ModelError(f"node {node!r} has no column and no mechanism; columns are {list(data.columns)}")
            else:
                decided.append(column_type(data[node]))
                chosen[node] = _mechanism_of(decided[-1], graph, node)
        if explain:
            print(*decided, sep="\n")
        doubtful = [f"{one.column!r} is taken for a {one.kind}, but: {one.doubt}" for one in decided if one.doubt]
        if doubtful:
            hint = "Name a mechanism for such a node to choose yourself"
            warnings.warn("\n".join([*doubtful, hint]), ColumnTypeWarning, stacklevel=2)
        return cls(graph, {**chosen, **given})

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.structure.graph

    @property
    def mechanisms(self) -> Mapping[str, Mechanism]:
        """The mechanism of each node."""
        return self.structure.mechanisms

    @property
    def spaces(self) -> dict[str, Space]:
        """The space of each node's values."""
        return {node: mechanism.space for node, mechanism in self.structure.mechanisms.items()}

    def labels(self, node: str) -> tuple[Label, ...]:
        """What the categories of a node are called, in the order of its probabilities; their codes if nothing else."""
        space = self.spaces.get(node) if isinstance(node, str) else None
        if space is None or not space.is_discrete:
            raise ModelError(f"node must be a category; {node!r} is {type(space).__name__}")
        schema = self._state.schema or Schema.of(self.spaces, self.graph)
        return schema[node].labels or tuple(range(space.width))

    def _coordinates(self, node: str) -> list[str]:
        """What the numbers are called that tell of a node: its columns, or of a censored one itself."""
        return [node] if isinstance(self.spaces[node], Interval) else list(self._known_schema()[node].names)

    @property
    def is_fitted(self) -> bool:
        """Whether parameters are known."""
        return self._state.naturals is not None

    def __repr__(self) -> str:
        head = f"Model with {len(self.graph.nodes)} nodes ({'' if self.is_fitted else 'not '}fitted)"
        nodes = _nodes_of(self.structure)
        told = [f"  {node}: {kind}" + (f" <- {parents}" if parents else "") for node, kind, parents in nodes]
        return "\n".join([head, *told])

    def _repr_html_(self) -> str:
        return _as_html(self.structure, self.params() if self.is_fitted else None)

    # -- parameters ---------------------------------------------------------------------------------------------

    def params(self) -> dict[str, dict[str, Array]]:
        """Parameters in natural units, with hidden labels in a canonical order.

        Tables have one leading axis for each discrete parent, in the order of the edges.
        """
        return self.fitted.params()

    def set_params(
        self, params: Mapping[str, Mapping[str, ArrayLike]], *, labels: Mapping[str, Sequence[Label]] | None = None
    ) -> Self:
        """Give parameters by hand, in the shapes of :meth:`params`; a model that was never fitted can then sample.

        Args:
            params: For each node its parameters; those that are fixed may be left out.
            labels: What categories are called, in the order of their probabilities; codes 0, 1, ... if left out.
        """
        self._check_names(params)
        naturals = {
            node: {
                name: _natural(parameter, params.get(node, {}).get(name), node, name)
                for name, parameter in mechanism.declared().items()
            }
            for node, mechanism in self.mechanisms.items()
        }
        schema = self._state.schema or Schema.of(self.spaces, self.graph)
        schema = schema if labels is None else schema.labelled(check_mapping("labels", labels))
        self._state = replace(self._state, naturals=naturals, schema=schema, beside=())
        return self

    def _check_names(self, params: Mapping[str, Mapping[str, ArrayLike]]) -> None:
        check_mapping("params", params)
        for node, values in params.items():
            if node not in self.mechanisms:
                names = ", ".join(self.mechanisms)
                raise ModelError(f"params names node {node!r}, which the model does not have; it has {names}")
            known = self.mechanisms[node].declared()
            for name in check_mapping(f"params[{node!r}]", values):
                if name not in known:
                    raise ModelError(f"node {node!r} has no parameter {name!r}; it has {', '.join(known) or 'none'}")

    def adopt(
        self,
        structure: Structure,
        parameters: Mapping[str, Tensor],
        schema: Schema | None = None,
        maps: tuple[AmortizedMap, ...] = (),
    ) -> None:
        """Take over the end of a fit: raw parameters (1, ...), in canonical order unless draws are a learned map's."""
        theta, phi = split_theta({key: value.detach() for key, value in parameters.items()})
        sampler = None if structure.has_densities else next((one for one in maps if one.name == JOINT), None)
        naturals = structure.naturals(theta)
        naturals = in_one_order(structure, naturals) if sampler is None else naturals
        self.structure = structure
        self._state = ModelState(schema or Schema.of(self.spaces, self.graph), naturals, phi, sampler)

    def fits_as_well(self, beside: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> None:
        """Keep parameters a little beside the estimate that the data of its fit do not tell from it."""
        self._state = replace(self._state, beside=tuple(beside))

    def _fitted_naturals(self) -> Naturals:
        if self._state.naturals is None:
            from otpdag.errors import NotFittedError  # which imports scikit-learn

            raise NotFittedError("the model has no parameters yet: call otpdag.fit(model, data) first")
        return self._state.naturals

    @property
    def fitted(self) -> Fitted:
        """What inference needs."""
        state = self._state
        return Fitted(self.structure, self._fitted_naturals(), state.phi, state.sampler, state.schema, state.beside)

    def _known_schema(self) -> Schema:
        if self._state.schema is None:
            from otpdag.errors import NotFittedError

            raise NotFittedError("the model has seen no table yet: call otpdag.fit(model, data) first")
        return self._state.schema

    def save(self, path: str | Path) -> None:
        """Write the model to one file (JSON and safetensors in a zip); :func:`load` reads it without running code.

        The file is put in place in one step: if that fails or is killed, what was there before is still there.
        """
        write_archive(path, self.structure, self._state)

    # -- tables -------------------------------------------------------------------------------------------------

    def _mechanism(self, node: str) -> Mechanism:
        if not isinstance(node, str) or node not in self.graph.nodes:
            raise ModelError(f"there is no node {node!r:.100}; the model has {', '.join(map(repr, self.graph.nodes))}")
        return self.structure.mechanisms[node]

    def _read(self, data: SequenceTable, partial: bool) -> tuple[Batch | SequenceBatch, pd.Index]:
        """Rows, or sequences if the graph has lagged edges, or groups; and the index of rows or steps."""
        if self.structure.shared:
            return self._read_groups(data, partial)[:2]
        return self._encode_sequences(data, partial) if self.graph.is_dynamic else self._read_rows(data, partial)

    @property
    def group(self) -> str | None:
        """The column that tells groups of rows that share hidden nodes; None if no node is shared."""
        return next((str(getattr(self.mechanisms[node], "group", "")) for node in self.structure.shared), None)

    def in_groups(self, data: Any) -> Sequences:
        """A table with the rows of each group side by side."""
        return Sequences(self._grouped(data), sequence=self.group)

    def _grouped(self, data: Any) -> pd.DataFrame:
        frame = as_frame(data)
        if self.group not in frame.columns:
            held = f"it has {listed(list(map(str, frame)))}"
            raise DataError(f"data must be a table with a column {self.group!r}, which tells groups; {held}")
        return frame

    def _read_groups(self, data: Any, partial: bool) -> tuple[SequenceBatch, pd.Index, Tensor]:
        """Groups, the index of the table's rows, and where each of these is among those of the groups."""
        frame = self._grouped(data)
        batch, _ = self._encode_sequences(self.in_groups(frame), partial)
        place = np.argsort(np.argsort(pd.factorize(frame[self.group])[0], kind="stable"))
        return batch, frame.index, torch.from_numpy(place)

    def _read_rows(self, data: SequenceTable, partial: bool = False) -> tuple[Batch, pd.Index]:
        if self.structure.shared:
            raise ModelError(
                f"this is asked of rows one by one; those of a {self.group} share {listed(self.structure.shared)}: "
                "log_likelihood, predict, posterior, impute, check, counterfactual and sample know that"
            )
        table = known_table(data)
        if isinstance(table, Sequences | list | tuple):
            raise DataError("data are sequences, but the graph has no lagged edge")
        batch = self._encode_partial(table, partial)
        return batch, table.index if isinstance(table, pd.DataFrame) else pd.RangeIndex(batch.rows)

    def _encode_partial(self, data: Table, partial: bool = False) -> Batch:
        batch = encode(self._shown(data, partial), self._known_schema(), hidden=self.graph.hidden, partial=True)
        self.structure.check_given(batch.mask)
        return batch

    def _encode_sequences(self, data: SequenceTable, partial: bool) -> tuple[SequenceBatch, pd.Index]:
        sequences = as_sequences(data)
        shown = replace_table(sequences, self._shown(sequences.table, partial))
        return encode_sequences(shown, self._known_schema(), hidden=self.graph.hidden, partial=True), sequences.index

    def _shown(self, data: Table, partial: bool) -> Table:
        """What a table shows of observed nodes; one that lacks columns would fit perfectly, filled in by the model."""
        self._fitted_naturals()
        schema = self._known_schema()
        if not self.graph.observed:
            raise ModelError("the model has no observed nodes: no table shows anything of it")
        if not partial and isinstance(data, pd.DataFrame | Mapping):
            given, columns = set(self.structure.given), [str(name) for name in data]
            nodes = [node for node in self.graph.observed if node not in data and node not in given]
            absent = [name for node in nodes for name in schema[node].names if name not in data]
            if absent:
                hint = "; is it separated by semicolons?" if len(columns) == 1 and ";" in columns[0] else ""
                raise DataError(
                    f"the table lacks the column{'s' * (len(absent) > 1)} {listed(absent)}; it has {listed(columns)}"
                    f"{hint}. A column may be empty; partial=True takes absent ones for missing"
                )
        if isinstance(data, pd.DataFrame):
            hidden = [name for node in self.graph.hidden for name in schema[node].names]
            return data.drop(columns=hidden, errors="ignore")
        return data

    def _values(self, values: Mapping[str, Any] | None, argument: str) -> dict[str, Tensor]:
        """Values (1, N, width) of nodes; N is one, or the number of questions."""
        values, cells = check_mapping(argument, values, optional=True), {}
        for node, value in values.items():
            cells[node] = max(1, _cells(value).size // self._mechanism(node).space.cells)
        rows = max(cells.values(), default=1)
        return {node: self._column(node, value, rows, argument) for node, value in values.items()}

    def _column(self, node: str, value: Any, rows: int, argument: str) -> Tensor:
        """Values (1, rows, width) from one value, or from one for each row."""
        self._mechanism(node)
        column = self._known_schema()[node]
        cells = column.space.cells
        array = _cells(value)
        if array.ndim == 0 and isinstance(column.space, Interval):  # a number that is known
            array = array.repeat(cells)
        if array.size not in (cells, rows * cells):
            raise ModelError(f"{argument}[{node!r}] must be one value or one for each of {rows} rows; got {array.size}")
        if array.ndim > 1 and array.shape != (array.size // cells, cells):
            raise ModelError(f"{argument}[{node!r}] must be one value or a column of them; got shape {array.shape}")
        table = np.broadcast_to(array.reshape(-1, cells), (rows, cells))
        frame = pd.DataFrame({name: table[:, i] for i, name in enumerate(column.names)}).infer_objects()
        with told_as(DataError, argument, DataError):
            batch = encode(frame, Schema({node: column}), hidden=(), partial=True)
        if not bool(batch.mask[node].all()):
            raise ModelError(f"{argument}[{node!r}] must not be missing; got {value!r}")
        return batch.values[node]

    def _setting(
        self, node: str, value: Any, rows: int, index: pd.Index | None = None
    ) -> Tensor | Callable[[Mapping[str, Tensor]], Tensor]:
        """What an intervention sets a node to: values (1, rows, width), or a function that makes them of drawn rows."""
        if not callable(value):
            return self._column(node, aligned(value, index, f"do[{node!r}]"), rows, "do")
        self._mechanism(node)

        def act(drawn: Mapping[str, Tensor]) -> Tensor:
            table = decode({name: column.flatten(0, 1) for name, column in drawn.items()}, self._known_schema())
            return self._column(node, aligned(value(table), table.index, f"do[{node!r}]"), len(table), "do")

        return act

    def _given_values(
        self, given: Table | None, rows: int, needed: Sequence[str], *, exactly: bool = False
    ) -> dict[str, Tensor]:
        """Values (1, rows, width) of Given nodes."""
        if not needed:
            return {}
        if given is None:
            raise ModelError(f"nodes {', '.join(map(repr, needed))} are Given: pass given=table with their values")
        schema = self._known_schema()
        batch = encode(given, Schema({node: schema[node] for node in needed}), hidden=(), partial=True)
        if batch.rows < rows or (exactly and batch.rows > rows):
            raise ModelError(f"given must have {'' if exactly else 'at least '}{rows} rows; got {batch.rows}")
        self.structure.check_given(batch.mask)
        return {node: batch.values[node][:, :rows] for node in needed}


def _cells(value: Any) -> Array:
    return np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value, dtype=object)


def _natural(parameter: Parameter, given: ArrayLike | None, node: str, name: str) -> Tensor:
    """A natural parameter (1, ...) as a user gives it."""
    what, entries = f"parameter {name!r} of node {node!r}", int(np.prod(parameter.shape))
    if given is None and not parameter.learned:
        return parameter.constant(node, name).unsqueeze(0)
    if given is None:
        raise ModelError(f"{what} is missing; expected shape {parameter.shape}")
    try:
        value = torch.tensor(np.array(given, dtype=float, order="C"))  # turned arrays have strides that torch has not
    except (TypeError, ValueError, OverflowError):
        raise ModelError(f"{what} must be numbers; got {given!r:.100}") from None
    if value.numel() != entries:
        raise ModelError(f"{what} must have {entries} entries (shape {parameter.shape}); got {tuple(value.shape)}")
    if not parameter.support.check(value.reshape(parameter.shape)):
        raise ModelError(f"{what} must be {parameter.support.name}; got {given}")
    return value.reshape(1, *parameter.shape)


def _nodes_of(structure: Structure) -> Iterator[tuple[str, str, str]]:
    """Each node, what kind it is, and its parents, as text that is safe to print."""
    for node in structure.graph.nodes:
        mechanism = structure.mechanisms[node]
        kind = type(mechanism).__name__ + (", hidden" if node in structure.graph.hidden else "")
        parents = ", ".join(name for name, _ in mechanism.family.parents)
        yield printable(node, keep=""), kind, printable(parents, keep="")


def _as_html(structure: Structure, params: Mapping[str, Mapping[str, Array]] | None) -> str:
    """A table with one row for each node and its parameters, for a notebook."""
    rows = []
    for node, told in zip(structure.graph.nodes, _nodes_of(structure), strict=True):
        shown = ""
        for name, value in (params or {}).get(node, {}).items():
            if not name.startswith(("network.", "module.")):
                digits = np.array2string(np.asarray(value), precision=4, threshold=24, suppress_small=True)
                shown += f"{html.escape(printable(name, keep=''))}<pre>{html.escape(digits)}</pre>"
        rows.append((*map(html.escape, told), shown))
    frame = pd.DataFrame(rows, columns=["node", "mechanism", "parents", "parameters"])
    with pd.option_context("display.max_colwidth", None, "display.max_rows", None):
        table = frame.to_html(index=False, escape=False, justify="left", border=0)
    return f"<div><p><b>otpdag model</b> ({'not ' if params is None else ''}fitted)</p>{table}</div>"


# -- a canonical order of hidden labels and signs, so that two fits compare --------------------------------------------


Change = list[int] | Tensor  # another order of a node's labels, or signs of its coordinates


def in_one_order(structure: Structure, naturals: Naturals) -> Naturals:
    """Relabel categories and flip signs of hidden nodes."""
    hidden = [node for node in structure.graph.order if node in structure.graph.hidden]
    # signs first: labels may be ordered by a number that one turns round
    for node in sorted(hidden, key=lambda node: structure.mechanisms[node].space.is_discrete):
        is_discrete = structure.mechanisms[node].space.is_discrete
        change = (_new_labels if is_discrete else _new_sign)(structure, naturals, node)
        changed = None if change is None else _changed(structure, naturals, node, change)
        naturals = naturals if changed is None else changed
    return naturals


def _changed(structure: Structure, naturals: Naturals, node: str, change: Change) -> Naturals | None:
    """All parameters after a change; None if a mechanism cannot follow, or a given parameter would differ."""
    everywhere = dict(naturals)
    for owner, mechanism in structure.mechanisms.items():
        names = (owner, *(name for name, _ in mechanism.family.parents))
        touched = {name for name in names if structure.base(name) == node}
        if not touched:
            continue
        params = _following(mechanism, naturals[owner], touched, change)
        if params is None or not _keeps_settings(mechanism, naturals[owner], params):
            return None
        everywhere[owner] = params
    return everywhere


def _following(one: Mechanism, params: Params, nodes: Collection[str], change: Change) -> dict[str, Tensor] | None:
    """The parameters of a mechanism after a change of some nodes; None if it cannot follow."""
    if isinstance(change, list):
        return one.relabelled(params, nodes, change)
    return one.turned(params, nodes, change) if isinstance(one, Turning) else None


def _mechanism_of(column: ColumnType, graph: Graph, node: str) -> Mechanism:
    """The plainest mechanism of a column; alone, or in hidden classes, an ordered category needs no order."""
    parents = graph.parents(node)
    if column.is_ordered and parents and not set(parents) & set(graph.hidden):
        return Ordinal(column.space.width if column.space is not None else 2)
    return plainest(column.space or Real()) or Normal()


def _keeps_settings(mechanism: Mechanism, before: Params, after: Params) -> bool:
    """Whether all that a user fixed or tied is as it was, and all else inside its bounds."""
    for name, parameter in mechanism.declared().items():
        if parameter.is_bounded and not parameter.support.holds(after[name]).all():
            return False
        if not isinstance(parameter.setting, Fixed | Tied):
            continue
        held = torch.as_tensor(parameter.fixed_entries()).flatten()
        held[[place for place, _ in parameter.ties]] = True
        held = held.reshape(parameter.shape)
        if not torch.allclose(after[name][:, held], before[name][:, held]):
            return False
    return True


# -- labels -----------------------------------------------------------------------------------------------------------


def _new_labels(structure: Structure, naturals: Naturals, node: str) -> Change | None:
    order = _label_order(structure, naturals, node)
    return None if order == sorted(order) else order


def _label_order(structure: Structure, naturals: Naturals, node: str, draws: int = 400) -> list[int]:
    """States by the mean of the first child under do(node = state), over draws with the same noise for all."""
    size = structure.mechanisms[node].space.width
    child = _first_child(structure, node)
    if child is None:
        return list(range(size))
    mechanism = structure.mechanisms[child]
    if {name for name, _ in mechanism.family.parents} == {node}:  # there is nothing to draw where it has a mean
        mean = mechanism.mean(naturals[child], {node: torch.eye(size, dtype=torch.float64).unsqueeze(0)})
        if mean is not None:
            positions = mechanism.space.position(mean)[0].tolist()
            return sorted(range(size), key=lambda state: positions[state])
    spaces = {name: structure.mechanisms[name].space for name in structure.given}
    given = {name: space.neutral().expand(1, draws, -1) for name, space in spaces.items()}
    means = []
    for state in torch.eye(size, dtype=torch.float64):
        drawn = _drawn(structure, naturals, child, {**given, node: state.expand(1, draws, size)})
        means.append(_position(structure, naturals, child, drawn))
    return sorted(range(size), key=lambda state: means[state])


def _first_child(structure: Structure, node: str) -> str | None:
    """The first observed child, or the first of all."""
    children = sorted(structure.graph.children(node), key=lambda child: child in structure.graph.hidden)
    return children[0] if children else None


def _drawn(structure: Structure, naturals: Naturals, child: str, do: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows of the model down to a child, or the last steps of short sequences with the values that those depend on."""
    generator, rows = torch.Generator().manual_seed(0), next(iter(do.values())).shape[1]
    if not structure.graph.is_dynamic:
        return ancestral(structure, naturals, rows, generator, do=do, only=[child])
    longest = max(edge.by for edge in structure.graph.lags)
    steps = {node: value.unsqueeze(2).expand(-1, -1, longest + 1, -1) for node, value in do.items()}
    drawn = ancestral_sequences(structure, naturals, rows, longest + 1, generator, do=steps)
    last = {node: value[:, :, -1] for node, value in drawn.items()}
    lagged = {lag_name(edge.parent, edge.by): drawn[edge.parent][:, :, -1 - edge.by] for edge in structure.graph.lags}
    return last | lagged


def _position(structure: Structure, naturals: Naturals, child: str, drawn: Mapping[str, Tensor]) -> float:
    """One number that tells where a child lies."""
    mechanism = structure.mechanisms[child]
    mean = mechanism.mean(naturals[child], structure.parents(child, drawn))
    return float(mechanism.space.position(drawn[child] if mean is None else mean).mean())


# -- signs ------------------------------------------------------------------------------------------------------------


def _new_sign(structure: Structure, naturals: Naturals, node: str) -> Change | None:
    """The turn that makes the first child's slopes positive; None if it is of no use or makes no sense."""
    child = _first_child(structure, node)
    if child is None or not structure.mechanisms[node].space.is_unbounded:
        return None
    below = structure.mechanisms[child]
    slopes = below.slopes(naturals[child], node) if isinstance(below, Sloped) else None
    if slopes is None or bool((slopes[0] >= 0).all()):
        return None
    return torch.where(slopes[0] < 0, -1.0, 1.0).to(slopes)
