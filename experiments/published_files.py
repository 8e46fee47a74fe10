"""Published files: found in a local folder or downloaded once, and never used before their checksum is right."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from otpdag.datasets import DiscreteNetwork, read_bif
from otpdag.errors import DataError


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
        return checked(path, sha256, hint="; remove it to download it anew")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as scratch:
        partial = Path(scratch) / path.name
        _download(url, partial, wanted=path)
        checked(partial, sha256, name=f"what {url} sent")
        partial.replace(path)
    return path


def checked(path: Path, sha256: str, *, name: str = "", what: str = "the published file", hint: str = "") -> Path:
    """A file that has this SHA-256; any other is refused."""
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256.lower():
            raise DataError(f"{name or path} is not {what}: its SHA-256 differs{hint}")
    return path


def _download(url: str, partial: Path, *, wanted: Path, seconds: float = 30.0) -> None:
    """Write what a URL sends; it fails after so many seconds without a byte."""
    try:
        with urlopen(url, timeout=seconds) as response, partial.open("wb") as file:
            shutil.copyfileobj(response, file)
    except (URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(f"cannot download {url} ({reason}); fetch it by other means and put it at {wanted}") from None


_ORIGIN = "https://www.bnlearn.com/bnrepository (CC BY-SA 3.0)"
_SHA256 = {
    "alarm": "701e6c561f71b55669070c29614f0724b761289aa2c4a35bcc97b638ee881fa2",
    "asia": "9f770c96940dc4d860b581602120790ac538983b30b28d38631b8184dc7b5f89",
    "cancer": "05d4ea00a758450eed6fe68ea6de4da05ce0e3e919bd3e8ff7f0bc80a1db4b48",
    "earthquake": "74dd131e2c6437a39de17f2963d2d16fadd91e70450d1fc20501df05e8dc4f2e",
    "sachs": "b7bd3931192f9e529f0f88bba15fca6cc61ba3c805d5c8ae57eba57ed3b332ec",
    "survey": "3698ccc0f1f74b9f935617d91989e4cdb39edb5360b558216af64047fc88b3b0",
}


def data_folder() -> Path:
    """Return the folder of real data sets, which the environment variable ``OTPDAG_DATA`` names.

    Raises:
        DataError: The variable is not set.
    """
    folder = os.environ.get("OTPDAG_DATA")
    if not folder:
        raise DataError("set the environment variable OTPDAG_DATA to the folder of data sets")
    return Path(folder)


def load_network(name: str, folder: str | Path | None = None) -> DiscreteNetwork:
    """Read one of the small networks of the bnlearn repository from the local folder.

    Args:
        name: One of "alarm", "asia", "cancer", "earthquake", "sachs" and "survey".
        folder: The folder that holds ``bif/<name>.bif``; by default the one that ``OTPDAG_DATA`` names.

    Returns:
        The network.

    Raises:
        DataError: The name is unknown, or the file is missing or not the published one.
    """
    if name not in _SHA256:
        raise DataError(f"`name` must be one of {', '.join(_SHA256)}; got '{name}'")
    path = Path(folder or data_folder()) / "bif" / f"{name}.bif"
    if not path.is_file():
        raise DataError(f"{path} is missing; the networks are published at {_ORIGIN}")
    return read_bif(checked(path, _SHA256[name], hint="; `read_bif` reads it anyway"))
