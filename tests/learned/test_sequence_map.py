"""Maps of sequences: a Gaussian chain beside one dense normal, chains of states beside enumeration."""

import itertools

import numpy as np
import pytest
import torch
from scipy import special, stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward import RowCode
from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.learned.sequence_map import PREFIX, Adjustment, BidirectionalMap, SequenceMap
from otpdag.learned.sequence_steps import Cuts
from otpdag.likelihood.chain_layout import one_block
from tests.dynamic_models import poisson_steps

LENGTHS = (4, 2, 3)


def world(width=2, seed=0):
    """A map of hidden numbers of one or two coordinates, with random potentials and dynamics."""
    rng = np.random.default_rng(seed)
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x"), ("z", "y")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Normal(width), "x": m.Normal(), "y": m.Normal()})
    x = torch.as_tensor(rng.normal(size=(2, 1, sum(LENGTHS), 1)))
    seen = torch.as_tensor(rng.random((2, 1, sum(LENGTHS), 1)) < 0.7)
    steps = Batch({"x": x[0], "y": x[1]}, {"x": seen[0], "y": seen[1]}, torch.ones(1, sum(LENGTHS)).double())
    batch = SequenceBatch(steps, torch.tensor(LENGTHS))
    backward = SequenceMap(model.structure, RowCode.of(model.structure, steps, ("x", "y")), ("z",))
    features = backward.features(batch)
    shapes = {
        "linear": (features.shape[-1], width),
        "precision": (2, width),
        "carry": (width, width),
        "bias": (width,),
        "log_scale": (width,),
        "first": (width,),
        "first_log_scale": (width,),
    }
    phi = {f"phi.sequence.{k}": torch.as_tensor(0.5 * rng.normal(size=(1, *s))) for k, s in shapes.items()}
    return backward, batch, features, phi


def dense(backward, features, phi, rows, adjustment=None):
    """Mean and covariance of the steps of one sequence, by the definition in the module."""
    part = {key.removeprefix("phi.sequence."): value[0].numpy() for key, value in phi.items()}
    width, many = len(part["bias"]), len(rows)
    precision, pull = np.zeros((many, width, many, width)), np.zeros((many, width))
    for t, row in enumerate(rows):
        factor = np.ones(2) if adjustment is None else adjustment.precision[0, row].numpy()
        own = features[0, row].numpy() @ part["linear"]
        if adjustment is not None:
            own = (own + adjustment.pull[0, row].numpy()) * float(adjustment.inside[row])
        pull[t] += own
        for cell, (_, mask) in enumerate(backward.cells):
            side = part["precision"][cell]
            precision[t, :, t] += float(features[0, row, mask]) * factor[cell] * np.outer(side, side)
        scale = np.diag(np.exp(-2 * part["first_log_scale" if t == 0 else "log_scale"]))
        precision[t, :, t] += scale
        if t == 0:
            pull[t] += scale @ part["first"]
        else:
            carry = part["carry"]
            precision[t - 1, :, t - 1] += carry.T @ scale @ carry
            precision[t - 1, :, t] -= carry.T @ scale
            precision[t, :, t - 1] -= scale @ carry
            pull[t] += scale @ part["bias"]
            pull[t - 1] -= carry.T @ scale @ part["bias"]
    covariance = np.linalg.inv(precision.reshape(many * width, -1))
    return covariance @ pull.ravel(), covariance


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("adjusted", [False, True])
def test_draws_and_their_density_are_those_of_the_dense_normal(width, adjusted):
    backward, batch, features, phi = world(width)
    block = one_block(batch)
    extra = None
    if adjusted:
        rng = np.random.default_rng(5)
        inside = torch.ones(batch.rows).double()
        inside[batch.starts] = 0.0
        extra = Adjustment(
            torch.as_tensor(rng.uniform(0.2, 2, (1, batch.rows, 2))),
            torch.as_tensor(rng.normal(size=(1, batch.rows, width))),
            inside,
        )
    total = batch.rows * width
    # no noise, a unit of each noise alone, and some noise at random
    noise = torch.cat([torch.zeros(1, total), torch.eye(total), torch.randn(3, total)]).double()
    noise = noise.reshape(1, -1, batch.rows, width)
    given = extra
    if extra is not None:
        given = Adjustment(extra.precision[:, block.rows], extra.pull[:, block.rows], extra.inside[block.rows])
    drawn = backward.draw(phi, block, features[:, block.rows], noise, given)
    back = torch.argsort(block.rows)
    values = drawn.values["z"][0][:, back].numpy()  # (draws, M, width), in the order of the batch
    log_prob = drawn.log_prob[0][:, back].numpy()
    start = 0
    for length in LENGTHS:
        rows = list(range(start, start + length))
        mean, covariance = dense(backward, features, phi, rows, extra)
        own = values[:, rows].reshape(len(values), -1)
        np.testing.assert_allclose(own[0], mean, rtol=1e-9, atol=1e-9)
        moved = own[1 : 1 + total] - own[0]  # draws are linear in their noise
        np.testing.assert_allclose(moved.T @ moved, covariance, rtol=1e-9, atol=1e-9)
        law = stats.multivariate_normal(mean, covariance)
        np.testing.assert_allclose(log_prob[:, rows].sum(1), law.logpdf(own), rtol=1e-9)
        start += length


