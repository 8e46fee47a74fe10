"""Checkpoints of runs, and the fingerprints by which a run knows its own."""

import os
import random
import threading
from functools import lru_cache, partial, partialmethod
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from scipy import sparse

import otpdag as otp
from benchmarks.changed_runs import accepted, changes
from experiments.small_models import poisson_chain
from otpdag import mechanisms as m
from otpdag.data.parts import LocalParts
from otpdag.datasets import bars
from otpdag.engine.fingerprint import fingerprint
from otpdag.engine.monitor import Stopping
from otpdag.errors import DataError
from otpdag.estimators import WassersteinAutoencoder
from otpdag.safe_archive import read_bundle, write_bundle

# -- checkpoints: a fit that was stopped goes on to the very same end -------------------------------------------------


pytestmark = pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")

RNG = np.random.default_rng(17)
QUICK = otp.SearchSchedule(short_rows=100, short_steps=6, finalists=2, finalist_steps=3)


def mixture_table(rows=150):
    z = RNG.integers(0, 2, rows)
    return pd.DataFrame({"x": np.where(z, 1.2, -1.0) + RNG.normal(size=rows), "n": RNG.poisson(np.where(z, 6.0, 2.0))})


def mixture(components=2):
    graph = otp.Graph([("z", "x"), ("z", "n")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(components), "x": m.Normal(), "n": m.Poisson()})


def hmm():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(4), "x": m.Poisson()})


def factor():
    graph = otp.Graph([("u", "x"), ("u", "y")], hidden=["u"])
    return otp.Model(graph, {"u": m.Normal(), "x": m.Normal(), "y": m.Poisson()})


def state_space():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.Normal(), "x": m.Normal()})


def topics():
    graph = otp.Graph([("shares", "words")], hidden=["shares"])
    return otp.Model(graph, {"shares": m.Dirichlet(6), "words": m.Multinomial(9)})


TABLE = mixture_table()
COUNTS = poisson_chain(12, 40, np.random.default_rng(0))[0]
NUMBERS = RNG.normal(size=(10, 30)).cumsum(1) * 0.3 + RNG.normal(size=(10, 30))
FACTORS = TABLE.rename(columns={"n": "y"})

CASES = {
    "entropic": (mixture, TABLE, {"method": otp.entropic(), "restarts": 4, "course": QUICK}, 3),
    "transport": (mixture, TABLE, {"method": otp.transport(points=128), "restarts": 4, "course": QUICK}, 4),
    "moved grids": (factor, FACTORS, {"method": otp.entropic(steps=30), "restarts": 2, "course": QUICK}, 2),
    "paper": (mixture, TABLE, {"method": otp.paper(steps=24, batch_size=32), "restarts": 3}, 10),
    "one start of the paper's": (mixture, TABLE, {"method": otp.paper(steps=24, batch_size=32), "restarts": 1}, 21),
    "hidden markov": (hmm, COUNTS, {"restarts": 3}, 2),
    "pieces": (hmm, COUNTS, {"method": otp.paper(steps=16), "restarts": 2}, 7),
    "state space": (state_space, NUMBERS, {"method": otp.entropic(steps=12), "restarts": 1}, 5),
    "documents": (topics, bars(6, 120, 40, seed=1).counts, {"restarts": 2, "steps": 20}, 6),
}
ROBUST = {"robust": (mixture, TABLE, {"robust": True, "restarts": 4}, 1)}


def stop_at(step):
    return lambda record: record["step"] + 1 >= step


def end_of(name, **options):
    build, data, settings, _ = (CASES | ROBUST)[name]
    model = build()
    return model, otp.fit(model, data, seed=3, **settings, **options)


