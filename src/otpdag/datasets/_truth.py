"""What the generators share: the type of a truth, and draws of class weights and labels."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

Truth = dict[str, dict[str, Array]]
"""Parameters by name, by node: the layout of ``Model.params()``."""


def draw_weights(states: int, minimum: float, generator: np.random.Generator) -> Array:
    """Draw the weights of a hidden class uniformly among those with no state rarer than ``minimum``."""
    return minimum + (1.0 - states * minimum) * generator.dirichlet(np.ones(states))


def draw_states(probs: Array, rows: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Draw a state per row from probabilities ``(states,)``, the same for all, or ``(rows, states)``."""
    edges = np.cumsum(probs, axis=-1)[..., :-1]
    return np.asarray((generator.random(rows)[:, None] > edges).sum(axis=-1), dtype=np.int64)
