"""Tests of the command line: what each command writes, and that a mistake is one line and exit code 2."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner, Result

import otpdag as otp
from experiments.registry import Run
from otpdag import engine
from otpdag.cli import app, command_files, fit_command
from otpdag.cli.model_file import read_model_file
from otpdag.files import only_writer

MODEL = """
edges: [[shift, quality], [quality, weight], [quality, faults]]
hidden: [quality]
nodes:
  quality: {type: Categorical, size: 2}
  faults: Poisson
"""
RUN_FILES = {
    "model.otp",
    "params.json",
    "summary.json",
    "history.csv",
    "restarts.csv",
    "shown.json",
    "errors.csv",
}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def one_line(result: Result, code: int = 2) -> str:
    """The message of a mistake: one line on standard error, none on standard output, no traceback."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.fixture(scope="session")
def factory(tmp_path_factory) -> Path:
    """A folder with a model file and a table, some cells empty."""
    folder = tmp_path_factory.mktemp("factory")
    rng = np.random.default_rng(0)
    shift = rng.choice(["day", "night"], 240)
    quality = rng.random(240) < np.where(shift == "day", 0.8, 0.3)
    table = pd.DataFrame(
        {
            "shift": shift,
            "weight": np.where(quality, 10.0, 7.0) + 0.5 * rng.normal(size=240),
            "faults": rng.poisson(np.where(quality, 1.0, 15.0)),
            "batch": np.arange(240),
            "importance": rng.uniform(0.5, 1.5, 240),
        }
    ).astype({"faults": "Int64"})
    table.loc[::7, "weight"] = np.nan
    table.loc[3::11, "shift"] = None
    table.loc[5::13, "faults"] = pd.NA
    table.to_csv(folder / "data.csv", index=False)
    (folder / "model.yaml").write_text(MODEL)
    return folder


@pytest.fixture(scope="session")
def fitted(factory) -> tuple[Path, Result]:
    """The folder of a fit, and what the command printed."""
    result = run("fit", factory / "model.yaml", factory / "data.csv", "--out", factory / "run", "--restarts", 2)
    assert result.exit_code == 0, result.output
    return factory / "run", result


# --- fit --------------------------------------------------------------------------------------------------


def test_fit_writes_a_folder(fitted):
    folder, _ = fitted
    assert {path.name for path in folder.iterdir()} == RUN_FILES
    params = json.loads((folder / "params.json").read_text())
    np.testing.assert_allclose(params["weight"]["loc"], [7.0, 10.0], atol=0.3)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["converged"]
    assert summary["method"] == "likelihood"
    assert (summary["rows"], summary["starts"], summary["seed"]) == (240, 2, 0)
    assert {"step", "loss"} <= set(pd.read_csv(folder / "history.csv").columns)
    restarts = pd.read_csv(folder / "restarts.csv")
    assert len(restarts) == 2
    assert restarts["kept"].sum() == 1
    assert otp.load(folder / "model.otp").params().keys() == params.keys()


def test_fit_prints_a_table_that_fits_a_narrow_terminal(fitted):
    _, result = fitted
    assert result.stdout.startswith("converged: the loss stopped changing")
    assert "quality=0" in result.stdout
    assert "shift=night" in result.stdout
    assert max(map(len, result.stdout.splitlines()[1:])) <= 80
    assert "\x1b[" not in result.stdout
    assert "model.otp" in result.stderr


def test_fit_is_determined_by_its_seed(factory, fitted, tmp_path):
    folder, _ = fitted
    arguments = ("fit", factory / "model.yaml", factory / "data.csv", "--restarts", 2, "--quiet")
    same, other = (run(*arguments, "--out", tmp_path / str(seed), "--seed", seed) for seed in (0, 1))
    assert same.output == other.output == ""
    first, second = (json.loads((tmp_path / str(seed) / "params.json").read_text()) for seed in (0, 1))
    assert first == json.loads((folder / "params.json").read_text())
    assert first != second


def test_fit_with_weights_method_and_steps(factory, tmp_path):
    result = run(
        "fit",
        factory / "model.yaml",
        factory / "data.csv",
        "--out",
        tmp_path / "run",
        "--weights",
        "importance",
        "--method",
        "transport",
        "--restarts",
        1,
        "--steps",
        3,
    )
    assert result.exit_code == 0  # not converged is a warning
    assert result.stdout.startswith("not converged")
    assert "warning: not converged: the loss was still falling after 3 steps" in result.stderr
    assert not json.loads((tmp_path / "run" / "summary.json").read_text())["converged"]


@pytest.mark.slow
def test_fit_with_intervals_and_without_outliers(factory, tmp_path):
    table = pd.read_csv(factory / "data.csv")
    table.loc[:9, "weight"] = 50.0
    table.to_csv(tmp_path / "data.csv", index=False)
    result = run(
        "fit",
        factory / "model.yaml",
        tmp_path / "data.csv",
        "--out",
        tmp_path / "run",
        "--restarts",
        2,
        "--robust",
        "outliers",
        "--intervals",
        10,
    )
    assert result.exit_code == 0, result.output
    assert "left out 1" in result.stdout  # ten rows and perhaps a few more
    assert "lower" in result.stdout
    assert max(map(len, result.stdout.splitlines()[2:])) <= 80
    weights = pd.read_csv(tmp_path / "run" / "weights.csv")
    assert (weights["weight"][:10] < 0.5).all()
    bounds = pd.read_csv(tmp_path / "run" / "intervals.csv")
    heavy = bounds[(bounds["node"] == "weight") & (bounds["parameter"] == "loc")].iloc[1]
    assert abs(heavy["estimate"] - 10.0) < 0.2  # with the outliers it would be 13
    assert heavy["lower"] < heavy["estimate"] < heavy["upper"]