def assert_equal_ends(one, other):
    for node, own in one[0].params().items():
        for key, value in own.items():
            np.testing.assert_array_equal(value, other[0].params()[node][key], err_msg=f"{node}.{key}")
    assert one[1].loss == other[1].loss
    assert one[1].status == other[1].status
    without_time = [[{**record, "seconds": 0.0} for record in result.history] for _, result in (one, other)]
    assert without_time[0] == without_time[1]
    assert one[1].stages == other[1].stages
    for first, second in zip(one[1].restarts, other[1].restarts, strict=True):
        assert (first.number, first.seed, first.kept) == (second.number, second.seed, second.kept)
        np.testing.assert_array_equal([first.short_loss, first.loss], [second.short_loss, second.loss])
        assert torch.equal(first.point, second.point)


@pytest.mark.parametrize("name", CASES)
def test_a_fit_that_was_stopped_ends_where_it_would_have_ended(name, tmp_path):
    path, step = tmp_path / "run.checkpoint", CASES[name][3]
    whole = end_of(name)
    assert len(whole[1].history) > step, "there is nothing to stop"
    stopped = end_of(name, checkpoint=path, callbacks=[stop_at(step)])
    assert len(stopped[1].history) == step
    assert path.exists()
    assert not (tmp_path / "run.checkpoint.part").exists()
    resumed = end_of(name, checkpoint=path)
    assert_equal_ends(whole, resumed)
    assert_equal_ends(whole, end_of(name, checkpoint=path))  # a finished run is read


def test_a_run_may_be_stopped_again_and_again(tmp_path):
    path = tmp_path / "run.checkpoint"
    whole = end_of("entropic")
    steps = len(whole[1].history)
    for step in range(1, steps):
        stopped = end_of("entropic", checkpoint=path, callbacks=[stop_at(step)])
        assert len(stopped[1].history) == step
    assert_equal_ends(whole, end_of("entropic", checkpoint=path))


def test_a_resumed_fit_repeats_no_step(tmp_path):
    path, seen = tmp_path / "run.checkpoint", []
    end_of("paper", checkpoint=path, callbacks=[stop_at(10)])
    end_of("paper", checkpoint=path, callbacks=[lambda record: seen.append(record["step"])])
    assert seen == list(range(10, 24))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step"), [("entropic", 2), ("robust", 0), ("hidden markov", 0), ("paper", 5)])
def test_a_run_that_died_in_the_middle_goes_on_from_its_last_run(name, step, tmp_path):
    path = tmp_path / "run.checkpoint"

    def die(record):
        if record["step"] == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        end_of(name, checkpoint=path, callbacks=[die])
    assert path.exists()  # the short runs are done, and written
    assert_equal_ends(end_of(name), end_of(name, checkpoint=path))


def test_a_checkpoint_changes_nothing(tmp_path):
    assert_equal_ends(end_of("hidden markov"), end_of("hidden markov", checkpoint=tmp_path / "run.checkpoint"))


def autoencoder():
    return WassersteinAutoencoder(2, hidden=(8,), n_epochs=6, batch_size=32, learning_rate=3e-3)


