import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.answers.information import free_parameters
from otpdag.structure import Structure


def count(edges, mechanisms, hidden=(), nodes=()):
    return free_parameters(Structure.bind(otp.Graph(edges, hidden=hidden, nodes=nodes), mechanisms))


@pytest.mark.parametrize(
    ("edges", "mechanisms", "hidden", "expected"),
    [
        ([("z", "x")], {"z": m.Categorical(3), "x": m.Normal(dim=2)}, ["z"], 2 + 6 + 6),
        ([("z", "x")], {"z": m.Categorical(1), "x": m.Normal()}, ["z"], 2),
        ([("f", "x"), ("f", "y")], {"f": m.Normal(), "x": m.Normal(), "y": m.Normal()}, ["f"], 6),
        # logits are relative to one category
        ([("x", "y")], {"x": m.Normal(), "y": m.Categorical(3)}, [], 2 + 2 + 2),
        # tied scales count once, fixed ones not at all
        ([("x", "y")], {"x": m.Normal(scale=otp.tie("s")), "y": m.Normal(scale=otp.tie("s"))}, [], 1 + 2 + 1),
        ([("x", "y")], {"x": m.Normal(scale=1.0), "y": m.Normal(loc=0.0)}, [], 1 + 2),
        # the level of a hidden number goes into its children
        ([("k", "f"), ("f", "x")], {"k": m.Categorical(2), "f": m.Normal(), "x": m.Normal()}, ["f"], 1 + 1 + 3),
    ],
)
def test_parameters_that_are_free_are_counted(edges, mechanisms, hidden, expected):
    assert count(edges, mechanisms, hidden) == expected
