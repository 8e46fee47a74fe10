"""Save and load a model: one zip file with JSON for the structure and safetensors for the numbers.

What is read is checked like what a user gives: the graph, the arguments and sizes of mechanisms, shapes and supports of
parameters, column names and labels, learned maps. Every file that does not hold a model is an error of this library.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otpdag.backward import AmortizedMap, RowCode
from otpdag.data import Schema
from otpdag.errors import DataError, ModelError
from otpdag.graph import Graph
from otpdag.mechanisms import Mechanism, from_spec
from otpdag.mechanisms.base import Buffered, buffers_of
from otpdag.mechanisms.parameters import SIMPLEX, Parameter
from otpdag.mechanisms.predictor import Predicted
from otpdag.numerics import under
from otpdag.safe_archive import read_bundle, refusing, write_bundle
from otpdag.structure import Structure

FORMAT_VERSION = 3  # 1 had no class of a map, 2 said how far counts reach; such files are still read

WHAT = "otpdag model"
JOINT = "joint"  # the map that draws all that is hidden
MapFactory = Callable[..., AmortizedMap]


@dataclass(frozen=True)
class ModelState:
    """Everything that a model, and its file, holds beside its structure; without parameters until it is fitted.

    Attributes:
        phi: Parameters of the maps that a fit learned.
        sampler: The one of them that draws what is hidden where a node has no density.
        beside: Parameters a little beside those of the fit that fit its data as well.
    """

    schema: Schema | None = None
    naturals: dict[str, dict[str, Tensor]] | None = None
    phi: Mapping[str, Tensor] = field(default_factory=dict)
    sampler: AmortizedMap | None = None
    beside: tuple[Mapping[str, Mapping[str, Tensor]], ...] = ()


def write_archive(path: str | Path, structure: Structure, state: ModelState) -> None:
    """Write a model to ``path``; one that could not be read again is refused."""
    tensors: dict[str, Tensor] = {}
    for node, naturals in (state.naturals or {}).items():
        for name, value in naturals.items():
            if not bool(torch.isfinite(value).all()):
                raise ModelError(f"parameter {name!r} of node {node!r} is not finite: a failed fit cannot be saved")
            tensors[f"natural/{node}/{name}"] = value
    for number, other in enumerate(state.beside):
        tensors |= {f"beside/{number}/{node}/{name}": v for node, own in other.items() for name, v in own.items()}
    for node, mechanism in structure.mechanisms.items():
        tensors |= {f"buffers/{node}/{name}": value for name, value in buffers_of(mechanism).items()}
    maps = []
    if state.sampler is not None:
        name, code = state.sampler.name, state.sampler.code
        tensors |= {f"phi/{key}": value for key, value in state.phi.items()}
        for what, units in (("shift", code.shift), ("scale", code.scale)):
            tensors |= {f"code/{name}/{node}/{what}": value for node, value in units.items()}
        read = {"code": [*code.nodes], "units": [*code.shift], "roots": sorted(code.roots)}
        maps = [{"spec": state.sampler.spec(), **read}]
    description = {
        "format": WHAT,
        "version": FORMAT_VERSION,
        "fitted": state.naturals is not None,
        "graph": structure.graph.to_dict(),
        "mechanisms": {node: mechanism.spec() for node, mechanism in structure.mechanisms.items()},
        "schema": None if state.schema is None else state.schema.to_dict(),
        "maps": maps,
    }
    write_bundle(path, "model.json", description, tensors)


def read_archive(
    path: str | Path, functions: Mapping[str, Callable[..., Any]] | None, maps: Mapping[str, MapFactory] | None
) -> tuple[Structure, ModelState]:
    """Read a model's structure and the rest of its state."""
    state, tensors = read_bundle(path, "model.json", WHAT)
    with refusing(path, WHAT):
        if state.get("format") != WHAT:
            raise ValueError("model.json describes something else")
        version = state.get("version")
        if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
            raise DataError(
                f"{str(path)!r} has format version {version!r:.40}; this release reads up to {FORMAT_VERSION}: "
                "update otpdag"
            )
        _check_kinds(state)
        size = Path(path).stat().st_size
        structure = _with_buffers(_structure(state, functions, size), tensors)
        schema = None if state["schema"] is None else _schema(state["schema"], structure)
        if state["fitted"] and schema is None:
            raise ValueError("it is fitted, but says nothing of columns")
        entries = [] if structure.has_densities else [one for one in state["maps"] if "spec" in one]
        entry = next((one for one in entries if one["spec"]["name"] == JOINT), None)
        sampler = None if entry is None else _sampler(entry, structure, tensors, maps or {})
        beside = sorted({key.partition("/")[0] for key in under(tensors, "beside/")})
        return structure, ModelState(
            schema=schema,
            naturals=_naturals(structure, tensors) if state["fitted"] else None,
            phi={} if sampler is None else _phi(sampler, tensors),
            sampler=sampler,
            beside=tuple(_naturals(structure, tensors, f"beside/{number}/") for number in beside),
        )