def test_features_are_the_cells_of_the_steps_around_and_nothing_of_other_sequences():
    backward, batch, features, _ = world()
    row = backward.code(batch.steps.values, batch.steps.mask)[0].numpy()
    size = row.shape[1]
    starts = np.cumsum((0, *LENGTHS[:-1]))
    for begin, length in zip(starts, LENGTHS, strict=True):
        for t in range(length):
            for place, shift in enumerate((-1, 0, 1)):
                other = t + shift
                wanted = row[begin + other] if 0 <= other < length else np.zeros(size)
                np.testing.assert_array_equal(features[0, begin + t, place * size : (place + 1) * size], wanted)
    own = [(features[0, :, value], features[0, :, mask]) for value, mask in backward.cells]
    for (value, mask), node in zip(own, ("x", "y"), strict=True):
        seen = batch.steps.mask[node][0, :, 0]
        np.testing.assert_array_equal(mask.numpy(), seen.numpy().astype(float))
        assert (value[~seen] == 0).all()


def test_a_start_reads_the_potentials_off_completed_values():
    """Of a linear Gaussian model whose numbers are known, the start is that model's own posterior."""
    rng = np.random.default_rng(0)
    lengths = torch.full((40,), 100)
    z = np.zeros((40, 100))
    for t in range(1, 100):
        z[:, t] = 0.3 + 0.8 * z[:, t - 1] + 0.5 * rng.normal(size=40)
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Normal(), "x": m.Normal()})
    x = torch.as_tensor(1.0 + 2.0 * z + 0.4 * rng.normal(size=z.shape)).reshape(1, -1, 1)
    seen = torch.as_tensor(rng.random(x.shape) < 0.8)
    batch = SequenceBatch(Batch({"x": x}, {"x": seen}, torch.ones(1, x.shape[1]).double()), lengths)
    backward = SequenceMap(model.structure, RowCode.of(model.structure, batch.steps, ("x",)), ("z",))
    features = backward.features(batch)
    phi = backward.start(batch, {"z": torch.as_tensor(z).reshape(-1, 1)})
    phi = {key.removeprefix("phi.sequence."): value[0].numpy() for key, value in phi.items()}
    assert phi["carry"].item() == pytest.approx(0.8, abs=0.02)
    assert phi["bias"].item() == pytest.approx(0.3, abs=0.02)
    assert np.exp(phi["log_scale"]).item() == pytest.approx(0.5, abs=0.02)
    assert (phi["first"], phi["first_log_scale"]) == (0.0, 0.0)
    # what a cell x says of z is (x - 1) * 2 / 0.16 as a pull and 2^2 / 0.16 as a precision, in the units of the code
    ((value, mask),) = backward.cells
    shown = features[0, seen[0, :, 0]]
    unit = float(((x[seen] - x[seen].mean()) / (shown[:, value] - shown[:, value].mean())).mean())
    assert phi["precision"].item() == pytest.approx(2.0 / 0.4, rel=0.03)
    assert phi["linear"][value].item() == pytest.approx(2.0 / 0.16 * unit, rel=0.05)
    pull = phi["linear"][value].item() * shown[:, value].numpy() + phi["linear"][mask].item()
    np.testing.assert_allclose(pull, (x[seen].numpy() - 1.0) * 2.0 / 0.16, rtol=0.1, atol=1.0)
    others = np.delete(phi["linear"], [value, mask], 0)
    assert not others.any()
    # a number that is known without any error has a spread all the same
    exact = backward.start(batch, {"z": x[0] * 1e-3})
    assert np.exp(exact["phi.sequence.log_scale"].item()) == pytest.approx(0.1)


