"""What every mechanism promises, as checks that run on any of them.

A check takes a :class:`Case`: a mechanism at its place in a graph, with random parameters and parents. It returns
without a word, also where the mechanism does not offer what it looks at (a density, abduction, a finite support).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from operator import itemgetter
from typing import Any

import numpy as np
import scipy as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.mechanisms import Family, Mechanism, Noise, from_spec, start, tie
from otpdag.mechanisms import base as protocols
from otpdag.mechanisms.base import Params, Parents, arguments_of, configurations, numeric
from otpdag.noise import draw_noise
from otpdag.spaces import Space

SMALLEST_P_VALUE = 1e-6  # of a promise that is kept: one check in a million fails by chance
START_ROWS = 5_000  # enough for starting values to come close to the truth
DENSITY_ROWS = 1_000  # draws that are held against a density
GRID, GRID_BEND = 2_001, 12.0  # points of a density's grid, and how much further apart they are in its tails
UPDATES, AT_REST = 100, 1e-4  # closed-form updates after which a row's mean slope must be no steeper
UNIT = 1e3  # of a column with mean 10,000 and deviation 1,000


Tensors = Mapping[str, Tensor]
Check = Callable[["Case"], None]


@dataclass(frozen=True)
class Case:
    """A mechanism set up for a node, with random parameters (R, ...) and parents (R, N, width)."""

    mechanism: Mechanism
    raw: Params
    params: Params
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

    def with_rows(self, rows: int) -> Case:
        """The same mechanism with one replica of other parameters, and so many rows."""
        return Case.build(self.mechanism, self.mechanism.family, replicas=1, rows=rows, seed=self.seed)

    @property
    def batch(self) -> tuple[int, int]:
        """Numbers of replicas and rows."""
        return next((len(value) for value in (*self.params.values(), *self.parents.values())), 1), self.rows

    def noise(self, *shape: int, prior: Noise | None = None, salt: int = 1) -> Tensor:
        """Noise from the mechanism's prior or another, (*shape, dim)."""
        generator = torch.Generator().manual_seed(self.seed + 7919 * salt)
        return draw_noise(self.mechanism.noise if prior is None else prior, shape, generator)

    @cached_property
    def given(self) -> Tensors:
        """Noise, the ``soft`` noise of relaxed draws, uniform numbers, and the value (R, N, width) of the noise."""
        mechanism, noise = self.mechanism, self.noise(*self.batch)
        soft = self.noise(*self.batch, prior=protocols.relaxed_noise(mechanism))
        uniform = self.noise(*self.batch, prior=Noise(mechanism.noise.dim, "uniform"), salt=2)
        value = mechanism.forward(self.params, self.parents, noise)
        return {"noise": noise, "soft": soft, "uniform": uniform, "value": value}

    def draws(self) -> Tensor:
        """Values (R, N, width) from the mechanism itself."""
        return self.given["value"]

    def answers(self, params: Params, parents: Parents, given: Tensors) -> dict[str, Tensor]:
        """What the mechanism makes of noise, and what it says of a value, as far as it says it."""
        mechanism, value = self.mechanism, given["value"]
        answers = {"forward": mechanism.forward(params, parents, given["noise"])}
        answers["relaxed"] = protocols.relaxed(mechanism, params, parents, given["soft"], 0.7)
        if mechanism.has_density:
            answers["log_prob"] = mechanism.log_prob(params, value, parents)
        if protocols.can_abduct(mechanism):
            answers["abduct"] = protocols.abducted(mechanism, params, value, parents, given["uniform"])
        return answers

    @property
    def own_answers(self) -> dict[str, Tensor]:
        """Those to what is given."""
        return self.answers(self.params, self.parents, self.given)

    def require(self, condition: object, message: str) -> None:
        """Raise an :class:`AssertionError` that names the mechanism and its parents."""
        if not condition:
            parents = ", ".join(f"{name}: {space}" for name, space in self.mechanism.family.parents) or "none"
            raise AssertionError(f"{type(self.mechanism).__name__} (parents {parents}): {message}")

    def require_shape(self, tensor: Tensor, shape: tuple[int, ...], what: str) -> None:
        """Compare the shape of what a method gave."""
        self.require(tensor.shape == shape, f"{what} the shape {tuple(tensor.shape)}, expected {shape}")

    def require_likely(self, p_value: Any, message: str) -> None:
        """Compare a p-value with the smallest that chance allows."""
        self.require(p_value > SMALLEST_P_VALUE, f"{message} (p-value {p_value:.1e})")

    def require_all_close(self, found: Params, wanted: Params, message: str, tolerance: float = 1e-8) -> None:
        """Compare tensors by name, which stands for ``{}`` in the message."""
        for name, value in wanted.items():
            self.require_close(found[name].expand_as(value), value, message.format(repr(name)), tolerance)

    def require_close(self, actual: Tensor, expected: Tensor, message: str, tolerance: float = 1e-8) -> None:
        """Compare two tensors, relative to the size of the larger."""
        self.require_shape(actual, tuple(expected.shape), f"{message}: it has")
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


