"""What VQ-VAE and SQ-VAE share with each other and with the library: networks, minibatches, Adam, learning rate."""

import functools
import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from baselines.network_problem import train
from otpdag.data.documents import PictureFormat
from otpdag.estimators.vector_quantized import directions
from otpdag.learned.autoencoder import EncoderMap, rebuilding_cost
from otpdag.learned.image_networks import (
    Flat,
    Grid,
    image_decoder,
    image_encoder,
    positions,
    seeded,
    started_from_data,
    with_bottleneck,
)
from otpdag.problem import LossTerms
from otpdag.structure import unpack

ROWS_AT_ONCE = 250


class DiscreteAutoencoder(ABC):
    """An auto-encoder with a codebook. A subclass says how the codebook starts and what is minimised.

    Args:
        n_codes: Number of codewords.
        code_dim: Length of a codeword.
        width: Channels of the networks, which are those of the library's estimator.
        n_epochs: How often every image is seen, on average.
        batch_size: Images in a step.
        learning_rate: Of Adam; falls to zero along a cosine.
        random_state: Seed; networks and minibatches are those of the library's estimator with this seed.
        as_ours: Take the start of the networks, the length of codewords and what a rebuilt image costs from the
            library's estimator too, so that only the quantiser differs. Without it networks start as torch draws
            them, codewords are as long as the grid has channels, and the cost is the squared error.
    """

    in_turn = False
    """Whether encoder and model are updated in turn, each on every batch."""

    def __init__(
        self,
        n_codes=512,
        code_dim=64,
        *,
        width=128,
        n_epochs=100,
        batch_size=32,
        learning_rate=1e-3,
        random_state=0,
        as_ours=False,
    ):
        self.n_codes, self.channels, self.width = n_codes, code_dim, width
        self.code_dim = min(code_dim, directions(n_codes)) if as_ours else code_dim
        self.n_epochs, self.batch_size, self.learning_rate = n_epochs, batch_size, learning_rate
        self.random_state, self.as_ours = random_state, as_ours

    @abstractmethod
    def start(self, generator):
        """Learned tensors besides the networks' by name."""

    @abstractmethod
    def loss(self, theta, latents, rows, decode, streams, progress):
        """Loss of latents (n * positions, code_dim); ``decode`` makes rows of latents like these."""

    def codebook(self, theta):
        """The codewords."""
        return theta["codebook"][0]

    def fit(self, X, on_step=None):
        self.format = PictureFormat.of(X)
        rows = self.format.rows(X)
        channels, height, width = self.format.shape
        self.grid = positions(height, width)
        encoder = seeded(lambda: image_encoder(channels, self.channels, self.width), self.random_state)
        decoder = seeded(lambda: image_decoder(channels, self.channels, self.width), self.random_state + 1)
        if self.as_ours:
            meet = functools.partial(with_bottleneck, encoder, decoder, self.channels, self.code_dim)
            encoder, decoder = seeded(meet, self.random_state + 2)
            some = rows[:: math.ceil(len(rows) / 64)]  # as ours: thousands of latents tell their units
            started_from_data(encoder, decoder, some.reshape(-1, *self.format.shape))
        self.decoder: nn.Module = Grid(decoder, *self.grid, self.code_dim)
        self.map = EncoderMap(Flat(encoder), math.prod(self.grid) * self.code_dim, self.format.shape)
        self.spread = float(rows.std())
        generator = torch.Generator().manual_seed(self.random_state)
        parameters = {name: value.unsqueeze(0) for name, value in self.start(generator).items()}
        parameters |= {f"decoder.{k}": v.detach().clone().unsqueeze(0) for k, v in self.decoder.named_parameters()}
        parameters |= self.map.init()
        self.shapes = {key: tuple(value.shape[1:]) for key, value in parameters.items()}
        outcome = train(self, rows, parameters, on_step, in_turn=self.in_turn)
        self.failed = bool(outcome.failed.any())
        self.parameters = unpack(outcome.point, self.shapes)
        return self

    def _loss(self, theta, phi, rows, streams, progress):
        latents = self.map.latents(phi, rows)[0].reshape(-1, self.code_dim)
        loss = self.loss(theta, latents, rows[0], lambda z: self._decode(theta, z), streams, progress)
        return LossTerms.of(torch.zeros(1), reconstruction=loss.reshape(1))

    def _decode(self, parameters, latents):
        state = {k.removeprefix("decoder."): v[0] for k, v in parameters.items() if k.startswith("decoder.")}
        return functional_call(self.decoder, state, (latents.reshape(-1, math.prod(self.grid) * self.code_dim),))

    def relative_error(self, rebuilt, rows):
        """Mean squared error in units of the pixels' variance; as the library's estimator has it, its logarithm."""
        return rebuilding_cost(rebuilt, rows, self.spread, noise="shared" if self.as_ours else "fixed")

    def codes_of(self, latents):
        """Numbers of the codewords that latents (n, code_dim) are sent to."""
        return squared_distances(latents, self.codebook(self.parameters)).argmin(1)

    def encode(self, X):
        parts = []
        with torch.no_grad():
            for part in self.format.rows(X).split(ROWS_AT_ONCE):
                latents = self.map.latents(self.parameters, part.unsqueeze(0))[0].reshape(-1, self.code_dim)
                parts.append(self.codes_of(latents).reshape(len(part), -1))
        return torch.cat(parts).numpy()

    def decode(self, codes):
        with torch.no_grad():
            book = self.codebook(self.parameters)
            parts = [self._decode(self.parameters, book[part]) for part in torch.as_tensor(codes).split(ROWS_AT_ONCE)]
        return self.format.pictures(torch.cat(parts))

    def reconstruct(self, X):
        return self.decode(self.encode(X))

    def perplexity(self, X):
        share = np.bincount(self.encode(X).ravel(), minlength=self.n_codes).astype(float)
        share = share[share > 0] / share.sum()
        return float(np.exp(-(share * np.log(share)).sum()))


def squared_distances(latents, book):
    """Squared Euclidean distances (n, n_codes)."""
    return latents.square().sum(1, keepdim=True) + book.square().sum(1) - 2 * latents @ book.T
