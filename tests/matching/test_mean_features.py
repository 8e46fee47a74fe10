"""Mean features of a model, against large samples of the same model."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from scipy.special import gammaln

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch, Schema, encode
from otpdag.divergences import WhitenedFeatures
from otpdag.errors import ModelError
from otpdag.matching.mean_features import feature_columns, leaf_means, mean_features, mean_over_many
from otpdag.matching.model_points import lay_out
from otpdag.settings import PointSizes
from otpdag.simulation import ancestral
from otpdag.spaces import Count, Discrete

RNG = np.random.default_rng(77)
FEATURES = WhitenedFeatures(features=60)
SIZES = PointSizes()


def batch_of(model, table, weights=None):
    return encode(table, Schema.of(model.spaces, model.graph, table), hidden=model.graph.hidden, weights=weights)


def setup(model, batch, seed=0, sizes=SIZES, finely=False):
    generator = torch.Generator().manual_seed(seed)
    fitted = FEATURES.fit(feature_columns(model.structure, batch), batch.weight, generator)
    return fitted, lay_out(model.structure, batch, sizes, generator, finely=finely)


def monte_carlo(model, fitted, rows, given=None):
    """Mean features of a sample, and their standard errors."""
    values = ancestral(model.structure, model.fitted.naturals, rows, torch.Generator().manual_seed(9), do=given)
    observed = model.graph.observed
    seen = {n: torch.ones(1, rows, model.mechanisms[n].space.cells, dtype=torch.bool) for n in observed}
    sample = Batch({n: values[n] for n in observed}, seen, torch.ones(1, rows, dtype=torch.float64))
    columns = feature_columns(model.structure, sample)
    features = fitted.of(columns)
    return features.mean(1)[0].numpy(), features.std(1)[0].numpy() / np.sqrt(rows)


def check(model, batch, rows=60_000, given=None, bias=0.0, **options):
    fitted, measure = setup(model, batch, **options)
    found = mean_features(measure, model.fitted.naturals, fitted)[0].numpy()
    expected, error = monte_carlo(model, fitted, rows, given)
    excess = np.abs(found - expected) - bias
    assert (excess < 4.5 * error + 1e-4).all(), (excess / (error + 1e-9)).max()


LEAVES = {
    "normal": (m.Normal(), {"loc": [0.0, 2.0], "scale": [1.0, 0.5]}),
    "vector": (m.Normal(2), {"loc": [[0.0, 1.0], [2.0, -1.0]], "scale": [[1.0, 0.5], [0.3, 2.0]]}),
    "poisson": (m.Poisson(), {"log_rate": np.log([1.0, 6.0])}),
    "poisson vector": (m.Poisson(2), {"log_rate": np.log([[1.0, 3.0], [6.0, 0.5]])}),
    "large poisson": (m.Poisson(), {"log_rate": np.log([5.0, 2000.0])}),
    "negative binomial": (m.NegativeBinomial(), {"log_rate": np.log([3.0, 60.0]), "dispersion": [0.5, 4.0]}),
    "categorical": (m.Categorical(3), {"probs": [[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]]}),
    "gamma": (m.Gamma(), {"log_mean": [0.0, 1.0], "shape": [2.0, 5.0]}),
    "lognormal": (m.LogNormal(), {"loc": [0.0, 1.0], "scale": [0.5, 0.8]}),
    "beta": (m.Beta(), {"logit_mean": [-0.5, 0.5], "concentration": [3.0, 8.0]}),
    "student": (m.StudentT(), {"loc": [0.0, 2.0], "scale": [1.0, 0.5], "df": 5.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves_below_a_hidden_class(leaf):
    mechanism, params = LEAVES[leaf]
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": mechanism})
    shapes = {n: p.shape for n, p in model.mechanisms["x"].declared().items()}
    params = {
        n: np.broadcast_to(params[n], shape if np.ndim(params[n]) == 0 else np.shape(params[n]))
        for n, shape in shapes.items()
    }
    model.set_params({"z": {"probs": [0.4, 0.6]}, "x": params})
    table = model.sample(200, seed=1).drop(columns="z")
    check(model, batch_of(model, table), bias=1e-3 if leaf in ("gamma", "beta", "student") else 0.0)


def mixed_model():
    """Inner nodes of every kind: a hidden number, a hidden class, an observed count, an observed number."""
    graph = otp.Graph(
        [("z", "n"), ("u", "n"), ("n", "x"), ("z", "x"), ("x", "k"), ("u", "k"), ("x", "g")], hidden=["z", "u"]
    )
    model = otp.Model(
        graph,
        {
            "z": m.Categorical(2),
            "u": m.Normal(),
            "n": m.Poisson(),
            "x": m.Normal(),
            "k": m.Categorical(2),
            "g": m.Gamma(),
        },
    )
    return model.set_params(
        {
            "z": {"probs": [0.3, 0.7]},
            "n": {"log_rate": [0.2, 1.2], "weight": 0.4},
            "x": {"loc": [0.0, 1.0], "weight": 0.2, "scale": [1.0, 0.6]},
            "k": {"logits": [0.0, 0.3], "weight": [[0.0, 0.5], [0.0, -0.8]]},
            "g": {"log_mean": 0.2, "weight": 0.3, "shape": 3.0},
        }
    )


def test_inner_nodes_of_every_kind():
    model = mixed_model()
    table = model.sample(300, seed=1).drop(columns=["z", "u"])
    check(model, batch_of(model, table), bias=4e-3)


def test_one_inner_number_is_integrated_on_a_grid():
    model = otp.Model(otp.Graph([("u", "a"), ("u", "b")], hidden=["u"]), {n: m.Normal() for n in ("u", "a", "b")})
    model.set_params({"a": {"loc": 1.0, "weight": 1.0, "scale": 0.5}, "b": {"loc": 0.0, "weight": -2.0, "scale": 1.0}})
    batch = batch_of(model, model.sample(200, seed=1).drop(columns="u"))
    assert lay_out(model.structure, batch, SIZES, torch.Generator()).log_weight.shape == (1, 48)
    check(model, batch)


def test_an_inner_gamma():
    model = otp.Model(otp.Graph([("g", "x")]), {"g": m.Gamma(), "x": m.Normal()})
    model.set_params({"g": {"log_mean": 0.5, "shape": 2.0}, "x": {"loc": 0.0, "weight": 1.5, "scale": 0.7}})
    check(model, batch_of(model, model.sample(200, seed=1)), bias=4e-3)


def test_a_large_inner_count_is_summed_in_strides():
    model = otp.Model(otp.Graph([("n", "x")]), {"n": m.Poisson(), "x": m.Normal()})
    model.set_params({"n": {"log_rate": np.log(400.0)}, "x": {"loc": 0.0, "weight": 0.05, "scale": 1.0}})
    check(model, batch_of(model, model.sample(200, seed=1)), bias=1e-3)


def test_small_counts_are_told_apart_where_some_are_large():
    """Half of them are zero or one, the largest of a sample near a hundred: no stride serves both."""
    model = otp.Model(otp.Graph([("a", "n"), ("n", "x")]), {"a": m.Normal(), "n": m.Poisson(), "x": m.Normal()})
    below = {"n": {"log_rate": 0.5, "weight": 1.1}, "x": {"loc": -0.5, "weight": 0.5, "scale": 1.0}}
    model.set_params({"a": {"loc": 0.0, "scale": 1.0}, **below})
    batch = batch_of(model, model.sample(4000, seed=3))
    assert batch.values["n"].max() > 75
    assert batch.values["n"].median() <= 2
    check(model, batch, finely=True)


def test_many_points_tell_what_few_lack():
    model = otp.Model(otp.Graph([("a", "b"), ("b", "c"), ("c", "d")]), {name: m.Normal() for name in "abcd"})
    below = {name: {"loc": 0.3, "weight": 0.9, "scale": 0.8} for name in "bcd"}
    model.set_params({"a": {"loc": 0.0, "scale": 1.0}, **below})
    batch = batch_of(model, model.sample(200, seed=1))
    naturals = model.fitted.naturals
    fitted, few = setup(model, batch, sizes=PointSizes(noise=32))
    _, many = setup(model, batch, seed=1, finely=True)
    rough = mean_features(few, naturals, fitted)
    found = mean_over_many(many, naturals, fitted)
    expected, error = monte_carlo(model, fitted, 60_000)
    assert (np.abs(found[0].numpy() - expected) < 4.5 * error + 1e-4).all()
    assert (np.abs(rough[0].numpy() - expected) > 4.5 * error + 1e-4).any()


def test_few_points_of_a_count_stand_for_all_where_they_weigh_most():
    model = otp.Model(otp.Graph([("a", "n"), ("n", "x")]), {"a": m.Normal(), "n": m.Poisson(), "x": m.Normal()})
    below = {"n": {"log_rate": 0.5, "weight": 1.1}, "x": {"loc": 0.0, "weight": 0.5, "scale": 1.0}}
    model.set_params({"a": {"loc": 0.0, "scale": 1.0}, **below})
    batch = batch_of(model, model.sample(300, seed=1))
    fitted, every = setup(model, batch)
    fewer = every.thinned(model.fitted.naturals, SIZES.thinned, torch.Generator().manual_seed(0))
    assert fewer.size == SIZES.thinned < every.size

    def mean_and_slope(measure):
        rate = model.fitted.naturals["n"]["log_rate"].clone().requires_grad_(True)
        naturals = {**model.fitted.naturals, "n": {**model.fitted.naturals["n"], "log_rate": rate}}
        mean = mean_features(measure, naturals, fitted)
        return mean.detach(), torch.autograd.grad(mean.sum(), rate)[0]

    (mean, slope), (whole, steepness) = mean_and_slope(fewer), mean_and_slope(every)
    torch.testing.assert_close(mean, whole, atol=0.01, rtol=0.0)
    torch.testing.assert_close(slope, steepness, rtol=0.05, atol=0.0)


def test_given_rows_are_those_of_the_data():
    model = otp.Model(
        otp.Graph([("x", "y"), ("u", "y")], hidden=["u"]), {"x": m.Given(), "u": m.Normal(), "y": m.Normal()}
    )
    model.set_params({"y": {"loc": 0.5, "weight": [1.0, 0.8], "scale": 0.6}})
    x = RNG.exponential(size=200)
    table = pd.DataFrame({"x": x, "y": RNG.normal(size=200)})
    batch = batch_of(model, table)
    rows = 160_000
    given = {"x": batch.values["x"].repeat(1, rows // 200, 1)}
    check(model, batch, given=given, rows=rows, bias=2e-3)


def test_given_categories_count_by_their_weights():
    """A collapsed table has few rows; their weights are the covariate's distribution."""
    model = otp.Model(otp.Graph([("g", "k")]), {"g": m.Given(Discrete(2)), "k": m.Categorical(2)})
    model.set_params({"k": {"probs": [[0.9, 0.1], [0.2, 0.8]]}})
    table = pd.DataFrame({"g": [0, 0, 1, 1], "k": [0, 1, 0, 1]})
    weights = np.array([80.0, 8.0, 2.0, 10.0])
    batch = batch_of(model, table, weights)
    fitted, measure = setup(model, batch)
    found = mean_features(measure, model.fitted.naturals, fitted)[0]
    joint = np.array([0.88, 0.12])[:, None] * np.array([[0.9, 0.1], [0.2, 0.8]])
    truth = Batch(batch.values, batch.mask, torch.tensor(joint.reshape(1, 4)))
    columns = feature_columns(model.structure, truth)
    features = fitted.of(columns)
    np.testing.assert_allclose(found, (truth.weight[0, :, None] * features[0]).sum(0), rtol=1e-9)


