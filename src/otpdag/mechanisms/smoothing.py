r"""How smooth curves are: the weight of a quadratic penalty, chosen by the restricted likelihood.

.. math:: \lambda_j \leftarrow \phi \, \frac{\mathrm{rank}(S_j) - \lambda_j \mathrm{tr}(H^{-1} S_j)}
          {\beta^\top S_j \beta}, \qquad H = X^\top W X + \sum_j \lambda_j S_j

for penalties :math:`\lambda_j \beta^\top S_j \beta / (2 \phi)` (Fellner and Schall; Wood and Fasiolo 2017), with the
working weights and responses of a generalised linear model. It is read off a completed table before the fit, whose
estimates then have the penalty as a prior.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.mechanisms.generalised_linear import Link

Bend = tuple[slice, Tensor]  # the penalty of some columns: where they stand, and the matrix of its quadratic form


def penalty_of(
    features: Tensor,
    target: Tensor,
    weight: Tensor,
    offset: Tensor | float,
    bends: Sequence[Bend],
    link: Link,
    *,
    steps: int = 200,
    settled: float = 1e-4,
    within: tuple[float, float] = (1e-9, 1e3),
) -> Tensor:
    """The precision (P, P) of a normal prior of slopes under which curves are as smooth as the rows say.

    Args:
        features: Of the rows (N, P).
        target: What is predicted (N, d); all of its columns are as smooth.
        weight: Of the rows (N,).
        offset: What is known of the prediction, (N, 1).
        bends: What is penalised.
        link: From predictions to means.
        steps: Most of them.
        settled: A change of the weights' logarithms that makes an end.
        within: Weights relative to those at which penalty and rows count alike: beyond, a curve is free, or a line.
    """
    unit = features.std(0).clamp(min=1e-12)
    design = torch.cat([torch.ones_like(weight).unsqueeze(-1), (features - features.mean(0)) / unit], -1)
    rows = _Rows(design, target, weight, offset, link)
    places = [slice(own.start + 1, own.stop + 1) for own, _ in bends]
    forms = [form / torch.outer(unit[own], unit[own]) for own, form in bends]
    ranks = [int(torch.linalg.matrix_rank(form, hermitian=True)) for form in forms]
    even = torch.stack([weight.sum() * len(form) / form.diagonal().sum() for form in forms])
    # from free curves on, steps are long; from lines on they would be short
    share, eta = torch.full_like(even, 1e3 * within[0]), link.line(_inside(target, weight, link))
    for _ in range(steps):
        coefficients, covariance, eta, spread = rows.step(eta, _joined(design, places, forms, share * even))
        before, fresh = share, []
        for place, form, rank, size in zip(places, forms, ranks, share * even, strict=True):
            beta, inverse = coefficients[:, place], covariance[:, place, place]
            left = (rank - size * (inverse * form).sum((-2, -1))).sum()
            fresh.append(spread * left / (beta * (beta @ form)).sum().clamp(min=1e-300))
        share = (torch.stack(fresh) / even).clamp(*within)
        if bool(((share / before).log().abs() < settled).all()):
            break
    chosen = _joined(design, places, forms, share * even / spread)[1:, 1:]
    return chosen * (unit.unsqueeze(0) * unit.unsqueeze(1))


@dataclass(frozen=True)
class _Rows:
    """What is predicted from a design, and how."""

    design: Tensor
    target: Tensor
    weight: Tensor
    offset: Tensor | float
    link: Link

    def step(self, eta: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The penalised working regression at predictions ``eta``.

        Returns:
            Its coefficients (d, P) and inverse information (d, P, P), the next predictions, and the variance around
            them of a row of weight one.
        """
        design, link, mean = self.design, self.link, self.link.mean(eta)
        trust = self.weight.unsqueeze(-1) * link.precision(mean).expand_as(mean)
        response = eta + (self.target - mean) / link.slope(mean).clamp(min=1e-12) - self.offset
        gram = torch.einsum("np,nd,nq->dpq", design, trust, design)
        inverse = torch.linalg.inv(gram + penalty)
        beta = (inverse @ (design.mT @ (trust * response)).mT.unsqueeze(-1)).squeeze(-1)
        fit = design @ beta.mT
        left = (trust * (response - fit) ** 2).sum()
        free = (self.weight.sum() * len(beta) - (inverse * gram).sum()).clamp(min=1.0)
        spread = left / free if link.has_spread else torch.ones_like(left)
        return beta, inverse, (fit + self.offset).clamp(-link.largest, link.largest), spread


def _inside(target: Tensor, weight: Tensor, link: Link) -> Tensor:
    centre = (weight.unsqueeze(-1) * target).sum(0) / weight.sum()
    return (0.5 * (target + centre)).clamp(*link.inside)


def _joined(design: Tensor, places: Sequence[slice], forms: Sequence[Tensor], sizes: Tensor) -> Tensor:
    whole = design.new_zeros(design.shape[1], design.shape[1])
    for place, form, size in zip(places, forms, sizes, strict=True):
        whole[place, place] += size * form
    return whole
