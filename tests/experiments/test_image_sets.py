"""Images come out alike whatever file they lie in, and no file is trusted."""

import gzip
import hashlib
import io
import os
import pickle
import tarfile

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from experiments import image_sets
from experiments.image_sets import load_images
from otpdag.errors import DataError


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def colours(rows, size=32):
    return np.random.default_rng(101).integers(0, 256, (rows, size, size, 3), dtype=np.uint8)


# --- files of this project --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "train", "test", "labels"),
    [
        ("mnist", (28, 28, 1), 60000, 10000, 10),
        ("cifar10", (32, 32, 3), 10000, 2000, 10),
        ("svhn", (32, 32, 3), 10000, 2000, 10),
        ("celeba", (64, 64, 3), 3400, 600, 170),
    ],
)
def test_prepared_files_have_their_size(name, shape, train, test, labels, data_folder):
    images = load_images(name, data_folder, source="prepared")
    assert images.shape == shape
    assert (len(images.train), len(images.test)) == (train, test) == (len(images.train_labels), len(images.test_labels))
    assert images.train.dtype == np.uint8
    assert len(np.unique(images.train_labels)) == labels
    assert 30 < images.train[:2000].mean() < 150
    few = load_images(name, data_folder, train=5, test=3)
    np.testing.assert_array_equal(few.train, images.train[:5])
    np.testing.assert_array_equal(few.test, images.test[:3])
    np.testing.assert_array_equal(few.train_labels, images.train_labels[:5])


@pytest.mark.slow
def test_mnist_has_the_published_mean_and_is_padded_to_32(data_folder):
    images = load_images("mnist", data_folder)
    with np.load(data_folder / "images" / "mnist.npz") as held:
        np.testing.assert_array_equal(images.test[..., 0], held["x_test"])
        np.testing.assert_array_equal(images.test_labels, held["y_test"])
    assert images.train.mean() / 255 == pytest.approx(0.1307, abs=1e-4)
    assert images.train.std() / 255 == pytest.approx(0.3081, abs=1e-4)
    larger = images.padded(32)
    assert larger.shape == (32, 32, 1)
    np.testing.assert_array_equal(larger.test[:, 2:-2, 2:-2], images.test)
    assert larger.test.sum() == images.test.sum()
    with pytest.raises(DataError, match=r"`size` must be at least the 32 x 32 pixels that there are; got 20"):
        larger.padded(20)


def test_a_changed_prepared_file_is_refused(tmp_path):
    (tmp_path / "images").mkdir()
    np.savez(tmp_path / "images" / "mnist.npz", x_train=np.zeros(3))
    with pytest.raises(DataError, match=r"mnist\.npz is not the file of this project: its SHA-256 differs"):
        load_images("mnist", tmp_path)


# --- published files --------------------------------------------------------------------------------------


def test_mnist_as_published(tmp_path, monkeypatch):
    rng = np.random.default_rng(102)
    digits, labels = rng.integers(0, 256, (6, 28, 28), dtype=np.uint8), np.arange(6, dtype=np.uint8)
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    checksums = {}
    for name in image_sets.MNIST:
        held = digits if "images" in name else labels
        header = bytes([0, 0, 8, held.ndim]) + b"".join(length.to_bytes(4, "big") for length in held.shape)
        (folder / name).write_bytes(gzip.compress(header + held.tobytes()))
        checksums[name] = sha256(folder / name)
    monkeypatch.setattr(image_sets, "MNIST", checksums)
    images = load_images("mnist", tmp_path, train=4)
    np.testing.assert_array_equal(images.train[..., 0], digits[:4])
    np.testing.assert_array_equal(images.test[..., 0], digits)
    assert images.train_labels.tolist() == [0, 1, 2, 3]
    assert "published" in images.source


def batch(images, labels):
    flat = np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(len(images), -1)
    return pickle.dumps({b"data": flat, b"labels": list(map(int, labels))}, protocol=4)


def archive(path, batches):
    with tarfile.open(path, "w:gz") as file:
        for name, content in batches.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return {path.name: sha256(path)}


def test_cifar10_as_published(tmp_path, monkeypatch):
    images = colours(12)
    batches = {name: batch(images[2 * i : 2 * i + 2], [i, i]) for i, name in enumerate(image_sets.CIFAR10_BATCHES)}
    monkeypatch.setattr(image_sets, "CIFAR10", archive(tmp_path / "cifar-10-python.tar.gz", batches))
    found = load_images("cifar10", tmp_path)
    np.testing.assert_array_equal(found.train, images[:10])
    np.testing.assert_array_equal(found.test, images[10:])
    assert found.train_labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_python_2_pickles_of_arrays_are_read():
    """What CIFAR10 really holds: protocol 2, byte strings, and numpy's old module name."""
    pixels = bytes(range(256)) * 12
    content = (
        b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03K\x07aU\x04dataq\x04cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\n"
        b"ndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87R(K\x03"
        b"U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + len(pixels).to_bytes(4, "little")
        + pixels
        + b"tbu."
    )
    images, labels = image_sets._read_batch(content)
    assert labels.tolist() == [7]
    np.testing.assert_array_equal(images[0, 0, :, 0], np.arange(32))
    np.testing.assert_array_equal(images[0].transpose(2, 0, 1).ravel(), np.frombuffer(pixels, np.uint8))


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_a_pickle_that_holds_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    harmful = {name: pickle.dumps(Harm()) for name in image_sets.CIFAR10_BATCHES}
    monkeypatch.setattr(image_sets, "CIFAR10", archive(tmp_path / "cifar-10-python.tar.gz", harmful))
    with pytest.raises(DataError, match=r"holds arrays only; this file asks for \w+\.mkdir"):
        load_images("cifar10", tmp_path)
    assert not (tmp_path / "harm").exists()


