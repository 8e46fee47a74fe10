"""Truth: where a result could mislead: gaps in time, forecasts of short series, the price of gaps.

``ratio`` is what each case limits; ``low`` and ``high``, or ``limit``, stand beside it.
"""

from functools import partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import optimize, stats

import otpdag as otp
from benchmarks.harness import Case, Record, Settings, streams, timed
from otpdag import mechanisms as m

Floats = NDArray[np.float64]

LEVEL = 0.9
STEPS, MISSING = 300, 0.4
COVERED_SETS_FOR_EACH_REPEAT, FORECAST_SETS_FOR_EACH_REPEAT = 10, 60
STATES = np.arange(60)
TRUTHS = {"normal": np.array([0.2, 0.8, 1.0]), "counts": np.array([0.5, 0.12])}
MODELS = {"normal": m.Normal, "counts": m.Poisson}
NAMES = {"normal": ("loc", "weight", "scale"), "counts": ("log_rate", "weight")}


# -- gaps in time ------------------------------------------------------------------------------------------------------


def series(kind: str, steps: int, rng: np.random.Generator) -> Floats:
    """An autoregression of numbers, or of counts, past its first steps."""
    values = np.zeros(steps + 50)
    for step in range(1, len(values)):
        before = values[step - 1]
        if kind == "normal":
            values[step] = 0.2 + 0.8 * before + rng.normal()
        else:
            values[step] = rng.poisson(np.exp(0.5 + 0.12 * min(before, 12.0)))
    return values[50:]


def emptied(values: Floats, at_random: bool, rng: np.random.Generator) -> Floats:
    """Lost completely at random, or at random: often before a high value that is recorded. The first one is seen."""
    seen = rng.random(len(values)) >= MISSING
    if at_random:
        seen[:] = True
        high, lost = np.median(values), rng.random(len(values)) < 0.7
        for step in range(len(values) - 1, 0, -1):
            seen[step - 1] = not (seen[step] and values[step] > high and lost[step])
    seen[0] = True
    return np.where(seen, values, np.nan)


def exact(kind: str, values: Floats) -> Floats:
    """The maximum of the exact likelihood: variances of gaps add up for numbers, states are summed for counts."""
    loss = partial(_normal_loss if kind == "normal" else _count_loss, values)
    start = [0.0, 0.5, 0.0] if kind == "normal" else [0.5, 0.05]
    found = optimize.minimize(loss, start, method="BFGS", options={"gtol": 1e-6}).x
    return np.array([found[0], found[1], np.exp(found[2])]) if kind == "normal" else found


def _normal_loss(values: Floats, point: Floats) -> float:
    at = np.flatnonzero(~np.isnan(values))
    powers = [point[1] ** np.arange(ahead) for ahead in np.diff(at)]
    means = [point[1] ** len(p) * values[i] + point[0] * p.sum() for i, p in zip(at[:-1], powers, strict=True)]
    scales = [np.exp(point[2]) * np.sqrt((p**2).sum()) for p in powers]
    return float(-stats.norm.logpdf(values[at[1:]], means, scales).sum())


def _count_loss(values: Floats, point: Floats) -> float:
    rate = np.exp(np.clip(point[0] + point[1] * STATES, -30.0, 30.0))
    move = stats.poisson.pmf(STATES, rate[:, None])
    belief, total = (values[0] == STATES).astype(float), 0.0
    for value in values[1:]:
        belief = belief @ move * (np.isnan(value) | (value == STATES))
        total += np.log(belief.sum() + 1e-300)
        belief /= belief.sum() + 1e-300
    return float(-total)


def _fitted(kind: str, values: Floats, seed: int) -> tuple[otp.Model, otp.FitResult]:
    model = otp.Model(otp.Graph([otp.lag("x", "x")]), {"x": MODELS[kind]()})
    return model, otp.fit(model, pd.DataFrame({"x": values}), seed=seed, progress=False)


def _estimate(kind: str, model: otp.Model) -> Floats:
    own = model.params()["x"]
    return np.array([float(np.ravel(own[name])[0]) for name in NAMES[kind]])


