"""Numbers at the top of modules say what they are and where they come from (decision 0035)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "otpdag"


def silent(text: str) -> list[str]:
    """Names of constants with a number that neither a comment nor a text below says anything of.

    A text stands for all constants right above it; those of mathematics speak for themselves.
    """
    lines, names, waiting = text.splitlines(), [], []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            waiting = []
            continue
        if not _is_number(node):
            continue
        if waiting and waiting[-1][1] != node.lineno - 1:
            names, waiting = [*names, *(name for name, _ in waiting)], []
        commented = "#" in lines[node.end_lineno - 1] or lines[node.lineno - 2].startswith("#")
        if not commented:
            waiting.append((ast.unparse(node.targets[0]), node.end_lineno))
    return [*names, *(name for name, _ in waiting)]


def _is_number(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign) or not ast.unparse(node.targets[0]).strip("()").split(",")[0].isupper():
        return False
    if "math." in ast.unparse(node.value):
        return False
    constants = (part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant))
    drawn = "DASHES" in ast.unparse(node.targets[0]) or isinstance(node.value, ast.Dict | ast.Call | ast.Subscript)
    values = [value for value in constants if isinstance(value, int | float) and not isinstance(value, bool)]
    return bool(values) and not drawn


@pytest.mark.parametrize(
    "path",
    sorted(SOURCE.rglob("*.py")),
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_no_number_is_silent(path):
    assert silent(path.read_text()) == []


def test_what_says_nothing_is_found():
    assert silent("A = 3\n\n\ndef f(): ...\n") == ["A"]
    assert silent('A = 3\nB = 4\n"""Rows."""\n') == []
    assert silent('A = 3\n\nB = 4\n"""Rows."""\n') == ["A"]
    assert silent("A = 3  # rows\n# why\nB, C = 1, 2\nD = 'x'\nE = math.log(2)\n") == []
