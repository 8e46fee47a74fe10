"""Formulas become graphs, and lines that say something else are named."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import otpdag as otp
from otpdag.interop import by_group, formula_estimates, from_formulas
from otpdag.interop.formulas import givers_and_takers


def test_a_factor_model_finds_its_loadings():
    rng = np.random.default_rng(0)
    factor = rng.normal(size=3000)
    loadings = {"a": 1.5, "b": 1.0, "c": 0.7}
    table = pd.DataFrame({name: 2.0 + load * factor + 0.5 * rng.normal(size=3000) for name, load in loadings.items()})
    model = from_formulas("f =~ a + b + c", std_lv=True)
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
    result = otp.fit(from_formulas(text, gaps, std_lv=True), gaps, seed=0)
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
    assert model.n_parameters == 2 + 2 + 1 + 3
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
        ("f =~ 2k*a + b", "must be a number or a label"),
        ("f =~ a + ", "no name"),
        ("f =~ a + a", "twice"),
        ("a ~ b\nb ~ a", "cycle"),
        ("f ~ x\ng ~ x\nf =~ a + b\ng =~ c + d\nf ~~ g", "factor 'f'"),
        ("a ~~ b + d\nc ~~ b + d\ne ~~ b + d\na ~~ 0*c + 0*e\nc ~~ 0*e\nb ~~ 0*d", "several circles"),
    ],
)
def test_what_is_no_formula_is_named(text, words):
    with pytest.raises(otp.OtpdagError, match=words):
        from_formulas(text)


def test_the_table_must_hold_the_columns(wellbeing):
    with pytest.raises(otp.DataError, match="'a' must be a column"):
        from_formulas("f =~ a + b\na ~~ b", wellbeing)
    with pytest.raises(otp.DataError, match="numbers that vary"):
        from_formulas("f =~ a1 + b1\na1 ~~ b1", wellbeing * 0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_marked_factor_starts_with_the_sign_of_its_mark(wellbeing, seed):
    result = otp.fit(from_formulas(MARKED, wellbeing), wellbeing, seed=seed, restarts=1)
    estimates = formula_estimates(result, MARKED).set_index(["left", "operator", "right"])["estimate"]
    assert result.notes == ()
    assert estimates["g", "=~", "b2"] == pytest.approx(0.9, abs=0.06)
    assert estimates["f", "=~", "a3"] == pytest.approx(0.012, abs=0.001)


# -- lavaan ------------------------------------------------------------------------------------------------------------

THREE_FACTORS = """
visual  =~ x1 + x2 + x3
textual =~ x4 + x5 +
           x6              # a line may go on
speed   =~ x7 + x8 + x9; x1 ~ 1
"""


@pytest.fixture(scope="module")
def pupils():
    """Holzinger and Swineford (1939), as lavaan's tutorial has them."""
    examples = pytest.importorskip("semopy.examples")
    return examples.holzinger39.get_data()[[f"x{i}" for i in range(1, 10)]]


def test_the_tutorial_of_lavaan(pupils):
    """Estimates, standard errors and fit measures as published (lavaan 0.6, tutorial, section 4)."""
    result = otp.fit(from_formulas(THREE_FACTORS, pupils), pupils, seed=0)
    indices = result.fit_indices()
    assert indices is not None
    assert indices.degrees == 24
    assert str(indices).startswith("chi-square 85.306 on 24 degrees of freedom (p 8.5e-09), CFI 0.931")
    found = [indices.chi_square, indices.cfi, indices.tli, indices.rmsea, indices.srmr]
    np.testing.assert_allclose(found, [85.306, 0.931, 0.896, 0.092, 0.065], atol=5.1e-4)
    table = formula_estimates(result, THREE_FACTORS).set_index(["left", "operator", "right"])
    published = {
        ("visual", "=~", "x2"): (0.554, 0.100),
        ("visual", "=~", "x3"): (0.729, 0.109),
        ("textual", "=~", "x5"): (1.113, 0.065),
        ("textual", "=~", "x6"): (0.926, 0.055),
        ("speed", "=~", "x8"): (1.180, 0.165),
        ("speed", "=~", "x9"): (1.082, 0.151),
        ("visual", "~~", "textual"): (0.408, 0.074),
        ("visual", "~~", "speed"): (0.262, 0.056),
        ("textual", "~~", "speed"): (0.173, 0.049),
        ("visual", "~~", "visual"): (0.809, 0.145),
        ("x1", "~~", "x1"): (0.549, 0.114),
    }
    for line, (estimate, error) in published.items():
        assert table.loc[line, "estimate"] == pytest.approx(estimate, abs=5.1e-4)
        assert table.loc[line, "std_error"] == pytest.approx(error, abs=6e-4)
    assert table.loc[("x1", "~1", ""), "estimate"] == pytest.approx(pupils["x1"].mean(), abs=1e-6)
    assert np.isnan(table.loc[("visual", "=~", "x1"), "std_error"])


