"""The drawing of a graph as SVG inside a page, whose nodes can be pointed at."""

from __future__ import annotations

import io
from xml.etree import ElementTree

import matplotlib as mpl

from otpdag.graph import Graph
from otpdag.plots.graph_drawing import draw_graph

__all__ = ["graph_picture"]

SMALLEST_SCALE = 0.7  # of a wide graph, at which names can still be read
_SVG = "http://www.w3.org/2000/svg"


def graph_picture(graph: Graph) -> str:
    """The graph as an ``svg`` element: node number ``k`` has ``data-node="k"`` and can be reached by the tab key.

    >>> picture = graph_picture(Graph([("a", "b")]))
    >>> picture.startswith("<svg"), picture.count("data-node")
    (True, 2)
    """
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "otpdag"}):
        draw_graph(graph).savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(buffer.getvalue())
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    for element in root.iter(f"{{{_SVG}}}g"):
        number = numbers.get(element.attrib.get("id", ""))
        if number is not None:
            node = graph.nodes[number]
            del element.attrib["id"]
            element.attrib |= {"data-node": str(number), "tabindex": "0", "role": "button", "aria-label": node}
    for element in root.iter(f"{{{_SVG}}}text"):
        element.attrib["pointer-events"] = "none"
    width = float(root.attrib["width"].removesuffix("pt"))
    root.attrib["style"] = f"min-width: {SMALLEST_SCALE * width:.0f}pt"  # a phone scrolls rather than shrink further
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    return ElementTree.tostring(root, encoding="unicode")
