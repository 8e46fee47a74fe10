"""Codewords among latents."""

import numpy as np
import torch

from otpdag.learned.autoencoder import lloyd


def test_k_means_finds_separated_centres_and_what_is_left():
    rng = np.random.default_rng(3)
    truth = np.array([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0]])
    points = torch.as_tensor(np.repeat(truth, 100, 0) + rng.normal(size=(300, 2)) * [1.0, 2.0])
    means = points.reshape(3, 100, 2).mean(1)
    expected = (points.reshape(3, 100, 2) - means[:, None]).square().mean((0, 1))
    found = [lloyd(points, 3, torch.Generator().manual_seed(seed), steps=20) for seed in range(20)]
    centres, residual = min(found, key=lambda one: float(one[1].sum()))  # one that starts in every cluster
    torch.testing.assert_close(torch.cdist(means, centres).amin(1), torch.zeros(3).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(residual, expected)


def test_fewer_points_than_centres_repeat():
    centres, residual = lloyd(torch.tensor([[0.0], [8.0]]), 5, torch.Generator().manual_seed(0))
    assert centres.shape == (5, 1)
    assert float(residual.max()) < 1e-2
