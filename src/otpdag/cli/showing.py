"""What a run folder keeps for ``otpdag show``: the model in words, so that none of the heavy libraries is needed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from otpdag.cli.console import RUN_FILES, out, write_out
from otpdag.errors import printable
from otpdag.files import finish_transaction

SHOWN = "shown.json"
MOST_ENTRIES = 40  # of one parameter


@dataclass(frozen=True)
class EstimateLine:
    """One number of a model: whose it is, what it is called, and the ends of its interval where they are known."""

    node: str
    kind: str
    parameter: str
    at: str
    value: str
    fixed: bool
    ends: Sequence[str] = ()


def number(value: float) -> str:
    """Five significant digits.

    >>> number(0.123456), number(123456.7), number(-2.0)
    ('0.12346', '1.2346e+05', '-2')
    """
    return f"{value + 0.0:.5g}"


def lines_table(lines: Iterable[EstimateLine], *, ends: bool = False) -> RenderableType:
    """Every estimate, grouped by node."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("node", "parameter", "at"):
        table.add_column(title, overflow="fold")
    for title in ("estimate", "lower", "upper")[: 3 if ends else 1]:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    last, cut = "", False
    for (node, parameter), group in groupby(lines, key=lambda line: (line.node, line.parameter)):
        own = list(group)
        for position, line in enumerate(own[:MOST_ENTRIES]):
            whose = _whose(line) if node != last else Text("")
            which = Text("" if position else printable(parameter, keep=""))
            fixed = "fixed" if line.fixed else ""
            table.add_row(whose, which, Text(printable(line.at, keep="")), line.value, *line.ends, fixed)
            last = node
        if len(own) > MOST_ENTRIES:
            table.add_row("", "", f"... and {len(own) - MOST_ENTRIES} more")
            cut = True
    note = [Text("The rest of the long tables is in params.json.", style="dim")] if cut else []
    return Group(table, *note)


def _whose(line: EstimateLine) -> Text:
    return Text(printable(line.node, keep=""), style="bold") + Text(f" ({line.kind})", style="not bold dim")


def shown_bytes(archive: bytes, text: str, described: dict[str, Any], lines: Sequence[EstimateLine]) -> bytes:
    """What is kept of a saved model, with the hash of the archive that it belongs to."""
    content = {
        "model_sha256": hashlib.sha256(archive).hexdigest(),
        "text": text,
        "described": described,
        "lines": [asdict(line) for line in lines],
    }
    return (json.dumps(content, indent=1) + "\n").encode("utf-8")


def show_saved(path: Path, *, as_json: bool) -> bool:
    """Print what is kept of a saved model or run folder; False where nothing is, or it belongs to another model."""
    if path.is_dir():
        finish_transaction(path, RUN_FILES)
    archive = path / "model.otp" if path.is_dir() else path
    try:
        content = json.loads((archive.parent / SHOWN).read_bytes())
        if content["model_sha256"] != hashlib.sha256(archive.read_bytes()).hexdigest():
            return False
        text, described = str(content["text"]), dict(content["described"])
        lines = [EstimateLine(**line) for line in content["lines"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False  # the model itself says what is wrong, or all that there is
    if as_json:
        write_out(json.dumps(described, indent=1) + "\n")
        return True
    console = out()
    console.print(text, markup=False)
    if lines:
        console.print()
        console.print(lines_table(lines))
    return True
