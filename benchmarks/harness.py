"""What all benchmarks share: cases, random streams, timing, failures and the report.

A benchmark is a module of this folder with a docstring and ``CASES``, a dictionary from names to functions. A
case takes the :class:`Settings` and returns the fields of its record; ``ratio`` is the limited figure,
smaller is better.
"""

import contextlib
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

METHODS = ("auto", "transport", "paper")

T = TypeVar("T")
Record = dict[str, Any]


class Skip(Exception):
    """Raised by a case that cannot run here; the message says what it needs."""


@dataclass(frozen=True)
class Settings:
    """How a benchmark is run.

    Attributes:
        seed: The seed from which all streams derive.
        repeats: How many data sets a case draws.
        methods: The methods to run. The first gives ``ratio``, each other one ``ratio_<method>``.
    """

    seed: int = 0
    repeats: int = 5
    methods: tuple[str, ...] = METHODS


Case = Callable[[Settings], Record]


@dataclass(frozen=True)
class Streams:
    """The random streams of one data set: what one consumer draws does not change what another one gets."""

    data: np.random.Generator
    missing: np.random.Generator
    oracle: int
    fit: int


def streams(seed: int, problem: str, repeat: int) -> Streams:
    """Derive the streams from seed, problem and number; no other problem or number has any influence."""
    root = np.random.SeedSequence([seed, zlib.crc32(problem.encode())], spawn_key=(repeat,))
    data, missing, oracle, fit = root.spawn(4)
    return Streams(
        data=np.random.default_rng(data),
        missing=np.random.default_rng(missing),
        oracle=int(oracle.generate_state(1)[0] // 2),
        fit=int(fit.generate_state(1)[0] // 2),
    )


@dataclass(frozen=True)
class Outcome:
    """One figure and the time that it took."""

    value: float
    seconds: float


def timed(function: Callable[[], T], clock: Callable[[], float] = time.perf_counter) -> tuple[T, float]:
    """Call a function; return its result and the seconds that it took."""
    begin = clock()
    result = function()
    return result, clock() - begin


def attempt(function: Callable[[], Record]) -> Record:
    """Call a function; if it fails, print where and return a record that says why."""
    try:
        return function()
    except Skip:
        raise
    except Exception as error:  # one failure is reported and must not hide the other figures
        traceback.print_exc(file=sys.stderr)
        return {"ratio": None, "error": f"{type(error).__name__}: {error}"}


def summary(name: str, outcomes: Sequence[Outcome]) -> Record:
    """Mean, standard deviation and each value of a figure, and its mean time."""
    values = [outcome.value for outcome in outcomes]
    if not np.isfinite(values).all():
        raise FloatingPointError(f"the figures of {name!r} must be finite; got {values}")
    seconds = "seconds" if name == "ours" else f"{name}_seconds"
    return {
        name: float(np.mean(values)),
        f"{name}_std": float(np.std(values)),
        f"{name}_each": values,
        seconds: float(np.mean([outcome.seconds for outcome in outcomes])),
    }


def by_method(settings: Settings, measure: Callable[[str], Record]) -> Record:
    """Collect the fields that each method gives: the first one's as they are, others' with its name appended.

    A method that fails leaves ``ratio`` (with its suffix) empty and says why in ``error`` (with its suffix).
    """
    record: Record = {"method": settings.methods[0]}
    for method in settings.methods:
        suffix = "" if method == settings.methods[0] else f"_{method}"
        fields = attempt(partial(measure, method))
        record |= {f"{name}{suffix}": value for name, value in fields.items()}
    return record


def run(benchmark: str, cases: Mapping[str, Case], settings: Settings) -> Record:
    """Run the cases one after another and return the report; all that they print goes to standard error."""
    records = [_run_case(f"{benchmark} {name}", name, case, settings) for name, case in cases.items()]
    return {"benchmark": benchmark, "seed": settings.seed, "repeats": settings.repeats, "cases": records}


def _run_case(title: str, name: str, case: Case, settings: Settings) -> Record:
    print(f"{title} ...", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        try:
            record = {"case": name} | attempt(partial(case, settings))
        except Skip as reason:
            record = {"case": name, "skipped": str(reason)}
    print(f"{title}: {headline(record)} ({time.perf_counter() - begin:.1f} s)", file=sys.stderr, flush=True)
    return record


def headline(record: Record) -> str:
    """What became of a case, in a few words."""
    if "skipped" in record:
        return f"skipped, {record['skipped']}"
    return f"failed, {record['error']}" if "error" in record else f"ratio {record['ratio']:.3g}"


def failed(report: Record) -> bool:
    """Whether any case, or any method of a case, failed."""
    return any(name.startswith("error") for record in report["cases"] for name in record)
