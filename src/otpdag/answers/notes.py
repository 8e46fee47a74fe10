r"""What a user should know of a fit to a table: what the data do not tell, in words that name the parameter.

Each check is cheap beside a fit. Parameters that the data do not determine are looked for in models of up to 120
parameters without networks; larger ones are not checked.

Flat directions are parameters that the data do not tell. The information of a row is also the mean square of its
scores, :math:`I = E\, s s^\top`. A direction :math:`v` of length one with :math:`n\, v^\top I v` near zero changes the
likelihood of all :math:`n` rows by nothing that could be noticed: its standard error,
:math:`1 / \sqrt{n\, v^\top I v}`, is many times the columns' spread. Where such a move also changes parameters as a
user reads them (other than the level of a softmax, which changes nothing), these are not identified. Scores serve
better than second derivatives here: a symmetry of the model makes every row's score along it zero at any point, while
its curvature is zero at the very minimum only. Rows are taken in small groups, each a replica of the problem.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.data.batch import random_part
from otpdag.errors import ModelError, listed
from otpdag.likelihood.row_posterior import BESIDE, Fitted
from otpdag.mechanisms import Categorical, Mechanism
from otpdag.mechanisms.base import Turning, abducted, can_abduct
from otpdag.mechanisms.generalised_linear import LogLinearCount
from otpdag.mechanisms.normal import LocationScale
from otpdag.mechanisms.parameters import Parameter
from otpdag.mechanisms.predictor import Predicted
from otpdag.problem import Units, differences, loss_and_gradient
from otpdag.spaces import Space
from otpdag.structure import Structure, pack
from otpdag.tables import feature_name

UNDETERMINED = "the data do not determine"  # how notes on flat directions begin

ENDLESS = "its slopes grow without end"  # said of slopes that have no estimate
ROTATED = "(a rotation of factors)"

# replicas times rows times points that are evaluated at a time: more would take more memory than a fit did
ENTRIES = 2**19

NO_EVENTS = -15.0  # the logarithm of a rate at which three million rows are expected to show one event

WIDE_STEP = 3e-3  # with which a direction that is flat on some rows is tried on all: wider than that of derivatives


def point_of(fitted: Fitted, keys: Iterable[str]) -> Tensor:
    """A model's raw parameters as a point (1, P) of the problem with these ``keys`` that it was fitted by."""
    raw = fitted.structure.raw(fitted.naturals) | dict(fitted.phi)
    return pack({key: raw[key] for key in keys})


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


def notes_on_scales(fitted: Fitted) -> list[str]:
    """Scales at their floor."""
    return [_scale_note(fitted, *low) for low in _scales_at_floors(fitted)]


def _scales_at_floors(fitted: Fitted, near: float = 1.05) -> list[tuple[LocationScale, Tensor, list[int]]]:
    """Mechanisms with scales of less than so many floors, the floors, and the configurations of discrete parents."""
    at_floors = []
    for node, mechanism in fitted.structure.mechanisms.items():
        if not isinstance(mechanism, LocationScale) or mechanism.spreads:
            continue
        if not mechanism.declared()["scale"].learned:
            continue
        floor, scale = mechanism.smallest_scale, fitted.naturals[node]["scale"][0]
        if floor is not None and bool((low := (scale <= near * floor.to(scale)).any(-1)).any()):
            at_floors.append((mechanism, floor, low.nonzero().flatten().tolist()))
    return at_floors


def _scale_note(fitted: Fitted, mechanism: LocationScale, floor: Tensor, rows: Sequence[int]) -> str:
    where = [_configuration(fitted, mechanism, row) for row in rows] if mechanism.scale_rows > 1 else []
    place = f" where {listed(where, most=4, show=str)}" if where else ""
    numbers = [name for name, _ in mechanism.family.continuous if name in fitted.structure.graph.hidden]
    if numbers:
        explain = "explain" if len(numbers) > 1 else "explains"
        why = f"a Heywood case: {', '.join(map(repr, numbers))} {explain} it without error"
    elif where:
        why = "its rows there are as good as equal"
    else:
        why = "its parents explain it without error" if mechanism.family.parents else "its rows are as good as equal"
    return (
        f"the scale of {mechanism.family.node!r}{place} is at its floor, {float(floor.min()):.3g}: {why}. floor= of "
        "its mechanism sets another"
    )


