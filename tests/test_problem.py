"""Problems are values: evaluating them changes nothing, weights are repetitions, and parts are what they say."""

import hashlib
from dataclasses import dataclass, fields, is_dataclass, replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward import EncoderMap
from otpdag.data import Schema, encode, random_part
from otpdag.data.parts import LocalParts
from otpdag.data.sequences import SequenceBatch
from otpdag.engine import Adam, Layout, Method
from otpdag.engine.data_kind import lay_out_rows, one_start, table_problem
from otpdag.engine.document_data import topic_method
from otpdag.engine.fit import recognise
from otpdag.engine.optimiser import Run
from otpdag.engine.robust import CappedProblem, RobustOptions
from otpdag.errors import ModelError
from otpdag.estimators import VectorQuantizedAutoencoder
from otpdag.learned.autoencoder import AutoencoderProblem, CodebookProblem
from otpdag.learned.paper_topics import PaperTopicsProblem
from otpdag.learned.sampled import DrawnRows, DrawnSteps, Pools, StreamedRows
from otpdag.learned.sequence_problem import NumberProblem
from otpdag.likelihood.chain_problem import ChainProblem, chain_problem
from otpdag.likelihood.grouped_rows import GroupProblem
from otpdag.likelihood.linear_normal import MomentProblem
from otpdag.likelihood.partitioned_problem import PartitionedProblem
from otpdag.likelihood.row_problem import GraphProblem
from otpdag.likelihood.state_problem import StateProblem
from otpdag.likelihood.topic_problem import PairProblem, TopicProblem
from otpdag.likelihood.unrolled import WindowProblem, WindowRows
from otpdag.matching.transport_rows import TransportRows
from otpdag.matching.windows import TransportWindows
from otpdag.noise import Streams
from otpdag.objective import Encoded
from otpdag.problem import Minibatched, Problem, Units, units_of
from otpdag.settings import Objective, PushForward
from otpdag.spaces import Real

FEW_POINTS = otp.transport(divergence=otp.divergences.SlicedWasserstein(20, p=1.0), points=64)

# -- models -----------------------------------------------------------------------------------------------------------


def table_model(hidden):
    mechanisms = {"x": m.Normal(), "n": m.Poisson()}
    graph = otp.Graph([(h, o) for o in mechanisms for h in hidden], hidden=list(hidden))
    return otp.Model(graph, {**hidden, **mechanisms})


def table(rows=40, missing=0.15):
    rng = np.random.default_rng(1)
    state = rng.integers(0, 2, rows)
    frame = pd.DataFrame({"x": rng.normal(2.0 * state), "n": rng.poisson(2.0 + 3.0 * state)}).astype(float)
    return frame.mask(rng.random(frame.shape) < missing)


def hmm(size=3):
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(size), "x": m.Poisson()})


def counted_model():
    """A count in the middle of a chain: where it is missing, it is summed along the graph."""
    return otp.Model(otp.Graph([("a", "n"), ("n", "y")]), {"a": m.Categorical(2), "n": m.Poisson(), "y": m.Normal()})


def counted_table():
    rng = np.random.default_rng(6)
    a = rng.integers(0, 2, 40)
    n = rng.poisson(np.where(a == 1, 4.0, 2.0)).astype(float)
    frame = pd.DataFrame({"a": a, "n": n, "y": 0.5 * n + rng.normal(size=40)})
    return frame.mask(rng.random(frame.shape) < 0.15)


def lines_model():
    """A hidden number with three linear children, and another number."""
    graph = otp.Graph([("u", "x"), ("u", "y"), ("a", "y"), ("u", "w")], hidden=["u"])
    return otp.Model(graph, {name: m.Normal() for name in "auxyw"})


def lines_table():
    rng = np.random.default_rng(7)
    u, a = rng.normal(size=60), rng.integers(0, 2, 60)
    frame = pd.DataFrame({name: u + rng.normal(size=60) for name in "xyw"}).mask(rng.random((60, 3)) < 0.1)
    return frame.assign(a=a)


def state_space(switching=False):
    graph = otp.Graph(
        [otp.lag("z", "z"), ("z", "x"), *([otp.lag("s", "s"), ("s", "z")] if switching else [])],
        hidden=["z", *(["s"] if switching else [])],
    )
    return otp.Model(graph, {"z": m.Normal(), "x": m.Normal(), **({"s": m.Categorical(2)} if switching else {})})


