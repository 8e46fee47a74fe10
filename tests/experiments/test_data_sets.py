"""Many data sets in one fit end where each alone would."""

import numpy as np
import pytest
import torch

import otpdag as otp
from baselines import em
from experiments.data_sets import fit_data_sets, start_data_sets
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.engine import Adam
from otpdag.errors import ModelError
from otpdag.settings import ClosedForm, Objective

GRAPH = otp.Graph([("z", "x")], hidden=["z"])
WEIGHTS = np.array([[0.6, 0.4], [0.3, 0.7], [0.5, 0.5]])
SCALES = np.broadcast_to(np.array([1.0, 1.3, 0.9])[:, None, None], (3, 2, 2)).copy()


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    means = np.array([[[0.0, 0.0], [3.0, 1.0]], [[0.0, 2.0], [2.5, 0.0]], [[0.0, 0.0], [2.0, 2.0]]])
    z = np.stack([(rng.random(150) > w[0]).astype(int) for w in WEIGHTS])
    return np.take_along_axis(means, z[..., None], 1) + rng.normal(size=(3, 150, 2)) * SCALES[:, :1]


def structure():
    return otp.Model(GRAPH, {"z": m.Categorical(2), "x": m.Normal(2)}).structure


def batch(data):
    rows = data.shape[1]
    seen = torch.ones(1, rows, 2, dtype=torch.bool)
    return Batch({"x": torch.as_tensor(data)}, {"x": seen}, torch.ones(1, rows, dtype=torch.float64))


def frozen(sets=slice(None)):
    return {"z": {"probs": WEIGHTS[sets]}, "x": {"scale": SCALES[sets]}}


def test_frozen_values_stay_and_the_rest_is_where_em_ends(data):
    starts = start_data_sets(structure(), batch(data))["x"]["loc"]
    found = fit_data_sets(structure(), batch(data), otp.entropic(), begin={"x": {"loc": starts}}, frozen=frozen())
    peer = em.fit(data, means=starts[:, 0].numpy(), variances=SCALES**2, weights=WEIGHTS, steps=2000)
    np.testing.assert_allclose(found.naturals["x"]["loc"], peer.params["means"], atol=1e-3)
    np.testing.assert_allclose(found.loss, -peer.objective, atol=1e-6)
    np.testing.assert_allclose(found.naturals["z"]["probs"][:, 0], WEIGHTS)
    np.testing.assert_allclose(found.naturals["x"]["scale"], SCALES)
    course = found.history["x"]["loc"]
    torch.testing.assert_close(course[0], starts[:, 0])
    torch.testing.assert_close(course[-1], found.naturals["x"]["loc"])
    assert not found.failed.any()


def test_a_batch_equals_its_parts_and_plain_fits(data):
    together = fit_data_sets(structure(), batch(data), otp.entropic(), restarts=3)
    alone = fit_data_sets(structure(), batch(data[1:2]), otp.entropic(), restarts=3)
    torch.testing.assert_close(together.loss[1], alone.loss[0], atol=1e-7, rtol=0)
    model = otp.Model(GRAPH, {"z": m.Categorical(2), "x": m.Normal(2)})
    otp.fit(model, {"x": data[1]}, restarts=8)
    ours = together.naturals["x"]["loc"][1]
    np.testing.assert_allclose(ours[ours[:, 0].argsort()], model.params()["x"]["loc"], atol=1e-3)


def test_each_data_set_keeps_its_best_start(data):
    good = start_data_sets(structure(), batch(data))["x"]["loc"]
    bad = good.mean(2, keepdim=True).expand_as(good) + 1e-3
    begin = {"x": {"loc": torch.cat([bad, good], 1)}}
    method = otp.entropic(steps=2)
    found = fit_data_sets(structure(), batch(data), method, restarts=2, begin=begin, frozen=frozen())
    assert found.kept.tolist() == [1, 1, 1]


def test_a_uniform_reference_leaves_given_weights_out(data):
    starts = {"x": {"loc": start_data_sets(structure(), batch(data))["x"]["loc"]}}
    method = otp.entropic(eps=0.7, reference="uniform", steps=200)
    told = fit_data_sets(structure(), batch(data), method, begin=starts, frozen=frozen())
    halves = {"z": {"probs": np.full((3, 2), 0.5)}, "x": {"scale": SCALES}}
    equal = fit_data_sets(structure(), batch(data), otp.entropic(eps=0.7, steps=200), begin=starts, frozen=halves)
    torch.testing.assert_close(told.naturals["x"]["loc"], equal.naturals["x"]["loc"], atol=1e-5, rtol=0)


def test_drawn_steps_hold_frozen_values_too(data):
    method = otp.paper(steps=12, batch_size=32)
    found = fit_data_sets(structure(), batch(data), method, restarts=2, frozen=frozen())
    assert found.history["x"]["loc"].shape == (13, 3, 2, 2)
    np.testing.assert_allclose(found.naturals["x"]["scale"], SCALES)
    assert (found.history["x"]["loc"][-1] != found.history["x"]["loc"][0]).any()


def test_what_does_not_fit_is_named(data):
    with pytest.raises(ModelError, match=r"'probs' of node 'z' must have shape \(3, 1, 2\); got \(2, 2\)"):
        fit_data_sets(structure(), batch(data), otp.entropic(), frozen={"z": {"probs": WEIGHTS[:2]}})
    with pytest.raises(ModelError, match="node 'x' has no learned parameter 'variance'"):
        fit_data_sets(structure(), batch(data), otp.entropic(), frozen={"x": {"variance": SCALES}})
    with pytest.raises(ModelError, match="what is ClosedForm is minimised by Deterministic; got Adam"):
        otp.Method("drawn", Objective(eps=0.7), ClosedForm(reference="uniform"), Adam())
