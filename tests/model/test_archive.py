"""Files: a round trip changes nothing, and reading runs nothing."""

import dataclasses
import json
import pickle
import re
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward import RowCode
from otpdag.engine import Adam, Deterministic
from otpdag.errors import DataError, ModelError
from otpdag.model.archive import FORMAT_VERSION
from otpdag.objective import Drawn
from otpdag.settings import ClosedForm, Objective
from otpdag.spaces import Discrete, Real

RNG = np.random.default_rng(23)


def table_of(n=60):
    z = RNG.integers(0, 2, n)
    return pd.DataFrame(
        {
            "s": np.where(z, "wet", "dry"),
            "x": z + RNG.normal(size=n),
            "n": RNG.poisson(1 + z),
            "p": RNG.gamma(2.0, size=n),
            "b": RNG.beta(2.0, 3.0, size=n),
            "v.0": RNG.normal(size=n),
            "v.1": z - RNG.normal(size=n),
            "d.0": RNG.dirichlet([2, 1], n)[:, 0],
        }
    ).pipe(lambda t: t.assign(**{"d.1": 1 - t["d.0"]}))


def same(model, again, table):
    """Everything a loaded model answers is what the saved one answers, bit by bit."""
    assert repr(again) == repr(model)
    for node, found in model.params().items():
        assert list(again.params()[node]) == list(found)
        for name, value in found.items():
            np.testing.assert_array_equal(again.params()[node][name], value)
    pd.testing.assert_frame_equal(again.sample(20, seed=1), model.sample(20, seed=1))
    assert again.distance(table, seed=2) == model.distance(table, seed=2)
    if model.graph.hidden:
        pd.testing.assert_frame_equal(again.posterior(table, draws=3, seed=1), model.posterior(table, draws=3, seed=1))


def round_trip(model, tmp_path, **options):
    path = tmp_path / "model.otp"
    model.save(path)
    return otp.load(path, **options)


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_mechanisms_of_every_kind(tmp_path):
    """All families below a hidden class, with numeric parents, networks, ties, fixed values and starts."""
    observed = ["s", "x", "n", "p", "b", "v", "d"]
    edges = [("z", node) for node in observed if node != "d"] + [
        ("x", "n"),
        ("x", "p"),
        ("x", "b"),
        ("x", "v"),
        ("s", "d"),
    ]
    model = otp.Model(
        otp.Graph(edges, nodes=["z", *observed], hidden=["z"]),
        {
            "z": m.Categorical(2, probs=otp.start([0.4, 0.6])),
            "s": m.Categorical(2),
            "x": m.Normal(scale=otp.tie("sigma"), shared_scale=True),
            "n": m.NegativeBinomial(network=(3,)),
            "p": m.Gamma(shape=2.0),
            "b": m.Beta(),
            "v": m.Normal(2, weight=[[0.5, 0.5]]),
            "d": m.Dirichlet(2),
        },
    )
    table = table_of()
    otp.fit(model, table, restarts=1, method=otp.entropic(steps=3))
    again = round_trip(model, tmp_path)
    same(model, again, table)
    assert again.score(table, kind="likelihood") == model.score(table, kind="likelihood")
    pd.testing.assert_frame_equal(again.impute(table.mask(table == "wet")), model.impute(table.mask(table == "wet")))


