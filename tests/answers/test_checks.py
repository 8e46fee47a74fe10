"""Checks accuse the wrong node, in the right words, and right models as rarely as they say."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import linalg, stats

import otpdag as otp
from benchmarks.told import MISFITS, class_rows, factor_rows, right_rows
from otpdag import mechanisms as m
from otpdag.answers.checks import _holm, _polynomials


def checked(model, table, **options):
    otp.fit(model, table, seed=0, progress=False)
    return model.check(table, **options).reset_index()


def test_means_of_polynomials_over_stretches_are_their_integrals():
    below, above = torch.tensor([0.1, 0.3, 0.62]).double(), torch.tensor([0.4, 0.3, 1.0]).double()
    grid = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    for low, high, mean in zip(below, above, _polynomials(below, above), strict=True):
        points = low + grid * (high - low)
        for order in range(6):
            values = np.polynomial.legendre.Legendre.basis(order + 1)(2 * points.numpy() - 1) * np.sqrt(2 * order + 3)
            assert float(mean[order]) == pytest.approx(np.trapezoid(values, grid), abs=1e-7)


def test_adjusted_as_holm_did():
    assert _holm(np.array([0.04, 0.01, 0.03, 0.5])).tolist() == pytest.approx([0.09, 0.04, 0.09, 0.5])


def skewed_indicator(generator, rows=1000):
    factor = generator.standard_normal(rows)
    frame = pd.DataFrame({f"x{i}": factor * (0.6 + 0.2 * i) + 0.7 * generator.standard_normal(rows) for i in range(4)})
    frame["x2"] = factor + 0.9 * (generator.exponential(size=rows) - 1)
    graph = otp.Graph([("f", name) for name in frame], hidden=["f"])
    return frame, otp.Model(graph, {"f": m.Normal()} | {name: m.Normal() for name in frame})


def test_the_wrong_indicator_of_a_hidden_factor_is_found():
    for gaps in (False, True):
        frame, model = skewed_indicator(np.random.default_rng(1))
        frame = frame.mask(np.random.default_rng(2).random(frame.shape) < 0.1) if gaps else frame
        worst = checked(model, frame).iloc[0]
        assert worst["node"] == "x2"
        assert worst["finding"] == "skewed otherwise than it says"
        assert worst["adjusted"] < 1e-4


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("curved", "curved in 'x'"),
        ("spread", "its spread changes with 'x'"),
        ("tails", "longer tails"),
        ("dispersion", "more spread"),
        ("logit", "curved in 'x'"),
    ],
)
def test_misfits_are_named(kind, words):
    table, model, wrong = MISFITS[kind](np.random.default_rng(3))
    worst = checked(model, table).iloc[0]
    assert worst["node"] == wrong
    assert words in worst["finding"]
    assert worst["adjusted"] < 0.01


@pytest.mark.slow
def test_right_models_are_rarely_accused():
    """Of 40 right models, complete and with gaps, more than three below 5 % would have a chance of one in twenty."""
    least = []
    for repeat in range(40):
        generator = np.random.default_rng([77, repeat])
        table, model = (right_rows, right_rows, right_rows, factor_rows, class_rows)[repeat % 5](generator, 400)
        table = table.mask(generator.random(table.shape) < 0.15) if repeat % 2 else table
        told = checked(model, table)
        least.append(told["adjusted"].min())
        assert set(told.loc[told["other"] == "", "node"]) == set(table.columns)
        assert list(told["p"]) == sorted(told["p"])
    assert sum(p < 0.05 for p in least) <= 4
    assert sum(p < 0.01 for p in least) <= 2


def test_complete_rows_draw_nothing_and_gaps_little():
    table, model = right_rows(np.random.default_rng(8), 500)
    otp.fit(model, table, progress=False)
    pd.testing.assert_frame_equal(model.check(table, seed=0), model.check(table, seed=1))
    gaps = table.mask(np.random.default_rng(9).random(table.shape) < 0.1)
    one, other = (model.check(gaps, seed=seed).set_index("other", append=True)["p"] for seed in (0, 1))
    assert (one - other.loc[one.index]).abs().max() < 0.15


def test_estimated_parameters_do_not_hide_the_shape():
    """Residuals of a regression are too small; without the scores, the test of their shape would be too."""
    generator, found = np.random.default_rng(4), []
    for _ in range(100):
        x = generator.normal(size=60)
        table = pd.DataFrame({"x": x, "y": x + generator.normal(size=60)})
        model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Given(), "y": m.Normal()})
        found.append(checked(model, table)["p"].iloc[0])
    assert np.mean(np.array(found) < 0.2) == pytest.approx(0.2, abs=0.09)


def test_dependence_between_categories_that_the_graph_forbids():
    generator = np.random.default_rng(11)
    a = generator.integers(0, 2, size=1000)
    b = np.where(generator.random(1000) < 0.9, a, 1 - a)
    table = pd.DataFrame({"a": a, "b": b})
    model = otp.Model(otp.Graph([], nodes=["a", "b"]), {"a": m.Bernoulli(), "b": m.Categorical(2)})
    (said,) = otp.fit(model, table, progress=False).notes
    told = abs(float(said.split("correlated in the data (")[1].split(")")[0]))
    assert told == pytest.approx(table.corr().iloc[0, 1], abs=0.005)
    worst = model.check(table).reset_index().iloc[0]
    assert {worst["node"], worst["other"]} == {"a", "b"}
    assert worst["adjusted"] < 1e-10
    assert "an edge or a common cause is missing" in worst["finding"]


def test_rows_that_are_too_few_contradict_nothing():
    rng = np.random.default_rng(3)
    table = pd.DataFrame({"x": rng.normal(size=300), "y": rng.normal(size=300)})
    model = otp.Model(otp.Graph([], nodes=["x", "y"]), {"x": m.Normal(), "y": m.Normal()})
    otp.fit(model, table, progress=False)
    told = model.check(50.0 + table.head(9))
    assert told[["p", "adjusted"]].to_numpy().tolist() == [[1.0, 1.0]] * 3
    assert (told["finding"] == "").all()


def test_new_rows_from_elsewhere_are_seen():
    table = pd.DataFrame({"x": np.random.default_rng(12).normal(size=500)})
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    otp.fit(model, table, progress=False)
    worst = model.check(table + 0.5).iloc[0]
    assert worst["finding"] == "its rows lie elsewhere than its parameters say"
    assert worst["adjusted"] < 1e-6
    assert model.check(pd.DataFrame({"x": np.random.default_rng(13).normal(size=500)})).iloc[0]["adjusted"] > 0.01


def test_a_node_whose_noise_cannot_be_recovered_is_compared_with_draws():
    generator = np.random.default_rng(14)
    x = generator.normal(size=800)
    table = pd.DataFrame({"x": x, "y": x + generator.normal(size=800)})
    node = m.Simulator(lambda parents, noise, slope: slope * parents["x"] + noise, {"slope": m.start(0.8)})
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": node})
    otp.fit(model, table, seed=0, progress=False)
    assert model.check(table)["adjusted"].min() > 0.01
    assert model.check(table.assign(y=table["y"] ** 2)).index[0] == "y"


def test_right_censored_times_are_not_accused():
    rng = np.random.default_rng(5)
    x = rng.normal(size=800)
    time, end = rng.weibull(1.7, 800) * np.exp(0.4 * x), rng.exponential(2.0, 800)
    table = pd.DataFrame({"x": x, "t.0": np.minimum(time, end), "t.1": np.where(time <= end, time, np.nan)})
    nodes = {"x": m.Normal(), "t": m.Weibull(censored=True)}
    model = otp.fit(otp.Model(otp.Graph([("x", "t")]), nodes), table, progress=False).model
    assert model.check(table)["adjusted"].min() > 0.05
    wrong = table.assign(**{"t.0": table["t.0"] * np.exp(0.6 * x**2), "t.1": table["t.1"] * np.exp(0.6 * x**2)})
    model = otp.fit(otp.Model(otp.Graph([("x", "t")]), nodes), wrong, progress=False).model
    assert model.check(wrong)["adjusted"].min() < 1e-4


# -- all of it once more with numpy and scipy --------------------------------------------------------------------------


def legendre(low, high):
    """Means of the first six normalised Legendre polynomials over stretches of the unit interval (N, 6)."""
    means = []
    for order in range(1, 7):
        basis = np.polynomial.legendre.Legendre.basis(order)
        rise = basis.integ()(2 * high - 1) - basis.integ()(2 * low - 1)
        wide = high - low > 1e-6
        inside = rise / np.where(wide, 2 * (high - low), 1.0)
        means.append(np.sqrt(2 * order + 1) * np.where(wide, inside, basis(low + high - 1)))
    return np.column_stack(means)


def by_rank(x):
    """The first three of its empirical distribution function, of which equal values share a stretch."""
    order = np.sort(x)
    ends = (np.searchsorted(order, x, side) / len(x) for side in ("left", "right"))
    return list(legendre(*ends)[:, :3].T[:, :, None])


def others(indicators, labels):
    """Columns without the most frequent category's."""
    return np.delete(indicators, np.bincount(labels).argmax(), 1)