def _configuration(fitted: Fitted, mechanism: Mechanism, row: int) -> str:
    """The categories of the parents in a row of a table: ``z = 1, season = wet``."""
    parts = []
    for parent, space in reversed(mechanism.family.discrete):
        row, code = divmod(row, space.width)
        parts.append(f"{parent} = {fitted.labels(fitted.structure.base(parent))[code]}")
    return ", ".join(reversed(parts))


def notes_on_groups(fitted: Fitted, column: str | None, lengths: Tensor) -> list[str]:
    """Shared nodes that no row seems to read, and groups that are no more than rows."""
    structure, shared = fitted.structure, fitted.structure.shared
    told = [f"every group of {column!r} has one row, whose noise hardly differs from what groups share"]

    def slope(node: str, child: str) -> float:
        mechanism = structure.mechanisms[child]
        raw = mechanism.raw(fitted.naturals[child])
        sign = -torch.ones(1, dtype=torch.float64)
        turned = mechanism.turned(raw, (node,), sign) if isinstance(mechanism, Turning) else None
        return math.inf if turned is None else float((turned["weight"] - raw["weight"]).abs().max())

    readers = {node: set(structure.graph.children(node)).difference(shared) for node in shared}
    alike = [node for node in shared if max((slope(node, child) for child in readers[node]), default=1.0) < 1e-3]
    return (told if int(lengths.max()) == 1 else []) + [
        f"groups of {column!r} do not differ in {node!r}: the variance of what it adds is zero, the end of its range "
        "(a singular fit), and the model without it fits as well"
        for node in alike
    ]


# -- rows --------------------------------------------------------------------------------------------------------------


def notes_on_rows(fitted: Fitted, batch: Batch, flat: Sequence[FlatDirection], rows: int) -> list[str]:
    """Logits that separate their categories, parameters that are not determined, dependence that the graph denies.

    Args:
        fitted: The model.
        batch: Rows that it was fitted to, or some of them; rows that are alike may be one.
        flat: What the rows do not notice.
        rows: How many rows the table has.
    """
    separated = [node for node in fitted.structure.graph.observed if _is_separated(fitted, node, batch)]
    notes = [
        f"the parents of {node!r} separate some of its categories without error: {ENDLESS}, and their size means "
        "nothing. Leave a parent out, merge categories, or draw slopes to zero with weight=otp.ridge(2.0)"
        for node in separated
    ]
    notes += _notes_on_tables(fitted, rows)
    notes += _notes_on_identification(fitted, flat, separated)
    return notes + _notes_on_independence(fitted, batch)


def _notes_on_tables(fitted: Fitted, rows: int, enough: int = 5) -> list[str]:
    """Tables with fewer than ``enough`` rows of data for each state of the parents, and the terms that say less."""
    notes, hidden = [], fitted.structure.graph.hidden
    for node, mechanism in fitted.structure.mechanisms.items():
        if not isinstance(mechanism, Predicted) or mechanism.predictor.rows * enough <= rows:
            continue
        parents = {name: fitted.structure.base(name) for name, _ in mechanism.family.parents}
        if node in hidden or len(mechanism.family.discrete) < 2 or set(parents.values()) & set(hidden):
            continue
        terms = [_main_effect(name, space, fitted.labels(parents[name])) for name, space in mechanism.family.parents]
        many = isinstance(mechanism, Categorical) and any(one.startswith("C(") for one in terms)
        ridge = ", weight=otp.ridge(2.0)" if many else ""  # scikit-learn's default, of two categories
        notes.append(
            f"{node!r} has a table with a row for each of {mechanism.predictor.rows:,} joint states of its parents, "
            f"from {rows:,} rows of data: most are told by few or none. terms={' + '.join(terms)!r}{ridge} has "
            f"an effect of each parent instead{_drawn(mechanism)}"
        )
    return notes


