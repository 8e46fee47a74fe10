"""What a fitted model says of sequences: state probabilities, likeliest paths, draws, likelihoods, new sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.data.sequences import SequenceBatch
from otpdag.divergences import Energy
from otpdag.likelihood.chain_layout import Block, Chain, lay_out_chain, one_block
from otpdag.likelihood.chain_messages import marginals
from otpdag.likelihood.chain_potentials import Linear, potentials
from otpdag.likelihood.particles import draw_paths, filter_particles
from otpdag.noise import draw_noise
from otpdag.simulation import ancestral_sequences
from otpdag.structure import Naturals, Structure, first_name, lag_name

Array = NDArray[np.float64]

# Particles that stand for hidden numbers. The error of a likelihood falls with the root of their number; drawing paths
# backward takes their number times that of the draws, so that it makes do with fewer.
PARTICLES_OF_A_LIKELIHOOD, PARTICLES_OF_A_PATH = 2000, 300
DRAWS_OF_A_SHARE = 200  # whose shares stand for probabilities: a standard error of at most 0.035


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
    with _one_thread():
        for block in chain.blocks:
            part = marginals(block, linear, chain)
            probabilities[block.rows] = part.state[0].T
            log_likelihood.index_add_(0, _owners(block), part.log_scale[0])
    return Smoothed(probabilities, log_likelihood, chain)


def state_probabilities(structure: Structure, naturals: Naturals, batch: SequenceBatch, node: str) -> Tensor:
    """Probabilities of one hidden category (M, K): exact, or shares of draws where numbers are hidden beside it."""
    if not has_numbers(structure):
        return smooth(structure, naturals, batch).of(node)
    return fill_in(structure, naturals, batch, DRAWS_OF_A_SHARE, torch.Generator().manual_seed(0))[node].mean(1)


def _laid_out(structure: Structure, naturals: Naturals, batch: SequenceBatch) -> tuple[Chain, Linear]:
    chain = lay_out_chain(structure, batch)
    with torch.no_grad():
        return chain, Linear.of(potentials(structure, naturals, chain))


def _owners(block: Block) -> Tensor:
    """The sequence of each column."""
    inside = torch.arange(block.sizes[0]) < torch.tensor(block.sizes).unsqueeze(1)
    return block.sequences.expand(len(block.sizes), -1)[inside]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small steps of a recursion: a second thread would cost more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def decode_paths(structure: Structure, naturals: Naturals, batch: SequenceBatch) -> tuple[dict[str, Tensor], Tensor]:
    """The likeliest path of all hidden categories together: states (M,) by node, and the log-probability of each."""
    chain, linear = _laid_out(structure, naturals, batch)
    path = torch.empty(batch.rows, dtype=torch.int64)
    log_prob = torch.zeros(chain.sequences, dtype=torch.float64)
    log_unary = (torch.log(linear.unary[0]) + linear.log_unit[0]).numpy()
    log_pair = torch.log(linear.pair[0]).numpy()
    for block in chain.blocks:
        best_path, best = _viterbi(block, log_unary, log_pair, chain)
        path[block.rows], log_prob[block.sequences] = torch.from_numpy(best_path), torch.from_numpy(best)
    return {node: chain.states.now[node].argmax(-1)[path] for node in chain.states.nodes}, log_prob


def _viterbi(block: Block, log_unary: Array, log_pair: Array, chain: Chain) -> tuple[NDArray[np.int64], Array]:
    """The best path of each sequence of a block, column by column, and its log-probability."""
    kinds, spans = block.kinds.numpy(), block.spans
    origin = np.zeros((log_unary.shape[0], len(kinds)), dtype=np.int16)
    best, state = np.empty(block.sizes[0]), np.empty(block.sizes[0], dtype=np.int64)
    score = log_unary[:, kinds[: block.sizes[0]]]
    for step, (at, size) in enumerate(spans[1:], 1):
        if score.shape[1] > size:
            best[size : score.shape[1]], state[size : score.shape[1]] = _best_end(score[:, size:])
        here = kinds[at : at + size]
        shared = log_pair[min(step, chain.longest_lag)][:, :, None] if not chain.varying else None
        joint = score[:, None, :size] + (log_pair[here].transpose(1, 2, 0) if shared is None else shared)
        came = joint.argmax(0)
        origin[:, at : at + size] = came
        score = np.take_along_axis(joint, came[None], 0)[0] + log_unary[:, here]
    best[: score.shape[1]], state[: score.shape[1]] = _best_end(score)
    path = np.empty(len(kinds), dtype=np.int64)
    for at, size in reversed(spans):
        path[at : at + size] = state[:size]
        state[:size] = origin[state[:size], np.arange(at, at + size)]
    return path, best


def _best_end(score: Array) -> tuple[Array, NDArray[np.int64]]:
    return score.max(0), score.argmax(0)


def has_numbers(structure: Structure) -> bool:
    """Whether a hidden node is no category, so that particles stand for it."""
    return any(not structure.mechanisms[node].space.is_discrete for node in structure.graph.hidden)


def log_likelihood(structure: Structure, naturals: Naturals, batch: SequenceBatch, seed: int = 0) -> Tensor:
    """Log-likelihood of each sequence (N,): exact for hidden categories, by particles for hidden numbers."""
    if not has_numbers(structure):
        return smooth(structure, naturals, batch).log_likelihood
    with _one_thread():
        return filter_particles(
            structure, naturals, batch, PARTICLES_OF_A_LIKELIHOOD, torch.Generator().manual_seed(seed)
        ).log_likelihood


def fill_in(
    structure: Structure, naturals: Naturals, batch: SequenceBatch, draws: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Joint draws of every node given what the sequences show: (M, draws, width).

    Hidden categories are drawn exactly, backward in time after a forward pass, hidden numbers by particles; missing
    cells then from the model, forward in time.
    """
    if has_numbers(structure):
        with _one_thread():
            particles = filter_particles(structure, naturals, batch, PARTICLES_OF_A_PATH, generator)
            values = draw_paths(structure, naturals, batch, particles, draws, generator)
        blocks, known = one_block(batch), structure.graph.hidden
    else:
        chain, linear = _laid_out(structure, naturals, batch)
        states = torch.empty(batch.rows, draws, dtype=torch.int64)
        with _one_thread():
            for block in chain.blocks:
                states[block.rows] = _draw_paths(block, linear, chain, draws, generator)
        values = {node: chain.states.now[node][states] for node in chain.states.nodes}
        blocks, known = chain.blocks, chain.states.nodes
    for node in structure.graph.observed:
        seen = batch.steps.values[node][0].unsqueeze(1).expand(-1, draws, -1)
        mask = batch.steps.mask[node][0]
        values[node] = seen.clone() if node not in values else torch.where(mask.unsqueeze(1), seen, values[node])
    missing = [n for n in structure.graph.order if n in batch.steps.mask and n not in known]
    missing = [n for n in missing if not bool(batch.steps.mask[n].all())]
    for block in blocks:
        _draw_cells(structure, naturals, batch.steps.mask, block, values, generator=generator, nodes=missing)
    return values


