r"""Rows of a linear normal table, read once for their moments: a step costs the same whatever their number.

Rows that show the same cells are told by their second moments about a centre. Nodes are structural equations, read
through the covariance that they imply: no Python for each node.

With the levels a, slopes B and scales s of all numbers, :math:`x = a + B x + s u`, so that

.. math:: T = (I - B)^{-1}, \qquad m = T a, \qquad \Sigma = T \,\mathrm{diag}(s^2)\, T^\top .

Rows that show the same cells are draws of a normal vector with the mean and covariance of these. Let W be the inverse
of that covariance, zero at cells that are not shown, and E the mean of :math:`(x - m)(x - m)^\top`. An entry i of a, B
or s in the equation of number k moves the mean by :math:`\mu_i T e_k`, and the covariance by
:math:`T e_k v_i^\top + v_i e_k^\top T^\top`, where v is a column of :math:`\Sigma` for a slope, one of T times its
scale for a scale, and zero for a level. Gradient and expected information are entries of a few products,

.. math:: g_i &= e_k^\top T^\top (W - W E W)\, v_i - \mu_i\, e_k^\top T^\top W (\bar x - m), \\
          I_{ij} &= (T^\top W T)_{kk'} (v_i^\top W v_j + \mu_i \mu_j) + (T^\top W v_j)_k (T^\top W v_i)_{k'} ,

and steps of :math:`I^{-1} g`, Fisher's scoring, need a handful where descent needs dozens (Lee and Jennrich 1979).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.data import Batch
from otpdag.data.batch import ROWS_AT_ONCE, distinct_rows
from otpdag.mechanisms import Normal
from otpdag.mechanisms.parameters import POSITIVE, REAL, Fixed, Floored
from otpdag.numerics import Array, Flags, Ints, cholesky
from otpdag.problem import LayOut, LossTerms, SummedRows, Updates, curvature, with_gradient
from otpdag.structure import Shapes, Structure, parameter_places

Codes: TypeAlias = NDArray[np.int64]

# entries of the information of all groups of rows, beyond which steps by gradients alone cost less
MOST_SCORED = 4_000_000

AT_ONCE = 1_000_000  # entries of moments that are held at a time where gradients are differenced

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


# -- moments of rows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RowGroups:
    """Rows that show the same numbers.

    Attributes:
        cells: Node and coordinate of each number.
        members: The rows of each group.
        shown: Which numbers each group shows (G, D).
    """

    cells: tuple[tuple[str, int], ...]
    members: tuple[slice | Ints, ...]
    shown: Flags

    @classmethod
    def of(cls, batch: Batch, widths: Mapping[str, int]) -> RowGroups:
        """Of nodes of so many coordinates each; hidden ones are never shown."""
        cells = tuple((node, cell) for node, width in widths.items() for cell in range(width))
        masks = {id(batch.mask[node]): batch.mask[node] for node in widths if node in batch.mask}  # some are shared
        gaps = [mask for mask in masks.values() if not bool(mask.all())]
        members: tuple[slice | Ints, ...] = (slice(None),)
        if gaps:
            code, many = distinct_rows(gaps)
            members = tuple(np.split(np.argsort(code, kind="stable"), np.bincount(code, minlength=many).cumsum()[:-1]))
        first = [0 if isinstance(rows, slice) else int(rows[0]) for rows in members]
        shown = [_seen(batch, node, cell)[first] for node, cell in cells]
        return cls(cells, members, np.stack(shown, -1))

    def second_moments(self, batch: Batch, shift: Array) -> Array:
        """Of the numbers less their shift (D,), zero where not shown, and of a one (1 or R, G, D + 1, D + 1)."""
        weight, size = batch.weight.numpy(), len(self.cells) + 1
        total = np.zeros((len(weight), len(self.members), size, size))
        for number, (rows, shown) in enumerate(zip(self.members, self.shown, strict=True)):
            seen = np.flatnonzero(shown)
            columns = [batch.values[node][0, :, cell].numpy()[rows] for node, cell in (self.cells[at] for at in seen)]
            own, place = weight[:, rows], np.ix_([*seen, size - 1], [*seen, size - 1])
            for begin in range(0, own.shape[1], ROWS_AT_ONCE):
                each = own[:, begin : begin + ROWS_AT_ONCE]
                lifted = np.ones((len(seen) + 1, each.shape[1]))
                for one, column, at in zip(lifted, columns, shift[seen], strict=False):
                    np.subtract(column[begin : begin + ROWS_AT_ONCE], at, out=one)
                for replica, share in enumerate(each):
                    total[replica, number][place] += (lifted * share) @ lifted.T
        return total


def _seen(batch: Batch, node: str, cell: int) -> Flags:
    """In which rows a cell is seen (N,)."""
    if node not in batch.mask:
        return np.zeros(batch.rows, dtype=bool)
    return batch.mask[node][0, :, min(cell, batch.mask[node].shape[-1] - 1)].numpy()


def _centre_of(structure: Structure, batch: Batch, node: str, cell: int) -> float:
    """About the mean of what is seen of a column, zero of one that never is: moments about it lose no digits.

    It is the centre of the column's units where there are some, which do not depend on the order of rows.
    """
    mechanism = structure.mechanisms[node]
    if node not in batch.values:
        return 0.0
    if isinstance(mechanism, Normal) and mechanism.predictor.units is not None:
        return float(mechanism.predictor.units.out_shift[cell])
    seen = _seen(batch, node, cell)
    return float(batch.values[node][0, :, cell].numpy()[seen].mean()) if seen.any() else 0.0


# -- structural equations ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """The loss of a row (R,), its gradient (R, P) and its expected information (R, P, P).

    Both are taken in ``plain`` parameters (R, P), which are no logarithms any more; ``slope`` (R, P) is how fast these
    change with raw ones.
    """

    loss: Array
    gradient: Array
    information: Array
    plain: Array
    slope: Array

    def direction(self, free: Flags, damping: float = 0.3, ridge: float = 1e-12) -> Array:
        r"""Scoring of the parameters that are free to move, damped: :math:`-(I + c |g|)^{-1} g` (R, P).

        The longest step is three spreads of a column, and where parents are collinear a ridge makes up for the inverse
        that the information lacks. No step is longer than 1 / c in the units of the data, also along directions that
        the data do not tell; and the damping vanishes so fast that the last steps are not shorter (Fan and Yuan 2005).
        """
        gradient = np.where(free, self.gradient, 0.0)
        damped = damping * np.sqrt((gradient**2).sum(-1))[:, None, None]
        eye = np.eye(free.shape[-1])
        information = np.where(free[..., None] & free[:, None], self.information, eye)
        damped = damped + ridge * (1 + np.abs(information).max((-1, -2), keepdims=True))
        return -np.linalg.solve(information + damped * eye, gradient[..., None])[..., 0]


@dataclass(frozen=True, eq=False)
class NormalFit:
    """What a normal vector says of rows in groups, each of which shows some of its cells.

    Attributes:
        inverse: That of the covariance of the cells that are shown, zero elsewhere (R, G, D, D).
        missed: The mean of what is shown less the model's (R, G, D, 1).
        around: The mean of squares and products around the model's mean (R, G, D, D).
        loss: Of a row (R, G).
    """

    inverse: Array
    missed: Array
    around: Array
    loss: Array

    @classmethod
    def of(cls, mean: Array, covariance: Array, second: Array, shown: Flags) -> NormalFit:
        """From a mean (R, 1, D, 1) and covariance (R, 1, D, D), and second moments (1 or R, G, D + 1, D + 1)."""
        both = shown[..., None] & shown[:, None]
        factor = _cholesky(np.where(both, covariance, np.eye(shown.shape[-1])))
        upper = np.linalg.inv(factor)
        inverse = (upper.swapaxes(-1, -2) @ upper) * both
        average = second / np.maximum(second[..., -1:, -1:], 1e-300)
        missed = average[..., :-1, -1:] - mean
        crossed = average[..., :-1, -1:] @ mean.swapaxes(-1, -2)
        around = average[..., :-1, :-1] - crossed - crossed.swapaxes(-1, -2) + mean @ mean.swapaxes(-1, -2)
        half_log_determinant = np.log(np.diagonal(factor, axis1=-2, axis2=-1)).sum(-1)
        loss = half_log_determinant + 0.5 * (inverse * around).sum((-1, -2)) + HALF_LOG_2PI * shown.sum(-1)
        return cls(inverse, missed, around, loss)


@dataclass(frozen=True, eq=False)
class _Implied:
    """What the equations imply, all numbers less their shift, and what rows say of it.

    Attributes:
        effects: T (R, 1, D, D).
        scaled: T times the scales of the noise (R, 1, D, D).
        mean: Of the numbers (R, 1, D, 1).
        covariance: Of the numbers (R, 1, D, D).
        fit: To each group of rows.
    """

    effects: Array
    scaled: Array
    mean: Array
    covariance: Array
    fit: NormalFit

    @cached_property
    def reach(self) -> Array:
        """T' W (R, G, D, D)."""
        return self.effects.swapaxes(-1, -2) @ self.fit.inverse

    @cached_property
    def columns(self) -> Array:
        """By which the covariance moves: itself, scaled effects and zero (R, 1, D, 2 D + 1)."""
        return np.concatenate([self.covariance, self.scaled, np.zeros_like(self.mean)], -1)