@pytest.mark.parametrize(
    "mechanism",
    [m.StudentT(), m.LogNormal(), m.Gamma(), m.Poisson(), m.Normal(network=(2,)), m.Categorical(3, network=(2,))],
    ids=lambda mechanism: type(mechanism).__name__,
)
@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_single_families(mechanism, tmp_path):
    value = {"Categorical": RNG.integers(0, 3, 40)}.get(type(mechanism).__name__, RNG.poisson(4.0, 40) + 1)
    table = pd.DataFrame({"g": RNG.integers(0, 2, 40), "u": RNG.normal(size=40), "y": value})
    model = otp.Model(otp.Graph([("g", "y"), ("u", "y")]), {"g": m.Given(Discrete(2)), "u": m.Normal(), "y": mechanism})
    otp.fit(model, table, method=otp.entropic(steps=3))
    again = round_trip(model, tmp_path)
    assert again.score(table, kind="likelihood") == model.score(table, kind="likelihood")
    sample = again.sample(5, seed=0, given=table[["g"]])
    pd.testing.assert_frame_equal(sample, model.sample(5, seed=0, given=table[["g"]]))


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_backward_maps_of_every_scope(tmp_path):
    table = table_of()[["x", "v.0", "v.1"]].mask(RNG.random((60, 3)) < 0.1)
    graph = otp.Graph([("u", "x"), ("w", "x"), ("u", "v"), ("x", "v")], hidden=["u", "w"])
    drawn = Drawn(noise="marginal", batch_size=16, hidden_layers=(3,))
    for evaluation, optimiser in (
        (ClosedForm(), Deterministic(steps=3)),
        (dataclasses.replace(drawn, scope="joint"), Adam(steps=3)),
        (dataclasses.replace(drawn, scope="local"), Adam(steps=3)),
    ):
        model = otp.Model(graph, {"u": m.Normal(), "w": m.Normal(), "x": m.Normal(), "v": m.Normal(2)})
        method = otp.Method("few", Objective(eps=1.0), evaluation, optimiser)
        otp.fit(model, table, restarts=1, method=method)
        assert model.fitted.sampler is None  # each node has a density to draw by
        same(model, round_trip(model, tmp_path), table)


def test_a_model_that_was_set_by_hand_or_never_fitted(tmp_path):
    model = otp.Model(otp.Graph([("k", "x")]), {"k": m.Categorical(2), "x": m.Normal()})
    again = round_trip(model, tmp_path)
    assert not again.is_fitted
    assert repr(again) == repr(model)
    model.set_params({"k": {"probs": [0.2, 0.8]}, "x": {"loc": [0.0, 1.0], "scale": [1.0, 2.0]}})
    same(model, round_trip(model, tmp_path), model.sample(10, seed=0))


def test_names_with_slashes_dots_and_letters_of_any_kind(tmp_path):
    names = ["a", "a/b", "a/b/shift", "ü.x", "natural"]
    graph = otp.Graph([("a", "a/b"), ("a/b", "a/b/shift"), ("a/b/shift", "ü.x"), ("a", "natural")])
    model = otp.Model(graph, {name: m.Normal() for name in names})
    table = pd.DataFrame(RNG.normal(size=(30, 5)), columns=names)
    otp.fit(model, table)
    same(model, round_trip(model, tmp_path), table)


def test_labels_of_every_type_survive(tmp_path):
    table = pd.DataFrame({"a": [True, False] * 10, "b": pd.Categorical(["u", "v"] * 10, ["v", "u"]), "c": [0, 1] * 10})
    model = otp.Model(otp.Graph([("a", "b"), ("b", "c")]), {n: m.Categorical(2) for n in "abc"})
    otp.fit(model, table)
    again = round_trip(model, tmp_path)
    assert again.labels("b") == ("v", "u")
    same(model, again, table)
    assert again.impute(table.mask(table == "u"))["b"].tolist() == model.impute(table.mask(table == "u"))["b"].tolist()


def test_code_is_never_saved_and_must_be_given_again(tmp_path):
    decoder = torch.nn.Linear(1, 2)
    graph = otp.Graph([("u", "x"), ("u", "t")], hidden=["u"])
    mechanisms = {
        "u": m.Normal(),
        "x": m.Decoder(decoder, Real(2), noise_scale=otp.start(0.5)),
        "t": m.Normal(),
    }
    model = otp.Model(graph, mechanisms)
    table = pd.DataFrame(RNG.normal(size=(40, 3)), columns=["x.0", "x.1", "t"])
    otp.fit(model, table, restarts=1)
    path = tmp_path / "model.otp"
    model.save(path)
    with pytest.raises(ModelError, match="node 'x': the 'module' of Decoder is code and was not saved; pass it again"):
        otp.load(path)
    same(model, otp.load(path, functions={"x": torch.nn.Linear(1, 2)}), table)


