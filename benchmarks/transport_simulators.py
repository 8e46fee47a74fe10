"""Simulators: parameters of models without a density, by transport, beside maximum likelihood or sbi; and Theorem 1.

Settings and truths of the g-and-k distribution, the M/G/1 queue and the toggle switch are those of Bernton, Jacob,
Gerber & Robert (2019). Times are processor time. sbi is neural posterior estimation at its defaults, with 10,000
simulations and quantiles of the data as summaries (of the queue, the raw path does worse); its estimate is the
posterior median.
"""

import importlib.util
import time
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
import torch
from scipy import optimize

import otpdag as otp
from benchmarks.harness import Case, Outcome, Record, Settings, Skip, streams, summary, timed
from otpdag import mechanisms as m
from otpdag.spaces import Real

SIMULATIONS = 10_000
G_AND_K = {"a": 3.0, "b": 1.0, "g": 2.0, "k": 0.5}
QUEUE = {"low": (0.0, 10.0, 4.0), "width": (0.0, 10.0, 3.0), "rate": (0.0, 1 / 3, 0.15)}
TOGGLE = {
    "alpha1": (0.01, 50.0, 22.0),
    "alpha2": (0.01, 50.0, 12.0),
    "beta1": (0.01, 5.0, 4.0),
    "beta2": (0.01, 5.0, 4.5),
    "mu": (250.0, 450.0, 325.0),
    "sigma": (0.01, 0.5, 0.25),
    "gamma": (0.01, 0.4, 0.15),
}
QUEUE_STEPS, TOGGLE_CELLS, TOGGLE_STEPS = 50, 2_000, 300
Range = Mapping[str, tuple[float, float, float]]
"""Lowest and highest value of each parameter, and the truth."""


# -- g-and-k -----------------------------------------------------------------------------------------------------------


def g_and_k(settings: Settings, rows: int = 1_000) -> Record:
    """Mean error of the four parameters over that of maximum likelihood by numerical inversion."""
    ours, oracle = [], []
    for repeat in range(settings.repeats):
        own = streams(settings.seed, "g_and_k", repeat)
        x = quantile(own.data.normal(size=rows), *G_AND_K.values())
        starts = {"a": otp.start(0.0), "b": otp.start(1.0), "g": otp.start(0.5), "k": otp.start(0.3)}
        node = m.Simulator(curve, starts, bounds={"b": (0, None), "k": (0, None)})
        ours.append(fitted("x", node, x[:, None], G_AND_K, None, own.fit))
        found, seconds = timed(lambda x=x: likeliest(x), time.process_time)
        oracle.append(Outcome(float(np.abs(found - list(G_AND_K.values())).mean()), seconds))
    return record(ours, oracle, limit=1.4, time_limit=0.5)


def curve(parents, noise, a, b, g, k):
    return a + b * (1 + 0.8 * torch.tanh(0.5 * g * noise)) * (1 + noise**2) ** k * noise


def quantile(z, a, b, g, k):
    return a + b * (1 + 0.8 * np.tanh(0.5 * g * z)) * (1 + z**2) ** k * z


def likeliest(x):
    """Maximum likelihood as Rayner & MacGillivray (2002): quantiles inverted by bisection, a simplex search."""

    def loss(point):
        a, b, g, k = point[0], np.exp(point[1]), point[2], np.exp(point[3])
        low, high = np.full(len(x), -9.0), np.full(len(x), 9.0)
        for _ in range(45):
            middle = 0.5 * (low + high)
            below = quantile(middle, a, b, g, k) < x
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        z = 0.5 * (low + high)
        bent = np.tanh(0.5 * g * z)
        slope = (1 + 0.8 * bent) * (1 + 2 * k * z**2 / (1 + z**2)) + 0.4 * g * z * (1 - bent**2)
        return float((0.5 * z**2 + np.log(b * (1 + z**2) ** k * slope)).mean())

    begin = [np.median(x), np.log(x.std() / 2), 0.5, np.log(0.3)]
    point = optimize.minimize(loss, begin, method="Nelder-Mead", options={"maxiter": 2_000}).x
    return np.array([point[0], np.exp(point[1]), point[2], np.exp(point[3])])


