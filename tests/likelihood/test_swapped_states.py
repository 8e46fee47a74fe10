"""States of hidden categories that stand for one another: swaps of sequences and of rows."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine import Deterministic, SearchSchedule
from otpdag.engine.monitor import Monitor
from otpdag.engine.optimiser import minimise
from otpdag.engine.search import Searcher, search
from otpdag.likelihood.chain_problem import ChainProblem
from otpdag.likelihood.row_problem import GraphProblem
from otpdag.likelihood.state_problem import StateProblem
from otpdag.likelihood.swapped_states import Reading, Swap, _halves, _Rows, swapped_pairs, swaps
from otpdag.structure import pack

# -- a search leaves optima in which two states share what one explains -----------------------------------------------


CENTRES = np.array([[-8.0, 0.0], [0.0, -8.0], [0.0, 8.0], [9.0, 9.0], [9.0, -9.0]])


def five_clusters(rows: int = 800) -> np.ndarray:
    rng = np.random.default_rng(0)
    return CENTRES[rng.integers(0, 5, rows)] + rng.normal(size=(rows, 2))


def mixture(states: int) -> otp.Model:
    graph = otp.Graph([("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(states), "x": m.MultivariateNormal(2)})


def problem_and_point(means: np.ndarray, table: np.ndarray) -> tuple[StateProblem, torch.Tensor]:
    """The problem of a fit, at equal weights, unit covariances and these means."""
    result = otp.fit(mixture(len(means)), {"x": table}, restarts=1, seed=0)
    problem = result.problem
    assert type(problem) is StateProblem
    naturals = {
        "z": {"probs": torch.full((1, 1, len(means)), 1 / len(means)).double()},
        "x": {
            "loc": torch.as_tensor(means).unsqueeze(0),
            "covariance": torch.eye(2).double().expand(1, len(means), 2, 2).clone(),
        },
    }
    raw = problem.structure.raw(naturals)
    point = pack({key: raw[key] for key in problem.shapes})
    for _ in range(200):
        point, _ = problem.update(point)
    return problem, point


def searched(problem, point: torch.Tensor, course: SearchSchedule | None = None):
    """Where a search from a point ends."""
    return search(problem, point, course or SearchSchedule(), Searcher(Deterministic(), monitor=Monitor(show=False)))


def test_a_state_too_many_here_is_taken_to_where_one_is_missing():
    table = five_clusters()
    doubled = np.array([[-8.5, 0.0], [-7.5, 0.0], [0.0, -8.0], [0.0, 8.0], [9.0, 0.0]])  # two on the first, one for two
    problem, caught = problem_and_point(doubled, table)
    _, right = problem_and_point(CENTRES, table)
    assert float(problem.loss(caught).total - problem.loss(right).total) > 0.1
    assert abs(float(searched(problem, caught).loss - problem.loss(right).total)) < 1e-6


@pytest.mark.slow
def test_the_best_optimum_is_kept():
    problem, right = problem_and_point(CENTRES, five_clusters())
    torch.testing.assert_close(searched(problem, right).point, right, rtol=0.0, atol=1e-3)


def test_two_states_are_not_swapped():
    problem, point = problem_and_point(CENTRES[:2], five_clusters())
    assert problem.proposals(point) is None


def test_tables_of_categories_are_swapped_too():
    rng = np.random.default_rng(1)
    z = rng.integers(0, 4, 4000)
    tables = rng.dirichlet(np.full(5, 0.3), (6, 4))
    frame = pd.DataFrame({f"x{i}": [rng.choice(5, p=table[k]) for k in z] for i, table in enumerate(tables)})
    graph = otp.Graph([("z", name) for name in frame], hidden=["z"])
    losses = []
    for restarts in (1, 30):
        model = otp.Model(graph, {"z": m.Categorical(4), **{name: m.Categorical(5) for name in frame}})
        losses.append(otp.fit(model, frame, seed=3, restarts=restarts).loss)
    assert losses[0] - losses[1] < 1e-4


def test_two_states_are_given_up_and_the_twelve_with_most_rows_are_split():
    rng = np.random.default_rng(3)
    features = torch.as_tensor(np.c_[rng.normal(size=(300, 2)), np.ones(300)])
    posterior = torch.as_tensor(rng.dirichlet(np.linspace(1.0, 4.0, 16), 300))
    found = list(swaps(Reading(features, torch.ones(300).double(), posterior)))
    cost = -(1 - posterior).log().sum(0)
    largest = set(posterior.sum(0).argsort(descending=True)[:12].tolist())
    given_up = cost.argsort()[:2].tolist()
    assert len(found) == sum(len(largest - {state}) for state in given_up)
    assert {one.given_up for one in found} == set(given_up)
    assert not list(swaps(Reading(features, torch.ones(300).double(), posterior[:, :2])))


def test_states_are_split_across_their_leading_component():
    """Of features in units of their spread over all rows, by an eigenvector of each state's own covariance."""
    rng = np.random.default_rng(5)
    state = np.repeat([0, 1, 2], 60)
    along = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])[state]
    x = 4.0 * rng.normal(size=(180, 1)) * along + 0.3 * rng.normal(size=(180, 2)) + 20.0 * state[:, None]
    features = np.c_[x * [1.0, 100.0], np.full(180, 7.0)]  # in units of their own, and one that is constant
    posterior = 0.9 * np.eye(3)[state] + 0.1 / 3
    taken = rng.uniform(0.5, 2.0, (180, 1)) * posterior
    found = _halves(torch.as_tensor(features), torch.as_tensor(taken)).numpy()
    rows = taken.sum(1)
    level = rows @ features / rows.sum()
    spread = np.sqrt(rows @ (features - level) ** 2 / rows.sum())
    scaled = (features - level) / np.where(spread > 0, spread, 1.0)
    for one in range(3):
        own = taken[:, one] / taken[:, one].sum()
        centre = own @ scaled
        covariance = (own[:, None] * (scaled - centre)).T @ (scaled - centre)
        direction = np.linalg.eigh(covariance)[1][:, -1]
        side = (scaled - centre) @ direction > 0
        assert np.array_equal(found[:, one], side) or np.array_equal(found[:, one], ~side)


