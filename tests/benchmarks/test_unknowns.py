"""The oracles against independent computations, errors, the child process, and the cases at a small size."""

import json
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import approx_fprime, minimize

from benchmarks import child, measured_fits, unknowns
from benchmarks.harness import Settings, Skip
from benchmarks.oracles.agrum import agrum_em
from benchmarks.oracles.count_gap import count_gap_ml, loss
from benchmarks.oracles.discrete_em import DiscreteEM, available_case_start
from benchmarks.oracles.hidden_tree import beliefs, hidden_tree_em
from benchmarks.oracles.linear_normal import LinearNormal, linear_normal_em
from benchmarks.parameter_errors import configurations_seen, network_error, tree_error, world_error
from benchmarks.random_graphs import declare, hidden_tree, mixed_world
from experiments.small_models import delete_cells
from otpdag.datasets import DiscreteNetwork

NETWORK = DiscreteNetwork(
    states={"a": ("0", "1"), "h": ("0", "1"), "b": ("0", "1", "2"), "c": ("0", "1")},
    parents={"a": (), "h": ("a",), "b": ("h",), "c": ("b", "a")},
    tables={
        "a": np.array([0.4, 0.6]),
        "h": np.array([[0.8, 0.2], [0.3, 0.7]]),
        "b": np.array([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]]),
        "c": np.array([[[0.9, 0.1], [0.4, 0.6]], [[0.6, 0.4], [0.1, 0.9]], [[0.5, 0.5], [0.2, 0.8]]]),
    },
)
CHAIN = {"a": (), "b": ("a",), "c": ("a", "b")}


# -- linear-normal graphs --------------------------------------------------------------------------------------------


def regression(frame, parents):
    found = {}
    for node, family in parents.items():
        design = np.column_stack([np.ones(len(frame)), *(frame[name] for name in family)])
        coefficients, *_ = np.linalg.lstsq(design, frame[node], rcond=None)
        found[node] = {"loc": coefficients[0], "scale": (frame[node] - design @ coefficients).std(ddof=0)}
        if family:
            found[node]["weight"] = coefficients[1:]
    return found


def log_likelihood(model, values):
    """The mean over rows, each by the density of what it shows."""
    covariance = np.linalg.inv(model.precision)
    total = 0.0
    for row in values:
        seen = ~np.isnan(row)
        gap, part = (row - model.mean)[seen], covariance[np.ix_(seen, seen)]
        total -= 0.5 * (gap @ np.linalg.solve(part, gap) + np.linalg.slogdet(2 * np.pi * part)[1])
    return total / len(values)


def as_linear(params):
    names = list(params)
    weight = np.zeros((len(names), len(names)))
    for at, node in enumerate(names):
        for name, slope in zip(CHAIN[node], np.atleast_1d(params[node].get("weight", [])), strict=True):
            weight[at, names.index(name)] = slope
    return LinearNormal(
        *(np.array([float(params[n][key]) for n in names]) for key in ("loc",)),
        weight,
        np.array([float(params[n]["scale"]) for n in names]),
    )


@pytest.fixture
def chain_table():
    generator = np.random.default_rng(0)
    a = 3.0 + 2.0 * generator.standard_normal(150)
    b = 1.0 - 0.5 * a + generator.standard_normal(150)
    c = 0.3 * a + 2.0 * b + 0.5 * generator.standard_normal(150)
    return pd.DataFrame({"a": a, "b": b, "c": c})


def test_linear_normal_em_without_gaps_is_regression(chain_table):
    found, _ = linear_normal_em(chain_table, CHAIN)
    wanted = regression(chain_table, CHAIN)
    for node in CHAIN:
        for name, value in wanted[node].items():
            np.testing.assert_allclose(found[node][name], value, rtol=1e-6)


def test_linear_normal_em_climbs_to_the_top_of_the_likelihood(chain_table):
    frame = delete_cells(chain_table, 0.25, np.random.default_rng(1))
    found, history = linear_normal_em(frame, CHAIN)
    assert np.diff(history).min() > -1e-12
    model = as_linear(found)
    top = log_likelihood(model, frame.to_numpy())
    assert history[-1] == pytest.approx(top, abs=1e-8)

    def minus(vector):
        weight = np.zeros((3, 3))
        weight[1, 0], weight[2, 0], weight[2, 1] = vector[3:6]
        return -log_likelihood(LinearNormal(vector[:3], weight, np.exp(vector[6:])), frame.to_numpy())

    at = np.concatenate([model.loc, model.weight[[1, 2, 2], [0, 0, 1]], np.log(model.scale)])
    climbed = minimize(minus, at + 0.05, method="L-BFGS-B", options={"maxiter": 60})
    assert -climbed.fun <= top + 1e-9
    np.testing.assert_allclose(climbed.x, at, atol=0.01)


