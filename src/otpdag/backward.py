r"""Backward maps: hidden and missing values from what is seen.

The amortised map draws them from everything that a row shows. Every unknown node, in topological order, has a head that
reads the row (values and mask) and what was drawn before it. A numeric node's head is normal in unconstrained
coordinates, a category's head a softmax.

A user's network tells what is hidden behind an image; with codewords, each position of it goes to the nearest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from otpdag.clustering import move_centres
from otpdag.data import Batch
from otpdag.errors import ModelError
from otpdag.layers import apply_mlp, gumbel_softmax, init_mlp
from otpdag.mechanisms.base import Noise
from otpdag.mechanisms.normal import LOG_SQRT_2PI
from otpdag.mechanisms.predictor import centre_and_spread, weighted_regression
from otpdag.numerics import apply_linear, expand_to, nearest, side_by_side, under
from otpdag.settings import SumSizes
from otpdag.spaces import Space
from otpdag.structure import Structure, Theta

__all__ = ["AmortizedMap", "EncoderMap", "QuantizedMap", "RowCode", "SumSizes"]


@dataclass(frozen=True)
class RowCode:
    """How the observed cells of a row become one vector: standardised values, zeros where missing, and the mask.

    Centre and spread are kept of the nodes that are read, and of others that a map draws.
    """

    nodes: tuple[str, ...]
    shift: Mapping[str, Tensor]
    scale: Mapping[str, Tensor]
    roots: frozenset[str]

    @classmethod
    def of(cls, structure: Structure, batch: Batch, nodes: Sequence[str], others: Sequence[str] = ()) -> RowCode:
        """Learn centre and spread of the columns, or of their square roots where the space asks for these."""
        columns = tuple(dict.fromkeys((*nodes, *others)))
        roots = frozenset(n for n in columns if structure.mechanisms[n].space.is_skewed)
        shift, scale = {}, {}
        for node in columns:
            value = batch.values[node][0]
            width = value.shape[-1]
            shift[node], scale[node] = torch.zeros(width).to(value), torch.ones(width).to(value)
            if not structure.mechanisms[node].space.is_discrete:
                value = value.clamp(min=0).sqrt() if node in roots else value
                weight = batch.mask[node][0].to(value) * batch.weight[0].unsqueeze(-1)
                cells = [centre_and_spread(value[:, [i]], weight[:, i]) for i in range(width)]
                shift[node], scale[node] = (torch.cat(part) for part in zip(*cells, strict=True))
        return cls(tuple(nodes), shift, scale, roots)

    def __call__(self, values: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> Tensor:
        """Encode values (B, ..., width) and masks (B, ..., cells) to (B, ..., P)."""
        columns = []
        for node in self.nodes:
            value, seen = self.standard(node, values[node]), mask[node].to(values[node])
            columns.append(value * (seen if seen.shape[-1] == value.shape[-1] else seen[..., :1]))
            columns.append(seen)
        return side_by_side(columns)

    def standard(self, node: str, value: Tensor) -> Tensor:
        """A value in units of its column's variation; that of a node without a column as it is."""
        if node not in self.shift:
            return value
        value = value.clamp(min=0).sqrt() if node in self.roots else value
        return (value - self.shift[node].to(value)) / self.scale[node].to(value)

    def spread(self, node: str, like: Tensor) -> Tensor:
        """Spread of a column, so that every node's cost is in units of its own variation; one without a column."""
        if node not in self.scale:
            return torch.ones(1).to(like)
        shift, scale = self.shift[node].to(like), self.scale[node].to(like)
        # of the square of a normal variable, where the code holds square roots
        return torch.sqrt(4 * (shift * scale) ** 2 + 2 * scale**4) if node in self.roots else scale


