import json
import sys
from types import ModuleType

import numpy as np
import pytest

from benchmarks import __main__ as program
from benchmarks.harness import Outcome, Settings, Skip, by_method, failed, run, streams, summary
from benchmarks.table import table


def fine(settings):
    print("noise")
    return {"ratio": 1.5, "ours": 3.0, "oracle": 2.0, "seconds": 0.1, "oracle_seconds": 0.2}


def broken(settings):
    raise ZeroDivisionError("nothing to divide by")


def absent(settings):
    raise Skip("set SOMETHING")


@pytest.fixture
def benchmark(monkeypatch):
    """A benchmark named `toy` that the program finds."""
    module = ModuleType("benchmarks.toy", "A toy.\n\nMore about it.")
    module.CASES = {"fine": fine, "broken": broken, "absent": absent}
    found = {"toy": module}
    monkeypatch.setitem(sys.modules, "benchmarks.toy", module)
    monkeypatch.setattr(program, "find", found.get)
    return module


def test_streams_depend_on_seed_problem_and_number_only():
    first, again = streams(1, "factor", 2), streams(1, "factor", 2)
    assert first.data.random() == again.data.random()
    assert (first.oracle, first.fit) == (again.oracle, again.fit)
    others = [streams(2, "factor", 2), streams(1, "mixture", 2), streams(1, "factor", 3)]
    assert len({source.data.random() for source in others}) == 3
    assert len({source.fit for source in [first, *others]}) == 4


def test_the_streams_of_a_data_set_are_different():
    source = streams(0, "factor", 0)
    assert source.data.random() != source.missing.random()
    assert source.oracle != source.fit


def test_summary_has_mean_spread_and_time():
    found = summary("ours", [Outcome(1.0, 0.5), Outcome(3.0, 1.5)])
    assert found == {"ours": 2.0, "ours_std": 1.0, "ours_each": [1.0, 3.0], "seconds": 1.0}
    assert summary("oracle", [Outcome(1.0, 0.5)])["oracle_seconds"] == 0.5


def test_summary_refuses_figures_that_are_not_finite():
    with pytest.raises(FloatingPointError, match="figures of 'ours' must be finite"):
        summary("ours", [Outcome(float("nan"), 0.0)])


def test_by_method_reports_the_failure_of_one_method_beside_the_others():
    def measure(method):
        if method == "b":
            raise ValueError("no")
        return {"ratio": 1.0}

    found = by_method(Settings(methods=("a", "b", "c")), measure)
    assert found == {
        "method": "a",
        "ratio": 1.0,
        "ratio_b": None,
        "error_b": "ValueError: no",
        "ratio_c": 1.0,
    }
    assert failed({"cases": [found]})


def test_run_reports_every_case(capsys):
    report = run("toy", {"fine": fine, "broken": broken, "absent": absent}, Settings(seed=7))
    assert (report["benchmark"], report["seed"]) == ("toy", 7)
    assert report["cases"][0]["ratio"] == 1.5
    assert report["cases"][1] == {
        "case": "broken",
        "ratio": None,
        "error": "ZeroDivisionError: nothing to divide by",
    }
    assert report["cases"][2] == {"case": "absent", "skipped": "set SOMETHING"}
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "noise" in printed.err


def test_json_is_all_that_standard_output_gets(benchmark, capsys):
    assert program.main(["toy", "--quick", "--seed", "3", "--json", "--case", "fine"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert (report["benchmark"], report["seed"], report["repeats"]) == ("toy", 3, 5)
    assert [case["case"] for case in report["cases"]] == ["fine"]


def test_a_failing_case_makes_the_program_fail(benchmark, capsys):
    assert program.main(["toy", "--json"]) == 1
    cases = {case["case"]: case for case in json.loads(capsys.readouterr().out)["cases"]}
    assert cases["broken"]["ratio"] is None
    assert program.main(["toy", "--json", "--case", "absent"]) == 0


def test_the_table_shows_every_case(benchmark, capsys):
    assert program.main(["toy", "--quick"]) == 1
    shown = capsys.readouterr().out
    assert all(
        name in shown for name in ("fine", "1.5", "broken failed, ZeroDivisionError", "absent skipped, set SOMETHING")
    )


def test_the_table_has_a_column_per_further_method():
    record = {"case": "a", "ratio": 1.0, "ours": 2.0, "ours_std": 0.1, "ratio_paper": 4.0}
    grid = table({"benchmark": "toy", "seed": 0, "repeats": 5, "cases": [record]})
    assert [column.header for column in grid.columns][-1] == "ratio paper"
    assert list(grid.columns[3].cells) == ["2 ± 0.1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no benchmark 'nothing'"),
        (["toy", "--case", "other"], "toy has no case 'other'; it has fine, broken, absent"),
        (["toy", "--repeats", "0"], "must be at least 1; got 0"),
    ],
)
def test_wrong_calls_are_refused(benchmark, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        program.main(arguments)
    assert message in capsys.readouterr().err


def test_the_folder_is_the_list_of_benchmarks(capsys):
    assert program.main([]) == 0
    shown = capsys.readouterr().out
    assert "recovery: Recovery of known parameters" in shown
    assert "replicas: Restarts trained together" in shown
    assert "harness" not in shown


def test_settings_of_the_command_line(benchmark):
    parse = program._parser().parse_args
    assert program._settings(parse(["toy"])).repeats == 20
    assert program._settings(parse(["toy", "--quick"])).methods == ("auto", "transport", "paper")
    assert program._settings(parse(["toy", "--repeats", "2", "--method", "paper"])) == Settings(0, 2, ("paper",))
    assert np.isfinite(program._settings(parse(["toy"])).seed)
