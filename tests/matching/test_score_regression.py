"""How well features tell scores: against least squares, and shares that are known."""

import numpy as np
import pytest
import torch

from otpdag.matching.score_features import ScoreRegression

ROWS = 5000


def made(extra=0.5):
    """Two scores that features tell, and one of which a part is beyond them."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64) @ torch.randn(
        4, 4, generator=generator, dtype=torch.float64
    )
    beyond = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    scores = torch.stack([features[:, 0], 3 * features[:, 1] - features[:, 2], features[:, 3] + extra * beyond], -1)
    whitening = torch.linalg.inv(torch.linalg.cholesky(torch.cov(features.T, correction=0))).T
    return features, scores, whitening


def test_slopes_are_those_of_least_squares():
    features, scores, whitening = made()
    ours = ScoreRegression.of(features + 7.0, scores - 2.0, whitening)
    design = np.column_stack([np.ones(ROWS), features])
    truth = np.linalg.lstsq(design, scores.numpy(), rcond=None)[0][1:]
    np.testing.assert_allclose(ours.slopes, truth, atol=1e-10)
    left = (scores.numpy() - design @ np.linalg.lstsq(design, scores.numpy(), rcond=None)[0]).var(0)
    np.testing.assert_allclose(ours.unexplained, left / scores.numpy().var(0), atol=1e-10)


def test_a_score_that_does_not_vary_has_nothing_unexplained_and_no_direction():
    features, scores, whitening = made()
    ours = ScoreRegression.of(features, torch.cat([scores, torch.ones(ROWS, 1).double()], -1), whitening)
    assert float(ours.unexplained[-1]) == 0.0
    assert ours.along(torch.zeros(4, dtype=torch.bool)).shape == (4, 3)


@pytest.mark.parametrize("untold", [[False] * 3, [False, False, True], [True] * 3])
def test_what_is_compared_is_whitened(untold):
    features, scores, whitening = made()
    untold = torch.tensor(untold)
    along = ScoreRegression.of(features, scores, whitening).along(untold)
    compared = torch.cat([features, scores[:, untold]], -1) @ along
    torch.testing.assert_close(torch.cov(compared.T, correction=0), torch.eye(3).double(), rtol=1e-8, atol=1e-8)


def test_what_is_compared_spans_scores_as_they_are_told_or_themselves():
    features, scores, whitening = made()
    untold = torch.tensor([False, False, True])
    along = ScoreRegression.of(features, scores, whitening).along(untold)
    compared = torch.cat([features, scores[:, untold]], -1) @ along
    design = (compared - compared.mean(0)).numpy()
    for score in (scores - scores.mean(0)).numpy().T:
        left = score - design @ np.linalg.lstsq(design, score, rcond=None)[0]
        assert left.var() < 1e-12 * score.var()


@pytest.mark.parametrize("share", [1.0, 0.5, 0.05])
def test_the_least_share_is_that_of_the_worst_direction(share):
    """One direction is seen in a share of the rows only."""
    features, scores, whitening = made()
    ours = ScoreRegression.of(features, scores, whitening)
    root = torch.linalg.cholesky(ours.information)
    free = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    free[int(share * 20_000) :, 1] = 0.0
    found = ours.least_share(free @ root.T, torch.ones(20_000).double())
    assert float(found) == pytest.approx(share, rel=0.06)


def test_weights_count_as_rows_in_shares():
    features, scores, whitening = made()
    ours = ScoreRegression.of(features, scores, whitening)
    seen = scores[:40] * 0.5
    weight = torch.ones(40).double()
    weight[:15] = 2.0
    repeated = torch.cat([seen, seen[:15]])
    torch.testing.assert_close(ours.least_share(seen, weight), ours.least_share(repeated, torch.ones(55).double()))
