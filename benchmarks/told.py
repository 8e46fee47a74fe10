"""Told: whether what is said about estimates is right: alarms, forbidden dependence, lavaan's figures, files, time.

``ratio`` is what each case limits; ``low`` and ``high``, or ``limit``, stand beside it.
"""

import importlib
import itertools
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

import otpdag as otp
from benchmarks.harness import Case, Record, Settings, Skip, streams, timed
from otpdag import mechanisms as m
from otpdag.data import column_types
from otpdag.data.reading import read_table
from otpdag.interop import formula_estimates, from_formulas

Floats = NDArray[np.float64]

ROWS, ALARM = 1000, 0.01
CHECKS_FOR_EACH_REPEAT, MISFITS_FOR_EACH_REPEAT, PAIRS_FOR_EACH_REPEAT = 40, 2, 4


# -- right models ------------------------------------------------------------------------------------------------------

NODES: dict[str, Callable[[], m.Mechanism]] = {
    "normal": m.Normal,
    "student": m.StudentT,
    "lognormal": m.LogNormal,
    "gamma": m.Gamma,
    "beta": m.Beta,
    "poisson": m.Poisson,
    "negative_binomial": m.NegativeBinomial,
    "bernoulli": m.Bernoulli,
    "categorical": lambda: m.Categorical(3),
}


def drawn(kind: str, line: Floats, rng: np.random.Generator) -> Floats:
    """Values of a node whose prediction is ``line``."""
    mean, share = np.exp(0.5 + 0.5 * line), 1 / (1 + np.exp(-line))
    if kind == "normal":
        return line + rng.normal(size=len(line))
    if kind == "student":
        return line + rng.standard_t(4, size=len(line))
    if kind == "lognormal":
        return np.exp(0.5 * line + 0.6 * rng.normal(size=len(line)))
    if kind == "gamma":
        return mean / 2.5 * rng.gamma(2.5, size=len(line))
    if kind == "beta":
        return rng.beta(4 * share, 4 * (1 - share)).clip(1e-6, 1 - 1e-6)
    if kind == "poisson":
        return rng.poisson(mean).astype(float)
    if kind == "negative_binomial":
        return rng.negative_binomial(2.0, 2 / (2 + mean)).astype(float)
    if kind == "bernoulli":
        return (rng.random(len(line)) < share).astype(float)
    logits = np.stack([np.zeros_like(line), line, -0.5 * line + 0.3], -1)
    odds = np.exp(logits).cumsum(-1)
    return (rng.random((len(line), 1)) * odds[:, -1:] > odds).sum(-1).astype(float)


def _seen_by_children(kind: str, value: Floats) -> Floats:
    """As children read it: standardised, heavy tails and large counts without their far ends."""
    value = np.log1p(value) if kind in ("lognormal", "gamma", "poisson", "negative_binomial") else value
    return np.clip((value - value.mean()) / value.std(), -2.5, 2.5)


def right_rows(rng: np.random.Generator, rows: int = ROWS) -> tuple[pd.DataFrame, otp.Model]:
    """Rows of a random graph of four to six nodes of all kinds, and a model of the same form.

    A parent is a number or a category that its children read as the model does: normal, Bernoulli or categorical ones.
    """
    kinds = rng.choice(list(NODES), size=rng.integers(4, 7))
    names, values, edges = [f"v{i}" for i in range(len(kinds))], {}, []
    for i, name in enumerate(names):
        possible = [j for j in range(i) if kinds[j] in ("normal", "bernoulli", "beta")]
        chosen = [j for j in possible if rng.random() < 0.5][:2]
        edges += [(names[j], name) for j in chosen]
        line = rng.uniform(-0.5, 0.5) + np.zeros(rows)
        for j in chosen:
            line = line + rng.uniform(0.3, 0.8) * rng.choice([-1, 1]) * values[names[j]]
        values[name] = drawn(kinds[i], line, rng)
    model = otp.Model(otp.Graph(edges, nodes=names), {n: NODES[k]() for n, k in zip(names, kinds, strict=True)})
    return pd.DataFrame(values), model


