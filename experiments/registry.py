"""Experiments by name, and ``otpdag reproduce``, which runs one, or draws a page of results that are there.

A file in the repository's folder ``experiments`` registers a table or figure::

    from experiments.registry import Run, experiment


    @experiment("figure1", "Recovery of a mixture under a wrong model")
    def figure1(run: Run) -> None:
        rows = 200 if run.quick else 2000
        run.write("figure1.csv", table)
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from otpdag.cli.console import FolderForce, RunSeed, check_folder, note_written, out, plain_table, say, warn
from otpdag.errors import DataError, ModelError, printable
from otpdag.files import make_folder, only_writer, replacing, write_bytes

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

EVERY = "*"
ABOUT = "run.json"
KINDS = {"experiment": str, "scale": str, "command": str, "versions": dict, "parts": list, "begun": int}
HEAD = (
    "# Results\n\n"
    "Drawn by `otpdag reproduce all --from results` from the data in `results/`, without running anything. Figures\n"
    "that the paper prints are quoted as such; all others were measured by the commands that are named."
)
SIZES = {
    "paper": "full size, the paper's where it has one",
    "hours": "the largest size that two cores end within hours, not the paper's",
    "quick": "a small size, not the paper's",
}


class Scale(StrEnum):
    """How large an experiment is: minutes on two cores, a few hours on them, or what the paper has.

    An experiment that ends at the paper's size within hours has that for both.
    """

    QUICK = "quick"
    HOURS = "hours"
    PAPER = "paper"


@dataclass(frozen=True)
class Run:
    """What an experiment is told: where results go, the seed, its size, and whether to go on with an earlier run.

    ``resume`` allows to use what an interrupted run left in the folder since it had ``begun``, in whole seconds of the
    epoch, for what is older is another run's that it wrote over; ``only`` is a pattern of the names of
    those parts that are made now if they are not there; ``jobs`` is how many are made at a time (-1: one for each core,
    or whatever the workers are that joblib has been told of).
    """

    folder: Path
    seed: int = 0
    scale: Scale = Scale.PAPER
    resume: bool = False
    only: str = EVERY
    jobs: int = 1
    begun: int = 0

    def has(self, path: Path) -> bool:
        """Whether a file is there that this run made before it was interrupted."""
        return self.resume and path.is_file() and path.stat().st_mtime >= self.begun

    @property
    def quick(self) -> bool:
        """Whether the small version is asked for."""
        return self.scale is Scale.QUICK

    def part(self, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        """A finished part of the run, from ``parts/NAME.csv`` if the run goes on and has it; made and kept otherwise.

        A part that ``only`` leaves out is empty, so that the others can be put together without it.
        """
        from pandas import DataFrame  # not needed by those who only ask for help

        path = self.folder / "parts" / f"{name}.csv"
        if not self.has(path):
            if not fnmatchcase(name, self.only):
                return DataFrame()
            path.parent.mkdir(exist_ok=True)
            self.write(f"parts/{name}.csv", make())
        return _read_rows(path)

    def write(self, name: str, content: pd.DataFrame | Figure | str, **how: Any) -> None:
        """Write a file of the run in one step: a table as CSV, a picture, or text.

        Args:
            name: Its name in the folder, whose ending says what a picture is written as.
            content: What it holds.
            how: Further arguments of ``to_csv`` or ``savefig``.
        """
        path = self.folder / name
        if isinstance(content, str):
            write_bytes(path, content.encode("utf-8"))
            return
        with replacing(path) as file:
            if hasattr(content, "savefig"):
                content.savefig(file, format=path.suffix[1:], **how)
            else:
                content.to_csv(file, index=False, **how)

    def parts(self, named: Iterable[tuple[str, Callable[[], pd.DataFrame]]]) -> list[pd.DataFrame]:
        """Several parts, by their names, as many at a time as there are jobs.

        Joblib runs them: in this process, in others of this machine, or where ``joblib.parallel_config`` says. Workers
        on other machines must see the same folder.
        """
        from joblib import Parallel, delayed

        made: list[pd.DataFrame] = Parallel(n_jobs=self.jobs)(delayed(self.part)(name, make) for name, make in named)
        return made

    def together(self, parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
        """The rows of all parts that there are."""
        from pandas import concat

        there = [part for part in parts if len(part)]
        if not there:
            raise ModelError(f"--only {self.only!r} names no part, and {self.folder} has none yet")
        return concat(there, ignore_index=True)

    def joined(self, rows: pd.DataFrame, table: str, keys: Sequence[str]) -> pd.DataFrame:
        """These rows and, where a run goes on, those of its earlier table that have other keys, in that table's order.

        So a run whose parts were not kept can be gone on with, some rows at a time.
        """
        from pandas import MultiIndex, concat

        if not self.has(self.folder / table):
            return rows
        earlier = _read_rows(self.folder / table)
        if not {*keys} <= {*earlier}:
            raise DataError(f"{self.folder / table} must have the columns {', '.join(keys)}; it has {list(earlier)}")
        here, there = (MultiIndex.from_frame(frame[list(keys)]) for frame in (rows, earlier))
        place = {key: number for number, key in enumerate(there)}
        kept = [*there[~there.isin(here)], *here]
        order = sorted(range(len(kept)), key=lambda row: place.get(kept[row], len(place)))
        return concat([earlier[~there.isin(here)], rows]).iloc[order].reset_index(drop=True)


@dataclass(frozen=True)
class Page:
    """What an earlier run's data say: Markdown, and pictures by what they show."""

    text: str
    pictures: Mapping[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One table or figure; a resumable one keeps finished parts in its folder, and ``page`` tells what is in one."""

    name: str
    title: str
    run: Callable[[Run], None]
    resumable: bool = False
    page: Callable[[Path], Page] | None = None


_REGISTRY: dict[str, Experiment] = {}
app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})


def experiment(
    name: str, title: str, *, resumable: bool = False, page: Callable[[Path], Page] | None = None
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Register a function as the experiment ``name``; use it as a decorator.

    ``page`` draws what is in an earlier run's folder, for ``otpdag reproduce all --from FOLDER``.
    """

    def register(run: Callable[[Run], None]) -> Callable[[Run], None]:
        known = _REGISTRY.get(name)
        if known is not None and known.run.__module__ != run.__module__:
            raise ModelError(f"an experiment named {name!r} is registered already, by {known.run.__module__}")
        _REGISTRY[name] = Experiment(name, title, run, resumable, page)
        return run

    return register


def registered() -> dict[str, Experiment]:
    """All experiments by name."""
    return dict(sorted(_REGISTRY.items()))


def discover(folder: Path) -> dict[str, str]:
    """Import every module of the folder; for those that cannot be imported, why."""
    failed = {}
    names = sorted(module.name for module in pkgutil.iter_modules([str(folder)]))
    for name in [name for name in names if not name.startswith("_")]:
        try:
            importlib.import_module(f"{folder.name}.{name}")
        except ImportError as error:
            failed[name] = str(error)
    return failed


# --- the command ----------------------------------------------------------------------------------------------


@app.command()
def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="Which table or figure, or all with --from; without it, list them.")
    ] = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="Where results go; runs/NAME if left out.")
    ] = None,
    seed: RunSeed = 0,
    scale: Annotated[
        Scale | None, typer.Option(help="The paper's size (the default), one of hours, or one of minutes.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short for --scale quick.")] = False,
    force: FolderForce = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    only: Annotated[
        str,
        typer.Option(metavar="PATTERN", help="Make no parts but those so named, and report what there is: 'K10-*'."),
    ] = EVERY,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FOLDER", help="Of all: draw the page of these results without running."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=-1, help="Parts made at a time; -1 is one a core.")] = 1,
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Make parts on the workers of a Dask scheduler.")
    ] = None,
) -> None:
    """Reproduce a table or figure; without a name, list what there is."""
    failed = discover(Path(__file__).parent)
    known = registered()
    if name is None:
        _list(known, failed)
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
    size = Scale.QUICK if quick else scale or Scale.PAPER
    with make_folder(target.absolute().parent), only_writer(target):
        check_folder(target, force=force or resume)
        with make_folder(target), _workers(scheduler):  # a folder goes again if nothing came of it
            folder, many = (target, jobs) if scheduler is None else (target.resolve(), -1)
            _run(known[name], Run(folder, seed, size, resume, only, many, int(time.time())))
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
        run = _gone_on_with(chosen.name, run)
    # parts of a finished run that are made anew leave it finished
    was_finished = run.resume and (run.folder / ABOUT).is_file() and bool(_read(run.folder).get("finished"))
    _write_run(chosen.name, run, finished=False)
    try:
        chosen.run(run)
        _write_run(chosen.name, run, finished=run.only == EVERY or was_finished)
    finally:
        if any(run.folder.iterdir()):
            note_written(run.folder)


