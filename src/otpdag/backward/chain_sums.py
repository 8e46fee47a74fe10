r"""Expected sums of a hidden Markov chain, read off stretches of its sequences: all that an update asks of the data.

Where observed nodes are read through few features, a step's log-densities in all states are a product of matrices, and
so are the expected sums of features. Both are taken in the order in which the recursion runs, so that nothing is looked
up or put in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.backward.chain_layout import Stretches
from otpdag.backward.chain_potentials import SMALLEST_LOG
from otpdag.backward.chain_stretches import FEW_STATES, smoothed

__all__ = ["PlacedSteps", "Sums"]

Array: TypeAlias = NDArray[np.float64]

NORMALISED = 4
"""Steps after which messages are normalised: they hardly become small before."""


@dataclass(frozen=True)
class Sums:
    """What the chain says of sequences.

    Attributes:
        log_likelihood: Of all sequences (R,).
        features: Expected sums of the features of steps in each state (R, S, F).
        first: Expected counts of the states of first steps (R, S).
        pair: Expected counts of pairs of states (R, S, S).
    """

    log_likelihood: Tensor
    features: Tensor
    first: Tensor
    pair: Tensor

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(own + others for own, others in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True, eq=False)
class PlacedSteps:
    """The features of sequences' steps, at the places of their stretches (L, F, B), and zero at empty ones."""

    features: Array
    stretches: Stretches

    @classmethod
    def of(cls, features: Tensor, stretches: Stretches) -> PlacedSteps:
        """Of the features of columns (m, F)."""
        placed = features.numpy()[stretches.columns].swapaxes(1, 2)
        return cls(np.where(stretches.inside[:, None], placed, 0.0), stretches)

    def sums(self, table: Tensor, first: Tensor, matrix: Tensor, weight: Tensor | None) -> Sums | None:
        """Expected sums under these potentials; None where digits would be lost.

        Args:
            table: Coefficients of the features in each state (R, S, F).
            first: What is known of the first step's state (R, S), not as logarithms.
            matrix: Of the state after another one (R, S, S).
            weight: Of the sequences (R or 1, n); one if left out.
        """
        emission, unit = self._emission(table, first)
        passed = smoothed(emission, matrix.numpy(), self.stretches, NORMALISED, products=False)
        if passed is None and table.shape[1] <= FEW_STATES:
            emission, unit = self._emission(table, first)
            passed = smoothed(emission, matrix.numpy(), self.stretches, NORMALISED, products=True)
        if passed is None:
            return None
        scale, state, later = np.log(passed.scale), passed.state, passed.later
        if weight is not None:
            share = weight.numpy()[:, self.stretches.owners]
            scale, unit = scale * share, unit * share
            state, later = (np.multiply(one, share[:, None], out=one) for one in (state, later))
        begun = sum(state[at][..., which].sum(-1) for at, which in self.stretches.begins)
        flat = state.reshape(len(state), -1, state.shape[-1])
        features = np.matmul(flat, self.features.swapaxes(1, 2)).sum(0).reshape(*table.shape[:2], -1)
        pair = np.matmul(passed.before, later.swapaxes(-1, -2)).sum(0) * matrix.numpy()
        return Sums(*map(torch.from_numpy, (scale.sum((0, 2)) + unit.sum((0, 2)), features, begun, pair)))

    def _emission(self, table: Tensor, first: Tensor) -> tuple[Array, Array]:
        """Densities at all places (L, R, S, B) over the logarithms of the largest (L, R, B)."""
        replicas, size, _ = table.shape
        scores = np.matmul(table.reshape(replicas * size, -1).numpy(), self.features)
        logs = torch.from_numpy(scores.reshape(len(scores), replicas, size, -1))
        unit = logs.amax(2, keepdim=True)
        emission: Array = logs.sub_(unit).clamp_(min=SMALLEST_LOG).exp_().numpy()
        for at, which in self.stretches.begins:
            emission[at][..., which] *= first.numpy()[..., None]
        return emission, unit[:, :, 0].numpy()
