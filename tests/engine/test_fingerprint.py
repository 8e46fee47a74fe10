"""Fingerprints of data: equal contents have one, others do not."""

import hashlib

import numpy as np
import pandas as pd
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data.partitioned import LocalParts
from otpdag.engine.checkpoint import fingerprint


def model(components):
    return otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(components), "x": m.Normal()})


def test_a_table_in_parts_is_read_through():
    """Every cell of every part counts, and in which part it is."""
    frames = [pd.DataFrame({"x": [1.0, np.nan], "k": ["a", "b"]}), pd.DataFrame({"x": [3.0], "k": ["b"]})]

    def of(parts):
        return fingerprint({"table": LocalParts(lambda: iter(parts))})

    assert of(frames) == of([frame.copy() for frame in frames])
    assert of(frames) != of(frames[::-1])
    assert of(frames) != of([frames[0], frames[1].assign(x=3.0 + 1e-12)])
    assert of(frames) != of([frames[0].assign(k=["a", "a"]), frames[1]])


def test_fingerprints_stay_what_they_were_so_that_runs_of_another_day_go_on():
    """SHA-256 of the pieces, each after its length; twelve digits are kept."""
    digest = hashlib.sha256()
    for piece in (b"'x'", b"float64 (2,)", np.array([0.5, 2.0]).tobytes(), b"'n'", b"3"):
        digest.update(len(piece).to_bytes(8, "little") + piece)
    assert fingerprint({"x": np.array([0.5, 2.0]), "n": 3}) == digest.hexdigest()[:12]
    assert fingerprint({"b", "a"}) == fingerprint(frozenset({"a", "b"}))
    assert fingerprint(torch.tensor([1.0])) == fingerprint(np.array([1.0], dtype=np.float32))
    assert fingerprint([1, 2]) == fingerprint((1, 2)) != fingerprint([2, 1])
    assert fingerprint(model(2)) == fingerprint(model(3))  # a model has no content here: its parameters are told apart
    assert fingerprint(print) != fingerprint(otp.SearchSchedule())
