"""Bundles: one zip file with JSON for the structure and safetensors for the numbers.

Nothing is pickled, so reading a bundle runs no code from it; and nothing is unpacked before its declared size was
checked, so that a small file cannot fill the memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from otpdag.errors import DataError, ModelError, OtpdagError, told_as
from otpdag.files import as_path, replacing

TENSORS = "tensors.safetensors"
SEAL = hashlib.sha256().digest_size

# Bounds, so that reading needs at most about 200 MB or four times the file. Python makes of a byte of JSON up to twenty
# bytes of memory, and most for brackets.
MOST_TEXT = 24 << 20
MOST_VALUES = 2_000_000
MOST_BRACKETS = 200_000
MOST_DEPTH = 40
MOST_HEADER = 8 << 20
MOST_DIRECTORY = 1 << 20

SMALL = 32 << 20  # tensors up to here may be packed as tightly as they can; above, to half their size


def write_bundle(path: str | Path, name: str, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a bundle in one step.

    Args:
        path: The file.
        name: What the JSON in it is called.
        state: Plain data.
        tensors: Numbers by name.

    Raises:
        ModelError: The state is too large to be read again, or holds what JSON does not know.
        DataError: The file cannot be written.
    """
    content = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
    with told_as(ModelError, "this cannot be saved", ValueError, TypeError):
        text = json.dumps(state, indent=1, allow_nan=False).encode("utf-8")
        _check_text(text)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_entry(name), text, compress_type=zipfile.ZIP_DEFLATED)
        # floating numbers hardly shrink, and what is stored as it is needs no trust in a declared size
        archive.writestr(_entry(TENSORS), save_tensors(content), compress_type=zipfile.ZIP_STORED)
        archive.comment = bytes(SEAL)
    held = buffer.getbuffer()[:-SEAL]
    with replacing(path) as file:
        file.write(held)
        file.write(hashlib.sha256(held).digest())


def _entry(name: str) -> zipfile.ZipInfo:
    """An entry without a date: the same content makes the same file."""
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.external_attr = 0o600 << 16
    return entry


def read_bundle(
    path: str | Path, name: str, what: str, *, sealed: bool = False
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what :func:`write_bundle` wrote.

    Args:
        path: The file.
        name: What the JSON in it is called.
        what: What messages call it.
        sealed: Whether a file without its hash is refused; one whose hash is another's always is.

    Raises:
        DataError: There is no such file, or it is damaged, of another kind, or larger inside than out.
    """
    path = as_path(path)
    if not os.path.isfile(path):  # which takes a name that is too long for none
        raise DataError(f"no {what.removeprefix('otpdag ')} at {str(path)!r}")
    with refusing(path, what), path.open("rb") as file:  # opened once: another process may replace it meanwhile
        size = os.fstat(file.fileno()).st_size
        _check_directory(file, size)
        with zipfile.ZipFile(file) as archive:
            if sealed or archive.comment:
                _check_seal(file, size)
            text = _member(archive, name, MOST_TEXT)
            state = _parse(text)
            packed = _member(archive, TENSORS, max(SMALL, 2 * size))
        if len(packed) < 8 or int.from_bytes(packed[:8], "little") > min(MOST_HEADER, len(packed) - 8):
            raise ValueError("the header of its tensors is too long")
        return state, load_tensors(packed)


@contextlib.contextmanager
def refusing(path: str | Path, what: str) -> Iterator[None]:
    """Whatever goes wrong inside, a damaged or hostile file is to blame: one error that names it."""
    try:
        yield
    except OtpdagError:
        raise
    except KeyError as error:
        raise DataError(f"{str(path)!r} is not a saved {what}: {error.args[0]!r:.200} is missing") from None
    except (zipfile.BadZipFile, zlib.error, SafetensorError, ValueError) as error:
        raise DataError(f"{str(path)!r} is not a saved {what}: {error!s:.300}") from None
    except (Exception, RecursionError, MemoryError) as error:
        raise DataError(f"{str(path)!r} is not a saved {what}: {type(error).__name__}: {error!s:.300}") from error


def _check_directory(file: IO[bytes], size: int) -> None:
    """Refuse a zip file whose table of contents is long: it is read as a whole before anything can be said of it."""
    file.seek(max(0, size - (1 << 16) - 128))
    tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) < at + 22:
        raise ValueError("it is no zip file")
    length = struct.unpack_from("<L", tail, at + 12)[0]
    if at >= 76 and tail[at - 20 : at - 16] == b"PK\x06\x07":  # the 64-bit record stands before, with its locator
        length = struct.unpack_from("<Q", tail, at - 36)[0]
    if length > MOST_DIRECTORY:
        raise ValueError(f"its table of contents has {length:,} bytes; at most {MOST_DIRECTORY:,} are read")


def _check_seal(file: IO[bytes], size: int) -> None:
    """Refuse a file that does not end in the hash of all that stands before it."""
    digest, left = hashlib.sha256(), size - SEAL
    file.seek(0)
    while left > 0 and (block := file.read(min(left, 1 << 20))):
        digest.update(block)
        left -= len(block)
    if file.read() != digest.digest():
        raise ValueError("it has changed since it was written")


def _member(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    info = archive.getinfo(name)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is packed in a way that is not read")
    if info.flag_bits & 1:
        raise ValueError(f"{name} is encrypted")
    if info.file_size > most:
        raise ValueError(f"{name} unpacks to {info.file_size:,} bytes; at most {most:,} are read of such a file")
    with archive.open(info) as member:
        content = member.read(info.file_size + 1)  # to its end, where its checksum is compared
    if len(content) != info.file_size:
        raise ValueError(f"{name} is not as long as it says")
    return content


def _check_text(text: bytes) -> None:
    values, brackets = text.count(b",") + text.count(b":"), text.count(b"[") + text.count(b"{")
    if len(text) > MOST_TEXT or values > MOST_VALUES or brackets > MOST_BRACKETS:
        raise ValueError(
            f"its description has {len(text):,} bytes, {values:,} values and {brackets:,} brackets; at most "
            f"{MOST_TEXT:,}, {MOST_VALUES:,} and {MOST_BRACKETS:,} are read"
        )


def _parse(text: bytes) -> dict[str, Any]:
    _check_text(text)
    state = json.loads(text, parse_constant=_refuse_constant)
    _check_depth(state)
    if not isinstance(state, dict):
        raise ValueError("its JSON describes something else")
    return state


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds the number {name}")


def _check_depth(state: Any) -> None:
    level, depth = [state], 0
    while level:
        if depth > MOST_DEPTH:
            raise ValueError(f"its description is nested more than {MOST_DEPTH} levels deep")
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level, depth = [item for items in inner for item in items if isinstance(item, dict | list)], depth + 1
