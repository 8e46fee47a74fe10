"""Dynamic models and series that several tests share, and what is known of them: Kalman filters, sums over paths."""

import itertools
import math

import numpy as np
import torch

import otpdag as otp
from experiments.small_models import poisson_chain
from otpdag import mechanisms as m
from otpdag.data import Batch, Schema
from otpdag.data.sequences import SequenceBatch, Sequences, encode_sequences
from otpdag.likelihood.chain_layout import lay_out_chain


def poisson_hmm(transition=None, size=4):
    return otp.Model(
        otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"]),
        {"z": transition or m.Categorical(size), "x": m.Poisson()},
    )


def known_poisson_hmm():
    model = poisson_hmm(size=3)
    model.set_params(
        {
            "z": {"probs": [[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.1, 0.3, 0.6]]},
            "z[0]": {"probs": [0.6, 0.3, 0.1]},
            "x": {"log_rate": np.log([2.0, 8.0, 20.0])},
        }
    )
    return model


def fitted_poisson_hmm(seed=0):
    counts, _, _ = poisson_chain(20, 60, np.random.default_rng(seed))
    model = poisson_hmm()
    otp.fit(model, counts, seed=0, restarts=2)
    return model, counts


def random_poisson_hmm(size=3, transition=None):
    rng = np.random.default_rng(1)
    model = otp.Model(
        otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"]),
        {"z": transition or m.Categorical(size), "x": m.Poisson()},
    )
    moves = {"stay": 0.7} if isinstance(transition, m.StayOrMove) else {"probs": rng.dirichlet(np.ones(size) * 2, size)}
    first, rates = {"probs": rng.dirichlet(np.ones(size))}, {"log_rate": np.log([2.0, 6.0, 11.0][:size])}
    return model.set_params({"z": moves, "z[0]": first, "x": rates})


def log_poisson(x, rate):
    return 0.0 if np.isnan(x) else x * math.log(rate) - rate - math.lgamma(x + 1)


def by_paths(model, x):
    """Likelihood and state probabilities of one sequence by summing over all paths."""
    params = model.params()
    first, rate = params["z[0]"]["probs"], np.exp(params["x"]["log_rate"])
    size = len(rate)
    if "stay" in params["z"]:
        stay = float(params["z"]["stay"])
        moves = np.where(np.eye(size) == 1, stay, (1 - stay) / (size - 1))
    else:
        moves = params["z"]["probs"]
    total, state = 0.0, np.zeros((len(x), size))
    for path in itertools.product(range(size), repeat=len(x)):
        log = math.log(first[path[0]]) + sum(math.log(moves[a, b]) for a, b in itertools.pairwise(path))
        weight = math.exp(log + sum(log_poisson(x[t], rate[k]) for t, k in enumerate(path)))
        total += weight
        for t, k in enumerate(path):
            state[t, k] += weight
    return math.log(total), state / total


def laid_out(model, data, **kwargs):
    schema = Schema.of(model.spaces, model.graph)
    batch = encode_sequences(Sequences(data), schema, hidden=model.graph.hidden, partial=True)
    return lay_out_chain(model.structure, batch, **kwargs)


def poisson_steps(lengths, seed=0):
    x = torch.as_tensor(np.random.default_rng(seed).poisson(5, (1, sum(lengths), 1)), dtype=torch.float64)
    batch = Batch({"x": x}, {"x": torch.ones_like(x).bool()}, torch.ones(1, x.shape[1]).double())
    return SequenceBatch(batch, torch.tensor(lengths))


def linear_series(seed, sequences=20, length=50):
    rng = np.random.default_rng(seed)
    z = np.zeros((sequences, length))
    z[:, 0] = rng.normal(size=sequences)
    for t in range(1, length):
        z[:, t] = 0.85 * z[:, t - 1] + rng.normal(size=sequences)
    return 2.0 + 0.7 * z + 0.5 * rng.normal(size=z.shape), z


def kalman(parameters, x):
    """Log-likelihood of sequences (N, T), NaN is missing; and filtered means and variances."""
    a, c, s, mu = parameters
    mean, var = np.zeros(len(x)), np.ones(len(x))
    total, means, variances = np.zeros(len(x)), [], []
    for t in range(x.shape[1]):
        if t:
            mean, var = a * mean, a * a * var + 1
        spread = c * c * var + s * s
        error = x[:, t] - mu - c * mean
        seen = ~np.isnan(error)
        gain = var * c / spread
        total += np.where(seen, -0.5 * (np.log(2 * np.pi * spread) + np.nan_to_num(error) ** 2 / spread), 0.0)
        mean, var = mean + np.where(seen, gain * np.nan_to_num(error), 0), np.where(seen, (1 - gain * c) * var, var)
        means.append(mean)
        variances.append(var)
    return total, np.stack(means, 1), np.stack(variances, 1)


def kalman_smoother(parameters, x):
    a = parameters[0]
    _, means, variances = kalman(parameters, x)
    smooth = means.copy()
    for t in range(x.shape[1] - 2, -1, -1):
        gain = variances[:, t] * a / (a * a * variances[:, t] + 1)
        smooth[:, t] += gain * (smooth[:, t + 1] - a * means[:, t])
    return smooth


def state_space():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.Normal(), "x": m.Normal()})


def known_state_space():
    model = state_space()
    model.set_params(
        {
            "z": {"loc": 0.0, "weight": 0.85, "scale": 1.0},
            "z[0]": {"loc": 0.0, "scale": 1.0},
            "x": {"loc": 2.0, "weight": 0.7, "scale": 0.5},
        }
    )
    return model


def switching_series(seed, sequences=20, length=40):
    """A latent autoregression with two levels that last, seen through two indicators."""
    rng = np.random.default_rng([11, seed])
    regime, level = np.zeros((sequences, length), dtype=int), np.zeros((sequences, length))
    regime[:, 0] = rng.integers(0, 2, sequences)
    for t in range(length):
        if t:
            regime[:, t] = np.where(rng.random(sequences) < 0.95, regime[:, t - 1], 1 - regime[:, t - 1])
        before = level[:, t - 1] if t else 0.0
        level[:, t] = 0.5 * before + np.array([-2.0, 2.0])[regime[:, t]] + rng.normal(size=sequences)
    x, y = 1 + 0.5 * level, -level
    return {"x": x + 0.4 * rng.normal(size=x.shape), "y": y + 0.8 * rng.normal(size=y.shape)}, regime, level


def switching_model():
    graph = otp.Graph([otp.lag("s", "s"), otp.lag("z", "z"), ("s", "z"), ("z", "x"), ("z", "y")], hidden=["s", "z"])
    return otp.Model(graph, {"s": m.Categorical(2), "z": m.Normal(), "x": m.Normal(), "y": m.Normal()})
