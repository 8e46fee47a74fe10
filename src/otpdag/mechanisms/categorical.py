"""Nodes that are categories, with a table or a logit, of two values, or one that stays or moves; and their counts."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from otpdag.errors import ModelError, check_count
from otpdag.layers import gumbel_softmax
from otpdag.mechanisms.base import Family, Mechanism, Noise, Params, Parents, axis_count, configurations
from otpdag.mechanisms.generalised_linear import LOGIT, between, softmax
from otpdag.mechanisms.parameters import SIMPLEX, UNIT, Axis, Parameter, PseudoCounts, SettingLike
from otpdag.mechanisms.predictor import Predicted
from otpdag.mechanisms.quantiles import BETA, inside_unit
from otpdag.numerics import apply_linear, expand_to, joint_one_hot, side_by_side, sums_by_row
from otpdag.spaces import Count, Discrete, Simplex, Space, Vector

SMALLEST_PROBABILITY = 1e-12  # what an impossible category counts as, so that its logarithm is finite


class Category(Mechanism):
    """Shared parts of nodes that are categories, with the log-probabilities of all of them."""

    size: int

    @property
    def space(self) -> Space:
        """Categories."""
        return Discrete(self.size)

    noise = Noise(1, "uniform")  # cut by the cumulative probabilities

    @property
    def relaxed_noise(self) -> Noise:
        """One uniform number for each category, turned into Gumbel noise."""
        return Noise(self.size, "uniform")

    def probabilities(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """Those of all categories: (R, ..., size)."""
        return torch.softmax(self.log_probs(params, parents, like), -1)

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """The category whose stretch of the cumulative probabilities holds ``u``."""
        index = (noise > self.probabilities(params, parents, noise).cumsum(-1)[..., :-1]).sum(-1)
        return torch.nn.functional.one_hot(index, self.size).to(noise.dtype)

    def relaxed(self, params: Params, parents: Parents, noise: Tensor, temperature: float) -> Tensor:
        """A Gumbel-softmax draw."""
        return gumbel_softmax(self.log_probs(params, parents, noise), noise, temperature)

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Log-probability of the category."""
        log_prob = (value * self.log_probs(params, parents, value)).sum(-1)
        return log_prob if mask is None else torch.where(mask[..., 0], log_prob, 0.0)

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """A point of the stretch of the cumulative probabilities that belongs to the category."""
        probs = self.probabilities(params, parents, value)
        upper = (probs.cumsum(-1) * value).sum(-1, keepdim=True)
        return upper - (probs * value).sum(-1, keepdim=True) * (1 - uniform)

    def mean(self, params: Params, parents: Parents) -> Tensor:
        """The probabilities."""
        return self.probabilities(params, parents)


