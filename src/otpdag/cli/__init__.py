"""The command line: ``otpdag fit`` and the commands that use a fitted model."""

from __future__ import annotations

import gc
import os
from typing import Annotated

import typer

from otpdag.cli import commands as c
from otpdag.cli.console import FriendlyGroup
from otpdag.cli.fit_command import fit

__all__ = ["app", "main"]

app = typer.Typer(
    name="otpdag",
    cls=FriendlyGroup,
    help="Estimate the parameters of a directed graphical model from incomplete data, by optimal transport.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_with_models = (c.init, fit, c.summary, c.show, c.sample, c.posterior, c.impute, c.score, c.check)
_with_answers = (c.predict, c.forecast, c.effect, c.compare, c.select, c.report)
for command in (*_with_models, *_with_answers):
    app.command(command.__name__)(command)
_as_given = {"allow_extra_args": True, "ignore_unknown_options": True}  # to the checkout's own command
app.command("reproduce", context_settings=_as_given, add_help_option=False)(c.reproduce)


def _version(wanted: bool) -> None:
    if wanted:
        from otpdag import __version__

        typer.echo(f"otpdag {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Estimate the parameters of a directed graphical model from incomplete data, by optimal transport."""


def main() -> None:
    """Entry of the command ``otpdag``.

    Imports make millions of objects: to look for garbage among them, and to take them apart one by one at the end,
    would be a third of a short run.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait would keep other programs from working
    gc.disable()
    try:
        app()
    finally:
        gc.freeze()
