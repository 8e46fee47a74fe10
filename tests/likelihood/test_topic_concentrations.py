"""Concentrations of shares: the likeliest ones, and those that pairs of topics tell."""

import numpy as np
import pytest
import torch
from scipy import optimize, sparse, special, stats

from otpdag.likelihood.topic_draws import (
    ALPHA_RANGE,
    WORD_RANGE,
    exact_alpha,
    newton_concentration,
    pair_concentration,
    word_concentration,
)


@pytest.mark.parametrize("truth", [[0.3, 0.3], [0.1, 2.0, 7.0], [40.0, 1.0, 5.0, 0.5]])
def test_newtons_method_finds_the_likeliest_concentrations(truth):
    logs = np.log(np.random.default_rng(0).dirichlet(truth, 400) + 1e-300).mean(0)

    def cost(log_a):
        a = np.exp(log_a)
        return -(special.gammaln(a.sum()) - special.gammaln(a).sum() + (a - 1) @ logs)

    best = np.exp(optimize.minimize(cost, np.zeros(len(truth)), tol=1e-12).x)
    for begin in (0.05, 1.0, 30.0):
        start = torch.full((len(truth),), begin).double()
        np.testing.assert_allclose(newton_concentration(start, torch.as_tensor(logs), steps=60), best, rtol=1e-4)
    # what is likeliest at its own expected logarithms is where it is
    a = torch.tensor(truth).double()
    own = torch.digamma(a) - torch.digamma(a.sum())
    torch.testing.assert_close(newton_concentration(a, own, steps=1), a)


def test_concentrations_stay_within_bounds():
    even = torch.full((3,), 1 / 3).double().log()
    assert newton_concentration(torch.ones(3).double(), even, steps=60).tolist() == [ALPHA_RANGE[1]] * 3
    sharp = newton_concentration(torch.ones(2).double(), torch.full((2,), -1e6).double(), steps=60)
    assert sharp.tolist() == [ALPHA_RANGE[0]] * 2


@pytest.mark.parametrize("alpha", [[0.2, 0.5, 1.3], [3.0, 3.0, 3.0]])
def test_pairs_of_topics_tell_the_concentrations(alpha):
    alpha = np.array(alpha)
    total = alpha.sum()
    among = (np.outer(alpha, alpha) + np.diag(alpha)) / (total * (total + 1))  # E[shares shares'] of a Dirichlet
    np.testing.assert_allclose(pair_concentration(torch.as_tensor(17.0 * among)), alpha, rtol=1e-9)


def test_pairs_without_any_excess_are_of_even_shares():
    share = torch.tensor([0.25, 0.75]).double()
    found = pair_concentration(torch.outer(share, share))
    assert found[1].item() == ALPHA_RANGE[1]


def test_exact_concentrations_are_those_that_made_the_documents():
    rng = np.random.default_rng(1)
    alpha, topics = np.array([0.2, 0.6]), rng.dirichlet(np.full(30, 0.2), 2)
    shares = rng.dirichlet(alpha, 500)
    counts = sparse.csr_array(np.stack([rng.multinomial(60, share @ topics) for share in shares]).astype(float))
    found = exact_alpha(counts, torch.as_tensor(topics), torch.tensor([1.0, 1.0]).double(), np.random.default_rng(0))
    logs = np.log(shares + 1e-300).mean(0)
    best = newton_concentration(torch.ones(2).double(), torch.as_tensor(logs), steps=60).numpy()
    np.testing.assert_allclose(found, best, rtol=0.1)  # as well as from the shares themselves
    same = exact_alpha(counts / 2.0, torch.as_tensor(topics), torch.tensor([0.75, 0.5]), rng)
    assert same.tolist() == [0.75, 0.5]


def test_the_density_at_the_optimum_is_that_of_scipy():
    """Guards the cost above: the mean log-density of a Dirichlet in its mean logarithms."""
    a, x = np.array([0.5, 2.0]), np.array([0.3, 0.7])
    own = special.gammaln(a.sum()) - special.gammaln(a).sum() + (a - 1) @ np.log(x)
    assert own == pytest.approx(stats.dirichlet.logpdf(x, a))


@pytest.mark.parametrize("truth", [0.02, 0.3, 4.0])
def test_the_concentration_of_words_is_the_likeliest(truth):
    rng = np.random.default_rng(4)
    counts = np.stack([rng.multinomial(3000, rng.dirichlet(np.full(60, truth))) for _ in range(8)]).astype(float)

    def cost(log_a):
        a = np.exp(log_a)
        own = (special.gammaln(counts + a) - special.gammaln(a)).sum()
        return -own - (special.gammaln(60 * a) - special.gammaln(60 * a + counts.sum(1))).sum()

    best = np.exp(optimize.minimize_scalar(cost, bounds=(-8, 4), method="bounded", options={"xatol": 1e-8}).x)
    assert word_concentration(counts, 0.1, steps=2000) == pytest.approx(best, rel=1e-4)
    assert best == pytest.approx(truth, rel=0.3)


def test_the_concentration_of_words_stays_within_bounds():
    even = np.full((2, 50), 100.0)
    assert word_concentration(even, 1.0, steps=5000) == WORD_RANGE[1]
    single = np.zeros((2, 50))
    single[:, 0] = 1000
    assert word_concentration(single, 1.0, steps=5000) == WORD_RANGE[0]
