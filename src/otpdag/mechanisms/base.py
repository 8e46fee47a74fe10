r"""The one extension point for mechanisms: ``x = psi(parents, u)`` with noise ``u`` from a known prior.

A mechanism holds no tensors that are learned. It declares its parameters, and its methods are pure functions
of a dictionary of natural parameters ``(R, ...)``, the parents' values ``(R, ..., width)`` and the noise.
"""

from __future__ import annotations

import copy
import inspect
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from otpdag.errors import ModelError, check_mapping, told_as
from otpdag.mechanisms.parameters import FUNCTION, Axis, Fixed, Parameter, as_setting, decode, encode
from otpdag.numerics import products, side_by_side, sums_by_row
from otpdag.spaces import Space

Params = Mapping[str, Tensor]
Parents = Mapping[str, Tensor]
Held = TypeVar("Held")  # what is held by name

LINE = ""  # stands among parents for what some of them, which then are zero, add to a linear prediction: (R, ..., dim)


@dataclass(frozen=True)
class Noise:
    """Prior of a mechanism's noise: ``dim`` independent standard normal or uniform variables."""

    dim: int
    kind: Literal["normal", "uniform"] = "normal"


@dataclass(frozen=True)
class Family:
    """What a mechanism learns about its place in the graph: its node's name and its parents' spaces.

    Attributes:
        hidden_parents: Whether one of the parents is never seen.
    """

    node: str
    parents: tuple[tuple[str, Space], ...] = ()
    hidden: bool = False
    hidden_parents: bool = False

    @property
    def discrete(self) -> tuple[tuple[str, Space], ...]:
        """Parents that are categories."""
        return tuple((name, space) for name, space in self.parents if space.is_discrete)

    @property
    def continuous(self) -> tuple[tuple[str, Space], ...]:
        """Parents that are numbers: real, positive, counts, simplex."""
        return tuple((name, space) for name, space in self.parents if not space.is_discrete)


