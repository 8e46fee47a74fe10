"""A model: a graph, mechanisms and parameters, with what belongs to it: files, text, labels, residuals."""

from otpdag.model.model import Model, load

__all__ = ["Model", "load"]
