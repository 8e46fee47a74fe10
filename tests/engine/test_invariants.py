"""Whatever the table: a fit is finite or failed by name, its loss is its model's, rows have no order, files agree."""

import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.errors import OtpdagError

ROWS = 40
QUICK = otp.SearchSchedule(short_rows=30, short_steps=4, finalists=2, finalist_steps=2)
METHODS = {
    "entropic": otp.entropic(steps=12, sums=otp.backward.SumSizes(grid=16, prior_draws=32)),
    "transport": otp.transport(steps=6, points=128),
}
FAMILIES = {"normal": m.Normal, "count": m.Poisson, "positive": m.Gamma, "category": lambda: m.Categorical(3)}
PROFILE = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, print_blob=False)


@st.composite
def problems(draw):
    """A model of two to four nodes, a table with odd columns and gaps, and weights or none."""
    names = [f"n{i}" for i in range(draw(st.integers(2, 4)))]
    edges = [(one, other) for j, other in enumerate(names) for one in names[:j] if draw(st.booleans())]
    hidden = [name for name in names[:-1] if draw(st.integers(0, 4)) == 0]
    kinds = {name: draw(st.sampled_from(sorted(FAMILIES))) for name in names}
    kinds |= {name: draw(st.sampled_from(["normal", "category"])) for name in hidden}
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    table = {}
    for name in [name for name in names if name not in hidden]:
        table[name] = _column(draw, kinds[name], rng, [table[other] for other in table if kinds[other] == "normal"])
    frame = pd.DataFrame(table)
    if draw(st.booleans()):
        frame = frame.mask(rng.random(frame.shape) < 0.15)
        frame.iloc[:4] = pd.DataFrame(table).iloc[:4]  # every column has something, and all categories
    weights = rng.uniform(0.2, 3.0, ROWS) if draw(st.booleans()) else None
    graph = otp.Graph(edges, nodes=names, hidden=hidden)
    return graph, kinds, frame, weights


def _column(draw, kind, rng, numbers):
    scale = 10.0 ** draw(st.integers(-8, 8))
    odd = draw(st.sampled_from(["", "", "constant", "collinear", "rare"]))
    if kind == "category":
        return np.r_[0, 1, 2, rng.integers(0, 2 if odd == "rare" else 3, ROWS - 3)].astype(float)
    if kind == "count":
        return np.full(ROWS, 2.0) if odd == "constant" else rng.poisson(3.0, ROWS).astype(float)
    if kind == "positive":
        return scale * (np.full(ROWS, 2.0) if odd == "constant" else rng.gamma(2.0, size=ROWS))
    if odd == "constant":
        return np.full(ROWS, scale)
    if odd == "collinear" and numbers:
        return -2.0 * numbers[0] + scale
    return scale * (rng.normal(size=ROWS) + draw(st.integers(-2, 2)))


def fitted(problem, method, order=None):
    graph, kinds, frame, weights = problem
    model = otp.Model(graph, {name: FAMILIES[kind]() for name, kind in kinds.items()})
    order = np.arange(ROWS) if order is None else order
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otp.ConvergenceWarning)
        result = otp.fit(
            model,
            frame.iloc[order].reset_index(drop=True),
            method=METHODS[method],
            weights=None if weights is None else weights[order],
            restarts=2 if graph.hidden and method != "transport" else 1,  # transport begins where others end
            course=QUICK,
            seed=1,
        )
    return model, result


def numbers_of(model):
    return np.concatenate([value.ravel() for own in model.params().values() for value in own.values()])


@settings(PROFILE, max_examples=5)
@given(problems(), st.sampled_from(["entropic", "entropic", "transport"]))
def test_whatever_the_table(tmp_path_factory, problem, method):
    check(tmp_path_factory, problem, method)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(PROFILE, max_examples=200)
@given(problems(), st.sampled_from(["entropic", "entropic", "transport"]))
def test_whatever_the_table_many_times(tmp_path_factory, problem, method):
    check(tmp_path_factory, problem, method)


