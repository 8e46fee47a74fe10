"""What runs of experiments leave behind: who ran what, and one page of all results, drawn without running anything."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otpdag.cli.registry import Experiment, Page, Run
from otpdag.errors import DataError, ModelError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ABOUT = "run.json"
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
PACKAGES = ("otpdag", "torch", "numpy", "scipy", "scikit-learn", "pandas", "hmmlearn", "tomotopy")


def about(name: str, run: Run) -> dict[str, Any]:
    """What determines a run, the command that repeats it, and the versions that it ran with."""
    versions = {"python": platform.python_version()} | {package: _version(package) for package in PACKAGES}
    return {
        "experiment": name,
        "seed": run.seed,
        "scale": str(run.scale),
        "command": f"otpdag reproduce {name} --scale {run.scale} --seed {run.seed}",
        "versions": {package: known for package, known in versions.items() if known},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def write_run(name: str, run: Run, *, finished: bool) -> None:
    """Keep what a run is beside its results."""
    text = json.dumps(about(name, run) | {"finished": finished}, indent=2)
    (run.folder / ABOUT).write_text(text + "\n")


def check_same_run(name: str, run: Run) -> None:
    """Refuse to go on with a run of another experiment, seed or size."""
    if not (run.folder / ABOUT).is_file():
        return
    earlier, now = _read(run.folder), about(name, run)
    for key, option in (("experiment", "NAME"), ("seed", "--seed"), ("scale", "--scale")):
        if earlier.get(key) != now[key]:
            was = earlier.get(key)
            raise ModelError(f"{option} must be that of the run in {run.folder}, {was!r}, to go on; got {now[key]!r}")


def _read(folder: Path) -> dict[str, Any]:
    try:
        read = json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / ABOUT} must say what was run; it cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise DataError(f"{folder / ABOUT} must hold an object; got {type(read).__name__}")
    return read


def results_page(folder: Path, known: Mapping[str, Experiment], *, pictures: str) -> Page:
    """One page of all results in the folders of ``folder``, in the order of their names.

    Its pictures, by the names of their files, are shown from the folder ``pictures`` beside the page.
    """
    runs = sorted(path.parent for path in folder.glob(f"*/{ABOUT}"))
    if not runs:
        raise DataError(f"--from must name a folder of runs, each with {ABOUT}; {str(folder)!r} has none")
    about_runs = {path: _read(path) for path in runs}
    parts, drawn = [HEAD, _overview(about_runs.values(), known)], {}
    for path, read in about_runs.items():
        chosen = known.get(str(read.get("experiment")))
        if chosen is None or chosen.page is None:
            raise ModelError(f"{path} was made by {read.get('experiment')!r}, which draws no page of its results")
        made = _page_of(chosen, chosen.page, path)
        parts.append(_lowered(made.text.strip()))
        for number, (shows, picture) in enumerate(made.pictures.items(), start=1):
            drawn[f"{chosen.name}-{number}"] = picture
            parts.append(f"![{shows}]({pictures}/{chosen.name}-{number}.svg)")
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


def _overview(runs: Iterable[Mapping[str, Any]], known: Mapping[str, Experiment]) -> str:
    """What is there at which size, and what is missing."""
    there = {str(read.get("experiment")): read for read in runs}
    lines = ["| | what | size | run |", "|---|---|---|---|"]
    for name, entry in known.items():
        if entry.page is not None:
            read = there.get(name)
            size = "" if read is None else SIZES.get(read.get("scale", ""), "some size")
            state = "not yet" if read is None else "all of it" if read.get("finished") else "in part"
            lines.append(f"| {name} | {entry.title} | {size} | {state} |")
    return "\n".join(lines)


def _how(read: Mapping[str, Any]) -> str:
    """How large a run was, and how to repeat it."""
    versions = ", ".join(f"{package} {number}" for package, number in read.get("versions", {}).items())
    state = "" if read.get("finished") else " Not all of it has been run; `--resume` goes on with it."
    size = SIZES.get(read.get("scale", ""), "some size")
    return f"*Run at {size}, by `{read.get('command')}` with {versions}.{state}*"


def write_picture(picture: Figure, path: Path) -> None:
    """Write a picture as SVG, the same bytes whenever it shows the same."""
    import matplotlib as mpl  # not needed by those who only ask for help

    with mpl.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "path"}):
        picture.savefig(path, metadata={"Date": None})


def _lowered(text: str) -> str:
    """Headings one level down."""
    return "\n".join("#" + line if line.startswith("#") else line for line in text.splitlines())
