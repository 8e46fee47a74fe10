"""Transport: its objective beside POT's, errors and times beside maximum likelihood's, rows that do not belong.

Errors are compared by their means over data sets, times by processor seconds of one thread. ``ratio`` is the figure
that ``limit`` limits.
"""

import importlib
import importlib.util
import time
from functools import cache, partial

import numpy as np
import ot
import pandas as pd
from threadpoolctl import threadpool_limits

import otpdag as otp
from benchmarks import misspecification
from benchmarks.child import in_child
from benchmarks.harness import Case, Record, Settings, streams, timed
from benchmarks.problems import FACTOR, LATENT_CLASS, MIXED_DAG, MIXTURE, Problem
from experiments.outliers import replace_rows
from otpdag import mechanisms as m
from otpdag.datasets import Truth
from otpdag.divergences import SlicedWasserstein, Wasserstein
from otpdag.engine.fit import recognise

SHARE = 0.1
SPOILT_ROWS = 2000
CATEGORIES = {"mixed_dag": ("x3",)}
LIMITS = {"cluster": 1.5, "box": 1.3, "cellwise": 1.5, "tails": 1.3, "clean": 1.15}


def fitted(problem: Problem, frame: pd.DataFrame, truth: Truth, seed: int, **arguments) -> tuple[float, float]:
    """Error of the parameters, and processor seconds."""
    model = problem.model()
    with threadpool_limits(1):
        _, seconds = timed(lambda: otp.fit(model, frame, seed=seed, **arguments), time.process_time)
    return problem.error(truth, model.params()), seconds


# -- the objective, and right models ----------------------------------------------------------------------------------


def pot_agrees(settings: Settings) -> Record:
    """The largest relative difference of the objective to what POT finds between the same rows and points."""
    worst, draws = 0.0, streams(settings.seed, "pot_agrees", 0)
    for problem in (FACTOR, MIXTURE, MIXED_DAG):
        frame, _ = problem.draw(200, draws.data)
        for divergence in (SlicedWasserstein(20, p=1.0), SlicedWasserstein(20, p=2.0), Wasserstein()):
            method = otp.transport(divergence=divergence, points=128)
            kind = recognise(problem.model(), frame, weights=None, device="cpu", every_row=False)
            layout = kind.lay_out(method, draws.fit)
            made = kind.problem(layout, method, draws.fit)
            point = kind.starts(layout, made, draws.fit, [0])
            made = made.laid_out_for(point)
            points, weight = (value[0].detach().numpy() for value in made.model_side(point))
            rows, mass = made.compared.rows[0].numpy(), np.full(len(frame), 1 / len(frame))
            if isinstance(divergence, Wasserstein):
                expected = float(ot.emd2(mass, weight, ot.dist(rows, points)))
            else:
                along = made.compared.directions.numpy()
                costs = ot.wasserstein_1d(rows @ along, points @ along, mass, weight, p=divergence.p)
                expected = float(np.mean(costs))
            worst = max(worst, abs(float(made.loss(point).total) / expected - 1))
    return {"limit": 1e-6, "ratio": worst}


def right_model(problem: Problem, settings: Settings) -> Record:
    """Error over maximum likelihood's, and how many times its time."""
    figures = []
    for repeat in range(settings.repeats):
        draws = streams(settings.seed, f"transport {problem.name}", repeat)
        frame, truth = problem.draw(problem.rows, draws.data)
        likely = fitted(problem, frame, truth, draws.fit)
        figures.append((*likely, *fitted(problem, frame, truth, draws.fit, method="transport")))
    error, seconds, ours, own = np.mean(figures, axis=0)
    times = {"times": float(own / seconds), "times_limit": 20.0, "seconds": float(own)}
    return {"limit": 1.5, "ratio": float(ours / error)} | times


