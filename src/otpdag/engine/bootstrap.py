"""Bootstrap intervals: the fit repeated on resampled rows, warm-started, many draws at once.

A resample is a vector of row counts, so all draws share one table and differ in their weights only; the replica axis
holds the draws of a chunk, and joblib spreads the chunks over processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.engine.lbfgs import minimise
from otpdag.engine.problem import Problem
from otpdag.engine.robust import reweighted
from otpdag.errors import ModelError
from otpdag.objective import split_theta
from otpdag.objective.mean_features import feature_columns
from otpdag.structure import unpack
from otpdag.threads import bounded_threads

__all__ = ["BootstrapOptions", "bootstrap_table"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class BootstrapOptions:
    """How a bootstrap runs.

    Args:
        draws: Number of resampled fits.
        level: Nominal coverage of the intervals.
        seed: Determines the resamples.
        jobs: Processes; -1 takes all cores.
        chunk: Draws that train together in one process.
        steps: Most steps of each warm-started fit.
    """

    draws: int = 200
    level: float = 0.9
    seed: int = 0
    jobs: int = 1
    chunk: int = 20
    steps: int = 60

    def __post_init__(self) -> None:
        """Refuse what gives no interval."""
        if self.draws < 10:
            raise ModelError(f"draws must be at least 10; got {self.draws}")
        if not 0 < self.level < 1:
            raise ModelError(f"level must lie between 0 and 1; got {self.level}")


def bootstrap_table(problem: Problem, point: Tensor, options: BootstrapOptions) -> pd.DataFrame:
    """Percentile intervals of every learned parameter, in the layout of ``Model.params()``.

    Args:
        problem: The problem that was solved.
        point: Its solution (1, P), from which every draw starts.
        options: Number of draws, level, seed.
    """
    if problem.method.optimiser != "lbfgs":
        raise ModelError(f"intervals need a deterministic method; {problem.method.name!r} draws noise at every step")
    from joblib import Parallel, delayed

    seeds = np.random.SeedSequence(options.seed).generate_state(-(-options.draws // options.chunk))
    sizes = [min(options.chunk, options.draws - i * options.chunk) for i in range(len(seeds))]
    chunks = Parallel(n_jobs=options.jobs)(
        delayed(_one_chunk)(problem, point, size, int(seed), options.steps)
        for size, seed in zip(sizes, seeds, strict=True)
    )
    draws = torch.cat(list(chunks))
    return _summarise(problem, point, draws, options.level)


def _one_chunk(problem: Problem, point: Tensor, draws: int, seed: int, steps: int) -> Tensor:
    generator = np.random.default_rng(seed)
    base = problem.batch.weight[0].double().numpy()
    total = max(round(float(base.sum())), 2)
    counts = generator.multinomial(total, base / base.sum(), size=draws)
    factors = torch.as_tensor(counts / np.where(base > 0, base, 1.0))
    resampled = _resampled(problem, factors)
    with bounded_threads(1):
        state = minimise(resampled.loss, point.expand(draws, -1).clone(), steps=steps, tolerance=1e-8)
    return torch.where(state.failed.unsqueeze(-1), torch.nan, state.point)


def _resampled(problem: Problem, factors: Tensor) -> Problem:
    """The problem on resampled rows: weights of the groups, mean features of the direct term."""
    found = reweighted(problem, factors)
    if problem.features is not None:
        columns = feature_columns(problem.structure, problem.batch)
        mean = problem.features.mean_of(columns, problem.batch.weight * factors)
        found = replace(found, features=replace(problem.features, mean=mean))
    return found


def _summarise(problem: Problem, point: Tensor, draws: Tensor, level: float) -> pd.DataFrame:
    estimate, spread = described(problem, point), described(problem, draws)
    tail = (1 - level) / 2
    rows = []
    for (node, name), values in spread.items():
        if not problem.structure.mechanisms[node].declared()[name].learned:
            continue
        lower, upper = np.nanquantile(values, [tail, 1 - tail], axis=0)
        for index in np.ndindex(values.shape[1:]):
            place = estimate[node, name][0][index]
            rows.append((node, name, index, float(place), float(lower[index]), float(upper[index])))
    table = pd.DataFrame(rows, columns=["node", "parameter", "index", "estimate", "lower", "upper"])
    return table.set_index(["node", "parameter", "index"])


def described(problem: Problem, points: Tensor) -> dict[tuple[str, str], Array]:
    """Parameters as a user reads them, for every row of ``points``: (R, ...)."""
    theta, _ = split_theta(unpack(points, problem.shapes))
    naturals = problem.structure.naturals(theta)
    found = {}
    for node, mechanism in problem.structure.mechanisms.items():
        for name, value in mechanism.describe(naturals[node]).items():
            if name in mechanism.declared() and not name.startswith(("network.", "module.")):
                found[node, name] = value.detach().expand(len(points), *value.shape[1:]).numpy()
    return found