def check(tmp_path_factory, problem, method):
    try:
        model, result = fitted(problem, method)
    except OtpdagError:  # a named refusal is an answer
        return
    assert np.isfinite(numbers_of(model)).all()
    assert np.isfinite(result.loss) or result.status.failed

    # the order of the rows means nothing
    order = np.random.default_rng(3).permutation(ROWS)
    turned, again = fitted(problem, method, order)
    np.testing.assert_allclose(numbers_of(turned), numbers_of(model), rtol=1e-6, atol=0)
    assert again.loss == result.loss or result.status.failed

    # a file holds the model
    path = tmp_path_factory.mktemp("saved") / "model.otp"
    model.save(path)
    read = otp.load(path)
    np.testing.assert_array_equal(numbers_of(read), numbers_of(model))
    if method != "entropic" or result.status.failed:
        return
    score = model.score(problem[2], kind="likelihood")
    assert read.score(problem[2], kind="likelihood") == score
    graph, kinds, frame, weights = problem
    has_grids = any(kinds[name] != "category" for name in graph.hidden) or bool(frame.isna().to_numpy().any())
    if weights is None and not has_grids:  # what is summed exactly is the same everywhere
        assert score == pytest.approx(-result.loss, rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("options", [{"robust": True}, {"method": otp.paper(steps=6, batch_size=16)}, {}], ids=str)
def test_rows_in_any_order_give_the_same_fit_bit_for_bit(options):
    rng = np.random.default_rng(0)
    z = rng.integers(0, 2, 90)
    table = pd.DataFrame({"x": 3.0 * z + rng.normal(size=90), "n": rng.poisson(2 + 3 * z)}).mask(
        rng.random((90, 2)) < 0.1
    )
    table.loc[[5, 40, 71], "x"] = [60.0, -70.0, 90.0]  # rows to leave out
    weights, order = rng.uniform(0.5, 2.0, 90), rng.permutation(90)
    ends = []
    for rows in (np.arange(90), order):
        graph = otp.Graph([("z", "x"), ("z", "n")], hidden=["z"])
        model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal(), "n": m.Poisson()})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", otp.ConvergenceWarning)
            given = table.iloc[rows].reset_index(drop=True)
            result = otp.fit(model, given, weights=weights[rows], restarts=3, course=QUICK, **options)
        ends.append((numbers_of(model), result))
    np.testing.assert_array_equal(ends[0][0], ends[1][0])
    if ends[0][1].row_weights is not None:  # told in the order in which rows were given
        assert (ends[0][1].row_weights < 1).any()
        np.testing.assert_array_equal(ends[0][1].row_weights[order], ends[1][1].row_weights)


SHORT = [otp.entropic(steps=12), otp.transport(steps=3), otp.paper(steps=6, batch_size=4)]


@pytest.mark.parametrize("method", SHORT, ids=lambda one: one.name)
def test_sequences_in_any_order_give_the_same_fit_bit_for_bit(method):
    rng = np.random.default_rng(1)
    paths = [np.cumsum(rng.normal(size=length)) for length in (4, 9, 9, 6, 12, 5, 7, 8)]
    order = rng.permutation(len(paths))
    ends = []
    for rows in (range(len(paths)), order):
        graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
        model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal()})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", otp.ConvergenceWarning)
            otp.fit(model, [paths[row] for row in rows], method=method, restarts=2, course=QUICK)
        ends.append(numbers_of(model))
    np.testing.assert_array_equal(*ends)


@pytest.mark.parametrize("method", ["likelihood", "pairs"])
def test_documents_in_any_order_give_the_same_fit_bit_for_bit(method):
    rng = np.random.default_rng(2)
    counts = rng.poisson(0.7, (30, 8))
    counts[3] = 0  # says nothing
    ends = []
    for rows in (np.arange(30), rng.permutation(30)):
        graph = otp.Graph([("shares", "words")], hidden=["shares"])
        model = otp.Model(graph, {"shares": m.Dirichlet(2), "words": m.Multinomial(8)})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", otp.ConvergenceWarning)
            otp.fit(model, otp.Documents(counts[rows]), method=method, restarts=2)
        ends.append(numbers_of(model))
    np.testing.assert_array_equal(*ends)


def test_sequences_that_are_left_out_are_told_in_the_order_in_which_they_were_given():
    rng = np.random.default_rng(0)
    paths = [rng.normal(size=8) for _ in range(40)]
    wild = {5: 25.0, 7: -60.0, 31: 110.0}  # a category can follow one of them, not all
    for row, shift in wild.items():
        paths[row] = paths[row] + shift
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otp.ConvergenceWarning)
        result = otp.fit(model, paths, robust="outliers", restarts=2, course=QUICK)
    assert len(result.dropped) >= 2
    assert set(result.dropped.tolist()) <= set(wild)
