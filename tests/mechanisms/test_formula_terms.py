"""Terms of formulas: estimates and errors beside statsmodels, columns beside formulaic, files, gaps and refusals."""

import math
import re

import formulaic
import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
import torch
from scipy.interpolate import CubicSpline
from statsmodels.genmod.families import Binomial

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.cli.model_file import parse_model_file
from otpdag.errors import ModelError
from otpdag.mechanisms.terms import Terms, natural_spline, roughness
from otpdag.spaces import Discrete, Real
from otpdag.testing import check_mechanism

ROWS = 400
NODES = {"load": m.Normal(), "time": m.LogNormal(), "season": m.Categorical(3), "town": m.Categorical(2)}
FAMILY = m.Family("x", (("load", Real()), ("season", Discrete(3)), ("town", Discrete(2))))


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    rng = np.random.default_rng(71)
    load, season, town = rng.normal(5, 2, ROWS), rng.integers(0, 3, ROWS), rng.integers(0, 2, ROWS)
    time = rng.lognormal(0, 0.5, ROWS)
    line = 0.3 * load + 0.8 * (season == 1) + 0.4 * load * (season == 2)
    columns = {
        "load": load,
        "time": time,
        "season": np.array(["dry", "mild", "wet"])[season],
        "town": np.array(["n", "s"])[town],
        "price": 1 + line + town + rng.normal(size=ROWS),
        "count": rng.poisson(time * np.exp(0.3 * line)),
        "won": (rng.random(ROWS) < 1 / (1 + np.exp(2 - line))).astype(int),
    }
    return pd.DataFrame(columns)


def fitted(table: pd.DataFrame, node: str, mechanism: m.Mechanism, *parents: str) -> otp.FitResult:
    graph = otp.Graph([(parent, node) for parent in parents])
    model = otp.Model(graph, {**{parent: NODES[parent] for parent in parents}, node: mechanism})
    return otp.fit(model, table[[*parents, node]])


@pytest.mark.parametrize(
    ("mechanism", "formula", "parents"),
    [
        (m.Normal, "price ~ load * C(season) + C(town)", "load season town"),
        (m.Normal, "price ~ load + I(load ** 2) + C(season) * C(town)", "load season town"),
        (m.Normal, "price ~ 0 + C(season) + load:C(season)", "load season"),
        (m.Poisson, "count ~ load * C(season)", "load season time"),
        (m.Bernoulli, "won ~ load + C(season)", "load season"),
        (m.Bernoulli, "won ~ load + C(season)", "load season time"),
    ],
)
def test_estimates_and_errors_are_those_of_statsmodels(table, mechanism, formula, parents):
    node = formula.split()[0]
    exposed = " + offset(log(time))" if "time" in parents else ""
    result = fitted(table, node, mechanism(terms=formula + exposed), *parents.split())
    match mechanism:
        case m.Normal:
            other = smf.ols(formula, table).fit()
        case m.Poisson:
            other = smf.poisson(formula, table, offset=np.log(table["time"])).fit(disp=0, tol=1e-10)
        case _:
            known = np.log(table["time"]) if exposed else None
            other = smf.glm(formula, table, family=Binomial(), offset=known).fit(tol=1e-12)
    names = [re.sub(r"C\((\w+)\)\[(?:T\.)?(\w+)\]", r"\1=\2", name) for name in other.params.index]
    own = result.standard_errors().query("node == @node and parameter != 'scale' and note != 'reference'")
    own = own[own["std_error"].notna()]
    own = own.set_index(own["at"].str.replace(r"(, )?\b1$", "", regex=True))
    own = own.loc[["" if name == "Intercept" else name for name in names]]
    np.testing.assert_allclose(own["estimate"], other.params, rtol=1e-4, atol=1e-6)
    freedom = np.sqrt(other.df_resid / ROWS) if mechanism is m.Normal else 1.0  # ours is the maximum of the likelihood
    np.testing.assert_allclose(own["std_error"], other.bse * freedom, rtol=1e-4)


@pytest.mark.parametrize(
    "formula",
    ["load * season", "season:town", "0 + season", "load:season", "season + season:town", "(load + season + town)**2"],
)
def test_columns_span_what_formulaic_spans(table, formula):
    named = tuple(parent for parent in FAMILY.parents if parent[0] in formula)
    terms = Terms.read(formula, m.Family("x", named))
    parents = {
        "load": torch.tensor(table[["load"]].to_numpy()),
        **{name: torch.tensor(pd.get_dummies(table[name]).to_numpy(float)) for name in ("season", "town")},
    }
    ours = terms(parents).numpy()
    ours = np.column_stack([np.ones(ROWS), ours]) if terms.has_intercept else ours
    theirs = formulaic.model_matrix(formula, table).to_numpy(float)
    assert np.linalg.matrix_rank(ours) == ours.shape[1] == theirs.shape[1] == len(terms.features) + terms.has_intercept
    assert np.linalg.matrix_rank(np.column_stack([ours, theirs])) == ours.shape[1]


