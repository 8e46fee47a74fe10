"""Long sequences cut in pieces with context."""

import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward.series_pieces import Cuts
from tests.dynamic_models import poisson_steps


def hmm(size=3, transition=None):
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": transition or m.Categorical(size), "x": m.Poisson()})


def test_pieces_count_every_step_once():
    batch = poisson_steps([95, 7, 41])
    cuts = Cuts.of(batch)
    features = torch.arange(batch.rows, dtype=torch.float64).reshape(1, -1, 1)
    pieces = cuts.take(hmm().structure, features, torch.arange(len(cuts)))
    counted = pieces.features[0, pieces.counted, 0].sort().values
    torch.testing.assert_close(counted, torch.arange(batch.rows, dtype=torch.float64))
    lagged = pieces.lagged(pieces.features, 1)[0, :, 0]
    follows = pieces.follows(1) & pieces.counted
    torch.testing.assert_close(lagged[follows], pieces.features[0, follows, 0] - 1)
    assert int(follows.sum()) == batch.rows - 3
