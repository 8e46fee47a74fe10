"""Log-densities, distribution functions and quantiles against SciPy and torch.distributions."""

import numpy as np
import pytest
import torch
from scipy import special, stats

from otpdag import mechanisms as m
from otpdag.mechanisms import quantiles
from otpdag.spaces import Discrete, Real, Simplex

PARENTS = (("a", Discrete(2)), ("r", Real(1)))


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def table(n=40, seed=0):
    """Parents of a node: a category and a number."""
    rng = np.random.default_rng(seed)
    index, number = rng.integers(2, size=n), rng.normal(size=n)
    parents = {
        "a": torch.nn.functional.one_hot(torch.tensor(index), 2).double()[None],
        "r": tensor(number)[None, :, None],
    }
    return index, number, parents


def both(mechanism, params, parents=PARENTS):
    bound = mechanism.setup(m.Family("x", parents))
    return bound, {name: tensor(value)[None] for name, value in params.items()}


SLOPES = {"weight": [[0.7]]}
SCALAR = {
    "Normal": (
        m.Normal(),
        {"loc": [[1.0], [-2.0]], "scale": [[0.5], [2.0]]},
        lambda a, r: stats.norm(np.array([1.0, -2.0])[a] + 0.7 * r, np.array([0.5, 2.0])[a]),
    ),
    "LogNormal": (
        m.LogNormal(),
        {"loc": [[1.0], [-2.0]], "scale": [[0.5], [2.0]]},
        lambda a, r: stats.lognorm(np.array([0.5, 2.0])[a], scale=np.exp(np.array([1.0, -2.0])[a] + 0.7 * r)),
    ),
    "StudentT": (
        m.StudentT(),
        {"loc": [[1.0], [-2.0]], "scale": [[0.5], [2.0]], "df": [[3.3]]},
        lambda a, r: stats.t(3.3, np.array([1.0, -2.0])[a] + 0.7 * r, np.array([0.5, 2.0])[a]),
    ),
    "Gamma": (
        m.Gamma(),
        {"log_mean": [[1.0], [-1.0]], "shape": [[0.4], [7.0]]},
        lambda a, r: stats.gamma(
            np.array([0.4, 7.0])[a],
            scale=np.exp(np.array([1.0, -1.0])[a] + 0.7 * r) / np.array([0.4, 7.0])[a],
        ),
    ),
    "Beta": (
        m.Beta(),
        {"logit_mean": [[1.0], [-1.0]], "concentration": [[2.5], [9.0]]},
        lambda a, r: stats.beta(
            special.expit(np.array([1.0, -1.0])[a] + 0.7 * r) * np.array([2.5, 9.0])[a],
            special.expit(-np.array([1.0, -1.0])[a] - 0.7 * r) * np.array([2.5, 9.0])[a],
        ),
    ),
    "Poisson": (
        m.Poisson(),
        {"log_rate": [[1.0], [3.0]]},
        lambda a, r: stats.poisson(np.exp(np.array([1.0, 3.0])[a] + 0.7 * r)),
    ),
    "NegativeBinomial": (
        m.NegativeBinomial(),
        {"log_rate": [[1.0], [3.0]], "dispersion": [[0.8], [5.0]]},
        lambda a, r: stats.nbinom(
            np.array([0.8, 5.0])[a],
            1 / (1 + np.exp(np.array([1.0, 3.0])[a] + 0.7 * r) / np.array([0.8, 5.0])[a]),
        ),
    ),
}


