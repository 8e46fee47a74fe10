"""VQ-VAE and SQ-VAE: their quantisers against vector-quantize-pytorch and by hand, and that they learn."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from baselines.sq_vae import LAST_TEMPERATURE, SQVAE
from baselines.vae import VAE
from baselines.vq_vae import VQVAE, VQVAEEMA
from otpdag.noise import Streams

SMALL = {"width": 8, "n_epochs": 30, "batch_size": 16, "learning_rate": 5e-3}


def tiles(count=120, seed=0):
    levels = np.random.default_rng(seed).integers(0, 4, (count, 2, 2))
    return (levels.repeat(4, 1).repeat(4, 2) * 80).astype(np.uint8)


def quantiser(made, latents):
    """One evaluation of the loss with a decoder that hands its input on."""
    made.spread = 1.0
    theta = {name: value.unsqueeze(0) for name, value in made.start(torch.Generator().manual_seed(0)).items()}
    seen = []

    def decode(quantized):
        seen.append(quantized)
        return torch.zeros(4, 3)

    loss = made.loss(theta, latents, torch.zeros(4, 3), decode, Streams([0]), 0.0)
    return theta, seen[0], loss


def test_moving_averages_are_those_of_vector_quantize_pytorch():
    peer = pytest.importorskip("vector_quantize_pytorch", exc_type=ImportError)
    made = VQVAEEMA(8, 4, decay=0.99, commitment=0.25)
    latents = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    book = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    theirs = peer.VectorQuantize(dim=4, codebook_size=8, decay=0.99, commitment_weight=0.25, kmeans_init=False)
    theirs._codebook.embed.data.copy_(book.unsqueeze(0))
    theirs._codebook.embed_avg.data.copy_(book.unsqueeze(0))
    theirs._codebook.cluster_size.data.fill_(1.0)
    expected, codes, commitment = theirs(latents.unsqueeze(0))
    _, quantized, loss = quantiser(made, latents)
    assert torch.allclose(quantized, expected[0], atol=1e-5)
    assert loss.item() == pytest.approx(commitment.sum().item(), rel=1e-4)
    assert len(torch.unique(codes)) > 1
    assert torch.allclose(made.book, theirs._codebook.embed[0], atol=1e-4)


def test_codewords_and_latents_are_pulled_towards_each_other():
    latents = torch.randn(20, 4, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
    theta, quantized, loss = quantiser(VQVAE(6, 4), latents)
    book = theta["codebook"][0]
    gap = (latents - quantized).square().mean().item()
    assert loss.item() == pytest.approx(1.25 * gap, rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, latents)
    assert torch.allclose(gradient, 0.25 * 2 * (latents - quantized).detach() / latents.numel(), atol=1e-6)
    assert float(book.abs().max()) <= 1 / 6


def test_temperature_ends_where_the_authors_decay_does():
    assert pytest.approx(math.exp(-1e-5 * 156_250)) == LAST_TEMPERATURE


def check_learned(made, size):
    images = tiles(40, seed=1)
    codes = made.encode(images)
    assert codes.shape == (40, 4)
    assert not made.failed
    error = np.square(made.reconstruct(images) - images.astype(float)).mean()
    assert error < 0.8 * images.var()
    assert 1 < made.perplexity(images) <= size


@pytest.mark.slow
@pytest.mark.parametrize("method", [VQVAE, VQVAEEMA, SQVAE])
def test_each_learns_something(method):
    check_learned(method(16, 8, random_state=0, **SMALL).fit(tiles()), 16)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["VQEMA", "RevivedVQEMA", "FiniteScalar"])
def test_quantisers_of_vector_quantize_pytorch_learn_and_leave_the_global_state_alone(method):
    pytest.importorskip("vector_quantize_pytorch", exc_type=ImportError)
    from baselines import library_quantizers

    before = torch.get_rng_state()
    made = getattr(library_quantizers, method)(27, 8, random_state=0, **SMALL).fit(tiles())
    assert bool((torch.get_rng_state() == before).all())
    check_learned(made, 27)
    latents = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, codes = made.module(latents.unsqueeze(0))[:2]
        assert torch.allclose(made.codebook(made.parameters)[codes[0].long()], expected[0], atol=1e-5)


def test_the_variational_bound_is_that_of_torch_distributions():
    made = VAE(2, hidden=(8,), n_epochs=1, batch_size=40).fit(tiles(80))
    rows = made.format.rows(tiles(40, seed=1))
    theta = {key: value for key, value in made.parameters.items() if not key.startswith("phi.")}
    with torch.no_grad():
        found = made._loss(theta, made.parameters, rows.unsqueeze(0), Streams([3]), 0.0).total
        mean, log_scale = made.map.latents(made.parameters, rows.unsqueeze(0))[0].chunk(2, -1)
        noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(3))
        rebuilt = made._decode(theta, mean + log_scale.exp() * noise)
        likelihood = Normal(rebuilt, (0.5 * theta["log_variance"][0]).exp()).log_prob(rows).sum(-1)
        divergence = kl_divergence(Normal(mean, log_scale.exp()), Normal(0.0, 1.0)).sum(-1)
    constant = 0.5 * rows.shape[1] * math.log(2 * math.pi)
    expected = (divergence - likelihood).mean().item() - constant
    assert found.item() * rows.shape[1] == pytest.approx(expected, rel=1e-4)
    assert made.draw_codes(tiles(5)).shape == (5, 2)
