"""The entry, ``otpdag.fit(model, data)``: recognise the data, resolve the arguments, search, and keep the result."""

from __future__ import annotations

import math
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy as sp
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from otpdag.answers.notes import ENDLESS, UNDETERMINED, point_of
from otpdag.answers.summary import told_priors
from otpdag.data import Documents, Images, Sequences
from otpdag.data.columns import aligned, known_table
from otpdag.data.parts import is_partitioned, weights_in
from otpdag.data.sequences import as_sequences, replace_table
from otpdag.engine.checkpoint import Journal
from otpdag.engine.data_kind import MANY_STARTS, DataKind, ImageData, Layout, TableData
from otpdag.engine.document_data import DocumentData
from otpdag.engine.fingerprint import fingerprint
from otpdag.engine.method import Method, current_name, misfit
from otpdag.engine.monitor import Callback, Cause, Monitor, Stopping
from otpdag.engine.result import FitResult, Status
from otpdag.engine.robust import RobustOptions, robust_search, robust_start
from otpdag.engine.search import Searcher, SearchResult, SearchSchedule, has_quick_updates, search
from otpdag.engine.sequence_data import GroupData, SequenceData
from otpdag.errors import (
    ApproximationWarning,
    ConvergenceWarning,
    DataError,
    ModelError,
    check_count,
    check_seconds,
    check_seed,
    listed,
    out_of_time_if,
)
from otpdag.files import as_path
from otpdag.matching.transport_rows import TransportRows
from otpdag.mechanisms.parameters import PseudoCounts, Ridge
from otpdag.model import Model
from otpdag.numerics import Array, at_work
from otpdag.problem import Problem, Units
from otpdag.structure import Structure, unpack

FAILURE_ADVICE = "look for outliers, constant or collinear columns, or a mechanism that does not fit its column"


@dataclass(frozen=True)
class Plan:
    """What will run.

    Attributes:
        restarts: As many as the problem asks for if None.
        leaves_out: How much of what the model cannot explain is left out; None if nothing is.
    """

    method: Method
    restarts: int | None
    course: SearchSchedule
    leaves_out: RobustOptions | None


