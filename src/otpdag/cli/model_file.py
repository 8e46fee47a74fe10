"""Model files: a graph and its mechanisms as YAML, checked before anything else happens; a first one for a table.

.. code-block:: yaml

    edges: [[season, load], [load, price], [load, outages]]
    hidden: [load]
    nodes:
      season: {type: Categorical, size: 4}
      load: Normal
      price: {type: Normal, scale: 0.5}    # a number fixes; {start: 0.5} starts; {tie: sigma} shares
      outages: Poisson

Nodes that are not listed get a mechanism by the type of their column. An edge with a third entry is lagged.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, cast

import numpy as np
import pandas as pd
import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    WithJsonSchema,
    create_model,
    field_validator,
)

from otpdag.data import ColumnType, column_types
from otpdag.data.columns import count_categories
from otpdag.errors import DataError, GraphError, ModelError, listed, printable
from otpdag.graph import MOST_STEPS_BACK, Graph, Lag
from otpdag.mechanisms import Mechanism
from otpdag.mechanisms.base import registered
from otpdag.mechanisms.parameters import Fixed, Setting, Start, Tied, as_setting, between, pseudo_counts, ridge
from otpdag.model import Model
from otpdag.spaces import Space, space_from

MOST_COORDINATES = 100_000  # of a node
PRIORS: Mapping[str, Callable[[Any], Setting]] = {"ridge": ridge, "pseudo_counts": pseudo_counts}
NAME_HINT = "put a name that YAML reads as something else (yes, no, on, 12) in quotes"


class ModelFile(BaseModel):
    """What a model file says: edges, hidden nodes, and the mechanisms of the nodes it lists.

    Attributes:
        edges: Pairs ``[parent, child]``, or ``[parent, child, lag]`` for an edge from an earlier time step.
        hidden: Nodes that no column shows.
        nodes: For each listed node the name of a mechanism, or its ``type`` with arguments.

    >>> file = parse_model_file("{edges: [[z, x]], hidden: [z], nodes: {z: {type: Categorical, size: 3}}}")
    >>> print(file.build(pd.DataFrame({"x": [0.1, 2.5, 3.2]})))
    Model with 2 nodes (not fitted)
      z: Categorical, hidden
      x: Normal <- z
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    edges: list[Annotated[list[Any], Field(min_length=2, max_length=3)]] = Field(default_factory=list)
    hidden: list[StrictStr] = Field(default_factory=list)
    nodes: dict[StrictStr, dict[StrictStr, Any] | None] = Field(default_factory=dict)

    @field_validator("nodes", mode="before")
    @classmethod
    def _read_short_forms(cls, nodes: Any) -> Any:
        """``outages: Poisson`` means ``outages: {type: Poisson}``."""
        if not isinstance(nodes, Mapping):
            return nodes
        return {node: {"type": entry} if isinstance(entry, str) else entry for node, entry in nodes.items()}

    def graph(self) -> Graph:
        """The graph; listed nodes come first, in the order of the list."""
        edges = [_edge(number, edge) for number, edge in enumerate(self.edges)]
        return Graph(edges, nodes=self.nodes, hidden=self.hidden)

    def build(self, data: pd.DataFrame) -> Model:
        """The model for a table; nodes that are not listed are chosen by the type of their column.

        Args:
            data: A table with a column for each observed node.

        Raises:
            GraphError: The edges have a cycle, or ``hidden`` names no node.
            ModelError: A mechanism or argument does not exist or does not fit; the message names the place.
            DataError: A column of numbers holds text; the message names the cell.
        """
        graph = self.graph()
        self._check_places(graph, data)
        for node in graph.observed:
            if self.nodes.get(node) is None and node in data.columns and isinstance(data[node], pd.Series):
                check_numbers(data[node])
        given = {node: _mechanism(node, entry, graph, data) for node, entry in self.nodes.items() if entry is not None}
        return Model.from_frame(graph, data, mechanisms=given)

    def _check_places(self, graph: Graph, data: pd.DataFrame) -> None:
        joined = {str(end) for edge in self.edges for end in edge[:2]}
        for node in graph.hidden:
            if self.nodes.get(node) is None:
                raise ModelError(
                    f"hidden: node {node!r} has no column to choose a mechanism by: list it under nodes, for "
                    f"instance `{node}: Normal`"
                )
        for node in self.nodes:
            if node not in joined and node not in data.columns and f"{node}.0" not in data.columns:
                raise ModelError(
                    f"nodes.{node}: neither an edge nor a column has this name; edges name {_listed(sorted(joined))}"
                )


