"""What a fitted model says of sequences: state probabilities, likeliest paths, draws, likelihoods.

Hidden categories are enumerated. Hidden numbers are weighted particles forward (Gordon, Salmond and Smith, 1993), and
draws of whole paths backward (Godsill, Doucet and West, 2004): these ask nothing of the mechanisms but draws and
densities, so that they serve any model, at the price of Monte Carlo error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from otpdag.data.sequences import SequenceBatch
from otpdag.errors import ModelError
from otpdag.likelihood.chain_layout import Block, Chain, Linear, lay_out_chain, one_block, potentials, with_earlier
from otpdag.likelihood.chain_messages import filtered, marginals
from otpdag.likelihood.row_posterior import Fitted
from otpdag.likelihood.unrolled import has_unknown_parents, window_draws, window_log_likelihood
from otpdag.numerics import Array, Ints, at_work
from otpdag.simulation import draw
from otpdag.structure import Structure, lag_name

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Smoothed:
    """Probabilities of the joint states of each step (M, S), the log-likelihood of each sequence (N,), the states."""

    probabilities: Tensor
    log_likelihood: Tensor
    chain: Chain

    def of(self, node: str) -> Tensor:
        """Probabilities of one hidden category (M, K)."""
        return self.probabilities @ self.chain.states.now[node]


def smooth(fitted: Fitted, batch: SequenceBatch) -> Smoothed:
    """Run forward and backward over all sequences."""
    chain, linear = _laid_out(fitted, batch)
    probabilities = torch.empty(batch.rows, chain.states.size, dtype=torch.float64)
    log_likelihood = torch.zeros(len(batch.lengths), dtype=torch.float64)
    for block in chain.blocks:
        part = marginals(block, linear, chain)
        probabilities[block.rows] = part.state[0].T
        log_likelihood.index_add_(0, block.sequences[block.owners], part.log_scale[0])
    return Smoothed(probabilities, log_likelihood, chain)


def state_probabilities(fitted: Fitted, batch: SequenceBatch, node: str, draws: int = 200) -> Tensor:
    """Probabilities of one hidden category (M, K): exact, or shares of draws where numbers are hidden beside it.

    The standard error of a share of 200 is at most 0.035.
    """
    if not fitted.structure.hidden_numbers:
        return smooth(fitted, batch).of(node)
    return fill_in(fitted, batch, draws, torch.Generator().manual_seed(0))[node].mean(1)


def _laid_out(fitted: Fitted, batch: SequenceBatch) -> tuple[Chain, Linear]:
    chain = lay_out_chain(fitted.structure, batch)
    with torch.no_grad():
        return chain, Linear.of(potentials(fitted.structure, fitted.naturals, chain))


def decode_paths(fitted: Fitted, batch: SequenceBatch) -> tuple[dict[str, Tensor], Tensor]:
    """The likeliest path of all hidden categories together: states (M,) by node, and the log-probability of each."""
    chain, linear = _laid_out(fitted, batch)
    path = torch.empty(batch.rows, dtype=torch.int64)
    log_prob = torch.zeros(len(batch.lengths), dtype=torch.float64)
    for block in chain.blocks:
        best_path, best = _viterbi(block, linear, chain)
        path[block.rows], log_prob[block.sequences] = torch.from_numpy(best_path), torch.from_numpy(best)
    return {node: chain.states.now[node].argmax(-1)[path] for node in chain.states.nodes}, log_prob


def _viterbi(block: Block, linear: Linear, chain: Chain) -> tuple[Ints, Array]:
    """The best path of each sequence of a block, column by column, and its log-probability."""
    lanes, begins = block.whole, dict(block.whole.begins)
    log_unary, log_pair = (torch.log(linear.unary[0]) + linear.log_unit[0]).numpy(), torch.log(linear.pair[0]).numpy()
    kinds = block.kinds.numpy()[lanes.columns]
    origin = np.empty((len(kinds), len(log_unary), kinds.shape[1]), dtype=np.int16)
    score = np.zeros(origin.shape[1:])
    for place, (kind, rows) in enumerate(zip(kinds, chain.pair_rows.numpy()[kinds], strict=True)):
        joint = score[:, None] + log_pair[rows].transpose(1, 2, 0)
        origin[place] = joint.argmax(0)
        score = joint.max(0)
        if place in begins:
            score[:, begins[place]] = 0.0
        score += log_unary[:, kind]
    path, state = np.empty(kinds.shape, dtype=np.int64), score.argmax(0)
    for place in range(len(kinds) - 1, -1, -1):
        path[place] = state
        state = origin[place][state, np.arange(len(state))]
    return path.flatten()[lanes.place], score.max(0)


def log_likelihood(fitted: Fitted, batch: SequenceBatch, seed: int = 0, particles: int = 2000) -> Tensor:
    """Log-likelihood of each sequence (N,): exact for hidden categories, by particles for hidden numbers.

    Its error falls with the root of the number of particles.
    """
    if has_unknown_parents(fitted.structure, batch):
        return window_log_likelihood(fitted, batch)
    if not fitted.structure.hidden_numbers:
        return smooth(fitted, batch).log_likelihood
    with at_work(1):
        return filter_particles(fitted, batch, particles, torch.Generator().manual_seed(seed)).log_likelihood


def fill_in(
    fitted: Fitted, batch: SequenceBatch, draws: int, generator: torch.Generator, particles: int = 300
) -> dict[str, Tensor]:
    """Joint draws of every node given what the sequences show: (M, draws, width).

    Hidden categories are drawn exactly, backward in time after a forward pass, hidden numbers by particles, which takes
    their number times that of the draws; missing cells then from the model, forward in time. Where nothing is hidden
    and later steps tell of missing numbers, these are drawn with all that is missing around them.
    """
    structure = fitted.structure
    if has_unknown_parents(structure, batch):
        return _fill_windows(fitted, batch, draws, generator)
    if structure.hidden_numbers:
        with at_work(1):
            forward = filter_particles(fitted, batch, particles, generator)
            values = draw_paths(fitted, batch, forward, draws, generator)
        known = structure.graph.hidden
    else:
        chain, linear = _laid_out(fitted, batch)
        states = torch.empty(batch.rows, draws, dtype=torch.int64)
        for block in chain.blocks:
            states[block.rows] = _draw_paths(block, linear, chain, draws, generator)
        values = {node: chain.states.now[node][states] for node in chain.states.nodes}
        known = chain.states.nodes
    for node in structure.graph.observed:
        seen = batch.steps.values[node][0].unsqueeze(1).expand(-1, draws, -1)
        mask = batch.steps.mask[node][0]
        values[node] = seen.clone() if node not in values else torch.where(mask.unsqueeze(1), seen, values[node])
    missing = [n for n in structure.graph.order if n in batch.steps.mask and n not in known]
    missing = [n for n in missing if not bool(batch.steps.mask[n].all())]
    _draw_cells(fitted, batch, values, generator, missing)
    return values


def _fill_windows(fitted: Fitted, batch: SequenceBatch, draws: int, generator: torch.Generator) -> Values:
    """Draws of what is missing in windows; of steps before them, from the model alone."""
    values = {n: seen[0].unsqueeze(1).repeat(1, draws, 1) for n, seen in batch.steps.values.items()}
    _draw_cells(fitted, batch, values, generator, fitted.structure.graph.order)
    seed = int(torch.randint(2**31, (1,), generator=generator))
    for node, rows, drawn in window_draws(fitted, batch, draws, seed):
        values[node][rows] = drawn
    return values


def _draw_paths(block: Block, linear: Linear, chain: Chain, draws: int, generator: torch.Generator) -> Tensor:
    """Paths of states given all of each sequence (m, draws), column by column: filtered forward, drawn backward."""
    lanes, moves = block.whole, linear.pair[0].transpose(1, 2)
    alpha = torch.from_numpy(filtered(block, linear, chain)[:, 0]).transpose(1, 2)
    inside, rows = torch.from_numpy(lanes.inside), chain.pair_rows[block.kinds[torch.from_numpy(lanes.columns)]]
    path = torch.empty(*rows.shape, draws, dtype=torch.int64)
    for place in range(len(rows) - 1, -1, -1):
        weight = alpha[place].unsqueeze(1).expand(-1, draws, -1)
        if place + 1 < len(rows):
            later = path[place + 1].unsqueeze(-1).expand(-1, -1, alpha.shape[-1])
            weight = torch.where(inside[place, :, None, None], weight * moves[rows[place + 1]].gather(1, later), 1.0)
        path[place] = torch.multinomial(weight.flatten(0, 1), 1, generator=generator).reshape(-1, draws)
    return path.flatten(0, 1)[torch.from_numpy(lanes.place)]


def _draw_cells(
    fitted: Fitted, batch: SequenceBatch, values: Values, generator: torch.Generator, nodes: Sequence[str]
) -> None:
    """Draw missing cells of some observed nodes from their mechanisms, step by step, in place."""
    block, structure = one_block(batch), fitted.structure
    for step, (at, size) in enumerate(block.spans):
        rows = block.rows[at : at + size]
        for node in nodes:
            seen = batch.steps.mask[node][0][rows]
            gaps = ~seen.all(-1)
            if not bool(gaps.any()):
                continue
            own, keep = rows[gaps], seen[gaps].unsqueeze(1)
            parents = {p: values[p][own].unsqueeze(0) for p in structure.graph.parents(node)}
            for parent, by in structure.graph.lagged_parents(node):
                parents[lag_name(parent, by)] = values[parent][own - min(by, step)].unsqueeze(0)
            shape = (len(own), values[node].shape[1])
            drawn = draw(structure, fitted.naturals, node, parents, shape, generator)[0]
            values[node][own] = torch.where(keep, values[node][own], drawn)


# -- particles --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Particles:
    """Particles of every step, (n, P, width) by hidden node, their normalised log-weights, and the likelihood."""

    block: Block
    values: list[Values]
    log_weight: list[Tensor]
    log_likelihood: Tensor


@dataclass(frozen=True)
class _Walk:
    """One step of all sequences that have one: what is seen now and earlier."""

    fitted: Fitted
    batch: SequenceBatch
    block: Block

    @property
    def structure(self) -> Structure:
        """Graph and mechanisms."""
        return self.fitted.structure

    def seen(self, step: int) -> tuple[Values, Values]:
        """Observed values and masks (n, 1, width) of a step, earlier ones included."""
        at, size = self.block.spans[step]
        rows = self.block.rows[at : at + size]
        values, mask = ({name: one[0][rows].unsqueeze(1) for name, one in held.items()} for held in self._known)
        return values, mask

    @cached_property
    def _known(self) -> tuple[Values, Values]:
        return with_earlier(self.structure, self.batch)

    def name(self, node: str, step: int) -> str | None:
        """The mechanism that makes a node in this step; None if an observed one is conditioned on."""
        name = self.structure.name_at(node, step)
        return name if name != node or step >= self.structure.longest_lag(node) else None

    def log_prob(self, name: str, values: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> Tensor:
        """Log-density of a node's seen cells; zero where an observed parent is missing."""
        base = self.structure.base(name)
        parents = {p: value.unsqueeze(0) for p, value in self.structure.parents(name, values).items()}
        seen = mask[base].unsqueeze(0) if base in mask else None
        mechanism, params = self.structure.mechanisms[name], self.fitted.naturals[name]
        log_density = mechanism.log_prob(params, values[base].unsqueeze(0), parents, seen)[0]
        for parent in parents:
            if parent in mask:
                log_density = torch.where(mask[parent].all(-1), log_density, 0.0)
        return log_density


