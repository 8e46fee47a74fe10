"""Messages along chains and particles, against sums over all paths and filters that are known."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema
from otpdag.data.sequences import Sequences, encode_sequences
from otpdag.errors import ModelError
from otpdag.likelihood import chain_layout
from otpdag.likelihood.chain_layout import Block, Chain, Lanes, Linear, States, potentials
from otpdag.likelihood.chain_messages import Moves, marginals, smoothed
from otpdag.likelihood.sequence_posterior import draw_paths, filter_particles
from tests.dynamic_models import (
    by_paths,
    kalman,
    kalman_smoother,
    known_state_space,
    laid_out,
    linear_series,
    random_poisson_hmm,
)

# -- forward and backward over chains of states, against sums over all paths and recursions written out ---------------


LENGTHS, SIZE, KINDS = (4, 4, 2), 3, 10


def random_block(varying, lag=1):
    sizes = tuple(sum(length > step for length in LENGTHS) for step in range(4))
    rng = np.random.default_rng(0)
    kinds = torch.as_tensor(rng.integers(0, KINDS, sum(sizes)) if lag == 1 else rng.permutation(KINDS))
    block = Block(kinds, torch.arange(sum(sizes)), sizes, torch.arange(3))
    eye = torch.eye(SIZE).double()
    states = States(("z",), SIZE, {"z": eye}, {"z[-1]": eye}, None, torch.ones(SIZE, dtype=torch.bool))
    phase = torch.zeros(KINDS, dtype=torch.long).index_copy(0, kinds, block.steps.clamp(max=lag))
    chain = Chain(states, {}, {}, phase, (block,), lag, varying)
    rows = KINDS if varying else lag + 1
    generator = torch.Generator().manual_seed(1)
    unary, pair = (
        torch.rand(2, *shape, generator=generator, dtype=torch.float64) + 0.1
        for shape in ((SIZE, KINDS), (rows, SIZE, SIZE))
    )
    log_unit = torch.randn(2, KINDS, generator=generator, dtype=torch.float64)
    return block, chain, Linear(unary, log_unit, pair)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("varying", "lag"), [(False, 1), (False, 2), (True, 1)])
def test_a_block_has_the_probabilities_of_all_its_paths(varying, lag, weighted):
    block, chain, potential = random_block(varying, lag)
    weight = torch.tensor([[1.0, 2.0, 0.5], [0.0, 1.5, 3.0]]).double() if weighted else None
    found = marginals(block, potential, chain, weight)
    starts = np.cumsum([0, *block.sizes])
    pairs = np.zeros(potential.pair.shape)
    for replica, (number, length) in itertools.product(range(2), enumerate(LENGTHS)):
        columns = [starts[step] + number for step in range(length)]
        kinds = [int(block.kinds[column]) for column in columns]
        rows = [kinds[step] if varying else min(step, lag) for step in range(length)]
        unary, pair = potential.unary[replica].numpy(), potential.pair[replica].numpy()
        paths = list(itertools.product(range(SIZE), repeat=length))
        mass = np.array(
            [
                np.prod([unary[state, kind] for state, kind in zip(path, kinds, strict=True)])
                * np.prod([pair[rows[t], path[t - 1], path[t]] for t in range(1, length)])
                for path in paths
            ]
        )
        expected = np.log(mass.sum()) + potential.log_unit[replica, kinds].sum().item()
        assert found.log_scale[replica, columns].sum().item() == pytest.approx(expected)
        share = mass / mass.sum()
        for t, column in enumerate(columns):
            state = [share[[path[t] == k for path in paths]].sum() for k in range(SIZE)]
            np.testing.assert_allclose(found.state[replica, :, column], state)
            if t:
                for path, own in zip(paths, share, strict=True):
                    factor = 1.0 if weight is None else weight[replica, number].item()
                    pairs[replica, rows[t], path[t - 1], path[t]] += factor * own
    np.testing.assert_allclose(found.pair, pairs, atol=1e-12)


def naturals(model):
    return model.fitted.naturals


def run(model, chain):
    """Log-likelihood of each step given those before, and state probabilities, in the order of the batch's rows."""
    linear = Linear.of(potentials(model.structure, naturals(model), chain))
    steps = sum(len(block.kinds) for block in chain.blocks)
    state = torch.zeros(steps, chain.states.size, dtype=torch.float64)
    scale = torch.zeros(steps, dtype=torch.float64)
    pair = torch.zeros_like(linear.pair)
    for block in chain.blocks:
        part = marginals(block, linear, chain)
        state[block.rows], scale[block.rows] = part.state[0].T, part.log_scale[0]
        pair += part.pair
    return state, scale, pair[0]


