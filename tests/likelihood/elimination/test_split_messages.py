"""Approximate sums against exact ones over the same rows: evidence, gradients, expected counts and draws."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from otpdag import mechanisms as m
from otpdag.likelihood.elimination import (
    EliminationOptions,
    expectations,
    lay_out,
    log_evidence,
    moved,
    posterior_draws,
    state_probabilities,
    total_evidence,
)
from otpdag.likelihood.elimination.sums import Factors, Tempering, drawn_copies
from tests.likelihood.elimination.worlds import lattice, make_world

TINY = EliminationOptions(largest_table=1, split_table=1)


@pytest.mark.parametrize("seed", range(3))
def test_weak_loops_hardly_matter(seed):
    structure, naturals, batch = lattice(4, 0.4, seed)
    exact, found = lay_out(structure, batch), lay_out(structure, batch, TINY)
    assert exact.beyond is None
    assert found.beyond is not None
    assert found.largest_table == 8 < exact.largest_table
    torch.testing.assert_close(log_evidence(naturals, found), log_evidence(naturals, exact), rtol=0, atol=0.01)
    for node in structure.graph.hidden:
        ours, theirs = (state_probabilities(naturals, one, node) for one in (found, exact))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02)


def test_larger_tables_are_nearer_to_exact_sums():
    structure, naturals, batch = lattice(5, 0.8)
    truth = log_evidence(naturals, lay_out(structure, batch))
    sizes = [lay_out(structure, batch, replace(TINY, largest_table=most, split_table=most)) for most in (8, 32, 256)]
    errors = [float((log_evidence(naturals, layout) - truth).abs().mean()) for layout in sizes]
    assert errors[0] > 1.5 * errors[1] > 0
    assert errors[2] < 1e-9  # nothing needs more


def test_the_gradient_is_that_of_the_approximate_evidence():
    structure, naturals, batch = lattice(4, 0.8, rows=5)
    layout = lay_out(structure, batch, TINY)
    logits = {node: params["probs"].log().requires_grad_() for node, params in naturals.items()}

    def total(moved_to):
        return total_evidence({node: {"probs": torch.softmax(one, -1)} for node, one in moved_to.items()}, layout)

    slopes = torch.autograd.grad(total(logits).sum(), list(logits.values()))
    generator = torch.Generator().manual_seed(0)
    way = [torch.randn(one.shape, generator=generator, dtype=one.dtype) for one in slopes]
    step = 1e-3
    ends = [
        total({node: one.detach() + sign * step * w for (node, one), w in zip(logits.items(), way, strict=True)})
        for sign in (1, -1)
    ]
    along = sum(float((slope * w).sum()) for slope, w in zip(slopes, way, strict=True))
    assert float(ends[0] - ends[1]) / (2 * step) == pytest.approx(along, rel=1e-3)


def test_joint_draws_are_those_of_the_exact_posterior():
    structure, naturals, batch = lattice(4, 1.0, rows=6, reading=0.3)
    exact, found = lay_out(structure, batch), lay_out(structure, batch, replace(TINY, merged=False))
    ours = posterior_draws(naturals, found, 800, torch.Generator().manual_seed(0))
    theirs = posterior_draws(naturals, exact, 4000, torch.Generator().manual_seed(1))
    single = [ours[node].mean(1) - state_probabilities(naturals, exact, node) for node in structure.graph.hidden]
    assert float(torch.stack(single).abs().mean()) < 0.02  # the standard error of 800 draws
    pairs = [("h11", "h22"), ("h12", "h21"), ("h01", "h10"), ("h22", "h33")]
    together, apart = [], []
    for one, two in pairs:
        agree = (theirs[one] * theirs[two]).sum(-1).mean(1)
        together.append((ours[one] * ours[two]).sum(-1).mean(1) - agree)
        apart.append((ours[one].mean(1) * ours[two].mean(1)).sum(-1) - agree)
    assert float(torch.stack(together).abs().mean()) < 0.025
    assert float(torch.stack(apart).abs().mean()) > 0.1  # what draws of every node by itself would say
    for node in structure.graph.observed:
        torch.testing.assert_close(ours[node][:, 0], batch.values[node][0])


def test_weights_of_proposals_make_up_for_beliefs_that_are_not_exact():
    structure, naturals, batch = lattice(4, 1.0, rows=6, reading=0.8)
    exact, found = (log_evidence(naturals, lay_out(structure, batch, one)) for one in (None, TINY))
    (block,) = lay_out(structure, batch, replace(TINY, merged=False)).blocks
    layout = lay_out(structure, batch, replace(TINY, merged=False))
    banks = Factors(layout, naturals, Tempering()).evaluate(block).banks
    assert banks is not None
    many = {sizes: bank.expand(2000, -1, -1).clone() for sizes, bank in banks.items()}
    _, log_weight = drawn_copies(block, many, torch.Generator().manual_seed(0))
    estimate = torch.empty(batch.rows, dtype=torch.float64)
    estimate[block.piece_row] = (torch.logsumexp(log_weight, 0) - np.log(2000))[block.piece]
    assert float((estimate - exact[0]).abs().mean()) < 0.2 * float((found - exact).abs().mean())


def test_numbers_on_points_that_meet_have_copies_too():
    rng = np.random.default_rng(0)
    numbers = [f"z{i}" for i in range(4)]
    pairs = [(0, 1), (1, 2), (2, 3), (3, 0)]
    nodes = {name: m.Normal() for name in numbers} | {f"y{i}{j}": m.Poisson() for i, j in pairs}
    edges = [(f"z{k}", f"y{i}{j}") for i, j in pairs for k in (i, j)]
    structure, naturals, batch = make_world(nodes, edges, rng, rows=20, gaps=0.0, hidden=numbers)
    points = EliminationOptions(grid=16, count_points=32)
    exact = moved(naturals, lay_out(structure, batch, points))
    found = moved(naturals, lay_out(structure, batch, replace(points, largest_table=16**2, split_table=16**2)))
    assert exact.largest_table == 16**3
    assert found.largest_table == 16**2
    torch.testing.assert_close(log_evidence(naturals, found), log_evidence(naturals, exact), rtol=0, atol=0.02)
    ours, theirs = (expectations(naturals, one).families["y01"] for one in (found, exact))
    sums = [sum(e for one in part for _, e in one.parts(naturals["y01"])) for part in (ours, theirs)]
    torch.testing.assert_close(sums[0], sums[1], rtol=5e-3, atol=0)
    draws = posterior_draws(naturals, found, 20, torch.Generator().manual_seed(0))
    assert all(bool(torch.isfinite(draws[name]).all()) for name in numbers)


def test_linear_numbers_that_meet_too_many_categories_have_points():
    rng = np.random.default_rng(1)
    many = 5
    nodes, edges = {}, []
    for i in range(many):
        nodes |= {f"k{i}": m.Bernoulli(), f"z{i}": m.Normal(), f"x{i}": m.Normal()}
        edges += [(f"k{i}", f"z{i}"), (f"z{i}", f"x{i}")] + ([(f"z{i - 1}", f"z{i}")] if i else [])
    hidden = [name for name in nodes if name[0] != "x"]
    structure, naturals, batch = make_world(nodes, edges, rng, rows=15, gaps=0.0, hidden=hidden)
    exact = lay_out(structure, batch)
    assert exact.largest_table == 2**many
    options = replace(TINY, largest_table=16, split_table=16, largest_family=2**10)
    assert lay_out(structure, batch, options).has_points is False  # one table of all categories, as before
    found = moved(naturals, lay_out(structure, batch, replace(options, largest_family=24**2, largest_table=16)))
    torch.testing.assert_close(log_evidence(naturals, found), log_evidence(naturals, exact), rtol=0, atol=1e-4)
