"""Hidden numbers of sequences under a fitted model: weighted particles forward, draws of whole paths backward.

A bootstrap filter (Gordon, Salmond and Smith, 1993) and backward simulation (Godsill, Doucet and West, 2004). They ask
nothing of the mechanisms but draws and densities, so that they serve any model, at the price of Monte Carlo error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.data.sequences import SequenceBatch
from otpdag.errors import ModelError
from otpdag.likelihood.chain_layout import Block, one_block
from otpdag.simulation import draw
from otpdag.structure import Naturals, Structure, lag_name

Values = dict[str, Tensor]


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

    structure: Structure
    naturals: Naturals
    batch: SequenceBatch
    block: Block

    def seen(self, step: int) -> tuple[Values, Values]:
        """Observed values and masks (n, 1, width) of a step, earlier ones included."""
        at, size = self.block.spans[step]
        rows = self.block.rows[at : at + size]
        values = {node: value[0][rows].unsqueeze(1) for node, value in self.batch.steps.values.items()}
        mask = {node: cells[0][rows].unsqueeze(1) for node, cells in self.batch.steps.mask.items()}
        for edge in self.structure.graph.lags:
            if edge.parent in self.batch.steps.values:
                back, name = rows - min(edge.by, step), lag_name(edge.parent, edge.by)
                values[name] = self.batch.steps.values[edge.parent][0][back].unsqueeze(1)
                mask[name] = self.batch.steps.mask[edge.parent][0][back].unsqueeze(1)
        return values, mask

    def name(self, node: str, step: int) -> str | None:
        """The mechanism that makes a node in this step; None if an observed one is conditioned on."""
        name = self.structure.name_at(node, step)
        return name if name != node or step >= self.structure.longest_lag(node) else None

    def log_prob(self, name: str, values: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> Tensor:
        """Log-density of a node's seen cells; zero where an observed parent is missing."""
        base = self.structure.base(name)
        parents = {p: value.unsqueeze(0) for p, value in self.structure.parents(name, values).items()}
        seen = mask[base].unsqueeze(0) if base in mask else None
        log_density = self.structure.mechanisms[name].log_prob(
            self.naturals[name], values[base].unsqueeze(0), parents, seen
        )[0]
        for parent in parents:
            if parent in mask:
                log_density = torch.where(mask[parent].all(-1), log_density, 0.0)
        return log_density


def filter_particles(
    structure: Structure, naturals: Naturals, batch: SequenceBatch, count: int, generator: torch.Generator
) -> Particles:
    """Run the filter over all sequences side by side."""
    block = one_block(batch)
    walk = _Walk(structure, naturals, batch, block)
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
                values[node] = draw(structure, naturals, name or node, seen, (size, count), generator)[0]
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
    structure: Structure,
    naturals: Naturals,
    batch: SequenceBatch,
    particles: Particles,
    draws: int,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Paths of the hidden nodes given all of each sequence: (M, draws, width), in the order of the batch's rows."""
    if any(edge.by > 1 for edge in structure.graph.lags if edge.parent in structure.graph.hidden):
        raise ModelError("draws of hidden numbers are for lags of one step")
    block = particles.block
    walk = _Walk(structure, naturals, batch, block)
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
