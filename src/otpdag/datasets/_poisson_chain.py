"""Counts that follow a hidden Markov chain (Section 5.2 of the paper)."""

import numpy as np
from numpy.typing import NDArray

from otpdag.datasets._truth import Truth

# What true rates, and the chance to stay in a state, are drawn from: Section 5.2.
_RATES = ((10.0, 20.0), (30.0, 40.0), (50.0, 60.0), (80.0, 90.0))
_STAY = (0.8, 0.9)  # between which the chance of staying is drawn, as in the paper


def poisson_chain(
    sequences: int, length: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64], Truth]:
    """Draw counts from a Poisson hidden Markov model with four states.

    The rates come from U(10, 20), U(30, 40), U(50, 60) and U(80, 90), the probability to stay in a state from
    U(0.8, 0.9); a chain that moves goes to any other state alike, and begins in any. Every sequence has its own path.

    Args:
        sequences: Number of sequences.
        length: Steps of each.
        rng: Source of all randomness.

    Returns:
        The counts and the states, both (sequences, length), and the truth.
    """
    rates = np.array([rng.uniform(low, high) for low, high in _RATES])
    stay = rng.uniform(*_STAY)
    size = len(rates)
    states = np.empty((sequences, length), dtype=np.int64)
    states[:, 0] = rng.integers(size, size=sequences)
    for step in range(1, length):
        moved = (states[:, step - 1] + rng.integers(1, size, size=sequences)) % size
        states[:, step] = np.where(rng.random(sequences) < stay, states[:, step - 1], moved)
    truth: Truth = {
        "z": {"stay": np.array(stay)},
        "z[0]": {"probs": np.full(size, 1 / size)},
        "x": {"log_rate": np.log(rates)},
    }
    return rng.poisson(rates[states]), states, truth