def test_an_auto_encoder_that_was_stopped_ends_where_it_would_have_ended(tmp_path):
    rows = np.random.default_rng(0).normal(size=(100, 5)) @ np.random.default_rng(1).normal(size=(5, 5))
    whole = autoencoder().fit(rows)
    path = tmp_path / "images.checkpoint"
    stopped = autoencoder().fit(rows, checkpoint=path, callbacks=[stop_at(9)])
    assert len(stopped.result_.history) == 9 < len(whole.result_.history)
    resumed = autoencoder().fit(rows, checkpoint=path)
    assert_equal_ends((whole.model_, whole.result_), (resumed.model_, resumed.result_))
    np.testing.assert_array_equal(whole.transform(rows), resumed.transform(rows))


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["text", "safetensors", "nothing"])
def test_a_foreign_file_is_refused(content, tmp_path):
    path = tmp_path / "run.checkpoint"
    if content == "text":
        path.write_text("notes about something else")
    elif content == "safetensors":
        save_file({"point": torch.zeros(3)}, path, metadata={"format": "pt"})
    else:
        path.write_bytes(b"")
    before = path.read_bytes()
    model = mixture()
    with pytest.raises(DataError, match="is not a saved otpdag checkpoint"):
        otp.fit(model, TABLE, checkpoint=path)
    assert path.read_bytes() == before
    assert not model.is_fitted


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    path = tmp_path / "run.checkpoint"
    settings = {"method": otp.entropic(), "seed": 3, "restarts": 2, "course": QUICK, "checkpoint": path}
    otp.fit(mixture(), TABLE, **settings)
    before = path.read_bytes()
    for build, table, other, message in (
        (mixture, TABLE, {"seed": 4}, "belongs to another run: its seed is 3, not 4"),
        (mixture, TABLE, {"restarts": 3}, "belongs to another run: its restarts is 2, not 3"),
        (mixture, TABLE, {"method": "transport"}, "belongs to another run: its method is entropic"),
        (mixture, TABLE, {"steps": 7}, "belongs to another run: its method is entropic, 400 steps"),
        (mixture, TABLE, {"method": otp.entropic(eps=0.3)}, "belongs to another run: its method's settings is"),
        (mixture, TABLE, {"method": otp.entropic(reference="uniform")}, "another run: its method's settings is"),
        (mixture, TABLE, {"course": otp.SearchSchedule(finalists=1)}, "belongs to another run: its course is"),
        (mixture, TABLE, {"robust": True}, "belongs to another run: its robust is no, not outliers"),
        (mixture, TABLE.iloc[:100], {}, "belongs to another run: its rows is 150, not 100"),
        (mixture, TABLE.assign(x=TABLE["x"] + 1e-9), {}, "belongs to another run: its data's fingerprint is"),
        (factor, FACTORS, {}, "belongs to another run: its nodes is z, x, n, not u, x, y"),
    ):
        with pytest.raises(DataError, match=message):
            otp.fit(build(), table, **{**settings, **other})
    assert path.read_bytes() == before


def test_a_checkpoint_of_another_weight_or_pace_is_refused(tmp_path):
    path = tmp_path / "run.checkpoint"
    settings = {"restarts": 1, "course": QUICK, "checkpoint": path}
    with pytest.warns(otp.ConvergenceWarning):
        otp.fit(mixture(), TABLE, method=otp.paper(steps=3), **settings)
    others = (
        otp.paper(steps=3, eta=0.0),
        otp.paper(steps=3, learning_rate=0.5),
        otp.paper(steps=3, divergence=otp.divergences.Sinkhorn()),
    )
    for other in others:
        with pytest.raises(DataError, match="belongs to another run: its method's settings is"):
            otp.fit(mixture(), TABLE, method=other, **settings)


@pytest.mark.parametrize("restarts", [1, 3], ids=["no run is done", "some runs are done"])
def test_a_checkpoint_of_a_model_of_another_size_is_refused(restarts, tmp_path):
    settings = {"seed": 3, "restarts": restarts, "course": QUICK, "checkpoint": tmp_path / "run.checkpoint"}
    otp.fit(mixture(2), TABLE, callbacks=[stop_at(2)], **settings)
    with pytest.raises(DataError, match="belongs to another run: its model's fingerprint is"):
        otp.fit(mixture(3), TABLE, **settings)


def test_a_checkpoint_that_cannot_be_written_is_a_warning(tmp_path):
    with pytest.warns(UserWarning, match=r"the checkpoint .*run.checkpoint' cannot be written: No such file"):
        result = otp.fit(mixture(), TABLE, restarts=1, checkpoint=tmp_path / "nowhere" / "run.checkpoint")
    assert result.status.converged