@pytest.mark.parametrize("name", SCALAR)
def test_scalar_mechanisms_agree_with_scipy(name):
    mechanism, params, law = SCALAR[name]
    bound, params = both(mechanism, {**params, **SLOPES})
    index, number, parents = table()
    reference = law(index, number)
    u = np.random.default_rng(1).uniform(size=len(index))
    value = reference.ppf(u)
    column = tensor(value)[None, :, None]
    log_density = reference.logpmf if bound.space.is_countable else reference.logpdf
    np.testing.assert_allclose(bound.log_prob(params, column, parents)[0], log_density(value), rtol=1e-9)
    noise = stats.norm.ppf(u) if bound.noise.kind == "normal" else u
    np.testing.assert_allclose(bound.forward(params, parents, tensor(noise)[None, :, None])[0, :, 0], value, rtol=1e-9)
    if name != "StudentT":
        np.testing.assert_allclose(bound.mean(params, parents)[0, :, 0], reference.mean(), rtol=1e-9)
    if bound.space.is_countable:
        top = bound.abduct(params, column, parents, torch.ones(1, len(u), 1).double())[0, :, 0]
        bottom = bound.abduct(params, column, parents, torch.zeros(1, len(u), 1).double())[0, :, 0]
        np.testing.assert_allclose(top, reference.cdf(value), rtol=1e-7)
        np.testing.assert_allclose(bottom, reference.cdf(value - 1), rtol=1e-7, atol=1e-9)
    else:
        np.testing.assert_allclose(bound.abduct(params, column, parents, None)[0, :, 0], noise, atol=1e-9)


def test_categorical_agrees_with_torch():
    probs = [[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]]
    bound, params = both(m.Categorical(3), {"probs": probs}, PARENTS[:1])
    index, _, parents = table()
    value = torch.arange(40) % 3
    wanted = torch.distributions.Categorical(tensor(probs)[torch.tensor(index)]).log_prob(value)
    one_hot = torch.nn.functional.one_hot(value, 3).double()[None]
    torch.testing.assert_close(bound.log_prob(params, one_hot, {"a": parents["a"]})[0], wanted)


def test_logit_agrees_with_torch():
    logits, weight = [[0.2, 0.3, -0.5], [1.0, 0.0, -1.0]], [[0.5, -1.0, 0.5]]
    bound, params = both(m.Categorical(3), {"logits": logits, "weight": weight})
    index, number, parents = table()
    value = torch.arange(40) % 3
    eta = tensor(logits)[torch.tensor(index)] + tensor(number)[:, None] * tensor(weight)
    wanted = torch.distributions.Categorical(logits=eta).log_prob(value)
    one_hot = torch.nn.functional.one_hot(value, 3).double()[None]
    torch.testing.assert_close(bound.log_prob(params, one_hot, parents)[0], wanted)


def test_dirichlet_agrees_with_torch():
    a = tensor([0.3, 1.0, 4.0])
    bound, params = both(m.Dirichlet(3), {"concentration": [a.tolist()]}, ())
    law = torch.distributions.Dirichlet(a)
    torch.manual_seed(0)
    value = law.sample((50,))
    torch.testing.assert_close(bound.log_prob(params, value[None], {})[0], law.log_prob(value))
    torch.testing.assert_close(bound.mean(params, {})[0, 0], law.mean)


def test_dirichlet_with_missing_cells_is_the_marginal():
    bound, params = both(m.Dirichlet(3), {"concentration": [[0.5, 1.5, 4.0]]}, ())
    value = tensor([[[0.2, 0.3, 0.5]]])
    one = bound.log_prob(params, value, {}, torch.tensor([[[True, False, False]]]))
    np.testing.assert_allclose(one, [[stats.beta(0.5, 5.5).logpdf(0.2)]], rtol=1e-9)
    # the last cell follows from the others, so that its absence changes nothing
    two = bound.log_prob(params, value, {}, torch.tensor([[[True, True, False]]]))
    torch.testing.assert_close(two, bound.log_prob(params, value, {}))


