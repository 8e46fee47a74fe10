"""The benchmark of faults: that its cases can find what they look for."""

import ast
import time
from pathlib import Path

import pytest

import otpdag as otp
from benchmarks import kills, mutants
from benchmarks.faults import CASES
from benchmarks.mutants import SOURCE, _places, mutant_of, number_of_mutants, sample


def test_the_cases():
    names = ["kills_saving", "kills_running", "resumed", "hostile_files", "bad_inputs", "mutants", "soak"]
    assert list(CASES) == names


@pytest.mark.parametrize("careless", [False, True])
def test_models_that_are_lost_are_counted(careless, monkeypatch):
    if careless:
        save = otp.Model.save

        def truncate_and_write(self, path):
            save(self, f"{path}.whole")
            content = Path(f"{path}.whole").read_bytes()
            with open(path, "wb", buffering=0) as file:
                file.write(content[:100])
                time.sleep(0.02)
                file.write(content[100:])

        monkeypatch.setattr(otp.Model, "save", truncate_and_write)
    lost = kills.lost_models(seed=0, kills=12)
    assert (lost > 0) is careless


def changes(text):
    tree = ast.parse(text)
    return sorted(f"{ast.unparse(place.node)} -> {ast.unparse(place.changed)}" for place in _places(tree))


def test_changes_of_a_line():
    assert changes("def f(x):\n    return x + 2 if x > 1 else 0.5") == [
        "0.5 -> 1.0",
        "1 -> 2",
        "2 -> 3",
        "x + 2 -> x - 2",
        "x + 2 if x > 1 else 0.5 -> 0.5 if x > 1 else x + 2",
        "x > 1 -> x <= 1",
    ]
    assert changes("x.clamp(y)") == ["x.clamp(y) -> pass", "x.clamp(y) -> x"]


def test_texts_errors_and_annotations_are_left_alone():
    assert changes('def f(x: int = y) -> "a":\n    """Two."""\n    raise ValueError(f"{x + 1}")') == []
    assert changes('__all__ = ["a"]\nif TYPE_CHECKING:\n    b = 1') == []


def test_mutants_are_drawn_by_the_seed_and_differ_from_the_file_in_one_place():
    path = SOURCE / "engine" / "course.py"
    assert number_of_mutants(path) > 15
    text = ast.unparse(ast.parse(path.read_text())).splitlines()
    for number in (0, 5, 11):
        mutant = mutant_of(path, number)
        assert mutant.module == "otpdag.engine.course"
        changed = ast.unparse(mutant.tree).splitlines()
        assert sum(a != b for a, b in zip(text, changed, strict=True)) == 1
    first, again, other = (list(map(str, sample(seed, 3, ["divergences"]))) for seed in (1, 1, 2))
    assert first == again != other


def test_the_test_files_of_a_module_begin_with_those_that_mirror_it():
    found = mutants.test_files_of(SOURCE / "engine" / "search.py")
    assert found[0].name == "test_search.py"
    assert all(mutants.test_files_of(path) for path in SOURCE.rglob("*.py") if path.parent.name != "otpdag")
