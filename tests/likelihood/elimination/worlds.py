"""Random graphs with random parameters and gaps, random linear normal equations, and their evidence by other means."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.likelihood.elimination.unknown_numbers import Equations, LinearGroup
from otpdag.mechanisms.parameters import REAL
from otpdag.simulation import ancestral
from otpdag.structure import Structure

# -- random graphs with random parameters and gaps, and their evidence by other means ---------------------------------


def random_edges(rng, names, density):
    """Edges from earlier to later names, at most three parents each."""
    edges = []
    for i, child in enumerate(names):
        parents = [p for p in names[:i] if rng.random() < density]
        edges += [(p, child) for p in rng.permutation(parents)[:3].tolist()] if parents else []
    return edges


def random_naturals(structure, rng, replicas=1):
    """Natural parameters of order one."""
    naturals = {}
    for node, mechanism in structure.mechanisms.items():
        params = {}
        for name, parameter in mechanism.declared().items():
            shape = (replicas, *parameter.shape)
            if name == "probs":
                value = rng.dirichlet(np.ones(shape[-1]), size=shape[:-1])
            elif name in ("scale", "dispersion"):
                value = np.exp(rng.normal(0, 0.3, size=shape))
            elif name == "covariance":
                root = rng.normal(size=shape)
                value = root @ np.swapaxes(root, -1, -2) + np.eye(shape[-1])
            elif parameter.support is REAL:
                value = rng.normal(0, 0.5, size=shape)
            else:
                value = parameter.natural(torch.as_tensor(rng.normal(0.5, 0.3, size=shape)))
            params[name] = torch.as_tensor(value, dtype=torch.float64)
        naturals[node] = params
    return naturals


def make_world(nodes, edges, rng, *, rows=40, gaps=0.4, hidden=(), replicas=1):
    """A structure, parameters, and rows drawn from the first replica with cells missing."""
    graph = otp.Graph(edges, nodes=list(nodes), hidden=hidden)
    structure = Structure.bind(graph, nodes)
    naturals = random_naturals(structure, rng, replicas)
    first = {node: {name: value[:1] for name, value in params.items()} for node, params in naturals.items()}
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    values = ancestral(structure, first, rows, generator)
    return structure, naturals, gappy(structure, values, rng, gaps)


def gappy(structure, values, rng, gaps):
    """Rows with cells missing completely at random."""
    kept, mask = {}, {}
    for node in structure.graph.observed:
        value = values[node]
        cells = structure.mechanisms[node].space.cells
        seen = torch.as_tensor(rng.random((1, value.shape[1], cells)) >= gaps)
        mask[node] = seen
        kept[node] = torch.where(seen, value, torch.zeros_like(value))
    rows = next(iter(kept.values())).shape[1]
    return Batch(kept, mask, torch.as_tensor(rng.uniform(0.5, 2.0, size=(1, rows))))


def lattice(size, pull, seed=0, rows=20, reading=0.5):
    """Hidden binaries on a square lattice that take after their two neighbours, each with a noisy reading."""
    rng = np.random.default_rng(seed)
    at = [(i, j) for i in range(size) for j in range(size)]
    edges = [(f"h{i}{j}", f"h{i + 1}{j}") for i, j in at if i + 1 < size]
    edges += [(f"h{i}{j}", f"h{i}{j + 1}") for i, j in at if j + 1 < size]
    edges += [(f"h{i}{j}", f"x{i}{j}") for i, j in at]
    graph = otp.Graph(edges, hidden=[f"h{i}{j}" for i, j in at])
    structure = Structure.bind(graph, {name: m.Bernoulli() for name in graph.nodes})
    naturals = {}
    for name in graph.nodes:
        parents = len(graph.parents(name))
        votes = sum(np.indices((2,) * parents) * 2.0 - 1.0, start=np.zeros((2,) * parents))
        logit = (reading if name[0] == "x" else pull) * votes + rng.normal(0, 0.2, size=votes.shape)
        one = 1 / (1 + np.exp(-logit))
        naturals[name] = {"probs": torch.as_tensor(np.stack([1 - one, one], -1)).reshape(1, -1, 2)}
    values = ancestral(structure, naturals, rows, torch.Generator().manual_seed(seed))
    return structure, naturals, gappy(structure, values, rng, 0.0)


def enumerated(structure, naturals, batch, supports, *, power=1.0, uniform=False, best=False):
    """Evidence (R, N) by summing over all joint states of everything that is not seen; differentiable.

    ``supports`` has for each node that is no category points (S, 1) with log-lengths (S,).
    """
    rows = []
    for row in range(batch.rows):
        unknown = [n for n in structure.graph.order if n not in batch.mask or not bool(batch.mask[n][0, row].all())]
        states, lengths = [], []
        for node in unknown:
            space = structure.mechanisms[node].space
            points, length = (torch.eye(space.width).double(), None) if space.is_discrete else supports[node]
            states.append(points)
            lengths.append(torch.zeros(len(points)).double() if length is None else length)
        sizes = [len(s) for s in states]
        columns = torch.as_tensor(np.indices(sizes).reshape(len(sizes), math.prod(sizes)).T)
        values = {n: s[columns[:, i]].unsqueeze(0) for i, (n, s) in enumerate(zip(unknown, states, strict=True))}
        prior = sum((one[columns[:, i]] for i, one in enumerate(lengths)), torch.zeros(len(columns)).double())
        for node in structure.graph.order:
            if node not in values:
                values[node] = batch.values[node][:, row : row + 1].expand(1, len(columns), -1)
        prior, likelihood = prior.unsqueeze(0), torch.zeros(1, 1).double()
        for node, mechanism in structure.mechanisms.items():
            log_prob = mechanism.log_prob(naturals[node], values[node], structure.parents(node, values))
            if node not in unknown:
                likelihood = likelihood + log_prob
            elif uniform and node in structure.graph.hidden and mechanism.space.is_discrete:
                prior = prior - np.log(mechanism.space.width)
            else:
                prior = prior + log_prob
        if best:
            rows.append((power * likelihood + torch.where(torch.isneginf(prior), prior, 0.0)).amax(-1))
        else:
            rows.append(torch.logsumexp(prior + power * likelihood, -1))
    return torch.stack(rows, -1)


def linear_moments(structure, naturals, replica=0):
    """Mean and covariance of all coordinates of a linear normal graph without categories, in topological order."""
    sizes = {n: structure.mechanisms[n].space.width for n in structure.graph.order}
    at, total = {}, 0
    for node, size in sizes.items():
        at[node] = slice(total, total + size)
        total += size
    mean, covariance = np.zeros(total), np.zeros((total, total))
    for node in structure.graph.order:
        params = {name: value[replica].numpy() for name, value in naturals[node].items()}
        here = at[node]
        slopes = np.zeros((sizes[node], total))
        row = 0
        for parent in structure.graph.parents(node):
            slopes[:, at[parent]] = params["weight"][row : row + sizes[parent]].T
            row += sizes[parent]
        noise = params["covariance"][0] if "covariance" in params else np.diag(params["scale"][0] ** 2)
        mean[here] = params["loc"][0] + slopes @ mean
        cross = slopes @ covariance
        covariance[here, :], covariance[:, here] = cross, cross.T
        covariance[here, here] = slopes @ covariance @ slopes.T + noise
    return mean, covariance, at


def with_leaves(naturals):
    """Parameters as functions of leaves; probabilities by their logarithms, so that they stay on the simplex."""
    leaves, own = {}, {}
    for node, params in naturals.items():
        own[node] = {}
        for name, value in params.items():
            raw = (value.log() if name == "probs" else value.clone()).requires_grad_()
            leaves[node, name] = raw
            own[node][name] = torch.softmax(raw, -1) if name == "probs" else raw
    return leaves, own


def mixed_nodes():
    """Categories, numbers and counts in which every kind of unknown meets every other."""
    return (
        {
            "z": m.Categorical(3),
            "x": m.Normal(),
            "y": m.Normal(),
            "k": m.Poisson(),
            "w": m.Bernoulli(),
            "v": m.Normal(),
        },
        [("z", "x"), ("x", "y"), ("z", "y"), ("y", "k"), ("x", "w"), ("k", "v")],
    )


CATEGORY = (m.Bernoulli, lambda: m.Categorical(3), lambda: m.Categorical(4))


# -- random groups of linear normal equations, and one plain matrix for the equations of each piece -------------------


REPLICAS, PIECES, INSTANCES, FAMILIES, WIDTH, NOISE = 2, 4, 3, 4, 4, 2


def normal(rng, *shape):
    return torch.as_tensor(rng.normal(size=shape))


def make_group(rng, *, dim=3, states=(2, 3), points=(4, 3), axes=(2, 1, 3, 0)):
    """A random group, the equations that its families have, and the points of its placed numbers."""
    equations = Equations(
        normal(rng, REPLICAS, 9, NOISE, WIDTH + 1), normal(rng, REPLICAS, 9), normal(rng, 9, WIDTH + 1)
    )
    known, total = dim + len(points), math.prod(states)
    unknown = torch.full((INSTANCES, FAMILIES, WIDTH), known)
    for instance, family in itertools.product(range(INSTANCES), range(FAMILIES)):
        some = sorted(rng.permutation(known), key=lambda one: one != family % dim)[: WIDTH - 1]  # each is in one
        unknown[instance, family, rng.permutation(WIDTH)[: len(some)]] = torch.as_tensor(some)
    instance = torch.as_tensor([0, 2, 1, 2])
    sizes = (*states, *points)
    group = LinearGroup(
        dim=dim,
        states=states,
        axes=axes,
        placed=tuple((((0, 0), torch.zeros(0)),) for _ in points),
        sizes=tuple(sizes[axis] for axis in axes),
        start=1,
        rows=torch.arange(PIECES),
        instance=instance,
        config=torch.as_tensor(rng.integers(1, 9, size=(INSTANCES, total, FAMILIES))),
        unknown=unknown,
        seen=torch.as_tensor(rng.random((INSTANCES, FAMILIES)) < 0.5),
        values=torch.where(unknown[instance] == known, normal(rng, PIECES, FAMILIES, WIDTH), 0.0),
        cells=torch.zeros(INSTANCES, dim, 2, dtype=torch.long),
        around=torch.zeros(INSTANCES, len(axes), dtype=torch.long),
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
}
