"""Families that are alike, side by side on the replica axis.

Rows of a family with weights.

What the backward map asks of each family: its members, its joint states, and whether it is linear and normal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.mechanisms.base import Mechanism, Params, Parents
from otpdag.mechanisms.protocols import abducted, can_abduct, defines_together, is_linear
from otpdag.mechanisms.spec import holds_code, registered
from otpdag.numerics import joint_one_hot
from otpdag.structure import Structure


def stacked_replicas(values: Sequence[Tensor], replicas: int) -> Tensor:
    """Tensors of n twins (1 or R, ...) on one axis (R * n, ...), replica by replica.

    >>> stacked_replicas([torch.zeros(1, 2), torch.ones(2, 2)], 2)[:, 0]
    tensor([0., 1., 0., 1.])
    """
    return torch.stack([value.expand(replicas, *value.shape[1:]) for value in values], 1).flatten(0, 1)


@dataclass(frozen=True)
class WeighedRows:
    """Rows of a family with weights: values (1 or R, n, ..., width), weights (1 or R, n, ...)."""

    values: Mapping[str, Tensor]
    weight: Tensor
    mask: Tensor | None = None


FAR_OUT = 2.0**60
"""Where slopes are read off: further out than any mean in units of its scale, so that differences lose no digits."""


@dataclass(frozen=True, eq=False)
class FamilyView:
    """A node with its parents, by their places in topological order.

    Linear normal families are written as equations in the columns ``(own coordinates, numeric parents, 1)``.

    Attributes:
        node: The node's name.
        place: Its place in topological order.
        names: Parents in the order of the mechanism, then the node.
        members: The places of the same.
        mechanism: How the node comes about.
        widths: Coordinates of each member.
        categories: Whether each member is a category.
        hidden: Whether the node is never seen.
        follows: Hidden parents that are functions of others, without noise: the members are those others.
    """

    node: str
    place: int
    names: tuple[str, ...]
    members: tuple[int, ...]
    mechanism: Mechanism
    widths: tuple[int, ...]
    categories: tuple[bool, ...]
    hidden: bool
    follows: tuple[Mechanism, ...] = ()

    @cached_property
    def kind(self) -> str:
        """Equal for families whose log-densities differ in names and parameters only; its own where that is unknown.

        The layers of a network read numbers in units of their own.
        """
        mechanism = self.mechanism
        is_network = any(parameter.init_scale > 0 for parameter in mechanism.declared().values())
        if is_network or self.follows or type(mechanism) not in registered().values() or holds_code(mechanism.spec()):
            return self.node
        discrete = [name in dict(mechanism.family.discrete) for name in self.names[:-1]]
        shapes = {name: parameter.shape for name, parameter in mechanism.declared().items()}
        return repr((mechanism.spec(), self.widths, self.categories, discrete, self.hidden, shapes))

    @property
    def is_function(self) -> bool:
        """Whether the node is hidden and follows from its parents: it is no unknown of its own."""
        mechanism = self.mechanism
        return self.hidden and not mechanism.has_density and not mechanism.noise.dim and not mechanism.declared()

    @property
    def is_table(self) -> bool:
        """Whether node and parents are all categories."""
        return all(self.categories) and self.mechanism.has_density

    @cached_property
    def is_linear(self) -> bool:
        """Whether the noise is normal and an affine function of node and numeric parents, which can be computed."""
        mechanism, noise = self.mechanism, self.mechanism.noise
        return (
            is_linear(mechanism)
            and not self.follows
            and can_abduct(mechanism)
            and defines_together(mechanism, "log_prob", "abduct")
            and mechanism.has_density
            and noise.kind == "normal"
            and noise.dim == mechanism.space.width
        )

    @cached_property
    def selectors(self) -> tuple[tuple[int, int], ...]:
        """Place and size of the parents that are categories."""
        parents = zip(self.members[:-1], self.widths[:-1], self.categories[:-1], strict=True)
        return tuple((place, width) for place, width, category in parents if category)

    @property
    def configurations(self) -> int:
        """Joint states of the parents that are categories."""
        return math.prod(width for _, width in self.selectors)

    @cached_property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """The node's own coordinates and those of its numeric parents, each as (place, coordinate)."""
        own = [(self.place, cell) for cell in range(self.widths[-1])]
        parents = zip(self.members[:-1], self.widths[:-1], self.categories[:-1], strict=True)
        return (*own, *((place, cell) for place, width, category in parents if not category for cell in range(width)))

    def log_prob(self, params: Params, values: Mapping[str, Tensor], mask: Tensor | None = None) -> Tensor:
        """Log-density of the node's value given its parents' ones."""
        known = dict(values)
        for followed in self.follows:
            above = {name: known[name] for name, _ in followed.family.parents}
            none = values[self.node].new_zeros(*[1] * (values[self.node].ndim - 1), 0)
            known[followed.family.node] = followed.forward({}, above, none)
        parents = {name: known[name] for name, _ in self.mechanism.family.parents}
        return self.mechanism.log_prob(params, values[self.node], parents, mask)

    def log_table(self, params: Params) -> Tensor:
        """Log-probabilities of all joint states: (R, *parents, states)."""
        values = one_hot_states(self.names, self.widths, next(iter(params.values()), torch.zeros(1).double()))
        table = self.log_prob(params, values)
        return table.reshape(len(table), *self.widths)

    def equations(self, params: Params) -> tuple[Tensor, Tensor]:
        r"""Coefficients of the noise :math:`u = A (x, pa, 1)^\top`, and :math:`\log |du/dx| - d/2 \log 2\pi`.

        Both for each configuration of the categories: (R, C, dim, columns + 1) and (R, C). The noise is affine, so its
        values at the origin and far out on each axis tell all of it.
        """
        values = self._far_points
        parents: Parents = {name: values[name] for name in self.names[:-1]}
        noise = abducted(self.mechanism, params, values[self.node], parents, torch.zeros_like(values[self.node]))
        noise = noise.expand(-1, self.configurations, -1, -1).mT
        origin = noise[..., :1]
        slopes = (noise[..., 1:] - origin) / FAR_OUT
        dim = self.widths[-1]
        own = slopes[..., :dim]
        log_slope = own[..., 0, 0].abs().log() if dim == 1 else torch.linalg.slogdet(own)[1]
        return torch.cat([slopes, origin], -1), log_slope - 0.5 * dim * math.log(2 * math.pi)

    @cached_property
    def _far_points(self) -> dict[str, Tensor]:
        """Zero and a point far out on each numeric axis, for each configuration: (1, C, columns + 1, width)."""
        points = len(self.columns) + 1
        like = torch.zeros(1, dtype=torch.float64)
        names = [name for name, c in zip(self.names[:-1], self.categories[:-1], strict=True) if c]
        states = one_hot_states(names, [width for _, width in self.selectors], like)
        values = {name: state.unsqueeze(2).expand(-1, -1, points, -1) for name, state in states.items()}
        for name, place, width in zip(self.names, self.members, self.widths, strict=True):
            if name not in values:
                column = torch.zeros(points, width, dtype=torch.float64)
                column[[1 + self.columns.index((place, cell)) for cell in range(width)], range(width)] = FAR_OUT
                values[name] = column.reshape(1, 1, points, width).expand(1, self.configurations, -1, -1)
        return values


