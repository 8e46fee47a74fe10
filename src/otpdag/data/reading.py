"""Tables in files: what separators, decimal signs and characters a text has is recognised, and said if not usual.

Text is looked at by its first lines; titles above the header are left out. A separator is one that gives every line as
many cells as the header has names; commas within numbers are decimal signs where they cannot group digits. Columns of
digits of which some begin with zero, such as postcodes, stay text.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from otpdag.data.columns import begin_with_zeros
from otpdag.errors import DataError, listed

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
TEXTS = (".csv", ".tsv", ".txt", ".dat", ".tab")
MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
NAMED = "first cells that have no title taken for names of rows"
MOST_TITLES = 10  # lines above a header
LOOKED_AT = 2**18  # bytes at the beginning of a text that tell its form
GROUPED = re.compile(r"[-+]?\d{1,3}(?:[.,' ]\d{3})+")
DECIMAL_COMMA = re.compile(r"[-+]?(?:\d{1,3}(?:[.' ]\d{3})+|\d+),\d+|[-+]?,\d+")


@dataclass(frozen=True)
class Form:
    r"""How a text is written.

    Attributes:
        separator: Between cells; a run of blanks is ``\s+``.
        decimal: The decimal sign.
        thousands: What groups digits; None for nothing.
        encoding: Its characters.
        skipped: Lines before the header.
        texts: Columns of digits that stay text.
        named: Whether rows begin with a name that has no title, as R writes them.
    """

    separator: str = ","
    decimal: str = "."
    thousands: str | None = None
    encoding: str = "utf-8"
    skipped: int = 0
    texts: tuple[str, ...] = field(default=())
    named: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the text is as this library writes it, but for columns."""
        return Form(encoding=self.encoding, texts=self.texts) == self and self.encoding.startswith("utf-8")

    def told(self, usual: str) -> list[str]:
        """What a reader should know of it."""
        between = SEPARATORS.get(self.separator, "blanks" if self.separator == r"\s+" else repr(self.separator))
        said = {
            f"cells between {between}": self.separator != usual,
            "decimal commas": self.decimal == ",",
            f"digits grouped by {self.thousands!r}": self.thousands is not None,
            f"characters of {self.encoding}": self.encoding not in ("utf-8", "utf-8-sig"),
            f"{self.skipped} lines before the header left out": self.skipped > 0,
            f"digits that begin with zero kept as text: {listed(self.texts)}": bool(self.texts),
            NAMED: self.named,
        }
        return [words for words, holds in said.items() if holds]


def read_table(path: str | Path, *, separator: str | None = None, decimal: str | None = None) -> pd.DataFrame:
    """Read a table from a file; what is not usual about it is in its ``attrs["read_as"]``, in words.

    Args:
        path: Text (``.csv``, ``.tsv``, ``.txt``, ``.dat``, ``.tab``), ``.parquet``, Excel (``.xlsx``), Stata
            (``.dta``), SPSS (``.sav``, ``.zsav``, ``.por``) or SAS (``.sas7bdat``, ``.xpt``); labels of values become
            categories.
        separator: What is between the cells of a text; recognised if left out.
        decimal: Its decimal sign, ``.`` or ``,``; recognised if left out.

    Raises:
        DataError: The file is of another kind, does not exist, or needs a package that is not installed.
    """
    if not isinstance(path, str | Path):
        raise DataError(f"path must be the path of a file; got {path!r}")
    path = Path(path)
    ending = path.suffix.lower()
    if ending not in (*TEXTS, *_READERS):
        raise DataError(f"path must end in {', '.join((*TEXTS, *_READERS))}; got {str(path)!r}")
    if not path.is_file():
        raise DataError(f"path must be a file that exists; got {str(path)!r}")
    if decimal not in (None, ".", ","):
        raise DataError(f"decimal must be '.' or ','; got {decimal!r}")
    if not isinstance(separator, str | None):
        raise DataError(f"separator must be text; got {separator!r}")
    package, read = _READERS.get(ending, ("pandas", partial(_read_text, separator=separator, decimal=decimal)))
    try:
        table = read(path)
    except DataError:
        raise
    except ImportError as error:
        raise DataError(f"path {str(path)!r} needs the package {package}: pip install {package}") from error
    except Exception as error:  # what damaged files do to the packages that read them has no end
        raise DataError(f"{path}: cannot be read as a table: {error or type(error).__name__}") from None
    table.attrs.setdefault("read_as", [])
    return table


