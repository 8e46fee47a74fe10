"""Pages that live outside docs/, and marks in docstrings that a site writes otherwise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):(?=<code>|<a |<autoref)")
MATH = re.compile(r"<p>\.\. math::(.*?)</p>", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what stands beside docs/, and a list of the decisions."""
    for target, source in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, target, content=text))
    files.append(File.generated(config, "decisions/index.md", content=_decisions()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links as the site has them: a folder of pages is its index, and the guide for contributors is a page."""
    return markdown.replace("](../CONTRIBUTING.md", "](contributing.md").replace(
        "](decisions/)", "](decisions/index.md)"
    )


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings hold roles and formulas of Sphinx: show the name, and the formula as it is written."""
    return MATH.sub(r"<pre><code>\1</code></pre>", ROLE.sub("", html))


def _decisions() -> str:
    lines = ["# Decisions", "", "One page for each choice that a reader would otherwise question.", ""]
    for path in sorted((ROOT / "docs" / "decisions").glob("0*.md")):
        title = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"
