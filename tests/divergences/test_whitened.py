"""Whitened features: zero on equal samples, whitening, missing cells, weights as repetition."""

import numpy as np
import pytest
import torch

from otpdag.divergences import WhitenedFeatures
from otpdag.divergences.whitened import (
    FeatureColumn,
    _covariance,
    _mean,
    _overlap,
    _robust,
    products_of_lines,
    whitening_of,
)

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def columns_of(x, seen=None):
    seen = torch.ones_like(x, dtype=torch.bool) if seen is None else seen
    return [FeatureColumn(x[..., i : i + 1], seen[..., i]) for i in range(x.shape[-1])]


def features_of(fitted, x):
    return fitted.combine([kernel(x[..., i : i + 1]) for i, kernel in enumerate(fitted.kernels)])


@pytest.mark.parametrize("columns", [1, 2, 5])
def test_zero_on_the_same_sample_in_any_order(columns):
    x = normal(1, 120, columns)
    divergence = WhitenedFeatures(features=50)
    assert divergence(x, x).item() == pytest.approx(0, abs=1e-12)
    assert divergence(x, x[:, torch.randperm(120, generator=GENERATOR)]).item() == pytest.approx(0, abs=1e-12)


def test_grows_with_the_distance_and_tells_dependence():
    x = normal(1, 500, 2)
    divergence = WhitenedFeatures(features=80)
    shifts = [divergence(x, x + shift).item() for shift in (0.1, 0.3, 1.0)]
    assert 0 < shifts[0] < shifts[1] < shifts[2]
    swapped = torch.stack([x[..., 0], x[..., 0]], -1)  # right margins, wrong dependence
    assert divergence(x, swapped).item() > 0.1


def test_the_whitening_makes_the_features_covariance_the_identity():
    x = normal(1, 4000, 3)
    fitted = WhitenedFeatures(features=40, ridge=1e-9).fit(columns_of(x), torch.ones(1, 4000).double())
    white = (features_of(fitted, x) @ fitted.whitening)[0]
    covariance = np.cov(white.T.numpy(), bias=True)
    eigenvalues = np.linalg.eigvalsh(covariance)
    # all directions but those that the ridge holds down have variance one
    assert eigenvalues.max() == pytest.approx(1, abs=1e-6)
    assert (eigenvalues > 0.99).sum() > 30
    np.testing.assert_allclose(covariance - np.diag(np.diag(covariance)), 0, atol=1e-6)


def test_the_ridge_bounds_the_whitening():
    x = normal(1, 300, 2)
    fitted = WhitenedFeatures(features=40, ridge=1e-2).fit(columns_of(x), torch.ones(1, 300).double())
    covariance = torch.cov(features_of(fitted, x)[0].T, correction=0)
    largest = torch.linalg.eigvalsh(covariance)[-1]
    ridged = covariance + 1e-2 * largest * torch.eye(40, dtype=torch.float64)
    whitening = fitted.whitening[0]
    torch.testing.assert_close(whitening @ whitening.T, torch.linalg.inv(ridged), rtol=1e-6, atol=1e-6)


def test_under_the_null_the_distance_is_about_the_number_of_features_over_rows():
    """n D is then chi-squared with as many degrees of freedom as features, but for the ridge and the estimation."""
    x = normal(1, 4000, 3)
    fitted = WhitenedFeatures(features=30, ridge=1e-9).fit(columns_of(x), torch.ones(1, 4000).double())
    found = [4000 * fitted.distance(features_of(fitted, normal(1, 4000, 3)).mean(1)).item() for _ in range(20)]
    # both samples vary: twice the degrees of freedom
    assert np.mean(found) == pytest.approx(2 * 30, rel=0.25)


def test_sample_weights_of_y_are_repetitions():
    x, y = normal(1, 100, 2), normal(1, 40, 2) + 0.5
    weight = torch.randint(1, 5, (1, 40), generator=GENERATOR).double()
    divergence = WhitenedFeatures(features=30)
    repeated = y.repeat_interleave(weight[0].long(), 1)
    assert divergence(x, y, None, weight).item() == pytest.approx(divergence(x, repeated).item(), rel=1e-10)


