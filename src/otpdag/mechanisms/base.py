r"""The one extension point for mechanisms: ``x = psi(parents, u)`` with noise ``u`` from a known prior.

A mechanism holds no tensors that are learned. It declares its parameters, and its methods are pure functions
of a dictionary of natural parameters ``(R, ...)``, the parents' values ``(R, ..., width)`` and the noise.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.mechanisms.parameters import Axis, Fixed, Parameter
from otpdag.mechanisms.spec import describe_arguments, recorded
from otpdag.spaces import Space

Params = Mapping[str, Tensor]
Parents = Mapping[str, Tensor]


@dataclass(frozen=True)
class Noise:
    """Prior of a mechanism's noise: ``dim`` independent standard normal or uniform variables."""

    dim: int
    kind: Literal["normal", "uniform"] = "normal"


@dataclass(frozen=True)
class Family:
    """What a mechanism learns about its place in the graph: its node's name and its parents' spaces."""

    node: str
    parents: tuple[tuple[str, Space], ...] = ()
    hidden: bool = False
    hidden_parents: bool = False
    """Whether one of the parents is never seen."""

    @property
    def discrete(self) -> tuple[tuple[str, Space], ...]:
        """Parents that are categories."""
        return tuple((name, space) for name, space in self.parents if space.is_discrete)

    @property
    def continuous(self) -> tuple[tuple[str, Space], ...]:
        """Parents that are numbers: real, positive, counts, simplex."""
        return tuple((name, space) for name, space in self.parents if not space.is_discrete)


@dataclass(frozen=True)
class Atoms:
    """A finite support: ``values`` (..., A, width) with log-probabilities ``log_probs`` (R, ..., A)."""

    values: Tensor
    log_probs: Tensor