def _draw(source: Path, target: Path, known: dict[str, Experiment]) -> None:
    pictures = target.with_suffix("")
    page = _results_page(source, known, pictures=pictures.name)
    if page.pictures:
        pictures.mkdir(parents=True, exist_ok=True)
    for name, picture in page.pictures.items():
        _write_picture(picture, pictures / f"{name}.svg")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(target, page.text.encode("utf-8"))
    say(f"{target} shows the results in {source}")


def _list(known: dict[str, Experiment], failed: dict[str, str]) -> None:
    for module, reason in failed.items():
        warn(f"experiments/{module} cannot be imported: {reason}")
    table = plain_table("name", "what")
    for entry in known.values():
        table.add_row(Text(printable(entry.name)), Text(printable(entry.title)))
    out().print(table)


# --- what runs leave behind -------------------------------------------------------------------------------


def _about(name: str, run: Run) -> dict[str, Any]:
    """What determines a run, the command that repeats it, and the versions that it ran with."""
    packages = ("otpdag", "torch", "numpy", "scipy", "scikit-learn", "pandas", "hmmlearn", "tomotopy")
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "experiment": name,
        "seed": run.seed,
        "scale": str(run.scale),
        "command": f"otpdag reproduce {name} --scale {run.scale} --seed {run.seed}",
        "versions": {"python": platform.python_version()} | versions,
    }