def test_missing_cells_are_left_out_of_every_mean():
    x = normal(1, 3000, 3)
    seen = torch.rand(1, 3000, 3, generator=GENERATOR) < 0.7
    hidden = torch.where(seen, x, 1e6)  # whatever stands in a missing cell must not matter
    ones = torch.ones(1, 3000).double()
    features = WhitenedFeatures(features=40)
    fitted = features.fit(columns_of(hidden, seen), ones)
    again = features.fit(columns_of(torch.where(seen, x, 0.0), seen), ones)
    torch.testing.assert_close(fitted.mean, again.mean)
    torch.testing.assert_close(fitted.whitening.abs(), again.whitening.abs())
    full = features_of(fitted, x).mean(1)
    error = features_of(fitted, x).std(1) / 3000**0.5
    assert ((fitted.mean - full).abs() < 5 * error).all()


def test_categories_and_counts_have_their_own_kernels():
    codes = torch.randint(3, (1, 200), generator=GENERATOR)
    one_hot = torch.nn.functional.one_hot(codes, 3).double()
    counts = torch.poisson(torch.full((1, 200, 1), 5.0, dtype=torch.float64), generator=GENERATOR)
    seen = torch.ones(1, 200, dtype=torch.bool)
    columns = [FeatureColumn(one_hot, seen, is_discrete=True), FeatureColumn(counts, seen, root=True)]
    fitted = WhitenedFeatures(features=30).fit(columns, torch.ones(1, 200).double())
    discrete, count = fitted.kernels
    assert set(discrete(one_hot).unique().tolist()) == {0.0, 1.0}
    transformed = count.transform(counts)
    torch.testing.assert_close(transformed, (counts.sqrt() - count.centre) / count.spread)
    assert fitted.distance(fitted.mean).item() == 0


def test_units_of_a_column_do_not_matter():
    x, y = normal(1, 200, 2), normal(1, 200, 2)
    unit, shift = torch.tensor([1e4, 1e-3]), torch.tensor([1e6, 5.0])
    divergence = WhitenedFeatures(features=30)
    assert divergence(x * unit + shift, y * unit + shift).item() == pytest.approx(divergence(x, y).item(), rel=1e-5)


def test_a_constant_column_is_no_trouble():
    x = torch.cat([normal(1, 60, 1), torch.full((1, 60, 1), 3.0, dtype=torch.float64)], -1)
    divergence = WhitenedFeatures(features=20)
    assert divergence(x, x).item() == pytest.approx(0, abs=1e-12)
    assert torch.isfinite(divergence(x, x + 1))


def test_replicas_are_compared_one_by_one():
    x, y = normal(1, 80, 2), normal(3, 80, 2)
    divergence = WhitenedFeatures(features=25)
    together = divergence(x, y)
    assert together.shape == (3,)
    for r in range(3):
        assert divergence(x, y[r : r + 1]).item() == pytest.approx(together[r].item(), rel=1e-10)


def test_gradients_reach_the_model_sample():
    x, y = normal(1, 40, 2), normal(1, 10, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda value: WhitenedFeatures(features=8)(x, value), [y], atol=1e-5)


def test_a_second_whitening_uses_the_other_samples_covariance_and_the_datas_gaps():
    x, sample = normal(1, 500, 2), normal(1, 3000, 2)
    seen = torch.rand(1, 500, 2, generator=GENERATOR) < 0.8
    fitted = WhitenedFeatures(features=12, largest_subset=1).fit(columns_of(x, seen), torch.ones(1, 500).double())
    again = fitted.rewhitened(columns_of(sample), torch.ones(1, 3000).double(), 1e-2)
    torch.testing.assert_close(again.mean, fitted.mean)
    features = features_of(fitted, sample)[0]
    covariance = torch.cov(features.T, correction=0)
    owner = torch.zeros(12, dtype=torch.long)
    for column, kernel in enumerate(fitted.kernels):
        owner[kernel.features] = column
    both = (seen[0].double().T @ seen[0].double()) * 500
    alone = seen[0].double().sum(0)
    overlap = both[owner][:, owner] / (alone[owner][:, None] * alone[owner][None])
    covariance = covariance * overlap
    largest = torch.linalg.eigvalsh(covariance)[-1]
    expected = torch.linalg.inv(covariance + 1e-2 * largest * torch.eye(12, dtype=torch.float64))
    torch.testing.assert_close(again.whitening[0] @ again.whitening[0].T, expected)


