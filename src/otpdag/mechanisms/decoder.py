"""Nodes whose value comes from a user's own network."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from otpdag.errors import ModelError
from otpdag.mechanisms.base import Noise, Params, Parents, sum_cells
from otpdag.mechanisms.deterministic import OfAnySpace
from otpdag.mechanisms.normal import normal_log_density
from otpdag.mechanisms.parameters import POSITIVE, REAL, Axis, Parameter, SettingLike, as_setting
from otpdag.mechanisms.predictor import centre_and_spread
from otpdag.numerics import expand_to, under
from otpdag.spaces import Real, Space

PREFIX = "module."


class Decoder(OfAnySpace):
    r"""A user's ``torch.nn.Module`` of the parents, with Gaussian noise or without.

    .. math:: x = f_\theta(\mathrm{pa}) + \mathrm{scale} \, u, \quad u \sim N(0, I)

    The module knows nothing of replicas: it maps the parents side by side, ``(N, P)`` in the order of the edges, to
    ``(N, ...)`` with ``space.width`` numbers in each row. Every replica has its own copy of the parameters; the first
    starts at the module's values, the others where ``reset_parameters`` of its layers puts them. Buffers, such as the
    running statistics of a batch normalisation, are shared by all replicas.

    Args:
        module: The network. It is not changed.
        space: The values that it produces.
        noise_scale: Standard deviation of the noise: a number fixes it, ``otp.start(v)`` learns it. Without it the
            node is a function of its parents and has no density.

    >>> decoder = Decoder(nn.Linear(2, 3), Real(3), noise_scale=0.1)
    >>> from otpdag.mechanisms import Family
    >>> sorted(decoder.setup(Family("x", (("z", Real(2)),))).declared())
    ['module.bias', 'module.weight', 'scale']
    """

    def __init__(self, module: nn.Module, space: Space | None = None, *, noise_scale: SettingLike = None) -> None:
        if not isinstance(module, nn.Module):
            raise ModelError(f"`module` must be a torch.nn.Module; got {module!r}")
        self.module = module
        self._space = Real(1) if space is None else space
        self.noise_scale = as_setting(noise_scale)
        if self.noise_scale is not None and not self._space.is_unbounded:
            raise ModelError(
                f"`noise_scale` needs real values; got the space {self._space}, which Gaussian noise would leave"
            )

    def on_setup(self) -> None:
        """Refuse a root."""
        if not self.family.parents:
            raise ModelError(f"node {self.family.node!r} is a Decoder and needs at least one parent")

    @property
    def noise(self) -> Noise:
        """Standard normal, one for each coordinate, if there is a scale."""
        return Noise(0 if self.noise_scale is None else self.space.width, "normal")

    def parameters(self) -> dict[str, Parameter]:
        """The module's parameters by name, and the scale."""
        declared = {
            PREFIX + name: Parameter(tuple(value.shape), REAL, init_scale=_spread(value))
            for name, value in self.module.named_parameters()
        }
        if self.noise_scale is not None:
            declared["scale"] = Parameter((1,), POSITIVE, self.noise_scale)
        return declared

    def axes(self) -> dict[str, tuple[Axis, ...]]:
        """One scale for all."""
        return {} if self.noise_scale is None else {"scale": (Axis(),)}

    def initial_raw(self, replicas: int, generator: torch.Generator, *, first: bool = True) -> dict[str, Tensor]:
        """The module's own values for the first replica, fresh ones for the others."""
        seeds = torch.randint(2**31, (replicas,), generator=generator).tolist()
        copies = [
            self.module if replica == 0 and first else _reset(self.module, seed) for replica, seed in enumerate(seeds)
        ]
        stacked = zip(*(module.named_parameters() for module in copies), strict=True)
        return {PREFIX + same[0][0]: torch.stack([value.detach().clone() for _, value in same]) for same in stacked}

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """The scale at the spread of the data; the module has its own start."""
        if self.noise_scale is None:
            return {}
        return {"scale": centre_and_spread(value, weight)[1].mean().reshape(1)}

    def buffers(self) -> dict[str, Tensor]:
        """The module's buffers."""
        return {PREFIX + name: value for name, value in self.module.named_buffers()}

    def with_buffers(self, buffers: Mapping[str, Tensor]) -> Self:
        """Return a copy whose module has these buffers."""
        restored = copy.copy(self)
        restored.module = copy.deepcopy(self.module)
        for name, value in restored.module.named_buffers():
            value.copy_(buffers[PREFIX + name])
        return restored

    def location(self, params: Params, parents: Parents) -> Tensor:
        """The module's output: (R, ..., width)."""
        columns = [parents[name] for name, _ in self.family.parents]
        shape = np.broadcast_shapes(*(column.shape[:-1] for column in columns))
        inputs = torch.cat([column.expand(*shape, column.shape[-1]) for column in columns], -1)
        learned = under(params, PREFIX)
        replicas = max(shape[0], *(len(value) for value in learned.values())) if learned else shape[0]
        outputs = [self._run(learned, inputs, replica) for replica in range(replicas)]
        return torch.stack(outputs).reshape(replicas, *shape[1:], -1)

    def _run(self, learned: Params, inputs: Tensor, replica: int) -> Tensor:
        """One replica's module on its rows (N, P): (N, width)."""
        rows = inputs[min(replica, len(inputs) - 1)].flatten(0, -2)
        state = {name: value[min(replica, len(value) - 1)] for name, value in learned.items()}
        state |= dict(self.module.named_buffers())
        state = {name: value.to(rows) if value.is_floating_point() else value for name, value in state.items()}
        output = functional_call(self.module, state, (rows,))
        if output.shape[:1] != rows.shape[:1] or output[:1].numel() != self.space.width * len(output[:1]):
            raise ModelError(
                f"node {self.family.node!r}: its module must map ({len(rows)}, {rows.shape[1]}) to "
                f"({len(rows)}, {self.space.width}); got {tuple(output.shape)}"
            )
        return output.flatten(1)

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """The module's output, plus scaled noise."""
        loc = self.location(params, parents)
        return loc if self.noise_scale is None else loc + self._scale(params, loc) * noise

    @property
    def has_density(self) -> bool:
        """Whether there is noise."""
        return self.noise_scale is not None

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Normal log-density."""
        self._check_noise("density")
        loc = self.location(params, parents)
        return sum_cells(normal_log_density(value, loc, self._scale(params, loc)), mask)

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """``(x - f(pa)) / scale``."""
        self._check_noise("noise to recover")
        loc = self.location(params, parents)
        return (value - loc) / self._scale(params, loc)

    def mean(self, params: Params, parents: Parents) -> Tensor:
        """The module's output."""
        return self.location(params, parents)

    def _scale(self, params: Params, loc: Tensor) -> Tensor:
        return expand_to(params["scale"], loc.ndim)

    def _check_noise(self, what: str) -> None:
        if self.noise_scale is None:
            raise ModelError(f"node {self.family.node!r}: a Decoder without `noise_scale` has no {what}")


def _reset(module: nn.Module, seed: int) -> nn.Module:
    """A copy of the module with fresh parameters, without touching the global random state."""
    fresh = copy.deepcopy(module)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for part in fresh.modules():
            reset = getattr(part, "reset_parameters", None)
            if callable(reset):
                reset()
    return fresh


def _spread(value: Tensor) -> float:
    """Standard deviation of a parameter's entries."""
    return value.detach().double().std(correction=0).item()
