"""Read the arguments of a fit, once: which method runs, from how many starts, and what the data cannot honour."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from otpdag.arguments import check_count, check_seed
from otpdag.engine.course import Course
from otpdag.engine.kinds.kind import DataKind
from otpdag.engine.method import Method, misfit
from otpdag.engine.robust_options import RobustOptions
from otpdag.errors import ModelError
from otpdag.structure import Structure

__all__ = ["Plan", "check_arguments", "check_honoured", "resolve", "robust_kind"]


@dataclass(frozen=True)
class Plan:
    """What will run."""

    method: Method
    restarts: int
    course: Course
    leaves_out: RobustOptions | None
    """How much of what the model cannot explain is left out; None if nothing is."""


def check_arguments(seed: object, steps: object, restarts: object, device: object) -> None:
    """Refuse what no kind of data could honour."""
    check_seed(seed)
    for name, value in (("steps", steps), ("restarts", restarts)):
        if value is not None:
            check_count(name, value)
    if not isinstance(device, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ModelError(f"device must be 'cpu', 'cuda' or 'cuda:N'; got {device!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device {device!r} was asked for, but no CUDA device is available; use device='cpu'")


def robust_kind(robust: object) -> str | None:
    """None, ``"outliers"`` or ``"misfit"``."""
    kinds: dict[Any, str | None] = {False: None, True: "outliers", "outliers": "outliers", "misfit": "misfit"}
    if isinstance(robust, RobustOptions):
        return "outliers"
    if not isinstance(robust, bool | str) or robust not in kinds:
        raise ModelError(f"robust must be True, False, 'outliers', 'misfit' or an otp.RobustOptions; got {robust!r}")
    return kinds[robust]


def check_honoured(kind: DataKind, *, weights: bool, robust: bool, device: str) -> None:
    """Refuse an argument that the kind of data cannot honour."""
    asked = {"weights": weights, "robust": robust, "device": device != "cpu"}
    for name, is_asked in asked.items():
        if is_asked and name not in kind.honours:
            advice = kind.advice.get(name, "leave it out")
            raise ModelError(f"{name} is not for such data ({type(kind).__name__}): {advice}")


def resolve(
    kind: DataKind,
    method: str | Method,
    *,
    robust: str | None,
    steps: int | None,
    restarts: int | None,
    course: Course | None,
    options: RobustOptions | None = None,
) -> Plan:
    """Choose the method, and everything that the user left open."""
    if course is not None and not isinstance(course, Course):
        raise ModelError(f"course must be an otp.Course; got {course!r:.100}")
    chosen = _chosen(kind, method, robust)
    chosen = chosen if steps is None else chosen.with_steps(int(steps))
    kind.check(chosen)
    if robust == "outliers":
        kind.check_robust(chosen)
    if restarts is not None and kind.most_restarts is not None and restarts > kind.most_restarts:
        raise ModelError(
            f"restarts must be at most {kind.most_restarts} for such data ({type(kind).__name__}): fit several seeds "
            f"instead; got {restarts}"
        )
    return Plan(
        method=chosen,
        restarts=kind.restarts(chosen) if restarts is None else int(restarts),
        course=kind.course(chosen) if course is None else course,
        leaves_out=(options or RobustOptions()) if robust == "outliers" else None,
    )


def _chosen(kind: DataKind, method: str | Method, robust: str | None) -> Method:
    if robust == "misfit":
        if method != "auto":
            raise ModelError("robust='misfit' is a method of its own: leave method at 'auto'")
        return misfit(given_weights=_weights_are_given(kind.model.structure))
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise ModelError(f"method must be 'auto', 'entropic', 'transport', 'paper' or a Method; got {method!r}")
    return kind.named(method)


def _weights_are_given(structure: Structure) -> bool:
    """Whether the user fixed everything about the hidden categories, so that nothing of them is learned."""
    hidden = [structure.mechanisms[node] for node in structure.graph.hidden]
    declared = [one.declared().values() for one in hidden if one.space.is_discrete]
    return bool(declared) and all(not parameter.learned for own in declared for parameter in own)
