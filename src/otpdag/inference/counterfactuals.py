r"""Counterfactuals of rows: abduct, act, predict (Pearl, 2009, section 7.1).

What a row shows tells the noise :math:`u_v` of every mechanism, or its distribution where nodes are hidden, cells
missing or values discrete; an intervention replaces some mechanisms; the others make new values of the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.errors import ModelError
from otpdag.inference.row_posterior import Fitted, posterior_draws

__all__ = ["counterfactual_draws"]

Action = Tensor | Callable[[Mapping[str, Tensor]], Tensor]
"""Values (N, draws, width) or what makes them from the values of all nodes as they were."""


def counterfactual_draws(
    fitted: Fitted, batch: Batch, actions: Mapping[str, Action], draws: int, seed: int
) -> dict[str, Tensor]:
    """What rows would have been: values (N, draws, width) of all nodes.

    Nodes that do not descend from an action keep the values that they had; of what was hidden or missing, draws.
    """
    structure = fitted.structure
    before = posterior_draws(fitted, batch, draws, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    after = dict(before)
    changed: set[str] = set()
    for node in structure.graph.order:
        mechanism, parents = structure.mechanisms[node], structure.graph.parents(node)
        if node in actions:
            action = actions[node]
            after[node] = action(before) if callable(action) else action.expand_as(before[node])
            changed.add(node)
        elif changed & set(parents):
            if not mechanism.can_abduct:
                raise ModelError(
                    f"a counterfactual needs the noise of node {node!r}; {type(mechanism).__name__} cannot recover it"
                )
            params = fitted.naturals[node]
            shape = (1, *before[node].shape[:2], mechanism.noise.dim)
            uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
            own = {parent: before[parent].unsqueeze(0) for parent in parents}
            noise = mechanism.abduct(params, before[node].unsqueeze(0), own, uniform)
            new = {parent: after[parent].unsqueeze(0) for parent in parents}
            after[node] = mechanism.forward(params, new, noise)[0].detach().expand_as(before[node])
            changed.add(node)
    return after