def factor_rows(rng: np.random.Generator, rows: int = ROWS) -> tuple[pd.DataFrame, otp.Model]:
    """A hidden factor with normal, binary and count indicators."""
    factor, kinds = rng.normal(size=rows), ["normal", "normal", "normal", "bernoulli", "poisson"]
    table = pd.DataFrame({f"x{i}": drawn(kind, 0.8 * factor, rng) for i, kind in enumerate(kinds)})
    graph = otp.Graph([("f", name) for name in table], hidden=["f"])
    nodes = {f"x{i}": NODES[kind]() for i, kind in enumerate(kinds)}
    return table, otp.Model(graph, {"f": m.Normal(loc=0.0, scale=1.0), **nodes})


def class_rows(rng: np.random.Generator, rows: int = ROWS) -> tuple[pd.DataFrame, otp.Model]:
    """Two hidden classes behind numbers, categories and counts."""
    group, kinds = 2.0 * (rng.random(rows) < 0.4), ["normal", "normal", "bernoulli", "categorical", "poisson"]
    table = pd.DataFrame({f"x{i}": drawn(kind, 1.2 * group - 1, rng) for i, kind in enumerate(kinds)})
    graph = otp.Graph([("z", name) for name in table], hidden=["z"])
    nodes = {f"x{i}": NODES[kind]() for i, kind in enumerate(kinds)}
    return table, otp.Model(graph, {"z": m.Categorical(2), **nodes})


def false_alarms(settings: Settings) -> Record:
    """Share of right models, complete, with gaps, with hidden nodes, of which any claim has an adjusted p below 1 %."""
    makers = (right_rows, right_rows, factor_rows, class_rows)
    alarms, told = [], []
    for repeat in range(settings.repeats * CHECKS_FOR_EACH_REPEAT):
        draws = streams(settings.seed, "false alarms", repeat)
        table, model = makers[repeat % len(makers)](draws.data)
        if repeat % 2:
            table = table.mask(draws.missing.random(table.shape) < 0.15)
        otp.fit(model, table, seed=draws.fit, progress=False)
        worst = model.check(table).reset_index().iloc[0]
        alarms.append(bool(worst["adjusted"] < ALARM))
        if alarms[-1]:
            told.append(f"{repeat}: {worst['node']} {worst['other']} {worst['finding']} {worst['adjusted']:.2g}")
    share = float(np.mean(alarms))
    return {"ratio": share, "ours": share, "low": 0.002, "high": 0.02, "checks": len(alarms), "alarms": told}


# -- wrong models ------------------------------------------------------------------------------------------------------


def _regression(child: m.Mechanism, **columns: Floats) -> tuple[pd.DataFrame, otp.Model, str]:
    """A child ``y`` of all other columns, which are normal or binary."""
    table = pd.DataFrame(columns)
    parents = [name for name in table if name != "y"]
    nodes = {name: m.Bernoulli() if set(table[name]) <= {0.0, 1.0} else m.Normal() for name in parents}
    graph = otp.Graph([(name, "y") for name in parents], nodes=["y"])
    return table, otp.Model(graph, {**nodes, "y": child}), "y"


def _noise(rng: np.random.Generator) -> Floats:
    return rng.normal(size=ROWS)


def _two_kinds(rng: np.random.Generator) -> Floats:
    return np.where(rng.random(ROWS) < 0.5, -1.5, 1.5) + _noise(rng)


def _zeros(x: Floats, rng: np.random.Generator) -> Floats:
    return np.where(rng.random(ROWS) < 0.15, 0, rng.poisson(np.exp(1 + 0.3 * x))).astype(float)


def _of(rng: np.random.Generator, child: m.Mechanism, how: Callable[[Floats], Floats]) -> tuple:
    x = _noise(rng)
    return _regression(child, x=x, y=how(x))


