"""Every mechanism with a density as an unknown, and as a child of one: against fine sums of the joint enumeration."""

import numpy as np
import pytest
import torch
from scipy import stats

from otpdag import mechanisms as m
from otpdag.likelihood.elimination import EliminationOptions, Tempering, lay_out, log_evidence, moved, total_evidence
from otpdag.likelihood.elimination.batched_densities import LinearRows, Places
from otpdag.likelihood.elimination.linear_normal import Equations
from tests.likelihood.elimination.worlds import enumerated, make_world

NUMBERS = {
    "lognormal": m.LogNormal,
    "gamma": m.Gamma,
    "beta": m.Beta,
    "student": m.StudentT,
    "poisson": m.Poisson,
    "negative binomial": m.NegativeBinomial,
    "network": lambda: m.Normal(network=(3,)),
}


ERRORS = {"beta": 2e-2, "student": 2e-3}
"""Errors of the default number of points where posteriors have long tails."""


def fine_grid(structure, node):
    """Points (S, 1) of a number, evenly spread where it has no bounds, with log-lengths."""
    space = structure.mechanisms[node].space
    if space.is_countable:
        return torch.arange(400).double().unsqueeze(-1), torch.zeros(400).double()
    line = (
        torch.linspace(-40, 40, 8001, dtype=torch.float64)
        if space.is_unbounded
        else torch.linspace(-25, 8, 4001, dtype=torch.float64)
    )
    values, log_slope = space.constrain(line.unsqueeze(-1))
    return values, log_slope[:, 0] + torch.log(line[1] - line[0])


@pytest.mark.parametrize("name", list(NUMBERS))
@pytest.mark.parametrize("place", ["unknown", "child"])
def test_an_unknown_number_sums_like_a_fine_grid(name, place):
    rng = np.random.default_rng(3)
    nodes = {"a": m.Normal(), "z": m.Bernoulli(), "u": m.Normal(), "y": m.Normal(), "w": m.Bernoulli()}
    nodes["u" if place == "unknown" else "y"] = NUMBERS[name]()
    structure, naturals, batch = make_world(
        nodes, [("a", "u"), ("z", "u"), ("u", "y"), ("u", "w")], rng, rows=30, gaps=0.0
    )
    if name == "beta" and place == "unknown":  # else shares pile up at one, where no digits are left
        naturals["u"]["concentration"] = 8 * naturals["u"]["concentration"]
    batch.mask["u"][0, ::2] = False
    batch.mask["z"][0, ::3] = False
    grid = {"u": fine_grid(structure, "u")}
    truth = enumerated(structure, naturals, batch, grid)
    layout = moved(naturals, lay_out(structure, batch))
    torch.testing.assert_close(log_evidence(naturals, layout), truth, rtol=0, atol=ERRORS.get(name, 1e-4))
    layout = moved(naturals, lay_out(structure, batch, EliminationOptions(grid=96)))
    torch.testing.assert_close(log_evidence(naturals, layout), truth, rtol=0, atol=1e-4)
    own = {n: {k: v.clone().requires_grad_() for k, v in p.items()} for n, p in naturals.items()}
    theirs = {n: {k: v.clone().requires_grad_() for k, v in p.items()} for n, p in naturals.items()}
    total_evidence(own, layout).sum().backward()
    (batch.weight * enumerated(structure, theirs, batch, grid)).sum().backward()
    for node, params in own.items():
        for key, value in params.items():
            if value.grad is not None and key != "probs":
                torch.testing.assert_close(value.grad, theirs[node][key].grad, rtol=1e-3, atol=2e-3)