def _has_density(mechanism: Mechanism) -> bool:
    return mechanism.has_density and not mechanism.is_given


_unless_given = _where(lambda mechanism: not mechanism.is_given)
_of_densities = _where(_has_density)


@_unless_given
def check_shapes(case: Case) -> None:
    """Values, densities and noise have the shapes that their arguments say."""
    space, whole = case.mechanism.space, (*case.batch, case.mechanism.space.width)
    case.require_shape(case.draws(), whole, "forward gave")
    case.require(space.contains(case.draws()), f"forward left the space {space}")
    noise = (*case.batch, case.mechanism.noise.dim)
    wanted = {"forward": whole, "relaxed": whole, "log_prob": whole[:-1], "abduct": noise}
    for name, tensor in case.own_answers.items():
        case.require_shape(tensor, wanted[name], f"{name} gave")


@_unless_given
def check_extra_axes(case: Case) -> None:
    """A fourth axis broadcasts: enumerated parents (1, 1, S, K) meet values (R, N, 1, width)."""
    replicas, points, rows = case.batch[0], 3, 5
    parents, given = (_each(own, lambda tensor: tensor[:, :rows].unsqueeze(2)) for own in (case.parents, case.given))
    if case.mechanism.family.discrete:
        name, space = case.mechanism.family.discrete[0]
        points = space.width
        parents[name] = torch.eye(points, dtype=torch.float64).reshape(1, 1, points, points)
    given["noise"] = case.noise(replicas, rows, points)
    given["soft"] = case.noise(replicas, rows, points, prior=protocols.relaxed_noise(case.mechanism))
    four = case.answers(case.params, parents, given)

    def flat(tensor: Tensor) -> Tensor:
        return tensor.expand(replicas, rows, points, -1).flatten(1, 2)

    three = case.answers(case.params, _each(parents, flat), _each(given, flat))
    three = _each(three, lambda tensor: tensor.unflatten(1, (rows, points)))
    case.require_all_close(four, three, "{} with four axes differs from three")


@_unless_given
def check_single_precision(case: Case) -> None:
    """Floats in, floats out, and finite."""
    for name, tensor in case.answers(
        *(_each(own, Tensor.float) for own in (case.params, case.parents, case.given))
    ).items():
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
    rows = mechanism.space.in_other_units(case.draws()[0], UNIT), parents, _ones(case.rows)
    scaled = mechanism.scaled_to(*rows)
    learned = {name: parameter for name, parameter in scaled.declared().items() if parameter.learned}
    raw = {name: torch.zeros(1, *parameter.shape, dtype=torch.float64) for name, parameter in learned.items()}
    raw |= scaled.initial_raw(1, torch.Generator().manual_seed(case.seed))
    started = {name: value.unsqueeze(0) for name, value in scaled.start(*rows).items() if name in learned}
    natural = {**scaled.natural(raw), **started}
    raw = scaled.raw(natural)
    back = scaled.natural(raw)
    case.require_all_close(back, natural, "natural(raw({})) is another value in scaled units", 1e-6)
    for name, tensor in raw.items():
        size = tensor.abs().max().item()
        case.require(size < 1e3, f"raw {name!r} is {size:.1e} after scaled_to: not of order one")
    if isinstance(mechanism, protocols.Buffered) and isinstance(scaled, protocols.Buffered):
        restored = mechanism.with_buffers(scaled.buffers()).natural(raw)
        case.require_all_close(restored, back, "{} changed after with_buffers(buffers())")