def _check_kinds(state: Mapping[str, Any]) -> None:
    """Refuse a description whose parts are of another kind than ours."""
    kinds = {"fitted": bool, "graph": dict, "mechanisms": dict, "schema": dict | None, "maps": list}
    for key, kind in kinds.items():
        if not isinstance(state[key], kind):
            raise ValueError(f"{key!r} is {type(state[key]).__name__}")
    for node, spec in state["mechanisms"].items():
        match spec:
            case {"type": str(), "arguments": dict()}:
                continue
        raise ValueError(f"the mechanism of {node!r} is no class with arguments")


# --- structure --------------------------------------------------------------------------------------------------------


def _structure(
    state: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]] | None, size: int, free: int = 1 << 22
) -> Structure:
    """Graph and mechanisms; a description may ask for ``free`` numbers without bringing a file of that many bytes."""
    graph = Graph.from_dict(state["graph"])
    mechanisms = {node: from_spec(spec, node=node, functions=functions) for node, spec in state["mechanisms"].items()}
    if not set(graph.nodes) <= set(mechanisms):
        raise ValueError(f"nodes without a mechanism: {sorted(set(graph.nodes) - set(mechanisms))!r:.100}")
    structure = Structure.bind(graph, mechanisms, most=max(free, size))
    for node, mechanism in structure.mechanisms.items():
        mechanism.spec()  # settings that are no numbers show here, not when they are first used
        sizes = [mechanism.space.width, *(length for p in mechanism.declared().values() for length in p.shape)]
        if not all(type(length) is int and length >= 0 for length in sizes) or mechanism.space.width < 1:
            raise ValueError(f"node {node!r} has sizes that are no whole numbers")
    return structure


def _with_buffers(structure: Structure, tensors: Mapping[str, Tensor]) -> Structure:
    mechanisms = dict(structure.mechanisms)
    for node, mechanism in structure.mechanisms.items():
        # a node's name may hold a slash, a buffer's may not
        buffers = {name: value for name, value in under(tensors, f"buffers/{node}/").items() if "/" not in name}
        if not buffers or not isinstance(mechanism, Buffered):
            continue
        _check_buffers(node, mechanism, buffers)
        mechanisms[node] = mechanism.with_buffers(buffers)
    return structure.with_mechanisms(mechanisms)


def _check_buffers(node: str, mechanism: Mechanism, buffers: Mapping[str, Tensor]) -> None:
    shapes = {name: tuple(value.shape) for name, value in buffers_of(mechanism).items()}
    if isinstance(mechanism, Predicted):
        shapes = {} if set(buffers) == {"shared"} else mechanism.predictor.buffer_shapes()  # a table has no units
        for beside, one in mechanism.spreads.items():
            shapes |= {f"{beside}.{name}": shape for name, shape in one.predictor.buffer_shapes().items()}
        shapes |= {name: (mechanism.predictor.dim,) for name in mechanism.from_data if name in buffers}
        if "shared" in buffers and buffers["shared"].ndim > 1:  # earlier files have one row for all
            shapes["shared"] = (mechanism.predictor.rows, mechanism.predictor.dim)
        shapes = {name: shape for name, shape in shapes.items() if name in buffers or not name.endswith("bent")}
        for name, value in buffers.items():
            _finite(f"{node}/{name}", value, positive=name.endswith("scale"))
    if shapes and {name: tuple(value.shape) for name, value in buffers.items()} != shapes:
        raise ValueError(f"node {node!r} has units of another shape than its mechanism")


# --- columns ----------------------------------------------------------------------------------------------------------


def _schema(state: Mapping[str, Any], structure: Structure) -> Schema:
    """The columns of the nodes, with the names of categories that the file gives them; all else must be equal."""
    graph = structure.graph
    plain = Schema.of({node: structure.mechanisms[node].space for node in graph.nodes}, graph)
    labels = {node: column["labels"] for node, column in state.items() if column["labels"] is not None}
    if not all(isinstance(label, str | bool | int | float) for own in labels.values() for label in own):
        raise ValueError("it has labels that are no names or numbers")
    schema = plain.labelled({node: tuple(own) for node, own in labels.items()})
    if schema.to_dict() != state:
        raise ValueError("its columns are not those of its nodes")
    return schema


# --- numbers ----------------------------------------------------------------------------------------------------------


def _finite(name: str, value: Tensor, *, positive: bool = False) -> Tensor:
    if value.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} holds {value.dtype}")
    if not bool(torch.isfinite(value).all()) or (positive and not bool((value > 0).all())):
        raise ValueError(f"{name} holds numbers that are not {'above zero' if positive else 'finite'}")
    return value