def test_svhn_as_published(tmp_path, monkeypatch):
    images, labels = colours(4), np.array([[10], [1], [9], [10]], dtype=np.uint8)
    for name in image_sets.SVHN:
        savemat(tmp_path / name, {"X": images.transpose(1, 2, 3, 0), "y": labels})
    monkeypatch.setattr(image_sets, "SVHN", {name: sha256(tmp_path / name) for name in image_sets.SVHN})
    found = load_images("svhn", tmp_path, test=2)
    np.testing.assert_array_equal(found.train, images)
    np.testing.assert_array_equal(found.test, images[:2])
    assert found.train_labels.tolist() == [0, 1, 9, 0]


def test_celeba_as_published_is_cropped_and_scaled(tmp_path, monkeypatch):
    folder = tmp_path / "celeba" / "img_align_celeba"
    folder.mkdir(parents=True)
    for number, colour in enumerate([(200, 0, 0), (0, 200, 0), (0, 0, 200)], 1):
        face = Image.new("RGB", (178, 218), (255, 255, 255))
        face.paste(colour, (15, 35, 163, 183))
        face.save(folder / f"{number:06}.jpg", quality=100, subsampling=0)
    text = "000001.jpg 0\n000002.jpg 1\n000003.jpg 2\n000004.jpg 0\n"
    (tmp_path / "celeba" / "list_eval_partition.txt").write_text(text)
    found = load_images("celeba", tmp_path, train=1)
    assert (found.train.shape, found.test.shape) == ((1, 64, 64, 3), (1, 64, 64, 3))
    assert (found.train_labels.tolist(), found.test_labels.tolist()) == ([1], [3])
    assert np.abs(found.train[0, 1:-1, 1:-1].astype(int) - (200, 0, 0)).max() < 12  # nothing of the white frame
    assert np.abs(found.test[0, 1:-1, 1:-1].astype(int) - (0, 0, 200)).max() < 12
    with pytest.raises(DataError, match=r"000004\.jpg is missing"):
        load_images("celeba", tmp_path)


# --- what is said -----------------------------------------------------------------------------------------


def test_what_is_missing_is_said_with_its_place(tmp_path, monkeypatch):
    monkeypatch.delenv("OTPDAG_DATA", raising=False)
    with pytest.raises(DataError, match=r"`name` must be one of mnist, cifar10, svhn, celeba; got 'cats'"):
        load_images("cats", tmp_path)
    with pytest.raises(DataError, match="set the environment variable OTPDAG_DATA"):
        load_images("mnist")
    with pytest.raises(
        DataError, match=r"'cifar10' is not in .*images: put cifar10_subset\.npz there, or put cifar-10-"
    ):
        load_images("cifar10", tmp_path)
    with pytest.raises(DataError, match=r"put train-images.* at .*MNIST/raw \(download=True fetches them\)"):
        load_images("mnist", tmp_path, source="published")
    with pytest.raises(DataError, match=r"put img_align_celeba.*list_eval_partition\.txt from https://mmlab.*celeba$"):
        load_images("celeba", tmp_path, source="published")
    with pytest.raises(DataError, match=r"must be fetched by hand from https://mmlab.*put at .*celeba"):
        load_images("celeba", tmp_path, download=True)
    with pytest.raises(DataError, match="`source` must be 'any', 'prepared' or 'published'; got 'mine'"):
        load_images("mnist", tmp_path, source="mine")
    with pytest.raises(DataError, match="`train` must be at least 1; got 0"):
        load_images("mnist", tmp_path, train=0)


def test_an_unreachable_network_says_where_files_belong(tmp_path, monkeypatch):
    away = image_sets.PUBLISHED["svhn"]._replace(origin="http://127.0.0.1:9")
    monkeypatch.setitem(image_sets.PUBLISHED, "svhn", away)
    assert image_sets.PUBLISHED is image_sets.PUBLISHED
    with pytest.raises(DataError, match=r"cannot download http://127\.0\.0\.1:9/train_32x32\.mat .*put it at .*images"):
        load_images("svhn", tmp_path, download=True)
