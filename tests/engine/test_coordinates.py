"""Coordinates in which a loss is round, of losses whose curvature is known."""

from dataclasses import dataclass, field

import pytest
import torch

from otpdag.engine.lbfgs import Coordinates
from otpdag.problem import LossTerms, Problem, curvature


@dataclass(frozen=True)
class Quadric(Problem):
    """Half of x' A x, for each replica the same A."""

    curvature: torch.Tensor
    pays: bool = True
    structure: object = None
    shapes: dict = field(default_factory=dict)

    @property
    def rows(self):
        return 1

    def loss(self, point):
        loss = 0.5 * torch.einsum("ri,ij,rj->r", point, self.curvature, point)
        return LossTerms.of(loss, reconstruction=loss)

    def metric(self, points):
        return curvature(lambda: self, points) if self.pays else None


def symmetric(values, seed=0):
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    return turn @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ turn.T


def points(size, replicas=2):
    return torch.randn(replicas, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_the_curvature_becomes_one_up_to_its_sign():
    problem = Quadric(symmetric([100.0, 1.0, 0.01, -4.0]))
    coordinates = Coordinates.of(problem, points(4))
    assert coordinates.matrix.shape == (2, 4, 4)
    for replica in range(2):

        def loss(y, replica=replica):
            every = torch.zeros(2, 4, dtype=torch.float64).index_put((torch.tensor(replica),), y)
            return problem.loss(coordinates.point(every)).total[replica]

        hessian = torch.autograd.functional.hessian(loss, torch.zeros(4, dtype=torch.float64))
        torch.testing.assert_close(hessian.diagonal().sort().values, torch.tensor([-1.0, 1.0, 1.0, 1.0]).double())
        torch.testing.assert_close(hessian, torch.diag(hessian.diagonal()), atol=1e-9, rtol=0)


def test_a_step_of_steepest_descent_reaches_the_minimum_of_a_bowl():
    problem, start = Quadric(symmetric([50.0, 2.0, 0.1])), points(3)
    coordinates = Coordinates.of(problem, start)
    y = torch.zeros_like(start, requires_grad=True)
    (slope,) = torch.autograd.grad(problem.loss(coordinates.point(y)).total.sum(), y)
    torch.testing.assert_close(coordinates.point(-slope), torch.zeros_like(start), atol=1e-9, rtol=0)


def test_the_origin_is_where_the_curvature_was_taken():
    start = points(3)
    for problem in (Quadric(symmetric([5.0, 2.0, 1.0])), Quadric(symmetric([5.0, 2.0, 1.0]), pays=False)):
        coordinates = Coordinates.of(problem, start)
        assert torch.equal(coordinates.point(torch.zeros_like(start)), start)


def test_flat_directions_are_not_stretched_without_end():
    coordinates = Coordinates.of(Quadric(symmetric([1.0, 0.0])), points(2))
    lengths = torch.linalg.svdvals(coordinates.matrix)
    torch.testing.assert_close(lengths, torch.tensor([[1e-7**-0.5, 1.0]] * 2).double())


@pytest.mark.parametrize("problem", [Quadric(torch.eye(3).double(), pays=False), Quadric(torch.eye(201).double())])
def test_where_it_does_not_pay_coordinates_are_shifts(problem):
    start = points(len(problem.curvature))
    assert start.shape[1] == 3 or start.shape[1] > 200
    coordinates = Coordinates.of(problem, start)
    assert coordinates.matrix is None
    torch.testing.assert_close(coordinates.point(torch.ones_like(start)), start + 1)


def test_a_curvature_that_is_not_finite_counts_as_round():
    coordinates = Coordinates.of(Quadric(torch.full((2, 2), torch.nan).double()), points(2))
    torch.testing.assert_close(coordinates.matrix @ coordinates.matrix.mT, torch.eye(2).double().expand(2, 2, 2))


@dataclass(frozen=True)
class Informed(Quadric):
    """Says what a row tells of each parameter."""

    def metric(self, points):
        return torch.tensor([[4.0, 0.25, 1.0]] * len(points)).double()


def test_where_curvature_does_not_pay_scales_are_what_rows_tell():
    start = points(3)
    coordinates = Coordinates.of(Informed(torch.eye(3).double(), pays=False), start)
    y = torch.tensor([[1.0, 2.0, 3.0]] * 2).double()
    torch.testing.assert_close(coordinates.point(y), start + torch.tensor([0.5, 4.0, 3.0]).double())
    assert coordinates.matrix is None
    assert Coordinates.of(Quadric(torch.eye(3).double()), start).scale is None


def test_as_many_parameters_as_pay_have_a_curvature():
    assert Coordinates.of(Quadric(torch.eye(200).double()), points(200)).matrix is not None
    assert Coordinates.of(Quadric(torch.eye(0).double()), torch.zeros(2, 0).double()).matrix is None
