r"""The joint amortised backward map: hidden and missing values drawn from everything that a row shows.

Every unknown node, in topological order, has a head that reads the row (values and mask), the enumerated states and the
values drawn before it. A numeric node's head is normal in unconstrained coordinates, a category's head a softmax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.mechanisms.predictor import centre_and_spread, weighted_regression
from otpdag.nn import apply_linear, apply_mlp, expand_to, gumbel_softmax, init_mlp, side_by_side
from otpdag.spaces import Space
from otpdag.structure import Structure, Theta

__all__ = ["AmortizedMap"]

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class RowCode:
    """How the observed cells of a row become one vector: standardised values, zeros where missing, and the mask."""

    nodes: tuple[str, ...]
    shift: Mapping[str, Tensor]
    scale: Mapping[str, Tensor]
    roots: frozenset[str]

    @classmethod
    def of(cls, structure: Structure, batch: Batch, nodes: Sequence[str]) -> RowCode:
        """Learn centre and spread of the columns (square roots of counts)."""
        roots = frozenset(n for n in nodes if structure.mechanisms[n].space.support in ("count", "positive"))
        shift, scale = {}, {}
        for node in nodes:
            value = batch.values[node][0]
            width = value.shape[-1]
            shift[node], scale[node] = torch.zeros(width).to(value), torch.ones(width).to(value)
            if not structure.mechanisms[node].space.is_discrete:
                value = value.clamp(min=0).sqrt() if node in roots else value
                seen = batch.mask[node][0].all(-1).to(value)
                shift[node], scale[node] = centre_and_spread(value, seen * batch.weight[0])
        return cls(tuple(nodes), shift, scale, roots)

    def __call__(self, values: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> Tensor:
        """Encode values (B, ..., width) and masks (B, ..., cells) to (B, ..., P)."""
        columns = []
        for node in self.nodes:
            value, seen = values[node], mask[node].to(values[node])
            value = value.clamp(min=0).sqrt() if node in self.roots else value
            value = (value - self.shift[node].to(value)) / self.scale[node].to(value)
            columns.append(value * (seen if seen.shape[-1] == value.shape[-1] else seen[..., :1]))
            columns.append(seen)
        return side_by_side(columns)


def free_width(space: Space) -> int:
    """Number of unconstrained coordinates of a value."""
    return space.width - 1 if space.support == "simplex" else space.width


def constrain(space: Space, free: Tensor) -> tuple[Tensor, Tensor]:
    """Map unconstrained coordinates to a value; also the log-determinant of the map."""
    if space.support == "positive":
        return torch.exp(free), free.sum(-1)
    if space.support == "unit":
        value = torch.sigmoid(free)
        return value, (torch.log(value) + torch.log1p(-value)).sum(-1)
    if space.support == "simplex":
        logits = torch.cat([free, torch.zeros_like(free[..., :1])], -1)
        value = torch.softmax(logits, -1)
        return value, torch.log_softmax(logits, -1).sum(-1)
    return free, torch.zeros_like(free[..., 0])


def unconstrain(space: Space, value: Tensor) -> Tensor:
    """Invert :func:`constrain`."""
    if space.support == "positive":
        return torch.log(value.clamp(min=1e-12))
    if space.support == "unit":
        return torch.logit(value.clamp(1e-6, 1 - 1e-6))
    if space.support == "simplex":
        logs = torch.log(value.clamp(min=1e-9))
        return logs[..., :-1] - logs[..., -1:]
    return value


@dataclass(frozen=True)
class Draw:
    """A value drawn by the map, its log-density under the map, and the probabilities of a category."""

    value: Tensor
    log_prob: Tensor


@dataclass(frozen=True)
class AmortizedMap:
    """One head for each node that may be unknown.

    Args:
        structure: Graph and mechanisms.
        code: How rows become vectors.
        targets: Nodes that are drawn, in topological order.
        context: Enumerated nodes whose states the heads may read.
        hidden: Sizes of the hidden layers of each head's network; a linear part is always there.
        name: Distinguishes several maps of one fit.
        explains: Observed nodes that this map's draws have to explain.
    """

    structure: Structure
    code: RowCode
    targets: tuple[str, ...]
    context: tuple[str, ...] = ()
    hidden: tuple[int, ...] = (16,)
    name: str = "joint"
    explains: tuple[str, ...] = ()

    def key(self, node: str, part: str) -> str:
        """The key of a head's tensor among all parameters."""
        return f"phi.{self.name}.{node}.{part}"

    def space(self, node: str) -> Space:
        """The space of a node."""
        return self.structure.mechanisms[node].space

    def input_width(self, node: str) -> int:
        """Number of inputs of a node's head."""
        row = sum(self.space(n).width + self.space(n).cells for n in self.code.nodes)
        context = sum(self.space(n).width for n in self.context)
        earlier = sum(self.space(n).width for n in self.targets[: self.targets.index(node)])
        return row + context + earlier

    def input_slice(self, head: str, node: str) -> slice | None:
        """Where a head reads the value of another unknown node; None if it does not."""
        at = sum(self.space(n).width + self.space(n).cells for n in self.code.nodes)
        for name in (*self.context, *self.targets[: self.targets.index(head)]):
            if name == node:
                return slice(at, at + self.space(name).width)
            at += self.space(name).width
        return None

    def input_keys(self, head: str) -> list[str]:
        """Keys of the tensors whose rows are a head's inputs."""
        return [self.key(head, "linear")] + ([self.key(head, "net.0.weight")] if self.hidden else [])

    def output_keys(self, head: str) -> list[str]:
        """Keys of the tensors whose last axis is a head's outputs."""
        last = len(self.hidden)
        layers = [self.key(head, f"net.{last}.{part}") for part in ("weight", "bias")] if self.hidden else []
        return [self.key(head, "linear"), self.key(head, "bias"), *layers]

    def output_width(self, node: str) -> int:
        """Number of outputs of a node's head."""
        space = self.space(node)
        return space.width if space.is_discrete else 2 * free_width(space)

    def init(self, replicas: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Draw the heads' parameters; the linear part starts at zero, scales at a half."""
        phi: dict[str, Tensor] = {}
        for node in self.targets:
            width, out = self.input_width(node), self.output_width(node)
            phi[self.key(node, "linear")] = torch.zeros(replicas, width, out, dtype=dtype)
            bias = torch.zeros(replicas, out, dtype=dtype)
            if not self.space(node).is_discrete:
                bias[:, out // 2 :] = math.log(0.5)
            phi[self.key(node, "bias")] = bias
            if self.hidden:
                sizes = (width, *self.hidden, out)
                for name, value in init_mlp(sizes, replicas=replicas, generator=generator, dtype=dtype).items():
                    phi[self.key(node, f"net.{name}")] = value
        return phi

    def start_from(self, phi: dict[str, Tensor], replica: int, batch: Batch, completed: Mapping[str, Tensor]) -> None:
        """Regress completed values (N, width) on the rows; the result becomes the linear parts of one replica."""
        at = min(replica, batch.values[self.code.nodes[0]].shape[0] - 1)
        row = self.code({n: v[at] for n, v in batch.values.items()}, {n: m[at] for n, m in batch.mask.items()})
        for node in self.targets:
            space = self.space(node)
            if space.is_discrete:
                continue
            inputs = torch.cat([row, *(completed[n] for n in self.context), *self._earlier(node, completed)], -1)
            design = torch.cat([inputs, torch.ones_like(inputs[:, :1])], -1)
            target = unconstrain(space, completed[node])
            coefficients = weighted_regression(design, target, batch.weight[min(at, len(batch.weight) - 1)], ridge=1e-3)
            spread = (target - design @ coefficients).std(0).clamp(min=0.05)
            free = free_width(space)
            phi[self.key(node, "linear")][replica, :, :free] = coefficients[:-1]
            phi[self.key(node, "bias")][replica, :free] = coefficients[-1]
            phi[self.key(node, "bias")][replica, free:] = torch.log(spread)

    def _earlier(self, node: str, values: Mapping[str, Tensor]) -> list[Tensor]:
        return [values[n] for n in self.targets[: self.targets.index(node)]]

    def outputs(self, phi: Theta, node: str, row: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Evaluate a head on encoded rows (B, n, 1, P) and what was enumerated or drawn so far."""
        columns = [row, *(values[n] for n in self.context), *self._earlier(node, values)]
        inputs = side_by_side(columns)
        out = apply_linear(inputs, phi[self.key(node, "linear")])
        out = out + expand_to(phi[self.key(node, "bias")], out.ndim)
        if self.hidden:
            prefix = self.key(node, "net.")
            out = out + apply_mlp({k: v for k, v in phi.items() if k.startswith(prefix)}, inputs, prefix)
        return out

    def draw(self, phi: Theta, node: str, row: Tensor, values: Mapping[str, Tensor], noise: Tensor) -> Draw:
        """Draw a numeric node from standard normal ``noise`` (1, n, S, free width)."""
        loc, log_scale = self.outputs(phi, node, row, values).chunk(2, -1)
        log_scale = log_scale.clamp(-7.0, 4.0)
        free = loc + torch.exp(log_scale) * noise
        value, log_det = constrain(self.space(node), free)
        log_prob = (-0.5 * noise**2 - log_scale - LOG_SQRT_2PI).sum(-1) - log_det
        return Draw(value, log_prob)

    def relaxed(
        self,
        phi: Theta,
        node: str,
        row: Tensor,
        values: Mapping[str, Tensor],
        uniform: Tensor,
        temperature: float,
        *,
        hard: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """A relaxed draw of a category, and its log-probabilities."""
        log_probs = torch.log_softmax(self.outputs(phi, node, row, values), -1)
        return gumbel_softmax(log_probs, uniform, temperature, hard=hard), log_probs
