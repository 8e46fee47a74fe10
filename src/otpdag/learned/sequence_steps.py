"""Steps of sequences as learned maps see them: whole sequences, or pieces of series that may be very long.

A piece counts some steps and reads a few more before and after them, so that a backward map meets the middle of a
series there as it does elsewhere. All pieces have one span: what lies beyond the end of a sequence shows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.errors import ModelError
from otpdag.likelihood.chain_layout import Block, Chain, joint_states
from otpdag.structure import Structure, lag_name

CONTEXT = 8  # steps before and after those of a piece that count, which are only read


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps (M,) in the order of a block's columns.

    Attributes:
        structure: Graph and mechanisms.
        values: What is seen (1, M, width), earlier values included.
        mask: Which cells are seen.
        times: How many steps of the sequence came before (M,).
        inside: Steps that lie within their sequence.
        counted: Steps whose costs count.
        features: What a map reads (1, M, F).
        block: The order; its sequences are those of the batch, or pieces of them.
    """

    structure: Structure
    values: Mapping[str, Tensor]
    mask: Mapping[str, Tensor]
    times: Tensor
    inside: Tensor
    counted: Tensor
    features: Tensor
    block: Block

    @classmethod
    def of(
        cls,
        structure: Structure,
        batch: SequenceBatch,
        block: Block,
        features: Tensor,
        inside: Tensor | None = None,
        counted: Tensor | None = None,
    ) -> Steps:
        """Of the rows of a batch in a block's order, all of them inside and counted unless told otherwise."""
        rows, every = block.rows, torch.ones(len(block.rows), dtype=torch.bool)
        inside, counted = every if inside is None else inside, every if counted is None else counted
        values = {node: value[:, rows] for node, value in batch.steps.values.items()}
        mask = {node: seen[:, rows] & inside.unsqueeze(-1) for node, seen in batch.steps.mask.items()}
        read = features[:, rows] * inside.unsqueeze(-1)
        steps = cls(structure, values, mask, batch.times[rows], inside, counted, read, block)
        for edge in structure.graph.lags:
            if edge.parent in values:
                name, follows = lag_name(edge.parent, edge.by), steps.follows(edge.by).unsqueeze(-1)
                values[name] = steps.lagged(values[edge.parent], edge.by)
                mask[name] = steps.lagged(mask[edge.parent], edge.by) & follows
        return steps

    def lagged(self, tensor: Tensor, by: int) -> Tensor:
        """Each step's value (..., M, width) ``by`` steps ago; first ones keep that of the first."""
        return tensor.index_select(-2, self.block.back(by))

    def follows(self, by: int) -> Tensor:
        """Steps (M,) whose value so many steps ago exists and is among them."""
        return (self.times >= by) & (self.block.steps >= by)

    def with_earlier(self, drawn: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Drawn values (..., M, width), and their earlier values under their own names."""
        lags = [edge for edge in self.structure.graph.lags if edge.parent in drawn]
        return {**drawn, **{lag_name(e.parent, e.by): self.lagged(drawn[e.parent], e.by) for e in lags}}

    def made(self, name: str) -> Tensor:
        """Counted steps (M,) that a mechanism makes, all of whose observed parents are seen."""
        base = self.structure.base(name)
        lag = self.structure.longest_lag(base)
        made = self.counted & (self.times < lag if name != base else self.follows(lag))
        for parent, _ in self.structure.mechanisms[name].family.parents:
            if parent in self.mask:
                made = made & self.mask[parent][0].all(-1)
        return made

    def as_batch(self) -> Batch:
        """The counted steps as rows of a table, of which only what a mechanism makes is seen."""
        observed = self.structure.graph.observed
        mask = {node: self.mask[node] & self.made(node).unsqueeze(-1) for node in observed}
        return Batch({node: self.values[node] for node in mask}, mask, self.counted.to(self.features).unsqueeze(0))

    def chain(self, categories: tuple[str, ...], copies: int = 1) -> Chain:
        """Several copies of all steps, each a set of sequences of its own on which hidden categories are a chain.

        Hidden numbers, which differ between copies, are known but where the step before a piece would tell them.
        """
        structure, mask = self.structure, dict(self.mask)
        for node in structure.hidden_numbers:
            lag, cells = structure.longest_lag(node), structure.mechanisms[node].space.cells
            mask[node] = (self.inside & ((self.times < lag) | self.follows(lag)))[None, :, None].expand(-1, -1, cells)
            for edge in structure.graph.lags:
                if edge.parent == node:
                    mask[lag_name(node, edge.by)] = (self.inside & self.follows(edge.by))[None, :, None]
        values, mask = (
            {name: one.expand(copies, -1, -1).reshape(1, -1, one.shape[-1]) for name, one in held.items()}
            for held in (self.values, mask)
        )
        shift = len(self.times) * torch.arange(copies).unsqueeze(1)
        kinds = torch.cat([(shift + torch.arange(at, at + size)).flatten() for at, size in self.block.spans])
        sizes = tuple(copies * size for size in self.block.sizes)
        block = Block(kinds, kinds, sizes, torch.arange(sizes[0]))
        states = joint_states(structure, categories)
        return Chain.of(structure, states, values, mask, self.times.repeat(copies), (block,))


@dataclass(frozen=True)
class Cuts:
    """Where the pieces of all sequences lie.

    Attributes:
        batch: The sequences.
        begin: The first row that a piece reads (P,).
        first: The first row that it counts (P,).
        last: The row after the last that it counts (P,).
        end: The row after the last of its sequence (P,).
        span: Rows that a piece reads, some perhaps beyond the end.
    """

    batch: SequenceBatch
    begin: Tensor
    first: Tensor
    last: Tensor
    end: Tensor
    span: int

    @classmethod
    def of(cls, batch: SequenceBatch, *, counted: int = 40, context: int = CONTEXT) -> Cuts:
        """Cut sequences in pieces of about equal length, of at most so many counted steps; short ones stay whole.

        >>> x = torch.zeros(1, 7, 1)
        >>> steps = Batch({"x": x}, {"x": torch.ones_like(x).bool()}, torch.ones(1, 7))
        >>> cuts = Cuts.of(SequenceBatch(steps, torch.tensor([5, 2])), counted=3, context=1)
        >>> cuts.begin.tolist(), cuts.first.tolist(), cuts.last.tolist(), cuts.span
        ([0, 2, 5], [0, 3, 5], [3, 5, 7], 5)
        """
        many = (batch.lengths + counted - 1) // counted
        each = (batch.lengths + many - 1) // many
        number = torch.arange(int(many.sum())) - (many.cumsum(0) - many).repeat_interleave(many)
        start = batch.starts.repeat_interleave(many)
        end = start + batch.lengths.repeat_interleave(many)
        first = start + number * each.repeat_interleave(many)
        last = torch.minimum(first + each.repeat_interleave(many), end)
        whole = int(many.max()) == 1
        span = int(each.max()) + (0 if whole else 2 * context)
        begin = torch.maximum(first - context, start)
        return cls(batch, begin, first, last, end, span)

    def __len__(self) -> int:
        return len(self.begin)

    def draw(self, structure: Structure, features: Tensor, many: int, generator: torch.Generator) -> Steps:
        """Some pieces at random, in proportion to the steps that they count."""
        share = (self.last - self.first).to(torch.float64)
        replacement = many > len(self)
        chosen = torch.multinomial(share, many, replacement=replacement, generator=generator)
        return self.take(structure, features, chosen)

    def take(self, structure: Structure, features: Tensor, chosen: Tensor) -> Steps:
        """These pieces, the steps of all side by side."""
        grid = self.begin[chosen] + torch.arange(self.span).unsqueeze(1)  # (span, many)
        inside = grid < self.end[chosen]
        counted = (grid >= self.first[chosen]) & (grid < self.last[chosen])
        rows, many = torch.where(inside, grid, self.begin[chosen]).flatten(), len(chosen)
        block = Block(torch.arange(len(rows)), rows, (many,) * self.span, torch.arange(many))
        return Steps.of(structure, self.batch, block, features, inside.flatten(), counted.flatten())


def check_context(structure: Structure) -> None:
    """Refuse lags that reach further than a piece reads."""
    longest = max(structure.graph.lags, key=lambda edge: edge.by)
    if longest.by > CONTEXT:
        raise ModelError(f"pieces of sequences read {CONTEXT} steps around them; {longest} reaches further")
