"""MNIST, CIFAR10, SVHN and CelebA from a local folder.

Published files lie where torchvision would put them. Each reader takes the folder that torchvision calls the root,
``"train"`` or ``"test"`` and how many images are wanted, returns images and labels, and raises ``FileNotFoundError`` if
its files are not there. A file is read only if its checksum is the published one (of CelebA, which has a file for each
face, none is known); nothing here runs code that it holds.
"""

import gzip
import io
import pickle
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.published_files import checked, data_folder, fetch
from otpdag.errors import DataError

Bytes = NDArray[np.uint8]
Pictures = tuple[Bytes, NDArray[np.int64]]

MNIST = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
CIFAR10 = {"cifar-10-python.tar.gz": "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"}
CIFAR10_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
SVHN = {
    "train_32x32.mat": "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
    "test_32x32.mat": "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
}
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
    limits = {"train": train, "test": test}
    images = None if source == "published" else _prepared(name, places, limits)
    if images is None and source != "prepared":
        images = _published(name, places, limits)
        if images is None and download:
            PUBLISHED[name].download(places[0])
            images = _published(name, places, limits)
    if images is None:
        raise DataError(_missing(name, places[0], source))
    return images


def _prepared(name: str, places: Sequence[Path], limits: Mapping[str, int | None]) -> ImageSet | None:
    file, checksum = _PREPARED[name]
    for place in places:
        if (place / file).is_file():
            with np.load(checked(place / file, checksum, what="the file of this project")) as held:
                arrays = [(held[f"x_{part}"][:rows], held[f"y_{part}"][:rows]) for part, rows in limits.items()]
            train, test = ((x.reshape(*x.shape[:3], -1), y.astype(np.int64)) for x, y in arrays)
            return ImageSet(name, *train, *test, file)
    return None


def _published(name: str, places: Sequence[Path], limits: Mapping[str, int | None]) -> ImageSet | None:
    for place in places:
        try:
            train, test = (PUBLISHED[name].read(place, part, rows) for part, rows in limits.items())
        except FileNotFoundError:
            continue
        return ImageSet(name, *train, *test, f"the files published at {PUBLISHED[name].origin}")
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


# --- published files --------------------------------------------------------------------------------------


class Published(NamedTuple):
    """How a data set is published: a reader of its files, where they are, and what torchvision calls their place."""

    read: Callable[[Path, str, int | None], Pictures]
    origin: str
    files: dict[str, str]
    place: str

    def download(self, root: Path) -> None:
        """Fetch the files into their place below the root.

        Raises:
            DataError: They cannot be downloaded by a program, or cannot be reached.
        """
        if not self.files:
            raise DataError(f"these files must be fetched by hand from {self.origin} and put at {root / self.place}")
        for name, checksum in self.files.items():
            fetch(f"{self.origin}/{name}", checksum, root / self.place)


# --- MNIST ------------------------------------------------------------------------------------------------


def _read_mnist(root: Path, part: str, rows: int | None) -> Pictures:
    files = [(name, checksum) for name, checksum in MNIST.items() if name.startswith("train") == (part == "train")]
    images, labels = (_read_idx(checked(root / "MNIST" / "raw" / name, checksum))[:rows] for name, checksum in files)
    return images[..., None], labels.astype(np.int64)


def _read_idx(path: Path) -> Bytes:
    """An array in the IDX format: two zero bytes, the type (8: unsigned bytes), the number of axes, their lengths."""
    content = gzip.decompress(path.read_bytes())
    axes = content[3]
    if content[:3] != b"\x00\x00\x08":
        raise DataError(f"{path} is not a file of unsigned bytes in the IDX format")
    shape = np.frombuffer(content, ">u4", axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(*map(int, shape))


# --- CIFAR10 ----------------------------------------------------------------------------------------------


def _read_cifar10(root: Path, part: str, rows: int | None) -> Pictures:
    ((name, checksum),) = CIFAR10.items()
    batches = [batch for batch in CIFAR10_BATCHES if batch.startswith("test") == (part == "test")]
    with tarfile.open(checked(root / name, checksum)) as archive:
        read = [_read_batch(_member(archive, f"cifar-10-batches-py/{batch}")) for batch in batches]
    images, labels = (np.concatenate(arrays)[:rows] for arrays in zip(*read, strict=True))
    return images, labels


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise DataError(f"'{name}' is not a file of the archive")
    return file.read()


def _read_batch(content: bytes) -> tuple[Bytes, NDArray[np.int64]]:
    batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    images = np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), np.asarray(batch[b"labels"], dtype=np.int64)


class _ArrayUnpickler(pickle.Unpickler):
    """Reads numbers, bytes, lists, dictionaries and arrays; a pickle that asks for anything else is refused."""

    _rebuild: Any = np.empty(0).__reduce__()[0]
    _ALLOWED: dict[tuple[str, str], Any] = {  # noqa: RUF012 (never changed)
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("numpy.core.multiarray", "_reconstruct"): _rebuild,
        ("numpy._core.multiarray", "_reconstruct"): _rebuild,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class or function."""
        if (module, name) not in self._ALLOWED:
            raise DataError(f"a batch of CIFAR10 holds arrays only; this file asks for {module}.{name}")
        return self._ALLOWED[module, name]


# --- SVHN -------------------------------------------------------------------------------------------------


def _read_svhn(root: Path, part: str, rows: int | None) -> Pictures:
    """Images lie in (height, width, channels, rows); the digit 0 has the label 10."""
    from scipy.io import loadmat

    name = f"{part}_32x32.mat"
    contents = loadmat(str(checked(root / name, SVHN[name])))
    images = np.ascontiguousarray(np.moveaxis(contents["X"], -1, 0)[:rows])
    return images, contents["y"].ravel()[:rows].astype(np.int64) % 10


# --- CelebA -----------------------------------------------------------------------------------------------


def _read_celeba(root: Path, part: str, rows: int | None, side: int = 148, size: int = 64) -> Pictures:
    """The square of ``side`` pixels in the middle at ``size`` x ``size``, as usual; labels are the files' numbers."""
    from PIL import Image

    partition, folder = root / "celeba" / "list_eval_partition.txt", root / "celeba" / "img_align_celeba"
    if not partition.is_file() or not folder.is_dir():
        raise FileNotFoundError(partition)
    lines = [line.split() for line in partition.read_text().splitlines()]
    names = [name for name, code in lines if code == {"train": "0", "test": "2"}[part]][:rows]
    faces = np.empty((len(names), size, size, 3), dtype=np.uint8)
    for row, name in enumerate(names):
        if not (folder / name).is_file():
            raise DataError(f"{folder / name} is missing")
        with Image.open(folder / name) as face:
            left, top = (face.width - side) // 2, (face.height - side) // 2
            square = face.convert("RGB").crop((left, top, left + side, top + side))
            faces[row] = np.asarray(square.resize((size, size), Image.Resampling.BICUBIC))
    return faces, np.array([int(Path(name).stem) for name in names], dtype=np.int64)


PUBLISHED = {
    "mnist": Published(_read_mnist, "https://ossci-datasets.s3.amazonaws.com/mnist", MNIST, "MNIST/raw"),
    "cifar10": Published(_read_cifar10, "https://www.cs.toronto.edu/~kriz", CIFAR10, ""),
    "svhn": Published(_read_svhn, "http://ufldl.stanford.edu/housenumbers", SVHN, ""),
    "celeba": Published(_read_celeba, "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html", {}, "celeba"),
}
