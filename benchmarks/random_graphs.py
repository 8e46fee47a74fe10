"""Random sparse graphs with known parameters: linear-normal, mixed columns, and a tree of hidden binaries."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.datasets import DiscreteNetwork, Truth

Parents = dict[str, tuple[str, ...]]

MOST_PARENTS = 3
MOST_CATEGORIES = 2  # categorical parents of one node, so that no configuration is rare
PILOT_ROWS = 2000
EFFECT = 0.6  # of all numeric parents together, in standard deviations of what they predict
RAREST = 0.15  # probability of a category


@dataclass(frozen=True)
class World:
    """A graph with known parameters: parents in the order of the edges, sizes of the categories, and the truth."""

    parents: Parents
    kinds: dict[str, str]
    sizes: dict[str, int]
    truth: Truth

    def categories(self, node: str) -> list[str]:
        """The categorical parents of a node: the axes of its tables."""
        return [name for name in self.parents[node] if self.kinds[name] == "category"]

    def numbers(self, node: str) -> list[str]:
        """The numeric parents of a node, in the order of its slopes."""
        return [name for name in self.parents[node] if self.kinds[name] != "category"]

    def sample(self, rows: int, generator: np.random.Generator) -> pd.DataFrame:
        """Draw rows node by node."""
        columns: dict[str, np.ndarray] = {}
        for node in self.parents:
            columns[node] = _draw(self, node, columns, rows, generator)
        return pd.DataFrame(columns)


def declare(parents: Parents, kinds: dict[str, str], sizes: dict[str, int]) -> "otp.Model":
    """The model of a world, unfitted; made of plain values, so that another process can do it."""
    made: dict[str, Callable] = {
        "number": lambda node: m.Normal(),
        "count": lambda node: m.Poisson(),
        "category": lambda node: m.Categorical(sizes[node]),
    }
    graph = otp.Graph([(parent, node) for node in parents for parent in parents[node]], nodes=list(parents))
    return otp.Model(graph, {node: made[kind](node) for node, kind in kinds.items()})


def mixed_world(nodes: int, generator: np.random.Generator) -> World:
    """As many numbers, counts and categories (of two or three states), in a random order.

    Slopes are such that the numeric parents of a node move it by less than its own spread; mean counts are between 1.5
    and 6; of 20 columns, half of them children of counts, none then leaves the range of tens.
    """
    kinds = np.array(["number", "count", "category"])[np.arange(nodes) % 3]
    return _world(list(generator.permutation(kinds)), generator)


def normal_world(nodes: int, generator: np.random.Generator) -> World:
    """Numbers only."""
    return _world(["number"] * nodes, generator)


def _world(drawn_kinds: list[str], generator: np.random.Generator) -> World:
    names = [f"x{number}" for number in range(len(drawn_kinds))]
    kinds = {name: str(kind) for name, kind in zip(names, drawn_kinds, strict=True)}
    sizes = {name: int(generator.integers(2, 4)) for name in names if kinds[name] == "category"}
    world = World({}, kinds, sizes, {})
    pilot: dict[str, np.ndarray] = {}
    for at, node in enumerate(names):
        world.parents[node] = _choose_parents(names[:at], kinds, generator)
        world.truth[node] = _parameters(world, node, pilot, generator)
        pilot[node] = _draw(world, node, pilot, PILOT_ROWS, generator)
    return world


def _choose_parents(earlier: list[str], kinds: dict[str, str], generator: np.random.Generator) -> tuple[str, ...]:
    """None to three of the latest thirty nodes, 1.5 on average; so families look alike however large the graph is."""
    near = earlier[-30:]
    wanted = min(int(generator.integers(0, MOST_PARENTS + 1)), len(near))
    chosen = [near[i] for i in generator.choice(len(near), wanted, replace=False)] if wanted else []
    categories = [name for name in chosen if kinds[name] == "category"]
    dropped = set(categories[MOST_CATEGORIES:])
    return tuple(name for name in chosen if name not in dropped)


def _parameters(world: World, node: str, pilot: dict[str, np.ndarray], generator: np.random.Generator) -> dict:
    shape = tuple(world.sizes[name] for name in world.categories(node))
    numbers = world.numbers(node)
    spread = np.array([max(pilot[name].std(), 0.1) for name in numbers])
    centre = np.array([pilot[name].mean() for name in numbers])
    kind = world.kinds[node]
    if kind == "category":
        table = RAREST + (1 - RAREST * world.sizes[node]) * generator.dirichlet(np.ones(world.sizes[node]), size=shape)
        if not numbers:
            return {"probs": table}
        slopes = _slopes((len(numbers), world.sizes[node]), generator) / spread[:, None]
        return {"logits": np.log(table) - centre @ slopes, "weight": slopes}
    slopes = _slopes((len(numbers),), generator) / spread
    sloped = {"weight": slopes} if numbers else {}
    if kind == "count":
        return {"log_rate": generator.uniform(0.4, 1.8, shape) - centre @ (0.5 * slopes)} | (
            {"weight": 0.5 * slopes} if numbers else {}
        )
    scale = generator.uniform(0.5, 1.0, shape)
    return {"loc": generator.uniform(-1.0, 1.0, shape) - centre @ slopes, "scale": scale} | sloped


def _slopes(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    size = generator.uniform(0.5, 1.0, shape) * EFFECT / np.sqrt(max(shape[0], 1))
    return size * generator.choice([-1.0, 1.0], shape)


def _draw(world: World, node: str, columns: dict, rows: int, generator: np.random.Generator) -> np.ndarray:
    params = world.truth[node]
    at = tuple(columns[name] for name in world.categories(node))
    numbers = world.numbers(node)
    shift = np.column_stack([columns[name] for name in numbers]) @ params["weight"] if numbers else 0.0
    kind = world.kinds[node]
    if kind == "number":
        return params["loc"][at] + shift + params["scale"][at] * generator.standard_normal(rows)
    if kind == "count":
        return generator.poisson(np.exp(np.minimum(params["log_rate"][at] + shift, 5.0)), rows)
    probs = params["probs"][at] if "probs" in params else _softmax(params["logits"][at] + shift)
    edges = np.cumsum(np.broadcast_to(probs, (rows, world.sizes[node])), axis=1)[:, :-1]
    return (generator.random(rows)[:, None] > edges).sum(axis=1)


def _softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)


def hidden_tree(hidden: int, generator: np.random.Generator, children: int = 3, states: int = 3) -> DiscreteNetwork:
    """Hidden binaries ``h0``, ``h1``, ... in a random tree, each with observed children ``h0_0``, ``h0_1``, ..."""
    nodes: Parents = {f"h{i}": (f"h{generator.integers(0, i)}",) if i else () for i in range(hidden)}
    leaves: Parents = {f"h{i}_{j}": (f"h{i}",) for i in range(hidden) for j in range(children)}
    tables = {node: _hidden_table(bool(parents), generator) for node, parents in nodes.items()}
    tables |= {leaf: _leaf_table(states, generator) for leaf in leaves}
    names = dict.fromkeys(nodes, ("0", "1")) | {leaf: tuple(map(str, range(states))) for leaf in leaves}
    return DiscreteNetwork(names, nodes | leaves, tables)


def _hidden_table(has_parent: bool, generator: np.random.Generator) -> np.ndarray:
    stay = generator.uniform(0.7, 0.85, 2) if has_parent else np.array([generator.uniform(0.4, 0.6)])
    table = np.column_stack([stay, 1 - stay])
    return np.stack([table[0], table[1, ::-1]]) if has_parent else table[0]


def _leaf_table(states: int, generator: np.random.Generator) -> np.ndarray:
    """Each hidden state has a favourite of its own, with a probability of 0.6 to 0.8."""
    favourites = generator.choice(states, 2, replace=False)
    table = np.empty((2, states))
    for row, favourite in enumerate(favourites):
        strength = generator.uniform(0.6, 0.8)
        rest = (1 - strength) * (0.1 + 0.9 * generator.dirichlet(np.ones(states - 1)))
        table[row] = np.insert(rest * (1 - strength) / rest.sum(), favourite, strength)
    return table
