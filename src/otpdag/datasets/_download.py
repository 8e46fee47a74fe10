"""Download a published file once, and never use it before its checksum is right."""

import hashlib
import shutil
import tempfile
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from otpdag.errors import DataError

__all__ = ["fetch", "has_checksum"]

_SECONDS = 30  # without a byte, then the download fails
_CHUNK = 1 << 20  # bytes at a time


def fetch(url: str, sha256: str, folder: str | Path) -> Path:
    """Return the file that a URL publishes, from ``folder`` if it is there, else downloaded into it.

    The download goes to a temporary file beside its place and moves there only once its checksum is right, so that an
    interrupted run leaves nothing half written.

    Args:
        url: Where the file is published, by http or https; its last part is the name of the file.
        sha256: The SHA-256 of the published file, in hexadecimal.
        folder: Where the file lies or is put; made if need be.

    Returns:
        The path of the file.

    Raises:
        DataError: The file there, or what was downloaded, is not the published one; or the URL cannot be reached, in
            which case the message says where to put the file.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise DataError(f"`url` must begin with http:// or https://; got '{url}'")
    path = Path(folder) / Path(parts.path).name
    if path.is_file():
        if not has_checksum(path, sha256):
            raise DataError(f"{path} is not the published file: its SHA-256 differs; remove it to download it anew")
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as scratch:
        partial = Path(scratch) / path.name
        _download(url, partial, wanted=path)
        if not has_checksum(partial, sha256):
            raise DataError(f"what {url} sent is not the published file: its SHA-256 differs")
        partial.replace(path)
    return path


def has_checksum(path: Path, sha256: str) -> bool:
    """Whether a file has this SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256.lower()


def _download(url: str, partial: Path, *, wanted: Path) -> None:
    try:
        with urlopen(url, timeout=_SECONDS) as response, partial.open("wb") as file:
            shutil.copyfileobj(response, file, _CHUNK)
    except (URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(f"cannot download {url} ({reason}); fetch it by other means and put it at {wanted}") from None
