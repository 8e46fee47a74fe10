"""Groups of rows: which of them have a likelihood that is quadratic in what they share."""

from types import SimpleNamespace

import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.likelihood.grouped_rows import is_quadratic


@pytest.mark.parametrize(
    ("x", "y", "empty", "quadratic"),
    [
        (m.Normal(), m.Normal(), "", True),
        (m.Normal(), m.Normal(), "x", True),  # a normal gap of a normal node is one more normal variable
        (m.Poisson(), m.Normal(), "", True),  # what rows show may be of any family
        (m.Poisson(), m.Normal(), "x", False),
        (m.Poisson(), m.Normal(), "y", True),  # nobody reads it
        (m.Normal(), m.Poisson(), "", False),
        (m.Normal(), m.Normal(terms="x + u + x:u"), "", True),  # linear in what is shared
        (m.Normal(), m.Normal(terms="x + u + x:u"), "x", False),  # a product of two unknowns
        (m.Normal(), m.Normal(terms="x + u + I(u ** 2)"), "", False),
        (m.Normal(), m.Normal(scale="~ u", terms="x + u"), "", False),
        (m.Normal(), m.StudentT(), "", False),
    ],
)
def test_groups_are_quadratic_where_all_that_is_unknown_is_normal_and_linear(x, y, empty, quadratic):
    graph = otp.Graph([("u", "y"), ("x", "y")], hidden=["u"])
    structure = otp.Model(graph, {"u": m.Normal(group="school"), "x": x, "y": y}).structure
    seen = {node: torch.tensor([[[True], [node not in empty]]]) for node in "xy"}
    assert is_quadratic(structure, SimpleNamespace(mask=seen)) == quadratic
