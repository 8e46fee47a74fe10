"""Images behind an encoder: single precision, networks as parameters, one start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from otpdag.data import Images
from otpdag.engine.data_kind import DataKind, Layout
from otpdag.engine.method import Method
from otpdag.engine.search import SearchSchedule
from otpdag.errors import DataError, ModelError
from otpdag.learned.autoencoder import AutoencoderProblem, CodebookProblem, Encoded, autoencoder_problem
from otpdag.model import Model
from otpdag.problem import Problem
from otpdag.structure import Structure


@dataclass(frozen=True)
class ImageData(DataKind):
    """Images (1, N, pixels) on a device."""

    honours: ClassVar[frozenset[str]] = frozenset({"device"})
    most_restarts: ClassVar[int | None] = 1

    model: Model
    images: Tensor

    @classmethod
    def of(cls, model: Model, images: Images, *, device: str = "cpu") -> ImageData:
        """Check images against the model."""
        if len(model.graph.observed) != 1:
            raise ModelError(f"images belong to one observed node; the graph has {len(model.graph.observed)}")
        width = model.spaces[model.graph.observed[0]].width
        if images.rows.shape[1] != width:
            raise DataError(f"the model's images have {width} numbers; got {images.rows.shape[1]}")
        return cls(model, images.rows.to(device).unsqueeze(0))

    @property
    def rows(self) -> int:
        """Images."""
        return int(self.images.shape[1])

    def named(self, name: str) -> Method:
        """An encoder has no default: it comes with a method."""
        raise ModelError(
            f"images need a Method whose evaluation is Encoded(...), which holds the encoder; got method={name!r}"
        )

    def check(self, method: Method) -> None:
        """Refuse evaluations of other data."""
        if not isinstance(method.evaluation, Encoded):
            raise ModelError(f"images are evaluated by Encoded; got {type(method.evaluation).__name__}")

    def restarts(self, method: Method) -> int:
        """One: starts differ in nothing but their seed, and networks are large."""
        return 1

    def course(self, method: Method) -> SearchSchedule:
        """No short runs."""
        return SearchSchedule(short_steps=0, moves=1)

    def work(self, method: Method) -> None:
        """Convolutions gain from all threads."""

    def lay_out(self, method: Method, seed: int) -> Layout:
        """The model's networks, and the encoder."""
        return Layout.of(self.model.structure, _encoded(method).backward.init())

    def problem(self, layout: Layout, method: Method, seed: int) -> Problem:
        """With codewords, or without."""
        structure, shapes = layout.structure, layout.shapes
        return autoencoder_problem(structure, self.images, shapes, method.objective, _encoded(method), seed)

    def starts(
        self, layout: Layout, problem: Problem, seed: int, numbers: Sequence[int], units: Tensor | None = None
    ) -> Tensor:
        """Networks as they are, of all else what the user gave; codewords among latents, if nothing precedes them."""
        assert isinstance(problem, AutoencoderProblem | CodebookProblem), "checked before"
        own = [initial_theta(layout.structure, seed + number) for number in numbers]
        points = [layout.pack(theta | problem.encoded.backward.init()).to(self.images.device) for theta in own]
        return torch.cat([problem.begun(point) for point in points])


def _encoded(method: Method) -> Encoded:
    assert isinstance(method.evaluation, Encoded), "checked before"
    return method.evaluation


def initial_theta(structure: Structure, seed: int) -> dict[str, Tensor]:
    """Raw parameters (1, ...) in single precision: of networks their own, of others what the user gave, or neutral."""
    given = {node: structure.with_settings(node, {}) for node in structure.mechanisms}
    lifted = {node: {name: value.unsqueeze(0) for name, value in own.items()} for node, own in given.items()}
    theta = structure.filled(structure.raw(lifted), torch.Generator().manual_seed(seed))
    return {key: value.float() for key, value in theta.items()}
