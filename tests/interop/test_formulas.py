"""Formulas become graphs, and lines that say something else are named."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag.interop import formula_estimates, from_formulas
from otpdag.interop.formulas import givers_and_takers


def test_a_factor_model_finds_its_loadings():
    rng = np.random.default_rng(0)
    factor = rng.normal(size=3000)
    loadings = {"a": 1.5, "b": 1.0, "c": 0.7}
    table = pd.DataFrame({name: 2.0 + load * factor + 0.5 * rng.normal(size=3000) for name, load in loadings.items()})
    model = from_formulas("f =~ a + b + c")
    otp.fit(model, table, seed=0)
    found = [abs(float(model.params()[name]["weight"].ravel()[0])) for name in loadings]
    np.testing.assert_allclose(found, list(loadings.values()), atol=0.08)


@pytest.fixture(scope="module")
def wellbeing():
    """Two measurements of two factors; the first items share what else moves them, negatively."""
    rng = np.random.default_rng(1)
    rows = 1500
    first = rng.normal(size=rows)
    second = 0.6 * first + 0.8 * rng.normal(size=rows)
    shared = rng.multivariate_normal([0, 0], [[0.64, -0.40], [-0.40, 0.49]], rows)
    noise = 0.6 * rng.normal(size=(rows, 4))
    columns = [first, 0.8 * first, 1.2 * first, second, 0.9 * second, 1.1 * second]
    table = pd.DataFrame(np.column_stack(columns), columns=["a1", "a2", "a3", "b1", "b2", "b3"]) * [100, 1, 1, 1, 1, 1]
    table[["a1", "b1"]] += shared * [100, 1]
    table[["a2", "a3", "b2", "b3"]] += noise
    return table


MARKED = """
f =~ 1*a1 + a2 + a3
g =~ 1*b1 + b2 + b3
g ~ f
a1 ~~ b1
"""


def test_correlated_errors_are_those_of_semopy(wellbeing):
    semopy = pytest.importorskip("semopy")
    scaled = wellbeing / [100, 1, 1, 1, 1, 1]  # semopy's optimiser does not like units
    other = semopy.Model(MARKED.replace("1*", ""))
    other.fit(scaled)
    theirs = {(row.lval, row.op, row.rval): row for row in other.inspect().itertuples(index=False)}
    result = otp.fit(from_formulas(MARKED, scaled), scaled, seed=0)
    assert result.notes == ()
    for row in formula_estimates(result, MARKED).itertuples(index=False):
        loading = row.operator == "=~"
        their = theirs[(row.right, "~", row.left) if loading else (row.left, row.operator, row.right)]
        assert row.estimate == pytest.approx(their.Estimate, abs=2e-3)
        if isinstance(their[4], float):
            assert row.std_error == pytest.approx(their[4], rel=0.1)
        else:
            assert np.isnan(row.std_error)
    stats = semopy.calc_stats(other)
    indices = result.fit_indices()
    assert indices is not None
    assert indices.chi_square == pytest.approx(float(stats["chi2"].iloc[0]), abs=0.02)
    assert indices.degrees == int(stats["DoF"].iloc[0]) == 7


def test_correlated_errors_know_no_units_and_gaps_are_welcome(wellbeing):
    text = MARKED.replace("1*", "")
    gaps = wellbeing.mask(np.random.default_rng(2).random(wellbeing.shape) < 0.1)
    result = otp.fit(from_formulas(text, gaps), gaps, seed=0)
    table = formula_estimates(result, text).set_index(["left", "operator", "right"])
    covariance = table.loc[("a1", "~~", "b1")]
    assert covariance["lower"] < -40 < covariance["upper"] < 0
    assert np.isnan(table.loc[("f", "~~", "f"), "std_error"])
    assert table.loc[("f", "~~", "f"), "estimate"] == pytest.approx(1.0)


def test_a_variance_can_be_given(wellbeing):
    result = otp.fit(from_formulas("f =~ a2 + a3 + b2\na2 ~~ 0.36*a2"), wellbeing[["a2", "a3", "b2"]], seed=0)
    assert float(result.model.params()["a2"]["scale"]) == pytest.approx(0.6)
    table = result.summary().to_frame()
    assert table.loc["a2.scale", "note"] == "fixed"


def test_slopes_can_be_given_one_by_one(wellbeing, tmp_path):
    model = from_formulas("b3 ~ 0.5*a2 + a3")
    result = otp.fit(model, wellbeing[["b3", "a2", "a3"]], seed=0)
    left = wellbeing["b3"] - 0.5 * wellbeing["a2"]
    slope, level = np.polyfit(wellbeing["a3"], left, 1)
    np.testing.assert_allclose(model.params()["b3"]["weight"], [0.5, slope], rtol=1e-6)
    assert float(model.params()["b3"]["loc"]) == pytest.approx(level, abs=1e-6)
    assert model.n_parameters == 2 + 2 + 3
    assert list(result.summary().to_frame().loc[["b3.weight[a2]", "b3.weight[a3]"], "note"]) == ["fixed", ""]
    bootstrap = result.summary(errors="bootstrap", draws=20).to_frame()
    assert bootstrap["std_error"].isna().tolist() == (bootstrap["note"] == "fixed").tolist()
    model.save(tmp_path / "model.otp")
    again = otp.load(tmp_path / "model.otp")
    np.testing.assert_array_equal(again.params()["b3"]["weight"], model.params()["b3"]["weight"])
    assert again.n_parameters == model.n_parameters


def test_correlated_factors_need_no_further_node(wellbeing):
    text = "f =~ a1 + a2 + a3\ng =~ b1 + b2 + b3\nf ~~ g"
    model = from_formulas(text)
    assert set(model.graph.hidden) == {"f", "g"}
    table = formula_estimates(otp.fit(model, wellbeing, seed=0), text).set_index(["left", "operator", "right"])
    variances = [table.loc[(node, "~~", node), "estimate"] for node in "fg"]
    correlation = table.loc[("f", "~~", "g"), "estimate"] / np.sqrt(np.prod(variances))
    assert correlation == pytest.approx(0.6, abs=0.06)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (["ab", "ac"], 2),
        (["ab", "bc", "ca"], 3),
        (["ab", "bc", "cd", "da"], 4),
        (["ab", "bc", "cd", "da", "de"], 5),
    ],
)
def test_arrows_of_noise_correlate_no_other_pair(pairs, expected):
    arrows, _ = givers_and_takers([tuple(pair) for pair in pairs])
    assert len(arrows) == expected
    nodes = sorted(set("".join(pairs)))
    loadings = np.eye(len(nodes))
    for giver, taker in arrows:
        loadings[nodes.index(taker), nodes.index(giver)] = 0.3
    covariance = loadings @ loadings.T
    for one in range(len(nodes)):
        for other in range(one):
            is_pair = {nodes[one], nodes[other]} in [set(pair) for pair in pairs]
            assert (covariance[one, other] != 0) == is_pair


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least one formula"),
        ("f =~ a + b\na ~~ b", "data="),
        ("a ~~ -1*a\na ~ b", "above zero"),
        ("a ~~ 0.3*b", "free or zero"),
        ("c ~~ 0.3*c\na ~ b", "no formula says"),
        ("a ~ b\nc + d", "line 2"),
        ("f =~ k*a + b", "must be a number"),
        ("f =~ a + ", "no name"),
        ("f =~ a + a", "twice"),
        ("a ~ b\nb ~ a", "cycle"),
        ("f ~ x\ng ~ x\nf =~ a + b\ng =~ c + d\nf ~~ g", "factor 'f'"),
        ("a ~~ b + d\nc ~~ b + d\ne ~~ b + d", "several circles"),
    ],
)
def test_what_is_no_formula_is_named(text, words):
    with pytest.raises(otp.OtpdagError, match=words):
        from_formulas(text)


def test_the_table_must_hold_the_columns(wellbeing):
    with pytest.raises(otp.DataError, match="'a' must be a column"):
        from_formulas("f =~ a + b\na ~~ b", wellbeing)
    with pytest.raises(otp.DataError, match="must vary"):
        from_formulas("f =~ a1 + b1\na1 ~~ b1", wellbeing * 0)
