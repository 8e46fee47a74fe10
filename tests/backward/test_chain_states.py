"""Joint states of a sequence."""

import numpy as np
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward.chain_layout import lay_out_chain
from otpdag.data import Schema
from otpdag.data.sequences import Sequences, encode_sequences


def laid_out(model, data, **kwargs):
    schema = Schema.of(model.spaces, model.graph)
    batch = encode_sequences(Sequences(data), schema, hidden=model.graph.hidden, partial=True)
    return lay_out_chain(model.structure, batch, **kwargs)


def test_too_many_states_are_refused():
    graph = otp.Graph([otp.lag("z", "z", by=6), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(4), "x": m.Normal()})
    with pytest.raises(otp.ModelError, match="4096 joint states"):
        laid_out(model, [np.zeros(10)])
