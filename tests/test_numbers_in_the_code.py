"""Numbers at the top of modules say what they are and where they come from (decision 0035); fields, in docstrings."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "otpdag"


@cache
def parsed(text: str) -> ast.Module:
    """A module, which both tests read."""
    return ast.parse(text)


def silent(text: str) -> list[str]:
    """Names of constants with a number of which no comment says anything, on their line or above.

    A comment above stands for all constants right below it; those of mathematics speak for themselves.
    """
    lines, names, covered = text.splitlines(), [], -1
    for node in filter(_is_number, parsed(text).body):
        if lines[node.lineno - 2].startswith("#") or covered == node.lineno - 1:
            covered = node.end_lineno
        elif "#" not in lines[node.end_lineno - 1]:
            names.append(ast.unparse(node.targets[0]))
    return names


def _is_number(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign) or not ast.unparse(node.targets[0]).strip("()").split(",")[0].isupper():
        return False
    if "math." in ast.unparse(node.value):
        return False
    drawn = "DASHES" in ast.unparse(node.targets[0])
    parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    plain = [part for part in parts if not isinstance(part, ast.Dict | ast.Call | ast.Subscript)]
    constants = (part.value for one in plain for part in ast.walk(one) if isinstance(part, ast.Constant))
    values = [value for value in constants if isinstance(value, int | float) and not isinstance(value, bool)]
    return bool(values) and not drawn


def test_no_number_is_silent():
    assert {path: names for path in SOURCE.rglob("*.py") if (names := silent(path.read_text()))} == {}


def test_what_says_nothing_is_found():
    assert silent("A = 3\n\n\ndef f(): ...\n") == ["A"]
    assert silent("# rows\nA = 3\nB = 4\n") == []
    assert silent("# rows\nA = 3\n\nB = 4\n") == ["B"]
    assert silent("A = 3  # rows\n# why\nB, C = 1, 2\nD = 'x'\nE = math.log(2)\n") == []


def test_texts_stand_in_docstrings_alone():
    """Fields are described under "Attributes:" or "Args:" of their class, where ``help`` shows them."""
    assert {path: lines for path in SOURCE.rglob("*.py") if (lines := later_texts(path.read_text()))} == {}


def later_texts(text: str) -> list[int]:
    """Lines of texts that are statements of their own, but not the first of a body."""
    bodies = (getattr(node, "body", None) for node in ast.walk(parsed(text)))
    later = [part for body in bodies if isinstance(body, list) for part in body[1:] if isinstance(part, ast.Expr)]
    return [part.lineno for part in later if isinstance(getattr(part.value, "value", None), str)]
