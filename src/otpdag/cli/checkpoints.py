"""The checkpoint that ``otpdag fit`` keeps beside its folder, and from which ``--resume`` goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from otpdag.cli.console import INTERRUPTED, Interrupted, say
from otpdag.errors import DataError
from otpdag.files import make_folder


@contextlib.contextmanager
def kept_checkpoint(folder: Path, *, resume: bool) -> Iterator[Path | None]:
    """The checkpoint of a fit that writes to ``folder``, beside which it stands.

    It stays where the work was stopped, by Ctrl-C, SIGTERM or a kill. It goes after an error, and when the run has been
    written, unless that was not the end of the fit. Where nothing can be written beside the folder there is none.

    Args:
        folder: The folder of the run.
        resume: Whether to go on from a checkpoint that is there; otherwise it is removed.
    """
    path = folder.resolve().with_name(f"{folder.resolve().name}.checkpoint")
    if path.parent.is_dir() and not os.access(path.parent, os.W_OK):
        if resume:
            raise DataError(f"--resume needs {str(path)!r}, and that folder cannot be written")
        yield None
        return
    with make_folder(path.parent), _terminations_raise():
        if resume and not path.exists():
            say(f"there is no {path}: the fit begins anew")
        if not resume:
            path.unlink(missing_ok=True)
        try:
            yield path
        except KeyboardInterrupt as stop:
            if not path.exists():
                raise
            code = stop.code if isinstance(stop, Interrupted) else INTERRUPTED
            raise Interrupted(f"{path} keeps how far it came; the same command with --resume goes on", code) from None
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def close_checkpoint(path: Path | None, *, could_go_on: bool) -> None:
    """Remove the checkpoint of a run that was written; one of a fit that could go on stays."""
    if path is None:
        return
    if not could_go_on:
        path.unlink(missing_ok=True)
    elif path.exists():
        say(f"{path} keeps how far the fit came; --resume --force goes on from there")


@contextlib.contextmanager
def _terminations_raise() -> Iterator[None]:
    """Let SIGTERM end the command like Ctrl-C does, in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(code=128 + number)
