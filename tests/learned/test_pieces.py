"""Pieces of sequences: what they show, and expectations over a map's chain beside sums over all paths."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.divergences import AbstractDivergence
from otpdag.errors import ModelError
from otpdag.learned.algorithm import Moment
from otpdag.learned.sequence_map import PREFIX, BidirectionalMap
from otpdag.learned.sequence_problems import piece_problem, piece_step
from otpdag.learned.sequence_steps import Cuts, Steps, check_context
from otpdag.mechanisms.base import Noise
from otpdag.noise import Streams
from otpdag.objective import Drawn
from otpdag.settings import Objective, PushForward
from otpdag.structure import lag_name
from tests.dynamic_models import (
    by_paths,
    known_state_space,
    log_poisson,
    poisson_steps,
    random_poisson_hmm,
    switching_model,
)


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


def driven():
    """A hidden category with two lags of an observed number beside it."""
    edges = [otp.lag("z", "z"), ("z", "x"), otp.lag("x", "x"), otp.lag("x", "x", by=2), ("k", "x")]
    graph = otp.Graph(edges, hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal(), "k": m.Normal()}).structure


def steps_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    rows = sum(lengths)
    values = {name: torch.as_tensor(rng.normal(size=(1, rows, 1))) for name in "xk"}
    mask = {name: torch.as_tensor(rng.random((1, rows, 1)) < 0.8) for name in "xk"}
    return SequenceBatch(Batch(values, mask, torch.ones(1, rows).double()), torch.tensor(lengths))


@pytest.mark.parametrize(("lengths", "counted", "context"), [((9, 4, 1), 4, 2), ((5, 3), 5, 2), ((8, 8), 3, 1)])
def test_cuts_are_as_even_as_can_be(lengths, counted, context):
    cuts = Cuts.of(steps_of(lengths), counted=counted, context=context)
    expected, start = [], 0
    for length in lengths:
        many = -(-length // counted)
        each = -(-length // many)
        for piece in range(many):
            first = start + piece * each
            last = min(first + each, start + length)
            expected.append((max(first - context, start), first, last, start + length))
        start += length
    found = zip(*(one.tolist() for one in (cuts.begin, cuts.first, cuts.last, cuts.end)), strict=True)
    assert list(found) == expected
    assert len(cuts) == len(expected)
    longest = max(-(-length // -(-length // counted)) for length in lengths)
    assert cuts.span == longest + (2 * context if max(lengths) > counted else 0)


def test_pieces_show_what_their_steps_show():
    """Every cell of every piece by its number in the sequences."""
    structure, lengths = driven(), (9, 4, 1)
    batch = steps_of(lengths)
    cuts = Cuts.of(batch, counted=4, context=2)
    features = torch.arange(1.0, batch.rows + 1).double().reshape(1, -1, 1)
    chosen = torch.tensor([2, 0, 4, 3])
    pieces = cuts.take(structure, features, chosen)
    assert pieces.block.sizes == (4,) * cuts.span
    assert pieces.block.kinds.tolist() == list(range(cuts.span * 4))
    begins = np.concatenate([[0], np.cumsum(lengths)])
    x, seen = batch.steps.values["x"][0, :, 0], batch.steps.mask["x"][0, :, 0]
    for step, number in np.ndindex(cuts.span, 4):
        at, piece = step * 4 + number, int(chosen[number])
        row = int(cuts.begin[piece]) + step
        inside = row < int(cuts.end[piece])
        assert bool(pieces.inside[at]) == inside
        assert bool(pieces.counted[at]) == (int(cuts.first[piece]) <= row < int(cuts.last[piece]))
        assert pieces.block.steps[at].item() == step
        assert pieces.features[0, at, 0].item() == (row + 1 if inside else 0.0)
        if not inside:
            assert not bool(pieces.mask["x"][0, at, 0])
            continue
        time = row - max(begin for begin in begins if begin <= row)
        assert pieces.times[at].item() == time
        assert pieces.values["x"][0, at, 0] == x[row]
        assert bool(pieces.mask["x"][0, at, 0]) == bool(seen[row])
        for by in (1, 2):
            follows = time >= by and step >= by
            assert bool(pieces.follows(by)[at]) == follows
            name = lag_name("x", by)
            assert bool(pieces.mask[name][0, at, 0]) == (follows and bool(seen[row - by]))
            if follows:
                assert pieces.values[name][0, at, 0] == x[row - by]
        known = bool(batch.steps.mask["k"][0, row, 0])
        before = [step >= by and time >= by and bool(seen[row - by]) for by in (1, 2)]
        made = bool(pieces.counted[at]) and time >= 2 and known and all(before)
        assert bool(pieces.made("x")[at]) == made
        assert bool(pieces.made("k")[at]) == bool(pieces.counted[at])
        assert bool(pieces.made("z")[at]) == (bool(pieces.counted[at]) and time >= 1 and step >= 1)
        assert bool(pieces.made("z[0]")[at]) == (bool(pieces.counted[at]) and time < 1)
        rows = pieces.as_batch()
        assert bool(rows.mask["x"][0, at, 0]) == (made and bool(seen[row]))
        assert rows.weight[0, at].item() == float(pieces.counted[at])
        assert set(rows.values) == {"x", "k"}


def test_pieces_are_drawn_in_proportion_to_their_steps():
    structure, batch = driven(), steps_of((12, 2))
    cuts = Cuts.of(batch, counted=6, context=1)
    features = torch.zeros(1, batch.rows, 1).double()
    generator = torch.Generator().manual_seed(0)
    some = cuts.draw(structure, features, 2, generator)
    assert some.block.sizes[0] == 2
    many = cuts.draw(structure, features, 4000, generator)
    share = many.counted.unflatten(0, (cuts.span, 4000)).sum(0)
    assert (share == 2).double().mean().item() == pytest.approx(2 / 14, abs=0.02)
    whole = cuts.draw(structure, features, 3, generator)
    assert int(whole.counted.sum()) == 14


def test_lags_that_reach_further_than_pieces_read_are_refused():
    for by, refused in ((8, False), (9, True)):
        graph = otp.Graph([otp.lag("x", "x", by=by)])
        structure = otp.Model(graph, {"x": m.Normal()}).structure
        if refused:
            with pytest.raises(ModelError, match=r"pieces of sequences read 8 steps around them; .* reaches further"):
                check_context(structure)
        else:
            check_context(structure)


# -- terms -------------------------------------------------------------------------------------------------------------

MARGINAL = Drawn(noise="marginal")


@dataclass(frozen=True)
class PieceContext:
    """Pieces with the model and the map that are judged on them."""

    backward: BidirectionalMap
    naturals: Mapping[str, Mapping[str, torch.Tensor]]
    phi: Mapping[str, torch.Tensor]
    pieces: Steps


def piece_terms(held, streams, objective, drawn):
    moment, push = Moment.of(objective, drawn, 0.0), objective.push_forward or PushForward()
    step = piece_step(held.backward, held.naturals, held.phi, held.pieces, streams, moment)
    return step.terms(objective.at(0.0), push.divergence, streams)


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
    return model, PieceContext(backward, model.fitted.naturals, phi, pieces)


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
    terms = piece_terms(held, Streams([0]), Objective(eps=eps), MARGINAL)
    assert terms.reconstruction.item() == pytest.approx(float(np.exp(log_q) @ cost) / LENGTH)
    assert terms.entropic.item() == pytest.approx(eps * float(np.exp(log_q) @ divergence) / LENGTH)


def test_no_map_goes_below_the_likelihood():
    model, held = context([LENGTH])
    likelihood = by_paths(model, held.pieces.values["x"].flatten().numpy())[0] / LENGTH
    for seed in range(5):
        _, other = context([LENGTH], seed)
        terms = piece_terms(other, Streams([0]), Objective(eps=1.0), MARGINAL)
        assert terms.total.item() > -likelihood


def test_sequences_add_up_by_their_steps():
    _, both = context([4, 6])
    terms = piece_terms(both, Streams([0]), Objective(eps=1.0), MARGINAL)
    structure, features = both.pieces.structure, both.pieces.features
    batch = poisson_steps([4, 6])
    cuts = Cuts.of(batch)
    total = 0.0
    for number, length in enumerate((4, 6)):
        pieces = cuts.take(structure, both.backward.features(batch), torch.tensor([number]))
        alone = PieceContext(both.backward, both.naturals, both.phi, pieces)
        total += length * piece_terms(alone, Streams([0]), Objective(eps=1.0), MARGINAL).total.item()
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
    assert 64 // problem.cuts.span < problem.fewest < len(problem.cuts)


# -- draws of hidden numbers ------------------------------------------------------------------------------------------

SWITCHING = {
    "s": {"probs": [[0.8, 0.2], [0.3, 0.7]]},
    "s[0]": {"probs": [0.6, 0.4]},
    "z": {"loc": [-1.0, 1.5], "weight": 0.5, "scale": [0.8, 1.2]},
    "z[0]": {"loc": [0.0, 1.0], "scale": [1.0, 0.7]},
    "x": {"loc": 1.0, "weight": 0.5, "scale": 0.4},
    "y": {"loc": 0.0, "weight": -1.0, "scale": 0.8},
}


def normal_steps(lengths, nodes, missing=0.3):
    rng = np.random.default_rng(4)
    shape = (1, sum(lengths), 1)
    values = {node: torch.as_tensor(rng.normal(size=shape)) for node in nodes}
    mask = {node: torch.as_tensor(rng.random(shape) >= missing) for node in nodes}
    return SequenceBatch(Batch(values, mask, torch.ones(1, sum(lengths)).double()), torch.tensor(lengths))


def number_context(model, lengths, *, summed):
    batch = normal_steps(lengths, model.graph.observed)
    backward, phi = random_map(model.structure, batch)
    if summed:
        backward = replace(backward, categories=())
        phi = {key: value for key, value in phi.items() if "states" not in key and "pair" not in key}
        generator = torch.Generator().manual_seed(0)
        phi[f"{PREFIX}out.weight"] = backward.init(generator)[f"{PREFIX}out.weight"] + 0.1
    features, rng = backward.features(batch), np.random.default_rng(2)
    start = backward.smoother.start(batch, {"z": torch.as_tensor(rng.normal(size=(batch.rows, 1)))})
    pieces = Cuts.of(batch).take(model.structure, features, torch.arange(len(lengths)))
    raw = model.structure.raw(model.fitted.naturals)
    theta = {key: value.detach().clone().requires_grad_() for key, value in raw.items()}
    return theta, PieceContext(backward, model.structure.naturals(theta), {**phi, **start}, pieces)


def drawn_numbers(held, streams):
    """What the map draws of hidden numbers (M,), and their log-density."""
    backward, pieces = held.backward, held.pieces
    noise = streams.draw(Noise(1, "normal"), len(pieces.times), pieces.features)
    adjustment, _ = backward.read(held.phi, pieces)
    made = backward.smoother.draw(held.phi, pieces.block, pieces.features[..., :-1], noise.unsqueeze(1), adjustment)
    return made.values["z"][0, 0, :, 0], made.log_prob[0, 0]


def log_normal(x, mean, scale):
    return torch.distributions.Normal(mean, scale).log_prob(x)


def columns_of(pieces, number):
    """The steps of one piece, as far as its sequence goes."""
    rows = torch.arange(len(pieces.block.sizes)) * pieces.block.sizes[0] + number
    return rows[pieces.inside[rows]]


def seen_density(held, node, rows, level):
    params, value, seen = held.naturals[node], held.pieces.values[node][0, rows, 0], held.pieces.mask[node][0, rows, 0]
    mean = params["loc"].squeeze() + params["weight"].squeeze() * level
    return torch.where(seen, log_normal(value, mean, params["scale"].squeeze()), 0.0)


def switching_density(held, z):
    """Log-density of what is seen and drawn, summed over all paths of the states, of all pieces."""
    states, first, chain, begin = (held.naturals[name] for name in ("s", "s[0]", "z", "z[0]"))
    total = torch.zeros(()).double()
    for number in range(held.pieces.block.sizes[0]):
        rows = columns_of(held.pieces, number)
        level, paths = z[rows], []
        for path in itertools.product(range(2), repeat=len(rows)):
            at = torch.tensor(path)
            log = first["probs"].flatten().log()[at[0]] + states["probs"].reshape(2, 2).log()[at[:-1], at[1:]].sum()
            log = log + log_normal(level[0], begin["loc"][0].flatten()[at[0]], begin["scale"][0].flatten()[at[0]])
            slope, mean = chain["weight"].squeeze(), chain["loc"][0].flatten()[at[1:]]
            scale = chain["scale"][0].flatten()[at[1:]]
            paths.append(log + log_normal(level[1:], mean + slope * level[:-1], scale).sum())
        total = total + torch.stack(paths).logsumexp(0)
        total = total + sum(seen_density(held, node, rows, level).sum() for node in ("x", "y"))
    return total


def test_categories_beside_drawn_numbers_are_summed_over():
    theta, held = number_context(switching_model().set_params(SWITCHING), (4, 3), summed=True)
    terms = piece_terms(held, Streams([1]), Objective(eps=0.6), MARGINAL)
    z, log_q = drawn_numbers(held, Streams([1]))
    inside = held.pieces.inside
    exact = -switching_density(held, z) / 7
    assert terms.reconstruction.item() == pytest.approx(exact.item(), rel=1e-9)
    assert terms.entropic.item() == pytest.approx(0.6 * float((log_q * inside).sum()) / 7, rel=1e-9)
    wanted = torch.autograd.grad(exact, list(theta.values()), retain_graph=True)
    gradients = torch.autograd.grad(terms.reconstruction.sum(), list(theta.values()))
    for key, own, expected in zip(theta, gradients, wanted, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-8, msg=key)


class Recorded(AbstractDivergence):
    """Keeps what it is asked to compare, and says 1, 10, 100, ..."""

    def __init__(self):
        self.asked = []

    def forward(self, x, y, a, b, generator):
        self.asked.append((x.detach(), y.detach()))
        return torch.full((1,), 10.0 ** (len(self.asked) - 1), dtype=torch.float64)


def test_drawn_numbers_are_judged_by_the_model_and_compared_by_the_shares_of_first_and_later_steps():
    _, held = number_context(known_state_space(), (4, 3), summed=False)
    recorded = Recorded()
    objective = Objective(reconstruction=0.9, eps=0.6, push_forward=PushForward(0.5, recorded))
    terms = piece_terms(held, Streams([1]), objective, MARGINAL)
    sampled = piece_terms(held, Streams([1]), objective, Drawn(noise="sampled"))
    z, log_q = drawn_numbers(held, Streams([1]))
    cost, kl = torch.zeros(()), (log_q * held.pieces.inside).sum()
    for number in range(2):
        rows = columns_of(held.pieces, number)
        cost = cost - seen_density(held, "x", rows, z[rows]).sum()
        kl = kl - log_normal(z[rows[0]], 0.0, 1.0) - log_normal(z[rows[1:]], 0.85 * z[rows[:-1]], 1.0).sum()
    assert terms.reconstruction.item() == pytest.approx(0.9 * cost.item() / 7, rel=1e-9)
    for one in (terms, sampled):
        assert one.entropic.item() == pytest.approx(0.6 * kl.item() / 7, rel=1e-9)
    # two families of the hidden number: five later steps, with the step before as parent, and two first ones
    shares = {2: 5 / 7, 1: 2 / 7}
    widths = [x.shape[-1] for x, _ in recorded.asked]
    assert sorted(widths) == [1, 2]
    expected = sum(shares[width] * 10.0**at for at, width in enumerate(widths))
    assert sampled.divergence.item() == pytest.approx(0.5 * expected)
    for pushed, forward in recorded.asked:
        assert pushed.shape[1] == (5 if pushed.shape[-1] == 2 else 2)
        torch.testing.assert_close(pushed[..., 1:], forward[..., 1:])
        assert not torch.equal(pushed[..., 0], forward[..., 0])


def test_families_are_compared_on_no_more_steps_than_allowed():
    _, held = number_context(known_state_space(), (4, 3), summed=False)
    recorded = Recorded()
    objective = Objective(push_forward=PushForward(1.0, recorded))
    piece_terms(held, Streams([1]), objective, Drawn(noise="sampled", compared=3))
    assert sorted(pushed.shape[1] for pushed, _ in recorded.asked) == [2, 3]
    piece_terms(held, Streams([1]), objective, Drawn(noise="sampled", compared=1))
    assert len(recorded.asked) == 2  # one step is no sample