def test_fit_overwrites_nothing_unless_forced(factory, tmp_path):
    (tmp_path / "notes.txt").write_text("keep me")
    arguments = ("fit", factory / "model.yaml", factory / "data.csv", "--out", tmp_path, "--restarts", 1, "--quiet")
    assert "is not empty; choose another folder or add --force" in one_line(run(*arguments))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert run(*arguments, "--force").exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == RUN_FILES | {"notes.txt"}


def test_a_link_that_leads_nowhere_is_no_folder(factory, tmp_path):
    for name, target in (("loop", "loop"), ("gone", "nowhere")):
        (tmp_path / name).symlink_to(tmp_path / target)
        arguments = ("fit", factory / "model.yaml", factory / "data.csv", "--out", tmp_path / name, "--force")
        assert "is a link that leads nowhere" in one_line(run(*arguments))


def fit_again(factory, folder, *options):
    file, data = factory / "model.yaml", factory / "data.csv"
    return run("fit", file, data, "--out", folder, "--restarts", 1, "--quiet", "--force", *options)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_of_an_older_run_do_not_stand_beside_new_ones(factory, tmp_path):
    assert fit_again(factory, tmp_path / "run", "--intervals", 10).exit_code == 0
    assert "intervals.csv" in contents(tmp_path / "run")
    assert fit_again(factory, tmp_path / "run", "--seed", 1).exit_code == 0
    assert set(contents(tmp_path / "run")) == RUN_FILES


@pytest.mark.parametrize(("place", "stop"), [("intervals", otp.DataError("no")), ("words_of", KeyboardInterrupt())])
def test_a_fit_that_fails_leaves_what_was_there(factory, fitted, tmp_path, monkeypatch, place, stop):
    def fail(*_: object, **__: object) -> None:
        raise stop

    monkeypatch.setattr(
        *{"intervals": (otp.FitResult, "intervals"), "words_of": (fit_command, "words_of")}[place], fail
    )
    old = tmp_path / "old"
    shutil.copytree(fitted[0], old)
    before = contents(old)
    for folder in (old, tmp_path / "deep" / "new"):
        result = fit_again(factory, folder, "--intervals", 10)
        assert result.exit_code == (2 if isinstance(stop, otp.DataError) else 130)
        assert isinstance(stop, otp.DataError) or f"interrupted: {folder}.checkpoint keeps" in result.stderr
    assert contents(old) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "old", "old.checkpoint"]


def test_an_interrupt_after_writing_says_what_is_there(factory, tmp_path, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fit_command, "print_fit", interrupt)
    file, data = factory / "model.yaml", factory / "data.csv"
    result = run("fit", file, data, "--out", tmp_path / "run", "--restarts", 1)
    assert f"interrupted: {tmp_path / 'run'} written before" in result.stderr
    assert set(contents(tmp_path / "run")) == RUN_FILES


