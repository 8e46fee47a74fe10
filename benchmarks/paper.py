"""The paper's practice as printed: what ``method="paper"`` recovers, beside what the paper says of it.

Settings are those of Appendix C (``docs/methods.md`` lists where it is silent); with ``--quick`` bars of twenty topics
have fewer epochs, and hidden Markov models ten data sets in place of forty. A ``ratio`` of at most one holds.
"""

import warnings
from functools import partial

import numpy as np
from sklearn.preprocessing import minmax_scale
from threadpoolctl import threadpool_limits

from baselines import lda
from baselines.vq_vae import VQVAE
from benchmarks.harness import Case, Record, Settings, Skip, timed
from experiments.corpora import corpus
from experiments.image_sets import load_images
from experiments.metrics import patterns_recovered, top_words, topic_errors
from experiments.mixtures import METHODS, Paired, simulate
from experiments.paper_chain import fit_paper, least_cost
from experiments.paper_codebook import PaperCodebook
from experiments.small_models import poisson_chain
from otpdag.datasets import bars
from otpdag.errors import ConvergenceWarning, DataError
from otpdag.estimators import LatentDirichletAllocation
from otpdag.metrics import npmi_coherence, topic_diversity

BARS = {10: (1000, 100, 0.95, 0.9), 20: (5000, 200, 0.85, 0.0)}
"""By the number of topics: documents, words of each, and least shares of patterns, by top words and strictly."""
EPOCHS = 300
QUICK_EPOCHS = {10: 300, 20: 60}
FARTHEST = 0.35  # Hellinger distance of ten topics
ALPHA_WITHIN = 0.15
RATES = np.array([0.040, 0.079, 0.148, 0.084])  # Table 3, min-max errors
STAY = 0.12
STATES, SEQUENCES, LENGTH, STARTS = 4, 250, 200, 5
WIDTH = 10.0  # of the range that every rate is drawn from
TIMES_PLAIN = 3.0  # perplexity of codewords, over a plain VQ-VAE's
MIXTURES = {"variances": "wrong_variances", "weights": "wrong_weights", "both": "wrong_both"}


def is_quick(settings: Settings) -> bool:
    """Whether few data sets are asked for."""
    return settings.repeats <= 5


def bars_recovered(topics: int, settings: Settings) -> Record:
    """Shares of true bars by their top words and strictly, Hellinger distances, and the mean of alpha over 1/K."""
    documents, words, least, least_strict = BARS[topics]
    found: dict[str, list[float]] = {name: [] for name in ("top", "strict", "hellinger", "alpha", "seconds")}
    for number in range(3):
        seed = (1000 * settings.seed + number) % 2**31
        drawn = bars(topics, documents, words, seed=seed)
        epochs = QUICK_EPOCHS[topics] if is_quick(settings) else EPOCHS
        estimator = LatentDirichletAllocation(topics, method="paper", max_iter=epochs, random_state=seed)
        with threadpool_limits(1):
            fitted, seconds = timed(partial(estimator.fit, drawn.counts))
        estimate = fitted.components_
        found["top"].append(patterns_recovered(drawn.topics, estimate, mass=0.0))
        found["strict"].append(patterns_recovered(drawn.topics, estimate))
        found["hellinger"].append(topic_errors(drawn.topics, estimate)["hellinger"])
        found["alpha"].append(float(fitted.alpha_.mean() * topics))
        found["seconds"].append(seconds)
    means = {name: float(np.mean(values)) for name, values in found.items()}
    over = [least / max(means["top"], 1e-9), least_strict / max(means["strict"], 1e-9)]
    if topics == 10:
        over += [means["hellinger"] / FARTHEST, abs(means["alpha"] - 1) / ALPHA_WITHIN]
    return {"ratio": max(over), **means, **{f"{name}_each": values for name, values in found.items()}}


