"""Fit indices, standardised loadings and rotations against closed forms, semopy and statsmodels."""

import warnings

import numpy as np
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.answers.linear_normal import rotated_loadings
from otpdag.errors import ModelError
from tests.answers.factor_tables import one_factor, two_factor_table


def test_chi_square_is_the_discrepancy_of_covariances():
    table = two_factor_table()
    model = one_factor("abcdew")
    result = otp.fit(model, table)
    indices = result.fit_indices()
    params = model.params()
    loadings = np.array([params[name]["weight"].item() for name in "abcdew"]) * params["f"]["scale"].item()
    implied = np.outer(loadings, loadings) + np.diag([params[name]["scale"].item() ** 2 for name in "abcdew"])
    sample = np.cov(table.T, bias=True)
    ratio = np.linalg.solve(implied, sample)
    expected = len(table) * (np.trace(ratio) - np.linalg.slogdet(ratio)[1] - 6)
    assert indices.chi_square == pytest.approx(expected, rel=1e-4)
    assert indices.degrees == 21 - 12
    base = -len(table) * np.linalg.slogdet(np.corrcoef(table.T))[1]
    assert indices.cfi == pytest.approx(1 - (expected - 9) / (base - 15), rel=1e-4)
    assert indices.rmsea == pytest.approx(np.sqrt((expected - 9) / (9 * len(table))), rel=1e-4)
    assert indices.p_value < 1e-6
    assert "RMSEA" in str(result.summary())


def test_standardised_loadings_are_correlations_with_the_factor():
    table = two_factor_table()[["a", "b", "c"]] * [1.0, 10.0, 100.0]
    model = one_factor("abc")
    summary = otp.fit(model, table).summary()
    assert summary.fit_indices is None  # three indicators are just enough: nothing is left to test
    found = summary.to_frame()["standardised"]
    correlations = np.corrcoef(table.T)
    expected = np.sqrt(correlations[0, 1] * correlations[0, 2] / correlations[1, 2])
    assert abs(found["a.weight[f]"]) == pytest.approx(expected, abs=1e-3)
    assert np.isnan(found["a.loc"])


def test_with_gaps_the_best_moments_are_those_of_the_saturated_model():
    table = two_factor_table(300)[["a", "b", "c", "d"]]
    table.loc[::4, "b"] = np.nan
    table.loc[::7, "d"] = np.nan
    result = otp.fit(one_factor("abcd"), table)
    full = otp.Graph([("a", "b"), ("a", "c"), ("b", "c"), ("a", "d"), ("b", "d"), ("c", "d")])
    saturated = otp.Model(full, {node: m.Normal() for node in full.nodes})
    otp.fit(saturated, table)
    expected = 2 * (saturated.log_likelihood(table) - result.model.log_likelihood(table))
    assert result.fit_indices().chi_square == pytest.approx(expected, abs=1e-2)


def test_indices_and_standardised_loadings_are_those_of_semopy():
    semopy = pytest.importorskip("semopy", reason="semopy is the outside truth here")
    table = two_factor_table()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # semopy's own, of numpy
        theirs = semopy.Model("f =~ a + b + c + d + e + w")
        theirs.fit(table)
        stats, inspected = semopy.calc_stats(theirs).iloc[0], theirs.inspect(std_est=True)
    summary = otp.fit(one_factor("abcdew"), table).summary()
    ours = summary.fit_indices
    assert (ours.degrees, stats["DoF"]) == (9, 9)
    assert ours.chi_square == pytest.approx(stats["chi2"], rel=1e-4)
    assert (ours.cfi, ours.tli) == pytest.approx((stats["CFI"], stats["TLI"]), abs=1e-4)
    # semopy divides by n - 1
    assert ours.rmsea == pytest.approx(stats["RMSEA"] * np.sqrt((len(table) - 1) / len(table)), rel=1e-4)
    loadings = inspected[(inspected["op"] == "~") & (inspected["rval"] == "f")].set_index("lval")["Est. Std"]
    found = summary.to_frame()["standardised"]
    for name in "abcdew":
        assert abs(found[f"{name}.weight[f]"]) == pytest.approx(abs(loadings[name]), abs=2e-3)


def test_rotations_are_those_of_statsmodels():
    rotation = pytest.importorskip("statsmodels.multivariate.factor_rotation", reason="the outside truth here")
    loadings = np.random.default_rng(3).normal(size=(8, 3)) * [1.0, 0.8, 0.6] + [0.5, 0.0, 0.0]
    graph = otp.Graph([(factor, f"x{i}") for factor in "fgh" for i in range(8)], hidden=["f", "g", "h"])
    model = otp.Model(graph, {node: m.Normal(loc=0.0, scale=1.0) for node in graph.nodes})
    model.set_params({f"x{i}": {"weight": row} for i, row in enumerate(loadings)})
    theirs, _ = rotation.rotate_factors(loadings, "varimax")
    ours = rotated_loadings(model.fitted, "varimax").loadings.to_numpy()
    np.testing.assert_allclose(ours @ ours.T, loadings @ loadings.T, atol=1e-10)
    np.testing.assert_allclose(_sorted(ours), _sorted(theirs), atol=1e-3)
    np.testing.assert_array_equal(np.abs(ours), _sorted(ours))  # the factor that explains most comes first
    assert (ours.sum(0) > 0).all()
    theirs, _ = rotation.rotate_factors(loadings, "quartimin")
    turned = rotated_loadings(model.fitted, "oblimin")
    ours, correlations = turned.loadings.to_numpy(), turned.correlations.to_numpy()
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


def test_the_factor_that_explains_most_comes_first_whatever_its_signs():
    loadings = np.array([[0.9, 0.0], [-0.9, 0.0], [0.8, 0.0], [-0.8, 0.0], [0.0, 0.6], [0.0, 0.5], [0.0, 0.6]])
    graph = otp.Graph([(factor, f"x{i}") for factor in "fg" for i in range(7)], hidden=["f", "g"])
    model = otp.Model(graph, {node: m.Normal(loc=0.0, scale=1.0) for node in graph.nodes})
    model.set_params({f"x{i}": {"weight": row[::-1]} for i, row in enumerate(loadings)})
    turned = rotated_loadings(model.fitted, "varimax").loadings
    np.testing.assert_allclose(np.abs(turned), np.abs(loadings), atol=1e-6)


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
    with pytest.raises(ModelError, match="method must be one of 'varimax', 'oblimin'"):
        result.rotated_loadings("quartimax")
    with pytest.raises(ModelError, match="at least two hidden normal roots"):
        otp.fit(one_factor("abc"), two_factor_table(50)[["a", "b", "c"]]).rotated_loadings()