def _write_run(name: str, run: Run, *, finished: bool) -> None:
    """Keep what a run is beside its results, and which parts were made by themselves."""
    earlier = _read(run.folder) if run.resume and (run.folder / ABOUT).is_file() else {}
    alone = [] if run.only == EVERY else [run.only]
    parts = sorted({*earlier.get("parts", []), *alone})
    about = _about(name, run) | {"begun": run.begun, "finished": finished} | ({"parts": parts} if parts else {})
    run.write(ABOUT, json.dumps(about, indent=2) + "\n")


def _gone_on_with(name: str, run: Run) -> Run:
    """The run that is in the folder; one of another experiment, seed or size is refused, as are parts of no run."""
    if not (run.folder / ABOUT).is_file():
        if (run.folder / "parts").is_dir():
            raise DataError(f"{run.folder} has parts, but no {ABOUT} that says of what: --force begins anew")
        return run
    earlier, now = _read(run.folder), _about(name, run)
    for key, option in (("experiment", "NAME"), ("seed", "--seed"), ("scale", "--scale")):
        if earlier.get(key) != now[key]:
            was = earlier.get(key)
            raise ModelError(f"{option} must be that of the run in {run.folder}, {was!r}, to go on; got {now[key]!r}")
    if earlier.get("versions", now["versions"]) != now["versions"]:
        warn(f"what is in {run.folder} was made with other versions, of otpdag or of what it uses: {ABOUT} has them")
    return replace(run, begun=earlier.get("begun", 0))


