"""Mutants: single small changes of the code, each of which some test should notice.

``python -m benchmarks.mutants --seed S --number N`` draws mutants of the packages below, runs tests that enter the
changed function against each until the first failure, and lists the survivors; a test that fails without a change is an
error. Nothing on the disk is changed: a process with everything but this library imported forks once for each mutant,
and the child imports the changed module in place of the file. ``docs/decisions/0021-mutants.md`` says why.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import random
import re
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.tests_by_function import ROOMS, ROOT, SOURCE, TestsByFunction

__all__ = ["Mutant", "Result", "mutant_of", "number_of_mutants", "run_mutants", "sample", "tests_of"]

SECONDS = 600.0
"""After so long a mutant is given up, and counts neither as noticed nor as a survivor."""
TIME = "time"
MOST_SECONDS = 60.0
"""Of tests that are run against a mutant, when nothing else runs on the machine."""
MOST_FILES = 6
"""Test files that are run against a mutant of a function that no known test enters."""
DEFAULTS = "tests/test_defaults.py"
"""What is done if nothing is said: every mutant meets it, for a default belongs to no function that a test enters."""
PASSED = "passed"


# --- changes ----------------------------------------------------------------------------------------------------------

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
GUARD = 1e-9
"""Numbers below this size keep a division or a logarithm finite: twice as much of them changes no digit of a result."""
SMALL = 1e-3
"""Numbers below this are tolerances and ridges: twice as much changes no digit that counts, a thousand times does."""
DROPPED_CALLS = frozenset({"abs", "clamp", "flip", "sort", "exp", "log", "sqrt", "square", "mean", "detach", "maximum"})
"""Methods without which the value has the same shape, or nearly: ``x.clamp(...)`` becomes ``x``."""


@dataclass(frozen=True)
class Mutant:
    """A change: of which file, at which line, in which function, what became what, and the whole changed module."""

    path: Path
    line: int
    function: str
    change: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """The name of the changed module."""
        parts = self.path.relative_to(SOURCE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def __str__(self) -> str:
        return f"{self.path.relative_to(SOURCE)}:{self.line}: {self.change}"


def mutant_of(path: Path, number: int) -> Mutant:
    """One of the mutants of a file.

    >>> mutant_of(SOURCE / "objective" / "settings.py", 0).module
    'otpdag.objective.settings'
    """
    tree = ast.parse(path.read_text())
    place = next(one for at, one in enumerate(_places(tree)) if at == number)
    before, line = ast.unparse(place.node), place.node.lineno
    function = _function_at(tree, line)
    place.apply()
    ast.fix_missing_locations(tree)
    return Mutant(path, line, function, f"{_short(before)} -> {_short(ast.unparse(place.changed))}", tree)


def number_of_mutants(path: Path) -> int:
    """How many mutants a file has."""
    return sum(1 for _ in _places(ast.parse(path.read_text())))


def _function_at(tree: ast.Module, line: int) -> str:
    """The function or class around a line, as ``Class.method``; empty at the level of the module."""
    names: list[str] = []
    inside: Sequence[ast.stmt] = tree.body
    while here := [
        node
        for node in inside
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.lineno <= line <= (node.end_lineno or line)
    ]:
        names.append(here[0].name)
        inside = here[0].body if isinstance(here[0], ast.ClassDef) else []
    return ".".join(names)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass
class _Place:
    """A node, where it hangs, and what shall hang there."""

    holder: ast.AST
    field: str
    at: int | None
    node: ast.expr | ast.stmt
    changed: ast.expr | ast.stmt

    def apply(self) -> None:
        if self.at is None:
            setattr(self.holder, self.field, self.changed)
        else:
            getattr(self.holder, self.field)[self.at] = self.changed


def _places(tree: ast.AST) -> Iterator[_Place]:
    """Every place where something can be changed; not in annotations, messages and texts."""
    for holder in _relevant(tree):
        for field, value in ast.iter_fields(holder):
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for at, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(node, ast.expr | ast.stmt):
                    for changed in _changes(node):
                        yield _Place(holder, field, at, node, changed)


def _relevant(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those in which a change means nothing: errors and their texts, annotations, ``__all__``."""
    waiting = [tree]
    while waiting:
        node = waiting.pop(0)
        yield node
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _is_left_out(child):
                    waiting.append(child)


