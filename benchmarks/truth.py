"""Truth: where a result could mislead: optima, gaps in time, the price of gaps, effects, counterfactuals, networks.

``ratio`` is what each case limits; ``low`` and ``high``, or ``limit``, stand beside it.
"""

from functools import partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import optimize, stats

import otpdag as otp
from benchmarks.curves import networks, networks_converged, networks_gaps, networks_time
from benchmarks.harness import Case, Record, Settings, streams, timed
from benchmarks.optima import optima, optima_time
from otpdag import mechanisms as m

Floats = NDArray[np.float64]

LEVEL = 0.9
STEPS, MISSING = 300, 0.4
COVERED_SETS_FOR_EACH_REPEAT, FORECAST_SETS_FOR_EACH_REPEAT = 10, 60
STATES = np.arange(60)
TRUTHS = {"normal": np.array([0.2, 0.8, 1.0]), "counts": np.array([0.5, 0.12])}
MODELS = {"normal": m.Normal, "counts": m.Poisson}
NAMES = {"normal": ("loc", "weight", "scale"), "counts": ("log_rate", "weight")}


# -- gaps in time ------------------------------------------------------------------------------------------------------


def series(kind: str, steps: int, rng: np.random.Generator) -> Floats:
    """An autoregression of numbers, or of counts, past its first steps."""
    values = np.zeros(steps + 50)
    for step in range(1, len(values)):
        before = values[step - 1]
        if kind == "normal":
            values[step] = 0.2 + 0.8 * before + rng.normal()
        else:
            values[step] = rng.poisson(np.exp(0.5 + 0.12 * min(before, 12.0)))
    return values[50:]


def emptied(values: Floats, at_random: bool, rng: np.random.Generator) -> Floats:
    """Lost completely at random, or at random: often before a high value that is recorded. The first one is seen."""
    seen = rng.random(len(values)) >= MISSING
    if at_random:
        seen[:] = True
        high, lost = np.median(values), rng.random(len(values)) < 0.7
        for step in range(len(values) - 1, 0, -1):
            seen[step - 1] = not (seen[step] and values[step] > high and lost[step])
    seen[0] = True
    return np.where(seen, values, np.nan)


def exact(kind: str, values: Floats) -> Floats:
    """The maximum of the exact likelihood: variances of gaps add up for numbers, states are summed for counts."""
    loss = partial(_normal_loss if kind == "normal" else _count_loss, values)
    start = [0.0, 0.5, 0.0] if kind == "normal" else [0.5, 0.05]
    found = optimize.minimize(loss, start, method="BFGS", options={"gtol": 1e-6}).x
    return np.array([found[0], found[1], np.exp(found[2])]) if kind == "normal" else found


def _normal_loss(values: Floats, point: Floats) -> float:
    at = np.flatnonzero(~np.isnan(values))
    powers = [point[1] ** np.arange(ahead) for ahead in np.diff(at)]
    means = [point[1] ** len(p) * values[i] + point[0] * p.sum() for i, p in zip(at[:-1], powers, strict=True)]
    scales = [np.exp(point[2]) * np.sqrt((p**2).sum()) for p in powers]
    return float(-stats.norm.logpdf(values[at[1:]], means, scales).sum())


def _count_loss(values: Floats, point: Floats) -> float:
    rate = np.exp(np.clip(point[0] + point[1] * STATES, -30.0, 30.0))
    move = stats.poisson.pmf(STATES, rate[:, None])
    belief, total = (values[0] == STATES).astype(float), 0.0
    for value in values[1:]:
        belief = belief @ move * (np.isnan(value) | (value == STATES))
        total += np.log(belief.sum() + 1e-300)
        belief /= belief.sum() + 1e-300
    return float(-total)


def _fitted(kind: str, values: Floats, seed: int) -> tuple[otp.Model, otp.FitResult]:
    model = otp.Model(otp.Graph([otp.lag("x", "x")]), {"x": MODELS[kind]()})
    return model, otp.fit(model, pd.DataFrame({"x": values}), seed=seed, progress=False)


def _estimate(kind: str, model: otp.Model) -> Floats:
    own = model.params()["x"]
    return np.array([float(np.ravel(own[name])[0]) for name in NAMES[kind]])