def check_numbers(column: pd.Series[Any]) -> None:
    """Refuse text in a column most of whose cells are numbers: one odd cell would make each of them a category.

    A number with a decimal comma, groups of digits, a percent or currency sign is one for a reader.

    Raises:
        DataError: With the row and the column of the first cell that is no number.

    >>> check_numbers(pd.Series(["1.5", "2,5", "3.5"], name="x"))
    Traceback (most recent call last):
    otpdag.errors.DataError: column 'x' holds numbers, but '2,5' in row 1 (line 3) is none; ...
    """
    if pd.api.types.is_numeric_dtype(column.dtype) or isinstance(column.dtype, pd.CategoricalDtype):
        return
    present = column.reset_index(drop=True).dropna().astype(str)
    is_number, bare = pd.to_numeric(present, errors="coerce").notna(), present.str.strip("%€$£ ")
    grouped = bare.str.fullmatch(r"[-+]?\d{1,3}(?:[ ',.]\d{3})+(?:[.,]\d+)?")
    likely = is_number | grouped | pd.to_numeric(bare.str.replace(",", ".", n=1), errors="coerce").notna()
    if is_number.all() or 2 * likely.sum() <= len(present):
        return
    place = int(present.index[int(is_number.argmin())])
    raise DataError(
        f"column {column.name!r} holds numbers, but {present[place]!r:.60} in row {place} (line {place + 2}) is none; "
        f"correct the cell or leave it empty, or list {column.name!r} as Categorical in the model file"
    )