def filter_particles(fitted: Fitted, batch: SequenceBatch, count: int, generator: torch.Generator) -> Particles:
    """Run the filter over all sequences side by side."""
    block, structure = one_block(batch), fitted.structure
    walk = _Walk(fitted, batch, block)
    hidden = structure.graph.hidden
    longest = max((edge.by for edge in structure.graph.lags), default=1)
    log_likelihood = torch.zeros(len(batch.lengths), dtype=torch.float64)
    kept: list[Values] = []
    weights: list[Tensor] = []
    past: list[Values] = []
    for step, (_, size) in enumerate(block.spans):
        values, mask = walk.seen(step)
        past = [{node: value[:size] for node, value in earlier.items()} for earlier in past]
        for edge in structure.graph.lags:
            if edge.parent in hidden and edge.by <= len(past):
                values[lag_name(edge.parent, edge.by)] = past[-edge.by][edge.parent]
        log_weight = torch.zeros(size, count, dtype=torch.float64)
        for node in structure.graph.order:
            name = walk.name(node, step)
            if node in hidden:
                seen = {known: value.unsqueeze(0) for known, value in values.items()}
                drawn = draw(structure, fitted.naturals, name or node, seen, (size, count), generator)
                values[node] = drawn[0]
            elif name is not None and not structure.mechanisms[node].is_given:
                log_weight = log_weight + walk.log_prob(name, values, mask)
        total = torch.logsumexp(log_weight, -1, keepdim=True)
        log_likelihood[block.sequences[:size]] += total[:, 0] - torch.log(torch.tensor(float(count)))
        particles = {node: values[node].expand(size, count, -1) for node in hidden}
        kept.append(particles)
        weights.append(log_weight - total)
        index = torch.multinomial(torch.exp(weights[-1]), count, replacement=True, generator=generator)
        past = [*past, particles][-longest:]
        past = [{n: v.gather(1, index.unsqueeze(-1).expand(-1, -1, v.shape[-1])) for n, v in p.items()} for p in past]
    return Particles(block, kept, weights, log_likelihood)