def counts():
    x = np.random.default_rng(2).poisson(np.repeat([[2.0], [8.0], [20.0]], 4, 0), (12, 15)).astype(float)
    x[1, 3:5] = np.nan
    return x


def series():
    return np.random.default_rng(3).normal(size=(6, 12)).cumsum(1)


def autoregression():
    return otp.Model(otp.Graph([otp.lag("x", "x")]), {"x": m.Normal()})


def series_with_gaps():
    return np.where(np.random.default_rng(8).random((6, 12)) < 0.15, np.nan, series())


def schools_model(child):
    graph = otp.Graph([("x", "y"), ("u", "y")], hidden=["u"])
    return otp.Model(graph, {"x": m.Normal(), "u": m.Normal(group="school"), "y": child})


def pupils():
    rng = np.random.default_rng(9)
    x, school = rng.normal(size=40), np.repeat(np.arange(8), 5)
    y = rng.poisson(np.exp(0.5 * x + rng.normal(size=8)[school])).astype(float)
    return pd.DataFrame({"x": x, "y": y, "school": school}).mask(rng.random((40, 3)) < [0.1, 0.1, 0.0])


def topic_model():
    graph = otp.Graph([("shares", "words")], hidden=["shares"])
    return otp.Model(graph, {"shares": m.Dirichlet(3), "words": m.Multinomial(8)})


def documents():
    return otp.Documents(sparse.csr_array(np.random.default_rng(4).poisson(1.2, (30, 8))))


def encoder_model():
    graph = otp.Graph([("latent", "image")], hidden=["latent"])
    decoder = m.Decoder(torch.nn.Linear(2, 6), Real(6))
    return otp.Model(graph, {"latent": m.Normal(2, loc=0.0, scale=1.0), "image": decoder})


def encoded():
    evaluation = Encoded(EncoderMap(torch.nn.Linear(6, 2), 2, (6,)), batch_size=8)
    return Method("encoded", Objective(push_forward=PushForward(0.1)), evaluation, Adam(steps=3))


def images():
    return otp.Images(np.random.default_rng(5).random((30, 6)))


LABEL, NUMBER = {"z": m.Categorical(2)}, {"u": m.Normal()}
TWO = {"u": m.Normal(), "v": m.Normal()}

MADE = {
    "rows": (lambda: table_model(LABEL), table, otp.entropic(eps=0.9), GraphProblem),
    "rows by states": (lambda: table_model(LABEL), table, otp.entropic(), StateProblem),
    "rows on a grid": (lambda: table_model(NUMBER), table, otp.entropic(), GraphProblem),
    "rows with two numbers": (lambda: table_model(TWO), table, otp.entropic(), GraphProblem),
    "rows pushed forward": (lambda: table_model(LABEL), table, otp.entropic(eta=0.5), GraphProblem),
    "rows compared": (lambda: table_model(LABEL), table, FEW_POINTS, TransportRows),
    "rows summed up": (lines_model, lines_table, otp.entropic(), MomentProblem),
    "rows along the graph": (counted_model, counted_table, otp.entropic(), GraphProblem),
    "drawn rows": (lambda: table_model(LABEL | NUMBER), table, otp.paper(batch_size=16), DrawnRows),
    "abducted rows": (lambda: table_model(NUMBER), table, otp.transport("backward", batch_size=16), DrawnRows),
    "chain": (hmm, counts, otp.entropic(), ChainProblem),
    "windows with gaps": (autoregression, series_with_gaps, otp.entropic(), WindowProblem),
    "windows": (hmm, counts, FEW_POINTS, TransportWindows),
    "normal groups": (lambda: schools_model(m.Normal()), pupils, otp.entropic(), GroupProblem),
    "groups of counts": (lambda: schools_model(m.Poisson()), pupils, otp.entropic(), GroupProblem),
    "hidden numbers": (state_space, series, otp.entropic(), NumberProblem),
    "switching": (lambda: state_space(switching=True), series, otp.entropic(), NumberProblem),
    "steps": (hmm, counts, otp.paper(batch_size=64), DrawnSteps),
    "topics": (topic_model, documents, topic_method("likelihood", documents=30), TopicProblem),
    "pairs": (topic_model, documents, topic_method("pairs", documents=30), PairProblem),
    "paper's topics": (topic_model, documents, topic_method("paper", documents=30, steps=1), PaperTopicsProblem),
    "auto-encoder": (encoder_model, images, encoded(), AutoencoderProblem),
}
OTHERS = {"codebook": CodebookProblem, "warm-up": CodebookProblem, "capped": CappedProblem}
OTHERS |= {"parts": PartitionedProblem, "streamed rows": StreamedRows}


