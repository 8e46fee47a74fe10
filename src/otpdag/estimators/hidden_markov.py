"""Hidden Markov models in the vocabulary of hmmlearn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import Tags

from otpdag.data import Schema, column_type
from otpdag.data.sequences import SequenceBatch, Sequences, encode_sequences
from otpdag.engine import FitResult, fit
from otpdag.errors import DataError, ModelError
from otpdag.estimators._contract import RandomState, check_fitted, checked_rows, seed_of
from otpdag.graph import Graph, lag
from otpdag.likelihood import sequence_posterior
from otpdag.mechanisms import Bernoulli, Categorical, Mechanism, Normal, Poisson, StayOrMove
from otpdag.model import Model

Array = NDArray[np.float64]
Emission = Literal["auto", "poisson", "gaussian", "categorical", "bernoulli"]

_EMISSIONS = ("poisson", "gaussian", "categorical", "bernoulli")
_STATE = "state"


class HiddenMarkovModel(BaseEstimator):
    r"""A chain of hidden states, each of which gives the columns of a step their distribution.

    .. math:: z_1 \sim \mathrm{startprob}, \quad z_t \mid z_{t-1} \sim \mathrm{transmat}[z_{t-1}], \quad
              x_t \mid z_t \sim \mathrm{emission}[z_t]

    It is the graph ``Graph([lag("state", "state"), ("state", "x0"), ...], hidden=["state"])`` with a mechanism for each
    column, fitted by :func:`otpdag.fit`; ``model_`` is that model. NaN is missing, anywhere. States are in the order
    of the first column's mean.

    **Method.** The estimator is entropic, which for hidden categories is maximum likelihood: the least error where the
    model holds. The other methods are for ``otpdag.fit`` on ``model_``: ``"transport"`` where some steps may be wrong,
    or the model holds only nearby in time: it compares three neighbouring steps of data and model, by kernels that
    hardly feel a number far from all others, and takes forty times as long. ``"paper"`` and ``transport("backward")``
    are for comparison: relaxed paths let states last longer than they do, and overstate the probability to stay by
    0.04 to 0.12, which is not to be read off them.

    Args:
        n_components: Number of states.
        emission: ``"poisson"``, ``"gaussian"``, ``"categorical"`` or ``"bernoulli"``, or a list with one of them for
            each column. ``"auto"`` is Gaussian for a column of numbers and Poisson for whole ones that lie as counts do
            (:func:`otpdag.data.column_type`); ``emission_`` says what it was. Columns are independent given the state.
        transitions: ``"full"``, a matrix of any probabilities, or ``"stay"``, the paper's one-parameter form: a state
            stays with one probability and else moves to any other.
        startprob: ``"learn"``, ``"uniform"``, or fixed probabilities of the first step's states.
        transmat: A fixed transition matrix; states then are in its order.
        n_init: Number of data-driven starts; the best is kept.
        random_state: Seed or generator; None is another each time.
        n_iter: Most steps of the optimiser.

    Attributes:
        emission_: The kind of each column.
        startprob_: Probabilities of the first step's states (K,).
        transmat_: Transition matrix (K, K), rows sum to one.
        stay_: The probability of no change, with ``transitions="stay"``.
        lambdas_: Rates of Poisson columns (K, columns).
        means_: Means of Gaussian columns (K, columns).
        covars_: Variances of Gaussian columns (K, columns).
        emissionprob_: Probabilities of categories: (K, categories), or a list of such for several columns.
        model_: The fitted :class:`otpdag.Model`.
        result_: The :class:`otpdag.FitResult`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> states = np.repeat([0, 1, 0, 1], 100)
    >>> X = rng.poisson(np.array([3.0, 12.0])[states])[:, None]
    >>> hmm = HiddenMarkovModel(2).fit(X)
    >>> hmm.lambdas_.round(0).ravel(), bool((hmm.predict(X) == states).mean() > 0.95)
    (array([ 3., 12.]), True)
    """

    def __init__(
        self,
        n_components: int = 2,
        *,
        emission: Emission | Sequence[Emission] = "auto",
        transitions: Literal["full", "stay"] = "full",
        startprob: Literal["learn", "uniform"] | ArrayLike = "learn",
        transmat: ArrayLike | None = None,
        n_init: int = 4,
        random_state: RandomState = 0,
        n_iter: int = 400,
    ) -> None:
        self.n_components = n_components
        self.emission = emission
        self.transitions = transitions
        self.startprob = startprob
        self.transmat = transmat
        self.n_init = n_init
        self.random_state = random_state
        self.n_iter = n_iter

    # -- fit ------------------------------------------------------------------------------------------------------

    def fit(self, X: ArrayLike, y: Any = None, lengths: ArrayLike | None = None) -> Self:
        """Estimate the parameters.

        Args:
            X: Steps of all sequences one after another (steps, columns); NaN is missing.
            y: Lengths of the sequences, as hmmlearn's second argument; a target with an entry for each step, which
                scikit-learn passes here, is ignored.
            lengths: Lengths of the sequences; one sequence if left out.
        """
        self._check()
        table = self._columns(X, first=True)
        lengths = _lengths(y, lengths, len(table))
        kinds = self._kinds(table)
        self.emission_: tuple[str, ...] = kinds
        emissions = {f"x{i}": _mechanism(kind, table[:, i]) for i, kind in enumerate(kinds)}
        self._names = tuple(emissions)
        graph = Graph([lag(_STATE, _STATE), *((_STATE, name) for name in self._names)], hidden=[_STATE])
        self.model_ = Model(graph, {_STATE: self._transition(), f"{_STATE}[0]": self._first(), **emissions})
        self.result_: FitResult = fit(
            self.model_,
            Sequences(table, lengths=_all(lengths, len(table))),
            method="likelihood",
            seed=seed_of(self.random_state),
            steps=self.n_iter,
            restarts=self.n_init,
        )
        self._read(kinds)
        return self

    def _check(self) -> None:
        if not isinstance(self.n_components, int | np.integer) or self.n_components < 1:
            raise ModelError(f"n_components must be a whole number of at least 1; got {self.n_components!r}")
        if self.n_components < 2 and self.transitions == "stay":
            raise ModelError("transitions='stay' needs n_components of at least 2; got 1")
        if self.transitions not in ("full", "stay"):
            raise ModelError(f"transitions must be 'full' or 'stay'; got {self.transitions!r}")
        if self.transmat is not None and self.transitions == "stay":
            raise ModelError("give transmat or transitions='stay', not both")
        if isinstance(self.startprob, str) and self.startprob not in ("learn", "uniform"):
            raise ModelError(f"startprob must be 'learn', 'uniform' or probabilities; got {self.startprob!r}")

    def _kinds(self, table: Array) -> tuple[str, ...]:
        columns = table.shape[1]
        kinds = (self.emission,) * columns if isinstance(self.emission, str) else tuple(self.emission)
        for kind in kinds:
            if kind not in ("auto", *_EMISSIONS):
                raise ModelError(f"emission must be 'auto' or one of {', '.join(_EMISSIONS)}; got {kind!r}")
        if len(kinds) != columns:
            raise ModelError(f"emission must name one kind for each of the {columns} columns; got {len(kinds)}")
        return tuple(_kind_of(table[:, i]) if kind == "auto" else kind for i, kind in enumerate(kinds))

    def _transition(self) -> Mechanism:
        if self.transitions == "stay":
            return StayOrMove(self.n_components)
        return Categorical(self.n_components, probs=None if self.transmat is None else np.asarray(self.transmat))

    def _first(self) -> Mechanism:
        if isinstance(self.startprob, str):
            fixed = None if self.startprob == "learn" else np.full(self.n_components, 1 / self.n_components)
        else:
            fixed = np.asarray(self.startprob, dtype=float)
        return Categorical(self.n_components, probs=fixed)

    def _read(self, kinds: Sequence[str]) -> None:
        params = self.model_.params()
        size = self.n_components
        self.startprob_: Array = params[f"{_STATE}[0]"]["probs"]
        if self.transitions == "stay":
            self.stay_ = float(params[_STATE]["stay"])
            self.transmat_: Array = np.full((size, size), (1 - self.stay_) / (size - 1))
            np.fill_diagonal(self.transmat_, self.stay_)
        else:
            self.transmat_ = params[_STATE]["probs"]
        by_kind: dict[str, list[dict[str, Array]]] = {kind: [] for kind in _EMISSIONS}
        for name, kind in zip(self._names, kinds, strict=True):
            # with one state a table over the states has no axis for them
            own = {
                key: value.reshape(size, *value.shape[1:] if size > 1 else value.shape)
                for key, value in params[name].items()
            }
            by_kind[kind].append(own)
        if by_kind["poisson"]:
            self.lambdas_: Array = np.exp(np.stack([emission["log_rate"] for emission in by_kind["poisson"]], 1))
        if by_kind["gaussian"]:
            self.means_: Array = np.stack([emission["loc"] for emission in by_kind["gaussian"]], 1)
            self.covars_: Array = np.stack([emission["scale"] for emission in by_kind["gaussian"]], 1) ** 2
        tables = [emission["probs"] for emission in by_kind["categorical"] + by_kind["bernoulli"]]
        if tables:
            self.emissionprob_: Array | list[Array] = tables[0] if len(tables) == 1 else tables

    # -- use ------------------------------------------------------------------------------------------------------

    def predict(self, X: ArrayLike, lengths: ArrayLike | None = None) -> NDArray[np.int64]:
        """The states of the likeliest path (Viterbi), one for each step."""
        return self.decode(X, lengths)[1]

    def decode(self, X: ArrayLike, lengths: ArrayLike | None = None) -> tuple[float, NDArray[np.int64]]:
        """The log-probability of the likeliest path together with the data, and its states."""
        paths, log_prob = sequence_posterior.decode_paths(
            self._fitted.structure, self._naturals, self._encode(X, lengths)
        )
        return float(log_prob.sum()), paths[_STATE].numpy()

    def predict_proba(self, X: ArrayLike, lengths: ArrayLike | None = None) -> Array:
        """Probabilities of the states of each step given all of its sequence (steps, K)."""
        return self.score_samples(X, lengths)[1]

    def score_samples(self, X: ArrayLike, lengths: ArrayLike | None = None) -> tuple[float, Array]:
        """The log-likelihood, and the probabilities of the states of each step."""
        smoothed = sequence_posterior.smooth(self._fitted.structure, self._naturals, self._encode(X, lengths))
        return float(smoothed.log_likelihood.sum()), smoothed.of(_STATE).numpy()

    def score(self, X: ArrayLike, y: Any = None, lengths: ArrayLike | None = None) -> float:
        """The log-likelihood of all sequences; ``y`` as in :meth:`fit`."""
        check_fitted(self, "fit(X, lengths=...)")
        return self.score_samples(X, _lengths(y, lengths, len(self._columns(X))))[0]

    def sample(self, n_samples: int = 1, random_state: RandomState = None) -> tuple[Array, NDArray[np.int64]]:
        """Draw one sequence: its columns (steps, columns) and its states."""
        seed = seed_of(self.random_state if random_state is None else random_state)
        table = self._fitted.sample(1, length=n_samples, seed=seed)
        return table[list(self._names)].to_numpy(dtype=float), table[_STATE].to_numpy(dtype=np.int64)

    def aic(self, X: ArrayLike, lengths: ArrayLike | None = None) -> float:
        """Akaike's criterion, smaller is better."""
        return -2 * self.score(X, lengths=lengths) + 2 * self.n_parameters_

    def bic(self, X: ArrayLike, lengths: ArrayLike | None = None) -> float:
        """The Bayesian information criterion, smaller is better."""
        steps = len(self._columns(X))
        return -2 * self.score(X, lengths=lengths) + float(np.log(steps)) * self.n_parameters_

    @property
    def n_parameters_(self) -> int:
        """Number of free parameters."""
        total = 0
        for mechanism in self._fitted.mechanisms.values():
            for name, parameter in mechanism.declared().items():
                shape = (*parameter.shape[:-1], parameter.shape[-1] - 1) if name == "probs" else parameter.shape
                total += int(np.prod(shape)) if parameter.learned else 0
        return total

    @property
    def _fitted(self) -> Model:
        check_fitted(self, "fit(X, lengths=...)")
        return self.model_

    @property
    def _naturals(self) -> dict[str, dict[str, torch.Tensor]]:
        return {node: dict(values) for node, values in self._fitted.fitted.naturals.items()}

    def _columns(self, X: ArrayLike, *, first: bool = False) -> Array:
        """Steps as columns of numbers; a single series may have one axis."""
        if isinstance(X, np.ndarray | pd.Series | list) and np.ndim(X) == 1:
            X = np.reshape(np.asarray(X), (-1, 1))
        return checked_rows(self, X, first=first, dtype=np.float64, ensure_all_finite="allow-nan")

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _encode(self, X: ArrayLike, lengths: ArrayLike | None) -> SequenceBatch:
        schema = Schema.of(self._fitted.spaces, self._fitted.graph)
        table = self._columns(X)
        steps = Sequences(table, lengths=_all(lengths, len(table)))
        return encode_sequences(steps, schema, hidden=[_STATE], partial=True)


def _lengths(y: Any, lengths: ArrayLike | None, steps: int) -> ArrayLike | None:
    """Lengths of sequences by their own name or, as hmmlearn takes them, second; a target for each step is ignored."""
    if y is None or np.size(y) == steps:
        return lengths
    if lengths is not None:
        raise DataError(f"y must have an entry for each of the {steps} steps, if lengths are given; got {np.size(y)}")
    return np.asarray(y)


def _kind_of(column: Array) -> str:
    """Gaussian for numbers, Poisson for counts and for codes, which are as whole."""
    seen = column[~np.isnan(column)]
    if not seen.size or bool((seen < 0).any()) or bool((seen != np.floor(seen)).any()):
        return "gaussian"
    return "gaussian" if column_type(pd.Series(seen)).kind == "number" else "poisson"


def _all(lengths: ArrayLike | None, rows: int) -> ArrayLike:
    return [rows] if lengths is None else lengths


def _mechanism(kind: str, column: Array) -> Mechanism:
    match kind:
        case "poisson":
            return Poisson()
        case "gaussian":
            return Normal()
        case "bernoulli":
            return Bernoulli()
    return Categorical(max(2, int(np.nanmax(column, initial=1)) + 1))