def chains(settings: Settings) -> Record:
    """Min-max errors of the four rates, and the error of the stay probability.

    Rates are scaled by the range that they are drawn from. Beside that: errors with estimates and true rates each
    scaled by their own least and largest, and those where the printed cost is least, which no fit can help.
    """
    found, true, stays = [], [], []
    for number in range(2 * settings.repeats):
        seed = (1000 * settings.seed + number) % 2**31
        counts, _, truth = poisson_chain(SEQUENCES, LENGTH, np.random.default_rng(seed))
        with threadpool_limits(1):
            rates, stay = fit_paper(counts, states=STATES, starts=STARTS, seed=seed)
        found.append(rates)
        true.append(np.sort(np.exp(truth["x"]["log_rate"]).ravel()))
        stays.append(abs(stay - float(truth["z"]["stay"])))
    least = [least_cost(rates) for rates in true]
    means = (np.abs(np.subtract(found, true)).mean(0) / WIDTH).tolist()
    own = np.abs(minmax_scale(found) - minmax_scale(true)).mean(0).tolist()
    inherent = (np.abs(np.subtract(least, true)).mean(0) / WIDTH).tolist()
    stay = float(np.mean(stays))
    ratio = max(float(np.divide(means, RATES).max()), stay / STAY)
    errors = {"hmm_rates": means, "hmm_rates_own_range": own, "hmm_least_cost": inherent}
    return {"ratio": ratio, **errors, "hmm_stay": stay, "stay_each": stays}


def mixture(case: str, settings: Settings, *, steps: int = 300, sims: int = 100) -> Record:
    """The mean error of means over EM's, where what both are told is wrong (Figure 1)."""
    given = simulate(settings.seed, sims=sims)
    final = {
        name: METHODS[name](given, given.cases[case], steps, settings.seed).final for name in ("EM", "ours, paper mode")
    }
    ours, em = (float(final[name].mean()) for name in ("ours, paper mode", "EM"))
    apart = Paired.of(final["ours, paper mode"], final["EM"])
    return {"ratio": ours / em, "ours": ours, "oracle": em, "difference": [apart.low, apart.mean, apart.high]}


def texts(settings: Settings, *, epochs: int = 300) -> Record:
    """Coherence times diversity of BBC News after so many epochs of paper mode, one start, and of SVI."""
    try:
        text = corpus("BBC_News")
    except DataError as error:
        raise Skip(str(error)) from error
    estimator = LatentDirichletAllocation(
        10, method="paper", topics="dirichlet", n_init=1, max_iter=epochs, random_state=settings.seed % 2**31
    )
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted, seconds = timed(partial(estimator.fit, text.counts))
        svi = lda.fit_online(text.counts, topics=10, seed=settings.seed, iterations=epochs)
    products = {}
    for name, found in (("ours", fitted.components_), ("svi", svi.params["topics"])):
        words = top_words(found, text.vocabulary, 10)
        coherence, diversity = float(npmi_coherence(words, text.documents).mean()), topic_diversity(words)
        products |= {name: coherence * diversity, f"{name}_coherence": coherence, f"{name}_diversity": diversity}
    return {"ratio": products["svi"] / max(products["ours"], 1e-9), "seconds": seconds, **products}


def codewords(name: str, settings: Settings, *, train: int = 600, epochs: int = 10, codes: int = 128) -> Record:
    """Three times the perplexity of a plain VQ-VAE over that of the paper's codewords, on images that had no part."""
    try:
        images = load_images(name, train=train, test=200, source="prepared").padded(32)
    except DataError as error:
        raise Skip(str(error)) from error
    found = {}
    for label, kind in (("ours", PaperCodebook), ("vq_vae", VQVAE)):
        model = kind(codes, 16, width=32, n_epochs=epochs, batch_size=32, random_state=settings.seed % 2**31)
        with threadpool_limits(1):
            _, found[f"{label}_seconds"] = timed(partial(model.fit, images.train))
        error = np.square(model.reconstruct(images.test).astype(float) - images.test).mean()
        found |= {label: model.perplexity(images.test), f"{label}_squared_error": float(error)}
    return {"ratio": TIMES_PLAIN * found["vq_vae"] / found["ours"], **found}


CASES: dict[str, Case] = {
    "bars10": partial(bars_recovered, 10),
    "bars20": partial(bars_recovered, 20),
    "hmm": chains,
    **{f"figure1_{name}": partial(mixture, case) for name, case in MIXTURES.items()},
    "texts": texts,
    **{f"codewords_{name}": partial(codewords, name) for name in ("cifar10", "mnist")},
}
