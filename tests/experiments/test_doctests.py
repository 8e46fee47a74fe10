"""The examples in docstrings of what experiments read and measure."""

import doctest

import pytest

from experiments import corpora, image_quality, image_sets, metrics, outliers, published_files


@pytest.mark.parametrize("module", [corpora, image_quality, image_sets, metrics, outliers, published_files])
def test_examples_are_right(module):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(module, optionflags=flags).failed == 0