def ar_gaps(settings: Settings) -> Record:
    """Error over exact maximum likelihood's, for numbers and counts, gaps at random and completely so: the worst."""
    record: Record = {"limit": 1.05, "steps": STEPS}
    ratios, ours, theirs = [], [], []
    for kind in TRUTHS:
        for at_random in (True, False):
            name, errors = f"{kind}_{'mar' if at_random else 'mcar'}", []
            for repeat in range(settings.repeats):
                draws = streams(settings.seed, f"gaps {name}", repeat)
                values = emptied(series(kind, STEPS, draws.data), at_random, draws.missing)
                (model, _), spent = timed(partial(_fitted, kind, values, draws.fit))
                best, waited = timed(partial(exact, kind, values))
                errors.append([np.abs(e - TRUTHS[kind]).mean() for e in (_estimate(kind, model), best)])
                ours.append(spent)
                theirs.append(waited)
            mine, oracle = np.mean(errors, 0)
            record |= {name: mine / oracle, f"{name}_ours": mine, f"{name}_oracle": oracle}
            ratios.append(mine / oracle)
    seconds = {"seconds": float(np.mean(ours)), "oracle_seconds": float(np.mean(theirs))}
    return record | {"ratio": max(ratios), "ours": max(ratios), "oracle": 1.0} | seconds


def ar_coverage(settings: Settings) -> Record:
    """How often 90 % intervals of the same fits hold the truth."""
    held, sets = [], settings.repeats * COVERED_SETS_FOR_EACH_REPEAT
    for kind in TRUTHS:
        for at_random in (True, False):
            for repeat in range(sets):
                draws = streams(settings.seed, f"gaps coverage {kind} {at_random}", repeat)
                values = emptied(series(kind, STEPS, draws.data), at_random, draws.missing)
                _, result = _fitted(kind, values, draws.fit)
                table = result.summary(level=LEVEL).table
                held += list((table["lower"].to_numpy() <= TRUTHS[kind]) & (TRUTHS[kind] <= table["upper"].to_numpy()))
    covered = float(np.mean(held))
    return {"ratio": covered, "ours": covered, "oracle": LEVEL, "low": 0.87, "high": 0.93, "intervals": len(held)}


def forecast(settings: Settings) -> Record:
    """How often 90 % intervals of the next five steps, after fifty, hold them; ``by_step`` has each of them."""
    held = []
    for repeat in range(settings.repeats * FORECAST_SETS_FOR_EACH_REPEAT):
        draws = streams(settings.seed, "forecast", repeat)
        values = series("normal", 55, draws.data)
        _, result = _fitted("normal", values[:50], draws.fit)
        table = result.forecast(pd.DataFrame({"x": values[:50]}), 5, level=LEVEL, seed=draws.fit)
        held.append((table["x.lower"].to_numpy() <= values[50:]) & (values[50:] <= table["x.upper"].to_numpy()))
    covered = float(np.mean(held))
    by_step = np.mean(held, 0).tolist()
    return {"ratio": covered, "ours": covered, "oracle": LEVEL, "low": 0.86, "high": 0.94, "by_step": by_step}


# -- the price of gaps -------------------------------------------------------------------------------------------------


def small_gaps(settings: Settings) -> Record:
    """Time of a fit of 1,000 rows and five columns with a tenth of the cells empty over that of the complete table."""
    graph = otp.Graph([("a", "b"), ("b", "s"), ("a", "c"), ("b", "c"), ("s", "c"), ("b", "k")])
    times = []
    for repeat in range(settings.repeats):
        draws = streams(settings.seed, "small gaps", repeat)
        table = _small_table(draws.data)
        gaps = table.mask(draws.missing.random(table.shape) < 0.1)
        spent = []
        for data in (table, gaps):
            otp.fit(otp.Model.from_frame(graph, data), data, seed=draws.fit, progress=False)  # imports, caches
            model = otp.Model.from_frame(graph, data)
            spent.append(timed(partial(otp.fit, model, data, seed=draws.fit, progress=False))[1])
        times.append(spent)
    complete, missing = np.mean(times, 0)
    ratio = {"ratio": missing / complete, "ours": missing, "oracle": complete, "limit": 10.0}
    return ratio | {"seconds": missing, "oracle_seconds": complete}


def _small_table(rng: np.random.Generator, rows: int = 1000) -> pd.DataFrame:
    a = rng.normal(size=rows)
    b = 0.5 * a + rng.normal(size=rows)
    s = (rng.random(rows) < 1 / (1 + np.exp(-b))).astype(float)
    c = 0.3 * a - 0.4 * b + 0.5 * s + rng.normal(size=rows)
    k = rng.poisson(np.exp(0.2 + 0.3 * b)).astype(float)
    return pd.DataFrame({"a": a, "b": b, "s": s, "c": c, "k": k})


CASES: dict[str, Case] = {
    "ar_gaps": ar_gaps,
    "ar_coverage": ar_coverage,
    "forecast": forecast,
    "small_gaps": small_gaps,
}
