r"""Both sides of Theorem 1 at the parameters of a model, on rows and points of the model.

The left side is the transport cost between rows and points :math:`\psi(w_j)`, where :math:`w` is all noise and every
listed category. On the right side a backward map draws :math:`\phi(x_i)`, noise included, for every row; what it
rebuilds may cost, and what it draws must look like the model's own:

.. math:: \min_\phi \frac1n \sum_i c\big(x_i, \psi(\phi(x_i))\big) + \eta\, W_2^2\big(\phi_\# P_n, P(w)\big)
          = \min_\pi \sum_{ij} \pi_{ij} \min_w \big[ c(x_i, \psi(w)) + \eta\, |w - w_j|^2 \big].

The map is free, one point for each row and each of the model's that it is coupled with, so that the minimum over maps
is a transport problem again, whose cost is found pair by pair. It rises with :math:`\eta` to the left side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from otpdag.costs import FunctionCost, SquaredEuclidean
from otpdag.data import Batch
from otpdag.divergences import Wasserstein
from otpdag.errors import check_numbers
from otpdag.matching.model_points import ModelPoints, lay_out
from otpdag.matching.transport_cost import Columns
from otpdag.noise import normal_score
from otpdag.settings import Direct
from otpdag.structure import Naturals, Structure


def both_sides(
    structure: Structure, naturals: Naturals, batch: Batch, etas: Sequence[float], seed: int, points: int
) -> pd.DataFrame:
    """A row for each eta: the direct side, what the backward side is made of, and the gap relative to the cost.

    Rows are complete; costs are squared distances in units of the columns' spreads.
    """
    columns = Columns.of(structure, batch)
    rows = columns.of_values(batch.values)[0]
    own = lay_out(structure, batch, Direct(points=points), seed).placed_at(naturals)
    with torch.no_grad():
        values, log_weight = own.at(naturals)
        weight, made = torch.softmax(log_weight, -1), columns.of_values(values)
    share = batch.weight / batch.weight.sum()
    direct = float(Wasserstein()(rows[None], made, share, weight)[0])
    noise = _all_noise(own)
    told = []
    etas = np.atleast_1d(np.asarray(etas, dtype=object)).tolist()
    check_numbers("etas", etas, 0.0)
    for eta in map(float, etas):
        rebuilt, apart = _pairs(own, naturals, columns, rows, noise, eta)
        plan = Wasserstein(cost=_looked_up(rebuilt + eta * apart))
        left, right = (torch.arange(size, dtype=torch.float64)[None, :, None] for size in rebuilt.shape)
        backward = float(plan(left, right, share, weight)[0])
        told.append((eta, direct, backward, (direct - backward) / direct))
    return pd.DataFrame(told, columns=["eta", "direct", "backward", "gap"]).set_index("eta")


def _looked_up(costs: Tensor) -> FunctionCost:
    """Costs (N, M) of points that are numbers of rows and columns."""
    return FunctionCost(lambda x, y: costs[x[..., 0].long(), y[..., 0].long()])


def _all_noise(points: ModelPoints) -> Tensor:
    """All noise of the points (M, D), as normal scores."""
    kinds = points.structure.mechanisms
    return torch.cat([normal_score(kinds[n].noise, value)[0] for n, value in points.noise.items()], -1)


def _pairs(
    points: ModelPoints, naturals: Naturals, columns: Columns, rows: Tensor, noise: Tensor, eta: float, steps: int = 60
) -> tuple[Tensor, Tensor]:
    """For every row and point (N, M): what rebuilding costs at the best noise near the point's, and how far that is.

    By L-BFGS on all pairs at once, from the point's own noise, where nothing is moved; categories stay the point's.
    """
    many, size = len(rows), points.size
    target = noise.repeat(many, 1)
    fixed = (points.listed, points.given, points.drawn)
    listed, given, drawn = ({node: value.repeat(1, many, 1) for node, value in one.items()} for one in fixed)
    wide = replace(points, size=many * size, listed=listed, given=given, drawn=drawn, log_drawn=None, first_weight=None)

    def terms(moved: Tensor) -> tuple[Tensor, Tensor]:
        pieces = dict(zip(points.noise, moved.split([v.shape[-1] for v in points.noise.values()], -1), strict=True))
        kinds = points.structure.mechanisms
        shown = {n: torch.special.ndtr(v) if kinds[n].noise.kind == "uniform" else v for n, v in pieces.items()}
        values, _ = replace(wide, noise={n: v[None] for n, v in shown.items()}).at(naturals)
        made = columns.of_values(values)[0]
        cost = SquaredEuclidean().between(rows.repeat_interleave(size, 0), made)
        return cost, (moved - target).square().sum(-1)

    moved = target.clone().requires_grad_(True)
    optimiser = torch.optim.LBFGS([moved], max_iter=steps, history_size=8, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        cost, apart = terms(moved)
        total = (cost + eta * apart).sum()
        total.backward()
        return total

    if noise.shape[1]:
        optimiser.step(closure)
    with torch.no_grad():
        first, best = terms(target), terms(moved)
        lower = best[0] + eta * best[1] < first[0]
        return tuple(torch.where(lower, b, f).reshape(many, size) for b, f in zip(best, first, strict=True))  # type: ignore[return-value]
