"""Fingerprints: a hash of everything that a result depends on, by which a checkpoint knows its run.

A value is walked down to numbers and text. What the walk does not know says itself what it is made of, as it would to
:mod:`copy`; what cannot is an error: two values that are not looked into would seem equal.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

import numpy as np
import pandas as pd
import scipy as sp
from torch import Tensor

from otpdag.data.parts import Parts
from otpdag.errors import DataError
from otpdag.graph import Graph
from otpdag.mechanisms.base import Mechanism, arguments_of
from otpdag.model import Model


def fingerprint(value: Any) -> str:
    """Twelve letters of a hash of everything that a value holds.

    Of a model these are its graph, its mechanisms and what they were given, not what was estimated. Of a function, its
    code with the values that it refers to. Tables in parts are read through once.

    Raises:
        DataError: Something in it cannot be looked into.

    >>> one, other = np.arange(3.0), np.array([0.0, 1.0, 2.5])
    >>> fingerprint({"x": one}) == fingerprint({"x": one.copy()}), fingerprint({"x": one}) == fingerprint({"x": other})
    (True, False)
    >>> len(fingerprint("x"))
    12
    """
    try:
        return _digest(value, {}).hex()[:12]
    except RecursionError:
        raise DataError("a checkpoint cannot look into a value that is a part of itself") from None


def _digest(value: Any, known: dict[int, int]) -> bytes:
    """The hash of a value; ``known`` numbers the functions and classes that were met, which may refer to themselves."""
    if isinstance(value, types.FunctionType | type):
        if id(value) in known:
            return b"%d" % known[id(value)]
        known[id(value)] = len(known)
    digest = hashlib.sha256(type(value).__qualname__.encode())
    for piece in _pieces(value):
        told = piece if isinstance(piece, bytes) else _digest(piece, known)
        digest.update(len(told).to_bytes(8, "little") + told)
    return digest.digest()


def _pieces(value: Any) -> Iterator[Any]:
    """What a value is made of: bytes, or further values."""
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes():
            yield repr(value).encode("utf-8", "surrogatepass")
        case Tensor():
            yield f"{value.device} {value.dtype}"
            dense = value.detach().cpu().to_dense()
            yield (dense.double() if value.dtype.itemsize < 4 and value.is_floating_point() else dense).numpy()
        case np.ndarray():
            yield f"{value.dtype} {value.shape}".encode()
            yield value.tolist() if value.dtype.hasobject else np.ascontiguousarray(value).tobytes()
        case pd.DataFrame() | pd.Series() | pd.Index():
            frame = value if isinstance(value, pd.DataFrame) else value.to_frame()
            yield [
                (name, str(kind), *_kinds_of_cells(frame.iloc[:, at]))
                for at, (name, kind) in enumerate(frame.dtypes.items())
            ]
            yield pd.util.hash_pandas_object(frame, index=not isinstance(value, pd.DataFrame)).to_numpy()
        case Parts():
            yield from value.each(_of_part)
        case Model():
            yield value.graph
            yield value.mechanisms
        case Graph():
            yield value.to_dict()
        case Mechanism():
            yield type(value)
            yield arguments_of(value)
        case Mapping():
            yield list(value.items())
        case set() | frozenset():
            yield sorted(_digest(item, {}) for item in value)
        case list() | tuple():
            yield from value
        case type() | types.FunctionType() | types.BuiltinFunctionType() | types.ModuleType() | types.CodeType():
            yield from _pieces_of_code(value)
        case _ if is_dataclass(value):
            yield type(value)
            yield {one.name: getattr(value, one.name) for one in fields(value)}
        case _ if sp.sparse.issparse(value):
            rows = cast(Any, value).tocsr()
            yield [rows.shape, rows.data, rows.indices, rows.indptr]
        case _:
            yield from _pieces_by_itself(value)


def _kinds_of_cells(column: pd.Series) -> Iterator[Any]:
    """What pandas' hash of a column leaves out: the order of categories, and of what type each object is."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        yield [column.dtype.categories.tolist(), bool(column.dtype.ordered)]
    elif column.dtype == object:
        yield " ".join(type(cell).__qualname__ for cell in column)


def _of_part(part: pd.DataFrame, number: int) -> bytes:
    return _digest(part, {})


def _pieces_of_code(value: Any) -> Iterator[Any]:
    """A name; of an installed package also its version, of other code that code and the values that it refers to."""
    if isinstance(value, types.CodeType):
        yield [value.co_code, value.co_names, value.co_varnames, value.co_consts]
        return
    module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__ or "builtins"
    yield f"{module}.{getattr(value, '__qualname__', '')}"
    # what is compiled from text says that it belongs to builtins
    made_here = isinstance(value, types.FunctionType) and module == "builtins"
    if not made_here and _is_installed(module):
        yield str(getattr(sys.modules.get(module.partition(".")[0]), "__version__", ""))
    elif isinstance(value, types.FunctionType):
        yield [value.__code__, value.__defaults__, value.__kwdefaults__, inspect.getclosurevars(value).nonlocals]
        yield dict(_referred_to(value.__globals__, frozenset(_names_in(value.__code__))))
    elif isinstance(value, type):
        own = {name: _inner(item) for name, item in vars(value).items() if name != "_abc_impl"}
        yield [value.__bases__, {name: item for name, item in own.items() if name[:2] != "__" or callable(item[0])}]


def _is_installed(module: str) -> bool:
    """Whether its version says what a module does: packages, Python's own, ours."""
    package = module.partition(".")[0]
    place = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" in place or "dist-packages" in place or package in {*sys.stdlib_module_names, "otpdag"}


def _referred_to(space: Mapping[str, Any], names: frozenset[str], within: str = "") -> Iterator[tuple[str, Any]]:
    """What code with these names finds in a module, and in modules of the user's own that are known there."""
    for name in sorted(names & space.keys()):
        item = space[name]
        yield within + name, item
        if isinstance(item, types.ModuleType) and not _is_installed(item.__name__):
            yield from _referred_to(vars(item), names - {name}, f"{within}{name}.")


def _names_in(code: types.CodeType) -> Iterator[str]:
    """What a function refers to, and what is defined in it."""
    yield from code.co_names
    for one in code.co_consts:
        yield from _names_in(one) if isinstance(one, types.CodeType) else ()


def _inner(member: Any) -> list[Any]:
    """A member of a class: of properties and methods what is behind them."""
    methods = property | classmethod | staticmethod | functools.partialmethod | functools.cached_property
    behind = ("fget", "fset", "__func__", "func", "args", "keywords") if isinstance(member, methods) else ()
    return [getattr(member, name) for name in behind if hasattr(member, name)] or [member]


def _pieces_by_itself(value: Any) -> Iterator[Any]:
    """What a value says that it can be built from."""
    reduced = copyreg.dispatch_table.get(type(value), lambda value: value.__reduce_ex__(4))
    try:
        rebuilt = reduced(value)
    except Exception as error:
        raise DataError(
            f"a checkpoint needs to know all that a fit depends on; it cannot look into {type(value).__name__} "
            f"{value!r:.60}: {error}"
        ) from None
    if isinstance(rebuilt, str):  # no more than a name, which tells all where a version does, or code that it wraps
        if not _is_installed(type(value).__module__):
            raise DataError(f"a checkpoint cannot look into {value!r:.60}, which is known by its name alone")
        rebuilt = (rebuilt, getattr(value, "__wrapped__", None))
    for piece in rebuilt:
        yield list(piece) if isinstance(piece, Iterator) else piece