def test_units_by_variance_change_no_fit(pupils):
    marked, free = (otp.fit(from_formulas(THREE_FACTORS, pupils, std_lv=v), pupils, seed=0) for v in (False, True))
    assert free.loss == pytest.approx(marked.loss, abs=1e-8)
    table = formula_estimates(free, THREE_FACTORS).set_index(["left", "operator", "right"])["estimate"]
    other = formula_estimates(marked, THREE_FACTORS).set_index(["left", "operator", "right"])["estimate"]
    spread = {factor: np.sqrt(other[factor, "~~", factor]) for factor in ("visual", "textual", "speed")}
    for factor in spread:
        assert table[factor, "~~", factor] == pytest.approx(1.0)
    assert table["textual", "=~", "x5"] == pytest.approx(other["textual", "=~", "x5"] * spread["textual"], abs=1e-4)
    correlation = other["textual", "~~", "speed"] / spread["textual"] / spread["speed"]
    assert table["textual", "~~", "speed"] == pytest.approx(correlation, abs=1e-4)
    text = "visual =~ NA*x1 + x2 + x3\ntextual =~ NA*x4 + x5 + x6\nvisual ~~ 4*visual\ntextual ~~ 1*textual"
    given = formula_estimates(otp.fit(from_formulas(text), pupils, seed=0), text).set_index(
        ["left", "operator", "right"]
    )
    assert given.loc[("visual", "~~", "visual"), "estimate"] == pytest.approx(4.0)
    assert np.isnan(given.loc[("visual", "~~", "visual"), "std_error"])


def test_equal_labels_are_equal_numbers(pupils):
    text = "visual =~ x1 + k*x2 + k*x3\nx1 ~~ v*x1\nx2 ~~ v*x2"
    result = otp.fit(from_formulas(text), pupils[["x1", "x2", "x3"]], seed=0)
    table = formula_estimates(result, text).set_index(["left", "operator", "right"])
    assert table.loc[("visual", "=~", "x2"), "estimate"] == table.loc[("visual", "=~", "x3"), "estimate"]
    assert table.loc[("x1", "~~", "x1"), "estimate"] == pytest.approx(table.loc[("x2", "~~", "x2"), "estimate"])
    assert table["label"].tolist().count("k") == 2
    assert result.fit_indices().degrees == 2


def test_what_is_defined_of_coefficients_has_an_error_by_the_delta_method():
    rng = np.random.default_rng(3)
    x = rng.normal(size=400)
    between = 0.5 * x + rng.normal(size=400)
    table = pd.DataFrame({"x": x, "m": between, "y": 0.4 * between + 0.3 * x + rng.normal(size=400)})
    text = "m ~ a*x\ny ~ b*m + c*x\nindirect := a*b\ntotal := c + (a*b)^1"
    found = formula_estimates(otp.fit(from_formulas(text), table, seed=0), text).set_index("left")

    def regression(y, *columns):
        design = np.column_stack([np.ones(400), *columns])
        slopes, rest, *_ = np.linalg.lstsq(design, y, rcond=None)
        return slopes, np.sqrt(rest[0] / 400 * np.diag(np.linalg.inv(design.T @ design)))

    (_, a), (_, a_error) = regression(table["m"], x)
    (_, b, c), (_, b_error, _) = regression(table["y"], table["m"], x)
    assert found.loc["indirect", "estimate"] == pytest.approx(a * b, abs=1e-5)
    assert found.loc["indirect", "std_error"] == pytest.approx(np.hypot(a * b_error, b * a_error), rel=1e-3)
    assert found.loc["total", "estimate"] == pytest.approx(c + a * b, abs=1e-5)


