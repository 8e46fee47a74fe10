"""Rows replaced by outliers."""

import numpy as np
import pandas as pd
import pytest

from experiments.outliers import replace_rows

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame({"x": RNG.normal(size=500), "n": RNG.poisson(4.0, 500), "k": RNG.integers(0, 3, 500)})


@pytest.mark.parametrize("kind", ["box", "cluster"])
def test_a_share_of_the_rows_is_replaced_and_no_other(kind):
    spoilt, rows = replace_rows(FRAME, 0.1, kind, np.random.default_rng(1), categories=("k",))
    assert len(set(rows)) == 50
    kept = np.setdiff1d(np.arange(500), rows)
    pd.testing.assert_frame_equal(spoilt.iloc[kept], FRAME.iloc[kept])
    assert spoilt.dtypes.tolist() == FRAME.dtypes.tolist()
    assert set(spoilt["k"]) <= {0, 1, 2}
    assert (spoilt["n"] >= 0).all()


def test_a_box_is_five_ranges_wide_and_a_cluster_lies_beside_the_data():
    low, high = FRAME["x"].min(), FRAME["x"].max()
    middle, width = (low + high) / 2, high - low
    box, rows = replace_rows(FRAME[["x"]], 0.5, "box", np.random.default_rng(2))
    away = (box["x"].iloc[rows] - middle) / width
    assert away.abs().max() <= 2.5
    assert away.std() == pytest.approx(5 / 12**0.5, rel=0.1)
    cluster, rows = replace_rows(FRAME, 0.5, "cluster", np.random.default_rng(3), categories=("k",))
    away = (cluster["x"].iloc[rows] - middle) / width
    assert 1.0 <= abs(away.mean()) <= 1.5
    assert away.std() * width == pytest.approx(0.3 * FRAME["x"].std(), rel=0.1)
    assert cluster["k"].iloc[rows].nunique() == 1
