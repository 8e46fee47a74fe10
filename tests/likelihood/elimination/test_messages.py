"""Messages along tables: sums of pieces, copies of variables where tables are too large, random numbers of draws."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from otpdag import mechanisms as m
from otpdag.likelihood.elimination.evidence import expectations, log_evidence, moved, total_evidence
from otpdag.likelihood.elimination.layout import Step, lay_out
from otpdag.likelihood.elimination.plans import EliminationOptions, elimination_order, split
from otpdag.likelihood.elimination.posterior import (
    RandomNumbers,
    drawn_copies,
    draws,
    posterior_draws,
    state_probabilities,
)
from otpdag.likelihood.elimination.sums import Factors, Tempering, beliefs, eliminate
from tests.likelihood.elimination.worlds import lattice, make_world

# -- sums along an order, against sums over all joint states ----------------------------------------------------------


SIZES = (3, 2, 4)  # a - b - c, with tables over (a, b), (b, c), (b) and twice over (c)
REPLICAS, PIECES = 2, 5


def chain(seed):
    """Log-tables of five chains of three variables, the steps that sum them, and their joint log-density."""
    generator = torch.Generator().manual_seed(seed)

    def tables(*sizes):
        return torch.randn(REPLICAS, PIECES, *sizes, generator=generator, dtype=torch.float64)

    ab, bc, b, c, d = tables(3, 2), tables(2, 4), tables(2), tables(4), tables(4)
    joint = ab[..., None] + bc[:, :, None] + b[:, :, None, :, None] + (c + d)[:, :, None, None]
    one = torch.zeros(REPLICAS, 1, 1, dtype=torch.float64)
    room = torch.zeros(REPLICAS, PIECES, 1, dtype=torch.float64)

    def bank(size, *entries):
        return torch.cat([one.expand(-1, 1, size), *(entry.reshape(REPLICAS, PIECES, size) for entry in entries)], 1)

    banks = {
        (2, 3): bank(6, ab.transpose(-1, -2)),
        (2, 4): bank(8, bc),
        (2,): bank(2, b, room.expand(-1, -1, 2), room.expand(-1, -1, 2)),
        (4,): bank(4, c, d),
        (): bank(1, room),
    }
    rows = 1 + torch.arange(PIECES)
    first, second = 1 + PIECES, 1 + 2 * PIECES
    cells = 3 * torch.arange(PIECES)
    column = rows.unsqueeze(1)
    steps = [
        Step((2, 3), {(0, 1): column}, first, cells, (cells + 1).unsqueeze(1)),
        Step(
            (2, 4),
            {(0, 1): column, (1,): torch.stack([rows, rows + PIECES], 1)},
            second,
            cells + 2,
            (cells + 1)[:, None],
        ),
        Step(
            (2,),
            {(0,): torch.stack([rows, rows + first - 1, rows + second - 1], 1)},
            1,
            cells + 1,
            cells[:, None][:, :0],
        ),
    ]
    return joint, banks, steps


@pytest.mark.parametrize("seed", range(3))
def test_evidence_and_beliefs_are_those_of_all_joint_states(seed):
    joint, banks, steps = chain(seed)
    joint.requires_grad_(True)
    evidence = joint.flatten(2).logsumexp(-1)
    shares = torch.autograd.grad(evidence.sum(), joint)[0]
    conditionals = eliminate(steps, banks)
    torch.testing.assert_close(banks[()][:, 1:, 0], evidence.detach())
    weight = torch.rand(REPLICAS, PIECES, 1, dtype=torch.float64)
    out = {sizes: torch.zeros_like(bank) for sizes, bank in banks.items()}
    out[()][:, 1:] = weight
    told = dict.fromkeys(range(3))
    for step, belief in beliefs(steps, conditionals, out):
        told[int(step.cell[0]) % 3] = belief.reshape(REPLICAS, PIECES, -1, step.sizes[-1]).sum(2)
    for axis, away in enumerate(((3, 4), (2, 4), (2, 3))):
        torch.testing.assert_close(told[axis], weight * shares.sum(away))
    torch.testing.assert_close(out[2, 3][:, 1:], weight * shares.sum(4).transpose(-1, -2).flatten(2))
    torch.testing.assert_close(out[2, 4][:, 1:], weight * shares.sum(2).flatten(2))
    torch.testing.assert_close(out[4,][:, 1 : 1 + PIECES], out[4,][:, 1 + PIECES :])


def test_the_largest_entry_instead_of_the_sum():
    joint, banks, steps = chain(7)
    conditionals = eliminate(steps, banks, best=True)
    torch.testing.assert_close(banks[()][:, 1:, 0], joint.flatten(2).amax(-1))
    block = SimpleNamespace(steps=steps, cell_node=torch.zeros(3 * PIECES))
    states = draws(block, [one[:1] for one in conditionals], 1, RandomNumbers(torch.Generator().manual_seed(0)))
    best = joint[0].flatten(1).argmax(-1)
    expected = torch.stack(torch.unravel_index(best, SIZES), 1)
    assert torch.equal(states.reshape(PIECES, 3), expected)


def test_draws_are_joint():
    joint, banks, steps = chain(5)
    conditionals = eliminate(steps, banks)
    numbers = RandomNumbers(torch.Generator().manual_seed(1))
    block = SimpleNamespace(steps=steps, cell_node=torch.zeros(3 * PIECES))
    states = draws(block, [one[:1] for one in conditionals], 20_000, numbers).reshape(PIECES, 3, -1)
    shares = joint.flatten(2).softmax(-1).reshape(joint.shape)
    for a, b, c in itertools.product(*map(range, SIZES)):
        here = (states[:, 0] == a) & (states[:, 1] == b) & (states[:, 2] == c)
        torch.testing.assert_close(here.double().mean(-1), shares[0, :, a, b, c], atol=0.016, rtol=0)
    numbers = RandomNumbers(torch.Generator().manual_seed(2))
    many = torch.stack([draws(block, conditionals, REPLICAS, numbers) for _ in range(3000)])
    first = many.reshape(-1, PIECES, 3, REPLICAS)[:, :, 0].permute(2, 1, 0)  # (R, pieces, draws) of a
    for a in range(3):
        torch.testing.assert_close(
            (first == a).double().mean(-1), shares[..., a, :, :].sum((-1, -2)), atol=0.04, rtol=0
        )


def test_what_is_impossible_is_not_a_nan():
    _, banks, steps = chain(3)
    banks[4,][:, 1] = -torch.inf
    conditionals = eliminate(steps, banks)
    assert banks[()][0, 1, 0] < -1e300
    assert all(bool(torch.isfinite(one).all()) for one in conditionals)


def test_a_step_without_tables_is_a_bug():
    _, banks, steps = chain(3)
    with pytest.raises(RuntimeError, match="at least one table"):
        eliminate([Step((2,), {}, 1, steps[0].cell, steps[2].separator)], banks)


# -- copies of variables: tables stay within their limit, and every factor keeps its variables ------------------------


def random_scopes(seed, variables=14, factors=22):
    rng = np.random.default_rng(seed)
    scopes = [tuple(sorted(rng.choice(variables, 3, replace=False).tolist())) for _ in range(factors)]
    scopes += [(variable,) for variable in range(variables)]
    return scopes, {variable: int(rng.integers(2, 4)) for variable in range(variables)}


def table_sizes(scopes, sizes, order):
    """Entries of all tables that summing variables out one after another makes."""
    tables, found = [set(scope) for scope in scopes], []
    for variable in order:
        joined = set().union({variable}, *(table for table in tables if variable in table))
        found.append(math.prod(sizes[one] for one in joined))
        tables = [table for table in tables if variable not in table] + [joined - {variable}]
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most", [1, 60, 300])
def test_no_table_is_larger_than_the_limit_or_the_largest_factor(seed, most):
    scopes, sizes = random_scopes(seed)
    order = elimination_order(scopes, sizes)
    found = split(scopes, sizes, order, most)
    copied = sizes | {copy: sizes[variable] for copy, variable in found.copies.items()}
    largest_factor = max(math.prod(sizes[one] for one in scope) for scope in scopes)
    assert max(table_sizes(scopes, sizes, order)) > max(most, largest_factor)
    assert max(table_sizes(found.scopes, copied, found.order)) <= max(most, largest_factor)
    assert sorted(found.order) == sorted(copied)


def test_copies_stand_for_the_variables_of_their_factors():
    scopes, sizes = random_scopes(7)
    found = split(scopes, sizes, elimination_order(scopes, sizes), 30)
    assert found.copies
    assert [tuple(found.copies.get(one, one) for one in scope) for scope in found.scopes] == scopes


def test_a_tree_needs_no_copies_however_small_the_limit():
    scopes = [(0, 1), (1, 2), (1, 3), (3, 4, 5)]
    sizes = dict.fromkeys(range(6), 3)
    assert not split(scopes, sizes, elimination_order(scopes, sizes), 1).copies


# -- approximate sums against exact ones over the same rows: evidence, gradients, expected counts and draws -----------


TINY = EliminationOptions(largest_table=1, split_table=1)


@pytest.mark.parametrize("seed", range(3))
def test_weak_loops_hardly_matter(seed):
    structure, naturals, batch = lattice(4, 0.4, seed)
    exact, found = lay_out(structure, batch), lay_out(structure, batch, TINY)
    assert not exact.approximation
    assert found.approximation
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


@pytest.mark.slow
def test_joint_draws_are_those_of_the_exact_posterior():
    structure, naturals, batch = lattice(4, 1.0, rows=6, reading=0.3)
    exact, found = (lay_out(structure, batch, replace(one, merged=False)) for one in (EliminationOptions(), TINY))
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


@pytest.mark.slow
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


# -- numbers of strata have the distribution of independent ones, and far more precise means --------------------------


@pytest.mark.parametrize("stratified", [False, True])
def test_their_distribution(stratified):
    numbers = RandomNumbers(torch.Generator().manual_seed(9), stratified)
    uniform = numbers.uniform((4000, 8, 1), torch.float64)
    normal = numbers.normal((4000, 8, 1), torch.float64)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    for draw in range(8):  # whichever stratum it gets, each draw has the whole distribution
        assert uniform[:, draw].mean().item() == pytest.approx(0.5, abs=0.02)
        assert uniform[:, draw].var().item() == pytest.approx(1 / 12, abs=0.006)
        assert normal[:, draw].std().item() == pytest.approx(1.0, abs=0.05)
    spread = uniform.mean(1).std().item()
    independent = (1 / 12 / 8) ** 0.5
    assert spread == pytest.approx(independent / 8 if stratified else independent, rel=0.05)