def test_a_state_gives_its_rows_to_the_others_and_takes_half_of_another():
    """The others get what they had of its rows in proportion; a row that it alone explains is lost."""
    rng = np.random.default_rng(7)
    features = torch.as_tensor(np.c_[rng.normal(size=(50, 2)), np.ones(50)])
    weight, posterior = torch.as_tensor(rng.uniform(0.5, 2.0, 50)), torch.as_tensor(rng.dirichlet(np.ones(5), 50))
    posterior[0] = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])  # a row that one state alone explains
    found = list(swaps(Reading(features, weight, posterior)))
    taken = weight.unsqueeze(-1) * posterior
    half = _halves(features, taken)
    left = 1 - posterior.clamp(max=1 - 1e-9)
    cost = -(weight.unsqueeze(-1) * left.log()).sum(0)
    expected = []
    for given_up in cost.argsort()[:2].tolist():
        rest = posterior / left[:, [given_up]]
        for split in taken.sum(0).argsort(descending=True).tolist():
            if split == given_up:
                continue
            shared = rest.clone()
            shared[:, given_up] = rest[:, split] * half[:, split]
            shared[:, split] = rest[:, split] * (1 - half[:, split])
            expected.append(shared)
    torch.testing.assert_close(torch.stack([one.posterior for one in found]), torch.stack(expected))
    assert len(list(swaps(Reading(features, weight, posterior), 5))) == 20


# -- chains ------------------------------------------------------------------------------------------------------------

RATES = np.array([2.0, 12.0, 40.0, 90.0])


