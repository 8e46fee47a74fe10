"""What a fitted model says of sequences: state probabilities, likeliest paths, draws, likelihoods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.data.sequences import SequenceBatch
from otpdag.likelihood.chain_layout import Block, Chain, Linear, lay_out_chain, one_block, potentials
from otpdag.likelihood.chain_messages import filtered, marginals
from otpdag.likelihood.particles import draw_paths, filter_particles
from otpdag.numerics import bounded_threads
from otpdag.simulation import draw
from otpdag.structure import Naturals, Structure, lag_name

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Smoothed:
    """Probabilities of the joint states of each step (M, S), the log-likelihood of each sequence (N,), the states."""

    probabilities: Tensor
    log_likelihood: Tensor
    chain: Chain

    def of(self, node: str) -> Tensor:
        """Probabilities of one hidden category (M, K)."""
        return self.probabilities @ self.chain.states.now[node]


def smooth(structure: Structure, naturals: Naturals, batch: SequenceBatch) -> Smoothed:
    """Run forward and backward over all sequences."""
    chain, linear = _laid_out(structure, naturals, batch)
    probabilities = torch.empty(batch.rows, chain.states.size, dtype=torch.float64)
    log_likelihood = torch.zeros(chain.sequences, dtype=torch.float64)
    for block in chain.blocks:
        part = marginals(block, linear, chain)
        probabilities[block.rows] = part.state[0].T
        log_likelihood.index_add_(0, block.sequences[block.owners], part.log_scale[0])
    return Smoothed(probabilities, log_likelihood, chain)


def state_probabilities(
    structure: Structure, naturals: Naturals, batch: SequenceBatch, node: str, draws: int = 200
) -> Tensor:
    """Probabilities of one hidden category (M, K): exact, or shares of draws where numbers are hidden beside it.

    The standard error of a share of 200 is at most 0.035.
    """
    if not has_numbers(structure):
        return smooth(structure, naturals, batch).of(node)
    return fill_in(structure, naturals, batch, draws, torch.Generator().manual_seed(0))[node].mean(1)


def _laid_out(structure: Structure, naturals: Naturals, batch: SequenceBatch) -> tuple[Chain, Linear]:
    chain = lay_out_chain(structure, batch)
    with torch.no_grad():
        return chain, Linear.of(potentials(structure, naturals, chain))


def decode_paths(structure: Structure, naturals: Naturals, batch: SequenceBatch) -> tuple[dict[str, Tensor], Tensor]:
    """The likeliest path of all hidden categories together: states (M,) by node, and the log-probability of each."""
    chain, linear = _laid_out(structure, naturals, batch)
    path = torch.empty(batch.rows, dtype=torch.int64)
    log_prob = torch.zeros(chain.sequences, dtype=torch.float64)
    for block in chain.blocks:
        best_path, best = _viterbi(block, linear, chain)
        path[block.rows], log_prob[block.sequences] = torch.from_numpy(best_path), torch.from_numpy(best)
    return {node: chain.states.now[node].argmax(-1)[path] for node in chain.states.nodes}, log_prob


def _viterbi(block: Block, linear: Linear, chain: Chain) -> tuple[NDArray[np.int64], Array]:
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


def has_numbers(structure: Structure) -> bool:
    """Whether a hidden node is no category, so that particles stand for it."""
    return any(not structure.mechanisms[node].space.is_discrete for node in structure.graph.hidden)


def log_likelihood(
    structure: Structure, naturals: Naturals, batch: SequenceBatch, seed: int = 0, particles: int = 2000
) -> Tensor:
    """Log-likelihood of each sequence (N,): exact for hidden categories, by particles for hidden numbers.

    Its error falls with the root of the number of particles.
    """
    if not has_numbers(structure):
        return smooth(structure, naturals, batch).log_likelihood
    with bounded_threads(1):
        generator = torch.Generator().manual_seed(seed)
        return filter_particles(structure, naturals, batch, particles, generator).log_likelihood


def fill_in(
    structure: Structure,
    naturals: Naturals,
    batch: SequenceBatch,
    draws: int,
    generator: torch.Generator,
    particles: int = 300,
) -> dict[str, Tensor]:
    """Joint draws of every node given what the sequences show: (M, draws, width).

    Hidden categories are drawn exactly, backward in time after a forward pass, hidden numbers by particles, which takes
    their number times that of the draws; missing cells then from the model, forward in time.
    """
    if has_numbers(structure):
        with bounded_threads(1):
            forward = filter_particles(structure, naturals, batch, particles, generator)
            values = draw_paths(structure, naturals, batch, forward, draws, generator)
        known = structure.graph.hidden
    else:
        chain, linear = _laid_out(structure, naturals, batch)
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
    _draw_cells(structure, naturals, batch, values, generator, missing)
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
    structure: Structure,
    naturals: Naturals,
    batch: SequenceBatch,
    values: dict[str, Tensor],
    generator: torch.Generator,
    nodes: Sequence[str],
) -> None:
    """Draw missing cells of some observed nodes from their mechanisms, step by step, in place."""
    block = one_block(batch)
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
            drawn = draw(structure, naturals, node, parents, (len(own), values[node].shape[1]), generator)[0]
            values[node][own] = torch.where(keep, values[node][own], drawn)
