"""How a model looks in a terminal and in a notebook."""

from __future__ import annotations

import html
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from otpdag.errors import printable
from otpdag.structure import Structure

Params = Mapping[str, Mapping[str, NDArray[np.float64]]]


def _escaped(text: str) -> str:
    return html.escape(printable(text, keep=""))


def _kind(structure: Structure, node: str) -> str:
    hidden = ", hidden" if node in structure.graph.hidden else ""
    return f"{type(structure.mechanisms[node]).__name__}{hidden}"


def as_text(structure: Structure, params: Params | None) -> str:
    """One line for each node."""
    lines = [f"Model with {len(structure.graph.nodes)} nodes ({'fitted' if params is not None else 'not fitted'})"]
    for node in structure.graph.nodes:
        parents = ", ".join(name for name, _ in structure.mechanisms[node].family.parents)
        line = f"  {node}: {_kind(structure, node)}" + (f" <- {parents}" if parents else "")
        lines.append(printable(line, keep=""))
    return "\n".join(lines)


def _show(value: NDArray[np.float64]) -> str:
    text = np.array2string(np.asarray(value), precision=4, threshold=24, suppress_small=True)
    return f"<pre style='margin:0'>{html.escape(text)}</pre>"


def as_html(structure: Structure, params: Params | None) -> str:
    """A table with one row for each node and its parameters."""
    rows = []
    for node in structure.graph.nodes:
        own = params[node] if params is not None else {}
        shown = {name: value for name, value in own.items() if not name.startswith(("network.", "module."))}
        inner = "".join(
            f"<tr><td style='text-align:left;vertical-align:top'>{_escaped(name)}</td>"
            f"<td style='text-align:left'>{_show(value)}</td></tr>"
            for name, value in shown.items()
        )
        parents = _escaped(", ".join(name for name, _ in structure.mechanisms[node].family.parents)) or "–"
        rows.append(
            "<tr style='vertical-align:top'>"
            f"<td style='text-align:left'><b>{_escaped(node)}</b></td>"
            f"<td style='text-align:left'>{_escaped(_kind(structure, node))}</td>"
            f"<td style='text-align:left'>{parents}</td><td><table>{inner}</table></td></tr>"
        )
    state = "fitted" if params is not None else "not fitted"
    head = "".join(
        f"<th style='text-align:left'>{name}</th>" for name in ("node", "mechanism", "parents", "parameters")
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"<div><p><b>otpdag model</b> ({state})</p>{table}</div>"
