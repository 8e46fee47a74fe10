"""The result of a fit: how it ended, how it got there, what each restart reached; and its bootstrap.

A bootstrap repeats the fit on resampled rows or sequences, warm-started, many draws at once. A resample is a vector of
counts of the units, so all draws share one data set and differ in their weights only; the replica axis holds the draws
of a chunk, and joblib spreads the chunks over processes.
"""

from __future__ import annotations

import html
import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from otpdag.answers.linear_normal import (
    FitIndices,
    Rotated,
    Rotation,
    fit_indices,
    implied_moments,
    rotated_loadings,
    standardised,
)
from otpdag.answers.notes import point_of
from otpdag.answers.queries import Effect, Path
from otpdag.answers.standard_errors import (
    Errors,
    described,
    information_at,
    likely_points,
    standard_errors,
    term_curve,
    without_errors,
)
from otpdag.answers.summary import Summary, data_facts, summarise, told_priors
from otpdag.answers.transport import Plan
from otpdag.data import Batch, Table
from otpdag.engine.method import Method
from otpdag.engine.monitor import Stage
from otpdag.engine.optimiser import Deterministic
from otpdag.engine.search import Restart, Searcher, SearchSchedule, search
from otpdag.errors import (
    ConvergenceWarning,
    ModelError,
    check_choice,
    check_count,
    check_seed,
    check_share,
    listed,
    told_as,
)
from otpdag.matching.both_sides import both_sides
from otpdag.numerics import Array, Ints, at_work
from otpdag.problem import Problem, Units, loss_and_gradient, units_of
from otpdag.progress import shown_while_running

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from otpdag.model import Model


# sets of parameters from which a forecast draws futures: the variance between them is known to a fifth
PARAMETER_DRAWS = 50

# how far what no data tell is moved, in raw units of order one, to see whether so many futures follow
MOVE, FUTURES_COMPARED = 0.3, 200

PICTURES = ("classes", "effects", "estimates", "fit", "hidden", "plan", "term")


@dataclass(frozen=True)
class Status:
    """How a fit ended, and what to do about it.

    Attributes:
        converged: Whether the optimiser found an end.
        reason: Why it stopped.
        advice: What to do about it.
        approximate: Whether the loss is approximate where it could be exact, with a larger budget.
        failed: Whether there is no estimate: the loss or a parameter is not a finite number.
        interrupted: Whether Ctrl-C ended it; the model then holds the best so far.

    >>> str(Status(True, "the loss stopped changing"))
    'converged: the loss stopped changing'
    >>> str(Status(True, "the loss stopped changing", approximate=True))
    'converged, approximate: the loss stopped changing'
    """

    converged: bool
    reason: str
    advice: str = ""
    approximate: bool = False
    failed: bool = False
    interrupted: bool = False

    @property
    def name(self) -> str:
        """``"converged"``, ``"failed"``, ``"interrupted"`` or ``"not converged"``."""
        if self.converged or self.failed:
            return "converged" if self.converged else "failed"
        return "interrupted" if self.interrupted else "not converged"

    def __str__(self) -> str:
        head = self.name + (", approximate" if self.approximate else "")
        return f"{head}: {self.reason}" + (f" ({self.advice})" if self.advice else "")

    def __bool__(self) -> bool:
        return self.converged


