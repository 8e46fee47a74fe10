"""What specialists do on the data of the benchmark `speed`: each returns seconds, the loss of a row and notes.

Processor seconds of the estimation alone: imports, the drawing of data and, with JAX, compilation are apart. The loss
is minus the mean log-likelihood of a row (a step of a sequence), computed alike for both sides where a library's own
differs by constants.
"""

import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from benchmarks.harness import Record
from otpdag.datasets import DiscreteNetwork

REACHED = 1e-3  # of a row's log-likelihood, by which stochastic descent may end above ours
PYRO_STEPS = 1000  # of Adam, from each start, at most


def clocked(function: Callable[[], object]) -> tuple[object, float]:
    """A result, and the processor seconds of this process that it took."""
    begin = time.process_time()
    result = function()
    return result, time.process_time() - begin


def gaussian_loss(table: np.ndarray, covariance: np.ndarray) -> float:
    """Minus the mean log-density of rows under a normal distribution with their own mean."""
    spread = np.cov(table.T, bias=True)
    return float(0.5 * (np.linalg.slogdet(2 * np.pi * covariance)[1] + np.trace(np.linalg.solve(covariance, spread))))


def semopy_factors(frame: pd.DataFrame, factors: list[list[str]]) -> Record:
    """Confirmatory factors, uncorrelated, by semopy's maximum likelihood."""
    import semopy

    lines = [f"f{i} =~ {' + '.join(names)}" for i, names in enumerate(factors)]
    lines += [f"f{i} ~~ 0*f{j}" for i in range(len(factors)) for j in range(i)]
    text = "\n".join(lines)
    semopy.Model(text).fit(frame[:500])
    model = semopy.Model(text)
    _, seconds = clocked(lambda: model.fit(frame))
    place = [model.vars["observed"].index(name) for name in frame]
    return {"seconds": seconds, "loss": gaussian_loss(frame.to_numpy(), model.calc_sigma()[0][np.ix_(place, place)])}


def sklearn_mixture(table: np.ndarray, components: int, starts: int, seed: int) -> Record:
    """scikit-learn's mixture at its own tolerance."""
    from sklearn.mixture import GaussianMixture

    mixture = GaussianMixture(components, n_init=starts, random_state=seed, max_iter=1000)
    _, seconds = clocked(lambda: mixture.fit(table))
    return {"seconds": seconds, "loss": -float(mixture.score(table))}


def pomegranate_mixture(table: np.ndarray, components: int, starts: int, seed: int) -> Record:
    """Mixture of normal vectors by pomegranate, which has one start: the best of several."""
    import torch
    from pomegranate.distributions import Normal
    from pomegranate.gmm import GeneralMixtureModel

    data = torch.as_tensor(table, dtype=torch.float32)

    def climb(number: int) -> float:
        distributions = [Normal(covariance_type="full") for _ in range(components)]
        mixture = GeneralMixtureModel(distributions, tol=1e-3 * len(table), random_state=seed % 2**16 + number)
        return -float(mixture.fit(data).log_probability(data).mean())

    losses, seconds = clocked(lambda: [climb(number) for number in range(starts)])
    return {"seconds": seconds, "loss": min(losses)}


def agrum_network(network: DiscreteNetwork, frame: pd.DataFrame, seed: int) -> Record:
    """Expectation-maximisation of a discrete network by pyAgrum."""
    from benchmarks.oracles.agrum import agrum_em
    from benchmarks.oracles.discrete_em import available_case_start

    start = available_case_start(network, frame, np.random.default_rng(seed))
    return {"seconds": agrum_em(network, frame, start).seconds}


def pgmpy_network(network: DiscreteNetwork, frame: pd.DataFrame, seed: int) -> Record:
    """Expectation-maximisation of a discrete network with hidden nodes by pgmpy."""
    from benchmarks.oracles.network import network_em

    _, seconds = clocked(lambda: network_em(network, frame, [seed]))
    return {"seconds": seconds}


def stepmix_classes(frame: pd.DataFrame, classes: int, starts: int, seed: int) -> Record:
    """StepMix's latent classes."""
    from stepmix.stepmix import StepMix

    model = StepMix(
        classes, measurement="categorical", n_init=starts, random_state=seed, verbose=0, progress_bar=0, rel_tol=1e-9
    )
    _, seconds = clocked(lambda: model.fit(frame))
    return {"seconds": seconds, "loss": -float(model.score(frame))}


def hmmlearn_poisson(counts: np.ndarray, states: int, starts: int, seed: int, timed_steps: int, steps: int) -> Record:
    """Hmmlearn's Baum-Welch: some steps of one start are timed, each costs the same."""
    from baselines import hmm

    flat, lengths = counts.reshape(-1, 1), [counts.shape[1]] * len(counts)
    options = {"states": states, "starts": 1, "seed": seed, "tolerance": -np.inf}
    _, seconds = clocked(lambda: hmm.fit(flat, lengths, steps=timed_steps, quick=False, **options))
    return {"seconds": seconds * starts * steps / timed_steps, "steps": steps}


