"""Distances between topic matrices, lined up, and what the paper's Table 1 prints."""

import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy, wasserstein_distance

from experiments.metrics import (
    grid_distances,
    hellinger,
    kl_divergence,
    match_labels,
    match_signs,
    match_states,
    match_topics,
    matched_errors,
    patterns_recovered,
    published_topic_errors,
    top_words,
    topic_errors,
)


def bar_topics(side):
    """Horizontal, then vertical bars on a square grid."""
    cells = np.arange(side * side)
    lines = [cells // side == line for line in range(side)] + [cells % side == line for line in range(side)]
    return np.array(lines) / side


@pytest.fixture
def rng():
    return np.random.default_rng(101)


def test_topics_are_lined_up_before_they_are_compared(rng):
    true = rng.dirichlet(np.full(30, 0.1), size=6)
    order = rng.permutation(6)
    shuffled = true[np.argsort(order)]
    np.testing.assert_array_equal(match_topics(true, shuffled), order)
    assert topic_errors(true, shuffled) == pytest.approx({"kl": 0, "hellinger": 0, "wasserstein": 0}, abs=1e-12)


def test_errors_are_means_over_topics(rng):
    true = rng.dirichlet(np.full(12, 0.5), size=4)
    estimate = 0.9 * true + 0.1 * rng.dirichlet(np.ones(12), size=4)
    found = topic_errors(true, estimate[::-1])
    assert found["kl"] == pytest.approx(np.mean([kl_divergence(p, q) for p, q in zip(true, estimate, strict=True)]))
    assert found["hellinger"] == pytest.approx(np.mean([hellinger(p, q) for p, q in zip(true, estimate, strict=True)]))
    assert found["wasserstein"] == pytest.approx(0.5 * np.abs(true - estimate).sum(axis=1).mean())


def test_transport_on_a_line_is_scipy_s(rng):
    true, estimate = rng.dirichlet(np.ones(9), size=2)
    at = np.arange(9.0)
    found = topic_errors(true[None], estimate[None], ground=np.abs(at[:, None] - at))["wasserstein"]
    assert found == pytest.approx(wasserstein_distance(at, at, true, estimate))


def test_a_bar_that_moved_by_one_cell_is_one_cell_away():
    truth = bar_topics(5)
    assert topic_errors(truth[:1], truth[1:2], ground=grid_distances(5))["wasserstein"] == pytest.approx(1.0)
    assert topic_errors(truth[:1], truth[3:4], ground=grid_distances(5))["wasserstein"] == pytest.approx(3.0)
    assert topic_errors(truth[:1], truth[3:4])["wasserstein"] == pytest.approx(1.0)


def test_an_excluded_word_is_infinitely_far_in_kl():
    assert topic_errors([[0.5, 0.5]], [[1.0, 0.0]])["kl"] == np.inf


def test_patterns_are_recovered_exactly_or_not_at_all(rng):
    truth = bar_topics(5)
    noisy = 0.9 * truth + 0.1 / 25
    assert patterns_recovered(truth, noisy[rng.permutation(10)]) == 1.0
    one_cell_off = noisy.copy()
    one_cell_off[0, [0, 24]] = one_cell_off[0, [24, 0]]
    assert patterns_recovered(truth, one_cell_off) == pytest.approx(0.9)
    lost = noisy.copy()
    lost[3] = lost[4]
    assert patterns_recovered(truth, lost) == pytest.approx(0.9)


def test_two_patterns_in_one_topic_are_not_one():
    truth = bar_topics(10)
    merged = truth.copy()
    merged[14] = 0.52 * truth[14] + 0.48 * truth[7]  # its likeliest words are those of a true bar
    assert patterns_recovered(truth, merged) == pytest.approx(0.95)
    assert patterns_recovered(truth, merged, mass=0.5) == 1.0


def test_a_flat_topic_in_the_right_order_recovers_nothing():
    truth = bar_topics(5)
    flat = 0.01 * truth + 0.99 / 25
    assert patterns_recovered(truth, flat) == 0.0
    assert patterns_recovered(truth, flat, mass=0.0) == 1.0


@pytest.mark.parametrize(
    ("topics", "kl", "wasserstein"),
    [(10, (1.634, 0.022), 0.058), (20, (2.304, 0.004), 0.022), (30, (2.708, 0.002), 0.012)],
)
def test_the_table_of_the_paper_is_what_the_truth_itself_scores(rng, topics, kl, wasserstein):
    """Batch EM's row of Table 1, from the true topics in another order: EM is no worse than that."""
    truth = bar_topics(topics // 2)
    found = published_topic_errors(truth, truth[rng.permutation(topics)])
    mean, spread = kl
    assert found["kl"] == pytest.approx(mean, abs=2 * spread)
    assert found["wasserstein"] == pytest.approx(wasserstein, rel=0.05)


def test_the_paper_s_kl_of_a_uniform_estimate_is_the_log_of_half_the_topics():
    for topics in (10, 20, 30):
        truth = bar_topics(topics // 2)
        found = published_topic_errors(truth, np.full_like(truth, 1 / truth.shape[1]))
        assert found["kl"] == pytest.approx(np.log(topics / 2))


def test_the_paper_s_hellinger_is_that_of_whole_matrices_without_matching(rng):
    truth = rng.dirichlet(np.ones(7), size=3)
    moved = np.roll(truth, 1, axis=0)
    squares = [hellinger(p, q) ** 2 for p, q in zip(truth, moved, strict=True)]
    assert published_topic_errors(truth, moved)["hellinger"] == pytest.approx(np.sqrt(np.sum(squares)))


def test_what_is_no_pair_of_topic_matrices_is_refused():
    topics = bar_topics(2)
    with pytest.raises(ValueError, match=r"must agree; got \(4, 4\) and \(3, 4\)"):
        topic_errors(topics, topics[:3])
    with pytest.raises(ValueError, match=r"rows of `estimate` must be probabilities that sum to 1; got a sum of 2"):
        match_topics(topics, 2 * topics)
    with pytest.raises(ValueError, match=r"`true` must be a matrix with a row per topic; got shape \(4,\)"):
        patterns_recovered(topics[0], topics[0])
    with pytest.raises(ValueError, match=r"`ground` must have shape \(4, 4\).* got \(3, 3\)"):
        topic_errors(topics, topics, ground=np.zeros((3, 3)))


# -- hidden labels ----------------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match=r"shapes of `slope` must agree; got \(1,\) and \(2,\)"):
        matched_errors(truth, {"loc": np.zeros(2), "slope": np.zeros(2)}, shared=["slope"])


# -- distributions ----------------------------------------------------------------------------------------------------

WEIGHTS = st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4)


def normalised(weights):
    return np.array(weights) / np.sum(weights)


def test_hellinger_of_two_bernoullis_in_closed_form():
    p, q = 0.3, 0.6
    affinity = math.sqrt(p * q) + math.sqrt((1 - p) * (1 - q))
    assert hellinger([p, 1 - p], [q, 1 - q]) == pytest.approx(math.sqrt(1 - affinity))


@given(WEIGHTS, WEIGHTS)
def test_kl_divergence_agrees_with_scipy(first, second):
    p, q = normalised(first), normalised(second)
    assert kl_divergence(p, q) == pytest.approx(entropy(p, q), abs=1e-12)


@given(WEIGHTS, WEIGHTS)
def test_hellinger_is_symmetric_and_bounded_by_kl(first, second):
    p, q = normalised(first), normalised(second)
    distance = hellinger(p, q)
    assert distance == hellinger(q, p)
    assert distance**2 <= kl_divergence(p, q) / 2 + 1e-9


def test_distances_do_not_depend_on_the_shape():
    p, q = normalised([1, 2, 3, 4]), normalised([4, 3, 2, 1])
    assert hellinger(p.reshape(2, 2), q.reshape(2, 2)) == hellinger(p, q)
    assert kl_divergence(p.reshape(2, 2), q.reshape(2, 2)) == kl_divergence(p, q)


def test_kl_divergence_with_zeros():
    assert kl_divergence([1.0, 0.0], [0.5, 0.5]) == pytest.approx(math.log(2))
    assert kl_divergence([0.5, 0.5], [1.0, 0.0]) == math.inf


@pytest.mark.parametrize("distance", [hellinger, kl_divergence])
def test_what_is_no_distribution_is_refused(distance):
    with pytest.raises(ValueError, match=r"`q` must be probabilities that sum to 1; got a sum of 0\.8"):
        distance([0.5, 0.5], [0.4, 0.4])
    with pytest.raises(ValueError, match="`p` must be probabilities"):
        distance([1.5, -0.5], [0.5, 0.5])
    with pytest.raises(ValueError, match="the shapes must agree"):
        distance([0.5, 0.5], [[0.5, 0.5]])


def test_top_words_come_in_falling_order():
    assert top_words([[0.2, 0.5, 0.3], [0.4, 0.2, 0.4]], ["a", "b", "c"], n=2) == [["b", "c"], ["a", "c"]]
    with pytest.raises(ValueError, match=r"column for each of 2 words; got shape \(1, 3\)"):
        top_words(np.ones((1, 3)), ["a", "b"])
    with pytest.raises(ValueError, match=r"`n` must be between 1 and the 3 words of the vocabulary; got 4"):
        top_words(np.ones((1, 3)), ["a", "b", "c"], n=4)