# -- discrete networks -----------------------------------------------------------------------------------------------


def enumerated(network, frame):
    """Expected counts of every family and the log-likelihood, by the joint table of all nodes."""
    joint = network.joint(network.nodes)
    counts = {node: np.zeros_like(table) for node, table in network.tables.items()}
    total = 0.0
    for _, row in frame.reindex(columns=list(network.nodes)).iterrows():
        options = [range(len(network.states[n])) if np.isnan(row[n]) else [int(row[n])] for n in network.nodes]
        states = list(product(*options))
        weights = np.array([joint[state] for state in states])
        total += np.log(weights.sum())
        for state, weight in zip(states, weights / weights.sum(), strict=True):
            code = dict(zip(network.nodes, state, strict=True))
            for node in network.nodes:
                counts[node][tuple(code[name] for name in (*network.parents[node], node))] += weight
    return counts, total


def table_with_gaps(seed):
    frame = NETWORK.sample(80, np.random.default_rng(2)).drop(columns="h")
    return delete_cells(frame, 0.3, np.random.default_rng(seed))


@pytest.fixture
def gaps():
    return table_with_gaps(4)


def test_elimination_is_enumeration(gaps):
    counts, total = DiscreteEM(NETWORK, gaps).expected(NETWORK.tables)
    wanted, wanted_total = enumerated(NETWORK, gaps)
    assert total == pytest.approx(wanted_total)
    for node, count in wanted.items():
        np.testing.assert_allclose(counts[node], count, atol=1e-10)


def test_discrete_em_does_not_lower_the_likelihood(gaps):
    exact = DiscreteEM(NETWORK, gaps)
    start = available_case_start(NETWORK, gaps, np.random.default_rng(4))
    values = [exact.log_likelihood(exact.run(start, tolerance=0.0, steps=steps).tables) for steps in (1, 2, 5, 20)]
    assert np.diff(values).min() > 0
    assert values[0] > exact.log_likelihood(start)


@pytest.mark.parametrize(("seed", "falls"), [(3, True), (4, False), (5, False)])
def test_pyagrum_takes_the_same_steps(seed, falls):
    pytest.importorskip("pyagrum")
    gaps = table_with_gaps(seed)
    start = available_case_start(NETWORK, gaps, np.random.default_rng(4))
    theirs = agrum_em(NETWORK, gaps, start, prior=1e-3)
    own = DiscreteEM(NETWORK, gaps, prior=1e-3).run(start)
    assert len(own.history) == len(theirs.history) == own.steps - falls
    np.testing.assert_allclose(own.history, theirs.history, rtol=1e-10)
    for node in NETWORK.nodes:
        np.testing.assert_allclose(own.tables[node], theirs.tables[node], atol=1e-10)


def test_a_peer_cut_short_ends_where_it_would_have(gaps):
    pytest.importorskip("pyagrum")
    whole, cut = (unknowns.peer_run(NETWORK, gaps, seed=5, steps=steps) for steps in (None, 2))
    assert (cut.steps, cut.run) == (whole.steps, 2)
    for node in NETWORK.nodes:
        np.testing.assert_allclose(cut.tables[node], whole.tables[node], atol=1e-10)


# -- a tree of hidden nodes ------------------------------------------------------------------------------------------


@pytest.fixture
def tree():
    return hidden_tree(3, np.random.default_rng(6), children=2)


def test_messages_are_enumeration(tree):
    frame = tree.sample(30, np.random.default_rng(7)).drop(columns=["h0", "h1", "h2"])
    found, (counts, total) = beliefs(tree, frame), enumerated(tree, frame)
    assert found.log_evidence.sum() == pytest.approx(total)
    np.testing.assert_allclose(found.single["h0"].sum(axis=0), counts["h0"])
    for node in ("h1", "h2"):
        np.testing.assert_allclose(found.pairs[node], counts[node])


def test_tree_em_climbs_by_the_steps_of_enumeration(tree):
    frame = tree.sample(60, np.random.default_rng(8)).drop(columns=["h0", "h1", "h2"])
    once, _ = hidden_tree_em(tree, frame, steps=1)
    counts, _ = enumerated(tree, frame)
    for node, count in counts.items():
        np.testing.assert_allclose(once.tables[node], count / count.sum(axis=-1, keepdims=True))
    _, history = hidden_tree_em(tree, frame, steps=40)
    assert np.diff(history).min() > -1e-12


