r"""Pieces of sequences: what a step of Adam sees of series that may be very long.

A piece counts some steps and reads a few more before and after them, so that a backward map meets the middle of a
series there as it does elsewhere. All pieces have one span: what lies beyond the end of a sequence shows nothing.

The amortised backward map of sequences: a network that reads both ways gives each step its potentials.

Dilated convolutions over values and mask see some steps before and after; what they find becomes the potentials of a
chain, over which messages run exactly:

.. math:: \phi(s, z \mid x) \propto \prod_t U_t(s_t)\, Q(s_{t-1}, s_t) \;
          \prod_t N(z_t; G z_{t-1} + b, K)\, \exp\{-\tfrac12 z_t^\top \Lambda_t z_t + h_t^\top z_t\}

for hidden categories s and hidden numbers z. The convolutions need no recurrence, and the chain carries what lies
further away. Potentials are normalised and bounded: where they are not, training diverges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.errors import ModelError
from otpdag.layers import apply_linear, expand_to, gumbel_softmax
from otpdag.learned.amortized import RowCode
from otpdag.likelihood.chain_layout import Block, States, joint_states
from otpdag.likelihood.smoother import Adjustment, SequenceMap
from otpdag.spaces import Space
from otpdag.structure import Structure, Theta, lag_name

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


DILATIONS = (1, 2, 4)  # of the three layers: a step reads seven steps to either side, one less than pieces hold ready
LARGEST_POTENTIAL = 12.0  # states less likely than exp of minus this are all alike
LARGEST_FACTOR = 3.0  # of the logarithm by which a network changes a precision
PREFIX = "phi.reader."


@dataclass(frozen=True)
class ChainMarginals:
    """Probabilities of states (R, span, many, S) and of pairs of states (R, span - 1, many, S, S)."""

    state: Tensor
    pair: Tensor

    def negentropy(self) -> Tensor:
        """Expected log-probability of each step's state given the one before: (R, M)."""
        own = (self.state * torch.log(self.state.clamp(min=1e-30))).sum(-1)
        both = (self.pair * torch.log(self.pair.clamp(min=1e-30))).sum((-2, -1))
        return torch.cat([own[:, :1], both - own[:, :-1]], 1).flatten(1)


