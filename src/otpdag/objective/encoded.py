r"""The objective of auto-encoders: a graph whose one observed node is decoded from what an encoder makes of it.

.. math:: E\,c(x, \psi(z)) + \eta\, D(P_\phi(Z), P_\theta(Z))

is the Wasserstein auto-encoder (Appendix B). With codewords there are four terms (Appendix C.3):

.. math:: E\,c(x, \psi(Q(z))) + \frac{\eta}{M} \sum_m \big[ D(P_\phi(Z^m), \textstyle\sum_k \pi^m_k N(\mu_k, \Sigma_k))
          + W(P_\phi(Z^m), \textstyle\sum_k \pi^m_k \delta_{\mu_k}) \big] + \eta_r \sum_m KL(\pi^m, U)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from otpdag.backward.encoder import EncoderMap
from otpdag.backward.quantized import QuantizedMap
from otpdag.divergences.base import AbstractDivergence
from otpdag.divergences.semidiscrete import reverse_gradient, semi_dual
from otpdag.layers import nearest
from otpdag.mechanisms import Codebook
from otpdag.mechanisms.codebook import copy_gradient, mahalanobis
from otpdag.objective.sampled import Streams
from otpdag.objective.terms import LossTerms
from otpdag.structure import Naturals, Structure, Theta

__all__ = ["CodebookOptions", "continuous_terms", "encoded_terms", "quantized_terms"]


@dataclass(frozen=True)
class CodebookOptions:
    """Weights of the terms that only codewords have.

    Args:
        eta: Weight of the transport to the codewords.
        pull: Share of that transport's gradient that moves latents; codewords are moved by all of it.
        mixture: Weight of the divergence to the mixture of Gaussians.
        eta_r: Weight of the divergence of codewords' weights from uniform ones.
    """

    eta: float = 1.0
    pull: float = 0.25
    mixture: float = 0.01
    eta_r: float = 1.0


def encoded_terms(
    structure: Structure,
    backward: EncoderMap,
    theta: Theta,
    phi: Theta,
    rows: Tensor,
    streams: Streams,
    *,
    eta: float,
    divergence: AbstractDivergence,
    spread: float,
) -> LossTerms:
    """A Wasserstein auto-encoder on rows (1, n, pixels): nodes ``latent`` and ``image``."""
    naturals = structure.naturals(theta)
    latents = backward.latents(phi, rows)
    zero = torch.zeros(1).to(rows)
    terms = LossTerms.of(zero, reconstruction=_rebuilding(structure, naturals, "latent", latents, rows, spread))
    if not eta:
        return terms
    prior = structure.mechanisms["latent"]
    noise = streams.draw(prior.relaxed_noise, rows.shape[1], rows)
    drawn = prior.relaxed(naturals["latent"], {}, noise, 1.0).expand_as(latents)
    gap = divergence(latents, drawn.to(latents), generator=streams.shared)
    return terms + LossTerms.of(zero, divergence=eta * gap)


def continuous_terms(
    structure: Structure, backward: QuantizedMap, theta: Theta, phi: Theta, rows: Tensor, spread: float
) -> LossTerms:
    """Reconstruction alone, of latents that are not quantised yet."""
    naturals = structure.naturals(theta)
    latents = backward.latents(phi, rows)
    cost = _rebuilding(structure, naturals, "quantized", latents, rows, spread)
    return LossTerms.of(torch.zeros(1).to(rows), reconstruction=cost)


def quantized_terms(
    structure: Structure,
    backward: QuantizedMap,
    theta: Theta,
    phi: Theta,
    rows: Tensor,
    streams: Streams,
    options: CodebookOptions,
    *,
    divergence: AbstractDivergence,
    spread: float,
) -> LossTerms:
    """The four terms on rows (1, n, pixels): nodes ``code``, ``latent``, ``quantized`` and ``image``."""
    naturals = structure.naturals(theta)
    latents = backward.latents(phi, rows)
    at_positions = backward.at_positions(latents)  # (M, n, D)
    codewords, scale = naturals["latent"]["mean"][0], naturals["latent"]["scale"][0].detach()
    with torch.no_grad():
        # in units of squared latents, per coordinate, whatever the covariances
        unit = scale.square().mean() / backward.dim
        costs = mahalanobis(at_positions.flatten(0, 1), codewords, scale * unit.rsqrt())
        codes = nearest(costs)
    chosen = codewords.detach()[codes].unflatten(0, at_positions.shape[:2])
    quantized = copy_gradient(latents, chosen.transpose(0, 1).flatten(1).unsqueeze(0))
    cost = _rebuilding(structure, naturals, "quantized", quantized, rows, spread)
    weights = naturals["code"]["weights"][0]
    zero = torch.zeros(1).to(rows)
    transport = _transport(backward, phi, at_positions, costs, codewords, scale, weights, options.pull)
    gap = options.eta * transport
    if options.mixture:
        gap = gap + options.mixture * _mixture(structure, naturals, backward, at_positions, streams, divergence)
    uniform = options.eta_r * (weights * (weights.clamp(min=1e-12).log() + math.log(backward.size))).sum()
    return LossTerms.of(zero, reconstruction=cost, divergence=gap.reshape(1), entropic=uniform.reshape(1))


def _rebuilding(
    structure: Structure, naturals: Naturals, parent: str, latents: Tensor, rows: Tensor, spread: float
) -> Tensor:
    """Mean squared error in units of the pixels' variance."""
    decoder = structure.mechanisms["image"]
    none = torch.zeros(1, rows.shape[1], decoder.noise.dim).to(rows)
    rebuilt = decoder.forward(naturals["image"], {parent: latents}, none)
    return ((rebuilt - rows).square().mean() / spread**2).reshape(1)


