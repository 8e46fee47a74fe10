"""What every mechanism promises, as checks that run on any of them.

A check takes a :class:`Case`: a mechanism at its place in a graph, with random parameters and parents. It returns
without a word, also where the mechanism does not offer what it looks at (a density, abduction, a finite support).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from otpdag.mechanisms import Family, Mechanism, from_spec, start, tie
from otpdag.mechanisms import base as protocols
from otpdag.mechanisms.base import Params, Parents, arguments_of, configurations, numeric
from otpdag.noise import draw_noise
from otpdag.spaces import Space

SMALLEST_P_VALUE = 1e-6  # of a promise that is kept: one check in a million fails by chance
START_ROWS = 5_000  # enough for starting values to come close to the truth
GRID, GRID_BEND = 2_001, 12.0  # points of a density's grid, and how much further apart they are in its tails
UPDATES, AT_REST = 100, 1e-4  # closed-form updates after which a row's mean slope must be no steeper
UNIT = 1e3  # of a column with mean 10,000 and deviation 1,000


Answers = dict[str, Tensor]
Check = Callable[["Case"], None]


@dataclass(frozen=True)
class Case:
    """A mechanism set up for a node, with random parameters (R, ...) and parents (R, N, width)."""

    mechanism: Mechanism
    raw: Mapping[str, Tensor]
    params: Mapping[str, Tensor]
    parents: Parents
    rows: int
    seed: int

    @classmethod
    def build(
        cls,
        mechanism: Mechanism,
        family: Family,
        *,
        replicas: int = 2,
        rows: int = 300,
        spread: float = 0.4,
        seed: int = 0,
    ) -> Case:
        """Set up ``mechanism`` and draw raw parameters with standard deviation ``spread``, and parents."""
        bound = mechanism.setup(family)
        generator = torch.Generator().manual_seed(seed)
        raw = {
            name: spread * torch.randn(replicas, *parameter.shape, generator=generator, dtype=torch.float64)
            for name, parameter in bound.declared().items()
            if parameter.learned
        }
        params = {name: value.expand(replicas, *value.shape[1:]).clone() for name, value in bound.natural(raw).items()}
        parents = {name: space.example((replicas, rows), generator) for name, space in family.parents}
        return cls(bound, raw, params, parents, rows, seed)

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return next((len(value) for value in (*self.params.values(), *self.parents.values())), 1)

    def noise(self, *shape: int, relaxed: bool = False, salt: int = 1) -> Tensor:
        """Noise from the mechanism's prior, (*shape, dim)."""
        prior = protocols.relaxed_noise(self.mechanism) if relaxed else self.mechanism.noise
        return draw_noise(prior, shape, torch.Generator().manual_seed(self.seed + 7919 * salt))

    def uniform(self, *shape: int, salt: int = 2) -> Tensor:
        """Uniform numbers for :meth:`Mechanism.abduct`."""
        generator = torch.Generator().manual_seed(self.seed + 7919 * salt)
        return torch.rand(*shape, self.mechanism.noise.dim, generator=generator, dtype=torch.float64)

    def draws(self) -> Tensor:
        """Values (R, N, width) from the mechanism itself."""
        return self.mechanism.forward(self.params, self.parents, self.noise(self.replicas, self.rows))

    def answers(self, params: Params, parents: Parents, noise: Tensor, uniform: Tensor, value: Tensor) -> Answers:
        """What the mechanism makes of noise, and what it says of a value, as far as it says it."""
        mechanism = self.mechanism
        answers = {"forward": mechanism.forward(params, parents, noise)}
        if mechanism.has_density:
            answers["log_prob"] = mechanism.log_prob(params, value, parents)
        if protocols.can_abduct(mechanism):
            answers["abduct"] = protocols.abducted(mechanism, params, value, parents, uniform)
        return answers

    def require(self, condition: object, message: str) -> None:
        """Raise an :class:`AssertionError` that names the mechanism and its parents."""
        if not condition:
            parents = ", ".join(f"{name}: {space}" for name, space in self.mechanism.family.parents) or "none"
            raise AssertionError(f"{type(self.mechanism).__name__} (parents {parents}): {message}")

    def require_all_close(self, found: Params, wanted: Params, message: str, tolerance: float = 1e-8) -> None:
        """Compare tensors by name, which stands for ``{}`` in the message."""
        for name, value in wanted.items():
            self.require_close(found[name].expand_as(value), value, message.format(repr(name)), tolerance)

    def first(self) -> dict[str, Tensor]:
        """The parents of the first replica (N, width)."""
        return {name: parent[0] for name, parent in self.parents.items()}

    def require_close(self, actual: Tensor, expected: Tensor, message: str, tolerance: float = 1e-8) -> None:
        """Compare two tensors, relative to the size of the larger."""
        self.require(
            actual.shape == expected.shape, f"{message}: shapes {tuple(actual.shape)}, {tuple(expected.shape)}"
        )
        if actual.numel():
            error = ((actual - expected).abs() / (1 + expected.abs())).max().item()
            self.require(error <= tolerance, f"{message}: off by {error:.2e}")


