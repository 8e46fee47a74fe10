"""Pieces of sequences: what a step of Adam sees of series that may be very long.

A piece counts some steps and reads a few more before and after them, so that a backward map meets the middle of a
series there as it does elsewhere. All pieces have one span: what lies beyond the end of a sequence shows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from otpdag.backward.chain_layout import Block
from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.errors import ModelError
from otpdag.structure import Structure, lag_name

__all__ = ["CONTEXT", "Cuts", "Pieces", "check_context"]

COUNTED = 40  # steps of a piece that count
CONTEXT = 8  # steps before and after that are only read


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
    def of(cls, batch: SequenceBatch, *, counted: int = COUNTED, context: int = CONTEXT) -> Cuts:
        """Cut sequences in pieces of about equal length; short ones stay whole.

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

    def draw(self, structure: Structure, features: Tensor, many: int, generator: torch.Generator) -> Pieces:
        """Some pieces at random, in proportion to the steps that they count."""
        share = (self.last - self.first).to(torch.float64)
        replacement = many > len(self)
        chosen = torch.multinomial(share, many, replacement=replacement, generator=generator)
        return self.take(structure, features, chosen)

    def take(self, structure: Structure, features: Tensor, chosen: Tensor) -> Pieces:
        """These pieces, the steps of all side by side."""
        grid = self.begin[chosen] + torch.arange(self.span).unsqueeze(1)  # (span, many)
        inside = grid < self.end[chosen]
        counted = (grid >= self.first[chosen]) & (grid < self.last[chosen])
        rows = torch.where(inside, grid, self.begin[chosen]).flatten()
        inside, counted = inside.flatten(), counted.flatten()
        steps = self.batch.steps
        values = {node: value[:, rows] for node, value in steps.values.items()}
        mask = {node: seen[:, rows] & inside.unsqueeze(-1) for node, seen in steps.mask.items()}
        times, shown = self.batch.times[rows], features[:, rows] * inside.unsqueeze(-1)
        pieces = Pieces(values, mask, times, inside, counted, shown, self.span, len(chosen))
        return pieces.with_lags(structure, values)


@dataclass(frozen=True)
class Pieces:
    """Steps of several pieces, (M = span * many) of them: the k-th steps of all pieces lie side by side.

    Attributes:
        values: What is seen (1, M, width), earlier values included.
        mask: Which cells are seen.
        times: How many steps of the sequence came before (M,).
        inside: Steps that lie within their sequence.
        counted: Steps whose costs count.
        features: What a map reads (1, M, F).
        span: Steps of a piece.
        many: Number of pieces.
    """

    values: Mapping[str, Tensor]
    mask: Mapping[str, Tensor]
    times: Tensor
    inside: Tensor
    counted: Tensor
    features: Tensor
    span: int
    many: int

    @cached_property
    def block(self) -> Block:
        """The pieces as sequences of one length."""
        size = self.span * self.many
        return Block(torch.arange(size), torch.arange(size), (self.many,) * self.span, torch.arange(self.many))

    @property
    def steps(self) -> Tensor:
        """The number of each row's step in its piece (M,)."""
        return torch.arange(self.span).repeat_interleave(self.many)

    def lagged(self, tensor: Tensor, by: int) -> Tensor:
        """Each step's value (R, M, width) ``by`` steps ago; the first steps of a piece keep their own."""
        return tensor.index_select(1, torch.arange(self.span * self.many) - self.many * self.steps.clamp(max=by))

    def follows(self, by: int) -> Tensor:
        """Steps (M,) whose value so many steps ago exists and is in the piece."""
        return (self.times >= by) & (self.steps >= by)

    def with_lags(self, structure: Structure, values: Mapping[str, Tensor]) -> Pieces:
        """Add the earlier values of observed nodes."""
        extended, mask = dict(values), dict(self.mask)
        for edge in structure.graph.lags:
            if edge.parent in values:
                name = lag_name(edge.parent, edge.by)
                extended[name] = self.lagged(values[edge.parent], edge.by)
                mask[name] = self.lagged(self.mask[edge.parent], edge.by) & self.follows(edge.by).unsqueeze(-1)
        return Pieces(extended, mask, self.times, self.inside, self.counted, self.features, self.span, self.many)

    def made(self, structure: Structure, name: str) -> Tensor:
        """Steps (M,) that a mechanism makes, all of whose observed parents are seen."""
        base = structure.base(name)
        lag = structure.longest_lag(base)
        made = self.times < lag if name != base else (self.follows(lag) if lag else torch.ones_like(self.inside))
        for parent, _ in structure.mechanisms[name].family.parents:
            if parent in self.mask:
                made = made & self.mask[parent][0].all(-1)
        return made & self.counted

    def as_batch(self, structure: Structure) -> Batch:
        """The counted steps as rows of a table, of which only what a mechanism makes is seen."""
        mask = {node: self.mask[node] & self.made(structure, node).unsqueeze(-1) for node in structure.graph.observed}
        return Batch({node: self.values[node] for node in mask}, mask, self.counted.to(self.features).unsqueeze(0))


def check_context(structure: Structure) -> None:
    """Refuse lags that reach further than a piece reads."""
    longest = max(structure.graph.lags, key=lambda edge: edge.by)
    if longest.by > CONTEXT:
        raise ModelError(f"pieces of sequences read {CONTEXT} steps around them; {longest} reaches further")
