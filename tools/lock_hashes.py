"""Add to pinned requirements the hashes of their files, so that pip refuses any other file.

``python tools/lock_hashes.py < pins > requirements.lock`` asks the package index (``PIP_INDEX_URL``, else PyPI) for all
files of each pinned version. Kept are sources and the wheels for Python 3.11 and newer on common systems, and the file
that pip itself would take here, which may come from elsewhere: a build of torch for the processor only, for instance.
Comments, options and markers stay as they are, hashes that are there already are found again. Why not another tool:
``docs/archive/decisions/0029-hashes.md``.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from packaging.tags import Tag
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, canonicalize_name, parse_sdist_filename
from packaging.utils import parse_wheel_filename as parse_wheel
from packaging.version import Version

LINK = re.compile(r'<a\s[^>]*?href="([^"]*)#sha256=([0-9a-f]{64})"[^>]*>([^<]*)</a>')
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)(.*)$")
SYSTEMS = re.compile(r"any|manylinux.*_(x86_64|aarch64)|linux_(x86_64|aarch64)|macosx_.*|win_amd64|win_arm64")
PYTHONS = range(11, 15)


class File(NamedTuple):
    """A file of a release on the index."""

    name: str
    sha256: str


def main() -> None:
    """Read pins, write them with hashes."""
    parser = argparse.ArgumentParser(description="Add hashes to the pins on the standard input.")
    parser.add_argument(
        "--skip", default="$^", metavar="REGEX", help="leave out files of the index whose name holds this"
    )
    parser.add_argument("--index-only", action="store_true", help="do not ask pip, which downloads what it would take")
    options = parser.parse_args()
    lines = re.sub(r" *\\\n +--hash=\S+", "", sys.stdin.read()).splitlines()
    pins = [match for line in lines if (match := PIN.match(line))]
    with ThreadPoolExecutor(8) as pool:
        on_index = dict(zip(map(_key, pins), pool.map(lambda pin: files_of(pin[1], pin[2]), pins), strict=True))
    here = {} if options.index_only else _taken_here([f"{pin[1]}=={pin[2]}{pin[3]}" for pin in pins])
    for line in lines:
        pin = PIN.match(line)
        if pin is None:
            print(line)
            continue
        files = [
            file for file in on_index[_key(pin)] if is_wanted(file.name) and not re.search(options.skip, file.name)
        ]
        hashes = {file.sha256 for file in files} | here.get(_key(pin), set())
        if not hashes:
            raise SystemExit(f"{pin[0]}: neither the index nor pip knows a file of this version")
        print(" \\\n    ".join([line, *(f"--hash=sha256:{one}" for one in sorted(hashes))]))


def _key(pin: re.Match[str]) -> tuple[str, str]:
    return canonicalize_name(pin[1]), pin[2]


def files_of(name: str, version: str) -> list[File]:
    """All files of a version, from the project's page on the index; none where the index lacks the project."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    request = urllib.request.Request(f"{index}/{canonicalize_name(name)}/", headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        page = answer.read().decode()
    files = [File(html.unescape(text).strip(), sha256) for _, sha256, text in LINK.findall(page)]
    return [file for file in files if _version_of(file.name) == Version(version)]


def _version_of(name: str) -> Version | None:
    try:
        return (parse_wheel(name) if name.endswith(".whl") else parse_sdist_filename(name))[1]
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None  # an old format, or none of ours


def is_wanted(name: str) -> bool:
    """Is a file a source, or a wheel for a Python and a system that we know of?

    >>> [is_wanted(f"x-1-{tags}.whl") for tags in ("py3-none-any", "cp38-abi3-win_amd64", "cp310-cp310-win_amd64")]
    [True, True, False]
    """
    return not name.endswith(".whl") or any(map(_fits, parse_wheel(name)[3]))


def _fits(tag: Tag) -> bool:
    if SYSTEMS.fullmatch(tag.platform) is None:
        return False
    if tag.interpreter in ("py3", *(f"py3{minor}" for minor in PYTHONS)):
        return True
    stable = tag.abi == "abi3" and re.fullmatch(r"cp3\d+", tag.interpreter) is not None
    return stable or any(tag.interpreter == tag.abi == f"cp3{minor}" for minor in PYTHONS)


def _taken_here(pins: list[str]) -> dict[tuple[str, str], set[str]]:
    """The hashes of the files that pip would install here, by name and version without its local part."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    command += ["--no-build-isolation", "--report", "-", *pins]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    here: dict[tuple[str, str], set[str]] = {}
    for item in report["install"]:
        metadata, archive = item["metadata"], item["download_info"].get("archive_info", {})
        key = canonicalize_name(metadata["name"]), metadata["version"].partition("+")[0]
        here.setdefault(key, set()).update(
            [archive["hashes"]["sha256"]] if "sha256" in archive.get("hashes", {}) else []
        )
    return here


if __name__ == "__main__":
    main()