def test_a_full_disk_is_one_line_that_names_the_file(factory, fitted, tmp_path):
    path = tmp_path / "sample.csv"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        assert "sample.csv' cannot be written: File too large" in one_line(run("sample", fitted[0], "--out", path))
        message = one_line(fit_again(factory, tmp_path / "run"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot be written: File too large" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_killed_run_is_the_old_one_or_the_new_one(factory, tmp_path):
    model = read_model_file(factory / "model.yaml").build(pd.read_csv(factory / "data.csv"))
    results = [otp.fit(model, pd.read_csv(factory / "data.csv"), restarts=1, seed=seed) for seed in (0, 1)]
    folder, chance = tmp_path / "run", random.Random(0)
    bounds = pd.DataFrame({"lower": [1.0]})
    fit_command.write_run(results[0], folder, bounds)
    (folder / "notes.txt").write_text("keep me")
    for _ in range(12):
        child = os.fork()
        if child == 0:
            while True:
                fit_command.write_run(results[1], folder)
                fit_command.write_run(results[0], folder, bounds)
        time.sleep(chance.uniform(0.0, 0.5))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert run("show", folder).exit_code == 0
        names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
        seed = json.loads((folder / "summary.json").read_text())["seed"]
        assert names == RUN_FILES | {"notes.txt"} | ({"intervals.csv"} if seed == 0 else set())
        assert set(pd.read_csv(folder / "restarts.csv")["seed"]) == {r.seed for r in results[seed].restarts}


def test_fit_sequences(tmp_path):
    rng = np.random.default_rng(0)
    state = np.repeat(rng.integers(0, 2, 30), 8)
    table = pd.DataFrame({"site": np.repeat(np.arange(6), 40), "day": np.tile(np.arange(40), 6)})
    table["x"] = np.where(state, 4.0, -4.0) + rng.normal(size=240)
    table.sample(frac=1, random_state=0).to_csv(tmp_path / "data.csv", index=False)
    (tmp_path / "model.yaml").write_text(
        "{edges: [[z, z, 1], [z, x]], hidden: [z], nodes: {z: {type: Categorical, size: 2}}}"
    )
    columns = ("--sequence", "site", "--time", "day")
    result = run(
        "fit", tmp_path / "model.yaml", tmp_path / "data.csv", "--out", tmp_path / "run", "--restarts", 1, *columns
    )
    assert result.exit_code == 0, result.output
    assert "z[-1]=0, 0" in result.stdout
    assert ["z[0]", "probs"] in [line.split()[:2] for line in result.stdout.splitlines()]
    assert len(run("sample", tmp_path / "run", "--rows", 2, "--length", 5).stdout.splitlines()) == 11
    assert "--length" in one_line(run("sample", tmp_path / "run"))
    states = run("posterior", tmp_path / "run", tmp_path / "data.csv", *columns, "--draws", 5)
    assert len(states.stdout.splitlines()) == 241


# --- mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (None, "a,b\n1,2\n", "no model file at"),
        ("edges: [[a, b", "a,b\n1,2\n", "model.yaml: line 1, column 14: expected"),
        ("edges: [[a, b], [b, a]]", "a,b\n1,2\n", "model.yaml: edges must have no cycle; found a -> b -> a"),
        ("{edges: [[a, b]], nodes: {a: {type: Normal, sd: 1}}}", "a,b\n1,2\n", "nodes.a.sd: is not known; Normal has"),
        ("edges: [[a, b]]", None, "must be a file that exists"),
        ("edges: [[a, b]]", "", "cannot be read as a table"),
        ("edges: [[a, b]]", "a,c\n1,2\n", "node 'b' has no column"),
        ("edges: [[a, b]]", 'a,b\n1,2\n"3', "cannot be read as a table"),
        ("edges: [[a, b]]", "a,b\n0.5,0.1\n", "at least 2 rows; got 1"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(tmp_path, model, data, message):
    if model is not None:
        (tmp_path / "model.yaml").write_text(model)
    if data is not None:
        (tmp_path / "data.csv").write_text(data)
    result = run("fit", tmp_path / "model.yaml", tmp_path / "data.csv", "--out", tmp_path / "run")
    assert message in one_line(result)
    assert not any((tmp_path / "run").glob("*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--methd", "paper"), "No such option: --methd"),
        (("--method", "magic"), "Invalid value for '--method': 'magic' is not one of 'auto', 'likelihood'"),
        (("--seed", "-1"), "Invalid value for '--seed'"),
        (("--restarts", "0"), "Invalid value for '--restarts'"),
        (
            ("--weights", "wght"),
            "weights must be numbers, or name a column of a DataFrame; got 'wght'; it has shift, weight",
        ),
        (("--weights", "weight"), "weights names column 'weight', which is a node of the model"),
        (("--weights", "label"), "column 'label' must hold numbers for weights; found 'x' in row"),
        (("--device", "cuda:7"), "device 'cuda:7' was asked for"),
        (("--device", "tpu"), "device must be 'cpu', 'cuda' or 'cuda:N'; got 'tpu'"),
        (("--device", "meta"), "device must be 'cpu', 'cuda' or 'cuda:N'; got 'meta'"),
        (("--seed", 10**30), "Invalid value for '--seed'"),
        (("--seed", "1.5"), "Invalid value for '--seed'"),
        (("--restarts", 10**12), "Invalid value for '--restarts'"),
        (("--steps", 10**30), "Invalid value for '--steps'"),
        (("--intervals", 10**9), "Invalid value for '--intervals'"),
        (("--sequence", "site"), "sequence must name a column; got 'site'"),
    ],
)
def test_a_wrong_option_is_one_line(factory, tmp_path, options, message):
    table = pd.read_csv(factory / "data.csv").assign(label="x")
    table.to_csv(tmp_path / "data.csv", index=False)
    arguments = ("fit", factory / "model.yaml", tmp_path / "data.csv", "--out", tmp_path / "run")
    assert message in one_line(run(*arguments, *options))


@pytest.mark.parametrize(
    "arguments",
    [
        ("sample", "--rows", 10**12),
        ("sample", "--rows", -1),
        ("sample", "--seed", 2**63),
        ("sample", "--length", 10**9),
        ("posterior", "--draws", 10**9),
        ("impute", "--draws", 0),
        ("score", "--seed", -1),
        ("check", "--seed", "x"),
    ],
)
def test_a_number_out_of_range_is_one_line(factory, fitted, arguments):
    command, option, value = arguments
    data = [] if command == "sample" else [factory / "data.csv"]
    assert f"Invalid value for '{option}'" in one_line(run(command, fitted[0], *data, option, value))


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    evil = "x\x1b[2J\x07\u202e"
    graph = otp.Graph([("k", evil)])
    model = otp.Model(graph, {"k": otp.mechanisms.Categorical(2), evil: otp.mechanisms.Normal()})
    model.set_params({"k": {"probs": [0.5, 0.5]}, evil: {"loc": [0.0, 1.0], "scale": [1.0, 1.0]}})
    path = tmp_path / "evil.otp"
    model.save(path)
    data = tmp_path / "data.csv"
    model.sample(30, seed=0).to_csv(data, index=False)
    other = tmp_path / "other.csv"
    other.write_text("k\n0\n1\n")
    for arguments in (("show", path), ("check", path, data), ("score", path, other), ("show", tmp_path / evil)):
        result = run(*arguments)
        assert not set("\x1b\x07\u202e") & set(result.output + result.stderr)
        assert r"\x1b[2J" in result.output + result.stderr
    assert r"\x1b" in repr(model)
    page = model._repr_html_()
    assert "\x1b" not in page


def test_a_table_on_a_terminal_has_no_control_characters(fitted, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    command_files.put_table(pd.DataFrame({"x": ["a\x1b[2J"]}), None)
    assert capsys.readouterr().out == "x\na\\x1b[2J\n"


def test_missing_arguments_and_unknown_commands(factory):
    assert "Missing option '--out'" in one_line(run("fit", factory / "model.yaml", factory / "data.csv"))
    assert "Missing argument" in one_line(run("fit"))
    assert "No such command 'fitt'" in one_line(run("fitt"))
    file = factory / "model.yaml"
    assert "--out must be a folder" in one_line(run("fit", file, factory / "data.csv", "--out", file))


def test_a_folder_that_cannot_be_made_is_one_line(factory):
    target = factory / "model.yaml" / "run"
    assert "Not a directory" in one_line(run("fit", factory / "model.yaml", factory / "data.csv", "--out", target))


@pytest.mark.parametrize("command", [("show",), ("sample",), ("score", "data.csv")])
def test_no_model_or_not_a_model(factory, tmp_path, command):
    name, *rest = command
    data = [factory / part for part in rest]
    assert "no model at" in one_line(run(name, tmp_path / "none.otp", *data))
    assert "is not a saved otpdag model" in one_line(run(name, factory / "data.csv", *data))


def test_debug_shows_the_traceback(tmp_path):
    for arguments in (("--debug", "show", tmp_path / "none.otp"), ("show", tmp_path / "none.otp", "--debug")):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "Traceback (most recent call last)" in result.stderr
        assert "error: no model at" in result.stderr


def test_a_bug_is_called_a_bug(fitted, monkeypatch):
    folder, _ = fitted
    monkeypatch.setattr(otp.Model, "sample", lambda *_, **__: 1 / 0)
    message = one_line(run("sample", folder), code=1)
    assert "ZeroDivisionError: division by zero (this is a bug in otpdag" in message


def test_interrupt_is_a_plain_message(factory, tmp_path, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "fit", interrupt)
    result = run("fit", factory / "model.yaml", factory / "data.csv", "--out", tmp_path / "run")
    assert result.exit_code == 130
    assert result.stderr.strip() == "interrupted: nothing was written"
    assert result.stdout == ""


# --- a saved model ----------------------------------------------------------------------------------------


def test_show(fitted):
    folder, _ = fitted
    by_folder, by_file = run("show", folder), run("show", folder / "model.otp")
    assert by_folder.exit_code == 0
    assert by_folder.stdout == by_file.stdout
    assert "quality: Categorical, hidden <- shift" in by_folder.stdout
    assert "shift=day, 0" in by_folder.stdout


def test_show_needs_no_heavy_library_and_never_shows_another_model(fitted, tmp_path):
    folder, _ = fitted
    code = "import sys; from otpdag.cli import app; app(['show', sys.argv[1]], standalone_mode=False)"
    heavy = "; print({'torch', 'pandas', 'numpy'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code + heavy, folder], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines()[-1] == "set()"
    assert said.stdout.splitlines()[:-1] == run("show", folder).stdout.splitlines()
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    kept = json.loads((copy / "shown.json").read_text())
    (copy / "shown.json").write_text(json.dumps(kept | {"text": "another", "model_sha256": "0"}))
    assert run("show", copy).stdout == run("show", folder).stdout
    (copy / "shown.json").write_text("[1]")
    assert run("show", copy, "--json").stdout == run("show", folder, "--json").stdout


def test_sample(fitted, tmp_path):
    folder, _ = fitted
    shown = run("sample", folder, "--rows", 5, "--seed", 3)
    assert set(shown.stdout.splitlines()[0].split(",")) == {"shift", "quality", "weight", "faults"}
    assert len(shown.stdout.splitlines()) == 6
    assert shown.stdout == run("sample", folder, "--rows", 5, "--seed", 3).stdout
    assert shown.stdout != run("sample", folder, "--rows", 5, "--seed", 4).stdout
    path = tmp_path / "deep" / "sample.csv"
    assert "wrote 5 rows" in run("sample", folder, "--rows", 5, "--seed", 3, "--out", path).stderr
    assert path.read_text() == shown.stdout
    assert "exists; choose another file or add --force" in one_line(run("sample", folder, "--out", path))
    assert run("sample", folder, "--rows", 2, "--out", path, "--force").exit_code == 0
    assert len(pd.read_csv(path)) == 2


def test_interventions(fitted, tmp_path):
    folder, _ = fitted
    path = tmp_path / "do.csv"
    run("sample", folder, "--rows", 400, "--do", "quality=1", "--do", "shift=night", "--out", path)
    done = pd.read_csv(path)
    assert set(done["quality"]) == {1}
    assert set(done["shift"]) == {"night"}
    assert abs(done["weight"].mean() - 10.0) < 0.3
    run("sample", folder, "--rows", 400, "--do", "weight=3.5", "--out", path, "--force")
    done = pd.read_csv(path)
    assert set(done["weight"]) == {3.5}
    assert 0.2 < done["quality"].mean() < 0.9  # setting an effect does not change its cause


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("quality", "--do must be NODE=VALUE; got 'quality'"),
        ("=1", "--do must be NODE=VALUE"),
        ("qualty=1", "--do names 'qualty', which is not in the graph; it has"),
        ("shift=evening", "--do shift=evening: node 'shift' takes day, night; got 'evening'"),
        ("weight=heavy", "--do weight=heavy: node 'weight' takes numbers; got 'heavy'"),
        ("weight=1,2", r"--do weight=1,2: node 'weight' takes 1 number(s); got 2"),
        ("faults=-3", "-3"),
    ],
)
def test_a_wrong_intervention(fitted, setting, message):
    assert message in one_line(run("sample", fitted[0], "--do", setting))


