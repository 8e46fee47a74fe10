"""Samples of rows and of sequences."""

import numpy as np
import pytest

import otpdag as otp
from tests.answers.linear_models import structural
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


def test_samples_follow_functions_of_what_was_drawn():
    model = structural()
    free = model.sample(2000, seed=3)
    shifted = model.sample(2000, seed=3, do={"t": lambda table: table["t"] + 1.0})
    assert (shifted["t"] - free["t"]).to_numpy() == pytest.approx(1.0)
    assert (shifted["y"] - free["y"]).to_numpy() == pytest.approx(3.0)
    by_z = model.sample(50, seed=3, do={"t": lambda table: np.where(table["z"] > 0, 1.0, -1.0)})
    assert set(by_z["t"]) == {-1.0, 1.0}
