"""Choosing between models: criteria of one data set, and cross-validation."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy.special import chdtrc

from otpdag.data.sequences import Sequences, as_sequences
from otpdag.engine import FitResult, fit
from otpdag.errors import DataError, ModelError, check_choice, check_count
from otpdag.model import Model
from otpdag.numerics import Array, Flags

Criterion = Literal["bic", "aic", "cv"]

COLUMNS = {"bic": "BIC", "aic": "AIC", "cv": "cv_log_likelihood"}


def compare(
    models: Mapping[Any, Model] | Sequence[Model], data: Any, *, folds: int = 0, seed: int = 0, **options: Any
) -> pd.DataFrame:
    """Compare models of the same columns; those that have no parameters yet are fitted first.

    Args:
        models: Models by name, or in a list.
        data: A table, or sequences.
        folds: Parts of a cross-validation, for which models are fitted anew; none by default.
        seed: Determines fits and parts.
        options: Passed on to :func:`otpdag.fit`.

    Returns:
        One row for each model, in the order given: ``log_likelihood``, ``parameters``, ``AIC``, ``BIC``, ``chi2``,
        ``df`` and ``p_value`` of the likelihood ratio to the model with the most parameters, which means something of
        those that are cases of it, and, with folds, ``cv_log_likelihood``, the mean of a held-out row (or step), with
        its standard error ``cv_std_error``.

    >>> import numpy as np, otpdag as otp
    >>> from otpdag import mechanisms as m
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=200)
    >>> table = pd.DataFrame({"x": x, "y": 2 * x + rng.normal(size=200)})
    >>> nodes = {"x": m.Normal(), "y": m.Normal()}
    >>> models = {"joined": otp.Model(otp.Graph([("x", "y")]), nodes)}
    >>> models["apart"] = otp.Model(otp.Graph([], nodes=["x", "y"]), nodes)
    >>> compare(models, table)["BIC"].idxmin()
    'joined'
    """
    if not isinstance(models, Iterable):
        raise ModelError(f"models must be models by name or in a list; got {type(models).__name__}")
    named = dict(models) if isinstance(models, Mapping) else {str(i): model for i, model in enumerate(models)}
    for name, model in named.items():
        if not isinstance(model, Model):
            raise ModelError(f"models must hold otp.Model only; got {type(model).__name__} at {name!r}")
    if not named:
        raise ModelError("models must hold at least one model; got none")
    _check_comparable(named)
    for model in named.values():
        if not model.is_fitted:
            fit(model, data, seed=seed, **options)
    table = _criteria(named, data, folds if folds else None, seed, options)
    table.index.name = "model"
    lacking = table["parameters"].max() - table["parameters"]
    ratio = 2 * (table["log_likelihood"].iloc[lacking.argmin()] - table["log_likelihood"])
    chance = pd.Series(chdtrc(lacking, ratio.clip(lower=0.0)), table.index)
    tests = pd.DataFrame({"chi2": ratio, "df": lacking, "p_value": chance}).where(lacking > 0)
    return pd.concat([table.iloc[:, :4], tests, table.iloc[:, 4:]], axis=1)


@dataclass(frozen=True)
class Selection:
    """What :func:`select` found.

    Attributes:
        best: The value that was chosen.
        criterion: By what.
        table: One row for each value, with the columns of :func:`compare`, whether its fit ``converged``, and in what
            the rows of a table contradict it most clearly (:meth:`otpdag.Model.check`, adjusted p below 0.01): a node
            of a wrong family takes more classes than there are.
        results: The fit of each value.
    """

    best: Any
    criterion: Criterion
    table: pd.DataFrame
    results: Mapping[Any, FitResult] = field(repr=False)

    @property
    def model(self) -> Model:
        """The model that was chosen, fitted to all rows."""
        return self.results[self.best].model

    @property
    def result(self) -> FitResult:
        """Its fit."""
        return self.results[self.best]

    @property
    def hint(self) -> str:
        """Whether the last of several is best, and whether the rows contradict it all the same."""
        at, many = list(self.results).index(self.best), len(self.table)
        told = ", the last that was tried" if 0 < at == many - 1 else ""
        if self.table["contradicted"].iloc[at]:
            told += "; rows contradict it: a node may be of another family"
        return told

    def __str__(self) -> str:
        shown = self.table.to_string(float_format=lambda x: f"{x:.6g}")
        return f"{self.best!r} is best by {COLUMNS[self.criterion]}{self.hint}\n{shown}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = html.escape(f"{self.best!r} is best by {COLUMNS[self.criterion]}{self.hint}")
        return f"<p>{head}</p>{self.table.to_html(float_format=lambda x: f'{x:.6g}')}"


def select(
    builder: Callable[[Any], Model],
    values: Iterable[Any],
    data: Any,
    *,
    criterion: Criterion = "bic",
    folds: int = 5,
    seed: int = 0,
    **options: Any,
) -> Selection:
    """Fit a model for each of some values, such as numbers of classes, and choose between them.

    ``otp.plots.plot_selection`` draws the criterion.

    Args:
        builder: Makes the model of a value, unfitted.
        values: What to try; one class or one state is allowed: ``range(1, 8)``.
        data: A table, or sequences.
        criterion: ``"bic"`` or ``"aic"``, which are smallest, or ``"cv"``: the log-likelihood of held-out rows.
        folds: Parts of the cross-validation.
        seed: Determines fits and parts.
        options: Passed on to :func:`otpdag.fit`.

    >>> import numpy as np, otpdag as otp
    >>> from otpdag import mechanisms as m
    >>> rng = np.random.default_rng(0)
    >>> table = pd.DataFrame({"x": np.where(rng.random(300) < 0.5, -4.0, 4.0) + rng.normal(size=300)})
    >>> graph = otp.Graph([("z", "x")], hidden=["z"])
    >>> select(lambda k: otp.Model(graph, {"z": m.Categorical(k), "x": m.Normal()}), range(1, 4), table).best
    2
    """
    check_choice("criterion", criterion, tuple(COLUMNS))
    tried = list(dict.fromkeys(values))
    if not tried:
        raise ModelError("values must hold at least one value; got none")
    results = {value: fit(builder(value), data, seed=seed, **options) for value in tried}
    models = {value: result.model for value, result in results.items()}
    _check_comparable(models)
    table = _criteria(models, data, folds if criterion == "cv" else None, seed, options)
    table["converged"] = [bool(result.status) for result in results.values()]
    table["contradicted"] = [_contradicted(model, data, seed) for model in models.values()]
    scores = table[COLUMNS[criterion]]
    at = scores.argmax() if criterion == "cv" else scores.argmin()
    return Selection(tried[int(at)], criterion, table, results)


def _contradicted(model: Model, data: Any, seed: int) -> str:
    """In what rows contradict a model most clearly, if they do; nothing is told of sequences."""
    if model.graph.is_dynamic or not model.structure.has_densities:
        return ""
    worst = model.check(data, seed=seed).iloc[:1]
    return "".join(f"{node}: {why}" for node, why in worst.loc[worst["adjusted"] < 0.01, "finding"].items())


def _criteria(
    models: Mapping[Any, Model], data: Any, folds: int | None, seed: int, options: Mapping[str, Any]
) -> pd.DataFrame:
    """One row for each fitted model, in the order given."""
    rows = {
        name: {
            "log_likelihood": model.log_likelihood(data),
            "parameters": model.n_parameters,
            "AIC": model.aic(data),
            "BIC": model.bic(data),
            **({} if folds is None else _validated(model, data, folds, seed, options)),
        }
        for name, model in models.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def _check_comparable(models: Mapping[Any, Model]) -> None:
    """Refuse models whose likelihoods are of different things."""
    first_name, first = next(iter(models.items()))
    shown = {node: first.spaces[node].is_countable for node in first.graph.observed}
    for name, model in models.items():
        own = {node: model.spaces[node].is_countable for node in model.graph.observed}
        given = set(model.structure.given) ^ set(first.structure.given)
        if set(own) != set(shown) or given:
            differ = sorted((set(own) ^ set(shown)) | given)
            raise ModelError(
                f"models must describe the same columns; {first_name!r} and {name!r} differ in "
                f"{', '.join(map(repr, differ))}, so that their likelihoods do not compare"
            )
        for node, countable in own.items():
            if countable != shown[node]:
                raise ModelError(
                    f"node {node!r} has densities in one of the models {first_name!r} and {name!r} and probabilities "
                    "in the other: their likelihoods do not compare"
                )


def _validated(model: Model, data: Any, folds: int, seed: int, options: Mapping[str, Any]) -> dict[str, float]:
    """The mean log-likelihood of a held-out row or step, and its standard error over rows or sequences."""
    if "weights" in options:
        raise ModelError("cross-validation does not take weights")
    scores, sizes = [], []
    for train, test, steps in _parts(model, data, folds, seed):
        fresh = Model(model.graph, model.mechanisms)
        fit(fresh, train, seed=seed, **options)
        held = fresh.log_likelihood(test, per_row=True)
        scores.append(np.asarray(held, dtype=float))
        sizes.append(steps)
    score, size = np.concatenate(scores), np.concatenate(sizes)
    mean = score.sum() / size.sum()
    spread = np.sqrt(((score - mean * size) ** 2).sum()) / size.sum()
    return {"cv_log_likelihood": float(mean), "cv_std_error": float(spread)}


def _parts(model: Model, data: Any, folds: int, seed: int) -> Iterator[tuple[Any, Any, Array]]:
    """Rows (or sequences) to fit, those held out, and how many steps each of these has."""
    check_count("folds", folds, 2)
    if model.graph.is_dynamic:
        sequences = as_sequences(data)
        table, lengths = sequences.table, sequences.lengths
        if not isinstance(table, pd.DataFrame):
            raise DataError("cross-validation of sequences needs a DataFrame of steps, or a list of frames")
    elif model.structure.shared:
        table, lengths = data, model.in_groups(data).lengths
    elif isinstance(data, pd.DataFrame):
        table, lengths = data, np.ones(len(data), dtype=int)
    else:
        raise DataError(f"cross-validation needs a DataFrame; got {type(data).__name__}")
    if len(lengths) < folds:
        raise DataError(f"cross-validation in {folds} parts needs as many rows or sequences; got {len(lengths)}")
    owner = pd.factorize(table[model.group])[0] if model.group else np.repeat(np.arange(len(lengths)), lengths)
    table = _with_all_levels(table)

    def some(chosen: Flags) -> pd.DataFrame | Sequences:
        rows = table[chosen[owner]]
        return Sequences(rows, lengths=lengths[chosen]) if model.graph.is_dynamic else rows

    fold = np.random.default_rng(seed).permutation(np.arange(len(lengths)) % folds)
    for part in range(folds):
        yield some(fold != part), some(fold == part), lengths[fold == part].astype(float)


def _with_all_levels(table: pd.DataFrame) -> pd.DataFrame:
    """Columns of names as categories, so that a part that lacks a level still knows it."""
    named = [name for name in table.columns if table[name].dtype == object or pd.api.types.is_string_dtype(table[name])]
    return table.astype(dict.fromkeys(named, "category"))
