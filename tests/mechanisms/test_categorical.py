"""Categories by tables and logits, entry by entry."""

import itertools

import numpy as np
import pytest
import torch

from otpdag import mechanisms as m
from otpdag.mechanisms import Family
from otpdag.mechanisms.base import fitted_to_rows, has_closed_form
from otpdag.spaces import Discrete, Real

GENERATOR = torch.Generator().manual_seed(0)
SIZES = {"none": (), "one": (2,), "two": (2, 3)}


def table(parents, size=4, **options):
    family = Family("k", tuple((f"p{at}", Discrete(width)) for at, width in enumerate(SIZES[parents])))
    return m.Categorical(size, **options).setup(family)


def draw(parents, rows=30, size=4, replicas=2):
    codes = {f"p{at}": torch.randint(width, (rows,), generator=GENERATOR) for at, width in enumerate(SIZES[parents])}
    hot = {name: torch.eye(SIZES[parents][at]).double()[code] for at, (name, code) in enumerate(codes.items())}
    many = int(np.prod(SIZES[parents]))
    probs = torch.softmax(torch.randn(replicas, many, size, generator=GENERATOR).double(), -1)
    value = torch.randint(size, (rows,), generator=GENERATOR)
    config = torch.zeros(rows, dtype=torch.long)
    for at, code in enumerate(codes.values()):
        config = config * SIZES[parents][at] + code
    return probs, hot, value, config


@pytest.mark.parametrize("parents", SIZES)
def test_log_probabilities_draws_and_noise_are_those_of_the_row_of_the_table(parents):
    mechanism = table(parents)
    probs, hot, value, config = draw(parents)
    given = {name: one.expand(2, -1, -1) for name, one in hot.items()}
    chosen = torch.eye(4).double()[value].expand(2, -1, -1)
    own = probs[:, config]  # (R, N, K)
    at_value = own[:, torch.arange(30), value]
    torch.testing.assert_close(mechanism.log_prob({"probs": probs}, chosen, given), at_value.log())
    seen = torch.rand(30, 1, generator=GENERATOR) < 0.5
    masked = mechanism.log_prob({"probs": probs}, chosen, given, seen.expand(2, -1, -1))
    torch.testing.assert_close(masked, torch.where(seen[:, 0], at_value.log(), 0.0))
    if parents != "none":
        torch.testing.assert_close(mechanism.mean({"probs": probs}, given), own)
    uniform = torch.rand(2, 30, 1, generator=GENERATOR).double()
    drawn = mechanism.forward({"probs": probs}, given, uniform).argmax(-1)
    ends = torch.cat([torch.zeros(2, 30, 1).double(), own.cumsum(-1)], -1)
    assert (uniform[..., 0] > ends.gather(-1, drawn.unsqueeze(-1))[..., 0]).all()
    assert (uniform[..., 0] <= ends.gather(-1, drawn.unsqueeze(-1) + 1)[..., 0]).all()
    noise = mechanism.abduct({"probs": probs}, chosen, given, uniform)[..., 0]
    below = ends[:, torch.arange(30), value]
    torch.testing.assert_close(noise, below + uniform[..., 0] * at_value)


@pytest.mark.parametrize("parents", SIZES)
def test_starts_and_updates_are_weighted_frequencies(parents):
    mechanism = table(parents)
    probs, hot, value, config = draw(parents)
    weight = torch.rand(30, generator=GENERATOR).double()
    chosen = torch.eye(4).double()[value]
    counts = torch.zeros(probs.shape[1], 4).double()
    for row in range(30):
        counts[config[row], value[row]] += weight[row]
    overall = counts.sum(0) + 1
    smoothed = counts + overall / overall.sum()
    found = mechanism.start(chosen, hot, weight)["probs"]
    torch.testing.assert_close(found, smoothed / smoothed.sum(-1, keepdim=True))
    slowed = counts + 0.1 * probs
    expected = slowed / slowed.sum(-1, keepdim=True)
    updated = fitted_to_rows(mechanism, {"probs": probs}, chosen, hot, weight.expand(2, -1))
    torch.testing.assert_close(updated["probs"], expected)
    torch.testing.assert_close(mechanism.fitted({"probs": probs}, counts)["probs"], expected)
    torch.testing.assert_close(mechanism.coefficients({"probs": probs}), probs.log())
    assert has_closed_form(mechanism)
    given_table = table(parents, probs=np.full((*SIZES[parents], 4), 0.25))
    assert not has_closed_form(given_table)
    assert given_table.fitted({"probs": probs}, counts)["probs"] is probs


def test_impossible_categories_have_a_finite_logarithm():
    probs = torch.tensor([[[0.0, 1.0]]]).double()
    mechanism = table("none", size=2)
    found = mechanism.log_prob({"probs": probs}, torch.eye(2).double().unsqueeze(0), {})
    torch.testing.assert_close(found, torch.tensor([[np.log(1e-12), 0.0]]).double())


def test_a_logit_is_told_relative_to_the_first_category():
    mechanism = m.Categorical(3).setup(Family("k", (("p0", Discrete(2)), ("x", Real(1)))))
    assert not has_closed_form(mechanism)
    logits, weight = (torch.randn(1, rows, 3, generator=GENERATOR).double() for rows in (2, 1))
    told = mechanism.describe({"logits": logits, "weight": weight})
    torch.testing.assert_close(told["logits"].reshape(1, 2, 3), logits - logits[..., :1])
    torch.testing.assert_close(told["weight"], weight - weight[..., :1])
    slope = mechanism.slopes({"logits": logits, "weight": weight}, "x")
    torch.testing.assert_close(slope.flatten(), (weight[..., -1] - weight[..., 0]).flatten())
    x = torch.randn(1, 6, 1, generator=GENERATOR).double()
    for code, category in itertools.product(range(2), range(3)):
        parents = {"p0": torch.eye(2).double()[code].expand(1, 6, 2), "x": x}
        value = torch.eye(3).double()[category].expand(1, 6, 3)
        exact = torch.log_softmax(logits[:, code] + x @ weight, -1)[..., category]
        torch.testing.assert_close(mechanism.log_prob({"logits": logits, "weight": weight}, value, parents), exact)
