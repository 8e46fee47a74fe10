r"""Backward maps of sequences: chains whose potentials are learned, over which messages run exactly.

Hidden numbers z are a Gaussian chain, smoothed exactly (:class:`SequenceMap`):

.. math:: \phi(z_{1:T} \mid x) \propto \prod_t N(z_t; G z_{t-1} + b, Q) \,
          \exp\{-\tfrac12 z_t^\top \Lambda_t z_t + h_t^\top z_t\}

The precision :math:`\Lambda_t` adds up over the cells that a step shows, :math:`h_t` is linear in the cells of the
steps around it. Messages run backward over the chain, draws forward, differentiable in all parameters. For a linear
Gaussian model the posterior has exactly this form, whatever is missing; for other mechanisms it is an amortised
approximation.

A network that reads both ways gives each step more (:class:`BidirectionalMap`): dilated convolutions over values and
mask see some steps before and after, and what they find becomes potentials, also of a chain of hidden categories s:

.. math:: \phi(s \mid x) \propto \prod_t U_t(s_t)\, Q(s_{t-1}, s_t)

The convolutions need no recurrence, and the chain carries what lies further away. Potentials are normalised and
bounded: where they are not, training diverges.
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
from otpdag.likelihood.chain_layout import Block, States, joint_states
from otpdag.mechanisms.normal import LOG_SQRT_2PI
from otpdag.mechanisms.predictor import weighted_regression
from otpdag.numerics import apply_linear, expand_to
from otpdag.spaces import Space
from otpdag.structure import Structure, Theta

PREFIX = "phi.reader."

# -- hidden numbers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SequenceDraw:
    """Values of the hidden numbers (R, D, M, width) in the order of a block's columns, and their log-density."""

    values: Mapping[str, Tensor]
    log_prob: Tensor


@dataclass(frozen=True)
class Adjustment:
    """What a network makes of a step, beyond what is linear in its cells.

    Attributes:
        precision: Factors (R, M, cells) of the precisions that the cells exert.
        pull: Added to the pulls (R, M, d).
        inside: Steps (M,) that exert anything at all.
    """

    precision: Tensor
    pull: Tensor
    inside: Tensor


