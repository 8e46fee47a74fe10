"""Random streams of replicas."""

import numpy as np
import pytest
import torch
from scipy import stats

from otpdag.mechanisms.base import Noise
from otpdag.noise import Streams

LIKE = torch.zeros(1, dtype=torch.float64)


def everything(streams):
    return {
        "noise": streams.draw(Noise(2, "normal"), 5, LIKE),
        "rows": streams.rows(100, 7),
    }


def test_a_replica_draws_the_same_whoever_is_beside_it():
    together, alone = everything(Streams([3, 8, 5])), everything(Streams([8]))
    for name, value in alone.items():
        assert torch.equal(together[name][1:2], value)


def test_replicas_and_draws_differ():
    streams = Streams([3, 8])
    first, second = streams.draw(Noise(1, "normal"), 50, LIKE), streams.draw(Noise(1, "normal"), 50, LIKE)
    assert first.shape == (2, 50, 1)
    for one, other in ((first[0], first[1]), (first[0], second[0])):
        assert not (one == other).any()


@pytest.mark.parametrize(("kind", "law"), [("normal", "norm"), ("uniform", "uniform")])
def test_noise_has_its_prior(kind, law):
    drawn = Streams([0]).draw(Noise(1, kind), 4000, LIKE).numpy().ravel()
    assert stats.kstest(drawn, law).pvalue > 0.01
    assert Streams([0]).draw(Noise(1, kind), 3, LIKE.float()).dtype == torch.float32


def test_small_data_are_taken_whole():
    streams = Streams([1, 2])
    assert streams.rows(4, 4).tolist() == [[0, 1, 2, 3]] * 2
    counts = np.bincount(streams.rows(10, 9)[0], minlength=10)
    assert counts.sum() == 9
    many = torch.stack([streams.rows(10, 9)[0] for _ in range(400)]).flatten().numpy()
    assert stats.chisquare(np.bincount(many, minlength=10)).pvalue > 0.01


def test_streams_go_on_from_where_a_state_was_taken():
    streams = Streams([3, 8], shared=4)
    everything(streams)
    state = {name: value.clone() for name, value in streams.state().items()}
    expected = everything(streams), torch.rand(3, generator=streams.shared)
    other = Streams([0, 0])
    other.restore(state)
    found = everything(other), torch.rand(3, generator=other.shared)
    for name, value in expected[0].items():
        assert torch.equal(found[0][name], value)
    assert torch.equal(found[1], expected[1])


def test_what_is_shared_does_not_move_the_replicas():
    plain, used = Streams([3]), Streams([3], shared=9)
    torch.rand(10, generator=used.shared)
    assert torch.equal(plain.draw(Noise(1, "normal"), 5, LIKE), used.draw(Noise(1, "normal"), 5, LIKE))
