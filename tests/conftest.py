"""Fixtures for all tests."""

import gc
import os
from pathlib import Path

import pytest

os.environ.setdefault("MPLBACKEND", "Agg")  # no test opens a window
gc.disable()  # until all tests are collected: what is imported stays, and was gone through again and again


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Look for garbage from here on, but among what tests make alone: modules and tests are there to the end."""
    gc.collect()
    gc.freeze()
    gc.enable()


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
