"""Notes of a fit: what data cannot tell is said, and nothing is said of what they tell."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

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
    assert said.startswith("the data do not determine the weight of 'x")
    assert "moved together, they leave the likelihood as it is" in said


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
    assert said.startswith("the parents of 'k' separate its categories without error")


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
