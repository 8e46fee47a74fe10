"""A canonical order of hidden labels and signs, so that two fits compare.

Nothing in the data tells which of a hidden category's labels is the first, or which way a hidden number points.
Labels are ordered by the mean of the node's first child, numbers point so that its slope is positive. Where a user has
fixed or tied a parameter that a relabelling would change, the labels are the user's, and stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from otpdag.backward.amortized import AmortizedMap
from otpdag.inference.ancestral import ancestral, ancestral_sequences
from otpdag.mechanisms import Mechanism, StayOrMove
from otpdag.mechanisms.base import Parents
from otpdag.mechanisms.normal import LocationScale
from otpdag.mechanisms.parameters import Fixed, Tied
from otpdag.spaces import Space
from otpdag.structure import Structure, lag_name

__all__ = ["canonical"]

Naturals = dict[str, dict[str, Tensor]]
Phi = dict[str, Tensor]
ROWS = 400


def canonical(structure: Structure, naturals: Naturals, phi: Phi, maps: Sequence[AmortizedMap]) -> tuple[Naturals, Phi]:
    """Relabel categories and flip signs of hidden nodes, in the model and in its backward maps."""
    hidden = [node for node in structure.graph.order if node in structure.graph.hidden]
    # signs first: labels may be ordered by a number that one turns round
    for node in sorted(hidden, key=lambda node: structure.mechanisms[node].space.is_discrete):
        if structure.mechanisms[node].space.is_discrete:
            order = _label_order(structure, naturals, node)
            changed = _relabel(structure, naturals, node, order)
            if changed is not None:
                naturals, phi = changed, _relabel_maps(phi, maps, node, order)
        elif (
            isinstance(structure.mechanisms[node], LocationScale) and structure.mechanisms[node].space.support == "real"
        ):
            naturals, phi = _point_upward(structure, naturals, phi, maps, node)
    return naturals, phi


# -- labels -----------------------------------------------------------------------------------------------------------


def _label_order(structure: Structure, naturals: Naturals, node: str) -> list[int]:
    """States by the mean of the first child under do(node = state), with common random numbers."""
    children = structure.graph.children(node)
    size = structure.mechanisms[node].space.width
    observed_first = sorted(children, key=lambda child: child in structure.graph.hidden)
    if not observed_first:
        return list(range(size))
    child = structure.mechanisms[observed_first[0]]
    given = {n: _typical(structure.mechanisms[n].space) for n in structure.given}
    means = []
    for state in range(size):
        setting = torch.eye(size, dtype=torch.float64)[state].expand(1, ROWS, size)
        drawn = _drawn(structure, naturals, {**given, node: setting})
        means.append(
            _position(
                child,
                naturals[observed_first[0]],
                structure.parents(observed_first[0], drawn),
                drawn[observed_first[0]],
            )
        )
    return sorted(range(size), key=lambda state: means[state])


def _drawn(structure: Structure, naturals: Naturals, do: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows of the model, or the last steps of short sequences with the values that those depend on."""
    generator = torch.Generator().manual_seed(0)
    if not structure.graph.is_dynamic:
        return ancestral(structure, naturals, ROWS, generator, do=do)
    longest = max(edge.by for edge in structure.graph.lags)
    steps = {node: value.unsqueeze(2).expand(-1, -1, longest + 1, -1) for node, value in do.items()}
    drawn = ancestral_sequences(structure, naturals, ROWS, longest + 1, generator, do=steps)
    found = {node: value[:, :, -1] for node, value in drawn.items()}
    lagged = {lag_name(edge.parent, edge.by): drawn[edge.parent][:, :, -1 - edge.by] for edge in structure.graph.lags}
    return found | lagged


def _typical(space: Space) -> Tensor:
    """A covariate that favours no state: all categories alike, numbers at zero."""
    value = 1 / space.width if space.is_discrete or space.support == "simplex" else 0.0
    return torch.full((1, ROWS, space.width), value, dtype=torch.float64)


def _position(child: Mechanism, params: dict[str, Tensor], parents: Parents, drawn: Tensor) -> float:
    """One number that tells where a child lies."""
    mean = child.mean(params, parents)
    value = drawn if mean is None else mean
    if child.space.is_discrete:
        return float((value * torch.arange(child.space.width).to(value)).sum(-1).mean())
    return float(value[..., 0].mean())


