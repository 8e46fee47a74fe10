"""Runs every example of examples/gallery while the site is built, and makes a page of each.

An example is a plain script: the first line of its docstring is the title, what it prints is shown, and it leaves its
picture in a variable ``figure``.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import runpy
import textwrap
from dataclasses import dataclass
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files

EXAMPLES = Path(__file__).parents[1] / "examples" / "gallery"
DATA = "OTPDAG_DATA"
log = get_plugin_logger("gallery")


@dataclass(frozen=True)
class Shown:
    """An example after it ran."""

    name: str
    title: str
    text: str
    code: str
    printed: str
    picture: bytes | None

    def page(self) -> str:
        printed = f"```text\n{self.printed}```\n\n" if self.printed else ""
        picture = f"![{self.title}]({self.name}.png)\n" if self.picture else ""
        return f"# {self.title}\n\n{self.text}\n\n{picture}\n{printed}## The code\n\n```py\n{self.code}\n```\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures of all examples, and a page that lists them."""
    shown = [show(path) for path in sorted(EXAMPLES.glob("*.py"))]
    for one in shown:
        files.append(File.generated(config, f"gallery/{one.name}.md", content=one.page()))
        if one.picture is not None:
            files.append(File.generated(config, f"gallery/{one.name}.png", content=one.picture))
    files.append(File.generated(config, "gallery/index.md", content=_index(shown)))
    return files


def show(path: Path) -> Shown:
    """Run one example; without the data that it needs, only its code is shown."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    title, _, text = (ast.get_docstring(tree) or path.stem).partition("\n")
    code = "\n".join(source.splitlines()[tree.body[0].end_lineno :]).strip()
    if DATA in source and not os.environ.get(DATA):
        note = f"\n\nThis page was built without the data: set `{DATA}` and build again."
        return Shown(path.stem, title.rstrip("."), text.strip() + note, code, "", None)
    log.info(f"running {path.name}")
    printed, picture = io.StringIO(), io.BytesIO()
    with contextlib.redirect_stdout(printed):
        variables = runpy.run_path(str(path))
    variables["figure"].savefig(picture, format="png", dpi=110)
    return Shown(path.stem, title.rstrip("."), text.strip(), code, printed.getvalue(), picture.getvalue())


def _index(shown: list[Shown]) -> str:
    parts = [
        "# Gallery",
        "",
        "Each example runs when this site is built; code, output and picture belong together.",
        "",
    ]
    for one in shown:
        first = textwrap.shorten(one.text.replace("\n", " "), 200, placeholder=" …")
        picture = f"[![{one.title}]({one.name}.png)]({one.name}.md)\n\n" if one.picture else ""
        parts += [f"## [{one.title}]({one.name}.md)", "", f"{picture}{first}", ""]
    return "\n".join(parts)