@dataclass(frozen=True)
class FitResult:
    """What :func:`otpdag.fit` returns; the model it was given holds the estimates.

    Attributes:
        model: The fitted model.
        method: The method that ran, with all its settings.
        status: Whether it converged, why it stopped, and advice.
        loss: The objective at the end.
        history: One record for each step of the starts that were finished, the likeliest to be kept last: loss and its
            terms, and seconds.
        restarts: Every start with its loss; one is marked kept.
        reached: How many of them came to the best log-likelihood, to half a unit, where all ran to their ends: one is
            chance, and there may be better optima. None where they did not.
        rows_used: Rows of the table, none of which was dropped.
        seconds: Wall-clock time.
        seed: The seed that determines the run.
        stages: The stages of the search, each with the losses of all its starts step by step.
        row_weights: How much of each row a robust fit used; None if it was not robust.
        notes: What the user should know, for instance how many rows a robust fit left out, or what is approximate.
    """

    model: Model
    method: Method
    status: Status
    loss: float
    history: tuple[dict[str, float], ...]
    restarts: tuple[Restart, ...]
    rows_used: int
    seconds: float
    seed: int
    reached: int | None = None
    notes: tuple[str, ...] = field(default=())
    stages: tuple[Stage, ...] = field(default=(), repr=False)
    row_weights: Array | None = field(default=None, repr=False)
    problem: Problem | None = field(default=None, repr=False)

    @property
    def route(self) -> str:
        """Which way rows were summed: ``"moments"``, ``"states"`` or ``"graph"``; empty where there was no choice."""
        return str(getattr(self.problem, "route", ""))

    @property
    def unmatched(self) -> Ints:
        """Numbers of the rows that the model need not explain, as :attr:`dropped` has them."""
        return self.dropped

    @property
    def dropped(self) -> Ints:
        """Numbers of the rows that a robust fit left out (weight below a half), counted from zero."""
        if self.row_weights is None:
            return np.zeros(0, dtype=np.int64)
        return np.flatnonzero(self.row_weights < 0.5)

    def intervals(self, *, draws: int = 200, level: float = 0.95, seed: int = 0, jobs: int = 1) -> pd.DataFrame:
        """Bootstrap intervals of the parameters: the fit repeated on resampled rows, from the estimate on.

        Of sequences, whole ones are resampled; fewer than thirty are cut in pieces first.

        Args:
            draws: Number of resampled fits.
            level: Nominal coverage.
            seed: Determines the resamples.
            jobs: Processes that share the work; -1 takes all cores.

        Returns:
            A table indexed by node, parameter and index, with estimate, lower and upper end, standard error, and what
            the index means (``at``); its ``attrs["stuck"]`` says how many draws did not settle, ``attrs["level"]`` what
            the level was.
        """
        table, stuck = self._bootstrapped(draws, level, seed, jobs)
        if stuck:
            text = f"{stuck} of {draws} draws of the bootstrap did not settle: the intervals may be wide"
            warnings.warn(text, ConvergenceWarning, stacklevel=2)
        table = table[table.pop("note") != "fixed"].set_index(["node", "parameter", "index"])
        table.attrs |= {"stuck": stuck, "level": level}
        return table[["estimate", "lower", "upper", "std_error", "at"]]

    def bootstrap(self, *, draws: int = 200, seed: int = 0, jobs: int = 1) -> dict[tuple[str, str], Array]:
        """Draws of the parameters: the fit repeated on resampled rows, as :meth:`intervals` sums them up.

        What no data tell stays about where the fit ended, in all draws: only :meth:`intervals` says of what.

        Args:
            draws: Number of resampled fits.
            seed: Determines the resamples.
            jobs: Processes that share the work; -1 takes all cores.

        Returns:
            For node and parameter an array (draws, ...) in the shape of ``model.params()``; NaN where a fit failed.
        """
        problem, points, _ = self._resampled("a bootstrap needs", draws, seed, jobs)
        shown = described(self.model.fitted, problem, points)
        return {key: value.detach().numpy() for key, value in shown.items()}

    def _resampled(self, who: str, draws: int, seed: int, jobs: int) -> tuple[Units, Tensor, Tensor]:
        """The problem in units, where fits of resampled units ended (draws, P), and which of them settled (draws,)."""
        problem = units_of(self._deterministic(who)).in_units()
        check_count("draws", draws, 10)
        check_count("jobs", 1 if isinstance(jobs, int) and jobs == -1 else jobs)
        check_seed(seed)
        if problem.rows < 2:
            raise ModelError("a bootstrap resamples rows, and there is one: a single path has no intervals")
        point = point_of(self.model.fitted, problem.shapes)
        problem = problem.laid_out_for(point)  # pieces of sequences have no points yet
        return problem, *bootstrap_draws(problem, point, draws, seed, jobs)

    def _bootstrapped(self, draws: int, level: float, seed: int, jobs: int = 1) -> tuple[pd.DataFrame, int]:
        """Percentile intervals in the table of a summary, with places in parameters; and how many draws were stuck."""
        check_share("level", level)
        problem, points, settled = self._resampled("intervals need", draws, seed, jobs)
        shown, table = described(self.model.fitted, problem, points), without_errors(self.model.fitted)
        table["index"] = [index for value in shown.values() for index in np.ndindex(value.shape[1:])]
        numbers = torch.cat([value.reshape(draws, -1) for value in shown.values()], 1).detach().numpy()
        table["lower"], table["upper"] = np.nanquantile(numbers, [(1 - level) / 2, (1 + level) / 2], axis=0)
        table["std_error"] = np.nanstd(numbers, axis=0, ddof=1)
        notes, is_fixed = self._by_curvature(level, "information")[0]["note"], table["note"] == "fixed"
        # a resample that starts where the fit ended leaves what no data tell where it is
        untold = ~is_fixed & (table["lower"].isna() | (notes == "not identified"))
        table.loc[untold, "note"] = "not identified"
        table.loc[is_fixed | untold, ["lower", "upper", "std_error"]] = np.nan
        return table, int((~settled).sum())

    def _deterministic(self, who: str) -> Problem:
        if self.problem is None or self.method.optimiser.is_stochastic:
            raise ModelError(f"{who} a deterministic method; {self.method.name!r} draws noise at every step")
        return self.problem

    def standard_errors(self, *, level: float = 0.95, errors: Errors = "information") -> pd.DataFrame:
        """Standard errors and intervals of all parameters from the curvature of the likelihood, in one table.

        Args:
            level: Nominal coverage of the intervals.
            errors: ``"information"``: the inverse of the observed information; ``"sandwich"``: also valid where the
                model is wrong; ``"bootstrap"``: as :meth:`intervals`, with its default number of draws.
        """
        return self.summary(level=level, errors=errors).table

    def summary(
        self, *, level: float = 0.95, errors: Errors | Literal["none"] = "information", draws: int = 200, seed: int = 0
    ) -> Summary:
        """Parameters with standard errors and intervals, likelihood, AIC, BIC, rows, gaps and warnings.

        ``print`` shows it as text, a notebook as HTML; ``to_frame()`` is a DataFrame.

        Args:
            level: Nominal coverage of the intervals.
            errors: Where standard errors come from: ``"information"`` (the observed information), ``"sandwich"``
                (also valid where the model is wrong) or ``"bootstrap"``; ``"none"`` leaves them out.
            draws: Draws of the bootstrap.
            seed: Determines them.
        """
        check_choice("errors", errors, (*get_args(Errors), "none"))
        check_share("level", level)
        notes = [*self.notes] if self.status.converged else [str(self.status), *self.notes]
        facts: dict[str, str | int | float] = {
            "method": self.method.name,
            "status": "converged" if self.status.converged else "not converged",
            "rows": self.rows_used,
        }
        priors = told_priors(self.model.fitted) if self.method.counts_priors else []
        facts |= data_facts(self.model.fitted, self.problem)
        facts |= {"priors": listed(priors, show=str)} if priors else {}
        if "log-likelihood" not in facts:
            notes.append(f"no likelihood, AIC and BIC: {self._without_likelihood()}")
        if errors == "bootstrap":
            table, stuck = self._bootstrapped(draws, level, seed)
            table, kind = table.drop(columns="index"), f"bootstrap, {draws} draws"
            said = [f"{stuck} of {draws} draws of the bootstrap did not settle"] if stuck else []
        elif errors == "none":
            table, said, kind = without_errors(self.model.fitted), [], "none"
        else:
            table, said, kind = self._by_curvature(level, errors)
        moments = implied_moments(self.model.fitted)
        if moments is not None:
            table["standardised"] = standardised(self.model.fitted, table, moments)
        return summarise({**facts, "errors": kind}, table, level, [*notes, *said], self.fit_indices())

    def _without_likelihood(self) -> str:
        """Why the rows of this fit have none."""
        mechanisms = self.model.structure.mechanisms.items()
        bare = [node for node, one in mechanisms if not (one.has_density or one.is_given)]
        return f"no density of {', '.join(bare)} is known" if bare else "the fit keeps no rows of a table"

    def fit_indices(self) -> FitIndices | None:
        """Chi-square, CFI, TLI, RMSEA and SRMR of a linear normal model; None of others, or where nothing is tested."""
        batch = getattr(self.problem, "batch", None)
        return fit_indices(self.model.fitted, batch) if isinstance(batch, Batch) else None

    def rotated_loadings(self, method: Rotation = "varimax") -> Rotated:
        """Loadings of free factors after a rotation: ``"varimax"``, or ``"oblimin"``, which lets factors correlate."""
        return rotated_loadings(self.model.fitted, method)

    def _by_curvature(self, level: float, errors: Errors) -> tuple[pd.DataFrame, list[str], str]:
        try:
            problem = self._deterministic("standard errors need")
            table, is_maximum = standard_errors(self.model.fitted, problem, level=level, errors=errors)
        except ModelError as error:
            return without_errors(self.model.fitted), [f"no standard errors: {error}"], "none"
        said = [] if is_maximum else ["the likelihood still rises from here: standard errors are not to be trusted"]
        kind = errors if isinstance(problem, Units) and problem.is_likelihood else "sandwich"
        return table, said, "observed information" if kind == "information" else kind

    def effect(
        self,
        treatment: str,
        outcome: str,
        *,
        values: Sequence[Any] | pd.Series[Any] | Tensor | None = None,
        on: Mapping[str, Any] | None = None,
        path: Path = "total",
        level: float = 0.95,
        errors: Errors = "information",
    ) -> Effect:
        """:meth:`otpdag.Model.effect` with an interval, from the same curvature as :meth:`summary`."""
        problem = self._deterministic("the interval of an effect needs")
        return self.model.effect(
            treatment, outcome, values=values, on=on, path=path, level=level, problem=problem, errors=errors
        )

    def term(self, node: str, parent: str, *, level: float = 0.95, points: int = 100) -> pd.DataFrame:
        """What a numeric parent adds to a node's prediction, on the scale of its link, with pointwise intervals.

        Its mean over rows that show the parent is zero; other numbers are at their means, categories at their first.

        Args:
            node: The node.
            parent: One of its numeric parents.
            level: Nominal coverage of each interval.
            points: Values of the parent, from the smallest to the largest.

        Returns:
            The columns ``parent``, ``of`` (which logit, of more than two categories), ``term``, ``lower``, ``upper``.

        Raises:
            ModelError: The node has no such parent, or what was minimised has no curvature.
        """
        check_share("level", level)
        problem = self._deterministic("the band of a term needs")
        return term_curve(self.model.fitted, problem, node, parent, level=level, points=check_count("points", points))

    def forecast(
        self,
        data: Any,
        steps: int,
        *,
        level: float = 0.95,
        draws: int = 1000,
        seed: int = 0,
        given: Any = None,
        errors: Errors = "information",
    ) -> pd.DataFrame:
        """:meth:`otpdag.Model.forecast` with intervals that also count how sure the parameters are.

        Futures are drawn from parameters that are drawn around the estimate by their likelihood.
        A column that moves with what the data do not determine has no interval.
        """
        seed, problem = check_seed(seed), self._deterministic("the uncertainty of a forecast needs")
        estimate = point_of(self.model.fitted, problem.shapes)
        known = information_at(problem, estimate, errors)

        def ahead(points: Tensor, draws: int) -> pd.DataFrame:
            naturals = [problem.naturals(point) for point in points.split(1)]
            return self.model.forecast(data, steps, level, draws=draws, seed=seed, given=given, parameters=naturals)

        drawn, flat = likely_points(units_of(problem), estimate, known, PARAMETER_DRAWS, seed), known.flat
        told = ahead(drawn, draws)
        if flat.shape[1]:
            # all that is not told at once, and the same futures twice
            moved = estimate + MOVE * flat.sum(-1) / math.sqrt(flat.shape[1])
            here, there = (ahead(at, FUTURES_COMPARED) for at in (estimate, moved))
            for name in (name.removesuffix(".lower") for name in told.columns if name.endswith(".lower")):
                width = (here[f"{name}.upper"] - here[f"{name}.lower"]).abs()
                if bool(((there[name] - here[name]).abs() > 1e-3 * width).any()):
                    told[[f"{name}.lower", f"{name}.upper"]] = np.nan
        return told

    def plan(self, data: Table, *, seed: int = 0, rows: int = 1000) -> Plan:
        """:meth:`otpdag.Model.plan`: what would have to move for rows to be the model's."""
        return self.model.plan(data, seed=seed, rows=rows)

    def transport(
        self, data: Table, *, etas: Sequence[float] = (1.0, 10.0, 100.0, 1000.0), rows: int = 200, seed: int = 0
    ) -> pd.DataFrame:
        """Both sides of Theorem 1 at the estimate: the transport cost, and reconstruction under the constraint.

        Args:
            data: A table, of which at most ``rows`` random ones without gaps are compared with as many points.
            etas: Weights of the constraint: as they grow, the ``backward`` side rises to the ``direct`` one.
            rows: Memory and time grow with their square.
            seed: Determines rows and points.

        Returns:
            For each eta both sides, and their gap relative to the cost.
        """
        rows, seed = check_count("rows", rows), check_seed(seed)
        batch, _ = self.model._read_rows(data)
        whole = batch.shows(batch.mask).nonzero()[:, 0]
        few = whole[torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))[:rows]]
        fitted = self.model.fitted
        return both_sides(fitted.structure, fitted.naturals, batch.take(few), etas, seed, len(few))

    def plot(self, what: str = "estimates", *arguments: Any, **options: Any) -> Figure:
        """A picture: ``result.plot("fit", table)`` is ``otp.plots.plot_fit(result, table)``.

        Args:
            what: ``"estimates"``, ``"fit"``, ``"hidden"``, ``"classes"``, ``"effects"``, ``"plan"`` or ``"term"``.
            arguments: Passed on.
            options: Passed on.

        Raises:
            ModelError: There is no such picture.
        """
        check_choice("what", what, PICTURES)
        # pictures lie above fits, so that they are looked up when one is asked for
        draw = getattr(import_module("otpdag.plots"), f"plot_{what}")
        with told_as(ModelError, f"plot({what!r}, ...) takes what otp.plots.plot_{what} takes", TypeError):
            inspect.signature(draw).bind(self, *arguments, **options)
        figure: Figure = draw(self, *arguments, **options)
        return figure

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        return f"<p>{html.escape(repr(self))}</p><ul>{notes}</ul>{self.model._repr_html_()}"

    def __repr__(self) -> str:
        kept = next((r.number for r in self.restarts if r.kept), 0)
        return (
            f"FitResult({self.method.name}, {self.status}; loss {self.loss:.6g}, {len(self.history)} steps, "
            f"start {kept + 1} of {len(self.restarts)}, {self.rows_used} rows, {self.seconds:.1f} s)"
        )


