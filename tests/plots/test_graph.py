"""Drawn graphs: where nodes stand, and that nothing overlaps."""

from __future__ import annotations

import io
import subprocess
import sys
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Polygon

from otpdag import mechanisms as m
from otpdag.errors import GraphError
from otpdag.graph import Graph, lag
from otpdag.model import Model
from otpdag.plots import draw_graph, learning_curve
from otpdag.plots.graph import POINTS, Layout

ASIA = Graph(
    [
        ("asia", "tub"),
        ("smoke", "lung"),
        ("smoke", "bronc"),
        ("tub", "either"),
        ("lung", "either"),
        ("either", "xray"),
        ("either", "dysp"),
        ("bronc", "dysp"),
    ],
    hidden=["either"],
)
HUB = Graph([("z", f"symptom_{place}") for place in range(39)], hidden=["z"])
LONG = Graph(
    [
        ("patient_age_at_admission", "rate_measured_at_the_time_of_admission"),
        ("rate_measured_at_the_time_of_admission", "days"),
        ("patient_age_at_admission", "days"),
        ("ward", "days"),
        ("patient_age_at_admission", "k"),
    ]
)
DYNAMIC = Graph([lag("z", "z"), lag("z", "z", 2), ("z", "x"), lag("x", "z"), ("u", "z"), lag("u", "x", 3)])


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    count = draw(st.integers(1, 14))
    names = [f"node_{place}" * draw(st.sampled_from([1, 1, 4])) for place in range(count)]
    pairs = [(a, b) for a, b in combinations(names, 2)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=24)) if pairs else []
    return Graph(edges, nodes=names, hidden=names[:1])


def parts(figure: Figure) -> tuple[dict[str, Polygon], list[PathPatch], list[Polygon]]:
    """Nodes by name, lines, and arrow heads."""
    patches = figure.axes[0].patches
    nodes = {str(patch.get_gid()): patch for patch in patches if patch.get_gid()}
    lines = [patch for patch in patches if isinstance(patch, PathPatch)]
    return nodes, lines, [patch for patch in patches if isinstance(patch, Polygon) and not patch.get_gid()]


def outline(patch: PathPatch | Polygon) -> np.ndarray:
    return np.concatenate(patch.get_path().to_polygons(closed_only=False))


def check_layout(graph: Graph) -> None:
    figure = draw_graph(graph)
    nodes, lines, heads = parts(figure)
    assert set(nodes) == set(graph.nodes)
    assert len(heads) == len(lines) >= len(graph.edges)
    boxes = {name: patch.get_path().get_extents() for name, patch in nodes.items()}
    for one, other in combinations(boxes.values(), 2):
        assert not one.overlaps(other)
    (left, right), (bottom, top) = figure.axes[0].get_xlim(), figure.axes[0].get_ylim()
    for box in boxes.values():
        assert left < box.x0 < box.x1 < right
        assert bottom < box.y0 < box.y1 < top
    for (parent, child), line, head in zip(graph.edges, lines, heads, strict=False):
        points, tip = outline(line), head.get_xy()[0]
        for name, patch in nodes.items():
            if name not in (parent, child):
                assert not patch.get_path().contains_points(points).any(), (parent, child, name)
        assert distance(outline(nodes[child]), tip) < 1.0
        assert distance(outline(nodes[parent]), points[0]) < 1.0


def distance(border: np.ndarray, point: np.ndarray) -> float:
    """From a point to a polygon's border."""
    a, b = border[:-1], border[1:]
    along = ((point - a) * (b - a)).sum(1) / np.maximum(((b - a) ** 2).sum(1), 1e-12)
    nearest = a + np.clip(along, 0, 1)[:, None] * (b - a)
    return float(np.hypot(*(nearest - point).T).min())


@pytest.mark.parametrize("graph", [ASIA, HUB, LONG, Graph([], nodes=["alone"]), Graph([("a", "b")])])
def test_nothing_overlaps(graph: Graph) -> None:
    check_layout(graph)


@given(graphs())
@settings(max_examples=40, deadline=None)
def test_nothing_overlaps_in_any_graph(graph: Graph) -> None:
    check_layout(graph)


def test_large_graphs_fit_a_page() -> None:
    rng = np.random.default_rng(0)
    names = [f"v{place}" for place in range(40)]
    edges = {(names[rng.integers(place)], names[place]) for place in range(1, 40) for _ in range(2)}
    graph = Graph(sorted(edges))
    check_layout(graph)
    assert draw_graph(graph).get_size_inches().max() <= 15


def test_parents_stand_above_children() -> None:
    nodes, _, _ = parts(draw_graph(ASIA))
    middle = {name: patch.get_path().get_extents().y0 for name, patch in nodes.items()}
    assert all(middle[parent] > middle[child] for parent, child in ASIA.edges)