def _read(folder: Path) -> dict[str, Any]:
    try:
        read = json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{folder / ABOUT} must say what was run; it cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise DataError(f"{folder / ABOUT} must hold an object; got {type(read).__name__}")
    for key, kind in KINDS.items():
        value = read.get(key, kind())
        if not isinstance(value, kind) or (kind is list and not all(isinstance(one, str) for one in value)):
            raise DataError(f"{folder / ABOUT} must have another {key!r}, a {kind.__name__}; got {value!r:.60}")
    return read


def _read_rows(path: Path) -> pd.DataFrame:
    from pandas import read_csv

    try:
        return read_csv(path)
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}; without it, --resume makes it anew") from None


def _results_page(folder: Path, known: Mapping[str, Experiment], *, pictures: str) -> Page:
    """One page of all results in the folders of ``folder``, in the order of their names.

    Its pictures, by the names of their files, are shown from the folder ``pictures`` beside the page.
    """
    runs = sorted(path.parent for path in folder.glob(f"*/{ABOUT}"))
    if not runs:
        raise DataError(f"--from must name a folder of runs, each with {ABOUT}; {str(folder)!r} has none")
    about_runs = {path: _read(path) for path in runs}
    parts, drawn = [HEAD, _overview(list(about_runs.values()), known)], {}
    for path, read in about_runs.items():
        chosen = known.get(str(read.get("experiment")))
        if chosen is None or chosen.page is None:
            raise ModelError(f"{path} was made by {read.get('experiment')!r}, which draws no page of its results")
        made = _page_of(chosen, chosen.page, path)
        parts.append(_lowered(made.text.strip()))
        for number, (shows, picture) in enumerate(made.pictures.items(), start=1):
            drawn[f"{path.name}-{number}"] = picture
            parts.append(f"![{shows}]({pictures}/{path.name}-{number}.svg)")
        parts.append(_how(read))
    return Page("\n\n".join(parts) + "\n", drawn)


def _page_of(chosen: Experiment, page: Callable[[Path], Page], folder: Path) -> Page:
    """What a run's tables say; one that was stopped before it wrote them has parts only."""
    try:
        return page(folder)
    except FileNotFoundError as error:
        if _read(folder).get("finished"):
            raise DataError(f"{folder} is said to be finished, but {error.filename} is not there") from error
        text = "Stopped before its tables were written; `--resume --only ''` writes those of the parts that there are."
        return Page(f"# {chosen.title}\n\n{text}")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"the tables in {folder} are not those of {chosen.name}: {error}") from error


def _overview(runs: Sequence[Mapping[str, Any]], known: Mapping[str, Experiment]) -> str:
    """What is there at which sizes, and what is missing."""
    lines = ["| | what | size | run |", "|---|---|---|---|"]
    for name, entry in known.items():
        if entry.page is None:
            continue
        there = [read for read in runs if read.get("experiment") == name]
        if not there:
            lines.append(f"| {name} | {entry.title} | | not yet |")
        for read in there:
            size, state = _size(read), "all of it" if read.get("finished") else "in part"
            lines.append(f"| {name} | {entry.title} | {size} | {state} |")
    return "\n".join(lines)


def _size(read: Mapping[str, Any]) -> str:
    """How large a run was, in words."""
    return SIZES.get(read.get("scale", ""), "some size")


def _how(read: Mapping[str, Any]) -> str:
    """How large a run was, and how to repeat it."""
    versions = ", ".join(f"{package} {number}" for package, number in read.get("versions", {}).items())
    state = "" if read.get("finished") else " Not all of it has been run; `--resume` goes on with it."
    return f"*Run at {_size(read)}, by `{read.get('command')}` with {versions}.{state}*"


def _write_picture(picture: Figure, path: Path) -> None:
    """Write a picture as SVG, the same bytes whenever it shows the same."""
    import matplotlib as mpl  # not needed by those who only ask for help

    with mpl.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "path"}), replacing(path) as file:
        picture.savefig(file, format="svg", metadata={"Date": None})


def _lowered(text: str) -> str:
    """Headings one level down."""
    return "\n".join("#" + line if line.startswith("#") else line for line in text.splitlines())