def _drawn(mechanism: Predicted) -> str:
    """What a table that rows cannot fill is drawn to."""
    if not isinstance(mechanism, Categorical) or mechanism.shared is None:
        return ""
    return (
        "; each row of the table is drawn to what such effects say by "
        f"{float(mechanism.shared.sum(-1).max()):.3g} rows' worth of data "
        "(probs=otp.pseudo_counts(0): by none)"
    )


def _main_effect(name: str, space: Space, labels: Sequence[object]) -> str:
    """The term of a parent alone: a slope where the categories are numbers, as on scales."""
    name = name if name.isidentifier() else f"`{name}`"
    if not space.is_discrete:
        return name
    scale = len(labels) > 2 and all(isinstance(one, int | float) and not isinstance(one, bool) for one in labels)
    return f"scores({name})" if scale else f"C({name})"


def _is_separated(fitted: Fitted, node: str, batch: Batch, least: float = 1e-3) -> bool:
    """Whether slopes tell categories at a mean loss of so few nats, or change chances in a way that no row notices."""
    mechanism, family = fitted.structure.mechanisms[node], fitted.structure.graph.parents(node)
    complete = batch.shows((node, *family))
    has_slopes = "weight" in mechanism.declared() and mechanism.space.is_discrete
    if not has_slopes or not bool(complete.any()):
        return False
    parents, value = {name: batch.values[name][:, complete] for name in family}, batch.values[node][:, complete]
    with torch.no_grad():
        told, *beside = (mechanism.log_probs(one[node], parents, value) for one in (fitted.naturals, *fitted.beside))
    changes = any(float((one - told).abs().max()) > 0.01 * BESIDE for one in beside)
    return changes or float(-(told * value).nansum(-1).mean()) < least


def _notes_on_independence(
    fitted: Fitted, batch: Batch, *, least: float = 0.15, errors: float = 5.0, most: int = 5
) -> list[str]:
    """Pairs of nodes whose noise is independent by the graph, though the data say otherwise.

    Args:
        fitted: The model.
        batch: What it was fitted to.
        least: A correlation that matters.
        errors: By how many standard errors it must differ from none.
        most: Pairs that are named.
    """
    graph, noise = fitted.structure.graph, _noise(fitted, batch)
    if len({node for node, _ in noise}) < 2:
        return []
    names, correlation, both = list(noise), *_correlations(torch.stack(list(noise.values()), -1), batch.weight[0])
    clear = correlation.abs() > (errors / both.clamp(min=1).sqrt()).clamp(min=least)
    pairs: dict[tuple[str, str], float] = {}
    for left, right in torch.nonzero(clear.tril(-1)).tolist():
        one, other, by = names[right][0], names[left][0], float(correlation[left, right])
        if one != other and one not in graph.parents(other) and other not in graph.parents(one):
            pairs[one, other] = max(pairs.get((one, other), 0.0), by, key=abs)
    notes = []
    for (one, other), by in sorted(pairs.items(), key=lambda pair: -abs(pair[1]))[:most]:
        roots = not graph.parents(one) and not graph.parents(other)
        what = f"{one!r} and {other!r} are" if roots else f"the noise of {one!r} and of {other!r} is"
        notes.append(
            f"{what} independent by the graph, but correlated in the data ({by:.2f}): samples will not be. "
            "An edge or a common parent is missing"
        )
    left_out = len(pairs) - len(notes)
    return [*notes, *([f"{left_out} more pairs of nodes are correlated against the graph"] if left_out else [])]


