"""When the model is wrong: errors beside those of EM, where both are told wrong variances or weights.

Cases of Figure 1, twenty simulations for each data set that is asked for (100 with ``--quick``), all at once. ``ratio``
is our mean error over EM's, ``difference`` the mean of our error minus EM's with its 95 % interval ``low`` to ``high``.
"""

from functools import cache, partial

from benchmarks.harness import Case, Outcome, Record, Settings, summary, timed
from benchmarks.outliers import OUTLIER_CASES
from experiments.mixtures import METHODS, Paired, SearchSchedule, Simulations, simulate

SIMULATIONS = 20
STEPS = 300
WRONG_LIMIT = 1.0
RIGHT_LIMIT = 1.1


def told_wrong(case: str, settings: Settings) -> Record:
    """The robust setting over EM; ``ratio_default`` is the default's."""
    robust = _against_em(case, "ours, robust", settings)
    default = _against_em(case, "ours, default", settings)
    return {"limit": WRONG_LIMIT, "method": "robust"} | robust | _renamed(default, "default")


def told_right(case: str, settings: Settings) -> Record:
    """The default over EM where nothing is wrong; ``ratio_robust`` is what robustness costs there."""
    default = _against_em(case, "ours, default", settings)
    robust = _against_em(case, "ours, robust", settings)
    return {"limit": RIGHT_LIMIT, "method": "default"} | default | _renamed(robust, "robust")


def _against_em(case: str, name: str, settings: Settings) -> Record:
    sims = SIMULATIONS * settings.repeats
    (em, em_seconds), (ours, seconds) = (_course(case, method, settings.seed, sims) for method in ("EM", name))
    paired = Paired.of(ours.final, em.final)
    record = summary("ours", [Outcome(float(error), seconds / sims) for error in ours.final])
    record |= summary("oracle", [Outcome(float(error), em_seconds / sims) for error in em.final])
    return {
        "ratio": record["ours"] / record["oracle"],
        "difference": paired.mean,
        "low": paired.low,
        "high": paired.high,
        "excludes_zero": paired.excludes_zero,
        "failures": int(ours.failed.sum()),
    } | record


def _renamed(record: Record, name: str) -> Record:
    kept = ("ratio", "difference", "low", "high", "excludes_zero", "failures", "ours")
    return {f"{field}_{name}": record[field] for field in kept}


@cache
def _course(case: str, method: str, seed: int, sims: int) -> tuple[SearchSchedule, float]:
    given = _simulations(seed, sims)
    return timed(lambda: METHODS[method](given, given.cases[case], STEPS, seed))


@cache
def _simulations(seed: int, sims: int) -> Simulations:
    return simulate(seed, sims=sims)


CASES: dict[str, Case] = {
    "wrong_variances": partial(told_wrong, "wrong_variances"),
    "wrong_weights": partial(told_wrong, "wrong_weights"),
    "wrong_both": partial(told_wrong, "wrong_both"),
    "well_specified": partial(told_right, "well_specified"),
} | OUTLIER_CASES
