"""What is wrong is refused by an error of the library, and nothing is silently taken for something else."""

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from benchmarks.bad_calls import bad_calls, damaged_folders, raw_error
from otpdag import interop
from otpdag import mechanisms as m

GRAPH = otp.Graph([("a", "b")])
BIF = """network n { }
variable a { type discrete [ 2 ] { no, yes }; }
variable b { type discrete [ 2 ] { no, yes }; }
probability ( a ) { table 0.8, 0.2; }
probability ( b | a ) { (no) 0.9, 0.1; (yes) 0.0, 1.0; }
"""


def test_wrong_arguments_raise_no_raw_error():
    calls = list(bad_calls())
    assert len(calls) > 800
    assert [error for call in calls[::4] if (error := raw_error(call)) is not None] == []


def test_a_damaged_folder_of_a_run_is_no_bug():
    assert [error for call in damaged_folders(3, 12) if (error := raw_error(call)) is not None] == []


def test_weights_go_with_the_rows_that_their_index_names():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"x": rng.normal(size=50)}, index=rng.permutation(50))
    weights = pd.Series(rng.uniform(1, 5, 50), index=table.index)
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    for given in (weights, weights.sort_index(), weights.to_numpy()):
        otp.fit(model, table, weights=given)
        expected = np.average(table["x"], weights=weights)
        assert float(model.params()["x"]["loc"]) == pytest.approx(expected, abs=1e-6)
    with pytest.raises(otp.DataError, match="weights must have the index of the table"):
        otp.fit(model, table, weights=weights.set_axis(range(1, 51)))


def test_truth_values_and_numbers_are_not_one_category():
    table = pd.DataFrame({"k": pd.Series([1, True, 0, "a"] * 5, dtype=object)})
    with pytest.raises(otp.DataError, match="column 'k' holds truth values and numbers"):
        otp.fit(otp.Model(otp.Graph([], nodes=["k"]), {"k": m.Categorical(3)}), table)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "probability ( a ) {",
            "probability ( a ) { table 0.5, 0.5; }\nprobability ( a ) {",
            "two `probability` blocks",
        ),
        ("variable b", "variable a { type discrete [ 2 ] { x, y }; }\nvariable b", "two `variable` blocks of 'a'"),
        ("{ no, yes }", "{ no, no }", "declares 2 different states; got 1"),
        ("( b | a )", "( b | a, a )", "names a node twice"),
        (
            "(yes) 0.0, 1.0;",
            "(yes) 0.0, 1.0; (no) 0.2, 0.8;",
            "the table of 'b' must give every row once; got '[(] no',",
        ),
        ("(yes) 0.0, 1.0;", "default 0.0, 1.0; default 0.5, 0.5;", "the table of 'b' must give every row once"),
        ("(yes) 0.0, 1.0;", "table 0.9, 0.0, 0.1, 1.0;", "the table of 'b' must give every row once"),
        ("table 0.8, 0.2", "table 1.5, -0.5", "hold no number below 0"),
    ],
)
def test_a_network_that_says_two_things_is_refused(tmp_path, old, new, message):
    path = tmp_path / "net.bif"
    path.write_text(BIF)
    assert interop.from_bif(path).params()["a"]["probs"].tolist() == [0.8, 0.2]
    path.write_text(BIF.replace(old, new, 1))
    with pytest.raises(otp.DataError, match=message):
        interop.from_bif(path)


def test_tables_that_are_too_large_are_refused_before_they_are_laid_out(tmp_path):
    states = ", ".join(f"s{n}" for n in range(10))
    names = [f"p{n}" for n in range(12)]
    blocks = [f"variable {name} {{ type discrete [ 10 ] {{ {states} }}; }}" for name in (*names, "x")]
    even = ", ".join(["0.1"] * 10)
    blocks += [f"probability ( {name} ) {{ table {even}; }}" for name in names]
    blocks += [f"probability ( x | {', '.join(names)} ) {{ default {even}; }}"]
    path = tmp_path / "bomb.bif"
    path.write_text("\n".join(blocks))
    with pytest.raises(otp.DataError, match="10,000,000,000,120 numbers; at most 4,194,304"):
        interop.from_bif(path)
    graph = otp.Graph([(name, "x") for name in names])
    for child in (m.Categorical(10), m.Normal()):
        with pytest.raises(otp.ModelError, match="a table over its discrete parents needs 1000000000000 rows"):
            otp.Model(graph, {name: m.Categorical(10) for name in names} | {"x": child})
    with pytest.raises(otp.ModelError, match="node 'b' has 25,000,000 parameters, with a set for each joint state"):
        otp.Model(otp.Graph([("a", "b")]), {"a": m.Categorical(5000), "b": m.Categorical(5000)})