# -- chains of states --------------------------------------------------------------------------------------------------


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


# -- beside one step at a time ----------------------------------------------------------------------------------------


def two_hidden(numbers=True):
    """Two hidden categories and a hidden number, read from a count and a number."""
    edges = [otp.lag("s", "s"), ("s", "x"), ("c", "x"), ("c", "y")]
    nodes = {"s": m.Categorical(2), "c": m.Categorical(3), "x": m.Poisson(), "y": m.Normal()}
    if numbers:
        edges += [otp.lag("u", "u"), ("u", "y")]
        nodes |= {"u": m.Normal()}
    hidden = ["s", "c", *(["u"] if numbers else [])]
    return otp.Model(otp.Graph(edges, hidden=hidden), nodes).structure


def series(lengths, seed=0):
    rng, rows = np.random.default_rng(seed), sum(lengths)
    values = {"x": rng.poisson(4.0, (1, rows, 1)).astype(float), "y": rng.normal(size=(1, rows, 1))}
    tensors = {name: torch.as_tensor(value) for name, value in values.items()}
    mask = {name: torch.as_tensor(rng.random((1, rows, 1)) < 0.8) for name in values}
    return SequenceBatch(Batch(tensors, mask, torch.ones(1, rows).double()), torch.tensor(lengths))


def silu(value):
    return value / (1 + np.exp(-value))


def plain_read(backward, phi, pieces, replica, piece):
    """What a network of dilated convolutions makes of each step of one piece."""
    own = {name.removeprefix(PREFIX): value[replica % len(value)].numpy() for name, value in phi.items()}
    span, many = len(pieces.block.sizes), pieces.block.sizes[0]
    at = [step * many + piece for step in range(span)]
    features, inside = pieces.features[0, at].numpy(), pieces.inside[at].numpy()
    hidden = silu(features @ own["in.weight"] + own["in.bias"]) * inside[:, None]
    for layer, dilation in enumerate((1, 2, 4)):
        new = hidden.copy()
        for step in range(span):
            sides = [
                hidden[step + by] if 0 <= step + by < span else np.zeros(hidden.shape[1])
                for by in (dilation, 0, -dilation)
            ]
            new[step] += silu(np.concatenate(sides) @ own[f"{layer}.weight"] + own[f"{layer}.bias"]) * inside[step]
        hidden = new
    return hidden @ own["out.weight"], features, inside, own


