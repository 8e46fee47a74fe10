"""Hostile files: whatever a file holds, loading it is an error of the library or gives a model that works."""

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from benchmarks.hostile_files import survey, use_model, variants
from otpdag import mechanisms as m
from otpdag.engine import Adam
from otpdag.objective import Drawn
from otpdag.settings import Objective

RNG = np.random.default_rng(5)


def table(rows=60):
    z = RNG.integers(0, 2, rows)
    return pd.DataFrame(
        {
            "s": np.where(RNG.random(rows) < 0.3 + 0.4 * z, "wet", "dry"),
            "x": 2 * z + RNG.normal(size=rows),
            "n": RNG.poisson(1 + z),
            "v.0": RNG.normal(size=rows),
            "v.1": z - RNG.normal(size=rows),
        }
    )


def class_model():
    graph = otp.Graph([("z", "s"), ("z", "x"), ("x", "n"), ("x", "v")], hidden=["z"])
    kinds = {"z": m.Categorical(2), "s": m.Categorical(2), "x": m.Normal(scale=1.0), "n": m.Poisson(network=(3,))}
    model = otp.Model(graph, kinds | {"v": m.Normal(2)})
    otp.fit(model, table(), restarts=1, method=otp.entropic(steps=3))
    return model


def map_model():
    model = otp.Model(
        otp.Graph([("u", "x"), ("u", "v")], hidden=["u"]), {"u": m.Normal(), "x": m.Normal(), "v": m.Normal(2)}
    )
    method = otp.Method(
        "few", Objective(eps=1.0), Drawn(noise="marginal", batch_size=16, hidden_layers=(3,)), Adam(steps=3)
    )
    otp.fit(model, table()[["x", "v.0", "v.1"]], restarts=1, method=method)
    return model


def chain_model():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal()})
    model.set_params(
        {
            "z": {"probs": [[0.9, 0.1], [0.2, 0.8]]},
            "z[0]": {"probs": [0.5, 0.5]},
            "x": {"loc": [0.0, 3.0], "scale": [1.0, 1.0]},
        }
    )
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("build", [class_model, map_model, chain_model])
def test_hostile_models(build, tmp_path):
    path = tmp_path / "good.otp"
    build().save(path)
    good = path.read_bytes()
    result = survey(variants(good, seed=1, most=80), tmp_path, otp.load, use_model)
    assert result.broken == []
    assert result.greedy == []
    assert result.outcomes["refused"] > 200


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_hostile_estimators(tmp_path):
    images = RNG.random((40, 8, 8, 1))
    rows = RNG.normal(size=(40, 5))
    codes = otp.estimators.VectorQuantizedAutoencoder(n_codes=4, code_dim=2, width=4, n_epochs=1).fit(images)
    dense = otp.estimators.WassersteinAutoencoder(2, hidden=(4,), n_epochs=1).fit(rows)
    for estimator, data in ((codes, images), (dense, rows)):
        path = tmp_path / "good.otp"
        estimator.save(path)
        again = type(estimator).load(path)
        np.testing.assert_array_equal(again.transform(data), estimator.transform(data))
        hostile = variants(path.read_bytes(), seed=2, most=120)
        result = survey(hostile, tmp_path, type(estimator).load, lambda made, data=data: made.transform(data))
        assert result.broken == []
        assert result.greedy == []
        assert result.outcomes["refused"] > 100