def test_impute(factory, fitted, tmp_path):
    folder, _ = fitted
    path = tmp_path / "filled.csv"
    before = pd.read_csv(factory / "data.csv")
    result = run("impute", folder, factory / "data.csv", "--out", path, "--draws", 20)
    after = pd.read_csv(path)
    nodes = ["shift", "weight", "faults"]
    assert list(after.columns) == list(before.columns)
    assert not after.isna().to_numpy().any()
    assert f"filled {before[nodes].isna().to_numpy().sum()} cells" in result.stderr
    for column in before.columns:
        seen = before[column].notna()
        assert (after.loc[seen, column] == before.loc[seen, column]).all()
    other = run("impute", folder, factory / "data.csv", "--random", "--seed", 5)
    assert len(other.stdout.splitlines()) == 241


def test_impute_reads_and_writes_parquet_block_by_block(factory, fitted, tmp_path):
    pytest.importorskip("pyarrow")
    before = pd.read_csv(factory / "data.csv")
    before.to_parquet(tmp_path / "data.parquet")
    path = tmp_path / "new" / "filled.parquet"
    result = run("impute", fitted[0], tmp_path / "data.parquet", "--out", path, "--draws", 20)
    after = pd.read_parquet(path)
    assert list(after.columns) == list(before.columns)
    assert not after.isna().to_numpy().any()
    assert f"filled {before[['shift', 'weight', 'faults']].isna().to_numpy().sum()} cells" in result.stderr
    assert (after["batch"] == before["batch"]).all()


