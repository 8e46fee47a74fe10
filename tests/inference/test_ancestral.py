"""Samples of sequences."""

import numpy as np
import pytest

import otpdag as otp
from tests.dynamic_models import fitted_poisson_hmm


def test_samples_look_like_the_model(tmp_path):
    model, counts = fitted_poisson_hmm()
    drawn = model.sample(200, length=60, seed=0)
    assert list(drawn.columns) == ["sequence", "time", "z", "x"]
    assert len(drawn) == 12_000
    assert drawn["x"].mean() == pytest.approx(counts.mean(), rel=0.1)
    moves = drawn["z"].to_numpy().reshape(200, 60)
    assert (moves[:, 1:] == moves[:, :-1]).mean() == pytest.approx(
        model.params()["z"]["probs"].diagonal().mean(), abs=0.02
    )
    with pytest.raises(otp.ModelError, match="length must be at least 1"):
        model.sample(5, seed=0)
    model.save(tmp_path / "hmm.otp")
    again = otp.load(tmp_path / "hmm.otp")
    np.testing.assert_allclose(again.predict_proba(counts, "z"), model.predict_proba(counts, "z"))
