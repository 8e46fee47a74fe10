"""Windows of the data against windows of the model."""

import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.divergences import WhitenedFeatures
from otpdag.matching.window_features import (
    block_means,
    block_rows,
    laws_by_time,
    lay_out_windows,
    long_run_covariance,
    state_laws,
    window_columns,
    window_distance,
)
from otpdag.simulation import ancestral_sequences
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
    plain, long = (variance_of_a_mean(model, fitted, batch, block) for block in (1, 100))
    assert 7.5 < long / plain < 10


def variance_of_a_mean(model, fitted, batch, block):
    rows = block_rows(batch, 1, block)
    assert rows.shape == (400 * 200 // block, block)
    return float(long_run_covariance(block_means(model.structure, fitted, batch, 1, rows), block))


def test_sequences_no_longer_than_a_window_have_no_blocks():
    batch = drawn(known_poisson_hmm(), 5, 4, 0)
    assert block_rows(batch, 4) is None
    assert block_rows(batch, 3).tolist() == [[1], [5], [9], [13], [17]]


def test_the_law_of_the_state_is_told_until_it_has_settled():
    model = known_poisson_hmm()
    first, moves = state_laws(model.structure, model.fitted.naturals, model_states(model))
    laws = laws_by_time(first, moves, 500)
    assert 10 < len(laws) < 200
    for steps in (0, 1, 5, len(laws) - 1):
        torch.testing.assert_close(laws[steps], first[0] @ torch.linalg.matrix_power(moves[0], steps))
    torch.testing.assert_close(laws[-1] @ moves[0], laws[-1], rtol=0.0, atol=1e-9)
    assert len(laws_by_time(first, moves, 3)) == 4


def model_states(model):
    batch = drawn(model, 40, 5, 0)
    features = WhitenedFeatures(features=10)
    return lay_out_windows(model.structure, batch, features, torch.Generator().manual_seed(0)).states
