"""The direct term of rows, where its value is known."""

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema, encode
from otpdag.divergences.whitened import WhitenedFeatures
from otpdag.matching.direct import compare_directly, count_ranges
from otpdag.matching.mean_features import feature_columns
from otpdag.settings import Direct
from otpdag.simulation import complete_batch

FEATURES = WhitenedFeatures(features=30)


def table(rows=80, gaps=0.0):
    rng = np.random.default_rng(0)
    a = rng.integers(0, 2, rows)
    frame = pd.DataFrame({"a": a, "b": (a + rng.integers(0, 2, rows)) % 3, "n": rng.poisson(2.0 + 3 * a)}, dtype=float)
    return frame.mask(rng.random(frame.shape) < gaps)


def laid_out(frame, names="abn", kappa=1.0, features=FEATURES):
    mechanisms = {"a": m.Categorical(2), "b": m.Categorical(3), "n": m.Poisson()}
    graph = otp.Graph([("a", name) for name in names if name != "a"], nodes=list(names))
    model = otp.Model(graph, {name: mechanisms[name] for name in names})
    batch = encode(frame[list(names)], Schema.of(model.spaces, model.graph), hidden=())
    direct = compare_directly(model.structure, batch, Direct(kappa, features), torch.Generator().manual_seed(0))
    return model.structure, batch, direct


def frequencies(frame):
    """Natural parameters of ``a -> b`` that are the table's own."""
    counts = np.zeros((2, 3))
    np.add.at(counts, (frame["a"].astype(int), frame["b"].astype(int)), 1.0)
    both = torch.as_tensor(counts)
    return {
        "a": {"probs": (both.sum(1) / both.sum()).reshape(1, 1, 2)},
        "b": {"probs": (both / both.sum(1, True))[None]},
    }


def test_a_model_that_is_the_data_is_at_distance_zero():
    structure, _, direct = laid_out(table(), "ab")
    assert direct.terms(structure, frequencies(table())).total.item() == pytest.approx(0.0, abs=1e-12)
    other = frequencies(table())
    other["a"] = {"probs": torch.tensor([[[0.9, 0.1]]]).double()}
    assert direct.terms(structure, other).total.item() > 0.1


def test_the_distance_is_that_of_whitened_mean_features():
    """Summed over the six cells of the table, each by its probability."""
    frame = table()
    structure, _, direct = laid_out(frame, "ab", kappa=2.5)
    a, b = np.repeat(np.eye(2), 3, 0), np.tile(np.eye(3), (2, 1))
    cells = {"a": torch.as_tensor(a)[None], "b": torch.as_tensor(b)[None]}
    naturals = {
        "a": {"probs": torch.tensor([[[0.3, 0.7]]]).double()},
        "b": {"probs": torch.tensor([[[0.2, 0.3, 0.5], [0.6, 0.1, 0.3]]]).double()},
    }
    weight = torch.tensor([[0.3 * 0.2, 0.3 * 0.3, 0.3 * 0.5, 0.7 * 0.6, 0.7 * 0.1, 0.7 * 0.3]]).double()
    expected = direct.features.mean_of(feature_columns(structure, complete_batch(structure, cells)), weight)
    gap = (direct.features.mean - expected) @ direct.features.whitening[0]
    terms = direct.terms(structure, naturals)
    assert terms.total.item() == pytest.approx(2.5 * float(gap.square().sum()))
    assert terms.direct.item() == terms.total.item()
    assert terms.reconstruction.item() == 0.0


@pytest.mark.parametrize("gaps", [0.0, 0.2])
def test_weights_are_repetitions(gaps):
    structure, batch, direct = laid_out(table(gaps=gaps))
    often = np.random.default_rng(1).integers(0, 4, batch.rows)
    found = direct.reweighted(structure, torch.as_tensor(often).double()[None])
    repeated = batch.take(torch.as_tensor(np.repeat(np.arange(batch.rows), often)))
    expected = direct.features.mean_of(feature_columns(structure, repeated), repeated.weight)
    torch.testing.assert_close(found.features.mean, expected)
    assert not torch.allclose(direct.features.mean, expected)
    again = found.reweighted(structure, torch.full((1, batch.rows), 3.0).double())
    torch.testing.assert_close(again.features.mean, expected)  # the level of weights does not matter
    assert torch.equal(found.features.whitening, direct.features.whitening)


def test_whitening_by_the_model_keeps_the_data_and_repeats():
    structure, _, direct = laid_out(table(), "ab")
    naturals = frequencies(table())
    first, same, other = (direct.whitened_by_model(structure, naturals, seed) for seed in (1, 1, 2))
    assert torch.equal(first.features.mean, direct.features.mean)
    assert torch.equal(first.features.whitening, same.features.whitening)
    assert not torch.equal(first.features.whitening, other.features.whitening)
    assert first.terms(structure, naturals).total.item() == pytest.approx(0.0, abs=1e-10)


def test_counts_reach_beyond_the_largest():
    structure, batch, _ = laid_out(table())
    largest = float(table()["n"].max())
    assert count_ranges(structure, batch) == {"n": pytest.approx(1.3 * largest + 5)}


def test_a_sample_is_a_batch_without_gaps():
    structure, batch, _ = laid_out(table(gaps=0.2))
    complete = complete_batch(structure, dict(batch.values))
    assert all(bool(seen.all()) for seen in complete.mask.values())
    assert complete.weight.tolist() == [[1.0] * batch.rows]
