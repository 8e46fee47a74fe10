r"""Prediction and imputation of tables with gaps by graphs, with scikit-learn's conventions.

A graph that is given is fitted as it is. Without one, numeric columns are linear and normal along a sparse graph whose
edges lower the BIC; whatever a row does not show is integrated out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin, RegressorMixin, TransformerMixin
from sklearn.model_selection import StratifiedKFold
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_feature_names_in, column_or_1d, validate_data

from otpdag import mechanisms as m
from otpdag.engine import fit
from otpdag.errors import DataError
from otpdag.estimators._contract import ModelEstimator, RandomState, seed_of
from otpdag.graph import Graph
from otpdag.mechanisms.base import Mechanism
from otpdag.mechanisms.parameters import ridge
from otpdag.model import Model
from otpdag.numerics import Array

Nodes = Mapping[str, Mechanism]
HIDDEN = "hidden class"
LEAST_SHARE = 1e-9  # that a model gave to what happened: weights stay finite where all ruled it out


def discovered_parents(table: pd.DataFrame, most: int) -> dict[str, list[str]]:
    """Parents of each column among those before it, by forward steps that lower the BIC of its regression.

    Correlations are those of rows that show both columns.

    >>> rng = np.random.default_rng(0)
    >>> a, b = rng.normal(size=(2, 300))
    >>> discovered_parents(pd.DataFrame({"a": a, "b": b, "c": a + 0.1 * b}), 6)
    {'a': [], 'b': [], 'c': ['a', 'b']}
    """
    names, rows = [str(name) for name in table], max(len(table), 2)
    correlation = np.nan_to_num(table.corr(min_periods=3).to_numpy())
    np.fill_diagonal(correlation, 1 + 1e-3)  # columns that repeat others do not make it singular
    price = math.exp(-math.log(rows) / rows)
    parents: dict[str, list[str]] = {}
    for j, name in enumerate(names):
        chosen: list[int] = []
        left = 1.0
        while len(chosen) < min(most, j, rows // 4):
            trials = {i: _residual(correlation, j, [*chosen, i]) for i in range(j) if i not in chosen}
            best = min(trials, key=lambda i: trials[i])
            if not 0 < trials[best] < price * left:
                break
            chosen, left = [*chosen, best], trials[best]
        parents[name] = [names[i] for i in chosen]
    return parents


def _residual(correlation: Array, j: int, others: Sequence[int]) -> float:
    """The share of a column's variance that others leave."""
    cross = correlation[others, j]
    return float(1 - cross @ np.linalg.solve(correlation[np.ix_(others, others)], cross))


def stacked(shares: Array, steps: int = 200) -> Array:
    r"""Weights (models,) of models whose mixture makes what happened likeliest (Yao et al. 2018), by EM.

    Args:
        shares: Probabilities that models gave to what happened in rows that they were not fitted to (models, rows).
        steps: Of EM.

    >>> stacked(np.array([[0.9, 0.8, 0.9], [0.5, 0.5, 0.5]])).round(2)
    array([1., 0.])
    """
    weights = np.full(len(shares), 1 / len(shares))
    for _ in range(steps):
        weights = weights * (shares / (weights @ shares)).mean(1)
    return weights