def ar_gaps(settings: Settings) -> Record:
    """Error over exact maximum likelihood's, for numbers and counts, gaps at random and completely so: the worst."""
    record: Record = {"limit": 1.05, "steps": STEPS}
    ratios, ours, theirs = [], [], []
    for kind in TRUTHS:
        for at_random in (True, False):
            name, errors = f"{kind}_{'mar' if at_random else 'mcar'}", []
            for repeat in range(settings.repeats):
                draws = streams(settings.seed, f"gaps {name}", repeat)
                values = emptied(series(kind, STEPS, draws.data), at_random, draws.missing)
                (model, _), spent = timed(partial(_fitted, kind, values, draws.fit))
                best, waited = timed(partial(exact, kind, values))
                errors.append([np.abs(e - TRUTHS[kind]).mean() for e in (_estimate(kind, model), best)])
                ours.append(spent)
                theirs.append(waited)
            mine, oracle = np.mean(errors, 0)
            record |= {name: mine / oracle, f"{name}_ours": mine, f"{name}_oracle": oracle}
            ratios.append(mine / oracle)
    seconds = {"seconds": float(np.mean(ours)), "oracle_seconds": float(np.mean(theirs))}
    return record | {"ratio": max(ratios), "ours": max(ratios), "oracle": 1.0} | seconds


def ar_coverage(settings: Settings) -> Record:
    """How often 90 % intervals of the same fits hold the truth."""
    held, sets = [], settings.repeats * COVERED_SETS_FOR_EACH_REPEAT
    for kind in TRUTHS:
        for at_random in (True, False):
            for repeat in range(sets):
                draws = streams(settings.seed, f"gaps coverage {kind} {at_random}", repeat)
                values = emptied(series(kind, STEPS, draws.data), at_random, draws.missing)
                _, result = _fitted(kind, values, draws.fit)
                table = result.summary(level=LEVEL).table
                held += list((table["lower"].to_numpy() <= TRUTHS[kind]) & (TRUTHS[kind] <= table["upper"].to_numpy()))
    covered = float(np.mean(held))
    return {"ratio": covered, "ours": covered, "oracle": LEVEL, "low": 0.87, "high": 0.93, "intervals": len(held)}


def forecast(settings: Settings) -> Record:
    """How often 90 % intervals of the next five steps, after fifty, hold them; ``by_step`` has each of them."""
    held = []
    for repeat in range(settings.repeats * FORECAST_SETS_FOR_EACH_REPEAT):
        draws = streams(settings.seed, "forecast", repeat)
        values = series("normal", 55, draws.data)
        _, result = _fitted("normal", values[:50], draws.fit)
        table = result.forecast(pd.DataFrame({"x": values[:50]}), 5, level=LEVEL, seed=draws.fit)
        held.append((table["x.lower"].to_numpy() <= values[50:]) & (values[50:] <= table["x.upper"].to_numpy()))
    covered = float(np.mean(held))
    by_step = np.mean(held, 0).tolist()
    return {"ratio": covered, "ours": covered, "oracle": LEVEL, "low": 0.86, "high": 0.94, "by_step": by_step}


# -- the price of gaps -------------------------------------------------------------------------------------------------


def small_gaps(settings: Settings) -> Record:
    """Time of a fit of 1,000 rows and five columns with a tenth of the cells empty over that of the complete table."""
    graph = otp.Graph([("a", "b"), ("b", "s"), ("a", "c"), ("b", "c"), ("s", "c"), ("b", "k")])
    times = []
    for repeat in range(settings.repeats):
        draws = streams(settings.seed, "small gaps", repeat)
        table = _small_table(draws.data)
        gaps = table.mask(draws.missing.random(table.shape) < 0.1)
        spent = []
        for data in (table, gaps):
            otp.fit(otp.Model.from_frame(graph, data), data, seed=draws.fit, progress=False)  # imports, caches
            model = otp.Model.from_frame(graph, data)
            spent.append(timed(partial(otp.fit, model, data, seed=draws.fit, progress=False))[1])
        times.append(spent)
    complete, missing = np.mean(times, 0)
    ratio = {"ratio": missing / complete, "ours": missing, "oracle": complete, "limit": 10.0}
    return ratio | {"seconds": missing, "oracle_seconds": complete}


