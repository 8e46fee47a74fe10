"""Twins on the replica axis."""

import torch

from otpdag.likelihood.elimination.families import stacked_replicas


def test_replica_by_replica_each_twin_in_turn():
    alone, shared = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)), torch.ones(1, 2, 4)
    stacked = stacked_replicas([alone, shared, 2 * alone], 3)
    assert stacked.shape == (9, 2, 4)
    for replica in range(3):
        for twin, expected in enumerate((alone[replica], shared[0], 2 * alone[replica])):
            assert torch.equal(stacked[3 * replica + twin], expected)
