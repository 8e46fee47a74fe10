"""A first guess of what a table or sequences do not show, before any parameter is known: starts are fitted to it.

A hidden category starts from k-means on the columns around it, a hidden number from their principal components; what
one hidden node explains is removed before the next is guessed. Restarts differ in seeds, columns and rotation. In
sequences, earlier values are further columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import scipy as sp
import torch
from torch import Tensor

from otpdag.clustering import k_means, nearest
from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.mechanisms.base import Sloped
from otpdag.mechanisms.parameters import Between
from otpdag.numerics import Array
from otpdag.spaces import Space
from otpdag.structure import Structure, lag_name

Guesses = dict[str, Array]
CLUSTERED_ROWS = 2000  # that clusters and components are looked for among: more change neither
RESCALED, NOISE = 0.3, 0.3  # by how much restarts rescale columns, in logarithms, and what they add to components
LONGEST_STAY = 6  # steps around a guessed state that restarts look at, fewer than so many
SOFTNESS = 0.1  # share of a label that is spread over all clusters: a table that starts with zeros would keep them


def complete_table(
    structure: Structure,
    batch: Batch,
    generator: np.random.Generator,
    *,
    first: bool,
    even_categories: bool = False,
    standard_numbers: bool = False,
) -> dict[str, Tensor]:
    """One completed table (N, width) for each node: missing cells filled, hidden nodes guessed.

    With ``even_categories`` hidden categories are as likely as one another in every row, and with ``standard_numbers``
    hidden numbers that may have any value have mean zero and spread one, as every guess of them has: enough for units,
    which depend on each number alone.
    """
    filled = {node: _fill(structure, batch, node, generator) for node in structure.graph.observed}
    weight = batch.weight[0].double().cpu().numpy()
    share = weight / weight.sum()
    guesses: Guesses = {}
    # nodes near the leaves first: they explain the columns, and are explained by what lies above
    for node in [n for n in reversed(structure.graph.order) if n in structure.graph.hidden]:
        space = structure.mechanisms[node].space
        if even_categories and space.is_discrete:
            guesses[node] = np.full((len(share), space.width), 1 / space.width)
        elif standard_numbers and space.is_unbounded:
            signs = np.where(np.arange(len(share)) % 2, 1.0, -1.0)
            guesses[node] = np.repeat(signs[:, None], space.width, 1)
        else:
            columns = _columns_around(structure, node, filled, guesses)
            lasts = bool(structure.longest_lag(node))
            guess = _guess(space, columns, share, generator, first=first and not guesses, lasts=lasts)
            sign = _given_sign(structure, node, guess, filled | guesses) if space.is_unbounded else 1.0
            guesses[node] = sign * guess
    like = next(iter(batch.values.values()))
    return {node: torch.as_tensor(value).to(like) for node, value in (filled | guesses).items()}


def _fill(structure: Structure, batch: Batch, node: str, generator: np.random.Generator) -> Array:
    """A column with missing cells drawn from its seen ones; only starts and units come from this."""
    seen, value = (held[node][0].cpu().numpy() for held in (batch.mask, batch.values))
    value = value.astype(float, copy=not seen.all())
    for cell in range(0 if seen.all() else seen.shape[-1]):
        missing = np.flatnonzero(~seen[:, cell])
        known = np.flatnonzero(seen[:, cell])
        if len(missing) and len(known):
            donors = generator.choice(known, size=len(missing))
            if structure.mechanisms[node].space.is_discrete:
                value[missing] = value[donors]
            else:
                value[missing, cell] = value[donors, cell]
    return value


def _columns_around(structure: Structure, node: str, filled: Mapping[str, Array], guesses: Guesses) -> Array:
    """Standardised columns that tell of a hidden node: its blanket's observed nodes and guessed hidden children."""
    graph = structure.graph
    blanket = graph.markov_blanket(node)
    near = [n for n in blanket if n in filled]
    children = {name: value for name, value in guesses.items() if name in graph.children(node)}
    if not near and not children:
        near = list(graph.observed_descendants(node))
    columns = [structure.mechanisms[n].space.comparable(filled[n]) for n in near]
    rows = len(next(iter(filled.values())))
    others = {name: value for name, value in guesses.items() if name not in children}
    explained = [value for name, value in others.items() if set(graph.children(name)) & set(near)]
    matrix = np.concatenate(columns, 1) if columns else np.zeros((rows, 0))
    if explained and matrix.shape[1]:
        matrix = _residual(matrix, np.concatenate(explained, 1))
    extra = [structure.mechanisms[n].space.comparable(value) for n, value in children.items()]
    return np.concatenate([matrix, *extra], 1) if extra else matrix


def _residual(matrix: Array, explained: Array) -> Array:
    design = np.concatenate([explained, np.ones((len(matrix), 1))], 1)
    coefficients, *_ = np.linalg.lstsq(design, matrix, rcond=None)
    residual = matrix - design @ coefficients
    spread = residual.std(0)
    return residual / np.where(spread > 1e-9, spread, 1.0)