@dataclass(eq=False, repr=False)
class _GraphEstimator(ModelEstimator):
    """What all share: columns are nodes, a graph is given or made, and gaps are integrated out."""

    graph: Graph | None = None
    _: KW_ONLY
    nodes: Nodes | None = None
    max_parents: int = 6
    random_state: RandomState = 0

    allows_gaps = True

    def _frame(self, X: Any, *, first: bool = False) -> pd.DataFrame:
        """Rows as a table: in its own units and kinds for a graph that is given, else standardised."""
        if self.graph is not None and isinstance(X, pd.DataFrame):
            validate_data(self, X, reset=first, skip_check_array=True)
            return X.reset_index(drop=True)
        values = self._checked(X, first=first, least=2)
        names = [f"x{place}" for place in range(values.shape[1])]
        if self.graph is not None:
            return pd.DataFrame(values, columns=names)
        if first:
            self._learn_units(values)
        frame = pd.DataFrame((values - self._centre) / self._spread, columns=names)
        return frame.loc[:, self._varies]

    def _learn_units(self, values: Array) -> None:
        """Centre and spread of the columns; those that do not vary are left out."""
        seen = ~np.isnan(values)
        counts = np.maximum(seen.sum(0), 1)
        largest = np.maximum(np.abs(np.where(seen, values, 0.0)).max(0), np.finfo(float).tiny)
        self._centre = largest * (np.where(seen, values / largest, 0.0).sum(0) / counts)
        gaps = np.where(seen, values / largest - self._centre / largest, 0.0)
        spread = largest * np.sqrt(np.square(gaps).sum(0) / counts)
        self._varies = spread > 1e-10 * largest
        self._spread = np.where(self._varies, spread, 1.0)

    def _given(self, table: pd.DataFrame, **target: Mechanism) -> Model:
        """The graph that was given; nodes that are not are chosen by what columns hold."""
        assert self.graph is not None, "there is a graph"
        return Model.from_frame(self.graph, table, mechanisms={**target, **(self.nodes or {})})

    def _fitted_to(self, model: Model, table: pd.DataFrame) -> Model:
        rows = table.reindex(columns=[*model.graph.observed])
        fit(model, rows, seed=seed_of(self.random_state), restarts=4 if model.graph.hidden else None, progress=False)
        return model

    def _normals(self, table: pd.DataFrame, beside: pd.DataFrame | None = None) -> tuple[list[tuple[str, str]], Nodes]:
        """Edges and nodes of columns that are linear and normal, by the correlations of ``beside`` if it is given."""
        parents = discovered_parents(table if beside is None else beside, self.max_parents)
        edges = [(parent, name) for name, own in parents.items() for parent in own]
        return edges, {name: m.Normal() for name in parents}


def _with_target(target: str, own: Mechanism, edges: Sequence[tuple[str, str]], nodes: Nodes) -> Model:
    """A model of columns, and of a target below all of them."""
    graph = Graph([*edges, *((name, target) for name in nodes)], nodes=[target])
    return Model(graph, {**nodes, target: own})


def _fixed(model: Model) -> dict[str, Mechanism]:
    """Normal nodes with the parameters that were estimated."""
    values = {node: {name: value.tolist() for name, value in own.items()} for node, own in model.params().items()}
    return {node: m.Normal(**own) for node, own in values.items()}