def read_model_file(path: str | Path, most_bytes: int = 4 << 20) -> ModelFile:
    """Read a YAML file.

    Args:
        path: The file.
        most_bytes: A larger file is refused: it is beyond any model that was written by hand.

    Raises:
        ModelError: The file does not exist, is no YAML, or says something that is not allowed; the message names the
            file and the place in it.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelError(f"no model file at {str(path)!r}")
    if path.stat().st_size > most_bytes:
        raise ModelError(f"{path}: must have at most {most_bytes:,} bytes; it has {path.stat().st_size:,}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read as text: {error}") from None
    return parse_model_file(text, name=str(path))


def parse_model_file(text: str, *, name: str = "model file") -> ModelFile:
    """Read the text of a model file; ``name`` is what messages call it."""
    try:
        _check_events(text)
        content = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ModelError(f"{name}: {_yaml_problem(error)}") from None
    except (ValueError, TypeError, AttributeError, OverflowError) as error:  # a date or number that is none
        raise ModelError(f"{name}: holds a value that cannot be read: {error!s:.200}") from None
    if not isinstance(content, dict):
        got = "nothing" if content is None else f"{type(content).__name__} {content!r:.40}"
        raise ModelError(f"{name}: must be a mapping with edges, hidden and nodes; got {got}")
    try:
        file = ModelFile.model_validate(content)
    except ValidationError as error:
        raise ModelError(f"{name}: {_explain(error)}") from None
    try:  # everything that can be said without a table
        file.graph()
        for node, entry in file.nodes.items():
            if entry is not None:
                _arguments(node, entry)
    except (ModelError, GraphError) as error:
        raise type(error)(f"{name}: {error}") from None
    return file


def _check_events(text: str, most_depth: int = 24, most_values: int = 200_000) -> None:
    """Refuse depth, and aliases that stand for more than a file could hold, before anything is built of the text."""
    sizes: dict[str, int] = {}
    parts: list[tuple[str | None, int]] = [(None, 0)]  # the collections that are open: anchor, and values so far
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        match event:
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                parts.append((event.anchor, 1))
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                anchor, size = parts.pop()
                sizes |= {} if anchor is None else {anchor: size}
                parts[-1] = (parts[-1][0], parts[-1][1] + size)
            case yaml.ScalarEvent():
                sizes |= {} if event.anchor is None else {event.anchor: 1}
                parts[-1] = (parts[-1][0], parts[-1][1] + 1)
            case yaml.AliasEvent():
                if any(anchor == event.anchor for anchor, _ in parts):
                    _refuse_event(event, f"the alias *{event.anchor} stands for what it is a part of")
                parts[-1] = (parts[-1][0], parts[-1][1] + sizes.get(str(event.anchor), 1))
        if len(parts) > most_depth:
            _refuse_event(event, f"is nested more than {most_depth} levels deep")
        if sum(size for _, size in parts) > most_values:
            _refuse_event(event, f"holds more than {most_values:,} values, aliases written out")


def _refuse_event(event: yaml.Event, problem: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=cast("yaml.error.Mark", event.start_mark))


def _edge(number: int, edge: list[Any]) -> tuple[str, str] | Lag:
    for name in edge[:2]:
        if not isinstance(name, str):
            raise GraphError(f"edges.{number}: a node name must be text; got {name!r}: {NAME_HINT}")
    if len(edge) == 2:
        return edge[0], edge[1]
    if type(edge[2]) is not int or not 1 <= edge[2] <= MOST_STEPS_BACK:
        large = type(edge[2]) is int and edge[2] > 0
        wanted = f"at most {MOST_STEPS_BACK}" if large else "a whole number of at least 1"
        raise GraphError(f"edges.{number}: a lag must be {wanted}; got {edge[2]!r:.60}")
    return Lag(*edge)


# --- mechanisms -------------------------------------------------------------------------------------------


def _mechanism(node: str, entry: Mapping[str, Any], graph: Graph, data: pd.DataFrame) -> Mechanism:
    kind, arguments = _arguments(node, entry)
    if "size" in inspect.signature(kind.__init__).parameters and "size" not in arguments:
        arguments["size"] = _size_of(node, graph, data)
    try:
        return kind(**arguments)
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"nodes.{node}: {error}") from None


def _size_of(node: str, graph: Graph, data: pd.DataFrame) -> int:
    """Number of categories, where the file does not say it."""
    if node in graph.hidden:
        raise ModelError(f"nodes.{node}.size: a hidden category needs its number of categories")
    if node not in data.columns:
        raise DataError(f"node {node!r} has no column; columns are {_listed(list(map(str, data.columns)))}")
    size = count_categories(data[node])
    if size is None:
        raise ModelError(f"nodes.{node}.size: column {node!r} shows no categories to count; give the number")
    return size


def _arguments(node: str, entry: Mapping[str, Any]) -> tuple[type[Mechanism], dict[str, Any]]:
    """The class that a node's entry names, and the arguments for it."""
    known = registered()
    name = entry.get("type")
    if name is None:
        raise ModelError(f"nodes.{node}.type: missing; write the name of a mechanism: {_listed(list(known))}")
    if not isinstance(name, str) or name not in known:
        raise ModelError(f"nodes.{node}.type: there is no mechanism {name!r}; known are {_listed(list(known))}")
    given = {key: value for key, value in entry.items() if key != "type"}
    schema = arguments_of(known[name])
    try:
        checked = schema.model_validate(given)
    except ValidationError as error:
        raise ModelError(_explain(error, f"nodes.{node}", f"{name} has {_listed(list(schema.model_fields))}")) from None
    for code in needs_code(known[name]):
        needs = f"{name} needs code ({code!r}), which a model file cannot hold"
        raise ModelError(f"nodes.{node}.type: {needs}; build the model in Python")
    return known[name], {key: getattr(checked, key) for key in given}


def needs_code(kind: type[Mechanism]) -> list[str]:
    """Arguments of a mechanism that are code and must be given, which no file can do."""
    arguments = inspect.signature(kind.__init__).parameters.items()
    return [
        name
        for name, one in arguments
        if one.default is one.empty and ("Callable" in str(one.annotation) or "Module" in str(one.annotation))
    ]


def _read_setting(value: Any) -> Setting:
    """A number or nested list fixes a parameter; a mapping of one key fixes, starts, ties or shrinks it."""
    if value is None or (isinstance(value, str) and value.lstrip().startswith("~")):
        return as_setting(value)
    [(key, given)] = value.items() if isinstance(value, Mapping) and len(value) == 1 else [("fix", value)]
    try:
        if key == "tie" and isinstance(given, str):
            return Tied(given)
        if key in PRIORS:
            return PRIORS[key](given)
        if key == "between" and isinstance(given, list) and len(given) == 2:
            return between(*given)
        if key == "fix" and isinstance(given, list) and any(isinstance(one, Mapping) for one in given):
            return as_setting([_read_setting(one) if isinstance(one, Mapping) else one for one in given])
        if key in ("fix", "start") and not isinstance(given, bool | str):
            numbers = np.asarray(given, dtype=float)
            return Fixed(numbers) if key == "fix" else Start(numbers)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(
        "must be a number, a list of them, {start: value}, {tie: name}, {between: [0, null]}, {ridge: 1} or "
        "{pseudo_counts: 1}"
    )


