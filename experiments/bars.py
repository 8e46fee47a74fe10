"""Fits of documents about bars: the settings of Table 1, and what is measured of each estimate."""

from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import pandas as pd

from baselines.base import Estimate
from experiments.topic_models import fits, methods, ours
from otpdag.datasets import Bars, bars
from otpdag.metrics import grid_distances, patterns_recovered, published_topic_errors, topic_errors


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
PASSES = {10: 50, 20: 20, 30: 10}  # of SVI: 1,000 batches and more


def settings(quick: bool) -> tuple[Setting, ...]:
    return QUICK if quick else SETTINGS


def run_setting(setting: Setting, seed: int, *, starts: int, quick: bool) -> tuple[pd.DataFrame, dict[str, Estimate]]:
    """Measure every method from every start on one data set; the estimates of the first start besides."""
    drawn = setting.draw(seed)
    chosen = methods(quick, svi=PASSES.get(setting.topics, 50))
    rows, first = [], {}
    runs = fits(drawn.counts, topics=setting.topics, seed=seed, starts=starts, chosen=chosen)
    if setting == SETTINGS[0]:  # a quarter of an hour a start, and hours on the others
        slow = {"ours_paper": partial(ours, method="paper")}
        runs = chain(runs, fits(drawn.counts, topics=setting.topics, seed=seed, starts=1, chosen=slow))
    for name, start, estimate in runs:
        first.setdefault(name, estimate)
        rows.append({"topics": setting.topics, "method": name, "start": start, **measure(drawn, estimate)})
    return pd.DataFrame(rows), first


def measure(drawn: Bars, estimate: Estimate) -> dict[str, float]:
    """Errors with topics lined up, then those of the paper's table, by name."""
    true, estimated = drawn.topics, estimate.params["topics"]
    return {
        **topic_errors(true, estimated, ground=grid_distances(drawn.side)),
        "patterns": patterns_recovered(true, estimated),
        "alpha": float(estimate.params["alpha"].mean()),
        "alpha_error": float(np.abs(estimate.params["alpha"] / drawn.alpha - 1).mean()),
        "seconds": estimate.seconds,
        **{f"published_{name}": value for name, value in published_topic_errors(true, estimated).items()},
    }
