"""Topics: synthetic bars beside scikit-learn's batch EM, and three corpora beside EM, SVI, ProdLDA and Gibbs sampling.

Everything is fitted with the default, ``method="auto"``. Lists of top words are ranked by relevance with weight 0.6
(``top_words``' default, Sievert & Shirley's own) in ``..._quality``, and by probability in
``..._quality_by_probability``: ours and the baselines' alike. Baselines take an hour of a core to where they end: a
quick run gives EM, SVI and ProdLDA some passes, a full one all, and both compare with what is kept of Table 2 as well,
where they ran to their end.
"""

import multiprocessing
import os
import resource
import time
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from benchmarks.harness import Case, Outcome, Record, Settings, Skip, streams, summary, timed
from experiments.corpora import Corpus, corpus
from experiments.metrics import patterns_recovered, topic_errors
from otpdag.datasets import bars
from otpdag.errors import DataError
from otpdag.estimators import LatentDirichletAllocation
from otpdag.metrics import npmi_coherence, topic_diversity

SIZES = {10: (1000, 100), 20: (5000, 200), 30: (10000, 300)}
RELEVANCE = 0.6
RANKINGS = {"by_relevance": RELEVANCE, "by_probability": 1.0}
TOPICS = 10
NAMES = {"bbc": "BBC_News", "dblp": "DBLP", "20ng": "20NewsGroup"}
PUBLISHED = {"bbc": 9.12, "dblp": 7.66, "20ng": 10.45}  # per cent, the paper's Table 2
LEAST_DIVERSITY = 85.0
SWEEPS_OF_GIBBS = 2000
PASSES = {
    "bbc": {"em": 100, "svi": 50, "prodlda": 200, "tomotopy": SWEEPS_OF_GIBBS},
    "dblp": {"em": 50, "svi": 10, "prodlda": 50, "tomotopy": SWEEPS_OF_GIBBS},
    "20ng": {"em": 50, "svi": 10, "prodlda": 100, "tomotopy": SWEEPS_OF_GIBBS},
}
"""Passes of baselines over the documents in a quick run."""
TABLE2 = Path(__file__).parents[1] / "results" / "table2" / "table2.csv"
PRODUCTS = {"by_relevance": "relevant_product", "by_probability": "product"}
PARTS = {
    "bbc": ("bbc", 2225, 10_000),
    "bbc, first 50 words": ("bbc", 2225, 50),
    "20ng, 4,000 documents": ("20ng", 4000, 10_000),
    "20ng, first 15 words": ("20ng", 8000, 15),
    "dblp, 20,000 documents": ("dblp", 20_000, 10_000),
}
"""Corpora on which the choice is judged: which, how many of its documents, and how many words of each."""
LEAST_OF_BETTER = 0.95
QUICK_REPEATS = 5
QUICK_STARTS, FULL_STARTS, FULL_PEER_STARTS = 3, 5, 3
SWEEPS = 5


def peers():
    try:
        from baselines import topics
    except ImportError as error:
        raise Skip("the baselines of topic models: run `make bench-setup`") from error
    return topics


# --- bars ---------------------------------------------------------------------------------------------------------


@cache
def drawn(seed: int, topics: int, repeat: int):
    sources = streams(seed, f"bars{topics}", repeat)
    documents, words = SIZES[topics]
    return bars(topics, documents, words, seed=sources.data), sources


@cache
def ours(seed: int, topics: int, repeat: int):
    data, sources = drawn(seed, topics, repeat)
    model = LatentDirichletAllocation(topics, random_state=sources.fit % 2**31)
    with threadpool_limits(1):
        return timed(lambda: model.fit(data.counts), time.process_time)


@cache
def theirs(seed: int, topics: int, repeat: int):
    data, sources = drawn(seed, topics, repeat)
    with threadpool_limits(1):
        until = peers().UNTIL["em"]
        return peers().METHODS["em"](data.counts, topics=topics, seed=sources.oracle % 2**31, keep=True, **until)


def error(seed: int, topics: int, repeat: int) -> float:
    data, _ = drawn(seed, topics, repeat)
    return topic_errors(data.topics, ours(seed, topics, repeat)[0].components_)["hellinger"]