@dataclass(eq=False, repr=False)
class GraphClassifier(ClassifierMixin, _GraphEstimator):
    r"""Classes by a graph; cells may be missing, and are integrated out exactly.

    **Without a graph** two are fitted and mixed with the weights that predict held-out folds best: columns that are
    linear and normal given the class and each other, along edges that lower the BIC; and a logistic regression on all
    columns, whose slopes (of two classes those of the log-odds) have a standard normal prior, above such a graph of the
    columns.

    Args:
        graph: A graph of the columns and the target; hidden nodes need their mechanism in ``nodes``.
        nodes: Mechanisms; others are chosen by what columns hold.
        max_parents: Most parents of a column among the others, without a graph.
        random_state: Determines folds and starts.
        target: The node that is predicted, in a graph that is given.
        n_folds: Folds that tell the weights; one makes them equal.

    Attributes:
        classes_: The classes.
        models_: The fitted models, by name.
        weights_: The weight of each.
        n_features_in_: Number of columns.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> X[::3, 2] = np.nan
        >>> GraphClassifier().fit(X, y).score(X, y) > 0.95
        True
    """

    _: KW_ONLY
    target: str = "y"
    n_folds: int = 3

    fit_call = "fit(X, y)"

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Estimate the graphs.

        Args:
            X: Rows (n_samples, n_features); NaN is missing.
            y: The class of each row.
        """
        self._check_counts("max_parents", "n_folds")
        table = self._frame(X, first=True)
        labels = _checked_target(y, table)
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(f"y must have at least two classes; got one class, {self.classes_[0]!r}")
        self.models_ = self._models(table, codes)
        self.weights_ = self._weights(table, codes) if len(self.models_) > 1 else np.ones(1)
        self.model_ = next(iter(self.models_.values()))
        return self

    def _models(self, table: pd.DataFrame, codes: NDArray[np.intp]) -> dict[str, Model]:
        """Fit the graph that was given, or those of the default."""
        own, rows = m.Categorical(len(self.classes_)), table.assign(**{self.target: codes})
        if self.graph is not None:
            return {"given": self._fitted_to(self._given(rows, **{self.target: own}), rows)}
        names = [str(name) for name in table]
        edges, nodes = self._normals(table, table - table.groupby(codes).transform("mean"))
        below = Graph([*edges, *((self.target, name) for name in names)], nodes=[self.target])
        generative = Model(below, {**nodes, self.target: own})
        edges, nodes = self._normals(table)
        nodes = _fixed(self._fitted_to(Model(Graph(edges, nodes=names), nodes), table)) if names else {}
        size = len(self.classes_)
        # of two classes each has half the slope of the log-odds
        logit = m.Categorical(size, weight=ridge(2.0 if size == 2 else 1.0) if names else None)
        models = {"generative": generative, "logistic": _with_target(self.target, logit, edges, nodes)}
        return {name: self._fitted_to(model, rows) for name, model in models.items()}

    def _weights(self, table: pd.DataFrame, codes: NDArray[np.intp]) -> Array:
        """Weights of the models by rows that were held out; equal ones where a class has too few rows."""
        folds = min(self.n_folds, int(np.bincount(codes).min()))
        if folds < 2:
            return np.full(len(self.models_), 1 / len(self.models_))
        shares = np.zeros((len(self.models_), len(table)))
        split = StratifiedKFold(folds, shuffle=True, random_state=seed_of(self.random_state))
        for kept, held in split.split(table, codes):
            models = self._models(table.iloc[kept].reset_index(drop=True), codes[kept])
            shares[:, held] = self._shares(models, table.iloc[held])[:, np.arange(len(held)), codes[held]]
        return stacked(shares.clip(min=LEAST_SHARE))

    def _shares(self, models: Mapping[str, Model], table: pd.DataFrame) -> Array:
        """Probabilities of the classes by all models (models, rows, classes)."""
        return np.stack([model.predict_proba(table, self.target).to_numpy() for model in models.values()])

    def predict_proba(self, X: ArrayLike) -> Array:
        """Probabilities of the classes given what each row shows: (n_samples, n_classes)."""
        _ = self._fitted
        shares = np.tensordot(self.weights_, self._shares(self.models_, self._frame(X)), 1)
        return np.asarray(shares / shares.sum(1, keepdims=True))  # rounding leaves more than one, which metrics refuse

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The likeliest class of each row."""
        likeliest = self.predict_proba(X).argmax(1)
        return np.asarray(self.classes_[likeliest])


def _checked_target(y: ArrayLike, table: pd.DataFrame) -> NDArray[Any]:
    """The target of each row."""
    if y is None:
        raise DataError("requires y to be passed, but the target y is None")
    labels = column_or_1d(y, warn=True)
    if len(labels) != len(table):
        raise DataError(f"y must have a value for each row; there are {len(table)} rows and {len(labels)} values")
    if pd.isna(labels).any() or (labels.dtype.kind == "f" and not np.isfinite(labels).all()):
        raise DataError("y must have no missing or infinite values: Input contains NaN or infinity")
    return labels