# -- beside sbi --------------------------------------------------------------------------------------------------------


def queue(settings: Settings) -> Record:
    """One path of 50 times between departures: mean error of three parameters, in shares of their ranges."""

    def simulated(theta, generator):
        u = torch.rand(len(theta), 2 * QUEUE_STEPS, generator=generator)
        return departures({}, u, *theta.T.unsqueeze(-1))

    levels = torch.linspace(0, 1, 20)
    bounds = {name: (low, high) for name, (low, high, _) in QUEUE.items()}
    noise = {"noise": 2 * QUEUE_STEPS, "uniform": True, "path": True}
    node = m.Simulator(departures, dict.fromkeys(QUEUE), Real(QUEUE_STEPS), bounds=bounds, **noise)
    return beside_sbi("queue", node, QUEUE, simulated, levels, settings, as_rows=False)


def departures(parents, noise, low, width, rate):
    """Times between departures from a queue that begins empty."""
    steps = noise.shape[-1] // 2
    service = low + width * noise[..., :steps]
    arrival = (-torch.log1p(-noise[..., steps:]) / rate).cumsum(-1)
    left, between = torch.zeros_like(arrival[..., 0]), []
    for step in range(steps):
        done = service[..., step] + torch.maximum(arrival[..., step], left)
        between.append(done - left)
        left = done
    return torch.stack(between, -1)


def toggle(settings: Settings) -> Record:
    """2,000 cells after 300 steps: mean error of seven parameters, in shares of their ranges."""

    def simulated(theta, generator, at_once=20):
        rows = []
        for part in theta.split(at_once):
            u = torch.randn(len(part), TOGGLE_CELLS, 2 * TOGGLE_STEPS + 1, generator=generator)
            rows.append(switch({}, u, *part.T[..., None, None])[..., 0])
        return torch.cat(rows)

    bounds = {name: (low, high) for name, (low, high, _) in TOGGLE.items()}
    node = m.Simulator(switch, dict.fromkeys(TOGGLE), noise=2 * TOGGLE_STEPS + 1, bounds=bounds)
    return beside_sbi("toggle", node, TOGGLE, simulated, torch.linspace(0.02, 0.98, 25), settings, as_rows=True)


def switch(parents, noise, alpha1, alpha2, beta1, beta2, mu, sigma, gamma):
    """A gene that two proteins switch on and off, as a cell's measurement shows it."""
    u = v = torch.full_like(alpha1, 10.0)
    for step in range(0, 2 * TOGGLE_STEPS, 2):
        du, dv = (0.5 * noise[..., at : at + 1] for at in (step, step + 1))
        du = du + alpha1 / (1 + v**beta1) - (1 + 0.03 * u)
        dv = dv + alpha2 / (1 + u**beta2) - (1 + 0.03 * v)
        u, v = (u + du).clamp(min=1.0), (v + dv).clamp(min=1.0)
    return mu + u + mu * sigma * u**-gamma * noise[..., -1:]


def beside_sbi(
    name: str,
    node: m.Mechanism,
    ranges: Range,
    simulated: Callable,
    levels: torch.Tensor,
    settings: Settings,
    *,
    as_rows: bool,
) -> Record:
    """Errors by transport and by sbi, which is trained once: its time is that of simulations and training."""
    low, high, truth = (torch.tensor(values) for values in zip(*ranges.values(), strict=True))
    first = streams(settings.seed, name, 0)
    estimate, seconds = timed(lambda: posterior(low, high, simulated, levels, first.oracle), time.process_time)
    ours, oracle = [], []
    for repeat in range(settings.repeats):
        own = streams(settings.seed, name, repeat)
        seen = simulated(truth[None], torch.Generator().manual_seed(int(own.data.integers(2**31))))
        rows = (seen[0, :, None] if as_rows else seen).double().numpy()
        ours.append(fitted("y", node, rows, dict(zip(ranges, truth.tolist(), strict=True)), high - low, own.fit))
        error = (estimate(torch.quantile(seen, levels, dim=1).T) - truth).abs() / (high - low)
        oracle.append(Outcome(float(error.mean()), seconds))
    return record(ours, oracle, limit=1.0, time_limit=0.1)