def test_a_checkpoint_with_one_flipped_bit_is_refused(tmp_path):
    path, chance = tmp_path / "run.checkpoint", random.Random(0)
    settings = {"seed": 3, "restarts": 1, "course": QUICK, "checkpoint": path}
    otp.fit(mixture(2), TABLE, callbacks=[stop_at(2)], **settings)
    whole = path.read_bytes()
    for _ in range(20):
        flipped = bytearray(whole)
        flipped[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(DataError, match="is not a saved otpdag checkpoint"):
            otp.fit(mixture(2), TABLE, **settings)
    path.write_bytes(whole)
    assert otp.fit(mixture(2), TABLE, **settings).status.converged


def test_a_fit_that_has_something_to_write_ends_in_order_when_it_is_told_to_terminate(monkeypatch, tmp_path):
    asked, listening = [], Stopping.listening

    def noted(self, *, to_terminate):
        asked.append(to_terminate)
        return listening(self, to_terminate=to_terminate)

    monkeypatch.setattr(Stopping, "listening", noted)
    for path in (None, tmp_path / "run.checkpoint"):
        otp.fit(mixture(), TABLE, restarts=1, course=QUICK, checkpoint=path)
    assert asked == [False, True]


def test_a_pipe_is_no_checkpoint_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path):
        with pytest.raises(DataError, match="no checkpoint at"):
            otp.fit(mixture(), TABLE, restarts=1, checkpoint=place)


@pytest.mark.parametrize("name", ["format", "about", "history", "stages"])
@pytest.mark.parametrize("value", [None, [], 5, "a", {"x": 1}])
def test_a_checkpoint_with_odd_records_is_refused(name, value, tmp_path):
    path = tmp_path / "run.checkpoint"
    settings = {"seed": 3, "restarts": 1, "course": QUICK, "checkpoint": path}
    otp.fit(mixture(2), TABLE, callbacks=[stop_at(2)], **settings)
    state, tensors = read_bundle(path, "checkpoint.json", "otpdag checkpoint")
    if (name, value) == ("stages", []):
        tensors["history"] = tensors["history"][:, :2]
    write_bundle(path, "checkpoint.json", {**state, name: value}, tensors)
    with pytest.raises(DataError, match=r"is not a saved otpdag checkpoint|belongs to another run"):
        otp.fit(mixture(2), TABLE, **settings)


@pytest.mark.parametrize("restarts", [1, 3], ids=["no run is done", "some runs are done"])
def test_a_checkpoint_whose_numbers_do_not_fit_is_refused(restarts, tmp_path):
    path = tmp_path / "run.checkpoint"
    settings = {"seed": 3, "restarts": restarts, "course": QUICK, "checkpoint": path}
    otp.fit(mixture(2), TABLE, callbacks=[stop_at(2 if restarts == 1 else 9)], **settings)
    state, tensors = read_bundle(path, "checkpoint.json", "otpdag checkpoint")
    odd = {"now.parameters": torch.tensor(99)}
    if restarts > 1:
        wide = torch.zeros(3, 99).double()
        odd = {"done.000.point": wide, "done.000.loss": wide, "done.000.failed": wide, "done.000.converged": wide}
    for key, value in odd.items():
        assert key in tensors
        write_bundle(path, "checkpoint.json", state, {**tensors, key: value})
        with pytest.raises(DataError, match=r"belongs to another model|does not fit together"):
            otp.fit(mixture(2), TABLE, **settings)


ONE_THING = {
    "an edge reversed",
    "a hidden node seen",
    "a given value",
    "a digit of a cell",
    "a weight",
    "what a function refers to",
    "a lag",
    "where sequences begin",
    "another corpus of the same shape",
    "a module",
    "a table in a file",
    "version of otpdag",
}  # the benchmark of faults has more


@pytest.mark.parametrize("name", sorted(ONE_THING))
def test_a_run_of_which_one_thing_has_changed_is_not_resumed(name):
    assert not accepted(next(change for change in changes(5) if change.name == name))


# -- fingerprints of data: equal contents have one, others do not -----------------------------------------------------


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


class KnownByName:
    def __reduce__(self):
        return "somewhere"