@pytest.mark.parametrize("numbers", [True, False])
def test_what_the_network_reads_is_that_of_each_step(numbers):
    structure, batch = two_hidden(numbers), series([5, 9, 60])
    backward = BidirectionalMap.of(structure, batch, width=4)
    generator = torch.Generator().manual_seed(3)
    shapes = {name: value.shape for name, value in backward.init(generator).items()}
    phi = {name: 0.7 * torch.randn(2, *shape[1:], generator=generator).double() for name, shape in shapes.items()}
    cuts = Cuts.of(batch)
    pieces = cuts.take(structure, backward.features(batch), torch.tensor([0, 2, 1]))
    adjustment, unary = backward.read(phi, pieces)
    cells = len(backward.smoother.cells) if numbers else 0
    free = 1 if numbers else 0
    assert (backward.free, shapes[f"{PREFIX}out.weight"]) == (free, (1, 4, cells + free + 6))
    for replica, piece in np.ndindex(2, 3):
        out, features, inside, own = plain_read(backward, phi, pieces, replica, piece)
        at = [step * 3 + piece for step in range(len(pieces.block.sizes))]
        logits = out[:, cells + free :] + features @ own["states.linear"] + own["states.bias"]
        expected = np.maximum(special.log_softmax(logits, -1), -12.0) * inside[:, None]
        np.testing.assert_allclose(unary[replica, at], expected, atol=1e-6)
        if numbers:
            factor = np.exp(3 * np.tanh(out[:, :cells] / 3))
            np.testing.assert_allclose(adjustment.precision[replica, at], factor, rtol=1e-5)
            np.testing.assert_allclose(adjustment.pull[replica, at], out[:, cells : cells + free], atol=1e-6)
            np.testing.assert_array_equal(adjustment.inside[at], inside)
    assert (adjustment is None) != numbers
    assert backward.targets == tuple(n for n in structure.graph.order if n in structure.graph.hidden)
    assert backward.explains == structure.graph.observed
    # a step reads the cells around it and whether it is the first
    assert backward.features(batch).shape == (1, 74, backward.inputs)
    assert backward.features(batch)[0, :, -1].tolist() == [float(time == 0) for time in batch.times]