@_where(lambda mechanism: mechanism.declared())
def check_start(case: Case) -> None:
    """Starting values from complete rows are nearly as likely as the truth, and have the declared shapes."""
    mechanism, truth = case.mechanism, case.with_rows(START_ROWS)
    started = mechanism.start(truth.draws()[0], _each(truth.parents, itemgetter(0)), _ones(START_ROWS))
    for name, tensor in started.items():
        case.require_shape(tensor, mechanism.declared()[name].shape, f"start gave {name!r}")
        case.require(torch.isfinite(tensor).all(), f"start of {name!r} is not finite")
    if mechanism.has_density and set(started) == set(mechanism.declared()):
        lifted = _each(started, lambda value: value.unsqueeze(0))
        at_start, at_truth = (
            mechanism.log_prob(params, truth.draws(), truth.parents).mean() for params in (lifted, truth.params)
        )
        loss = (at_truth - at_start).item()
        case.require(loss < 0.05, f"start loses {loss:.3f} of log-likelihood per row against the truth")


@_where(lambda mechanism: _has_density(mechanism) and mechanism.space.cells == 1)
def check_density(case: Case) -> None:
    """For one coordinate, exp(log_prob) integrates to one and the draws follow it: for parents of the first row."""
    compare = _counted if case.mechanism.space.is_countable else _integrated
    for one in (slice(replica, replica + 1) for replica in range(case.batch[0])):
        params, parents = _each(case.params, itemgetter(one)), _each(case.parents, itemgetter((one, slice(1))))
        many = _each(parents, lambda value: value.expand(-1, DENSITY_ROWS, -1))
        value = case.mechanism.forward(params, many, case.noise(1, DENSITY_ROWS))[0]
        levels, total = compare(case, value, partial(_density, case.mechanism, params, parents))
        error = abs(total - 1)
        case.require(error < 5e-3, f"exp(log_prob) integrates to one within {error:.1e} only")
        case.require_likely(sp.stats.kstest(levels, "uniform").pvalue, "draws do not follow log_prob")


def _density(mechanism: Mechanism, params: Params, parents: Parents, points: Tensor) -> Tensor:
    """The log-density (n,) of values (n, width) where parents have one row (1, 1, width)."""
    return mechanism.log_prob(params, points.unsqueeze(0), parents).expand(1, len(points))[0]


def _counted(case: Case, value: Tensor, density: Callable[[Tensor], Tensor]) -> tuple[NDArray, float]:
    """Levels of draws (n, width) among probabilities, a random point of each step; and the total probability."""
    if case.mechanism.space.is_discrete:
        listed = torch.eye(value.shape[-1], dtype=torch.float64)
    else:
        listed = torch.arange(4 * value.max().item() + 102, dtype=torch.float64).unsqueeze(-1)
    probs = torch.exp(density(listed))
    index = (value.unsqueeze(-2) == listed).all(-1).long().argmax(-1)
    share = case.noise(len(value), prior=Noise(1, "uniform"), salt=3)[:, 0]
    return (probs.cumsum(0)[index] - share * probs[index]).numpy(), float(probs.sum())


def _integrated(case: Case, value: Tensor, density: Callable[[Tensor], Tensor]) -> tuple[NDArray, float]:
    """Levels of draws (n, width) in an integral of the density over a grid, and the whole integral."""
    space = case.mechanism.space
    line = space.unconstrain(value)
    centre, spread = line.median(), (line.quantile(0.75) - line.quantile(0.25)).clamp(min=1e-9)
    # a sinh grid is fine in the middle and reaches far into heavy tails, as far as there are numbers for its values
    grid = (centre + spread * torch.sinh(GRID_BEND * torch.linspace(-1, 1, GRID, dtype=torch.float64))).unsqueeze(-1)
    points, log_slope = space.constrain(grid)
    inside = torch.from_numpy(~space.outside(points.numpy())[:, 0]) & torch.isfinite(points[:, 0])
    grid, points, heights = grid[inside, 0], points[inside], torch.exp(density(points[inside]) + log_slope[inside, 0])
    cdf = torch.cumulative_trapezoid(heights, grid)
    # close to one there may be mass that no floating-point number reaches: draws in it tell nothing
    value = value[(value > points[0]) & (value < points[-1])]
    levels = np.interp(value.numpy(), points[1:, 0].numpy(), (cdf / cdf[-1]).numpy(), left=0.0)
    whole = float((heights[0] + heights[-1]) * spread) < 1e-4
    return np.asarray(levels), float(cdf[-1]) if whole else 1.0


