"""Notes of a fit: what data cannot tell is said, and nothing is said of what they tell."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import otpdag as otp
from otpdag import mechanisms as m

RNG = np.random.default_rng(0)
ROWS = 400
A = RNG.normal(size=ROWS)
Y = A + RNG.normal(size=ROWS)


def notes(edges, mechanisms, table, hidden=(), **options):
    model = otp.Model(otp.Graph(edges, hidden=hidden, nodes=list(mechanisms)), mechanisms)
    return otp.fit(model, table, **options).notes


def normals(names):
    return {name: m.Normal() for name in names}


def test_collinear_parents_and_a_column_that_follows_from_another():
    table = pd.DataFrame({"a": A, "b": 2 * A, "y": Y})
    said = notes([("a", "y"), ("b", "y"), ("a", "b")], normals("aby"), table)
    assert len(said) == 2
    assert said[0].startswith("the scale of 'b' is at its floor, ")
    assert "its parents explain it without error" in said[0]
    assert said[1].startswith("the data do not determine the weight of 'y' on 'a', weight of 'y' on 'b'")


def test_collinear_parents_that_the_graph_makes_independent():
    table = pd.DataFrame({"a": A, "b": 2 * A, "y": Y})
    said = notes([("a", "y"), ("b", "y")], normals("aby"), table)
    assert any(
        one.startswith("the data do not determine the weight of 'y' on 'a', weight of 'y' on 'b'") for one in said
    )
    assert len(said) == 2


@pytest.mark.parametrize("seed", [2, 10])  # of which second derivatives alone do not tell the rotation
def test_a_summary_says_once_what_the_data_do_not_determine(seed):
    rng = np.random.default_rng(seed)
    factors = rng.normal(size=(ROWS, 2)) @ rng.normal(size=(2, 5))
    table = pd.DataFrame(factors + 0.6 * rng.normal(size=(ROWS, 5)), columns=list("vwxyz"))
    graph = otp.Graph([(factor, name) for factor in "fg" for name in table], hidden=["f", "g"])
    summary = otp.fit(otp.Model(graph, normals("fgvwxyz")), table).summary()
    (said,) = summary.warnings
    assert said.startswith("the data do not determine v.weight[f], v.weight[g]")
    marked = summary.table["note"] == "not identified"
    assert list(summary.table.loc[marked, "parameter"].unique()) == ["weight"]
    assert marked.sum() == 10


def test_a_constant_column_leaves_the_errors_of_others():
    table = pd.DataFrame({"a": A, "c": np.full(ROWS, 3.0), "y": Y})
    result = otp.fit(otp.Model(otp.Graph([("a", "y"), ("c", "y")]), normals("acy")), table)
    errors = result.summary().to_frame()["std_error"]
    assert errors["a.loc"] == pytest.approx(A.std() / np.sqrt(ROWS), rel=1e-3)
    assert np.isnan(errors["y.weight[c]"])
    assert result.fit_indices() is None  # no likelihood is best


def test_two_free_factors():
    table = pd.DataFrame(RNG.normal(size=(ROWS, 2)) @ RNG.normal(size=(2, 5)) + 0.6 * RNG.normal(size=(ROWS, 5)))
    table.columns = [f"x{i}" for i in range(5)]
    edges = [(factor, name) for factor in "fg" for name in table]
    heywood, said = notes(edges, normals(["f", "g", *table]), table, ["f", "g"])
    assert "'x4' is at its floor" in heywood  # where the likelihood of these rows is highest
    assert said.startswith("the data do not determine the slopes on 'f', 'g': turned together")


def test_a_factor_of_two_columns_and_a_latent_class_of_two_items():
    table = pd.DataFrame({"a": A, "y": Y})
    (said,) = notes([("f", "a"), ("f", "y")], normals("fay"), table, ["f"])
    assert "weight of 'a' on 'f'" in said or "weight of 'y' on 'f'" in said
    items = pd.DataFrame({"a": (A > 0).astype(int), "y": (Y > 0).astype(int)})
    classes = {"z": m.Categorical(2), "a": m.Categorical(2), "y": m.Categorical(2)}
    (said,) = notes([("z", "a"), ("z", "y")], classes, items, ["z"])
    assert "probs of 'z'" in said
    assert "in 2 ways" in said


def test_a_heywood_case():
    correlations = [[1, 0.8, 0.8], [0.8, 1, 0.5], [0.8, 0.5, 1]]  # a loading of sqrt(0.8 * 0.8 / 0.5) > 1
    rows = np.random.default_rng(1).multivariate_normal(np.zeros(3), correlations, ROWS)
    table = pd.DataFrame(rows, columns=list("abc"))
    (said,) = notes([("f", name) for name in "abc"], normals("fabc"), table, ["f"])
    assert said.startswith("the scale of 'a' is at its floor")
    assert "a Heywood case: 'f' explains it without error" in said


def test_constant_columns():
    table = pd.DataFrame({"a": A, "c": np.full(ROWS, 3.0), "y": Y})
    model = otp.Model(otp.Graph([("a", "y"), ("c", "y")]), normals("acy"))
    result = otp.fit(model, table)
    assert any("column 'c' is constant" in said for said in result.notes)
    assert any("weight of 'y' on 'c'" in said for said in result.notes)
    assert float(model.params()["c"]["scale"]) == pytest.approx(3e-6, rel=0.1)
    kinds = pd.DataFrame({"k": ["only"] * ROWS, "y": Y})
    assert notes([("k", "y")], {"k": m.Categorical(2), "y": m.Normal()}, kinds)[0].startswith("column 'k' is constant")


def test_a_logit_that_separates():
    table = pd.DataFrame({"a": A, "k": (A > 0.2).astype(int)})
    (said,) = notes([("a", "k")], {"a": m.Normal(), "k": m.Categorical(2)}, table)
    assert said.startswith("the parents of 'k' separate some of its categories without error")


@pytest.mark.parametrize("kind", [m.Categorical, m.Ordinal])
def test_categories_of_which_some_are_separated(kind):
    low = np.arange(ROWS) % 2 if kind is m.Categorical else A > -0.2
    table = pd.DataFrame({"a": A, "k": np.where(A > 0.2, 2, low)})
    (said,) = notes([("a", "k")], {"a": m.Normal(), "k": kind(3)}, table)
    assert said.startswith("the parents of 'k' separate some of its categories without error")
    model = otp.Model(otp.Graph([("a", "k")]), {"a": m.Normal(), "k": kind(3, weight=otp.ridge(2.0))})
    result = otp.fit(model, table, progress=False)
    assert result.notes == ()
    assert (result.summary().table["note"] != "not identified").all()


def test_collinear_parents_are_not_taken_for_separation():
    table = pd.DataFrame({"a": A, "b": 2 * A, "k": (A + Y > 0).astype(int)})
    said = notes([("a", "k"), ("b", "k")], {**normals("ab"), "k": m.Categorical(2)}, table)
    assert "weight of 'k' on 'a', weight of 'k' on 'b': moved together" in said[0]


def test_factors_that_can_be_turned():
    rows = np.random.default_rng(3).normal(size=(ROWS, 2)) @ np.random.default_rng(4).normal(size=(2, 6))
    table = pd.DataFrame(rows + np.random.default_rng(5).normal(size=(ROWS, 6)), columns=list("uvwxyz"))
    edges = [(factor, name) for factor in "fg" for name in table]
    free = {name: m.Normal(loc=0.0, scale=1.0) for name in "fg"} | normals("uvwxyz")
    result = otp.fit(otp.Model(otp.Graph(edges, hidden=["f", "g"]), free), table, progress=False)
    (said,) = result.notes
    assert "the slopes on 'f', 'g': turned together (a rotation of factors)" in said
    (told,) = result.summary().warnings
    assert told.startswith("the data do not determine u.weight[f], u.weight[g]")
    assert "(a rotation of factors)" in told
    fixed = free | {"u": m.Normal(weight=[float("nan"), 0.0])}  # as the note says
    assert notes(edges, fixed, table, ["f", "g"]) == ()


def test_roots_of_breast_cancer_that_the_graph_makes_independent():
    datasets = pytest.importorskip("sklearn.datasets")
    table = datasets.load_breast_cancer(as_frame=True).frame[["mean radius", "mean texture", "target"]]
    edges = [("mean radius", "target"), ("mean texture", "target")]
    model = otp.Model.from_frame(otp.Graph(edges), table)
    result = otp.fit(model, table)
    (said,) = result.notes
    assert said.startswith("'mean radius' and 'mean texture' are independent by the graph, but correlated in the data")
    joined = otp.Graph([*edges, ("mean radius", "mean texture")])
    assert otp.fit(otp.Model.from_frame(joined, table), table).notes == ()


def test_scales_do_not_collapse_on_the_rounded_answers_of_anes96():
    datasets = pytest.importorskip("statsmodels.datasets")
    table = datasets.anes96.load_pandas().data[["PID", "selfLR", "ClinLR", "vote", "age"]]
    model = otp.Model(
        otp.Graph([("z", name) for name in table], hidden=["z"]), {"z": m.Categorical(4), **normals(table)}
    )
    result = otp.fit(model, table, seed=0, restarts=6)
    scales = {name: model.params()[name]["scale"] for name in table}
    assert scales["vote"].min() >= 0.12  # a quarter of the spread of a column of zeros and ones
    assert min(scales[name].min() for name in ("PID", "selfLR", "ClinLR", "age")) >= 0.288  # the spread of rounding
    assert any(said.startswith("the scale of 'vote' where z = ") for said in result.notes)


def test_a_good_model_has_no_notes():
    kind = RNG.integers(0, 3, ROWS)
    table = pd.DataFrame(
        {
            "x": np.array([-3.0, 0.0, 3.0])[kind] + RNG.normal(size=ROWS),
            "y": RNG.poisson(np.array([2.0, 5.0, 9.0])[kind]),
            "k": np.where(RNG.random(ROWS) < 0.8, kind, RNG.integers(0, 3, ROWS)),
        }
    ).mask(RNG.random((ROWS, 3)) < 0.1)
    mechanisms = {"z": m.Categorical(3), "x": m.Normal(), "y": m.Poisson(), "k": m.Categorical(3)}
    assert notes([("z", "x"), ("z", "y"), ("z", "k")], mechanisms, table, ["z"], restarts=4) == ()


def test_correlations_that_the_graph_denies_are_those_of_numpy_the_largest_first():
    """Of scores cut at three, over the rows that show both; counts lie in the middle of what makes them."""
    rng = np.random.default_rng(5)
    common = rng.normal(size=500)
    slopes = dict(zip("abcdef", (1.2, 0.9, 0.7, 0.5, 0.3, 0.12), strict=True))
    table = pd.DataFrame({name: slope * common + rng.normal(size=500) for name, slope in slopes.items()})
    table["n"] = rng.poisson(np.exp(1.0 + 0.3 * common))
    table = table.mask(rng.random(table.shape) < 0.1)
    table.loc[3, "a"], weights = 40.0, rng.uniform(0.5, 2.0, 500)
    weights *= 500 / weights.sum()
    said = notes([], {**normals("abcdef"), "n": m.Poisson()}, table, weights=weights)
    mean = {name: np.average(own.dropna(), weights=weights[own.notna()]) for name, own in table.items()}
    spread = {n: np.average((own.dropna() - mean[n]) ** 2, weights=weights[own.notna()]) for n, own in table.items()}
    scores = (table - pd.Series(mean)) / np.sqrt(pd.Series(spread))
    scores["n"] = stats.norm.ppf(
        stats.poisson.cdf(table["n"] - 1, mean["n"]) / 2 + stats.poisson.cdf(table["n"], mean["n"]) / 2
    )
    scores["n"] = scores["n"].where(table["n"].notna())
    scores, found = scores.clip(-3, 3), {}
    for one, other in combinations(table, 2):
        both = scores[[one, other]].notna().all(axis=1).to_numpy()
        covariance = np.cov(scores.loc[both, [one, other]].T, aweights=weights[both])
        by = covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1])
        if abs(by) > max(0.15, 5 / np.sqrt(weights[both].sum())):
            found[one, other] = by
    largest = sorted(found.items(), key=lambda pair: -abs(pair[1]))[:5]
    assert [one[: one.index(")") + 1] for one in said[:5]] == [
        f"{one!r} and {other!r} are independent by the graph, but correlated in the data ({by:.2f})"
        for (one, other), by in largest
    ]
    assert said[5:] == (f"{len(found) - 5} more pairs of nodes are correlated against the graph",)
    assert 5 < len(found) < 21


@pytest.mark.parametrize(("correlation", "said"), [(0.13, False), (0.17, True)])
def test_of_many_rows_a_small_correlation_is_not_worth_a_note(correlation, said):
    rng = np.random.default_rng(9)
    whole = np.linalg.qr(rng.normal(size=(4000, 2)))[0]  # at right angles, and nearly with mean zero
    table = pd.DataFrame({"a": whole[:, 0], "b": correlation * whole[:, 0] + np.sqrt(1 - correlation**2) * whole[:, 1]})
    assert table.corr().iloc[0, 1] == pytest.approx(correlation, abs=0.01)
    assert bool(notes([], normals("ab"), 1000 * table)) == said


def test_noise_that_is_correlated_beyond_parents_is_told_and_parents_are_not():
    rng = np.random.default_rng(6)
    x, common = rng.normal(size=600), rng.normal(size=600)
    table = pd.DataFrame({"x": x, "y": x + common + rng.normal(size=600)})
    table["k"] = np.where(common + 0.5 * rng.normal(size=600) > 0, "up", np.where(rng.random(600) < 0.5, "low", "mid"))
    nodes = {"x": m.Normal(), "y": m.Normal(), "k": m.Categorical(3)}
    (said,) = notes([("x", "y")], nodes, table)
    residual = table["y"] - np.polyval(np.polyfit(x, table["y"], 1), x)
    by = max(
        (np.corrcoef((residual / residual.std(ddof=0)).clip(-3, 3), table["k"] == one)[0, 1] for one in ("mid", "up")),
        key=abs,
    )
    told, by_graph = said.split(f" is independent by the graph, but correlated in the data ({by:.2f})")
    assert told in ("the noise of 'y' and of 'k'", "the noise of 'k' and of 'y'")
    assert by_graph.endswith("An edge or a common parent is missing")


def test_scales_and_slopes_are_named_by_the_categories_and_columns_that_users_know():
    rng = np.random.default_rng(7)
    table = pd.DataFrame(
        {"a": np.repeat(["cold", "hot"], 60), "b": np.tile(["x", "y", "z"], 40), "u": rng.normal(size=120)}
    )
    table["w"] = 3.0 * table["u"]
    level = table["a"].map({"cold": 0.0, "hot": 2.0}) + table["b"].map({"x": 0.0, "y": 5.0, "z": 9.0})
    still = (table["a"] == "hot") & (table["b"] == "y")
    table["v"] = level + np.where(still, 0.0, rng.normal(size=120))
    table["t"] = table["u"] + rng.normal(size=120)
    nodes = {"a": m.Categorical(2), "b": m.Categorical(3), **normals("uwvt")}
    said = notes([("a", "v"), ("b", "v"), ("u", "t"), ("w", "t"), ("u", "w")], nodes, table)
    linear, floor, slopes = said
    assert floor.startswith("the scale of 'v' where a = hot, b = y is at its floor, ")
    assert floor.endswith(": its rows there are as good as equal. floor= of its mechanism sets another")
    assert linear.startswith("the scale of 'w' is at its floor, ")
    assert "the weight of 't' on 'u', weight of 't' on 'w': moved together, they leave" in slopes


@pytest.mark.parametrize(("rows", "said"), [(89, True), (90, False)])
def test_tables_that_rows_cannot_fill_are_named_with_the_terms_that_say_less(rows, said):
    rng = np.random.default_rng(8)
    table = pd.DataFrame(
        {
            "a b": rng.choice(["x", "y", "z"], rows),
            "s": rng.integers(1, 4, rows),
            "t": rng.choice([False, True], rows),
            "y": rng.choice(["no", "yes"], rows),
        }
    )
    graph = otp.Graph([(name, "y") for name in table.columns[:3]])
    sizes = {"a b": 3, "s": 3, "t": 2, "y": 2}
    result = otp.fit(otp.Model(graph, {name: m.Categorical(size) for name, size in sizes.items()}), table)
    wanted = (
        f"'y' has a table with a row for each of 18 joint states of its parents, from {rows} rows of data: most are "
        "told by few or none. terms='C(`a b`) + scores(s) + C(t)', weight=otp.ridge(2.0) has an effect of each parent "
        "instead"
    )
    assert any(one.startswith(wanted) for one in result.notes) == said
    assert ("pseudo-counts: 89 rows on y.probs" in result.summary().facts.get("priors", "")) == said


def test_what_no_row_tells_of_a_category_is_named_with_it():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"c": pd.Categorical(["a"] * 40, ["a", "b"]), "y": rng.normal(size=40)})
    model = otp.Model(otp.Graph([("c", "y")]), {"c": m.Categorical(2), "y": m.Normal()})
    notes = " ".join(otp.fit(model, table).notes)
    assert "the data do not determine the" in notes
    assert "loc of 'y' where c = b" in notes
    assert "where c = a" not in notes
