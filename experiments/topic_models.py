"""What the tables and figures of topic models share: ours and the baselines behind one interface, and their colours.

A method takes sparse counts, ``topics``, ``seed``, and ``quick`` for a run that only shows that it works.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from threadpoolctl import threadpool_limits

from baselines import topics as peers
from baselines.base import Array, Estimate
from otpdag.errors import ConvergenceWarning
from otpdag.estimators import LatentDirichletAllocation

Method = Callable[..., Estimate]

TITLES = {
    "ours": "otpdag",
    "ours_transport": "otpdag, pairs",
    "ours_paper": "otpdag, paper mode",
    **peers.TITLES,
}
COLOURS = {
    "ours": "#1f7a46",
    "ours_transport": "#7fbf7b",
    "ours_paper": "#b59a2a",
    "em": "#2f5d9b",
    "svi": "#6f6f6f",
    "prodlda": "#d1762b",
    "tomotopy": "#a8434b",
}
HASTE = "A quick run: little data, and the baselines stop early. It shows that all works, not which method is better."
QUICK = {"em": 10, "svi": 5, "prodlda": 20, "tomotopy": 50}  # iterations
CONVERGED = (
    "EM and SVI run until ten passes change the perplexity by less than a hundred-thousandth of it (scikit-learn's own "
    "rule is a change of 0.1, which is sooner), ProdLDA until 1,000 steps gain less than a thousandth of the loss, "
    "Gibbs sampling for 500 sweeps (texts: 2,000); what each had halfway shows what more would change."
)


def ours(counts, *, topics: int, seed: int, **options) -> Estimate:
    """Fit otpdag's estimator, as it comes."""
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # bounds on the iterations are what is looked at
        model = LatentDirichletAllocation(topics, random_state=seed, **options).fit(counts)
    seconds = time.process_time() - begin
    return Estimate({"topics": model.components_, "alpha": model.alpha_}, np.zeros(0), seconds=seconds)


def course_of_ours(counts, *, topics: int, seed: int, after: Sequence[int], **options) -> Estimate:
    """Fit anew with each bound on the iterations, so that nothing but the bound differs."""
    estimates = [ours(counts, topics=topics, seed=seed, max_iter=bound, **options) for bound in after]
    history = {
        "topics": np.stack([estimate.params["topics"] for estimate in estimates]),
        "seconds": np.array([estimate.seconds for estimate in estimates]),
        "iterations": np.array(after, dtype=float),
    }
    return replace(estimates[-1], history=history)


def methods(quick: bool = False) -> dict[str, Method]:
    """All methods whose packages are there, to where they end.

    Baselines keep their course, so that it can be seen whether they had more to gain.
    """
    chosen: dict[str, Method] = {"ours": ours, "ours_transport": partial(ours, method="pairs")}
    for name, run in peers.METHODS.items():
        if name == "tomotopy" and find_spec("tomotopy") is None:
            continue
        until = {"iterations": QUICK[name]} if quick else peers.UNTIL[name]
        chosen[name] = partial(run, keep=True, **until)
    return chosen


def halfway(estimate: Estimate) -> Array | None:
    """Topics after half of the iterations, where they were kept."""
    kept = estimate.history.get("topics", ())
    return kept[len(kept) // 2 - 1] if len(kept) > 1 else None


def fits(
    counts, *, topics: int, seed: int, starts: int, chosen: dict[str, Method]
) -> Iterator[tuple[str, int, Estimate]]:
    """Every method from every start, on one core: its name, the number of the start, and where it ended."""
    with threadpool_limits(1):
        for start in range(starts):
            for name, run in chosen.items():
                yield name, start, run(counts, topics=topics, seed=1000 * seed + start)


def spread(values, digits: int) -> str:
    """Mean ± standard deviation over starts; nothing where nothing was measured."""
    array = np.asarray(values, dtype=float)
    if np.isnan(array).any():
        return ""
    return f"{array.mean():.{digits}f} ± {array.std(ddof=0):.{digits}f}"


def draw_grid(ax: Axes, topic: Array, *, recovered: bool = True) -> None:
    """Draw a topic whose words are the cells of a grid; a red frame marks a pattern that is not the true one."""
    side = round(len(topic) ** 0.5)
    ax.imshow(topic.reshape(side, side), cmap="Greys", vmin=0, vmax=1 / side)
    ax.set(xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set(color="0.75" if recovered else "#d02020", linewidth=0.5 if recovered else 1.8)


def label_decades(axis: Axis, values) -> None:
    """Label two or three numbers of each decade of a logarithmic axis: matplotlib's own labels run into each other."""
    positive = np.asarray(values, dtype=float)
    positive = positive[positive > 1e-5]  # an error of zero has no place on this axis
    low, high = (positive.min() / 1.3, positive.max() * 1.3) if len(positive) else (0.1, 1.0)
    digits = (1, 2, 5) if high / low < 50 else (1, 3)
    ticks = [digit * 10.0**power for power in range(-5, 5) for digit in digits]
    shown = [tick for tick in ticks if low <= tick <= high]
    axis.set_ticks(shown, labels=[f"{tick:g}" for tick in shown])
    axis.set_ticks([], minor=True)
    axis.set_view_interval(low, high, ignore=True)
