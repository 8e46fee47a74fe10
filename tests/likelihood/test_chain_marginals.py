"""The chain's forward-backward against sums over all paths."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.likelihood import chain_messages as chain_marginals
from otpdag.likelihood.chain_messages import marginals
from otpdag.likelihood.chain_potentials import Linear, potentials
from tests.dynamic_models import by_paths, laid_out, random_poisson_hmm


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


def test_stretches_of_a_long_series_are_joined_without_error(monkeypatch):
    model = random_poisson_hmm()
    x = np.random.default_rng(0).poisson(6, 331).astype(float)
    x[40:60] = np.nan
    chain = laid_out(model, [x, x[:200]])
    plain = run(model, chain)
    monkeypatch.setattr(chain_marginals, "_LONG_STEPS", 100)
    joined = run(model, chain)
    for left, right in zip(plain, joined, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-9)


def test_blocks_do_not_change_the_result():
    model = random_poisson_hmm()
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


def test_stretches_are_taken_where_they_agree_and_steps_elsewhere(monkeypatch):
    model = random_poisson_hmm()
    chain = laid_out(model, [np.random.default_rng(0).poisson(6, 20).astype(float)])
    linear = Linear.of(potentials(model.structure, naturals(model), chain))
    (block,) = chain.blocks
    by_steps = marginals(block, linear, chain)  # too short for stretches
    monkeypatch.setattr(chain_marginals, "suits_stretches", lambda block, replicas, chain: True)
    monkeypatch.setattr(chain_marginals, "marginals_by_stretches", lambda block, potential, weight: "agreed")
    assert marginals(block, linear, chain) == "agreed"
    monkeypatch.setattr(chain_marginals, "marginals_by_stretches", lambda block, potential, weight: None)
    again = marginals(block, linear, chain)
    torch.testing.assert_close(again.state, by_steps.state)
    torch.testing.assert_close(again.log_scale, by_steps.log_scale)
    monkeypatch.setattr(chain_marginals, "suits_stretches", lambda block, replicas, chain: False)
    monkeypatch.setattr(chain_marginals, "marginals_by_stretches", lambda block, potential, weight: "not asked")
    torch.testing.assert_close(marginals(block, linear, chain).state, by_steps.state)


@pytest.mark.parametrize(
    ("changed", "suits"),
    [
        ({}, True),
        ({"steps": 63}, False),
        ({"many": 200, "replicas": 2}, True),
        ({"many": 200, "replicas": 3}, False),
        ({"many": 401}, False),
        ({"padded": 1.5}, True),
        ({"padded": 1.6}, False),
        ({"varying": True}, False),
        ({"lag": 2}, False),
    ],
)
def test_long_sequences_are_cut_unless_many_run_side_by_side(changed, suits):
    """Of at least 64 steps, at most 400 at a time, and where at most a third of the places would be empty."""
    one = {"steps": 64, "many": 10, "replicas": 1, "padded": 1.0, "varying": False, "lag": 1, **changed}
    inside = np.zeros(int(one["padded"] * 640))
    block = SimpleNamespace(
        sizes=[one["many"]] * one["steps"], kinds=np.zeros(640), in_stretches=SimpleNamespace(inside=inside)
    )
    chain = SimpleNamespace(varying=one["varying"], longest_lag=one["lag"])
    assert chain_marginals.suits_stretches(block, one["replicas"], chain) == suits
