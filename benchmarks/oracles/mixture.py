"""Expectation-maximisation for a Gaussian mixture."""

import numpy as np
import pandas as pd
from sklearn.mixture import GaussianMixture

from otpdag.datasets import Truth


def gaussian_mixture_em(frame: pd.DataFrame, truth: Truth, seed: int) -> Truth:
    """Diagonal covariances, by scikit-learn: the best of ten starts, then run until the likelihood stands still."""
    components, values = len(truth["z"]["probs"]), frame.to_numpy()
    best = GaussianMixture(components, covariance_type="diag", n_init=10, tol=1e-5, max_iter=1000, random_state=seed)
    best.fit(values)
    fitted = GaussianMixture(
        components,
        covariance_type="diag",
        weights_init=best.weights_,
        means_init=best.means_,
        precisions_init=best.precisions_,
        tol=1e-11,
        max_iter=20_000,
    ).fit(values)
    return {"z": {"probs": fitted.weights_}, "x": {"loc": fitted.means_, "scale": np.sqrt(fitted.covariances_)}}
