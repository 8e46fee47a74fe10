"""What benchmarks measured is kept case by case, and the page says which limits were not met and what was not run."""

import json

from benchmarks import performance
from benchmarks.harness import Record


def report(benchmark: str, *cases: Record) -> Record:
    return {"benchmark": benchmark, "seed": 5, "repeats": 5, "cases": list(cases)}


def factor(case: str, ratio: float, limit: float) -> Record:
    return {"case": case, "ratio": ratio, "limit": limit, "ours": 0.1 * ratio, "oracle": 0.1, "details": [1, 2]}


def test_page_from_what_was_kept(tmp_path):
    folder, page = tmp_path / "kept", tmp_path / "docs" / "performance.md"
    curves = {"otpdag": [(10, 0.1), (100, 0.4)], "pgmpy": [(10, 3.0)]}
    performance.keep(report("speed", factor("factor1_100k", 0.5, 1.0)), quick=True, folder=folder)
    performance.keep(report("speed", factor("factor4_1k", 4.0, 3.0)), quick=False, folder=folder)
    grown = {"case": "hidden", "ratio": 0.6, "ours": 0.4, "oracle": 0.1, "size_of": "hidden nodes", "curves": curves}
    performance.keep(report("growth", grown), quick=True, folder=folder)
    kept = json.loads((folder / "speed.json").read_text())
    assert set(kept) == {"factor1_100k", "factor4_1k"}
    assert "details" not in kept["factor4_1k"]
    assert kept["factor1_100k"]["command"] == "python -m benchmarks speed --quick --seed 5 --case factor1_100k"

    page.parent.mkdir()
    performance.draw(folder, page)
    text = page.read_text()
    assert "Above its limit, or not comparable: `factor4_1k`." in text
    assert "At the quick size, not the full one: `factor1_100k`, `hidden`." in text
    assert "| pgmpy, s | 3 | not run |" in text
    assert "`scale dask_rate`" in text
    assert {path.name for path in (tmp_path / "docs" / "performance").iterdir()} == {"peers.svg", "hidden.svg"}


def test_a_case_that_failed_says_why(tmp_path):
    page = tmp_path / "performance.md"
    failed = {"case": "mixture10_10k", "ratio": None, "error": "ValueError: our loss is above"}
    performance.keep(report("speed", failed, factor("hmm_1m", 0.01, 0.02)), quick=True, folder=tmp_path)
    performance.draw(tmp_path, page)
    assert "ValueError: our loss is above" in page.read_text()