def hellinger(topics: int, settings: Settings) -> Record:
    """Matched Hellinger distance to the true topics over that of batch EM."""
    us, them, passes = [], [], []
    for repeat in range(settings.repeats):
        data, _ = drawn(settings.seed, topics, repeat)
        us.append(Outcome(error(settings.seed, topics, repeat), ours(settings.seed, topics, repeat)[1]))
        estimate = theirs(settings.seed, topics, repeat)
        them.append(Outcome(topic_errors(data.topics, estimate.params["topics"])["hellinger"], estimate.seconds))
        passes.append(len(estimate.history["topics"]))
    record = summary("ours", us) | summary("oracle", them)
    each = {"ours_each": [one.value for one in us], "oracle_each": [one.value for one in them]}
    return {"ratio": record["ours"] / record["oracle"], "limit": 0.5} | record | each | {"oracle_passes": passes}


def patterns(topics: int, settings: Settings) -> Record:
    """Share of true bars recovered exactly, over all data sets; ``oracle`` is batch EM's share."""
    us, them = [], []
    for repeat in range(settings.repeats):
        data, _ = drawn(settings.seed, topics, repeat)
        us.append(patterns_recovered(data.topics, ours(settings.seed, topics, repeat)[0].components_))
        them.append(patterns_recovered(data.topics, theirs(settings.seed, topics, repeat).params["topics"]))
    return {"ratio": float(np.mean(us)), "at_least": 1.0, "ours_each": us, "oracle": float(np.mean(them))}


def alpha_error(topics: int, settings: Settings) -> Record:
    """Relative error of alpha, averaged over topics as in the paper; the mean over data sets, and the worst."""
    found = [ours(settings.seed, topics, repeat)[0].alpha_ for repeat in range(settings.repeats)]
    errors = [float(abs(alpha.mean() * topics - 1)) for alpha in found]
    by_topic = float(np.mean([np.abs(alpha * topics - 1).mean() for alpha in found]))
    return {
        "ratio": float(np.mean(errors)),
        "limit": 0.1,
        "worst": max(errors),
        "ours_each": errors,
        "topic_by_topic_error": by_topic,
    }


def fit_time(topics: int, settings: Settings) -> Record:
    """Our time over batch EM's to come as close to the truth; all its iterations where it never does."""
    us, them, never = [], [], 0
    for repeat in range(settings.repeats):
        data, _ = drawn(settings.seed, topics, repeat)
        us.append(ours(settings.seed, topics, repeat)[1])
        estimate = theirs(settings.seed, topics, repeat)
        reached = peers().seconds_to(data.topics, estimate, error(settings.seed, topics, repeat))
        never += not np.isfinite(reached)
        them.append(min(reached, estimate.seconds))
    return {
        "ratio": float(np.mean(us) / np.mean(them)),
        "limit": 0.5,
        "ours": float(np.mean(us)),
        "oracle": float(np.mean(them)),
        "oracle_never_as_close": never,
    }


def full_only(case: Case, settings: Settings) -> Record:
    if settings.repeats <= QUICK_REPEATS:
        raise Skip("the full run: leave out --quick")
    return case(settings)


# --- corpora ------------------------------------------------------------------------------------------------------


@cache
def text(name: str):
    try:
        return corpus(NAMES[name], download=False)
    except DataError as error:
        raise Skip(f"the corpus {NAMES[name]}: set OTPDAG_DATA ({error})") from error


def judged(documents, words) -> dict[str, float]:
    """Coherence and diversity of lists of words, in per cent, and their product."""
    coherence = 100 * float(np.mean(npmi_coherence(words, documents)))
    diversity = 100 * topic_diversity(words)
    return {"coherence": coherence, "diversity": diversity, "quality": coherence * diversity / 1e4}


def ranked(data, topics, relevance: float) -> list[list[str]]:
    frequency = np.asarray(data.counts.sum(0)).ravel() + 1e-9
    lift = np.log(np.maximum(topics, 1e-300)) - (1 - relevance) * np.log(frequency / frequency.sum())
    order = np.argsort(-lift, axis=1, kind="stable")[:, :10]
    return [[data.vocabulary[word] for word in row] for row in order]


def by_ranking(data, topics) -> dict[str, dict[str, float]]:
    return {name: judged(data.documents, ranked(data, topics, weight)) for name, weight in RANKINGS.items()}


