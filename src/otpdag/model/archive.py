"""Save and load a model: one zip file with JSON for the structure and safetensors for the numbers.

Nothing is pickled, so loading a file runs no code from it.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from otpdag.backward.amortized import AmortizedMap, RowCode
from otpdag.data import Schema
from otpdag.errors import DataError
from otpdag.files import replacing
from otpdag.graph import Graph
from otpdag.mechanisms import from_spec
from otpdag.structure import Structure

__all__ = ["FORMAT_VERSION", "read_archive", "write_archive"]

FORMAT_VERSION = 1

State = dict[str, Any]


def write_archive(
    path: str | Path,
    structure: Structure,
    schema: Schema | None,
    naturals: Mapping[str, Mapping[str, Tensor]] | None,
    phi: Mapping[str, Tensor],
    maps: tuple[AmortizedMap, ...],
    count_range: Mapping[str, float],
) -> None:
    """Write a model to ``path``."""
    tensors: dict[str, Tensor] = {f"phi/{key}": value for key, value in phi.items()}
    for node, found in (naturals or {}).items():
        tensors |= {f"natural/{node}/{name}": value for name, value in found.items()}
    for node, mechanism in structure.mechanisms.items():
        tensors |= {f"buffers/{node}/{name}": value for name, value in mechanism.buffers().items()}
    for backward in maps:
        for node in backward.code.shift:
            tensors[f"code/{backward.name}/{node}/shift"] = backward.code.shift[node]
            tensors[f"code/{backward.name}/{node}/scale"] = backward.code.scale[node]
    state = {
        "format": "otpdag model",
        "version": FORMAT_VERSION,
        "fitted": naturals is not None,
        "graph": structure.graph.to_dict(),
        "mechanisms": {node: mechanism.spec() for node, mechanism in structure.mechanisms.items()},
        "schema": None if schema is None else schema.to_dict(),
        "maps": [_map_state(backward) for backward in maps],
        "count_range": dict(count_range),
    }
    content = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.json", json.dumps(state, indent=1))
        archive.writestr("tensors.safetensors", save_tensors(content))


def _map_state(backward: AmortizedMap) -> State:
    return {
        "name": backward.name,
        "code": list(backward.code.nodes),
        "units": list(backward.code.shift),
        "roots": sorted(backward.code.roots),
        "targets": list(backward.targets),
        "hidden": list(backward.hidden),
        "explains": list(backward.explains),
    }


def read_archive(path: str | Path, functions: Mapping[str, Callable[..., Any]] | None) -> tuple[Structure, State]:
    """Read a model's structure and the rest of its state."""
    state, tensors = _open(Path(path))
    graph = Graph.from_dict(state["graph"])
    mechanisms = {node: from_spec(spec, node=node, functions=functions) for node, spec in state["mechanisms"].items()}
    structure = _with_buffers(Structure.bind(graph, mechanisms), tensors)
    found = _under(tensors, "natural/")  # in an order of its own
    naturals = {
        node: {name: found[f"{node}/{name}"] for name in mechanism.declared() if f"{node}/{name}" in found}
        for node, mechanism in structure.mechanisms.items()
    }
    return structure, {
        "schema": None if state["schema"] is None else Schema.from_dict(state["schema"]),
        "naturals": naturals if state["fitted"] else None,
        "phi": _under(tensors, "phi/"),
        "maps": tuple(_read_map(structure, entry, tensors) for entry in state["maps"]),
        "count_range": state["count_range"],
    }


def _open(path: Path) -> tuple[State, dict[str, Tensor]]:
    if not path.is_file():
        raise DataError(f"no model at {str(path)!r}")
    try:
        with zipfile.ZipFile(path) as archive:
            state = json.loads(archive.read("model.json"))
            if not isinstance(state, dict) or state.get("format") != "otpdag model":
                raise ValueError("model.json describes something else")
            _check_version(path, state.get("version"))
            tensors = load_tensors(archive.read("tensors.safetensors"))
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, SafetensorError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{str(path)!r} is not a saved otpdag model: {error}") from None
    return state, tensors


def _check_version(path: Path, version: object) -> None:
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise DataError(
            f"{str(path)!r} has format version {version!r}; this release reads up to {FORMAT_VERSION}: update otpdag"
        )


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}


def _with_buffers(structure: Structure, tensors: Mapping[str, Tensor]) -> Structure:
    mechanisms = dict(structure.mechanisms)
    for node, mechanism in structure.mechanisms.items():
        # a node's name may hold a slash, a buffer's may not
        buffers = {name: value for name, value in _under(tensors, f"buffers/{node}/").items() if "/" not in name}
        mechanisms[node] = mechanism.with_buffers(buffers) if buffers else mechanism
    return structure.with_mechanisms(mechanisms)


def _read_map(structure: Structure, entry: State, tensors: Mapping[str, Tensor]) -> AmortizedMap:
    found = _under(tensors, f"code/{entry['name']}/")
    shift = {node: found[f"{node}/shift"] for node in entry["units"]}
    scale = {node: found[f"{node}/scale"] for node in entry["units"]}
    code = RowCode(tuple(entry["code"]), shift, scale, frozenset(entry["roots"]))
    return AmortizedMap(
        structure, code, tuple(entry["targets"]), tuple(entry["hidden"]), entry["name"],
        tuple(entry["explains"]),
    )  # fmt: skip
