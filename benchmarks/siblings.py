"""Two observed children of one hidden node: does the fitted model keep them correlated?"""

import numpy as np
import pandas as pd

import otpdag as otp
from benchmarks.harness import Outcome, Record, Settings, Streams, by_method, streams, summary, timed
from benchmarks.oracles import sibling_sample
from benchmarks.problems import one_factor
from experiments.small_models import factor

ROWS = 5000
SAMPLES = 20_000
LIMIT = 0.03


def sibling_correlation(settings: Settings) -> Record:
    """The correlation of two siblings in samples of the model against that in the data; 1 is a gap of 0.03.

    The oracle samples from the maximum-likelihood model: its gap is the noise of the samples alone.
    """
    repeats = range(settings.repeats)
    oracle = summary("oracle", [_oracle(settings.seed, repeat) for repeat in repeats])

    def measure(method: str) -> Record:
        ours = summary("ours", [_ours(settings.seed, repeat, method) for repeat in repeats])
        return {"ratio": ours["ours"] / LIMIT} | ours

    return {"limit": 1.0} | by_method(settings, measure) | oracle


def _data(seed: int, repeat: int) -> tuple[pd.DataFrame, Streams]:
    sources = streams(seed, "sibling_correlation", repeat)
    return factor(ROWS, sources.data, indicators=2)[0], sources


def _oracle(seed: int, repeat: int) -> Outcome:
    frame, sources = _data(seed, repeat)
    sample, seconds = timed(lambda: sibling_sample(frame, SAMPLES, sources.oracle))
    return Outcome(correlation_gap(frame, sample), seconds)


def _ours(seed: int, repeat: int, method: str) -> Outcome:
    frame, sources = _data(seed, repeat)
    model = one_factor(list(frame))
    _, seconds = timed(lambda: otp.fit(model, frame, seed=sources.fit, method=method))
    return Outcome(correlation_gap(frame, model.sample(SAMPLES, seed=sources.oracle)), seconds)


def correlation_gap(frame: pd.DataFrame, sample: pd.DataFrame) -> float:
    """The absolute difference of the correlations of the two siblings."""
    first, second = (np.corrcoef(table["x1"], table["x2"])[0, 1] for table in (frame, sample))
    return float(abs(first - second))