# -- text --------------------------------------------------------------------------------------------------------------


def _read_text(path: Path, separator: str | None, decimal: str | None) -> pd.DataFrame:
    form = recognise(path, separator, decimal)
    layout: dict[str, Any] = {"sep": form.separator, "encoding": form.encoding, "skiprows": form.skipped}
    layout["engine"] = "python" if form.separator == r"\s+" else None
    _check_names(path, pd.read_csv(path, header=None, nrows=1, dtype=str, **layout))
    texts = dict.fromkeys(form.texts, str)
    table = pd.read_csv(path, decimal=form.decimal, thousands=form.thousands, dtype=texts, **layout)
    told = form.told("\t" if path.suffix.lower() in (".tsv", ".tab") else ",")
    table.attrs |= {"plain": form.is_plain, "read_as": told}
    return table


def _check_names(path: Path, header: pd.DataFrame) -> None:
    """Refuse a name that is there twice: pandas would call the second one otherwise."""
    names = header.iloc[:1].stack()
    if names.duplicated().any():
        twice = names[names.duplicated()].iloc[0]
        raise DataError(f"path {str(path)!r} must have each column once; found {twice!r} twice")


def recognise(path: Path, separator: str | None = None, decimal: str | None = None) -> Form:
    """How a text is written, by its first lines; what is given is as it is given."""
    with path.open("rb") as file:
        begin = file.read(LOOKED_AT)
    encoding = next((name for mark, name in MARKS.items() if begin.startswith(mark)), "") or _encoding(path, begin)
    text = codecs.getincrementaldecoder(encoding)("replace").decode(begin)
    lines = text.splitlines(keepends=True)
    lines = lines[:-1] if len(begin) == LOOKED_AT else lines
    skipped = next((i for i, line in enumerate(lines) if not line.startswith("#")), 0)
    if lines[skipped:] and lines[skipped].lower().startswith("sep=") and len(lines[skipped].strip()) == 5:
        separator, skipped = separator or lines[skipped].strip()[-1], skipped + 1  # as Excel writes it
    usual = "\t" if path.suffix.lower() in (".tsv", ".tab") else ","
    found = separator or _separator("".join(lines[skipped:]), usual)
    for above in () if found else range(1, min(MOST_TITLES + 1, len(lines) - skipped)):
        header = skipped + above
        titles, shown = ("".join(part) for part in (lines[skipped:header], lines[header : header + 10 * MOST_TITLES]))
        found = _separator(shown, usual) if lines[header].strip() else None
        if found and all(sum(map(bool, row)) <= 1 for row in _cells(titles, found)):
            skipped = header
            break
        found = None
    separator = found or usual
    names, *rows = _cells("".join(lines[skipped:]), separator) or [[]]
    longer = {len(row) for row in rows if len(row) > len(names)}
    at_end = not any(row[-1] for row in rows)
    if longer and (at_end or {len(row) for row in rows} != {len(names) + 1}):
        what = "a row ends in" if at_end else "quote cells that hold"
        raise DataError(f"{path}: a row has {max(longer)} cells, the header {len(names)}: {what} {separator!r}")
    columns = {name: [row[at] for row in rows if at < len(row) and row[at]] for at, name in enumerate(names)}
    if decimal is None:
        decimal = _decimal(columns, separator)
    thousands = None
    if decimal == ",":
        thousands = "." if any(re.search(r"\.\d{3},", cell) for cells in columns.values() for cell in cells) else None
    elif any(_all_grouped(cells, ",") for cells in columns.values()):
        thousands = ","
    texts = tuple(name for name, cells in columns.items() if begin_with_zeros(cells))
    return Form(separator, decimal, thousands, encoding, skipped, texts, named=bool(longer))


