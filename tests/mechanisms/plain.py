"""Plain versions of what mechanisms share, one row of data at a time."""

import numpy as np
import torch

from otpdag import mechanisms as m
from otpdag.spaces import Discrete, Real

FAMILY = m.Family("x", (("a", Discrete(3)), ("r", Real(1))))


def table(rng, rows=60):
    """A category with one level that is rare, a number, and weights."""
    a = rng.choice(3, rows, p=[0.5, 0.45, 0.05])
    return a, rng.normal(size=rows), rng.uniform(0.5, 2.0, rows)


def as_parents(a, r):
    return {"a": torch.eye(3).double()[torch.as_tensor(a)], "r": torch.as_tensor(r).unsqueeze(-1)}


def line_of(start, name, a, r):
    """What intercepts and slopes predict of each row (N, d)."""
    return np.stack([start[name][k].numpy() + x * start["weight"][0].numpy() for k, x in zip(a, r, strict=True)])


def pooled(values, a, weight, prior=2.0):
    """Weighted means by category (3, d), each with two rows' worth of the mean of all."""
    overall = (weight[:, None] * values).sum(0) / weight.sum()
    means = []
    for k in range(3):
        own = weight * (a == k)
        means.append(((own[:, None] * values).sum(0) + prior * overall) / (own.sum() + prior))
    return np.stack(means)


def regressed(mechanism, params, x, numbers, weight, labels=None, sizes=None, **options):
    """The update from moments of columns that are shifted and scaled before they are summed, as problems sum them."""
    x = np.asarray(x).reshape(len(x), -1)
    dim, shift, unit = x.shape[1], np.array([0.3, -2.0, 1.5])[: 1 + len(numbers)], np.full(x.shape[1], 2.5)
    moments = np.zeros((1, 1 if labels is None else sizes or labels.max() + 1, dim, len(shift) + 1, len(shift) + 1))
    for row, own in enumerate(x):
        for cell in range(dim):
            lifted = np.append(np.append(own[cell], [each[row] for each in numbers]) - shift, 1.0)
            lifted[0] /= unit[cell]
            moments[0, 0 if labels is None else labels[row], cell] += weight[row] * np.outer(lifted, lifted)
    return mechanism.regressed(
        params, torch.as_tensor(moments), torch.as_tensor(np.tile(shift, (dim, 1))), torch.as_tensor(unit), **options
    )
