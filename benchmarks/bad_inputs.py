"""Bad inputs of the command line: model files, tables and options that are wrong. None may be called a bug of otpdag.

:func:`bad_inputs` yields them, :func:`answer` runs one and tells the exit code and the message.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from otpdag.cli import app

__all__ = ["BUG", "BadInput", "answer", "bad_inputs"]

BUG = 1
GOOD_MODEL = "{edges: [[k, x], [x, n]], hidden: [k], nodes: {k: {type: Categorical, size: 2}, n: Poisson}}"
GOOD_TABLE = "x,n,w\n" + "\n".join(f"{i % 7 + 0.5 * (i % 3)},{i % 4},{1 + i % 2}" for i in range(40)) + "\n"
QUICK = ("--restarts", "1", "--steps", "4", "--quiet")


@dataclass(frozen=True)
class BadInput:
    """What goes wrong, with the files and options of a fit."""

    name: str
    model: str | bytes = GOOD_MODEL
    table: str | bytes = GOOD_TABLE
    options: tuple[str, ...] = ()


def bad_inputs(seed: int = 0) -> Iterator[BadInput]:
    """Wrong options, model files and tables."""
    yield from _options()
    yield from _models()
    yield from _tables()
    yield from _mixed(random.Random(seed))


def answer(bad: BadInput, folder: Path) -> tuple[int, str]:
    """Exit code and message of a fit with these files and options."""
    for name, content in (("model.yaml", bad.model), ("data.csv", bad.table)):
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    arguments = ["fit", str(folder / "model.yaml"), str(folder / "data.csv"), "--out", str(folder / "run"), "--force"]
    result = CliRunner().invoke(app, [*arguments, *QUICK, *bad.options])
    return result.exit_code, result.stderr.strip()


def _options() -> Iterator[BadInput]:
    numbers = ("-1", "0", "1.5", "x", "", "nan", "inf", "1e3", str(10**30), str(2**63), "-" + "9" * 40, "0x10", " ")
    for option in ("--seed", "--restarts", "--steps", "--intervals"):
        for value in numbers:
            yield BadInput(f"{option} {value}", options=(option, value))
    for device in ("tpu", "cuda:99", "cuda:-1", "meta", "", "cpu:7", "mps", "xpu", "CPU", "cuda:" + "9" * 30):
        yield BadInput(f"--device {device}", options=("--device", device))
    for option in ("--weights", "--sequence", "--time"):
        for value in ("nowhere", "", "x", "n", "w", "\x1b[2J", "é"):
            yield BadInput(f"{option} {value!r}", options=(option, value))
    for value in ("magic", "", "PAPER", "entropic,paper"):
        yield BadInput(f"--method {value}", options=("--method", value))
        yield BadInput(f"--robust {value}", options=("--robust", value))


def _models() -> Iterator[BadInput]:
    texts = [
        "",
        " ",
        "~",
        "5",
        "a",
        "[]",
        "{}",
        "- a",
        "edges:",
        "edges: 5",
        "edges: {}",
        "edges: [5]",
        "edges: [[x]]",
        "edges: [[x, n, 1, 2]]",
        "edges: [[x, x]]",
        "edges: [[x, n], [n, x]]",
        "edges: [[x, n], [x, n]]",
        "edges: [[x, n, 0]]",
        "edges: [[x, n, -1]]",
        "edges: [[x, n, 1.5]]",
        "edges: [[x, n, 99999999999]]",
        "edges: [[x, n, yes]]",
        "edges: [[x, 1]]",
        "edges: [[null, n]]",
        "edges: [[x, '']]",
        "edges: [[x, nowhere]]",
        "{edges: [[x, n]], hidden: [z]}",
        "{edges: [[x, n]], hidden: [x, x]}",
        "{edges: [[x, n]], hidden: x}",
        "{edges: [[x, n]], hidden: [x, n]}",
        "{edges: [[x, n]], hidden: [x]}",
        "{edges: [[x, n]], nodes: 5}",
        "{edges: [[x, n]], nodes: {x: 5}}",
        "{edges: [[x, n]], nodes: {x: [Normal]}}",
        "{edges: [[x, n]], more: 1}",
        "{edges: [[x, n]], nodes: {z: Normal}}",
        "{edges: [[x, n]], nodes: {x: {type: Nothing}}}",
        "edges: &e [*e]",
        "edges: *e",
        "x: !!python/name:os.system",
        "%YAML 9.9\n---\n{}",
        "{edges: [[x, n]]}\n---\n{}",
        "\t- a",
        "a: b: c",
        "x: 2001-99-99",
        "x: !!binary '@'",
        "x: !!timestamp soon",
        "? [a]\n: b",
        "{<<: 5}",
        "'",
        '"',
        "{",
        "[" * 5000,
        "- " * 5000,
        "{a: " * 5000,
        "a: " + "9" * 6000,
        "\ufeff",
        "a: \x00",
        "a: \x1b",
        "# only a comment",
        "...",
        "---",
    ]
    for text in texts:
        yield BadInput(f"model {text!r:.40}", model=text)
    yield BadInput("model in another encoding", model=GOOD_MODEL.encode("utf-16"))
    yield BadInput("model of bytes", model=bytes(range(256)))
    yield BadInput("model of laughs", model=_laughs())
    values = (
        "-1",
        "0",
        "1.5",
        "x",
        "[]",
        "[-3]",
        "[0]",
        "[1000000]",
        "[a]",
        "{}",
        "{start: x}",
        "{tie: 5}",
        "{fix: }",
        "1e400",
        ".nan",
        ".inf",
        "[1, [2, 3]]",
        "99999999999999999999",
        "null",
        "yes",
        "[[[[1]]]]",
    )
    for kind, arguments in _ARGUMENTS.items():
        for argument in arguments:
            for value in values:
                entry = f"{{type: {kind}, {argument}: {value}}}"
                yield BadInput(f"{entry}", model=f"{{edges: [[x, n]], nodes: {{{_NODE[kind]}: {entry}}}}}")


_ARGUMENTS = {
    "Normal": ("dim", "loc", "weight", "scale", "network", "shared_scale", "floor"),
    "Categorical": ("size", "probs", "network"),
    "Poisson": ("dim", "network", "rate"),
    "Given": ("space",),
}
_NODE = {"Normal": "x", "Categorical": "n", "Poisson": "n", "Given": "x"}


def _laughs() -> str:
    lines = ["a0: &a0 [x, x]"]
    return "\n".join(lines + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)])


def _tables() -> Iterator[BadInput]:
    lines = GOOD_TABLE.splitlines()
    cells = (
        "1e160",
        "-1e160",
        "1e308",
        "1e400",
        "inf",
        "-inf",
        "nan",
        "1,5",
        '"1,5"',
        "5%",
        "2024-01-01",
        "x",
        "True",
        "é",
        "\x1b[2J",
        "1_000",
        "0x10",
        "--5",
        "1e-320",
        "9" * 400,
        "  ",
        '""',
        "'",
        "null",
    )
    for cell in cells:
        for column in (0, 1, 2):
            row = lines[5].split(",")
            row[column] = cell
            text = "\n".join([*lines[:5], ",".join(row), *lines[6:]])
            yield BadInput(f"a cell {cell!r:.20} in column {column}", table=text + "\n", options=("--weights", "w"))
    whole = {
        "nothing": "",
        "only a header": lines[0],
        "one row": "\n".join(lines[:2]),
        "two rows": "\n".join(lines[:3]),
        "semicolons": GOOD_TABLE.replace(",", ";"),
        "tabs": GOOD_TABLE.replace(",", "\t"),
        "a comma at the end": "\n".join([lines[0], *(line + "," for line in lines[1:])]),
        "a comma at the end of some": "\n".join(line + "," * (i % 3 == 2) for i, line in enumerate(lines)),
        "no header": "\n".join(lines[1:]),
        "a header twice": "\n".join([lines[0], *lines]),
        "a column twice": GOOD_TABLE.replace("w", "x", 1),
        "an open quote": GOOD_TABLE + '"3,1,2',
        "a constant column": "x,n,w\n" + "2,1,1\n" * 30,
        "an empty column": "x,n,w\n" + ",1,1\n" * 30,
        "all missing": "x,n,w\n" + ",,\n" * 30,
        "negative counts": GOOD_TABLE.replace(",3,", ",-3,"),
        "no weights": "x,n,w\n" + "2.5,1,0\n" * 30,
        "bytes": "\x00\x01\x02",
        "spaces": " \n \n",
        "one column": "x\n1\n2\n",
        "a long line": "x,n,w\n" + "1," * 5000 + "\n",
        "huge": "x,n,w\n" + "1e300,1,1\n2e300,2,1\n" * 15,
        "tiny": "x,n,w\n" + "1e-300,1,1\n2e-300,2,1\n" * 15,
        "hidden shown": GOOD_TABLE.replace("w", "k", 1),
    }
    for name, text in whole.items():
        yield BadInput(f"a table with {name}", table=text)
    yield BadInput("a table in another encoding", table=GOOD_TABLE.encode("utf-16"))
    yield BadInput("a table of noise", table=random.Random(0).randbytes(2000))


def _mixed(chance: random.Random, number: int = 60) -> Iterator[BadInput]:
    """Characters of a good model file or table replaced at random."""
    for count in range(number):
        model, table = list(GOOD_MODEL), list(GOOD_TABLE)
        for text, times in ((model, chance.randint(0, 3)), (table, chance.randint(0, 3))):
            for _ in range(times):
                text[chance.randrange(len(text))] = chance.choice("{}[]:,-#&*!|>'\"%@`0 \n\tx.e")
        yield BadInput(f"mixed {count}", model="".join(model), table="".join(table))