def test_weights_of_rows_are_repetitions_whether_cells_are_missing_or_not():
    values, seen = normal(1, 30, 6), torch.rand(1, 30, 6, generator=GENERATOR) < 0.7
    often = torch.randint(1, 4, (30,), generator=GENERATOR)
    weight, rows = often.double().unsqueeze(0), torch.arange(30).repeat_interleave(often)
    ones = torch.ones(1, len(rows)).double()
    torch.testing.assert_close(_overlap(seen, weight), _overlap(seen[:, rows], ones))
    for told in (_mean, _covariance):
        for gaps, again in ((seen, seen[:, rows]), (None, None)):
            torch.testing.assert_close(told(values, gaps, weight), told(values[:, rows], again, ones))
    # means over the rows that show a feature, and rows that show two over what independent gaps would leave
    shown = seen[0, rows].double()
    torch.testing.assert_close(_mean(values, seen, weight)[0], (shown * values[0, rows]).sum(0) / shown.sum(0))
    expected = len(rows) * (shown.T @ shown) / torch.outer(shown.sum(0), shown.sum(0))
    torch.testing.assert_close(_overlap(seen, weight)[0], expected)


def test_numbers_are_standardised_by_median_and_deviation_or_what_there_is():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 100.0]).double()
    assert _robust(values) == pytest.approx((3.0, 1.4826))
    flat = torch.tensor([5.0, 5.0, 5.0, 5.0, 9.0]).double()
    assert _robust(flat) == pytest.approx((5.0, flat.std().item()))
    assert _robust(torch.full((4,), 2.0).double()) == (2.0, 1.0)
    assert _robust(torch.tensor([1.0, 3.0]).double()) == pytest.approx((1.0, 2**0.5))
    assert _robust(torch.tensor([7.0]).double()) == (7.0, 1.0)
    assert _robust(1e-10 * values) == pytest.approx((3e-10, (1e-10 * values).std().item()))


