r"""The paper's own way to discrete representations (Section 4.3 and Appendix C.3).

Latents of an image at M positions are sent to the nearest of K codewords by Mahalanobis distance, and the gradient of
the decoder is copied to them. Besides the squared error there are, at every position, the exact Wasserstein distances
of a batch's latents to draws of the mixture of Gaussians around the codewords and to the codewords with their weights,
and the divergence of these weights from even ones:

.. math:: E\,c(x, \psi(Q(z))) + \frac{\eta}{M} \sum_m \big[ W(P_\phi(Z^m), \textstyle\sum_k \pi^m_k N(\mu_k, \Sigma_k))
          + W(P_\phi(Z^m), \textstyle\sum_k \pi^m_k \delta_{\mu_k}) \big] + \eta_r \sum_m KL(\pi^m, U)

Batches of 32 images, encoder and model in turn, a constant rate of 1e-3. The text is silent on where codewords start
(here: standard normal) and on how a mixture is drawn (components by the weights, which get no gradient from it).
"""

import math

import torch

from baselines.discrete import DiscreteAutoencoder
from otpdag.divergences import Wasserstein
from otpdag.learned.algorithm import Family, Step
from otpdag.mechanisms.codebook import copy_gradient, mahalanobis
from otpdag.numerics import nearest
from otpdag.schedules import Constant
from otpdag.settings import Weights

WEIGHTS, RATE = Weights(eta=1e-3, eps=1.0), 1e-3  # eta and eta_r


class PaperCodebook(DiscreteAutoencoder):
    """Codewords with scales, and weights of their own at every position."""

    in_turn = True

    def __init__(self, *args, **settings):
        super().__init__(*args, **{"learning_rate": Constant(RATE)} | settings)

    def start(self, generator):
        return {
            "codebook": torch.randn(self.n_codes, self.code_dim, generator=generator),
            "log_scale": torch.zeros(self.n_codes, self.code_dim),
            "logits": torch.zeros(math.prod(self.grid), self.n_codes),
        }

    def loss(self, theta, latents, rows, decode, streams, progress):
        book, scale, log_weights = self.codebook(theta), theta["log_scale"][0].exp(), theta["logits"][0].log_softmax(-1)
        chosen = book.detach()[self._nearest(latents, book, scale)]
        cost = (decode(copy_gradient(latents, chosen)) - rows).square().mean()
        at_positions = latents.reshape(len(rows), -1, self.code_dim).transpose(0, 1)  # (M, n, D)
        uneven = (log_weights.exp() * (log_weights + math.log(self.n_codes))).sum()
        families = self._families(at_positions, book, scale, log_weights.exp(), streams.generators[0])
        return Step(cost, families, lambda: uneven).terms(WEIGHTS, Wasserstein(workers=1), streams).total

    @staticmethod
    def _families(latents, book, scale, weights, generator):
        """Latents beside the mixture of Gaussians, and beside the codewords with their weights, at every position."""
        drawn = torch.multinomial(weights.detach(), latents.shape[1], replacement=True, generator=generator)
        yield Family(latents, book[drawn] + scale[drawn] * torch.randn(latents.shape, generator=generator))
        yield Family(latents, book.expand(len(weights), -1, -1), None, weights)

    def codes_of(self, latents):
        return self._nearest(latents, self.codebook(self.parameters), self.parameters["log_scale"][0].exp())

    @staticmethod
    def _nearest(latents, book, scale):
        with torch.no_grad():
            return nearest(mahalanobis(latents, book, scale))