def made(name, weights=None, replicas=2):
    build, data, method, _ = MADE[name]
    model = build()
    kind = recognise(model, data(), weights=weights, device="cpu", every_row=False)
    layout = kind.lay_out(method, 0)
    problem = kind.problem(layout, method, 0)
    points = kind.starts(layout, problem, 0, range(replicas))
    return problem.laid_out_for(points), points


def problem_of(name):
    if name in MADE:
        return made(name, replicas=1 if MADE[name][3] in (AutoencoderProblem, PaperTopicsProblem) else 2)
    if name in ("codebook", "warm-up"):
        pixels = np.random.default_rng(6).random((24, 8, 8)).astype(np.float32)
        estimator = VectorQuantizedAutoencoder(n_codes=4, n_epochs=5, batch_size=12).fit(pixels)
        problem = estimator.result_.problem
        return replace(problem, quantizes=name == "codebook"), estimator.result_.restarts[0].point.unsqueeze(0)
    problem, points = made("rows")
    if name == "parts":
        problem, points = made("rows with two numbers")
        parts = LocalParts(lambda: (problem.subset(rows) for rows in torch.arange(problem.rows).split(20)))
        whole = PartitionedProblem(problem, parts, problem.rows)
        return whole.laid_out_for(points), points
    if name == "streamed rows":
        problem, points = made("drawn rows")
        pools = Pools(problem.batch.first(20), problem.batch.take, problem.rows, number=3, seed=0)
        return StreamedRows(problem, pools), points
    options = RobustOptions(sample=100)
    return CappedProblem(problem, None, options, 0).laid_out_for(points), points


# -- values -----------------------------------------------------------------------------------------------------------


