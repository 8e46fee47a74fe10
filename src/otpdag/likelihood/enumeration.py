r"""Unknown numbers that enter linearly, with normal noise: integrated out exactly.

Where unknown numbers are normal and linear in one another, and all that depends on them is normal and linear too, the
log-density of a row is a quadratic function of their noise :math:`u`, whatever the graph. A quadratic is known from its
values at a few points, so the graph is walked at those only, and

.. math:: \log \int e^{q(u)} N(u; 0, I) \, du = q(0) - \tfrac12 \log |A| + \tfrac12 g^\top A^{-1} g,
          \qquad A = I - \nabla^2 q, \; g = \nabla q(0),

takes the place of a sum over a grid or over draws.

The closed-form backward map: enumerate what can be enumerated, weigh the rest.

With marginal noise and no divergence term, the best backward map of the entropic objective is known,

.. math:: \phi(z \mid x) \propto P_\theta(z) \exp\{-c(x, \psi(z)) / \epsilon\},

the Gibbs posterior (Bayes' rule for the likelihood cost and eps = 1). Small categories are enumerated, one unknown
number is integrated on a grid of its noise, several are drawn and weighted, and those that are normal and linear are
integrated exactly (:mod:`~otpdag.likelihood.enumeration`). Nothing is relaxed, nothing learned.
:mod:`~otpdag.likelihood.posterior_grids` moves grids and draws to where each row's posterior is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.errors import ModelError
from otpdag.mechanisms import Mechanism, protocols
from otpdag.mechanisms.base import Params, Parents
from otpdag.numerics import quadrature
from otpdag.structure import Naturals, Structure

MOST_NUMBERS = 16  # integrated together: a stencil has a point for each pair of them
LARGEST = 1e13  # a log-density beyond which the integral, a difference of two such numbers, is lost in rounding


def is_quadratic(
    structure: Structure, evaluated: Sequence[str], unknown: Sequence[str], numeric: Sequence[str]
) -> bool:
    """Whether the log-density of the ``evaluated`` nodes is quadratic in the noise of the ``numeric`` unknown ones."""
    mechanisms = structure.mechanisms
    dim = sum(mechanisms[node].noise.dim for node in numeric)
    if not 0 < dim <= MOST_NUMBERS or not all(protocols.is_linear(mechanisms[node]) for node in numeric):
        return False
    below = {child for node in numeric for child in structure.graph.children(node)}
    return all(
        protocols.is_linear(mechanisms[node]) if node in unknown else protocols.is_quadratic(mechanisms[node])
        for node in evaluated
        if node in below
    )


def stencil(dim: int) -> Tensor:
    """Points (D, dim) that determine a quadratic function: the origin, both ends of each axis, sums of two axes.

    >>> stencil(2).tolist()
    [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0], [1.0, 1.0]]
    """
    axes = torch.eye(dim, dtype=torch.float64)
    first, second = torch.triu_indices(dim, dim, offset=1)
    return torch.cat([torch.zeros(1, dim, dtype=torch.float64), axes, -axes, axes[first] + axes[second]])


def integrated(prior: Tensor, likelihood: Tensor, eps: float, dim: int, *, split: bool) -> tuple[Tensor, Tensor]:
    r"""Log-weight and log-likelihood of each enumerated state, the numbers integrated out: (R, n, T).

    Both come in at the points of the :func:`stencil`, (R, n, T * D), states slowest. The sum
    ``prior + likelihood / eps`` of what is returned is the logarithm of the integral; its second part is the expected
    log-likelihood under the posterior of the numbers (for the history only, without gradients), or zero without
    ``split``.

    >>> u = stencil(1)[:, 0]
    >>> found, _ = integrated(torch.zeros(1, 1, 3), (-0.5 * (2.0 - u) ** 2).reshape(1, 1, 3), 1.0, 1, split=False)
    >>> round(float(found), 6), round(-0.5 * 2.0**2 / 2 - 0.5 * float(torch.tensor(2.0).log()), 6)
    (-1.346574, -1.346574)
    """
    points = 1 + 2 * dim + dim * (dim - 1) // 2
    prior, likelihood = (part.unflatten(-1, (-1, points)) for part in (prior, likelihood))
    joint = prior + likelihood / eps
    # a state that a row rules out stays ruled out, and must not spoil the gradients of others
    possible = torch.isfinite(joint).all(-1, keepdim=True)
    origin, slope, curvature = _coefficients(torch.where(possible, joint, 0.0), dim)
    factor = _factor(curvature)
    half = _solve(factor, slope.unsqueeze(-1), upper=False)
    log_determinant = 2 * torch.log(factor.diagonal(dim1=-2, dim2=-1)).sum(-1)
    whole = origin + 0.5 * half.square().sum((-2, -1)) - 0.5 * log_determinant
    # far from all sense (scales near zero) rounding alone could make a density large: such a point is ruled out
    known = possible[..., 0] & (origin.detach().abs() < LARGEST)
    whole = torch.where(known, whole, -torch.inf)
    if not split:
        return whole, torch.zeros_like(whole)
    with torch.no_grad():
        cost = _expected(torch.where(possible, likelihood, 0.0), dim, factor, half)
    return whole - cost / eps, cost


def _coefficients(values: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Value (...), gradient (..., dim) and negative Hessian (..., dim, dim) at the origin."""
    origin, plus, minus, sums = values.split([1, dim, dim, dim * (dim - 1) // 2], -1)
    value, slope, bend = origin[..., 0], 0.5 * (plus - minus), 2 * origin - plus - minus
    if dim == 1:
        return value, slope, bend.unsqueeze(-1)
    first, second = torch.triu_indices(dim, dim, offset=1, device=values.device)
    crossed = plus[..., first] + plus[..., second] - origin - sums
    upper = torch.diag_embed(0.5 * bend)
    upper[..., first, second] = crossed
    return value, slope, upper + upper.mT


def _factor(curvature: Tensor) -> Tensor:
    """Cholesky factor of the posterior's precision; it is at least one in every direction but for rounding."""
    if curvature.shape[-1] == 1:
        return (1 + curvature.clamp(min=0)).sqrt()
    eye = torch.eye(curvature.shape[-1], dtype=curvature.dtype, device=curvature.device)
    factor, failed = torch.linalg.cholesky_ex(curvature + eye)
    return torch.where((failed > 0)[..., None, None], torch.nan, factor)


def _solve(factor: Tensor, right: Tensor, *, upper: bool) -> Tensor:
    """Solve a triangular system; of single numbers by a division, which is many times faster."""
    return right / factor if factor.shape[-1] == 1 else torch.linalg.solve_triangular(factor, right, upper=upper)


def _expected(values: Tensor, dim: int, factor: Tensor, half: Tensor) -> Tensor:
    """Expectation of another quadratic under the posterior with this factor of its precision."""
    origin, slope, curvature = _coefficients(values, dim)
    mean = _solve(factor.mT, half, upper=True)
    covariance = torch.cholesky_inverse(factor) if dim > 1 else factor.square().reciprocal()
    second = covariance + mean @ mean.mT
    return origin + (slope * mean[..., 0]).sum(-1) - 0.5 * (curvature * second).sum((-2, -1))


MOST_BITS = 16
"""Flags of a row up to which all their combinations are counted."""


@dataclass(frozen=True)
class SumSizes:
    """Sizes of the sums.

    Args:
        states: Most joint states of enumerated nodes in one row.
        easy_states: Joint states up to which they are enumerated rather than summed along the graph.
        grid: Points for one unknown number.
        draws: Weighted draws for several unknown numbers, where their posterior is.
        prior_draws: The same, the same for all rows, before that is known.
        patterns: Most patterns of missing parents that are summed separately; rarer ones are merged.
        count_atoms: Most support points of an unknown count.
        largest_table: Along the graph: most entries of one table of one row. Rows that need more are approximated.
        entries: Along the graph: most entries of all tables of all rows in one evaluation of exact sums, where rows
            have large ones.
        approximate: Whether rows beyond these two are approximated rather than refused.
        memory: Along the graph: bytes that the tables of a block of rows may take.
    """

    states: int = 4096
    easy_states: int = 32
    grid: int = 48
    draws: int = 32
    prior_draws: int = 512
    patterns: int = 12
    count_atoms: int = 96
    largest_table: int = 2**23
    entries: int = 2**31
    approximate: bool = True
    memory: int = 2**27

    def __post_init__(self) -> None:
        """Refuse sizes that hold nothing."""
        for name in ("largest_table", "entries", "memory"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be at least 1; got {getattr(self, name)}")


@dataclass(frozen=True)
class RowGroup:
    """Rows that miss the same parents, with the fixed points that stand for what they miss.

    Values and masks have an axis for the S points: (B, n, 1, width). ``states`` and ``noise`` hold the points:
    (1, 1, S, width) for enumerated nodes, (1 or R, 1 or n, S, dim) for the noise of numeric ones. ``clamped`` nodes are
    unknown in some rows or cells and seen in others, where the points give way to what is seen.
    """

    rows: Tensor
    values: Mapping[str, Tensor]
    mask: Mapping[str, Tensor]
    weight: Tensor
    unknown: tuple[str, ...]
    clamped: frozenset[str]
    states: Mapping[str, Tensor]
    noise: Mapping[str, Tensor]
    log_weight: Tensor
    complete: frozenset[str] = field(default_factory=frozenset)
    log_stride: Mapping[str, float] = field(default_factory=dict)
    """Logarithm of the distance between the support points of an enumerated count."""
    copies: int = 1
    """Number of points for each joint state of the enumerated nodes."""
    grid: Tensor | None = None
    """Evenly spaced points (1, 1, states, copies) of a single number's noise, on the scale of a normal variable."""
    base: Tensor | None = None
    """Standard normal points (1, n, K, dim) for several numbers, to be moved to where their posterior is."""

    quadratic: int = 0
    """Number of noises in which the log-density is quadratic; the points then are those that tell its coefficients."""

    @property
    def points(self) -> int:
        """Number of points S."""
        return self.log_weight.shape[-1]

    @property
    def least_points(self) -> int:
        """The same, once points of several numbers are placed."""
        return self.points if self.base is None else self.points // self.copies * self.base.shape[-2]

    def serves(self, replicas: int) -> bool:
        """Whether several numbers have points of their own for these replicas."""
        return self.base is None or (self.copies == self.base.shape[-2] and len(self.log_weight) in (1, replicas))


@dataclass(frozen=True)
class Evaluation:
    """Log-weight (with the prior) and log-likelihood of every point: (R, n, S); and the values themselves."""

    log_prior: Tensor
    log_likelihood: Tensor
    values: Mapping[str, Tensor]


def relevant_unknowns(
    structure: Structure, seen: Mapping[str, bool], partly: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    """Nodes that must be filled in to evaluate what is seen: unseen nodes with a descendant that is seen.

    A node in ``partly`` is seen in some rows or cells. A hidden node counts as soon as it has an observed descendant,
    so that its posterior can be read off every row.
    """
    graph = structure.graph
    needed: list[str] = []
    informative: dict[str, bool] = {}
    for node in reversed(graph.order):
        below = any(informative[child] for child in graph.children(node))
        below = below or (node in graph.hidden and bool(graph.observed_descendants(node)))
        informative[node] = seen[node] or below or node in partly
        if not seen[node] and below:
            needed.append(node)
    return tuple(node for node in graph.order if node in needed)


def numeric_unknowns(structure: Structure, unknown: Sequence[str]) -> tuple[str, ...]:
    """The unknown nodes that are numbers, neither categories nor counts."""
    return tuple(n for n in unknown if not structure.mechanisms[n].space.is_countable)


def noisy(structure: Structure, nodes: Sequence[str]) -> tuple[str, ...]:
    """Those of the nodes that have noise of their own; the others follow from their parents."""
    return tuple(n for n in nodes if structure.mechanisms[n].noise.dim)


def group_rows(
    structure: Structure,
    batch: Batch,
    *,
    generator: torch.Generator,
    options: SumSizes,
    count_range: Mapping[str, float] | None = None,
    exact: bool = False,
) -> list[RowGroup]:
    """Split rows by which parents they miss, and lay out the points of each group.

    With ``exact``, numbers that are normal and linear are integrated in closed form: their points are no draws.
    """
    groups = []
    settings = _Settings(generator, options, count_range or {}, exact)
    for pattern in _patterns(structure, batch, options):
        part = batch if pattern.rows is None else batch.take(pattern.rows)
        index = torch.arange(batch.rows) if pattern.rows is None else pattern.rows
        groups.append(_lay_out(structure, part, index, pattern, settings))
    return groups


def enumerates_easily(structure: Structure, batch: Batch, options: SumSizes) -> bool:
    """Whether what rows miss is small enough to be enumerated jointly, which is the fastest then.

    Few patterns of gaps, few joint states of categories, and no count. Everything else is summed along the graph by
    :mod:`~otpdag.likelihood.elimination`.
    """
    patterns = _patterns(structure, batch, replace(options, patterns=options.patterns + 1))
    if len(patterns) > options.patterns:
        return False
    mechanisms = structure.mechanisms
    for pattern in patterns:
        spaces = [mechanisms[node].space for node in pattern.unknown]
        if any(space.is_countable and not space.is_discrete for space in spaces):
            return False
        if math.prod(space.width for space in spaces if space.is_discrete) > options.easy_states:
            return False
    return True


@dataclass(frozen=True)
class _Pattern:
    """Rows that miss the same inner nodes (None: all rows), the nodes unknown there, and those that some rows show."""

    rows: Tensor | None
    unknown: tuple[str, ...]
    clamped: frozenset[str]


@dataclass(frozen=True)
class _Settings:
    """How the points of a group are laid out."""

    generator: torch.Generator
    options: SumSizes
    count_range: Mapping[str, float]
    exact: bool


def _patterns(structure: Structure, batch: Batch, options: SumSizes) -> list[_Pattern]:
    """The patterns of missing inner nodes; rare ones are merged into the last."""
    graph = structure.graph
    inner = [n for n in graph.observed if graph.children(n) and not bool(batch.mask[n].all())]
    outer = [n for n in graph.observed if n not in inner]
    if not inner:
        return [_pattern(structure, None, {node: node in graph.observed for node in graph.nodes}, ())]
    merged = {node: node not in graph.hidden and node not in inner for node in graph.nodes}
    known = torch.stack([batch.mask[n].all(-1) for n in inner], -1)  # (B, N, inner)
    same = bool((known == known[:1]).all())
    if not same:
        return [_pattern(structure, None, merged, inner)]
    codes, inverse, counts = _distinct_flags(known[0])
    patterns: list[_Pattern] = []
    kept = counts.argsort(descending=True)[: options.patterns - 1].tolist()
    for number in kept:
        seen = dict.fromkeys(graph.hidden, False) | dict.fromkeys(outer, True)
        seen |= {node: bool(codes[number, i]) for i, node in enumerate(inner)}
        rows = torch.nonzero(inverse == number)[:, 0]
        vectors = [n for n in inner if not seen[n] and bool(batch.mask[n][:, rows].any())]
        patterns.append(_pattern(structure, rows, seen, vectors))
    rest = torch.nonzero(~torch.isin(inverse, torch.tensor(kept, device=inverse.device)))[:, 0]
    if len(rest):
        patterns.append(_pattern(structure, rest, merged, inner))
    return patterns


def _distinct_flags(flags: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct rows of flags (N, k) in their order, which of them each row is, and how often each comes."""
    size = flags.shape[1]
    if size > MOST_BITS:
        codes, inverse, counts = torch.unique(flags, dim=0, return_inverse=True, return_counts=True)
        return codes, inverse, counts
    # as numbers, the first flag the highest bit: sorted many times faster than rows are
    bits = 2 ** torch.arange(size - 1, -1, -1, device=flags.device)
    numbers = torch.zeros(len(flags), dtype=torch.long, device=flags.device)
    for place, bit in enumerate(bits):
        numbers += flags[:, place] * bit
    often = torch.bincount(numbers, minlength=2**size)
    shown = torch.nonzero(often)[:, 0]
    place_of = torch.zeros_like(often)
    place_of[shown] = torch.arange(len(shown), device=flags.device)
    return (shown[:, None] & bits) != 0, place_of[numbers], often[shown]


def _pattern(structure: Structure, rows: Tensor | None, seen: Mapping[str, bool], partly: Sequence[str]) -> _Pattern:
    unknown = relevant_unknowns(structure, seen, frozenset(partly))
    return _Pattern(rows, unknown, frozenset(partly) & frozenset(unknown))


def _lay_out(structure: Structure, part: Batch, rows: Tensor, pattern: _Pattern, settings: _Settings) -> RowGroup:
    like = next(iter(part.values.values()))
    unknown, options, generator = pattern.unknown, settings.options, settings.generator
    supports, log_stride = _supports(structure, unknown, options, settings.count_range, like)
    _check_states(structure, supports, options)
    numeric = noisy(structure, numeric_unknowns(structure, unknown))
    observed = [node for node in part.values if node not in unknown]
    quadratic = settings.exact and is_quadratic(structure, (*unknown, *observed), unknown, numeric)
    layout = _stencil_noise(structure, numeric, like) if quadratic else None
    noise, log_noise = layout or _noise(structure, numeric, generator, options, like)
    states, tiled, log_weight = _product(supports, log_stride, noise, log_noise, like)
    values = {node: value.unsqueeze(2) for node, value in part.values.items()}
    mask = {node: value.unsqueeze(2) for node, value in part.mask.items()}
    complete = frozenset(node for node, seen in part.mask.items() if bool(seen.all()))
    dim = sum(structure.mechanisms[node].noise.dim for node in numeric)
    base, even = None, None
    if quadratic:
        pass
    elif dim == 1:
        points = noise[numeric[0]].reshape(1, 1, 1, -1).expand(1, 1, math.prod(map(len, supports.values())), -1)
        even = points if structure.mechanisms[numeric[0]].noise.kind == "normal" else torch.special.ndtri(points)
    elif dim > 1:
        drawn = normal_draws(part.rows, max(options.draws, 4 * dim), dim, generator)
        base = standardised(drawn).to(like).unsqueeze(0)
    return RowGroup(
        rows=rows,
        values=values,
        mask=mask,
        weight=part.weight,
        unknown=unknown,
        clamped=pattern.clamped,
        states=states,
        noise=tiled,
        log_weight=log_weight,
        complete=complete,
        log_stride=log_stride,
        copies=len(log_noise),
        grid=even,
        base=base,
        quadratic=dim if quadratic else 0,
    )


def _supports(
    structure: Structure,
    unknown: Sequence[str],
    options: SumSizes,
    count_range: Mapping[str, float],
    like: Tensor,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Support points (A, width) of enumerated nodes, and the log of the stride between count atoms."""
    supports: dict[str, Tensor] = {}
    log_stride: dict[str, float] = {}
    for node in unknown:
        space = structure.mechanisms[node].space
        if not space.is_countable:
            continue
        listed = space.points(count_range.get(node), options.count_atoms)
        if listed is None:
            raise ModelError(f"node {node!r}: a vector of counts cannot be hidden or missing while it has children")
        supports[node], log_stride[node] = listed.values.to(like), listed.log_stride
    return supports, log_stride


def _check_states(structure: Structure, supports: Mapping[str, Tensor], options: SumSizes) -> None:
    total = math.prod(len(points) for points in supports.values())
    if total > options.states:
        names = ", ".join(f"{node!r} ({len(points)})" for node, points in supports.items())
        raise ModelError(
            f"unknown categories {names} have {total} joint states; at most {options.states} are enumerated: use "
            "method='paper', or fewer hidden nodes"
        )


def _noise(
    structure: Structure, numeric: Sequence[str], generator: torch.Generator, options: SumSizes, like: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Noise points (1, D, dim) for each numeric node, the same for all rows, and their log-weights (D,)."""
    if not numeric:
        return {}, torch.zeros(1).to(like)
    priors = {node: structure.mechanisms[node].noise for node in numeric}
    dim = sum(prior.dim for prior in priors.values())
    if dim == 1:
        points, log_weight = quadrature(priors[numeric[0]].kind, options.grid)
        return {numeric[0]: points.to(like).reshape(1, -1, 1)}, log_weight.to(like)
    pieces = normal_draws(1, options.prior_draws, dim, generator).to(like).split([p.dim for p in priors.values()], -1)
    noise = {
        node: piece if priors[node].kind == "normal" else torch.special.ndtr(piece)
        for node, piece in zip(priors, pieces, strict=True)
    }
    return noise, torch.full((options.prior_draws,), -math.log(options.prior_draws)).to(like)


def _stencil_noise(structure: Structure, numeric: Sequence[str], like: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The points that determine a quadratic, for each numeric node (1, D, dim)."""
    sizes = [structure.mechanisms[node].noise.dim for node in numeric]
    points = stencil(sum(sizes)).to(like)
    noise = dict(zip(numeric, points.unsqueeze(0).split(sizes, -1), strict=True))
    return noise, torch.zeros(len(points)).to(like)


def normal_draws(rows: int, draws: int, dim: int, generator: torch.Generator) -> Tensor:
    """Quasi-random standard normal points (rows, draws, dim): one Sobol set, shifted at random for each row."""
    engine = torch.quasirandom.SobolEngine(dim, scramble=False)
    base = engine.draw(draws + 1, dtype=torch.float64)[1:]
    shift = torch.rand(rows, 1, dim, generator=generator, dtype=torch.float64)
    uniform = (base + shift).remainder(1.0).clamp(1e-6, 1 - 1e-6)
    return torch.special.ndtri(uniform)


def standardised(points: Tensor) -> Tensor:
    """Points (n, K, dim) moved so that each row's have mean zero and covariance one: sums of squares are exact."""
    centred = points - points.mean(1, keepdim=True)
    values, vectors = torch.linalg.eigh(centred.mT @ centred / points.shape[1])
    return centred @ (vectors * values.clamp(min=1e-6).rsqrt().unsqueeze(-2)) @ vectors.mT


def _product(
    supports: Mapping[str, Tensor],
    log_stride: Mapping[str, float],
    noise: Mapping[str, Tensor],
    log_noise: Tensor,
    like: Tensor,
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """All combinations of states and noise points, states slowest: arrays over S."""
    sizes = [len(points) for points in supports.values()]
    draws = len(log_noise)
    total = math.prod(sizes)
    states: dict[str, Tensor] = {}
    repeat = total
    for node, points in supports.items():
        repeat //= len(points)
        index = torch.arange(total).div(repeat, rounding_mode="floor") % len(points)
        states[node] = points[index].repeat_interleave(draws, 0).reshape(1, 1, total * draws, -1)
    tiled = {node: value.unsqueeze(0).repeat(1, 1, total, 1) for node, value in noise.items()}
    log_weight = log_noise.repeat(total) + sum(log_stride.values())
    return states, tiled, log_weight.reshape(1, 1, -1).to(like)


def evaluate(structure: Structure, naturals: Naturals, group: RowGroup, *, uniform: bool = False) -> Evaluation:
    """Walk the graph once: fill in the unknown nodes' points, and add up log-densities.

    With ``uniform``, all states of hidden categories have the same prior, whatever the model says.
    """
    values: dict[str, Tensor] = dict(group.values)
    prior: Tensor = group.log_weight
    likelihood = torch.zeros_like(group.log_weight)
    for node in structure.graph.order:
        mechanism, params = structure.mechanisms[node], naturals[node]
        if mechanism.is_given:
            continue
        parents = structure.parents(node, values) if _ready(structure, node, values, group) else None
        if node in group.unknown and parents is not None:
            fill = _fill_in_partly if node in group.clamped else _fill_in
            values[node], log_prior, log_likelihood = fill(mechanism, params, parents, group, node)
            if uniform and node in group.states and node in structure.graph.hidden:
                log_prior = -math.log(mechanism.space.width) if mechanism.space.is_discrete else log_prior
            prior, likelihood = prior + log_prior, likelihood + log_likelihood
        elif node in group.values and parents is not None:
            mask = None if node in group.complete else group.mask[node]
            if mask is None or bool(mask.any()):
                likelihood = likelihood + mechanism.log_prob(params, group.values[node], parents, mask)
    return Evaluation(prior, likelihood, values)


def _ready(structure: Structure, node: str, values: Mapping[str, Tensor], group: RowGroup) -> bool:
    """Whether all parents have values; a node below an irrelevant unknown has none and carries no information."""
    parents = structure.graph.parents(node)
    return all(parent in values for parent in parents) and all(
        parent in group.complete or parent in group.unknown or _usable(group, parent) for parent in parents
    )


def _usable(group: RowGroup, node: str) -> bool:
    return node in group.values and bool(group.mask[node].all())


Filled = tuple[Tensor, Tensor | float, Tensor | float]
"""A value for each point; its log-density under the model over that under the way it was chosen, where it is unknown;
and its log-density where it is seen."""


def _fill_in(mechanism: Mechanism, params: Params, parents: Parents, group: RowGroup, node: str) -> Filled:
    """A node that no row of the group shows."""
    if node in group.states:
        value = group.states[node]
        return value, mechanism.log_prob(params, value, parents), 0.0
    return mechanism.forward(params, parents, _noise_of(group, node)), 0.0, 0.0


def _fill_in_partly(mechanism: Mechanism, params: Params, parents: Parents, group: RowGroup, node: str) -> Filled:
    """A node that some rows (or, of a vector, some cells) show: there it has one value, and counts as seen."""
    if node in group.states:
        return _clamp_states(mechanism, params, parents, group, node)
    seen, known = group.values[node], group.mask[node]
    value = mechanism.complete(params, seen, parents, known, _noise_of(group, node))
    return value, 0.0, mechanism.log_prob(params, value, parents, known)


def _noise_of(group: RowGroup, node: str) -> Tensor:
    return group.noise[node] if node in group.noise else group.log_weight.new_zeros(1, 1, 1, 0)


def _clamp_states(mechanism: Mechanism, params: Params, parents: Parents, group: RowGroup, node: str) -> Filled:
    """Rows that know an enumerated node keep one of its points, and all its values there are what is seen."""
    states, seen, known = group.states[node], group.values[node], group.mask[node][..., 0]
    if mechanism.space.is_discrete:
        value, kept, log_stride = states, (states * seen).sum(-1) > 0.5, 0.0
    else:  # a count that is seen need not be one of the points: the first one stands for it
        value = torch.where(group.mask[node], seen, states)
        kept, log_stride = states[..., 0] == 0, group.log_stride[node]
    log_prob = mechanism.log_prob(params, value, parents)
    one_point = torch.where(kept, -log_stride, -torch.inf).to(log_prob)
    return value, torch.where(known, one_point, log_prob), torch.where(known & kept, log_prob, 0.0)