def _small_table(rng: np.random.Generator, rows: int = 1000) -> pd.DataFrame:
    a = rng.normal(size=rows)
    b = 0.5 * a + rng.normal(size=rows)
    s = (rng.random(rows) < 1 / (1 + np.exp(-b))).astype(float)
    c = 0.3 * a - 0.4 * b + 0.5 * s + rng.normal(size=rows)
    k = rng.poisson(np.exp(0.2 + 0.3 * b)).astype(float)
    return pd.DataFrame({"a": a, "b": b, "s": s, "c": c, "k": k})


# -- effects -----------------------------------------------------------------------------------------------------------

SLOPE, EFFECT_ROWS = 0.5, 1000
BOW = (("u", "x"), ("u", "y"), ("x", "y"))
TWO_HIDDEN = (*BOW, ("v", "x"), ("v", "y"))
PROXY = (*BOW, ("u", "p"))
INSTRUMENT = (*BOW, ("z", "x"))
FRONT_DOOR = (("u", "x"), ("u", "y"), ("x", "w"), ("w", "y"))
EFFECT_SETS_FOR_EACH_REPEAT, COVERED_EFFECTS_FOR_EACH_REPEAT = 2, 60


def linear_rows(edges: tuple[tuple[str, str], ...], rng: np.random.Generator) -> tuple[pd.DataFrame, otp.Model, float]:
    """Linear normal rows of a graph whose hidden nodes are u and v; what x does to y goes along its directed paths."""
    graph = otp.Graph(edges, hidden=[node for node in ("u", "v") if any(node in edge for edge in edges)])
    slopes = {edge: SLOPE if edge == ("x", "y") else rng.uniform(0.5, 1.2) * rng.choice([-1, 1]) for edge in edges}
    values: dict[str, Floats] = {}
    for node in graph.order:
        values[node] = rng.normal(size=EFFECT_ROWS) + sum(slopes[p, node] * values[p] for p in graph.parents(node))
    table = pd.DataFrame({node: values[node] for node in graph.observed})
    truth = slopes["x", "w"] * slopes["w", "y"] if ("x", "w") in slopes else SLOPE
    return table, otp.Model(graph, {node: m.Normal() for node in graph.nodes}), truth


def binary_rows(states: int, rng: np.random.Generator) -> tuple[pd.DataFrame, otp.Model, float]:
    """The bow with a hidden category of some states and two binary nodes: its effect is drawn, too."""
    by_u, base = rng.uniform(0.15, 0.85, states), rng.uniform(0.1, 0.6, states)
    truth, u = rng.uniform(0.0, 0.3), rng.integers(0, states, EFFECT_ROWS)
    x = (rng.random(EFFECT_ROWS) < by_u[u]).astype(int)
    y = (rng.random(EFFECT_ROWS) < base[u] + truth * x).astype(int)
    mechanisms = {"u": m.Categorical(states), "x": m.Bernoulli(), "y": m.Bernoulli()}
    return pd.DataFrame({"x": x, "y": y}), otp.Model(otp.Graph(BOW, hidden=["u"]), mechanisms), truth


UNIDENTIFIED = {
    "bow": partial(linear_rows, BOW),
    "two_hidden": partial(linear_rows, TWO_HIDDEN),
    "proxy": partial(linear_rows, PROXY),
    "binary": partial(binary_rows, 2),
    "ternary": partial(binary_rows, 3),
}
IDENTIFIED = {"instrument": partial(linear_rows, INSTRUMENT), "front_door": partial(linear_rows, FRONT_DOOR)}


def identified(settings: Settings) -> Record:
    """Effects that nothing identifies, of fifty: how many have an interval without the truth, and any interval."""
    wrong, told, sets = 0, 0, settings.repeats * EFFECT_SETS_FOR_EACH_REPEAT
    for name, made in UNIDENTIFIED.items():
        for repeat in range(sets):
            draws = streams(settings.seed, f"identified {name}", repeat)
            table, model, truth = made(draws.data)
            row = otp.fit(model, table, seed=draws.fit, progress=False).effect("x", "y", level=LEVEL).table.iloc[-1]
            told += int(np.isfinite(row["lower"]))
            wrong += int(np.isfinite(row["lower"]) and not row["lower"] <= truth <= row["upper"])
    effects = sets * len(UNIDENTIFIED)
    return {"ratio": wrong, "ours": wrong, "oracle": 0, "limit": 0, "intervals": told, "effects": effects}


