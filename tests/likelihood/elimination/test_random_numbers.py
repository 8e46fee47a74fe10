"""Numbers of strata have the distribution of independent ones, and far more precise means."""

from __future__ import annotations

import pytest
import torch

from otpdag.likelihood.elimination.sum_product import RandomNumbers


@pytest.mark.parametrize("stratified", [False, True])
def test_their_distribution(stratified):
    numbers = RandomNumbers(torch.Generator().manual_seed(9), stratified)
    uniform = numbers.uniform((4000, 8, 1), torch.float64)
    normal = numbers.normal((4000, 8, 1), torch.float64)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    for draw in range(8):  # whichever stratum it gets, each draw has the whole distribution
        assert uniform[:, draw].mean().item() == pytest.approx(0.5, abs=0.02)
        assert uniform[:, draw].var().item() == pytest.approx(1 / 12, abs=0.006)
        assert normal[:, draw].std().item() == pytest.approx(1.0, abs=0.05)
    spread = uniform.mean(1).std().item()
    independent = (1 / 12 / 8) ** 0.5
    assert spread == pytest.approx(independent / 8 if stratified else independent, rel=0.05)
