r"""The objective of auto-encoders: a graph whose one observed node is decoded from what an encoder makes of it.

.. math:: E\,c(x, \psi(z)) + \eta\, D(P_\phi(Z), P_\theta(Z))

is the Wasserstein auto-encoder (Appendix B). With codewords there are four terms (Appendix C.3):

.. math:: E\,c(x, \psi(Q(z))) + \frac{\eta}{M} \sum_m \big[ D(P_\phi(Z^m), \textstyle\sum_k \pi^m_k N(\mu_k, \Sigma_k))
          + W(P_\phi(Z^m), \textstyle\sum_k \pi^m_k \delta_{\mu_k}) \big] + \eta_r \sum_m KL(\pi^m, U)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor

from otpdag.backward import EncoderMap, QuantizedMap
from otpdag.divergences.base import AbstractDivergence
from otpdag.divergences.wasserstein import reverse_gradient, semi_dual
from otpdag.errors import ModelError, check_choice
from otpdag.learned.algorithm import Algorithm1, Family, Step
from otpdag.mechanisms import Codebook
from otpdag.mechanisms.base import relaxed, relaxed_noise
from otpdag.mechanisms.codebook import copy_gradient, mahalanobis
from otpdag.noise import Streams
from otpdag.numerics import nearest
from otpdag.problem import LossTerms, Pace, Problem, Refinement, split_point
from otpdag.settings import Objective
from otpdag.structure import Naturals, Shapes, Structure, Theta, pack, unpack

NoiseScale: TypeAlias = Literal["fixed", "shared", "image"]

GREY_LEVEL = 1 / 255  # of images in bytes: a smaller error cannot be seen in them


@dataclass(frozen=True)
class Codewords:
    """Weights of the terms that only codewords have.

    Args:
        pull: Share of the transport's gradient that moves latents; codewords are moved by all of it.
        mixture: Weight of the divergence to the mixture of Gaussians, which teaches the covariances.
        eta_r: Weight of the divergence of codewords' weights from uniform ones.
        warm_up: Share of the steps in which latents are not quantised.
    """

    pull: float = 0.1
    mixture: float = 0.01
    eta_r: float = 1.0
    warm_up: float = 0.2


@dataclass(frozen=True)
class Encoded:
    """Hidden values are what an encoder makes of an image: an evaluation on minibatches, for Adam.

    Args:
        backward: The encoder, with codewords or without.
        batch_size: Images in a step.
        codewords: Weights of their terms, if there are codewords.
        noise: Whose noise scale it is by which rebuilt images are judged (:func:`rebuilding_cost`).
    """

    backward: EncoderMap | QuantizedMap
    batch_size: int = 128
    codewords: Codewords | None = None
    noise: NoiseScale = "fixed"

    def __post_init__(self) -> None:
        """Refuse codewords without a map that quantises, and the reverse."""
        check_choice("noise", self.noise, get_args(NoiseScale))
        if isinstance(self.backward, QuantizedMap) != (self.codewords is not None):
            raise ModelError("codewords need a backward map that quantises, and such a map needs codewords")


@dataclass(frozen=True)
class _ImageProblem(Problem):
    """Images (1, N, pixels) and what an encoder makes of them.

    Attributes:
        spread: Standard deviation of all pixels.
    """

    structure: Structure
    images: Tensor
    shapes: Shapes
    objective: Objective
    encoded: Encoded
    spread: float
    seed: int

    @property
    def rows(self) -> int:
        """Images."""
        return self.images.shape[1]

    def minibatch(self, streams: Streams) -> Tensor:
        """Some of the images (1, n, pixels)."""
        return self.images[:, streams.rows(self.rows, self.encoded.batch_size)[0].to(self.images.device)]

    def rebuilding(self, naturals: Naturals, latents: Tensor, rows: Tensor) -> Tensor:
        """Cost of images as they are decoded, in units of the pixels' variance."""
        (image,) = self.structure.graph.observed
        (parent,) = self.structure.graph.parents(image)
        decoder = self.structure.mechanisms[image]
        none = torch.zeros(1, rows.shape[1], decoder.noise.dim).to(rows)
        rebuilt = decoder.forward(naturals[image], {parent: latents}, none)
        return rebuilding_cost(rebuilt, rows, self.spread, noise=self.encoded.noise).reshape(1)

    def begun(self, point: Tensor) -> Tensor:
        """Where a search starts, given the networks and the user's values."""
        return point


