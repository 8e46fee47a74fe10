"""Image metrics against closed forms, scipy's filters and trusted packages."""

import numpy as np
import ot
import pytest
import torch
from scipy.ndimage import gaussian_filter

from experiments.image_quality import code_perplexity, feature_distance, fid, frechet_distance, lpips, psnr, ssim
from experiments.image_sets import load_images
from otpdag.errors import DataError


@pytest.fixture
def pair():
    """Smooth colour images and noisy copies of them, (4, 24, 20, 3)."""
    rng = np.random.default_rng(101)
    clean = gaussian_filter(rng.uniform(size=(4, 24, 20, 3)), (0, 2, 2, 0))
    clean = (clean - clean.min()) / (clean.max() - clean.min())
    return np.clip(clean + 0.1 * rng.normal(size=clean.shape), 0, 1), clean


def ssim_by_scipy(x, y, peak):
    """Wang et al. with scipy's Gaussian filter cut off at 3.5 standard deviations, as in scikit-image."""
    values = []
    for one, other in zip(x, y, strict=True):
        for channel in range(one.shape[-1]):
            a, b = one[..., channel].astype(float), other[..., channel].astype(float)
            ma, mb, aa, bb, ab = (gaussian_filter(v, 1.5, truncate=3.5) for v in (a, b, a * a, b * b, a * b))
            c1, c2 = (0.01 * peak) ** 2, (0.03 * peak) ** 2
            top = (2 * ma * mb + c1) * (2 * (ab - ma * mb) + c2)
            bottom = (ma**2 + mb**2 + c1) * ((aa - ma**2) + (bb - mb**2) + c2)
            values.append((top / bottom)[5:-5, 5:-5].mean())
    return float(np.mean(values))


# --- SSIM and PSNR ----------------------------------------------------------------------------------------


def test_ssim_is_that_of_wang_and_others(pair):
    noisy, clean = pair
    assert ssim(noisy, clean) == pytest.approx(ssim_by_scipy(noisy, clean, 1.0), abs=1e-9)
    assert 0.2 < ssim(noisy, clean) < 0.95
    assert ssim(clean, clean) == pytest.approx(1.0, abs=1e-12)


def test_ssim_of_bytes_is_that_of_their_peak(pair):
    noisy, clean = ((255 * images).round().astype(np.uint8) for images in pair)
    assert ssim(noisy, clean) == pytest.approx(ssim_by_scipy(noisy, clean, 255.0), abs=1e-9)
    assert ssim(noisy.astype(float), clean.astype(float), peak=255) == pytest.approx(ssim(noisy, clean), abs=1e-12)


def test_ssim_agrees_with_torchmetrics(pair):
    image = pytest.importorskip("torchmetrics.functional.image", reason="needs torchmetrics")
    noisy, clean = (torch.as_tensor(images).movedim(-1, 1) for images in pair)
    theirs = image.structural_similarity_index_measure(noisy, clean, data_range=1.0)
    assert ssim(noisy, clean) == pytest.approx(float(theirs), abs=1e-4)


def test_ssim_of_flat_images_is_that_of_their_means():
    dark, light = np.full((2, 16, 16), 0.2), np.full((2, 16, 16), 0.7)
    expected = (2 * 0.2 * 0.7 + 1e-4) / (0.2**2 + 0.7**2 + 1e-4)
    assert ssim(dark, light) == pytest.approx(expected, abs=1e-9)


def test_psnr_is_the_mean_of_each_images_own(pair):
    noisy, clean = pair
    expected = np.mean([10 * np.log10(1 / np.mean((x - y) ** 2)) for x, y in zip(noisy, clean, strict=True)])
    assert psnr(noisy, clean) == pytest.approx(expected, abs=1e-9)
    dark, light = np.full((1, 16, 16), 10, np.uint8), np.full((1, 16, 16), 30, np.uint8)
    assert psnr(dark, light) == pytest.approx(20 * np.log10(255 / 20), abs=1e-9)
    assert psnr(clean, clean) == np.inf


@pytest.mark.parametrize("metric", [ssim, psnr])
def test_layouts_and_types_do_not_matter(pair, metric):
    noisy, clean = pair
    first = [np.moveaxis(images, -1, 1) for images in pair]
    assert metric(*first) == pytest.approx(metric(noisy, clean), abs=1e-12)
    assert metric(*(torch.as_tensor(images) for images in pair)) == pytest.approx(metric(noisy, clean), abs=1e-12)
    grey = [images[..., 0] for images in pair]
    assert metric(*grey) == pytest.approx(metric(*(images[..., None] for images in grey)), abs=1e-12)
    many = [np.concatenate([images] * 100) for images in pair]  # more than a batch
    assert metric(*many) == pytest.approx(metric(noisy, clean), abs=1e-9)


