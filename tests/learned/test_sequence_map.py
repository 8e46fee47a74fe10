"""The map of hidden numbers in sequences: a Gaussian chain beside one dense normal."""

import numpy as np
import pytest
import torch
from scipy import stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward import RowCode
from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.learned.sequence_map import SequenceMap
from otpdag.likelihood.chain_layout import one_block

LENGTHS = (4, 2, 3)


def world(width=2, seed=0, *, curved=False):
    """A map of hidden numbers of one or two coordinates, with random potentials and dynamics."""
    rng = np.random.default_rng(seed)
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x"), ("z", "y")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Normal(width), "x": m.Normal(), "y": m.Normal()})
    x = torch.as_tensor(rng.normal(size=(2, 1, sum(LENGTHS), 1)))
    seen = torch.as_tensor(rng.random((2, 1, sum(LENGTHS), 1)) < 0.7)
    steps = Batch({"x": x[0], "y": x[1]}, {"x": seen[0], "y": seen[1]}, torch.ones(1, sum(LENGTHS)).double())
    batch = SequenceBatch(steps, torch.tensor(LENGTHS))
    backward = SequenceMap(model.structure, RowCode.of(model.structure, steps, ("x", "y")), ("z",), curved=curved)
    features = backward.features(batch)
    if curved:
        features[..., -backward.read_later :] = torch.as_tensor(rng.normal(size=(1, batch.rows, backward.read_later)))
    shapes = {
        "linear": (features.shape[-1], width),
        "precision": (2, width),
        **({"gain": (features.shape[-1], 2)} if curved else {}),
        "carry": (width, width),
        "bias": (width,),
        "log_scale": (width,),
        "first": (width,),
        "first_log_scale": (width,),
    }
    phi = {f"phi.sequence.{k}": torch.as_tensor(0.5 * rng.normal(size=(1, *s))) for k, s in shapes.items()}
    return backward, batch, features, phi


def dense(backward, features, phi, rows):
    """Mean and covariance of the steps of one sequence, by the definition in the module."""
    part = {key.removeprefix("phi.sequence."): value[0].numpy() for key, value in phi.items()}
    width, many = len(part["bias"]), len(rows)
    precision, pull = np.zeros((many, width, many, width)), np.zeros((many, width))
    for t, row in enumerate(rows):
        pull[t] += features[0, row].numpy() @ part["linear"]
        factor = np.exp(3 * np.tanh(features[0, row].numpy() @ part["gain"] / 3)) if "gain" in part else np.ones(2)
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
@pytest.mark.parametrize("curved", [False, True])
def test_draws_and_their_density_are_those_of_the_dense_normal(width, curved):
    backward, batch, features, phi = world(width, curved=curved)
    block = one_block(batch)
    total = batch.rows * width
    # no noise, a unit of each noise alone, and some noise at random
    noise = torch.cat([torch.zeros(1, total), torch.eye(total), torch.randn(3, total)]).double()
    noise = noise.reshape(1, -1, batch.rows, width)
    drawn = backward.draw(phi, block, features[:, block.rows], noise)
    back = torch.argsort(block.rows)
    values = drawn.values["z"][0][:, back].numpy()  # (draws, M, width), in the order of the batch
    log_prob = drawn.log_prob[0][:, back].numpy()
    start = 0
    for length in LENGTHS:
        rows = list(range(start, start + length))
        mean, covariance = dense(backward, features, phi, rows)
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