def _is_left_out(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__"):
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return True  # of zip: another guard against our own bugs
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
        return "RuntimeError" in ast.unparse(node.body[0])  # guards against our own bugs: nothing can reach them
    targets = node.targets if isinstance(node, ast.Assign) else []
    if any(ast.unparse(target) == "__all__" for target in targets):
        return True
    return isinstance(node, ast.AnnAssign) and "ClassVar" in ast.unparse(node.annotation)


def _changes(node: ast.expr | ast.stmt) -> Iterator[ast.expr | ast.stmt]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node):
        yield ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        if not isinstance(node.operand, ast.Constant):  # -1 becomes -2 below; as an axis 1 would often be the same
            yield node.operand
    elif isinstance(node, ast.Constant):
        yield from _changed_constants(node)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Call):
        yield from _changed_calls(node)
    elif isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()
    elif isinstance(node, ast.Break):
        yield ast.Continue()


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )


def _changed_constants(node: ast.Constant) -> Iterator[ast.expr]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    elif isinstance(node.value, float) and not 0 < node.value < GUARD:
        yield ast.Constant((1000 if node.value < SMALL else 2) * node.value if node.value else 1.0)


def _changed_calls(node: ast.Call) -> Iterator[ast.expr]:
    if isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED_CALLS:
        inner = node.func.value
        if isinstance(inner, ast.Name) and inner.id in ("torch", "np", "math"):
            if len(node.args) == 1:
                yield node.args[0]
        elif not _is_guard(node):
            yield inner


def _is_guard(node: ast.Call) -> bool:
    """Is this ``x.clamp(min=tiny)``?"""
    bounds = [*node.args, *(keyword.value for keyword in node.keywords)]
    return node.func.attr == "clamp" and len(bounds) == 1 and _is_tiny(bounds[0])  # type: ignore[attr-defined]


def _is_tiny(bound: ast.expr) -> bool:
    if isinstance(bound, ast.Constant) and isinstance(bound.value, float):
        return 0 < bound.value < GUARD
    return isinstance(bound, ast.Attribute) and bound.attr in ("tiny", "eps")


# --- tests ------------------------------------------------------------------------------------------------------------


def tests_of(mutant: Mutant, known: TestsByFunction) -> list[str]:
    """The tests that enter the changed function: those that mirror its module, then the quickest, up to a minute.

    Files that mirror the module are run as a whole where they are quick, tests that are not yet known among them.
    Without any test, whole files: those that mirror the module or import from it.
    """
    mirrors = [str(file.relative_to(ROOT)) for file in _mirrors(mutant.path)]
    mirrors = [*mirrors, str(mutant.path.relative_to(ROOT))]  # its own doctests
    whole = [file for file in mirrors if known.seconds_of(file) < MOST_SECONDS / 2]
    chosen, seconds = list(whole), sum(map(known.seconds_of, whole))
    tests = known.of(str(mutant.path.relative_to(SOURCE)), mutant.function)
    for name, took in sorted(tests, key=lambda test: test[0].partition("::")[0] not in mirrors):
        file = name.partition("::")[0]
        if file not in whole and (ROOT / file).exists() and seconds + took < MOST_SECONDS:
            chosen.append(name)
            seconds += took
    if not tests:
        chosen = [str(file.relative_to(ROOT)) for file in _files_of(mutant.path)]
    return [*chosen, *([DEFAULTS] if DEFAULTS not in chosen else [])]


def _mirrors(path: Path) -> list[Path]:
    inside = path.relative_to(SOURCE)
    return sorted((ROOT / "tests" / inside.parent).rglob(f"test_{inside.stem}*.py"))


def _files_of(path: Path) -> list[Path]:
    inside = path.relative_to(SOURCE)
    folder = ROOT / "tests" / inside.parent
    while not folder.is_dir():
        folder = folder.parent
    module = ".".join(("otpdag", *inside.with_suffix("").parts))
    every = sorted((ROOT / "tests").rglob("test_*.py"))
    imported = [file for file in every if re.search(rf"\b{re.escape(module)}\b", file.read_text())]
    chosen = list(dict.fromkeys([*_mirrors(path), *imported]))
    return (chosen or sorted(folder.glob("test_*.py")))[:MOST_FILES]


# --- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What became of a sample."""

    killed: int
    survivors: list[str]

    @property
    def judged(self) -> int:
        """All mutants of the sample."""
        return self.killed + len(self.survivors)

    @property
    def killed_share(self) -> float:
        """The share that a test noticed."""
        return self.killed / self.judged


