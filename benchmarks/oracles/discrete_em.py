"""Exact expectation-maximisation for a discrete network with gaps and hidden nodes, by variable elimination.

It takes the same steps as pyAgrum's, which does inference row by row: all rows at once here, with the sums along
one elimination order and the expected counts as the gradient of the log-likelihood by the logarithms of the tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
import pandas as pd
import torch
from scipy.special import xlogy

from otpdag.datasets import DiscreteNetwork

Tables = Mapping[str, np.ndarray]

ROWS_AT_A_TIME = 2500
FALLS_ALLOWED = 3  # in a row, by pyAgrum


@dataclass(frozen=True)
class Run:
    """Tables at the end of EM, and the expected log-likelihood of all completed rows after each of its steps."""

    tables: dict[str, np.ndarray]
    history: list[float]
    steps: int


@dataclass(frozen=True)
class DiscreteEM:
    """EM on the distinct rows of a table of codes, NaN where unknown; nodes without a column are hidden.

    Attributes:
        network: Tells nodes, states and parents only.
        frame: The table.
        prior: What is added to each expected count.
    """

    network: DiscreteNetwork
    frame: pd.DataFrame
    prior: float = 0.0

    @cached_property
    def evidence(self) -> tuple[np.ndarray, torch.Tensor]:
        """Distinct rows of codes, -1 where unknown, and how often each occurs."""
        columns = [
            self.frame[node].fillna(-1).to_numpy(dtype=int) if node in self.frame else np.full(len(self.frame), -1)
            for node in self.network.nodes
        ]
        codes, counts = np.unique(np.column_stack(columns), axis=0, return_counts=True)
        return codes, torch.as_tensor(counts, dtype=torch.float64)

    @cached_property
    def order(self) -> list[str]:
        """An order of elimination by least fill-in, the smaller table where that is equal."""
        network = self.network
        near: dict[str, set[str]] = {node: set() for node in network.nodes}
        for node in network.nodes:
            for a, b in combinations((node, *network.parents[node]), 2):
                near[a].add(b)
                near[b].add(a)

        def cost(node: str) -> tuple[int, float]:
            fill = sum(b not in near[a] for a, b in combinations(near[node], 2))
            return fill, float(np.prod([len(network.states[name]) for name in (node, *near[node])]))

        order: list[str] = []
        while near:
            node = min(near, key=cost)
            order.append(node)
            for a, b in combinations(near[node], 2):
                near[a].add(b)
                near[b].add(a)
            for name in near.pop(node):
                near[name].discard(node)
        return order

    def run(self, start: Tables, tolerance: float = 1e-6, steps: int = 1000) -> Run:
        """Step until the expected log-likelihood of completed rows changes by less than a share of itself.

        That is where pyAgrum stops, though only the log-likelihood of what is seen must rise at every step. So does
        this: where the other one fell, it takes the tables before, after more than a few falls in a row at once.
        """
        tables, history = dict(start), [-np.inf]
        before_falls, falls = tables, 0
        for _ in range(steps):
            counts, _ = self.expected(tables)
            stepped = {node: _normalised(count + self.prior) for node, count in counts.items()}
            value = sum(float(xlogy(counts[node], stepped[node]).sum()) for node in counts)
            falls = falls + 1 if value < history[-1] else 0
            before_falls = tables if falls == 1 else before_falls
            if falls > FALLS_ALLOWED:
                break
            history.append(value)
            tables = stepped
            if abs(history[-1] - history[-2]) < tolerance * abs(history[-1]):
                break
        taken = len(history) - 1 + (falls > FALLS_ALLOWED)
        return Run(before_falls if falls else tables, history[1:], taken)

    def log_likelihood(self, tables: Tables) -> float:
        """Of all rows, natural logarithm."""
        return self.expected(tables)[1]

    def expected(self, tables: Tables) -> tuple[dict[str, np.ndarray], float]:
        """Expected counts of each family, and the log-likelihood of all rows."""
        codes, weight = self.evidence
        values = {node: torch.as_tensor(table, dtype=torch.float64) for node, table in tables.items()}
        counts = {node: torch.zeros_like(value) for node, value in values.items()}
        total = 0.0
        for begin in range(0, len(codes), ROWS_AT_A_TIME):
            block = slice(begin, begin + ROWS_AT_A_TIME)
            leaves = {node: value.clone().requires_grad_() for node, value in values.items()}
            likelihood = self._log_evidence(leaves, codes[block]) @ weight[block]
            gradients = torch.autograd.grad(likelihood, list(leaves.values()))
            for node, gradient in zip(leaves, gradients, strict=True):
                counts[node] += values[node] * gradient
            total += float(likelihood.detach())
        return {node: count.numpy() for node, count in counts.items()}, total

    def _log_evidence(self, tables: Mapping[str, torch.Tensor], codes: np.ndarray) -> torch.Tensor:
        """Of each row: multiply what holds a node, sum it out, rescale; node by node. The rows are the last axis."""
        number = {node: at for at, node in enumerate(self.network.nodes)}
        factors = [(tables[node].unsqueeze(-1), [*self.network.parents[node], node]) for node in self.network.nodes]
        log_evidence = torch.zeros(len(codes), dtype=torch.float64)
        for node in self.order:
            seen = self._indicators(codes[:, number[node]], len(self.network.states[node]))
            touched = [factor for factor in factors if node in factor[1]]
            factors = [factor for factor in factors if node not in factor[1]]
            kept = sorted({name for _, names in touched for name in names} - {node})
            product = seen
            for value, names in sorted(touched, key=lambda factor: len(factor[1])):
                product = product * _aligned(value, names, [*kept, node])
            product = product.sum(dim=-2)
            scale = product.detach().reshape(-1, len(codes)).amax(dim=0).clamp(min=1e-300)
            log_evidence = log_evidence + torch.log(scale)
            factors.append((product / scale, kept))
        for product, _ in factors:
            log_evidence = log_evidence + torch.log(product)
        return log_evidence

    @staticmethod
    def _indicators(codes: np.ndarray, states: int) -> torch.Tensor:
        """Which states each row allows, (states, rows)."""
        allowed = (np.arange(states)[:, None] == codes) | (codes < 0)
        return torch.as_tensor(allowed, dtype=torch.float64)


def _aligned(value: torch.Tensor, names: Sequence[str], wanted: Sequence[str]) -> torch.Tensor:
    """A factor with its axes in a wanted order, of size one where it has none; the rows stay last."""
    present = [name for name in wanted if name in names]
    moved = value.permute(*(names.index(name) for name in present), value.ndim - 1)
    return moved[tuple(slice(None) if name in names else None for name in wanted)]


def _normalised(counts: np.ndarray) -> np.ndarray:
    """Rows that sum to one; uniform where nothing was counted."""
    total = counts.sum(axis=-1, keepdims=True)
    return np.where(total > 0, counts / np.where(total > 0, total, 1.0), 1.0 / counts.shape[-1])


def available_case_start(
    network: DiscreteNetwork, frame: pd.DataFrame, generator: np.random.Generator, noise: float = 0.1
) -> dict[str, np.ndarray]:
    """Frequencies in the rows that show a whole family, mixed with random tables: pyAgrum's own way to start."""
    start = {}
    for node in network.nodes:
        family = [*network.parents[node], node]
        counts = np.ones(tuple(len(network.states[name]) for name in family))
        if all(name in frame for name in family):
            seen = frame[family].dropna().to_numpy(dtype=int)
            np.add.at(counts, tuple(seen.T), 1.0)
        random = generator.random(counts.shape)
        start[node] = (1 - noise) * _normalised(counts) + noise * _normalised(random)
    return start
