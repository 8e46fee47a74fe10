"""Small models: rows, truths, lost cells."""

import numpy as np
import pandas as pd
import pytest

from experiments.small_models import delete_cells, factor, latent_class, mixed_dag, mixture

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