def _read_space(value: Any) -> Space:
    """``Real``, or ``{type: Discrete, size: 3}``."""
    entry = {"type": value} if isinstance(value, str) else value
    if not isinstance(entry, Mapping) or entry.get("type") not in Space.kinds:
        raise ValueError(f"must be one of {', '.join(sorted(Space.kinds))}, or {{type: Discrete, size: 3}}")
    sizes = {str(key): item for key, item in entry.items() if key != "type"}
    if not all(type(item) is int and 1 <= item <= MOST_COORDINATES for item in sizes.values()):
        raise ValueError(f"sizes must be whole numbers from 1 to {MOST_COORDINATES}")
    try:
        space = space_from({"kind": entry["type"], **sizes})
    except TypeError as error:
        raise ValueError(str(error)) from None
    if space.width > MOST_COORDINATES:
        raise ValueError(f"must have at most {MOST_COORDINATES} coordinates")
    return space


def _check_layers(layers: list[int], most: int = 1 << 22) -> list[int]:
    """Refuse layers with more than ``most`` weights between them."""
    if sum(one * other for one, other in pairwise(layers)) > most:
        raise ValueError(f"must have at most {most:,} weights between its layers")
    return layers


@cache
def arguments_of(kind: type[Mechanism]) -> type[BaseModel]:
    """A pydantic model of a mechanism's arguments, so that each error has a place, and editors know them."""
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name == "self" or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        fields[name] = (_field_type(name, str(parameter.annotation)), None)
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())
    return create_model(kind.__name__, __config__=config, **fields)


def _field_type(name: str, annotation: str) -> Any:
    if "Setting" in annotation:
        return Annotated[Any, BeforeValidator(_read_setting), WithJsonSchema({"$anchor": "setting"})]
    if "Space" in annotation:
        return Annotated[Any, BeforeValidator(_read_space), WithJsonSchema({"$anchor": "space"})]
    annotation = annotation.removesuffix(" | None")  # null is not written
    if choices := re.fullmatch(r"(?:typing\.)?Literal(\[.*\])", annotation):
        return Literal[tuple(ast.literal_eval(choices[1]))]
    whole = Annotated[StrictInt, Field(le=2**62), WithJsonSchema({"type": "integer"})]  # what torch can hold
    size = Annotated[StrictInt, Field(le=MOST_COORDINATES)]
    units = Annotated[StrictInt, Field(ge=1, le=10_000)]  # of a layer of a network
    layers = Annotated[list[units], Field(max_length=32), AfterValidator(_check_layers)]
    of_size = name in ("dim", "size", "categories", "positions")  # how many coordinates a node has
    plain = {"int": size if of_size else whole, "bool": StrictBool, "str": StrictStr, "float": float}
    return (plain | {"Sequence[int]": layers}).get(annotation, Any)


# --- messages ---------------------------------------------------------------------------------------------


def _explain(
    error: ValidationError, prefix: str = "", allowed: str = "a model file has edges, hidden and nodes", most: int = 3
) -> str:
    """The first few places that are wrong, in one line."""
    errors = error.errors(include_url=False, include_context=False)
    parts = [_one_line(dict(entry), prefix, allowed) for entry in errors[:most]]
    more = len(errors) - most
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def _one_line(entry: dict[str, Any], prefix: str, allowed: str) -> str:
    steps = [str(step) for step in entry["loc"]]
    if steps[-1:] == ["[key]"]:  # a key has no place of its own
        steps = steps[:-2]
    place = ".".join([prefix, *steps] if prefix else steps)
    message = entry["msg"].removeprefix("Value error, ")
    match entry["type"]:
        case "extra_forbidden":
            return f"{place}: is not known; {allowed}"
        case "string_type":
            return f"{place}: must be text; got {entry['input']!r}: {NAME_HINT}"
        case "value_error":
            return f"{place}: {message}; got {entry['input']!r:.60}"
        case "too_short" | "too_long" if steps[:1] == ["edges"]:
            return f"{place}: must be [parent, child] or [parent, child, lag]; got {entry['input']!r:.60}"
    plain = message.replace("Input should", "should").replace("dictionary", "mapping")
    return f"{place}: {plain}; got {entry['input']!r:.60}"