# -- what is no model -------------------------------------------------------------------------------------------------


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(DataError, match=r"no model at '.*nowhere\.otp'"):
        otp.load(tmp_path / "nowhere.otp")
    with pytest.raises(DataError, match="no model at"):
        otp.load(tmp_path)


def test_a_text_file(tmp_path):
    path = tmp_path / "model.otp"
    path.write_text("not a model")
    with pytest.raises(DataError, match="is not a saved otpdag model"):
        otp.load(path)


class Payload:
    """Unpickling it leaves a trace."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_zip_of_pickles_runs_nothing(tmp_path):
    trace, path = tmp_path / "trace", tmp_path / "model.otp"
    pickled = pickle.dumps(Payload(trace))
    for members in (
        {"data.pkl": pickled},
        {"model.json": pickled, "tensors.safetensors": pickled},
        {"model.json": b"{}", "tensors.safetensors": pickled},
        {"model.json": b"[1]", "tensors.safetensors": pickled},
    ):
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        with pytest.raises(DataError, match="is not a saved otpdag model"):
            otp.load(path)
        assert not trace.exists()


def rewritten(source, target, change):
    with zipfile.ZipFile(source) as archive:
        state, tensors = json.loads(archive.read("model.json")), archive.read("tensors.safetensors")
    change(state)
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("model.json", json.dumps(state))
        archive.writestr("tensors.safetensors", tensors)
        archive.writestr("extra.pkl", b"ignored")


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "saved.otp"
    model = otp.Model(otp.Graph([("k", "x")]), {"k": m.Categorical(2), "x": m.Normal()})
    model.set_params({"k": {"probs": [0.2, 0.8]}, "x": {"loc": [0.0, 1.0], "scale": [1.0, 2.0]}}).save(path)
    return path


def test_members_that_do_not_belong_are_ignored(saved, tmp_path):
    rewritten(saved, tmp_path / "again.otp", lambda state: None)
    assert otp.load(tmp_path / "again.otp").is_fitted


def test_a_file_that_is_replaced_while_it_is_read_is_the_one_that_was_opened(tmp_path, monkeypatch):
    path, later = tmp_path / "model.otp", tmp_path / "later.otp"
    for to, scale in ((path, 1.0), (later, 2.0)):
        model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
        model.set_params({"x": {"loc": 0.0, "scale": scale}}).save(to)
    whole = zipfile.ZipFile

    def replaced_first(file, *args, **more):
        later.replace(path)
        return whole(file, *args, **more)

    monkeypatch.setattr(zipfile, "ZipFile", replaced_first)
    assert otp.load(path).params()["x"]["scale"] == 1.0


def test_a_newer_version_is_refused_by_name(saved, tmp_path):
    path = tmp_path / "newer.otp"
    rewritten(saved, path, lambda state: state.update(version=FORMAT_VERSION + 1))
    with pytest.raises(
        DataError, match=f"has format version {FORMAT_VERSION + 1}; this release reads up to .*update otpdag"
    ):
        otp.load(path)


def test_an_unknown_mechanism_is_refused_by_name(saved, tmp_path):
    path = tmp_path / "unknown.otp"
    rewritten(saved, path, lambda state: state["mechanisms"]["x"].update(type="Mystery"))
    with pytest.raises(ModelError, match="node 'x': unknown mechanism 'Mystery'; known are"):
        otp.load(path)


def test_broken_tensors_are_refused(saved, tmp_path):
    path = tmp_path / "broken.otp"
    with zipfile.ZipFile(saved) as archive, zipfile.ZipFile(path, "w") as target:
        target.writestr("model.json", archive.read("model.json"))
        target.writestr("tensors.safetensors", archive.read("tensors.safetensors")[:20])
    with pytest.raises(DataError, match="is not a saved otpdag model"):
        otp.load(path)


def test_the_file_holds_json_and_safetensors_only(saved):
    with zipfile.ZipFile(saved) as archive:
        assert sorted(archive.namelist()) == ["model.json", "tensors.safetensors"]
        assert json.loads(archive.read("model.json"))["format"] == "otpdag model"


# --- backward maps of a user ------------------------------------------------------------------------------


def documented(name):
    """What an example of the documentation defines, as a user would have typed it."""
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    block = next(part for part in re.findall(r"```python\n(.*?)```", text, re.S) if f"class {name}" in part)
    defined = {"__name__": "documented"}
    exec(block, defined)
    return defined


@pytest.fixture
def with_own_map(tmp_path):
    """A model without densities, whose hidden values only the learned map can draw; its file; the map's class."""
    example = documented("TanhMap")
    graph = otp.Graph([("z", "x")], hidden=["z"])
    module = torch.nn.Linear(1, 2)
    model = otp.Model(graph, {"z": m.Normal(), "x": m.Decoder(module, Real(2))})
    table = pd.DataFrame(RNG.normal(size=(60, 2)), columns=["x.0", "x.1"])
    method = otp.paper(backward=example["build"], steps=3, batch_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otp.ConvergenceWarning)
        otp.fit(model, table, restarts=1, method=method)
    path = tmp_path / "own.otp"
    model.save(path)
    return model, table, path, example["TanhMap"], {"x": module}


