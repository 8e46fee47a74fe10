"""A model: a graph with a mechanism for each node and, once fitted, their parameters; and what it is asked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from otpdag.answers import checks, queries
from otpdag.answers.counterfactuals import changed_by, counterfactual_worlds, untold_counterfactuals
from otpdag.answers.identification import Identification, identify, identify_all
from otpdag.answers.standard_errors import Errors, free_parameters, likelihood_of_rows
from otpdag.answers.transport import Distance, Plan, transport_distance, transport_plan
from otpdag.backward import AmortizedMap
from otpdag.data import Batch, Label, Table, decode, known_table
from otpdag.data.columns import frame_of
from otpdag.data.sequences import SequenceBatch, SequenceTable
from otpdag.errors import (
    ApproximationWarning,
    ModelError,
    check_choice,
    check_count,
    check_mapping,
    check_seed,
    check_share,
)
from otpdag.likelihood import row_posterior, sequence_posterior
from otpdag.likelihood.grouped_rows import draws_of_groups, shared_by_rows
from otpdag.model import archive
from otpdag.model.base import ModelBase
from otpdag.problem import Problem
from otpdag.simulation import ancestral, ancestral_sequences, batch_of
from otpdag.structure import Naturals


class Model(ModelBase):
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

    # -- likelihood -----------------------------------------------------------------------------------------------

    @property
    def n_parameters(self) -> int:
        """How many numbers were free to be estimated: K - 1 of K probabilities, tied ones once, fixed ones not."""
        return free_parameters(self.structure)

    def log_likelihood(self, data: SequenceTable, *, per_row: bool = False, partial: bool = False) -> float | pd.Series:
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
        if self.graph.is_dynamic:
            index = pd.RangeIndex(len(values), name="sequence")
        if self.group:
            index = pd.Index(self._grouped(data)[self.group].unique(), name=self.group)
        return pd.Series(values.numpy(), index=index, name="log_likelihood") if per_row else float(values.sum())

    def _log_likelihoods(self, data: SequenceTable, partial: bool = False, seed: int = 0) -> tuple[Tensor, pd.Index]:
        """By row, or by sequence; and the index of rows or steps."""
        batch, index = self._read(data, partial)
        return checks.log_likelihoods(self.fitted, batch, seed), index

    def aic(self, data: SequenceTable) -> float:
        """Akaike's criterion, twice the free parameters less twice the log-likelihood; smaller is better."""
        return 2 * self.n_parameters - 2 * float(self._log_likelihoods(data)[0].sum())

    def bic(self, data: SequenceTable) -> float:
        """Schwarz's criterion, log of the rows (or steps) for each free parameter; smaller is better."""
        values, index = self._log_likelihoods(data)
        return float(np.log(len(index))) * self.n_parameters - 2 * float(values.sum())

    # -- prediction -----------------------------------------------------------------------------------------------

    def predict(self, data: SequenceTable, node: str, *, partial: bool = False) -> pd.Series | pd.DataFrame:
        """The mean of a number, or the likeliest category, given everything else that each row shows; exact.

        What ``data`` show of the node itself is not looked at, so that held-out rows can be passed as they are; its
        column may also be absent. Where rows share a group, those that show the node tell of those that lack it.

        Args:
            data: A table; of sequences, hidden categories can be predicted.
            node: Any node, hidden or observed.
            partial: Take other columns that are absent for missing; otherwise they are refused.

        Returns:
            One value for each row; a table for a vector. ``attrs["not identified"]`` says where other parameters fit
            the data as well and predict something else, of hidden nodes mostly.
        """
        if self._mechanism(node).space.is_discrete:
            probabilities = self.predict_proba(data, node, partial=partial)
            labels = pd.Series(list(probabilities.columns), dtype=object)[probabilities.to_numpy().argmax(1)]
            likeliest = labels.set_axis(probabilities.index).rename(node).infer_objects()
            likeliest.attrs |= probabilities.attrs
            return likeliest
        table = self._expected(data, node, partial, self._coordinates(node))
        return table.iloc[:, 0] if table.shape[1] == 1 else table

    def predict_proba(self, data: SequenceTable, node: str, *, partial: bool = False) -> pd.DataFrame:
        """Posterior probabilities of a category, one row for each row or step of ``data``.

        They are exact unless ``attrs["approximate"]`` and a warning say otherwise. Of an observed node, given all else
        that the row shows: its own cells are not looked at, and its column may be absent. Other columns that are
        absent are refused, unless ``partial`` takes them for missing.
        """
        if not self._mechanism(node).space.is_discrete:
            raise ModelError(f"node must be a category; {node!r} is not: use predict")
        if self.graph.is_dynamic:
            if node not in self.graph.hidden:
                raise ModelError(f"of sequences, node must be a hidden category, not {node!r}: use impute or forecast")
            steps, index = self._encode_sequences(data, partial)
            probabilities = sequence_posterior.state_probabilities(self.fitted, steps, node)
            return pd.DataFrame(probabilities.numpy(), columns=list(self.labels(node)), index=index)
        return self._expected(data, node, partial, self.labels(node))

    def _expected(self, data: SequenceTable, node: str, partial: bool, columns: Sequence[Label]) -> pd.DataFrame:
        """The mean of a number, or the probabilities of a category, of each row."""
        if self.graph.is_dynamic:
            raise ModelError("of sequences, hidden categories can be predicted; for numbers use posterior or forecast")
        if node in self.structure.given:
            raise ModelError(f"node {node!r} is Given: nothing is known of its distribution")
        blank = data if node in self.graph.hidden else self._without(data, self._known_schema()[node].names)
        notes: list[str] = []
        untold = ""
        if self.group:
            known = {*self._known_schema()[node].names} <= {*self._grouped(data).columns}
            groups, index, place = self._read_groups(data if known else blank, partial)
            expected = queries.believe_in_groups(self.fitted, groups, node, notes)[place]
        else:
            batch, index = self._read_rows(blank, partial)
            expected, untold = queries.believe(self.fitted, batch, node, notes).expected, self._not_told(batch, [node])
        table = with_notes(pd.DataFrame(expected.numpy(), columns=list(columns), index=index), notes)
        table.attrs["not identified"] = untold
        return table

    def _without(self, data: SequenceTable, names: Sequence[str]) -> pd.DataFrame:
        """The same table with empty cells in some columns."""
        schema = self._known_schema()
        frame = frame_of(data, {node: schema[node] for node in self.graph.observed})
        if self.group:
            frame = self._grouped(data)
        return frame.assign(**dict.fromkeys(names, np.nan))

    # -- queries --------------------------------------------------------------------------------------------------

    def query(
        self, node: str | Sequence[str], given: Mapping[str, Any] | None = None, do: Mapping[str, Any] | None = None
    ) -> pd.Series | pd.DataFrame:
        r"""The distribution of a node given some values and interventions, :math:`P(y \mid e, do(t))`; exact.

        Args:
            node: What is asked: a category, a number, or several categories, whose joint distribution is meant.
            given: Values that are seen, of hidden nodes too; one each, or one for each of several questions.
            do: Values that nodes are set to, whatever their parents say.

        Returns:
            Probabilities of categories, or mean and standard deviation of a number; for several questions one row each.
            ``attrs["not identified"]`` says where the graph does not identify the effect of what is set, and where
            other parameters fit the data as well and answer something else.

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
        seen, set_to = self._values(given, "given"), self._values(do, "do")
        for name in (*names, *seen):
            if name in set_to:
                raise ModelError(f"node {name!r} is set by do: it cannot be asked about or given as well")
            if name in names and name in seen:
                raise ModelError(f"node {name!r} is given: it cannot be asked about")
        known = {**seen, **set_to}
        fitted = queries.with_nodes_set(self.fitted, done=tuple(set_to), shown=tuple(seen))
        batch = batch_of(fitted.structure, known)
        fitted.structure.check_given(batch.mask)
        notes: list[str] = []
        answer: pd.Series | pd.DataFrame
        if len(names) > 1:
            joint = queries.joint_probabilities(fitted, names, known, notes).numpy()
            answer = pd.Series(joint, pd.MultiIndex.from_product([self.labels(name) for name in names], names=names))
        else:
            answer = self._shown_belief(names[0], queries.believe(fitted, batch, names[0], notes))
        _warn(notes)

        def about(own: row_posterior.Fitted, name: str) -> queries.Belief:
            return queries.believe(queries.with_nodes_set(own, tuple(set_to), tuple(seen)), batch, name, [])

        untold = queries.moved_answers(self.fitted, names, about)
        answer.attrs["not identified"] = self._not_identified(set_to, names, seen, untold)
        return answer

    def _not_identified(
        self, set_to: Collection[str], nodes: Iterable[str], seen: Collection[str], untold: Sequence[str]
    ) -> str:
        """What the graph says of effects that it does not identify, and what is said of answers that no data tell."""
        hidden = self.graph.hidden if set_to else ()
        by_graph = [identify_all(self.graph, tuple(set_to), one, tuple(seen)) for one in nodes if hidden]
        said = [str(one) for one in by_graph if not one]
        if untold:
            said.append(f"other parameters fit the data as well, and say something else of {', '.join(untold)}")
        return "; ".join(said)

    def _not_told(self, batch: Batch, nodes: Sequence[str]) -> str:
        """The same of nodes that rows are asked about, where nothing is set."""
        few = batch.first(20)
        untold = queries.moved_answers(self.fitted, nodes, lambda own, node: queries.believe(own, few, node, []))
        return self._not_identified((), (), (), untold)

    def _shown_belief(self, node: str, belief: queries.Belief) -> pd.Series | pd.DataFrame:
        if belief.variance is None:
            table = pd.DataFrame(belief.expected.numpy(), columns=list(self.labels(node)))
        else:
            names = self._coordinates(node)
            suffix = [""] if len(names) == 1 else [f" {name}" for name in names]
            numbers = torch.cat([belief.expected, belief.variance.sqrt()], -1)
            columns = [f"{what}{end}" for what in ("mean", "std") for end in suffix]
            table = pd.DataFrame(numbers.numpy(), columns=columns)
        table.columns.name = node
        return table.iloc[0].rename(None) if len(table) == 1 else table

    def most_probable(self, data: Table, *, partial: bool = False) -> pd.DataFrame:
        """The most probable explanation: the likeliest joint state of all categories that a row does not show.

        Found by max-product along the graph, exactly. Linear normal numbers are integrated out first and then take
        their mean given these categories. The column ``log_density`` is that of the row together with the categories.

        Args:
            data: A table; cells may be missing.
            partial: Take columns that are absent for missing; otherwise they are refused.
        """
        self._refuse_sequences("most_probable", "decode")
        batch, index = self._read_rows(data, partial)
        notes: list[str] = []
        values, log_density = queries.most_probable(self.fitted, batch, notes)
        explained = self._table(values, index).assign(log_density=log_density.numpy())
        explained.attrs["not identified"] = self._not_told(batch, self.graph.hidden)
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
        values: Sequence[Any] | pd.Series[Any] | Tensor | None = None,
        on: Mapping[str, Any] | None = None,
        path: queries.Path = "total",
        data: Table | None = None,
        level: float = 0.95,
        problem: Problem | None = None,
        errors: Errors = "information",
    ) -> queries.Effect:
        r"""The average effect of setting a node, :math:`E[y \mid do(t)] - E[y \mid do(t_0)]`; exact.

        Args:
            treatment: The node that is set.
            outcome: The node that is looked at; of a category, the probability of each level.
            values: What the treatment is set to; every value is compared with the first. By default zero and one, or
                all levels of a category.
            on: Values of other nodes that the effect is conditional on, none of them a descendant of the treatment.
            path: ``"direct"``: along the edge from treatment to outcome alone, all others read the first value;
                ``"indirect"``: along all other paths (natural effects: Pearl, 2001).
            data: The rows that the model was fitted to. If given, the effect has an interval, by the delta method from
                the observed information; :meth:`otpdag.FitResult.effect` has it without.
            level: Nominal coverage of the interval.
            problem: Instead of data, what the model was fitted by.
            errors: Where standard errors come from, ``"information"`` or ``"sandwich"``.

        >>> import otpdag as otp
        >>> from otpdag import mechanisms as m
        >>> graph = otp.Graph([("u", "t"), ("u", "y"), ("t", "y")], hidden=["u"])
        >>> model = otp.Model(graph, {"u": m.Normal(), "t": m.Normal(), "y": m.Normal()})
        >>> known = {"t": {"loc": 0, "weight": 1, "scale": 1}, "y": {"loc": 0, "weight": [1, 3], "scale": 1}}
        >>> float(model.set_params(known).effect("t", "y").difference.iloc[0])
        3.0
        """
        self._refuse_sequences("effect")
        self._mechanism(treatment), self._mechanism(outcome)
        if treatment == outcome:
            raise ModelError(f"treatment and outcome must differ; got {treatment!r} for both")
        if values is None:
            values = self.labels(treatment) if self.spaces[treatment].is_discrete else (0, 1)
        elif isinstance(values, pd.Series | Tensor):
            values = values.tolist()
        check_choice("path", path, get_args(queries.Path))
        cells = self.spaces[treatment].cells
        is_several = isinstance(values, Sequence | np.ndarray) and len(values) >= 2
        if not is_several or np.asarray(values, dtype=object).size != cells * len(values):
            raise ModelError(
                "values must be at least two: what is compared, and with what"
                f"{f' ({cells} cells each)' * (cells > 1)}; got {values!r:.100}"
            )
        check_share("level", level)
        below = {treatment, *self.graph.descendants(treatment)}
        for node in check_mapping("on", on, optional=True):
            if node in below or node == outcome:
                raise ModelError(f"on must not name the outcome or what the treatment changes; {node!r} is such a node")
        if data is not None:
            problem = likelihood_of_rows(self.fitted, self._read(data, False)[0])
        set_to = self._values({treatment: list(values)}, "values")[treatment]
        seen = self._values(on, "on")
        if any(value.shape[1] > 1 for value in seen.values()):
            raise ModelError("on takes one value of each node; ask for several one by one")
        names = (
            [str(label) for label in self.labels(outcome)]
            if self.spaces[outcome].is_discrete
            else self._coordinates(outcome)
        )
        return queries.effect_of(
            self.fitted,
            treatment,
            outcome,
            set_to=set_to,
            values=[value if cells == 1 else str(value) for value in values],
            seen=seen,
            path=path,
            names=names,
            problem=problem,
            errors=errors,
            level=level,
        )

    def counterfactual(
        self,
        data: Table,
        do: Mapping[str, Any | Callable[[pd.DataFrame], Any]],
        *,
        random: bool = False,
        draws: int = 100,
        seed: int = 0,
        partial: bool = False,
    ) -> pd.DataFrame:
        """What each row would have been, had some nodes been set: abduct, act, predict.

        The noise of every mechanism is recovered from the row, and makes new values where an ancestor changes: the
        mean of a number; of a category the likeliest one, and beside it the probability of each (``y=1``), whose mean
        over rows is that of the table. Sums over what a row leaves open (unknown categories, the noise of categories
        and counts) are exact. ``attrs["not identified"]`` is that of :meth:`query`.

        Args:
            data: A table of rows as they were.
            do: For each node that is set a value, one for each row, or a function of the table as it was (hidden and
                missing values drawn) that gives them: ``{"dose": lambda rows: rows["dose"] + 1}``.
            random: One draw for each row instead.
            draws: Draws where there is no sum: of unknown numbers, of noise with several coordinates.
            seed: Determines them.
            partial: Take columns that are absent for missing; otherwise they are refused.

        >>> import otpdag as otp
        >>> from otpdag import mechanisms as m
        >>> model = otp.Model(otp.Graph([("t", "y")]), {"t": m.Bernoulli(), "y": m.Bernoulli()})
        >>> _ = model.set_params({"t": {"probs": [0.5, 0.5]}, "y": {"probs": [[0.7, 0.3], [0.4, 0.6]]}})
        >>> model.counterfactual(pd.DataFrame({"t": [0], "y": [0]}), {"t": 1}).round(4)
           t  y     y=0     y=1
        0  1  0  0.5714  0.4286
        """
        self._refuse_sequences("counterfactual")
        draws, seed = check_count("draws", draws), check_seed(seed)
        drawn = None
        if self.group:
            groups, index, place = self._read_groups(data, partial)
            batch = groups.steps.take(place)

            def drawn(at: row_posterior.Fitted) -> Mapping[str, Tensor]:
                """Values of all nodes given the rows of each group, in the table's order."""
                return {node: own[place] for node, own in draws_of_groups(at, groups, draws, seed).items()}

        else:
            batch, index = self._read_rows(data, partial)
        asked = check_mapping("do", do)
        settings = {node: self._setting(node, value, batch.rows, index) for node, value in asked.items()}
        worlds = counterfactual_worlds(self.fitted, batch, settings, draws=draws, seed=seed, whole=random, drawn=drawn)
        if random:
            worlds = worlds.sampled(batch.rows, torch.Generator().manual_seed(seed + 2))
        expected = {node: worlds.expected(node, batch.rows) for node in self.graph.nodes}
        table = self._table(expected, index)
        for node in () if random else changed_by(self.graph, settings):
            is_discrete, column = self.spaces[node].is_discrete, self._known_schema()[node]
            names = [f"{node}={label}" for label in self.labels(node)] if is_discrete else list(column.names)
            table[names] = expected[node].numpy()  # the mean of a count is no count
        seen = [node for node in changed_by(self.graph, settings) if node in self.graph.observed]
        untold = untold_counterfactuals(self.fitted, batch, settings, seen, draws=draws, seed=seed, drawn=drawn)
        table.attrs["not identified"] = self._not_identified(settings, seen, (), untold)
        return table

    # -- sequences ------------------------------------------------------------------------------------------------

    def forecast(
        self,
        data: SequenceTable,
        steps: int,
        level: float = 0.95,
        *,
        draws: int = 1000,
        seed: int = 0,
        given: Table | None = None,
        parameters: Sequence[Naturals] = (),
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
            parameters: Sets of natural parameters, each of which has an equal share of the draws; the model's own if
                left out.

        Returns:
            One row for each sequence and step (the first step after the end is 1), and for a number the columns ``x``,
            ``x.lower`` and ``x.upper``; for a category the likeliest one, and its probability as ``x.probability``.
        """
        if not self.graph.is_dynamic:
            raise ModelError("forecast is for graphs with lagged edges; this one has none: use predict")
        steps, draws, seed = check_count("steps", steps), check_count("draws", draws, 2), check_seed(seed)
        check_share("level", level)
        batch, _ = self._encode_sequences(data, False)
        known = self._given_values(given, steps * len(batch.lengths), self.structure.given, exactly=True)
        fitted = [replace(self.fitted, naturals=own) for own in parameters or [self.fitted.naturals]]
        each = -(-draws // len(fitted))
        draw = partial(queries.future_draws, batch=batch, steps=steps, draws=each, given=known)
        parts = [draw(own, seed=seed + number) for number, own in enumerate(fitted)]
        drawn = {node: torch.cat([part[node] for part in parts], 2) for node in parts[0]}
        return queries.forecast_table(drawn, self._known_schema(), self.graph.observed, level)

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
            rows: Number of rows; of sequences, if the graph has lagged edges; of groups, if rows of one share nodes.
            seed: Determines the draw.
            do: Interventions: nodes set to a value (or one value for each row), whatever their parents say; or a
                function of the table as far as it is drawn, in which the node is as it would have been:
                ``{"dose": lambda rows: rows["dose"] + 1}``. Of sequences, values only.
            given: Values of the nodes that are Given, at least as many rows (or steps of all sequences). Values of
                other nodes are refused: ``do`` sets them, and ``posterior`` and ``impute`` draw given what rows show.
            length: Steps of each sequence, if the graph has lagged edges; the table then has the columns ``sequence``
                and ``time`` as well. Rows of each group (one if left out), whose numbers the table then has.
        """
        naturals, schema = self._fitted_naturals(), self._known_schema()
        rows, seed = check_count("rows", rows), check_seed(seed)
        self._check_cells(rows * (1 if length is None else check_count("length", length)))
        if self.graph.is_dynamic or (length is not None and not self.group):
            return self._sample_sequences(rows, length, seed, do, given)
        groups, rows = rows, rows * (length or 1)
        asked = check_mapping("do", do, optional=True)
        settings: dict[str, Any] = {node: self._setting(node, value, rows) for node, value in asked.items()}
        settings |= self._given_for(settings, given, rows)
        generator = torch.Generator().manual_seed(seed)
        if self.group:
            lengths = torch.full((groups,), length or 1)
            settings = {**shared_by_rows(self.structure, naturals, lengths, generator), **settings}
        values = ancestral(self.structure, naturals, rows, generator, do=settings)
        table = decode({node: values[node][:1] for node in self.graph.nodes}, schema)
        if self.group:
            table.insert(0, self.group, np.repeat(np.arange(groups), length or 1))
        return table

    def _sample_sequences(
        self, sequences: int, length: int | None, seed: int, do: Mapping[str, Any] | None, given: Table | None
    ) -> pd.DataFrame:
        if not self.graph.is_dynamic:
            raise ModelError("length is for graphs with lagged edges; this one has none")
        if length is None:
            raise ModelError("length must be at least 1 for a graph with lagged edges; got None")
        steps = sequences * length
        asked = check_mapping("do", do, optional=True)
        settings = {node: self._column(node, value, steps, "do") for node, value in asked.items()}
        settings |= self._given_for(settings, given, steps)
        shaped = {node: value.reshape(1, sequences, length, -1) for node, value in settings.items()}
        generator = torch.Generator().manual_seed(seed)
        drawn = ancestral_sequences(self.structure, self._fitted_naturals(), sequences, length, generator, do=shaped)
        table = decode({node: value.flatten(1, 2) for node, value in drawn.items()}, self._known_schema())
        table.insert(0, "sequence", np.repeat(np.arange(sequences), length))
        table.insert(1, "time", np.tile(np.arange(length), sequences))
        return table

    def _given_for(self, settings: Mapping[str, Any], given: Table | None, rows: int) -> dict[str, Tensor]:
        """Values of the Given nodes that no intervention sets; values that a draw would ignore are refused."""
        needed = [node for node in self.structure.given if node not in settings]
        given = None if given is None else known_table(given)
        hint = "do={...} sets a node; posterior and impute draw given what rows show"
        if given is not None and not needed:
            raise ModelError(f"given would not be used: no node of the model is Given (or do sets them all); {hint}")
        shown = given if isinstance(given, pd.DataFrame | Mapping) else ()
        for node in self.graph.nodes:
            if node not in needed and any(name in shown for name in (node, *self._known_schema()[node].names)):
                raise ModelError(f"given would not be used for node {node!r}, which is not Given or set by do; {hint}")
        return self._given_values(given, rows, needed)

    def posterior(self, data: SequenceTable, *, draws: int = 100, seed: int = 0, partial: bool = False) -> pd.DataFrame:
        """Draws of the hidden nodes given what each row shows, indexed by row and draw.

        Categories are drawn from their exact probabilities, numbers by weighted points; missing cells of a row are
        integrated out.

        Args:
            data: A table, or sequences, with a column for every observed node; cells may be missing.
            draws: Draws for each row.
            seed: Determines the draws.
            partial: Take columns that are absent for missing; otherwise they are refused.
        """
        if not self.graph.hidden:
            raise ModelError("the model has no hidden nodes; missing cells are filled in by impute")
        batch, index, values = self._drawn(data, draws, seed, partial)
        flat = {node: values[node].reshape(-1, values[node].shape[-1]) for node in self.graph.hidden}
        rows = pd.MultiIndex.from_product([index, range(draws)], names=["row", "draw"])
        drawn = self._table(flat, rows)
        drawn.attrs["not identified"] = self._not_told(batch, self.graph.hidden)
        return drawn

    def _drawn(
        self, data: SequenceTable, draws: int, seed: int, partial: bool
    ) -> tuple[Batch, pd.Index, dict[str, Tensor]]:
        """Rows or steps, their index, and joint draws of all nodes given what they show."""
        draws, seed = check_count("draws", draws), check_seed(seed)
        if self.group:
            groups, index, place = self._read_groups(data, partial)
            drawn = draws_of_groups(self.fitted, groups, draws, seed)
            return groups.steps.take(place), index, {node: value[place] for node, value in drawn.items()}
        batch, index = self._read(data, partial)
        self._check_cells(draws * len(index))
        if isinstance(batch, SequenceBatch):
            generator = torch.Generator().manual_seed(seed)
            values = sequence_posterior.fill_in(self.fitted, batch, draws, generator)
            return batch.steps, index, values
        return batch, index, row_posterior.posterior_draws(self.fitted, batch, draws, seed)

    def _check_cells(self, rows: int) -> None:
        """Refuse a table of draws that memory may not hold, before it is made."""
        cells = rows * len(self.graph.nodes)
        if cells > 2**31:
            raise ModelError(f"a sample has at most 2^31 cells, which memory may hold; got {cells}: draw fewer")

    def decode(self, data: SequenceTable, *, partial: bool = False) -> pd.DataFrame:
        """The likeliest path of the hidden categories of sequences (Viterbi), one row for each step.

        Columns that are absent are refused, unless ``partial`` takes them for missing.
        """
        if not self.graph.is_dynamic:
            raise ModelError("decode is for graphs with lagged edges; for rows of a table use predict_proba")
        batch, index = self._encode_sequences(data, partial)
        paths, _ = sequence_posterior.decode_paths(self.fitted, batch)
        one_hot = {n: torch.eye(self.mechanisms[n].space.width)[paths[n]] for n in self.graph.hidden}
        return self._table(one_hot, index)

    def impute(
        self, data: SequenceTable, *, seed: int = 0, draws: int = 100, random: bool = False, partial: bool = False
    ) -> pd.DataFrame:
        """Fill missing cells: with the posterior mean of numbers and the likeliest category, or with one random draw.

        Args:
            data: A table with missing cells.
            seed: Determines the draws.
            draws: Draws that the mean is taken over.
            random: Fill with one draw instead, as multiple imputation asks for.
            partial: Make columns that are absent; otherwise they are refused.
        """
        batch, index, values = self._drawn(data, 1 if random else draws, seed, partial)
        filled: dict[str, Tensor] = {}
        for node in self.graph.observed:
            space = self.mechanisms[node].space
            drawn = values[node][:, 0] if random else space.central(values[node], 1)
            filled[node] = space.filled(batch.values[node][0], batch.mask[node][0], drawn)
        return self._table(filled, index)

    def score(
        self,
        data: SequenceTable,
        *,
        kind: Literal["transport", "likelihood"] | None = None,
        seed: int = 0,
        partial: bool = False,
    ) -> float:
        """The mean log-likelihood of held-out rows, with ``kind="likelihood"``: higher is better, as of estimators.

        Until 1.0 it is :meth:`distance` if ``kind`` is left out or ``"transport"``, with a warning.

        Args:
            data: Held-out rows.
            kind: ``"likelihood"``, which will be all that there is.
            seed: Determines draws, where there are any.
            partial: Take columns that are absent for missing; otherwise they are refused.
        """
        check_choice("kind", kind, (None, "transport", "likelihood"))
        if kind == "likelihood":
            values, index = self._log_likelihoods(data, partial, seed)
            return float(values.sum()) / len(index)
        text = "score is the log-likelihood from 1.0 on: say kind='likelihood', or model.distance(data) instead"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return self.distance(data, seed=seed, partial=partial)

    def distance(self, data: SequenceTable, *, seed: int = 0, partial: bool = False) -> Distance:
        """How many standard deviations rows are from the model, by optimal transport: lower is better.

        It is a number that compares models of different families, and tells what chance alone would give (``chance``,
        ``upper``) and the distances of all ``nodes`` in their own units; ``describe()`` says it in a sentence.

        Args:
            data: Held-out rows, of which at most 4,000 random ones are looked at. Missing cells are drawn from the
                model given the rest of their row; where a node has no density, they are missing for the model as well.
            seed: Determines the model's samples.
            partial: Take columns that are absent for missing; otherwise they are refused.
        """
        if self.group:
            raise ModelError(f"distance compares rows one by one; those of a {self.group} share hidden nodes")
        return transport_distance(self.fitted, self._read(data, partial)[0], check_seed(seed))

    def plan(self, data: Table, *, seed: int = 0, partial: bool = False, rows: int = 1000) -> Plan:
        """Which sample of the model each row comes from at least cost, and what would have to move for it.

        Args:
            data: Rows, of which at most ``rows`` random ones are matched with as many samples, one to one and exactly.
            seed: Determines both.
            partial: Take columns that are absent for missing; otherwise they are refused.
            rows: Time grows with their cube.
        """
        self._refuse_sequences("plan", "distance")
        batch, index = self._read_rows(data, partial)
        return transport_plan(self.fitted, batch, index, self._table, check_seed(seed), check_count("rows", rows))

    def check(self, data: Table, *, seed: int = 0, partial: bool = False) -> pd.DataFrame:
        """What of the model the rows contradict: a test of each node, and of each pair that the graph keeps apart.

        Missing cells and hidden nodes are averaged over what each row says of them, and it is allowed for that
        parameters were estimated, from these rows or others.

        Args:
            data: Rows, of which 10,000 random ones are looked at if there are more.
            seed: Determines these, and draws of what rows do not show; complete rows draw nothing.
            partial: Take columns that are absent for missing; otherwise they are refused.

        Returns:
            A table indexed by node, the worst first: ``other`` (empty, or the node that it should not depend on given
            its parents), ``finding`` (what is wrong, in words), ``p``, and ``adjusted``, the same adjusted for the
            number of tests: below 0.01 for any row in one right model of a hundred.
        """
        self._refuse_sequences("check", "score")
        return checks.node_checks(self.fitted, self._read(data, partial)[0], seed=check_seed(seed))

    def _table(self, values: Mapping[str, Tensor], index: pd.Index) -> pd.DataFrame:
        """Values (N, width) of nodes as columns."""
        return decode(values, self._known_schema()).set_axis(index)

    def _refuse_sequences(self, name: str, instead: str = "forecast") -> None:
        if self.graph.is_dynamic:
            raise ModelError(f"{name} is for rows of a table; the graph has lagged edges: use {instead}")


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
    model.structure, model._state = structure, state
    return model


def with_notes(table: pd.DataFrame, notes: Sequence[str]) -> pd.DataFrame:
    """Say in a table, and by a warning, what of it is approximate."""
    table.attrs["approximate"] = "; ".join(notes)
    _warn(notes)
    return table


def _warn(notes: Sequence[str]) -> None:
    for note in dict.fromkeys(notes):
        warnings.warn(note, ApproximationWarning, stacklevel=4)
