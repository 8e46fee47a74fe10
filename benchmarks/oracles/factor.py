"""Maximum-likelihood factor analysis."""

import numpy as np
import pandas as pd
from sklearn.decomposition import FactorAnalysis

from otpdag.datasets import Truth


def factor_analysis(frame: pd.DataFrame, truth: Truth, seed: int) -> Truth:
    """One hidden factor, by scikit-learn, run until the likelihood stands still."""
    fitted = FactorAnalysis(1, tol=1e-10, max_iter=20_000, svd_method="lapack").fit(frame.to_numpy())
    scales = np.sqrt(fitted.noise_variance_)
    hidden = {"f": {"loc": np.array(0.0), "scale": np.array(1.0)}}
    return hidden | {
        name: {"loc": fitted.mean_[j], "weight": fitted.components_[:, j], "scale": scales[j]}
        for j, name in enumerate(frame)
    }


def sibling_sample(frame: pd.DataFrame, rows: int, seed: int) -> pd.DataFrame:
    """Draws from the maximum-likelihood model of two siblings: it fits the data's covariance exactly."""
    generator = np.random.default_rng(seed)
    values = generator.multivariate_normal(frame.mean(), frame.cov(), size=rows)
    return pd.DataFrame(values, columns=frame.columns)
