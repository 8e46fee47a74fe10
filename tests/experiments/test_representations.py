"""The tables and figures of images run on any auto-encoder, and a resumed run fits nothing twice."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from experiments import figure_generated, figure_reconstructions, representations, table4, table5
from experiments.image_features import train_judge
from experiments.image_quality import psnr
from experiments.image_sets import ImageSet
from experiments.registry import Run, Scale, registered
from otpdag.errors import DataError


class Mosaic:
    """Grey levels of 4 x 4 patches: as plain as an auto-encoder with codes can be."""

    levels = 16

    def encode(self, images):
        n, height, width, _ = images.shape
        patches = images[..., 0].reshape(n, height // 4, 4, width // 4, 4).mean((2, 4))
        return np.minimum(patches * self.levels // 256, self.levels - 1).astype(np.int64).reshape(n, -1)

    def decode(self, codes):
        side = round(codes.shape[1] ** 0.5)
        values = (codes.reshape(-1, side, side) + 0.5) * 256 / self.levels
        return np.repeat(np.repeat(values, 4, 1), 4, 2)[..., None]

    def reconstruct(self, images):
        return self.decode(self.encode(images))


def blobs(rows, rng):
    """Bright squares at the left or the right, and which."""
    side = rng.integers(0, 2, rows)
    images = rng.integers(0, 40, (rows, 32, 32, 1))
    for image, right in zip(images, side, strict=True):
        top = rng.integers(2, 18)
        image[top : top + 12, 18 * right + 1 : 18 * right + 13] += 180
    return images.astype(np.uint8), side


@pytest.fixture
def made_up(monkeypatch):
    """All methods are the mosaic, all data sets are blobs; the list of what was fitted."""
    rng = np.random.default_rng(101)
    images = ImageSet("mnist", *blobs(80, rng), *blobs(60, rng), "made up")
    fitted = []

    def entry(name):
        def fit(given, size, seed, checkpoint):
            fitted.append(name)
            return Mosaic()

        return replace(representations.METHODS[name], fit=fit, needs=None)

    for name in representations.METHODS:
        monkeypatch.setitem(representations.METHODS, name, entry(name))
    small = replace(representations.QUICK, datasets=("mnist", "cifar10"), judge_epochs=1, prior_epochs=1, codes=16)
    monkeypatch.setattr(representations, "QUICK", small)
    for module in (representations, figure_reconstructions, figure_generated):
        monkeypatch.setattr(module, "images_of", lambda name, size, scale: replace(images, name=name))
    representations.judged_images.cache_clear()
    monkeypatch.setattr(figure_generated, "JUDGED", 50)
    return images, fitted


@pytest.mark.parametrize("method", ["vq_vae", "vq_vae_ema", "sq_vae", "ours"])
def test_every_method_makes_codes_and_images(method, tmp_path):
    images = ImageSet(
        "mnist", *blobs(40, np.random.default_rng(106)), *blobs(10, np.random.default_rng(107)), "made up"
    )
    size = replace(representations.QUICK, epochs=2, codes=8, dim=4, width=8)
    found = representations.part(Run(tmp_path, seed=101, scale=Scale.QUICK), images, method, size)
    assert found.rebuilt.shape == images.test.shape
    assert found.codes.shape == (10, 64)
    assert found.codes.max() < 8
    assert [path.suffix for path in (tmp_path / "parts").iterdir()] == [".npz"]  # no checkpoint is left
    again = representations.part(Run(tmp_path, seed=101, scale=Scale.QUICK, resume=True), images, method, size)
    np.testing.assert_array_equal(again.rebuilt, found.rebuilt)


def test_tables_are_measured_written_and_resumed(made_up, tmp_path):
    images, fitted = made_up
    table4.table4(Run(tmp_path, seed=101, scale=Scale.QUICK))
    assert fitted == ["vq_vae", "vq_vae_ema", "vq_ema_revived", "fsq", "ours", "paper"] * 2
    found = pd.read_csv(tmp_path / "table4.csv")
    assert found["latent"].unique().tolist() == ["8 x 8"]
    assert found["psnr"].to_numpy() == pytest.approx(
        psnr(Mosaic().reconstruct(images.test), images.test, peak=255), abs=0.1
    )
    assert (found["perplexity"] < 16).all()
    text = (tmp_path / "table4.md").read_text()
    assert "| CIFAR10 | VQ-VAE | 8 x 8 | 0.70 | 23.14 | 0.35 | 77.3 | 69.8 |" in text  # the paper's
    assert "80 + 60 images of made up" in text
    page = registered()["table4"].page(tmp_path)
    assert page.text.startswith(text)
    assert len(page.pictures) == 1
    table5.table5(Run(tmp_path, seed=101, scale=Scale.QUICK, resume=True))
    assert "feature distance (not LPIPS)" in text
    assert fitted[12:] == ["sq_vae"] * 2  # ours and the paper's were there
    table5.table5(Run(tmp_path, seed=102, scale=Scale.QUICK, resume=True))
    assert len(fitted) == 20  # another seed is another run


def test_a_method_whose_library_is_missing_is_left_out(made_up, tmp_path, monkeypatch, capsys):
    for name in ("vq_ema_revived", "fsq"):
        absent = replace(representations.METHODS[name], needs="no_such_library")
        monkeypatch.setitem(representations.METHODS, name, absent)
    table4.table4(Run(tmp_path, seed=103, scale=Scale.QUICK))
    assert made_up[1] == ["vq_vae", "vq_vae_ema", "ours", "paper"] * 2
    assert "it needs no_such_library, of the extra `bench`" in " ".join(capsys.readouterr().err.split())


def test_what_another_run_left_is_not_taken_and_a_part_is_written_in_one_step(made_up, tmp_path, monkeypatch):
    """A run that began after the parts in its folder were made, and went on, would report theirs for its own."""
    images, fitted = made_up
    size = replace(representations.QUICK, codes=16)
    earlier = Run(tmp_path, seed=101, scale=Scale.QUICK)
    representations.part(earlier, images, "fsq", size)
    kept = (tmp_path / "parts" / "mnist-fsq-quick-101.npz").read_bytes()
    unfinished = representations.checkpoint(earlier, images, "ours")
    unfinished.write_text("of the earlier run")
    later = replace(earlier, resume=True, begun=int(unfinished.stat().st_mtime) + 1)

    def full(file, **arrays):
        file.write(kept[:20])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez_compressed", full)
        with pytest.raises(DataError, match="No space left"):
            representations.part(later, images, "fsq", size)
    assert (tmp_path / "parts" / "mnist-fsq-quick-101.npz").read_bytes() == kept
    assert fitted == ["fsq", "fsq"]
    representations.fit(later, images, "ours", size)
    assert not unfinished.exists()
    representations.part(replace(later, begun=0), images, "fsq", size)
    assert fitted == ["fsq", "fsq", "ours"]  # what the run made itself is read


def test_sheets_of_reconstructions_are_drawn(made_up, tmp_path):
    figure_reconstructions.figure_reconstructions(Run(tmp_path, seed=101, scale=Scale.QUICK))
    for name in ("mnist", "cifar10"):
        assert (tmp_path / f"figure_reconstructions_{name}.png").stat().st_size > 5_000
    assert len(pd.read_csv(tmp_path / "figure_reconstructions.csv")) == 2 * 3 * 12


def test_generated_images_are_drawn_and_judged(made_up, tmp_path):
    figure_generated.figure_generated(Run(tmp_path, seed=101, scale=Scale.QUICK))
    assert (tmp_path / "figure_generated.png").stat().st_size > 5_000
    found = pd.read_csv(tmp_path / "figure_generated.csv").set_index("images")["nats_per_code"]
    assert found["from the prior"] < found["each position by itself"]  # patches of a square go together


def test_codes_drawn_by_themselves_keep_their_frequencies():
    codes = np.random.default_rng(103).choice(3, p=[0.7, 0.2, 0.1], size=(4000, 2))
    codes[:, 1] = codes[:, 0]
    drawn = figure_generated.independent(codes, 4000, 104)
    np.testing.assert_allclose(np.bincount(drawn[:, 1]) / 4000, [0.7, 0.2, 0.1], atol=0.03)
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.05
    entropy = -(np.array([0.7, 0.2, 0.1]) * np.log([0.7, 0.2, 0.1])).sum()
    assert figure_generated.independent_entropy(codes, codes, 3) == pytest.approx(entropy, abs=0.03)


def test_the_judge_learns_what_it_is_shown():
    images, labels = blobs(300, np.random.default_rng(105))
    assert train_judge(images, labels, epochs=2, seed=105).accuracy > 0.9