def test_gaps_are_summed_over_as_by_a_table_that_says_the_same(table):
    """Where a term for each configuration is a table, the likelihood with gaps is the table's."""
    rng = np.random.default_rng(3)
    gaps = table.mask(rng.random(table.shape) < 0.2)
    by_terms = fitted(gaps, "price", m.Normal(terms="load + season * town"), "load", "season", "town")
    by_table = fitted(gaps, "price", m.Normal(shared_scale=True), "load", "season", "town")
    facts = by_terms.summary(errors="none").facts, by_table.summary(errors="none").facts
    assert facts[0]["log-likelihood"] == pytest.approx(facts[1]["log-likelihood"], abs=1e-4)
    assert facts[0]["parameters"] == facts[1]["parameters"]


def test_curves_pass_through_gaps_and_files(table, tmp_path):
    gaps = table.copy()
    gaps.loc[::5, "load"] = np.nan
    gaps["price"] = np.sin(table["load"]) + 0.1 * np.random.default_rng(1).normal(size=ROWS)
    result = fitted(gaps, "price", m.Normal(terms="spline(load, 8)"), "load")
    result.model.save(tmp_path / "model.otp")
    again = otp.load(tmp_path / "model.otp")
    at = pd.DataFrame({"load": np.linspace(2, 8, 7)})
    for model in (result.model, again):
        mechanism = model.structure.mechanisms["price"]
        params = model.fitted.naturals["price"]
        curve = mechanism.mean(params, {"load": torch.tensor(at.to_numpy())[None]})[0, :, 0].numpy()
        np.testing.assert_allclose(curve, np.sin(at["load"]), atol=0.12)


def test_natural_splines_are_smooth_and_straight_beyond_their_knots():
    knots = torch.tensor([0.0, 1.0, 3.0, 4.0], dtype=torch.float64)
    at = torch.linspace(-3, 7, 1001, dtype=torch.float64).unsqueeze(-1)
    second = natural_spline(at, knots).diff(n=2, dim=0) / 0.01**2
    outside = (at[1:-1, 0] < -0.02) | (at[1:-1, 0] > 4.02)
    assert float(second[outside].abs().max()) < 1e-6
    assert float(second.diff(dim=0).abs().max()) < 0.2


@pytest.mark.parametrize("seed", range(3))
def test_splines_are_those_of_scipy_and_bend_as_much_as_they_say(seed):
    rng = np.random.default_rng(seed)
    knots = np.sort(rng.uniform(-3, 8, 4 + seed))
    first, width = knots[0], knots[-1] - knots[0]
    at = np.linspace(first - width, first + 2 * width, 4001)
    found, at_knots = (
        natural_spline(torch.as_tensor(one).unsqueeze(-1), torch.as_tensor(knots)).numpy() for one in (at, knots)
    )
    np.testing.assert_allclose(found[:, 0], (at - first) / width)
    np.testing.assert_allclose(at_knots[:, 1:].T @ at_knots[:, 1:] / len(knots), np.eye(len(knots) - 2), atol=1e-9)
    assert (at_knots[-1, 1:] > 0).all()
    expected = CubicSpline((knots - first) / width, at_knots, bc_type="natural")
    scaled = (at - first) / width
    inside = (scaled >= 0) & (scaled <= 1)
    np.testing.assert_allclose(found[inside], expected(scaled[inside]), atol=1e-9)
    for end, side in ((0.0, scaled < 0), (1.0, scaled > 1)):  # straight lines go on
        line = expected(end) + np.outer(scaled[side] - end, expected(end, 1))
        np.testing.assert_allclose(found[side], line, atol=1e-9)
    places = np.linspace(0, 1, 20_001)
    bends = expected(places, 2)
    products = np.trapezoid(bends[:, :, None] * bends[:, None], places, axis=0)
    np.testing.assert_allclose(roughness(torch.as_tensor(knots)), products, rtol=1e-4, atol=1e-3 * products.max())


def test_model_files_have_terms(table):
    text = """
    edges: [[load, price], [season, price]]
    nodes:
      price: {type: Normal, terms: "load * C(season)"}
    """
    model = parse_model_file(text).build(table[["load", "season", "price"]])
    result = otp.fit(model, table[["load", "season", "price"]])
    named = result.standard_errors().query("parameter == 'weight'")["at"].tolist()
    assert named == ["load", "season=mild", "season=wet", "load:season=mild", "load:season=wet"]


