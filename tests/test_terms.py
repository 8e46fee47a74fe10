"""Loss terms, and the two halves of the parameters."""

import pytest
import torch

from otpdag.problem import LossTerms, split_theta

ONE = torch.tensor([1.0, 2.0])


def test_terms_that_are_not_named_are_zero_and_all_add_up():
    terms = LossTerms.of(ONE, reconstruction=ONE, direct=10 * ONE)
    assert terms.divergence.tolist() == terms.entropic.tolist() == [0.0, 0.0]
    assert terms.total.tolist() == [11.0, 22.0]


def test_terms_add_one_by_one():
    added = LossTerms.of(ONE, reconstruction=ONE) + LossTerms.of(ONE, reconstruction=ONE, entropic=-ONE)
    assert added.reconstruction.tolist() == [2.0, 4.0]
    assert added.entropic.tolist() == [-1.0, -2.0]
    assert added.total.tolist() == [1.0, 2.0]


def test_a_history_has_the_terms_of_one_replica():
    leaf = ONE.clone().requires_grad_(True)
    shown = LossTerms.of(leaf, reconstruction=leaf, divergence=3 * leaf).as_floats(1)
    assert shown == {"loss": 8.0, "reconstruction": 2.0, "divergence": 6.0, "entropic": 0.0, "direct": 0.0}
    with pytest.raises(IndexError):
        LossTerms.of(ONE).as_floats(2)


def test_parameters_of_maps_are_told_by_their_name():
    theta, phi = split_theta({"x.loc": ONE, "phi.x": 2 * ONE, "alphi.phi.": 3 * ONE})
    assert set(theta) == {"x.loc", "alphi.phi."}
    assert set(phi) == {"phi.x"}
