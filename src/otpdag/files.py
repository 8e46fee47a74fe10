"""Files: written beside and put in place in one step, so that no instant shows half of one.

A file is written under another name in the same folder, brought to the disk, and renamed; a folder of results is a
:func:`folder_transaction`. Whatever goes wrong is a :class:`~otpdag.errors.DataError` that names the file, and leaves
what was there before.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from otpdag.errors import DataError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_MARK = ".otpdag-"
_STAGED, _COMMITTED, _MANIFEST = f"{_MARK}new-", f"{_MARK}committed", f"{_MARK}manifest.json"
_TEMPORARY = ".tmp"
_DAY = 86_400.0  # seconds without a write after which an unfinished file is one that its writer left


# --- one file ---------------------------------------------------------------------------------------------------------


def as_path(path: object) -> Path:
    """The path that a text or a path object names; what no file can be called is refused.

    >>> as_path("fits/model.otp").name
    'model.otp'
    """
    try:
        named = Path(path)  # type: ignore[arg-type]
        is_name = b"\0" not in os.fsencode(named) and all(len(os.fsencode(part)) < 256 for part in named.parts)
    except (TypeError, ValueError):
        is_name = False
    if not is_name:
        raise DataError(f"a path must be text that a file can be called; got {path!r:.100}")
    return named


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that takes the place of ``path`` at the end, in one step; on failure nothing changes.

    The file keeps the permissions of the one that it replaces; a link is followed, and what is no ordinary file (a
    pipe, a terminal) is written to directly.

    Args:
        path: The file to write; its folder must exist.

    Raises:
        DataError: It cannot be written: a full disk, a limit on sizes, no permission, no such folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(f"{folder}/note.txt") as file:
    ...         _ = file.write(b"whole")
    ...     Path(folder, "note.txt").read_bytes(), os.listdir(folder)
    (b'whole', ['note.txt'])
    """
    with _named(path):
        target = Path(os.path.realpath(as_path(path)))
        mode = target.stat().st_mode if target.exists() else None
        if mode is not None and not stat.S_ISREG(mode):
            with target.open("wb") as file:
                yield file
            return
        _remove_abandoned(target)
        beside = target.with_name(f"{_stem_of(target)}{secrets.token_hex(6)}{_TEMPORARY}")
        try:
            with beside.open("xb") as file:
                if mode is not None:
                    os.chmod(beside, stat.S_IMODE(mode))
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
        _sync_folder(target.parent)


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a whole file in one step; see :func:`replacing`."""
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def _named(path: str | Path) -> Iterator[None]:
    """Errors of the system as errors that name the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be written: {error.strerror or error}; nothing was changed") from error


def _stem_of(target: Path) -> str:
    # a name may have 255 bytes; the beginning is enough to recognise it by
    return f"{_MARK}{target.name.encode()[:120].decode(errors='ignore')}-"


def _remove_abandoned(target: Path) -> None:
    """Remove what killed writers of the same file left behind."""
    stem = _stem_of(target)
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            is_unfinished = entry.name.startswith(stem) and entry.name.endswith(_TEMPORARY)
            if is_unfinished and time.time() - entry.stat().st_mtime > _DAY:
                os.unlink(entry.path)


def _sync_folder(folder: Path) -> None:
    """Bring a folder's list of names to the disk, where the system knows such a thing."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# --- a folder ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def make_folder(path: str | Path) -> Iterator[Path]:
    """Make a folder with its parents; on failure, those that were made and are still empty go again.

    Raises:
        DataError: It cannot be made.
    """
    path = Path(path)
    made: list[Path] = []
    try:
        with _named(path):
            for folder in (*reversed(path.parents), path):
                if folder.exists() and not folder.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                if not folder.is_dir():
                    folder.mkdir(exist_ok=True)
                    made.append(folder)
        yield path
    except BaseException:
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


@contextlib.contextmanager
def only_writer(folder: str | Path) -> Iterator[None]:
    """Hold the lock of a folder of results, so that no other process writes to it; it ends with its process.

    The lock is on a file beside the folder, or in a folder that is there where nothing can be written beside. A system
    without such locks has none.

    Raises:
        DataError: Another process holds it.
    """
    folder = Path(os.path.realpath(folder))
    beside = os.access(folder.parent, os.W_OK) or not folder.is_dir()
    path = folder.parent / f"{_stem_of(folder)}lock" if beside else folder / f"{_MARK}lock"
    with _named(folder):
        handle = _locked(path)
    if handle is None:
        raise DataError(f"another process is writing to {str(folder)!r}: wait for it, or choose another folder")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # before it is given up, so that nobody locks a file that is gone
            os.unlink(path)
        os.close(handle)


def _locked(path: Path) -> int | None:
    """The handle of a file that this process has locked; None if another one has."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(path)):  # else its holder has removed it since
                    return handle
        except BlockingIOError:
            os.close(handle)
            return None
        os.close(handle)


