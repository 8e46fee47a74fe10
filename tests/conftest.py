"""Fixtures for all tests."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("MPLBACKEND", "Agg")  # no test opens a window


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Return the folder of real data sets that OTPDAG_DATA names; without it the test is skipped."""
    folder = os.environ.get("OTPDAG_DATA")
    if not folder:
        pytest.skip("needs real data sets: set OTPDAG_DATA to the folder that holds them")
    path = Path(folder)
    if not path.is_dir():
        pytest.fail(f"OTPDAG_DATA must name an existing folder; got {folder!r}")
    return path
