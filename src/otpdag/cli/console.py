"""What all commands share: their arguments, one place for output, for errors, for the rule that nothing is overwritten.

Nothing here imports torch or pandas: help and usage errors come at once. Commands import what is heavy when they run.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from otpdag.errors import ModelError, OtpdagError, printable
from otpdag.files import finish_transaction, is_rubbish, make_folder, write_bytes

RUN_FILES = (
    "model.otp",
    "params.json",
    "summary.json",
    "history.csv",
    "restarts.csv",
    "weights.csv",
    "intervals.csv",
    "errors.csv",
    "shown.json",
    "graph.png",  # of an earlier version, as the next
    "learning.png",
)  # all that the folder of a fit may hold of ours
MISTAKE, BUG, INTERRUPTED = 2, 1, 130  # exit codes, as other commands have them
_WRITTEN: list[str] = []  # by the present command

# typer may bring its own copy of click, so the class is taken from one that it exports
ClickException: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


# --- arguments --------------------------------------------------------------------------------------------


def out_option(told: str) -> Any:
    """Where results go."""
    return typer.Option("--out", "-o", metavar="FILE", help=told)


STANDARD_INPUT = Path("-")  # stands for CSV that is piped in
LONGEST_SEED = 2**63 - 1  # that a 64-bit generator takes
ModelFilePath = Annotated[Path, typer.Argument(metavar="MODEL.YAML", help="Graph and mechanisms.")]
ModelPath = Annotated[Path, typer.Argument(metavar="MODEL.OTP", help="A saved model, or the folder of a fit.")]
DataPath = Annotated[
    Path,
    typer.Argument(
        metavar="DATA", help="A table: .csv, .tsv, .parquet, .xlsx, .dta, .sav; or - for CSV from standard input."
    ),
]
Separator = Annotated[
    str | None, typer.Option(metavar="SIGN", help="Between the cells of a text; recognised if left out.")
]
Decimal = Annotated[str | None, typer.Option(metavar="SIGN", help="Decimal sign of a text, . or ,; recognised too.")]
OutFile = Annotated[Path | None, out_option("CSV file; standard output if left out.")]
Seed = Annotated[int, typer.Option(min=0, max=LONGEST_SEED, help="Determines the draws.")]
RunSeed = Annotated[int, typer.Option(min=0, max=LONGEST_SEED, help="Determines the run.")]
SequenceColumn = Annotated[
    str | None, typer.Option("--sequence", metavar="COLUMN", help="Lagged edges: column that tells sequences apart.")
]
TimeColumn = Annotated[
    str | None, typer.Option("--time", metavar="COLUMN", help="Lagged edges: column that orders steps.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but warnings and errors.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]
FolderForce = Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")]


# --- output and errors ------------------------------------------------------------------------------------


def out() -> Console:
    """Standard output, as it is now (tests and pipes replace it)."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty())


def _err() -> Console:
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def warn(message: str) -> None:
    """One line on standard error."""
    _err().print(f"[yellow]warning:[/] {escape(printable(message))}")


def say(message: str) -> None:
    """A remark on standard error, so that standard output holds results only."""
    _err().print(f"[dim]{escape(printable(message))}[/]")


def fail(message: str, code: int) -> NoReturn:
    """One line on standard error, and the end."""
    _err().print(f"[bold red]error:[/] {escape(printable(' '.join(message.split())))}")
    sys.exit(code)


