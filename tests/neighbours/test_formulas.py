"""Formulas become graphs, and lines that say something else are named."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag.neighbours import from_formulas


def test_a_factor_model_finds_its_loadings():
    rng = np.random.default_rng(0)
    factor = rng.normal(size=3000)
    loadings = {"a": 1.5, "b": 1.0, "c": 0.7}
    table = pd.DataFrame({name: 2.0 + load * factor + 0.5 * rng.normal(size=3000) for name, load in loadings.items()})
    model = from_formulas("f =~ a + b + c")
    otp.fit(model, table, seed=0)
    found = [abs(float(model.params()[name]["weight"].ravel()[0])) for name in loadings]
    np.testing.assert_allclose(found, list(loadings.values()), atol=0.08)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least one formula"),
        ("a ~~ b", "covariance"),
        ("a ~ b\nc + d", "line 2"),
        ("f =~ 0.5*a + b", "mechanisms"),
        ("f =~ a + ", "no name"),
        ("f =~ a + a", "twice"),
        ("a ~ b\nb ~ a", "cycle"),
    ],
)
def test_what_is_no_formula_is_named(text, words):
    with pytest.raises(otp.OtpdagError, match=words):
        from_formulas(text)