def _transport(
    backward: QuantizedMap,
    phi: Theta,
    at_positions: Tensor,
    costs: Tensor,
    codewords: Tensor,
    scale: Tensor,
    weights: Tensor,
    pull: float,
) -> Tensor:
    """Mean semi-dual of the transport to weighted codewords: one problem, or one for each position."""
    problems = backward.positions if backward.by_position else 1
    points = at_positions.reshape(problems, -1, backward.dim)
    target = weights if backward.by_position else weights.mean(0, keepdim=True)
    dual = semi_dual(costs.reshape(problems, -1, backward.size), target, reverse_gradient(backward.potentials(phi)))
    sent_to, at = codewords[dual.assignment], scale[dual.assignment]
    precision = scale.square().mean() / at.square()
    to_latents = (precision * (points - sent_to.detach()).square()).mean((-2, -1))
    to_codewords = (precision * (points.detach() - sent_to).square()).mean((-2, -1))
    # the value is that of the semi-dual; the gradient is shared out
    moved = to_codewords + pull * (to_latents - to_latents.detach())
    return (moved + dual.value).mean()


def _mixture(
    structure: Structure,
    naturals: Naturals,
    backward: QuantizedMap,
    at_positions: Tensor,
    streams: Streams,
    divergence: AbstractDivergence,
) -> Tensor:
    """Mean divergence between each position's latents and the mixture of Gaussians around the codewords.

    It teaches the covariances; latents and codewords have the transport.
    """
    codebook = cast(Codebook, structure.mechanisms["latent"])
    rows = at_positions.shape[1]
    codes = structure.mechanisms["code"].forward(
        {"weights": naturals["code"]["weights"].detach()},
        {},
        streams.draw(structure.mechanisms["code"].noise, rows, at_positions),
    )
    noise = streams.draw(codebook.noise, rows, at_positions)
    own = {"mean": naturals["latent"]["mean"].detach(), "scale": naturals["latent"]["scale"]}
    drawn = backward.at_positions(codebook.forward(own, {"code": codes}, noise))
    return divergence(at_positions.detach(), drawn, generator=streams.shared).mean()
