"""Data are read as the kind that they are, and arguments that they cannot honour are refused before anything runs."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward import EncoderMap
from otpdag.engine import EM, Adam, Deterministic, Method
from otpdag.engine.data_kind import ImageData, TableData
from otpdag.engine.document_data import DocumentData
from otpdag.engine.fit import check_arguments, check_honoured, recognise, resolve
from otpdag.engine.sequence_data import SequenceData
from otpdag.errors import DataError, ModelError
from otpdag.objective import Drawn, Encoded, PaperTopics, TopicSweeps
from otpdag.settings import ClosedForm, Objective, PushForward
from otpdag.spaces import Real

# -- data are read as the kind that they are --------------------------------------------------------------------------


def model(kind):
    if kind == "table":
        return otp.Model(otp.Graph([("a", "b")]), {"a": m.Categorical(2), "b": m.Categorical(2)})
    if kind == "sequences":
        graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
        return otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal()})
    if kind == "documents":
        graph = otp.Graph([("shares", "words")], hidden=["shares"])
        return otp.Model(graph, {"shares": m.Dirichlet(2), "words": m.Multinomial(3)})
    graph = otp.Graph([("latent", "image")], hidden=["latent"])
    return otp.Model(graph, {"latent": m.Normal(1), "image": m.Decoder(torch.nn.Linear(1, 4), Real(4))})


COUNTS = np.array([[2, 0, 1], [0, 3, 0], [1, 1, 1]])
TABLE = pd.DataFrame({"a": [0, 1, 1, 0, 1, 1], "b": [1, 0, 0, 1, 1, 0]})


def read(kind, data, **options):
    return recognise(model(kind), data, **{"weights": None, "device": "cpu", "every_row": False, **options})


@pytest.mark.parametrize(
    ("kind", "data", "wanted", "rows"),
    [
        ("table", TABLE, TableData, 6),
        ("sequences", np.zeros((3, 4)), SequenceData, 12),
        ("sequences", [np.zeros(2), np.zeros(5)], SequenceData, 7),
        ("documents", otp.Documents(COUNTS), DocumentData, 3),
        ("documents", sparse.csc_array(COUNTS), DocumentData, 3),
        ("images", otp.Images(np.zeros((6, 1, 2, 2))), ImageData, 6),
    ],
)
def test_the_kind_follows_from_data_and_graph(kind, data, wanted, rows):
    found = read(kind, data)
    assert type(found) is wanted
    assert found.rows == rows


@pytest.mark.parametrize("options", [{"weights": [1.0] * 6}, {"weights": "nonsense"}, {"device": "cuda"}])
def test_what_is_read_already_takes_no_weights_and_no_device(options):
    own = model("table")
    with pytest.raises(DataError, match="TableData are read already: give weights and device when they are made"):
        recognise(own, TableData.of(own, TABLE), **{"weights": None, "device": "cpu", "every_row": False, **options})


def test_the_weight_of_a_sequence_is_what_its_steps_say():
    frame = pd.DataFrame({"id": list("aabbb"), "x": np.arange(5.0), "w": [2.0, 2.0, 1.0, 1.0, 1.0]})
    for data in (otp.Sequences(frame, sequence="id"), otp.Sequences(frame.drop(columns="id"), lengths=[2, 3])):
        named = read("sequences", data, weights="w")
        given = read("sequences", otp.Sequences(frame[["x"]], lengths=[2, 3]), weights=[2.0, 1.0])
        torch.testing.assert_close(named.batch.steps.weight, given.batch.steps.weight)
        assert named.is_weighted
    mixed = otp.Sequences(frame.assign(w=[2.0, 2.0, 1.0, 1.0, 3.0]), sequence="id")
    with pytest.raises(DataError, match="the same in all steps of a sequence; the sequence of row 4"):
        read("sequences", mixed, weights="w")
    with pytest.raises(DataError, match="weights must be numbers, or name a column of a DataFrame; got 'v'"):
        read("sequences", otp.Sequences(frame, sequence="id"), weights="v")
    with pytest.raises(DataError, match="weights must be numbers, or name a column of a DataFrame; got 'w'"):
        read("sequences", [np.zeros(2), np.zeros(5)], weights="w")


def test_rows_that_are_alike_are_one_unless_every_row_is_wanted():
    merged, whole = read("table", TABLE), read("table", TABLE, every_row=True)
    assert (merged.batch.rows, whole.batch.rows) == (3, 6)
    assert sorted(merged.batch.weight[0].tolist()) == [1.0, 2.0, 3.0]
    weight = read("table", TABLE, weights=[1, 2, 3, 4, 5, 6]).batch.weight[0]
    expected = torch.tensor([1.0 + 4, 5, 2 + 3 + 6]).double()  # in the order of their size
    torch.testing.assert_close(weight.sort().values / weight.sum(), expected / expected.sum())


def test_data_that_are_adapted_serve_themselves_and_no_other_model():
    mine = model("table")
    data = TableData.of(mine, TABLE)
    assert recognise(mine, data, weights=None, device="cpu", every_row=False) is data
    with pytest.raises(DataError, match="data were adapted to another model than the one that is fitted"):
        read("table", data)


@pytest.mark.parametrize("data", [[np.zeros(3)], (np.zeros(3),), otp.Sequences(np.zeros((2, 3)))])
def test_sequences_need_a_lagged_edge(data):
    with pytest.raises(DataError, match="data are sequences, but the graph has no lagged edge"):
        read("table", data)


# -- arguments of a fit: read once, and refused where the data cannot honour them, before anything runs ---------------


RNG = np.random.default_rng(5)
NUMBERS = pd.DataFrame({"x": RNG.normal(size=40)})
STEPS = RNG.poisson(4.0, (6, 30))
WORDS = sparse.csr_array(RNG.poisson(1.0, (20, 7)))
PIXELS = RNG.random((30, 6))


def mixture(**changes):
    mechanisms = {"z": m.Categorical(2), "x": m.Normal()} | changes
    return otp.Model(otp.Graph([("z", "x")], hidden=["z"]), mechanisms)


def hmm(size=2):
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(size), "x": m.Poisson()})


def topics():
    graph = otp.Graph([("shares", "words")], hidden=["shares"])
    return otp.Model(graph, {"shares": m.Dirichlet(3), "words": m.Multinomial(7)})


def encoder():
    decoder = m.Decoder(torch.nn.Linear(2, 6), otp.mechanisms.Normal(6).space)
    graph = otp.Graph([("latent", "image")], hidden=["latent"])
    return otp.Model(graph, {"latent": m.Normal(2, loc=0.0, scale=1.0), "image": decoder})


def encoded():
    evaluation = Encoded(EncoderMap(torch.nn.Linear(6, 2), 2, (6,)), batch_size=8)
    return Method("encoded", Objective(push_forward=PushForward(0.1)), evaluation, Adam(steps=3))


KINDS = {
    "table": (mixture, lambda: NUMBERS, {}),
    "sequences": (hmm, lambda: STEPS, {}),
    "documents": (topics, lambda: otp.Documents(WORDS), {}),
    "images": (encoder, lambda: otp.Images(PIXELS), {"method": encoded()}),
}


def refused(kind, message, error=ModelError, **arguments):
    build, data, settings = KINDS[kind]
    model, steps = build(), []
    with pytest.raises(error, match=message):
        otp.fit(model, data(), **{**settings, **arguments}, callbacks=[steps.append])
    assert not model.is_fitted
    assert not steps


# -- what no data could honour ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"robust": "nonsense"}, "'outliers', 'misfit' or an otp.RobustOptions; got 'nonsense'"),
        ({"robust": 1}, "robust must be True, False, 'outliers', 'misfit' or an otp.RobustOptions; got 1"),
        ({"robust": None}, "robust must be True, False, 'outliers', 'misfit' or an otp.RobustOptions; got None"),
        ({"device": "tpu"}, "device must be 'cpu', 'cuda' or 'cuda:N'; got 'tpu'"),
        ({"device": "cpu:nonsense"}, "device must be 'cpu', 'cuda' or 'cuda:N'; got 'cpu:nonsense'"),
        ({"device": None}, "device must be 'cpu', 'cuda' or 'cuda:N'; got None"),
        ({"seed": -1}, "seed must be a non-negative integer below 2\\^63; got -1"),
        ({"seed": 2**63}, "seed must be a non-negative integer below 2\\^63; got 9223372036854775808"),
        ({"seed": True}, "seed must be a non-negative integer below 2\\^63; got True"),
        ({"seed": 1.0}, "seed must be a non-negative integer below 2\\^63; got 1.0"),
        ({"seed": "a"}, "seed must be a non-negative integer below 2\\^63; got 'a'"),
        ({"steps": 0}, "steps must be a whole number of at least 1; got 0"),
        ({"steps": 2.5}, "steps must be a whole number of at least 1; got 2.5"),
        ({"steps": True}, "steps must be a whole number of at least 1; got True"),
        ({"restarts": 0}, "restarts must be a whole number of at least 1; got 0"),
        ({"restarts": "many"}, "restarts must be a whole number of at least 1; got 'many'"),
        ({"method": 3}, "method must be 'auto'.* or a Method; got 3"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(kind, arguments, message):
    refused(kind, message, **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_is_not_there_is_refused(kind):
    refused(kind, "device 'cuda' was asked for, but no CUDA device is available", device="cuda")


def test_a_chain_takes_neither_nonsense_nor_a_device():
    """Both were once accepted without a word."""
    refused("sequences", "robust must be True|no CUDA device is available", robust="nonsense", device="cuda")


def test_the_largest_seed_serves():
    check_arguments(2**63 - 1, None, None, "cpu")
    otp.fit(mixture(), NUMBERS, seed=2**63 - 1, restarts=2)


def test_a_model_comes_first():
    with pytest.raises(ModelError, match=r"model must be an otp\.Model, and comes before the data; got DataFrame"):
        otp.fit(NUMBERS, mixture())


# -- what some data cannot honour -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("documents", {"weights": np.ones(20)}, r"weights is not for such data \(DocumentData\): leave it out"),
        ("images", {"weights": np.ones(30)}, r"weights is not for such data \(ImageData\): leave it out"),
        ("documents", {"robust": True}, r"robust is not for such data \(DocumentData\)"),
        ("images", {"robust": "outliers"}, r"robust is not for such data \(ImageData\)"),
        ("images", {"robust": "misfit", "method": "auto"}, r"robust is not for such data \(ImageData\)"),
    ],
)
def test_arguments_that_the_data_cannot_honour_are_refused(kind, arguments, message):
    refused(kind, message, **arguments)


def test_a_device_is_for_tables_and_images():
    given = {"weights": None, "device": "cpu", "every_row": False}
    kinds = [recognise(build(), data(), **given) for build, data, _ in KINDS.values()]
    assert [type(kind) for kind in kinds] == [TableData, SequenceData, DocumentData, ImageData]
    for kind, honoured in zip(kinds, (True, False, False, True), strict=True):
        if honoured:
            check_honoured(kind, weights=False, robust=False, device="cuda:0")
            continue
        with pytest.raises(ModelError, match=rf"device is not for such data \({type(kind).__name__}\)"):
            check_honoured(kind, weights=False, robust=False, device="cuda:0")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(5), "weights must have one entry for each of the 6 sequences"),
        (np.ones((6, 30)), "weights must have one entry for each of the 6 sequences"),
        (-np.ones(6), "weights must be finite and at least 0; found -1.0 in those of sequences"),
        (np.zeros(6), "weights must not all be 0"),
        (np.full(6, np.nan), "weights must be finite and at least 0; found nan"),
    ],
)
def test_weights_of_sequences_are_one_for_each(weights, message):
    refused("sequences", message, DataError, weights=weights)


def hidden_number():
    return otp.Model(otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"]), {"z": m.Normal(), "x": m.Normal()})


def half_rates(model):
    return np.exp(model.params()["x"]["log_rate"]).max()


def level(model):
    return abs(float(model.params()["x"]["loc"]))


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
@pytest.mark.parametrize(
    ("build", "low", "high", "method", "read"),
    [
        (hmm, RNG.poisson(3.0, (20, 20)), RNG.poisson(30.0, (20, 20)), otp.entropic(), half_rates),
        (hmm, RNG.poisson(3.0, (20, 20)), RNG.poisson(30.0, (20, 20)), otp.transport(), half_rates),
        (hmm, RNG.poisson(3.0, (20, 20)), RNG.poisson(30.0, (20, 20)), otp.paper(steps=150), half_rates),
        (hidden_number, RNG.normal(0, 1, (20, 20)), RNG.normal(9, 1, (20, 20)), otp.entropic(steps=40), level),
        (hidden_number, RNG.normal(0, 1, (20, 20)), RNG.normal(9, 1, (20, 20)), otp.paper(steps=150), level),
    ],
    ids=["chain", "windows", "pieces", "hidden numbers", "pieces of hidden numbers"],
)
def test_weights_of_sequences_count_or_are_refused(build, low, high, method, read):
    """Of two kinds of sequences the second weighs nothing: the fit must look like one of the first kind alone."""
    model, weights = build(), np.repeat([1.0, 0.0], 20)
    settings = {"method": method, "seed": 0, "restarts": 2, "weights": weights}
    refusal = ""
    try:
        otp.fit(model, np.concatenate([low, high]), **settings)
    except ModelError as error:
        refusal = str(error)
    assert "weights" in refusal if refusal else read(model) < (9.0 if build is hmm else 1.0)


# -- methods ----------------------------------------------------------------------------------------------------------

SWEEPS = Method("sweeps", Objective(eps=1.0), TopicSweeps(), EM(steps=3))
PAPER_TOPICS = Method("topics", Objective(push_forward=PushForward(1e-4)), PaperTopics(), Adam(steps=3))


@pytest.mark.parametrize(
    ("kind", "method", "message"),
    [
        ("table", SWEEPS, "a table is evaluated by ClosedForm or Drawn; got TopicSweeps"),
        ("table", PAPER_TOPICS, "a table is evaluated by ClosedForm or Drawn; got PaperTopics"),
        ("table", encoded(), "a table is evaluated by ClosedForm or Drawn; got Encoded"),
        ("table", "magic", "method must be 'auto'.*got 'magic'"),
        ("sequences", SWEEPS, "sequences are evaluated by ClosedForm or Drawn; got TopicSweeps"),
        ("sequences", encoded(), "sequences are evaluated by ClosedForm or Drawn; got Encoded"),
        ("sequences", "magic", "method must be 'auto'.*got 'magic'"),
        ("sequences", otp.entropic(eta=1.0), "need eps above 0 and no push-forward term"),
        ("sequences", otp.entropic(eps=0.0), "need eps above 0 and no push-forward term"),
        ("sequences", otp.entropic(reference="uniform"), "reference"),
        (
            "sequences",
            Method("own", Objective(push_forward=PushForward()), Drawn(backward=lambda *_: []), Adam()),
            "backward must build one",
        ),
        ("documents", otp.entropic(), "documents are evaluated by TopicSweeps or PaperTopics; got ClosedForm"),
        ("documents", otp.paper(), "documents are evaluated by TopicSweeps or PaperTopics; got Drawn"),
        ("documents", "magic", "method must be 'auto'.*got 'magic'"),
        ("images", "auto", r"images need a Method with Encoded\(...\).*got method='auto'"),
        ("images", otp.entropic(), "images are evaluated by Encoded; got ClosedForm"),
        ("images", SWEEPS, "images are evaluated by Encoded; got TopicSweeps"),
    ],
)
def test_methods_that_the_data_are_not_fitted_by_are_refused(kind, method, message):
    refused(kind, message, method=method)


@pytest.mark.parametrize(
    ("kind", "arguments", "message", "error"),
    [
        ("table", {"method": "paper"}, "robust='outliers' needs the likelihood; got 'paper'", ModelError),
        ("sequences", {"method": "transport"}, "robust='outliers' needs the likelihood", ModelError),
        ("sequences", {}, "leaves out whole sequences, of 30 at least; got 6", DataError),
    ],
)
def test_robust_fits_that_have_no_meaning_are_refused(kind, arguments, message, error):
    refused(kind, message, error, robust=True, **arguments)


def test_robust_sequences_with_hidden_numbers_are_refused():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Normal(), "x": m.Normal()})
    with pytest.raises(ModelError, match="for sequences whose hidden nodes are categories"):
        otp.fit(model, RNG.normal(size=(40, 10)), robust=True)


def test_images_have_one_start():
    refused(
        "images", "restarts must be at most 1 for such data .ImageData.: fit several seeds instead; got 2", restarts=2
    )
    assert plan_of("images", encoded(), restarts=1).restarts == 1


def test_misfit_is_a_method_of_its_own():
    refused("table", "robust='misfit' is a method of its own: leave method at 'auto'", robust="misfit", method="paper")


# -- what is left open ------------------------------------------------------------------------------------------------


def plan_of(kind, method="auto", **changes):
    build, data, _ = KINDS[kind]
    adapted = recognise(build(), data(), weights=None, device="cpu", every_row=False)
    return resolve(adapted, method, **{"robust": None, "steps": None, "restarts": None, "course": None, **changes})


def test_what_is_left_open_is_chosen_by_the_data():
    table, sequences, documents = (plan_of(kind) for kind in ("table", "sequences", "documents"))
    assert [plan.method.name for plan in (table, sequences, documents)] == ["likelihood"] * 3
    assert [plan.restarts for plan in (table, sequences, documents)] == [None] * 3  # what the problem asks for
    assert isinstance(documents.method.evaluation, TopicSweeps)
    assert sequences.course != table.course
    assert plan_of("images", encoded()).restarts is None
    assert table.leaves_out is None


def test_what_is_said_is_taken():
    course = otp.SearchSchedule(finalists=1)
    plan = plan_of("table", otp.paper(steps=7), steps=5, restarts=2, course=course)
    assert (plan.method.steps, plan.restarts, plan.course) == (5, 2, course)
    assert plan_of("table", "paper").method == otp.paper()
    assert plan_of("table", "transport", steps=9).method == otp.transport(steps=9)
    few = otp.RobustOptions(most_dropped=0.1)
    assert plan_of("table", robust=few).leaves_out is few


def test_misfit_reads_whether_weights_are_given():
    free = plan_of("table", robust="misfit")
    assert (free.method.name, free.method.evaluation.reference, free.leaves_out) == ("misfit", "model", None)
    assert free.method.objective.eps == 0.75
    given = recognise(
        mixture(z=m.Categorical(2, probs=[0.3, 0.7])), NUMBERS, weights=None, device="cpu", every_row=False
    )
    told = resolve(given, "auto", robust="misfit", steps=None, restarts=None, course=None)
    assert told.method.evaluation.reference == "uniform"


def test_steps_of_a_fit_are_those_of_its_optimiser():
    with pytest.warns(otp.ConvergenceWarning, match="still falling after 2 steps"):
        result = otp.fit(mixture(), NUMBERS, steps=2, restarts=1)
    assert result.method.optimiser == Deterministic(steps=2)
    assert len(result.history) == 2
    assert isinstance(result.method.evaluation, ClosedForm)


def test_the_earlier_name_of_maximum_likelihood_is_accepted_with_a_warning():
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    with pytest.warns(DeprecationWarning, match="method='entropic' is called 'likelihood' now"):
        result = otp.fit(model, pd.DataFrame({"x": [1.0, 2.0, 4.0, 7.0]}), method="entropic")
    assert result.method == otp.engine.likelihood()
