"""The entry: ``otpdag.fit(model, data)``."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from otpdag.arguments import check_seconds
from otpdag.engine.checkpoint import Journal, fingerprint
from otpdag.engine.data_kind import DataKind, Layout
from otpdag.engine.method import Method
from otpdag.engine.monitor import Callback, Cause, Monitor, Stopping
from otpdag.engine.optimiser import SearchSchedule
from otpdag.engine.outlying_rows import RobustOptions
from otpdag.engine.resolve import Plan, check_arguments, check_honoured, recognise, resolve, robust_kind
from otpdag.engine.result import FitResult, Status
from otpdag.engine.robust import robust_search
from otpdag.engine.search import Searcher, SearchResult, search
from otpdag.errors import ApproximationWarning, ConvergenceWarning, ModelError, listed
from otpdag.model import Model
from otpdag.structure import unpack
from otpdag.threads import bounded_threads

FAILURE_ADVICE = "look for outliers, constant or collinear columns, or a mechanism that does not fit its column"


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
        method: ``"auto"``, ``"entropic"``, ``"transport"``, ``"paper"``, or a :class:`~otpdag.Method`.
        seed: Fully determines the run.
        steps: Most steps of the method's optimiser; the method's own if left out.
        restarts: Number of data-driven starts that train together; the best is continued. By default sixteen with
            hidden categories, four with other hidden nodes, one without.
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
        time_limit: Seconds after which the fit ends with the best parameters so far.

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
    robustness = robust_kind(robust)
    kind = recognise(model, data, weights=weights, device=device, every_row=robustness == "outliers")
    check_honoured(kind, weights=weights is not None, robust=robustness is not None, device=device)
    options = robust if isinstance(robust, RobustOptions) else None
    plan = resolve(kind, method, robust=robustness, steps=steps, restarts=restarts, course=course, options=options)
    work = kind.work(plan.method)
    bounded = nullcontext() if work is None else bounded_threads(work)
    about = {} if checkpoint is None else _about(kind, plan, seed)
    journal = Journal.open(checkpoint, about, checkpoint_seconds)
    listening = stopping.listening(to_terminate=checkpoint is not None)
    with listening, bounded, Monitor(show=progress, callbacks=callbacks, stopping=stopping) as monitor:
        journal.restore(monitor)
        searcher = Searcher(plan.method.optimiser, seed, monitor, journal)
        with _breakdowns_named():
            layout, ended, kept = _searched(kind, plan, searcher)
        status = replace(_status(ended, plan.method, monitor), approximate=bool(ended.problem.notes()))
        _check_end(layout, ended)
        kind.adopt(layout, ended)
    if not status.converged:
        warnings.warn(str(status), ConvergenceWarning, stacklevel=2)
    notes = [] if bool(ended.failed[0]) else kind.notes(ended)
    return FitResult(
        model=model,
        method=plan.method,
        status=status,
        loss=float(ended.loss[0]),
        history=tuple(monitor.history),
        restarts=ended.restarts,
        rows_used=kind.rows,
        seconds=time.perf_counter() - began,
        seed=seed,
        notes=(*_notes(kind, kept), *ended.problem.notes(ended.point), *notes),
        stages=tuple(monitor.stages),
        row_weights=kept,
        problem=ended.problem,
    )


def _searched(
    kind: DataKind, plan: Plan, searcher: Searcher
) -> tuple[Layout, SearchResult, NDArray[np.float64] | None]:
    """Lay out the problem, search, and conclude; also how much of each row was used, where some are left out."""
    layout = kind.lay_out(plan.method, searcher.seed)
    _check_something_is_learned(layout)
    problem = kind.problem(layout, plan.method, searcher.seed)
    for note in problem.notes():
        warnings.warn(note, ApproximationWarning, stacklevel=3)
    kept: NDArray[np.float64] | None = None
    if plan.leaves_out is not None:
        ended, weights = robust_search(kind, layout, problem, plan, searcher)
        kept = kind.as_given(weights.cpu().numpy())
    else:
        starts = kind.starts(layout, problem, searcher.seed, range(plan.restarts))
        ended = search(problem, starts, plan.course, searcher)
    layout, ended = kind.concluded(layout, ended, plan.method, searcher)
    return layout, ended, kept


def _about(kind: DataKind, plan: Plan, seed: int) -> dict[str, str]:
    """What a checkpoint must agree with."""
    return {
        "data": type(kind).__name__,
        "rows": str(kind.rows),
        "nodes": ", ".join(kind.model.graph.nodes),
        "method": f"{plan.method.name}, {plan.method.steps} steps",
        "restarts": str(plan.restarts),
        "robust": "no" if plan.leaves_out is None else f"outliers, {fingerprint(plan.leaves_out)}",
        "method's settings": fingerprint(plan.method),
        "course": fingerprint(plan.course),
        "seed": str(seed),
        "torch": torch.__version__,
        "model's fingerprint": fingerprint([(node, one.spec()) for node, one in kind.model.mechanisms.items()]),
        "data's fingerprint": fingerprint(kind),
    }


def _notes(kind: DataKind, kept: NDArray[np.float64] | None) -> tuple[str, ...]:
    if kept is None:
        return ()
    out = int((kept < 0.5).sum())
    return (f"left out {out} of {len(kept)} {kind.units} ({out / len(kept):.1%}); see result.dropped",)


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


def _status(ended: SearchResult, method: Method, monitor: Monitor) -> Status:
    if bool(ended.failed[0]) or not bool(torch.isfinite(ended.loss[0])):
        reason = "the loss became infinite or not a number; the last good parameters were kept"
        return Status(False, reason, FAILURE_ADVICE, failed=True)
    if bool(ended.converged[0]):
        stochastic = method.optimiser.is_stochastic
        return Status(True, "the smoothed loss stopped falling" if stochastic else "the loss stopped changing")
    cause, steps = monitor.stopping.cause, sum(len(stage.losses) for stage in monitor.stages)
    so_far = f"after {steps} steps; these are the best parameters so far"
    if cause is Cause.INTERRUPT:
        return Status(False, f"{cause.value} {so_far}", interrupted=True)
    if cause is Cause.TIME:
        reached = f"the time limit of {monitor.stopping.seconds:g} s was reached {so_far}"
        return Status(False, reached, "allow more time, or go on from a checkpoint")
    if cause is Cause.CALLBACK:
        return Status(False, f"{cause.value} after {len(monitor.history)} steps")
    return Status(False, f"the loss was still falling after {ended.steps} steps", "allow more steps in the method")
