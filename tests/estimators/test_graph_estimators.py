"""Graphs behind scikit-learn's door: its own checks, pipelines, and truths of tables with gaps."""

import numpy as np
import pandas as pd
import pytest
import scipy as sp
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_iris
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.estimators import GraphClassifier, GraphImputer, GraphRegressor
from otpdag.estimators.graph_estimators import NormalColumns, pool_weights


@parametrize_with_checks([GraphClassifier(n_folds=1, ridges=[1.0]), GraphRegressor(), GraphImputer(n_classes=[1])])
def test_scikit_learn_checks(estimator, check):
    check(estimator)


def normals(rng, rows=400):
    """Four columns with a known covariance."""
    factor = np.array([[1.0, 0, 0, 0], [0.6, 0.8, 0, 0], [0.3, 0.5, 0.7, 0], [0.2, -0.4, 0.5, 0.6]])
    return rng.normal(size=(rows, 4)) @ factor.T + [1.0, -2.0, 0.0, 5.0]


def test_regression_on_complete_rows_is_least_squares():
    rng = np.random.default_rng(0)
    x = normals(rng)
    y = x @ [1.0, -2.0, 0.5, 0.0] + 0.3 * rng.normal(size=len(x))
    ours, theirs = GraphRegressor().fit(x, y).predict(x), LinearRegression().fit(x, y).predict(x)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_gaps_are_integrated_out():
    """Predictions of rows with gaps are those of the normal distribution with the moments of many complete rows."""
    rng = np.random.default_rng(1)
    x = normals(rng, 1500)
    y = x @ [1.0, -2.0, 0.5, 0.3] + 0.3 * rng.normal(size=len(x))
    both = np.column_stack([x, y])
    mean, cov = both.mean(0), np.cov(both.T)
    gaps = np.where(rng.random(x.shape) < 0.25, np.nan, x)
    found = GraphRegressor().fit(gaps, y).predict(gaps[:50])
    filled = GraphImputer(n_classes=[1]).fit(gaps).transform(gaps[:50])
    for row in range(50):
        seen = np.flatnonzero(~np.isnan(gaps[row]))
        gain = np.linalg.solve(cov[np.ix_(seen, seen)], x[row, seen] - mean[seen])
        assert found[row] == pytest.approx(mean[4] + cov[4, seen] @ gain, abs=0.15)
        np.testing.assert_allclose(
            filled[row], np.where(np.isnan(gaps[row]), mean[:4] + cov[:4, seen] @ gain, x[row]), atol=0.15
        )


def test_classes_of_iris_with_gaps():
    x, y = load_iris(return_X_y=True)
    rng = np.random.default_rng(2)
    x = np.where(rng.random(x.shape) < 0.2, np.nan, x)
    order = rng.permutation(150)
    train, test = order[:100], order[100:]
    names = np.array(["a", "b", "c"])
    model = GraphClassifier(n_folds=2).fit(x[train], names[y[train]])
    assert list(model.classes_) == ["a", "b", "c"]
    assert model.score(x[test], names[y[test]]) > 0.9
    assert log_loss(y[test], model.predict_proba(x[test])) < 0.25


def test_probabilities_of_classes_never_exceed_one():
    model = GraphClassifier(ridges=[1.0])
    x = np.repeat([[0.0], [1.0]], 20, axis=0) + 1e-3 * np.arange(40)[:, None]
    model.fit(x, np.repeat(["no", "yes"], 20))
    model.weights_ = np.array([0.7, 0.2, 0.1 + 1e-15, 3.0])
    assert model.predict_proba(100 * x).max() <= 1.0
    np.testing.assert_allclose(model.predict_proba(x).sum(1), 1.0, rtol=1e-15)


@pytest.mark.parametrize("classes", [2, 3])
def test_logits_of_complete_rows_are_those_of_scikit_learn(classes):
    X, y = load_iris(return_X_y=True)
    X, y = X[y > 2 - classes], y[y > 2 - classes]
    logit = GraphClassifier(n_folds=1, ridges=[1.0]).fit(X, y).models_["logistic columns 1"]
    x = StandardScaler().fit_transform(X)
    other = LogisticRegression(tol=1e-9, max_iter=2000).fit(x, y)
    shares = logit.predict_proba(pd.DataFrame(x).add_prefix("columns."), "y")
    np.testing.assert_allclose(shares, other.predict_proba(x), atol=1e-4)


def test_a_graph_that_is_given_reads_categories():
    rng = np.random.default_rng(3)
    town = rng.choice(["north", "south"], 300)
    load = rng.normal(size=300) + (town == "north")
    paid = rng.random(300) < 1 / (1 + np.exp(-2 * load + 1))
    table = pd.DataFrame({"town": town, "load": load})
    table.loc[::5, "load"] = np.nan
    table.loc[::7, "town"] = None
    graph = otp.Graph([("town", "load"), ("load", "y")])
    found = GraphClassifier(graph).fit(table, paid)
    model = otp.Model(graph, {"town": m.Categorical(2), "load": m.Normal(), "y": m.Categorical(2)})
    otp.fit(model, table.assign(y=paid.astype(int)))
    np.testing.assert_allclose(found.predict_proba(table), model.predict_proba(table, "y").to_numpy(), atol=1e-4)
    filled = GraphImputer(otp.Graph([("town", "load")])).fit_transform(table)
    assert filled.notna().all(axis=None)
    assert list(filled["town"][::5]) == [filled["town"][i] for i in range(0, 300, 5)]


