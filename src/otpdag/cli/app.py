"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from otpdag.cli import answer_commands, fit_command, init_command, reproducing, use_commands
from otpdag.cli.console import FriendlyGroup

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
app.command("init")(init_command.init)
app.command("fit")(fit_command.fit)
app.command("summary")(answer_commands.summary)
app.command("show")(use_commands.show)
app.command("sample")(use_commands.sample)
app.command("posterior")(use_commands.posterior)
app.command("impute")(use_commands.impute)
app.command("score")(use_commands.score)
app.command("check")(use_commands.check)
app.command("predict")(answer_commands.predict)
app.command("forecast")(answer_commands.forecast)
app.command("effect")(answer_commands.effect)
app.command("compare")(answer_commands.compare)
app.command("select")(answer_commands.select)
app.command("report")(use_commands.report)
app.command("schema")(init_command.schema)
app.command("reproduce")(reproducing.reproduce)


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
    """Entry of the command ``otpdag``."""
    app()