def _guess(
    space: Space, columns: Array, share: Array, generator: np.random.Generator, *, first: bool, lasts: bool = False
) -> Array:
    if columns.shape[1] == 0:
        columns = generator.standard_normal((len(columns), 2))
    if space.is_discrete:
        return _clusters(columns, share, space.width, generator, first=first, lasts=lasts)
    scores = _components(columns, space.width, generator, first=first)
    if space.is_skewed:
        scores = _leaning_right(scores, generator, first=first)
    return space.from_scores(scores)


def _leaning_right(scores: Array, generator: np.random.Generator, *, first: bool) -> Array:
    """Components that point the way in which they are skewed, as counts and positive numbers are; restarts try both."""
    sign = np.where((scores**3).mean(0) < 0, -1.0, 1.0)
    return scores * (sign if first else sign * generator.choice([-1.0, 1.0], scores.shape[1]))


def _clusters(
    columns: Array, share: Array, size: int, generator: np.random.Generator, *, first: bool, lasts: bool = False
) -> Array:
    """Soft labels of the rows; restarts look at a random rescaling of the columns, some at random directions.

    Of states that do not last, most restarts have a random row as the centre of each, with the spread of all rows, and
    random weights: k-means leads to optima in which states are alike in size.
    Labels are never quite hard: a table that starts with zeros would keep them.
    """
    if not first and not lasts and generator.random() < 0.75:
        centres = columns[generator.choice(len(share), size, p=share)]
        apart = ((columns**2).sum(1, keepdims=True) + (centres**2).sum(1)) / 2 - columns @ centres.T
        return sp.special.softmax(np.log(generator.dirichlet(np.ones(size))) - apart, axis=1)
    if not first:
        columns = columns * np.exp(generator.normal(0.0, 1.0, columns.shape[1]))
    if not first and lasts and generator.random() < 0.4:
        scores = columns @ generator.standard_normal((columns.shape[1], size))
        return sp.special.softmax(2 * scores / np.maximum(scores.std(0), 1e-9), axis=1)
    sample = columns[generator.choice(len(share), min(len(columns), CLUSTERED_ROWS), p=share)]
    runs = [k_means(sample, size, generator) for _ in range(3 if first else 1)]
    centres = min(runs, key=lambda run: run[1])[0]
    labels = np.eye(size)[nearest(columns, centres)]
    return (1 - SOFTNESS) * labels + SOFTNESS / size


def _given_sign(structure: Structure, node: str, guess: Array, known: Mapping[str, Array]) -> Array:
    """Minus one for components (width,) that move against children whose given slopes or bounds say with, or reverse.

    A factor that is marked by a loading of one does not turn round by descent: its scale goes to zero on the way.
    """
    agreement = np.zeros(guess.shape[1])
    for child in structure.graph.children(node):
        mechanism = structure.mechanisms[child]
        weight = mechanism.declared().get("weight")
        if child not in known or weight is None or not isinstance(mechanism, Sloped):
            continue
        given = (
            weight.constant(child, "weight").nan_to_num() if weight.has_value else torch.zeros(weight.shape).double()
        )
        given = weight.support.inside(given) if isinstance(weight.support, Between) else given
        slopes = mechanism.slopes({"weight": given.unsqueeze(0)}, node)
        if slopes is not None:
            agreement += slopes[0].numpy() * ((guess - guess.mean(0)).T @ known[child][:, -1])
    return np.where(agreement < 0, -1.0, 1.0)