def test_many_covariate_rows_are_drawn_in_proportion_to_their_weights():
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Given(), "y": m.Normal()})
    model.set_params({"y": {"loc": 0.0, "weight": 1.0, "scale": 1.0}})
    table = pd.DataFrame({"x": np.arange(9000.0), "y": RNG.normal(size=9000)})
    weights = np.where(table["x"] < 4500, 3.0, 1.0)
    measure = lay_out(model.structure, batch_of(model, table, weights), SIZES, torch.Generator().manual_seed(0))
    x, weight = measure.given["x"][0, :, 0].numpy(), measure.log_weight.exp()[0].numpy()
    assert len(x) == 4096
    assert weight.sum() == pytest.approx(1)
    assert (weight * (x < 4500)).sum() == pytest.approx(0.75, abs=0.01)


# -- exactness and gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [90.0, 110.0, 300.0, 2000.0])
@pytest.mark.parametrize("rate", [0.3, 3.0, 14.0, 40.0])
def test_few_counts_are_small_ones_and_some_that_stand_for_others(rate, largest):
    counts, weight = (value.numpy() for value in Count().summands(largest, most=96))
    assert len(counts) <= 100 or largest == 2000.0
    pmf = weight * np.exp(counts * np.log(rate) - rate - gammaln(counts + 1))
    assert pmf.sum() == pytest.approx(1, abs=1e-3)
    assert (pmf * counts).sum() == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize("rate", [0.3, 7.0, 60.0, 900.0, 20_000.0])