def identified_coverage(settings: Settings) -> Record:
    """How often 90 % intervals of effects by instruments and front doors hold them; one that is missing holds none."""
    held, sets = [], settings.repeats * COVERED_EFFECTS_FOR_EACH_REPEAT
    for name, made in IDENTIFIED.items():
        for repeat in range(sets):
            draws = streams(settings.seed, f"identified coverage {name}", repeat)
            table, model, truth = made(draws.data)
            row = otp.fit(model, table, seed=draws.fit, progress=False).effect("x", "y", level=LEVEL).table.iloc[-1]
            held.append(bool(row["lower"] <= truth <= row["upper"]))
    covered = float(np.mean(held))
    return {"ratio": covered, "ours": covered, "oracle": LEVEL, "low": 0.87, "high": 0.93, "effects": len(held)}


# -- counterfactuals ---------------------------------------------------------------------------------------------------


def counterfactual(settings: Settings) -> Record:
    """The largest difference to exact probabilities of two categories in a chain, with a hidden cause and gaps."""
    worst, graph = 0.0, otp.Graph([("h", "t"), ("h", "y"), ("t", "y"), ("y", "z"), ("t", "z")], hidden=["h"])
    sizes = {"h": 2, "t": 2, "y": 3, "z": 4}
    for repeat in range(settings.repeats):
        rng = streams(settings.seed, "counterfactual", repeat).data
        shapes = {node: [sizes[parent] for parent in graph.parents(node)] for node in graph.nodes}
        probs = {node: rng.dirichlet(np.ones(sizes[node]), shapes[node] or None) for node in graph.nodes}
        model = otp.Model(graph, {node: m.Categorical(size) for node, size in sizes.items()})
        model.set_params({node: {"probs": value} for node, value in probs.items()})
        rows = np.array([[rng.integers(sizes[node]) for node in "tyz"] for _ in range(40)], dtype=float)
        rows[rng.random(rows.shape) < 0.2] = np.nan
        after = model.counterfactual(pd.DataFrame(rows, columns=list("tyz")), {"t": 1})
        for number, row in enumerate(rows):
            shares = _by_enumeration(graph, probs, sizes, dict(zip("tyz", row, strict=True)))
            for node, share in shares.items():
                found = after.loc[number, [f"{node}={k}" for k in range(sizes[node])]].to_numpy(dtype=float)
                worst = max(worst, float(np.abs(found - share).max()))
    return {"ratio": worst, "ours": worst, "oracle": 0.0, "limit": 1e-6}


def _by_enumeration(
    graph: otp.Graph, probs: dict[str, Floats], sizes: dict[str, int], row: dict[str, float]
) -> dict[str, Floats]:
    """Probabilities of y and z under t = 1, by all states of a row's own world and of the other one."""
    total, found = 0.0, {node: np.zeros(sizes[node]) for node in "yz"}
    for states in np.ndindex(*(sizes[node] for node in graph.order)):
        was = dict(zip(graph.order, states, strict=True))
        if any(not np.isnan(value) and value != was[node] for node, value in row.items()):
            continue
        own = {node: probs[node][tuple(was[parent] for parent in graph.parents(node))] for node in was}
        chance = np.prod([own[node][was[node]] for node in was])
        total += chance
        for y, z in np.ndindex(sizes["y"], sizes["z"]):
            new = {**was, "t": 1, "y": y, "z": z}
            other = {node: probs[node][tuple(new[parent] for parent in graph.parents(node))] for node in "yz"}
            moved = chance * np.prod([_overlap(own[node], was[node], other[node], new[node]) for node in "yz"])
            found["y"][y] += moved
            found["z"][z] += moved
    return {node: value / total for node, value in found.items()}


def _overlap(before: Floats, state: int, after: Floats, new: int) -> float:
    """The share of the noise that made a state before that makes a new one after."""
    low, high = np.r_[0.0, np.cumsum(before)], np.r_[0.0, np.cumsum(after)]
    shared = min(low[state + 1], high[new + 1]) - max(low[state], high[new])
    return max(0.0, shared) / before[state]


CASES: dict[str, Case] = {
    "ar_gaps": ar_gaps,
    "ar_coverage": ar_coverage,
    "forecast": forecast,
    "small_gaps": small_gaps,
    "identified": identified,
    "identified_coverage": identified_coverage,
    "counterfactual": counterfactual,
    "optima": optima,
    "optima_time": optima_time,
    "networks": networks,
    "networks_gaps": networks_gaps,
    "networks_converged": networks_converged,
    "networks_time": networks_time,
}