def one_hot_states(names: Iterable[str], sizes: Iterable[int], like: Tensor) -> dict[str, Tensor]:
    """All joint states of categories as one-hot vectors (1, C, size), the last name fastest.

    >>> {name: state.argmax(-1).tolist() for name, state in one_hot_states("ab", (2, 2), torch.ones(1)).items()}
    {'a': [[0, 0, 1, 1]], 'b': [[0, 1, 0, 1]]}
    """
    return {name: state.to(like).unsqueeze(0) for name, state in zip(names, joint_one_hot(tuple(sizes)), strict=True)}


def describe_families(structure: Structure) -> tuple[FamilyView, ...]:
    """All families in topological order.

    >>> import otpdag as otp
    >>> from otpdag import mechanisms as m
    >>> graph = otp.Graph([("z", "x"), ("y", "x")])
    >>> structure = Structure.bind(graph, {"z": m.Categorical(3), "y": m.Normal(), "x": m.Normal()})
    >>> family = describe_families(structure)[-1]
    >>> family.names, family.columns, family.configurations, family.is_linear
    (('z', 'y', 'x'), ((2, 0), (1, 0)), 3, True)
    """
    graph = structure.graph
    if graph.is_dynamic:
        raise ModelError("rows of a graph with lagged edges depend on each other; sum over sequences instead")
    place = {node: i for i, node in enumerate(graph.order)}
    views: list[FamilyView] = []
    for node in graph.order:
        mechanism = structure.mechanisms[node]
        parents: list[str] = []
        follows: list[Mechanism] = []
        for parent, _ in mechanism.family.parents:
            above = views[place[parent]]
            parents += above.names[:-1] if above.is_function else [parent]
            follows += (*above.follows, above.mechanism) if above.is_function else ()
        names = (*dict.fromkeys(parents), node)
        spaces = [structure.mechanisms[name].space for name in names]
        views.append(
            FamilyView(
                node,
                place[node],
                names,
                tuple(place[name] for name in names),
                mechanism,
                tuple(space.width for space in spaces),
                tuple(space.is_discrete for space in spaces),
                node in graph.hidden,
                tuple(dict.fromkeys(follows)),
            )
        )
    return tuple(views)