def test_coarse_counts_keep_means_of_smooth_functions(rate):
    def kernel(count):
        return np.exp(-0.5 * ((np.sqrt(count) - np.sqrt(rate) - 0.3) / 0.25) ** 2)

    counts, weight = (value.numpy() for value in Count().summands(1.5 * rate + 50))
    pmf = weight * np.exp(counts * np.log(rate) - rate - gammaln(counts + 1))  # points lie between counts as well
    support = np.arange(0, int(1.5 * rate + 50))
    exact = (stats.poisson.pmf(support, rate) * kernel(support)).sum()
    assert pmf.sum() == pytest.approx(1, abs=1e-6)
    assert (pmf * kernel(counts)).sum() == pytest.approx(exact, abs=1e-6)


def test_mean_features_have_the_gradient_of_finite_differences():
    model = mixed_model()
    batch = batch_of(model, model.sample(40, seed=1).drop(columns=["z", "u"]))
    generator = torch.Generator().manual_seed(0)
    fitted = WhitenedFeatures(features=6).fit(feature_columns(model.structure, batch), batch.weight, generator)
    measure = lay_out(model.structure, batch, PointSizes(noise=64), generator)
    theta = model.structure.raw(model.fitted.naturals)
    keys = list(theta)

    def features(*raw):
        naturals = model.structure.naturals(dict(zip(keys, raw, strict=True)))
        return mean_features(measure, naturals, fitted)

    inputs = [theta[key].detach().double().requires_grad_() for key in keys]
    assert torch.autograd.gradcheck(features, inputs, atol=1e-5)