def fingerprint(value):
    """All that an object holds, as text: tensors by their bytes; caches, which no one sets or shows, are left out."""
    if isinstance(value, torch.Tensor):
        held = value.detach().cpu()
        return f"tensor {held.dtype} {fingerprint(held.contiguous().numpy())}"
    if isinstance(value, np.ndarray):
        return f"array {value.shape} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
    if sparse.issparse(value):
        return f"sparse {[fingerprint(part) for part in (value.data, value.indices, value.indptr)]}"
    if isinstance(value, torch.nn.Module):
        return f"module {fingerprint(value.state_dict())} {value.training}"
    if is_dataclass(value):
        return {
            field.name: fingerprint(getattr(value, field.name)) for field in fields(value) if field.init and field.repr
        }
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(key): fingerprint(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [fingerprint(one) for one in value]
    if hasattr(value, "__dict__") and not callable(value):
        return {key: fingerprint(one) for key, one in vars(value).items()}
    return repr(value)


def evaluations(problem, points):
    """Everything that a problem can be asked: names and values, or that it has none."""
    asked = {
        "loss": lambda: problem.loss(points).total,
        "sampled": lambda: problem.sampled(points, Streams(range(len(points))), 0.4).total,
        "update": lambda: problem.update(points[:1])[0],
        "refine": lambda: (moved := problem.refine(points[:1])) and (moved.what, fingerprint(moved.point)),
        "unit_losses": lambda: problem.unit_losses(points),
        "subset": lambda: problem.subset(7, coarse=True).rows,
        "laid_out_for": lambda: fingerprint(problem.laid_out_for(points)),
        "reweighted": lambda: fingerprint(problem.reweighted(torch.full((1, problem.weight.shape[1]), 2.0))),
        "simulated": lambda: problem.simulated(points[:1], 20, 1).rows,
        "in_units": lambda: problem.in_units().rows,
    }
    found = {}
    for name, ask in asked.items():
        try:
            found[name] = fingerprint(ask())
        except (ModelError, AttributeError) as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("name", [*MADE, *OTHERS])
def test_evaluating_a_problem_changes_nothing(name):
    problem, points = problem_of(name)
    assert type(problem) is (MADE[name][3] if name in MADE else OTHERS[name])
    before = fingerprint(problem)
    assert len(str(before)) > 200  # it does look inside
    first = evaluations(problem, points)
    assert fingerprint(problem) == before
    assert evaluations(problem, points) == first
    assert fingerprint(problem) == before
    values = [value for key, value in first.items() if key in ("loss", "sampled", "update")]
    assert any(str(value).startswith("tensor") for value in values)


def tensors_in(value, seen=None):
    """All tensors that an object holds, however deep."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, str | bytes | torch.nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (tensor for one in value.values() for tensor in tensors_in(one, seen))
    elif isinstance(value, list | tuple):
        yield from (tensor for one in value for tensor in tensors_in(one, seen))
    elif hasattr(value, "__dict__") and not callable(value):
        yield from tensors_in(vars(value), seen)


@pytest.mark.parametrize("name", [*MADE, *OTHERS])
def test_only_losses_have_gradients_where_a_point_asks_for_them(name):
    """Else layouts and layouts' layouts would hold all that was computed for them, and a fit's memory would grow."""
    problem, points = problem_of(name)
    leaf = (points + 0.1).requires_grad_(True)
    asked = {
        "refine": lambda: (moved := problem.refine(leaf[:1])) and (moved.problem, moved.loss),
        "laid out": lambda: problem.laid_out_for(leaf),
        "unit losses": lambda: problem.unit_losses(leaf),
        "simulated": lambda: problem.simulated(leaf[:1], 20, 1),
        "update": lambda: problem.update(leaf[:1])[0],
        "metric": lambda: problem.metric(leaf),
        "notes": lambda: problem.notes(leaf),
    }
    for what, ask in asked.items():
        try:
            found = ask()
        except (ModelError, AttributeError):
            continue
        assert not [one for one in tensors_in(found) if one.requires_grad], what


def test_every_problem_is_in_this_file():
    def below(one):
        return {one, *(lower for other in one.__subclasses__() for lower in below(other))}

    known = {case[3] for case in MADE.values()} | set(OTHERS.values())
    known = known - {GraphProblem} | {WindowRows}  # what windows are made of
    leaves = {one for one in below(Problem) if not one.__subclasses__() and one.__module__.startswith("otpdag.")}
    assert leaves == known


def test_a_fingerprint_sees_a_changed_number():
    problem, _ = made("rows")
    before = fingerprint(problem)
    problem.batch.weight[0, 0] += 1e-9
    assert fingerprint(problem) != before


@pytest.mark.parametrize("name", [*MADE, *OTHERS])
def test_a_problem_says_what_it_is_not_evaluated_by(name):
    problem, points = problem_of(name)
    answers = evaluations(problem, points)
    stochastic = isinstance(problem, Minibatched)
    if stochastic:
        assert "is drawn anew in every step: use otp.engine.Adam" in answers["loss"]
        return
    with pytest.raises(ModelError, match=r"is evaluated in closed form: use otp\.engine"):
        Adam(steps=2).run(Run(problem, points, 2, seeds=range(len(points))), lambda progress: False)
    if not isinstance(problem, TopicProblem | PairProblem | GraphProblem | MomentProblem | StateProblem | ChainProblem):
        assert "has no closed-form updates" in answers["update"]


# -- weights ----------------------------------------------------------------------------------------------------------


def loss_and_gradient(problem, points):
    leaf = points.clone().requires_grad_(True)
    loss = problem.loss(leaf).total
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), gradient


def laid_out(model, frame, method, weights=None, like=None):
    """A problem of a table, in the units of another if that is given."""
    batch = encode(frame, Schema.of(model.spaces, model.graph, frame), hidden=model.graph.hidden, weights=weights)
    layout = like or lay_out_rows(model.structure, batch, method, 0)
    return table_problem(layout, batch, method, 0), layout, batch


def starts(layout, batch, many=2):
    return torch.cat([one_start(layout, batch, number, first=number == 0) for number in range(many)])


@pytest.mark.parametrize("hidden", [LABEL, NUMBER, LABEL | NUMBER], ids=["label", "number", "label and number"])
@pytest.mark.parametrize(
    "method",
    [otp.entropic(), otp.entropic(eps=0.6), otp.entropic(eta=0.7)],
    ids=["likelihood", "harder", "pushed forward"],
)
def test_weights_of_rows_are_repetitions(hidden, method):
    model, frame = table_model(hidden), table()
    problem, layout, batch = laid_out(model, frame, method)
    points = starts(layout, batch)
    times = np.random.default_rng(7).integers(0, 4, (2, len(frame)))
    found = loss_and_gradient(problem.reweighted(torch.as_tensor(times, dtype=torch.float64)), points)
    for replica in range(2):
        repeated = frame.loc[frame.index.repeat(times[replica])].reset_index(drop=True)
        other, *_ = laid_out(model, repeated, method, like=layout)
        alone = loss_and_gradient(other, points[replica : replica + 1])
        torch.testing.assert_close(found[0][replica], alone[0][0], rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(found[1][replica], alone[1][0], rtol=1e-7, atol=1e-9)
    plain = problem.loss(points).total
    assert not torch.allclose(plain, found[0])
    torch.testing.assert_close(problem.reweighted(torch.ones(1, len(frame))).loss(points).total, plain)


def test_weights_of_compared_rows_are_repetitions():
    """Units, directions and points stay as the data chose them; rows that count twice stand there twice."""
    model, frame = table_model(LABEL), table(missing=0.0)
    problem, layout, batch = laid_out(model, frame, FEW_POINTS)
    times = np.random.default_rng(7).integers(0, 4, len(frame))
    points = starts(layout, batch)
    weighted = problem.laid_out_for(points).reweighted(torch.as_tensor(times, dtype=torch.float64).unsqueeze(0))
    repeated = batch.take(torch.as_tensor(np.repeat(np.arange(len(frame)), times)))
    rows = replace(weighted.compared, rows=problem.columns.of_values(repeated.values), weight=repeated.weight)
    expected = replace(weighted, compared=rows).loss(points).total
    torch.testing.assert_close(weighted.loss(points).total, expected)
    assert not torch.allclose(expected, problem.laid_out_for(points).loss(points).total)


@pytest.mark.parametrize("name", ["rows", "rows compared", "chain"])
def test_weights_multiply(name):
    """Weighting twice is weighting by the product, and the problem's own weights say so."""
    problem, points = made(name)
    units = problem.weight.shape[1]
    generator = torch.Generator().manual_seed(0)
    one, other = (0.5 + torch.rand(1, units, generator=generator, dtype=torch.float64) for _ in range(2))
    twice, once = problem.reweighted(one).reweighted(other), problem.reweighted(one * other)
    torch.testing.assert_close(twice.loss(points).total, once.loss(points).total)
    torch.testing.assert_close(once.weight, problem.weight * one * other)


def sequences(lengths, seed=0, missing=0.1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.poisson(torch.full((1, sum(lengths), 1), 6.0), generator=generator).double()
    seen = torch.rand(x.shape, generator=generator) > missing
    steps = otp.data.Batch({"x": torch.where(seen, x, 0.0)}, {"x": seen}, torch.ones(1, sum(lengths)).double())
    return SequenceBatch(steps, torch.tensor(lengths))


def chain_points(structure, replicas):
    layout = Layout.of(structure)
    size = sum(int(np.prod(shape)) for shape in layout.shapes.values())
    generator = torch.Generator().manual_seed(1)
    return layout.shapes, torch.randn(replicas, size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("eps", [1.0, 0.6])
def test_weights_of_sequences_are_repetitions(eps):
    structure, batch = hmm().structure, sequences([5, 1, 9, 4, 7])
    shapes, points = chain_points(structure, 2)
    problem = chain_problem(structure, batch, shapes, eps, 0)
    times = torch.tensor([[2, 1, 0, 3, 1], [1, 0, 4, 1, 2]])
    found = loss_and_gradient(problem.reweighted(times.double()), points)
    for replica in range(2):
        repeated = batch.take(torch.arange(5).repeat_interleave(times[replica]))
        other = chain_problem(structure, repeated, shapes, eps, 0)
        alone = loss_and_gradient(other, points[replica : replica + 1])
        torch.testing.assert_close(found[0][replica], alone[0][0])
        torch.testing.assert_close(found[1][replica], alone[1][0])
    shared = loss_and_gradient(problem.reweighted(times[:1].double()), points)  # one set of weights for all replicas
    torch.testing.assert_close(shared[0][0], found[0][0])
    torch.testing.assert_close(shared[1][0], found[1][0])
    equal = problem.reweighted(torch.full((1, 5), 3.0))
    torch.testing.assert_close(equal.loss(points).total, problem.loss(points).total)


def test_weights_given_by_the_user_are_repetitions_of_sequences():
    x = counts()
    times = np.array([1, 2, 1, 1, 3, 1, 1, 2, 1, 1, 2, 1])
    models = [hmm(), hmm()]
    settings = {"seed": 0, "restarts": 1, "method": otp.entropic(steps=200)}
    otp.fit(models[0], x, weights=times, **settings)
    otp.fit(models[1], np.repeat(x, times, 0), **settings)
    np.testing.assert_allclose(models[0].params()["x"]["log_rate"], models[1].params()["x"]["log_rate"], atol=1e-4)
    np.testing.assert_allclose(models[0].params()["z"]["probs"], models[1].params()["z"]["probs"], atol=1e-3)


# -- units ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows", "rows on a grid", "rows with two numbers", "chain"])
def test_losses_of_units_add_up_to_the_loss(name):
    size = 12 if name == "chain" else 40
    weights = np.random.default_rng(8).uniform(0.5, 2.0, size)
    problem, points = made(name, weights=weights)
    losses = problem.unit_losses(points)
    assert losses.shape == (2, size)
    assert not losses.requires_grad
    total = problem.weight * (problem.batch.lengths if name == "chain" else 1)
    kept = problem.weight[0] / problem.weight[0].sum()
    given = weights / weights.sum()  # rows and sequences stand in an order of their own
    np.testing.assert_allclose(np.sort(kept), np.sort(given))
    torch.testing.assert_close(
        (total * losses).sum(-1) / total.sum(-1), problem.loss(points).total, rtol=1e-8, atol=1e-9
    )


def test_losses_of_sequences_of_many_lengths_are_those_of_each_alone():
    structure, batch = hmm().structure, sequences([5, 1, 9, 4, 7])
    shapes, points = chain_points(structure, 2)
    losses = chain_problem(structure, batch, shapes, 1.0, 0).unit_losses(points)
    for number in range(5):
        alone = chain_problem(structure, batch.take(torch.tensor([number])), shapes, 1.0, 0)
        torch.testing.assert_close(losses[:, number], alone.loss(points).total)


def test_rows_that_the_model_rules_out_have_a_finite_loss():
    model = otp.Model(otp.Graph([("z", "n")], hidden=["z"]), {"z": m.Categorical(2), "n": m.Poisson()})
    problem, layout, batch = laid_out(model, pd.DataFrame({"n": [0, 1, 2, 3, 900, 4]}), otp.entropic())
    points = starts(layout, batch, 1)
    assert torch.isfinite(problem.unit_losses(torch.full_like(points, -400.0))).all()


# -- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows", "rows on a grid", "chain"])
def test_a_part_of_given_units_is_these_units(name):
    size = 12 if name == "chain" else 40
    weights = np.random.default_rng(8).uniform(0.5, 2.0, size)
    problem, points = made(name, weights=weights)
    chosen = torch.tensor([3, 7, 1, 10])
    part = problem.subset(chosen)
    torch.testing.assert_close(part.weight, problem.weight[:, chosen])
    losses = problem.unit_losses(points)[:, chosen]
    total = part.weight * (part.batch.lengths if name == "chain" else 1)
    found = part.laid_out_for(points).loss(points).total
    torch.testing.assert_close((total * losses).sum(-1) / total.sum(-1), found, rtol=1e-6, atol=1e-7)
    assert part.rows == (4 * 15 if name == "chain" else 4)


@pytest.mark.parametrize("name", ["rows", "chain"])
def test_a_part_of_a_reweighted_problem_keeps_the_weights(name):
    problem, points = made(name)
    units = problem.weight.shape[1]
    factors = 0.5 + torch.rand(1, units, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    chosen = torch.tensor([3, 7, 1, 10])
    part, other = problem.reweighted(factors).subset(chosen), problem.subset(chosen).reweighted(factors[:, chosen])
    torch.testing.assert_close(part.loss(points).total, other.loss(points).total)


@pytest.mark.parametrize("name", ["rows", "chain", "windows", "hidden numbers"])
def test_a_random_part_is_the_same_every_time_and_all_of_it_if_that_is_few(name):
    problem, points = made(name)
    whole = problem.subset(10**6)
    assert whole.rows == problem.rows
    if name != "windows":
        torch.testing.assert_close(whole.loss(points).total, problem.loss(points).total)
    first, second = problem.subset(60), problem.subset(60)
    assert first.rows <= problem.rows
    torch.testing.assert_close(first.loss(points).total, second.loss(points).total, rtol=0, atol=0)


def test_random_parts():
    assert random_part(10, 10, seed=0) is None
    some = random_part(10, 4, seed=0)
    assert len(set(some.tolist())) == 4
    assert torch.equal(some, random_part(10, 4, seed=0))
    assert any(not torch.equal(some, random_part(10, 4, seed=seed)) for seed in range(1, 5))
    given = torch.tensor([2, 2, 5])
    assert random_part(10, given, seed=0) is given


# -- simulated data ---------------------------------------------------------------------------------------------------


def test_simulated_rows_are_the_models_with_the_datas_gaps():
    model, frame = table_model(LABEL), table(400, missing=0.3)
    problem, layout, batch = laid_out(model, frame, otp.entropic())
    points = starts(layout, batch, 1)
    sample = problem.simulated(points, 3000, 1)
    assert sample.rows == 3000
    for node in ("x", "n"):
        share = float(sample.batch.mask[node].double().mean())
        assert share == pytest.approx(float(batch.mask[node].double().mean()), abs=0.04)
    again = problem.simulated(points, 3000, 1)
    torch.testing.assert_close(sample.loss(points).total, again.loss(points).total, rtol=0, atol=0)
    assert not torch.allclose(
        sample.loss(points).total, problem.simulated(points, 3000, 2).loss(points).total, rtol=1e-9
    )
    moved = points + 0.7  # at other parameters the same rows cost more: they are the model's own
    assert float(sample.loss(moved).total) > float(sample.loss(points).total)


def test_simulated_sequences_are_the_models_with_the_datas_lengths():
    structure, batch = hmm().structure, sequences([5, 1, 9, 4, 7, 6] * 20, missing=0.3)
    shapes, points = chain_points(structure, 1)
    problem = chain_problem(structure, batch, shapes, 1.0, 0)
    sample = problem.simulated(points, 4000, 1)
    assert isinstance(sample, ChainProblem)
    assert set(sample.batch.lengths.tolist()) <= {5, 1, 9, 4, 7, 6}
    assert len(sample.batch.lengths) == 4000
    assert float(sample.batch.steps.mask["x"].double().mean()) == pytest.approx(0.7, abs=0.1)
    assert float(sample.loss(points + 0.7).total) > float(sample.loss(points).total)
    few = chain_problem(structure, sequences([5, 4]), shapes, 1.0, 0).simulated(points, 4000, 1)
    assert len(few.batch.lengths) == 4000


def test_few_sequences_are_cut_in_units():
    structure = hmm().structure
    shapes, points = chain_points(structure, 1)
    few = chain_problem(structure, sequences([300, 400]), shapes, 1.0, 0)
    units = few.in_units()
    assert len(units.batch.lengths) >= 30
    assert units.rows == few.rows
    assert float(units.loss(points).total) == pytest.approx(float(few.loss(points).total), abs=0.2)
    many = chain_problem(structure, sequences([5] * 40), shapes, 1.0, 0)
    assert many.in_units() is many


@dataclass(frozen=True)
class Bare(Problem):
    """A problem that says nothing."""

    @property
    def rows(self):
        return 1


class Weighed(Bare, Units):
    """Units of which nothing else is known."""

    @property
    def weight(self):
        return torch.ones(1, 1)

    def reweighted(self, factors):
        return self


def test_what_a_problem_does_not_have_is_said():
    bare, units = Bare(), Weighed()
    assert units_of(units) is units
    assert (units.is_likelihood, units.is_sum, units.curvature(torch.zeros(1, 1))) == (False, False, None)
    for ask, message in (
        (lambda: units_of(bare), "Bare has no rows that could be weighted"),
        (lambda: units.unit_losses(torch.zeros(1, 1)), "Weighed has no loss of single rows"),
        (lambda: units.simulated(torch.zeros(1, 1), 5, 0), "Weighed cannot be simulated"),
        (lambda: bare.loss(torch.zeros(1, 1)), "Bare is drawn anew in every step: use otp.engine.Adam"),
    ):
        with pytest.raises(ModelError, match=message):
            ask()
    assert bare.refine(torch.zeros(1, 1)) is None
    assert bare.subset(3) is bare
