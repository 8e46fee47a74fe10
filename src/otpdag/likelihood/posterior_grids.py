r"""Points for unknown numbers, placed where their posterior is.

In noise space the prior of unknown numbers is standard normal, and the posterior in one row (given one joint state of
the enumerated nodes) mostly close to some normal distribution. One number is summed on an even grid around it. Several
are drawn from the normal distribution that has the posterior's mode and curvature, then from the one that has its mean
and covariance, and weighted by :math:`P(u) / q(u)`, which is exact where the posterior is normal. The points stay where
they are while parameters move, and are placed anew now and then (adaptive quadrature, Pinheiro & Bates 1995). Nothing
is learned that could come to fit the points themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from otpdag.likelihood.enumeration import RowGroup, evaluate
from otpdag.mechanisms.base import Noise
from otpdag.structure import Naturals, Structure

GRID_ROUNDS = 5  # in which a grid closes in on a posterior: each can narrow it to a fifth
WIDEST = 7.0  # half a grid, in standard deviations of the noise: beyond lies 1e-12 of it
NEWTON_STEPS = 8  # to the mode of a posterior; digits double in each
LONGEST_STEP = 3.0  # of these, in standard deviations of the noise: further, the curvature says nothing
DIFFERENCE = 1e-4  # by which slopes are differenced: errors of step and of rounding are about 1e-8 both
CURVATURES = (0.2, 1e12)  # at the mode; the prior's is one, and a posterior hardly ever wider than twice the prior


def adapted(structure: Structure, naturals: Naturals, group: RowGroup, *, reach: float | None = None) -> RowGroup:
    """Place the points of unknown numbers where their posterior is, in each row and for each enumerated state.

    Args:
        structure: Graph and mechanisms.
        naturals: Parameters (R, ...) at which the posterior is taken; the points then serve these R replicas.
        group: Rows with their points; returned as they are if no number is unknown, or all are integrated exactly.
        reach: Half the width of the grid of one number, in posterior standard deviations. By default as far as keeps
            the points less than one apart: the sum is then exact to many digits, and stays so while parameters move.
    """
    if not group.noise or group.quadratic:
        return group
    with torch.no_grad():
        if group.grid is not None:
            return _adapted_grid(structure, naturals, group, reach)
        return _adapted_cloud(structure, naturals, group)


# -- one number -------------------------------------------------------------------------------------------------------


def _adapted_grid(structure: Structure, naturals: Naturals, group: RowGroup, reach: float | None) -> RowGroup:
    points = group.copies
    reach = 0.4 * (points - 1) if reach is None else reach
    unit = torch.linspace(-1.0, 1.0, points, dtype=torch.float64).to(group.log_weight)
    for _ in range(GRID_ROUNDS):
        grid = _present(group.grid)
        here = evaluate(structure, naturals, group)
        joint = (here.log_prior + here.log_likelihood).expand(-1, len(group.rows), -1)
        share = torch.softmax(joint.unflatten(-1, (-1, points)), -1).nan_to_num(1 / points)
        centre = (share * grid).sum(-1, keepdim=True)
        spread = (share * (grid - centre) ** 2).sum(-1, keepdim=True).sqrt()
        step = grid[..., 1:2] - grid[..., :1]
        half = torch.maximum((reach * spread).clamp(max=WIDEST), 3 * step)
        group = _on_grid(structure, group, centre + half * unit)
        if bool((step <= spread).all()):
            break
    return group


def _on_grid(structure: Structure, group: RowGroup, grid: Tensor) -> RowGroup:
    """The same group with other points (R, n, T, D) of its number."""
    log_step = torch.log(grid[..., 1:2] - grid[..., :1])
    log_weight = log_step - 0.5 * grid**2 - 0.5 * math.log(2 * math.pi) + sum(group.log_stride.values())
    noise = _as_noise(_kinds(structure, group), grid.flatten(2).unsqueeze(-1))
    return replace(group, noise=noise, log_weight=log_weight.flatten(2), grid=grid)


# -- several numbers --------------------------------------------------------------------------------------------------


def _adapted_cloud(structure: Structure, naturals: Naturals, group: RowGroup) -> RowGroup:
    kinds = _kinds(structure, group)
    one_point = _one_point(group)

    def joint(u: Tensor) -> Tensor:
        """Log-density of a row and its numbers' noise u (R, n, T, dim): (R, n, T)."""
        at = evaluate(structure, naturals, replace(one_point, noise=_as_noise(kinds, u)))
        return (at.log_prior + at.log_likelihood).expand(u.shape[:-1]) - 0.5 * u.square().sum(-1)

    replicas = max((len(value) for params in naturals.values() for value in params.values()), default=1)
    dim = sum(prior.dim for prior in kinds.values())
    start = group.log_weight.new_zeros(replicas, len(group.rows), one_point.points, dim)
    centre, vectors, curvature = _mode(joint, start)
    cloud = _on_cloud(kinds, one_point, centre, vectors, curvature.rsqrt())
    return _matched(structure, naturals, kinds, one_point, cloud, (centre, vectors, curvature.rsqrt()))