def _noise(fitted: Fitted, batch: Batch, most: int = 6) -> dict[tuple[str, int], Tensor]:
    """By node and place, the noise (N,) of nodes whose parents are seen, NaN where it is not known.

    Of categories the indicators of ``most`` at most, less their probabilities; else normal scores, of counts in the
    middle of what makes the same count, for draws would blur it. Beyond three, they count as three: single rows do not
    make a correlation.
    """
    structure, scores = fitted.structure, {}
    collapsed = {mechanism.family.node for mechanism, _, _ in _scales_at_floors(fitted)}
    for node in structure.graph.observed:
        mechanism, family = structure.mechanisms[node], structure.graph.parents(node)
        # what is left of a collapsed one is rounding
        if node in collapsed or mechanism.is_given or not can_abduct(mechanism) or mechanism.space.cells != 1:
            continue
        complete = batch.shows((node, *family))
        if not bool(complete.any()) or mechanism.noise.dim != 1:
            continue
        params, value = fitted.naturals[node], batch.values[node]
        parents = {parent: batch.values[parent] for parent in family}
        if mechanism.space.is_discrete:
            some = slice(1, most + 1)
            noise = (value[..., some] - mechanism.log_probs(params, parents, value)[..., some].detach().exp())[0]
        else:
            noise = abducted(mechanism, params, value, parents, torch.full_like(value, 0.5)).detach()[0]
            noise = torch.special.ndtri(noise) if mechanism.noise.kind == "uniform" else noise
        for place, own in enumerate(noise.clamp(-3, 3).unbind(-1)):
            scores[node, place] = torch.where(complete & torch.isfinite(own), own, torch.nan)
    return scores


