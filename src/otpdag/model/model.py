"""A model: a graph with a mechanism for each node and, once fitted, their parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from otpdag.arguments import check_count, check_mapping, check_seed
from otpdag.data import (
    Batch,
    ColumnType,
    Label,
    Schema,
    Table,
    as_frame,
    column_type,
    decode,
    encode,
    known_table,
)
from otpdag.data.sequences import SequenceBatch, SequenceTable, as_sequences, encode_sequences, replace_table
from otpdag.divergences import Energy
from otpdag.errors import ColumnTypeWarning, DataError, ModelError
from otpdag.graph import Graph
from otpdag.learned.amortized import AmortizedMap
from otpdag.likelihood import row_posterior, sequence_posterior
from otpdag.mechanisms import Mechanism, Normal
from otpdag.model import archive, rendering
from otpdag.model import relabelling as residuals
from otpdag.model.answering import Answering, as_table, row_index, with_notes
from otpdag.model.relabelling import in_one_order
from otpdag.simulation import ancestral, ancestral_sequences
from otpdag.spaces import Real, Space
from otpdag.structure import Structure, plainest

Array = NDArray[np.float64]


class Model(Answering):
    """A directed graphical model: a graph and, for each node, how its value comes about.

    Args:
        graph: Nodes, edges, and which nodes are hidden.
        mechanisms: One mechanism for each node.

    Example:
        >>> from otpdag import Graph, mechanisms as m
        >>> graph = Graph([("load", "price"), ("load", "outages")], hidden=["load"])
        >>> print(Model(graph, {"load": m.Normal(), "price": m.Normal(), "outages": m.Poisson()}))
        Model with 3 nodes (not fitted)
          load: Normal, hidden
          price: Normal <- load
          outages: Poisson <- load
    """

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
    ) -> Model:
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
        return rendering.as_text(self.structure, self.params() if self.is_fitted else None)

    def _repr_html_(self) -> str:
        return rendering.as_html(self.structure, self.params() if self.is_fitted else None)

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
    ) -> Model:
        """Give parameters by hand, in the shapes of :meth:`params`; a model that was never fitted can then sample.

        Args:
            params: For each node its parameters; those that are fixed may be left out.
            labels: What categories are called, in the order of their probabilities; codes 0, 1, ... if left out.
        """
        self._check_names(params)
        naturals: dict[str, dict[str, Tensor]] = {}
        for node, mechanism in self.structure.mechanisms.items():
            naturals[node] = {}
            for name, parameter in mechanism.declared().items():
                given = params.get(node, {}).get(name)
                if given is None and not parameter.learned:
                    naturals[node][name] = parameter.constant(node, name).unsqueeze(0)
                    continue
                if given is None:
                    raise ModelError(
                        f"parameter {name!r} of node {node!r} is missing; expected shape {parameter.shape}"
                    )
                value = _as_numbers(given, node, name)
                if value.numel() != int(np.prod(parameter.shape)):
                    raise ModelError(
                        f"parameter {name!r} of node {node!r} must have {int(np.prod(parameter.shape))} entries "
                        f"(shape {parameter.shape}); got shape {tuple(value.shape)}"
                    )
                if not parameter.support.check(value.reshape(parameter.shape)):
                    raise ModelError(
                        f"parameter {name!r} of node {node!r} must be {parameter.support.name}; got {given}"
                    )
                naturals[node][name] = value.reshape(1, *parameter.shape)
        self._naturals = naturals
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
    def fitted(self) -> row_posterior.Fitted:
        """What inference needs."""
        sampler = next((m for m in self._maps if m.name == "joint"), None)
        return row_posterior.Fitted(self.structure, self._fitted_naturals(), self._phi, sampler, self._count_range)

    # -- use ----------------------------------------------------------------------------------------------------

    def sample(
        self,
        rows: int,
        *,
        seed: int,
        do: Mapping[str, Any] | None = None,
        given: Table | None = None,
        length: int | None = None,
    ) -> pd.DataFrame:
        """Draw rows from the model, hidden nodes too.

        Args:
            rows: Number of rows; of sequences, if the graph has lagged edges.
            seed: Determines the draw.
            do: Interventions: nodes set to a value (or one value for each row), whatever their parents say; or a
                function of the table as far as it is drawn, in which the node is as it would have been:
                ``{"dose": lambda rows: rows["dose"] + 1}``. Of sequences, values only.
            given: Values of the nodes that are Given, at least as many rows (or steps of all sequences). Values of
                other nodes are refused: ``do`` sets them, and ``posterior`` and ``impute`` draw given what rows show.
            length: Steps of each sequence, if the graph has lagged edges; the table then has the columns ``sequence``
                and ``time`` as well.
        """
        naturals, schema = self._fitted_naturals(), self._known_schema()
        rows, seed = check_count("rows", rows), check_seed(seed)
        if self.graph.is_dynamic or length is not None:
            return self._sample_sequences(rows, length, seed, do, given)
        asked = check_mapping("do", do or {})
        settings: dict[str, Any] = {node: self._setting(node, value, rows) for node, value in asked.items()}
        settings |= self._given_values(given, rows, settings)
        generator = torch.Generator().manual_seed(seed)
        values = ancestral(self.structure, naturals, rows, generator, do=settings)
        return decode({node: values[node][:1] for node in self.graph.nodes}, schema)

    def _sample_sequences(
        self, sequences: int, length: int | None, seed: int, do: Mapping[str, Any] | None, given: Table | None
    ) -> pd.DataFrame:
        if not self.graph.is_dynamic:
            raise ModelError("length is for graphs with lagged edges; this one has none")
        if length is None or length < 1:
            raise ModelError(f"length must be at least 1 for a graph with lagged edges; got {length}")
        steps = sequences * length
        settings = {node: self._intervention(node, value, steps) for node, value in (do or {}).items()}
        settings |= self._given_values(given, steps, settings)
        shaped = {node: value.reshape(1, sequences, length, -1) for node, value in settings.items()}
        generator = torch.Generator().manual_seed(seed)
        drawn = ancestral_sequences(self.structure, self._fitted_naturals(), sequences, length, generator, do=shaped)
        table = decode({node: value.flatten(1, 2) for node, value in drawn.items()}, self._known_schema())
        table.insert(0, "sequence", np.repeat(np.arange(sequences), length))
        table.insert(1, "time", np.tile(np.arange(length), sequences))
        return table

    def _setting(self, node: str, value: Any, rows: int) -> Tensor | Callable[[Mapping[str, Tensor]], Tensor]:
        """A value of an intervention, or a function of what was drawn before."""
        if not callable(value):
            return self._intervention(node, value, rows)

        def act(drawn: Mapping[str, Tensor]) -> Tensor:
            table = decode({name: column[:1] for name, column in drawn.items()}, self._known_schema())
            return self._intervention(node, value(table), rows)

        return act

    def _intervention(self, node: str, value: Any, rows: int) -> Tensor:
        if node not in self.graph.nodes:
            raise ModelError(f"do names node {node!r}, which is not in the graph; it has {', '.join(self.graph.nodes)}")
        schema = self._known_schema()
        cells = schema[node].space.cells
        array = np.asarray(value)
        if array.size not in (cells, rows * cells):
            raise ModelError(
                f"do[{node!r}] must be one value, or one for each of the {rows} rows; got shape {array.shape}"
            )
        table = np.broadcast_to(array.reshape(-1, cells), (rows, cells))
        frame = pd.DataFrame({name: table[:, i] for i, name in enumerate(schema[node].names)})
        batch = encode(frame, Schema({node: schema[node]}), hidden=(), partial=True)
        if not bool(batch.mask[node].all()):
            raise ModelError(f"do[{node!r}] must not be missing; got {value!r}")
        return batch.values[node]

    def _given_values(self, given: Table | None, rows: int, settings: Mapping[str, Tensor]) -> dict[str, Tensor]:
        needed = [node for node in self.structure.given if node not in settings]
        given = None if given is None else known_table(given)
        self._check_used(given, needed)
        if not needed:
            return {}
        if given is None:
            raise ModelError(f"nodes {', '.join(map(repr, needed))} are Given: pass given=table with their values")
        schema = self._known_schema()
        batch = encode(given, Schema({node: schema[node] for node in needed}), hidden=(), partial=True)
        if batch.rows < rows:
            raise ModelError(f"given must have at least {rows} rows; got {batch.rows}")
        self.structure.check_given(batch.mask)
        return {node: batch.values[node][:, :rows] for node in needed}

    def _check_used(self, given: Table | None, needed: Sequence[str]) -> None:
        """Refuse values that a draw would ignore: of nodes that are not Given, or that ``do`` sets as well."""
        if given is None:
            return
        hint = "do={...} sets a node; posterior and impute draw given what rows show"
        if not needed:
            raise ModelError(f"given would not be used: no node of the model is Given (or do sets them all); {hint}")
        if not isinstance(given, pd.DataFrame | Mapping):
            return
        schema = self._known_schema()
        for node in self.graph.nodes:
            if node not in needed and any(name in given for name in (node, *schema[node].names)):
                raise ModelError(f"given would not be used for node {node!r}, which is not Given or set by do; {hint}")

    def posterior(
        self, data: Table | SequenceTable, *, draws: int = 100, seed: int = 0, partial: bool = False
    ) -> pd.DataFrame:
        """Draws of the hidden nodes given what each row shows, indexed by row and draw.

        Categories are drawn from their exact probabilities, numbers by weighted points; missing cells of a row are
        integrated out. Where exact sums would need too large tables they are approximate: an
        :class:`~otpdag.ApproximationWarning` tells it, and ``attrs["approximate"]`` of what is returned.

        Args:
            data: A table, or sequences, with a column for every observed node; cells may be missing.
            draws: Draws for each row.
            seed: Determines the draws.
            partial: Take columns that are absent for missing; otherwise they are refused.
        """
        if not self.graph.hidden:
            raise ModelError("the model has no hidden nodes; missing cells are filled in by impute")
        notes: list[str] = []
        _, index, values = self._drawn(data, draws, seed, partial, notes)
        flat = {node: values[node].reshape(-1, values[node].shape[-1]) for node in self.graph.hidden}
        table = decode(flat, self._known_schema())
        table.index = pd.MultiIndex.from_product([index, range(draws)], names=["row", "draw"])
        return with_notes(table, notes)

    def _drawn(
        self, data: Table | SequenceTable, draws: int, seed: int, partial: bool, notes: list[str]
    ) -> tuple[Batch, pd.Index, dict[str, Tensor]]:
        """Rows or steps, their index, and joint draws of all nodes given what they show; notes of what is not exact."""
        draws, seed = check_count("draws", draws), check_seed(seed)
        for saved in self._left_out_maps:
            raise ModelError(
                f"the backward map that was learned with this model is a {saved.kind}, whose code was not given when "
                f"it was loaded: otpdag.load(path, maps={{{saved.kind!r}: {saved.kind}}})"
            )
        if self.graph.is_dynamic:
            batch, index = self._encode_sequences(data, partial)
            generator = torch.Generator().manual_seed(seed)
            values = sequence_posterior.fill_in(self.structure, self._fitted_naturals(), batch, draws, generator)
            return batch.steps, index, values
        table = as_table(data)
        rows = self._encode_partial(table, partial)
        values = row_posterior.posterior_draws(self.fitted, rows, draws, seed, notes)
        return rows, row_index(table, rows.rows), values

    def _encode_sequences(self, data: Table | SequenceTable, partial: bool) -> tuple[SequenceBatch, pd.Index]:
        self._fitted_naturals()
        schema, sequences = self._known_schema(), as_sequences(data)
        self._check_columns(sequences.table, partial)
        if isinstance(sequences.table, pd.DataFrame):
            hidden = [name for node in self.graph.hidden for name in schema[node].names]
            sequences = replace_table(sequences, sequences.table.drop(columns=hidden, errors="ignore"))
        return encode_sequences(sequences, schema, hidden=self.graph.hidden, partial=True), sequences.index

    def decode(self, data: SequenceTable, *, partial: bool = False) -> pd.DataFrame:
        """The likeliest path of the hidden categories of sequences (Viterbi), one row for each step.

        Columns that are absent are refused, unless ``partial`` takes them for missing.
        """
        if not self.graph.is_dynamic:
            raise ModelError("decode is for graphs with lagged edges; for rows of a table use predict_proba")
        batch, index = self._encode_sequences(data, partial)
        paths, _ = sequence_posterior.decode_paths(self.structure, self._fitted_naturals(), batch)
        one_hot = {n: torch.eye(self.mechanisms[n].space.width)[paths[n]] for n in self.graph.hidden}
        table = decode(one_hot, self._known_schema())
        table.index = index
        return table

    def impute(
        self,
        data: Table | SequenceTable,
        *,
        seed: int = 0,
        draws: int = 100,
        random: bool = False,
        partial: bool = False,
    ) -> pd.DataFrame:
        """Fill missing cells: with the posterior mean of numbers and the likeliest category, or with one random draw.

        Args:
            data: A table with missing cells.
            seed: Determines the draws.
            draws: Draws that the mean is taken over.
            random: Fill with one draw instead, as multiple imputation asks for.
            partial: Make columns that are absent; otherwise they are refused.
        """
        notes: list[str] = []
        batch, index, values = self._drawn(data, 1 if random else draws, seed, partial, notes)
        filled: dict[str, Tensor] = {}
        for node in self.graph.observed:
            drawn = values[node][:, 0] if random else self.mechanisms[node].space.central(values[node], 1)
            filled[node] = torch.where(batch.mask[node][0], batch.values[node][0], drawn)
        table = decode(filled, self._known_schema())
        table.index = index
        return with_notes(table, notes)

    def score(
        self,
        data: Table | SequenceTable,
        *,
        kind: Literal["transport", "likelihood"] = "transport",
        seed: int = 0,
        partial: bool = False,
    ) -> float:
        """How far held-out rows are from the model.

        Args:
            data: Held-out rows. For ``"transport"`` missing cells are drawn from the model given the rest of their row;
                where a node has no density, they are missing for the model's samples as well.
            kind: ``"transport"``: the energy distance between standardised rows and as many model samples, smaller is
                better, comparable across model families. ``"likelihood"``: the mean log-likelihood of a row, larger is
                better.
            seed: Determines the model's samples.
            partial: Take columns that are absent for missing; otherwise they are refused.
        """
        if self.graph.is_dynamic:
            return self._score_sequences(data, kind, seed, partial)
        batch = self._encode_partial(as_table(data), partial)
        if kind == "likelihood":
            return float(row_posterior.log_likelihood(self.fitted, batch).mean())
        if kind != "transport":
            raise ModelError(f"kind must be 'transport' or 'likelihood'; got {kind!r}")
        return self._transport_score(batch, seed)

    def _score_sequences(self, data: SequenceTable, kind: str, seed: int, partial: bool) -> float:
        """Of one step: its mean log-likelihood, or the distance of pairs of neighbouring steps to the model's."""
        batch, _ = self._encode_sequences(data, partial)
        naturals = self._fitted_naturals()
        if kind == "likelihood":
            return float(sequence_posterior.log_likelihood(self.structure, naturals, batch, seed).sum()) / batch.rows
        if kind != "transport":
            raise ModelError(f"kind must be 'transport' or 'likelihood'; got {kind!r}")
        return sequence_posterior.transport_score(self.structure, naturals, batch, seed)

    def check(self, data: Table, *, seed: int = 0, partial: bool = False) -> pd.DataFrame:
        """Which node is wrong: transport residuals between data and model, one row for each node, the worst first.

        Columns: ``residual`` (energy distance between the node's recovered noise with its parents and fresh noise),
        ``expected`` (the same between two fresh samples) and ``excess`` (their difference in standard deviations).
        Columns of ``data`` that are absent are refused, unless ``partial`` takes them for missing.
        """
        self._refuse_sequences("check", "score")
        return residuals.node_residuals(self.fitted, self._encode_partial(as_table(data), partial), seed=seed)

    def _transport_score(self, batch: Batch, seed: int) -> float:
        generator = torch.Generator().manual_seed(check_seed(seed))
        given = {node: batch.values[node] for node in self.structure.given}
        drawn = ancestral(self.structure, self._fitted_naturals(), batch.rows, generator, do=given)
        shuffled = torch.randperm(batch.rows, generator=generator)
        completed = self._completed(batch, seed)
        left, right = [], []
        for node in self.graph.observed:
            seen = completed.mask[node].to(torch.float64)
            seen = seen if seen.shape[-1] == batch.values[node].shape[-1] else seen[..., :1]
            centre, spread = _standard(batch, node, self.mechanisms[node].space)
            left.append((completed.values[node] - centre) / spread * seen)
            right.append((drawn[node] - centre) / spread * seen[:, shuffled])
        most = 4000
        return float(Energy()(torch.cat(left, -1)[:, :most], torch.cat(right, -1)[:, :most])[0])

    def _completed(self, batch: Batch, seed: int) -> Batch:
        """Rows with their gaps drawn from the model, which may depend on what is seen; columns without a value stay so.

        Where a node has no density, rows stay as they are.
        """
        observed = [self.mechanisms[node] for node in self.graph.observed]
        if all(bool(mask.all()) for mask in batch.mask.values()) or not all(
            one.has_density or one.is_given for one in observed
        ):
            return batch
        drawn = row_posterior.posterior_draws(self.fitted, batch, 1, seed)
        values = {node: drawn[node].permute(1, 0, 2) for node in batch.values}
        mask = {node: seen.any(1, keepdim=True).expand_as(seen) for node, seen in batch.mask.items()}
        return Batch(values, mask, batch.weight)

    def _encode_partial(self, data: Table, partial: bool = False) -> Batch:
        self._fitted_naturals()
        schema = self._known_schema()
        self._check_columns(data, partial)
        if isinstance(data, pd.DataFrame):
            hidden = [name for node in self.graph.hidden for name in schema[node].names if name in data.columns]
            data = data.drop(columns=hidden)
        batch = encode(data, schema, hidden=self.graph.hidden, partial=True)
        self.structure.check_given(batch.mask)
        return batch

    def _check_columns(self, data: Table, partial: bool) -> None:
        """Refuse a table that lacks columns: filled in by the model itself, it would fit perfectly."""
        if not self.graph.observed:
            raise ModelError("the model has no observed nodes: no table shows anything of it")
        if partial or not isinstance(data, pd.DataFrame | Mapping):
            return
        schema, there, given = self._known_schema(), set(data), set(self.structure.given)
        shown = [node for node in self.graph.observed if node not in there and node not in given]
        absent = [name for node in shown for name in schema[node].names if name not in there]
        if absent:
            columns = [str(name) for name in data]
            hint = "; is it separated by semicolons?" if len(columns) == 1 and ";" in columns[0] else ""
            raise DataError(
                f"the table lacks the column{'s' * (len(absent) > 1)} {_listed(absent)}; it has {_listed(columns)}"
                f"{hint}. A column may be empty; partial=True takes absent ones for missing"
            )

    def _known_schema(self) -> Schema:
        if self._schema is None:
            raise _not_fitted("the model has seen no table yet: call otpdag.fit(model, data) first")
        return self._schema

    # -- files --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the model to one file (JSON and safetensors in a zip); :func:`load` reads it without running code.

        The file is put in place in one step: if that fails or is killed, what was there before is still there.
        """
        archive.write_archive(
            path,
            self.structure,
            archive.ModelState(
                self._schema, self._naturals, self._phi, self._maps, self._count_range, self._left_out_maps
            ),
        )


def load(
    path: str | Path,
    *,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    maps: Mapping[str, Callable[..., AmortizedMap]] | None = None,
) -> Model:
    """Read a model that :meth:`Model.save` wrote.

    Args:
        path: The file.
        functions: For nodes whose mechanism holds code (Deterministic, Decoder): the function or module again.
        maps: Backward maps of your own that the model was fitted with, by the name of their class: the class again,
            or a function with the arguments of :class:`otpdag.backward.AmortizedMap`. Without it such a map is left
            out, with a warning.

    Raises:
        OtpdagError: The file is damaged or holds something else; whatever it holds, no code of it is run.
    """
    structure, state = archive.read_archive(path, functions, maps)
    model = Model(structure.graph, structure.mechanisms)
    model.structure = structure
    model._schema, model._naturals = state.schema, state.naturals
    model._phi, model._maps, model._count_range = state.phi, state.maps, state.count_range
    model._left_out_maps = state.left_out
    return model


def _as_numbers(given: ArrayLike, node: str, name: str) -> Tensor:
    try:
        return torch.tensor(np.asarray(given, dtype=float))
    except (TypeError, ValueError):
        raise ModelError(f"parameter {name!r} of node {node!r} must be numbers; got {given!r:.100}") from None


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def _standard(batch: Batch, node: str, space: Space) -> tuple[Tensor, Tensor]:
    """Centre and spread of a column's seen cells."""
    value, seen = batch.values[node][0], batch.mask[node][0]
    if space.is_discrete:
        return torch.zeros(1, dtype=value.dtype), torch.ones(1, dtype=value.dtype)
    count = seen.sum(0).clamp(min=1)
    mean = (value * seen).sum(0) / count
    spread = (((value - mean) * seen) ** 2).sum(0).div(count).sqrt()
    return mean, torch.where(spread > 1e-12, spread, torch.ones_like(spread))


def _not_fitted(message: str) -> Exception:
    """The error of a model without parameters; its class imports scikit-learn, which a model need not."""
    from otpdag.errors import NotFittedError

    return NotFittedError(message)