class Mechanism(ABC):
    """How one node's value comes from its parents and its own noise.

    A new mechanism needs a space, parameters, a noise prior and :meth:`forward`; :meth:`log_prob` unlocks more methods
    of estimation, and so does each of the protocols below.

    Attributes:
        is_given: Whether values come from outside and are never modelled.
    """

    is_given: ClassVar[bool] = False

    _family: Family | None = None
    _declared: dict[str, Parameter] | None = None
    _built_from: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember what the mechanism is built from, for a file."""
        if cls.__init__ is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__name__} takes no arguments")
        made = super().__new__(cls)
        made._built_from = args, kwargs
        signature = inspect.signature(cls.__init__)
        try:
            given = signature.bind_partial(made, *args, **kwargs).arguments
        except TypeError as error:
            names = ", ".join(f"{name}=" for name in list(signature.parameters)[1:])
            raise TypeError(f"{cls.__name__}: {error}; its arguments are {names}") from None
        for name, value in given.items():
            check_kind(cls, name, value)
        return made

    def __repr__(self) -> str:
        """The call that built it."""
        args, named = self._built_from
        return f"{type(self).__name__}({', '.join([*map(repr, args), *(f'{k}={v!r}' for k, v in named.items())])})"

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
        kind, arguments = type(self), {}
        for name, value in arguments_of(self).items():
            is_setting = "Setting" in _declared_type(kind, name) and not isinstance(value, Mapping)
            arguments[name] = encode(as_setting(value) if is_setting else value, kind, name)
        return {"type": kind.__name__, "arguments": arguments}

    def natural(self, raw: Params) -> dict[str, Tensor]:
        """Natural parameters from raw ones; fixed parameters are filled in."""
        own = {name: self._natural_one(name, parameter, raw) for name, parameter in self.declared().items()}
        return self.restore_units(own)

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
        """Parameters as a user reads them: an axis for each discrete parent, none for a single coordinate."""
        axes = {
            name: [size for axis in own for size in axis.shown(self.family.node)] for name, own in self.axes().items()
        }
        return {n: value.reshape(len(value), *axes[n]) if n in axes else value for n, value in params.items()}

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
        raise ModelError(f"node {self.family.node!r}: {type(self).__name__} has no density; use method='auto'")

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

    def complete(self, params: Params, value: Tensor, parents: Parents, mask: Tensor, noise: Tensor) -> Tensor:
        """Draw the cells of ``value`` that ``mask`` (R, ..., cells) does not keep, given those that it keeps."""
        return torch.where(mask, value, self.forward(params, parents, noise))

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


def configurations(family: Family, parents: Parents) -> Tensor | None:
    """One-hot (or soft) joint configuration of the discrete parents: (R, ..., C), the last parent fastest."""
    return products([parents[name] for name, _ in family.discrete]) if family.discrete else None


def numeric(family: Family, parents: Parents) -> Tensor | None:
    """The numeric parents side by side: (R, ..., P)."""
    columns = [parents[name] for name, _ in family.continuous]
    return side_by_side(columns) if columns else None


# -- what a mechanism may offer besides --------------------------------------------------------------------------------
#
# Each in a class of its own: a mechanism that has the methods is one, and whoever needs them asks with ``isinstance``.
# Some depend on the parents or on what is given, too; the functions below ask for both.


@runtime_checkable
class ExponentialFamily(Protocol):
    r"""A log-density that is a product of features of the value and coefficients of the parameters.

    With one row of coefficients for each configuration of the discrete parents,
    :math:`\log p(x \mid c) = \mathrm{features}(x) \cdot \eta_c`, any number of weighted values is read through the
    features' sums: they are all that the M-step needs.
    """

    def features(self, value: Tensor, mask: Tensor) -> Tensor | None:
        """Features (n, F) of values (n, width); cells that ``mask`` (n, cells) does not keep add nothing.

        None where these parents, or these gaps, allow none.
        """

    def coefficients(self, params: Params) -> Tensor:
        r"""The coefficients :math:`\eta` (R, C, F) of :meth:`features`, for each configuration."""

    def fitted(self, params: Params, sums: Tensor) -> dict[str, Tensor]:
        """The likeliest natural parameters for weighted sums of features (R, C, F) in each configuration.

        What is given stays, and what no row tells stays as it is in ``params``.
        """


@runtime_checkable
class Regressed(Protocol):
    """A mechanism whose M-step is a regression on its numeric parents."""

    def regressed(
        self, params: Params, moments: Tensor, shift: Tensor, unit: Tensor, least: float = ...
    ) -> dict[str, Tensor]:
        """The likeliest natural parameters for second moments of each coordinate with the numeric parents.

        Args:
            params: Where all parameters are (1 or R, ...); what no row tells stays.
            moments: Sums of products of (value, numeric parents, 1) in each configuration, coordinate by coordinate
                (R, C, dim, P + 2, P + 2).
            shift: What was subtracted from value and parents before (dim, P + 1).
            unit: What values were divided by then (dim,); parents are not.
            least: A share of the column's spread, below which no scale falls.
        """


@runtime_checkable
class Abducible(Protocol):
    """A mechanism that finds the noise that made a value."""

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """The noise that made ``value``: ``u = psi^-1(x; parents)``.

        For counts and categories a whole interval of noise gives the same value; ``uniform`` (R, ...,
        noise.dim) picks a point in it (randomised probability integral transform).
        """


@runtime_checkable
class Relaxed(Protocol):
    """A mechanism with draws that are differentiable in parameters and parents, though its values are not."""

    def relaxed(self, params: Params, parents: Parents, noise: Tensor, temperature: float) -> Tensor:
        """A draw from noise (R, ..., dim)."""


@runtime_checkable
class Turning(Protocol):
    """A mechanism that follows other signs of hidden numbers, which nothing in the data tells."""

    def turned(self, params: Params, nodes: Collection[str], sign: Tensor) -> dict[str, Tensor] | None:
        """Parameters of the same mechanism once the coordinates of each of ``nodes`` are multiplied by ``sign``.

        Args:
            params: Natural parameters (R, ...).
            nodes: The node itself, some of its parents, or both, all of them real vectors of one width.
            sign: One or minus one for each coordinate, (width,).

        Returns:
            All parameters, or None if the mechanism cannot follow; then signs stay as they are.
        """


@runtime_checkable
class Sloped(Protocol):
    """A mechanism that says which way it rises."""

    def slopes(self, params: Params, parent: str) -> Tensor | None:
        """How steeply the node rises with each coordinate of a numeric parent, (R, width); None if it has no slope."""


@runtime_checkable
class Buffered(Protocol):
    """A mechanism that keeps what it read off the data, such as units: a file needs it beside the parameters."""

    def buffers(self) -> dict[str, Tensor]:
        """What :meth:`Mechanism.scaled_to` took from the data."""

    def with_buffers(self, buffers: Mapping[str, Tensor]) -> Self:
        """Return a copy with saved :meth:`buffers`."""


def has_closed_form(mechanism: Mechanism) -> bool:
    """Whether the M-step of a mechanism has a closed form, with its parents and with what is given."""
    return bool(getattr(mechanism, "has_closed_form", False))


def fitted_to_rows(
    mechanism: Mechanism, params: Params, value: Tensor, parents: Parents, weight: Tensor
) -> dict[str, Tensor]:
    """The likeliest natural parameters for weighted rows: values (n, width), weights (R, n).

    >>> import torch
    >>> from otpdag.mechanisms import Categorical, Family
    >>> coin, before = Categorical(2).setup(Family("x")), {"probs": torch.tensor([[[0.5, 0.5]]])}
    >>> fitted_to_rows(coin, before, torch.eye(2), {}, torch.tensor([[300.0, 100.0]]))["probs"]
    tensor([[[0.7499, 0.2501]]])
    """
    sums = feature_sums(mechanism, value, parents, weight)
    return cast("ExponentialFamily", mechanism).fitted(params, sums)


def feature_sums(mechanism: Mechanism, value: Tensor, parents: Parents, weight: Tensor) -> Tensor:
    """Weighted sums of features by configuration of the discrete parents (R, C, F), as for :func:`fitted_to_rows`."""
    features = None
    if isinstance(mechanism, ExponentialFamily):
        features = mechanism.features(value, torch.ones_like(value[..., :1], dtype=torch.bool))
    if features is None:
        raise NotImplementedError(f"{type(mechanism).__name__} has no features with these parents")
    config, share = configurations(mechanism.family, parents), weight.unsqueeze(-1)
    return share.mT @ features if config is None else sums_by_row(config, share * features)


def log_prior(mechanism: Mechanism, params: Params) -> Tensor | None:
    """Log-density of the priors of a mechanism's natural parameters (R, ...), up to a constant; None without one."""
    told = [parameter.log_prior(params[name]) for name, parameter in mechanism.declared().items() if name in params]
    own = [one for one in told if one is not None]
    return torch.stack(own).sum(0) if own else None


