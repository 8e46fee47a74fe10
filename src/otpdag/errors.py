"""The errors and warnings that the library raises, all under one root."""

__all__ = ["ConvergenceWarning", "DataError", "GraphError", "ModelError", "NotFittedError", "OtpdagError"]


class OtpdagError(Exception):
    """Root of every error that the library raises on purpose."""


class GraphError(OtpdagError, ValueError):
    """The graph is not a directed acyclic graph, or names a node that is not in it."""


class ModelError(OtpdagError, ValueError):
    """A mechanism, parameter or option does not fit the graph."""


class DataError(OtpdagError, ValueError):
    """The table does not fit the model."""


class NotFittedError(OtpdagError, RuntimeError):
    """The model has no parameters yet."""


class ConvergenceWarning(UserWarning):
    """A fit stopped before it converged."""
