"""Gaussian mixtures with scikit-learn's conventions: a thin face on the two-node graph ``z -> x``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import DensityMixin
from sklearn.utils.validation import _check_sample_weight

from otpdag import mechanisms as m
from otpdag.engine import FitResult, Method, fit
from otpdag.errors import ModelError, check_choice, check_number
from otpdag.estimators._contract import ModelEstimator, RandomState, drawn_seed
from otpdag.graph import Graph
from otpdag.mechanisms.base import Mechanism
from otpdag.model import Model
from otpdag.numerics import Array
from otpdag.problem import Units


@dataclass(eq=False, repr=False)
class GaussianMixture(DensityMixin, ModelEstimator):
    r"""Mixture of Gaussians, estimated by optimal transport; cells may be missing.

    .. math:: z \sim \mathrm{weights}, \qquad x \mid z = k \sim N(\mathrm{means}_k, \mathrm{covariances}_k)

    The default method is entropic transport with the closed-form backward map, which is maximum likelihood; see
    :func:`otpdag.fit` for the others. Rows that are equal count as one with their weights added, so that a weight of
    two is a repetition, and neither the order of rows nor that of repetitions matters.

    **Collapse.** The likelihood of a mixture has no maximum: a component that shrinks onto one row makes it infinite.
    ``reg_covar`` bounds the variance in every direction from below, in units of each column's variance (so that a
    change of units changes nothing). It does not make such optima worse than honest ones; if a component has a weight
    of a few rows and a tiny covariance, raise ``reg_covar``, or use a simpler ``covariance_type``.

    Args:
        n_components: Number of components.
        covariance_type: ``"full"``: each component has a covariance matrix; ``"tied"``: all share one; ``"diag"``:
            each has variances; ``"spherical"``: each has one variance.
        covariances: Known covariances in the shape of ``covariances_`` (or one that broadcasts to it), not estimated.
        weights: Known weights, not estimated.
        method: ``"auto"``, ``"likelihood"``, ``"transport"``, ``"paper"`` or a :class:`~otpdag.Method`.
        n_init: Data-driven starts that train together; the best is kept.
        max_iter: Most steps of the optimiser; the method's own number if None.
        reg_covar: Smallest variance, as a share of each column's own.
        random_state: Determines the starts, and the draws of :meth:`sample`.

    Attributes:
        weights_: (n_components,).
        means_: (n_components, n_features), in the order of the first feature's mean unless weights or covariances are
            given, whose order then holds.
        covariances_: (n_components, n_features, n_features), (n_features, n_features), (n_components, n_features) or
            (n_components,), by ``covariance_type``.
        converged_: Whether the optimiser came to rest.
        n_iter_: Steps of the kept start.
        lower_bound_: Mean log-likelihood of the rows that were fitted.
        model_: The fitted :class:`~otpdag.Model`, with nodes ``z`` and ``x``.
        result_: The :class:`~otpdag.FitResult`.
        n_features_in_: Number of features.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> X = np.concatenate([rng.normal(-4, 1, (150, 2)), rng.normal(4, 1, (150, 2))])
        >>> X[::7, 0] = np.nan
        >>> mixture = GaussianMixture(2, random_state=0).fit(X)
        >>> mixture.means_.round(0)
        array([[-4., -4.],
               [ 4.,  4.]])
    """

    n_components: int = 1
    _: KW_ONLY
    covariance_type: str = "full"
    covariances: ArrayLike | None = None
    weights: ArrayLike | None = None
    method: str | Method = "auto"
    n_init: int = 4
    max_iter: int | None = None
    reg_covar: float = 1e-6
    random_state: RandomState = None

    allows_gaps = True

    # -- fit -----------------------------------------------------------------------------------------------------

    def fit(self, X: ArrayLike, y: object = None, sample_weight: ArrayLike | None = None) -> Self:
        """Estimate the mixture.

        Args:
            X: Rows (n_samples, n_features); NaN is missing.
            y: Ignored.
            sample_weight: A weight for each row; zero leaves it out.

        Raises:
            ValueError: If an argument or the data make no sense; the message says which and why.
        """
        self._check_arguments()
        table: Array = self._checked(X, first=True, least=2)
        weight: Array = _check_sample_weight(sample_weight, table, dtype=np.float64, ensure_non_negative=True)
        rows, weight = _merge_equal_rows(table, weight)
        if len(table) < self.n_components:
            raise ModelError(f"X must have at least n_components={self.n_components} rows; got n_samples={len(table)}")
        self.model_ = self._model(table.shape[1])
        self.result_: FitResult = fit(
            self.model_,
            {"x": rows},
            method=self.method,
            seed=drawn_seed(self.random_state),
            steps=self.max_iter,
            restarts=self.n_init if self.n_components > 1 else 1,
            weights=weight,
            progress=False,
        )
        self._read_params()
        self.converged_, self.n_iter_ = self.result_.status.converged, max(len(self.result_.history), 1)
        problem = self.result_.problem
        if isinstance(problem, Units) and problem.is_likelihood:  # what was minimised is its negative
            self.lower_bound_ = -self.result_.loss
        else:
            self.lower_bound_ = float(np.average(self._log_likelihood(rows), weights=weight))
        return self

    def fit_predict(self, X: ArrayLike, y: object = None, sample_weight: ArrayLike | None = None) -> NDArray[np.intp]:
        """Fit, and return the likeliest component of each row."""
        return self.fit(X, y, sample_weight).predict(X)

    def _check_arguments(self) -> None:
        self._check_counts("n_components", "n_init", "max_iter")
        check_choice("covariance_type", self.covariance_type, ("full", "tied", "diag", "spherical"))
        check_number("reg_covar", self.reg_covar, 0.0)
        if self.weights is not None and np.shape(self.weights) != (self.n_components,):
            raise ModelError(f"weights must have shape ({self.n_components},); got {np.shape(self.weights)}")

    def _model(self, features: int) -> Model:
        """The graph ``z -> x``; with one component there is no ``z``."""
        x = self._component(features)
        if self.n_components == 1:
            return Model(Graph([], nodes=["x"]), {"x": x})
        z = m.Categorical(self.n_components, probs=self.weights)
        return Model(Graph([("z", "x")], hidden=["z"]), {"z": z, "x": x})

    def _component(self, features: int) -> Mechanism:
        known = None if self.covariances is None else self._known_covariances(features)
        if self.covariance_type in ("full", "tied"):
            tied = self.covariance_type == "tied"
            return m.MultivariateNormal(features, covariance=known, shared_covariance=tied, floor=self.reg_covar)
        scale = None if known is None else np.sqrt(known)
        spherical = self.covariance_type == "spherical"
        return m.Normal(features, scale=scale, isotropic=spherical, floor=float(np.sqrt(self.reg_covar)))

    def _known_covariances(self, features: int) -> Array:
        given, shape = np.asarray(self.covariances, dtype=float), self._covariance_shape(features)
        try:
            covariances = np.broadcast_to(given, shape).copy()
        except ValueError:
            raise ModelError(
                f"covariances must have a shape that broadcasts to {shape} with covariance_type="
                f"{self.covariance_type!r}; got {given.shape}"
            ) from None
        if self.covariance_type in ("diag", "spherical") and not (covariances > 0).all():
            raise ModelError("covariances must be positive")
        return covariances

    def _covariance_shape(self, features: int) -> tuple[int, ...]:
        k = self.n_components
        shapes = {"full": (k, features, features), "tied": (features, features), "diag": (k, features)}
        return shapes.get(self.covariance_type, (k,))

    def _read_params(self) -> None:
        params, k, d = self.model_.params(), self.n_components, self.n_features_in_
        self.weights_ = params["z"]["probs"] if "z" in params else np.ones(1)
        self.means_ = params["x"]["loc"].reshape(k, d)
        if self.covariance_type in ("full", "tied"):
            covariances = params["x"]["covariance"]
        else:
            covariances = params["x"]["scale"] ** 2
        self.covariances_ = covariances.reshape(self._covariance_shape(d))

    # -- use -----------------------------------------------------------------------------------------------------

    def score_samples(self, X: ArrayLike) -> Array:
        """Log-density of each row's seen cells."""
        return self._log_likelihood(self._table(X)["x"])

    def score(self, X: ArrayLike, y: object = None) -> float:
        """Mean log-density of the rows."""
        return float(self.score_samples(X).mean())

    def predict_proba(self, X: ArrayLike) -> Array:
        """Probability of each component, given what each row shows: (n_samples, n_components)."""
        table = self._table(X)
        if self.n_components == 1:
            return np.ones((len(table["x"]), 1))
        return self.model_.predict_proba(table, "z").to_numpy()

    def predict(self, X: ArrayLike) -> NDArray[np.intp]:
        """The likeliest component of each row."""
        return self.predict_proba(X).argmax(-1)

    def sample(self, n_samples: int = 1, *, random_state: RandomState = None) -> tuple[Array, NDArray[np.intp]]:
        """Draw rows, and the component of each.

        Args:
            n_samples: How many.
            random_state: Determines the draw; that of the estimator if None.
        """
        seed = drawn_seed(self.random_state if random_state is None else random_state)
        frame = self._fitted.sample(n_samples, seed=seed)
        labels = frame.pop("z") if "z" in frame else np.zeros(n_samples)
        return frame.to_numpy(dtype=float), np.asarray(labels, dtype=np.intp)

    def bic(self, X: ArrayLike) -> float:
        """Bayesian information criterion on these rows; lower is better."""
        return self._fitted.bic(self._table(X))

    def aic(self, X: ArrayLike) -> float:
        """Akaike's information criterion on these rows; lower is better."""
        return self._fitted.aic(self._table(X))

    def _table(self, X: ArrayLike) -> dict[str, Array]:
        """Rows as the model reads them."""
        _ = self._fitted
        return {"x": self._checked(X)}

    def _log_likelihood(self, X: Array, at_once: int = 2_000) -> Array:
        """Of each row, in blocks: every row meets every component, which takes many times the table's memory."""
        blocks = ({"x": X[at : at + at_once]} for at in range(0, len(X), at_once))
        return np.concatenate([self.model_.log_likelihood(block, per_row=True) for block in blocks])


def _merge_equal_rows(X: Array, weight: Array) -> tuple[Array, Array]:
    """Distinct rows in sorted order with their summed weights; rows without weight are left out."""
    if not (weight > 0).all():
        X, weight = X[weight > 0], weight[weight > 0]
    order = np.argsort(X[:, 0])
    if (np.diff(X[order, 0]) > 0).all():  # the first feature tells all rows apart, as one that was measured does
        return X[order], weight[order]
    keys = np.concatenate([np.nan_to_num(X), np.isnan(X)], 1)
    _, first, group = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    return X[first], np.asarray(np.bincount(group.ravel(), weights=weight), dtype=np.float64)
