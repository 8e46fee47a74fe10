"""Images become rows of numbers."""

import numpy as np
import pytest
import torch

from otpdag.data.documents import Images
from otpdag.errors import DataError


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
