"""MNIST, CIFAR10, SVHN and CelebA from a local folder."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from otpdag.datasets._folder import data_folder, has_checksum
from otpdag.datasets._image_files import PUBLISHED, Split
from otpdag.errors import DataError

Bytes = NDArray[np.uint8]
Source = Literal["any", "prepared", "published"]

_PREPARED = {
    "mnist": ("mnist.npz", "0c60297a093530a9fba979a7656fe8dcdc999d819e34f263cfefd634cf37425e"),
    "cifar10": ("cifar10_subset.npz", "d85255c1acd6461dded426c7bd88cac7ec385c6b417e89b84fed43f1865f9591"),
    "svhn": ("svhn_subset.npz", "592ff17059f25768a4152586b5684eb2c5f5f466b5f6521e5a984879205f908c"),
    "celeba": ("celeba64_subset.npz", "dbd232aefa6214d8ef4f1328067eb4bf0f4016378bbfdbf8017565862446c5b0"),
}
"""Small files of this project, and their SHA-256: all of MNIST, and parts of the others."""


@dataclass(frozen=True)
class ImageSet:
    """Images with labels, for training and for testing.

    Attributes:
        name: "mnist", "cifar10", "svhn" or "celeba".
        train: Images (rows, height, width, channels), bytes from 0 to 255.
        train_labels: Class or digit of each row; for CelebA the person, or the file if all of it was read.
        test: Images that no training set holds.
        test_labels: Their labels.
        source: Where they were read from.
    """

    name: str
    train: Bytes
    train_labels: NDArray[np.int64]
    test: Bytes
    test_labels: NDArray[np.int64]
    source: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        height, width, channels = self.train.shape[1:]
        return height, width, channels

    def padded(self, size: int) -> "ImageSet":
        """Surround the images with black up to ``size`` by ``size`` pixels: MNIST's 28 to the 32 of the others.

        >>> grey = np.ones((2, 28, 28, 1), dtype=np.uint8)
        >>> digits = ImageSet("mnist", grey, np.zeros(2, int), grey, np.zeros(2, int), "made up")
        >>> digits.padded(32).shape, int(digits.padded(32).train.sum()) == 2 * 28 * 28
        ((32, 32, 1), True)
        """
        height, width, _ = self.shape
        if max(height, width) > size:
            raise DataError(f"`size` must be at least the {height} x {width} pixels that there are; got {size}")
        before = (size - height) // 2, (size - width) // 2
        edges = ((0, 0), (before[0], size - height - before[0]), (before[1], size - width - before[1]), (0, 0))
        return replace(self, train=np.pad(self.train, edges), test=np.pad(self.test, edges))


def load_images(
    name: str,
    folder: str | Path | None = None,
    *,
    train: int | None = None,
    test: int | None = None,
    source: Source = "any",
    download: bool = False,
) -> ImageSet:
    """Read MNIST, CIFAR10, SVHN or CelebA.

    The small files of this project (``images/mnist.npz``, ``cifar10_subset.npz``, ``svhn_subset.npz`` and
    ``celeba64_subset.npz``) are used where they are; else the published files, where torchvision puts them. Checksums
    are verified. CelebA is cropped to the middle 148 x 148 pixels and scaled to 64 x 64.

    Args:
        name: "mnist", "cifar10", "svhn" or "celeba".
        folder: The folder of data sets; by default the one that ``OTPDAG_DATA`` names.
        train: Only so many training images, the first.
        test: Only so many test images, the first.
        source: "prepared" takes the small files only, "published" the published ones only.
        download: Fetch published files that are missing. CelebA must be fetched by hand.

    Returns:
        The images.

    Raises:
        DataError: The name is unknown, or files are missing (the message says which, and where they belong) or changed.
    """
    if name not in PUBLISHED:
        raise DataError(f"`name` must be one of {', '.join(PUBLISHED)}; got '{name}'")
    if source not in ("any", "prepared", "published"):
        raise DataError(f"`source` must be 'any', 'prepared' or 'published'; got '{source}'")
    for option, rows in (("train", train), ("test", test)):
        if rows is not None and rows < 1:
            raise DataError(f"`{option}` must be at least 1; got {rows}")
    root = Path(folder or data_folder())
    places = (root / "images", root)
    images = None if source == "published" else _prepared(name, places, train, test)
    if images is None and source != "prepared":
        images = _published(name, places, train, test)
        if images is None and download:
            PUBLISHED[name].download(places[0])
            images = _published(name, places, train, test)
    if images is None:
        raise DataError(_missing(name, places[0], source))
    return images


def _prepared(name: str, places: Sequence[Path], train: int | None, test: int | None) -> ImageSet | None:
    file, checksum = _PREPARED[name]
    for place in places:
        path = place / file
        if path.is_file():
            if not has_checksum(path, checksum):
                raise DataError(f"{path} is not the file of this project: its SHA-256 differs")
            with ZipFile(path) as held:
                parts = {key: _first_rows(held, f"x_{key}", rows) for key, rows in (("train", train), ("test", test))}
                labels = {key: _first_rows(held, f"y_{key}", len(part)).astype(np.int64) for key, part in parts.items()}
            images = {key: part if part.ndim == 4 else part[..., None] for key, part in parts.items()}
            return ImageSet(name, images["train"], labels["train"], images["test"], labels["test"], file)
    return None


def _first_rows(held: ZipFile, key: str, rows: int | None) -> Bytes:
    """The first rows of an array of bytes; what follows them is not unpacked, which would take seconds."""
    with held.open(f"{key}.npy") as file:
        np.lib.format.read_magic(file)
        shape, _, _ = np.lib.format.read_array_header_1_0(file)
        wanted = shape[0] if rows is None else min(rows, shape[0])
        content = file.read(wanted * math.prod(shape[1:]))
    return np.frombuffer(content, np.uint8).reshape(wanted, *shape[1:]).copy()


def _published(name: str, places: Sequence[Path], train: int | None, test: int | None) -> ImageSet | None:
    for place in places:
        try:
            split: Split = PUBLISHED[name].read(place, train, test)
        except FileNotFoundError:
            continue
        return ImageSet(name, *split, f"the files published at {PUBLISHED[name].origin}")
    return None


def _missing(name: str, place: Path, source: Source) -> str:
    published = PUBLISHED[name]
    files = ", ".join(published.files) or "img_align_celeba/*.jpg and list_eval_partition.txt"
    fetched = " (download=True fetches them)" if published.files else ""
    wanted = {
        "prepared": f"put {_PREPARED[name][0]} there",
        "published": f"put {files} from {published.origin} at {place / published.place}{fetched}",
    }
    what = [wanted[kind] for kind in ("prepared", "published") if source in ("any", kind)]
    return f"'{name}' is not in {place}: {', or '.join(what)}"
