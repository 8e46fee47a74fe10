"""Tables with gaps: many parents of one node, prediction and imputation, beside complete rows and scikit-learn."""

import resource
import time
from functools import partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray

import otpdag as otp
from benchmarks.harness import Case, Record, Settings, streams, timed
from otpdag import mechanisms as m

Floats = NDArray[np.float64]

ROWS, MISSING, PARENTS = 500, 0.2, (12, 30)


# -- many parents ------------------------------------------------------------------------------------------------------


def _slopes(table: pd.DataFrame) -> Floats:
    names = [name for name in table if name != "y"]
    nodes = {**dict.fromkeys(names, m.Normal()), "y": m.Bernoulli()}
    result = otp.fit(otp.Model(otp.Graph([(name, "y") for name in names]), nodes), table, progress=False)
    weight = result.model.params()["y"]["weight"]
    return np.asarray(weight[:, 1] - weight[:, 0]).ravel()


def many_parents(settings: Settings) -> Record:
    """A binary node and 12 or 30 normal parents: the error of slopes with a fifth of the parents' cells empty.

    Over that of complete rows, the larger of the two; with the time over that of the complete fit, and the memory of
    the process.
    """
    record: Record = {"limit": 1.2, "time_limit": 20.0, "memory_limit": 500.0}
    for many in PARENTS:
        errors, seconds = np.zeros(2), np.zeros(2)
        for repeat in range(settings.repeats):
            draws = streams(settings.seed, f"many_parents_{many}", repeat)
            x, slopes = draws.data.normal(size=(ROWS, many)), draws.data.normal(size=many) / np.sqrt(many)
            y = (draws.data.random(ROWS) < 1 / (1 + np.exp(-x @ slopes))).astype(int)
            table = pd.DataFrame(x, columns=[f"x{i}" for i in range(many)])
            emptied = table.mask(draws.missing.random(x.shape) < MISSING)
            for at, one in enumerate((table, emptied)):
                found, taken = timed(partial(_slopes, one.assign(y=y)), time.process_time)
                errors[at] += np.mean((found - slopes) ** 2)
                seconds[at] += taken
        record[f"error_{many}"], record[f"time_{many}"] = float(np.sqrt(errors[1] / errors[0])), seconds[1] / seconds[0]
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return record | {"ratio": max(record[f"error_{many}"] for many in PARENTS), "memory": megabytes}


CASES: dict[str, Case] = {"many_parents": many_parents}
