"""Restarts trained together: the time of sixteen over that of one, and how far they differ from separate runs."""

from collections.abc import Sequence
from functools import partial

import pandas as pd
import torch

import otpdag as otp
from benchmarks.harness import Case, Record, Settings, streams, timed
from benchmarks.problems import FACTOR, MIXTURE, Problem
from otpdag.data import Schema, encode
from otpdag.engine import SearchSchedule
from otpdag.engine.data_kind import lay_out_rows, one_start, table_problem
from otpdag.engine.optimiser import minimise
from otpdag.engine.search import restart_seed

REPLICAS = 16
SHORT_ROWS = 500


def replicas(problem: Problem, settings: Settings) -> Record:
    """Seconds of a fit with sixteen restarts over the seconds of a fit with one, each the best of a few runs.

    ``difference`` is the largest difference between the parameters of sixteen short runs trained together and of the
    same sixteen trained one after another; ``difference_loss`` the same of their losses.
    """
    draws = streams(settings.seed, problem.name, 0)
    frame, _ = problem.draw(problem.rows, draws.data)

    def seconds(restarts: int) -> float:
        runs = [timed(lambda: otp.fit(problem.model(), frame, seed=draws.fit, restarts=restarts))[1] for _ in range(3)]
        return min(runs)

    seconds(1)  # the first fit of a process pays for imports and caches
    one, many = seconds(1), seconds(REPLICAS)
    point, loss = largest_difference(problem, frame, draws.fit)
    return {
        "ratio": many / one,
        "ours": many,
        "oracle": one,
        "seconds": many,
        "oracle_seconds": one,
        "replicas": REPLICAS,
        "difference": point,
        "difference_loss": loss,
    }


def largest_difference(problem: Problem, frame: pd.DataFrame, seed: int) -> tuple[float, float]:
    """Train sixteen starts together and apart, for as many steps as a fit's short runs."""
    model = problem.model()
    batch = encode(frame, Schema.of(model.spaces, model.graph, frame), hidden=model.graph.hidden)
    layout = lay_out_rows(model.structure, batch, otp.entropic(), seed)
    short = table_problem(layout, batch, otp.entropic(), seed).subset(SHORT_ROWS)

    def run(numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.cat([one_start(layout, batch, restart_seed(seed, n), first=n == 0) for n in numbers])
        state = minimise(short.laid_out_for(starts).loss, starts, steps=SearchSchedule().short_steps)
        return state.point, state.loss

    together = run(range(REPLICAS))
    apart = [run([number]) for number in range(REPLICAS)]
    points, losses = torch.cat([a[0] for a in apart]), torch.cat([a[1] for a in apart])
    return float((together[0] - points).abs().max()), float((together[1] - losses).abs().max())


CASES: dict[str, Case] = {
    "factor_16_over_1": partial(replicas, FACTOR),
    "mixture_16_over_1": partial(replicas, MIXTURE),
}
