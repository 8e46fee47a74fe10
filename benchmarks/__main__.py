"""Runs benchmarks from the command line; without a name it lists them."""

import argparse
import importlib
import json
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rich.console import Console

from benchmarks import performance
from benchmarks.harness import METHODS, Record, Settings, failed, run
from benchmarks.table import table

QUICK_REPEATS = 5
FULL_REPEATS = 20
WIDTH = 140  # of the table where there is no terminal to ask


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark and print its report; return 1 if a case failed, 2 if the call is wrong."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.name is None:
        return _list()
    module = find(options.name)
    if module is None:
        parser.error(f"there is no benchmark {options.name!r}; there are {', '.join(names())}")
    for case in options.case:
        if case not in module.CASES:
            parser.error(f"{options.name} has no case {case!r}; it has {', '.join(module.CASES)}")
    if options.compare and (not hasattr(module, "compare") or len(options.compare) > 2):
        parser.error("--compare takes one or two reports, of a benchmark that compares them, as ledger does")
    if len(options.compare) == 2:
        return _compare(module, *map(_report, options.compare))
    chosen = {name: module.CASES[name] for name in options.case} or module.CASES
    report = run(options.name, chosen, _settings(options))
    if options.name in performance.BENCHMARKS and (options.write or not options.quick):
        performance.keep(report, quick=options.quick)
        performance.draw()
    if options.compare:
        return _compare(module, _report(options.compare[0]), report)
    if options.json:
        print(json.dumps(report, allow_nan=False))
    else:
        _console().print(table(report))
    return int(failed(report))


def names() -> list[str]:
    """The names of the benchmarks: the modules of this folder that have ``CASES``."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return [info.name for info in modules if find(info.name) is not None]


def find(name: str) -> ModuleType | None:
    """Import a benchmark of this folder; return nothing if there is none of that name."""
    if name == "__main__" or not Path(__file__).with_name(f"{name}.py").is_file():
        return None
    module = importlib.import_module(f"benchmarks.{name}")
    return module if hasattr(module, "CASES") else None


def _list() -> int:
    for name in names():
        module = importlib.import_module(f"benchmarks.{name}")
        print(f"{name}: {(module.__doc__ or '').strip().splitlines()[0]}")
        print(f"  cases: {', '.join(module.CASES)}")
    return 0


def _report(path: str) -> Record:
    return json.loads(Path(path).read_text())


def _compare(module: ModuleType, before: Record, after: Record) -> int:
    """Print what changed between two reports; return 1 if the benchmark's rule is broken."""
    grid, good = module.compare(before, after)
    _console().print(grid)
    return int(not good)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def _settings(options: argparse.Namespace) -> Settings:
    repeats = options.repeats or (QUICK_REPEATS if options.quick else FULL_REPEATS)
    return Settings(options.seed, repeats, methods=tuple(options.method or METHODS))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", help="the benchmark to run; left out, all are listed")
    parser.add_argument("--quick", action="store_true", help="five data sets a case instead of 20")
    parser.add_argument("--seed", type=int, default=0, help="the seed from which all data derive")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--write", action="store_true", help="keep what speed, scale or growth measured, and draw its page"
    )
    parser.add_argument("--case", action="append", default=[], help="run this case only; may be repeated")
    parser.add_argument(
        "--compare",
        nargs="+",
        default=[],
        metavar="FILE",
        help="compare with this JSON report, of the same seed; two are compared with each other, and nothing is run",
    )
    parser.add_argument("--method", action="append", help="fit by this method only; may be repeated")
    parser.add_argument("--repeats", type=_positive, help="how many data sets a case draws")
    return parser


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
