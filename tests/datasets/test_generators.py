"""Generators: rows, truths, lost cells, documents about bars."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from otpdag.datasets import bars, delete_cells, factor, latent_class, mixed_dag, mixture, poisson_chain

GENERATORS = [factor, mixture, latent_class, mixed_dag]


@pytest.mark.parametrize("draw", GENERATORS)
def test_a_seed_fixes_truth_and_rows(draw):
    first, truth = draw(50, np.random.default_rng(3))
    second, again = draw(50, np.random.default_rng(3))
    other, _ = draw(50, np.random.default_rng(4))
    pd.testing.assert_frame_equal(first, second)
    assert truth.keys() == again.keys()
    assert len(first) == 50
    assert not first.equals(other)


@pytest.mark.parametrize("draw", GENERATORS)
@pytest.mark.parametrize("seed", range(20))
def test_every_truth_is_a_valid_model(draw, seed):
    _, truth = draw(2, np.random.default_rng(seed))
    for parameters in truth.values():
        for name, values in parameters.items():
            assert np.isfinite(values).all()
            if name == "probs":
                np.testing.assert_allclose(values.sum(axis=-1), 1.0)
                assert (values > 0).all()
            if name == "scale":
                assert (values > 0).all()


def test_factor_has_the_covariance_of_its_truth():
    frame, truth = factor(200_000, np.random.default_rng(0))
    loading = np.array([truth[name]["weight"][0] for name in frame])
    scale = np.array([truth[name]["scale"] for name in frame])
    intercept = [truth[name]["loc"] for name in frame]
    np.testing.assert_allclose(frame.cov(), np.outer(loading, loading) + np.diag(scale**2), atol=0.03)
    np.testing.assert_allclose(frame.mean(), intercept, atol=0.02)


def test_factor_loadings_are_mostly_positive():
    draws = [factor(1, np.random.default_rng(seed))[1] for seed in range(200)]
    loadings = np.array([[truth[f"x{j}"]["weight"][0] for j in range(1, 5)] for truth in draws])
    assert (loadings[:, 0] > 0).all()
    assert 0.1 < (loadings[:, 1:] < 0).mean() < 0.3


def test_mixture_has_the_moments_of_its_truth():
    frame, truth = mixture(200_000, np.random.default_rng(0))
    probs, loc, scale = truth["z"]["probs"], truth["x"]["loc"], truth["x"]["scale"]
    mean = probs @ loc
    np.testing.assert_allclose(frame.mean(), mean, atol=0.02)
    np.testing.assert_allclose(frame.var(), probs @ (scale**2 + loc**2) - mean**2, rtol=0.02)


@pytest.mark.parametrize("components", [1, 4, 6])
def test_mixture_keeps_its_means_apart(components):
    _, truth = mixture(1, np.random.default_rng(5), components=components)
    loc = truth["x"]["loc"]
    gaps = np.linalg.norm(loc[:, None] - loc[None, :], axis=-1)[~np.eye(components, dtype=bool)]
    assert loc.shape == (components, 2)
    assert (gaps >= 2.5).all()


def test_mixture_refuses_what_it_cannot_place():
    with pytest.raises(ValueError, match="`components` must be between 1 and 6; got 7"):
        mixture(1, np.random.default_rng(0), components=7)
    with pytest.raises(ValueError, match=r"cannot place 6 means 2\.5 apart in 1 dimensions"):
        mixture(1, np.random.default_rng(0), components=6, dim=1)


def test_latent_class_has_the_pair_table_of_its_truth():
    frame, truth = latent_class(200_000, np.random.default_rng(0))
    counts = pd.crosstab(frame["x1"], frame["x3"], normalize=True).to_numpy()
    expected = np.einsum("c,ci,cj->ij", truth["z"]["probs"], truth["x1"]["probs"], truth["x3"]["probs"])
    np.testing.assert_allclose(counts, expected, atol=0.005)


def test_latent_class_needs_a_favourite_state_for_each_class():
    with pytest.raises(ValueError, match="`classes` must be at most `states` = 3; got 4"):
        latent_class(1, np.random.default_rng(0), classes=4)


def test_mixed_dag_has_the_moments_of_its_truth():
    frame, truth = mixed_dag(400_000, np.random.default_rng(0))
    probs, loc, scale = truth["h"]["probs"], truth["x1"]["loc"], truth["x1"]["scale"]
    log_rate, weight = truth["x2"]["log_rate"], truth["x2"]["weight"][0]
    assert frame["x1"].mean() == pytest.approx(probs @ loc, abs=0.01)
    # E[exp(a + w x)] of a Normal x
    expected = probs @ np.exp(log_rate + weight * loc + 0.5 * (weight * scale) ** 2)
    assert frame["x2"].mean() == pytest.approx(expected, rel=0.01)
    shares = frame["x3"].value_counts(normalize=True).sort_index().to_numpy()
    np.testing.assert_allclose(shares, probs @ truth["x3"]["probs"], atol=0.005)


def test_delete_cells_takes_the_share_and_leaves_the_rest():
    frame = pd.DataFrame(np.arange(40_000).reshape(-1, 4), columns=list("abcd"))
    incomplete = delete_cells(frame, 0.3, np.random.default_rng(0))
    lost = incomplete.isna()
    assert lost.to_numpy().mean() == pytest.approx(0.3, abs=0.01)
    assert np.abs(np.corrcoef(lost.to_numpy().T) - np.eye(4)).max() < 0.05
    assert incomplete.where(~lost, frame).equals(frame.astype(float))
    assert not frame.isna().to_numpy().any()


def test_delete_cells_refuses_a_share_outside_its_range():
    with pytest.raises(ValueError, match=r"`share` must be between 0 and 1; got 1.5"):
        delete_cells(pd.DataFrame({"a": [1]}), 1.5, np.random.default_rng(0))


def test_states_stay_and_move_and_counts_follow_their_rates():
    counts, states, truth = poisson_chain(300, 80, np.random.default_rng(4))
    assert counts.shape == states.shape == (300, 80)
    stay = float(truth["z"]["stay"])
    assert 0.8 <= stay <= 0.9
    assert (states[:, 1:] == states[:, :-1]).mean() == pytest.approx(stay, abs=0.01)
    moved = (states[:, 1:] - states[:, :-1])[states[:, 1:] != states[:, :-1]] % 4
    assert (np.bincount(moved, minlength=4)[1:] / len(moved)).tolist() == pytest.approx([1 / 3] * 3, abs=0.03)
    assert (np.bincount(states[:, 0], minlength=4) / 300).tolist() == pytest.approx([0.25] * 4, abs=0.08)
    for state, rate in enumerate(np.exp(truth["x"]["log_rate"])):
        own = counts[states == state]
        assert own.mean() == pytest.approx(rate, rel=0.01)
        assert own.var() == pytest.approx(rate, rel=0.1)


def test_topics_are_the_rows_and_columns_of_a_grid():
    drawn = bars(10, 5, 20, seed=101)
    grids = drawn.topics.reshape(10, 5, 5)
    assert drawn.side == 5
    for line in range(5):
        np.testing.assert_allclose(grids[line], np.eye(5)[:, [line]] @ np.ones((1, 5)) / 5)
        np.testing.assert_allclose(grids[5 + line], np.ones((5, 1)) @ np.eye(5)[[line]] / 5)


def test_documents_have_their_length_and_are_sparse():
    drawn = bars(20, 2500, 30, seed=101)
    assert drawn.counts.shape == (2500, 100)
    assert drawn.counts.format == "csr"
    assert drawn.counts.nnz <= 2500 * 30
    np.testing.assert_array_equal(drawn.counts.sum(axis=1), 30)


def test_shares_are_dirichlet_and_words_follow_them():
    drawn = bars(4, 40_000, 1, alpha=[0.5, 1.0, 2.0, 0.5], seed=101)
    np.testing.assert_allclose(drawn.theta.mean(axis=0), drawn.alpha / 4, atol=0.005)
    total = drawn.alpha.sum()
    variance = drawn.alpha / total * (1 - drawn.alpha / total) / (total + 1)
    np.testing.assert_allclose(drawn.theta.var(axis=0), variance, atol=0.002)
    expected = (drawn.theta @ drawn.topics).sum(axis=0)
    assert stats.chisquare(np.asarray(drawn.counts.sum(axis=0)), expected).pvalue > 0.01


def test_words_of_a_document_share_its_topics():
    drawn = bars(10, 4000, 50, seed=102)
    expected = 50 * drawn.theta @ drawn.topics
    difference = drawn.counts.toarray() - expected
    spread = np.sqrt(expected * (1 - expected / 50)).mean()
    assert np.abs(difference.mean()) < 1e-9
    assert difference.std() == pytest.approx(np.sqrt((expected * (1 - expected / 50)).mean()), rel=0.02)
    assert spread > 0.1


def test_alpha_is_one_over_the_topics_if_left_out():
    np.testing.assert_allclose(bars(20, 1, 1, seed=0).alpha, 0.05)


def test_the_seed_determines_the_draw():
    first, again, other = (bars(4, 50, 10, seed=seed) for seed in (7, np.random.default_rng(7), 8))
    assert (first.counts != again.counts).nnz == 0
    assert (first.counts != other.counts).nnz > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topics": 5}, "`topics` must be an even number of at least 4; got 5"),
        ({"topics": 2}, "`topics` must be an even number of at least 4; got 2"),
        ({"documents": 0}, "`documents` must be at least 1; got 0"),
        ({"words": 0}, "`words` must be at least 1; got 0"),
        ({"alpha": -1.0}, "`alpha` must be positive; got -1"),
        ({"alpha": [0.1, 0.2]}, r"one for each of 4 topics; got shape \(2,\)"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        bars(**{"topics": 4, "documents": 3, "words": 5, "seed": 0, **options})
