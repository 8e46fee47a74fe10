r"""Linear normal nodes as structural equations, read through the covariance that they imply: no Python for each node.

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
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.likelihood.elimination.families import FamilyView
from otpdag.likelihood.m_step import Twins, find_twins
from otpdag.mechanisms import Normal
from otpdag.mechanisms.parameters import POSITIVE, REAL, Floored
from otpdag.structure import Structure, parameter_places

Array: TypeAlias = NDArray[np.float64]
Codes: TypeAlias = NDArray[np.int64]

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


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

    def direction(self, free: NDArray[np.bool_], damping: float = 0.3, ridge: float = 1e-12) -> Array:
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
class _Implied:
    """What the model says of each group of rows, and what it misses there.

    Attributes:
        effects: T (R, G, D, D).
        scaled: T times the scales of the noise (R, G, D, D).
        mean: Of the numbers less their shift (R, G, D, 1).
        covariance: Of all numbers (R, G, D, D).
        inverse: That of the cells that are shown, zero elsewhere (R, G, D, D).
        missed: The mean of what is shown less the model's (R, G, D, 1).
        around: The mean of squares and products around the model's mean (R, G, D, D).
        loss: Of a row (R, G).
    """

    effects: Array
    scaled: Array
    mean: Array
    covariance: Array
    inverse: Array
    missed: Array
    around: Array
    loss: Array


@dataclass(frozen=True, eq=False)
class StructuralEquations:
    """Where the entries of the equations come from and where they stand.

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
        active: In which groups of rows an entry counts (G, E).
        shown: Which numbers each group of rows shows (G, D).
        shift: What was subtracted from numbers before moments were taken (D,).
    """

    is_positive: NDArray[np.bool_]
    floor: Array
    origin: Array
    by_parameter: Array
    place: Codes
    row: Codes
    moved_by: Codes
    times: Codes
    centre: Array
    active: NDArray[np.bool_]
    shown: NDArray[np.bool_]
    shift: Array

    def loss(self, point: Array, second: Array) -> Array:
        """The loss of a row (R,) at ``point`` (R, P), from second moments (1 or R, G, D + 1, D + 1)."""
        return (_share(second) * self._implied(self._off_logarithm(point), second).loss).sum(-1)

    def gradient(self, point: Array, second: Array) -> Array:
        """That of the loss of a row, in raw parameters (R, P)."""
        plain = self._off_logarithm(point)
        moves = _Moves.of(self, self._implied(plain, second))
        return moves.gradient(self, _share(second)) @ self.by_parameter * self._slope_of_logarithm(plain)

    def scored(self, point: Array, second: Array) -> Scored:
        """Loss, gradient and expected information of a row."""
        plain = self._off_logarithm(point)
        implied, share = self._implied(plain, second), _share(second)
        effects, inverse = implied.effects, implied.inverse
        moves = _Moves.of(self, implied)
        reach, columns, times = moves.reach, moves.columns, moves.times

        row, other = self.row[:, None], self.moved_by[:, None]
        products = (columns.swapaxes(-1, -2) @ inverse @ columns)[..., other, self.moved_by]
        products += times[..., None] * times[..., None, :]
        products *= (reach @ effects)[..., row, self.row]
        crossed = (reach @ columns)[..., row, self.moved_by]
        products += crossed * crossed.swapaxes(-1, -2)
        if len(self.active) > 1:
            products *= self.active[..., None] & self.active[:, None]
        information = (share[..., None, None] * products).sum(1)

        information = self.by_parameter.T @ information @ self.by_parameter
        loss = (share * implied.loss).sum(-1)
        gradient = moves.gradient(self, share) @ self.by_parameter
        return Scored(loss, gradient, information, plain, self._slope_of_logarithm(plain))

    sliver: ClassVar[float] = 1e-6
    """Of a parameter at its floor, by which it stays above."""

    def improved(self, scored: Scored, second: Array, halvings: int = 10, rounding: float = 1e-13) -> Array:
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
            worse &= ~(self.loss(moved, second) <= scored.loss + same)
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

    @cached_property
    def _eye(self) -> Array:
        return np.eye(len(self.shift))

    @cached_property
    def _shown_together(self) -> NDArray[np.bool_]:
        return self.shown[..., None] & self.shown[:, None]

    @cached_property
    def centres(self) -> Array:
        """The centre of each slope, in the place of the slope (D, D)."""
        size, is_slope = len(self.shift), self.place < len(self.shift) ** 2
        centres = np.zeros(size * size)
        centres[self.place[is_slope]] = self.centre[is_slope]
        return centres.reshape(size, size)

    def _off_logarithm(self, point: Array) -> Array:
        most = POSITIVE.most_logarithm
        logarithm = np.minimum(np.maximum(point, -most), most)
        return np.where(self.is_positive, np.sqrt(np.exp(2 * logarithm) + self.floor**2), point)

    def _slope_of_logarithm(self, plain: Array) -> Array:
        return np.where(self.is_positive, plain - self.floor**2 / np.where(self.is_positive, plain, 1.0), 1.0)

    @cached_property
    def _last(self) -> list[tuple[Array, Array, _Implied]]:
        """Where equations were last evaluated, and what they implied: a step is tried, and begins the next one."""
        return []

    def _implied(self, plain: Array, second: Array) -> _Implied:
        """What the model says at these parameters, computed once where it is asked for twice in a row."""
        for at, of, known in self._last:
            if of is second and np.array_equal(at, plain):
                return known
        implied = self._evaluated(plain, second)
        self._last[:] = [(plain, second, implied)]
        return implied

    def _evaluated(self, plain: Array, second: Array) -> _Implied:
        size, eye = len(self.shift), self._eye
        entries = self.origin + plain @ self.by_parameter.T
        everything = np.zeros((len(plain), len(self.shown), size * (size + 2)))
        for group, active in enumerate(self.active):
            everything[:, group, self.place[active]] = entries[:, active]
        slopes = everything[..., : size * size].reshape(len(plain), -1, size, size)
        level, scale = everything[..., size * size : -size, None], everything[..., None, -size:]
        ahead = eye - slopes
        effects = np.asarray(np.linalg.inv(ahead), dtype=np.float64)
        level = level - (slopes * self.centres).sum(-1, keepdims=True)
        mean = effects @ (level - ahead @ self.shift[:, None])
        scaled = effects * scale
        covariance = scaled @ scaled.swapaxes(-1, -2)
        both = self._shown_together
        factor = _cholesky(np.where(both, covariance, eye))
        upper = np.linalg.inv(factor)
        inverse = (upper.swapaxes(-1, -2) @ upper) * both
        average = second / np.maximum(second[..., -1:, -1:], 1e-300)
        missed = average[..., :-1, -1:] - mean
        crossed = average[..., :-1, -1:] @ mean.swapaxes(-1, -2)
        around = average[..., :-1, :-1] - crossed - crossed.swapaxes(-1, -2) + mean @ mean.swapaxes(-1, -2)
        half_log_determinant = np.log(np.diagonal(factor, axis1=-2, axis2=-1)).sum(-1)
        loss = half_log_determinant + 0.5 * (inverse * around).sum((-1, -2)) + HALF_LOG_2PI * self.shown.sum(-1)
        return _Implied(effects, scaled, mean, covariance, inverse, missed, around, loss)


@dataclass(frozen=True, eq=False)
class _Moves:
    """How mean and covariance of each group move with the entries.

    Attributes:
        implied: What the model says there.
        reach: T' W (R, G, D, D).
        columns: Covariance, scaled effects and zero (R, G, D, 2 D + 1).
        times: What multiplies the move of a mean with each entry (R, G, E).
    """

    implied: _Implied
    reach: Array
    columns: Array
    times: Array

    @classmethod
    def of(cls, equations: StructuralEquations, implied: _Implied) -> _Moves:
        zero = np.zeros((*implied.effects.shape[:-1], 1))
        none = zero[..., 0, :]
        columns = np.concatenate([implied.covariance, implied.scaled, zero], -1)
        times = np.concatenate([implied.mean[..., 0] + equations.shift, none + 1, none], -1)
        reach = implied.effects.swapaxes(-1, -2) @ implied.inverse
        return cls(implied, reach, columns, times[..., equations.times] - equations.centre)

    def gradient(self, equations: StructuralEquations, share: Array) -> Array:
        """That of the loss of a row, by entries (R, E)."""
        reach, row = self.reach, equations.row
        pull = (reach - reach @ self.implied.around @ self.implied.inverse) @ self.columns
        drift = (reach @ self.implied.missed)[..., row, 0]
        counted = share[..., None] * equations.active
        return (counted * (pull[..., row, equations.moved_by] - self.times * drift)).sum(1)


def _cholesky(matrices: Array) -> Array:
    """Lower factors; not numbers where a matrix is not positive."""
    try:
        return np.asarray(np.linalg.cholesky(matrices), dtype=np.float64)
    except np.linalg.LinAlgError:
        factor, failed = torch.linalg.cholesky_ex(torch.from_numpy(matrices))
        return np.where((failed > 0)[..., None, None].numpy(), np.nan, factor.numpy())


def _share(second: Array) -> Array:
    """Of each group among all rows (1 or R, G)."""
    count = second[..., -1, -1]
    return count / count.sum(-1, keepdims=True)


@dataclass(frozen=True, eq=False)
class _Kind:
    """Linear families of a kind: their entries of K, what was subtracted from columns (n, W), configurations (n, G)."""

    twins: Twins
    entries: Tensor
    shift: Tensor
    configuration: Tensor

    def evaluated(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Products of coefficients (R, n, G, W, W) and constants (R, n, G), in every group."""
        if self.twins.columns:
            return self._evaluated(point)
        return self._constant  # a hidden standard normal number, and the like

    @cached_property
    def _constant(self) -> tuple[Tensor, Tensor]:
        return self._evaluated(self.shift.new_zeros(1, 0))

    def _evaluated(self, point: Tensor) -> tuple[Tensor, Tensor]:
        many = len(self.twins.families)
        coefficients, constants = self.twins.families[0].equations(self.twins.naturals(point))
        coefficients, constants = coefficients.unflatten(0, (-1, many)), constants.unflatten(0, (-1, many))
        moved = (coefficients * self.shift[:, None, None]).sum(-1, keepdim=True)
        coefficients = torch.cat([coefficients[..., :-1], coefficients[..., -1:] + moved], -1)
        products = coefficients.mT @ coefficients
        if products.shape[2] == 1:
            groups = self.configuration.shape[1]
            return products.expand(-1, -1, groups, -1, -1), constants.expand(-1, -1, groups)
        node = torch.arange(many).unsqueeze(-1)
        return products[:, node, self.configuration], constants[:, node, self.configuration]


