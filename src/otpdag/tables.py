"""Parameters as a plain table: one line for each number, named as a reader would name it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from otpdag.data import Label
from otpdag.data.columns import cell_names
from otpdag.mechanisms import Axis
from otpdag.mechanisms.parameters import Feature, Parameter
from otpdag.numerics import Array, Flags
from otpdag.structure import Structure

__all__ = ["estimates", "interval_ends", "number"]


class Described(Protocol):
    """A model, or what inference needs of it."""

    @property
    def structure(self) -> Structure:
        """Graph and mechanisms."""
        ...

    def labels(self, node: str) -> tuple[Label, ...]:
        """What the categories of a node are called."""
        ...

    def params(self) -> Mapping[str, Mapping[str, Array]]:
        """Parameters by node and name."""
        ...


def estimates(model: Described, params: Mapping[str, Mapping[str, ArrayLike]] | None = None) -> pd.DataFrame:
    """List the parameters of a model.

    Layers of networks are left out: their single numbers say nothing.

    Args:
        model: A fitted model.
        params: Other values in the same shapes, for instance a known truth; by default the model's own.

    Returns:
        Columns ``node``, ``parameter``, ``at`` (the configuration of the parents, the parent of a slope, the category),
        ``value`` and ``fixed`` (whether the value was given rather than learned).

    >>> from otpdag import Graph, Model, mechanisms as m
    >>> model = Model(Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal(scale=1.0)})
    >>> _ = model.set_params({"z": {"probs": [0.3, 0.7]}, "x": {"loc": [-1.0, 2.0]}})
    >>> print(estimates(model).to_string(index=False))
    node parameter  at  value  fixed
       z     probs   0    0.3  False
       z     probs   1    0.7  False
       x       loc z=0   -1.0  False
       x       loc z=1    2.0  False
       x     scale z=0    1.0   True
       x     scale z=1    1.0   True
    """
    rows = []
    for node, values in (model.params() if params is None else params).items():
        declared = model.structure.mechanisms[node].declared()
        for name, value in values.items():
            if name.startswith(("network.", "module.")):
                continue
            array = np.asarray(value, dtype=float)
            fixed = _fixed(declared.get(name), array.size)
            places = product(*_places(model, node, name, array.shape))
            rows += [
                (node, name, ", ".join(filter(None, place)), float(number), bool(is_fixed))
                for place, number, is_fixed in zip(places, array.flat, fixed, strict=True)
            ]
    return pd.DataFrame(rows, columns=["node", "parameter", "at", "value", "fixed"])


def interval_ends(table: pd.DataFrame, intervals: pd.DataFrame | None) -> Array:
    """Lower and upper ends (n, 2) of intervals beside the estimates that were learned; NaN where there are none.

    Args:
        table: From :func:`estimates`, or some of its lines.
        intervals: From :meth:`otpdag.FitResult.intervals`, by index or by columns ``node`` and ``parameter``.
    """
    ends = np.full((len(table), 2), np.nan)
    known = None if intervals is None else intervals if "node" in intervals.columns else intervals.reset_index()
    if known is None or not {"node", "parameter", "lower", "upper"} <= set(known.columns):
        return ends
    learned = table.reset_index(drop=True)[lambda lines: ~lines["fixed"]]
    for (node, parameter), group in learned.groupby(["node", "parameter"], sort=False):
        own = known[(known["node"].astype(str) == node) & (known["parameter"] == parameter)]
        if len(own) == len(group):
            ends[group.index] = own[["lower", "upper"]]
    return ends


def number(value: Any, spread: float = math.nan) -> str:
    """Up to the second digit of a standard error, or five significant digits; nothing for what is missing.

    >>> number(61.94892), number(61.94892, 0.344), number(50.0, 0.0018)
    ('61.949', '61.95', '50.0000')
    """
    if value is None or pd.isna(value):
        return ""
    places = 1 - math.floor(math.log10(spread)) if 0 < spread < math.inf else math.inf
    return f"{value:.{max(places, 0)}f}" if places < 9 else f"{value + 0.0:.5g}"


def _fixed(parameter: Parameter | None, size: int) -> Flags:
    """Which numbers of a parameter are given."""
    if parameter is not None and parameter.is_given_in_part:
        return parameter.fixed_entries().ravel()
    return np.full(size, parameter is not None and not parameter.learned)


def _places(model: Described, node: str, name: str, shape: tuple[int, ...]) -> list[list[str]]:
    """Names along each axis of a parameter, as its mechanism tells; plain numbers where it tells nothing."""
    axes = model.structure.mechanisms[node].axes().get(name)
    if axes is not None:
        return [names for axis in axes if axis.shown(node) for names in _names_along(model, node, axis)]
    return [[str(i) for i in range(size)] for size in shape]


def feature_name(model: Described, feature: Feature) -> str:
    """What a term is called: ``load:season=wet``."""
    parts = (
        name if code is None else f"{name}={model.labels(model.structure.base(name))[code]}" for name, code in feature
    )
    return ":".join(parts)


def _names_along(model: Described, node: str, axis: Axis) -> list[list[str]]:
    """Names along an axis, which a reader sees split by node where it runs over configurations.

    These are of a node, of its value some steps ago (``z[-1]``), or at its first step (``z[0]``).
    """
    if axis.features:
        return [[feature_name(model, one) for one in axis.features]]
    if axis.coordinates:
        return [[cell for owner, width in axis.coordinates for cell in cell_names(owner, width)]]
    return [
        [str(label) if owner == node else f"{owner}={label}" for label in model.labels(model.structure.base(owner))]
        for owner, _ in axis.categories
    ]
