r"""M-steps of a node: in closed form, or one step of Newton's method.

- **In closed form** from expected counts and moments (:mod:`~otpdag.likelihood.elimination.evidence`), by
  ``fitted`` and ``regressed`` of each mechanism.
- **Otherwise** one step up the expected log-density. A sample of the rows tells the curvature. Its height is tilted
  until its gradient is that of all rows: of those that show the family, and by ``slopes`` (in natural parameters) of
  those on points. What would go down stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from otpdag.likelihood.elimination.evidence import Counts, Moments, Rows, Statistics
from otpdag.mechanisms.base import ExponentialFamily, Mechanism, Params, Regressed, feature_sums, log_prior
from otpdag.structure import pack, unpack


def maximised(mechanism: Mechanism, params: Params, statistics: Sequence[Statistics]) -> dict[str, Tensor]:
    """Raw parameters (R, ...) of a node where it is likeliest, by what rows say of its family, from ``params``."""
    first, *others = statistics
    replicas = max(len(value) for value in params.values())
    if isinstance(first, Counts):
        assert isinstance(mechanism, ExponentialFamily), "nodes without a closed form are not asked"
        counts = first.table()
        return mechanism.raw(mechanism.fitted(params, counts.expand(replicas, *counts.shape[1:])))
    if isinstance(first, Rows):
        assert isinstance(mechanism, ExponentialFamily), "nodes without a closed form are not asked"
        node, rows = mechanism.family.node, first.complete
        sums = sum(feature_sums(mechanism, one.values[node], one.values, one.weight) for one in rows)
        return mechanism.raw(mechanism.fitted(params, torch.as_tensor(sums).expand(replicas, -1, -1)))
    assert isinstance(first, Moments), "the others with a closed form are linear"
    assert isinstance(mechanism, Regressed), "nodes without a closed form are not asked"
    moments = first.by_coordinate()
    for one in others:
        if isinstance(one, Rows):
            moments = moments + one.by_coordinate(first.shift)
    shift, dim = first.shift, mechanism.space.width
    each = torch.stack([torch.cat([shift[at : at + 1], shift[dim:-1]]) for at in range(dim)])
    moments = moments.expand(replicas, *moments.shape[1:])
    return mechanism.raw(mechanism.regressed(params, moments, each, torch.ones_like(shift[:dim])))


def newton_step(
    mechanism: Mechanism,
    raw: Mapping[str, Tensor],
    statistics: Sequence[Statistics],
    slopes: Mapping[str, Tensor],
    sizes: Sequence[float] = (1.0, 0.25, 0.05),
) -> tuple[dict[str, Tensor], Tensor]:
    """Raw parameters (R, ...) of a node, moved up; and the log-density of all rows that show its family (R,).

    Args:
        mechanism: How the node comes about.
        raw: Where it is (R, ...).
        statistics: What rows say of its family.
        slopes: The gradient of the expected log-density of rows on points, by natural parameter (R, ...).
        sizes: Shares of a step that are tried, the largest first.
    """
    shapes = {name: tuple(value.shape[1:]) for name, value in raw.items()}

    def prior(params: Params) -> Tensor | float:
        told = log_prior(mechanism, params)
        return 0.0 if told is None else told

    def height(flat: Tensor) -> Tensor:
        params = mechanism.natural(unpack(flat, shapes))
        return torch.stack([one.height(params).expand(len(flat)) for one in statistics]).sum(0) + prior(params)

    with torch.enable_grad():
        leaf = pack(dict(raw)).detach().requires_grad_(True)
        complete, exact = torch.zeros(len(leaf)).to(leaf), torch.zeros(()).to(leaf)
        params = mechanism.natural(unpack(leaf, shapes))
        for shown, expected in (part for one in statistics for part in one.parts(params)):
            complete += shown.detach()
            exact = exact + (shown + expected).sum()
        exact = exact + sum((value * slopes[name]).sum() for name, value in params.items() if name in slopes)
        (slope,) = torch.autograd.grad(exact + torch.as_tensor(prior(params)).sum(), leaf)
        before, own, curvature = _curved(height, leaf)
    with torch.no_grad():
        step = _newton_direction(slope, curvature, any(isinstance(one, Rows) and one.thinned for one in statistics))
        tilt = ((slope - own) * step).sum(-1)
        reached = leaf.detach()
        waiting = torch.ones_like(before, dtype=torch.bool)
        for size in sizes:
            trial = leaf + size * step
            higher = waiting & (height(trial) + size * tilt >= before)
            reached = torch.where(higher.unsqueeze(-1), trial, reached)
            waiting = waiting & ~higher
            if not bool(waiting.any()):
                break
    return unpack(reached, shapes), complete


def information(mechanism: Mechanism, raw: Mapping[str, Tensor], value: Tensor, parents: Params) -> Tensor:
    """Mean products (P, P) of the scores of rows (N, width) at raw parameters (1, ...): each row is a replica."""
    shapes = {name: tuple(own.shape[1:]) for name, own in raw.items()}
    with torch.enable_grad():
        leaf = pack(dict(raw)).detach().repeat(len(value), 1).requires_grad_(True)
        params = mechanism.natural(unpack(leaf, shapes))
        each = {name: own.unsqueeze(1) for name, own in parents.items()}
        (scores,) = torch.autograd.grad(mechanism.log_prob(params, value.unsqueeze(1), each).sum(), leaf)
    return scores.T @ scores / len(value)


def _newton_direction(
    slope: Tensor, curvature: Tensor, thinned: bool, whole: float = 1e-9, sampled: float = 2e-3
) -> Tensor:
    """The slope (R, P) over the size of the curvature (R, P, P) in each direction.

    Relative to the largest, no curvature counts as smaller than ``whole``; where a sample that lacks some rows tells
    it, what it does not show is no rarer than ``sampled``.
    """
    values, vectors = torch.linalg.eigh(-curvature.nan_to_num())
    flattest = (sampled if thinned else whole) * values.abs().amax(-1, keepdim=True)
    bend = values.abs().maximum(flattest).clamp(min=1e-30)
    return (vectors @ ((vectors.mT @ slope.unsqueeze(-1)) / bend.unsqueeze(-1))).squeeze(-1)


def _curved(height: Callable[[Tensor], Tensor], leaf: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A height (R,), its gradient (R, P) and its second derivative (R, P, P) at ``leaf`` (R, P).

    A single point stands P times on the replica axis, so that one pass gives all rows of the second derivative.
    """
    many = leaf.shape[1]
    copies = leaf if len(leaf) > 1 else leaf.detach().repeat(many, 1).requires_grad_(True)
    before = height(copies)
    (own,) = torch.autograd.grad(before.sum(), copies, create_graph=True)
    if len(leaf) > 1:
        rows = [torch.autograd.grad(one.sum(), copies, retain_graph=True)[0] for one in own.unbind(-1)]
        return before.detach(), own.detach(), torch.stack(rows, 1)
    (second,) = torch.autograd.grad(own.trace(), copies)
    return before[:1].detach(), own[:1].detach(), second.unsqueeze(0)
