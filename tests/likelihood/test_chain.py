"""The loss of the chain, and of categories given numbers, against sums over all paths."""

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema
from otpdag.data.sequences import Sequences, encode_sequences
from otpdag.engine import Layout
from otpdag.likelihood.chain_layout import HiddenFamilies, joint_states
from otpdag.likelihood.chain_problem import (
    FEWEST_UNITS,
    _by_kind,
    chain_problem,
    expected_log_potential,
)
from otpdag.mechanisms.base import fitted_to_rows
from otpdag.problem import packed_point
from tests.dynamic_models import (
    by_paths,
    laid_out,
    log_poisson,
    poisson_hmm,
    random_poisson_hmm,
)


def naturals(model):
    return model.fitted.naturals


def problem_of(model, data, eps=1.0):
    schema = Schema.of(model.spaces, model.graph)
    batch = encode_sequences(Sequences(data), schema, hidden=model.graph.hidden)
    return chain_problem(model.structure, batch, Layout.of(model.structure).shapes, eps, 0)


def point_of(problem, model):
    return packed_point(model.structure.raw(naturals(model)), problem.shapes, 1)


def test_the_gradient_is_that_of_the_likelihood():
    model = random_poisson_hmm()
    data = [np.array([1.0, 7.0, np.nan, 12.0, 3.0]), np.array([9.0, 2.0])]
    problem = problem_of(model, data)
    point = point_of(problem, model).requires_grad_(True)
    (found,) = torch.autograd.grad(problem.loss(point).total.sum(), point)
    for place in range(point.shape[1]):
        shift = torch.zeros_like(point).index_fill_(1, torch.tensor([place]), 1e-5)
        up, down = (float(problem.loss((point + by).detach()).total) for by in (shift, -shift))
        assert found[0, place].item() == pytest.approx((up - down) / 2e-5, abs=1e-8)


def test_the_loss_splits_into_cost_and_entropic_term():
    model = random_poisson_hmm()
    data = [np.array([1.0, 7.0, 12.0])]
    problem = problem_of(model, data)
    terms = problem.loss(point_of(problem, model))
    log_likelihood, states = by_paths(model, data[0])
    assert float(terms.total) == pytest.approx(-log_likelihood / 3)
    rates = np.exp(model.params()["x"]["log_rate"])
    cost = -sum(states[t, k] * log_poisson(x, rates[k]) for t, x in enumerate(data[0]) for k in range(3)) / 3
    assert float(terms.reconstruction) == pytest.approx(cost)
    assert float(terms.entropic) == pytest.approx(-log_likelihood / 3 - cost)


@pytest.mark.parametrize("many", [3, 40])
def test_sums_over_columns_of_a_kind_are_the_same_both_ways(many):
    """With few kinds and many columns, and with more kinds than columns."""
    generator = torch.Generator().manual_seed(0)
    state = torch.rand(2, 4, 12, generator=generator, dtype=torch.float64)
    kinds = torch.randint(min(many, 12), (12,), generator=generator)
    found = _by_kind(state, kinds, many)
    assert found.shape == (2, many, 4)
    expected = torch.zeros(2, many, 4, dtype=torch.float64)
    for column, kind in enumerate(kinds.tolist()):
        expected[:, kind] += state[:, :, column]
    torch.testing.assert_close(found, expected)


def test_a_log_potential_of_minus_infinity_counts_only_where_it_has_weight():
    weight = torch.tensor([[[0.0, 2.0], [1.0, 3.0]]]).double()
    log_potential = torch.tensor([[[-torch.inf, 0.5], [2.0, -1.0]]]).double()
    assert expected_log_potential(weight, log_potential).tolist() == [1.0 + 2.0 - 3.0]


@pytest.mark.parametrize("seed", range(3))
def test_a_single_series_begins_in_the_state_that_explains_it_best(seed):
    """The likelihood is linear in the first state's probabilities: its maximum is a corner."""
    rng = np.random.default_rng(seed)
    states = (rng.random(400) < 0.1).cumsum() % 2
    x = rng.poisson(2.0 + 2.0 * states).astype(float)
    model = poisson_hmm(size=2)
    result = otp.fit(model, x[None], seed=seed, restarts=2)
    begun = model.params()["z[0]"]["probs"]
    likelihoods = []
    for first in np.eye(2):
        cornered = poisson_hmm(size=2).set_params({**model.params(), "z[0]": {"probs": first}})
        likelihoods.append(cornered.log_likelihood(x[None]) / len(x))
    assert begun.max() > 1 - 1e-6
    assert int(begun.argmax()) == int(np.argmax(likelihoods))
    assert result.loss == pytest.approx(-max(likelihoods), abs=1e-8)
    assert result.status.converged


