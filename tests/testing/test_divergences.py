"""The contract checks for divergences pass on ours and fail where they should."""

import dataclasses
import inspect

import pytest
import torch

from otpdag import divergences
from otpdag.divergences import AbstractDivergence
from otpdag.divergences.base import fill_weights
from otpdag.testing import DIVERGENCE_CHECKS, check_divergence

PUBLIC = [getattr(divergences, name) for name in divergences.__all__]
CLASSES = [cls for cls in PUBLIC if inspect.isclass(cls) and issubclass(cls, AbstractDivergence)]
CLASSES = [cls for cls in CLASSES if not inspect.isabstract(cls)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_ours_keep_their_promises(cls):
    fields = {field.name for field in dataclasses.fields(cls)}
    divergence = cls(unbiased=False) if "unbiased" in fields else cls()
    check_divergence(divergence)


class MeanShift(AbstractDivergence):
    """Squared distance between the means, with a fault of choice."""

    def __init__(self, fault=""):
        self.fault = fault

    def forward(self, x, y, a, b, generator):
        a, b = fill_weights(x, a), fill_weights(y, b)
        if self.fault == "weights":
            a = fill_weights(x, None)
        if self.fault == "order":
            a = a * torch.arange(1, x.shape[-2] + 1, dtype=x.dtype)
            b = b * torch.arange(1, y.shape[-2] + 1, dtype=x.dtype)
        shift = (a.unsqueeze(-1) * x).sum(-2) - (b.unsqueeze(-1) * y).sum(-2)
        value = shift.square().sum(-1)
        match self.fault:
            case "zero":
                return value + 1
            case "small":
                return -value
            case "replicas":
                return value.mean(0, keepdim=True)
            case "gradient":
                return 2 * value.detach() - value
            case "global":
                return value + 0 * torch.rand(1).double()
            case "random":
                return value + 1e-9 * torch.rand(1).double()
        return value


def test_a_sound_one_passes():
    check_divergence(MeanShift())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("zero", "MeanShift: equal samples are 1.00e.00 apart, not zero"),
        ("small", "MeanShift: a larger shift did not give a larger value"),
        ("order", "MeanShift: the order of the points matters: off by"),
        ("weights", "MeanShift: a weight is not a repetition: off by"),
        ("replicas", "MeanShift: replicas influence each other: off by"),
        ("gradient", "MeanShift: the gradient does not bring a shifted sample back"),
        ("global", "MeanShift: the global random state was touched"),
        ("random", "MeanShift: the same generator gave two values"),
    ],
)
def test_broken_promises_are_found(fault, message):
    with pytest.raises(AssertionError, match=message):
        check_divergence(MeanShift(fault))


def test_all_checks_are_listed():
    from otpdag.testing import divergences as module

    found = {value for name, value in vars(module).items() if name.startswith("check_") and name != "check_divergence"}
    assert found == set(DIVERGENCE_CHECKS)