@dataclass(frozen=True, eq=False)
class LinearFamilies:
    """All families of numbers of a model, and where they stand among the columns of rows in groups.

    Attributes:
        structure: Of the model.
        all: The families, parents first.
        shapes: Of all parameters of a flat point, in their order.
        columns: For each family, by its node, the numbers that its columns are.
        codes: For each family the configuration of its categories in each group of rows (G,).
        shift: What was subtracted from the numbers (D,).
    """

    structure: Structure
    all: tuple[FamilyView, ...]
    shapes: Mapping[str, tuple[int, ...]]
    columns: Mapping[str, Sequence[int]]
    codes: Mapping[str, Tensor]
    shift: Tensor

    @cached_property
    def kinds(self) -> list[_Kind]:
        """The equations of every kind, sorted when they are first evaluated: scoring needs none of that."""
        return [self._kind(one) for one in find_twins(self.structure, self.all, self.shapes)]

    def _kind(self, twins: Twins) -> _Kind:
        size = len(self.shift)
        at = torch.tensor([[*self.columns[family.node], size] for family in twins.families])
        entries = at.unsqueeze(-1) * (size + 1) + at.unsqueeze(-2)
        codes = torch.stack([self.codes[family.node] for family in twins.families])
        return _Kind(twins, entries.flatten(), torch.nn.functional.pad(self.shift, (0, 1))[at], codes)


