"""The prior over codes learns a chain whose entropy is known, and draws from what it says."""

from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

from experiments.code_prior import CodePrior, CodeSequence, of_replica
from otpdag.errors import DataError, ModelError, NotFittedError
from otpdag.estimators import VectorQuantizedAutoencoder

STATES, POSITIONS = 4, 10


def draw_chain(rows, transition, rng, positions=POSITIONS):
    codes = np.empty((rows, positions), dtype=np.int64)
    codes[:, 0] = rng.integers(0, STATES, rows)
    for at in range(1, positions):
        cumulative = transition[codes[:, at - 1]].cumsum(1)
        codes[:, at] = (cumulative < rng.random((rows, 1))).sum(1).clip(max=STATES - 1)
    return codes


def true_log_prob(codes, transition):
    return np.log(transition[codes[:, :-1], codes[:, 1:]]).sum(1) - np.log(STATES)


@pytest.fixture(scope="module")
def chain():
    """A transition matrix, a prior fitted to its chains, and fresh chains."""
    rng = np.random.default_rng(101)
    transition = rng.dirichlet(np.full(STATES, 0.5), STATES)
    prior = CodePrior(STATES, layers=1, width=32, n_epochs=6, learning_rate=5e-3, random_state=101)
    return transition, prior.fit(draw_chain(2000, transition, rng)), draw_chain(2000, transition, rng)


@pytest.mark.slow
def test_cross_entropy_is_close_to_the_true_entropy(chain):
    transition, prior, fresh = chain
    entropy = -true_log_prob(fresh, transition).mean() / POSITIONS
    frequencies = np.bincount(fresh.ravel(), minlength=STATES) / fresh.size
    independent = -(frequencies * np.log(frequencies)).sum()
    assert independent > entropy + 0.15  # there is something to learn
    assert entropy - 0.01 < -prior.score(fresh) < entropy + 0.02


def test_log_probabilities_are_the_chains(chain):
    transition, prior, fresh = chain
    assert prior.log_prob(fresh).shape == (2000,)
    assert np.abs(prior.log_prob(fresh) - true_log_prob(fresh, transition)).mean() < 0.4


def test_draws_have_the_chains_transitions(chain):
    transition, prior, _ = chain
    drawn = prior.sample(3000, seed=102)
    assert drawn.shape == (3000, POSITIONS)
    found = np.zeros((STATES, STATES))
    np.add.at(found, (drawn[:, :-1].ravel(), drawn[:, 1:].ravel()), 1)
    np.testing.assert_allclose(found / found.sum(1, keepdims=True), transition, atol=0.04)
    np.testing.assert_array_equal(drawn, prior.sample(3000, seed=102))
    assert (drawn != prior.sample(3000, seed=103)).any()


def test_a_low_temperature_favours_likely_codes(chain):
    _, prior, _ = chain
    assert prior.score(prior.sample(300, seed=104, temperature=0.3)) > prior.score(prior.sample(300, seed=104)) + 0.1