def _naturals(
    structure: Structure, tensors: Mapping[str, Tensor], prefix: str = "natural/"
) -> dict[str, dict[str, Tensor]]:
    """Natural parameters, checked as those are that a user sets."""
    given = under(tensors, prefix)  # in an order of its own
    naturals: dict[str, dict[str, Tensor]] = {}
    for node, mechanism in structure.mechanisms.items():
        declared = mechanism.declared().items()
        naturals[node] = {name: _checked(f"{node}/{name}", given, parameter) for name, parameter in declared}
    unknown = given.keys() - {f"{node}/{name}" for node, own in naturals.items() for name in own}
    if unknown:
        raise ValueError(f"it holds parameters of no node: {sorted(unknown)!r:.100}")
    return naturals


def _checked(key: str, given: Mapping[str, Tensor], parameter: Parameter, rounding: float = 1e-4) -> Tensor:
    """A parameter; probabilities in single precision may be so far from a sum of one."""
    value = given[key]
    if tuple(value.shape) != (1, *parameter.shape):
        raise ValueError(f"parameter {key!r} has shape {tuple(value.shape)[1:]}; expected {parameter.shape}")
    held = _finite(f"parameter {key!r}", value).double()
    if parameter.support is SIMPLEX and value.dtype == torch.float32:
        total = held.sum(-1, keepdim=True)
        held = torch.where((total - 1).abs() < rounding, held / total, held)
    if value.numel() and not parameter.support.check(held[0]):
        raise ValueError(f"parameter {key!r} must be {parameter.support.name}")
    return value


# --- learned maps -----------------------------------------------------------------------------------------------------


def _sampler(
    entry: Mapping[str, Any],
    structure: Structure,
    tensors: Mapping[str, Tensor],
    given: Mapping[str, MapFactory],
    layers: int = 64,
    width: int = 1 << 14,
) -> AmortizedMap | None:
    """The map that draws what is hidden, built by its class; where that is not given, none and a warning."""
    graph, spec = structure.graph, dict(entry["spec"])
    known = {"code": graph.observed, "units": graph.nodes, "roots": entry["units"]}
    for key, nodes in (known | {"targets": graph.nodes, "explains": graph.nodes}).items():
        names = entry[key] if key in known else spec[key]
        if not isinstance(names, list) or not set(names) <= set(nodes) or len(set(names)) < len(names):
            raise ValueError(f"its map has {key!r} of other nodes")
    if not set(entry["code"]) <= set(entry["units"]):
        raise ValueError("its map lacks the units of what it reads")
    units: dict[str, dict[str, Tensor]] = {"shift": {}, "scale": {}}
    for what, held in units.items():
        for node in entry["units"]:
            key = f"code/{JOINT}/{node}/{what}"
            held[node] = _finite(key, tensors[key], positive=what == "scale")
            if tuple(held[node].shape) != (structure.mechanisms[node].space.width,):
                raise ValueError(f"its map has units of another shape than node {node!r}")
    kind, hidden = spec.pop("type"), spec["hidden"]
    few = isinstance(hidden, list) and len(hidden) <= layers
    if not few or not all(type(size) is int and 1 <= size <= width for size in hidden):
        raise ValueError(f"its map has layers {hidden!r:.60}")
    factories = {AmortizedMap.__name__: AmortizedMap, **given}
    if kind not in factories:
        text = (
            f"the model was fitted with a backward map of your own ({kind!s:.60}), whose code is not saved: the map is "
            f"left out; to have it, load with maps={{{kind!r:.60}: {kind!s:.60}}}"
        )
        warnings.warn(text, UserWarning, stacklevel=4)
        return None
    code = RowCode(tuple(entry["code"]), units["shift"], units["scale"], frozenset(entry["roots"]))
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in spec.items()}
    return factories[kind](structure, code, **arguments)


def _phi(backward: AmortizedMap, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a map; a file that holds others is damaged, or the class is another than the saved one."""
    held = {key: value for key, value in under(tensors, "phi/").items() if key.startswith(f"phi.{JOINT}.")}
    phi = {key: _finite(key, value) for key, value in held.items()}
    own = [backward] if type(backward) is AmortizedMap else []  # whose layers must fit before they are laid out
    layers = [(one.input_width(node), *one.hidden, one.output_width(node)) for one in own for node in one.targets]
    if sum(a * b for sizes in layers for a, b in pairwise(sizes)) <= sum(value.numel() for value in phi.values()):
        expected = {key: value.shape for key, value in backward.init(1, torch.Generator().manual_seed(0)).items()}
        if {key: value.shape for key, value in phi.items()} == expected:
            return phi
    raise ModelError(f"maps: {type(backward).__name__} expects other tensors than the file holds")