@_of_densities
def check_score(case: Case) -> None:
    """The gradient of log_prob in the parameters has mean zero under the mechanism's own draws."""
    mechanism, many = case.mechanism, case.with_rows(2 * case.rows)
    if not case.raw:
        return
    # one replica for each row gives each row's gradient in one pass
    parents = _each(many.parents, lambda parent: parent.transpose(0, 1))
    raw = _each(many.raw, lambda value: value.expand(many.rows, *value.shape[1:]).clone())
    leaves = [value.requires_grad_() for value in raw.values()]
    log_prob = mechanism.log_prob(mechanism.natural(raw), many.draws().transpose(0, 1), parents)
    scores = torch.cat([grad.flatten(1) for grad in torch.autograd.grad(log_prob.sum(), leaves)], -1)
    # a few fixed directions are enough
    directions = case.noise(scores.shape[1], prior=Noise(min(scores.shape[1], 8)), salt=4)
    p_values = sp.stats.ttest_1samp((scores @ directions).numpy(), 0.0).pvalue
    case.require_likely(np.min(p_values), "draws do not follow log_prob: mean score not zero")


@_where(protocols.can_abduct)
def check_abduction(case: Case) -> None:
    """Abducted noise gives the value back, and follows the noise prior."""
    mechanism, noise = case.mechanism, case.own_answers["abduct"]
    case.require(torch.isfinite(noise).all(), "abducted noise is not finite")
    again = mechanism.forward(case.params, case.parents, noise)
    case.require_close(again, case.draws(), "forward(abduct(value)) is another value", 1e-6)
    law = "uniform" if mechanism.noise.kind == "uniform" else "norm"
    for index in range(mechanism.noise.dim):
        p_value = sp.stats.kstest(noise[..., index].flatten().numpy(), law).pvalue
        case.require_likely(p_value, f"abducted noise {index} does not follow its prior")


@_unless_given
def check_gradients(case: Case) -> None:
    """Gradients in the parameters are finite, reach every parameter and agree with finite differences."""
    if not case.raw:
        return
    for name in case.own_answers:
        if name != "forward" or not case.mechanism.space.is_countable:
            _check_gradient(case, name)


def _check_gradient(case: Case, name: str, step: float = 1e-5) -> None:
    """Compare the slope along a random direction, of a projection that sees every entry of an answer."""
    generator = torch.Generator().manual_seed(case.seed + 5)

    def answer(raw: Params) -> Tensor:
        return case.answers(case.mechanism.natural(raw), case.parents, case.given)[name]

    raw = {key: value.clone().requires_grad_() for key, value in case.raw.items()}
    output = answer(raw)
    case.require(output.requires_grad, f"{name} has no gradient in any parameter")
    # bounded values keep heavy tails from drowning the rest
    projection = torch.randn(output.shape, generator=generator, dtype=torch.float64) / (1 + output.detach().abs())
    gradients = torch.autograd.grad((projection * output).sum(), list(raw.values()), allow_unused=True)
    along = {key: torch.randn(value.shape, generator=generator, dtype=torch.float64) for key, value in raw.items()}
    parts = []
    for key, grad in zip(raw, gradients, strict=True):
        case.require(grad is not None, f"{name} has no gradient in {key!r}")
        case.require(torch.isfinite(grad).all(), f"the gradient of {name} in {key!r} is not finite")
        parts.append((along[key] * grad).flatten())
    slope, size = torch.cat(parts).sum().item(), torch.cat(parts).abs().sum().item()
    case.require(size > 0, f"the gradient of {name} is zero in every parameter")
    with torch.no_grad():
        above, below = (
            answer({key: value + sign * step * along[key] for key, value in case.raw.items()}) for sign in (1, -1)
        )
    difference = (projection * (above - below)).sum().item() / (2 * step)
    error = abs(slope - difference) / (size + 1e-9)
    case.require(error < 1e-3, f"the gradient of {name} is {slope:.6g}, finite differences say {difference:.6g}")