def look_for_garbage() -> None:
    """From here on, and not among what imports have made: work begins, in a process that has put it off."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def note_written(path: Path) -> None:
    """Remember what the present command has written, for the case of an interrupt."""
    _WRITTEN.append(str(path))


class Interrupted(KeyboardInterrupt):
    """Somebody asked for the end: what to say about it, and the exit code."""

    def __init__(self, message: str = "", code: int = INTERRUPTED) -> None:
        super().__init__(message)
        self.message, self.code = message, code


class FriendlyGroup(TyperGroup):
    """Turns what went wrong into one line and an exit code: 2 for a mistake, 1 for a bug, 130 for Ctrl-C."""

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        """Run a command; ``--debug`` may stand anywhere and shows tracebacks."""
        given = list(sys.argv[1:] if args is None else args)
        debug = "--debug" in given
        given = [argument for argument in given if argument != "--debug"]
        if not standalone_mode:
            return super().main(given, standalone_mode=False, **extra)
        try:
            code = super().main(given, standalone_mode=False, **extra)
        except Exception as error:
            if debug:
                traceback.print_exc()
            _report(error)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        """Run; Ctrl-C ends with a plain line that says what has been written."""
        _WRITTEN.clear()
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            asked = stop if isinstance(stop, Interrupted) else Interrupted()
            there = f"{', '.join(_WRITTEN)} written before" if _WRITTEN else "nothing was written"
            _err().print(f"\n[bold]interrupted[/]: {escape(printable(asked.message or there))}")
            raise typer.Exit(asked.code) from None


def _report(error: Exception) -> NoReturn:
    if isinstance(error, typer.Abort):
        fail("stopped", BUG)
    if isinstance(error, ClickException):
        context = getattr(error, "ctx", None)
        hint = f" (see `{context.command_path} --help`)" if context is not None else ""
        fail(error.format_message().replace("Value error, ", "").rstrip(".") + hint, MISTAKE)
    if isinstance(error, OtpdagError):
        fail(str(error), MISTAKE)
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        fail("this needs more memory than there is: ask for fewer rows or draws", MISTAKE)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}", MISTAKE)
    fail(f"{type(error).__name__}: {error} (this is a bug in otpdag; --debug shows where)", BUG)


# --- files ------------------------------------------------------------------------------------------------


def check_folder(path: Path, *, force: bool) -> None:
    """Refuse a folder that holds something other than the beginning of a run that was killed."""
    if path.is_symlink() and not path.exists():
        raise ModelError(f"--out must be a folder; {str(path)!r} is a link that leads nowhere")
    if path.exists() and not path.is_dir():
        raise ModelError(f"--out must be a folder; {str(path)!r} is a file")
    if path.is_dir():
        finish_transaction(path, RUN_FILES)
    if path.is_dir() and not force and not all(is_rubbish(entry) for entry in path.iterdir()):
        raise ModelError(f"--out {str(path)!r} is not empty; choose another folder or add --force to overwrite")


def check_file(path: Path | None, *, force: bool) -> None:
    """Refuse a file that exists."""
    if path is None:
        return
    if path.is_dir():
        raise ModelError(f"--out must be a file; {str(path)!r} is a folder")
    if path.exists() and not force:
        raise ModelError(f"--out {str(path)!r} exists; choose another file or add --force to overwrite")


def plain_table(*titles: str, right: Iterable[str] = ()) -> Table:
    """A table without lines, readable at 80 columns and in a file; columns of numbers stand at the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    for title in right:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def write_out(text: str) -> None:
    """Write text to standard output; to a terminal, without control characters."""
    sys.stdout.write(printable(text, keep="\n\t") if sys.stdout.isatty() else text)


def put_text(text: str, path: Path | None) -> None:
    """Write text to a file, or to standard output."""
    if path is None:
        write_out(text)
    else:
        write_file(path, text)


def json_text(content: Any) -> str:
    """JSON of plain values and arrays; null for what is not a finite number, as JSON knows no other word for it.

    >>> print(json_text({"a": [1.0, float("nan")]}), end="")
    {
     "a": [
      1.0,
      null
     ]
    }
    """
    return json.dumps(_plain(content), indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numbers and arrays of numpy
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def write_file(path: Path, content: bytes | str) -> None:
    """Write a file in one step, and remember it for the case of an interrupt."""
    with make_folder(path.parent):
        write_bytes(path, content.encode("utf-8") if isinstance(content, str) else content)
    note_written(path)


def file_hash(path: Path) -> str:
    """SHA-256 of a file, by which a report tells whether a table is still the one that was fitted."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
