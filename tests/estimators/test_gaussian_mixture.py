"""The estimator keeps scikit-learn's contract, and agrees with its GaussianMixture where both apply."""

import warnings

import numpy as np
import pytest
from scipy import stats
from sklearn.base import clone
from sklearn.mixture import GaussianMixture as Peer
from sklearn.utils.estimator_checks import parametrize_with_checks

import otpdag as otp
from experiments.metrics import match_states
from otpdag.estimators import GaussianMixture

# checks that do not apply, and why
EXPECTED_FAILURES: dict[str, str] = {}


@parametrize_with_checks(
    [GaussianMixture(random_state=0), GaussianMixture(2, covariance_type="diag", n_init=1, random_state=0)],
    expected_failed_checks=lambda estimator: EXPECTED_FAILURES,
)
def test_contract_of_scikit_learn(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otp.ConvergenceWarning)  # some checks fit ten rows of noise
        check(estimator)


# -- agreement with scikit-learn ---------------------------------------------------------------------------------------


def draw(n=600, seed=0):
    """Three components that overlap a little, with correlated coordinates."""
    rng = np.random.default_rng(seed)
    means = np.array([[0.0, 0.0], [4.0, 1.0], [1.0, 5.0]])
    factors = np.array([[[1.0, 0.0], [0.6, 0.8]], [[0.7, 0.0], [-0.5, 0.9]], [[1.2, 0.0], [0.0, 0.5]]])
    z = rng.choice(3, n, p=[0.5, 0.3, 0.2])
    return means[z] + np.einsum("nij,nj->ni", factors[z], rng.normal(size=(n, 2)))


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
def test_estimates_are_those_of_scikit_learn(kind):
    X = draw()
    ours = GaussianMixture(3, covariance_type=kind, random_state=0).fit(X)
    peer = Peer(3, covariance_type=kind, n_init=5, tol=1e-9, max_iter=2000, random_state=0).fit(X)
    order = match_states(ours.means_, peer.means_)
    np.testing.assert_allclose(ours.means_, peer.means_[order], atol=2e-3)
    np.testing.assert_allclose(ours.weights_, peer.weights_[order], atol=2e-3)
    expected = peer.covariances_ if kind == "tied" else peer.covariances_[order]
    np.testing.assert_allclose(ours.covariances_, expected, atol=5e-3)
    assert ours.score(X) == pytest.approx(peer.score(X), abs=1e-4)
    assert ours.lower_bound_ == pytest.approx(ours.score(X))
    np.testing.assert_allclose(ours.predict_proba(X), peer.predict_proba(X)[:, order], atol=5e-3)
    assert (ours.bic(X), ours.aic(X)) == pytest.approx((peer.bic(X), peer.aic(X)), abs=0.5)
    assert ours.converged_
    assert ours.n_iter_ >= 1


@pytest.mark.parametrize("kind", ["full", "diag", "spherical"])
def test_one_component_and_one_feature(kind):
    X = draw()
    one = GaussianMixture(covariance_type=kind).fit(X)
    np.testing.assert_allclose(one.means_[0], X.mean(0), atol=1e-4)
    assert one.weights_.tolist() == [1.0]
    assert not one.predict(X).any()
    column = GaussianMixture(2, covariance_type=kind, random_state=0).fit(X[:, :1])
    assert column.means_.shape == (2, 1)
    assert column.covariances_.shape == {"full": (2, 1, 1), "diag": (2, 1), "spherical": (2,)}[kind]


# -- what scikit-learn's does not do -----------------------------------------------------------------------------------


def test_known_weights_and_covariances_are_kept():
    X, known = draw(), np.stack([np.eye(2), 0.5 * np.eye(2), np.diag([1.4, 0.3])])
    fixed = GaussianMixture(3, covariances=known, weights=[0.2, 0.5, 0.3], random_state=0).fit(X)
    np.testing.assert_allclose(fixed.covariances_, known)
    np.testing.assert_allclose(fixed.weights_, [0.2, 0.5, 0.3])
    scalar = GaussianMixture(3, covariance_type="spherical", covariances=1.0, random_state=0).fit(X)
    np.testing.assert_allclose(scalar.covariances_, np.ones(3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "diag"])
