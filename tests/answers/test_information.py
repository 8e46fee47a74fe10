"""The observed information, against second derivatives and known covariances."""

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.answers.information import Information, observed_information, table_information
from otpdag.data import Schema, encode
from otpdag.errors import ModelError


def test_differences_of_gradients_are_second_derivatives():
    def loss(x):
        return (x[..., 0] ** 4 + x[..., 0] * x[..., 1] + torch.exp(x[..., 2]) * x[..., 1] ** 2).sum()

    def gradient(points):
        leaf = points.detach().clone().requires_grad_(True)
        return torch.autograd.grad(loss(leaf), leaf)[0]

    point = torch.tensor([[0.7, -1.2, 0.3]]).double()
    expected = torch.autograd.functional.hessian(loss, point[0])
    torch.testing.assert_close(observed_information(gradient, point).matrix, expected, rtol=1e-6, atol=1e-6)


def test_the_covariance_is_the_inverse_where_the_data_tell_something():
    root = torch.as_tensor(np.random.default_rng(0).normal(size=(4, 3)))
    whole = Information(root.T @ root)
    torch.testing.assert_close(whole.covariance(), torch.linalg.inv(root.T @ root))
    assert whole.flat.shape == (3, 0)
    assert whole.blur == 0.0


def test_directions_that_nothing_is_told_of_have_no_variance():
    flat = torch.tensor([[1.0], [1.0], [0.0]]).double() / 2**0.5
    known = Information(torch.diag(torch.tensor([2.0, 3.0, 4.0]).double())).without(flat)
    torch.testing.assert_close(known.flat.abs(), flat.abs(), atol=1e-6, rtol=0)
    torch.testing.assert_close(known.covariance() @ flat, torch.zeros(3, 1).double(), atol=1e-8, rtol=0)
    torch.testing.assert_close(known.covariance(), torch.linalg.pinv(known.matrix), atol=1e-8, rtol=0)


def test_a_likelihood_without_curvature_is_refused():
    with pytest.raises(ModelError, match="no finite second derivative"):
        observed_information(lambda points: points * torch.nan, torch.zeros(1, 2).double())
    assert observed_information(lambda points: points, torch.zeros(1, 0).double()).matrix.shape == (0, 0)


def test_rows_of_a_normal_column_tell_of_mean_and_scale_what_fisher_says():
    table = pd.DataFrame({"x": np.random.default_rng(1).normal(3.0, 2.0, 80)})
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    otp.fit(model, table)
    batch = encode(table, Schema.of(model.spaces, model.graph, table), hidden=[])
    found = table_information(model.fitted, batch).covariance()
    structure, spread = model.fitted.structure, table["x"].std(ddof=0)
    loc, scale = (list(structure.parameters()).index(structure.keys["x"][name]) for name in ("loc", "scale"))
    unit = float(structure.parameters()[structure.keys["x"]["loc"]].unit.flatten()[0])
    assert float(found[loc, loc]) * unit**2 == pytest.approx(spread**2 / 80, rel=1e-4)
    assert float(found[scale, scale]) == pytest.approx(1 / (2 * 80), rel=1e-2)  # of a logarithm
