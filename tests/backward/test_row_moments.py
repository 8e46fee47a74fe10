"""Rows summed up have the density that rows have one by one, by scipy."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from otpdag import mechanisms as m
from otpdag.backward.row_moments import MOST_GROUPS, moments_of
from otpdag.structure import pack
from tests.backward.elimination.worlds import linear_moments, make_world, random_edges


def shapes(structure):
    return {key: parameter.shape for key, parameter in structure.parameters().items()}


def point(structure, naturals):
    raw = structure.raw(naturals)
    return pack({key: raw[key] for key in structure.parameters()})


def density(structure, naturals, batch, row, replica):
    mean, covariance, at = linear_moments(structure, naturals, replica)
    shown = [n for n in structure.graph.observed if bool(batch.mask[n][0, row].all())]
    if not shown:
        return 0.0
    places = [at[n].start for n in shown]
    values = [float(batch.values[n][0, row, 0]) for n in shown]
    return multivariate_normal(mean[places], covariance[np.ix_(places, places)]).logpdf(values)


@pytest.mark.parametrize("seed", range(3))
def test_linear_normal_rows_with_gaps_and_hidden_numbers(seed):
    rng = np.random.default_rng(seed)
    names = [f"v{i}" for i in range(4)]
    edges = random_edges(rng, names, 0.8)
    world = make_world({n: m.Normal() for n in names}, edges, rng, rows=25, gaps=0.3, hidden=["v1"], replicas=2)
    structure, naturals, batch = world
    own = structure.naturals(structure.raw(naturals))  # where a hidden root is standard normal
    naturals = {n: {name: value.expand(2, *value.shape[1:]) for name, value in one.items()} for n, one in own.items()}
    moments = moments_of(structure, batch, shapes(structure))
    found = moments.log_likelihood(point(structure, naturals))
    for replica in range(2):
        each = [density(structure, naturals, batch, row, replica) for row in range(batch.rows)]
        assert float(found[replica]) == pytest.approx(batch.weight[0].numpy() @ each, rel=1e-9)


def test_categories_above_numbers_make_groups():
    rng = np.random.default_rng(5)
    nodes = {"k": m.Categorical(3), "x": m.Normal()}
    structure, naturals, batch = make_world(nodes, [("k", "x")], rng, rows=40, gaps=0.0)
    moments = moments_of(structure, batch, shapes(structure))
    parents = {"k": batch.values["k"]}
    mechanisms = structure.mechanisms
    each = mechanisms["k"].log_prob(naturals["k"], batch.values["k"], {})
    each = each + mechanisms["x"].log_prob(naturals["x"], batch.values["x"], parents)
    torch.testing.assert_close(moments.log_likelihood(point(structure, naturals)), (batch.weight * each).sum(-1))
    assert len(moments.unseen) == len(set(batch.values["k"][0].argmax(-1).tolist()))


def test_other_weights_are_other_rows():
    rng = np.random.default_rng(6)
    structure, naturals, batch = make_world({n: m.Normal() for n in "ab"}, [("a", "b")], rng, rows=12, gaps=0.2)
    moments, at = moments_of(structure, batch, shapes(structure)), point(structure, naturals)
    twice = moments.reweighted(torch.tensor([[2.0] * 6 + [0.0] * 6]).double())
    expected = moments_of(structure, batch.take(torch.arange(6)), shapes(structure)).log_likelihood(at)
    torch.testing.assert_close(twice.log_likelihood(at), 2 * expected)


def test_models_and_gaps_that_do_not_add_up_are_left_to_rows():
    rng = np.random.default_rng(7)
    poisson = make_world({"x": m.Normal(), "n": m.Poisson()}, [("x", "n")], rng, rows=10)
    assert moments_of(poisson[0], poisson[2], shapes(poisson[0])) is None
    hidden = make_world({"k": m.Categorical(2), "x": m.Normal()}, [("k", "x")], rng, rows=10, hidden=["k"])
    assert moments_of(hidden[0], hidden[2], shapes(hidden[0])) is None
    many = [f"v{i}" for i in range(math.ceil(math.log2(MOST_GROUPS)) + 3)]
    scattered = make_world({n: m.Normal() for n in many}, [], rng, rows=3 * MOST_GROUPS, gaps=0.5)
    assert moments_of(scattered[0], scattered[2], shapes(scattered[0])) is None