@dataclass(eq=False, repr=False, kw_only=True)
class Shares(Predicted):
    """Probabilities of categories: a table, or a logit where a parent is numeric or there is a network.

    Attributes:
        form: The name of the parameter that there is with these parents.
        shared: Pseudo-counts (rows, dim) of a table that most rows of data tell little of.
        enough: Rows of data for each row of a table from which on it stands for itself.
    """

    probs: SettingLike = None
    logits: SettingLike = None

    dim: int = field(default=1, init=False)
    form: str = field(init=False)
    shared: Tensor | None = field(default=None, init=False)
    from_data: ClassVar[tuple[str, ...]] = ("shared",)
    enough: ClassVar[int] = 5
    predicts: ClassVar[str] = "logits"
    forms: ClassVar[tuple[str, ...]] = ("probs", "logits")

    @property
    def is_table(self) -> bool:
        """Whether there is a table over discrete parents."""
        return self.form == "probs"

    def on_setup(self) -> None:
        """Choose between a table and a logit."""
        super().on_setup()
        terms = self.predictor.terms
        if terms is not None and (terms.offsets or terms.rising is not None):
            if self.dim > 2:
                what = "an offset" if terms.offsets else "a monotone effect"
                raise ModelError(
                    f"node {self.family.node!r}: {what} is of the log-odds of two categories; there are {self.dim}"
                )
            self.predictor = replace(self.predictor, contrast=(-0.5, 0.5))
        self.form = self.form_of_parents()
        for name in self.forms:
            if name != self.form and getattr(self, name) is not None:
                raise ModelError(
                    f"node {self.family.node!r}: {name!r} cannot be given; with these parents the parameter is "
                    f"{self.form!r}"
                )

    def form_of_parents(self) -> str:
        """The form with these parents."""
        return "probs" if self.has_only_tables else "logits"

    def parameters(self) -> dict[str, Parameter]:
        """A table of probabilities, or the logit's intercepts and slopes."""
        if self.form == "logits":
            return super().parameters()
        rows = self.predictor.rows if self.is_table else self.predictor.inputs
        setting = getattr(self, self.form)
        setting = PseudoCounts(self.shared) if setting is None and self.shared is not None else setting
        return {self.form: Parameter((rows, self.dim), SIMPLEX, setting)}

    def axes(self) -> dict[str, tuple[Axis, ...]]:
        """Probabilities by configuration or by the parent's coordinates, or those of the logit."""
        if self.form == "logits":
            return super().axes()
        rows = self.predictor.row_axis if self.is_table else Axis.of_coordinates(self.predictor.family.continuous)
        return {self.form: (rows, self.own_axis)}

    def on_scale(self, value: Tensor, parents: Parents, weight: Tensor) -> None:
        """Adopt the units of the numeric parents; logits are of order one already."""
        if self.form == "logits":
            predictor = self.predictor.with_units(None, parents, weight)
            shares = value / value.sum(-1, keepdim=True).clamp(min=1e-12)
            # slopes of a category against all others are those against the mean of all times K / (K - 1)
            times = self.dim / max(self.dim - 1, 1)
            self.predictor = predictor.smoothed(shares, parents, weight, LOGIT, times)

    def log_shares(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """Log-probabilities of all categories: (R, ..., size).

        A soft configuration of the parents averages them, which is what an expectation over it needs.
        """
        if not self.is_table:
            return torch.log_softmax(self.predictor(params, parents, like).mT, -2).mT  # the last axis is slow
        return self.row_of(log_table(params["probs"]), parents, axis_count(parents, like))

    def counted(self, table: Tensor, value: Tensor, parents: Parents) -> Tensor:
        """The row of a table (R, C, size) that the parents choose, summed as often as ``value`` says: (R, ...)."""
        by_row, config = apply_linear(value, table.mT), configurations(self.family, parents)
        return by_row[..., 0] if config is None else (by_row * config).sum(-1)

    def describe(self, params: Params) -> dict[str, Tensor]:
        """Tables with one leading axis for each discrete parent; logits and slopes relative to the first category."""
        shown = super().describe(params)
        if self.form == "logits":
            shown |= {name: shown[name] - shown[name][..., :1] for name in ("logits", "weight") if name in shown}
        return shown


def main_effects(levels: Tensor, counts: Tensor, ridge: float = 2.0, steps: int = 500, settled: float = 1e-4) -> Tensor:
    """Shares (C, K) of categories by effects of levels (C, L) alone, with a ridge on them.

    A multinomial logit of counts (C, K) with the fixed curvature bound of Böhning (1992). The ridge is scikit-learn's
    default, of two categories.
    """
    rows = counts.sum(-1, keepdim=True)
    design = torch.cat([torch.ones_like(rows), levels.to(counts)], -1)
    height = ridge * torch.eye(design.shape[1]).to(counts)
    height[0, 0] = 1e-6 * ridge
    inverse = torch.linalg.inv(0.5 * design.T @ (rows * design) + height)
    effects = counts.new_zeros(design.shape[1], counts.shape[1])
    for _ in range(steps):
        step = inverse @ (design.T @ (counts - rows * torch.softmax(design @ effects, -1)) - height @ effects)
        effects = effects + step
        if step.abs().amax() <= settled:
            break
    return torch.softmax(design @ effects, -1)


def likeliest_size(shares: Tensor, counts: Tensor, least: float = 0.1, tried: int = 60) -> Tensor:
    r"""How many rows' worth of shares (C, K) in each row of a table make counts (C, K) likeliest.

    .. math:: \sum_c \log \frac{\Gamma(\alpha)}{\Gamma(\alpha + n_c)} \prod_k
              \frac{\Gamma(\alpha p_{ck} + n_{ck})}{\Gamma(\alpha p_{ck})}

    >>> even = torch.full((4, 2), 0.5, dtype=torch.float64)
    >>> [round(float(likeliest_size(even, 8 * one)), 1) for one in (even, torch.eye(2).repeat(2, 1).double())]
    [32.0, 0.1]
    """
    seen = counts.sum(-1) > 0
    shares, counts = shares[seen].clamp(min=SMALLEST_PROBABILITY), counts[seen]
    sizes = torch.logspace(math.log10(least), math.log10(max(float(counts.sum()), 1.0)), tried).to(shares)
    told = [
        (torch.lgamma(size * shares + counts) - torch.lgamma(size * shares)).sum()
        - (torch.lgamma(size + counts.sum(-1)) - torch.lgamma(size)).sum()
        for size in sizes
    ]
    return sizes[int(torch.stack(told).argmax())]


def log_table(probs: Tensor) -> Tensor:
    """Logarithms of probabilities; those of impossible categories are finite."""
    return torch.log(probs.clamp(min=SMALLEST_PROBABILITY))


@dataclass(eq=False, repr=False, kw_only=True)
class Categorical(Category, Shares):
    r"""A category: a probability table over discrete parents, a multinomial logit when a parent is numeric.

    .. math:: P(x = k \mid \mathrm{pa}) = \mathrm{probs}[\mathrm{pa}]_k \quad\text{or}\quad
              \mathrm{softmax}(\mathrm{logits}[\mathrm{pa}] + W^\top \mathrm{pa})_k

    Args:
        size: Number of categories.
        probs: Probability table, one leading axis for each discrete parent; only without numeric parents.
        logits: Intercepts of the logit; only with numeric parents or a network.
        weight: Slopes of the logit.
        network: Sizes of hidden layers of a network of the parents.
        network_prior: Precision of a normal prior on its layers, in units of the columns' spreads; zero for none.
        terms: A formula of the parents for the logit, such as ``"x + C(z)"``.

    >>> Categorical(3).space
    Discrete(size=3)
    """

    size: int = field(default=2, kw_only=False)

    def __post_init__(self) -> None:
        """Refuse no categories."""
        check_count("size", self.size)
        self.dim = self.size
        super().__post_init__()

    @property
    def lines(self) -> int:
        """Through how many predictions alone numeric parents are read: differences from the first category."""
        return self.size - 1 if self.form == "logits" and self.is_affine else 0

    def slopes(self, params: Params, parent: str) -> Tensor | None:
        """From the first to the last category: of a logit, only differences between categories have a meaning."""
        slopes = self.predictor.slopes_of(params, parent)
        return None if slopes is None else slopes[..., -1] - slopes[..., 0]

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """Weighted frequencies, smoothed by one row's worth of the overall ones; or a logistic regression."""
        if not self.is_table:
            return self.predictor.start(value, parents, weight, softmax)
        counts = overall = sums_by_row(value, weight.unsqueeze(-1)).T
        if self.predictor.rows > 1:
            counts = self.summed(weight.unsqueeze(-1) * value, self.predictor.rows, parents)
        overall = overall[0] + 1.0
        return self.fitted({"probs": (overall / overall.sum()).expand_as(counts)}, counts, prior=1.0)

    def on_scale(self, value: Tensor, parents: Parents, weight: Tensor) -> None:
        """Adopt the units of the numeric parents.

        A table over several parents with fewer rows of data than could fill it is drawn to what effects of each parent
        alone say, by as many rows' worth in each of its rows as make the data likeliest: cells that no row shows, or
        one, are not impossible, or certain.
        """
        super().on_scale(value, parents, weight)
        if self.is_thin(float(weight.sum())):
            counts = self.summed(weight.unsqueeze(-1) * value, self.predictor.rows, parents)
            levels = side_by_side(joint_one_hot([space.width for _, space in self.family.discrete]))
            shares = main_effects(levels, counts)
            self.shared = likeliest_size(shares, counts) * shares

    def is_thin(self, rows: float) -> bool:
        """Whether so many rows of data cannot fill a table over seen parents."""
        seen = not self.family.hidden and not self.family.hidden_parents
        return seen and self.is_table and len(self.family.discrete) > 1 and self.predictor.rows * self.enough > rows

    @property
    def has_closed_form(self) -> bool:
        """A table of probabilities that is all to be learned."""
        return self.is_table and isinstance(self.declared()["probs"].setting, PseudoCounts | None)

    def features(self, value: Tensor, mask: Tensor) -> Tensor | None:
        """The category."""
        return value * mask if self.is_table else None

    def coefficients(self, params: Params) -> Tensor:
        """Logarithms of the probabilities."""
        return log_table(params["probs"])

    def fitted(self, params: Params, sums: Tensor, prior: float = 0.1) -> dict[str, Tensor]:
        """Weighted frequencies, slowed by ``prior`` rows' worth of the present ones.

        A configuration of the parents that hardly occurs keeps its probabilities; where updates come to rest they are
        the frequencies themselves, whatever the brake.
        """
        table = self.declared()["probs"]
        if not table.learned:
            return dict(params)
        counts = sums + prior * params["probs"]
        if isinstance(table.setting, PseudoCounts):
            counts = counts + table.setting.penalty
        return {"probs": counts / counts.sum(-1, keepdim=True)}

    def log_probs(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """Those of all categories: (R, ..., size)."""
        return self.log_shares(params, parents, like)


@dataclass(eq=False, repr=False, kw_only=True)
class Bernoulli(Categorical):
    """A node that is 0 or 1: a categorical with two categories.

    >>> Bernoulli().space
    Discrete(size=2)
    """

    size: int = field(default=2, init=False)


@dataclass(eq=False, repr=False, kw_only=True)
class StayOrMove(Category):
    r"""A category that keeps its parent's value with one probability and else takes any other, all alike.

    .. math:: P(z = k \mid j) = \mathrm{stay} \text{ if } k = j, \text{ else } (1 - \mathrm{stay}) / (K - 1)

    The transition of the paper's Poisson hidden Markov model (Section 5.2), with the lagged node itself as its one
    parent.

    Args:
        size: Number of categories K.
        stay: Probability of no change; a number fixes it, ``otp.start(v)`` starts it.

    >>> StayOrMove(4).space
    Discrete(size=4)
    """

    size: int = field(default=2, kw_only=False)
    stay: SettingLike = None

    def __post_init__(self) -> None:
        """Refuse a category that cannot move."""
        check_count("size", self.size, 2)

    def on_setup(self) -> None:
        """Ask for exactly one parent with the same categories."""
        if [space.width for _, space in self.family.discrete] != [self.size] or self.family.continuous:
            raise ModelError(
                f"node {self.family.node!r}: StayOrMove needs exactly one parent, a category of size {self.size} such "
                f"as the node itself one step ago; got {[name for name, _ in self.family.parents]}"
            )

    def parameters(self) -> dict[str, Parameter]:
        """The probability of no change."""
        return {"stay": Parameter((1,), UNIT, self.stay)}

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """The weighted share of rows without a change, kept away from zero and one, which could not be left."""
        kept = (weight * (value * self._parent(parents)).sum(-1)).sum()
        return {"stay": ((kept + 0.5) / (weight.sum() + 1.0)).clamp(0.01, 0.99).reshape(1)}

    @property
    def has_closed_form(self) -> bool:
        """Unless the probability is given."""
        return self.stay is None

    def features(self, value: Tensor, mask: Tensor) -> Tensor:
        """The category."""
        return value * mask

    def coefficients(self, params: Params) -> Tensor:
        """Logarithms of the probabilities from every state to every other."""
        every = torch.eye(self.size).to(params["stay"]).unsqueeze(0)
        return self.log_probs(params, {self.family.discrete[0][0]: every})

    def fitted(self, params: Params, sums: Tensor) -> dict[str, Tensor]:
        """The weighted share of rows without a change."""
        if not self.declared()["stay"].learned:
            return dict(params)
        kept, total = sums.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True), sums.sum((-2, -1)).unsqueeze(-1)
        return {"stay": torch.where(total > 0, kept / total.clamp(min=1e-300), params["stay"])}

    def axes(self) -> dict[str, tuple[Axis, ...]]:
        """One number, which no label has a share in."""
        return {"stay": (Axis(),)}

    def relabelled(self, params: Params, nodes: Collection[str], order: Sequence[int]) -> dict[str, Tensor] | None:
        """Nothing changes as long as node and parent have the same labels."""
        both = {self.family.node, *(name for name, _ in self.family.parents)}
        return dict(params) if set(nodes) == both else None

    def _parent(self, parents: Parents) -> Tensor:
        return parents[self.family.discrete[0][0]]

    def log_probs(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """Those of all categories: (R, ..., size); the one parent has all the axes that there are."""
        parent = self._parent(parents)
        stay = expand_to(params["stay"], parent.ndim)
        return torch.log((parent * stay + (1 - parent) * (1 - stay) / (self.size - 1)).clamp(min=SMALLEST_PROBABILITY))


@dataclass(eq=False, repr=False, kw_only=True)
class Multinomial(Shares):
    r"""Counts of categories in a number of draws, such as the words of a document.

    .. math:: x \sim \mathrm{Multinomial}(n, p), \quad p =
        \begin{cases}
        \mathrm{probs}[\mathrm{pa}] & \text{with discrete parents or none} \\
        \theta^\top \mathrm{topics} & \text{with one parent } \theta \text{ on the simplex} \\
        \mathrm{softmax}(\mathrm{logits}[\mathrm{pa}] + W^\top \mathrm{pa}) & \text{otherwise}
        \end{cases}

    The second case is latent Dirichlet allocation with the words' assignments summed out. The density is conditional on
    the number of draws, which is the sum of the row itself; cells that are missing are left out and the probabilities
    of the others renormalised.

    The noise is uniform, one number for each split of a binary tree over the categories: the draws that reach a split
    are divided by a binomial quantile. The relaxed draw is the Gaussian with the same mean and covariance.

    Args:
        categories: Number of categories, at least two.
        total: Number of draws, needed to sample: a number, or the name of a parent that holds it (and does not
            enter the probabilities).
        probs: Probability table, one leading axis for each discrete parent.
        topics: Probabilities of the categories (rows: coordinates of the parent on the simplex).
        logits: Intercepts of the logit.
        weight: Slopes of the logit.
        network: Sizes of hidden layers of a network of the parents.
        network_prior: Precision of a normal prior on its layers, in units of the columns' spreads; zero for none.
        terms: A formula of the parents for the logit, such as ``"x + C(z)"``.

    >>> Multinomial(5, total=20).noise
    Noise(dim=4, kind='uniform')
    """

    categories: int = field(kw_only=False)
    total: int | str | None = field(default=None, kw_only=False)
    topics: SettingLike = None

    forms: ClassVar[tuple[str, ...]] = ("probs", "topics", "logits")
    space_kind: ClassVar[type[Vector]] = Count

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_count("categories", self.categories, 2)
        if isinstance(self.total, int):
            check_count("total", self.total, 0)
        self.dim = self.categories
        super().__post_init__()

    @property
    def read_by_predictor(self) -> Family:
        """All parents but the number of draws."""
        family = self.family
        if not isinstance(self.total, str):
            return family
        space = dict(family.parents).get(self.total)
        if space is None or space.is_discrete or space.width != 1:
            raise ModelError(
                f"node {family.node!r}: `total` must be a number or a parent that holds one; got {self.total!r}"
            )
        return replace(family, parents=tuple(one for one in family.parents if one[0] != self.total))

    def form_of_parents(self) -> str:
        """Topics, if the one parent is on the simplex."""
        parents, is_linear = self.predictor.family.parents, not self.network and self.terms is None
        on_simplex = is_linear and len(parents) == 1 and isinstance(parents[0][1], Simplex)
        return "topics" if on_simplex else super().form_of_parents()

    @property
    def noise(self) -> Noise:
        """A uniform number for each split of the tree."""
        return Noise(self.dim - 1, "uniform")

    @property
    def relaxed_noise(self) -> Noise:
        """Standard normal, one for each category."""
        return Noise(self.dim, "normal")

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """Weighted frequencies; topics that fit the parent's values; or a logistic regression."""
        if self.form == "logits":
            return self.predictor.start(value, parents, weight, softmax)
        counts = weight.unsqueeze(-1) * value
        overall = counts.sum(0) + 1.0 / self.dim
        overall = overall / overall.sum()
        if self.form == "topics":
            return {"topics": _fit_topics(parents[self.predictor.family.parents[0][0]], counts, overall)}
        counted = self.summed(weight.unsqueeze(-1) * value, self.predictor.rows, parents) + overall
        return {"probs": counted / counted.sum(-1, keepdim=True)}

    def log_shares(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """Log-probabilities of one draw: (R, ..., categories)."""
        if self.form != "topics":
            return super().log_shares(params, parents, like)
        return log_table(apply_linear(parents[self.predictor.family.parents[0][0]], params["topics"]))

    def draws(self, parents: Parents, like: Tensor) -> Tensor:
        """The number of draws, (R, ..., 1)."""
        if self.total is None:
            raise ModelError(f"node {self.family.node!r}: sampling a Multinomial needs `total`, its number of draws")
        if isinstance(self.total, str):
            return parents[self.total].round().clamp(min=0)
        return torch.full((1,) * like.ndim, float(self.total), dtype=like.dtype, device=like.device)

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """Divide the draws down the tree by binomial quantiles."""
        probs = torch.softmax(self.log_shares(params, parents, noise), -1)
        return self._divide(noise, probs, self.draws(parents, noise))

    def _divide(self, noise: Tensor, probs: Tensor, total: Tensor) -> Tensor:
        """Divide ``total`` (R, ..., 1) draws down the tree in proportion to ``probs`` (R, ..., categories)."""
        from scipy import stats  # takes a second to import

        left, both = self._sides(probs)
        given = (inside_unit(noise), (left / both.clamp(min=1e-300)).clamp(0, 1), total)
        shape = np.broadcast_shapes(*(tensor.shape[:-1] for tensor in given))
        levels, shares, sums = (t.detach().expand(*shape, t.shape[-1]).cpu().numpy() for t in given)
        counts = np.zeros((*shape, self.dim))
        counts[..., :1] = sums
        half = 1 << (self.dim - 1).bit_length()
        while (half := half // 2) > 0:
            at = np.arange(half, self.dim, 2 * half)
            reaching, share, level = counts[..., at - half], shares[..., at - 1], levels[..., at - 1]
            open_ = (reaching > 0) & (share < 1)
            first = reaching.copy()
            first[open_] = stats.binom.ppf(level[open_], reaching[open_], share[open_])
            counts[..., at - half], counts[..., at] = first, reaching - first
        return torch.as_tensor(counts).to(noise)

    def _sides(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sums (..., categories - 1) on the left of each split of a binary tree, and on both of its sides.

        The split before category ``j`` divides as many categories on its left as the largest power of two in ``j``.
        """
        at = torch.arange(1, self.dim, device=values.device)
        half, sums = at & -at, torch.nn.functional.pad(values.double().cumsum(-1), (1, 0))
        before, beyond = sums[..., at - half], sums[..., (at + half).clamp(max=self.dim)]
        return sums[..., at] - before, beyond - before

    def complete(self, params: Params, value: Tensor, parents: Parents, mask: Tensor, noise: Tensor) -> Tensor:
        """Divide the draws that the seen counts leave among the other categories."""
        probs = torch.where(mask, 0.0, torch.softmax(self.log_shares(params, parents, noise), -1))
        seen = torch.where(mask, value, 0.0)
        left = (self.draws(parents, noise) - seen.sum(-1, keepdim=True)).clamp(min=0.0)
        left = torch.where(mask.all(-1, keepdim=True), 0.0, left)
        return seen + self._divide(noise, probs, left)

    def relaxed(self, params: Params, parents: Parents, noise: Tensor, temperature: float) -> Tensor:
        """A Gaussian draw with the same mean ``n p``, covariance ``n (diag p - p p')`` and total."""
        probs = torch.softmax(self.log_shares(params, parents, noise), -1)
        total = self.draws(parents, noise)
        root = torch.sqrt(probs)
        return total * probs + torch.sqrt(total) * root * (noise - root * (root * noise).sum(-1, keepdim=True))

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Multinomial log-probability given the row's sum."""
        if mask is not None:
            value = torch.where(mask, value, 0.0)
        total = value.sum(-1)
        coefficient = torch.lgamma(total + 1) - torch.lgamma(value + 1).sum(-1)
        if self.is_table and value.ndim >= 3:  # by matrix products: every configuration's, then the one that holds
            probs = params["probs"].clamp(min=SMALLEST_PROBABILITY)
            log_prob = self.counted(torch.log(probs), value, parents)
            seen = None if mask is None else self.counted(probs, mask.to(value), parents)
        else:
            log_shares = self.log_shares(params, parents, value)
            log_prob = (value * log_shares).sum(-1)
            seen = None if mask is None else (torch.exp(log_shares) * mask).sum(-1)
        return coefficient + (log_prob if seen is None else log_prob - total * torch.log(seen.clamp(min=1e-300)))

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """For each split, a point between the binomial distribution function below its count and at it."""
        probs = torch.softmax(self.log_shares(params, parents, value), -1)
        shape = np.broadcast_shapes(probs.shape[:-1], value.shape[:-1], uniform.shape[:-1])
        left_mass, mass = self._sides(probs.expand(*shape, self.dim))
        left, size = self._sides(value.expand(*shape, self.dim))
        uniform = uniform.expand(*shape, self.dim - 1)
        # a split that no draw reaches has said nothing about its noise
        reached = size > 0
        k, n, picked = left[reached], size[reached], uniform[reached]
        share = (1 - left_mass / mass.clamp(min=1e-300))[reached].clamp(0, 1)

        def cdf(count: Tensor) -> Tensor:
            # P(X <= k) = I_{1-p}(n - k, k + 1)
            below = BETA.cdf(share, (n - count).clamp(min=1), count + 1)
            return torch.where(count < n, below, 1.0)

        return uniform.masked_scatter(reached, between(cdf, k, picked).to(uniform))

    def mean(self, params: Params, parents: Parents) -> Tensor | None:
        """The expected counts, where the number of draws is known."""
        if self.total is None:
            return None
        probs = torch.softmax(self.log_shares(params, parents), -1)
        return self.draws(parents, probs) * probs


def _fit_topics(shares: Tensor, counts: Tensor, overall: Tensor, steps: int = 40) -> Tensor:
    """Topics (K, V) that make ``counts`` (N, V) likely at given ``shares`` (N, K).

    So many steps of expectation-maximisation are enough for a start.
    """
    topics = shares.T @ counts + overall
    topics = topics / topics.sum(-1, keepdim=True)
    for _ in range(steps):
        ratio = counts / (shares @ topics).clamp(min=SMALLEST_PROBABILITY)
        topics = topics * (shares.T @ ratio) + 1e-3 * overall
        topics = topics / topics.sum(-1, keepdim=True)
    return topics
