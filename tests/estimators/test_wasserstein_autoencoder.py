"""Wasserstein auto-encoders: reconstruction beside PCA, latents beside the prior, and what is accepted."""

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from sklearn import exceptions
from sklearn.decomposition import PCA
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from otpdag import mechanisms as m
from otpdag.divergences import Energy
from otpdag.errors import DataError, ModelError, NotFittedError
from otpdag.estimators import WassersteinAutoencoder

SMALL = {"hidden": (32,), "n_epochs": 40, "batch_size": 64, "learning_rate": 3e-3, "random_state": 0}


def plane(count=400, seed=0):
    """Rows near a plane in ten dimensions."""
    rng = np.random.default_rng(0)
    axes = rng.normal(size=(2, 10))
    rng = np.random.default_rng([seed, 1])
    return rng.uniform(-2, 2, (count, 2)) @ axes + 0.1 * rng.normal(size=(count, 10))


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["mmd", "sliced", "sinkhorn", Energy()])
def test_latents_follow_the_prior_and_rows_are_rebuilt(divergence):
    # uniform rows: without the divergence no network would make normal latents of them
    made = WassersteinAutoencoder(2, divergence=divergence, eta=1.0, **SMALL).fit(plane())
    unseen = plane(300, seed=1)
    latents = made.transform(unseen)
    pca = PCA(2).fit(plane())
    error = np.square(made.inverse_transform(latents) - unseen).mean()
    flat = np.square(pca.inverse_transform(pca.transform(unseen)) - unseen).mean()
    assert flat < error < 0.15 * unseen.var()
    assert error == pytest.approx(-made.score(unseen), rel=1e-4)
    for axis in range(2):
        assert kstest(latents[:, axis], "norm").statistic < 0.15


def test_samples_look_like_the_data():
    made = WassersteinAutoencoder(2, eta=1.0, **SMALL).fit(plane())
    drawn = made.sample(2000, seed=1)
    assert drawn.shape == (2000, 10)
    assert np.allclose(np.cov(drawn.T), np.cov(plane().T), atol=0.35 * np.abs(np.cov(plane().T)).max())
    assert np.array_equal(drawn, made.sample(2000, seed=1))
    assert made.sample_latents(5000).std() == pytest.approx(1, abs=0.03)


def test_another_prior():
    prior = m.Normal(2, loc=3.0, scale=0.5)
    made = WassersteinAutoencoder(2, prior=prior, divergence="sliced", eta=10.0, **SMALL).fit(plane())
    latents = made.transform(plane())
    assert np.allclose(latents.mean(0), 3, atol=0.1)
    assert np.allclose(latents.std(0), 0.5, atol=0.1)
    with pytest.raises(ModelError, match="prior must have n_components=2 numbers"):
        WassersteinAutoencoder(2, prior=m.Normal(3), **SMALL).fit(plane())


def test_images_own_networks_and_a_file(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (50, 8, 8, 3), dtype=np.uint8)

    def networks():
        return {
            "encoder": nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.Flatten(), nn.Linear(16, 2)),
            "decoder": nn.Linear(2, 192),
        }

    made = WassersteinAutoencoder(2, **SMALL | {"n_epochs": 2}, **networks()).fit(images)
    assert made.transform(images).shape == (50, 2)
    assert made.sample(3).shape == (3, 8, 8, 3)
    made.save(tmp_path / "own.otp")
    with pytest.raises(DataError, match="pass encoder"):
        WassersteinAutoencoder.load(tmp_path / "own.otp")
    again = WassersteinAutoencoder.load(tmp_path / "own.otp", **networks())
    assert np.array_equal(again.transform(images), made.transform(images))


def test_a_file_holds_prior_and_networks(tmp_path):
    made = WassersteinAutoencoder(2, prior=m.Normal(2), **SMALL | {"n_epochs": 2}).fit(plane(50))
    made.save(tmp_path / "wae.otp")
    again = WassersteinAutoencoder.load(tmp_path / "wae.otp")
    assert np.array_equal(again.transform(plane(9)), made.transform(plane(9)))
    assert np.array_equal(again.sample(4), made.sample(4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_components": 0}, "n_components must be a number of at least 1; got 0"),
        ({"divergence": "kl"}, "divergence that is named must be one of 'mmd', 'sliced', 'sinkhorn'; got 'kl'"),
        ({"encoder": nn.Linear(10, 3)}, r"must map \(64, 10\) to \(64, 2\); got \(64, 3\)"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ModelError, match=message):
        WassersteinAutoencoder(**{"n_components": 2} | SMALL | settings).fit(plane())


def test_data_that_make_no_sense_are_refused():
    with pytest.raises(DataError, match="a minimum of 2 is required"):
        WassersteinAutoencoder(2, **SMALL).fit(plane(1))
    with pytest.raises(DataError, match=r"NaN|infinity"):
        WassersteinAutoencoder(2, **SMALL).fit(np.full((5, 3), np.nan))
    with pytest.raises(NotFittedError, match="call fit"):
        WassersteinAutoencoder(2).transform(plane())
    made = WassersteinAutoencoder(2, **SMALL | {"n_epochs": 1}).fit(torch.as_tensor(plane(20)))
    with pytest.raises(DataError, match="X has 9 features, but WassersteinAutoencoder is expecting 10"):
        made.transform(plane()[:, :9])
    with pytest.raises(DataError, match=r"\(n, 2\); got \(3, 4\)"):
        made.inverse_transform(np.zeros((3, 4)))


@parametrize_with_checks([WassersteinAutoencoder(1, hidden=(4,), n_epochs=1)])
def test_contract_of_scikit_learn(estimator, check):
    check(estimator)


def test_set_output_and_no_seed():
    made = WassersteinAutoencoder(2, **{**SMALL, "n_epochs": 1, "random_state": None}).set_output(transform="pandas")
    with pytest.raises(exceptions.NotFittedError, match="this WassersteinAutoencoder is not fitted yet"):
        made.transform(plane(50))
    latents = made.fit_transform(plane(50))
    assert list(latents.columns) == ["wassersteinautoencoder0", "wassersteinautoencoder1"]