def _draw_paths(block: Block, linear: Linear, chain: Chain, draws: int, generator: torch.Generator) -> Tensor:
    emission = linear.unary[0][:, block.kinds]
    spans = block.spans
    alpha, last = torch.empty_like(emission), 0
    moves = linear.pair[0]
    for step, (at, size) in enumerate(spans):
        message = emission[:, at : at + size]
        if step:
            before = alpha[:, last : last + size]
            if chain.varying:
                message = message * torch.einsum("in,nij->jn", before, moves[block.kinds[at : at + size]])
            else:
                message = message * (moves[min(step, chain.longest_lag)].T @ before)
        alpha[:, at : at + size] = message / message.sum(0)
        last = at
    path = torch.empty(len(block.kinds), draws, dtype=torch.int64)
    for step in range(len(spans) - 1, -1, -1):
        at, size = spans[step]
        weight = alpha[:, at : at + size].T.unsqueeze(1).expand(-1, draws, -1)
        if step + 1 < len(spans):
            later_at, many = spans[step + 1]
            later = path[later_at : later_at + many]
            if chain.varying:
                own = moves[block.kinds[later_at : later_at + many]].transpose(1, 2)
                link = own.gather(1, later.unsqueeze(-1).expand(-1, -1, own.shape[-1]))
            else:
                link = moves[min(step + 1, chain.longest_lag)].T[later]
            weight = torch.cat([weight[:many] * link, weight[many:]])
        drawn = torch.multinomial(weight.reshape(-1, weight.shape[-1]), 1, generator=generator)
        path[at : at + size] = drawn.reshape(size, draws)
    return path


