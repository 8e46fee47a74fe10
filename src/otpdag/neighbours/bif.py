"""The Bayesian Interchange Format, which bnlearn, pgmpy, pyAgrum and most other programs read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from otpdag.datasets import DiscreteNetwork, read_bif
from otpdag.errors import ModelError
from otpdag.files import write_bytes
from otpdag.model import Model
from otpdag.neighbours.network_tables import model_of, network_of

__all__ = ["from_bif", "to_bif"]

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.+<>=")


def from_bif(path: str | Path, *, hidden: Sequence[str] = ()) -> Model:
    """A model with the graph, the categories and the tables of a BIF file.

    Args:
        path: The file.
        hidden: Nodes that no column of the data will show.
    """
    return model_of(read_bif(path), hidden)


def to_bif(model: Model, path: str | Path) -> None:
    """Write a fitted model of tables as a BIF file.

    Raises:
        ModelError: A node is no table, or a name has characters that the format cannot hold.
    """
    write_bytes(Path(path), _text(network_of(model)).encode("utf-8"))


def _text(network: DiscreteNetwork) -> str:
    for name in [*network.nodes, *(state for states in network.states.values() for state in states)]:
        if not name or not set(name) <= _PLAIN:
            raise ModelError(f"BIF holds names of letters, digits and _-.+<>= only; got {name!r}")
    lines = ["network otpdag {", "}"]
    for node, states in network.states.items():
        lines += [f"variable {node} {{", f"  type discrete [ {len(states)} ] {{ {', '.join(states)} }};", "}"]
    for node, parents in network.parents.items():
        head = f"{node} | {', '.join(parents)}" if parents else node
        lines.append(f"probability ( {head} ) {{")
        for place in product(*(range(len(network.states[parent])) for parent in parents)):
            numbers = ", ".join(repr(float(value)) for value in network.tables[node][place])
            of = ", ".join(network.states[parent][code] for parent, code in zip(parents, place, strict=True))
            lines.append(f"  ({of}) {numbers};" if parents else f"  table {numbers};")
        lines.append("}")
    return "\n".join(lines) + "\n"