def test_posterior(factory, fitted):
    folder, _ = fitted
    result = run("posterior", folder, factory / "data.csv", "--draws", 50)
    rows = [line.split(",") for line in result.stdout.splitlines()]
    assert rows[0] == ["row", "quality=0", "quality=1"]
    assert len(rows) == 241
    probabilities = np.array(rows[1:], dtype=float)[:, 1:]
    np.testing.assert_allclose(probabilities.sum(1), 1.0, atol=1e-5)
    heavy = (pd.read_csv(factory / "data.csv")["weight"] > 9.5).to_numpy()
    assert probabilities[heavy, 1].mean() > 0.9
    every = run("posterior", folder, factory / "data.csv", "--draws", 3, "--all-draws")
    assert len(every.stdout.splitlines()) == 1 + 3 * 240
    assert every.stdout.startswith("row,draw,quality")


def test_posterior_of_numbers_and_of_nothing(tmp_path):
    graph = otp.Graph([("z", "x"), ("z", "y")], hidden=["z"])
    mechanisms = {"z": otp.mechanisms.Normal(), "x": otp.mechanisms.Normal(), "y": otp.mechanisms.Normal()}
    model = otp.Model(graph, mechanisms)
    loadings = {"loc": 0.0, "weight": [2.0], "scale": 0.5}
    model.set_params({"x": loadings, "y": loadings}).save(tmp_path / "factor.otp")
    (tmp_path / "data.csv").write_text("x,y\n4.0,4.2\n-4.0,\n")
    result = run("posterior", tmp_path / "factor.otp", tmp_path / "data.csv", "--draws", 400)
    summary = np.array([line.split(",") for line in result.stdout.splitlines()[1:]], dtype=float)
    assert result.stdout.splitlines()[0] == "row,z.mean,z.sd,z.low,z.high"
    np.testing.assert_allclose(summary[:, 1], [2.0, -1.9], atol=0.15)
    assert (summary[:, 3] < summary[:, 1]).all()
    assert (summary[:, 1] < summary[:, 4]).all()
    plain = otp.Model(otp.Graph([("x", "y")]), {"x": otp.mechanisms.Normal(), "y": otp.mechanisms.Normal()})
    plain.set_params({"x": {"loc": 0.0, "scale": 1.0}, "y": loadings}).save(tmp_path / "plain.otp")
    message = one_line(run("posterior", tmp_path / "plain.otp", tmp_path / "data.csv"))
    assert "the model has no hidden nodes" in message


def test_score(factory, fitted):
    folder, _ = fitted
    model, table = otp.load(folder / "model.otp"), pd.read_csv(factory / "data.csv")
    known = {"transport": model.distance(table), "likelihood": model.score(table, kind="likelihood")}
    for kind in known:
        result = run("score", folder, factory / "data.csv", "--kind", kind)
        assert float(result.stdout) == pytest.approx(known[kind], rel=1e-4)
        assert "is better" in result.stderr