@dataclass(eq=False, repr=False)
class GraphRegressor(RegressorMixin, _GraphEstimator):
    """Numbers by a graph; cells may be missing, and are integrated out exactly.

    Without a graph the target is linear in all columns, which are linear and normal along edges that lower the BIC.

    Args:
        graph: A graph of the columns and the target; hidden nodes need their mechanism in ``nodes``.
        nodes: Mechanisms; others are chosen by what columns hold.
        max_parents: Most parents of a column among the others, without a graph.
        random_state: Determines starts.
        target: The node that is predicted, in a graph that is given.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(200, 3))
        >>> y = X @ [1.0, 2.0, 0.0]
        >>> X[::4, 2] = np.nan
        >>> GraphRegressor().fit(X, y).score(X, y) > 0.99
        True
    """

    _: KW_ONLY
    target: str = "y"

    fit_call = "fit(X, y)"

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Estimate the graph.

        Args:
            X: Rows (n_samples, n_features); NaN is missing.
            y: The number of each row.
        """
        self._check_counts("max_parents")
        table = self._frame(X, first=True)
        rows = table.assign(**{self.target: _checked_target(y, table).astype(np.float64)})
        if self.graph is not None:
            model = self._given(rows)
        else:
            edges, nodes = self._normals(table)
            own = m.Normal(weight=ridge(1e-6) if nodes else None)
            model = _with_target(self.target, own, edges, nodes)
        self.model_ = self._fitted_to(model, rows)
        return self

    def predict(self, X: ArrayLike) -> Array:
        """The mean of the target given what each row shows."""
        model = self._fitted
        return model.predict(self._frame(X), self.target).to_numpy(dtype=np.float64)


@dataclass(eq=False, repr=False)
class GraphImputer(TransformerMixin, _GraphEstimator):
    """Missing cells by a graph: the mean of a number given all that its row shows, the likeliest category.

    Without a graph the means of several are averaged: columns are linear and normal along edges that lower the BIC,
    around the means of hidden classes, of which each graph has another number.

    Args:
        graph: A graph of the columns; hidden nodes need their mechanism in ``nodes``.
        nodes: Mechanisms; others are chosen by what columns hold.
        max_parents: Most parents of a column among the others, without a graph.
        random_state: Determines starts.
        n_classes: Hidden classes of each graph, without one that is given; more than a twentieth of the rows are left
            out.

    Attributes:
        models_: The fitted models.
        n_features_in_: Number of columns.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(200, 1)) + 0.1 * rng.normal(size=(200, 3))
        >>> X[0, 1] = np.nan
        >>> bool(abs(GraphImputer(n_classes=[1]).fit_transform(X)[0, 1] - X[0, [0, 2]].mean()) < 0.1)
        True
    """

    _: KW_ONLY
    n_classes: Sequence[int] = (1, 3, 6)

    def fit(self, X: ArrayLike, y: object = None) -> Self:
        """Estimate the graphs.

        Args:
            X: Rows (n_samples, n_features); NaN is missing.
            y: Ignored.
        """
        self._check_counts("max_parents")
        table = self._frame(X, first=True)
        models = [self._given(table)] if self.graph is not None else self._mixtures(table)
        self.models_ = [self._fitted_to(model, table) for model in models]
        self.model_ = self.models_[0]
        return self

    def _mixtures(self, table: pd.DataFrame) -> list[Model]:
        """Normal columns around the means of hidden classes."""
        edges, nodes = self._normals(table)
        classes = [many for many in self.n_classes if many == 1 or 20 * many <= len(table)]
        return [self._mixture(edges, nodes, many) for many in classes or [1]]

    def _mixture(self, edges: Sequence[tuple[str, str]], nodes: Nodes, many: int) -> Model:
        if many == 1 or not nodes:
            return Model(Graph(edges, nodes=list(nodes) or [HIDDEN]), nodes or {HIDDEN: m.Normal(loc=0.0, scale=1.0)})
        graph = Graph([*edges, *((HIDDEN, name) for name in nodes)], hidden=[HIDDEN])
        return Model(graph, {HIDDEN: m.Categorical(many), **{name: m.Normal(shared_scale=True) for name in nodes}})

    def transform(self, X: ArrayLike) -> Any:
        """Fill the gaps of rows; of a table with a graph that is given, as a table."""
        model, table = self._fitted, self._frame(X)
        filled = table.copy()
        for name in (name for name in table if name in model.graph.observed):
            rows = table.index[table[name].isna()]
            if len(rows):
                each = [one.predict(table.loc[rows], name).to_numpy() for one in self.models_]
                filled.loc[rows, name] = each[0] if len(each) == 1 else np.mean(each, axis=0)
        table = filled
        if self.graph is not None:
            return table.set_axis(X.index) if isinstance(X, pd.DataFrame) else table.to_numpy()
        values = self._checked(X)
        found = np.zeros_like(values)
        found[:, self._varies] = table.to_numpy()
        return np.where(np.isnan(values), self._centre + self._spread * found, values)

    def get_feature_names_out(self, input_features: ArrayLike | None = None) -> NDArray[np.object_]:
        """The names of the columns."""
        _ = self._fitted
        return _check_feature_names_in(self, input_features)
