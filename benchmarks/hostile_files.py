"""Hostile variants of saved models and estimators: every one must be refused by an error of the library, or work.

:func:`variants` takes the bytes of a good file and yields damaged ones: values and types of the JSON changed one by
one, keys removed, tensors of other shapes, types and supports, truncated and flipped bytes, bombs. :func:`outcome`
loads one, uses what comes back and tells what happened; :func:`survey` does so for all of them, with peak memory.
"""

from __future__ import annotations

import copy
import io
import json
import random
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from otpdag.errors import OtpdagError

__all__ = ["Survey", "Variant", "outcome", "peak_of", "survey", "use_model", "variants"]

TENSORS = "tensors.safetensors"
NUMBERS = (-1, 0, 2, 1.5, 10**9, 10**30, -1e300)
TEXTS = ("", "x", "../../x", "\x1b[31m")
WRONG: tuple[Any, ...] = (None, True, *NUMBERS, *TEXTS, [], [None], [[[[]]]], {}, {"a": 1})
BOMB = 1 << 28  # bytes that a bomb unpacks to, more than loading may need


@dataclass(frozen=True)
class Variant:
    """A damaged file, and what was done to it."""

    name: str
    content: bytes


def variants(saved: bytes, *, seed: int = 0, most: int = 600) -> Iterator[Variant]:
    """Damaged copies of a saved file; of the many changes of single values a random choice.

    Args:
        saved: The bytes of a good file.
        seed: Determines the choice.
        most: How many changes of single values there are at most.
    """
    with zipfile.ZipFile(io.BytesIO(saved)) as archive:
        described = next(name for name in archive.namelist() if name.endswith(".json"))
        state, packed = json.loads(archive.read(described)), archive.read(TENSORS)
    tensors = load_tensors(packed)
    chance = random.Random(seed)
    changes = list(_changed_values(state))
    for name, changed in chance.sample(changes, min(most, len(changes))):
        yield Variant(name, _packed(described, json.dumps(changed), packed))
    for name, changed in _changed_tensors(tensors):
        yield Variant(name, _packed(described, json.dumps(state), save_tensors(changed)))
    for name, text in _odd_texts(state):
        yield Variant(name, _packed(described, text, packed))
    for name, content in _odd_tensors(packed):
        yield Variant(name, _packed(described, json.dumps(state), content))
    yield from _damaged_bytes(saved, chance)
    yield from _odd_archives(described, json.dumps(state), packed)


