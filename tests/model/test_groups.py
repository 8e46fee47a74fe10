"""Rows of a group share hidden numbers: random intercepts and slopes."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from scipy import optimize, special, stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.errors import DataError, ModelError, OtpdagError


def grouped(seed: int = 1, groups: int = 40) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    school = np.repeat(np.arange(groups), rng.integers(1, 16, groups))
    n = len(school)
    x, u, v = rng.normal(size=n), rng.normal(size=groups)[school], rng.normal(size=groups)[school]
    y = 1 + 0.5 * x + 0.8 * u + 0.4 * x * (0.5 * u + v) + 0.7 * rng.normal(size=n)
    c, b = rng.poisson(np.exp(0.3 + 0.4 * x + 0.6 * u)), rng.random(n) < special.expit(0.8 * x + u)
    table = pd.DataFrame({"x": x, "y": y, "c": c, "b": b.astype(int), "school": school})
    return table.sample(frac=1.0, random_state=seed)


def intercepts(node: str = "y", mechanism: m.Mechanism | None = None) -> otp.Model:
    graph = otp.Graph([("x", node), ("u", node)], hidden=["u"])
    return otp.Model(graph, {"x": m.Normal(), "u": m.Normal(group="school"), node: mechanism or m.Normal()})


def slopes() -> otp.Model:
    graph = otp.Graph([("x", "y"), ("u", "y"), ("v", "y")], hidden=["u", "v"])
    shared = {"u": m.Normal(group="school"), "v": m.Normal(group="school")}
    return otp.Model(graph, {"x": m.Normal(), **shared, "y": m.Normal(terms="x + u + x:u + x:v")})


def errors_of(result: otp.FitResult, node: str) -> list[float]:
    table = result.standard_errors()
    own = table[(table["node"] == node) & (table["note"] == "")]
    return [float(value) for value in own["std_error"]]


def test_random_intercepts_are_those_of_mixed_models() -> None:
    table = grouped()
    model = intercepts()
    result = otp.fit(model, table)
    other = smf.mixedlm("y ~ x", table, groups="school").fit(reml=False)
    y = model.params()["y"]
    ours = [y["loc"], *y["weight"], y["scale"]]
    theirs = [*other.fe_params, float(other.cov_re.iloc[0, 0]) ** 0.5, other.scale**0.5]
    assert result.status.converged
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    np.testing.assert_allclose(errors_of(result, "y")[:2], other.bse_fe, rtol=1e-4)
    x_alone = stats.norm(table["x"].mean(), table["x"].std(ddof=0)).logpdf(table["x"]).sum()
    assert model.log_likelihood(table) == pytest.approx(other.llf + x_alone, abs=1e-6)
    blups = model.predict(table, "u") * y["weight"][1]
    expected = table["school"].map({key: float(value.iloc[0]) for key, value in other.random_effects.items()})
    np.testing.assert_allclose(blups, expected, atol=1e-4)


@pytest.mark.parametrize("adds", [0.8, 0.05])
def test_intervals_of_what_groups_add_are_those_of_the_profile_likelihood(adds: float) -> None:
    rng = np.random.default_rng(12)
    school, x = np.repeat(np.arange(12), 6), rng.normal(size=72)
    table = pd.DataFrame({"x": x, "y": 0.5 * x + adds * rng.normal(size=12)[school] + 0.7 * rng.normal(size=72)})
    design, same = np.c_[np.ones(72), x], (school[:, None] == school).astype(float)

    def deviance(spread: float) -> float:  # the least with this standard deviation of intercepts, levels at their best
        def of_noise(log_noise: float) -> float:
            covariance = spread**2 * same + np.exp(2 * log_noise) * np.eye(72)
            inverse = np.linalg.inv(covariance)
            left = table["y"] - design @ np.linalg.solve(design.T @ inverse @ design, design.T @ inverse @ table["y"])
            return float(left @ inverse @ left + np.linalg.slogdet(covariance)[1])

        return optimize.minimize_scalar(of_noise, bounds=(-2, 1), method="bounded", options={"xatol": 1e-8}).fun

    most = optimize.minimize_scalar(deviance, bounds=(0.0, 3.0), method="bounded", options={"xatol": 1e-8})

    def above(spread: float) -> float:
        return deviance(spread) - most.fun - stats.chi2.ppf(0.9, 1)

    lower = optimize.brentq(above, 0.0, most.x) if above(0.0) > 0 else 0.0
    own = otp.fit(intercepts(), table.assign(school=school)).standard_errors(level=0.9)
    [found] = own[(own["node"] == "y") & (own["at"] == "u")][["lower", "upper"]].to_numpy()
    np.testing.assert_allclose(found, [lower, optimize.brentq(above, most.x, 5.0)], atol=2e-3)
    assert (found[0] == 0) == (adds < 0.1)


def test_random_slopes_are_those_of_mixed_models() -> None:
    table = grouped()
    model = slopes()
    result = otp.fit(model, table)
    other = smf.mixedlm("y ~ x", table, groups="school", re_formula="~x").fit(reml=False)
    beta, a, b, c = model.params()["y"]["weight"]
    assert a > 0
    assert c > 0
    covariance = [a * a, a * b, b * b + c * c]
    np.testing.assert_allclose([model.params()["y"]["loc"], beta], other.fe_params, rtol=1e-4)
    np.testing.assert_allclose(covariance, other.cov_re.to_numpy()[[0, 0, 1], [0, 1, 1]], rtol=2e-3)
    np.testing.assert_allclose(errors_of(result, "y")[:2], other.bse_fe, rtol=1e-3)
    x_alone = stats.norm(table["x"].mean(), table["x"].std(ddof=0)).logpdf(table["x"]).sum()
    assert model.log_likelihood(table) >= other.llf + x_alone - 1e-6
    assert model.log_likelihood(table) == pytest.approx(other.llf + x_alone, abs=1e-3)


def test_groups_that_do_not_differ_are_said() -> None:
    rng = np.random.default_rng(11)
    table = pd.DataFrame({"x": rng.normal(size=90), "school": np.arange(90) // 3})
    table["y"] = table["x"] + rng.normal(size=90)
    table["y"] -= table.groupby("school")["y"].transform("mean") - table.groupby("school")["x"].transform("mean")
    model = intercepts()
    result = otp.fit(model, table)
    assert abs(model.params()["y"]["weight"][1]) < 1e-3
    assert any("do not differ in 'u'" in note for note in result.notes)
    assert not any("differ" in note for note in otp.fit(intercepts(), grouped()).notes)
    alone = otp.fit(intercepts(), table.assign(school=range(90)))
    assert any("one row" in note for note in alone.notes)


def implied(table: pd.DataFrame, params: dict[str, dict[str, np.ndarray]]) -> float:
    """The log-likelihood of groups as multivariate normals of all cells that they show."""
    total, x, y = 0.0, params["x"], params["y"]
    (beta, w), within = y["weight"], float(x["scale"]) ** 2
    for _, rows in table.groupby("school"):
        k = len(rows)
        one, values = np.eye(k), np.concatenate([rows["x"], rows["y"]])
        mean = np.repeat([x["loc"], y["loc"] + beta * x["loc"]], k)
        top = [within * one, beta * within * one]
        below = [beta * within * one, (beta**2 * within + y["scale"] ** 2) * one + w**2]
        seen = ~np.isnan(values)
        if seen.any():
            covariance = np.block([top, below])[np.ix_(seen, seen)]
            total += stats.multivariate_normal(mean[seen], covariance).logpdf(values[seen])
    return total


def test_gaps_in_normal_groups_are_integrated_exactly() -> None:
    table, rng = grouped(2), np.random.default_rng(0)
    table["x"], table["y"] = (table[name].mask(rng.random(len(table)) < 0.25) for name in "xy")
    model = intercepts()
    result = otp.fit(model, table)
    assert result.status.converged
    assert model.log_likelihood(table) == pytest.approx(implied(table, model.params()), abs=1e-8)


@pytest.mark.parametrize(("node", "mechanism"), [("c", m.Poisson()), ("b", m.Bernoulli())])
def test_other_families_agree_with_a_fine_sum(node: str, mechanism: m.Mechanism) -> None:
    table = grouped(3, 25)
    graph = otp.Graph([("x", node), ("u", node)], hidden=["u"])
    mechanisms = {"x": m.Given(otp.spaces.Real()), "u": m.Normal(group="school"), node: mechanism}
    model = otp.Model(graph, mechanisms)
    result = otp.fit(model, table)
    at = np.linspace(-8, 8, 401)
    prior = stats.norm.logpdf(at) + np.log(at[1] - at[0])
    own, codes = table[node].to_numpy()[:, None], pd.factorize(table["school"])[0]

    def loss(point: np.ndarray) -> float:
        line = (point[0] + point[1] * table["x"].to_numpy())[:, None] + point[2] * at
        rows = own * line - (np.exp(line) + special.gammaln(own + 1) if node == "c" else np.logaddexp(0, line))
        sums = np.zeros((codes.max() + 1, len(at)))
        np.add.at(sums, codes, rows)
        return -float(special.logsumexp(sums + prior, axis=1).sum())

    best = optimize.minimize(loss, [0.0, 0.1, 0.5], method="BFGS", options={"gtol": 1e-5})
    params = model.params()[node]
    weight = params["weight"].reshape(2, -1)[:, -1]
    ours = [np.ravel(params["log_rate" if node == "c" else "logits"])[-1], *weight]
    np.testing.assert_allclose(ours, best.x, rtol=1e-3, atol=1e-4)
    assert model.log_likelihood(table) == pytest.approx(-loss(np.array(ours)), abs=1e-6)
    assert result.summary().facts["groups"] == 25
    means = table.assign(u=model.predict(table, "u")).groupby("school")["u"].first()
    drawn = model.posterior(table, draws=400, seed=1)["u"].to_numpy().reshape(len(table), 400)
    np.testing.assert_allclose(drawn.mean(1), means.loc[table["school"]], atol=0.2)
    line = (ours[0] + ours[1] * table["x"].to_numpy())[:, None] + ours[2] * at
    logs = np.zeros((codes.max() + 1, len(at)))
    np.add.at(logs, codes, own * line - (np.exp(line) if node == "c" else np.logaddexp(0, line)))
    law = special.softmax(logs + prior, axis=1).cumsum(1)
    for code in range(codes.max() + 1):
        rows = drawn[codes == code]
        assert (rows == rows[0]).all()  # of a group all rows share the draw
        assert stats.kstest(rows[0], lambda u, code=code: np.interp(u, at, law[code])).statistic < 0.1


def test_answers_know_the_groups(tmp_path: Path) -> None:
    table = grouped(4, 30)
    model = intercepts()
    otp.fit(model, table)
    per_group = model.log_likelihood(table, per_row=True)
    assert per_group.index.name == "school"
    assert per_group.sum() == pytest.approx(model.log_likelihood(table))
    one = table[table["school"] == 7]
    assert per_group.loc[7] == pytest.approx(model.log_likelihood(one))
    y = model.params()["y"]
    new = pd.DataFrame({"x": [0.0, 1.0], "school": ["new", "new"]})
    np.testing.assert_allclose(model.predict(new, "y"), y["loc"] + y["weight"][0] * new["x"])
    asked = pd.concat([one, pd.DataFrame({"x": [0.5], "school": [7]})], ignore_index=True)
    filled = model.impute(asked, draws=2000)["y"].iloc[-1]
    known = y["loc"] + 0.5 * y["weight"][0] + y["weight"][1] * model.predict(one, "u").iloc[0]
    assert filled == pytest.approx(known, abs=0.1)
    assert model.predict(asked, "y").iloc[-1] == pytest.approx(known)
    np.testing.assert_allclose(model.predict(asked, "y").iloc[:-1], y["loc"] + y["weight"][0] * one["x"])
    drawn = model.sample(3000, length=2, seed=0)
    pairs = (drawn["y"] - y["weight"][0] * drawn["x"]).to_numpy().reshape(-1, 2)
    share = y["weight"][1] ** 2 / (y["weight"][1] ** 2 + y["scale"] ** 2)
    assert np.corrcoef(pairs.T)[0, 1] == pytest.approx(share, abs=0.06)
    assert drawn["school"].nunique() == 3000
    model.save(tmp_path / "model.otp")
    assert otp.load(tmp_path / "model.otp").log_likelihood(table) == model.log_likelihood(table)
    assert "cv_log_likelihood" in otp.compare({"a": intercepts()}, table, folds=2)


def test_checks_see_groups_that_go_with_a_parent_and_nothing_in_a_right_model() -> None:
    """Random intercepts are of groups whose parents do not know them (Hausman 1978)."""
    rng, findings = np.random.default_rng(9092), []
    school = np.repeat(np.arange(40), 10)
    for _ in range(4):
        u, x = rng.normal(size=40)[school], rng.normal(size=400)
        table = pd.DataFrame({"school": school, "x": x, "y": 0.5 * x + 0.8 * u + rng.normal(size=400)})
        model = intercepts()
        otp.fit(model, table)
        findings += [*model.check(table)["adjusted"]]
    assert min(findings) > 0.001
    assert sum(one < 0.05 for one in findings) <= 1
    model = intercepts()
    table["x"] += 0.7 * u
    table["y"] += 0.35 * u
    otp.fit(model, table)
    worst = model.check(table).reset_index().iloc[0]
    assert (worst["node"], worst["other"]) == ("u", "x")
    assert worst["adjusted"] < 1e-4


def test_counterfactuals_keep_the_groups() -> None:
    """A random intercept stays as it is; of a random slope the mean given the group counts."""
    table = grouped(8, 15)
    model = intercepts()
    otp.fit(model, table)
    other = model.counterfactual(table, {"x": lambda rows: rows["x"] + 1})
    np.testing.assert_allclose(other["y"], table["y"] + model.params()["y"]["weight"][0], atol=1e-9)
    model = slopes()
    otp.fit(model, table)
    weight = model.params()["y"]["weight"]
    each = weight[0] + weight[2] * model.predict(table, "u") + weight[3] * model.predict(table, "v")
    other = model.counterfactual(table, {"x": table["x"] + 1}, draws=400)
    np.testing.assert_allclose(other["y"] - table["y"], each, atol=0.12)


def test_effects_and_terms_take_groups_for_units() -> None:
    table = grouped(5, 30)
    model = intercepts()
    result = otp.fit(model, table)
    error = errors_of(result, "y")[1]
    assert float(result.effect("x", "y").table["std_error"].iloc[0]) == pytest.approx(error)
    assert float(model.effect("x", "y", data=table).table["std_error"].iloc[0]) == pytest.approx(error)
    band = result.term("y", "x", points=2)
    ends = np.ptp(band["x"]) * model.params()["y"]["weight"][0]
    assert np.ptp(band["term"]) == pytest.approx(ends)


def test_the_bootstrap_resamples_groups() -> None:
    table = grouped(5, 60)
    result = otp.fit(intercepts(), table)
    drawn = result.intervals(draws=60).loc["y"]
    by_curvature = errors_of(result, "y")
    naive = smf.ols("y ~ x", table).fit().bse["Intercept"]
    level = float(drawn.loc["loc", "std_error"].iloc[0])
    assert level == pytest.approx(by_curvature[0], rel=0.35)
    assert level > 1.5 * naive


def test_a_checkpoint_knows_its_groups(tmp_path: Path) -> None:
    table = grouped(6, 20)
    otp.fit(intercepts(), table, checkpoint=tmp_path / "run")
    with pytest.raises(OtpdagError, match="data"):
        otp.fit(intercepts(), table.assign(school=table["school"] // 2), checkpoint=tmp_path / "run")


REFUSED = {
    "method='likelihood'": lambda table: otp.fit(intercepts(), table, method="transport"),
    "got 'paper'": lambda table: otp.fit(intercepts(), table, method="paper"),
    "robust is not": lambda table: otp.fit(intercepts(), table, robust=True),
    "weights is not": lambda table: otp.fit(intercepts(), table, weights=np.ones(len(table))),
    "column 'school'": lambda table: otp.fit(intercepts(), table.drop(columns="school")),
    "at least two groups": lambda table: otp.fit(intercepts(), table.assign(school=1)),
    "no missing values": lambda table: otp.fit(intercepts(), table.assign(school=table["school"].mask(table["x"] > 1))),
    "in memory": lambda table: otp.fit(intercepts(), "rows.parquet"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_groups_are_not_for_is_refused_by_name(message: str) -> None:
    with pytest.raises(OtpdagError, match=message):
        REFUSED[message](grouped(7, 10))


def test_answers_about_single_rows_are_refused() -> None:
    table = grouped(8, 15)
    model = intercepts()
    otp.fit(model, table)
    for ask in (model.plan, model.most_probable, model.distance):
        with pytest.raises(ModelError, match="one by one"):
            ask(table)
    with pytest.raises(DataError, match="column 'school'"):
        model.predict(table[["x", "y"]], "u")


def test_models_whose_groups_make_no_sense_are_refused() -> None:
    shared = m.Normal(group="school")
    with pytest.raises(ModelError, match="hidden nodes"):
        otp.Model(otp.Graph([("u", "y")]), {"u": shared, "y": m.Normal()})
    graph = otp.Graph([("x", "u"), ("u", "y")], hidden=["u"])
    with pytest.raises(ModelError, match="by a row alone"):
        otp.Model(graph, {"x": m.Normal(), "u": shared, "y": m.Normal()})
    graph = otp.Graph([("u", "y"), ("v", "y")], hidden=["u", "v"])
    with pytest.raises(ModelError, match="one column"):
        otp.Model(graph, {"u": shared, "v": m.Normal(group="class"), "y": m.Normal()})
    graph = otp.Graph([(name, "b") for name in "uvw"], hidden=list("uvw"))
    model = otp.Model(graph, {**dict.fromkeys("uvw", shared), "b": m.Bernoulli()})
    with pytest.raises(ModelError, match="shares 3 numbers"):
        otp.fit(model, grouped(9, 10))


@pytest.mark.parametrize(
    ("school", "message"),
    [
        ([1, True, "a"], "holds truth values and numbers"),
        ([["a"], ["b"], ["c"]], "must hold labels"),
        ([None, "a", "b"], "says where a row"),
    ],
)
def test_cells_that_tell_no_group_are_refused(school: list[object], message: str) -> None:
    model = otp.Model(otp.Graph([("u", "y")], hidden=["u"]), {"u": m.Normal(group="school"), "y": m.Normal()})
    table = pd.DataFrame({"y": np.arange(30.0), "school": pd.Series(10 * school, dtype=object)})
    with pytest.raises(otp.DataError, match=message):
        otp.fit(model, table)
