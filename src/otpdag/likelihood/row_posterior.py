"""What a fitted model says of rows: draws of hidden and missing values, likelihoods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from otpdag.backward import AmortizedMap
from otpdag.data import Batch, Label, Schema
from otpdag.errors import ModelError
from otpdag.likelihood.elimination import posterior
from otpdag.likelihood.elimination.evidence import log_evidence, moved
from otpdag.likelihood.elimination.layout import Layout, lay_out_within
from otpdag.likelihood.elimination.plans import EliminationOptions
from otpdag.noise import draw_noise
from otpdag.numerics import Array, at_work, one_hot
from otpdag.progress import shown_while_running
from otpdag.simulation import draw
from otpdag.structure import Naturals, Structure

BUDGET = EliminationOptions(48, 96, largest_table=2**23)  # twice the points of a fit
ROWS_OF_A_LAYOUT = 50_000  # that are laid out along the graph at a time, which bounds memory
BESIDE = 1e-3  # how far beside an estimate, in raw units of order one, parameters lie that fit as well


@dataclass(frozen=True)
class Fitted:
    """Everything that inference needs: natural parameters (1, ...), the map that a fit learned, if any, and names.

    Attributes:
        beside: Parameters a little beside these that fit the data as well.
    """

    structure: Structure
    naturals: Naturals
    phi: Mapping[str, Tensor] = field(default_factory=dict)
    sampler: AmortizedMap | None = None
    schema: Schema | None = None
    beside: tuple[Naturals, ...] = ()

    def labels(self, node: str) -> tuple[Label, ...]:
        """What the categories of a node are called; their codes if nothing else."""
        known = None if self.schema is None else self.schema[node].labels
        return tuple(range(self.structure.mechanisms[node].space.width)) if known is None else known

    def params(self) -> dict[str, dict[str, Array]]:
        """Parameters as a reader sees them, by node and name."""
        described = {node: own.describe(self.naturals[node]) for node, own in self.structure.mechanisms.items()}
        return {
            node: {name: value[0].detach().cpu().numpy().copy() for name, value in shown.items()}
            for node, shown in described.items()
        }

    def check_densities(self, purpose: str) -> None:
        """Refuse what needs densities where a node has none."""
        for node in self.structure.graph.observed:
            mechanism = self.structure.mechanisms[node]
            if not mechanism.has_density and not mechanism.is_given:
                raise ModelError(
                    f"{purpose} needs the density of every observed node; {type(mechanism).__name__} at node {node!r} "
                    "has none"
                )


def _layouts(fitted: Fitted, batch: Batch, *, merged: bool = True) -> Iterator[tuple[Tensor, Layout]]:
    """Blocks of rows with what they miss laid out along the graph."""
    blocks = torch.arange(batch.rows).split(ROWS_OF_A_LAYOUT)
    for index in shown_while_running(blocks, "rows", len(blocks)):
        layout = lay_out_within(fitted.structure, batch.take(index), replace(BUDGET, merged=merged))
        yield index, moved(fitted.naturals, layout)


def log_likelihood(fitted: Fitted, batch: Batch) -> Tensor:
    """Log-likelihood of each row's seen cells, hidden and missing values integrated out: (N,)."""
    fitted.check_densities("a likelihood")
    return log_likelihoods(fitted, batch)[0]


@at_work(0)
def log_likelihoods(fitted: Fitted, batch: Batch) -> Tensor:
    """Those of all replicas (R, N)."""
    return torch.cat([log_evidence(fitted.naturals, layout) for _, layout in _layouts(fitted, batch)], -1)


@at_work(0)
def posterior_draws(
    fitted: Fitted, batch: Batch, draws: int, seed: int, *, stratified: bool = False
) -> dict[str, Tensor]:
    """Joint draws of every node given what each row shows: node -> (N, draws, width).

    ``stratified`` ones are spread evenly over the distribution of each unknown of a row.
    """
    generator = torch.Generator().manual_seed(seed)
    structure = fitted.structure
    if not all(m.has_density or m.is_given for n, m in structure.mechanisms.items() if n in structure.graph.observed):
        return _map_draws(fitted, batch, draws, generator)
    drawn = {
        node: torch.zeros(batch.rows, draws, mechanism.space.width, dtype=torch.float64)
        for node, mechanism in structure.mechanisms.items()
    }
    for index, layout in _layouts(fitted, batch, merged=False):  # rows alike are drawn each for itself
        made = posterior.posterior_draws(fitted.naturals, layout, draws, generator, stratified=stratified)
        for node, value in made.items():
            drawn[node][index] = value
    return drawn


def _map_draws(fitted: Fitted, batch: Batch, draws: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Without densities: draws of the learned backward map, the rest from the model."""
    backward = fitted.sampler
    if backward is None:
        raise ModelError(
            "hidden values cannot be drawn: a node has no density and no backward map is at hand; fit with "
            "method='paper' or otp.transport('backward')"
        )
    values = {node: value[0].unsqueeze(1).expand(-1, draws, -1).unsqueeze(0) for node, value in batch.values.items()}
    mask = {node: seen[0].unsqueeze(1).expand(-1, draws, -1).unsqueeze(0) for node, seen in batch.mask.items()}
    row = backward.code(values, mask)
    for node in fitted.structure.graph.order:
        if node in backward.targets:
            noise = draw_noise(backward.noise(node), (1, batch.rows, draws), generator)
            if backward.space(node).is_discrete:
                chances, _ = backward.relaxed(fitted.phi, node, row, values, noise, 1.0)
                drawn = one_hot(chances.argmax(-1), chances.shape[-1])
            else:
                drawn = backward.draw(fitted.phi, node, row, values, noise).value.detach()
        elif node in values and bool(mask[node].all()):
            continue
        else:
            drawn = draw(fitted.structure, fitted.naturals, node, values, (batch.rows, draws), generator)
        values[node] = torch.where(mask[node], values[node], drawn) if node in mask else drawn
    return {node: value[0] for node, value in values.items()}