def _relabel(structure: Structure, naturals: Naturals, node: str, order: list[int]) -> Naturals | None:
    """Natural parameters with the node's states in a new order; None if a fixed or tied parameter forbids it."""
    found = {name: dict(values) for name, values in naturals.items()}
    changed: list[tuple[str, str, Tensor]] = []
    for owner, mechanism in structure.mechanisms.items():
        axes = [i for i, (name, _) in enumerate(mechanism.family.discrete) if structure.base(name) == node]
        makes = structure.base(owner) == node
        if isinstance(mechanism, StayOrMove) and makes and axes:
            continue  # treats all labels alike
        if not makes and not axes:
            continue
        if getattr(mechanism, "network", ()) or (axes and not hasattr(mechanism, "predictor")):
            return None
        sizes = [space.width for _, space in mechanism.family.discrete]
        for name, parameter in mechanism.declared().items():
            value = naturals[owner][name]
            if makes and name in ("probs", "logits", "weight"):
                value = value[..., order]
            if axes and name != "weight" and parameter.shape[0] == mechanism.predictor.rows:  # type: ignore[attr-defined]
                for axis in axes:
                    value = _permute_rows(value, sizes, axis, order)
            changed.append((owner, name, value))
    for owner, name, value in changed:
        setting = structure.mechanisms[owner].declared()[name].setting
        if isinstance(setting, Fixed | Tied) and not torch.allclose(value, naturals[owner][name]):
            return None
        found[owner][name] = value
    return found


def _permute_rows(table: Tensor, sizes: list[int], axis: int, order: list[int]) -> Tensor:
    """Reorder one parent's axis of a table (R, C, ...) over joint configurations."""
    split = table.reshape(table.shape[0], *sizes, *table.shape[2:])
    return split.index_select(axis + 1, torch.tensor(order)).reshape(table.shape)


def _relabel_maps(phi: Phi, maps: Sequence[AmortizedMap], node: str, order: list[int]) -> Phi:
    found = dict(phi)
    for backward in maps:
        for head in backward.targets:
            where = backward.input_slice(head, node)
            for key in backward.input_keys(head):
                if where is not None:
                    found[key] = found[key].clone()
                    found[key][:, where] = found[key][:, where][:, order]
            if head == node:
                for key in backward.output_keys(head):
                    found[key] = found[key][..., order]
    return found


# -- signs ------------------------------------------------------------------------------------------------------------


def _point_upward(
    structure: Structure, naturals: Naturals, phi: Phi, maps: Sequence[AmortizedMap], node: str
) -> tuple[Naturals, Phi]:
    children = structure.graph.children(node)
    if not children or not all(_is_linear(structure.mechanisms[child]) for child in children):
        return naturals, phi
    if any(name.startswith("network.") for name in naturals[node]):
        return naturals, phi
    first = next((c for c in children if c not in structure.graph.hidden), children[0])
    width = structure.mechanisms[node].space.width
    slopes = naturals[first]["weight"][0, _slope_rows(structure, first, node)]
    # of a logit, only differences between categories have a meaning
    upward = slopes[:, -1] - slopes[:, 0] if structure.mechanisms[first].space.is_discrete else slopes[:, 0]
    sign = torch.where(upward < 0, -1.0, 1.0).to(slopes)
    if bool((sign > 0).all()):
        return naturals, phi
    found = {name: dict(values) for name, values in naturals.items()}
    changes = []
    for owner, mechanism in structure.mechanisms.items():
        makes = structure.base(owner) == node
        read = [name for name, _ in mechanism.family.continuous if structure.base(name) == node]
        if read and not _is_linear(mechanism):
            return naturals, phi
        if makes and "loc" in naturals[owner]:
            changes.append((owner, "loc", naturals[owner]["loc"] * sign))
        if "weight" in naturals[owner] and (makes or read):
            weight = naturals[owner]["weight"] * sign if makes else naturals[owner]["weight"].clone()
            for name in read:
                weight[:, _slope_rows(structure, owner, name)] *= sign.unsqueeze(-1)
            changes.append((owner, "weight", weight))
    for owner, name, value in changes:
        setting = structure.mechanisms[owner].declared()[name].setting
        if isinstance(setting, Fixed | Tied) and not torch.allclose(value, naturals[owner][name]):
            return naturals, phi
        found[owner][name] = value
    return found, _flip_maps(phi, maps, node, sign, width)


def _is_linear(mechanism: Mechanism) -> bool:
    return not getattr(mechanism, "network", ()) and "weight" in mechanism.declared()


def _slope_rows(structure: Structure, child: str, parent: str) -> slice:
    """The rows of a child's slopes that belong to one parent."""
    at = 0
    for name, space in structure.mechanisms[child].family.continuous:
        if name == parent:
            return slice(at, at + space.width)
        at += space.width
    raise KeyError(parent)


def _flip_maps(phi: Phi, maps: Sequence[AmortizedMap], node: str, sign: Tensor, width: int) -> Phi:
    found = dict(phi)
    for backward in maps:
        for head in backward.targets:
            where = backward.input_slice(head, node)
            for key in backward.input_keys(head):
                if where is not None:
                    found[key] = found[key].clone()
                    found[key][:, where] = found[key][:, where] * sign.unsqueeze(-1)
            if head == node:
                for key in backward.output_keys(head):
                    found[key] = found[key].clone()
                    found[key][..., :width] = found[key][..., :width] * sign
    return found
