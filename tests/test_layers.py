"""Networks on a replica axis, against torch.nn, and relaxed draws, against their limits."""

import numpy as np
import pytest
import torch
from torch import nn

from otpdag.layers import apply_mlp, gumbel_softmax, init_mlp
from otpdag.numerics import apply_linear, expand_to, nearest, one_hot, side_by_side, sums_by_row

GENERATOR = torch.Generator().manual_seed(0)


def test_each_replica_is_a_network_of_torch():
    params = init_mlp([3, 8, 2], replicas=2, generator=GENERATOR)
    inputs = torch.randn(2, 5, 3, generator=GENERATOR, dtype=torch.float64)
    found = apply_mlp(params, inputs)
    for replica in range(2):
        network = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 2)).double()
        for layer, place in ((0, 0), (1, 2)):
            network[place].weight.data = params[f"{layer}.weight"][replica].T
            network[place].bias.data = params[f"{layer}.bias"][replica]
        torch.testing.assert_close(found[replica], network(inputs[replica]))


def test_more_axes_are_carried_along():
    weight = torch.randn(2, 3, 4, generator=GENERATOR)
    inputs = torch.randn(2, 5, 6, 3, generator=GENERATOR)
    torch.testing.assert_close(apply_linear(inputs, weight), torch.einsum("rabp,rpd->rabd", inputs, weight))
    torch.testing.assert_close(
        apply_linear(inputs[:, 0, 0], weight), torch.einsum("rp,rpd->rd", inputs[:, 0, 0], weight)
    )
    assert expand_to(weight, 5, event_dims=2).shape == (2, 1, 1, 3, 4)


def test_categories_of_many_levels_are_looked_up_and_changes_are_seen():
    rng = torch.Generator().manual_seed(3)
    weight = torch.randn(1, 300, 2, generator=rng).double()
    inputs = torch.eye(300).double()[torch.randint(300, (1, 40), generator=rng)]
    for _ in range(2):  # what is known of a tensor serves again
        torch.testing.assert_close(apply_linear(inputs, weight), inputs @ weight)
    for axis in (0, 1):  # what is expanded is alike
        many = inputs.unsqueeze(axis).expand(*(-1,) * axis, 3, *(-1,) * (3 - axis))
        torch.testing.assert_close(apply_linear(many, weight), torch.einsum("...p,pd->...d", many, weight[0]))
    inputs[0, 0] = inputs[0, 0].roll(1)
    torch.testing.assert_close(apply_linear(inputs, weight), inputs @ weight)
    two_and_none = inputs.clone()
    two_and_none[0, 0], two_and_none[0, 1] = inputs[0, 0] + inputs[0, 0].roll(2), 0.0
    inputs[0, 0] = 0.5  # no longer one category
    for one in (inputs, two_and_none, 2 * inputs):
        torch.testing.assert_close(apply_linear(one, weight), one @ weight)


@pytest.mark.parametrize("size", [4, 300])
def test_sums_by_row_are_those_of_a_loop(size):
    rng = np.random.default_rng(size)
    codes, values = rng.integers(0, size, 40), rng.normal(size=(40, 2))
    inputs = one_hot(torch.from_numpy(codes), size)
    loop = np.zeros((size, 2))
    np.add.at(loop, codes, values)
    np.testing.assert_allclose(sums_by_row(inputs, torch.from_numpy(values)), loop)
    soft = torch.softmax(torch.from_numpy(rng.normal(size=(40, size))), -1)
    np.testing.assert_allclose(sums_by_row(soft, torch.from_numpy(values)), soft.numpy().T @ values)


@pytest.mark.parametrize("size", [3, 30_000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8])
def test_categories_are_vectors_with_a_one(size, dtype):
    codes = torch.randint(-1, size, (2, 20), generator=torch.Generator().manual_seed(size))
    expected = torch.arange(size) == codes.unsqueeze(-1)
    assert torch.equal(one_hot(codes, size, dtype), expected.to(dtype))


def test_columns_are_broadcast_before_they_are_joined():
    one, other = torch.arange(2.0).reshape(2, 1, 1), torch.arange(3.0).reshape(1, 3, 1)
    joined = side_by_side([one, other])
    assert joined.shape == (2, 3, 2)
    assert joined[1, 2].tolist() == [1.0, 2.0]


def test_relaxed_draws_are_gumbel_maxima_as_the_temperature_falls():
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(20_000, 3)
    uniform = torch.rand(20_000, 3, generator=GENERATOR)
    cold = gumbel_softmax(logits, uniform, 1e-3)
    assert cold.mean(0).tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.015)
    assert nearest(-cold).tolist() == cold.argmax(-1).tolist()
