"""The gallery: every example has a title, a text and a picture; cheap ones run here, all of them in `make docs`."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest
from matplotlib.figure import Figure

GALLERY = Path(__file__).resolve().parents[1] / "examples" / "gallery"
EXAMPLES = sorted(GALLERY.glob("*.py"))


def test_there_are_enough():
    assert len(EXAMPLES) >= 10


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_has_title_text_and_picture(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    title, _, text = (ast.get_docstring(tree) or "").partition("\n")
    assert title.endswith(".")
    assert len(text.strip()) > 80
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert "figure" in names


def test_effect_behind_a_hidden_confounder(capsys):
    variables = runpy.run_path(str(GALLERY / "hidden_confounder.py"))
    assert isinstance(variables["figure"], Figure)
    naive, done = (float(number) for number in re.findall(r": ([+-]\d\.\d\d)", capsys.readouterr().out)[:2])
    assert naive > 2.0
    assert done == pytest.approx(1.0, abs=0.15)


@pytest.mark.slow
def test_imputation_beats_the_mean(capsys):
    errors = runpy.run_path(str(GALLERY / "imputation.py"))["errors"]
    assert errors["otpdag"] < errors["IterativeImputer"] < errors["column mean"]
