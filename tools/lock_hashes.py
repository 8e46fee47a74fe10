"""Adds to the pins of a lock file the hashes of all files of those versions, as the package index lists them.

    python tools/lock_hashes.py requirements.lock

All platforms' files are listed, so that one lock file serves them all. Files that lie in the folders of `pip config`'s
`find-links` are added: a build of torch with a local suffix is not on the index.
"""

import hashlib
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

INDEX = "https://pypi.org/simple"
LINK = re.compile(r'href="[^"#]*/([^/"#]+)#sha256=([0-9a-f]{64})"')


def normalised(name: str) -> str:
    """A name as an index and as file names spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def version_of(file: str, package: str) -> str | None:
    """The version in the name of a wheel or an archive of sources."""
    stem = re.sub(r"\.(tar\.gz|zip|whl|tar\.bz2)$", "", file)
    parts = stem.split("-")
    for cut in range(1, len(parts)):
        if normalised("-".join(parts[:cut])) == normalised(package):
            return parts[cut]
    return None


def listed_files(package: str) -> list[tuple[str, str]]:
    """Names and hashes of a package's files."""
    with urllib.request.urlopen(f"{INDEX}/{normalised(package)}/", timeout=60) as page:
        return LINK.findall(page.read().decode())


def local_files() -> Iterator[tuple[str, str]]:
    """Names and hashes of files beside the index."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    for folder in re.findall(r"find-links='([^']+)'", told.stdout):
        for path in sorted(Path(folder).glob("*")):
            yield path.name, hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Rewrite the lock files that are named."""
    beside = list(local_files())
    for name in sys.argv[1:]:
        lines = []
        for line in Path(name).read_text().splitlines():
            pin = re.match(r"([A-Za-z0-9._-]+)==([^ \\]+)", line)
            if pin is None:
                lines += [] if line.lstrip().startswith("--hash") else [line]
                continue
            package, version = pin.groups()
            found = {h for file, h in [*listed_files(package), *beside]
                     if (version_of(file, package) or "").split("+")[0] == version}  # fmt: skip
            if not found:
                sys.exit(f"{package}=={version} has no files on {INDEX}")
            lines.append(
                " \\\n".join([f"{package}=={version}", *(f"    --hash=sha256:{one}" for one in sorted(found))])
            )
        Path(name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