def draw_paths(
    fitted: Fitted, batch: SequenceBatch, particles: Particles, draws: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Paths of the hidden nodes given all of each sequence: (M, draws, width), in the order of the batch's rows."""
    block, structure = particles.block, fitted.structure
    if any(edge.by > 1 for edge in structure.graph.lags if edge.parent in structure.graph.hidden):
        raise ModelError("draws of hidden numbers are for lags of one step")
    walk = _Walk(fitted, batch, block)
    widths = {node: structure.mechanisms[node].space.width for node in structure.graph.hidden}
    paths = {node: torch.empty(batch.rows, draws, width, dtype=torch.float64) for node, width in widths.items()}
    later: Values = {}
    for step in range(len(block.spans) - 1, -1, -1):
        at, size = block.spans[step]
        log_weight = particles.log_weight[step].unsqueeze(1).expand(-1, draws, -1)
        if later:
            many = next(iter(later.values())).shape[0]
            link = _link(walk, step + 1, {n: v[:many] for n, v in particles.values[step].items()}, later)
            log_weight = torch.cat([log_weight[:many] + link, log_weight[many:]])
        chosen = torch.multinomial(torch.softmax(log_weight, -1).flatten(0, 1), 1, generator=generator)
        chosen = chosen.reshape(size, draws)
        later = {}
        for node, value in particles.values[step].items():
            later[node] = value.gather(1, chosen.unsqueeze(-1).expand(-1, -1, value.shape[-1]))
            paths[node][block.rows[at : at + size]] = later[node]
    return paths


def _link(walk: _Walk, step: int, before: Values, later: Values) -> Tensor:
    """Log-density of what follows (n, draws) given each particle of the step before: (n, draws, P)."""
    values, mask = walk.seen(step)
    values = {name: value.unsqueeze(2) for name, value in values.items()}
    mask = {name: value.unsqueeze(2) for name, value in mask.items()}
    values |= {node: value.unsqueeze(2) for node, value in later.items()}
    values |= {lag_name(node, 1): value.unsqueeze(1) for node, value in before.items()}
    lagged = {edge.child for edge in walk.structure.graph.lags if edge.parent in before}
    shape = (*next(iter(later.values())).shape[:2], next(iter(before.values())).shape[1])
    log_density = torch.zeros(shape, dtype=torch.float64)
    for node in lagged:
        name = walk.name(node, step)
        if name is not None:
            log_density = log_density + walk.log_prob(name, values, mask)
    return log_density
