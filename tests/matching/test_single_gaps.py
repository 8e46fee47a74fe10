"""Points of a single missing cell, against integrals that are known."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import integrate, stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema, encode
from otpdag.matching.completion import complete_rows, single_gaps

GRAPH = otp.Graph([("a", "b"), ("b", "c")])


def model_of(middle, **params):
    model = otp.Model(GRAPH, {"a": m.Normal(), "b": middle, "c": m.Normal()})
    weight = params.pop("weight_of_c")
    return model.set_params(
        {"a": {"loc": 0.0, "scale": 1.0}, "b": params, "c": {"loc": -0.5, "weight": weight, "scale": 1.0}}
    )


def completed(model, frame, seed=0):
    batch = encode(frame, Schema.of(model.spaces, model.graph, frame), hidden=())
    return complete_rows(model.structure, model.fitted.naturals, batch, {"b": 60.0}, seed)


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
    rows = complete_rows(model.structure, model.fitted.naturals, batch, {}, 0)
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