def test_normal_columns_are_the_likeliest():
    """Rows with gaps, and rows that come before: the gradient of the log-likelihood of both is zero."""
    rng = np.random.default_rng(6)
    x = normals(rng, 150)[:, :3]
    x = np.where(rng.random(x.shape) < 0.3, np.nan, x)
    before = NormalColumns(np.zeros(3), np.eye(3))
    found = before.likeliest(x, rows=5.0, tolerance=1e-10)

    def log_likelihood(mean, covariance):
        total = -2.5 * (
            np.linalg.slogdet(covariance)[1] + np.trace(np.linalg.solve(covariance, np.eye(3) + np.outer(mean, mean)))
        )
        for row in x:
            seen = np.flatnonzero(~np.isnan(row))
            if len(seen):
                total += sp.stats.multivariate_normal.logpdf(row[seen], mean[seen], covariance[np.ix_(seen, seen)])
        return total

    best = log_likelihood(found.mean, found.covariance)
    for step in (1e-3, -1e-3):
        for at in range(3):
            away = step * np.eye(3)[at]
            assert log_likelihood(found.mean + away, found.covariance) < best
            for other in range(3):
                turned = np.outer(away, np.eye(3)[other])
                assert log_likelihood(found.mean, found.covariance + turned + turned.T) < best


def test_a_pool_weighs_down_what_is_too_sure():
    """Of the log-odds of a true model, tripled, the pool takes a third; of noise nothing."""
    rng = np.random.default_rng(7)
    odds, noise = rng.normal(size=(2, 20_000))
    codes = (rng.random(20_000) < 1 / (1 + np.exp(-odds))).astype(int)
    logs = -np.log1p(np.exp(np.stack([[3 * odds, -3 * odds], [noise, -noise]]))).transpose(0, 2, 1)
    np.testing.assert_allclose(pool_weights(logs, codes), [1 / 3, 0.0], atol=0.03)


def test_classes_of_other_shapes_and_columns_without_values():
    """A ring around a core, which no line tells apart, beside a column that is never seen and one that never varies."""
    rng = np.random.default_rng(8)
    x = rng.normal(size=(300, 2))
    y = (np.square(x).sum(1) > 1.4).astype(int)
    x = np.column_stack([x, np.full(300, np.nan), np.ones(300)])
    model = GraphClassifier(ridges=[1.0], n_folds=2).fit(x[:200], y[:200])
    assert model.score(x[200:], y[200:]) > 0.9
    with_nothing = GraphClassifier(ridges=[1.0]).fit(x[:, 2:], y).predict_proba(x[:3, 2:])
    np.testing.assert_allclose(with_nothing[:, 1], y.mean(), atol=1e-6)


def test_pipelines_and_grids():
    x, y = load_iris(return_X_y=True, as_frame=True)
    x = x.mask(np.random.default_rng(4).random(x.shape) < 0.1)
    scaled = ColumnTransformer([("scaled", StandardScaler(), list(x)[:2])], remainder="passthrough")
    chain = make_pipeline(scaled, GraphImputer(n_classes=[1]), GraphClassifier(n_folds=1, ridges=[1.0]))
    grid = GridSearchCV(chain, {"graphimputer__max_parents": [1, 3]}, cv=2, error_score="raise").fit(x, y)
    assert grid.best_score_ > 0.85
    assert list(GraphImputer(n_classes=[1]).fit(x).get_feature_names_out()) == list(x)


def test_hidden_classes_fill_what_lines_cannot():
    """Two clusters far apart on a parabola: the mean of a line is far from both."""
    rng = np.random.default_rng(5)
    z = rng.integers(0, 3, 240)
    x = np.column_stack([z - 1.0, (z - 1.0) ** 2]) + 0.05 * rng.normal(size=(240, 2))
    gaps = x.copy()
    gaps[::3, 1] = np.nan
    errors = [
        np.sqrt(np.mean((GraphImputer(n_classes=many).fit_transform(gaps) - x)[::3, 1] ** 2)) for many in ([1], [3])
    ]
    assert errors[0] > 0.4
    assert errors[1] < 0.1


def test_what_is_wrong_is_told():
    with pytest.raises(ValueError, match="two classes"):
        GraphClassifier().fit(np.eye(3), [1, 1, 1])
    with pytest.raises(ValueError, match="value for each row"):
        GraphRegressor().fit(np.eye(3), [1.0, 2.0])
