"""Text that is safe to print: what is called a name in a file must not move a terminal's cursor."""

__all__ = ["printable"]


def printable(text: str, keep: str = "\n") -> str:
    r"""A text without characters that a terminal would obey: each becomes its escape.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)