# -- bootstrap ---------------------------------------------------------------------------------------------------------


def bootstrap_draws(
    problem: Units, point: Tensor, draws: int, seed: int = 0, jobs: int = 1, chunk: int = 20
) -> tuple[Tensor, Tensor]:
    """Where the fits of resampled units ended (draws, P), and which of them settled (draws,).

    Args:
        problem: The problem that was solved.
        point: Its solution (1, P), from which every draw starts.
        draws: Number of resampled fits.
        seed: Determines the resamples.
        jobs: Processes; -1 takes all cores.
        chunk: Draws that train together in one process.
    """
    from joblib import Parallel, delayed

    seeds = np.random.SeedSequence(seed).generate_state(-(-draws // chunk))
    sizes = [min(chunk, draws - i * chunk) for i in range(len(seeds))]
    try:
        spread = information_at(problem, point).covariance if problem.pace.refinements == 0 else None
    except ModelError:
        spread = None
    each = zip(sizes, seeds, strict=True)
    tasks = (delayed(_one_chunk)(problem, point, size, int(own), spread) for size, own in each)
    chunks = shown_while_running(Parallel(n_jobs=jobs, return_as="generator")(tasks), "bootstrap", len(seeds))
    ended, settled = (torch.cat(list(parts)) for parts in zip(*chunks, strict=True))
    return ended, settled


def _one_chunk(
    problem: Units, point: Tensor, draws: int, seed: int, spread: Tensor | None, steps: int = 300
) -> tuple[Tensor, Tensor]:
    """Where the resampled fits of a chunk ended, and which settled: every draw is a data set with one start."""
    generator = np.random.default_rng(seed)
    base = problem.weight[0].double().numpy()
    total = max(round(float(base.sum())), 2)
    counts = generator.multinomial(total, base / base.sum(), size=draws)
    factors = torch.as_tensor(np.divide(counts, base, out=np.zeros(counts.shape), where=base > 0))
    with at_work(1):
        points, settled = point.repeat(draws, 1), torch.zeros(draws, dtype=torch.bool)
        if spread is not None:
            points, settled = _by_newton(problem, points, factors, spread)
        if bool(settled.all()):
            return points, settled
        left = ~settled
        ended = search(
            problem.reweighted(factors[left]),
            point.repeat(int(left.sum()), 1),
            SearchSchedule(short_steps=0, moves=problem.pace.refinements),
            Searcher(Deterministic(steps=steps, tolerance=1e-8)),
            owners=range(int(left.sum())),
        )
    points[left] = torch.where(ended.failed.unsqueeze(-1), torch.nan, ended.point)
    settled[left] = ended.converged & ~ended.failed
    return points, settled


def _by_newton(
    problem: Units, points: Tensor, factors: Tensor, spread: Tensor, steps: int = 12, near: float = 1e-4
) -> tuple[Tensor, Tensor]:
    r"""Steps with the curvature of all rows, which differs little from a resample's: where they end, and which did.

    One has ended whose next step is no longer than 0.01 standard errors (:math:`g^\top C g < 10^{-4}`), and that is no
    worse than where it began.
    """
    points, first = points.clone(), torch.full((len(points),), torch.inf, dtype=points.dtype)
    settled, left = torch.zeros(len(points), dtype=torch.bool), torch.arange(len(points))
    mass = float(problem.unit_mass.sum())
    for step in range(steps):
        loss, gradient = loss_and_gradient(problem.reweighted(factors[left]).loss, points[left])
        move = mass * gradient @ spread
        done = (mass * (gradient * move).sum(-1) < near) & (loss <= first[left] + 1e-9)
        first[left] = loss if step == 0 else first[left]
        points[left] = torch.where(done.unsqueeze(-1), points[left], points[left] - move)
        settled[left[done]] = True
        left = left[~done]
        if not len(left):
            break
    return points, settled
