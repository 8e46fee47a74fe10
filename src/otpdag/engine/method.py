"""Methods of estimation: named settings of the one objective, and how it is minimised."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from otpdag.costs import AbstractCost, PointFunction
from otpdag.divergences import Energy, Wasserstein
from otpdag.divergences.base import AbstractDivergence
from otpdag.engine.adam import Adam
from otpdag.engine.optimiser import EM, Deterministic, Optimiser
from otpdag.errors import ModelError, check_choice, check_mapping
from otpdag.learned.algorithm import Drawn, MapFactory
from otpdag.learned.autoencoder import Encoded
from otpdag.learned.paper_topics import PaperTopics
from otpdag.likelihood.topic_problem import TopicSweeps
from otpdag.schedules import Constant, Schedule
from otpdag.settings import ClosedForm, Direct, Objective, PushForward, SumSizes

Evaluation = ClosedForm | Drawn | Encoded | TopicSweeps | PaperTopics  # how an objective is evaluated


@dataclass(frozen=True)
class Method:
    """Which terms of the objective count, how they are evaluated, and how they are minimised.

    Args:
        name: What the result calls it.
        objective: The terms and their weights.
        evaluation: ``ClosedForm()`` with noise integrated out, ``Drawn()`` with a learned map on minibatches,
            ``Encoded()`` with an encoder of images, ``TopicSweeps()`` or ``PaperTopics()`` for documents.
        optimiser: ``Deterministic()`` for the closed form, ``Adam()`` for what is drawn, ``EM()`` for sweeps over
            documents; or one of your own, a dataclass that has what :class:`~otpdag.engine.Optimiser` says.

    >>> Method("robuster", Objective(eps=0.75), ClosedForm(reference="uniform")).optimiser.steps
    400
    >>> Method("odd", Objective(eps=1.0), Drawn(noise="marginal"), Deterministic())
    Traceback (most recent call last):
    otpdag.errors.ModelError: what is Drawn is minimised by Adam; got Deterministic
    """

    name: str
    objective: Objective = field(default_factory=lambda: Objective(eps=1.0))
    evaluation: Evaluation = field(default_factory=ClosedForm)
    optimiser: Optimiser = field(default_factory=Deterministic)

    def __post_init__(self) -> None:
        """Refuse an optimiser that does not serve the evaluation, and objectives that it cannot evaluate."""
        given, drawn = type(self.evaluation).__name__, not isinstance(self.evaluation, ClosedForm | TopicSweeps)
        wanted = Adam if drawn else EM if isinstance(self.evaluation, TopicSweeps) else Deterministic
        serves = isinstance(self.optimiser, Optimiser) and self.optimiser.is_stochastic is drawn
        if not serves or (wanted is EM and isinstance(self.optimiser, Deterministic)):
            raise ModelError(f"what is {given} is minimised by {wanted.__name__}; got {type(self.optimiser).__name__}")
        if isinstance(self.evaluation, ClosedForm) and not self.objective.reconstruction and not self.objective.direct:
            raise ModelError("the objective has no term in closed form: let reconstruction or direct count")
        self._check_terms()

    def _check_terms(self) -> None:
        """Refuse terms that the evaluation does not have: they would be left out without a word."""
        objective, evaluation, given = self.objective, self.evaluation, type(self.evaluation).__name__
        if isinstance(evaluation, TopicSweeps) and objective != evaluation.objective:
            raise ModelError(f"sweeps over documents minimise {evaluation.objective}, and no other; got {objective}")
        if isinstance(evaluation, Drawn) and objective.direct is not None:
            raise ModelError("the direct term is no draw: evaluate it by ClosedForm, or leave it out")
        if isinstance(evaluation, Encoded | PaperTopics) and (objective.eps != 0.0 or objective.direct is not None):
            raise ModelError(f"what is {given} has no entropic and no direct term: leave eps and direct out")
        if isinstance(evaluation, ClosedForm) and not objective.reconstruction:
            others = objective.eps != 0.0 or objective.push_forward is not None or evaluation.reference != "model"
            if others:
                raise ModelError(
                    "in closed form the entropic and the push-forward term belong to the reconstruction: where that "
                    "counts nothing, leave eps, push_forward and reference out"
                )

    @property
    def leaves_out_rows(self) -> bool:
        """Whether rows may stay unmatched."""
        direct = self.objective.direct
        return direct is not None and (direct.is_unbalanced or bool(direct.unmatched))

    @property
    def counts_priors(self) -> bool:
        """Whether priors of parameters count: they add to a log-likelihood, and a transport cost is none."""
        return isinstance(self.evaluation, ClosedForm) and self.objective.direct is None

    @property
    def steps(self) -> int:
        """Most steps of the optimiser."""
        return self.optimiser.steps

    def with_steps(self, steps: int) -> Method:
        """The same method with another number of steps.

        >>> entropic().with_steps(50).steps
        50
        """
        return replace(self, optimiser=replace(cast(Any, self.optimiser), steps=steps))


def current_name(method: object) -> str:
    """A name of a method as it is now, with a warning where it has changed; what is none is refused."""
    if isinstance(method, str) and method == "entropic":
        warnings.warn("method='entropic' is called 'likelihood' now", DeprecationWarning, stacklevel=4)
        return "likelihood"
    if not isinstance(method, str) or method not in ("auto", "likelihood", "transport", "pairs", "paper"):
        raise ModelError(f"method must be 'auto', 'likelihood', 'transport', 'paper' or a Method; got {method!r}")
    return method


def likelihood(*, sums: SumSizes | None = None, steps: int = 2_000) -> Method:
    """Maximum likelihood: entropic transport with marginal noise, eps = 1 and no push-forward term.

    Args:
        sums: Sizes of the sums over what is unknown.
        steps: Most steps.

    >>> likelihood().objective == entropic().objective, likelihood().name
    (True, 'likelihood')
    """
    return replace(entropic(sums=sums, steps=steps), name="likelihood")


def entropic(
    *,
    eps: float | Schedule = 1.0,
    eta: float | Schedule = 0.0,
    divergence: AbstractDivergence | None = None,
    reference: Literal["model", "uniform"] = "model",
    sums: SumSizes | None = None,
    steps: int = 400,
) -> Method:
    """Entropic transport with marginal noise: a bridge that at eps = 1 and eta = 0 is :func:`likelihood`.

    Args:
        eps: Weight of the entropic term.
        eta: Weight of the push-forward term, which holds hidden values to the model's own.
        divergence: What compares the two; the energy distance if left out.
        reference: ``"model"``, or ``"uniform"`` where the weights of hidden categories are given and may be wrong.
        sums: Sizes of the sums over what is unknown.
        steps: Most steps.
    """
    push = None if isinstance(eta, float | int) and eta == 0 else PushForward(eta, divergence or Energy())
    closed = ClosedForm(reference=reference, sums=sums or SumSizes())
    return Method("entropic", Objective(eps=eps, push_forward=push), closed, Deterministic(steps=steps))


def transport(
    route: Literal["direct", "backward"] = "direct",
    *,
    divergence: AbstractDivergence | None = None,
    costs: Mapping[str, AbstractCost | PointFunction | str] | None = None,
    unmatched: float | Literal["auto"] = 0.0,
    points: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    hidden_layers: tuple[int, ...] | None = None,
) -> Method:
    """A minimum-transport estimate: direct, in observed space, or backward, with the noise abducted.

    Args:
        route: Which side of Theorem 1 is minimised.
        divergence: Of the direct route: the transport cost between the data and points of the model. If left out, the
            sliced one with p = 1 along neighbourhoods of the graph, or Sinkhorn's between short lists of categories;
            ``Wasserstein()`` is exact, for small tables.
        costs: Of the direct route: ground costs of nodes, in units of their spread, where the divergence has one:
            ``"squared"``, ``"absolute"``, ``"0/1"``, a cost or a function of two values.
        unmatched: Of the direct route: the share of the rows that the model need not explain, or ``"auto"``.
        points: Of the direct route: points that stand for the model; 2,048 or more if left out.
        steps: Most steps; 400 of L-BFGS or 3,000 of Adam if left out.
        batch_size: Of the backward route: rows in a step, 512 if left out.
        learning_rate: Of the backward route; 0.01 if left out.
        hidden_layers: Of the backward route, of tables: layers of the map.
    """
    if route == "direct":
        if any(setting is not None for setting in (batch_size, learning_rate, hidden_layers)):
            raise ModelError("batch_size, learning_rate and hidden_layers are of the route 'backward': leave them out")
        direct = Direct(divergence, check_mapping("costs", costs, optional=True), unmatched, points=points)
        return Method(
            "transport",
            Objective(reconstruction=0.0, direct=direct),
            optimiser=Deterministic(steps=steps or 400, tolerance=1e-7),
        )
    if divergence is not None or points is not None or costs or unmatched:
        raise ModelError("divergence, costs, unmatched and points are of the route 'direct': leave them out")
    if route != "backward":
        raise ModelError(f"route must be 'direct' or 'backward'; got {route!r}")
    return Method(
        "transport",
        Objective(push_forward=PushForward(1.0, Energy())),
        Drawn(noise="abducted", batch_size=batch_size or 512, hidden_layers=hidden_layers),
        Adam(steps=steps or 3000, learning_rate=0.01 if learning_rate is None else learning_rate),
    )


def paper(
    *,
    eta: float | Schedule = 1.0,
    eps: float | Schedule = 0.0,
    divergence: AbstractDivergence | None = None,
    costs: Mapping[str, AbstractCost | PointFunction] | None = None,
    noise: Literal["sampled", "abducted"] = "sampled",
    scope: Literal["joint", "local"] = "joint",
    temperature: float | Schedule = 0.5,
    steps: int = 1000,
    batch_size: int = 128,
    learning_rate: float | Schedule = 1e-3,
    hidden_layers: tuple[int, ...] | None = None,
    backward: MapFactory | None = None,
) -> Method:
    """Algorithm 1 of the paper: ground cost, Wasserstein penalty, alternating updates.

    What the paper does not have: the last quarter of the steps is averaged, gradients longer than ten are cut, and
    costs of numbers are in units of their spread, unless you give your own.

    Args:
        eta: Weight of the push-forward term.
        eps: Weight of the entropic term, which the paper does not have.
        divergence: Of the push-forward term; exact Wasserstein if left out.
        costs: Ground costs of nodes that shall not have their type's default.
        noise: Of observed nodes: ``"sampled"`` from its prior, as the paper practises it, or ``"abducted"`` by the
            backward map, as in its theory.
        scope: ``"joint"``, or ``"local"`` for the paper's own reading.
        temperature: Of relaxed categories.
        steps: Number of steps.
        batch_size: Rows in a step.
        learning_rate: Of Adam: a number, constant as the paper has it, or a schedule.
        hidden_layers: Layers of the backward map of a table; one of 32 if left out.
        backward: Builds your own backward maps, in place of the amortised ones.
    """
    check_choice("noise", noise, ("sampled", "abducted"))
    drawn = Drawn(
        noise=noise,
        scope=scope,
        temperature=temperature,
        batch_size=batch_size,
        hidden_layers=hidden_layers,
        costs=check_mapping("costs", costs, optional=True),
        backward=backward,
    )
    rate = learning_rate if callable(learning_rate) else Constant(learning_rate)
    adam = Adam(steps=steps, learning_rate=rate, alternating=True)
    push = PushForward(eta, divergence or Wasserstein())
    return Method("paper", Objective(eps=eps, push_forward=push), drawn, adam)


def misfit(*, given_weights: bool) -> Method:
    """For a model whose fixed parts are wrong: assignments harder than the likelihood's, softer than the nearest's.

    Where the weights of hidden categories are given rather than learned, assignments do not read them.
    """
    closed = ClosedForm(reference="uniform" if given_weights else "model")
    return Method("misfit", Objective(eps=0.75), closed, Deterministic(steps=400))