def _packed(described: str, text: str | bytes, tensors: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr(described, text)
        archive.writestr(TENSORS, tensors)
    return buffer.getvalue()


# --- the description --------------------------------------------------------------------------------------------------


def _changed_values(state: Any) -> Iterator[tuple[str, Any]]:
    """Every value replaced by every wrong one, every entry removed or doubled, keys renamed."""
    for place in _places(state):
        for wrong in WRONG:
            changed = copy.deepcopy(state)
            _holder(changed, place)[place[-1]] = wrong
            yield f"{_shown(place)} = {wrong!r:.20}", changed
        changed = copy.deepcopy(state)
        holder = _holder(changed, place)
        held = holder[place[-1]]
        if isinstance(holder, list):
            holder.insert(place[-1], copy.deepcopy(held))
            yield f"{_shown(place)} doubled", changed
        else:
            changed_name = copy.deepcopy(state)
            own = _holder(changed_name, place)
            own[f"{place[-1]}x"] = own.pop(place[-1])
            yield f"{_shown(place)} renamed", changed_name
        changed = copy.deepcopy(state)
        del _holder(changed, place)[place[-1]]
        yield f"{_shown(place)} removed", changed


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from _places(item, (*at, key))


def _holder(state: Any, place: tuple[Any, ...]) -> Any:
    for key in place[:-1]:
        state = state[key]
    return state


def _shown(place: tuple[Any, ...]) -> str:
    return ".".join(map(str, place))


def _odd_texts(state: Any) -> Iterator[tuple[str, str | bytes]]:
    text = json.dumps(state)
    yield "no JSON", "model"
    yield "empty JSON", ""
    yield "JSON of a list", "[1, 2]"
    yield "JSON in another encoding", text.encode("utf-16")
    yield "JSON with broken bytes", b"\xff\xfe" + text.encode()
    yield "NaN in JSON", text[:-1] + ', "count_range": {"x": NaN}}'
    yield "infinity in JSON", text[:-1] + ', "count_range": {"x": Infinity}}'
    yield "a number of many digits", text[:-1] + f', "version": {"9" * 5000}}}'
    for depth in (100, 1_000, 100_000, 2_000_000):
        yield f"lists {depth} deep", text[:-1] + ', "graph": ' + "[" * depth + "]" * depth + "}"
        yield f"objects {depth} deep", text[:-1] + ', "graph": ' + '{"a":' * depth + "1" + "}" * depth + "}"
    yield "a million empty lists", text[:-1] + ', "more": [' + ",".join(["[]"] * 1_000_000) + "]}"
    yield "ten million numbers", text[:-1] + ', "more": [' + ",".join(["0"] * 10_000_000) + "]}"
    if "graph" in state:
        yield from _odd_graphs(state)


def _odd_graphs(state: Any) -> Iterator[tuple[str, str]]:
    nodes = list(state["graph"]["nodes"])
    chain = [f"n{i}" for i in range(50_000)]
    graphs = {
        "a cycle": {"edges": [[nodes[0], nodes[-1]], [nodes[-1], nodes[0]]]},
        "an edge to itself": {"edges": [[nodes[0], nodes[0]]]},
        "an edge to nowhere": {"edges": [[nodes[0], "nowhere"]]},
        "a lag of a billion": {"lags": [[nodes[0], nodes[0], 10**9]]},
        "a lag of zero": {"lags": [[nodes[0], nodes[0], 0]]},
        "a negative lag": {"lags": [[nodes[0], nodes[0], -3]]},
        "all nodes hidden": {"hidden": nodes},
        "no nodes": {"nodes": [], "edges": [], "lags": [], "hidden": []},
        "a long cycle": {"nodes": chain, "edges": [[a, b] for a, b in zip(chain, chain[1:] + chain[:1], strict=True)]},
        "a name with a line end": {"nodes": [*nodes, "a\nb"]},
    }
    for name, change in graphs.items():
        yield name, json.dumps({**state, "graph": {**state["graph"], **change}})
    for node, spec in state["mechanisms"].items():
        for argument in ("dim", "size", "categories", "network"):
            for value in (10**6, 10**9, [10**5, 10**5], [10**9], [-3], [2.5], ["a"], [1] * 10_000):
                arguments = {**spec["arguments"], argument: value}
                mechanisms = {**state["mechanisms"], node: {**spec, "arguments": arguments}}
                yield f"{node}: {argument} = {value!r:.20}", json.dumps({**state, "mechanisms": mechanisms})


# --- the tensors ------------------------------------------------------------------------------------------------------


def _changed_tensors(tensors: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "NaN": lambda t: _first_entry(t, float("nan")),
        "infinite": lambda t: _first_entry(t, float("inf")),
        "negative": lambda t: -t.abs() - 1,
        "zero": torch.zeros_like,
        "huge": lambda t: _first_entry(t, 1e300 if t.dtype == torch.float64 else 1e38),
        "one entry less": lambda t: t.flatten()[:-1].clone(),
        "one axis more": lambda t: t.unsqueeze(0).contiguous(),
        "flat": lambda t: t.flatten().clone(),
        "two replicas": lambda t: torch.cat([t, t]),
        "empty": lambda t: t.flatten()[:0].clone(),
        "a single number": lambda t: torch.tensor(0.5, dtype=t.dtype),
        "whole numbers": lambda t: t.nan_to_num().clamp(-(2**31), 2**31).long(),
        "half precision": lambda t: t.half(),
        "Booleans": lambda t: t > 0,
        "far too many": lambda t: torch.zeros(100_000, dtype=t.dtype),
    }
    for key in tensors:
        for name, change in changes.items():
            yield f"{key} {name}", {**tensors, key: change(tensors[key])}
        yield f"{key} missing", {name: value for name, value in tensors.items() if name != key}
        yield f"{key} renamed", {(name + "x" if name == key else name): value for name, value in tensors.items()}
    yield "a tensor too many", {**tensors, "natural/nowhere/loc": torch.zeros(1, 1)}
    yield "no tensors", {}


def _first_entry(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    if changed.numel():
        changed.view(-1)[0] = value
    return changed


def _odd_tensors(packed: bytes) -> Iterator[tuple[str, bytes]]:
    size = struct.unpack("<Q", packed[:8])[0]
    header, body = packed[8 : 8 + size], packed[8 + size :]

    def again(text: bytes) -> bytes:
        return struct.pack("<Q", len(text)) + text + body

    for declared in (0, 1, size + 10**6, 2**40, 2**63, 2**64 - 1):
        yield f"a header of {declared} bytes", struct.pack("<Q", declared) + header + body
    table = json.loads(header)
    first = next((name for name in table if name != "__metadata__"), None)
    if first is not None:
        shapes: list[Any] = [[10**9, 10**9], [2**62, 4], [-1], "x"]
        offsets: list[Any] = [[0, 2**50], [8, 0], []]
        for entry in (
            *({"shape": shape} for shape in shapes),
            *({"data_offsets": offset} for offset in offsets),
            {"dtype": "F4096"},
            {"dtype": None},
        ):
            changed = json.dumps({**table, first: {**table[first], **entry}}).encode()
            yield f"{first}: {entry}", again(changed)
    yield "a deep header", again(b'{"a":' * 50_000 + b"1" + b"}" * 50_000)
    yield "a header of spaces", again(header + b" " * (20 << 20))
    yield "tensors that are text", b"tensors"
    yield "tensors that are nothing", b""
    yield "half of the tensors", packed[: len(packed) // 2]


# --- the file ---------------------------------------------------------------------------------------------------------


def _damaged_bytes(saved: bytes, chance: random.Random, flips: int = 40) -> Iterator[Variant]:
    for share in (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999):
        yield Variant(f"cut off at {share}", saved[: int(share * len(saved))])
    for number in range(flips):
        damaged = bytearray(saved)
        for _ in range(chance.choice((1, 4, 64))):
            damaged[chance.randrange(len(saved))] = chance.randrange(256)
        yield Variant(f"flipped bytes {number}", bytes(damaged))
    yield Variant("something before", b"\x00" * 1000 + saved)
    yield Variant("something behind", saved + b"\x00" * 1000)
    yield Variant("noise", chance.randbytes(len(saved)))


def _odd_archives(described: str, text: str, packed: bytes) -> Iterator[Variant]:
    yield Variant("a bomb of tensors", _bomb({described: text.encode()}, TENSORS))
    yield Variant("a bomb of text", _bomb({TENSORS: packed}, described))
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        yield Variant(f"packing {method}", _packed(described, text, packed, method))
    good = _packed(described, text, packed)
    for offset, name in ((8, "encrypted"), (10, "of an unknown packing"), (24, "longer than it says")):
        damaged = bytearray(good)
        at = damaged.find(b"PK\x01\x02")
        damaged[at + offset] = damaged[at + offset] ^ 0x61
        yield Variant(f"a member {name}", bytes(damaged))
    with io.BytesIO() as buffer:
        with zipfile.ZipFile(buffer, "w") as archive:
            for number in range(60_000):
                archive.writestr(f"{number}", b"")
            archive.writestr(described, text)
            archive.writestr(TENSORS, packed)
        yield Variant("sixty thousand members", buffer.getvalue())
    yield Variant("only text", _only(described, text.encode()))
    yield Variant("only tensors", _only(TENSORS, packed))


def _only(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


def _bomb(others: dict[str, bytes], name: str) -> bytes:
    """A zip file of a few megabytes that unpacks to gigabytes of zeros."""
    buffer, piece = io.BytesIO(), bytes(1 << 24)
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for other, content in others.items():
            archive.writestr(other, content)
        with archive.open(name, "w", force_zip64=True) as member:
            for _ in range(BOMB // len(piece)):
                member.write(piece)
    return buffer.getvalue()


# --- what happens -----------------------------------------------------------------------------------------------------


@dataclass
class Survey:
    """What became of hostile files: how many were refused, how many work, which broke, and the largest peak."""

    outcomes: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    greedy: list[str] = field(default_factory=list)
    peak: int = 0


def outcome(path: Path, load: Callable[[Path], Any], use: Callable[[Any], Any]) -> str:
    """``refused`` by an error of the library, ``works``, or the error that should not have come."""
    try:
        use(load(path))
    except OtpdagError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "works"


def survey(
    files: Iterator[Variant],
    folder: Path,
    load: Callable[[Path], Any],
    use: Callable[[Any], Any],
    *,
    room: int = 200 << 20,
) -> Survey:
    """Load and use every variant; a file may cost four times its size or ``room`` bytes."""
    told, path = Survey(), folder / "hostile.otp"
    for variant in files:
        path.write_bytes(variant.content)
        happened, peak = peak_of(lambda: outcome(path, load, use))
        known = happened in ("refused", "works")
        told.outcomes[happened if known else "broken"] += 1
        told.peak = max(told.peak, peak)
        if not known:
            told.broken.append(f"{variant.name}: {happened}")
        if peak > max(room, 4 * len(variant.content)):
            told.greedy.append(f"{variant.name}: {peak:,} bytes")
    path.unlink(missing_ok=True)
    return told


def peak_of(function: Callable[[], str]) -> tuple[str, int]:
    """What a function returns, and how many bytes of memory it needed at its peak (0 where the system cannot tell)."""
    status = Path("/proc/self/status")
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _kilobytes(status, "VmRSS")
    except OSError:
        return function(), 0
    result = function()
    return result, max(0, _kilobytes(status, "VmHWM") - before) * 1024


def _kilobytes(status: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name))


def use_model(model: Any) -> None:
    """What a user would do with a model that was loaded."""
    repr(model)
    model._repr_html_()
    if not model.is_fitted:
        return
    model.params()
    dynamic = model.graph.is_dynamic
    rows = model.sample(4, seed=0, length=3 if dynamic else None)
    table = rows.drop(columns=[name for name in rows.columns if name.split(".")[0] in model.graph.hidden])
    model.distance(table.drop(columns=["sequence", "time"]) if dynamic else table)
    model.impute(table.drop(columns=["sequence", "time"]) if dynamic else table, draws=2)