@_unless_given
def check_replicas(case: Case) -> None:
    """Replicas together give what they give one by one."""
    together = case.own_answers
    for one in (slice(replica, replica + 1) for replica in range(case.batch[0])):
        alone = case.answers(*(_each(own, itemgetter(one)) for own in (case.params, case.parents, case.given)))
        case.require_all_close(alone, _each(together, itemgetter(one)), "{} mixes replicas")


@_of_densities
def check_mask(case: Case) -> None:
    """A full mask changes nothing, an empty one leaves zero."""
    log_prob = partial(case.mechanism.log_prob, case.params, case.draws(), case.parents)
    full = torch.ones(*case.batch, case.mechanism.space.cells, dtype=torch.bool)
    case.require_close(log_prob(full), log_prob(), "a full mask changes log_prob")
    case.require_close(log_prob(~full), torch.zeros(case.batch).double(), "log_prob of a missing value is not zero")


@_unless_given
def check_complete(case: Case) -> None:
    """Completing a value keeps the cells that are seen, stays in the space, and draws a whole value from nothing."""
    mechanism, value, noise = case.mechanism, case.draws(), case.noise(*case.batch, salt=3)

    def complete(value: Tensor, mask: Tensor) -> Tensor:
        return mechanism.complete(case.params, value, case.parents, mask, noise)

    coins = case.noise(*case.batch, prior=Noise(mechanism.space.cells, "uniform"), salt=4)
    mask = coins < 0.5
    completed = complete(value, mask)
    case.require_shape(completed, tuple(value.shape), "complete gave")
    case.require(mechanism.space.contains(completed), f"complete left the space {mechanism.space}")
    kept = mask.expand_as(value)
    case.require_close(completed[kept], value[kept], "complete changed a cell that is seen")
    case.require_close(complete(value, coins < 1), value, "complete changed a value that is seen")
    fresh = mechanism.forward(case.params, case.parents, noise)
    nothing = complete(torch.full_like(value, torch.nan), coins > 1)
    case.require_close(nothing, fresh, "complete of nothing is not a draw")


@_where(lambda mechanism: _has_density(mechanism) and mechanism.space.is_discrete)
def check_log_probs(case: Case) -> None:
    """The log-probabilities of all categories are those of log_prob, one by one, with any number of axes."""
    mechanism, size = case.mechanism, case.mechanism.space.width
    for points in ((), (1,)):
        parents = {name: value.reshape(*case.batch, *points, -1) for name, value in case.parents.items()}
        like = torch.zeros(*case.batch, *points, size, dtype=torch.float64)
        log_probs = torch.broadcast_to(mechanism.log_probs(case.params, parents, like), like.shape)
        one_by_one = [mechanism.log_prob(case.params, one.expand_as(like), parents) for one in torch.eye(size).double()]
        case.require_close(log_probs, torch.stack(one_by_one, -1), "log_probs are not those of log_prob")


def _features(case: Case, *, seen: bool = True) -> Tensor | None:
    """Features of the first replica's values, if they are read through sums of any."""
    mechanism, mask = case.mechanism, torch.full((case.rows, case.mechanism.space.cells), seen)
    if isinstance(mechanism, protocols.ExponentialFamily):
        return mechanism.features(case.draws()[0], mask)
    return None


@_of_densities
def check_features(case: Case) -> None:
    """Features times coefficients are log_prob, and cells that are not seen have none."""
    mechanism, features, parents = case.mechanism, _features(case), _each(case.parents, itemgetter(slice(1)))
    if not isinstance(mechanism, protocols.ExponentialFamily) or features is None:
        return
    config, table = configurations(mechanism.family, parents), mechanism.coefficients(case.params)
    found = (features * (table if config is None else table[:, config[0].argmax(-1)])).sum(-1)
    log_prob = mechanism.log_prob(case.params, case.draws()[:1], parents).expand_as(found)
    case.require_close(found, log_prob, "features times coefficients are not log_prob")
    unseen = _features(case, seen=False)
    case.require(unseen is None or not unseen.any(), "cells that are not seen have features")