def test_missing_cells_are_integrated_out(kind):
    X = draw(3000)
    holes = np.random.default_rng(1).random(X.shape) < 0.15
    complete, partial = (
        GaussianMixture(3, covariance_type=kind, random_state=0).fit(x) for x in (X, np.where(holes, np.nan, X))
    )
    np.testing.assert_allclose(partial.means_, complete.means_, atol=0.12)
    np.testing.assert_allclose(partial.covariances_, complete.covariances_, atol=0.25)
    row = np.array([[1.0, np.nan]])
    covariances = complete.covariances_ if kind == "full" else np.stack([np.diag(c) for c in complete.covariances_])
    density = stats.norm.pdf(1.0, complete.means_[:, 0], np.sqrt(covariances[:, 0, 0])) * complete.weights_
    assert complete.score_samples(row)[0] == pytest.approx(np.log(density.sum()))
    np.testing.assert_allclose(complete.predict_proba(row)[0], density / density.sum())
    np.testing.assert_allclose(complete.predict_proba([[np.nan, np.nan]])[0], complete.weights_)


def test_missing_cells_follow_the_seen_ones_of_a_correlated_row():
    rng = np.random.default_rng(0)
    X = rng.multivariate_normal([0.0, 0.0], [[1.0, 0.9], [0.9, 1.0]], 2000)
    model = GaussianMixture().fit(X).model_
    filled = model.impute({"x": np.array([[2.0, np.nan], [np.nan, -2.0]])}, draws=2000)
    np.testing.assert_allclose(filled.to_numpy(), [[2.0, 1.8], [-1.8, -2.0]], atol=0.1)


def test_a_weight_is_a_repetition_and_zero_is_absence():
    X = draw(300)
    weight = np.random.default_rng(0).integers(0, 4, len(X))
    weighted = GaussianMixture(3, random_state=0).fit(X, sample_weight=weight)
    repeated = GaussianMixture(3, random_state=0).fit(np.repeat(X, weight, axis=0))
    np.testing.assert_allclose(weighted.means_, repeated.means_)
    np.testing.assert_allclose(weighted.covariances_, repeated.covariances_)
    shuffled = GaussianMixture(3, random_state=0).fit(X[::-1], sample_weight=weight[::-1])
    np.testing.assert_allclose(weighted.means_, shuffled.means_)


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
def test_no_component_falls_below_the_floor(kind):
    X = np.concatenate(
        [np.full((20, 2), 5.0) + 1e-9 * np.arange(20)[:, None], np.random.default_rng(0).normal(size=(80, 2))]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otp.ConvergenceWarning)
        found = GaussianMixture(3, covariance_type=kind, reg_covar=1e-3, random_state=0).fit(X)
    matrices = {
        "full": lambda c: c,
        "tied": lambda c: c[None],
        "diag": lambda c: np.stack([np.diag(v) for v in c]),
        "spherical": lambda c: np.stack([v * np.eye(2) for v in c]),
    }[kind](found.covariances_)
    assert np.linalg.eigvalsh(matrices).min() >= 0.99 * 1e-3 * X.var(0).min()
    assert np.isfinite(found.score(X))


def test_sampling_is_determined_and_follows_the_mixture():
    mixture = GaussianMixture(3, random_state=0).fit(draw())
    rows, labels = mixture.sample(4000)
    again, _ = mixture.sample(4000)
    other, _ = mixture.sample(4000, random_state=5)
    np.testing.assert_array_equal(rows, again)
    assert not np.array_equal(rows, other)
    np.testing.assert_allclose(np.bincount(labels) / 4000, mixture.weights_, atol=0.03)
    for k in range(3):
        np.testing.assert_allclose(np.cov(rows[labels == k].T), mixture.covariances_[k], atol=0.15)


@pytest.mark.slow
def test_methods_and_clones():
    X = draw(400)
    mixture = GaussianMixture(3, method=otp.transport(), covariance_type="full", n_init=2, max_iter=60, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otp.ConvergenceWarning)
        found = clone(mixture).fit(X)
        likely = clone(mixture).set_params(method="auto").fit(X)
    assert found.result_.method.name == "transport"
    np.testing.assert_allclose(found.means_, likely.means_, atol=0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_components": 0}, "n_components must be a whole number of at least 1; got 0"),
        ({"n_init": 1.5}, "n_init must be a whole number"),
        (
            {"covariance_type": "round"},
            "covariance_type must be one of 'full', 'tied', 'diag', 'spherical'; got 'round'",
        ),
        ({"reg_covar": -1.0}, "reg_covar must be a number of at least 0; got -1.0"),
        ({"weights": [1.0]}, r"weights must have shape \(2,\); got \(1,\)"),
        ({"covariances": np.ones(3)}, r"covariances must have a shape that broadcasts to \(2, 2, 2\)"),
        ({"covariance_type": "diag", "covariances": -1.0}, "covariances must be positive"),
        ({"method": "magic"}, "method must be"),
    ],
)
def test_bad_arguments_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        GaussianMixture(**{"n_components": 2, **settings}).fit(draw(50))


def test_rows_without_weight_are_refused():
    with pytest.raises(ValueError, match="at least one non-zero"):
        GaussianMixture(2).fit(draw(50), sample_weight=np.zeros(50))