def test_what_nothing_explains_is_correlated_unless_it_is_said_not_to_be(wellbeing):
    columns = wellbeing[["a2", "a3", "b2", "b3"]]
    result = otp.fit(from_formulas("b3 ~ a2 + a3 + b2"), columns, seed=0)
    assert result.fit_indices() is None  # nothing is left to test
    apart = otp.fit(from_formulas("b3 ~ a2 + a3 + b2\na2 ~~ 0*a3"), columns, seed=0)
    assert apart.fit_indices().degrees == 1
    outcomes = from_formulas("b2 ~ a2\nb3 ~ a2", columns)
    assert otp.fit(outcomes, columns[["a2", "b2", "b3"]], seed=0).fit_indices() is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("f =~ a + c(k, l)*b", "says something of 2 groups; there are 1"),
        ("f =~ a + b\ng =~ c + d\ng ~~ 1*g\nf ~~ 1*f", "free its first loading"),
        ("y ~ a*x\nd := a*q", "of labels; there are 'a'"),
        ("y ~ a*x\nd := a*__import__('os')", "must be sums, products"),
        ("y ~ a*x\nd := 1/0", "d := 1/0 must be sums, products"),
        ("y ~ a*x\nd := a*10**400", "must be sums, products"),
        ("y ~ a*x\nd := a*9**9**9**9", "must be sums, products"),
        ("y ~ a*x\nd := a*", "d := a\\* must be sums, products"),
    ],
)
def test_what_cannot_be_said_is_named(text, words):
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(50, 5)), columns=list("xyzwa"))
    with pytest.raises(otp.ModelError, match=words):
        formula_estimates(otp.fit(from_formulas(text, table), table[["x", "y"]], seed=0), text)


def test_slopes_with_one_label_are_equal_beside_others():
    """By least squares, whose scales are those at the estimate."""
    rng = np.random.default_rng(641)
    table = pd.DataFrame(rng.normal(size=(200, 3)), columns=["x", "w", "y"])
    table["y"] += table["x"] + 0.5 * table["w"]
    table["z"] = 3 * rng.normal(size=200) + 0.8 * table["x"] - table["w"]
    text = "y ~ k*x + w\nz ~ k*x + w\ny ~~ 0*z"
    result = otp.fit(from_formulas(text, table), table)
    found = formula_estimates(result, text, errors="information").set_index(["left", "right"])
    assert found.loc[("y", "x"), "estimate"] == found.loc[("z", "x"), "estimate"]
    design = sm.add_constant(table[["x", "w"]]).to_numpy()
    stacked = np.zeros((400, 5))  # the slope of x, then level and slope of w of each
    stacked[:200, [1, 0, 2]] = stacked[200:, [3, 0, 4]] = design
    weight = np.repeat([1 / found.loc[(node, node), "estimate"] for node in "yz"], 200)
    solved = sm.WLS(np.concatenate([table["y"], table["z"]]), stacked, weight).fit(scale=1.0)
    assert found.loc[("y", "x"), "estimate"] == pytest.approx(solved.params[0], abs=1e-6)
    assert found.loc[("z", "w"), "estimate"] == pytest.approx(solved.params[4], abs=1e-6)
    assert found.loc[("y", "x"), "std_error"] == pytest.approx(solved.bse[0], rel=0.01)


LOADINGS = "visual =~ x1 + a*x2 + b*x3\ntextual =~ x4 + c*x5 + d*x6\nspeed =~ x7 + e*x8 + f*x9"
LEVELS = "\n".join(
    [f"x{i} ~ i{i}*1" for i in range(1, 10)] + [f"{f} ~ c(0, NA)*1" for f in ("visual", "textual", "speed")]
)


@pytest.mark.parametrize(
    ("text", "degrees", "chi_square", "aic"),
    [
        (THREE_FACTORS.replace("x1 ~ 1", ""), 48, 115.851, 7484.4),
        (LOADINGS, 54, 124.044, 7480.6),
        (f"{LOADINGS}\n{LEVELS}", 60, 164.103, 7508.6),
    ],
)
def test_groups_are_those_of_lavaan(text, degrees, chi_square, aic):
    """Chi-squares, and what equal loadings and intercepts leave of means, as published (tutorial, section 7)."""
    pupils = (
        pytest.importorskip("semopy.examples")
        .holzinger39.get_data()
        .drop(columns=["id", "sex", "ageyr", "agemo", "grade"])
    )
    pupils["school"] = pd.Categorical(pupils["school"], ["Pasteur", "Grant-White"])
    table = by_group(pupils, "school")
    result = otp.fit(from_formulas(text, pupils, group="school"), table, seed=0)
    indices = result.fit_indices()
    assert indices is not None
    assert indices.degrees == degrees
    assert indices.chi_square == pytest.approx(chi_square, abs=6e-4)
    assert result.model.aic(table) == pytest.approx(aic, abs=0.06)
    if degrees == 48:
        assert (indices.cfi, indices.rmsea) == (pytest.approx(0.923, abs=6e-4), pytest.approx(0.097, abs=6e-4))
    if degrees == 60:
        found = formula_estimates(result, text).set_index(["left", "operator", "right"])
        for line, estimate, error in [
            (("visual[Pasteur]", "=~", "x2[Pasteur]"), 0.576, 0.101),
            (("textual[Grant-White]", "~1", ""), 0.576, 0.117),
            (("speed[Grant-White]", "~1", ""), -0.177, 0.090),
        ]:
            assert found.loc[line, "estimate"] == pytest.approx(estimate, abs=6e-4)
            assert found.loc[line, "std_error"] == pytest.approx(error, abs=6e-4)


