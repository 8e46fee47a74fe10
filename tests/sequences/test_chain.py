"""The chain's forward-backward against sums over all paths."""

import itertools
import math

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward import chain as chains
from otpdag.backward.chain import Linear, lay_out_chain, marginals, potentials
from otpdag.data import Schema
from otpdag.objective.chain import chain_terms
from otpdag.sequences import Sequences, encode_sequences


def laid_out(model, data, **kwargs):
    schema = Schema.of(model.spaces, model.graph)
    batch = encode_sequences(Sequences(data), schema, hidden=model.graph.hidden, partial=True)
    return lay_out_chain(model.structure, batch, **kwargs)


def naturals(model):
    return model._naturals


def run(model, chain):
    """Log-likelihood of each step given those before, and state probabilities, in the order of the batch's rows."""
    linear = Linear.of(potentials(model.structure, naturals(model), chain))
    state = torch.zeros(chain.steps, chain.states.size, dtype=torch.float64)
    scale = torch.zeros(chain.steps, dtype=torch.float64)
    pair = torch.zeros_like(linear.pair)
    for block in chain.blocks:
        part = marginals(block, linear, chain)
        state[block.rows], scale[block.rows] = part.state[0].T, part.log_scale[0]
        pair += part.pair
    return state, scale, pair[0]


def poisson_hmm(size=3, transition=None):
    rng = np.random.default_rng(1)
    model = otp.Model(
        otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"]),
        {"z": transition or m.Categorical(size), "x": m.Poisson()},
    )
    moves = {"stay": 0.7} if isinstance(transition, m.StayOrMove) else {"probs": rng.dirichlet(np.ones(size) * 2, size)}
    first, rates = {"probs": rng.dirichlet(np.ones(size))}, {"log_rate": np.log([2.0, 6.0, 11.0][:size])}
    return model.set_params({"z": moves, "z[0]": first, "x": rates})


def poisson(x, rate):
    return 0.0 if np.isnan(x) else x * math.log(rate) - rate - math.lgamma(x + 1)


def by_paths(model, x):
    """Likelihood and state probabilities of one sequence by summing over all paths."""
    params = model.params()
    first, rate = params["z[0]"]["probs"], np.exp(params["x"]["log_rate"])
    size = len(rate)
    if "stay" in params["z"]:
        stay = float(params["z"]["stay"])
        moves = np.where(np.eye(size) == 1, stay, (1 - stay) / (size - 1))
    else:
        moves = params["z"]["probs"]
    total, state = 0.0, np.zeros((len(x), size))
    for path in itertools.product(range(size), repeat=len(x)):
        log = math.log(first[path[0]]) + sum(math.log(moves[a, b]) for a, b in itertools.pairwise(path))
        weight = math.exp(log + sum(poisson(x[t], rate[k]) for t, k in enumerate(path)))
        total += weight
        for t, k in enumerate(path):
            state[t, k] += weight
    return math.log(total), state / total


@pytest.mark.parametrize("transition", [None, m.StayOrMove(3)], ids=["full", "stay"])
def test_a_hidden_markov_model_agrees_with_the_sum_over_all_paths(transition):
    model = poisson_hmm(3, transition)
    data = [np.array([1.0, 7.0, np.nan, 12.0, 3.0]), np.array([9.0]), np.array([np.nan, np.nan]), np.array([0.0, 5.0])]
    state, scale, _ = run(model, laid_out(model, data))
    at = 0
    for x in data:
        likelihood, expected = by_paths(model, x)
        rows = slice(at, at + len(x))
        assert float(scale[rows].sum()) == pytest.approx(likelihood, rel=1e-12, abs=1e-12)
        np.testing.assert_allclose(state[rows], expected, atol=1e-12)
        at += len(x)


def test_the_gradient_is_that_of_the_likelihood():
    model = poisson_hmm()
    data = [np.array([1.0, 7.0, np.nan, 12.0, 3.0]), np.array([9.0, 2.0])]
    chain = laid_out(model, data)
    theta = {key: value.clone().requires_grad_(True) for key, value in model.structure.raw(naturals(model)).items()}
    loss = chain_terms(model.structure, model.structure.naturals(theta), chain).total
    found = torch.autograd.grad(loss.sum(), list(theta.values()))
    for (key, value), gradient in zip(theta.items(), found, strict=True):
        numeric = torch.zeros_like(value)
        for place in np.ndindex(*value.shape):
            ends = []
            for shift in (1e-5, -1e-5):
                moved = {name: tensor.detach().clone() for name, tensor in theta.items()}
                moved[key][place] += shift
                ends.append(float(chain_terms(model.structure, model.structure.naturals(moved), chain).total.detach()))
            numeric[place] = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(gradient, numeric.detach(), atol=1e-8)


def test_the_loss_splits_into_cost_and_entropic_term():
    model = poisson_hmm()
    data = [np.array([1.0, 7.0, 12.0])]
    terms = chain_terms(model.structure, naturals(model), laid_out(model, data))
    assert float(terms.total) == pytest.approx(-by_paths(model, data[0])[0] / 3)
    assert float(terms.reconstruction) > 0
    assert float(terms.entropic) > 0


def test_stretches_of_a_long_series_are_joined_without_error(monkeypatch):
    model = poisson_hmm()
    x = np.random.default_rng(0).poisson(6, 331).astype(float)
    x[40:60] = np.nan
    chain = laid_out(model, [x, x[:200]])
    plain = run(model, chain)
    monkeypatch.setattr(chains, "LONG", 100)
    joined = run(model, chain)
    for left, right in zip(plain, joined, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-9)


def test_blocks_do_not_change_the_result():
    model = poisson_hmm()
    rng = np.random.default_rng(0)
    data = [rng.poisson(6, length).astype(float) for length in (9, 3, 3, 14, 1, 5)]
    one, many = laid_out(model, data), laid_out(model, data, block_steps=45)
    assert len(many.blocks) > len(one.blocks) == 1
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


def test_too_many_states_are_refused():
    graph = otp.Graph([otp.lag("z", "z", by=6), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(4), "x": m.Normal()})
    with pytest.raises(otp.ModelError, match="4096 joint states"):
        laid_out(model, [np.zeros(10)])
