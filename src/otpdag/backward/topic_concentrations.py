"""Concentrations of the topics' shares, from what the backward map or exact draws say of documents."""

from __future__ import annotations

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from otpdag.backward.topic_shares import drawn_topic_counts

__all__ = ["exact_alpha", "newton_concentration", "pair_concentration"]

ALPHA_RANGE = (1e-4, 1e3)
"""Concentrations beyond these are as good as zero, or as even shares."""

ALPHA_CELLS, ALPHA_BURN, ALPHA_SWEEPS = 30_000, 15, 45
"""Cells of documents from which exact concentrations are drawn, and sweeps of the draws before and after they count."""


def newton_concentration(alpha: Tensor, mean_logs: Tensor, steps: int = 8) -> Tensor:
    """Concentrations that are likeliest for these mean logarithms of shares, by Newton's method (Minka 2000)."""
    a, logs = alpha.double(), mean_logs.double()
    for _ in range(steps):
        gradient = torch.digamma(a.sum()) - torch.digamma(a) + logs
        curvature, common = -torch.polygamma(1, a), torch.polygamma(1, a.sum())
        shift = (gradient / curvature).sum() / (1 / common + (1 / curvature).sum())
        moved = a - (gradient - shift) / curvature
        a = torch.where(moved > 0, moved, a / 2).clamp(*ALPHA_RANGE)
    return a.to(alpha)


def exact_alpha(documents: sparse.csr_array, topics: Tensor, alpha: Tensor, generator: np.random.Generator) -> Tensor:
    """Concentrations that are likeliest at the topics, by draws from the exact distribution of the assignments.

    The closed-form backward map is too sharp in short documents, which makes concentrations too small: 8 % for a
    hundred words of ten topics. Stochastic EM on some documents removes that. Counts that are not whole cannot be
    drawn; their concentrations stay as they are.
    """
    if not np.equal(documents.data, np.floor(documents.data)).all():
        return alpha
    filled = np.flatnonzero(np.diff(documents.indptr))
    cells = max(1.0, documents.nnz / max(1, len(filled)))
    many = min(len(filled), max(200, int(ALPHA_CELLS / cells)))
    part = documents[np.sort(generator.choice(filled, many, replace=False))]
    now, logs, kept = alpha.double().numpy().copy(), None, []
    sweeps = drawn_topic_counts(part, topics.double().numpy(), now, generator, ALPHA_BURN + ALPHA_SWEEPS)
    for number, counts in enumerate(sweeps):
        if number < ALPHA_BURN:
            continue
        shape = torch.from_numpy(now + counts)
        mean_logs = (torch.digamma(shape) - torch.digamma(shape.sum(-1, keepdim=True))).mean(0)
        logs = mean_logs if logs is None else 0.8 * logs + 0.2 * mean_logs
        now[:] = newton_concentration(torch.from_numpy(now), logs).numpy()
        if number >= ALPHA_BURN + ALPHA_SWEEPS // 2:
            kept.append(now.copy())
    return torch.from_numpy(np.mean(kept, 0)).to(alpha)


def pair_concentration(among: Tensor) -> Tensor:
    r"""Concentrations under which topics meet as often as in these shares of pairs of topics (K, K).

    A pair has one topic twice with probability :math:`(1 + s \sum \pi_k^2) / (1 + s)`, where :math:`\alpha = s \pi`.
    """
    share = among.double().sum(-1) / among.double().sum()
    twice, by_chance = among.double().trace() / among.double().sum(), (share**2).sum()
    total = (1 - twice) / (twice - by_chance).clamp(min=1e-9)
    return (share * total).clamp(*ALPHA_RANGE).to(among)
