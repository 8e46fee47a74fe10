"""``otpdag init`` and ``otpdag schema``: their arguments. The work is imported when it is wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def init(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="A .csv, .tsv or .parquet table, or - for CSV from standard input.")
    ],
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Model file; by default DATA with the ending .yaml; - for standard output.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but warnings and errors.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a model file for a table: what each column is taken for and why, and edges to fill in.

    Columns that can be no node, or that a model is better off without, stand in it as comments.
    """
    from otpdag.cli.starting import write_first_model

    write_first_model(data, out_file, quiet=quiet, force=force)


def schema(
    out_file: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="JSON file; standard output if left out.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Print the JSON Schema of model files, for editors and validators."""
    from otpdag.cli.console import check_file, write_file, write_out
    from otpdag.cli.model_schema import schema_text

    check_file(out_file, force=force)
    if out_file is None:
        write_out(schema_text())
    else:
        write_file(out_file, schema_text())
