"""Experiments by name: what ``otpdag reproduce`` can run.

A file in the repository's folder ``experiments`` registers a table or figure::

    from otpdag.cli.registry import Run, experiment


    @experiment("figure1", "Recovery of a mixture under a wrong model")
    def figure1(run: Run) -> None:
        rows = 200 if run.quick else 2000
        (run.folder / "figure1.csv").write_text(...)
"""

from __future__ import annotations

import importlib
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from otpdag.errors import ModelError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


EVERY = "*"


class Scale(StrEnum):
    """How large an experiment is: minutes on two cores, a few hours on them, or what the paper has.

    An experiment that ends at the paper's size within hours has that for both.
    """

    QUICK = "quick"
    HOURS = "hours"
    PAPER = "paper"


@dataclass(frozen=True)
class Run:
    """What an experiment is told: where results go, the seed, its size, and whether to go on with an earlier run.

    ``resume`` allows to use the parts that an interrupted run left in the folder; ``only`` is a pattern of the names of
    those parts that are made now if they are not there; ``jobs`` is how many are made at a time (-1: one for each core,
    or whatever the workers are that joblib has been told of).
    """

    folder: Path
    seed: int = 0
    scale: Scale = Scale.PAPER
    resume: bool = False
    only: str = EVERY
    jobs: int = 1

    @property
    def quick(self) -> bool:
        """Whether the small version is asked for."""
        return self.scale is Scale.QUICK

    def part(self, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        """A finished part of the run, from ``parts/NAME.csv`` if the run goes on and has it; made and kept otherwise.

        A part is whole or not there: it is written beside its place and then moved. A part that ``only`` leaves out is
        empty, so that the others can be put together without it.
        """
        from pandas import DataFrame, read_csv  # not needed by those who only ask for help

        path = self.folder / "parts" / f"{name}.csv"
        if not (self.resume and path.is_file()):
            if not fnmatchcase(name, self.only):
                return DataFrame()
            made = make()
            path.parent.mkdir(exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}")
            made.to_csv(unfinished, index=False)
            unfinished.replace(path)
        return read_csv(path)

    def parts(self, named: Iterable[tuple[str, Callable[[], pd.DataFrame]]]) -> list[pd.DataFrame]:
        """Several parts, by their names, as many at a time as there are jobs.

        Joblib runs them: in this process, in others of this machine, or where ``joblib.parallel_config`` says. Workers
        on other machines must see the same folder.
        """
        from joblib import Parallel, delayed

        made: list[pd.DataFrame] = Parallel(n_jobs=self.jobs)(delayed(self.part)(name, make) for name, make in named)
        return made

    def together(self, parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
        """The rows of all parts that there are."""
        from pandas import concat

        there = [part for part in parts if len(part)]
        if not there:
            raise ModelError(f"--only {self.only!r} names no part, and {self.folder} has none yet")
        return concat(there, ignore_index=True)


@dataclass(frozen=True)
class Page:
    """What an earlier run's data say: Markdown, and pictures by what they show."""

    text: str
    pictures: Mapping[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One table or figure; a resumable one keeps finished parts in its folder, and ``page`` tells what is in one."""

    name: str
    title: str
    run: Callable[[Run], None]
    resumable: bool = False
    page: Callable[[Path], Page] | None = None


_REGISTRY: dict[str, Experiment] = {}


def experiment(
    name: str, title: str, *, resumable: bool = False, page: Callable[[Path], Page] | None = None
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Register a function as the experiment ``name``; use it as a decorator.

    ``page`` draws what is in an earlier run's folder, for ``otpdag reproduce all --from FOLDER``.
    """

    def register(run: Callable[[Run], None]) -> Callable[[Run], None]:
        known = _REGISTRY.get(name)
        if known is not None and known.run.__module__ != run.__module__:
            raise ModelError(f"an experiment named {name!r} is registered already, by {known.run.__module__}")
        _REGISTRY[name] = Experiment(name, title, run, resumable, page)
        return run

    return register


def registered() -> dict[str, Experiment]:
    """All experiments by name."""
    return dict(sorted(_REGISTRY.items()))


def find_folder() -> Path | None:
    """The folder ``experiments`` of the checkout that the package runs from; code of no other folder is run unasked."""
    source = Path(__file__).resolve().parents[2]
    root = source.parent
    if source.name == "src" and _is_checkout(root) and (root / "experiments").is_dir():
        return root / "experiments"
    return None


def named_folder(folder: Path) -> Path:
    """The folder that a user names: a checkout, or its ``experiments``."""
    inner = folder / "experiments"
    chosen = (inner if inner.is_dir() else folder).resolve()
    if not chosen.is_dir():
        raise ModelError(f"--folder must be a folder; {str(folder)!r} is none")
    return chosen


def _is_checkout(root: Path) -> bool:
    """Whether a folder is this project's."""
    try:
        with (root / "pyproject.toml").open("rb") as file:
            return bool(tomllib.load(file).get("project", {}).get("name") == "otpdag")
    except (OSError, tomllib.TOMLDecodeError):
        return False


def discover(folder: Path) -> dict[str, str]:
    """Import every module of the folder; for those that cannot be imported, why."""
    root = str(folder.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    failed = {}
    for name in _modules(folder):
        try:
            importlib.import_module(f"{folder.name}.{name}")
        except ImportError as error:
            failed[name] = str(error)
    return failed


def _modules(folder: Path) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(("_", ".")):
            continue
        if path.suffix == ".py":
            yield path.stem
        elif (path / "__init__.py").is_file():
            yield path.name
