"""Slopes that single entries tie: estimates and errors beside statsmodels, whatever sums the rows, files, refusals."""

import math

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from scipy.optimize import minimize_scalar
from scipy.stats import chi2

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.interop import by_group

GRAPH = otp.Graph([("x", "y"), ("z", "y"), ("x", "w"), ("z", "w")])
TIED = [otp.tie("k"), math.nan]


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    rng = np.random.default_rng(4455)
    x, z = rng.normal(3, 1, 300), rng.normal(2, 3, 300)
    columns = {"y": rng.poisson(np.exp(-1 + 0.5 * x - 0.1 * z)), "w": rng.poisson(np.exp(-1.5 + 0.5 * x + 0.2 * z))}
    return pd.DataFrame({"x": x, "z": z, **columns})


def model(kind: type[m.Mechanism], **weights: object) -> otp.Model:
    nodes = {name: kind(weight=weights.get(name)) for name in "yw"}  # type: ignore[call-arg]
    return otp.Model(GRAPH, {"x": m.Normal(), "z": m.Normal(), **nodes})


def test_equal_slopes_of_counts_are_those_of_one_regression(table):
    result = otp.fit(model(m.Poisson, y=TIED, w=TIED), table)
    design = np.zeros((600, 5))
    design[:300, :3] = sm.add_constant(table[["x", "z"]])
    design[300:, [3, 1, 4]] = sm.add_constant(table[["x", "z"]])
    other = sm.GLM(np.concatenate([table["y"], table["w"]]), design, family=sm.families.Poisson()).fit(tol=1e-12)
    found = result.standard_errors().set_index(["node", "at"])
    for node, at, place in [("y", "x", 1), ("w", "x", 1), ("y", "z", 2), ("w", "z", 4), ("y", "", 0), ("w", "", 3)]:
        assert found.loc[(node, at), "estimate"] == pytest.approx(other.params[place], abs=1e-5)
        assert found.loc[(node, at), "std_error"] == pytest.approx(other.bse[place], rel=1e-4)
    free = otp.fit(model(m.Poisson), table)
    assert free.model.n_parameters == result.model.n_parameters + 1
    assert free.model.log_likelihood(table) > result.model.log_likelihood(table)


def test_equal_slopes_of_normal_nodes_are_weighted_least_squares(table):
    """Of normal nodes by moments; also where one of two ties is a whole parameter."""
    numbers = table.assign(w=3.0 * table["w"])
    result = otp.fit(model(m.Normal, y=TIED, w=TIED), numbers)
    params = result.model.params()
    assert params["y"]["weight"][0] == params["w"]["weight"][0]
    design = np.zeros((600, 5))
    design[:300, :3] = sm.add_constant(table[["x", "z"]])
    design[300:, [3, 1, 4]] = sm.add_constant(table[["x", "z"]])
    weight = np.repeat([1 / float(params[node]["scale"]) ** 2 for node in "yw"], 300)
    other = sm.WLS(np.concatenate([numbers["y"], numbers["w"]]), design, weight).fit()
    np.testing.assert_allclose(params["y"]["weight"], other.params[1:3], atol=1e-5)
    np.testing.assert_allclose(params["w"]["weight"], other.params[[1, 4]], atol=1e-5)
    mixed = {"y": m.Normal(weight=otp.tie("k")), "w": m.Normal(weight=TIED), "x": m.Normal(), "z": m.Normal()}
    graph = otp.Graph([("x", "y"), ("x", "w"), ("z", "w")])
    mixed_model = otp.fit(otp.Model(graph, mixed), numbers).model
    assert mixed_model.params()["y"]["weight"][0] == mixed_model.params()["w"]["weight"][0]
    assert mixed_model.n_parameters == 10


