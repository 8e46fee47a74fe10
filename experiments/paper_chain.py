r"""The paper's own way to a Poisson hidden Markov model (Section 4.2 and Appendix C.2).

A three-layer perceptron gives each step's state a distribution from that step's count alone, of which a Gumbel-softmax
of temperature 0.1 is a draw; the count is rebuilt by :math:`z^\top e^\lambda + u \sqrt{z^\top e^\lambda}` at a smooth
L1 cost. The push-forward term, weighed by 0.1, is the exact Wasserstein distance between the sequences of backward
probabilities and the same pushed through the transition, with the Kullback-Leibler divergence as its ground cost: the
forward marginal of a step is what the transition makes of the backward marginal of the step before. 50 epochs at a
constant learning rate of 0.05, map and model in turn, best of five starts by the objective.

Sequences in a batch, the encoder's units and the start of the rates are not printed; docs/methods.md has the list.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.stats import poisson
from torch import Tensor

from otpdag.costs import KL, AbstractCost, SmoothL1
from otpdag.divergences import Wasserstein
from otpdag.engine import Adam
from otpdag.engine.search import Searcher, SearchSchedule, search
from otpdag.layers import apply_mlp, gumbel_softmax, init_mlp
from otpdag.learned.algorithm import Algorithm1, Family, Step
from otpdag.mechanisms.base import Noise
from otpdag.noise import Streams
from otpdag.schedules import Constant
from otpdag.settings import Objective, PushForward
from otpdag.structure import Theta, pack, unpack

Array = NDArray[np.float64]

ETA, TEMPERATURE, EPOCHS, RATE = 0.1, 0.1, 50, 0.05
PRINTED = SmoothL1()
BATCH, UNITS = 50, 32
AVERAGED = 0.25  # share of the last steps: at that rate a single step's log-rates are off by a twentieth


@dataclass(frozen=True)
class PaperChain(Algorithm1):
    """Sequences of counts (N, T), whose states a perceptron draws step by step."""

    counts: Tensor
    shapes: Mapping[str, tuple[int, ...]]
    objective: Objective

    @property
    def rows(self) -> int:
        """Sequences."""
        return len(self.counts)

    def steps(self, theta: Theta, phi: Theta, streams: Streams, progress: float) -> Iterator[Step]:
        """Counts rebuilt from relaxed states; their probabilities beside what the transition makes of them."""
        x = self.counts[streams.rows(self.rows, BATCH)]  # (R, n, T)
        read = ((x - self.counts.mean()) / self.counts.std()).flatten(1).unsqueeze(-1)
        log_q = torch.log_softmax(apply_mlp(phi, read, "phi."), -1)  # (R, n T, K)
        z = gumbel_softmax(log_q, streams.draw(Noise(log_q.shape[-1], "uniform"), read.shape[1], read), TEMPERATURE)
        rate = z @ theta["log_rate"].exp().unsqueeze(-1)
        rebuilt = rate + streams.draw(Noise(1, "normal"), read.shape[1], read) * rate.sqrt()
        cost = PRINTED.between(rebuilt, x.flatten(1).unsqueeze(-1)).mean(-1)
        yield Step(cost, self._families(log_q.exp().unflatten(1, x.shape[1:]), torch.sigmoid(theta["stay"])))

    def _families(self, q: Tensor, stay: Tensor) -> Iterator[Family]:
        """Whole sequences, whose ground cost is then the mean divergence of a step."""
        states, length = q.shape[-1], q.shape[2]
        same, stay = torch.eye(states), stay.reshape(-1, 1, 1)
        moves = (same * stay + (1 - same) * (1 - stay) / (states - 1)).unsqueeze(1)
        even = torch.full_like(q[:, :, :1], 1 / states)
        pushed = torch.cat([even, q[:, :, :-1] @ moves], 2)
        yield Family(q.flatten(2) / length, pushed.flatten(2) / length)


def fit_paper(counts, *, states: int, starts: int, seed: int) -> tuple[np.ndarray, float]:
    """Rates in rising order and the stay probability, of the start with the lowest objective."""
    seen = torch.as_tensor(np.asarray(counts), dtype=torch.float32)
    points = [first_guess(seen, states, 1000 * seed + start) for start in range(starts)]
    shapes = {key: tuple(value.shape[1:]) for key, value in points[0].items()}
    problem = PaperChain(seen, shapes, Objective(push_forward=PushForward(ETA, Wasserstein(KL(), workers=1))))
    in_turn = 2 * EPOCHS * -(-len(seen) // BATCH)
    adam = Adam(in_turn, Constant(RATE), averaging=AVERAGED, alternating=True, largest_gradient=math.inf)
    everyone = SearchSchedule(short_steps=0, moves=0)
    ended = search(problem, torch.cat([pack(point) for point in points]), everyone, Searcher(adam, seed))
    theta = unpack(ended.point, shapes)
    return np.sort(theta["log_rate"][0].exp().double().numpy()), float(torch.sigmoid(theta["stay"])[0])


def first_guess(counts: Tensor, states: int, seed: int) -> dict[str, Tensor]:
    """A random perceptron, even moves, and rates that are counts at random, one of each part of all in their order."""
    generator = torch.Generator().manual_seed(seed)
    at = (torch.arange(states) + torch.rand(states, generator=generator)) / states
    encoder = init_mlp([1, UNITS, UNITS, states], replicas=1, generator=generator, dtype=torch.float32)
    return {
        "log_rate": torch.log(torch.quantile(counts.flatten(), at) + 1.0).unsqueeze(0),
        "stay": torch.zeros(1, 1),
        **{f"phi.{name}": value for name, value in encoder.items()},
    }


def least_cost(rates: ArrayLike, cost: AbstractCost = PRINTED, *, steps: int = 100) -> Array:
    """Where a cost, the printed one if left out, is least for true rates in rising order, without data or a fit.

    States are equally likely. In turn, each count goes to the state that rebuilds it at the least mean cost, and each
    rate to where its counts are rebuilt at the least. Rates come out 7/12 of a count too low, or 1/2 at squared cost:
    noise that is drawn by itself adds its size to the cost. Counts that neighbours take or leave move them further.
    """
    tried, counts, means = _mean_costs(cost)
    true = np.asarray(rates, float)
    often, found = poisson.pmf(counts, true[:, None]).sum(0), np.searchsorted(tried, true)
    for _ in range(steps):
        nearest = means[found].argmin(0)
        moved = np.array([(means @ (often * (nearest == state))).argmin() for state in range(len(true))])
        if (moved == found).all():
            break
        found = moved
    return tried[found]


@cache
def _mean_costs(cost: AbstractCost) -> tuple[Array, Array, Array]:
    """Rates below a hundred, counts, and the mean costs (rates, counts) of rebuilding these with those."""
    tried, counts = np.arange(1.0, 100.0, 0.02), np.arange(180.0)
    seen, means = torch.from_numpy(counts).unsqueeze(-1), np.zeros((len(tried), len(counts)))
    for normal, weight in zip(*np.polynomial.hermite_e.hermegauss(41), strict=True):
        rebuilt = torch.from_numpy(tried + normal * np.sqrt(tried))[:, None, None]
        means += weight / math.sqrt(2 * math.pi) * cost.between(seen, rebuilt).numpy()
    return tried, counts, means
