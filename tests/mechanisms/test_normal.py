"""Normal nodes: starts, sums of features, updates and kernels, beside plain versions of them."""

import itertools

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from otpdag import mechanisms as m
from otpdag.divergences.whitened import FeatureColumn, WhitenedFeatures
from otpdag.mechanisms.normal import SMALLEST_SCALE, SMALLEST_UPDATE
from otpdag.spaces import Discrete
from tests.mechanisms.plain import FAMILY, as_parents, line_of, pooled, table

TABLE = m.Family("x", (("a", Discrete(3)),))


def columns(rng, a, r):
    return np.stack([100.0 + a + 0.5 * r + 2.0 * rng.normal(size=60), -1.0 + r + 0.1 * rng.normal(size=60)], 1)


@pytest.mark.parametrize(("shared", "isotropic"), list(itertools.product([False, True], repeat=2)))
def test_scales_start_from_the_residuals_of_a_regression(shared, isotropic):
    rng = np.random.default_rng(0)
    a, r, weight = table(rng)
    value = columns(rng, a, r)
    node = m.Normal(2, shared_scale=shared, isotropic=isotropic, floor=0.0).setup(FAMILY)
    found = node.start(torch.as_tensor(value), as_parents(a, r), torch.as_tensor(weight))
    squares = (value - line_of(found, "loc", a, r)) ** 2
    variance = np.average(squares, axis=0, weights=weight)[None] if shared else pooled(squares, a, weight)
    expected = np.sqrt(variance.mean(-1, keepdims=True) if isotropic else variance)
    np.testing.assert_allclose(found["scale"], expected, rtol=1e-9)


def test_a_start_is_above_the_floor():
    a, r, weight = table(np.random.default_rng(1))
    value = torch.as_tensor(2.0 * r).unsqueeze(-1)  # a line without noise
    spread = np.sqrt(np.cov(2.0 * r, aweights=weight, bias=True))
    for floor, share in ((0.0, SMALLEST_SCALE), (0.01, 0.015)):
        node = m.Normal(floor=floor).setup(FAMILY).scaled_to(value, as_parents(a, r), torch.as_tensor(weight))
        found = node.start(value, as_parents(a, r), torch.as_tensor(weight))["scale"]
        np.testing.assert_allclose(found, share * spread, rtol=1e-6)


def scaled(node, value, weight):
    return node.setup(TABLE).scaled_to(value, {"a": torch.eye(3).double()[torch.zeros(len(value), dtype=int)]}, weight)


@pytest.mark.parametrize("units", [False, True])
def test_features_times_coefficients_are_the_log_density_of_what_is_seen(units):
    rng = np.random.default_rng(2)
    value, seen = torch.as_tensor(50.0 + 9.0 * rng.normal(size=(7, 2))), torch.as_tensor(rng.random((7, 2)) < 0.7)
    node = m.Normal(2)
    node = scaled(node, value, torch.ones(7).double()) if units else node.setup(TABLE)
    loc, scale = 50.0 + rng.normal(size=(3, 2)), rng.uniform(1.0, 5.0, (3, 2))
    params = {"loc": torch.as_tensor(loc)[None], "scale": torch.as_tensor(scale)[None]}
    found = node.features(value, seen) @ node.coefficients(params)[0].T
    expected = (stats.norm.logpdf(value[:, None], loc, scale) * seen[:, None].numpy()).sum(-1)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert m.Normal(2).setup(FAMILY).features(value, seen) is None


VARIANTS = list(itertools.product([False, True], [False, True], [False, True]))


