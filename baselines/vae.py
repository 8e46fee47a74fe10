"""A variational auto-encoder (Kingma & Welling 2014) with the library's networks and loop, the noise scale learned."""

import math

import numpy as np
import torch
from torch.func import functional_call

from baselines.network_problem import train
from otpdag.data.documents import PictureFormat
from otpdag.learned.autoencoder import EncoderMap
from otpdag.learned.image_networks import dense_decoder, dense_encoder, seeded
from otpdag.problem import LossTerms
from otpdag.structure import unpack


class VAE:
    """Normal encoder with diagonal covariance, standard normal prior, normal decoder with one learned variance.

    Args:
        n_components: Coordinates of the latent.
        hidden: Layers of the networks.
        n_epochs: How often every image is seen, on average.
        batch_size: Images in a step.
        learning_rate: Of Adam; falls to zero along a cosine.
        random_state: Seed.
    """

    def __init__(
        self, n_components=8, *, hidden=(256, 256), n_epochs=20, batch_size=128, learning_rate=1e-3, random_state=0
    ):
        self.n_components, self.hidden, self.n_epochs = n_components, tuple(hidden), n_epochs
        self.batch_size, self.learning_rate, self.random_state = batch_size, learning_rate, random_state

    def fit(self, X):
        self.format = PictureFormat.of(X)
        rows = self.format.rows(X)
        pixels = rows.shape[1]
        encoder = seeded(lambda: dense_encoder(pixels, 2 * self.n_components, self.hidden), self.random_state)
        self.decoder = seeded(lambda: dense_decoder(self.n_components, pixels, self.hidden), self.random_state + 1)
        self.map = EncoderMap(encoder, 2 * self.n_components, self.format.shape)
        parameters = {"log_variance": torch.full((1, 1), 2 * math.log(float(rows.std())))}
        parameters |= {f"decoder.{k}": v.detach().clone().unsqueeze(0) for k, v in self.decoder.named_parameters()}
        parameters |= self.map.init()
        outcome = train(self, rows, parameters)
        self.parameters = unpack(outcome.point, {key: tuple(value.shape[1:]) for key, value in parameters.items()})
        return self

    def _loss(self, theta, phi, rows, streams, progress):
        mean, log_scale = self.map.latents(phi, rows)[0].chunk(2, -1)
        noise = torch.randn(mean.shape, generator=streams.generators[0])
        rebuilt = self._decode(theta, mean + log_scale.exp() * noise)
        log_variance = theta["log_variance"][0]
        cost = 0.5 * ((rebuilt - rows[0]).square() / log_variance.exp() + log_variance).sum(-1)
        divergence = (0.5 * (mean.square() + (2 * log_scale).exp() - 1) - log_scale).sum(-1)
        # one number in units of a pixel, as the other losses are
        return LossTerms.of(torch.zeros(1), reconstruction=(cost + divergence).mean().reshape(1) / rows.shape[-1])

    def _decode(self, parameters, latents):
        state = {k.removeprefix("decoder."): v[0] for k, v in parameters.items() if k.startswith("decoder.")}
        return functional_call(self.decoder, state, (latents,))

    def draw_codes(self, X, seed=0):
        """Draws from the encoder's distribution, one for each image: (n, n_components)."""
        with torch.no_grad():
            mean, log_scale = self.map.latents(self.parameters, self.format.rows(X).unsqueeze(0))[0].chunk(2, -1)
        noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(seed))
        return np.asarray((mean + log_scale.exp() * noise).numpy())