@_of_densities
def check_fitted(case: Case) -> None:
    """Updates in closed form never make weighted rows less likely, and come to rest where they are likeliest."""
    mechanism, value, parents = case.mechanism, case.draws()[0], _each(case.parents, itemgetter(0))
    weight = 0.5 + case.noise(*case.batch, salt=3).abs().mean(-1).clamp(max=2.0)

    def log_likelihood(params: Params) -> Tensor:
        lifted = _each(case.parents, itemgetter(slice(1)))
        return (weight * mechanism.log_prob(params, value.unsqueeze(0), lifted)).sum(-1)

    update: Callable[[Params], Params]
    if _features(case) is not None:
        update = partial(protocols.fitted_to_rows, mechanism, value=value, parents=parents, weight=weight)
    elif isinstance(mechanism, protocols.Regressed) and protocols.has_closed_form(mechanism):
        moments, none = _moments(mechanism, value, parents, weight), torch.zeros_like(value[0])
        shift = none.new_zeros(len(none), moments.shape[-1] - 1)
        update = partial(mechanism.regressed, moments=moments, shift=shift, unit=none + 1)
    else:
        return
    gain = log_likelihood(mechanism.natural(mechanism.raw(update(case.params)))) - log_likelihood(case.params)
    case.require(bool((gain >= -1e-8).all()), f"fitted makes the rows less likely by {-gain.min():.2e}")
    params = case.params
    for _ in range(UPDATES):
        params = mechanism.natural(mechanism.raw(update(params)))
    raw = {key: value.detach().clone().requires_grad_() for key, value in mechanism.raw(params).items()}
    if not raw:
        return
    total = log_likelihood(mechanism.natural(raw)).sum()
    for key, slope in zip(raw, torch.autograd.grad(total, list(raw.values()), allow_unused=True), strict=True):
        steepest = 0.0 if slope is None else float(slope.abs().max()) / case.rows
        rests = f"fitted comes to rest where {key!r} could still make the rows likelier"
        case.require(steepest < AT_REST, f"{rests} (a slope of {steepest:.1e} a row)")


def _moments(mechanism: Mechanism, value: Tensor, parents: Parents, weight: Tensor) -> Tensor:
    """Sums of products of (coordinate, numeric parents, 1) in each configuration (R, C, dim, P + 2, P + 2)."""
    config, beside = configurations(mechanism.family, parents), numeric(mechanism.family, parents)
    one = torch.ones_like(value[:, :1])
    others = one if beside is None else torch.cat([beside, one], -1)
    columns = torch.stack([torch.cat([own.unsqueeze(-1), others], -1) for own in value.unbind(-1)], 1)
    return torch.einsum("rn,nc,ndi,ndj->rcdij", weight, one if config is None else config, columns, columns)


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
        order = torch.arange(width).roll(-1)
        params = case.mechanism.relabelled(case.params, nodes, order.tolist())
        _check_followed(case, "relabelling", nodes, params, partial(torch.index_select, dim=-1, index=order))


def check_turning(case: Case) -> None:
    """The node and its parents turned round, under the parameters that follow them, are as likely."""
    for nodes, width in _alone_and_with_the_node(case.mechanism, lambda space: space.is_unbounded):
        sign = 1.0 - 2.0 * (torch.arange(width, dtype=torch.float64) % 2 == 0)
        _check_followed(case, "turning", nodes, _turned(case, nodes, sign), sign.mul)


def _turned(case: Case, nodes: list[str], sign: Tensor) -> Params | None:
    mechanism = case.mechanism
    return mechanism.turned(case.params, nodes, sign) if isinstance(mechanism, protocols.Turning) else None


def _alone_and_with_the_node(mechanism: Mechanism, kind: Callable[[Space], bool]) -> list[tuple[list[str], int]]:
    """The node, every parent, and both together where they have as many labels or coordinates; with that number."""
    node, own = mechanism.family.node, mechanism.space
    parents = [(name, space.width) for name, space in mechanism.family.parents if kind(space)]
    alone = [([name], width) for name, width in parents]
    if mechanism.is_given or not kind(own):
        return alone
    return [([node], own.width), *alone, *(([node, name], width) for name, width in parents if width == own.width)]