def _one_point(group: RowGroup) -> RowGroup:
    """The group with a single point for each joint state of its enumerated nodes."""
    states = {node: value.unflatten(2, (-1, group.copies))[:, :, :, 0] for node, value in group.states.items()}
    log_weight = group.log_weight.new_full((1, 1, group.points // group.copies), sum(group.log_stride.values()))
    return replace(group, states=states, log_weight=log_weight, copies=1)


def _mode(joint: Callable[[Tensor], Tensor], u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Newton's method in every row at once: the mode, and eigenvectors and eigenvalues of the curvature there."""
    value, slope = _value_and_slope(joint, u)
    vectors, curvature = _curvature(joint, u, slope)
    for _ in range(NEWTON_STEPS):
        step = (vectors @ ((vectors.mT @ slope.unsqueeze(-1)) / curvature.unsqueeze(-1))).squeeze(-1)
        step = step * (LONGEST_STEP / step.norm(dim=-1, keepdim=True).clamp(min=LONGEST_STEP))
        moved, waiting = u, torch.ones_like(value, dtype=torch.bool)
        for size in (1.0, 0.3, 0.03):
            higher = waiting & (joint(u + size * step) > value)
            moved = torch.where(higher.unsqueeze(-1), u + size * step, moved)
            waiting = waiting & ~higher
            if not bool(waiting.any()):
                break
        change = (moved - u).abs().amax(-1) * curvature.amax(-1).sqrt()
        u = moved
        value, slope = _value_and_slope(joint, u)
        vectors, curvature = _curvature(joint, u, slope)
        if bool((change < 0.05).all()):
            break
    return u, vectors, curvature


def _value_and_slope(joint: Callable[[Tensor], Tensor], u: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = u.detach().requires_grad_(True)
        value = joint(leaf)
        # a state that a row rules out has no density, and no slope
        (slope,) = torch.autograd.grad(torch.where(torch.isfinite(value), value, 0.0).sum(), leaf)
    return value.detach(), slope.nan_to_num(0.0, 0.0, 0.0)


def _curvature(joint: Callable[[Tensor], Tensor], u: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvectors and eigenvalues of the negative Hessian, from differences of the slope."""
    columns = []
    for axis in range(u.shape[-1]):
        shifted = u.clone()
        shifted[..., axis] += DIFFERENCE
        columns.append((slope - _value_and_slope(joint, shifted)[1]) / DIFFERENCE)
    hessian = torch.stack(columns, -1)
    values, vectors = torch.linalg.eigh(0.5 * (hessian + hessian.mT))
    return vectors, values.clamp(*CURVATURES)


def _matched(
    structure: Structure,
    naturals: Naturals,
    kinds: Mapping[str, Noise],
    one_point: RowGroup,
    cloud: RowGroup,
    first: tuple[Tensor, Tensor, Tensor],
) -> RowGroup:
    """Place the points once more, by the mean and covariance of the weighted ones, where enough of them count."""
    points = evaluate(structure, naturals, cloud)
    joint = (points.log_prior + points.log_likelihood).unflatten(-1, (-1, cloud.copies))
    share = torch.softmax(joint, -1).nan_to_num(1 / cloud.copies)
    u = _positions(_present(cloud.base), *first)
    mean = (share.unsqueeze(-1) * u).sum(-2)
    gap = u - mean.unsqueeze(-2)
    covariance = (share.unsqueeze(-1) * gap).mT @ gap
    values, vectors = torch.linalg.eigh(covariance)
    enough = (1 / share.square().sum(-1) > cloud.copies / 4).unsqueeze(-1)
    centre = torch.where(enough, mean, first[0])
    vectors = torch.where(enough.unsqueeze(-1), vectors, first[1])
    spread = torch.where(enough, values.clamp(1 / CURVATURES[1], 1 / CURVATURES[0]).sqrt(), first[2])
    return _on_cloud(kinds, one_point, centre, vectors, spread)


def _on_cloud(
    kinds: Mapping[str, Noise], one_point: RowGroup, centre: Tensor, vectors: Tensor, spread: Tensor
) -> RowGroup:
    """Points of the normal distributions with these centres (R, n, T, dim), axes and spreads, weighted by the prior."""
    base = _present(one_point.base)
    u = _positions(base, centre, vectors, spread)
    copies = base.shape[-2]
    log_ratio = 0.5 * (base.square().sum(-1).unsqueeze(2) - u.square().sum(-1))
    log_weight = log_ratio + torch.log(spread).sum(-1, keepdim=True) - math.log(copies)
    return replace(
        one_point,
        states={node: value.repeat_interleave(copies, 2) for node, value in one_point.states.items()},
        noise=_as_noise(kinds, u.flatten(2, 3)),
        log_weight=log_weight.flatten(2) + sum(one_point.log_stride.values()),
        copies=copies,
    )


def _positions(base: Tensor, centre: Tensor, vectors: Tensor, spread: Tensor) -> Tensor:
    """Standard normal points (1, n, K, dim), moved: (R, n, T, K, dim)."""
    return centre.unsqueeze(-2) + base.unsqueeze(2) @ (vectors * spread.unsqueeze(-2)).mT


# -- noise ------------------------------------------------------------------------------------------------------------


def _kinds(structure: Structure, group: RowGroup) -> dict[str, Noise]:
    return {node: structure.mechanisms[node].noise for node in group.noise}


def _as_noise(kinds: Mapping[str, Noise], u: Tensor) -> dict[str, Tensor]:
    """Normal variables side by side (R, n, S, dim) as the noise of each node."""
    pieces = u.split([prior.dim for prior in kinds.values()], -1)
    return {
        node: piece if prior.kind == "normal" else torch.special.ndtr(piece)
        for (node, prior), piece in zip(kinds.items(), pieces, strict=True)
    }


def _present(value: Tensor | None) -> Tensor:
    if value is None:
        raise RuntimeError("a group of unknown numbers has a grid or a base of points")
    return value
