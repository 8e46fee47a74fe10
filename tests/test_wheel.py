"""The wheel holds what the package needs, and works outside the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """The content of a wheel built from this repository."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_nothing_is_missing_and_nothing_is_too_much(unpacked):
    shipped = {str(path.relative_to(unpacked)) for path in (unpacked / "otpdag").rglob("*") if path.is_file()}
    source = ROOT / "src"
    own = {str(path.relative_to(source)) for path in (source / "otpdag").rglob("*") if path.is_file()}
    assert shipped == {name for name in own if "__pycache__" not in name}
    assert {"otpdag/report/page.css", "otpdag/report/page.js", "otpdag/py.typed"} <= shipped


def test_it_works_elsewhere(unpacked, tmp_path):
    (tmp_path / "t.csv").write_text("x,y\n" + "".join(f"{k % 7}.5,{(3 * k) % 11}.25\n" for k in range(60)))
    script = (
        "import sys, otpdag\n"
        f"assert otpdag.__file__.startswith({str(unpacked)!r}), otpdag.__file__\n"
        "from otpdag.cli import app\n"
        "for words in ('init t.csv', 'fit t.yaml t.csv --out run --quiet --restarts 1', 'report run'):\n"
        "    app(words.split(), standalone_mode=False)\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"PYTHONPATH": str(unpacked), "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "report.html").stat().st_size > 20_000