def test_a_value_that_cannot_be_looked_into_is_an_error():
    for value in ((n for n in range(2)), threading.Lock()):
        with pytest.raises(DataError, match=f"it cannot look into {type(value).__name__}"):
            fingerprint({"settings": [value]})
    with pytest.raises(DataError, match=r"cannot look into .*KnownByName.*, which is known by its name alone"):
        fingerprint({"settings": [KnownByName()]})
    around = []
    around.append(around)
    with pytest.raises(DataError, match="a part of itself"):
        fingerprint(around)


def test_equal_contents_have_one_fingerprint_and_others_another():
    counts = sparse.csr_array(np.array([[0, 2], [1, 0]]))
    dates = pd.Series(pd.to_datetime(["2020-01-01", "2021-01-01"]))

    def scaled(by):
        return lambda x: by * helper(x)

    def helper(x):
        return x + 1

    def inside(factor):
        own = {"FACTOR": factor}
        exec("def f(x):\n    return (lambda: FACTOR * x)()", own)
        return own["f"]

    def of_a_module(factor):
        own = ModuleType("of_the_users_own")
        exec(f"FACTOR = {factor}\ndef scaled(x):\n    return FACTOR * x", vars(own))
        calls = {"own": own}
        exec("def f(x):\n    return own.scaled(x)", calls)
        return calls["f"]

    def of_a_class(factor):
        class Scaled:
            def by(self, factor):
                return factor

            twice = partialmethod(by, factor)
            read = property(lambda self: 1, lambda self, value: setattr(self, "value", factor))

        return Scaled

    def levels(*order, ordered=False):
        return pd.DataFrame({"k": pd.Categorical(["low", "high"], categories=order, ordered=ordered)})

    different = [
        *(of_a_module(1.0), of_a_module(2.0), lru_cache(scaled(1)), lru_cache(scaled(2)), of_a_class(1), of_a_class(2)),
        *(lambda x, y: x, lambda y, x: y),  # what is called by names depends on them
        *(inside(1.0), inside(2.0), torch.ones(2).bfloat16(), 2 * torch.ones(2).bfloat16(), torch.eye(2).to_sparse()),
        *(levels("low", "high"), levels("high", "low"), levels("low", "high", ordered=True)),
        *(pd.DataFrame({1: [1]}), pd.DataFrame({"1": [1]})),
        *(pd.DataFrame({"k": pd.Series(cells, dtype=object)}) for cells in ([1, "1"], ["1", 1])),
        *(1, 1.0, True, "1", b"1", None, (1,), [1], {1}, {1: 1}, np.int64(1), np.ones(1), torch.ones(1)),
        *(
            counts,
            counts.T.tocsr(),
            2 * counts,
            dates,
            dates.dt.year,
            pd.DataFrame({"a": [1]}),
            pd.DataFrame({"b": [1]}),
            pd.Series([1.0, 2.0]),
            pd.Series([1.0, 2.0], index=[1, 0]),  # weights are taken by their index, a table by the order of its rows
        ),
        *(scaled(1), scaled(2), helper, print, otp.SearchSchedule(), np.sqrt, torch.float32, partial(helper, 1)),
        *(otp.Graph([("a", "b")]), otp.Graph([("b", "a")]), otp.Graph([("a", "b")], hidden=["a"]), model(2), model(3)),
    ]
    hashes = [fingerprint(value) for value in different]
    assert fingerprint(pd.DataFrame({"a": [1, 2]})) == fingerprint(pd.DataFrame({"a": [1, 2]}, index=[1, 0]))
    assert len(set(hashes)) == len(hashes)
    assert [fingerprint(value) for value in different] == hashes
    assert fingerprint({"b", "a"}) == fingerprint({"a", "b"})
    assert fingerprint(counts.copy()) == fingerprint(counts)
    assert fingerprint(scaled(2)) == fingerprint(scaled(2))
    fitted = otp.fit(model(2), pd.DataFrame({"x": np.arange(9.0)}), restarts=1).model
    assert fingerprint(fitted) == fingerprint(model(2))  # what was estimated is no part of it
