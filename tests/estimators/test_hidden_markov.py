"""The hidden Markov estimator, beside hmmlearn where it is installed."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import poisson
from sklearn import exceptions
from sklearn.base import clone
from sklearn.utils.estimator_checks import parametrize_with_checks

import otpdag as otp
from experiments.small_models import poisson_chain
from otpdag.estimators import HiddenMarkovModel

LENGTHS = [60] * 10


@pytest.fixture(scope="module")
def counts():
    found, states, truth = poisson_chain(10, 60, np.random.default_rng(0))
    return found.reshape(-1, 1), states.ravel(), truth


@pytest.fixture(scope="module")
def fitted(counts):
    return HiddenMarkovModel(4, emission="poisson", n_init=2).fit(counts[0], LENGTHS)


def test_recovery(fitted, counts):
    X, states, truth = counts
    np.testing.assert_allclose(np.log(fitted.lambdas_[:, 0]), truth["x"]["log_rate"], atol=0.06)
    np.testing.assert_allclose(fitted.transmat_.sum(1), 1.0)
    np.testing.assert_allclose(fitted.startprob_.sum(), 1.0)
    assert (fitted.predict(X, LENGTHS) == states).mean() > 0.96
    assert fitted.predict_proba(X, LENGTHS).shape == (600, 4)
    np.testing.assert_allclose(fitted.predict_proba(X, LENGTHS).sum(1), 1.0)


def test_hmmlearn_gives_the_same_numbers(fitted, counts):
    hmm = pytest.importorskip("hmmlearn.hmm")
    X, _, _ = counts
    peer = hmm.PoissonHMM(4)
    peer.startprob_, peer.transmat_, peer.lambdas_ = fitted.startprob_, fitted.transmat_, fitted.lambdas_
    assert fitted.score(X, LENGTHS) == pytest.approx(peer.score(X, LENGTHS), rel=1e-9)
    np.testing.assert_allclose(fitted.predict_proba(X, LENGTHS), peer.predict_proba(X, LENGTHS), atol=1e-8)
    log_prob, path = fitted.decode(X, LENGTHS)
    peer_log_prob, peer_path = peer.decode(X, LENGTHS)
    assert log_prob == pytest.approx(peer_log_prob, rel=1e-9)
    np.testing.assert_array_equal(path, peer_path)


def test_hmmlearn_finds_no_better_maximum_nearby(fitted, counts):
    hmm = pytest.importorskip("hmmlearn.hmm")
    X, _, _ = counts
    peer = hmm.PoissonHMM(4, init_params="", n_iter=20, tol=1e-6)
    peer.startprob_, peer.transmat_, peer.lambdas_ = fitted.startprob_, fitted.transmat_, fitted.lambdas_
    peer.fit(X, LENGTHS)
    assert peer.score(X, LENGTHS) - fitted.score(X, LENGTHS) < 0.01


def test_the_likeliest_path_is_the_best_of_all():
    hmm = HiddenMarkovModel(2, emission="poisson", n_init=1).fit(np.random.default_rng(0).poisson([[2], [9]] * 30))
    x = np.array([1, 8, 4, 5])
    log_prob, path = hmm.decode(x)
    rate = hmm.lambdas_[:, 0]

    def log_of(probability):
        return math.log(probability) if probability > 0 else -math.inf  # one series leaves no doubt of its beginning

    def joint(states):
        log = log_of(hmm.startprob_[states[0]])
        log += sum(log_of(hmm.transmat_[a, b]) for a, b in itertools.pairwise(states))
        return log + sum(k * math.log(rate[s]) - rate[s] - math.lgamma(k + 1) for k, s in zip(x, states, strict=True))

    best = max(itertools.product(range(2), repeat=4), key=joint)
    assert tuple(path) == best
    assert log_prob == pytest.approx(joint(best))


def test_the_one_parameter_form(counts):
    X, _, truth = counts
    hmm = HiddenMarkovModel(4, emission="poisson", transitions="stay", startprob="uniform", n_init=1).fit(X, LENGTHS)
    assert hmm.stay_ == pytest.approx(float(truth["z"]["stay"]), abs=0.05)
    np.testing.assert_allclose(hmm.transmat_.diagonal(), hmm.stay_)
    np.testing.assert_allclose(hmm.transmat_.sum(1), 1.0)
    np.testing.assert_allclose(hmm.startprob_, 0.25)
    assert hmm.n_parameters_ == 4 + 1


def test_a_fixed_transition_matrix(counts):
    X, _, _ = counts
    moves = np.full((4, 4), 0.05) + 0.8 * np.eye(4)
    hmm = HiddenMarkovModel(4, emission="poisson", transmat=moves, n_init=1).fit(X, LENGTHS)
    np.testing.assert_allclose(hmm.transmat_, moves)
    assert hmm.n_parameters_ == 4 + 3


def chain(rng, steps):
    states = np.zeros(steps, dtype=int)
    for t in range(1, steps):
        states[t] = states[t - 1] if rng.random() < 0.95 else 1 - states[t - 1]
    return states


def test_gaussian_categorical_and_bernoulli_columns():
    rng = np.random.default_rng(0)
    z = chain(rng, 1500)
    X = np.stack(
        [
            rng.normal(np.array([0.0, 3.0])[z], np.array([1.0, 0.5])[z]),
            (rng.random(1500)[:, None] > np.array([[0.7, 0.9], [0.1, 0.3]])[z]).sum(1),
            rng.random(1500) < np.array([0.2, 0.8])[z],
            rng.poisson(np.array([4.0, 6.0])[z]),
        ],
        1,
    )
    X[rng.random(X.shape) < 0.1] = np.nan
    hmm = HiddenMarkovModel(2, emission=["gaussian", "categorical", "bernoulli", "poisson"], n_init=2).fit(X)
    np.testing.assert_allclose(hmm.means_[:, 0], [0.0, 3.0], atol=0.15)
    np.testing.assert_allclose(hmm.covars_[:, 0], [1.0, 0.25], atol=0.15)
    np.testing.assert_allclose(hmm.emissionprob_[0], [[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]], atol=0.06)
    np.testing.assert_allclose(hmm.emissionprob_[1][:, 1], [0.2, 0.8], atol=0.06)
    np.testing.assert_allclose(hmm.lambdas_[:, 0], [4.0, 6.0], atol=0.4)
    assert (hmm.predict(X) == z).mean() > 0.97


def test_samples(fitted):
    X, states = fitted.sample(2000, random_state=1)
    assert X.shape == (2000, 1)
    assert set(states) <= {0, 1, 2, 3}
    for k in range(4):
        assert X[states == k].mean() == pytest.approx(fitted.lambdas_[k, 0], rel=0.1)


def test_it_is_a_scikit_learn_estimator(fitted):
    copy = clone(fitted)
    assert copy.get_params() == fitted.get_params()
    assert not hasattr(copy, "model_")
    assert isinstance(fitted.model_, otp.Model)


def test_criteria_choose_the_number_of_states(counts):
    X, _, _ = counts
    scores = [HiddenMarkovModel(k, emission="poisson", n_init=2).fit(X, LENGTHS).bic(X, LENGTHS) for k in (3, 4)]
    assert scores[1] < scores[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_components": 0}, "whole number of at least 1"),
        ({"n_components": 1, "transitions": "stay"}, "at least 2"),
        ({"transitions": "some"}, "one of 'full', 'stay'"),
        ({"transitions": "stay", "transmat": np.eye(2)}, "not both"),
        ({"startprob": "first"}, "'learn', 'uniform'"),
        ({"emission": "gamma"}, "emission must be one of 'auto', 'poisson'"),
        ({"emission": ["poisson", "poisson"]}, "one kind for each of the 1 columns"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(otp.ModelError, match=message):
        HiddenMarkovModel(**options).fit(np.ones((10, 1)))


def test_bad_calls_are_refused(fitted):
    with pytest.raises(otp.NotFittedError, match="not fitted"):
        HiddenMarkovModel(2).predict([1, 2])
    with pytest.raises(exceptions.NotFittedError, match="not fitted"):
        HiddenMarkovModel(2).predict([1, 2])
    with pytest.raises(otp.DataError, match="X has 2 features, but HiddenMarkovModel is expecting 1"):
        fitted.predict(np.ones((3, 2)))
    with pytest.raises(otp.DataError, match="add up"):
        fitted.predict(np.ones((3, 1)), lengths=[2])


def test_earthquakes(data_folder):
    series = pd.read_csv(data_folder / "counts" / "earthquakes.csv")
    hmm = HiddenMarkovModel(3, emission="poisson").fit(series[["count"]])
    np.testing.assert_allclose(hmm.lambdas_[:, 0], [13.146, 19.721, 29.714], rtol=0.01)
    assert hmm.score(series[["count"]]) == pytest.approx(-328.5275, abs=0.01)


SERIES = "a series may have one axis"
ORDERED = "steps are in the order of time, and score_samples is hmmlearn's: a likelihood and probabilities"
EXPECTED_FAILURES = {
    "check_fit1d": SERIES,
    "check_fit2d_predict1d": SERIES,
    "check_methods_sample_order_invariance": ORDERED,
    "check_methods_subset_invariance": ORDERED,
}


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
@parametrize_with_checks(
    [HiddenMarkovModel(n_init=1, n_iter=20)], expected_failed_checks=lambda estimator: EXPECTED_FAILURES
)
def test_contract_of_scikit_learn(estimator, check):
    check(estimator)


def test_a_target_is_ignored_and_lengths_may_come_second_as_in_hmmlearn(counts):
    X = counts[0][:60]
    fits = [
        HiddenMarkovModel(2, n_init=1).fit(X, [30, 30]),
        HiddenMarkovModel(2, n_init=1).fit(X, lengths=[30, 30]),
        HiddenMarkovModel(2, n_init=1).fit(X, np.zeros(60), lengths=[30, 30]),
    ]
    for other in fits[1:]:
        np.testing.assert_array_equal(other.transmat_, fits[0].transmat_)
    assert fits[0].score(X, [30, 30]) == fits[0].score(X, lengths=[30, 30]) != fits[0].score(X)
    with pytest.raises(otp.DataError, match="y must have an entry for each of 60 steps"):
        fits[0].fit(X, [20, 40], lengths=[30, 30])


def test_the_nile_is_gaussian_by_default_and_counts_are_poisson(counts):
    datasets = pytest.importorskip("statsmodels.datasets")
    volume = datasets.nile.load_pandas().data[["volume"]]
    assert HiddenMarkovModel(2).fit(volume).emission_ == ("gaussian",)
    mixed = np.column_stack([volume["volume"], np.random.default_rng(0).poisson(4.0, len(volume))])
    assert HiddenMarkovModel(2, n_init=1).fit(mixed).emission_ == ("gaussian", "poisson")


def test_one_state_is_one_distribution():
    X = np.random.default_rng(0).poisson(4.0, 200)
    hmm = HiddenMarkovModel(1).fit(X)
    np.testing.assert_allclose(hmm.lambdas_, [[X.mean()]], rtol=1e-6)
    assert hmm.transmat_.tolist() == [[1.0]]
    assert hmm.score(X) == pytest.approx(poisson.logpmf(X, X.mean()).sum(), abs=1e-6)


def test_without_a_seed_every_draw_is_another(fitted):
    copy = clone(fitted).set_params(random_state=None, n_init=1, n_components=2)
    copy.fit(np.random.default_rng(0).poisson(4.0, 50))
    assert (copy.sample(50)[0] != copy.sample(50)[0]).any()


def test_forecasts_follow_the_chain():
    """Far ahead of a step whose state is known, the expected count is that of the chain's powers."""
    counts, _, _ = poisson_chain(40, 100, np.random.default_rng(21))
    lengths = [100] * 40
    steps = pd.DataFrame({"calls": counts.reshape(-1).astype(float)})
    hmm = HiddenMarkovModel(4, emission="poisson", random_state=3).fit(steps, lengths)
    told = hmm.forecast(steps.head(100), 3, draws=4000)
    assert list(told.columns) == ["calls", "calls.lower", "calls.upper"]
    last = hmm.predict_proba(steps.head(100))[-1]
    for step in (1, 2, 3):
        reached = last @ np.linalg.matrix_power(hmm.transmat_, step)
        expected = float(reached @ hmm.lambdas_[:, 0])
        spread = np.sqrt(reached @ (hmm.lambdas_[:, 0] + hmm.lambdas_[:, 0] ** 2) - expected**2)
        row = told.xs((0, step))
        assert row["calls"] == pytest.approx(expected, abs=4 * spread / np.sqrt(4000) + 0.3)
        assert row["calls.lower"] <= row["calls"] <= row["calls.upper"]