# -- the problem ------------------------------------------------------------------------------------------------------

SERIES = [np.array([1.0, 7.0, np.nan, 12.0]), np.array([9.0, 2.0]), np.array([5.0])]


def sums_of(problem, model):
    return problem.sums(naturals(model), problem.reader)


def paths_of(model, x, power=1.0):
    """Every path of states, its prior probability times its likelihood to a power."""
    params = model.params()
    first, moves, rate = params["z[0]"]["probs"], params["z"]["probs"], np.exp(params["x"]["log_rate"])
    for path in itertools.product(range(len(rate)), repeat=len(x)):
        prior = first[path[0]] * np.prod([moves[one, other] for one, other in itertools.pairwise(path)])
        yield path, prior * np.exp(power * sum(log_poisson(value, rate[k]) for value, k in zip(x, path, strict=True)))


@pytest.mark.parametrize("placed", [False, True])
def test_expected_counts_of_weighted_sequences_are_sums_over_all_paths(placed):
    model = random_poisson_hmm()
    weight = torch.tensor([[1.0, 2.0, 0.5], [3.0, 0.0, 1.0]]).double()
    problem = replace(problem_of(model, SERIES).reweighted(weight), few_features=8 if placed else 0)
    found = sums_of(problem, model)
    for replica in range(2):
        first, pair, state, seen, total, log_likelihood = np.zeros(3), np.zeros((3, 3)), *np.zeros((3, 3)), 0.0
        for factor, x in zip(weight[replica].tolist(), SERIES, strict=True):
            paths = list(paths_of(model, x))
            whole = sum(mass for _, mass in paths)
            log_likelihood += factor * np.log(whole)
            for path, mass in paths:
                share = factor * mass / whole
                first[path[0]] += share
                for one, other in itertools.pairwise(path):
                    pair[one, other] += share
                for value, k in zip(x, path, strict=True):
                    state[k] += share
                    seen[k] += share * (not np.isnan(value))
                    total[k] += share * np.nan_to_num(value)
        assert found.log_likelihood[replica].item() == pytest.approx(log_likelihood)
        np.testing.assert_allclose(found.first[replica], first, atol=1e-10)
        np.testing.assert_allclose(found.pair[replica], pair, atol=1e-10)
        np.testing.assert_allclose(found.features[replica][:, [0, 1, -1]].T, [seen, total, state], atol=1e-9)


def test_an_update_has_the_mean_counts_of_each_state_and_the_loss_before():
    model = random_poisson_hmm()
    weight = torch.tensor([[1.0, 2.0, 0.5]]).double()
    problem = problem_of(model, SERIES).reweighted(weight)
    raw = model.structure.raw(naturals(model))
    point = torch.cat([raw[key].flatten(1) for key in problem.shapes], 1)
    moved, terms = problem.update(point)
    sums = sums_of(problem, model)
    rate = sums.features[0, :, 1] / sums.features[0, :, 0]
    np.testing.assert_allclose(problem.naturals(moved)["x"]["log_rate"].flatten(), rate.log(), rtol=1e-9)
    lengths = np.array([4, 2, 1])
    expected = -sums.log_likelihood.item() / (weight[0].numpy() @ lengths)
    assert terms.total.item() == pytest.approx(expected)
    assert problem.loss(point).total.item() == pytest.approx(expected)
    np.testing.assert_allclose(problem.unit_mass, weight.numpy() * lengths)
    torch.testing.assert_close(problem.weight, weight)


@pytest.mark.parametrize("eps", [1.0, 0.4])
def test_the_loss_of_each_sequence_is_a_sum_over_paths_at_its_temperature(eps):
    model = random_poisson_hmm()
    problem = problem_of(model, SERIES, eps)
    raw = model.structure.raw(naturals(model))
    point = torch.cat([raw[key].flatten(1) for key in problem.shapes], 1)
    whole = [sum(mass for _, mass in paths_of(model, x, 1 / eps)) for x in SERIES]
    expected = [-eps * np.log(one) / len(x) for one, x in zip(whole, SERIES, strict=True)]
    np.testing.assert_allclose(problem.unit_losses(point)[0], expected, rtol=1e-9)
    assert problem.loss(point).total.item() == pytest.approx(np.average(expected, weights=[4, 2, 1]))
    assert problem.is_likelihood == (eps == 1.0) == (problem.updates is not None)
    assert problem.is_sum