def test_a_completed_dirichlet_follows_the_conditional():
    bound, params = both(m.Dirichlet(3), {"concentration": [[0.5, 1.5, 4.0]]}, ())
    value = tensor([[[0.2, torch.nan, torch.nan]]]).expand(1, 4000, 3)
    noise = torch.rand(1, 4000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = bound.complete(params, value, {}, torch.tensor([[[True, False, False]]]), noise)[0]
    assert (found[:, 0] == 0.2).all()
    assert stats.kstest(found[:, 1] / 0.8, stats.beta(1.5, 4.0).cdf).pvalue > 1e-4


def test_a_completed_multinomial_follows_the_conditional():
    bound, params = both(m.Multinomial(3, total=10), {"probs": [[0.2, 0.3, 0.5]]}, ())
    value = tensor([[[4.0, torch.nan, torch.nan]]]).expand(1, 4000, 3)
    noise = torch.rand(1, 4000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = bound.complete(params, value, {}, torch.tensor([[[True, False, False]]]), noise)[0]
    assert (found.sum(-1) == 10).all()
    seen = np.bincount(found[:, 1].int(), minlength=7)
    assert stats.chisquare(seen, 4000 * stats.binom(6, 0.3 / 0.8).pmf(np.arange(7))).pvalue > 1e-4


def test_dirichlet_draws_survive_concentrations_that_underflow():
    bound, params = both(m.Dirichlet(3, concentration=1e-4), {}, ())
    params = bound.natural({})
    value = bound.forward(params, {}, torch.rand(1, 200, 3, generator=torch.Generator().manual_seed(0)).double())
    assert torch.isfinite(value).all()
    torch.testing.assert_close(value.sum(-1), torch.ones(1, 200).double())


@pytest.mark.parametrize(
    ("parents", "params", "probs"),
    [
        ((), {"probs": [[0.2, 0.3, 0.5]]}, [0.2, 0.3, 0.5]),
        ((("t", Simplex(2)),), {"topics": [[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]]}, [0.36, 0.3, 0.34]),
        (
            (("r", Real(1)),),
            {"logits": [[0.1, 0.2, 0.3]], "weight": [[1.0, 0.0, -1.0]]},
            special.softmax([0.7, 0.2, -0.3]),
        ),
    ],
    ids=["probs", "topics", "logits"],
)
def test_multinomial_agrees_with_scipy(parents, params, probs):
    bound, params = both(m.Multinomial(3, total=6), params, parents)
    values = {"t": tensor([[[0.6, 0.4]]]), "r": tensor([[[0.6]]])}
    values = {name: values[name] for name, _ in parents}
    counts = [[i, j, 6 - i - j] for i in range(7) for j in range(7 - i)]
    law = stats.multinomial(6, probs)
    found = bound.log_prob(params, tensor(counts)[None], values)[0]
    np.testing.assert_allclose(found, law.logpmf(counts), rtol=1e-9)
    np.testing.assert_allclose(bound.mean(params, values)[0, 0], law.mean(), rtol=1e-9)
    noise = torch.rand(1, 20_000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = bound.forward(params, values, noise)[0]
    assert (drawn.sum(-1) == 6).all()
    seen = [(drawn == tensor(count)).all(-1).sum().item() for count in counts]
    assert stats.chisquare(seen, 20_000 * np.exp(law.logpmf(counts))).pvalue > 1e-4
    normal = torch.randn(1, 20_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    relaxed = bound.relaxed(params, values, normal, 1.0)[0].numpy()
    np.testing.assert_allclose(relaxed.mean(0), law.mean(), atol=0.05)
    np.testing.assert_allclose(np.cov(relaxed.T), law.cov(), atol=0.06)
    np.testing.assert_allclose(relaxed.sum(-1), 6, rtol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 9])
def test_multinomial_noise_comes_back_whatever_the_size_of_the_tree(size):
    bound = m.Multinomial(size, total=20).setup(m.Family("x"))
    params = bound.natural({"probs": torch.randn(2, 1, size, generator=torch.Generator().manual_seed(0)).double()})
    noise = torch.rand(2, 30, size - 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    value = bound.forward(params, {}, noise)
    back = bound.abduct(params, value, {}, torch.full_like(noise, 0.5))
    assert torch.equal(bound.forward(params, {}, back), value)


def test_multinomial_with_missing_cells_renormalises():
    bound, params = both(m.Multinomial(3), {"probs": [[0.2, 0.3, 0.5]]}, ())
    mask = torch.tensor([[[True, False, True]]])
    found = bound.log_prob(params, tensor([[[2.0, 9.0, 3.0]]]), {}, mask)
    np.testing.assert_allclose(found, [[stats.binom(5, 0.2 / 0.7).logpmf(2)]], rtol=1e-9)


def test_multinomial_takes_its_total_from_a_parent():
    bound, params = both(m.Multinomial(2, total="n"), {"probs": [[0.2, 0.8]]}, (("n", Real(1)),))
    noise = torch.full((1, 3, 1), 0.5, dtype=torch.float64)
    value = bound.forward(params, {"n": tensor([[[3.0], [10.0], [0.0]]])}, noise)
    assert value.sum(-1).tolist() == [[3.0, 10.0, 0.0]]


# -- special functions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cdf", "quantile", "shapes"),
    [
        (quantiles.GAMMA.cdf, quantiles.GAMMA.quantile, [[0.5, 1.0, 30.0]]),
        (quantiles.BETA.cdf, quantiles.BETA.quantile, [[0.5, 1.0, 30.0], [2.0, 0.3, 20.0]]),
        (quantiles.STUDENT.cdf, quantiles.STUDENT.quantile, [[1.2, 4.0, 80.0]]),
    ],
    ids=["gamma", "beta", "student"],
)
def test_distribution_functions_and_quantiles_have_the_right_gradients(cdf, quantile, shapes):
    u = tensor([[0.03], [0.4], [0.95]]).requires_grad_()
    shapes = [tensor(shape).requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(quantile, (u, *shapes), eps=1e-6, atol=1e-4, rtol=1e-4)
    x = quantile(u, *shapes).detach().requires_grad_()
    assert torch.autograd.gradcheck(cdf, (x, *shapes), eps=1e-6, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cdf(x, *shapes), u.expand(3, 3))


def test_gradient_of_gamma_draws_is_that_of_torch():
    shape = torch.full((200,), 0.7, dtype=torch.float64).requires_grad_()
    u = torch.rand(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value = quantiles.GAMMA.quantile(u, shape)
    (found,) = torch.autograd.grad(value.sum(), shape)
    torch.testing.assert_close(found, torch._standard_gamma_grad(shape, value).detach(), rtol=1e-3, atol=1e-6)


def test_upper_tails_keep_their_gradient():
    # far out F is one to the last digit, and only the survival function still tells where
    df = tensor([3.0]).requires_grad_()
    x = quantiles.STUDENT.quantile(tensor([1 - 1e-13]), df)
    (found,) = torch.autograd.grad(x.sum(), df)
    step = 1e-4
    wanted = (stats.t.isf(1e-13, 3 + step) - stats.t.isf(1e-13, 3 - step)) / (2 * step)
    assert found.item() == pytest.approx(wanted, rel=1e-2)


@pytest.mark.parametrize("rate", [1e-6, 0.02, 1.0, 37.0, 5e4])
def test_poisson_quantiles_are_those_of_scipy(rate):
    u = np.r_[1e-15, np.random.default_rng(0).uniform(size=500), 1 - 1e-15]
    found = quantiles.poisson_quantile(tensor(u), tensor(rate))
    np.testing.assert_array_equal(found, np.maximum(stats.poisson.ppf(u, rate), 0))


def test_quantiles_at_the_ends_are_finite():
    ends = torch.tensor([0.0, 1.0])
    for bound in (m.StudentT(df=3.0), m.Gamma(), m.Beta(), m.Poisson(), m.NegativeBinomial()):
        bound = bound.setup(m.Family("x"))
        params = {
            name: torch.ones(1, *p.shape) if p.learned else torch.full((1, *p.shape), 3.0)
            for name, p in bound.declared().items()
        }
        value = bound.forward(params, {}, ends.reshape(1, 2, 1))
        assert torch.isfinite(value).all()
        assert torch.isfinite(bound.log_prob(params, value, {})).all()
