"""Correlated normal vectors against SciPy, with cells missing in any pattern."""

import numpy as np
import pytest
import torch
from scipy import stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.errors import ModelError
from otpdag.mechanisms.multivariate_normal import _Covariance
from otpdag.spaces import Discrete, Real

MEANS = np.array([[0.0, 1.0, -1.0], [2.0, 0.0, 0.5]])
FACTORS = np.array([[[1.0, 0, 0], [0.6, 0.8, 0], [-0.3, 0.5, 0.9]], [[0.5, 0, 0], [-0.4, 1.1, 0], [0.2, 0.7, 0.4]]])
COVARIANCES = FACTORS @ FACTORS.swapaxes(1, 2)
ROWS = 60


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    label = rng.integers(2, size=ROWS)
    value = MEANS[label] + np.einsum("nij,nj->ni", FACTORS[label], rng.normal(size=(ROWS, 3)))
    mechanism = m.MultivariateNormal(3).setup(m.Family("x", (("a", Discrete(2)),)))
    params = {"loc": torch.as_tensor(MEANS)[None], "covariance": torch.as_tensor(COVARIANCES)[None]}
    parents = {"a": torch.nn.functional.one_hot(torch.as_tensor(label), 2).double()[None]}
    return mechanism, params, parents, torch.as_tensor(value)[None], label


def expected(value, label, mask):
    found = []
    for row, a, seen in zip(value, label, mask, strict=True):
        cells = np.flatnonzero(seen)
        density = (
            stats.multivariate_normal(MEANS[a][cells], COVARIANCES[a][np.ix_(cells, cells)]) if len(cells) else None
        )
        found.append(density.logpdf(row[cells]) if density else 0.0)
    return np.array(found)


def test_density_of_complete_rows(problem):
    mechanism, params, parents, value, label = problem
    found = mechanism.log_prob(params, value, parents)[0]
    np.testing.assert_allclose(found, expected(value[0], label, np.ones((ROWS, 3))), rtol=1e-10)


def test_density_of_seen_cells_is_their_marginal(problem):
    mechanism, params, parents, value, label = problem
    mask = np.random.default_rng(1).random((2, ROWS, 3)) < 0.6
    shared = mechanism.log_prob(params, value, parents, torch.as_tensor(mask[:1]))[0]
    np.testing.assert_allclose(shared, expected(value[0], label, mask[0]), rtol=1e-9)
    both = mechanism.log_prob(params, value, parents, torch.as_tensor(mask))  # replicas with masks of their own
    for replica in range(2):
        np.testing.assert_allclose(both[replica], expected(value[0], label, mask[replica]), rtol=1e-9)
    states = {"a": torch.eye(2, dtype=torch.float64).reshape(1, 1, 2, 2)}  # enumerated parents
    four = mechanism.log_prob(params, value.unsqueeze(2), states, torch.as_tensor(mask[:1]).unsqueeze(2))
    np.testing.assert_allclose(four[0, np.arange(ROWS), label], shared, rtol=1e-9)


def test_unseen_cells_are_drawn_given_the_seen_ones(problem):
    mechanism, params, _, _, _ = problem
    draws = 40_000
    parents = {"a": torch.tensor([0.0, 1.0], dtype=torch.float64).expand(1, draws, 2)}
    value = torch.tensor([2.5, 0.0, 1.5], dtype=torch.float64).expand(1, draws, 3)
    mask = torch.tensor([True, False, True]).expand(1, draws, 3)
    noise = torch.randn(1, draws, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = mechanism.complete(params, value, parents, mask, noise)[0].numpy()
    among = COVARIANCES[1][np.ix_([0, 2], [0, 2])]
    gain = COVARIANCES[1][1, [0, 2]] @ np.linalg.inv(among)
    mean = MEANS[1, 1] + gain @ (np.array([2.5, 1.5]) - MEANS[1, [0, 2]])
    variance = COVARIANCES[1][1, 1] - gain @ COVARIANCES[1][[0, 2], 1]
    assert drawn[:, 1].mean() == pytest.approx(mean, abs=0.02)
    assert drawn[:, 1].var() == pytest.approx(variance, rel=0.04)
    np.testing.assert_array_equal(drawn[:, [0, 2]], value[0][:, [0, 2]])


def test_the_direct_route_knows_that_coordinates_depend_on_each_other():
    rng = np.random.default_rng(0)
    table = rng.multivariate_normal([0.0, 0.0], [[1.0, 0.8], [0.8, 1.0]], 1500)
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.MultivariateNormal(2)})
    otp.fit(model, {"x": table}, method="transport", seed=0)
    np.testing.assert_allclose(model.params()["x"]["covariance"], np.cov(table.T), atol=0.12)


