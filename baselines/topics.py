"""Topic models of others behind one interface: ``METHODS[name](counts, topics=K, seed=0, ...) -> Estimate``.

Each takes a sparse matrix of counts, a row per document, and gives ``topics``, the word probabilities (K, words), and
``alpha``, the concentrations of the topics in a document (K,). ``keep=True`` keeps the topics and the seconds since the
beginning after every iteration, in ``history``; the time that keeping takes is not counted.
"""

from collections.abc import Callable

import numpy as np

from baselines import lda, lda_gibbs, prodlda
from baselines.base import Array, Estimate
from experiments.metrics import topic_errors

METHODS: dict[str, Callable[..., Estimate]] = {
    "em": lda.fit_batch,
    "svi": lda.fit_online,
    "prodlda": prodlda.fit,
    "tomotopy": lda_gibbs.fit,
}

TITLES = {
    "em": "batch EM (scikit-learn)",
    "svi": "SVI (scikit-learn)",
    "prodlda": "ProdLDA",
    "tomotopy": "Gibbs sampling (tomotopy)",
}

UNTIL = {
    "em": {"iterations": 500, "tolerance": 1e-5},
    "svi": {"iterations": 500, "tolerance": 1e-5},
    "prodlda": {"iterations": 5000, "tolerance": 1e-3},
    "tomotopy": {"iterations": 500},
}
"""Where baselines end: most passes, and the relative gain of the perplexity or the loss below which they stop."""


def hellinger_course(true: Array, estimate: Estimate) -> Array:
    """Matched Hellinger distance to the true topics after each iteration that was kept."""
    return np.array([topic_errors(true, topics)["hellinger"] for topics in estimate.history["topics"]])


def seconds_to(true: Array, estimate: Estimate, target: float) -> float:
    """Seconds until a fit whose history was kept comes as close as ``target`` to the true topics; infinite if never."""
    reached = np.flatnonzero(hellinger_course(true, estimate) <= target)
    return float(estimate.history["seconds"][reached[0]]) if len(reached) else float("inf")
