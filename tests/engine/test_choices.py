"""What kinds of data choose for a fit: where starts are guessed, how long the first runs are, which method runs."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward import EncoderMap
from otpdag.costs import KL
from otpdag.data import Documents, Images
from otpdag.datasets import bars
from otpdag.divergences import Wasserstein
from otpdag.engine import EM, Adam, Deterministic, Method, SearchSchedule, data_kind, sequence_data
from otpdag.engine.data_kind import ImageData, TableData, initial_theta
from otpdag.engine.document_data import DocumentData, topic_method
from otpdag.engine.search import restart_seed
from otpdag.engine.sequence_data import SequenceData
from otpdag.errors import DataError, ModelError
from otpdag.likelihood.topic_problem import Repeats
from otpdag.objective import Direct, Drawn, Encoded, Objective, PaperTopics, TopicSweeps
from otpdag.problem import split_point
from otpdag.schedules import Constant
from otpdag.settings import ClosedForm, PushForward
from otpdag.spaces import Real

# -- what kinds of data choose for a fit: where starts are guessed, how long the first runs are, which method runs ----


RNG = np.random.default_rng(0)


def mixture():
    graph = otp.Graph([("z", "x"), ("z", "y")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal(), "y": m.Normal()})


def table(rows=50):
    return pd.DataFrame({"x": RNG.normal(size=rows), "y": RNG.normal(size=rows)})


# -- tables -----------------------------------------------------------------------------------------------------------


def test_the_first_start_is_the_plain_guess_and_each_has_a_seed_of_its_own(monkeypatch):
    asked = []
    one_start = data_kind.one_start

    def noted(layout, batch, seed, *, first):
        asked.append((batch.rows, seed, first))
        return one_start(layout, batch, seed, first=first)

    monkeypatch.setattr(data_kind, "one_start", noted)
    monkeypatch.setattr(data_kind, "START_ROWS", 20)
    monkeypatch.setattr(data_kind, "ONE_START_ROWS", 30)
    kind = TableData.of(mixture(), table())
    layout = kind.lay_out(otp.entropic(), 3)
    problem = kind.problem(layout, otp.entropic(), 3)
    seeds = [restart_seed(3, number) for number in range(3)]
    starts = kind.starts(layout, problem, 3, [0, 1, 2])
    assert starts.shape[0] == 3
    assert asked == [(30, seeds[0], True), (20, seeds[1], False), (20, seeds[2], False)]
    asked.clear()
    kind.starts(layout, problem, 3, [0])  # a single one looks at more rows
    kind.starts(layout, problem, 3, [0], torch.arange(7))  # or at those that it is told
    kind.starts(layout, problem, 3, [1], torch.arange(7))
    assert asked == [(30, seeds[0], True), (7, seeds[0], True), (7, seeds[1], False)]


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
    assert kind.course(otp.entropic()) == SearchSchedule(finalist_gap=data_kind.FINALIST_GAP)
    monkeypatch.setattr(data_kind, "FROM_ROWS", 50)
    monkeypatch.setattr(data_kind, "HELD_ROWS", 20)
    method = otp.Method("own", otp.entropic().objective, ClosedForm(), Deterministic(tolerance=1e-5))
    assert kind.course(method) == SearchSchedule(finalist_rows=20, part_rows=20, part_tolerance=1e-5)
    drawn = otp.Method("own", otp.entropic().objective, Drawn(), otp.engine.Adam())
    assert kind.course(drawn) == SearchSchedule()
    monkeypatch.setattr(data_kind, "FROM_ROWS", 51)
    assert kind.course(method) == SearchSchedule(finalist_gap=data_kind.FINALIST_GAP)


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
    entropic, transport, paper = (topic_method(name, documents=60) for name in ("likelihood", "pairs", "paper"))
    assert [kind.restarts(one) for one in (entropic, transport, paper)] == [6, 4, 12]
    for method, steps in ((entropic, 10), (transport, 30)):
        course = kind.course(method)
        assert (course.short_steps, course.halving, course.finalists, course.moves) == (steps, False, 1, 0)
    assert kind.course(topic_method("likelihood", documents=60, steps=4)).short_steps == 4


@pytest.mark.parametrize(("ratio", "method", "background"), [(1.0, "likelihood", 0.0), (3.0, "pairs", 0.8)])
def test_documents_that_repeat_words_too_often_are_compared_by_pairs(ratio, method, background):
    kind = topics(COUNTS)
    kind.__dict__["repeats"] = Repeats(ratio, 0.01)
    assert kind.named("auto").name == method
    assert kind.named("pairs").evaluation.background == background
    assert kind.named("likelihood").evaluation.background == 0.0
    assert kind.named("paper").name == "paper"
    (note,) = kind.notes(SimpleNamespace(problem=None))
    assert f"repeat words {ratio:.2f} times as often" in note
    assert topics(COUNTS).notes(SimpleNamespace(problem=None)) == []
    one = topics(COUNTS, 1)
    one.__dict__["repeats"] = Repeats(9.0, 0.01)
    assert one.holds  # one topic is how often words occur


@pytest.mark.parametrize(("name", "total"), [("likelihood", COUNTS.sum()), ("pairs", 1.0)])
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
    [("likelihood", 100, 1.1, None), ("likelihood", 100, 1.0, 0.1), ("pairs", 300, 1.1, None)],
)
def test_methods_of_documents_have_their_steps(name, steps, growth, prior):
    method = topic_method(name, documents=60, prior=prior)
    assert (method.optimiser.steps, method.optimiser.growth) == (steps, growth)
    assert method.evaluation.prior == prior
    assert method.evaluation.pairs is (name == "pairs")
    assert topic_method(name, documents=60, prior=prior, steps=7).optimiser.steps == 7


# -- documents: which methods fit them, where they start, and in which order topics end -------------------------------


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
    transport = topic_method("pairs", documents=120, steps=7)
    assert transport.objective == Objective(reconstruction=0.0, direct=Direct())
    assert (transport.evaluation, transport.optimiser) == (TopicSweeps(pairs=True), EM(steps=7))
    paper = topic_method("paper", documents=120, steps=7)
    assert paper.evaluation == PaperTopics(temperature=1.0, batch_size=50)
    in_turn = {"learning_rate": Constant(1e-3), "averaging": 0.0, "alternating": True}
    assert paper.optimiser == Adam(steps=2 * 7 * 3, **in_turn)  # epochs of three batches, encoder and topics on each
    assert paper.objective.push_forward.eta == 1e-4
    assert topic_method("paper", documents=120, prior=0.1).objective.push_forward.eta == 1e-1


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
        (topic_method("pairs", documents=30), 4, 30),
        (topic_method("paper", documents=30), 12, 10),
        (topic_method("pairs", documents=30, steps=7), 4, 7),
    ):
        assert kind.restarts(method) == starts
        assert kind.course(method) == otp.SearchSchedule(short_steps=steps, **alone)


def test_the_papers_settings_are_those_of_its_appendix():
    plain, drawn = (topic_method("paper", documents=120, prior=prior) for prior in (None, 0.1))
    assert plain.evaluation == PaperTopics(drawn=False, temperature=1.0, batch_size=50)
    assert drawn.evaluation == PaperTopics(drawn=True, temperature=2.0, batch_size=50)
    for method, epochs, eta in ((plain, 300, 1e-4), (drawn, 1000, 1e-1)):
        assert method.optimiser.steps == 2 * epochs * 3  # of three batches, encoder and topics on each
        assert method.objective == Objective(push_forward=PushForward(eta, Wasserstein(KL())))
        assert method.optimiser.rate(0.0) == method.optimiser.rate(1.0) == 1e-3
        assert method.optimiser.alternating
    assert topic_method("pairs", documents=120).optimiser == EM(steps=300)
    assert topic_method("pairs", documents=120, background=0.8).evaluation.background == 0.8


def told(kind, ratio):
    """The same documents, as if they repeated words so many times as often as topics alone would."""
    kind.__dict__["repeats"] = None if ratio is None else Repeats(ratio, 0.01)
    return kind


def test_the_method_follows_from_how_often_words_are_repeated():
    counts = bars(4, 30, 20, seed=0).counts
    usual, texts, unknown = (told(data(counts), ratio) for ratio in (1.0, 3.0, None))
    assert (usual.repeats.as_modelled, texts.repeats.as_modelled) == (True, False)
    assert [one.named("auto").name for one in (usual, texts, unknown)] == ["likelihood", "pairs", "likelihood"]
    assert told(data(counts, topics=1), 3.0).named("auto").name == "likelihood"  # one topic is how often words occur
    assert [one.named("pairs").evaluation.background for one in (usual, texts, unknown)] == [0.0, 0.8, 0.0]
    assert texts.named("likelihood").evaluation.background == 0.0
    assert texts.named("auto") == topic_method("pairs", documents=30, background=0.8)
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
    method = topic_method("pairs", documents=3)
    with pytest.raises(DataError, match="documents of at least two words; found none"):
        single.problem(single.lay_out(method, 0), method, 0)


@pytest.mark.parametrize("name", ["likelihood", "pairs"])
def test_starts_have_as_many_words_as_there_are_to_explain(name):
    kind = told(data(bars(4, 60, 30, seed=0).counts, 4), 3.0)
    method = kind.named(name)
    layout = kind.lay_out(method, 0)
    problem = kind.problem(layout, method, 0)
    topics = problem.topics(kind.starts(layout, problem, 0, [0]))
    whole = kind.counts.sum() if name == "likelihood" else 0.2  # of transport, the share that is no background
    np.testing.assert_allclose(torch.exp(topics.log_counts).sum(-1), np.full(4, whole / 4), rtol=1e-5)
    np.testing.assert_allclose(topics.alpha, 0.25, rtol=1e-5)


# -- images: how they are read, and where their networks start --------------------------------------------------------


PIXELS = np.arange(2 * 3 * 2 * 2).reshape(2, 3, 2, 2)


def linear(inputs, outputs, seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(inputs, outputs)


def model(decoder=None):
    graph = otp.Graph([("latent", "image")], hidden=["latent"])
    decoder = m.Decoder(decoder or linear(2, 12, 0), Real(12))
    return otp.Model(graph, {"latent": m.Normal(2, loc=0.0, scale=1.0), "image": decoder})


@pytest.mark.parametrize("pixels", [PIXELS, torch.from_numpy(PIXELS), PIXELS.astype(np.uint8), PIXELS.tolist()])
def test_images_are_flattened_channels_first_in_single_precision(pixels):
    rows = Images(pixels).rows
    assert rows.dtype == torch.float32
    np.testing.assert_array_equal(rows, PIXELS.reshape(2, 12))


def test_a_point_is_the_networks_as_they_are():
    decoder, encoder = linear(2, 12, 1), linear(12, 2, 2)
    data = ImageData.of(model(decoder), Images(PIXELS))
    method = Method("encoded", Objective(), Encoded(EncoderMap(encoder, 2, (12,))), Adam(steps=1))
    layout = data.lay_out(method, 0)
    problem = data.problem(layout, method, 0)
    points = data.starts(layout, problem, 0, range(2))
    theta, phi = split_point(points[:1], problem.shapes)
    rows = Images(PIXELS).rows
    torch.testing.assert_close(problem.encoded.backward.latents(phi, rows[None])[0], encoder(rows).detach())
    parameters = torch.cat([value.flatten() for value in theta.values()]).sort().values
    own = torch.cat([value.detach().flatten() for value in decoder.parameters()]).sort().values
    torch.testing.assert_close(parameters, own)
    assert torch.equal(points[0], points[1])  # no more starts than one


def test_what_the_user_gave_is_where_others_start():
    graph = otp.Graph([("z", "image")], hidden=["z"])
    decoder = m.Decoder(linear(3, 12, 0), Real(12))
    given = otp.Model(graph, {"z": m.Categorical(3, probs=otp.start([[0.2, 0.3, 0.5]])), "image": decoder})
    theta = initial_theta(given.structure, seed=0)
    assert {value.dtype for value in theta.values()} == {torch.float32}
    probs = given.structure.naturals(theta)["z"]["probs"]
    np.testing.assert_allclose(probs.flatten(), [0.2, 0.3, 0.5], rtol=1e-5)
    plain = otp.Model(graph, {"z": m.Categorical(3), "image": decoder})
    even = plain.structure.naturals(initial_theta(plain.structure, seed=0))["z"]["probs"]
    np.testing.assert_allclose(even.flatten(), 1 / 3, rtol=1e-5)


def test_images_need_an_encoder_and_one_node():
    data = ImageData.of(model(), Images(PIXELS))
    with pytest.raises(ModelError, match=r"images need a Method with Encoded\(...\).*got method='auto'"):
        data.named("auto")
    with pytest.raises(ModelError, match="images are evaluated by Encoded; got ClosedForm"):
        data.check(otp.entropic())
    two = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    with pytest.raises(ModelError, match="images belong to one observed node; the graph has 2"):
        ImageData.of(two, Images(PIXELS))


def test_a_way_of_topics_that_there_is_not_is_refused():
    with pytest.raises(otp.ModelError, match="for topics; got 'transport'"):
        topic_method("transport", documents=60)
