"""Mutants: single small changes of the code, each of which some test should notice.

``python -m benchmarks.mutants --seed S --number N`` draws mutants of the packages below, runs tests that enter the
changed function against each until the first failure, and lists the survivors; a test that fails without a change is an
error. :mod:`benchmarks.mutant_runs` runs them; note 0021 in ``docs/archive`` says why this tool is our own.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from benchmarks.mutant_runs import TIME, Request, Runner
from benchmarks.tests_by_function import ROOMS, ROOT, SOURCE, TestsByFunction

__all__ = ["Mutant", "Result", "mutant_of", "number_of_mutants", "run_mutants", "sample", "tests_of"]

MOST_SECONDS = 60.0
"""Of tests that are run against a mutant, when nothing else runs on the machine."""
MOST_FILES = 6
"""Test files that are run against a mutant of a function that no known test enters."""
DEFAULTS = "tests/test_defaults.py"
"""What is done if nothing is said: every mutant meets it, for a default belongs to no function that a test enters."""


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
NOT_RESULTS = ("strict", "repr", "stacklevel")
"""Arguments that change no result: ``zip(strict=)``, a guard against our own bugs, what a field shows of itself, the
line that a warning names."""
SEEDS_AND_THREADS = ("manual_seed", "default_rng", "SeedSequence", "at_work", "set_num_threads")
"""Calls whose arguments are left alone: any seed is as good as another, and so is any number of threads."""


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

    >>> mutant_of(SOURCE / "settings.py", 0).module
    'otpdag.settings'
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
                    waiting.append(child.func if _is_of_seeds_or_threads(child) else child)


def _is_of_seeds_or_threads(node: ast.AST) -> TypeGuard[ast.Call]:
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in SEEDS_AND_THREADS


def _is_left_out(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__"):
        return True
    if isinstance(node, ast.keyword) and node.arg in NOT_RESULTS:
        return True
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


def tests_of(
    mutant: Mutant,
    known: TestsByFunction,
    most_seconds: float = MOST_SECONDS,  # noqa: PT028 - it is no test
) -> list[str]:
    """The tests that enter the changed function: those that mirror its module, then the quickest, up to a minute.

    Files that mirror the module are run as a whole where they are quick, tests that are not yet known among them. What
    is left of the minute is for tests that enter other functions of the module: a line is run by many tests, of which
    few are noted, and what one of them asks of another function may depend on it. Without any test, whole files: those
    that mirror the module or import from it.
    """
    mirrors = [str(file.relative_to(ROOT)) for file in _mirrors(mutant.path)]
    mirrors = [*mirrors, str(mutant.path.relative_to(ROOT))]  # its own doctests
    whole = [file for file in mirrors if known.seconds_of(file) < most_seconds / 2]
    chosen, seconds = list(whole), sum(map(known.seconds_of, whole))
    inside = str(mutant.path.relative_to(SOURCE))
    tests = known.of(inside, mutant.function)
    others = [test for test in known.of(inside, "") if test not in tests]
    for name, took in [*sorted(tests, key=lambda test: test[0].partition("::")[0] not in mirrors), *others]:
        file = name.partition("::")[0]
        if file not in whole and (ROOT / file).exists() and seconds + took < most_seconds:
            chosen.append(name)
            seconds += took
    if not tests:
        chosen = [str(file.relative_to(ROOT)) for file in _files_of(mutant.path)]
    return [*chosen, *([DEFAULTS] if DEFAULTS not in chosen else [])]


def _mirrors(path: Path) -> list[Path]:
    inside = path.relative_to(SOURCE)
    return sorted((ROOT / "tests" / inside.parts[0]).rglob(f"test_{inside.stem}*.py"))


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


def run_mutants(seed: int, many: int, parts: Sequence[str] = ROOMS, most_seconds: float = MOST_SECONDS) -> Result:
    """Judge a random sample of mutants, as many of each part (a package, or a module as a path inside the library)."""
    known = TestsByFunction.read()
    killed, survivors = 0, []
    with Runner() as runner:
        for mutant in sample(seed, many, parts):
            began = time.monotonic()
            noticed = runner.noticed_by(Request(mutant.path, mutant.tree, tests_of(mutant, known, most_seconds)))
            word = {None: "SURVIVED", TIME: "no end"}.get(noticed, f"killed by {noticed}")
            print(f"{mutant}: {word} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
            survivors += [str(mutant)] if noticed is None else []
            killed += noticed not in (None, TIME)
    return Result(killed, survivors)


def sample(seed: int, many: int, parts: Sequence[str] = ROOMS) -> list[Mutant]:
    """Draw mutants, of the parts in turn; fewer where there are no more."""
    chance = random.Random(seed)
    pools = [[(path, n) for path in _files(part) for n in range(number_of_mutants(path))] for part in parts]
    for pool in pools:
        chance.shuffle(pool)
    turns = [pools[number % len(pools)] for number in range(min(many, len(pools) * max(map(len, pools))))]
    return [mutant_of(*pool.pop()) for pool in turns if pool]


def _files(part: str) -> list[Path]:
    return [SOURCE / part] if part.endswith(".py") else sorted((SOURCE / part).rglob("*.py"))


def main() -> None:
    """Draw, run, and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument(
        "--part",
        action="append",
        help=f"one of {', '.join(ROOMS)}, or a module as answers/queries.py; may be repeated",
    )
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS, help="of the tests that meet each mutant")
    options = parser.parse_args()
    result = run_mutants(options.seed, options.number, options.part or ROOMS, options.seconds)
    print(json.dumps({"killed": result.killed_share, "of": result.judged, "survivors": result.survivors}, indent=1))


if __name__ == "__main__":
    main()
