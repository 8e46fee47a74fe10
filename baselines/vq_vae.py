"""VQ-VAE (van den Oord et al. 2017): straight-through gradient, codewords by gradient or by moving averages."""

import torch

from baselines.discrete import DiscreteAutoencoder, squared_distances
from otpdag.numerics import nearest as nearest_of


class VQVAE(DiscreteAutoencoder):
    """Codewords learned by the gradient of their distance to the latents.

    Args:
        commitment: Weight of the latents' distance to their codewords.
        **settings: See :class:`baselines.discrete.DiscreteAutoencoder`.
    """

    def __init__(self, *args, commitment=0.25, **settings):
        super().__init__(*args, **settings)
        self.commitment = commitment

    def start(self, generator):
        bound = 1 / self.n_codes
        return {"codebook": (2 * torch.rand(self.n_codes, self.code_dim, generator=generator) - 1) * bound}

    def loss(self, theta, latents, rows, decode, streams, progress):
        book = self.codebook(theta)
        with torch.no_grad():
            nearest = nearest_of(squared_distances(latents, book))
        chosen = book[nearest]
        cost = self.relative_error(decode(latents + (chosen - latents).detach()), rows)
        follow = (chosen - latents.detach()).square().mean()
        return cost + follow + self.commitment * (latents - chosen.detach()).square().mean()


class VQVAEEMA(VQVAE):
    """Codewords as moving averages of their latents (Appendix A.1 of the same paper, decay 0.99).

    Args:
        decay: Of the moving averages.
        **settings: See :class:`VQVAE`.
    """

    def __init__(self, *args, decay=0.99, **settings):
        super().__init__(*args, **settings)
        self.decay = decay

    def start(self, generator):
        self.book = torch.randn(self.n_codes, self.code_dim, generator=generator)
        # as if each had been seen once: codewords that are never used stay where they are
        self.counts, self.sums = torch.ones(self.n_codes), self.book.clone()
        return {}

    def codebook(self, theta):
        return self.book

    def loss(self, theta, latents, rows, decode, streams, progress):
        with torch.no_grad():
            nearest = nearest_of(squared_distances(latents, self.book))
        chosen = self.book[nearest]
        cost = self.relative_error(decode(latents + (chosen - latents).detach()), rows)
        self._average(latents.detach(), nearest)
        return cost + self.commitment * (latents - chosen).square().mean()

    def _average(self, latents, nearest, tiny=1e-5):
        seen = torch.bincount(nearest, minlength=self.n_codes).float()
        sums = torch.zeros_like(self.sums).index_add(0, nearest, latents)
        self.counts = self.decay * self.counts + (1 - self.decay) * seen
        self.sums = self.decay * self.sums + (1 - self.decay) * sums
        total = self.counts.sum()
        smoothed = (self.counts + tiny) / (total + self.n_codes * tiny) * total
        self.book = self.sums / smoothed.unsqueeze(-1)