def four_lasting_states(steps: int = 3000) -> np.ndarray:
    rng = np.random.default_rng(4)
    moves = np.where(rng.random(steps) < 0.05, rng.integers(1, 4, steps), 0)
    return rng.poisson(RATES[moves.cumsum() % 4]).astype(float)[None]


def chain_and_point(rates: np.ndarray, counts: np.ndarray) -> tuple[ChainProblem, torch.Tensor]:
    """The problem of a fit, at states that last and these rates."""
    states = len(rates)
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    result = otp.fit(otp.Model(graph, {"z": m.Categorical(states), "x": m.Poisson()}), counts, restarts=1, seed=0)
    problem = result.problem
    assert type(problem) is ChainProblem
    lasting = (
        torch.full((states, states), 0.1 / (states - 1)) + torch.eye(states) * (0.9 - 0.1 / (states - 1))
    ).double()
    naturals = {
        "z": {"probs": lasting[None]},
        "z[0]": {"probs": torch.full((1, 1, states), 1 / states).double()},
        "x": {"log_rate": torch.as_tensor(rates).log().reshape(1, -1, 1)},
    }
    raw = problem.structure.raw(naturals)
    point = pack({key: raw[key] for key in problem.shapes})
    for _ in range(300):
        point, _ = problem.update(point)
    return problem, point


def chain_loss(problem: ChainProblem, point: torch.Tensor) -> float:
    return float(problem.update(point)[1].total)


def test_a_chain_leaves_an_optimum_in_which_two_states_share_what_one_explains():
    counts = four_lasting_states()
    problem, right = chain_and_point(RATES, counts)
    _, doubled = chain_and_point(np.array([1.9, 2.1, 12.0, 65.0]), counts)
    assert chain_loss(problem, doubled) - chain_loss(problem, right) > 0.1
    assert abs(float(searched(problem, doubled).loss) - chain_loss(problem, right)) < 1e-6


def test_a_chain_stays_at_its_best_optimum_and_with_two_states_where_it_is():
    counts = four_lasting_states()
    problem, right = chain_and_point(RATES, counts)
    assert abs(float(searched(problem, right).loss) - chain_loss(problem, right)) < 1e-6
    problem, two = chain_and_point(RATES[:2], counts)
    assert problem.proposals(two) is None


def test_pairs_after_a_swap_add_up_to_the_steps_of_each_state():
    """Each step has one before it: pairs that end in a state are as many as its steps, and none is lost."""
    rng = np.random.default_rng(5)
    before = torch.as_tensor(rng.uniform(0.1, 2.0, (4, 4)))
    for given_up, split in ((0, 3), (2, 1)):
        count = torch.as_tensor(rng.uniform(10.0, 50.0, 4))
        pairs = swapped_pairs(before, count, Swap(torch.zeros(1, 4), given_up, split))
        assert (pairs >= 0).all()
        torch.testing.assert_close(pairs.sum(0), count)


# -- states of a hidden category are swapped where rows are enumerated or summed along the graph ----------------------


EDGES = [("h", "x1"), ("h", "x2"), ("x1", "x2"), ("h", "x3")]


def mixed(states: int = 3) -> otp.Model:
    """A Poisson regression on an observed number, and a category, behind a hidden class."""
    nodes = {"h": m.Categorical(states), "x1": m.Normal(), "x2": m.Poisson(), "x3": m.Categorical(3)}
    return otp.Model(otp.Graph(EDGES, hidden=["h"]), nodes)


TRUTH = {
    "h": {"probs": [[[0.27, 0.40, 0.33]]]},
    "x1": {"loc": [[[-1.9], [-0.1], [2.0]]], "scale": [[[0.6], [0.95], [0.8]]]},
    "x2": {"log_rate": [[[1.8], [0.0], [1.1]]], "weight": [[[-0.2]]]},
    "x3": {"probs": [[[0.2, 0.3, 0.5], [0.25, 0.3, 0.45], [0.35, 0.25, 0.4]]]},
}
SHARED = {  # the second and the third state share rows that they tell apart by x3 alone
    "h": {"probs": [[[0.27, 0.33, 0.4]]]},
    "x1": {"loc": [[[-1.9], [0.9], [0.9]]], "scale": [[[0.6], [1.4], [1.4]]]},
    "x2": {"log_rate": [[[2.2], [0.4], [0.4]]], "weight": [[[0.0]]]},
    "x3": {"probs": [[[0.2, 0.3, 0.5], [0.03, 0.04, 0.93], [0.47, 0.50, 0.03]]]},
}