def check_mechanism(
    mechanism: Mechanism, family: Family, *, replicas: int = 2, rows: int = 300, spread: float = 0.4, seed: int = 0
) -> None:
    """Run every check on one mechanism with one set of parents.

    Args:
        mechanism: The mechanism, as a user would write it.
        family: Its node and its parents' spaces.
        replicas: Number of replicas to draw parameters for.
        rows: Number of rows in most checks.
        spread: Standard deviation of the raw parameters.
        seed: Seed of everything that is drawn.

    Raises:
        AssertionError: If a check fails; the message says which promise is broken.
    """
    case = Case.build(mechanism, family, replicas=replicas, rows=rows, spread=spread, seed=seed)
    for check in MECHANISM_CHECKS:
        check(case)


# -- the checks --------------------------------------------------------------------------------------------------


def _where(offered: Callable[[Mechanism], object]) -> Callable[[Check], Check]:
    """Check only mechanisms that offer what a check looks at."""

    def decorate(check: Check) -> Check:
        @wraps(check)
        def checked(case: Case) -> None:
            if offered(case.mechanism):
                check(case)

        return checked

    return decorate


_unless_given = _where(lambda mechanism: not mechanism.is_given)
_of_densities = _where(lambda mechanism: mechanism.has_density and not mechanism.is_given)


@_unless_given
def check_shapes(case: Case) -> None:
    """Values, densities and noise have the shapes that their arguments say."""
    mechanism, batch = case.mechanism, (case.replicas, case.rows)
    value, uniform = case.draws(), case.uniform(*batch)
    wanted = {"forward": (*batch, mechanism.space.width), "log_prob": batch, "abduct": (*batch, mechanism.noise.dim)}
    wanted["relaxed"] = wanted["forward"]
    case.require(value.shape == wanted["forward"], f"forward gave {tuple(value.shape)}, expected {wanted['forward']}")
    case.require(mechanism.space.contains(value), f"forward left the space {mechanism.space}")
    found = case.answers(case.params, case.parents, case.noise(*batch), uniform, value)
    found["relaxed"] = protocols.relaxed(mechanism, case.params, case.parents, case.noise(*batch, relaxed=True), 0.5)
    for name, tensor in found.items():
        case.require(tensor.shape == wanted[name], f"{name} gave {tuple(tensor.shape)}, expected {wanted[name]}")


@_unless_given
def check_extra_axes(case: Case) -> None:
    """A fourth axis broadcasts: enumerated parents (1, 1, S, K) meet values (R, N, 1, width)."""
    mechanism, points, rows = case.mechanism, 3, 5
    parents = {name: value[:, :rows].unsqueeze(2) for name, value in case.parents.items()}
    if mechanism.family.discrete:
        name, space = mechanism.family.discrete[0]
        points = space.width
        parents[name] = torch.eye(points, dtype=torch.float64).reshape(1, 1, points, points)
    noise, uniform = case.noise(case.replicas, rows, points), case.uniform(case.replicas, rows)
    for s in range(points):
        here = {name: parent[:, :, min(s, parent.shape[2] - 1)] for name, parent in parents.items()}
        here = {name: parent.expand(case.replicas, rows, -1) for name, parent in here.items()}
        value = mechanism.forward(case.params, here, noise[:, :, s])
        three = case.answers(case.params, here, noise[:, :, s], uniform, value)
        four = case.answers(case.params, parents, noise, uniform.unsqueeze(2), value.unsqueeze(2))
        for name, tensor in four.items():
            at = tensor[:, :, min(s, tensor.shape[2] - 1)].expand(case.replicas, *three[name].shape[1:])
            case.require_close(at, three[name], f"{name} with four axes differs from three")


@_unless_given
def check_single_precision(case: Case) -> None:
    """Floats in, floats out, and finite."""
    batch = (case.replicas, case.rows)
    params = {name: value.float() for name, value in case.params.items()}
    parents = {name: value.float() for name, value in case.parents.items()}
    noise = case.noise(*batch).float()
    value = case.mechanism.forward(params, parents, noise)
    for name, tensor in case.answers(params, parents, noise, case.uniform(*batch).float(), value).items():
        case.require(tensor.dtype == torch.float32, f"{name} of single precision gave {tensor.dtype}")
        case.require(torch.isfinite(tensor).all(), f"{name} of single precision is not finite")


