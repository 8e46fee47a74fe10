"""The amortised map: supports, densities, units, and starts."""

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward.amortized import AmortizedMap, RowCode
from otpdag.data import encode
from otpdag.spaces import Count, Positive, Real, Simplex, Unit

RNG = np.random.default_rng(11)


@pytest.mark.parametrize("space", [Real(3), Positive(2), Unit(2), Simplex(4), Count(1)], ids=repr)
def test_constrain_is_inverted_and_its_log_determinant_is_autograds(space):
    free = torch.randn(7, space.free_width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value, log_det = space.constrain(free)
    if not isinstance(space, Count):  # counts below 0.3 are all taken for zero
        torch.testing.assert_close(space.unconstrain(value), free)
    for row, expected in zip(free, log_det.sum(-1), strict=True):
        # densities on the simplex are those of its first coordinates
        jacobian = torch.autograd.functional.jacobian(lambda f: space.constrain(f)[0][: space.free_width], row)
        torch.testing.assert_close(torch.linalg.slogdet(jacobian)[1], expected)
    assert (value > 0).all() or space.is_unbounded


def joint_map(structure, batch, targets, **options):
    code = RowCode.of(structure, batch, structure.graph.observed)
    return AmortizedMap(structure, code, targets, **options)


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


@pytest.mark.parametrize(("unit", "shift"), [(1.0, 0.0), (1e4, 1e6)])
def test_a_start_regresses_on_what_a_row_shows_whatever_its_units(unit, shift):
    """x -> y with x missing at times: the head must not have copied x from its own cell."""
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    x = RNG.normal(size=(2000, 1))
    y = 0.8 * x + 0.6 * RNG.normal(size=(2000, 1))
    table = np.concatenate([unit * x + shift, y], 1)
    table[:50, 0] = np.nan
    batch = encode(table, otp.data.Schema.of(model.spaces, model.graph), hidden=())
    backward = joint_map(model.structure, batch, ("x",), hidden=())
    phi = backward.init(1, torch.Generator().manual_seed(0))
    completed = {"x": torch.tensor(unit * x + shift), "y": torch.tensor(y)}
    backward.start_from(phi, 0, batch, completed)
    hidden = {"x": torch.zeros(1, 2000, 1).bool(), "y": torch.ones(1, 2000, 1).bool()}
    row = backward.code(batch.values, hidden)
    draw = backward.draw(phi, "x", row, {}, torch.zeros(1, 2000, 1).double())
    np.testing.assert_allclose((draw.value[0] - shift) / unit, 0.8 * y, atol=0.1)
    spread = torch.exp(phi["phi.joint.x.bias"][0, 1]) * backward.code.scale["x"]
    assert spread.item() == pytest.approx(0.6 * unit, rel=0.1)
