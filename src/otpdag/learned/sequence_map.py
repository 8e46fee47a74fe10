r"""The amortised backward map of sequences: a network that reads both ways gives each step its potentials.

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

from otpdag.backward import RowCode
from otpdag.data.sequences import SequenceBatch
from otpdag.layers import gumbel_softmax
from otpdag.learned.sequence_steps import Steps
from otpdag.learned.smoother import Adjustment, SequenceMap
from otpdag.likelihood.chain_layout import States, joint_states
from otpdag.numerics import apply_linear, expand_to
from otpdag.spaces import Space
from otpdag.structure import Structure, Theta

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
        dilations: Of its layers: a step reads seven steps to either side, one less than pieces hold ready.
        largest_potential: States less likely than exp of minus this are all alike.
        largest_factor: Of the logarithm by which the network changes a precision.
    """

    structure: Structure
    smoother: SequenceMap
    categories: tuple[str, ...]
    width: int = 32
    dilations: tuple[int, ...] = (1, 2, 4)
    largest_potential: float = 12.0
    largest_factor: float = 3.0

    @classmethod
    def of(cls, structure: Structure, batch: SequenceBatch, width: int = 32) -> BidirectionalMap:
        """A map for all hidden nodes of a structure."""
        return cls(structure, SequenceMap.of(structure, batch), structure.hidden_categories, width)

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
        for layer in range(len(self.dilations)):
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
        self, batch: SequenceBatch, completed: Mapping[str, Tensor], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Parameters (1, ...) from regressions on completed steps (M, width)."""
        phi = self.init(generator)
        if self.smoother.targets:
            phi |= self.smoother.start(batch, completed)
        if self.states is not None:
            soft = _joint_labels(self.states, completed)
            linear, bias = _discriminant(self.features(batch)[0], soft)
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

    def read(self, phi: Theta, steps: Steps) -> tuple[Adjustment | None, Tensor | None]:
        """What the network gives each step: to the Gaussian chain, and log-potentials (R, M, S) of the states."""
        features = steps.features
        out = apply_linear(self._encode(phi, steps), phi[f"{PREFIX}out.weight"])
        cells = len(self.smoother.cells) if self.smoother.targets else 0
        size = 0 if self.states is None else self.states.size
        precision, pull, logits = out.split([cells, self.free, size], -1)
        adjustment = None
        if self.smoother.targets:
            factor = torch.exp(self.largest_factor * torch.tanh(precision / self.largest_factor))
            adjustment = Adjustment(factor, pull, steps.inside.to(features))
        if self.states is None:
            return adjustment, None
        logits = logits + apply_linear(features, phi[f"{PREFIX}states.linear"])
        logits = logits + expand_to(phi[f"{PREFIX}states.bias"], logits.ndim)
        unary = torch.log_softmax(logits, -1).clamp(min=-self.largest_potential)
        return adjustment, torch.where(steps.inside.unsqueeze(-1), unary, 0.0)

    def _encode(self, phi: Theta, steps: Steps) -> Tensor:
        inside = steps.inside.to(steps.features).unsqueeze(-1)
        hidden = apply_linear(steps.features, phi[f"{PREFIX}in.weight"])
        hidden = torch.nn.functional.silu(hidden + expand_to(phi[f"{PREFIX}in.bias"], 3)) * inside
        for layer, dilation in enumerate(self.dilations):
            apart = dilation * steps.block.sizes[0]
            around = torch.cat([_shifted(hidden, -apart), hidden, _shifted(hidden, apart)], -1)
            more = apply_linear(around, phi[f"{PREFIX}{layer}.weight"])
            hidden = hidden + torch.nn.functional.silu(more + expand_to(phi[f"{PREFIX}{layer}.bias"], 3)) * inside
        return hidden

    # -- the chain of states -------------------------------------------------------------------------------------

    def marginals(self, phi: Theta, steps: Steps, unary: Tensor) -> ChainMarginals:
        """Exact probabilities of states and of pairs of states, differentiable in the potentials."""
        potential, moves = self._linear(phi, steps, unary)
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
        self, phi: Theta, steps: Steps, unary: Tensor, uniform: Tensor, temperature: float, *, hard: bool = False
    ) -> Tensor:
        """Relaxed paths of joint states (R, M, S): filtered forward, drawn backward, from uniform noise (R, M, S)."""
        potential, moves = self._linear(phi, steps, unary)
        log_alpha = torch.log(_filter(potential, moves).clamp(min=1e-30))
        noise = uniform.unflatten(1, (len(steps.block.sizes), steps.block.sizes[0]))
        drawn = [gumbel_softmax(log_alpha[:, -1], noise[:, -1], temperature, hard=hard)]
        for step in range(len(steps.block.sizes) - 2, -1, -1):
            link = torch.log((drawn[-1] @ moves.transpose(1, 2)).clamp(min=1e-30))
            drawn.append(gumbel_softmax(log_alpha[:, step] + link, noise[:, step], temperature, hard=hard))
        return torch.stack(drawn[::-1], 1).flatten(1, 2)

    def split(self, states: Tensor) -> dict[str, Tensor]:
        """Joint states (R, M, S) as values of each category."""
        known = self.states
        return {} if known is None else {node: states @ known.now[node].to(states) for node in self.categories}

    def _linear(self, phi: Theta, steps: Steps, unary: Tensor) -> tuple[Tensor, Tensor]:
        """Potentials (R, span, many, S) and moves (R, S, S), whose rows sum to one."""
        known = self.states
        log_moves = torch.log_softmax(phi[f"{PREFIX}pair"], -1).clamp(min=-self.largest_potential)
        if known is not None and known.follows is not None:
            log_moves = torch.where(known.follows, log_moves, -math.inf)
        replicas = max(len(unary), len(log_moves))
        potential = torch.exp(unary).unflatten(1, (len(steps.block.sizes), steps.block.sizes[0]))
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