@pytest.mark.parametrize("kind", [m.Normal, m.Poisson, m.Gamma, m.StudentT, m.Bernoulli])
def test_a_node_with_terms_keeps_the_contract(kind):
    check_mechanism(kind(terms="load * season + I(load ** 2) + scores(town)"), FAMILY)


@pytest.mark.parametrize(
    ("terms", "match"),
    [
        ("load + season", "'town' are in none of its terms"),
        ("load + season + town + wind", "'wind' in its terms is no number"),
        ("load + season + town + log(season)", "'season' in its terms is no number"),
        ("load + season + town + exit(load)", "in its terms is no number"),
        ("load + season + town +", "must be a formula"),
        ("y ~ load + season + town", "on the left of a formula must stand 'x'"),
        ("season + town + load:offset(load)", "an offset stands for itself"),
    ],
)
def test_what_is_no_term_is_refused_by_name(terms, match):
    with pytest.raises(ModelError, match=match):
        m.Normal(terms=terms).setup(FAMILY)


def test_a_table_that_rows_cannot_tell_is_named_with_what_to_write():
    rng = np.random.default_rng(5)
    rows = pd.DataFrame({"a": rng.integers(1, 8, 300), "b": rng.choice(list("uvwxyz"), 300), "c": rng.normal(size=300)})
    rows["y"] = (rng.random(300) < 1 / (1 + np.exp(4.0 - rows["a"]))).astype(int)
    graph = otp.Graph([("a", "y"), ("b", "y"), ("c", "y")])
    nodes = {"a": m.Categorical(7), "b": m.Categorical(6), "c": m.Normal()}
    full = otp.fit(otp.Model(graph, {**nodes, "y": m.Bernoulli()}), rows)
    assert not any("joint states" in note for note in full.notes)
    few = otp.fit(otp.Model(graph, {**nodes, "y": m.Bernoulli()}), rows.iloc[:200])
    assert any("42 joint states" in note and "terms='scores(a) + C(b) + c'" in note for note in few.notes)
    less = otp.fit(otp.Model(graph, {**nodes, "y": m.Bernoulli(terms="scores(a) + C(b) + c")}), rows.iloc[:200])
    assert not any("joint states" in note for note in less.notes)


def test_a_curve_has_at_most_a_hundred_pieces():
    m.Normal(terms="spline(load, 100) + season + town").setup(FAMILY)
    with pytest.raises(ModelError, match="'spline\\(load, 101\\)' in its terms is no number"):
        m.Normal(terms="spline(load, 101) + season + town").setup(FAMILY)


def test_functions_of_numbers_are_numbers_and_bare_functions_are_refused():
    family = m.Family("y", (("x", Real()),))
    parents = {"x": torch.tensor([[[3.0]]])}
    torch.testing.assert_close(Terms.read("I(log(2) * x)", family)(parents), torch.tensor([[[3.0 * math.log(2)]]]))
    with pytest.raises(ModelError, match="'exp' in its terms is no number"):
        Terms.read("I(x * exp)", family)


def test_terms_of_a_vector_are_a_regression_of_each_coordinate():
    rng = np.random.default_rng(4)
    x, g = rng.normal(5.0, 2.0, 150), rng.integers(0, 2, 150)
    v = np.stack([1 + x + g * x, 3 - 2 * x + 0.5 * g], 1) + rng.normal(size=(150, 2))
    nodes = {"x": m.Normal(), "g": m.Categorical(2), "v": m.Normal(2, terms="x * g")}
    model = otp.Model(otp.Graph([("x", "v"), ("g", "v")]), nodes)
    otp.fit(model, {"x": x, "g": g, "v": v})
    columns, own = np.stack([np.ones(150), x, g, x * g], 1), model.params()["v"]
    expected = np.linalg.lstsq(columns, v, rcond=None)[0]
    np.testing.assert_allclose(np.vstack([own["loc"], own["weight"]]), expected, rtol=1e-5)
    np.testing.assert_allclose(own["scale"], (v - columns @ expected).std(0), rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(load + season)**60 + town", "written out it may have more than 10000 terms"),
        ("load" + "".join(f" * I(load + {n})" for n in range(40)), "written out it may have more than 10000 terms"),
        ("((load + town)**9)**9", "written out it may have more than 10000 terms"),
        ("load + season | town", "a formula has one part here"),
        ("I(load + 1/0)", "is no number that its parents"),
        ("I(load * 9**9**9**9)", "is no number that its parents"),
        ("I(load + (-8)**0.5)", "is no number that its parents"),
        ("I(" + "load + " * 3000 + "load)", "maximum recursion depth"),
    ],
)
def test_formulas_without_end_are_refused_at_once(text, message):
    with pytest.raises(ModelError, match=message):
        Terms.read(text, FAMILY)
