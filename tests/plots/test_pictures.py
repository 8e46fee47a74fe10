"""Pictures show the numbers of data and model, and refuse what they cannot draw."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag import plots
from otpdag.errors import DataError, ModelError


@pytest.fixture(scope="module")
def fitted() -> tuple[otp.FitResult, pd.DataFrame]:
    rng = np.random.default_rng(0)
    kind = rng.random(300) < 0.3
    table = pd.DataFrame(
        {
            "size": np.where(kind, 6.0, 0.0) + rng.normal(size=300),
            "colour": np.where(rng.random(300) < np.where(kind, 0.9, 0.1), "red", "blue"),
        }
    )
    table.loc[::4, "size"] = np.nan
    graph = otp.Graph([("kind", "size"), ("kind", "colour")], hidden=["kind"])
    model = otp.Model.from_frame(graph, table, mechanisms={"kind": m.Categorical(2)})
    return otp.fit(model, table, seed=0, restarts=2), table


def test_data_stand_beside_the_model(fitted):
    result, table = fitted
    figure = plots.plot_fit(result, table)
    colours = next(ax for ax in figure.axes if ax.get_title() == "colour")
    heights = [bar.get_height() for bar in colours.patches]
    shares = table["colour"].value_counts(normalize=True).sort_index().tolist()
    assert heights[:2] == pytest.approx(shares)  # of the data
    assert heights[2:] == pytest.approx(shares, abs=0.03)  # of the model, which was fitted to them
    assert [ax.get_title() for ax in plots.plot_fit(result.model, table, nodes=["size"]).axes] == ["size"]
    with pytest.raises(DataError, match=r"nodes must name observed columns of the table; got \['kind'\]"):
        plots.plot_fit(result, table, nodes=["kind"])


def test_forest_holds_every_learned_number_and_its_interval(fitted):
    result, _ = fitted
    bounds = result.intervals(draws=10)
    figure = result.plot("estimates", intervals=bounds, nodes=["size"], parameter="loc")
    axes = figure.axes[0]
    drawn = axes.lines[1].get_xdata()
    assert list(drawn) == pytest.approx(result.model.params()["size"]["loc"].ravel().tolist())
    ends = np.array([segment[:, 0] for segment in axes.collections[0].get_segments()])
    own = bounds.sort_index().loc[("size", "loc")]
    assert ends == pytest.approx(own[["lower", "upper"]].to_numpy())
    with pytest.raises(ModelError, match="nodes and parameter leave nothing to draw"):
        plots.plot_estimates(result, parameter="slope")


def test_gaps_are_where_cells_are_empty(fitted):
    _, table = fitted
    holes = plots.plot_missing(table).axes[0].images[0].get_array()
    assert np.array_equal(np.asarray(holes, dtype=bool), table.isna().to_numpy())


def test_hidden_categories_and_their_classes(fitted):
    result, table = fitted
    bars = result.plot("hidden", table, rows=20).axes[0].patches
    assert sum(bar.get_height() for bar in bars) == pytest.approx(20)  # shares of a row sum to one
    size = next(ax for ax in result.plot("classes", table).axes if ax.get_title() == "size")
    middles = size.lines[0].get_ydata()
    assert sorted(np.asarray(middles)) == pytest.approx([0.0, 6.0], abs=0.5)
    assert list(middles) == pytest.approx(result.model.params()["size"]["loc"].ravel().tolist(), abs=0.3)  # in order
    with pytest.raises(ModelError, match=r"node must be a hidden category, of \['kind'\]; got 'size'"):
        plots.plot_classes(result, table, "size")
    with pytest.raises(ModelError, match=r"node must be a hidden node, of \['kind'\]; got 'size'"):
        plots.plot_hidden(result, table, "size")


def test_effects_are_those_of_setting_the_node(fitted):
    result, _ = fitted
    axes = plots.plot_effects(result, "kind", "size", [0, 1], rows=2000).axes[0]
    assert sorted(axes.lines[0].get_ydata()) == pytest.approx([0.0, 6.0], abs=0.5)
    assert len(plots.plot_effects(result, "kind", "colour", [0, 1], rows=200).axes[0].patches) == 4
    with pytest.raises(otp.GraphError, match="node 'shape' is not in the graph"):
        plots.plot_effects(result, "shape", "size", [0])


def test_sequences_and_strangers_are_refused():
    chain = otp.Model(otp.Graph([otp.lag("x", "x")]), {"x": m.Normal()})
    with pytest.raises(ModelError, match="plot_fit draws tables; the graph has lagged edges"):
        plots.plot_fit(chain, pd.DataFrame({"x": [1.0]}))
    with pytest.raises(ModelError, match=r"fitted must be an otp\.Model or an otp\.FitResult; got int"):
        plots.plot_estimates(3)


def test_notebooks_show_graphs_and_results(fitted):
    result, _ = fitted
    assert result.model.graph._repr_svg_().count("<svg") == 1
    assert "converged" in result._repr_html_()
    with pytest.raises(ModelError, match=r"what must be one of 'classes', .*, 'plan', 'term'; got 'all'"):
        result.plot("all")


def test_codes_are_the_same_however_a_column_stores_them():
    table = pd.DataFrame({"vote": [0.0, 1.0, 1.0, 1.0, None] * 10})  # floats, for the sake of the gap
    model = otp.Model(otp.Graph([], nodes=["vote"]), {"vote": m.Categorical(2)})
    otp.fit(model, table, restarts=1)
    axes = plots.plot_fit(model, table).axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "1"]


def test_a_notebook_shows_pictures_without_pyplot():
    picture = otp.plots.draw_graph(otp.Graph([("a", "b")]))
    assert picture._repr_png_().startswith(b"\x89PNG")


def test_a_picture_that_lacks_its_table_says_so():
    table = pd.DataFrame({"x": np.random.default_rng(0).normal(size=30)})
    result = otp.fit(otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()}), table)
    with pytest.raises(otp.ModelError, match="plot_classes takes: missing a required argument: 'data'"):
        result.plot("classes")