def check_units(case: Case) -> None:
    """``natural`` inverts ``raw``, also in the units of a column with mean 10,000 and deviation 1,000."""
    mechanism = case.mechanism
    back = mechanism.natural(mechanism.raw(case.params))
    case.require_all_close(back, case.params, "natural(raw({})) is another value")
    if mechanism.is_given:
        return
    parents = {name: space.in_other_units(case.parents[name][0], UNIT) for name, space in mechanism.family.parents}
    value = mechanism.space.in_other_units(case.draws()[0], UNIT)
    weight = torch.ones(case.rows, dtype=torch.float64)
    scaled = mechanism.scaled_to(value, parents, weight)
    raw = scaled.initial_raw(1, torch.Generator().manual_seed(case.seed))
    started = {name: v for name, v in scaled.start(value, parents, weight).items() if scaled.declared()[name].learned}
    natural = {**scaled.natural(_complete(scaled, raw)), **_lifted(started)}
    raw = scaled.raw(natural)
    back = scaled.natural(raw)
    case.require_all_close(back, natural, "natural(raw({})) is another value in scaled units", 1e-6)
    for name, tensor in raw.items():
        size = tensor.abs().max().item()
        case.require(size < 1e3, f"raw {name!r} is {size:.1e} after scaled_to: not of order one")
    if isinstance(mechanism, protocols.Buffered) and isinstance(scaled, protocols.Buffered):
        restored = mechanism.with_buffers(scaled.buffers()).natural(raw)
        case.require_all_close(restored, back, "{} changed after with_buffers(buffers())")


def check_start(case: Case) -> None:
    """Starting values from complete rows are nearly as likely as the truth, and have the declared shapes."""
    mechanism = case.mechanism
    if mechanism.is_given or not mechanism.declared():
        return
    truth = Case.build(mechanism, mechanism.family, replicas=1, rows=START_ROWS, seed=case.seed)
    value = truth.draws()
    weight = torch.ones(START_ROWS, dtype=torch.float64)
    started = mechanism.start(value[0], truth.first(), weight)
    for name, tensor in started.items():
        shape = mechanism.declared()[name].shape
        case.require(tensor.shape == shape, f"start gave {name!r} the shape {tuple(tensor.shape)}, declared {shape}")
        case.require(torch.isfinite(tensor).all(), f"start of {name!r} is not finite")
    if not mechanism.has_density or set(started) != set(mechanism.declared()):
        return
    at_start = mechanism.log_prob(_lifted(started), value, truth.parents).mean()
    at_truth = mechanism.log_prob(truth.params, value, truth.parents).mean()
    loss = (at_truth - at_start).item()
    case.require(loss < 0.05, f"start loses {loss:.3f} of log-likelihood per row against the truth")


@_of_densities
def check_density(case: Case) -> None:
    """For one coordinate, exp(log_prob) integrates to one and the draws follow it."""
    if case.mechanism.space.cells != 1:
        return
    transform, total = (_discrete_transform if case.mechanism.space.is_countable else _continuous_transform)(case)
    error = float(np.abs(total - 1).max())
    case.require(error < 5e-3, f"exp(log_prob) integrates to one within {error:.1e} only")
    p_value = stats.kstest(transform, "uniform").pvalue
    case.require(p_value > SMALLEST_P_VALUE, f"draws do not follow log_prob (p-value {p_value:.1e})")


@_of_densities
def check_score(case: Case) -> None:
    """The gradient of log_prob in the parameters has mean zero under the mechanism's own draws."""
    mechanism = case.mechanism
    if not case.raw:
        return
    # one replica for each row gives each row's gradient in one pass
    rows = 2 * case.rows
    many = Case.build(mechanism, mechanism.family, replicas=1, rows=rows, seed=case.seed)
    value = many.draws().transpose(0, 1)
    parents = {name: parent.transpose(0, 1) for name, parent in many.parents.items()}
    raw = {name: tensor.expand(rows, *tensor.shape[1:]).clone().requires_grad_() for name, tensor in many.raw.items()}
    log_prob = mechanism.log_prob(mechanism.natural(raw), value, parents)
    grads = torch.autograd.grad(log_prob.sum(), list(raw.values()))
    scores = torch.cat([grad.reshape(rows, -1) for grad in grads], -1).numpy()
    # a few fixed directions are enough, and keep the statistic close to its limit
    scores = scores @ np.random.default_rng(case.seed).normal(size=(scores.shape[1], min(scores.shape[1], 8)))
    mean, covariance = scores.mean(0), np.atleast_2d(np.cov(scores.T))
    values, vectors = np.linalg.eigh(covariance)
    kept = values > 1e-8 * values.max()
    size = int(kept.sum())
    statistic = rows * ((vectors[:, kept].T @ mean) ** 2 / values[kept]).sum()
    p_value = stats.f.sf(statistic * (rows - size) / (size * (rows - 1)), size, rows - size)
    case.require(p_value > SMALLEST_P_VALUE, f"draws do not follow log_prob: mean score not zero (p {p_value:.1e})")


