"""Faults: kills, hostile files, bad inputs, checkpoints, writers at once, bombs, mutants, many fits in one process.

Each case reports how much went wrong as ``ratio``: a number of events that must be zero, the share of mutants that
survive, or a relative growth; ``limit`` is the most that is allowed.
"""

import random
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

import otpdag as otp
from benchmarks import attacks
from benchmarks import bad_inputs as inputs
from benchmarks.bad_calls import bad_calls, damaged_folders, raw_error
from benchmarks.changed_runs import accepted, changes
from benchmarks.child import in_child
from benchmarks.harness import Record, Settings, timed
from benchmarks.hostile_files import survey, use_model, variants
from benchmarks.kills import different_ends, lost_models, mixed_runs
from benchmarks.mutants import run_mutants
from benchmarks.soak import growth_over_fits
from otpdag import mechanisms as m

QUICK_REPEATS = 5  # data sets of `--quick`; more of them ask for the long run
LONGEST = 3600.0
ROOM = 200 << 20
MOST_SURVIVING = 0.15
MOST_GROWTH = 0.05


def _counted(count: int, of: int, seconds: float, name: str) -> Record:
    return {"ratio": float(count), "limit": 0.0, name: count, "of": of, "seconds": seconds}


def _kills_saving(settings: Settings) -> Record:
    """Kills while a model is saved over an old one."""
    of = 200
    done, seconds = timed(lambda: in_child(partial(lost_models, settings.seed, of), seconds=LONGEST))
    return _counted(done.value, of, seconds, "lost")


def _kills_running(settings: Settings) -> Record:
    """Kills of ``otpdag fit`` that writes over an old run."""
    of = 50
    done, seconds = timed(lambda: in_child(partial(mixed_runs, settings.seed, of), seconds=LONGEST))
    return _counted(done.value, of, seconds, "mixed")


def _resumed(settings: Settings) -> Record:
    """Kills of fits with a checkpoint, which then go on."""
    of = 50
    done, seconds = timed(lambda: in_child(partial(different_ends, settings.seed, of), seconds=LONGEST))
    return _counted(done.value, of, seconds, "different")


def _hostile_files(settings: Settings) -> Record:
    """Damaged model files: refused by an error of the library, or a model that works; little memory."""
    done, seconds = timed(lambda: in_child(partial(_surveyed, settings.seed), seconds=LONGEST))
    outcomes, broken, greedy, peak = done.value
    wrong = len(broken) + len(greedy)
    return _counted(wrong, sum(outcomes.values()), seconds, "not_an_error_of_ours") | {
        "refused": outcomes["refused"],
        "work": outcomes["works"],
        "greedy": len(greedy),
        "peak_megabytes": peak / 2**20,
        "which": (broken + greedy)[:5],
    }


def _surveyed(seed: int) -> tuple[Counter[str], list[str], list[str], int]:
    rng = np.random.default_rng(seed)
    z = rng.integers(0, 2, 60)
    table = pd.DataFrame(
        {"s": np.where(rng.random(60) < 0.3 + 0.4 * z, "a", "b"), "x": 2 * z + rng.normal(size=60), "n": rng.poisson(z)}
    )
    graph = otp.Graph([("z", "s"), ("z", "x"), ("x", "n")], hidden=["z"])
    kinds = {"z": m.Categorical(2), "s": m.Categorical(2), "x": m.Normal(), "n": m.Poisson(network=(3,))}
    model = otp.Model(graph, kinds)
    otp.fit(model, table, restarts=1, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder, "good.otp"))
        good = Path(folder, "good.otp").read_bytes()
        told = survey(variants(good, seed=seed, most=400), Path(folder), otp.load, use_model, room=ROOM)
    return told.outcomes, told.broken, told.greedy, told.peak


def _bad_inputs(settings: Settings) -> Record:
    """Wrong model files, tables and options: none may be called a bug of otpdag."""
    done, seconds = timed(lambda: in_child(partial(_called_bugs, settings.seed), seconds=LONGEST))
    bugs, of = done.value
    return _counted(len(bugs), of, seconds, "bugs") | {"which": bugs[:5]}


def _called_bugs(seed: int, files: int = 300, calls: int = 250, folders: int = 50) -> tuple[list[str], int]:
    chance = random.Random(seed)
    every = list(inputs.bad_inputs(seed))
    chosen = chance.sample(every, min(files, len(every)))
    with tempfile.TemporaryDirectory() as folder:
        answers = [(bad, *inputs.answer(bad, Path(folder))) for bad in chosen]
    bugs = [f"{bad.name}: {message}" for bad, code, message in answers if code == inputs.BUG or "Traceback" in message]
    asked = [*chance.sample(list(bad_calls()), calls), *damaged_folders(seed, folders)]
    raw = [error for error in map(raw_error, asked) if error is not None]
    return [*bugs, *raw], len(chosen) + len(asked)