@dataclass(frozen=True, eq=False)
class StructuralEquations:
    """Where the entries of the equations come from and where they stand, and the moments of rows.

    Attributes:
        is_positive: Which raw parameters (P,) are logarithms.
        floor: The root of whose square and that of their exponential is the parameter (P,).
        origin: The entries (E,) where all parameters are zero.
        by_parameter: How they change with parameters that are no logarithms any more (E, P).
        place: Where they stand among all slopes, levels and scales (E,).
        row: In which number's equation (E,).
        moved_by: Which column of covariance, scaled effects and zero moves the covariance with an entry (E,).
        times: Which of the means, one and zero multiplies the move of a mean (E,).
        centre: Where the level is taken that stays when a slope changes (E,).
        shift: What was subtracted from numbers before moments were taken (D,).
        shown: Which numbers each group of rows shows (G, D).
        second: Second moments of the numbers and a one in each group (1 or R, G, D + 1, D + 1).
        sliver: Of a parameter at its floor, by which it stays above.
    """

    is_positive: Flags
    floor: Array
    origin: Array
    by_parameter: Array
    place: Codes
    row: Codes
    moved_by: Codes
    times: Codes
    centre: Array
    shift: Array
    shown: Flags
    second: Array

    def loss(self, point: Array) -> Array:
        """The loss of a row (R,) at ``point`` (R, P)."""
        return (self._share * self._implied(self._off_logarithm(point)).fit.loss).sum(-1)

    def loss_and_gradient(self, point: Array) -> tuple[Array, Array]:
        """The loss of a row (R,), and its gradient in raw parameters (R, P)."""
        plain = self._off_logarithm(point)
        gradient = self._gradient(self._implied(plain)) @ self.by_parameter
        return self.loss(point), gradient * self._slope_of_logarithm(plain)

    def moments(self, point: Array) -> tuple[Array, Array]:
        """The mean (D,) and covariance (D, D) of all numbers that are implied at ``point`` (1, P)."""
        implied = self._implied(self._off_logarithm(point))
        return implied.mean[0, 0, :, 0] + self.shift, implied.covariance[0, 0]

    def scored(self, point: Array) -> Scored:
        """Loss, gradient and expected information of a row."""
        plain = self._off_logarithm(point)
        implied, share = self._implied(plain), self._share
        columns, times = implied.columns, self._times(implied)
        row, other = self.row[:, None], self.moved_by[:, None]
        products = (columns.swapaxes(-1, -2) @ implied.fit.inverse @ columns)[..., other, self.moved_by]
        products += times[..., None] * times[..., None, :]
        products *= (implied.reach @ implied.effects)[..., row, self.row]
        crossed = (implied.reach @ columns)[..., row, self.moved_by]
        products += crossed * crossed.swapaxes(-1, -2)
        information = self.by_parameter.T @ (share[..., None, None] * products).sum(1) @ self.by_parameter
        loss, gradient = (share * implied.fit.loss).sum(-1), self._gradient(implied) @ self.by_parameter
        return Scored(loss, gradient, information, plain, self._slope_of_logarithm(plain))

    sliver: ClassVar[float] = 1e-6

    def improved(self, scored: Scored, halvings: int = 10, rounding: float = 1e-13) -> Array:
        """A point (R, P) with a lower loss than the one that was scored; the same one where there is none near.

        A step that raises the loss by more than ``rounding`` is halved, and after so many ``halvings`` not taken.

        Scales move in their own units, at most by half or to the double, and not below their floors; those that rest
        there, and would go further, take no part.
        """
        resting = self.is_positive & (scored.plain <= (1 + 2 * self.sliver) * self.floor) & (scored.gradient > 0)
        step = scored.direction(~resting)
        same = rounding * (1 + np.abs(scored.loss))
        point = self._on_logarithm(scored.plain)
        worse = -(scored.gradient * step).sum(-1) > same
        moved = self._moved(scored.plain, step)
        for _ in range(halvings):
            if not worse.any():
                break
            worse &= ~(self.loss(moved) <= scored.loss + same)
            step[worse] *= 0.5
            moved = np.where(worse[:, None], self._moved(scored.plain, step), moved)
        return np.where(worse[:, None], point, moved)

    def _moved(self, plain: Array, step: Array) -> Array:
        lowest = np.maximum(0.5 * plain, (1 + self.sliver) * self.floor)
        bounded = np.minimum(np.maximum(plain + step, lowest), 2 * plain)
        return self._on_logarithm(np.where(self.is_positive, bounded, plain + step))

    def _on_logarithm(self, plain: Array) -> Array:
        """Invert :meth:`_off_logarithm`; what lies at the floor comes back a sliver above it."""
        above = np.maximum(plain**2 - self.floor**2, self.sliver * plain**2)
        return np.where(self.is_positive, 0.5 * np.log(np.maximum(above, 1e-300)), plain)

    def _off_logarithm(self, point: Array) -> Array:
        most = POSITIVE.most_logarithm
        logarithm = np.minimum(np.maximum(point, -most), most)
        return np.where(self.is_positive, np.sqrt(np.exp(2 * logarithm) + self.floor**2), point)

    def _slope_of_logarithm(self, plain: Array) -> Array:
        return np.where(self.is_positive, plain - self.floor**2 / np.where(self.is_positive, plain, 1.0), 1.0)

    @cached_property
    def _share(self) -> Array:
        """Of each group among all rows (1 or R, G)."""
        count = self.second[..., -1, -1]
        return count / count.sum(-1, keepdims=True)

    @cached_property
    def _centres(self) -> Array:
        """The centre of each slope, in the place of the slope (D, D)."""
        size, is_slope = len(self.shift), self.place < len(self.shift) ** 2
        centres = np.zeros(size * size)
        centres[self.place[is_slope]] = self.centre[is_slope]
        return centres.reshape(size, size)

    def _times(self, implied: _Implied) -> Array:
        """What multiplies the move of a mean with each entry (R, 1, E)."""
        means = implied.mean[..., 0] + self.shift
        one = np.ones_like(means[..., :1])
        return np.concatenate([means, one, 0 * one], -1)[..., self.times] - self.centre

    def _gradient(self, implied: _Implied) -> Array:
        """That of the loss of a row, by entries (R, E)."""
        fit, reach, share = implied.fit, implied.reach, self._share[..., None, None]
        pull = (share * (reach - reach @ fit.around @ fit.inverse)).sum(1) @ implied.columns[:, 0]
        drift = (share * (reach @ fit.missed)).sum(1)
        return pull[..., self.row, self.moved_by] - self._times(implied)[:, 0] * drift[:, self.row, 0]

    @cached_property
    def _last(self) -> list[tuple[Array, _Implied]]:
        """Where equations were last evaluated, and what they implied: a step is tried, and begins the next one."""
        return []

    def _implied(self, plain: Array) -> _Implied:
        """What the model says at these parameters, computed once where it is asked for twice in a row."""
        if not self._last or not np.array_equal(self._last[0][0], plain):
            self._last[:] = [(plain, self._evaluated(plain))]
        return self._last[0][1]

    def _evaluated(self, plain: Array) -> _Implied:
        size = len(self.shift)
        everything = np.zeros((len(plain), 1, size * (size + 2)))
        everything[:, 0, self.place] = self.origin + plain @ self.by_parameter.T
        slopes = everything[..., : size * size].reshape(-1, 1, size, size)
        level, scale = everything[..., size * size : -size, None], everything[..., None, -size:]
        ahead = np.eye(size) - slopes
        effects = np.asarray(np.linalg.inv(ahead), dtype=np.float64)
        level = level - (slopes * self._centres).sum(-1, keepdims=True)
        mean = effects @ (level - ahead @ self.shift[:, None])
        scaled = effects * scale
        covariance = scaled @ scaled.swapaxes(-1, -2)
        fit = NormalFit.of(mean, covariance, self.second, self.shown)
        return _Implied(effects, scaled, mean, covariance, fit)