def test_a_start_discriminates_states_and_counts_how_they_follow():
    structure, batch = two_hidden(numbers=False), series([30, 25])
    backward = BidirectionalMap.of(structure, batch, width=4)
    rng = np.random.default_rng(5)
    soft = {"s": rng.dirichlet(np.ones(2), 55), "c": rng.dirichlet(np.ones(3), 55)}
    features = backward.features(batch)
    completed = {name: torch.as_tensor(value) for name, value in soft.items()}
    phi = backward.start(batch, completed, torch.Generator().manual_seed(0))
    joint = np.einsum("ns,nc->nsc", soft["s"], soft["c"]).reshape(55, 6)
    shown = features[0].numpy()
    count = joint.sum(0)
    means = joint.T @ shown / count[:, None]
    rest = shown - joint @ means
    covariance = rest.T @ rest / 55 + 0.01 * np.eye(shown.shape[1])
    linear = np.linalg.solve(covariance, means.T)
    level = np.log(count / count.sum()) - 0.5 * np.einsum("sf,fs->s", means, linear)
    np.testing.assert_allclose(phi[f"{PREFIX}states.linear"][0], linear, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(phi[f"{PREFIX}states.bias"][0], level, rtol=1e-7, atol=1e-9)
    moves = np.ones((6, 6))
    for row in range(1, 55):
        if row != 30:
            moves += np.outer(joint[row - 1], joint[row])
    np.testing.assert_allclose(phi[f"{PREFIX}pair"][0], np.log(moves / moves.sum(1, keepdims=True)))


def test_chains_of_several_pieces_and_replicas_are_those_of_enumeration():
    """Also where some states cannot follow others, as they do not where a state remembers the one before."""
    graph = otp.Graph([otp.lag("z", "z"), otp.lag("z", "z", by=2), ("z", "x")], hidden=["z"])
    structure = otp.Model(graph, {"z": m.Categorical(2), "x": m.Poisson()}).structure
    batch = poisson_steps([4, 4, 3])
    backward, phi, features = random_map(structure, batch)
    phi = {name: torch.cat([value, 2 * value]) for name, value in phi.items()}
    phi[f"{PREFIX}pair"] = 20 * phi[f"{PREFIX}pair"]  # some moves are as unlikely as any may be
    pieces = Cuts.of(batch).take(structure, features, torch.tensor([0, 1, 2]))
    _, unary = backward.read(phi, pieces)
    found = backward.marginals(phi, pieces, unary)
    follows = backward.states.follows.numpy()
    assert 0 < follows.sum() < 16
    for replica, piece in np.ndindex(2, 3):
        log_moves = np.maximum(special.log_softmax(phi[f"{PREFIX}pair"][replica].numpy(), -1), -12.0)
        moves = special.softmax(np.where(follows, log_moves, -np.inf), -1)
        own = np.exp(unary[replica].numpy().reshape(4, 3, 4)[:, piece])
        state, pair, entropy = np.zeros((4, 4)), np.zeros((3, 4, 4)), 0.0
        paths = list(itertools.product(range(4), repeat=4))
        weight = np.array(
            [
                np.prod([own[t, path[t]] for t in range(4)])
                * np.prod([moves[one, other] for one, other in itertools.pairwise(path)])
                for path in paths
            ]
        )
        weight /= weight.sum()
        for path, share in zip(paths, weight, strict=True):
            entropy += share * np.log(share) if share else 0.0
            for t in range(4):
                state[t, path[t]] += share
            for t in range(3):
                pair[t, path[t], path[t + 1]] += share
        np.testing.assert_allclose(found.state[replica, :, piece], state, atol=1e-10)
        np.testing.assert_allclose(found.pair[replica, :, piece], pair, atol=1e-10)
        each = found.negentropy()[replica].unflatten(0, (4, 3))[:, piece]
        assert each.sum().item() == pytest.approx(entropy, abs=1e-9)
        assert each[0].item() == pytest.approx((state[0] * np.log(state[0])).sum())


def test_hard_paths_are_drawn_backward_from_filtered_probabilities():
    structure, batch = two_hidden(numbers=False), series([4, 4])
    backward, phi, features = random_map(structure, batch)
    pieces = Cuts.of(batch).take(structure, features, torch.tensor([0, 1]))
    _, unary = backward.read(phi, pieces)
    uniform = torch.rand(1, 8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    hard = backward.relaxed(phi, pieces, unary, uniform, 0.3, hard=True)
    soft = backward.relaxed(phi, pieces, unary, uniform, 0.3)
    gumbel = -np.log(-np.log(uniform[0].numpy().reshape(4, 2, 6)))
    moves = special.softmax(phi[f"{PREFIX}pair"][0].numpy(), -1)
    own = np.exp(unary[0].numpy().reshape(4, 2, 6))
    for piece in range(2):
        alpha = [own[0, piece] / own[0, piece].sum()]
        for t in range(1, 4):
            message = (alpha[-1] @ moves) * own[t, piece]
            alpha.append(message / message.sum())
        drawn, relaxed = None, None
        for t in (3, 2, 1, 0):
            link = 0.0 if drawn is None else np.log(moves @ drawn)
            drawn = np.eye(6)[(np.log(alpha[t]) + link + gumbel[t, piece]).argmax()]
            np.testing.assert_allclose(hard[0].unflatten(0, (4, 2))[t, piece], drawn, atol=1e-9)
            link = 0.0 if relaxed is None else np.log(moves @ relaxed)
            relaxed = special.softmax((np.log(alpha[t]) + link + gumbel[t, piece]) / 0.3)
            np.testing.assert_allclose(soft[0].unflatten(0, (4, 2))[t, piece], relaxed, rtol=1e-7, atol=1e-12)
    values = backward.split(hard)
    np.testing.assert_allclose(values["s"][0], hard[0].unflatten(-1, (2, 3)).sum(-1), atol=1e-9)
    np.testing.assert_allclose(values["c"][0], hard[0].unflatten(-1, (2, 3)).sum(-2), atol=1e-9)