def fit(
    model: Model,
    data: Any,
    *,
    method: str | Method = "auto",
    seed: int = 0,
    steps: int | None = None,
    restarts: int | None = None,
    weights: ArrayLike | str | None = None,
    robust: bool | str | RobustOptions = False,
    device: str = "cpu",
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
    course: SearchSchedule | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = 20.0,
    time_limit: float | None = None,
) -> FitResult:
    """Estimate a model's parameters from data with hidden nodes and missing cells.

    Args:
        model: The model; its parameters are set by the fit.
        data: A DataFrame, a dictionary of arrays, or a 2-D array or tensor; NaN is missing. If the graph has lagged
            edges: what :class:`~otpdag.Sequences` takes, or one. :class:`~otpdag.Documents` for the graph of topics,
            :class:`~otpdag.Images` for auto-encoders. A Parquet file, folder or pattern, an Arrow dataset or a Dask
            frame, which need not fit into memory (see ``docs/scale.md``); or a :class:`~otpdag.engine.DataKind` of your
            own.
        method: ``"auto"``, ``"likelihood"``, ``"transport"``, ``"paper"``, or a :class:`~otpdag.Method`.
        seed: Fully determines the run.
        steps: Most steps of the method's optimiser; the method's own if left out.
        restarts: Most data-driven starts; the best is continued, and more are never worse. By default 224 with hidden
            categories whose likelihood has closed-form updates, of which no more are tried than are needed, sixteen
            with others, four with other hidden nodes, one without.
        weights: One weight for each row of a table, or for each sequence; or the name of a column that holds them.
        robust: ``"outliers"`` (or True) lets the model leave out rows (or sequences) that it cannot explain, and
            reports them, and a :class:`~otpdag.RobustOptions` says how many at most; ``"misfit"`` is for a model whose
            fixed parameters or families are wrong. See ``docs/robustness.md``.
        device: ``"cpu"`` or ``"cuda"``.
        progress: Show a progress bar; by default only on a terminal. Where there is none, True prints lines instead,
            and the logger ``otpdag`` gets one every ten seconds in any case.
        callbacks: Called with each record of the history; returning True stops the fit.
        course: Sizes of the stages of the search; of a fit that leaves out rows those of its short runs, for its later
            stages follow from how fits and weights alternate.
        checkpoint: A file that is written now and then, at Ctrl-C and at SIGTERM; if it exists, the fit goes on from
            there, to the same end.
        checkpoint_seconds: How often it is written, at most; it is also written whenever a stage of the search ends.
        time_limit: Seconds after which the fit ends with the best parameters so far; if there are none, because what is
            unknown was still being laid out, with an :class:`~otpdag.errors.OutOfTime`.

    Returns:
        The result, with status, history and all restarts. After Ctrl-C it holds the best so far, and
        ``result.status.interrupted`` is True; a second Ctrl-C raises ``KeyboardInterrupt``.

    Example:
        >>> import numpy as np, pandas as pd, otpdag as otp
        >>> from otpdag import mechanisms as m
        >>> rng = np.random.default_rng(0)
        >>> z = rng.integers(0, 2, 500)
        >>> table = pd.DataFrame({"x": np.where(z == 1, 4.0, -4.0) + rng.normal(size=500)})
        >>> model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal()})
        >>> result = otp.fit(model, table, seed=0)
        >>> result.status.converged, model.params()["x"]["loc"].round(0)
        (True, array([-4.,  4.]))
    """
    began = time.perf_counter()
    if not isinstance(model, Model):
        raise ModelError(f"model must be an otp.Model, and comes before the data; got {type(model).__name__}")
    check_arguments(seed, steps, restarts, device)
    seed = int(seed)
    check_seconds("time_limit", time_limit)
    check_seconds("checkpoint_seconds", checkpoint_seconds)
    stopping = Stopping(time_limit)
    robustness = as_robust(robust)
    every_row = isinstance(robustness, RobustOptions) or (isinstance(method, Method) and method.leaves_out_rows)
    kind = recognise(model, data, weights=weights, device=device, every_row=every_row)
    check_honoured(kind, weights=weights is not None, robust=robustness is not None, device=device)
    plan = resolve(kind, method, robust=robustness, steps=steps, restarts=restarts, course=course)
    _check_priors(model, plan.method)
    work = kind.work(plan.method)
    bounded = nullcontext() if work is None else at_work(work)
    listening = stopping.listening(to_terminate=checkpoint is not None)
    with listening, bounded, Monitor(show=progress, callbacks=callbacks, stopping=stopping) as monitor:
        searcher = Searcher(plan.method.optimiser, seed, monitor)
        if checkpoint is not None:
            journal = Journal(as_path(checkpoint), checkpoint_seconds, _about(kind, plan, seed), monitor)
            searcher = replace(searcher, journal=journal)
        with _breakdowns_named():
            layout, ended, kept = _searched(kind, plan, searcher)
        status = _status(ended, plan.method, monitor, has_checkpoint=checkpoint is not None)
        status = replace(status, approximate=bool(ended.problem.notes()))
        _check_end(layout, ended)
        kind.adopt(layout, ended)
        ended = replace(ended, problem=_at_the_estimate(model, ended))
        notes = [] if bool(ended.failed[0]) else kind.notes(ended)
    status = _with_cause(status, monitor.stopping.cause, notes)
    if not status.converged:
        warnings.warn(str(status), ConvergenceWarning, stacklevel=2)
    if ended.reached == 1 < ended.settled:
        notes.append(
            f"one of {ended.settled} starts that ran to their ends reached this optimum, or one beside it: there may "
            "be better ones; more restarts look for them, and are never worse"
        )
    return FitResult(
        model=model,
        method=plan.method,
        status=status,
        loss=float(ended.loss[0]),
        history=tuple(monitor.history),
        restarts=ended.restarts,
        reached=ended.reached,
        rows_used=kind.rows,
        seconds=time.perf_counter() - began,
        seed=seed,
        notes=(*_notes(kind, plan.method, kept), *ended.problem.notes(ended.point), *notes),
        stages=tuple(monitor.stages),
        row_weights=kept,
        problem=ended.problem,
    )


def _at_the_estimate(model: Model, ended: SearchResult) -> Problem:
    """The problem with its points where the model's parameters are: signs may have been turned since the search."""
    problem = ended.problem
    if not isinstance(problem, Units) or bool(ended.failed[0]):
        return problem
    point = point_of(model.fitted, problem.shapes)
    return problem if torch.allclose(point, ended.point.to(point)) else problem.laid_out_for(point)


