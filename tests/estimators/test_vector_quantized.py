"""Discrete auto-encoders: what they learn, what they accept, and that a run can be interrupted."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from torch import nn

from otpdag.errors import DataError, ModelError, NotFittedError
from otpdag.estimators import VectorQuantizedAutoencoder

SMALL = {
    "n_codes": 16,
    "code_dim": 8,
    "width": 16,
    "n_epochs": 20,
    "batch_size": 16,
    "learning_rate": 5e-3,
    "random_state": 0,
}


def tiles(count=160, seed=0):
    """Images (n, 8, 8, 1) of four tiles, each of one of eight brightnesses."""
    levels = np.random.default_rng(seed).integers(0, 8, (count, 2, 2))
    return (levels.repeat(4, 1).repeat(4, 2) * 36).astype(np.uint8)[..., None]


@pytest.fixture(scope="module")
def fitted():
    return VectorQuantizedAutoencoder(**SMALL).fit(tiles())


@pytest.mark.slow
def test_unseen_images_are_rebuilt_and_the_codebook_is_used(fitted):
    images = tiles(80, seed=1)
    codes = fitted.encode(images)
    assert codes.shape == (80, 4)
    assert codes.dtype == np.int64
    error = np.square(fitted.reconstruct(images) - images.astype(float)).mean()
    assert error < 0.1 * images.var()
    assert fitted.perplexity(images) > 10
    assert fitted.score(images) == pytest.approx(-error / 255**2, rel=1e-4)


def test_dark_and_bright_images_are_both_rebuilt():
    rng = np.random.default_rng(1)
    bright = rng.integers(0, 2, (300, 1, 1, 1))
    images = (60 + 140 * bright + rng.integers(0, 20, (300, 8, 8, 1))).astype(np.uint8)
    small = {"n_codes": 4, "code_dim": 4, "width": 8, "n_epochs": 10, "learning_rate": 5e-3, "random_state": 1}
    rebuilt = VectorQuantizedAutoencoder(**small).fit(images).reconstruct(images)
    assert np.square(rebuilt - images.astype(float)).mean() < 0.25 * images.var()  # 0.93 where images are given up


def test_codewords_weights_and_usage(fitted):
    assert fitted.codebook_.shape == fitted.scales_.shape == (16, 2)  # 16 codewords: four bits, two for each direction
    assert (fitted.scales_ > 0).all()
    assert fitted.weights_.shape == (4, 16)
    assert np.allclose(fitted.weights_.sum(1), 1, atol=1e-5)
    images = tiles(80, seed=1)
    usage = fitted.usage(images)
    assert usage.sum() == pytest.approx(1)
    assert np.exp(-(usage[usage > 0] * np.log(usage[usage > 0])).sum()) == pytest.approx(fitted.perplexity(images))
    assert fitted.usage().sum() == pytest.approx(1, abs=1e-5)


def test_codes_name_the_nearest_codeword_by_mahalanobis_distance(fitted):
    images = tiles(10, seed=2)
    with torch.no_grad():
        latents = fitted._map.latents(fitted.model_.fitted.phi, fitted.format_.rows(images).unsqueeze(0))
    points = latents[0].numpy().reshape(-1, 1, fitted.rank_)
    distance = np.square((points - fitted.codebook_) / fitted.scales_).sum(-1)
    assert (distance.argmin(1).reshape(10, 4) == fitted.encode(images)).mean() > 0.99


@pytest.mark.parametrize(
    "change",
    [lambda x: x, lambda x: x.transpose(0, 3, 1, 2), lambda x: x[..., 0], lambda x: torch.as_tensor(x)],
    ids=["last", "first", "none", "tensor"],
)
def test_layouts_are_read_alike(fitted, change):
    images = tiles(6, seed=3)
    assert (fitted.encode(change(images)) == fitted.encode(images)).all()


def test_rebuilt_images_look_like_those_that_were_fitted():
    images = tiles(40).transpose(0, 3, 1, 2) / 255.0
    short = VectorQuantizedAutoencoder(**SMALL | {"n_epochs": 1}).fit(images)
    rebuilt = short.reconstruct(images)
    assert rebuilt.shape == images.shape
    assert 0 <= rebuilt.min() <= rebuilt.max() <= 1
    whole = VectorQuantizedAutoencoder(**SMALL | {"n_epochs": 1}).fit(tiles(40)[..., 0])
    assert whole.reconstruct(tiles(3)[..., 0]).shape == (3, 8, 8)
    assert (short.encode(images) == whole.encode(tiles(40)[..., 0])).all()
    assert (short.encode(tiles(5)) == short.encode(images[:5])).all()  # bytes are bytes


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((8, 8)), r"\(n, height, width\).*got shape \(8, 8\)"),
        (np.zeros((32, 32, 3)), r"looks like one of them: pass images\[None\]"),
        (np.zeros((0, 8, 8)), "none of them 0"),
        (np.zeros((4, 8, 8, 5)), "1 or 3 channels"),
        (np.zeros((4, 3, 8, 3)), "could be either"),
        (np.full((4, 8, 8), np.nan), "finite"),
        (np.full((4, 8, 8), -1.0), "from 0 to 255 or from 0 to 1; got -1"),
        (np.full((4, 8, 8), 256.0), "from 0 to 255 or from 0 to 1"),
        (np.full((4, 8, 8), "a"), "must be numbers"),
        (np.zeros((4, 9, 8)), "multiples of 4; got 9 x 8"),
        (np.zeros((1, 8, 8)), "at least 2 to learn from; got 1"),
    ],
)
def test_images_that_make_no_sense_are_refused(images, message):
    with pytest.raises((DataError, ModelError), match=message):
        VectorQuantizedAutoencoder(**SMALL).fit(images)


def test_use_refuses_other_images_than_those_of_the_fit(fitted):
    assert fitted.encode(tiles(1)).shape == (1, 4)  # one image is enough here
    with pytest.raises(DataError, match=r"must have shape \(n, 8, 8, 1\), as in fit; got \(2, 12, 12, 1\)"):
        fitted.encode(np.zeros((2, 12, 12, 1)))
    short = VectorQuantizedAutoencoder(**SMALL | {"n_epochs": 1}).fit(tiles(20) / 255.0)
    with pytest.raises(DataError, match="must go up to 1, as in fit"):
        short.encode(tiles(2).astype(float))
    with pytest.raises(DataError, match=r"must have 4 positions"):
        fitted.decode(np.zeros((2, 5), dtype=int))
    with pytest.raises(DataError, match="from 0 to 15; got 0 to 16"):
        fitted.decode(np.array([[0, 1, 2, 16]]))
    with pytest.raises(NotFittedError, match="call fit"):
        VectorQuantizedAutoencoder().encode(tiles(2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_codes": 1}, "n_codes must be a number of at least 2; got 1"),
        ({"eta": -1.0}, "eta must be"),
        ({"rank": 9}, "rank must be from 1 to code_dim, 8; got 9"),
        ({"warm_up": 1.0}, "share below 1"),
        ({"balance": "all"}, "balance must be one of 'codebook', 'position'"),
        ({"noise": "none"}, "noise must be one of 'fixed', 'shared', 'image'"),
        ({"encoder": nn.Identity()}, "given together"),
        ({"encoder": nn.Flatten(), "decoder": nn.Identity()}, r"grid \(1, 8, h, w\)"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ModelError, match=message):
        VectorQuantizedAutoencoder(**SMALL | settings).fit(tiles(20))


def test_own_networks_and_a_file(tmp_path):
    def networks():
        return {"encoder": nn.Conv2d(1, 8, 4, 4), "decoder": nn.ConvTranspose2d(8, 1, 4, 4)}

    made = VectorQuantizedAutoencoder(**SMALL | {"n_epochs": 3}, **networks()).fit(tiles())
    assert made.grid_ == (2, 2)
    made.save(tmp_path / "own.otp")
    with pytest.raises(DataError, match="pass encoder and decoder"):
        VectorQuantizedAutoencoder.load(tmp_path / "own.otp")
    again = VectorQuantizedAutoencoder.load(tmp_path / "own.otp", **networks())
    assert np.array_equal(again.reconstruct(tiles(5)), made.reconstruct(tiles(5)))


@pytest.mark.parametrize(("rank", "length"), [(None, 2), (3, 3), (8, 8)])
def test_codewords_lie_in_as_many_directions_as_asked_for(tmp_path, rank, length):
    made = VectorQuantizedAutoencoder(**SMALL | {"n_epochs": 1, "rank": rank}).fit(tiles(40))
    assert made.rank_ == made.codebook_.shape[1] == length
    made.save(tmp_path / "codes.otp")
    again = VectorQuantizedAutoencoder.load(tmp_path / "codes.otp")
    assert np.array_equal(again.reconstruct(tiles(5)), made.reconstruct(tiles(5)))


def test_a_file_holds_the_whole(fitted, tmp_path):
    fitted.save(tmp_path / "codes.otp")
    again = VectorQuantizedAutoencoder.load(tmp_path / "codes.otp")
    images = tiles(9, seed=4)
    assert (again.encode(images) == fitted.encode(images)).all()
    assert np.array_equal(again.reconstruct(images), fitted.reconstruct(images))
    assert again.perplexity_ == fitted.perplexity_
    (tmp_path / "noise").write_bytes(b"no zip")
    with pytest.raises(DataError, match="is not a saved vector-quantised auto-encoder"):
        VectorQuantizedAutoencoder.load(tmp_path / "noise")


def test_a_run_that_was_interrupted_ends_where_it_would_have(tmp_path):
    settings = SMALL | {"n_epochs": 4}
    whole = VectorQuantizedAutoencoder(**settings).fit(tiles(64), checkpoint=tmp_path / "whole")
    seen = []
    part = VectorQuantizedAutoencoder(**settings)
    part.fit(tiles(64), checkpoint=tmp_path / "part", callbacks=[lambda record: seen.append(1) or len(seen) == 10])
    assert not part.result_.status.converged
    part.fit(tiles(64), checkpoint=tmp_path / "part")
    losses = [[record["loss"] for record in one.result_.history] for one in (part, whole)]
    assert losses[0] == losses[1]
    assert np.array_equal(part.codebook_, whole.codebook_)
    with pytest.raises(DataError, match="belongs to another run"):
        VectorQuantizedAutoencoder(**settings | {"width": 8}).fit(tiles(64), checkpoint=tmp_path / "part")


def test_the_seed_determines_everything():
    short = SMALL | {"n_epochs": 2}
    first, second = (VectorQuantizedAutoencoder(**short).fit(tiles(40)) for _ in range(2))
    assert np.array_equal(first.codebook_, second.codebook_)
    other = VectorQuantizedAutoencoder(**short | {"random_state": 1}).fit(tiles(40))
    assert not np.array_equal(first.codebook_, other.codebook_)
    assert clone(first).get_params() == first.get_params()


@pytest.mark.slow
def test_positions_of_their_own_are_balanced_each():
    made = VectorQuantizedAutoencoder(**SMALL | {"n_codes": 8, "balance": "position"}).fit(tiles())
    codes = made.encode(tiles(200, seed=5))
    for position in range(4):
        share = np.bincount(codes[:, position], minlength=8) / 200
        assert np.exp(-(share[share > 0] * np.log(share[share > 0])).sum()) > 4


def test_the_model_draws_images(fitted):
    drawn = fitted.model_.sample(5, seed=0)
    assert len(drawn) == 5
    assert drawn.filter(like="image").shape == (5, 64)
    assert set(np.unique(drawn.filter(like="code"))) <= set(range(16))