def table(rows: int = 800, gaps: float = 0.0) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    truth = {node: {name: np.array(value)[0] for name, value in own.items()} for node, own in TRUTH.items()}
    h = rng.choice(3, rows, p=truth["h"]["probs"][0])
    x1 = truth["x1"]["loc"][h, 0] + truth["x1"]["scale"][h, 0] * rng.normal(size=rows)
    x2 = rng.poisson(np.exp(truth["x2"]["log_rate"][h, 0] - 0.2 * x1))
    x3 = np.array([rng.choice(3, p=truth["x3"]["probs"][k]) for k in h])
    frame = pd.DataFrame({"x1": x1, "x2": x2, "x3": x3}).astype(float)
    return frame.mask(rng.random(frame.shape) < gaps)


def problem_of(frame: pd.DataFrame, model: otp.Model):
    """The problem of a fit."""
    return otp.fit(model, frame, restarts=1, steps=2, seed=0).problem


def point_at(problem, naturals):
    """The point of these parameters."""
    given = {
        node: {name: torch.tensor(value).double() for name, value in own.items()} for node, own in naturals.items()
    }
    raw = problem.structure.raw(given)
    return pack({key: raw[key] for key in problem.shapes})


def settled(problem, naturals, course: SearchSchedule):
    """Where a search from these parameters ends."""
    return searched(problem, point_at(problem, naturals), course)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_an_optimum_in_which_two_states_share_what_one_explains_is_left():
    problem = problem_of(table(), mixed())
    assert type(problem) is GraphProblem
    right = settled(problem, TRUTH, SearchSchedule(moves=0))
    caught = minimise(problem.loss, point_at(problem, SHARED), steps=200)
    assert float(caught.loss - right.loss) > 0.03
    others = problem.proposals(caught.point)
    assert others is not None
    reached = minimise(problem.loss, others.points, steps=200).loss.min()
    assert abs(float(reached - right.loss)) < 1e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_gaps_are_no_obstacle():
    problem = problem_of(table(gaps=0.1), mixed())
    right, free = (settled(problem, start, SearchSchedule()) for start in (TRUTH, SHARED))
    assert abs(float(free.loss - right.loss)) < 1e-5


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_the_best_optimum_of_rows_is_kept():
    problem = problem_of(table(), mixed())
    right, again = (settled(problem, TRUTH, SearchSchedule(moves=moves)) for moves in (0, 12))
    torch.testing.assert_close(again.point, right.point, rtol=0.0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_nothing_is_changed_by_being_asked():
    problem = problem_of(table(), mixed())
    point = settled(problem, SHARED, SearchSchedule(moves=0)).point
    first, again = (problem.proposals(point) for _ in range(2))
    assert first is not None
    assert again is not None
    assert torch.equal(first.points, again.points)


def rows_and_posterior(frame: pd.DataFrame) -> tuple[_Rows, torch.Tensor]:
    problem = problem_of(frame, mixed())
    posterior = torch.as_tensor(np.random.default_rng(1).dirichlet(np.ones(3), len(frame)))
    return _Rows.of(problem.structure, problem.batch, "h"), posterior


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_families_start_from_rows_that_count_in_every_state_by_its_probability():
    rows, posterior = rows_and_posterior(table(600))
    started = rows.started(posterior)
    assert set(started) == {"h", "x1", "x2", "x3"}
    r, x1, x2, x3 = posterior.numpy(), *(rows.values[name].numpy() for name in ("x1", "x2", "x3"))
    mean = r.T @ x1 / r.sum(0)[:, None]
    close = {"rtol": 0.0, "atol": 0.02}
    np.testing.assert_allclose(started["h"]["probs"][0, 0], r.mean(0), **close)
    np.testing.assert_allclose(started["x1"]["loc"][0], mean, **close)
    np.testing.assert_allclose(started["x3"]["probs"][0], r.T @ x3 / r.sum(0)[:, None], **close)
    design = np.c_[np.repeat(np.eye(3), len(r), 0), np.tile(x1, (3, 1))]
    fit = sm.GLM(np.tile(x2, (3, 1)), design, family=sm.families.Poisson(), freq_weights=r.T.ravel()).fit()
    found = torch.cat([started["x2"]["log_rate"][0], started["x2"]["weight"][0]])[:, 0]
    np.testing.assert_allclose(found, fit.params, **close)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_rows_count_for_nothing_in_families_that_they_do_not_show():
    rows, posterior = rows_and_posterior(table(600, gaps=0.2))
    shown = {node: weight > 0 for node, weight in rows.weight.items()}
    assert bool(shown["h"].all())
    assert bool((~shown["x2"] | shown["x1"]).all())  # a count tells nothing of its rate where its parent is missing
    complete = shown["x1"] & shown["x2"] & shown["x3"]
    assert 0 < int(complete.sum()) < int(shown["x1"].sum()) < len(complete)
    before = rows.started(posterior)["x2"]
    rows.values["x1"][~shown["x1"]] = 1e3  # whatever was filled in
    after = rows.started(posterior)["x2"]
    for name, value in before.items():
        torch.testing.assert_close(after[name], value)


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_a_state_is_split_by_what_its_children_show_without_their_other_parents():
    rng = np.random.default_rng(2)
    h, u = rng.integers(0, 3, 500), 5.0 * rng.normal(size=500)
    frame = pd.DataFrame({"u": u, "y": 4.0 * h + 2.0 * u + 0.1 * rng.normal(size=500)})
    graph = otp.Graph([("h", "y"), ("u", "y")], hidden=["h"])
    problem = problem_of(frame, otp.Model(graph, {"h": m.Categorical(3), "u": m.Normal(), "y": m.Normal()}))
    rows = _Rows.of(problem.structure, problem.batch, "h")
    level = (rows.values["y"] - 2.0 * rows.values["u"])[:, 0] / 4.0  # about the state, whatever the order of rows
    features = rows.features(torch.eye(3).double()[level.round().long()])["y"]
    assert features.shape == (500, 1)
    both = np.corrcoef(np.c_[features.numpy(), rows.values["u"].numpy(), level.numpy()].T)
    assert abs(both[0, 1] - both[2, 1]) < 0.01  # no more of the other parent than chance left in the states
    assert both[0, 2] > 0.999


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_states_are_split_along_all_children_and_along_each_number_alone():
    rows, posterior = rows_and_posterior(table(300))
    shown = rows.features(posterior)
    numbers = [name for name in ("x1", "x2") if not rows.structure.mechanisms[name].space.is_discrete]
    together, *alone = rows.directions(posterior)
    torch.testing.assert_close(together, torch.cat([shown["x1"], shown["x2"], shown["x3"]], -1))
    assert numbers[0] == "x1"
    assert len(alone) == len(numbers)
    assert all(any(torch.equal(own, shown[name]) for own in alone) for name in numbers)


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_of_many_numbers_those_come_first_in_which_one_state_is_wide():
    rng = np.random.default_rng(4)
    h = rng.integers(0, 3, 900)
    wide = {"a": 1.0, "b": 6.0, "c": 3.0, "d": 1.0, "e": 4.0}  # of the last state, in units of the others
    frame = pd.DataFrame({name: 8.0 * h + np.where(h == 2, w, 1.0) * rng.normal(size=900) for name, w in wide.items()})
    frame["n"] = rng.poisson(np.exp(0.1 * frame["a"]))
    graph = otp.Graph([*(("h", name) for name in frame), ("a", "n")], hidden=["h"])
    nodes = {"h": m.Categorical(3), "n": m.Poisson()} | {name: m.Normal() for name in wide}
    problem = problem_of(frame, otp.Model(graph, nodes))
    rows = _Rows.of(problem.structure, problem.batch, "h")
    state = torch.eye(3).double()[(rows.values["a"][:, 0] / 8.0).round().clamp(0, 2).long()]
    shown, (_, *alone) = rows.features(state), rows.directions(state)
    assert [next(name for name in wide if torch.equal(own, shown[name])) for own in alone] == ["b", "e", "c"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_a_state_that_covers_two_of_one_number_is_split_along_it():
    """Two states share the first rows; the third covers two that a number alone tells apart, beside other columns."""
    rng = np.random.default_rng(3)
    h = rng.choice(3, 2000, p=[0.42, 0.33, 0.25])
    x1 = np.array([-2.1, 0.2, 2.0])[h] + np.array([0.58, 0.6, 0.8])[h] * rng.normal(size=2000)
    x2 = rng.poisson(np.exp(np.array([0.3, 0.8, 1.6])[h] - 0.1 * x1))
    tables = np.array([[0.32, 0.33, 0.35], [0.1, 0.43, 0.47], [0.12, 0.54, 0.34]])
    x3 = np.array([rng.choice(3, p=own) for own in tables[h]])
    problem = problem_of(pd.DataFrame({"x1": x1, "x2": x2, "x3": x3}).astype(float), mixed())
    shared = {
        "h": {"probs": [[[0.21, 0.17, 0.62]]]},
        "x1": {"loc": [[[-2.5], [-1.8], [0.8]]], "scale": [[[0.44], [0.34], [1.3]]]},
        "x2": {"log_rate": [[[1.06], [0.67], [0.95]]], "weight": [[[0.18]]]},
        "x3": {"probs": [[[0.31, 0.35, 0.34], [0.41, 0.26, 0.33], [0.10, 0.50, 0.40]]]},
    }
    right = {
        "h": {"probs": [[[0.42, 0.33, 0.25]]]},
        "x1": {"loc": [[[-2.1], [0.2], [2.0]]], "scale": [[[0.58], [0.6], [0.8]]]},
        "x2": {"log_rate": [[[0.3], [0.8], [1.6]]], "weight": [[[-0.1]]]},
        "x3": {"probs": [tables.tolist()]},
    }
    lowest, caught = (settled(problem, start, SearchSchedule(moves=0)) for start in (right, shared))
    free = settled(problem, shared, SearchSchedule())
    assert float(caught.loss - lowest.loss) > 0.01
    assert abs(float(free.loss - lowest.loss)) < 1e-6


def two_hidden() -> otp.Model:
    graph = otp.Graph([*EDGES, ("g", "x1"), ("g", "x2")], hidden=["h", "g"])
    return otp.Model(graph, {**mixed().mechanisms, "g": m.Categorical(3)})


def with_network() -> otp.Model:
    return otp.Model(otp.Graph(EDGES, hidden=["h"]), {**mixed().mechanisms, "x2": m.Poisson(network=(3,))})


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
@pytest.mark.parametrize("model", [mixed(2), two_hidden(), with_network()], ids=["two", "several", "network"])
def test_what_cannot_be_swapped_is_left_alone(model):
    result = otp.fit(model, table(200), restarts=1, steps=2, seed=0)
    assert result.problem.proposals(result.restarts[0].point.reshape(1, -1)) is None


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_families_that_no_row_shows_are_not_started():
    frame = table(200)
    frame.loc[:99, "x1"], frame.loc[100:, "x2"] = np.nan, np.nan
    result = otp.fit(mixed(), frame, restarts=1, steps=2, seed=0)
    assert result.problem.proposals(result.restarts[0].point.reshape(1, -1)) is None
