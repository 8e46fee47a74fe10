"""Tests run against mutants: in forks of one process that has collected all tests once.

Nothing on the disk is changed. Where a mutant differs inside of functions, the fork puts the changed code into these
functions, wherever they are already known, and runs the tests that it was asked for. Where a module or a class differs
in its own statements (constants, defaults), a fork of another process, in which everything but the library is imported,
imports the changed module in place of the file.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import resource
import select
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from benchmarks.tests_by_function import ROOT, SOURCE

__all__ = ["TIME", "Request", "Runner", "changed_functions"]

SECONDS = 600.0
"""After so long a mutant is given up, and counts neither as noticed nor as a survivor."""
MOST_MEMORY = 8 << 30
"""Of a fork, in bytes: a mutant that asks for more gets an error, before the machine has none left."""
TIME, CRASH = "time", "crash"
PASSED = "passed"
UNKNOWN = "unknown"
OPTIONS = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "--no-header", "--assert=plain"]
"""Of pytest. Plain assertions: it would rewrite, and so read from the disk, a module whose doctests it runs."""
CLASS_BODY = 0x1
"""The flag that the code of a function has and that of a class body lacks: its names are numbered."""


class Request(NamedTuple):
    """A changed module, or an unchanged one, and the tests or files of tests to run."""

    path: Path
    tree: ast.Module | None
    tests: Sequence[str]


class Runner:
    """Runs tests against mutants; a context, in which its two processes are started when they are needed."""

    def __init__(self) -> None:
        self._servers: dict[str, tuple[BaseProcess, Connection]] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self._servers.values():
            connection.close()
            process.kill()
            process.join()

    def noticed_by(self, request: Request) -> str | None:
        """The first test that fails, :data:`TIME` if there is no end, or None if all pass.

        Raises:
            RuntimeError: If that test fails without any change, too.
        """
        quick = self._ask("collected", _serve_collected, request)
        noticed = self._ask("fresh", _serve_fresh, request) if isinstance(quick, NotImplementedError) else quick
        if isinstance(noticed, Exception):
            raise noticed
        return noticed

    def _ask(self, name: str, serve: Callable[[Connection], None], request: Request) -> Any:
        if name not in self._servers:
            self._servers[name] = _started(serve)
        _, connection = self._servers[name]
        connection.send(request)
        return connection.recv()


def _started(serve: Callable[[Connection], None]) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,))
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MPLBACKEND")}
    os.environ |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    try:
        process.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    return process, here


def _answer_all(requests: Connection, run: Callable[[Request], str]) -> None:
    """Fork for each request; a test that fails must pass without the change."""
    sound: set[str] = set()
    with contextlib.suppress(EOFError):
        while True:
            request = requests.recv()
            noticed = _in_a_fork(run, request)
            if noticed == UNKNOWN:
                requests.send(NotImplementedError())
                continue
            if noticed is not None and noticed not in (TIME, CRASH, *sound):
                if _in_a_fork(run, Request(request.path, None, [noticed])) is not None:
                    requests.send(RuntimeError(f"{noticed} fails without any change"))
                    continue
                sound.add(noticed)
            requests.send(noticed)


def _in_a_fork(run: Callable[[Request], str], request: Request) -> str | None:
    answers, answer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()  # what the tests start goes with them
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))  # a browser reserves far more than it uses
        os.write(answer, run(request).encode())
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
    return None if told == PASSED else told or CRASH


def _prepare() -> None:
    """Be silent, and at home."""
    import torch

    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    os.chdir(ROOT)
    sys.path.insert(0, str(SOURCE.parent))


# --- with all tests collected -----------------------------------------------------------------------------------------


def _serve_collected(requests: Connection) -> None:
    import pytest

    _prepare()
    first = _FirstFailure()
    collected = _Collected(requests, first)
    pytest.main([*OPTIONS, "--continue-on-collection-errors"], plugins=[first, collected])
    with contextlib.suppress(OSError):
        requests.send(RuntimeError(f"the tests could not be collected: {first.name} {collected.error}"))


class _Collected:
    """A plugin of pytest that answers requests in place of running what was collected."""

    def __init__(self, requests: Connection, first: _FirstFailure) -> None:
        self.requests, self.first = requests, first
        self.error = ""

    def pytest_internalerror(self, excrepr: Any) -> None:
        self.error = str(excrepr)

    def pytest_runtestloop(self, session: Any) -> bool:
        self.first.name = ""
        functions = _known_functions()
        _answer_all(self.requests, lambda request: self._run(session, functions, request))
        return True

    def _run(self, session: Any, functions: dict[tuple[str, str, int], list[FunctionType]], request: Request) -> str:
        if request.tree is not None:
            changed = changed_functions(request.path, request.tree)
            if changed is None or any(key not in functions for key in changed):
                return UNKNOWN
            for key, code in changed.items():
                for function in functions[key]:
                    function.__code__ = code
        items = _Chosen(request.tests).of(session.items)
        for item, following in zip(items, [*items[1:], None], strict=True):
            try:
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            except BaseException:
                return self.first.name or item.nodeid
            if self.first.name:
                return self.first.name
        return PASSED


def _known_functions() -> dict[tuple[str, str, int], list[FunctionType]]:
    """The functions of the library that are in memory, by file, name and line."""
    known = defaultdict(list)
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename.startswith(str(SOURCE)):
            known[_key(one.__code__)].append(one)
    return dict(known)


def _key(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def changed_functions(path: Path, tree: ast.Module) -> dict[tuple[str, str, int], CodeType] | None:
    """The functions of a file that are others in a changed module; None if it differs outside of functions.

    >>> path = SOURCE / "errors.py"
    >>> changed_functions(path, ast.parse(path.read_text()))
    {}
    """
    before, after = (compile(one, str(path), "exec") for one in (ast.parse(path.read_text()), tree))
    pairs = list(_pairs(before, after))
    if any(_own(one) != _own(other) for one, other in pairs if not one.co_flags & CLASS_BODY):
        return None
    changed = [(one, other) for one, other in pairs if one.co_flags & CLASS_BODY and one != other]
    found = {_key(one): other for one, other in changed}
    return found if len(found) == len(changed) else None


def _pairs(before: CodeType, after: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """A module's own code, its class bodies and its functions, but not what is defined in these."""
    yield before, after
    if not before.co_flags & CLASS_BODY:
        inside = [[one for one in code.co_consts if isinstance(one, CodeType)] for code in (before, after)]
        for one, other in zip(*inside, strict=True):
            yield from _pairs(one, other)


