"""Choice between models against closed forms, and on real tables of scikit-learn and statsmodels."""

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_iris
from sklearn.mixture import GaussianMixture

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.errors import DataError, ModelError


def mixture(size: int) -> otp.Model:
    return otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(size), "x": m.Normal(dim=4)})


@pytest.fixture(scope="module")
def iris() -> pd.DataFrame:
    return pd.DataFrame(load_iris().data, columns=[f"x.{i}" for i in range(4)])


def test_criteria_are_those_of_scikit_learn(iris):
    model = mixture(2)
    table = otp.compare({"two": model}, iris)
    theirs = GaussianMixture(2, covariance_type="diag", n_init=5, random_state=0, tol=1e-9, max_iter=2000).fit(iris)
    assert table.loc["two", "parameters"] == theirs._n_parameters()
    assert table.loc["two", "BIC"] == pytest.approx(theirs.bic(iris), rel=1e-4)
    assert table.loc["two", "AIC"] == pytest.approx(theirs.aic(iris), rel=1e-4)


def test_one_class_is_allowed_and_is_the_model_without_classes(iris):
    one = mixture(1)
    otp.fit(one, iris)
    plain = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal(dim=4)})
    otp.fit(plain, iris)
    assert one.log_likelihood(iris) == pytest.approx(plain.log_likelihood(iris), rel=1e-8)
    assert one.n_parameters == plain.n_parameters == 8
    assert (one.predict_proba(iris, "z").to_numpy() == 1).all()


def test_one_state_is_allowed():
    rng = np.random.default_rng(0)
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(1), "x": m.Normal()})
    steps = pd.DataFrame({"x": rng.normal(5.0, 2.0, 200)})
    otp.fit(model, steps)
    assert model.params()["x"]["loc"].item() == pytest.approx(steps["x"].mean(), abs=1e-4)
    assert model.n_parameters == 2


def test_the_number_of_classes_is_found_and_drawn(iris):
    rng = np.random.default_rng(0)
    centres = np.array([[0.0, 0, 0, 0], [4, 4, 0, 0], [0, 4, 4, 4]])
    table = pd.DataFrame(centres[rng.integers(0, 3, 300)] + rng.normal(size=(300, 4)), columns=iris.columns)
    found = otp.select(mixture, range(1, 5), table, restarts=4)
    assert found.best == 3
    assert found.model is found.results[3].model
    assert list(found.table.index) == [1, 2, 3, 4]
    assert "3 is best by BIC" in str(found)
    figure = otp.plots.plot_selection(found)
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["chosen", "BIC", "AIC"]


def test_cross_validation_prefers_what_predicts():
    rng = np.random.default_rng(2)
    a = rng.normal(size=150)
    table = pd.DataFrame({"a": a, "y": a + rng.normal(size=150), "c": rng.choice(["p", "q", "r"], 150)})
    nodes = {"a": m.Normal(), "y": m.Normal(), "c": m.Categorical(3)}
    models = {
        "joined": otp.Model(otp.Graph([("a", "y")], nodes=["c"]), nodes),
        "apart": otp.Model(otp.Graph([], nodes=["a", "y", "c"]), nodes),
    }
    compared = otp.compare(models, table, folds=3)
    gap = compared.loc["joined", "cv_log_likelihood"] - compared.loc["apart", "cv_log_likelihood"]
    assert gap == pytest.approx(0.5 * np.log(2.0), abs=0.1)  # the noise has half the variance of y
    assert (compared["cv_std_error"] > 0).all()
    assert otp.select(
        lambda name: otp.Model(models[name].graph, nodes), models, table, criterion="cv", folds=3
    ).best == ("joined")


def test_what_does_not_compare_is_refused(iris):
    table = pd.DataFrame({"a": [0, 1, 2, 1, 0, 3], "b": [1.0, 2, 3, 4, 5, 7]})
    count = otp.Model(otp.Graph([], nodes=["a"]), {"a": m.Poisson()})
    number = otp.Model(otp.Graph([], nodes=["a"]), {"a": m.Normal()})
    both = otp.Model(otp.Graph([], nodes=["a", "b"]), {"a": m.Poisson(), "b": m.Normal()})
    with pytest.raises(ModelError, match="differ in 'b'"):
        otp.compare([count, both], table)
    with pytest.raises(ModelError, match="densities in one of the models"):
        otp.compare([count, number], table)
    with pytest.raises(ModelError, match="criterion must be"):
        otp.select(mixture, [1], iris, criterion="best")
    with pytest.raises(ModelError, match="at least one value"):
        otp.select(mixture, [], iris)
    with pytest.raises(DataError, match="needs a DataFrame"):
        otp.compare([number], {"a": [1.0, 2.0, 3.0]}, folds=2)


def test_a_forecast_is_drawn_after_what_was_seen():
    model = otp.Model(otp.Graph([otp.lag("x", "x")], nodes=["x"]), {"x": m.Normal()})
    model.set_params({"x": {"loc": 1.0, "weight": 0.5, "scale": 2.0}})
    seen = pd.DataFrame({"x": [0.0, 10.0, 4.0]})
    figure = otp.plots.plot_forecast(model.forecast(seen, 5, draws=50), "x", history=seen["x"])
    assert figure.axes[0].get_ylabel() == "x"
    with pytest.raises(DataError, match="must hold the number 'q'"):
        otp.plots.plot_forecast(model.forecast(seen, 2, draws=10), "q")


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (5, "models must be models by name or in a list; got int"),
        ("ab", "models must hold otp.Model only; got str at '0'"),
        ({"a": 3}, "models must hold otp.Model only; got int at 'a'"),
        ([None], "models must hold otp.Model only; got NoneType at '0'"),
        ({}, "models must hold at least one model; got none"),
    ],
)
def test_what_is_not_a_model_is_refused_by_name(models, message):
    with pytest.raises(ModelError, match=message):
        otp.compare(models, pd.DataFrame({"x": [1.0]}))


def test_a_choice_among_models_of_a_wrong_family_says_so():
    rng = np.random.default_rng(61)
    far = rng.integers(0, 2, 400).astype(bool)
    table = pd.DataFrame({name: np.where(far, 6 + rng.gamma(3, 1.2, 400), rng.gamma(2, 1, 400)) for name in "xyz"})
    graph = otp.Graph([("k", name) for name in table], hidden=["k"])
    nodes = {name: m.Normal() for name in table}
    chosen = otp.select(lambda k: otp.Model(graph, {"k": m.Categorical(k), **nodes}), (2, 3), table)
    assert chosen.table["contradicted"].str.contains("skewed otherwise than it says").all()
    assert chosen.hint == ", the last that was tried; rows contradict it: a node may be of another family"
    right = table.assign(**{name: 5.0 * far + rng.normal(size=400) for name in "xyz"})
    chosen = otp.select(lambda k: otp.Model(graph, {"k": m.Categorical(k), **nodes}), (1, 2, 3), right)
    assert chosen.best == 2
    assert not chosen.table["contradicted"][2]
    assert not chosen.hint
