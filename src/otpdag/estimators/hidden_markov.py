"""Hidden Markov models in the vocabulary of hmmlearn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Self

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from otpdag.data import column_type
from otpdag.data.sequences import SequenceBatch, Sequences
from otpdag.engine import FitResult, fit
from otpdag.errors import DataError, ModelError, check_choice, check_count
from otpdag.estimators._contract import ModelEstimator, RandomState, seed_of
from otpdag.graph import Graph, lag
from otpdag.likelihood import sequence_posterior
from otpdag.mechanisms import Bernoulli, Categorical, Mechanism, Normal, Poisson, StayOrMove
from otpdag.model import Model
from otpdag.numerics import Array, Ints

Emission = Literal["auto", "poisson", "gaussian", "categorical", "bernoulli"]

_EMISSIONS = {"poisson": Poisson, "gaussian": Normal, "categorical": Categorical, "bernoulli": Bernoulli}
_STATE = "state"


@dataclass(eq=False, repr=False)
class HiddenMarkovModel(ModelEstimator):
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
    are for comparison: the probability to stay, off by up to 0.25 and 0.08, is not to be read off them.

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

    n_components: int = 2
    _: KW_ONLY
    emission: Emission | Sequence[Emission] = "auto"
    transitions: Literal["full", "stay"] = "full"
    startprob: Literal["learn", "uniform"] | ArrayLike = "learn"
    transmat: ArrayLike | None = None
    n_init: int = 4
    random_state: RandomState = 0
    n_iter: int = 400

    fit_call = "fit(X, lengths=...)"
    allows_gaps = True

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
        sequences = self._sequences(X, lengths, y, first=True)
        columns = np.asarray(sequences.table).T
        self.emission_: tuple[str, ...] = self._kinds(columns)
        sizes = [max(2, int(np.nanmax(column, initial=1)) + 1) for column in columns]
        emissions = {
            f"x{number}": Categorical(size) if kind == "categorical" else _EMISSIONS[kind]()
            for number, (kind, size) in enumerate(zip(self.emission_, sizes, strict=True))
        }
        graph = Graph([lag(_STATE, _STATE), *((_STATE, name) for name in emissions)], hidden=[_STATE])
        self.model_ = Model(graph, {_STATE: self._transition(), f"{_STATE}[0]": self._first(), **emissions})
        self.result_: FitResult = fit(
            self.model_,
            sequences,
            method="likelihood",
            seed=seed_of(self.random_state),
            steps=self.n_iter,
            restarts=self.n_init,
        )
        self._read()
        return self

    def _check(self) -> None:
        check_count("n_components", self.n_components, least=2 if self.transitions == "stay" else 1)
        check_choice("transitions", self.transitions, ("full", "stay"))
        if self.transmat is not None and self.transitions == "stay":
            raise ModelError("give transmat or transitions='stay', not both")
        if isinstance(self.startprob, str):
            check_choice("startprob that is text", self.startprob, ("learn", "uniform"))

    def _kinds(self, columns: Array) -> tuple[str, ...]:
        kinds = (self.emission,) * len(columns) if isinstance(self.emission, str) else tuple(self.emission)
        for kind in kinds:
            check_choice("emission", kind, ("auto", *_EMISSIONS))
        if len(kinds) != len(columns):
            raise ModelError(f"emission must name one kind for each of the {len(columns)} columns; got {len(kinds)}")
        return tuple(_kind_of(column) if kind == "auto" else kind for kind, column in zip(kinds, columns, strict=True))

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

    def _read(self) -> None:
        params, size = self.model_.params(), self.n_components
        self.startprob_: Array = params[f"{_STATE}[0]"]["probs"]
        if self.transitions == "stay":
            self.stay_ = float(params[_STATE]["stay"])
            self.transmat_: Array = np.full((size, size), (1 - self.stay_) / (size - 1))
            np.fill_diagonal(self.transmat_, self.stay_)
        else:
            self.transmat_ = params[_STATE]["probs"]
        nodes: dict[str, list[str]] = {kind: [] for kind in _EMISSIONS}
        for number, kind in enumerate(self.emission_):
            nodes[kind].append(f"x{number}")

        def numbers(kind: str, name: str) -> Array:
            # with one state a table over the states has no axis for them
            return np.stack([params[node][name].reshape(size) for node in nodes[kind]], 1)

        if nodes["poisson"]:
            self.lambdas_: Array = np.exp(numbers("poisson", "log_rate"))
        if nodes["gaussian"]:
            self.means_: Array = numbers("gaussian", "loc")
            self.covars_: Array = numbers("gaussian", "scale") ** 2
        tables = [params[node]["probs"].reshape(size, -1) for node in nodes["categorical"] + nodes["bernoulli"]]
        if tables:
            self.emissionprob_: Array | list[Array] = tables[0] if len(tables) == 1 else tables

    # -- use ------------------------------------------------------------------------------------------------------

    def predict(self, X: ArrayLike, lengths: ArrayLike | None = None) -> Ints:
        """The states of the likeliest path (Viterbi), one for each step."""
        return self.decode(X, lengths)[1]

    def decode(self, X: ArrayLike, lengths: ArrayLike | None = None) -> tuple[float, Ints]:
        """The log-probability of the likeliest path together with the data, and its states."""
        fitted = self._fitted.fitted
        paths, log_prob = sequence_posterior.decode_paths(fitted, self._encode(X, lengths))
        return float(log_prob.sum()), paths[_STATE].numpy()

    def predict_proba(self, X: ArrayLike, lengths: ArrayLike | None = None) -> Array:
        """Probabilities of the states of each step given all of its sequence (steps, K)."""
        return self.score_samples(X, lengths)[1]

    def score_samples(self, X: ArrayLike, lengths: ArrayLike | None = None) -> tuple[float, Array]:
        """The log-likelihood, and the probabilities of the states of each step."""
        fitted = self._fitted.fitted
        smoothed = sequence_posterior.smooth(fitted, self._encode(X, lengths))
        return float(smoothed.log_likelihood.sum()), smoothed.of(_STATE).numpy()

    def score(self, X: ArrayLike, y: Any = None, lengths: ArrayLike | None = None) -> float:
        """The log-likelihood of all sequences; ``y`` as in :meth:`fit`."""
        return float(np.sum(self._fitted.log_likelihood(self._sequences(X, lengths, y))))

    def sample(self, n_samples: int = 1, random_state: RandomState = None) -> tuple[Array, Ints]:
        """Draw one sequence: its columns (steps, columns) and its states."""
        seed = seed_of(self.random_state if random_state is None else random_state)
        table = self._fitted.sample(1, length=n_samples, seed=seed)
        columns = [f"x{number}" for number in range(len(self.emission_))]
        return table[columns].to_numpy(dtype=float), table[_STATE].to_numpy(dtype=np.int64)

    def forecast(
        self, X: ArrayLike, steps: int = 1, lengths: ArrayLike | None = None, *, level: float = 0.9, draws: int = 1000
    ) -> pd.DataFrame:
        """What comes after each sequence: mean (or likeliest category) and interval of every column.

        Intervals count the noise of the future and how sure the parameters are (:meth:`otpdag.FitResult.forecast`).

        Args:
            X: Steps of all sequences one after another (steps, columns); NaN is missing.
            steps: How many steps to look ahead.
            lengths: Lengths of the sequences; one sequence if left out.
            level: Share of futures that an interval holds.
            draws: Futures that are drawn, by the seed of ``random_state``.

        Returns:
            One row for each sequence and step (the first step after the end is 1). Columns are called as those of ``X``
            that was fitted, or ``x0``, ``x1``, ...; of a number also ``x0.lower`` and ``x0.upper``, of a category
            ``x0.probability``.
        """
        _ = self._fitted
        sequences = self._sequences(X, lengths)
        told = self.result_.forecast(sequences, steps, level=level, draws=draws, seed=seed_of(self.random_state))
        names = {f"x{number}": str(name) for number, name in enumerate(getattr(self, "feature_names_in_", ()))}
        return told.rename(columns=lambda name: ".".join(names.get(part, part) for part in name.split(".")))

    def aic(self, X: ArrayLike, lengths: ArrayLike | None = None) -> float:
        """Akaike's criterion, smaller is better."""
        return self._fitted.aic(self._sequences(X, lengths))

    def bic(self, X: ArrayLike, lengths: ArrayLike | None = None) -> float:
        """The Bayesian information criterion, smaller is better."""
        return self._fitted.bic(self._sequences(X, lengths))

    @property
    def n_parameters_(self) -> int:
        """Number of free parameters."""
        return self._fitted.n_parameters

    def _sequences(self, X: ArrayLike, lengths: ArrayLike | None, y: Any = None, *, first: bool = False) -> Sequences:
        """Steps as columns of numbers, a single series too; lengths may come as ``y``, a target for each step not."""
        if isinstance(X, np.ndarray | pd.Series | list) and np.ndim(X) == 1:
            X = np.reshape(np.asarray(X), (-1, 1))
        table: Array = self._checked(X, first=first, least=2)
        steps = len(table)
        if y is not None and np.size(y) != steps:
            if lengths is not None:
                raise DataError(f"y must have an entry for each of {steps} steps, beside lengths; got {np.size(y)}")
            lengths = np.asarray(y)
        return Sequences(table, lengths=[steps] if lengths is None else lengths)

    def _encode(self, X: ArrayLike, lengths: ArrayLike | None) -> SequenceBatch:
        return self._fitted._encode_sequences(self._sequences(X, lengths), partial=True)[0]


def _kind_of(column: Array) -> str:
    """Gaussian for numbers, Poisson for counts and for codes, which are as whole."""
    seen = column[~np.isnan(column)]
    if not seen.size or bool((seen < 0).any()) or bool((seen != np.floor(seen)).any()):
        return "gaussian"
    return "gaussian" if column_type(pd.Series(seen)).kind == "number" else "poisson"
