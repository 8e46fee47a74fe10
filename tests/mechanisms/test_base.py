"""What mechanisms do unless they say otherwise."""

import pytest
import torch

from otpdag import mechanisms as m
from otpdag.spaces import Discrete, Real
from tests.mechanisms.own import Chances


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_of_all_categories_have_the_type_of_the_parameters(dtype):
    node = Chances(3).setup(m.Family("x"))
    chances = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]], dtype=dtype)
    found = node.log_probs({"chances": chances}, {})
    assert found.dtype == dtype
    torch.testing.assert_close(found, chances.log().unsqueeze(1))
    beside = node.log_probs({"chances": chances}, {}, torch.zeros(2, 4, 3, dtype=dtype))
    torch.testing.assert_close(beside, chances.log().unsqueeze(1).expand_as(beside))


def test_slopes_are_told_of_numeric_parents_alone():
    family = m.Family("x", (("a", Discrete(2)), ("r", Real(1)), ("s", Real(2))))
    node = m.Normal(2).setup(family)
    params = {"loc": torch.zeros(1, 2, 2), "weight": torch.arange(6.0).reshape(1, 3, 2), "scale": torch.ones(1, 2, 2)}
    assert node.slopes(params, "r").tolist() == [[0.0]]
    assert node.slopes(params, "s").tolist() == [[2.0, 4.0]]
    assert node.slopes(params, "a") is None
    assert node.slopes(params, "other") is None
    del params["weight"]
    assert node.slopes(params, "r") is None
    assert node.predictor.with_inputs_turned(params, {"r"}, torch.tensor([-1.0])) is None


def test_a_mechanism_needs_a_row_for_each_slope_and_for_each_other_parameter():
    family = m.Family("x", (("a", Discrete(4)), ("r", Real(1)), ("s", Real(2))))
    assert m.Normal().setup(family).rows_needed == 3 + 1 + 1  # slopes, a level, a scale
    assert m.Normal(scale=1.0).setup(family).rows_needed == 3 + 1
    assert m.Normal(weight=0.0, loc=0.0).setup(family).rows_needed == 1
    assert m.Categorical(5).setup(m.Family("x", family.parents[:1])).rows_needed == 1
