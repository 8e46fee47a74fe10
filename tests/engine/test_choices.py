"""What kinds of data choose for a fit: where starts are guessed, how long the first runs are, which method runs."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine import Deterministic, SearchSchedule, sequence_data, table_data
from otpdag.engine.document_data import DocumentData, topic_method
from otpdag.engine.search import restart_seed
from otpdag.engine.sequence_data import SequenceData
from otpdag.engine.table_data import TableData
from otpdag.likelihood.word_pairs import Repeats
from otpdag.objective import Drawn
from otpdag.settings import ClosedForm

RNG = np.random.default_rng(0)


def mixture():
    graph = otp.Graph([("z", "x"), ("z", "y")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal(), "y": m.Normal()})


def table(rows=50):
    return pd.DataFrame({"x": RNG.normal(size=rows), "y": RNG.normal(size=rows)})


# -- tables -----------------------------------------------------------------------------------------------------------


def test_the_first_start_is_the_plain_guess_and_each_has_a_seed_of_its_own(monkeypatch):
    asked = []
    one_start = table_data.one_start

    def noted(layout, batch, owner, seed, *, first):
        asked.append((batch.rows, owner, seed, first))
        return one_start(layout, batch, owner, seed, first=first)

    monkeypatch.setattr(table_data, "one_start", noted)
    monkeypatch.setattr(table_data, "START_ROWS", 20)
    monkeypatch.setattr(table_data, "ONE_START_ROWS", 30)
    kind = TableData.of(mixture(), table())
    layout = kind.lay_out(otp.entropic(), 3)
    problem = kind.problem(layout, otp.entropic(), 3)
    seeds = [restart_seed(3, number) for number in range(3)]
    starts = kind.starts(layout, problem, 3, [0, 1, 2])
    assert starts.shape[0] == 3
    assert asked == [(20, 0, seeds[0], True), (20, 0, seeds[1], False), (20, 0, seeds[2], False)]
    asked.clear()
    kind.starts(layout, problem, 3, [0])  # a single one looks at more rows
    kind.starts(layout, problem, 3, [0], torch.arange(7))  # or at those that it is told
    kind.starts(layout, problem, 3, [1], torch.arange(7))
    assert asked == [(30, 0, seeds[0], True), (7, 0, seeds[0], True), (7, 0, seeds[1], False)]


def test_the_work_of_a_table_is_its_rows_times_points_or_a_minibatch():
    kind = TableData.of(mixture(), table())
    assert kind.work(otp.entropic()) == 50
    drawn = otp.Method("own", otp.entropic().objective, Drawn(batch_size=16), otp.engine.Adam())
    assert kind.work(drawn) == 16
    numbers = otp.Model(mixture().graph, {"z": m.Normal(), "x": m.Normal(), "y": m.Poisson()})
    frame = table().assign(y=RNG.poisson(2.0, 50))
    grid = otp.backward.SumSizes(grid=12)
    assert TableData.of(numbers, frame).work(otp.entropic(sums=grid)) == 50 * 12


def test_many_rows_are_first_fitted_on_a_part(monkeypatch):
    kind = TableData.of(mixture(), table())
    assert kind.course(otp.entropic()) == SearchSchedule(finalist_gap=table_data.FINALIST_GAP)
    monkeypatch.setattr(table_data, "FROM_ROWS", 50)
    monkeypatch.setattr(table_data, "HELD_ROWS", 20)
    method = otp.Method("own", otp.entropic().objective, ClosedForm(), Deterministic(tolerance=1e-5))
    assert kind.course(method) == SearchSchedule(finalist_rows=20, part_rows=20, part_tolerance=1e-5)
    drawn = otp.Method("own", otp.entropic().objective, Drawn(), otp.engine.Adam())
    assert kind.course(drawn) == SearchSchedule()
    monkeypatch.setattr(table_data, "FROM_ROWS", 51)
    assert kind.course(method) == SearchSchedule(finalist_gap=table_data.FINALIST_GAP)


def test_rows_have_an_order_of_their_own_and_go_back():
    frame = table()
    kind, other = (TableData.of(mixture(), frame.iloc[order]) for order in (np.arange(50), RNG.permutation(50)))
    torch.testing.assert_close(kind.batch.values["x"], other.batch.values["x"])
    given = kind.as_given(kind.batch.values["x"][0, :, 0].numpy())
    np.testing.assert_array_equal(given, frame["x"])
    alike = pd.DataFrame({"a": [0, 1, 1, 0, 1] * 20, "b": [1, 1, 1, 1, 0] * 20})
    codes = otp.Model(otp.Graph([("a", "b")]), {"a": m.Categorical(2), "b": m.Categorical(2)})
    assert TableData.of(codes, alike).batch.rows == 3
    assert sorted(TableData.of(codes, alike).batch.weight[0].tolist()) == [20.0, 40.0, 40.0]
    assert TableData.of(codes, alike, every_row=True).batch.rows == 100
    assert TableData.of(codes, alike).rows == 100


# -- sequences --------------------------------------------------------------------------------------------------------


def test_the_first_start_of_sequences_is_the_plain_guess(monkeypatch):
    asked = []
    guessed = sequence_data._guessed

    def noted(structure, few, seed, *, first):
        asked.append((seed, first))
        return guessed(structure, few, seed, first=first)

    monkeypatch.setattr(sequence_data, "_guessed", noted)
    model = otp.Model(
        otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Poisson()}
    )
    kind = SequenceData.of(model, RNG.poisson(4.0, (6, 20)))
    layout = kind.lay_out(otp.entropic(), 5)
    asked.clear()
    starts = kind.starts(layout, kind.problem(layout, otp.entropic(), 5), 5, [0, 1])
    assert asked == [(restart_seed(5, 0), True), (restart_seed(5, 1), False)]
    assert not torch.equal(starts[0], starts[1])


# -- documents --------------------------------------------------------------------------------------------------------


def topics(counts, number=2):
    graph = otp.Graph([("shares", "words")], hidden=["shares"])
    model = otp.Model(graph, {"shares": m.Dirichlet(number), "words": m.Multinomial(counts.shape[1])})
    return DocumentData.of(model, otp.Documents(sparse.csr_array(counts)))


COUNTS = np.vstack([RNG.poisson(3.0, (30, 6)) * [1, 1, 1, 0, 0, 0], RNG.poisson(3.0, (30, 6)) * [0, 0, 0, 1, 1, 1]])


def test_documents_start_from_so_many_starts_and_go_on_from_the_best():
    kind = topics(COUNTS)
    entropic, transport, paper = (topic_method(name, documents=60) for name in ("likelihood", "transport", "paper"))
    assert [kind.restarts(one) for one in (entropic, transport, paper)] == [6, 4, 1]
    for method, steps in ((entropic, 10), (transport, 30)):
        course = kind.course(method)
        assert (course.short_steps, course.halving, course.finalists, course.moves) == (steps, False, 1, 0)
    assert kind.course(topic_method("likelihood", documents=60, steps=4)).short_steps == 4


@pytest.mark.parametrize(("ratio", "method", "background"), [(1.0, "likelihood", 0.0), (3.0, "transport", 0.8)])
def test_documents_that_repeat_words_too_often_are_compared_by_pairs(ratio, method, background):
    kind = topics(COUNTS)
    kind.__dict__["repeats"] = Repeats(ratio, 0.01)
    assert (kind.chosen("auto"), kind.named("auto").name) == (method, method)
    assert kind.background("transport") == background
    assert kind.background("likelihood") == 0.0
    assert kind.chosen("paper") == "paper"
    (note,) = kind.notes(SimpleNamespace(problem=None))
    assert f"repeat words {ratio:.2f} times as often" in note
    assert topics(COUNTS).notes(SimpleNamespace(problem=None)) == []
    one = topics(COUNTS, 1)
    one.__dict__["repeats"] = Repeats(9.0, 0.01)
    assert one.holds  # one topic is how often words occur


@pytest.mark.parametrize(("name", "total"), [("likelihood", COUNTS.sum()), ("transport", 1.0)])
def test_starts_of_topics_share_out_all_words(name, total):
    kind, method = topics(COUNTS), topic_method(name, documents=60)
    layout = kind.lay_out(method, 0)
    problem = kind.problem(layout, method, 0)
    points = kind.starts(layout, problem, 0, [0, 1])
    for point in points.split(1):
        start = problem.topics(point)
        np.testing.assert_allclose(torch.exp(start.log_counts).sum(-1), [total / 2, total / 2], rtol=1e-4)
        np.testing.assert_allclose(start.alpha, [0.5, 0.5])
    assert not torch.equal(points[0], points[1])
    # the corners of these documents are the two halves of the words
    halves = problem.topics(points[:1]).probabilities.reshape(2, 2, 3).sum(-1)
    assert halves.max(1).values.min() > 0.9


@pytest.mark.parametrize(
    ("name", "steps", "growth", "prior"),
    [("likelihood", 100, 1.1, None), ("likelihood", 100, 1.0, 0.1), ("transport", 300, 1.1, None)],
)
def test_methods_of_documents_have_their_steps(name, steps, growth, prior):
    method = topic_method(name, documents=60, prior=prior)
    assert (method.optimiser.steps, method.optimiser.growth) == (steps, growth)
    assert method.evaluation.prior == prior
    assert method.evaluation.pairs is (name == "transport")
    assert topic_method(name, documents=60, prior=prior, steps=7).optimiser.steps == 7
