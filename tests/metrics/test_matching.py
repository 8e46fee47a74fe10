from itertools import permutations

import numpy as np
import pytest

from otpdag.metrics import match_labels, match_signs, match_states, matched_errors


def test_match_labels_finds_the_cheapest_of_all_permutations():
    cost = np.random.default_rng(0).random((5, 5))
    cheapest = min(permutations(range(5)), key=lambda order: cost[range(5), order].sum())
    assert tuple(match_labels(cost)) == cheapest


@pytest.mark.parametrize("cost", [np.ones((2, 3)), np.ones(4)])
def test_match_labels_refuses_a_cost_that_is_not_square(cost):
    with pytest.raises(ValueError, match="must be a square matrix; got shape"):
        match_labels(cost)


def test_match_labels_refuses_nan():
    with pytest.raises(ValueError, match="finite numbers only"):
        match_labels([[0.0, np.nan], [1.0, 0.0]])


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_match_states_undoes_any_relabelling(order):
    rng = np.random.default_rng(1)
    truth = {
        "probs": rng.dirichlet(np.ones(3)),
        "loc": rng.normal(size=(3, 2)),
        "table": rng.random((3, 2, 4)),
    }
    relabelled = {name: values[list(order)] for name, values in truth.items()}
    found = match_states(truth, relabelled)
    for name, values in truth.items():
        np.testing.assert_array_equal(relabelled[name][found], values)


def test_match_states_takes_a_single_array():
    topics = np.random.default_rng(2).dirichlet(np.ones(6), size=4)
    np.testing.assert_array_equal(match_states(topics, topics[::-1]), [3, 2, 1, 0])


def test_match_states_counts_each_group_once():
    # One group of many entries says "as they are", two small groups say "swap" and are louder together.
    truth = {
        "wide": np.array([[0.0] * 100, [1.0] * 100]),
        "a": np.array([0.0, 1.0]),
        "b": np.array([0.0, 1.0]),
    }
    estimate = {"wide": truth["wide"], "a": truth["a"][::-1], "b": truth["b"][::-1]}
    np.testing.assert_array_equal(match_states(truth, estimate), [1, 0])


def test_match_signs_flips_only_the_mirrored_factors():
    loadings = np.random.default_rng(3).normal(size=(3, 5))
    signs = np.array([1.0, -1.0, -1.0])
    np.testing.assert_array_equal(match_signs(loadings, loadings * signs[:, None] + 0.01), signs)


def test_matched_errors_is_the_smallest_over_all_relabellings():
    rng = np.random.default_rng(4)
    truth = {"loc": rng.normal(size=4), "table": rng.random((4, 3)), "slope": np.array([2.0])}
    estimate = {"loc": rng.normal(size=4), "table": rng.random((4, 3)), "slope": np.array([1.75])}
    best = min(
        np.abs(truth["loc"] - estimate["loc"][list(order)]).mean()
        + np.abs(truth["table"] - estimate["table"][list(order)]).mean()
        for order in permutations(range(4))
    )
    found = matched_errors(truth, estimate, shared=["slope"])
    assert found["slope"] == 0.25
    assert found["loc"] + found["table"] == pytest.approx(best)


def test_matched_errors_names_the_group_whose_shape_differs():
    truth = {"loc": np.zeros(2), "slope": np.zeros(1)}
    with pytest.raises(ValueError, match=r"shapes of `slope` must agree; got \(1,\) \(true\) and \(2,\)"):
        matched_errors(truth, {"loc": np.zeros(2), "slope": np.zeros(2)}, shared=["slope"])
