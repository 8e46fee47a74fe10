r"""What copies of a variable say of each other, sent back and forth until they agree.

A copy and its original each have a table of one variable that stands for the other: :math:`s(x)` at the original,
:math:`t(x)` at the copy. With both, the piece is summed exactly, which gives a belief of each; without its own table a
belief is what the rest of that side says, and becomes the table of the other side,

.. math:: t(x) \propto \frac{b_{\text{original}}(x)}{s(x)}, \qquad s(x) \propto \frac{b_{\text{copy}}(x)}{t(x)},
   \qquad \log \hat Z = \log Z(s, t) - \sum_{\text{pairs}} \log \sum_x s(x)\, t(x) .

Where this stands still both beliefs are :math:`\propto s(x) t(x)`, and :math:`\log \hat Z` is stationary in all
messages: it is minus the free energy of Bethe and Kikuchi (Yedidia, Freeman & Weiss 2005; Choi & Darwiche 2006). So its
gradient by the parameters is, as in the exact sums, the expected one under the beliefs. It is exact where the copies do
not meet again on another way, and need not be a bound elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.backward.elimination.blocks import Block, SplitSource
from otpdag.backward.elimination.sum_product import Banks, Sizes, beliefs, eliminate

__all__ = ["Settled", "drawn_copies", "settle"]

CLOSE = 1e-5  # change of a message's probabilities at which it stands still
MOST_ROUNDS = 60  # messages that come to rest took 2 to 60 (decision 0018); others swing for good
LITTLE_CALMER = 0.95  # a change above this share of the last one says that messages swing
PART = 0.5  # of the way that swinging messages go
LEAST = -40.0  # logarithm of the smallest entry of a message: nothing is ruled out for good by a copy


@dataclass(frozen=True)
class Settled:
    """A block once its messages stand still.

    Attributes:
        conditionals: Probabilities of each step's variable given its separator.
        overlap: What is counted twice in the evidence of each distinct piece (R, D).
        rounds: How often messages were sent.
        restless: How many pairs of copies still changed at the end, in the worst replica.
    """

    conditionals: list[Tensor]
    overlap: Tensor
    rounds: int
    restless: int


def settle(block: Block, banks: Banks) -> Settled:
    """Send messages until they stand still; they stay in the banks.

    Args:
        block: Pieces with copies.
        banks: Tables of factors, and room for messages.
    """
    back = {sizes: torch.zeros_like(bank) for sizes, bank in banks.items()}
    before = [torch.full((), torch.inf) for _ in block.splits]
    rounds, changes = 0, before
    while rounds < MOST_ROUNDS:
        rounds += 1
        conditionals = eliminate(block.steps, banks)
        replies = _replies(block, banks, back, conditionals)
        changes = [_change(banks, split, replies[split.sizes]) for split in block.splits]
        if max(float(change.max()) for change in changes) <= CLOSE:
            break
        for split, change, last in zip(block.splits, changes, before, strict=True):
            part = torch.where(change > LITTLE_CALMER * last, PART, 1.0)
            _send(banks, split, replies[split.sizes], part.unsqueeze(-1))
        before = changes
    else:
        conditionals = eliminate(block.steps, banks)
    restless = sum(int((change > CLOSE).any(0).sum()) for change in changes)
    return Settled(conditionals, _overlap(block, banks), rounds, restless)


def drawn_copies(block: Block, banks: Banks, generator: torch.Generator) -> tuple[list[Tensor], Tensor]:
    r"""Draw one joint state of all variables that have copies, in every replica.

    Variable after variable is drawn from its belief and then held there, at the original and at all copies, and
    messages are sent once before the next. Once all are held the sums are exact given their states c.

    Args:
        block: Pieces with copies.
        banks: Tables and messages that stand still, as :func:`settle` leaves them; they are overwritten.
        generator: The source of the draws.

    Returns:
        The probabilities of each step's variable given its separator and c; and of each distinct piece (R, D)
        :math:`\log P(x, c) - \log q(c)`, the logarithm of the weight that makes up for beliefs that are not exact.
    """
    back = {sizes: torch.zeros_like(bank) for sizes, bank in banks.items()}
    single = banks[()]
    log_chance = single.new_zeros(len(single), block.distinct)
    for number in range(1 + max(int(split.rank.max()) for split in block.splits)):
        conditionals = eliminate(block.steps, banks)
        replies = _replies(block, banks, back, conditionals)
        uniform = torch.rand(len(single), block.distinct, 1, generator=generator, dtype=single.dtype)
        chance = torch.ones_like(log_chance)  # the copies of one variable share their draw and its chance
        for split in block.splits:
            belief = back[split.sizes][:, split.original : split.original + len(split.piece)]
            waiting = (split.rank > number).to(belief).unsqueeze(-1)
            _send(banks, split, replies[split.sizes], waiting)
            drawn = torch.nonzero(split.rank == number)[:, 0]
            chance[:, split.piece[drawn]] = _hold(banks, split, drawn, belief[:, drawn], uniform)
        log_chance += chance.log()
    conditionals = eliminate(block.steps, banks)
    return conditionals, banks[()][:, block.result, 0] - log_chance


def _hold(banks: Banks, split: SplitSource, drawn: Tensor, belief: Tensor, uniform: Tensor) -> Tensor:
    """Draw states from beliefs (R, n, K), hold originals and copies there, and return their chances (R, n)."""
    sums = belief.cumsum(-1)
    state = (uniform[:, split.piece[drawn]] * sums[..., -1:] > sums).sum(-1, keepdim=True).clamp(max=sums.shape[-1] - 1)
    held = torch.full_like(belief, LEAST).scatter_(-1, state, 0.0)
    for first in (split.original, split.copy):
        banks[split.sizes][:, first + drawn] = held
    return (belief.gather(-1, state) / sums[..., -1:]).squeeze(-1)


def _replies(
    block: Block, banks: Banks, back: Banks, conditionals: Sequence[Tensor]
) -> Mapping[Sizes, tuple[Tensor, Tensor]]:
    """What originals and copies say without their own messages: new messages to originals and to copies (R, n, K)."""
    for bank in back.values():
        bank.zero_()
    back[()][:, block.result, 0] = 1.0
    beliefs(block.steps, conditionals, back)
    replies = {}
    for split in block.splits:
        many, bank, belief = len(split.piece), banks[split.sizes], back[split.sizes]
        at_original = slice(split.original, split.original + many)
        at_copy = slice(split.copy, split.copy + many)
        to_copy = _normalised(belief[:, at_original].log() - bank[:, at_original])
        to_original = _normalised(belief[:, at_copy].log() - bank[:, at_copy])
        replies[split.sizes] = (to_original, to_copy)
    return replies


def _normalised(message: Tensor) -> Tensor:
    return torch.log_softmax(message.clamp(min=-1e6), -1).clamp(min=LEAST)


def _change(banks: Banks, split: SplitSource, replies: tuple[Tensor, Tensor]) -> Tensor:
    """The largest change of a probability in either message of each pair (R, n)."""
    many, bank = len(split.piece), banks[split.sizes]
    changes = [
        (torch.softmax(bank[:, first : first + many], -1) - new.exp()).abs().amax(-1)
        for first, new in zip((split.original, split.copy), replies, strict=True)
    ]
    return torch.maximum(*changes)


def _send(banks: Banks, split: SplitSource, replies: tuple[Tensor, Tensor], part: Tensor) -> None:
    many, bank = len(split.piece), banks[split.sizes]
    for first, new in zip((split.original, split.copy), replies, strict=True):
        old = bank[:, first : first + many]
        bank[:, first : first + many] = torch.lerp(old, new, part.to(old))


def _overlap(block: Block, banks: Banks) -> Tensor:
    """The logarithm of what pairs of messages sum to, by distinct piece (R, D)."""
    single = banks[()]
    overlap = single.new_zeros(len(single), block.distinct)
    for split in block.splits:
        many, bank = len(split.piece), banks[split.sizes]
        both = bank[:, split.original : split.original + many] + bank[:, split.copy : split.copy + many]
        overlap.index_add_(1, split.piece, torch.logsumexp(both, -1))
    return overlap