def _resume_changed(settings: Settings) -> Record:
    """Fits that go on from a checkpoint after one thing has changed."""
    done, seconds = timed(lambda: in_child(partial(_accepted, settings.seed), seconds=LONGEST))
    found, of = done.value
    return _counted(len(found), of, seconds, "accepted") | {"which": found}


def _accepted(seed: int) -> tuple[list[str], int]:
    every = list(changes(seed))
    return [change.name for change in every if accepted(change)], len(every)


def _checkpoints_lost(settings: Settings) -> Record:
    """Refusals and failures of ``otpdag fit`` where a checkpoint is."""
    of = 50
    done, seconds = timed(lambda: in_child(partial(attacks.lost_checkpoints, settings.seed, of), seconds=LONGEST))
    return _counted(done.value, of, seconds, "lost")


def _checkpoints_flipped(settings: Settings) -> Record:
    """Checkpoints with one flipped bit."""
    of = 100
    done, seconds = timed(lambda: in_child(partial(attacks.estimates_from_flips, settings.seed, of), seconds=LONGEST))
    return _counted(done.value, of, seconds, "taken")


def _writers(settings: Settings) -> Record:
    """Saves of a model by several processes at once, and runs to one folder."""
    saves, runs = 300, 10
    saved, seconds = timed(lambda: in_child(partial(attacks.failed_saves, settings.seed, saves), seconds=LONGEST))
    ended, more = timed(lambda: in_child(partial(attacks.failed_runs, settings.seed, runs), seconds=LONGEST))
    told = _counted(saved.value + ended.value, saves + runs, seconds + more, "failed")
    return told | {"saves": saved.value, "runs": ended.value}


def _bombs(settings: Settings) -> Record:
    """Small files that ask for much: the most memory that one takes, in units of the limit."""
    done, seconds = timed(lambda: in_child(partial(attacks.bombs, settings.seed), seconds=LONGEST))
    worst = max(done.value, key=done.value.__getitem__)
    peak = done.value[worst]
    record = {"ratio": peak / ROOM, "limit": 1.0, "peak_megabytes": peak / 2**20, "of": len(done.value)}
    return record | {"worst": worst, "seconds": seconds}


def _levels(settings: Settings) -> Record:
    """Two categories of two hundred levels and five thousand rows: processor seconds."""
    done, seconds = timed(lambda: in_child(partial(attacks.seconds_of_levels, settings.seed), seconds=LONGEST))
    return {"ratio": done.value, "limit": 1.0, "processor_seconds": done.value, "of": 1, "seconds": seconds}


def _mutants(settings: Settings) -> Record:
    """Small changes of the code: the share that no test of the changed module notices."""
    many = 12 * settings.repeats
    result, seconds = timed(lambda: run_mutants(settings.seed, many))
    return {
        "ratio": 1 - result.killed_share,
        "limit": MOST_SURVIVING,
        "killed": result.killed_share,
        "of": result.judged,
        "seconds": seconds,
        "survivors": result.survivors,
    }


def _soak(settings: Settings) -> Record:
    """Fits one after another in one process."""
    fits = 1000 if settings.repeats > QUICK_REPEATS else 300
    done, seconds = timed(lambda: in_child(partial(growth_over_fits, settings.seed, fits), seconds=LONGEST))
    found = done.value
    return {
        "ratio": max(found["growth"], 0.0) + max(found["handles"], 0),  # one more open file is already too much
        "limit": MOST_GROWTH,
        "growth": found["growth"],
        "more_handles": found["handles"],
        "megabytes": found["bytes"] / 2**20,
        "of": fits,
        "seconds": seconds,
    }


CASES = {
    "kills_saving": _kills_saving,
    "kills_running": _kills_running,
    "resumed": _resumed,
    "hostile_files": _hostile_files,
    "bad_inputs": _bad_inputs,
    "resume_changed": _resume_changed,
    "checkpoints_lost": _checkpoints_lost,
    "checkpoints_flipped": _checkpoints_flipped,
    "writers": _writers,
    "bombs": _bombs,
    "levels": _levels,
    "mutants": _mutants,
    "soak": _soak,
}