def test_replicas_are_independent():
    model = mixed_model()
    batch = batch_of(model, model.sample(60, seed=1).drop(columns=["z", "u"]))
    fitted, measure = setup(model, batch, sizes=PointSizes(noise=8))
    theta = model.structure.raw(model.fitted.naturals)
    generator = torch.Generator().manual_seed(3)
    stacked = {k: v + 0.2 * torch.randn(3, *v.shape[1:], generator=generator, dtype=v.dtype) for k, v in theta.items()}
    together = mean_features(measure, model.structure.naturals(stacked), fitted)
    assert together.shape == (3, 60)
    for r in range(3):
        apart = {key: value[r : r + 1] for key, value in stacked.items()}
        found = mean_features(measure, model.structure.naturals(apart), fitted)
        torch.testing.assert_close(found[0], together[r])


# -- more joint states than are listed --------------------------------------------------------------------------------


def chain_of_binaries(length):
    """Binaries that each follow the one before them, most of the time, and a table of them."""
    rng = np.random.default_rng(5)
    columns = [rng.integers(0, 2, 4000)]
    for _ in range(length - 1):
        columns.append(np.where(rng.random(4000) < 0.75, columns[-1], rng.integers(0, 2, 4000)))
    table = pd.DataFrame({f"b{i}": column for i, column in enumerate(columns)})
    graph = otp.Graph([(f"b{i}", f"b{i + 1}") for i in range(length - 1)])
    return otp.Model(graph, {name: m.Categorical(2) for name in table}), table


