"""Joint states of a sequence."""

import numpy as np
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from tests.dynamic_models import laid_out


def test_too_many_states_are_refused():
    graph = otp.Graph([otp.lag("z", "z", by=6), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(4), "x": m.Normal()})
    with pytest.raises(otp.ModelError, match="4096 joint states"):
        laid_out(model, [np.zeros(10)])
