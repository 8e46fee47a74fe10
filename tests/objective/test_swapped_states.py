"""A search leaves optima in which two states share what one explains."""

import numpy as np
import pandas as pd
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.objective.state_problem import StateProblem
from otpdag.structure import pack

CENTRES = np.array([[-8.0, 0.0], [0.0, -8.0], [0.0, 8.0], [9.0, 9.0], [9.0, -9.0]])


def five_clusters(rows: int = 1500) -> np.ndarray:
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
        point, _ = problem.updated(point)
    return problem, point


def test_a_state_too_many_here_is_taken_to_where_one_is_missing():
    table = five_clusters()
    doubled = np.array([[-8.5, 0.0], [-7.5, 0.0], [0.0, -8.0], [0.0, 8.0], [9.0, 0.0]])  # two on the first, one for two
    problem, caught = problem_and_point(doubled, table)
    _, right = problem_and_point(CENTRES, table)
    moved = problem.moved(caught)
    assert float(problem.loss(caught) - problem.loss(right)) > 0.1
    assert moved is not None
    point = moved.point
    for _ in range(50):
        point, _ = problem.updated(point)
    assert abs(float(problem.loss(point) - problem.loss(right))) < 1e-6


def test_the_best_optimum_is_kept():
    problem, right = problem_and_point(CENTRES, five_clusters())
    assert problem.moved(right) is None


def test_two_states_are_not_swapped():
    problem, point = problem_and_point(CENTRES[:2], five_clusters())
    assert problem.moved(point) is None


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