def _components(columns: Array, dim: int, generator: np.random.Generator, *, first: bool) -> Array:
    """Standardised principal components; restarts rotate the leading ones and rescale the columns."""
    if not first:
        columns = columns * np.exp(generator.normal(0.0, RESCALED, columns.shape[1]))
    centred = columns - columns.mean(0)
    _, _, directions = np.linalg.svd(centred[:: max(1, len(centred) // CLUSTERED_ROWS)], full_matrices=False)
    scores = centred @ directions[:dim].T
    if scores.shape[1] < dim:
        scores = np.concatenate([scores, generator.standard_normal((len(scores), dim - scores.shape[1]))], 1)
    if dim > 1 and not first:
        rotation, _ = np.linalg.qr(generator.standard_normal((dim, dim)))
        scores = (scores / np.maximum(scores.std(0), 1e-9)) @ rotation
    spread = scores.std(0)
    noise = 0.0 if first else NOISE
    scores = scores / np.where(spread > 1e-9, spread, 1.0)
    return scores + noise * generator.standard_normal(scores.shape)


def row_weights(structure: Structure, batch: Batch) -> dict[str, Tensor]:
    """How much each row tells of each node (N,): its weight, where the node is seen or hidden."""
    weight, seen = batch.weight[0], {node: mask[0].all(-1) for node, mask in batch.mask.items()}
    return {node: weight * seen[node] if node in seen else weight for node in structure.mechanisms}


def complete_steps(
    structure: Structure,
    batch: SequenceBatch,
    generator: np.random.Generator,
    *,
    first: bool,
    reach: int = 0,
    even_categories: bool = False,
) -> dict[str, Tensor]:
    """Completed steps (M, width) with earlier values under their own names; what groups share is a mean over each.

    With a ``reach``, hidden numbers are averaged over so many steps around; with ``even_categories``, hidden categories
    are not guessed (see :func:`complete_table`).
    """
    completed = complete_table(structure, batch.steps, generator, first=first, even_categories=even_categories)
    if reach:
        completed = _smoothed(structure, batch, completed, reach)
    for node in structure.shared:
        mean = torch.segment_reduce(completed[node], "mean", lengths=batch.lengths)
        even = (mean - mean.mean(0)) / mean.std(0).clamp(min=1e-9)
        completed[node] = even.repeat_interleave(batch.lengths, 0)
    if not first and not even_categories:
        completed = _lasting(structure, batch, completed, int(generator.integers(LONGEST_STAY)))
    lags = ((edge.parent, edge.by) for edge in structure.graph.lags)
    earlier = {lag_name(node, by): batch.lagged(completed[node].unsqueeze(0), by)[0] for node, by in lags}
    return {**completed, **earlier}


def random_moves(
    structure: Structure, start: Mapping[str, dict[str, Tensor]], generator: np.random.Generator
) -> dict[str, dict[str, Tensor]]:
    """Evenly drawn tables of the states of chains for half of all restarts; none for the others.

    Labels that are guessed step by step always say that states last as the columns do, and optima differ in that.
    """
    if generator.random() < 0.5:
        return {}
    lasting = [node for node in structure.hidden_categories if structure.longest_lag(node)]
    declared = {node: structure.mechanisms[node].declared().get("probs") for node in lasting}
    tables = {node: start[node]["probs"] for node, one in declared.items() if one is not None and not one.has_value}
    drawn = {node: generator.dirichlet(np.ones(one.shape[-1]), one.shape[:-1]) for node, one in tables.items()}
    return {node: {**start[node], "probs": torch.as_tensor(one).to(tables[node])} for node, one in drawn.items()}


def _lasting(structure: Structure, batch: SequenceBatch, completed: dict[str, Tensor], reach: int) -> dict[str, Tensor]:
    """Guessed states that last: of each step the state that most of the steps around it are in."""
    kept = dict(completed)
    for node in structure.hidden_categories if reach else ():
        if structure.longest_lag(node):
            mean = _averaged(batch, completed[node], reach)
            size = mean.shape[-1]
            kept[node] = (1 - SOFTNESS) * torch.eye(size).to(mean)[mean.argmax(-1)] + SOFTNESS / size
    return kept


def _averaged(batch: SequenceBatch, value: Tensor, reach: int) -> Tensor:
    """Values (M, width) averaged over so many steps before and after."""
    left = batch.lengths.repeat_interleave(batch.lengths) - 1 - batch.times
    shifts = [torch.arange(batch.rows) + torch.minimum(left, torch.full_like(left, k)) for k in range(1, reach + 1)]
    shifts += [torch.arange(batch.rows) - batch.times.clamp(max=k) for k in range(1, reach + 1)]
    return torch.stack([value, *(value[at] for at in shifts)]).mean(0)


def _smoothed(
    structure: Structure, batch: SequenceBatch, completed: dict[str, Tensor], reach: int
) -> dict[str, Tensor]:
    """Guessed hidden numbers averaged over neighbouring steps, and scaled so that what is new in a step has spread one.

    The guess of a number from its own step alone explains its children without noise, a trap that no descent leaves.
    """
    smooth = dict(completed)
    for node in structure.graph.hidden:
        if not structure.mechanisms[node].space.is_unbounded or not structure.longest_lag(node):
            continue
        mean = _averaged(batch, completed[node], reach)
        before = batch.lagged(mean.unsqueeze(0), 1)[0]
        slope = (mean * before).sum(0) / (before**2).sum(0).clamp(min=1e-12)
        fresh = (mean - slope * before)[batch.times > 0]
        spread = fresh.std(0) if len(fresh) > 1 else torch.ones_like(slope)
        smooth[node] = mean / torch.where(spread > 1e-6, spread, torch.ones_like(spread))
    return smooth


def step_weights(structure: Structure, batch: SequenceBatch) -> dict[str, Tensor]:
    """One for the steps that a mechanism makes, zero for first steps (or, of ``z[0]``, for all others): (M,)."""
    weights = {}
    for name in structure.mechanisms:
        base, made = structure.base(name), structure.makes(name, batch.times)
        if base in batch.steps.mask:
            made = made & batch.steps.mask[base][0].all(-1)
        weights[name] = made.to(batch.steps.weight)
    return weights