@pytest.mark.parametrize(
    ("images", "references", "message"),
    [
        (np.zeros((2, 16, 16)), np.zeros((2, 16, 15)), r"must have one shape; got \(2, 16, 16\) and \(2, 16, 15\)"),
        (np.zeros((16, 16)), np.zeros((16, 16)), r"images must be \(n, height, width\).*images\[None\]"),
        (
            np.zeros((2, 5, 16, 16)),
            np.zeros((2, 5, 16, 16)),
            r"1 or 3 channels, first or last; got shape \(2, 5, 16, 16",
        ),
        (np.zeros((0, 16, 16)), np.zeros((0, 16, 16)), r"got shape \(0, 16, 16\)"),
        (
            np.full((2, 16, 16), 200.0),
            np.zeros((2, 16, 16)),
            "numbers from 0 to 1, or go with `peak`; got values from 200",
        ),
        (np.zeros((2, 16, 16)), np.full((2, 16, 16), np.nan), "`references` must be bytes, numbers from 0 to 1"),
        (np.zeros((2, 10, 16)), np.zeros((2, 10, 16)), "at least 11 x 11 pixels, the size of a patch; got 10 x 16"),
    ],
)
def test_what_is_no_image_is_refused(images, references, message):
    with pytest.raises(DataError, match=message):
        ssim(images, references)


# --- perplexity -------------------------------------------------------------------------------------------


def test_perplexity_of_known_shares():
    codes = np.repeat([0, 1, 5], [50, 25, 25])
    assert code_perplexity(codes, n_codes=6) == pytest.approx(2**1.5)
    with pytest.raises(DataError, match="`codes` must be at least 0 and below 4; got 0 to 5"):
        code_perplexity(codes, n_codes=4)
    with pytest.raises(DataError, match="must be at least 0; got -1 to 2"):
        code_perplexity([-1, 2])
    with pytest.raises(DataError, match=r"must be integers, at least one; got shape \(1,\) of float64"):
        code_perplexity([0.5])


# --- by features ------------------------------------------------------------------------------------------


def test_frechet_distance_is_the_transport_of_gaussians():
    rng = np.random.default_rng(102)
    x = rng.normal(size=(300, 5)) @ rng.normal(size=(5, 5))
    y = rng.normal(size=(200, 5)) @ rng.normal(size=(5, 5)) + 1.0
    expected = ot.gaussian.bures_wasserstein_distance(x.mean(0), y.mean(0), np.cov(x.T), np.cov(y.T)) ** 2
    assert frechet_distance(x, y) == pytest.approx(float(expected), rel=1e-9)
    assert frechet_distance(x, x) == pytest.approx(0.0, abs=1e-9)
    # more features than rows: covariances are singular
    assert frechet_distance(x[:4], x[:4]) == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(DataError, match=r"as many columns; got \(300, 5\) and \(200, 4\)"):
        frechet_distance(x, y[:, :4])
    with pytest.raises(
        DataError, match=r"`features` must be finite, \(n, d\) with at least two rows; got shape \(1, 5\)"
    ):
        frechet_distance(x[:1], y)


def test_fid_runs_the_network_that_it_is_given(pair):
    noisy, clean = (np.concatenate([images] * 80) for images in pair)
    seen = []

    def network(images):
        seen.append((images.shape[1], float(images.max())))
        return images.mean((2, 3))

    expected = frechet_distance(255 * noisy.mean((1, 2)), 255 * clean.mean((1, 2)))
    assert fid(noisy, clean, network=network) == pytest.approx(expected, rel=1e-3)
    assert all(channels == 3 and 1 < highest <= 255 for channels, highest in seen)
    assert fid(noisy[..., 0], clean[..., 0], network=network) > 0  # grey images in three channels


class Apart(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x - y).abs().mean((1, 2, 3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*deprecated:FutureWarning")
def test_lpips_runs_a_network_or_a_file(pair, tmp_path):
    noisy, clean = pair
    expected = 2 * np.abs(noisy - clean).mean()  # from -1 to 1
    assert lpips(noisy, clean, network=Apart()) == pytest.approx(expected, rel=1e-5)
    torch.jit.script(Apart()).save(str(tmp_path / "apart.pt"))
    assert lpips(noisy, clean, network=tmp_path / "apart.pt") == pytest.approx(expected, rel=1e-5)
    with pytest.raises(DataError, match=r"the path of a TorchScript file; there is no file 'alex\.pt'"):
        lpips(noisy, clean, network="alex.pt")
    with pytest.raises(DataError, match="one distance for each of the 4 pairs; got 1"):
        lpips(noisy, clean, network=lambda x, y: (x - y).abs().mean())


def test_feature_distance_of_unit_vectors():
    red, green = np.zeros((2, 12, 12, 3)), np.zeros((2, 12, 12, 3))
    red[..., 0], green[..., 1] = 0.5, 0.9
    layers = lambda image: [image, image[:, :, ::2]]  # noqa: E731
    assert feature_distance(red, green, network=layers) == pytest.approx(4.0, abs=1e-6)  # |e1 - e2|^2 in two layers
    assert feature_distance(red, red, network=layers) == 0


def test_real_images_lose_similarity_with_noise(data_folder):
    clean = load_images("cifar10", data_folder, train=1, test=50).test / 255
    rng = np.random.default_rng(103)
    found = [ssim(np.clip(clean + scale * rng.normal(size=clean.shape), 0, 1), clean) for scale in (0.02, 0.1, 0.3)]
    assert found[0] > 0.95 > found[1] > found[2]