def rebuilding_cost(rebuilt: Tensor, rows: Tensor, spread: float, *, noise: NoiseScale = "fixed") -> Tensor:
    r"""Mean cost of rebuilt rows (1, n, pixels): the squared error, or a logarithm of it.

    .. math:: \frac{e}{s^2}, \quad \tfrac12 \log\Big(1 + \frac{e}{\delta^2}\Big), \quad
              \frac1n \sum_i \tfrac12 \log\Big(1 + \frac{e_i}{\delta^2}\Big)
              \qquad\text{with}\quad e_i = \frac{\|x_i - \hat x_i\|^2}{D}, \; e = \frac1n \sum_i e_i

    All are normal densities. The first has a scale that is fixed; the second one of all images of a minibatch, at its
    maximum; in the third every image has one of its own. Below a grey level, :math:`\delta = 1/255`, nothing is left
    to gain. Only equal images cost nothing.

    Args:
        rebuilt: What was decoded.
        rows: What was seen, pixels from 0 to 1.
        spread: Standard deviation of all pixels, s.
        noise: ``"fixed"``, ``"shared"`` or ``"image"``, in this order.
    """
    errors = (rebuilt - rows).square().mean(-1)
    if noise == "fixed":
        return errors.mean() / spread**2
    judged = errors if noise == "image" else errors.mean()
    return 0.5 * torch.log1p(judged / GREY_LEVEL**2).mean()


@dataclass(frozen=True)
class AutoencoderProblem(_ImageProblem, Algorithm1):
    """Images whose hidden node an encoder tells: a Wasserstein auto-encoder."""

    def steps(self, theta: Theta, phi: Theta, streams: Streams, progress: float) -> Iterator[Step]:
        """Latents of a minibatch, beside as many of the prior's own."""
        naturals, rows = self.structure.naturals(theta), self.minibatch(streams)
        latents = self.encoded.backward.latents(phi, rows)
        yield Step(self.rebuilding(naturals, latents, rows), self._families(naturals, latents, streams))

    def _families(self, naturals: Naturals, latents: Tensor, streams: Streams) -> Iterator[Family]:
        (hidden,) = self.structure.graph.parents(self.structure.graph.observed[0])
        prior = self.structure.mechanisms[hidden]
        noise = streams.draw(relaxed_noise(prior), latents.shape[1], latents)
        drawn = relaxed(prior, naturals[hidden], {}, noise, 1.0).expand_as(latents)
        yield Family(latents, drawn.to(latents))


@dataclass(frozen=True)
class CodebookProblem(_ImageProblem):
    """Images behind which stand codewords; at first latents are not quantised.

    The graph is ``code -> latent -> quantized -> image``, whatever its nodes are called.
    """

    quantizes: bool = True

    @property
    def pace(self) -> Pace:
        """The warm-up, or what is after it."""
        return Pace(span=(self.codewords.warm_up, 1.0) if self.quantizes else (0.0, self.codewords.warm_up))

    @property
    def codewords(self) -> Codewords:
        """Weights of the codewords' terms."""
        return cast(Codewords, self.encoded.codewords)

    @property
    def backward(self) -> QuantizedMap:
        """The map that quantises."""
        return cast(QuantizedMap, self.encoded.backward)

    @property
    def chain(self) -> tuple[str, str]:
        """The nodes that hold the codes and the latents."""
        graph = self.structure.graph
        (image,) = graph.observed
        (quantized,) = graph.parents(image)
        (latent,) = graph.parents(quantized)
        (code,) = graph.parents(latent)
        return code, latent

    def sampled(self, point: Tensor, streams: Streams, progress: float) -> LossTerms:
        """Loss terms on a fresh minibatch: the reconstruction alone, or all four."""
        theta, phi = split_point(point, self.shapes)
        naturals, rows = self.structure.naturals(theta), self.minibatch(streams)
        if self.quantizes:
            return self._quantized_terms(naturals, phi, rows, streams, self.objective.at(progress).eta)
        cost = self.objective.reconstruction * self.rebuilding(naturals, self.backward.latents(phi, rows), rows)
        return LossTerms.of(cost, reconstruction=cost)

    def _quantized_terms(self, naturals: Naturals, phi: Theta, rows: Tensor, streams: Streams, eta: float) -> LossTerms:
        backward, (code, latent) = self.backward, self.chain
        latents = backward.latents(phi, rows)
        at_positions = backward.at_positions(latents)  # (M, n, D)
        means, scale = naturals[latent]["mean"][0], naturals[latent]["scale"][0].detach()
        with torch.no_grad():
            # in units of squared latents, per coordinate, whatever the covariances
            unit = scale.square().mean() / backward.dim
            costs = mahalanobis(at_positions.flatten(0, 1), means, scale * unit.rsqrt())
            codes = nearest(costs)
        chosen = means.detach()[codes].unflatten(0, at_positions.shape[:2])
        quantized = copy_gradient(at_positions, chosen).transpose(0, 1).flatten(1).unsqueeze(0)
        cost = self.objective.reconstruction * self.rebuilding(naturals, quantized, rows)
        weights = naturals[code]["weights"][0]
        gap = eta * _transport(self, phi, at_positions, costs, naturals)
        if self.codewords.mixture:
            gap = gap + self.codewords.mixture * _mixture(self, naturals, at_positions, streams)
        even = (weights * (weights.clamp(min=1e-12).log() + math.log(backward.size))).sum()
        uniform = self.codewords.eta_r * even
        return LossTerms.of(cost, reconstruction=cost, divergence=gap.reshape(1), entropic=uniform.reshape(1))

    def refine(self, point: Tensor) -> Refinement | None:
        """After the warm-up, codewords among the latents of some images, and scales at what is left of them."""
        if self.quantizes:
            return None
        return Refinement(replace(self, quantizes=True), self.with_codewords_placed(point), "quantised")

    def begun(self, point: Tensor) -> Tensor:
        """Codewords among latents, if nothing precedes them."""
        return self.with_codewords_placed(point) if self.quantizes else point

    def with_codewords_placed(self, point: Tensor) -> Tensor:
        """The parameters with codewords placed by a few steps of k-means."""
        parameters, (_, latent) = unpack(point, self.shapes), self.chain
        generator = torch.Generator().manual_seed(self.seed)
        centres, scale = self.backward.placed_codewords(parameters, self.images[0], generator)
        raw = self.structure.mechanisms[latent].raw({"mean": centres.unsqueeze(0), "scale": scale.unsqueeze(0)})
        keys = self.structure.keys[latent]
        return pack({**parameters, **{keys[name]: value for name, value in raw.items()}})


