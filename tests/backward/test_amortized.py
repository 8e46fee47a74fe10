"""The amortised map: supports, densities, units, and its use as a proposal."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward.amortized import AmortizedMap, RowCode, constrain, free_width, unconstrain
from otpdag.backward.gibbs import GibbsOptions, evaluate, group_rows
from otpdag.data import encode
from otpdag.spaces import Count, Positive, Real, Simplex, Unit

RNG = np.random.default_rng(11)


@pytest.mark.parametrize("space", [Real(3), Positive(2), Unit(2), Simplex(4), Count(1)], ids=repr)
def test_constrain_is_inverted_and_its_log_determinant_is_autograds(space):
    free = torch.randn(7, free_width(space), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value, log_det = constrain(space, free)
    if space.support != "count":  # counts below 0.3 are all taken for zero
        torch.testing.assert_close(unconstrain(space, value), free)
    for row, expected in zip(free, log_det.sum(-1), strict=True):
        # densities on the simplex are those of its first coordinates
        jacobian = torch.autograd.functional.jacobian(lambda f: constrain(space, f)[0][: free_width(space)], row)
        torch.testing.assert_close(torch.linalg.slogdet(jacobian)[1], expected)
    assert (value > 0).all() or space.support == "real"


def joint_map(structure, batch, targets, **options):
    code = RowCode.of(structure, batch, structure.graph.observed)
    return AmortizedMap(structure, code, targets, **options)


def two_factor_model(scale=1.0, shift=0.0):
    weights = np.array([[1.0, 0.3], [0.5, -0.6], [-0.4, 0.9], [0.2, 0.7]]) * scale
    names = [f"x{i}" for i in range(4)]
    graph = otp.Graph([(z, name) for name in names for z in ("u", "v")], hidden=["u", "v"])
    model = otp.Model(graph, {"u": m.Normal(), "v": m.Normal(), **{name: m.Normal() for name in names}})
    model.set_params({n: {"loc": shift, "weight": weights[i], "scale": 0.7 * scale} for i, n in enumerate(names)})
    return model, np.full(4, shift), weights @ weights.T + (0.7 * scale) ** 2 * np.eye(4)


def started(model, batch, targets):
    """A map whose linear part is the regression of model draws on their rows."""
    sample = model.sample(4000, seed=3)
    rows = encode(sample[list(model.graph.observed)], model._known_schema(), hidden=model.graph.hidden)
    completed = {n: torch.tensor(sample[n].to_numpy(dtype=float)).reshape(-1, 1) for n in model.graph.nodes}
    backward = joint_map(model.structure, batch, targets)
    phi = backward.init(1, torch.Generator().manual_seed(0))
    backward.start_from(phi, 0, rows, completed)
    return backward, phi


def likelihood_with(model, batch, backward, phi, **options):
    groups = group_rows(
        model.structure,
        batch,
        generator=torch.Generator().manual_seed(0),
        options=GibbsOptions(**options),
        proposal=backward,
    )
    found = np.zeros(batch.rows)
    for group in groups:
        result = evaluate(model.structure, model.fitted.naturals, group, phi)
        total = torch.logsumexp(result.log_prior + result.log_likelihood, -1)
        found[group.rows] = total.expand(1, len(group.rows))[0]
    return found


def test_a_started_map_proposes_two_hidden_numbers_well():
    model, mean, covariance = two_factor_model()
    x = RNG.multivariate_normal(mean, covariance, size=80)
    batch = encode(x, model._known_schema(), hidden=model.graph.hidden)
    found = likelihood_with(model, batch, *started(model, batch, ("u", "v")), draws=96)
    exact = stats.multivariate_normal(mean, covariance).logpdf(x)
    np.testing.assert_allclose(found, exact, atol=0.15)
    assert abs((found - exact).mean()) < 0.02


def chain_model(scale, shift):
    """x1 -> x2 -> x3, every column in units of its own."""
    graph = otp.Graph([("x1", "x2"), ("x2", "x3")])
    model = otp.Model(graph, {n: m.Normal() for n in ("x1", "x2", "x3")})
    model.set_params(
        {
            "x1": {"loc": shift, "scale": 2.0 * scale},
            "x2": {"loc": shift - 0.8 * shift, "weight": 0.8, "scale": 1.5 * scale},
            "x3": {"loc": shift - 0.5 * shift, "weight": 0.5, "scale": scale},
        }
    )
    b = np.array([[0, 0, 0], [0.8, 0, 0], [0, 0.5, 0]])
    inverse = np.linalg.inv(np.eye(3) - b)
    return model, np.full(3, shift), scale**2 * inverse @ np.diag([4.0, 2.25, 1.0]) @ inverse.T


def seen_density(x, mean, covariance):
    found = np.zeros(len(x))
    for i, row in enumerate(x):
        seen = ~np.isnan(row)
        if seen.any():
            found[i] = stats.multivariate_normal(mean[seen], covariance[np.ix_(seen, seen)]).logpdf(row[seen])
    return found


@pytest.mark.parametrize("patterns", [12, 1])
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e4, 1e6)])
def test_missing_columns_are_proposed_in_their_own_units(scale, shift, patterns):
    model, mean, covariance = chain_model(scale, shift)
    x = RNG.multivariate_normal(mean, covariance, size=120)
    x[RNG.random(x.shape) < 0.35] = np.nan
    table = pd.DataFrame(x, columns=["x1", "x2", "x3"])
    batch = encode(table, model._known_schema(), hidden=())
    backward, phi = started(model, batch, ("x1", "x2"))
    found = likelihood_with(model, batch, backward, phi, draws=256, patterns=patterns)
    error = found - seen_density(x, mean, covariance)
    assert abs(error.mean()) < 0.05
    assert np.abs(error).max() < 1.0


def test_partly_seen_vectors_are_proposed_cell_by_cell():
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(2), "y": m.Normal()})
    model.set_params(
        {"x": {"loc": [1.0, -1.0], "scale": [1.0, 2.0]}, "y": {"loc": 0.0, "weight": [0.5, 0.7], "scale": 1.0}}
    )
    b = np.array([[0, 0, 0], [0, 0, 0], [0.5, 0.7, 0]])
    inverse = np.linalg.inv(np.eye(3) - b)
    mean, covariance = inverse @ [1.0, -1.0, 0.0], inverse @ np.diag([1.0, 4.0, 1.0]) @ inverse.T
    x = RNG.multivariate_normal(mean, covariance, size=60)
    x[:20, 0] = np.nan
    x[10:40, 1] = np.nan
    batch = encode(pd.DataFrame(x, columns=["x.0", "x.1", "y"]), model._known_schema(), hidden=())
    backward = joint_map(model.structure, batch, ("x",))
    phi = backward.init(1, torch.Generator().manual_seed(0))
    phi["phi.joint.x.bias"][:, 2:] = 0.3  # wider than the posterior
    found = likelihood_with(model, batch, backward, phi, draws=2048)
    np.testing.assert_allclose(found, seen_density(x, mean, covariance), atol=0.1)


def test_a_draws_log_density_is_that_of_its_heads():
    """A positive node: the head is log-normal."""
    model = otp.Model(otp.Graph([("g", "x")], hidden=["g"]), {"g": m.Gamma(shape=2.0), "x": m.Normal()})
    batch = encode(RNG.normal(size=(9, 1)), otp.data.Schema.of(model.spaces, model.graph), hidden=["g"])
    backward = joint_map(model.structure, batch, ("g",), hidden=())
    phi = backward.init(2, torch.Generator().manual_seed(0))
    phi["phi.joint.g.bias"] = torch.tensor([[0.3, -0.5], [1.0, 0.2]], dtype=torch.float64)
    noise = torch.randn(2, 9, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    draw = backward.draw(phi, "g", backward.code(batch.values, batch.mask), {}, noise)
    loc, scale = phi["phi.joint.g.bias"][:, 0], phi["phi.joint.g.bias"][:, 1].exp()
    peer = torch.distributions.LogNormal(loc[:, None], scale[:, None])
    torch.testing.assert_close(draw.log_prob, peer.log_prob(draw.value[..., 0]))
    torch.testing.assert_close(draw.log_prob_of(torch.zeros(1, 9, 1).bool()), torch.zeros(2, 9).double())


def test_row_codes_are_standardised_and_blind_to_missing_cells():
    model = otp.Model(otp.Graph([("k", "x"), ("k", "n")]), {"k": m.Categorical(3), "x": m.Normal(2), "n": m.Poisson()})
    table = {
        "k": np.array([0, 1, 2, np.nan, 1, 0]),
        "x": 1e6 + 1e4 * RNG.normal(size=(6, 2)),
        "n": np.array([1, 4, 9, 16, np.nan, 0.0]),
    }
    table["x"][:3, 0] = np.nan
    table["x"][3:, 1] = np.nan  # no row shows the whole vector
    batch = encode(table, otp.data.Schema.of(model.spaces, model.graph), hidden=())
    code = RowCode.of(model.structure, batch, model.graph.observed)
    found = code(batch.values, batch.mask)[0]
    assert found.shape == (6, 3 + 1 + 2 + 2 + 1 + 1)
    x = found[:, 4:6]
    assert (x[:3, 0] == 0).all()
    assert (x[3:, 1] == 0).all()
    np.testing.assert_allclose(x[3:, 0].std(correction=0), 1.0)
    assert abs(float(x[3:, 0].mean())) < 1e-6
    assert found[4, 8] == 0  # a missing count
    np.testing.assert_allclose(found[:, 9], [1, 1, 1, 1, 0, 1])
