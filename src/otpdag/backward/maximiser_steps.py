"""Maximise the expected log-density of nodes that have a maximiser, twins together.

Counts and moments of twins (:mod:`~otpdag.backward.twins`) stand side by side on the replica axis, and one call is
mapped over what was read off their data: a graph of a thousand columns asks each kind of nodes once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from otpdag.backward.elimination.family_statistics import Counts, Moments, Statistics, WeighedRows
from otpdag.backward.elimination.stacking import stacked_replicas
from otpdag.backward.twins import Twins
from otpdag.mechanisms.base import Mechanism
from otpdag.structure import Naturals

__all__ = ["maximised"]


def maximised(
    twins: Twins, naturals: Naturals, statistics: Mapping[str, tuple[Statistics, ...]], replicas: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Raw parameters (R, n, ...) of n twins where they are likeliest; and what rows say that show their families (R,).

    Args:
        twins: The nodes.
        naturals: Where all nodes are (1 or R, ...).
        statistics: What rows say of each node's family.
        replicas: R.
    """
    nodes = [family.node for family in twins.families]
    together = _side_by_side([statistics[node] for node in nodes], replicas)
    if len(nodes) > 1 and together is None:
        each = [maximised(twins.some([at]), naturals, statistics, replicas) for at in range(len(nodes))]
        raw = {name: torch.cat([own[name] for own, _ in each], 1) for name in twins.columns}
        return raw, torch.stack([shown for _, shown in each]).sum(0)
    parts = statistics[nodes[0]] if together is None else (together,)
    params = {name: stacked_replicas([naturals[n][name] for n in nodes], replicas) for name in naturals[nodes[0]]}
    shown = torch.zeros(replicas).to(next(iter(params.values())))
    for one in parts:
        for complete, _ in one.parts(params):
            shown = shown + complete.expand(replicas * len(nodes)).reshape(replicas, -1).sum(-1)
    if not twins.columns:
        return {}, shown
    rows, weight = _rows(twins, parts, replicas)
    return _mapped(twins, params, rows, weight), shown


def _side_by_side(each: Sequence[tuple[Statistics, ...]], replicas: int) -> Counts | Moments | None:
    """The statistics of all twins as one, where each has one summary of the same sort."""
    counts = [own[0] for own in each if len(own) == 1 and isinstance(own[0], Counts)]
    if len(counts) == len(each):
        return Counts.side_by_side(counts, replicas)
    moments = [own[0] for own in each if len(own) == 1 and isinstance(own[0], Moments)]
    return Moments.side_by_side(moments, replicas) if len(moments) == len(each) else None


def _rows(twins: Twins, statistics: Sequence[Statistics], replicas: int) -> tuple[dict[str, Tensor], Tensor]:
    """Weighted rows that say the same: values (R, n, rows, width) and weights (R, n, rows)."""
    made = [one.rows() for one in statistics]
    parts = [part for one in made for part in ([one] if isinstance(one, WeighedRows) else one)]
    many = replicas * len(twins.families)
    values = {
        name: torch.cat([_flat(part, name, many) for part in parts], 1).unflatten(0, (replicas, -1))
        for name in twins.families[0].names
    }
    weight = torch.cat([part.weight.expand(many, *part.weight.shape[1:]).flatten(1) for part in parts], 1)
    return values, weight.unflatten(0, (replicas, -1))


def _flat(rows: WeighedRows, name: str, many: int) -> Tensor:
    """Values of weighted rows (many, n, width), whatever axes they have."""
    shape = (many, *rows.weight.shape[1:], rows.values[name].shape[-1])
    return rows.values[name].expand(shape).flatten(1, -2)


def _mapped(
    twins: Twins, params: Mapping[str, Tensor], values: Mapping[str, Tensor], weight: Tensor
) -> dict[str, Tensor]:
    """Ask the mechanisms of all twins at once; one after another where one looks at single numbers."""
    node, *_ = (family.node for family in twins.families)
    given = {f"params {name}": value.unflatten(0, (len(weight), -1)) for name, value in params.items()}
    given |= {f"values {name}": value for name, value in values.items()} | {"weight": weight}

    def asked(mechanism: Mechanism, own: dict[str, Tensor]) -> dict[str, Tensor]:
        here = {name: own[f"params {name}"] for name in params}
        parents = {name: own[f"values {name}"] for name in values if name != node}
        return mechanism.raw(mechanism.maximised(here, own[f"values {node}"], parents, own["weight"]))

    try:
        return twins.mapped(asked, given)
    except RuntimeError:
        if len(twins.families) == 1:
            raise
    each = [
        twins.some([at]).mapped(asked, {name: value[:, at : at + 1] for name, value in given.items()})
        for at in range(len(twins.families))
    ]
    return {name: torch.cat([own[name] for own in each], 1) for name in each[0]}