@dataclass(frozen=True)
class Draw:
    """A value drawn by the map, and its log-density under the map, coordinate by coordinate."""

    value: Tensor
    log_probs: Tensor

    @property
    def log_prob(self) -> Tensor:
        """Log-density of the whole value."""
        return self.log_probs.sum(-1)

    def log_prob_of(self, cells: Tensor) -> Tensor:
        """Log-density of the coordinates that ``cells`` names; a simplex counts as one cell."""
        if cells.shape[-1] != self.log_probs.shape[-1]:
            return torch.where(cells.any(-1), self.log_prob, 0.0)
        return torch.where(cells, self.log_probs, 0.0).sum(-1)


@dataclass(frozen=True)
class AmortizedMap:
    """One head for each node that may be unknown.

    Args:
        structure: Graph and mechanisms.
        code: How rows become vectors.
        targets: Nodes that are drawn, in topological order.
        hidden: Sizes of the hidden layers of each head's network; a linear part is always there.
        name: Distinguishes several maps of one fit.
        explains: Observed nodes that this map's draws have to explain.
    """

    structure: Structure
    code: RowCode
    targets: tuple[str, ...]
    hidden: tuple[int, ...] = (16,)
    name: str = "joint"
    explains: tuple[str, ...] = ()

    def spec(self) -> dict[str, Any]:
        """The map as plain data, for a file: its class, and the arguments that build it beside structure and code.

        A class of your own with more arguments adds them; ``otpdag.load(path, maps={"Name": Name})`` passes them to it
        again, lists as tuples.
        """
        return {
            "type": type(self).__name__,
            "targets": list(self.targets),
            "hidden": list(self.hidden),
            "name": self.name,
            "explains": list(self.explains),
        }

    def key(self, node: str, part: str) -> str:
        """The key of a head's tensor among all parameters."""
        return f"phi.{self.name}.{node}.{part}"

    def space(self, node: str) -> Space:
        """The space of a node."""
        return self.structure.mechanisms[node].space

    def input_width(self, node: str) -> int:
        """Number of inputs of a node's head."""
        row = sum(self.space(n).width + self.space(n).cells for n in self.code.nodes)
        earlier = sum(self.space(n).width for n in self.targets[: self.targets.index(node)])
        return row + earlier

    def output_width(self, node: str) -> int:
        """Number of outputs of a node's head."""
        space = self.space(node)
        return space.width if space.is_discrete else 2 * space.free_width

    def noise(self, node: str) -> Noise:
        """What a draw of a node reads beside its inputs."""
        space = self.space(node)
        return Noise(space.width, "uniform") if space.is_discrete else Noise(space.free_width, "normal")

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

    def started(self, batch: Batch, completed: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """The map's parameters (1, ...), drawn and started from completed values (N, width)."""
        phi = self.init(1, generator)
        self.start_from(phi, batch, completed)
        return phi

    def start_from(self, phi: dict[str, Tensor], batch: Batch, completed: Mapping[str, Tensor]) -> None:
        """Regress completed values (N, width) on the rows; the result becomes the linear parts of all replicas.

        A head never sees its own node's cells, and those of other drawn nodes in half of the rows: it is used where
        they are missing.

        Args:
            phi: The map's parameters, changed in place.
            batch: The rows.
            completed: A value for every node.
        """
        own = {n: v[0] for n, v in batch.values.items()}
        generator = torch.Generator().manual_seed(0)
        for node in self.targets:
            space = self.space(node)
            if space.is_discrete:
                continue
            row = self.code(own, self._hide(node, batch, generator))
            inputs = torch.cat([row, *self._read(node, completed)], -1)
            design = torch.cat([inputs, torch.ones_like(inputs[:, :1])], -1)
            shift, scale = self._units(node, row)
            target = (space.unconstrain(completed[node]) - shift) / scale
            coefficients = weighted_regression(design, target, batch.weight[0], ridge=1e-3)
            spread = (target - design @ coefficients).std(0).clamp(min=0.05)
            free = space.free_width
            phi[self.key(node, "linear")][:, :, :free] = coefficients[:-1]
            phi[self.key(node, "bias")][:, :free] = coefficients[-1]
            phi[self.key(node, "bias")][:, free:] = torch.log(spread)

    def _hide(self, node: str, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        shown = {}
        for name, (mask, *_) in batch.mask.items():
            if name == node:
                mask = torch.zeros_like(mask)
            elif name in self.targets:
                mask = mask & (torch.rand(len(mask), 1, generator=generator) < 0.5).to(mask.device)
            shown[name] = mask
        return shown

    def _read(self, node: str, values: Mapping[str, Tensor]) -> list[Tensor]:
        """What a head reads beside the row: the values drawn before it."""
        return [self.code.standard(n, values[n]) for n in self.targets[: self.targets.index(node)]]

    def _units(self, node: str, like: Tensor) -> tuple[Tensor, Tensor]:
        """Centre and spread in which a head draws: those of a real column, whatever its units."""
        if node not in self.code.shift or not self.space(node).is_unbounded:
            return torch.zeros(1).to(like), torch.ones(1).to(like)
        return self.code.shift[node].to(like), self.code.scale[node].to(like)

    def outputs(self, phi: Theta, node: str, row: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Evaluate a head on encoded rows (B, ..., P) and what was drawn so far."""
        columns = [row, *self._read(node, values)]
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
        shift, scale = self._units(node, loc)
        value, log_det = self.space(node).constrain(shift + scale * (loc + torch.exp(log_scale) * noise))
        return Draw(value, -0.5 * noise**2 - log_scale - LOG_SQRT_2PI - torch.log(scale) - log_det)

    def relaxed(
        self, phi: Theta, node: str, row: Tensor, values: Mapping[str, Tensor], uniform: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """A relaxed draw of a category, and its log-probabilities."""
        log_probs = torch.log_softmax(self.outputs(phi, node, row, values), -1)
        return gumbel_softmax(log_probs, uniform, temperature), log_probs


def amortized_maps(
    structure: Structure, batch: Batch, layers: tuple[int, ...], *, local: bool = False
) -> tuple[AmortizedMap, ...]:
    """One joint map, or one map for each observed node with hidden parents (the paper's local reading)."""
    graph = structure.graph
    observed = graph.observed
    missing = tuple(n for n in observed if graph.children(n) and not bool(batch.mask[n].all()))
    if not local:
        hidden = tuple(n for n in graph.hidden if graph.observed_descendants(n))
        targets = tuple(n for n in graph.order if n in hidden or n in missing)
        code = RowCode.of(structure, batch, observed)
        return (AmortizedMap(structure, code, targets, hidden=layers, explains=observed),)
    maps = []
    for node in observed:
        targets = tuple(p for p in graph.order if p in graph.parents(node) and (p in graph.hidden or p in missing))
        code = RowCode.of(structure, batch, (node,), [n for n in targets if n in observed])
        maps.append(AmortizedMap(structure, code, targets, hidden=layers, name=f"local.{node}", explains=(node,)))
    return tuple(maps)


# -- images ---------------------------------------------------------------------------------------------------------

PREFIX = "phi.encoder."
POTENTIAL = "phi.potential"


def network_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a network as it is, among those of a backward map, with a replica axis of one."""
    return {PREFIX + name: value.detach().clone().unsqueeze(0) for name, value in module.named_parameters()}


def apply_network(module: nn.Module, phi: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """What a network makes of inputs with the first replica's parameters; it is not changed."""
    state: dict[str, Tensor] = {name: value[0] for name, value in under(phi, PREFIX).items()}
    made: Tensor = functional_call(module, state | dict(module.named_buffers()), (inputs,))
    return made


@dataclass(frozen=True)
class EncoderMap:
    r"""One hidden node drawn from the observed one by a ``torch.nn.Module`` (WAE's deterministic encoder).

    .. math:: z = f_e(x)

    Args:
        module: Maps images (n, channels, height, width), or rows, to (n, ``width``). It is not changed.
        width: Coordinates of the hidden node.
        shape: What a row of the batch is reshaped to.
    """

    module: nn.Module
    width: int
    shape: tuple[int, ...]

    def init(self) -> dict[str, Tensor]:
        """The module's own parameters, with a replica axis of one."""
        return network_parameters(self.module)

    def latents(self, phi: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Encode rows (1, n, pixels): (1, n, width)."""
        images = rows[0].reshape(-1, *self.shape)
        if len(self.shape) == 3:
            images = images.contiguous(memory_format=torch.channels_last)
        latents = apply_network(self.module, phi, images)
        if latents.shape != (len(images), self.width):
            raise ModelError(
                f"the encoder must map {tuple(images.shape)} to ({len(images)}, {self.width}); "
                f"got {tuple(latents.shape)}"
            )
        return latents.unsqueeze(0)


@dataclass(frozen=True)
class QuantizedMap:
    r"""``phi(x) = [f_e(x), Q(f_e(x))]`` (Appendix C.3), with the potentials of its transport to the codewords.

    Potentials are ordinary parameters of the map that ascend where all others descend. They are kept from batch to
    batch, so that codewords get their weight over the data set and not within every 32 images.

    Args:
        encoder: Encodes images to all positions' latents side by side.
        positions: Number of positions, M.
        size: Number of codewords, K.
        dim: Length of a codeword, D.
        by_position: Whether every position has its own transport problem (the paper's reading), or all of them one.
        pace: Of potentials beside other parameters: they are in units of squared latents, and must follow them.
    """

    encoder: EncoderMap
    positions: int
    size: int
    dim: int
    by_position: bool = False
    pace: float = 30.0

    def init(self) -> dict[str, Tensor]:
        """The encoder's parameters, and potentials of zero."""
        problems = self.positions if self.by_position else 1
        return {**self.encoder.init(), POTENTIAL: torch.zeros(1, problems, self.size)}

    def latents(self, phi: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Encode rows (1, n, pixels): (1, n, positions * dim)."""
        return self.encoder.latents(phi, rows)

    def at_positions(self, latents: Tensor) -> Tensor:
        """Latents (1, n, positions * dim) as one sample for each position: (positions, n, dim)."""
        return latents[0].unflatten(-1, (self.positions, self.dim)).transpose(0, 1)

    def potentials(self, phi: Mapping[str, Tensor]) -> Tensor:
        """Potentials of the codewords: (problems, size)."""
        return self.pace * phi[POTENTIAL][0]

    def placed_codewords(
        self, phi: Mapping[str, Tensor], images: Tensor, generator: torch.Generator, each: int = 20, at_once: int = 250
    ) -> tuple[Tensor, Tensor]:
        """Codewords (size, dim) among the latents of some images (N, pixels), and scales at what is left of them.

        There are ``each`` latents for every codeword, of ``at_once`` images at a time.
        """
        many = min(len(images), math.ceil(each * self.size / self.positions))
        some = images[torch.randperm(len(images), generator=generator)[:many]]
        with torch.no_grad():
            parts = [self.latents(phi, part.unsqueeze(0)) for part in some.split(at_once)]
        centres, residual = lloyd(torch.cat(parts, 1).reshape(-1, self.dim), self.size, generator)
        return centres, residual.mean().clamp(min=1e-8).sqrt().expand_as(centres)


def lloyd(points: Tensor, size: int, generator: torch.Generator, steps: int = 5) -> tuple[Tensor, Tensor]:
    """A few steps of k-means from random points (N, D): centres (size, D), and the mean squared residual (D,).

    With fewer points than centres, points repeat with a little noise.
    """
    index = torch.randperm(len(points), generator=generator)
    index = index.repeat(math.ceil(size / len(index)))[:size].to(points.device)
    jitter = torch.randn(size, points.shape[1], generator=generator).to(points)
    centres = points[index] + 1e-3 * points.std() * jitter
    centres = torch.from_numpy(move_centres(points.cpu().numpy(), centres.cpu().numpy(), steps)).to(points)
    own = nearest(torch.cdist(points, centres))
    return centres, (points - centres[own]).square().mean(0)
