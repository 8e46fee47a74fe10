"""EM against scikit-learn, and the E-step of Sinkhorn EM against POT."""

import numpy as np
import ot
import pytest
from scipy.special import softmax
from sklearn.mixture import GaussianMixture

from baselines import em, sinkhorn_em

WEIGHTS = np.array([[0.6, 0.4], [0.3, 0.7]])
VARIANCES = np.array([[[1.0, 2.0], [0.5, 1.0]], [[1.0, 1.0], [2.0, 1.5]]])


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    truth = np.array([[[0.0, 0.0], [2.0, 1.0]], [[1.0, -1.0], [0.0, 2.0]]])
    z = np.stack([rng.choice(2, 200, p=w) for w in WEIGHTS])
    data = np.take_along_axis(truth, z[..., None], 1) + rng.normal(size=(2, 200, 2))
    return data, data[:, :2].copy()


@pytest.mark.filterwarnings("ignore:Best performing initialization did not converge")
def test_one_step_is_that_of_scikit_learn(problem):
    data, starts = problem
    found = em.fit(data, means=starts, variances=VARIANCES, weights=WEIGHTS, steps=1)
    for sim in range(2):
        peer = GaussianMixture(
            2,
            covariance_type="diag",
            means_init=starts[sim],
            weights_init=WEIGHTS[sim],
            precisions_init=1 / VARIANCES[sim],
            max_iter=1,
            tol=0.0,
        ).fit(data[sim])
        np.testing.assert_allclose(found.params["means"][sim], peer.means_, rtol=1e-8)


def test_the_likelihood_never_falls_and_a_batch_equals_its_parts(problem):
    data, starts = problem
    steps = [em.fit(data, means=starts, variances=VARIANCES, weights=WEIGHTS, steps=s).objective for s in (0, 1, 5, 50)]
    assert (np.diff(np.stack(steps), axis=0) > 0).all()
    whole = em.fit(data, means=starts, variances=VARIANCES, weights=WEIGHTS, steps=20)
    part = em.fit(data[1:], means=starts[1:], variances=VARIANCES[1:], weights=WEIGHTS[1:], steps=20)
    np.testing.assert_allclose(whole.params["means"][1:], part.params["means"])
    assert whole.history["means"].shape == (21, 2, 2, 2)
    assert not whole.failed.any()


def test_the_plan_is_that_of_pot(problem):
    data, starts = problem
    log_density = em.log_densities(data, starts, VARIANCES)
    plan, objective, _ = sinkhorn_em.transport_plan(log_density, WEIGHTS, iterations=2000, tolerance=1e-12)
    for sim in range(2):
        rows = np.full(200, 1 / 200)
        peer = ot.sinkhorn(
            rows, WEIGHTS[sim], -log_density[sim].T, reg=1.0, method="sinkhorn_log", stopThr=1e-12, numItermax=5000
        )
        np.testing.assert_allclose(plan[sim].T, peer, atol=1e-9)
        entropy = (peer * np.log(peer / (rows[:, None] * WEIGHTS[sim]))).sum()
        assert -objective[sim] == pytest.approx(-(peer * log_density[sim].T).sum() + entropy, abs=1e-6)


def test_sinkhorn_em_keeps_the_weights_and_lowers_its_loss(problem):
    data, starts = problem
    settings = {"means": starts, "variances": VARIANCES, "weights": WEIGHTS}
    early, late = (sinkhorn_em.fit(data, **settings, steps=s) for s in (1, 40))
    assert (late.objective > early.objective).all()
    plan, _, _ = sinkhorn_em.transport_plan(em.log_densities(data, late.params["means"], VARIANCES), WEIGHTS)
    np.testing.assert_allclose(plan.sum(-1), WEIGHTS, atol=1e-6)
    share = softmax(em.log_densities(data, late.params["means"], VARIANCES) + np.log(WEIGHTS)[..., None], 1).mean(-1)
    assert np.abs(share - WEIGHTS).max() > 1e-4  # plain EM does not keep them
