"""What a fitted model is asked: likelihoods, predictions, queries, effects, counterfactuals and forecasts."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from otpdag.answers import effects, forecasts, queries
from otpdag.answers.identification import Identification, identify
from otpdag.answers.information import free_parameters, table_information
from otpdag.answers.queries import counterfactual_draws
from otpdag.arguments import check_count, check_level, check_mapping, check_seed
from otpdag.data import Batch, Label, Schema, Table, decode, encode, known_table
from otpdag.data.reading import to_numpy
from otpdag.data.sequences import SequenceBatch, Sequences, SequenceTable, as_sequences
from otpdag.errors import ApproximationWarning, DataError, ModelError
from otpdag.graph import Graph
from otpdag.likelihood import row_posterior, sequence_posterior
from otpdag.structure import Naturals, Structure

MOST_JOINT = 4096
"""Joint states of several nodes that one query lists."""


class Answering(ABC):
    """The questions; a model says what it is and reads tables."""

    structure: Structure

    @property
    @abstractmethod
    def graph(self) -> Graph:
        """The graph."""

    @property
    @abstractmethod
    def fitted(self) -> row_posterior.Fitted:
        """What inference needs."""

    @abstractmethod
    def labels(self, node: str) -> tuple[Label, ...]:
        """What the categories of a node are called."""

    @abstractmethod
    def _known_schema(self) -> Schema: ...

    @abstractmethod
    def _encode_partial(self, data: Table, partial: bool = False) -> Batch: ...

    @abstractmethod
    def _encode_sequences(self, data: Table | SequenceTable, partial: bool) -> tuple[SequenceBatch, pd.Index]: ...

    # -- likelihood -----------------------------------------------------------------------------------------------

    @property
    def n_parameters(self) -> int:
        """How many numbers were free to be estimated: K - 1 of K probabilities, tied ones once, fixed ones not."""
        return free_parameters(self.structure)

    def log_likelihood(
        self, data: Table | SequenceTable, *, per_row: bool = False, partial: bool = False
    ) -> float | pd.Series:
        """The log-likelihood of what rows (or sequences) show, hidden and missing values integrated out.

        Args:
            data: A table or sequences; cells may be missing.
            per_row: One number for each row, or each sequence, instead of their sum.
            partial: Take columns that are absent for missing; otherwise they are refused.

        >>> import otpdag as otp
        >>> from otpdag import mechanisms as m
        >>> model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal(loc=0.0, scale=1.0)}).set_params({})
        >>> round(model.log_likelihood({"x": [0.0, 0.0]}), 4)
        -1.8379
        """
        values, index = self._log_likelihoods(data, partial)
        return pd.Series(values.numpy(), index=index, name="log_likelihood") if per_row else float(values.sum())

    def _log_likelihoods(self, data: Table | SequenceTable, partial: bool) -> tuple[Tensor, pd.Index]:
        """By row, or by sequence."""
        if self.graph.is_dynamic:
            steps, _ = self._encode_sequences(data, partial)
            by_sequence = sequence_posterior.log_likelihood(self.structure, self.fitted.naturals, steps)
            return by_sequence, pd.RangeIndex(len(by_sequence), name="sequence")
        table = as_table(data)
        batch = self._encode_partial(table, partial)
        return row_posterior.log_likelihood(self.fitted, batch), row_index(table, batch.rows)

    def aic(self, data: Table | SequenceTable) -> float:
        """Akaike's criterion, twice the free parameters less twice the log-likelihood; smaller is better."""
        return 2 * self.n_parameters - 2 * float(self._log_likelihoods(data, False)[0].sum())

    def bic(self, data: Table | SequenceTable) -> float:
        """Schwarz's criterion, log of the rows (or steps) for each free parameter; smaller is better."""
        rows = len(as_sequences(data).index) if self.graph.is_dynamic else _rows(as_table(data))
        return float(np.log(rows)) * self.n_parameters - 2 * float(self._log_likelihoods(data, False)[0].sum())

    # -- prediction -----------------------------------------------------------------------------------------------

    def predict(self, data: Table | SequenceTable, node: str, *, partial: bool = False) -> pd.Series | pd.DataFrame:
        """The mean of a number, or the likeliest category, given everything else that each row shows; exact.

        What ``data`` show of the node itself is not looked at, so that held-out rows can be passed as they are; its
        column may also be absent.

        Args:
            data: A table; of sequences, hidden categories can be predicted.
            node: Any node, hidden or observed.
            partial: Take other columns that are absent for missing; otherwise they are refused.

        Returns:
            One value for each row; a table for a vector.
        """
        mechanism = self._mechanism(node)
        if mechanism.space.is_discrete:
            probabilities = self.predict_proba(data, node, partial=partial)
            best = probabilities.to_numpy().argmax(1)
            labels = np.empty(probabilities.shape[1], dtype=object)
            labels[:] = list(probabilities.columns)
            return pd.Series(labels[best], index=probabilities.index, name=node).infer_objects()
        notes: list[str] = []
        belief, index = self._belief(data, node, partial, notes)
        names = self._known_schema()[node].names
        table = with_notes(pd.DataFrame(belief.expected.numpy(), columns=list(names), index=index), notes)
        return table[names[0]] if len(names) == 1 else table

    def predict_proba(self, data: Table | SequenceTable, node: str, *, partial: bool = False) -> pd.DataFrame:
        """Posterior probabilities of a category, one row for each row or step of ``data``.

        They are exact unless ``attrs["approximate"]`` and a warning say otherwise. Of an observed node, given all else
        that the row shows: its own cells are not looked at, and its column may be absent. Other columns that are
        absent are refused, unless ``partial`` takes them for missing.
        """
        if not self._mechanism(node).space.is_discrete:
            raise ModelError(f"node must be a category; {node!r} is not: use predict")
        if self.graph.is_dynamic:
            if node not in self.graph.hidden:
                raise ModelError(
                    f"of sequences, node must be a hidden category; {node!r} is not: use impute or forecast"
                )
            steps, index = self._encode_sequences(data, partial)
            naturals = self.fitted.naturals
            probabilities = sequence_posterior.state_probabilities(self.structure, naturals, steps, node)
            return pd.DataFrame(probabilities.numpy(), columns=list(self.labels(node)), index=index)
        notes: list[str] = []
        belief, index = self._belief(data, node, partial, notes)
        return with_notes(pd.DataFrame(belief.expected.numpy(), columns=list(self.labels(node)), index=index), notes)

    def _belief(
        self, data: Table | SequenceTable, node: str, partial: bool, notes: list[str]
    ) -> tuple[queries.Belief, pd.Index]:
        if self.graph.is_dynamic:
            raise ModelError("of sequences, hidden categories can be predicted; for numbers use posterior or forecast")
        table = as_table(data)
        if node in self.structure.given:
            raise ModelError(f"node {node!r} is Given: nothing is known of its distribution")
        own = self._known_schema()[node].names
        blank = table if node in self.graph.hidden else self._without(table, own, partial)
        batch = self._encode_partial(blank, partial)
        return queries.believe(self.fitted, batch, node, notes), row_index(table, batch.rows)

    def _without(self, data: Table, names: Sequence[str], partial: bool) -> Table:
        """The same table with empty cells in some columns."""
        if isinstance(data, pd.DataFrame):
            return data.assign(**dict.fromkeys(names, np.nan))
        rows = self._encode_partial(data, partial).rows  # what is no table is refused
        if isinstance(data, Mapping):
            return {**dict(data), **{name: np.full(rows, np.nan) for name in names}}
        schema = self._known_schema()
        order = [name for node in schema.nodes for name in schema[node].names]
        array = np.array(to_numpy(data), dtype=float).reshape(rows, len(order))
        array[:, [order.index(name) for name in names]] = np.nan
        return array

    # -- queries --------------------------------------------------------------------------------------------------

    def query(
        self,
        node: str | Sequence[str],
        given: Mapping[str, Any] | None = None,
        do: Mapping[str, Any] | None = None,
    ) -> pd.Series | pd.DataFrame:
        r"""The distribution of a node given some values and interventions, :math:`P(y \mid e, do(t))`; exact.

        Args:
            node: What is asked: a category, a number, or several categories, whose joint distribution is meant.
            given: Values that are seen, of hidden nodes too; one each, or one for each of several questions.
            do: Values that nodes are set to, whatever their parents say.

        Returns:
            Probabilities of categories, or mean and standard deviation of a number; for several questions one row each.

        >>> import otpdag as otp
        >>> from otpdag import mechanisms as m
        >>> model = otp.Model(otp.Graph([("rain", "wet")]), {"rain": m.Bernoulli(), "wet": m.Bernoulli()})
        >>> _ = model.set_params({"rain": {"probs": [0.8, 0.2]}, "wet": {"probs": [[0.9, 0.1], [0.0, 1.0]]}})
        >>> model.query("rain", given={"wet": 1}).round(4).tolist()
        [0.2857, 0.7143]
        >>> model.query("rain", do={"wet": 1}).round(4).tolist()
        [0.8, 0.2]
        """
        self._refuse_sequences("query")
        names = [node] if isinstance(node, str) else list(node) if isinstance(node, Sequence) else []
        if not names:
            raise ModelError(f"node must name a node, or several; got {node!r:.100}")
        for name in names:
            self._mechanism(name)
        seen, set_to = self._values(given or {}, "given"), self._values(do or {}, "do")
        self._check_question(names, seen, set_to)
        fitted = queries.with_nodes_set(self.fitted, done=tuple(set_to), shown=tuple(seen))
        fitted.structure.check_given(queries.one_batch({**seen, **set_to}, fitted.structure).mask)
        if len(names) > 1:
            return self._joint_query(fitted, names, {**seen, **set_to})
        batch = queries.one_batch({**seen, **set_to}, fitted.structure)
        notes: list[str] = []
        belief = queries.believe(fitted, batch, names[0], notes)
        _warn(notes)
        return self._shown(names[0], belief)

    def _check_question(self, names: Sequence[str], seen: Mapping[str, Tensor], done: Mapping[str, Tensor]) -> None:
        for name in (*names, *seen):
            if name in done:
                raise ModelError(f"node {name!r} is set by do: it cannot be asked about or given as well")
        for name in names:
            if name in seen:
                raise ModelError(f"node {name!r} is given: it cannot be asked about")

    def _shown(self, node: str, belief: queries.Belief) -> pd.Series | pd.DataFrame:
        if belief.probabilities is not None:
            table = pd.DataFrame(belief.probabilities.numpy(), columns=list(self.labels(node)))
        elif belief.mean is not None and belief.variance is not None:
            names = self._known_schema()[node].names
            suffix = [""] if len(names) == 1 else [f" {name}" for name in names]
            spread = belief.variance.sqrt()
            parts = {f"mean{end}": belief.mean[:, i] for i, end in enumerate(suffix)}
            parts |= {f"std{end}": spread[:, i] for i, end in enumerate(suffix)}
            table = pd.DataFrame({name: value.numpy() for name, value in parts.items()})
        table.columns.name = node
        return table.iloc[0].rename(None) if len(table) == 1 else table

    def _joint_query(self, fitted: row_posterior.Fitted, names: list[str], known: Mapping[str, Tensor]) -> pd.Series:
        """The chain rule, :math:`P(a, b) = P(a) P(b | a)`: each factor for all states of those before it at once."""
        sizes = [fitted.structure.mechanisms[name].space.width for name in names]
        if not all(fitted.structure.mechanisms[name].space.is_discrete for name in names):
            raise ModelError("a query of several nodes needs categories; ask for numbers one by one")
        if np.prod(sizes) > MOST_JOINT or any(value.shape[1] > 1 for value in known.values()):
            raise ModelError(f"a query of several nodes lists at most {MOST_JOINT} joint states, of one question")
        total = torch.ones(1, dtype=torch.float64)
        notes: list[str] = []
        states: dict[str, Tensor] = {}
        for name, size in zip(names, sizes, strict=True):
            inner = queries.with_nodes_set(fitted, shown=tuple(states))
            possible = total > 0  # what is impossible has no distribution given it
            chosen = {n: value[:, possible] for n, value in states.items()}
            own = {n: value.expand(1, int(possible.sum()), -1) for n, value in known.items()}
            likely = queries.believe(inner, queries.one_batch({**own, **chosen}, inner.structure), name, notes).expected
            share = torch.zeros(len(total), size, dtype=torch.float64)
            share[possible] = likely.expand(int(possible.sum()), size)
            states = {n: value.repeat_interleave(size, 1) for n, value in states.items()}
            states[name] = torch.eye(size, dtype=torch.float64).repeat(len(total), 1).unsqueeze(0)
            total = (total.unsqueeze(-1) * share).flatten()
        _warn(notes)
        index = pd.MultiIndex.from_product([list(self.labels(name)) for name in names], names=names)
        return pd.Series(total.numpy(), index=index)

    def most_probable(self, data: Table, *, partial: bool = False) -> pd.DataFrame:
        """The most probable explanation: the likeliest joint state of all categories that a row does not show.

        Found by max-product along the graph, exactly. Linear normal numbers are integrated out first and then take
        their mean given these categories. The column ``log_density`` is that of the row together with the categories.

        Args:
            data: A table; cells may be missing.
            partial: Take columns that are absent for missing; otherwise they are refused.
        """
        self._refuse_sequences("most_probable", "decode")
        table = as_table(data)
        batch = self._encode_partial(table, partial)
        notes: list[str] = []
        values, log_density = queries.most_probable(self.fitted, batch, notes)
        explained = decode(values, self._known_schema())
        explained["log_density"] = log_density.numpy()
        explained.index = row_index(table, batch.rows)
        return with_notes(explained, notes)

    # -- effects --------------------------------------------------------------------------------------------------

    def identified(self, treatment: str, outcome: str) -> Identification:
        """Whether the effect of one node on another follows from what is observed, whatever the mechanisms are.

        By the graph alone (Shpitser and Pearl, 2006); ``str`` of the answer says it in words. An effect that is not
        identified so may still be identified by the mechanisms that the model assumes.
        """
        return identify(self.graph, treatment, outcome)

    def effect(
        self,
        treatment: str,
        outcome: str,
        *,
        values: Sequence[Any] = (0, 1),
        on: Mapping[str, Any] | None = None,
        data: Table | None = None,
        level: float = 0.9,
    ) -> effects.Effect:
        r"""The average effect of setting a node, :math:`E[y \mid do(t)] - E[y \mid do(t_0)]`; exact.

        Args:
            treatment: The node that is set.
            outcome: The node that is looked at; of a category, the probability of each level.
            values: What the treatment is set to; every value is compared with the first.
            on: Values of other nodes that the effect is conditional on, none of them a descendant of the treatment.
            data: The rows that the model was fitted to. If given, the effect has an interval, by the delta method from
                the observed information; :meth:`otpdag.FitResult.effect` has it without.
            level: Nominal coverage of the interval.

        >>> import otpdag as otp
        >>> from otpdag import mechanisms as m
        >>> graph = otp.Graph([("u", "t"), ("u", "y"), ("t", "y")], hidden=["u"])
        >>> model = otp.Model(graph, {"u": m.Normal(), "t": m.Normal(), "y": m.Normal()})
        >>> known = {"t": {"loc": 0, "weight": 1, "scale": 1}, "y": {"loc": 0, "weight": [1, 3], "scale": 1}}
        >>> float(model.set_params(known).effect("t", "y").difference.iloc[0])
        3.0
        """
        information = None if data is None else table_information(self.fitted, self._encode_partial(as_table(data)))
        covariance = None if information is None else information.covariance()
        return self.effect_with(covariance, treatment, outcome, values=values, on=on, level=level)

    def effect_with(
        self,
        covariance: Tensor | None,
        treatment: str,
        outcome: str,
        *,
        values: Sequence[Any] = (0, 1),
        on: Mapping[str, Any] | None = None,
        level: float = 0.9,
    ) -> effects.Effect:
        """:meth:`effect` with a covariance of the raw parameters (P, P) that is known already."""
        self._refuse_sequences("effect")
        self._mechanism(treatment), self._mechanism(outcome)
        if treatment == outcome:
            raise ModelError(f"treatment and outcome must differ; got {treatment!r} for both")
        if not isinstance(values, Sequence | np.ndarray) or len(values) < 2:
            raise ModelError(f"values must be at least two: what is compared, and with what; got {values!r:.100}")
        check_level(level)
        below = {treatment, *self.graph.descendants(treatment)}
        for node in check_mapping("on", on or {}):
            if node in below or node == outcome:
                raise ModelError(f"on must not name the outcome or what the treatment changes; {node!r} is such a node")
        set_to = self._values({treatment: list(values)}, "values")
        seen = self._values(on or {}, "on")
        if any(value.shape[1] > 1 for value in seen.values()):
            raise ModelError("on takes one value of each node; ask for several one by one")
        names = (
            [str(label) for label in self.labels(outcome)]
            if self.structure.mechanisms[outcome].space.is_discrete
            else list(self._known_schema()[outcome].names)
        )
        question = effects.EffectQuestion(self.fitted, treatment, outcome, set_to, seen)
        known = identify(self.graph, treatment, outcome)
        return effects.Effect.of(question, names, list(values), known, covariance=covariance, level=level)

    def counterfactual(
        self,
        data: Table,
        do: Mapping[str, Any | Callable[[pd.DataFrame], Any]],
        *,
        draws: int = 100,
        seed: int = 0,
        partial: bool = False,
    ) -> pd.DataFrame:
        """What each row would have been, had some nodes been set: abduct, act, predict.

        The noise of every mechanism is recovered from the row, and makes new values where an ancestor changes. Where
        noise is not determined (hidden nodes, missing cells, discrete values), the mean over draws of it, or the
        likeliest category.

        Args:
            data: A table of rows as they were.
            do: For each node that is set a value, one for each row, or a function of the table as it was (hidden and
                missing values drawn) that gives them: ``{"dose": lambda rows: rows["dose"] + 1}``.
            draws: Draws of what a row leaves open.
            seed: Determines them.
            partial: Take columns that are absent for missing; otherwise they are refused.
        """
        self._refuse_sequences("counterfactual")
        draws, seed = check_count("draws", draws), check_seed(seed)
        table = as_table(data)
        batch = self._encode_partial(table, partial)
        actions = {
            node: self._action(node, value, batch.rows, draws) for node, value in check_mapping("do", do).items()
        }
        after = counterfactual_draws(self.fitted, batch, actions, draws, seed)
        spaces = {node: mechanism.space for node, mechanism in self.structure.mechanisms.items()}
        central = {node: spaces[node].central(value, 1) for node, value in after.items()}
        result = decode({node: central[node] for node in self.graph.nodes}, self._known_schema())
        result.index = row_index(table, batch.rows)
        return result

    def _action(self, node: str, value: Any, rows: int, draws: int) -> Any:
        self._mechanism(node)
        if not callable(value):
            return self._column(node, value, rows, "do")[0].unsqueeze(1)

        def act(before: Mapping[str, Tensor]) -> Tensor:
            flat = {name: drawn.flatten(0, 1) for name, drawn in before.items()}
            made = self._column(node, value(decode(flat, self._known_schema())), rows * draws, "do")
            return made.reshape(rows, draws, -1)

        return act

    # -- sequences ------------------------------------------------------------------------------------------------

    def forecast(
        self,
        data: Table | SequenceTable,
        steps: int,
        level: float = 0.9,
        *,
        draws: int = 1000,
        seed: int = 0,
        given: Table | None = None,
    ) -> pd.DataFrame:
        """What comes after each sequence: mean (or likeliest category) and interval of every observed node.

        The states at the end follow from the whole sequence; futures are drawn from there on. The parameters are taken
        for known: :meth:`otpdag.FitResult.forecast` also counts how sure they are.

        Args:
            data: Sequences as a fit takes them.
            steps: How many steps to look ahead.
            level: Share of futures that an interval holds.
            draws: Futures that are drawn.
            seed: Determines them.
            given: Values of the nodes that are Given, ``steps`` rows for each sequence.

        Returns:
            One row for each sequence and step (the first step after the end is 1), and for a number the columns ``x``,
            ``x.lower`` and ``x.upper``; for a category the likeliest one, and its probability as ``x.probability``.
        """
        return self.forecast_with([self.fitted.naturals], data, steps, level=level, draws=draws, seed=seed, given=given)

    def forecast_with(
        self,
        parameters: Sequence[Naturals],
        data: Table | SequenceTable,
        steps: int,
        *,
        level: float = 0.9,
        draws: int = 1000,
        seed: int = 0,
        given: Table | None = None,
    ) -> pd.DataFrame:
        """:meth:`forecast` with futures of several sets of natural parameters, an equal share of the draws of each."""
        if not self.graph.is_dynamic:
            raise ModelError("forecast is for graphs with lagged edges; this one has none: use predict")
        if steps < 1 or draws < 2:
            raise ModelError(f"steps must be at least 1 and draws at least 2; got {steps} and {draws}")
        if not 0 < level < 1:
            raise ModelError(f"level must lie between 0 and 1; got {level}")
        batch, _ = self._encode_sequences(data, False)
        known = self._given_steps(given, steps * len(batch.lengths))
        each = -(-draws // len(parameters))
        parts = [
            forecasts.future_draws(self.structure, naturals, batch, steps, draws=each, seed=seed + number, given=known)
            for number, naturals in enumerate(parameters)
        ]
        drawn = {node: torch.cat([part[node] for part in parts], 2) for node in parts[0]}
        return forecasts.forecast_table(drawn, self._known_schema(), self.graph.observed, level)

    def _given_steps(self, given: Table | None, rows: int) -> dict[str, Tensor]:
        needed = self.structure.given
        if not needed:
            return {}
        if given is None:
            raise ModelError(f"nodes {', '.join(map(repr, needed))} are Given: pass given=table with their values")
        schema = self._known_schema()
        batch = encode(given, Schema({node: schema[node] for node in needed}), hidden=(), partial=True)
        if batch.rows != rows:
            raise ModelError(f"given must have {rows} rows, one for each step of each sequence; got {batch.rows}")
        self.structure.check_given(batch.mask)
        return {node: batch.values[node] for node in needed}

    # -- reading --------------------------------------------------------------------------------------------------

    def _mechanism(self, node: str) -> Any:
        if node not in self.graph.nodes:
            raise ModelError(f"there is no node {node!r}; the model has {', '.join(map(repr, self.graph.nodes))}")
        return self.structure.mechanisms[node]

    def _refuse_sequences(self, name: str, instead: str = "forecast") -> None:
        if self.graph.is_dynamic:
            raise ModelError(f"{name} is for rows of a table; the graph has lagged edges: use {instead}")

    def _values(self, values: Mapping[str, Any], argument: str) -> dict[str, Tensor]:
        """Values (1, N, width) of nodes; N is one, or the number of questions."""
        cells = {}
        for node, value in check_mapping(argument, values).items():
            self._mechanism(node)
            size = self._known_schema()[node].space.cells
            cells[node] = max(1, np.asarray(value, dtype=object).size // size)
        rows = max(cells.values(), default=1)
        return {node: self._column(node, value, rows, argument) for node, value in values.items()}

    def _column(self, node: str, value: Any, rows: int, argument: str) -> Tensor:
        """Values (1, rows, width) from one value, or from one for each row."""
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


def as_table(data: Table | SequenceTable) -> Table:
    """Refuse sequences where rows are asked for; tables of other libraries become frames."""
    data = known_table(data)
    if isinstance(data, Sequences | list | tuple):
        raise DataError("data are sequences, but the graph has no lagged edge")
    return data


def row_index(data: Any, rows: int) -> pd.Index:
    """The index of a frame; the numbers of the rows of anything else."""
    return data.index if isinstance(data, pd.DataFrame) else pd.RangeIndex(rows)


def with_notes(table: pd.DataFrame, notes: Sequence[str]) -> pd.DataFrame:
    """Say in a table, and by a warning, what of it is approximate."""
    table.attrs["approximate"] = "; ".join(notes)
    _warn(notes)
    return table


def _warn(notes: Sequence[str]) -> None:
    for note in dict.fromkeys(notes):
        warnings.warn(note, ApproximationWarning, stacklevel=4)


def _rows(data: Any) -> int:
    return len(next(iter(data.values()))) if isinstance(data, Mapping) else len(data)
