"""Optima: whether a fit ends where the likelihood is highest, beside plain EM from many random starts.

``optima`` is the share of fits that end more than half a unit of total log-likelihood below the best of 100 plain EM
starts, over six models whose hidden states overlap; ``optima_time`` is the processor time of these fits over that of
the 100 starts. Both sides have the same rows; of EM's ends those with a collapsed scale do not count.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd

import otpdag as otp
from benchmarks.harness import Record, Settings, streams
from benchmarks.oracles.plain_em import Child, best_of_chains, best_of_rows
from otpdag import mechanisms as m

STARTS = 100  # of plain EM
BELOW = 0.5  # in total log-likelihood: a poorer optimum
DATA_SETS = 10
ROWS, MIXED_ROWS, SEQUENCES, STEPS = 500, 1_000, 5, 100

Draw = Callable[[np.random.Generator], tuple[pd.DataFrame, "otp.Model", Callable[[int], float]]]


def drawn_states(shares: np.ndarray, rows: int, generator: np.random.Generator) -> np.ndarray:
    """States of rows."""
    return generator.choice(len(shares), p=shares, size=rows)


def tables(states: int, values: int, generator: np.random.Generator, sharpness: float = 1.5) -> np.ndarray:
    """Overlapping tables of probabilities (states, values)."""
    weights = np.exp(sharpness * generator.normal(size=(states, values)))
    return weights / weights.sum(1, keepdims=True)


def picked(table: np.ndarray, state: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """A category of each row by the table of its state."""
    return (generator.random((len(state), 1)) > np.cumsum(table[state], 1)[:, :-1]).sum(1)


def two_hidden(generator: np.random.Generator) -> tuple[pd.DataFrame, "otp.Model", Callable[[int], float]]:
    """Two hidden categories: two children of each, three of both."""
    a, b = drawn_states(np.array([0.5, 0.3, 0.2]), ROWS, generator), drawn_states(np.array([0.6, 0.4]), ROWS, generator)
    parents = {"u": "a", "v": "a", "w": "b", "x": "b", "y": "ab", "z": "ab", "s": "ab"}
    codes = {"a": (a, 3, (0, 0, 1, 1, 2, 2)), "b": (b, 2, (0, 1, 0, 1, 0, 1)), "ab": (2 * a + b, 6, tuple(range(6)))}
    frame, children = {}, []
    for name, kind in parents.items():
        state, many, configuration = codes[kind]
        frame[name] = picked(tables(many, 3, generator), state, generator)
        children.append(Child(frame[name].astype(float), "category", configuration, 3))
    edges = [(parent, child) for child, kind in parents.items() for parent in kind]
    nodes = {"a": m.Categorical(3), "b": m.Categorical(2), **{name: m.Categorical(3) for name in parents}}
    model = otp.Model(otp.Graph(edges, hidden=["a", "b"]), nodes)
    return pd.DataFrame(frame), model, lambda seed: _best(best_of_rows(children, [3, 2], STARTS, _generator(seed)))


def classes(
    kinds: str, states: int, generator: np.random.Generator, apart: float = 1.0
) -> tuple[pd.DataFrame, "otp.Model", Callable[[int], float]]:
    """One hidden class, with a child for each letter: a category, a binary, a count or a number."""
    rows = MIXED_ROWS if "n" in kinds else ROWS
    state = drawn_states(generator.dirichlet(np.full(states, 5.0)), rows, generator)
    frame, children, nodes = {}, [], {"k": m.Categorical(states)}
    for place, kind in enumerate(kinds):
        name = f"x{place}"
        if kind in "cb":
            size = 3 if kind == "c" else 2
            frame[name], nodes[name] = picked(tables(states, size, generator), state, generator), m.Categorical(size)
        elif kind == "p":
            frame[name], nodes[name] = generator.poisson(generator.gamma(3.0, 1.5, states)[state]), m.Poisson()
        else:
            frame[name] = apart * generator.normal(0, 1.5, states)[state] + generator.normal(size=rows)
            nodes[name] = m.Normal()
        family = {"c": "category", "b": "category", "p": "count", "n": "number"}[kind]
        levels = {"c": 3, "b": 2}.get(kind, 0)
        children.append(Child(np.asarray(frame[name], dtype=float), family, tuple(range(states)), levels))
    model = otp.Model(otp.Graph([("k", name) for name in frame], hidden=["k"]), nodes)
    return pd.DataFrame(frame), model, lambda seed: _best(best_of_rows(children, [states], STARTS, _generator(seed)))


def chain(
    family: str, means: np.ndarray, generator: np.random.Generator
) -> tuple["otp.Sequences", "otp.Model", Callable[[int], float]]:
    """A hidden Markov chain that stays with probability 0.75."""
    states = len(means)
    moves = np.full((states, states), 0.25 / (states - 1))
    np.fill_diagonal(moves, 0.75)
    state = np.empty((SEQUENCES, STEPS), dtype=int)
    for step in range(STEPS):
        chances = moves[state[:, step - 1]] if step else np.full((SEQUENCES, states), 1 / states)
        state[:, step] = (generator.random((SEQUENCES, 1)) > np.cumsum(chances, 1)[:, :-1]).sum(1)
    x = generator.poisson(means[state]) if family == "count" else means[state] + generator.normal(size=state.shape)
    node = m.Poisson() if family == "count" else m.Normal()
    model = otp.Model(otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"]), {"z": m.Categorical(states), "x": node})
    frame = pd.DataFrame({"id": np.repeat(np.arange(SEQUENCES), STEPS), "x": x.ravel()})
    children = [Child(x.ravel().astype(float), family, tuple(range(states)))]
    truth = lambda seed: _best(best_of_chains(children, states, STEPS, STARTS, _generator(seed)))  # noqa: E731
    return otp.Sequences(frame, sequence="id"), model, truth


MODELS: dict[str, Callable[[np.random.Generator], tuple]] = {
    "two_hidden": two_hidden,
    "poisson_chain": lambda generator: chain("count", np.array([1.0, 3.0, 5.0, 8.0, 12.0]), generator),
    "latent_class": lambda generator: classes("bbbbbbbb", 5, generator),
    "mixed": lambda generator: classes("nnppcc", 5, generator),
    "mixture": lambda generator: classes("nnn", 6, generator),
    "normal_chain": lambda generator: chain("number", np.array([-2.0, -0.7, 0.7, 2.0]), generator),
}


def _generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _best(ends: np.ndarray) -> float:
    return float(ends.max())


@dataclass(frozen=True)
class Race:
    """One data set: how far the fit ended below plain EM, and the seconds of both."""

    below: float
    ours: float
    plain: float


def race(name: str, settings: Settings, number: int, **options: object) -> Race:
    """Fit one data set of a model both ways."""
    sources = streams(settings.seed, f"optima_{name}", number)
    data, model, plain = MODELS[name](sources.data)
    begin = time.process_time()
    best = plain(sources.oracle)
    between = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        otp.fit(model, data, seed=sources.fit, progress=False, **options)
    end = time.process_time()
    return Race(best - float(model.log_likelihood(data)), end - between, between - begin)


@cache
def races(seed: int, repeats: int) -> dict[str, list[Race]]:
    """All data sets of all models."""
    settings = Settings(seed=seed, repeats=repeats)
    race("mixture", Settings(seed=seed + 1), 0)  # imports and first calls are nobody's time
    return {name: [race(name, settings, number) for number in range(DATA_SETS)] for name in MODELS}


def optima(settings: Settings) -> Record:
    """How often a fit ends in a poorer optimum than the best of 100 plain EM starts."""
    done = races(settings.seed, settings.repeats)
    missed = {name: sum(one.below > BELOW for one in own) for name, own in done.items()}
    worst = {f"{name}_worst": max(one.below for one in own) for name, own in done.items()}
    return {"ratio": sum(missed.values()) / (len(MODELS) * DATA_SETS), "limit": 0.05, **missed, **worst}


def optima_time(settings: Settings) -> Record:
    """Processor time of these fits over that of the plain EM starts."""
    done = races(settings.seed, settings.repeats)
    ours = {name: sum(one.ours for one in own) for name, own in done.items()}
    plain = {f"{name}_plain": sum(one.plain for one in own) for name, own in done.items()}
    return {"ratio": sum(ours.values()) / sum(plain.values()), "limit": 1.5, **ours, **plain}
