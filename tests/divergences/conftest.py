"""Fixtures for the tests of divergences."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Bound torch to one thread: the samples are small, and two threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
