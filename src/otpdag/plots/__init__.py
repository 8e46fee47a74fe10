"""Figures: the graph of a model, the course of a fit, a model beside its data, the choice of a model, series.

Every function returns a :class:`matplotlib.figure.Figure`, shows nothing, and leaves pyplot alone.
"""

from otpdag.plots.curves import learning_curve as learning_curve
from otpdag.plots.curves import plot_forecast as plot_forecast
from otpdag.plots.curves import plot_segments as plot_segments
from otpdag.plots.curves import plot_selection as plot_selection
from otpdag.plots.curves import search_curve as search_curve
from otpdag.plots.graph import draw_graph as draw_graph
from otpdag.plots.pictures import plot_classes as plot_classes
from otpdag.plots.pictures import plot_effects as plot_effects
from otpdag.plots.pictures import plot_estimates as plot_estimates
from otpdag.plots.pictures import plot_fit as plot_fit
from otpdag.plots.pictures import plot_hidden as plot_hidden
from otpdag.plots.pictures import plot_missing as plot_missing
from otpdag.plots.pictures import plot_plan as plot_plan
from otpdag.plots.pictures import plot_term as plot_term