def test_check(factory, fitted):
    result = run("check", fitted[0], factory / "data.csv")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].split() == ["node", "p", "adjusted", "p", "finding"]
    assert {line.split()[0] for line in result.stdout.splitlines()[1:]} >= {"shift", "weight", "faults"}
    (first, *_) = json.loads(run("check", fitted[0], factory / "data.csv", "--json").stdout)
    assert set(first) == {"node", "other", "finding", "p", "adjusted"}


# --- reproduce --------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A made-up checkout with one experiment, and one that cannot be imported."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "__init__.py").touch()
    shutil.copy(Path(otp.__file__).parents[2] / "experiments" / "registry.py", folder)
    (folder / "figure9.py").write_text(
        "from experiments.registry import Run, experiment\n\n\n"
        '@experiment("figure9", "Nine lives")\n'
        "def figure9(run: Run) -> None:\n"
        '    (run.folder / "figure9.txt").write_text(f"{run.seed} {run.quick}")\n'
    )
    (folder / "table8.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "experiments"}
    for name in known:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "experiments"]:
        del sys.modules[name]


def test_reproduce_lists_and_runs_experiments(checkout):
    listed = run("reproduce", "--folder", checkout)
    assert listed.exit_code == 0
    assert "figure9" in listed.stdout
    assert "Nine lives" in listed.stdout
    assert "warning: experiments/table8 cannot be imported: No module named 'a_package" in listed.stderr
    assert run("reproduce", "--folder", checkout, "figure9", "--seed", 4, "--quick").exit_code == 0
    assert (checkout / "runs" / "figure9" / "figure9.txt").read_text() == "4 True"
    assert "is not empty" in one_line(run("reproduce", "--folder", checkout, "figure9"))
    assert "there is no experiment 'figure1': there are figure9" in one_line(
        run("reproduce", "--folder", checkout, "figure1")
    )
    assert "table8 cannot be imported: No module" in one_line(run("reproduce", "--folder", checkout, "table8"))


def test_reproduce_has_two_scales(checkout):
    text = checkout / "runs" / "figure9" / "figure9.txt"
    for options, expected in [
        (("--scale", "quick"), "0 True"),
        (("--scale", "paper"), "0 False"),
        (("--quick", "--scale", "quick"), "0 True"),
        ((), "0 False"),
    ]:
        assert run("reproduce", "--folder", checkout, "figure9", "--force", *options).exit_code == 0
        assert text.read_text() == expected
    assert "give --quick or --scale paper, not both" in one_line(
        run("reproduce", "--folder", checkout, "figure9", "--quick", "--scale", "paper")
    )
    assert "'large' is not one of 'quick', 'hours', 'paper'" in one_line(
        run("reproduce", "--folder", checkout, "figure9", "--scale", "large")
    )


def test_reproduce_resumes_what_can_be_resumed(checkout):
    assert "figure9 keeps no parts to resume from" in one_line(
        run("reproduce", "--folder", checkout, "figure9", "--resume")
    )
    (checkout / "experiments" / "table7.py").write_text(
        "from experiments.registry import Run, experiment\n\n\n"
        '@experiment("table7", "Seven parts", resumable=True)\n'
        "def table7(run: Run) -> None:\n"
        '    with (run.folder / "parts.txt").open("a") as file:\n'
        '        file.write(f"{run.resume} ")\n'
    )
    assert run("reproduce", "--folder", checkout, "table7").exit_code == 0
    assert "is not empty" in one_line(run("reproduce", "--folder", checkout, "table7"))
    assert run("reproduce", "--folder", checkout, "table7", "--resume").exit_code == 0
    assert (checkout / "runs" / "table7" / "parts.txt").read_text() == "False True "


def test_a_run_goes_on_where_it_was_and_its_results_are_drawn(checkout):
    (checkout / "experiments" / "table6.py").write_text(
        "import pandas as pd\nfrom matplotlib.figure import Figure\n\n"
        "from experiments.registry import Page, Run, experiment\n\n\n"
        "def page(folder):\n"
        '    return Page("# Table 6\\n\\n" + str(len(list((folder / "parts").iterdir()))), {"Six": Figure()})\n\n\n'
        '@experiment("table6", "Six parts", resumable=True, page=page)\n'
        "def table6(run: Run) -> None:\n"
        "    def make():\n"
        '        with (run.folder / "made.txt").open("a") as file:\n'
        '            file.write("made ")\n'
        '        return pd.DataFrame({"a": [1]})\n\n'
        '    run.part("one", make)\n'
    )
    folder = checkout / "results" / "table6"
    for options in ((), ("--resume",)):
        assert run("reproduce", "--folder", checkout, "table6", "--out", folder, *options).exit_code == 0
    assert (folder / "made.txt").read_text() == "made "
    assert "--seed must be that of the run" in one_line(
        run("reproduce", "--folder", checkout, "table6", "--out", folder, "--resume", "--seed", 3)
    )
    assert run("reproduce", "--folder", checkout, "all", "--from", checkout / "results").exit_code == 0
    drawn = (checkout / "docs" / "results.md").read_text()
    assert "## Table 6\n\n1\n" in drawn
    assert "`otpdag reproduce table6 --scale paper --seed 0`" in drawn
    assert "![Six](results/table6-1.svg)" in drawn
    picture = (checkout / "docs" / "results" / "table6-1.svg").read_bytes()
    assert run("reproduce", "--folder", checkout, "all", "--from", checkout / "results").exit_code == 0
    assert (checkout / "docs" / "results" / "table6-1.svg").read_bytes() == picture  # no date, no chance
    elsewhere = ("--out", checkout / "pages")
    assert run("reproduce", "--folder", checkout, "all", "--from", checkout / "results", *elsewhere).exit_code == 0
    assert (checkout / "pages" / "results.md").read_text() == drawn
    assert (checkout / "pages" / "results" / "table6-1.svg").is_file()
    smaller = ("table6", "--quick", "--out", checkout / "results" / "table6-quick")
    assert run("reproduce", "--folder", checkout, *smaller).exit_code == 0
    assert run("reproduce", "--folder", checkout, "all", "--from", checkout / "results").exit_code == 0
    drawn = (checkout / "docs" / "results.md").read_text()
    for size, name in (("full size, the paper's where it has one", "table6"), ("a small size", "table6-quick")):
        assert f"| table6 | Six parts | {size}" in drawn
        assert f"![Six](results/{name}-1.svg)" in drawn
        assert (checkout / "docs" / "results" / f"{name}-1.svg").is_file()
    assert "all and --from go together" in one_line(run("reproduce", "--folder", checkout, "all"))
    assert "has none" in one_line(run("reproduce", "--folder", checkout, "all", "--from", checkout))


