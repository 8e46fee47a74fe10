"""Entries of tables side by side: where they are written and read, and their densities and moments."""

import numpy as np
import torch
from scipy import stats

from otpdag.backward.elimination.flat_rows import LinearRows, Places
from otpdag.backward.elimination.linear_normal import Equations

RNG = np.random.default_rng(0)


def test_entries_go_to_their_cells_and_what_is_beyond_a_table_is_impossible():
    """Two arrays of three and two entries; a bank of rows with two cells, and one with three of which one is beyond."""
    first, second = torch.arange(6.0).reshape(2, 3), 10 + torch.arange(4.0).reshape(2, 2)
    banks = {(2,): torch.full((2, 3, 2), 99.0), (3,): torch.full((2, 1, 3), 99.0)}
    places = Places(
        {(2,): (torch.tensor([2]), torch.tensor([4, 0])), (3,): (torch.tensor([0]), torch.tensor([1, 3, 5]))},
        torch.tensor([1, 2, 5, 3, 0]),  # the third entry only fills an array up
    )
    places.put(banks, [first, second])
    for replica in range(2):
        flat = [*first[replica].tolist(), *second[replica].tolist(), -torch.inf]
        assert banks[2,][replica].tolist() == [[99.0, 99.0], [99.0, 99.0], [flat[4], flat[0]]]
        assert banks[3,][replica].tolist() == [[flat[1], flat[3], flat[5]]]
    beliefs = {(2,): torch.rand(2, 3, 2), (3,): torch.rand(2, 1, 3)}
    one, two = places.taken(beliefs, [3, 2])
    for replica in range(2):
        pool = [*beliefs[2,][replica, 2].tolist(), *beliefs[3,][replica, 0].tolist(), 0.0]
        assert one[replica].tolist() == [pool[1], pool[2], 0.0]
        assert two[replica].tolist() == [pool[3], pool[0]]
    assert places.taken(beliefs, []) == ()
    before = {sizes: bank.clone() for sizes, bank in banks.items()}
    places.put(banks, [])
    assert all(torch.equal(banks[sizes], bank) for sizes, bank in before.items())


def test_linear_rows_have_the_densities_and_moments_of_their_columns():
    """Columns are kept less a shift, which the equations take up again."""
    coefficients, constants = torch.as_tensor(RNG.normal(size=(2, 5, 1, 4))), torch.as_tensor(RNG.normal(size=(2, 5)))
    shift = torch.as_tensor(RNG.normal(size=(5, 4)))
    shift[:, 2:] = 0.0
    columns = torch.as_tensor(RNG.normal(size=(1, 2, 3, 3)))
    columns[..., -1] = 1.0
    rows = LinearRows(torch.tensor([3, 1]), torch.ones(6, dtype=torch.bool), columns)
    found = rows.log_prob(Equations(coefficients, constants, shift))
    assert found.shape == (2, 6)
    for replica in range(2):
        for group, row in enumerate((3, 1)):
            for entry in range(3):
                whole = columns[0, group, entry].numpy() + shift[row, :3].numpy()
                noise = coefficients[replica, row, 0, :3].numpy() @ whole
                expected = constants[replica, row].item() + stats.norm.logpdf(noise) + 0.5 * np.log(2 * np.pi)
                np.testing.assert_allclose(found[replica, 3 * group + entry], expected)
    weight = torch.as_tensor(RNG.random((2, 6)))
    moments = rows.moments(weight)
    expected = torch.einsum("rge,gei,gej->rgij", weight.reshape(2, 2, 3), columns[0], columns[0])
    torch.testing.assert_close(moments, expected)
