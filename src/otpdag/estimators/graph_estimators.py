r"""Prediction and imputation of tables with gaps by graphs, with scikit-learn's conventions.

A graph that is given is fitted as it is, and whatever a row does not show is integrated out. Without one, classes are
told by all columns as one normal vector; numbers, and gaps, by columns that are linear and normal along a sparse graph
whose edges lower the BIC.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import numpy as np
import pandas as pd
import scipy as sp
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin, RegressorMixin, TransformerMixin
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import PowerTransformer
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_feature_names_in, column_or_1d, validate_data

from otpdag import mechanisms as m
from otpdag.data.columns import cell_names
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
VIEWS = ("columns", "powers")
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


def _normals(table: pd.DataFrame, most: int) -> tuple[list[tuple[str, str]], Nodes]:
    """Edges and nodes of columns that are linear and normal, with so many parents at most."""
    parents = discovered_parents(table, most)
    return [(parent, name) for name, own in parents.items() for parent in own], {name: m.Normal() for name in parents}


def _residual(correlation: Array, j: int, others: Sequence[int]) -> float:
    """The share of a column's variance that others leave."""
    cross = correlation[others, j]
    return float(1 - cross @ np.linalg.solve(correlation[np.ix_(others, others)], cross))


@dataclass(frozen=True, eq=False)
class NormalColumns:
    """Columns as one normal vector with a mean (D,) and a covariance (D, D).

    >>> pair = NormalColumns(np.zeros(2), np.array([[1.0, 0.5], [0.5, 1.0]]))
    >>> pair.filled(np.array([[2.0, np.nan]]))[0].tolist()
    [[2.0, 1.0]]
    """

    mean: Array
    covariance: Array

    @classmethod
    def standard(cls, size: int) -> NormalColumns:
        """Independent columns of mean zero and variance one."""
        return cls(np.zeros(size), np.eye(size))

    @property
    def node(self) -> Mechanism:
        """A node with these moments, one of each for each class if there are several."""
        return m.MultivariateNormal(self.mean.shape[-1], loc=self.mean, covariance=self.covariance)

    def filled(self, x: Array, entries: int = 4_000_000) -> tuple[Array, Array]:
        """Rows (N, D) with gaps at their means given what is shown, and the covariance that is left, summed (D, D).

        Matrices of so many ``entries`` are held at a time.
        """
        size, shown = len(self.mean), ~np.isnan(x)
        filled, left, each = x.copy(), len(x) * self.covariance, max(1, entries // max(1, len(self.mean)) ** 2)
        for own in (slice(begin, begin + each) for begin in range(0, len(x), each)):
            kinds, kind, many = np.unique(shown[own], axis=0, return_inverse=True, return_counts=True)
            both = kinds[:, :, None] & kinds[:, None]
            onto = self.covariance @ (np.linalg.inv(np.where(both, self.covariance, np.eye(size))) * both)
            missed = np.where(shown[own], x[own] - self.mean, 0.0)
            filled[own] = np.where(shown[own], x[own], self.mean + (onto[kind.ravel()] @ missed[..., None])[..., 0])
            left -= np.tensordot(many, onto, 1) @ self.covariance
        return filled, left

    def likeliest(self, x: Array, rows: float = 10.0, steps: int = 200, tolerance: float = 1e-4) -> NormalColumns:
        """The likeliest vector of rows (N, D), and of so many more that are as this one says.

        By expectation-maximisation (Little and Rubin, 2002, section 11.2), until nothing moves by the ``tolerance``.
        """
        now = self
        for _ in range(steps):
            filled, left = now.filled(x)
            mean = (filled.sum(0) + rows * self.mean) / (len(x) + rows)
            away, from_here = filled - mean, self.mean - mean
            own = rows * (self.covariance + np.outer(from_here, from_here))
            covariance = (away.T @ away + left + own) / (len(x) + rows)
            moved = np.abs(covariance - now.covariance).max(initial=0.0)
            now = NormalColumns(mean, (covariance + covariance.T) / 2)
            if moved < tolerance:
                break
        return now


def pooled(logs: Array, weights: Array) -> Array:
    r"""Probabilities (rows, classes) in proportion to :math:`\prod_m p_m^{w_m}`: ``logs`` are by model, row and class.

    >>> pooled(np.log([[[0.9, 0.1]], [[0.1, 0.9]]]), np.array([1.0, 1.0]))
    array([[0.5, 0.5]])
    """
    shares: Array = sp.special.softmax(np.tensordot(weights, logs, 1), axis=-1)
    return shares


def pool_weights(logs: Array, codes: NDArray[np.intp], prior: float = 10.0) -> Array:
    r"""Weights of models (models,), none negative, whose logarithmic pool makes what happened likeliest.

    They need not sum to one: models that are too sure get less, models that are alike share. A normal prior of this
    precision draws them to equal ones (Genest and Zidek, 1986, for pools).

    Args:
        logs: Logarithms of the probabilities in rows that models were not fitted to (models, rows, classes).
        codes: The class of each row.
        prior: Precision around one over the number of models.
    """
    from scipy import optimize  # takes as long to import as pandas

    equal, happened = np.full(len(logs), 1 / len(logs)), logs[:, np.arange(len(codes)), codes]

    def loss(weights: Array) -> tuple[float, Array]:
        shares = pooled(logs, weights)
        own = np.log(shares[np.arange(len(codes)), codes].clip(LEAST_SHARE))
        slope = (logs * shares).sum((1, 2)) - happened.sum(1) + prior * (weights - equal)
        return float(0.5 * prior * np.square(weights - equal).sum() - own.sum()), slope

    found: Array = optimize.minimize(loss, equal, jac=True, method="L-BFGS-B", bounds=[(0, None)] * len(logs)).x
    return found


@dataclass(frozen=True, eq=False)
class _Read:
    """A model, the columns that it reads, and what fills their gaps before; it integrates them out if nothing does."""

    model: Model
    columns: list[Any]
    by: NormalColumns | None = None

    def rows(self, table: pd.DataFrame) -> pd.DataFrame:
        """The columns as the model reads them."""
        own = table[self.columns].reset_index(drop=True)
        return own if self.by is None else pd.DataFrame(self.by.filled(own.to_numpy())[0], columns=self.columns)

    def log_shares(self, table: pd.DataFrame, target: str) -> Array:
        """Logarithms of the probabilities of the classes (rows, classes), none lower than the least share."""
        return np.log(self.model.predict_proba(self.rows(table), target).to_numpy().clip(min=LEAST_SHARE))


@dataclass(eq=False, repr=False)
class _GraphEstimator(ModelEstimator):
    """What all share: columns are nodes, a graph is given or made, and gaps are integrated out."""

    graph: Graph | None = None
    _: KW_ONLY
    nodes: Nodes | None = None
    random_state: RandomState = 0

    allows_gaps = True

    def _frame(self, X: Any, *, first: bool = False) -> pd.DataFrame:
        """Rows as a table: in its own units and kinds for a graph that is given, else standardised."""
        if self.graph is not None and isinstance(X, pd.DataFrame):
            validate_data(self, X, reset=first, skip_check_array=True)
            return X.reset_index(drop=True)
        values = self._checked(X, first=first, least=2)
        if self.graph is not None:
            return pd.DataFrame(values).add_prefix("x")
        if first:
            self._learn_units(values)
        varying = ((values - self._centre) / self._spread)[:, self._varies]
        return pd.DataFrame(varying, columns=cell_names(VIEWS[0], varying.shape[1]))

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

    def _below(
        self, view: str, table: pd.DataFrame, own: Mechanism, by: NormalColumns, **target: NDArray[Any]
    ) -> _Read:
        """A node and its values, below the columns of the table as a normal vector, which fills their gaps."""
        [(name, values)] = target.items()
        edges = [(view, name)] if table.shape[1] else []
        nodes = {view: by.node} if edges else {}
        read = _Read(Model(Graph(edges, nodes=[name]), {**nodes, name: own}), [*table], by)
        self._fitted_to(read.model, read.rows(table).assign(**{name: values}))
        return read

    def _given(self, table: pd.DataFrame, **target: Mechanism) -> Model:
        """The graph that was given; nodes that are not are chosen by what columns hold."""
        assert self.graph is not None, "there is a graph"
        return Model.from_frame(self.graph, table, mechanisms={**target, **(self.nodes or {})})

    def _fitted_to(self, model: Model, table: pd.DataFrame) -> Model:
        fit(model, table, seed=seed_of(self.random_state), restarts=4 if model.graph.hidden else None, progress=False)
        return model


@dataclass(eq=False, repr=False)
class GraphClassifier(ClassifierMixin, _GraphEstimator):
    r"""Classes by a graph; cells may be missing.

    **Without a graph** several are fitted, to standardised columns and to powers of them (Yeo and Johnson, 2000) as one
    normal vector each: the class above the vector, which has a mean and a covariance in each class, and logistic
    regressions below it, with ridges between weak and strong. Normal classes integrate gaps out; regressions read, in
    rows with gaps, their means given what the row shows. The probabilities are a logarithmic pool, with the weights
    that predict held-out folds best.

    Args:
        graph: A graph of the columns and the target; hidden nodes need their mechanism in ``nodes``.
        nodes: Mechanisms; others are chosen by what columns hold.
        random_state: Determines folds and starts.
        target: The node that is predicted, in a graph that is given.
        n_folds: Folds that tell the weights; one makes them equal.
        ridges: Precisions of the normal priors of slopes, of two classes those of the log-odds.

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
    n_folds: int = 5
    ridges: Sequence[float] = (0.1, 1.0, 10.0)

    fit_call = "fit(X, y)"

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Estimate the graphs.

        Args:
            X: Rows (n_samples, n_features); NaN is missing.
            y: The class of each row.
        """
        self._check_counts("n_folds")
        table = self._columns(X, first=True)
        labels = _checked_target(y, table)
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(f"y must have at least two classes; got one class, {self.classes_[0]!r}")
        self._reads = self._read(table, codes)
        self.models_ = {name: one.model for name, one in self._reads.items()}
        self.weights_ = self._weights(table, codes) if len(self.models_) > 1 else np.ones(1)
        self.model_ = next(iter(self.models_.values()))
        return self

    def _columns(self, X: Any, *, first: bool = False) -> pd.DataFrame:
        """Rows for a graph that is given; else cells of two vectors, of which one has powers of the columns.

        A power can grow fast beyond what it was chosen for: there it counts what is seen last.
        """
        table = self._frame(X, first=first)
        if self.graph is not None or not table.shape[1]:
            return table
        values = table.to_numpy()
        if first:
            self._ends = np.nanmin(values, 0), np.nanmax(values, 0)
            self._powers = PowerTransformer().fit(values)
        powers = self._powers.transform(values.clip(*self._ends))
        names = [name for view in VIEWS for name in cell_names(view, values.shape[1])]
        return pd.DataFrame(np.hstack([values, powers]), columns=names)

    def _read(self, table: pd.DataFrame, codes: NDArray[np.intp]) -> dict[str, _Read]:
        """Fit the graph that was given, or those of the default."""
        own, rows = m.Categorical(len(self.classes_)), table.assign(**{self.target: codes})
        if self.graph is not None:
            return {"given": _Read(self._fitted_to(self._given(rows, **{self.target: own}), rows), [*table])}
        width = table.shape[1] // len(VIEWS)
        if not width:
            return {"shares": self._below("", table, own, NormalColumns.standard(0), **{self.target: codes})}
        views = [self._read_view(view, table[[*cell_names(view, width)]], codes) for view in VIEWS]
        return {name: one for read in views for name, one in read.items()}

    def _read_view(self, view: str, table: pd.DataFrame, codes: NDArray[np.intp]) -> dict[str, _Read]:
        """Models of a vector and the class: the class above it, and below it with each ridge."""
        x, target, size = table.to_numpy(), self.target, len(self.classes_)
        means = np.nan_to_num(table.groupby(codes).mean().to_numpy())
        start = NormalColumns.standard(x.shape[1])
        within = start.likeliest(x - means[codes]).covariance
        each = [NormalColumns(mean, within).likeliest(x[codes == code]) for code, mean in enumerate(means)]
        normal = NormalColumns(np.stack([one.mean for one in each]), np.stack([one.covariance for one in each]))
        shares = m.Categorical(size, probs=np.bincount(codes) / len(codes))
        above = Model(Graph([(target, view)]), {target: shares, view: normal.node})
        read, columns = {f"normal {view}": _Read(above.set_params({}), [*table])}, start.likeliest(x)
        for penalty in self.ridges:
            # of two classes each has half the slope of the log-odds
            logit = m.Categorical(size, weight=ridge(penalty * (2.0 if size == 2 else 1.0)))
            read[f"logistic {view} {penalty:g}"] = self._below(view, table, logit, columns, **{target: codes})
        return read

    def _weights(self, table: pd.DataFrame, codes: NDArray[np.intp]) -> Array:
        """Weights of the models by rows that were held out; equal ones where a class has too few rows."""
        folds = min(self.n_folds, int(np.bincount(codes).min()))
        if folds < 2:
            return np.full(len(self.models_), 1 / len(self.models_))
        logs = np.zeros((len(self.models_), len(table), len(self.classes_)))
        split = StratifiedKFold(folds, shuffle=True, random_state=seed_of(self.random_state))
        for kept, held in split.split(table, codes):
            reads = self._read(table.iloc[kept].reset_index(drop=True), codes[kept])
            logs[:, held] = self._log_shares(reads, table.iloc[held])
        return pool_weights(logs, codes)

    def _log_shares(self, reads: Mapping[str, _Read], table: pd.DataFrame) -> Array:
        """Logarithms of the probabilities by all models (models, rows, classes)."""
        return np.stack([one.log_shares(table, self.target) for one in reads.values()])

    def predict_proba(self, X: ArrayLike) -> Array:
        """Probabilities of the classes given what each row shows: (n_samples, n_classes)."""
        _ = self._fitted
        return pooled(self._log_shares(self._reads, self._columns(X)), self.weights_)

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
    """Numbers by a graph; cells may be missing.

    Without a graph the target is linear in all columns, which are one normal vector: in rows with gaps, in their means
    given what the row shows.

    Args:
        graph: A graph of the columns and the target; hidden nodes need their mechanism in ``nodes``.
        nodes: Mechanisms; others are chosen by what columns hold.
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
        table = self._frame(X, first=True)
        values = _checked_target(y, table).astype(np.float64)
        if self.graph is not None:
            rows = table.assign(**{self.target: values})
            self._read = _Read(self._fitted_to(self._given(rows), rows), [*table])
        else:
            columns = NormalColumns.standard(table.shape[1]).likeliest(table.to_numpy())
            own = m.Normal(weight=ridge(1e-6) if table.shape[1] else None)
            self._read = self._below(VIEWS[0], table, own, columns, **{self.target: values})
        self.model_ = self._read.model
        return self

    def predict(self, X: ArrayLike) -> Array:
        """The mean of the target given what each row shows."""
        model = self._fitted
        return model.predict(self._read.rows(self._frame(X)), self.target).to_numpy(dtype=np.float64)


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
    max_parents: int = 6

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
        edges, nodes = _normals(table, self.max_parents)
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
