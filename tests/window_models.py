"""Problems of windows, and what reads the scores of their steps, that several tests share."""

from dataclasses import replace

import numpy as np
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data.sequences import SequenceBatch
from otpdag.engine.resolve import recognise
from otpdag.matching.window_scores import WindowScores, points_beside
from otpdag.settings import Direct, Objective
from otpdag.simulation import ancestral_sequences, complete_batch

WINDOWS = otp.Method("windows", Objective(reconstruction=0.0, direct=Direct()))


def mixed_hmm():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x"), ("z", "y"), ("z", "c")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Poisson(), "y": m.Normal(), "c": m.Categorical(3)})
    return model.set_params(
        {
            "z": {"probs": [[0.8, 0.2], [0.3, 0.7]]},
            "z[0]": {"probs": [0.4, 0.6]},
            "x": {"log_rate": np.log([2.0, 6.0])},
            "y": {"loc": [[-1.0], [1.0]], "scale": [[1.0], [0.5]]},
            "c": {"probs": [[0.6, 0.3, 0.1], [0.1, 0.3, 0.6]]},
        }
    )


def problem_of(model, sequences, length, seed=1):
    data = model.sample(sequences, length=length, seed=seed)
    shown = [column for column in data if column.split(".")[0] in model.graph.observed]
    given = otp.Sequences(data[shown], lengths=[length] * sequences)
    kind = recognise(model, given, weights=None, device="cpu", every_row=False)
    layout = kind.lay_out(WINDOWS, 0)
    return kind.problem(layout, WINDOWS, 0), kind.starts(layout, None, 0, [0])


def reader_of(problem, point):
    beside = points_beside(problem.naturals, point, torch.arange(point.shape[-1]))
    return WindowScores(problem.structure, problem.windows.states, problem.naturals(point), beside)


def drawn(problem, point, sequences, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = ancestral_sequences(problem.structure, problem.naturals(point), sequences, length, generator)
    steps = complete_batch(problem.structure, {node: value.flatten(1, 2) for node, value in values.items()})
    return SequenceBatch(steps, torch.full((sequences,), length))


def with_missing(batch, share, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = {node: torch.rand(seen.shape, generator=generator) >= share for node, seen in batch.steps.mask.items()}
    return replace(batch, steps=replace(batch.steps, mask=mask))
