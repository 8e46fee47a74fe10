"""Figures: the graph of a model, the course of a fit, a model beside its data, the choice of a model, series.

Every function returns a :class:`matplotlib.figure.Figure`, shows nothing, and leaves pyplot alone.
"""

from otpdag.plots.curves import learning_curve, plot_forecast, plot_segments, plot_selection, search_curve
from otpdag.plots.graph import draw_graph
from otpdag.plots.pictures import (
    plot_classes,
    plot_effects,
    plot_estimates,
    plot_fit,
    plot_hidden,
    plot_missing,
    plot_pairs,
)

__all__ = [
    "draw_graph",
    "learning_curve",
    "plot_classes",
    "plot_effects",
    "plot_estimates",
    "plot_fit",
    "plot_forecast",
    "plot_hidden",
    "plot_missing",
    "plot_pairs",
    "plot_segments",
    "plot_selection",
    "search_curve",
]
