"""Paper mode's failures are shown beside methods that do not have them."""

import pandas as pd
import pytest

from experiments import paper_mode
from experiments.registry import Run, Scale


def test_scales_and_certainty_are_those_over_the_truth():
    factor = {name: {"weight": [1.0], "scale": scale} for name, scale in (("x1", 1.0), ("x2", 3.0))}
    assert paper_mode.spread_of("factor", {"f": {}} | factor) == 2.0
    answers = {"z": {"probs": [0.5, 0.5]}, "x1": {"probs": [[0.7, 0.3], [0.1, 0.9]]}}
    assert paper_mode.spread_of("class", answers) == pytest.approx(0.8)


def test_the_comparison_is_written_and_drawn_part_by_part(tmp_path):
    paper_mode.paper_mode(Run(tmp_path, seed=101, scale=Scale.QUICK, only="*-likelihood-*"))
    paper_mode.paper_mode(Run(tmp_path, seed=101, scale=Scale.QUICK, resume=True, only="*-entropic-0"))
    table = pd.read_csv(tmp_path / "paper_mode.csv").set_index(["problem", "method", "repeat"]).sort_index()
    assert len(table) == 6
    for problem in ("factor", "class"):  # the default is maximum likelihood, which an outside estimator has as well
        found = table.loc[(problem, "entropic", 0)]
        expected = table.loc[(problem, "likelihood", 0)]
        assert found["error"] == pytest.approx(expected["error"], abs=0.01)
        assert found["over_true"] == pytest.approx(expected["over_true"], abs=0.02)
    page = paper_mode.page(tmp_path)
    assert page.text.startswith((tmp_path / "paper_mode.md").read_text())
    assert "| entropic (default) | 1 of 2 |" in page.text
    assert "| factor analysis, or EM | 2 of 2 |" in page.text
    assert len(page.pictures) == 1
