"""What a fit shows while it runs."""

import io
import sys

import pytest

from otpdag.engine import Monitor, Stage
from otpdag.progress import shown_while_running

TERMS = {"loss": 2.5, "reconstruction": 2.0, "entropic": 0.5}


def test_records_are_kept_in_order_with_their_terms():
    with Monitor(show=False) as monitor:
        for step in range(3):
            assert monitor.record("all", step, {**TERMS, "loss": 3.0 - step}, keep=True) is False
    assert [entry["step"] for entry in monitor.history] == [0.0, 1.0, 2.0]
    assert [entry["loss"] for entry in monitor.history] == [3.0, 2.0, 1.0]
    assert {entry["entropic"] for entry in monitor.history} == {0.5}
    seconds = [entry["seconds"] for entry in monitor.history]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 0


def test_steps_that_are_not_kept_leave_losses_alone():
    seen = []
    monitor = Monitor(show=False, callbacks=[seen.append])
    monitor.stage("short", 5, starts=(0, 1))
    assert monitor.record("short", 0, TERMS, keep=False, losses=(1.0, 2.0)) is False
    assert monitor.history == seen == []
    assert monitor.stages[0].losses == [(1.0, 2.0)]


def test_any_callback_stops_and_all_see_every_record():
    first, second = [], []

    def stopping(record):
        first.append(record["step"])
        return record["step"] == 1

    monitor = Monitor(show=False, callbacks=[stopping, lambda record: second.append(record["step"])])
    assert monitor.record("all", 0, TERMS, keep=True) is False
    assert not monitor.stopped
    assert monitor.record("all", 1, TERMS, keep=True) is True
    assert monitor.stopped
    assert first == second == [0.0, 1.0]


def test_stages_share_a_number_if_they_share_an_objective():
    part, whole = [], []  # equal, but not the same
    monitor = Monitor(show=False)
    for name, objective in (("short", part), ("finalists", whole), ("again", part), ("none", None), ("other", None)):
        monitor.stage(name, 3, objective=objective)
    assert [stage.objective for stage in monitor.stages] == [0, 1, 0, 2, 3]


def test_losses_belong_to_the_latest_stage():
    monitor = Monitor(show=False)
    for name, starts in (("short", (0, 1, 2)), ("best", (2,))):
        monitor.stage(name, 2, starts=starts)
        for step in range(2):
            monitor.record(name, step, TERMS, keep=True, losses=tuple(float(one) + step for one in starts))
    assert [stage.starts for stage in monitor.stages] == [(0, 1, 2), (2,)]
    assert monitor.stages[0].losses == [(0.0, 1.0, 2.0), (1.0, 2.0, 3.0)]
    assert monitor.stages[1].losses == [(2.0,), (3.0,)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("show", [True, False, None])
def test_a_bar_is_shown_on_a_terminal_unless_told_not_to(monkeypatch, show):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with Monitor(show=show) as monitor:
        monitor.stage("best start", 4)
        monitor.record("best start", 0, TERMS, keep=True)
        monitor.stage("refined", 4)
    shown = screen.getvalue()
    assert ("best start" in shown and "2.5" in shown) is (show is not False)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert Monitor().show is False


def test_what_takes_longer_than_a_second_shows_a_bar_of_its_parts(monkeypatch):
    screen, seconds = Terminal(), iter([0.0, 0.5, 1.5])
    monkeypatch.setattr(sys, "stderr", screen)
    assert list(shown_while_running(range(2), "quick", 2)) == [0, 1]
    assert screen.getvalue() == ""
    monkeypatch.setattr("otpdag.progress.time.monotonic", lambda: next(seconds, 2.0))
    assert list(shown_while_running(range(4), "slow", 4)) == [0, 1, 2, 3]
    assert "slow" in screen.getvalue()


def test_lines_tell_how_far_a_fit_is_where_there_is_no_terminal(monkeypatch, caplog):
    paper = io.StringIO()
    monkeypatch.setattr(sys, "stderr", paper)
    monkeypatch.setattr("otpdag.engine.monitor.LINE_SECONDS", 0.0)
    with caplog.at_level("INFO", logger="otpdag"), Monitor(show=True) as monitor:
        monitor.stage("best start", 4)
        monitor.record("best start", 2, TERMS, keep=True)
    assert paper.getvalue().splitlines()[0] == "best start: at most 4 steps"
    assert paper.getvalue().splitlines()[1].startswith("best start: step 3, loss 2.5, 0 s")
    assert caplog.messages == paper.getvalue().splitlines()[1:]
    monkeypatch.setattr("otpdag.engine.monitor.LINE_SECONDS", 1e9)
    Monitor(show=True).record("best start", 3, TERMS, keep=True)
    assert len(paper.getvalue().splitlines()) == 2


def test_nothing_is_printed_by_default_where_there_is_no_terminal(monkeypatch, caplog):
    paper = io.StringIO()
    monkeypatch.setattr(sys, "stderr", paper)
    monkeypatch.setattr("otpdag.engine.monitor.LINE_SECONDS", 0.0)
    with caplog.at_level("INFO", logger="otpdag"), Monitor() as monitor:
        monitor.stage("best start", 4)
        monitor.record("best start", 2, TERMS, keep=True)
    assert paper.getvalue() == ""
    assert len(caplog.messages) == 1


def test_a_stage_alone_has_the_first_objective_and_no_losses():
    stage = Stage("a", (0,))
    assert (stage.objective, stage.losses) == (0, [])


def test_losses_need_a_stage_and_a_stage_no_losses():
    monitor = Monitor(show=False)
    monitor.record("alone", 0, TERMS, keep=True, losses=(1.0,))
    assert monitor.stages == []
    monitor.stage("short", 5)
    monitor.record("short", 0, TERMS, keep=True)
    assert monitor.stages[0].losses == []
    assert len(monitor.history) == 2
