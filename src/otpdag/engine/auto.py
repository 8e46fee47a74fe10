"""How ``method="auto"`` chooses: from the graph and the mechanisms alone."""

from __future__ import annotations

import math

from otpdag.backward.closed_form import GibbsOptions
from otpdag.engine.method import Method, entropic, paper, transport
from otpdag.structure import Structure

__all__ = ["choose"]


def choose(structure: Structure) -> Method:
    """The entropic end where every density is known, transport where one is not.

    - Every observed node has a density, and unknown categories can be enumerated: ``entropic``. Its closed-form
      backward map makes it maximum likelihood, the most accurate choice if the model is right.
    - Some observed node has no density, but inner nodes can be enumerated or drawn: ``transport``, direct route.
    - Otherwise: ``paper``, which relaxes what cannot be enumerated.
    """
    graph, mechanisms = structure.graph, structure.mechanisms
    relevant = [n for n in graph.nodes if n in graph.observed or graph.observed_descendants(n)]
    densities = all(mechanisms[n].has_density or mechanisms[n].is_given for n in relevant)
    hidden_states = math.prod(mechanisms[n].space.width for n in graph.hidden if mechanisms[n].space.is_discrete)
    if densities and hidden_states <= GibbsOptions().states:
        return entropic()
    inner = [n for n in graph.nodes if graph.observed_descendants(n)]
    inner_states = math.prod(mechanisms[n].space.width for n in inner if mechanisms[n].space.is_discrete)
    return transport() if inner_states <= GibbsOptions().states else paper()
