import numpy as np
import pytest

from benchmarks import oracles
from benchmarks.oracles.mixed_dag import Table, _loss, _pack, mean_log_likelihood
from benchmarks.problems import PROBLEMS
from experiments.small_models import factor, latent_class, mixed_dag
from otpdag.datasets import DiscreteNetwork


def mean_error(problem, rows, repeats=3):
    errors = []
    for seed in range(repeats):
        frame, truth = problem.draw(rows, np.random.default_rng(seed))
        errors.append(problem.error(truth, problem.oracle(frame, truth, seed)))
    return np.mean(errors)


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_errors_shrink_like_the_root_of_the_rows(problem):
    few, many = mean_error(problem, 500), mean_error(problem, 8000)
    assert many < 0.03
    assert 2.0 < few / many < 8.0  # about 4 = sqrt(16)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_the_error_of_the_truth_is_zero(problem):
    _, truth = problem.draw(1, np.random.default_rng(0))
    assert problem.error(truth, truth) == 0.0


def latent_class_likelihood(params, frame):
    joint = np.log(params["z"]["probs"])[None] + sum(np.log(params[name]["probs"])[:, frame[name]].T for name in frame)
    return np.log(np.exp(joint).sum(axis=1)).mean()


def test_latent_class_em_is_at_the_top_of_the_likelihood():
    frame, truth = latent_class(3000, np.random.default_rng(1))
    found = oracles.latent_class_em(frame, truth, seed=0)
    again = oracles.latent_class_em(frame, truth, seed=1)
    top = latent_class_likelihood(found, frame)
    assert top > latent_class_likelihood(truth, frame)
    assert top == pytest.approx(latent_class_likelihood(again, frame), abs=1e-7)


def test_mixed_dag_gradient_is_that_of_its_loss():
    frame, truth = mixed_dag(300, np.random.default_rng(2))
    table, start = Table.of(frame, 3), _pack(truth) + 0.1 * np.random.default_rng(3).normal(size=22)
    gradient = _loss(start, table, 3)[1]
    steps = 1e-6 * np.eye(22)
    slopes = [(_loss(start + s, table, 3)[0] - _loss(start - s, table, 3)[0]) / 2e-6 for s in steps]
    np.testing.assert_allclose(gradient, slopes, atol=1e-7)


def test_mixed_dag_ml_beats_the_truth_from_whatever_start():
    frame, truth = mixed_dag(3000, np.random.default_rng(4))
    found = oracles.mixed_dag_ml(frame, truth, seed=0)
    from_truth_only = oracles.mixed_dag_ml(frame, truth, seed=0, starts=0)
    top = mean_log_likelihood(found, frame)
    assert top > mean_log_likelihood(truth, frame)
    assert top == pytest.approx(mean_log_likelihood(from_truth_only, frame), abs=1e-6)


def test_sibling_sample_keeps_the_correlation():
    frame, _ = factor(5000, np.random.default_rng(5), indicators=2)
    sample = oracles.sibling_sample(frame, 100_000, seed=0)
    assert sample.corr().iloc[0, 1] == pytest.approx(frame.corr().iloc[0, 1], abs=0.01)


@pytest.mark.filterwarnings("ignore")
def test_network_em_recovers_the_distribution_of_the_observed_nodes():
    pytest.importorskip("pgmpy")
    network = DiscreteNetwork(
        states={"a": ("0", "1"), "h": ("0", "1"), "b": ("0", "1", "2"), "c": ("0", "1")},
        parents={"a": (), "h": ("a",), "b": ("h",), "c": ("a", "h")},
        tables={
            "a": np.array([0.4, 0.6]),
            "h": np.array([[0.8, 0.2], [0.3, 0.7]]),
            "b": np.array([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]]),
            "c": np.array([[[0.9, 0.1], [0.4, 0.6]], [[0.6, 0.4], [0.1, 0.9]]]),
        },
    )
    frame = network.sample(20_000, np.random.default_rng(6)).drop(columns="h")
    found = oracles.network_em(network, frame, seeds=[0, 1])
    np.testing.assert_allclose(found.joint(list(frame)), network.joint(list(frame)), atol=0.01)