MISFITS: dict[str, Callable[[np.random.Generator], tuple]] = {
    "curved": lambda rng: _of(rng, m.Normal(), lambda x: 0.5 * x + 0.2 * x**2 + _noise(rng)),
    "spread": lambda rng: _of(rng, m.Normal(), lambda x: 0.5 * x + np.exp(0.2 * x) * _noise(rng)),
    "family": lambda rng: _of(rng, m.Normal(), lambda x: 0.5 * x + rng.gamma(4.0, size=ROWS)),
    "tails": lambda rng: _of(rng, m.Normal(), lambda x: 0.5 * x + rng.standard_t(4, size=ROWS)),
    "zeros": lambda rng: _of(rng, m.Poisson(), lambda x: _zeros(x, rng)),
    "dispersion": lambda rng: _of(
        rng, m.Poisson(), lambda x: rng.negative_binomial(6, 6 / (6 + np.exp(1 + 0.3 * x))).astype(float)
    ),
    "mixture": lambda rng: _of(rng, m.Normal(), lambda x: 0.5 * x + _two_kinds(rng)),
    "bounded": lambda rng: _of(rng, m.Normal(), lambda x: rng.beta(1.5, 1.5, size=ROWS)),
    "logit": lambda rng: _of(
        rng, m.Bernoulli(), lambda x: (rng.random(ROWS) < 1 / (1 + np.exp(0.7 - 0.6 * x**2))).astype(float)
    ),
}


def _interaction(rng: np.random.Generator) -> tuple[pd.DataFrame, otp.Model, str]:
    x, w = _noise(rng), _noise(rng)
    return _regression(m.Normal(), x=x, w=w, y=0.5 * x + 0.3 * w + 0.25 * x * w + _noise(rng))


def _dependent(rng: np.random.Generator) -> tuple[pd.DataFrame, otp.Model, str]:
    x, shared = _noise(rng), _noise(rng)
    table = pd.DataFrame({"x": x, "w": 0.6 * x + 0.5 * shared + _noise(rng), "y": 0.5 * x + 0.5 * shared + _noise(rng)})
    return table, otp.Model(otp.Graph([("x", "w"), ("x", "y")]), {name: m.Normal() for name in table}), "y w"


def power(settings: Settings) -> Record:
    """The least share of data sets, over eleven misfits, in which the right node (or pair) is found at 1 %."""
    shares: Record = {}
    for name, made in {**MISFITS, "interaction": _interaction, "dependent": _dependent}.items():
        found = []
        for repeat in range(settings.repeats * MISFITS_FOR_EACH_REPEAT):
            draws = streams(settings.seed, f"power {name}", repeat)
            table, model, wrong = made(draws.data)
            otp.fit(model, table, seed=draws.fit, progress=False)
            told = model.check(table).reset_index()
            alarms = told[told["adjusted"] < ALARM]
            found.append(any(set(wrong.split()) <= {one.node, one.other} for one in alarms.itertuples()))
        shares[name] = float(np.mean(found))
    least = min(shares.values())
    return {"ratio": least, "ours": least, "low": 0.9, **shares}


# -- independence ------------------------------------------------------------------------------------------------------


def dependent_rows(rng: np.random.Generator) -> tuple[pd.DataFrame, otp.Model, otp.Model]:
    """Two nodes of any kind with a common cause that is seen, and an edge; the model without the edge, and with it."""
    one, two = rng.choice(list(NODES), size=2)
    cause = _noise(rng)
    a = drawn(one, 0.5 * cause, rng)
    effect = (0.5 if one not in ("bernoulli", "categorical") else 1.0) * _seen_by_children(one, a)
    table = pd.DataFrame({"c": cause, "a": a, "b": drawn(two, 0.4 * cause + effect, rng)})
    nodes = {"c": m.Normal(), "a": NODES[one](), "b": NODES[two]()}
    without = otp.Model(otp.Graph([("c", "a"), ("c", "b")]), nodes)
    null = table.assign(b=drawn(two, 0.4 * cause, rng))
    return table, without, null