def _searched(kind: DataKind, plan: Plan, searcher: Searcher) -> tuple[Layout, SearchResult, Array | None]:
    """Lay out the problem, search, and conclude; also how much of each row was used, where some are left out."""
    layout = kind.lay_out(plan.method, searcher.seed)
    _check_something_is_learned(layout)
    with out_of_time_if(lambda: searcher.monitor.stopping.is_late(0.05, least=1.0)):
        problem = kind.problem(layout, plan.method, searcher.seed)
    for note in problem.notes():
        warnings.warn(note, ApproximationWarning, stacklevel=3)
    kept: Array | None = None
    if plan.leaves_out is not None:
        ended, weights = robust_search(
            kind, layout, problem, searcher, plan.course, plan.restarts or kind.restarts(plan.method), plan.leaves_out
        )
        kept = kind.as_given(weights.cpu().numpy())
    else:
        restarts, size = plan.restarts, plan.course.race_batch
        if restarts is None:
            restarts = kind.restarts(plan.method)
            if restarts >= MANY_STARTS and has_quick_updates(problem):
                restarts = plan.course.race_starts
        ends = [0, *range(size, restarts, 3 * size), restarts]  # few are enough mostly, and many at once cost less each
        batches = (range(first, last) for first, last in pairwise(ends))
        starts = (_starts(kind, layout, problem, searcher, batch) for batch in batches)
        if isinstance(problem, TransportRows) and plan.method.leaves_out_rows and layout.structure.has_densities:
            starts = (robust_start(kind, layout, problem.direct.most_unmatched, searcher)[None] for _ in range(1))
        ended = search(problem, starts, plan.course, searcher)
        if isinstance(ended.problem, TransportRows):
            parts = ended.problem.matched_parts(ended.point)
            kept = None if parts is None else kind.as_given(parts.cpu().numpy())
    return layout, kind.concluded(ended, searcher), kept


def _starts(kind: DataKind, layout: Layout, problem: Problem, searcher: Searcher, numbers: Sequence[int]) -> Tensor:
    """Where to begin (R, P); of a fit that has no time left, one start."""
    with out_of_time_if(lambda: searcher.monitor.stopping.is_late(0.05, least=1.0)):
        return kind.starts(layout, problem, searcher.seed, numbers)


def _about(kind: DataKind, plan: Plan, seed: int) -> dict[str, str]:
    """What a checkpoint must agree with: all that the result depends on."""
    return {
        "data": type(kind).__name__,
        "rows": str(kind.rows),
        "nodes": ", ".join(kind.model.graph.nodes),
        "graph": fingerprint(kind.model.graph),
        "method": f"{plan.method.name}, {plan.method.steps} steps",
        "restarts": str(plan.restarts),
        "robust": "no" if plan.leaves_out is None else f"outliers, {fingerprint(plan.leaves_out)}",
        "method's settings": fingerprint(plan.method),
        "course": fingerprint(plan.course),
        "seed": str(seed),
        "versions": f"otpdag {sys.modules['otpdag'].__version__}, torch {torch.__version__}, numpy {np.__version__}",
        "model's fingerprint": fingerprint(kind.model),
        "data's fingerprint": fingerprint(kind),
    }


def _check_priors(model: Model, method: Method) -> None:
    """Refuse priors that were asked for where they would count for nothing; those by default are noted."""
    if method.counts_priors:
        return
    for node, mechanism in model.structure.mechanisms.items():
        for name, prior in ((name, one.setting) for name, one in mechanism.declared().items() if "." not in name):
            by_default = isinstance(prior, PseudoCounts) and isinstance(prior.penalty, Tensor)
            if isinstance(prior, Ridge | PseudoCounts) and not by_default and prior.penalty != 0:
                raise ModelError(
                    f"node {node!r}: method={method.name!r} has no likelihood that otp.{prior.named} on {name!r} could "
                    "add to; leave it out, or choose method='likelihood'"
                )


def _notes(kind: DataKind, method: Method, kept: Array | None) -> list[str]:
    notes, priors = [], [] if method.counts_priors else told_priors(kind.model.fitted)
    if priors:
        notes.append(f"only method='likelihood' has priors; these counted for nothing: {listed(priors, show=str)}")
    if kept is not None:
        out = int((kept < 0.5).sum())
        notes.append(f"left out {out} of {len(kept)} {kind.units} ({out / len(kept):.1%}); see result.dropped")
    return notes