def dynamax_chains(data: Sequence[np.ndarray], kind: str, states: int, starts: int, seeds: Sequence[int]) -> Record:
    """EM of dynamax until the log-likelihood of a step gains less than 1e-6, from every start; compilation apart.

    Its ``fit_em`` compiles anew in every call: this is its loop with the step compiled once for data sets of one size.
    """
    import jax
    import jax.numpy as jnp
    from dynamax.hidden_markov_model import GaussianHMM, PoissonHMM

    model = (PoissonHMM if kind == "poisson" else GaussianHMM)(num_states=states, emission_dim=1)

    def begin(series: np.ndarray, generator: np.random.Generator) -> tuple:
        key = jax.random.PRNGKey(int(generator.integers(2**31)))
        if kind == "normal":
            return model.initialize(key, method="kmeans", emissions=jnp.asarray(series.reshape(-1, 1), jnp.float32))
        rates = np.sort(generator.choice(series.ravel(), states, replace=False)) + generator.random(states)
        return model.initialize(key, emission_rates=jnp.asarray(rates.reshape(-1, 1), dtype=jnp.float32))

    properties = begin(data[0], np.random.default_rng(0))[1]

    @jax.jit
    def step(emissions: object, params: object, state: object) -> tuple:
        statistics, likelihoods = jax.vmap(lambda one: model.e_step(params, one))(emissions)
        params, state = model.m_step(params, properties, statistics, state)
        return params, state, likelihoods.sum()

    def climb(emissions: object, params: object) -> tuple[float, int]:
        state, before = model.initialize_m_step_state(params, properties), -np.inf
        number, found = 0, -np.inf
        while number < 200 and (number < 2 or found - before >= 1e-6):
            before, number = found, number + 1
            params, state, likelihood = step(emissions, params, state)
            found = float(likelihood) / emissions.size
        return -found, number

    def fit(series: np.ndarray, seed: int) -> Record:
        emissions, generator = jnp.asarray(series[..., None], dtype=jnp.float32), np.random.default_rng(seed)
        starts_from = [begin(series, generator)[0] for _ in range(starts)]
        state = model.initialize_m_step_state(starts_from[0], properties)
        jax.block_until_ready(step(emissions, starts_from[0], state))
        ends, seconds = clocked(lambda: [climb(emissions, start) for start in starts_from])
        return {"seconds": seconds, "loss": min(loss for loss, _ in ends), "iterations": [many for _, many in ends]}

    return {"fits": [fit(series, seed) for series, seed in zip(data, seeds, strict=True)]}


def pyro_mixed(frame: pd.DataFrame, classes: int, states: int, starts: int, goal: float, seed: int) -> Record:
    """Pyro: the hidden class enumerated, everything else by Adam until the loss is within a thousandth of ``goal``."""
    import pyro
    import pyro.distributions as dist
    import torch
    from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate
    from torch.distributions import constraints

    x1, x2 = (torch.as_tensor(frame[name].to_numpy(), dtype=torch.float64) for name in ("x1", "x2"))
    x3, rows = torch.as_tensor(frame["x3"].to_numpy()), len(frame)

    @config_enumerate
    def model() -> None:
        weights = pyro.param("weights", lambda: torch.ones(classes).double() / classes, constraint=constraints.simplex)
        loc = pyro.param("loc", lambda: x1[torch.randint(rows, (classes,))])
        scale = pyro.param("scale", lambda: x1.std().expand(classes).clone(), constraint=constraints.positive)
        base = pyro.param("base", lambda: (x2.mean() + 1).log() + 0.3 * torch.randn(classes).double())
        slope = pyro.param("slope", lambda: torch.zeros(1).double())
        table = pyro.param(
            "table",
            lambda: torch.distributions.Dirichlet(torch.ones(states).double()).sample((classes,)),
            constraint=constraints.simplex,
        )
        with pyro.plate("rows", rows):
            z = pyro.sample("z", dist.Categorical(weights))
            pyro.sample("x1", dist.Normal(loc[z], scale[z]), obs=x1)
            pyro.sample("x2", dist.Poisson(torch.exp((base[z] + slope * x1).clamp(max=20.0))), obs=x2)
            pyro.sample("x3", dist.Categorical(table[z]), obs=x3)

    losses, seconds, reached = [], 0.0, 0
    for start in range(starts):
        pyro.clear_param_store()
        pyro.set_rng_seed(seed + start)
        svi = SVI(model, lambda: None, pyro.optim.Adam({"lr": 0.03}), TraceEnum_ELBO(max_plate_nesting=1))
        begin, loss = time.process_time(), np.inf
        for _ in range(PYRO_STEPS):
            loss = svi.step() / rows
            if loss <= goal + REACHED:
                reached += 1
                break
        seconds += time.process_time() - begin
        losses.append(loss)
    return {"seconds": seconds, "loss": float(min(losses)), "starts_that_reached_it": reached}


def quietly(work: Callable[[], Record]) -> Record:
    """Run a peer without its warnings, on one core."""
    import os

    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return work()
