"""Joint states, against itertools."""

from itertools import product

import pytest
import torch

from otpdag.numerics import joint_codes


@pytest.mark.parametrize("sizes", [[3], [2, 3], [4, 1, 2], [2, 2, 2, 3]])
def test_codes_enumerate_all_combinations(sizes):
    rows = torch.stack(joint_codes(sizes), -1).tolist()
    assert rows == [list(row) for row in product(*map(range, sizes))]


def test_no_category_has_no_codes():
    assert joint_codes([]) == []