@contextmanager
def _breakdowns_named() -> Iterator[None]:
    """Errors of linear algebra as errors that say what to look for."""
    try:
        yield
    except (torch.linalg.LinAlgError, np.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        reason = str(error).split(":")[-1].strip()
        raise ModelError(f"the fit failed: a matrix became singular ({reason}); {FAILURE_ADVICE}") from error


def _check_something_is_learned(layout: Layout) -> None:
    """Refuse a model of which all is given, and with it the backward map."""
    if not any(math.prod(shape) for shape in layout.shapes.values()):
        nodes = listed(list(layout.structure.mechanisms))
        raise ModelError(
            f"there is nothing to learn: every parameter of {nodes} is given; leave one out of its mechanism, or say "
            "model.set_params({}), after which the model scores, fills in and samples as it is"
        )


def _check_end(layout: Layout, ended: SearchResult) -> None:
    """Refuse an end that is no estimate: the model keeps what it had before."""
    for key, value in unpack(ended.point, layout.shapes).items():
        if not bool(torch.isfinite(value).all()):
            node = next((n for n, names in layout.structure.keys.items() if key in names.values()), key)
            raise ModelError(f"the fit failed: no finite parameters of node {node!r} were found; {FAILURE_ADVICE}")


def _status(ended: SearchResult, method: Method, monitor: Monitor, *, has_checkpoint: bool) -> Status:
    cause, steps = monitor.stopping.cause, sum(len(stage.losses) for stage in monitor.stages)
    unknown = cause is Cause.TIME  # it ended before the loss was summed
    if bool(ended.failed[0]) or not (unknown or bool(torch.isfinite(ended.loss[0]))):
        reason = "the loss became infinite or not a number; the last good parameters were kept"
        return Status(False, reason, FAILURE_ADVICE, failed=True)
    if bool(ended.converged[0]):
        stochastic = method.optimiser.is_stochastic
        return Status(True, "the smoothed loss stopped falling" if stochastic else "the loss stopped changing")
    so_far = f"after {steps} steps; these are the {'best parameters so far' if steps else 'starting values'}"
    if cause is Cause.INTERRUPT:
        return Status(False, f"{cause.value} {so_far}", interrupted=True)
    if cause is Cause.TIME:
        reached = f"the time limit of {monitor.stopping.seconds:g} s was reached {so_far}"
        return Status(False, reached, "allow more time" + ", or go on from the checkpoint" * has_checkpoint)
    if cause is Cause.CALLBACK:
        return Status(False, f"{cause.value} after {len(monitor.history)} steps")
    return Status(False, f"the loss was still falling after {ended.steps} steps", "allow more steps in the method")


def _with_cause(status: Status, stopped_by: Cause | None, notes: Sequence[str]) -> Status:
    """Why more steps would not help, where a note tells it: what no data determine has no end to reach."""
    endless = next((note for note in notes if note.startswith(UNDETERMINED) or ENDLESS in note), None)
    if status.converged or status.failed or stopped_by is not None or endless is None:
        return status
    return replace(status, reason=endless, advice="more steps will not end it")


# -- which kind the data are, and what will run ------------------------------------------------------------------------


def recognise(model: Model, data: Any, *, weights: ArrayLike | str | None, device: str, every_row: bool) -> DataKind:
    """Read data as the kind that they are; an object that is a kind already serves itself."""
    if isinstance(data, DataKind):
        if data.model is not model:
            raise DataError("data were adapted to another model than the one that is fitted")
        given = {"weights": weights is not None, "device": device != "cpu"}
        if any(given[name] for name in given if name in data.honours):  # what they do not honour is refused later
            raise DataError(f"{type(data).__name__} are read already: give weights and device when they are made")
        return data
    if isinstance(data, Images):
        return ImageData.of(model, data, device=device)
    if isinstance(data, Documents) or (not isinstance(data, pd.DataFrame) and sp.sparse.issparse(data)):
        return DocumentData.of(model, data if isinstance(data, Documents) else Documents(data))
    if not isinstance(data, pd.DataFrame) and is_partitioned(data):
        return TableData.in_parts(model, data, weights=weights, device=device, every_row=every_row)
    data = known_table(data)
    if isinstance(weights, pd.Series):
        is_frame = isinstance(data, pd.DataFrame)
        index = as_sequences(data).ids if model.graph.is_dynamic else data.index if is_frame else None
        weights = aligned(weights, index, "weights")
    if isinstance(weights, str):
        if weights in model.graph.nodes:
            raise DataError(f"weights names column {weights!r}, which is a node of the model; weights need their own")
        split = _sequences_and_weights if model.graph.is_dynamic else _rows_and_weights
        data, weights = split(data, weights)
    if model.graph.is_dynamic:
        return SequenceData.of(model, data, weights=weights)
    if model.structure.shared:
        return GroupData.of(model, model.in_groups(data))
    if isinstance(data, Sequences | list | tuple):
        raise DataError("data are sequences, but the graph has no lagged edge: add one with otp.lag")
    return TableData.of(model, data, weights=weights, device=device, every_row=every_row)


def _rows_and_weights(data: Any, column: str) -> tuple[pd.DataFrame, NDArray[Any]]:
    """A frame without its column of weights, and that column."""
    if not isinstance(data, pd.DataFrame) or column not in data.columns:
        known = f"; it has {listed(list(data.columns), show=str)}" if isinstance(data, pd.DataFrame) else ""
        raise DataError(f"weights must be numbers, or name a column of a DataFrame; got {column!r}{known}")
    return data.drop(columns=column), weights_in(data, column)


def _sequences_and_weights(data: Any, column: str) -> tuple[Sequences, NDArray[Any]]:
    """Sequences without their column of weights, and the weight of each, which all its steps must agree on."""
    sequences = as_sequences(data)
    table, each = _rows_and_weights(sequences.table, column)
    first = each[np.cumsum(sequences.lengths) - sequences.lengths]
    differs = np.flatnonzero(each != np.repeat(first, sequences.lengths))
    if len(differs):
        raise DataError(
            f"weights {column!r} must be the same in all steps of a sequence; the sequence of row {differs[0]} begins "
            f"with another weight than {each[differs[0]]!r}"
        )
    return replace_table(sequences, table), first


def check_arguments(seed: object, steps: object, restarts: object, device: object) -> None:
    """Refuse what no kind of data could honour."""
    check_seed(seed)
    for name, value in (("steps", steps), ("restarts", restarts)):
        if value is not None:
            check_count(name, value)
    if not isinstance(device, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ModelError(f"device must be 'cpu', 'cuda' or 'cuda:N'; got {device!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device {device!r} was asked for, but no CUDA device is available; use device='cpu'")


def as_robust(robust: object) -> RobustOptions | str | None:
    """How much may be left out; ``"misfit"``; or None."""
    if robust is True or robust == "outliers":
        return RobustOptions()
    if isinstance(robust, RobustOptions) or robust == "misfit":
        return robust
    if robust is not False:
        raise ModelError(f"robust must be True, False, 'outliers', 'misfit' or an otp.RobustOptions; got {robust!r}")
    return None


def check_honoured(kind: DataKind, *, weights: bool, robust: bool, device: str) -> None:
    """Refuse an argument that the kind of data cannot honour."""
    asked = {"weights": weights, "robust": robust, "device": device != "cpu"}
    for name, is_asked in asked.items():
        if is_asked and name not in kind.honours:
            raise ModelError(f"{name} is not for such data ({type(kind).__name__}): leave it out")


def resolve(
    kind: DataKind,
    method: str | Method,
    *,
    robust: RobustOptions | str | None,
    steps: int | None,
    restarts: int | None,
    course: SearchSchedule | None,
) -> Plan:
    """Choose the method, and everything that the user left open."""
    if course is not None and not isinstance(course, SearchSchedule):
        raise ModelError(f"course must be an otp.SearchSchedule; got {course!r:.100}")
    chosen = _chosen(kind, method, robust)
    if isinstance(robust, RobustOptions) and chosen.objective.direct is not None and isinstance(kind, TableData):
        direct = replace(chosen.objective.direct, unmatched="auto", most_unmatched=robust.most_dropped)
        chosen, robust = replace(chosen, objective=replace(chosen.objective, direct=direct)), None
    chosen = chosen if steps is None else chosen.with_steps(int(steps))
    kind.check(chosen)
    if isinstance(robust, RobustOptions):
        kind.check_robust(chosen)
    if restarts is not None and kind.most_restarts is not None and restarts > kind.most_restarts:
        raise ModelError(
            f"restarts must be at most {kind.most_restarts} for such data ({type(kind).__name__}): fit several seeds "
            f"instead; got {restarts}"
        )
    return Plan(
        method=chosen,
        restarts=None if restarts is None else int(restarts),
        course=kind.course(chosen) if course is None else course,
        leaves_out=robust if isinstance(robust, RobustOptions) else None,
    )


def _chosen(kind: DataKind, method: str | Method, robust: object) -> Method:
    if robust == "misfit":
        if method != "auto":
            raise ModelError("robust='misfit' is a method of its own: leave method at 'auto'")
        return misfit(given_weights=_weights_are_given(kind.model.structure))
    if isinstance(method, Method):
        return method
    return kind.named(current_name(method))


def _weights_are_given(structure: Structure) -> bool:
    """Whether the user fixed everything about the hidden categories, so that nothing of them is learned."""
    hidden = [structure.mechanisms[node] for node in structure.graph.hidden]
    declared = [one.declared().values() for one in hidden if one.space.is_discrete]
    return bool(declared) and all(not parameter.learned for own in declared for parameter in own)