def autoencoder_problem(
    structure: Structure, images: Tensor, shapes: Shapes, objective: Objective, encoded: Encoded, seed: int
) -> AutoencoderProblem | CodebookProblem:
    """The problem of images (1, N, pixels): with codewords, or without."""
    spread = float(images.std()) or 1.0
    if encoded.codewords is None:
        return AutoencoderProblem(structure, images, shapes, objective, encoded, spread, seed)
    if objective.push_forward is None:
        raise ModelError("codewords are moved by the push-forward term: give the objective one")
    warm = encoded.codewords.warm_up > 0
    return CodebookProblem(structure, images, shapes, objective, encoded, spread, seed, quantizes=not warm)


def _transport(problem: CodebookProblem, phi: Theta, at_positions: Tensor, costs: Tensor, naturals: Naturals) -> Tensor:
    """Mean semi-dual of the transport to weighted codewords: one problem, or one for each position."""
    backward, (code, latent) = problem.backward, problem.chain
    codewords, scale = naturals[latent]["mean"][0], naturals[latent]["scale"][0].detach()
    weights = naturals[code]["weights"][0]
    problems = backward.positions if backward.by_position else 1
    points = at_positions.reshape(problems, -1, backward.dim)
    target = weights if backward.by_position else weights.mean(0, keepdim=True)
    dual = semi_dual(costs.reshape(problems, -1, backward.size), target, reverse_gradient(backward.potentials(phi)))
    sent_to, at = codewords[dual.assignment], scale[dual.assignment]
    precision = scale.square().mean() / at.square()
    to_latents = (precision * (points - sent_to.detach()).square()).mean((-2, -1))
    to_codewords = (precision * (points.detach() - sent_to).square()).mean((-2, -1))
    # the value is that of the semi-dual; the gradient is shared out
    moved = to_codewords + problem.codewords.pull * (to_latents - to_latents.detach())
    return (moved + dual.value).mean()


def _mixture(problem: CodebookProblem, naturals: Naturals, at_positions: Tensor, streams: Streams) -> Tensor:
    """Mean divergence between each position's latents and the mixture of Gaussians around the codewords.

    It teaches the covariances; latents and codewords have the transport.
    """
    structure, (code, latent) = problem.structure, problem.chain
    codebook = cast(Codebook, structure.mechanisms[latent])
    rows = at_positions.shape[1]
    drawn_codes = structure.mechanisms[code].forward(
        {"weights": naturals[code]["weights"].detach()},
        {},
        streams.draw(structure.mechanisms[code].noise, rows, at_positions),
    )
    noise = streams.draw(codebook.noise, rows, at_positions)
    own = {"mean": naturals[latent]["mean"].detach(), "scale": naturals[latent]["scale"]}
    drawn = problem.backward.at_positions(codebook.forward(own, {code: drawn_codes}, noise))
    divergence = cast(AbstractDivergence, problem.objective.push_forward and problem.objective.push_forward.divergence)
    return divergence(at_positions.detach(), drawn, generator=streams.shared).mean()