def untrained(positions=3, n_codes=3, columns=None):
    """A network with random parameters, on its own."""
    mechanism = CodeSequence(positions, n_codes, columns=columns, layers=2, width=8, heads=2)
    generator = torch.Generator().manual_seed(105)
    shapes = {name: parameter.shape for name, parameter in mechanism.parameters().items()}
    return mechanism, {name: 0.7 * torch.randn(1, *shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("columns", [None, 1, 2])
def test_probabilities_of_all_vectors_sum_to_one(columns):
    mechanism, params = untrained(columns=columns)
    every = torch.tensor(list(product(range(3), repeat=3)), dtype=torch.float64).unsqueeze(0)
    assert float(mechanism.log_prob(params, every, {}).exp().sum()) == pytest.approx(1.0, abs=1e-5)


def test_draws_follow_the_log_probabilities():
    mechanism, params = untrained()
    every = torch.tensor(list(product(range(3), repeat=3)), dtype=torch.float64).unsqueeze(0)
    expected = mechanism.log_prob(params, every, {})[0].exp().numpy()
    uniform = torch.rand(1, 20000, 3, generator=torch.Generator().manual_seed(106), dtype=torch.float64)
    drawn = mechanism.forward(params, {}, uniform)[0].long().numpy()
    counts = np.bincount(drawn @ [9, 3, 1], minlength=27)
    kept = expected > 1e-4
    shares = expected[kept] / expected[kept].sum()
    assert stats.chisquare(counts[kept], shares * counts[kept].sum()).pvalue > 0.01


@pytest.mark.parametrize("columns", [None, 1, 3])
def test_one_step_at_a_time_is_all_at_once(columns):
    mechanism, params = untrained(positions=7, n_codes=5, columns=columns)
    own = of_replica(params, 0)
    codes = torch.randint(5, (4, 7), generator=torch.Generator().manual_seed(107))
    kept = torch.empty(2, 2, 4, 2, 7, 4)
    steps = [mechanism._logits(own, codes, m, kept)[:, 0] for m in range(7)]
    torch.testing.assert_close(torch.stack(steps, 1), mechanism._logits(own, codes), atol=1e-4, rtol=1e-4)


def test_codes_of_a_grid_see_those_above_them():
    """Columns that keep their code down a grid of 6 x 6: what is above tells more than what is left."""
    rng = np.random.default_rng(111)
    codes = np.repeat(rng.integers(0, STATES, (600, 1, 6)), 6, 1).reshape(600, -1)
    settings = {"layers": 1, "width": 16, "n_epochs": 4, "learning_rate": 5e-3}
    as_grid, as_line = (CodePrior(STATES, columns=columns, **settings).fit(codes) for columns in (None, 36))
    least = np.log(STATES) / 6  # only the first row is free
    assert least < -as_grid.score(codes) < least + 0.1
    assert as_grid.score(codes) > as_line.score(codes) + 0.3


def test_it_starts_at_the_frequencies_of_each_position():
    codes = np.stack([np.zeros(1000, int), np.arange(1000) % 2], 1)
    start = CodeSequence(2, 4).start(torch.as_tensor(codes, dtype=torch.float64), {}, torch.ones(1000))
    np.testing.assert_allclose(start["frequency"].exp(), [[1, 0, 0, 0], [0.5, 0.5, 0, 0]], atol=5e-3)


def stripes(rows, rng):
    """Images whose left and right halves are both dark or both bright."""
    bright = rng.integers(0, 2, (rows, 1, 1, 1))
    return (60 + 140 * bright + rng.integers(0, 20, (rows, 8, 8, 1))).astype(np.uint8)


@pytest.mark.slow
def test_images_are_made_of_codes_that_go_together():
    images = stripes(300, np.random.default_rng(109))
    model = VectorQuantizedAutoencoder(4, 4, width=8, n_epochs=10, learning_rate=5e-3, random_state=109).fit(images)
    prior = CodePrior(4, layers=1, width=16, n_epochs=20, learning_rate=1e-2).fit(model.encode(images))
    made = model.decode(prior.sample(200, seed=110))
    assert made.shape == (200, 8, 8, 1)
    brightness = made.reshape(200, 8, 2, 4).mean((1, 3))
    assert np.corrcoef(brightness.T)[0, 1] > 0.9  # halves agree; of independent codes they would not
    assert 0.3 < (brightness.mean(1) > 140).mean() < 0.7


def test_vectors_of_one_code():
    codes = np.random.default_rng(108).choice(3, p=[0.6, 0.3, 0.1], size=(500, 1))
    prior = CodePrior(3, layers=1, width=8, n_epochs=2).fit(codes)
    np.testing.assert_allclose(np.exp(prior.log_prob([[0], [1], [2]])), [0.6, 0.3, 0.1], atol=0.08)


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (np.zeros((5, 2)), r"codes must be integers \(n, positions\); got shape \(5, 2\) of float64"),
        (np.zeros(5, int), r"got shape \(5,\) of int64"),
        (np.full((5, 2), 7), "codes must be from 0 to 3; got 7 to 7"),
    ],
)
def test_what_are_no_codes_is_refused(codes, message):
    with pytest.raises(DataError, match=message):
        CodePrior(4).fit(codes)


def test_what_makes_no_sense_is_refused(chain):
    _, prior, fresh = chain
    with pytest.raises(NotFittedError, match=r"call fit\(codes\) first"):
        CodePrior(4).sample()
    with pytest.raises(DataError, match="must have 10 positions, as in fit; got 9"):
        prior.log_prob(fresh[:, 1:])
    with pytest.raises(DataError, match="`n` must be at least 1; got 0"):
        prior.sample(0)
    with pytest.raises(DataError, match="`temperature` must be above 0; got 0"):
        prior.sample(1, temperature=0)
    with pytest.raises(ModelError, match="`width` must be a multiple of the 4 heads; got 10"):
        CodePrior(4, width=10).fit(fresh)
    with pytest.raises(ModelError, match="n_epochs must be a whole number of at least 1; got 0"):
        CodePrior(4, n_epochs=0).fit(fresh)
    with pytest.raises(ModelError, match="columns must be a whole number of at least 1; got -2"):
        CodePrior(4, columns=-2).fit(fresh)
    with pytest.raises(ModelError, match="n_codes must be a whole number of at least 2; got 1"):
        CodePrior(1).fit(np.zeros((3, 2), int))
