"""Methods of estimation: named settings of the one objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from otpdag.backward import AmortizedMap, GibbsOptions
from otpdag.costs import AbstractCost, PointFunction, as_cost
from otpdag.data import Batch
from otpdag.divergences import Energy, Wasserstein
from otpdag.divergences.base import AbstractDivergence
from otpdag.divergences.whitened import WhitenedFeatures
from otpdag.errors import ModelError
from otpdag.schedules import Schedule, as_schedule
from otpdag.structure import Structure

MapFactory = Callable[[Structure, Batch], Sequence[AmortizedMap]]

__all__ = ["Method", "entropic", "method_of", "paper", "transport"]


@dataclass(frozen=True)
class Method:
    """Which terms of the objective count, how they are evaluated, and how they are minimised.

    Args:
        name: What the result calls it.
        noise: ``"sampled"`` draws the noise of observed nodes from its prior (the paper's practice), ``"abducted"``
            recovers it exactly (the paper's theory), ``"marginal"`` integrates it out (the cost is the likelihood).
        reconstruction: Weight of the reconstruction term.
        eta: Weight of the push-forward term, a number or a schedule (with L-BFGS, the schedule's end counts).
        eps: Weight of the entropic term, the same.
        reference: Of the entropic term, with the closed-form map. ``"model"``: KL to the model's distribution of what
            is hidden. ``"uniform"``: the entropy of hidden categories, which leaves their weights out (semi-relaxed
            transport): where these are given and perhaps wrong, nothing else follows them. Weights that are learned
            then need eta above zero.
        kappa: Weight of the direct term.
        divergence: D of the push-forward term.
        features: D of the direct term.
        costs: Ground costs of nodes that shall not have their type's default, objects or functions of two values in
            the column's own units.
        optimiser: ``"lbfgs"`` on all rows with fixed points, or ``"adam"`` on minibatches with fresh noise.
        scope: ``"joint"`` draws hidden nodes once from all of a row, ``"local"`` once for each child, from it alone.
        alternating: Update the backward map and the model in turn (Algorithm 1) or together.
        temperature: Of relaxed categories.
        straight_through: Draw hard categories with soft gradients.
        refinements: How often the direct term is whitened anew, by the model's own covariance, and the fit continued.
        steps: Most optimiser steps.
        learning_rate: Of Adam; falls to zero along a cosine.
        batch_size: Rows in a step of Adam.
        averaging: Share of the last steps whose parameters are averaged.
        extra_masking: Chance that a seen cell is hidden from the backward map during training.
        hidden_layers: Of the amortised map.
        backward: Builds your own backward maps from the structure and the rows, in place of the amortised ones; with
            ``optimiser="adam"``. For sequences a name: hidden numbers are drawn by a ``"smoother"`` with linear
            potentials, or by the ``"bidirectional"`` map with a network's, or (None) by the one that serves better.
        gibbs: Sizes of the sums of the closed-form map.
    """

    name: str
    noise: Literal["sampled", "abducted", "marginal"] = "marginal"
    reconstruction: float = 1.0
    eta: float | Schedule = 0.0
    eps: float | Schedule = 0.0
    reference: Literal["model", "uniform"] = "model"
    kappa: float = 0.0
    divergence: AbstractDivergence = field(default_factory=Energy)
    features: WhitenedFeatures = field(default_factory=WhitenedFeatures)
    costs: Mapping[str, AbstractCost | PointFunction] = field(default_factory=dict)
    optimiser: Literal["lbfgs", "adam"] = "lbfgs"
    scope: Literal["joint", "local"] = "joint"
    alternating: bool = False
    temperature: float | Schedule = 0.5
    straight_through: bool = False
    refinements: int = 1
    steps: int = 300
    learning_rate: float = 0.01
    batch_size: int = 256
    averaging: float = 0.25
    extra_masking: float = 0.0
    hidden_layers: tuple[int, ...] = (16,)
    backward: MapFactory | Literal["smoother", "bidirectional"] | None = None
    gibbs: GibbsOptions = field(default_factory=GibbsOptions)

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        for name in ("noise", "optimiser", "scope", "reference"):
            allowed = {
                "noise": ("sampled", "abducted", "marginal"),
                "optimiser": ("lbfgs", "adam"),
                "scope": ("joint", "local"),
                "reference": ("model", "uniform"),
            }
            if getattr(self, name) not in allowed[name]:
                raise ModelError(
                    f"{name} must be one of {', '.join(map(repr, allowed[name]))}; got {getattr(self, name)!r}"
                )
        for name in ("reconstruction", "kappa"):
            if getattr(self, name) < 0:
                raise ModelError(f"{name} must not be negative; got {getattr(self, name)}")
        for cost in self.costs.values():
            as_cost(cost)
        if not self.reconstruction and not self.kappa and (self.optimiser == "lbfgs" or not self.eta):
            raise ModelError("the objective has no term: reconstruction or kappa must be above zero")
        if self.optimiser == "lbfgs" and self.noise != "marginal":
            raise ModelError(f"noise={self.noise!r} needs fresh draws: use optimiser='adam'")
        if self.optimiser == "adam" and self.reference != "model":
            raise ModelError(f"reference={self.reference!r} needs the closed-form map: use optimiser='lbfgs'")
        if isinstance(self.backward, str) and self.backward not in ("smoother", "bidirectional"):
            raise ModelError(
                f"backward must be 'smoother', 'bidirectional' or a function that builds maps; got {self.backward!r}"
            )
        if callable(self.backward) and self.optimiser != "adam":
            raise ModelError("backward maps of your own are learned with optimiser='adam'; L-BFGS uses the closed form")
        if self.steps < 1 or self.batch_size < 1:
            raise ModelError(f"steps and batch_size must be at least 1; got {self.steps} and {self.batch_size}")

    def at(self, name: Literal["eta", "eps", "temperature"], progress: float) -> float:
        """The value of a scheduled weight at a share of the steps."""
        return as_schedule(getattr(self, name))(progress)


def paper() -> Method:
    """Algorithm 1 as the paper practises it: sampled noise, ground cost, Wasserstein penalty, alternating updates."""
    return Method(
        "paper", noise="sampled", eta=1.0, divergence=Wasserstein(), optimiser="adam", alternating=True,
        steps=1000, learning_rate=0.02, batch_size=128, hidden_layers=(32,),
    )  # fmt: skip


def transport(route: Literal["direct", "backward"] = "direct") -> Method:
    """A minimum-transport estimate: direct, in observed space, or backward, with the noise abducted."""
    if route == "direct":
        return Method("transport", reconstruction=0.0, kappa=1.0, steps=400)
    return Method(
        "transport", noise="abducted", eta=1.0, divergence=Energy(), optimiser="adam", steps=3000,
        learning_rate=0.01, batch_size=512, hidden_layers=(32,),
    )  # fmt: skip


def entropic() -> Method:
    """Marginal noise and eps = 1: entropic transport, which with eta = 0 is maximum likelihood."""
    return Method("entropic", eps=1.0, steps=400)


def misfit(*, given_weights: bool) -> Method:
    """For a model whose fixed parts are wrong: assignments harder than the likelihood's, softer than the nearest's.

    Where the weights of hidden categories are given rather than learned, assignments do not read them.
    """
    return Method("misfit", eps=0.75, reference="uniform" if given_weights else "model", steps=400)


def method_of(method: str | Method) -> Method:
    """Read the ``method`` argument of a fit (``"auto"`` is resolved before)."""
    if isinstance(method, Method):
        return method
    named = {"paper": paper, "transport": transport, "entropic": entropic}
    if method not in named:
        raise ModelError(f"method must be 'auto', {', '.join(map(repr, named))} or a Method; got {method!r}")
    return named[method]()


def shortened(method: Method, share: float) -> Method:
    """The same method with fewer steps."""
    return replace(method, steps=max(1, int(method.steps * share)))