def test_some_parts_of_a_run_are_made_by_themselves(checkout):
    (checkout / "experiments" / "table6.py").write_text(
        "import pandas as pd\n\nfrom experiments.registry import Page, Run, experiment\n\n\n"
        "def page(folder):\n"
        '    return Page("# Table 6\\n\\n" + (folder / "table6.csv").read_text())\n\n\n'
        '@experiment("table6", "Two parts", resumable=True, page=page)\n'
        "def table6(run: Run) -> None:\n"
        '    rows = run.together(run.part(name, lambda: pd.DataFrame({"a": [name]})) for name in ("one", "two"))\n'
        '    rows.to_csv(run.folder / "table6.csv", index=False)\n'
    )
    folder = checkout / "results" / "table6"
    start = ("reproduce", "--folder", checkout, "table6", "--out", folder, "--resume")
    assert "--only 'three' names no part" in one_line(run(*start, "--only", "three"))
    draw = ("reproduce", "--folder", checkout, "all", "--from", checkout / "results")
    for options, made, is_finished in (
        (("--only", "t*"), "a\ntwo\n", False),
        (("--only", "one"), "a\none\ntwo\n", False),
        ((), "a\none\ntwo\n", True),
    ):
        assert run(*start, *options).exit_code == 0
        assert (folder / "table6.csv").read_text() == made
        assert run(*draw).exit_code == 0
        page = (checkout / "docs" / "results.md").read_text()
        assert ("Not all of it has been run" in page) is not is_finished
        state = "all of it" if is_finished else "in part"
        assert f"| table6 | Two parts | full size, the paper's where it has one | {state} |" in page
    about = json.loads((folder / "run.json").read_text())
    (folder / "table6.csv").unlink()
    for is_finished, told in ((False, "Stopped before its tables were written"), (True, "is said to be finished")):
        (folder / "run.json").write_text(json.dumps(about | {"finished": is_finished}))
        result = run(*draw)
        assert told in (one_line(result) if is_finished else (checkout / "docs" / "results.md").read_text())
    assert "figure9 is made in one piece" in one_line(
        run("reproduce", "--folder", checkout, "figure9", "--only", "one", "--force")
    )


STOPPED = """
import os

import pandas as pd

from experiments.registry import Page, Run, experiment


def page(folder):
    return Page(pd.read_csv(folder / "table5.csv")["seed"].to_string())


@experiment("table5", "Two parts", resumable=True, page=page)
def table5(run: Run) -> None:
    made = []
    for name in ("one", "two"):
        if name == os.environ.get("STOPPED_BEFORE"):
            raise KeyboardInterrupt
        made.append(run.part(name, lambda: pd.DataFrame({"part": [name], "seed": [run.seed]})))
    rows = run.joined(run.together(made), "table5.csv", ("part", "seed"))
    run.write("table5.csv", rows)
"""


def test_a_run_goes_on_with_its_own_parts_and_no_others(checkout, monkeypatch):
    """A run of another seed that is written over a finished one and stopped leaves parts of both."""
    (checkout / "experiments" / "table5.py").write_text(STOPPED)
    folder = checkout / "results" / "table5"
    start = ("reproduce", "--folder", checkout, "table5", "--out", folder)
    assert run(*start).exit_code == 0
    for path in (folder / "parts" / "two.csv", folder / "table5.csv"):
        os.utime(path, (0, 0))  # long ago
    monkeypatch.setenv("STOPPED_BEFORE", "two")
    assert run(*start, "--seed", 1, "--force").exit_code == 130
    monkeypatch.delenv("STOPPED_BEFORE")
    assert run(*start, "--seed", 1, "--resume").exit_code == 0
    assert set(pd.read_csv(folder / "table5.csv")["seed"]) == {1}