@dataclass(frozen=True)
class BidirectionalMap:
    """Potentials by a network, messages by a chain.

    Args:
        structure: Graph and mechanisms.
        smoother: The Gaussian chain of the hidden numbers; also says what a step reads.
        categories: Hidden nodes that are categories, in topological order.
        width: Units of the network.
    """

    structure: Structure
    smoother: SequenceMap
    categories: tuple[str, ...]
    width: int = 32

    @classmethod
    def of(cls, structure: Structure, batch: SequenceBatch, width: int = 32) -> BidirectionalMap:
        """A map for all hidden nodes of a structure."""
        code = RowCode.of(structure, batch.steps, structure.graph.observed)
        smoother = SequenceMap(structure, code, structure.hidden_numbers)
        return cls(structure, smoother, structure.hidden_categories, width)

    # -- what the objective asks of a map ------------------------------------------------------------------------

    @property
    def code(self) -> RowCode:
        """How the cells of a step become a vector."""
        return self.smoother.code

    @property
    def targets(self) -> tuple[str, ...]:
        """Nodes that are drawn, in topological order."""
        drawn = {*self.smoother.targets, *self.categories}
        return tuple(node for node in self.structure.graph.order if node in drawn)

    @property
    def explains(self) -> tuple[str, ...]:
        """Observed nodes that the draws have to explain."""
        return self.structure.graph.observed

    def space(self, node: str) -> Space:
        """The space of a node."""
        return self.structure.mechanisms[node].space

    @cached_property
    def states(self) -> States | None:
        """The joint states of the hidden categories."""
        return joint_states(self.structure, self.categories) if self.categories else None

    @property
    def free(self) -> int:
        """Unconstrained coordinates of the hidden numbers."""
        return sum(self.smoother.widths)

    # -- parameters ----------------------------------------------------------------------------------------------

    def features(self, batch: SequenceBatch) -> Tensor:
        """What each step reads (1, M, F): the cells around it, and whether it is the first."""
        first = (batch.times == 0).to(batch.steps.weight).reshape(1, -1, 1)
        return torch.cat([self.smoother.features(batch), first], -1)

    @property
    def inputs(self) -> int:
        """Number of features of a step."""
        cells = sum(self.space(node).width + self.space(node).cells for node in self.code.nodes)
        return (2 * self.smoother.reach + 1) * cells + 1

    def init(self, generator: torch.Generator) -> dict[str, Tensor]:
        """The network's parameters (1, ...); its last layer is zero, so that it changes nothing at first."""
        width, inputs = self.width, self.inputs
        parameters = {
            "in.weight": _drawn(inputs, width, generator),
            "in.bias": torch.zeros(1, width, dtype=torch.float64),
        }
        for layer in range(len(DILATIONS)):
            parameters[f"{layer}.weight"] = _drawn(3 * width, width, generator)
            parameters[f"{layer}.bias"] = torch.zeros(1, width, dtype=torch.float64)
        parameters["out.weight"] = torch.zeros(1, width, self._outputs, dtype=torch.float64)
        if self.states is not None:
            size = self.states.size
            parameters["states.linear"] = torch.zeros(1, inputs, size, dtype=torch.float64)
            parameters["states.bias"] = torch.zeros(1, size, dtype=torch.float64)
            parameters["pair"] = torch.zeros(1, size, size, dtype=torch.float64)
        return {f"{PREFIX}{name}": value for name, value in parameters.items()}

    def start(
        self, batch: SequenceBatch, features: Tensor, completed: Mapping[str, Tensor], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Parameters (1, ...) from regressions on completed steps (M, width)."""
        phi = self.init(generator)
        if self.smoother.targets:
            phi |= self.smoother.start(batch, features[..., :-1], completed)
        if self.states is not None:
            soft = _joint_labels(self.states, completed)
            linear, bias = _discriminant(features[0], soft)
            phi[f"{PREFIX}states.linear"][0], phi[f"{PREFIX}states.bias"][0] = linear, bias
            follows = batch.times > 0
            moves = batch.lagged(soft.unsqueeze(0), 1)[0][follows].T @ soft[follows] + 1.0
            phi[f"{PREFIX}pair"][0] = torch.log(moves / moves.sum(-1, keepdim=True))
        return phi

    @property
    def _outputs(self) -> int:
        cells = len(self.smoother.cells) if self.smoother.targets else 0
        return cells + self.free + (self.states.size if self.states is not None else 0)

    # -- potentials ----------------------------------------------------------------------------------------------

    def read(self, phi: Theta, pieces: Pieces) -> tuple[Adjustment | None, Tensor | None]:
        """What the network gives each step: to the Gaussian chain, and log-potentials (R, M, S) of the states."""
        features = pieces.features
        out = apply_linear(self._encode(phi, pieces), phi[f"{PREFIX}out.weight"])
        cells = len(self.smoother.cells) if self.smoother.targets else 0
        size = 0 if self.states is None else self.states.size
        precision, pull, logits = out.split([cells, self.free, size], -1)
        adjustment = None
        if self.smoother.targets:
            factor = torch.exp(LARGEST_FACTOR * torch.tanh(precision / LARGEST_FACTOR))
            adjustment = Adjustment(factor, pull, pieces.inside.to(features))
        if self.states is None:
            return adjustment, None
        logits = logits + apply_linear(features, phi[f"{PREFIX}states.linear"])
        logits = logits + expand_to(phi[f"{PREFIX}states.bias"], logits.ndim)
        unary = torch.log_softmax(logits, -1).clamp(min=-LARGEST_POTENTIAL)
        return adjustment, torch.where(pieces.inside.unsqueeze(-1), unary, 0.0)

    def _encode(self, phi: Theta, pieces: Pieces) -> Tensor:
        inside = pieces.inside.to(pieces.features).unsqueeze(-1)
        hidden = apply_linear(pieces.features, phi[f"{PREFIX}in.weight"])
        hidden = torch.nn.functional.silu(hidden + expand_to(phi[f"{PREFIX}in.bias"], 3)) * inside
        for layer, dilation in enumerate(DILATIONS):
            apart = dilation * pieces.many
            around = torch.cat([_shifted(hidden, -apart), hidden, _shifted(hidden, apart)], -1)
            more = apply_linear(around, phi[f"{PREFIX}{layer}.weight"])
            hidden = hidden + torch.nn.functional.silu(more + expand_to(phi[f"{PREFIX}{layer}.bias"], 3)) * inside
        return hidden

    # -- the chain of states -------------------------------------------------------------------------------------

    def marginals(self, phi: Theta, pieces: Pieces, unary: Tensor) -> ChainMarginals:
        """Exact probabilities of states and of pairs of states, differentiable in the potentials."""
        potential, moves = self._linear(phi, pieces, unary)
        alpha = _filter(potential, moves)
        span = potential.shape[1]
        betas = [torch.ones_like(potential[:, 0])]
        for step in range(span - 1, 0, -1):
            message = (potential[:, step] * betas[-1]) @ moves.transpose(1, 2)
            betas.append(message / message.sum(-1, keepdim=True))
        beta = torch.stack(betas[::-1], 1)
        state = alpha * beta
        later = potential[:, 1:] * beta[:, 1:]
        pair = alpha[:, :-1].unsqueeze(-1) * moves[:, None, None] * later.unsqueeze(-2)
        return ChainMarginals(state / state.sum(-1, keepdim=True), pair / pair.sum((-2, -1), keepdim=True))

    def relaxed(
        self, phi: Theta, pieces: Pieces, unary: Tensor, uniform: Tensor, temperature: float, *, hard: bool = False
    ) -> Tensor:
        """Relaxed paths of joint states (R, M, S): filtered forward, drawn backward, from uniform noise (R, M, S)."""
        potential, moves = self._linear(phi, pieces, unary)
        log_alpha = torch.log(_filter(potential, moves).clamp(min=1e-30))
        noise = uniform.unflatten(1, (pieces.span, pieces.many))
        drawn = [gumbel_softmax(log_alpha[:, -1], noise[:, -1], temperature, hard=hard)]
        for step in range(pieces.span - 2, -1, -1):
            link = torch.log((drawn[-1] @ moves.transpose(1, 2)).clamp(min=1e-30))
            drawn.append(gumbel_softmax(log_alpha[:, step] + link, noise[:, step], temperature, hard=hard))
        return torch.stack(drawn[::-1], 1).flatten(1, 2)

    def split(self, states: Tensor) -> dict[str, Tensor]:
        """Joint states (R, M, S) as values of each category."""
        known = self.states
        return {} if known is None else {node: states @ known.now[node].to(states) for node in self.categories}

    def _linear(self, phi: Theta, pieces: Pieces, unary: Tensor) -> tuple[Tensor, Tensor]:
        """Potentials (R, span, many, S) and moves (R, S, S), whose rows sum to one."""
        known = self.states
        log_moves = torch.log_softmax(phi[f"{PREFIX}pair"], -1).clamp(min=-LARGEST_POTENTIAL)
        if known is not None and known.follows is not None:
            log_moves = torch.where(known.follows, log_moves, -math.inf)
        replicas = max(len(unary), len(log_moves))
        potential = torch.exp(unary).unflatten(1, (pieces.span, pieces.many))
        return potential.expand(replicas, -1, -1, -1), torch.softmax(log_moves, -1).expand(replicas, -1, -1)


def _filter(potential: Tensor, moves: Tensor) -> Tensor:
    """Filtered probabilities (R, span, many, S)."""
    message = potential[:, 0]
    alphas = [message / message.sum(-1, keepdim=True)]
    for step in range(1, potential.shape[1]):
        message = (alphas[-1] @ moves) * potential[:, step]
        alphas.append(message / message.sum(-1, keepdim=True))
    return torch.stack(alphas, 1)


def _drawn(inputs: int, outputs: int, generator: torch.Generator) -> Tensor:
    return torch.randn(1, inputs, outputs, generator=generator, dtype=torch.float64) / math.sqrt(inputs)


def _shifted(hidden: Tensor, by: int) -> Tensor:
    """Rows moved by so many places, zeros where none come from."""
    if abs(by) >= hidden.shape[1]:
        return torch.zeros_like(hidden)
    gap = torch.zeros_like(hidden[:, : abs(by)])
    return torch.cat([gap, hidden[:, :-by]], 1) if by > 0 else torch.cat([hidden[:, -by:], gap], 1)


def _joint_labels(states: States, completed: Mapping[str, Tensor]) -> Tensor:
    """Soft labels (M, S) of joint states from those of each category."""
    labels = torch.ones(1, 1, dtype=torch.float64)
    for node in states.nodes:
        labels = labels * (completed[node] @ states.now[node].T)
    return labels / labels.sum(-1, keepdim=True).clamp(min=1e-12)


def _discriminant(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Linear discriminant analysis: log-odds (F, S) and levels (S,) of classes with a common covariance."""
    count = labels.sum(0).clamp(min=1e-6)
    means = labels.T @ features / count.unsqueeze(-1)
    rest = features - labels @ means
    covariance = rest.T @ rest / len(features) + 0.01 * torch.eye(features.shape[1]).to(features)
    linear = torch.linalg.solve(covariance, means.T)
    return linear, torch.log(count / count.sum()) - 0.5 * (means.T * linear).sum(0)