def independence(settings: Settings) -> Record:
    """Share of twenty forbidden dependences between nodes of all kinds, some with gaps, that are not found at 1 %.

    ``false``: share of the same models, on rows without the dependence, that are accused of one at 5 %.
    """
    missed, wrong, told = [], [], []
    for repeat in range(settings.repeats * PAIRS_FOR_EACH_REPEAT):
        draws = streams(settings.seed, "independence", repeat)
        table, model, null = dependent_rows(draws.data)
        for rows in (table, null):
            rows = rows.mask(draws.missing.random(rows.shape) < 0.15) if repeat % 2 else rows
            otp.fit(model, rows, seed=draws.fit, progress=False)
            checked = model.check(rows).reset_index()
            pair = checked[(checked["other"] != "")]
            if rows is not null and len(missed) == len(wrong):
                missed.append(not bool((pair["adjusted"] < ALARM).any()))
                told += [[type(model.mechanisms[node]).__name__ for node in "ab"]] if missed[-1] else []
            else:
                wrong.append(bool((pair["adjusted"] < 0.05).any()))
    share = float(np.mean(missed))
    false = float(np.mean(wrong))
    return {"ratio": share, "ours": share, "limit": 0.0, "false": false, "false_limit": 0.05, "missed": told}


# -- lavaan ------------------------------------------------------------------------------------------------------------

THREE_FACTORS = "visual =~ x1 + x2 + x3\ntextual =~ x4 + x5 + x6\nspeed =~ x7 + x8 + x9"
PUBLISHED_FIT = (85.306, 24, 0.931, 0.896, 0.092, 0.065)
PUBLISHED = {
    ("visual", "x2"): (0.554, 0.100),
    ("visual", "x3"): (0.729, 0.109),
    ("textual", "x5"): (1.113, 0.065),
    ("textual", "x6"): (0.926, 0.055),
    ("speed", "x8"): (1.180, 0.165),
    ("speed", "x9"): (1.082, 0.151),
    ("visual", "textual"): (0.408, 0.074),
    ("visual", "speed"): (0.262, 0.056),
    ("textual", "speed"): (0.173, 0.049),
}
"""Estimates and standard errors of the tutorial of lavaan 0.6, to three digits."""


def lavaan(settings: Settings) -> Record:
    """The largest difference, beyond rounding, to the published output for Holzinger and Swineford's pupils."""
    try:
        from semopy.examples import holzinger39
    except ImportError as error:
        raise Skip("semopy has the table") from error
    table = holzinger39.get_data()[[f"x{i}" for i in range(1, 10)]]
    result = otp.fit(from_formulas(THREE_FACTORS, table), table, seed=settings.seed, progress=False)
    indices = result.fit_indices()
    assert indices is not None
    fit = (indices.chi_square, indices.degrees, indices.cfi, indices.tli, indices.rmsea, indices.srmr)
    gaps = [abs(one - other) for one, other in zip(fit, PUBLISHED_FIT, strict=True)]
    told = formula_estimates(result, THREE_FACTORS).set_index(["left", "right"])
    for line, published in PUBLISHED.items():
        own = told.loc[line, ["estimate", "std_error"]].to_numpy(dtype=float).ravel()
        gaps += [abs(one - other) for one, other in zip(own, published, strict=True)]
    worst = max(max(gap - 5e-4, 0.0) for gap in gaps)  # the published numbers are rounded
    return {"ratio": worst, "ours": worst, "oracle": 0.0, "limit": 5e-4, "chi_square": fit[0]}


# -- first minutes -----------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent
IMPORTED = "import otpdag as otp; from otpdag import mechanisms; otp.fit, otp.Model, otp.Graph"
GRID, GRID_MODEL = ROOT / "examples" / "data" / "grid.csv", ROOT / "examples" / "data" / "model.yaml"


