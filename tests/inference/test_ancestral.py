"""Samples of sequences."""

import numpy as np
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.datasets import poisson_chain


def hmm(transition=None, size=4):
    return otp.Model(
        otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"]),
        {"z": transition or m.Categorical(size), "x": m.Poisson()},
    )


def fitted(seed=0):
    counts, _, _ = poisson_chain(20, 60, np.random.default_rng(seed))
    model = hmm()
    otp.fit(model, counts, seed=0, restarts=2)
    return model, counts


def test_samples_look_like_the_model(tmp_path):
    model, counts = fitted()
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
