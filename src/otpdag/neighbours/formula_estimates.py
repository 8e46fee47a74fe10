r"""A fit in the terms of the formulas that its model was written by.

With the coefficients :math:`B` of the formulas and the implied covariance :math:`\Sigma` of their nodes, errors have
the covariance :math:`\Psi = (I - B) \Sigma (I - B)^\top`, however the model expresses it; standard errors follow by
the delta method.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from scipy.stats import norm
from torch import Tensor

from otpdag.engine.result import FitResult
from otpdag.errors import ModelError
from otpdag.neighbours.formulas import Formulas, read_formulas
from otpdag.objective import Problem
from otpdag.structure import Naturals
from otpdag.uncertainty import Errors, parameter_covariance, point_of

__all__ = ["formula_estimates"]


def formula_estimates(
    result: FitResult, text: str, *, level: float = 0.95, errors: Errors = "information"
) -> pd.DataFrame:
    """Coefficients, variances and covariances of errors, as lavaan and semopy list them.

    Args:
        result: A fit of the model that :func:`from_formulas` made of the text.
        text: The formulas.
        level: Nominal coverage of the intervals.
        errors: ``"information"`` or ``"sandwich"``.

    Returns:
        Columns ``left``, ``operator``, ``right``, ``estimate``, ``std_error``, ``lower`` and ``upper``; what is given
        in the formulas or by the units of a factor has no standard error.

    Raises:
        ModelError: The model is not that of the text.
    """
    formulas = read_formulas(text)
    absent = [node for node in formulas.nodes if node not in result.model.graph]
    if absent:
        raise ModelError(f"the model has no node {absent[0]!r}, which the formulas name")
    if result.problem is None or errors == "bootstrap":
        raise ModelError("the table of formulas needs a fit by likelihood, and errors by 'information' or 'sandwich'")
    problem = result.problem
    point = point_of(result.model, problem)
    covariance = parameter_covariance(problem, point, errors)

    def listed(flat: Tensor) -> Tensor:
        return _numbers(formulas, problem, problem.naturals(flat.unsqueeze(0)))

    slopes = torch.autograd.functional.jacobian(listed, point[0]).detach()
    error = ((slopes @ covariance.matrix) * slopes).sum(-1).clamp(min=0.0).sqrt().numpy()
    free = slopes.abs().amax(-1).numpy() > 1e-9  # what is given moves by rounding only
    table = pd.DataFrame(_lines(formulas), columns=["left", "operator", "right"])
    table["estimate"] = listed(point[0]).detach().numpy()
    table["std_error"] = np.where(free & ~covariance.untold(slopes), error, np.nan)
    reach = float(norm.ppf((1 + level) / 2))
    table["lower"] = table["estimate"] - reach * table["std_error"]
    table["upper"] = table["estimate"] + reach * table["std_error"]
    return table


def _lines(formulas: Formulas) -> list[tuple[str, str, str]]:
    """What each number is called: loadings, slopes, covariances, variances."""
    loadings = [(parent, "=~", child) for parent, child in formulas.edges if _is_loading(formulas, parent, child)]
    slopes = [(child, "~", parent) for parent, child in formulas.edges if not _is_loading(formulas, parent, child)]
    pairs = [(one, "~~", other) for one, other in formulas.pairs]
    return [*loadings, *slopes, *pairs, *((node, "~~", node) for node in formulas.nodes)]


def _is_loading(formulas: Formulas, parent: str, child: str) -> bool:
    return parent in formulas.factors and child not in formulas.factors


def _numbers(formulas: Formulas, problem: Problem, naturals: Naturals) -> Tensor:
    """The numbers of :func:`_lines`, of the first replica."""
    graph = problem.structure.graph
    place = {node: number for number, node in enumerate(graph.nodes)}
    arrows = torch.zeros(len(place), len(place), dtype=torch.float64)
    said = arrows.clone()
    for node in graph.nodes:
        for number, parent in enumerate(graph.parents(node)):
            cell = torch.zeros_like(arrows)
            cell[place[node], place[parent]] = 1.0
            weight = naturals[node]["weight"][0, number, 0]
            arrows = arrows + weight * cell
            if (parent, node) in formulas.edges:
                said = said + weight * cell
    own = torch.stack([naturals[node]["scale"][0, 0, 0] for node in graph.nodes])
    total = torch.linalg.inv(torch.eye(len(place)).to(own) - arrows) * own
    errors = (torch.eye(len(place)).to(own) - said) @ total
    noise = errors @ errors.mT
    return torch.stack(
        [
            noise[place[left], place[right]] if operator == "~~" else said[place[child], place[parent]]
            for left, operator, right in _lines(formulas)
            for parent, child in [(left, right) if operator == "=~" else (right, left)]
        ]
    )
