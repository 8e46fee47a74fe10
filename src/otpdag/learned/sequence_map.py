r"""The backward map of hidden numbers in sequences: a chain whose potentials are learned, smoothed exactly.

.. math:: \phi(z_{1:T} \mid x) \propto \prod_t N(z_t; G z_{t-1} + b, Q) \,
          \exp\{-\tfrac12 z_t^\top \Lambda_t z_t + h_t^\top z_t\}

The precision :math:`\Lambda_t` adds up over the cells that a step shows, :math:`h_t` is linear in what the step reads:
its cells and those of the steps around it. Messages run backward over the chain, draws forward, differentiable in all
parameters. For a linear Gaussian model the posterior has exactly this form, whatever is missing.

For other mechanisms the best potentials depend on where the posterior is: of a count they have the curvature of
:math:`e^z`. There a step also reads the mean that its numbers have by now and the square of it, and the logarithm of
its precision is linear in all that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.backward import RowCode
from otpdag.data.sequences import SequenceBatch
from otpdag.likelihood.chain_layout import Block, joint_states
from otpdag.mechanisms.base import is_linear
from otpdag.mechanisms.normal import LOG_SQRT_2PI
from otpdag.mechanisms.predictor import weighted_regression
from otpdag.numerics import apply_linear
from otpdag.structure import Structure, Theta


@dataclass(frozen=True)
class SequenceDraw:
    """Values of the hidden numbers (R, D, M, width) in the order of a block's columns, and their log-density.

    ``free`` has their unconstrained coordinates side by side.
    """

    values: Mapping[str, Tensor]
    free: Tensor
    log_prob: Tensor


@dataclass(frozen=True)
class SequenceMap:
    """One Gaussian chain for all hidden numbers together.

    Args:
        structure: Graph and mechanisms.
        code: How the observed cells of a step become a vector.
        targets: Hidden nodes that are numbers, in topological order.
        states: Joint states of hidden categories, whose probabilities it reads last, of a step and of the one after it.
        curved: Whether it reads the numbers' own means and squares last.
        reach: Steps before and after that a step's potential reads.
        largest_factor: Of the logarithm by which a precision changes.
    """

    structure: Structure
    code: RowCode
    targets: tuple[str, ...]
    states: int = 0
    curved: bool = False
    reach: int = 1
    largest_factor: float = 3.0

    @classmethod
    def of(cls, structure: Structure, batch: SequenceBatch) -> SequenceMap:
        """A map for all hidden numbers of a structure."""
        code, numbers = RowCode.of(structure, batch.steps, structure.graph.observed), structure.hidden_numbers
        categories = structure.hidden_categories
        if categories:
            return cls(structure, code, numbers, states=joint_states(structure, categories).size)
        touched = [
            mechanism
            for name, mechanism in structure.mechanisms.items()
            if structure.base(name) in numbers or any(structure.base(p) in numbers for p, _ in mechanism.family.parents)
        ]
        return cls(structure, code, numbers, curved=not all(map(is_linear, touched)))

    @property
    def read_later(self) -> int:
        """How many features are known only once values have been drawn: zeros at first."""
        return 2 * self.states + (2 * sum(self.widths) if self.curved else 0)

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
        """What each step reads (1, M, F): the cells of the steps around it, zeros where nothing is known."""
        row = self.code(batch.steps.values, batch.steps.mask)
        times, here = batch.times, torch.arange(batch.rows)
        left = batch.lengths.repeat_interleave(batch.lengths) - 1 - times
        parts = []
        for shift in range(-self.reach, self.reach + 1):
            inside = (times + shift >= 0) & (shift <= left)
            parts.append(row.index_select(1, torch.where(inside, here + shift, here)) * inside.to(row).unsqueeze(-1))
        return torch.nn.functional.pad(torch.cat(parts, -1), (0, self.read_later))

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
            **({"gain": linear.new_zeros(len(linear), len(precision))} if self.curved else {}),
            "carry": moves[:-1].T,
            "bias": moves[-1],
            "log_scale": torch.log(fresh),
            "first": torch.zeros_like(fresh),
            "first_log_scale": torch.zeros_like(fresh),
        }
        return {f"phi.sequence.{name}": value.unsqueeze(0).clone() for name, value in parts.items()}

    def draw(self, phi: Theta, block: Block, features: Tensor, noise: Tensor) -> SequenceDraw:
        """Draw paths from standard normal noise (1 or R, D, M, d); features and noise in the order of the block."""
        part = {name.removeprefix("phi.sequence."): value for name, value in phi.items()}
        variance, pull = self._messages(part, block, *self._potentials(part, features))
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
        return SequenceDraw(values, free, log_prob)

    def _potentials(self, part: Mapping[str, Tensor], features: Tensor) -> tuple[Tensor, Tensor]:
        """Precisions (R, M, d, d) and pulls (R, M, d) that each step's cells exert."""
        masks, ell = features[:, :, [mask for _, mask in self.cells]], part["precision"]
        if self.curved:
            change = apply_linear(features, part["gain"]) / self.largest_factor
            masks = masks * torch.exp(self.largest_factor * torch.tanh(change))
        own = torch.einsum("rmc,rci,rcj->rmij", masks.expand(len(ell), -1, -1), ell, ell)
        return own, apply_linear(features, part["linear"])

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