def products(*parts):
    made = parts[0]
    for part in parts[1:]:
        made = (made[:, :, None] * part[:, None, :]).reshape(len(made), -1)
    return made


def p_value(features, scores, of_values=False):
    """C(alpha): what the scores of estimated parameters leave of features has a self-normalised sum."""
    basis = linalg.orth(scores / np.linalg.norm(scores, axis=0))[:, : 0 if of_values else None]
    left = features - basis @ (basis.T @ features)
    square = left**2
    enough = (square.sum(0) > 1e-5 * (features**2).sum(0)) & (square.sum(0) ** 2 > 12 * (square**2).sum(0))
    left, degrees = left[:, enough], len(left) - basis.shape[1]
    if not left.shape[1]:
        return None
    total = left.sum(0)
    share = total @ np.linalg.pinv(left.T @ left, rcond=1e-6) @ total / len(left) / (2 if of_values else 1)
    return stats.beta.sf(share, left.shape[1] / 2, (degrees - left.shape[1]) / 2)


def checked_by_hand(table, params):
    """For each node and pair of nodes that the graph keeps apart, the adjusted p-value of the clearest aspect."""
    x, c, y, n, k = (table[name].to_numpy() for name in "xcynk")
    one_hot, of_k = np.eye(3)[c], np.eye(2)[k]
    loc, scale = (params["y"][name][c] for name in ("loc", "scale"))
    residual, own = (y - loc - params["y"]["weight"] * x) / scale, (x - params["x"]["loc"]) / params["x"]["scale"]
    rate = np.exp(params["n"]["log_rate"].item() + params["n"]["weight"].item() * x)
    logits = np.outer(x, np.squeeze(params["k"]["weight"])) + params["k"]["logits"]
    probs = np.exp(logits - np.logaddexp.reduce(logits, 1, keepdims=True))
    shape = {
        "x": legendre(stats.norm.cdf(own), stats.norm.cdf(own)),
        "y": legendre(stats.norm.cdf(residual), stats.norm.cdf(residual)),
        "n": legendre(stats.poisson.cdf(n - 1, rate), stats.poisson.cdf(n, rate)),
    }
    blocks = {node: [own[:, :1], own[:, 1:2]] for node, own in shape.items()}
    blocks |= {"c": [others(one_hot - params["c"]["probs"], c)], "k": [others(of_k - probs, k)]}
    context = {"x": by_rank(x), "c": [others(one_hot - one_hot.mean(0), c)]}
    line = np.column_stack([np.ones_like(x), x])
    scores = {
        "x": np.column_stack([own, own**2 - 1]),
        "c": (one_hot - params["c"]["probs"])[:, 1:],
        "y": np.column_stack([one_hot * residual[:, None], residual * x / scale, one_hot * (residual**2 - 1)[:, None]]),
        "n": (n - rate)[:, None] * line,
        "k": (of_k - probs)[:, 1:] * line,
    }
    parents = {"x": "", "c": "", "y": "xc", "n": "x", "k": "x"}
    found = {}
    for node in scores:
        aspects = [p_value(one, scores[node], True) for one in blocks[node]]
        aspects += [p_value(one[:, None], scores[node]) for one in shape.get(node, np.zeros((0, 0))).T]
        for parent in parents[node]:
            for order, of_parent in enumerate(context[parent]):
                for block in blocks[node][: 1 if order == 2 else 2]:
                    aspects.append(p_value(products(block, of_parent), scores[node]))
        if len(parents[node]) == 2:
            aspects.append(p_value(products(blocks[node][0], context["x"][0], context["c"][0]), scores[node]))
        found[node, ""] = aspects
    for node, other in ("xc", "yn", "yk", "nc", "nk", "kc"):
        for one in ((node, other), (other, node)):
            found[one] = [p_value(products(a, b), scores[one[0]]) for a in blocks[one[0]] for b in blocks[one[1]]]
    known = {pair: [p for p in own if p is not None] for pair, own in found.items()}
    return {pair: 1 - (1 - min(own)) ** len(own) if own else 1.0 for pair, own in known.items()}


def test_all_p_values_are_those_of_a_plain_loop():
    rng = np.random.default_rng(15)
    x, c = rng.standard_t(5, 300), rng.choice(3, 300, p=[0.2, 0.5, 0.3])
    y = np.array([1.0, -1.0, 0.0])[c] + np.array([0.5, 1.0, 2.0])[c] * x + rng.gumbel(size=300) * (1 + 0.3 * (x > 0))
    n, k = rng.poisson(np.exp(0.5 + 0.4 * x + 0.2 * (c == 1))), (rng.random(300) < 1 / (1 + np.exp(-x))).astype(int)
    table = pd.DataFrame({"x": x, "c": c, "y": y, "n": n, "k": k})
    nodes = {"x": m.Normal(), "c": m.Categorical(3), "y": m.Normal(), "n": m.Poisson(), "k": m.Categorical(2)}
    model = otp.Model(otp.Graph([("x", "y"), ("c", "y"), ("x", "n"), ("x", "k")]), nodes)
    told, expected = checked(model, table), checked_by_hand(table, model.params())
    assert len(told) == 5 + 6
    for line in told.itertuples():
        assert line.p == pytest.approx(expected[line.node, line.other], rel=1e-4, abs=1e-12), (line.node, line.other)
