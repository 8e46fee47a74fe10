"""Bootstrap intervals against closed forms."""

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m


def regression(rows=400, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(rows)
    frame = pd.DataFrame({"x": x, "y": 1.0 + 2.0 * x + 0.5 * generator.standard_normal(rows)})
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    return model, frame, otp.fit(model, frame, seed=0)


def test_intervals_of_a_regression_have_the_width_of_its_standard_errors():
    _, frame, result = regression()
    table = result.intervals(draws=120, level=0.9, seed=1)
    slope = table.loc[("y", "weight", (0,))]
    error = 0.5 / np.sqrt(len(frame))
    assert slope["lower"] < slope["estimate"] < slope["upper"]
    np.testing.assert_allclose(slope["upper"] - slope["lower"], 2 * 1.645 * error, rtol=0.3)


def test_the_seed_determines_the_intervals_and_processes_do_not():
    _, _, result = regression(rows=120)
    one = result.intervals(draws=40, seed=3)
    pd.testing.assert_frame_equal(one, result.intervals(draws=40, seed=3, jobs=2))
    assert not one.equals(result.intervals(draws=40, seed=4))


@pytest.mark.parametrize("method", ["entropic", "transport"])
def test_a_mixture_keeps_its_labels_over_the_draws(method):
    generator = np.random.default_rng(1)
    state = generator.random(300) < 0.4
    frame = pd.DataFrame({"x": np.where(state, -3.0, 3.0) + generator.standard_normal(300)})
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal()})
    result = otp.fit(model, frame, seed=0, method=method, restarts=3)
    table = result.intervals(draws=30, seed=0)
    low, high = table.loc[("x", "loc", (0,))], table.loc[("x", "loc", (1,))]
    assert low["lower"] < -2.5 < high["lower"]
    assert (high["upper"] - high["lower"]) < 1.0


def test_what_gives_no_interval_is_refused():
    _, _, result = regression(rows=60)
    with pytest.raises(otp.ModelError, match="draws must be at least 10; got 3"):
        result.intervals(draws=3)
    with pytest.raises(otp.ModelError, match="level must lie between 0 and 1; got 90"):
        result.intervals(level=90)