@pytest.mark.parametrize("transition", [None, m.StayOrMove(3)], ids=["full", "stay"])
def test_a_hidden_markov_model_agrees_with_the_sum_over_all_paths(transition):
    model = random_poisson_hmm(3, transition)
    data = [np.array([1.0, 7.0, np.nan, 12.0, 3.0]), np.array([9.0]), np.array([np.nan, np.nan]), np.array([0.0, 5.0])]
    state, scale, _ = run(model, laid_out(model, data))
    at = 0
    for x in data:
        likelihood, expected = by_paths(model, x)
        rows = slice(at, at + len(x))
        assert float(scale[rows].sum()) == pytest.approx(likelihood, rel=1e-12, abs=1e-12)
        np.testing.assert_allclose(state[rows], expected, atol=1e-12)
        at += len(x)


def test_blocks_do_not_change_the_result():
    model = random_poisson_hmm()
    rng = np.random.default_rng(0)
    data = [rng.poisson(6, length).astype(float) for length in (9, 3, 3, 14, 1, 5)]
    one, many = laid_out(model, data), laid_out(model, data, block_steps=45)
    assert len(many.blocks) > len(one.blocks)
    for left, right in zip(run(model, one), run(model, many), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-12)


def enumerate_paths(model, frame, hidden):
    """Log-likelihood of one sequence of any dynamic model of categories, by summing over all hidden paths."""
    structure, graph = model.structure, model.graph
    params = naturals(model)
    widths = [structure.mechanisms[node].space.width for node in hidden]
    steps = len(next(iter(frame.values())))
    total = []
    for path in itertools.product(itertools.product(*map(range, widths)), repeat=steps):
        values = {node: torch.as_tensor(np.asarray(column)) for node, column in frame.items()}
        for place, (node, width) in enumerate(zip(hidden, widths, strict=True)):
            values[node] = torch.eye(width, dtype=torch.float64)[[states[place] for states in path]]
        log = 0.0
        for node in graph.nodes:
            for step in range(steps):
                lag = structure.longest_lag(node)
                name = f"{node}[0]" if step < lag else node
                if name not in structure.mechanisms:
                    continue  # the first steps of an observed node are conditioned on
                mechanism = structure.mechanisms[name]
                if mechanism.is_given:
                    continue
                parents = {p: values[p][step][None, None] for p in graph.parents(node)}
                if step >= lag:
                    lagged = graph.lagged_parents(node)
                    parents |= {f"{p}[-{by}]": values[p][step - by][None, None] for p, by in lagged}
                log += float(mechanism.log_prob(params[name], values[node][step][None, None], parents))
        total.append(log)
    return float(torch.logsumexp(torch.tensor(total, dtype=torch.float64), 0))


def random_params(model, seed):
    rng = np.random.default_rng(seed)
    found = {}
    for name, mechanism in model.structure.mechanisms.items():
        found[name] = {}
        for key, parameter in mechanism.declared().items():
            if key == "probs":
                found[name][key] = rng.dirichlet(np.ones(parameter.shape[-1]), parameter.shape[0])
            elif key == "scale":
                found[name][key] = rng.uniform(0.5, 1.5, parameter.shape)
            else:
                found[name][key] = rng.normal(size=parameter.shape)
    return model.set_params(found)


LAG_TWO = (
    [otp.lag("z", "z"), otp.lag("z", "z", by=2), ("z", "x")],
    ["z"],
    {"z": m.Categorical(2), "x": m.Normal()},
)


TWO_CHAINS = (
    [otp.lag("z", "z"), otp.lag("w", "w"), otp.lag("z", "w"), ("z", "x"), ("w", "x")],
    ["z", "w"],
    {"z": m.Categorical(2), "w": m.Categorical(2), "x": m.Normal()},
)


SWITCHING = (
    [otp.lag("z", "z"), otp.lag("x", "x"), ("z", "x")],
    ["z"],
    {"z": m.Categorical(2), "x": m.Normal()},
)


COVARIATE = (
    [otp.lag("z", "z"), ("u", "z"), ("z", "x"), otp.lag("u", "x")],
    ["z"],
    {"z": m.Categorical(2), "u": m.Given(), "x": m.Normal()},
)


LAGGED_EMISSION = (
    [otp.lag("z", "z"), otp.lag("z", "x"), ("z", "x")],
    ["z"],
    {"z": m.Categorical(2), "x": m.Normal()},
)


FEEDBACK = (
    [otp.lag("z", "z"), ("z", "x"), otp.lag("x", "z")],
    ["z"],
    {"z": m.Categorical(2), "x": m.Normal()},
)


