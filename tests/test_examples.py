"""Every example runs, and so does every Python block of the readme and the documentation."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import matplotlib.image
import pandas as pd
import pytest

import otpdag as otp

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)?(#[^)\s]+)?\)")


@pytest.fixture
def working_folder(tmp_path, monkeypatch) -> Path:
    """An empty folder that sees the examples, as the repository does."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield tmp_path
    for name in ("make_grid", "demo"):
        sys.modules.pop(name, None)


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


# --- examples ---------------------------------------------------------------------------------------------


def test_demo(working_folder, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    run("demo.py", monkeypatch, "--rows", "250", "--restarts", "1")
    shown = capsys.readouterr().out
    assert "converged" in shown
    assert "Hidden load: correlation 0.9" in shown
    assert max(map(len, shown.splitlines())) <= 80
    for name in ("grid.png", "graph.png", "learning.png"):
        assert matplotlib.image.imread(working_folder / "demo" / name).std() > 0.05  # something is drawn
    assert otp.load(working_folder / "demo" / "grid.otp").is_fitted


def test_the_shipped_table_is_the_one_that_its_script_makes(working_folder):
    from make_grid import complete_table, with_gaps

    shipped = pd.read_csv(ROOT / "examples" / "data" / "grid.csv")
    made = with_gaps(complete_table())
    assert len(shipped) == 1500
    assert 0.13 < shipped.isna().to_numpy().mean() < 0.17
    pd.testing.assert_frame_equal(shipped, made, check_dtype=False)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("hidden_classes.py", ("--rows", "300"), "With three classes"),
        ("interventions.py", ("--rows", "1500"), "if all were treated"),
        ("own_mechanism.py", ("--rows", "200"), "Laplace keeps every promise"),
    ],
)
def test_example(working_folder, monkeypatch, capsys, name, arguments, expected):
    run(name, monkeypatch, *arguments)
    assert expected in capsys.readouterr().out


def test_every_example_is_tested_unless_it_needs_real_data():
    tested = {"demo.py", "make_grid.py", "hidden_classes.py", "interventions.py", "own_mechanism.py"}
    for name in set(EXAMPLES) - tested:
        assert "OTPDAG_DATA" in (ROOT / "examples" / name).read_text(), name


# --- pages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search((ROOT / page).read_text())])
def test_the_python_of_a_page_runs(working_folder, monkeypatch, page):
    # seconds, not minutes: fewer rows, fewer resamples
    whole, intervals = pd.read_csv, otp.FitResult.intervals
    monkeypatch.setattr(pd, "read_csv", lambda path: whole(path).head(150))
    monkeypatch.setattr(otp.FitResult, "intervals", lambda result, **options: intervals(result, draws=10))
    space: dict[str, object] = {"__name__": "page"}
    for block in BLOCK.findall((ROOT / page).read_text()):
        exec(compile(block, page, "exec", dont_inherit=True), space)


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_somewhere(page):
    here = ROOT / page
    for target, anchor in LINK.findall(here.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        goal = (here.parent / target).resolve() if target else here
        assert goal.exists(), f"{page}: {target} does not exist"
        if anchor and goal.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", goal.read_text(), re.MULTILINE)
            slugs = {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page}: {target}{anchor} does not exist"


def test_design_pages_are_few_and_all_pages_short():
    pages = [path for path in (ROOT / "docs").rglob("*.md") if not {"archive", "reference"} & set(path.parts)]
    words = sum(len(path.read_text().split()) for path in pages if "results" not in path.name)
    assert len([path for path in pages if path.parent.name == "design"]) <= 12
    assert words <= 35_000


def test_the_commands_of_the_readme_exist():
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "cli.md").read_text()
    from otpdag.cli import app

    known = {command.name for command in app.registered_commands}
    assert set(re.findall(r"^otpdag (\w+)", text, re.MULTILINE)) <= known
    assert set(re.findall(r"^\| `otpdag (\w+) ", text, re.MULTILINE)) == known
