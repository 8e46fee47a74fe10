"""Fits of other libraries as models whose fit starts where theirs ended (scikit-learn, hmmlearn); fits for ArviZ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from otpdag import mechanisms as m
from otpdag.data.columns import as_frame
from otpdag.engine.result import FitResult
from otpdag.errors import ModelError
from otpdag.graph import Graph, lag
from otpdag.mechanisms.base import Mechanism
from otpdag.mechanisms.parameters import start
from otpdag.model import Model
from otpdag.numerics import Array
from otpdag.tables import estimates

# a kind of mechanism, its sizes, and its parameters
Fitted = tuple[type[Mechanism], tuple[int, ...], dict[str, Any]]


def from_sklearn_mixture(mixture: Any) -> Model:
    """A mixture ``z -> x`` with the parameters of a fitted ``sklearn.mixture.GaussianMixture``.

    The model has the mixture's parameters, and a fit starts from them.

    Args:
        mixture: Fitted, with ``covariance_type`` ``"full"``.
    """
    if not hasattr(mixture, "means_"):
        raise ModelError("mixture must be fitted first")
    if mixture.covariance_type != "full":
        raise ModelError(f"covariance_type must be 'full'; got {mixture.covariance_type!r}")
    means, covariances = np.asarray(mixture.means_), np.asarray(mixture.covariances_)
    size, width = means.shape
    child: Fitted = m.MultivariateNormal, (width,), {"loc": means, "covariance": covariances}
    if width == 1:
        child = m.Normal, (), {"loc": means[:, 0], "scale": np.sqrt(covariances[:, 0, 0])}
    parent = m.Categorical, (size,), {"probs": _positive(mixture.weights_)}
    return _with_parameters(Graph([("z", "x")], hidden=["z"]), {"z": parent, "x": child})


def from_hmmlearn(hmm: Any) -> Model:
    """A hidden Markov model with the parameters of a fitted ``PoissonHMM``, ``GaussianHMM`` or ``CategoricalHMM``.

    Nodes are ``z`` and, for each column, ``x0``, ``x1`` and so on, as those of
    :class:`otpdag.estimators.HiddenMarkovModel`. The model has hmmlearn's parameters, and a fit starts from them.
    """
    if not hasattr(hmm, "transmat_"):
        raise ModelError("hmm must be fitted first")
    states = {"z": hmm.transmat_, "z[0]": hmm.startprob_}
    nodes: dict[str, Fitted] = {
        name: (m.Categorical, (hmm.n_components,), {"probs": _positive(probs)}) for name, probs in states.items()
    }
    columns = {f"x{number}": own for number, own in enumerate(_emissions(hmm))}
    return _with_parameters(Graph([lag("z", "z"), *(("z", name) for name in columns)], hidden=["z"]), nodes | columns)


def _with_parameters(graph: Graph, nodes: Mapping[str, Fitted]) -> Model:
    """A model with the parameters of its nodes, from which a fit starts."""
    mechanisms = {
        node: kind(*sizes, **{name: start(value) for name, value in own.items()})
        for node, (kind, sizes, own) in nodes.items()
    }
    return Model(graph, mechanisms).set_params({node: own for node, (_, _, own) in nodes.items()})


def _emissions(hmm: Any) -> list[Fitted]:
    """What each column is."""
    if hasattr(hmm, "lambdas_"):
        rates = np.asarray(hmm.lambdas_, dtype=float)
        return [(m.Poisson, (), {"log_rate": np.log(rate)}) for rate in rates.T]
    if hasattr(hmm, "emissionprob_"):
        table = _positive(hmm.emissionprob_)
        return [(m.Categorical, (table.shape[1],), {"probs": table})]
    if hasattr(hmm, "means_") and getattr(hmm, "covariance_type", "") in ("diag", "spherical"):
        variances = np.stack([np.diag(covariance) for covariance in np.asarray(hmm.covars_)])
        columns = zip(np.asarray(hmm.means_).T, np.sqrt(variances).T, strict=True)
        return [(m.Normal, (), {"loc": mean, "scale": scale}) for mean, scale in columns]
    raise ModelError(
        "hmm must be a PoissonHMM, a CategoricalHMM or a GaussianHMM with diagonal covariances; got "
        f"{type(hmm).__name__}"
    )


def _positive(probabilities: ArrayLike, smallest: float = 1e-12) -> Array:
    """Probabilities none of which is zero: a start of zero would stay there."""
    given = np.asarray(probabilities, dtype=float)
    if not (given >= 0).all() or not np.allclose(given.sum(-1), 1.0, atol=1e-6):
        raise ModelError(f"probabilities must be 0 or more and sum to 1; got {np.array2string(given, threshold=8)}")
    kept = np.maximum(given, smallest)
    scaled: Array = kept / kept.sum(-1, keepdims=True)
    return scaled


def to_arviz(fitted: Model | FitResult, data: Any, *, draws: int = 200, seed: int = 0) -> Any:
    """An ``arviz.InferenceData`` of a fit and a table.

    It holds what the rows say about hidden nodes (``posterior``: chain, draw, row), tables of the same size that the
    model makes (``posterior_predictive``), the observed columns (``observed_data``) and the estimates
    (``constant_data``). Of a :class:`otpdag.FitResult` the ``posterior`` also holds the parameters, drawn by the
    bootstrap: ``arviz.summary(to_arviz(result, table), var_names=["x.loc"])``.

    Args:
        fitted: A result of a fit, or a fitted model of a table.
        data: The rows.
        draws: Draws of each.
        seed: Determines them.
    """
    import arviz

    model = fitted.model if isinstance(fitted, FitResult) else fitted
    table = as_frame(data)
    if draws * len(table) * len(model.graph.observed) > 50_000_000:  # 400 MB
        raise ModelError(f"{draws} draws of {len(table)} rows need too much memory; ask for fewer draws")
    made = model.sample(len(table) * draws, seed=seed)
    groups: dict[str, Any] = {
        "observed_data": {name: table[name].to_numpy() for name in model.graph.observed if name in table},
        "constant_data": {
            f"{node}.{name}": np.asarray(value) for node, own in model.params().items() for name, value in own.items()
        },
        "posterior_predictive": {
            name: made[name].to_numpy().reshape(1, draws, len(table)) for name in made if name in model.graph.observed
        },
    }
    posterior: dict[str, Any] = {}
    names: dict[str, list[str]] = {}
    if isinstance(fitted, FitResult):
        for (node, name), values in fitted.bootstrap(draws=draws, seed=seed).items():
            posterior[f"{node}.{name}"] = values.reshape(1, draws, -1) if values.ndim > 1 else values[None]
        names = _names(model)
    if model.graph.hidden:
        drawn = model.posterior(table, draws=draws, seed=seed)
        posterior |= {str(name): drawn[name].to_numpy().reshape(-1, draws).T[None] for name in drawn.columns}
    if posterior:
        groups["posterior"] = posterior
    axes = {name: [f"{name} at"] for name in names if posterior[name].ndim > 2}
    return arviz.from_dict(**groups, coords={f"{name} at": names[name] for name in axes}, dims=axes)


def _names(model: Model) -> dict[str, list[str]]:
    """What the single numbers of each parameter are called: parents' categories, the parent of a slope."""
    by_parameter = estimates(model).groupby(["node", "parameter"], sort=False)["at"]
    return {f"{node}.{name}": list(places) for (node, name), places in by_parameter}