def mixed20(settings: Settings) -> Record:
    """Twenty columns of three types below a hidden class: error over maximum likelihood's, and seconds."""
    figures = []
    for repeat in range(min(settings.repeats, 2)):
        draws = streams(settings.seed, "mixed20", repeat)
        frame, truth = WIDE.draw(2000, draws.data)
        likely, _ = fitted(WIDE, frame, truth, draws.fit)
        figures.append((likely, *fitted(WIDE, frame, truth, draws.fit, method="transport")))
    error, ours, seconds = np.mean(figures, axis=0)
    return {"limit": 2.0, "ratio": float(ours / error), "seconds": float(seconds), "seconds_limit": 60.0}


def _wide_draw(rows: int, rng: np.random.Generator) -> tuple[pd.DataFrame, Truth]:
    state, columns, truth = rng.integers(0, 2, rows), {}, {"z": {"probs": np.array([0.5, 0.5])}}
    for j in range(20):
        if j % 3 == 0:
            loc = rng.normal(0.0, 1.5, 2)
            columns[f"x{j}"], truth[f"x{j}"] = rng.normal(loc[state]), {"loc": loc}
        elif j % 3 == 1:
            rate = rng.uniform(0.5, 2.0, 2)
            columns[f"x{j}"], truth[f"x{j}"] = rng.poisson(np.exp(rate[state])), {"log_rate": rate}
        else:
            probs = rng.dirichlet(np.ones(3), 2)
            columns[f"x{j}"] = (rng.random((rows, 1)) > probs[state].cumsum(1)[:, :-1]).sum(1)
            truth[f"x{j}"] = {"probs": probs}
    return pd.DataFrame(columns), truth


def _wide_model() -> otp.Model:
    kinds = (m.Normal, m.Poisson, partial(m.Categorical, 3))
    graph = otp.Graph([("z", f"x{j}") for j in range(20)], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(2)} | {f"x{j}": kinds[j % 3]() for j in range(20)})


def _wide_error(truth: Truth, found: Truth) -> float:
    def error(order: list[int]) -> float:
        each = [np.abs(found[n][k][order] - value).mean() for n, own in truth.items() for k, value in own.items()]
        return float(np.mean(each))

    return min(error([0, 1]), error([1, 0]))


WIDE = Problem("mixed20", 2000, _wide_draw, _wide_model, lambda frame, truth, seed: truth, _wide_error)


# -- rows that do not belong, models that are wrong -------------------------------------------------------------------


def spoilt(frame: pd.DataFrame, kind: str, rng: np.random.Generator, categories: tuple[str, ...]) -> pd.DataFrame:
    """A tenth of the rows in a tight cluster four deviations off, in a box, with a wild cell, or five times as wide."""
    if kind == "clean":
        return frame
    if kind == "box":
        return replace_rows(frame, SHARE, "box", rng, categories=categories)[0]
    made, rows = frame.copy(), rng.choice(len(frame), round(SHARE * len(frame)), replace=False)
    numbers = [column for column in frame if column not in categories]
    side, which = rng.normal(size=len(numbers)), rng.integers(len(numbers), size=len(rows))
    for number, column in enumerate(numbers):
        old = frame[column].to_numpy(dtype=float, copy=True)
        middle, spread = np.median(old), old.std()
        place = 4 * side[number] / np.linalg.norm(side) + 0.1 * rng.normal(size=len(rows))
        wild = rng.choice([-1.0, 1.0], len(rows)) * rng.uniform(5.0, 10.0, len(rows))
        values = {
            "cluster": middle + spread * place,
            "cellwise": np.where(which == number, middle + spread * wild, old[rows]),
            "tails": middle + 5 * (old[rows] - middle),
        }[kind]
        old[rows] = values
        made[column] = old if frame[column].dtype.kind == "f" else np.abs(old.round()).astype(frame[column].dtype)
    for column in categories if kind == "cluster" else ():
        made.loc[made.index[rows], column] = rng.choice(frame[column].unique())
    return made


