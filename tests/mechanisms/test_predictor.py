"""The linear predictor against one row at a time: tables, slopes, networks, units, starts and what is turned."""

from math import prod

import numpy as np
import pytest
import torch

from otpdag import mechanisms as m
from otpdag.errors import ModelError
from otpdag.mechanisms.base import configurations, numeric
from otpdag.mechanisms.parameters import Axis, Tied, as_setting
from otpdag.mechanisms.predictor import Predictor, Units, centre_and_spread, weighted_regression
from otpdag.spaces import Discrete, Real

FAMILY = m.Family("x", (("a", Discrete(2)), ("r", Real(1)), ("b", Discrete(3)), ("s", Real(2))))
ROWS, DIM = 30, 2


def table(seed=0, rows=ROWS):
    """Categories, numbers and a target of two columns."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 2, rows), rng.integers(0, 3, rows)
    r, s = rng.normal(2.0, 3.0, (rows, 1)), rng.normal(-1.0, 0.5, (rows, 2))
    parents = {"a": np.eye(2)[a], "b": np.eye(3)[b], "r": r, "s": s}
    target = rng.normal(size=(rows, DIM)) + a[:, None] - b[:, None] + r @ [[0.5, -1.0]] + s @ [[1.0, 0.3], [0.2, -2.0]]
    tensors = {name: torch.as_tensor(value) for name, value in parents.items()}
    return a, b, np.concatenate([r, s], 1), tensors, target, rng.uniform(0.5, 2.0, rows)


def with_replica(parents):
    return {name: value.unsqueeze(0) for name, value in parents.items()}


def test_a_prediction_is_the_row_of_the_table_and_the_slopes_times_the_numbers():
    a, b, numbers, parents, _, _ = table()
    rng = np.random.default_rng(1)
    intercepts, slopes = rng.normal(size=(2, 6, DIM)), rng.normal(size=(2, 3, DIM))
    params = {"loc": torch.as_tensor(intercepts), "weight": torch.as_tensor(slopes)}
    predictor = Predictor(FAMILY, DIM, "loc")
    found = predictor(params, with_replica(parents))
    expected = np.stack([intercepts[k, a * 3 + b] + numbers @ slopes[k] for k in range(2)])
    np.testing.assert_allclose(found, expected)
    one = {name: value[0] for name, value in params.items()}
    np.testing.assert_allclose(predictor.predict_rows(one, parents), expected[0])
    np.testing.assert_array_equal(numeric(FAMILY, parents), numbers)
    np.testing.assert_array_equal(configurations(FAMILY, parents), np.eye(6)[a * 3 + b])
    assert (predictor.rows, predictor.inputs) == (6, 3)
    alone = Predictor(m.Family("x"), DIM, "loc")
    assert (alone.rows, alone.inputs) == (1, 0)
    level = {"loc": torch.as_tensor(intercepts[:, :1])}
    np.testing.assert_allclose(alone(level, {}, torch.zeros(1, 4, DIM)), intercepts[:, :1])
    np.testing.assert_allclose(alone.predict_rows({"loc": level["loc"][0]}, {}), intercepts[0, :1])
    assert configurations(m.Family("x"), {}) is numeric(m.Family("x"), {}) is None


def test_a_network_reads_categories_and_numbers_in_their_units():
    _, _, numbers, parents, target, weight = table()
    plain = Predictor(FAMILY, DIM, "loc", network=(4,))
    assert plain.rows == 1
    shapes = {name: parameter.shape for name, parameter in plain.parameters().items()}
    assert shapes == {
        "loc": (1, DIM),
        "network.0.weight": (8, 4),
        "network.0.bias": (4,),
        "network.1.weight": (4, DIM),
        "network.1.bias": (DIM,),
    }
    scales = {name: parameter.init_scale for name, parameter in plain.parameters().items()}
    assert scales["network.0.weight"] == pytest.approx((2 / 8) ** 0.5)
    assert scales["network.1.weight"] == pytest.approx(0.1 / 2)
    assert scales["network.0.bias"] == scales["loc"] == 0.0
    rng = np.random.default_rng(2)
    params = {name: torch.as_tensor(rng.normal(size=(1, *shape))) for name, shape in shapes.items()}
    own = {name: value[0].numpy() for name, value in params.items()}
    within = plain.with_units(torch.as_tensor(target), parents, torch.as_tensor(weight))
    share = weight / weight.sum()
    mean = share @ numbers
    spread = np.sqrt(share @ (numbers - mean) ** 2)
    for predictor, shown in ((plain, numbers), (within, (numbers - mean) / spread)):
        inputs = np.concatenate([parents["a"], parents["b"], shown], 1)
        inner = inputs @ own["network.0.weight"] + own["network.0.bias"]
        inner = inner / (1 + np.exp(-inner))
        expected = own["loc"] + inner @ own["network.1.weight"] + own["network.1.bias"]
        np.testing.assert_allclose(predictor(params, with_replica(parents))[0], expected)
    # before it is trained, a network predicts its level
    np.testing.assert_allclose(plain.predict_rows({"loc": params["loc"][0]}, parents), np.tile(own["loc"], (ROWS, 1)))
    assert plain.row_axis == Axis()
    assert set(plain.axes(Axis())) == {"loc"}
    assert plain.with_output_turned(params, torch.tensor([-1.0, 1.0])) is None
    assert plain.slopes_of(params, "r") is None


def test_units_are_means_and_spreads_and_intercepts_are_taken_at_the_centre():
    _, _, numbers, parents, target, weight = table()
    share = weight / weight.sum()
    centre, level = share @ numbers, share @ target
    spread = np.sqrt(share @ (numbers - centre) ** 2)
    height = np.sqrt(share @ (target - level) ** 2)
    predictor = Predictor(FAMILY, DIM, "loc").with_units(torch.as_tensor(target), parents, torch.as_tensor(weight))
    units = predictor.units
    for found, expected in zip(
        (units.in_shift, units.in_scale, units.out_shift, units.out_scale), (centre, spread, level, height), strict=True
    ):
        np.testing.assert_allclose(found, expected)
    declared = predictor.parameters()
    np.testing.assert_allclose(declared["loc"].origin, level)
    np.testing.assert_allclose(declared["loc"].unit, height)
    np.testing.assert_allclose(declared["weight"].unit, height / spread[:, None])
    assert declared["weight"].origin is None
    assert declared["weight"].in_part
    np.testing.assert_allclose(predictor.centre, centre)
    rng = np.random.default_rng(3)
    params = {
        "loc": torch.as_tensor(rng.normal(size=(1, 6, DIM))),
        "weight": torch.as_tensor(rng.normal(size=(1, 3, DIM))),
    }
    before = {name: value.clone() for name, value in params.items()}
    restored = predictor.restore_units(dict(params))
    np.testing.assert_allclose(restored["loc"], before["loc"].numpy() - centre @ before["weight"][0].numpy())
    again = predictor.remove_units(dict(restored))
    torch.testing.assert_close(again, before)
    with pytest.raises(ModelError, match="node 'x': 'loc' cannot be set without 'weight'"):
        predictor.remove_units({"loc": params["loc"]})
    assert predictor.remove_units({"weight": params["weight"]}).keys() == {"weight"}
    # nothing is centred without units, without slopes, or where the intercept is given or shared
    bare = Predictor(FAMILY, DIM, "loc")
    given = Predictor(FAMILY, DIM, "loc", as_setting(0.5), units=units)
    shared = Predictor(FAMILY, DIM, "loc", Tied("level"), units=units)
    flat = Predictor(m.Family("x"), DIM, "loc", units=Units(torch.zeros(0), torch.ones(0), *([units.out_shift] * 2)))
    for one in (bare, given, shared):
        torch.testing.assert_close(one.restore_units(dict(params)), before)
        assert one.centre.tolist() == [0.0] * 3
    assert flat.centre.tolist() == []
    no_numbers = flat.with_units(torch.as_tensor(target), {}, torch.as_tensor(weight)).units
    assert no_numbers.in_shift.shape == no_numbers.in_scale.shape == (0,)


def test_levels_of_hidden_nodes_average_zero_unless_they_are_given():
    family = m.Family("x", (("a", Discrete(2)), ("b", Discrete(3))))
    levelled = Predictor(family, DIM, "loc", no_level=True)
    params = {"loc": torch.as_tensor(np.random.default_rng(4).normal(size=(2, 6, DIM)))}
    found = levelled.restore_units(dict(params))["loc"]
    torch.testing.assert_close(found, params["loc"] - params["loc"].mean(1, keepdim=True))
    assert levelled.is_levelled
    assert not Predictor(family, DIM, "loc").is_levelled
    assert not Predictor(family, DIM, "loc", as_setting(1.0), no_level=True).is_levelled


GIVEN = {
    "nothing": {},
    "the intercept": {"intercept": np.linspace(-1, 1, 12).reshape(6, DIM)},
    "the slopes": {"weight": [[0.5, 0.1], [1.0, 0.2], [0.0, -1.0]]},
    "one slope": {"weight": [[0.5, 0.1], [np.nan, np.nan], [np.nan, np.nan]]},
    "part of a slope": {"weight": [[0.5, np.nan], [np.nan, np.nan], [np.nan, np.nan]]},
    "both": {"intercept": 0.5, "weight": 0.25},
}


@pytest.mark.parametrize("given", GIVEN)
def test_it_starts_from_least_squares_around_what_is_given(given):
    a, b, numbers, parents, target, weight = table(rows=300)
    settings = {name: as_setting(value) for name, value in GIVEN[given].items()}
    predictor = Predictor(FAMILY, DIM, "loc", **settings)
    found = {
        k: v.numpy() for k, v in predictor.start(torch.as_tensor(target), parents, torch.as_tensor(weight)).items()
    }
    intercept = np.broadcast_to(GIVEN[given].get("intercept", np.nan), (6, DIM))
    slopes = np.broadcast_to(GIVEN[given].get("weight", np.nan), (3, DIM))
    design = np.concatenate([np.eye(6)[a * 3 + b], numbers], 1)
    for column in range(DIM):
        known = np.concatenate([intercept[:, column], slopes[:, column]])
        free = np.isnan(known)
        if given == "part of a slope" and column == 1:
            free[6] = True
        rest = target[:, column] - design @ np.nan_to_num(known)
        line = known.copy()
        root = np.sqrt(weight)[:, None]
        if free.any():
            line[free] = np.linalg.lstsq(root * design[:, free], root[:, 0] * rest, rcond=None)[0]
        if given == "part of a slope" and column == 0:
            continue  # the other column's slopes are found beside it
        np.testing.assert_allclose(found["loc"][:, column], line[:6], atol=2e-3)
        np.testing.assert_allclose(found["weight"][:, column], line[6:], atol=1e-3)
    kept = ~np.isnan(slopes)
    np.testing.assert_array_equal(found["weight"][kept], slopes[kept])


def test_without_numbers_it_starts_from_means_or_what_is_given():
    a, _, _, parents, target, weight = table(rows=300)
    family = m.Family("x", (("a", Discrete(2)),))
    own = {"a": parents["a"]}
    arguments = (torch.as_tensor(target), own, torch.as_tensor(weight))
    found = Predictor(family, DIM, "loc").start(*arguments)
    means = [np.average(target[a == k], axis=0, weights=weight[a == k]) for k in range(2)]
    np.testing.assert_allclose(found["loc"], means, atol=1e-3)
    assert found.keys() == {"loc"}
    given = Predictor(family, DIM, "loc", as_setting(0.5)).start(*arguments)
    assert given["loc"].tolist() == [[0.5, 0.5]] * 2
    network = Predictor(FAMILY, DIM, "loc", network=(3,)).start(arguments[0], parents, arguments[2])
    assert network.keys() == {"loc"}
    np.testing.assert_allclose(network["loc"], [np.average(target, axis=0, weights=weight)], atol=1e-3)


def test_slopes_belong_to_their_parents_and_turn_with_them():
    predictor = Predictor(FAMILY, DIM, "loc")
    rng = np.random.default_rng(5)
    params = {
        "loc": torch.as_tensor(rng.normal(size=(2, 6, DIM))),
        "weight": torch.as_tensor(rng.normal(size=(2, 3, DIM))),
    }
    before = {name: value.clone() for name, value in params.items()}
    torch.testing.assert_close(predictor.slopes_of(params, "r"), before["weight"][:, :1])
    torch.testing.assert_close(predictor.slopes_of(params, "s"), before["weight"][:, 1:3])
    assert predictor.slopes_of(params, "a") is None
    assert predictor.slopes_of({"loc": params["loc"]}, "r") is None
    sign = torch.tensor([-1.0, 1.0]).double()
    turned = predictor.with_inputs_turned(params, ["s"], sign)
    torch.testing.assert_close(turned["weight"][:, 1], -before["weight"][:, 1])
    torch.testing.assert_close(turned["weight"][:, [0, 2]], before["weight"][:, [0, 2]])
    torch.testing.assert_close(params, before)
    assert predictor.with_inputs_turned(params, ["a"], sign) is None
    assert predictor.with_inputs_turned({"loc": params["loc"]}, ["s"], sign) is None
    assert predictor.with_inputs_turned(params, [], sign) == params
    out = predictor.with_output_turned(params, sign)
    torch.testing.assert_close(out["loc"], before["loc"] * sign)
    torch.testing.assert_close(out["weight"], before["weight"] * sign)
    own = Axis(coordinates=(("x", DIM),))
    assert predictor.axes(own) == {
        "loc": (Axis(categories=(("a", 2), ("b", 3))), own),
        "weight": (Axis(coordinates=(("r", 1), ("s", 2))), own),
    }
    assert predictor.axes(own).keys() - Predictor(m.Family("x"), DIM, "loc").axes(own).keys() == {"weight"}


def test_tables_that_no_data_could_fill_are_refused():
    sizes = (100, 200)
    assert prod(sizes) == Predictor.most_rows == 20_000
    parents = tuple((f"p{size}", Discrete(size)) for size in sizes)
    assert Predictor(m.Family("x", parents), 1, "loc").rows == Predictor.most_rows
    more = m.Family("x", (("p201", Discrete(201)), parents[0]))
    with pytest.raises(ModelError, match="needs 20100 rows; at most 20000 are supported"):
        Predictor(more, 1, "loc")
    assert Predictor(more, 1, "loc", network=(2,)).rows == 1


def test_regressions_are_weighted_least_squares_with_a_ridge():
    rng = np.random.default_rng(6)
    design, target, weight = rng.normal(size=(20, 3)), rng.normal(size=(20, 2)), rng.uniform(0.5, 2.0, 20)
    found = weighted_regression(*map(torch.as_tensor, (design, target, weight)), ridge=0.3)
    gram = design.T @ (weight[:, None] * design)
    gram += 0.3 * np.diag(gram).mean() * np.eye(3)
    np.testing.assert_allclose(found, np.linalg.solve(gram, design.T @ (weight[:, None] * target)))


def test_spreads_are_those_of_rows_by_weight_and_constant_columns_have_one():
    rng = np.random.default_rng(7)
    values, weight = rng.normal(5.0, 2.0, (40, 3)), rng.uniform(0.0, 2.0, 40)
    values[:, 1] = 1e8 * (1 + 1e-15 * rng.integers(0, 2, 40))  # rounding alone
    values[:, 2] *= 1e-200
    centre, spread = centre_and_spread(torch.as_tensor(values), torch.as_tensor(weight))
    share = weight / weight.sum()
    np.testing.assert_allclose(centre, share @ values)
    np.testing.assert_allclose(spread[0], np.sqrt(share @ (values[:, 0] - share @ values[:, 0]) ** 2))
    assert spread[1].item() == 1.0
    scaled = values[:, 2] * 1e200
    np.testing.assert_allclose(spread[2], 1e-200 * np.sqrt(share @ (scaled - share @ scaled) ** 2))
    # constant is what varies by no more than 32 roundings of its size
    for times, constant in ((30, True), (34, False)):
        step = times * np.finfo(float).eps
        column = torch.tensor([[1.0 - step], [1.0 + step]]).double()
        assert (centre_and_spread(column, torch.ones(2))[1].item() == 1.0) == constant
