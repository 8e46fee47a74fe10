"""Which tests run which function of the library, and how long they take.

``python -m benchmarks.tests_by_function`` runs the tests once, notes every function that each of them enters, and
writes ``tests_by_function.json`` beside this file; with names of test files it runs these, and renews what is known of
them. :mod:`benchmarks.mutants` reads it to try the right tests first. It is a guide, not a record: where it is old,
tests that are gone are left out, and new functions have their module's.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

import pytest

__all__ = ["FILE", "ROOMS", "TestsByFunction", "record"]

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "otpdag"
ROOMS = ("engine", "likelihood", "answers", "mechanisms", "matching")
"""The packages of the library whose functions are noted: fitting, answers and uncertainty."""
FILE = Path(__file__).with_suffix(".json")
MOST_MIRRORS, MOST_FOR_A_LINE, MOST_THOROUGH = 40, 16, 8
"""Tests of each function that are kept: of the file that mirrors its module, of those that run each of its lines the
quickest of so many that differ by more than their parameters, and the longest of all others."""
THOROUGH = 4.0
"""Seconds of the longest of these."""
MOST_ALIKE = 12
"""Of the tests of a function, those that differ only in their parameters."""
MOST_CALLS = 20
"""Of a function in a test whose lines are noted: a line that only later calls run is rare, and noting takes time."""


Line: TypeAlias = tuple[str, int]
"""``path:Class.method`` and the number of a line in it."""


class TestsByFunction:
    """For each function of a file, tests that enter it and their seconds, the quickest first."""

    __test__ = False

    def __init__(self, tests: list[tuple[str, float]], functions: dict[str, dict[str, list[int]]]) -> None:
        self._tests, self._functions = tests, functions

    @classmethod
    def read(cls, file: Path = FILE) -> TestsByFunction:
        """Read the file; one that is not there has no tests."""
        if not file.exists():
            return cls([], {})
        content = json.loads(file.read_text())
        return cls([(name, float(seconds)) for name, seconds in content["tests"]], content["functions"])

    def of(self, path: str, function: str) -> list[tuple[str, float]]:
        """Tests of a function (``Class.method``), or of a class, or, with an empty or unknown name, of a whole file."""
        own = self._functions.get(path, {})
        near = [name for name in own if name == function] or [name for name in own if name.startswith(f"{function}.")]
        numbers = {number for name in near or own for number in own[name]}
        return sorted((self._tests[number] for number in numbers), key=lambda test: (test[1], test[0]))

    def seconds_of(self, file: str) -> float:
        """What the known tests of a file take together."""
        return sum(seconds for name, seconds in self._tests if name.startswith(f"{file}::"))


class _Recorder:
    """A plugin of pytest that notes what each test enters.

    What a file's fixtures enter counts for those of its tests that enter nothing themselves: they look at a result.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds: dict[str, float] = defaultdict(float)
        self.entered: dict[str, set[Line]] = defaultdict(set)
        self.prepared: dict[str, set[Line]] = defaultdict(set)
        self.failed: set[str] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        yield from self._watched(item, self.prepared[item.nodeid.partition("::")[0]])

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        yield from self._watched(item, self.entered[item.nodeid])

    def _watched(self, item: pytest.Item, lines: set[Line]) -> Iterator[None]:
        seen: dict[CodeType, set[int]] = {}
        calls: Counter[CodeType] = Counter()

        def note_lines(frame: FrameType, event: str, value: Any) -> Any:
            seen[frame.f_code].add(frame.f_lineno)
            return note_lines

        def note(frame: FrameType, event: str, value: Any) -> Any:
            code = frame.f_code
            calls[code] += 1
            if calls[code] > MOST_CALLS or not _name_of(code):
                return None
            seen.setdefault(code, set())
            return note_lines

        began = time.process_time()
        sys.settrace(note)
        yield
        sys.settrace(None)
        self.seconds[item.nodeid] += time.process_time() - began
        lines |= {(_name_of(code), line) for code, numbers in seen.items() for line in numbers}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= {report.nodeid} if report.failed else set()

    def pytest_sessionfinish(self) -> None:
        entries = [
            (name, self.seconds[name], _by_function(entered or self.prepared[name.partition("::")[0]]))
            for name, entered in self.entered.items()
            if name not in self.failed
        ]
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(entries))


def _by_function(lines: Iterable[Line]) -> dict[str, list[int]]:
    grouped = defaultdict(list)
    for function, line in sorted(lines):
        grouped[function].append(line)
    return grouped


@cache
def _name_of(code: CodeType) -> str:
    """``path:Class.method``, without what is defined inside; empty for what is not ours."""
    if not code.co_filename.startswith(str(SOURCE)) or "<module>" in code.co_qualname:
        return ""
    path = Path(code.co_filename).relative_to(SOURCE)
    return f"{path}:{code.co_qualname.partition('.<')[0]}" if path.parts[0] in ROOMS else ""


