"""Text that is safe to print: what is called a name in a file must not move a terminal's cursor."""

__all__ = ["label_text", "printable"]


def printable(text: str, keep: str = "\n") -> str:
    r"""A text without characters that a terminal would obey: each becomes its escape.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def label_text(value: object) -> str:
    """A category as text: the same for a code that is whole, however its column stores it.

    >>> label_text(1.0), label_text(1), label_text("red"), label_text(0.5)
    ('1', '1', 'red', '0.5')
    """
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
