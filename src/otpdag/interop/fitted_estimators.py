"""Fitted estimators of scikit-learn and hmmlearn as models whose fit starts where theirs ended."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otpdag import mechanisms as m
from otpdag.errors import ModelError
from otpdag.graph import Graph, lag
from otpdag.mechanisms.base import Mechanism
from otpdag.mechanisms.parameters import start
from otpdag.model import Model

_SMALLEST = 1e-12  # a probability of exactly zero never leaves it; a start may


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
    weights = _positive(mixture.weights_)
    child: Mechanism
    if means.shape[1] == 1:
        loc, scale = means[:, 0], np.sqrt(covariances[:, 0, 0])
        own, child = {"loc": loc, "scale": scale}, m.Normal(loc=start(loc), scale=start(scale))
    else:
        own = {"loc": means, "covariance": covariances}
        child = m.MultivariateNormal(means.shape[1], loc=start(means), covariance=start(covariances))
    graph = Graph([("z", "x")], hidden=["z"])
    parent = m.Categorical(len(means), probs=start(weights))
    return Model(graph, {"z": parent, "x": child}).set_params({"z": {"probs": weights}, "x": own})


def from_hmmlearn(hmm: Any) -> Model:
    """A hidden Markov model with the parameters of a fitted ``PoissonHMM``, ``GaussianHMM`` or ``CategoricalHMM``.

    Nodes are ``z`` and, for each column, ``x0``, ``x1`` and so on, as those of
    :class:`otpdag.estimators.HiddenMarkovModel`. The model has hmmlearn's parameters, and a fit starts from them.
    """
    if not hasattr(hmm, "transmat_"):
        raise ModelError("hmm must be fitted first")
    size = hmm.n_components
    params: dict[str, dict[str, Any]] = {
        "z": {"probs": _positive(hmm.transmat_)},
        "z[0]": {"probs": _positive(hmm.startprob_)},
    }
    mechanisms: dict[str, Mechanism] = {
        "z": m.Categorical(size, probs=start(params["z"]["probs"])),
        "z[0]": m.Categorical(size, probs=start(params["z[0]"]["probs"])),
    }
    for number, (kind, own, extra) in enumerate(_emissions(hmm)):
        params[f"x{number}"] = own
        mechanisms[f"x{number}"] = kind(*extra, **{name: start(value) for name, value in own.items()})
    columns = [name for name in params if name.startswith("x")]
    graph = Graph([lag("z", "z"), *(("z", name) for name in columns)], hidden=["z"])
    return Model(graph, mechanisms).set_params(params)


def _emissions(hmm: Any) -> list[tuple[Any, dict[str, Any], tuple[int, ...]]]:
    """For each column its mechanism, parameters and further arguments."""
    if hasattr(hmm, "lambdas_"):
        rates = np.asarray(hmm.lambdas_, dtype=float)
        return [(m.Poisson, {"log_rate": np.log(rate)}, ()) for rate in rates.T]
    if hasattr(hmm, "emissionprob_"):
        table = _positive(hmm.emissionprob_)
        return [(m.Categorical, {"probs": table}, (table.shape[1],))]
    if hasattr(hmm, "means_") and getattr(hmm, "covariance_type", "") in ("diag", "spherical"):
        variances = np.stack([np.diag(covariance) for covariance in np.asarray(hmm.covars_)])
        columns = zip(np.asarray(hmm.means_).T, np.sqrt(variances).T, strict=True)
        return [(m.Normal, {"loc": mean, "scale": scale}, ()) for mean, scale in columns]
    raise ModelError(
        "hmm must be a PoissonHMM, a CategoricalHMM or a GaussianHMM with diagonal covariances; got "
        f"{type(hmm).__name__}"
    )


def _positive(probabilities: ArrayLike) -> NDArray[np.float64]:
    """Probabilities none of which is zero: a start of zero would stay there."""
    kept = np.maximum(np.asarray(probabilities, dtype=float), _SMALLEST)
    scaled: NDArray[np.float64] = kept / kept.sum(-1, keepdims=True)
    return scaled
