"""The entry: ``otpdag.fit(model, data)``."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from otpdag.data import Batch, Schema, Table, encode, unique_rows
from otpdag.data.sequences import Sequences, SequenceTable, as_sequences, encode_sequences
from otpdag.engine.auto import choose
from otpdag.engine.dynamic import sequence_method, train_sequences
from otpdag.engine.method import Method, method_of, misfit
from otpdag.engine.monitor import Callback, Monitor
from otpdag.engine.problem import count_ranges
from otpdag.engine.result import FitResult, Status
from otpdag.engine.robust import train_robust
from otpdag.engine.search import Course, Trained, train
from otpdag.errors import ConvergenceWarning, DataError, ModelError
from otpdag.mechanisms import Mechanism
from otpdag.model import Model
from otpdag.structure import Structure, unpack
from otpdag.threads import bounded_threads

__all__ = ["fit"]

DEFAULT_RESTARTS, FEW_RESTARTS = 16, 4


def fit(
    model: Model,
    data: Table | SequenceTable,
    *,
    method: str | Method = "auto",
    seed: int = 0,
    restarts: int | None = None,
    weights: ArrayLike | None = None,
    robust: bool | str = False,
    device: str = "cpu",
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
    course: Course | None = None,
) -> FitResult:
    """Estimate a model's parameters from a table with hidden nodes and missing cells.

    Args:
        model: The model; its parameters are set by the fit.
        data: A DataFrame, a dictionary of arrays, or a 2-D array or tensor; NaN is missing. If the graph has lagged
            edges: what :class:`~otpdag.Sequences` takes, or one.
        method: ``"auto"``, ``"entropic"``, ``"transport"``, ``"paper"``, or a :class:`~otpdag.Method`.
        seed: Fully determines the run.
        restarts: Number of data-driven starts that train together; the best is continued. By default sixteen with
            hidden categories, four with other hidden nodes, one without.
        weights: One weight for each row.
        robust: ``"outliers"`` (or True) lets the model leave out rows that it cannot explain, and reports them;
            ``"misfit"`` is for a model whose fixed parameters or families are wrong. See ``docs/robustness.md``.
        device: ``"cpu"`` or ``"cuda"``.
        progress: Show a progress bar; by default only on a terminal.
        callbacks: Called with each record of the history; returning True stops the fit.
        course: Sizes of the stages of the search.

    Returns:
        The result, with status, history and all restarts.

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
    _check_arguments(seed, restarts, device)
    structure = model.structure
    if structure.graph.is_dynamic:
        return _fit_sequences(model, data, method, seed, restarts, weights, progress, callbacks, course)
    if isinstance(data, Sequences | list | tuple):
        raise DataError("data are sequences, but the graph has no lagged edge: add one with otp.lag")
    schema = Schema.of(model.spaces, model.graph, data)
    full = encode(data, schema, hidden=model.graph.hidden, weights=weights)
    _check_rows(structure, full)
    kind = _robust_kind(robust)
    batch = unique_rows(full) if _all_discrete(structure) and kind != "outliers" else full
    batch = batch.to(device)
    chosen = _chosen(structure, method, kind)
    starts = restarts if restarts is not None else _default_restarts(structure, chosen)
    with bounded_threads(_work(structure, batch, chosen)), Monitor(show=progress, callbacks=callbacks) as monitor:
        row_weights: NDArray[np.float64] | None = None
        if kind == "outliers":
            trained, kept = train_robust(
                structure, batch, chosen, seed=seed, restarts=starts, monitor=monitor, course=course
            )
            row_weights = kept.cpu().numpy()
        else:
            trained = train(structure, batch, chosen, seed=seed, restarts=starts, monitor=monitor, course=course)
        model.adopt(
            trained.layout.structure,
            unpack(trained.point.cpu(), trained.layout.shapes),
            schema,
            trained.layout.maps,
        )
        model.note_ranges(count_ranges(structure, batch))
    status = _status(trained, chosen)
    if not status.converged:
        warnings.warn(str(status), ConvergenceWarning, stacklevel=2)
    seconds = time.perf_counter() - began
    return FitResult(
        model,
        chosen,
        status,
        trained.loss,
        tuple(monitor.history),
        trained.restarts,
        full.rows,
        seconds,
        seed,
        notes=_notes(row_weights),
        stages=tuple(monitor.stages),
        row_weights=row_weights,
        problem=trained.problem,
    )


def _robust_kind(robust: bool | str) -> str | None:
    kinds = {False: None, True: "outliers", "outliers": "outliers", "misfit": "misfit"}
    if robust not in kinds:
        raise ModelError(f"robust must be True, False, 'outliers' or 'misfit'; got {robust!r}")
    return kinds[robust]