def posterior(low, high, simulated, levels, seed: int) -> Callable:
    """Train sbi's neural posterior estimation; returns the posterior median given summaries."""
    if importlib.util.find_spec("sbi") is None:
        raise Skip("needs sbi, of the extra 'bench'")
    from sbi.inference import NPE
    from sbi.utils import BoxUniform

    torch.manual_seed(seed)
    prior = BoxUniform(low, high)
    theta = prior.sample((SIMULATIONS,))
    summaries = torch.quantile(simulated(theta, torch.Generator().manual_seed(seed)), levels, dim=1).T
    inference = NPE(prior=prior)
    inference.append_simulations(theta, summaries)
    inference.train()
    trained = inference.build_posterior()
    return lambda seen: trained.sample((1_000,), x=seen, show_progress_bars=False).median(0).values


def fitted(node: str, mechanism: m.Mechanism, rows: np.ndarray, truth: Mapping[str, float], unit, seed: int) -> Outcome:
    """The mean error of a simulator's parameters after a fit by ``method="auto"``, and the processor time it took."""
    model = otp.Model(otp.Graph([], nodes=[node]), {node: mechanism})
    _, seconds = timed(lambda: otp.fit(model, {node: rows}, seed=seed), time.process_time)
    error = np.array([abs(float(model.params()[node][name]) - value) for name, value in truth.items()])
    return Outcome(float((error if unit is None else error / unit.numpy()).mean()), seconds)


def record(ours: list[Outcome], oracle: list[Outcome], *, limit: float, time_limit: float) -> Record:
    told: Record = {"limit": limit, "time_limit": time_limit, "method": "transport"}
    told |= summary("ours", ours) | summary("oracle", oracle)
    return told | {
        "ratio": told["ours"] / told["oracle"],
        "time_ratio": told["seconds"] / told["oracle_seconds"],
    }


# -- both sides --------------------------------------------------------------------------------------------------------


def theorem1(settings: Settings, rows: int = 150) -> Record:
    """The largest gap of the two sides of Theorem 1 relative to the cost, on four small models that are wrong."""
    gaps: Record = {}
    for repeat in range(min(settings.repeats, 3)):
        own = streams(settings.seed, "theorem1", repeat)
        for name, (model, table) in small_models(own.data, rows).items():
            told = otp.fit(model, table, seed=own.fit).transport(table, etas=(1.0, 10.0, 100.0), seed=own.fit)
            for eta, gap in told["gap"].items():
                key = f"gap_{name}_{eta:g}"
                gaps[key] = max(gaps.get(key, 0.0), abs(float(gap)))
    last = [value for key, value in gaps.items() if key.endswith("_100")]
    return {"limit": 0.05, "method": "transport", "ratio": max(last)} | gaps


def small_models(rng: np.random.Generator, rows: int) -> dict[str, tuple[otp.Model, pd.DataFrame]]:
    """A scale that is wrong, a curve taken for a line, heavy tails under a factor, and a skewed mixture."""
    a, z, c = rng.normal(size=rows), rng.normal(size=rows), rng.integers(0, 2, rows)
    factor = otp.Graph([("z", name) for name in "abc"], hidden=["z"])
    return {
        "normal": (
            otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal(scale=1.0)}),
            pd.DataFrame({"x": rng.normal(1.0, 2.0, rows)}),
        ),
        "line": (
            otp.Model(otp.Graph([("a", "b")]), {"a": m.Normal(), "b": m.Normal()}),
            pd.DataFrame({"a": a, "b": a**2 + rng.normal(size=rows)}),
        ),
        "factor": (
            otp.Model(factor, {"z": m.Normal(loc=0.0, scale=1.0), **{name: m.Normal() for name in "abc"}}),
            pd.DataFrame({name: z + 0.5 * rng.standard_t(3, rows) for name in "abc"}),
        ),
        "mixture": (
            otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal(scale=1.0)}),
            pd.DataFrame({"x": 3.0 * c + rng.exponential(1.0, rows)}),
        ),
    }


CASES: dict[str, Case] = {"g_and_k": g_and_k, "queue": queue, "toggle": toggle, "theorem1": theorem1}