def test_features_are_products_of_kernels_on_their_columns_at_a_row_of_the_data():
    x, k = normal(1, 60, 1), torch.eye(3).double()[torch.randint(3, (1, 60), generator=GENERATOR)]
    counts = torch.poisson(torch.full((1, 60, 1), 6.0), generator=GENERATOR).double()
    seen = torch.ones(1, 60).bool()
    columns = [FeatureColumn(x, seen), FeatureColumn(k, seen, is_discrete=True), FeatureColumn(counts, seen, root=True)]
    features = WhitenedFeatures(features=40, largest_subset=2, bandwidths=(0.5, 2.0))
    fitted = features.fit(columns, torch.ones(1, 60).double())
    subsets, landmarks, bandwidth = features._choose(columns, torch.Generator().manual_seed(features.seed))
    assert {len(subset) for subset in subsets} == {1, 2}
    assert set(bandwidth.tolist()) == {0.5, 2.0}
    scaled = []
    for column in (x, counts.sqrt()):
        centre, spread = _robust(column.flatten())
        scaled.append((column[0, :, 0] - centre) / spread)
    expected = torch.ones(60, 40).double()
    for feature, (subset, row) in enumerate(zip(subsets, landmarks, strict=True)):
        for column in subset:
            if column == 1:
                expected[:, feature] *= (k[0] * k[0, row]).sum(-1)
            else:
                gap = (scaled[column // 2] - scaled[column // 2][row]) / bandwidth[feature]
                expected[:, feature] *= torch.exp(-0.5 * gap**2)
    torch.testing.assert_close(fitted.mean[0], expected.mean(0))
    other = torch.rand(1, 60, generator=GENERATOR).double()
    torch.testing.assert_close(fitted.mean_of(columns, other)[0], other[0] @ expected / other.sum())
    covariance = torch.cov(expected.T, correction=0)
    largest = torch.linalg.eigvalsh(covariance)[-1]
    inverse = torch.linalg.inv(covariance + features.ridge * largest * torch.eye(40).double())
    gap = fitted.mean[0] - expected[:20].mean(0)
    distance = fitted.distance(expected[:20].mean(0, keepdim=True))
    assert distance.item() == pytest.approx((gap @ inverse @ gap).item(), rel=1e-6)


def test_directions_that_gaps_made_negative_count_as_the_ridge():
    """A covariance times the overlap of gaps need not be positive."""
    turn = torch.linalg.qr(normal(3, 3)).Q
    values = torch.tensor([2.0, 0.5, -0.3]).double()
    matrix = whitening_of(turn @ torch.diag(values) @ turn.T, 0.1)
    expected = turn @ torch.diag(1 / (values.clamp(min=0) + 0.2)) @ turn.T
    torch.testing.assert_close(matrix @ matrix.T, expected)


def test_features_on_columns_that_are_never_seen_together_keep_the_first_of_them():
    x = normal(1, 20, 3)
    seen = torch.zeros(1, 20, 3, dtype=torch.bool)
    seen[0, :12, 0] = True
    seen[0, 12:, 1] = True  # the third column is never seen at all
    columns = columns_of(x, seen)
    subsets, landmarks, bandwidth = WhitenedFeatures(features=900)._choose(columns, torch.Generator().manual_seed(3))
    assert all(len(subset) == 1 for subset in subsets)
    assert {subset[0] for subset in subsets} == {0, 1, 2}
    for (column,), row in zip(subsets, landmarks, strict=True):
        assert column == 2 or seen[0, row, column]
    assert {row for (column,), row in zip(subsets, landmarks, strict=True) if column == 0} == set(range(12))
    assert {row for (column,), row in zip(subsets, landmarks, strict=True) if column == 2} == set(range(20))
    assert set(bandwidth.tolist()) == {0.5, 1.0, 2.0, 4.0}


def test_subsets_have_one_to_the_largest_number_of_columns():
    columns = columns_of(normal(1, 30, 6))
    subsets, landmarks, _ = WhitenedFeatures(features=300, largest_subset=3)._choose(columns, torch.Generator())
    assert {len(subset) for subset in subsets} == {1, 2, 3}
    assert all(subset == sorted(set(subset)) for subset in subsets)
    assert {column for subset in subsets for column in subset} == set(range(6))
    assert set(landmarks) == set(range(30))


def test_means_under_other_weights_are_over_the_rows_that_show_each_feature():
    x, seen = normal(1, 40, 3), torch.rand(1, 40, 3, generator=GENERATOR) < 0.7
    columns, features = columns_of(x, seen), WhitenedFeatures(features=25)
    fitted = features.fit(columns, torch.ones(1, 40).double())
    subsets, _, _ = features._choose(columns, torch.Generator().manual_seed(features.seed))
    weight = torch.rand(2, 40, generator=GENERATOR).double()
    found, values = fitted.mean_of(columns, weight), features_of(fitted, x)[0]
    for j, subset in enumerate(subsets):
        rows = seen[0][:, subset].all(-1)
        for r in range(2):
            expected = (weight[r, rows] * values[rows, j]).sum() / weight[r, rows].sum()
            assert found[r, j].item() == pytest.approx(expected.item(), rel=1e-10)


def test_kernels_of_categories_change_nothing_but_compare():
    k = torch.eye(3).double()[torch.randint(3, (1, 30), generator=GENERATOR)]
    column = FeatureColumn(k, torch.ones(1, 30).bool(), is_discrete=True)
    (kernel,) = WhitenedFeatures(features=10).fit([column], torch.ones(1, 30).double()).kernels
    assert (kernel.centre, kernel.spread, kernel.is_discrete, kernel.root) == (0.0, 1.0, True, False)
    assert kernel.bandwidths.tolist() == [1.0] * 10
    counts = FeatureColumn(torch.tensor([[[4.0], [9.0], [-1.0]]]).double(), torch.ones(1, 3).bool(), root=True)
    (kernel,) = WhitenedFeatures(features=10).fit([counts], torch.ones(1, 3).double()).kernels
    assert (kernel.centre, kernel.spread) == (2.0, 1.4826)  # of 2, 3 and 0: below zero counts as zero
    torch.testing.assert_close(kernel.transform(torch.tensor([[-5.0, 16.0]])), torch.tensor([[-2.0, 2.0]]) / 1.4826)


# -- products of kernels ----------------------------------------------------------------------------------------------

FACTORS = [torch.tensor([4, 0, 2, 7]), torch.tensor([1, 5, 3]), torch.tensor([6])]


def plainly(lines):
    first = lines[..., 4, :] * lines[..., 1, :] * lines[..., 6, :]
    return torch.stack(
        [first, lines[..., 0, :] * lines[..., 5, :], lines[..., 2, :] * lines[..., 3, :], lines[..., 7, :]], -2
    )


def lines_of(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_products_are_those_of_their_factors():
    lines = lines_of(2, 8, 5)
    before = lines.clone()
    torch.testing.assert_close(products_of_lines(lines, FACTORS), plainly(lines))
    assert torch.equal(lines, before)


def test_gradients_are_those_of_plain_multiplication():
    lines, weight = lines_of(2, 8, 5).requires_grad_(), lines_of(2, 4, 5)
    lines.data[0, 1, 2] = 0.0  # a factor of zero still has a gradient
    (found,) = torch.autograd.grad((products_of_lines(lines, FACTORS) * weight).sum(), lines)
    (expected,) = torch.autograd.grad((plainly(lines) * weight).sum(), lines)
    torch.testing.assert_close(found, expected)


def test_second_derivatives_are_right():
    lines = lines_of(8, 2).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: products_of_lines(x, FACTORS), (lines,))
