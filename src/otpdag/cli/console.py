"""What all commands share: one place for output, one for errors, one for the rule that nothing is overwritten."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pandas as pd
import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from otpdag.data import Sequences, read_table, write_table
from otpdag.errors import DataError, ModelError, OtpdagError
from otpdag.model import Model, load

__all__ = [
    "FriendlyGroup",
    "as_steps",
    "check_file",
    "check_folder",
    "model_at",
    "out",
    "put_table",
    "say",
    "table_at",
    "warn",
]

MISTAKE, BUG, INTERRUPTED = 2, 1, 130
DEBUG = "--debug"

# typer may bring its own copy of click, so the class is taken from one that it exports
ClickException: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def out() -> Console:
    """Standard output, as it is now (tests and pipes replace it)."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty())


def _err() -> Console:
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def warn(message: str) -> None:
    """One line on standard error."""
    _err().print(f"[yellow]warning:[/] {escape(message)}")


def say(message: str) -> None:
    """A remark on standard error, so that standard output holds results only."""
    _err().print(f"[dim]{escape(message)}[/]")


def fail(message: str, code: int) -> NoReturn:
    """One line on standard error, and the end."""
    _err().print(f"[bold red]error:[/] {escape(' '.join(message.split()))}")
    sys.exit(code)


class FriendlyGroup(TyperGroup):
    """Turns what went wrong into one line and an exit code: 2 for a mistake, 1 for a bug, 130 for Ctrl-C."""

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        """Run a command; ``--debug`` may stand anywhere and shows tracebacks."""
        given = list(sys.argv[1:] if args is None else args)
        debug = DEBUG in given
        given = [argument for argument in given if argument != DEBUG]
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
        """Run; Ctrl-C ends with a plain line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _err().print("\n[bold]interrupted[/]: nothing was written")
            raise typer.Exit(INTERRUPTED) from None


def _report(error: Exception) -> NoReturn:
    if isinstance(error, typer.Abort):
        fail("stopped", BUG)
    if isinstance(error, ClickException):
        context = getattr(error, "ctx", None)
        hint = f" (see `{context.command_path} --help`)" if context is not None else ""
        fail(error.format_message().replace("Value error, ", "").rstrip(".") + hint, MISTAKE)
    if isinstance(error, OtpdagError):
        fail(str(error), MISTAKE)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}", MISTAKE)
    fail(f"{type(error).__name__}: {error} (this is a bug in otpdag; --debug shows where)", BUG)


# --- files ------------------------------------------------------------------------------------------------


def table_at(path: Path) -> pd.DataFrame:
    """Read a table."""
    try:
        return read_table(path)
    except DataError:
        raise
    except (ValueError, OSError) as error:  # pandas' parser errors are ValueErrors
        raise DataError(f"{path}: cannot be read as a table: {error}") from None


def as_steps(table: pd.DataFrame, sequence: str | None, time: str | None) -> pd.DataFrame | Sequences:
    """The table itself, or its rows as steps of sequences where a column tells them apart or orders them."""
    return table if sequence is None and time is None else Sequences(table, sequence=sequence, time=time)


def model_at(path: Path) -> Model:
    """Read a saved model; the folder of a fit will do."""
    return load(path / "model.otp" if path.is_dir() else path)


def check_folder(path: Path, *, force: bool) -> None:
    """Refuse a folder that holds something."""
    if path.exists() and not path.is_dir():
        raise ModelError(f"--out must be a folder; {str(path)!r} is a file")
    if path.is_dir() and any(path.iterdir()) and not force:
        raise ModelError(f"--out {str(path)!r} is not empty; choose another folder or add --force to overwrite")


def check_file(path: Path | None, *, force: bool) -> None:
    """Refuse a file that exists."""
    if path is None:
        return
    if path.is_dir():
        raise ModelError(f"--out must be a file; {str(path)!r} is a folder")
    if path.exists() and not force:
        raise ModelError(f"--out {str(path)!r} exists; choose another file or add --force to overwrite")


def put_table(table: pd.DataFrame, path: Path | None, *, index: bool = False) -> None:
    """Write CSV to a file, or to standard output."""
    if path is None:
        sys.stdout.write(table.to_csv(index=index, lineterminator="\n"))
        return
    write_table(table, path, index=index)
    say(f"wrote {len(table):,} rows to {path}")
