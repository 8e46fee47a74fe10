"""Adam for auto-encoders: images in single precision, networks as parameters, stages, and runs that can be resumed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from otpdag.data import Schema
from otpdag.engine.adam import AdamOutcome, Moments, descend
from otpdag.engine.method import Method
from otpdag.engine.monitor import Callback, Monitor
from otpdag.engine.result import FitResult, Status
from otpdag.errors import DataError
from otpdag.layers import nearest
from otpdag.model import Model
from otpdag.objective import LossTerms, Streams, split_theta
from otpdag.structure import Structure, Theta, pack, unpack

__all__ = ["EncodedProblem", "EncodedStage", "fit_encoded", "initial_theta", "lloyd"]

Loss = Callable[[Theta, Theta, Tensor, Streams, float], LossTerms]
"""Terms from the model's parameters, the map's, rows (1, n, pixels), random streams and the share of steps done."""


@dataclass
class EncodedProblem:
    """Images (1, N, pixels) with a loss of minibatches; what :func:`otpdag.engine.adam.descend` minimises."""

    rows: Tensor
    method: Method
    shapes: Mapping[str, tuple[int, ...]]
    loss: Loss

    def sampled(self, flat: Tensor, streams: Streams, progress: float) -> LossTerms:
        """Loss terms on a fresh minibatch."""
        theta, phi = split_theta(unpack(flat, self.shapes))
        index = streams.rows(self.rows.shape[1], self.method.batch_size)[0].to(self.rows.device)
        return self.loss(theta, phi, self.rows[:, index], streams, progress)


@dataclass(frozen=True)
class EncodedStage:
    """A part of a run.

    Args:
        name: What the history calls it.
        until: Share of all steps at its end.
        loss: What it minimises.
        begin: Changes the parameters before it, for instance puts codewords among the latents.
    """

    name: str
    until: float
    loss: Loss
    begin: Callable[[dict[str, Tensor]], dict[str, Tensor]] = field(default=lambda parameters: parameters)


def initial_theta(structure: Structure, seed: int) -> dict[str, Tensor]:
    """Raw parameters (1, ...) in single precision: of networks their own, of others what the user gave, or neutral."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for node, names in structure.keys.items():
        mechanism = structure.mechanisms[node]
        given = {name: value.unsqueeze(0) for name, value in structure.with_settings(node, {}).items()}
        raw = mechanism.initial_raw(1, generator) | (mechanism.raw(given) if given else {})
        for name, key in names.items():
            if name in raw:
                found.setdefault(key, raw[name])
    for key, parameter in structure.parameters().items():
        found.setdefault(key, torch.zeros(1, *parameter.shape))
    return {key: value.float() for key, value in found.items()}


def fit_encoded(
    model: Model,
    rows: Tensor,
    method: Method,
    parameters: dict[str, Tensor],
    stages: Sequence[EncodedStage],
    *,
    seed: int,
    device: str = "cpu",
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | Path | None = None,
) -> FitResult:
    """Run the stages one after another under one learning-rate schedule, and leave the end in the model.

    Args:
        model: The model; its parameters are set.
        rows: Images (N, pixels).
        method: Steps, batch size and learning rate.
        parameters: Where to begin: the model's raw parameters, then the map's (``phi.``).
        stages: What to minimise, and for how long.
        seed: Determines minibatches and noise.
        device: ``"cpu"`` or ``"cuda"``.
        progress: Show a progress bar; by default only on a terminal.
        callbacks: Called with each record of the history; returning True stops the fit.
        checkpoint: A file that is written after every epoch; if it exists, the run goes on from there.
    """
    began = time.perf_counter()
    images = rows.to(device).unsqueeze(0)
    shapes = {key: tuple(value.shape[1:]) for key, value in parameters.items()}
    state = _State(pack(parameters).to(device), Streams([seed]))
    if checkpoint is not None and Path(checkpoint).exists():
        state = _State.read(Path(checkpoint), state)
    epoch = max(1, math.ceil(images.shape[1] / method.batch_size)) if checkpoint is not None else method.steps
    outcome: AdamOutcome | None = None
    with Monitor(show=progress, callbacks=callbacks) as monitor:
        for stage in stages:
            end = round(stage.until * method.steps)
            if state.step >= end:
                continue
            if state.stage != stage.name:
                state.point = pack(stage.begin(unpack(state.point, shapes)))
                state.stage, state.memory = stage.name, ()
            problem = EncodedProblem(images, method, shapes, stage.loss)
            monitor.stage(stage.name, end - state.step)
            while state.step < end and not monitor.stopped:
                steps = min(epoch, end - state.step)
                outcome = _run(problem, state, steps, stage.name, monitor)
                if bool(outcome.failed.any()):
                    break
                if checkpoint is not None:
                    state.write(Path(checkpoint))
            if monitor.stopped or (outcome is not None and bool(outcome.failed.any())):
                break
    model.adopt(model.structure, unpack(state.point.cpu(), shapes), Schema.of(model.spaces, model.graph), ())
    loss = math.nan if outcome is None else float(outcome.loss[0])
    return FitResult(
        model, method, _status(outcome, state.step, method), loss, tuple(monitor.history), (), images.shape[1],
        time.perf_counter() - began, seed, stages=tuple(monitor.stages),
    )  # fmt: skip