def _draw_cells(
    structure: Structure,
    naturals: Naturals,
    mask: Mapping[str, Tensor],
    block: Block,
    values: dict[str, Tensor],
    *,
    generator: torch.Generator,
    nodes: Sequence[str],
) -> None:
    """Draw missing cells of some observed nodes from their mechanisms, step by step, in place."""
    draws = next(iter(values.values())).shape[1]
    for step, (at, size) in enumerate(block.spans):
        rows = block.rows[at : at + size]
        for node in nodes:
            seen = mask[node][0][rows]
            open_rows = rows[~seen.all(-1)]
            if not len(open_rows):
                continue
            name = node if step >= structure.longest_lag(node) else first_name(node)
            mechanism = structure.mechanisms.get(name, structure.mechanisms[node])
            parents = {p: values[p][open_rows].unsqueeze(0) for p in structure.graph.parents(node)}
            for parent, by in structure.graph.lagged_parents(node):
                parents[lag_name(parent, by)] = values[parent][open_rows - min(by, step)].unsqueeze(0)
            noise = draw_noise(mechanism.noise, (1, len(open_rows), draws), generator)
            drawn = mechanism.forward(naturals[node], parents, noise).detach()[0].expand(-1, draws, -1)
            keep = mask[node][0][open_rows].unsqueeze(1)
            values[node][open_rows] = torch.where(keep, values[node][open_rows], drawn)


def transport_score(
    structure: Structure, naturals: Naturals, batch: SequenceBatch, seed: int, most: int = 4000
) -> float:
    """Energy distance between pairs of neighbouring steps and as many of the model's, standardised, smaller is better.

    Missing cells are missing in the model's pairs as well. A sequence of one step counts as a pair with itself.
    """
    generator = torch.Generator().manual_seed(seed)
    longest = int(batch.lengths.max())
    some = torch.randperm(len(batch.lengths), generator=generator)[: max(1, -(-most // longest))]
    part = batch.take(some.sort().values)
    do = {}
    for node in structure.given:
        padded = torch.zeros(len(part.lengths), longest, structure.mechanisms[node].space.width, dtype=torch.float64)
        padded[_places(part)] = part.steps.values[node][0]
        do[node] = padded.unsqueeze(0)
    drawn = ancestral_sequences(structure, naturals, len(part.lengths), longest, generator, do=do)
    places = _places(part)
    left, right = [], []
    for node in structure.graph.observed:
        value, seen = part.steps.values[node], part.steps.mask[node].to(torch.float64)
        seen = seen if seen.shape[-1] == value.shape[-1] else seen[..., :1]
        count = seen.sum(1).clamp(min=1)
        centre = (value * seen).sum(1) / count
        spread = (((value - centre) * seen) ** 2).sum(1).div(count).sqrt()
        spread = torch.where(spread > 1e-12, spread, torch.ones_like(spread))
        ours, theirs = (value - centre) / spread * seen, (drawn[node][:, *places] - centre) / spread * seen
        left += [ours, part.lagged(ours, 1)]
        right += [theirs, part.lagged(theirs, 1)]
    chosen = torch.randperm(part.rows, generator=generator)[:most]
    return float(Energy()(torch.cat(left, -1)[:, chosen], torch.cat(right, -1)[:, chosen])[0])


def _places(batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Sequence and time of each step."""
    return torch.arange(len(batch.lengths)).repeat_interleave(batch.lengths), batch.times