def test_few_long_sequences_are_cut_into_units_and_many_are_not():
    model, rng = random_poisson_hmm(), np.random.default_rng(0)
    few = problem_of(model, [rng.poisson(5.0, 700).astype(float), rng.poisson(5.0, 500).astype(float)])
    assert few.in_units().batch.lengths.max() == 1200 // FEWEST_UNITS
    assert few.in_units().rows == 1200
    long = problem_of(model, [rng.poisson(5.0, 3000).astype(float)])
    assert set(long.in_units().batch.lengths.tolist()) == {50}
    short = problem_of(model, [rng.poisson(5.0, 20).astype(float)])
    assert set(short.in_units().batch.lengths.tolist()) == {2}
    many = problem_of(model, [np.array([1.0, 2.0])] * FEWEST_UNITS)
    assert many.in_units() is many
    fewer = problem_of(model, [np.array([1.0, 2.0])] * (FEWEST_UNITS - 1))
    assert fewer.in_units() is not fewer


def test_simulated_sequences_are_as_many_as_asked_but_not_too_few_or_too_long():
    model = random_poisson_hmm()
    problem = problem_of(model, [np.full(40, 3.0)] * 5)
    raw = model.structure.raw(naturals(model))
    point = torch.cat([raw[key].flatten(1) for key in problem.shapes], 1)
    assert len(problem.simulated(point, 50, 1).batch.lengths) == 50
    assert len(problem.simulated(point, 3, 1).batch.lengths) == FEWEST_UNITS
    few = problem.simulated(point, 50, 1, most_steps=1600).batch.lengths.tolist()
    assert few == [40] * 40


def test_first_steps_of_few_sequences_are_not_stretched():
    """What so few first steps say of themselves has its maximum where no logits reach."""
    model = random_poisson_hmm()
    few = problem_of(model, [np.array([1.0, 2.0])] * (FEWEST_UNITS - 1))
    sizes = {key: int(np.prod(shape)) for key, shape in few.shapes.items()}
    (first,) = few.structure.keys["z[0]"].values()
    expected = np.repeat([key != first for key in sizes], list(sizes.values()))
    assert 0 < expected.sum() < len(expected)
    assert few.updates.stretched.tolist() == expected.tolist()
    assert problem_of(model, [np.array([1.0, 2.0])] * FEWEST_UNITS).updates.stretched is None


UPDATED = {
    "plain": (lambda: ([otp.lag("z", "z"), ("z", "x")], {"x": m.Poisson()}), True),
    "two lags": (lambda: ([otp.lag("z", "z"), otp.lag("z", "z", by=2), ("z", "x")], {"x": m.Poisson()}), False),
    "a lagged emission": (lambda: ([otp.lag("z", "z"), ("z", "x"), otp.lag("z", "x")], {"x": m.Poisson()}), False),
    "an autoregression": (lambda: ([otp.lag("z", "z"), ("z", "x"), otp.lag("x", "x")], {"x": m.Normal()}), False),
    "a driven chain": (
        lambda: ([otp.lag("z", "z"), ("u", "z"), ("z", "x")], {"x": m.Poisson(), "u": m.Given(otp.spaces.Discrete(2))}),
        False,
    ),
    "a category that x reads": (
        lambda: ([otp.lag("z", "z"), ("z", "x"), ("k", "x")], {"x": m.Normal(), "k": m.Categorical(2)}),
        True,
    ),
    "tied rates": (
        lambda: (
            [otp.lag("z", "z"), ("z", "x"), ("z", "y")],
            {"x": m.Poisson(log_rate=otp.tie("r")), "y": m.Poisson(log_rate=otp.tie("r"))},
        ),
        False,
    ),
}


@pytest.mark.parametrize("case", UPDATED)
def test_updates_in_closed_form_are_there_where_every_node_has_one(case):
    build, expected = UPDATED[case]
    edges, others = build()
    model = otp.Model(otp.Graph(edges, hidden=["z"]), {"z": m.Categorical(2), **others})
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({name: rng.integers(0, 2, 12).astype(float) for name in others})
    schema = Schema.of(model.spaces, model.graph, frame)
    batch = encode_sequences(Sequences(frame, lengths=[7, 5]), schema, hidden=model.graph.hidden)
    problem = chain_problem(model.structure, batch, Layout.of(model.structure).shapes, 1.0, 0)
    assert (problem.updates is not None) == expected


