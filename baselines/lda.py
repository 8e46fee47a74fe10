"""Variational Bayes for latent Dirichlet allocation: scikit-learn's, in batch (EM) or online (SVI).

Blei, Ng & Jordan 2003; Hoffman, Blei & Bach 2010. The loop is that of scikit-learn's ``fit``, opened so that each
iteration can be looked at; the iterations are its own, and so are the estimates. Alpha is given and not learned.
"""

import numpy as np
from sklearn.decomposition import LatentDirichletAllocation
from sklearn.utils import gen_batches
from sklearn.utils.parallel import Parallel

from baselines.base import Array, Estimate
from baselines.course import Course

CHECKED_AFTER = 10  # iterations: a look at the perplexity costs one more


def fit_batch(
    counts,
    *,
    topics: int,
    seed: int,
    iterations: int = 100,
    alpha: float | None = None,
    beta: float | None = None,
    tolerance: float | None = None,
    keep: bool = False,
) -> Estimate:
    """Maximise the variational bound over all documents at once.

    Args:
        counts: Words of each document (documents, words), sparse.
        topics: Number of topics, K.
        seed: Determines the start.
        iterations: Iterations; all are done unless there is a tolerance.
        alpha: Concentration of topics in a document; 1 / K if left out.
        beta: Concentration of words in a topic; 1 / K if left out.
        tolerance: Relative change of the perplexity over ten iterations at which to stop.
        keep: Keep the topics after each iteration.
    """
    model = LatentDirichletAllocation(topics, doc_topic_prior=alpha, topic_word_prior=beta, random_state=seed)
    return _run(model, counts, iterations, slices=None, tolerance=tolerance, keep=keep)


def fit_online(
    counts,
    *,
    topics: int,
    seed: int,
    iterations: int = 50,
    alpha: float | None = None,
    beta: float | None = None,
    batch: int = 50,
    tolerance: float | None = None,
    keep: bool = False,
) -> Estimate:
    """Follow noisy natural gradients of that bound, a batch of documents at a time.

    Args:
        counts: Words of each document (documents, words), sparse.
        topics: Number of topics, K.
        seed: Determines the start.
        iterations: Passes over the documents; all are done unless there is a tolerance.
        alpha: Concentration of topics in a document; 1 / K if left out.
        beta: Concentration of words in a topic; 1 / K if left out.
        batch: Documents in a batch; the paper's number.
        tolerance: Relative change of the perplexity over ten passes at which to stop.
        keep: Keep the topics after each pass.
    """
    model = LatentDirichletAllocation(
        topics,
        doc_topic_prior=alpha,
        topic_word_prior=beta,
        learning_method="online",
        batch_size=batch,
        random_state=seed,
    )
    slices = list(gen_batches(counts.shape[0], batch))
    return _run(model, counts, iterations, slices=slices, tolerance=tolerance, keep=keep)


def _run(
    model, counts, iterations: int, *, slices: list[slice] | None, tolerance: float | None, keep: bool
) -> Estimate:
    rows, before = counts.shape[0], np.inf
    course = Course(keep)
    checked = model._check_non_neg_array(counts, reset_n_features=True, whom="baselines.lda")
    model._init_latent_vars(checked.shape[1], dtype=checked.dtype)
    with Parallel(n_jobs=1) as parallel:
        for done in range(1, iterations + 1):
            for part in slices or [slice(None)]:
                model._em_step(checked[part], total_samples=rows, batch_update=slices is None, parallel=parallel)
            course.look(lambda: _topics(model))
            if tolerance is not None and done % CHECKED_AFTER == 0:
                now = _perplexity(model, checked, parallel)
                if abs(before - now) < tolerance * now:
                    break
                before = now
    seconds = course.seconds
    model.n_iter_ = done
    alpha = np.full(model.n_components, model.doc_topic_prior_)
    params = {"topics": _topics(model), "alpha": alpha}
    return Estimate(params, np.array([model.score(checked)]), course.history, seconds=seconds)


def _perplexity(model, counts, parallel: Parallel) -> float:
    shares, _ = model._e_step(counts, cal_sstats=False, random_init=False, parallel=parallel)
    return float(model._perplexity_precomp_distr(counts, shares, sub_sampling=False))


def _topics(model) -> Array:
    return model.components_ / model.components_.sum(axis=1, keepdims=True)
