"""Supports of parameters: there and back, at the ends of their range, and what they refuse."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.errors import ModelError
from otpdag.mechanisms.parameters import (
    ABOVE_ONE,
    POSITIVE,
    REAL,
    SIMPLEX,
    UNIT,
    Between,
    Fixed,
    Floored,
    Parameter,
    Start,
    Tied,
)


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("support", "values"),
    [
        (REAL, numbers(-3.0, 0.0, 1e20)),
        (POSITIVE, numbers(1e-20, 0.5, 1e20)),
        (ABOVE_ONE, numbers(1.001, 2.0, 1e9)),
        (UNIT, numbers(1e-6, 0.3, 1 - 1e-6)),
        (Floored(0.5), numbers(0.6, 1.0, 1e6)),
        (Between(-2.0, None), numbers(-1.999, 0.0, 1e9)),
        (Between(None, -2.0), numbers(-2.001, -5.0, -1e9)),
        (Between(None, 0.0), numbers(-1e-3, -1e9)),
        (Between(-1.0, 3.0), numbers(-0.999, 0.0, 2.9999)),
        (SIMPLEX, torch.stack([numbers(0.2, 0.3, 0.5), numbers(1e-6, 1e-3, 1 - 1e-6 - 1e-3)])),
    ],
)
def test_there_and_back(support, values):
    torch.testing.assert_close(support.natural(support.raw(values)), values, rtol=1e-9, atol=0)
    assert support.check(values)
    assert not support.check(values * math.nan)


def test_supports_are_their_formulas():
    raw = numbers(-1.0, 0.5, 2.0)
    torch.testing.assert_close(POSITIVE.natural(raw), raw.exp())
    torch.testing.assert_close(ABOVE_ONE.natural(raw), 1 + raw.exp())
    torch.testing.assert_close(Between(None, -3.0).natural(raw), -3 - raw.exp())
    torch.testing.assert_close(Between(-3.0, 5.0).natural(raw), -3 + 8 / (1 + (-raw).exp()))
    torch.testing.assert_close(UNIT.natural(raw), 1 / (1 + (-raw).exp()))
    torch.testing.assert_close(Floored(3.0).natural(raw), (raw.exp() ** 2 + 9).sqrt())
    torch.testing.assert_close(SIMPLEX.natural(raw), raw.exp() / raw.exp().sum())
    assert SIMPLEX.raw(numbers(0.1, 0.2, 0.7)).sum().item() == pytest.approx(0, abs=1e-12)


def test_the_ends_of_a_range_stay_finite():
    """Exponents are cut at 60 either way, probabilities 1e-9 from zero and one."""
    far = numbers(-1e4, 1e4)
    torch.testing.assert_close(POSITIVE.natural(far), numbers(-60.0, 60.0).exp())
    torch.testing.assert_close(POSITIVE.raw(numbers(0.0, 1e-30)), numbers(1e-26, 1e-26).log())
    torch.testing.assert_close(UNIT.raw(numbers(0.0, 1.0)), numbers(-1.0, 1.0) * math.log((1 - 1e-9) / 1e-9))
    torch.testing.assert_close(SIMPLEX.raw(numbers(0.0, 1.0)), numbers(0.5, -0.5) * math.log(1e-12))
    at_floor = Floored(2.0).natural(Floored(2.0).raw(numbers(2.0)))
    assert 2.0 < at_floor.item() < 2.0 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("support", "good", "bad"),
    [
        (POSITIVE, [1e-9], [0.0, -1.0]),
        (Floored(1.0), [1e-9], [0.0, -1.0]),
        (ABOVE_ONE, [1.0001], [1.0, 0.5]),
        (UNIT, [0.0, 1.0], [-1e-3, 1.001]),
    ],
)
def test_what_lies_outside_is_refused(support, good, bad):
    assert all(support.check(numbers(one)) for one in good)
    assert not any(support.check(numbers(0.5 + (support is ABOVE_ONE), one)) for one in bad)


def test_probabilities_sum_to_one_and_are_not_negative():
    assert SIMPLEX.check(numbers(0.25, 0.75 + 5e-7))
    assert not SIMPLEX.check(numbers(0.25, 0.75 + 5e-6))
    assert not SIMPLEX.check(numbers(-0.25, 1.25))


def test_units_and_origin_scale_what_is_not_tied():
    unit, origin, raw = numbers(2.0, 4.0), numbers(10.0, 20.0), numbers(1.0, -1.0).unsqueeze(0)
    free = Parameter((2,), REAL, origin=origin, unit=unit)
    assert free.natural(raw).tolist() == [[12.0, 16.0]]
    torch.testing.assert_close(free.raw(free.natural(raw)), raw)
    assert [one.tolist() for one in free.origin_and_unit] == [[10.0, 20.0], [2.0, 4.0]]
    tied = Parameter((2,), REAL, Tied("a"), origin=origin, unit=unit)
    assert torch.equal(tied.natural(raw), raw)
    assert torch.equal(tied.raw(raw), raw)
    assert [one.item() for one in tied.origin_and_unit] == [0.0, 1.0]
    assert [one.item() for one in Parameter((2,)).origin_and_unit] == [0.0, 1.0]
    above = Parameter((2,), POSITIVE, unit=unit)
    torch.testing.assert_close(above.natural(raw), unit * raw.exp())
    torch.testing.assert_close(above.raw(above.natural(raw)), raw)


def test_some_entries_may_be_given():
    part = Parameter((3,), REAL, Fixed([1.5, math.nan, math.nan]), in_part=True)
    assert part.learned
    assert part.is_given_in_part
    assert part.fixed_entries().tolist() == [True, False, False]
    assert part.natural(numbers(7.0, 8.0, 9.0).unsqueeze(0)).tolist() == [[1.5, 8.0, 9.0]]
    whole = Parameter((3,), REAL, Fixed([1.0, 2.0, 3.0]), in_part=True)
    assert not whole.learned
    assert not whole.is_given_in_part
    assert whole.fixed_entries().all()
    free = Parameter((3,), in_part=True)
    assert (free.learned, free.is_given_in_part, free.has_value) == (True, False, False)
    assert not free.fixed_entries().any()
    assert torch.equal(free.with_fixed(numbers(1.0, 2.0, 3.0)), numbers(1.0, 2.0, 3.0))
    unknown = Parameter((3,), REAL, Fixed([math.nan] * 3), in_part=True)
    assert not unknown.is_given_in_part
    assert Parameter((3,), REAL, Start(2.0)).has_value
    assert Parameter((3,), REAL, Start(2.0)).learned


def test_a_given_value_is_spread_over_the_shape():
    assert Parameter((2, 3), REAL, Fixed(4.0)).constant("n", "p").tolist() == [[4.0] * 3] * 2
    assert Parameter((2, 2), REAL, Fixed([1.0, 2.0, 3.0, 4.0])).constant("n", "p").tolist() == [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(ModelError, match=r"parameter 'p' of node 'n' must have a shape that broadcasts to \(2, 3\)"):
        Parameter((2, 3), REAL, Fixed([1.0, 2.0])).constant("n", "p")
    with pytest.raises(ModelError, match="parameter 'p' of node 'n' must be a number above zero"):
        Parameter((1,), POSITIVE, Fixed(-1.0)).constant("n", "p")
    with pytest.raises(TypeError, match="has no given value"):
        Parameter((1,)).constant("n", "p")
    large = (1 << 22) + 1
    with pytest.raises(ModelError, match="a given value is spread over at most"):
        Parameter((large,), REAL, Fixed(1.0)).constant("n", "p")
    assert Parameter((1 << 22,), REAL, Fixed(1.0)).constant("n", "p").numel() == 1 << 22
    assert Parameter((large,), REAL, Fixed(np.ones(large))).constant("n", "p").numel() == large


@pytest.mark.parametrize("floor", [0.1, 10.0])
def test_what_lies_at_a_floor_comes_back_a_millionth_of_itself_above_it(floor):
    raw = Floored(floor).raw(torch.tensor([floor, 2 * floor], dtype=torch.float64))
    expected = [math.log(1e-6 * floor), math.log(math.sqrt(3) * floor)]
    np.testing.assert_allclose(raw, expected, rtol=1e-9)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (2.0, None), (None, 2.0), (None, -2.0), (0.0, None)])
def test_bounded_parameters_start_where_they_are_or_well_inside(low, high):
    value = torch.linspace(-9.0, 9.0, 181, dtype=torch.float64)
    support = Between(low, high)
    found = support.inside(value)
    reach = 4.0 if None not in (low, high) else 1.0
    ends = [end for end in (low, high) if end is not None]
    deep = support.holds(value) & torch.stack([(value - end).abs() > 0.01 * reach for end in ends]).all(0)
    assert support.holds(found).all()
    torch.testing.assert_close(found[deep], value[deep])
    # what lies beyond a bound begins near it, further inside the further it lay beyond, so that slopes do not vanish
    for end, beyond in (
        (low, value < (-math.inf if low is None else low)),
        (high, value > (math.inf if high is None else high)),
    ):
        if end is not None and None in (low, high):
            torch.testing.assert_close((found - end).abs()[beyond], 0.1 * (value - end).abs()[beyond] + 1e-3)
        elif end is not None:
            torch.testing.assert_close((found - end).abs()[beyond], torch.full_like(found[beyond], 0.01 * reach))


@pytest.mark.parametrize(
    ("low", "high", "name"), [(1.0, None, "above 1"), (None, 2.5, "below 2.5"), (0, 1, "above 0 and below 1")]
)
def test_bounds_are_named_and_their_ends_are_outside(low, high, name):
    support = Between(low, high)
    assert support.name == f"a number {name}"
    for end, inside in ((low, 1e-6), (high, -1e-6)):
        if end is not None:
            assert support.holds(numbers(end, end + inside, end - inside)).tolist() == [False, True, False]


def test_arrays_that_are_read_backwards_are_settings_like_others():
    """NumPy turns an array by a negative stride, which torch does not know."""
    turned, graph = np.array([2.0, 1.0])[::-1], otp.Graph([("x", "y"), ("z", "y")])
    model = otp.Model(graph, {"x": m.Normal(), "z": m.Normal(), "y": m.Normal(weight=turned)})
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(20, 3)), columns=["x", "z", "y"])
    np.testing.assert_array_equal(np.ravel(otp.fit(model, table).model.params()["y"]["weight"]), [1.0, 2.0])
    free = otp.Model(graph, {node: m.Normal() for node in graph.nodes})
    normal = {"loc": 0.0, "scale": 1.0}
    free.set_params({"x": normal, "z": normal, "y": {**normal, "weight": turned}})
    np.testing.assert_array_equal(np.ravel(free.params()["y"]["weight"]), [1.0, 2.0])