def structural_equations(linear: LinearFamilies, shown: Tensor, most: int = 4_000_000) -> StructuralEquations | None:
    """Write families down as equations; None unless all are normal nodes, or if there are too many parameters.

    ``shown`` says which numbers each group shows (G, D). Beyond ``most`` entries of the information of all groups,
    steps by gradients alone cost less.
    """
    structure, families, shapes, shift = linear.structure, linear.all, linear.shapes, linear.shift
    at = {key: place.numpy() for key, place in parameter_places(shapes).items()}
    learned = {key for family in families for key in structure.keys[family.node].values()}
    total = sum(place.size for place in at.values())
    if not all(_is_plain(family) for family in families) or set(at) != learned or total**2 > most:
        return None
    is_positive, floor = np.zeros(total, dtype=bool), np.zeros(total)
    entries: list[_Entry] = []
    for family in families:
        for name, parameter in family.mechanism.declared().items():
            column = at[structure.keys[family.node][name]] if parameter.learned else np.full(parameter.shape, -1)
            if parameter.learned:
                is_positive[column] = parameter.support is not REAL
            if parameter.learned and isinstance(parameter.support, Floored):
                floor[column] = parameter.support.floor.numpy()
            entries.append(_entry(linear, family, name, column))
    column, origin, unit, place, row, moved_by, times, centre, active = map(np.concatenate, zip(*entries, strict=True))
    if len(shown) * len(row) ** 2 > most:
        return None
    by_parameter = unit[:, None] * (column[:, None] == np.arange(total))
    entries_of = (origin, by_parameter, place, row, moved_by, times, centre, np.ascontiguousarray(active.T))
    return StructuralEquations(is_positive, floor, *entries_of, shown.numpy(), shift.numpy())


