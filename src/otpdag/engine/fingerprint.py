"""A short text that two data sets share only if they are equal: what a checkpoint recognises its data by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from otpdag.data.parts import Parts
from otpdag.model import Model

__all__ = ["fingerprint"]


def fingerprint(value: Any) -> str:
    """Twelve letters of a hash of everything that a value holds: arrays, tensors, and what is nested in dataclasses.

    Tables in parts are read through once. Models are left out, and so is everything else that has no content of its
    own, as functions have none.

    >>> one, other = np.arange(3.0), np.array([0.0, 1.0, 2.5])
    >>> fingerprint({"x": one}) == fingerprint({"x": one.copy()}), fingerprint({"x": one}) == fingerprint({"x": other})
    (True, False)
    """
    digest = hashlib.sha256()
    for piece in _pieces(value):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()[:12]


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode()
        yield repr(value.tolist()).encode() if value.dtype.hasobject else np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Parts):
        yield from value.each(_digest)
    elif isinstance(value, str | bytes | int | float | None):
        yield repr(value).encode()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _pieces(item)
    elif isinstance(value, frozenset | set):
        yield repr(sorted(map(repr, value))).encode()
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _pieces(item)
    elif is_dataclass(value) and not isinstance(value, type | Model):
        for field in fields(value):
            yield field.name.encode()
            yield from _pieces(getattr(value, field.name))
    elif not isinstance(value, Model):
        yield type(value).__name__.encode()


def _digest(part: pd.DataFrame, number: int) -> bytes:
    """A hash of a part's cells, in their order."""
    return hashlib.sha256(pd.util.hash_pandas_object(part, index=False).to_numpy().tobytes()).digest()