def test_results_that_are_damaged_are_told_by_the_name_of_the_file(checkout):
    (checkout / "experiments" / "table5.py").write_text(STOPPED)
    folder = checkout / "results" / "table5"
    start = ("reproduce", "--folder", checkout, "table5", "--out", folder)
    draw = ("reproduce", "--folder", checkout, "all", "--from", checkout / "results")
    assert run(*start).exit_code == 0
    about, part, table = folder / "run.json", folder / "parts" / "one.csv", folder / "table5.csv"
    for path, text, told in [
        (about, "[" * 100_000, "run.json must say what was run"),
        (about, '{"versions": []}', "run.json must have another 'versions', a dict"),
        (about, '{"parts": [1]}', "run.json must have another 'parts', a list"),
        (part, "", "one.csv is damaged: No columns"),
        (part, 'a,b\n"', "one.csv is damaged"),
        (table, "a\n1\n", "table5.csv must have the columns part, seed"),
    ]:
        kept = path.read_bytes()
        path.write_text(text)
        assert told in one_line(run(*start, "--resume"))
        path.write_bytes(kept)
    table.write_text("a\n1\n")
    assert "table5 are not those of table5: 'seed'" in one_line(run(*draw))
    about.unlink()
    assert "has parts, but no run.json that says of what" in one_line(run(*start, "--resume"))


def test_one_run_at_a_time_writes_to_a_folder(checkout):
    folder = checkout / "runs" / "figure9"
    folder.parent.mkdir()
    with only_writer(folder):
        told = one_line(run("reproduce", "--folder", checkout, "figure9", "--out", folder))
    assert "another process is writing to" in told
    assert not folder.exists()


PARTS_BY_PROCESS = """
import os
from functools import partial

import pandas as pd

from experiments.registry import Run, experiment


def made(name):
    return pd.DataFrame({"a": [name], "process": [os.getpid()]})


@experiment("table7", "Three parts", resumable=True)
def table7(run: Run) -> None:
    parts = run.parts((name, partial(made, name)) for name in ("one", "two", "three"))
    run.together(parts).to_csv(run.folder / "table7.csv", index=False)
"""


def test_parts_are_made_by_processes_or_by_the_workers_of_a_scheduler(checkout, tmp_path):
    (checkout / "experiments" / "table7.py").write_text(PARTS_BY_PROCESS)
    start = ("reproduce", "--folder", checkout, "table7", "--out")
    plain, others = tmp_path / "plain", tmp_path / "others"
    assert run(*start, plain).exit_code == 0
    result = run(*start, others, "--jobs", 2)
    assert result.exit_code == 0, result.output
    tables = [pd.read_csv(folder / "table7.csv") for folder in (plain, others)]
    assert [table["a"].tolist() for table in tables] == [["one", "two", "three"]] * 2
    assert set(tables[0]["process"]) == {os.getpid()}
    assert os.getpid() not in set(tables[1]["process"])
    assert "--jobs must be a number of parts made at a time, or -1; got 0" in one_line(run(*start, others, "--jobs", 0))
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=1, processes=False, dashboard_address=None) as cluster:
        result = run(*start, tmp_path / "workers", "--scheduler", cluster.scheduler_address)
        assert result.exit_code == 0, result.output
    assert pd.read_csv(tmp_path / "workers" / "table7.csv")["a"].tolist() == ["one", "two", "three"]


def test_experiments_of_the_present_folder_are_not_run_unasked(checkout, monkeypatch):
    """A folder that calls itself otpdag may be anybody's."""
    (checkout / "experiments" / "figure9.py").write_text("raise SystemExit('code was run')")
    listed = run("reproduce")
    assert listed.exit_code == 0
    assert "table1" in listed.stdout
    assert "Nine lives" not in listed.stdout
    assert "--folder must be a checkout" in one_line(run("reproduce", "--folder", checkout / "nowhere"))
    monkeypatch.setattr("otpdag.cli.commands._own_experiments", lambda: None)
    assert "no experiments found: they are part of the repository" in run("reproduce").stderr


def test_a_file_of_a_run_is_replaced_as_a_whole(tmp_path):
    run = Run(tmp_path)
    run.write("table.csv", pd.DataFrame({"a": [1]}))

    class Half(pd.DataFrame):
        def to_csv(self, file, **how):
            file.write(b"a\n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.write("table.csv", Half({"a": [2]}))
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]
    assert (tmp_path / "table.csv").read_text() == "a\n1\n"


def test_an_experiment_has_one_name(checkout):
    text = (checkout / "experiments" / "figure9.py").read_text()
    (checkout / "experiments" / "other.py").write_text(text)
    told = one_line(run("reproduce", "--folder", checkout))
    assert "an experiment named 'figure9' is registered already, by experiments.figure9" in told


# --- the rest ---------------------------------------------------------------------------------------------


def test_version_and_help():
    assert run("--version").stdout == f"otpdag {otp.__version__}\n"
    for arguments in (("--help",), ("fit", "-h")):
        result = run(*arguments)
        assert result.exit_code == 0
        assert "Usage: otpdag" in result.stdout.replace("root", "otpdag")


# --- start-up ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--version"], ["fit", "--help"]])
def test_help_and_version_import_nothing_heavy(words):
    code = (
        "import sys\n"
        "from otpdag.cli import app\n"
        f"try:\n    app({words!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'pandas', 'numpy', 'scipy', 'matplotlib', 'sklearn', 'ot'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