def _check_followed(
    case: Case, what: str, nodes: list[str], params: Params | None, change: Callable[[Tensor], Tensor]
) -> None:
    """Changed values of some nodes under changed parameters are as likely as they were; noise makes the same value."""
    if params is None:
        return
    mechanism, value, said = case.mechanism, case.draws(), f"{what} {', '.join(nodes)}"
    before, after = ({name: tensor.shape for name, tensor in own.items()} for own in (case.params, params))
    case.require(before == after, f"{said} changed the names or shapes of parameters")
    parents = {name: change(parent) if name in nodes else parent for name, parent in case.parents.items()}
    makes = mechanism.family.node in nodes
    if mechanism.has_density:
        likely = mechanism.log_prob(case.params, value, case.parents)
        again = mechanism.log_prob(params, change(value) if makes else value, parents)
        case.require_close(again, likely, f"log_prob differs after {said}")
    elif not makes:
        again = mechanism.forward(params, parents, case.given["noise"])
        case.require_close(again, value, f"forward differs after {said}")


def check_slopes(case: Case) -> None:
    """Slopes change sign with a parent that is turned, and are there where the parent can be."""
    mechanism = case.mechanism
    if not isinstance(mechanism, protocols.Sloped):
        return
    for name, space in case.mechanism.family.continuous:
        slopes = mechanism.slopes(case.params, name)
        turned = _turned(case, [name], -torch.ones(space.width, dtype=torch.float64))
        if slopes is None or turned is None:
            continue
        case.require_shape(slopes, (case.batch[0], space.width), f"slopes of {name!r} have")
        again = mechanism.slopes(turned, name)
        case.require_close(again if again is not None else slopes, -slopes, f"slopes of {name!r} do not turn with it")


@_where(lambda mechanism: not mechanism.is_given and mechanism.noise.dim)
def check_mean(case: Case) -> None:
    """A closed-form mean is that of the draws."""
    many = case.with_rows(10 * case.rows)
    mean = case.mechanism.mean(many.params, many.parents)
    if mean is None:
        return
    gap = (many.draws() - mean)[0].numpy()
    score = np.abs(gap.mean(0)) / np.maximum(gap.std(0) / np.sqrt(len(gap)), 1e-12)
    case.require(score.max() < 5, f"mean is {score.max():.1f} standard errors from the mean of the draws")


@_unless_given
def check_settings(case: Case) -> None:
    """A fixed parameter is held and not learned, a started one is learned, a tied one ignores units."""
    arguments, family = arguments_of(case.mechanism), case.mechanism.family
    rows = (
        case.mechanism.space.in_other_units(case.draws()[0], UNIT),
        _each(case.parents, itemgetter(0)),
        _ones(case.rows),
    )
    for name in case.params.keys() & arguments.keys():
        wanted = case.params[name][0]
        fixed, started, tied = (
            type(case.mechanism)(**{**arguments, name: setting}).setup(family)
            for setting in (wanted.numpy(), start(wanted.numpy()), tie("shared"))
        )
        case.require(not fixed.declared()[name].learned, f"{name!r} was fixed but is learned")
        rest = {other: raw for other, raw in case.raw.items() if other != name}
        held = fixed.scaled_to(*rows).natural(rest)[name]
        case.require_close(held[0], wanted, f"{name!r} was fixed but changed")
        case.require(started.declared()[name].learned, f"{name!r} was started but is not learned")
        case.require_close(started.declared()[name].constant("x", name), wanted, f"{name!r} starts elsewhere")
        raw = {name: torch.zeros(case.batch[0], *wanted.shape, dtype=torch.float64), **case.raw}
        before, after = tied.natural(raw)[name], tied.scaled_to(*rows).natural(raw)[name]
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


# all checks of this file in their order, to parametrise a test with
MECHANISM_CHECKS: tuple[Check, ...] = tuple(
    value for name, value in vars().items() if name.startswith("check_") and value is not check_mechanism
)


# -- helpers -----------------------------------------------------------------------------------------------------


def _ones(rows: int) -> Tensor:
    return torch.ones(rows, dtype=torch.float64)


def _each(tensors: Tensors, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {name: change(tensor) for name, tensor in tensors.items()}
