"""The summary of a fit: a table of parameters below the facts, as statisticians print it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from otpdag.answers.checks import log_likelihoods
from otpdag.answers.linear_normal import FitIndices
from otpdag.answers.notes import ENDLESS, ROTATED, UNDETERMINED
from otpdag.answers.standard_errors import free_parameters
from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.errors import listed, printable
from otpdag.likelihood.partitioned_problem import PartitionedProblem
from otpdag.likelihood.row_posterior import Fitted
from otpdag.mechanisms.parameters import PseudoCounts, Ridge
from otpdag.problem import Problem
from otpdag.simulation import ancestral
from otpdag.tables import number


@dataclass(frozen=True)
class Summary:
    """What a fit found and how sure it is of it.

    Attributes:
        facts: Method, status, rows, missing cells, log-likelihood, AIC, BIC and the like.
        table: One row for each parameter: ``node``, ``parameter``, ``at``, ``estimate``, ``std_error``, ``lower``,
            ``upper``, ``note``; of a linear normal model also the ``standardised`` slopes.
        level: Nominal coverage of the intervals.
        warnings: What the reader should know before using any of it.
        fit_indices: How well a linear normal model reproduces means and covariances; None for other models.
    """

    facts: Mapping[str, str | int | float]
    table: pd.DataFrame
    level: float
    warnings: tuple[str, ...] = ()
    fit_indices: FitIndices | None = None

    def to_frame(self) -> pd.DataFrame:
        """The parameters as a table, indexed by their names."""
        names = pd.Index(parameter_names(self.table), name="parameter")
        return self.table.drop(columns=["node", "parameter", "at"]).set_index(names)

    def to_text(self, most: int = 200) -> str:
        """All of it as text, so many parameters at most; :meth:`to_frame` has all of them."""
        lines = [line.rstrip() for line in self._shown().head(most).to_string().splitlines()]
        width = max(len(line) for line in lines)
        facts = [f"{name}: {_fact(value)}" for name, value in self.all_facts().items()]
        if len(self.table) > most:
            lines.append(f"... and {len(self.table) - most} more: to_frame() has all of them")
        rule, thin = "=" * width, "-" * width
        body = [rule, *_two_columns(facts, width), rule, lines[0], thin, *lines[1:], rule]
        notes = [f"[{place}] {text}" for place, text in enumerate(self.warnings, 1)]
        return "\n".join(printable(line, keep="") for line in [*body, *notes])

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        facts = pd.DataFrame([_fact(value) for value in self.all_facts().values()], index=list(self.all_facts()))
        notes = "".join(f"<li>{html.escape(printable(text, keep=''))}</li>" for text in self.warnings)
        return f"<div>{facts.to_html(header=False)}{self._shown().to_html()}<ol>{notes}</ol></div>"

    def _shown(self) -> pd.DataFrame:
        """The parameters as strings, numbers to the right and notes to the left, under the heads of a printed table."""
        frame, tail = self.to_frame(), (1 - self.level) / 2
        spreads = {name: [0.01] * len(frame) if name == "standardised" else frame["std_error"] for name in frame}
        numbers = frame.drop(columns="note").items()
        shown = pd.DataFrame(
            {name: [*map(number, column, spreads[name])] for name, column in numbers}, index=frame.index
        )
        shown["note"] = frame["note"].str.ljust(max(map(len, frame["note"]), default=0))
        heads = {"std_error": "std err", "lower": f"[{tail:.3g}", "upper": f"{1 - tail:.3g}]", "note": ""}
        shown.index = pd.Index([printable(str(name), keep="") for name in frame.index])
        return shown.rename(columns=heads).rename_axis(columns="parameter")

    def all_facts(self) -> dict[str, str | int | float]:
        """The facts, with how well a linear normal model fits."""
        return {**self.facts, **({} if self.fit_indices is None else self.fit_indices.facts())}


def parameter_names(table: pd.DataFrame) -> list[str]:
    """What single numbers are called: node, parameter and where, ``y.loc[z=1]``."""
    lines = zip(table["node"], table["parameter"], table["at"], strict=True)
    return [f"{node}.{name}" + (f"[{at}]" if at else "") for node, name, at in lines]


def _fact(value: str | float) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    return f"{value:.1f}" if abs(value) >= 10_000 else f"{value:.6g}"


def _two_columns(facts: Sequence[str], width: int) -> list[str]:
    half = -(-len(facts) // 2)
    left = max((len(fact) for fact in facts[:half]), default=0) + 3
    left = max(left, width // 2)
    right = [*facts[half:], ""][:half]
    return [f"{one.ljust(left)}{two}".rstrip() for one, two in zip(facts[:half], right, strict=True)]


def data_facts(fitted: Fitted, problem: Problem | None) -> dict[str, str | int | float]:
    """Rows, gaps, and the likelihood of what a model was fitted to, with the criteria that follow from it.

    Of a table in parts these are sums over the parts, read once more where they are.
    """
    size, mechanisms = free_parameters(fitted.structure), fitted.structure.mechanisms.values()
    facts: dict[str, str | int | float] = {"parameters": size}
    dense = all(one.has_density or one.is_given for one in mechanisms)
    if isinstance(problem, PartitionedProblem):
        told = list(problem.problems.each(_totals, fitted, dense))
    else:
        told = [_totals(problem, 0, fitted, dense)]
    known = [one for one in told if one is not None]
    if len(known) < len(told):
        return facts
    weight, cells, missing, log_likelihood, sequences = map(sum, zip(*known, strict=True))
    if sequences:
        facts["groups" if fitted.structure.shared else "sequences"] = int(sequences)
    facts["missing cells"] = f"{round(missing):,} ({missing / max(cells, 1):.1%})"
    if dense:
        facts["log-likelihood"] = log_likelihood
        facts["AIC"] = 2 * size - 2 * log_likelihood
        facts["BIC"] = float(np.log(weight)) * size - 2 * log_likelihood
    return facts


def told_priors(fitted: Fitted) -> list[str]:
    """What draws parameters besides the rows."""
    told = []
    for node, mechanism in fitted.structure.mechanisms.items():
        for name, parameter in mechanism.declared().items():
            if isinstance(parameter.setting, Ridge):
                is_layer = name.startswith("network.")  # of which the prior is in the units of its column
                penalty = getattr(mechanism, "network_prior", 0.0) if is_layer else parameter.setting.penalty
                size = "by REML" if penalty is None else f"{penalty:g}"
                told.append(f"ridge({size}) on {node}.{'network' if is_layer else name}")
            elif isinstance(parameter.setting, PseudoCounts):
                count = parameter.setting.penalty
                size = f"({count:g})" if isinstance(count, float) else f": {count.sum(-1).max():.3g} rows"
                told.append(f"pseudo-counts{size} on {node}.{name}")
            if parameter.bent is not None and not isinstance(parameter.setting, Ridge):
                told.append(f"smoothness of {node}")
    return list(dict.fromkeys(told))


def explained(fitted: Fitted, *, rows: int = 20_000, seed: int = 0) -> dict[str, float]:
    """The share of the variance of each number that its parents explain, by the model's own rows.

    Nodes without parents have none, nor have categories and nodes whose mean is not known in closed form.
    """
    structure, shares = fitted.structure, {}
    if structure.graph.is_dynamic or structure.given:
        return {}
    values = ancestral(structure, fitted.naturals, rows, torch.Generator().manual_seed(seed))
    for node, mechanism in structure.mechanisms.items():
        parents = structure.parents(node, values)
        if parents and not mechanism.space.is_discrete and mechanism.space.width == 1:
            mean = mechanism.mean(fitted.naturals[node], parents)
            if mean is not None:
                shares[node] = min(1.0, float(mean.var() / values[node].var()))
    return shares


def _totals(problem: Problem | None, number: int, fitted: Fitted, dense: bool) -> tuple[float, ...] | None:
    """Weight, cells, missing ones, log-likelihood and sequences of one part, or of all; None if it holds no rows."""
    batch = getattr(problem, "batch", None)
    if not isinstance(batch, Batch | SequenceBatch):
        return None
    steps, sequences = (batch.steps, len(batch.lengths)) if isinstance(batch, SequenceBatch) else (batch, 0)
    weight = steps.weight[0]
    seen = sum(float((weight * mask[0].sum(-1)).sum()) for mask in steps.mask.values())
    cells = sum(float(weight.sum()) * mask.shape[-1] for mask in steps.mask.values())
    own = weight[batch.starts] if isinstance(batch, SequenceBatch) else weight
    log_likelihood = float((own * log_likelihoods(fitted, batch).detach()).sum()) if dense else 0.0
    return float(weight.sum()), cells, cells - seen, log_likelihood, sequences


def summarise(
    facts: Mapping[str, str | int | float],
    table: pd.DataFrame,
    level: float,
    warnings: Sequence[str],
    fit_indices: FitIndices | None = None,
    most: int = 6,
) -> Summary:
    """Put a summary together, with a warning for every kind of parameter that has no standard error.

    A warning names so many parameters.
    """
    names = np.array(parameter_names(table), dtype=object)
    said = list(warnings)
    causes = [one[one.index(":") :] for one in said if ROTATED in one]
    causes += [""] * any(ENDLESS in one for one in said)  # which has been said
    causes.append(": moved together, they leave the likelihood as it is; fix or tie some")
    for note, text, advice in (
        ("not identified", UNDETERMINED, causes[0]),
        ("at the edge", "at the edge of the range, where no standard error holds (an interval has one end):", ""),
    ):
        which = list(names[(table["note"] == note).to_numpy()])
        if which:
            # what the fit noted of the same parameters is said by the one line that names all of them
            said = [other for other in said if not other.startswith(text)]
            said.append(f"{text} {listed(which, most=most, show=str)}{advice}")
    return Summary(facts, table, level, tuple(said), fit_indices)