def test_probabilities_that_are_none_are_not_mended():
    class Hmm:
        n_components = 2
        startprob_ = np.array([-0.5, 1.5])
        transmat_ = np.full((2, 2), 0.5)
        lambdas_ = np.ones((2, 1))

    with pytest.raises(otp.ModelError, match="probabilities must be 0 or more and sum to 1"):
        interop.from_hmmlearn(Hmm())


def test_a_table_of_many_levels_is_the_cross_table():
    rng = np.random.default_rng(1)
    levels = 150
    a, b = (np.concatenate([np.arange(levels), rng.integers(0, levels, 2000)]).astype(str) for _ in range(2))
    table = pd.DataFrame({"a": a, "b": b})
    model = otp.Model(otp.Graph([("a", "b")]), {"a": m.Categorical(levels), "b": m.Categorical(levels)})
    assert otp.fit(model, table).status.converged
    expected = pd.crosstab(table["a"], table["b"], normalize="index").to_numpy()
    np.testing.assert_allclose(model.params()["b"]["probs"], expected, atol=1e-3)


def test_masked_cells_are_missing_ones():
    rng = np.random.default_rng(1)
    x, k = rng.normal(size=40), np.array(["a", "b"] * 20)
    x[:4], masked = 50.0, np.arange(40) < 4
    model = otp.Model(otp.Graph([("k", "x")]), {"k": m.Categorical(2), "x": m.Normal()})
    otp.fit(model, {"x": np.ma.masked_array(x, mask=masked), "k": np.ma.masked_array(k, mask=masked)})
    for place, level in enumerate("ab"):
        assert model.params()["x"]["loc"][place] == pytest.approx(x[~masked & (k == level)].mean(), abs=1e-6)


def test_data_that_tell_nothing_are_refused():
    ones = np.random.default_rng(2).normal(size=(30, 2))
    lagged = otp.Model(otp.Graph([otp.lag("x", "x", 2)]), {"x": m.Normal()})
    with pytest.raises(otp.DataError, match="'x' depends on 2 steps before, and no sequence is longer than 2"):
        otp.fit(lagged, ones)
    counts = otp.Model(otp.Graph([], nodes=["n"]), {"n": m.Poisson()})
    with pytest.raises(otp.DataError, match="at most 7e10; found 1e"):
        otp.fit(counts, pd.DataFrame({"n": [10**15, 2, 3, 4]}))


def test_what_no_memory_holds_is_refused_before_it_is_laid_out():
    model = otp.Model(otp.Graph([("k", "x")]), {"k": m.Categorical(3000), "x": m.Bernoulli()})
    table = pd.DataFrame({"k": np.arange(200_000) % 3000, "x": np.arange(200_000) % 2})
    with pytest.raises(otp.DataError, match=r"'k' has 3000 categories in 200000 rows.* put rare categories together"):
        otp.fit(model, table)
    small = otp.Model(GRAPH, {"a": m.Normal(), "b": m.Normal()})
    small.set_params({"a": {"loc": 0.0, "scale": 1.0}, "b": {"loc": 0.0, "weight": [1.0], "scale": 1.0}})
    with pytest.raises(otp.ModelError, match=r"at most 2\^31 cells"):
        small.sample(10**12, seed=0)


@pytest.mark.parametrize("path", ["a" * 300, "folder/" + "ü" * 200])
def test_names_that_no_file_has_are_refused(path):
    table = pd.DataFrame({"a": np.arange(9.0) % 4, "b": np.arange(9.0) % 5})
    with pytest.raises(otp.DataError, match="text that a file can be called"):
        otp.fit(otp.Model(GRAPH, {"a": m.Normal(), "b": m.Normal()}), table, checkpoint=path)


def test_each_level_of_a_large_category_has_its_own_mean():
    """Rows of a table of means are looked up where they are many: groups of a table are the outside truth."""
    rng = np.random.default_rng(3)
    k = np.concatenate([np.arange(300), rng.integers(0, 300, 1500)])
    table = pd.DataFrame({"k": k, "x": rng.normal(np.sin(k))})
    model = otp.Model(otp.Graph([("k", "x")]), {"k": m.Categorical(300), "x": m.Normal(scale=1.0)})
    otp.fit(model, table)
    np.testing.assert_allclose(model.params()["x"]["loc"], table.groupby("k")["x"].mean(), atol=1e-3)
