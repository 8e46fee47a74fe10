"""Many fits in one process: memory and open files must stay where they are."""

from __future__ import annotations

import gc
import os
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pandas as pd

import otpdag as otp
from benchmarks.child import memory
from otpdag import mechanisms as m

__all__ = ["growth_over_fits"]

SHARE_OF_WARM_UP = 0.2
"""Of all fits, the first ones, in which caches and allocators fill."""


def growth_over_fits(seed: int, fits: int) -> dict[str, float]:
    """Relative growth of memory from after the warm-up to the end, and how many more files are open.

    Each round fits a model with hidden categories or numbers, draws from it, completes a table, saves and loads it.
    """
    warnings.simplefilter("ignore", otp.ConvergenceWarning)
    rng = np.random.default_rng(seed)
    warm_up = max(1, int(SHARE_OF_WARM_UP * fits))
    held, handles = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(fits):
            if number == warm_up:
                held, handles = _held()
            _round(rng, number, Path(folder))
    after, open_after = _held()
    return {"growth": after / held - 1, "handles": open_after - handles, "bytes": after}


def _round(rng: np.random.Generator, number: int, folder: Path) -> None:
    k = rng.integers(0, 2, 60)
    table = pd.DataFrame({"x": 2.0 * k + rng.normal(size=60), "n": rng.poisson(2 + 4 * k)}).mask(
        rng.random((60, 2)) < 0.05
    )
    hidden = m.Categorical(2) if number % 2 else m.Normal()
    graph = otp.Graph([("k", "x"), ("k", "n")], hidden=["k"])
    model = otp.Model(graph, {"k": hidden, "x": m.Normal(), "n": m.Poisson()})
    otp.fit(model, table, restarts=2, steps=5, seed=number, checkpoint=folder / f"{number}.checkpoint")
    model.save(folder / "model.otp")
    again = otp.load(folder / "model.otp")
    again.sample(10, seed=number)
    again.impute(table, draws=2)
    (folder / f"{number}.checkpoint").unlink()


def _held() -> tuple[int, int]:
    gc.collect()
    files = Path("/proc/self/fd")
    return memory("VmRSS"), len(os.listdir(files)) if files.is_dir() else 0