def test_params_survive_a_file_and_a_way_back(tmp_path):
    graph = otp.Graph([("a", "x")])
    model = otp.Model(graph, {"a": m.Categorical(2), "x": m.MultivariateNormal(3, floor=1e-4)})
    model.set_params({"a": {"probs": [0.4, 0.6]}, "x": {"loc": MEANS, "covariance": COVARIANCES}})
    model.save(tmp_path / "model.otp")
    again = otp.load(tmp_path / "model.otp")
    np.testing.assert_allclose(again.params()["x"]["covariance"], COVARIANCES)
    np.testing.assert_allclose(again.set_params(model.params()).params()["x"]["covariance"], COVARIANCES)


def test_what_is_no_covariance_is_refused():
    for wrong in (np.ones((2, 2)), np.array([[1.0, 0.5], [0.0, 1.0]])):
        with pytest.raises(ModelError, match="'covariance' of node 'x' must be symmetric positive definite"):
            otp.Model(otp.Graph([], nodes=["x"]), {"x": m.MultivariateNormal(2, covariance=wrong)})
    with pytest.raises(ModelError, match="floor must be a number of at least 0; got -1"):
        m.MultivariateNormal(2, floor=-1.0)


@pytest.mark.parametrize("floor", [None, 0.01])
def test_a_start_is_the_residuals_covariance_with_two_rows_of_the_overall_one(problem, floor):
    _, _, parents, value, label = problem
    mechanism = m.MultivariateNormal(3, floor=floor).setup(m.Family("x", (("a", Discrete(2)),)))
    weight = np.random.default_rng(1).uniform(0.5, 2.0, ROWS)
    start = mechanism.start(value[0], {"a": parents["a"][0]}, torch.as_tensor(weight))
    rows, group = value[0].numpy(), [label == a for a in range(2)]
    rest = rows - start["loc"].numpy()[label]
    products = weight[:, None, None] * rest[:, :, None] * rest[:, None, :]
    overall = products.sum(0) / weight.sum()
    mean = weight @ rows / weight.sum()
    spread = weight @ (rows - mean) ** 2 / weight.sum()
    for a in range(2):
        pooled = (products[group[a]].sum(0) + 2 * overall) / (weight[group[a]].sum() + 2)
        share = 1e-6 if floor is None else 2 * floor
        np.testing.assert_allclose(start["covariance"][a], pooled + share * np.diag(spread), rtol=1e-6)


def in_units(mechanism, value):
    label = {"a": torch.eye(2).double()[torch.zeros(len(value), dtype=int)]}
    return mechanism.scaled_to(value, label, torch.ones(len(value)).double())


@pytest.mark.parametrize("units", [False, True])
def test_features_times_coefficients_are_the_log_density_of_rows_that_are_seen(problem, units):
    mechanism, params, _, value, _ = problem
    value = 10.0 + 3.0 * value[0]
    mechanism = in_units(mechanism, value) if units else mechanism
    seen = torch.ones(ROWS, 3, dtype=torch.bool)
    seen[::4] = False
    found = mechanism.features(value, seen) @ mechanism.coefficients(params)[0].T
    for a in range(2):
        law = stats.multivariate_normal(MEANS[a], COVARIANCES[a])
        expected = np.where(seen[:, 0], law.logpdf(value.numpy()), 0.0)
        np.testing.assert_allclose(found[:, a], expected, rtol=1e-8)
    seen[1, 2] = False  # a row that is seen in part has no features
    assert mechanism.features(value, seen) is None
    numeric = m.MultivariateNormal(3).setup(m.Family("x", (("r", Real(1)),)))
    assert numeric.features(value, torch.ones(ROWS, 3, dtype=torch.bool)) is None


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("units", [False, True])
def test_sums_of_features_are_fitted_weighted_moments(shared, units):
    rng = np.random.default_rng(5)
    value = 20.0 + np.array([4.0, 0.5]) * rng.normal(size=(30, 2))
    weight = rng.uniform(0.5, 2.0, (30, 3)) * [1.0, 1.0, 0.0]  # a state without rows stays as it was
    mechanism = m.MultivariateNormal(2, shared_covariance=shared).setup(m.Family("x", (("a", Discrete(3)),)))
    if units:
        label = {"a": torch.eye(3).double()[torch.zeros(30, dtype=int)]}
        mechanism = mechanism.scaled_to(torch.as_tensor(value), label, torch.ones(30).double())
    features = mechanism.features(torch.as_tensor(value), torch.ones(30, 2, dtype=torch.bool))
    before = {
        "loc": torch.as_tensor(rng.normal(size=(1, 3, 2))),
        "covariance": 5.0 * torch.eye(2).double().expand(1, 1 if shared else 3, 2, 2),
    }
    found = mechanism.fitted(before, (torch.as_tensor(weight.T) @ features)[None])
    loc = before["loc"][0].numpy().copy()
    loc[:2] = [weight[:, a] @ value / weight[:, a].sum() for a in range(2)]
    np.testing.assert_allclose(found["loc"][0], loc, rtol=1e-9)
    around = [np.einsum("n,ni,nj->ij", weight[:, a], value - loc[a], value - loc[a]) for a in range(3)]
    if shared:
        expected = [sum(around) / weight.sum()]
    else:
        expected = [around[0] / weight[:, 0].sum(), around[1] / weight[:, 1].sum(), 5.0 * np.eye(2)]
    np.testing.assert_allclose(found["covariance"][0], np.stack(expected), rtol=1e-7, atol=1e-9)


