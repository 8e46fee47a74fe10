"""A category that stays or moves, by its table of probabilities."""

import math

import torch

from otpdag import mechanisms as m
from otpdag.mechanisms import Family
from otpdag.mechanisms.base import fitted_to_rows
from otpdag.spaces import Discrete

GENERATOR = torch.Generator().manual_seed(0)
STAY = 0.7


def stay_or_move(size=3, **options):
    return m.StayOrMove(size, **options).setup(Family("z", (("before", Discrete(size)),)))


def one_hot(codes, size=3):
    return torch.eye(size, dtype=torch.float64)[torch.as_tensor(codes)]


def rows(many=400, size=3):
    return (one_hot(torch.randint(size, (many,), generator=GENERATOR), size) for _ in range(2))


def test_probabilities_are_those_of_the_definition():
    mechanism, params = stay_or_move(4), {"stay": torch.tensor([[STAY]]).double()}
    parent = one_hot([[0, 2]], 4)
    expected = torch.full((1, 2, 4), 0.1).double()
    expected[0, 0, 0] = expected[0, 1, 2] = STAY
    torch.testing.assert_close(mechanism.probabilities(params, {"before": parent}), expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(mechanism.mean(params, {"before": parent}), expected, rtol=1e-6, atol=1e-9)
    value = one_hot([[0, 3]], 4)
    found = mechanism.log_prob(params, value, {"before": parent})
    torch.testing.assert_close(found, torch.tensor([[math.log(STAY), math.log(0.1)]]).double(), rtol=1e-6, atol=1e-9)
    hidden = mechanism.log_prob(params, value, {"before": parent}, torch.tensor([[[True], [False]]]))
    assert hidden[0, 1].item() == 0.0
    never = mechanism.log_prob({"stay": torch.ones(1, 1).double()}, value, {"before": parent})
    torch.testing.assert_close(never, torch.tensor([[0.0, math.log(1e-12)]]).double())


def test_draws_cut_the_uniform_number_and_noise_is_found_again():
    mechanism, params = stay_or_move(), {"stay": torch.tensor([[STAY]]).double()}
    parent = one_hot([[1] * 6])
    noise = torch.tensor([[[0.01], [0.14], [0.16], [0.5], [0.84], [0.86]]]).double()
    value = mechanism.forward(params, {"before": parent}, noise)
    assert value.argmax(-1).tolist() == [[0, 0, 1, 1, 1, 2]]
    lower, upper = (mechanism.abduct(params, value, {"before": parent}, torch.full_like(noise, u)) for u in (0.0, 1.0))
    ends = torch.tensor([0.0, 0.15, 0.85, 1.0]).double()
    torch.testing.assert_close(lower[0, :, 0], ends[value.argmax(-1)[0]], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(upper[0, :, 0], ends[value.argmax(-1)[0] + 1], rtol=1e-6, atol=1e-7)


def test_starts_and_updates_are_weighted_shares_of_rows_without_a_change():
    mechanism = stay_or_move()
    value, parent = rows()
    weight = torch.rand(400, generator=GENERATOR).double()
    same = (value * parent).sum(-1)
    start = mechanism.start(value, {"before": parent}, weight)["stay"]
    expected = ((weight * same).sum() + 0.5) / (weight.sum() + 1)
    torch.testing.assert_close(start, expected.reshape(1))
    before = {"stay": torch.tensor([[0.4], [0.4]]).double()}
    both = torch.stack([weight, torch.zeros_like(weight)])
    found = fitted_to_rows(mechanism, before, value, {"before": parent}, both)["stay"]
    torch.testing.assert_close(found[0], ((weight * same).sum() / weight.sum()).reshape(1))
    assert found[1].item() == before["stay"][1].item()


def test_starts_keep_away_from_zero_and_one():
    mechanism, (value, _) = stay_or_move(), rows()
    ones = torch.ones(400).double()
    assert mechanism.start(value, {"before": value}, ones)["stay"].item() == 0.99
    assert mechanism.start(value, {"before": value.roll(1, -1)}, ones)["stay"].item() == 0.01


def test_only_a_free_probability_is_updated_and_only_common_labels_are_swapped():
    assert stay_or_move().has_closed_form
    assert not stay_or_move(stay=0.5).has_closed_form
    params = {"stay": torch.tensor([[0.5]]).double()}
    assert stay_or_move().relabelled(params, {"z", "before"}, [1, 0, 2]) == params
    assert stay_or_move().relabelled(params, {"z"}, [1, 0, 2]) is None
    assert stay_or_move().describe(params)["stay"].tolist() == [0.5]
