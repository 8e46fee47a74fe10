r"""What rows would have been, had some nodes been set: abduct, act, predict (Pearl, 2009, section 7.1).

What a row shows tells the noise :math:`u_v` of every mechanism; an intervention replaces some mechanisms; the others
make new values of the same noise. Of a category or count a row tells an interval :math:`(a, b]` of noise only, all of
it alike. Under other parents it holds the intervals of several values, so that

.. math:: P(x' = k \mid x, pa, pa') = \frac{|(a, b] \cap (F'(k - 1), F'(k)]|}{b - a}.

A row is followed through every case that it leaves open, each with its probability: *worlds*. Unknown categories are
cases too, with their exact posterior. Answers are sums over worlds; only unknown numbers are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otpdag.answers.queries import Belief, believe, moved_answers, with_nodes_set
from otpdag.data import Batch
from otpdag.errors import ModelError
from otpdag.graph import Graph, reachable
from otpdag.likelihood.row_posterior import Fitted, posterior_draws
from otpdag.mechanisms.base import Mechanism, abducted, can_abduct

Values = Mapping[str, Tensor]
# values (N, draws, width) of all nodes given what rows show, where rows tell of one another
Drawn = Callable[[Fitted], Values]
# values (1, N, width), or what makes them (1, M, width) of those (1, M, width) that all nodes had in M worlds
Setting = Tensor | Callable[[Values], Tensor]

SLIVER = 1e-12  # of an interval of noise, or of a probability: what is smaller is rounding


@dataclass(frozen=True)
class Worlds:
    """Cases of rows: the row's number and the case's probability (M,), values before and after (M, width) by node."""

    row: Tensor
    weight: Tensor
    before: Values
    after: Values

    def take(self, index: Tensor, share: Tensor) -> Worlds:
        """Some of them, each with a share of its probability."""
        before, after = ({node: value[index] for node, value in own.items()} for own in (self.before, self.after))
        return Worlds(self.row[index], self.weight[index] * share, before, after)

    @classmethod
    def joined(cls, parts: Sequence[Worlds]) -> Worlds:
        """All worlds of several parts."""
        before, after = (
            {node: torch.cat([own[node] for own in values]) for node in values[0]}
            for values in ([part.before for part in parts], [part.after for part in parts])
        )
        return cls(torch.cat([p.row for p in parts]), torch.cat([p.weight for p in parts]), before, after)

    def branched(self, probabilities: Tensor, node: str) -> Worlds:
        """One for each category (M, K) that a node may have had."""
        index, category = torch.nonzero(probabilities > SLIVER, as_tuple=True)
        state = torch.eye(probabilities.shape[1], dtype=torch.float64)[category]
        taken = self.take(index, probabilities[index, category])
        return replace(taken, before={**taken.before, node: state}, after={**taken.after, node: state})

    def sampled(self, rows: int, generator: torch.Generator) -> Worlds:
        """One world of each row, as likely as it is: of exponential times at such rates the first."""
        race = torch.empty_like(self.weight).exponential_(generator=generator) / self.weight
        first = torch.full((rows,), torch.inf, dtype=race.dtype).scatter_reduce(0, self.row, race, "amin")
        index = torch.nonzero(race == first[self.row])[:, 0]
        return self.take(index, 1 / self.weight[index])

    def expected(self, node: str, rows: int) -> Tensor:
        """Probabilities of a category, or the mean of a number, in each row (N, width)."""
        value = self.after[node]
        total = torch.zeros(rows, value.shape[-1], dtype=torch.float64)
        return total.index_add(0, self.row, self.weight.unsqueeze(-1) * value)


def changed_by(graph: Graph, settings: Collection[str]) -> list[str]:
    """Nodes that descend from one that is set and are not set themselves, parents first."""
    below = reachable(settings, {node: graph.children(node) for node in graph.nodes})
    return [node for node in graph.order if node in below and node not in settings]


def counterfactual_worlds(
    fitted: Fitted,
    batch: Batch,
    settings: Mapping[str, Setting],
    *,
    draws: int,
    seed: int,
    whole: bool = False,
    drawn: Drawn | None = None,
    most: int = 2_000_000,
) -> Worlds:
    """All cases of what rows would have been; nodes that descend from none that is set keep the values that they had.

    Args:
        fitted: The model.
        batch: Rows as they were.
        settings: What nodes are set to.
        draws: Draws of unknown numbers that matter, and of noise that a value does not tell up to an interval.
        seed: Determines them.
        drawn: Draws of all that is unknown, where rows share hidden nodes.
        whole: Whether worlds differ in all that is unknown; otherwise what does not matter is as it is expected.
        most: Worlds that are followed.
    """
    graph, mechanisms = fitted.structure.graph, fitted.structure.mechanisms
    changed = changed_by(graph, settings)
    needed = {name for node in changed for name in (node, *graph.parents(node))}
    if whole or any(callable(setting) for setting in settings.values()):
        needed = set(graph.nodes)
    worlds = _drawn(drawn(fitted)) if drawn else _known(fitted, batch, needed, draws, seed)
    if any(_is_open(mechanisms[node]) for node in changed) and len(worlds.row) == batch.rows:
        worlds = worlds.take(worlds.row.repeat_interleave(draws), torch.tensor(1 / draws))
    generator = torch.Generator().manual_seed(seed + 1)
    for node in graph.order:
        if node in settings:
            made = settings[node]
            if callable(made):
                value = made({name: value.unsqueeze(0) for name, value in worlds.before.items()})[0]
            else:
                value = made[0].expand(batch.rows, -1)[worlds.row]
            worlds = replace(worlds, after={**worlds.after, node: value.to(torch.float64)})
        elif node in changed:
            if not can_abduct(mechanisms[node]):
                kind = type(mechanisms[node]).__name__
                raise ModelError(f"a counterfactual needs the noise of node {node!r}; {kind} cannot recover it")
            worlds = _predicted(fitted, node, worlds, generator)
        if len(worlds.row) > most:
            raise ModelError(f"a counterfactual has over {most} cases at node {node!r}: ask for fewer rows at a time")
    return worlds


def untold_counterfactuals(
    fitted: Fitted,
    batch: Batch,
    settings: Mapping[str, Setting],
    nodes: Sequence[str],
    *,
    draws: int,
    seed: int,
    drawn: Drawn | None = None,
) -> list[str]:
    """Nodes of which the answers, in the first rows, are not told: other parameters fit the data as well."""
    few = batch if drawn else batch.first(20)
    own = {n: s if callable(s) else s.expand(1, batch.rows, -1)[:, : few.rows] for n, s in settings.items()}

    def about(at: Fitted, node: str) -> Belief:
        worlds = counterfactual_worlds(at, few, own, draws=draws, seed=seed, drawn=drawn)
        change = worlds.weight.unsqueeze(-1) * (worlds.after[node] - worlds.before[node]).abs()
        is_discrete = fitted.structure.mechanisms[node].space.is_discrete
        return Belief(worlds.expected(node, few.rows), None if is_discrete else (change.sum(0) / few.rows).square())

    return moved_answers(fitted, nodes, about)


def _has_intervals(mechanism: Mechanism) -> bool:
    """Whether every value has an interval of one uniform number."""
    return mechanism.space.is_countable and mechanism.noise.dim == 1 and mechanism.noise.kind == "uniform"


def _is_open(mechanism: Mechanism) -> bool:
    """Whether a value leaves more of its noise open than an interval."""
    space = mechanism.space
    return not _has_intervals(mechanism) and (space.is_countable or mechanism.noise.dim > space.free_width)


def _known(fitted: Fitted, batch: Batch, needed: Collection[str], draws: int, seed: int) -> Worlds:
    """Worlds as they were: unknown categories that are needed in every state, by the chain rule."""
    structure, batch = fitted.structure, batch.widened()
    gaps = [n for n in structure.graph.order if n not in batch.mask or not bool(batch.mask[n].all())]
    if not all(structure.mechanisms[node].space.is_discrete for node in gaps if node in needed):
        return _drawn(posterior_draws(fitted, batch, draws, seed, stratified=True))
    row, one = torch.arange(batch.rows), torch.ones(batch.rows, dtype=torch.float64)
    seen = {node: value[0] for node, value in batch.values.items()}
    for node in (node for node in gaps if node not in needed):
        expected = believe(fitted, batch, node, []).expected
        seen[node] = torch.where(batch.mask[node][0], seen[node], expected) if node in seen else expected
    shown: list[str] = []
    worlds = Worlds(row, one, seen, seen)
    for node in (node for node in gaps if node in needed):
        likely = believe(with_nodes_set(fitted, shown=shown), _evidence(batch, worlds, shown), node, []).expected
        worlds = worlds.branched(likely, node)
        shown.append(node)
    return worlds


def _drawn(values: Values) -> Worlds:
    """A world for each draw (N, draws, width)."""
    rows, draws = next(iter(values.values())).shape[:2]
    flat = {node: value.flatten(0, 1) for node, value in values.items()}
    row = torch.arange(rows).repeat_interleave(draws)
    return Worlds(row, torch.full((len(row),), 1 / draws, dtype=torch.float64), flat, flat)


def _evidence(batch: Batch, worlds: Worlds, shown: Collection[str]) -> Batch:
    """What the rows of worlds show, with the categories that the worlds differ in."""
    return batch.take(worlds.row).showing({node: worlds.before[node].unsqueeze(0) for node in shown})


def _predicted(fitted: Fitted, node: str, worlds: Worlds, generator: torch.Generator) -> Worlds:
    """The values of a node after its parents changed, by the noise that it had."""
    mechanism, params = fitted.structure.mechanisms[node], fitted.naturals[node]
    parents = fitted.structure.graph.parents(node)

    def noise(value: Tensor, own: Values, level: Tensor) -> Tensor:
        """That which makes a value; at this level (M, dim) of an interval."""
        lifted = {parent: own[parent].unsqueeze(0) for parent in parents}
        found = abducted(mechanism, params, value.unsqueeze(0), lifted, level.unsqueeze(0))[0]
        return found.detach().expand_as(level)

    def made(own: Values, noise: Tensor) -> Tensor:
        """The value (M, width) that noise makes."""
        lifted = {parent: own[parent].unsqueeze(0) for parent in parents}
        value = mechanism.forward(params, lifted, noise.unsqueeze(0))[0].detach()
        return value.expand(len(noise), -1)

    level = torch.rand(len(worlds.row), mechanism.noise.dim, generator=generator, dtype=torch.float64)
    if not _has_intervals(mechanism):
        value = made(worlds.after, noise(worlds.before[node], worlds.before, level))
        return replace(worlds, after={**worlds.after, node: value})
    low, end = (noise(worlds.before[node], worlds.before, torch.full_like(level, at)) for at in (0.0, 1.0))
    whole, index, parts = end - low, torch.arange(len(low)), []
    ahead = torch.full_like(whole, SLIVER)
    while len(index):
        # value by value: the one that noise just above makes, and where the interval of that value ends
        here, above = worlds.take(index, torch.ones(1)), low + ahead * whole
        value = made(here.after, above)
        top = noise(value, here.after, torch.ones_like(above)).clamp(above, end)
        share = torch.where(whole > 0, (top - low) / whole, torch.ones_like(whole))[:, 0]
        part = here.take(torch.arange(len(index)), share)
        parts.append(replace(part, after={**part.after, node: value}))
        left = (end - top > SLIVER * whole)[:, 0]
        # far out in a tail, digits do not tell where an interval ends: the next look is then further ahead
        ahead = torch.where(top > above, SLIVER, 4 * ahead)
        index, low, end, whole, ahead = index[left], top[left], end[left], whole[left], ahead[left]
    return Worlds.joined(parts)
