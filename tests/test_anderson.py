"""Anderson's mixing solves linear fixed points in as many steps as there are dimensions."""

import torch

from otpdag.numerics import correction


def test_a_linear_map_is_solved_by_as_many_differences_as_it_has_dimensions():
    generator = torch.Generator().manual_seed(0)
    slope = 0.3 * torch.randn(2, 4, 4, generator=generator, dtype=torch.float64)  # two replicas, each a map of its own
    level = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    points = torch.randn(5, 2, 4, generator=generator, dtype=torch.float64)
    images = torch.stack([(slope @ point.unsqueeze(-1)).squeeze(-1) + level for point in points])
    change = images - points
    moves, changes = points.diff(dim=0).transpose(0, 1), change.diff(dim=0).transpose(0, 1)
    found = images[-1] - correction(change[-1], moves, changes)
    expected = torch.linalg.solve(torch.eye(4).double() - slope, level.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_rows_of_zeros_do_not_count():
    change, move = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[[2.0, 0.0]]]).double()
    some = correction(change, move, -0.5 * move)
    padded = [torch.cat([one, torch.zeros(1, 3, 2).double()], 1) for one in (move, -0.5 * move)]
    torch.testing.assert_close(correction(change, *padded), some, rtol=1e-6, atol=1e-9)
