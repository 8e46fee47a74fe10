"""Docstrings as Markdown, and which names are public.

Doctests and formulas become blocks of code, roles of Sphinx the names they hold.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`~?([^`]+)`")
DOCTEST, FORMULA = ">>> ", ".. math::"


class Markdown(griffe.Extension):
    """Rewrites every docstring when its object is loaded; a room without ``__all__`` exports what it imports."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one; methods that Python calls have no entry of their own."""
        if obj.name.startswith("__"):
            obj.docstring = None
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Make the imports of a room's ``__init__`` public."""
        if mod.is_init_module and mod.exports is None:
            for member in mod.members.values():
                if member.is_alias and str(getattr(member, "target_path", "")).startswith("otpdag."):
                    member.public = True


def as_markdown(text: str) -> str:
    """A docstring with its blocks fenced."""
    written: list[str] = []
    fence = ""  # the indentation of the block that is open, and what ends it
    for line in ROLE.sub(r"`\1`", text).splitlines():
        bare = line.lstrip()
        indent = line[: len(line) - len(bare)]
        if fence and not bare:
            written.append(fence)
            fence = ""
        if not fence and bare.startswith((DOCTEST, FORMULA)):
            fence = indent + "```"
            written += ["", fence + ("pycon" if bare.startswith(DOCTEST) else "text")]
            line = indent + bare.removeprefix(FORMULA).strip()
            if not bare.removeprefix(FORMULA).strip():
                continue
        written.append(line)
    return "\n".join([*written, fence] if fence else written)
