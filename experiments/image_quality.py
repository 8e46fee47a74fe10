"""How close images are to others: pixel by pixel, patch by patch, and by the features of a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.stats import entropy
from torch import Tensor

from otpdag.data.documents import picture_layout
from otpdag.errors import DataError

_RADIUS = 5  # of the patches of SSIM; it and defaults below as published (Wang, Bovik, Sheikh and Simoncelli 2004)

Network = Callable[..., Any]


def psnr(images: ArrayLike | Tensor, references: ArrayLike | Tensor, *, peak: float | None = None) -> float:
    r"""Measure the peak signal-to-noise ratio in decibels, larger is better; the mean over images.

    .. math:: \mathrm{PSNR}(x, y) = 10 \log_{10} \frac{\mathrm{peak}^2}{\mathrm{mean}\,(x - y)^2}

    Args:
        images: Grey images (n, height, width), or images with channels last (n, height, width, 1 or 3) or first.
        references: What they should look like, of the same shape.
        peak: The largest value of a pixel: by default 255 for bytes and 1 for floating numbers.

    Example:
        >>> psnr(np.full((1, 16, 16), 0.6), np.full((1, 16, 16), 0.5))
        20.0
    """
    left, right = _pair(images, references, peak)
    errors = (left - right).square().flatten(1).mean(1)
    return float((-10 * torch.log10(errors)).mean())


def ssim(images: ArrayLike | Tensor, references: ArrayLike | Tensor, *, peak: float | None = None) -> float:
    r"""Measure the structural similarity, at most 1 (equal); the mean over patches, channels and images.

    .. math:: \mathrm{SSIM}(x, y) = \frac{(2 \mu_x \mu_y + c_1)(2 \sigma_{xy} + c_2)}
              {(\mu_x^2 + \mu_y^2 + c_1)(\sigma_x^2 + \sigma_y^2 + c_2)}

    with means and covariances of Gaussian patches (11 x 11 pixels, standard deviation 1.5) that lie within the image,
    :math:`c_1 = (0.01\,\mathrm{peak})^2` and :math:`c_2 = (0.03\,\mathrm{peak})^2`, as Wang, Bovik, Sheikh and
    Simoncelli (2004) have it.

    Args:
        images: Grey images (n, height, width), or images with channels last (n, height, width, 1 or 3) or first.
        references: What they should look like, of the same shape.
        peak: The largest value of a pixel: by default 255 for bytes and 1 for floating numbers.

    Example:
        >>> flat = np.full((1, 16, 16), 0.5)  # without structure only the means count
        >>> ssim(flat, flat), round(ssim(flat + 0.25, flat), 4)
        (1.0, 0.9231)
    """
    left, right = _pair(images, references, peak)
    if min(left.shape[-2:]) < 2 * _RADIUS + 1:
        height, width = left.shape[-2:]
        raise DataError(f"`images` must be at least 11 x 11 pixels, the size of a patch; got {height} x {width}")
    total = sum(float(_ssim_map(x, y).mean((1, 2, 3)).sum()) for x, y in _batches(left, right))
    return total / len(left)


def code_perplexity(codes: ArrayLike, *, n_codes: int | None = None) -> float:
    r"""Measure how many codes are in use, from 1 to the number of codes: the exponential of their entropy.

    .. math:: \exp\Big(-\sum_k p_k \log p_k\Big)

    Args:
        codes: Integer codes, of any shape.
        n_codes: How many there are, to check that none is beyond.

    Example:
        >>> code_perplexity([[0, 1], [2, 3]]), code_perplexity([[7, 7], [7, 7]])
        (4.0, 1.0)
    """
    held = np.asarray(codes)
    if not np.issubdtype(held.dtype, np.integer) or not held.size:
        raise DataError(f"`codes` must be integers, at least one; got shape {held.shape} of {held.dtype}")
    if held.min() < 0 or (n_codes is not None and held.max() >= n_codes):
        limit = "" if n_codes is None else f" and below {n_codes}"
        raise DataError(f"`codes` must be at least 0{limit}; got {held.min()} to {held.max()}")
    return float(np.exp(entropy(np.bincount(held.ravel()))))


def frechet_distance(features: ArrayLike | Tensor, references: ArrayLike | Tensor) -> float:
    r"""Measure the squared 2-Wasserstein distance between normal distributions with the moments of two samples.

    .. math:: \|m_x - m_y\|^2 + \mathrm{tr}\big(C_x + C_y - 2 (C_x^{1/2} C_y C_x^{1/2})^{1/2}\big)

    Of the features of an Inception network it is FID (:func:`fid`); of any other features it is not, and its values
    compare only among themselves.

    Args:
        features: A sample (n, d) with at least two rows.
        references: A sample (m, d).

    Example:
        >>> x = np.random.default_rng(0).normal(size=(1000, 2))
        >>> round(frechet_distance(x + [3.0, 4.0], x), 6)
        25.0
    """
    left, right = _sample("features", features), _sample("references", references)
    if left.shape[1] != right.shape[1]:
        raise DataError(f"`features` and `references` must have as many columns; got {left.shape} and {right.shape}")
    first, second = (np.atleast_2d(np.cov(sample, rowvar=False)) for sample in (left, right))
    root = _square_root(first)
    # C_x^(1/2) C_y C_x^(1/2) is symmetric, so that its root needs no complex arithmetic, unlike the root of C_x C_y
    overlap = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ second @ root), 0.0)).sum()
    shift = np.square(left.mean(0) - right.mean(0)).sum()
    return max(0.0, float(shift + np.trace(first) + np.trace(second) - 2 * overlap))


def fid(
    images: ArrayLike | Tensor,
    references: ArrayLike | Tensor,
    *,
    network: Network | str | Path,
    peak: float | None = None,
) -> float:
    """Measure the Frechet Inception distance between two sets of images, smaller is better (Heusel et al. 2017).

    It is FID only if the network is the Inception network of that paper. Nothing is downloaded: the user brings the
    network or its file. Where there is none, :func:`frechet_distance` of other features serves under its own name.

    Args:
        images: Grey images (n, height, width), or images with channels last (n, height, width, 1 or 3) or first.
        references: Images of the same size; their number may differ.
        network: Maps images (n, 3, height, width) from 0 to 255 to features (n, d), or is the path of a TorchScript
            file that does.
        peak: The largest value of a pixel: by default 255 for bytes and 1 for floating numbers.
    """
    run = _as_network(network)
    left, right = (_as_images(*given, peak) for given in (("images", images), ("references", references)))
    samples = [[_run(run, 255 * _three_channels(x)) for (x,) in _batches(given)] for given in (left, right)]
    return frechet_distance(*(torch.cat(sample) for sample in samples))


def lpips(
    images: ArrayLike | Tensor,
    references: ArrayLike | Tensor,
    *,
    network: Network | str | Path,
    peak: float | None = None,
) -> float:
    """Measure the learned perceptual distance of pairs of images, smaller is better (Zhang et al. 2018); the mean.

    It is LPIPS only if the network is one of that paper, for instance ``lpips.LPIPS(net="alex")`` of the package of
    that name. Nothing is downloaded. Where there is none, :func:`feature_distance` serves under its own name.

    Args:
        images: Grey images (n, height, width), or images with channels last (n, height, width, 1 or 3) or first.
        references: What they should look like, of the same shape.
        network: Maps two batches (n, 3, height, width) from -1 to 1 to n distances, or is the path of a TorchScript
            file that does.
        peak: The largest value of a pixel: by default 255 for bytes and 1 for floating numbers.
    """
    run = _as_network(network)
    left, right = _pair(images, references, peak)
    parts = [
        _run(run, 2 * _three_channels(x) - 1, 2 * _three_channels(y) - 1).reshape(-1) for x, y in _batches(left, right)
    ]
    distances = torch.cat(parts)
    if len(distances) != len(left):
        raise DataError(f"`network` must give one distance for each of the {len(left)} pairs; got {len(distances)}")
    return float(distances.mean())


def feature_distance(
    images: ArrayLike | Tensor,
    references: ArrayLike | Tensor,
    *,
    network: Callable[[Tensor], Sequence[Tensor]],
    peak: float | None = None,
) -> float:
    r"""Measure the distance of pairs of images by the layers of any network, smaller is better; the mean.

    .. math:: d(x, y) = \sum_l \mathrm{mean}_{h, w} \left\| \hat f_l(x)_{hw} - \hat f_l(y)_{hw} \right\|^2

    with feature vectors scaled to length one. It is what LPIPS is without its learned weights (Zhang et al. 2018,
    Eq. 1 with unit weights); values compare only among themselves, for one network.

    Args:
        images: Grey images (n, height, width), or images with channels last (n, height, width, 1 or 3) or first.
        references: What they should look like, of the same shape.
        network: Maps images (n, channels, height, width) from 0 to 1 to feature maps (n, d, h, w), one for each layer.
        peak: The largest value of a pixel: by default 255 for bytes and 1 for floating numbers.

    Example:
        >>> x = np.random.default_rng(0).uniform(0.1, 1.0, (3, 8, 8, 3))
        >>> feature_distance(x, x[:, ::-1], network=lambda image: [image]) > 0
        True
        >>> round(feature_distance(x, 0.5 * x, network=lambda image: [image]), 6)  # a length does not count
        0.0
    """
    left, right = _pair(images, references, peak)
    total = 0.0
    with torch.no_grad():
        for x, y in _batches(left, right):
            for one, other in zip(network(x.float()), network(y.float()), strict=True):
                apart = (_unit(one) - _unit(other)).square().sum(1)
                total += float(apart.flatten(1).mean(1).sum())
    return total / len(left)


def _unit(features: Tensor) -> Tensor:
    return features / (features.norm(dim=1, keepdim=True) + 1e-10)


# --- what the metrics share -------------------------------------------------------------------------------


def _ssim_map(x: Tensor, y: Tensor, k1: float = 0.01, k2: float = 0.03) -> Tensor:
    """The similarity of each patch (n, c, h, w); values from 0 to 1."""
    down, across = (_blur_matrix(size) for size in x.shape[-2:])

    def blurred(values: Tensor) -> Tensor:
        return (values @ across.mT).mT.contiguous() @ down.mT  # on their side; all patches count alike

    mean_x, mean_y = blurred(x), blurred(y)
    # a variance is not negative; rounding is
    var_x = (blurred(x * x) - mean_x**2).clamp(min=0)
    var_y = (blurred(y * y) - mean_y**2).clamp(min=0)
    cov = blurred(x * y) - mean_x * mean_y
    c1, c2 = k1**2, k2**2
    return (2 * mean_x * mean_y + c1) * (2 * cov + c2) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))


def _blur_matrix(size: int, sigma: float = 1.5) -> Tensor:
    """The Gaussian weights of each patch along one axis (size - 10, size): products beat convolutions here."""
    offsets = torch.arange(size, dtype=torch.float64) - torch.arange(_RADIUS, size - _RADIUS).unsqueeze(1)
    weights = torch.where(offsets.abs() <= _RADIUS, torch.exp(-0.5 * (offsets / sigma) ** 2), 0.0)
    return weights / weights.sum(1, keepdim=True)


def _pair(images: ArrayLike | Tensor, references: ArrayLike | Tensor, peak: float | None) -> tuple[Tensor, Tensor]:
    if np.shape(images) != np.shape(references):
        shapes = f"{np.shape(images)} and {np.shape(references)}"
        raise DataError(f"`images` and `references` must have one shape; got {shapes}")
    return _as_images("images", images, peak), _as_images("references", references, peak)


def _as_images(name: str, images: ArrayLike | Tensor, peak: float | None, overshoot: float = 0.5) -> Tensor:
    """Images as (n, channels, height, width) in double precision, from 0 to 1.

    A reconstruction may leave that range by ``overshoot``; more means another unit.
    """
    given = images.detach().cpu().numpy() if isinstance(images, Tensor) else np.asarray(images)
    largest = (255.0 if given.dtype == np.uint8 else 1.0) if peak is None else peak
    scaled = torch.as_tensor(np.asarray(given, dtype=np.float64) / largest)
    layout = picture_layout(given.shape)
    scaled = scaled.unsqueeze(1) if layout == "none" else scaled.movedim(-1, 1) if layout == "last" else scaled
    low, high = float(scaled.min()), float(scaled.max())
    if not (low >= -overshoot and high <= 1 + overshoot):  # true for NaN as well
        values = f"{low * largest:.4g} to {high * largest:.4g}"
        raise DataError(f"`{name}` must be bytes, numbers from 0 to 1, or go with `peak`; got values from {values}")
    return scaled


def _three_channels(x: Tensor) -> Tensor:
    """Single precision, and grey in three channels: what public networks want."""
    return x.float().clamp(0, 1).expand(-1, 3, -1, -1)


def _batches(*tensors: Tensor, size: int = 256) -> Iterator[tuple[Tensor, ...]]:
    """So many images at a time, which bounds memory."""
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def _as_network(network: Network | str | Path) -> Network:
    if callable(network):
        return network
    if not Path(network).is_file():
        raise DataError(f"`network` must be callable or the path of a TorchScript file; there is no file '{network}'")
    loaded: Network = torch.jit.load(str(network), map_location="cpu").eval()
    return loaded


def _run(network: Network, *batches: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.as_tensor(network(*batches)).detach().cpu()


def _sample(name: str, values: ArrayLike | Tensor) -> NDArray[np.float64]:
    given = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    sample = np.asarray(given, dtype=np.float64)
    if sample.ndim != 2 or len(sample) < 2 or not np.isfinite(sample).all():
        raise DataError(f"`{name}` must be finite, (n, d) with at least two rows; got shape {sample.shape}")
    return sample


def _square_root(covariance: NDArray[np.float64]) -> NDArray[np.float64]:
    """The symmetric root of a covariance."""
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T)