def robust(kind: str, settings: Settings) -> Record:
    """Errors of ``robust="outliers"`` over those of maximum likelihood on the rows as they were: the worst of three."""
    ratios: Record = {}
    for problem in (FACTOR, MIXTURE, MIXED_DAG):
        figures = []
        for repeat in range(settings.repeats):
            draws = streams(settings.seed, f"robust {problem.name}", repeat)
            frame, truth = problem.draw(SPOILT_ROWS, draws.data)
            table = spoilt(frame, kind, draws.missing, CATEGORIES.get(problem.name, ()))
            clean, _ = fitted(problem, frame, truth, draws.fit)
            figures.append((clean, *fitted(problem, table, truth, draws.fit, robust="outliers")))
        clean, ours, seconds = np.mean(figures, axis=0)
        ratios |= {f"ratio_{problem.name}": float(ours / clean), f"seconds_{problem.name}": float(seconds)}
        ratios[f"each_{problem.name}"] = [float(b / a) for a, b, _ in figures]
    worst = max(value for name, value in ratios.items() if name.startswith("ratio"))
    return {"limit": LIMITS[kind], "ratio": worst} | ratios


def figure1(settings: Settings) -> Record:
    """Semi-relaxed entropic transport, ``robust="misfit"``, over EM where both are told wrong: the worst of three."""
    cases = {
        name: misspecification.CASES[name](settings) for name in ("wrong_variances", "wrong_weights", "wrong_both")
    }
    ratios = {f"ratio_{name}": record["ratio"] for name, record in cases.items()}
    return {"limit": 0.85, "ratio": max(ratios.values()), "method": "entropic(eps=0.75, reference='uniform')"} | ratios


def gap_mar(settings: Settings) -> Record:
    """Cells missing by what is seen: error over maximum likelihood's on the same table."""
    figures = []
    for repeat in range(settings.repeats):
        draws = streams(settings.seed, "gap_mar", repeat)
        frame, truth = FACTOR.draw(2000, draws.data)
        high = frame["x1"] > frame["x1"].median()
        for column in ("x2", "x3"):
            frame.loc[high & (draws.missing.random(len(frame)) < 0.6), column] = np.nan
        likely, _ = fitted(FACTOR, frame, truth, draws.fit)
        figures.append((likely, *fitted(FACTOR, frame, truth, draws.fit, method="transport")))
    error, ours, seconds = np.mean(figures, axis=0)
    return {"limit": 1.5, "ratio": float(ours / error), "seconds": float(seconds)}


def rows_100k(settings: Settings) -> Record:
    """Peak memory in gigabytes, and the time of ten times as many rows over ten times the time."""
    small, large = (in_child(partial(_many_rows, rows, settings.seed), seconds=600) for rows in (10_000, 100_000))
    linear = {"growth": large.value / (10 * small.value), "seconds": large.value}
    return {"limit": 1.0, "ratio": large.peak / 2**30} | linear


def _many_rows(rows: int, seed: int) -> float:
    frame, truth = FACTOR.draw(rows, np.random.default_rng(seed))
    return fitted(FACTOR, frame, truth, seed, method="transport")[1]


@cache
def _of_simulators() -> dict[str, Case]:
    """Cases of nodes without a density, where they are."""
    if importlib.util.find_spec("benchmarks.transport_simulators") is None:
        return {}
    return dict(importlib.import_module("benchmarks.transport_simulators").CASES)


CASES: dict[str, Case] = (
    {"pot_agrees": pot_agrees}
    | {problem.name: partial(right_model, problem) for problem in (FACTOR, MIXTURE, LATENT_CLASS, MIXED_DAG)}
    | {"mixed20": mixed20}
    | {kind: partial(robust, kind) for kind in LIMITS}
    | {"figure1": figure1, "gap_mar": gap_mar, "rows_100k": rows_100k}
    | _of_simulators()
)
