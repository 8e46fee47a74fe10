"""``otpdag reproduce``: run a registered table or figure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from otpdag.cli.console import LONGEST_SEED, check_folder, note_written, out, say, warn
from otpdag.cli.registry import EVERY, Experiment, Run, Scale, discover, find_folder, named_folder, registered
from otpdag.cli.results import check_same_run, results_page, write_picture, write_run
from otpdag.errors import ModelError, printable
from otpdag.files import make_folder


def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="Which table or figure, or all with --from; without it, list them.")
    ] = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="Where results go; runs/NAME if left out.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=LONGEST_SEED, help="Determines the run.")] = 0,
    scale: Annotated[
        Scale | None,
        typer.Option("--scale", help="The paper's size (the default), one of hours, or one of minutes."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short for --scale quick.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    only: Annotated[
        str,
        typer.Option(
            "--only", metavar="PATTERN", help="Make no parts but those so named, and report what there is: 'K10-*'."
        ),
    ] = EVERY,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FOLDER", help="Of all: draw the page of these results without running."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=-1, help="Parts made at a time; -1 is one a core.")] = 1,
    scheduler: Annotated[
        str | None,
        typer.Option("--scheduler", metavar="ADDRESS", help="Make parts on the workers of a Dask scheduler."),
    ] = None,
    named: Annotated[
        Path | None,
        typer.Option("--folder", metavar="FOLDER", help="Checkout whose experiments are run; that of this package."),
    ] = None,
) -> None:
    """Reproduce a table or figure; without a name, list what there is."""
    folder = find_folder() if named is None else named_folder(named)
    failed = {} if folder is None else discover(folder)
    known = registered()
    if name is None:
        _list(folder, failed)
        return
    if (name == "all") != (source is not None):
        raise ModelError("all and --from go together: otpdag reproduce all --from results draws kept results")
    if source is not None:
        _draw(source, (out_folder or source.resolve().parent / "docs") / "results.md", known)
        return
    if name not in known:
        where = "no experiments were found" if not known else f"there are {', '.join(known)}"
        broken = f"; {name} cannot be imported: {failed[name]}" if name in failed else ""
        raise ModelError(f"there is no experiment {name!r}: {where}{broken}")
    if quick and scale not in (None, Scale.QUICK):
        raise ModelError(f"give --quick or --scale {scale}, not both")
    if only != EVERY and not known[name].resumable:
        raise ModelError(f"{name} is made in one piece; run it without --only")
    if resume and not known[name].resumable:
        raise ModelError(f"{name} keeps no parts to resume from; run it again without --resume")
    if jobs == 0:
        raise ModelError("--jobs must be a number of parts made at a time, or -1; got 0")
    target = out_folder or Path("runs") / name
    check_folder(target, force=force or resume)
    size = Scale.QUICK if quick else scale or Scale.PAPER
    with make_folder(target), _workers(scheduler):  # a folder goes again if nothing came of it
        folder, many = (target, jobs) if scheduler is None else (target.resolve(), -1)
        _run(known[name], Run(folder, seed, size, resume, only, many))
    say(f"results are in {target}")


@contextmanager
def _workers(scheduler: str | None) -> Iterator[None]:
    """Let joblib send work to the workers of a scheduler, if there is one."""
    if scheduler is None:
        yield
        return
    try:
        from distributed import Client
    except ImportError:
        raise ModelError("--scheduler needs the package distributed: pip install 'otpdag[dask]'") from None
    from joblib import parallel_config

    try:
        client = Client(scheduler, timeout="10s")
    except (OSError, ValueError, TimeoutError) as error:
        raise ModelError(f"--scheduler {scheduler!r} does not answer: {error}") from None
    with client, parallel_config(backend="dask"):
        yield


def _run(chosen: Experiment, run: Run) -> None:
    if run.resume:
        check_same_run(chosen.name, run)
    write_run(chosen.name, run, finished=False)
    try:
        chosen.run(run)
        write_run(chosen.name, run, finished=run.only == EVERY)
    finally:
        if any(run.folder.iterdir()):
            note_written(run.folder)


def _draw(source: Path, target: Path, known: dict[str, Experiment]) -> None:
    pictures = target.with_suffix("")
    page = results_page(source, known, pictures=pictures.name)
    if page.pictures:
        pictures.mkdir(parents=True, exist_ok=True)
    for name, picture in page.pictures.items():
        write_picture(picture, pictures / f"{name}.svg")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page.text)
    say(f"{target} shows the results in {source}")


def _list(folder: Path | None, failed: dict[str, str]) -> None:
    for module, reason in failed.items():
        warn(f"experiments/{module} cannot be imported: {reason}")
    known = registered()
    console = out()
    if not known and folder is None:
        console.print("No experiments found: they are part of the repository; name a checkout with --folder.")
    elif not known:
        console.print(f"No experiments found in {folder}.")
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("name", no_wrap=True)
        table.add_column("what")
        for entry in known.values():
            table.add_row(Text(printable(entry.name)), Text(printable(entry.title)))
        console.print(table)
