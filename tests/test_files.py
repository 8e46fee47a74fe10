"""Files: whatever stops a writer, a whole file is there, the old one or the new one."""

import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import otpdag as otp
from otpdag import files
from otpdag import mechanisms as m
from otpdag.errors import DataError

NAMES = ("a.txt", "b.txt", "c.txt")
WRITE_MODELS = """
import sys
import numpy as np
import otpdag as otp
from otpdag import mechanisms as m
size = 400
model = otp.Model(otp.Graph([("k", "x")]), {"k": m.Categorical(size), "x": m.Normal(20)})
print("ready", flush=True)
number = 0
while True:
    number += 1
    model.set_params({
        "k": {"probs": np.full(size, 1 / size)},
        "x": {"loc": np.full((size, 20), float(number)), "scale": np.full((size, 20), float(number))},
    })
    model.save(sys.argv[1])
"""


def killed(script, target, wait):
    """Run a script that writes in a loop, and kill it some time after its first words."""
    process = subprocess.Popen([sys.executable, "-c", script, str(target)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    time.sleep(wait)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def write_sets_for_ever(folder):
    number = 0
    while True:
        number += 1
        write_set(folder, NAMES[: 2 + number % 2], str(number))


def small_model():
    model = otp.Model(otp.Graph([("k", "x")]), {"k": m.Categorical(2), "x": m.Normal()})
    return model.set_params({"k": {"probs": [0.2, 0.8]}, "x": {"loc": [0.0, 1.0], "scale": [1.0, 2.0]}})


# --- one file -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_save_leaves_a_whole_model(tmp_path):
    path, chance = tmp_path / "model.otp", random.Random(0)
    small_model().save(path)
    for _ in range(6):
        killed(WRITE_MODELS, path, chance.uniform(0.0, 0.12))
        params = otp.load(path).params()["x"]
        assert (params["loc"] == params["loc"].flat[0]).all() or params["loc"].size == 2


def write_half_a_file(path):
    with files.replacing(path) as file:
        file.write(b"half")
        raise ZeroDivisionError


def test_an_error_while_writing_changes_nothing(tmp_path):
    path = tmp_path / "note.txt"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError):
        write_half_a_file(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["note.txt"]


def test_a_limit_on_file_sizes_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "model.otp"
    small_model().save(path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with pytest.raises(DataError, match=r"model.otp' cannot be written: File too large; nothing was changed"):
            small_model().save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.otp"]


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"note.txt' cannot be written: No space left on device"):
        files.write_bytes(tmp_path / "note.txt", b"new")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"model.otp' cannot be written: No such file or directory"):
        small_model().save(tmp_path / "nowhere" / "model.otp")


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind the superuser")
def test_no_permission_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(DataError, match="cannot be written: Permission denied"):
        files.write_bytes(tmp_path / "note.txt", b"new")


def test_permissions_and_links_are_kept(tmp_path):
    real, link, fresh = tmp_path / "real.txt", tmp_path / "link.txt", tmp_path / "fresh.txt"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    files.write_bytes(link, b"new")
    files.write_bytes(fresh, b"new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o666 & ~mask


def test_what_is_no_file_is_written_to():
    files.write_bytes("/dev/null", b"gone")
    assert not Path("/dev/null").is_file()


def test_what_a_killed_writer_left_goes_and_what_a_living_one_writes_stays(tmp_path):
    path, left = tmp_path / "note.txt", tmp_path / ".otpdag-note.txt-0123456789ab.tmp"
    left.write_text("half")
    os.utime(left, (0, 0))
    with files.replacing(path) as file:
        assert not left.exists()
        file.write(b"slow")
        files.write_bytes(path, b"quick")
    assert path.read_text() == "slow"
    assert os.listdir(tmp_path) == ["note.txt"]


# --- a folder -------------------------------------------------------------------------------------------------


def write_set(folder, names, text):
    with files.folder_transaction(folder, NAMES) as staged:
        for name in names:
            files.write_bytes(staged / name, text.encode())


def write_half_a_set(folder):
    with files.folder_transaction(folder, NAMES) as staged:
        files.write_bytes(staged / "a.txt", b"new")
        raise KeyboardInterrupt


def content(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_set_of_files_replaces_the_one_before(tmp_path):
    folder = tmp_path / "deep" / "run"
    write_set(folder, NAMES, "old")
    (folder / "notes.md").write_text("mine")
    (folder / "plots").mkdir()
    write_set(folder, NAMES[:2], "new")
    (folder / "plots").rmdir()
    assert content(folder) == {"a.txt": "new", "b.txt": "new", "notes.md": "mine"}


@pytest.mark.parametrize("before", [True, False])
def test_a_failure_leaves_everything_as_it_was(tmp_path, before):
    folder = tmp_path / "deep" / "run"
    if before:
        write_set(folder, NAMES, "old")
    with pytest.raises(KeyboardInterrupt):
        write_half_a_set(folder)
    if before:
        assert content(folder) == dict.fromkeys(NAMES, "old")
    else:
        assert os.listdir(tmp_path) == []


# a test of another file may have imported JAX, which warns of every fork; these children touch files only
forks = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


@forks
@pytest.mark.parametrize("step", range(9))
def test_a_stop_between_any_two_renames_is_completed_at_the_next_use(tmp_path, monkeypatch, step):
    folder, left = tmp_path / "run", iter(range(step))
    write_set(folder, NAMES, "old")

    def failing(real):
        def wrapped(*arguments, **options):
            if next(left, None) is None:
                os._exit(9)
            return real(*arguments, **options)

        return wrapped

    child = os.fork()
    if child == 0:
        for name in ("rename", "replace", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, failing(getattr(os, name)))
        write_set(folder, NAMES[:2], "new")
        os._exit(0)
    os.waitpid(child, 0)
    files.finish_transaction(folder, NAMES)
    shown = {name: text for name, text in content_of(folder).items() if name in NAMES}
    assert shown in (dict.fromkeys(NAMES, "old"), dict.fromkeys(NAMES[:2], "new"))
    write_set(folder, NAMES, "newest")
    assert content(folder) == dict.fromkeys(NAMES, "newest")
    assert os.listdir(tmp_path) == ["run"]


def content_of(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


@pytest.mark.slow
@forks
def test_killed_at_random_a_folder_holds_one_set(tmp_path):
    folder, chance = tmp_path / "run", random.Random(1)
    folder.mkdir()
    (folder / "notes.md").write_text("mine")
    for _ in range(40):
        child = os.fork()
        if child == 0:
            write_sets_for_ever(folder)
        time.sleep(chance.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        files.finish_transaction(folder, NAMES)
        shown = content_of(folder)
        assert shown.pop("notes.md") == "mine"
        numbers = set(shown.values())
        assert len(numbers) <= 1
        assert len(shown) == (2 + int(next(iter(numbers))) % 2 if numbers else 0)


def test_a_manifest_moves_and_removes_only_what_belongs_to_the_set(tmp_path):
    folder = tmp_path / "run"
    committed = folder / ".otpdag-committed"
    committed.mkdir(parents=True)
    (tmp_path / "precious.txt").write_text("mine")
    (folder / "notes.md").write_text("mine")
    (committed / ".otpdag-manifest.json").write_text(json.dumps(["../precious.txt", "notes.md"]))
    files.finish_transaction(folder, NAMES)
    assert (tmp_path / "precious.txt").read_text() == (folder / "notes.md").read_text() == "mine"
    committed.mkdir(exist_ok=True)
    (committed / ".otpdag-manifest.json").write_text("5")
    with pytest.raises(DataError, match="is damaged"):
        files.finish_transaction(folder, NAMES)


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written: Not a directory"):
        files.check_writable(tmp_path / "file" / "run")
    files.check_writable(tmp_path / "deep" / "run")
    assert os.listdir(tmp_path) == ["file"]
    (tmp_path / "run" / "a.txt").mkdir(parents=True)
    with pytest.raises(DataError, match="is a folder where a file shall be"):
        write_set(tmp_path / "run", NAMES, "new")
