"""Multinomial nodes: how often each of several categories came up in a number of draws."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.mechanisms.base import Noise, Params, Parents
from otpdag.mechanisms.categorical import SMALLEST_PROBABILITY, Shares, log_table
from otpdag.mechanisms.generalised_linear import between, softmax
from otpdag.mechanisms.parameters import SettingLike
from otpdag.mechanisms.predictor import Predictor
from otpdag.mechanisms.quantiles import BETA, inside_unit
from otpdag.numerics import apply_linear
from otpdag.spaces import Count, Simplex, Space


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

    >>> Multinomial(5, total=20).noise
    Noise(dim=4, kind='uniform')
    """

    categories: int = field(kw_only=False)
    total: int | str | None = field(default=None, kw_only=False)
    topics: SettingLike = None

    forms: ClassVar[tuple[str, ...]] = ("probs", "topics", "logits")

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.categories < 2:
            raise ModelError(f"categories must be at least 2; got {self.categories}")
        if isinstance(self.total, int) and self.total < 0:
            raise ModelError(f"total must not be negative; got {self.total}")
        self.dim = self.categories
        super().__post_init__()

    def on_setup(self) -> None:
        """Choose between a table, topics and a logit."""
        family = self.family
        if isinstance(self.total, str):
            space = dict(family.parents).get(self.total)
            if space is None or space.is_discrete or space.width != 1:
                raise ModelError(
                    f"node {family.node!r}: `total` must be a number or a parent that holds one; got {self.total!r}"
                )
            rest = tuple((name, space) for name, space in family.parents if name != self.total)
            family = replace(family, parents=rest)
        on_simplex = len(family.parents) == 1 and isinstance(family.parents[0][1], Simplex)
        if self.network or (family.continuous and not on_simplex):
            self.form = "logits"
        else:
            self.form = "topics" if on_simplex else "probs"
        self.source = family.parents[0][0] if self.form == "topics" else None
        self.check_form()
        self.predictor = Predictor(family, self.dim, "logits", self.logits, self.weight, self.network)

    @property
    def space(self) -> Space:
        """Counts."""
        return Count(self.dim)

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
            return {"topics": _fit_topics(parents[self.source or ""], counts, overall)}
        counted = self.weights_by_row(self.predictor.rows, parents, weight).T @ value + overall
        return {"probs": counted / counted.sum(-1, keepdim=True)}

    def log_shares(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """Log-probabilities of one draw: (R, ..., categories)."""
        if self.form != "topics":
            return super().log_shares(params, parents, like)
        return log_table(apply_linear(parents[self.source or ""], params["topics"]))

    def draws(self, parents: Parents, like: Tensor) -> Tensor:
        """The number of draws, (R, ..., 1)."""
        if self.total is None:
            raise ModelError(f"node {self.family.node!r}: sampling a Multinomial needs `total`, its number of draws")
        if isinstance(self.total, str):
            return parents[self.total].round().clamp(min=0)
        return torch.full((1,) * like.ndim, float(self.total), dtype=like.dtype, device=like.device)

    @cached_property
    def _tree(self) -> _Tree:
        return _Tree(self.dim)

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """Divide the draws down the tree by binomial quantiles."""
        probs = torch.softmax(self.log_shares(params, parents, noise), -1)
        return self._divide(noise, probs, self.draws(parents, noise))

    def _divide(self, noise: Tensor, probs: Tensor, total: Tensor) -> Tensor:
        """Divide ``total`` (R, ..., 1) draws down the tree in proportion to ``probs`` (R, ..., categories)."""
        shape = torch.broadcast_shapes(probs.shape[:-1], total.shape[:-1], noise.shape[:-1])
        arrays = (inside_unit(noise), probs, total)
        noise_np, probs_np, total_np = (
            tensor.detach().expand(*shape, tensor.shape[-1]).cpu().numpy() for tensor in arrays
        )
        return torch.as_tensor(self._tree.divide(noise_np, probs_np, total_np)).to(noise)

    @property
    def correlated(self) -> bool:
        """Always: the counts sum to the number of draws."""
        return True

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
        if self.form == "probs" and value.ndim >= 3:
            return coefficient + self._table_log_prob(params, value, parents, mask)
        log_shares = self.log_shares(params, parents, value)
        log_prob = (value * log_shares).sum(-1)
        if mask is not None:
            log_prob = log_prob - total * torch.log((torch.exp(log_shares) * mask).sum(-1).clamp(min=1e-300))
        return coefficient + log_prob

    def _table_log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None) -> Tensor:
        """The same by matrix products: every configuration's value, then the one that holds."""
        table = params["probs"].clamp(min=SMALLEST_PROBABILITY).transpose(1, 2)
        by_row = apply_linear(value, torch.log(table))
        if mask is not None:
            seen = apply_linear(mask.to(value), table)
            by_row = by_row - value.sum(-1, keepdim=True) * torch.log(seen.clamp(min=1e-300))
        return self.picked(by_row, parents)

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """For each split, a point between the binomial distribution function below its count and at it."""
        probs = torch.softmax(self.log_shares(params, parents, value), -1)
        shape = torch.broadcast_shapes(probs.shape[:-1], value.shape[:-1], uniform.shape[:-1])
        probs, value = probs.expand(*shape, self.dim), value.expand(*shape, self.dim)
        uniform = uniform.expand(*shape, self.dim - 1)
        left_mass, mass = self._tree.splits(probs)
        left, size = self._tree.splits(value)
        # a split that no draw reaches has said nothing about its noise
        reached = size > 0
        k, n, picked = left[reached], size[reached], uniform[reached]
        share = (1 - left_mass / mass.clamp(min=torch.finfo(mass.dtype).tiny))[reached].clamp(0, 1)

        def cdf(count: Tensor) -> Tensor:
            # P(X <= k) = I_{1-p}(n - k, k + 1)
            below = BETA.cdf(share, (n - count).clamp(min=1), count + 1)
            return torch.where(count < n, below, 1.0)

        return uniform.masked_scatter(reached, between(cdf, k, picked))

    def mean(self, params: Params, parents: Parents) -> Tensor | None:
        """The expected counts, where the number of draws is known."""
        if self.total is None:
            return None
        probs = torch.softmax(self.log_shares(params, parents), -1)
        return self.draws(parents, probs) * probs


