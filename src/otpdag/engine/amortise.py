"""Learn a backward map for a fitted model whose fit needed none: parameters stay, only the map moves."""

from __future__ import annotations

import torch
from torch import Tensor

from otpdag.backward.gibbs import GibbsOptions, group_rows
from otpdag.data import Batch
from otpdag.engine.lbfgs import minimise
from otpdag.engine.problem import complete_batch, count_ranges, proposal_map
from otpdag.engine.search import short_batch
from otpdag.model import Model
from otpdag.objective import gibbs_terms
from otpdag.sampling import ancestral
from otpdag.structure import pack, unpack

__all__ = ["learn_proposal"]


def learn_proposal(model: Model, batch: Batch, *, seed: int, steps: int = 60) -> None:
    """Give the model a map that proposes several unknown numbers at once, unless it has or needs none."""
    model.note_ranges(count_ranges(model.structure, batch))
    fitted = model.fitted
    proposal = proposal_map(model.structure, batch, (16,))
    densities = all(m.has_density or m.is_given for m in model.structure.mechanisms.values())
    if proposal is None or fitted.proposal is not None or not densities:
        return
    part = short_batch(batch, 1500, seed)
    generator = torch.Generator().manual_seed(seed)
    phi = proposal.init(1, generator)
    proposal.start_from(phi, 0, *_model_rows(model, part, seed))
    groups = group_rows(
        model.structure, part, generator=generator, options=GibbsOptions(draws=16), proposal=proposal,
        count_range=fitted.count_range,
    )  # fmt: skip
    shapes = {key: tuple(value.shape[1:]) for key, value in phi.items()}

    def loss(flat: Tensor) -> Tensor:
        return gibbs_terms(model.structure, fitted.naturals, groups, unpack(flat, shapes)).total

    state = minimise(loss, pack(phi), steps=steps, tolerance=1e-6)
    model.adopt_proposal(proposal, unpack(state.point, shapes))


def _model_rows(model: Model, like: Batch, seed: int) -> tuple[Batch, dict[str, Tensor]]:
    """Complete rows from the model itself, whose hidden values are known: what the map's linear part starts from."""
    generator = torch.Generator().manual_seed(seed)
    rows = like.rows
    given = {node: like.values[node][:1] for node in model.structure.given}
    values = ancestral(model.structure, model.fitted.naturals, rows, generator, do=given)
    batch = complete_batch(model.structure, values)
    return batch, {node: value[0] for node, value in values.items()}