@_where(protocols.can_abduct)
def check_abduction(case: Case) -> None:
    """Abducted noise gives the value back, and follows the noise prior."""
    mechanism, batch = case.mechanism, (case.replicas, case.rows)
    value = case.draws()
    noise = protocols.abducted(mechanism, case.params, value, case.parents, case.uniform(*batch))
    case.require(torch.isfinite(noise).all(), "abducted noise is not finite")
    again = mechanism.forward(case.params, case.parents, noise)
    case.require_close(again, value, "forward(abduct(value)) is another value", 1e-6)
    for index in range(mechanism.noise.dim):
        law = "uniform" if mechanism.noise.kind == "uniform" else "norm"
        p_value = stats.kstest(noise[..., index].flatten().numpy(), law).pvalue
        case.require(
            p_value > SMALLEST_P_VALUE, f"abducted noise {index} does not follow its prior (p-value {p_value:.1e})"
        )


@_unless_given
def check_gradients(case: Case) -> None:
    """Gradients in the parameters are finite, reach every parameter and agree with finite differences."""
    mechanism, batch = case.mechanism, (case.replicas, case.rows)
    if not case.raw:
        return
    value, noise, uniform = case.draws(), case.noise(*batch), case.uniform(*batch)
    soft = case.noise(*batch, relaxed=True)

    def answer(raw: Mapping[str, Tensor], name: str) -> Tensor:
        params = mechanism.natural(raw)
        if name == "relaxed":
            return protocols.relaxed(mechanism, params, case.parents, soft, 0.7)
        return case.answers(params, case.parents, noise, uniform, value)[name]

    for name in ("relaxed", *case.answers(case.params, case.parents, noise, uniform, value)):
        if name != "forward" or not mechanism.space.is_countable:
            _check_gradient(case, name, partial(answer, name=name))


@_unless_given
def check_replicas(case: Case) -> None:
    """Replicas together give what they give one by one."""
    batch = (case.replicas, case.rows)
    noise, uniform, value = case.noise(*batch), case.uniform(*batch), case.draws()
    together = case.answers(case.params, case.parents, noise, uniform, value)
    for one in (slice(r, r + 1) for r in range(case.replicas)):
        params, parents, wanted = (
            {name: tensor[one] for name, tensor in every.items()} for every in (case.params, case.parents, together)
        )
        alone = case.answers(params, parents, noise[one], uniform[one], value[one])
        case.require_all_close(alone, wanted, "{} mixes replicas")


@_of_densities
def check_mask(case: Case) -> None:
    """A full mask changes nothing, an empty one leaves zero."""
    mechanism, value = case.mechanism, case.draws()
    full = torch.ones(case.replicas, case.rows, mechanism.space.cells, dtype=torch.bool)
    plain = mechanism.log_prob(case.params, value, case.parents)
    case.require_close(
        mechanism.log_prob(case.params, value, case.parents, full), plain, "a full mask changes log_prob"
    )
    empty = mechanism.log_prob(case.params, value, case.parents, ~full)
    case.require_close(empty, torch.zeros_like(plain), "log_prob of a missing value is not zero")


@_unless_given
def check_complete(case: Case) -> None:
    """Completing a value keeps the cells that are seen, stays in the space, and draws a whole value from nothing."""
    mechanism, batch = case.mechanism, (case.replicas, case.rows)
    value, noise = case.draws(), case.noise(*batch, salt=3)
    generator = torch.Generator().manual_seed(case.seed + 4)
    mask = torch.rand(*batch, mechanism.space.cells, generator=generator) < 0.5
    completed = mechanism.complete(case.params, value, case.parents, mask, noise)
    case.require(
        completed.shape == value.shape, f"complete gave {tuple(completed.shape)}, expected {tuple(value.shape)}"
    )
    case.require(mechanism.space.contains(completed), f"complete left the space {mechanism.space}")
    kept = mask.expand_as(value)
    case.require_close(completed[kept], value[kept], "complete changed a cell that is seen")
    again = mechanism.complete(case.params, value, case.parents, torch.ones_like(mask), noise)
    case.require_close(again, value, "complete changed a value that is seen")
    nothing = mechanism.complete(case.params, torch.full_like(value, torch.nan), case.parents, mask & False, noise)
    fresh = mechanism.forward(case.params, case.parents, noise)
    case.require_close(nothing, fresh, "complete of nothing is not a draw")


