"""Completed rows, against integrals that are known."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import integrate, stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema, encode
from otpdag.divergences import WhitenedFeatures
from otpdag.matching.completion import can_be_completed, complete_rows, single_gaps
from otpdag.matching.mean_features import feature_columns
from otpdag.settings import Completion

SIZES = Completion()
EVENLY_SPREAD = 2e-3
"""Four standard errors of means over 150 rows with 16 draws each, one in each stratum."""

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(60)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def table(rows=300):
    """``a -> b``, and ``b`` empty where ``a`` is above zero."""
    rng = np.random.default_rng(3)
    a = rng.normal(size=rows)
    b = 0.5 + 1.1 * a + 0.8 * rng.normal(size=rows)
    return pd.DataFrame({"a": a, "b": np.where(a > 0, np.nan, b)})


def naturals(slope=1.1, scale=0.8):
    lifted = {"a": {"loc": [0.0], "scale": [1.0]}, "b": {"loc": [0.5], "weight": [[slope]], "scale": [scale]}}
    model = otp.Model(otp.Graph([("a", "b")]), {"a": m.Normal(), "b": m.Normal()})
    shapes = {n: {k: p.shape for k, p in model.mechanisms[n].declared().items()} for n in "ab"}
    return model.structure, {
        n: {k: torch.tensor(v).double().reshape(1, *shapes[n][k]) for k, v in own.items()} for n, own in lifted.items()
    }


def laid_out(frame):
    structure, truth = naturals()
    spaces = {n: structure.mechanisms[n].space for n in structure.graph.nodes}
    batch = encode(frame, Schema.of(spaces, structure.graph, frame), hidden=())
    features = WhitenedFeatures(features=40).fit(feature_columns(structure, batch), batch.weight)
    return structure, truth, batch, features


def expected_means(frame, features, slope=1.1, scale=0.8):
    """Mean features with ``b`` integrated out of the rows that miss it, by Gauss-Hermite quadrature."""
    a = np.repeat(frame["a"].to_numpy()[:, None], 60, 1)
    b = np.where(np.isnan(frame[["b"]]), 0.5 + slope * a + scale * NODES, frame[["b"]])
    kernels = [k(torch.as_tensor(v.reshape(1, -1, 1))) for k, v in zip(features.kernels, (a, b), strict=True)]
    made = features.combine(kernels).numpy().reshape(len(frame), 60, -1)
    return np.einsum("k,nkj->j", WEIGHTS, made) / len(frame)


def test_features_of_completed_rows_are_integrals_over_the_gaps():
    frame = table()
    structure, truth, batch, features = laid_out(frame)
    rows = complete_rows(structure, truth, batch, 0, SIZES)
    assert sorted(torch.cat([rows.complete, rows.gaps]).tolist()) == list(range(300))
    found = rows.mean_features(features)[0].numpy()
    np.testing.assert_allclose(found, expected_means(frame, features), atol=EVENLY_SPREAD)
    kept = rows.keeping(features)
    assert kept.made
    np.testing.assert_array_equal(kept.mean_features(features)[0], found)


def test_draws_serve_other_parameters_by_their_weights():
    frame = table()
    structure, truth, batch, features = laid_out(frame)
    rows = complete_rows(structure, truth, batch, 0, SIZES)
    assert rows.effective == pytest.approx(1.0)
    _, other = naturals(slope=1.2, scale=0.9)
    moved = rows.weighed_for(other)
    assert 0.6 < moved.effective < 0.999
    found = moved.mean_features(features)[0].numpy()
    expected, before = expected_means(frame, features, 1.2, 0.9), expected_means(frame, features)
    assert np.abs(found - expected).max() < 0.15 * np.abs(before - expected).max()


def test_replicas_have_draws_of_their_own():
    frame = table()
    structure, truth, batch, features = laid_out(frame)
    _, other = naturals(slope=-1.0)
    both = {n: {k: torch.cat([truth[n][k], other[n][k]]) for k in truth[n]} for n in truth}
    found = complete_rows(structure, both, batch, 0, SIZES).mean_features(features)
    for row, slope in zip(found.numpy(), (1.1, -1.0), strict=True):
        np.testing.assert_allclose(row, expected_means(frame, features, slope), atol=EVENLY_SPREAD)


def test_weights_are_repetitions():
    frame = table(120)
    often = np.random.default_rng(1).integers(0, 4, 120)
    structure, truth, batch, features = laid_out(frame)
    factors = torch.as_tensor(often).double()[None]
    rows = complete_rows(structure, truth, batch, 0, SIZES)
    weighted = replace(rows, batch=replace(batch, weight=factors)).mean_features(features)
    expected = expected_means(frame.loc[frame.index.repeat(often)], features)
    np.testing.assert_allclose(weighted[0].numpy(), expected, atol=2e-3)


def test_a_row_that_stands_for_many_is_drawn_apart():
    structure, truth, batch, features = laid_out(table(40))
    batch = replace(batch, weight=torch.full((1, 40), 30.0).double())
    rows = complete_rows(structure, truth, batch, 0, SIZES)
    gaps = int((~batch.mask["b"]).sum())
    assert len(rows.gaps) == 30 * gaps
    assert set(rows.repeats.tolist()) == {30}
    np.testing.assert_allclose(rows.mean_features(features)[0].numpy(), expected_means(table(40), features), atol=5e-4)


def test_every_gap_is_filled_once():
    structure, truth, batch, _ = laid_out(table())
    filled = complete_rows(structure, truth, batch, 0, SIZES).one_each()
    seen = batch.mask["b"][0, :, 0]
    assert bool(filled.mask["b"].all())
    assert torch.equal(filled.values["b"][0, seen], batch.values["b"][0, seen])
    assert (filled.values["b"][0, ~seen] != 0).all()


def test_rows_without_densities_cannot_be_completed():
    _, _, batch, _ = laid_out(table())
    graph = otp.Graph([("a", "b")])
    plain = otp.Model(graph, {"a": m.Normal(), "b": m.Deterministic(lambda parents: 2 * parents["a"])})
    assert not can_be_completed(plain.structure, batch)
    assert can_be_completed(otp.Model(graph, {"a": m.Normal(), "b": m.Normal()}).structure, batch)


# -- a single missing cell is integrated ------------------------------------------------------------------------------

GRAPH = otp.Graph([("a", "b"), ("b", "c")])


def model_of(middle, **params):
    model = otp.Model(GRAPH, {"a": m.Normal(), "b": middle, "c": m.Normal()})
    weight = params.pop("weight_of_c")
    return model.set_params(
        {"a": {"loc": 0.0, "scale": 1.0}, "b": params, "c": {"loc": -0.5, "weight": weight, "scale": 1.0}}
    )


def completed(model, frame, seed=0):
    batch = encode(frame, Schema.of(model.spaces, model.graph, frame), hidden=())
    return complete_rows(model.structure, model.fitted.naturals, batch, seed, SIZES)


def mean_of_gaps(rows):
    return (rows.shares * rows.values["b"][..., 0]).sum(-1)[0].numpy()


FRAME = pd.DataFrame({"a": [-0.4, 1.2, 2.0, 0.3], "b": [np.nan, np.nan, np.nan, 2.0], "c": [0.3, 4.0, 9.0, 0.5]})


def test_a_missing_count_has_its_mean_given_both_sides():
    rows = completed(model_of(m.Poisson(), log_rate=0.5, weight=1.1, weight_of_c=0.5), FRAME)
    counts = np.arange(400)
    for found, (a, c) in zip(mean_of_gaps(rows), FRAME[["a", "c"]].to_numpy(), strict=False):
        weight = stats.poisson.pmf(counts, np.exp(0.5 + 1.1 * a)) * stats.norm.pdf(c, -0.5 + 0.5 * counts)
        assert found == pytest.approx(counts @ weight / weight.sum(), abs=2e-4)


def test_a_missing_number_has_its_mean_given_both_sides():
    rows = completed(model_of(m.Normal(), loc=0.5, weight=1.1, scale=0.8, weight_of_c=0.5), FRAME)
    a, c = FRAME["a"][:3].to_numpy(), FRAME["c"][:3].to_numpy()
    precision = 1 / 0.8**2 + 0.5**2
    expected = ((0.5 + 1.1 * a) / 0.8**2 + 0.5 * (c + 0.5)) / precision
    np.testing.assert_allclose(mean_of_gaps(rows), expected, atol=1e-5)


def test_a_missing_positive_number_is_integrated_on_its_own_scale():
    rows = completed(model_of(m.Gamma(), log_mean=0.5, weight=0.4, shape=2.0, weight_of_c=0.5), FRAME)
    for found, (a, c) in zip(mean_of_gaps(rows), FRAME[["a", "c"]].to_numpy(), strict=False):
        mean = np.exp(0.5 + 0.4 * a)

        def density(b, mean=mean, c=c):
            return stats.gamma.pdf(b, 2.0, scale=mean / 2.0) * stats.norm.pdf(c, -0.5 + 0.5 * b)

        total, first = (integrate.quad(lambda b, k=k: b**k * density(b), 0, 80, limit=400)[0] for k in (0, 1))
        assert found == pytest.approx(first / total, rel=2e-3)


def test_all_categories_of_a_gap_are_listed():
    model = otp.Model(otp.Graph([("k", "x")]), {"k": m.Categorical(3), "x": m.Normal()})
    model.set_params({"k": {"probs": [0.2, 0.3, 0.5]}, "x": {"loc": [-1.0, 0.0, 2.0], "scale": [1.0, 1.0, 1.0]}})
    frame = pd.DataFrame({"k": ["a", None, "b", "c"], "x": [0.0, 0.7, 1.0, -2.0]})
    batch = encode(frame, Schema.of(model.spaces, model.graph, frame), hidden=())
    rows = complete_rows(model.structure, model.fitted.naturals, batch, 0, SIZES)
    found = (rows.shares.unsqueeze(-1) * rows.values["k"]).sum(-2)[0, 0]
    weight = np.array([0.2, 0.3, 0.5]) * stats.norm.pdf(0.7, [-1.0, 0.0, 2.0])
    np.testing.assert_allclose(found, weight / weight.sum(), atol=1e-12)


def test_rows_that_miss_more_keep_their_draws():
    frame = FRAME.assign(c=[np.nan, 4.0, 9.0, np.nan])
    model = model_of(m.Poisson(), log_rate=0.5, weight=1.1, weight_of_c=0.5)
    batch = encode(frame, Schema.of(model.spaces, model.graph, frame), hidden=())
    draws = {node: torch.zeros(1, 4, 16, 1).double() for node in "abc"}
    found = {
        points.node: points.rows.tolist() for points in single_gaps(model.structure, batch, draws, torch.Generator())
    }
    assert found == {"b": [1, 2], "c": [3]}


def test_a_hidden_node_leaves_no_single_gap():
    model = otp.Model(
        otp.Graph([("z", "b"), ("z", "c")], hidden=["z"]), {"z": m.Categorical(2), "b": m.Normal(), "c": m.Normal()}
    )
    frame = pd.DataFrame({"b": [np.nan, 1.0, 2.0], "c": [0.3, np.nan, 1.0]})
    batch = encode(frame, Schema.of(model.spaces, model.graph, frame), hidden=("z",))
    draws = {node: torch.zeros(1, 3, 16, 1).double() for node in "bc"}
    assert not list(single_gaps(model.structure, batch, draws, torch.Generator()))
