"""What the package says of names that it does not have."""

import pytest

import otpdag as otp


@pytest.mark.parametrize(
    ("name", "hint"),
    [("Normal", r"it is otpdag\.mechanisms\.Normal"), ("Modle", "is it 'Model'"), ("_private", "'_private'$")],
)
def test_a_name_that_lies_elsewhere_is_hinted_at(name, hint):
    with pytest.raises(AttributeError, match=hint):
        getattr(otp, name)