def test_a_map_of_a_user_comes_back_when_its_class_is_given(with_own_map):
    model, table, path, TanhMap, functions = with_own_map
    again = otp.load(path, functions=functions, maps={"TanhMap": TanhMap})
    assert type(again.fitted.sampler) is TanhMap
    pd.testing.assert_frame_equal(again.posterior(table, draws=3), model.posterior(table, draws=3))


def test_a_map_of_a_user_is_left_out_with_a_word_when_its_class_is_not_given(with_own_map):
    model, table, path, _, functions = with_own_map
    with pytest.warns(UserWarning, match=r"a backward map of your own \(TanhMap\).*maps=\{'TanhMap': TanhMap\}"):
        again = otp.load(path, functions=functions)
    pd.testing.assert_frame_equal(again.sample(5, seed=0), model.sample(5, seed=0))
    with pytest.raises(ModelError, match="a node has no density and no backward map is at hand"):
        again.posterior(table)


def test_another_class_than_the_saved_one_is_refused(with_own_map):
    *_, path, _, functions = with_own_map
    with pytest.raises(ModelError, match="maps: AmortizedMap expects other tensors than the file holds"):
        otp.load(path, functions=functions, maps={"TanhMap": otp.backward.AmortizedMap})


def test_of_several_maps_the_one_that_draws_all_that_is_hidden_comes_back(tmp_path):
    module = torch.nn.Linear(1, 2)
    graph = otp.Graph([("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Normal(), "x": m.Decoder(module, Real(2))})
    code, generator = RowCode((), {}, {}, frozenset()), torch.Generator().manual_seed(0)
    maps = tuple(otp.backward.AmortizedMap(model.structure, code, ("z",), name=name) for name in ("other", "joint"))
    phi = {key: value for one in maps for key, value in one.init(1, generator).items()}
    start = model.structure.filled({}, generator, first=True)
    model.adopt(model.structure, {**start, **phi}, maps=maps)
    model.save(tmp_path / "model.otp")
    again = otp.load(tmp_path / "model.otp", functions={"x": module}).fitted
    assert again.sampler.name == "joint"
    assert set(again.phi) == set(maps[1].init(1, generator))