def test_the_error_of_a_tree_ignores_hidden_labels(tree):
    observed = [node for node in tree.nodes if "_" in node]
    turned = dict(tree.tables)
    turned["h1"] = turned["h1"][:, ::-1]
    for node in tree.nodes:
        if tree.parents[node] == ("h1",):
            turned[node] = turned[node][::-1]
    assert tree_error(tree, turned, observed) == pytest.approx(0.0)
    moved = turned | {"h0": turned["h0"] + [0.1, -0.1]}
    assert tree_error(tree, moved, observed) == pytest.approx(0.2 / sum(t.size for t in tree.tables.values()))


# -- a count with gaps -----------------------------------------------------------------------------------------------


def test_count_gap_gradient_and_top():
    world = unknowns.chain_world("count")
    complete = world.sample(400, np.random.default_rng(9))
    frame = complete.astype(float).assign(b=complete["b"].where(complete["a"] <= 0))
    at = np.array([0.4, 1.0, -0.4, 0.45, 0.1])
    gradient = loss(at, frame)[1]
    np.testing.assert_allclose(gradient, approx_fprime(at, lambda v: loss(v, frame)[0], 1e-6), atol=1e-4)
    found = count_gap_ml(frame, world.truth)
    assert found["b"]["weight"][0] == pytest.approx(1.1, abs=0.15)
    again = count_gap_ml(frame, world.truth, largest=900)
    assert again["b"]["weight"][0] == pytest.approx(found["b"]["weight"][0], abs=1e-5)


def test_count_gap_without_gaps_is_regression():
    frame = unknowns.chain_world("count").sample(500, np.random.default_rng(10)).astype(float)
    found = count_gap_ml(frame, unknowns.chain_world("count").truth)
    wanted = regression(frame, {"c": ("b",)})["c"]
    np.testing.assert_allclose(
        [found["c"]["loc"], found["c"]["weight"][0], found["c"]["scale"]],
        [wanted["loc"], wanted["weight"][0], wanted["scale"]],
        rtol=1e-4,
    )


# -- random graphs and errors ----------------------------------------------------------------------------------------


def test_mixed_worlds_are_sparse_and_moderate():
    world = mixed_world(60, np.random.default_rng(11))
    frame = world.sample(2000, np.random.default_rng(12))
    assert {kind: list(world.kinds.values()).count(kind) for kind in ("number", "count", "category")} == {
        "number": 20,
        "count": 20,
        "category": 20,
    }
    assert max(len(parents) for parents in world.parents.values()) <= 3
    assert frame.to_numpy().max() < 100
    assert frame.std().min() > 0.1


def test_fits_recover_mixed_worlds():
    world = mixed_world(9, np.random.default_rng(13))
    frame = world.sample(4000, np.random.default_rng(14))
    build = partial(declare, world.parents, world.kinds, world.sizes)
    fitted = measured_fits.fit_all([measured_fits.Task(build, frame, 0)], measured_fits.Task(build, frame[:100], 0))
    assert world_error(world, frame, fitted[0].params) < 0.06
    assert world_error(world, frame, world.truth) == 0.0


def test_only_configurations_that_are_seen_count():
    frame = pd.DataFrame({"a": [0, 0, 1, np.nan], "b": [1, 0, np.nan, 1]})
    np.testing.assert_array_equal(configurations_seen(frame, ["a", "b"], ["a"], [2], least=1), [True, False])
    tables = dict(NETWORK.tables)
    frame = pd.DataFrame({"a": [0], "h": [0], "b": [0], "c": [0]})
    moved = tables | {"h": np.array([[0.8, 0.2], [1.0, 0.0]])}
    assert network_error(NETWORK, frame, moved) == 0.0
    moved = tables | {"a": np.array([0.5, 0.5])}
    assert network_error(NETWORK, frame, moved) == pytest.approx(0.2 / 9)


def test_exponents():
    assert unknowns.exponent([10, 100, 1000], [3, 30, 300]) == pytest.approx(1.0)


# -- the child -------------------------------------------------------------------------------------------------------


def _allocate():
    return float(np.ones(30_000_000).sum())


def _fail():
    raise ZeroDivisionError("nothing to divide by")


def _sleep():
    import time

    time.sleep(60)