def _encoding(path: Path, begin: bytes) -> str:
    """UTF-8 if the whole file is, else that of Windows in the west, which reads any byte that such files have."""
    try:
        begin.decode("utf-8")
        with path.open(encoding="utf-8") as file:
            while file.read(2**20):
                pass
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8"


def _cells(text: str, separator: str) -> list[list[str]]:
    """The cells of lines that have any."""
    if separator == r"\s+":
        return [line.split() for line in text.splitlines() if line.strip()]
    try:
        return [row for row in csv.reader(io.StringIO(text), delimiter=separator) if any(row)]
    except (csv.Error, TypeError):
        return []


def _separator(text: str, usual: str) -> str | None:
    """The usual one if all lines have as many cells as the header by it, or else another of which that holds."""
    for one in (usual, *(other for other in SEPARATORS if other != usual), r"\s+"):
        sizes = [len(row) for row in _cells(text, one)]
        if len(sizes) > 1 and sizes[0] > 1 and max(sizes) == sizes[0] and min(sizes) > 1:
            return one
    return None


def _decimal(columns: Mapping[str, Sequence[str]], separator: str) -> str:
    """A comma, if a column has only numbers with one, of which some cannot group digits."""
    for cells in columns.values():
        numbers = [cell.strip() for cell in cells]
        with_comma = [cell for cell in numbers if DECIMAL_COMMA.fullmatch(cell)]
        rest = [cell for cell in numbers if cell not in with_comma and not re.fullmatch(r"[-+]?[\d.]+", cell)]
        may_group = separator == "," and all(GROUPED.fullmatch(cell) for cell in with_comma)
        if with_comma and not rest and not may_group:
            return ","
    return "."


def _all_grouped(cells: Sequence[str], by: str) -> bool:
    """Whether a column has numbers only, and some of them digits in groups of three."""
    grouped = [bool(GROUPED.fullmatch(cell.partition(".")[0])) and by in cell for cell in cells]
    return any(grouped) and all(
        is_one or re.fullmatch(r"[-+]?\d{1,3}(\.\d+)?", cell) for is_one, cell in zip(grouped, cells, strict=True)
    )


# -- other files -------------------------------------------------------------------------------------------------------


def _excel(path: Path) -> pd.DataFrame:
    sheets = pd.read_excel(path, sheet_name=None, dtype=object)  # text of digits stays text, as in the file
    first, *others = [name for name, table in sheets.items() if not table.empty] or list(sheets)
    filled = pd.read_excel(path, sheet_name=first, header=None, nrows=MOST_TITLES + 1).notna().sum(axis=1).tolist()
    titles = next((at for at, many in enumerate(filled) if many > 1), 0)
    _check_names(path, pd.read_excel(path, sheet_name=first, header=None, nrows=1, skiprows=titles))
    if titles:
        sheets[first] = pd.read_excel(path, sheet_name=first, skiprows=titles, dtype=object)
    table = sheets[first].infer_objects()
    said = [f"the sheet {first!r} of several ({listed(others)} left out)"] if others else []
    table.attrs["read_as"] = said + [f"{titles} lines before the header left out"] * bool(titles)
    return table


def _labelled(path: Path, reader: str, **options: bool) -> pd.DataFrame:
    """Files of SPSS and SAS: values by their labels, as categories in the order of the values."""
    import pyreadstat

    table: pd.DataFrame = getattr(pyreadstat, reader)(str(path), **options)[0]
    return table


_READERS: dict[str, tuple[str, Callable[[Path], pd.DataFrame]]] = {
    ".parquet": ("pyarrow", pd.read_parquet),
    ".xlsx": ("openpyxl", _excel),
    ".dta": ("pandas", pd.read_stata),
    ".sav": ("pyreadstat", partial(_labelled, reader="read_sav", apply_value_formats=True)),
    ".zsav": ("pyreadstat", partial(_labelled, reader="read_sav", apply_value_formats=True)),
    ".por": ("pyreadstat", partial(_labelled, reader="read_por", apply_value_formats=True)),
    ".sas7bdat": ("pyreadstat", partial(_labelled, reader="read_sas7bdat")),
    ".xpt": ("pyreadstat", partial(_labelled, reader="read_xport")),
}
