"""Tables of regressions."""

import numpy as np
import pandas as pd


def regression_table(rows: int = 300) -> pd.DataFrame:
    rng = np.random.default_rng(4)
    a, b = rng.normal(2.0, 3.0, rows), rng.normal(size=rows)
    y = 1.0 + 0.5 * a - b + (0.5 + np.abs(b)) * rng.normal(size=rows)
    n = rng.poisson(np.exp(0.2 + 0.1 * a))
    k = (rng.random(rows) < 1 / (1 + np.exp(-0.5 * a + b))).astype(int)
    return pd.DataFrame({"a": a, "b": b, "y": y, "n": n, "k": k})
