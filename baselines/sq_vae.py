"""SQ-VAE (Takida et al. 2022), Gaussian with one variance: stochastic quantisation that anneals itself."""

import math

import torch
from torch.nn.functional import log_softmax

from baselines.discrete import DiscreteAutoencoder, squared_distances
from otpdag.layers import gumbel_softmax

FIRST_VARIANCE = 20.0 / 64  # for each coordinate of a codeword: the authors' 20 for their 64
LAST_TEMPERATURE = math.exp(-1e-5 * 100 * 50_000 / 32)  # where 100 epochs of CIFAR10 end with the authors' decay


class SQVAE(DiscreteAutoencoder):
    r"""Codes drawn with probabilities :math:`\propto \exp(-\|z - b_k\|^2 / 2\sigma^2)`, the variance learned.

    The relaxation's temperature falls from one along an exponential, as the authors' does; a shorter run covers the
    same range. The decoder's variance is integrated out (their "arelbo").
    """

    def start(self, generator):
        book = torch.randn(self.n_codes, self.code_dim, generator=generator)
        return {"codebook": book, "log_variance": torch.tensor([math.log(FIRST_VARIANCE * self.code_dim)])}

    def loss(self, theta, latents, rows, decode, streams, progress):
        book, images = self.codebook(theta), len(rows)
        precision = 1 / (1 + theta["log_variance"][0].exp())
        logits = -0.5 * precision * squared_distances(latents, book)
        uniform = torch.rand(logits.shape, generator=streams.generators[0])
        drawn = gumbel_softmax(logits, uniform, LAST_TEMPERATURE**progress)
        quantized = drawn @ book
        logs = log_softmax(logits, -1)
        discrete = (logs.exp() * logs).sum() / images
        continuous = 0.5 * precision.squeeze() * (latents - quantized).square().sum() / images
        error = (decode(quantized) - rows).square().sum() / images
        return 0.5 * rows.shape[1] * torch.log(error) + discrete + continuous
