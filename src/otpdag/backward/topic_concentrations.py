"""Concentrations of the topics' shares, from what the backward map or exact draws say of documents."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse, special
from torch import Tensor

from otpdag.backward.assignment_draws import AssignmentDraws

__all__ = ["drawn_concentration", "exact_alpha", "newton_concentration", "pair_concentration", "word_concentration"]

Array = NDArray[np.float64]

ALPHA_RANGE = (1e-4, 1e3)
"""Concentrations beyond these are as good as zero, or as even shares."""

WORD_RANGE = (1e-4, 1e2)
"""The same of the words of topics."""

ALPHA_CELLS, ALPHA_BURN, ALPHA_SWEEPS = 30_000, 15, 45
"""Cells of documents from which exact concentrations are drawn, and sweeps of the draws before and after they count."""

PACE = 0.2
"""Weight of a draw in the running mean from which concentrations are learned."""


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
    now, logs, kept = alpha.double().numpy(), None, []
    draws, fixed = AssignmentDraws(part, len(now), generator), topics.double().numpy()
    for number in range(ALPHA_BURN + ALPHA_SWEEPS):
        counts = draws.sweep(fixed, now).by_document
        if number < ALPHA_BURN:
            continue
        now, logs = drawn_concentration(now, counts, logs)
        if number >= ALPHA_BURN + ALPHA_SWEEPS // 2:
            kept.append(now)
    return torch.from_numpy(np.mean(kept, 0)).to(alpha)


def drawn_concentration(alpha: Array, by_document: Array, mean_logs: Tensor | None) -> tuple[Array, Tensor]:
    """Concentrations (K,) after one more draw of how many words each topic gave to documents (documents, K).

    Returns:
        The likeliest ones, and the running mean of expected logarithms of shares that they are told by.
    """
    shape = torch.from_numpy(alpha + by_document)
    logs = (torch.digamma(shape) - torch.digamma(shape.sum(-1, keepdim=True))).mean(0)
    mean_logs = logs if mean_logs is None else mean_logs + PACE * (logs - mean_logs)
    return newton_concentration(torch.from_numpy(alpha), mean_logs).numpy(), mean_logs


def word_concentration(counts: Array, concentration: float, steps: int = 3) -> float:
    """Concentration of a symmetric Dirichlet prior that is likeliest for words by topic (K, words) (Minka 2000).

    A few steps of the fixed point: draws that follow one another take it further.
    """
    words, total = counts.shape[1], counts.sum(1)
    for _ in range(steps):
        own = (special.digamma(counts + concentration) - special.digamma(concentration)).sum()
        common = (special.digamma(total + words * concentration) - special.digamma(words * concentration)).sum()
        concentration = float(np.clip(concentration * own / (words * common), *WORD_RANGE))
    return concentration


def pair_concentration(among: Tensor) -> Tensor:
    r"""Concentrations under which topics meet as often as in these shares of pairs of topics (K, K).

    A pair has one topic twice with probability :math:`(1 + s \sum \pi_k^2) / (1 + s)`, where :math:`\alpha = s \pi`.
    """
    share = among.double().sum(-1) / among.double().sum()
    twice, by_chance = among.double().trace() / among.double().sum(), (share**2).sum()
    total = (1 - twice) / (twice - by_chance).clamp(min=1e-9)
    return (share * total).clamp(*ALPHA_RANGE).to(among)