@_of_densities
def check_log_probs(case: Case) -> None:
    """The log-probabilities of all categories are those of log_prob, one by one, with any number of axes."""
    mechanism = case.mechanism
    if not mechanism.space.is_discrete:
        return
    batch, size = (case.replicas, case.rows), mechanism.space.width
    for points in ((), (1,)):
        parents = {name: value.reshape(*batch, *points, -1) for name, value in case.parents.items()}
        like = torch.zeros(*batch, *points, size, dtype=torch.float64)
        log_probs = torch.broadcast_to(mechanism.log_probs(case.params, parents, like), like.shape)
        one_by_one = [mechanism.log_prob(case.params, one.expand_as(like), parents) for one in torch.eye(size).double()]
        case.require_close(log_probs, torch.stack(one_by_one, -1), "log_probs are not those of log_prob")


@_of_densities
def check_features(case: Case) -> None:
    """Features times coefficients are log_prob, and cells that are not seen have none."""
    mechanism, value = case.mechanism, case.draws()[0]
    seen = torch.ones(case.rows, mechanism.space.cells, dtype=torch.bool)
    features = mechanism.features(value, seen) if isinstance(mechanism, protocols.ExponentialFamily) else None
    if not isinstance(mechanism, protocols.ExponentialFamily) or features is None:
        return
    code = torch.zeros(case.rows, dtype=torch.long)
    for name, space in mechanism.family.discrete:
        code = code * space.width + case.parents[name][0].argmax(-1)
    parents = {name: parent[:1] for name, parent in case.parents.items()}
    log_prob = mechanism.log_prob(case.params, value.unsqueeze(0), parents).expand(case.replicas, -1)
    table = mechanism.coefficients(case.params)
    case.require_close((features * table[:, code]).sum(-1), log_prob, "features times coefficients are not log_prob")
    unseen = mechanism.features(value, ~seen)
    case.require(unseen is None or not unseen.any(), "cells that are not seen have features")


@_of_densities
def check_fitted(case: Case) -> None:
    """Updates in closed form never make weighted rows less likely, and come to rest where they are likeliest."""
    mechanism, value = case.mechanism, case.draws()[0]
    weight = 0.5 + case.noise(case.replicas, case.rows, salt=3).abs().mean(-1).clamp(max=2.0)
    parents = case.first()

    def log_likelihood(params: Params) -> Tensor:
        lifted = {name: parent.unsqueeze(0) for name, parent in parents.items()}
        return (weight * mechanism.log_prob(params, value.unsqueeze(0), lifted)).sum(-1)

    update: Callable[[Params], Params]
    seen = torch.ones(case.rows, mechanism.space.cells, dtype=torch.bool)
    if isinstance(mechanism, protocols.ExponentialFamily) and mechanism.features(value, seen) is not None:
        update = partial(protocols.fitted_to_rows, mechanism, value=value, parents=parents, weight=weight)
    elif isinstance(mechanism, protocols.Regressed) and protocols.has_closed_form(mechanism):
        moments, none = _moments(mechanism, value, parents, weight), torch.zeros_like(value[0])
        shift = none.new_zeros(len(none), moments.shape[-1] - 1)
        update = partial(mechanism.regressed, moments=moments, shift=shift, unit=none + 1)
    else:
        return
    gain = log_likelihood(mechanism.natural(mechanism.raw(update(case.params)))) - log_likelihood(case.params)
    case.require(bool((gain >= -1e-8).all()), f"fitted makes the rows less likely by {-gain.min():.2e}")
    _require_stationary(case, update, lambda params: log_likelihood(params).sum())


def _moments(mechanism: Mechanism, value: Tensor, parents: Parents, weight: Tensor) -> Tensor:
    """Sums of products of (coordinate, numeric parents, 1) in each configuration (R, C, dim, P + 2, P + 2)."""
    config, beside = configurations(mechanism.family, parents), numeric(mechanism.family, parents)
    one = torch.ones_like(value[:, :1])
    others = one if beside is None else torch.cat([beside, one], -1)
    columns = torch.stack([torch.cat([own.unsqueeze(-1), others], -1) for own in value.unbind(-1)], 1)
    return torch.einsum("rn,nc,ndi,ndj->rcdij", weight, one if config is None else config, columns, columns)