def run_mutants(seed: int, many: int, packages: Sequence[str] = ROOMS) -> Result:
    """Judge a random sample of mutants, as many of each package."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=_serve, args=(there,))
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MPLBACKEND")}
    os.environ |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    try:
        server.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    known = TestsByFunction.read()
    killed, survivors = 0, []
    try:
        for mutant in sample(seed, many, packages):
            began = time.monotonic()
            here.send((mutant.module, ast.unparse(mutant.tree), tests_of(mutant, known)))
            noticed = here.recv()
            if isinstance(noticed, RuntimeError):
                raise noticed
            word = {None: "SURVIVED", TIME: "no end"}.get(noticed, f"killed by {noticed}")
            print(f"{mutant}: {word} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
            survivors += [str(mutant)] if noticed is None else []
            killed += noticed not in (None, TIME)
    finally:
        here.close()
        server.kill()
        server.join()
    return Result(killed, survivors)


def sample(seed: int, many: int, packages: Sequence[str] = ROOMS) -> list[Mutant]:
    """Draw mutants, of the packages in turn."""
    chance = random.Random(seed)
    pools = {
        name: [(path, n) for path in sorted((SOURCE / name).rglob("*.py")) for n in range(number_of_mutants(path))]
        for name in packages
    }
    for pool in pools.values():
        chance.shuffle(pool)
    return [mutant_of(*pools[packages[number % len(packages)]].pop()) for number in range(many)]


def _serve(requests: Connection) -> None:
    """Import everything but the library, then fork for each mutant."""
    import matplotlib.pyplot
    import networkx
    import ot
    import pandas
    import pytest
    import scipy.optimize
    import scipy.stats
    import sklearn.mixture
    import torch
    import typer.testing

    _ = (matplotlib, networkx, ot, pandas, pytest, scipy, sklearn, typer)  # pytest's plugins it imports itself
    torch.set_num_threads(1)
    for name in [name for name in sys.modules if name.split(".")[0] in ("otpdag", "benchmarks")]:
        del sys.modules[name]
    sound: set[str] = set()
    with contextlib.suppress(EOFError):
        while True:
            module, source, files = requests.recv()
            noticed = _noticed_by(module, source, files)
            if noticed not in (None, TIME) and noticed not in sound:
                if _noticed_by(module, None, [noticed]) is not None:
                    requests.send(RuntimeError(f"{noticed} fails without any change"))
                    continue
                sound.add(noticed)
            requests.send(noticed)


def _noticed_by(module: str, source: str | None, tests: Sequence[str]) -> str | None:
    """The first test that fails with a changed module (or an unchanged one), or TIME; None if none does."""
    answers, answer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()  # what the tests start goes with them
        os.write(answer, _tested(module, source, tests).encode())
        os._exit(0)
    os.close(answer)
    ended, _, _ = select.select([answers], [], [], SECONDS)
    told = os.read(answers, 4096).decode() if ended else ""
    os.close(answers)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not ended:
        return TIME
    return None if told == PASSED else told or "crash"


def _tested(module: str, source: str | None, tests: Sequence[str]) -> str:
    """Run the tests with a changed module; the first that fails."""
    import pytest

    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    os.chdir(ROOT)
    sys.path.insert(0, str(SOURCE.parent))
    if source is not None:
        sys.meta_path.insert(0, _Changed(module, source))
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "--no-header"]
    options += ["--assert=plain"]  # pytest would rewrite, and so read from the disk, a module whose doctests it runs
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    first = _FirstFailure()
    try:
        code = int(pytest.main([*options, *files], plugins=[first, _Chosen(tests)]))
    except BaseException:
        return first.name or tests[0]
    return PASSED if code in (0, 5) else first.name or tests[0]  # 5: none of them is there any more


class _Chosen:
    """A plugin of pytest that runs some tests of the files only, in the order in which they are given."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.place = {name: at for at, name in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        chosen = [(self._place_of(one.nodeid), one) for one in items]
        items[:] = [one for place, one in sorted(chosen, key=lambda pair: pair[0]) if place < len(self.place)]

    def _place_of(self, name: str) -> int:
        """Of the test, or of its file if that is wanted as a whole."""
        return self.place.get(name, self.place.get(name.partition("::")[0], len(self.place)))


class _FirstFailure:
    """A plugin of pytest that remembers what failed first."""

    name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.name = self.name or (report.nodeid if report.failed else "")

    def pytest_collectreport(self, report: Any) -> None:
        self.name = self.name or (report.nodeid if report.failed else "")


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module another source."""

    def __init__(self, module: str, source: str) -> None:
        self.module, self.source = module, source

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.module:
            return None
        file = SOURCE.parent.joinpath(*name.split(".")).with_suffix(".py")
        return importlib.util.spec_from_file_location(name, file, loader=self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.source, str(module.__file__), "exec"), module.__dict__)


def main() -> None:
    """Draw, run, and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--package", action="append", help=f"one of {', '.join(ROOMS)}; may be repeated")
    options = parser.parse_args()
    result = run_mutants(options.seed, options.number, options.package or ROOMS)
    print(json.dumps({"killed": result.killed_share, "of": result.judged, "survivors": result.survivors}, indent=1))


if __name__ == "__main__":
    main()