_Entry: TypeAlias = tuple[NDArray[Any], ...]
"""Columns of a point, origins, units, places, rows and so on of the entries that one parameter makes."""


def _is_plain(family: FamilyView) -> bool:
    """Whether a family is a normal node as the library has it, whose parameters each make entries of their own."""
    mechanism, parameters = family.mechanism, family.mechanism.declared().values()
    if any(parameter.is_given_in_part for parameter in parameters):
        return False
    supports = [parameter.support for parameter in parameters]
    plain = all(one is REAL or one is POSITIVE or isinstance(one, Floored) for one in supports)
    return isinstance(mechanism, Normal) and type(mechanism) is Normal and not mechanism.predictor.is_levelled and plain


def _entry(linear: LinearFamilies, family: FamilyView, name: str, column: Codes) -> _Entry:
    """What a table of levels or scales, or the slopes of a family, put into its equations."""
    own, code, size = linear.columns[family.node], linear.codes[family.node].numpy(), len(linear.shift)
    mechanism = family.mechanism
    assert isinstance(mechanism, Normal), "checked before"
    parameter, dim, many = mechanism.declared()[name], family.widths[-1], column.shape[0]
    if parameter.learned:
        origin, unit = (one.numpy() for one in parameter.origin_and_unit)
    else:
        origin, unit = parameter.constant(family.node, name).numpy(), np.zeros(())
    column, origin, unit = ((np.zeros((many, dim), dtype=one.dtype) + one).ravel() for one in (column, origin, unit))
    cell, line = (np.zeros((many, dim), dtype=np.int64) + own[:dim]).ravel(), np.arange(many * dim) // dim
    always, centre = np.ones((len(cell), len(code)), dtype=bool), np.zeros(len(cell))
    if name == "weight":
        source = np.asarray(own[dim:])[line]
        centre = mechanism.predictor.centre.numpy()[line]
        return column, origin, unit, cell * size + source, cell, source, source, centre, always
    is_scale = name == "scale"
    moved_by = size + cell if is_scale else np.full_like(cell, 2 * size)
    active = always if many == 1 else line[:, None] == code
    place, times = size * (size + is_scale) + cell, np.full_like(cell, size + is_scale)
    return column, origin, unit, place, cell, moved_by, times, centre, active