def _require_stationary(
    case: Case, update: Callable[[Params], Params], log_likelihood: Callable[[Params], Tensor]
) -> None:
    """Where updates come to rest no parameter may be left that would make the rows likelier."""
    mechanism, params = case.mechanism, case.params
    for _ in range(UPDATES):
        params = mechanism.natural(mechanism.raw(update(params)))
    learned = {key for key, parameter in mechanism.declared().items() if parameter.learned}
    raw = {
        key: value.detach().clone().requires_grad_() for key, value in mechanism.raw(params).items() if key in learned
    }
    if not raw:
        return
    slopes = torch.autograd.grad(log_likelihood(mechanism.natural(raw)), list(raw.values()), allow_unused=True)
    for key, slope in zip(raw, slopes, strict=True):
        steepest = 0.0 if slope is None else float(slope.abs().max()) / case.rows
        case.require(
            steepest < AT_REST,
            f"fitted comes to rest where {key!r} could still make the rows likelier (a slope of {steepest:.1e} a row)",
        )


def check_axes(case: Case) -> None:
    """The axes of parameters are as long as what they run over."""
    declared = case.mechanism.declared()
    for name, axes in case.mechanism.axes().items():
        case.require(name in declared, f"axes names {name!r}, which is no parameter")
        lengths = tuple(axis.length for axis in axes)
        case.require(lengths == declared[name].shape, f"axes of {name!r} give {lengths}, not {declared[name].shape}")


def check_relabelling(case: Case) -> None:
    """Other labels of the node and of its parents, under the parameters that follow them, are as likely."""
    for nodes, width in _alone_and_with_the_node(case.mechanism, lambda space: space.is_discrete):
        order = [*range(1, width), 0]
        params = case.mechanism.relabelled(case.params, nodes, order)
        if params is not None:
            _check_followed(case, "relabelling", nodes, params, partial(_reordered, order=order))


def check_turning(case: Case) -> None:
    """The node and its parents turned round, under the parameters that follow them, are as likely."""
    mechanism = case.mechanism
    for nodes, width in _alone_and_with_the_node(mechanism, lambda space: space.is_unbounded):
        sign = 1.0 - 2.0 * (torch.arange(width, dtype=torch.float64) % 2 == 0)
        params = mechanism.turned(case.params, nodes, sign) if isinstance(mechanism, protocols.Turning) else None
        if params is not None:
            _check_followed(case, "turning", nodes, params, sign.mul)


def check_slopes(case: Case) -> None:
    """Slopes change sign with a parent that is turned, and are there where the parent can be."""
    mechanism = case.mechanism
    if not isinstance(mechanism, protocols.Sloped):
        return
    for name, space in mechanism.family.continuous:
        slopes = mechanism.slopes(case.params, name)
        if slopes is None:
            continue
        wanted = (case.replicas, space.width)
        case.require(slopes.shape == wanted, f"slopes of {name!r} have shape {tuple(slopes.shape)}, expected {wanted}")
        back = -torch.ones(space.width, dtype=torch.float64)
        turned = mechanism.turned(case.params, [name], back) if isinstance(mechanism, protocols.Turning) else None
        again = None if turned is None else mechanism.slopes(turned, name)
        if again is not None:
            case.require_close(again, -slopes, f"slopes of {name!r} do not turn with it")


def check_mean(case: Case) -> None:
    """A closed-form mean is that of the draws."""
    mechanism = case.mechanism
    if mechanism.is_given or mechanism.noise.dim == 0:
        return
    many = Case.build(mechanism, mechanism.family, replicas=1, rows=10 * case.rows, seed=case.seed)
    mean = mechanism.mean(many.params, many.parents)
    if mean is None:
        return
    gap = (many.draws() - mean)[0].numpy()
    score = np.abs(gap.mean(0)) / np.maximum(gap.std(0) / np.sqrt(len(gap)), 1e-12)
    case.require(score.max() < 5, f"mean is {score.max():.1f} standard errors from the mean of the draws")