def test_tree_has_no_crossing() -> None:
    tree = Graph([(f"n{place // 3}", f"n{place}") for place in range(3, 40)])
    lines = [outline(line) for line in parts(draw_graph(tree))[1]]
    for one, other in combinations(lines, 2):
        assert not segments_cross(one, other)


def segments_cross(one: np.ndarray, other: np.ndarray) -> bool:
    a, b = one[:-1, None], one[1:, None]
    c, d = other[None, :-1], other[None, 1:]

    def side(p: np.ndarray, q: np.ndarray, r: np.ndarray) -> np.ndarray:
        return (q - p)[..., 0] * (r - p)[..., 1] - (q - p)[..., 1] * (r - p)[..., 0]

    return bool(((side(a, b, c) * side(a, b, d) < 0) & (side(c, d, a) * side(c, d, b) < 0)).any())


def test_hidden_nodes_are_open_and_dashed() -> None:
    nodes, _, _ = parts(draw_graph(ASIA))
    assert nodes["either"].get_facecolor() == (1, 1, 1, 1)
    assert nodes["xray"].get_facecolor() != (1, 1, 1, 1)
    assert nodes["either"].get_linestyle() != "-"
    assert nodes["xray"].get_linestyle() in ("-", "solid")


def test_lagged_edges_are_dashed_and_labelled() -> None:
    figure = draw_graph(DYNAMIC)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert sorted(text for text in texts if text.startswith("t")) == ["t−1", "t−1, t−2", "t−3"]
    nodes, lines, _ = parts(figure)
    assert len(nodes) == 3
    dashed = [line.get_linestyle() not in ("-", "solid") for line in lines]
    assert dashed == [False, False, True, True, True]


def test_long_names_are_wrapped() -> None:
    texts = [text.get_text() for text in draw_graph(LONG).axes[0].texts]
    assert "rate_measured_at" in " ".join(texts).replace(" ", "")
    assert max(map(len, texts)) <= 17


def test_names_are_not_read_as_formulas() -> None:
    figure = draw_graph(Graph([("$a", "b$_1$")]))
    figure.savefig(io.BytesIO(), format="svg")
    assert [text.get_text() for text in figure.axes[0].texts] == ["$a", "b$_1$"]


@pytest.mark.parametrize("layout", [None, "constrained"])
def test_draws_on_given_axes(layout: Any) -> None:
    figure = Figure(figsize=(9, 4), layout=layout)
    left, right = figure.subplots(1, 2)
    assert draw_graph(ASIA, ax=left) is figure
    assert learning_curve({"loss": [3, 2, 1]}, ax=right) is figure
    assert len(figure.axes) == 2
    sizes = {text.get_fontsize() for text in left.texts}
    assert len(sizes) == 1
    assert 4 < sizes.pop() < 14


def test_draws_inside_subfigures() -> None:
    figure = Figure()
    inner = figure.subfigures(1, 2)[0]
    assert draw_graph(ASIA, ax=inner.subplots()) is figure


def test_pyplot_stays_out() -> None:
    code = "import otpdag.plots, sys; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_model_is_drawn_as_its_graph_and_anything_else_is_refused():
    graph = Graph([("a", "b")])
    model = Model(graph, {"a": m.Normal(), "b": m.Normal()})
    shown = [[text.get_text() for text in draw_graph(one).axes[0].texts] for one in (graph, model)]
    assert shown[0] == shown[1]
    with pytest.raises(GraphError, match=r"graph must be an otp.Graph or an otp.Model; got dict"):
        draw_graph({"a": "b"})


@pytest.mark.parametrize("name", ["x{}", "symptom_{}", "observed_symptom_number_{}", "anunbreakablename{}"])
def test_ten_siblings_stand_in_one_row(name: str) -> None:
    children = [name.format(place) for place in range(10)]
    layout = Layout(Graph([("z", child) for child in children]))
    assert layout.rows == [["z"], children]
    gaps = np.diff([layout.x[child] for child in children])
    assert (gaps >= max(layout.size[child][0] for child in children)).all()


def test_crowded_rows_break_names_until_they_fit_the_page() -> None:
    layout = Layout(Graph([("z", f"observed_symptom_number_{place}") for place in range(10)]))
    left, right, _, _ = layout.bounds()
    assert right - left <= POINTS.page
    assert layout.text["observed_symptom_number_3"] == "observed_\nsymptom_\nnumber_3"
    alone = Layout(Graph([("z", "observed_symptom_number_3")]))
    assert alone.text["observed_symptom_number_3"] == "observed_\nsymptom_number_3"


def test_long_rows_are_broken() -> None:
    layout = Layout(Graph([("z", f"symptom_{place}") for place in range(39)]))
    assert [len(row) for row in layout.rows] != [1, 39]
    assert max(sum(isinstance(item, str) for item in row) for row in layout.rows) <= 12