def test_what_is_given_is_not_maximised_and_one_row_leaves_a_sliver():
    value = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    seen = torch.ones(1, 2, dtype=torch.bool)
    params = {"loc": torch.zeros(1, 1, 2).double(), "covariance": torch.eye(2).double().reshape(1, 1, 2, 2)}
    for node, loc, covariance in (
        (m.MultivariateNormal(2, loc=0.0), [0.0, 0.0], [[1.0, 3.0], [3.0, 9.0]]),
        (m.MultivariateNormal(2, covariance=np.eye(2)), [1.0, 3.0], np.eye(2)),
        (m.MultivariateNormal(2), [1.0, 3.0], 1e-14 * np.eye(2)),
    ):
        bound = node.setup(m.Family("x"))
        found = bound.fitted(params, bound.features(value, seen).reshape(1, 1, -1))
        np.testing.assert_allclose(found["loc"][0, 0], loc)
        np.testing.assert_allclose(found["covariance"][0, 0], covariance, rtol=1e-9, atol=1e-20)


@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_covariances_come_back_from_their_factors(floor):
    support = _Covariance(floor)
    wanted = torch.as_tensor(COVARIANCES) + floor * torch.eye(3)
    torch.testing.assert_close(support.natural(support.raw(wanted)), wanted)
    raw = torch.as_tensor(FACTORS).clone()
    factor = torch.tril(raw, -1) + torch.diag_embed(raw.diagonal(dim1=-2, dim2=-1).exp())
    torch.testing.assert_close(support.natural(raw), factor @ factor.mT + floor * torch.eye(3).double())
    at_floor = support.natural(support.raw(floor * torch.eye(2).double() + torch.diag(torch.tensor([0.0, 2.0]))))
    torch.testing.assert_close(at_floor, torch.diag(torch.tensor([floor, floor + 2.0])).double(), rtol=1e-6, atol=1e-9)
    assert support.check(torch.as_tensor(COVARIANCES))
    assert not support.check(-torch.as_tensor(COVARIANCES))
    assert not support.check(torch.as_tensor(FACTORS))


def test_a_singular_matrix_has_no_density(problem):
    mechanism, params, parents, value, _ = problem
    flat = params["covariance"].repeat(2, 1, 1, 1)
    flat[0] = 1.0
    found = mechanism.log_prob({**params, "covariance": flat}, value, parents)
    assert found[0].isnan().all()
    torch.testing.assert_close(found[1], mechanism.log_prob(params, value, parents)[0])


def test_a_vector_is_turned_with_its_covariances(problem):
    mechanism, params, parents, value, _ = problem
    sign = torch.tensor([1.0, -1.0, 1.0]).double()
    turned = mechanism.turned_self(params, sign)
    torch.testing.assert_close(
        mechanism.log_prob(turned, value * sign, parents), mechanism.log_prob(params, value, parents)
    )
    one = m.MultivariateNormal(1).setup(m.Family("x"))
    shown = one.describe({"loc": torch.ones(1, 1, 1), "covariance": torch.full((1, 1, 1, 1), 4.0)})
    assert shown["covariance"].tolist() == [4.0]
    assert mechanism.describe(params)["covariance"].shape == (1, 2, 3, 3)


def test_noise_is_found_again(problem):
    mechanism, params, parents, value, _ = problem
    noise = mechanism.abduct(params, value, parents, value)
    torch.testing.assert_close(mechanism.forward(params, parents, noise), value)
