"""What a model is: a graph, a mechanism for each node and their parameters; and how tables become values of nodes."""

from __future__ import annotations

import html
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from otpdag.backward import AmortizedMap
from otpdag.data import Batch, ColumnType, Label, Schema, Table, as_frame, column_type, decode, encode, known_table
from otpdag.data.sequences import (
    SequenceBatch,
    Sequences,
    SequenceTable,
    as_sequences,
    encode_sequences,
    replace_table,
)
from otpdag.errors import ColumnTypeWarning, DataError, ModelError, check_mapping, listed, printable
from otpdag.graph import Graph
from otpdag.likelihood.row_posterior import Fitted
from otpdag.mechanisms import Mechanism, Normal
from otpdag.mechanisms.parameters import Parameter
from otpdag.model import archive
from otpdag.model.relabelling import in_one_order
from otpdag.spaces import Real, Space
from otpdag.structure import Structure, plainest

Array = NDArray[np.float64]


class ModelBase:
    """A structure with parameters, once it has them, and the columns of the tables that it knows."""

    def __init__(self, graph: Graph, mechanisms: Mapping[str, Mechanism]) -> None:
        self.structure = Structure.bind(graph, mechanisms)
        self._schema: Schema | None = None
        self._naturals: dict[str, dict[str, Tensor]] | None = None
        self._phi: dict[str, Tensor] = {}
        self._maps: tuple[AmortizedMap, ...] = ()
        self._left_out_maps: tuple[archive.SavedMap, ...] = ()
        self._count_range: dict[str, float] = {}

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
        given = {**(hidden or {}), **(mechanisms or {})}
        chosen: dict[str, Mechanism] = {}
        decided: list[ColumnType] = []
        for node in graph.nodes:
            if node in given:
                chosen[node] = given[node]
            elif node in graph.hidden:
                raise ModelError(f"hidden node {node!r} needs a mechanism: pass hidden={{{node!r}: ...}}")
            elif node not in data.columns:
                raise ModelError(
                    f"observed node {node!r} has no column and no mechanism; columns are {list(data.columns)}"
                )
            else:
                decided.append(column_type(data[node]))
                chosen[node] = plainest(decided[-1].space or Real()) or Normal()
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
        space = self.spaces[node]
        if not space.is_discrete:
            raise ModelError(f"node must be a category; {node!r} is {type(space).__name__}")
        known = None if self._schema is None else self._schema[node].labels
        return tuple(range(space.width)) if known is None else known

    @property
    def is_fitted(self) -> bool:
        """Whether parameters are known."""
        return self._naturals is not None

    def __repr__(self) -> str:
        return _as_text(self.structure, self.is_fitted)

    def _repr_html_(self) -> str:
        return _as_html(self.structure, self.params() if self.is_fitted else None)

    # -- parameters ---------------------------------------------------------------------------------------------

    def params(self) -> dict[str, dict[str, Array]]:
        """Parameters in natural units, with hidden labels in a canonical order.

        Tables have one leading axis for each discrete parent, in the order of the edges.
        """
        naturals = self._fitted_naturals()
        described: dict[str, dict[str, Array]] = {}
        for node, mechanism in self.structure.mechanisms.items():
            shown = mechanism.describe(naturals[node])
            described[node] = {name: value[0].detach().cpu().numpy().copy() for name, value in shown.items()}
        return described

    def set_params(
        self, params: Mapping[str, Mapping[str, ArrayLike]], *, labels: Mapping[str, Sequence[Label]] | None = None
    ) -> Self:
        """Give parameters by hand, in the shapes of :meth:`params`; a model that was never fitted can then sample.

        Args:
            params: For each node its parameters; those that are fixed may be left out.
            labels: What categories are called, in the order of their probabilities; codes 0, 1, ... if left out.
        """
        self._check_names(params)
        self._naturals = {
            node: {
                name: _natural(parameter, params.get(node, {}).get(name), node, name)
                for name, parameter in mechanism.declared().items()
            }
            for node, mechanism in self.mechanisms.items()
        }
        schema = self._schema or Schema.of(self.spaces, self.graph)
        self._schema = schema if labels is None else schema.labelled(labels)
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
        schema: Schema,
        maps: tuple[AmortizedMap, ...],
    ) -> None:
        """Take over the end of a fit: raw parameters (1, ...), put in canonical order."""
        raw = {key: value.detach() for key, value in parameters.items()}
        naturals = structure.naturals({key: value for key, value in raw.items() if not key.startswith("phi.")})
        phi = {key: value for key, value in raw.items() if key.startswith("phi.")}
        self.structure, self._schema, self._maps, self._left_out_maps = structure, schema, maps, ()
        self._naturals, self._phi = in_one_order(structure, naturals, phi, maps)

    def note_ranges(self, ranges: Mapping[str, float]) -> None:
        """Remember how far counts reach in the data."""
        self._count_range = dict(ranges)

    def _fitted_naturals(self) -> dict[str, dict[str, Tensor]]:
        if self._naturals is None:
            raise _not_fitted("the model has no parameters yet: call otpdag.fit(model, data) first")
        return self._naturals

    @property
    def fitted(self) -> Fitted:
        """What inference needs."""
        sampler = next((m for m in self._maps if m.name == "joint"), None)
        return Fitted(self.structure, self._fitted_naturals(), self._phi, sampler, self._count_range)

    def _known_schema(self) -> Schema:
        if self._schema is None:
            raise _not_fitted("the model has seen no table yet: call otpdag.fit(model, data) first")
        return self._schema

    def save(self, path: str | Path) -> None:
        """Write the model to one file (JSON and safetensors in a zip); :func:`load` reads it without running code.

        The file is put in place in one step: if that fails or is killed, what was there before is still there.
        """
        state = archive.ModelState(
            self._schema, self._naturals, self._phi, self._maps, self._count_range, self._left_out_maps
        )
        archive.write_archive(path, self.structure, state)

    # -- tables -------------------------------------------------------------------------------------------------

    def _mechanism(self, node: str) -> Mechanism:
        if node not in self.graph.nodes:
            raise ModelError(f"there is no node {node!r}; the model has {', '.join(map(repr, self.graph.nodes))}")
        return self.structure.mechanisms[node]

    def _read(self, data: Table | SequenceTable, partial: bool) -> tuple[Batch | SequenceBatch, pd.Index]:
        """Rows, or sequences if the graph has lagged edges, and the index of rows or steps."""
        return self._encode_sequences(data, partial) if self.graph.is_dynamic else self._read_rows(data, partial)

    def _read_rows(self, data: Table | SequenceTable, partial: bool = False) -> tuple[Batch, pd.Index]:
        table = known_table(data)
        if isinstance(table, Sequences | list | tuple):
            raise DataError("data are sequences, but the graph has no lagged edge")
        batch = self._encode_partial(table, partial)
        return batch, table.index if isinstance(table, pd.DataFrame) else pd.RangeIndex(batch.rows)

    def _encode_partial(self, data: Table, partial: bool = False) -> Batch:
        batch = encode(self._shown(data, partial), self._known_schema(), hidden=self.graph.hidden, partial=True)
        self.structure.check_given(batch.mask)
        return batch

    def _encode_sequences(self, data: Table | SequenceTable, partial: bool) -> tuple[SequenceBatch, pd.Index]:
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

    def _values(self, values: Mapping[str, Any], argument: str) -> dict[str, Tensor]:
        """Values (1, N, width) of nodes; N is one, or the number of questions."""
        cells = {}
        for node, value in check_mapping(argument, values).items():
            cells[node] = max(1, np.asarray(value, dtype=object).size // self._mechanism(node).space.cells)
        rows = max(cells.values(), default=1)
        return {node: self._column(node, value, rows, argument) for node, value in values.items()}

    def _column(self, node: str, value: Any, rows: int, argument: str) -> Tensor:
        """Values (1, rows, width) from one value, or from one for each row."""
        self._mechanism(node)
        column = self._known_schema()[node]
        cells = column.space.cells
        array = np.asarray(value, dtype=object)
        if array.size not in (cells, rows * cells):
            raise ModelError(
                f"{argument}[{node!r}] must be one value, or one for each of {rows} rows; got {array.size} values"
            )
        table = np.broadcast_to(array.reshape(-1, cells), (rows, cells))
        frame = pd.DataFrame({name: table[:, i] for i, name in enumerate(column.names)}).infer_objects()
        batch = encode(frame, Schema({node: column}), hidden=(), partial=True)
        if not bool(batch.mask[node].all()):
            raise ModelError(f"{argument}[{node!r}] must not be missing; got {value!r}")
        return batch.values[node]

    def _setting(self, node: str, value: Any, rows: int) -> Tensor | Callable[[Mapping[str, Tensor]], Tensor]:
        """What an intervention sets a node to: values (1, rows, width), or a function that makes them of drawn rows."""
        if not callable(value):
            return self._column(node, value, rows, "do")
        self._mechanism(node)

        def act(drawn: Mapping[str, Tensor]) -> Tensor:
            table = decode({name: column.flatten(0, 1) for name, column in drawn.items()}, self._known_schema())
            return self._column(node, value(table), len(table), "do")

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


def _natural(parameter: Parameter, given: ArrayLike | None, node: str, name: str) -> Tensor:
    """A natural parameter (1, ...) as a user gives it."""
    what, entries = f"parameter {name!r} of node {node!r}", int(np.prod(parameter.shape))
    if given is None and not parameter.learned:
        return parameter.constant(node, name).unsqueeze(0)
    if given is None:
        raise ModelError(f"{what} is missing; expected shape {parameter.shape}")
    try:
        value = torch.tensor(np.asarray(given, dtype=float))
    except (TypeError, ValueError):
        raise ModelError(f"{what} must be numbers; got {given!r:.100}") from None
    if value.numel() != entries:
        raise ModelError(
            f"{what} must have {entries} entries (shape {parameter.shape}); got shape {tuple(value.shape)}"
        )
    if not parameter.support.check(value.reshape(parameter.shape)):
        raise ModelError(f"{what} must be {parameter.support.name}; got {given}")
    return value.reshape(1, *parameter.shape)


def _not_fitted(message: str) -> Exception:
    """The error of a model without parameters; its class imports scikit-learn, which a model need not."""
    from otpdag.errors import NotFittedError

    return NotFittedError(message)


def _escaped(text: str) -> str:
    return html.escape(printable(text, keep=""))


def _kind(structure: Structure, node: str) -> str:
    hidden = ", hidden" if node in structure.graph.hidden else ""
    return f"{type(structure.mechanisms[node]).__name__}{hidden}"


def _as_text(structure: Structure, is_fitted: bool) -> str:
    """One line for each node, for a terminal."""
    lines = [f"Model with {len(structure.graph.nodes)} nodes ({'fitted' if is_fitted else 'not fitted'})"]
    for node in structure.graph.nodes:
        parents = ", ".join(name for name, _ in structure.mechanisms[node].family.parents)
        line = f"  {node}: {_kind(structure, node)}" + (f" <- {parents}" if parents else "")
        lines.append(printable(line, keep=""))
    return "\n".join(lines)


def _show(value: Array) -> str:
    text = np.array2string(np.asarray(value), precision=4, threshold=24, suppress_small=True)
    return f"<pre style='margin:0'>{html.escape(text)}</pre>"


def _as_html(structure: Structure, params: Mapping[str, Mapping[str, Array]] | None) -> str:
    """A table with one row for each node and its parameters, for a notebook."""
    rows = []
    for node in structure.graph.nodes:
        own = params[node] if params is not None else {}
        shown = {name: value for name, value in own.items() if not name.startswith(("network.", "module."))}
        inner = "".join(
            f"<tr><td style='text-align:left;vertical-align:top'>{_escaped(name)}</td>"
            f"<td style='text-align:left'>{_show(value)}</td></tr>"
            for name, value in shown.items()
        )
        parents = _escaped(", ".join(name for name, _ in structure.mechanisms[node].family.parents)) or "–"
        rows.append(
            "<tr style='vertical-align:top'>"
            f"<td style='text-align:left'><b>{_escaped(node)}</b></td>"
            f"<td style='text-align:left'>{_escaped(_kind(structure, node))}</td>"
            f"<td style='text-align:left'>{parents}</td><td><table>{inner}</table></td></tr>"
        )
    state = "fitted" if params is not None else "not fitted"
    head = "".join(
        f"<th style='text-align:left'>{name}</th>" for name in ("node", "mechanism", "parents", "parameters")
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"<div><p><b>otpdag model</b> ({state})</p>{table}</div>"
