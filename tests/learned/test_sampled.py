"""The objective with a learned map: exact where theory gives the value, replica by replica."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward import AmortizedMap, RowCode
from otpdag.costs import DEFAULT_COSTS
from otpdag.data import Batch, Schema, encode, random_part
from otpdag.divergences import AbstractDivergence, Energy, SlicedWasserstein
from otpdag.engine import Adam
from otpdag.learned.sampled import DrawnRows, Pools, ground_cost, pools_for
from otpdag.mechanisms.base import Noise
from otpdag.noise import Streams, normal_score
from otpdag.objective import Drawn
from otpdag.settings import Objective, PushForward
from tests.mechanisms.own import Chances

RNG = np.random.default_rng(42)


def options(*, eta=0.0, eps=0.0, divergence=None, **drawn):
    objective = Objective(eps=eps, push_forward=PushForward(eta, divergence or Energy()))
    return objective, Drawn(**{"noise": "marginal", "batch_size": 10**6, **drawn})


def terms_of(structure, maps, theta, phi, batch, streams, settings):
    objective, drawn = settings
    steps = DrawnRows(structure, batch, {}, maps, objective, drawn).steps(theta, phi, streams, 0.0)
    each = [step.terms(objective.at(0.0), objective.push_forward.divergence, streams) for step in steps]
    return sum(each[1:], each[0])


def raw_of(model):
    return model.structure.raw(model.fitted.naturals)


# -- the entropic term, exactly ---------------------------------------------------------------------------------------

LOADINGS, NOISE = np.array([1.0, -0.7, 0.5]), np.array([0.6, 0.8, 1.1])


def factor_model():
    names = ["a", "b", "c"]
    model = otp.Model(
        otp.Graph([("z", n) for n in names], hidden=["z"]), {"z": m.Normal(), **{n: m.Normal() for n in names}}
    )
    return model.set_params({n: {"loc": 0.0, "weight": LOADINGS[i], "scale": NOISE[i]} for i, n in enumerate(names)})


def exact_factor_map(model, batch):
    """The posterior of the factor is normal and linear in the row."""
    backward = AmortizedMap(
        model.structure,
        RowCode.of(model.structure, batch, model.graph.observed),
        ("z",),
        hidden=(),
        explains=model.graph.observed,
    )
    phi = backward.init(1, torch.Generator())
    precision = 1 + (LOADINGS**2 / NOISE**2).sum()
    slopes = LOADINGS / NOISE**2 / precision
    for i, node in enumerate(model.graph.observed):
        phi["phi.joint.z.linear"][0, 2 * i, 0] = slopes[i] * backward.code.scale[node].item()
        phi["phi.joint.z.bias"][0, 0] += slopes[i] * backward.code.shift[node].item()
    phi["phi.joint.z.bias"][0, 1] = -0.5 * np.log(precision)
    return backward, phi


def test_with_the_exact_posterior_every_draw_gives_the_log_likelihood():
    model = factor_model()
    x = RNG.normal(size=(50, 1)) * LOADINGS + RNG.normal(size=(50, 3)) * NOISE
    weights = RNG.uniform(0.5, 2.0, 50)
    batch = encode(x, model._known_schema(), hidden=["z"], weights=weights)
    backward, phi = exact_factor_map(model, batch)
    terms = terms_of(model.structure, [backward], raw_of(model), phi, batch, Streams([0, 1]), options(eps=1.0))
    exact = stats.multivariate_normal(np.zeros(3), np.outer(LOADINGS, LOADINGS) + np.diag(NOISE**2)).logpdf(x)
    np.testing.assert_allclose(terms.total, -np.average(exact, weights=weights), rtol=1e-10)


def test_a_parent_counts_as_drawn_only_where_it_is_missing():
    """x1 -> x2 with x1 missing in some rows: again the exact posterior gives the exact log-likelihood."""
    model = otp.Model(otp.Graph([("x1", "x2")]), {"x1": m.Normal(), "x2": m.Normal()})
    model.set_params({"x1": {"loc": 1.0, "scale": 2.0}, "x2": {"loc": 0.5, "weight": 0.8, "scale": 1.5}})
    x1 = RNG.normal(1.0, 2.0, 60)
    x2 = 0.5 + 0.8 * x1 + RNG.normal(0, 1.5, 60)
    joint = stats.multivariate_normal([1.0, 1.3], [[4.0, 3.2], [3.2, 2.56 + 2.25]])
    exact = joint.logpdf(np.stack([x1, x2], 1))
    exact[:25] = stats.norm(1.3, np.sqrt(4.81)).logpdf(x2[:25])
    x1[:25] = np.nan
    batch = encode({"x1": x1, "x2": x2}, model._known_schema(), hidden=())
    (backward,) = Drawn(hidden_layers=()).maps(model.structure, batch)
    assert backward.targets == ("x1",)
    phi = backward.init(1, torch.Generator())
    code = {n: (backward.code.shift[n].item(), backward.code.scale[n].item()) for n in ("x1", "x2")}
    slope, intercept, variance = 3.2 / 4.81, 1.0 - 3.2 / 4.81 * 1.3, 4 - 3.2**2 / 4.81
    phi["phi.joint.x1.linear"][0, 2, 0] = slope * code["x2"][1] / code["x1"][1]
    phi["phi.joint.x1.bias"][0, 0] = (intercept + slope * code["x2"][0] - code["x1"][0]) / code["x1"][1]
    phi["phi.joint.x1.bias"][0, 1] = 0.5 * np.log(variance) - np.log(code["x1"][1])
    terms = terms_of(model.structure, [backward], raw_of(model), phi, batch, Streams([3]), options(eps=1.0))
    assert terms.total.item() == pytest.approx(-exact.mean(), rel=1e-10)


def test_the_divergence_of_a_category_is_summed_not_sampled():
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(3), "x": m.Normal()})
    probs = np.array([0.2, 0.3, 0.5])
    model.set_params({"z": {"probs": probs}, "x": {"loc": [0.0, 1.0, 2.0], "scale": [1.0, 1.0, 1.0]}})
    batch = encode(RNG.normal(size=(9, 1)), model._known_schema(), hidden=["z"])
    (backward,) = Drawn(hidden_layers=()).maps(model.structure, batch)
    phi = backward.init(1, torch.Generator())
    phi["phi.joint.z.bias"] = torch.tensor([[0.5, 0.0, -0.5]], dtype=torch.float64)
    q = np.exp([0.5, 0.0, -0.5]) / np.exp([0.5, 0.0, -0.5]).sum()
    terms = terms_of(model.structure, [backward], raw_of(model), phi, batch, Streams([3]), options(eps=0.7))
    assert terms.entropic.item() == pytest.approx(0.7 * (q * np.log(q / probs)).sum(), rel=1e-10)


# -- abducted noise ---------------------------------------------------------------------------------------------------


def mixed_types_model():
    """Nodes of all kinds below an observed x, with parameters that made the data."""
    graph = otp.Graph([("x", n) for n in ("n", "k", "g", "l", "b")])
    model = otp.Model(
        graph,
        {
            "x": m.Normal(),
            "n": m.Poisson(),
            "k": m.Categorical(3),
            "g": m.Gamma(),
            "l": m.LogNormal(),
            "b": m.Beta(),
        },
    )
    model.set_params(
        {
            "x": {"loc": 0.0, "scale": 1.0},
            "n": {"log_rate": 1.0, "weight": 0.4},
            "k": {"logits": [0.0, 0.3, -0.2], "weight": [[0.0, 0.5, -0.5]]},
            "g": {"log_mean": 0.5, "weight": 0.3, "shape": 2.0},
            "l": {"loc": 0.2, "weight": -0.4, "scale": 0.5},
            "b": {"logit_mean": 0.1, "weight": 0.4, "concentration": 5.0},
        }
    )
    return model


@pytest.mark.parametrize("missing", [0.0, 0.4])
def test_at_the_truth_abducted_noise_looks_like_its_prior(missing):
    model = mixed_types_model()
    table = model.sample(800, seed=2).astype(float)
    table = table.mask(np.random.default_rng(0).random(table.shape) < missing).assign(x=table["x"])
    batch = encode(table, model._known_schema(), hidden=())
    maps = Drawn(hidden_layers=()).maps(model.structure, batch)
    settings = options(noise="abducted", eta=1.0)
    truth = terms_of(model.structure, maps, raw_of(model), {}, batch, Streams([1]), settings)
    assert truth.reconstruction.item() == 0
    assert abs(truth.divergence.item()) < 0.03
    wrong = raw_of(model)
    for key in ("n.log_rate", "g.log_mean", "l.loc", "b.logit_mean", "k.logits"):
        wrong[key] = wrong[key] + torch.tensor([0.5] + [0.0] * (wrong[key].shape[-1] - 1))
    assert terms_of(model.structure, maps, wrong, {}, batch, Streams([1]), settings).divergence.item() > 0.1


def test_abducted_noise_has_finite_gradients_where_cells_are_missing():
    model = mixed_types_model()
    table = model.sample(80, seed=2).astype(float)
    table = table.mask(np.random.default_rng(0).random(table.shape) < 0.4)
    batch = encode(table, model._known_schema(), hidden=())
    maps = Drawn(hidden_layers=()).maps(model.structure, batch)
    theta = {key: value.clone().requires_grad_() for key, value in raw_of(model).items()}
    phi = maps[0].init(1, torch.Generator().manual_seed(0))
    loss = terms_of(model.structure, maps, theta, phi, batch, Streams([1]), options(noise="abducted", eta=1.0))
    loss.total.sum().backward()
    for key, value in theta.items():
        assert value.grad is not None, key
        assert torch.isfinite(value.grad).all(), key
        assert value.grad.abs().sum() > 0, key


@pytest.mark.parametrize("scope", ["joint", "local"])
def test_noise_must_not_depend_on_an_observed_parent_beside_a_hidden_one(scope):
    """z -> y <- x with z hidden: a wrong slope of x makes the noise depend on x, which the divergence must see."""
    model = otp.Model(otp.Graph([("z", "y"), ("x", "y")], hidden=["z"]), {n: m.Normal() for n in ("z", "y", "x")})
    model.set_params({"x": {"loc": 0.0, "scale": 1.0}, "y": {"loc": 0.0, "weight": [1.0, 2.0], "scale": 1.0}})
    batch = encode(model.sample(800, seed=0).drop(columns="z"), model._known_schema(), hidden=["z"])
    maps = Drawn(scope=scope, hidden_layers=()).maps(model.structure, batch)
    phi = {}
    for backward in maps:
        phi |= backward.init(1, torch.Generator().manual_seed(0))
    theta = raw_of(model)
    theta["y.weight"] = theta["y.weight"].clone().requires_grad_()
    settings = options(noise="abducted", eta=1.0, scope=scope)
    terms = terms_of(model.structure, maps, theta, phi, batch, Streams([1]), settings)
    (gradient,) = torch.autograd.grad(terms.total.sum(), theta["y.weight"])
    assert abs(gradient[0, 1, 0].item()) > 1e-3


# -- scopes, missing cells, costs -------------------------------------------------------------------------------------


def hidden_chain():
    graph = otp.Graph([("u", "v"), ("v", "x"), ("u", "y"), ("x", "y")], hidden=["u", "v"])
    return otp.Model(graph, {"u": m.Categorical(2), "v": m.Normal(), "x": m.Normal(), "y": m.Poisson()})


def chain_batch(model, rows=40, missing=0.2):
    table = pd.DataFrame({"x": RNG.normal(size=rows), "y": RNG.poisson(3.0, rows)}).astype(float)
    table = table.mask(RNG.random(table.shape) < missing)
    return encode(table, Schema.of(model.spaces, model.graph), hidden=model.graph.hidden)


@pytest.mark.parametrize("noise", ["sampled", "abducted", "marginal"])
@pytest.mark.parametrize("scope", ["joint", "local"])
@pytest.mark.parametrize("divergence", [Energy(), SlicedWasserstein(8)], ids=["energy", "sliced"])
def test_replicas_together_equal_replicas_apart(noise, scope, divergence):
    model = hidden_chain()
    batch = chain_batch(model)
    maps = Drawn(scope=scope, hidden_layers=(4,)).maps(model.structure, batch)
    generator = torch.Generator().manual_seed(0)
    theta = {
        key: 0.3 * torch.randn(3, *parameter.shape, generator=generator, dtype=torch.float64)
        for key, parameter in model.structure.parameters().items()
    }
    phi = {}
    for backward in maps:
        phi |= backward.init(3, generator)
    settings = options(noise=noise, scope=scope, eta=0.8, eps=0.4, divergence=divergence)

    def losses(rows):
        streams = Streams([11 + r for r in rows])
        pick = batch.take(streams.rows(batch.rows, 16))
        part = [{key: value[list(rows)] for key, value in half.items()} for half in (theta, phi)]
        return terms_of(model.structure, maps, *part, pick, streams, settings).total

    together = losses(range(3))
    assert together.shape == (3,)
    assert torch.isfinite(together).all()
    for r in range(3):
        torch.testing.assert_close(losses([r]), together[r : r + 1], rtol=1e-9, atol=1e-10)


def test_missing_cells_cost_nothing():
    model = hidden_chain()
    batch = chain_batch(model, missing=0.5)
    noisy = Batch({n: torch.where(batch.mask[n], v, 77.0) for n, v in batch.values.items()}, batch.mask, batch.weight)
    maps = Drawn(hidden_layers=()).maps(model.structure, batch)
    theta = {
        key: torch.zeros(1, *parameter.shape, dtype=torch.float64)
        for key, parameter in model.structure.parameters().items()
    }
    phi = maps[0].init(1, torch.Generator().manual_seed(0))
    for noise in ("sampled", "marginal"):
        settings = options(noise=noise, eps=1.0)
        found = [terms_of(model.structure, maps, theta, phi, b, Streams([5]), settings) for b in (batch, noisy)]
        assert found[0].total.item() == pytest.approx(found[1].total.item(), rel=1e-12)


def test_costs_are_in_units_of_the_columns_variation():
    """Multiplying a column by 100 must not change what its reconstruction is worth."""
    for mechanism, draws in ((m.Normal(), RNG.normal(5, 1, 400)), (m.Poisson(), RNG.poisson(400, 400))):
        found = []
        for factor in (1.0, 100.0):
            graph = otp.Graph([("z", "x")], hidden=["z"])
            model = otp.Model(graph, {"z": m.Normal(), "x": mechanism})
            values = torch.tensor(draws * factor, dtype=torch.float64).reshape(1, -1, 1)
            batch = Batch({"x": values}, {"x": torch.ones_like(values).bool()}, torch.ones(1, 400).double())
            (backward,) = Drawn(hidden_layers=()).maps(model.structure, batch)
            spread = backward.code.spread("x", values)
            assert spread.item() == pytest.approx(values.std().item(), rel=0.05)
            mask = batch.mask["x"]
            found.append(
                ground_cost(model.mechanisms["x"].space, values, values.mean() + 0 * values, mask, spread, None).mean()
            )
        assert found[0].item() == pytest.approx(found[1].item(), rel=1e-3)


def test_a_users_cost_is_in_natural_units_and_may_be_a_function():
    mechanism = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal(2)}).mechanisms["x"]
    value, rebuilt = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 5.0]]])
    mask, spread = torch.tensor([[[True, False]]]), torch.tensor([10.0, 10.0])
    absolute = ground_cost(mechanism.space, value, rebuilt, mask, spread, lambda x, y: (x - y).abs().sum(-1))
    assert absolute.item() == 2.0
    assert ground_cost(mechanism.space, value, rebuilt, mask, spread, None).item() == pytest.approx(0.04)


def test_default_costs_follow_the_nodes_type():
    model = mixed_types_model()
    names = {node: type(DEFAULT_COSTS[mechanism.space.cost]).__name__ for node, mechanism in model.mechanisms.items()}
    assert names["k"] == "CrossEntropy"
    assert names["n"] == "SmoothL1"
    assert names["x"] == names["g"] == "SquaredEuclidean"


def test_any_divergence_object_serves():
    calls = []

    class Shift(AbstractDivergence):
        def forward(self, x, y, a, b, generator):
            calls.append(x.shape)
            return (x.mean(-2) - y.mean(-2)).square().sum(-1)

    model = hidden_chain()
    batch = chain_batch(model, missing=0.0)
    maps = Drawn(hidden_layers=()).maps(model.structure, batch)
    theta = {k: torch.zeros(2, *p.shape, dtype=torch.float64) for k, p in model.structure.parameters().items()}
    phi = maps[0].init(2, torch.Generator().manual_seed(0))
    settings = options(noise="sampled", eta=2.0, divergence=Shift())
    terms = terms_of(model.structure, maps, theta, phi, batch, Streams([1, 2]), settings)
    assert terms.divergence.shape == (2,)
    assert (terms.divergence > 0).all()
    assert len(calls) == 2  # one for each hidden node
    assert {shape[-1] for shape in calls} == {2, 3}  # u alone; v with its parent


class Recorded(AbstractDivergence):
    """Keeps what it is asked to compare, and says 1, 10, 100, ..."""

    def __init__(self):
        self.asked = []

    def forward(self, x, y, a, b, generator):
        self.asked.append((x.detach(), y.detach(), a, b))
        return torch.full((1,), 10.0 ** (len(self.asked) - 1), dtype=torch.float64)


def compared(scope, noise, weights=None):
    """What is compared in u -> v -> x, u -> y <- x with u and v hidden."""
    model = hidden_chain()
    model.set_params(
        {
            "u": {"probs": [0.3, 0.7]},
            "v": {"loc": [-1.0, 2.0], "scale": [0.5, 0.8]},
            "x": {"loc": 0.5, "weight": 2.0, "scale": 1.0},
            "y": {"log_rate": [0.2, 1.0], "weight": 0.1},
        }
    )
    table = pd.DataFrame({"x": np.linspace(-2, 2, 400), "y": np.arange(400) % 5})
    batch = encode(table, model._known_schema(), hidden=["u", "v"], weights=weights)
    maps = Drawn(scope=scope, hidden_layers=()).maps(model.structure, batch)
    phi = {}
    for backward in maps:
        phi |= backward.init(1, torch.Generator().manual_seed(0))
    recorded = Recorded()
    settings = options(noise=noise, scope=scope, eta=0.5, divergence=recorded)
    terms = terms_of(model.structure, maps, raw_of(model), phi, batch, Streams([1]), settings)
    return maps, terms, recorded.asked


def test_families_are_nodes_with_their_parents_and_the_sum_of_divergences_has_its_weight():
    _, terms, asked = compared("joint", "marginal")
    assert terms.divergence.item() == pytest.approx(0.5 * 11.0)
    (u, made_u, *masses), (v, made_v, *_) = asked
    assert [one.unique().tolist() for one in masses] == [[1 / 400], [1 / 400]]
    assert [one.shape[-1] for one in (u, made_u, v, made_v)] == [2, 2, 3, 3]
    torch.testing.assert_close(v[..., 1:], made_v[..., 1:])  # the same parents
    torch.testing.assert_close(v[..., 1:], u)
    # the model's own draws of v follow its parents, and its draws of u its weights
    hard = made_v[0, :, 1:].argmax(-1)
    sure = made_v[0, :, 1:].amax(-1) > 0.97
    gap = made_v[0, sure & (hard == 1), 0].mean() - made_v[0, sure & (hard == 0), 0].mean()
    assert abs(gap.item()) > 1.0
    share = made_u[0].mean(0) - made_u[0].mean(0).min()
    assert share[1] > share[0]


def test_abducted_noise_joins_the_families_of_drawn_parents_and_local_maps_have_one_each():
    _, terms, asked = compared("joint", "abducted")
    # u with the noise of y, v with that of x; y has an observed parent too, so its noise has a family of its own
    assert [one[0].shape[-1] for one in asked] == [3, 4, 4]
    assert terms.divergence.item() == pytest.approx(0.5 * 111.0)
    assert terms.reconstruction.item() == 0.0
    maps, terms, asked = compared("local", "abducted")
    assert [backward.explains for backward in maps] == [("x",), ("y",)]
    assert terms.divergence.item() == pytest.approx(0.5 * (10.0 ** len(asked) - 1) / 9)
    for pushed, forward, *_ in asked:
        assert pushed.shape == forward.shape


def test_unequal_weights_of_rows_are_said_to_the_divergence():
    weights = np.random.default_rng(0).uniform(0.5, 2.0, 400)
    _, _, asked = compared("joint", "sampled", weights)
    for *_, a, b in asked:
        np.testing.assert_allclose(a[0], weights / weights.sum())
        np.testing.assert_allclose(b[0], weights / weights.sum())


# -- streams and small parts ------------------------------------------------------------------------------------------


def test_streams_repeat_and_differ():
    like = torch.zeros(1, dtype=torch.float64)
    first, again = Streams([1, 2]), Streams([1, 2])
    noise = Noise(3, "normal")
    drawn = first.draw(noise, 5, like)
    assert drawn.shape == (2, 5, 3)
    assert torch.equal(drawn, again.draw(noise, 5, like))
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(Streams([2]).draw(noise, 5, like)[0], drawn[1])
    assert first.rows(10, 4).shape == (2, 4)
    assert torch.equal(first.rows(3, 4), torch.arange(3).expand(2, 3))


def test_uniform_noise_is_brought_to_normal_scores():
    u = torch.tensor([0.0, 0.025, 0.5, 0.975, 1.0], dtype=torch.float64)
    scores = normal_score(Noise(1, "uniform"), u)
    np.testing.assert_allclose(scores[1:4], [-1.95996, 0, 1.95996], atol=1e-4)
    assert torch.isfinite(scores).all()
    assert normal_score(Noise(1, "normal"), u) is u


def test_a_missing_count_with_children_has_gradients_in_every_mode():
    """A relaxed count lies between whole numbers: its own noise cannot be differentiated, its family can."""
    model = otp.Model(otp.Graph([("n", "x")]), {"n": m.Poisson(), "x": m.Normal()})
    table = pd.DataFrame({"n": RNG.poisson(4.0, 40), "x": RNG.normal(size=40)}, dtype=float)
    table.loc[:12, "n"] = np.nan
    batch = encode(table, Schema.of(model.spaces, model.graph), hidden=())
    for noise in ("sampled", "abducted", "marginal"):
        (backward,) = Drawn(hidden_layers=()).maps(model.structure, batch)
        phi = {key: value.requires_grad_() for key, value in backward.init(1, torch.Generator()).items()}
        theta = {k: torch.zeros(1, *p.shape).double().requires_grad_() for k, p in model.structure.parameters().items()}
        settings = options(noise=noise, eta=1.0, eps=0.5)
        terms = terms_of(model.structure, [backward], theta, phi, batch, Streams([0]), settings)
        terms.total.sum().backward()
        for value in (*theta.values(), phi["phi.joint.n.bias"]):
            assert torch.isfinite(value.grad).all()
            assert value.grad.abs().sum() > 0


# -- categories of any mechanism --------------------------------------------------------------------------------------


def category_terms(mechanism, params):
    """The entropic term of a hidden category below a seen one."""
    graph = otp.Graph([("a", "z"), ("z", "x")], nodes=["a", "z", "x"], hidden=["z"])
    model = otp.Model(graph, {"a": m.Categorical(3), "z": mechanism, "x": m.Normal()})
    model.set_params({"a": {"probs": [0.2, 0.3, 0.5]}, "z": params, "x": {"loc": [-2, 0, 2], "scale": [1, 1, 1]}})
    table = pd.DataFrame({"a": [0, 1, 2, 1], "x": [-2.0, 0.3, 1.8, 0.1]})
    batch = encode(table, Schema.of(model.spaces, model.graph), hidden=["z"])
    maps = Drawn(hidden_layers=(4,)).maps(model.structure, batch)
    phi = maps[0].init(2, torch.Generator().manual_seed(0))
    return terms_of(model.structure, maps, raw_of(model), phi, batch, Streams([0, 1]), options(eps=1.0))


def test_a_category_that_stays_or_moves_has_an_entropic_term():
    """It is that of the same table."""
    table = np.full((3, 3), 0.15) + 0.55 * np.eye(3)
    whole = category_terms(m.Categorical(3), {"probs": table})
    terms = category_terms(m.StayOrMove(3), {"stay": 0.7})
    torch.testing.assert_close(terms.entropic, whole.entropic)
    torch.testing.assert_close(terms.total, whole.total)


def test_a_category_of_a_user_needs_no_more_than_a_density():
    assert "log_probs" not in vars(Chances)
    graph = otp.Graph([("z", "x")], hidden=["z"])
    totals = []
    for mechanism, name in ((Chances(2), "chances"), (m.Categorical(2), "probs")):
        model = otp.Model(graph, {"z": mechanism, "x": m.Normal()})
        model.set_params({"z": {name: [0.3, 0.7]}, "x": {"loc": [-2.0, 2.0], "scale": [1.0, 1.0]}})
        batch = encode(pd.DataFrame({"x": [-2.0, 0.3, 1.8]}), Schema.of(model.spaces, model.graph), hidden=["z"])
        maps = Drawn(hidden_layers=()).maps(model.structure, batch)
        phi = maps[0].init(1, torch.Generator().manual_seed(0))
        settings = options(eps=1.0)
        totals.append(terms_of(model.structure, maps, raw_of(model), phi, batch, Streams([0]), settings).total)
    torch.testing.assert_close(totals[0], totals[1])


def test_a_chain_that_stays_or_moves_is_fitted_by_adam():
    graph = otp.Graph([("a", "z"), ("z", "x")], nodes=["a", "z", "x"], hidden=["z"])
    model = otp.Model(graph, {"a": m.Categorical(2), "z": m.StayOrMove(2), "x": m.Normal()})
    rows = RNG.integers(0, 2, 60)
    table = pd.DataFrame({"a": rows, "x": 4.0 * rows + RNG.normal(size=60)})
    method = otp.Method("learned", Objective(eps=1.0), Drawn(noise="marginal"), Adam(steps=5))
    with pytest.warns(otp.ConvergenceWarning):
        result = otp.fit(model, table, method=method, restarts=1)
    assert np.isfinite(result.loss)


# -- minibatches of a table in parts ----------------------------------------------------------------------------------

TOTAL, HELD, SEED = 1000, 100, 7


def numbered(rows):
    """A batch whose values are the numbers of its rows."""
    value = rows.double().reshape(1, -1, 1)
    return Batch({"x": value}, {"x": torch.ones_like(value, dtype=torch.bool)}, torch.ones(1, len(rows)).double())


def pools(number=4, read=None):
    def picked(rows):
        if read is not None:
            read.append(rows)
        return numbered(rows)

    return Pools(numbered(torch.arange(HELD)), picked, TOTAL, number, SEED)


def at(made, progress):
    return made.at(progress).values["x"][0, :, 0].long()


def test_shares_of_the_steps_have_rows_of_their_own():
    made = pools()
    assert torch.equal(at(made, 0.0), torch.arange(HELD))
    assert torch.equal(at(made, 0.249), torch.arange(HELD))
    for progress, which in [(0.25, 1), (0.499, 1), (0.5, 2), (0.75, 3), (0.9999, 3), (1.0, 3)]:
        assert torch.equal(at(made, progress), random_part(TOTAL, HELD, SEED + which))
        assert len(at(made, progress).unique()) == HELD


def test_rows_are_read_once_while_they_serve_and_again_when_asked_for_again():
    read = []
    made = pools(read=read)
    for progress in (0.3, 0.4, 0.6, 0.7, 0.3):
        at(made, progress)
    assert len(read) == 3
    assert torch.equal(read[0], read[2])
    assert len(made.last) == 1


def test_all_parts_of_a_table_have_the_same_chance():
    made = pools(number=40)
    counts = torch.zeros(TOTAL)
    for which in range(1, 40):
        counts[at(made, (which + 0.5) / 40)] += 1
    assert counts.sum() == 39 * HELD
    quarters = counts.reshape(4, -1).sum(1)  # 975 each, with a standard deviation of 26
    assert (quarters - 975).abs().max() < 100


def test_as_many_pools_as_rows_are_drawn():
    assert pools_for(10, 5, 100) == 1
    assert pools_for(10, 10, 100) == 1
    assert pools_for(11, 10, 100) == 2
