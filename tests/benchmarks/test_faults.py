"""The benchmark of faults: that its cases can find what they look for."""

import ast
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

import otpdag as otp
from benchmarks import kills, mutants
from benchmarks.faults import CASES
from benchmarks.mutant_runs import changed_functions
from benchmarks.mutants import SOURCE, _function_at, _places, mutant_of, number_of_mutants, sample
from benchmarks.tests_by_function import TestsByFunction, _as_text, _renewed


def test_the_cases():
    names = ["kills_saving", "kills_running", "resumed", "hostile_files", "bad_inputs", "resume_changed"]
    names += ["checkpoints_lost", "checkpoints_flipped", "writers", "bombs", "levels", "mutants", "soak"]
    assert list(CASES) == names


@pytest.mark.slow
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
    assert changes("z = x.sum(-1)") == ["1 -> 2"]  # of an axis, not its sign


def test_guards_against_a_division_by_zero_are_left_alone():
    assert changes("z = 1e-05") == ["1e-05 -> 0.01"]  # twice a tolerance would change nothing
    assert changes("z = 0.5") == ["0.5 -> 1.0"]
    assert changes("z = y / x.clamp(min=1e-12)") == ["y / x.clamp(min=1e-12) -> y * x.clamp(min=1e-12)"]
    assert changes("z = x.clamp(min=torch.finfo(x.dtype).tiny)") == []
    assert changes("z = x.clamp(min=0.5)") == ["0.5 -> 1.0", "x.clamp(min=0.5) -> x"]


def test_texts_errors_and_annotations_are_left_alone():
    assert changes('def f(x: int = y) -> "a":\n    """Two."""\n    raise ValueError(f"{x + 1}")') == []
    assert changes('__all__ = ["a"]\nif TYPE_CHECKING:\n    b = 1') == []
    assert changes("z = zip(x, y, strict=True)") == []
    assert changes("z: int = field(repr=False)") == []
    assert changes("z = torch.Generator().manual_seed(3)") == []
    assert changes("z = np.random.default_rng([seed + 1, 7])") == []
    assert changes("with at_work(1):\n    z = 2") == ["2 -> 3"]


def test_mutants_are_drawn_by_the_seed_and_differ_from_the_file_in_one_place():
    path = SOURCE / "engine" / "search.py"
    assert number_of_mutants(path) > 15
    text = ast.unparse(ast.parse(path.read_text())).splitlines()
    for number in (0, 5, 11):
        mutant = mutant_of(path, number)
        assert mutant.module == "otpdag.engine.search"
        changed = ast.unparse(mutant.tree).splitlines()
        assert sum(a != b for a, b in zip(text, changed, strict=True)) == 1
    first, again, other = (list(map(str, sample(seed, 3, ["divergences"]))) for seed in (1, 1, 2))
    assert first == again != other


def test_the_tests_of_a_function_begin_with_those_that_mirror_its_module():
    known = TestsByFunction(
        [("tests/engine/test_fit.py::a", 0.1), ("tests/engine/test_search.py::b", 0.5), ("tests/gone.py::c", 0.0)],
        {"engine/search.py": {"Searcher.run": [0, 1, 2], "search": [0]}},
    )
    assert [name for name, _ in known.of("engine/search.py", "Searcher")] == [
        "tests/gone.py::c",
        "tests/engine/test_fit.py::a",
        "tests/engine/test_search.py::b",
    ]
    path = SOURCE / "engine" / "search.py"
    mutant = replace(mutant_of(path, 0), function="Searcher.run")
    own = ["tests/engine/test_search.py", "tests/engine/test_search_moves.py", "src/otpdag/engine/search.py"]
    defaults = "tests/test_defaults.py"
    assert mutants.tests_of(mutant, known) == [*own, "tests/engine/test_fit.py::a", defaults]
    # tests of other functions of the module fill what is left of the minute
    both = TestsByFunction(
        [
            ("tests/engine/test_fit.py::a", 9.0),
            ("tests/engine/test_fit.py::d", 2.0),
            ("tests/engine/test_em.py::e", 50.0),
        ],
        {"engine/search.py": {"Searcher.run": [0], "search": [1, 2]}},
    )
    after = ["tests/engine/test_fit.py::a", "tests/engine/test_fit.py::d", defaults]
    assert mutants.tests_of(mutant, both) == [*own, *after]
    slow = TestsByFunction([("tests/engine/test_search.py::b", 50.0)], {"engine/search.py": {"search": [0]}})
    expected = [*own[1:], "tests/engine/test_search.py::b", defaults]
    assert mutants.tests_of(replace(mutant, function="search"), slow) == expected
    nothing = TestsByFunction([], {})
    assert mutants.tests_of(mutant, nothing)[0] == "tests/engine/test_search.py"


def test_the_function_around_a_line():
    tree = ast.parse("class A:\n    b: int = 1\n\n    def f(self):\n        def g():\n            return 2\n\nC = 3")
    assert [_function_at(tree, line) for line in (2, 4, 6, 8)] == ["A", "A.f", "A.f", ""]


def test_a_change_inside_a_function_is_its_new_code_and_one_outside_is_imported_anew(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("A = 1\n\nclass B:\n    c = 2\n\n    def f(self, x=3):\n        return [x + 4 for _ in range(5)]\n")

    def changed(old, new):
        return changed_functions(path, ast.parse(path.read_text().replace(old, new)))

    for old, new in (("x + 4", "x - 4"), ("range(5)", "range(6)")):
        ((key, code),) = changed(old, new).items()
        assert key == (str(path), "B.f", 6)
        assert code.co_name == "f"
    assert changed("A", "A") == {}
    for old, new in (("A = 1", "A = 2"), ("c = 2", "c = 3"), ("x=3", "x=4")):
        assert changed(old, new) is None


def test_what_some_files_run_can_be_renewed_alone():
    old = _as_text(
        [("tests/a.py::one", 0.5, {"m.py:f": [1]}), ("tests/b.py::two", 0.1, {"m.py:f": [1], "m.py:g": [5]})]
    )
    new = _as_text([("tests/b.py::three", 0.2, {"m.py:f": [2], "n.py:h": [1]})])
    content = json.loads(_renewed(old, new, ["tests/b.py"]))
    known = TestsByFunction([tuple(one) for one in content["tests"]], content["functions"])
    assert known.of("m.py", "f") == [("tests/b.py::three", 0.2), ("tests/a.py::one", 0.5)]
    assert known.of("n.py", "h") == [("tests/b.py::three", 0.2)]
    assert content["functions"]["m.py"]["g"] == []