def _processor_time(*arguments: str) -> float:
    """Of a child, in seconds, once its bytecode is there."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "told-bytecode")
    subprocess.run([sys.executable, *arguments], env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _beside_torch(limit: float, beside: str, *arguments: str) -> Record:
    """The least of some measurements over the least of an import's, after one of each that writes bytecode."""
    times = [(_processor_time(*arguments), _processor_time("-c", beside)) for _ in range(4)][1:]
    ours, theirs = np.min(times, 0)
    return {"ratio": ours / theirs, "ours": ours, "oracle": theirs, "limit": limit, "seconds": ours}


def start_up(settings: Settings) -> Record:
    """Processor time of importing what a first fit needs over that of torch and pandas, which a table needs."""
    record = _beside_torch(1.25, "import torch, pandas", "-c", IMPORTED)
    return record | {"over_torch_alone": record["ours"] / _processor_time("-c", "import torch")}


def fit_command(settings: Settings) -> Record:
    """Processor time of ``otpdag fit`` of the example over torch's import (4 s beside 1.7 s)."""
    with tempfile.TemporaryDirectory() as folder:
        where = str(Path(folder) / "run")
        return _beside_torch(
            4 / 1.7, "import torch", "-m", "otpdag", "fit", str(GRID_MODEL), str(GRID), "--out", where, "--force"
        )


def report_command(settings: Settings) -> Record:
    """Processor time of ``otpdag report`` of that fit over torch's import."""
    with tempfile.TemporaryDirectory() as folder:
        where = str(Path(folder) / "run")
        _processor_time("-m", "otpdag", "fit", str(GRID_MODEL), str(GRID), "--out", where)
        return _beside_torch(4 / 1.7, "import torch", "-m", "otpdag", "report", where, "--force")


def intervals_time(settings: Settings) -> Record:
    """Processor time of 200 bootstrap draws of the README's example, in fits."""
    table = pd.read_csv(GRID)
    children = ("price", "outages", "frequency", "complaint")
    graph = otp.Graph([("season", "load"), *(("load", name) for name in children)], hidden=["load"])
    model = otp.Model.from_frame(graph, table, hidden={"load": m.Normal()})
    otp.fit(model, table, seed=settings.seed, progress=False)  # imports
    result, spent = timed(lambda: otp.fit(model, table, seed=settings.seed, progress=False), time.process_time)
    told, waited = timed(lambda: result.intervals(draws=200, seed=settings.seed), time.process_time)
    ratio = {"ratio": waited / spent, "ours": waited, "oracle": spent, "limit": 20.0}
    return ratio | {"seconds": waited, "stuck": told.attrs["stuck"]}


# -- files -------------------------------------------------------------------------------------------------------------


def _people(rng: np.random.Generator) -> pd.DataFrame:
    """A table as surveys have it, with two gaps."""
    rows = 120
    table = pd.DataFrame(
        {
            "plz": [f"{value:05d}" for value in rng.integers(1000, 99_000, rows)],
            "city": rng.choice(["K\u00f6ln", "M\u00fcnchen", "Aachen"], rows),
            "income": np.exp(rng.normal(7.5, 1.0, rows)).round(2),
            "answer": rng.integers(1, 6, rows),
            "children": rng.poisson(1.2, rows),
            "height": rng.normal(170, 9, rows).round(1),
            "day": pd.date_range("2021-01-01", periods=rows).strftime("%Y-%m-%d"),
        }
    )
    table.loc[[3, 8], "height"] = np.nan
    return table


KINDS = {
    "plz": ("category", "names or ids|codes or ids"),
    "city": ("category", ""),
    "income": ("number", "LogNormal"),
    "answer": ("category", "scale"),
    "children": ("count|category", ""),
    "height": ("number", ""),
    "day": ("category|none", "dates|time"),
}
"""What a careful reader takes the columns for, and what is asked about them."""


