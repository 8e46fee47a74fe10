"""Networks: whether a node with one converges by default, and how well it finds a curve, beside a penalised spline.

Eight data sets, two of each curve. The spline has cubic pieces and the penalty on second differences that generalised
cross-validation chooses (Eilers and Marx 1996); with gaps it sees the complete rows alone.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.interpolate import BSpline

import otpdag as otp
from benchmarks.harness import Record, Settings, streams
from otpdag import mechanisms as m

Floats = NDArray[np.float64]

ROWS, UNITS, NOISE, MISSING, PIECES = 2_000, 32, 0.5, 0.3, 20
GRID = np.linspace(-2.0, 2.0, 81)
CURVES: dict[str, Callable[[Floats], Floats]] = {
    "sine": lambda x: np.sin(2 * x),
    "bump": lambda x: 2 * np.exp(-4 * x**2),
    "step": lambda x: np.tanh(4 * x),
    "bowl": lambda x: 0.5 * x**2,
}


def penalised_spline(x: Floats, y: Floats, at: Floats) -> Floats:
    """Its values at other places."""
    low, high = x.min(), x.max()
    knots = low + (high - low) / PIECES * np.arange(-3, PIECES + 4)
    design = lambda z: BSpline.design_matrix(np.clip(z, low, high - 1e-9), knots, 3).toarray()  # noqa: E731
    own = design(x)
    gram, bends = own.T @ own, np.diff(np.eye(own.shape[1]), 2, axis=0)

    def fitted(penalty: float) -> tuple[float, Floats]:
        matrix = gram + penalty * bends.T @ bends
        coefficients = np.linalg.solve(matrix, own.T @ y)
        freedom = np.trace(np.linalg.solve(matrix, gram))
        return float(((y - own @ coefficients) ** 2).sum() / (len(y) - freedom) ** 2), coefficients

    tried = [fitted(penalty) for penalty in 10.0 ** np.arange(-4, 5, 0.25)]
    return design(at) @ min(tried, key=lambda one: one[0])[1]


@dataclass(frozen=True)
class Curve:
    """One fit: root mean square errors of network and spline on the grid, whether it converged, and its seconds."""

    ours: float
    spline: float
    converged: bool
    seconds: float


def fitted_curve(name: str, table: pd.DataFrame, seed: int) -> Curve:
    """Both ways."""
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal(network=(UNITS,))})
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = otp.fit(model, table, seed=seed, progress=False, time_limit=300)
    spent, truth, full = time.process_time() - begin, CURVES[name](GRID), table.dropna()
    found = np.asarray(model.predict(pd.DataFrame({"x": GRID}), "y"), dtype=float).ravel()
    spline = penalised_spline(full["x"].to_numpy(), full["y"].to_numpy(), GRID)
    errors = (float(np.sqrt(np.mean((curve - truth) ** 2))) for curve in (found, spline))
    return Curve(*errors, result.status.converged, spent)


@cache
def curves(seed: int) -> tuple[list[Curve], list[Curve]]:
    """All data sets, complete and with gaps of the parent."""
    complete, gaps = [], []
    for name in (*CURVES, *CURVES):
        draws = streams(seed, f"curve {name}", len(complete))
        x = draws.data.normal(size=ROWS)
        table = pd.DataFrame({"x": x, "y": CURVES[name](x) + NOISE * draws.data.normal(size=ROWS)})
        emptied = table.assign(x=np.where(draws.missing.random(ROWS) < MISSING, np.nan, x))
        complete.append(fitted_curve(name, table, draws.fit))
        gaps.append(fitted_curve(name, emptied, draws.fit))
    return complete, gaps


def _error(with_gaps: bool, settings: Settings) -> Record:
    own = curves(settings.seed)[with_gaps]
    ours, spline = (float(np.mean(errors)) for errors in ([one.ours for one in own], [one.spline for one in own]))
    each = [one.ours / one.spline for one in own]
    return {"ratio": ours / spline, "limit": 1.2, "ours": ours, "oracle": spline, "each": each}


networks = partial(_error, False)
networks_gaps = partial(_error, True)


def networks_converged(settings: Settings) -> Record:
    """How many of the eight fits to complete rows, and of those with gaps, did not converge."""
    complete, gaps = (sum(not one.converged for one in own) for own in curves(settings.seed))
    return {"ratio": complete, "limit": 0, "gaps": gaps}


def networks_time(settings: Settings) -> Record:
    """Processor time of the fits with gaps over that of the complete ones."""
    complete, gaps = (sum(one.seconds for one in own) for own in curves(settings.seed))
    return {"ratio": gaps / complete, "limit": 10.0, "ours": gaps, "oracle": complete}
