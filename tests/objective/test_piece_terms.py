"""Pieces of sequences: expectations over a map's chain beside sums over all paths."""

import itertools

import numpy as np
import pytest
import torch

from otpdag.backward.bidirectional import PREFIX, BidirectionalMap
from otpdag.backward.series_pieces import Cuts
from otpdag.objective import Drawn, Objective, Streams
from otpdag.objective.piece_terms import FEWEST_PIECES, PieceContext, piece_problem, piece_terms
from otpdag.objective.sampled import Moment
from tests.dynamic_models import by_paths, log_poisson, poisson_steps, random_poisson_hmm

MARGINAL = Drawn(noise="marginal")
LENGTH, SIZE = 4, 3


def random_map(structure, batch, seed=0):
    backward = BidirectionalMap.of(structure, batch, width=8)
    generator = torch.Generator().manual_seed(seed)
    phi = {
        key: 0.5 * torch.randn(value.shape, generator=generator, dtype=torch.float64)
        for key, value in backward.init(generator).items()
    }
    return backward, phi


def context(lengths, seed=0):
    model, batch = random_poisson_hmm(), poisson_steps(lengths)
    backward, phi = random_map(model.structure, batch, seed)
    pieces = Cuts.of(batch).take(model.structure, backward.features(batch), torch.arange(len(Cuts.of(batch))))
    return model, PieceContext(model.structure, backward, model.fitted.naturals, phi, pieces)


def log_joint(model, x):
    """Log-probabilities of all paths together with what is seen."""
    params = model.params()
    first, moves, rate = params["z[0]"]["probs"], params["z"]["probs"], np.exp(params["x"]["log_rate"])
    paths = np.array(list(itertools.product(range(SIZE), repeat=len(x))))
    seen = np.array([[log_poisson(value, one) for one in rate] for value in x])
    total = np.log(first[paths[:, 0]]) + sum(seen[t, paths[:, t]] for t in range(len(x)))
    return paths, total + sum(np.log(moves[paths[:, t - 1], paths[:, t]]) for t in range(1, len(x)))


@pytest.mark.parametrize("eps", [1.0, 0.4])
def test_the_entropic_loss_is_the_expectation_over_the_maps_paths(eps):
    model, held = context([LENGTH])
    x = held.pieces.values["x"].flatten().numpy()
    _, unary = held.backward.read(held.phi, held.pieces)
    moves = torch.log_softmax(held.phi[f"{PREFIX}pair"], -1)[0].numpy()
    paths, joint = log_joint(model, x)
    weight = sum(unary[0, t].numpy()[paths[:, t]] for t in range(LENGTH))
    weight = weight + sum(moves[paths[:, t - 1], paths[:, t]] for t in range(1, LENGTH))
    log_q = weight - np.log(np.exp(weight - weight.max()).sum()) - weight.max()
    rate = np.exp(model.params()["x"]["log_rate"])
    seen = np.array([[log_poisson(value, one) for one in rate] for value in x])
    cost = -sum(seen[t, paths[:, t]] for t in range(LENGTH))
    divergence = log_q - (joint + cost)
    terms = piece_terms(held, Streams([0]), Moment.of(Objective(eps=eps), MARGINAL, 0.0))
    assert terms.reconstruction.item() == pytest.approx(float(np.exp(log_q) @ cost) / LENGTH)
    assert terms.entropic.item() == pytest.approx(eps * float(np.exp(log_q) @ divergence) / LENGTH)


def test_no_map_goes_below_the_likelihood():
    model, held = context([LENGTH])
    likelihood = by_paths(model, held.pieces.values["x"].flatten().numpy())[0] / LENGTH
    for seed in range(5):
        _, other = context([LENGTH], seed)
        terms = piece_terms(other, Streams([0]), Moment.of(Objective(eps=1.0), MARGINAL, 0.0))
        assert terms.total.item() > -likelihood


def test_sequences_add_up_by_their_steps():
    _, both = context([4, 6])
    terms = piece_terms(both, Streams([0]), Moment.of(Objective(eps=1.0), MARGINAL, 0.0))
    structure, features = both.structure, both.pieces.features
    batch = poisson_steps([4, 6])
    cuts = Cuts.of(batch)
    total = 0.0
    for number, length in enumerate((4, 6)):
        pieces = cuts.take(structure, both.backward.features(batch), torch.tensor([number]))
        alone = PieceContext(structure, both.backward, both.naturals, both.phi, pieces)
        total += length * piece_terms(alone, Streams([0]), Moment.of(Objective(eps=1.0), MARGINAL, 0.0)).total.item()
    assert terms.total.item() == pytest.approx(total / 10)
    assert features.shape[1] == 12  # two pieces of the longer one's span


@pytest.mark.parametrize("noise", ["marginal", "sampled"])
def test_a_problem_draws_pieces_and_streams_decide(noise):
    model, batch = random_poisson_hmm(), poisson_steps([60] * 12)
    backward, phi = random_map(model.structure, batch)
    shapes = {key: parameter.shape for key, parameter in model.structure.parameters().items()}
    shapes |= {key: tuple(value.shape[1:]) for key, value in phi.items()}
    drawn = Drawn(noise=noise, batch_size=64)
    problem = piece_problem(model.structure, backward, batch, shapes, Objective(eps=1.0), drawn)
    assert problem.rows == 720
    raw = model.structure.raw(model.fitted.naturals)
    point = torch.cat([{**raw, **phi}[key].flatten(1) for key in shapes], 1)
    first, same, other = (problem.sampled(point, Streams([1], shared=k), 0.0).total.item() for k in (3, 3, 4))
    assert first == same != other
    assert 64 // problem.cuts.span < FEWEST_PIECES < len(problem.cuts)