def test_groups_apart_and_alike_are_fits_apart_and_of_all():
    """Free numbers are those of two fits, equal ones those of all rows with their own means and variances."""
    rng = np.random.default_rng(642)
    table = pd.DataFrame({"x": rng.normal(size=300), "school": rng.choice(["a", "b"], 300)})
    table["y"] = 1 + table["x"] * np.where(table["school"] == "a", 0.5, 0.7) + rng.normal(size=300)
    wide = by_group(table, "school")
    with pytest.raises(otp.DataError, match=r"column 'x\[a\]' is missing; .*by_group makes a table of groups"):
        otp.fit(from_formulas("y ~ x", table, group="school"), table)
    free = otp.fit(from_formulas("y ~ x", table, group="school"), wide)
    for name, part in table.groupby("school"):
        line = sm.OLS(part["y"], sm.add_constant(part["x"])).fit()
        assert float(free.model.params()[f"y[{name}]"]["weight"][0]) == pytest.approx(line.params["x"], abs=1e-6)
    text = "y ~ k*x\ny ~ l*1\ny ~~ v*y"
    line = sm.OLS(table["y"], sm.add_constant(table["x"])).fit()
    same = formula_estimates(otp.fit(from_formulas(text, table, group="school"), wide), text).set_index(
        ["left", "operator"]
    )
    assert same.loc[("y[a]", "~"), "estimate"] == pytest.approx(line.params["x"], abs=1e-6)
    assert same.loc[("y[b]", "~1"), "estimate"] == pytest.approx(line.params["const"], abs=1e-6)
    assert same.loc[("y[b]", "~~"), "estimate"] == pytest.approx(line.ssr / 300, rel=1e-6)
    assert same.loc[("y[b]", "~"), "std_error"] == pytest.approx(line.bse["x"] * np.sqrt(298 / 300), rel=1e-4)


def test_gaps_in_groups_leave_every_number_its_error():
    """Two free groups are two fits; with loadings in common an error is smaller than that of either."""
    rng = np.random.default_rng(733701)
    factor, table = rng.normal(size=300), pd.DataFrame({"g": rng.choice(["a", "b"], 300)})
    for i, loading in enumerate([1.0, 0.8, 1.2, 0.7]):
        table[f"y{i}"] = loading * factor + 0.6 * rng.normal(size=300)
    table.iloc[:, 1:] = table.iloc[:, 1:].mask(rng.random((300, 4)) < 0.1)
    text, wide = "f =~ y0 + a*y1 + b*y2 + y3", by_group(table, "g")
    found = formula_estimates(otp.fit(from_formulas(text, table, group="g"), wide), text)
    assert found["std_error"].isna().sum() == 2
    free = otp.fit(from_formulas("f =~ y0 + y1 + y2 + y3", table, group="g"), wide).model.log_likelihood(wide)
    apart, errors = 0.0, []
    for _, part in table.groupby("g"):
        result = otp.fit(from_formulas("f =~ y0 + y1 + y2 + y3"), part)
        apart += result.model.log_likelihood(part)
        errors.append(formula_estimates(result, "f =~ y0 + y1 + y2 + y3")["std_error"][1])
    assert free == pytest.approx(apart, abs=1e-6)
    assert found["std_error"][1] == pytest.approx(sum(one**-2 for one in errors) ** -0.5, rel=0.1)


def test_the_mean_of_a_factor_does_not_move_the_given_one_of_another():
    text = "f =~ 1*a + b\ng =~ 1*c + d\na ~ 0*1\nf ~ 1"
    with pytest.raises(otp.ModelError, match="the noise of the factor 'f' cannot be told"):
        from_formulas(text)


def test_a_table_without_groups_is_refused():
    with pytest.raises(otp.DataError, match="group must be a column"):
        by_group({"x": [1.0], "school": [None]}, "school")
    with pytest.raises(otp.ModelError, match="needs data="):
        from_formulas("y ~ x", group="school")
