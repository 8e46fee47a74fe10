"""k-means, against scikit-learn."""

import numpy as np
import pytest
from sklearn.cluster import KMeans

from otpdag.clustering import k_means, move_centres, nearest, squared_distances

POINTS = np.random.default_rng(3).normal(size=(300, 2)) + 8 * np.random.default_rng(4).integers(0, 2, (300, 2))


def test_separate_groups_are_found_as_by_scikit_learn():
    centres, distance = k_means(POINTS, 4, np.random.default_rng(0))
    other = KMeans(4, n_init=5, random_state=0).fit(POINTS)
    order, other_order = np.lexsort(centres.round(2).T), np.lexsort(other.cluster_centers_.round(2).T)
    np.testing.assert_allclose(centres[order], other.cluster_centers_[other_order], atol=1e-6)
    assert distance == pytest.approx(other.inertia_ / len(POINTS))


def test_moving_goes_the_way_of_lloyd():
    begin = POINTS[:5]
    other = KMeans(5, init=begin, n_init=1, max_iter=100, tol=0).fit(POINTS)
    np.testing.assert_allclose(move_centres(POINTS, begin, 100), other.cluster_centers_, atol=1e-6)


def test_a_centre_without_points_stays():
    far = np.array([[0.0, 0.0], [1e3, 1e3]])
    np.testing.assert_array_equal(move_centres(POINTS, far, 3)[1], far[1])


def test_no_more_centres_than_points():
    assert len(k_means(POINTS[:3], 5, np.random.default_rng(0))[0]) == 3


def test_squared_distances_are_those_of_differences():
    direct = ((POINTS[:, None] - POINTS[None, :7]) ** 2).sum(-1)
    np.testing.assert_allclose(squared_distances(POINTS, POINTS[:7]), direct, atol=1e-10)


@pytest.mark.parametrize("whole", [False, True])
def test_on_a_line_centres_go_where_those_of_scikit_learn_go(whole):
    generator = np.random.default_rng(5)
    points = generator.gamma(2.0, 5.0, (400, 1))
    points = points.round() if whole else points
    begin = np.array([[11.3], [2.1], [30.7], [5.9]])  # in no order, and no count lies halfway between two
    other = KMeans(4, init=begin, n_init=1, max_iter=100, tol=0).fit(points)
    np.testing.assert_allclose(move_centres(points, begin, 100), other.cluster_centers_, atol=1e-4)


def test_on_a_line_a_centre_without_points_stays():
    far = np.array([[1e3], [0.0]])
    np.testing.assert_array_equal(move_centres(POINTS[:, :1], far, 3)[0], far[0])


@pytest.mark.parametrize("dim", [1, 3])
def test_points_belong_to_the_nearest_centre(dim):
    rng = np.random.default_rng(2)
    points, centres = rng.normal(size=(200, dim)), rng.normal(size=(5, dim))
    distances = ((points[:, None] - centres) ** 2).sum(-1)
    np.testing.assert_array_equal(nearest(points, centres), distances.argmin(1))