@cache
def our_topics(name: str, settings: Settings):
    """Figures of each start, by relevance and by probability."""
    data, runs = text(name), []
    starts = QUICK_STARTS if settings.repeats <= QUICK_REPEATS else FULL_STARTS
    for start in range(starts):
        state = streams(settings.seed, name, start).fit % 2**31
        model = LatentDirichletAllocation(TOPICS, random_state=state)
        with threadpool_limits(1):
            fitted, seconds = timed(partial(model.fit, data.counts), time.process_time)
        chosen = {"seconds": seconds, "method": fitted.result_.method.name, "notes": fitted.result_.notes}
        runs.append(chosen | by_ranking(data, fitted.components_))
    return runs


@cache
def their_topics(name: str, settings: Settings):
    """Of each baseline the mean figures by both rankings."""
    quick = settings.repeats <= QUICK_REPEATS
    figures = {}
    for method, iterations in PASSES[name].items():
        until = {"iterations": iterations} if quick or method == "tomotopy" else peers().UNTIL[method]
        runs = []
        for start in range(1 if quick else FULL_PEER_STARTS):
            state = streams(settings.seed, name, start).oracle % 2**31
            with threadpool_limits(1):
                estimate = peers().METHODS[method](text(name).counts, topics=TOPICS, seed=state, **until)
            runs.append({"seconds": estimate.seconds, **by_ranking(text(name), estimate.params["topics"])})
        means = {
            ranking: {figure: float(np.mean([run[ranking][figure] for run in runs])) for figure in runs[0][ranking]}
            for ranking in RANKINGS
        }
        seconds = float(np.mean([run["seconds"] for run in runs]))
        figures[method] = means | until | {"seconds": seconds, "starts": len(runs)}
    return figures


def converged(name: str, ranking: str) -> dict[str, float]:
    """Mean quality of baselines at their end, from what is kept of Table 2."""
    kept = pd.read_csv(TABLE2)
    theirs = kept[(kept["corpus"] == NAMES[name]) & kept["method"].isin(list(peers().METHODS))]
    return {str(method): float(mean) for method, mean in theirs.groupby("method")[PRODUCTS[ranking]].mean().items()}


def quality(name: str, ranking: str, settings: Settings) -> Record:
    """Coherence times diversity over that of the best baseline, all ranked alike."""
    us, them, ended = our_topics(name, settings), their_topics(name, settings), converged(name, ranking)
    best = {method: figures[ranking]["quality"] for method, figures in them.items()}
    best |= {f"{method}, converged (Table 2)": figure for method, figure in ended.items()}
    record = summary("ours", [Outcome(run[ranking]["quality"], run["seconds"]) for run in us])
    return {
        "ratio": record["ours"] / max(best.values()),
        "at_least": 1.0,
        "oracle": max(best.values()),
        "best_baseline": max(best, key=lambda method: best[method]),
        "methods": [run["method"] for run in us],
        "baselines": them,
        "converged": ended,
        "rebuilt_corpus": text(name).rebuilt,
    } | record


def part_of(name: str, documents: int, words: int) -> Corpus:
    """Some documents of a corpus, drawn evenly, and the first words of each."""
    whole = text(name)
    rows = np.linspace(0, len(whole.documents) - 1, min(documents, len(whole.documents))).astype(int)
    kept = tuple(whole.documents[row][:words] for row in rows)
    vocabulary = tuple(sorted({word for document in kept for word in document}))
    return Corpus(whole.title, kept, vocabulary, (), (), whole.source, whole.rebuilt)


def fitted_by(method, data: Corpus, state: int) -> LatentDirichletAllocation:
    with threadpool_limits(1):
        return LatentDirichletAllocation(TOPICS, method=method, random_state=state).fit(data.counts)


def auto_choice(settings: Settings) -> Record:
    """Least quality, by relevance, of what ``auto`` chose over that of the better method, on five corpora."""
    record = {}
    for title, (name, documents, words) in PARTS.items():
        data, figures = part_of(name, documents, words), {}
        state = streams(settings.seed, title, 0).fit % 2**31
        fitted = fitted_by("auto", data, state)
        chosen = fitted.result_.method.name
        # what auto chose is fitted as if it had been named, from the same seed
        other = "likelihood" if chosen == "pairs" else "pairs"
        for method, model in {"auto": fitted, other: fitted_by(other, data, state)}.items():
            figures[method] = by_ranking(data, model.components_)["by_relevance"]["quality"]
        better = max(figures.values())
        ratio = 1.0 if figures["auto"] >= better else figures["auto"] / better
        record[title] = figures | {"chosen": chosen, "notes": fitted.result_.notes, "ratio": ratio}
    ratios = [figures["ratio"] for figures in record.values()]
    return {"ratio": min(ratios), "at_least": LEAST_OF_BETTER, "corpora": record}


