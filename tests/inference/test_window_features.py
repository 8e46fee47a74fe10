"""Windows of the data against windows of the model."""

import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.divergences import WhitenedFeatures
from otpdag.inference.ancestral import ancestral_sequences
from otpdag.inference.window_features import (
    _long_run_covariance,
    lay_out_windows,
    window_columns,
    window_distance,
)
from tests.dynamic_models import known_poisson_hmm


def chain(transition=None, size=3):
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": transition or m.Categorical(size), "x": m.Poisson()})


def drawn(model, sequences, length, seed):
    steps = ancestral_sequences(
        model.structure, model.fitted.naturals, sequences, length, torch.Generator().manual_seed(seed)
    )["x"].flatten(1, 2)
    batch = Batch({"x": steps}, {"x": torch.ones_like(steps).bool()}, torch.ones(1, steps.shape[1]).double())
    return SequenceBatch(batch, torch.full((sequences,), length))


def test_the_models_mean_features_are_those_of_its_samples():
    model = known_poisson_hmm()
    batch = drawn(model, 6000, 8, 0)
    windows = lay_out_windows(model.structure, batch, WhitenedFeatures(features=40), torch.Generator().manual_seed(0))
    distance = window_distance(model.structure, model.fitted.naturals, windows)
    # whitened gaps of J features of n windows that hardly differ: about J / n
    assert float(distance) < 5 * 40 / 6000
    wrong = {node: dict(values) for node, values in model.fitted.naturals.items()}
    wrong["z"] = {"probs": torch.full((1, 3, 3), 1 / 3, dtype=torch.float64)}
    assert float(window_distance(model.structure, wrong, windows)) > 0.05


def test_windows_at_the_end_of_a_sequence_show_what_is_left():
    x = torch.arange(5.0).double().reshape(1, 5, 1)
    batch = SequenceBatch(Batch({"x": x}, {"x": torch.ones_like(x).bool()}, torch.ones(1, 5)), torch.tensor([3, 2]))
    columns = window_columns(chain().structure, batch, torch.arange(5), 2)
    assert columns[1].values[0, [0, 1, 3], 0].tolist() == [1.0, 2.0, 4.0]
    assert columns[1].seen[0].tolist() == [True, True, False, True, False]


def test_long_runs_of_one_state_make_means_vary_more():
    """With two states and 0.9 to stay, the variance of a mean is (1 + 0.8) / (1 - 0.8) = 9 times the plain one."""
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.StayOrMove(2), "x": m.Categorical(2)})
    model.set_params(
        {"z": {"stay": 0.9}, "z[0]": {"probs": [0.5, 0.5]}, "x": {"probs": [[0.999, 0.001], [0.001, 0.999]]}}
    )
    batch = drawn(model, 400, 201, 0)
    fitted = WhitenedFeatures(features=1).fit(
        window_columns(model.structure, batch, torch.arange(400 * 201), 1), torch.ones(1, 400 * 201).double()
    )
    plain, long = (float(_long_run_covariance(model.structure, fitted, batch, 1, block)) for block in (1, 100))
    assert 7.5 < long / plain < 10
