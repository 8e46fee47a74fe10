"""Normal nodes: starts, sums of features, updates and kernels, beside plain versions of them."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from otpdag import mechanisms as m
from otpdag.errors import ModelError
from otpdag.mechanisms.base import fitted_to_rows
from otpdag.mechanisms.normal import default_floor
from otpdag.mechanisms.parameters import Axis
from otpdag.spaces import Discrete
from tests.mechanisms.plain import FAMILY, as_parents, line_of, pooled, regressed, table

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
    for floor, share in ((0.0, m.Normal.smallest_at_start), (0.01, 0.015)):
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
def test_sums_of_features_are_fitted_weighted_moments(shared, isotropic, units):
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
    found = node.fitted(before, sums[None])
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
        found = {name: one.item() for name, one in bound.fitted(params, sums).items()}
        assert found["loc"] == (1.0 if learned == "scale" else 3.0)
        expected = {"scale": 2.0, "loc": 2.0, "both": 1e-8}[learned]
        assert found["scale"] == pytest.approx(expected, rel=1e-6)


def test_a_scale_that_coordinates_share_is_shown_as_one_number():
    node = m.Normal(2, isotropic=True).setup(TABLE)
    params = {"loc": torch.zeros(1, 3, 2), "scale": torch.arange(1.0, 4.0).reshape(1, 3, 1)}
    assert node.describe(params)["scale"].tolist() == [[1.0, 2.0, 3.0]]
    plain = m.Normal(2).setup(TABLE).describe({"loc": torch.zeros(1, 3, 2), "scale": torch.ones(1, 3, 2)})
    assert plain["scale"].shape == (1, 3, 2)
    assert node.at(params, {"a": torch.eye(3)[None]})[1].tolist() == [[[1.0], [2.0], [3.0]]]


# -- one row at a time ------------------------------------------------------------------------------------------------


def random_params(rng, shared, isotropic):
    return {
        "loc": rng.normal(size=(2, 3, 2)),
        "weight": rng.normal(size=(2, 1, 2)),
        "scale": rng.uniform(0.5, 2.0, (2, 1 if shared else 3, 1 if isotropic else 2)),
    }


@pytest.mark.parametrize(("shared", "isotropic"), list(itertools.product([False, True], repeat=2)))
def test_values_noise_and_densities_are_those_of_each_row(shared, isotropic):
    rng = np.random.default_rng(5)
    a, r, _ = table(rng, rows=9)
    node = m.Normal(2, shared_scale=shared, isotropic=isotropic).setup(FAMILY)
    own = random_params(rng, shared, isotropic)
    params = {name: torch.as_tensor(value) for name, value in own.items()}
    parents = {name: value[None] for name, value in as_parents(a, r).items()}
    value, noise, seen = rng.normal(size=(9, 2)), rng.normal(size=(9, 2)), rng.random((9, 2)) < 0.6
    tensors = [torch.as_tensor(one)[None] for one in (value, noise, seen)]
    whole, part = node.log_prob(params, tensors[0], parents), node.log_prob(params, tensors[0], parents, tensors[2])
    drawn, back = node.forward(params, parents, tensors[1]), node.abduct(params, tensors[0], parents, tensors[1])
    mean = node.mean(params, parents)
    for k, row in np.ndindex(2, 9):
        loc = own["loc"][k, a[row]] + r[row] * own["weight"][k, 0]
        scale = np.broadcast_to(own["scale"][k, 0 if shared else a[row]], 2)
        density = stats.norm(loc, scale).logpdf(value[row])
        assert whole[k, row].item() == pytest.approx(density.sum())
        assert part[k, row].item() == pytest.approx(density[seen[row]].sum())
        np.testing.assert_allclose(drawn[k, row], loc + scale * noise[row])
        np.testing.assert_allclose(back[k, row], (value[row] - loc) / scale)
        np.testing.assert_allclose(mean[k, row], loc)
    assert (node.noise.dim, node.noise.kind, node.scale_rows) == (2, "normal", 1 if shared else 3)
    assert {name: one.shape for name, one in node.parameters().items()} == {n: v.shape[1:] for n, v in own.items()}
    rows, coordinates = Axis(categories=(("a", 3),)), Axis(coordinates=(("x", 2),))
    assert node.axes()["scale"] == (Axis() if shared else rows, Axis() if isotropic else coordinates)
    sign = torch.tensor([-1.0, 1.0]).double()
    turned = node.turned_self(params, sign)
    torch.testing.assert_close(turned["loc"], params["loc"] * sign)
    torch.testing.assert_close(turned["weight"], params["weight"] * sign)
    torch.testing.assert_close(turned["scale"], params["scale"])
    assert m.LogNormal(2).setup(FAMILY).turned_self(params, sign) is None  # its values are positive
    assert node.is_linear
    network = m.Normal(2, network=(3,)).setup(FAMILY)
    assert (network.is_linear, network.scale_rows) == (False, 1)


def test_hidden_nodes_have_what_cannot_be_told_of_them_fixed():
    alone = m.Normal().setup(m.Family("x", hidden=True)).parameters()
    assert (alone["loc"].learned, alone["scale"].learned) == (False, False)
    assert (alone["loc"].constant("x", "loc").item(), alone["scale"].constant("x", "scale").item()) == (0.0, 1.0)
    below = m.Normal().setup(m.Family("x", (("a", Discrete(3)),), hidden=True))
    assert (below.parameters()["loc"].learned, below.parameters()["scale"].learned) == (True, False)
    assert below.predictor.is_levelled
    given = m.Normal(loc=2.0, scale=3.0).setup(m.Family("x", hidden=True)).parameters()
    assert (given["loc"].constant("x", "loc").item(), given["scale"].constant("x", "scale").item()) == (2.0, 3.0)
    seen = m.Normal().setup(m.Family("x")).parameters()
    assert seen["loc"].learned
    assert seen["scale"].learned


@pytest.mark.parametrize("isotropic", [False, True])
def test_scales_have_the_floor_of_their_columns(isotropic):
    rng = np.random.default_rng(6)
    # rounded to tenths and to hundredths
    value = torch.as_tensor(np.stack([np.round(rng.normal(size=80), 1), np.round(5 * rng.normal(size=80), 2)], 1))
    weight = torch.ones(80).double()
    node = m.Normal(2, isotropic=isotropic).setup(m.Family("x")).scaled_to(value, {}, weight)
    smallest = default_floor(value, weight, hidden_parents=False, rounding=True)
    torch.testing.assert_close(node.smallest, smallest)
    expected = smallest.min().reshape(1) if isotropic else smallest
    torch.testing.assert_close(node.smallest_scale, expected)
    unit = value.std(0, correction=0)
    unit = unit.square().mean().sqrt().reshape(1) if isotropic else unit
    support = node.parameters()["scale"].support
    torch.testing.assert_close(support.floor, expected / unit)
    torch.testing.assert_close(node.parameters()["scale"].unit, unit)
    # units travel with what is fitted
    units = node.buffers()
    torch.testing.assert_close(units["smallest"], smallest)
    again = m.Normal(2, isotropic=isotropic).setup(m.Family("x")).with_buffers(units)
    torch.testing.assert_close(again.smallest_scale, expected)
    bare = {name: one for name, one in units.items() if name != "smallest"}
    assert again.with_buffers(bare).smallest is None
    # a floor that is given is a share of the spread; zero is none; nor have scales one that are shared or hidden
    given = m.Normal(2, isotropic=isotropic, floor=0.2).setup(m.Family("x")).scaled_to(value, {}, weight)
    torch.testing.assert_close(given.smallest_scale, 0.2 * unit)
    assert given.smallest is None
    free = m.Normal(2, floor=0.0).setup(m.Family("x")).scaled_to(value, {}, weight)
    assert free.smallest_scale is None
    shared = m.Normal(2, scale=m.tie("s")).setup(m.Family("x")).scaled_to(value, {}, weight)
    assert shared.smallest_scale is None
    hidden = m.Normal(2, scale=m.start(1.0)).setup(m.Family("x", hidden=True)).scaled_to(value, {}, weight)
    assert hidden.smallest is None
    assert m.Normal(2).setup(m.Family("x")).smallest_scale is None
    with pytest.raises(ModelError, match=r"floor must be a number of at least 0; got -0\.1"):
        m.Normal(floor=-0.1)


@pytest.mark.parametrize("shared", [False, True])
def test_updates_are_weighted_regressions_row_by_row(shared):
    rng = np.random.default_rng(7)
    a, r, _ = table(rng, rows=40)
    a[a == 2] = 0  # a configuration without rows
    value, weight = rng.normal(size=(40, 2)), rng.uniform(0.2, 2.0, (2, 40))
    node = m.Normal(2, shared_scale=shared).setup(FAMILY)
    own = random_params(rng, shared, False)
    params = {name: torch.as_tensor(one) for name, one in own.items()}
    each = [
        regressed(node, {name: one[k : k + 1] for name, one in params.items()}, value, [r], weight[k], a, 3)
        for k in range(2)
    ]
    found = {name: torch.cat([one[name] for one in each]) for name in params}
    design = np.column_stack([a == 0, a == 1, r]).astype(float)
    for k, cell in np.ndindex(2, 2):
        old = own["scale"][k, 0 if shared else a, cell]
        root = np.sqrt(weight[k]) / old
        line = np.linalg.lstsq(root[:, None] * design, root * value[:, cell], rcond=None)[0]
        np.testing.assert_allclose(found["loc"][k, :2, cell], line[:2], rtol=1e-6, atol=1e-8)
        assert found["loc"][k, 2, cell].item() == pytest.approx(own["loc"][k, 2, cell])
        assert found["weight"][k, 0, cell].item() == pytest.approx(line[2], rel=1e-6, abs=1e-8)
        squares = (value[:, cell] - design @ line) ** 2
        if shared:
            expected = np.sqrt(np.average(squares, weights=weight[k]))
            assert found["scale"][k, 0, cell].item() == pytest.approx(expected, rel=1e-6)
            continue
        for state in range(2):
            expected = np.sqrt(np.average(squares[a == state], weights=weight[k, a == state]))
            assert found["scale"][k, state, cell].item() == pytest.approx(expected, rel=1e-6)
        assert found["scale"][k, 2, cell].item() == own["scale"][k, 2, cell]
    torch.testing.assert_close(params["loc"], torch.as_tensor(own["loc"]))  # the old ones are left alone


def test_updates_keep_the_floor_and_the_scale_of_a_hidden_node():
    value = torch.tensor([[1.0], [1.0], [2.0], [1.0]]).double()
    node = m.Normal().setup(m.Family("x")).scaled_to(value, {}, torch.ones(4).double())
    params = {"loc": torch.zeros(1, 1, 1).double(), "scale": torch.ones(1, 1, 1).double()}
    alike = torch.tensor([[1.0, 1.0, 0.0, 1.0]]).double()
    found = fitted_to_rows(node, params, value, {}, alike)
    assert found["loc"].item() == pytest.approx(1.0)
    assert node.smallest_scale.item() > 0
    assert found["scale"].item() == pytest.approx(node.smallest_scale.item())
    hidden = m.Normal().setup(m.Family("x", (("a", Discrete(2)),), hidden=True))
    assert hidden.has_closed_form
    own = {"loc": torch.zeros(1, 2, 1).double(), "scale": torch.ones(1, 1, 1).double()}
    parents = {"a": torch.eye(2).double()[torch.tensor([0, 1, 1, 0])]}
    moved = fitted_to_rows(hidden, own, value, parents, torch.ones(1, 4).double())
    assert moved["scale"].tolist() == [[[1.0]]]
    np.testing.assert_allclose(moved["loc"].flatten(), [1.0, 1.5])