NETWORKS = {
    "lag-two": LAG_TWO,
    "two-chains": TWO_CHAINS,
    "switching": SWITCHING,
    "covariate": COVARIATE,
    "lagged-emission": LAGGED_EMISSION,
    "feedback": FEEDBACK,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_any_dynamic_network_agrees_with_the_sum_over_all_paths(name):
    edges, hidden, mechanisms = NETWORKS[name]
    model = random_params(otp.Model(otp.Graph(edges, hidden=hidden), mechanisms), 3)
    rng = np.random.default_rng(2)
    frame = {node: rng.normal(size=(4, 1)) for node in model.graph.observed}
    chain = laid_out(model, {node: value.reshape(1, 4) for node, value in frame.items()})
    _, scale, _ = run(model, chain)
    assert float(scale.sum()) == pytest.approx(enumerate_paths(model, frame, hidden), rel=1e-10)


def test_a_missing_category_with_children_is_summed_over():
    graph = otp.Graph([otp.lag("a", "a"), ("a", "x")])
    model = random_params(otp.Model(graph, {"a": m.Categorical(3), "x": m.Normal()}), 0)
    a, x = np.array([0.0, np.nan, 2.0]), np.array([0.3, -1.0, 0.5])
    _, scale, _ = run(model, laid_out(model, {"a": a, "x": x}))
    filled = []
    for k in range(3):
        _, one, _ = run(model, laid_out(model, {"a": np.array([0.0, k, 2.0]), "x": x}))
        filled.append(float(one.sum()))
    assert float(scale.sum()) == pytest.approx(float(np.logaddexp.reduce(filled)))


def two_replicas(chain, model):
    """Potentials of a model, and of the same with other rates."""
    naturals = model.fitted.naturals
    other = {**naturals, "x": {"log_rate": naturals["x"]["log_rate"] + 0.3}}
    parts = [Linear.of(potentials(model.structure, one, chain)) for one in (naturals, other)]
    return Linear(*(torch.cat([getattr(part, name) for part in parts]) for name in ("unary", "log_unit", "pair")))


@pytest.mark.parametrize("stretch", [3, 16])
@pytest.mark.parametrize("lengths", [(41,), (37, 30, 16, 1), (33, 33, 32)])
@pytest.mark.parametrize("weighted", [False, True])
def test_stretches_give_what_whole_sequences_give(stretch, lengths, weighted, monkeypatch):
    monkeypatch.setattr(chain_layout, "STRETCH", stretch)
    rng = np.random.default_rng(0)
    data = [rng.poisson(6, length).astype(float) for length in lengths]
    data[0][3:9] = np.nan
    model = random_poisson_hmm()
    chain = laid_out(model, data)
    (block,) = chain.blocks
    linear = two_replicas(chain, model)
    weight = torch.as_tensor(rng.uniform(0.2, 3.0, (2, len(lengths)))) if weighted else None
    assert block.lanes(2, 3).are_cut
    found = marginals(block, linear, chain, weight)
    monkeypatch.setattr(chain_layout, "SIDE_BY_SIDE", 0)
    assert not block.lanes(2, 3).are_cut
    expected = marginals(block, linear, chain, weight)
    torch.testing.assert_close(found.state, expected.state, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.log_scale, expected.log_scale, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.pair, expected.pair, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.state.sum(1), torch.ones(2, sum(lengths)).double())
    # every step but the first of a sequence has a pair of states
    steps = torch.tensor(lengths).sort(descending=True).values - 1
    counted = steps.double().sum().expand(2) if weight is None else (weight * steps).sum(-1)
    torch.testing.assert_close(found.pair.sum((1, 2, 3)), counted)


def test_a_sequence_that_cannot_be_has_no_likelihood():
    """Not even where it is cut into stretches, whose products have lost a state that the data later ask for."""
    model = random_poisson_hmm()
    chain = laid_out(model, [np.full(80, 5.0)])
    linear = Linear.of(potentials(model.structure, model.fitted.naturals, chain))
    nothing = Linear(torch.zeros_like(linear.unary), linear.log_unit, linear.pair)
    with np.errstate(all="ignore"):
        assert not torch.isfinite(marginals(chain.blocks[0], nothing, chain).log_scale).any()


def filtered_by_hand(emission, matrix):
    """Filtered probabilities of one long sequence (T, S), and its log-likelihood."""
    message, total, filtered = np.ones(len(matrix)), 0.0, []
    for number, row in enumerate(emission):
        message = row * (message @ matrix if number else 1.0)
        total += np.log(message.sum())
        message = message / message.sum()
        filtered.append(message)
    return np.array(filtered), total


@pytest.mark.parametrize("stay", [0.6, 0.9999])
@pytest.mark.parametrize("every", [1, 4])
def test_a_long_sequence_is_cut_exactly_whether_it_forgets_or_not(stay, every):
    rng = np.random.default_rng(1)
    steps, size = 205, 3
    matrix = np.full((size, size), (1 - stay) / (size - 1))
    np.fill_diagonal(matrix, stay)
    emission = rng.uniform(0.1 if stay < 0.9 else 0.9, 1.0, (steps, size))
    lanes = Lanes.of((1,) * steps, 32)
    placed = np.where(lanes.inside[..., None], emission[lanes.columns], 1.0).swapaxes(1, 2)[:, None]
    found = smoothed(placed, Moves(matrix[None, None], lanes), lanes, every)
    forward, total = filtered_by_hand(emission, matrix)
    assert np.log(found.scale).sum() == pytest.approx(total, rel=1e-11)
    before = lanes.in_columns(found.before)[0].T.numpy()
    np.testing.assert_allclose((before / before.sum(1, keepdims=True))[1:], forward[:-1], rtol=1e-9)
    state = lanes.in_columns(found.state)[0].T.numpy()
    np.testing.assert_allclose(state.sum(1), 1.0, rtol=1e-10)
    np.testing.assert_allclose(state[-1], forward[-1], rtol=1e-9)


def test_a_single_replica_is_one_of_two():
    model = random_poisson_hmm()
    chain = laid_out(model, [np.random.default_rng(4).poisson(6, length).astype(float) for length in (70, 41)])
    (block,) = chain.blocks
    both = two_replicas(chain, model)
    one = marginals(block, Linear(both.unary[:1], both.log_unit[:1], both.pair[:1]), chain)
    two = marginals(block, both, chain)
    for name in ("state", "log_scale", "pair"):
        torch.testing.assert_close(getattr(one, name), getattr(two, name)[:1], rtol=1e-12, atol=1e-14)


# -- particles, beside a Kalman filter and smoother, and beside one dense normal distribution of all steps ------------


STEPS = (5, 2, 4, 1)


def test_particles_give_the_kalman_likelihood_and_smoother():
    model = known_state_space()
    x, _ = linear_series(3, sequences=3, length=25)
    x[0, 5:8] = np.nan
    truth = (0.85, 0.7, 0.5, 2.0)
    assert model.score(x, kind="likelihood") * x.size == pytest.approx(kalman(truth, x)[0].sum(), abs=0.6)
    draws = model.posterior(x, draws=200, seed=0)["z"].to_numpy().reshape(3, 25, 200)
    np.testing.assert_allclose(draws.mean(-1), kalman_smoother(truth, x), atol=0.25)


class Equations:
    """Linear equations of hidden numbers with normal errors: their posterior, and the integral over all of them."""

    def __init__(self, many):
        self.precision, self.pull, self.constant = np.zeros((many, many)), np.zeros(many), many / 2 * np.log(2 * np.pi)

    def add(self, slopes, target, scale):
        """The sum of slopes times numbers is the target, up to an error of this scale."""
        row = np.zeros(len(self.pull))
        for at, slope in slopes.items():
            row[at] += slope
        self.precision += np.outer(row, row) / scale**2
        self.pull += row * target / scale**2
        self.constant -= 0.5 * np.log(2 * np.pi * scale**2) + 0.5 * target**2 / scale**2

    @property
    def mean(self):
        return np.linalg.solve(self.precision, self.pull)

    @property
    def covariance(self):
        return np.linalg.inv(self.precision)

    @property
    def log_integral(self):
        return self.constant + 0.5 * self.pull @ self.mean - 0.5 * np.linalg.slogdet(self.precision)[1]


def batch_of(model, frames):
    schema = Schema.of(model.spaces, model.graph)
    return encode_sequences(Sequences(frames), schema, hidden=model.graph.hidden, partial=True)


def series(seed):
    rng = np.random.default_rng(seed)
    frames = [pd.DataFrame(rng.normal(size=(length, 3)), columns=["u", "x", "y"]) for length in STEPS]
    frames[0].loc[2, "x"] = np.nan
    frames[2].loc[1, "y"] = np.nan
    return frames


def driven_model():
    """Numbers that earlier observations drive, seen by a series of its own past and by one of their own past."""
    edges = [otp.lag("z", "z"), otp.lag("u", "z"), ("u", "x"), ("z", "x"), otp.lag("x", "x", by=2)]
    graph = otp.Graph([*edges, ("z", "y"), otp.lag("z", "y")], hidden=["z"])
    model = otp.Model(graph, {"u": m.Given(), "z": m.Normal(), "x": m.Normal(), "y": m.Normal()})
    return model.set_params(
        {
            "z": {"loc": 0.3, "weight": [[0.8], [-0.5]], "scale": 0.7},
            "z[0]": {"loc": -0.4, "scale": 1.3},
            "x": {"loc": 0.2, "weight": [[0.6], [0.9], [0.4]], "scale": 0.8},
            "y": {"loc": -0.1, "weight": [[0.5], [-0.7]], "scale": 0.9},
        }
    )


def driven_equations(frame):
    u, x, y = (frame[name] for name in ("u", "x", "y"))
    equations = Equations(len(x))
    for t in range(len(x)):
        if t == 0:
            equations.add({0: 1.0}, -0.4, 1.3)
        else:
            equations.add({t: 1.0, t - 1: -0.8}, 0.3 - 0.5 * u[t - 1], 0.7)
            if not np.isnan(y[t]):
                equations.add({t: 0.5, t - 1: -0.7}, y[t] + 0.1, 0.9)
        if t >= 2 and not np.isnan(x[t]) and not np.isnan(x[t - 2]):  # the first two are conditioned on
            equations.add({t: 0.9}, x[t] - 0.2 - 0.6 * u[t] - 0.4 * x[t - 2], 0.8)
    return equations


def test_numbers_that_earlier_observations_drive():
    model, frames = driven_model(), series(1)
    batch, fitted = batch_of(model, frames), model.fitted
    truth = [driven_equations(frame) for frame in frames]
    generator = torch.Generator().manual_seed(0)
    many = filter_particles(fitted, batch, 4000, generator)
    np.testing.assert_allclose(many.log_likelihood, [one.log_integral for one in truth], atol=0.05)
    particles = filter_particles(fitted, batch, 1000, generator)
    paths = draw_paths(fitted, batch, particles, 600, generator)["z"][..., 0].split(STEPS)
    for path, one in zip(paths, truth, strict=True):
        np.testing.assert_allclose(path.mean(1), one.mean, atol=0.15)
        np.testing.assert_allclose(np.cov(path.numpy(), bias=True), one.covariance, atol=0.2)


def test_the_weight_of_a_particle_is_the_density_of_what_is_seen_over_the_sum_of_all():
    model, frames = known_state_space(), [frame[["x"]] for frame in series(2)]
    batch = batch_of(model, frames)
    particles = filter_particles(model.fitted, batch, 50, torch.Generator().manual_seed(3))
    order = [0, 2, 1, 3]  # of the lengths, the longest first
    for step, (values, weight) in enumerate(zip(particles.values, particles.log_weight, strict=True)):
        longer = [frames[sequence]["x"] for sequence in order if STEPS[sequence] > step]
        assert values["z"].shape == (len(longer), 50, 1)
        for place, x in enumerate(longer):
            z = values["z"][place, :, 0].numpy()
            density = np.ones(50) if np.isnan(x[step]) else stats.norm.pdf(x[step], 2.0 + 0.7 * z, 0.5)
            np.testing.assert_allclose(weight[place].exp(), density / density.sum())


def test_numbers_that_depend_on_two_steps_ago():
    graph = otp.Graph([otp.lag("z", "z"), otp.lag("z", "z", by=2), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Normal(), "x": m.Normal()}).set_params(
        {
            "z": {"loc": 0.1, "weight": [[0.5], [-0.6]], "scale": 0.8},
            "z[0]": {"loc": 0.5, "scale": 1.2},
            "x": {"loc": 0.3, "weight": 0.9, "scale": 0.6},
        }
    )
    frames = [frame[["x"]] for frame in series(4)]
    truth = []
    for frame in frames:
        truth.append(Equations(len(frame["x"])))
        for t, x in enumerate(frame["x"]):
            earlier = {t - 1: -0.5, t - 2: 0.6} if t >= 2 else {}
            truth[-1].add({t: 1.0, **earlier}, 0.1 if t >= 2 else 0.5, 0.8 if t >= 2 else 1.2)
            if not np.isnan(x):
                truth[-1].add({t: 0.9}, x - 0.3, 0.6)
    batch, generator = batch_of(model, frames), torch.Generator().manual_seed(1)
    particles = filter_particles(model.fitted, batch, 8000, generator)
    np.testing.assert_allclose(particles.log_likelihood, [one.log_integral for one in truth], atol=0.05)
    with pytest.raises(ModelError, match="lags of one step"):
        draw_paths(model.fitted, batch, particles, 2, generator)