def _cholesky(matrices: Array) -> Array:
    """Lower factors; not numbers where a matrix is not positive."""
    try:
        return np.asarray(np.linalg.cholesky(matrices), dtype=np.float64)
    except np.linalg.LinAlgError:
        return cholesky(torch.from_numpy(matrices)).numpy()


def structural_equations(
    structure: Structure, shapes: Shapes, cells: Sequence[tuple[str, int]], shift: Array, shown: Flags, second: Array
) -> StructuralEquations:
    """Write normal nodes down as equations of their numbers, the ``cells`` of nodes, where moments have these.

    ``shapes`` are those of all parameters of a flat point, in their order.
    """
    number = {cell: at for at, cell in enumerate(cells)}
    at = {key: place.numpy() for key, place in parameter_places(shapes).items()}
    total = sum(place.size for place in at.values())
    is_positive, floor = np.zeros(total, dtype=bool), np.zeros(total)
    entries: list[tuple[NDArray[np.generic], ...]] = []
    first, begun = 0, dict[tuple[str, str], int]()
    for node, mechanism in structure.mechanisms.items():
        assert isinstance(mechanism, Normal), "the route is for normal nodes"
        own = np.array([number[node, cell] for cell in range(mechanism.dim)])
        above = [number[name, cell] for name, space in mechanism.family.continuous for cell in range(space.width)]
        for name, parameter in mechanism.declared().items():
            column = at[structure.keys[node][name]] if parameter.learned else np.full(parameter.shape, -1)
            if parameter.learned:
                is_positive[column] = parameter.support is not REAL
            if parameter.learned and isinstance(parameter.support, Floored):
                floor[column] = parameter.support.floor.numpy()
            origin, unit = (one.numpy() for one in parameter.origin_and_unit)
            if isinstance(parameter.setting, Fixed):
                given = parameter.constant(node, name).numpy()
                origin, unit = np.where(np.isnan(given), origin, given), np.where(np.isnan(given), unit, 0.0)
            column, origin, unit, cell = (one.ravel() for one in np.broadcast_arrays(column, origin, unit, own))
            begun[node, name], first = first, first + column.size
            above_each = np.repeat(above, len(own))
            entries.append((column, origin, unit, *_place(mechanism, name, cell, above_each, len(cells))))
    column, origin, unit, place, row, moved_by, times, centre = map(np.concatenate, zip(*entries, strict=True))
    by_parameter = unit[:, None] * (column[:, None] == np.arange(total))
    for pair in structure.equal:
        one, other = (begun[node, name] + within for node, name, within in pair)
        origin[one], by_parameter[one] = origin[other], by_parameter[other]
    return StructuralEquations(
        is_positive, floor, origin, by_parameter, place, row, moved_by, times, centre, shift, shown, second
    )


