"""Figures: the graph of a model, the course of a fit, the choice of a model, segments and forecasts of a series.

Every function returns a :class:`matplotlib.figure.Figure`, shows nothing, and leaves pyplot alone.
"""

from otpdag.plots.choices import plot_forecast, plot_selection
from otpdag.plots.curves import learning_curve, search_curve
from otpdag.plots.graph_drawing import draw_graph
from otpdag.plots.segments import plot_segments

__all__ = ["draw_graph", "learning_curve", "plot_forecast", "plot_segments", "plot_selection", "search_curve"]