def _run(problem: EncodedProblem, state: _State, steps: int, name: str, monitor: Monitor) -> AdamOutcome:
    """Some steps from a state, which is moved on."""
    total, offset = problem.method.steps, state.step

    def on_step(step: int, terms: LossTerms) -> bool:
        return monitor.record(name, offset + step, terms.as_floats(0), keep=True)

    span = (offset / total, (offset + steps) / total)
    outcome = descend(problem, state.point, state.streams, steps=steps, on_step=on_step, span=span, memory=state.memory)
    state.point, state.memory, state.step = outcome.point, outcome.memory, offset + outcome.steps
    return outcome


def _status(outcome: AdamOutcome | None, steps: int, method: Method) -> Status:
    if outcome is not None and bool(outcome.failed.any()):
        return Status(False, "the loss became infinite or not a number; the last good parameters were kept",
                      "try a smaller learning rate")  # fmt: skip
    if steps < method.steps:
        return Status(False, f"a callback stopped the fit after {steps} steps")
    return Status(True, f"trained for all {steps} steps")


@dataclass
class _State:
    """Where a run is: all that is needed to go on."""

    point: Tensor
    streams: Streams
    step: int = 0
    stage: str = ""
    memory: tuple[Moments, ...] = ()

    def write(self, path: Path) -> None:
        """Write to a file, which is replaced as a whole."""
        tensors = {"point": self.point, "shared": self.streams.shared.get_state()}
        tensors |= {f"stream.{i}": g.get_state() for i, g in enumerate(self.streams.generators)}
        for half, moments in enumerate(self.memory):
            tensors |= {f"memory.{half}.{key}": value for key, value in moments.items()}
        content = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
        beside = path.with_name(path.name + ".part")
        save_file(content, beside, metadata={"step": str(self.step), "stage": self.stage})
        beside.replace(path)

    @classmethod
    def read(cls, path: Path, like: _State) -> _State:
        """Read what :meth:`write` wrote, for a run that began like this one."""
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata()
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            step, stage, point = int(about["step"]), about["stage"], tensors["point"]
        except Exception as error:
            raise DataError(f"{str(path)!r} is not the checkpoint of a run: {error}") from None
        if point.shape != like.point.shape:
            raise DataError(
                f"the checkpoint {str(path)!r} has {point.shape[-1]} parameters, this model {like.point.shape[-1]}: "
                "it belongs to another model; choose another file"
            )
        like.streams.shared.set_state(tensors["shared"])
        for number, generator in enumerate(like.streams.generators):
            generator.set_state(tensors[f"stream.{number}"])
        halves = sorted({key.split(".")[1] for key in tensors if key.startswith("memory.")})
        memory = tuple(
            {key.split(".", 2)[2]: v.to(like.point.device) if key.split(".", 2)[2] != "step" else v
             for key, v in tensors.items() if key.startswith(f"memory.{half}.")}
            for half in halves
        )  # fmt: skip
        return cls(point.to(like.point), like.streams, step, stage, memory)


def lloyd(points: Tensor, size: int, generator: torch.Generator, steps: int = 5) -> tuple[Tensor, Tensor]:
    """A few steps of k-means from random points (N, D): centres (size, D), and the mean squared residual (D,).

    With fewer points than centres, points repeat with a little noise.
    """
    index = torch.randperm(len(points), generator=generator)
    index = index.repeat(math.ceil(size / len(index)))[:size].to(points.device)
    jitter = torch.randn(size, points.shape[1], generator=generator).to(points)
    centres = points[index] + 1e-3 * points.std() * jitter
    own = nearest(torch.cdist(points, centres))
    for _ in range(steps):
        counts = torch.bincount(own, minlength=size).to(points).unsqueeze(-1)
        sums = torch.zeros_like(centres).index_add(0, own, points)
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
        own = nearest(torch.cdist(points, centres))
    return centres, (points - centres[own]).square().mean(0)
