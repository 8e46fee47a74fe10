"""A baseline's networks as a problem of the library, so that its minibatches, Adam and learning rate serve all."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from otpdag.engine import Adam
from otpdag.engine.optimiser import Outcome, Run
from otpdag.noise import Streams
from otpdag.problem import LossTerms, Problem, split_point
from otpdag.structure import pack


@dataclass(frozen=True)
class NetworkProblem(Problem):
    """Rows (1, N, pixels) with a loss of minibatches: of the model's parameters, the encoder's, rows and streams."""

    images: Tensor
    batch_size: int
    shapes: Mapping[str, tuple[int, ...]]
    loss_of: Callable[..., LossTerms]

    @property
    def rows(self) -> int:
        return self.images.shape[1]

    def sampled(self, point: Tensor, streams: Streams, progress: float) -> LossTerms:
        theta, phi = split_point(point, self.shapes)
        index = streams.rows(self.rows, self.batch_size)[0]
        return self.loss_of(theta, phi, self.images[:, index], streams, progress)


def train(autoencoder, rows: Tensor, parameters: dict[str, Tensor], on_step=None, *, in_turn=False) -> Outcome:
    """Minimise a baseline's ``_loss`` from ``parameters`` for its epochs, of encoder and model together or in turn."""
    shapes = {key: tuple(value.shape[1:]) for key, value in parameters.items()}
    problem = NetworkProblem(rows.unsqueeze(0), autoencoder.batch_size, shapes, autoencoder._loss)
    steps = (1 + in_turn) * autoencoder.n_epochs * math.ceil(len(rows) / autoencoder.batch_size)
    adam = Adam(steps=steps, learning_rate=autoencoder.learning_rate, averaging=0.0, alternating=in_turn)

    def watch(progress) -> bool:
        return on_step is not None and bool(on_step(progress.step, progress.terms))

    return adam.run(Run(problem, pack(parameters), steps, seeds=[autoencoder.random_state]), watch)
