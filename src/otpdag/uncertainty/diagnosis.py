"""What a user should know of a fit to a table: what the data do not tell, in words that name the parameter.

Each check is cheap beside a fit. Parameters that the data do not determine are looked for in models of up to 120
parameters without networks; larger ones are not checked.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from otpdag.answers.checks import noise_scores
from otpdag.answers.information import FlatDirection, ParameterName, flat_directions
from otpdag.data import Batch
from otpdag.errors import listed
from otpdag.mechanisms import Categorical, Mechanism
from otpdag.mechanisms.base import can_abduct
from otpdag.mechanisms.normal import LocationScale
from otpdag.mechanisms.predictor import Predicted
from otpdag.model import Model
from otpdag.problem import Units
from otpdag.structure import Structure
from otpdag.uncertainty.standard_errors import point_of

UNDETERMINED = "the data do not determine"
"""How notes on flat directions begin."""


# -- columns -----------------------------------------------------------------------------------------------------------


def notes_on_columns(structure: Structure, batch: Batch) -> list[str]:
    """Columns that are constant, of which nothing can be learned."""
    return [
        f"column {node!r} is constant: it tells nothing, and its slopes and scale mean nothing"
        for node in structure.graph.observed
        if _is_constant(batch.values[node][0], batch.mask[node][0])
    ]


def _is_constant(value: Tensor, mask: Tensor, first: int = 100) -> bool:
    """Whether at least two rows (N, width) show all their cells, and all of those the same; the first tell of most."""
    few = value[:first][mask[:first].all(-1)]
    if len(few) > 1 and bool((few != few[0]).any()):
        return False
    seen = value[mask.all(-1)]
    return len(seen) > 1 and bool((seen == seen[0]).all())


# -- boundaries --------------------------------------------------------------------------------------------------------


def notes_on_scales(model: Model) -> list[str]:
    """Scales at their floor."""
    return [_scale_note(model, *low) for low in _scales_at_floors(model)]


def notes_on_separation(model: Model, batch: Batch) -> list[str]:
    """Logits that separate their categories."""
    return [
        f"the parents of {node!r} separate its categories without error: its slopes grow without end, and their size "
        "means nothing"
        for node in separated(model, batch)
    ]


def collapsed_scales(model: Model) -> dict[str, list[int]]:
    """Nodes with scales at their floor, and in which configurations of their discrete parents."""
    return {mechanism.family.node: rows for mechanism, _, rows in _scales_at_floors(model)}


def _scales_at_floors(model: Model, near: float = 1.05) -> list[tuple[LocationScale, Tensor, list[int]]]:
    """Mechanisms with scales of less than so many floors, the floors, and the configurations."""
    at_floors = []
    for node, mechanism in model.structure.mechanisms.items():
        if not isinstance(mechanism, LocationScale) or not mechanism.declared()["scale"].learned:
            continue
        floor, scale = mechanism.smallest_scale, model.fitted.naturals[node]["scale"][0]
        if floor is not None and bool((low := (scale <= near * floor.to(scale)).any(-1)).any()):
            at_floors.append((mechanism, floor, low.nonzero().flatten().tolist()))
    return at_floors


def _scale_note(model: Model, mechanism: LocationScale, floor: Tensor, rows: Sequence[int]) -> str:
    where = [_configuration(model, mechanism, row) for row in rows] if mechanism.scale_rows > 1 else []
    place = f" where {listed(where, most=4, show=str)}" if where else ""
    numbers = [name for name, _ in mechanism.family.continuous if name in model.graph.hidden]
    if numbers:
        why = f"a Heywood case: {', '.join(map(repr, numbers))} explains it without error"
    elif where:
        why = "its rows there are as good as equal"
    else:
        why = "its parents explain it without error" if mechanism.family.parents else "its rows are as good as equal"
    return (
        f"the scale of {mechanism.family.node!r}{place} is at its floor, {float(floor.min()):.3g}: {why}. floor= of "
        "its mechanism sets another"
    )


def separated(model: Model, batch: Batch) -> list[str]:
    """Nodes whose numeric parents tell their categories apart without error."""
    logits = [n for n, one in model.structure.mechanisms.items() if isinstance(one, Categorical) and not one.is_table]
    return [node for node in logits if _is_separated(model, node, batch)]


def _is_separated(model: Model, node: str, batch: Batch, least: float = 1e-3) -> bool:
    """Whether the mean loss of a logit, in nats, is so small."""
    mechanism, family = model.structure.mechanisms[node], model.structure.graph.parents(node)
    complete = _complete_rows(batch, node, family)
    if complete is None or not bool(complete.any()) or not mechanism.family.continuous:
        return False
    parents = {name: batch.values[name][:, complete] for name in family}
    with torch.no_grad():
        fit = mechanism.log_prob(model.fitted.naturals[node], batch.values[node][:, complete], parents)
    return float(-fit.mean()) < least


def _complete_rows(batch: Batch, node: str, parents: Sequence[str]) -> Tensor | None:
    """Which rows (N,) show all cells of a node and its parents; None if one of them is hidden."""
    if any(name not in batch.values for name in (node, *parents)):
        return None
    return torch.stack([batch.mask[name][0].all(-1) for name in (node, *parents)]).all(0)


# -- identification ----------------------------------------------------------------------------------------------------


def notes_on_identification(model: Model, problem: Units, told: Collection[str] = ()) -> list[str]:
    """Parameters that the data do not determine; nothing is said of models that are too large to be checked.

    ``told`` are nodes of which other notes say that their parameters mean nothing.
    """
    directions = flat_directions(problem, point_of(model, problem))
    directions = [one for one in directions if not {node for node, _, _ in one.names} <= set(told)]
    return [_flat_note(model, own) for own in _joined(directions)]


def _joined(directions: Sequence[FlatDirection]) -> list[list[FlatDirection]]:
    """Directions that move parameters of the same nodes, together."""
    sets: list[list[FlatDirection]] = []
    for direction in directions:
        nodes = {node for node, _, _ in direction.names}
        near = [own for own in sets if any(node in nodes for one in own for node, _, _ in one.names)]
        sets = [own for own in sets if own not in near]
        sets.append([*(one for own in near for one in own), direction])
    return sets


def _flat_note(model: Model, directions: Sequence[FlatDirection]) -> str:
    names = list(dict.fromkeys(_parameter(model, name) for one in directions for name in one.names))
    shown = listed(names, most=6, show=str)
    if len(names) == 1:
        return f"{UNDETERMINED} the {shown}: whatever it is, the likelihood is the same; fix it"
    many = "" if len(directions) == 1 else f" in {len(directions)} ways"
    return (
        f"{UNDETERMINED} the {shown}: moved together{many}, they leave the likelihood as it is; fix or tie a parameter"
    )


def _parameter(model: Model, name: ParameterName) -> str:
    node, parameter, index = name
    mechanism = model.structure.mechanisms[node]
    text = f"{parameter} of {node!r}"
    if not isinstance(mechanism, Predicted) or not index:
        return text
    if parameter == "weight":
        inputs = [parent for parent, space in mechanism.family.continuous for _ in range(space.width)]
        return f"{text} on {inputs[index[0]]!r}"
    rows = mechanism.declared()[parameter].shape[0]
    return f"{text} where {_configuration(model, mechanism, index[0])}" if rows > 1 else text


def _configuration(model: Model, mechanism: Mechanism, row: int) -> str:
    """The categories of the parents in a row of a table: ``z = 1, season = wet``."""
    parts = []
    for parent, space in reversed(mechanism.family.discrete):
        row, code = divmod(row, space.width)
        label = model.labels(parent)[code] if parent in model.graph else code
        parts.append(f"{parent} = {label}")
    return ", ".join(reversed(parts))


# -- independence ------------------------------------------------------------------------------------------------------


def notes_on_independence(
    model: Model, batch: Batch, *, seed: int = 0, least: float = 0.15, errors: float = 5.0, most: int = 5
) -> list[str]:
    """Pairs of nodes whose noise is independent by the graph, though the data say otherwise.

    Args:
        model: The fitted model.
        batch: What it was fitted to.
        seed: Of what noise leaves open.
        least: A correlation that matters.
        errors: By how many standard errors it must differ from none.
        most: Pairs that are named.
    """
    names, noise, seen = _noise(model, batch, seed)
    if len(names) < 2:
        return []
    correlation, both = _correlations(noise, seen)
    clear = correlation.abs() > (errors / both.clamp(min=1).sqrt()).clamp(min=least)
    pairs = []
    for left, right in torch.nonzero(clear.tril(-1)).tolist():
        one, other, by = names[right], names[left], float(correlation[left, right])
        if one not in model.graph.parents(other) and other not in model.graph.parents(one):
            pairs.append((abs(by), one, other, by))
    pairs.sort(reverse=True)
    notes = [_dependence(model, one, other, by) for _, one, other, by in pairs[:most]]
    left_out = len(pairs) - len(notes)
    return [*notes, *([f"{left_out} more pairs of nodes are correlated against the graph"] if left_out else [])]


def _dependence(model: Model, one: str, other: str, correlation: float) -> str:
    roots = not model.graph.parents(one) and not model.graph.parents(other)
    what = f"{one!r} and {other!r} are" if roots else f"the noise of {one!r} and of {other!r} is"
    return (
        f"{what} independent by the graph, but correlated in the data ({correlation:.2f}): samples will not be. "
        "An edge or a common parent is missing"
    )


def _noise(model: Model, batch: Batch, seed: int) -> tuple[Sequence[str], Tensor, Tensor]:
    """Normal scores (N, nodes) of the noise of nodes whose parents are seen, and where they are known."""
    generator = torch.Generator().manual_seed(seed)
    names, columns, known = [], [], []
    structure, collapsed = model.structure, collapsed_scales(model)
    for node in structure.graph.observed:
        mechanism, family = structure.mechanisms[node], structure.graph.parents(node)
        # what is left of a collapsed one is rounding
        if node in collapsed or mechanism.is_given or not can_abduct(mechanism) or mechanism.space.cells != 1:
            continue
        complete = _complete_rows(batch, node, family)
        if complete is None:
            continue
        parents = {parent: batch.values[parent] for parent in family}
        score = noise_scores(model.fitted, node, batch.values[node], parents, generator)
        if score.shape[-1] == 1:
            names.append(node)
            columns.append(score[0, :, 0])
            known.append(complete & torch.isfinite(score[0, :, 0]))
    if not names:
        return names, torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.bool)
    return names, torch.stack(columns, -1), torch.stack(known, -1)


def _correlations(noise: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Correlations of all pairs of columns (n, k) over the rows that show both (k, k), and the number of these rows.

    Each column by its ranks' normal scores, so that single rows do not make it.
    """
    scores = torch.zeros_like(noise)
    for column, known in enumerate(seen.unbind(-1)):
        ranks = noise[known, column].argsort().argsort().to(noise)
        scores[known, column] = torch.special.ndtri((ranks + 0.5) / len(ranks))
    known = seen.to(noise)
    both, total = known.T @ known, scores.T @ known
    count = both.clamp(min=1)
    covariance = scores.T @ scores - total * total.T / count
    spread = scores.square().T @ known - total.square() / count
    correlation = covariance / (spread * spread.T).sqrt().clamp(min=1e-300)
    return torch.where(both < 3, 0.0, correlation), both
