"""Rotations against statsmodels, and against the loadings that made the data."""

import numpy as np
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.errors import ModelError
from otpdag.uncertainty.rotation import oblimin, varimax
from tests.uncertainty.factor_tables import one_factor, two_factor_table


def test_rotations_are_those_of_statsmodels():
    rotation = pytest.importorskip("statsmodels.multivariate.factor_rotation", reason="the outside truth here")
    loadings = np.random.default_rng(3).normal(size=(8, 3)) * [1.0, 0.8, 0.6] + [0.5, 0.0, 0.0]
    theirs, _ = rotation.rotate_factors(loadings, "varimax")
    ours, turn = varimax(loadings)
    np.testing.assert_allclose(turn.T @ turn, np.eye(3), atol=1e-10)
    np.testing.assert_allclose(_sorted(ours), _sorted(theirs), atol=1e-3)
    theirs, _ = rotation.rotate_factors(loadings, "quartimin")
    ours, correlations = oblimin(loadings)
    np.testing.assert_allclose(_sorted(ours), _sorted(theirs), atol=1e-2)  # which stop earlier
    assert _quartimin(ours) <= _quartimin(theirs)
    np.testing.assert_allclose(ours @ correlations @ ours.T, loadings @ loadings.T, atol=1e-8)
    assert np.diag(correlations) == pytest.approx(1.0)


def _quartimin(loadings: np.ndarray) -> float:
    squares = loadings**2
    return float((squares * (squares.sum(1, keepdims=True) - squares)).sum())


def _sorted(loadings: np.ndarray) -> np.ndarray:
    """Columns in the order of their size, whatever their signs."""
    return np.abs(loadings[:, np.argsort(-(loadings**2).sum(0))])


def test_free_factors_are_rotated_to_what_made_them():
    graph = otp.Graph([(f, x) for f in ("f", "g") for x in "abcdew"], hidden=["f", "g"])
    result = otp.fit(otp.Model(graph, {node: m.Normal() for node in graph.nodes}), two_factor_table(800), restarts=1)
    turned = result.rotated_loadings("varimax").loadings.to_numpy()
    first = turned[:, np.abs(turned[0]).argmax()]
    np.testing.assert_allclose(first[:3], [0.8, 0.7, 0.9], atol=0.15)
    assert np.abs(first[3:]).max() < 0.35
    correlations = result.rotated_loadings("oblimin").correlations.to_numpy()
    assert np.diag(correlations) == pytest.approx(1.0)
    assert abs(correlations[0, 1]) < 0.5
    with pytest.raises(ModelError, match="method must be 'varimax' or 'oblimin'"):
        result.rotated_loadings("quartimax")
    with pytest.raises(ModelError, match="at least two hidden normal roots"):
        otp.fit(one_factor("abc"), two_factor_table(50)[["a", "b", "c"]]).rotated_loadings()
