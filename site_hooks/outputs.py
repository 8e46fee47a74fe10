"""What the code of a tutorial prints, beneath it: blocks run while the site is built, so that pages show what is so."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
LINES, COLUMNS = 24, 110  # of what a block prints: more is cut off

log = get_plugin_logger("outputs")


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Add what each block printed; a page's blocks share their names, as in the tests."""
    source = page.file.src_uri
    if not (source in ("index.md", "quickstart.md") or source.startswith("tutorials/")):
        return markdown
    log.info(f"running {source}")
    names: dict[str, Any] = {"__name__": "__main__"}

    def with_output(block: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), pd.option_context("display.width", COLUMNS):
            exec(compile(block[1], source, "exec"), names)
        lines = printed.getvalue().splitlines()
        shown = [*lines[:LINES], *["..."] * (len(lines) > LINES)]
        return block[0] + ("\n```text\n" + "\n".join(shown) + "\n```\n" if shown else "")

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.symlink(ROOT / "examples", "examples")  # what blocks write stays out of the repository
        return BLOCK.sub(with_output, markdown)