def _texts() -> Iterator[tuple[str, Callable[[pd.DataFrame, Path], None]]]:
    """Names of files and how a table is written to them: 24 texts, and 6 of other programs."""
    for separator, ending in itertools.product([",", ";", "\t", "|"], [".csv", ".txt"]):
        yield f"{ord(separator)}{ending}", partial(_write_text, sep=separator)
    for separator, encoding in itertools.product([";", "\t"], ["utf-8", "cp1252", "utf-16", "utf-8-sig"]):
        yield (
            f"comma-{ord(separator)}-{encoding}.csv",
            partial(_write_text, sep=separator, decimal=",", encoding=encoding),
        )
    yield "cp1252.csv", partial(_write_text, encoding="cp1252")
    yield "bom.csv", partial(_write_text, encoding="utf-8-sig")
    yield "tabs.tsv", partial(_write_text, sep="\t")
    yield "tabs.tab", partial(_write_text, sep="\t", decimal=",")
    yield "comment.csv", partial(_write_text, before="# a survey\n# of 2021\n")
    yield "excel.csv", partial(_write_text, sep=";", decimal=",", before="sep=;\n")
    yield "crlf.csv", partial(_write_text, lineterminator="\r\n")
    yield "quoted.csv", partial(_write_text, quoting=1)
    yield "a.parquet", lambda table, path: table.to_parquet(path)
    yield "a.xlsx", lambda table, path: table.to_excel(path, index=False)
    yield "a.dta", lambda table, path: table.to_stata(path, write_index=False)
    yield "a.sav", lambda table, path: importlib.import_module("pyreadstat").write_sav(table, str(path))
    yield "a.zsav", lambda table, path: importlib.import_module("pyreadstat").write_sav(table, str(path), compress=True)
    yield "sheets.xlsx", _write_sheets


def _write_sheets(table: pd.DataFrame, path: Path) -> None:
    with pd.ExcelWriter(path) as writer:
        table.to_excel(writer, sheet_name="answers", index=False)
        table.head(2).to_excel(writer, sheet_name="notes", index=False)


def _write_text(table: pd.DataFrame, path: Path, before: str = "", encoding: str = "utf-8", **options: Any) -> None:
    text = before + table.to_csv(index=False, **options)
    path.write_bytes(text.encode(encoding))


def files(settings: Settings) -> Record:
    """Share of thirty crafted files with a cell or a column type that is not right, or no question where one is due."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for place, (name, write) in enumerate(_texts()):
            table = _people(streams(settings.seed, "files", place).data)
            write(table, Path(folder) / name)
            wrong += [f"{name}: {words}" for words in _misread(table, read_table(Path(folder) / name))]
    share = len({line.split(":")[0] for line in wrong}) / (place + 1)
    return {"ratio": share, "ours": share, "limit": 0.0, "files": place + 1, "wrong": wrong}


def _misread(written: pd.DataFrame, read: pd.DataFrame) -> list[str]:
    read = read.rename(columns=str.lower)  # files of old programs have capitals
    if list(read.columns) != list(written.columns) or len(read) != len(written):
        return [f"columns {list(read.columns)}, {len(read)} rows"]
    found = [
        name
        for name in written
        if not (written[name].eq(read[name].astype(written[name].dtype)) | written[name].isna()).all()
    ]
    for told in column_types(read):
        kind, doubt = KINDS[told.column]
        if not re.fullmatch(kind, told.kind) or bool(doubt) != bool(re.search(doubt or "$^", told.doubt + told.reason)):
            found.append(str(told))
    return found


CASES: dict[str, Case] = {
    "false_alarms": false_alarms,
    "power": power,
    "independence": independence,
    "lavaan": lavaan,
    "start_up": start_up,
    "fit_command": fit_command,
    "report_command": report_command,
    "intervals_time": intervals_time,
    "files": files,
}
