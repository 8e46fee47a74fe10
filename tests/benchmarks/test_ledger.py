"""The ledger: its entries are reproducible, cover all mechanisms, and a comparison finds what changed."""

import io
import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from benchmarks import ledger
from benchmarks.__main__ import main
from benchmarks.harness import Settings, run
from otpdag import mechanisms

QUICK = ("normal", "poisson_gaps", "vector_multivariate", "factor", "mixture", "chain_poisson", "lags", "documents")
HELPERS = {"Axis", "Family", "Mechanism", "Noise", "from_spec", "register", "start", "tie"}
OF_IMAGES = {"Codebook", "Codes", "Quantized"}  # inside the estimator of the case `codes`


@pytest.fixture(scope="module")
def report():
    return run("ledger", {name: ledger.CASES[name] for name in QUICK}, Settings(seed=3))


def shown(grid):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(grid)
    return console.export_text()


def test_entries_are_finite_and_the_same_again(report):
    again = run("ledger", {name: ledger.CASES[name] for name in QUICK}, Settings(seed=3))
    for one, other in zip(report["cases"], again["cases"], strict=True):
        assert "error" not in one, one
        assert one["status"].startswith("converged") or one["case"] == "documents"
        assert (one["ours"], one["values"]) == (other["ours"], other["values"])
        assert one["seconds"] > 0
    json.dumps(report, allow_nan=False)


def test_every_mechanism_has_a_case():
    text = Path(ledger.__file__).read_text()
    wanted = set(mechanisms.__all__) - HELPERS - OF_IMAGES
    assert not [name for name in wanted if f"m.{name}" not in text]


def test_a_report_passes_beside_itself(report):
    grid, good = ledger.compare(report, report)
    assert good
    assert "passed" in shown(grid)


def test_changes_are_found(report):
    worse, turned = deepcopy(report), deepcopy(report)
    worse["cases"][0]["ours"] += 1e-5
    grid, good = ledger.compare(report, worse)
    assert not good
    assert "loss rose" in shown(grid)
    assert ledger.compare(worse, report)[1]
    old, new = report["cases"][4]["values"], turned["cases"][4]["values"]
    new["z.probs"] = new["z.probs"][::-1]
    assert ledger.change(old, new, list) > 0.01
    assert ledger.change(old, new, ledger.ordered) == 0.0
    assert ledger.change(old, new | {"z.probs": [1.0]}, list) == float("inf")


def test_slower_lost_and_other_seeds(report):
    slow, lost = deepcopy(report), deepcopy(report)
    for one in slow["cases"]:
        one["seconds"] *= 1.2
    assert not ledger.compare(report, slow)[1]
    lost["cases"][1] = {"case": "poisson_gaps", "ratio": None, "error": "ValueError: no"}
    assert not ledger.compare(report, lost)[1]
    assert ledger.compare(lost, report)[1]
    with pytest.raises(ValueError, match="must have one seed; got 3 and 4"):
        ledger.compare(report, report | {"seed": 4})


def test_numbers_of_answers():
    assert ledger.numbers(pd.DataFrame({"a": ["y", "x"], "b": [1.0, np.nan]})) == [1.0, 1.0, 0.0, None]
    long = ledger.numbers(np.arange(1000.0))
    assert len(long) == ledger.MOST_VALUES + 2
    assert long[-2] == 499.5


def test_networks_are_skipped_without_their_folder(monkeypatch):
    monkeypatch.delenv("OTPDAG_DATA", raising=False)
    (record,) = run("ledger", {"asia": ledger.CASES["asia"]}, Settings())["cases"]
    assert "set OTPDAG_DATA" in record["skipped"]


def test_the_command_compares(report, tmp_path, capsys):
    path = tmp_path / "before.json"
    path.write_text(json.dumps(report))
    assert main(["ledger", "--compare", str(path), str(path)]) == 0
    assert "passed" in capsys.readouterr().out
    assert main(["ledger", "--seed", "3", "--case", "lags", "--compare", str(path)]) in (0, 1)  # times may differ
    assert "lags" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["recovery", "--compare", str(path)])
