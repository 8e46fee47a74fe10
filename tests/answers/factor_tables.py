"""Tables and models of factors."""

import numpy as np
import pandas as pd

import otpdag as otp
from otpdag import mechanisms as m


def one_factor(names: str) -> otp.Model:
    graph = otp.Graph([("f", name) for name in names], hidden=["f"])
    return otp.Model(graph, {node: m.Normal() for node in graph.nodes})


def two_factor_table(rows: int = 400, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    f, g = rng.normal(size=(2, rows))
    loadings = np.array([[0.8, 0.1], [0.7, 0.0], [0.9, 0.2], [0.1, 0.8], [0.0, 0.9], [0.2, 0.7]])
    return pd.DataFrame(np.column_stack([f, g]) @ loadings.T + 0.6 * rng.normal(size=(rows, 6)), columns=list("abcdew"))
