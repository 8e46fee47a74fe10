"""The demonstration: learn a grid's hidden load from a table with gaps, and compare with the truth.

Run ``make demo``, or ``python examples/demo.py``. It takes some seconds and writes pictures to demo/, grid.png of the
readme among them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from make_grid import TRUTH, complete_table
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import otpdag as otp
from otpdag import mechanisms as m

HERE = Path(__file__).parent
console = Console(highlight=False)


def main(rows: int | None, restarts: int, out: Path) -> None:
    data = pd.read_csv(HERE / "data" / "grid.csv").head(rows)
    console.print(
        f"[bold]{len(data):,} days of an electricity grid[/]: {', '.join(data.columns)}; "
        f"{data.isna().to_numpy().mean():.0%} of the cells are missing, and the load was never metered."
    )

    # The whole of the library's use: a graph, a model, a fit.
    graph = otp.Graph(
        [("season", "load"), ("load", "price"), ("load", "outages"), ("load", "frequency"), ("load", "complaint")],
        hidden=["load"],
    )
    model = otp.Model.from_frame(graph, data, hidden={"load": m.Normal()}, mechanisms={"outages": m.Poisson()})
    console.print(model, markup=False)
    result = otp.fit(model, data, seed=0, restarts=restarts)
    console.print(f"\n{result.status} after {result.seconds:.1f} s (method {result.method.name})\n", markup=False)

    compare(model)
    console.print()
    complete = complete_table().head(len(data))
    judge(model, data, complete)

    out.mkdir(parents=True, exist_ok=True)
    draw(result, data, complete).savefig(out / "grid.png", dpi=130)
    otp.plots.draw_graph(graph).savefig(out / "graph.png", dpi=150)
    otp.plots.search_curve(result.stages).savefig(out / "learning.png", dpi=150)
    model.save(out / "grid.otp")
    console.print(f"\nWrote [bold]grid.png[/], graph.png, learning.png and the model, grid.otp, to {out}/.")


def compare(model: otp.Model) -> None:
    """Print the learned parameters beside the true ones.

    Nothing in the data tells where the load is zero, how it is scaled or which way it points: by convention it averages
    zero over the seasons, has noise of scale one, and the slope of its first child is positive. So is the truth.
    """
    estimated, true = otp.tables.estimates(model), otp.tables.estimates(model, TRUTH)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("node", "parameter", "at"):
        table.add_column(title)
    for title in ("true", "estimated", "difference"):
        table.add_column(title, justify="right")
    last = ""
    for row, truth in zip(estimated.itertuples(), true["value"], strict=True):
        if row.fixed or row.at.endswith("billing"):  # the first category is the reference: zero by definition
            continue
        node = row.node if row.node != last else ""
        table.add_row(node, row.parameter, row.at, f"{truth:.3f}", f"{row.value:.3f}", f"{row.value - truth:+.3f}")
        last = row.node
    console.print(table)


def draw(result: otp.FitResult, data: pd.DataFrame, complete: pd.DataFrame) -> Figure:
    """The graph, the hidden load beside the true one, and the slopes of the load beside the true ones."""
    figure = Figure(figsize=(11, 3.5), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[4, 3, 3])
    otp.plots.draw_graph(result.model, ax=left)
    left.set_title("The graph")
    for ax in (middle, right):
        ax.spines[["top", "right"]].set_visible(False)
    load = result.model.posterior(data, draws=100, seed=0)["load"].groupby(level="row").mean()
    middle.plot(complete["load"], load, "o", color="#2f5d9b", markersize=2, alpha=0.4)
    middle.axline((0, 0), slope=1, color="#9aa5b4", linewidth=1)
    middle.set(xlabel="the true load, never measured", ylabel="its posterior mean", title="The hidden load")
    table = result.summary().table
    true = otp.tables.estimates(result.model, TRUTH)["value"]
    slopes = (table["parameter"] == "weight") & (true != 0)
    shown = table[slopes][["estimate", "lower", "upper"]].div(true[slopes], axis=0)
    places = np.arange(len(shown))
    names = table[slopes]["node"] + table[slopes]["at"].str.removeprefix("load").str.replace(", ", ": ")
    right.hlines(places, shown["lower"], shown["upper"], color="#9aa5b4", linewidth=3)
    right.plot(shown["estimate"], places, "o", color="#2b3a55")
    right.axvline(1, color="#d1762b", linewidth=1)
    right.set_yticks(places, names)
    right.set(ylim=(len(shown) - 0.5, -0.5), xlabel="estimated / true slope, 95 % interval", title="What the load does")
    return figure


def judge(model: otp.Model, data: pd.DataFrame, complete: pd.DataFrame) -> None:
    """Print how well the hidden load and the missing cells are found again."""
    drawn = model.posterior(data, draws=100, seed=0)["load"].groupby(level="row")
    load = drawn.mean()
    console.print(f"Hidden load: correlation {load.corr(complete['load']):.2f} with the load that the rows came from.")
    low, high = drawn.quantile(0.05)[0], drawn.quantile(0.95)[0]
    shown = ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in data.loc[0].dropna().items()
    )
    console.print(f"First day ({shown}): load {load[0]:.2f}, between {low:.2f} and {high:.2f} with 90 % probability.")
    filled, gap = model.impute(data, seed=0), data["price"].isna()
    error = (filled["price"] - complete["price"])[gap].pow(2).mean() ** 0.5
    naive = (data["price"].mean() - complete["price"])[gap].pow(2).mean() ** 0.5
    console.print(
        f"Missing prices: filled with a typical error of {error:.1f}, against {naive:.1f} for the mean price."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, help="use only the first rows")
    parser.add_argument("--restarts", type=int, default=4, help="number of starts (default 4)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of the pictures (default demo)")
    arguments = parser.parse_args()
    main(arguments.rows, arguments.restarts, arguments.out)