@pytest.mark.parametrize(("shared", "isotropic", "units"), VARIANTS)
def test_sums_of_features_are_maximised_by_weighted_moments(shared, isotropic, units):
    rng = np.random.default_rng(3)
    value, seen = 50.0 + np.array([9.0, 0.5]) * rng.normal(size=(40, 2)), rng.random((40, 2)) < 0.7
    weight = rng.dirichlet(np.ones(3), 40) * rng.uniform(0.5, 2.0, (40, 1))
    weight[:, 2] = 0.0  # a state without rows stays as it was
    node = m.Normal(2, shared_scale=shared, isotropic=isotropic, floor=0.0)
    node = scaled(node, torch.as_tensor(value), torch.ones(40).double()) if units else node.setup(TABLE)
    sums = torch.as_tensor(weight.T) @ node.features(torch.as_tensor(value), torch.as_tensor(seen))
    before = {
        "loc": torch.as_tensor(rng.normal(size=(1, 3, 2))),
        "scale": torch.full((1, 1 if shared else 3, 1 if isotropic else 2), 7.0).double(),
    }
    found = node.maximised_by(before, sums[None])
    trust = weight[:, :, None] * seen[:, None]
    loc = before["loc"][0].numpy().copy()
    loc[:2] = ((trust * value[:, None]).sum(0) / np.where(trust.sum(0) > 0, trust.sum(0), 1.0))[:2]
    np.testing.assert_allclose(found["loc"][0], loc, rtol=1e-9)
    squares, counts = (trust * (value[:, None] - loc) ** 2).sum(0), trust.sum(0)
    if shared:
        squares, counts = squares.sum(0, keepdims=True), counts.sum(0, keepdims=True)
    if isotropic:
        squares, counts = squares.sum(-1, keepdims=True), counts.sum(-1, keepdims=True)
    expected = np.where(counts > 0, np.sqrt(squares / np.where(counts > 0, counts, 1.0)), 7.0)
    np.testing.assert_allclose(found["scale"][0], expected, rtol=1e-6)


def test_what_is_given_stays_and_equal_values_keep_a_little_spread():
    value = torch.full((5, 1), 3.0).double()
    for node, learned in ((m.Normal(loc=1.0), "scale"), (m.Normal(scale=2.0), "loc"), (m.Normal(), "both")):
        bound = node.setup(m.Family("x"))
        params = {"loc": torch.full((1, 1, 1), 1.0).double(), "scale": torch.full((1, 1, 1), 2.0).double()}
        sums = bound.features(value, torch.ones(5, 1, dtype=torch.bool)).sum(0).reshape(1, 1, -1)
        found = {name: one.item() for name, one in bound.maximised_by(params, sums).items()}
        assert found["loc"] == (1.0 if learned == "scale" else 3.0)
        expected = {"scale": 2.0, "loc": 2.0, "both": SMALLEST_UPDATE}[learned]
        assert found["scale"] == pytest.approx(expected, rel=1e-6)


def test_means_of_kernels_are_integrals_over_the_normal_value():
    rng = np.random.default_rng(4)
    data = torch.as_tensor(3.0 + 2.0 * rng.normal(size=(1, 30, 2)))
    seen = torch.ones(1, 30, dtype=torch.bool)
    fields = [FeatureColumn(data[..., i : i + 1], seen) for i in range(2)]
    kernels = WhitenedFeatures(features=6).fit(fields, torch.ones(1, 30).double()).kernels
    node = m.Normal(2).setup(m.Family("x"))
    loc, scale = np.array([2.5, 3.5]), np.array([0.7, 1.9])
    params = {"loc": torch.as_tensor(loc).reshape(1, 1, 2), "scale": torch.as_tensor(scale).reshape(1, 1, 2)}
    found = node.kernel_means(params, {}, kernels)
    for i, kernel in enumerate(kernels):
        for j in range(len(kernel.landmarks.flatten())):

            def density(x, i=i, j=j, kernel=kernel):
                value = kernel(torch.tensor([[x]], dtype=torch.float64)).flatten()[j].item()
                return value * stats.norm.pdf(x, loc[i], scale[i])

            expected, _ = integrate.quad(density, loc[i] - 9 * scale[i], loc[i] + 9 * scale[i], limit=200)
            assert found[i].flatten()[j].item() == pytest.approx(expected, rel=1e-6)
    counts = [FeatureColumn(data[..., :1].abs(), seen, root=True)]
    rooted = WhitenedFeatures(features=6).fit(counts, torch.ones(1, 30).double()).kernels
    assert m.Normal().setup(m.Family("x")).kernel_means(params, {}, rooted) is None


def test_a_scale_that_coordinates_share_is_shown_as_one_number():
    node = m.Normal(2, isotropic=True).setup(TABLE)
    params = {"loc": torch.zeros(1, 3, 2), "scale": torch.arange(1.0, 4.0).reshape(1, 3, 1)}
    assert node.describe(params)["scale"].tolist() == [[1.0, 2.0, 3.0]]
    plain = m.Normal(2).setup(TABLE).describe({"loc": torch.zeros(1, 3, 2), "scale": torch.ones(1, 3, 2)})
    assert plain["scale"].shape == (1, 3, 2)
    assert node.scale_at(params, {"a": torch.eye(3)[None]}, 3).tolist() == [[[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]]
