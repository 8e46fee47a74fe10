r"""A canonical order of hidden labels and signs, so that two fits compare.

Nothing in the data tells which of a hidden category's labels is the first, or which way a hidden number points.
Labels are ordered by the mean of the node's first child, numbers point so that its slope is positive. Mechanisms and
maps say themselves what that changes in them. Where one cannot follow, or a user has fixed or tied a parameter that
would change, labels and signs stay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.backward import AmortizedMap
from otpdag.mechanisms import Mechanism
from otpdag.mechanisms.base import Params, Sloped, Turning
from otpdag.mechanisms.parameters import Fixed, Tied
from otpdag.simulation import ancestral, ancestral_sequences
from otpdag.structure import Structure, lag_name

Naturals = dict[str, dict[str, Tensor]]
Phi = dict[str, Tensor]


@dataclass(frozen=True)
class _Change:
    """Other labels or another sign of one node: what becomes of the parameters of mechanisms and of maps."""

    node: str
    of_mechanism: Callable[[Mechanism, Params, Collection[str]], dict[str, Tensor] | None]
    of_map: Callable[[AmortizedMap, Phi], Phi | None]


def in_one_order(
    structure: Structure, naturals: Naturals, phi: Phi, maps: Sequence[AmortizedMap]
) -> tuple[Naturals, Phi]:
    """Relabel categories and flip signs of hidden nodes, in the model and in its backward maps."""
    hidden = [node for node in structure.graph.order if node in structure.graph.hidden]
    # signs first: labels may be ordered by a number that one turns round
    for node in sorted(hidden, key=lambda node: structure.mechanisms[node].space.is_discrete):
        is_discrete = structure.mechanisms[node].space.is_discrete
        change = (_new_labels if is_discrete else _new_sign)(structure, naturals, node)
        changed = None if change is None else _changed(structure, naturals, phi, maps, change)
        naturals, phi = (naturals, phi) if changed is None else changed
    return naturals, phi


def _changed(
    structure: Structure, naturals: Naturals, phi: Phi, maps: Sequence[AmortizedMap], change: _Change
) -> tuple[Naturals, Phi] | None:
    """All parameters after a change; None if a mechanism or a map cannot follow, or a given parameter would differ."""
    everywhere = dict(naturals)
    for owner, mechanism in structure.mechanisms.items():
        names = (owner, *(name for name, _ in mechanism.family.parents))
        touched = {name for name in names if structure.base(name) == change.node}
        if not touched:
            continue
        params = change.of_mechanism(mechanism, naturals[owner], touched)
        if params is None or not _keeps_settings(mechanism, naturals[owner], params):
            return None
        everywhere[owner] = params
    for backward in maps:
        followed = change.of_map(backward, phi)
        if followed is None:
            return None
        phi = followed
    return everywhere, phi


def _keeps_settings(mechanism: Mechanism, before: Params, after: Params) -> bool:
    """Whether all that a user fixed or tied is as it was."""
    for name, parameter in mechanism.declared().items():
        if not isinstance(parameter.setting, Fixed | Tied):
            continue
        held = torch.as_tensor(parameter.fixed_entries() | isinstance(parameter.setting, Tied))
        if not torch.allclose(after[name][:, held], before[name][:, held]):
            return False
    return True


# -- labels -----------------------------------------------------------------------------------------------------------


def _new_labels(structure: Structure, naturals: Naturals, node: str) -> _Change | None:
    order = _label_order(structure, naturals, node)
    if order == sorted(order):
        return None
    return _Change(
        node,
        lambda mechanism, params, nodes: mechanism.relabelled(params, nodes, order),
        lambda backward, phi: backward.relabelled(phi, node, order),
    )


def _label_order(structure: Structure, naturals: Naturals, node: str, draws: int = 400) -> list[int]:
    """States by the mean of the first child under do(node = state), over draws with the same noise for all."""
    size = structure.mechanisms[node].space.width
    child = _first_child(structure, node)
    if child is None:
        return list(range(size))
    mechanism = structure.mechanisms[child]
    if {name for name, _ in mechanism.family.parents} == {node}:  # there is nothing to draw where it has a mean
        mean = mechanism.mean(naturals[child], {node: torch.eye(size, dtype=torch.float64).unsqueeze(0)})
        if mean is not None:
            positions = mechanism.space.position(mean)[0].tolist()
            return sorted(range(size), key=lambda state: positions[state])
    spaces = {name: structure.mechanisms[name].space for name in structure.given}
    given = {name: space.neutral().expand(1, draws, -1) for name, space in spaces.items()}
    means = []
    for state in torch.eye(size, dtype=torch.float64):
        drawn = _drawn(structure, naturals, {**given, node: state.expand(1, draws, size)})
        means.append(_position(structure, naturals, child, drawn))
    return sorted(range(size), key=lambda state: means[state])


def _first_child(structure: Structure, node: str) -> str | None:
    """The first observed child, or the first of all."""
    children = sorted(structure.graph.children(node), key=lambda child: child in structure.graph.hidden)
    return children[0] if children else None


def _drawn(structure: Structure, naturals: Naturals, do: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows of the model, or the last steps of short sequences with the values that those depend on."""
    generator, rows = torch.Generator().manual_seed(0), next(iter(do.values())).shape[1]
    if not structure.graph.is_dynamic:
        return ancestral(structure, naturals, rows, generator, do=do)
    longest = max(edge.by for edge in structure.graph.lags)
    steps = {node: value.unsqueeze(2).expand(-1, -1, longest + 1, -1) for node, value in do.items()}
    drawn = ancestral_sequences(structure, naturals, rows, longest + 1, generator, do=steps)
    last = {node: value[:, :, -1] for node, value in drawn.items()}
    lagged = {lag_name(edge.parent, edge.by): drawn[edge.parent][:, :, -1 - edge.by] for edge in structure.graph.lags}
    return last | lagged


def _position(structure: Structure, naturals: Naturals, child: str, drawn: Mapping[str, Tensor]) -> float:
    """One number that tells where a child lies."""
    mechanism = structure.mechanisms[child]
    mean = mechanism.mean(naturals[child], structure.parents(child, drawn))
    return float(mechanism.space.position(drawn[child] if mean is None else mean).mean())


# -- signs ------------------------------------------------------------------------------------------------------------


def _new_sign(structure: Structure, naturals: Naturals, node: str) -> _Change | None:
    """The turn that makes the first child's slopes positive; None if it is of no use or makes no sense."""
    child = _first_child(structure, node)
    if child is None or not structure.mechanisms[node].space.is_unbounded:
        return None
    below = structure.mechanisms[child]
    slopes = below.slopes(naturals[child], node) if isinstance(below, Sloped) else None
    if slopes is None or bool((slopes[0] >= 0).all()):
        return None
    sign = torch.where(slopes[0] < 0, -1.0, 1.0).to(slopes)
    return _Change(
        node,
        lambda one, params, nodes: one.turned(params, nodes, sign) if isinstance(one, Turning) else None,
        lambda backward, phi: backward.turned(phi, node, sign),
    )
