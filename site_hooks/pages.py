"""Pages that live outside docs/, and links as the site has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what stands beside docs/."""
    for target, source in OUTSIDE.items():
        text = (
            (ROOT / source)
            .read_text(encoding="utf-8")
            .replace("](docs/", "](")
            .replace("](SECURITY.md", "](security.md")
        )
        files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links as the site has them: the guide for contributors is a page."""
    return markdown.replace("](../CONTRIBUTING.md", "](contributing.md")