def check_settings(case: Case) -> None:
    """A fixed parameter is held and not learned, a started one is learned, a tied one ignores units."""
    arguments = arguments_of(case.mechanism)
    value = None if case.mechanism.is_given else case.mechanism.space.in_other_units(case.draws()[0], UNIT)
    parents = case.first()
    weight = torch.ones(case.rows, dtype=torch.float64)
    for name in case.params:
        if name not in arguments or value is None:
            continue
        wanted = case.params[name][0]
        family = case.mechanism.family
        fixed = type(case.mechanism)(**{**arguments, name: wanted.numpy()}).setup(family)
        case.require(not fixed.declared()[name].learned, f"{name!r} was fixed but is learned")
        rest = {other: raw for other, raw in case.raw.items() if other != name}
        held = fixed.scaled_to(value, parents, weight).natural(rest)[name]
        case.require_close(held[0], wanted, f"{name!r} was fixed but changed")
        started = type(case.mechanism)(**{**arguments, name: start(wanted.numpy())}).setup(family)
        case.require(started.declared()[name].learned, f"{name!r} was started but is not learned")
        case.require_close(started.declared()[name].constant("x", name), wanted, f"{name!r} starts elsewhere")
        tied = type(case.mechanism)(**{**arguments, name: tie("shared")}).setup(family)
        raw = dict(case.raw)
        raw.setdefault(name, torch.zeros(case.replicas, *tied.declared()[name].shape, dtype=torch.float64))
        before, after = tied.natural(raw)[name], tied.scaled_to(value, parents, weight).natural(raw)[name]
        case.require_close(after, before, f"{name!r} is tied but its value depends on the units of the data")


def check_spec(case: Case) -> None:
    """A mechanism survives the way through JSON."""
    mechanism = case.mechanism
    text = json.dumps(mechanism.spec())
    code = [value for value in arguments_of(mechanism).values() if callable(value)]
    again = from_spec(json.loads(text), node="x", functions={"x": code[0]} if code else None)
    case.require(type(again) is type(mechanism), f"from_spec built a {type(again).__name__}")
    case.require(json.dumps(again.spec()) == text, "spec() changed on the way through JSON")
    natural = again.setup(mechanism.family).natural(case.raw)
    case.require_all_close(natural, case.params, "{} changed on the way through JSON")


MECHANISM_CHECKS: tuple[Check, ...] = tuple(
    value for name, value in vars().items() if name.startswith("check_") and value is not check_mechanism
)
"""All checks of this file in their order, to parametrise a test with."""


# -- helpers -----------------------------------------------------------------------------------------------------


def _lifted(natural: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.unsqueeze(0) for name, value in natural.items()}


