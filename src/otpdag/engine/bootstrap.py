"""Bootstrap intervals: the fit repeated on resampled rows or sequences, warm-started, many draws at once.

A resample is a vector of counts of the units, so all draws share one data set and differ in their weights only; the
replica axis holds the draws of a chunk, and joblib spreads the chunks over processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.engine.method import SearchSchedule
from otpdag.engine.optimiser import Deterministic
from otpdag.engine.search import Searcher, search
from otpdag.errors import ModelError, check_level
from otpdag.numerics import bounded_threads
from otpdag.problem import Units

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
    steps: int = 300

    def __post_init__(self) -> None:
        """Refuse what gives no interval."""
        if self.draws < 10:
            raise ModelError(f"draws must be at least 10; got {self.draws}")
        check_level(self.level)


def bootstrap_table(problem: Units, point: Tensor, options: BootstrapOptions) -> pd.DataFrame:
    """Percentile intervals of every learned parameter, in the layout of ``Model.params()``.

    ``attrs["stuck"]`` of the table is the number of draws that failed or were still falling when their steps ended.

    Args:
        problem: The problem that was solved.
        point: Its solution (1, P), from which every draw starts.
        options: Number of draws, level, seed.
    """
    draws, settled = bootstrap_draws(problem, point, options)
    table = _summarise(problem, point, draws, options.level)
    table.attrs["stuck"] = int((~settled).sum())
    return table


def bootstrap_draws(problem: Units, point: Tensor, options: BootstrapOptions) -> tuple[Tensor, Tensor]:
    """Where the fits of resampled rows ended (draws, P), and which of them settled (draws,)."""
    from joblib import Parallel, delayed

    seeds = np.random.SeedSequence(options.seed).generate_state(-(-options.draws // options.chunk))
    sizes = [min(options.chunk, options.draws - i * options.chunk) for i in range(len(seeds))]
    chunks = Parallel(n_jobs=options.jobs)(
        delayed(_one_chunk)(problem, point, size, int(seed), options.steps)
        for size, seed in zip(sizes, seeds, strict=True)
    )
    draws, settled = (torch.cat(list(parts)) for parts in zip(*chunks, strict=True))
    return draws, settled


def _one_chunk(problem: Units, point: Tensor, draws: int, seed: int, steps: int) -> tuple[Tensor, Tensor]:
    """Where the resampled fits of a chunk ended, and which settled: every draw is a data set with one start."""
    generator = np.random.default_rng(seed)
    base = problem.weight[0].double().numpy()
    total = max(round(float(base.sum())), 2)
    counts = generator.multinomial(total, base / base.sum(), size=draws)
    factors = torch.as_tensor(np.divide(counts, base, out=np.zeros(counts.shape), where=base > 0))
    with bounded_threads(1):
        ended = search(
            problem.reweighted(factors),
            point.expand(draws, -1).clone(),
            SearchSchedule(short_steps=0, moves=problem.pace.refinements),
            Searcher(Deterministic(steps=steps, tolerance=1e-8)),
            owners=range(draws),
        )
    settled = ended.converged & ~ended.failed
    return torch.where(ended.failed.unsqueeze(-1), torch.nan, ended.point), settled


def _summarise(problem: Units, point: Tensor, draws: Tensor, level: float) -> pd.DataFrame:
    estimate, spread = described_parameters(problem, point), described_parameters(problem, draws)
    tail = (1 - level) / 2
    rows = []
    for (node, name), values in spread.items():
        parameter = problem.structure.mechanisms[node].declared()[name]
        if not parameter.learned:
            continue
        held = parameter.fixed_entries().reshape(values.shape[1:]) if parameter.is_given_in_part else None
        lower, upper = np.nanquantile(values, [tail, 1 - tail], axis=0)
        error = np.nanstd(values, axis=0, ddof=1)
        for index in np.ndindex(values.shape[1:]):
            if held is not None and held[index]:
                continue
            place = estimate[node, name][0][index]
            ends = float(lower[index]), float(upper[index])
            rows.append((node, name, index, float(place), *ends, float(error[index])))
    table = pd.DataFrame(rows, columns=["node", "parameter", "index", "estimate", "lower", "upper", "std_error"])
    return table.set_index(["node", "parameter", "index"])


def described_parameters(problem: Units, points: Tensor) -> dict[tuple[str, str], Array]:
    """Parameters as a user reads them, for every row of ``points``: (R, ...)."""
    naturals = problem.naturals(points)
    described = {}
    for node, mechanism in problem.structure.mechanisms.items():
        for name, value in mechanism.describe(naturals[node]).items():
            if name in mechanism.declared() and not name.startswith(("network.", "module.")):
                described[node, name] = value.detach().expand(len(points), *value.shape[1:]).numpy()
    return described