def pytest_configure(config: pytest.Config) -> None:
    """Begin to record, in each process that runs tests."""
    folder = os.environ.get("OTPDAG_TESTS_BY_FUNCTION")
    if folder:
        config.pluginmanager.register(_Recorder(Path(folder)))


def record(files: Sequence[str] = (), jobs: int = 2) -> None:
    """Run all quick tests and write the file; with some test files, put what they run in the place of what they did."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OTPDAG_TESTS_BY_FUNCTION"] = folder
        pytest.main(["-q", "-n", str(jobs), "-m", "not slow", "-p", "benchmarks.tests_by_function", *files])
        parts = [json.loads(part.read_text()) for part in sorted(Path(folder).glob("*.json"))]
    text = _as_text([entry for part in parts for entry in part])
    old = FILE.read_text() if files else ""
    FILE.write_text(_renewed(old, text, [*files, *_gone(old)]) if files else text)


def _gone(text: str) -> set[str]:
    """Test files that were known and are there no more."""
    files = {name.partition("::")[0] for name, _ in json.loads(text)["tests"]}
    return {file for file in files if not (ROOT / file).exists()}


def _renewed(old: str, new: str, files: Sequence[str]) -> str:
    """What was known, without the tests of these files, and what is known of them now."""
    tests: list[tuple[float, str]] = []
    functions: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for content, is_new in ((json.loads(old), False), (json.loads(new), True)):
        kept = [is_new or name.partition("::")[0] not in files for name, _ in content["tests"]]
        tests += [(seconds, name) for (name, seconds), keep in zip(content["tests"], kept, strict=True) if keep]
        for path, own in content["functions"].items():
            for function, numbers in own.items():
                functions[path][function] += [content["tests"][number][0] for number in numbers if kept[number]]
    place = {name: number for number, (_, name) in enumerate(sorted(tests))}
    numbered = {
        path: {function: sorted(place[name] for name in names) for function, names in sorted(own.items())}
        for path, own in sorted(functions.items())
    }
    return _written([(name, seconds) for seconds, name in sorted(tests)], numbered)


def _as_text(entries: Iterable[tuple[str, float, dict[str, list[int]]]]) -> str:
    """Keep some tests of each function, and write one line for each test and each file."""
    tests = sorted((round(seconds, 2), name, functions) for name, seconds, functions in entries)
    entering: dict[str, list[int]] = defaultdict(list)
    for number, (_, _, functions) in enumerate(tests):
        for function in functions:
            entering[function].append(number)
    kept = {function: _some(function, numbers, tests) for function, numbers in entering.items()}
    used = sorted({number for numbers in kept.values() for number in numbers})
    place = {number: at for at, number in enumerate(used)}
    files: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for function in sorted(kept):
        path, _, name = function.partition(":")
        files[path][name] = [place[number] for number in kept[function]]
    return _written([(tests[number][1], tests[number][0]) for number in used], files)


def _written(tests: Sequence[tuple[str, float]], files: Mapping[str, Mapping[str, list[int]]]) -> str:
    lines = [json.dumps(test) for test in tests]
    rows = [f"{json.dumps(path)}: {json.dumps(functions)}" for path, functions in files.items()]
    return '{"tests": [\n' + ",\n".join(lines) + '\n],\n"functions": {\n' + ",\n".join(rows) + "\n}}\n"


def _some(function: str, numbers: list[int], tests: list[tuple[float, str, dict[str, list[int]]]]) -> list[int]:
    """Of the tests of a function, from the quickest to the longest: its own, some that run each line, thorough ones."""
    module = Path(function.partition(":")[0])
    own = {f"test_{module.stem}", module.stem}
    distinct = list(_without_alike(numbers, tests))
    mirrors = [number for number in distinct if Path(tests[number][1].partition("::")[0]).stem in own]
    others = [number for number in distinct if number not in set(mirrors) and tests[number][0] <= THOROUGH]
    near = [number for number in others if tests[number][1].startswith(f"tests/{module.parts[0]}/")]
    chosen = {*mirrors[:MOST_MIRRORS], *(near or others)[-MOST_THOROUGH:], *others[-MOST_THOROUGH:]}
    tests_of_line: dict[int, set[str]] = defaultdict(set)
    for number in numbers:  # a line that few tests run must not lose them
        name = tests[number][1].partition("[")[0]
        lines = [line for line in tests[number][2][function] if len(tests_of_line[line]) < MOST_FOR_A_LINE]
        missing = [line for line in lines if name not in tests_of_line[line]]
        if missing:
            chosen.add(number)
        for line in missing:
            tests_of_line[line].add(name)
    return sorted(chosen)


def _without_alike(numbers: list[int], tests: list[tuple[float, str, dict[str, list[int]]]]) -> Iterator[int]:
    """Few of the tests that differ only in their parameters."""
    alike: dict[str, int] = defaultdict(int)
    for number in numbers:
        name = tests[number][1].partition("[")[0]
        alike[name] += 1
        if alike[name] <= MOST_ALIKE:
            yield number


if __name__ == "__main__":
    record(sys.argv[1:])