def _own(code: CodeType) -> tuple[Any, ...]:
    """What a module or class does itself."""
    values = [(type(one), one) for one in code.co_consts if not isinstance(one, CodeType)]
    return code.co_code, values, code.co_names


class _Chosen:
    """A plugin of pytest that runs some tests of the files only, in the order in which they are given."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.place = {name: at for at, name in enumerate(tests)}

    def of(self, items: list[Any]) -> list[Any]:
        """The chosen ones."""
        chosen = [(self._place_of(one.nodeid), one) for one in items]
        return [one for place, one in sorted(chosen, key=lambda pair: pair[0]) if place < len(self.place)]

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = self.of(items)

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


# --- with a module imported anew --------------------------------------------------------------------------------------


def _serve_fresh(requests: Connection) -> None:
    """Import everything but the library."""
    import matplotlib.pyplot
    import networkx
    import ot
    import pandas
    import pytest
    import scipy.optimize
    import scipy.stats
    import sklearn.mixture
    import typer.testing

    _ = (matplotlib, networkx, ot, pandas, pytest, scipy, sklearn, typer)  # pytest's plugins it imports itself
    for name in [name for name in sys.modules if name.split(".")[0] in ("otpdag", "benchmarks")]:
        del sys.modules[name]
    _prepare()
    _answer_all(requests, _run_fresh)


def _run_fresh(request: Request) -> str:
    """Run the tests with a changed module; the first that fails."""
    import pytest

    if request.tree is not None:
        parts = request.path.relative_to(SOURCE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sys.meta_path.insert(0, _Changed(module, request.path, request.tree))
    files = list(dict.fromkeys(test.partition("::")[0] for test in request.tests))
    first = _FirstFailure()
    try:
        code = int(pytest.main(["-x", *OPTIONS, *files], plugins=[first, _Chosen(request.tests)]))
    except BaseException:
        return first.name or request.tests[0]
    return PASSED if code in (0, 5) else first.name or request.tests[0]  # 5: none of them is there any more


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module another content."""

    def __init__(self, module: str, path: Path, tree: ast.Module) -> None:
        self.module, self.path, self.tree = module, path, tree

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.module:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.tree, str(module.__file__), "exec"), module.__dict__)
