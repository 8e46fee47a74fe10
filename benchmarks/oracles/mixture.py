"""Expectation-maximisation for a Gaussian mixture."""

import numpy as np
import pandas as pd
from sklearn.mixture import GaussianMixture

from otpdag.datasets import Truth


def gaussian_mixture_em(frame: pd.DataFrame, truth: Truth, seed: int) -> Truth:
    """Diagonal covariances, by scikit-learn, the best of ten starts."""
    components = len(truth["z"]["probs"])
    found = GaussianMixture(
        components, covariance_type="diag", n_init=10, tol=1e-6, max_iter=1000, random_state=seed
    ).fit(frame.to_numpy())
    return {
        "z": {"probs": found.weights_},
        "x": {"loc": found.means_, "scale": np.sqrt(found.covariances_)},
    }
