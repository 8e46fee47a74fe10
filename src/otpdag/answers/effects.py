"""Effects of interventions, with intervals by the delta method."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import special  # scipy.stats takes as long to import as pandas
from torch import Tensor

from otpdag.answers.identification import Identification
from otpdag.answers.information import delta_errors, differences, pack_raw
from otpdag.answers.queries import Question, one_batch, with_nodes_set
from otpdag.likelihood.row_posterior import Fitted
from otpdag.structure import Naturals, columns_of, unpack


class EffectQuestion:
    """Outcomes after a treatment is set to each of some values, as a function of the parameters."""

    def __init__(
        self, fitted: Fitted, treatment: str, outcome: str, set_to: Mapping[str, Tensor], seen: Mapping[str, Tensor]
    ) -> None:
        cut = with_nodes_set(fitted, done=(treatment,), shown=tuple(seen))
        rows = next(iter(set_to.values())).shape[1]
        shown = {node: value.expand(1, rows, -1) for node, value in {**seen, **set_to}.items()}
        self.fitted, self.treatment, self.outcome = fitted, treatment, outcome
        self.question = Question(cut, one_batch(shown, cut.structure), outcome)
        graph = cut.structure.graph
        self.relevant = {above for node in (outcome, *seen) for above in (node, *graph.ancestors(node))} - {treatment}

    def means(self, naturals: Naturals) -> Tensor:
        """Means, or probabilities, of the outcome for each value of the treatment (values, width)."""
        return self.question.at({**naturals, self.treatment: {}}).expected

    def change(self, naturals: Naturals) -> Tensor:
        """Their differences to the first value (1, differences)."""
        means = self.means(naturals)
        return (means[1:] - means[:1]).reshape(1, -1)

    def slopes(self) -> Tensor:
        """Derivatives of all differences in the raw parameters (differences, P)."""
        structure, point = self.fitted.structure, pack_raw(self.fitted)
        shapes = {key: parameter.shape for key, parameter in structure.parameters().items()}
        # what lies neither above the outcome nor above what is conditioned on has no say
        free = columns_of(shapes, {key for node in self.relevant for key in structure.keys[node].values()})

        def change(points: Tensor) -> Tensor:
            return self.change(structure.naturals(unpack(points, shapes)))

        slopes = torch.zeros(change(point).shape[1], point.shape[1], dtype=torch.float64)
        if bool(free.any()):
            slopes[:, free] = differences(change, point, torch.eye(len(free)).to(point)[free], at_once=1).T
        return slopes


@dataclass(frozen=True)
class Effect:
    """The effect of one node on another.

    Attributes:
        treatment: The node that is set.
        outcome: The node that is looked at.
        table: One row for each value of the treatment but the first, and each coordinate or level of the outcome:
            ``effect`` is the difference to the first value, with ``std_error``, ``lower`` and ``upper``.
        means: Means, or probabilities, of the outcome for each value of the treatment.
        identification: Whether what is observed determines the effect, whatever the mechanisms.
    """

    treatment: str
    outcome: str
    table: pd.DataFrame
    means: pd.DataFrame
    identification: Identification

    @classmethod
    def of(
        cls,
        question: EffectQuestion,
        names: Sequence[str],
        values: Sequence[Any],
        identification: Identification,
        *,
        covariance: Tensor | None,
        level: float,
    ) -> Effect:
        """Ask at the estimate and, for the delta method, around it."""
        naturals = question.fitted.naturals
        means, change = question.means(naturals), question.change(naturals)[0]
        unknown = torch.full_like(change, torch.nan)
        error = unknown if covariance is None else delta_errors(question.slopes(), covariance)
        reach = float(special.ndtri((1 + level) / 2)) * error
        index = pd.MultiIndex.from_product(
            [list(values[1:]), list(names)], names=[question.treatment, question.outcome]
        )
        columns = {"effect": change, "std_error": error, "lower": change - reach, "upper": change + reach}
        table = pd.DataFrame({name: column.numpy() for name, column in columns.items()}, index=index)
        shown = pd.DataFrame(means.numpy(), index=pd.Index(list(values), name=question.treatment), columns=list(names))
        return cls(question.treatment, question.outcome, table, shown, identification)

    @property
    def difference(self) -> pd.Series:
        """The effects alone."""
        return self.table["effect"]

    def __str__(self) -> str:
        shown = self.table if np.isfinite(self.table["std_error"]).any() else self.table[["effect"]]
        head = f"effect of {self.treatment} on {self.outcome}, against {self.means.index[0]}"
        return f"{head}\n{shown.to_string(float_format=lambda x: f'{x:.4g}')}\n{self.identification}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = html.escape(f"effect of {self.treatment} on {self.outcome}, against {self.means.index[0]}")
        return f"<p>{head}</p>{self.table.to_html()}<p>{html.escape(str(self.identification))}</p>"
