"""A graph with its mechanisms, and the tensors that hold their parameters.

Parameters live in a flat dictionary ``theta`` of raw tensors ``(R, *shape)``, keyed ``node.parameter`` or, for shared
ones, ``tie.name``. Everything that evaluates a model is a pure function of a structure and its ``theta``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from otpdag.errors import DataError, ModelError, listed
from otpdag.graph import Graph
from otpdag.mechanisms import Categorical, Given, Mechanism, Normal, Poisson
from otpdag.mechanisms.base import Family, Held, Parents, log_prior
from otpdag.mechanisms.parameters import Between, Fixed, Parameter, Start, Tied
from otpdag.mechanisms.simulator import Simulator
from otpdag.spaces import Count, Discrete, Interval, Real, Space

Theta = Mapping[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]  # of parameters
Naturals = Mapping[str, Mapping[str, Tensor]]
Entry = tuple[str, str, int]

MOST_IN_TABLES = 1 << 22  # parameters by joint states of parents: 32 MB for each of a few copies


@dataclass(frozen=True)
class Structure:
    """The immutable part of a model: which nodes there are, and how each comes about.

    Build one with :meth:`bind`, which tells every mechanism its parents and checks that they fit.

    In a graph with lagged edges, an earlier value is one more parent: ``z[-1]`` is ``z`` one step ago. A hidden node
    with lagged parents has a second mechanism, ``z[0]``, without them: it makes the first steps of a sequence.

    Attributes:
        equal: Single entries that are those of others: node, parameter and place of both.
        counts_priors: Whether a loss has the priors of parameters in it; not where it is one of many parts of another.
    """

    graph: Graph
    mechanisms: Mapping[str, Mechanism]
    keys: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    equal: tuple[tuple[Entry, Entry], ...] = ()
    counts_priors: bool = True

    @classmethod
    def bind(cls, graph: Graph, mechanisms: Mapping[str, Mechanism], *, most: float = math.inf) -> Structure:
        """Match mechanisms to nodes and set them up in topological order.

        More than ``most`` parameters in all are refused, and more than any table can fill by states of parents.
        """
        given: tuple[object, object] = (graph, mechanisms)
        if not isinstance(given[0], Graph) or not isinstance(given[1], Mapping):
            got = " and ".join(type(one).__name__ for one in given)
            raise ModelError(f"a model needs an otp.Graph, and a mechanism by the name of each node; got {got}")
        _check_names(graph, mechanisms)
        bound: dict[str, Mechanism] = {}
        for node in graph.order:
            parents = tuple((parent, bound[parent].space) for parent in graph.parents(node))
            before = graph.lagged_parents(node)
            lagged = tuple((lag_name(parent, by), mechanisms[parent].space) for parent, by in before)
            for parent, space in parents + lagged:
                if isinstance(space, Interval):
                    raise ModelError(f"node {node!r}: its parent {parent!r} is censored, which no mechanism can read")
                if getattr(bound.get(parent), "truncated", None) is not None:
                    raise ModelError(f"node {node!r}: its parent {parent!r} is truncated; gaps in it have no sum")
            unseen = any(parent in graph.hidden for parent in (*graph.parents(node), *dict(before)))
            bound[node] = mechanisms[node].setup(Family(node, parents + lagged, node in graph.hidden, unseen))
            if lagged and node in graph.hidden:
                first = first_name(node)
                bound[first] = _first(node, mechanisms).setup(Family(first, parents, hidden=True))
        ordered = {node: bound[node] for node in (*graph.nodes, *(n for n in bound if n not in graph))}
        _check_room(ordered, most)
        made = cls(graph, ordered).keyed()
        if made.shared:
            _check_groups(made)
        return made

    def keyed(self) -> Structure:
        """Compute the keys of the learned parameters; ties share a key and must agree in shape."""
        keys: dict[str, dict[str, str]] = {}
        shapes: dict[str, tuple[str, Parameter]] = {}
        entries: dict[str, list[Entry]] = {}
        for node, mechanism in self.mechanisms.items():
            keys[node] = {}
            for name, parameter in mechanism.declared().items():
                if parameter.learned:
                    key = f"tie.{parameter.setting.name}" if isinstance(parameter.setting, Tied) else f"{node}.{name}"
                    if isinstance(parameter.setting, Tied) and math.prod(parameter.shape) == 1 and key not in shapes:
                        entries.setdefault(parameter.setting.name, []).insert(0, (node, name, 0))
                    _check_tie(key, node, parameter, shapes)
                    keys[node][name] = key
                    for place, tie in parameter.setting.ties if isinstance(parameter.setting, Fixed) else ():
                        entries.setdefault(tie, []).append((node, name, place))
        for tie in entries:
            node, parameter = shapes.get(f"tie.{tie}", ("", Parameter(())))
            if math.prod(parameter.shape) > 1:
                raise ModelError(f"tie {tie!r} is of a single slope and of {parameter.shape} numbers of node {node!r}")
        equal = tuple((other, first) for first, *others in entries.values() for other in others)
        return replace(self, keys=keys, equal=equal)

    def with_mechanisms(self, mechanisms: Mapping[str, Mechanism]) -> Structure:
        """The same graph with re-scaled mechanisms."""
        return replace(self, mechanisms=dict(mechanisms))

    def with_given(self, nodes: Collection[str], shown: Collection[str] = ()) -> Structure:
        """The same with nodes whose values come from outside, without edges into them; ``shown`` ones are observed."""
        graph, mechanisms, keys = self.graph, dict(self.mechanisms), dict(self.keys)
        for node in nodes:
            mechanisms[node], keys[node] = Given(mechanisms[node].space).setup(Family(node)), {}
        edges = [(parent, child) for parent, child in graph.edges if child not in nodes]
        hidden = [node for node in graph.hidden if node not in nodes and node not in shown]
        equal = tuple(pair for pair in self.equal if not {owner for owner, _, _ in pair} & set(nodes))
        graph = Graph(edges, nodes=graph.nodes, hidden=hidden)
        return replace(self, graph=graph, mechanisms=mechanisms, keys=keys, equal=equal)

    def parameters(self) -> dict[str, Parameter]:
        """Learned parameters by key."""
        return self._by_key(lambda node: self.mechanisms[node].declared())

    def _by_key(self, told: Callable[[str], Mapping[str, Held]]) -> dict[str, Held]:
        """What is told of each node's parameters, by key; of tied ones the first node's counts."""
        by_key: dict[str, Held] = {}
        for node, names in self.keys.items():
            own = told(node)
            for name, key in names.items():
                if name in own:
                    by_key.setdefault(key, own[name])
        return by_key

    def keys_of(self, node: str) -> list[str]:
        """Of all that a node's parameters follow from: its own, and those of others that have an entry in common."""
        equal = [self.keys[first][name] for (own, _, _), (first, name, _) in self.equal if own == node]
        return [*self.keys[node].values(), *equal]

    def naturals(self, theta: Theta) -> dict[str, dict[str, Tensor]]:
        """Natural parameters of every node."""
        anchor = next(iter(theta.values()), None)
        raws = {node: {name: theta[key] for name, key in self.keys[node].items()} for node in self.mechanisms}
        for (node, name, place), (first, its, at) in self.equal:
            one, other = (self.mechanisms[owner].declared()[own] for owner, own in ((node, name), (first, its)))
            entries = one.natural(raws[node][name]).flatten(1).clone()
            entries[:, place] = other.natural(raws[first][its]).flatten(1)[:, at]
            raws[node][name] = one.raw(entries.unflatten(1, one.shape))
        by_node = {}
        for node, raw in raws.items():
            natural = self.mechanisms[node].natural(raw)
            if anchor is not None and not raw:
                natural = {name: value.to(anchor) for name, value in natural.items()}
            by_node[node] = natural
        return by_node

    def penalty(self, naturals: Naturals) -> Tensor | float:
        """Minus the log-density of all priors at natural parameters, up to a constant: (R,), or zero without any."""
        told = [log_prior(one, naturals[node]) for node, one in self.mechanisms.items()] if self.counts_priors else []
        return -sum((one for one in told if one is not None), 0.0)

    @property
    def has_densities(self) -> bool:
        """Whether every node that bears on what is observed has a density, or is given."""
        relevant = (n for n in self.graph.nodes if n in self.graph.observed or self.graph.observed_descendants(n))
        return all(self.mechanisms[n].has_density or self.mechanisms[n].is_given for n in relevant)

    def raw(self, naturals: Naturals) -> dict[str, Tensor]:
        """Raw parameters from natural ones; of tied ones the first node's counts, or their starting value."""
        return self._by_key(lambda node: self.mechanisms[node].raw(naturals[node]))

    def parents(self, node: str, values: Mapping[str, Tensor]) -> Parents:
        """The values of a node's parents."""
        return {parent: values[parent] for parent, _ in self.mechanisms[node].family.parents}

    def base(self, name: str) -> str:
        """The node behind a name: ``z`` for ``z``, the ``z[0]`` of its first steps and the ``z[-1]`` of a parent."""
        return name if name in self.graph else name.rpartition("[")[0]

    def longest_lag(self, node: str) -> int:
        """How many first steps of a sequence lack one of the node's parents; zero without lagged ones."""
        return max((by for _, by in self.graph.lagged_parents(node)), default=0)

    def makes(self, name: str, times: Tensor) -> Tensor:
        """Which steps a mechanism makes: later ones or, of ``z[0]``, the first ones that lack a parent."""
        base = self.base(name)
        lag = self.longest_lag(base)
        return times >= lag if name == base else times < lag

    def explains(self, name: str, times: Tensor, mask: Mapping[str, Tensor]) -> Tensor:
        """Steps (..., M) that a mechanism makes, all of whose observed parents are seen."""
        made = self.makes(name, times).unsqueeze(0)
        for parent, _ in self.mechanisms[name].family.parents:
            made = made & mask[parent].all(-1) if parent in mask else made
        return made

    def name_at(self, node: str, step: int) -> str:
        """The mechanism that makes a node in a step: that of first steps, if there is one and a parent is lacking."""
        first = first_name(node)
        return first if step < self.longest_lag(node) and first in self.mechanisms else node

    def with_settings(self, node: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Overwrite data-driven starting values (without replica axis) by what the user fixed or started."""
        for name, parameter in self.mechanisms[node].declared().items():
            if parameter.is_given_in_part:
                values[name] = parameter.with_fixed(values[name])
            elif isinstance(parameter.setting, Fixed | Start):
                values[name] = parameter.constant(node, name).clone()
            if isinstance(parameter.support, Between) and parameter.learned and name in values:
                values[name] = parameter.support.inside(values[name])
        return values

    def scaled_to(self, values: Mapping[str, Tensor], weight: Mapping[str, Tensor]) -> Structure:
        """Every mechanism in the units of complete values (N, width), over rows by its ``weight`` (N,)."""
        scaled = {
            name: mechanism.scaled_to(values[self.base(name)], self.parents(name, values), weight[name])
            for name, mechanism in self.mechanisms.items()
        }
        return self.with_mechanisms(scaled)

    def start(self, values: Mapping[str, Tensor], weight: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Natural parameters (1, ...) of every mechanism that rows have a ``weight`` for, fitted to complete values.

        What the user set is as they set it.
        """
        naturals = {}
        for name, mechanism in self.mechanisms.items():
            if name not in weight:
                continue
            start = mechanism.start(values[self.base(name)], self.parents(name, values), weight[name])
            naturals[name] = {key: value.unsqueeze(0) for key, value in self.with_settings(name, start).items()}
        return naturals

    def filled(self, theta: Theta, generator: torch.Generator, *, first: bool = True) -> dict[str, Tensor]:
        """Raw parameters (1, ...) with those that no start is known for: of networks their own, else zero."""
        filled = dict(theta)
        for node, names in self.keys.items():
            fresh = self.mechanisms[node].initial_raw(1, generator, first=first)
            filled |= {names[name]: value for name, value in fresh.items() if names[name] not in filled}
        for key, parameter in self.parameters().items():
            filled.setdefault(key, torch.zeros(1, *parameter.shape, dtype=torch.float64))
        return filled

    def check_given(self, mask: Mapping[str, Tensor]) -> None:
        """Refuse missing cells of covariates, for which there is no distribution to fill them from."""
        for node in (n for n in self.given if n in mask):
            missing = ~mask[node].all(-1)
            if bool(missing.any()):
                row = int(missing.nonzero()[0, -1])
                raise DataError(f"node {node!r} is Given: its cells must not be missing; one is, in row {row}")

    def check_limits(self, values: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> None:
        """Refuse cells beyond the limits between which alone rows are said to have been kept."""
        for node in mask:
            limits = getattr(self.mechanisms[node], "truncated", None)
            if limits is not None:
                ends = zip(limits, (-math.inf, math.inf), strict=True)
                low, high = (far if end is None else end for end, far in ends)
                outside = mask[node] & ((values[node] < low) | (values[node] > high))
                if bool(outside.any()):
                    value = float(values[node][outside][0])
                    raise DataError(f"node {node!r} is truncated to {list(limits)}; a row has {value:g}")

    @property
    def rows_needed(self) -> int:
        """How many rows the hungriest node needs: one for each slope, and one for each other learned parameter.

        A path is many observations in one row.
        """
        several = [one for one in self.mechanisms.values() if not getattr(one, "path", False)]
        learned = [{k: p for k, p in one.declared().items() if p.learned} for one in several]
        needed = [sum(p.shape[0] if name == "weight" else 1 for name, p in own.items()) for own in learned]
        return max(needed, default=0)

    @property
    def has_simulators(self) -> bool:
        """Whether a node is a function that only simulates."""
        return any(isinstance(one, Simulator) for one in self.mechanisms.values())

    @property
    def begins_anywhere(self) -> bool:
        """Whether a simulator has a parameter with bounds and no place to start."""
        return any(isinstance(one, Simulator) and None in one.settings.values() for one in self.mechanisms.values())

    @property
    def ties_parameters(self) -> bool:
        """Whether two nodes share a parameter."""
        keys = [key for names in self.keys.values() for key in names.values()]
        return bool(self.equal) or len(keys) != len(set(keys))

    @property
    def given(self) -> tuple[str, ...]:
        """Nodes that are conditioned on, never modelled."""
        return tuple(node for node, mechanism in self.mechanisms.items() if mechanism.is_given)

    @property
    def shared(self) -> tuple[str, ...]:
        """Nodes whose value all rows of a group share, in the graph's order."""
        mechanisms = self.mechanisms
        return tuple(n for n in self.graph.order if isinstance(one := mechanisms[n], Normal) and one.group is not None)

    @property
    def hidden_numbers(self) -> tuple[str, ...]:
        """Hidden nodes that are no categories, in the graph's order."""
        hidden = self.graph.hidden
        return tuple(n for n in self.graph.order if n in hidden and not self.mechanisms[n].space.is_discrete)

    @property
    def hidden_categories(self) -> tuple[str, ...]:
        """Hidden nodes that are categories, in the graph's order."""
        hidden = self.graph.hidden
        return tuple(n for n in self.graph.order if n in hidden and self.mechanisms[n].space.is_discrete)


def lag_name(node: str, by: int) -> str:
    """What a mechanism calls the value of a parent some steps ago.

    >>> lag_name("z", 1)
    'z[-1]'
    """
    return f"{node}[-{by}]"


def first_name(node: str) -> str:
    """What the mechanism of a hidden node's first steps is called.

    >>> first_name("z")
    'z[0]'
    """
    return f"{node}[0]"


def _first(node: str, mechanisms: Mapping[str, Mechanism]) -> Mechanism:
    """The mechanism of the first steps: the user's, or the plainest one of the space."""
    given = mechanisms.get(first_name(node))
    if given is not None:
        if given.space != mechanisms[node].space:
            raise ModelError(
                f"{first_name(node)!r} must have the values of {node!r}, {mechanisms[node].space}; got {given.space}"
            )
        return given
    simplest = plainest(mechanisms[node].space)
    if simplest is None:
        raise ModelError(
            f"hidden node {node!r} has lagged parents, which its first steps lack: give a mechanism for them under the "
            f"name {first_name(node)!r}"
        )
    return simplest


_PLAINEST: Mapping[type[Space], Callable[[int], Mechanism]] = {Discrete: Categorical, Count: Poisson, Real: Normal}


def plainest(space: Space) -> Mechanism | None:
    """The mechanism that says least about values of a space; None where none is plainer than the others.

    >>> type(plainest(Real(2))).__name__
    'Normal'
    """
    kind = _PLAINEST.get(type(space))
    return None if kind is None else kind(space.width)


def _check_groups(structure: Structure) -> None:
    """Refuse nodes that rows of a group cannot share."""
    graph, shared = structure.graph, structure.shared
    columns = {str(getattr(structure.mechanisms[node], "group", "")) for node in shared}
    if len(columns) > 1:
        raise ModelError(f"group must be one column for all nodes; got {', '.join(map(repr, sorted(columns)))}")
    for node in shared:
        if node not in graph.hidden or structure.mechanisms[node].space.width > 1:
            raise ModelError(f"node {node!r}: group is for hidden nodes with one number")
        apart = [parent for parent in graph.parents(node) if parent not in shared]
        if apart:
            raise ModelError(f"node {node!r} is shared by a group, and its parent {apart[0]!r} by a row alone")
    if graph.is_dynamic or columns & set(graph.nodes):
        raise ModelError(f"group {columns.pop()!r} must be a column beside the nodes, of a graph without lagged edges")


def _check_room(mechanisms: Mapping[str, Mechanism], most: float) -> None:
    """Refuse more parameters than there is room for, before any of them is laid out."""
    needed = in_tables = 0
    for node, mechanism in mechanisms.items():
        own = sum(math.prod(parameter.shape) for parameter in mechanism.declared().values())
        needed += max(own, mechanism.space.width)
        in_tables += own if mechanism.family.discrete else 0
        if in_tables > MOST_IN_TABLES:
            raise ModelError(
                f"node {node!r} has {own:,} parameters, with a set for each joint state of the categories among its "
                f"parents ({', '.join(name for name, _ in mechanism.family.discrete)}); such tables may have "
                f"{MOST_IN_TABLES:,} in all: merge rare levels, leave a parent out, or let a network read them "
                "(network=(8,))"
            )
        if needed > most:
            raise ModelError(f"up to node {node!r} there are {needed:,} parameters; at most {int(most):,} are taken")


def _check_names(graph: Graph, mechanisms: Mapping[str, Mechanism]) -> None:
    missing = [node for node in graph.nodes if node not in mechanisms]
    if missing:
        raise ModelError(f"every node needs a mechanism; none was given for {listed(missing)}")
    first = {first_name(node) for node in graph.hidden if graph.lagged_parents(node)}
    unknown = [node for node in mechanisms if node not in graph.nodes and node not in first]
    if unknown:
        raise ModelError(f"mechanisms name nodes that the graph lacks: {listed(unknown)}; it has {listed(graph.nodes)}")
    for node, mechanism in mechanisms.items():
        if not isinstance(mechanism, Mechanism):
            raise ModelError(f"node {node!r}: expected a mechanism such as m.Normal(); got {mechanism!r}")


def _check_tie(key: str, node: str, parameter: Parameter, seen: dict[str, tuple[str, Parameter]]) -> None:
    if not isinstance(parameter.setting, Tied):
        return
    first_node, first = seen.setdefault(key, (node, parameter))
    if first.shape != parameter.shape or first.support is not parameter.support:
        raise ModelError(
            f"tie {parameter.setting.name!r}: node {first_node!r} gives it shape {first.shape}, "
            f"node {node!r} shape {parameter.shape}; tied parameters must have the same shape and support"
        )


def pack(theta: Theta) -> Tensor:
    """All parameters of each replica in one row: (R, P)."""
    if not theta:
        return torch.zeros(1, 0, dtype=torch.float64)
    return torch.cat([value.reshape(value.shape[0], -1) for value in theta.values()], -1)


def unpack(flat: Tensor, like: Shapes) -> dict[str, Tensor]:
    """Invert :func:`pack` given the shapes without replica axis; columns beyond these are left aside."""
    sizes = [math.prod(shape) for shape in like.values()]
    # one split, whose gradient is one concatenation: slices would each write a gradient as long as all parameters
    parts = flat[..., : sum(sizes)].split(sizes, -1) if sizes else ()
    return {key: part.reshape(flat.shape[0], *like[key]) for key, part in zip(like, parts, strict=True)}


def parameter_places(shapes: Shapes) -> dict[str, Tensor]:
    """The columns of a packed matrix that hold each parameter (*shape).

    >>> parameter_places({"a": (2,), "b": (1, 1)})
    {'a': tensor([0, 1]), 'b': tensor([[2]])}
    """
    columns = torch.arange(sum(map(math.prod, shapes.values()))).unsqueeze(0)
    return {key: own[0] for key, own in unpack(columns, shapes).items()}


def columns_of(shapes: Shapes, keys: Collection[str]) -> Tensor:
    """Which columns of a packed matrix hold these parameters (P,).

    >>> columns_of({"a": (2,), "b": (1, 1)}, {"b"}).tolist()
    [False, False, True]
    """
    return pack({key: torch.full((1, *shape), key in keys) for key, shape in shapes.items()})[0].bool()
