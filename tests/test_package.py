"""Names of the package: where they lie, what is said of those that it does not have, and how light it is."""

import subprocess
import sys

import pytest

import otpdag as otp


@pytest.mark.parametrize(
    ("name", "hint"),
    [("Normal", r"it is otpdag\.mechanisms\.Normal"), ("Modle", "is it 'Model'"), ("_private", "'_private'$")],
)
def test_a_name_that_lies_elsewhere_is_hinted_at(name, hint):
    with pytest.raises(AttributeError, match=hint):
        getattr(otp, name)


def test_every_name_is_found_at_its_home():
    assert all(getattr(otp, name) is not None for name in otp.__all__)
    homes = {"Graph": "otpdag.graph", "fit": "otpdag.engine.fit", "Model": "otpdag.model.model", "tie": "parameters"}
    assert all(getattr(otp, name).__module__.endswith(home) for name, home in homes.items())


def test_a_name_of_before_still_leads_there():
    with pytest.warns(DeprecationWarning, match=r"otpdag\.neighbours is now otpdag\.interop"):
        assert otp.neighbours is otp.interop
    with pytest.warns(DeprecationWarning, match=r"otpdag\.Course is now otpdag\.SearchSchedule"):
        assert otp.Course is otp.SearchSchedule
    with pytest.warns(DeprecationWarning, match=r"otpdag\.engine\.LBFGS is now otpdag\.engine\.Deterministic"):
        assert otp.engine.LBFGS is otp.engine.Deterministic
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = otp.engine.Nothing


def test_the_package_graphs_and_errors_import_nothing_heavy():
    code = (
        "import sys, otpdag\n"
        "otpdag.DataError, otpdag.Graph([('a', 'b')])\n"
        "assert not {'torch', 'pandas', 'numpy', 'scipy', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_what_a_first_fit_needs_leaves_the_heavy_parts_of_scipy_out():
    code = (
        "import sys, otpdag\n"
        "from otpdag import mechanisms\n"
        "otpdag.fit, otpdag.Model\n"
        "assert not {'scipy.special', 'scipy.sparse', 'scipy.stats', 'scipy.optimize'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
