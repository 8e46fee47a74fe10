import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy

from otpdag.metrics import hellinger, kl_divergence

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
    with pytest.raises(ValueError, match="must have one shape"):
        distance([0.5, 0.5], [[0.5, 0.5]])