def _yaml_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or 'is not YAML'}"
    return "is not YAML: " + " ".join(str(error).split())


def _listed(names: list[str]) -> str:
    return listed(names, most=14, show=str) or "nothing"


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key that appears twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a dictionary."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float | bool) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} appears twice", key_node.start_mark)
            if isinstance(key, str | int | float | bool):
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


# --- a first file for a table ------------------------------------------------------------------------------


def first_model(table: pd.DataFrame, name: str, target: Path | None = None) -> str:
    """The text of a model file for a table.

    >>> import pandas as pd
    >>> table = pd.DataFrame({"dose": [0.5, 1.5, 2.25], "cured": ["yes", "no", "yes"]})
    >>> print(first_model(table, "trial.csv"))  # doctest: +ELLIPSIS
    # A model of trial.csv: 3 rows, 2 columns.
    ...
    nodes:
      # numbers with fractions, 3 values
      dose: Normal
      # text with 2 levels
      cured: {type: Categorical, size: 2}
    <BLANKLINE>
    """
    types = column_types(table)
    if not any(_is_kept(one) for one in types):
        raise ModelError(f"{name}: no column can be a node" + "".join(f"; {one}" for one in types[:3]))
    return "\n".join([*_head(table, types, name, target), "nodes:", *_nodes(types), ""])


def _head(table: pd.DataFrame, types: list[ColumnType], name: str, target: Path | None) -> Iterator[str]:
    kept = [_quoted(one.column) for one in types if _is_kept(one)]
    parent, child = kept[0], kept[-1]
    file = "model.yaml" if target is None else target.name
    plural = "s" if table.shape[1] != 1 else ""
    yield f"# A model of {_words(name)}: {len(table):,} rows, {table.shape[1]} column{plural}."
    yield "#"
    yield "# Say below which columns depend on which, from parent to child. Then:"
    yield f"#   otpdag fit {_words(file)} {_words(name)} --out run && otpdag report run"
    yield ""
    yield "edges: []"
    yield "# edges:"
    if parent != child:
        yield f"#   - [{parent}, {child}]"
    yield f"#   - [group, {child}]      # from a hidden node, see below"
    yield f"#   - [{child}, {child}, 1]    # from one step earlier, where rows are steps in time"
    yield ""
    yield "# Nodes that no column shows; each needs a line under nodes, such as"
    yield "#   group: {type: Categorical, size: 3}"
    yield "hidden: []"
    yield ""
    yield "# What each column is taken for, and why. A column without edges is modelled on its own; delete its line to"
    yield "# leave it out."


def _nodes(types: list[ColumnType]) -> Iterator[str]:
    for one in types:
        yield f"  # {_words(one.reason)}"
        if one.doubt:
            yield f"  # DOUBTFUL: {_words(_without_python(one.doubt))}"
        size = one.space.width if one.space is not None else 0
        kinds = {"category": f"{{type: Categorical, size: {size}}}", "count": "Poisson"}
        entry = f"{_quoted(one.column)}: {kinds.get(one.kind, 'Normal')}"
        yield f"  {entry}" if _is_kept(one) else f"  # {entry}"


def _is_kept(one: ColumnType) -> bool:
    return one.space is not None and not one.useless


def _without_python(doubt: str) -> str:
    """Advice that names mechanisms as model files do."""
    doubt = re.sub(r"\bm\.(Categorical|Ordinal)\((\d+)\)", r"{type: \1, size: \2}", doubt)
    return re.sub(r"\bm\.(\w+)\(\)", r"\1", doubt)


def _quoted(name: str) -> str:
    """A name that YAML reads as this text, in a list or as a key."""
    plain = re.fullmatch(r"[A-Za-z_][\w.]*", name) is not None and yaml.safe_load(name) == name
    return name if plain else json.dumps(name)


def _words(text: str) -> str:
    return printable(text, keep="")
