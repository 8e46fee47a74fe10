"""Random groups of linear normal equations, and one plain matrix for the equations of each piece."""

import itertools
import math

import numpy as np
import torch

from otpdag.likelihood.elimination.linear_normal import Equations, LinearGroup

REPLICAS, PIECES, INSTANCES, FAMILIES, WIDTH, NOISE = 2, 4, 3, 4, 4, 2


def normal(rng, *shape):
    return torch.as_tensor(rng.normal(size=shape))


def make_group(rng, *, dim=3, states=(2, 3), points=(4, 3), axes=(2, 1, 3, 0), band=0):
    """A random group, the equations that its families have, and the points of its placed numbers."""
    equations = Equations(
        normal(rng, REPLICAS, 9, NOISE, WIDTH + 1), normal(rng, REPLICAS, 9), normal(rng, 9, WIDTH + 1)
    )
    known, total = dim + len(points), math.prod(states)
    unknown = torch.full((INSTANCES, FAMILIES, WIDTH), known)
    for instance, family in itertools.product(range(INSTANCES), range(FAMILIES)):
        reach = range(max(0, family - 1), min(known, family + 2)) if band else range(known)
        some = sorted(rng.permutation(reach), key=lambda one: one != family % dim)[: WIDTH - 1]  # each is in one
        unknown[instance, family, rng.permutation(WIDTH)[: len(some)]] = torch.as_tensor(some)
    instance = torch.as_tensor([0, 2, 1, 2])
    sizes = (*states, *points)
    group = LinearGroup(
        dim=dim,
        states=states,
        axes=axes,
        placed=tuple((((0, 0), torch.zeros(0)),) for _ in points),
        sizes=tuple(sizes[axis] for axis in axes),
        rows=torch.arange(PIECES),
        instance=instance,
        config=torch.as_tensor(rng.integers(1, 9, size=(INSTANCES, total, FAMILIES))),
        unknown=unknown,
        seen=torch.as_tensor(rng.random((INSTANCES, FAMILIES)) < 0.5),
        values=torch.where(unknown[instance] == known, normal(rng, PIECES, FAMILIES, WIDTH), 0.0),
        cells=torch.zeros(INSTANCES, dim, 2, dtype=torch.long),
        around=torch.zeros(INSTANCES, len(axes), dtype=torch.long),
        band=band,
    )
    return group, equations, [normal(rng, REPLICAS, PIECES, many) for many in points]


class Plain:
    """One piece in one state of one replica: its noise is ``matrix @ (q, y) + offset``."""

    def __init__(self, group, equations, power, replica, piece, state):
        instance = int(group.instance[piece])
        size = group.dim + len(group.placed)
        self.dim, self.constant = group.dim, 0.0
        self.columns = np.zeros((FAMILIES, WIDTH, size))  # which unknown each column is
        self.values, self.row = group.values[piece].numpy(), group.config[instance, state].tolist()
        matrix, offset = [], []
        for family, row in enumerate(self.row):
            scale = math.sqrt(power) if group.seen[instance, family] else 1.0
            coefficients = scale * equations.coefficients[replica, row, :, :WIDTH].numpy()
            for column, place in enumerate(group.unknown[instance, family].tolist()):
                if place < size:
                    self.columns[family, column, place] = 1.0
            matrix.append(coefficients @ self.columns[family])
            offset.append(coefficients @ self.values[family])
            self.constant += scale**2 * float(equations.constants[replica, row])
        self.matrix, self.offset = np.concatenate(matrix), np.concatenate(offset)

    def given(self, y):
        """Logarithm of the integral over q, its mean and covariance, at placed numbers."""
        a, rest = self.matrix[:, : self.dim], self.offset + self.matrix[:, self.dim :] @ y
        precision = a.T @ a
        mean = -np.linalg.solve(precision, a.T @ rest)
        log_integral = self.constant - 0.5 * ((a @ mean + rest) ** 2).sum()
        log_integral += 0.5 * self.dim * math.log(2 * math.pi) - 0.5 * np.linalg.slogdet(precision)[1]
        return log_integral, mean, np.linalg.inv(precision)


def entries(group, points):
    """Replica, piece, state and points of each entry of the table, its place there, and the placed numbers."""
    states = list(itertools.product(*map(range, group.states)))
    grid = list(itertools.product(*(range(one.shape[-1]) for one in points)))
    for replica, piece in itertools.product(range(REPLICAS), range(PIECES)):
        for state, codes in enumerate(states):
            for at in grid:
                place = tuple((*codes, *at)[axis] for axis in group.axes)
                y = np.array([float(one[replica, piece, k]) for one, k in zip(points, at, strict=True)])
                yield replica, piece, state, (replica, piece, *place), y


CASES = {
    "beside two placed numbers": {},
    "of one number": {"dim": 1},
    "without categories": {"states": (), "axes": (1, 0)},
    "beside three placed numbers": {"states": (2,), "points": (2, 3, 2), "axes": (3, 0, 2, 1), "dim": 2},
    "alone": {"states": (), "points": (), "axes": ()},
    "without placed numbers": {"points": (), "axes": (1, 0)},
    "along a band": {"points": (), "axes": (1, 0), "dim": 5, "band": 2},
    "along a band of one": {"states": (), "points": (), "axes": (), "dim": 5, "band": 3},
}
