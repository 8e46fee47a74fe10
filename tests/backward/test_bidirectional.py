"""The amortised bidirectional map: its chain against enumeration."""

import itertools

import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward.bidirectional import PREFIX, BidirectionalMap
from otpdag.backward.series_pieces import Cuts
from tests.dynamic_models import poisson_steps


def hmm(size=3, transition=None):
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": transition or m.Categorical(size), "x": m.Poisson()})


def random_map(structure, batch, seed=0):
    backward = BidirectionalMap.of(structure, batch, width=8)
    features = backward.features(batch)
    generator = torch.Generator().manual_seed(seed)
    phi = {
        key: torch.randn(value.shape, generator=generator, dtype=torch.float64) * 0.5
        for key, value in backward.init(generator).items()
    }
    return backward, phi, features


def test_the_chain_of_states_is_that_of_enumeration():
    batch = poisson_steps([4])
    backward, phi, features = random_map(hmm().structure, batch)
    pieces = Cuts.of(batch).take(hmm().structure, features, torch.tensor([0]))
    _, unary = backward.read(phi, pieces)
    found = backward.marginals(phi, pieces, unary)
    log_moves = torch.log_softmax(phi[f"{PREFIX}pair"], -1)[0]
    paths = torch.tensor(list(itertools.product(range(3), repeat=4)))
    log_weight = sum(unary[0, t, paths[:, t]] for t in range(4))
    log_weight = log_weight + sum(log_moves[paths[:, t - 1], paths[:, t]] for t in range(1, 4))
    weight = torch.softmax(log_weight, 0)
    one_hot = torch.eye(3, dtype=torch.float64)[paths]
    torch.testing.assert_close(found.state[0, :, 0], torch.einsum("p,pts->ts", weight, one_hot))
    pair = torch.einsum("p,pti,ptj->tij", weight, one_hot[:, :-1], one_hot[:, 1:])
    torch.testing.assert_close(found.pair[0, :, 0], pair)
    assert float(found.negentropy().sum()) == pytest.approx(float((weight * torch.log(weight)).sum()))


def test_relaxed_paths_have_the_chains_probabilities():
    batch = poisson_steps([5])
    backward, phi, features = random_map(hmm().structure, batch)
    pieces = Cuts.of(batch).take(hmm().structure, features, torch.zeros(4000, dtype=torch.int64))
    _, unary = backward.read(phi, pieces)
    uniform = torch.rand(1, 5 * 4000, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = backward.relaxed(phi, pieces, unary, uniform, 0.01).unflatten(1, (5, 4000))[0]
    found = backward.marginals(phi, pieces, unary)
    torch.testing.assert_close(drawn.mean(1), found.state[0, :, 0], atol=0.03, rtol=0)
    pair = torch.einsum("tni,tnj->tij", drawn[:-1], drawn[1:]) / 4000
    torch.testing.assert_close(pair, found.pair[0, :, 0], atol=0.03, rtol=0)


def test_what_lies_beyond_the_end_of_a_sequence_changes_nothing():
    model = hmm()
    short, long = poisson_steps([4]), poisson_steps([4, 9])
    long.steps.values["x"][:, :4] = short.steps.values["x"]
    backward, phi, _ = random_map(model.structure, short)
    alone = Cuts.of(short).take(model.structure, backward.features(short), torch.tensor([0]))
    beside = Cuts.of(long).take(model.structure, backward.features(long), torch.tensor([0, 1]))
    one = backward.marginals(phi, alone, backward.read(phi, alone)[1]).state[:, :, 0]
    other = backward.marginals(phi, beside, backward.read(phi, beside)[1]).state[:, :4, 0]
    torch.testing.assert_close(one, other)