def _complete(mechanism: Mechanism, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Raw parameters with zeros for those that are missing."""
    learned = {name: p for name, p in mechanism.declared().items() if p.learned}
    zeros = {name: torch.zeros(1, *p.shape, dtype=torch.float64) for name, p in learned.items()}
    return {**zeros, **raw}


def _alone_and_with_the_node(mechanism: Mechanism, kind: Callable[[Space], bool]) -> list[tuple[list[str], int]]:
    """The node, every parent, and both together where they have as many labels or coordinates; with that number."""
    node, own = mechanism.family.node, mechanism.space
    parents = [(name, space.width) for name, space in mechanism.family.parents if kind(space)]
    alone = [([name], width) for name, width in parents]
    if mechanism.is_given or not kind(own):
        return alone
    return [([node], own.width), *alone, *(([node, name], width) for name, width in parents if width == own.width)]


def _reordered(value: Tensor, order: list[int]) -> Tensor:
    return value[..., order]


def _check_followed(
    case: Case, what: str, nodes: list[str], params: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]
) -> None:
    """Changed values of some nodes under changed parameters are as likely as they were; noise makes the same value."""
    mechanism, value = case.mechanism, case.draws()
    case.require(
        {name: tensor.shape for name, tensor in params.items()}
        == {name: tensor.shape for name, tensor in case.params.items()},
        f"{what} {', '.join(nodes)} changed the names or shapes of parameters",
    )
    parents = {name: change(parent) if name in nodes else parent for name, parent in case.parents.items()}
    makes = mechanism.family.node in nodes
    if mechanism.has_density:
        before = mechanism.log_prob(case.params, value, case.parents)
        after = mechanism.log_prob(params, change(value) if makes else value, parents)
        case.require_close(after, before, f"log_prob differs after {what} {', '.join(nodes)}")
    elif not makes:
        again = mechanism.forward(params, parents, case.noise(case.replicas, case.rows))
        case.require_close(again, value, f"forward differs after {what} {', '.join(nodes)}")


def _discrete_transform(case: Case) -> tuple[NDArray, NDArray]:
    """Randomised probability integral transforms of the draws under log_prob, and the total probabilities."""
    mechanism, value = case.mechanism, case.draws()
    reach = 4 * value.max().item() + 100
    listed = mechanism.space.points(reach, most=int(reach) + 2)
    if listed is None:
        raise AssertionError(f"{mechanism.space} is countable, but does not list its values")
    support = listed.values
    index = (value.unsqueeze(-2) == support).all(-1).long().argmax(-1)
    parents = {name: parent.unsqueeze(-2) for name, parent in case.parents.items()}
    log_prob = mechanism.log_prob(case.params, support.reshape(1, 1, *support.shape), parents)
    probs = torch.exp(log_prob).expand(*value.shape[:2], len(support))
    upper = probs.cumsum(-1).gather(-1, index.unsqueeze(-1))[..., 0]
    width = probs.gather(-1, index.unsqueeze(-1))[..., 0]
    generator = torch.Generator().manual_seed(case.seed + 3)
    picked = torch.rand(upper.shape, generator=generator, dtype=torch.float64)
    return (upper - width * picked).flatten().numpy(), probs.sum(-1).flatten().numpy()


def _continuous_transform(case: Case) -> tuple[NDArray, NDArray]:
    """Distribution function at the draws by integrating exp(log_prob) over a grid, and the total integrals."""
    mechanism, value, space = case.mechanism, case.draws(), case.mechanism.space
    line = space.unconstrain(value)
    centre, spread = line.median(), (line.quantile(0.75) - line.quantile(0.25)).clamp(min=1e-9)
    # a sinh grid is fine in the middle and reaches far into heavy tails, as far as there are numbers for its values
    steps = torch.linspace(-1, 1, GRID, dtype=torch.float64)
    grid = centre + spread * torch.sinh(GRID_BEND * steps)
    values, log_slope = space.constrain(grid.unsqueeze(-1))
    inside = torch.from_numpy(~space.outside(values.numpy())[:, 0]) & torch.isfinite(values[:, 0])
    grid, values, log_slope = grid[inside], values[inside], log_slope[inside, 0]
    parents = {name: parent.unsqueeze(-2) for name, parent in case.parents.items()}
    log_prob = mechanism.log_prob(case.params, values.reshape(1, 1, -1, 1), parents) + log_slope
    density = torch.exp(log_prob).expand(*value.shape[:2], len(grid))
    pieces = 0.5 * (density[..., 1:] + density[..., :-1]) * grid.diff()
    cdf = torch.cat([torch.zeros_like(pieces[..., :1]), pieces.cumsum(-1)], -1)
    right = torch.searchsorted(grid, line[..., 0].contiguous()).clamp(1, len(grid) - 1)
    low, high = (cdf.gather(-1, index.unsqueeze(-1))[..., 0] for index in (right - 1, right))
    gap = (grid[right] - grid[right - 1]).clamp(min=1e-300)
    share = ((line[..., 0] - grid[right - 1]) / gap).clamp(0, 1)
    # close to one a row may hold mass that no floating-point number reaches: it says nothing about the integral
    whole = (density[..., 0] + density[..., -1]) * spread < 1e-4
    return (low + share * (high - low)).flatten().numpy(), cdf[..., -1][whole].numpy()


def _check_gradient(case: Case, name: str, function: Callable[[Mapping[str, Tensor]], Tensor]) -> None:
    raw = {key: value.clone().requires_grad_() for key, value in case.raw.items()}
    output = function(raw)
    if not output.requires_grad:
        case.require(False, f"{name} has no gradient in any parameter")
    # a fixed random projection sees every entry; bounded values keep heavy tails from drowning the rest
    generator = torch.Generator().manual_seed(case.seed + 5)
    direction = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    direction = direction / (1 + output.detach().abs())
    gradients = torch.autograd.grad((direction * output).sum(), list(raw.values()), allow_unused=True)
    step = 1e-5
    slope, size = 0.0, 0.0
    moved: dict[int, dict[str, Tensor]] = {1: {}, -1: {}}
    for (key, value), grad in zip(raw.items(), gradients, strict=True):
        case.require(grad is not None, f"{name} has no gradient in {key!r}")
        case.require(torch.isfinite(grad).all(), f"the gradient of {name} in {key!r} is not finite")
        along = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        slope += (along * grad).sum().item()
        size += (along * grad).abs().sum().item()
        for sign in (1, -1):
            moved[sign][key] = value.detach() + sign * step * along
    case.require(size > 0, f"the gradient of {name} is zero in every parameter")
    with torch.no_grad():
        difference = (direction * (function(moved[1]) - function(moved[-1]))).sum().item() / (2 * step)
    error = abs(slope - difference) / (size + 1e-9)
    case.require(error < 1e-3, f"the gradient of {name} is {slope:.6g}, finite differences say {difference:.6g}")