def check_writable(folder: str | Path) -> None:
    """Refuse a folder that :func:`folder_transaction` could not write; nothing stays of the attempt."""
    with contextlib.suppress(_Undo), _staging(Path(folder)):
        raise _Undo


class _Undo(Exception):
    """Ends an attempt."""


@contextlib.contextmanager
def folder_transaction(folder: str | Path, owned: Iterable[str]) -> Iterator[Path]:
    """Write a set of files that belong together: afterwards all of them are there, or everything is as before.

    The files are written to a folder that stands beside. One rename decides: before it the old set is valid, after it
    the new one. Where the target does not exist, that rename makes it. Otherwise the new set becomes its folder
    ``.otpdag-committed``, whose files are then moved up; :func:`finish_transaction` completes what a kill in the middle
    of these few renames leaves. Other files of the target stay where they are. Who writes holds :func:`only_writer`.

    Args:
        folder: Where the files shall be; made if needed.
        owned: Names that such a set may have. Those that the new set lacks are removed.

    Yields:
        The folder to write to.

    Raises:
        DataError: Something cannot be written.
    """
    folder, owned = Path(os.path.realpath(folder)), frozenset(owned)
    finish_transaction(folder, owned)
    for name in sorted(owned):
        if (folder / name).is_dir():
            raise DataError(f"{str(folder / name)!r} is a folder where a file shall be; move it away")
    with _staging(folder) as staged:
        yield staged
        names = {entry.name for entry in staged.iterdir()}
        if not names <= owned:
            raise ValueError(f"files of the folder that are not declared: {sorted(names - owned)}")
        with _named(folder):
            if staged.parent == folder:
                write_bytes(staged / _MANIFEST, json.dumps(sorted(names)).encode())
                os.rename(staged, folder / _COMMITTED)
                _move_up(folder, owned)
            else:
                _sync_folder(staged)
                os.rename(staged, folder)
            _sync_folder(folder.parent)
    _remove_abandoned_stages(folder)


def is_rubbish(path: Path) -> bool:
    """Whether a file or folder is what a writer left that was killed."""
    return path.name.startswith(_MARK) and path.name != _COMMITTED


def finish_transaction(folder: str | Path, owned: Iterable[str]) -> None:
    """Complete a :func:`folder_transaction` that was killed after its decision; otherwise do nothing."""
    folder = Path(folder)
    if (folder / _COMMITTED).is_dir():
        with _named(folder):
            _move_up(folder, frozenset(owned))


@contextlib.contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """An empty folder on the disk of the target: in it, or beside it where it has to be made."""
    with make_folder(folder if folder.is_dir() else folder.parent) as parent:
        staged = parent / f"{_stage_prefix(folder, parent)}{secrets.token_hex(6)}"
        with _named(folder):
            staged.mkdir()
        try:
            yield staged
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise


def _stage_prefix(folder: Path, parent: Path) -> str:
    return _STAGED if parent == folder else f"{_stem_of(folder)}new-"


def _remove_abandoned_stages(folder: Path) -> None:
    """Remove what writers of the same folder left that were killed before their decision."""
    for parent in (folder, folder.parent):
        pattern = re.compile(re.escape(_stage_prefix(folder, parent)) + "[0-9a-f]{12}")
        for entry in [entry for entry in parent.iterdir() if pattern.fullmatch(entry.name)]:
            shutil.rmtree(entry, ignore_errors=True)


def _move_up(folder: Path, owned: frozenset[str]) -> None:
    """Put the files of a committed set in place; an interrupt waits until that is done."""
    try:
        _move_files(folder, owned)
    except KeyboardInterrupt:
        _move_files(folder, owned)
        raise


def _move_files(folder: Path, owned: frozenset[str]) -> None:
    committed = folder / _COMMITTED
    if (committed / _MANIFEST).is_file():
        names = _names_of(committed / _MANIFEST)
        for name in owned - names:
            (folder / name).unlink(missing_ok=True)
        for name in owned & names:
            with contextlib.suppress(FileNotFoundError):  # moved before a kill, or by another that completes the same
                os.replace(committed / name, folder / name)
        _sync_folder(folder)
        (committed / _MANIFEST).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        committed.rmdir()


def _names_of(manifest: Path) -> frozenset[str]:
    try:
        return frozenset(json.loads(manifest.read_bytes()))
    except (ValueError, TypeError, RecursionError):
        raise DataError(f"{str(manifest)!r} is damaged; remove the folder {manifest.parent.name!r}") from None
