"""Fits in a process of their own: processor time by one thread and peak memory; each study is done once."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

import otpdag as otp
from benchmarks.child import Done, in_child
from benchmarks.harness import Skip
from otpdag import mechanisms as m
from otpdag.datasets import Truth

T = TypeVar("T")
Build = Callable[[], "otp.Model"]

FIRST_SECONDS, FURTHER_SECONDS = 60.0, 20.0  # of wall clock that a child's first fit may take, and each other one


@dataclass(frozen=True)
class Task:
    """One fit: how the model is declared, the table, the seed, and further arguments of ``otp.fit``."""

    build: Build
    frame: pd.DataFrame
    seed: int
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Fitted:
    """Parameters, processor seconds and the status of one fit."""

    params: Truth
    seconds: float
    status: str


def fit_all(tasks: Sequence[Task], warm: Task) -> list[Fitted]:
    """Run fits one after another; before them a small one that pays for imports and caches and is not counted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otp.ConvergenceWarning)
        warnings.simplefilter("ignore", otp.ApproximationWarning)
        _fit(warm)
        return [_fit(task) for task in tasks]


def _fit(task: Task) -> Fitted:
    model = task.build()
    begin = time.process_time()
    result = otp.fit(model, task.frame, seed=task.seed, **dict(task.options))
    seconds = time.process_time() - begin
    if result.rows_used != len(task.frame):
        raise ValueError(f"a fit must use all {len(task.frame)} rows; it used {result.rows_used}")
    return Fitted(model.params(), seconds, str(result.status))


def ours(tasks: Sequence[Task], warm: Task, first_seconds: float = FIRST_SECONDS) -> Done[list[Fitted]]:
    """Run fits in one child."""
    seconds = first_seconds + FURTHER_SECONDS * (len(tasks) - 1)
    return in_child(partial(fit_all, tasks, warm), seconds=seconds)


def remembered(study: Callable[..., T]) -> Callable[..., T]:
    """Do a study once, for all cases that read it; if it fails, all of them fail by the same error."""

    @cache
    def once(*arguments: Any) -> T | Exception:
        try:
            return study(*arguments)
        except Skip:
            raise
        except Exception as error:  # raised again by every reader
            return error

    @wraps(study)
    def read(*arguments: Any) -> T:
        outcome = once(*arguments)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return read


def logit_slopes(table: pd.DataFrame) -> NDArray[np.float64]:
    """Slopes of the binary column ``y`` in all other columns, which are normal; peers are not imported here."""
    names = [name for name in table if name != "y"]
    nodes = {**dict.fromkeys(names, m.Normal()), "y": m.Bernoulli()}
    result = otp.fit(otp.Model(otp.Graph([(name, "y") for name in names]), nodes), table, progress=False)
    weight = result.model.params()["y"]["weight"]
    return np.asarray(weight[:, 1] - weight[:, 0]).ravel()
