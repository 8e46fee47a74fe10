"""Products of lines, against plain multiplication and its own gradient."""

import torch

from otpdag.divergences.whitened import products_of_lines

FACTORS = [torch.tensor([4, 0, 2, 7]), torch.tensor([1, 5, 3]), torch.tensor([6])]


def plainly(lines):
    first = lines[..., 4, :] * lines[..., 1, :] * lines[..., 6, :]
    return torch.stack(
        [first, lines[..., 0, :] * lines[..., 5, :], lines[..., 2, :] * lines[..., 3, :], lines[..., 7, :]], -2
    )


def lines_of(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_products_are_those_of_their_factors():
    lines = lines_of(2, 8, 5)
    before = lines.clone()
    torch.testing.assert_close(products_of_lines(lines, FACTORS), plainly(lines))
    assert torch.equal(lines, before)


def test_gradients_are_those_of_plain_multiplication():
    lines, weight = lines_of(2, 8, 5).requires_grad_(), lines_of(2, 4, 5)
    lines.data[0, 1, 2] = 0.0  # a factor of zero still has a gradient
    (found,) = torch.autograd.grad((products_of_lines(lines, FACTORS) * weight).sum(), lines)
    (expected,) = torch.autograd.grad((plainly(lines) * weight).sum(), lines)
    torch.testing.assert_close(found, expected)


def test_second_derivatives_are_right():
    lines = lines_of(8, 2).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: products_of_lines(x, FACTORS), (lines,))