@pytest.mark.slow
def test_a_child_tells_its_memory():
    done = child.in_child(_allocate, seconds=60)
    assert done.value == 30_000_000
    assert 0.2e9 < done.peak - done.base < 0.5e9


@pytest.mark.slow
def test_a_child_that_fails_or_does_not_end():
    with pytest.raises(child.ChildError, match="ZeroDivisionError: nothing to divide by"):
        child.in_child(_fail, seconds=60)
    with pytest.raises(child.ChildError, match="no end within 2 s"):
        child.in_child(_sleep, seconds=2)


def test_a_study_that_failed_is_not_done_again():
    calls = []

    @measured_fits.remembered
    def study(number):
        calls.append(number)
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            study(3)
    assert calls == [3]


# -- cases -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_process(monkeypatch):
    """Fits without children, on few rows."""

    def ours(tasks, warm, first_seconds=0.0):
        return SimpleNamespace(value=measured_fits.fit_all(tasks, warm), peak=2_000_000, base=1_000_000)

    monkeypatch.setattr(unknowns, "ours", ours)
    monkeypatch.setattr(unknowns, "NORMAL_ROWS", 150)
    monkeypatch.setattr(unknowns, "MIXED_ROWS", 150)
    monkeypatch.setattr(unknowns, "HIDDEN_ROWS", 200)
    monkeypatch.setattr(unknowns, "CHAIN_ROWS", 150)


SETTINGS = Settings(seed=3, repeats=1)


def test_random_graphs_have_records(in_process):
    for case in (
        partial(unknowns.gaussian, 4),
        partial(unknowns.gaussian_time, 4),
        partial(unknowns.mixed, 4),
        partial(unknowns.mixed_time, 4),
        partial(unknowns.mixed_memory, 4),
    ):
        record = case(SETTINGS)
        assert np.isfinite(record["ratio"])
        assert record["limit"] > 0
        json.dumps(record, allow_nan=False)
    assert unknowns.gaussian(4, SETTINGS)["ratio"] == pytest.approx(1.0, abs=0.05)


def test_hidden_nodes_have_a_record(in_process):
    record = unknowns.hidden_nodes(2, SETTINGS)
    assert record["ratio"] == pytest.approx(record["ours"] / record["oracle"])
    json.dumps(record, allow_nan=False)


def test_a_normal_gap_is_maximum_likelihood(in_process):
    record = unknowns.missing_at_random("number", "auto", 1.1, SETTINGS)
    assert record["ratio"] == pytest.approx(1.0, abs=0.02)


def test_networks_are_skipped_without_their_folder(monkeypatch):
    monkeypatch.delenv("OTPDAG_DATA", raising=False)
    for case in ("alarm_missing20", "alarm_hidden3"):
        with pytest.raises(Skip, match="set OTPDAG_DATA"):
            unknowns.CASES[case](SETTINGS)


@pytest.fixture
def small_network(in_process, monkeypatch):
    """A network of four nodes in the place of the published ones."""
    monkeypatch.setenv("OTPDAG_DATA", "somewhere")
    monkeypatch.setattr(unknowns, "load_network", lambda name: NETWORK)
    monkeypatch.setattr(unknowns, "NETWORK_ROWS", 200)
    monkeypatch.setattr(unknowns, "HIDDEN", ("h",))


def test_networks_are_compared_with_pyagrum(small_network):
    pytest.importorskip("pyagrum")
    record = unknowns.network_gaps("alarm", 0.2, SETTINGS)
    assert record["ratio"] == pytest.approx(1.0, abs=0.05)
    assert record["peer_steps_run"] == [2]
    times = unknowns.network_gaps_time("alarm", 0.2, SETTINGS)
    assert times["ratio"] == pytest.approx(times["seconds"] / times["oracle_seconds"])
    hidden, hidden_times = unknowns.alarm_hidden(SETTINGS), unknowns.alarm_hidden_time(SETTINGS)
    assert abs(hidden["ratio"]) < 0.05
    assert hidden_times["ratio"] > 0
    json.dumps([record, times, hidden, hidden_times], allow_nan=False)


def test_growth_is_an_exponent(in_process, monkeypatch):
    monkeypatch.setattr(unknowns, "GROWING_ROWS", (60, 120))
    monkeypatch.setattr(unknowns, "NODES_OF_GROWING_ROWS", 3)
    assert np.isfinite(unknowns.growth("rows", SETTINGS)["ratio"])
    assert unknowns.growth_memory("rows", SETTINGS)["ratio"] == pytest.approx(0.0)