def test_replicas_have_points_of_their_own():
    rng = np.random.default_rng(0)
    nodes = {"f": m.Normal(), "k": m.Poisson(), "w": m.Bernoulli(), "x": m.Normal()}
    structure, naturals, batch = make_world(
        nodes, [("f", "k"), ("f", "w"), ("f", "x")], rng, rows=20, gaps=0.2, hidden=("f",), replicas=3
    )
    together = log_evidence(naturals, moved(naturals, lay_out(structure, batch)))
    for replica in range(3):
        one = {n: {k: v[replica : replica + 1] for k, v in p.items()} for n, p in naturals.items()}
        alone = log_evidence(one, moved(one, lay_out(structure, batch)))
        torch.testing.assert_close(together[replica], alone[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("eps", [0.5, 2.0])
def test_tempered_numbers_sum_like_a_fine_grid(eps):
    """Linear numbers exactly, points beside them: seen densities to the power 1 / eps."""
    rng = np.random.default_rng(1)
    nodes = {"f": m.Normal(), "g": m.Normal(), "x": m.Normal(), "y": m.Normal(), "z": m.Normal()}
    structure, naturals, batch = make_world(
        nodes, [("f", "g"), ("f", "x"), ("g", "y"), ("g", "z")], rng, rows=6, gaps=0.0, hidden=("f", "g")
    )
    line = torch.linspace(-12, 12, 301, dtype=torch.float64)
    grid = (line.unsqueeze(-1), torch.full((301,), float(torch.log(line[1] - line[0])), dtype=torch.float64))
    truth = enumerated(structure, naturals, batch, {"f": grid, "g": grid}, power=1 / eps)
    found = log_evidence(naturals, lay_out(structure, batch), Tempering(1 / eps))
    torch.testing.assert_close(found, truth, rtol=1e-8, atol=1e-8)


def test_rows_that_the_model_rules_out_have_no_density_and_spoil_no_gradient():
    nodes = {"z": m.Bernoulli(), "x": m.Bernoulli(), "u": m.Normal(), "y": m.Gamma()}
    structure, naturals, batch = make_world(
        nodes, [("z", "x"), ("z", "u"), ("u", "y")], np.random.default_rng(0), rows=12, gaps=0.0
    )
    batch.mask["u"][0, ::2] = False
    batch.mask["z"][0, ::3] = False
    layout = moved(naturals, lay_out(structure, batch))
    own = {n: {k: v.clone().requires_grad_() for k, v in p.items()} for n, p in naturals.items()}
    weight = batch.weight.clone()
    weight[0, 0] = 0.0
    total_evidence(own, layout, weight).sum().backward()
    assert all(bool(torch.isfinite(v.grad).all()) for p in own.values() for v in p.values() if v.grad is not None)


@pytest.mark.parametrize(("dim", "error"), [(2, 1e-4), (3, 1e-3), (4, 3e-2)])
def test_an_unknown_vector_with_counts_below_it_is_the_same_as_its_coordinates(dim, error):
    """Coordinates as nodes of their own are summed on a grid each; as one vector on a cloud."""
    rng = np.random.default_rng(dim)
    names = [f"f{i}" for i in range(dim)]
    children = {"k": m.Poisson(), "w": m.Bernoulli(), "x": m.Normal()}
    apart, naturals, batch = make_world(
        {n: m.Normal() for n in names} | children,
        [(n, c) for n in names for c in children],
        rng,
        rows=10,
        gaps=0.0,
        hidden=names,
    )
    from otpdag import Graph
    from otpdag.structure import Structure

    together = Structure.bind(Graph([("f", c) for c in children], hidden=["f"]), {"f": m.Normal(dim), **children})
    vector = {key: torch.cat([naturals[n][key] for n in names], -1) for key in ("loc", "scale")}
    joined = {"f": vector, **{c: naturals[c] for c in children}}
    fine = EliminationOptions(grid=24 if dim < 4 else 16, largest_table=2**21)
    truth = log_evidence(naturals, moved(naturals, lay_out(apart, batch, fine)))
    layout = moved(joined, lay_out(together, batch))
    torch.testing.assert_close(log_evidence(joined, layout), truth, rtol=0, atol=error)
    own = {n: {k: v.clone().requires_grad_() for k, v in p.items()} for n, p in joined.items()}
    total_evidence(own, layout).sum().backward()
    step = 1e-5
    for node, key in (("k", "weight"), ("x", "scale"), ("f", "loc")):
        ends = []
        for sign in (1, -1):
            shifted = joined[node][key].clone()
            shifted.view(-1)[0] += sign * step
            ends.append(float(total_evidence({**joined, node: {**joined[node], key: shifted}}, layout)))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert float(own[node][key].grad.view(-1)[0]) == pytest.approx(slope, rel=1e-4, abs=1e-4)


RNG = np.random.default_rng(0)


def test_entries_go_to_their_cells_and_what_is_beyond_a_table_is_impossible():
    """Two arrays of three and two entries; a bank of rows with two cells, and one with three of which one is beyond."""
    first, second = torch.arange(6.0).reshape(2, 3), 10 + torch.arange(4.0).reshape(2, 2)
    banks = {(2,): torch.full((2, 3, 2), 99.0), (3,): torch.full((2, 1, 3), 99.0)}
    places = Places(
        {(2,): (torch.tensor([2]), torch.tensor([4, 0])), (3,): (torch.tensor([0]), torch.tensor([1, 3, 5]))},
        torch.tensor([1, 2, 5, 3, 0]),  # the third entry only fills an array up
    )
    places.put(banks, [first, second])
    for replica in range(2):
        flat = [*first[replica].tolist(), *second[replica].tolist(), -torch.inf]
        assert banks[2,][replica].tolist() == [[99.0, 99.0], [99.0, 99.0], [flat[4], flat[0]]]
        assert banks[3,][replica].tolist() == [[flat[1], flat[3], flat[5]]]
    beliefs = {(2,): torch.rand(2, 3, 2), (3,): torch.rand(2, 1, 3)}
    one, two = places.taken(beliefs, [3, 2])
    for replica in range(2):
        pool = [*beliefs[2,][replica, 2].tolist(), *beliefs[3,][replica, 0].tolist(), 0.0]
        assert one[replica].tolist() == [pool[1], pool[2], 0.0]
        assert two[replica].tolist() == [pool[3], pool[0]]
    assert places.taken(beliefs, []) == ()
    before = {sizes: bank.clone() for sizes, bank in banks.items()}
    places.put(banks, [])
    assert all(torch.equal(banks[sizes], bank) for sizes, bank in before.items())


def test_linear_rows_have_the_densities_and_moments_of_their_columns():
    """Columns are kept less a shift, which the equations take up again."""
    coefficients, constants = torch.as_tensor(RNG.normal(size=(2, 5, 1, 4))), torch.as_tensor(RNG.normal(size=(2, 5)))
    shift = torch.as_tensor(RNG.normal(size=(5, 4)))
    shift[:, 2:] = 0.0
    columns = torch.as_tensor(RNG.normal(size=(1, 2, 3, 3)))
    columns[..., -1] = 1.0
    rows = LinearRows(torch.tensor([3, 1]), torch.ones(6, dtype=torch.bool), columns)
    found = rows.log_prob(Equations(coefficients, constants, shift))
    assert found.shape == (2, 6)
    for replica in range(2):
        for group, row in enumerate((3, 1)):
            for entry in range(3):
                whole = columns[0, group, entry].numpy() + shift[row, :3].numpy()
                noise = coefficients[replica, row, 0, :3].numpy() @ whole
                expected = constants[replica, row].item() + stats.norm.logpdf(noise) + 0.5 * np.log(2 * np.pi)
                np.testing.assert_allclose(found[replica, 3 * group + entry], expected)
    weight = torch.as_tensor(RNG.random((2, 6)))
    moments = rows.moments(weight)
    expected = torch.einsum("rge,gei,gej->rgij", weight.reshape(2, 2, 3), columns[0], columns[0])
    torch.testing.assert_close(moments, expected)