class Mechanism(ABC):
    """How one node's value comes from its parents and its own noise.

    A new mechanism needs a space, parameters, a noise prior and :meth:`forward`; :meth:`log_prob` and :meth:`atoms`
    where they exist unlock more methods of estimation, and so does what :mod:`otpdag.mechanisms.protocols` lists.
    """

    is_given: ClassVar[bool] = False
    """Whether values come from outside and are never modelled."""

    _family: Family | None = None
    _declared: dict[str, Parameter] | None = None
    _arguments: Mapping[str, Any] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = recorded(cls.__init__)  # type: ignore[method-assign]

    # -- declaration -------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def space(self) -> Space:
        """The values this mechanism produces."""

    @property
    @abstractmethod
    def noise(self) -> Noise:
        """The prior of the noise."""

    @property
    def family(self) -> Family:
        """The node and its parents, known once the mechanism is part of a model."""
        if self._family is None:
            raise ModelError(f"{type(self).__name__} belongs to no model yet; pass it to otp.Model")
        return self._family

    def setup(self, family: Family) -> Self:
        """Return a copy that knows its node and parents, and check that it can serve them."""
        bound = copy.copy(self)
        bound._family = family
        bound._declared = None
        bound.on_setup()
        for name, parameter in bound.declared().items():
            if isinstance(parameter.setting, Fixed):
                parameter.constant(family.node, name)
        return bound

    def on_setup(self) -> None:  # noqa: B027
        """Hook: build what depends on the parents, refuse parents that make no sense."""

    def parameters(self) -> dict[str, Parameter]:
        """Declare the parameters by name."""
        return {}

    def declared(self) -> dict[str, Parameter]:
        """The parameters, built once for each change of units."""
        if self._declared is None:
            self._declared = self.parameters()
        return self._declared

    def scaled_to(self, value: Tensor, parents: Parents, weight: Tensor) -> Self:
        """Return a copy that has adopted the units of a completed table."""
        scaled = copy.copy(self)
        scaled._declared = None
        scaled.on_scale(value, parents, weight)
        return scaled

    def on_scale(self, value: Tensor, parents: Parents, weight: Tensor) -> None:  # noqa: B027
        """Hook: adopt the data's units, so that raw parameters are of order one."""

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """Natural starting values from a completed table: ``value`` (N, width), weights (N,)."""
        return {}

    def initial_raw(self, replicas: int, generator: torch.Generator, *, first: bool = True) -> dict[str, Tensor]:
        """Raw starting values (R, ...) of what no table suggests: the layers of networks.

        ``first`` says that the first replica is the first of all, which starts where the user put it.
        """
        return {
            name: parameter.init_scale
            * torch.randn(replicas, *parameter.shape, generator=generator, dtype=torch.float64)
            for name, parameter in self.declared().items()
            if parameter.learned and parameter.init_scale > 0
        }

    def spec(self) -> dict[str, Any]:
        """The mechanism as plain data, for a file: its class and the arguments it was built from.

        :func:`otpdag.mechanisms.from_spec` reads it again. Functions and modules are not saved.
        """
        return {"type": type(self).__name__, "arguments": describe_arguments(self)}

    def natural(self, raw: Params) -> dict[str, Tensor]:
        """Natural parameters from raw ones; fixed parameters are filled in."""
        return self.restore_units(
            {name: self._natural_one(name, parameter, raw) for name, parameter in self.declared().items()}
        )

    def _natural_one(self, name: str, parameter: Parameter, raw: Params) -> Tensor:
        if not parameter.learned:
            value = parameter.constant(self.family.node, name).unsqueeze(0)
            return value.to(next(iter(raw.values()))) if raw else value
        return parameter.natural(raw[name])

    def raw(self, natural: Params) -> dict[str, Tensor]:
        """Raw values of the learned parameters from natural ones."""
        fixed = {
            name: p.constant(self.family.node, name).unsqueeze(0)
            for name, p in self.declared().items()
            if not p.learned and name not in natural
        }
        internal = self.remove_units({**fixed, **natural})
        return {name: p.raw(internal[name]) for name, p in self.declared().items() if p.learned and name in internal}

    def restore_units(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Hook: last step from internal to natural units."""
        return params

    def remove_units(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Hook: invert :meth:`restore_units`."""
        return params

    def describe(self, params: Params) -> dict[str, Tensor]:
        """Parameters as a user reads them: one leading axis per discrete parent, no axes of length one."""
        return dict(params)

    # -- symmetry ----------------------------------------------------------------------------------------
    #
    # Nothing in the data tells how the categories of a hidden node are numbered. A model may choose, if every mechanism
    # that makes or reads the node can follow.

    def axes(self) -> dict[str, tuple[Axis, ...]]:
        """What the axes of natural parameters run over, without the replica axis; nothing is known of others."""
        return {}

    def relabelled(self, params: Params, nodes: Collection[str], order: Sequence[int]) -> dict[str, Tensor] | None:
        """Parameters of the same mechanism once category ``order[k]`` of each of ``nodes`` is called ``k``.

        By default what :meth:`axes` says: entries are exchanged along the axes of these nodes. Where a parameter has
        no axes, or none runs over one of the nodes, the mechanism may tell labels apart in ways that nobody knows of.

        Args:
            params: Natural parameters (R, ...).
            nodes: The node itself, some of its parents, or both, all of them categories of one size.
            order: For each new label the old one.

        Returns:
            All parameters, or None if the mechanism cannot follow; then labels stay as they are.
        """
        axes = self.axes()
        labelled_by = {name for own in axes.values() for axis in own for name in axis.labelled_by}
        if not set(nodes) <= labelled_by or not set(params) <= set(axes):
            return None
        changed = dict(params)
        for name in params:
            for place, axis in enumerate(axes[name]):
                changed[name] = axis.relabelled(changed[name], place + 1, nodes, order)
        return changed

    # -- behaviour ---------------------------------------------------------------------------------------

    @abstractmethod
    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """The deterministic assignment ``psi(parents, u)``: a value (R, ..., width)."""

    @property
    def has_density(self) -> bool:
        """Whether :meth:`log_prob` is implemented."""
        return type(self).log_prob is not Mechanism.log_prob

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Log-density of ``value`` (R, ..., width), over the cells that ``mask`` (R, ..., cells) keeps."""
        raise NotImplementedError(f"{type(self).__name__} has no density")

    def log_probs(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """Log-probabilities of all categories, (R, ..., size), with as many axes as the parents and ``like`` have.

        Only of a node that is a category. By default :meth:`log_prob` of one category after the other.
        """
        ndim = axis_count(parents, like)
        known = (*params.values(), *parents.values(), *(() if like is None else (like,)))
        every = torch.eye(self.space.width, dtype=torch.float64)
        every = every.to(known[0]) if known else every
        beside = {name: parent.unsqueeze(-2) for name, parent in parents.items()}
        return self.log_prob(params, every.reshape(*(1,) * (ndim - 1), *every.shape), beside)

    @property
    def correlated(self) -> bool:
        """Whether coordinates depend on each other given the parents."""
        return False

    def complete(self, params: Params, value: Tensor, parents: Parents, mask: Tensor, noise: Tensor) -> Tensor:
        """Draw the cells of ``value`` that ``mask`` (R, ..., cells) does not keep, given those that it keeps."""
        return torch.where(mask, value, self.forward(params, parents, noise))

    def atoms(self, params: Params, parents: Parents, limit: int) -> Atoms | None:
        """The support with its probabilities, if it is finite (or can be cut) at ``limit`` atoms or fewer.

        By default that of categories.
        """
        if not self.space.is_discrete or not self.has_density or self.space.width > limit:
            return None
        log_probs = self.log_probs(params, parents)
        return Atoms(torch.eye(self.space.width, dtype=log_probs.dtype, device=log_probs.device), log_probs)

    def mean(self, params: Params, parents: Parents) -> Tensor | None:
        """The conditional mean, where one has a closed form."""
        return None


def axis_count(parents: Parents, like: Tensor | None = None) -> int:
    """Number of axes of a value with these parents; a root alone counts as (R, N, width)."""
    given = [value.ndim for value in parents.values()]
    if like is not None:
        given.append(like.ndim)
    return max(given, default=3)


def sum_cells(log_prob: Tensor, mask: Tensor | None) -> Tensor:
    """Sum a log-density per cell (R, ..., cells) over the cells that are observed."""
    if log_prob.shape[-1] == 1:
        log_prob = log_prob[..., 0]
        return log_prob if mask is None else torch.where(mask[..., 0], log_prob, 0.0)
    if mask is not None:
        log_prob = torch.where(mask, log_prob, 0.0)
    return log_prob.sum(-1)