def figure_of(figure: str, name: str, settings: Settings) -> Record:
    """Coherence or diversity of our topics in per cent; ``at_least`` is the paper's coherence, or 85."""
    values = [run["by_relevance"][figure] for run in our_topics(name, settings)]
    least = PUBLISHED[name] if figure == "coherence" else LEAST_DIVERSITY
    return {"ratio": float(np.mean(values)), "at_least": least, "ours_each": values}


# --- size ---------------------------------------------------------------------------------------------------------


def _measured(options, documents: int, seed: int, queue) -> None:
    """In a process of its own, so that its peak of memory is that of the fit."""
    import warnings

    warnings.simplefilter("ignore")
    counts = text("dblp").counts[:documents]
    model = LatentDirichletAllocation(TOPICS, random_state=seed, **options)
    _, seconds = timed(lambda: model.fit(counts))
    queue.put((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2))


def measured(options, documents: int, seed: int) -> tuple[float, float]:
    """Seconds and peak gigabytes of a fit of some of DBLP's documents."""
    text("dblp")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_measured, args=(options, documents, seed, queue))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    process.start()
    found = queue.get(timeout=1200)
    process.join()
    return found


@cache
def dblp_fit(seed: int):
    return {method: measured({"method": method}, len(text("dblp")), seed) for method in ("pairs", "likelihood")}


def dblp_time(settings: Settings) -> Record:
    """Seconds of a fit of all of DBLP; the slower of the two methods."""
    found = dblp_fit(settings.seed)
    return {
        "ratio": max(seconds for seconds, _ in found.values()),
        "limit": 120.0,
        "documents": len(text("dblp")),
        "seconds_by_method": {method: seconds for method, (seconds, _) in found.items()},
    }


def dblp_memory(settings: Settings) -> Record:
    """Peak gigabytes of the process that fits all of DBLP; the larger of the two methods."""
    found = dblp_fit(settings.seed)
    return {
        "ratio": max(peak for _, peak in found.values()),
        "limit": 2.0,
        "gigabytes_by_method": {method: peak for method, (_, peak) in found.items()},
    }


def dblp_flat(settings: Settings) -> Record:
    """Time of a document in fits of all of DBLP over that in fits of a quarter, at as many sweeps; memory likewise."""
    rows, record = len(text("dblp")), {}
    for method, steps in (("likelihood", SWEEPS), ("pairs", 50)):
        options = {"method": method, "n_init": 1, "max_iter": steps}
        few, many = measured(options, rows // 4, settings.seed), measured(options, rows, settings.seed)
        record[method] = {"time": many[0] / few[0] / 4, "memory": many[1] / few[1], "seconds": many[0]}
    return {"ratio": max(found["time"] for found in record.values()), "limit": 1.25, "by_method": record}


CASES: dict[str, Case] = {
    "bars10_hellinger": partial(hellinger, 10),
    "bars10_patterns": partial(patterns, 10),
    "bars10_alpha_error": partial(alpha_error, 10),
    "bars20_hellinger": partial(hellinger, 20),
    "bars20_patterns": partial(patterns, 20),
    "bars20_alpha_error": partial(alpha_error, 20),
    "bars20_time": partial(fit_time, 20),
    "bars30_hellinger": partial(full_only, partial(hellinger, 30)),
    "bars30_patterns": partial(full_only, partial(patterns, 30)),
    "bars30_alpha_error": partial(full_only, partial(alpha_error, 30)),
    **{f"{name}_quality": partial(quality, name, "by_relevance") for name in NAMES},
    **{f"{name}_quality_by_probability": partial(quality, name, "by_probability") for name in NAMES},
    "auto_choice": auto_choice,
    **{f"{name}_{f}": partial(figure_of, f, name) for name in NAMES for f in ("coherence", "diversity")},
    "dblp_time": dblp_time,
    "dblp_memory": dblp_memory,
    "dblp_flat": dblp_flat,
}