def _correlations(noise: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Correlations of all pairs of columns (n, k) over the rows that have both (k, k), and the weight of these rows."""
    known, scores = (~noise.isnan()).to(noise), noise.nan_to_num()
    weighted = weight.unsqueeze(-1) * scores
    both, total = known.T @ (weight.unsqueeze(-1) * known), weighted.T @ known
    count = both.clamp(min=1)
    covariance = scores.T @ weighted - total * total.T / count
    spread = (weighted * scores).T @ known - total.square() / count
    correlation = covariance / (spread * spread.T).sqrt().clamp(min=1e-300)
    return torch.where(both < 3, 0.0, correlation), both


# -- identification ----------------------------------------------------------------------------------------------------

# node, parameter and index in the layout of the mechanism, without the replica axis
ParameterName = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class FlatDirection:
    """A move of parameters that the data do not notice.

    Attributes:
        names: The parameters that it changes most, in the order of the graph.
        move: The raw parameters (P,) along it, of length one.
    """

    names: tuple[ParameterName, ...]
    move: Tensor = field(repr=False, compare=False)

    @property
    def nodes(self) -> set[str]:
        """Whose parameters they are."""
        return {node for node, _, _ in self.names}


def _notes_on_identification(fitted: Fitted, flat: Sequence[FlatDirection], told: Collection[str]) -> list[str]:
    """Parameters that the data do not determine, those of the same nodes together.

    ``told`` are nodes of which other notes say that their parameters mean nothing.
    """
    sets: list[list[FlatDirection]] = []
    for direction in flat:
        if not direction.nodes <= set(told):
            near = [own for own in sets if any(direction.nodes & one.nodes for one in own)]
            sets = [own for own in sets if own not in near]
            sets.append([*(one for own in near for one in own), direction])
    return [_flat_note(fitted, own) for own in sets]


def _flat_note(fitted: Fitted, directions: Sequence[FlatDirection]) -> str:
    names = list(dict.fromkeys(_parameter(fitted, name) for one in directions for name in one.names))
    shown = listed(names, most=6, show=str)
    read = {_input(fitted, name) for one in directions for name in one.names}
    factors = [node for node in fitted.structure.graph.hidden if node in read]
    if len(factors) > 1:
        return (
            f"{UNDETERMINED} the slopes on {listed(factors)}: turned together {ROTATED}, they leave the likelihood as "
            "it is; fix some at zero, as in weight=[nan, 0.0], or see result.rotated_loadings()"
        )
    if len(names) == 1:
        node, parameter, index = directions[0].names[0]
        is_count = isinstance(fitted.structure.mechanisms[node], LogLinearCount) and parameter == "log_rate"
        if is_count and float(fitted.naturals[node][parameter][0][index]) < NO_EVENTS:
            return f"no event was seen behind the {shown}: the data bound it from above only, as summary() says"
        return f"{UNDETERMINED} the {shown}: whatever it is, the likelihood is the same; fix it"
    many = "" if len(directions) == 1 else f" in {len(directions)} ways"
    return (
        f"{UNDETERMINED} the {shown}: moved together{many}, they leave the likelihood as it is; fix or tie a parameter"
    )


def _parameter(fitted: Fitted, name: ParameterName) -> str:
    node, parameter, index = name
    mechanism = fitted.structure.mechanisms[node]
    text = f"{parameter} of {node!r}"
    if not isinstance(mechanism, Predicted) or not index:
        return text
    if parameter == "weight":
        return f"{text} on {_input(fitted, name)!r}"
    rows = mechanism.declared()[parameter].shape[0]
    return f"{text} where {_configuration(fitted, mechanism, index[0])}" if rows > 1 else text


def _input(fitted: Fitted, name: ParameterName) -> str | None:
    """What a slope is multiplied with."""
    node, parameter, index = name
    mechanism = fitted.structure.mechanisms[node]
    if parameter != "weight" or not isinstance(mechanism, Predicted):
        return None
    features = mechanism.axes()["weight"][0]
    inputs = [parent for parent, width in features.coordinates for _ in range(width)]
    return (inputs or [feature_name(fitted, one) for one in features.features])[index[0]]


def flat_directions(problem: Units, point: Tensor) -> list[FlatDirection]:
    """Moves at a minimum (1, P) that the data do not notice, and the parameters that they change.

    None of a problem that is too large to be checked, or that has no derivative there.

    Args:
        problem: What was minimised, as a mean over rows.
        point: Its minimum.
    """
    asked, found = vars(problem).get("asked_flat", (None, []))  # kept with it: notes and standard errors ask the same
    if asked is None or not torch.equal(asked, point):
        found = []
        with suppress(ModelError, RuntimeError):  # a density without a derivative there
            if _can_be_checked(problem):
                found = _flat_directions(problem, point.to(problem.weight))
        vars(problem)["asked_flat"] = point, found
    return found


def _can_be_checked(problem: Units, rows: int = 400, parameters: int = 120, work: int = 2_000_000) -> bool:
    """Whether a check takes no longer than most fits: so many parameters, and rows times points times parameters."""
    size = sum(math.prod(shape) for shape in problem.shapes.values())
    if not 0 < size <= parameters or any(".network." in key or ".module." in key for key in problem.shapes):
        return False
    return min(problem.rows, rows) * problem.pace.points_per_row * size <= work


def _flat_directions(problem: Units, point: Tensor, rows: int = 400, largest_error: float = 5.0) -> list[FlatDirection]:
    """Directions are looked for on so many rows and tried on all; a standard error of so many spreads is none."""
    total = float(problem.weight.sum())
    if total < 2 * point.shape[1]:
        return []  # too few rows to tell what is flat from what they lack
    small = 1 / (largest_error**2 * total)
    problem, known = _known(problem, point, rows)
    values, vectors = torch.linalg.eigh(known)
    if not bool(torch.isfinite(values).all()):
        return []
    nearly, _ = _that_change_something(problem, point, vectors[:, values < small])
    if not nearly.shape[1]:
        return []

    def gradients(points: Tensor) -> Tensor:
        return loss_and_gradient(problem.loss, points)[1]

    # along a symmetry the loss bends as much as it still falls
    most = small + 4 * float(gradients(point).norm())
    # scores of columns that follow from each other cancel too, though each has a curvature of its own on all rows
    slopes = differences(gradients, point, nearly.T, step=WIDE_STEP, at_once=_at_once(problem))
    bending = nearly.T @ slopes.T
    values, mixed = torch.linalg.eigh(0.5 * (bending + bending.T))
    level = values.abs() < most
    basis = nearly @ mixed[:, level]
    # of the flat moves those that change parameters, as few and as plain as there are
    flat, changes = _that_change_something(problem, point, basis)
    curvature = ((basis.T @ flat).square() * values[level].unsqueeze(1)).sum(0).abs()
    # per unit of change in what a user reads, lest a move that changes next to nothing pass for a flat one
    is_flat = curvature < most * changes.square().sum(0)
    found = zip(flat.T[is_flat], changes.T[is_flat], strict=True)
    return [FlatDirection(_named(problem, change), _plain(direction)) for direction, change in found]


def _known(
    problem: Units, point: Tensor, rows: int, well_known: float = 1e7, one_by_one: int = 20_000
) -> tuple[Units, Tensor]:
    """The problem that is looked at, and the information of one row.

    Beyond ``well_known`` of a parameter, sums have lost the digits that tell the flat directions of others: so many
    rows are looked at one by one then.
    """
    known = problem.curvature(point)
    if known is not None and not float(known.diagonal().max()) < well_known:
        problem, known = problem.row_by_row(one_by_one).laid_out_for(point), None
    if known is None:
        size = point.shape[1]
        known = row_information(problem, point, rows=max(rows, 2 * size), groups=2 * size)
    return problem, known


def row_information(problem: Units, point: Tensor, *, rows: int | None = None, groups: int | None = None) -> Tensor:
    """The information of one row, (P, P): the mean square of scores at ``point`` (1, P), in raw parameters.

    Args:
        problem: What was minimised; it must be the same in every evaluation.
        point: Where.
        rows: On so many random rows; on all if left out.
        groups: How many groups of rows the scores are taken of; each row is its own if left out.
    """
    chosen_rows = None if rows is None else random_part(problem.rows, rows, seed=0)
    part = problem if chosen_rows is None else problem.subset(chosen_rows).laid_out_for(point)
    units = part.weight.shape[1]
    groups = units if groups is None else min(groups, units)
    member = torch.arange(units) % groups
    total = point.new_zeros(point.shape[1], point.shape[1])
    for chosen in torch.arange(groups).split(_at_once(part)):
        factors = (member == chosen.unsqueeze(1)).to(part.weight)
        share = (factors * part.weight).sum(-1, keepdim=True)
        scores = share * loss_and_gradient(part.reweighted(factors).loss, point.expand(len(chosen), -1))[1]
        total += scores.T @ scores
    return total / part.weight.sum()


def _at_once(problem: Units, replicas: int = 32) -> int:
    """Replicas that are evaluated together, which bounds memory."""
    return max(1, min(replicas, ENTRIES // max(1, problem.rows * problem.pace.points_per_row)))


def _that_change_something(
    problem: Units, point: Tensor, directions: Tensor, nothing: float = 1e-3
) -> tuple[Tensor, Tensor]:
    """The moves (P, K) mixed so that each changes something of its own, and what they change (entries, K).

    Moves that change less than ``nothing`` a user reads, in units of the data, are left out: those of unused entries of
    a factor are flat on any rows, and to try them on all would cost passes and tell nothing.
    """
    if not directions.shape[1]:
        return directions, directions[:0]

    def readable(points: Tensor) -> Tensor:
        """Natural parameters of every replica (R, entries), each divided by its unit; logits without their level."""
        values, naturals = {}, problem.naturals(points)
        for node, name, parameter in _learned(problem):
            value = naturals[node][name].detach().expand(len(points), *parameter.shape)
            if isinstance(problem.structure.mechanisms[node], Categorical) and name in ("logits", "weight"):
                value = value - value.mean(-1, keepdim=True)
            values[f"{node}.{name}"] = value if parameter.unit is None else value / parameter.unit.to(value)
        return pack(values)

    changes = differences(readable, point, directions.T, at_once=2 * directions.shape[1]).T
    _, strengths, mixed = torch.linalg.svd(changes, full_matrices=False)
    kept = mixed[strengths > nothing].T
    return directions @ kept, changes @ kept


def _plain(direction: Tensor, by_chance: float = 0.01) -> Tensor:
    """A move of length one without parameters of so small a share in it: these come from the choice of rows."""
    move = direction.where(direction.abs() > by_chance * direction.abs().max(), 0.0)
    return move / move.norm()


def _learned(problem: Units) -> Iterator[tuple[str, str, Parameter]]:
    for node, mechanism in problem.structure.mechanisms.items():
        for name, parameter in mechanism.declared().items():
            if parameter.learned and not name.startswith(("network.", "module.")):
                yield node, name, parameter


def _named(problem: Units, change: Tensor, takes_part: float = 0.2) -> tuple[ParameterName, ...]:
    """Parameters that change by so much of the largest change."""
    entries: list[ParameterName] = []
    for node, name, parameter in _learned(problem):
        entries += [(node, name, tuple(map(int, index))) for index in torch.ones(parameter.shape).nonzero().tolist()]
    size = change.abs()
    return tuple(entry for entry, own in zip(entries, size, strict=True) if own >= takes_part * size.max())
