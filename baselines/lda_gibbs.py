"""Collapsed Gibbs sampling for latent Dirichlet allocation: tomotopy, the fast peer; alpha is learned.

tomotopy is part of the extra ``bench``.
"""

import numpy as np

from baselines.base import Array, Estimate
from baselines.course import Course

_STRIDE = 10  # iterations between looks, and between updates of alpha


def fit(
    counts,
    *,
    topics: int,
    seed: int,
    iterations: int = 500,
    alpha: float | None = None,
    beta: float = 0.01,
    keep: bool = False,
) -> Estimate:
    """Sample assignments in turn, on one core.

    Args:
        counts: Words of each document (documents, words), sparse.
        topics: Number of topics, K.
        seed: Determines the draws.
        iterations: Sweeps over all words.
        alpha: Where the concentration of topics in a document begins; 1 / K if left out.
        beta: Concentration of words in a topic, fixed.
        keep: Keep the topics after every ten sweeps.

    Returns:
        Topics of the last sweep; a word that no document has gets what the prior gives it.
    """
    import tomotopy

    rows, words = counts.tocsr(), np.array([str(word) for word in range(counts.shape[1])])
    course = Course(keep)
    model = tomotopy.LDAModel(k=topics, alpha=alpha or 1 / topics, eta=beta, seed=seed)
    for row in range(rows.shape[0]):
        span = slice(rows.indptr[row], rows.indptr[row + 1])
        model.add_doc(np.repeat(words[rows.indices[span]], rows.data[span]).tolist())
    for done in range(0, iterations, _STRIDE):
        model.train(min(_STRIDE, iterations - done), workers=1)
        course.look(lambda: _topics(model, len(words)))
    seconds = course.seconds
    params = {"topics": _topics(model, len(words)), "alpha": np.array(model.alpha, dtype=float)}
    return Estimate(params, np.array([model.ll_per_word]), course.history, seconds=seconds)


def _topics(model, words: int) -> Array:
    columns = np.array([int(word) for word in model.used_vocabs])
    params = np.zeros((model.k, words))
    params[:, columns] = [model.get_topic_word_dist(topic) for topic in range(model.k)]
    mass = model.get_count_by_topics() + model.eta * len(columns)
    unseen = np.setdiff1d(np.arange(words), columns)
    params[:, unseen] = (model.eta / mass)[:, None]
    return params / params.sum(axis=1, keepdims=True)
