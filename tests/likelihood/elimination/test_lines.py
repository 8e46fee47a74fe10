"""Numbers that generalised linear children read through their lines, beside sums over points of every number."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import optimize, special

import otpdag as otp
from benchmarks.harness import streams
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.likelihood.elimination.evidence import log_evidence, moved, total_evidence
from otpdag.likelihood.elimination.layout import lay_out
from otpdag.likelihood.elimination.plans import EliminationOptions
from otpdag.likelihood.elimination.posterior import node_moments, posterior_draws
from otpdag.structure import Structure
from tests.likelihood.elimination.worlds import make_world

POINTS = EliminationOptions(integrate=False, largest_table=2**23, grid=24)
X = ["x0", "x1", "x2"]


def world(child, *, above=(), rows=25, seed=0, replicas=1):
    """Three numbers, the third of which follows the first, that a child reads; a category above one or more."""
    nodes = {"c": m.Categorical(2), **dict.fromkeys(X, m.Normal()), "y": child}
    edges = [("x0", "x2"), *((x, "y") for x in X), *(("c", n) for n in above)]
    return make_world(nodes, edges, np.random.default_rng(seed), rows=rows, gaps=0.45, replicas=replicas)


def lines_of(layout):
    return [one for block in layout.blocks for group in block.linear for one in group.lines]


CHILDREN = {
    "bernoulli": (m.Bernoulli(), ()),
    "bernoulli of a category": (m.Bernoulli(), ("y",)),
    "three categories": (m.Categorical(3), ()),
    "poisson below a mixture": (m.Poisson(), ("x0", "y")),
    "gamma": (m.Gamma(), ("x1",)),
    "student": (m.StudentT(), ()),
    "slopes by category": (m.Bernoulli(terms="x0 * C(c) + x1 + x2"), ("y",)),
}


@pytest.mark.parametrize("name", CHILDREN)
def test_evidence_and_moments_are_those_of_numbers_on_points(name):
    child, above = CHILDREN[name]
    structure, naturals, batch = world(child, above=above, rows=50, replicas=2)
    first = {node: {key: value[:1] for key, value in params.items()} for node, params in naturals.items()}
    found, truth = lay_out(structure, batch, keep=("x1",)), lay_out(structure, batch, POINTS, keep=("x1",))
    assert lines_of(found)
    assert found.largest_table < truth.largest_table
    for one in (naturals, first):
        torch.testing.assert_close(
            log_evidence(one, moved(one, found)), log_evidence(one, moved(one, truth)), rtol=0, atol=2e-5
        )
    pairs = zip(*(node_moments(first, moved(first, one), "x1") for one in (found, truth)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", CHILDREN)
def test_gradient_is_the_difference_of_the_evidence(name):
    child, above = CHILDREN[name]
    structure, naturals, batch = world(child, above=above, rows=12, seed=1)
    layout = moved(naturals, lay_out(structure, batch))
    leaves = {
        node: {key: value.clone().requires_grad_() for key, value in params.items()}
        for node, params in naturals.items()
    }
    total_evidence(leaves, layout).sum().backward()
    for node in ("x0", "x1", "y"):
        for key, value in naturals[node].items():
            if key == "probs":
                continue
            for at in np.ndindex(*value.shape):
                high, low = (_shifted(naturals, node, key, at, by) for by in (1e-5, -1e-5))
                slope = (total_evidence(high, layout) - total_evidence(low, layout)) / 2e-5
                found = leaves[node][key].grad[at]
                assert float(found) == pytest.approx(float(slope), rel=1e-4, abs=2e-4), (node, key, at)


def _shifted(naturals, node, key, at, by):
    value = naturals[node][key].clone()
    value[at] += by
    return {**naturals, node: {**naturals[node], key: value}}


def test_two_children_meet_in_two_dimensions_beside_a_hidden_factor():
    """Six missing numbers with a factor above them and two children: a draw from the prior for each of many points."""
    names = [f"x{i}" for i in range(6)]
    nodes = {"f": m.Normal(), **{n: m.Normal(loc=0.2, weight=[0.8], scale=0.7) for n in names}}
    slopes = np.linspace(-0.6, 0.9, 6)
    nodes |= {"y": m.Bernoulli(logits=[0.0, 0.3], weight=np.stack([0 * slopes, slopes], 1))}
    nodes |= {"z": m.Poisson(log_rate=0.1, weight=0.3 * slopes[::-1].copy())}
    edges = [("f", n) for n in names] + [(n, c) for n in names for c in ("y", "z")]
    structure = Structure.bind(otp.Graph(edges, hidden=["f"]), nodes)
    table = pd.DataFrame({n: [np.nan] * 2 for n in names} | {"y": [1, 0], "z": [0, 3]})
    table.loc[1, "x0"] = 1.1
    values = {n: torch.tensor(table[n].fillna(0.0).to_numpy()).reshape(1, 2, 1).double() for n in (*names, "z")}
    values["y"] = torch.eye(2).double()[[1, 0]].unsqueeze(0)
    mask = {n: torch.tensor(table[n].notna().to_numpy()).reshape(1, 2, 1) for n in table}
    naturals = structure.naturals({})
    layout = moved(naturals, lay_out(structure, Batch(values, mask, torch.ones(1, 2).double())))
    found = log_evidence(naturals, layout)[0].tolist()
    rng = np.random.default_rng(0)
    cov = 0.64 + 0.49 * np.eye(6)
    for row in range(2):
        seen = [0] if row else []
        free = [i for i in range(6) if i not in seen]
        gain = cov[np.ix_(free, seen)] @ np.linalg.inv(cov[np.ix_(seen, seen)])
        x = np.full((200_000, 6), 1.1)
        mean = 0.2 + gain @ np.full(len(seen), 0.9)
        x[:, free] = rng.multivariate_normal(mean, cov[np.ix_(free, free)] - gain @ cov[np.ix_(seen, free)], len(x))
        p = 1 / (1 + np.exp(-0.3 - x @ slopes))
        rate = np.exp(0.1 + 0.3 * x @ slopes[::-1])
        density = np.where(table["y"][row], p, 1 - p) * np.exp(-rate) * rate ** table["z"][row]
        density /= [1.0, 6.0][row]
        truth = np.log(density.mean()) - (0.5 * 0.9**2 / 1.13 + 0.5 * np.log(2 * np.pi * 1.13) if row else 0.0)
        assert found[row] == pytest.approx(truth, abs=4 * density.std() / density.mean() / np.sqrt(len(x)))


def test_draws_have_the_moments_of_the_sums():
    structure, naturals, batch = world(m.Bernoulli(), rows=6, seed=3)
    layout = moved(naturals, lay_out(structure, batch, EliminationOptions(merged=False), keep=X))
    assert lines_of(layout)
    drawn = posterior_draws(naturals, layout, 20_000, torch.Generator().manual_seed(0))
    for node in X:
        mean, variance = node_moments(naturals, layout, node)
        error = (variance / 20_000).sqrt() + 1e-9
        assert bool(((drawn[node].mean(1) - mean).abs() < 4.5 * error).all())
        torch.testing.assert_close(drawn[node].var(1), variance, rtol=0.06, atol=1e-9)


def test_many_parents_with_gaps_are_estimated():
    """Twelve numbers, a fifth of whose cells are empty: about the slopes of complete rows, and no large tables."""
    rng = np.random.default_rng(11)
    x = rng.normal(size=(600, 12))
    slopes = rng.normal(0, 0.4, 12)
    names = [f"x{i}" for i in range(12)]
    table = pd.DataFrame(x, columns=names)
    gaps = table.mask(rng.random(x.shape) < 0.2).assign(y=(rng.random(600) < 1 / (1 + np.exp(-x @ slopes))).astype(int))
    model = otp.Model(otp.Graph([(n, "y") for n in names]), {**dict.fromkeys(names, m.Normal()), "y": m.Bernoulli()})
    result = otp.fit(model, gaps)
    assert result.status.converged
    weight = result.model.params()["y"]["weight"]
    found = (weight[:, 1] - weight[:, 0]).ravel()
    assert np.sqrt(np.mean((found - slopes) ** 2)) < 0.2
    assert result.problem.unplaced.largest_table <= 48


def test_few_numbers_that_many_children_read_stay_on_points():
    """Two factors behind eight items: two dimensions, not eight lines."""
    items = [f"y{i}" for i in range(8)]
    nodes = {"f": m.Normal(), "g": m.Normal(), **dict.fromkeys(items, m.Bernoulli())}
    edges = [(f, item) for f in ("f", "g") for item in items]
    structure, _, batch = make_world(nodes, edges, np.random.default_rng(5), rows=10, gaps=0.0, hidden=("f", "g"))
    layout = lay_out(structure, batch)
    assert not lines_of(layout)
    assert layout.largest_table == 24**2


def test_what_is_too_large_names_the_predictions():
    nodes = {**dict.fromkeys(X, m.Normal()), "n": m.Poisson(), "y": m.Bernoulli(), "z": m.Poisson()}
    edges = [*((x, "y") for x in X), ("n", "y"), ("n", "z")]
    structure, _, batch = make_world(nodes, edges, np.random.default_rng(0), rows=4, gaps=0.0)
    for n in (*X, "n"):
        batch.mask[n][:] = False
    with pytest.raises(otp.errors.ModelError, match="the prediction of 'y'"):
        lay_out(structure, batch, EliminationOptions(largest_table=500))


# -- estimates ---------------------------------------------------------------------------------------------------------


def largest_likelihood(x, y):
    """Slopes of a logit on independent normals with gaps, by Gauss's rule over the one number that y reads."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    log_weight, seen, sign, k = np.log(weights / weights.sum()), ~np.isnan(x), 2.0 * y - 1, x.shape[1]
    tensors = [torch.from_numpy(one) for one in (np.nan_to_num(x), seen, sign, nodes, log_weight)]

    def loss(flat):
        point, (values, shown, signs, at, log_share) = torch.tensor(flat, requires_grad=True), tensors
        mean, log_scale, slope, level = point.split([k, k, k, 1])
        normal = (-0.5 * ((values - mean) / log_scale.exp()) ** 2 - log_scale) * shown
        line = level + (torch.where(shown, values, mean) * slope).sum(1)
        spread = (~shown * (slope * log_scale.exp()) ** 2).sum(1).clamp(min=1e-30).sqrt()
        each = torch.nn.functional.logsigmoid(signs[:, None] * (line[:, None] + spread[:, None] * at))
        total = -(normal.sum() + torch.logsumexp(log_share + each, 1).sum()) / len(y)
        total.backward()
        return total.item(), point.grad.numpy()

    start = np.concatenate([np.nanmean(x, 0), np.log(np.nanstd(x, 0)), np.zeros(k + 1)])
    options = {"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-9}
    return optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=options).x[2 * k : 3 * k]


@pytest.mark.slow
@pytest.mark.parametrize("repeat", [0, 2])
def test_slopes_of_many_parents_with_gaps_are_those_of_the_largest_likelihood(repeat):
    draws = streams(71231, "many_parents_12", repeat)  # where points that stayed behind held small slopes back
    x, slopes = draws.data.normal(size=(500, 12)), draws.data.normal(size=12) / np.sqrt(12)
    y = (draws.data.random(500) < special.expit(x @ slopes)).astype(int)
    x[draws.missing.random(x.shape) < 0.2] = np.nan
    names = [f"x{i}" for i in range(12)]
    nodes = {**dict.fromkeys(names, m.Normal()), "y": m.Bernoulli()}
    table = pd.DataFrame(x, columns=names).assign(y=y)
    found = otp.fit(otp.Model(otp.Graph([(name, "y") for name in names]), nodes), table).model.params()["y"]["weight"]
    np.testing.assert_allclose(found[:, 1] - found[:, 0], largest_likelihood(x, y), atol=1e-3)