@pytest.mark.parametrize("emission", [m.Poisson(), m.Normal()])
def test_updates_of_long_sequences_have_the_same_counts_in_stretches(emission, monkeypatch):
    rng = np.random.default_rng(1)
    series = [rng.poisson(6.0, length).astype(float) for length in (150, 90)]
    series[0][20:24] = np.nan
    model = otp.Model(otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"]), {"z": m.Categorical(3), "x": emission})
    problem = problem_of(model, series).reweighted(torch.tensor([[1.0, 2.0], [0.5, 3.0]]).double())
    theta = model.structure.filled({}, torch.Generator().manual_seed(0))
    points = packed_point({key: value.double() for key, value in theta.items()}, problem.shapes, 2)
    assert problem.chain.blocks[0].lanes(2, 3).are_cut
    moved, terms = problem.update(points)
    monkeypatch.setattr("otpdag.likelihood.chain_layout.SIDE_BY_SIDE", 0)
    expected, expected_terms = problem.update(points)
    torch.testing.assert_close(moved, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(terms.total, expected_terms.total, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(terms.total, problem.loss(points).total.detach(), rtol=1e-11, atol=1e-11)


def test_hidden_nodes_that_read_an_observed_one_have_no_updates_though_they_have_no_memory():
    edges = [otp.lag("z", "z"), ("z", "x"), ("k", "w"), ("w", "x")]
    nodes = {"z": m.Categorical(2), "w": m.Categorical(2), "k": m.Categorical(2), "x": m.Poisson()}
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"k": rng.integers(0, 2, 12), "x": rng.poisson(3.0, 12)}, dtype=float)
    for read in (True, False):
        own = edges if read else [edge for edge in edges if edge != ("k", "w")] + [("k", "x")]
        model = otp.Model(otp.Graph(own, hidden=["z", "w"]), nodes)
        schema = Schema.of(model.spaces, model.graph)
        batch = encode_sequences(Sequences([frame]), schema, hidden=model.graph.hidden)
        problem = chain_problem(model.structure, batch, Layout.of(model.structure).shapes, 1.0, 0)
        assert not problem.chain.varying
        assert (problem.updates is not None) is not read


def test_what_a_chain_cannot_hold_is_refused():
    graph = otp.Graph([otp.lag("z", "z", by=6), ("z", "x")], hidden=["z"])
    with pytest.raises(otp.ModelError, match="4096 joint states"):
        laid_out(otp.Model(graph, {"z": m.Categorical(4), "x": m.Normal()}), [np.zeros(10)])
    graph = otp.Graph([otp.lag("z", "z"), ("x", "z"), ("z", "y")], hidden=["z"])
    driven = otp.Model(graph, {"z": m.Categorical(2), "x": m.Given(), "y": m.Normal()})
    with pytest.raises(otp.DataError, match="node 'x' is Given: its cells must not be missing; one is, in row"):
        laid_out(driven, {"x": np.array([[0.0, 1.0, np.nan]]), "y": np.zeros((1, 3))})


@pytest.mark.parametrize(("values", "alike"), [(3, True), (10**6, False)])
def test_steps_that_show_the_same_are_laid_out_once(values, alike):
    x = np.random.default_rng(0).integers(0, values, (1, 60)).astype(float)
    x[0, 7] = np.nan
    chain = laid_out(random_poisson_hmm(), x)
    assert len(chain.phase) == (5 if alike else 60)  # three counts and a gap of later steps, and the first step


def test_hidden_families_say_what_densities_and_rows_of_all_states_say():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "w"), ("w", "x")], hidden=["z", "w"])
    nodes = {"z": m.StayOrMove(3), "z[0]": m.Categorical(3), "w": m.Categorical(2), "x": m.Poisson()}
    rng, structure = np.random.default_rng(4), otp.Model(graph, nodes).structure
    shares = {"z[0]": rng.dirichlet(np.ones(3), (2, 1)), "w": rng.dirichlet(np.ones(2), (2, 3))}
    given = {name: {"probs": torch.as_tensor(probs)} for name, probs in shares.items()}
    given["z"] = {"stay": torch.tensor([[0.7], [0.9]]).double()}
    states = joint_states(structure, ("z", "w"))
    families = HiddenFamilies.of(structure, states)
    begun, joined = families.potentials(given)
    first, every, pair = (torch.as_tensor(rng.gamma(1.0, 1.0, (2, *[6] * axes))) for axes in (1, 1, 2))
    found = families.maximised(given, first, every, pair)
    now, before = states.now, {name: value.repeat_interleave(6, 0) for name, value in states.before.items()}
    late = {name: value.repeat(6, 1) for name, value in now.items()}
    mechanisms = structure.mechanisms

    def density(name, value, parents):
        return mechanisms[name].log_prob(given[name], value[None], {key: one[None] for key, one in parents.items()})

    within = density("w", now["w"], now)
    along = density("z", late["z"], before).unflatten(-1, (6, 6))
    torch.testing.assert_close(begun, density("z[0]", now["z"], {}) + within)
    torch.testing.assert_close(joined, along + within.unsqueeze(1))
    rows = {"z": (late["z"], before, pair.flatten(1)), "z[0]": (now["z"], {}, first), "w": (now["w"], now, every)}
    for name, (value, parents, weight) in rows.items():
        torch.testing.assert_close(found[name], fitted_to_rows(mechanisms[name], given[name], value, parents, weight))
