"""Quantisers as people use them: those of vector-quantize-pytorch (MIT), between the library's networks."""

from abc import abstractmethod

import torch
from torch.func import functional_call
from vector_quantize_pytorch import FSQ, VectorQuantize

from baselines.discrete import DiscreteAutoencoder

PREFIX = "quantizer."


class LibraryQuantizer(DiscreteAutoencoder):
    """Networks, minibatches and Adam of all others around a module that quantises. A subclass makes the module.

    Settings that are not named here are the library's own: gradients by the rotation trick and, for codewords by
    moving averages, a commitment of one.
    """

    @abstractmethod
    def make(self):
        """The module; it returns quantised latents, their codes and, if it has one, a loss."""

    def fit(self, X, on_step=None):
        with torch.random.fork_rng(devices=[]):  # the modules draw from torch's own state
            torch.manual_seed(self.random_state)
            super().fit(X, on_step)
        self.module.load_state_dict(own_state(self.parameters), strict=False)
        self.module.eval()
        return self

    def start(self, generator):
        self.module = self.make()
        return {PREFIX + name: value.detach().clone() for name, value in self.module.named_parameters()}

    def loss(self, theta, latents, rows, decode, streams, progress):
        quantized, _, *losses = functional_call(self.module, own_state(theta), (latents.unsqueeze(0),))
        return self.relative_error(decode(quantized[0]), rows) + sum(loss.sum() for loss in losses)

    def codes_of(self, latents):
        """Numbers of the codewords that latents (n, code_dim) are sent to."""
        return self.module(latents.unsqueeze(0))[1][0].long()

    def codebook(self, theta):
        return self.module.codebook


def own_state(parameters):
    """The module's learned tensors."""
    return {name.removeprefix(PREFIX): value[0] for name, value in parameters.items() if name.startswith(PREFIX)}


class VQEMA(LibraryQuantizer):
    """``VectorQuantize``: codewords as moving averages, decay 0.99, from random ones."""

    def make(self):
        return VectorQuantize(self.code_dim, self.n_codes, decay=0.99)


class RevivedVQEMA(LibraryQuantizer):
    """The same from k-means of the first batch; codewords in little use are replaced by latents of the batch."""

    def make(self):
        options = {"kmeans_init": True, "threshold_ema_dead_code": 2, "decay": 0.99}
        return VectorQuantize(self.code_dim, self.n_codes, **options)


class FiniteScalar(LibraryQuantizer):
    """``FSQ`` (Mentzer et al. 2023): three bounded coordinates, rounded; their grid is the codebook."""

    def make(self):
        side = round(self.n_codes ** (1 / 3))
        if side**3 != self.n_codes:
            raise ValueError(f"n_codes must be a third power for three coordinates; got {self.n_codes}")
        return FSQ([side] * 3, dim=self.code_dim)

    def codebook(self, theta):
        return self.module.indices_to_codes(torch.arange(self.n_codes).unsqueeze(0))[0]