@pytest.mark.slow
def test_joint_states_beyond_those_listed_are_drawn_and_weighed():
    model, table = chain_of_binaries(15)  # the last is a leaf: 2^14 joint states
    with pytest.warns(
        otp.ApproximationWarning, match="16384 joint states, and at most 4096 are listed: 4096 are drawn"
    ):
        result = otp.fit(model, table, method="transport", seed=0)
    assert result.status.approximate
    assert any("drawn" in note for note in result.notes)
    follows = pd.concat([pd.crosstab(table[f"b{i}"], table[f"b{i + 1}"], normalize="index") for i in range(14)])
    params = model.params()
    found = np.concatenate([params[f"b{i + 1}"]["probs"] for i in range(14)])
    assert np.abs(found - follows.to_numpy()).mean() < 0.02


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_an_inner_vector_of_counts_is_refused():
    model = otp.Model(otp.Graph([("n", "x")]), {"n": m.Poisson(2), "x": m.Normal()})
    table = pd.DataFrame({"n.0": RNG.poisson(3, 30), "n.1": RNG.poisson(3, 30), "x": RNG.normal(size=30)})
    with pytest.raises(ModelError, match="no vector of counts with children"):
        otp.fit(model, table, method="transport")


def test_a_leaf_without_support_or_derivative_is_refused():
    """A mechanism of counts that offers no density."""

    class Rounded(m.Poisson):
        has_density = False

    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": Rounded()})
    model.set_params({"x": {"log_rate": 1.0}})
    with pytest.raises(ModelError, match="has neither a finite support nor a differentiable forward map"):
        leaf_means(model.mechanisms["x"], model.fitted.naturals["x"], {}, [])


def test_dependent_counts_are_refused():
    model = otp.Model(otp.Graph([("z", "w")], hidden=["z"]), {"z": m.Categorical(2), "w": m.Multinomial(3, 10)})
    table = pd.DataFrame(RNG.multinomial(10, [0.2, 0.3, 0.5], 30), columns=["w.0", "w.1", "w.2"])
    with pytest.raises(ModelError, match="no vector of counts that depend on each other: use method='likelihood'"):
        otp.fit(model, table, method="transport")


def test_an_uncorrelated_vector_has_the_features_of_a_plain_one():
    rng = np.random.default_rng(0)
    table = torch.as_tensor(rng.normal(size=(1, 200, 2)))
    batch = Batch({"x": table}, {"x": torch.ones(1, 200, 2).bool()}, torch.ones(1, 200).double())
    graph, loc = otp.Graph([], nodes=["x"]), torch.tensor([[[0.3, -0.2]]], dtype=torch.float64)
    scale = torch.tensor([[[0.8, 1.5]]], dtype=torch.float64)
    plain = otp.Model(graph, {"x": m.Normal(2)}).structure
    joint = otp.Model(graph, {"x": m.MultivariateNormal(2)}).structure
    fitted = otp.transport().objective.direct.features.fit(feature_columns(plain, batch), batch.weight)
    covariance = torch.diag_embed(scale[:, 0] ** 2)[:, None]
    naturals = [{"x": {"loc": loc, "scale": scale}}, {"x": {"loc": loc, "covariance": covariance}}]
    found = [
        mean_features(lay_out(s, batch, SIZES, torch.Generator().manual_seed(0)), n, fitted)
        for s, n in zip((plain, joint), naturals, strict=True)
    ]
    torch.testing.assert_close(found[0], found[1], atol=0.01, rtol=0)
