"""Write a mechanism as plain data and read it again; reading runs no code that is not already imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.mechanisms.parameters import Fixed, Start, Tied, as_setting
from otpdag.spaces import Space, space_from

if TYPE_CHECKING:
    from otpdag.mechanisms.base import Mechanism


_FUNCTION = {"function": True}
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


def holds_code(spec: Mapping[str, Any]) -> bool:
    """Whether some argument of a mechanism is a function or module, which is never saved."""
    return any(value == _FUNCTION for value in spec["arguments"].values())


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
    name = spec["type"]
    if name not in _REGISTRY:
        raise ModelError(
            f"{_at(node)}unknown mechanism {name!r}; known are {', '.join(sorted(_REGISTRY))}. "
            f"Register your own class with m.register({name}) before loading"
        )
    arguments: dict[str, Any] = {}
    for argument, value in spec["arguments"].items():
        if value == _FUNCTION:
            if functions is None or node not in functions:
                raise ModelError(
                    f"{_at(node)}the {argument!r} of {name} is code and was not saved; "
                    f"pass it again with functions={{{node!r}: ...}}"
                )
            arguments[argument] = functions[node]
        else:
            _check_plain(_REGISTRY[name], argument, value, node)
            arguments[argument] = _decode(value)
    try:
        return _REGISTRY[name](**arguments)
    except TypeError as error:
        raise ModelError(f"{_at(node)}{name} does not accept the saved arguments: {error}") from None


def _check_plain(kind: type[Mechanism], argument: str, value: Any, node: str) -> None:
    """Refuse an argument of another kind than the class declares; what it declares otherwise it checks itself."""
    parameter = inspect.signature(kind.__init__).parameters.get(argument)
    declared = "" if parameter is None else str(getattr(parameter.annotation, "__name__", parameter.annotation))
    good = {
        "int": type(value) is int,
        "bool": isinstance(value, bool),
        "float": isinstance(value, int | float) and not isinstance(value, bool),
        "float | None": value is None or (isinstance(value, int | float) and not isinstance(value, bool)),
        "str": isinstance(value, str),
        "Sequence[int]": isinstance(value, list) and all(type(item) is int and item >= 1 for item in value),
    }
    if not good.get(declared, True):
        raise ModelError(f"{_at(node)}{kind.__name__} takes {declared} for {argument!r}; got {value!r:.60}")


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


def described(mechanism: Mechanism) -> dict[str, Any]:
    """A mechanism as plain data; see :meth:`Mechanism.spec`."""
    kind, arguments = type(mechanism), {}
    parameters = inspect.signature(kind).parameters
    for name, value in arguments_of(mechanism).items():
        if value is not None and name in parameters and "Setting" in str(parameters[name].annotation):
            value = as_setting(value)
        arguments[name] = _encode(value, kind, name)
    return {"type": kind.__name__, "arguments": arguments}


def _encode(value: Any, owner: type, name: str) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Fixed():
            return {"fixed": _without_nan(np.asarray(value.value, dtype=float).tolist())}
        case Start():
            return {"start": np.asarray(value.value, dtype=float).tolist()}
        case Tied():
            return {"tied": value.name}
        case Space():
            sizes = value.spec()
            return {"space": sizes.pop("kind"), **sizes}
        case np.ndarray() | np.generic() | Tensor():
            return value.tolist()
        case list() | tuple():
            return [_encode(item, owner, name) for item in value]
        case _ if callable(value):
            return dict(_FUNCTION)
    raise ModelError(f"{owner.__name__} cannot be saved: its {name!r} is {value!r}, neither plain data nor a function")


def _without_nan(value: Any) -> Any:
    """Numbers in nested lists, None for those that are NaN: entries to be learned."""
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if np.isnan(value) else value


def _decode(value: Any) -> Any:
    match value:
        case {"fixed": item}:
            return Fixed(np.asarray(item, dtype=float))
        case {"start": item}:
            return Start(np.asarray(item, dtype=float))
        case {"tied": str(item)}:
            return Tied(item)
        case {"space": str(item), **sizes} if item in Space.kinds:
            return space_from({"kind": item, **{str(key): size for key, size in sizes.items()}})
        case list():
            return [_decode(item) for item in value]
        case dict():
            raise ModelError(f"a saved argument cannot be read: {value}")
    return value


def _at(node: str) -> str:
    return f"node {node!r}: " if node else ""
