"""Indices and standardised loadings against closed forms and semopy."""

import warnings

import numpy as np
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.uncertainty.covariance_structure import implied_moments
from tests.uncertainty.factor_tables import one_factor, two_factor_table


def test_chi_square_is_the_discrepancy_of_covariances():
    table = two_factor_table()
    model = one_factor("abcdew")
    result = otp.fit(model, table)
    indices = result.fit_indices()
    moments = implied_moments(model)
    _, implied = moments.of(tuple("abcdew"))
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
