"""Documents and images."""

import numpy as np
import pytest
import torch
from scipy import sparse

from otpdag.data.documents import Documents, Images, shuffled_words
from otpdag.errors import DataError

COUNTS = np.array([[2, 0, 1], [0, 0, 0], [0, 3, 0], [1, 1, 1]])


def test_sparse_and_dense_matrices_are_the_same_and_stay_as_they_are():
    given = sparse.coo_array(([1.0, 1.0, 0.0, 4.0], ([0, 0, 1, 1], [2, 2, 0, 1])), shape=(2, 3))
    documents = Documents(given)
    np.testing.assert_array_equal(documents.counts.toarray(), [[0, 0, 2], [0, 4, 0]])
    assert documents.counts.nnz == 2
    assert given.nnz == 4
    np.testing.assert_array_equal(Documents(COUNTS).counts.toarray(), COUNTS)


def test_the_order_depends_on_what_documents_hold_and_empty_ones_have_none():
    shuffle = np.random.default_rng(0).permutation(4)
    one, other = Documents(COUNTS), Documents(COUNTS[shuffle])
    assert sorted(one.canonical_order.tolist()) == [0, 2, 3]
    np.testing.assert_array_equal(COUNTS[one.canonical_order], COUNTS[shuffle][other.canonical_order])


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([[1.0, -1.0]], "counts of words must be finite and at least 0"),
        ([[np.nan, 1.0]], "counts of words must be finite and at least 0"),
        (np.zeros((0, 3)), r"documents must be a matrix \(documents, words\); got shape \(0, 3\)"),
    ],
)
def test_what_are_no_documents_is_refused(counts, message):
    with pytest.raises(DataError, match=message):
        Documents(counts)


def test_words_come_as_often_as_they_count_in_random_order():
    documents = Documents(np.array([[40, 0, 20], [0, 0.2, 0]])).counts
    words = shuffled_words(documents, np.random.default_rng(1))
    assert np.bincount(words[0].numpy(), minlength=3).tolist() == [40, 0, 20]
    assert words[0].tolist() != sorted(words[0].tolist())
    assert words[1].tolist() == [1]  # no document is left empty


def test_images_are_flattened_channels_first():
    pixels = np.arange(24.0).reshape(2, 3, 2, 2)
    rows = Images(pixels).rows
    assert rows.dtype == torch.float32
    assert rows.tolist() == [list(range(12)), list(range(12, 24))]
    assert torch.equal(Images(torch.from_numpy(pixels)).rows, rows)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.zeros(4), r"images must have shape \(n, ...\) with at least 2 of them; got \(4,\)"),
        (np.zeros((1, 4)), r"at least 2 of them; got \(1, 4\)"),
        (np.full((2, 4), np.inf), "images must be finite; got NaN or infinity"),
    ],
)
def test_what_are_no_images_is_refused(pixels, message):
    with pytest.raises(DataError, match=message):
        Images(pixels)