@dataclass(frozen=True)
class SequenceMap:
    """One Gaussian chain for all hidden numbers together.

    Args:
        structure: Graph and mechanisms.
        code: How the observed cells of a step become a vector.
        targets: Hidden nodes that are numbers, in topological order.
        states: Joint states of hidden categories, whose probabilities it reads last, of a step and of the one after it.
        reach: Steps before and after that a step's potential reads.
    """

    structure: Structure
    code: RowCode
    targets: tuple[str, ...]
    states: int = 0
    reach: int = 1

    @classmethod
    def of(cls, structure: Structure, batch: SequenceBatch, *, reads_states: bool = False) -> SequenceMap:
        """A map for all hidden numbers of a structure."""
        code = RowCode.of(structure, batch.steps, structure.graph.observed)
        categories = structure.hidden_categories if reads_states else ()
        states = joint_states(structure, categories).size if categories else 0
        return cls(structure, code, structure.hidden_numbers, states)

    @property
    def widths(self) -> list[int]:
        """Unconstrained coordinates of each target."""
        return [self.structure.mechanisms[node].space.free_width for node in self.targets]

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Where a step's own cells and their masks stand among the features."""
        places, at = [], 0
        for node in self.code.nodes:
            space = self.structure.mechanisms[node].space
            places += [(at + i, at + space.width + min(i, space.cells - 1)) for i in range(space.width)]
            at += space.width + space.cells
        return [(value + self.reach * at, mask + self.reach * at) for value, mask in places]

    def features(self, batch: SequenceBatch) -> Tensor:
        """What each step reads (1, M, F): the cells of the steps around it, zeros beyond the ends.

        Of categories nothing is known yet.
        """
        row = self.code(batch.steps.values, batch.steps.mask)
        times, here = batch.times, torch.arange(batch.rows)
        left = batch.lengths.repeat_interleave(batch.lengths) - 1 - times
        parts = []
        for shift in range(-self.reach, self.reach + 1):
            inside = (times + shift >= 0) & (shift <= left)
            parts.append(row.index_select(1, torch.where(inside, here + shift, here)) * inside.to(row).unsqueeze(-1))
        return torch.nn.functional.pad(torch.cat(parts, -1), (0, 2 * self.states))

    def start(
        self, batch: SequenceBatch, completed: Mapping[str, Tensor], least_spread: float = 0.1
    ) -> dict[str, Tensor]:
        """Potentials and dynamics from regressions on completed values: parameters (1, ...).

        Fresh noise has ``least_spread`` or more, in units of the hidden number.
        """
        features = self.features(batch)
        spaces = [self.structure.mechanisms[node].space for node in self.targets]
        pairs = zip(self.targets, spaces, strict=True)
        free = torch.cat([space.unconstrain(completed[node]) for node, space in pairs], -1)
        one = torch.ones_like(free[:, :1])
        design = torch.cat([batch.lagged(free.unsqueeze(0), 1)[0], one], -1)
        moves = weighted_regression(design, free, (batch.times > 0).to(free), ridge=1e-4)
        fresh = (free - design @ moves).std(0).clamp(min=least_spread)
        linear = free.new_zeros(features.shape[-1], free.shape[-1])
        precision = []
        for value, mask in self.cells:
            seen = features[0, :, mask]
            line = weighted_regression(torch.cat([free, one], -1), features[0, :, [value]], seen, ridge=1e-4)
            rest = (features[0, :, value] - (torch.cat([free, one], -1) @ line)[:, 0]) * seen
            spread = (rest.square().sum() / seen.sum().clamp(min=1.0)).sqrt().clamp(min=least_spread)
            slope, level = line[:-1, 0], line[-1, 0]
            linear[value] += slope / spread**2
            linear[mask] -= level * slope / spread**2
            precision.append(slope / spread)
        parts = {
            "linear": linear,
            "precision": torch.stack(precision),
            "carry": moves[:-1].T,
            "bias": moves[-1],
            "log_scale": torch.log(fresh),
            "first": torch.zeros_like(fresh),
            "first_log_scale": torch.zeros_like(fresh),
        }
        return {f"phi.sequence.{name}": value.unsqueeze(0).clone() for name, value in parts.items()}

    def draw(
        self, phi: Theta, block: Block, features: Tensor, noise: Tensor, extra: Adjustment | None = None
    ) -> SequenceDraw:
        """Draw paths from standard normal noise (1 or R, D, M, d); features and noise in the order of the block."""
        part = {name.removeprefix("phi.sequence."): value for name, value in phi.items()}
        variance, pull = self._messages(part, block, *self._potentials(part, features, extra))
        factor = torch.linalg.cholesky(variance)  # (R, M, d, d)
        pushed = (factor.unsqueeze(1) @ noise.unsqueeze(-1)).squeeze(-1)
        gain = variance * torch.exp(-2 * part["log_scale"].clamp(-7, 4))[:, None, None, :]
        steps: list[Tensor] = []
        for step, (at, size) in enumerate(block.spans):
            here = slice(at, at + size)
            mean = (variance[:, here] @ pull[:, here].unsqueeze(-1)).squeeze(-1).unsqueeze(1)
            if step:
                before = steps[-1][:, :, :size] @ part["carry"].transpose(1, 2).unsqueeze(1)
                before = before + part["bias"][:, None, None]
                mean = mean + (gain[:, None, here] @ before.unsqueeze(-1)).squeeze(-1)
            steps.append(mean + pushed[:, :, here])
        free = torch.cat(steps, 2)
        log_factor = torch.log(factor.diagonal(dim1=-2, dim2=-1)).sum(-1)
        log_prob = (-0.5 * noise**2 - LOG_SQRT_2PI).sum(-1) - log_factor.unsqueeze(1)
        values = {}
        for node, one in zip(self.targets, free.split(self.widths, -1), strict=True):
            values[node], log_det = self.structure.mechanisms[node].space.constrain(one)
            log_prob = log_prob - log_det.sum(-1)
        return SequenceDraw(values, log_prob)

    def _potentials(
        self, part: Mapping[str, Tensor], features: Tensor, extra: Adjustment | None
    ) -> tuple[Tensor, Tensor]:
        """Precisions (R, M, d, d) and pulls (R, M, d) that each step's cells exert."""
        masks, ell = features[:, :, [mask for _, mask in self.cells]], part["precision"]
        pull = apply_linear(features, part["linear"])
        if extra is not None:
            masks, pull = masks * extra.precision, (pull + extra.pull) * extra.inside.unsqueeze(-1)
        own = torch.einsum("rmc,rci,rcj->rmij", masks.expand(len(ell), -1, -1), ell, ell)
        return own, pull

    def _messages(self, part: Mapping[str, Tensor], block: Block, own: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
        """Variances (R, M, d, d) and pulls (R, M, d) of each step's normal given the step before."""
        inverse = torch.diag_embed(torch.exp(-2 * part["log_scale"].clamp(-7, 4))).unsqueeze(1)
        first = torch.diag_embed(torch.exp(-2 * part["first_log_scale"].clamp(-7, 4))).unsqueeze(1)
        carry, bias = part["carry"].unsqueeze(1), part["bias"].unsqueeze(1).unsqueeze(-1)
        variances: list[Tensor] = []
        pulls: list[Tensor] = []
        message: tuple[Tensor, Tensor] | None = None
        for step in range(len(block.spans) - 1, -1, -1):
            at, size = block.spans[step]
            precision, force = own[:, at : at + size], pull[:, at : at + size].unsqueeze(-1)
            if message is not None:
                many = message[0].shape[1]
                precision = torch.cat([precision[:, :many] + message[0], precision[:, many:]], 1)
                force = torch.cat([force[:, :many] + message[1], force[:, many:]], 1)
            total = precision + (inverse if step else first)
            variance = total.reciprocal() if total.shape[-1] == 1 else torch.linalg.inv(total)
            variances.append(variance)
            if step:
                through = inverse @ variance
                kept = inverse - through @ inverse
                turned = carry.transpose(-2, -1)
                message = (turned @ kept @ carry, turned @ (through @ force - kept @ bias))
            else:
                force = force + first @ part["first"].unsqueeze(1).unsqueeze(-1)
            pulls.append(force.squeeze(-1))
        return torch.cat(variances[::-1], 1), torch.cat(pulls[::-1], 1)


# -- all that is hidden, by a network ----------------------------------------------------------------------------------


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