def is_linear(mechanism: Mechanism) -> bool:
    """Whether a node is linear in its numeric parents and its noise, which is normal.

    >>> from otpdag.mechanisms import Family, Normal, Poisson
    >>> [is_linear(one.setup(Family("x"))) for one in (Normal(), Normal(network=(2,)), Poisson())]
    [True, False, False]
    """
    return isinstance(mechanism, Abducible) and bool(getattr(mechanism, "is_linear", False))


def can_abduct(mechanism: Mechanism) -> bool:
    """Whether there is noise, and the mechanism can recover it."""
    return isinstance(mechanism, Abducible) and mechanism.noise.dim > 0


def abducted(mechanism: Mechanism, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
    """The noise that made ``value``, of a mechanism that can recover it; see :class:`Abducible`."""
    if not isinstance(mechanism, Abducible):
        raise NotImplementedError(f"{type(mechanism).__name__} cannot recover its noise")
    return mechanism.abduct(params, value, parents, uniform)


def relaxed_noise(mechanism: Mechanism) -> Noise:
    """The prior of the noise that :func:`relaxed` takes."""
    own: Noise = getattr(mechanism, "relaxed_noise", mechanism.noise)
    return own


def relaxed(mechanism: Mechanism, params: Params, parents: Parents, noise: Tensor, temperature: float) -> Tensor:
    """A draw differentiable in parameters and parents, from :func:`relaxed_noise` (R, ..., dim)."""
    if isinstance(mechanism, Relaxed):
        return mechanism.relaxed(params, parents, noise, temperature)
    return mechanism.forward(params, parents, noise)


def buffers_of(mechanism: Mechanism) -> dict[str, Tensor]:
    """What a mechanism read off the data; nothing of one that keeps nothing."""
    return mechanism.buffers() if isinstance(mechanism, Buffered) else {}


def defines_together(mechanism: Mechanism, *methods: str) -> bool:
    """Whether no class overrides the density alone, which these methods would no longer fit.

    >>> from otpdag.mechanisms import Bernoulli
    >>> defines_together(Bernoulli(), "features")
    True
    """
    hooks = {"abduct": "noise_of"}
    density = _lowest(mechanism, "log_prob", "log_density", "log_probs")
    return all(_lowest(mechanism, one, hooks.get(one, one)) <= density for one in methods)


def _lowest(mechanism: Mechanism, *names: str) -> int:
    """How far up its classes the first is that defines one of these names."""
    classes = type(mechanism).__mro__
    return next((at for at, one in enumerate(classes) if vars(one).keys() & set(names)), len(classes))


# -- files -----------------------------------------------------------------------------------------------------------
#
# A mechanism is written as plain data; reading it runs no code that is not already imported.

_REGISTRY: dict[str, type[Mechanism]] = {}

M = TypeVar("M", bound="type[Mechanism]")


def register(mechanism: M) -> M:
    """Make a mechanism class known to :func:`from_spec`; usable as a decorator.

    The library's own classes are registered. Register yours before loading a model that was saved with it.
    """
    known = _REGISTRY.setdefault(mechanism.__name__, mechanism)
    if known is not mechanism:
        raise ModelError(f"a mechanism named {mechanism.__name__!r} is registered already: {known.__module__}")
    return mechanism


def registered() -> dict[str, type[Mechanism]]:
    """The mechanism classes that a file may name, by name."""
    return dict(sorted(_REGISTRY.items()))


def from_spec(
    spec: Mapping[str, Any], *, node: str = "", functions: Mapping[str, Callable[..., Any]] | None = None
) -> Mechanism:
    """Build the mechanism that :meth:`Mechanism.spec` described.

    Args:
        spec: What ``mechanism.spec()`` returned, perhaps after a way through JSON.
        node: The node it belongs to, for messages and to find its function.
        functions: Functions and modules by node, for mechanisms that hold code (which is never saved).

    Raises:
        ModelError: If the class is not registered, an argument is unknown, or a function is missing.
    """
    name = check_mapping("spec", spec).get("type")
    if name not in _REGISTRY:
        raise ModelError(
            f"{_at(node)}unknown mechanism {name!r}; known are {', '.join(sorted(_REGISTRY))}. "
            f"Register your own class with m.register({name}) before loading"
        )
    arguments: dict[str, Any] = {}
    for argument, value in spec["arguments"].items():
        if value == FUNCTION:
            if functions is None or node not in functions:
                raise ModelError(
                    f"{_at(node)}the {argument!r} of {name} is code and was not saved; "
                    f"pass it again with functions={{{node!r}: ...}}"
                )
            arguments[argument] = functions[node]
        else:
            arguments[argument] = _decoded(_REGISTRY[name], argument, value, node)
    with told_as(ModelError, f"{_at(node)}{name} does not accept the saved arguments", TypeError):
        return _REGISTRY[name](**arguments)


def _declared_type(kind: type[Mechanism], argument: str) -> str:
    """What a class declares an argument to be, as it is written; nothing for one that it does not name."""
    parameter = inspect.signature(kind.__init__).parameters.get(argument)
    if parameter is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return ""
    return str(getattr(parameter.annotation, "__name__", parameter.annotation))


def _is_size(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 1


def check_kind(kind: type[Mechanism], argument: str, value: Any, node: str = "") -> None:
    """Refuse an argument of another kind than the class declares."""
    declared = _declared_type(kind, argument)
    number, whole = (isinstance(value, one) and not isinstance(value, bool) for one in (numbers.Real, numbers.Integral))
    listed = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
    listed = listed and getattr(value, "ndim", 1) > 0  # an array may be a single number
    good = {
        "int": whole,
        "bool": isinstance(value, bool | np.bool_),
        "float": number,
        "str": isinstance(value, str),
        "Sequence[int]": listed and all(_is_size(item) for item in value),
        "Space": isinstance(value, Space),
    }
    absent = value is None and declared.endswith("| None")
    if not absent and not good.get(declared.removesuffix(" | None"), True):
        raise ModelError(f"{_at(node)}{kind.__name__} takes {declared} for {argument!r}; got {value!r:.60}")


def _decoded(kind: type[Mechanism], argument: str, value: Any, node: str) -> Any:
    """A saved argument, refused where it is of another kind than the class declares; the rest it checks itself."""
    declared = _declared_type(kind, argument)
    if "Space" not in declared:
        check_kind(kind, argument, value, node)
    with told_as(ModelError, f"{_at(node)}{kind.__name__} cannot take the saved {argument!r}", TypeError, ValueError):
        read = decode(value)
        return as_setting(read) if "Setting" in declared and not isinstance(read, Mapping) else read


def arguments_of(mechanism: Mechanism) -> dict[str, Any]:
    """What a mechanism was built from, by name, with the defaults of what was left out."""
    args, kwargs = mechanism._built_from
    bound = inspect.signature(type(mechanism)).bind(*args, **kwargs)
    bound.apply_defaults()
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL and value:
            raise ModelError(f"{type(mechanism).__name__} cannot be saved: it takes *{name}; name its arguments")
        if kind is not inspect.Parameter.VAR_POSITIONAL:
            named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named


def _at(node: str) -> str:
    return f"node {node!r}: " if node else ""
