"""Tests of reports: one file that asks for nothing, holds what a fit left, and works in a browser at two widths."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.cli.fit_command import write_run
from otpdag.errors import DataError, ModelError
from otpdag.report import Run, read_run, report_page
from tests.browser import CHROMIUM, Page

HOSTILE = "<script>alert(1)</script><b>&\"'$x_1$"
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Reader(HTMLParser):
    """Checks that every tag is closed, and collects addresses and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> without a start"
        assert self.open.pop() == tag, f"</{tag}> ends another tag"

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 2, 300)
    frame = pd.DataFrame(
        {
            "size": np.where(kind == 0, 1.0, 4.0) + rng.normal(size=300) * 0.5,
            "colour": np.where(rng.random(300) < 0.2 + 0.6 * kind, "red", "blue"),
            "eggs": rng.poisson(2.0 + 6.0 * kind),
        }
    )
    frame.loc[::6, "size"] = np.nan
    frame.loc[3::10, "colour"] = None
    return frame


@pytest.fixture(scope="module")
def run(table) -> Run:
    graph = otp.Graph([("kind", "size"), ("kind", "colour"), ("kind", "eggs")], hidden=["kind"])
    model = otp.Model.from_frame(graph, table, mechanisms={"kind": m.Categorical(2)})
    result = otp.fit(model, table, seed=0, restarts=2)
    history = pd.DataFrame(list(result.history))
    summary = {"rows": 300, "method": "likelihood", "converged": True, "reason": "the loss stopped changing", "seed": 0}
    return Run(model, summary, history, pd.DataFrame({"number": [0, 1], "loss": [result.loss, result.loss + 1]}))


@pytest.fixture(scope="module")
def page(run, table) -> str:
    return report_page(run, table, command="otpdag fit model.yaml data.csv --out run")


def test_page_is_whole_and_asks_for_nothing(page):
    reader = read(page)
    assert page.startswith("<!DOCTYPE html>")
    assert reader.addresses  # links to its own sections
    assert [address for address in reader.addresses if not address.startswith("#")] == []
    assert "link" not in reader.tags
    style = re.search(r"<style>(.*?)</style>", page, re.S)
    assert style is not None
    assert "url(" not in style[1]
    assert "@import" not in style[1]


def test_page_tells_what_the_fit_left(page, run):
    words = " ".join(read(page).words)
    for expected in ("Graph", "Estimates", "Data and model", "Checks", "Hidden nodes", "Missing cells", "Search"):
        assert expected in words
    assert "otpdag fit model.yaml data.csv --out run" in words
    middle = float(run.model.params()["size"]["loc"].ravel()[0])
    assert f"{middle:.5g}" in words
    assert "80 of 900 cells are empty" in words  # 50 sizes and 30 colours
    assert "16.7%" in words  # of the sizes
    assert len(page) < 1_000_000


def test_four_answers_come_first_in_words(page, run):
    words = " ".join(read(page).words)
    order = [words.index(one) for one in ("What was estimated", "How sure", "Does it fit", "What next")]
    assert order == sorted(order)
    assert order[-1] < words.index("Point at a node")
    assert f"{len(run.model.graph.nodes)} nodes from" in words
    assert "R\u00b2" in words


def test_a_misfit_is_told_with_what_may_mend_it():
    rng = np.random.default_rng(7)
    x = rng.normal(size=800)
    frame = pd.DataFrame({"x": x, "y": 0.5 * x + 0.5 * x**2 + rng.normal(size=800)})
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    otp.fit(model, frame)
    words = " ".join(read(report_page(Run(model), frame)).words)
    assert "Not everywhere: see y below" in words
    assert "y: its mean is curved in 'x' otherwise than it says. Try a bend in its terms" in words
    assert f"{float(model.params()['y']['weight'].ravel()[0]):.3g}" in words  # at its edge


def test_without_the_table_there_are_no_pictures_of_data(run):
    words = " ".join(read(report_page(run)).words)
    assert "Data and model" not in words
    assert "Missing cells" not in words
    assert "Estimates" in words


def test_ends_of_intervals_stand_beside_the_estimates(run, table):
    rows = [("size", "loc", 0, 1.2345, 2.3456), ("size", "loc", 1, 7.4321, 8.8765)]
    bounds = pd.DataFrame(rows, columns=["node", "parameter", "index", "lower", "upper"])
    with_ends = report_page(Run(run.model, run.summary, run.history, run.restarts, bounds))
    assert all(end in with_ends for end in ("1.2345", "2.3456", "7.4321", "8.8765"))
    assert '<th class="number">90% from</th><th class="number">to</th>' in with_ends
    assert "90% intervals come from fits to resampled rows" in with_ends


def test_a_sorted_table_is_not_judged_by_its_first_rows():
    x = np.sort(np.random.default_rng(5).normal(size=12_000))
    frame = pd.DataFrame({"x": x, "y": 2 * x + np.random.default_rng(6).normal(size=12_000)})
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    otp.fit(model, frame)
    words = " ".join(read(report_page(Run(model), frame)).words)
    assert "None of the model's 2 testable claims is contradicted beyond chance" in words
    first = model.check(frame.head(5_000))
    assert first["adjusted"].min() < 1e-10  # which the first rows would have accused