@dataclass(frozen=True)
class _Tree:
    """A binary tree over categories, padded to a power of two; the split before category ``j`` has number ``j - 1``."""

    leaves: int

    @property
    def depth(self) -> int:
        return (self.leaves - 1).bit_length()

    def numbers(self, level: int) -> NDArray[np.int64]:
        """Numbers of a level's splits, without those whose right side is padding."""
        width = 2 ** (self.depth - level)
        return np.arange(width // 2, self.leaves, width) - 1

    def divide(self, noise: NDArray, probs: NDArray, total: NDArray) -> NDArray:
        """Counts (..., leaves) from uniform numbers (..., leaves - 1) and totals (..., 1)."""
        from scipy import stats  # takes a second to import

        pad = [(0, 0)] * (probs.ndim - 1) + [(0, 2**self.depth - self.leaves)]
        masses = [np.pad(probs, pad)]
        while masses[-1].shape[-1] > 1:
            masses.append(masses[-1][..., ::2] + masses[-1][..., 1::2])
        counts = total
        for level in range(self.depth):
            numbers = self.numbers(level)
            mass = masses[self.depth - level][..., : len(numbers)]
            share = masses[self.depth - level - 1][..., ::2][..., : len(numbers)] / np.maximum(mass, 1e-300)
            left = counts.copy()
            head = left[..., : len(numbers)]
            open_ = (head > 0) & (share < 1)
            head[open_] = stats.binom.ppf(noise[..., numbers][open_], head[open_], share[open_])
            counts = np.stack([left, counts - left], -1).reshape(*left.shape[:-1], -1)
        return counts[..., : self.leaves]

    def splits(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sums to the left of each split and of both sides, (..., leaves - 1), in the order of the numbers."""
        sums = torch.nn.functional.pad(values, (0, 2**self.depth - self.leaves))
        left, both, order = [], [], []
        for level in reversed(range(self.depth)):
            numbers = self.numbers(level)
            parts, sums = sums[..., ::2], sums[..., ::2] + sums[..., 1::2]
            left.append(parts[..., : len(numbers)])
            both.append(sums[..., : len(numbers)])
            order.append(numbers)
        index = torch.as_tensor(np.argsort(np.concatenate(order)), device=values.device)
        return torch.cat(left, -1)[..., index], torch.cat(both, -1)[..., index]


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
