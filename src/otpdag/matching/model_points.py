r"""The model's distribution of what is observed, as weighted points that move smoothly with the parameters.

Numbers come from fixed quasi-random noise, through the same assignments as in the graph. Categories are listed with
their probabilities as long as their joint states are few; other categories and counts are drawn at some parameters and
weighed, at others, by how much likelier they have become,

.. math:: w_j(\theta) \propto \prod_i P_\theta(x_{ij} \mid pa_{ij}) \big/ P_{\theta_0}(x_{ij} \mid pa_{ij}),

so that a mean over the points is a smooth function of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.settings import Direct
from otpdag.structure import Naturals, Structure

FEWEST_PATHS = 32  # windows of one path depend on each other
EDGE = 1e-9  # quasi-random numbers nearer to zero or one would be noise of more than six standard deviations


@dataclass(frozen=True)
class ModelPoints:
    """Noise (1, M, dim) of the nodes, listed and given values (1, M, width), and drawn values (R, M, width).

    Attributes:
        given: Covariates, and other values whose probabilities do not count here.
        drawn: Categories and counts that are too many to list, where they were drawn.
        log_drawn: Log-probability (R, M) of what was drawn; None if nothing was.
        first_weight: Weights (R, M) where it was drawn.
    """

    structure: Structure
    size: int
    noise: Mapping[str, Tensor]
    listed: Mapping[str, Tensor]
    given: Mapping[str, Tensor]
    drawn: Mapping[str, Tensor] = field(default_factory=dict)
    log_drawn: Tensor | None = None
    first_weight: Tensor | None = None

    @property
    def must_be_drawn(self) -> tuple[str, ...]:
        """Nodes whose values no noise moves smoothly, and that are too many to list."""
        mechanisms = self.structure.mechanisms
        nodes = (n for n in self.structure.graph.order if n not in self.listed and n not in self.given)
        return tuple(n for n in nodes if mechanisms[n].space.is_countable and mechanisms[n].has_density)

    @property
    def is_list(self) -> bool:
        """Whether all that is observed is listed: only weights move."""
        return all(node in self.listed for node in self.structure.graph.observed)

    def placed_at(self, naturals: Naturals) -> ModelPoints:
        """The same points with categories and counts drawn at these parameters (R, ...)."""
        if not self.must_be_drawn:
            return self
        bare = replace(self, drawn={}, log_drawn=None)
        with torch.no_grad():
            values, log_weight = bare.at(naturals)
            drawn = {node: values[node] for node in self.must_be_drawn}
            log_drawn = torch.stack(torch.broadcast_tensors(*(self._log_prob(naturals, n, values) for n in drawn))).sum(
                0
            )
        return replace(bare, drawn=drawn, log_drawn=log_drawn, first_weight=torch.softmax(log_weight, -1))

    def at(self, naturals: Naturals) -> tuple[dict[str, Tensor], Tensor]:
        """Values (R or 1, M, width) of all nodes under parameters (R, ...), and log-weights (R or 1, M)."""
        values = dict(self.given)
        like = next(iter((*self.noise.values(), *self.listed.values())))
        log_weight = like.new_zeros(1, self.size) if self.log_drawn is None else -self.log_drawn
        for node in self.structure.graph.order:
            if node in values:
                continue
            fixed = self.listed.get(node, self.drawn.get(node))
            if fixed is None:
                parents = self.structure.parents(node, values)
                values[node] = self.structure.mechanisms[node].forward(naturals[node], parents, self.noise[node])
            else:
                values[node] = fixed
                log_weight = log_weight + self._log_prob(naturals, node, values)
        return values, log_weight

    def _log_prob(self, naturals: Naturals, node: str, values: Mapping[str, Tensor]) -> Tensor:
        mechanism = self.structure.mechanisms[node]
        log_prob = mechanism.log_prob(naturals[node], values[node], self.structure.parents(node, values))
        return log_prob.expand(-1, self.size)

    def effective(self, naturals: Naturals) -> float:
        """The share of the points that still count as where they were drawn, in the replica that has fewest."""
        if self.first_weight is None:
            return 1.0
        with torch.no_grad():
            weight = torch.softmax(self.at(naturals)[1], -1)
            return float((1 / (weight.square() / self.first_weight).nan_to_num(0.0).sum(-1)).min())

    def fits(self, replicas: int) -> bool:
        """Whether everything that must be drawn is, for as many replicas."""
        placed = (self.log_drawn, self.first_weight)  # weights may be shared by replicas that drew each their own
        return not self.must_be_drawn or all(one is not None and len(one) in (1, replicas) for one in placed)


def lay_out(structure: Structure, batch: Batch, direct: Direct, seed: int, windows: int = 1) -> ModelPoints:
    """Choose the points: as many for each listed state, and covariates in proportion to the weights of their rows.

    A point that is a path has so many ``windows``, and is one of fewer.
    """
    like, listed = batch.weight[:1], listed_nodes(structure, direct.states)
    sizes = [structure.mechanisms[node].space.width for node in listed]
    states, nodes = math.prod(sizes), [n for n in structure.graph.order if n not in (*listed, *structure.given)]
    is_noisy = structure.given or any(structure.mechanisms[node].noise.dim for node in nodes)
    size = direct.size(len(structure.graph.observed))
    total = max(size // windows, min(size, FEWEST_PATHS))
    each = even_share(total, states) if is_noisy else 1
    index = torch.cartesian_prod(torch.zeros(1).long(), *(torch.arange(size) for size in sizes)).reshape(states, -1)
    values = {
        node: torch.nn.functional.one_hot(index[:, at], size).to(like).repeat_interleave(each, 0).unsqueeze(0)
        for at, (node, size) in enumerate(zip(listed, sizes, strict=True), start=1)
    }
    rows = _proportional(batch.weight[0] / batch.weight[0].sum(), each, torch.Generator().manual_seed(seed))
    given = {node: batch.values[node][:1, rows.repeat(states)] for node in structure.given}
    (noise,) = even_noise(structure, nodes, each * states, seed, like)
    return ModelPoints(structure, each * states, noise, values, given)


def listed_nodes(structure: Structure, most: int) -> list[str]:
    """Categories, hidden ones first, as long as they have at ``most`` so many joint states."""
    graph, mechanisms = structure.graph, structure.mechanisms
    categories = [n for n in graph.order if mechanisms[n].space.is_discrete and mechanisms[n].has_density]
    listed: list[str] = []
    for node in sorted(categories, key=lambda n: n not in graph.hidden):
        if math.prod(mechanisms[n].space.width for n in (*listed, node)) <= most:
            listed.append(node)
    return listed


def even_share(size: int, states: int) -> int:
    """About so many points for each of some states, as a power of two: only such blocks of Sobol points lie evenly.

    >>> even_share(2048, 9), even_share(2048, 27), even_share(9, 27)
    (256, 64, 1)
    """
    return 2 ** round(math.log2(max(1, size // states)))


def even_noise(
    structure: Structure, nodes: Sequence[str], size: int, seed: int, like: Tensor, times: int = 1
) -> list[dict[str, Tensor]]:
    """Quasi-random noise (1, size, dim) of the nodes, independent ``times`` over."""
    kinds = [(node, structure.mechanisms[node].noise) for node in nodes]
    dims = [noise.dim for _, noise in kinds] * times
    uniform = torch.zeros(size, 0, dtype=torch.float64)
    if sum(dims):
        sobol = torch.quasirandom.SobolEngine(sum(dims), scramble=True, seed=seed)
        uniform = sobol.draw(size, dtype=torch.float64).clamp(EDGE, 1 - EDGE)
    pieces = iter(uniform.to(like).unsqueeze(0).split(dims, -1))
    return [
        {
            node: torch.special.ndtri(own) if noise.kind == "normal" else own
            for (node, noise), own in zip(kinds, pieces, strict=False)
        }
        for _ in range(times)
    ]


def _proportional(share: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Row numbers in proportion to their weights, in random order (systematic sampling)."""
    order = torch.randperm(len(share), generator=generator)
    steps = (torch.arange(size, dtype=torch.float64) + float(torch.rand(1, generator=generator))) / size
    cumulative = share.double()[order].cumsum(0)
    index = order[torch.searchsorted(cumulative, steps * cumulative[-1]).clamp(max=len(share) - 1)]
    return index[torch.randperm(size, generator=generator)]