def _chosen(structure: Structure, method: str | Method, kind: str | None) -> Method:
    if kind == "misfit":
        if method != "auto":
            raise ModelError("robust='misfit' is a method of its own: leave method at 'auto'")
        hidden = [structure.mechanisms[n] for n in structure.graph.hidden if structure.mechanisms[n].space.is_discrete]
        given = [not p.learned for mechanism in hidden for name, p in mechanism.declared().items() if name == "probs"]
        return misfit(given_weights=bool(given) and all(given))
    return choose(structure) if method == "auto" else method_of(method)


def _notes(row_weights: NDArray[np.float64] | None) -> tuple[str, ...]:
    if row_weights is None:
        return ()
    out = int((row_weights < 0.5).sum())
    return (f"left out {out} of {len(row_weights)} rows ({out / len(row_weights):.1%}); see result.dropped",)


def _default_restarts(structure: Structure, method: Method) -> int:
    """Hidden categories and counts have many local optima, hidden numbers few, complete data none."""
    if not structure.graph.hidden:
        return 1
    supports = {structure.mechanisms[node].space.support for node in structure.graph.hidden}
    return DEFAULT_RESTARTS if supports & {"discrete", "count"} and method.optimiser == "lbfgs" else FEW_RESTARTS


def _work(structure: Structure, batch: Batch, method: Method) -> int:
    """Roughly the size of the largest tensors of a step."""
    if method.optimiser == "adam":
        return method.batch_size
    numbers = any(not structure.mechanisms[node].space.is_discrete for node in structure.graph.hidden)
    return batch.rows * (method.gibbs.grid if numbers else 1)


def _check_arguments(seed: int, restarts: int | None, device: str) -> None:
    if restarts is not None and restarts < 1:
        raise ModelError(f"restarts must be at least 1; got {restarts}")
    if not isinstance(seed, int) or seed < 0:
        raise ModelError(f"seed must be a non-negative integer; got {seed!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device {device!r} was asked for, but no CUDA device is available; use device='cpu'")


def _fit_sequences(
    model: Model,
    data: SequenceTable,
    method: str | Method,
    seed: int,
    restarts: int | None,
    weights: ArrayLike | None,
    progress: bool | None,
    callbacks: Sequence[Callback],
    course: Course | None,
) -> FitResult:
    began = time.perf_counter()
    if weights is not None:
        raise ModelError("weights are for rows of a table; steps of sequences have none")
    chosen = sequence_method(model.structure, method)
    sequences = as_sequences(data)
    schema = Schema.of(model.spaces, model.graph, sequences.table)
    batch = encode_sequences(sequences, schema, hidden=model.graph.hidden)
    _check_rows(model.structure, batch.steps)
    starts = restarts if restarts is not None else _default_restarts(model.structure, chosen)
    with bounded_threads(1), Monitor(show=progress, callbacks=callbacks) as monitor:
        trained = train_sequences(
            model.structure, batch, chosen, seed=seed, restarts=starts, monitor=monitor, course=course
        )
        model.adopt(trained.layout.structure, unpack(trained.point, trained.layout.shapes), schema, ())
    status = _status(trained, chosen)
    if not status.converged:
        warnings.warn(str(status), ConvergenceWarning, stacklevel=3)
    return FitResult(
        model, chosen, status, trained.loss, tuple(monitor.history), trained.restarts, batch.rows,
        time.perf_counter() - began, seed, stages=tuple(monitor.stages),
    )  # fmt: skip


def _check_rows(structure: Structure, batch: Batch) -> None:
    """Refuse fewer rows than a node has slopes and other parameters, and missing covariates."""
    needed = max((_numbers(mechanism) for mechanism in structure.mechanisms.values()), default=1)
    if batch.rows <= needed:
        raise DataError(f"the table has {batch.rows} rows; at least {needed + 1} are needed for this model")
    structure.check_given(batch.mask)


def _numbers(mechanism: Mechanism) -> int:
    """How many rows a node's parameters need: one for each slope, one for each other parameter."""
    learned = {name: p for name, p in mechanism.declared().items() if p.learned}
    return sum(parameter.shape[0] if name == "weight" else 1 for name, parameter in learned.items())


def _all_discrete(structure: Structure) -> bool:
    return all(structure.mechanisms[node].space.is_discrete for node in structure.graph.observed)


def _status(trained: Trained, method: Method) -> Status:
    if trained.failed:
        return Status(
            False, "the loss became infinite or not a number; the last good parameters were kept",
            "look for outliers or a mechanism that does not fit its column, or try a smaller learning rate",
        )  # fmt: skip
    if trained.converged:
        reason = "the loss stopped changing" if method.optimiser == "lbfgs" else "the smoothed loss stopped falling"
        return Status(True, reason)
    if trained.steps < method.steps:
        return Status(False, f"a callback stopped the fit after {trained.steps} steps", "")
    return Status(False, f"the loss was still falling after {trained.steps} steps", "allow more steps in the method")
