"""Fits of documents about bars: the settings of Table 1, and what is measured of each estimate."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from baselines.base import Estimate
from experiments.metrics import grid_distances, patterns_recovered, published_topic_errors, topic_errors
from experiments.registry import Run
from experiments.topic_models import Method, fits, halfway, methods, ours
from otpdag.datasets import Bars, bars


@dataclass(frozen=True)
class Setting:
    """Topics, documents and words of a document."""

    topics: int
    documents: int
    words: int

    def draw(self, seed: int) -> Bars:
        return bars(self.topics, self.documents, self.words, seed=seed)

    @property
    def title(self) -> str:
        return f"K = {self.topics}, {self.documents:,} documents of {self.words} words"


SETTINGS = (Setting(10, 1000, 100), Setting(20, 5000, 200), Setting(30, 10000, 300))
QUICK = (Setting(6, 200, 50),)
STARTS = 5


def settings(quick: bool) -> tuple[Setting, ...]:
    return QUICK if quick else SETTINGS


def run_setting(run: Run, setting: Setting) -> list[pd.DataFrame]:
    """Measure every method from every start on one data set; each fit is a part of the run."""
    drawn, chosen = setting.draw(run.seed), with_paper_mode(setting, run.quick)
    tried = [(name, start) for start in range(starts(run.quick)) for name in chosen]

    def fitted(name: str, start: int) -> pd.DataFrame:
        with threadpool_limits(1):
            estimate = chosen[name](drawn.counts, topics=setting.topics, seed=1000 * run.seed + start)
        return pd.DataFrame([{"topics": setting.topics, "method": name, "start": start, **measure(drawn, estimate)}])

    return run.parts((f"K{setting.topics}-{name}-{start}", partial(fitted, name, start)) for name, start in tried)


def first_fits(setting: Setting, seed: int, *, quick: bool) -> dict[str, Estimate]:
    """Every method from one start."""
    chosen = with_paper_mode(setting, quick)
    runs = fits(setting.draw(seed).counts, topics=setting.topics, seed=seed, starts=1, chosen=chosen)
    return {name: estimate for name, _, estimate in runs}


def with_paper_mode(setting: Setting, quick: bool) -> dict[str, Method]:
    """All methods; the paper mode takes minutes a start, which a quick run has no time for."""
    slow: dict[str, Method] = {"ours_paper": partial(ours, method="paper")} if setting in SETTINGS else {}
    return methods(quick) | slow


def starts(quick: bool) -> int:
    """How many starts every method gets."""
    return 2 if quick else STARTS


def measure(drawn: Bars, estimate: Estimate) -> dict[str, float]:
    """Errors with topics lined up, that of half the iterations too; then those of the paper's table, by name."""
    true, estimated, before = drawn.topics, estimate.params["topics"], halfway(estimate)
    return {
        **topic_errors(true, estimated, ground=grid_distances(drawn.side)),
        "patterns": patterns_recovered(true, estimated),
        "top_words": patterns_recovered(true, estimated, mass=0.0),
        "alpha": float(estimate.params["alpha"].mean()),
        "alpha_error": float(np.abs(estimate.params["alpha"] / drawn.alpha - 1).mean()),
        "seconds": estimate.seconds,
        "hellinger_halfway": float("nan") if before is None else topic_errors(true, before)["hellinger"],
        **{f"published_{name}": value for name, value in published_topic_errors(true, estimated).items()},
    }
