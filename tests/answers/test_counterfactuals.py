"""Counterfactuals against structural equations done by hand."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy import special, stats

import otpdag as otp
from otpdag import mechanisms as m
from tests.answers.linear_models import structural


def test_a_counterfactual_keeps_the_noise_of_its_row():
    model = structural()
    rows = pd.DataFrame({"z": [0.0, 1.0], "t": [1.5, 2.0], "y": [4.0, 9.0]}, index=["a", "b"])
    after = model.counterfactual(rows, {"t": 0.0}, draws=1)
    assert after["y"].tolist() == pytest.approx([4.0 - 3 * 1.5, 9.0 - 3 * 2.0])
    assert after["z"].tolist() == [0.0, 1.0]
    assert list(after.index) == ["a", "b"]
    shifted = model.counterfactual(rows, {"t": lambda table: table["t"] + 1}, draws=2)
    assert (shifted["y"] - rows["y"]).tolist() == pytest.approx([3.0, 3.0])
    each = model.counterfactual(rows, {"t": [0.0, 2.0]}, draws=1)
    assert each["y"].tolist() == pytest.approx([4.0 - 4.5, 9.0])
    # rows that show everything leave one world, also where one is drawn
    drawn = model.counterfactual(rows, {"t": 0.0}, random=True)
    assert drawn["y"].tolist() == pytest.approx([4.0 - 3 * 1.5, 9.0 - 3 * 2.0])


def test_a_series_sets_each_row_by_its_index():
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    model.set_params({"x": {"loc": 0, "scale": 1}, "y": {"loc": 0, "weight": 1, "scale": 1}})
    rows = pd.DataFrame({"x": [0.0, 0.0], "y": [1.0, 2.0]}, index=["a", "b"])
    do = pd.Series({"b": 20.0, "a": 10.0})
    for asked in (do, lambda drawn: pd.Series([20.0, 10.0], index=[1, 0])):
        assert model.counterfactual(rows, {"x": asked})["y"].tolist() == pytest.approx([11.0, 22.0])
    with pytest.raises(otp.DataError, match=r"do\['x'\] must have the index of the table"):
        model.counterfactual(rows, {"x": do.rename({"a": "c"})})


def test_a_counterfactual_of_categories_bounds_what_could_have_been():
    graph = otp.Graph([("t", "y")])
    model = otp.Model(graph, {"t": m.Categorical(2), "y": m.Categorical(2)})
    model.set_params({"t": {"probs": [0.5, 0.5]}, "y": {"probs": [[0.7, 0.3], [0.4, 0.6]]}})
    # y = 1 iff u > 0.7 under t = 0, so that u > 0.4 for sure: it stays 1 under t = 1
    rows = pd.DataFrame({"t": [0], "y": [1]})
    assert model.counterfactual(rows, {"t": 1})["y"].tolist() == [1]


def shared(p, j, q, k):
    """The chance of category k under q where the same noise made category j under p."""
    c, d = np.r_[0.0, np.cumsum(p)], np.r_[0.0, np.cumsum(q)]
    return max(0.0, min(c[j + 1], d[k + 1]) - max(c[j], d[k])) / p[j]


def hidden_category():
    rng = np.random.default_rng(0)
    graph = otp.Graph([("h", "t"), ("t", "y"), ("h", "y"), ("y", "z"), ("t", "z")], hidden=["h"])
    model = otp.Model(
        graph, {"h": m.Categorical(2), **{n: m.Categorical(k) for n, k in (("t", 2), ("y", 3), ("z", 3))}}
    )
    probs = {"h": np.array([0.3, 0.7]), "t": rng.dirichlet(np.ones(2), 2)}
    probs |= {"y": rng.dirichlet(np.ones(3), (2, 2)), "z": rng.dirichlet(np.ones(3), (3, 2))}
    return model.set_params({node: {"probs": value} for node, value in probs.items()}), probs


def by_hand(probs, row, t_new):
    """Probabilities of y and z in all worlds of a row (t, y, z), each of them None where it is not seen."""
    seen = [range(size) if value is None else [value] for value, size in zip(row, (2, 3, 3), strict=True)]
    total, found = 0.0, {"y": np.zeros(3), "z": np.zeros(3)}
    for h, t, y, z in product(range(2), *seen):
        chance = probs["h"][h] * probs["t"][h, t] * probs["y"][t, h, y] * probs["z"][y, t, z]
        total += chance
        for y_new, z_new in product(range(3), range(3)):
            moved = shared(probs["y"][t, h], y, probs["y"][t_new, h], y_new)
            moved *= shared(probs["z"][y, t], z, probs["z"][y_new, t_new], z_new)
            found["y"][y_new] += chance * moved
            found["z"][z_new] += chance * moved
    return {node: value / total for node, value in found.items()}


def test_probabilities_of_counterfactual_categories_are_sums_over_all_that_a_row_leaves_open():
    model, probs = hidden_category()
    rows = [(0, 1, 2), (1, 0, 0), (0, None, 1), (None, 2, None)]
    table = pd.DataFrame(rows, columns=["t", "y", "z"], dtype=float)
    after = model.counterfactual(table, {"t": 1})
    for number, row in enumerate(rows):
        for node, expected in by_hand(probs, row, 1).items():
            found = after.loc[number, [f"{node}={k}" for k in range(3)]].to_numpy(dtype=float)
            np.testing.assert_allclose(found, expected, atol=1e-9)
            assert after.loc[number, node] == expected.argmax()


def test_equal_rows_have_equal_counterfactuals_and_draws_are_as_often_as_they_are_likely():
    model, probs = hidden_category()
    rows = pd.DataFrame({"t": [0] * 4000, "y": [0] * 4000, "z": [1] * 4000})
    after = model.counterfactual(rows, {"t": 1})
    assert len(after.drop_duplicates()) == 1
    expected = by_hand(probs, (0, 0, 1), 1)["y"]
    assert after["y=1"].mean() == pytest.approx(expected[1])
    drawn = model.counterfactual(rows, {"t": 1}, random=True, seed=2)
    assert list(drawn.columns) == ["h", "t", "y", "z"]
    share = drawn["y"].astype(int).value_counts(normalize=True).reindex(range(3), fill_value=0.0)
    np.testing.assert_allclose(share, expected, atol=0.03)


def test_counts_and_what_follows_from_them_are_summed_over_the_noise_that_a_count_leaves_open():
    model = otp.Model(otp.Graph([("t", "y"), ("y", "s")]), {"t": m.Normal(), "y": m.Poisson(), "s": m.Bernoulli()})
    model.set_params(
        {
            "t": {"loc": 0.0, "scale": 1.0},
            "y": {"log_rate": 0.5, "weight": 0.4},
            "s": {"logits": [0.0, -1.0], "weight": [0.0, 0.5]},
        }
    )
    rows = pd.DataFrame({"t": [0.0, 1.0, -1.0], "y": [2, 0, 5], "s": [1, 0, 1]})
    after = model.counterfactual(rows, {"t": lambda table: table["t"] + 1})
    level = (np.arange(200_000) + 0.5) / 200_000
    for number, (t, y, s) in enumerate(rows.to_numpy()):
        before, rate = stats.poisson(np.exp(0.5 + 0.4 * t)), np.exp(0.5 + 0.4 * (t + 1))
        counts = stats.poisson.ppf(before.cdf(y - 1) + before.pmf(y) * level, rate)
        was, would = 1 - special.expit(0.5 * y - 1), 1 - special.expit(0.5 * counts - 1)
        share = (1 - np.maximum(was, would)) / (1 - was) if s else np.clip(was - would, 0, None) / was
        assert after.loc[number, "y"] == pytest.approx(counts.mean(), abs=1e-4)
        assert after.loc[number, "s=1"] == pytest.approx(share.mean(), abs=1e-4)


def test_too_many_worlds_are_refused():
    from otpdag.answers.counterfactuals import counterfactual_worlds

    model, _ = hidden_category()
    batch, _ = model._read_rows(pd.DataFrame({"t": [0] * 20, "y": [0] * 20, "z": [1] * 20}), False)
    settings = {"t": model._setting("t", 1, 20)}
    with pytest.raises(otp.errors.ModelError, match="over 30 cases at node"):
        counterfactual_worlds(model.fitted, batch, settings, draws=10, seed=0, most=30)


def test_counts_far_out_in_a_tail_have_an_answer():
    """Digits of uniform noise do not tell such counts apart: what is left of them must end somewhere, and add up."""
    model = otp.Model(otp.Graph([("x", "k")]), {"x": m.Normal(), "k": m.Poisson()})
    model.set_params({"x": {"loc": 0.0, "scale": 1.0}, "k": {"log_rate": 0.0, "weight": [1.0]}})
    rows = pd.DataFrame({"x": [0.0, 0.0, 0.0], "k": [14, 19, 40]})
    answer = model.counterfactual(rows, {"x": 1.0})["k"].to_numpy(dtype=float)
    assert np.isfinite(answer).all()
    assert (np.diff(answer) >= 0).all()
    assert answer[0] > 14