def test_files_and_resampling_keep_what_is_tied(table, tmp_path):
    result = otp.fit(model(m.Poisson, y=TIED, w=[otp.tie("k"), 0.1]), table)
    result.model.save(tmp_path / "model.otp")
    again = otp.load(tmp_path / "model.otp")
    assert again.log_likelihood(table) == result.model.log_likelihood(table)
    assert again.n_parameters == result.model.n_parameters == 8
    anew = otp.fit(otp.Model(again.graph, again.mechanisms), table).model.params()
    assert anew["y"]["weight"][0] == anew["w"]["weight"][0]


def test_effects_along_paths_and_checks_know_what_is_tied():
    """The direct effect is the common slope, with the error of both regressions."""
    rng = np.random.default_rng(733703)
    table = pd.DataFrame(rng.normal(size=(300, 2)), columns=["x", "z"])
    table["w"] = table["x"] - 0.3 * table["z"] + rng.normal(size=300)
    table["y"] = table["x"] + table["w"] + rng.normal(size=300)
    graph = otp.Graph([("x", "w"), ("z", "w"), ("x", "y"), ("w", "y")])
    nodes = {"x": m.Normal(), "z": m.Normal(), "w": m.Normal(weight=TIED), "y": m.Normal(weight=TIED)}
    result = otp.fit(otp.Model(graph, nodes), table)
    direct = result.effect("x", "y", path="direct").table.iloc[0]
    own = result.standard_errors().query("node == 'y' and at == 'x'").iloc[0]
    assert direct["effect"] == pytest.approx(own["estimate"])
    assert direct["std_error"] == pytest.approx(own["std_error"], rel=1e-4)
    assert result.model.check(table)["adjusted"].min() > 0.01


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ({"y": m.Normal(weight=[otp.tie("k")])}, "all of which are told: 2; got 1"),
        ({"y": m.Normal(weight=TIED), "w": m.Normal(weight=otp.tie("k"))}, "is of a single slope and of \\(2, 1\\)"),
        ({"y": m.Normal(scale=[otp.tie("k")])}, "entries can be tied or bounded of slopes"),
    ],
)
def test_what_cannot_be_tied_is_named(nodes, words):
    every = {"x": m.Normal(), "z": m.Normal(), "y": m.Normal(), "w": m.Normal()}
    with pytest.raises(otp.ModelError, match=words):
        otp.Model(GRAPH, every | nodes)


def test_groups_with_equal_slopes_are_compared_with_free_ones_by_the_likelihood_ratio():
    rng = np.random.default_rng(31)
    group, x = rng.integers(0, 2, 300), rng.normal(size=300)
    y = np.where(group, 1.0 + 0.8 * x, 0.4 * x) + np.where(group, 0.5, 1.5) * rng.normal(size=300)
    wide = by_group(pd.DataFrame({"x": x, "y": y, "school": np.array(["a", "b"])[group]}), "school")
    graph = otp.Graph([("x[a]", "y[a]"), ("x[b]", "y[b]")])

    def model(slope):
        each = {f"{name}[{one}]": m.Normal(weight=slope if name == "y" else None) for name in "xy" for one in "ab"}
        return otp.Model(graph, each)

    table = otp.compare({"free": model(None), "equal": model(otp.tie("slope"))}, wide)

    def loss(slope):  # of both groups, levels and scales at their best
        left = [y[group == one] - slope * x[group == one] for one in (0, 1)]
        return sum(len(one) * np.log(one.std()) for one in left)

    apart = [sm.OLS(y[group == one], sm.add_constant(x[group == one])).fit().resid for one in (0, 1)]
    free = sum(len(one) * np.log(one.std()) for one in apart)
    ratio = 2 * (minimize_scalar(loss, bounds=(-2, 2), method="bounded", options={"xatol": 1e-10}).fun - free)
    assert table.loc["equal", "chi2"] == pytest.approx(ratio, abs=1e-5)
    assert table.loc["equal", "df"] == 1
    assert table.loc["equal", "p_value"] == pytest.approx(chi2.sf(ratio, 1), rel=1e-4)
    assert table.loc["free", ["chi2", "df", "p_value"]].isna().all()
