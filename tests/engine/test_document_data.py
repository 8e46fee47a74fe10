"""Documents: which methods fit them, where they start, and in which order topics end."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import sparse

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Documents
from otpdag.datasets import bars
from otpdag.engine import EM, Adam
from otpdag.engine.document_data import DocumentData, topic_method
from otpdag.errors import DataError, ModelError
from otpdag.likelihood.word_pairs import Repeats
from otpdag.objective import ClosedForm, Direct, Objective, PaperTopics, TopicSweeps


def data(counts, topics=3):
    graph = otp.Graph([("shares", "words")], hidden=["shares"])
    model = otp.Model(graph, {"shares": m.Dirichlet(topics), "words": m.Multinomial(counts.shape[1])})
    return DocumentData.of(model, Documents(counts))


def test_counts_that_are_given_twice_add_up_and_zeros_are_left_out():
    rows, columns, counts = [0, 0, 1, 1], [2, 2, 0, 1], [1.0, 3.0, 2.0, 0.0]
    held = Documents(sparse.coo_array((counts, (rows, columns)), shape=(2, 3))).counts
    np.testing.assert_array_equal(held.toarray(), [[0, 0, 4], [2, 0, 0]])
    assert held.nnz == 2


def test_the_users_matrix_is_not_changed():
    """Counts in the very format and precision that is kept, with a word given twice and a zero."""
    given = sparse.csr_array(([1.0, 3.0, 0.0], [1, 1, 0], [0, 2, 3]), shape=(2, 2))
    held = Documents(given).counts
    assert (given.nnz, held.nnz) == (3, 1)
    np.testing.assert_array_equal(given.data, [1.0, 3.0, 0.0])
    held.data[:] = 7.0
    np.testing.assert_array_equal(given.data, [1.0, 3.0, 0.0])


def test_methods_are_what_their_names_say():
    entropic = topic_method("likelihood", documents=120)
    assert (entropic.evaluation, entropic.optimiser) == (TopicSweeps(), EM(steps=100, growth=1.1))
    # with a prior on the topics an update is no longer a plain maximum, and is not stretched
    assert topic_method("likelihood", documents=120, prior=0.1).optimiser == EM(steps=100, growth=1.0)
    transport = topic_method("transport", documents=120, steps=7)
    assert transport.objective == Objective(reconstruction=0.0, direct=Direct())
    assert (transport.evaluation, transport.optimiser) == (TopicSweeps(pairs=True), EM(steps=7))
    paper = topic_method("paper", documents=120, steps=7)
    assert paper.evaluation == PaperTopics(temperature=1.0, batch_size=50)
    assert paper.optimiser == Adam(steps=7 * 3, learning_rate=1e-3, averaging=0.0)  # epochs of three batches
    assert paper.objective.push_forward.eta == 1e-4
    assert topic_method("paper", documents=120, prior=0.1).objective.push_forward.eta == 1e-1
    with pytest.raises(ModelError, match="method must be 'auto', 'likelihood', 'transport', 'paper' or a Method"):
        topic_method("best", documents=120)


def test_other_evaluations_are_refused():
    with pytest.raises(ModelError, match="documents are evaluated by TopicSweeps or PaperTopics; got ClosedForm"):
        data(bars(4, 30, 20, seed=0).counts).check(otp.entropic())
    assert isinstance(otp.entropic().evaluation, ClosedForm)


def test_starts_are_distributions_of_words():
    drawn = bars(4, 60, 30, seed=0)
    kind = data(drawn.counts, 4)
    method = kind.named("auto")
    layout = kind.lay_out(method, 0)
    problem = kind.problem(layout, method, 0)
    points = kind.starts(layout, problem, 0, range(3))
    assert len(points) == 3
    naturals = problem.naturals(points)
    torch.testing.assert_close(naturals["words"]["topics"].sum(-1), torch.ones(3, 4).double())
    assert torch.equal(points[1:2], kind.starts(layout, problem, 0, [1]))  # whichever others there are


def test_topics_end_in_order_of_falling_share():
    rng = np.random.default_rng(0)
    topics = np.kron(np.eye(3), np.full((1, 2), 0.5))
    shares = rng.dirichlet([0.1, 0.5, 0.2], size=200)
    kind = data(sparse.csr_array(rng.multinomial(40, shares @ topics)))
    otp.fit(kind.model, kind, seed=0, restarts=2)
    found = kind.model.params()
    assert found["words"]["topics"].reshape(3, 3, 2).sum(-1).argmax(1).tolist() == [1, 2, 0]
    concentration = found["shares"]["concentration"].ravel()
    assert (np.diff(concentration) < 0).all()


def test_how_often_and_how_long_documents_are_started():
    kind = data(bars(4, 30, 20, seed=0).counts)
    alone = {"halving": False, "finalists": 1, "moves": 0}
    for method, starts, steps in (
        (topic_method("likelihood", documents=30), 6, 10),
        (topic_method("transport", documents=30), 4, 30),
        (topic_method("paper", documents=30), 1, 10),
        (topic_method("transport", documents=30, steps=7), 4, 7),
    ):
        assert kind.restarts(method) == starts
        assert kind.course(method) == otp.SearchSchedule(short_steps=steps, **alone)


def test_the_papers_settings_are_those_of_its_appendix():
    plain, drawn = (topic_method("paper", documents=120, prior=prior) for prior in (None, 0.1))
    assert plain.evaluation == PaperTopics(drawn=False, temperature=1.0, batch_size=50)
    assert drawn.evaluation == PaperTopics(drawn=True, temperature=2.0, batch_size=50)
    assert plain.optimiser == drawn.optimiser == Adam(steps=300 * 3, learning_rate=1e-3, averaging=0.0)
    assert topic_method("transport", documents=120).optimiser == EM(steps=300)
    assert topic_method("transport", documents=120, background=0.8).evaluation.background == 0.8


def told(kind, ratio):
    """The same documents, as if they repeated words so many times as often as topics alone would."""
    kind.__dict__["repeats"] = None if ratio is None else Repeats(ratio, 0.01)
    return kind


def test_the_method_follows_from_how_often_words_are_repeated():
    counts = bars(4, 30, 20, seed=0).counts
    usual, texts, unknown = (told(data(counts), ratio) for ratio in (1.0, 3.0, None))
    assert (usual.repeats.as_modelled, texts.repeats.as_modelled) == (True, False)
    assert [one.chosen("auto") for one in (usual, texts, unknown)] == ["likelihood", "transport", "likelihood"]
    assert told(data(counts, topics=1), 3.0).chosen("auto") == "likelihood"  # one topic is how often words occur
    assert [one.background("transport") for one in (usual, texts, unknown)] == [0.0, 0.8, 0.0]
    assert texts.background("likelihood") == 0.0
    assert texts.named("auto") == topic_method("transport", documents=30, background=0.8)
    assert texts.named("likelihood") == topic_method("likelihood", documents=30)
    swept, drawn = (SimpleNamespace(problem=SimpleNamespace(drawn_prior=prior)) for prior in (None, 0.25))
    assert texts.notes(swept) == ["documents repeat words 3.00 times as often as topics alone would (± 0.01)"]
    assert unknown.notes(swept) == data(counts).notes(swept) == []
    assert texts.notes(drawn)[1] == data(counts).notes(drawn)[0]
    assert "centre of draws" in texts.notes(drawn)[1]
    assert texts.notes(drawn)[1].endswith("a learned Dirichlet prior of concentration 0.25")


def test_too_few_documents_and_other_words_are_refused():
    counts = sparse.csr_array(np.array([[2, 1, 0], [0, 0, 0], [0, 1, 3]]))
    assert data(counts, topics=2).rows == 2
    with pytest.raises(DataError, match="at least as many documents with words as topics, 3; got 2"):
        data(counts, topics=3)
    model = data(counts, topics=2).model
    with pytest.raises(DataError, match="the model has 3 words; the documents have 2 columns"):
        DocumentData.of(model, Documents(counts[:, :2]))
    single = data(sparse.csr_array(np.eye(3)), topics=2)
    assert single.repeats is None
    method = topic_method("transport", documents=3)
    with pytest.raises(DataError, match="documents of at least two words; found none"):
        single.problem(single.lay_out(method, 0), method, 0)


@pytest.mark.parametrize("name", ["likelihood", "transport"])
def test_starts_have_as_many_words_as_there_are_to_explain(name):
    kind = told(data(bars(4, 60, 30, seed=0).counts, 4), 3.0)
    method = kind.named(name)
    layout = kind.lay_out(method, 0)
    problem = kind.problem(layout, method, 0)
    topics = problem.topics(kind.starts(layout, problem, 0, [0]))
    whole = kind.counts.sum() if name == "likelihood" else 0.2  # of transport, the share that is no background
    np.testing.assert_allclose(torch.exp(topics.log_counts).sum(-1), np.full(4, whole / 4), rtol=1e-5)
    np.testing.assert_allclose(topics.alpha, 0.25, rtol=1e-5)