def _place(mechanism: Normal, name: str, cell: Codes, above: Codes, size: int) -> tuple[NDArray[np.generic], ...]:
    """Where slopes, levels or scales of some ``cell`` stand, and what they move: all but the first of its entries."""
    if name == "weight":
        centre = np.repeat(mechanism.predictor.centre.numpy(), mechanism.dim)
        return cell * size + above, cell, above, above, centre
    is_scale = name == "scale"
    moved_by = size + cell if is_scale else np.full_like(cell, 2 * size)
    return size * (size + is_scale) + cell, cell, moved_by, np.full_like(cell, size + is_scale), np.zeros(len(cell))


# -- the problem -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MomentProblem(SummedRows):
    """Moments of rows, and the rows themselves for whoever asks about single ones."""

    route: ClassVar[str] = "moments"

    groups: RowGroups
    equations: StructuralEquations

    def loss(self, point: Tensor) -> LossTerms:
        """The loss of a row: reported as reconstruction, since its parts are not told apart."""

        def evaluated(at: Tensor, slope: bool) -> tuple[Tensor, Tensor]:
            with np.errstate(all="ignore"):  # a loss that is not finite is refused by whoever asked
                if not slope:
                    return torch.from_numpy(self.equations.loss(at.numpy())), at
                loss, gradient = self.equations.loss_and_gradient(at.numpy())
            return torch.from_numpy(loss), torch.from_numpy(gradient)

        loss = with_gradient(evaluated, point)
        return LossTerms.of(loss, reconstruction=loss)

    @property
    def updates(self) -> Updates | None:
        """Scoring, which moves every parameter."""
        entries, parameters = self.equations.by_parameter.shape
        return Updates() if max(len(self.equations.shown) * entries**2, parameters**2) <= MOST_SCORED else None

    def update(self, point: Tensor) -> tuple[Tensor, LossTerms]:
        """A step of Fisher's scoring, as long as it lowers the loss, and the terms at ``point``."""
        with np.errstate(all="ignore"):  # a loss that is not finite is refused by whoever asked for the update
            scored = self.equations.scored(point.detach().numpy())
            moved = self.equations.improved(scored)
        loss = torch.from_numpy(scored.loss)
        return torch.from_numpy(moved), LossTerms.of(loss, reconstruction=loss)

    def curvature(self, point: Tensor) -> Tensor:
        """Differences of gradients, so many at a time as moments have room."""
        return curvature(self.loss, point, at_once=max(1, AT_ONCE // self.equations.second[0].size))

    def of_batch(self, batch: Batch, seed: int) -> MomentProblem:
        """Summed up anew."""
        return rows_as_moments(self.structure, batch, self.shapes, seed, self.in_rows)

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> Self:
        """These rows; or all of them instead of fewer, since more do not cost more."""
        return super().subset(rows) if isinstance(rows, Tensor) else self

    def reweighted(self, factors: Tensor) -> Self:
        """Moments of the same rows with other weights."""
        own = super().reweighted(factors)
        second = self.groups.second_moments(own.batch, self.equations.shift)
        return replace(own, equations=replace(self.equations, second=second))


def rows_as_moments(structure: Structure, batch: Batch, shapes: Shapes, seed: int, in_rows: LayOut) -> MomentProblem:
    """Sum rows up."""
    groups, shift, second = grouped_moments(structure, batch, structure.graph.nodes)
    equations = structural_equations(structure, shapes, groups.cells, shift, groups.shown, second)
    return MomentProblem(structure, batch, shapes, seed, in_rows, groups, equations)


def gap_groups(structure: Structure, batch: Batch, nodes: Sequence[str]) -> RowGroups:
    """Rows that show the same numbers of some nodes."""
    return RowGroups.of(batch, {node: structure.mechanisms[node].space.width for node in nodes})


def grouped_moments(structure: Structure, batch: Batch, nodes: Sequence[str]) -> tuple[RowGroups, Array, Array]:
    """These groups, a shift (D,), and second moments of the numbers less it (1 or R, G, D + 1, D + 1)."""
    groups = gap_groups(structure, batch, nodes)
    shift = np.array([_centre_of(structure, batch, node, cell) for node, cell in groups.cells])
    return groups, shift, groups.second_moments(batch, shift)