def test_what_is_not_known_is_said(tmp_path):
    frame = pd.DataFrame({"x": np.random.default_rng(5).normal(size=60)})
    with pytest.warns(otp.ConvergenceWarning):
        result = otp.fit(otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()}), frame, method=otp.paper(steps=30))
    write_run(result, tmp_path / "run")
    words = " ".join(read(report_page(read_run(tmp_path / "run"), frame)).words)
    assert "no standard errors: standard errors need a deterministic method" in words
    assert "There are no standard errors and no intervals" in words
    assert "log-likelihood" in words  # which needs no errors
    assert "95%" not in words


def test_standard_errors_come_with_their_level(tmp_path):
    frame = pd.DataFrame({"x": np.random.default_rng(5).normal(size=60)})
    result = otp.fit(otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()}), frame)
    write_run(result, tmp_path / "run")
    page = report_page(read_run(tmp_path / "run"), frame)
    assert '<th class="number">95% from</th><th class="number">to</th>' in page
    assert "all 60 rows" in page


def test_names_are_text_whatever_they_say(tmp_path):
    frame = pd.DataFrame({HOSTILE: ["<i>a", "b"] * 20, "y": np.arange(40.0) % 7})
    model = otp.Model.from_frame(otp.Graph([(HOSTILE, "y")]), frame)
    otp.fit(model, frame, restarts=1)
    summary = {"data": HOSTILE, "converged": False, "reason": HOSTILE, "advice": HOSTILE, "notes": [HOSTILE]}
    page = report_page(Run(model, summary), frame, command=HOSTILE)
    reader = read(page)
    assert "alert(1)</script>" not in page
    assert "i" not in reader.tags
    assert html.unescape(html.escape(HOSTILE)) in " ".join(reader.words)


def test_a_fit_that_did_not_end_says_so(run):
    page = report_page(Run(run.model, {"converged": False, "reason": "no steps left", "advice": "raise steps"}))
    assert "did not converge" in page
    assert "raise steps" in page


@pytest.fixture(scope="module")
def series_page() -> str:
    rng = np.random.default_rng(1)
    level = np.repeat([2.0, 9.0, 2.0], 20)
    frame = pd.DataFrame({"year": np.arange(1900, 1960)[::-1], "count": rng.poisson(level)})
    graph = otp.Graph([otp.lag("state", "state"), ("state", "count")], hidden=["state"])
    model = otp.Model(graph, {"state": m.Categorical(2), "count": m.Poisson()})
    otp.fit(model, otp.Sequences(frame, time="year"), seed=0, restarts=2)
    return report_page(Run(model, {"time": "year"}), frame)


def test_sequences_are_shown_along_their_time(series_page):
    words = " ".join(read(series_page).words)
    assert "The first sequence over the central 90 %" in words
    assert "at each of its steps" in words
    assert "year" in words


def test_folder_without_a_fit_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"must be the folder of a fit; it has no model\.otp"):
        read_run(tmp_path)


def test_broken_files_of_a_folder_are_named(run, tmp_path):
    run.model.save(tmp_path / "model.otp")
    assert read_run(tmp_path).summary == {}
    (tmp_path / "summary.json").write_text("[1, 2]")
    with pytest.raises(DataError, match=r"summary\.json: must hold an object; got list"):
        read_run(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(DataError, match=r"summary\.json: is no JSON"):
        read_run(tmp_path)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize(("width", "phone"), [(1280, False), (390, True)])
def test_page_works_in_a_browser(page, series_page, tmp_path, width, phone):
    for number, text in enumerate((page, series_page)):
        path = tmp_path / f"page{number}.html"
        path.write_text(text, encoding="utf-8")
    with Page(width, phone=phone) as browser:
        for path in sorted(tmp_path.glob("*.html")):
            browser.open(path)
            assert browser.run("document.querySelectorAll('.chart svg').length") >= 3
            assert browser.overflow() <= 0
        browser.open(tmp_path / "page0.html")
        _check_nodes_tell(browser)
        assert browser.complaints == []
        assert [address for address in browser.requests if not address.startswith(("file:", "data:", "blob:"))] == []


def _check_nodes_tell(browser: Page) -> None:
    """Pointing at a node and reaching it by the tab key both show its estimates."""
    about = "document.getElementById('about-node').textContent"
    assert "Point at a node" in browser.run(about)
    browser.point("[aria-label='eggs']")
    browser.wait(f"{about}.includes('rate')")
    browser.run("document.querySelector(\"[aria-label='size']\").focus()")
    browser.wait(f"{about}.includes('scale')")
    browser.press("Tab")
    browser.wait("document.activeElement.getAttribute('aria-label') !== 'size'")
    name = browser.run("document.activeElement.getAttribute('aria-label')")
    assert browser.run(about).startswith(name)
